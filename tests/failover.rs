//! The idempotency stores on servers that change their parts, and that refuse for a while.

use std::{
    future::{Future, poll_fn},
    task::Poll,
    time::{Duration, Instant},
};

use redis::aio::MultiplexedConnection;
use reliable_consumer::idempotency::{
    Claim, Id, MySqlStore, PostgresStore, RedisStore, Store, StoreError, Update,
};
use reliable_consumer_testing::{Name, Service, ServiceKind, own_service, own_standby, unique};
use sqlx::{Connection, Executor, MySqlPool, PgConnection, postgres::PgPoolOptions};

const LEASE: Duration = Duration::from_secs(60);
/// How soon a store goes on where the new server is ready.
const SOON: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(30);

fn own(kind: ServiceKind) -> Option<Service> {
    tokio::task::block_in_place(|| own_service(kind))
}

fn id(name: &str) -> Id {
    Id::new("failover", &unique("test"), name)
}

/// A message that has been handled.
async fn done(store: &impl Store, name: &str) -> Id {
    let id = id(name);
    let Claim::Claimed(token) = store.claim(&id, LEASE).await.expect("it answers") else {
        panic!("it is new");
    };
    let update = store.complete(&id, &token, LEASE, None).await;
    assert_eq!(update.expect("it answers"), Update::Applied);
    id
}

/// Claims, as the records that come one after another do, until one is granted; each has a second.
async fn granted_again(store: &impl Store, within: Duration) -> Duration {
    let began = Instant::now();
    loop {
        let id = id("next");
        let claim = tokio::time::timeout(Duration::from_secs(1), store.claim(&id, LEASE));
        let error = match claim.await {
            Ok(Ok(claim)) => {
                assert!(matches!(claim, Claim::Claimed(_)), "{claim:?}");
                return began.elapsed();
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no answer within a second".to_owned(),
        };
        assert!(began.elapsed() < within, "not within {within:?}: {error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// At the same time.
async fn all<T>(calls: impl IntoIterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut calls: Vec<_> = calls.into_iter().map(|it| (Box::pin(it), None)).collect();
    poll_fn(|cx| {
        let mut over = true;
        for (call, answer) in &mut calls {
            if answer.is_none() {
                match call.as_mut().poll(cx) {
                    Poll::Ready(it) => *answer = Some(it),
                    Poll::Pending => over = false,
                }
            }
        }
        if over { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    calls.into_iter().filter_map(|(_, answer)| answer).collect()
}

async fn refused(store: &impl Store) -> StoreError {
    let claim = store.claim(&id("refused"), LEASE).await;
    claim.expect_err("it is refused")
}

/// What an operator types.
async fn redis_cli(connection: &mut MultiplexedConnection, line: &str) -> redis::Value {
    let mut words = line.split(' ');
    let mut command = redis::cmd(words.next().expect("a command"));
    words.for_each(|word| {
        command.arg(word);
    });
    let answer = command.query_async(connection).await;
    answer.unwrap_or_else(|error| panic!("{line}: {error}"))
}

async fn operator(url: &str) -> MultiplexedConnection {
    let client = redis::Client::open(url).expect("the url is well-formed");
    let config = redis::AsyncConnectionConfig::new().set_response_timeout(Some(PATIENCE));
    let connection = client.get_multiplexed_async_connection_with_config(&config);
    connection.await.expect("it answers")
}

/// A master, its replica that has caught up, and a name that points to the master.
async fn replicated_redis() -> Option<(Service, Service, Name)> {
    let (master, replica) = (own(ServiceKind::Redis)?, own(ServiceKind::Redis)?);
    let mut of_master = operator(master.url()).await;
    redis_cli(&mut of_master, "CONFIG SET repl-diskless-sync-delay 0").await;
    let mut of_replica = operator(replica.url()).await;
    let follow = format!("REPLICAOF 127.0.0.1 {}", master.port());
    redis_cli(&mut of_replica, &follow).await;
    caught_up(&master).await;
    let name = Name::of(master.port());
    Some((master, replica, name))
}

async fn caught_up(master: &Service) {
    let mut of_master = operator(master.url()).await;
    let began = Instant::now();
    while redis_cli(&mut of_master, "WAIT 1 1000").await != redis::Value::Int(1) {
        assert!(began.elapsed() < PATIENCE, "the replica does not catch up");
    }
}

fn through(name: &Name) -> RedisStore {
    let url = format!("redis://127.0.0.1:{}/", name.port());
    RedisStore::connect(&url).expect("the url is well-formed")
}

// P8
#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_became_a_replica_is_left_for_the_one_that_its_name_points_to_now() {
    let Some((old, new, name)) = replicated_redis().await else {
        return;
    };
    let store = through(&name);
    let handled = done(&store, "handled").await;
    redis_cli(&mut operator(old.url()).await, "SET reliable x").await;
    caught_up(&old).await;

    // The old one lives on, and keeps the connections that it has.
    redis_cli(&mut operator(new.url()).await, "REPLICAOF NO ONE").await;
    let follow = format!("REPLICAOF 127.0.0.1 {}", new.port());
    redis_cli(&mut operator(old.url()).await, &follow).await;
    let error = refused(&store).await;
    assert!(error.is_transient(), "the name has not moved: {error}");
    name.move_to(new.port());

    granted_again(&store, SOON).await;
    let claim = store.claim(&handled, LEASE).await.expect("it answers");
    assert_eq!(claim, Claim::Done { fingerprint: None });
}

// P8
#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_is_gone_without_a_word_is_left_for_the_one_that_its_name_points_to_now() {
    let Some((_old, new, name)) = replicated_redis().await else {
        return;
    };
    let store = through(&name);
    done(&store, "handled").await;
    redis_cli(&mut operator(new.url()).await, "REPLICAOF NO ONE").await;
    name.move_to(new.port());
    name.cut_off();
    granted_again(&store, SOON).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_does_not_find_its_replicas_may_have_been_replaced() {
    let Some((old, new, name)) = replicated_redis().await else {
        return;
    };
    let store = through(&name);
    done(&store, "handled").await;
    // Cut off from its replica, which has become the master of those who can reach it.
    redis_cli(&mut operator(new.url()).await, "REPLICAOF NO ONE").await;
    let mut of_old = operator(old.url()).await;
    redis_cli(&mut of_old, "CONFIG SET min-replicas-to-write 1").await;
    let error = refused(&store).await;
    assert!(error.is_transient(), "{error}");
    name.move_to(new.port());
    granted_again(&store, SOON).await;
}

/// Whatever refuses the handshake, at first or later: once it is put right the store goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_refuses_the_handshake_for_a_while_is_used_when_it_has_been_put_right() {
    let Some(redis) = own(ServiceKind::Redis) else {
        return;
    };
    let mut operator = operator(redis.url()).await;
    let at = |who: &str, database: &str| {
        let url = format!("redis://{who}@127.0.0.1:{}/{database}", redis.port());
        RedisStore::connect(&url).expect("the url is well-formed")
    };
    let mut cli = async |line: &str| drop(redis_cli(&mut operator, line).await);

    // A user that is made later.
    let late = at("late:secret", "");
    assert!(!refused(&late).await.is_transient());
    cli("ACL SETUSER late on >secret ~* +@all").await;
    granted_again(&late, SOON).await;

    // A password that is changed, and changed back.
    cli("ACL SETUSER late resetpass >other").await;
    cli("CLIENT KILL USER late").await;
    let error = loop {
        // The connection is lost first.
        match late.claim(&id("lost"), LEASE).await {
            Err(error) if error.is_transient() => {}
            other => break other.expect_err("nobody gets in"),
        }
    };
    assert!(error.to_string().contains("uthentication"), "{error}");
    cli("ACL SETUSER late >secret").await;
    granted_again(&late, SOON).await;

    // A database that may not be chosen.
    cli("ACL SETUSER limited on >secret ~* +@all -select").await;
    let limited = at("limited:secret", "2");
    assert!(!refused(&limited).await.is_transient());
    cli("ACL SETUSER limited +select").await;
    granted_again(&limited, SOON).await;
}

/// That passes by itself.
#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_has_too_many_clients_is_waited_for() {
    let Some(redis) = own(ServiceKind::Redis) else {
        return;
    };
    let mut operator = operator(redis.url()).await;
    redis_cli(&mut operator, "CONFIG SET maxclients 1").await;
    let store = RedisStore::connect(redis.url()).expect("the url is well-formed");
    let error = refused(&store).await;
    assert!(error.is_transient(), "{error}");
    redis_cli(&mut operator, "CONFIG SET maxclients 100").await;
    granted_again(&store, SOON).await;
}

/// A pool as services have it, through the name.
async fn postgres_through(name: &Name) -> PostgresStore {
    let url = format!("postgres://postgres@127.0.0.1:{}/postgres", name.port());
    let options = PgPoolOptions::new().acquire_timeout(SOON);
    PostgresStore::new(options.connect(&url).await.expect("it answers"))
}

/// One session's, and each statement by itself.
async fn postgres_operator(service: &Service) -> PgConnection {
    let connection = PgConnection::connect(service.url()).await;
    connection.expect("it answers")
}

async fn psql(connection: &mut PgConnection, lines: &[&str]) {
    for line in lines {
        let done = connection.execute(*line).await;
        done.unwrap_or_else(|error| panic!("{line}: {error}"));
    }
}

// P8
#[tokio::test(flavor = "multi_thread")]
async fn a_postgres_that_takes_no_writes_is_left_for_its_standby_that_was_promoted() {
    let Some(old) = own(ServiceKind::Postgres) else {
        return;
    };
    let Some(new) = tokio::task::block_in_place(|| own_standby(&old)) else {
        return;
    };
    let name = Name::of(old.port());
    let store = postgres_through(&name).await;
    store.create_table().await.expect("the table can be made");
    let handled = done(&store, "handled").await;
    // All of its connections are in the pool.
    let many: Vec<_> = (0..10).map(|n| id(&n.to_string())).collect();
    let claims = many.iter().map(|id| store.claim(id, LEASE));
    for claim in all(claims).await {
        claim.expect("it answers");
    }

    let mut of_old = postgres_operator(&old).await;
    let read_only = "ALTER SYSTEM SET default_transaction_read_only = on";
    psql(&mut of_old, &[read_only, "SELECT pg_reload_conf()"]).await;
    let began = Instant::now();
    let error = loop {
        match store.claim(&id("demoted"), LEASE).await {
            Ok(_) => assert!(began.elapsed() < PATIENCE, "it is read-only"),
            Err(error) => break error,
        }
    };
    assert!(error.is_transient(), "the name has not moved: {error}");

    let mut of_new = postgres_operator(&new).await;
    psql(&mut of_new, &["SELECT pg_promote()"]).await;
    // What has come over with the rest.
    let writable = "SET default_transaction_read_only = off";
    psql(
        &mut of_new,
        &[writable, "ALTER SYSTEM RESET default_transaction_read_only"],
    )
    .await;
    name.move_to(new.port());

    granted_again(&store, SOON).await;
    let claim = store.claim(&handled, LEASE).await.expect("it answers");
    assert_eq!(claim, Claim::Done { fingerprint: None });
    // From then on nobody meets the old one.
    let many: Vec<_> = (0..20).map(|n| id(&n.to_string())).collect();
    let claims = many.iter().map(|id| store.claim(id, LEASE));
    for claim in all(claims).await {
        claim.expect("it is another server");
    }
}

// P8
#[tokio::test(flavor = "multi_thread")]
async fn a_mariadb_that_takes_no_writes_is_left_for_the_one_that_its_name_points_to_now() {
    let (Some(old), Some(new)) = (own(ServiceKind::MariaDb), own(ServiceKind::MariaDb)) else {
        return;
    };
    let name = Name::of(old.port());
    for server in [&old, &new] {
        let pool = MySqlPool::connect(server.url()).await.expect("it answers");
        let store = MySqlStore::new(pool.clone());
        store.create_table().await.expect("the table can be made");
        // Root may write whatever the server is.
        let user = "CREATE USER service@'127.0.0.1'; GRANT ALL ON test.* TO service@'127.0.0.1'";
        let made = sqlx::raw_sql(user).execute(&pool).await;
        made.expect("root may make users");
    }
    let url = format!("mysql://service@127.0.0.1:{}/test", name.port());
    let store = MySqlStore::new(MySqlPool::connect(&url).await.expect("it answers"));
    done(&store, "handled").await;
    let pool = MySqlPool::connect(old.url()).await.expect("it answers");
    let read_only = sqlx::raw_sql("SET GLOBAL read_only = 1")
        .execute(&pool)
        .await;
    read_only.expect("root may");
    let error = refused(&store).await;
    assert!(error.is_transient(), "the name has not moved: {error}");
    name.move_to(new.port());
    granted_again(&store, SOON).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_unsafe_about_a_server_of_each_kind_is_found_and_nothing_where_it_is_safe() {
    let said = |concerns: Vec<String>, words: &[&str]| {
        assert_eq!(concerns.len(), words.len(), "{concerns:?}");
        for word in words {
            assert!(
                concerns.iter().any(|it| it.contains(word)),
                "{word}: {concerns:?}"
            );
        }
    };
    if let Some((master, replica, _)) = replicated_redis().await {
        let store = |it: &Service| RedisStore::connect(it.url()).expect("the url is well-formed");
        said(
            store(&master).check().await.expect("it answers"),
            &["min-replicas-to-write"],
        );
        said(
            store(&replica).check().await.expect("it answers"),
            &["is a replica"],
        );
        let mut operator = operator(master.url()).await;
        for line in [
            "CONFIG SET min-replicas-to-write 1",
            "CONFIG SET appendonly no",
        ] {
            redis_cli(&mut operator, line).await;
        }
        said(
            store(&master).check().await.expect("it answers"),
            &["appendonly"],
        );
    }
    if let Some(server) = own(ServiceKind::Postgres) {
        let pool = sqlx::PgPool::connect(server.url())
            .await
            .expect("it answers");
        let store = PostgresStore::new(pool);
        store.create_table().await.expect("the table can be made");
        said(store.check().await.expect("it answers"), &[]);
        let mut operator = postgres_operator(&server).await;
        let lines = [
            "ALTER ROLE postgres SET synchronous_commit = off",
            "ALTER ROLE postgres SET default_transaction_isolation = serializable",
            "ALTER TABLE reliable_consumer_claims SET UNLOGGED",
        ];
        psql(&mut operator, &lines).await;
        let pool = sqlx::PgPool::connect(server.url())
            .await
            .expect("it answers");
        let concerns = PostgresStore::new(pool).check().await.expect("it answers");
        said(concerns, &["synchronous_commit", "isolation", "SET LOGGED"]);
    }
    if let Some(server) = own(ServiceKind::MariaDb) {
        let pool = MySqlPool::connect(server.url()).await.expect("it answers");
        let store = MySqlStore::new(pool.clone());
        said(store.check().await.expect("it answers"), &[]);
        let unsafe_settings =
            "SET GLOBAL innodb_flush_log_at_trx_commit = 2; SET GLOBAL read_only = 1";
        let set = sqlx::raw_sql(unsafe_settings).execute(&pool).await;
        set.expect("root may");
        said(
            store.check().await.expect("it answers"),
            &["innodb_flush", "read-only"],
        );
    }
}
