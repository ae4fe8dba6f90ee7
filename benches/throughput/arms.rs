//! The ways of consuming that are compared: loops as one writes them on rdkafka, and this library.

use std::{hint::black_box, sync::Arc, time::Duration};

use rdkafka::{
    ClientConfig, Message as _,
    consumer::{CommitMode, Consumer, StreamConsumer},
    message::Headers as _,
};
use reliable_consumer::{Handler, HandlerResult, Message, Ordering, Record, ReliableConsumer};
use tokio::{task::JoinSet, time::sleep};

use crate::meter::{Measured, Meter};

pub(crate) struct Arm {
    pub(crate) name: &'static str,
    pub(crate) subject: Subject,
    work: Work,
    pub(crate) data: Data,
}

#[derive(Clone, Copy)]
pub(crate) enum Subject {
    /// A loop that tracks and commits nothing, with the client's properties as this library ships them.
    Bare,
    /// The same with librdkafka's defaults, which let a consumer of small records idle between fetches.
    BareDefaults,
    /// A synchronous commit after each record.
    CommitEach,
    /// Fetch a hundred, handle them all at once, wait for the last, commit.
    Barrier,
    /// This library, with so many handlers in progress at a time.
    Ours(Ordering, usize),
    /// So many tasks that work and read nothing: what a runtime can do at best.
    Sleepers(usize),
}

impl Subject {
    pub(crate) fn commits(self) -> bool {
        matches!(self, Self::CommitEach | Self::Barrier | Self::Ours(..))
    }
}

/// The records that an arm reads.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Data {
    pub(crate) bytes: usize,
    pub(crate) headers: usize,
    fraction: usize,
}

impl Data {
    pub(crate) const PLAIN: Self = Self {
        bytes: 100,
        headers: 0,
        fraction: 1,
    };
    pub(crate) const HEADERS: Self = Self {
        bytes: 100,
        headers: 3,
        fraction: 2,
    };
    pub(crate) const KIB: Self = Self {
        bytes: 1024,
        headers: 0,
        fraction: 4,
    };

    /// Rates are comparable, so slow arms need not go on for long.
    pub(crate) const fn one_in(self, fraction: usize) -> Self {
        Self { fraction, ..self }
    }

    pub(crate) fn count(&self, records: usize) -> usize {
        (records / self.fraction).max(1)
    }
}

/// What a handler does with a record.
#[derive(Clone, Copy)]
pub(crate) enum Work {
    None,
    /// Waits a millisecond.
    Even,
    /// Waits a millisecond, and for one record in a hundred 100.
    Uneven,
}

impl Work {
    async fn on(self, partition: i32, offset: i64) {
        let millis = match self {
            Self::None => return,
            Self::Even => 1,
            Self::Uneven => {
                // The same records in every arm, in no pattern that a batch size could meet.
                let mixed = (offset as u64 * 4 + partition as u64)
                    .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                    >> 40;
                if mixed.is_multiple_of(100) { 100 } else { 1 }
            }
        };
        sleep(Duration::from_millis(millis)).await;
    }
}

impl Arm {
    pub(crate) const fn new(name: &'static str, subject: Subject, work: Work, data: Data) -> Self {
        Self {
            name,
            subject,
            work,
            data,
        }
    }

    pub(crate) fn run(&self, brokers: &str, topic: &str, group: &str, records: u64) -> Measured {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime can be built");
        let meter = Meter::new(records);
        let measured = meter.watch();
        let run = runtime.spawn(
            Run {
                work: self.work,
                reads_headers: self.data.headers > 0,
                brokers: brokers.into(),
                topic: topic.into(),
                group: group.into(),
                records,
                meter,
            }
            .of(self.subject),
        );
        let measured = runtime.block_on(async move {
            // Ours ends when it is told to, which is when all records are counted.
            let measured = tokio::task::spawn_blocking(move || measured.join()).await;
            run.await.expect("an arm does not panic");
            measured
        });
        measured
            .expect("the blocking pool lives")
            .expect("records keep coming")
    }
}

/// One run of an arm.
struct Run {
    work: Work,
    reads_headers: bool,
    brokers: String,
    topic: String,
    group: String,
    records: u64,
    meter: Arc<Meter>,
}

impl Run {
    async fn of(self, subject: Subject) {
        match subject {
            Subject::Bare => self.bare(&self.shipped()).await,
            Subject::BareDefaults => self.bare(&self.defaults()).await,
            Subject::CommitEach => self.commit_each().await,
            Subject::Barrier => self.barrier().await,
            Subject::Ours(ordering, concurrency) => self.ours(ordering, concurrency).await,
            Subject::Sleepers(count) => self.sleepers(count).await,
        }
    }

    fn defaults(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", &self.brokers)
            .set("group.id", &self.group)
            .set("auto.offset.reset", "earliest")
            .set("enable.auto.commit", "false");
        config
    }

    /// What this library sets for its own consumers.
    fn shipped(&self) -> ClientConfig {
        let mut config = self.defaults();
        config
            .set("fetch.queue.backoff.ms", "10")
            .set("fetch.wait.max.ms", "100")
            .set("queued.max.messages.kbytes", "4096");
        config
    }

    fn subscribe(&self, config: &ClientConfig) -> StreamConsumer {
        let consumer: StreamConsumer = config.create().expect("these properties exist");
        consumer
            .subscribe(&[&self.topic])
            .expect("a topic's name can be subscribed to");
        consumer
    }

    async fn bare(&self, config: &ClientConfig) {
        let consumer = self.subscribe(config);
        for _ in 0..self.records {
            let message = consumer.recv().await.expect("the cluster stays up");
            self.work.on(message.partition(), message.offset()).await;
            black_box(message.payload());
            if self.reads_headers {
                black_box(message.headers().map(|headers| headers.get(0).value));
            }
            self.meter.count();
        }
    }

    async fn commit_each(&self) {
        let consumer = self.subscribe(&self.shipped());
        for _ in 0..self.records {
            let message = consumer.recv().await.expect("the cluster stays up");
            self.work.on(message.partition(), message.offset()).await;
            black_box(message.payload());
            consumer
                .commit_message(&message, CommitMode::Sync)
                .expect("the cluster stays up");
            self.meter.count();
        }
    }

    async fn barrier(&self) {
        let consumer = self.subscribe(&self.shipped());
        let mut left = self.records;
        while left > 0 {
            let mut batch = JoinSet::new();
            let size = left.min(100);
            for _ in 0..size {
                let message = consumer.recv().await.expect("the cluster stays up");
                let (partition, offset, work) = (message.partition(), message.offset(), self.work);
                black_box(message.payload());
                batch.spawn(work.on(partition, offset));
            }
            while batch.join_next().await.is_some() {
                self.meter.count();
            }
            consumer
                .commit_consumer_state(CommitMode::Sync)
                .expect("the cluster stays up");
            left -= size;
        }
    }

    async fn ours(self, ordering: Ordering, concurrency: usize) {
        let consumer = ReliableConsumer::builder()
            .bootstrap_servers(&self.brokers)
            .group_id(&self.group)
            .topic(&self.topic)
            .ordering(ordering)
            .concurrency(concurrency)
            .build()
            .expect("these settings go together");
        let meter = Arc::clone(&self.meter);
        let all_counted = async move {
            while !meter.is_full() {
                sleep(Duration::from_millis(5)).await;
            }
        };
        let report = consumer.run(self).with_graceful_shutdown(all_counted).await;
        report.expect("the cluster stays up");
    }

    async fn sleepers(self, count: usize) {
        let run = Arc::new(self);
        let mut tasks = JoinSet::new();
        for _ in 0..count {
            let run = Arc::clone(&run);
            tasks.spawn(async move {
                while !run.meter.is_full() {
                    run.work.on(0, 0).await;
                    run.meter.count();
                }
            });
        }
        tasks.join_all().await;
    }
}

impl Handler<Record> for Run {
    async fn handle(&self, message: &Message<Record>) -> HandlerResult {
        self.work.on(message.partition(), message.offset()).await;
        black_box(message.value());
        if self.reads_headers {
            black_box(message.headers().get("header-0"));
        }
        self.meter.count();
        Ok(())
    }
}
