//! Real broker: memory stays within its bounds, whatever is stuck, and partitions share it.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use common::{PATIENCE, Running, Seen, all_committed, consumer, millis, until};
use reliable_consumer::{HandlerResult, Message, Ordering, Record as Raw, Text};
use reliable_consumer_testing::{Record, cluster, unique};
use tokio::sync::watch;

const MIB: usize = 1 << 20;

/// What the process has in memory.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<usize>().ok());
    kib.unwrap_or(0) * 1024
}

/// One test at a time: they look at the memory of the whole process.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

// R12
#[tokio::test(flavor = "multi_thread")]
async fn a_stuck_key_keeps_neither_memory_nor_speed_from_other_partitions() {
    const EACH: usize = 1_000;
    const SIZE: usize = 20_000;
    let Some(cluster) = cluster() else { return };
    let _alone = ALONE.lock().await;
    let topic = cluster.create_topic("large", 8, &[]);
    for partition in 0..8 {
        let record = |n: usize| {
            let key = if partition > 0 || n % 10 == 1 {
                format!("k{n}")
            } else {
                "stuck".into()
            };
            let mut value = vec![0; SIZE];
            value[..8].copy_from_slice(&n.to_be_bytes());
            Record::value(value).partition(partition).key(key)
        };
        cluster.produce(&topic, (0..EACH).map(record));
    }
    let (open, gate) = watch::channel(true);
    let start = |ordering, group: &str, seen: &Seen<(i32, i64)>| {
        let (seen, gate) = (seen.clone(), gate.clone());
        let handler = async move |message: &Message<Raw>| -> HandlerResult {
            if message.partition() == 0 && message.key_str() == Some("stuck") {
                gate.clone().wait_for(|open| *open).await?;
            }
            tokio::time::sleep(millis(10)).await;
            seen.note((message.partition(), message.offset()));
            Ok(())
        };
        let builder = consumer(&cluster, group)
            .topic(&topic)
            .ordering(ordering)
            .concurrency(64)
            .max_bytes(8 * MIB)
            .max_prefetch_bytes(16 * MIB);
        Running::start(builder, handler)
    };
    let others = |seen: &Seen<(i32, i64)>| {
        let places = seen.all().into_iter();
        places.filter(|(partition, _)| *partition != 0).count()
    };

    // How long it takes when nothing waits for anything.
    let (group, seen) = (unique("group"), Seen::default());
    let run = start(Ordering::Unordered, &group, &seen);
    let mut began = None;
    until("the others without anything stuck", || {
        if seen.len() > 0 {
            began.get_or_insert_with(Instant::now);
        }
        others(&seen) == 7 * EACH
    })
    .await;
    let usual = began.unwrap().elapsed();
    run.stop().await;

    open.send(false).unwrap();
    let (group, seen) = (unique("group"), Seen::default());
    let before = resident();
    let run = start(Ordering::ByKey, &group, &seen);
    let (mut began, mut most, mut took) = (Instant::now(), 0, None);
    let mut paused = false;
    while !paused || took.is_none() {
        assert!(
            began.elapsed() < PATIENCE,
            "{} of the others were handled, paused: {paused}",
            others(&seen)
        );
        tokio::time::sleep(millis(20)).await;
        if seen.len() == 0 {
            began = Instant::now();
        }
        if others(&seen) == 7 * EACH {
            took.get_or_insert_with(|| began.elapsed());
        }
        most = most.max(resident());
        let status = run.handle.status().await.unwrap();
        let one_each = 8 * (SIZE + 200);
        assert!(status.bytes <= 8 * MIB + one_each, "{}", status.bytes);
        assert!(
            status.resident_bytes <= 16 * MIB + one_each + MIB,
            "{}",
            status.resident_bytes
        );
        assert!(
            status.prefetched_bytes <= 16 * MIB,
            "{}",
            status.prefetched_bytes
        );
        let stuck = status.partitions.first();
        paused |= stuck.is_some_and(|stuck| stuck.fetch_paused);
        assert!(
            !status.partitions.iter().skip(1).any(|p| p.fetch_paused),
            "the others are read"
        );
    }
    let took = took.unwrap();
    assert!(
        took < 3 * usual / 2 + millis(500),
        "{took:?}, without a stuck key {usual:?}"
    );
    let grown = most.saturating_sub(before);
    // Batches, what was read ahead, an answer on its way for each broker, spare buffers, and the allocator's own.
    assert!(grown < (16 + 16 + 2 + 4 + 24) * MIB, "{} MiB", grown / MIB);

    open.send(true).unwrap();
    all_committed(&cluster, &group, &topic);
    run.stop().await;
    let mut places = seen.all();
    let stuck: Vec<_> = places
        .iter()
        .filter(|(partition, offset)| *partition == 0 && offset % 10 != 1)
        .collect();
    assert!(stuck.is_sorted(), "the key's order is kept");
    places.sort_unstable();
    places.dedup();
    assert_eq!((seen.len(), places.len()), (8 * EACH, 8 * EACH));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_read_ahead_of_many_partitions_is_bounded_and_all_of_it_is_handled_once() {
    const PARTITIONS: i32 = 48;
    const EACH: usize = 1_000;
    let Some(cluster) = cluster() else { return };
    let _alone = ALONE.lock().await;
    let (topic, group) = (
        cluster.create_topic("many", PARTITIONS, &[]),
        unique("group"),
    );
    for partition in 0..PARTITIONS {
        let record = |_| Record::value(vec![b'x'; 2_000]).partition(partition);
        cluster.produce(&topic, (0..EACH).map(record));
    }
    let (open, gate) = watch::channel(false);
    let seen = Seen::<(i32, i64)>::default();
    let noted = seen.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        gate.clone().wait_for(|open| *open).await?;
        noted.note((message.partition(), message.offset()));
        Ok(())
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .ordering(Ordering::ByPartition)
        .concurrency(8)
        .max_bytes(2 * MIB)
        .max_prefetch_bytes(8 * MIB);
    let before = resident();
    let run = Running::start(builder, handler);
    let limit = Instant::now() + Duration::from_secs(10);
    let mut most = 0;
    while Instant::now() < limit {
        tokio::time::sleep(millis(50)).await;
        most = most.max(resident());
    }
    let status = run.handle.status().await.unwrap();
    assert_eq!(status.partitions.len(), PARTITIONS as usize);
    assert!(
        status.partitions.iter().filter(|p| p.fetch_paused).count() > 30,
        "nothing is read: {status:?}"
    );
    assert!(status.prefetched_bytes <= 8 * MIB);
    // Ninety-six megabytes are there to be read ahead. What comes between two looks is on top of the limit.
    let grown = most.saturating_sub(before);
    assert!(grown < 64 * MIB, "{} MiB", grown / MIB);

    open.send(true).unwrap();
    let began = Instant::now();
    let mut last = HashMap::new();
    while seen.len() < PARTITIONS as usize * EACH {
        assert!(
            began.elapsed() < 4 * PATIENCE,
            "{} were handled",
            seen.len()
        );
        tokio::time::sleep(millis(100)).await;
    }
    all_committed(&cluster, &group, &topic);
    run.stop().await;
    let places = seen.all();
    assert_eq!(places.len(), PARTITIONS as usize * EACH, "none twice");
    for (partition, offset) in places {
        let next = last.entry(partition).or_insert(0);
        assert_eq!(offset, *next, "partition {partition} in order");
        *next += 1;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_was_paused_in_the_client_goes_on_after_it_was_away() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("away", 2, &[]), unique("group"));
    cluster.produce(
        &topic,
        (0..100).map(|n| Record::value("x").partition(n % 2)),
    );
    let seen = Seen::<(i32, i64)>::default();
    let builder = || {
        consumer(&cluster, &group)
            .topic(&topic)
            .ordering(Ordering::ByPartition)
    };
    let noting = || {
        let seen = seen.clone();
        async move |message: &Message<Text>| -> HandlerResult {
            seen.note((message.partition(), message.offset()));
            Ok(())
        }
    };
    let first = Running::start(builder(), noting());
    all_committed(&cluster, &group, &topic);
    first.handle.pause(&*topic).unwrap();
    cluster.produce(
        &topic,
        (0..100).map(|n| Record::value("x").partition(n % 2)),
    );
    let both_paused = async |run: &Running, owned: usize| {
        let began = Instant::now();
        loop {
            let status = run.handle.status().await.unwrap();
            if status.partitions.len() == owned && status.partitions.iter().all(|p| p.fetch_paused)
            {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "{status:?}");
            tokio::time::sleep(millis(50)).await;
        }
    };
    both_paused(&first, 2).await;
    let second = Running::start(builder(), noting());
    until("the second one's partition", || seen.len() >= 150).await;
    // While it is away, whatever it was paused for ends.
    first.handle.resume(&*topic).unwrap();
    second.stop().await;
    cluster.produce(
        &topic,
        (0..100).map(|n| Record::value("x").partition(n % 2)),
    );
    all_committed(&cluster, &group, &topic);
    first.stop().await;
    let mut places = seen.all();
    places.sort_unstable();
    places.dedup();
    assert_eq!((seen.len(), places.len()), (300, 300));
}

/// Far more of them fit into the budget than there are handlers.
#[tokio::test(flavor = "multi_thread")]
async fn large_records_run_side_by_side_as_smaller_ones_do() {
    const COUNT: usize = 240;
    let Some(cluster) = cluster() else { return };
    let _alone = ALONE.lock().await;
    let mut took = Vec::new();
    for size in [450_000, 700_000] {
        let topic = cluster.create_topic("sized", 4, &[]);
        for partition in 0..4 {
            let record = |_| Record::value(vec![0; size]).partition(partition);
            cluster.produce(&topic, (0..COUNT / 4).map(record));
        }
        let seen = Seen::<Instant>::default();
        let noted = seen.clone();
        let handler = async move |_: &Message<Raw>| -> HandlerResult {
            noted.note(Instant::now());
            tokio::time::sleep(millis(200)).await;
            Ok(())
        };
        let group = unique("group");
        let builder = consumer(&cluster, &group)
            .topic(&topic)
            .ordering(Ordering::Unordered)
            .concurrency(64);
        let run = Running::start(builder, handler);
        until("all records", || seen.len() == COUNT).await;
        run.stop().await;
        let starts = seen.all();
        took.push(*starts.last().unwrap() - starts[0]);
    }
    assert!(
        took[1] <= 2 * took[0] + millis(200),
        "of 450 kB each {:?}, of 700 kB {:?}",
        took[0],
        took[1]
    );
}
