//! A consumer that ends and starts again on a real broker: nothing is lost, and nothing that was finished is handled
//! again.

mod common;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use reliable_consumer::{
    BoxError, ConsumerHandle, Handler, HandlerResult, Message, Ordering, PartitionStatus,
    ReliableConsumer, Report, Retry, Text,
};
use reliable_consumer_testing::{Cluster, Record, cluster, eventually, unique};

const PATIENCE: Duration = Duration::from_secs(30);

/// What all runs of a test have handled, in its order.
#[derive(Clone, Default)]
struct Ledger(Arc<Mutex<Vec<String>>>);

impl Ledger {
    fn note(&self, message: &Message<Text>) {
        let mut handled = self.0.lock().expect("nobody panics with it");
        handled.push(message.payload().to_string());
    }

    fn len(&self) -> usize {
        self.0.lock().expect("nobody panics with it").len()
    }

    fn counts(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for value in self.0.lock().expect("nobody panics with it").iter() {
            *counts.entry(value.clone()).or_default() += 1;
        }
        counts
    }

    #[track_caller]
    fn assert_each_once(&self, records: usize) {
        let counts = self.counts();
        let repeated: Vec<_> = counts.iter().filter(|(_, count)| **count > 1).collect();
        assert!(repeated.is_empty(), "handled again: {repeated:?}");
        assert_eq!(counts.len(), records, "lost");
    }
}

struct World {
    cluster: Cluster,
    topic: String,
    group: String,
}

impl World {
    fn new(cluster: Cluster, partitions: i32) -> Self {
        let topic = cluster.create_topic("restart", partitions, &[]);
        Self {
            cluster,
            topic,
            group: unique("group"),
        }
    }

    /// Records with their number as value, in 20 keys.
    fn produce(&self, numbers: std::ops::Range<usize>) {
        let record = |n| {
            Record::value(format!("{n}"))
                .key(format!("key-{}", n % 20))
                .partition(0)
        };
        self.cluster.produce(&self.topic, numbers.map(record));
    }

    fn consumer(&self, ordering: Ordering) -> ReliableConsumer {
        let builder = ReliableConsumer::builder()
            .bootstrap_servers(self.cluster.brokers())
            .group_id(&self.group)
            .topic(&self.topic)
            .ordering(ordering)
            .concurrency(16)
            .commit_interval(Duration::from_millis(100))
            .retry(Retry::exponential(
                Duration::from_secs(3600),
                Duration::from_secs(3600),
            ));
        common::with_store_under_test(builder)
            .build()
            .expect("all that is needed is set")
    }

    /// Runs a handler until `enough`, then shuts down in order.
    async fn run_until(
        &self,
        ordering: Ordering,
        handler: impl Handler<Text>,
        enough: impl Fn() -> bool + Send + 'static,
    ) -> Report {
        let signal = async move {
            let began = Instant::now();
            while !enough() {
                assert!(began.elapsed() < PATIENCE, "the run does not get there");
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let run = self.consumer(ordering).run(handler);
        run.with_graceful_shutdown(signal)
            .await
            .expect("the run ends in order")
    }

    /// The offset, when nothing stands beside it but which topic this is.
    fn committed_cleanly(&self) -> Option<i64> {
        let (offset, metadata) = self.committed();
        assert!(metadata.len() <= 30, "{metadata}");
        offset
    }

    fn committed(&self) -> (Option<i64>, String) {
        let committed = self.cluster.committed(&self.group, &self.topic).remove(0);
        (committed.offset, committed.metadata)
    }
}

fn number(message: &Message<Text>) -> usize {
    message.payload().parse().expect("values are numbers")
}

async fn partition_status(handle: &ConsumerHandle, partition: i32) -> Option<PartitionStatus> {
    let status = handle.status().await.ok()?;
    let mut partitions = status.partitions.into_iter();
    partitions.find(|status| status.partition == partition)
}

// T5, T10
#[tokio::test(flavor = "multi_thread")]
async fn closing_and_reopening_after_each_record_handles_each_once() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, 1);
    let ledger = Ledger::default();
    for round in 0..5 {
        world.produce(round..round + 1);
        let (noted, handled) = (ledger.clone(), ledger.clone());
        let report = world
            .run_until(
                Ordering::ByKey,
                async move |message: &Message<Text>| -> HandlerResult {
                    noted.note(message);
                    Ok(())
                },
                move || handled.len() > round,
            )
            .await;
        assert_eq!(report.handled, 1, "round {round}");
        assert_eq!(world.committed_cleanly(), Some(round as i64 + 1));
    }
    ledger.assert_each_once(5);
}

async fn shut_down_amid_work_and_start_again(ordering: Ordering) {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, 1);
    let total = 400;
    world.produce(0..total);
    let ledger = Ledger::default();

    let (noted, handled) = (ledger.clone(), ledger.clone());
    let first = world
        .run_until(
            ordering,
            async move |message: &Message<Text>| -> HandlerResult {
                let n = number(message);
                if n == 3 {
                    return Err(BoxError::from("the database is away").into());
                }
                tokio::time::sleep(Duration::from_millis(n as u64 * 7 % 11)).await;
                noted.note(message);
                Ok(())
            },
            move || handled.len() > 100,
        )
        .await;
    let finished = ledger.len();
    assert_eq!(first.handled as usize, finished);
    assert!(first.retried == 1 && finished < total, "{first:?}");
    let (offset, metadata) = world.committed();
    assert_eq!(offset, Some(3), "record 3 waits for its retry");
    assert!(!metadata.is_empty());

    let (noted, handled) = (ledger.clone(), ledger.clone());
    let second = world
        .run_until(
            ordering,
            async move |message: &Message<Text>| -> HandlerResult {
                noted.note(message);
                Ok(())
            },
            move || handled.len() >= total,
        )
        .await;
    ledger.assert_each_once(total);
    assert_eq!(second.already_finished as usize, finished - 3);
    assert_eq!(world.committed_cleanly(), Some(total as i64));
}

#[tokio::test(flavor = "multi_thread")]
async fn by_key_nothing_finished_is_handled_again_after_a_shutdown_amid_work() {
    shut_down_amid_work_and_start_again(Ordering::ByKey).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unordered_nothing_finished_is_handled_again_after_a_shutdown_amid_work() {
    shut_down_amid_work_and_start_again(Ordering::Unordered).await;
}

// T9b
#[tokio::test(flavor = "multi_thread")]
async fn restarts_that_follow_each_other_quickly_repeat_nothing() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, 1);
    let total = 300;
    world.produce(0..total);
    let ledger = Ledger::default();
    let mut runs = 0;
    while ledger.len() < total {
        runs += 1;
        assert!(runs < 100, "no progress");
        // Record 0 fails for as long as others are left, so that the watermark stays.
        let last = ledger.len() >= total - 1;
        let goal = (ledger.len() + 40).min(if last { total } else { total - 1 });
        let (noted, handled) = (ledger.clone(), ledger.clone());
        let handler = async move |message: &Message<Text>| -> HandlerResult {
            let n = number(message);
            if n == 0 && !last {
                return Err(BoxError::from("not yet").into());
            }
            tokio::time::sleep(Duration::from_millis(n as u64 * 5 % 7)).await;
            noted.note(message);
            Ok(())
        };
        let enough = move || handled.len() >= goal;
        world.run_until(Ordering::Unordered, handler, enough).await;
    }
    assert!(runs > 3, "{runs}");
    ledger.assert_each_once(total);
    assert_eq!(world.committed_cleanly(), Some(total as i64));
}

// T9c, T11
#[tokio::test(flavor = "multi_thread")]
async fn metadata_that_is_foreign_damaged_or_copied_is_ignored_and_consumption_starts() {
    let Some(cluster) = cluster() else { return };
    let mut world = World::new(cluster, 1);
    world.produce(0..6);
    // A true snapshot, of this topic and this offset, but of another group.
    let ledger = Ledger::default();
    let (noted, handled) = (ledger.clone(), ledger.clone());
    world
        .run_until(
            Ordering::Unordered,
            async move |message: &Message<Text>| -> HandlerResult {
                if number(message) == 2 {
                    return Err(BoxError::from("not yet").into());
                }
                noted.note(message);
                Ok(())
            },
            move || handled.len() == 5,
        )
        .await;
    let (offset, copied) = world.committed();
    assert_eq!((offset, copied.is_empty()), (Some(2), false));

    let damaged = copied.replacen(|c: char| !"rc2".contains(c), "!", 1);
    let cut = copied[..copied.len() - 1].to_owned();
    let long = format!("rc1{}", "z".repeat(4_093));
    let newer = "rc9what comes next".to_owned();
    for metadata in [copied, damaged, cut, long, newer, "AgAAAX9hYmM=".to_owned()] {
        world.group = unique("group");
        world
            .cluster
            .commit(&world.group, &world.topic, 0, 2, &metadata);
        let ledger = Ledger::default();
        let (noted, handled) = (ledger.clone(), ledger.clone());
        let report = world
            .run_until(
                Ordering::Unordered,
                async move |message: &Message<Text>| -> HandlerResult {
                    noted.note(message);
                    Ok(())
                },
                move || handled.len() == 4,
            )
            .await;
        assert_eq!((report.handled, report.already_finished), (4, 0));
        assert_eq!(world.committed_cleanly(), Some(6));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_with_a_small_metadata_limit_gets_what_fits_and_the_status_says_what_does_not() {
    if std::env::var("RELIABLE_CONSUMER_OWN_CLUSTERS").as_deref() != Ok("1") {
        println!("skipped: set RELIABLE_CONSUMER_OWN_CLUSTERS=1 or run scripts/test");
        return;
    }
    let cluster = Cluster::start_with(1, &[("offset.metadata.max.bytes", "100")]);
    let world = World::new(cluster, 2);
    let record = |n: usize| Record::value(n.to_string()).partition(n as i32 % 2);
    world.cluster.produce(&world.topic, (0..8_000).map(record));

    // In partition 0 every second record waits for ever; partition 1 goes to its end.
    let consumer = world.consumer(Ordering::Unordered);
    let handle = consumer.handle();
    let run = tokio::spawn(async move {
        consumer
            .run(async |message: &Message<Text>| -> HandlerResult {
                if message.partition() == 0 && message.offset() % 2 == 0 {
                    return Err(BoxError::from("not yet").into());
                }
                Ok(())
            })
            .await
    });
    // A commit carries the newest state of all partitions: one that covers a record which was produced after all of these
    // had finished tells of each of them.
    let mut began = Instant::now();
    let mut end = 4_000;
    let status = loop {
        assert!(began.elapsed() < PATIENCE, "no commit got through");
        tokio::time::sleep(Duration::from_millis(50)).await;
        let (Some(zero), Some(one)) = (
            partition_status(&handle, 0).await,
            partition_status(&handle, 1).await,
        ) else {
            continue;
        };
        let settled = zero.finished_out_of_order == 2_000 && zero.commit_failures == 0;
        if !settled || one.committed != Some(end) {
            continue;
        }
        if end > 4_000 {
            break zero;
        }
        world.cluster.produce(&world.topic, [record(8_001)]);
        (began, end) = (Instant::now(), 4_001);
    };
    assert!(status.beyond_snapshot > 0, "{status:?}");
    assert!(status.beyond_snapshot < 2_000, "something fits: {status:?}");
    let _ = handle.shutdown();
    run.await
        .expect("the run does not panic")
        .expect("the run ends in order");
    let committed = world.cluster.committed(&world.group, &world.topic);
    assert_eq!(committed[0].offset, Some(0));
    assert!(
        (1..=100).contains(&committed[0].metadata.len()),
        "{committed:?}"
    );
    assert_eq!(committed[1].offset, Some(4_001));

    let ledger = Ledger::default();
    let noted = ledger.clone();
    let consumer = world.consumer(Ordering::Unordered);
    let handle = consumer.handle();
    let run = tokio::spawn(
        consumer
            .run(async move |message: &Message<Text>| -> HandlerResult {
                noted.note(message);
                Ok(())
            })
            .into_future(),
    );
    eventually("everything to be committed", PATIENCE, || {
        let committed = world.cluster.committed(&world.group, &world.topic);
        [committed[0].offset, committed[1].offset] == [Some(4_000), Some(4_001)]
    });
    let _ = handle.shutdown();
    let report = run
        .await
        .expect("the run does not panic")
        .expect("the run ends in order");
    // The last commit has room for more than those before it: it marks nothing in case of the process's death.
    let handled_again = ledger.len() - 2_000;
    let came_again = handled_again + report.duplicates.total() as usize;
    assert_eq!(report.already_finished as usize + came_again, 2_000);
    assert!(
        (1..=status.beyond_snapshot).contains(&came_again),
        "{came_again} came again, {} were beyond the snapshot",
        status.beyond_snapshot
    );
    ledger.assert_each_once(2_000 + handled_again);
    if common::store_under_test().is_some() {
        assert_eq!(handled_again, 0);
    }
}
