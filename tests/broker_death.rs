//! Three brokers and a group of KIP-848: a broker dies that is not the group's coordinator, while members come and go. The
//! coordinator answers late then, since its log waits for the replica that has died; no partition may be without an owner
//! for that.
//!
//! Two rounds by default; `BROKER_DEATH_ROUNDS=20` for more.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    collections::HashMap,
    env,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering as Atomic},
    },
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use common::{PATIENCE, Running, Seen, all_committed, millis};
use rdkafka::{
    ClientConfig,
    consumer::{BaseConsumer, Consumer as _},
    producer::{BaseRecord, DefaultProducerContext, Producer as _, ThreadedProducer},
};
use reliable_consumer::{Event, HandlerResult, Message, ReliableConsumer, Text};
use reliable_consumer_testing::{Cluster, own_cluster, unique};

const PARTITIONS: i32 = 12;
/// How long a partition may stand still with work to do.
const BOUND: Duration = Duration::from_secs(20);
/// For how long a round goes on after the death: a partition without an owner stands still for longer than the bound.
const ROUND: Duration = Duration::from_secs(40);

fn now() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
    since_epoch.unwrap().as_millis() as u64
}

/// The broker that leads the partition of the offsets topic which a group's name leads to.
fn coordinator(cluster: &Cluster, group: &str) -> i32 {
    let client: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", cluster.brokers())
        .create()
        .unwrap();
    let metadata = client
        .fetch_metadata(Some("__consumer_offsets"), PATIENCE)
        .unwrap();
    let partitions = metadata.topics()[0].partitions();
    // As `String.hashCode` of Java does for ASCII.
    let hash = group.bytes().fold(0_i32, |hash, byte| {
        hash.wrapping_mul(31).wrapping_add(i32::from(byte))
    });
    let number = (hash & i32::MAX) % partitions.len() as i32;
    let ours = partitions.iter().find(|it| it.id() == number).unwrap();
    ours.leader()
}

/// Sends to each partition until it is told to end, also while brokers die.
fn produce_until(brokers: &str, topic: &str, over: &AtomicBool) {
    let producer: ThreadedProducer<_> = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("acks", "all")
        .set("enable.idempotence", "true")
        .create_with_context(DefaultProducerContext)
        .unwrap();
    while !over.load(Atomic::Relaxed) {
        for partition in 0..PARTITIONS {
            let record = BaseRecord::<(), _>::to(topic)
                .partition(partition)
                .payload("x");
            producer.send(record).map_err(|(error, _)| error).unwrap();
        }
        thread::sleep(millis(200));
    }
    producer.flush(2 * PATIENCE).unwrap();
}

/// Partition, when it was there, and when it was handled, in Unix milliseconds.
type Handled = Seen<(i32, u64, u64)>;

fn member(cluster: &Cluster, group: &str, topic: &str, handled: &Handled) -> Running {
    let builder = ReliableConsumer::builder()
        .bootstrap_servers(cluster.brokers())
        .group_id(group)
        .topic(topic)
        .property("group.protocol", "consumer");
    let handled = handled.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        let there = message.timestamp().unwrap().as_millis() as u64;
        handled.note((message.partition(), there, now()));
        Ok(())
    };
    Running::start(builder, handler)
}

/// The longest time in which a partition had work and finished nothing, and which.
fn longest_stall(handled: &Handled) -> (u64, i32) {
    let mut partitions = HashMap::<_, Vec<_>>::new();
    for (partition, there, at) in handled.all() {
        partitions.entry(partition).or_default().push((at, there));
    }
    let stalls = partitions.into_iter().map(|(partition, mut finishes)| {
        finishes.sort_unstable();
        let (mut waiting, mut longest) = (u64::MAX, 0);
        // From the last to the first: what finished later was waiting, as soon as it was there.
        for index in (0..finishes.len()).rev() {
            let (until, there) = finishes[index];
            waiting = waiting.min(there);
            let before = index.checked_sub(1).map_or(0, |index| finishes[index].0);
            longest = longest.max(until.saturating_sub(before.max(waiting)));
        }
        (longest, partition)
    });
    stalls.max().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_partition_stands_still_when_a_broker_dies_that_is_not_the_coordinator() {
    let Some(cluster) = own_cluster(3) else {
        return;
    };
    let rounds = env::var("BROKER_DEATH_ROUNDS").ok();
    let rounds: usize = rounds.map_or(2, |rounds| rounds.parse().unwrap());
    let cluster = Arc::new(cluster);
    let stamped = [("message.timestamp.type", "LogAppendTime")];
    let topic = cluster.create_topic("broker-death", PARTITIONS, &stamped);
    let group = unique("group");
    let over = Arc::new(AtomicBool::new(false));
    let traffic = {
        let (cluster, topic, over) = (Arc::clone(&cluster), topic.clone(), Arc::clone(&over));
        thread::spawn(move || produce_until(cluster.brokers(), &topic, &over))
    };
    let handled = Handled::default();
    let start = || member(&cluster, &group, &topic, &handled);
    let mut members = vec![start(), start()];
    let mut events: Vec<_> = members
        .iter()
        .map(|member| member.handle.events().unwrap())
        .collect();
    common::until("all partitions to be handled", || {
        let mut seen: Vec<_> = handled.all().into_iter().map(|(it, ..)| it).collect();
        seen.sort_unstable();
        seen.dedup();
        seen.len() == PARTITIONS as usize
    })
    .await;
    for round in 1..=rounds {
        tokio::task::block_in_place(|| {
            for topic in [&topic, "__consumer_offsets"] {
                cluster.wait_in_sync(topic);
            }
            let spared = coordinator(&cluster, &group);
            let victim = (1..=3).filter(|broker| *broker != spared).nth(round % 2);
            cluster.kill([victim.unwrap() as usize]);
            // The group changes while its coordinator waits for the replica.
            let third = start();
            events.push(third.handle.events().unwrap());
            members.push(third);
            thread::sleep(ROUND);
            cluster.restart([victim.unwrap() as usize]);
        });
        members.remove(0).stop().await;
        println!(
            "round {round}: longest stall so far {:?}",
            longest_stall(&handled)
        );
    }
    over.store(true, Atomic::Relaxed);
    tokio::task::block_in_place(|| {
        traffic.join().unwrap();
        all_committed(&cluster, &group, &topic);
    });
    for member in members {
        member.stop().await;
    }
    let mut rejoined = 0;
    for mut events in events {
        while let Some(event) = events.next().await {
            rejoined += usize::from(matches!(event, Event::Rejoining { .. }));
        }
    }
    let (stall, partition) = longest_stall(&handled);
    println!("{rounds} rounds: longest stall {stall} ms, members joined again {rejoined} times");
    assert!(
        stall < BOUND.as_millis() as u64,
        "partition {partition} stood still for {stall} ms; members joined again {rejoined} times"
    );
}
