//! The headers that each system writes on its dead letters: what they mean, and how to write them.

use std::borrow::Cow;
use std::fmt;

use super::FailureKind;
use crate::header_names as own;
use crate::origin::Origin;
use crate::record::{Record, Timestamp, TimestampKind};

/// Whose headers tell the story of a dead letter.
///
/// All are read ([`Story`](crate::Story)); one besides this library's own can be
/// [written](crate::DeadLetter::dialect), for dashboards and tools that are there already.
///
/// What is written is what the other system would have written, with these differences. Errors of this library have no
/// class: the [kind](FailureKind) of the failure stands for it. They have no stack trace either: where the other system
/// always writes one, its first line stands there. The origin is where the record was *first*, on every trip. Headers of
/// the same names from earlier are replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dialect {
    /// This library's: [`header_names`](crate::header_names). Decimal integers.
    #[default]
    Own,
    /// Spring for Apache Kafka. Read are `kafka_dlt-*`, and `kafka_original-*`, `kafka_exception-*` and `retry_topic-*`
    /// of its retry topics; written are `kafka_dlt-*`. Integers are binary, the highest byte first.
    ///
    /// Source: `KafkaHeaders`, `DeadLetterRecordManager`, `DeadLetterPublishingRecovererFactory` and `RetryTopicHeaders`
    /// of spring-kafka 4.1.0.
    Spring,
    /// SmallRye Reactive Messaging, as in Quarkus. Read are `dead-letter-*`, and `delayed-retry-*` of its delayed
    /// retries; written are `dead-letter-*`. Decimal integers.
    ///
    /// Source: `KafkaDeadLetterQueue` and `KafkaDelayedRetryTopic` of smallrye-reactive-messaging 4.36.0.
    SmallRye,
    /// Kafka Connect with `errors.deadletterqueue.context.headers.enable`: `__connect.errors.*`. Decimal integers. The
    /// group is written for the connector's name, 0 for its task.
    ///
    /// Source: `DeadLetterQueueReporter` and `Stage` of Apache Kafka 4.3.1.
    Connect,
    /// Kafka Streams with `errors.dead.letter.queue.topic.name` (KIP-1034): `__streams.errors.*`. Decimal integers.
    ///
    /// Source: `ExceptionHandlerUtils` of Apache Kafka 4.3.1.
    Streams,
    /// Share groups with a dead-letter topic (KIP-1191): `__dlq.errors.*`, written by brokers. Decimal integers. The
    /// topic may be the topic's id where the broker did not know its name.
    ///
    /// Source: `ShareGroupDLQRecordHelper` of Apache Kafka's trunk for 4.4.
    ShareGroup,
    /// `x-original-*` and `x-exception-*`, which the Kafka binder of Spring Cloud Stream writes with binary integers, and
    /// many a hand-written consumer with decimal ones. Both are read; binary ones are written.
    ///
    /// Source: `KafkaMessageChannelBinder` of spring-cloud-stream 5.0.3.
    CloudStream,
}

/// Java's names for who set a timestamp.
const TIMESTAMP_TYPES: [&str; 3] = ["CreateTime", "LogAppendTime", "NoTimestampType"];

const TIMESTAMP_TYPE_IN_SPRING: &str = "kafka_dlt-original-timestamp-type";
const TIMESTAMP_TYPE_IN_CLOUD_STREAM: &str = "x-original-timestamp-type";

/// What a header tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field {
    Topic,
    Partition,
    Offset,
    Timestamp,
    /// The timestamp before all retries, in as few bytes as it needs.
    FirstTimestamp,
    Group,
    Kind,
    Class,
    /// Of the cause, where the class itself is that of a wrapper.
    CauseClass,
    Message,
    Stacktrace,
    /// Handler calls so far.
    Attempts,
    /// The number of the handler call that would have come next.
    NextAttempt,
    /// Handler calls after the first.
    Retries,
    FailedAt,
}

/// Everything that is written beside our own headers comes from this.
pub(super) struct Facts<'a> {
    pub(super) origin: &'a Origin<'a>,
    pub(super) timestamp_type: &'a str,
    pub(super) group: &'a str,
    pub(super) attempts: u32,
    pub(super) kind: FailureKind,
    /// What the user lets through of it.
    pub(super) message: Option<&'a str>,
    /// Whether there is room for the message. Where there is, and the user lets nothing through, its header may still
    /// have to be there.
    pub(super) with_message: bool,
}

type Written<'a> = (&'static str, Option<Cow<'a, [u8]>>);

impl Dialect {
    /// All there are.
    pub const ALL: [Dialect; 7] = [
        Self::Own,
        Self::Spring,
        Self::SmallRye,
        Self::Connect,
        Self::Streams,
        Self::ShareGroup,
        Self::CloudStream,
    ];

    /// In a word: `own`, `spring`, `smallrye`, `connect`, `streams`, `share-group` or `cloud-stream`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::Spring => "spring",
            Self::SmallRye => "smallrye",
            Self::Connect => "connect",
            Self::Streams => "streams",
            Self::ShareGroup => "share-group",
            Self::CloudStream => "cloud-stream",
        }
    }

    /// What a header of this name means, and to whom.
    pub(super) fn meaning(name: &[u8]) -> Option<(Dialect, Field)> {
        use Dialect::*;
        use Field::*;
        Some(match name {
            b"originalTopic" => (Own, Topic),
            b"originalPartition" => (Own, Partition),
            b"originalOffset" => (Own, Offset),
            b"originalTimestamp" => (Own, Timestamp),
            b"consumerGroup" => (Own, Group),
            b"attempts" => (Own, Attempts),
            b"errorKind" => (Own, Kind),
            b"errorMessage" => (Own, Message),
            b"failedAt" => (Own, FailedAt),

            b"kafka_dlt-original-topic" | b"kafka_original-topic" => (Spring, Topic),
            b"kafka_dlt-original-partition" | b"kafka_original-partition" => (Spring, Partition),
            b"kafka_dlt-original-offset" | b"kafka_original-offset" => (Spring, Offset),
            b"kafka_dlt-original-timestamp" | b"kafka_original-timestamp" => (Spring, Timestamp),
            b"retry_topic-original-timestamp" => (Spring, FirstTimestamp),
            b"kafka_dlt-original-consumer-group" => (Spring, Group),
            b"kafka_dlt-exception-fqcn"
            | b"kafka_exception-fqcn"
            | b"kafka_dlt-key-exception-fqcn"
            | b"kafka_key-exception-fqcn" => (Spring, Class),
            b"kafka_dlt-exception-cause-fqcn" | b"kafka_exception-cause-fqcn" => {
                (Spring, CauseClass)
            }
            b"kafka_dlt-exception-message"
            | b"kafka_exception-message"
            | b"kafka_dlt-key-exception-message"
            | b"kafka_key-exception-message" => (Spring, Message),
            b"kafka_dlt-exception-stacktrace"
            | b"kafka_exception-stacktrace"
            | b"kafka_dlt-key-exception-stacktrace"
            | b"kafka_key-exception-stacktrace" => (Spring, Stacktrace),
            b"retry_topic-attempts" => (Spring, NextAttempt),

            b"dead-letter-topic" | b"delayed-retry-topic" => (SmallRye, Topic),
            b"dead-letter-partition" | b"delayed-retry-partition" => (SmallRye, Partition),
            b"dead-letter-offset" | b"delayed-retry-offset" => (SmallRye, Offset),
            b"delayed-retry-original-timestamp" => (SmallRye, Timestamp),
            b"dead-letter-exception-class-name" | b"delayed-retry-exception-class-name" => {
                (SmallRye, Class)
            }
            b"dead-letter-reason" | b"delayed-retry-reason" => (SmallRye, Message),
            b"delayed-retry-count" => (SmallRye, Retries),

            b"__connect.errors.topic" => (Connect, Topic),
            b"__connect.errors.partition" => (Connect, Partition),
            b"__connect.errors.offset" => (Connect, Offset),
            b"__connect.errors.connector.name" => (Connect, Group),
            b"__connect.errors.exception.class.name" => (Connect, Class),
            b"__connect.errors.exception.message" => (Connect, Message),
            b"__connect.errors.exception.stacktrace" => (Connect, Stacktrace),

            b"__streams.errors.topic" => (Streams, Topic),
            b"__streams.errors.partition" => (Streams, Partition),
            b"__streams.errors.offset" => (Streams, Offset),
            b"__streams.errors.exception" => (Streams, Class),
            b"__streams.errors.message" => (Streams, Message),
            b"__streams.errors.stacktrace" => (Streams, Stacktrace),

            b"__dlq.errors.topic" => (ShareGroup, Topic),
            b"__dlq.errors.partition" => (ShareGroup, Partition),
            b"__dlq.errors.offset" => (ShareGroup, Offset),
            b"__dlq.errors.group" => (ShareGroup, Group),
            b"__dlq.errors.delivery.count" => (ShareGroup, Attempts),
            b"__dlq.errors.message" => (ShareGroup, Message),

            b"x-original-topic" => (CloudStream, Topic),
            b"x-original-partition" => (CloudStream, Partition),
            b"x-original-offset" => (CloudStream, Offset),
            b"x-original-timestamp" => (CloudStream, Timestamp),
            b"x-exception-fqcn" | b"x-exception-class" => (CloudStream, Class),
            b"x-exception-message" => (CloudStream, Message),
            b"x-exception-stacktrace" => (CloudStream, Stacktrace),
            b"x-retry-count" => (CloudStream, Retries),
            _ => return None,
        })
    }

    /// Whether its headers stand in front of the record's own, the newest first, instead of behind them.
    pub(super) fn newest_first(self) -> bool {
        self == Self::SmallRye
    }

    /// Whether its dead letters have the timestamp of their record, and not the time at which they were written.
    pub(super) fn keeps_timestamp(self) -> bool {
        matches!(self, Self::Connect | Self::Streams)
    }

    /// Names of headers from an earlier trip that tell nothing of this one, and that would add up.
    pub(super) fn replaces(self, name: &[u8]) -> bool {
        let of_the_trip: &[&str] = match self {
            Self::Own => &own::OF_THE_TRIP,
            _ => &[],
        };
        let mut replaced = self.replaced().iter().chain(of_the_trip);
        replaced.any(|replaced| replaced.as_bytes() == name)
    }

    /// All that it sets on a dead letter, or might set.
    pub(crate) fn replaced(self) -> &'static [&'static str] {
        match self {
            Self::Own => &own::ALL,
            Self::Spring => &[
                "kafka_dlt-exception-fqcn",
                "kafka_dlt-exception-cause-fqcn",
                "kafka_dlt-exception-message",
                "kafka_dlt-exception-stacktrace",
                "kafka_dlt-key-exception-fqcn",
                "kafka_dlt-key-exception-message",
                "kafka_dlt-key-exception-stacktrace",
                "kafka_dlt-original-topic",
                "kafka_dlt-original-partition",
                "kafka_dlt-original-offset",
                "kafka_dlt-original-timestamp",
                TIMESTAMP_TYPE_IN_SPRING,
                "kafka_dlt-original-consumer-group",
            ],
            Self::SmallRye => &[
                "dead-letter-exception-class-name",
                "dead-letter-reason",
                "dead-letter-cause-class-name",
                "dead-letter-cause",
                "dead-letter-topic",
                "dead-letter-partition",
                "dead-letter-offset",
            ],
            Self::Connect => &[
                "__connect.errors.topic",
                "__connect.errors.partition",
                "__connect.errors.offset",
                "__connect.errors.connector.name",
                "__connect.errors.task.id",
                "__connect.errors.stage",
                "__connect.errors.class.name",
                "__connect.errors.exception.class.name",
                "__connect.errors.exception.message",
                "__connect.errors.exception.stacktrace",
            ],
            Self::Streams => &[
                "__streams.errors.exception",
                "__streams.errors.message",
                "__streams.errors.stacktrace",
                "__streams.errors.topic",
                "__streams.errors.partition",
                "__streams.errors.offset",
            ],
            Self::ShareGroup => &[
                "__dlq.errors.topic",
                "__dlq.errors.partition",
                "__dlq.errors.offset",
                "__dlq.errors.group",
                "__dlq.errors.delivery.count",
                "__dlq.errors.message",
            ],
            Self::CloudStream => &[
                "x-original-topic",
                "x-original-partition",
                "x-original-offset",
                "x-original-timestamp",
                TIMESTAMP_TYPE_IN_CLOUD_STREAM,
                "x-exception-fqcn",
                "x-exception-message",
                "x-exception-stacktrace",
            ],
        }
    }

    /// Who set the first timestamp of a record, where this dialect wants to know: on later trips it stands in the record.
    pub(super) fn timestamp_type<'a>(self, record: &'a Record, origin: &Origin<'_>) -> &'a str {
        let name = match self {
            Self::CloudStream => TIMESTAMP_TYPE_IN_CLOUD_STREAM,
            _ => TIMESTAMP_TYPE_IN_SPRING,
        };
        let earlier = || {
            let told = record.headers().get_str(name)?;
            TIMESTAMP_TYPES.contains(&told).then_some(told)
        };
        match record.timestamp().map(Timestamp::kind) {
            _ if !origin.is_place_of(record) => earlier().unwrap_or(TIMESTAMP_TYPES[0]),
            Some(TimestampKind::Create) => TIMESTAMP_TYPES[0],
            Some(TimestampKind::LogAppend) => TIMESTAMP_TYPES[1],
            None => TIMESTAMP_TYPES[2],
        }
    }

    /// The headers that this dialect wants beside our own, in its order.
    pub(super) fn write<'a>(self, facts: &Facts<'a>) -> Vec<Written<'a>> {
        let origin = facts.origin;
        let kind = facts.kind.as_str();
        let text = |text: &'a str| Some(Cow::Borrowed(text.as_bytes()));
        let decimal = |number: i64| Some(Cow::Owned(number.to_string().into_bytes()));
        let binary = |number: i64| Some(Cow::Owned(number.to_be_bytes().to_vec()));
        let partition = decimal(origin.partition.into());
        let binary_partition = Some(Cow::Owned(origin.partition.to_be_bytes().to_vec()));
        // Java ends each line of a trace, the first included.
        let trace = match facts.message {
            Some(message) => format!("{kind}: {message}\n"),
            None => format!("{kind}\n"),
        };
        let trace = Some(Cow::Owned(trace.into_bytes()));
        let message = facts.message.and_then(text);

        let mut headers = Vec::with_capacity(11);
        let mut set = |name, value| headers.push((name, value));
        match self {
            Self::Own => {}
            Self::Spring => {
                set("kafka_dlt-exception-fqcn", text(kind));
                set("kafka_dlt-exception-cause-fqcn", text(kind));
                if facts.with_message {
                    if message.is_some() {
                        set("kafka_dlt-exception-message", message);
                    }
                    set("kafka_dlt-exception-stacktrace", trace);
                }
                set("kafka_dlt-original-topic", text(origin.topic));
                set("kafka_dlt-original-partition", binary_partition);
                set("kafka_dlt-original-offset", binary(origin.offset));
                set(
                    "kafka_dlt-original-timestamp",
                    binary(origin.timestamp_millis()),
                );
                set(TIMESTAMP_TYPE_IN_SPRING, text(facts.timestamp_type));
                set("kafka_dlt-original-consumer-group", text(facts.group));
            }
            Self::SmallRye => {
                set("dead-letter-exception-class-name", text(kind));
                if facts.with_message {
                    // Without a message it shows the exception itself.
                    set("dead-letter-reason", message.or(text(kind)));
                }
                set("dead-letter-topic", text(origin.topic));
                set("dead-letter-partition", partition);
                set("dead-letter-offset", decimal(origin.offset));
            }
            Self::Connect => {
                set("__connect.errors.topic", text(origin.topic));
                set("__connect.errors.partition", partition);
                set("__connect.errors.offset", decimal(origin.offset));
                set("__connect.errors.connector.name", text(facts.group));
                set("__connect.errors.task.id", text("0"));
                let stage = match facts.kind {
                    FailureKind::Undecodable => "VALUE_CONVERTER",
                    _ => "TASK_PUT",
                };
                set("__connect.errors.stage", text(stage));
                set(
                    "__connect.errors.class.name",
                    text("reliable_consumer::Handler"),
                );
                set("__connect.errors.exception.class.name", text(kind));
                if facts.with_message {
                    set("__connect.errors.exception.message", message);
                    set("__connect.errors.exception.stacktrace", trace);
                }
            }
            Self::Streams => {
                set("__streams.errors.exception", text(kind));
                if facts.with_message {
                    set("__streams.errors.message", message);
                    set("__streams.errors.stacktrace", trace);
                }
                set("__streams.errors.topic", text(origin.topic));
                set("__streams.errors.partition", partition);
                set("__streams.errors.offset", decimal(origin.offset));
            }
            Self::ShareGroup => {
                // Brokers count in 16 bits, and readers parse such.
                let deliveries = facts.attempts.min(i16::MAX as u32);
                set("__dlq.errors.topic", text(origin.topic));
                set("__dlq.errors.partition", partition);
                set("__dlq.errors.offset", decimal(origin.offset));
                set("__dlq.errors.group", text(facts.group));
                set("__dlq.errors.delivery.count", decimal(deliveries.into()));
                if facts.with_message && message.is_some() {
                    set("__dlq.errors.message", message);
                }
            }
            Self::CloudStream => {
                set("x-original-topic", text(origin.topic));
                set("x-original-partition", binary_partition);
                set("x-original-offset", binary(origin.offset));
                set("x-original-timestamp", binary(origin.timestamp_millis()));
                set(TIMESTAMP_TYPE_IN_CLOUD_STREAM, text(facts.timestamp_type));
                set("x-exception-fqcn", text(kind));
                if facts.with_message {
                    if message.is_some() {
                        set("x-exception-message", message);
                    }
                    set("x-exception-stacktrace", trace);
                }
            }
        }
        headers
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Headers<'a> = &'a [(&'a str, &'a [u8])];

    const KIND: &[u8] = b"attempts-exhausted";
    const TRACE: &[u8] = b"attempts-exhausted: no route to host\n";
    const MESSAGE: &[u8] = b"no route to host";

    fn written(
        dialect: Dialect,
        message: Option<&str>,
        with_message: bool,
    ) -> Vec<(String, Option<Vec<u8>>)> {
        let origin = Origin {
            topic: "orders",
            partition: 3,
            offset: 42,
            timestamp: Some(1_700_000_000_000),
        };
        let facts = Facts {
            origin: &origin,
            timestamp_type: "CreateTime",
            group: "shipping",
            attempts: 5,
            kind: FailureKind::AttemptsExhausted,
            message,
            with_message,
        };
        let headers = dialect.write(&facts).into_iter();
        headers
            .map(|(name, value)| (name.to_owned(), value.map(Cow::into_owned)))
            .collect()
    }

    #[test]
    fn each_dialect_is_written_byte_for_byte_as_its_own_system_writes_it() {
        let partition = [0, 0, 0, 3];
        let offset = [0, 0, 0, 0, 0, 0, 0, 42];
        let time = [0, 0, 0x01, 0x8b, 0xcf, 0xe5, 0x68, 0x00];
        let expected: [(Dialect, Headers<'_>); 7] = [
            (Dialect::Own, &[]),
            (
                Dialect::Spring,
                &[
                    ("kafka_dlt-exception-fqcn", KIND),
                    ("kafka_dlt-exception-cause-fqcn", KIND),
                    ("kafka_dlt-exception-message", MESSAGE),
                    ("kafka_dlt-exception-stacktrace", TRACE),
                    ("kafka_dlt-original-topic", b"orders"),
                    ("kafka_dlt-original-partition", &partition),
                    ("kafka_dlt-original-offset", &offset),
                    ("kafka_dlt-original-timestamp", &time),
                    ("kafka_dlt-original-timestamp-type", b"CreateTime"),
                    ("kafka_dlt-original-consumer-group", b"shipping"),
                ],
            ),
            (
                Dialect::SmallRye,
                &[
                    ("dead-letter-exception-class-name", KIND),
                    ("dead-letter-reason", MESSAGE),
                    ("dead-letter-topic", b"orders"),
                    ("dead-letter-partition", b"3"),
                    ("dead-letter-offset", b"42"),
                ],
            ),
            (
                Dialect::Connect,
                &[
                    ("__connect.errors.topic", b"orders"),
                    ("__connect.errors.partition", b"3"),
                    ("__connect.errors.offset", b"42"),
                    ("__connect.errors.connector.name", b"shipping"),
                    ("__connect.errors.task.id", b"0"),
                    ("__connect.errors.stage", b"TASK_PUT"),
                    ("__connect.errors.class.name", b"reliable_consumer::Handler"),
                    ("__connect.errors.exception.class.name", KIND),
                    ("__connect.errors.exception.message", MESSAGE),
                    ("__connect.errors.exception.stacktrace", TRACE),
                ],
            ),
            (
                Dialect::Streams,
                &[
                    ("__streams.errors.exception", KIND),
                    ("__streams.errors.message", MESSAGE),
                    ("__streams.errors.stacktrace", TRACE),
                    ("__streams.errors.topic", b"orders"),
                    ("__streams.errors.partition", b"3"),
                    ("__streams.errors.offset", b"42"),
                ],
            ),
            (
                Dialect::ShareGroup,
                &[
                    ("__dlq.errors.topic", b"orders"),
                    ("__dlq.errors.partition", b"3"),
                    ("__dlq.errors.offset", b"42"),
                    ("__dlq.errors.group", b"shipping"),
                    ("__dlq.errors.delivery.count", b"5"),
                    ("__dlq.errors.message", MESSAGE),
                ],
            ),
            (
                Dialect::CloudStream,
                &[
                    ("x-original-topic", b"orders"),
                    ("x-original-partition", &partition),
                    ("x-original-offset", &offset),
                    ("x-original-timestamp", &time),
                    ("x-original-timestamp-type", b"CreateTime"),
                    ("x-exception-fqcn", KIND),
                    ("x-exception-message", MESSAGE),
                    ("x-exception-stacktrace", TRACE),
                ],
            ),
        ];
        assert_eq!(
            expected.each_ref().map(|(dialect, _)| *dialect),
            Dialect::ALL
        );
        for (dialect, headers) in expected {
            let written = written(dialect, Some("no route to host"), true);
            let written: Vec<_> = written
                .iter()
                .map(|(name, value)| (name.as_str(), value.as_deref().unwrap()))
                .collect();
            assert_eq!(written, headers, "{dialect}");
        }
    }

    #[test]
    fn a_message_that_may_not_be_told_is_in_no_header() {
        for dialect in Dialect::ALL {
            for with_message in [true, false] {
                for (name, value) in written(dialect, None, with_message) {
                    let kind_only: [&[u8]; 2] = [KIND, b"attempts-exhausted\n"];
                    let tells_error = name.contains("message")
                        || name.contains("reason")
                        || name.contains("trace");
                    assert!(with_message || !tells_error, "{name}");
                    assert!(
                        !tells_error || value.is_none_or(|value| kind_only.contains(&&*value)),
                        "{name}"
                    );
                }
            }
        }
        // Connect and Streams have the header also for an exception without a message.
        for (dialect, name) in [
            (Dialect::Connect, "__connect.errors.exception.message"),
            (Dialect::Streams, "__streams.errors.message"),
        ] {
            assert!(written(dialect, None, true).contains(&(name.to_owned(), None)));
        }
    }

    #[test]
    fn whatever_is_written_is_replaced_on_the_next_trip_and_means_something_in_its_dialect_only() {
        for dialect in Dialect::ALL {
            for (name, _) in written(dialect, Some("why"), true) {
                assert!(dialect.replaces(name.as_bytes()), "{name}");
            }
            for name in dialect.replaced() {
                let meaning = Dialect::meaning(name.as_bytes());
                assert!(meaning.is_none_or(|(of, _)| of == dialect), "{name}");
            }
        }
    }

    #[test]
    fn deliveries_stay_within_the_sixteen_bits_that_readers_of_share_groups_parse() {
        let origin = Origin {
            topic: "orders",
            partition: 0,
            offset: 0,
            timestamp: None,
        };
        let facts = Facts {
            origin: &origin,
            timestamp_type: "CreateTime",
            group: "g",
            attempts: u32::MAX,
            kind: FailureKind::Permanent,
            message: None,
            with_message: true,
        };
        let headers = Dialect::ShareGroup.write(&facts);
        assert!(headers.contains(&("__dlq.errors.delivery.count", Some(Cow::Borrowed(b"32767")))));
    }
}
