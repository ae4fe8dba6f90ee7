//! What the tests against a real broker share.

#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::{
    env,
    sync::{Arc, Mutex},
    time::Duration,
};

use reliable_consumer::{
    Builder, ConsumerHandle, Handler, HandlerResult, Message, Payload, RebalanceListener,
    ReliableConsumer, Report, RunError, Text, TopicPartition,
};
use reliable_consumer_testing::{Cluster, eventually};
#[cfg(feature = "redis")]
use reliable_consumer_testing::{ServiceKind, service};
use tokio::task::JoinHandle;

/// Long enough for anything that is going to happen.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A consumer as most tests want it: quick to commit.
pub fn consumer(cluster: &Cluster, group: &str) -> Builder {
    let builder = ReliableConsumer::builder()
        .bootstrap_servers(cluster.brokers())
        .group_id(group)
        .commit_interval(millis(100))
        .property("session.timeout.ms", "6000")
        .property("heartbeat.interval.ms", "500");
    with_store_under_test(builder)
}

/// The idempotency store that this run of the tests has consumers use: what holds without one is to hold with one.
pub fn store_under_test() -> Option<String> {
    let named = env::var("RELIABLE_CONSUMER_TEST_STORE").ok();
    named.filter(|name| !name.is_empty())
}

/// Has the consumer use the store under test, if there is one. What a test stores is its own: the group's name is in it.
pub fn with_store_under_test(builder: Builder) -> Builder {
    match store_under_test().as_deref() {
        None => builder,
        Some("redis") => builder.idempotency(redis()),
        Some(other) => panic!("RELIABLE_CONSUMER_TEST_STORE={other}: only redis can be chosen"),
    }
}

#[cfg(feature = "redis")]
fn redis() -> reliable_consumer::idempotency::RedisStore {
    let redis = tokio::task::block_in_place(|| service(ServiceKind::Redis));
    let redis = redis.expect("a store under test is there");
    // Order by partition is one call after another.
    redis.sync_seldom();
    reliable_consumer::idempotency::RedisStore::connect(redis.url()).unwrap()
}

#[cfg(not(feature = "redis"))]
fn redis() -> reliable_consumer::idempotency::MemoryStore {
    panic!("RELIABLE_CONSUMER_TEST_STORE=redis needs --features redis")
}

/// A consumer at work.
pub struct Running {
    pub handle: ConsumerHandle,
    run: JoinHandle<Result<Report, RunError>>,
}

impl Running {
    pub fn start<P: Payload, H: Handler<P>>(builder: Builder, handler: H) -> Self {
        let consumer = builder.build().unwrap();
        let handle = consumer.handle();
        Self {
            handle,
            run: tokio::spawn(consumer.run(handler).into_future()),
        }
    }

    pub async fn ended(self) -> Result<Report, RunError> {
        tokio::time::timeout(PATIENCE, self.run)
            .await
            .expect("the run ends")
            .expect("the run does not panic")
    }

    pub async fn stop(self) -> Report {
        self.handle.shutdown().unwrap();
        self.ended().await.unwrap()
    }

    /// Drops the run's future.
    pub async fn drop_it(self) {
        self.run.abort();
        assert!(self.run.await.unwrap_err().is_cancelled());
    }
}

/// Offsets, or anything else, that handlers have noted, in order.
#[derive(Clone)]
pub struct Seen<T = i64>(Arc<Mutex<Vec<T>>>);

impl<T> Default for Seen<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T: Clone> Seen<T> {
    pub fn note(&self, what: T) {
        self.0.lock().unwrap().push(what);
    }

    pub fn all(&self) -> Vec<T> {
        self.0.lock().unwrap().clone()
    }

    pub fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

impl Seen<i64> {
    /// A handler that notes offsets and succeeds.
    pub fn noting(&self) -> impl Handler<Text> + use<> {
        let seen = self.clone();
        async move |message: &Message<Text>| -> HandlerResult {
            seen.note(message.offset());
            Ok(())
        }
    }
}

pub fn committed(cluster: &Cluster, group: &str, topic: &str) -> Vec<i64> {
    let committed = cluster.committed(group, topic).into_iter();
    committed
        .map(|committed| committed.offset.unwrap_or(-1))
        .collect()
}

/// Waits until the group has committed everything in the topic.
pub fn all_committed(cluster: &Cluster, group: &str, topic: &str) {
    let ends = cluster.end_offsets(topic);
    eventually("everything to be committed", PATIENCE, || {
        committed(cluster, group, topic) == ends
    });
}

pub async fn until(what: &str, condition: impl FnMut() -> bool) {
    tokio::task::block_in_place(|| eventually(what, PATIENCE, condition));
}

/// Follows how many partitions a member owns, and how often that changed.
#[derive(Clone, Default)]
pub struct Changes(Arc<Mutex<(usize, usize)>>);

impl Changes {
    pub fn owned(&self) -> usize {
        self.0.lock().unwrap().0
    }

    pub fn count(&self) -> usize {
        self.0.lock().unwrap().1
    }
}

impl RebalanceListener for Changes {
    fn assigned(&self, partitions: &[TopicPartition]) {
        let mut changes = self.0.lock().unwrap();
        changes.0 += partitions.len();
        changes.1 += 1;
    }

    fn revoked(&self, partitions: &[TopicPartition]) {
        let mut changes = self.0.lock().unwrap();
        changes.0 -= partitions.len();
        changes.1 += 1;
    }
}
