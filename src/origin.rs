//! Where a record was first, however often it went through a dead-letter topic since.

use std::fmt;

use crate::record::{Headers, Record};

/// Where a record was first, before any dead-letter or retry topic.
///
/// Shown as `topic/partition/offset/timestamp`, which is the [id](crate::Message::message_id) of a message that brings
/// none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Origin<'a> {
    /// The topic. Its form is right; whether there is such a topic is another matter: anybody can write headers.
    pub topic: &'a str,
    /// The partition, not negative.
    pub partition: i32,
    /// The offset, not negative.
    pub offset: i64,
    /// When it was produced or appended, in Unix milliseconds, where that is known.
    pub timestamp: Option<i64>,
}

impl<'a> Origin<'a> {
    /// How Kafka, the header and the message id write the timestamp of a record that has none. It must be written: a
    /// header left out would make the origin malformed, and the next trip would take its own position for it.
    pub(crate) const NO_TIMESTAMP: i64 = -1;

    /// What the headers say if all of them are well formed, else the record's own position: half an origin would be
    /// the place of some other record.
    pub(crate) fn of(record: &'a Record) -> Self {
        Self::from_headers(record.headers()).unwrap_or_else(|| Self::here(record))
    }

    /// Where it was read from.
    pub(crate) fn here(record: &'a Record) -> Self {
        Self {
            topic: record.topic(),
            partition: record.partition(),
            offset: record.offset(),
            timestamp: record.timestamp().map(|timestamp| timestamp.as_millis()),
        }
    }

    pub(crate) fn timestamp_millis(&self) -> i64 {
        self.timestamp.unwrap_or(Self::NO_TIMESTAMP)
    }

    /// Whether the record lies there now: then it is on its first trip.
    pub(crate) fn is_place_of(&self, record: &Record) -> bool {
        (self.topic, self.partition, self.offset)
            == (record.topic(), record.partition(), record.offset())
    }

    /// What the headers of this library say, if all of them are well formed.
    pub(crate) fn from_headers(headers: Headers<'a>) -> Option<Self> {
        let mut told = Told::default();
        for header in headers.iter() {
            if let Some(value) = header.value() {
                let place = match header.name_bytes() {
                    b"originalTopic" => &mut told.topic,
                    b"originalPartition" => &mut told.partition,
                    b"originalOffset" => &mut told.offset,
                    b"originalTimestamp" => &mut told.timestamp,
                    _ => continue,
                };
                *place = Some(value);
            }
        }
        told.origin()
    }
}

/// The last value of each header that tells an origin, whatever it is.
#[derive(Clone, Copy, Default)]
pub(crate) struct Told<'a> {
    pub(crate) topic: Option<&'a [u8]>,
    pub(crate) partition: Option<&'a [u8]>,
    pub(crate) offset: Option<&'a [u8]>,
    pub(crate) timestamp: Option<&'a [u8]>,
}

impl<'a> Told<'a> {
    /// `None` unless all of them are there and well formed.
    pub(crate) fn origin(self) -> Option<Origin<'a>> {
        let text = |value: Option<&'a [u8]>| str::from_utf8(value?).ok();
        let number = |value| text(value).and_then(decimal);
        let timestamp = match text(self.timestamp)? {
            "-1" => None,
            told => Some(decimal(told)?),
        };
        Some(Origin {
            topic: text(self.topic).filter(|name| is_topic_name(name))?,
            partition: i32::try_from(number(self.partition)?).ok()?,
            offset: number(self.offset)?,
            timestamp,
        })
    }
}

/// The message id of a record that brings none: `topic/partition/offset/timestamp`.
impl fmt::Display for Origin<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            topic,
            partition,
            offset,
            ..
        } = self;
        let timestamp = self.timestamp_millis();
        write!(f, "{topic}/{partition}/{offset}/{timestamp}")
    }
}

/// Digits and nothing else: `parse` alone would take a sign.
fn decimal(text: &str) -> Option<i64> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok())?
}

/// Kafka's own rule for topic names, but for the names `.` and `..`.
pub(crate) fn is_topic_name(name: &str) -> bool {
    (1..=249).contains(&name.len())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}
