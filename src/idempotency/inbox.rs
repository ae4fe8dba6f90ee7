//! A marker in the transaction of the effect: both are there, or neither is.
//!
//! For handlers whose effect is rows in the same database; the [module above](super) helps to choose. The marker is written
//! by one statement at the start of the handler's own transaction. If that is rolled back, or its process dies, the marker
//! is gone with the effect, and the message can come again. After the commit every repeat is told, until the marker is
//! removed.
//!
//! ```no_run
//! # #[cfg(feature = "postgres")]
//! # mod example {
//! use reliable_consumer::{HandlerResult, Json, Message, idempotency::inbox::Inbox};
//!
//! #[derive(serde::Deserialize)]
//! struct Payment {
//!     account: i64,
//!     cents: i64,
//! }
//!
//! async fn book(pool: &sqlx::PgPool, inbox: &Inbox, message: &Message<Json<Payment>>) -> HandlerResult {
//!     let mut transaction = pool.begin().await?;
//!     if inbox.begin(&mut transaction, message.message_id()).await?.is_repeat() {
//!         return Ok(()); // Booked already. The transaction is rolled back.
//!     }
//!     sqlx::query("UPDATE accounts SET cents = cents + $1 WHERE id = $2")
//!         .bind(message.payload().cents)
//!         .bind(message.payload().account)
//!         .execute(&mut *transaction)
//!         .await?;
//!     transaction.commit().await?;
//!     Ok(())
//! }
//!
//! # fn is_handler(_: impl reliable_consumer::Handler<Json<Payment>>) {}
//! # fn example(pool: sqlx::PgPool, inbox: Inbox) {
//! # is_handler(
//! async move |message: &Message<Json<Payment>>| book(&pool, &inbox, message).await
//! # )}
//! # }
//! ```
//!
//! A commit whose answer was lost is no trouble: the retry finds the marker if it went through, and does the work if not.
//!
//! sqlx is part of this interface: it has to be version 0.8 in your service too.

use std::time::Duration;

use sqlx::{Pool, Transaction};

use super::{Id, store::millis};

/// Tells first deliveries from repeats, by markers in the database that the effects are in.
///
/// The markers are rows of the table `reliable_consumer_inbox`, in PostgreSQL in the schema that comes first in the
/// `search_path`. Make it by [`create_table`](Self::create_table), or by [`InboxDatabase::SCHEMA`] in your own migrations.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), sqlx::Error> {
/// use reliable_consumer::idempotency::inbox::{Arrival, Inbox};
///
/// let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// let inbox = Inbox::new("billing");
/// inbox.create_table(&pool).await?;
/// for expected in [Arrival::First, Arrival::Repeat] {
///     let mut transaction = pool.begin().await?;
///     assert_eq!(inbox.begin(&mut transaction, "order-17").await?, expected);
///     transaction.commit().await?;
/// }
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "sqlite"))]
/// # fn main() {}
/// ```
#[derive(Debug, Clone)]
pub struct Inbox {
    name: Box<str>,
    prepared: bool,
}

/// Whether a message was there before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a repeat is not to be handled again"]
pub enum Arrival {
    /// It was not: do the work, and commit.
    First,
    /// Its effect has been committed. The transaction has nothing in it, and may go on with other work or be dropped.
    Repeat,
}

impl Arrival {
    /// Whether it is [`Arrival::Repeat`].
    pub fn is_repeat(self) -> bool {
        self == Self::Repeat
    }
}

impl Inbox {
    /// An inbox whose ids are apart from those of every other name in the same database. Name it after the consumer group,
    /// or after the effect: a message that two groups handle has two effects.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into().into(),
            prepared: true,
        }
    }

    /// Has PostgreSQL prepare nothing under a name for [`begin`](Self::begin), which costs it some time with each call: for
    /// poolers that give each transaction another connection. Your own statements need the same there.
    pub fn without_prepared_statements(self) -> Self {
        Self {
            prepared: false,
            ..self
        }
    }

    /// Makes the table and its index unless they are there.
    ///
    /// # Errors
    ///
    /// Those of the database, such as a missing permission to make tables.
    pub async fn create_table<DB: InboxDatabase>(
        &self,
        pool: &Pool<DB>,
    ) -> Result<(), sqlx::Error> {
        DB::create(pool).await
    }

    /// Writes the marker of the message `id` into `transaction`. Call it before anything else in there, with
    /// [`Message::message_id`](crate::Message::message_id) or whatever names the thing that must happen once: any bytes, of
    /// any length.
    ///
    /// While another transaction has the same id marked and is not over, this waits for it: until the commit that makes
    /// this a repeat, or the end that makes it the first.
    ///
    /// # Errors
    ///
    /// Those of the database. All but those of its set-up are worth a retry of the handler: besides lost connections, a
    /// deadlock or a lock timeout (MySQL), a serialization failure (PostgreSQL at an isolation above the default, when the
    /// same message comes twice at once), a file that is busy (SQLite).
    pub async fn begin<DB: InboxDatabase>(
        &self,
        transaction: &mut Transaction<'_, DB>,
        id: impl AsRef<[u8]>,
    ) -> Result<Arrival, sqlx::Error> {
        let id = Id::of_inbox(&self.name, id.as_ref());
        let is_new = DB::mark(transaction, id.as_bytes(), self.prepared).await?;
        Ok(if is_new {
            Arrival::First
        } else {
            Arrival::Repeat
        })
    }

    /// The marker of the message `id`, for a statement of your own that writes it together with the effect. In PostgreSQL
    /// that spares it a round trip, and most of its price:
    ///
    /// ```no_run
    /// # #[cfg(feature = "postgres")]
    /// # async fn book(
    /// #     pool: sqlx::PgPool,
    /// #     inbox: reliable_consumer::idempotency::inbox::Inbox,
    /// #     message: reliable_consumer::Message<reliable_consumer::Text>,
    /// # ) -> Result<(), sqlx::Error> {
    /// let booked = sqlx::query(
    ///     "WITH marker AS (
    ///          INSERT INTO reliable_consumer_inbox (id) VALUES ($1) ON CONFLICT (id) DO NOTHING RETURNING id
    ///      )
    ///      INSERT INTO payments (account) SELECT $2 FROM marker",
    /// )
    /// .bind(inbox.marker(message.message_id()))
    /// .bind(&**message.payload());
    /// // No row: a repeat.
    /// let is_repeat = booked.execute(&pool).await?.rows_affected() == 0;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Bytes for the column `id`, 256 at most.
    pub fn marker(&self, id: impl AsRef<[u8]>) -> Vec<u8> {
        Id::of_inbox(&self.name, id.as_ref()).as_bytes().to_vec()
    }

    /// Removes at most `at_most` markers, of all names, that are older than `keep_for`, and says how many it removed. The
    /// module above says how long to keep them. Call it until it removes fewer than asked for, now and then: a thousand at
    /// a time lock nobody out for long.
    ///
    /// # Errors
    ///
    /// Those of the database.
    pub async fn remove_older<DB: InboxDatabase>(
        &self,
        pool: &Pool<DB>,
        keep_for: Duration,
        at_most: u32,
    ) -> Result<u64, sqlx::Error> {
        DB::remove_older(pool, millis(keep_for), at_most.into()).await
    }
}

/// A database that an [`Inbox`] can be in: PostgreSQL, MySQL or MariaDB, SQLite, each with its feature.
pub trait InboxDatabase: sealed::Statements {
    /// What makes the table, for one's own migrations.
    const SCHEMA: &str;
}

mod sealed {
    use sqlx::{Database, Pool};

    pub trait Statements: Database {
        fn create(pool: &Pool<Self>) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

        /// Whether the id was new.
        fn mark(
            connection: &mut Self::Connection,
            id: &[u8],
            prepared: bool,
        ) -> impl Future<Output = Result<bool, sqlx::Error>> + Send;

        fn remove_older(
            pool: &Pool<Self>,
            age: i64,
            at_most: i64,
        ) -> impl Future<Output = Result<u64, sqlx::Error>> + Send;
    }
}

#[cfg(feature = "postgres")]
mod postgres {
    use sqlx::{PgConnection, PgPool, Postgres};

    use super::{InboxDatabase, sealed::Statements};
    use crate::idempotency::sql;

    impl InboxDatabase for Postgres {
        const SCHEMA: &str = "
            CREATE TABLE IF NOT EXISTS reliable_consumer_inbox (
                id bytea PRIMARY KEY,
                handled_at timestamptz NOT NULL DEFAULT now()
            );
            CREATE INDEX IF NOT EXISTS reliable_consumer_inbox_handled_at ON reliable_consumer_inbox (handled_at);";
    }

    impl Statements for Postgres {
        async fn create(pool: &PgPool) -> Result<(), sqlx::Error> {
            sql::create_in_postgres(pool, Self::SCHEMA).await
        }

        async fn mark(
            connection: &mut PgConnection,
            id: &[u8],
            prepared: bool,
        ) -> Result<bool, sqlx::Error> {
            let statement =
                "INSERT INTO reliable_consumer_inbox (id) VALUES ($1) ON CONFLICT (id) DO NOTHING";
            let rows = sql::execute_in_postgres(connection, statement, id, prepared);
            Ok(rows.await? == 1)
        }

        async fn remove_older(pool: &PgPool, age: i64, at_most: i64) -> Result<u64, sqlx::Error> {
            let statement = "DELETE FROM reliable_consumer_inbox WHERE id IN (
                SELECT id FROM reliable_consumer_inbox
                WHERE handled_at < now() - $1::bigint * interval '1 millisecond'
                ORDER BY handled_at LIMIT $2 FOR UPDATE SKIP LOCKED
            )";
            let query = sqlx::query(statement).bind(age).bind(at_most);
            Ok(query.execute(pool).await?.rows_affected())
        }
    }
}

#[cfg(feature = "mysql")]
mod mysql {
    use sqlx::{MySql, MySqlConnection, MySqlPool};

    use super::{InboxDatabase, sealed::Statements};

    impl InboxDatabase for MySql {
        const SCHEMA: &str = "
            CREATE TABLE IF NOT EXISTS reliable_consumer_inbox (
                id VARBINARY(256) NOT NULL PRIMARY KEY,
                handled_at DATETIME(6) NOT NULL,
                INDEX reliable_consumer_inbox_handled_at (handled_at)
            ) ENGINE = InnoDB";
    }

    impl Statements for MySql {
        async fn create(pool: &MySqlPool) -> Result<(), sqlx::Error> {
            sqlx::raw_sql(Self::SCHEMA).execute(pool).await.map(drop)
        }

        async fn mark(
            connection: &mut MySqlConnection,
            id: &[u8],
            _prepared: bool,
        ) -> Result<bool, sqlx::Error> {
            let statement =
                "INSERT INTO reliable_consumer_inbox (id, handled_at) VALUES (?, UTC_TIMESTAMP(6))";
            match sqlx::query(statement).bind(id).execute(connection).await {
                Ok(_) => Ok(true),
                // It undoes this statement only, and the transaction goes on. `INSERT IGNORE` would hide more than that.
                Err(sqlx::Error::Database(error)) if error.is_unique_violation() => Ok(false),
                Err(error) => Err(error),
            }
        }

        async fn remove_older(
            pool: &MySqlPool,
            age: i64,
            at_most: i64,
        ) -> Result<u64, sqlx::Error> {
            let statement = "DELETE FROM reliable_consumer_inbox
                WHERE handled_at < UTC_TIMESTAMP(6) - INTERVAL ? * 1000 MICROSECOND
                ORDER BY handled_at LIMIT ?";
            let query = sqlx::query(statement).bind(age).bind(at_most);
            Ok(query.execute(pool).await?.rows_affected())
        }
    }
}

#[cfg(feature = "sqlite")]
mod sqlite {
    use sqlx::{Sqlite, SqliteConnection, SqlitePool};

    use super::{InboxDatabase, sealed::Statements};

    impl InboxDatabase for Sqlite {
        const SCHEMA: &str = "
            CREATE TABLE IF NOT EXISTS reliable_consumer_inbox (
                id BLOB NOT NULL PRIMARY KEY,
                handled_at INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER))
            ) WITHOUT ROWID;
            CREATE INDEX IF NOT EXISTS reliable_consumer_inbox_handled_at ON reliable_consumer_inbox (handled_at);";
    }

    impl Statements for Sqlite {
        async fn create(pool: &SqlitePool) -> Result<(), sqlx::Error> {
            sqlx::raw_sql(Self::SCHEMA).execute(pool).await.map(drop)
        }

        async fn mark(
            connection: &mut SqliteConnection,
            id: &[u8],
            _prepared: bool,
        ) -> Result<bool, sqlx::Error> {
            let statement =
                "INSERT INTO reliable_consumer_inbox (id) VALUES (?) ON CONFLICT (id) DO NOTHING";
            let result = sqlx::query(statement).bind(id).execute(connection).await?;
            Ok(result.rows_affected() == 1)
        }

        async fn remove_older(
            pool: &SqlitePool,
            age: i64,
            at_most: i64,
        ) -> Result<u64, sqlx::Error> {
            let statement = "DELETE FROM reliable_consumer_inbox WHERE id IN (
                SELECT id FROM reliable_consumer_inbox
                WHERE handled_at < CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) - ?
                ORDER BY handled_at LIMIT ?
            )";
            let query = sqlx::query(statement).bind(age).bind(at_most);
            Ok(query.execute(pool).await?.rows_affected())
        }
    }
}
