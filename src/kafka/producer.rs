//! A producer whose sends end with the broker's acknowledgement.

use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rdkafka::client::{ClientContext, OAuthToken};
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::error::KafkaError;
use rdkafka::message::{DeliveryResult, Message as _};
use rdkafka::producer::{BaseProducer, Producer as _, ProducerContext};
use rdkafka::types::{RDKafkaErrorCode as Code, RDKafkaRespErr};
use tokio::sync::oneshot;

use super::ffi;
pub(crate) use super::ffi::{Outgoing, RawHeader};
use super::log::ClientLog;

/// Gives SASL/OAUTHBEARER tokens; called with the property `sasl.oauthbearer.config` on a thread of the client.
pub(crate) type TokenSource =
    Arc<dyn Fn(Option<&str>) -> Result<OAuthToken, Box<dyn Error>> + Send + Sync>;

/// How long a send waits for room in the producer's queue. Only brokers that take nothing fill it for that long.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long brokers may take to say which topics there are.
const ANSWER: Duration = Duration::from_secs(1);

/// How long a producer that is let go may go on with what nobody waits for any more.
const LAST_FLUSH: Duration = Duration::from_secs(5);

/// Sends records, each until the broker has acknowledged or refused it.
///
/// A broker refuses a whole batch for one record in it. So whatever was refused for a reason that may be a neighbour's
/// goes again, by a second producer that puts each record into a batch of its own: they share no fate there, wait for
/// nobody, and hold up none of the others.
///
/// Dropping this blocks nobody: the polling threads flush and destroy the producers.
pub(crate) struct AckedProducer {
    together: Line,
    /// Comes into being with the first record that has to go alone.
    alone: Mutex<Option<Arc<Line>>>,
}

/// A producer, and the next one where that has failed for good.
///
/// An idempotent producer that meets a fatal error is of no use any more: it is replaced by a new one, and what it had
/// not acknowledged fails with [`ProduceErrorKind::Fatal`], to be sent again.
struct Line {
    config: ClientConfig,
    tokens: Option<TokenSource>,
    current: Mutex<Instance>,
}

#[derive(Debug, thiserror::Error)]
#[error("cannot create a producer: {0}; check its properties and the limits on threads and files")]
pub(crate) struct CreateError(String);

impl AckedProducer {
    pub(crate) fn new(
        config: ClientConfig,
        tokens: Option<TokenSource>,
    ) -> Result<Self, CreateError> {
        Ok(AckedProducer {
            together: Line::new(config, tokens)?,
            alone: Mutex::default(),
        })
    }

    /// Partition and offset of the record, once the broker has it. An error is the record's own, and no neighbour's.
    ///
    /// Dropping the future only stops waiting: the record may have been queued already, and is then sent.
    pub(crate) async fn send(&self, record: Outgoing<'_>) -> Result<(i32, i64), ProduceError> {
        let mut sent = self.send_in_company(record).await;
        if matches!(&sent, Err(error) if error.is_anothers()) {
            // Those that the broker has named as the cause are not among its neighbours this time.
            sent = self.send_in_company(record).await;
        }
        match sent {
            Err(error) if error.may_be_anothers() => self.send_alone(record).await,
            sent => sent,
        }
    }

    /// As [`send`](Self::send), but once and in a batch with others: they share the fate of each of them.
    pub(crate) async fn send_in_company(
        &self,
        record: Outgoing<'_>,
    ) -> Result<(i32, i64), ProduceError> {
        self.together.send(record).await
    }

    /// As [`send`](Self::send), in a batch of its own from the start. Records that go this way stay in order among
    /// themselves.
    pub(crate) async fn send_alone(
        &self,
        record: Outgoing<'_>,
    ) -> Result<(i32, i64), ProduceError> {
        let alone = self.alone_line().map_err(|error| {
            tracing::error!(%error, "a refused record cannot be sent by itself");
            ProduceError::about(record, Code::Fail, false)
        })?;
        let sent = alone.send(record).await;
        sent.map_err(|error| ProduceError {
            in_company: false,
            ..error
        })
    }

    fn alone_line(&self) -> Result<Arc<Line>, CreateError> {
        let mut alone = self.alone.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(line) = &*alone {
            return Ok(Arc::clone(line));
        }
        let mut config = self.together.config.clone();
        config
            .set("batch.num.messages", "1")
            .set("linger.ms", "0")
            .remove("queue.buffering.max.ms");
        let line = Arc::new(Line::new(config, self.together.tokens.clone())?);
        *alone = Some(Arc::clone(&line));
        Ok(line)
    }

    /// Whether the brokers say that there is no such topic. librdkafka waits for one that may only be late, and lets its
    /// records time out as if the brokers were away.
    pub(crate) async fn is_missing(&self, topic: &str) -> bool {
        let producer = {
            let current = self.together.current.lock();
            let current = current.unwrap_or_else(PoisonError::into_inner);
            current.producer.clone()
        };
        let producer = producer.expect("a producer is there until it is dropped");
        let topic = topic.to_owned();
        let asked = tokio::task::spawn_blocking(move || {
            let told = producer.client().fetch_metadata(Some(&topic), ANSWER);
            told.is_ok_and(|told| {
                let missing = RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART;
                told.topics()
                    .iter()
                    .any(|topic| topic.error() == Some(missing))
            })
        });
        asked.await.unwrap_or(false)
    }
}

impl Line {
    fn new(config: ClientConfig, tokens: Option<TokenSource>) -> Result<Self, CreateError> {
        let first = Instance::create(&config, tokens.clone(), 0, Code::NoError)?;
        Ok(Line {
            config,
            tokens,
            current: Mutex::new(first),
        })
    }

    async fn send(&self, record: Outgoing<'_>) -> Result<(i32, i64), ProduceError> {
        let give_up = Instant::now() + PATIENCE;
        let mut pause = Duration::from_millis(5);
        loop {
            let (sender, acknowledged) = oneshot::channel();
            let (queued, instance) = self.enqueue(record, sender);
            // What is refused on the way into the queue was in no batch yet.
            let in_company = queued.is_ok();
            let outcome = match queued {
                Ok(()) => acknowledged.await.unwrap_or(Err(Code::PurgeQueue)),
                Err(Code::QueueFull) if Instant::now() < give_up => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_millis(200));
                    continue;
                }
                Err(code) => Err(code),
            };
            return outcome.map_err(|code| {
                let code = self.replace_if_fatal(instance).unwrap_or(code);
                ProduceError::about(record, code, in_company)
            });
        }
    }

    fn enqueue(&self, record: Outgoing<'_>, sender: Acknowledge) -> (Result<(), Code>, u64) {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let queued = ffi::produce(current.producer(), record, Box::new(sender));
        (queued.map_err(|(code, _)| code), current.number)
    }

    /// What became of that instance if it has met a fatal error. Of those that find out, the first puts a new one in its
    /// place. An idempotent producer that may write nowhere is fatal as well: that is told as the obstacle it is.
    fn replace_if_fatal(&self, number: u64) -> Option<Code> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.number != number {
            // An instance is replaced for this reason only.
            return Some(current.replaced_for);
        }
        let (code, reason) = current.producer().client().fatal_error()?;
        tracing::warn!(%code, reason, "the producer met a fatal error and is replaced; what it had not acknowledged is sent again");
        let told = match code {
            Code::ClusterAuthorizationFailed => code,
            _ => Code::Fatal,
        };
        match Instance::create(&self.config, self.tokens.clone(), number + 1, told) {
            Ok(next) => *current = next,
            // The next send will find the fatal one and try again.
            Err(error) => tracing::error!(%error, "the producer cannot be replaced"),
        }
        Some(told)
    }
}

type Acknowledge = oneshot::Sender<Result<(i32, i64), Code>>;

/// One native producer and the thread that polls it.
struct Instance {
    number: u64,
    /// What the one before it met with.
    replaced_for: Code,
    /// There until `drop`, which hands it to the polling thread: whoever drops the last reference blocks.
    producer: Option<Arc<BaseProducer<Context>>>,
    retire: mpsc::Sender<Arc<BaseProducer<Context>>>,
}

impl Instance {
    fn create(
        config: &ClientConfig,
        tokens: Option<TokenSource>,
        number: u64,
        replaced_for: Code,
    ) -> Result<Self, CreateError> {
        let context = Context {
            tokens,
            log: ClientLog::default(),
        };
        let producer: BaseProducer<Context> = config
            .create_with_context(context)
            .map_err(|error| CreateError(error.to_string()))?;
        let producer = Arc::new(producer);
        let (retire, retired) = mpsc::channel();
        let polled = Arc::clone(&producer);
        thread::Builder::new()
            .name("kafka-producer".into())
            .spawn(move || poll(&polled, &retired))
            .map_err(|error| CreateError(error.to_string()))?;
        Ok(Instance {
            number,
            replaced_for,
            producer: Some(producer),
            retire,
        })
    }

    fn producer(&self) -> &BaseProducer<Context> {
        self.producer
            .as_deref()
            .expect("an instance has its producer until it is dropped")
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        if let Some(Err(mpsc::SendError(producer))) = self
            .producer
            .take()
            .map(|producer| self.retire.send(producer))
        {
            // The polling thread is gone. Leaking the producer is better than blocking the thread that drops it.
            std::mem::forget(producer);
        }
    }
}

fn poll(producer: &BaseProducer<Context>, retired: &mpsc::Receiver<Arc<BaseProducer<Context>>>) {
    let _last = loop {
        producer.poll(Duration::from_millis(100));
        if let Ok(handle) = retired.try_recv() {
            break handle;
        }
    };
    if producer.client().fatal_error().is_none() && producer.flush(LAST_FLUSH).is_err() {
        let records = producer.in_flight_count();
        tracing::warn!(
            records,
            "a producer was let go with records that the broker has not acknowledged"
        );
    }
}

struct Context {
    tokens: Option<TokenSource>,
    log: ClientLog,
}

impl ClientContext for Context {
    // Asked for only when librdkafka has no source of its own.
    const ENABLE_REFRESH_OAUTH_TOKEN: bool = true;

    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        self.log.line(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.log.error(&error, reason);
    }

    fn generate_oauth_token(&self, config: Option<&str>) -> Result<OAuthToken, Box<dyn Error>> {
        let source = self
            .tokens
            .as_ref()
            .ok_or("sasl.mechanism is OAUTHBEARER but no token provider was given")?;
        source(config)
    }
}

impl ProducerContext for Context {
    type DeliveryOpaque = Box<Acknowledge>;

    fn delivery(&self, result: &DeliveryResult<'_>, acknowledge: Box<Acknowledge>) {
        let outcome = match result {
            Ok(message) => Ok((message.partition(), message.offset())),
            // Not the broker's own words: `rd_kafka_message_produce_errstr` points into an answer that librdkafka has
            // freed by now (2.12).
            Err((error, _)) => Err(error.rdkafka_error_code().unwrap_or(Code::Fail)),
        };
        // Whoever sent it may have stopped waiting.
        _ = acknowledge.send(outcome);
    }
}

/// A record that was not acknowledged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("topic `{topic}` has not taken the record: {code}; {}", self.what_next())]
pub(crate) struct ProduceError {
    topic: String,
    code: Code,
    has_key: bool,
    /// Whether it was on its way in a batch that others may have been in.
    in_company: bool,
}

/// What kind of obstacle a record met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProduceErrorKind {
    /// Brokers, network or leadership: passes by itself.
    Retryable,
    /// Larger than the producer, the topic or the broker allows.
    TooLarge,
    UnknownTopic,
    NotAuthorised,
    /// Refused for what it is.
    Invalid,
    /// The producer was of no use any more and has been replaced.
    Fatal,
}

impl ProduceErrorKind {
    /// Others might be taken by the same topic.
    pub(crate) fn is_about_the_record(self) -> bool {
        matches!(self, Self::TooLarge | Self::Invalid)
    }
}

impl ProduceError {
    fn about(record: Outgoing<'_>, code: Code, in_company: bool) -> Self {
        ProduceError {
            topic: record.topic.to_owned(),
            code,
            has_key: record.key.is_some(),
            in_company,
        }
    }

    fn what_next(&self) -> &'static str {
        match self.kind() {
            ProduceErrorKind::Retryable => "send it again once the brokers are reachable",
            ProduceErrorKind::TooLarge => {
                "raise the topic's `max.message.bytes`, and the producer's `message.max.bytes` if that is lower"
            }
            ProduceErrorKind::UnknownTopic => "create the topic",
            ProduceErrorKind::NotAuthorised => {
                "grant this client's principal `Write` on the topic, and check its credentials"
            }
            ProduceErrorKind::Invalid if self.refuses_timestamp() => {
                "raise the topic's `message.timestamp.before.max.ms` or `message.timestamp.after.max.ms`, and check the \
                 clocks"
            }
            // Such a topic is what most brokers call a record invalid for, and old ones a broken one.
            ProduceErrorKind::Invalid
                if !self.has_key
                    && matches!(self.code, Code::InvalidRecord | Code::InvalidMessage) =>
            {
                "the record has no key, and a compacted topic takes none without: set the topic's \
                 `cleanup.policy=delete`, or send to a topic that is not compacted; otherwise see the broker's log for what \
                 it refused"
            }
            ProduceErrorKind::Invalid => {
                "check the topic's name and settings, and the broker's log for what it refused"
            }
            ProduceErrorKind::Fatal => "the producer has been replaced: send it again",
        }
    }

    /// The broker takes records with other timestamps only.
    pub(crate) fn refuses_timestamp(&self) -> bool {
        self.code == Code::InvalidTimestamp
    }

    /// Refused because of another record in its batch, as the broker says.
    pub(crate) fn is_anothers(&self) -> bool {
        self.code == Code::InvalidDifferentRecord
    }

    /// Whether the cause may be another record of its batch. Of the codes that nobody here knows it is taken to be so:
    /// alone it shows.
    pub(crate) fn may_be_anothers(&self) -> bool {
        let concerns_all = matches!(
            self.code,
            // Not the broker's, or not about what was in the batch.
            Code::MessageTimedOut
                | Code::OperationTimedOut
                | Code::TimedOutQueue
                | Code::RequestTimedOut
                | Code::BrokerTransportFailure
                | Code::AllBrokersDown
                | Code::BrokerNotAvailable
                | Code::NetworkException
                | Code::PurgeQueue
                | Code::PurgeInflight
                | Code::QueueFull
                | Code::Fail
                | Code::Fatal
                | Code::Authentication
                | Code::SaslAuthenticationFailed
                | Code::TopicAuthorizationFailed
                | Code::ClusterAuthorizationFailed
                | Code::UnknownTopic
                | Code::UnknownPartition
                | Code::UnknownTopicOrPartition
                | Code::InvalidTopic
                | Code::LeaderNotAvailable
                | Code::NotLeaderForPartition
                | Code::NotEnoughReplicas
                | Code::NotEnoughReplicasAfterAppend
                | Code::KafkaStorageError
                | Code::OutOfOrderSequenceNumber
                | Code::InvalidProducerEpoch
                | Code::UnknownProducerId
        );
        self.in_company && !concerns_all
    }

    pub(crate) fn kind(&self) -> ProduceErrorKind {
        use ProduceErrorKind as Kind;
        match self.code {
            Code::MessageSizeTooLarge | Code::InvalidMessageSize | Code::MessageBatchTooLarge => {
                Kind::TooLarge
            }
            Code::UnknownTopic | Code::UnknownTopicOrPartition | Code::UnknownPartition => {
                Kind::UnknownTopic
            }
            Code::TopicAuthorizationFailed
            | Code::ClusterAuthorizationFailed
            | Code::SaslAuthenticationFailed
            | Code::Authentication => Kind::NotAuthorised,
            Code::InvalidTopic
            | Code::InvalidRecord
            | Code::InvalidMessage
            | Code::InvalidTimestamp
            | Code::InvalidArgument
            | Code::PolicyViolation => Kind::Invalid,
            Code::Fatal => Kind::Fatal,
            _ => Kind::Retryable,
        }
    }
}

#[cfg(test)]
mod tests {
    use rdkafka::mocking::MockCluster;
    use rdkafka::producer::DefaultProducerContext;
    use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

    use super::super::properties::{Properties, producer_config};
    use super::*;

    const TOPIC: &str = "letters";

    fn cluster() -> MockCluster<'static, DefaultProducerContext> {
        let cluster = MockCluster::new(1).unwrap();
        cluster.create_topic(TOPIC, 1, 1).unwrap();
        cluster
    }

    fn producer(
        cluster: &MockCluster<'_, DefaultProducerContext>,
        own: &[(&str, &str)],
    ) -> AckedProducer {
        let mut consumer = Properties::default();
        consumer.set("bootstrap.servers", cluster.bootstrap_servers());
        consumer.set("reconnect.backoff.max.ms", "200");
        let mut properties = Properties::default();
        for (name, value) in own {
            properties.set(*name, *value);
        }
        AckedProducer::new(producer_config(&consumer, &properties).unwrap(), None).unwrap()
    }

    fn record(value: &[u8]) -> Outgoing<'_> {
        Outgoing {
            topic: TOPIC,
            partition: None,
            key: None,
            value: Some(value),
            timestamp: None,
            headers: &[],
        }
    }

    /// A refused topic stays refused until librdkafka has looked it up anew, an absent broker until it is redialled.
    async fn sent_at_last(producer: &AckedProducer) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while let Err(error) = producer.send(record(b"a")).await {
            assert!(Instant::now() < deadline, "{error}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    #[tokio::test]
    async fn a_send_ends_with_where_the_broker_put_the_record() {
        let cluster = cluster();
        let producer = producer(&cluster, &[]);
        assert_eq!(producer.send(record(b"a")).await, Ok((0, 0)));
        assert_eq!(producer.send(record(b"b")).await, Ok((0, 1)));
    }

    // D5, D7
    #[tokio::test]
    async fn a_refusal_is_told_by_kind_with_the_topic_and_what_to_do() {
        let cluster = cluster();
        let producer = producer(&cluster, &[]);
        let refusals = [
            (
                RDKafkaRespErr::RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE,
                ProduceErrorKind::TooLarge,
                "`max.message.bytes`",
            ),
            (
                RDKafkaRespErr::RD_KAFKA_RESP_ERR_INVALID_RECORD,
                ProduceErrorKind::Invalid,
                "broker's log",
            ),
            (
                RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED,
                ProduceErrorKind::NotAuthorised,
                "`Write`",
            ),
        ];
        for (refusal, kind, next) in refusals {
            // In company, and alone.
            let refusals = [refusal; 2];
            let times = if kind.is_about_the_record() { 2 } else { 1 };
            cluster.request_errors(RDKafkaApiKey::Produce, &refusals[..times]);
            let error = producer.send(record(b"a")).await.unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(
                error.to_string().contains(TOPIC) && error.to_string().contains(next),
                "{error}"
            );
        }
        sent_at_last(&producer).await;
    }

    #[tokio::test]
    async fn whatever_a_batch_was_refused_for_each_of_its_records_is_sent_once_more_alone() {
        let cluster = cluster();
        let producer = producer(&cluster, &[("linger.ms", "50")]);
        let mut taken = 0;
        for refusal in [
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_INVALID_RECORD,
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_INVALID_MSG,
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_INVALID_TIMESTAMP,
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE,
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_RECORD_LIST_TOO_LARGE,
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_POLICY_VIOLATION,
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_INVALID_REQUEST,
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN,
        ] {
            cluster.request_errors(RDKafkaApiKey::Produce, &[refusal]);
            let sends = [&b"a"[..], b"b", b"c"].map(|value| producer.send(record(value)));
            let [a, b, c] = sends;
            let (a, b, c) = tokio::join!(a, b, c);
            let mut offsets = [a, b, c].map(|sent| sent.expect("alone it is taken").1);
            offsets.sort_unstable();
            assert_eq!(
                offsets,
                [taken, taken + 1, taken + 2],
                "{refusal:?}: each once"
            );
            taken += 3;
        }
    }

    #[test]
    fn a_refused_record_without_a_key_is_told_what_a_compacted_topic_wants() {
        let keyless = ProduceError::about(record(b"a"), Code::InvalidRecord, false);
        assert!(keyless.to_string().contains("`cleanup.policy=delete`"));
        let keyed = Outgoing {
            key: Some(b"k"),
            ..record(b"a")
        };
        let keyed = ProduceError::about(keyed, Code::InvalidRecord, false);
        assert!(!keyed.to_string().contains("cleanup.policy"), "{keyed}");
        let late = ProduceError::about(record(b"a"), Code::InvalidTimestamp, false);
        assert!(
            late.to_string()
                .contains("`message.timestamp.before.max.ms`")
        );
    }

    #[tokio::test]
    async fn a_send_outlasts_an_outage_and_a_full_queue() {
        let cluster = cluster();
        let producer = Arc::new(producer(&cluster, &[("queue.buffering.max.messages", "1")]));
        producer.send(record(b"a")).await.unwrap();
        cluster.broker_down(1).unwrap();
        let sends: Vec<_> = (0..3)
            .map(|_| {
                let producer = producer.clone();
                tokio::spawn(async move { producer.send(record(b"b")).await })
            })
            .collect();
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert!(
            sends.iter().all(|send| !send.is_finished()),
            "nobody can have acknowledged them"
        );
        cluster.broker_up(1).unwrap();
        let mut offsets = Vec::new();
        for send in sends {
            offsets.push(send.await.unwrap().unwrap().1);
        }
        offsets.sort_unstable();
        assert_eq!(offsets, [1, 2, 3], "each once");
    }

    #[tokio::test]
    async fn a_record_that_takes_too_long_fails_and_may_be_sent_again() {
        let cluster = cluster();
        let producer = producer(&cluster, &[("message.timeout.ms", "300")]);
        cluster.broker_down(1).unwrap();
        let error = producer.send(record(b"a")).await.unwrap_err();
        assert_eq!(error.kind(), ProduceErrorKind::Retryable, "{error}");
        cluster.broker_up(1).unwrap();
        sent_at_last(&producer).await;
    }

    #[tokio::test]
    async fn a_send_nobody_waits_for_any_more_still_arrives() {
        let cluster = cluster();
        let producer = producer(&cluster, &[]);
        let unwaited = tokio::time::timeout(Duration::ZERO, producer.send(record(b"a"))).await;
        assert!(unwaited.is_err());
        assert_eq!(producer.send(record(b"b")).await, Ok((0, 1)));
    }

    #[tokio::test]
    async fn a_fatal_producer_is_replaced_once_and_what_it_had_is_to_be_sent_again() {
        let cluster = cluster();
        let producer = producer(&cluster, &[]);
        producer.send(record(b"a")).await.unwrap();
        cluster.broker_down(1).unwrap();
        let mut waiting = std::pin::pin!(producer.send(record(b"b")));
        assert!(
            tokio::time::timeout(Duration::from_millis(50), &mut waiting)
                .await
                .is_err()
        );
        ffi::raise_fatal_error(producer.together.current.lock().unwrap().producer());

        let error = producer.send(record(b"c")).await.unwrap_err();
        assert_eq!(error.kind(), ProduceErrorKind::Fatal, "{error}");
        assert_eq!(waiting.await.unwrap_err().kind(), ProduceErrorKind::Fatal);
        assert_eq!(
            producer.together.current.lock().unwrap().number,
            1,
            "two found out, one replaced it"
        );
        cluster.broker_up(1).unwrap();
        producer.send(record(b"b")).await.unwrap();
    }

    #[tokio::test]
    async fn dropping_a_producer_with_unsent_records_blocks_nobody() {
        let cluster = cluster();
        let producer = producer(&cluster, &[]);
        producer.send(record(b"a")).await.unwrap();
        cluster.broker_down(1).unwrap();
        assert!(
            tokio::time::timeout(Duration::from_millis(50), producer.send(record(b"b")))
                .await
                .is_err()
        );
        let start = Instant::now();
        drop(producer);
        assert!(
            start.elapsed() < Duration::from_millis(50),
            "{:?}",
            start.elapsed()
        );
    }
}
