//! Effects that happen once, under chaos: producers that send everything twice, `effects` processes that are killed again
//! and again, a store that is away for 20 s, records that fail for a while and come back from the dead-letter topic.
//!
//! `scripts/chaos --store` runs the last test, for as long as one likes.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod check;
#[path = "../chaos/misfortune.rs"]
mod misfortune;
mod processes;

use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use misfortune::{Random, SetOnDrop, now, variable};
use processes::Processes;
use rdkafka::{
    ClientConfig,
    message::{Header, OwnedHeaders},
    producer::{BaseRecord, DefaultProducerContext, Producer, ThreadedProducer},
};
use reliable_consumer::{Redriver, Retry, header_names};
use reliable_consumer_testing::{
    Cluster, Service, ServiceKind, cluster, eventually, own_service, unique,
};

const PARTITIONS: i32 = 6;
const ACCOUNTS: u64 = 10;
const OUTAGE: Duration = Duration::from_secs(20);

// P8
#[test]
fn with_the_inbox_every_row_is_there_once_whatever_dies() {
    let Some(cluster) = cluster() else { return };
    chaos(&cluster, Store::Inbox, Duration::from_secs(26));
}

// P6, P8
#[test]
fn with_redis_only_what_a_death_or_an_outage_kept_from_its_completion_happens_again() {
    let Some(cluster) = cluster() else { return };
    chaos(&cluster, Store::Redis, Duration::from_secs(26));
}

#[test]
#[ignore = "takes minutes: scripts/chaos runs it"]
fn for_as_long_as_one_likes() {
    let store = match variable::<String>("CHAOS_STORE").as_deref() {
        Some("redis") => Store::Redis,
        _ => Store::Inbox,
    };
    let minutes: f64 = variable("CHAOS_MINUTES").unwrap_or(2.0);
    let time = Duration::from_secs_f64(minutes * 60.0);
    chaos(&Cluster::start(1), store, time);
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Store {
    Inbox,
    Redis,
}

/// One run, and where all of it is.
struct Run<'a> {
    cluster: &'a Cluster,
    store: Store,
    url: String,
    /// What to tell of it, and how to have it again.
    name: String,
    group: String,
    topic: String,
    dlq: String,
}

/// When the store was away, in Unix milliseconds; `until` is [`u64::MAX`] while it lasts.
#[derive(Clone, Copy)]
struct Outage {
    from: u64,
    until: u64,
}

impl Outage {
    fn covers(&self, time: u64) -> bool {
        (self.from..=self.until).contains(&time)
    }
}

fn chaos(cluster: &Cluster, store: Store, time: Duration) {
    let kind = match store {
        Store::Inbox => ServiceKind::Postgres,
        Store::Redis => ServiceKind::Redis,
    };
    let Some(mut service) = own_service(kind) else {
        return;
    };
    let seed = variable("SEED").unwrap_or_else(now);
    let run = Run {
        cluster,
        store,
        url: service.url().to_owned(),
        name: format!("seed {seed}, {store:?}"),
        group: unique("effects"),
        // So that it shows when a record came back.
        topic: cluster.create_topic(
            "effects",
            PARTITIONS,
            &[("message.timestamp.type", "LogAppendTime")],
        ),
        dlq: cluster.create_topic("effects.dlq", 2, &[]),
    };
    println!("effects by {}", run.name);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    if store == Store::Inbox {
        runtime.block_on(check::prepare(&run));
    }
    let began = now();
    let redriver = Redriver::builder()
        .bootstrap_servers(cluster.brokers())
        .dead_letter_topic(&run.dlq)
        .allow(&run.topic)
        .backoff(Retry::exponential(
            Duration::from_millis(500),
            Duration::from_secs(2),
        ))
        .build()
        .unwrap();
    let redriving = redriver.handle();
    let redriven = runtime.spawn(redriver.run().into_future());

    let mut processes = Processes::new(&run, began);
    let outages = Mutex::new(Vec::new());
    let over = AtomicBool::new(false);
    let end = Instant::now() + time;
    let payments = thread::scope(|scope| {
        let stop = SetOnDrop(&over);
        let traffic = scope.spawn(|| run.produce_until(&over, Random::new(seed.rotate_left(32))));
        let trouble = scope.spawn(|| interrupt_until(&mut service, end, &over, &outages, began));
        processes.suffer_until(end, Random::new(seed), &outages);
        trouble.join().expect("the store comes back");
        drop(stop);
        traffic.join().expect("the brokers take the traffic")
    });
    eventually(
        "all to be handled, and all dead letters to be sent back",
        // Who is killed every other second falls behind, the more the longer it goes on.
        Duration::from_secs(60) + time,
        || {
            processes.assert_alive();
            run.is_over()
        },
    );
    tell(began, "all is handled");
    processes.end();
    redriving.shutdown().unwrap();
    let report = runtime.block_on(redriven).unwrap().unwrap();
    let outages = outages.into_inner().unwrap();
    let redriven = report.redriven_total();
    assert_eq!(report.parked_total(), 0, "{}", run.name);
    let figures = match store {
        Store::Inbox => runtime.block_on(check::rows(&run, payments)),
        Store::Redis => check::lines(&run, payments, &processes, &outages),
    };
    let repeats = check::sent_back_when_it_was_done(&run, &figures.effects);
    println!(
        "effects, {}: {payments} payments, sent twice; {} kills, {} outages of the store, {redriven} sent back from the \
         dead letters, {repeats} of them of payments that had gone through; {} effects, {} repeated ({} at most)",
        run.name,
        processes.kills(),
        outages.len(),
        figures.total,
        figures.repeated,
        figures.at_most,
    );
}

fn tell(began: u64, what: &str) {
    println!("{:>7} ms  {what}", now() - began);
}

/// Takes the store away now and then. It is back at the end.
fn interrupt_until(
    service: &mut Service,
    end: Instant,
    over: &AtomicBool,
    outages: &Mutex<Vec<Outage>>,
    began: u64,
) {
    let mut next = Instant::now() + Duration::from_secs(3);
    while next + OUTAGE < end && !over.load(Ordering::Relaxed) {
        thread::sleep(next.saturating_duration_since(Instant::now()));
        tell(began, "the store is away");
        let (from, until) = (now(), u64::MAX);
        outages.lock().unwrap().push(Outage { from, until });
        service.stop();
        thread::sleep(OUTAGE);
        service.start();
        tell(began, "the store is back");
        if let Some(outage) = outages.lock().unwrap().last_mut() {
            outage.until = now();
        }
        next = Instant::now() + Duration::from_secs(20);
    }
}

impl Run<'_> {
    /// Sends each payment twice: at once, or a while later. Says how many there were.
    fn produce_until(&self, over: &AtomicBool, mut random: Random) -> u64 {
        const BATCH: u64 = 6;
        let producer: ThreadedProducer<_> = ClientConfig::new()
            .set("bootstrap.servers", self.cluster.brokers())
            .set("acks", "all")
            .set("enable.idempotence", "true")
            .create_with_context(DefaultProducerContext)
            .unwrap();
        let send = |payment: u64, fails: u64| {
            let id = payment.to_string();
            let value = format!(r#"{{"account": {}, "fails": {fails}}}"#, payment % ACCOUNTS);
            let header = Header {
                key: header_names::MESSAGE_ID,
                value: Some(&id),
            };
            // Without a key: the two may be in different partitions, and with different processes at the same time.
            let record: BaseRecord<'_, (), String> = BaseRecord::to(&self.topic).payload(&value);
            let record = record.headers(OwnedHeaders::new().insert(header));
            producer.send(record).map_err(|(error, _)| error).unwrap();
        };
        // A few fail until they come back from the dead letters; most often only one of the two.
        let mut fails = move || match random.below(100) {
            0..6 => 1 + random.below(2),
            _ => 0,
        };
        let mut later = Vec::new();
        let mut next = 0;
        while !over.load(Ordering::Relaxed) {
            for payment in next..next + BATCH {
                send(payment, fails());
                match payment % 3 {
                    0 => send(payment, fails()),
                    _ => later.push(payment),
                }
            }
            next += BATCH;
            if later.len() > 100 {
                later
                    .drain(..100)
                    .for_each(|payment| send(payment, fails()));
            }
            thread::sleep(Duration::from_millis(100));
        }
        later.into_iter().for_each(|payment| send(payment, fails()));
        producer.flush(Duration::from_secs(60)).unwrap();
        next
    }

    /// Nothing is left to do in the topic nor in the dead letters, and what came back was the last.
    fn is_over(&self) -> bool {
        let finished = |group: &str, topic: &str, ends: &[i64]| {
            let committed = self.cluster.committed(group, topic).into_iter();
            let committed = committed.map(|it| it.offset.unwrap_or(0));
            committed.eq(ends.iter().copied())
        };
        let ends = self.cluster.end_offsets(&self.topic);
        finished(&self.group, &self.topic, &ends) && {
            let letters = self.cluster.end_offsets(&self.dlq);
            let redriver = format!("{}.redriver", self.dlq);
            finished(&redriver, &self.dlq, &letters)
                && self.cluster.end_offsets(&self.topic) == ends
        }
    }
}
