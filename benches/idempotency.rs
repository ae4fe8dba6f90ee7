//! What remembering costs: claim and complete in each store, and a transaction with the inbox, beside the same server's own
//! speed in the same rounds.
//!
//! ```text
//! cargo bench --bench idempotency --features redis,postgres,mysql,sqlite
//! cargo bench --bench idempotency --features redis,postgres,mysql,sqlite -- --quick
//! ```
//!
//! The servers are those of `REDIS_URL`, `POSTGRES_URL` and `MYSQL_URL`, or are started from the system's packages, and
//! sync what they write. A store is compared with as many plain commands over the same connections: `SET` and `SET`,
//! pipelined alike, or `INSERT` and `UPDATE`. The inbox is compared with the same transaction without it. The two take turns
//! within a round, and the ratio is the median of those of the rounds.
//!
//! `consumer-redis`, where `KAFKA_BROKERS` names some, is a whole consumer with 64 handlers that take 1 ms, from the first
//! record to the last, beside one without a store.

use std::{
    pin::Pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use clap::Parser;
use reliable_consumer::{
    Bytes, HandlerResult, Message, ReliableConsumer,
    idempotency::{
        Claim, Id, MemoryStore, MySqlStore, PostgresStore, RedisStore, SqliteStore, Store, Update,
        inbox::Inbox,
    },
};
use reliable_consumer_testing::{Cluster, Record, ServiceKind, cluster, service, unique};
use sqlx::{
    MySqlPool, PgPool, SqlitePool,
    mysql::MySqlPoolOptions,
    postgres::PgPoolOptions,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions},
};

/// Connections of each pool: what a service would have.
const CONNECTIONS: u32 = 32;
const LEASE: Duration = Duration::from_secs(60);
const KEEP_FOR: Duration = Duration::from_secs(3_600);

#[derive(Parser)]
struct Options {
    /// One short round
    #[arg(long)]
    quick: bool,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Only these: memory, redis, postgres, mariadb, sqlite, inbox-postgres, inbox-in-one, inbox-mariadb, inbox-sqlite,
    /// consumer-redis
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// `cargo bench` says so
    #[arg(long, hide = true)]
    bench: bool,
}

/// One piece of work with an id that is new.
type Work = Arc<dyn Fn(u64) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

struct Pair {
    name: &'static str,
    subject: Work,
    plain: Work,
}

#[tokio::main]
async fn main() {
    let options = Options::parse();
    let (rounds, time) = if options.quick {
        (1, Duration::from_millis(300))
    } else {
        (options.rounds, Duration::from_secs(1))
    };
    println!(
        "{:<16}{:>12}{:>14}{:>14}{:>8}   of the rounds",
        "", "concurrency", "ours/s", "plain/s", "ratio"
    );
    for pair in pairs(&options.only).await {
        for concurrency in [1, 64, 512] {
            // Connections, caches and scripts.
            measure(&pair.plain, concurrency, time / 5).await;
            measure(&pair.subject, concurrency, time / 5).await;
            let mut measured = Vec::new();
            for _ in 0..rounds {
                let plain = measure(&pair.plain, concurrency, time).await;
                let subject = measure(&pair.subject, concurrency, time).await;
                measured.push((subject / plain, subject, plain));
            }
            measured.sort_by(|one, other| one.0.total_cmp(&other.0));
            print(pair.name, concurrency, &measured);
        }
    }
    if wanted(&options.only, "consumer-redis")
        && let (Some(cluster), Some(redis)) = (cluster(), service(ServiceKind::Redis))
    {
        let records = if options.quick { 5_000 } else { 50_000 };
        let topic = cluster.create_topic("bench", 4, &[]);
        let all = (0..records).map(|n| Record::value("x").header("messageId", n.to_string()));
        cluster.produce(&topic, all);
        let mut measured = Vec::new();
        for _ in 0..rounds {
            let plain = consume(&cluster, &topic, records, None).await;
            let store = RedisStore::connect(redis.url()).expect("the url is well-formed");
            let subject = consume(&cluster, &topic, records, Some(store)).await;
            measured.push((subject / plain, subject, plain));
        }
        measured.sort_by(|one, other| one.0.total_cmp(&other.0));
        print("consumer-redis", HANDLERS, &measured);
    }
}

/// What was measured, sorted by the ratio.
fn print(name: &str, concurrency: usize, measured: &[(f64, f64, f64)]) {
    let (ratio, subject, plain) = measured[measured.len() / 2];
    println!(
        "{name:<16}{concurrency:>12}{subject:>14.0}{plain:>14.0}{ratio:>8.2}   {:.2} to {:.2}",
        measured[0].0,
        measured[measured.len() - 1].0
    );
}

fn wanted(only: &[String], name: &str) -> bool {
    only.is_empty() || only.iter().any(|it| it == name)
}

const HANDLERS: usize = 64;

/// Records a second, by a new group, whose ids are new to the store.
async fn consume(cluster: &Cluster, topic: &str, records: usize, store: Option<RedisStore>) -> f64 {
    let mut builder = ReliableConsumer::builder()
        .bootstrap_servers(cluster.brokers())
        .group_id(unique("bench"))
        .topic(topic)
        .concurrency(HANDLERS);
    if let Some(store) = store {
        builder = builder.idempotency(store);
    }
    let consumer = builder.build().expect("the options are right");
    let handle = consumer.handle();
    let handled = Arc::new(AtomicU64::new(0));
    let (start, count) = (Arc::new(OnceLock::new()), Arc::clone(&handled));
    let began = Arc::clone(&start);
    let handler = async move |_: &Message<Bytes>| -> HandlerResult {
        began.get_or_init(Instant::now);
        tokio::time::sleep(Duration::from_millis(1)).await;
        count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    };
    let run = tokio::spawn(consumer.run(handler).into_future());
    while handled.load(Ordering::Relaxed) < records as u64 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let start: &Instant = start.get().expect("some were handled");
    let took = start.elapsed();
    handle.shutdown().expect("it runs");
    let report = run.await.expect("it does not panic").expect("it ends well");
    assert_eq!(report.handled, records as u64);
    records as f64 / took.as_secs_f64()
}

/// Pieces of work a second, by so many at a time for so long.
async fn measure(work: &Work, concurrency: usize, time: Duration) -> f64 {
    // New ids over all measurements.
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let start = Instant::now();
    let tasks: Vec<_> = (0..concurrency)
        .map(|_| {
            let work = work.clone();
            tokio::spawn(async move {
                let mut done = 0_u32;
                while start.elapsed() < time {
                    work(NEXT.fetch_add(1, Ordering::Relaxed)).await;
                    done += 1;
                }
                done
            })
        })
        .collect();
    let mut done = 0.0;
    for task in tasks {
        done += f64::from(task.await.expect("the work succeeds"));
    }
    done / start.elapsed().as_secs_f64()
}

fn work<F>(work: impl Fn(u64) -> F + Send + Sync + 'static) -> Work
where
    F: Future<Output = ()> + Send + 'static,
{
    Arc::new(move |n| Box::pin(work(n)))
}

fn of_store(store: impl Store) -> Work {
    let store: Arc<dyn Store> = Arc::new(store);
    let group = unique("bench");
    work(move |n| {
        let store = store.clone();
        let id = Id::new("bench", &group, n.to_string());
        async move {
            let claim = store.claim(&id, LEASE).await.expect("the store answers");
            let Claim::Claimed(token) = claim else {
                panic!("{id:?} is new, not {claim:?}")
            };
            let update = store.complete(&id, &token, KEEP_FOR, None).await;
            assert_eq!(update.expect("the store answers"), Update::Applied);
        }
    })
}

async fn pairs(only: &[String]) -> Vec<Pair> {
    let wanted = |name: &str| wanted(only, name);
    let mut pairs = Vec::new();
    if wanted("memory") {
        pairs.push(Pair {
            name: "memory",
            subject: of_store(MemoryStore::new(100_000)),
            plain: work(async |_| tokio::task::yield_now().await),
        });
    }
    if wanted("redis")
        && let Some(service) = service(ServiceKind::Redis)
    {
        pairs.push(redis_pair(service.url()).await);
    }
    if ["postgres", "inbox-postgres", "inbox-in-one"]
        .into_iter()
        .any(&wanted)
        && let Some(service) = service(ServiceKind::Postgres)
    {
        let pool = PgPoolOptions::new().max_connections(CONNECTIONS);
        let pool = pool.connect(service.url()).await.expect("it answers");
        let store = PostgresStore::new(pool.clone());
        store.create_table().await.expect("tables can be made");
        let in_one = in_one_statement(pool.clone());
        let of_it = postgres::pairs(pool, of_store(store)).await;
        let of_it = of_it.into_iter().chain([in_one]);
        pairs.extend(of_it.filter(|it| wanted(it.name)));
    }
    if (wanted("mariadb") || wanted("inbox-mariadb"))
        && let Some(service) = service(ServiceKind::MariaDb)
    {
        let pool = MySqlPoolOptions::new().max_connections(CONNECTIONS);
        let pool = pool.connect(service.url()).await.expect("it answers");
        let store = MySqlStore::new(pool.clone());
        store.create_table().await.expect("tables can be made");
        let of_it = mariadb::pairs(pool, of_store(store)).await;
        pairs.extend(of_it.into_iter().filter(|it| wanted(it.name)));
    }
    if wanted("sqlite") || wanted("inbox-sqlite") {
        let options = SqliteConnectOptions::new()
            .filename(std::env::temp_dir().join(unique("bench") + ".sqlite"))
            .create_if_missing(true)
            .busy_timeout(LEASE)
            .journal_mode(SqliteJournalMode::Wal);
        // One writes at a time: more would only wait for each other in worse ways.
        let pool = SqlitePoolOptions::new()
            .max_connections(1)
            .acquire_timeout(LEASE);
        let pool = pool
            .connect_with(options)
            .await
            .expect("files can be made there");
        let store = SqliteStore::new(pool.clone());
        store.create_table().await.expect("tables can be made");
        let of_it = sqlite::pairs(pool, of_store(store)).await;
        pairs.extend(of_it.into_iter().filter(|it| wanted(it.name)));
    }
    pairs
}

async fn redis_pair(url: &str) -> Pair {
    let client = redis::Client::open(url).expect("the url is well-formed");
    // As patient as the store's: the client's default of half a second is less than a busy disk takes.
    let config = redis::aio::ConnectionManagerConfig::new()
        .set_connection_timeout(Some(LEASE))
        .set_response_timeout(Some(LEASE));
    let connection = client.get_connection_manager_with_config(config).await;
    let connection = connection.expect("it answers");
    Pair {
        name: "redis",
        subject: of_store(RedisStore::connect(url).expect("the url is well-formed")),
        plain: work(move |n| {
            let mut connection = connection.clone();
            async move {
                for value in ["claimed", "done"] {
                    let mut set = redis::cmd("SET");
                    set.arg(format!("plain:{n}")).arg(value);
                    let set: Result<(), _> = set.query_async(&mut connection).await;
                    set.expect("it answers");
                }
            }
        }),
    }
}

/// Marker and effect in one statement of a transaction, beside the same transaction without the marker.
fn in_one_statement(pool: PgPool) -> Pair {
    let run = unique("bench");
    let inbox = Inbox::new(run.clone());
    let (without, run_without) = (pool.clone(), run.clone());
    Pair {
        name: "inbox-in-one",
        subject: work(move |n| {
            let (pool, marker) = (pool.clone(), inbox.marker(n.to_string()));
            let id = format!("{run} in one {n}");
            async move {
                let mut transaction = pool.begin().await.expect("it answers");
                let both = "WITH marker AS (
                        INSERT INTO reliable_consumer_inbox (id) VALUES ($1) ON CONFLICT (id) DO NOTHING RETURNING id
                    )
                    INSERT INTO plain (id, cents) SELECT $2, 1 FROM marker";
                let both = sqlx::query(both).bind(marker).bind(&id);
                let done = both.execute(&mut *transaction).await.expect("it answers");
                assert_eq!(done.rows_affected(), 1, "{id} is new");
                transaction.commit().await.expect("it answers");
            }
        }),
        plain: work(move |n| {
            let (pool, id) = (without.clone(), format!("{run_without} alone {n}"));
            async move {
                let mut transaction = pool.begin().await.expect("it answers");
                let insert = sqlx::query("INSERT INTO plain (id, cents) VALUES ($1, 1)").bind(&id);
                insert.execute(&mut *transaction).await.expect("it answers");
                transaction.commit().await.expect("it answers");
            }
        }),
    }
}

macro_rules! sql {
    ($database:ident, $pool:ty, $store:literal, $inbox:literal, $plain:literal, $insert:literal, $update:literal) => {
        mod $database {
            use super::*;

            pub async fn pairs(pool: $pool, store: Work) -> [Pair; 2] {
                sqlx::query($plain)
                    .execute(&pool)
                    .await
                    .expect("tables can be made");
                let run = unique("bench");
                let inbox = Inbox::new(run.clone());
                inbox.create_table(&pool).await.expect("tables can be made");
                let (plain, with, without) = (pool.clone(), pool.clone(), pool);
                let (run_plain, run_with, run_without) = (run.clone(), run.clone(), run);
                [
                    Pair {
                        name: $store,
                        subject: store,
                        plain: work(move |n| {
                            let (pool, id) = (plain.clone(), format!("{run_plain} plain {n}"));
                            async move {
                                insert(&pool, &id).await;
                                let update = sqlx::query($update).bind(&id).execute(&pool).await;
                                update.expect("it answers");
                            }
                        }),
                    },
                    Pair {
                        name: $inbox,
                        subject: work(move |n| {
                            let (pool, inbox, id) =
                                (with.clone(), inbox.clone(), format!("{run_with} with {n}"));
                            async move {
                                let mut transaction = pool.begin().await.expect("it answers");
                                let arrival = inbox
                                    .begin(&mut transaction, &id)
                                    .await
                                    .expect("it answers");
                                assert!(!arrival.is_repeat(), "{id} is new");
                                insert(&mut *transaction, &id).await;
                                transaction.commit().await.expect("it answers");
                            }
                        }),
                        plain: work(move |n| {
                            let (pool, id) =
                                (without.clone(), format!("{run_without} without {n}"));
                            async move {
                                let mut transaction = pool.begin().await.expect("it answers");
                                insert(&mut *transaction, &id).await;
                                transaction.commit().await.expect("it answers");
                            }
                        }),
                    },
                ]
            }

            async fn insert<'a>(
                executor: impl sqlx::Executor<'a, Database = <$pool as Of>::Database>,
                id: &'a str,
            ) {
                let insert = sqlx::query($insert).bind(id).execute(executor).await;
                insert.expect("it answers");
            }
        }
    };
}

/// Names the database of a pool.
trait Of {
    type Database: sqlx::Database;
}

impl<DB: sqlx::Database> Of for sqlx::Pool<DB> {
    type Database = DB;
}

sql!(
    postgres,
    PgPool,
    "postgres",
    "inbox-postgres",
    "CREATE TABLE IF NOT EXISTS plain (id text PRIMARY KEY, cents bigint NOT NULL)",
    "INSERT INTO plain (id, cents) VALUES ($1, 1)",
    "UPDATE plain SET cents = 2 WHERE id = $1"
);
sql!(
    mariadb,
    MySqlPool,
    "mariadb",
    "inbox-mariadb",
    "CREATE TABLE IF NOT EXISTS plain (id VARCHAR(200) PRIMARY KEY, cents BIGINT NOT NULL)",
    "INSERT INTO plain (id, cents) VALUES (?, 1)",
    "UPDATE plain SET cents = 2 WHERE id = ?"
);
sql!(
    sqlite,
    SqlitePool,
    "sqlite",
    "inbox-sqlite",
    "CREATE TABLE IF NOT EXISTS plain (id TEXT PRIMARY KEY, cents INTEGER NOT NULL)",
    "INSERT INTO plain (id, cents) VALUES (?, 1)",
    "UPDATE plain SET cents = 2 WHERE id = ?"
);
