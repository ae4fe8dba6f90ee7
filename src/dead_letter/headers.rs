//! What a dead letter tells about its record.

use std::borrow::Cow;

use super::dialect::{Dialect, Facts};
use super::values::LONGEST_MESSAGE;
use super::{ErrorMessage, Failure, FailureKind};
use crate::header_names as names;
use crate::message::Message;
use crate::origin::Origin;
use crate::record::Record;
use crate::shown::caught;

/// Name and value, null or not, byte for byte.
pub(super) type HeaderPair<'a> = (Cow<'a, [u8]>, Option<Cow<'a, [u8]>>);

/// How much is told, from all to what the next trip cannot do without.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Detail {
    Full,
    NoMessage,
    OriginOnly,
}

impl Detail {
    pub(super) fn less(self) -> Option<Detail> {
        match self {
            Self::Full => Some(Self::NoMessage),
            Self::NoMessage => Some(Self::OriginOnly),
            Self::OriginOnly => None,
        }
    }
}

/// What does not come from the record: who gives up, and what is told of it in which way.
#[derive(Clone, Debug, Default)]
pub(crate) struct Manner {
    pub(crate) group: String,
    pub(crate) error_message: ErrorMessage,
    pub(crate) dialect: Dialect,
}

/// The record's own headers as they are and in their order, then those of the neighbour's dialect and ours, in place of
/// any it has of the same name.
///
/// Ours are the last: by that they are known as the newest when others stand there too.
pub(super) fn dead_letter_headers<'a>(
    record: &'a Record,
    failure: &Failure,
    manner: &'a Manner,
    detail: Detail,
) -> Vec<HeaderPair<'a>> {
    let own = record.headers();
    let Manner {
        group,
        error_message,
        dialect,
    } = manner;
    let kept = own.iter().filter(|header| {
        let name = header.name_bytes();
        !Dialect::Own.replaces(name) && !dialect.replaces(name)
    });
    let mut headers: Vec<HeaderPair<'a>> = kept
        .map(|header| (header.name_bytes().into(), header.value().map(Cow::from)))
        .collect();

    let message = Message::new(record.clone(), failure.attempts, (), None);
    let mut origin = match failure.kind {
        // Its origin is not to be believed, and the next one to read it must not.
        FailureKind::Untrusted => Origin::here(record),
        _ => Origin::of(record),
    };
    // Other negative ones are nonsense that a producer wrote, and would make the origin malformed.
    origin.timestamp = origin.timestamp.filter(|millis| *millis >= 0);
    let told = (detail < Detail::NoMessage)
        .then(|| error_message.apply(&failure.message))
        .flatten();

    // A neighbour's retry topics are not ours.
    if detail < Detail::OriginOnly && failure.due_at_ms.is_none() {
        let facts = Facts {
            origin: &origin,
            timestamp_type: dialect.timestamp_type(record, &origin),
            group,
            attempts: failure.attempts,
            kind: failure.kind,
            message: told.as_deref(),
            with_message: detail < Detail::NoMessage,
        };
        let neighbours = dialect.write(&facts).into_iter();
        headers.extend(neighbours.map(|(name, value)| {
            let value = value.map(|value| Cow::Owned(value.into_owned()));
            (name.as_bytes().into(), value)
        }));
    }

    let mut set = |name: &'static str, value: Cow<'a, str>| {
        let value = match value {
            Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
            Cow::Owned(text) => Cow::Owned(text.into_bytes()),
        };
        headers.push((name.as_bytes().into(), Some(value)));
    };
    let timestamp = origin.timestamp_millis();
    set(names::RETRY_COUNT, message.retry_count().to_string().into());
    set(
        names::ORIGINAL_PARTITION,
        origin.partition.to_string().into(),
    );
    set(names::ORIGINAL_OFFSET, origin.offset.to_string().into());
    set(names::ORIGINAL_TIMESTAMP, timestamp.to_string().into());
    set(names::ORIGINAL_TOPIC, origin.topic.into());
    set(names::MESSAGE_ID, message.message_id().into());
    // In a retry topic nothing can be done without these.
    if detail < Detail::OriginOnly || failure.due_at_ms.is_some() {
        set(names::CONSUMER_GROUP, group.into());
        set(names::ATTEMPTS, failure.attempts.to_string().into());
    }
    if failure.retry_tier > 0 {
        set(names::RETRY_TIER, failure.retry_tier.to_string().into());
    }
    if let Some(due_at) = failure.due_at_ms {
        set(names::DUE_AT, due_at.to_string().into());
    }
    if detail < Detail::OriginOnly {
        set(names::ERROR_KIND, failure.kind.as_str().into());
        set(names::FAILED_AT, failure.failed_at_ms.to_string().into());
    }
    if let Some(text) = told {
        set(names::ERROR_MESSAGE, text.into());
    }
    headers
}

impl ErrorMessage {
    /// What may be told of an error. `None`: nothing.
    pub(crate) fn apply(&self, message: &str) -> Option<String> {
        match self {
            Self::Keep => Some(cut(message).to_owned()),
            Self::Off => None,
            // What was to be hidden must not come out because hiding it failed.
            Self::Redacted(redact) => caught(|| redact(message))
                .ok()
                .map(|text| cut(&text).to_owned()),
        }
    }
}

/// At most [`LONGEST_MESSAGE`] bytes, no character cut in two.
fn cut(text: &str) -> &str {
    let mut end = text.len().min(LONGEST_MESSAGE);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::super::Story;
    use super::*;
    use crate::record::{ChunkBuilder, Source, Timestamp, TimestampKind};

    type Owned = (Vec<u8>, Option<Vec<u8>>);

    struct Place(&'static str, i32, i64, Option<i64>);

    const SOURCE: Place = Place("orders", 3, 42, Some(1_700_000_000_000));
    const REDRIVEN: Place = Place("orders", 1, 99, Some(1_800_000_000_000));

    fn record(Place(topic, partition, offset, millis): Place, headers: &[Owned]) -> Record {
        let mut chunk = ChunkBuilder::new(Arc::new(Source::new(topic, partition)), None);
        let timestamp = millis.map(|millis| Timestamp::new(millis, TimestampKind::Create));
        chunk.push(offset, timestamp, None, None, None);
        for (name, value) in headers {
            chunk.header(name, value.as_deref());
        }
        chunk.finish().record(0)
    }

    fn failure(message: &str) -> Failure {
        let failed_at_ms = 1_750_000_000_000;
        Failure {
            kind: FailureKind::AttemptsExhausted,
            message: message.into(),
            attempts: 5,
            failed_at_ms,
            retry_tier: 0,
            due_at_ms: None,
        }
    }

    fn letter_with(
        record: &Record,
        message: &str,
        policy: &ErrorMessage,
        detail: Detail,
    ) -> Vec<Owned> {
        let manner = Manner {
            group: "shipping".into(),
            error_message: policy.clone(),
            dialect: Dialect::Own,
        };
        dead_letter_headers(record, &failure(message), &manner, detail)
            .into_iter()
            .map(|(name, value)| (name.into_owned(), value.map(Cow::into_owned)))
            .collect()
    }

    fn letter_in(dialect: Dialect, record: &Record, message: &str) -> Vec<Owned> {
        let manner = Manner {
            group: "shipping".into(),
            dialect,
            ..Manner::default()
        };
        dead_letter_headers(record, &failure(message), &manner, Detail::Full)
            .into_iter()
            .map(|(name, value)| (name.into_owned(), value.map(Cow::into_owned)))
            .collect()
    }

    fn letter(record: &Record, message: &str) -> Vec<Owned> {
        letter_with(record, message, &ErrorMessage::Keep, Detail::Full)
    }

    fn pairs(headers: &[(&str, &str)]) -> Vec<Owned> {
        headers
            .iter()
            .map(|(name, value)| (name.as_bytes().to_vec(), Some(value.as_bytes().to_vec())))
            .collect()
    }

    fn value<'a>(headers: &'a [Owned], name: &str) -> Option<&'a str> {
        let mut found = headers.iter().filter(|(own, _)| own == name.as_bytes());
        let (_, value) = found.next()?;
        assert!(found.next().is_none(), "{name} is there once");
        Some(str::from_utf8(value.as_ref().unwrap()).unwrap())
    }

    /// Those of retry topics are on none that never was in one.
    const ON_EVERY_LETTER: usize = names::ALL.len() - 2;

    fn is_ours(name: &[u8]) -> bool {
        names::ALL.iter().any(|ours| ours.as_bytes() == name)
    }

    #[test]
    fn a_first_dead_letter_tells_where_the_record_was_and_why_it_failed() {
        let headers = letter(&record(SOURCE, &[]), "no such customer");
        for (name, expected) in [
            ("retryCount", "0"),
            ("originalTopic", "orders"),
            ("originalPartition", "3"),
            ("originalOffset", "42"),
            ("originalTimestamp", "1700000000000"),
            ("messageId", "orders/3/42/1700000000000"),
            ("consumerGroup", "shipping"),
            ("attempts", "5"),
            ("errorKind", "attempts-exhausted"),
            ("errorMessage", "no such customer"),
            ("failedAt", "1750000000000"),
        ] {
            assert_eq!(value(&headers, name), Some(expected), "{name}");
        }
        assert_eq!(headers.len(), ON_EVERY_LETTER);
    }

    #[test]
    fn in_a_retry_topic_stands_what_is_needed_there_and_no_more_in_the_end() {
        let mut failure = failure("busy");
        (failure.retry_tier, failure.due_at_ms) = (2, Some(1_750_000_060_000));
        let manner = Manner {
            group: "shipping".into(),
            dialect: Dialect::Spring,
            ..Manner::default()
        };
        let first = record(SOURCE, &[]);
        for detail in [Detail::Full, Detail::OriginOnly] {
            let moved = dead_letter_headers(&first, &failure, &manner, detail);
            let moved: Vec<_> = moved
                .into_iter()
                .map(|(name, value)| (name.into_owned(), value.map(Cow::into_owned)))
                .collect();
            for (name, expected) in [
                ("dueAt", "1750000060000"),
                ("retryTier", "2"),
                ("consumerGroup", "shipping"),
                ("attempts", "5"),
                ("originalOffset", "42"),
            ] {
                assert_eq!(value(&moved, name), Some(expected), "{name}");
            }
            assert_eq!(value(&moved, "kafka_dlt-original-topic"), None);
            let letter = letter(&record(REDRIVEN, &moved), "");
            assert_eq!(letter.len(), ON_EVERY_LETTER);
        }
    }

    #[test]
    fn an_origin_that_is_not_trusted_is_replaced() {
        let headers = letter(&record(SOURCE, &[]), "");
        let found = record(REDRIVEN, &headers);
        let mut failure = failure("forged");
        failure.kind = FailureKind::Untrusted;
        let manner = Manner::default();
        let headers = dead_letter_headers(&found, &failure, &manner, Detail::Full);
        let offset = headers
            .iter()
            .find(|(name, _)| &**name == b"originalOffset");
        assert_eq!(
            offset.and_then(|(_, value)| value.as_deref()),
            Some(&b"99"[..])
        );
    }

    // D3
    #[test]
    fn ten_trips_keep_the_first_origin_and_the_last_error_and_do_not_grow() {
        let own = pairs(&[("trace", "a"), ("trace", "b")]);
        let mut headers = letter(&record(SOURCE, &own), "error 0");
        let size = headers.len();
        for trip in 1..10 {
            let count = headers
                .iter_mut()
                .find(|(name, _)| name == b"retryCount")
                .unwrap();
            count.1 = Some(trip.to_string().into_bytes());
            headers = letter(&record(REDRIVEN, &headers), &format!("error {trip}"));
            assert_eq!(headers.len(), size);
            assert_eq!(headers[..2], own);
            assert_eq!(value(&headers, "retryCount"), Some(&*trip.to_string()));
            assert_eq!(value(&headers, "originalOffset"), Some("42"));
            assert_eq!(value(&headers, "originalTimestamp"), Some("1700000000000"));
            assert_eq!(
                value(&headers, "messageId"),
                Some("orders/3/42/1700000000000")
            );
            assert_eq!(
                value(&headers, "errorMessage"),
                Some(&*format!("error {trip}"))
            );
        }
    }

    // D3
    #[test]
    fn ten_trips_in_a_neighbours_dialect_do_not_grow_either_and_tell_it_the_same() {
        let own = pairs(&[("trace", "a")]);
        for dialect in Dialect::ALL {
            let first = letter_in(dialect, &record(SOURCE, &own), "error 0");
            let mut headers = first.clone();
            for trip in 1..10 {
                let error = format!("error {trip}");
                headers = letter_in(dialect, &record(REDRIVEN, &headers), &error);
                let before = first.iter().map(|(name, value)| {
                    let text = value.as_ref().map(|value| {
                        let text = value.windows(7).position(|part| part == b"error 0");
                        let mut value = value.clone();
                        if let Some(at) = text {
                            value.splice(at..at + 7, error.bytes());
                        }
                        value
                    });
                    (name.clone(), text)
                });
                assert!(headers.iter().cloned().eq(before), "{dialect}: {headers:?}");
            }
        }
    }

    #[test]
    fn a_timestamps_type_is_told_as_it_was_first() {
        for (kind, name) in [
            (Some(TimestampKind::Create), "CreateTime"),
            (Some(TimestampKind::LogAppend), "LogAppendTime"),
            (None, "NoTimestampType"),
        ] {
            let mut chunk = ChunkBuilder::new(Arc::new(Source::new("orders", 3)), None);
            let timestamp = kind.map(|kind| Timestamp::new(1, kind));
            chunk.push(42, timestamp, None, None, None);
            let first = letter_in(Dialect::Spring, &chunk.finish().record(0), "");
            let second = letter_in(Dialect::Spring, &record(REDRIVEN, &first), "");
            for letter in [first, second] {
                assert_eq!(
                    value(&letter, "kafka_dlt-original-timestamp-type"),
                    Some(name)
                );
            }
        }
    }

    #[test]
    fn what_another_system_wrote_stays_unless_its_dialect_is_written() {
        let theirs = pairs(&[
            ("kafka_dlt-exception-message", "theirs"),
            ("kafka_dlt-key-exception-message", "theirs"),
            ("dead-letter-reason", "theirs"),
        ]);
        let record = record(SOURCE, &theirs);
        assert_eq!(letter(&record, "ours")[..3], theirs);
        let spring = letter_in(Dialect::Spring, &record, "ours");
        assert_eq!(value(&spring, "kafka_dlt-exception-message"), Some("ours"));
        assert_eq!(value(&spring, "kafka_dlt-key-exception-message"), None);
        assert_eq!(value(&spring, "dead-letter-reason"), Some("theirs"));
    }

    #[test]
    fn redaction_holds_for_a_neighbours_headers_too() {
        for (policy, expected) in [
            (ErrorMessage::Off, None),
            (
                ErrorMessage::Redacted(Arc::new(|text| text.replace("4111", "****"))),
                Some("card ****"),
            ),
        ] {
            for dialect in Dialect::ALL {
                let manner = Manner {
                    group: "shipping".into(),
                    error_message: policy.clone(),
                    dialect,
                };
                let record = record(
                    SOURCE,
                    &letter_in(dialect, &record(SOURCE, &[]), "card 4111"),
                );
                let headers =
                    dead_letter_headers(&record, &failure("card 4111"), &manner, Detail::Full);
                for (name, value) in &headers {
                    let shown = value.as_deref().unwrap_or_default();
                    assert!(
                        !shown.windows(4).any(|part| part == b"4111"),
                        "{dialect}: {}",
                        String::from_utf8_lossy(name)
                    );
                }
                let ours = headers.iter().find(|(name, _)| &**name == b"errorMessage");
                let ours = ours.and_then(|(_, value)| value.as_deref());
                assert_eq!(ours, expected.map(str::as_bytes));
            }
        }
    }

    #[test]
    fn a_record_without_a_sound_timestamp_keeps_its_origin_on_the_next_trip() {
        for millis in [None, Some(-5)] {
            let first = letter(&record(Place("orders", 3, 42, millis), &[]), "");
            let second = letter(&record(REDRIVEN, &first), "");
            assert_eq!(value(&second, "originalTimestamp"), Some("-1"));
            assert_eq!(value(&second, "originalOffset"), Some("42"));
            assert_eq!(value(&second, "messageId"), value(&first, "messageId"));
        }
    }

    #[test]
    fn half_an_origin_is_none() {
        let headers = pairs(&[
            ("originalTopic", "payments"),
            ("originalPartition", "1"),
            ("originalOffset", "x"),
        ]);
        let letter = letter(&record(SOURCE, &headers), "");
        assert_eq!(value(&letter, "originalTopic"), Some("orders"));
        assert_eq!(value(&letter, "originalPartition"), Some("3"));
        assert_eq!(value(&letter, "originalOffset"), Some("42"));
    }

    // D10, for what is carried on
    #[test]
    fn a_malformed_retry_count_starts_anew_and_a_huge_one_is_clamped() {
        let huge = u32::MAX.to_string();
        for (before, after) in [
            ("7", "7"),
            ("abc", "0"),
            ("-1", "0"),
            ("", "0"),
            ("99999999999999999999", &*huge),
        ] {
            let letter = letter(&record(SOURCE, &pairs(&[("retryCount", before)])), "");
            assert_eq!(value(&letter, "retryCount"), Some(after), "{before}");
        }
    }

    #[test]
    fn a_long_message_is_cut_at_one_kib_between_two_characters() {
        let text = format!("{}{}", "x".repeat(1_023), "ü".repeat(10));
        assert_eq!(
            value(&letter(&record(SOURCE, &[]), &text), "errorMessage"),
            Some(&*"x".repeat(1_023))
        );
        let text = format!("{}{}", "x".repeat(1_022), "ü".repeat(10));
        assert_eq!(
            value(&letter(&record(SOURCE, &[]), &text), "errorMessage").map(str::len),
            Some(1_024)
        );
    }

    #[test]
    fn the_message_can_be_redacted_or_left_out_and_an_earlier_one_does_not_stay() {
        let earlier = record(SOURCE, &letter(&record(SOURCE, &[]), "card 4111"));
        let apply =
            |policy: &ErrorMessage| letter_with(&earlier, "card 4111", policy, Detail::Full);
        let hide = ErrorMessage::Redacted(Arc::new(|text| text.replace("4111", "****")));
        assert_eq!(value(&apply(&hide), "errorMessage"), Some("card ****"));
        assert_eq!(value(&apply(&ErrorMessage::Off), "errorMessage"), None);
        let broken = ErrorMessage::Redacted(Arc::new(|_| panic!("a redaction fails")));
        assert_eq!(value(&apply(&broken), "errorMessage"), None);
    }

    // D6
    #[test]
    fn less_detail_drops_diagnostics_but_never_what_a_redrive_needs() {
        let record = record(SOURCE, &pairs(&[("errorMessage", "earlier")]));
        let less = letter_with(&record, "why", &ErrorMessage::Keep, Detail::NoMessage);
        assert_eq!(
            (value(&less, "errorMessage"), value(&less, "errorKind")),
            (None, Some("attempts-exhausted"))
        );
        let least = letter_with(&record, "why", &ErrorMessage::Keep, Detail::OriginOnly);
        assert_eq!(value(&least, "errorKind"), None);
        let manner = Manner {
            dialect: Dialect::Spring,
            ..Manner::default()
        };
        let sizes = [Detail::Full, Detail::NoMessage, Detail::OriginOnly]
            .map(|detail| dead_letter_headers(&record, &failure("why"), &manner, detail).len());
        assert_eq!(
            sizes,
            [11 + 10, 10 + 8, 6],
            "a neighbour's headers go first"
        );
        assert_eq!(value(&least, "originalOffset"), Some("42"));
        assert_eq!(
            value(&least, "messageId"),
            Some("orders/3/42/1700000000000")
        );
    }

    fn hostile_headers() -> impl Strategy<Value = Vec<Owned>> {
        let known: Vec<_> = Dialect::ALL
            .iter()
            .flat_map(|dialect| dialect.replaced())
            .collect();
        let known = proptest::sample::select(known).prop_map(|name| name.as_bytes().to_vec());
        let ours =
            proptest::sample::select(&names::ALL[..]).prop_map(|name| name.as_bytes().to_vec());
        let any = proptest::collection::vec(any::<u8>(), 0..40);
        let name = prop_oneof![3 => any.clone(), 2 => ours, 2 => known];
        let text = "[0-9]{0,25}|-1|[a-z.]{1,9}".prop_map(String::into_bytes);
        let value = proptest::option::of(prop_oneof![any, text]);
        proptest::collection::vec((name, value), 0..30)
    }

    proptest! {
        // D4
        #[test]
        fn hostile_headers_survive_byte_for_byte_and_a_second_trip_changes_nothing(headers in hostile_headers()) {
            let first = letter(&record(SOURCE, &headers), "why");
            let foreign: Vec<_> = headers.iter().filter(|(name, _)| !is_ours(name)).cloned().collect();
            prop_assert_eq!(&first[..foreign.len()], &foreign[..]);
            prop_assert_eq!(first.len(), foreign.len() + ON_EVERY_LETTER);
            for name in names::ALL.into_iter().take(ON_EVERY_LETTER) {
                prop_assert!(value(&first, name).is_some());
            }
            prop_assert_eq!(letter(&record(REDRIVEN, &first), "why"), first);

            for dialect in Dialect::ALL {
                let first = letter_in(dialect, &record(SOURCE, &headers), "why");
                let foreign = headers.iter().filter(|(name, _)| !is_ours(name) && !dialect.replaces(name));
                let count = foreign.clone().count();
                prop_assert!(first.iter().take(count).eq(foreign));
                prop_assert_eq!(&letter_in(dialect, &record(REDRIVEN, &first), "why"), &first);
                let letter = record(REDRIVEN, &first);
                let story = Story::of(&letter).unwrap();
                prop_assert_eq!(story.dialect, Dialect::Own);
                prop_assert_eq!(story.origin, Some(Origin::of(&letter)));
                prop_assert_eq!(story.error.message, Some("why"));
            }
        }

        #[test]
        fn a_cut_message_is_a_prefix_within_the_limit(text in "\\PC{0,600}") {
            let cut = cut(&text);
            prop_assert!(text.starts_with(cut) && cut.len() <= LONGEST_MESSAGE);
            prop_assert!(cut.len() == text.len() || cut.len() > LONGEST_MESSAGE - 4);
        }
    }
}
