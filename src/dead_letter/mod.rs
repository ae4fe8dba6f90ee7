//! Records that could not be handled: where they go, and what is noted on them.

mod dialect;
mod headers;
mod publisher;
mod spooling;
mod story;
pub(crate) mod values;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::kafka::Properties;

pub use dialect::Dialect;
pub(crate) use headers::Manner;
pub(crate) use publisher::Publisher;
pub(crate) use spooling::Spooling;
pub use story::{LastError, Story};

/// Where records go that failed for good, and what their dead letters tell.
///
/// A dead letter has the record's key, value and headers byte for byte, the time at which it was written, and the
/// headers of [`header_names`](crate::header_names). It goes to the partition that Java's default partitioner would
/// choose for its key, whatever partition the record came from. The record counts as finished when all in-sync replicas
/// have the dead letter (`acks=all`, `enable.idempotence=true`). While the topic cannot be written, sending is tried
/// again for ever, 100 ms to 10 s apart: the record stays unfinished, its offset uncommitted, and the log and the
/// consumer's status say why. [`unavailable`](Self::unavailable) chooses otherwise.
///
/// The topic must exist, or the brokers must create topics on demand.
///
/// ```
/// use std::sync::Arc;
/// use reliable_consumer::{DeadLetter, ErrorMessage};
///
/// let dead_letters = DeadLetter::topic("sign-ups.dlq")
///     .error_message(ErrorMessage::Redacted(Arc::new(|text| text.replace("@", "(at)"))))
///     .property("compression.type", "zstd");
/// ```
#[derive(Clone, Debug)]
pub struct DeadLetter {
    pub(crate) topic: String,
    pub(crate) error_message: ErrorMessage,
    pub(crate) dialect: Dialect,
    pub(crate) unavailable: Unavailable,
    pub(crate) properties: Properties,
}

impl DeadLetter {
    /// Dead letters go to this topic. It must not be one of those consumed.
    pub fn topic(name: impl Into<String>) -> Self {
        DeadLetter {
            topic: name.into(),
            error_message: ErrorMessage::default(),
            dialect: Dialect::default(),
            unavailable: Unavailable::default(),
            properties: Properties::default(),
        }
    }

    /// What becomes of the error's message, the header `errorMessage`. [`ErrorMessage::Keep`] by default: whoever reads
    /// a dead letter wants to know why; but messages can quote what a record contains.
    pub fn error_message(mut self, error_message: ErrorMessage) -> Self {
        self.error_message = error_message;
        self
    }

    /// Adds the headers that another system would have written, for dashboards and tools that read that system's dead
    /// letters. This library's own headers are there in any case, so that nothing is lost by it but some room: about
    /// 500 bytes, and the message once or twice more. When a letter is too large, these go first. [`Dialect::Own`] by
    /// default: none are added.
    ///
    /// ```
    /// use reliable_consumer::{DeadLetter, Dialect};
    ///
    /// let dead_letters = DeadLetter::topic("orders-dlt").dialect(Dialect::Spring);
    /// ```
    pub fn dialect(mut self, dialect: Dialect) -> Self {
        self.dialect = dialect;
        self
    }

    /// What becomes of dead letters while their topic cannot be written: it is missing, refuses, or the brokers are away.
    /// [`Unavailable::Block`] by default.
    ///
    /// ```
    /// use reliable_consumer::{DeadLetter, Unavailable};
    ///
    /// let dead_letters = DeadLetter::topic("orders.dlq").unavailable(Unavailable::Spool {
    ///     directory: "/var/lib/billing/dead-letters".into(),
    ///     max_bytes: 1 << 30,
    /// });
    /// ```
    pub fn unavailable(mut self, policy: Unavailable) -> Self {
        self.unavailable = policy;
        self
    }

    /// Sets a librdkafka property of the producer that sends dead letters. Connection and security are the consumer's
    /// unless set here. `acks`, `enable.idempotence` and `transactional.id` are refused when the consumer is built.
    pub fn property(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.properties.set(name, value);
        self
    }

    /// What the producer is to be told.
    pub(crate) fn producer(&self) -> Properties {
        let mut properties = self.properties.clone();
        let own = ["message.timeout.ms", "delivery.timeout.ms"];
        if matches!(self.unavailable, Unavailable::Spool { .. })
            && own.iter().all(|name| properties.get(name).is_none())
        {
            // Not by our clock: what the producer still has when a letter is spooled would be sent by it as well.
            properties.set("message.timeout.ms", "4000");
        }
        properties
    }
}

/// What becomes of dead letters while their topic cannot be written. None is ever dropped.
///
/// It holds as well for records on their way to a [retry topic](crate::RetryTopics) that cannot be written: they wait, end
/// the run, or lie in the spool until they can be moved there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unavailable {
    /// Their records wait, unfinished, and sending is tried again for ever. It shows in the log and in
    /// [`Status::stalled_dead_letters`](crate::Status::stalled_dead_letters). The partition goes on up to its
    /// [`window`](crate::Builder::window). The default.
    #[default]
    Block,
    /// As `Block`; but when a dead letter could not be written for this long, the run ends with an error of the kind
    /// [`DeadLetterUnavailable`](crate::RunErrorKind::DeadLetterUnavailable). Its record stays uncommitted and is the
    /// first to come again.
    Stop {
        /// How long, from when the record was given up.
        after: Duration,
    },
    /// They are written to files, and sent from there when the topic can be written again. A record counts as finished
    /// when its dead letter is on the disk, synced; the offset is committed then. So the directory must be as safe as
    /// the records are worth: a volume that outlives the container and the machine. Whoever deletes it deletes dead
    /// letters.
    ///
    /// A letter is spooled when a first attempt was refused or not acknowledged within four seconds (the producer's
    /// `message.timeout.ms`, which is one minute otherwise), and when others for its topic are in the spool already: they
    /// are sent in their order, and removed when the brokers have acknowledged them. What is left when the process ends
    /// is sent by the next consumer on the same directory. A letter can be in the topic twice, with the same `messageId`:
    /// when its acknowledgement was lost, and after a crash while the spool was being sent, up to about a megabyte of
    /// them a topic. Order gives way where the brokers refuse a letter for what it is: those that shared its batch are sent
    /// again, after what was on its way behind them, and it is set aside in the directory.
    ///
    /// When the spool is full, the disk is, or the directory cannot be used, records wait as under `Block`; so does one
    /// whose dead letter the topic refuses for what it is: too large, or without a key where the topic is compacted. See [`Status::dead_letter_spool`](crate::Status::dead_letter_spool)
    /// and [`Event::DeadLetterSpool`](crate::Event::DeadLetterSpool).
    Spool {
        /// Where the files are. It is created if it is not there. One process uses it at a time: a second one waits for
        /// the first to end, blocking meanwhile.
        directory: PathBuf,
        /// Bytes of all files together.
        max_bytes: u64,
    },
}

/// What becomes of the message of the error that a dead letter was written for, there and in what the log tells of failed
/// attempts.
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum ErrorMessage {
    /// It is noted, cut at 1 KiB.
    #[default]
    Keep,
    /// It is left out.
    Off,
    /// What the function makes of it is noted, cut at 1 KiB. If the function panics, it is left out.
    Redacted(Arc<dyn Fn(&str) -> String + Send + Sync>),
}

impl fmt::Debug for ErrorMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Keep => "Keep",
            Self::Off => "Off",
            Self::Redacted(_) => "Redacted(..)",
        })
    }
}

/// Why a record was given up: the header `errorKind` of its dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailureKind {
    /// The handler or the classifier said that trying again is of no use.
    Permanent,
    /// The last attempt that the retry policy allows has failed.
    AttemptsExhausted,
    /// The last attempt took longer than the handler timeout.
    Timeout,
    /// The last attempt panicked.
    Panic,
    /// The payload could not be decoded; the handler never saw it.
    Undecodable,
    /// The process died while the record ran alone, as often as
    /// [`crash_limit`](crate::Builder::crash_limit) says.
    Crashed,
    /// The record held up its partition for longer than [`stuck_limit`](crate::Builder::stuck_limit).
    Stuck,
    /// It was found in a retry topic, and its headers do not belong there: see [`RetryTopics`](crate::RetryTopics). The
    /// handler never saw it.
    Untrusted,
    /// An earlier record of its key was set aside, and it had to [follow](crate::HoldKey::Follow). The handler never saw
    /// it.
    KeyHeld,
    /// Another message with the same id has been handled, by the [fingerprints](crate::idempotency::Idempotency::fingerprint)
    /// of their contents. The handler never saw it.
    IdConflict,
    /// Under [`Guarantee::AtMostOnce`](crate::Guarantee::AtMostOnce): it was committed, and when its partition was given
    /// away or the run ended there was no time left to handle it, or to try it again. Nobody else does.
    OutOfTime,
    /// Under [`Guarantee::AtMostOnce`](crate::Guarantee::AtMostOnce): its handler was stopped in the middle, since its
    /// partition was given away or the run ended. It may have had its effect.
    Interrupted,
}

impl FailureKind {
    const ALL: [Self; 12] = [
        Self::Permanent,
        Self::AttemptsExhausted,
        Self::Timeout,
        Self::Panic,
        Self::Undecodable,
        Self::Crashed,
        Self::Stuck,
        Self::Untrusted,
        Self::KeyHeld,
        Self::IdConflict,
        Self::OutOfTime,
        Self::Interrupted,
    ];

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == name)
    }

    /// How it stands in the header: `permanent`, `attempts-exhausted`, `timeout`, `panic`, `undecodable`,
    /// `crashed`, `stuck`, `untrusted`, `key-held`, `id-conflict`, `out-of-time` or `interrupted`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Permanent => "permanent",
            Self::AttemptsExhausted => "attempts-exhausted",
            Self::Timeout => "timeout",
            Self::Panic => "panic",
            Self::Undecodable => "undecodable",
            Self::Crashed => "crashed",
            Self::Stuck => "stuck",
            Self::Untrusted => "untrusted",
            Self::KeyHeld => "key-held",
            Self::IdConflict => "id-conflict",
            Self::OutOfTime => "out-of-time",
            Self::Interrupted => "interrupted",
        }
    }
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Why and when a record was given up.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) kind: FailureKind,
    pub(crate) message: String,
    /// Handler calls on this trip, those before the record came to a retry topic included; 0 if it was never called.
    pub(crate) attempts: u32,
    /// Unix milliseconds.
    pub(crate) failed_at_ms: i64,
    /// Retry topics that it has been in, the one that it goes to now included.
    pub(crate) retry_tier: u32,
    /// It goes to a retry topic, and is not to be handled before that time, in Unix milliseconds.
    pub(crate) due_at_ms: Option<i64>,
}

/// What a record's dead letter is sent with, for fuzzing.
#[cfg(feature = "internals")]
pub(crate) fn headers_of_letter(
    record: &crate::Record,
    error: &str,
    dialect: Dialect,
) -> Vec<(Vec<u8>, Option<Vec<u8>>)> {
    let failure = Failure {
        kind: FailureKind::Permanent,
        message: error.into(),
        attempts: 1,
        failed_at_ms: 0,
        retry_tier: 0,
        due_at_ms: None,
    };
    let manner = Manner {
        group: "group".into(),
        error_message: ErrorMessage::Keep,
        dialect,
    };
    headers::dead_letter_headers(record, &failure, &manner, headers::Detail::Full)
        .into_iter()
        .map(|(name, value)| (name.into_owned(), value.map(|value| value.into_owned())))
        .collect()
}
