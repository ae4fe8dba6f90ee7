//! Real brokers that go away. Each test has a cluster of its own, which it may kill.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering as Atomic},
    },
    time::{Duration, Instant},
};

use common::{PATIENCE, Running, Seen, all_committed, committed, consumer, millis, until};
use reliable_consumer::{Event, HandlerResult, Message, Ordering, ReliableConsumer, Text};
use reliable_consumer_testing::{Record, eventually, own_cluster, unique};

fn numbered(from: usize, count: usize) -> impl Iterator<Item = Record> {
    (from..from + count).map(|n| Record::value(n.to_string()).key(format!("k{}", n % 50)))
}

/// The only broker is away for 20 s in the middle of work. Returns how often the partitions were lost, and how many
/// records were handled twice.
async fn live_through_an_outage(session_timeout: &str) -> Option<(usize, usize)> {
    let cluster = own_cluster(1)?;
    let (topic, group) = (cluster.create_topic("outage", 4, &[]), unique("group"));
    cluster.produce(&topic, numbered(0, 20_000));
    let seen = Seen::<(i32, i64)>::default();
    let noted = seen.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        tokio::time::sleep(millis(5)).await;
        noted.note((message.partition(), message.offset()));
        Ok(())
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .concurrency(CONCURRENCY)
        .property("session.timeout.ms", session_timeout);
    let run = Running::start(builder, handler);
    let mut events = run.handle.events().unwrap();
    until("some work", || seen.len() > 2_000).await;
    tokio::task::block_in_place(|| cluster.kill([1]));
    tokio::time::sleep(Duration::from_secs(20)).await;
    let status = run.handle.status().await.unwrap();
    assert!(
        status
            .brokers_down
            .is_some_and(|down| down >= Duration::from_secs(10)),
        "{status:?}"
    );
    tokio::task::block_in_place(|| cluster.restart([1]));
    cluster.produce(&topic, numbered(20_000, 1_000));
    let began = Instant::now();
    while committed(&cluster, &group, &topic) != cluster.end_offsets(&topic) {
        let waited = began.elapsed();
        assert!(
            waited < 2 * PATIENCE,
            "not committed {waited:?} after the broker came back"
        );
        tokio::time::sleep(millis(100)).await;
    }
    let status = run.handle.status().await.unwrap();
    assert_eq!(status.brokers_down, None);
    run.stop().await;
    let mut places = seen.all();
    let calls = places.len();
    places.sort_unstable();
    places.dedup();
    assert_eq!(places.len(), 21_000, "nothing is lost");
    let mut losses = 0;
    while let Some(event) = events.next().await {
        losses += usize::from(matches!(event, Event::Lost(_)));
    }
    Some((losses, calls - places.len()))
}

const CONCURRENCY: usize = 16;

// R8
#[tokio::test(flavor = "multi_thread")]
async fn an_outage_of_the_only_broker_is_lived_through_without_loss_or_repeat() {
    // The session's default of 45 s outlasts the outage: the partitions stay ours, and so does what was finished.
    if let Some(lost_and_repeated) = live_through_an_outage("45000").await {
        assert_eq!(lost_and_repeated, (0, 0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_that_an_outage_took_and_gave_back_repeat_only_what_was_running() {
    if let Some((losses, repeats)) = live_through_an_outage("6000").await {
        assert!(losses > 0, "a session of 6 s does not outlast 20 s");
        assert!(
            repeats <= losses * CONCURRENCY,
            "{repeats} records came twice, the partitions were lost {losses} times"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn brokers_are_down_until_one_answers_however_seldom_the_client_tries() {
    let Some(cluster) = own_cluster(1) else {
        return;
    };
    let (topic, group) = (cluster.create_topic("quiet", 1, &[]), unique("group"));
    cluster.produce(&topic, numbered(0, 10));
    let seen = Seen::default();
    let noted = seen.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        noted.note(message.offset());
        Ok(())
    };
    // Between two tries there is no error, and nothing to read or commit.
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .property("reconnect.backoff.ms", "20000")
        .property("reconnect.backoff.max.ms", "20000");
    let run = Running::start(builder, handler);
    let mut events = run.handle.events().unwrap();
    until("all are handled", || seen.len() == 10).await;
    tokio::task::block_in_place(|| {
        all_committed(&cluster, &group, &topic);
        cluster.kill([1]);
    });
    let down = async || run.handle.status().await.unwrap().brokers_down;
    let began = Instant::now();
    while down().await.is_none() {
        assert!(began.elapsed() < PATIENCE, "nobody sees the outage");
        tokio::time::sleep(millis(100)).await;
    }
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(30) {
        assert!(
            down().await.is_some(),
            "the only broker is taken to be up after {:?} without it",
            began.elapsed()
        );
        tokio::time::sleep(millis(100)).await;
    }
    tokio::task::block_in_place(|| cluster.restart([1]));
    let began = Instant::now();
    while down().await.is_some() {
        assert!(began.elapsed() < 2 * PATIENCE, "nobody sees its end");
        tokio::time::sleep(millis(100)).await;
    }
    run.stop().await;
    let mut told = Vec::new();
    while let Some(event) = events.next().await {
        if matches!(event, Event::BrokersDown | Event::BrokersUp(_)) {
            told.push(event);
        }
    }
    assert!(
        matches!(&told[..], [Event::BrokersDown, Event::BrokersUp(down)] if *down > Duration::from_secs(30)),
        "{told:?}"
    );
}

// R10b
#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_without_brokers_ends_in_its_time_and_tells_what_was_not_committed() {
    let Some(cluster) = own_cluster(1) else {
        return;
    };
    let (topic, group) = (cluster.create_topic("away", 1, &[]), unique("group"));
    cluster.produce(&topic, numbered(0, 500));
    let seen = Seen::default();
    let noted = seen.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        if message.offset() >= 100 {
            tokio::time::sleep(millis(20)).await;
        }
        noted.note(message.offset());
        Ok(())
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .ordering(Ordering::ByPartition);
    let run = Running::start(builder, handler);
    until("some work", || seen.len() > 110).await;
    tokio::task::block_in_place(|| cluster.kill([1]));
    let before = seen.len();
    until("some more work", || seen.len() > before + 20).await;
    let began = Instant::now();
    run.handle.shutdown_within(Duration::from_secs(4)).unwrap();
    let report = run.ended().await.unwrap();
    let took = began.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
    let partition = &report.partitions[0];
    assert!(partition.committable > partition.committed, "{report:?}");
    tokio::task::block_in_place(|| cluster.restart([1]));
    let next = Seen::default();
    let run = Running::start(consumer(&cluster, &group).topic(&topic), next.noting());
    all_committed(&cluster, &group, &topic);
    run.stop().await;
    let first = next.all().into_iter().min();
    // A commit that was on its way when the broker died may have arrived or not.
    assert!(
        partition.committed <= first && first <= partition.committable,
        "it goes on at {first:?}, the report said {partition:?}"
    );
}

// R10
#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_ends_a_shutdown_that_waits_for_brokers() {
    let Some(cluster) = own_cluster(1) else {
        return;
    };
    let (topic, group) = (cluster.create_topic("twice", 1, &[]), unique("group"));
    cluster.produce(&topic, numbered(0, 10));
    let seen = Seen::default();
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .commit_interval(Duration::from_secs(60));
    let run = Running::start(builder, seen.noting());
    until("all to be handled", || seen.len() == 10).await;
    tokio::task::block_in_place(|| cluster.kill([1]));
    run.handle.shutdown().unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let began = Instant::now();
    run.handle.stop_now().unwrap();
    let report = run.ended().await.unwrap();
    assert!(
        began.elapsed() < Duration::from_secs(6),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(report.partitions[0].committable, Some(10));
    assert_ne!(report.partitions[0].committed, Some(10));
}

/// Whether the thread of a consumer of this group still lives. The kernel keeps the first 15 bytes of a thread's name.
fn has_thread(group: &str) -> bool {
    let name = &format!("kafka-{group}")[..15];
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.into_iter().any(|comm| comm.trim_end() == name)
}

/// Counts panics of this process, wherever they happen, and shows them as ever.
fn count_panics() -> Arc<AtomicUsize> {
    let panics = Arc::new(AtomicUsize::new(0));
    let (counted, before) = (Arc::clone(&panics), std::panic::take_hook());
    std::panic::set_hook(Box::new(move |info| {
        counted.fetch_add(1, Atomic::SeqCst);
        before(info);
    }));
    panics
}

/// How a running consumer is dropped.
#[derive(Debug, Clone, Copy)]
enum Drop {
    Future,
    Runtime,
}

// R13
#[test]
fn a_consumer_that_is_dropped_while_brokers_are_away_ends_soon_and_commits_nothing_unfinished() {
    let Some(cluster) = own_cluster(1) else {
        return;
    };
    let panics = count_panics();
    for how in [Drop::Future, Drop::Runtime] {
        let (topic, group) = (
            cluster.create_topic("gone", 1, &[]),
            unique(&format!("{how:?}")),
        );
        cluster.produce(&topic, numbered(0, 500));
        let seen = Seen::default();
        let noted = seen.clone();
        let handler = async move |message: &Message<Text>| -> HandlerResult {
            if message.offset() >= 100 {
                tokio::time::sleep(millis(50)).await;
            }
            noted.note(message.offset());
            Ok(())
        };
        let builder = || {
            consumer(&cluster, &group)
                .topic(&topic)
                .ordering(Ordering::ByPartition)
                .property("session.timeout.ms", "10000")
        };
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let run = runtime.block_on(async { Running::start(builder(), handler) });
        let handle = run.handle.clone();
        eventually("some work", PATIENCE, || seen.len() > 110);
        cluster.kill([1]);
        let before = seen.len();
        eventually("some more work", PATIENCE, || seen.len() > before + 20);

        let began = Instant::now();
        match how {
            Drop::Future => runtime.block_on(run.drop_it()),
            Drop::Runtime => drop(runtime),
        }
        let dropped = began.elapsed();
        assert!(dropped < Duration::from_secs(1), "{how:?}: {dropped:?}");
        eventually("the run to be over", Duration::from_secs(6), || {
            handle.shutdown().is_err()
        });
        eventually("its thread to be gone", PATIENCE, || !has_thread(&group));
        let finished = seen.len() as i64;
        assert!(finished < 500);

        cluster.restart([1]);
        let next = Seen::default();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let run = runtime.block_on(async { Running::start(builder(), next.noting()) });
        all_committed(&cluster, &group, &topic);
        runtime.block_on(run.stop());
        let next = next.all();
        assert!(
            (100..=finished).contains(&next[0]),
            "{how:?}: {finished} had finished, and it goes on at {}",
            next[0]
        );
        assert!(next.iter().copied().eq(next[0]..500), "{next:?}");
    }
    assert_eq!(panics.load(Atomic::SeqCst), 0);
}

// R13
#[test]
fn a_consumer_that_never_reached_a_broker_can_be_dropped() {
    let panics = count_panics();
    let builder = || {
        reliable_consumer::ReliableConsumer::builder()
            // Nobody listens there.
            .bootstrap_servers("127.0.0.1:1")
            .topic("any")
    };
    drop(builder().group_id("idle").build().unwrap());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let group = unique("never");
    let run = runtime
        .block_on(async { Running::start(builder().group_id(&group), Seen::default().noting()) });
    let handle = run.handle.clone();
    std::thread::sleep(Duration::from_secs(1));
    assert!(has_thread(&group));
    runtime.block_on(run.drop_it());
    eventually("the run to be over", Duration::from_secs(6), || {
        handle.shutdown().is_err()
    });
    eventually("its thread to be gone", PATIENCE, || !has_thread(&group));
    assert_eq!(panics.load(Atomic::SeqCst), 0);
}

/// A group that is new to three topics of one replica each, while the broker with one of them is down.
async fn start_without_a_broker(settings: &[(&str, &str)]) {
    const RECORDS: usize = 200;
    let Some(cluster) = own_cluster(3) else {
        return;
    };
    let topics = [1, 2, 3].map(|broker| cluster.create_topic_on("alone", &[broker], &[]));
    for topic in &topics {
        cluster.produce(topic, numbered(0, RECORDS));
    }
    let group = unique("group");
    tokio::task::block_in_place(|| cluster.kill([3]));
    let seen = Seen::<(String, i64)>::default();
    let noted = seen.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        noted.note((message.topic().to_owned(), message.offset()));
        Ok(())
    };
    let mut builder = ReliableConsumer::builder()
        .bootstrap_servers(cluster.brokers())
        .group_id(&group)
        .commit_interval(millis(100))
        .topics(&topics);
    for (name, value) in settings {
        builder = builder.property(*name, *value);
    }
    let began = Instant::now();
    let run = Running::start(builder, handler);
    until("the other two to be handled", || seen.len() == 2 * RECORDS).await;
    println!("{settings:?}: handled after {:?}", began.elapsed());
    let held_up = eventually_status(&run, |status| {
        status.partitions.iter().any(|it| it.not_started.is_some())
    });
    let held_up = held_up.await;
    for partition in held_up.partitions {
        let without = *partition.topic == *topics[2];
        assert_eq!(partition.not_started.is_some(), without, "{partition:?}");
    }
    assert_eq!(seen.len(), 2 * RECORDS);
    tokio::task::block_in_place(|| cluster.restart([3]));
    let back = Instant::now();
    until("the third to be handled", || seen.len() == 3 * RECORDS).await;
    println!("{settings:?}: the third after {:?}", back.elapsed());
    for topic in &topics {
        tokio::task::block_in_place(|| all_committed(&cluster, &group, topic));
    }
    run.stop().await;
}

async fn eventually_status(
    run: &Running,
    condition: impl Fn(&reliable_consumer::Status) -> bool,
) -> reliable_consumer::Status {
    let began = Instant::now();
    loop {
        let status = run.handle.status().await.unwrap();
        if condition(&status) {
            return status;
        }
        assert!(began.elapsed() < PATIENCE, "{status:?}");
        tokio::time::sleep(millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_is_down_at_the_start_holds_up_only_what_it_leads() {
    start_without_a_broker(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn so_it_is_where_the_brokers_assign_and_with_eager_assignors() {
    start_without_a_broker(&[("group.protocol", "consumer")]).await;
    start_without_a_broker(&[("partition.assignment.strategy", "range")]).await;
}
