//! Pools on the databases of the testing crate.

use std::time::Duration;

use reliable_consumer_testing::{ServiceKind, service, unique};
use sqlx::{
    MySqlPool, PgPool, SqlitePool,
    mysql::MySqlPoolOptions,
    postgres::PgPoolOptions,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions},
};

const PATIENCE: Duration = Duration::from_secs(60);

pub async fn postgres() -> Option<PgPool> {
    let service = tokio::task::block_in_place(|| service(ServiceKind::Postgres))?;
    let options = PgPoolOptions::new()
        .max_connections(10)
        .acquire_timeout(PATIENCE);
    Some(options.connect(service.url()).await.expect("it answers"))
}

pub async fn mariadb() -> Option<MySqlPool> {
    let service = tokio::task::block_in_place(|| service(ServiceKind::MariaDb))?;
    let options = MySqlPoolOptions::new()
        .max_connections(10)
        .acquire_timeout(PATIENCE);
    Some(options.connect(service.url()).await.expect("it answers"))
}

/// A file that goes with the temporary directory of the target.
pub async fn sqlite() -> Option<SqlitePool> {
    let file = format!("{}/{}.sqlite", env!("CARGO_TARGET_TMPDIR"), unique("ids"));
    let options = SqliteConnectOptions::new()
        .filename(file)
        .create_if_missing(true)
        .busy_timeout(PATIENCE)
        .journal_mode(SqliteJournalMode::Wal);
    let pool = SqlitePoolOptions::new()
        .acquire_timeout(PATIENCE)
        .connect_with(options)
        .await;
    Some(pool.expect("files can be made there"))
}

/// A database that no other test looks into.
pub async fn own_postgres() -> Option<PgPool> {
    let pool = postgres().await?;
    let name = unique("test").replace('-', "_");
    let created = sqlx::raw_sql(&format!("CREATE DATABASE {name}"))
        .execute(&pool)
        .await;
    created.expect("the server is ours");
    let options = (*pool.connect_options()).clone().database(&name);
    let options = PgPoolOptions::new()
        .acquire_timeout(PATIENCE)
        .connect_with(options);
    Some(options.await.expect("it answers"))
}

/// A database that no other test looks into.
pub async fn own_mariadb() -> Option<MySqlPool> {
    let pool = mariadb().await?;
    let name = unique("test").replace('-', "_");
    let created = sqlx::raw_sql(&format!("CREATE DATABASE {name}"))
        .execute(&pool)
        .await;
    created.expect("the server is ours");
    let options = (*pool.connect_options()).clone().database(&name);
    let options = MySqlPoolOptions::new()
        .acquire_timeout(PATIENCE)
        .connect_with(options);
    Some(options.await.expect("it answers"))
}
