//! Delayed retries: a payment whose provider is slow to come round waits in retry topics, and holds up no other; one that
//! never works out ends in the dead-letter topic with its story. Ends by itself and checks what it says.
//!
//! `cargo run --example retry_topics`

mod common;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use reliable_consumer::{
    DeadLetter, HandlerResult, Message, Ordering, ReliableConsumer, Retry, RetryTopics, Text,
};

#[tokio::main]
async fn main() -> common::Result<()> {
    let started = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
    let payments = format!("example-payments-{started}");
    let dead_letters = format!("{payments}.dlq");
    // In production rather minutes and hours.
    let tiers = RetryTopics::new([1, 3].map(Duration::from_secs));
    let names: Vec<_> = tiers.topics_of(&payments).collect();
    common::create_topics([&payments, &names[0], &names[1], &dead_letters], 2).await?;
    let numbers = (1..=8).map(|number| (format!("customer-{number}"), number.to_string()));
    common::produce(&payments, numbers).await?;

    let consumer = ReliableConsumer::builder()
        .bootstrap_servers(common::brokers())
        .group_id(&payments)
        .topic(&payments)
        // Payments have nothing to do with each other: there is no order that waiting could break.
        .ordering(Ordering::Unordered)
        .retry(Retry::fixed(Duration::from_millis(50)).max_attempts(2))
        .retry_topics(tiers)
        .dead_letter(DeadLetter::topic(&dead_letters))
        .build()?;

    let began = Instant::now();
    let calls: Arc<Mutex<BTreeMap<u32, Vec<Duration>>>> = Arc::default();
    let noted = Arc::clone(&calls);
    let pay = async move |message: &Message<Text>| -> HandlerResult {
        let number: u32 = message.payload().parse()?;
        let mut calls = noted.lock().expect("no handler panics");
        calls.entry(number).or_default().push(began.elapsed());
        drop(calls);
        // Number 3 is paid at the third attempt, 5 at the fourth, 7 never.
        let needed = match number {
            3 => 3,
            5 => 4,
            7 => u32::MAX,
            _ => 1,
        };
        if message.attempt() < needed {
            Err("the provider does not answer")?;
        }
        println!(
            "{:>5} ms: payment {number} is made at attempt {}, read from {}",
            began.elapsed().as_millis(),
            message.attempt(),
            message.record().topic()
        );
        Ok(())
    };
    let (handle, noted) = (consumer.handle(), Arc::clone(&calls));
    let done = async move {
        // What waits in a retry topic may not have been seen there yet: first all calls, then all commits.
        let all = || {
            noted
                .lock()
                .expect("no handler panics")
                .values()
                .map(Vec::len)
                .sum::<usize>()
        };
        while all() < 5 + 3 + 4 + 4 && began.elapsed() < Duration::from_secs(20) {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        common::caught_up(handle).await;
    };
    let report = consumer.run(pay).with_graceful_shutdown(done).await?;

    let calls = calls.lock().expect("no handler panics");
    let called = |number: u32| calls[&number].len();
    println!(
        "handled {}, moved to retry topics {}, dead-lettered {}",
        report.handled, report.moved_to_retry, report.dead_lettered
    );
    // Only a broker that lost its connection in the middle could make one of them come again.
    assert_eq!((report.handled, report.dead_lettered), (7, 1));
    assert_eq!(report.moved_to_retry, 1 + 2 + 2);
    assert_eq!((called(1), called(3), called(5), called(7)), (1, 3, 4, 4));
    assert!(calls[&3][2] - calls[&3][1] >= Duration::from_secs(1));
    assert!(calls[&5][3] - calls[&5][2] >= Duration::from_secs(3));
    println!("payment 7 is in {dead_letters}, after 4 attempts");
    Ok(())
}
