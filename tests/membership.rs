//! Real brokers: members that cannot join, or not yet. Each says why, in status and events, and ends where waiting does not
//! help.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    env,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use common::{PATIENCE, Running, Seen, all_committed, consumer, millis};
use reliable_consumer::{Builder, Event, Membership, ReliableConsumer, RunErrorKind};
use reliable_consumer_testing::{Cluster, Record, cluster, own_cluster_with, unique};

/// A consumer with the defaults of its protocol.
fn plain(brokers: &str, group: &str, topic: &str) -> Builder {
    ReliableConsumer::builder()
        .bootstrap_servers(brokers)
        .group_id(group)
        .topic(topic)
        .commit_interval(millis(100))
}

fn static_member(brokers: &str, group: &str, topic: &str) -> Builder {
    plain(brokers, group, topic)
        .property("group.protocol", "consumer")
        .property("group.instance.id", "the-one")
}

/// The cause that the status gives for not being a member, waited for.
async fn cause_in_status(run: &Running) -> String {
    let began = Instant::now();
    loop {
        let status = run.handle.status().await.unwrap();
        if let Membership::Joining {
            cause: Some(cause), ..
        } = status.membership
        {
            return cause;
        }
        assert!(began.elapsed() < PATIENCE, "{status:?}");
        tokio::time::sleep(millis(100)).await;
    }
}

async fn is_member(run: &Running) {
    let began = Instant::now();
    while !matches!(
        run.handle.status().await.unwrap().membership,
        Membership::Member { .. }
    ) {
        assert!(began.elapsed() < 2 * PATIENCE, "not a member");
        tokio::time::sleep(millis(100)).await;
    }
}

/// A member that is a process of its own, and can be killed.
fn member_process(brokers: &str, group: &str, topic: &str) -> Child {
    Command::new(env::current_exe().unwrap())
        .args(["member", "--exact", "--ignored", "--nocapture"])
        .env("MEMBER_BROKERS", brokers)
        .env("MEMBER_GROUP", group)
        .env("MEMBER_TOPIC", topic)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a process of the other tests"]
async fn member() {
    let Ok(brokers) = env::var("MEMBER_BROKERS") else {
        return;
    };
    let told = |name: &str| env::var(name).unwrap();
    let (group, topic) = (told("MEMBER_GROUP"), told("MEMBER_TOPIC"));
    let builder = static_member(&brokers, &group, &topic);
    drop(
        Running::start(builder, Seen::default().noting())
            .ended()
            .await,
    );
}

/// A broker on which sessions of KIP-848 are short.
fn short_sessions() -> Option<Cluster> {
    own_cluster_with(&[
        ("group.consumer.session.timeout.ms", "8000"),
        ("group.consumer.heartbeat.interval.ms", "1000"),
        ("group.consumer.min.heartbeat.interval.ms", "1000"),
    ])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_static_member_that_was_killed_waits_for_its_old_session_and_goes_on() {
    let Some(cluster) = short_sessions() else {
        return;
    };
    let (topic, group) = (cluster.create_topic("static", 2, &[]), unique("group"));
    cluster.produce(&topic, (0..10).map(|n| Record::value("x").partition(n % 2)));
    let mut first = member_process(cluster.brokers(), &group, &topic);
    tokio::task::block_in_place(|| all_committed(&cluster, &group, &topic));
    first.kill().unwrap();
    first.wait().unwrap();
    cluster.produce(&topic, (0..10).map(|n| Record::value("y").partition(n % 2)));
    let second = Running::start(
        static_member(cluster.brokers(), &group, &topic),
        Seen::default().noting(),
    );
    let mut events = second.handle.events().unwrap();
    let cause = cause_in_status(&second).await;
    assert!(cause.contains("group.instance.id `the-one`"), "{cause}");
    assert!(
        cause.contains("group.consumer.session.timeout.ms"),
        "{cause}"
    );
    is_member(&second).await;
    tokio::task::block_in_place(|| all_committed(&cluster, &group, &topic));
    assert_eq!(second.stop().await.handled, 10);
    let mut told = Vec::new();
    while let Some(event) = events.next().await {
        match event {
            Event::Joining { .. } => told.push("joining"),
            Event::Joined { .. } => told.push("joined"),
            _ => {}
        }
    }
    assert_eq!(
        (told.first(), told.last()),
        (Some(&"joining"), Some(&"joined")),
        "{told:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_static_member_whose_twin_lives_on_ends_with_both_causes_and_leaves_the_twin_alone() {
    let Some(cluster) = short_sessions() else {
        return;
    };
    let (topic, group) = (cluster.create_topic("twins", 2, &[]), unique("group"));
    let member = || static_member(cluster.brokers(), &group, &topic);
    let twin = Running::start(member(), Seen::default().noting());
    is_member(&twin).await;
    let builder = member().instance_id_timeout(Duration::from_secs(4));
    let second = Running::start(builder, Seen::default().noting());
    cause_in_status(&second).await;
    let error = second.ended().await.unwrap_err();
    assert_eq!(error.kind(), RunErrorKind::Fenced);
    for cause in ["another process", "group.consumer.session.timeout.ms"] {
        assert!(error.to_string().contains(cause), "{error}");
    }
    cluster.produce(&topic, (0..10).map(|n| Record::value("x").partition(n % 2)));
    tokio::task::block_in_place(|| all_committed(&cluster, &group, &topic));
    assert_eq!(twin.stop().await.handled, 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_does_not_wait_for_an_instance_id_that_is_taken() {
    let Some(cluster) = short_sessions() else {
        return;
    };
    let (topic, group) = (cluster.create_topic("twins", 1, &[]), unique("group"));
    let member = || static_member(cluster.brokers(), &group, &topic);
    let twin = Running::start(member(), Seen::default().noting());
    is_member(&twin).await;
    let second = Running::start(member(), Seen::default().noting());
    cause_in_status(&second).await;
    let began = Instant::now();
    second.stop().await;
    assert!(
        began.elapsed() < Duration::from_secs(10),
        "{:?}",
        began.elapsed()
    );
    twin.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_whose_coordinator_cannot_be_made_is_told_of_by_the_property_to_change() {
    let wanted = own_cluster_with(&[("offsets.topic.replication.factor", "3")]);
    let Some(cluster) = wanted else { return };
    let topic = cluster.create_topic("no-coordinator", 1, &[]);
    for protocol in ["classic", "consumer"] {
        let builder =
            plain(cluster.brokers(), &unique("group"), &topic).property("group.protocol", protocol);
        let run = Running::start(builder, Seen::default().noting());
        let mut events = run.handle.events().unwrap();
        let told = tokio::time::timeout(Duration::from_secs(30), async {
            loop {
                if let Some(Event::Joining { cause, .. }) = events.next().await {
                    return cause;
                }
            }
        });
        let told = told.await.expect("an event within 30 s");
        let name = "offsets.topic.replication.factor";
        assert!(told.contains(name), "{protocol}: {told}");
        assert!(cause_in_status(&run).await.contains(name), "{protocol}");
        run.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_the_brokers_settings_keep_out_ends_with_the_property_to_change() {
    let settings = [
        ("group.max.session.timeout.ms", "30000"),
        ("group.coordinator.rebalance.protocols", "classic"),
    ];
    let Some(cluster) = own_cluster_with(&settings) else {
        return;
    };
    let topic = cluster.create_topic("kept-out", 1, &[]);
    for (protocol, name) in [
        ("classic", "session.timeout.ms"),
        ("consumer", "group.protocol=classic"),
    ] {
        let builder =
            plain(cluster.brokers(), &unique("group"), &topic).property("group.protocol", protocol);
        let run = Running::start(builder, Seen::default().noting());
        let error = run.ended().await.unwrap_err();
        assert_eq!(error.kind(), RunErrorKind::CannotJoin, "{error}");
        assert!(error.to_string().contains(name), "{error}");
    }
}

/// A member that has died holds up whoever joins until its session has ended: that is waited for, and told.
#[tokio::test(flavor = "multi_thread")]
async fn a_classic_group_that_waits_for_a_member_that_died_says_so() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("died", 2, &[]), unique("group"));
    cluster.produce(&topic, (0..10).map(|n| Record::value("x").partition(n % 2)));
    let member = || consumer(&cluster, &group).topic(&topic);
    let mut first = Command::new(env::current_exe().unwrap())
        .args(["classic_member", "--exact", "--ignored", "--nocapture"])
        .env("MEMBER_GROUP", &group)
        .env("MEMBER_TOPIC", &topic)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    tokio::task::block_in_place(|| all_committed(&cluster, &group, &topic));
    first.kill().unwrap();
    first.wait().unwrap();
    let second = Running::start(member(), Seen::default().noting());
    let cause = cause_in_status(&second).await;
    assert!(cause.contains("session.timeout.ms"), "{cause}");
    is_member(&second).await;
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a process of the other tests"]
async fn classic_member() {
    let Ok(group) = env::var("MEMBER_GROUP") else {
        return;
    };
    let (cluster, topic) = (cluster().unwrap(), env::var("MEMBER_TOPIC").unwrap());
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .property("session.timeout.ms", "25000");
    drop(
        Running::start(builder, Seen::default().noting())
            .ended()
            .await,
    );
}
