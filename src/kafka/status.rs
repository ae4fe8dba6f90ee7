//! What can be seen of a running consumer.

use std::{sync::Arc, time::Instant};

use super::{partition_errors::Setback, pump::Pump};
use crate::consumer::{
    Lag, OwnershipState, PartitionStatus, RunningRecord, StalledDeadLetters, Status, WaitingRecord,
};

impl Pump {
    pub(super) fn status(&self) -> Status {
        let now = Instant::now();
        let mut partitions: Vec<_> = self
            .held
            .iter()
            .flatten()
            .filter_map(|held| {
                let status = self.engine.status(held.owner)?;
                let behind = status.committable.zip(held.end);
                Some(PartitionStatus {
                    topic: Arc::clone(&held.source.topic),
                    partition: held.source.partition,
                    ownership: if status.draining {
                        OwnershipState::Draining
                    } else {
                        OwnershipState::Owned
                    },
                    paused: status.paused,
                    stopped: held.log.stopped().cloned(),
                    not_started: None,
                    fetch_error: held.setback.as_ref().map(Setback::shown),
                    position: status.position,
                    committed: status.committed,
                    commit_failures: status.commit_failures,
                    lag: behind.map(|(committable, (end, at))| Lag {
                        records: (end - committable).max(0),
                        age: now.saturating_duration_since(at),
                    }),
                    finished_out_of_order: status.held,
                    beyond_snapshot: status.beyond_snapshot,
                    running: status.running,
                    queued: status.queued,
                    delayed: status.delayed,
                    retrying: status.retrying,
                    dead_lettering: status.dead_lettering,
                    bytes: status.bytes,
                    resident_bytes: held.source.resident(),
                    fetch_paused: held.prefetch.is_paused(),
                    oldest_running: status.oldest_running.map(|running| RunningRecord {
                        offset: running.offset,
                        age: running.in_state,
                        attempt: running.attempt,
                    }),
                    oldest_waiting: status.oldest_waiting.map(|waiting| WaitingRecord {
                        offset: waiting.offset,
                        age: waiting.in_state,
                        attempt: waiting.attempt,
                    }),
                    suspects: status.suspects,
                })
            })
            .collect();
        let held_up = self.starts.held_up(now);
        partitions.extend(held_up.map(|((topic, partition), not_started)| {
            PartitionStatus::not_started(Arc::clone(topic), *partition, not_started)
        }));
        partitions.sort_by(|a, b| (&a.topic, a.partition).cmp(&(&b.topic, b.partition)));
        let stalled = self
            .publisher
            .as_ref()
            .map(|publisher| publisher.stalled())
            .unwrap_or_default();
        Status {
            partitions,
            bytes: self.engine.bytes(),
            resident_bytes: self.residency.bytes(),
            prefetched_bytes: self
                .held
                .iter()
                .flatten()
                .map(|held| held.prefetch.bytes())
                .sum(),
            stuck: self
                .held
                .iter()
                .flatten()
                .flat_map(|held| {
                    let stuck = self.stuck_records(held, now).into_iter();
                    stuck.map(|(record, age)| held.stuck_record(record, age))
                })
                .collect(),
            stalled_dead_letters: stalled
                .into_iter()
                .map(|stalled| StalledDeadLetters {
                    topic: stalled.topic,
                    records: stalled.records,
                    since: stalled.since,
                    error: stalled.last_error,
                })
                .collect(),
            dead_letter_spool: self.spool_status(),
            breaker: self.breaker_status(now),
            held_keys: self
                .context
                .held_keys
                .as_ref()
                .map_or(0, |held| held.count()),
            idempotency: self.idempotency_status(),
            membership: self.joining.status(),
            brokers_down: self.outage.as_ref().map(|outage| outage.since.elapsed()),
        }
    }
}
