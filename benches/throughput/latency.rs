//! How soon a record reaches its handler, and what a consumer costs that has nothing to do: default settings.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rdkafka::{
    ClientConfig, Message as _,
    consumer::{Consumer, StreamConsumer},
    producer::{BaseRecord, DefaultProducerContext, Producer, ThreadedProducer},
};
use reliable_consumer::{Handler, HandlerResult, Message, Record, ReliableConsumer};
use reliable_consumer_testing::{Cluster, eventually, unique};

use crate::{Bound, judge, meter};

const LASTING: Duration = Duration::from_secs(10);
const EVERY: Duration = Duration::from_millis(5);

/// Notes when records come; they carry when they were produced.
struct Clock {
    began: Instant,
    seen: AtomicUsize,
    delays: Mutex<Vec<Duration>>,
}

struct Watch(Arc<Clock>);

impl Clock {
    fn start() -> Self {
        Self {
            began: Instant::now(),
            seen: AtomicUsize::new(0),
            delays: Mutex::default(),
        }
    }

    fn wait_for(&self, records: usize) {
        eventually("records", Duration::from_secs(30), || {
            self.seen.load(Ordering::Relaxed) >= records
        });
    }

    /// Prints how long records took, without the first, and returns median and 99th percentile in ms.
    fn print(&self, name: &str) -> [f64; 2] {
        let mut delays = self.delays.lock().expect("no holder panics").split_off(1);
        delays.sort_unstable();
        let at =
            |share: f64| delays[((delays.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3;
        let (median, p90, p99, longest) = (at(0.5), at(0.9), at(0.99), at(1.0));
        let count = delays.len();
        println!(
            "{name}: {count} records, median {median:.2} ms, p90 {p90:.2}, p99 {p99:.2}, longest {longest:.2}"
        );
        [median, p99]
    }

    fn note(&self, value: Option<&[u8]>) {
        let now = self.began.elapsed();
        let sent = value
            .and_then(|value| value.try_into().ok())
            .map(u64::from_le_bytes);
        let sent = Duration::from_nanos(sent.expect("a record carries its time"));
        self.delays
            .lock()
            .expect("no holder panics")
            .push(now.saturating_sub(sent));
        self.seen.fetch_add(1, Ordering::Relaxed);
    }
}

impl Handler<Record> for Watch {
    async fn handle(&self, message: &Message<Record>) -> HandlerResult {
        self.0.note(message.value());
        Ok(())
    }
}

/// Measures, prints, and tells whether the goals were met.
pub(crate) fn run(cluster: &Cluster) -> bool {
    let topic = cluster.create_topic("latency", 4, &[]);
    let clock = Arc::new(Clock::start());
    let runtime = tokio::runtime::Runtime::new().expect("a runtime can be built");
    let consumer = ReliableConsumer::builder()
        .bootstrap_servers(cluster.brokers())
        .group_id(unique("latency"))
        .topic(&topic)
        .build()
        .expect("these settings go together");
    let handle = consumer.handle();
    let running = runtime.spawn(consumer.run(Watch(Arc::clone(&clock))).into_future());

    // The first record shows that partitions are assigned; the producer is gone before CPU is counted.
    produce(cluster, &topic, &clock, Duration::ZERO);
    clock.wait_for(1);
    thread::sleep(Duration::from_secs(2));
    let (before, at) = (meter::cpu(), Instant::now());
    thread::sleep(LASTING);
    let idle = (meter::cpu() - before).as_secs_f64() / at.elapsed().as_secs_f64() * 100.0;

    // The same records through a bare loop, on the same clock: what is the client's, the broker's and the machine's.
    let bare = Arc::new(Clock {
        began: clock.began,
        ..Clock::start()
    });
    let looping = runtime.spawn(bare_loop(
        cluster.brokers().into(),
        topic.clone(),
        Arc::clone(&bare),
    ));
    bare.wait_for(1);
    let sent = produce(cluster, &topic, &clock, LASTING);
    clock.wait_for(sent + 1);
    bare.wait_for(sent + 1);
    looping.abort();
    handle.shutdown().expect("the consumer is running");
    runtime
        .block_on(running)
        .expect("a run does not panic")
        .expect("the cluster stays up");

    let [median, p99] = clock.print("reliable-consumer");
    bare.print("bare loop");
    println!("idle: {idle:.2} % of a core");
    let median = judge("latency-median-ms", median, &Bound::AtMost(5.0));
    let p99 = judge("latency-p99-ms", p99, &Bound::AtMost(15.0));
    let idle = judge("idle-cpu-percent", idle, &Bound::AtMost(1.0));
    median && p99 && idle
}

async fn bare_loop(brokers: String, topic: String, clock: Arc<Clock>) {
    let consumer: StreamConsumer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", unique("latency-bare"))
        .set("auto.offset.reset", "earliest")
        .set("fetch.wait.max.ms", "100")
        .create()
        .expect("these properties exist");
    consumer
        .subscribe(&[&topic])
        .expect("a topic's name can be subscribed to");
    loop {
        let message = consumer.recv().await.expect("the cluster stays up");
        clock.note(message.payload());
    }
}

/// One record, and then more at an even pace for as long as that. Returns how many.
fn produce(cluster: &Cluster, topic: &str, clock: &Clock, lasting: Duration) -> usize {
    let producer: ThreadedProducer<DefaultProducerContext> = ClientConfig::new()
        .set("bootstrap.servers", cluster.brokers())
        .set("linger.ms", "0")
        .create()
        .expect("these properties exist");
    // What connecting takes is not the consumer's.
    producer
        .client()
        .fetch_metadata(Some(topic), Duration::from_secs(10))
        .expect("the cluster is up");
    let (began, mut sent) = (Instant::now(), 0);
    loop {
        let key = format!("key-{}", sent % 100);
        let time = (clock.began.elapsed().as_nanos() as u64).to_le_bytes();
        let record = BaseRecord::to(topic).key(&key).payload(&time[..]);
        producer
            .send(record)
            .map_err(|(error, _)| error)
            .expect("the queue has room");
        sent += 1;
        if began.elapsed() >= lasting {
            break;
        }
        thread::sleep(EVERY);
    }
    producer
        .flush(Duration::from_secs(10))
        .expect("the cluster is up");
    sent
}
