//! A Kafka consumer that loses nothing.

mod backoff;
mod classify;
mod consumer;
mod dead_letter;
mod engine;
mod execute;
mod handler;
pub mod header_names;
#[doc(hidden)]
#[cfg(feature = "internals")]
pub mod internals;
mod kafka;
mod message;
mod origin;
mod payload;
mod record;

pub use backoff::Retry;
pub use classify::{Classification, Classifier, DynError, find_error};
pub use consumer::{
    BuildError, Builder, ConsumerHandle, Exhausted, HandleError, Lag, OwnershipState,
    PartitionReport, PartitionStatus, ReliableConsumer, Report, Routes, Run, RunError,
    RunErrorKind, RunningRecord, StalledDeadLetters, StartPolicy, Status,
};
pub use dead_letter::{DeadLetter, ErrorMessage, FailureKind};
pub use engine::Ordering;
pub use handler::{
    Disposition, Handler, HandlerError, HandlerResult, ResultExt, permanent, retry_after, skip,
};
pub use kafka::{OAuthToken, OAuthTokenProvider, PropertyError};
pub use message::{Message, MessageBuilder};
pub use payload::{ByType, Bytes, DecodeError, Decoder, Json, Payload, Text};
pub use record::{Header, Headers, Record, Timestamp, TimestampKind};

/// Any error, boxed.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
