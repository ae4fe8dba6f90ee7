//! From a record's bytes to what a handler works with.

use crate::{BoxError, record::Record};

mod bytes;
mod json;
mod text;

pub use bytes::Bytes;
pub use json::Json;
pub use text::Text;

/// A type that records decode to, chosen by the argument of the handler.
///
/// Here are [`Json`], [`Text`], [`Bytes`], [`Record`] itself for no decoding at all, and `Option` of any payload, which
/// is `None` for a tombstone. A type of one's own needs this one function; a codec with state, such as a client of a
/// schema registry, is a [`Decoder`].
///
/// ```
/// use reliable_consumer::{DecodeError, Message, Payload, Record};
///
/// struct Celsius(f32);
///
/// impl Payload for Celsius {
///     fn decode(record: &Record) -> Result<Self, DecodeError> {
///         let bytes = record.value().unwrap_or_default();
///         let bytes = bytes.try_into().map_err(DecodeError::invalid)?;
///         Ok(Self(f32::from_be_bytes(bytes)))
///     }
/// }
///
/// let message = Message::builder().value(21.5f32.to_be_bytes()).decode::<Celsius>()?;
/// assert_eq!(message.payload().0, 21.5);
/// assert!(Message::builder().value("hot").decode::<Celsius>().is_err());
/// # Ok::<(), DecodeError>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "records do not decode to `{Self}` by themselves",
    note = "use `Json<{Self}>` for JSON, implement `Payload` for `{Self}`, or give the consumer a `Decoder<{Self}>`"
)]
pub trait Payload: Sized + Send + Sync + 'static {
    /// Decodes a record. It is called again for each attempt, on the thread that runs the handler, and must not block.
    ///
    /// # Errors
    ///
    /// [`DecodeError::Invalid`] if no later attempt could do better, [`DecodeError::Unavailable`] if one could.
    fn decode(record: &Record) -> Result<Self, DecodeError>;
}

/// Decodes records to `P` with a state of its own. Closures `Fn(&Record) -> Result<P, DecodeError>` are decoders.
///
/// ```
/// use reliable_consumer::{DecodeError, Decoder, Message, Record};
///
/// struct Scaled { factor: u32 }
///
/// impl Decoder<u32> for Scaled {
///     fn decode(&self, record: &Record) -> Result<u32, DecodeError> {
///         let text = str::from_utf8(record.value().unwrap_or_default()).map_err(DecodeError::invalid)?;
///         let number: u32 = text.parse().map_err(DecodeError::invalid)?;
///         Ok(number.saturating_mul(self.factor))
///     }
/// }
///
/// assert_eq!(Scaled { factor: 10 }.decode(&Message::builder().value("4").record())?, 40);
/// # Ok::<(), DecodeError>(())
/// ```
pub trait Decoder<P>: Send + Sync + 'static {
    /// Decodes a record. It is called again for each attempt, on the thread that runs the handler, and must not block:
    /// answer [`DecodeError::Unavailable`] and fetch what is missing elsewhere.
    ///
    /// # Errors
    ///
    /// [`DecodeError::Invalid`] if no later attempt could do better, [`DecodeError::Unavailable`] if one could.
    fn decode(&self, record: &Record) -> Result<P, DecodeError>;
}

/// The decoder that leaves it to the type, by its [`Payload`] implementation. It is the default.
#[derive(Clone, Copy, Debug, Default)]
pub struct ByType;

impl<P: Payload> Decoder<P> for ByType {
    fn decode(&self, record: &Record) -> Result<P, DecodeError> {
        P::decode(record)
    }
}

impl<P, F> Decoder<P> for F
where
    F: Fn(&Record) -> Result<P, DecodeError> + Send + Sync + 'static,
{
    fn decode(&self, record: &Record) -> Result<P, DecodeError> {
        self(record)
    }
}

/// Why a record was not decoded, and with that what happens to it.
///
/// The error inside is logged and becomes a header of the dead letter: keep contents of the payload out of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The record will never decode: it is dead-lettered at once.
    #[error("payload is invalid: {0}")]
    Invalid(#[source] BoxError),
    /// What decoding needs cannot be had now, as when a schema registry is down: the record is retried.
    #[error("payload cannot be decoded now: {0}")]
    Unavailable(#[source] BoxError),
}

impl DecodeError {
    /// An [`Invalid`](Self::Invalid).
    pub fn invalid(error: impl Into<BoxError>) -> Self {
        Self::Invalid(error.into())
    }

    /// An [`Unavailable`](Self::Unavailable).
    pub fn unavailable(error: impl Into<BoxError>) -> Self {
        Self::Unavailable(error.into())
    }
}

/// `None` is a tombstone.
impl<P: Payload> Payload for Option<P> {
    fn decode(record: &Record) -> Result<Self, DecodeError> {
        record
            .value()
            .is_some()
            .then(|| P::decode(record))
            .transpose()
    }
}

/// Always decodes.
impl Payload for Record {
    fn decode(record: &Record) -> Result<Self, DecodeError> {
        Ok(record.clone())
    }
}

fn value<'a>(record: &'a Record, payload: &str) -> Result<&'a [u8], DecodeError> {
    record.value().ok_or_else(|| {
        DecodeError::invalid(format!(
            "the value is null (a tombstone): to handle tombstones, take `Option<{payload}>`"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Message;

    fn null() -> Record {
        Message::builder().record()
    }

    // D2, D13
    #[test]
    fn a_tombstone_is_invalid_unless_the_payload_is_optional() {
        for error in [
            Json::<u32>::decode(&null()).map(drop),
            Text::decode(&null()).map(drop),
            Bytes::decode(&null()).map(drop),
        ] {
            let error = error.expect_err("a tombstone has no payload");
            assert!(matches!(error, DecodeError::Invalid(_)));
            assert!(error.to_string().contains("Option<"), "{error}");
        }
        assert!(matches!(Option::<Json<u32>>::decode(&null()), Ok(None)));
        assert!(matches!(Option::<Text>::decode(&null()), Ok(None)));
        assert!(matches!(Option::<Bytes>::decode(&null()), Ok(None)));
    }

    #[test]
    fn an_empty_value_is_no_tombstone() {
        let empty = Message::builder().value("").record();
        assert_eq!(&*Text::decode(&empty).unwrap(), "");
        assert_eq!(&*Option::<Bytes>::decode(&empty).unwrap().unwrap(), b"");
        assert!(Option::<Json<u32>>::decode(&empty).is_err());
    }

    #[test]
    fn raw_records_always_decode() {
        let record = Message::builder().value([0xff]).record();
        assert_eq!(Record::decode(&record).unwrap().value(), Some(&[0xff][..]));
        assert!(Record::decode(&null()).is_ok());
    }

    #[test]
    fn a_closure_is_a_decoder() {
        fn decode<P>(decoder: impl Decoder<P>, record: &Record) -> Result<P, DecodeError> {
            decoder.decode(record)
        }
        let registry_is_up = false;
        let result = decode(
            move |record: &Record| {
                if registry_is_up {
                    Ok(record.offset())
                } else {
                    Err(DecodeError::unavailable("registry is down"))
                }
            },
            &null(),
        );
        assert!(matches!(result, Err(DecodeError::Unavailable(_))));
        assert!(decode::<Record>(ByType, &null()).is_ok());
    }
}
