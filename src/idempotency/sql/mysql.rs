//! A store in MySQL or MariaDB.

use std::time::Duration;

use sqlx::{
    MySql, MySqlConnection, MySqlPool, Row,
    mysql::{MySqlDatabaseError, MySqlRow},
};

use super::{
    Words,
    pool::{Dialect, Statements, Value, bound},
    standing, store, store_error, update,
};
use crate::idempotency::{
    Claim, Fingerprint, Id, Reply, Store, StoreError, Token, Update, store::millis,
};

/// Remembers ids in a table of a MySQL or MariaDB database.
///
/// It survives whatever the database survives: crashes of consumers, and restarts with
/// `innodb_flush_log_at_trx_commit=1` (the default). After a failover to a replica that lags, the last ids may be missing,
/// and their messages are handled again. In a Galera cluster all consumers should use the same node: two nodes may each
/// grant a claim, and tell one of them afterwards.
///
/// A claim and the effects of the handler are different transactions. If the effects are in the same database, use an
/// [`Inbox`](crate::idempotency::inbox::Inbox) instead: it costs less, and knows no lease.
///
/// A server that answers that it is read-only is left: its connections in the pool are closed, and the next ones are made
/// to wherever the name leads then.
///
/// The calls that can run at the same time are as many as the pool has connections. Rows stay when their time is over
/// until [`Store::remove_expired`] removes them, see [`keep_clean`](crate::idempotency::keep_clean).
///
/// ```no_run
/// use reliable_consumer::idempotency::MySqlStore;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let pool = sqlx::MySqlPool::connect("mysql://localhost/shop").await?;
/// let store = MySqlStore::new(pool);
/// store.create_table().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct MySqlStore {
    statements: Statements<MySql>,
}

impl MySqlStore {
    /// What [`create_table`](Self::create_table) runs, for one's own migrations.
    pub const SCHEMA: &str = "
        CREATE TABLE IF NOT EXISTS reliable_consumer_claims (
            id VARBINARY(256) NOT NULL PRIMARY KEY,
            token BINARY(16) NOT NULL,
            done BOOLEAN NOT NULL,
            fingerprint BINARY(32),
            expires_at DATETIME(6) NOT NULL,
            INDEX reliable_consumer_claims_expires_at (expires_at)
        ) ENGINE = InnoDB";

    /// A store in the table `reliable_consumer_claims` of the connections' database.
    pub fn new(pool: MySqlPool) -> Self {
        Self {
            statements: Statements::on(pool),
        }
    }

    /// Makes the table unless it is there.
    ///
    /// # Errors
    ///
    /// [`StoreError::Refused`] without the permission to make tables.
    pub async fn create_table(&self) -> Result<(), StoreError> {
        let created = sqlx::raw_sql(Self::SCHEMA)
            .execute(self.statements.pool())
            .await;
        created.map(drop).map_err(store_error)
    }

    /// What is unsafe about the server.
    async fn concerns(&self) -> Result<Vec<String>, sqlx::Error> {
        let settings = "SELECT
            @@innodb_flush_log_at_trx_commit <> 1,
            @@read_only <> 0,
            EXISTS (SELECT 1 FROM information_schema.tables WHERE table_schema = DATABASE()
                AND table_name = 'reliable_consumer_claims' AND engine <> 'InnoDB')";
        let Some(row) = self.statements.fetch(settings, &[]).await? else {
            return Ok(Vec::new());
        };
        let mut concerns = Vec::new();
        let advice = [
            "a crash of the server loses the last ids: set innodb_flush_log_at_trx_commit to 1",
            "the server is read-only: connect to the primary",
            "the table reliable_consumer_claims knows no transactions: ALTER TABLE reliable_consumer_claims ENGINE = InnoDB",
        ];
        for (column, advice) in advice.into_iter().enumerate() {
            if row.try_get::<i64, _>(column)? != 0 {
                concerns.push(advice.to_owned());
            }
        }
        Ok(concerns)
    }

    /// What is new is one statement; for the rest it takes a second one to see what stands, and a third to replace what is
    /// over. `None` if somebody else was faster there.
    async fn try_claim(
        &self,
        id: &Id,
        token: &Token,
        lease: i64,
    ) -> Result<Option<Claim>, sqlx::Error> {
        let claimed = Claim::Claimed(*token);
        let (id, token, lease) = (
            Value::Bytes(id.as_bytes()),
            Value::Bytes(token.as_bytes()),
            Value::Number(lease),
        );
        let inserted = self
            .statements
            .execute(
                "INSERT INTO reliable_consumer_claims (id, token, done, expires_at)
                VALUES (?, ?, FALSE, UTC_TIMESTAMP(6) + INTERVAL ? * 1000 MICROSECOND)",
                &[id, token, lease],
            )
            .await;
        match inserted {
            Ok(_) => return Ok(Some(claimed)),
            Err(sqlx::Error::Database(error)) if error.is_unique_violation() => {}
            Err(error) => return Err(error),
        }
        let row = self
            .statements
            .fetch(
                "SELECT done, fingerprint, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at)
                FROM reliable_consumer_claims WHERE id = ?",
                &[id],
            )
            .await?;
        let Some(row) = row else { return Ok(None) };
        let lapses_in: i64 = row.try_get(2)?;
        if lapses_in > 0 {
            return Ok(Some(standing(row.try_get(0)?, row.try_get(1)?, lapses_in)));
        }
        let replaced = self
            .statements
            .execute(
                "UPDATE reliable_consumer_claims
                SET token = ?, done = FALSE,
                    expires_at = UTC_TIMESTAMP(6) + INTERVAL ? * 1000 MICROSECOND
                WHERE id = ? AND expires_at <= UTC_TIMESTAMP(6)",
                &[token, lease, id],
            )
            .await?;
        Ok((replaced == 1).then_some(claimed))
    }
}

// sqlx has the server count rows that match, changed or not: what is applied again counts.
const WORDS: Words = Words {
    renew: "UPDATE reliable_consumer_claims SET expires_at = UTC_TIMESTAMP(6) + INTERVAL ? * 1000 MICROSECOND
        WHERE id = ? AND token = ? AND NOT done AND expires_at > UTC_TIMESTAMP(6)",
    complete: "UPDATE reliable_consumer_claims
        SET done = TRUE, expires_at = UTC_TIMESTAMP(6) + INTERVAL ? * 1000 MICROSECOND, fingerprint = ?
        WHERE id = ? AND token = ? AND expires_at > UTC_TIMESTAMP(6)",
    release: "DELETE FROM reliable_consumer_claims
        WHERE id = ? AND token = ? AND NOT done AND expires_at > UTC_TIMESTAMP(6)",
    remove_expired: "DELETE FROM reliable_consumer_claims WHERE expires_at <= UTC_TIMESTAMP(6)
        ORDER BY expires_at LIMIT ?",
};

store!(MySqlStore);

impl Dialect for MySql {
    async fn execute(
        connection: &mut MySqlConnection,
        statement: &str,
        values: &[Value<'_>],
        _prepared: bool,
    ) -> Result<u64, sqlx::Error> {
        let done = bound!(statement, values).execute(connection).await?;
        Ok(done.rows_affected())
    }

    async fn fetch(
        connection: &mut MySqlConnection,
        statement: &str,
        values: &[Value<'_>],
        _prepared: bool,
    ) -> Result<Option<MySqlRow>, sqlx::Error> {
        let query = bound!(statement, values);
        query.fetch_optional(connection).await
    }

    /// A replica (`read_only` and `super_read_only`, InnoDB's own), or a node that its cluster has left behind.
    fn takes_no_writes(error: &sqlx::Error) -> bool {
        let error = error.as_database_error();
        let error = error.and_then(|it| it.try_downcast_ref::<MySqlDatabaseError>());
        error.is_some_and(|it| matches!(it.number(), 1047 | 1290 | 1792 | 1836))
    }
}
