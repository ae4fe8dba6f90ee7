//! Intake: from a partition's queue into its window, a batch at a time.

use std::{
    hash::{BuildHasher, Hasher},
    mem,
    sync::{Arc, atomic::Ordering},
    time::{Instant, SystemTime},
};

use rdkafka::types::RDKafkaErrorCode as Code;

use super::{
    epochs::Election,
    ffi::RawMessage,
    pump::{Held, Pump},
    surprises::{Log, Trouble},
};
use crate::{
    engine::{Budget, Received},
    record::{Chunk, ChunkBuilder, Timestamp, TimestampKind},
};

/// Room made for a batch before its size is known: more would be a lot to ask for if its first record is a large one.
const MOST_RESERVED: usize = 256 << 10;

/// Room made for the headers of a large record.
const HEADERS: usize = 1 << 10;

/// How the memory that chunks really hold is used while it is short.
struct Crowd {
    budget: Budget,
    /// What all partitions together take from its pool.
    pooled: usize,
}

impl Pump {
    /// Reads from every partition that has something and may be read. `all`: look at all of them, since wake-ups have
    /// been lost before.
    pub(super) fn read(&mut self, all: bool) -> bool {
        let mut any = false;
        // Not always the same one first: when memory is short, the first takes what has just become free.
        let count = self.held.len();
        self.first_read = self.first_read.wrapping_add(1);
        let mut crowd = None;
        for step in 0..count {
            let slot = (self.first_read + step) % count;
            any |= self.read_partition(slot, all, &mut crowd);
        }
        any
    }

    /// Unfinished records keep their finished neighbours in memory: what is really held is bounded as well, at twice the
    /// budget, and shared as that is.
    fn is_crowded(&self, held: &Held, crowd: &mut Option<Crowd>) -> bool {
        let limit = self.settings.engine.max_bytes.saturating_mul(2);
        if self.residency.bytes() <= limit / 2 {
            return false;
        }
        let crowd = crowd.get_or_insert_with(|| {
            let partitions = || self.held.iter().flatten();
            let budget = Budget::new(limit, partitions().count());
            let pooled = |held: &Held| budget.pooled(held.source.resident());
            Crowd {
                budget,
                pooled: partitions().map(pooled).sum(),
            }
        });
        // Else it would wait for what nobody here holds on to.
        self.engine.has_unfinished(held.owner)
            && crowd.budget.left(held.source.resident(), crowd.pooled) == 0
    }

    fn read_partition(&mut self, slot: usize, look: bool, crowd: &mut Option<Crowd>) -> bool {
        let Some(held) = &self.held[slot] else {
            return false;
        };
        if !look && !held.filled.load(Ordering::Acquire) || !matches!(held.log, Log::Sound) {
            return false;
        }
        let mut reading = self.engine.reading(held.owner);
        let room = reading.records();
        if room == 0 || self.is_crowded(held, crowd) {
            return false;
        }
        let Some(held) = &mut self.held[slot] else {
            return false;
        };
        let resident = held.source.resident();
        // Cleared before the look: what comes after it sets the flag again.
        held.filled.store(false, Ordering::Release);
        let mut errors = Vec::new();
        let begin =
            || ChunkBuilder::new(Arc::clone(&held.source), Some(Arc::clone(&self.residency)));
        let mut builder = begin();
        let mut chunks = Vec::new();
        let mut unreadable = None;
        let mut count = 0;
        loop {
            let wanted = reading.next();
            if wanted == 0 {
                // There may be more.
                held.filled.store(true, Ordering::Release);
                break;
            }
            let mut bytes = 0;
            let came = held.queue.read(wanted, |message| {
                if let Some(code) = message.error() {
                    errors.push((code, message.offset(), message.error_text()));
                }
                // What comes behind an error may have passed over records.
                if !errors.is_empty() {
                    return;
                }
                let size = message.value().map_or(0, <[u8]>::len);
                let size = size + message.key().map_or(0, <[u8]>::len);
                bytes += size;
                if builder.is_full(size) {
                    chunks.push(mem::replace(&mut builder, begin()).finish());
                }
                if builder.len() == 0 {
                    // Nothing follows a large one in its chunk.
                    match size > MOST_RESERVED / 2 {
                        true => builder.reserve(1, size + HEADERS),
                        false => builder.reserve(room, (room * size).min(MOST_RESERVED)),
                    }
                }
                if let Err(code) = copy_into(&mut builder, &message) {
                    unreadable = Some((message.offset(), code));
                }
            });
            count += came;
            reading.took(came, bytes);
            if came < wanted || !errors.is_empty() {
                break;
            }
        }
        if count == 0 {
            return false;
        }
        held.prefetch.read = true;
        if let Some((offset, error)) = unreadable {
            tracing::error!(
                topic = %held.source.topic,
                partition = held.source.partition,
                offset,
                %error,
                "the headers of a record cannot be parsed; it is handled without them"
            );
        }
        if builder.len() > 0 {
            held.validated = None;
            if held.setback.is_some() {
                held.end_setback();
            }
        }
        chunks.push(builder.finish());
        if let Some(crowd) = crowd {
            let before = crowd.budget.pooled(resident);
            crowd.pooled += crowd
                .budget
                .pooled(held.source.resident())
                .saturating_sub(before);
        }
        for chunk in chunks {
            self.take_in(slot, &chunk);
        }
        for (code, offset, text) in errors {
            self.partition_error(slot, code, offset, &text);
        }
        true
    }

    fn take_in(&mut self, slot: usize, chunk: &Arc<Chunk>) {
        let (now, clock) = (Instant::now(), SystemTime::now());
        for index in 0..chunk.len() {
            let record = chunk.record(index);
            let (offset, size) = (record.offset(), record.size());
            let keys = self.context.held_keys.as_ref();
            let alone = keys.is_some_and(|keys| keys.is_waited_for(&record));
            let key = record.key().filter(|_| !alone).map(|key| {
                let mut hasher = self.key_hash.build_hasher();
                hasher.write(key);
                hasher.finish()
            });
            let Some(held) = &mut self.held[slot] else {
                return;
            };
            if !matches!(held.log, Log::Sound) {
                return;
            }
            let tier = held.tier.as_ref();
            let due = tier.map(|tier| now + tier.wait(&record, clock));
            match held.epochs.read(offset, record.leader_epoch()) {
                Election::None => {}
                Election::Before(epoch) => self.engine.elected(held.owner, offset, epoch),
                Election::Unproven => return self.ask_about_election(slot),
            }
            let received = self
                .engine
                .receive_due(held.owner, offset, key, size, record, due);
            match received {
                Received::Queued | Received::AlreadyFinished => {}
                // What is dropped here is read again once it is known what log this is.
                Received::WentBack { .. } => return self.doubt(slot, Trouble::WentBack(offset)),
                // It is read again from our position.
                Received::Unproven | Received::Stale => return,
            }
        }
    }
}

/// Copies a message. An error: its headers cannot be parsed, and it is there without them.
#[inline]
pub(super) fn copy_into(builder: &mut ChunkBuilder, message: &RawMessage<'_>) -> Result<(), Code> {
    let timestamp = message.timestamp().map(|(millis, appended)| {
        let kind = match appended {
            true => TimestampKind::LogAppend,
            false => TimestampKind::Create,
        };
        Timestamp::new(millis, kind)
    });
    builder.push(
        message.offset(),
        timestamp,
        message.leader_epoch(),
        message.key(),
        message.value(),
    );
    message.for_each_header(|name, value| builder.header(name, value))
}
