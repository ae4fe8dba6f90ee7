//! What a dead letter tells, whoever wrote it.

use super::dialect::{Dialect, Field};
use super::{FailureKind, values};
use crate::message::well_formed_id;
use crate::origin::{Origin, Told, is_topic_name};
use crate::record::{Headers, Record, Timestamp, TimestampKind};

/// Why a record is in a dead-letter topic, and where it came from: read from its headers, whichever of the
/// [dialects](Dialect) they are in.
///
/// Headers are written by whoever likes to. What is malformed counts as absent, numbers that count are clamped, texts are
/// bounded; they are not escaped, though, and may hold control characters. Whether an [`origin`](Self::origin) may be
/// believed is for the reader to decide, before anything is sent there.
///
/// Where a name repeats, the last value counts, since most systems add theirs behind those that are there. SmallRye puts
/// its own in front: there the first value counts for the error. The origin is the first place of all that are told in
/// whole. Where headers are in several dialects, the error is told by the one that stands last and tells one, and the
/// origin and the count of redrives by ours, if they are there.
///
/// ```
/// use reliable_consumer::{Dialect, Message, Story};
///
/// let letter = Message::builder()
///     .topic("orders-dlt")
///     .header("kafka_dlt-exception-cause-fqcn", "java.io.IOException")
///     .header("kafka_dlt-exception-message", "no route to host")
///     .header("kafka_dlt-original-topic", "orders")
///     .header("kafka_dlt-original-partition", 3_i32.to_be_bytes())
///     .header("kafka_dlt-original-offset", 42_i64.to_be_bytes())
///     .record();
/// let story = Story::of(&letter).expect("Spring's headers are known");
/// assert_eq!(story.dialect, Dialect::Spring);
/// assert_eq!(story.origin.map(|origin| (origin.topic, origin.offset)), Some(("orders", 42)));
/// assert_eq!(story.error.class, Some("java.io.IOException"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Story<'a> {
    /// Who tells of the error; where nobody does, who tells the origin.
    pub dialect: Dialect,
    /// Where the record was first. `None` if topic, partition and offset are not all told.
    pub origin: Option<Origin<'a>>,
    /// How often it has been sent back from a dead-letter topic, by the header
    /// [`retryCount`](crate::header_names::RETRY_COUNT); the same as [`Message::retry_count`](crate::Message::retry_count).
    /// 0 for a letter of somebody else that was never sent back.
    pub retry_count: u32,
    /// Handler calls on the trip that ended here.
    pub attempts: Option<u32>,
    /// The last error.
    pub error: LastError<'a>,
    /// When it was given up, in Unix milliseconds: as told, or when the letter was written.
    pub failed_at: Option<i64>,
    /// The group that gave it up, or the connector.
    pub group: Option<&'a str>,
    message_id: Option<&'a str>,
}

/// The last error of a dead-lettered record, as its headers tell it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LastError<'a> {
    /// Why this library gave up. `None` for letters of others, and for kinds that a later version may know.
    pub kind: Option<FailureKind>,
    /// The class of the exception, of its cause if that is told and the class is that of a wrapper. 512 bytes at most.
    /// Letters of this library have none.
    pub class: Option<&'a str>,
    /// The error's message, cut at 1 KiB.
    pub message: Option<&'a str>,
    /// Whether there is a stack trace; the headers have it.
    pub has_stacktrace: bool,
}

impl<'a> Story<'a> {
    /// The story of a record in a dead-letter topic, or `None` if its headers tell neither an error nor an origin.
    pub fn of(record: &'a Record) -> Option<Self> {
        let mut notebook = Notebook::default();
        notebook.take(record.headers());
        let Notebook {
            notes,
            own_origin,
            retry_count,
            message_id,
        } = &notebook;
        let own_origin = own_origin.origin();
        let origin = |notes: &Notes<'a>| match notes.dialect {
            Dialect::Own => own_origin,
            _ => notes.origin(record),
        };
        let newest = |tells: &dyn Fn(&Notes<'a>) -> bool| {
            let telling = notes.iter().filter(|notes| notes.at > 0 && tells(notes));
            telling.max_by_key(|notes| notes.at)
        };
        let of_origin = newest(&|notes| origin(notes).is_some());
        let teller = newest(&Notes::tells_error).or(of_origin)?;
        let told = &teller.newest;
        Some(Self {
            dialect: teller.dialect,
            origin: own_origin
                .or_else(|| origin(teller))
                .or_else(|| origin(of_origin?)),
            retry_count: *retry_count,
            attempts: told.attempts,
            error: LastError {
                kind: told.kind,
                class: told.cause_class.or(told.class),
                message: told.message,
                has_stacktrace: teller.stacktrace,
            },
            failed_at: told.failed_at.or_else(|| {
                let timestamp = record.timestamp()?;
                let is_first =
                    teller.dialect.keeps_timestamp() && timestamp.kind() == TimestampKind::Create;
                let millis = timestamp.as_millis();
                (!is_first && millis >= 0).then_some(millis)
            }),
            group: told.group,
            message_id: message_id.and_then(well_formed_id),
        })
    }

    /// What identifies the message on every trip: its `messageId` header, else its origin, and `None` if neither is there
    /// and well formed. Builds a string at each call.
    ///
    /// The same as [`Message::message_id`](crate::Message::message_id) on its first trip, unless it is made from an
    /// origin whose timestamp is not told: SmallRye and share groups don't.
    pub fn message_id(&self) -> Option<String> {
        match self.message_id {
            Some(id) => Some(id.to_owned()),
            None => self.origin.map(|origin| origin.to_string()),
        }
    }
}

/// What one dialect's headers tell.
#[derive(Clone, Copy, Default)]
struct Notes<'a> {
    dialect: Dialect,
    /// Place of its last header, from 1.
    at: usize,
    topic: Places<&'a str>,
    partition: Places<i32>,
    offset: Places<i64>,
    timestamp: Places<i64>,
    first_timestamp: Option<i64>,
    stacktrace: bool,
    newest: Newest<'a>,
}

/// The newest value of each name.
#[derive(Clone, Copy, Default)]
struct Newest<'a> {
    group: Option<&'a str>,
    /// Whether there is a kind, known or not.
    has_kind: bool,
    kind: Option<FailureKind>,
    class: Option<&'a str>,
    cause_class: Option<&'a str>,
    message: Option<&'a str>,
    attempts: Option<u32>,
    failed_at: Option<i64>,
}

/// The values of a name of which there is one for each dead-lettering.
#[derive(Clone, Copy, Default)]
struct Places<T> {
    oldest: Option<T>,
    last: Option<T>,
    number: usize,
}

/// All that headers tell, gone through once: millions of letters are counted by it.
#[derive(Default)]
struct Notebook<'a> {
    notes: [Notes<'a>; Dialect::ALL.len()],
    own_origin: Told<'a>,
    retry_count: u32,
    message_id: Option<&'a [u8]>,
}

impl<'a> Notebook<'a> {
    fn take(&mut self, headers: Headers<'a>) {
        for (place, header) in headers.iter().enumerate() {
            let (name, value) = (header.name_bytes(), header.value());
            let Some(value) = value else { continue };
            let own = &mut self.own_origin;
            match name {
                b"originalTopic" => own.topic = Some(value),
                b"originalPartition" => own.partition = Some(value),
                b"originalOffset" => own.offset = Some(value),
                b"originalTimestamp" => own.timestamp = Some(value),
                b"retryCount" => {
                    self.retry_count = values::count(value).unwrap_or(self.retry_count)
                }
                b"messageId" => self.message_id = Some(value),
                _ => {}
            }
            if let Some((dialect, field)) = Dialect::meaning(name) {
                let notes = &mut self.notes[dialect as usize];
                if notes.take(dialect, field, value).is_some() {
                    notes.dialect = dialect;
                    notes.at = place + 1;
                }
            }
        }
    }
}

impl<'a> Notes<'a> {
    /// `None` if the value is malformed.
    fn take(&mut self, dialect: Dialect, field: Field, value: &'a [u8]) -> Option<()> {
        let newest = &mut self.newest;
        let first_counts = dialect.newest_first();
        match field {
            Field::Topic => self.topic.add(topic(value)?, first_counts),
            Field::Partition => self.partition.add(values::partition(value)?, first_counts),
            Field::Offset => self.offset.add(values::offset(value)?, first_counts),
            Field::Timestamp => self.timestamp.add(values::timestamp(value)?, first_counts),
            Field::FirstTimestamp => {
                let timestamp = values::shortest_timestamp(value)?;
                self.first_timestamp.get_or_insert(timestamp);
            }
            Field::Group => set(&mut newest.group, values::name(value)?, first_counts),
            Field::Kind => {
                let name = values::name(value)?;
                newest.has_kind = true;
                newest.kind = FailureKind::from_name(name);
            }
            Field::Class => set(&mut newest.class, values::name(value)?, first_counts),
            Field::CauseClass => set(&mut newest.cause_class, values::name(value)?, first_counts),
            Field::Message => set(&mut newest.message, values::message(value)?, first_counts),
            Field::Stacktrace => self.stacktrace = true,
            Field::Attempts => newest.attempts = Some(values::count(value)?),
            Field::NextAttempt => {
                newest.attempts = Some(values::count_in_a_byte(value)?.saturating_sub(1))
            }
            Field::Retries => newest.attempts = Some(values::count(value)?.saturating_add(1)),
            Field::FailedAt => newest.failed_at = Some(values::timestamp(value)?),
        }
        Some(())
    }

    fn tells_error(&self) -> bool {
        let newest = &self.newest;
        match self.dialect {
            // Its other names are such as an application may have for something of its own.
            Dialect::Own => newest.has_kind && newest.failed_at.is_some(),
            _ => {
                newest.class.is_some()
                    || newest.cause_class.is_some()
                    || newest.message.is_some()
                    || self.stacktrace
            }
        }
    }

    fn origin(&self, record: &Record) -> Option<Origin<'a>> {
        // Each dead-lettering adds all of them. Where one is missing somewhere, the first of each may be of different
        // places.
        let whole =
            self.topic.number == self.partition.number && self.topic.number == self.offset.number;
        let of_letter = record.timestamp().filter(|timestamp| {
            self.dialect.keeps_timestamp()
                && timestamp.kind() == TimestampKind::Create
                && timestamp.as_millis() >= 0
        });
        let timestamp = self
            .timestamp
            .get(whole && self.timestamp.number == self.topic.number);
        Some(Origin {
            topic: self.topic.get(whole)?,
            partition: self.partition.get(whole)?,
            offset: self.offset.get(whole)?,
            timestamp: self
                .first_timestamp
                .or(timestamp)
                .or_else(|| of_letter.map(Timestamp::as_millis)),
        })
    }
}

impl<T: Copy> Places<T> {
    fn add(&mut self, value: T, newest_first: bool) {
        if newest_first || self.oldest.is_none() {
            self.oldest = Some(value);
        }
        self.last = Some(value);
        self.number += 1;
    }

    fn get(&self, whole: bool) -> Option<T> {
        if whole { self.oldest } else { self.last }
    }
}

fn set<T>(newest: &mut Option<T>, value: T, first_counts: bool) {
    if !first_counts || newest.is_none() {
        *newest = Some(value);
    }
}

fn topic(value: &[u8]) -> Option<&str> {
    str::from_utf8(value)
        .ok()
        .filter(|name| is_topic_name(name))
}

#[cfg(test)]
mod tests;
