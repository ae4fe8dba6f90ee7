//! What librdkafka has read ahead, kept within its limit by pausing partitions.
//!
//! `queued.max.messages.kbytes` bounds it for each partition, and only values, so that there is no bound on all of them
//! together. It is added up here, some times a second. Pausing a partition makes what was read ahead of it void, to be
//! fetched again when it goes on: so it is for partitions that are not read, and for more partitions than the limit allows.

use std::{
    cmp::Reverse,
    sync::Arc,
    time::{Duration, Instant},
};

use rdkafka::{TopicPartitionList, consumer::Consumer as _};

use super::{
    BaseConsumer,
    pump::{Held, Pump},
};
use crate::{consumer::RunErrorKind, record::Source};

/// What librdkafka takes for a record, beside what a record counts for here.
const OVERHEAD: usize = 200;
/// A partition that has something to read and has not been read for this long is paused.
const STALL: Duration = Duration::from_secs(5);
/// A partition that is paused stays so for this long at least.
const REST: Duration = Duration::from_secs(1);
/// While there are more than may go on, one that has been paused for this long takes the place of another, one a second;
/// and after the longer time in each look.
const TURN: Duration = Duration::from_secs(5);
const LONGEST_TURN: Duration = Duration::from_secs(30);

/// What is known of what was read ahead of a partition.
#[derive(Debug, Default)]
pub(super) struct Prefetch {
    /// Records were taken from its queue since the last look.
    pub(super) read: bool,
    /// Since when it has had something to read and has not been read.
    unread: Option<Instant>,
    paused: Option<Instant>,
    /// What its queue held at the last look.
    bytes: usize,
    /// What it held when it was paused.
    dropped: usize,
}

impl Prefetch {
    pub(super) fn is_paused(&self) -> bool {
        self.paused.is_some()
    }

    /// Bytes that librdkafka holds.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Pump {
    /// Looks at what was read ahead, and pauses and resumes partitions.
    pub(super) fn bound_prefetch(&mut self, consumer: &BaseConsumer, now: Instant) {
        let limit = self.settings.max_prefetch_bytes;
        let mut total = 0;
        for held in self.held.iter_mut().flatten() {
            let prefetch = &mut held.prefetch;
            let records = held.queue.len();
            prefetch.bytes = records * (self.engine.typical_size(held.owner) + OVERHEAD);
            total += prefetch.bytes;
            if records == 0 || prefetch.read || prefetch.is_paused() {
                prefetch.unread = None;
            } else {
                prefetch.unread.get_or_insert(now);
            }
            prefetch.read = false;
        }
        // While brokers are away nothing comes, and pausing might wait for them.
        if self.outage.is_some() {
            return;
        }
        let mut pause = self.stalled(now);
        total -= self.bytes_ahead(&pause);
        for slot in self.largest(&pause) {
            // Something has to go on.
            if total <= limit || total == self.prefetch(slot).bytes {
                break;
            }
            total -= self.prefetch(slot).bytes;
            pause.push(slot);
        }
        let mut resume = Vec::new();
        for (slot, since) in self.rested(now) {
            let wanted = self.prefetch(slot).dropped;
            if total > 0 && total + wanted > limit {
                let rested = now.duration_since(since);
                let its_turn = rested >= TURN && now.duration_since(self.last_swap) >= REST;
                if its_turn || rested >= LONGEST_TURN {
                    self.last_swap = now;
                    pause.extend(self.largest(&pause).next());
                    resume.push(slot);
                }
                break;
            }
            total += wanted;
            resume.push(slot);
        }
        self.set_fetching(consumer, &pause, Some(now));
        self.set_fetching(consumer, &resume, None);
    }

    fn prefetch(&self, slot: usize) -> &Prefetch {
        let held = self.held[slot].as_ref();
        &held.expect("it was found in this look").prefetch
    }

    fn bytes_ahead(&self, slots: &[usize]) -> usize {
        slots.iter().map(|slot| self.prefetch(*slot).bytes).sum()
    }

    fn slots(&self) -> impl Iterator<Item = (usize, &Held)> {
        let held = self.held.iter().enumerate();
        held.filter_map(|(slot, held)| Some((slot, held.as_ref()?)))
    }

    fn stalled(&self, now: Instant) -> Vec<usize> {
        let stalled = |prefetch: &Prefetch| {
            !prefetch.is_paused()
                && prefetch
                    .unread
                    .is_some_and(|since| now.duration_since(since) >= STALL)
        };
        self.slots()
            .filter(|(_, held)| stalled(&held.prefetch))
            .map(|(slot, _)| slot)
            .collect()
    }

    /// Partitions of which something was read ahead: those that have not been read for longest, then those with most.
    fn largest(&self, but: &[usize]) -> impl Iterator<Item = usize> + use<> {
        let mut ahead: Vec<_> = self
            .slots()
            .filter(|(slot, Held { prefetch, .. })| {
                prefetch.bytes > 0 && !prefetch.is_paused() && !but.contains(slot)
            })
            .map(|(slot, held)| (slot, held.prefetch.unread, held.prefetch.bytes))
            .collect();
        ahead.sort_by_key(|(_, unread, bytes)| (unread.is_none(), *unread, Reverse(*bytes)));
        ahead.into_iter().map(|(slot, ..)| slot)
    }

    /// Paused partitions that could be read again, and since when they have been paused, longest first.
    fn rested(&self, now: Instant) -> Vec<(usize, Instant)> {
        let mut rested: Vec<_> = self
            .slots()
            // One that stopped would fetch what it cannot read, again and again.
            .filter(|(_, held)| held.log.stopped().is_none())
            .filter_map(|(slot, held)| Some((slot, held.prefetch.paused?, held.owner)))
            .filter(|(_, since, owner)| {
                now.duration_since(*since) >= REST && self.engine.room(*owner) > 0
            })
            .map(|(slot, since, _)| (slot, since))
            .collect();
        rested.sort_by_key(|(_, since)| *since);
        rested
    }

    pub(super) fn set_fetching(
        &mut self,
        consumer: &BaseConsumer,
        slots: &[usize],
        paused: Option<Instant>,
    ) {
        if slots.is_empty() {
            return;
        }
        let mut list = TopicPartitionList::with_capacity(slots.len());
        for slot in slots {
            if let Some(held) = &mut self.held[*slot] {
                held.prefetch.paused = paused;
                held.prefetch.unread = None;
                held.prefetch.dropped = held.prefetch.bytes;
                list.add_partition(&held.source.topic, held.source.partition);
                tracing::debug!(
                    topic = %held.source.topic,
                    partition = held.source.partition,
                    paused = paused.is_some(),
                    bytes = held.prefetch.bytes,
                    "fetching of a partition stops or goes on, for the sake of memory"
                );
            }
        }
        let answer = match paused {
            Some(_) => consumer.pause(&list),
            None => consumer.resume(&list),
        };
        if let Err(error) = answer {
            tracing::warn!(%error, "the client did not pause or resume partitions");
        }
        if paused.is_some() {
            slots.iter().for_each(|slot| self.drop_ahead(*slot));
        }
    }

    /// What was read ahead of a partition is void once it is paused, and stays in memory until somebody reads it.
    fn drop_ahead(&mut self, slot: usize) {
        let Some(held) = &mut self.held[slot] else {
            return;
        };
        let (mut record, mut errors) = (None, Vec::new());
        held.queue.read(1, |message| match message.error() {
            None => record = Some(message.offset()),
            Some(code) => errors.push((code, message.offset(), message.error_text())),
        });
        held.prefetch.bytes = 0;
        let source = Arc::clone(&held.source);
        if let Some(offset) = record {
            // Dropping it would be a gap that the window cannot know of, and that a commit would pass.
            let Source {
                topic, partition, ..
            } = &*source;
            self.fail(
                RunErrorKind::Client,
                format!("record {topic}/{partition}/{offset} came although its partition was paused: please report this"),
            );
        }
        for (code, offset, text) in errors {
            self.partition_error(slot, code, offset, &text);
        }
    }

    /// The client keeps a pause while a partition is with somebody else.
    pub(super) fn resume_before_assign(
        &mut self,
        consumer: &BaseConsumer,
        assignment: &TopicPartitionList,
    ) {
        let mut list = TopicPartitionList::new();
        self.left_paused.retain(|(topic, partition)| {
            let comes = assignment.find_partition(topic, *partition).is_some();
            if comes {
                list.add_partition(topic, *partition);
            }
            !comes
        });
        if list.count() > 0
            && let Err(error) = consumer.resume(&list)
        {
            tracing::warn!(%error, "the client did not resume partitions that come back");
        }
    }
}
