//! Dead letters that come back: of some orders two fail until a service that they need is up again, and one always fails.
//! A redriver sends them back to their topic, later each time; those of the two are handled then, and the third is parked
//! for people to look at.
//!
//! It makes its own topics, ends within 30 s, and with 0 if the topics hold at the end what is told here.

mod common;

use std::{
    collections::BTreeSet,
    process::ExitCode,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rdkafka::{
    ClientConfig, Message as _, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer as _},
    message::{Headers as _, OwnedMessage},
};
use reliable_consumer::{
    DeadLetter, HandlerResult, Message, Redriver, ReliableConsumer, Retry, Text, header_names,
    permanent,
};
use tokio::time::{sleep, timeout};

#[tokio::main]
async fn main() -> common::Result<ExitCode> {
    let told = timeout(Duration::from_secs(30), tell()).await;
    Ok(match told.map_err(|_| "it takes longer than 30 s")? {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("not as it should be: {error}");
            ExitCode::FAILURE
        }
    })
}

async fn tell() -> common::Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
    let topic = format!("example-redrive-{now}");
    let [letters, parked] = [format!("{topic}.dlq"), format!("{topic}.dlq.parked")];
    common::create_topics([&topic, &letters, &parked], 1).await?;
    let orders = [
        "paid",
        "needs the bank",
        "paid too",
        "needs the bank too",
        "nonsense",
    ];
    common::produce(&topic, orders.map(|order| (order, order))).await?;

    let consumer = ReliableConsumer::builder()
        .bootstrap_servers(common::brokers())
        .group_id(&topic)
        .topic(&topic)
        .dead_letter(DeadLetter::topic(&letters))
        .build()?;
    let handled: Arc<Mutex<BTreeSet<String>>> = Arc::default();
    let noted = Arc::clone(&handled);
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        let (order, trip) = (message.payload().to_string(), message.retry_count());
        let fails = match &*order {
            "nonsense" => true,
            order => order.starts_with("needs the bank") && trip < 2,
        };
        println!(
            "trip {trip}: {order} {}",
            if fails { "fails" } else { "is handled" }
        );
        if fails {
            return Err(permanent("not now"));
        }
        noted.lock().expect("no handler panics").insert(order);
        Ok(())
    };
    let consuming = consumer.handle();
    let service = tokio::spawn(consumer.run(handler).into_future());

    let redriver = Redriver::builder()
        .bootstrap_servers(common::brokers())
        .dead_letter_topic(&letters)
        .allow(&topic)
        .threshold(3)
        .backoff(Retry::exponential(
            Duration::from_millis(300),
            Duration::from_secs(1),
        ))
        .build()?;
    let redriving = redriver.handle();
    let back = tokio::spawn(redriver.run().into_future());

    while handled.lock().expect("no handler panics").len() < 4
        || redriving.report().parked_total() < 1
    {
        sleep(Duration::from_millis(50)).await;
    }
    redriving.shutdown()?;
    consuming.shutdown()?;
    let (report, _) = (back.await??, service.await??);
    println!(
        "sent back {} times, parked {}, still waiting {}",
        report.redriven_total(),
        report.parked_total(),
        report.waiting
    );

    let count = read(&letters)?.len();
    if count != 8 {
        return Err(format!("{count} dead letters instead of two times two and four").into());
    }
    let parked = read(&parked)?;
    let [nonsense] = &parked[..] else {
        return Err(format!("{} letters are parked instead of one", parked.len()).into());
    };
    for (name, wanted) in [
        (header_names::PARK_REASON, "exhausted"),
        (header_names::RETRY_COUNT, "3"),
        (header_names::ORIGINAL_TOPIC, topic.as_str()),
    ] {
        let value = header(nonsense, name).unwrap_or_default();
        println!("parked with {name}: {value}");
        if value != wanted {
            return Err(format!("{name} is {value} instead of {wanted}").into());
        }
    }
    Ok(())
}

fn header<'a>(letter: &'a OwnedMessage, name: &str) -> Option<&'a str> {
    let headers = letter.headers()?;
    let found = headers.iter().find(|header| header.key == name)?;
    str::from_utf8(found.value?).ok()
}

/// All that is in the one partition of a topic.
fn read(topic: &str) -> common::Result<Vec<OwnedMessage>> {
    let reader: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", common::brokers())
        .set("group.id", "example-redrive-reader")
        .set("enable.auto.commit", "false")
        .create()?;
    let within = Duration::from_secs(5);
    let (_, end) = reader.fetch_watermarks(topic, 0, within)?;
    let mut from = TopicPartitionList::new();
    from.add_partition_offset(topic, 0, Offset::Beginning)?;
    reader.assign(&from)?;
    let mut all = Vec::new();
    while (all.len() as i64) < end {
        let message = reader.poll(within).ok_or("the brokers send nothing")??;
        all.push(message.detach());
    }
    Ok(all)
}
