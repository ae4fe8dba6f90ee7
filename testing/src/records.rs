//! Records as a test writes them and as it finds them, byte for byte.
//!
//! The safe binding panics on header names that are not UTF-8, which tests must be able to send and
//! to see; headers therefore go through librdkafka's own functions here.

use std::{
    ffi::CStr,
    ptr, slice,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use rdkafka::{
    ClientContext, Message, Offset, TopicPartitionList, bindings,
    consumer::{BaseConsumer, Consumer},
    error::{IsError, KafkaError, RDKafkaErrorCode},
    message::{BorrowedMessage, DeliveryResult, OwnedHeaders},
    producer::{BaseProducer, BaseRecord, Producer, ProducerContext},
};

use crate::cluster::{Cluster, PATIENCE};

/// A header: its name as bytes, and a value that may be null.
type Header = (Vec<u8>, Option<Vec<u8>>);

/// A record to produce.
#[derive(Debug, Clone, Default)]
pub struct Record {
    partition: Option<i32>,
    key: Option<Vec<u8>>,
    value: Option<Vec<u8>>,
    headers: Vec<Header>,
    timestamp: Option<i64>,
}

impl Record {
    pub fn value(value: impl Into<Vec<u8>>) -> Self {
        Self {
            value: Some(value.into()),
            ..Self::default()
        }
    }

    /// A record whose value is null.
    pub fn tombstone() -> Self {
        Self::default()
    }

    /// Without one the key is null.
    pub fn key(mut self, key: impl Into<Vec<u8>>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Without one the key decides, as Java's partitioner does.
    pub fn partition(mut self, partition: i32) -> Self {
        self.partition = Some(partition);
        self
    }

    /// Unix milliseconds; without it, now.
    pub fn timestamp(mut self, timestamp: i64) -> Self {
        self.timestamp = Some(timestamp);
        self
    }

    /// Adds a header; neither its name nor its value need be UTF-8, and names may repeat.
    pub fn header(mut self, name: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Self {
        self.headers.push((name.into(), Some(value.into())));
        self
    }

    pub fn null_header(mut self, name: impl Into<Vec<u8>>) -> Self {
        self.headers.push((name.into(), None));
        self
    }
}

/// A record as it lies in a topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredRecord {
    pub partition: i32,
    pub offset: i64,
    /// Unix milliseconds.
    pub timestamp: Option<i64>,
    pub key: Option<Vec<u8>>,
    pub value: Option<Vec<u8>>,
    /// In the order in which they were sent.
    pub headers: Vec<Header>,
}

impl StoredRecord {
    /// The last header of this name as text; panics where its value is null or not UTF-8.
    pub fn header(&self, name: &str) -> Option<&str> {
        let (_, value) = self
            .headers
            .iter()
            .rfind(|(candidate, _)| candidate == name.as_bytes())?;
        let value = value
            .as_ref()
            .unwrap_or_else(|| panic!("header {name} is null"));
        Some(str::from_utf8(value).unwrap_or_else(|_| panic!("header {name} is not UTF-8")))
    }

    /// The value as text; panics where it is null or not UTF-8.
    pub fn text(&self) -> &str {
        str::from_utf8(self.value.as_ref().expect("the value is null")).expect("the value is UTF-8")
    }
}

impl Cluster {
    /// Produces the records in order with `acks=all` and returns when the brokers have them all.
    pub fn produce(&self, topic: &str, records: impl IntoIterator<Item = Record>) {
        let producer: BaseProducer<Deliveries> = self
            .client_config()
            .set("acks", "all")
            .set("enable.idempotence", "true")
            .set("partitioner", "murmur2_random")
            .set("linger.ms", "5")
            .set("batch.size", "1000000")
            .set("message.max.bytes", "10000000")
            .create_with_context(Deliveries::default())
            .expect("these properties exist");
        let mut sent = 0;
        for record in records {
            let headers = (!record.headers.is_empty()).then(|| raw_headers(&record.headers));
            let mut base = BaseRecord {
                topic,
                partition: record.partition,
                payload: record.value.as_deref(),
                key: record.key.as_deref(),
                timestamp: record.timestamp,
                headers,
                delivery_opaque: (),
            };
            while let Err((error, back)) = producer.send(base) {
                if error.rdkafka_error_code() != Some(RDKafkaErrorCode::QueueFull) {
                    panic!("produce to {topic}: {error}");
                }
                base = back;
                producer.poll(Duration::from_millis(10));
            }
            sent += 1;
            if sent % 1_000 == 0 {
                producer.poll(Duration::ZERO);
            }
        }
        producer
            .flush(PATIENCE)
            .unwrap_or_else(|error| panic!("produce to {topic}: {error}"));
        let deliveries = producer.context();
        if let Some(error) = &*deliveries.failure.lock().expect("no holder panics") {
            panic!("produce to {topic}: {error}");
        }
        assert_eq!(
            deliveries.done.load(Ordering::Relaxed),
            sent,
            "produce to {topic}: deliveries"
        );
    }

    /// Every record that a reader of committed data sees up to the present end, in the order of
    /// partitions and offsets.
    pub fn read_all(&self, topic: &str) -> Vec<StoredRecord> {
        let consumer: BaseConsumer = self
            .client_config()
            // A consumer must name a group; this one never joins it or commits.
            .set("group.id", "read-all")
            .set("enable.auto.commit", "false")
            .set("enable.partition.eof", "true")
            .set("auto.offset.reset", "earliest")
            // Its default of a second makes large topics several times slower to read.
            .set("fetch.queue.backoff.ms", "10")
            // The end of a partition is told with an answer that has nothing: by default after half a second.
            .set("fetch.wait.max.ms", "10")
            .create()
            .expect("these properties exist");
        let mut start = TopicPartitionList::new();
        let partitions = self.partitions(topic);
        for &partition in &partitions {
            // "The beginning" the client asks for half a second later, when it knows the leader.
            let first = self.bounds(topic, partition).0;
            start
                .add_partition_offset(topic, partition, Offset::Offset(first))
                .expect("it is an offset");
        }
        consumer
            .assign(&start)
            .unwrap_or_else(|error| panic!("read {topic}: {error}"));

        let mut records = Vec::new();
        let mut unread = partitions;
        let mut last_progress = Instant::now();
        while !unread.is_empty() {
            match consumer.poll(Duration::from_millis(100)) {
                Some(Ok(message)) => {
                    // Once its end was seen, what comes later is not asked for.
                    if unread.contains(&message.partition()) {
                        records.push(stored(&message));
                    }
                    last_progress = Instant::now();
                }
                Some(Err(KafkaError::PartitionEOF(partition))) => {
                    unread.retain(|&other| other != partition);
                    last_progress = Instant::now();
                }
                // Brokers that are away for a moment are reported here too.
                other => assert!(
                    last_progress.elapsed() < PATIENCE,
                    "read {topic}: nothing for {PATIENCE:?} on partitions {unread:?}: {other:?}"
                ),
            }
        }
        records.sort_by_key(|record| (record.partition, record.offset));
        records
    }
}

/// Counts what the brokers have acknowledged, and keeps the first failure.
#[derive(Default)]
struct Deliveries {
    done: AtomicU64,
    failure: Mutex<Option<KafkaError>>,
}

impl ClientContext for Deliveries {}

impl ProducerContext for Deliveries {
    type DeliveryOpaque = ();

    fn delivery(&self, result: &DeliveryResult<'_>, (): ()) {
        match result {
            Ok(_) => {
                self.done.fetch_add(1, Ordering::Relaxed);
            }
            Err((error, _)) => {
                let mut failure = self.failure.lock().expect("no holder panics");
                failure.get_or_insert_with(|| error.clone());
            }
        }
    }
}

fn raw_headers(headers: &[Header]) -> OwnedHeaders {
    let owned = OwnedHeaders::new_with_capacity(headers.len());
    for (name, value) in headers {
        let (value, value_size) = match value {
            Some(value) => (value.as_ptr().cast(), value.len()),
            None => (ptr::null(), 0),
        };
        // SAFETY: `as_borrowed` gives the address of the list that `owned` holds alone; name and
        // value are copied before the call returns.
        let code = unsafe {
            bindings::rd_kafka_header_add(
                ptr::from_ref(owned.as_borrowed()).cast_mut().cast(),
                name.as_ptr().cast(),
                isize::try_from(name.len()).expect("a Vec is no longer than isize::MAX"),
                value,
                isize::try_from(value_size).expect("a Vec is no longer than isize::MAX"),
            )
        };
        assert_eq!(RDKafkaErrorCode::from(code), RDKafkaErrorCode::NoError);
    }
    owned
}

fn stored(message: &BorrowedMessage<'_>) -> StoredRecord {
    StoredRecord {
        partition: message.partition(),
        offset: message.offset(),
        timestamp: message.timestamp().to_millis(),
        key: message.key().map(<[u8]>::to_vec),
        value: message.payload().map(<[u8]>::to_vec),
        headers: headers_of(message),
    }
}

fn headers_of(message: &BorrowedMessage<'_>) -> Vec<Header> {
    let mut headers = Vec::new();
    let mut list = ptr::null_mut();
    // SAFETY: the message is alive, and with it the list, its names (which end in NUL) and its
    // values; all are copied before this function returns.
    unsafe {
        if bindings::rd_kafka_message_headers(message.ptr(), &mut list).is_error() {
            return headers;
        }
        let (mut name, mut value, mut size) = (ptr::null(), ptr::null(), 0);
        while !bindings::rd_kafka_header_get_all(
            list,
            headers.len(),
            &mut name,
            &mut value,
            &mut size,
        )
        .is_error()
        {
            let value =
                (!value.is_null()).then(|| slice::from_raw_parts(value.cast(), size).to_vec());
            headers.push((CStr::from_ptr(name).to_bytes().to_vec(), value));
        }
    }
    headers
}
