//! What a handler is given: a decoded record, and which attempt at it this is.

use std::{fmt, sync::Arc, time::Instant};

use crate::{
    dead_letter::values,
    execute::Lease,
    header_names,
    origin::Origin,
    payload::{DecodeError, Payload},
    record::{ChunkBuilder, Headers, Record, Source, Timestamp, TimestampKind},
};

/// Longer ids are taken for malformed: an id becomes a key in stores and a header on every trip.
const LONGEST_MESSAGE_ID: usize = 512;

/// A record with its decoded payload, as a [`Handler`](crate::Handler) gets it.
///
/// Handlers are unit-tested with messages made by [`Message::builder`].
///
/// ```
/// use reliable_consumer::{Json, Message};
///
/// #[derive(serde::Deserialize)]
/// struct SignUp { email: String }
///
/// let message = Message::builder()
///     .topic("sign-ups")
///     .key("ada")
///     .value(r#"{"email": "ada@example.org"}"#)
///     .decode::<Json<SignUp>>()?;
/// assert_eq!(message.payload().email, "ada@example.org");
/// assert_eq!(message.key_str(), Some("ada"));
/// # Ok::<(), reliable_consumer::DecodeError>(())
/// ```
#[derive(Clone)]
pub struct Message<P> {
    record: Record,
    attempt: u32,
    payload: P,
    /// What it is handled under, and its place there; none for messages that users build.
    origin: Option<(Arc<Lease>, u64)>,
}

impl<P> Message<P> {
    pub(crate) fn new(
        record: Record,
        attempt: u32,
        payload: P,
        origin: Option<(Arc<Lease>, u64)>,
    ) -> Self {
        Self {
            record,
            attempt,
            payload,
            origin,
        }
    }

    /// The decoded payload.
    pub fn payload(&self) -> &P {
        &self.payload
    }

    /// Whether this record's partition is being taken away, or the consumer shuts down. The handler may go on until
    /// [`deadline`](Self::deadline); a long one had better stop where it can, and return an error: its record is handled
    /// again by whoever owns the partition next.
    ///
    /// Also true when the log was cut off below this record, as by an unclean leader election: whatever its handler answers
    /// then changes nothing.
    ///
    /// Also true once the record is given up for its [`stuck_limit`](crate::Builder::stuck_limit), for work that goes on
    /// elsewhere with a clone of the message: the handler itself is dropped then.
    pub fn is_cancelled(&self) -> bool {
        self.origin
            .as_ref()
            .is_some_and(|(lease, seq)| lease.is_cancelled(*seq))
    }

    /// Completes when [`is_cancelled`](Self::is_cancelled) becomes true. Never for a message that was
    /// [built](Self::builder).
    ///
    /// ```
    /// use reliable_consumer::{HandlerResult, Json, Message};
    ///
    /// async fn transcode(message: &Message<Json<String>>) -> HandlerResult {
    ///     tokio::select! {
    ///         done = long_work(message.payload()) => done,
    ///         () = message.cancelled() => Err("stopped: the partition goes elsewhere".into()),
    ///     }
    /// }
    /// # async fn long_work(_: &str) -> HandlerResult { Ok(()) }
    /// ```
    pub async fn cancelled(&self) {
        match &self.origin {
            Some((lease, seq)) => lease.cancelled(*seq).await,
            None => std::future::pending().await,
        }
    }

    /// Until when the handler is awaited once it is [cancelled](Self::is_cancelled): what it finishes later does not
    /// count. `None` before that.
    pub fn deadline(&self) -> Option<Instant> {
        self.origin.as_ref()?.0.deadline()
    }

    /// Says that a long-running handler gets on: its record's age, by which stuck records are noticed, begins anew.
    pub fn report_progress(&self) {
        if let Some((lease, seq)) = &self.origin {
            lease.report_progress(*seq);
        }
    }

    /// The decoded payload, taken out of the message.
    pub fn into_payload(self) -> P {
        self.payload
    }

    /// The record it was decoded from.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// The topic it was read from; after a redrive not necessarily where it was [first](Self::origin). For a record that
    /// waited in a [retry topic](crate::RetryTopics), the topic that this is for; and where it was first, by its
    /// headers, for [`partition`](Self::partition), [`offset`](Self::offset) and
    /// [`timestamp`](Self::timestamp).
    pub fn topic(&self) -> &str {
        match self
            .origin
            .as_ref()
            .and_then(|(lease, _)| lease.tier.as_ref())
        {
            Some(tier) => &tier.source,
            None => self.record.topic(),
        }
    }

    /// The partition it was read from, see [`topic`](Self::topic).
    pub fn partition(&self) -> i32 {
        self.first_place()
            .map_or_else(|| self.record.partition(), |first| first.partition)
    }

    /// Its offset in the partition, see [`topic`](Self::topic).
    pub fn offset(&self) -> i64 {
        self.first_place()
            .map_or_else(|| self.record.offset(), |first| first.offset)
    }

    /// Where it was first, before any dead-letter or retry topic: by its `original…` headers if they are all there and
    /// well formed, else where it was read from. Anybody can write headers.
    pub fn origin(&self) -> Origin<'_> {
        Origin::of(&self.record)
    }

    fn first_place(&self) -> Option<Origin<'_>> {
        let (lease, _) = self.origin.as_ref()?;
        lease.tier.is_some().then(|| Origin::of(&self.record))
    }

    /// The key as it stands in the record. `None` is a null key.
    pub fn key(&self) -> Option<&[u8]> {
        self.record.key()
    }

    /// The key as text, or `None` if it is null or not UTF-8.
    pub fn key_str(&self) -> Option<&str> {
        self.key().and_then(|key| str::from_utf8(key).ok())
    }

    /// The value as it stands in the record. `None` is a null value, a *tombstone*.
    pub fn value(&self) -> Option<&[u8]> {
        self.record.value()
    }

    /// When it was produced or appended; `None` for records written without one. See [`topic`](Self::topic).
    pub fn timestamp(&self) -> Option<Timestamp> {
        match self.first_place() {
            None => self.record.timestamp(),
            Some(first) => first
                .timestamp
                .map(|millis| Timestamp::new(millis, TimestampKind::Create)),
        }
    }

    /// Its headers.
    pub fn headers(&self) -> Headers<'_> {
        self.record.headers()
    }

    /// Which handler call for this record this is, from 1, since the record was read. A restart or a rebalance starts
    /// anew at 1, and so does the next trip after a redrive; see [`retry_count`](Self::retry_count) for those. Calls before
    /// it came to a [retry topic](crate::RetryTopics) are counted too, and not lost in a restart.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// How often the record has been sent back from a dead-letter topic, by its `retryCount` header: 0 if that is
    /// absent or no number, [`u32::MAX`] if it is larger than that. Besides decimal digits, which this library writes, 4
    /// or 8 bytes are read, the highest first, as Java clients write integers.
    pub fn retry_count(&self) -> u32 {
        retry_count(self.headers())
    }

    /// What identifies this message on every trip, whichever group reads it: its `messageId` header if that is UTF-8 of
    /// 1 to 512 bytes, else `topic/partition/offset/timestamp` of the place it was first, from its `original…` headers
    /// if they are all there and well formed, else its own. Builds a string at each call.
    pub fn message_id(&self) -> String {
        message_id(&self.record)
    }
}

impl Message<()> {
    /// Starts a message for a unit test of a handler.
    pub fn builder() -> MessageBuilder {
        MessageBuilder::default()
    }
}

/// The place and the sizes; never payload, key or header values.
impl<P> fmt::Debug for Message<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("record", &self.record)
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}

pub(crate) fn retry_count(headers: Headers<'_>) -> u32 {
    let counts = headers.get_all(header_names::RETRY_COUNT).flatten();
    counts.filter_map(values::count).last().unwrap_or(0)
}

pub(crate) fn message_id(record: &Record) -> String {
    message_id_header(record.headers())
        .map_or_else(|| Origin::of(record).to_string(), str::to_owned)
}

pub(crate) fn message_id_header(headers: Headers<'_>) -> Option<&str> {
    headers
        .get(header_names::MESSAGE_ID)
        .and_then(well_formed_id)
}

pub(crate) fn well_formed_id(value: &[u8]) -> Option<&str> {
    let id = str::from_utf8(value).ok();
    id.filter(|id| (1..=LONGEST_MESSAGE_ID).contains(&id.len()))
}

/// Makes a [`Message`] or a [`Record`] without a Kafka, for unit tests of handlers, decoders and classifiers.
///
/// What is not set is: topic `test`, partition 0, offset 0, attempt 1, no timestamp, null key, null value, no headers.
#[derive(Clone)]
#[must_use]
pub struct MessageBuilder {
    topic: Arc<str>,
    partition: i32,
    offset: i64,
    timestamp: Option<Timestamp>,
    key: Option<Vec<u8>>,
    value: Option<Vec<u8>>,
    headers: Vec<(Vec<u8>, Option<Vec<u8>>)>,
    attempt: u32,
}

impl Default for MessageBuilder {
    fn default() -> Self {
        Self {
            topic: "test".into(),
            partition: 0,
            offset: 0,
            timestamp: None,
            key: None,
            value: None,
            headers: Vec::new(),
            attempt: 1,
        }
    }
}

impl MessageBuilder {
    /// Sets the topic.
    pub fn topic(mut self, topic: &str) -> Self {
        self.topic = topic.into();
        self
    }

    /// Sets the partition.
    pub fn partition(mut self, partition: i32) -> Self {
        self.partition = partition;
        self
    }

    /// Sets the offset.
    pub fn offset(mut self, offset: i64) -> Self {
        self.offset = offset;
        self
    }

    /// Sets the timestamp, in Unix milliseconds, as a producer would have.
    pub fn timestamp_millis(mut self, millis: i64) -> Self {
        self.timestamp = Some(Timestamp::new(millis, TimestampKind::Create));
        self
    }

    /// Sets the key.
    pub fn key(mut self, key: impl AsRef<[u8]>) -> Self {
        self.key = Some(key.as_ref().to_vec());
        self
    }

    /// Sets the value.
    pub fn value(mut self, value: impl AsRef<[u8]>) -> Self {
        self.value = Some(value.as_ref().to_vec());
        self
    }

    /// Adds a header; one of the same name stays.
    pub fn header(mut self, name: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Self {
        let value = Some(value.as_ref().to_vec());
        self.headers.push((name.as_ref().to_vec(), value));
        self
    }

    /// Adds a header with a null value.
    pub fn null_header(mut self, name: impl AsRef<[u8]>) -> Self {
        self.headers.push((name.as_ref().to_vec(), None));
        self
    }

    /// Sets which handler call this is, from 1.
    pub fn attempt(mut self, attempt: u32) -> Self {
        self.attempt = attempt;
        self
    }

    /// The message with this payload. Its record's value is what [`value`](Self::value) set, else null.
    pub fn payload<P>(self, payload: P) -> Message<P> {
        Message::new(self.record(), self.attempt, payload, None)
    }

    /// The message with the payload that its value decodes to.
    ///
    /// # Errors
    ///
    /// What the payload's [`decode`](Payload::decode) answers.
    pub fn decode<P: Payload>(self) -> Result<Message<P>, DecodeError> {
        let record = self.record();
        let payload = P::decode(&record)?;
        Ok(Message::new(record, self.attempt, payload, None))
    }

    /// The record alone, undecoded.
    pub fn record(&self) -> Record {
        let source = Source::new(self.topic.clone(), self.partition);
        let mut chunk = ChunkBuilder::new(Arc::new(source), None);
        chunk.push(
            self.offset,
            self.timestamp,
            None,
            self.key.as_deref(),
            self.value.as_deref(),
        );
        for (name, value) in &self.headers {
            chunk.header(name, value.as_deref());
        }
        chunk.finish().record(0)
    }
}

/// The place and the sizes; never key, value or header values.
impl fmt::Debug for MessageBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MessageBuilder")
            .field("record", &self.record())
            .field("attempt", &self.attempt)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORIGIN: [(&str, &str); 4] = [
        ("originalTopic", "orders"),
        ("originalPartition", "3"),
        ("originalOffset", "41"),
        ("originalTimestamp", "1700000000000"),
    ];

    fn redriven(headers: &[(&str, &str)]) -> MessageBuilder {
        let own = Message::builder()
            .topic("orders")
            .partition(1)
            .offset(99)
            .timestamp_millis(1_800_000_000_000);
        headers
            .iter()
            .fold(own, |builder, (name, value)| builder.header(name, value))
    }

    fn id(builder: MessageBuilder) -> String {
        builder.payload(()).message_id()
    }

    #[test]
    fn a_malformed_retry_count_does_not_undo_one_that_is_well_formed() {
        let builder = Message::builder().header("retryCount", "4");
        let message = builder.header("retryCount", "x").null_header("retryCount");
        assert_eq!(message.payload(()).retry_count(), 4);
    }

    // D10
    #[test]
    fn a_malformed_retry_count_counts_as_none_and_a_huge_one_is_clamped() {
        let count = |value: &[u8]| {
            let message = Message::builder().header("retryCount", value).payload(());
            message.retry_count()
        };
        assert_eq!(Message::builder().payload(()).retry_count(), 0);
        assert_eq!(count(b"3"), 3);
        assert_eq!(count(b"4294967295"), u32::MAX);
        assert_eq!(count(b"4294967296"), u32::MAX);
        assert_eq!(count(b"99999999999999999999"), u32::MAX);
        for malformed in [
            &b"abc"[..],
            b"-1",
            b"+1",
            b"1.5",
            b" 1",
            b"",
            &[0xff; 4],
            "٣".as_bytes(),
        ] {
            assert_eq!(count(malformed), 0, "{malformed:?}");
        }
        assert_eq!(count(&[0, 0, 0, 2]), 2, "as Java clients write integers");
    }

    #[test]
    fn a_message_is_identified_by_its_header() {
        let builder = redriven(&ORIGIN).header("messageId", "order-7");
        assert_eq!(id(builder), "order-7");
    }

    #[test]
    fn a_message_id_that_is_no_id_is_passed_over() {
        let too_long = "x".repeat(513);
        for malformed in [&b""[..], b"\xff\xfe", too_long.as_bytes()] {
            let builder = redriven(&ORIGIN).header("messageId", malformed);
            assert_eq!(id(builder), "orders/3/41/1700000000000");
        }
        let longest = &too_long[1..];
        assert_eq!(id(redriven(&[]).header("messageId", longest)), longest);
    }

    #[test]
    fn a_message_without_an_id_is_identified_by_where_it_was_first() {
        let first_trip = redriven(&[]);
        assert_eq!(id(first_trip), "orders/1/99/1800000000000");
        assert_eq!(id(redriven(&ORIGIN)), "orders/3/41/1700000000000");
    }

    #[test]
    fn a_record_without_a_timestamp_keeps_its_id_on_the_next_trip() {
        let first = id(Message::builder().topic("orders").partition(3).offset(41));
        let mut headers = ORIGIN;
        headers[3].1 = "-1";
        assert_eq!(first, "orders/3/41/-1");
        assert_eq!(id(redriven(&headers)), first);
    }

    #[test]
    fn an_origin_with_one_malformed_part_is_not_used_at_all() {
        for (index, malformed) in [
            (0, ""),
            (0, "no/topic"),
            (0, "ünknown"),
            (1, "-1"),
            (1, "2147483648"),
            (1, ""),
            (2, "+4"),
            (2, "9223372036854775808"),
            (3, "now"),
            (3, "-2"),
            (3, ""),
        ] {
            let mut headers = ORIGIN;
            headers[index].1 = malformed;
            let (name, value) = headers[index];
            let id = id(redriven(&headers));
            assert_eq!(id, "orders/1/99/1800000000000", "{name}: {value:?}");
        }
        for missing in 0..ORIGIN.len() {
            let mut headers = ORIGIN.to_vec();
            headers.remove(missing);
            assert_eq!(id(redriven(&headers)), "orders/1/99/1800000000000");
        }
    }

    #[test]
    fn a_built_message_reads_as_it_was_built() {
        let message = Message::builder()
            .topic("t")
            .partition(2)
            .offset(5)
            .key("k")
            .timestamp_millis(17)
            .header("a", "1")
            .null_header("b")
            .attempt(3)
            .payload("decoded");
        assert_eq!(
            (message.topic(), message.partition(), message.offset()),
            ("t", 2, 5)
        );
        assert_eq!((message.key_str(), message.value()), (Some("k"), None));
        assert_eq!(message.timestamp().map(Timestamp::as_millis), Some(17));
        assert_eq!(message.headers().get_str("a"), Some("1"));
        assert_eq!(message.headers().len(), 2);
        assert_eq!(message.attempt(), 3);
        assert_eq!(message.into_payload(), "decoded");
    }

    #[test]
    fn a_key_that_is_not_utf_8_is_no_text() {
        let message = Message::builder().key([0xff]).payload(());
        assert_eq!(
            (message.key_str(), message.key()),
            (None, Some(&[0xff][..]))
        );
    }

    #[test]
    fn debug_output_has_no_contents() {
        let builder = Message::builder()
            .topic("orders")
            .key("secret")
            .value("secret");
        let shown = format!("{builder:?} {:?}", builder.clone().payload("secret"));
        assert!(
            shown.contains("orders") && !shown.contains("secret"),
            "{shown}"
        );
    }
}
