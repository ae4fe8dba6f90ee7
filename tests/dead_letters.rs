//! Real broker: what becomes of records that fail for good.

mod common;

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use common::{
    PATIENCE, Running, Seen, all_committed, committed, consumer, millis, store_under_test, until,
};
use reliable_consumer::{
    BuildError, Bytes, Classification, DeadLetter, DynError, ErrorMessage, HandlerResult, Json,
    Message, Ordering, Record as Raw, Retry, Text, header_names, permanent,
};
use reliable_consumer_testing::{Cluster, Record, StoredRecord, cluster, eventually, unique};

async fn refuse_all(_: &Message<Raw>) -> HandlerResult {
    Err(permanent("no thanks"))
}

/// Runs until the topic is committed, and returns what is in the dead-letter topic.
async fn dead_letters(
    cluster: &Cluster,
    group: &str,
    topic: &str,
    letters: &str,
    builder: reliable_consumer::Builder,
    handler: impl reliable_consumer::Handler<Raw>,
) -> Vec<StoredRecord> {
    let run = Running::start(builder, handler);
    all_committed(cluster, group, topic);
    run.stop().await;
    cluster.read_all(letters)
}

fn header<'a>(record: &'a StoredRecord, name: &str) -> &'a str {
    record
        .header(name)
        .unwrap_or_else(|| panic!("no header {name}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_tells_where_it_comes_from_and_why_it_failed() {
    let Some(cluster) = cluster() else { return };
    // The record is old: by the default retention it might be gone before it is read.
    let topic = cluster.create_topic("sign-ups", 3, &[("retention.ms", "-1")]);
    let group = unique("group");
    let letters = cluster.create_topic("letters", 2, &[]);
    cluster.produce(
        &topic,
        [Record::value("hello")
            .key("k")
            .partition(2)
            .timestamp(1_700_000_000_123)
            .header("trace", "abc")],
    );
    let handler = async |message: &Message<Raw>| -> HandlerResult {
        Err(format!("attempt {}", message.attempt()).into())
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .retry(Retry::fixed(millis(5)).max_attempts(3))
        .dead_letter(DeadLetter::topic(&letters));
    let found = dead_letters(&cluster, &group, &topic, &letters, builder, handler).await;
    let [letter] = &found[..] else {
        panic!("{found:?}")
    };
    assert_eq!(
        (letter.key.as_deref(), letter.value.as_deref()),
        (Some(&b"k"[..]), Some(&b"hello"[..]))
    );
    for (name, value) in [
        ("trace", "abc"),
        (header_names::RETRY_COUNT, "0"),
        (header_names::ORIGINAL_TOPIC, &topic),
        (header_names::ORIGINAL_PARTITION, "2"),
        (header_names::ORIGINAL_OFFSET, "0"),
        (header_names::ORIGINAL_TIMESTAMP, "1700000000123"),
        (
            header_names::MESSAGE_ID,
            &format!("{topic}/2/0/1700000000123"),
        ),
        (header_names::CONSUMER_GROUP, &group),
        (header_names::ATTEMPTS, "3"),
        (header_names::ERROR_KIND, "attempts-exhausted"),
        (header_names::ERROR_MESSAGE, "attempt 3"),
    ] {
        assert_eq!(header(letter, name), value, "{name}");
    }
    let failed_at: i64 = header(letter, header_names::FAILED_AT).parse().unwrap();
    assert!(
        (failed_at - letter.timestamp.unwrap()).abs() < 5_000,
        "sent with the current time (D2b)"
    );
}

// D2, D4
#[tokio::test(flavor = "multi_thread")]
async fn nulls_empties_and_hostile_headers_are_kept_byte_for_byte() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("hostile", 1, &[]), unique("group"));
    let letters = cluster.create_topic("letters", 1, &[]);
    let large = vec![0xab; 64 << 10];
    cluster.produce(
        &topic,
        [
            Record::tombstone(),
            Record::tombstone().key("k"),
            Record::value(""),
            Record::value("v").key(""),
            Record::value("v")
                .header(b"\xff\xfe".to_vec(), b"\x00\xff".to_vec())
                .header("again", "1")
                .header("again", "2")
                .null_header("null")
                .header("", "nameless")
                .header("large", large.clone()),
        ],
    );
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .ordering(Ordering::ByPartition)
        .dead_letter(DeadLetter::topic(&letters));
    let found = dead_letters(&cluster, &group, &topic, &letters, builder, refuse_all).await;
    let parts: Vec<_> = found
        .iter()
        .map(|letter| (letter.key.as_deref(), letter.value.as_deref()))
        .collect();
    let (k, v, empty) = (Some(&b"k"[..]), Some(&b"v"[..]), Some(&b""[..]));
    assert_eq!(
        parts,
        [
            (None, None),
            (k, None),
            (None, empty),
            (empty, v),
            (None, v)
        ]
    );
    let own: Vec<_> = found[4].headers.iter().take(6).cloned().collect();
    let sent: [(&[u8], Option<&[u8]>); 6] = [
        (b"\xff\xfe", Some(b"\x00\xff")),
        (b"again", Some(b"1")),
        (b"again", Some(b"2")),
        (b"null", None),
        (b"", Some(b"nameless")),
        (b"large", Some(&large)),
    ];
    let sent: Vec<_> = sent
        .iter()
        .map(|(name, value)| (name.to_vec(), value.map(<[u8]>::to_vec)))
        .collect();
    assert!(
        own == sent,
        "the record's own headers come first and unchanged"
    );
}

// D5, D7
#[tokio::test(flavor = "multi_thread")]
async fn while_the_dead_letter_topic_is_missing_its_records_stay_uncommitted_and_it_shows() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("blocked", 1, &[]), unique("group"));
    let letters = unique("letters");
    cluster.produce(&topic, (0..20).map(|n| Record::value(n.to_string())));
    let handler = async |message: &Message<Text>| -> HandlerResult {
        if message.offset() == 3 {
            Err(permanent("poison"))
        } else {
            Ok(())
        }
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .ordering(Ordering::Unordered)
        .dead_letter(DeadLetter::topic(&letters));
    let run = Running::start(builder, handler);
    let handle = run.handle.clone();
    let mut stalled = Vec::new();
    for _ in 0..200 {
        stalled = handle.status().await.unwrap().stalled_dead_letters;
        if !stalled.is_empty() {
            break;
        }
        tokio::time::sleep(millis(100)).await;
    }
    assert_eq!(
        (stalled[0].topic.as_str(), stalled[0].records),
        (letters.as_str(), 1)
    );
    let partition = handle.status().await.unwrap().partitions.remove(0);
    assert_eq!(
        (partition.dead_lettering, partition.finished_out_of_order),
        (1, 16)
    );
    assert_eq!(committed(&cluster, &group, &topic), [3]);
    cluster.create_topic_named(&letters, 1, &[]);
    all_committed(&cluster, &group, &topic);
    assert_eq!(handle.status().await.unwrap().stalled_dead_letters, []);
    let report = run.stop().await;
    assert_eq!((report.handled, report.dead_lettered), (19, 1));
    assert_eq!(cluster.read_all(&letters).len(), 1);
}

// D5: a topic that is there and refuses for a minute, ten times as fast.
#[tokio::test(flavor = "multi_thread")]
async fn while_the_dead_letter_topic_refuses_healthy_records_go_on_and_each_letter_comes_once_when_it_does_not()
 {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("refused", 2, &[]), unique("group"));
    // A compacted topic takes no record without a key.
    let letters = cluster.create_topic("letters", 1, &[("cleanup.policy", "compact")]);
    let handled: Seen = Seen::default();
    let seen = handled.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        if message.payload().ends_with('7') {
            return Err(permanent("poison"));
        }
        seen.note(message.offset());
        Ok(())
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .ordering(Ordering::Unordered)
        .dead_letter(DeadLetter::topic(&letters));
    let run = Running::start(builder, handler);
    let numbered = |from: usize| (from..from + 20).map(|n| Record::value(n.to_string()));
    let shown = async || {
        let stalled = run.handle.status().await.unwrap().stalled_dead_letters;
        stalled.iter().map(|it| it.records).sum::<usize>()
    };
    for round in 0..6 {
        cluster.produce(&topic, numbered(20 * round));
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    until("the others to be handled", || handled.len() == 108).await;
    let deadline = Instant::now() + PATIENCE;
    while shown().await != 12 {
        assert!(Instant::now() < deadline, "it shows how many wait");
        tokio::time::sleep(millis(50)).await;
    }
    assert!(cluster.read_all(&letters).is_empty());
    let open = committed(&cluster, &group, &topic).iter().sum::<i64>();
    assert!(open < 120, "{open} are committed");

    cluster.set_topic(&letters, "cleanup.policy", "delete");
    all_committed(&cluster, &group, &topic);
    let report = run.stop().await;
    assert_eq!((report.handled, report.dead_lettered), (108, 12));
    let mut values: Vec<_> = cluster
        .read_all(&letters)
        .iter()
        .map(|it| it.text().to_owned())
        .collect();
    values.sort_unstable();
    values.dedup();
    assert_eq!(
        (values.len(), cluster.end_offsets(&letters)),
        (12, vec![12])
    );
}

// D1
#[tokio::test(flavor = "multi_thread")]
async fn two_records_of_a_partition_that_fail_at_once_are_both_tried_again_and_neither_is_lost() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("twice", 1, &[]), unique("group"));
    cluster.produce(&topic, (0..10).map(|n| Record::value(n.to_string())));
    let calls: Seen<(i64, u32)> = Seen::default();
    let seen = calls.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        seen.note((message.offset(), message.attempt()));
        match (message.offset(), message.attempt()) {
            (3 | 7, 1 | 2) => Err("not yet".into()),
            _ => Ok(()),
        }
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .ordering(Ordering::Unordered)
        .retry(Retry::fixed(millis(50)).max_attempts(3));
    let run = Running::start(builder, handler);
    all_committed(&cluster, &group, &topic);
    let report = run.stop().await;
    assert_eq!((report.handled, report.retried), (10, 4));
    let mut calls = calls.all();
    calls.sort_unstable();
    let twice = |offset| [(offset, 1), (offset, 2), (offset, 3)];
    assert_eq!(calls.len(), 14, "{calls:?}");
    for offset in [3, 7] {
        assert!(
            twice(offset).iter().all(|call| calls.contains(call)),
            "{calls:?}"
        );
    }
}

// D11
#[tokio::test(flavor = "multi_thread")]
async fn a_retry_that_waits_longer_than_the_poll_interval_costs_no_membership_and_holds_up_nobody()
{
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("patient", 1, &[]), unique("group"));
    let of = |key: &str, value: &str| Record::value(value).key(key);
    cluster.produce(&topic, [of("a", "fails once"), of("b", "fine")]);
    let calls: Seen<(String, u32)> = Seen::default();
    let seen = calls.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        seen.note((message.payload().to_string(), message.attempt()));
        match (&**message.payload(), message.attempt()) {
            ("fails once", 1) => Err("not yet".into()),
            _ => Ok(()),
        }
    };
    let changes = common::Changes::default();
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .rebalance_listener(changes.clone())
        .property("max.poll.interval.ms", "6000")
        .retry(Retry::fixed(Duration::from_secs(10)).max_attempts(2));
    let run = Running::start(builder, handler);
    until("the other key", || calls.len() == 2).await;
    tokio::time::sleep(Duration::from_secs(7)).await;
    cluster.produce(&topic, [of("b", "fine too")]);
    until("it as well", || calls.len() >= 3).await;
    assert_eq!(calls.all()[2], ("fine too".into(), 1), "before the retry");
    all_committed(&cluster, &group, &topic);
    assert_eq!(changes.count(), 1, "it kept its partition");
    assert_eq!(calls.all()[3], ("fails once".into(), 2));
    run.stop().await;
}

// D6
#[tokio::test(flavor = "multi_thread")]
async fn a_letter_that_is_too_large_loses_its_diagnostics_first_and_blocks_visibly_after_that() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("large", 1, &[]), unique("group"));
    let letters = cluster.create_topic("letters", 1, &[("max.message.bytes", "2000")]);
    cluster.produce(
        &topic,
        [
            Record::value(vec![b'x'; 1_300]),
            Record::value(vec![b'y'; 3_000]),
        ],
    );
    let handler =
        async |_: &Message<Bytes>| -> HandlerResult { Err(permanent("why ".repeat(200))) };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .dead_letter(DeadLetter::topic(&letters));
    let run = Running::start(builder, handler);
    until("the first to be committed", || {
        committed(&cluster, &group, &topic) == [1]
    })
    .await;
    let handle = run.handle.clone();
    let mut stalled = Vec::new();
    for _ in 0..100 {
        stalled = handle.status().await.unwrap().stalled_dead_letters;
        if !stalled.is_empty() {
            break;
        }
        tokio::time::sleep(millis(100)).await;
    }
    assert!(stalled[0].error.contains(&letters), "{stalled:?}");
    let found = cluster.read_all(&letters);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].value.as_ref().unwrap().len(), 1_300);
    assert_eq!(found[0].header(header_names::ERROR_MESSAGE), None);
    assert_eq!(header(&found[0], header_names::ORIGINAL_TOPIC), topic);
    run.handle.stop_now().unwrap();
    let report = run.ended().await.unwrap();
    assert_eq!(report.dead_lettered, 1);
    assert_eq!(
        committed(&cluster, &group, &topic),
        [1],
        "what could not be dead-lettered is not lost"
    );
}

// D6: the broker refuses the whole batch.
#[tokio::test(flavor = "multi_thread")]
async fn a_letter_that_the_broker_calls_invalid_is_named_and_blocks_none_of_those_sent_with_it() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("invalid", 1, &[]), unique("group"));
    // A compacted topic takes no record without a key.
    let letters = cluster.create_topic("letters", 1, &[("cleanup.policy", "compact")]);
    cluster.produce(
        &topic,
        (0..10).map(|n| match n {
            5 => Record::value("5"),
            _ => Record::value(n.to_string()).key(n.to_string()),
        }),
    );
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .ordering(Ordering::Unordered)
        // All of them share a batch.
        .dead_letter(DeadLetter::topic(&letters).property("linger.ms", "1000"));
    let run = Running::start(builder, refuse_all);
    until("all but the invalid one to be there", || {
        cluster.end_offsets(&letters) == [9]
    })
    .await;
    until("those before it to be committed", || {
        committed(&cluster, &group, &topic) == [5]
    })
    .await;
    let deadline = Instant::now() + PATIENCE;
    let stalled = loop {
        let status = run.handle.status().await.unwrap();
        match &status.stalled_dead_letters[..] {
            [stalled] if stalled.records == 1 => break stalled.error.clone(),
            other => assert!(Instant::now() < deadline, "it shows alone: {other:?}"),
        }
        tokio::time::sleep(millis(50)).await;
    };
    let record = format!("{topic}/0/5");
    for named in [&*record, &letters, "no key", "cleanup.policy"] {
        assert!(stalled.contains(named), "{named}: {stalled}");
    }

    cluster.set_topic(&letters, "cleanup.policy", "delete");
    all_committed(&cluster, &group, &topic);
    assert_eq!(run.stop().await.dead_lettered, 10);
    let there = cluster.read_all(&letters);
    let mut values: Vec<_> = there.iter().map(StoredRecord::text).collect();
    assert_eq!(values.pop(), Some("5"));
    values.sort_unstable();
    assert_eq!(values, ["0", "1", "2", "3", "4", "6", "7", "8", "9"]);
}

// D8
#[test]
fn a_dead_letter_topic_that_is_consumed_is_refused_at_build() {
    let refused = |builder: reliable_consumer::Builder| {
        let builder = builder.bootstrap_servers("localhost:1").group_id("g");
        let error = builder
            .dead_letter(DeadLetter::topic("orders.dlq"))
            .build()
            .unwrap_err();
        assert!(
            matches!(error, BuildError::DeadLetterTopicConsumed { .. }),
            "{error}"
        );
        assert!(error.to_string().contains("orders.dlq"));
    };
    let builder = reliable_consumer::ReliableConsumer::builder;
    refused(builder().topic("orders").topic("orders.dlq"));
    refused(builder().topic_pattern("orders.*"));
    refused(builder().topic_pattern("^.*dlq$"));
}

// D9
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_topic_may_have_fewer_partitions_and_keeps_each_keys_order() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("wide", 6, &[]), unique("group"));
    let letters = cluster.create_topic("narrow", 2, &[]);
    cluster.produce(
        &topic,
        (0..300).map(|n| Record::value(n.to_string()).key(format!("k{}", n % 10))),
    );
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .dead_letter(DeadLetter::topic(&letters));
    let found = dead_letters(&cluster, &group, &topic, &letters, builder, refuse_all).await;
    assert_eq!(found.len(), 300);
    let mut last: HashMap<_, (i32, usize)> = HashMap::new();
    for letter in &found {
        let number: usize = letter.text().parse().unwrap();
        if let Some((partition, before)) =
            last.insert(letter.key.clone(), (letter.partition, number))
        {
            assert!(before < number && partition == letter.partition);
        }
    }
}

// D12, D13
#[tokio::test(flavor = "multi_thread")]
async fn each_kind_of_failure_is_named() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("kinds", 1, &[]), unique("group"));
    let letters = cluster.create_topic("letters", 1, &[]);
    let values =
        ["panic", "hang", "fail", "final", "fine"].map(|value| Record::value(format!("{value:?}")));
    cluster.produce(
        &topic,
        values
            .into_iter()
            .chain([Record::value("no json"), Record::tombstone()]),
    );
    let seen = Seen::<String>::default();
    let noted = seen.clone();
    let handler = async move |message: &Message<Json<String>>| -> HandlerResult {
        noted.note(message.payload().to_string());
        match message.payload().as_str() {
            "panic" => panic!("of the handler"),
            "hang" => std::future::pending().await,
            "fail" => Err("again and again".into()),
            "final" => Err(permanent("no")),
            _ => Ok(()),
        }
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .handler_timeout(millis(50))
        .retry(Retry::fixed(millis(5)).max_attempts(2))
        .dead_letter(DeadLetter::topic(&letters));
    let run = Running::start(builder, handler);
    all_committed(&cluster, &group, &topic);
    run.stop().await;
    let found: HashMap<String, _> = cluster
        .read_all(&letters)
        .iter()
        .map(|letter| {
            let value = letter
                .value
                .as_ref()
                .map(|value| String::from_utf8_lossy(value).into_owned());
            let told = |name| header(letter, name).to_owned();
            let why = (
                told(header_names::ERROR_KIND),
                told(header_names::ATTEMPTS),
                told(header_names::ERROR_MESSAGE),
            );
            (value.unwrap_or_default(), why)
        })
        .collect();
    assert_eq!(found.len(), 6);
    for (value, kind, attempts, message) in [
        ("\"panic\"", "panic", "2", "of the handler"),
        ("\"hang\"", "timeout", "2", "50 ms"),
        ("\"fail\"", "attempts-exhausted", "2", "again and again"),
        ("\"final\"", "permanent", "1", "no"),
        ("no json", "undecodable", "0", "line 1"),
        ("", "undecodable", "0", "tombstone"),
    ] {
        let why = &found[value];
        assert_eq!(
            (why.0.as_str(), why.1.as_str()),
            (kind, attempts),
            "{value}"
        );
        assert!(why.2.contains(message), "{value}: {}", why.2);
    }
    assert_eq!(
        seen.all().iter().filter(|value| *value == "fail").count(),
        2
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_classifier_may_choose_the_topic_and_a_message_may_be_redacted() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("chosen", 1, &[]), unique("group"));
    let (letters, urgent) = (
        cluster.create_topic("letters", 1, &[]),
        cluster.create_topic("urgent", 1, &[]),
    );
    cluster.produce(&topic, (0..10).map(|n| Record::value(n.to_string())));
    let handler = async |message: &Message<Raw>| -> HandlerResult {
        Err(format!("card 1234-{}", message.offset()).into())
    };
    let (chosen, itself) = (urgent.clone(), topic.clone());
    let classifier = move |_: &DynError, record: &Raw| match record.offset() {
        0 => Classification::permanent().dead_letter_topic(&*chosen),
        // A topic that is consumed: refused, or the record would come back for ever.
        1 => Classification::permanent().dead_letter_topic(&*itself),
        _ => Classification::permanent(),
    };
    let redact = ErrorMessage::Redacted(std::sync::Arc::new(|text| text.replace("1234", "****")));
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .classifier(classifier)
        .dead_letter(DeadLetter::topic(&letters).error_message(redact));
    let found = dead_letters(&cluster, &group, &topic, &letters, builder, handler).await;
    assert_eq!(found.len(), 9);
    assert!(
        found
            .iter()
            .all(|letter| header(letter, header_names::ERROR_MESSAGE).starts_with("card ****-"))
    );
    let urgent = cluster.read_all(&urgent);
    assert_eq!((urgent.len(), urgent[0].text()), (1, "0"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_on_its_second_trip_keeps_its_identity_and_its_count() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("trips", 1, &[]), unique("group"));
    let letters = cluster.create_topic("letters", 1, &[]);
    let origin = |record: Record| {
        record
            .header(header_names::ORIGINAL_TOPIC, "first")
            .header(header_names::ORIGINAL_PARTITION, "7")
            .header(header_names::ORIGINAL_OFFSET, "42")
            .header(header_names::ORIGINAL_TIMESTAMP, "1600000000000")
    };
    cluster.produce(
        &topic,
        [
            origin(Record::value("a"))
                .header(header_names::RETRY_COUNT, "2")
                .header(header_names::MESSAGE_ID, "m-1"),
            origin(Record::value("b")).header(header_names::ERROR_MESSAGE, "older"),
            Record::value("c")
                .header(header_names::RETRY_COUNT, "-1")
                .header(header_names::ORIGINAL_TOPIC, "alone"),
        ],
    );
    let seen = Seen::<(u32, String)>::default();
    let noted = seen.clone();
    let handler = async move |message: &Message<Raw>| -> HandlerResult {
        noted.note((message.retry_count(), message.message_id()));
        Err(permanent("newer"))
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .ordering(Ordering::ByPartition)
        .dead_letter(DeadLetter::topic(&letters));
    let found = dead_letters(&cluster, &group, &topic, &letters, builder, handler).await;
    let told = |at: usize, name| header(&found[at], name).to_owned();
    assert_eq!(
        (
            told(0, header_names::RETRY_COUNT),
            told(0, header_names::MESSAGE_ID)
        ),
        ("2".into(), "m-1".into())
    );
    assert_eq!(
        told(1, header_names::MESSAGE_ID),
        "first/7/42/1600000000000"
    );
    assert_eq!(told(1, header_names::ERROR_MESSAGE), "newer");
    assert_eq!(told(2, header_names::RETRY_COUNT), "0");
    assert_eq!(
        told(2, header_names::ORIGINAL_TOPIC),
        topic,
        "an origin that is not whole counts for nothing"
    );
    let ids = seen.all();
    assert_eq!(ids[0], (2, "m-1".into()));
    assert_eq!(ids[1], (0, "first/7/42/1600000000000".into()));
    for letter in &found {
        let names: Vec<_> = letter
            .headers
            .iter()
            .map(|(name, _)| name.clone())
            .collect();
        let mut once = names.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!(names.len(), once.len(), "no header of ours stands twice");
    }
}

// D14, at a real broker: poison under traffic.
#[tokio::test(flavor = "multi_thread")]
async fn poison_does_not_clog_the_flow() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("poison", 2, &[]), unique("group"));
    let letters = cluster.create_topic("letters", 2, &[]);
    cluster.produce(
        &topic,
        (0..4_000).map(|n| Record::value(n.to_string()).key(n.to_string())),
    );
    let handler = async |message: &Message<Text>| -> HandlerResult {
        let number: usize = message.payload().parse()?;
        if number.is_multiple_of(20) {
            Err("poison".into())
        } else {
            Ok(())
        }
    };
    // As long as the healthy ones need, with a store that is asked twice for each.
    let wait = Duration::from_secs(if store_under_test().is_some() { 4 } else { 1 });
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .concurrency(8)
        .retry(Retry::fixed(wait).max_attempts(3))
        .dead_letter(DeadLetter::topic(&letters));
    let run = Running::start(builder, handler);
    let handle = run.handle.clone();
    let mut held = 0;
    let began = Instant::now();
    while began.elapsed() < wait * 2 {
        held = handle
            .status()
            .await
            .unwrap()
            .partitions
            .iter()
            .map(|partition| partition.finished_out_of_order)
            .sum();
        if held >= 3_500 {
            break;
        }
        tokio::time::sleep(millis(20)).await;
    }
    assert!(
        held >= 3_500,
        "healthy records went ahead of 200 that wait for their retries: {held}"
    );
    all_committed(&cluster, &group, &topic);
    let report = run.stop().await;
    assert_eq!(
        (report.handled, report.dead_lettered, report.retried),
        (3_800, 200, 400)
    );
    eventually("all letters", PATIENCE, || {
        cluster.read_all(&letters).len() == 200
    });
}
