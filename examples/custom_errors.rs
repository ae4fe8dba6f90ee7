//! Errors of one's own, and one place that decides what they mean: retry, retry later, give up, or pass over.

mod common;

use std::time::Duration;

use reliable_consumer::{
    Classification, DeadLetter, DynError, HandlerResult, Message, Record, ReliableConsumer, Retry,
    Text, find_error, skip,
};

#[derive(Debug, thiserror::Error)]
enum PaymentError {
    #[error("currency `{0}` is unknown")]
    UnknownCurrency(String),
    #[error("the bank asks to wait for {0:?}")]
    RateLimited(Duration),
    #[error("the bank does not answer")]
    Unavailable,
}

/// A payment is an amount and a currency, as in `10 EUR`.
async fn pay(message: &Message<Text>) -> HandlerResult {
    let text = message.payload();
    println!("attempt {} at `{text}`", message.attempt());
    if text.starts_with('#') {
        return Err(skip("a comment")); // What a handler says itself is final.
    }
    let (amount, currency) = text.split_once(' ').ok_or("no currency")?;
    let _amount: u64 = amount.parse()?;
    book(currency, message.attempt()).await?;
    println!("paid `{text}`");
    Ok(())
}

async fn book(currency: &str, attempt: u32) -> Result<(), PaymentError> {
    match (currency, attempt) {
        ("EUR", _) => Ok(()),
        ("USD", 1) => Err(PaymentError::RateLimited(Duration::from_millis(700))),
        ("GBP", 1..=6) => Err(PaymentError::Unavailable),
        ("USD" | "GBP", _) => Ok(()),
        _ => Err(PaymentError::UnknownCurrency(currency.into())),
    }
}

/// Asked about every error that the handler passed on with `?`.
fn classify(error: &DynError, record: &Record) -> Classification {
    println!("    offset {}: {error}", record.offset());
    match find_error(error) {
        Some(PaymentError::UnknownCurrency(_)) => {
            Classification::permanent().dead_letter_topic("example-payments.currencies")
        }
        Some(PaymentError::RateLimited(wait)) => Classification::retry_after(*wait),
        // An outage says nothing about the record: it is waited out, however long it takes.
        Some(PaymentError::Unavailable) => {
            let patient = Retry::exponential(Duration::from_millis(50), Duration::from_secs(10));
            Classification::retry().backoff(patient.unlimited_attempts())
        }
        // Not a number, or no currency: no attempt will do better.
        None => Classification::permanent(),
    }
}

#[tokio::main]
async fn main() -> common::Result<()> {
    let topics = [
        "example-payments",
        "example-payments.dlq",
        "example-payments.currencies",
    ];
    common::create_topics(topics, 1).await?;
    let payments = ["10 EUR", "# test", "20 USD", "30 GBP", "40 XYZ", "ten EUR"];
    common::produce(
        "example-payments",
        payments.map(|payment| (payment, payment)),
    )
    .await?;

    let consumer = ReliableConsumer::builder()
        .bootstrap_servers(common::brokers())
        .group_id("example-payments")
        .topic("example-payments")
        .classifier(classify)
        .dead_letter(DeadLetter::topic("example-payments.dlq"))
        .build()?;
    let done = common::caught_up(consumer.handle());
    let report = consumer.run(pay).with_graceful_shutdown(done).await?;
    println!(
        "handled {}, skipped {}, dead-lettered {}, failed attempts tried again {}",
        report.handled, report.skipped, report.dead_lettered, report.retried
    );
    Ok(())
}
