//! Fetches that fail, and batches that cannot be read: nothing is passed over, and other partitions go on. On librdkafka's
//! mock cluster, which answers fetches with any error, and keeps any batch.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    time::{Duration, Instant},
};

use common::{PATIENCE, Running, Seen, millis};
use rdkafka::{
    ClientConfig, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer as _},
    mocking::MockCluster,
    producer::{BaseProducer, BaseRecord, DefaultProducerContext, Producer as _},
    types::{
        RDKafkaApiKey,
        RDKafkaRespErr::{self, *},
    },
};
use reliable_consumer::{
    Event, Events, HandlerResult, Message, Ordering, PartitionStatus, ReliableConsumer, Report,
    RunErrorKind, StopReason, StoppedPartition, Text,
};
use tokio::{sync::watch, task::LocalSet};

const TOPIC: &str = "orders";
const GROUP: &str = "shipping";

/// What a broker can answer a fetch of a partition with: what librdkafka deals with itself, and what it delivers.
const ERRORS: [RDKafkaRespErr; 24] = [
    // Delivered in place of a record.
    RD_KAFKA_RESP_ERR_UNKNOWN,
    RD_KAFKA_RESP_ERR_INVALID_MSG,
    RD_KAFKA_RESP_ERR_INVALID_MSG_SIZE,
    RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE,
    RD_KAFKA_RESP_ERR_REQUEST_TIMED_OUT,
    RD_KAFKA_RESP_ERR_NETWORK_EXCEPTION,
    RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED,
    RD_KAFKA_RESP_ERR_INVALID_REQUEST,
    RD_KAFKA_RESP_ERR_INVALID_TIMESTAMP,
    RD_KAFKA_RESP_ERR_POLICY_VIOLATION,
    RD_KAFKA_RESP_ERR_FETCH_SESSION_ID_NOT_FOUND,
    RD_KAFKA_RESP_ERR_INVALID_FETCH_SESSION_EPOCH,
    RD_KAFKA_RESP_ERR_INVALID_RECORD,
    RD_KAFKA_RESP_ERR_THROTTLING_QUOTA_EXCEEDED,
    RD_KAFKA_RESP_ERR_NOT_ENOUGH_REPLICAS,
    // Dealt with by librdkafka.
    RD_KAFKA_RESP_ERR_OFFSET_NOT_AVAILABLE,
    RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART,
    RD_KAFKA_RESP_ERR_LEADER_NOT_AVAILABLE,
    RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION,
    RD_KAFKA_RESP_ERR_REPLICA_NOT_AVAILABLE,
    RD_KAFKA_RESP_ERR_KAFKA_STORAGE_ERROR,
    RD_KAFKA_RESP_ERR_UNKNOWN_LEADER_EPOCH,
    RD_KAFKA_RESP_ERR_FENCED_LEADER_EPOCH,
    // The log is looked at, and has the position after all.
    RD_KAFKA_RESP_ERR_OFFSET_OUT_OF_RANGE,
];

/// Longer than it takes until the client's position is looked at.
const LOOK: Duration = Duration::from_millis(1_300);

struct World {
    cluster: MockCluster<'static, DefaultProducerContext>,
    producer: BaseProducer,
    produced: i64,
    /// Partition and offset.
    seen: Seen<(i32, i64)>,
    gate: watch::Sender<bool>,
    run: Option<Running>,
    events: Option<Events>,
    what: String,
}

impl World {
    fn new(partitions: i32, what: impl Into<String>) -> Self {
        let cluster = MockCluster::new(1).unwrap();
        cluster.create_topic(TOPIC, partitions, 1).unwrap();
        let producer = ClientConfig::new()
            .set("bootstrap.servers", cluster.bootstrap_servers())
            .set("linger.ms", "0")
            .create()
            .unwrap();
        Self {
            cluster,
            producer,
            produced: 0,
            seen: Seen::default(),
            gate: watch::channel(true).0,
            run: None,
            events: None,
            what: what.into(),
        }
    }

    /// Into partition 0.
    fn produce(&mut self, count: i64) {
        (0..count).for_each(|_| self.send(0));
        self.producer.flush(PATIENCE).unwrap();
        self.produced += count;
    }

    fn send(&self, partition: i32) {
        let record = BaseRecord::<(), _>::to(TOPIC)
            .payload("x")
            .partition(partition);
        self.producer.send(record).unwrap();
    }

    fn start(&mut self) {
        self.start_with(&[("group.protocol", "consumer")]);
    }

    fn start_with(&mut self, properties: &[(&str, &str)]) {
        let (seen, gate) = (self.seen.clone(), self.gate.subscribe());
        let builder = ReliableConsumer::builder()
            .bootstrap_servers(self.cluster.bootstrap_servers())
            .group_id(GROUP)
            .topic(TOPIC)
            .ordering(Ordering::Unordered)
            .concurrency(4)
            .commit_interval(millis(50));
        let builder = properties.iter().fold(builder, |builder, (name, value)| {
            builder.property(*name, *value)
        });
        let run = Running::start(
            builder,
            async move |message: &Message<Text>| -> HandlerResult {
                gate.clone().wait_for(|open| *open).await?;
                tokio::time::sleep(millis(2)).await;
                seen.note((message.partition(), message.offset()));
                Ok(())
            },
        );
        self.events = Some(run.handle.events().unwrap());
        self.run = Some(run);
    }

    async fn stop(&mut self) -> Report {
        self.run.take().unwrap().stop().await
    }

    async fn status(&self, partition: i32) -> Option<PartitionStatus> {
        let status = self.run.as_ref().unwrap().handle.status().await;
        let status = status.unwrap_or_else(|error| panic!("{}: {error}", self.what));
        let mut partitions = status.partitions.into_iter();
        partitions.find(|status| status.partition == partition)
    }

    async fn until(&self, what: &str, partition: i32, is_so: impl Fn(&PartitionStatus) -> bool) {
        let began = Instant::now();
        loop {
            let status = self.status(partition).await;
            if status.as_ref().is_some_and(&is_so) {
                return;
            }
            assert!(
                began.elapsed() < PATIENCE,
                "{}: {what}: handled {:?}, {status:#?}",
                self.what,
                self.seen.all()
            );
            tokio::time::sleep(millis(20)).await;
        }
    }

    /// All that was produced is handled, once, and committed.
    async fn all_handled(&self, when: &str) {
        let end = self.produced;
        let all = format!("{when}: all is handled and committed");
        self.until(&all, 0, |it| it.committed == Some(end)).await;
        self.handled_once(0, 0..end, when);
    }

    fn handled_once(&self, partition: i32, offsets: std::ops::Range<i64>, when: &str) {
        let mut all = self.seen.all();
        all.retain(|(of, _)| *of == partition);
        let mut all: Vec<_> = all.into_iter().map(|(_, offset)| offset).collect();
        all.sort_unstable();
        assert_eq!(all, offsets.collect::<Vec<_>>(), "{}: {when}", self.what);
    }

    fn next_fetch_fails(&self, error: RDKafkaRespErr) {
        self.cluster.request_errors(RDKafkaApiKey::Fetch, &[error]);
    }

    fn committed(&self, partition: i32) -> i64 {
        let consumer: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", self.cluster.bootstrap_servers())
            .set("group.id", GROUP)
            .create()
            .unwrap();
        let mut list = TopicPartitionList::new();
        list.add_partition(TOPIC, partition);
        let committed = consumer.committed_offsets(list, PATIENCE).unwrap();
        match committed.elements()[0].offset() {
            Offset::Offset(offset) => offset,
            other => panic!("{other:?} is committed"),
        }
    }

    async fn event<T>(&mut self, what: &str, mut is_it: impl FnMut(Event) -> Option<T>) -> T {
        let events = self.events.as_mut().unwrap();
        let found = async {
            loop {
                let event = events.next().await.expect("the run goes on");
                if let Some(found) = is_it(event) {
                    return found;
                }
            }
        };
        let found = tokio::time::timeout(PATIENCE, found).await;
        found.unwrap_or_else(|_| panic!("{}: {what}", self.what))
    }

    async fn stopped(&mut self) -> StoppedPartition {
        self.event("the partition stops", |event| match event {
            Event::PartitionStopped { partition, stopped } if partition.partition == 0 => {
                Some(stopped)
            }
            _ => None,
        })
        .await
    }
}

/// At four moments, one after another.
async fn goes_through(error: RDKafkaRespErr) {
    let mut world = World::new(1, format!("{error:?}"));
    world.produce(10);
    world.start();
    world.all_handled("at first").await;

    world.next_fetch_fails(error);
    tokio::time::sleep(LOOK).await;
    world.produce(3);
    world.all_handled("idle").await;

    for round in 0..200 {
        if round % 100 == 50 {
            world.next_fetch_fails(error);
        }
        world.send(0);
        world.producer.poll(Duration::ZERO);
        tokio::time::sleep(millis(5)).await;
    }
    world.produced += 200;
    world.produce(1);
    world.all_handled("under traffic").await;

    // Longer than what was read ahead is kept.
    world.run.as_ref().unwrap().handle.pause(TOPIC).unwrap();
    world.until("it pauses", 0, |it| it.paused).await;
    world.next_fetch_fails(error);
    tokio::time::sleep(millis(300)).await;
    world.produce(3);
    world
        .until("what was read ahead is dropped", 0, |it| it.fetch_paused)
        .await;
    world.next_fetch_fails(error);
    world.run.as_ref().unwrap().handle.resume(TOPIC).unwrap();
    world.produce(3);
    world.all_handled("paused").await;

    world.gate.send_replace(false);
    world.produce(2);
    world.until("they run", 0, |it| it.running == 2).await;
    world.next_fetch_fails(error);
    tokio::time::sleep(LOOK).await;
    let handle = world.run.as_ref().unwrap().handle.clone();
    handle.shutdown().unwrap();
    world.next_fetch_fails(error);
    world.gate.send_replace(true);
    let report = world.run.take().unwrap().ended().await;
    let report = report.unwrap_or_else(|error| panic!("{}: {error}", world.what));
    let end = world.produced;
    assert_eq!(
        report.partitions[0].committed,
        Some(end),
        "{}: draining",
        world.what
    );
    assert_eq!(world.committed(0), end, "{}: draining", world.what);
    world.produce(3);
    world.start();
    world.all_handled("after it was drained").await;
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_that_fails_with_any_error_loses_and_repeats_nothing() {
    beside_each_other(ERRORS.map(goes_through)).await;
}

async fn beside_each_other<F: Future<Output = ()> + 'static>(all: impl IntoIterator<Item = F>) {
    // Mock clusters stay on one thread.
    let local = LocalSet::new();
    let all: Vec<_> = all.into_iter().map(|one| local.spawn_local(one)).collect();
    local
        .run_until(async {
            for one in all {
                one.await.unwrap();
            }
        })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_the_group_never_could_read_ends_the_run_and_one_that_it_has_read_is_waited_for()
 {
    let denied = RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED;
    let mut world = World::new(1, "permission");
    world.produce(10);
    world.next_fetch_fails(denied);
    world.start();
    let error = world.run.take().unwrap().ended().await.unwrap_err();
    assert_eq!(error.kind(), RunErrorKind::Authorization, "{error}");
    assert!(
        error.to_string().contains("grant this principal READ"),
        "{error}"
    );
    assert_eq!(world.seen.all(), []);

    world.start();
    world.all_handled("with permission").await;
    world
        .cluster
        .request_errors(RDKafkaApiKey::Fetch, &[denied; 4]);
    let mut attempts = Vec::new();
    world
        .event("it fails more than once", |event| match event {
            Event::FetchFailed {
                position,
                attempts: now,
                ..
            } => {
                attempts.push((position, now));
                (attempts.len() == 2).then_some(())
            }
            _ => None,
        })
        .await;
    assert_eq!(attempts, [(10, 1), (10, 2)]);
    let status = world.status(0).await.unwrap();
    let failed = status.fetch_error.expect("the status tells of it");
    assert!(failed.error.contains("authorization"), "{failed:?}");
    world.produce(3);
    world.all_handled("when it is granted again").await;
    assert_eq!(world.status(0).await.unwrap().fetch_error, None);
    world.stop().await;
}

/// One in each partition.
fn one_each(world: &World, partitions: i32) {
    (0..partitions).for_each(|partition| world.send(partition));
    world.producer.flush(PATIENCE).unwrap();
}

async fn many_partitions_go_on(properties: &[(&str, &str)]) {
    const MANY: i32 = 1_000;
    // A full assignment a partition would be minutes, and nothing would be answered meanwhile.
    const BOUND: Duration = Duration::from_secs(10);
    const ANSWER: Duration = Duration::from_secs(1);
    let mut world = World::new(MANY, format!("{properties:?}"));
    one_each(&world, MANY);
    world.start_with(properties);
    let mut rounds = 1;
    let mut slowest = Duration::ZERO;
    for error in [
        None,
        Some(RD_KAFKA_RESP_ERR_UNKNOWN),
        Some(RD_KAFKA_RESP_ERR_OFFSET_OUT_OF_RANGE),
    ] {
        if let Some(error) = error {
            world.next_fetch_fails(error);
            one_each(&world, MANY);
            rounds += 1;
        }
        let began = Instant::now();
        while world.seen.len() < (rounds * MANY) as usize {
            let asked = Instant::now();
            let status = world.run.as_ref().unwrap().handle.status().await;
            status.unwrap_or_else(|error| panic!("{}: {error}", world.what));
            slowest = slowest.max(asked.elapsed());
            assert!(
                began.elapsed() < BOUND,
                "{}: {error:?}: {} of {} handled",
                world.what,
                world.seen.len(),
                rounds * MANY
            );
            tokio::time::sleep(millis(20)).await;
        }
        println!(
            "{}: {error:?}: handled after {:?}, the slowest status took {slowest:?}",
            world.what,
            began.elapsed()
        );
    }
    assert!(slowest < ANSWER, "{}: status took {slowest:?}", world.what);
    for partition in 0..MANY {
        world.handled_once(partition, 0..rounds as i64, "after all");
    }
    // In the middle of it.
    world.next_fetch_fails(RD_KAFKA_RESP_ERR_OFFSET_OUT_OF_RANGE);
    tokio::time::sleep(millis(200)).await;
    let run = world.run.take().unwrap();
    let began = Instant::now();
    run.handle.shutdown_within(Duration::from_secs(5)).unwrap();
    run.ended().await.unwrap();
    let took = began.elapsed();
    assert!(took < Duration::from_secs(6), "{}: {took:?}", world.what);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_partitions_that_have_to_be_read_again_go_on_together_and_controls_are_answered()
{
    many_partitions_go_on(&[("partition.assignment.strategy", "range")]).await;
    many_partitions_go_on(&[]).await;
    many_partitions_go_on(&[("group.protocol", "consumer")]).await;
}

/// CRC-32C.
fn checksum(bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg())
        })
    };
    !bytes.iter().fold(!0, step)
}

/// A batch of this many records as it is on the wire, compressed with this codec, or said to be.
fn batch(records: i32, codec: u8, whole: bool) -> Vec<u8> {
    let mut body = Vec::new();
    body.extend(i16::from(codec).to_be_bytes());
    body.extend((records - 1).to_be_bytes());
    // Two timestamps, the producer's id, epoch and sequence.
    body.extend([0; 16]);
    body.extend([0xff; 14]);
    body.extend(records.to_be_bytes());
    for delta in 0..records {
        // Length, attributes, time, offset, no key, a value of one byte, no headers.
        body.extend([14, 0, 0, 2 * delta as u8, 1, 2, b'x', 0]);
    }
    let crc = checksum(&body) ^ u32::from(!whole);
    let mut batch = vec![0; 8];
    batch.extend((body.len() as i32 + 9).to_be_bytes());
    batch.extend([0, 0, 0, 0, 2]);
    batch.extend(crc.to_be_bytes());
    batch.extend(body);
    batch
}

/// Has a broker append this batch to partition 0, whatever it is.
fn append(cluster: &MockCluster<'_, DefaultProducerContext>, batch: &[u8]) {
    let mut request = Vec::new();
    // Produce, version 7, without a client's name and a transaction; acknowledged by the leader, within a second.
    request.extend([0, 0, 0, 7, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff, 0, 1]);
    request.extend(1_000_i32.to_be_bytes());
    request.extend(1_i32.to_be_bytes());
    request.extend((TOPIC.len() as i16).to_be_bytes());
    request.extend(TOPIC.as_bytes());
    request.extend(1_i32.to_be_bytes());
    request.extend(0_i32.to_be_bytes());
    request.extend((batch.len() as i32).to_be_bytes());
    request.extend(batch);
    let mut stream = TcpStream::connect(cluster.bootstrap_servers()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
        .write_all(&(request.len() as i32).to_be_bytes())
        .unwrap();
    stream.write_all(&request).unwrap();
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut answer = vec![0; i32::from_be_bytes(length) as usize];
    stream.read_exact(&mut answer).unwrap();
    // Behind the correlation id, one topic, its name, one partition, and that.
    let code = 4 + 4 + 2 + TOPIC.len() + 4 + 4;
    assert_eq!(
        answer[code..code + 2],
        [0, 0],
        "the mock cluster takes it: {answer:?}"
    );
}

async fn an_unreadable_batch_stops_its_partition(
    what: &str,
    unreadable: Vec<u8>,
    reason: StopReason,
    says: &[&str],
) {
    let mut world = World::new(2, what);
    world.produce(10);
    world.start();
    world.all_handled("at first").await;
    // Three that cannot be read, and some behind them.
    append(&world.cluster, &unreadable);
    world.produced += 3;
    world.produce(5);
    let stopped = world.stopped().await;
    assert_eq!(
        (stopped.reason, stopped.position, stopped.committed),
        (reason, 10, Some(10)),
        "{what}"
    );
    assert_eq!((stopped.log_start, stopped.log_end), (0, 18), "{what}");
    let error = stopped.error.clone().expect("what the client said");
    for part in says.iter().chain(&["resume_at"]) {
        assert!(error.contains(part), "{what}: `{error}` names {part}");
    }
    let status = world.status(0).await.unwrap();
    assert_eq!(status.stopped, Some(stopped), "{what}");
    // The other partition goes on.
    (0..5).for_each(|_| world.send(1));
    world.producer.flush(PATIENCE).unwrap();
    world
        .until("the other one goes on", 1, |it| it.committed == Some(5))
        .await;
    world.handled_once(1, 0..5, "the other one");
    // Through everything that may move the client's position: time, and being given away.
    tokio::time::sleep(LOOK).await;
    let report = world.stop().await;
    assert_eq!(report.handled, 15, "{what}");
    assert_eq!(world.committed(0), 10, "{what}: nothing is passed over");
    world.start();
    let stopped = world.stopped().await;
    assert_eq!(stopped.position, 10, "{what}: it stops again");
    // Inside the batch it ends there again, behind it reading goes on.
    let handle = world.run.as_ref().unwrap().handle.clone();
    handle.resume_at(TOPIC, 0, 11).await.unwrap();
    assert_eq!(world.stopped().await.position, 11, "{what}");
    handle.resume_at(TOPIC, 0, 13).await.unwrap();
    world
        .until("it goes on behind", 0, |it| it.committed == Some(18))
        .await;
    let mut all = world.seen.all();
    all.retain(|(partition, _)| *partition == 0);
    all.sort_unstable();
    let expected = (0..10).chain(13..18).map(|offset| (0, offset));
    assert_eq!(all, expected.collect::<Vec<_>>(), "{what}");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_cannot_be_read_stops_its_partition_and_others_go_on() {
    let cases = [
        an_unreadable_batch_stops_its_partition(
            "a codec that there is none of",
            batch(3, 7, true),
            StopReason::UnsupportedCodec,
            &["codec", "at 10", "build with"],
        ),
        an_unreadable_batch_stops_its_partition(
            "a wrong checksum",
            batch(3, 0, false),
            StopReason::Corrupt,
            &["CRC32C", "offset 10", "kafka-dump-log"],
        ),
        an_unreadable_batch_stops_its_partition(
            "what lz4 does not take",
            batch(3, 3, true),
            StopReason::Corrupt,
            &["Decompression", "at 10", "kafka-dump-log"],
        ),
    ];
    beside_each_other(cases).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_made_by_hand_is_read() {
    let mut world = World::new(1, "by hand");
    append(&world.cluster, &batch(3, 0, true));
    world.produced = 3;
    world.start();
    world.all_handled("by hand").await;
    world.stop().await;
}
