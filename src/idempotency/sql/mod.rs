//! Stores in SQL databases: what they have in common.
//!
//! One row an id, in the table `reliable_consumer_claims`, with the time at which its lease or its memory is over, by the
//! server's clock. A row whose time is over counts as absent until it is removed. Each call is one statement that commits
//! by itself.

#[cfg(feature = "mysql")]
mod mysql;
mod pool;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;

use std::time::Duration;

use super::{Claim, Fingerprint, StoreError};

#[cfg(feature = "mysql")]
pub use mysql::MySqlStore;
#[cfg(feature = "postgres")]
pub use postgres::PostgresStore;
#[cfg(feature = "postgres")]
pub(super) use postgres::{create as create_in_postgres, execute as execute_in_postgres};
#[cfg(feature = "sqlite")]
pub use sqlite::SqliteStore;

/// The statements that differ between databases in words only. Values are bound in the order in which the methods of
/// [`Store`](super::Store) have them, but for the id and the token, which come last.
struct Words {
    renew: &'static str,
    complete: &'static str,
    release: &'static str,
    remove_expired: &'static str,
}

/// Implements a store with `statements` by its `WORDS` and its `try_claim`, which answers `None` when another claim came in
/// between.
macro_rules! store {
    ($store:ty) => {
        impl Store for $store {
            fn claim<'a>(&'a self, id: &'a Id, lease: Duration) -> Reply<'a, Claim> {
                Box::pin(async move {
                    let token = Token::unique();
                    loop {
                        let tried = self.try_claim(id, &token, millis(lease)).await;
                        if let Some(claim) = tried.map_err(store_error)? {
                            return Ok(claim);
                        }
                    }
                })
            }

            fn renew<'a>(
                &'a self,
                id: &'a Id,
                token: &'a Token,
                lease: Duration,
            ) -> Reply<'a, Update> {
                let values = [
                    Value::Number(millis(lease)),
                    Value::Bytes(id.as_bytes()),
                    Value::Bytes(token.as_bytes()),
                ];
                Box::pin(async move {
                    let rows = self.statements.execute(WORDS.renew, &values).await;
                    rows.map(update).map_err(store_error)
                })
            }

            fn complete<'a>(
                &'a self,
                id: &'a Id,
                token: &'a Token,
                keep_for: Duration,
                fingerprint: Option<Fingerprint>,
            ) -> Reply<'a, Update> {
                Box::pin(async move {
                    let fingerprint = fingerprint.as_ref().map(|it| &it.as_bytes()[..]);
                    let values = [
                        Value::Number(millis(keep_for)),
                        Value::optional(fingerprint),
                        Value::Bytes(id.as_bytes()),
                        Value::Bytes(token.as_bytes()),
                    ];
                    let rows = self.statements.execute(WORDS.complete, &values).await;
                    rows.map(update).map_err(store_error)
                })
            }

            fn release<'a>(&'a self, id: &'a Id, token: &'a Token) -> Reply<'a, Update> {
                let values = [Value::Bytes(id.as_bytes()), Value::Bytes(token.as_bytes())];
                Box::pin(async move {
                    let rows = self.statements.execute(WORDS.release, &values).await;
                    rows.map(update).map_err(store_error)
                })
            }

            fn check(&self) -> Reply<'_, Vec<String>> {
                Box::pin(async move { self.concerns().await.map_err(store_error) })
            }

            fn remove_expired(&self, at_most: u32) -> Reply<'_, u64> {
                let values = [Value::Number(at_most.into())];
                Box::pin(async move {
                    let rows = self.statements.execute(WORDS.remove_expired, &values).await;
                    rows.map_err(store_error)
                })
            }
        }
    };
}
use store;

/// What a row whose time is not over means for a claim.
fn standing(done: bool, fingerprint: Option<Vec<u8>>, lapses_in: i64) -> Claim {
    if done {
        let bytes = fingerprint.and_then(|it| it.try_into().ok());
        Claim::Done {
            fingerprint: bytes.map(Fingerprint::from_bytes),
        }
    } else {
        Claim::InProgress {
            lapses_in: Duration::from_micros(lapses_in.try_into().unwrap_or(0)),
        }
    }
}

fn update(rows: u64) -> super::Update {
    if rows == 0 {
        super::Update::Stale
    } else {
        super::Update::Applied
    }
}

/// Only what somebody has to see to is refused: what is not known may pass.
fn store_error(error: sqlx::Error) -> StoreError {
    use sqlx::Error;
    let refused = match &error {
        Error::Configuration(_)
        | Error::InvalidArgument(_)
        | Error::TypeNotFound { .. }
        | Error::ColumnNotFound(_)
        | Error::ColumnIndexOutOfBounds { .. }
        | Error::ColumnDecode { .. }
        | Error::Encode(_)
        | Error::Decode(_)
        | Error::PoolClosed => true,
        // The id is longer than its column. Other ids fit.
        Error::Database(of) if of.code().as_deref() == Some("22001") => {
            return StoreError::entry(error);
        }
        Error::Database(error) => error.code().is_some_and(|it| needs_attention(&it)),
        _ => false,
    };
    if refused {
        StoreError::refused(error)
    } else {
        StoreError::unavailable(error)
    }
}

/// By the class of an SQLSTATE: bad data or constraints (a table of another shape), wrong password, no such database,
/// schema or table, missing permission, unknown feature. SQLite has numbers of its own, the lowest byte of which counts:
/// no such table, missing permission, read-only, cannot open, constraint, no database.
fn needs_attention(code: &str) -> bool {
    match code.parse::<u32>() {
        Ok(number) if code.len() < 5 => matches!(number & 0xff, 1 | 3 | 8 | 14 | 19 | 23 | 26),
        _ => ["0A", "22", "23", "28", "3D", "3F", "42"].contains(&code.get(..2).unwrap_or("")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_pass_is_told_from_what_somebody_has_to_see_to() {
        let missing_tables = ["42P01", "42S02", "1"];
        let wrong_passwords_and_permissions = ["28P01", "28000", "42501", "42000", "1032"];
        for code in [&missing_tables[..], &wrong_passwords_and_permissions].concat() {
            assert!(needs_attention(code), "{code}");
        }
        let starting_full_busy_failing_over = [
            "57P03", "53300", "HY000", "40001", "5", "517", "08004", "25006",
        ];
        for code in starting_full_busy_failing_over {
            assert!(!needs_attention(code), "{code}");
        }
        assert!(store_error(sqlx::Error::PoolTimedOut).is_transient());
        assert!(!store_error(sqlx::Error::PoolClosed).is_transient());
    }
}
