//! One record kills whatever process handles it. The process is started again each time, as systemd or Kubernetes would
//! do it; after a few deaths the record is found and dead-lettered as `crashed`, and all others have been handled.
//!
//! Without arguments it is the supervisor, which starts this program again as the service. It ends within 20 s, with 0 if
//! the story went as told here.

mod common;

use std::{
    collections::BTreeSet, os::unix::process::ExitStatusExt, process::ExitCode, time::Duration,
};

use rdkafka::{
    ClientConfig, Message as _, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer as _},
    message::Headers as _,
};
use reliable_consumer::{DeadLetter, HandlerResult, Message, ReliableConsumer, Text};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::Command,
    time::sleep,
};

const RECORDS: usize = 300;
const POISON: usize = 123;

#[tokio::main]
async fn main() -> common::Result<ExitCode> {
    if let Some(topic) = std::env::args().nth(1) {
        serve(&topic).await?;
        return Ok(ExitCode::SUCCESS);
    }
    common::checked(20, supervise()).await
}

/// The service: handles what there is, and ends.
async fn serve(topic: &str) -> common::Result<()> {
    let consumer = ReliableConsumer::builder()
        .bootstrap_servers(common::brokers())
        .group_id(topic)
        .topic(topic)
        .concurrency(16)
        .crash_limit(3) // The default.
        .dead_letter(DeadLetter::topic(format!("{topic}.dlq")))
        // With a name that outlives the process, its successor need not wait until the group has noticed the death.
        .property("group.instance.id", "the-only-one")
        .build()?;
    let done = common::caught_up(consumer.handle());
    consumer.run(handle).with_graceful_shutdown(done).await?;
    Ok(())
}

async fn handle(message: &Message<Text>) -> HandlerResult {
    sleep(Duration::from_millis(5)).await;
    if **message.payload() == *POISON.to_string() {
        std::process::abort();
    }
    println!("{}", message.payload());
    Ok(())
}

async fn supervise() -> common::Result<()> {
    let topic = format!("example-crash-{}", std::process::id());
    let dead_letter_topic = format!("{topic}.dlq");
    common::create_topics([&topic, &dead_letter_topic], 2).await?;
    let records = (0..RECORDS).map(|n| (format!("key-{}", n % 50), n.to_string()));
    common::produce(&topic, records).await?;

    let mut handled = BTreeSet::new();
    for deaths in 0.. {
        let mut service = Command::new(std::env::current_exe()?)
            .arg(&topic)
            .stdout(std::process::Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let output = service.stdout.take().ok_or("its output is piped")?;
        let mut lines = BufReader::new(output).lines();
        let before = handled.len();
        while let Some(line) = lines.next_line().await? {
            handled.insert(line.parse::<usize>()?);
        }
        let newly = handled.len() - before;
        let status = service.wait().await?;
        if status.success() {
            println!("after {deaths} deaths the service came to the end: {newly} more handled");
            break;
        }
        let signal = status.signal().ok_or("the service ended with an error")?;
        println!(
            "the service was killed by signal {signal}: {newly} more handled; starting it again"
        );
    }
    let missing: Vec<_> = (0..RECORDS).filter(|n| !handled.contains(n)).collect();
    println!(
        "{} of {RECORDS} handled, without {missing:?}",
        handled.len()
    );
    let (value, kind) = dead_letter(&dead_letter_topic)?;
    println!("dead letter: record {value:?}, {kind}");
    if missing != [POISON] || value != POISON.to_string() || kind != "crashed" {
        return Err("the poison record alone should be a dead letter, as `crashed`".into());
    }
    Ok(())
}

/// The value of the first dead letter, and why it is one.
fn dead_letter(topic: &str) -> common::Result<(String, String)> {
    let reader: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", common::brokers())
        .set("group.id", "reader")
        .create()?;
    let mut assignment = TopicPartitionList::new();
    for partition in 0..2 {
        assignment.add_partition_offset(topic, partition, Offset::Beginning)?;
    }
    reader.assign(&assignment)?;
    let letter = reader
        .poll(Duration::from_secs(5))
        .ok_or("there is no dead letter")??;
    let headers = letter.headers().ok_or("it has no headers")?;
    let kind = headers.iter().find(|header| header.key == "errorKind");
    let text =
        |bytes: Option<&[u8]>| String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned();
    Ok((
        text(letter.payload()),
        text(kind.and_then(|kind| kind.value)),
    ))
}
