//! A Kafka consumer that loses nothing.

mod backoff;
mod classify;
mod handler;
pub mod header_names;
mod kafka;
mod message;
mod origin;
mod payload;
mod record;

pub use backoff::Retry;
pub use classify::{Classification, Classifier, DynError, find_error};
pub use handler::{
    Disposition, Handler, HandlerError, HandlerResult, ResultExt, permanent, retry_after, skip,
};
pub use message::{Message, MessageBuilder};
pub use payload::{ByType, Bytes, DecodeError, Decoder, Json, Payload, Text};
pub use record::{Header, Headers, Record, Timestamp, TimestampKind};

/// Any error, boxed.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
