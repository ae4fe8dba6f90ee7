//! What the log tells, to people who have nothing else to go by. On librdkafka's mock cluster.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    io,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use common::{Running, millis, until};
use rdkafka::{
    ClientConfig,
    mocking::MockCluster,
    producer::{BaseProducer, BaseRecord, DefaultProducerContext, Producer as _},
    types::{RDKafkaApiKey, RDKafkaRespErr},
};
use reliable_consumer::{
    Builder, DeadLetter, ErrorMessage, HandlerResult, Message, ReliableConsumer, ResultExt, Retry,
    RetryTopics, Text,
};

/// The lines of all tests of this process.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl io::Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0
            .lock()
            .unwrap()
            .push(String::from_utf8_lossy(line).into_owned());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Lines {
    /// From now on what is logged is collected, as `tracing_subscriber::fmt::init()` would print it.
    fn collect() -> Self {
        static LINES: OnceLock<Lines> = OnceLock::new();
        let start = || {
            let lines = Lines::default();
            let writer = lines.clone();
            let format = tracing_subscriber::fmt().with_ansi(false);
            format.with_writer(move || writer.clone()).init();
            lines
        };
        LINES.get_or_init(start).clone()
    }

    /// Those with all of these in them.
    fn with(&self, parts: &[&str]) -> Vec<String> {
        let lines = self.0.lock().unwrap();
        let has_all = |line: &&String| parts.iter().all(|part| line.contains(part));
        lines.iter().filter(has_all).cloned().collect()
    }
}

/// A cluster with these topics of one partition, and ten records in the first.
fn cluster(topics: &[&str]) -> MockCluster<'static, DefaultProducerContext> {
    let cluster = MockCluster::new(1).unwrap();
    for topic in topics {
        cluster.create_topic(topic, 1, 1).unwrap();
    }
    let producer: BaseProducer = ClientConfig::new()
        .set("bootstrap.servers", cluster.bootstrap_servers())
        .create()
        .unwrap();
    for value in 0..10 {
        let value = format!("secret-{value}");
        let record = BaseRecord::<(), _>::to(topics[0]).payload(&value);
        producer.send(record).unwrap();
    }
    producer.flush(Duration::from_secs(5)).unwrap();
    cluster
}

fn consumer(cluster: &MockCluster<'_, DefaultProducerContext>, topic: &str) -> Builder {
    ReliableConsumer::builder()
        .bootstrap_servers(cluster.bootstrap_servers())
        .group_id(format!("{topic}-group"))
        .topic(topic)
        .property("group.protocol", "consumer")
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_attempts_are_told_of_once_in_a_while_and_redacted() {
    let lines = Lines::collect();
    let cluster = cluster(&["failing", "failing.dlq"]);
    let hide = Arc::new(|text: &str| text.replace("secret", "****"));
    let builder = consumer(&cluster, "failing")
        .retry(Retry::fixed(millis(20)).max_attempts(3))
        .dead_letter(DeadLetter::topic("failing.dlq").error_message(ErrorMessage::Redacted(hide)));
    let run = Running::start(builder, async |message: &Message<Text>| -> HandlerResult {
        Err(format!("no room for {}", &**message.payload()))?
    });
    until("all to be dead-lettered", || {
        lines.with(&["dead-lettered", "topic=failing "]).len() == 10
    })
    .await;
    run.stop().await;
    let told = lines.with(&["WARN", "an attempt failed", "topic=failing "]);
    let [told] = &told[..] else {
        panic!("{told:?}");
    };
    for part in [
        "partition=0",
        "offset=0",
        "attempt=1",
        "no room for ****-0",
        "held_back=0",
    ] {
        assert!(told.contains(part), "{part}: {told}");
    }
    assert_eq!(lines.with(&["secret"]), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_says_what_it_waits_for_and_whom_it_abandons() {
    let lines = Lines::collect();
    let cluster = cluster(&["hanging"]);
    let builder = consumer(&cluster, "hanging").shutdown_timeout(millis(400));
    let running = Arc::new(AtomicUsize::new(0));
    let started = Arc::clone(&running);
    let run = Running::start(builder, async move |_: &Message<Text>| -> HandlerResult {
        started.fetch_add(1, Relaxed);
        std::future::pending().await
    });
    until("handlers to run", || running.load(Relaxed) == 10).await;
    assert_eq!(run.stop().await.abandoned, 10);
    let told = |level, what| lines.with(&[level, what]).concat();
    let begins = lines
        .with(&["INFO", "shutting down", "group=hanging-group"])
        .concat();
    assert!(begins.contains("handlers=10"), "{begins}");
    let ends = told("WARN", "are abandoned");
    for part in ["topic=hanging", "handlers=10", "oldest_offset=0"] {
        assert!(ends.contains(part), "{part}: {ends}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_with_dead_letters_that_were_not_written_is_no_all_clear() {
    let lines = Lines::collect();
    let cluster = cluster(&["unwritten", "unwritten.dlq"]);
    let refused = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED; 1_000];
    cluster.request_errors(RDKafkaApiKey::Produce, &refused);
    let builder = consumer(&cluster, "unwritten")
        .shutdown_timeout(millis(400))
        .dead_letter(DeadLetter::topic("unwritten.dlq"));
    let run = Running::start(builder, async |_: &Message<Text>| -> HandlerResult {
        Err("of no use").permanent()
    });
    until("trouble", || {
        !lines
            .with(&[
                "ERROR",
                "cannot be written",
                "dead_letter_topic=unwritten.dlq",
            ])
            .is_empty()
    })
    .await;
    assert_eq!(run.stop().await.unstarted, 10);
    let about = |what| {
        lines
            .with(&[what, "dead_letter_topic=unwritten.dlq"])
            .concat()
    };
    assert_eq!(about("no dead letter waits"), "");
    assert!(about("were not written").contains("unwritten=10"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_topic_that_is_missing_is_told_to_be_missing() {
    let lines = Lines::collect();
    let cluster = cluster(&["astray", "astray.dlq"]);
    let missing = RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART;
    cluster.topic_error("astray.dlq", missing).unwrap();
    let builder = consumer(&cluster, "astray")
        .shutdown_timeout(millis(400))
        .dead_letter(DeadLetter::topic("astray.dlq"));
    let run = Running::start(builder, async |_: &Message<Text>| -> HandlerResult {
        Err("of no use").permanent()
    });
    until("it to be told", || {
        !lines
            .with(&["ERROR", "topic `astray.dlq` does not exist: create it"])
            .is_empty()
    })
    .await;
    run.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_out_of_a_retry_topic_is_told_with_its_first_place() {
    let lines = Lines::collect();
    let cluster = cluster(&["tiers", "tiers.retry.1s", "tiers.dlq"]);
    let builder = consumer(&cluster, "tiers")
        .ordering(reliable_consumer::Ordering::Unordered)
        .retry(Retry::none())
        .retry_topics(RetryTopics::new([Duration::from_secs(1)]))
        .dead_letter(DeadLetter::topic("tiers.dlq"));
    let run = Running::start(builder, async |_: &Message<Text>| -> HandlerResult {
        Err("not yet")?
    });
    until("all to be dead-lettered", || {
        lines
            .with(&["dead-lettered", "topic=tiers.retry.1s "])
            .len()
            == 10
    })
    .await;
    run.stop().await;
    assert_eq!(lines.with(&["dead-lettered", "origin=tiers/0/7/"]).len(), 1);
}
