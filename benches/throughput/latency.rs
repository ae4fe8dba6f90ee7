//! How soon a record reaches its handler, and what a consumer costs that has nothing to do: default settings.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rdkafka::{
    ClientConfig,
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
    delays: std::sync::Mutex<Vec<Duration>>,
}

struct Watch(Arc<Clock>);

impl Handler<Record> for Watch {
    async fn handle(&self, message: &Message<Record>) -> HandlerResult {
        let now = self.0.began.elapsed();
        let sent = message
            .value()
            .and_then(|value| value.try_into().ok())
            .map(u64::from_le_bytes);
        let delay = now.saturating_sub(Duration::from_nanos(
            sent.ok_or("a record carries its time")?,
        ));
        self.0.delays.lock().expect("no holder panics").push(delay);
        self.0.seen.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Measures, prints, and tells whether the goals were met.
pub(crate) fn run(cluster: &Cluster) -> bool {
    let topic = cluster.create_topic("latency", 4, &[]);
    let clock = Arc::new(Clock {
        began: Instant::now(),
        seen: AtomicUsize::new(0),
        delays: Default::default(),
    });
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
    eventually("the first record", Duration::from_secs(30), || {
        clock.seen.load(Ordering::Relaxed) > 0
    });
    thread::sleep(Duration::from_secs(2));
    let (before, at) = (meter::cpu(), Instant::now());
    thread::sleep(LASTING);
    let idle = (meter::cpu() - before).as_secs_f64() / at.elapsed().as_secs_f64() * 100.0;

    let warm_up = clock.seen.load(Ordering::Relaxed);
    let sent = produce(cluster, &topic, &clock, LASTING);
    eventually("all records", Duration::from_secs(30), || {
        clock.seen.load(Ordering::Relaxed) == warm_up + sent
    });
    handle.shutdown().expect("the consumer is running");
    runtime
        .block_on(running)
        .expect("a run does not panic")
        .expect("the cluster stays up");

    let mut delays = clock
        .delays
        .lock()
        .expect("no holder panics")
        .split_off(warm_up);
    delays.sort_unstable();
    let at = |share: f64| delays[((delays.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3;
    println!(
        "from produce to handler, {} records: median {:.2} ms, p90 {:.2} ms, p99 {:.2} ms, longest {:.2} ms",
        delays.len(),
        at(0.5),
        at(0.9),
        at(0.99),
        at(1.0)
    );
    println!("idle: {idle:.2} % of a core");
    let median = judge("latency-median-ms", at(0.5), &Bound::AtMost(5.0));
    let p99 = judge("latency-p99-ms", at(0.99), &Bound::AtMost(15.0));
    let idle = judge("idle-cpu-percent", idle, &Bound::AtMost(1.0));
    median && p99 && idle
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
