//! A real broker behind a proxy: the answer to a heartbeat of KIP-848 that brings a member its new assignment comes too late.
//! librdkafka gives it up, and the brokers believe that it came.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering as Atomic},
    },
    thread,
    time::{Duration, Instant},
};

use common::{Changes, Running, Seen, millis, until};
use reliable_consumer::{Event, Events, HandlerResult, Message, ReliableConsumer, Text};
use reliable_consumer_testing::{Cluster, Proxy, Record, own_cluster_with, unique};

const PARTITIONS: i32 = 12;
/// Longer than a member waits for an answer, which is one heartbeat interval.
const TOO_LATE: Duration = Duration::from_millis(3_000);
/// How long a partition may stand still.
const BOUND: Duration = Duration::from_secs(20);

/// A topic into which records keep coming, and its group, one of whose members may be behind a proxy.
struct World {
    cluster: Arc<Cluster>,
    proxy: Proxy,
    topic: String,
    group: String,
    handled: Seen<(i32, Instant)>,
    done: Arc<AtomicBool>,
}

struct Member {
    run: Running,
    changes: Changes,
    events: Events,
}

impl World {
    fn new() -> Option<Self> {
        let cluster = own_cluster_with(&[
            ("group.consumer.heartbeat.interval.ms", "1000"),
            ("group.consumer.min.heartbeat.interval.ms", "1000"),
        ])?;
        let cluster = Arc::new(cluster);
        let topic = cluster.create_topic("lost-answers", PARTITIONS, &[]);
        let done = Arc::new(AtomicBool::new(false));
        let (source, name, end) = (Arc::clone(&cluster), topic.clone(), Arc::clone(&done));
        thread::spawn(move || {
            while !end.load(Atomic::Relaxed) {
                let records = (0..PARTITIONS).map(|n| Record::value("x").partition(n));
                source.produce(&name, records);
                thread::sleep(millis(300));
            }
        });
        Some(Self {
            proxy: Proxy::start(cluster.brokers()),
            topic,
            group: unique("group"),
            handled: Seen::default(),
            done,
            cluster,
        })
    }

    fn member(&self, brokers: &str, work: Duration) -> Member {
        let changes = Changes::default();
        let builder = ReliableConsumer::builder()
            .bootstrap_servers(brokers)
            .group_id(&self.group)
            .topic(&self.topic)
            .concurrency(128)
            .commit_interval(millis(100))
            .rebalance_listener(changes.clone())
            .property("group.protocol", "consumer");
        let handled = self.handled.clone();
        let handler = async move |message: &Message<Text>| -> HandlerResult {
            tokio::time::sleep(work).await;
            handled.note((message.partition(), Instant::now()));
            Ok(())
        };
        let run = Running::start(builder, handler);
        let events = run.handle.events().unwrap();
        Member {
            run,
            changes,
            events,
        }
    }

    fn healthy(&self) -> Member {
        self.member(self.cluster.brokers(), Duration::ZERO)
    }

    fn victim(&self) -> Member {
        self.member(self.proxy.brokers(), Duration::ZERO)
    }

    /// Waits for an answer to be held back, and from then on for a record of each partition to be handled.
    async fn every_partition_goes_on_after_an_answer_is_lost(&self) {
        until("an answer to be held back", || self.proxy.held_back() == 1).await;
        let lost = Instant::now();
        let standing = || {
            let mut standing: BTreeSet<_> = (0..PARTITIONS).collect();
            for (partition, at) in self.handled.all() {
                if at > lost {
                    standing.remove(&partition);
                }
            }
            standing
        };
        while !standing().is_empty() {
            assert!(
                lost.elapsed() < BOUND,
                "nobody handles partitions {:?}",
                standing()
            );
            tokio::time::sleep(millis(50)).await;
        }
        println!("every partition went on after {:?}", lost.elapsed());
    }

    /// The victim joined again this often, and nobody else did or lost anything.
    async fn end(self, victim: Member, times: usize, others: Vec<Member>) {
        self.done.store(true, Atomic::Relaxed);
        let rejoined = |events: &[Event]| {
            let is = |event: &&Event| matches!(event, Event::Rejoining { .. });
            events.iter().filter(is).count()
        };
        let told = victim.stop().await;
        assert_eq!(rejoined(&told), times, "{told:?}");
        for member in others {
            let told = member.stop().await;
            assert_eq!(rejoined(&told), 0, "{told:?}");
            let lost = told.iter().any(|event| matches!(event, Event::Lost(_)));
            assert!(!lost, "{told:?}");
        }
    }
}

impl Member {
    async fn owns(&self, partitions: usize) {
        until("its share", || self.changes.owned() == partitions).await;
    }

    async fn stop(mut self) -> Vec<Event> {
        self.run.stop().await;
        let mut told = Vec::new();
        while let Some(event) = self.events.next().await {
            told.push(event);
        }
        told
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_was_not_told_what_to_give_away_joins_again() {
    let Some(world) = World::new() else { return };
    let victim = world.victim();
    victim.owns(12).await;
    world
        .proxy
        .hold_back(TOO_LATE, |partitions| partitions < 12);
    let other = world.healthy();
    until("an answer to be held back", || world.proxy.held_back() == 1).await;
    let lost = Instant::now();
    while (victim.changes.owned(), other.changes.owned()) != (6, 6) {
        assert!(lost.elapsed() < BOUND, "the victim gives nothing away");
        tokio::time::sleep(millis(50)).await;
    }
    println!("both have their share after {:?}", lost.elapsed());
    world.end(victim, 1, vec![other]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_that_a_joining_member_was_not_told_of_are_handled_within_seconds() {
    let Some(world) = World::new() else { return };
    let first = world.healthy();
    first.owns(12).await;
    // It gives its partitions away later than the first one: the victim gets its share in two parts.
    let second = world.member(world.cluster.brokers(), millis(3_000));
    second.owns(6).await;
    until("work of the slow member", || world.handled.len() > 100).await;
    world
        .proxy
        .hold_back(TOO_LATE, |partitions| partitions == 4);
    let victim = world.victim();
    world
        .every_partition_goes_on_after_an_answer_is_lost()
        .await;
    victim.owns(4).await;
    world.end(victim, 1, vec![first, second]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_of_a_member_that_left_are_handled_although_the_answer_was_lost() {
    let Some(world) = World::new() else { return };
    let (first, second) = (world.healthy(), world.healthy());
    let victim = world.victim();
    for member in [&first, &second, &victim] {
        member.owns(4).await;
    }
    world.proxy.hold_back(TOO_LATE, |partitions| partitions > 4);
    let left = second.stop().await;
    assert!(
        !left
            .iter()
            .any(|event| matches!(event, Event::Rejoining { .. }))
    );
    world
        .every_partition_goes_on_after_an_answer_is_lost()
        .await;
    victim.owns(6).await;
    // The share is of a new epoch: the coordinator throws out a member that goes on with the old one.
    world.end(victim, 0, vec![first]).await;
}
