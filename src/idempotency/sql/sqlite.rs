//! A store in an SQLite file.

use std::time::Duration;

use sqlx::{Row, Sqlite, SqliteConnection, SqlitePool, sqlite::SqliteRow};

use super::{
    Words,
    pool::{Dialect, Statements, Value, bound},
    standing, store, store_error, update,
};
use crate::idempotency::{
    Claim, Fingerprint, Id, Reply, Store, StoreError, Token, Update, store::millis,
};

/// Remembers ids in a table of an SQLite database: for the processes of one machine that share its file.
///
/// It survives crashes and restarts of the processes; in `journal_mode=WAL` those of the machine too with
/// `synchronous=FULL` (the default of sqlx), while with `NORMAL` the last ids may be missing after a power cut. It is not
/// for network file systems. Its clock is the machine's: a clock that is set back makes leases longer, one that is set
/// forward shorter.
///
/// One write at a time goes on in a file. Claims wait for each other, for `busy_timeout` at most (5 s by default), then they
/// fail with [`StoreError::Unavailable`].
///
/// Rows stay when their time is over until [`Store::remove_expired`] removes them, see
/// [`keep_clean`](crate::idempotency::keep_clean).
///
/// ```no_run
/// use reliable_consumer::idempotency::SqliteStore;
/// use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode};
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let options = SqliteConnectOptions::new()
///     .filename("ids.sqlite")
///     .create_if_missing(true)
///     .journal_mode(SqliteJournalMode::Wal);
/// let store = SqliteStore::new(sqlx::SqlitePool::connect_with(options).await?);
/// store.create_table().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct SqliteStore {
    statements: Statements<Sqlite>,
}

/// Milliseconds since 1970, in a way that old versions know too.
macro_rules! now {
    () => {
        "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"
    };
}

impl SqliteStore {
    /// What [`create_table`](Self::create_table) runs, for one's own migrations.
    pub const SCHEMA: &str = "
        CREATE TABLE IF NOT EXISTS reliable_consumer_claims (
            id BLOB NOT NULL PRIMARY KEY,
            token BLOB NOT NULL,
            done BOOLEAN NOT NULL,
            fingerprint BLOB,
            expires_at INTEGER NOT NULL
        ) WITHOUT ROWID;
        CREATE INDEX IF NOT EXISTS reliable_consumer_claims_expires_at ON reliable_consumer_claims (expires_at);";

    /// A store in the table `reliable_consumer_claims`.
    pub fn new(pool: SqlitePool) -> Self {
        Self {
            statements: Statements::on(pool),
        }
    }

    /// Makes table and index unless they are there.
    ///
    /// # Errors
    ///
    /// [`StoreError::Refused`] where the file cannot be written.
    pub async fn create_table(&self) -> Result<(), StoreError> {
        let created = sqlx::raw_sql(Self::SCHEMA)
            .execute(self.statements.pool())
            .await;
        created.map(drop).map_err(store_error)
    }

    /// What is unsafe about the file.
    async fn concerns(&self) -> Result<Vec<String>, sqlx::Error> {
        let row = self.statements.fetch("PRAGMA synchronous", &[]).await?;
        let level: Option<i64> = row.map(|row| row.try_get(0)).transpose()?;
        let unsynced = "a power cut loses ids, or damages the file: set synchronous to FULL";
        Ok(Vec::from_iter(
            (level == Some(0)).then(|| unsynced.to_owned()),
        ))
    }

    /// What stands is read first, so that repeats do not wait for writers. `None` if it was gone, or another claim was
    /// faster, when it came to writing.
    async fn try_claim(
        &self,
        id: &Id,
        token: &Token,
        lease: i64,
    ) -> Result<Option<Claim>, sqlx::Error> {
        let standing_row = concat!(
            "SELECT done, fingerprint, (expires_at - ",
            now!(),
            ") * 1000
            FROM reliable_consumer_claims WHERE id = ? AND expires_at > ",
            now!()
        );
        let (id, token_bytes) = (Value::Bytes(id.as_bytes()), Value::Bytes(token.as_bytes()));
        if let Some(row) = self.statements.fetch(standing_row, &[id]).await? {
            return Ok(Some(standing(
                row.try_get(0)?,
                row.try_get(1)?,
                row.try_get(2)?,
            )));
        }
        let claim = concat!(
            "INSERT INTO reliable_consumer_claims AS claims (id, token, done, expires_at)
            VALUES (?, ?, FALSE, ",
            now!(),
            " + ?)
            ON CONFLICT (id) DO UPDATE
            SET token = excluded.token, done = FALSE, expires_at = excluded.expires_at
            WHERE claims.expires_at <= ",
            now!()
        );
        let values = [id, token_bytes, Value::Number(lease)];
        let claimed = self.statements.execute(claim, &values).await?;
        Ok((claimed == 1).then_some(Claim::Claimed(*token)))
    }
}

const WORDS: Words = Words {
    renew: concat!(
        "UPDATE reliable_consumer_claims SET expires_at = ",
        now!(),
        " + ?
        WHERE id = ? AND token = ? AND NOT done AND expires_at > ",
        now!()
    ),
    complete: concat!(
        "UPDATE reliable_consumer_claims SET done = TRUE, expires_at = ",
        now!(),
        " + ?, fingerprint = ?
        WHERE id = ? AND token = ? AND expires_at > ",
        now!()
    ),
    release: concat!(
        "DELETE FROM reliable_consumer_claims
        WHERE id = ? AND token = ? AND NOT done AND expires_at > ",
        now!()
    ),
    remove_expired: concat!(
        "DELETE FROM reliable_consumer_claims WHERE id IN (
            SELECT id FROM reliable_consumer_claims WHERE expires_at <= ",
        now!(),
        "
            ORDER BY expires_at LIMIT ?
        )"
    ),
};

store!(SqliteStore);

impl Dialect for Sqlite {
    async fn execute(
        connection: &mut SqliteConnection,
        statement: &str,
        values: &[Value<'_>],
        _prepared: bool,
    ) -> Result<u64, sqlx::Error> {
        let done = bound!(statement, values).execute(connection).await?;
        Ok(done.rows_affected())
    }

    async fn fetch(
        connection: &mut SqliteConnection,
        statement: &str,
        values: &[Value<'_>],
        _prepared: bool,
    ) -> Result<Option<SqliteRow>, sqlx::Error> {
        let query = bound!(statement, values);
        query.fetch_optional(connection).await
    }
}
