//! What others are told: partitions that come and go, records that are stuck. And what is looked at once a second.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rdkafka::{Offset, consumer::Consumer as _};

use super::{BaseConsumer, pump::Pump};
use crate::{
    consumer::{Event, StuckRecord, TopicPartition},
    engine::Ownership,
};

/// How partitions come and go.
#[derive(Debug, Clone, Copy)]
pub(super) enum Change {
    Assigned,
    Revoked,
    Lost,
}

impl Pump {
    pub(super) fn named(&self, owners: &[Ownership]) -> Vec<TopicPartition> {
        let named = owners
            .iter()
            .map(|owner| TopicPartition::of(self.source(*owner)));
        named.collect()
    }

    /// Tells the user's listener, and whoever follows the events.
    pub(super) fn announce(&self, change: Change, partitions: &[TopicPartition]) {
        if partitions.is_empty() {
            return;
        }
        if let Some(listener) = &self.settings.listener {
            let told = catch_unwind(AssertUnwindSafe(|| match change {
                Change::Assigned => listener.assigned(partitions),
                Change::Revoked => listener.revoked(partitions),
                Change::Lost => listener.lost(partitions),
            }));
            if told.is_err() {
                tracing::error!(
                    ?change,
                    "the rebalance listener panicked; the consumer goes on"
                );
            }
        }
        let partitions = partitions.to_vec();
        self.tell(match change {
            Change::Assigned => Event::Assigned(partitions),
            Change::Revoked => Event::Revoked(partitions),
            Change::Lost => Event::Lost(partitions),
        });
    }

    pub(super) fn tell_of_stuck_records(&mut self) {
        for slot in 0..self.held.len() {
            let Some(held) = &mut self.held[slot] else {
                continue;
            };
            let Some(blocker) = self.engine.blocker(held.owner) else {
                held.stuck = None;
                continue;
            };
            let due = match held.stuck {
                Some((seq, again)) if seq == blocker.seq => again,
                _ => self.settings.stuck_after,
            };
            if blocker.age < due {
                continue;
            }
            held.stuck = Some((blocker.seq, blocker.age * 2));
            let partition = TopicPartition::of(&held.source);
            tracing::warn!(
                topic = %partition.topic,
                partition = partition.partition,
                offset = blocker.offset,
                age_ms = blocker.age.as_millis() as u64,
                attempt = blocker.attempt,
                holds_back = blocker.holds_back,
                "a record does not finish, and holds back the commit of those behind it: see what its handler waits for"
            );
            self.tell(Event::Stuck(StuckRecord {
                partition,
                offset: blocker.offset,
                age: blocker.age,
                attempt: blocker.attempt,
                holds_back: blocker.holds_back,
            }));
        }
    }

    /// Transaction markers and gaps at the end of a log are never delivered; the client's position passes them.
    pub(super) fn pass_markers(&mut self, consumer: &BaseConsumer) {
        // A list from `position` keeps the client from being dropped for as long as it lives.
        let Ok(positions) = consumer.position() else {
            return;
        };
        for element in positions.elements() {
            let Offset::Offset(position) = element.offset() else {
                continue;
            };
            let held = self.held.iter().flatten().find(|held| {
                *held.source.topic == *element.topic()
                    && held.source.partition == element.partition()
            });
            if let Some(held) = held {
                self.engine.skip_to(held.owner, position);
            }
        }
    }
}
