//! The time a record carries, and who set it.

use std::time::{Duration, SystemTime};

/// The timestamp of a record: milliseconds since the Unix epoch and who set them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Timestamp {
    millis: i64,
    kind: TimestampKind,
}

/// Who set a record's timestamp. The topic's `message.timestamp.type` decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TimestampKind {
    /// The producer, when it made the record. Any value at all, if the producer so wished.
    Create,
    /// The broker, when it appended the record to its log.
    LogAppend,
}

impl Timestamp {
    /// A timestamp from milliseconds since the Unix epoch.
    pub const fn new(millis: i64, kind: TimestampKind) -> Self {
        Self { millis, kind }
    }

    /// Milliseconds since the Unix epoch, as they stand in the record.
    pub const fn as_millis(self) -> i64 {
        self.millis
    }

    /// Who set it.
    pub const fn kind(self) -> TimestampKind {
        self.kind
    }

    /// The same as a [`SystemTime`], or `None` if this platform's clock cannot express it: producers may write any
    /// number.
    pub fn to_system_time(self) -> Option<SystemTime> {
        let distance = Duration::from_millis(self.millis.unsigned_abs());
        if self.millis < 0 {
            SystemTime::UNIX_EPOCH.checked_sub(distance)
        } else {
            SystemTime::UNIX_EPOCH.checked_add(distance)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timestamp_becomes_system_time_on_both_sides_of_the_epoch() {
        let at = |millis| Timestamp::new(millis, TimestampKind::Create).to_system_time();
        let second = Duration::from_secs(1);
        assert_eq!(at(1_000), Some(SystemTime::UNIX_EPOCH + second));
        assert_eq!(at(-1_000), Some(SystemTime::UNIX_EPOCH - second));
    }

    #[test]
    fn a_hostile_timestamp_does_not_panic() {
        for millis in [i64::MIN, i64::MAX] {
            let _ = Timestamp::new(millis, TimestampKind::LogAppend).to_system_time();
        }
    }
}
