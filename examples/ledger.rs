//! A proof tool: writes a line for each record it handles, so that what was lost or repeated can be counted afterwards,
//! whatever was done to brokers and processes meanwhile.
//!
//! Each line is `partition<TAB>offset<TAB>key<TAB>value<TAB>unix_ms`, appended in one write before the record counts as
//! finished. SIGTERM and SIGINT end it in order, a second one at once.

use std::{
    fs::{File, OpenOptions},
    io::Write,
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use clap::{Parser, ValueEnum};
use reliable_consumer::{
    ConsumerHandle, DeadLetter, Handler, HandlerResult, Message, Ordering, Record,
    ReliableConsumer, Retry,
};
use tokio::signal::unix::{SignalKind, signal};

#[derive(Parser)]
struct Options {
    #[arg(long, env = "KAFKA_BROKERS", default_value = "localhost:9092")]
    brokers: String,
    #[arg(long)]
    group: String,
    #[arg(long)]
    topic: String,
    /// The file that lines are appended to
    #[arg(long)]
    ledger: PathBuf,
    #[arg(long, value_enum, default_value = "key")]
    ordering: Order,
    #[arg(long, default_value_t = 64)]
    concurrency: usize,
    /// How long a handler works, as MIN..MAX in milliseconds
    #[arg(long, value_parser = range, default_value = "0..0")]
    work_ms: (u64, u64),
    /// Of 100 values, how many fail at every attempt
    #[arg(long, default_value_t = 0)]
    fail_percent: u32,
    #[arg(long)]
    dlq: Option<String>,
    /// A librdkafka property
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = property)]
    properties: Vec<(String, String)>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Order {
    Key,
    Partition,
    Unordered,
}

fn range(text: &str) -> Result<(u64, u64), String> {
    let (from, to) = text.split_once("..").ok_or("expected MIN..MAX")?;
    let number = |text: &str| text.parse().map_err(|error| format!("{text}: {error}"));
    Ok((number(from)?, number(to)?))
}

fn property(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("expected KEY=VALUE")?;
    Ok((name.into(), value.into()))
}

struct Ledger {
    file: File,
    work_ms: (u64, u64),
    fail_percent: u32,
}

impl Handler<Record> for Ledger {
    async fn handle(&self, message: &Message<Record>) -> HandlerResult {
        let value = message.value().unwrap_or_default();
        let hash = crc32fast::hash(value);
        if hash % 100 < self.fail_percent {
            return Err("told to fail".into());
        }
        let (least, most) = self.work_ms;
        let work = least + u64::from(hash) % (most.saturating_sub(least) + 1);
        if work > 0 {
            tokio::time::sleep(Duration::from_millis(work)).await;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
        let line = format!(
            "{}\t{}\t{}\t{}\t{now}\n",
            message.partition(),
            message.offset(),
            String::from_utf8_lossy(message.key().unwrap_or_default()),
            String::from_utf8_lossy(value),
        );
        // One write in append mode: lines of several processes never mix.
        if (&self.file).write(line.as_bytes())? < line.len() {
            return Err("the ledger took only a part of a line".into());
        }
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let options = Options::parse();
    let mut builder = ReliableConsumer::builder()
        .bootstrap_servers(options.brokers)
        .group_id(options.group)
        .topic(options.topic)
        .concurrency(options.concurrency)
        .ordering(match options.ordering {
            Order::Key => Ordering::ByKey,
            Order::Partition => Ordering::ByPartition,
            Order::Unordered => Ordering::Unordered,
        })
        .retry(
            Retry::exponential(Duration::from_millis(20), Duration::from_secs(1)).max_attempts(3),
        );
    if let Some(topic) = options.dlq {
        builder = builder.dead_letter(DeadLetter::topic(topic));
    }
    for (name, value) in options.properties {
        builder = builder.property(name, value);
    }
    let consumer = builder.build()?;
    let file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&options.ledger)?;
    let ledger = Ledger {
        file,
        work_ms: options.work_ms,
        fail_percent: options.fail_percent,
    };
    let handle = consumer.handle();
    tokio::spawn(obey_signals(handle));
    let report = consumer.run(ledger).await?;
    eprintln!("{report:#?}");
    Ok(())
}

/// The first signal asks for an orderly end, the second for an immediate one.
async fn obey_signals(handle: ConsumerHandle) -> std::io::Result<()> {
    let (mut terminate, mut interrupt) = (
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    );
    for urgent in [false, true] {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        let _ = if urgent {
            handle.stop_now()
        } else {
            handle.shutdown()
        };
    }
    Ok(())
}
