//! A proof tool: gives payments an effect that can be counted afterwards, whatever was done to processes, brokers and stores
//! meanwhile.
//!
//! A payment is JSON, `{"account": 3, "fails": 1}`, and tells on how many trips through the topic it fails. With `--store
//! inbox` its effect is a row in the table `effects` and one more on its account, in the transaction of the inbox's marker.
//! With `--store redis` it is a line `message id<TAB>unix_ms` in the file of `--effects`. With `none` it is the same line,
//! and nothing keeps it from being written twice. SIGTERM ends the process in order.

use std::{
    fs::{File, OpenOptions},
    io::Write,
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use clap::{Parser, ValueEnum};
use reliable_consumer::{
    DeadLetter, Handler, HandlerResult, Json, Message, ReliableConsumer, ResultExt, Retry,
    idempotency::{Idempotency, RedisStore, inbox::Inbox},
};
use sqlx::{PgPool, postgres::PgPoolOptions};
use tokio::{
    signal::unix::{SignalKind, signal},
    time::sleep,
};

#[derive(Parser)]
struct Options {
    #[arg(long, env = "KAFKA_BROKERS", default_value = "localhost:9092")]
    brokers: String,
    #[arg(long)]
    group: String,
    #[arg(long)]
    topic: String,
    #[arg(long)]
    dlq: String,
    #[arg(long, default_value_t = 16)]
    concurrency: usize,
    #[arg(long, value_enum)]
    store: Store,
    /// Where the store is
    #[arg(long)]
    url: Option<String>,
    /// The file that effects are appended to
    #[arg(long)]
    effects: Option<PathBuf>,
    /// A librdkafka property
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = property)]
    properties: Vec<(String, String)>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Store {
    Inbox,
    Redis,
    None,
}

fn property(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("expected KEY=VALUE")?;
    Ok((name.into(), value.into()))
}

#[derive(serde::Deserialize)]
struct Payment {
    account: i64,
    fails: u32,
}

/// Some time for work, from 0 to 20 ms, so that deaths come in the middle of it.
async fn work(message: &Message<Json<Payment>>) {
    let work = crc32fast::hash(message.message_id().as_bytes()) % 21;
    sleep(Duration::from_millis(work.into())).await;
}

fn outcome(message: &Message<Json<Payment>>) -> HandlerResult {
    if message.retry_count() < message.payload().fails {
        return Err("told to fail".into());
    }
    Ok(())
}

/// Effects in the database of the inbox.
struct Rows {
    pool: PgPool,
    inbox: Inbox,
}

impl Handler<Json<Payment>> for Rows {
    async fn handle(&self, message: &Message<Json<Payment>>) -> HandlerResult {
        let mut transaction = self.pool.begin().await.outage()?;
        let id = message.message_id();
        let arrival = self.inbox.begin(&mut transaction, &id).await.outage()?;
        if arrival.is_repeat() {
            return Ok(());
        }
        sqlx::query("INSERT INTO effects (id) VALUES ($1)")
            .bind(&id)
            .execute(&mut *transaction)
            .await
            .outage()?;
        work(message).await;
        sqlx::query("UPDATE accounts SET payments = payments + 1 WHERE id = $1")
            .bind(message.payload().account)
            .execute(&mut *transaction)
            .await
            .outage()?;
        // Marker and rows go with the transaction.
        outcome(message)?;
        transaction.commit().await.outage()
    }
}

/// Effects that no transaction spans.
struct Lines(File);

impl Handler<Json<Payment>> for Lines {
    async fn handle(&self, message: &Message<Json<Payment>>) -> HandlerResult {
        work(message).await;
        outcome(message)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
        let line = format!("{}\t{now}\n", message.message_id());
        if (&self.0).write(line.as_bytes())? < line.len() {
            return Err("the file took only a part of a line".into());
        }
        // From the effect to the moment when its process knows of it: who dies here has it again.
        work(message).await;
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
        .group_id(&options.group)
        .topic(options.topic)
        .concurrency(options.concurrency)
        .dead_letter(DeadLetter::topic(options.dlq))
        .retry(
            Retry::exponential(Duration::from_millis(20), Duration::from_secs(1)).max_attempts(2),
        );
    for (name, value) in options.properties {
        builder = builder.property(name, value);
    }
    let mut terminate = signal(SignalKind::terminate())?;
    let stop = async move {
        terminate.recv().await;
    };
    let url = || options.url.as_deref().ok_or("this store needs --url");
    let report = if options.store == Store::Inbox {
        let pool = PgPoolOptions::new()
            .max_connections(u32::try_from(options.concurrency)?)
            // Rather wait for the breaker than here.
            .acquire_timeout(Duration::from_secs(2))
            .connect_lazy(url()?)?;
        let inbox = Inbox::new(&options.group);
        let consumer = builder.build()?;
        let run = consumer.run(Rows { pool, inbox });
        run.with_graceful_shutdown(stop).await?
    } else {
        let file = options.effects.ok_or("this store needs --effects")?;
        let file = OpenOptions::new().create(true).append(true).open(file)?;
        if options.store == Store::Redis {
            let store = Idempotency::new(RedisStore::connect(url()?)?);
            // What a death leaves behind is waited for here.
            builder = builder.idempotency(store.lease(Duration::from_secs(4)));
        }
        let consumer = builder.build()?;
        let run = consumer.run(Lines(file));
        run.with_graceful_shutdown(stop).await?
    };
    eprintln!("{report:#?}");
    Ok(())
}
