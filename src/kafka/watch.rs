//! What others are told: partitions that come and go, records that are stuck. And what is looked at once a second.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use rdkafka::{Offset, consumer::Consumer as _};

use super::{
    BaseConsumer,
    pump::{Held, Pump},
    surprises::Log,
};
use crate::{
    consumer::{Event, StuckRecord, TopicPartition},
    engine::{OpenRecord, Ownership, RecordState},
    execute::Cause,
    shown::caught,
};

/// Lines about stuck records in the log at a time.
const LINES: usize = 10;

/// What is remembered of a partition's stuck records from one look to the next.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// The oldest unfinished record, and when it was first seen to be that.
    head: Option<(u64, Instant)>,
    /// Those that were told of, and the age at which each is told of again.
    told: Vec<(u64, Duration)>,
}

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
            let told = caught(|| match change {
                Change::Assigned => listener.assigned(partitions),
                Change::Revoked => listener.revoked(partitions),
                Change::Lost => listener.lost(partitions),
            });
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

    /// Tells of records that are stuck, and gives up those that have been for too long.
    pub(super) fn watch_for_stuck_records(&mut self, now: Instant) {
        let mut told = 0;
        for slot in 0..self.held.len() {
            self.watch_head(slot, now);
            let Some(held) = &self.held[slot] else {
                continue;
            };
            let stuck = self.stuck_records(held, now);
            let mut known = Vec::new();
            for (record, age) in stuck {
                let before = held.watch.told.iter().find(|(seq, _)| *seq == record.seq);
                let due = before.map_or(Duration::ZERO, |(_, again)| *again);
                if age < due {
                    known.push((record.seq, due));
                    continue;
                }
                known.push((record.seq, age * 2));
                let stuck = held.stuck_record(record, age);
                told += 1;
                if told <= LINES {
                    log_stuck(&stuck);
                }
                self.tell(Event::Stuck(stuck));
            }
            if let Some(held) = &mut self.held[slot] {
                held.watch.told = known;
            }
        }
        if told > LINES {
            let more = told - LINES;
            tracing::warn!(more, "more records are stuck: all are in the status");
        }
    }

    /// Notes since when the partition's oldest unfinished record has been that, and gives it up when its time is over.
    fn watch_head(&mut self, slot: usize, now: Instant) {
        let Some(held) = &mut self.held[slot] else {
            return;
        };
        let Some(head) = self.engine.head(held.owner) else {
            held.watch.head = None;
            return;
        };
        if held.watch.head.is_none_or(|(seq, _)| seq != head.seq) {
            held.watch.head = Some((head.seq, now));
        }
        let Some(limit) = self
            .settings
            .stuck_limit
            .filter(|limit| head.counts >= *limit)
        else {
            return;
        };
        match head.state {
            RecordState::Running => held.fence.condemn(head.seq),
            RecordState::Retrying => {
                self.engine
                    .give_up(held.owner, head.seq, Cause::stuck(limit));
            }
            RecordState::Queued | RecordState::KeyHeld | RecordState::DeadLettering => {}
        }
    }

    /// The oldest unfinished record of a partition, and the one that runs for longest, as far as they are stuck; each
    /// with the time for which it has been.
    pub(super) fn stuck_records(&self, held: &Held, now: Instant) -> Vec<(OpenRecord, Duration)> {
        let head = self.engine.head(held.owner);
        let running = self.engine.running_behind(held.owner);
        let held_up = |record: &OpenRecord| match record.state {
            // What waits in a long queue is not stuck: what counts is for how long it has been in front.
            RecordState::Queued
                if !self.engine.is_going(held.owner)
                    || self.engine.is_delayed(held.owner, record.seq) =>
            {
                Duration::ZERO
            }
            RecordState::Queued => {
                let since = held.watch.head.filter(|(seq, _)| *seq == record.seq);
                since.map_or(Duration::ZERO, |(_, since)| {
                    record.age.min(now.saturating_duration_since(since))
                })
            }
            RecordState::Retrying | RecordState::KeyHeld if !self.engine.is_going(held.owner) => {
                Duration::ZERO
            }
            _ => record.age,
        };
        [head, running]
            .into_iter()
            .flatten()
            .map(|record| (record, held_up(&record)))
            .filter(|(_, age)| *age >= self.settings.stuck_after)
            .collect()
    }

    /// Transaction markers and gaps at the end of a log are never delivered; the client's position passes them. It passes
    /// other things too: the engine believes it only where that is known not to be so.
    pub(super) fn pass_markers(&mut self, consumer: &BaseConsumer) {
        // A list from `position` keeps the client from being dropped for as long as it lives.
        let Ok(positions) = consumer.position() else {
            return;
        };
        let held = self.held.iter().flatten();
        let owners: HashMap<_, _> = held
            .filter(|held| matches!(held.log, Log::Sound))
            .map(|held| ((&*held.source.topic, held.source.partition), held.owner))
            .collect();
        for element in positions.elements() {
            if let Offset::Offset(position) = element.offset()
                && let Some(owner) = owners.get(&(element.topic(), element.partition()))
            {
                self.engine.client_is_at(*owner, position);
            }
        }
    }
}

impl Held {
    pub(super) fn stuck_record(&self, record: OpenRecord, age: Duration) -> StuckRecord {
        let running = record.state == RecordState::Running;
        StuckRecord {
            partition: TopicPartition::of(&self.source),
            offset: record.offset,
            key_hash: record.key_hash,
            state: record.state,
            age,
            run_age: running.then_some(record.in_state),
            queue_age: (!running).then_some(record.in_state),
            attempt: record.attempt,
            holds_back: record.holds_back,
        }
    }
}

fn log_stuck(stuck: &StuckRecord) {
    let millis = |age: Duration| age.as_millis() as u64;
    let advice = match stuck.state {
        RecordState::Running => "see what its handler waits for",
        RecordState::Queued => {
            "no handler is free for it, or it is postponed again and again: see what the others wait for, whether one \
             blocks its thread, and why it is postponed"
        }
        RecordState::Retrying => "it fails again and again: see the errors of its handler",
        RecordState::KeyHeld => {
            "a record of its key was set aside: send its dead letter back, or release the key"
        }
        RecordState::DeadLettering => {
            "its dead letter is not acknowledged: see the dead-letter topic"
        }
    };
    tracing::warn!(
        topic = %stuck.partition.topic,
        partition = stuck.partition.partition,
        offset = stuck.offset,
        key_hash = stuck.key_hash,
        state = ?stuck.state,
        age_ms = millis(stuck.age),
        run_age_ms = stuck.run_age.map(millis),
        queue_age_ms = stuck.queue_age.map(millis),
        attempt = stuck.attempt,
        holds_back = stuck.holds_back,
        "a record does not finish, and those behind it cannot be committed: {advice}"
    );
}
