//! UTF-8 payloads.

use std::{fmt, ops::Deref};

use super::{DecodeError, Payload, value};
use crate::record::Record;

/// A payload that is UTF-8 text, read as a `str` where it lies in the [`Record`].
///
/// Anything else is [`DecodeError::Invalid`]. Each dereference checks the bytes anew, at some GB/s: keep the `&str`
/// where that would matter.
#[derive(Clone)]
pub struct Text(Record);

impl Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        let value = self.0.value().expect("decoding refused tombstones");
        str::from_utf8(value).expect("decoding refused what is not UTF-8")
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&**self, f)
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

impl Payload for Text {
    fn decode(record: &Record) -> Result<Self, DecodeError> {
        str::from_utf8(value(record, "Text")?).map_err(DecodeError::invalid)?;
        Ok(Self(record.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Message;

    #[test]
    fn text_is_read_where_it_lies_in_the_record() {
        let record = Message::builder().value("grüße").record();
        let text = Text::decode(&record).unwrap();
        assert_eq!(&*text, "grüße");
        assert_eq!(Some(text.as_ptr()), record.value().map(<[u8]>::as_ptr));
    }

    // D13
    #[test]
    fn what_is_not_utf_8_is_invalid() {
        let record = Message::builder().value(b"ab\xff").record();
        assert!(matches!(
            Text::decode(&record),
            Err(DecodeError::Invalid(_))
        ));
    }
}
