//! Names of the headers that dead letters carry and that messages are read by.
//!
//! Values are UTF-8, integers in decimal. A dead letter that sets one replaces earlier headers of the same name.

/// How often the record has been sent back from a dead-letter topic so far. Absent or malformed counts as 0.
pub const RETRY_COUNT: &str = "retryCount";
/// The topic the record was in first. Stays as it is once present and well formed, like the other `original…` headers.
pub const ORIGINAL_TOPIC: &str = "originalTopic";
/// The partition the record was in first.
pub const ORIGINAL_PARTITION: &str = "originalPartition";
/// The offset the record had first.
pub const ORIGINAL_OFFSET: &str = "originalOffset";
/// The timestamp the record had first, in Unix milliseconds; -1 for a record that had none.
pub const ORIGINAL_TIMESTAMP: &str = "originalTimestamp";
/// Identity of the message, the same on every trip.
pub const MESSAGE_ID: &str = "messageId";
/// The consumer group that gave up.
pub const CONSUMER_GROUP: &str = "consumerGroup";
/// Handler calls on the trip that ended here, those in retry topics included.
pub const ATTEMPTS: &str = "attempts";
/// Why the group gave up, in a word.
pub const ERROR_KIND: &str = "errorKind";
/// The last error's message.
pub const ERROR_MESSAGE: &str = "errorMessage";
/// When the group gave up, in Unix milliseconds.
pub const FAILED_AT: &str = "failedAt";

/// The group that a record was sent back for from a dead-letter topic, see [`Redriver`](crate::Redriver). Consumers of
/// this library in other groups pass it over, unless told
/// [otherwise](crate::Builder::redriven_for_others).
pub const REDRIVE_GROUP: &str = "redriveGroup";

/// Why a dead letter was parked, in a word: see [`ParkReason`](crate::ParkReason).
pub const PARK_REASON: &str = "parkReason";
/// How many retry topics the record has been in, this one included. Absent for 0.
pub const RETRY_TIER: &str = "retryTier";
/// In a retry topic: not to be handled before, in Unix milliseconds.
pub const DUE_AT: &str = "dueAt";

/// All names that a dead letter of ours sets, whether it does so this time or not.
pub(crate) const ALL: [&str; 13] = [
    RETRY_COUNT,
    ORIGINAL_TOPIC,
    ORIGINAL_PARTITION,
    ORIGINAL_OFFSET,
    ORIGINAL_TIMESTAMP,
    MESSAGE_ID,
    CONSUMER_GROUP,
    ATTEMPTS,
    ERROR_KIND,
    ERROR_MESSAGE,
    FAILED_AT,
    RETRY_TIER,
    DUE_AT,
];

/// What a redriver has added for the trip that ends with a dead letter, which does without.
pub(crate) const OF_THE_TRIP: [&str; 2] = [REDRIVE_GROUP, PARK_REASON];
