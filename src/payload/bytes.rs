//! Payloads left as bytes.

use std::{fmt, ops::Deref};

use super::{DecodeError, Payload, value};
use crate::record::Record;

/// A payload that is any bytes but a tombstone, read as a slice where they lie in the [`Record`].
///
/// To do without decoding altogether, tombstones included, take the [`Record`] itself as payload.
#[derive(Clone)]
pub struct Bytes(Record);

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.value().expect("decoding refused tombstones")
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

impl Payload for Bytes {
    fn decode(record: &Record) -> Result<Self, DecodeError> {
        value(record, "Bytes")?;
        Ok(Self(record.clone()))
    }
}
