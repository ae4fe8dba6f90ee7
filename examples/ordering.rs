//! What each ordering lets run at the same time: the same 48 records, three times, with handlers that take 50 ms each.

mod common;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use reliable_consumer::{Handler, HandlerResult, Message, Ordering, ReliableConsumer, Text};

/// Notes when it worked, how many calls ran beside each other, and in which order each key's records ended.
#[derive(Clone, Default)]
struct Watch(Arc<Mutex<Seen>>);

#[derive(Default)]
struct Seen {
    first: Option<Instant>,
    last: Option<Instant>,
    running: usize,
    most: usize,
    by_key: HashMap<String, Vec<u32>>,
}

impl Handler<Text> for Watch {
    async fn handle(&self, message: &Message<Text>) -> HandlerResult {
        let number: u32 = message.payload().parse()?;
        {
            let mut seen = self.0.lock().expect("no handler panics");
            seen.first.get_or_insert_with(Instant::now);
            seen.running += 1;
            seen.most = seen.most.max(seen.running);
        }
        // The first record of each key takes longer, so that without an order others overtake it.
        let work = if number < 4 { 100 } else { 50 };
        tokio::time::sleep(Duration::from_millis(work)).await;
        let mut seen = self.0.lock().expect("no handler panics");
        seen.running -= 1;
        seen.last = Some(Instant::now());
        let key = message.key_str().ok_or("every key is text")?.to_owned();
        seen.by_key.entry(key).or_default().push(number);
        Ok(())
    }
}

#[tokio::main]
async fn main() -> common::Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
    let topic = format!("example-ordering-{now}");
    common::create_topics([&topic], 2).await?;
    let keys = ["ada", "bob", "cem", "dee"];
    let records = (0..48).map(|number| (keys[number % 4], number.to_string()));
    common::produce(&topic, records).await?;

    println!("48 records, 4 keys, 2 partitions, 50 ms of work each, concurrency 16");
    for ordering in [Ordering::Unordered, Ordering::ByKey, Ordering::ByPartition] {
        let consumer = ReliableConsumer::builder()
            .bootstrap_servers(common::brokers())
            .group_id(format!("{topic}-{ordering:?}"))
            .topic(&topic)
            .ordering(ordering)
            .concurrency(16)
            .commit_interval(Duration::from_millis(100))
            .build()?;
        let done = common::caught_up(consumer.handle());
        let watch = Watch::default();
        consumer
            .run(watch.clone())
            .with_graceful_shutdown(done)
            .await?;

        let seen = watch.0.lock().expect("no handler panics");
        let took = seen.last.zip(seen.first).map(|(last, first)| last - first);
        let in_order = seen.by_key.values().all(|numbers| numbers.is_sorted());
        println!(
            "{:<12} {:>5} ms, at most {:>2} at the same time, {}",
            format!("{ordering:?}"),
            took.unwrap_or_default().as_millis(),
            seen.most,
            if in_order {
                "each key in order"
            } else {
                "keys out of order"
            },
        );
    }
    Ok(())
}
