//! Real broker, at most once: what is committed is handled, dead-lettered, or told of at the moment at which neither can
//! happen any more, however partitions come and go.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    collections::BTreeSet,
    io,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use common::{Changes, Running, Seen, committed, consumer, millis, until};
use reliable_consumer::{
    Builder, CommittedUnhandled, DeadLetter, Event, Guarantee, HandlerResult, Message, Ordering,
    RebalanceListener, Report, Retry, Text, TopicPartition, outage,
};
use reliable_consumer_testing::{Cluster, Record, cluster, unique};
use tokio::task::JoinHandle;

const PARTITIONS: i32 = 4;
const HANDLERS: usize = 8;
/// Members that come, each while one is there, which leaves then: two rebalances and a shutdown each.
const ROUNDS: usize = 6;

type Place = (i32, i64);

/// What keeps records from being handled in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trouble {
    /// Every fourth record has to be tried again, which is later than any drain.
    Retries,
    /// A dependency of all handlers is down.
    Outage,
    /// Every fourth handler takes longer than any drain.
    Slow,
}

/// Lines of the log, of all tests of this process.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl io::Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line).into_owned();
        self.0.lock().unwrap().push(text);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Lines {
    fn collect() -> Self {
        static LINES: OnceLock<Lines> = OnceLock::new();
        let start = || {
            let lines = Lines::default();
            let writer = lines.clone();
            let format = tracing_subscriber::fmt().with_ansi(false);
            format.with_writer(move || writer.clone()).init();
            lines
        };
        LINES.get_or_init(start).clone()
    }

    /// How many records of the topic they say were committed and not handled.
    fn unhandled(&self, topic: &str) -> usize {
        let lines = self.0.lock().unwrap();
        let topic = format!("topic={topic} ");
        let told = lines.iter().filter(|line| {
            line.contains("WARN") && line.contains(&topic) && line.contains("will not be handled")
        });
        let records = told.map(|line| {
            let (_, records) = line.split_once("records=").unwrap();
            let number = records.split(' ').next().unwrap();
            number.parse::<usize>().unwrap()
        });
        records.sum()
    }
}

struct Member {
    run: Running,
    changes: Changes,
    /// Handlers that it has called.
    calls: Arc<AtomicUsize>,
    told: JoinHandle<Vec<CommittedUnhandled>>,
    /// The most records that it had taken on and not finished.
    most: JoinHandle<usize>,
}

impl Member {
    async fn stop(self) -> (Report, Vec<CommittedUnhandled>, usize) {
        let report = self.run.stop().await;
        (report, self.told.await.unwrap(), self.most.await.unwrap())
    }
}

/// A topic whose records are handled at most once, in spite of some trouble.
struct World {
    cluster: Cluster,
    topic: String,
    group: String,
    dead_letters: Option<String>,
    trouble: Trouble,
    /// Records of which a handler was called, and those whose handler succeeded.
    started: Seen<Place>,
    handled: Seen<Place>,
}

impl World {
    fn new(cluster: Cluster, trouble: Trouble, dead_letters: bool) -> Self {
        let topic = cluster.create_topic("once", PARTITIONS, &[]);
        let records = (0..800).map(|n| {
            let key = format!("k{n}");
            Record::value(n.to_string())
                .key(key)
                .partition(n % PARTITIONS)
        });
        cluster.produce(&topic, records);
        let dead_letters = dead_letters.then(|| cluster.create_topic("once.dlq", 1, &[]));
        Self {
            cluster,
            topic,
            group: unique("group"),
            dead_letters,
            trouble,
            started: Seen::default(),
            handled: Seen::default(),
        }
    }

    fn builder(&self) -> Builder {
        let builder = consumer(&self.cluster, &self.group)
            .topic(&self.topic)
            .guarantee(Guarantee::AtMostOnce)
            .concurrency(HANDLERS)
            .retry(Retry::fixed(Duration::from_secs(15)).max_attempts(5))
            .drain_timeout(millis(2_000))
            .shutdown_timeout(millis(2_000));
        match &self.dead_letters {
            Some(topic) => builder.dead_letter(DeadLetter::topic(topic)),
            None => builder,
        }
    }

    fn start(&self) -> Member {
        let changes = Changes::default();
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        let (started, handled) = (self.started.clone(), self.handled.clone());
        let trouble = self.trouble;
        let handler = async move |message: &Message<Text>| -> HandlerResult {
            let place = (message.partition(), message.offset());
            started.note(place);
            counted.fetch_add(1, Relaxed);
            tokio::time::sleep(millis(20)).await;
            let fourth = place.1 % 4 == 3;
            match trouble {
                Trouble::Retries if fourth && message.attempt() == 1 => Err("again")?,
                Trouble::Outage => return Err(outage("down")),
                Trouble::Slow if fourth => tokio::time::sleep(Duration::from_secs(8)).await,
                _ => {}
            }
            handled.note(place);
            Ok(())
        };
        let builder = self.builder().rebalance_listener(changes.clone());
        let run = Running::start(builder, handler);
        let mut events = run.handle.events().unwrap();
        let told = tokio::spawn(async move {
            let mut told = Vec::new();
            while let Some(event) = events.next().await {
                if let Event::CommittedUnhandled(unhandled) = event {
                    told.push(unhandled);
                }
            }
            told
        });
        let handle = run.handle.clone();
        let most = tokio::spawn(async move {
            let mut most = 0;
            while let Ok(status) = handle.status().await {
                let open = status.partitions.iter().map(|partition| {
                    let waiting = partition.queued + partition.retrying;
                    partition.running + waiting + partition.dead_lettering
                });
                most = most.max(open.sum());
                tokio::time::sleep(millis(20)).await;
            }
            most
        });
        Member {
            run,
            changes,
            calls,
            told,
            most,
        }
    }

    fn dead_lettered(&self) -> Vec<(Place, String)> {
        let letters = self.dead_letters.iter();
        let letters = letters.flat_map(|topic| self.cluster.read_all(topic));
        let number = |text: Option<&str>| text.unwrap().parse::<i64>().unwrap();
        letters
            .map(|letter| {
                let partition = number(letter.header("originalPartition")) as i32;
                let offset = number(letter.header("originalOffset"));
                let kind = letter.header("errorKind").unwrap().to_owned();
                ((partition, offset), kind)
            })
            .collect()
    }
}

/// Twelve rebalances and six shutdowns.
async fn members_come_and_go(trouble: Trouble, dead_letters: bool) {
    let Some(cluster) = cluster() else { return };
    let lines = Lines::collect();
    let world = World::new(cluster, trouble, dead_letters);
    let mut ended = Vec::new();
    let mut member = world.start();
    let is_at_work = |member: &Member| member.calls.load(Relaxed) > 0;
    until("the first to be at work", || is_at_work(&member)).await;
    for _ in 0..ROUNDS {
        let next = world.start();
        until("the next to be at work", || is_at_work(&next)).await;
        ended.push(std::mem::replace(&mut member, next).stop().await);
        let all = PARTITIONS as usize;
        until("the next to have all", || member.changes.owned() == all).await;
    }
    ended.push(member.stop().await);

    let committed = committed(&world.cluster, &world.group, &world.topic);
    let started = world.started.all();
    let handled: BTreeSet<Place> = world.handled.all().into_iter().collect();
    let letters = world.dead_lettered();
    let set_aside: BTreeSet<Place> = letters.iter().map(|(place, _)| *place).collect();
    let told: Vec<_> = ended.iter().flat_map(|(_, told, _)| told).collect();
    assert_eq!(
        handled.len(),
        world.handled.len(),
        "{trouble:?}: none is handled twice"
    );
    for (partition, offset) in &started {
        assert!(
            *offset < committed[*partition as usize],
            "{trouble:?}: {partition}/{offset} was started and is not committed"
        );
    }
    let mut missing = 0;
    for (partition, end) in (0..).zip(&committed) {
        for offset in 0..*end {
            let place = (partition, offset);
            if handled.contains(&place) || set_aside.contains(&place) {
                continue;
            }
            missing += 1;
            assert!(
                told.iter().any(|told| told.partition.partition == partition
                    && (told.first_offset..=told.last_offset).contains(&offset)),
                "{trouble:?}: {partition}/{offset} is committed, neither handled nor dead-lettered, and nobody said so: \
                 {told:?}"
            );
        }
    }
    let told: usize = told.iter().map(|told| told.records).sum();
    let counted = ended.iter().map(|(report, ..)| report.committed_unhandled);
    assert!(
        missing <= told,
        "{trouble:?}: {missing} are missing, {told} were told of"
    );
    assert_eq!(told as u64, counted.sum::<u64>(), "{trouble:?}");
    assert_eq!(told, lines.unhandled(&world.topic), "{trouble:?}");
    for (.., most) in &ended {
        assert!(
            *most <= 2 * HANDLERS,
            "{trouble:?}: {most} records were taken on at a time"
        );
    }
    let kinds: BTreeSet<&str> = letters.iter().map(|(_, kind)| &**kind).collect();
    println!(
        "{trouble:?}, dead letters {dead_letters}: committed {committed:?}, handled {}, dead-lettered {} {kinds:?}, told of \
         {told}, missing {missing}",
        handled.len(),
        letters.len()
    );
    match (trouble, dead_letters) {
        (_, false) => assert!(told > 0, "{trouble:?} had no effect"),
        (Trouble::Slow, true) => assert!(kinds.contains("interrupted"), "{kinds:?}"),
        (_, true) => assert!(kinds.contains("out-of-time"), "{trouble:?} {kinds:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn retries_that_are_too_late_are_dead_lettered_when_partitions_go() {
    members_come_and_go(Trouble::Retries, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn records_that_wait_for_an_outage_to_end_are_dead_lettered_when_partitions_go() {
    members_come_and_go(Trouble::Outage, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn handlers_that_take_too_long_are_stopped_and_dead_lettered_when_partitions_go() {
    members_come_and_go(Trouble::Slow, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_dead_letter_topic_what_is_lost_with_partitions_is_told_and_counted() {
    members_come_and_go(Trouble::Retries, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_dead_letter_topic_slow_handlers_that_are_not_awaited_are_told_and_counted() {
    members_come_and_go(Trouble::Slow, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn as_many_records_count_as_abandoned_as_had_a_handler() {
    let Some(cluster) = cluster() else { return };
    let orders = [Ordering::Unordered, Ordering::ByKey, Ordering::ByPartition];
    for guarantee in [Guarantee::AtLeastOnce, Guarantee::AtMostOnce] {
        for order in orders {
            let (topic, group) = (cluster.create_topic("left", 12, &[]), unique("group"));
            let records = (0..1_200).map(|n| {
                let key = format!("k{}", n % 40);
                Record::value(n.to_string()).key(key).partition(n % 12)
            });
            cluster.produce(&topic, records);
            let (begun, ended) = (Seen::<Place>::default(), Seen::<Place>::default());
            let (hang, waits) = tokio::sync::watch::channel(false);
            let noted = (begun.clone(), ended.clone());
            let handler = async move |message: &Message<Text>| -> HandlerResult {
                let place = (message.partition(), message.offset());
                noted.0.note(place);
                // Short at first, so that more is handed over than there are handlers.
                tokio::time::sleep(millis(5)).await;
                if *waits.borrow() {
                    std::future::pending::<()>().await;
                }
                noted.1.note(place);
                Ok(())
            };
            let builder = consumer(&cluster, &group)
                .topic(&topic)
                .guarantee(guarantee)
                .ordering(order)
                .concurrency(HANDLERS);
            let run = Running::start(builder, handler);
            until("some work", || ended.len() > 200).await;
            hang.send(true).unwrap();
            until("all handlers to hang", || {
                begun.len() - ended.len() == HANDLERS
            })
            .await;
            run.handle.stop_now().unwrap();
            let report = run.ended().await.unwrap();
            let open = report.received - report.handled;
            assert_eq!(
                (report.abandoned, report.abandoned + report.unstarted),
                (HANDLERS as u64, open),
                "{guarantee:?} {order:?}"
            );
        }
    }
}

/// Keeps the pump from polling, once, for longer than the group waits for anybody.
struct Slow(std::sync::atomic::AtomicBool);

impl RebalanceListener for Slow {
    fn revoked(&self, _: &[TopicPartition]) {
        if !self.0.swap(true, Relaxed) {
            std::thread::sleep(Duration::from_secs(9));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_committed_in_partitions_that_are_lost_is_dead_lettered_too() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, Trouble::Retries, true);
    let failing = async |_: &Message<Text>| -> HandlerResult { Err("again")? };
    let builder = world
        .builder()
        .property("max.poll.interval.ms", "6000")
        .ordering(Ordering::ByPartition)
        .rebalance_listener(Slow(false.into()));
    let first = Running::start(builder, failing);
    let mut events = first.handle.events().unwrap();
    let handle = first.handle.clone();
    until("each partition to wait for another attempt", || {
        let status = tokio::runtime::Handle::current().block_on(handle.status());
        let waiting = status.unwrap().partitions.into_iter();
        waiting.filter(|partition| partition.retrying > 0).count() == PARTITIONS as usize
    })
    .await;
    let second = Running::start(world.builder(), failing);
    let lost = tokio::time::timeout(common::PATIENCE, async {
        loop {
            if let Some(Event::Lost(partitions)) = events.next().await {
                return partitions;
            }
        }
    });
    let lost = lost.await.expect("it is thrown out of the group");
    assert!(!lost.is_empty());
    // Those were not acknowledged yet when the partition was gone.
    let told = first.stop().await.committed_unhandled;
    assert!(told > 0, "nothing was lost");
    second.stop().await;
    let committed: i64 = committed(&world.cluster, &world.group, &world.topic)
        .into_iter()
        .map(|offset| offset.max(0))
        .sum();
    let set_aside: BTreeSet<Place> = world
        .dead_lettered()
        .into_iter()
        .map(|(place, _)| place)
        .collect();
    assert_eq!(set_aside.len() as i64, committed);
}
