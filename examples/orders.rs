//! A service as it would be deployed: JSON orders go into a store, bad ones to a dead-letter topic, a status line is
//! printed every second, SIGTERM and ctrl-c end it in order, and a second signal ends it at once.
//!
//! `cargo run --example orders` brings its own orders and ends when they are done; with `-- serve` it runs on until it
//! is told to stop.

mod common;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use reliable_consumer::{
    ConsumerHandle, DeadLetter, Handler, HandlerResult, Json, Message, ReliableConsumer, ResultExt,
};
use tokio::{
    signal::unix::{SignalKind, signal},
    time::{interval, sleep},
};

#[derive(serde::Deserialize)]
struct Order {
    id: u64,
    cents: u64,
}

/// Stands for a database. An order may come twice, after a crash for instance: the second time it changes nothing.
#[derive(Clone, Default)]
struct Store(Arc<Mutex<HashMap<u64, u64>>>);

impl Handler<Json<Order>> for Store {
    async fn handle(&self, message: &Message<Json<Order>>) -> HandlerResult {
        let order = message.payload();
        if order.cents == 0 {
            Err("an order of nothing").permanent()?;
        }
        sleep(Duration::from_millis(20)).await;
        if order.id.is_multiple_of(10) && message.attempt() == 1 {
            Err("the database is busy")?; // Tried again after 100 ms or so.
        }
        let mut orders = self.0.lock().expect("no handler panics");
        orders.insert(order.id, order.cents);
        Ok(())
    }
}

#[tokio::main]
async fn main() -> common::Result<()> {
    common::create_topics(["example-orders", "example-orders.dlq"], 4).await?;
    let consumer = ReliableConsumer::builder()
        .bootstrap_servers(common::brokers())
        .group_id("example-orders")
        .topic("example-orders")
        .concurrency(16)
        .handler_timeout(Duration::from_secs(10))
        .dead_letter(DeadLetter::topic("example-orders.dlq"))
        .build()?;
    tokio::spawn(obey_signals(consumer.handle()));
    tokio::spawn(print_status(consumer.handle()));
    if std::env::args().nth(1).as_deref() != Some("serve") {
        tokio::spawn(end_with_the_orders(consumer.handle()));
        common::produce("example-orders", orders()).await?;
    }
    let store = Store::default();
    let report = consumer.run(store.clone()).await?;
    let orders = store.0.lock().expect("no handler panics").len();
    println!("{orders} orders stored");
    println!(
        "handled {}, tried again {}, dead-lettered {}, left for the next run {}",
        report.handled,
        report.retried,
        report.dead_lettered,
        report.abandoned + report.unstarted
    );
    Ok(())
}

/// Of 2,000 orders twenty are not JSON and twenty are worth nothing.
fn orders() -> impl Iterator<Item = (String, String)> {
    (0..2_000).map(|id| {
        let value = match id % 100 {
            7 => "{ half an ord".to_owned(),
            8 => format!(r#"{{"id": {id}, "cents": 0}}"#),
            _ => format!(r#"{{"id": {id}, "cents": {}}}"#, 100 + id),
        };
        (format!("customer-{}", id % 300), value)
    })
}

async fn end_with_the_orders(handle: ConsumerHandle) {
    common::caught_up(handle.clone()).await;
    let _ = handle.shutdown(); // Fails when it has ended already.
}

/// The first signal asks for an orderly end, the second for an immediate one.
async fn obey_signals(handle: ConsumerHandle) -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    for urgent in [false, true] {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        let _ = if urgent {
            handle.stop_now()
        } else {
            handle.shutdown()
        };
    }
    Ok(())
}

async fn print_status(handle: ConsumerHandle) {
    let mut every_second = interval(Duration::from_secs(1));
    loop {
        every_second.tick().await;
        let Ok(status) = handle.status().await else {
            continue;
        };
        let partitions = status.partitions.iter();
        let lag: i64 = partitions
            .clone()
            .filter_map(|it| it.lag)
            .map(|lag| lag.records)
            .sum();
        let running: usize = partitions.clone().map(|it| it.running).sum();
        let retrying: usize = partitions.map(|it| it.retrying).sum();
        println!("lag {lag}, running {running}, waiting for another attempt {retrying}");
    }
}
