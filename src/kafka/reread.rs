//! Reading again from our own position, where the client's is not trusted or the client has given a partition up.
//!
//! The client is told to seek, and has to answer that it does: only then is its old position gone, and what it delivers from
//! there on is believed. It seeks wherever it reads, and neighbours notice nothing of it. Where it has given up it refuses;
//! such partitions are assigned anew, all of a round together, and sought again. An eager group assigns all or nothing: there
//! every partition is sought again after that, so that none loses the question to the brokers whether its log was cut off.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use rdkafka::{
    Offset, TopicPartitionList,
    consumer::{Consumer as _, RebalanceProtocol},
    error::KafkaResult,
};

use super::{BaseConsumer, ffi::set_last_leader_epoch, pump::Pump, surprises::Log};
use crate::{consumer::RunErrorKind, record::Source};

/// Partitions that are sought in one round, so that whatever else there is to do is not kept waiting.
const BITE: usize = 100;
/// For the answers to that. They come from another thread of the client, without asking a broker.
const ANSWERS: Duration = Duration::from_millis(50);
/// Between two tries for one partition.
const PAUSE: Duration = Duration::from_millis(20);
/// Between two assignments of the same partition, or of all: the client may have to wait for the answer to a commit before it
/// begins.
const ASSIGN_PAUSE: Duration = Duration::from_secs(2);

/// Where a partition is to be read from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reread {
    offset: i64,
    /// Of the log below that offset: the brokers are asked whether it still reaches up to there.
    epoch: Option<i32>,
    due: Instant,
    assigned: Option<Instant>,
}

impl Pump {
    /// Nothing that the client delivers or says of this partition is believed until it reads from this offset again, which it
    /// is told to when that is `due`. A log that is looked at is left alone: that ends here too.
    pub(super) fn distrust(&mut self, slot: usize, offset: i64, epoch: Option<i32>, due: Instant) {
        let Some(held) = &mut self.held[slot] else {
            return;
        };
        self.engine.distrust(held.owner);
        self.surprised = true;
        if matches!(held.log, Log::Sound | Log::Rereading(_)) {
            held.log = Log::Rereading(Reread {
                offset,
                epoch: epoch.or_else(|| held.epochs.at(offset)),
                due,
                assigned: None,
            });
        }
    }

    /// Has the client read from this offset on, as soon as this round is over.
    pub(super) fn reread(&mut self, slot: usize, offset: i64, epoch: Option<i32>) {
        if let Some(held) = &mut self.held[slot] {
            held.log = Log::Sound;
        }
        self.distrust(slot, offset, epoch, Instant::now());
    }

    /// Tells the client of all partitions that are due. `true`: some are read again, or were assigned.
    pub(super) fn read_again(&mut self, consumer: &BaseConsumer, now: Instant) -> bool {
        let mut due = Vec::new();
        for (slot, held) in self.held.iter().enumerate() {
            if let Some(held) = held
                && let Log::Rereading(reread) = &held.log
            {
                self.surprised = true;
                if reread.due <= now && due.len() < BITE {
                    due.push((slot, Arc::clone(&held.source), *reread));
                }
            }
        }
        if due.is_empty() {
            return false;
        }
        let places = due
            .iter()
            .map(|(_, source, reread)| (&**source, reread.offset, reread.epoch));
        let answers = list_of(places).and_then(|list| consumer.seek_partitions(list, ANSWERS));
        let answers = match answers {
            Ok(answers) => answers,
            Err(error) => {
                // It may do so still. Until it says so nothing is believed.
                tracing::debug!(%error, partitions = due.len(), "the client has not answered that it seeks; asking again");
                due.iter()
                    .for_each(|(slot, ..)| self.ask_again(*slot, now + PAUSE));
                return false;
            }
        };
        let mut worked = false;
        let mut given_up = Vec::new();
        for ((slot, source, reread), answer) in due.iter().zip(answers.elements()) {
            debug_assert_eq!(
                (&*source.topic, source.partition),
                (answer.topic(), answer.partition())
            );
            if let Err(error) = answer.error() {
                tracing::debug!(
                    topic = %source.topic, partition = source.partition, %error,
                    "the client does not seek in this partition"
                );
                self.ask_again(*slot, now + PAUSE);
                if reread
                    .assigned
                    .is_none_or(|at| now.duration_since(at) >= ASSIGN_PAUSE)
                {
                    given_up.push(*slot);
                }
                continue;
            }
            worked = true;
            if let Some(held) = &mut self.held[*slot] {
                held.log = Log::Sound;
                held.validated = reread.epoch;
                held.filled.store(true, Ordering::Release);
                self.engine.reads_from_position(held.owner);
            }
        }
        drop(answers);
        worked | self.assign_again(consumer, &given_up, now)
    }

    fn ask_again(&mut self, slot: usize, at: Instant) {
        if let Some(held) = &mut self.held[slot]
            && let Log::Rereading(reread) = &mut held.log
        {
            reread.due = at;
        }
    }

    /// All of an eager group's partitions have just been assigned anew: questions that were out for them are forgotten.
    pub(super) fn seek_all(&mut self) {
        let now = Instant::now();
        for slot in 0..self.held.len() {
            if let Some(held) = &self.held[slot]
                && let Log::Sound = held.log
                && let Some(position) = self.engine.status(held.owner).and_then(|it| it.position)
                && let Some(epoch) = held.validated.or_else(|| held.epochs.at(position))
            {
                self.distrust(slot, position, Some(epoch), now);
            }
        }
    }

    /// What the client has given up. What it had fetched before is dropped by that.
    fn assign_again(&mut self, consumer: &BaseConsumer, slots: &[usize], now: Instant) -> bool {
        if slots.is_empty() {
            return false;
        }
        let eager = !matches!(
            consumer.rebalance_protocol(),
            RebalanceProtocol::Cooperative
        );
        // Assigning anything would hide that the assignment is lost.
        if consumer.assignment_lost() {
            return false;
        }
        if eager
            && self
                .assigned_anew
                .is_some_and(|at| now.duration_since(at) < ASSIGN_PAUSE)
        {
            return false;
        }
        self.assigned_anew = Some(now);
        let mut places = Vec::new();
        for (slot, held) in self.held.iter_mut().enumerate() {
            let Some(held) = held else { continue };
            if !eager && !slots.contains(&slot) {
                continue;
            }
            let status = self.engine.status(held.owner);
            let Some(position) = status.and_then(|status| status.position) else {
                continue;
            };
            let (offset, epoch) = match &mut held.log {
                Log::Rereading(reread) => {
                    reread.assigned = Some(now);
                    (reread.offset, reread.epoch)
                }
                _ => (
                    position,
                    held.validated.or_else(|| held.epochs.at(position)),
                ),
            };
            if let Log::Sound = held.log {
                self.engine.distrust(held.owner);
                held.log = Log::Rereading(Reread {
                    offset,
                    epoch,
                    due: now,
                    assigned: Some(now),
                });
            }
            places.push((Arc::clone(&held.source), offset, epoch));
        }
        let list = list_of(
            places
                .iter()
                .map(|(source, offset, epoch)| (&**source, *offset, *epoch)),
        );
        let again = list.and_then(|list| match eager {
            true => consumer.assign(&list),
            false => {
                consumer.incremental_unassign(&list)?;
                consumer.incremental_assign(&list)
            }
        });
        tracing::debug!(
            given_up = slots.len(), assigned = places.len(), error = ?again.as_ref().err(),
            "partitions that the client does not read any more are assigned to it anew"
        );
        let Err(error) = again else {
            return true;
        };
        let Source {
            topic, partition, ..
        } = &*places[0].0;
        let message = format!(
            "partition {topic}/{partition} and {} others: the client does not read from where it is told to: {error}; start \
             the consumer again",
            places.len() - 1
        );
        self.fail(RunErrorKind::Client, message);
        true
    }
}

fn list_of<'a>(
    places: impl IntoIterator<Item = (&'a Source, i64, Option<i32>)>,
) -> KafkaResult<TopicPartitionList> {
    let mut list = TopicPartitionList::new();
    for (
        Source {
            topic, partition, ..
        },
        offset,
        epoch,
    ) in places
    {
        list.add_partition_offset(topic, *partition, Offset::Offset(offset))?;
        if let Some(epoch) = epoch {
            set_last_leader_epoch(&mut list, epoch);
        }
    }
    Ok(list)
}
