//! The whole story in a few seconds, without a broker: sign-ups arrive, the database goes away for a while, some records
//! are poison, and the service is stopped in the middle and started again. Then the topics are counted.
//!
//! The cluster is librdkafka's mock, in this process: good to try things out, and no proof of durability. For that see
//! `scripts/test`, which runs the same kind of story against real brokers that are killed.

use std::{
    collections::HashMap,
    error::Error,
    io::IsTerminal,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rdkafka::{
    ClientConfig, Message as _, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer as _},
    mocking::MockCluster,
    producer::{FutureProducer, FutureRecord},
};
use reliable_consumer::{
    Classification, ConsumerHandle, DeadLetter, DynError, Handler, HandlerResult, Json, Message,
    Record, ReliableConsumer, Report, ResultExt, Retry, RunError, find_error,
};
use tokio::{task::JoinHandle, time::sleep};

const SIGN_UPS: usize = 3_000;
const PARTITIONS: i32 = 4;

#[derive(serde::Deserialize)]
struct SignUp {
    id: usize,
    email: String,
}

#[derive(Debug, thiserror::Error)]
#[error("the database is down")]
struct DatabaseDown;

/// The service: "inserts" a sign-up, and sends a welcome to the output topic.
#[derive(Clone)]
struct Register {
    database_down: Arc<AtomicBool>,
    output: FutureProducer,
    progress: Progress,
}

impl Handler<Json<SignUp>> for Register {
    async fn handle(&self, message: &Message<Json<SignUp>>) -> HandlerResult {
        let SignUp { id, email } = &**message.payload();
        if self.database_down.load(Relaxed) {
            Err(DatabaseDown)?;
        }
        email
            .split_once('@')
            .ok_or("not an e-mail address")
            .permanent()?;
        sleep(Duration::from_millis(2)).await;
        let id = id.to_string();
        let welcome = FutureRecord::to("welcomes").key(email).payload(&id);
        self.output
            .send(welcome, Duration::from_secs(5))
            .await
            .map_err(|(error, _)| error)?;
        self.progress.step();
        Ok(())
    }
}

/// One instance of the service. An outage is waited out; whatever else fails is given up after five attempts.
fn start(servers: &str, register: Register) -> Result<Service, Box<dyn Error>> {
    let consumer = ReliableConsumer::builder()
        .bootstrap_servers(servers)
        .group_id("sign-up-service")
        .topic("sign-ups")
        .retry(
            Retry::exponential(Duration::from_millis(50), Duration::from_millis(500))
                .max_attempts(5),
        )
        .classifier(
            |error: &DynError, _: &Record| match find_error::<DatabaseDown>(error) {
                Some(_) => {
                    let patient =
                        Retry::exponential(Duration::from_millis(50), Duration::from_millis(500));
                    Classification::retry().backoff(patient.unlimited_attempts())
                }
                None => Classification::retry(),
            },
        )
        .dead_letter(DeadLetter::topic("sign-ups.dlq"))
        .property("group.protocol", "consumer")
        .build()?;
    let handle = consumer.handle();
    Ok(Service {
        handle,
        run: tokio::spawn(consumer.run(register).into_future()),
    })
}

struct Service {
    handle: ConsumerHandle,
    run: JoinHandle<Result<Report, RunError>>,
}

impl Service {
    async fn stop(self) -> Result<Report, Box<dyn Error>> {
        self.handle.shutdown()?;
        Ok(self.run.await??)
    }
}

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let cluster = MockCluster::new(3)?;
    for topic in ["sign-ups", "sign-ups.dlq", "welcomes"] {
        cluster.create_topic(topic, PARTITIONS, 3)?;
    }
    let servers = cluster.bootstrap_servers();
    let producer: FutureProducer = ClientConfig::new()
        .set("bootstrap.servers", &servers)
        .set("acks", "all")
        .set("linger.ms", "2")
        .create()?;
    let progress = Progress::new(SIGN_UPS as u64);
    let register = Register {
        database_down: Arc::default(),
        output: producer.clone(),
        progress: progress.clone(),
    };

    let arriving = tokio::spawn(sign_ups_arrive(producer));
    let service = start(&servers, register.clone())?;
    until(async || Ok(progress.so_far() >= 600)).await?;

    progress.say("the database goes down");
    register.database_down.store(true, Relaxed);
    until(async || {
        let status = service.handle.status().await?;
        Ok(status
            .partitions
            .iter()
            .any(|partition| partition.retrying > 0))
    })
    .await?;
    sleep(Duration::from_secs(1)).await;
    progress.say("the database is back");
    register.database_down.store(false, Relaxed);
    sleep(Duration::from_millis(150)).await;

    progress.say("the service is stopped in the middle of its work");
    let first = service.stop().await?;
    progress.say("the service is started again");
    let service = start(&servers, register)?;
    arriving.await??;
    all_committed(&service.handle).await?;
    let second = service.stop().await?;
    progress.finish();

    let welcomes = ids(&servers, "welcomes", |record| {
        String::from_utf8_lossy(record.payload()?).parse().ok()
    })?;
    let dead = ids(&servers, "sign-ups.dlq", |record| {
        String::from_utf8_lossy(record.key()?).parse().ok()
    })?;
    let produced = ids(&servers, "sign-ups", |record| {
        String::from_utf8_lossy(record.key()?).parse().ok()
    })?;
    let lost = produced
        .keys()
        .filter(|id| !welcomes.contains_key(id) && !dead.contains_key(id))
        .count();
    let repeated: usize = welcomes
        .values()
        .chain(dead.values())
        .map(|times| times - 1)
        .sum();
    println!("\n{:<34}{:>10}{:>10}", "", "1st run", "2nd run");
    for (what, of) in [
        ("handled", (|report| report.handled) as fn(&Report) -> u64),
        ("failed attempts, tried again", |report| report.retried),
        ("dead letters", |report| report.dead_lettered),
        ("read, left for the next run", |report| report.unstarted),
    ] {
        println!("{what:<34}{:>10}{:>10}", of(&first), of(&second));
    }
    println!(
        "quickstart: produced={} handled={} dead_lettered={} lost={lost} repeated={repeated}",
        produced.len(),
        welcomes.len(),
        dead.len(),
    );
    // Nothing is shown by a first run that handled nothing, or by an outage that nobody noticed.
    let told = first.handled > 0 && first.retried > 0 && second.handled > 0;
    let good = told && lost == 0 && repeated == 0 && produced.len() == SIGN_UPS;
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        eprintln!("quickstart: this is not the story that it should tell");
        ExitCode::FAILURE
    })
}

/// Sign-ups come in over about four seconds. One in fifty is no JSON, one in a hundred has no e-mail address.
async fn sign_ups_arrive(producer: FutureProducer) -> Result<(), rdkafka::error::KafkaError> {
    let mut last = Vec::new();
    for id in 0..SIGN_UPS {
        let value = match id % 100 {
            13 | 63 => "{ not json".to_owned(),
            42 => format!(r#"{{"id":{id},"email":"nobody"}}"#),
            _ => format!(r#"{{"id":{id},"email":"user{id}@example.com"}}"#),
        };
        let key = id.to_string();
        let record = FutureRecord::to("sign-ups").key(&key).payload(&value);
        last.push(producer.send_result(record).map_err(|(error, _)| error)?);
        if id % 15 == 14 {
            sleep(Duration::from_millis(20)).await;
        }
    }
    for delivery in last {
        delivery
            .await
            .expect("the producer lives")
            .map_err(|(error, _)| error)?;
    }
    Ok(())
}

/// Waits until everything is finished and committed. What the service knows of the end of the topic may be a second old.
async fn all_committed(handle: &ConsumerHandle) -> Result<(), Box<dyn Error>> {
    until(async || {
        let status = handle.status().await?;
        let committed = status
            .partitions
            .iter()
            .filter_map(|partition| partition.committed);
        Ok(committed.sum::<i64>() == SIGN_UPS as i64)
    })
    .await
}

async fn until(so: impl AsyncFn() -> Result<bool, Box<dyn Error>>) -> Result<(), Box<dyn Error>> {
    let deadline = Instant::now() + Duration::from_secs(10);
    while Instant::now() < deadline {
        if so().await? {
            return Ok(());
        }
        sleep(Duration::from_millis(50)).await;
    }
    Err("the service does not get on: it should take seconds".into())
}

/// How often each id is in a topic, read from the beginning.
fn ids(
    servers: &str,
    topic: &str,
    id: fn(&rdkafka::message::BorrowedMessage<'_>) -> Option<usize>,
) -> Result<HashMap<usize, usize>, Box<dyn Error>> {
    let reader: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", servers)
        .set("group.id", "count")
        .create()?;
    let mut assignment = TopicPartitionList::new();
    let mut left = 0;
    for partition in 0..PARTITIONS {
        let (low, high) = reader.fetch_watermarks(topic, partition, Duration::from_secs(5))?;
        left += high - low;
        assignment.add_partition_offset(topic, partition, Offset::Beginning)?;
    }
    reader.assign(&assignment)?;
    let mut ids = HashMap::new();
    while left > 0 {
        let record = reader
            .poll(Duration::from_secs(5))
            .ok_or("a topic could not be read back")??;
        *ids.entry(id(&record).ok_or("a record without an id")?)
            .or_default() += 1;
        left -= 1;
    }
    Ok(ids)
}

/// A bar on a terminal, plain lines elsewhere.
#[derive(Clone)]
struct Progress(ProgressBar);

impl Progress {
    fn new(length: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::stderr());
        let style =
            ProgressStyle::with_template("{bar:40} {pos:>5}/{len} welcomed {per_sec} {msg}");
        bar.set_style(style.expect("the template is well formed"));
        Self(bar)
    }

    fn step(&self) {
        self.0.inc(1);
    }

    fn so_far(&self) -> u64 {
        self.0.position()
    }

    fn say(&self, what: &'static str) {
        self.0.set_message(what);
        if !std::io::stderr().is_terminal() {
            println!("{:>5} welcomed: {what}", self.0.position());
        }
    }

    fn finish(&self) {
        self.say("all is handled");
        self.0.finish();
    }
}
