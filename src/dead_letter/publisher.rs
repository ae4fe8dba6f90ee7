//! Sends dead letters, each until the broker has it.

use std::collections::HashMap;
use std::future::Future;
use std::mem;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::watch;

use super::headers::{Detail, Manner, dead_letter_headers};
use super::spooling::Spooling;
use super::{Failure, Unavailable};
use crate::kafka::{AckedProducer, Outgoing, ProduceError, ProduceErrorKind, RawHeader, Throttle};
use crate::record::Record;

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// A dead letter that is this late is shown as stalled although nothing has failed yet.
const LATE: Duration = Duration::from_secs(5);

const NOT_ACKNOWLEDGED: &str =
    "no acknowledgement yet; check that the topic exists and the brokers are reachable";

/// For how long an answer to whether a topic is missing holds.
const FRESH: Duration = Duration::from_secs(5);

/// Where a dead letter stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) partition: i32,
    pub(crate) offset: i64,
}

/// A dead-letter topic that does not take what is sent to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stalled {
    pub(crate) topic: String,
    /// How many records wait for it.
    pub(crate) records: usize,
    /// When the first of them found it so.
    pub(crate) since: SystemTime,
    pub(crate) last_error: String,
}

/// The topic took no dead letter for as long as the user allows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the dead letter of record {record} could not be written to topic `{topic}` within {after:?} ({reason}): see to that \
     topic and start again; the record is not committed"
)]
pub(crate) struct Unwritten {
    record: String,
    topic: String,
    after: Duration,
    reason: String,
}

pub(crate) struct Publisher {
    producer: Arc<AckedProducer>,
    manner: Manner,
    stalls: Mutex<HashMap<String, Stall>>,
    /// For how long a dead letter may wait, if not for ever.
    stop_after: Option<Duration>,
    /// Set when one has waited for that long: none is waited for any more.
    stopped: watch::Sender<bool>,
    spooling: Option<Spooling>,
    /// Topics that brokers were asked for, when, and whether they are missing.
    looked_up: tokio::sync::Mutex<HashMap<String, (Instant, bool)>>,
}

/// A topic keeps its entry when it has recovered: one that comes and goes may not flood the log either.
#[derive(Default)]
struct Stall {
    now: Option<Stalled>,
    /// Of those that waited, how many were given up: the run ends, or the partition is taken away.
    unwritten: usize,
    log: Throttle,
}

impl Publisher {
    pub(crate) fn new(producer: Arc<AckedProducer>, manner: Manner) -> Self {
        Publisher {
            producer,
            manner,
            stalls: Mutex::default(),
            stop_after: None,
            stopped: watch::Sender::new(false),
            spooling: None,
            looked_up: tokio::sync::Mutex::default(),
        }
    }

    /// `spooling` is there if the policy is to spool.
    pub(crate) fn when_unavailable(
        mut self,
        policy: &Unavailable,
        spooling: Option<Spooling>,
    ) -> Self {
        if let Unavailable::Stop { after } = policy {
            self.stop_after = Some(*after);
        }
        if let Some(spooling) = &spooling {
            spooling.send_by(Arc::clone(&self.producer));
        }
        self.spooling = spooling;
        self
    }

    pub(crate) fn spooling(&self) -> Option<&Spooling> {
        self.spooling.as_ref()
    }

    /// The topics that dead letters wait for now.
    pub(crate) fn stalled(&self) -> Vec<Stalled> {
        self.stalls()
            .values()
            .filter_map(|stall| stall.now.clone())
            .collect()
    }

    /// Ends when the broker has acknowledged the record's dead letter, however long that takes, or the policy for topics
    /// that cannot be written has found another end; `None`: it is in the spool. Dropping the future gives up waiting:
    /// the dead letter may then exist or not.
    pub(crate) async fn publish(
        &self,
        topic: &str,
        record: &Record,
        failure: &Failure,
    ) -> Result<Option<Position>, Unwritten> {
        let Some(after) = self.stop_after else {
            return Ok(self.make_safe(topic, record, failure).await);
        };
        let mut stopped = self.stopped.subscribe();
        // Kept until the end: with it goes what is known of the trouble.
        let mut safe = pin!(self.make_safe(topic, record, failure));
        tokio::select! {
            biased;
            safe = &mut safe => return Ok(safe),
            () = tokio::time::sleep(after) => drop(self.stopped.send_replace(true)),
            // The run ends anyway: the others are not waited for any longer.
            _ = stopped.wait_for(|stopped| *stopped) => {}
        }
        let last_error = |stall: &Stall| Some(stall.now.as_ref()?.last_error.clone());
        let reason = self.stalls().get(topic).and_then(last_error);
        Err(Unwritten {
            record: format!(
                "{}/{}/{}",
                record.topic(),
                record.partition(),
                record.offset()
            ),
            topic: topic.into(),
            after,
            reason: reason.unwrap_or_else(|| NOT_ACKNOWLEDGED.into()),
        })
    }

    async fn make_safe(&self, topic: &str, record: &Record, failure: &Failure) -> Option<Position> {
        let mut pause = FIRST_PAUSE;
        let mut detail = Detail::Full;
        let mut waiting = Waiting {
            publisher: self,
            topic,
            stalled: false,
            safe: false,
        };
        // Refused for what it is, and not for the state of the topic. From then on it goes alone: it would take the others
        // along each time.
        let mut unfit = false;
        loop {
            let behind_others = match &self.spooling {
                Some(spooling) if !unfit => spooling.holds(topic).await,
                _ => false,
            };
            let mut trouble = if behind_others {
                "others for this topic are in the spool".to_owned()
            } else {
                let sent = self.send(topic, record, failure, detail, unfit);
                match waiting.watch(record, sent).await {
                    Ok((partition, offset)) => {
                        waiting.safe = true;
                        return Some(Position { partition, offset });
                    }
                    Err(error) => {
                        unfit |= error.kind().is_about_the_record();
                        if error.kind() == ProduceErrorKind::TooLarge
                            && let Some(less) = detail.less()
                        {
                            detail = less;
                            continue;
                        }
                        match error.kind() {
                            ProduceErrorKind::Retryable => {
                                let missing = self.told_missing(topic).await;
                                missing.unwrap_or_else(|| error.to_string())
                            }
                            kind if kind.is_about_the_record() => format!(
                                "record {}/{}/{}: {error}",
                                record.topic(),
                                record.partition(),
                                record.offset()
                            ),
                            _ => error.to_string(),
                        }
                    }
                }
            };
            if let Some(spooling) = &self.spooling
                && !unfit
            {
                match spooling
                    .keep(topic, record, failure, &self.manner, &trouble)
                    .await
                {
                    Ok(()) => {
                        waiting.safe = true;
                        return None;
                    }
                    Err(refused) => {
                        trouble = format!("{trouble}; and it cannot be spooled: {refused}");
                    }
                }
            }
            waiting.stall(record, &trouble);
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    async fn send(
        &self,
        topic: &str,
        record: &Record,
        failure: &Failure,
        detail: Detail,
        alone: bool,
    ) -> Result<(i32, i64), ProduceError> {
        let headers = dead_letter_headers(record, failure, &self.manner, detail);
        let headers: Vec<RawHeader<'_>> = headers
            .iter()
            .map(|(name, value)| (&**name, value.as_deref()))
            .collect();
        let letter = Outgoing {
            topic,
            // The topic may have fewer partitions than the record's.
            partition: None,
            key: record.key(),
            value: record.value(),
            // Now: by its own time, an old record would be past the topic's retention when it arrives.
            timestamp: None,
            headers: &headers,
        };
        match alone {
            true => self.producer.send_alone(letter).await,
            false => self.producer.send(letter).await,
        }
    }

    /// That the topic does not exist, if the brokers say so. Whoever waits for the same topic waits for one question.
    async fn told_missing(&self, topic: &str) -> Option<String> {
        let mut looked_up = self.looked_up.lock().await;
        let known = looked_up.get(topic).filter(|(at, _)| at.elapsed() < FRESH);
        let missing = match known {
            Some((_, missing)) => *missing,
            None => {
                let missing = self.producer.is_missing(topic).await;
                looked_up.insert(topic.to_owned(), (Instant::now(), missing));
                missing
            }
        };
        missing.then(|| format!("topic `{topic}` does not exist: create it"))
    }

    fn stalls(&self) -> MutexGuard<'_, HashMap<String, Stall>> {
        self.stalls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One record that waits for its dead letter's topic; counted as stalled from its first failure until it is dropped.
struct Waiting<'a> {
    publisher: &'a Publisher,
    topic: &'a str,
    stalled: bool,
    /// Whether the dead letter has been written before this is dropped.
    safe: bool,
}

impl Waiting<'_> {
    /// A send that hangs on absent brokers fails only after a minute. It is shown before.
    async fn watch<T>(&mut self, record: &Record, send: impl Future<Output = T>) -> T {
        let mut send = pin!(send);
        loop {
            match tokio::time::timeout(LATE, &mut send).await {
                Ok(outcome) => return outcome,
                Err(_) => {
                    let missing = self.publisher.told_missing(self.topic).await;
                    self.stall(record, missing.as_deref().unwrap_or(NOT_ACKNOWLEDGED));
                }
            }
        }
    }

    fn stall(&mut self, record: &Record, error: &str) {
        let mut stalls = self.publisher.stalls();
        let stall = stalls.entry(self.topic.to_owned()).or_default();
        let now = stall.now.get_or_insert_with(|| Stalled {
            topic: self.topic.to_owned(),
            records: 0,
            since: SystemTime::now(),
            last_error: String::new(),
        });
        now.records += usize::from(!self.stalled);
        self.stalled = true;
        error.clone_into(&mut now.last_error);
        if let Some(held_back) = stall.log.admit(Instant::now()) {
            tracing::error!(
                topic = %record.topic(),
                partition = record.partition(),
                offset = record.offset(),
                dead_letter_topic = %self.topic,
                error,
                waiting = now.records,
                held_back,
                "a record cannot be written to the topic where it is set aside; it stays unfinished, and this is tried again",
            );
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if !self.stalled {
            return;
        }
        if let Some(stall) = self.publisher.stalls().get_mut(self.topic)
            && let Some(now) = &mut stall.now
        {
            now.records -= 1;
            stall.unwritten += usize::from(!self.safe);
            if now.records == 0 {
                stall.now = None;
                match mem::take(&mut stall.unwritten) {
                    0 => tracing::info!(
                        dead_letter_topic = %self.topic,
                        "no dead letter waits any more"
                    ),
                    unwritten => tracing::warn!(
                        dead_letter_topic = %self.topic,
                        unwritten,
                        "dead letters were not written: their records are given back unfinished, and come again"
                    ),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rdkafka::consumer::{BaseConsumer, Consumer as _};
    use rdkafka::message::{Headers as _, Message as _, OwnedMessage};
    use rdkafka::mocking::MockCluster;
    use rdkafka::producer::DefaultProducerContext;
    use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
    use rdkafka::{ClientConfig, Offset, TopicPartitionList};

    use super::super::FailureKind;
    use super::*;
    use crate::kafka::{Properties, producer_config};
    use crate::record::{ChunkBuilder, Source, Timestamp, TimestampKind};

    const LETTERS: &str = "orders.dlq";

    struct World {
        cluster: MockCluster<'static, DefaultProducerContext>,
        publisher: Arc<Publisher>,
    }

    impl World {
        fn new(own: &[(&str, &str)]) -> World {
            let cluster = MockCluster::new(1).unwrap();
            cluster.create_topic(LETTERS, 1, 1).unwrap();
            let mut consumer = Properties::default();
            consumer.set("bootstrap.servers", cluster.bootstrap_servers());
            consumer.set("reconnect.backoff.max.ms", "200");
            let mut properties = Properties::default();
            for (name, value) in own {
                properties.set(*name, *value);
            }
            let config = producer_config(&consumer, &properties).unwrap();
            let producer = Arc::new(AckedProducer::new(config, None).unwrap());
            let manner = Manner {
                group: "shipping".into(),
                ..Manner::default()
            };
            let publisher = Arc::new(Publisher::new(producer, manner));
            World { cluster, publisher }
        }

        async fn publish(&self, record: Record) -> Position {
            let failure = failure();
            let published = self.publisher.publish(LETTERS, &record, &failure);
            tokio::time::timeout(Duration::from_secs(15), published)
                .await
                .expect("the broker takes it")
                .unwrap()
                .expect("it is not spooled")
        }

        fn letter(&self, at: Position) -> OwnedMessage {
            let consumer: BaseConsumer = ClientConfig::new()
                .set("bootstrap.servers", self.cluster.bootstrap_servers())
                .set("group.id", "reader")
                .create()
                .unwrap();
            let mut list = TopicPartitionList::new();
            list.add_partition_offset(LETTERS, at.partition, Offset::Offset(at.offset))
                .unwrap();
            consumer.assign(&list).unwrap();
            consumer
                .poll(Duration::from_secs(10))
                .expect("a dead letter")
                .unwrap()
                .detach()
        }
    }

    fn record(key: Option<&[u8]>, value: Option<&[u8]>) -> Record {
        let mut chunk = ChunkBuilder::new(Arc::new(Source::new("orders", 7)), None);
        chunk.push(
            42,
            Some(Timestamp::new(1_000, TimestampKind::Create)),
            None,
            key,
            value,
        );
        chunk.header(b"trace", Some(b"abc"));
        chunk.header(b"nothing", None);
        chunk.finish().record(0)
    }

    fn failure() -> Failure {
        Failure {
            kind: FailureKind::Permanent,
            message: "x".repeat(2_000),
            attempts: 1,
            failed_at_ms: 5,
            retry_tier: 0,
            due_at_ms: None,
        }
    }

    fn header(letter: &OwnedMessage, name: &str) -> Option<String> {
        let mut headers = letter
            .headers()
            .unwrap()
            .iter()
            .filter(|header| header.key == name);
        Some(String::from_utf8(headers.next()?.value?.to_vec()).unwrap())
    }

    async fn until(what: &str, mut condition: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(15);
        while !condition() {
            assert!(Instant::now() < deadline, "{what}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    // D2, D2b, D4, D9
    #[tokio::test]
    async fn a_dead_letter_has_the_record_as_it_was_and_the_time_of_writing() {
        let world = World::new(&[]);
        let at = world.publish(record(None, None)).await;
        assert_eq!(
            at,
            Position {
                partition: 0,
                offset: 0
            },
            "one partition takes letters from partition 7"
        );
        let letter = world.letter(at);
        assert_eq!((letter.key(), letter.payload()), (None, None));
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap()
            .as_millis() as i64;
        let age = now - letter.timestamp().to_millis().unwrap();
        assert!((0..60_000).contains(&age), "{age} ms");
        let headers = letter.headers().unwrap();
        assert_eq!(
            (headers.get(0).key, headers.get(0).value),
            ("trace", Some(&b"abc"[..]))
        );
        assert_eq!(
            (headers.get(1).key, headers.get(1).value),
            ("nothing", None)
        );
        assert_eq!(header(&letter, "originalPartition").as_deref(), Some("7"));

        let at = world.publish(record(Some(b""), Some(b"v"))).await;
        let letter = world.letter(at);
        assert_eq!(
            (letter.key(), letter.payload()),
            (Some(&b""[..]), Some(&b"v"[..]))
        );
        assert_eq!(world.publisher.stalled(), []);
    }

    // D6
    #[tokio::test]
    async fn diagnostics_give_way_when_the_letter_would_be_too_large() {
        let world = World::new(&[("message.max.bytes", "1400")]);
        let at = world.publish(record(None, Some(&[0; 600]))).await;
        let letter = world.letter(at);
        assert_eq!(header(&letter, "errorMessage"), None);
        assert_eq!(header(&letter, "errorKind").as_deref(), Some("permanent"));

        let at = world.publish(record(None, Some(&[0; 1_190]))).await;
        let letter = world.letter(at);
        assert_eq!(header(&letter, "errorKind"), None);
        assert_eq!(header(&letter, "originalOffset").as_deref(), Some("42"));
        assert_eq!(
            header(&letter, "trace").as_deref(),
            Some("abc"),
            "its own headers stay"
        );
        assert_eq!(letter.payload(), Some(&[0; 1_190][..]));
    }

    // D6
    #[tokio::test]
    async fn a_letter_that_can_never_fit_waits_and_shows_it() {
        let world = World::new(&[("message.max.bytes", "1400")]);
        let publisher = world.publisher.clone();
        let large = record(None, Some(&[0; 1_390]));
        let waiting =
            tokio::spawn(async move { publisher.publish(LETTERS, &large, &failure()).await });
        until("it shows", || !world.publisher.stalled().is_empty()).await;
        let [stalled] = &world.publisher.stalled()[..] else {
            panic!("one topic stalls")
        };
        assert_eq!((&*stalled.topic, stalled.records), (LETTERS, 1));
        assert!(
            stalled.last_error.contains("`max.message.bytes`"),
            "{}",
            stalled.last_error
        );
        assert!(!waiting.is_finished());

        waiting.abort();
        until("nobody waits any more", || {
            world.publisher.stalled().is_empty()
        })
        .await;
    }

    // D5, D7
    #[tokio::test]
    async fn a_refused_letter_is_sent_again_until_the_broker_has_it() {
        let world = World::new(&[]);
        let refusal = RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED;
        world
            .cluster
            .request_errors(RDKafkaApiKey::Produce, &[refusal]);
        let publisher = world.publisher.clone();
        let waiting = tokio::spawn(async move {
            publisher
                .publish(LETTERS, &record(None, None), &failure())
                .await
        });
        until("it shows", || {
            world
                .publisher
                .stalled()
                .first()
                .is_some_and(|s| s.last_error.contains("`Write`"))
        })
        .await;
        assert_eq!(
            waiting.await.unwrap(),
            Ok(Some(Position {
                partition: 0,
                offset: 0
            }))
        );
        assert_eq!(world.publisher.stalled(), []);
    }

    // D5
    #[tokio::test]
    async fn an_outage_delays_letters_visibly_and_loses_none() {
        let world = World::new(&[("message.timeout.ms", "500")]);
        world.publish(record(None, None)).await;
        world.cluster.broker_down(1).unwrap();
        let waiting: Vec<_> = (0..3)
            .map(|_| {
                let publisher = world.publisher.clone();
                tokio::spawn(async move {
                    publisher
                        .publish(LETTERS, &record(None, None), &failure())
                        .await
                })
            })
            .collect();
        until("all show", || {
            world
                .publisher
                .stalled()
                .first()
                .is_some_and(|s| s.records == 3)
        })
        .await;
        world.cluster.broker_up(1).unwrap();
        let mut offsets = Vec::new();
        for letter in waiting {
            offsets.push(letter.await.unwrap().unwrap().unwrap().offset);
        }
        offsets.sort_unstable();
        offsets.dedup();
        assert_eq!(offsets.len(), 3);
        assert_eq!(world.publisher.stalled(), []);
    }
}
