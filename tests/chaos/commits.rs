//! What the group had committed when, as the brokers tell it.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use rdkafka::{
    ClientConfig, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
};
use reliable_consumer_testing::Cluster;

use crate::{PARTITIONS, now};

/// By partition, each commit that was seen: Unix milliseconds before which it was not there, and at which it was.
pub(crate) struct Commits(Vec<Vec<(u64, u64)>>);

impl Commits {
    /// What was finished by then had surely been committed at `at`.
    ///
    /// One commit is on its way at a time, and carries all that finished before it was sent. So the last one that was
    /// seen carries at least what finished before the one ahead of it arrived.
    pub(crate) fn cover(&self, partition: i32, at: u64) -> u64 {
        let seen = &self.0[partition as usize];
        let known = seen.partition_point(|&(_, there)| there <= at);
        known.checked_sub(2).map_or(0, |ahead| seen[ahead].0)
    }
}

pub(crate) fn watch(cluster: &Cluster, group: &str, topic: &str, over: &AtomicBool) -> Commits {
    // It never joins, so it only asks.
    let group: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", cluster.brokers())
        .set("group.id", group)
        .create()
        .unwrap();
    let mut asked = TopicPartitionList::new();
    asked.add_partition_range(topic, 0, PARTITIONS - 1);
    let mut seen = vec![Vec::new(); PARTITIONS as usize];
    let mut last = vec![(Offset::Invalid, String::new()); PARTITIONS as usize];
    let mut before = now();
    while !over.load(Ordering::Relaxed) {
        let asking = now();
        // Nothing is known while brokers are away.
        if let Ok(answer) = group.committed_offsets(asked.clone(), Duration::from_secs(2)) {
            for element in answer.elements() {
                let partition = element.partition() as usize;
                let state = (element.offset(), element.metadata().to_owned());
                if element.error().is_ok() && state != last[partition] {
                    last[partition] = state;
                    seen[partition].push((before, now()));
                }
            }
            before = asking;
        }
        thread::sleep(Duration::from_millis(200));
    }
    Commits(seen)
}
