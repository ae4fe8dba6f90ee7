//! The support crate against a real broker: a test bed that lies would hide what the tests look for.

use std::time::{Duration, Instant};

use reliable_consumer_testing::{Record, cluster, eventually, own_cluster, unique};

#[test]
fn records_come_back_byte_for_byte() {
    let Some(cluster) = cluster() else { return };
    let topic = cluster.create_topic("bytes", 2, &[("retention.ms", "-1")]);
    cluster.produce(
        &topic,
        [
            Record::value("a").key("k").partition(1).timestamp(1_000),
            Record::tombstone()
                .partition(1)
                .header(b"\xff\xfe", b"\x00\x80")
                .header("same", "1")
                .header("same", "2")
                .null_header("null"),
            Record::value("").key("").partition(0),
        ],
    );

    let records = cluster.read_all(&topic);

    assert_eq!(cluster.end_offsets(&topic), [1, 2]);
    let [empty, plain, tombstone] = &records[..] else {
        panic!("three records, not {records:?}")
    };
    assert_eq!((empty.partition, empty.offset), (0, 0));
    assert_eq!(
        (empty.key.as_deref(), empty.value.as_deref()),
        (Some(&b""[..]), Some(&b""[..]))
    );
    assert_eq!((plain.text(), plain.timestamp), ("a", Some(1_000)));
    assert_eq!((&tombstone.key, &tombstone.value), (&None, &None));
    assert_eq!(
        tombstone.headers,
        [
            (b"\xff\xfe".to_vec(), Some(b"\x00\x80".to_vec())),
            (b"same".to_vec(), Some(b"1".to_vec())),
            (b"same".to_vec(), Some(b"2".to_vec())),
            (b"null".to_vec(), None),
        ]
    );
    assert_eq!(tombstone.header("same"), Some("2"));
}

#[test]
fn a_large_topic_is_written_and_read_whole() {
    let Some(cluster) = cluster() else { return };
    let topic = cluster.create_topic("large", 4, &[]);
    let start = Instant::now();
    cluster.produce(
        &topic,
        (0..300_000).map(|n| Record::value(vec![b'x'; 100]).key(format!("{}", n % 1000))),
    );
    println!("written in {:?}", start.elapsed());
    let records = cluster.read_all(&topic);
    println!("written and read in {:?}", start.elapsed());
    assert_eq!(records.len(), 300_000);
    assert_eq!(cluster.end_offsets(&topic).iter().sum::<i64>(), 300_000);
}

#[test]
fn committed_offsets_and_their_metadata_are_seen() {
    let Some(cluster) = cluster() else { return };
    let topic = cluster.create_topic("committed", 2, &[]);
    let group = unique("group");
    cluster.commit(&group, &topic, 1, 7, "noted");

    let committed = cluster.committed(&group, &topic);

    assert_eq!(
        (committed[0].offset, committed[0].metadata.as_str()),
        (None, "")
    );
    assert_eq!(
        (committed[1].offset, committed[1].metadata.as_str()),
        (Some(7), "noted")
    );
}

#[test]
fn deleted_records_are_gone_and_the_end_stays() {
    let Some(cluster) = cluster() else { return };
    let topic = cluster.create_topic("deleted", 1, &[]);
    cluster.produce(&topic, ["a", "b", "c"].map(Record::value));
    cluster.delete_records(&topic, 0, 2);

    let records = cluster.read_all(&topic);

    assert_eq!(records.iter().map(|r| r.offset).collect::<Vec<_>>(), [2]);
    assert_eq!(cluster.end_offsets(&topic), [3]);
    cluster.delete_topic(&topic);
}

#[test]
fn records_older_than_the_retention_vanish_within_seconds() {
    let Some(cluster) = own_cluster(1) else {
        return;
    };
    let topic = cluster.create_topic("old", 1, &[]);
    cluster.produce(&topic, [Record::value("old").timestamp(1_000)]);
    eventually("retention", Duration::from_secs(20), || {
        cluster.read_all(&topic).is_empty()
    });
}

#[test]
fn a_killed_broker_comes_back_with_its_data() {
    let Some(cluster) = own_cluster(3) else {
        return;
    };
    let topic = cluster.create_topic("outage", 3, &[]);
    cluster.kill([2]);
    cluster.produce(&topic, (0..30).map(|n| Record::value("x").partition(n % 3)));
    cluster.restart([2]);
    cluster.wait_in_sync(&topic);
    cluster.kill([1, 2, 3]);
    cluster.restart([1, 2, 3]);
    // A leader that starts anew shows consumers what its followers have confirmed since: all of it once they have.
    eventually(
        "the followers to confirm what was there",
        Duration::from_secs(30),
        || cluster.end_offsets(&topic) == [10, 10, 10],
    );
    assert_eq!(cluster.read_all(&topic).len(), 30);
}
