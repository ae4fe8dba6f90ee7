//! Statements on the connections of a pool: which of them are made again, on which connection.
//!
//! A connection whose server takes no writes any more is closed, and the others that are idle with it: the next ones are
//! made to whatever server the name stands for then. Nobody else would close them while that server lives on as a replica.

use std::{
    mem,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use sqlx::{Database, Pool, Row, pool::PoolConnection};

/// How often connections are given up because their server takes no writes, where the next ones find the same.
const LEAVE: Duration = Duration::from_millis(500);
/// A statement that was chosen as the victim of a deadlock, and so did nothing, is run so often.
const ATTEMPTS: u32 = 5;

/// What a statement is about.
#[derive(Debug, Clone, Copy)]
pub(super) enum Value<'a> {
    Number(i64),
    Bytes(&'a [u8]),
    /// No bytes.
    Absent,
}

impl<'a> Value<'a> {
    pub(super) fn optional(bytes: Option<&'a [u8]>) -> Self {
        bytes.map_or(Self::Absent, Self::Bytes)
    }
}

/// How a database is sent a statement.
pub(super) trait Dialect: Database<Row: Row> {
    /// Runs it for the rows that it changes. The server is to prepare it, under a name, unless told otherwise.
    fn execute(
        connection: &mut Self::Connection,
        statement: &str,
        values: &[Value<'_>],
        prepared: bool,
    ) -> impl Future<Output = Result<u64, sqlx::Error>> + Send;

    /// Runs it for the one row that it may find.
    fn fetch(
        connection: &mut Self::Connection,
        statement: &str,
        values: &[Value<'_>],
        prepared: bool,
    ) -> impl Future<Output = Result<Option<Self::Row>, sqlx::Error>> + Send;

    /// Whether the server lost a prepared statement, or has another one of that name: a pooler is in between.
    fn has_lost_prepared(_error: &sqlx::Error) -> bool {
        false
    }

    /// Whether it refused a write that the server which took its place would do.
    fn takes_no_writes(_error: &sqlx::Error) -> bool {
        false
    }
}

/// The pool of a store. Clones share it, and what was learned of its servers.
#[derive(Debug)]
pub(super) struct Statements<DB: Database> {
    pool: Pool<DB>,
    learned: Arc<Learned>,
}

impl<DB: Database> Clone for Statements<DB> {
    fn clone(&self) -> Self {
        Self {
            pool: self.pool.clone(),
            learned: Arc::clone(&self.learned),
        }
    }
}

#[derive(Debug)]
struct Learned {
    prepared: AtomicBool,
    /// When connections were given up the last time.
    left: Mutex<Option<Instant>>,
}

impl<DB: Dialect> Statements<DB> {
    pub(super) fn on(pool: Pool<DB>) -> Self {
        Self {
            pool,
            learned: Arc::new(Learned {
                prepared: AtomicBool::new(true),
                left: Mutex::new(None),
            }),
        }
    }

    pub(super) fn pool(&self) -> &Pool<DB> {
        &self.pool
    }

    #[cfg(feature = "postgres")]
    pub(super) fn prepare_none(&self) {
        self.learned.prepared.store(false, Ordering::Relaxed);
    }

    pub(super) async fn execute(
        &self,
        statement: &str,
        values: &[Value<'_>],
    ) -> Result<u64, sqlx::Error> {
        self.ask(|mut connection, prepared| async move {
            let answer = DB::execute(&mut connection, statement, values, prepared).await;
            (connection, answer)
        })
        .await
    }

    pub(super) async fn fetch(
        &self,
        statement: &str,
        values: &[Value<'_>],
    ) -> Result<Option<DB::Row>, sqlx::Error> {
        self.ask(|mut connection, prepared| async move {
            let answer = DB::fetch(&mut connection, statement, values, prepared).await;
            (connection, answer)
        })
        .await
    }

    async fn ask<T, F>(
        &self,
        call: impl Fn(PoolConnection<DB>, bool) -> F,
    ) -> Result<T, sqlx::Error>
    where
        F: Future<Output = (PoolConnection<DB>, Result<T, sqlx::Error>)>,
    {
        let mut attempt = 1;
        let mut elsewhere = true;
        loop {
            let asked = Instant::now();
            let prepared = self.learned.prepared.load(Ordering::Relaxed);
            let (connection, answer) = call(self.pool.acquire().await?, prepared).await;
            let Err(error) = &answer else {
                return answer;
            };
            if attempt < ATTEMPTS && is_conflict(error) {
                attempt += 1;
            } else if prepared && DB::has_lost_prepared(error) {
                if self.learned.prepared.swap(false, Ordering::Relaxed) {
                    tracing::info!(
                        %error,
                        "a pooler is in front of the idempotency store's database: its statements are not prepared any more"
                    );
                }
            } else if DB::takes_no_writes(error)
                && self.leave(connection, asked)
                && mem::take(&mut elsewhere)
            {
                // Once more, on a new one.
            } else {
                return answer;
            }
        }
    }

    /// Closes a connection to a server that takes no writes, and what is idle, unless it was made after that was done and
    /// that was just now.
    fn leave(&self, mut connection: PoolConnection<DB>, asked: Instant) -> bool {
        let left = &self.learned.left;
        let mut left = left.lock().unwrap_or_else(PoisonError::into_inner);
        let recently = left.filter(|left| left.elapsed() < LEAVE);
        if recently.is_some_and(|left| left < asked) {
            return false;
        }
        connection.close_on_drop();
        drop(connection);
        if recently.is_none() {
            *left = Some(Instant::now());
            while let Some(mut idle) = self.pool.try_acquire() {
                idle.close_on_drop();
            }
        }
        true
    }
}

/// A deadlock, or a serialization failure where that is the default isolation.
fn is_conflict(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|it| it.code());
    matches!(code.as_deref(), Some("40001" | "40P01"))
}

/// Sends a statement as the client prefers it: prepared, by its text.
macro_rules! bound {
    ($statement:expr, $values:expr) => {
        $values
            .iter()
            .fold(sqlx::query($statement), |query, value| match *value {
                Value::Number(number) => query.bind(number),
                Value::Bytes(bytes) => query.bind(bytes),
                Value::Absent => query.bind(None::<&[u8]>),
            })
    };
}
pub(super) use bound;
