//! Which dead letters are meant.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::{
    dead_letter::{FailureKind, LastError, Story},
    header_names,
    record::Record,
};

/// Chooses dead letters: by the topic they were in first, by why and when they failed, by key and by headers.
///
/// A letter is meant if it meets all that is set. Where one thing is set several times, such as the topic, one of them is
/// enough; of headers all are needed.
///
/// ```
/// use std::time::{Duration, SystemTime};
/// use reliable_consumer::{FailureKind, LetterFilter, Message};
///
/// let an_hour_ago = SystemTime::now() - Duration::from_secs(3600);
/// let filter = LetterFilter::all()
///     .topic("orders")
///     .error_kind(FailureKind::Timeout)
///     .error_kind(FailureKind::AttemptsExhausted)
///     .failed_after(an_hour_ago);
/// let no_letter = Message::builder().topic("orders.dlq").record();
/// assert!(!filter.matches(&no_letter));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct LetterFilter {
    topics: Vec<String>,
    /// Names of kinds, and classes.
    errors: Vec<String>,
    /// Unix milliseconds.
    after: Option<i64>,
    before: Option<i64>,
    keys: Vec<Vec<u8>>,
    headers: Vec<(String, Option<Vec<u8>>)>,
}

impl LetterFilter {
    /// All letters.
    pub fn all() -> Self {
        Self::default()
    }

    /// Letters whose record was first in this topic.
    pub fn topic(mut self, name: impl Into<String>) -> Self {
        self.topics.push(name.into());
        self
    }

    /// Letters that this library wrote for this reason.
    pub fn error_kind(mut self, kind: FailureKind) -> Self {
        self.errors.push(kind.as_str().into());
        self
    }

    /// Letters whose error goes by this name, whoever wrote them: a [kind](FailureKind::as_str) of this library's, also one
    /// of a later version, or the class of an exception, with its package or without.
    pub fn error_named(mut self, name: impl Into<String>) -> Self {
        self.errors.push(name.into());
        self
    }

    /// Letters that failed at this time or later. One that does not tell when it failed is not meant.
    pub fn failed_after(mut self, time: SystemTime) -> Self {
        self.after = Some(millis(time));
        self
    }

    /// Letters that failed before this time. One that does not tell when it failed is not meant.
    pub fn failed_before(mut self, time: SystemTime) -> Self {
        self.before = Some(millis(time));
        self
    }

    /// Letters with this key.
    pub fn key(mut self, key: impl Into<Vec<u8>>) -> Self {
        self.keys.push(key.into());
        self
    }

    /// Letters with this header and value; another header of the same name does not matter.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<Vec<u8>>) -> Self {
        self.headers.push((name.into(), Some(value.into())));
        self
    }

    /// Letters with this header, whatever its value.
    pub fn has_header(mut self, name: impl Into<String>) -> Self {
        self.headers.push((name.into(), None));
        self
    }

    /// Whether the letter is meant.
    pub fn matches(&self, letter: &Record) -> bool {
        self.is_all() || self.matches_told(letter, Story::of(letter).as_ref())
    }

    /// The same, for who has read the letter's story already.
    pub fn matches_told(&self, letter: &Record, story: Option<&Story<'_>>) -> bool {
        let origin = story.and_then(|story| story.origin);
        let failed_at = story.and_then(|story| story.failed_at);
        let one_of = |topic: &str| self.topics.iter().any(|wanted| wanted == topic);
        let has_error = |story: &Story<'_>| {
            let mut wanted = self.errors.iter();
            wanted.any(|wanted| is_named(wanted, letter, &story.error))
        };
        (self.topics.is_empty() || origin.is_some_and(|origin| one_of(origin.topic)))
            && (self.errors.is_empty() || story.is_some_and(has_error))
            && self
                .after
                .is_none_or(|after| failed_at.is_some_and(|at| at >= after))
            && self
                .before
                .is_none_or(|before| failed_at.is_some_and(|at| at < before))
            && (self.keys.is_empty()
                || letter
                    .key()
                    .is_some_and(|key| self.keys.iter().any(|wanted| wanted == key)))
            && self.headers.iter().all(|(name, wanted)| {
                letter.headers().get_all(name).any(|value| {
                    wanted
                        .as_ref()
                        .is_none_or(|wanted| value == Some(wanted.as_slice()))
                })
            })
    }

    /// Whether all letters are meant.
    pub fn is_all(&self) -> bool {
        *self == Self::default()
    }

    /// The same for the same filter, in every process and version: it is part of a group's name.
    pub(super) fn fingerprint(&self) -> u64 {
        let Self {
            topics,
            errors,
            after,
            before,
            keys,
            headers,
        } = self;
        let mut hash = Fnv::default();
        let mut list = |tag: u8, mut items: Vec<Vec<u8>>| {
            // The order in which they were named makes no difference.
            items.sort_unstable();
            for item in items {
                hash.take(&[tag]);
                hash.take(&(item.len() as u64).to_le_bytes());
                hash.take(&item);
            }
        };
        let bytes = |text: &str| text.as_bytes().to_vec();
        list(1, topics.iter().map(|topic| bytes(topic)).collect());
        list(2, errors.iter().map(|error| bytes(error)).collect());
        list(3, after.iter().map(|at| at.to_le_bytes().into()).collect());
        list(4, before.iter().map(|at| at.to_le_bytes().into()).collect());
        list(5, keys.clone());
        let header = |(name, value): &(String, Option<Vec<u8>>)| {
            let mut item = bytes(name);
            item.push(0);
            if let Some(value) = value {
                item.push(1);
                item.extend(value);
            }
            item
        };
        list(6, headers.iter().map(header).collect());
        hash.0
    }
}

fn is_named(wanted: &str, letter: &Record, error: &LastError<'_>) -> bool {
    match (error.class, error.kind) {
        (Some(class), _) => class == wanted || class.rsplit(['.', '$']).next() == Some(wanted),
        (None, Some(kind)) => kind.as_str() == wanted,
        (None, None) => letter.headers().get_str(header_names::ERROR_KIND) == Some(wanted),
    }
}

fn millis(time: SystemTime) -> i64 {
    let limit =
        |duration: std::time::Duration| i64::try_from(duration.as_millis()).unwrap_or(i64::MAX);
    match time.duration_since(UNIX_EPOCH) {
        Ok(since) => limit(since),
        Err(before) => -limit(before.duration()),
    }
}

/// FNV-1a.
struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    fn take(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Message, MessageBuilder, header_names as names};

    fn letter() -> MessageBuilder {
        Message::builder()
            .topic("orders.dlq")
            .key("k")
            .header("tenant", "blue")
            .header(names::ORIGINAL_TOPIC, "orders")
            .header(names::ORIGINAL_PARTITION, "0")
            .header(names::ORIGINAL_OFFSET, "1")
            .header(names::ORIGINAL_TIMESTAMP, "5")
            .header(names::ERROR_KIND, "timeout")
            .header(names::FAILED_AT, "60000")
    }

    #[test]
    fn a_letter_has_to_meet_all_that_is_set_and_one_of_each_kind() {
        let at = |secs| UNIX_EPOCH + Duration::from_secs(secs);
        let letter = letter().record();
        let all = LetterFilter::all;
        for filter in [
            all(),
            all().topic("refunds").topic("orders"),
            all().error_kind(FailureKind::Timeout),
            all().failed_after(at(60)).failed_before(at(61)),
            all().key("x").key("k"),
            all().header("tenant", "blue").has_header("tenant"),
        ] {
            assert!(filter.matches(&letter), "{filter:?}");
        }
        for filter in [
            all().topic("refunds"),
            all().topic("orders").error_kind(FailureKind::Panic),
            all().failed_after(at(61)),
            all().failed_before(at(60)),
            all().key("x"),
            all().header("tenant", "red"),
            all().has_header("tenant").has_header("colour"),
        ] {
            assert!(!filter.matches(&letter), "{filter:?}");
        }
        let stranger = Message::builder().record();
        assert!(all().matches(&stranger));
        assert!(!all().failed_before(at(100)).matches(&stranger));
    }

    #[test]
    fn an_error_goes_by_its_kind_or_its_class_with_or_without_its_package() {
        let of_spring = Message::builder()
            .header("kafka_dlt-exception-fqcn", "java.io.IOException")
            .record();
        let of_later = letter().header(names::ERROR_KIND, "bored").record();
        let named = |name: &str| LetterFilter::all().error_named(name);
        for (letter, name, expected) in [
            (&of_spring, "java.io.IOException", true),
            (&of_spring, "IOException", true),
            (&of_spring, "io", false),
            (&of_later, "bored", true),
            (&of_later, "timeout", false),
            (&letter().record(), "timeout", true),
        ] {
            assert_eq!(named(name).matches(letter), expected, "{name}");
        }
    }

    #[test]
    fn the_same_filter_has_the_same_fingerprint_everywhere_and_another_one_another() {
        let all = LetterFilter::all;
        let filter = all().topic("a").topic("b").key("k");
        assert_eq!(
            filter.fingerprint(),
            all().key("k").topic("b").topic("a").fingerprint()
        );
        assert_eq!(all().topic("a").fingerprint(), 0xe498_1b26_3241_8b44);
        for other in [
            all().topic("ab").key("k"),
            all().topic("a").key("b").key("k"),
        ] {
            assert_ne!(filter.fingerprint(), other.fingerprint());
        }
    }
}
