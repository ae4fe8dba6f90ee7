//! Real broker: the same promises under each way in which a group shares its partitions out.

mod common;

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use common::{Changes, Running, Seen, all_committed, committed, consumer, millis, until};
use rdkafka::{
    ClientConfig,
    consumer::{BaseConsumer, Consumer as _},
};
use reliable_consumer::{
    Builder, HandlerResult, Message, Ordering, OwnershipState, PartitionStatus, RebalanceListener,
    RunErrorKind, StartPolicy, Text, TopicPartition,
};
use reliable_consumer_testing::{Cluster, Record, cluster, unique};

/// A group protocol, by the properties that choose it.
type Protocol = &'static [(&'static str, &'static str)];

const COOPERATIVE: Protocol = &[("session.timeout.ms", "6000")];
const RANGE: Protocol = &[
    ("partition.assignment.strategy", "range"),
    ("session.timeout.ms", "6000"),
];
const ROUND_ROBIN: Protocol = &[
    ("partition.assignment.strategy", "roundrobin"),
    ("session.timeout.ms", "6000"),
];
const KIP_848: Protocol = &[("group.protocol", "consumer")];

fn member(cluster: &Cluster, group: &str, topic: &str, protocol: Protocol) -> Builder {
    let builder = reliable_consumer::ReliableConsumer::builder()
        .bootstrap_servers(cluster.brokers())
        .group_id(group)
        .topic(topic)
        .concurrency(16)
        .commit_interval(millis(200));
    let builder = common::with_store_under_test(builder);
    protocol.iter().fold(builder, |builder, (name, value)| {
        builder.property(*name, *value)
    })
}

/// Three members are stopped and started one after another while records keep coming.
async fn rolling_restart(protocol: Protocol) {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("rolling", 6, &[]), unique("group"));
    let seen = Seen::<(i32, i64, String)>::default();
    let handler = {
        let seen = seen.clone();
        async move |message: &Message<Text>| -> HandlerResult {
            let work = message.offset() % 20;
            tokio::time::sleep(millis(work as u64)).await;
            let key = message.key_str().unwrap_or_default().to_owned();
            seen.note((message.partition(), message.offset(), key));
            Ok(())
        }
    };
    let start = || Running::start(member(&cluster, &group, &topic, protocol), handler.clone());
    let mut members = [start(), start(), start()];
    let records = |round: usize| {
        (0..2_000).map(move |n| Record::value(format!("{round}/{n}")).key(format!("k{}", n % 40)))
    };
    cluster.produce(&topic, records(0));
    until("some work", || seen.len() > 200).await;
    for (round, member) in members.iter_mut().enumerate() {
        cluster.produce(&topic, records(round + 1));
        let next = start();
        let report = std::mem::replace(member, next).stop().await;
        assert_eq!(report.abandoned, 0, "{protocol:?}");
        tokio::time::sleep(millis(300)).await;
    }
    all_committed(&cluster, &group, &topic);
    for member in members {
        member.stop().await;
    }
    let mut places: Vec<_> = seen.all();
    assert_eq!(places.len(), 8_000, "{protocol:?}: each record once");
    let mut last: HashMap<&str, i64> = HashMap::new();
    for (_, offset, key) in &places {
        let before = last.insert(key, *offset);
        assert!(
            before.is_none_or(|before| before < *offset),
            "{protocol:?}: order by key"
        );
    }
    places.sort_unstable();
    places.dedup();
    assert_eq!(places.len(), 8_000, "{protocol:?}: none twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_repeats_and_loses_nothing_with_cooperative_sticky() {
    rolling_restart(COOPERATIVE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_repeats_and_loses_nothing_with_range() {
    rolling_restart(RANGE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_repeats_and_loses_nothing_with_round_robin() {
    rolling_restart(ROUND_ROBIN).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_repeats_and_loses_nothing_with_the_protocol_of_kip_848() {
    rolling_restart(KIP_848).await;
}

// R10c
async fn handlers_that_outlast_the_poll_interval(protocol: Protocol) {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("long", 2, &[]), unique("group"));
    cluster.produce(&topic, (0..2).map(|n| Record::value("x").partition(n)));
    let seen = Seen::default();
    let noted = seen.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        noted.note(message.offset());
        tokio::time::sleep(Duration::from_secs(12)).await;
        Ok(())
    };
    let builder = || {
        member(&cluster, &group, &topic, protocol)
            .property("max.poll.interval.ms", "7000")
            .drain_timeout(Duration::from_secs(60))
    };
    let first = Running::start(builder(), handler);
    until("both to run", || seen.len() == 2).await;
    // One partition is taken away while its handler runs for longer than the group waits for anybody.
    let second = Running::start(builder(), Seen::default().noting());
    all_committed(&cluster, &group, &topic);
    let (one, two) = (first.stop().await, second.stop().await);
    // With a store its next owner waits for it all the same.
    let (again, duplicates) = match common::store_under_test() {
        None => (1, 0),
        Some(_) => (0, 1),
    };
    assert_eq!(
        (one.handled, two.handled, two.duplicates.total()),
        (1, again, duplicates),
        "{protocol:?}: the one that was not awaited came again"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn handlers_that_outlast_the_poll_interval_cost_nobody_its_membership() {
    handlers_that_outlast_the_poll_interval(COOPERATIVE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn handlers_that_outlast_the_poll_interval_cost_nobody_its_membership_under_kip_848() {
    handlers_that_outlast_the_poll_interval(KIP_848).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_static_member_comes_back_to_its_partitions_without_a_rebalance() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("static", 4, &[]), unique("group"));
    let listener = common::Changes::default();
    let named = |name: &str| {
        consumer(&cluster, &group)
            .topic(&topic)
            .property("group.instance.id", name)
    };
    let seen = Seen::default();
    let first = Running::start(
        named("a").rebalance_listener(listener.clone()),
        seen.noting(),
    );
    until("all partitions", || listener.owned() == 4).await;
    let second = Running::start(named("b"), seen.noting());
    until("a fair share", || listener.owned() == 2).await;
    let changes = listener.count();
    second.stop().await;
    let second = Running::start(named("b"), seen.noting());
    cluster.produce(
        &topic,
        (0..400).map(|n| Record::value("x").partition(n % 4)),
    );
    all_committed(&cluster, &group, &topic);
    assert_eq!(
        listener.count(),
        changes,
        "the other member noticed nothing"
    );
    assert_eq!(second.stop().await.handled, 200);
    assert_eq!(first.stop().await.handled, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_members_with_one_instance_id_the_earlier_ends_with_an_error_that_says_so() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("fenced", 1, &[]), unique("group"));
    let start = || {
        let builder = consumer(&cluster, &group)
            .topic(&topic)
            .property("group.instance.id", "same");
        Running::start(
            builder.ordering(Ordering::Unordered),
            Seen::default().noting(),
        )
    };
    let first = start();
    until("its start", || committed(&cluster, &group, &topic) == [0]).await;
    let second = start();
    let error = first.ended().await.unwrap_err();
    assert_eq!(error.kind(), RunErrorKind::Fenced);
    assert!(error.to_string().contains("group.instance.id"), "{error}");
    cluster.produce(&topic, [Record::value("x")]);
    all_committed(&cluster, &group, &topic);
    assert_eq!(second.stop().await.handled, 1);
}

/// A member that does not answer holds up whoever joins. One of those is stopped meanwhile: it must not hold up the next
/// one in turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_is_stopped_while_it_joins_does_not_hold_up_the_group() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("joining", 2, &[]), unique("group"));
    cluster.produce(&topic, [Record::value("work")]);
    // Polled until it owns its partitions, and never again: the group waits for it until this interval has passed.
    let silent: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", cluster.brokers())
        .set("group.id", &group)
        .set("partition.assignment.strategy", "cooperative-sticky")
        .set("session.timeout.ms", "6000")
        .set("max.poll.interval.ms", "20000")
        .set("auto.offset.reset", "earliest")
        .set("enable.auto.commit", "false")
        .create()
        .unwrap();
    silent.subscribe(&[&topic]).unwrap();
    until("the first member to own the topic", || {
        drop(silent.poll(millis(100)));
        silent.assignment().unwrap().count() == 2
    })
    .await;

    // Their sessions are the default 45 s.
    let join = |seen: &Seen| {
        let builder = member(&cluster, &group, &topic, &[]);
        Running::start(builder, seen.noting())
    };
    let seen = Seen::default();
    let hasty = join(&seen);
    tokio::time::sleep(millis(2_000)).await;
    let patient = join(&seen);
    let stopping = Instant::now();
    hasty.stop().await;
    let stopped_in = stopping.elapsed();
    assert_eq!(seen.len(), 0, "the silent one holds up the group still");
    assert!(stopped_in < Duration::from_secs(10), "{stopped_in:?}");
    until("the last member to handle the record", || seen.len() > 0).await;
    patient.stop().await;
    // While it closes, the binding's drop takes in the loss of its partitions, and asks a part of the client for the
    // protocol that may have ended by then: it would wait for ever.
    std::mem::forget(silent);
}

/// One that stayed on the broker's list would hold up every rebalance until its session has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_owns_nothing_leaves_the_group_too() {
    let Some(cluster) = cluster() else { return };
    for protocol in [COOPERATIVE, RANGE] {
        let (topic, group) = (cluster.create_topic("standby", 1, &[]), unique("group"));
        let start = || {
            let changes = Changes::default();
            // Whoever is gone without having left is waited for by the group for so long.
            let builder = member(&cluster, &group, &topic, protocol)
                .property("session.timeout.ms", "300000")
                .rebalance_listener(changes.clone());
            (Running::start(builder, Seen::default().noting()), changes)
        };
        let members = || cluster.members(&group);
        let (owner, owned) = start();
        until("the owner", || owned.owned() == 1).await;
        let (standby, _) = start();
        until("both members", || members() == 2).await;
        // In the group, and told that there is nothing for it.
        tokio::time::sleep(millis(1_500)).await;
        standby.stop().await;
        // Soon, and well before its session ends: brokers that hold back an answer to it let it leave when that is over.
        until("the standby to have left", || members() == 1).await;
        owner.stop().await;
        assert_eq!(members(), 0, "{protocol:?}");
    }
}

/// The group has given it partitions that it did not take over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_whose_run_ends_at_its_assignment_leaves_the_group() {
    let Some(cluster) = cluster() else { return };
    for protocol in [COOPERATIVE, RANGE] {
        let (topic, group) = (cluster.create_topic("refused", 2, &[]), unique("group"));
        let builder = member(&cluster, &group, &topic, protocol).start(StartPolicy::Refuse);
        let start = Instant::now();
        let error = Running::start(builder, Seen::default().noting())
            .ended()
            .await
            .unwrap_err();
        assert_eq!(error.kind(), RunErrorKind::NoCommittedOffset);
        assert!(start.elapsed() < Duration::from_secs(8), "{protocol:?}");
        assert_eq!(cluster.members(&group), 0, "{protocol:?}");
    }
}

/// When handlers of a partition have started.
type Starts = Seen<(i32, Instant)>;

/// When a drain has begun and ended, and which partitions it was of.
#[derive(Clone, Default)]
struct Drained(std::sync::Arc<std::sync::OnceLock<FirstDrain>>);

#[derive(Debug, Clone)]
struct FirstDrain {
    gone: Vec<i32>,
    ended: Instant,
}

impl RebalanceListener for Drained {
    fn revoked(&self, partitions: &[TopicPartition]) {
        self.0.get_or_init(|| FirstDrain {
            gone: partitions.iter().map(|place| place.partition).collect(),
            ended: Instant::now(),
        });
    }
}

/// A member gives two of four partitions to another one, and each has a handler that outlasts the drain. Returns the starts
/// in the other two, and when the drain began and ended.
async fn two_partitions_go(
    protocol: Protocol,
    work: Duration,
) -> Option<(Vec<Instant>, Instant, Instant)> {
    let cluster = cluster()?;
    let (topic, group) = (cluster.create_topic("kept", 4, &[]), unique("group"));
    let records = |count| (0..4 * count).map(|n| Record::value("x").partition(n % 4));
    cluster.produce(&topic, records(5_000));
    let starts = Starts::default();
    let noted = starts.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        noted.note((message.partition(), Instant::now()));
        if message.offset() == 0 {
            std::future::pending::<()>().await;
        }
        if !work.is_zero() {
            tokio::time::sleep(work).await;
        }
        Ok(())
    };
    let drained = Drained::default();
    let builder = || {
        member(&cluster, &group, &topic, protocol)
            .ordering(Ordering::Unordered)
            .drain_timeout(Duration::from_secs(8))
            .shutdown_timeout(Duration::from_secs(1))
    };
    let first = Running::start(
        builder().rebalance_listener(drained.clone()),
        handler.clone(),
    );
    until("work in all partitions", || {
        let all = starts.all();
        (0..4).all(|partition| all.iter().filter(|(of, _)| *of == partition).count() > 50)
    })
    .await;
    let second = Running::start(builder(), async |_: &Message<Text>| -> HandlerResult {
        Ok(())
    });
    // The status is answered during the drain, too.
    let began = loop {
        let status = first.handle.status().await.expect("it runs");
        let draining = |it: &PartitionStatus| it.ownership == OwnershipState::Draining;
        if status.partitions.iter().any(draining) {
            break Instant::now();
        }
        cluster.produce(&topic, records(20));
    };
    let FirstDrain { gone, ended } = loop {
        if let Some(first) = drained.0.get() {
            break first.clone();
        }
        cluster.produce(&topic, records(20));
    };
    let kept = |(of, _): &(i32, Instant)| !gone.contains(of);
    until("the others to be read again", || {
        cluster.produce(&topic, records(20));
        starts
            .all()
            .iter()
            .filter(|it| kept(it))
            .any(|(_, at)| *at > ended)
    })
    .await;
    first.stop().await;
    second.stop().await;
    let starts = starts.all().into_iter().filter(kept);
    Some((starts.map(|(_, at)| at).collect(), began, ended))
}

/// The longest time in which none has started, of those that reach beyond a moment.
fn longest_gap(starts: &[Instant], from: Instant) -> Duration {
    let gaps = starts.windows(2).filter(|pair| pair[1] > from);
    let gaps = gaps.map(|pair| pair[1] - pair[0]);
    gaps.max().expect("some have started since")
}

async fn kept_partitions_go_on_with_what_was_read(protocol: Protocol) {
    let work = millis(40);
    let Some((starts, began, ended)) = two_partitions_go(protocol, work).await else {
        return;
    };
    let drain = ended - began;
    let late = began + drain / 2;
    let started = starts
        .iter()
        .filter(|at| (late..ended).contains(at))
        .count();
    println!(
        "{protocol:?}: a drain of {drain:?}, {started} starts in its second half, longest gap {:?}",
        longest_gap(&starts, began)
    );
    assert!(
        started > 10,
        "{protocol:?}: only {started} in the second half of {drain:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_that_stay_go_on_during_a_drain_with_what_was_read_before() {
    kept_partitions_go_on_with_what_was_read(COOPERATIVE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_that_stay_go_on_during_a_drain_with_the_protocol_of_kip_848_as_well() {
    kept_partitions_go_on_with_what_was_read(KIP_848).await;
}

/// librdkafka fetches nothing from the group's question to its answer, and drops what it had fetched.
#[tokio::test(flavor = "multi_thread")]
async fn partitions_that_stay_stand_still_no_longer_than_a_drain_takes() {
    let Some((starts, began, ended)) = two_partitions_go(COOPERATIVE, Duration::ZERO).await else {
        return;
    };
    let (drain, gap) = (ended - began, longest_gap(&starts, began));
    println!("a drain of {drain:?}, longest gap {gap:?}");
    assert!(gap < drain * 2, "{gap:?} in a drain of {drain:?}");
}
