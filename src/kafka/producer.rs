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
/// An idempotent producer that meets a fatal error is of no use any more: it is replaced by a new one, and what it had
/// not acknowledged fails with [`ProduceErrorKind::Fatal`], to be sent again. Dropping this blocks nobody: the polling
/// thread flushes and destroys the producer.
pub(crate) struct AckedProducer {
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
        let first = Instance::create(&config, tokens.clone(), 0, Code::NoError)?;
        Ok(AckedProducer {
            config,
            tokens,
            current: Mutex::new(first),
        })
    }

    /// Partition and offset of the record, once the broker has it.
    ///
    /// Dropping the future only stops waiting: the record may have been queued already, and is then sent.
    pub(crate) async fn send(&self, record: Outgoing<'_>) -> Result<(i32, i64), ProduceError> {
        let give_up = Instant::now() + PATIENCE;
        let mut pause = Duration::from_millis(5);
        loop {
            let (sender, acknowledged) = oneshot::channel();
            let (queued, instance) = self.enqueue(record, sender);
            let outcome = match queued {
                Ok(()) => acknowledged.await.unwrap_or(Err(Code::PurgeQueue)),
                Err(Code::QueueFull) if Instant::now() < give_up => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_millis(200));
                    continue;
                }
                Err(code) => Err(code),
            };
            return outcome.map_err(|code| ProduceError {
                topic: record.topic.to_owned(),
                code: self.replace_if_fatal(instance).unwrap_or(code),
            });
        }
    }

    /// Whether the brokers say that there is no such topic. librdkafka waits for one that may only be late, and lets its
    /// records time out as if the brokers were away.
    pub(crate) async fn is_missing(&self, topic: &str) -> bool {
        let producer = {
            let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
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
            Err((error, _)) => Err(error.rdkafka_error_code().unwrap_or(Code::Fail)),
        };
        // Whoever sent it may have stopped waiting.
        _ = acknowledge.send(outcome);
    }
}

/// A record that was not acknowledged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("topic `{topic}` has not taken the record: {code}; {}", self.kind().what_next())]
pub(crate) struct ProduceError {
    topic: String,
    code: Code,
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

    fn what_next(self) -> &'static str {
        match self {
            Self::Retryable => "send it again once the brokers are reachable",
            Self::TooLarge => {
                "raise the topic's `max.message.bytes`, and the producer's `message.max.bytes` if that is lower"
            }
            Self::UnknownTopic => "create the topic",
            Self::NotAuthorised => {
                "grant this client's principal `Write` on the topic, and check its credentials"
            }
            Self::Invalid => {
                "check the topic's name and settings, and the broker's log for what it refused"
            }
            Self::Fatal => "the producer has been replaced: send it again",
        }
    }
}

impl ProduceError {
    /// The broker takes records with other timestamps only.
    pub(crate) fn refuses_timestamp(&self) -> bool {
        self.code == Code::InvalidTimestamp
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
            cluster.request_errors(RDKafkaApiKey::Produce, &[refusal]);
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
        ffi::raise_fatal_error(producer.current.lock().unwrap().producer());

        let error = producer.send(record(b"c")).await.unwrap_err();
        assert_eq!(error.kind(), ProduceErrorKind::Fatal, "{error}");
        assert_eq!(waiting.await.unwrap_err().kind(), ProduceErrorKind::Fatal);
        assert_eq!(
            producer.current.lock().unwrap().number,
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
