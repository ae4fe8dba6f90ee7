//! Real broker: users' code and settings at their worst, and shutdowns that come at a bad moment.

mod common;

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use common::{PATIENCE, Running, Seen, all_committed, committed, consumer, millis, until};
use reliable_consumer::{
    BuildError, Classification, DeadLetter, DecodeError, DynError, HandlerError, HandlerResult,
    Message, Payload, Record as Raw, ReliableConsumer, Retry, Text, find_error, header_names,
    permanent,
};
use reliable_consumer_testing::{Record, cluster, unique};
use tokio::sync::Notify;

#[derive(Debug)]
struct Unspeakable;

impl fmt::Display for Unspeakable {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        panic!("words fail me");
    }
}

impl std::error::Error for Unspeakable {}

impl Drop for Unspeakable {
    fn drop(&mut self) {
        panic!("and I will not go quietly");
    }
}

#[derive(Debug)]
struct Endless {
    /// Its text goes on for ever, and not only its causes.
    text: bool,
}

impl fmt::Display for Endless {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.text {
            return f.write_str("and so on");
        }
        loop {
            let _ = f.write_str("and so on ");
        }
    }
}

impl std::error::Error for Endless {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(self)
    }
}

/// A payload that comes to nothing, in ways of its own.
struct Hostile;

impl Payload for Hostile {
    fn decode(record: &Raw) -> Result<Self, DecodeError> {
        match record.value() {
            Some(b"undecodable") => Err(DecodeError::invalid(Unspeakable)),
            Some(b"undecodable without an end") => {
                Err(DecodeError::invalid(Endless { text: true }))
            }
            _ => Ok(Self),
        }
    }
}

// D12
#[tokio::test(flavor = "multi_thread")]
async fn errors_without_an_end_and_panics_that_panic_cost_their_records_only() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("endless", 1, &[]), unique("group"));
    let letters = cluster.create_topic("endless.dlq", 1, &[]);
    let hostile = [
        ("round", "and so on"),
        ("text", "and so on"),
        ("payload", "a panic without a message"),
        ("undecodable", "an error that panics when shown"),
        (
            "undecodable without an end",
            "payload is invalid: and so on",
        ),
    ];
    let fine = (0..20).map(|n| Record::value(format!("fine {n}")));
    let records = hostile.iter().map(|(value, _)| Record::value(*value));
    cluster.produce(&topic, records.chain(fine));
    let handler = async |message: &Message<Hostile>| -> HandlerResult {
        match message.record().value() {
            Some(b"round") => Err(Endless { text: false }.into()),
            Some(b"text") => Err(Endless { text: true }.into()),
            Some(b"payload") => std::panic::panic_any(Unspeakable),
            _ => Ok(()),
        }
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .classifier(|error: &DynError, _: &Raw| {
            // Looks through all causes of an error that has no end of them.
            match find_error::<std::io::Error>(error) {
                Some(_) => Classification::skip(),
                None => Classification::default_policy(),
            }
        })
        .handler_timeout(Duration::from_secs(5))
        .retry(Retry::exponential(millis(1), millis(1)).max_attempts(2))
        .dead_letter(DeadLetter::topic(&letters));
    let run = Running::start(builder, handler);
    all_committed(&cluster, &group, &topic);
    let report = run.stop().await;
    assert_eq!((report.handled, report.dead_lettered), (20, 5));
    let letters = cluster.read_all(&letters);
    for (value, error) in hostile {
        let letter = letters.iter().find(|letter| letter.text() == value);
        let told = letter.unwrap().header(header_names::ERROR_MESSAGE).unwrap();
        assert!(told.starts_with(error), "{value}: {told}");
        assert!(told.len() <= 1024);
    }
}

// D12
#[tokio::test(flavor = "multi_thread")]
async fn an_error_that_panics_when_it_is_shown_costs_its_record_only() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("unspeakable", 1, &[]), unique("group"));
    let letters = cluster.create_topic("unspeakable.dlq", 1, &[]);
    let values = ["fine", "at once", "later", "fine"];
    cluster.produce(&topic, values.map(Record::value));
    let handler = async |message: &Message<Text>| -> HandlerResult {
        match &**message.payload() {
            "at once" => return Err(Unspeakable.into()),
            "later" => {
                tokio::time::sleep(millis(20)).await;
                return Err(Unspeakable.into());
            }
            _ => {}
        }
        Ok(())
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .retry(Retry::exponential(millis(1), millis(1)).max_attempts(2))
        .dead_letter(DeadLetter::topic(&letters));
    let run = Running::start(builder, handler);
    all_committed(&cluster, &group, &topic);
    let report = run.stop().await;
    assert_eq!((report.handled, report.dead_lettered), (2, 2));
    for letter in cluster.read_all(&letters) {
        let message = letter.header(header_names::ERROR_MESSAGE).unwrap();
        assert!(message.contains("words fail me"), "{message}");
    }
}

/// A handler that never ends, and tells when it has begun.
fn hanging() -> (Arc<Notify>, impl reliable_consumer::Handler<Text>) {
    let begun = Arc::new(Notify::new());
    let tell = Arc::clone(&begun);
    let handler = async move |_: &Message<Text>| -> HandlerResult {
        tell.notify_one();
        std::future::pending().await
    };
    (begun, handler)
}

#[track_caller]
fn assert_soon(began: Instant) {
    let took = began.elapsed();
    assert!(took < Duration::from_secs(4), "it took {took:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shorter_time_for_the_shutdown_given_later_holds() {
    let Some(cluster) = cluster() else { return };
    let topic = cluster.create_topic("shorter", 1, &[]);
    cluster.produce(&topic, [Record::value("x")]);
    let (begun, handler) = hanging();
    let run = Running::start(consumer(&cluster, &unique("group")).topic(&topic), handler);
    begun.notified().await;
    run.handle.shutdown().unwrap();
    tokio::time::sleep(millis(300)).await;
    let began = Instant::now();
    run.handle.shutdown_within(Duration::from_secs(1)).unwrap();
    let report = run.ended().await.unwrap();
    assert_soon(began);
    assert_eq!(report.abandoned, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_amid_a_rebalance_has_one_deadline_for_both() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("amid", 2, &[]), unique("group"));
    cluster.produce(&topic, [0, 1].map(|n| Record::value("x").partition(n)));
    let (begun, handler) = hanging();
    let builder = || consumer(&cluster, &group).topic(&topic);
    let first = Running::start(builder(), handler);
    begun.notified().await;
    let second = Running::start(builder(), Seen::default().noting());
    // The first one waits for its handlers now, as long as ten seconds.
    until("the rebalance to begin", || {
        second_has_joined(&cluster, &group)
    })
    .await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let began = Instant::now();
    first
        .handle
        .shutdown_within(Duration::from_secs(1))
        .unwrap();
    first.ended().await.unwrap();
    assert_soon(began);
    second.stop().await;
}

fn second_has_joined(cluster: &reliable_consumer_testing::Cluster, group: &str) -> bool {
    cluster.members(group) == 2
}

#[tokio::test(flavor = "multi_thread")]
async fn times_and_sizes_without_limit_are_taken_as_such() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("limitless", 1, &[]), unique("group"));
    cluster.produce(&topic, (0..100).map(|n| Record::value(n.to_string())));
    let seen = Seen::<i64>::default();
    let noted = seen.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        tokio::time::sleep(millis(50)).await;
        noted.note(message.offset());
        Ok(())
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .max_bytes(usize::MAX)
        .handler_timeout(Duration::MAX)
        .drain_timeout(Duration::MAX)
        .shutdown_timeout(Duration::MAX);
    let run = Running::start(builder, handler);
    until("some work", || seen.len() > 10).await;
    let report = run.stop().await;
    assert!(report.handled > 10);
    assert_eq!(report.abandoned, 0);
    assert_eq!(
        committed(&cluster, &group, &topic),
        [report.partitions[0].committed.unwrap()]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_that_waits_is_let_go_with_its_partition() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("let-go", 2, &[]), unique("group"));
    cluster.produce(&topic, [0, 1].map(|n| Record::value("x").partition(n)));
    let letters = unique("not-there");
    let refuse =
        async |_: &Message<Text>| -> HandlerResult { Err::<(), HandlerError>(permanent("no")) };
    let builder = || {
        consumer(&cluster, &group)
            .topic(&topic)
            .drain_timeout(millis(200))
            .dead_letter(
                DeadLetter::topic(&letters).property("topic.metadata.propagation.max.ms", "200"),
            )
    };
    let waiting = async |run: &Running| -> usize {
        let status = run.handle.status().await.unwrap();
        status
            .stalled_dead_letters
            .iter()
            .map(|stalled| stalled.records)
            .sum()
    };
    let first = Running::start(builder(), refuse);
    let began = Instant::now();
    while waiting(&first).await < 2 {
        assert!(began.elapsed() < PATIENCE);
        tokio::time::sleep(millis(50)).await;
    }
    let second = Running::start(builder(), refuse);
    while waiting(&second).await < 1 {
        assert!(began.elapsed() < PATIENCE);
        tokio::time::sleep(millis(50)).await;
    }
    assert_eq!(
        waiting(&first).await,
        1,
        "the other one is the second's now"
    );
    first.handle.stop_now().unwrap();
    second.handle.stop_now().unwrap();
    first.ended().await.unwrap();
    second.ended().await.unwrap();
    assert_eq!(
        committed(&cluster, &group, &topic),
        [0, 0],
        "neither is lost"
    );
}

#[test]
fn one_thread_for_everything_is_enough() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("one-thread", 3, &[]), unique("group"));
    cluster.produce(&topic, (0..5_000).map(|n| Record::value(n.to_string())));
    let seen = Seen::default();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let entered = runtime.enter();
    let consumer = consumer(&cluster, &group).topic(&topic).build().unwrap();
    drop(entered);
    let handle = consumer.handle();
    let noting = seen.noting();
    let run = std::thread::spawn(move || runtime.block_on(consumer.run(noting).into_future()));
    all_committed(&cluster, &group, &topic);
    handle.shutdown().unwrap();
    assert_eq!(run.join().unwrap().unwrap().handled, 5_000);
}

#[test]
#[should_panic(expected = "timers are disabled")]
fn a_runtime_without_timers_is_noticed_before_anything_depends_on_them() {
    let consumer = ReliableConsumer::builder()
        .bootstrap_servers("127.0.0.1:1")
        .group_id("g")
        .topic("t")
        .build()
        .unwrap();
    consumer.handle().stop_now().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .unwrap();
    let _ = runtime.block_on(consumer.run(Seen::default().noting()).into_future());
}

#[test]
fn a_run_that_is_dropped_before_it_began_leaves_nothing_behind() {
    let consumer = ReliableConsumer::builder()
        .bootstrap_servers("127.0.0.1:1")
        .group_id("g")
        .topic("t")
        .build()
        .unwrap();
    let handle = consumer.handle();
    drop(consumer.run(Seen::default().noting()));
    assert!(handle.shutdown().is_err(), "there is nothing to shut down");
}

#[test]
fn names_that_no_topic_can_have_are_refused_at_build() {
    let builder = || {
        ReliableConsumer::builder()
            .bootstrap_servers("localhost:1")
            .group_id("g")
    };
    let long = "x".repeat(250);
    for name in ["", "a\0b", "^orders", "a b", "søknad", &long] {
        let error = builder().topic("fine").topic(name).build().unwrap_err();
        assert!(matches!(error, BuildError::Invalid { .. }), "{error}");
        let dead_letter = builder().topic("fine").dead_letter(DeadLetter::topic(name));
        let error = dead_letter.build().unwrap_err();
        assert!(matches!(error, BuildError::Invalid { .. }), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_is_named_twice_is_consumed_once() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("twice", 1, &[]), unique("group"));
    cluster.produce(&topic, [Record::value("x")]);
    let seen = Seen::default();
    let builder = consumer(&cluster, &group).topics([&topic, &topic]);
    let run = Running::start(builder, seen.noting());
    all_committed(&cluster, &group, &topic);
    run.stop().await;
    assert_eq!(seen.all(), [0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_outlives_a_rebalance() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("rest", 4, &[]), unique("group"));
    let seen = Seen::default();
    let builder = || consumer(&cluster, &group).topic(&topic);
    let first = Running::start(builder(), seen.noting());
    let second = Running::start(builder(), seen.noting());
    first.handle.pause(&*topic).unwrap();
    until("both to have partitions", || cluster.members(&group) == 2).await;
    // All partitions come to the first one, which had some of them before.
    second.stop().await;
    let began = Instant::now();
    while first.handle.status().await.unwrap().partitions.len() < 4 {
        assert!(began.elapsed() < PATIENCE);
        tokio::time::sleep(millis(50)).await;
    }
    cluster.produce(
        &topic,
        (0..100).map(|n| Record::value("x").partition(n % 4)),
    );
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(seen.len(), 0);
    first.handle.resume(&*topic).unwrap();
    all_committed(&cluster, &group, &topic);
    first.stop().await;
    assert_eq!(seen.len(), 100);
}

// R4
#[tokio::test(flavor = "multi_thread")]
async fn what_was_handed_over_and_has_not_started_is_not_awaited() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("not-started", 1, &[]), unique("group"));
    cluster.produce(&topic, (0..100).map(|_| Record::value("x").key("k")));
    let seen = Seen::<i64>::default();
    let noted = seen.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        tokio::time::sleep(millis(200)).await;
        noted.note(message.offset());
        Ok(())
    };
    let run = Running::start(consumer(&cluster, &group).topic(&topic), handler);
    until("some work", || seen.len() >= 2).await;
    let began = Instant::now();
    let report = run.stop().await;
    // The one that runs is awaited, none of those behind it in its turn.
    assert!(
        began.elapsed() < Duration::from_secs(2),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(report.abandoned, 0);
    assert_eq!(committed(&cluster, &group, &topic), [seen.len() as i64]);
}
