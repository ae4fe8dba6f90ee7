//! Commits: sent without waiting, answered on a queue of our own.

use std::time::Duration;

use rdkafka::types::RDKafkaErrorCode as Code;

use super::{
    errors::{commit_result, is_terminal},
    ffi::CommitEntry,
    pump::Pump,
};
use crate::{
    consumer::{Event, TopicPartition},
    engine::{CommitResult, Ownership},
    record::Source,
};

impl Pump {
    pub(super) fn commit(&mut self) -> bool {
        let answered = self.take_commit_answer(Duration::ZERO);
        let Some(commit) = self.engine.next_commit() else {
            return answered;
        };
        self.send_commit(&commit);
        true
    }

    pub(super) fn send_commit(&mut self, commit: &crate::engine::Commit) {
        commit
            .entries
            .iter()
            .for_each(|entry| self.report_cut(entry));
        for entry in &commit.entries {
            if let Some(held) = &mut self.held[entry.owner.slot()] {
                held.epochs.forget_below(entry.offset);
            }
        }
        let entries: Vec<_> = commit
            .entries
            .iter()
            .map(|entry| {
                let held = self.held[entry.owner.slot()].as_ref();
                let held = held.expect("what is committed is held");
                let source = &held.source;
                CommitEntry {
                    topic: &source.topic,
                    partition: source.partition,
                    offset: entry.offset,
                    leader_epoch: held.epochs.below(entry.offset),
                    metadata: (!entry.metadata.is_empty()).then_some(&*entry.metadata),
                }
            })
            .collect();
        let sent = match &self.reply {
            Some(reply) => reply.commit(&entries),
            None => Err(rdkafka::types::RDKafkaErrorCode::BrokerDestroy),
        };
        if let Err(code) = sent {
            tracing::warn!(error = %code, "a commit could not be sent; it is tried again");
            self.engine.commit_answered(&[], commit_result(Some(code)));
        }
    }

    /// Says once that finished records are not covered by a commit, and that they are again.
    pub(super) fn report_cut(&mut self, entry: &crate::engine::CommitEntry) {
        let held = self.held[entry.owner.slot()].as_mut();
        let held = held.expect("what is committed is held");
        if held.cut_reported == (entry.cut > 0) {
            return;
        }
        held.cut_reported = entry.cut > 0;
        let Source {
            topic, partition, ..
        } = &*held.source;
        let (uncovered, committed) = (entry.cut, entry.offset);
        if held.cut_reported {
            tracing::warn!(
                topic = %topic,
                partition,
                committed,
                uncovered,
                metadata = entry.metadata.len(),
                "a commit's metadata has no room for all that is finished: a restart now would handle {uncovered} \
                 finished records again; see why the record at offset {committed} does not finish, or choose a \
                 smaller window"
            );
        } else {
            tracing::info!(topic = %topic, partition, committed, "all that is finished fits into the commit again");
        }
    }

    pub(super) fn source(&self, owner: Ownership) -> &Source {
        let held = self.held[owner.slot()].as_ref();
        &held.expect("a current ownership is held").source
    }

    /// Takes in the answer to the commit in flight, waiting up to `wait` for it.
    pub(super) fn take_commit_answer(&mut self, wait: Duration) -> bool {
        if !self.engine.commit_in_flight() {
            return false;
        }
        let Some(answer) = self.reply.as_ref().and_then(|reply| reply.poll(wait)) else {
            return false;
        };
        let mut results = Vec::with_capacity(answer.partitions.len());
        for entry in &answer.partitions {
            let error = entry.error.or(answer.error);
            results.push(commit_result(error));
            if let Some(error) = error {
                self.commit_failed(error, Some((&entry.topic, entry.partition)), entry.offset);
            }
        }
        if let (true, Some(error)) = (results.is_empty(), answer.error) {
            self.commit_failed(error, None, -1);
        }
        self.engine
            .commit_answered(&results, commit_result(answer.error));
        if answer.error.is_none() {
            self.brokers_answer();
        }
        true
    }

    fn commit_failed(&mut self, error: Code, place: Option<(&str, i32)>, offset: i64) {
        if is_terminal(error) {
            self.commits_refused = true;
            return self.client_error(error, place, "");
        }
        let (topic, partition) = place.unzip();
        if commit_result(Some(error)) == CommitResult::Rejoining {
            // What a rebalance does to commits on their way. The next assignment tells what is ours.
            tracing::debug!(topic = topic.map(display), partition, offset, %error, "a commit met a rebalance");
        } else {
            tracing::warn!(
                topic = topic.map(display), partition, offset, %error, "a commit failed; the newest state is committed again"
            );
            if let Some((topic, partition)) = place {
                self.tell(Event::CommitFailed {
                    partition: TopicPartition {
                        topic: topic.into(),
                        partition,
                    },
                    error: error.to_string(),
                });
            }
        }
    }
}
