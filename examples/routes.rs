//! Two topics with two kinds of payload in one consumer. They share its concurrency, its memory and its shutdown.

mod common;

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use reliable_consumer::{HandlerResult, Json, Message, ReliableConsumer, Routes, Text};

#[derive(serde::Deserialize)]
struct SignUp {
    email: String,
}

async fn sign_up(message: &Message<Json<SignUp>>) -> HandlerResult {
    println!("welcome, {}", message.payload().email);
    Ok(())
}

#[tokio::main]
async fn main() -> common::Result<()> {
    common::create_topics(["example-sign-ups", "example-clicks"], 2).await?;
    let sign_ups =
        ["ada", "bob", "cem"].map(|name| (name, format!(r#"{{"email": "{name}@example.com"}}"#)));
    common::produce("example-sign-ups", sign_ups).await?;
    let clicks = (0..1_000).map(|n| (format!("visitor-{}", n % 10), "/pricing"));
    common::produce("example-clicks", clicks).await?;

    let pricing = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&pricing);
    let click = async move |message: &Message<Text>| -> HandlerResult {
        if &**message.payload() == "/pricing" {
            counter.fetch_add(1, Relaxed);
        }
        Ok(())
    };

    let consumer = ReliableConsumer::builder()
        .bootstrap_servers(common::brokers())
        .group_id("example-routes")
        .topics(["example-sign-ups", "example-clicks"])
        .build()?;
    let done = common::caught_up(consumer.handle());
    let routes = Routes::new()
        .topic("example-sign-ups", sign_up)
        .topic("example-clicks", click);
    let report = consumer
        .run_routes(routes)
        .with_graceful_shutdown(done)
        .await?;
    println!(
        "the price list was looked at {} times",
        pricing.load(Relaxed)
    );
    println!("handled {}", report.handled);
    Ok(())
}
