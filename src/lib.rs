//! A Kafka consumer that loses nothing.

mod record;

pub use record::{Header, Headers, Record, Timestamp, TimestampKind};
