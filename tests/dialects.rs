//! Real broker: dead letters in the dialects of other systems.

mod common;

use common::{Running, all_committed, consumer, until};
use reliable_consumer::{
    DeadLetter, Dialect, FailureKind, HandlerResult, Message, Ordering, Record as Raw, Story,
    header_names, permanent,
};
use reliable_consumer_testing::{Record, StoredRecord, cluster, unique};

type Header = (Vec<u8>, Option<Vec<u8>>);

const TRIPS: u32 = 10;
const TIME: i64 = 1_700_000_000_000;

/// What the other system would have written for a record that fails with this message, after the record's own headers.
fn expected(dialect: Dialect, topic: &str, group: &str, at: u8, message: &str) -> Vec<Header> {
    let text = |text: &str| text.as_bytes().to_vec();
    // As Java's `ByteBuffer` writes an int of 2, a small long, and one of 1,700,000,000,000.
    let partition = vec![0, 0, 0, 2];
    let offset = vec![0, 0, 0, 0, 0, 0, 0, at];
    let time = vec![0x00, 0x00, 0x01, 0x8b, 0xcf, 0xe5, 0x68, 0x00];
    let trace = format!("permanent: {message}\n");
    let headers: Vec<(&str, Vec<u8>)> = match dialect {
        Dialect::Spring => vec![
            ("kafka_dlt-exception-fqcn", text("permanent")),
            ("kafka_dlt-exception-cause-fqcn", text("permanent")),
            ("kafka_dlt-exception-message", text(message)),
            ("kafka_dlt-exception-stacktrace", text(&trace)),
            ("kafka_dlt-original-topic", text(topic)),
            ("kafka_dlt-original-partition", partition),
            ("kafka_dlt-original-offset", offset),
            ("kafka_dlt-original-timestamp", time),
            ("kafka_dlt-original-timestamp-type", text("CreateTime")),
            ("kafka_dlt-original-consumer-group", text(group)),
        ],
        Dialect::SmallRye => vec![
            ("dead-letter-exception-class-name", text("permanent")),
            ("dead-letter-reason", text(message)),
            ("dead-letter-topic", text(topic)),
            ("dead-letter-partition", text("2")),
            ("dead-letter-offset", text(&at.to_string())),
        ],
        Dialect::Connect => vec![
            ("__connect.errors.topic", text(topic)),
            ("__connect.errors.partition", text("2")),
            ("__connect.errors.offset", text(&at.to_string())),
            ("__connect.errors.connector.name", text(group)),
            ("__connect.errors.task.id", text("0")),
            ("__connect.errors.stage", text("TASK_PUT")),
            (
                "__connect.errors.class.name",
                text("reliable_consumer::Handler"),
            ),
            ("__connect.errors.exception.class.name", text("permanent")),
            ("__connect.errors.exception.message", text(message)),
            ("__connect.errors.exception.stacktrace", text(&trace)),
        ],
        Dialect::Streams => vec![
            ("__streams.errors.exception", text("permanent")),
            ("__streams.errors.message", text(message)),
            ("__streams.errors.stacktrace", text(&trace)),
            ("__streams.errors.topic", text(topic)),
            ("__streams.errors.partition", text("2")),
            ("__streams.errors.offset", text(&at.to_string())),
        ],
        Dialect::ShareGroup => vec![
            ("__dlq.errors.topic", text(topic)),
            ("__dlq.errors.partition", text("2")),
            ("__dlq.errors.offset", text(&at.to_string())),
            ("__dlq.errors.group", text(group)),
            ("__dlq.errors.delivery.count", text("1")),
            ("__dlq.errors.message", text(message)),
        ],
        Dialect::CloudStream => vec![
            ("x-original-topic", text(topic)),
            ("x-original-partition", partition),
            ("x-original-offset", offset),
            ("x-original-timestamp", time),
            ("x-original-timestamp-type", text("CreateTime")),
            ("x-exception-fqcn", text("permanent")),
            ("x-exception-message", text(message)),
            ("x-exception-stacktrace", text(&trace)),
        ],
        _ => vec![],
    };
    headers
        .into_iter()
        .map(|(name, value)| (text(name), Some(value)))
        .collect()
}

/// Headers of the record itself; the first says which dialect its letters are to be in.
fn own(dialect: Dialect) -> [Header; 4] {
    [
        (b"to".to_vec(), Some(dialect.as_str().into())),
        (b"trace".to_vec(), Some(b"abc".to_vec())),
        (b"\xff".to_vec(), Some(vec![0])),
        (b"nothing".to_vec(), None),
    ]
}

fn is_for(dialect: Dialect, value: Option<&str>) -> bool {
    value == Some(dialect.as_str())
}

/// The letter as a redriver sends it back.
fn sent_back(letter: &StoredRecord, trip: u32) -> Record {
    let record = Record::value(letter.text()).key("k").partition(0);
    letter
        .headers
        .iter()
        .fold(record, |record, (name, value)| match value {
            None => record.null_header(name.clone()),
            Some(_) if name == header_names::RETRY_COUNT.as_bytes() => {
                record.header(name.clone(), trip.to_string())
            }
            Some(value) => record.header(name.clone(), value.clone()),
        })
}

fn read(letter: &StoredRecord) -> Raw {
    let builder = Message::builder().topic("letters").offset(letter.offset);
    letter
        .headers
        .iter()
        .fold(builder, |builder, (name, value)| match value {
            None => builder.null_header(name),
            Some(value) => builder.header(name, value),
        })
        .record()
}

// D3, D4
#[tokio::test(flavor = "multi_thread")]
async fn ten_trips_in_each_dialect_are_what_its_readers_expect_and_do_not_grow() {
    let Some(cluster) = cluster() else { return };
    let topic = cluster.create_topic("orders", 3, &[("retention.ms", "-1")]);
    let letters = cluster.create_topic("letters", 1, &[]);
    cluster.produce(
        &topic,
        Dialect::ALL.map(|dialect| {
            let record = Record::value("v").key("k").partition(2).timestamp(TIME);
            own(dialect)
                .into_iter()
                .fold(record, |record, (name, value)| match value {
                    None => record.null_header(name),
                    Some(value) => record.header(name, value),
                })
        }),
    );
    let mut worlds = Vec::new();
    for (at, dialect) in Dialect::ALL.into_iter().enumerate() {
        let group = unique("shipping");
        let handler = async |message: &Message<Raw>| -> HandlerResult {
            Err(permanent(format!("trip {}", message.retry_count())))
        };
        let builder = consumer(&cluster, &group)
            .topic(&topic)
            .ordering(Ordering::ByPartition)
            .filter(move |record: &Raw| is_for(dialect, record.headers().get_str("to")))
            .dead_letter(DeadLetter::topic(&letters).dialect(dialect));
        worlds.push((dialect, at, group, Running::start(builder, handler), 0));
    }
    for trip in 0..TRIPS {
        let written = i64::from(trip + 1) * worlds.len() as i64;
        until("all letters", || cluster.end_offsets(&letters) == [written]).await;
        let mut found = cluster.read_all(&letters);
        let mut back = Vec::new();
        for (dialect, at, group, _, first_size) in &mut worlds {
            let mine = |letter: &StoredRecord| is_for(*dialect, letter.header("to"));
            let index = found.iter().rposition(mine).unwrap();
            let letter = found.remove(index);
            let at = *at as u8;
            let place = (topic.as_str(), 2, i64::from(at));
            let error = format!("trip {trip}");
            let mut headers = own(*dialect).to_vec();
            headers.extend(expected(*dialect, &topic, group, at, &error));
            assert_eq!(
                letter.headers[..headers.len()],
                headers,
                "{dialect}, trip {trip}"
            );
            assert_eq!(letter.headers.len(), headers.len() + 11, "and ours");
            let size: usize = letter
                .headers
                .iter()
                .map(|(name, value)| name.len() + value.as_ref().map_or(0, Vec::len))
                .sum();
            if trip == 0 {
                *first_size = size;
            }
            assert_eq!(size, *first_size, "{dialect}, trip {trip}");

            let record = read(&letter);
            let story = Story::of(&record).unwrap();
            let origin = story.origin.unwrap();
            assert_eq!((origin.topic, origin.partition, origin.offset), place);
            assert_eq!(origin.timestamp, Some(TIME));
            assert_eq!(
                (story.dialect, story.retry_count, story.attempts),
                (Dialect::Own, trip, Some(1))
            );
            assert_eq!(story.error.kind, Some(FailureKind::Permanent));
            assert_eq!(story.error.message, Some(&*error));

            // A reader that knows the other dialect only is told the same.
            let theirs = headers[own(*dialect).len()..]
                .iter()
                .fold(Message::builder(), |builder, (name, value)| {
                    builder.header(name, value.as_ref().unwrap())
                });
            let record = theirs.record();
            if *dialect != Dialect::Own {
                let story = Story::of(&record).unwrap();
                assert_eq!(story.dialect, *dialect);
                assert_eq!(story.error.message, Some(&*error));
                let origin = story.origin.unwrap();
                assert_eq!((origin.topic, origin.partition, origin.offset), place);
            }
            back.push(sent_back(&letter, trip + 1));
        }
        if trip + 1 < TRIPS {
            cluster.produce(&topic, back);
        }
    }
    for (_, _, group, run, _) in worlds {
        all_committed(&cluster, &group, &topic);
        assert_eq!(run.stop().await.dead_lettered, u64::from(TRIPS));
    }
}
