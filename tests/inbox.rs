//! The inbox in the databases that it is for: markers and effects in one transaction.

mod databases;

use std::time::Duration;

use reliable_consumer::idempotency::inbox::{Arrival, Inbox};
use reliable_consumer_testing::{ServiceKind, own_pooler, own_service};
use sqlx::{Executor, Row};
use tokio::time::{sleep, timeout};

/// An effect as one statement. Ids are the tests' own: nothing to escape.
fn payment(id: &str) -> String {
    format!("INSERT INTO payments (id) VALUES ('{id}')")
}

macro_rules! on {
    ($database:ident, $pool:ty, $open:expr) => {
        mod $database {
            use super::*;

            /// With a table of effects beside the inbox's, in a database of the test's own.
            async fn open() -> Option<$pool> {
                let pool = $open.await?;
                Inbox::new("any")
                    .create_table(&pool)
                    .await
                    .expect("tables can be made");
                let effects = "CREATE TABLE payments (id VARCHAR(100) NOT NULL)";
                sqlx::raw_sql(effects)
                    .execute(&pool)
                    .await
                    .expect("tables can be made");
                Some(pool)
            }

            async fn count(pool: &$pool, table: &str) -> i64 {
                let query = format!("SELECT count(*) FROM {table}");
                let row: (i64,) = sqlx::query_as(&query)
                    .fetch_one(pool)
                    .await
                    .expect("it answers");
                row.0
            }

            /// What a handler does. What was there before the work is told.
            async fn pay(
                pool: &$pool,
                inbox: &Inbox,
                id: &str,
                commit: bool,
            ) -> Result<Arrival, sqlx::Error> {
                let mut transaction = pool.begin().await?;
                let arrival = inbox.begin(&mut transaction, id).await?;
                if !arrival.is_repeat() {
                    sqlx::query(&payment(id)).execute(&mut *transaction).await?;
                    // Long enough for others to come.
                    sleep(Duration::from_millis(20)).await;
                    if commit {
                        transaction.commit().await?;
                    }
                }
                Ok(arrival)
            }

            #[tokio::test(flavor = "multi_thread")]
            async fn effect_and_marker_are_committed_together_or_vanish_together() {
                let Some(pool) = open().await else { return };
                let inbox = Inbox::new("billing");
                let arrivals = [
                    (false, Arrival::First),
                    (true, Arrival::First),
                    (true, Arrival::Repeat),
                ];
                for (commit, expected) in arrivals {
                    let arrival = pay(&pool, &inbox, "order-1", commit)
                        .await
                        .expect("it answers");
                    assert_eq!(arrival, expected);
                }
                assert_eq!(count(&pool, "payments").await, 1);
                assert_eq!(count(&pool, "reliable_consumer_inbox").await, 1);
            }

            // P7
            #[tokio::test(flavor = "multi_thread")]
            async fn of_many_deliveries_at_once_each_message_has_its_effect_once() {
                let Some(pool) = open().await else { return };
                let inbox = Inbox::new("billing");
                let tasks: Vec<_> = (0..60)
                    .map(|n| {
                        let (pool, inbox) = (pool.clone(), inbox.clone());
                        tokio::spawn(async move {
                            let id = format!("order-{}", n % 6);
                            // Some handlers fail in the middle, and all are retried as the consumer does it.
                            for attempt in 0..100 {
                                let commit = attempt > 0 || n % 3 > 0;
                                match pay(&pool, &inbox, &id, commit).await {
                                    Ok(Arrival::First) if !commit => {}
                                    Ok(_) => return,
                                    Err(error) => println!("{id}: {error}"),
                                }
                            }
                            panic!("{id} never went through");
                        })
                    })
                    .collect();
                for task in tasks {
                    task.await.expect("it goes through");
                }
                assert_eq!(count(&pool, "payments").await, 6);
                let distinct = count(&pool, "(SELECT DISTINCT id FROM payments) AS paid").await;
                assert_eq!(distinct, 6);
            }

            #[tokio::test(flavor = "multi_thread")]
            async fn a_repeat_waits_for_the_end_of_the_first_and_takes_over_what_was_rolled_back() {
                let Some(pool) = open().await else { return };
                let inbox = Inbox::new("billing");
                for commit in [false, true] {
                    let mut first = pool.begin().await.expect("it answers");
                    let arrival = inbox
                        .begin(&mut first, "order-1")
                        .await
                        .expect("it answers");
                    assert_eq!(arrival, Arrival::First);
                    let second = {
                        let (pool, inbox) = (pool.clone(), inbox.clone());
                        tokio::spawn(async move { pay(&pool, &inbox, "order-1", false).await })
                    };
                    let mut second = std::pin::pin!(second);
                    let early = timeout(Duration::from_millis(300), second.as_mut()).await;
                    assert!(
                        early.is_err(),
                        "it was told {early:?} before the first had ended"
                    );
                    let end = if commit {
                        first.commit().await
                    } else {
                        first.rollback().await
                    };
                    end.expect("it answers");
                    let expected = if commit {
                        Arrival::Repeat
                    } else {
                        Arrival::First
                    };
                    let arrival = second
                        .await
                        .expect("it does not panic")
                        .expect("it answers");
                    assert_eq!(arrival, expected);
                }
            }

            #[tokio::test(flavor = "multi_thread")]
            async fn ids_are_told_apart_by_name_and_by_every_byte_however_long() {
                let Some(pool) = open().await else { return };
                let mut ids: Vec<Vec<u8>> = ["", " ", "a", "A", "a ", "á", "a\0", "'", "a:b"]
                    .map(|it| it.as_bytes().to_vec())
                    .to_vec();
                ids.extend([255, 256, 257, 100_000].map(|length| vec![b'x'; length]));
                ids.push(vec![0xff, 0xfe]);
                for expected in [Arrival::First, Arrival::Repeat] {
                    let mut transaction = pool.begin().await.expect("it answers");
                    for name in ["billing", "Billing", "billing:a", ""] {
                        for id in &ids {
                            let arrival = Inbox::new(name).begin(&mut transaction, id).await;
                            assert_eq!(arrival.expect("it answers"), expected, "{name} {id:?}");
                        }
                    }
                    transaction.commit().await.expect("it answers");
                }
            }

            #[tokio::test(flavor = "multi_thread")]
            async fn a_repeat_leaves_the_transaction_fit_for_other_work() {
                let Some(pool) = open().await else { return };
                let inbox = Inbox::new("billing");
                let mut transaction = pool.begin().await.expect("it answers");
                for (id, expected) in [
                    ("1", Arrival::First),
                    ("1", Arrival::Repeat),
                    ("2", Arrival::First),
                ] {
                    assert_eq!(
                        inbox.begin(&mut transaction, id).await.expect("it answers"),
                        expected
                    );
                }
                sqlx::query(&payment("1"))
                    .execute(&mut *transaction)
                    .await
                    .expect("it goes on");
                transaction.commit().await.expect("it answers");
                assert_eq!(count(&pool, "payments").await, 1);
                assert_eq!(count(&pool, "reliable_consumer_inbox").await, 2);
            }

            #[tokio::test(flavor = "multi_thread")]
            async fn markers_are_removed_in_batches_when_they_are_old_and_not_before() {
                const AGE: Duration = Duration::from_secs(2);
                let Some(pool) = open().await else { return };
                let inbox = Inbox::new("billing");
                let mark = async |id: String| {
                    let mut transaction = pool.begin().await.expect("it answers");
                    let arrival = inbox.begin(&mut transaction, id).await.expect("it answers");
                    transaction.commit().await.expect("it answers");
                    arrival
                };
                for n in 0..25 {
                    let _ = mark(n.to_string()).await;
                }
                sleep(AGE * 2).await;
                let _ = mark("new".to_owned()).await;
                let mut batches = Vec::new();
                for _ in 0..4 {
                    let removed = inbox.remove_older(&pool, AGE, 10).await;
                    batches.push(removed.expect("it answers"));
                }
                assert_eq!(batches, [10, 10, 5, 0]);
                assert_eq!(mark("new".to_owned()).await, Arrival::Repeat);
                assert_eq!(mark("0".to_owned()).await, Arrival::First);
            }
        }
    };
}

on!(postgres, sqlx::PgPool, databases::own_postgres());
on!(mariadb, sqlx::MySqlPool, databases::own_mariadb());
on!(sqlite, sqlx::SqlitePool, databases::sqlite());

// P7
#[tokio::test(flavor = "multi_thread")]
async fn in_postgres_one_statement_can_write_marker_and_effect_and_of_many_at_once_one_does() {
    let Some(pool) = databases::own_postgres().await else {
        return;
    };
    let inbox = Inbox::new("billing");
    inbox.create_table(&pool).await.expect("it answers");
    let effects = sqlx::raw_sql("CREATE TABLE payments (id TEXT NOT NULL)");
    effects.execute(&pool).await.expect("it answers");
    let pay = |id: String| {
        let (pool, inbox) = (pool.clone(), inbox.clone());
        async move {
            let both = sqlx::query(
                "WITH marker AS (
                     INSERT INTO reliable_consumer_inbox (id) VALUES ($1) ON CONFLICT (id) DO NOTHING RETURNING id
                 )
                 INSERT INTO payments (id) SELECT $2 FROM marker",
            );
            let both = both.bind(inbox.marker(&id)).bind(id);
            both.execute(&pool)
                .await
                .expect("it answers")
                .rows_affected()
        }
    };
    let tasks: Vec<_> = (0..60)
        .map(|n| tokio::spawn(pay(format!("order-{}", n % 6))))
        .collect();
    let mut paid = 0;
    for task in tasks {
        paid += task.await.expect("it goes through");
    }
    assert_eq!(paid, 6);
    // It is the same marker as that of a transaction.
    let mut transaction = pool.begin().await.expect("it answers");
    let arrival = inbox.begin(&mut transaction, "order-1").await;
    assert_eq!(arrival.expect("it answers"), Arrival::Repeat);
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_a_pooler_of_transactions_markers_are_written_without_prepared_statements() {
    let started = tokio::task::block_in_place(|| {
        let server = own_service(ServiceKind::Postgres)?;
        let pooler = own_pooler(&server)?;
        Some((server, pooler))
    });
    let Some((_server, pooler)) = started else {
        return;
    };
    let pool = sqlx::PgPool::connect(pooler.url()).await;
    let pool = pool.expect("it answers");
    let inbox = Inbox::new("billing").without_prepared_statements();
    inbox.create_table(&pool).await.expect("tables can be made");
    let effects = "CREATE TABLE payments (id VARCHAR(100) NOT NULL)";
    let made = sqlx::raw_sql(effects).execute(&pool).await;
    made.expect("tables can be made");
    let tasks: Vec<_> = (0..80)
        .map(|n| {
            let (pool, inbox) = (pool.clone(), inbox.clone());
            tokio::spawn(async move {
                let id = format!("order-{}", n % 40);
                let mut transaction = pool.begin().await?;
                if !inbox.begin(&mut transaction, &id).await?.is_repeat() {
                    let effect = payment(&id);
                    transaction.execute(effect.as_str()).await?;
                    transaction.commit().await?;
                }
                Ok::<_, sqlx::Error>(())
            })
        })
        .collect();
    for task in tasks {
        let handled = task.await.expect("it does not panic");
        handled.expect("nothing is in the way");
    }
    let count = sqlx::raw_sql("SELECT count(*), count(DISTINCT id) FROM payments");
    let row = count.fetch_one(&pool).await.expect("it answers");
    assert_eq!((row.get::<i64, _>(0), row.get::<i64, _>(1)), (40, 40));
}
