//! Real broker: a dependency of the handlers that goes away for a while.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use common::{Changes, Running, Seen, all_committed, consumer, millis, until};
use reliable_consumer::{
    BreakerState, Builder, Classification, DeadLetter, DynError, Event, Handler, HandlerResult,
    Message, Ordering, OutageBreaker, Record as Raw, ResultExt, Retry, Text, find_error,
};
use reliable_consumer_testing::{Cluster, Record, cluster, unique};

/// What the handlers depend on.
#[derive(Clone, Default)]
struct Database(Arc<Inner>);

#[derive(Default)]
struct Inner {
    down: AtomicBool,
    calls_in_vain: Mutex<Vec<Instant>>,
}

#[derive(Debug, thiserror::Error)]
#[error("connection refused")]
struct Refused;

impl Database {
    fn goes_down(&self) {
        self.0.down.store(true, SeqCst);
    }

    /// Returns when that was.
    fn comes_back(&self) -> Instant {
        self.0.down.store(false, SeqCst);
        Instant::now()
    }

    async fn insert(&self) -> Result<(), Refused> {
        tokio::time::sleep(millis(2)).await;
        if self.0.down.load(SeqCst) {
            self.0.calls_in_vain.lock().unwrap().push(Instant::now());
            return Err(Refused);
        }
        Ok(())
    }

    fn calls_in_vain(&self) -> Vec<Instant> {
        self.0.calls_in_vain.lock().unwrap().clone()
    }
}

/// Topic, partition, offset and attempt of a record that was handled, and when.
type Handled = (String, i32, i64, u32, Instant);

/// Inserts into the database, and leaves it to the classifier what its errors mean.
fn inserting(database: &Database, handled: &Seen<Handled>) -> impl Handler<Text> + Clone + use<> {
    let (database, handled) = (database.clone(), handled.clone());
    async move |message: &Message<Text>| -> HandlerResult {
        database.insert().await?;
        let topic = message.topic().to_owned();
        let (partition, offset) = (message.partition(), message.offset());
        handled.note((topic, partition, offset, message.attempt(), Instant::now()));
        Ok(())
    }
}

fn refused_is_an_outage(error: &DynError, _: &Raw) -> Classification {
    match find_error::<Refused>(error) {
        Some(_) => Classification::outage(),
        None => Classification::default_policy(),
    }
}

/// Pauses as they are, a fifth as long.
fn breaker() -> OutageBreaker {
    OutageBreaker::new()
        .window(Duration::from_secs(2))
        .probe_pauses(millis(200), LONGEST_PAUSE)
        .record_waits(millis(100), LONGEST_WAIT)
}
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// A record that fails twice, or for half a second, is given up.
fn member(cluster: &Cluster, group: &str, letters: &str) -> Builder {
    consumer(cluster, group)
        .concurrency(16)
        .classifier(refused_is_an_outage)
        .retry(
            Retry::fixed(millis(20))
                .max_attempts(2)
                .max_elapsed(millis(500)),
        )
        .dead_letter(DeadLetter::topic(letters))
        .outage_breaker(breaker())
}

fn numbered(from: usize, count: usize) -> impl Iterator<Item = Record> {
    (from..from + count).map(|n| Record::value(n.to_string()).key(format!("k{}", n % 50)))
}

fn in_topic(cluster: &Cluster, topic: &str) -> usize {
    cluster.end_offsets(topic).iter().sum::<i64>() as usize
}

fn each_once(handled: &Seen<Handled>) -> usize {
    let all = handled.all();
    let places = all
        .iter()
        .map(|(topic, partition, offset, ..)| (topic, partition, offset));
    assert_eq!(
        places.collect::<HashSet<_>>().len(),
        all.len(),
        "a record was handled twice"
    );
    all.len()
}

async fn state(run: &Running) -> BreakerState {
    run.handle.status().await.unwrap().breaker.state
}

async fn until_open(run: &Running) {
    let began = Instant::now();
    while state(run).await == BreakerState::Closed {
        assert!(began.elapsed() < common::PATIENCE, "it does not open");
        tokio::time::sleep(millis(10)).await;
    }
}

/// A test that fails must not leave its producer behind: the runtime waits for it.
struct StopProducing(Arc<AtomicBool>);

impl Drop for StopProducing {
    fn drop(&mut self) {
        self.0.store(false, SeqCst);
    }
}

/// Follows when the breaker opened, and how often a probe failed.
fn follow(run: &Running) -> Seen<(Event, Instant)> {
    let (seen, mut events) = (Seen::default(), run.handle.events().unwrap());
    let noted = seen.clone();
    tokio::spawn(async move {
        while let Some(event) = events.next().await {
            noted.note((event, Instant::now()));
        }
    });
    seen
}

// The story: a database that is away for ten minutes under steady traffic, fifty times as fast.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_down_costs_no_record_and_a_few_probes() {
    let Some(cluster) = cluster() else { return };
    let down_for = Duration::from_secs(12);
    let steady = cluster.create_topic("steady", 4, &[]);
    let quiet = cluster.create_topic("quiet", 1, &[]);
    let letters = cluster.create_topic("letters", 1, &[]);
    let group = unique("group");
    let (database, handled) = (Database::default(), Seen::default());
    let builder = member(&cluster, &group, &letters).topics([&steady, &quiet]);
    let run = Running::start(builder, inserting(&database, &handled));
    let events = follow(&run);

    let cluster = Arc::new(cluster);
    let producing = Arc::new(AtomicBool::new(true));
    let _guard = StopProducing(Arc::clone(&producing));
    let producer = {
        let (cluster, producing) = (Arc::clone(&cluster), Arc::clone(&producing));
        let (steady, quiet) = (steady.clone(), quiet.clone());
        tokio::task::spawn_blocking(move || {
            for round in 0.. {
                if !producing.load(SeqCst) {
                    break;
                }
                cluster.produce(&steady, numbered(round * 50, 50));
                if round % 10 == 0 {
                    cluster.produce(&quiet, numbered(round, 1));
                }
                std::thread::sleep(millis(100));
            }
        })
    };
    until("some work", || handled.len() > 500).await;
    assert_eq!(state(&run).await, BreakerState::Closed);

    database.goes_down();
    until_open(&run).await;
    tokio::time::sleep(down_for / 3).await;
    let before = run.handle.status().await.unwrap();
    tokio::time::sleep(2 * down_for / 3).await;
    let after = run.handle.status().await.unwrap();
    assert!(
        matches!(
            after.breaker.state,
            BreakerState::Open | BreakerState::HalfOpen
        ),
        "{after:?}"
    );
    assert!(
        after.breaker.open_for > Some(down_for - Duration::from_secs(1)),
        "{after:?}"
    );
    let positions = |status: &reliable_consumer::Status| -> Vec<_> {
        status
            .partitions
            .iter()
            .map(|partition| partition.position)
            .collect()
    };
    let read_on: i64 = positions(&after)
        .into_iter()
        .zip(positions(&before))
        .map(|(after, before)| after.unwrap_or(0) - before.unwrap_or(0))
        .sum();
    assert!(
        read_on <= 5,
        "{read_on} records were read while it was open"
    );

    let back = database.comes_back();
    let behind = in_topic(&cluster, &steady) - handled.len();
    assert!(behind > 200, "traffic did not go on: {behind}");
    until("all but the newest to be handled", || {
        handled.len() + 200 >= in_topic(&cluster, &steady) + in_topic(&cluster, &quiet)
    })
    .await;
    let recovered = back.elapsed();
    assert!(
        recovered < LONGEST_PAUSE + Duration::from_secs(4),
        "{recovered:?}"
    );
    until("it to close", || {
        let closed = |(event, _): &(Event, Instant)| matches!(event, Event::BreakerClosed { .. });
        events.all().iter().any(closed)
    })
    .await;
    producing.store(false, SeqCst);
    producer.await.unwrap();
    for topic in [&steady, &quiet] {
        tokio::task::block_in_place(|| all_committed(&cluster, &group, topic));
    }
    let status = run.handle.status().await.unwrap();
    assert_eq!(status.breaker, reliable_consumer::BreakerStatus::default());
    let report = run.stop().await;

    assert_eq!(
        each_once(&handled),
        in_topic(&cluster, &steady) + in_topic(&cluster, &quiet)
    );
    assert_eq!(
        in_topic(&cluster, &letters),
        0,
        "nothing healthy is dead-lettered"
    );
    assert_eq!(
        (report.dead_lettered, report.dropped, report.retried),
        (0, 0, 0)
    );
    assert!(
        handled
            .all()
            .iter()
            .all(|(_, _, _, attempt, _)| *attempt == 1),
        "no attempt is lost"
    );
    let first = handled
        .all()
        .into_iter()
        .map(|(.., at)| at)
        .filter(|at| *at > back)
        .min();
    let first = first.unwrap() - back;
    assert!(
        first < LONGEST_PAUSE + millis(500),
        "noticed after {first:?}"
    );

    let calls = database.calls_in_vain();
    assert_eq!(report.outages, calls.len() as u64);
    let events = events.all();
    let opened = events
        .iter()
        .find(|(event, _)| matches!(event, Event::BreakerOpened { .. }));
    let (_, opened) = opened.expect("it told of the outage");
    let failed = events
        .iter()
        .filter(|(event, _)| matches!(event, Event::BreakerProbeFailed { .. }));
    let (failed, probes) = (
        failed.count(),
        calls.iter().filter(|at| *at > opened).count(),
    );
    // 0.2, 0.4, 0.8 and 1.6 s, and then 2 s, less the jitter.
    assert!((5..=14).contains(&failed), "{failed} probes failed");
    // What ran when it opened may end after it.
    assert!(probes <= failed + 16, "{probes} calls while it was open");
    assert!(calls.len() <= failed + 100, "{} calls in vain", calls.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn where_traffic_is_too_low_for_the_breaker_an_outage_costs_no_record_either() {
    let Some(cluster) = cluster() else { return };
    let (topic, letters) = (
        cluster.create_topic("low", 1, &[]),
        cluster.create_topic("letters", 1, &[]),
    );
    let group = unique("group");
    let (database, handled) = (Database::default(), Seen::default());
    let builder = member(&cluster, &group, &letters)
        .topic(&topic)
        .ordering(Ordering::ByPartition);
    let run = Running::start(builder, inserting(&database, &handled));
    let events = follow(&run);
    cluster.produce(&topic, numbered(0, 1));
    until("the first record", || handled.len() == 1).await;
    database.goes_down();
    for n in 1..=4 {
        cluster.produce(&topic, numbered(n, 1));
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let back = database.comes_back();
    until("the others", || handled.len() == 5).await;
    let recovered = back.elapsed();
    assert!(recovered < LONGEST_WAIT + millis(700), "{recovered:?}");
    all_committed(&cluster, &group, &topic);
    let report = run.stop().await;
    assert_eq!(each_once(&handled), 5);
    assert_eq!((report.dead_lettered, in_topic(&cluster, &letters)), (0, 0));
    assert!((4..20).contains(&report.outages), "{report:?}");
    let opened = |(event, _): &(Event, Instant)| matches!(event, Event::BreakerOpened { .. });
    assert!(!events.all().iter().any(opened));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_while_the_breaker_is_open_is_quick_and_loses_nothing() {
    let Some(cluster) = cluster() else { return };
    let (topic, letters) = (
        cluster.create_topic("shutdown", 4, &[]),
        cluster.create_topic("letters", 1, &[]),
    );
    let group = unique("group");
    let (database, handled) = (Database::default(), Seen::default());
    cluster.produce(&topic, numbered(0, 3_000));
    let builder = || member(&cluster, &group, &letters).topic(&topic);
    let run = Running::start(builder(), inserting(&database, &handled));
    until("some work", || handled.len() > 500).await;
    database.goes_down();
    until_open(&run).await;
    tokio::time::sleep(millis(500)).await;
    let began = Instant::now();
    let report = run.stop().await;
    assert!(
        began.elapsed() < Duration::from_secs(2),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(report.handled as usize, handled.len());
    assert_eq!(report.abandoned, 0);
    database.comes_back();
    let run = Running::start(builder(), inserting(&database, &handled));
    all_committed(&cluster, &group, &topic);
    run.stop().await;
    assert_eq!(each_once(&handled), 3_000);
    assert_eq!(in_topic(&cluster, &letters), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rebalance_while_the_breaker_is_open_is_quick_and_loses_nothing() {
    let Some(cluster) = cluster() else { return };
    let (topic, letters) = (
        cluster.create_topic("rebalance", 4, &[]),
        cluster.create_topic("letters", 1, &[]),
    );
    let group = unique("group");
    let (database, handled) = (Database::default(), Seen::default());
    cluster.produce(&topic, numbered(0, 3_000));
    let (one, other) = (Changes::default(), Changes::default());
    let builder = || member(&cluster, &group, &letters).topic(&topic);
    let first = Running::start(
        builder().rebalance_listener(one.clone()),
        inserting(&database, &handled),
    );
    until("some work", || handled.len() > 500).await;
    database.goes_down();
    until_open(&first).await;
    let began = Instant::now();
    let second = Running::start(
        builder().rebalance_listener(other.clone()),
        inserting(&database, &handled),
    );
    until("the partitions to be shared out", || {
        (one.owned(), other.owned()) == (2, 2)
    })
    .await;
    assert!(
        began.elapsed() < Duration::from_secs(8),
        "{:?}",
        began.elapsed()
    );
    until_open(&second).await;
    cluster.produce(&topic, numbered(3_000, 500));
    database.comes_back();
    all_committed(&cluster, &group, &topic);
    for run in [first, second] {
        let report = run.stop().await;
        assert_eq!((report.dead_lettered, report.abandoned), (0, 0));
    }
    assert_eq!(each_once(&handled), 3_500);
    assert_eq!(in_topic(&cluster, &letters), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_fails_by_itself_is_dead_lettered_by_its_own_attempts() {
    let Some(cluster) = cluster() else { return };
    let (topic, letters) = (
        cluster.create_topic("poison", 2, &[]),
        cluster.create_topic("letters", 1, &[]),
    );
    let group = unique("group");
    let (database, calls) = (Database::default(), Seen::<(String, u32)>::default());
    let noted = calls.clone();
    let connection = database.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        connection.insert().await.outage()?;
        noted.note((message.payload().to_string(), message.attempt()));
        match message.payload().parse::<usize>()? % 100 {
            99 => Err("too much of it".into()),
            _ => Ok(()),
        }
    };
    database.goes_down();
    cluster.produce(&topic, numbered(0, 1_000));
    let run = Running::start(member(&cluster, &group, &letters).topic(&topic), handler);
    until_open(&run).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    database.comes_back();
    all_committed(&cluster, &group, &topic);
    let report = run.stop().await;
    assert_eq!((report.handled, report.dead_lettered), (990, 10));
    let poison = calls
        .all()
        .into_iter()
        .filter(|(value, _)| value.ends_with("99"));
    let mut attempts: Vec<_> = poison.map(|(_, attempt)| attempt).collect();
    attempts.sort_unstable();
    assert_eq!(attempts, [[1; 10], [2; 10]].concat());
    assert_eq!(in_topic(&cluster, &letters), 10);
}
