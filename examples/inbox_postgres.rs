//! Payments that are booked once, although their producer sends each of them twice, and the service dies in the middle of
//! a booking and right after one: the inbox writes its marker in the transaction that books the payment.
//!
//! Without arguments it is the supervisor. It sends the payments, starts this program again as the service, once more after
//! each death, and counts at the end what is in the database. It takes the brokers from `KAFKA_BROKERS`, the database from
//! `POSTGRES_URL`, makes a topic and a schema of its own, ends within 30 s, and with 0 if every payment is booked once.

mod common;

use std::{
    os::unix::process::ExitStatusExt,
    process::ExitCode,
    time::{SystemTime, UNIX_EPOCH},
};

use reliable_consumer::{
    Handler, HandlerResult, Json, Message, ReliableConsumer, ResultExt, idempotency::inbox::Inbox,
};
use sqlx::{
    PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::process::Command;

const PAYMENTS: i64 = 300;
const ACCOUNTS: i64 = 10;

#[derive(serde::Deserialize)]
struct Payment {
    id: i64,
    account: i64,
    cents: i64,
}

struct Bookings {
    pool: PgPool,
    inbox: Inbox,
    crash: common::Crash,
}

impl Handler<Json<Payment>> for Bookings {
    async fn handle(&self, message: &Message<Json<Payment>>) -> HandlerResult {
        let payment = message.payload();
        // A database that is away costs no payment an attempt.
        let mut transaction = self.pool.begin().await.outage()?;
        // What is sent twice is two records. The number of the payment is the same.
        let id = payment.id.to_string();
        let arrival = self.inbox.begin(&mut transaction, id).await.outage()?;
        if arrival.is_repeat() {
            return Ok(());
        }
        sqlx::query("UPDATE accounts SET cents = cents + $1 WHERE id = $2")
            .bind(payment.cents)
            .bind(payment.account)
            .execute(&mut *transaction)
            .await?;
        self.crash.here("in-the-middle");
        sqlx::query("INSERT INTO bookings (payment, account, cents) VALUES ($1, $2, $3)")
            .bind(payment.id)
            .bind(payment.account)
            .bind(payment.cents)
            .execute(&mut *transaction)
            .await?;
        transaction.commit().await.outage()?;
        // Committed, but Kafka does not know yet: the payment comes again.
        self.crash.here("afterwards");
        Ok(())
    }
}

/// The service: books what there is, and ends.
async fn serve(name: &str, crash: common::Crash) -> common::Result<()> {
    let consumer = ReliableConsumer::builder()
        .bootstrap_servers(common::brokers())
        .group_id(name)
        .topic(name)
        .concurrency(16)
        // With a name that outlives the process, its successor need not wait until the group has noticed the death.
        .property("group.instance.id", "the-only-one")
        .build()?;
    let bookings = Bookings {
        pool: connect(name).await?,
        inbox: Inbox::new(name),
        crash,
    };
    let done = common::caught_up(consumer.handle());
    consumer.run(bookings).with_graceful_shutdown(done).await?;
    Ok(())
}

/// To a schema of this example's own, so that nothing of anybody else's is touched.
async fn connect(schema: &str) -> common::Result<PgPool> {
    let url = std::env::var("POSTGRES_URL")
        .unwrap_or_else(|_| "postgres://reliable:reliable@localhost:5432/reliable".into());
    let options: PgConnectOptions = url.parse()?;
    let pool = PgPoolOptions::new()
        .max_connections(16)
        .connect_with(options.options([("search_path", schema)]));
    Ok(pool.await?)
}

#[tokio::main]
async fn main() -> common::Result<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    if let (Some(name), Some(place)) = (arguments.next(), arguments.next()) {
        serve(&name, common::Crash::at(place)).await?;
        return Ok(ExitCode::SUCCESS);
    }
    common::checked(30, supervise()).await
}

async fn supervise() -> common::Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
    let name = format!("example_inbox_{now}");
    let pool = connect(&name).await?;
    sqlx::raw_sql(&format!(
        "CREATE SCHEMA {name};
         CREATE TABLE accounts (id BIGINT PRIMARY KEY, cents BIGINT NOT NULL);
         CREATE TABLE bookings (payment BIGINT NOT NULL, account BIGINT NOT NULL, cents BIGINT NOT NULL);
         INSERT INTO accounts SELECT id, 0 FROM generate_series(0, {ACCOUNTS} - 1) AS id",
    ))
    .execute(&pool)
    .await?;
    Inbox::new(&name).create_table(&pool).await?;

    common::create_topics([&name], 4).await?;
    let payments = (0..PAYMENTS).map(|id| {
        let account = id % ACCOUNTS;
        let value = format!(
            r#"{{"id": {id}, "account": {account}, "cents": {}}}"#,
            100 + id
        );
        (format!("account-{account}"), value)
    });
    let twice = payments.clone().chain(payments);
    common::produce(&name, twice).await?;

    for crash in ["in-the-middle", "afterwards", "never"] {
        let mut service = Command::new(std::env::current_exe()?)
            .args([&name, crash])
            .kill_on_drop(true)
            .spawn()?;
        let status = service.wait().await?;
        let (booked, ..) = count(&pool).await?;
        match (status.signal(), crash) {
            (Some(signal), "in-the-middle" | "afterwards") => {
                println!("killed by signal {signal} {crash}: {booked} bookings; starting it again");
            }
            (None, "never") if status.success() => println!("it came to the end"),
            _ => return Err(format!("to crash {crash}, the service ended by {status}").into()),
        }
    }

    let (booked, distinct, cents) = count(&pool).await?;
    let balance: i64 = sqlx::query_scalar("SELECT sum(cents)::bigint FROM accounts")
        .fetch_one(&pool)
        .await?;
    let expected = (0..PAYMENTS).map(|id| 100 + id).sum();
    println!(
        "{PAYMENTS} payments, sent twice: {booked} bookings of {distinct} payments, {cents} cents; {balance} cents in \
         the accounts"
    );
    if (booked, distinct, cents, balance) != (PAYMENTS, PAYMENTS, expected, expected) {
        return Err(
            format!("it should be {PAYMENTS} and {expected} cents, see schema {name}").into(),
        );
    }
    sqlx::raw_sql(&format!("DROP SCHEMA {name} CASCADE"))
        .execute(&pool)
        .await?;
    Ok(())
}

/// Bookings, different payments among them, and cents.
async fn count(pool: &PgPool) -> common::Result<(i64, i64, i64)> {
    let query =
        "SELECT count(*), count(DISTINCT payment), coalesce(sum(cents), 0)::bigint FROM bookings";
    Ok(sqlx::query_as(query).fetch_one(pool).await?)
}
