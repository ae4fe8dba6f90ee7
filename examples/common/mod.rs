//! What the examples share: where Kafka is, topics to play with, records in them, knowing when all is done, whether it is as
//! it should be, and dying.

#![allow(dead_code)] // Each example uses a part of it.

use std::{
    error::Error,
    process::ExitCode,
    sync::atomic::{AtomicU32, Ordering::Relaxed},
    time::Duration,
};

use rdkafka::{
    ClientConfig,
    admin::{AdminClient, AdminOptions, NewTopic, TopicReplication},
    client::DefaultClientContext,
    error::RDKafkaErrorCode,
    producer::{FutureProducer, FutureRecord},
};
use reliable_consumer::ConsumerHandle;

pub type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

pub fn brokers() -> String {
    std::env::var("KAFKA_BROKERS").unwrap_or_else(|_| "localhost:9092".into())
}

fn client() -> ClientConfig {
    let mut client = ClientConfig::new();
    client.set("bootstrap.servers", brokers());
    client
}

/// Creates the topics that do not exist yet.
pub async fn create_topics<const N: usize>(names: [&str; N], partitions: i32) -> Result<()> {
    let admin: AdminClient<DefaultClientContext> = client().create()?;
    // As many replicas as the cluster makes by default.
    let topics = names.map(|name| NewTopic::new(name, partitions, TopicReplication::Fixed(-1)));
    let within = AdminOptions::new().operation_timeout(Some(Duration::from_secs(10)));
    for created in admin.create_topics(&topics, &within).await? {
        match created {
            Ok(_) | Err((_, RDKafkaErrorCode::TopicAlreadyExists)) => {}
            Err((topic, error)) => return Err(format!("topic {topic}: {error}").into()),
        }
    }
    Ok(())
}

/// Writes these keys and values, and returns when the brokers have them all.
pub async fn produce<K: AsRef<str>, V: AsRef<str>>(
    topic: &str,
    records: impl IntoIterator<Item = (K, V)>,
) -> Result<()> {
    let producer: FutureProducer = client().set("acks", "all").create()?;
    let mut sent = Vec::new();
    for (key, value) in records {
        let record = FutureRecord::to(topic).key(key.as_ref());
        let record = record.payload(value.as_ref());
        sent.push(producer.send_result(record).map_err(|(error, _)| error)?);
    }
    for delivery in sent {
        delivery.await?.map_err(|(error, _)| error)?;
    }
    Ok(())
}

/// Completes when everything in the consumer's partitions is finished and committed, or after 20 s.
pub async fn caught_up(handle: ConsumerHandle) {
    for _ in 0..200 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let Ok(status) = handle.status().await else {
            continue;
        };
        if status.is_caught_up() {
            return;
        }
    }
}

/// Runs an example that checks itself: the code is 0, or it says what is not as it should be. Taking too long is not.
pub async fn checked(seconds: u64, telling: impl Future<Output = Result<()>>) -> Result<ExitCode> {
    let told = tokio::time::timeout(Duration::from_secs(seconds), telling).await;
    let told = told.map_err(|_| format!("it takes longer than {seconds} s"))?;
    Ok(match told {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("not as it should be: {error}");
            ExitCode::FAILURE
        }
    })
}

/// Ends the process when it has come to a place for the hundredth time.
pub struct Crash {
    place: String,
    times: AtomicU32,
}

impl Crash {
    pub fn at(place: String) -> Self {
        let times = AtomicU32::new(0);
        Self { place, times }
    }

    pub fn here(&self, place: &str) {
        if self.place == place && self.times.fetch_add(1, Relaxed) == 99 {
            std::process::abort();
        }
    }
}
