//! A store in PostgreSQL.

use std::time::Duration;

use sqlx::{PgPool, Row};

use super::{Statements, standing, store, store_error, undisturbed, update};
use crate::idempotency::{
    Claim, Fingerprint, Id, Reply, Store, StoreError, Token, Update, store::millis,
};

/// Remembers ids in a table of a PostgreSQL database.
///
/// It survives whatever the database survives: crashes of consumers, restarts, and a failover to a synchronous replica.
/// After one to an asynchronous replica, or with `synchronous_commit=off`, the last ids may be missing, and their messages
/// are handled again. Each claim and each completion is a commit of its own, which the server syncs to its disk; those that
/// come together share the sync.
///
/// A claim and the effects of the handler are different transactions. If the effects are in the same database, use an
/// [`Inbox`](crate::idempotency::inbox::Inbox) instead: it costs less, and knows no lease.
///
/// The calls that can run at the same time are as many as the pool has connections. Rows stay when their time is over
/// until [`Store::remove_expired`] removes them, see [`keep_clean`](crate::idempotency::keep_clean).
///
/// ```no_run
/// use reliable_consumer::idempotency::PostgresStore;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let pool = sqlx::PgPool::connect("postgres://localhost/shop").await?;
/// let store = PostgresStore::new(pool);
/// store.create_table().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct PostgresStore {
    pool: PgPool,
}

impl PostgresStore {
    /// What [`create_table`](Self::create_table) runs, for one's own migrations.
    pub const SCHEMA: &str = "
        CREATE TABLE IF NOT EXISTS reliable_consumer_claims (
            id bytea PRIMARY KEY,
            token bytea NOT NULL,
            done boolean NOT NULL,
            fingerprint bytea,
            expires_at timestamptz NOT NULL
        );
        CREATE INDEX IF NOT EXISTS reliable_consumer_claims_expires_at ON reliable_consumer_claims (expires_at);";

    /// A store in the table `reliable_consumer_claims`, in the schema that comes first in the connections' `search_path`.
    pub fn new(pool: PgPool) -> Self {
        Self { pool }
    }

    /// Makes table and index unless they are there.
    ///
    /// # Errors
    ///
    /// [`StoreError::Refused`] without the permission to make tables.
    pub async fn create_table(&self) -> Result<(), StoreError> {
        create(&self.pool, Self::SCHEMA).await.map_err(store_error)
    }

    /// The claim is inserted unless a row stands; a row whose time is over is replaced. What stands is read without locks,
    /// so that repeats cost no commit. None of it when another claim was committed while this waited for its row.
    async fn try_claim(
        &self,
        id: &Id,
        token: &Token,
        lease: i64,
    ) -> Result<Option<Claim>, sqlx::Error> {
        let row = sqlx::query(
            "WITH standing AS (
                SELECT done, fingerprint, (extract(epoch FROM expires_at - now()) * 1000000)::bigint AS lapses_in
                FROM reliable_consumer_claims WHERE id = $1 AND expires_at > now()
            ), claimed AS (
                INSERT INTO reliable_consumer_claims AS claims (id, token, done, expires_at)
                SELECT $1, $2, false, now() + $3::bigint * interval '1 millisecond'
                WHERE NOT EXISTS (SELECT FROM standing)
                ON CONFLICT (id) DO UPDATE
                SET token = excluded.token, done = false, expires_at = excluded.expires_at
                WHERE claims.expires_at <= now()
                RETURNING true
            )
            SELECT false, done, fingerprint, lapses_in FROM standing
            UNION ALL SELECT true, false, NULL, 0 FROM claimed",
        )
        .bind(id.as_bytes())
        .bind(&token.as_bytes()[..])
        .bind(lease)
        .fetch_optional(&self.pool)
        .await?;
        let Some(row) = row else { return Ok(None) };
        Ok(Some(if row.try_get(0)? {
            Claim::Claimed(*token)
        } else {
            standing(row.try_get(1)?, row.try_get(2)?, row.try_get(3)?)
        }))
    }
}

/// Runs a schema. Two at the same time would both find no table: they take turns.
pub(in crate::idempotency) async fn create(pool: &PgPool, schema: &str) -> Result<(), sqlx::Error> {
    let locked = format!("SELECT pg_advisory_xact_lock(7165834120931);{schema}");
    sqlx::raw_sql(&locked).execute(pool).await?;
    Ok(())
}

const STATEMENTS: Statements = Statements {
    renew: "UPDATE reliable_consumer_claims SET expires_at = now() + $1::bigint * interval '1 millisecond'
        WHERE id = $2 AND token = $3 AND NOT done AND expires_at > now()",
    complete: "UPDATE reliable_consumer_claims
        SET done = true, expires_at = now() + $1::bigint * interval '1 millisecond', fingerprint = $2
        WHERE id = $3 AND token = $4 AND expires_at > now()",
    release: "DELETE FROM reliable_consumer_claims
        WHERE id = $1 AND token = $2 AND NOT done AND expires_at > now()",
    // Rows that somebody else removes or claims just now are passed over.
    remove_expired: "DELETE FROM reliable_consumer_claims WHERE id IN (
            SELECT id FROM reliable_consumer_claims WHERE expires_at <= now()
            ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED
        )",
};

store!(PostgresStore);
