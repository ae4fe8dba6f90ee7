//! A store in PostgreSQL.

use std::time::Duration;

use sqlx::{Executor, PgConnection, PgPool, Postgres, Row, postgres::PgRow};

use super::{
    Words,
    pool::{Dialect, Statements, Value, bound},
    standing, store, store_error, update,
};
use crate::idempotency::{
    Claim, Fingerprint, Id, Reply, Store, StoreError, Token, Update, id::hexadecimal, store::millis,
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
/// A server that answers that it is read-only is left: its connections in the pool are closed, and the next ones are made
/// to wherever the name leads then. sqlx takes one host in a URL: for a failover have one name that moves along (a DNS
/// entry, a virtual address, HAProxy, a pooler), or give the pool other options with `Pool::set_connect_options`.
///
/// # Poolers
///
/// Behind PgBouncer in transaction mode, or where connections are wiped by `DISCARD ALL`, prepared statements do not last.
/// The store notices that by its errors, and sends text instead from then on; where you know it, choose
/// [`without_prepared_statements`](Self::without_prepared_statements). Nothing else that the store does belongs to a
/// session: no lock but one within the transaction that makes the table, no `LISTEN`, no `SET`. The table's schema has to
/// come from the role's or the database's `search_path`. Handlers have to take the same care of their own statements:
/// `sqlx::query(…).persistent(false)` in a transaction.
///
/// # Limits
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
    statements: Statements<Postgres>,
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
        Self {
            statements: Statements::on(pool),
        }
    }

    /// Has the server prepare no statements under a name, which costs it some time with each call. For poolers that give
    /// each transaction another connection. Without this the store finds out by itself, by the errors that there are.
    pub fn without_prepared_statements(self) -> Self {
        self.statements.prepare_none();
        self
    }

    /// Makes table and index unless they are there.
    ///
    /// # Errors
    ///
    /// [`StoreError::Refused`] without the permission to make tables.
    pub async fn create_table(&self) -> Result<(), StoreError> {
        create(self.statements.pool(), Self::SCHEMA)
            .await
            .map_err(store_error)
    }

    /// What is unsafe about the server.
    async fn concerns(&self) -> Result<Vec<String>, sqlx::Error> {
        let row = self.statements.fetch(SETTINGS, &[]).await?;
        let Some(row) = row else {
            return Ok(Vec::new());
        };
        let mut concerns = Vec::new();
        let advice = [
            "PostgreSQL takes no writes here: connect to the primary",
            "PostgreSQL does not sync its files: set fsync to on",
            "a crash of PostgreSQL loses the last ids: set synchronous_commit to on",
            "the table reliable_consumer_claims is emptied by a crash: ALTER TABLE reliable_consumer_claims SET LOGGED",
            "the default isolation level has claims fail that come at the same time: set default_transaction_isolation to \
             'read committed' for the store's role",
        ];
        for (column, advice) in advice.into_iter().enumerate() {
            if row.try_get::<Option<bool>, _>(column)? == Some(true) {
                concerns.push(advice.to_owned());
            }
        }
        Ok(concerns)
    }

    /// The claim is inserted unless a row stands; a row whose time is over is replaced. What stands is read without locks,
    /// so that repeats cost no commit. None of it when another claim was committed while this waited for its row.
    async fn try_claim(
        &self,
        id: &Id,
        token: &Token,
        lease: i64,
    ) -> Result<Option<Claim>, sqlx::Error> {
        let values = [
            Value::Bytes(id.as_bytes()),
            Value::Bytes(token.as_bytes()),
            Value::Number(lease),
        ];
        let row = self.statements.fetch(CLAIM, &values).await?;
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

const CLAIM: &str = "WITH standing AS (
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
    UNION ALL SELECT true, false, NULL, 0 FROM claimed";

const SETTINGS: &str = "SELECT
    pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on',
    current_setting('fsync') = 'off',
    current_setting('synchronous_commit') = 'off',
    (SELECT relpersistence <> 'p' FROM pg_class WHERE oid = to_regclass('reliable_consumer_claims')),
    current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted')";

const WORDS: Words = Words {
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

/// Runs a statement about an id, for the rows that it changes.
pub(in crate::idempotency) async fn execute(
    connection: &mut PgConnection,
    statement: &str,
    id: &[u8],
    prepared: bool,
) -> Result<u64, sqlx::Error> {
    Postgres::execute(connection, statement, &[Value::Bytes(id)], prepared).await
}

impl Dialect for Postgres {
    async fn execute(
        connection: &mut PgConnection,
        statement: &str,
        values: &[Value<'_>],
        prepared: bool,
    ) -> Result<u64, sqlx::Error> {
        let done = if prepared {
            bound!(statement, values).execute(connection).await?
        } else {
            let text = with_literals(statement, values);
            connection.execute(text.as_str()).await?
        };
        Ok(done.rows_affected())
    }

    async fn fetch(
        connection: &mut PgConnection,
        statement: &str,
        values: &[Value<'_>],
        prepared: bool,
    ) -> Result<Option<PgRow>, sqlx::Error> {
        if prepared {
            let query = bound!(statement, values);
            return query.fetch_optional(connection).await;
        }
        let text = with_literals(statement, values);
        connection.fetch_optional(text.as_str()).await
    }

    /// There is none of that name, or one already, or one with other parameters.
    fn has_lost_prepared(error: &sqlx::Error) -> bool {
        let code = error.as_database_error().and_then(|it| it.code());
        matches!(code.as_deref(), Some("26000" | "42P05" | "08P01" | "22P03"))
    }

    /// A standby, or a server on its way to become one.
    fn takes_no_writes(error: &sqlx::Error) -> bool {
        let code = error.as_database_error().and_then(|it| it.code());
        code.as_deref() == Some("25006")
    }
}

/// The statement as one text, which needs no more than one message and leaves nothing behind in the connection. What is
/// known of a statement whose values come apart from it belongs to the connection.
fn with_literals(statement: &str, values: &[Value<'_>]) -> String {
    let mut text = String::with_capacity(statement.len() + 256);
    let mut parts = statement.split('$');
    text.push_str(parts.next().unwrap_or_default());
    for part in parts {
        // There are no more than nine.
        let (number, rest) = part.split_at(1);
        let number: usize = number.parse().expect("a dollar begins a parameter");
        match values[number - 1] {
            Value::Number(number) => text.push_str(&format!("({number})")),
            Value::Bytes(bytes) => {
                text.push_str("decode('");
                text.push_str(&hexadecimal(bytes));
                text.push_str("', 'hex')");
            }
            Value::Absent => text.push_str("NULL"),
        }
        text.push_str(rest);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_statement_with_literals_has_its_values_wherever_they_are_wanted() {
        let values = [Value::Bytes(br"it's \"), Value::Number(-5), Value::Absent];
        let text = with_literals("a = $1 AND b < $2::bigint AND $1 = c OR d = $3", &values);
        let id = "decode('69742773205c', 'hex')";
        assert_eq!(
            text,
            format!("a = {id} AND b < (-5)::bigint AND {id} = c OR d = NULL")
        );
    }
}
