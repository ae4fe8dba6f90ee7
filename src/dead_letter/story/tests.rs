//! Letters as each system writes them, byte for byte, and letters that nobody should have written.

use proptest::prelude::*;

use super::super::values::LONGEST_MESSAGE;
use super::*;
use crate::record::{ChunkBuilder, Source};

type Pair<'a> = (&'a str, &'a [u8]);

const PARTITION_3: &[u8] = &[0, 0, 0, 3];
const OFFSET_42: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 42];
/// 1,700,000,000,000 ms.
const TIME: &[u8] = &[0, 0, 0x01, 0x8b, 0xcf, 0xe5, 0x68, 0x00];
const MILLIS: i64 = 1_700_000_000_000;
/// When the letter was written.
const WRITTEN: i64 = 1_700_000_060_000;

fn letter(headers: &[Pair<'_>], kind: TimestampKind) -> Record {
    let source = Source::new("orders.dlq", 0);
    let mut chunk = ChunkBuilder::new(source.into(), None);
    chunk.push(7, Some(Timestamp::new(WRITTEN, kind)), None, None, None);
    for (name, value) in headers {
        chunk.header(name.as_bytes(), Some(value));
    }
    chunk.finish().record(0)
}

fn written(headers: &[Pair<'_>]) -> Record {
    letter(headers, TimestampKind::Create)
}

const ORIGIN: Origin<'static> = Origin {
    topic: "orders",
    partition: 3,
    offset: 42,
    timestamp: Some(MILLIS),
};

const UNTIMED: Origin<'static> = Origin {
    timestamp: None,
    ..ORIGIN
};

const OWN: [Pair<'static>; 11] = [
    ("retryCount", b"2"),
    ("originalPartition", b"3"),
    ("originalOffset", b"42"),
    ("originalTimestamp", b"1700000000000"),
    ("originalTopic", b"orders"),
    ("messageId", b"order-7"),
    ("consumerGroup", b"shipping"),
    ("attempts", b"5"),
    ("errorKind", b"attempts-exhausted"),
    ("failedAt", b"1700000059000"),
    ("errorMessage", b"no route to host"),
];

#[test]
fn a_letter_of_this_library_tells_all_of_it() {
    let letter = written(&OWN);
    let story = Story::of(&letter).unwrap();
    let expected = Story {
        dialect: Dialect::Own,
        origin: Some(ORIGIN),
        retry_count: 2,
        attempts: Some(5),
        error: LastError {
            kind: Some(FailureKind::AttemptsExhausted),
            class: None,
            message: Some("no route to host"),
            has_stacktrace: false,
        },
        failed_at: Some(1_700_000_059_000),
        group: Some("shipping"),
        message_id: Some("order-7"),
    };
    assert_eq!(story, expected);
    assert_eq!(story.message_id().as_deref(), Some("order-7"));
}

/// As its `DeadLetterPublishingRecoverer` writes with default settings.
const SPRING: [Pair<'static>; 10] = [
    (
        "kafka_dlt-exception-fqcn",
        b"org.springframework.kafka.listener.ListenerExecutionFailedException",
    ),
    (
        "kafka_dlt-exception-cause-fqcn",
        b"java.net.NoRouteToHostException",
    ),
    (
        "kafka_dlt-exception-message",
        b"Listener failed; no route to host",
    ),
    (
        "kafka_dlt-exception-stacktrace",
        b"org.springframework.kafka.listener.ListenerExecutionFailedException: Listener failed\n\tat ...\n",
    ),
    ("kafka_dlt-original-topic", b"orders"),
    ("kafka_dlt-original-partition", PARTITION_3),
    ("kafka_dlt-original-offset", OFFSET_42),
    ("kafka_dlt-original-timestamp", TIME),
    ("kafka_dlt-original-timestamp-type", b"CreateTime"),
    ("kafka_dlt-original-consumer-group", b"shipping"),
];

#[test]
fn a_letter_of_spring_kafka_is_read_from_binary_numbers() {
    let letter = written(&SPRING);
    let story = Story::of(&letter).unwrap();
    let expected = Story {
        dialect: Dialect::Spring,
        origin: Some(ORIGIN),
        retry_count: 0,
        attempts: None,
        error: LastError {
            kind: None,
            class: Some("java.net.NoRouteToHostException"),
            message: Some("Listener failed; no route to host"),
            has_stacktrace: true,
        },
        failed_at: Some(WRITTEN),
        group: Some("shipping"),
        message_id: None,
    };
    assert_eq!(story, expected);
    assert_eq!(
        story.message_id().as_deref(),
        Some("orders/3/42/1700000000000")
    );
}

// D3
#[test]
fn springs_appended_origins_tell_the_first_and_its_retry_topics_how_many_attempts_there_were() {
    let mut headers = SPRING.to_vec();
    headers.extend([
        ("kafka_dlt-original-topic", &b"orders-dlt"[..]),
        ("kafka_dlt-original-partition", &[0, 0, 0, 9]),
        ("kafka_dlt-original-offset", &[0, 0, 0, 0, 0, 0, 0, 1]),
        ("kafka_dlt-original-timestamp", &[0; 8]),
        ("kafka_dlt-exception-cause-fqcn", b"java.io.IOException"),
    ]);
    let story = written(&headers);
    let story = Story::of(&story).unwrap();
    assert_eq!(story.origin, Some(ORIGIN));
    assert_eq!(story.error.class, Some("java.io.IOException"));

    // As retry topics leave it after three attempts: all attempts stay, the original position is that of the first.
    let millis = &TIME[2..];
    let letter = written(&[
        (
            "kafka_exception-fqcn",
            b"org.springframework.kafka.listener.TimestampedException",
        ),
        ("kafka_exception-cause-fqcn", b"java.io.IOException"),
        ("kafka_exception-message", b"broken pipe"),
        ("kafka_exception-stacktrace", b"..."),
        ("kafka_original-topic", b"orders"),
        ("kafka_original-partition", PARTITION_3),
        ("kafka_original-offset", OFFSET_42),
        ("kafka_original-timestamp", TIME),
        ("kafka_original-timestamp-type", b"CreateTime"),
        ("kafka_dlt-original-consumer-group", b"shipping"),
        ("retry_topic-original-timestamp", millis),
        ("retry_topic-attempts", &[0, 0, 0, 2]),
        ("retry_topic-backoff-timestamp", millis),
        ("retry_topic-original-timestamp", millis),
        ("retry_topic-attempts", &[0, 0, 0, 3]),
        ("retry_topic-backoff-timestamp", millis),
        ("retry_topic-original-timestamp", millis),
        ("retry_topic-attempts", &[0, 0, 0, 4]),
        ("retry_topic-backoff-timestamp", millis),
    ]);
    let story = Story::of(&letter).unwrap();
    assert_eq!(
        (story.dialect, story.origin, story.attempts),
        (Dialect::Spring, Some(ORIGIN), Some(3))
    );
    assert_eq!(story.group, Some("shipping"));
    assert_eq!(
        (story.error.class, story.error.message),
        (Some("java.io.IOException"), Some("broken pipe"))
    );
}

#[test]
fn a_letter_of_smallrye_is_read_with_the_newest_in_front() {
    let headers: [Pair<'_>; 7] = [
        (
            "dead-letter-exception-class-name",
            b"java.net.NoRouteToHostException",
        ),
        ("dead-letter-reason", b"no route to host"),
        ("dead-letter-cause-class-name", b"java.io.IOException"),
        ("dead-letter-cause", b"down"),
        ("dead-letter-topic", b"orders"),
        ("dead-letter-partition", b"3"),
        ("dead-letter-offset", b"42"),
    ];
    let letter = written(&headers);
    let story = Story::of(&letter).unwrap();
    assert_eq!(
        (story.dialect, story.origin),
        (Dialect::SmallRye, Some(UNTIMED))
    );
    assert_eq!(story.error.class, Some("java.net.NoRouteToHostException"));
    assert_eq!(story.error.message, Some("no route to host"));
    assert_eq!(story.failed_at, Some(WRITTEN));
    assert_eq!(story.message_id().as_deref(), Some("orders/3/42/-1"));

    // After delayed retries: what was there comes after what is new.
    let retried = written(&[
        ("delayed-retry-exception-class-name", b"Newest"),
        ("delayed-retry-reason", b"the third time"),
        ("delayed-retry-topic", b"orders_retry_20000"),
        ("delayed-retry-partition", b"0"),
        ("delayed-retry-offset", b"1"),
        ("delayed-retry-exception-class-name", b"Oldest"),
        ("delayed-retry-reason", b"the first time"),
        ("delayed-retry-topic", b"orders"),
        ("delayed-retry-partition", b"3"),
        ("delayed-retry-offset", b"42"),
        ("delayed-retry-original-timestamp", b"1700000000000"),
        ("delayed-retry-first-processing-timestamp", b"1700000000001"),
        ("delayed-retry-count", b"2"),
    ]);
    let story = Story::of(&retried).unwrap();
    assert_eq!((story.origin, story.attempts), (Some(ORIGIN), Some(3)));
    assert_eq!(
        (story.error.class, story.error.message),
        (Some("Newest"), Some("the third time"))
    );
}

const CONNECT: [Pair<'static>; 10] = [
    ("__connect.errors.topic", b"orders"),
    ("__connect.errors.partition", b"3"),
    ("__connect.errors.offset", b"42"),
    ("__connect.errors.connector.name", b"orders-to-s3"),
    ("__connect.errors.task.id", b"0"),
    ("__connect.errors.stage", b"VALUE_CONVERTER"),
    (
        "__connect.errors.class.name",
        b"org.apache.kafka.connect.json.JsonConverter",
    ),
    (
        "__connect.errors.exception.class.name",
        b"org.apache.kafka.connect.errors.DataException",
    ),
    ("__connect.errors.exception.message", b"no schema"),
    (
        "__connect.errors.exception.stacktrace",
        b"org.apache.kafka.connect.errors.DataException: no schema\n",
    ),
];

#[test]
fn a_letter_of_connect_keeps_its_records_timestamp() {
    let headers = CONNECT;
    let first = written(&headers);
    let story = Story::of(&first).unwrap();
    let origin = Origin {
        timestamp: Some(WRITTEN),
        ..ORIGIN
    };
    assert_eq!(
        (story.dialect, story.origin),
        (Dialect::Connect, Some(origin))
    );
    assert_eq!((story.failed_at, story.group), (None, Some("orders-to-s3")));
    assert_eq!(
        story.error.class,
        Some("org.apache.kafka.connect.errors.DataException")
    );
    assert!(story.error.has_stacktrace);

    let appended = letter(&headers, TimestampKind::LogAppend);
    let story = Story::of(&appended).unwrap();
    assert_eq!(
        (story.origin, story.failed_at),
        (Some(UNTIMED), Some(WRITTEN)),
        "the time at which the broker appended it is not the record's"
    );
}

#[test]
fn a_letter_of_streams_keeps_its_records_timestamp_and_may_have_no_message() {
    let letter = written(&[
        (
            "__streams.errors.exception",
            b"java.lang.IllegalStateException",
        ),
        ("__streams.errors.message", b"no: really"),
        (
            "__streams.errors.stacktrace",
            b"java.lang.IllegalStateException: no: really\n",
        ),
        ("__streams.errors.topic", b"orders"),
        ("__streams.errors.partition", b"3"),
        ("__streams.errors.offset", b"42"),
    ]);
    let story = Story::of(&letter).unwrap();
    assert_eq!(story.dialect, Dialect::Streams);
    assert_eq!(story.error.class, Some("java.lang.IllegalStateException"));
    assert_eq!(story.error.message, Some("no: really"));
    assert_eq!(
        story.origin.and_then(|origin| origin.timestamp),
        Some(WRITTEN)
    );

    let letter = crate::Message::builder()
        .header("__streams.errors.exception", "java.lang.Error")
        .null_header("__streams.errors.message")
        .record();
    let story = Story::of(&letter).unwrap();
    assert_eq!(
        (story.error.class, story.error.message),
        (Some("java.lang.Error"), None)
    );
}

#[test]
fn a_letter_of_a_share_group_counts_deliveries() {
    let letter = written(&[
        ("__dlq.errors.topic", b"orders"),
        ("__dlq.errors.partition", b"3"),
        ("__dlq.errors.offset", b"42"),
        ("__dlq.errors.group", b"shipping"),
        ("__dlq.errors.delivery.count", b"5"),
        (
            "__dlq.errors.message",
            b"Offset delivery count exceeded the threshold.",
        ),
    ]);
    let story = Story::of(&letter).unwrap();
    assert_eq!(
        (story.dialect, story.origin, story.attempts),
        (Dialect::ShareGroup, Some(UNTIMED), Some(5))
    );
    assert_eq!(
        (story.group, story.failed_at),
        (Some("shipping"), Some(WRITTEN))
    );
}

#[test]
fn an_ad_hoc_letter_is_read_in_decimal_and_in_binary() {
    for (partition, offset, time) in [
        (PARTITION_3, OFFSET_42, TIME),
        (&b"3"[..], &b"42"[..], &b"1700000000000"[..]),
    ] {
        let letter = written(&[
            ("x-original-topic", b"orders"),
            ("x-original-partition", partition),
            ("x-original-offset", offset),
            ("x-original-timestamp", time),
            ("x-original-timestamp-type", b"CreateTime"),
            ("x-exception-fqcn", b"java.io.IOException"),
            ("x-exception-message", b"broken pipe"),
            ("x-exception-stacktrace", b"..."),
            ("x-retry-count", b"2"),
        ]);
        let story = Story::of(&letter).unwrap();
        assert_eq!(
            (story.dialect, story.origin),
            (Dialect::CloudStream, Some(ORIGIN))
        );
        assert_eq!(
            (story.error.class, story.attempts),
            (Some("java.io.IOException"), Some(3))
        );
    }
}

#[test]
fn of_several_dialects_the_last_that_tells_an_error_is_believed_and_ours_for_the_origin() {
    // Sent back by us, with what a redrive needs, and failed in a consumer with Spring.
    let mut headers = OWN[..6].to_vec();
    headers.extend(SPRING);
    headers[12] = ("kafka_dlt-original-offset", &[0, 0, 0, 0, 0, 0, 0, 99]);
    let letter = written(&headers);
    let story = Story::of(&letter).unwrap();
    assert_eq!(
        (story.dialect, story.origin, story.retry_count),
        (Dialect::Spring, Some(ORIGIN), 2)
    );
    assert_eq!(story.message_id().as_deref(), Some("order-7"));

    // The same in SmallRye, which writes in front of ours.
    let mut headers: Vec<Pair<'_>> = vec![("dead-letter-reason", b"why")];
    headers.extend(&OWN[..6]);
    let letter = written(&headers);
    let story = Story::of(&letter).unwrap();
    assert_eq!(
        (story.dialect, story.error.message),
        (Dialect::SmallRye, Some("why"))
    );

    // A letter of ours for what Spring had dead-lettered before.
    let mut headers = SPRING.to_vec();
    headers.extend(OWN);
    let letter = written(&headers);
    let story = Story::of(&letter).unwrap();
    assert_eq!(
        (story.dialect, story.error.kind),
        (Dialect::Own, Some(FailureKind::AttemptsExhausted))
    );
}

#[test]
fn names_that_an_application_has_for_something_of_its_own_make_no_letter() {
    let record = written(&[
        ("attempts", b"3"),
        ("errorMessage", b"x"),
        ("consumerGroup", b"y"),
        ("retryCount", b"1"),
        ("messageId", b"z"),
    ]);
    assert_eq!(Story::of(&record), None);
    assert_eq!(Story::of(&written(&[])), None);
}

#[test]
fn half_an_origin_is_none_and_what_is_malformed_counts_as_absent() {
    for (at, malformed) in [
        (4, &b""[..]),
        (4, b"no/topic"),
        (4, b"\xff"),
        (4, &[b'x'; 250]),
        (5, b""),
        (5, &[0, 0, 3]),
        (5, &[0xff; 4]),
        (5, b"-1"),
        (5, b"2147483648"),
        (6, b"four"),
        (6, &[0xff; 8]),
        (6, b"9223372036854775808"),
        (6, &[0; 9]),
    ] {
        let mut headers = SPRING;
        headers[at].1 = malformed;
        let name = headers[at].0;
        let letter = written(&headers);
        let story = Story::of(&letter).unwrap();
        assert_eq!(story.origin, None, "{name}: {malformed:?}");
        assert_eq!(story.message_id(), None);
        assert_eq!(story.error.class, Some("java.net.NoRouteToHostException"));

        // What is well formed counts, wherever the malformed one stands.
        let sound = SPRING[at];
        for pair in [[sound, (name, malformed)], [(name, malformed), sound]] {
            let mut headers = headers.to_vec();
            headers.splice(at..=at, pair);
            let letter = written(&headers);
            assert_eq!(Story::of(&letter).unwrap().origin, Some(ORIGIN));
        }
    }
}

#[test]
fn a_name_that_repeats_alone_has_its_last_value() {
    let mut headers = SPRING.to_vec();
    headers.insert(0, ("kafka_dlt-original-offset", &[0; 8]));
    let letter = written(&headers);
    assert_eq!(Story::of(&letter).unwrap().origin, Some(ORIGIN));
}

// D10
#[test]
fn counts_of_every_dialect_are_clamped_or_absent() {
    for (name, huge) in [
        ("retry_topic-attempts", u32::MAX - 1),
        ("delayed-retry-count", u32::MAX),
        ("__dlq.errors.delivery.count", u32::MAX),
        ("x-retry-count", u32::MAX),
        ("attempts", u32::MAX),
    ] {
        let attempts = |value: &[u8]| {
            let mut headers = CONNECT.to_vec();
            let (dialect, _) = Dialect::meaning(name.as_bytes()).unwrap();
            // An error in the same dialect, after Connect's.
            headers.extend(match dialect {
                Dialect::Own => OWN[8..].to_vec(),
                Dialect::Spring => vec![("kafka_dlt-exception-message", &b"why"[..])],
                Dialect::SmallRye => vec![("dead-letter-reason", &b"why"[..])],
                Dialect::ShareGroup => vec![("__dlq.errors.message", &b"why"[..])],
                _ => vec![("x-exception-message", &b"why"[..])],
            });
            headers.push((name, value));
            let letter = written(&headers);
            let story = Story::of(&letter).unwrap();
            assert_eq!(story.dialect, dialect);
            story.attempts
        };
        assert_eq!(attempts(b"99999999999999999999"), Some(huge), "{name}");
        assert_eq!(attempts(&[0, 0, 0, 2]), attempts(b"2"), "{name}");
        for malformed in [&b""[..], b"abc", b"-1", &[0xff; 4], &[0xff; 5_000]] {
            assert_eq!(attempts(malformed), None, "{name}: {malformed:?}");
        }
    }
}

#[test]
fn texts_are_bounded() {
    let long = "ü".repeat(40_000);
    let mut headers = SPRING;
    headers[0].1 = long.as_bytes();
    headers[1].1 = long.as_bytes();
    headers[2].1 = long.as_bytes();
    headers[9].1 = long.as_bytes();
    let letter = written(&headers);
    let story = Story::of(&letter).unwrap();
    assert_eq!(story.error.message, Some(&long[..LONGEST_MESSAGE]));
    assert_eq!((story.error.class, story.group), (None, None));
}

fn hostile_headers() -> impl Strategy<Value = Vec<(String, Vec<u8>)>> {
    let names = Dialect::ALL.iter().flat_map(|dialect| dialect.replaced());
    let mut known: Vec<_> = names.copied().collect();
    known.extend([
        "retry_topic-attempts",
        "retry_topic-original-timestamp",
        "delayed-retry-count",
        "delayed-retry-topic",
        "kafka_original-topic",
    ]);
    let name = prop_oneof![9 => proptest::sample::select(known).prop_map(str::to_owned), 1 => "\\PC{0,20}"];
    let value = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..20),
        proptest::collection::vec(any::<u8>(), 0..3_000),
        "[0-9]{0,25}|-1|[a-zA-Z._-]{1,20}".prop_map(String::into_bytes),
        any::<i32>().prop_map(|number| number.to_be_bytes().to_vec()),
        any::<i64>().prop_map(|number| number.to_be_bytes().to_vec()),
    ];
    proptest::collection::vec((name, value), 0..60)
}

proptest! {
    #[test]
    fn whatever_the_headers_a_story_is_within_its_bounds(headers in hostile_headers()) {
        let pairs: Vec<Pair<'_>> = headers.iter().map(|(name, value)| (name.as_str(), &value[..])).collect();
        let letter = written(&pairs);
        if let Some(story) = Story::of(&letter) {
            if let Some(origin) = story.origin {
                prop_assert!(is_topic_name(origin.topic) && origin.partition >= 0 && origin.offset >= 0);
                prop_assert!(origin.timestamp.is_none_or(|millis| millis >= 0));
            }
            prop_assert!(story.error.message.is_none_or(|text| text.len() <= LONGEST_MESSAGE));
            for name in [story.error.class, story.group] {
                prop_assert!(name.is_none_or(|name| (1..=512).contains(&name.len())));
            }
            prop_assert!(story.failed_at.is_none_or(|millis| millis >= 0));
            prop_assert!(story.message_id().is_none_or(|id| (1..=512).contains(&id.len())));
        }
    }
}
