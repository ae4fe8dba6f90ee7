//! The idempotency stores on the servers that they are for.

mod databases;

use std::{sync::Arc, time::Duration};

use reliable_consumer::idempotency::{
    Claim, Id, MemoryStore, MySqlStore, PostgresStore, RedisStore, SqliteStore, Store, Token,
    Update, contract, keep_clean,
};
use reliable_consumer_testing::{ServiceKind, own_pooler, own_service, service, unique};
use sqlx::{Executor, SqlitePool, mysql::MySqlPoolOptions, postgres::PgPoolOptions};

use databases::{mariadb, postgres, sqlite};

const LEASE: Duration = Duration::from_secs(60);
/// Servers are started beside the tests, and disks are slow then.
const UNIT: Duration = Duration::from_secs(2);
const SHORT: Duration = Duration::from_millis(50);

async fn redis() -> Option<RedisStore> {
    let service = service(ServiceKind::Redis)?;
    Some(RedisStore::connect(service.url()).expect("the url is well-formed"))
}

async fn claimed(store: &impl Store, id: &Id, lease: Duration) -> Token {
    match store.claim(id, lease).await {
        Ok(Claim::Claimed(token)) => token,
        other => panic!("{id:?} is free, not {other:?}"),
    }
}

fn id(name: &str) -> Id {
    Id::new("stores", &unique("test"), name)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_memory_store_keeps_the_contract() {
    contract::check(Arc::new(MemoryStore::new(10_000))).await;
}

// P6, P7
#[tokio::test(flavor = "multi_thread")]
async fn the_redis_store_keeps_the_contract() {
    let Some(store) = redis().await else { return };
    contract::check_with_unit(Arc::new(store), UNIT).await;
}

// P6, P7
#[tokio::test(flavor = "multi_thread")]
async fn the_postgres_store_keeps_the_contract() {
    let Some(pool) = postgres().await else { return };
    let store = PostgresStore::new(pool);
    store.create_table().await.expect("the table can be made");
    contract::check_with_unit(Arc::new(store), UNIT).await;
}

// P6, P7
#[tokio::test(flavor = "multi_thread")]
async fn the_mysql_store_keeps_the_contract_on_mariadb() {
    let Some(pool) = mariadb().await else { return };
    let store = MySqlStore::new(pool);
    store.create_table().await.expect("the table can be made");
    contract::check_with_unit(Arc::new(store), UNIT).await;
}

// P6, P7
#[tokio::test(flavor = "multi_thread")]
async fn the_sqlite_store_keeps_the_contract() {
    let store = SqliteStore::new(sqlite().await.expect("a file needs no service"));
    store.create_table().await.expect("the table can be made");
    contract::check_with_unit(Arc::new(store), UNIT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_postgres_store_keeps_the_contract_behind_a_pooler_of_transactions() {
    let Some(server) = tokio::task::block_in_place(|| own_service(ServiceKind::Postgres)) else {
        return;
    };
    let Some(pooler) = tokio::task::block_in_place(|| own_pooler(&server)) else {
        return;
    };
    let pool = || async {
        let options = PgPoolOptions::new().max_connections(10);
        options.connect(pooler.url()).await.expect("it answers")
    };
    // Found out, and chosen.
    let found_out = PostgresStore::new(pool().await);
    let table = found_out.create_table().await;
    table.expect("the table can be made");
    let chosen = PostgresStore::new(pool().await).without_prepared_statements();
    let (found_out, chosen) = (Arc::new(found_out), Arc::new(chosen));
    tokio::join!(
        contract::check_with_unit(found_out, UNIT),
        contract::check_with_unit(chosen, UNIT),
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_postgres_store_keeps_the_contract_on_connections_that_forget_all_after_each_use() {
    let Some(server) = tokio::task::block_in_place(|| own_service(ServiceKind::Postgres)) else {
        return;
    };
    let options = PgPoolOptions::new()
        .max_connections(10)
        .after_release(|connection, _| {
            Box::pin(async move { connection.execute("DISCARD ALL").await.map(|_| true) })
        });
    let pool = options.connect(server.url()).await.expect("it answers");
    let store = PostgresStore::new(pool);
    store.create_table().await.expect("the table can be made");
    contract::check_with_unit(Arc::new(store), UNIT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_can_be_made_by_many_at_once_and_again() {
    let Some(pool) = databases::own_postgres().await else {
        return;
    };
    let tasks: Vec<_> = (0..10)
        .map(|_| {
            let store = PostgresStore::new(pool.clone());
            tokio::spawn(async move { store.create_table().await })
        })
        .collect();
    for task in tasks {
        let created = task.await.expect("it does not panic");
        created.expect("the table is there, or is made");
    }
}

/// Claims that lapse, then removal by tens: so many batches, and what is left.
async fn batches(store: &impl Store, group: &str) -> Vec<u64> {
    for n in 0..25 {
        let _ = claimed(store, &Id::new("cleanup", group, n.to_string()), SHORT).await;
    }
    tokio::time::sleep(SHORT * 4).await;
    let mut batches = Vec::new();
    loop {
        let removed = store.remove_expired(10).await.expect("the store answers");
        batches.push(removed);
        if removed < 10 {
            return batches;
        }
    }
}

/// Each in a database of its own, since other tests let leases lapse too.
macro_rules! cleaning {
    ($name:ident, $store:ident, $pool:expr) => {
        #[tokio::test(flavor = "multi_thread")]
        async fn $name() {
            let Some(pool) = $pool else { return };
            let store = $store::new(pool.clone());
            store.create_table().await.expect("the table can be made");
            let standing = id("standing");
            let token = claimed(&store, &standing, LEASE).await;

            assert_eq!(batches(&store, "by hand").await, [10, 10, 5]);

            let cleaner = tokio::spawn(keep_clean(store.clone(), SHORT));
            let _ = claimed(&store, &id("over"), SHORT).await;
            for _ in 0..200 {
                tokio::time::sleep(SHORT).await;
                let rows: (i64,) = sqlx::query_as("SELECT count(*) FROM reliable_consumer_claims")
                    .fetch_one(&pool)
                    .await
                    .expect("the database answers");
                if rows.0 == 1 {
                    cleaner.abort();
                    let update = store.renew(&standing, &token, LEASE).await;
                    assert_eq!(update.expect("the store answers"), Update::Applied);
                    return;
                }
            }
            panic!("what was over is still there");
        }
    };
}

cleaning!(
    postgres_rows_are_removed_in_batches_when_their_time_is_over,
    PostgresStore,
    databases::own_postgres().await
);
cleaning!(
    mariadb_rows_are_removed_in_batches_when_their_time_is_over,
    MySqlStore,
    databases::own_mariadb().await
);
cleaning!(
    sqlite_rows_are_removed_in_batches_when_their_time_is_over,
    SqliteStore,
    sqlite().await
);

/// What is done stays done over a crash of the server, calls meanwhile may be retried, and a claim lapses by a clock that
/// went on.
async fn survives_a_crash(store: &impl Store, mut crash: impl FnMut(bool)) {
    let (done, held, abandoned) = (id("done"), id("held"), id("abandoned"));
    let token = claimed(store, &done, LEASE).await;
    let update = store.complete(&done, &token, LEASE, None).await;
    assert_eq!(update.expect("the store answers"), Update::Applied);
    let held_token = claimed(store, &held, LEASE).await;
    let _ = claimed(store, &abandoned, Duration::from_millis(500)).await;

    tokio::task::block_in_place(|| crash(true));
    let error = store
        .claim(&done, LEASE)
        .await
        .expect_err("the server is away");
    assert!(error.is_transient(), "{error}");
    let error = store
        .renew(&held, &held_token, LEASE)
        .await
        .expect_err("the server is away");
    assert!(error.is_transient(), "{error}");
    tokio::task::block_in_place(|| crash(false));

    // Connections in the pool find out one by one.
    let mut claim = store.claim(&done, LEASE).await;
    for _ in 0..20 {
        match &claim {
            Err(error) if error.is_transient() => claim = store.claim(&done, LEASE).await,
            _ => break,
        }
    }
    assert_eq!(
        claim.expect("the server is back"),
        Claim::Done { fingerprint: None }
    );
    let update = store.renew(&held, &held_token, LEASE).await;
    assert_eq!(update.expect("the server is back"), Update::Applied);
    tokio::time::sleep(Duration::from_millis(500)).await;
    let _ = claimed(store, &abandoned, LEASE).await;
}

// P8
#[tokio::test(flavor = "multi_thread")]
async fn ids_in_redis_survive_a_crash_of_the_server_that_syncs() {
    let Some(mut server) = own_service(ServiceKind::Redis) else {
        return;
    };
    let store = RedisStore::connect(server.url()).expect("the url is well-formed");
    survives_a_crash(
        &store,
        |stop| if stop { server.stop() } else { server.start() },
    )
    .await;
}

// P8
#[tokio::test(flavor = "multi_thread")]
async fn ids_in_postgres_survive_a_crash_of_the_server() {
    let Some(mut server) = own_service(ServiceKind::Postgres) else {
        return;
    };
    let options = PgPoolOptions::new().acquire_timeout(Duration::from_secs(2));
    let store = PostgresStore::new(options.connect(server.url()).await.expect("it answers"));
    store.create_table().await.expect("the table can be made");
    survives_a_crash(
        &store,
        |stop| if stop { server.stop() } else { server.start() },
    )
    .await;
}

// P8
#[tokio::test(flavor = "multi_thread")]
async fn ids_in_mariadb_survive_a_crash_of_the_server() {
    let Some(mut server) = own_service(ServiceKind::MariaDb) else {
        return;
    };
    let options = MySqlPoolOptions::new().acquire_timeout(Duration::from_secs(2));
    let store = MySqlStore::new(options.connect(server.url()).await.expect("it answers"));
    store.create_table().await.expect("the table can be made");
    survives_a_crash(
        &store,
        |stop| if stop { server.stop() } else { server.start() },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_somebody_has_to_set_up_is_not_worth_retrying() {
    let mut stores: Vec<(&str, Box<dyn Store>)> = Vec::new();
    let empty = SqlitePool::connect("sqlite::memory:")
        .await
        .expect("memory needs no service");
    stores.push(("sqlite", Box::new(SqliteStore::new(empty))));
    if let Some(pool) = databases::own_postgres().await {
        stores.push(("postgres", Box::new(PostgresStore::new(pool))));
    }
    if let Some(pool) = databases::own_mariadb().await {
        stores.push(("mariadb", Box::new(MySqlStore::new(pool))));
    }
    if let Some(service) = service(ServiceKind::Redis) {
        let url = service.url().replace("redis://", "redis://nobody:wrong@");
        stores.push((
            "redis",
            Box::new(RedisStore::connect(&url).expect("well-formed")),
        ));
    }
    for (name, store) in stores {
        let error = store.claim(&id("refused"), LEASE).await.expect_err(name);
        assert!(!error.is_transient(), "{name}: {error}");
        println!("{name}: {error}");
    }
}
