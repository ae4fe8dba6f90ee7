//! The whole circle of dead letters in a few seconds: orders fail, are dead-lettered with their story, and are sent back
//! by a redriver, later each time. Some are handled in the end; the others are parked for people to look at. A table tells
//! what became of each, and the topics are counted.
//!
//! Without `KAFKA_BROKERS` it runs on librdkafka's mock cluster, in this process: good to see how it goes, and no proof of
//! durability. The mock does not tell how its topics are set: the redriver asks for 10 s before it sends the first letter
//! back. It makes its own topics, ends within 30 s, and with 1 if a count is wrong.

mod common;

use std::{
    collections::{BTreeMap, HashSet},
    env,
    process::ExitCode,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rdkafka::{
    ClientConfig, Message as _, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer as _},
    message::{Headers as _, OwnedMessage},
    mocking::MockCluster,
    producer::{DefaultProducerContext, FutureProducer, FutureRecord},
};
use reliable_consumer::{
    DeadLetter, HandlerResult, Message, Redriver, ReliableConsumer, Retry, Text, header_names,
    permanent,
};
use tokio::time::sleep;

const PARTITIONS: i32 = 2;
/// A letter that has made so many trips is parked instead of making another.
const THRESHOLD: u32 = 3;
/// Each order, and the trip on which it succeeds, if on any.
const ORDERS: [(&str, Option<u32>); 9] = [
    ("tea", Some(0)),
    ("coffee", Some(0)),
    ("milk, while the bank is closed", Some(1)),
    ("sugar", Some(0)),
    ("a loan", Some(2)),
    ("flour, to be paid by a late cheque", Some(3)),
    ("minus five eggs", None),
    ("salt", Some(0)),
    ("the moon", None),
];

#[tokio::main]
async fn main() -> common::Result<ExitCode> {
    common::checked(30, tell()).await
}

/// The brokers to use, and topics on them.
struct World {
    brokers: String,
    topics: [String; 3],
    /// Lives for as long as it is needed.
    _mock: Option<MockCluster<'static, DefaultProducerContext>>,
}

impl World {
    async fn new() -> common::Result<Self> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
        let orders = format!("orders-{now}");
        let [letters, parked] = [format!("{orders}.dlq"), format!("{orders}.dlq.parked")];
        let topics = [orders, letters, parked];
        if let Ok(brokers) = env::var("KAFKA_BROKERS") {
            common::create_topics([&topics[0], &topics[1], &topics[2]], PARTITIONS).await?;
            return Ok(Self {
                brokers,
                topics,
                _mock: None,
            });
        }
        let mock = MockCluster::new(1)?;
        for topic in &topics {
            mock.create_topic(topic, PARTITIONS, 1)?;
        }
        Ok(Self {
            brokers: mock.bootstrap_servers(),
            topics,
            _mock: Some(mock),
        })
    }

    fn client(&self) -> ClientConfig {
        let mut client = ClientConfig::new();
        client.set("bootstrap.servers", &self.brokers);
        client
    }

    async fn order(&self) -> common::Result<()> {
        let producer: FutureProducer = self.client().set("acks", "all").create()?;
        for (order, _) in ORDERS {
            let record = FutureRecord::to(&self.topics[0]).key(order).payload(order);
            let sent = producer.send(record, Duration::from_secs(5)).await;
            sent.map_err(|(error, _)| error)?;
        }
        Ok(())
    }

    /// All that is in a topic.
    fn read(&self, topic: &str) -> common::Result<Vec<OwnedMessage>> {
        let mut client = self.client();
        let client = client.set("group.id", "nobody");
        let reader: BaseConsumer = client.set("enable.auto.commit", "false").create()?;
        let within = Duration::from_secs(5);
        let mut from = TopicPartitionList::new();
        let mut left = 0;
        for partition in 0..PARTITIONS {
            let (low, high) = reader.fetch_watermarks(topic, partition, within)?;
            left += high - low;
            from.add_partition_offset(topic, partition, Offset::Beginning)?;
        }
        reader.assign(&from)?;
        let mut all = Vec::new();
        while (all.len() as i64) < left {
            let message = reader.poll(within).ok_or("the brokers send nothing")??;
            all.push(message.detach());
        }
        Ok(all)
    }
}

/// Where an order was each time that its handler was called, and whether it succeeded at last.
#[derive(Default)]
struct Life {
    places: Vec<String>,
    handled: bool,
}

async fn tell() -> common::Result<()> {
    let world = World::new().await?;
    let [orders, letters, parked] = &world.topics;
    world.order().await?;

    let lives: Arc<Mutex<BTreeMap<String, Life>>> = Arc::default();
    let noted = Arc::clone(&lives);
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        let (order, trip) = (message.payload().to_string(), message.retry_count());
        let wanted = ORDERS.iter().find(|(known, _)| *known == order);
        let succeeds = wanted.is_some_and(|(_, on)| on.is_some_and(|on| trip >= on));
        let outcome = if succeeds { "is handled" } else { "fails" };
        println!("trip {trip}: {order} {outcome}");
        let mut lives = noted.lock().expect("no handler panics");
        let life = lives.entry(order).or_default();
        let place = format!("{}@{}", message.partition(), message.offset());
        life.places.push(place);
        life.handled = succeeds;
        match succeeds {
            true => Ok(()),
            false => Err(permanent("not now")),
        }
    };
    let consumer = ReliableConsumer::builder()
        .bootstrap_servers(&world.brokers)
        .group_id(orders)
        .topic(orders)
        .dead_letter(DeadLetter::topic(letters))
        .property("group.protocol", "consumer")
        .build()?;
    let consuming = consumer.handle();
    let service = tokio::spawn(consumer.run(handler).into_future());

    let (first, longest) = (Duration::from_millis(300), Duration::from_secs(1));
    let redriver = Redriver::builder()
        .bootstrap_servers(&world.brokers)
        .dead_letter_topic(letters)
        .allow(orders)
        .threshold(THRESHOLD)
        .backoff(Retry::exponential(first, longest))
        .property("group.protocol", "consumer")
        .build()?;
    let redriving = redriver.handle();
    let back = tokio::spawn(redriver.run().into_future());

    let succeed = ORDERS.iter().filter(|(_, on)| on.is_some()).count();
    let give_up = ORDERS.len() - succeed;
    let done = || handled(&lives.lock().expect("no handler panics"));
    while done() < succeed || redriving.report().parked_total() < give_up as u64 {
        sleep(Duration::from_millis(50)).await;
    }
    redriving.shutdown()?;
    consuming.shutdown()?;
    let (redriven, consumed) = (back.await??, service.await??);

    let lying = world.read(parked)?;
    let lives = lives.lock().expect("no handler panics");
    show(orders, &lives, &lying);
    println!(
        "\nhandled {}, dead-lettered {} times, sent back {} times, parked {}",
        consumed.handled,
        consumed.dead_lettered,
        redriven.redriven_total(),
        redriven.parked_total()
    );

    let trips = |(_, on): &(&str, Option<u32>)| on.unwrap_or(THRESHOLD) as usize;
    let trips: usize = ORDERS.iter().map(trips).sum();
    let ids: HashSet<_> = lying
        .iter()
        .filter_map(|it| header(it, header_names::MESSAGE_ID))
        .collect();
    let exhausted = lying.iter().filter(|letter| {
        header(letter, header_names::PARK_REASON) == Some("exhausted")
            && header(letter, header_names::RETRY_COUNT) == Some(&THRESHOLD.to_string())
            && header(letter, header_names::ORIGINAL_TOPIC) == Some(orders)
    });
    let written = world.read(letters)?.len();
    for (what, is, wanted) in [
        (
            "records in the topic",
            world.read(orders)?.len(),
            ORDERS.len() + trips,
        ),
        ("letters", written, trips + give_up),
        ("orders handled", handled(&lives), succeed),
        ("letters parked", lying.len(), give_up),
        ("of them by different ids", ids.len(), give_up),
        ("of them after all trips", exhausted.count(), give_up),
        (
            "letters that nobody is done with",
            redriven.waiting as usize,
            0,
        ),
    ] {
        if is != wanted {
            return Err(format!("{what}: {is} instead of {wanted}").into());
        }
    }
    Ok(())
}

fn handled(lives: &BTreeMap<String, Life>) -> usize {
    lives.values().filter(|life| life.handled).count()
}

fn header<'a>(letter: &'a OwnedMessage, name: &str) -> Option<&'a str> {
    let headers = letter.headers()?;
    let found = headers.iter().find(|header| header.key == name)?;
    str::from_utf8(found.value?).ok()
}

fn show(topic: &str, lives: &BTreeMap<String, Life>, parked: &[OwnedMessage]) {
    let mut rows = vec![["ORDER", "TOPIC", "OFFSETS", "TRIPS", "END"].map(String::from)];
    for (order, _) in ORDERS {
        let Some(life) = lives.get(order) else {
            continue;
        };
        let lies = |letter: &&OwnedMessage| letter.payload() == Some(order.as_bytes());
        let end = match parked.iter().find(lies) {
            _ if life.handled => "handled".into(),
            Some(it) => format!("parked at {}@{}", it.partition(), it.offset()),
            None => "lost".into(),
        };
        let trips = life.places.len() - 1;
        let places = life.places.join(" ");
        rows.push([order.into(), topic.into(), places, trips.to_string(), end]);
    }
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths = [0, 1, 2, 3].map(width);
    println!();
    for [order, topic, places, trips, end] in &rows {
        println!(
            "{order:0$}  {topic:1$}  {places:2$}  {trips:>3$}  {end}",
            widths[0], widths[1], widths[2], widths[3]
        );
    }
}
