//! Errors that come on a partition's queue in place of records: what each does to that partition.
//!
//! Librdkafka takes every one of them for a record: reading it moves the client's position behind the offset that it carries,
//! and after a pause or a rebalance the client fetches from there. Batches that could not be decoded are passed over by what
//! follows them. So after each error the client's position is not trusted (see `Engine::distrust`), what comes behind it is dropped, and
//! the client is told to read from our position again (`reread.rs`). [`remedy`] is the table of when that is done, and
//! whether. What it does not name reads on, later each time. Librdkafka itself deals with these, without an error here:
//! leaders that move, replicas that lag, `KafkaStorageError`, unknown topics and topic ids, connections.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use rdkafka::types::RDKafkaErrorCode as Code;

use super::{
    errors::{advice, is_terminal},
    pump::Pump,
    surprises::{Log, trouble_in},
};
use crate::{
    consumer::{Event, FetchError, StopReason, TopicPartition},
    record::Source,
};

/// The second time in a row that something cannot be read; doubled from then on, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// What may have been damaged on its way has to fail this often at one position before the partition stops.
const TRIES: u32 = 3;
/// Without an error for this long, which is more than the longest pause, reading goes on.
const CALM: Duration = Duration::from_secs(15);

/// What follows an error, beside that the client's position is not trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Remedy {
    /// The position is not in the log: it is asked what there is now, and `out_of_range` decides.
    LookAtLog,
    /// Read again: at once, then later each time. It goes on by itself.
    ReadAgain,
    /// The same, where the partition has been read before. A group that never could read it ends the run: nobody has set it up
    /// yet.
    WaitForPermission,
    /// Read again; the third time at one position the partition stops.
    StopIfItStays(StopReason),
    /// The partition stops: reading again would end the same way.
    Stop(StopReason),
    /// Nothing of this client will go on.
    EndRun,
}

fn remedy(code: Code, text: &str) -> Remedy {
    match code {
        Code::AutoOffsetReset | Code::OffsetOutOfRange => Remedy::LookAtLog,
        Code::TopicAuthorizationFailed => Remedy::WaitForPermission,
        // Librdkafka says so of a codec that it was built without, and of a batch format newer than it.
        Code::NotImplemented if text.contains("MagicByte") => {
            Remedy::Stop(StopReason::UnknownFormat)
        }
        Code::NotImplemented | Code::UnsupportedCompressionType => {
            Remedy::Stop(StopReason::UnsupportedCodec)
        }
        Code::UnsupportedForMessageFormat => Remedy::Stop(StopReason::UnknownFormat),
        // A checksum that is wrong, what a codec does not accept, or what the broker finds damaged in its own log: another
        // replica, or the next fetch, may have it whole.
        Code::BadMessage | Code::BadCompression | Code::InvalidMessage | Code::InvalidRecord => {
            Remedy::StopIfItStays(StopReason::Corrupt)
        }
        Code::MessageSizeTooLarge | Code::InvalidMessageSize => {
            Remedy::StopIfItStays(StopReason::TooLarge)
        }
        code if is_terminal(code) => Remedy::EndRun,
        _ => Remedy::ReadAgain,
    }
}

/// A partition that was not read because of errors, until it is again.
#[derive(Debug)]
pub(super) struct Setback {
    error: String,
    code: Code,
    position: i64,
    /// In a row, at this position.
    times: u32,
    since: Instant,
    last: Instant,
    /// The partition stops because of it.
    stop: Option<StopReason>,
}

impl Setback {
    pub(super) fn shown(&self) -> FetchError {
        FetchError {
            error: self.error.clone(),
            attempts: self.times,
            lasting: self.since.elapsed(),
        }
    }

    /// Why the partition is to stop, with what the client said.
    pub(super) fn stops(&self) -> Option<(StopReason, &str)> {
        Some((self.stop?, &self.error))
    }

    fn pause(&self, remedy: Remedy) -> Duration {
        let doubled = |times: u32| FIRST_PAUSE.saturating_mul(1 << times.min(10));
        let pause = match (remedy, self.times) {
            (Remedy::WaitForPermission, times) => doubled(times),
            (_, 0 | 1) => Duration::ZERO,
            (_, times) => doubled(times - 2),
        };
        pause.min(LONGEST_PAUSE)
    }
}

impl Pump {
    /// An error came in place of a record. What comes behind it has been dropped.
    pub(super) fn partition_error(&mut self, slot: usize, code: Code, offset: i64, text: &str) {
        let now = Instant::now();
        let Some(held) = &mut self.held[slot] else {
            return;
        };
        held.validated = None;
        let position = self.engine.distrust(held.owner).unwrap_or(0);
        let source = Arc::clone(&held.source);
        let Source {
            topic, partition, ..
        } = &*source;
        let remedy = remedy(code, text);
        match remedy {
            // It was said before reading went on somewhere else.
            Remedy::LookAtLog if (0..position).contains(&offset) => {
                return self.distrust(slot, position, None, now);
            }
            Remedy::LookAtLog => return self.doubt(slot, trouble_in(offset, text)),
            Remedy::EndRun => return self.client_error(code, Some((topic, *partition)), text),
            Remedy::WaitForPermission => {
                let status = self.engine.status(held.owner);
                let is_read = status.is_some_and(|it| it.counts.received > 0);
                if !is_read && !held.was_read {
                    return self.client_error(code, Some((topic, *partition)), text);
                }
            }
            Remedy::ReadAgain | Remedy::StopIfItStays(_) | Remedy::Stop(_) => {
                self.client_error(code, Some((topic, *partition)), text);
            }
        }
        let Some(held) = &mut self.held[slot] else {
            return;
        };
        let before = held.setback.take();
        let again = before.filter(|it| (it.code, it.position) == (code, position));
        let (times, since) = again.map_or((1, now), |it| (it.times.saturating_add(1), it.since));
        let stop = match remedy {
            Remedy::Stop(reason) => Some(reason),
            Remedy::StopIfItStays(reason) if times >= TRIES => Some(reason),
            _ => None,
        };
        let setback = Setback {
            error: text.to_owned(),
            code,
            position,
            times,
            since,
            last: now,
            stop,
        };
        let pause = setback.pause(remedy);
        held.setback = Some(setback);
        // Once, twice, then each time that it has been so for twice as long.
        if stop.is_none() && times.is_power_of_two() {
            let next = match remedy {
                Remedy::WaitForPermission => advice(code),
                _ => "it goes on by itself",
            };
            tracing::warn!(
                %topic, partition, position, at = offset, error = %code, text, times,
                retry_in_ms = pause.as_millis() as u64,
                "the partition cannot be read and is tried again, nothing of it is passed over: {next}"
            );
            self.tell(Event::FetchFailed {
                partition: TopicPartition::of(&source),
                position,
                error: text.to_owned(),
                attempts: times,
            });
        }
        match stop {
            // What there is to go on at is asked first.
            Some(_) => self.doubt(slot, super::surprises::Trouble::OutOfRange),
            None => self.distrust(slot, position, None, now + pause),
        }
    }

    /// Looks whether partitions that could not be read are read again.
    pub(super) fn end_setbacks(&mut self, now: Instant) {
        for held in self.held.iter_mut().flatten() {
            if let Some(setback) = &held.setback
                && matches!(held.log, Log::Sound)
                && now.duration_since(setback.last) >= CALM
            {
                held.end_setback();
            }
        }
    }
}

impl super::pump::Held {
    /// It is read again.
    #[cold]
    pub(super) fn end_setback(&mut self) {
        if let Some(setback) = self.setback.take() {
            tracing::info!(
                topic = %self.source.topic,
                partition = self.source.partition,
                after_ms = setback.since.elapsed().as_millis() as u64,
                "the partition is read again"
            );
        }
    }
}

/// What an operator can do about a partition that stopped for this reason, where the client said this.
pub(super) fn way_out(reason: StopReason, text: &str) -> String {
    let what = match reason {
        StopReason::UnsupportedCodec => match codec_in(text) {
            Some(("lz4" | "snappy", _)) | None => {
                "librdkafka was built without its codec: build with it, and start the consumer again".to_owned()
            }
            Some((codec, feature)) => format!(
                "it is compressed with {codec}: build with the cargo feature `{feature}`, and start the consumer again"
            ),
        },
        StopReason::UnknownFormat => {
            "its format is newer than this client: build with a newer version, and start the consumer again".into()
        }
        StopReason::TooLarge => {
            "raise `receive.message.max.bytes` (and `fetch.message.max.bytes`) with `property`, and start the consumer \
             again"
                .into()
        }
        _ => "see with `kafka-dump-log --print-data-log` whether its replicas have it whole, and let one that has lead"
            .into(),
    };
    format!(
        "{what}; to go past it, call `resume_at` on the consumer's handle with the offset behind the batch"
    )
}

/// The codec that librdkafka names by its number, and the cargo feature that it comes with.
fn codec_in(text: &str) -> Option<(&'static str, &'static str)> {
    let (_, rest) = text.split_once("codec 0x")?;
    match rest.split_once(')')?.0 {
        "1" => Some(("gzip", "libz")),
        "2" => Some(("snappy", "")),
        "3" => Some(("lz4", "")),
        "4" => Some(("zstd", "zstd")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_can_never_be_read_stops_a_partition_at_once() {
        let codec =
            "Decompression (codec 0x4) of message at 5 of 80 bytes failed: Local: Not implemented";
        let magic = "Unsupported Message(Set) MagicByte 3 at offset 5";
        for (code, text, expected) in [
            (
                Code::NotImplemented,
                codec,
                Remedy::Stop(StopReason::UnsupportedCodec),
            ),
            (
                Code::NotImplemented,
                magic,
                Remedy::Stop(StopReason::UnknownFormat),
            ),
            (
                Code::BadMessage,
                "",
                Remedy::StopIfItStays(StopReason::Corrupt),
            ),
            (
                Code::MessageSizeTooLarge,
                "",
                Remedy::StopIfItStays(StopReason::TooLarge),
            ),
            (
                Code::TopicAuthorizationFailed,
                "",
                Remedy::WaitForPermission,
            ),
            (Code::OffsetOutOfRange, "", Remedy::LookAtLog),
            (Code::AutoOffsetReset, "", Remedy::LookAtLog),
            (Code::Fatal, "", Remedy::EndRun),
            (Code::Unknown, "", Remedy::ReadAgain),
            (Code::NotLeaderForPartition, "", Remedy::ReadAgain),
            (Code::PartitionEOF, "", Remedy::ReadAgain),
        ] {
            assert_eq!(remedy(code, text), expected, "{code}: {text}");
        }
        let way = way_out(StopReason::UnsupportedCodec, codec);
        assert!(
            way.contains("zstd") && way.contains("cargo feature `zstd`"),
            "{way}"
        );
    }

    #[test]
    fn a_partition_that_cannot_be_read_is_tried_at_once_and_then_ever_later_up_to_ten_seconds() {
        let pause = |remedy, times| {
            let now = Instant::now();
            let setback = Setback {
                error: String::new(),
                code: Code::Unknown,
                position: 0,
                times,
                since: now,
                last: now,
                stop: None,
            };
            setback.pause(remedy).as_millis()
        };
        let pauses = [1, 2, 3, 4, 8, 1_000_000].map(|times| pause(Remedy::ReadAgain, times));
        assert_eq!(pauses, [0, 250, 500, 1_000, 10_000, 10_000]);
        let pauses = [1, 2, 9].map(|times| pause(Remedy::WaitForPermission, times));
        assert_eq!(pauses, [500, 1_000, 10_000]);
    }
}
