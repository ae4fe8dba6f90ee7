//! Real broker: dead letters on their way back.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    process::{Command, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use common::{PATIENCE, Running, Seen, all_committed, consumer, millis, until};
use rdkafka::{
    ClientConfig,
    admin::{AdminClient, AdminOptions, NewPartitions},
    client::DefaultClientContext,
};
use reliable_consumer::{
    Action, Bytes, DeadLetter, Handler, HandlerResult, LetterFilter, Message, ParkReason,
    Placement, RedriveError, RedriveHandle, RedriveReport, RedrivenForOthers, Redriver,
    RedriverBuilder, Retry, Routes, Text, header_names as names, permanent,
};
use reliable_consumer_testing::{Cluster, Record, StoredRecord, cluster, unique};
use tokio::task::JoinHandle;

/// A topic, its dead letters, and where they are parked.
struct World {
    cluster: Cluster,
    topic: String,
    letters: String,
    parked: String,
}

impl World {
    fn new(cluster: Cluster, partitions: i32) -> Self {
        Self::with(cluster, partitions, &[("retention.ms", "-1")])
    }

    fn with(cluster: Cluster, partitions: i32, configs: &[(&str, &str)]) -> Self {
        let topic = cluster.create_topic("orders", partitions, configs);
        let letters = cluster.create_topic("letters", 2, &[]);
        let parked = format!("{letters}.parked");
        cluster.create_topic_named(&parked, 1, &[]);
        Self {
            cluster,
            topic,
            letters,
            parked,
        }
    }

    /// As most tests want it: nothing waits.
    fn redriver(&self) -> RedriverBuilder {
        redriver(&self.cluster, &self.letters).allow(&self.topic)
    }

    async fn redrive_once(&self, builder: RedriverBuilder) -> RedriveReport {
        let run = builder.once().build().unwrap().run();
        let ended = tokio::time::timeout(PATIENCE, run.into_future()).await;
        ended.expect("it is through").unwrap()
    }

    fn consumer(&self, group: &str) -> reliable_consumer::Builder {
        consumer(&self.cluster, group)
            .topic(&self.topic)
            .retry(Retry::none())
            .dead_letter(DeadLetter::topic(&self.letters))
    }

    /// A letter of this library about a record that has been in the topic.
    fn letter(&self, value: &str) -> Record {
        letter_from(&self.topic, value)
    }

    fn values(&self, topic: &str) -> Vec<String> {
        let records = self.cluster.read_all(topic);
        records.iter().map(|it| it.text().to_owned()).collect()
    }
}

fn redriver(cluster: &Cluster, letters: &str) -> RedriverBuilder {
    Redriver::builder()
        .bootstrap_servers(cluster.brokers())
        .dead_letter_topic(letters)
        .backoff(Retry::fixed(Duration::ZERO))
        .property("session.timeout.ms", "6000")
        .property("heartbeat.interval.ms", "500")
}

fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    since.as_millis() as i64
}

fn letter_from(topic: &str, value: &str) -> Record {
    Record::value(value)
        .header(names::RETRY_COUNT, "0")
        .header(names::ORIGINAL_PARTITION, "0")
        .header(names::ORIGINAL_OFFSET, "7")
        .header(names::ORIGINAL_TIMESTAMP, now().to_string())
        .header(names::ORIGINAL_TOPIC, topic)
        .header(names::MESSAGE_ID, format!("id of {value}"))
        .header(names::CONSUMER_GROUP, "billing")
        .header(names::ERROR_KIND, "timeout")
        .header(names::FAILED_AT, now().to_string())
}

fn admin(cluster: &Cluster) -> AdminClient<DefaultClientContext> {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", cluster.brokers());
    config.create().unwrap()
}

/// A redriver at work.
struct Redriving {
    handle: RedriveHandle,
    run: JoinHandle<Result<RedriveReport, RedriveError>>,
}

impl Redriving {
    fn start(builder: RedriverBuilder) -> Self {
        let redriver = builder.build().unwrap();
        let handle = redriver.handle();
        let run = tokio::spawn(redriver.run().into_future());
        Self { handle, run }
    }

    /// Letters that are not finished, once the brokers have told how many there are.
    async fn lag(&self) -> u64 {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(lag) = self.handle.status().await.unwrap().lag {
                return lag;
            }
            assert!(Instant::now() < deadline, "it is not known");
            tokio::time::sleep(millis(50)).await;
        }
    }

    async fn stop(self) -> RedriveReport {
        self.handle.shutdown().unwrap();
        let ended = tokio::time::timeout(PATIENCE, self.run).await;
        ended.expect("it ends").unwrap().unwrap()
    }
}

fn header_names(record: &StoredRecord) -> BTreeSet<Vec<u8>> {
    record
        .headers
        .iter()
        .map(|(name, _)| name.clone())
        .collect()
}

// D3
#[tokio::test(flavor = "multi_thread")]
async fn what_always_fails_comes_back_until_it_is_parked_and_what_recovers_is_handled() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, 2);
    let (billing, shipping) = (unique("billing"), unique("shipping"));
    let time = 1_700_000_000_000;
    world.cluster.produce(
        &world.topic,
        [
            Record::value("never")
                .key("a")
                .timestamp(time)
                .header("trace", "abc"),
            Record::value("third time").key("b").timestamp(time + 1),
            Record::value("fine").key("c"),
        ],
    );
    let trips: Seen<(String, u32, String, Option<i64>)> = Seen::default();
    let seen = trips.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        let value = message.payload().to_string();
        let trip = message.retry_count();
        let time = message.timestamp().map(|it| it.as_millis());
        seen.note((value.clone(), trip, message.message_id(), time));
        match &*value {
            "never" => Err(permanent(format!("no, for the {trip}th time"))),
            "third time" if trip < 3 => Err(permanent("not yet")),
            _ => Ok(()),
        }
    };
    let bills = Running::start(world.consumer(&billing), handler);
    let others: Seen = Seen::default();
    let ships = Running::start(world.consumer(&shipping), others.noting());
    let redriving = Redriving::start(world.redriver());
    until("it is parked", || {
        !world.cluster.read_all(&world.parked).is_empty()
    })
    .await;
    for group in [&billing, &shipping] {
        all_committed(&world.cluster, group, &world.topic);
    }
    let report = redriving.stop().await;
    assert_eq!(report.redriven, BTreeMap::from([(world.topic.clone(), 8)]));
    assert_eq!(report.parked, BTreeMap::from([(ParkReason::Exhausted, 1)]));
    assert_eq!(report.waiting, 0);
    all_committed(
        &world.cluster,
        &format!("{}.redriver", world.letters),
        &world.letters,
    );
    let billed = bills.stop().await;
    assert_eq!((billed.handled, billed.dead_lettered), (2, 9));
    let shipped = ships.stop().await;
    assert_eq!((shipped.handled, shipped.redriven_for_others), (3, 8));

    let first = |value: &str| {
        let records = world.cluster.read_all(&world.topic);
        let it = records.iter().find(|it| it.text() == value).unwrap();
        format!(
            "{}/{}/{}/{}",
            world.topic,
            it.partition,
            it.offset,
            it.timestamp.unwrap()
        )
    };
    let of = |value: &str| -> Vec<_> {
        let all = trips.all().into_iter().filter(|it| it.0 == value);
        all.map(|(_, trip, id, time)| (trip, id, time)).collect()
    };
    let expected = |value: &str, trips: u32, time| -> Vec<_> {
        (0..=trips)
            .map(|trip| (trip, first(value), Some(time)))
            .collect()
    };
    assert_eq!(of("never"), expected("never", 5, time));
    assert_eq!(of("third time"), expected("third time", 3, time + 1));

    let mut letters = world.cluster.read_all(&world.letters);
    letters.retain(|it| it.text() == "never");
    letters.sort_by_key(|it| it.header(names::RETRY_COUNT).map(str::to_owned));
    assert_eq!(letters.len(), 6);
    let size = |it: &StoredRecord| -> usize {
        it.headers
            .iter()
            .map(|(name, value)| name.len() + value.as_ref().unwrap().len())
            .sum()
    };
    for letter in &letters {
        assert_eq!(size(letter), size(&letters[0]), "headers do not grow");
        assert_eq!(header_names(letter), header_names(&letters[0]));
        assert_eq!(letter.header("trace"), Some("abc"));
    }
    let [parked] = &world.cluster.read_all(&world.parked)[..] else {
        panic!("one is parked")
    };
    assert_eq!(parked.header(names::RETRY_COUNT), Some("5"));
    assert_eq!(parked.header(names::PARK_REASON), Some("exhausted"));
    assert_eq!(parked.header(names::MESSAGE_ID), Some(&*first("never")));
    let origin = [
        names::ORIGINAL_TOPIC,
        names::ORIGINAL_PARTITION,
        names::ORIGINAL_OFFSET,
        names::ORIGINAL_TIMESTAMP,
    ]
    .map(|name| parked.header(name).unwrap());
    assert_eq!(
        origin.join("/"),
        first("never"),
        "where it was first, after all trips"
    );
    assert_eq!(
        parked.header(names::ERROR_MESSAGE),
        Some("no, for the 5th time")
    );
    assert_eq!(parked.key.as_deref(), Some(&b"a"[..]));
}

// D8, D10
#[tokio::test(flavor = "multi_thread")]
async fn letters_are_sent_where_it_is_allowed_and_others_are_parked_with_the_reason() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, 1);
    let elsewhere = world.cluster.create_topic("payments", 1, &[]);
    let counted = |value: &str, count: &[u8]| {
        let mut letter = world.letter(value);
        letter = letter.header(names::RETRY_COUNT, count);
        letter
    };
    let gone = format!("{}-gone", world.topic);
    world.cluster.produce(
        &world.letters,
        [
            world.letter("plain"),
            letter_from(&elsewhere, "to payments"),
            letter_from(&world.letters, "to the letters"),
            letter_from(&world.parked, "to the parking lot"),
            letter_from(&gone, "to a topic that is gone"),
            Record::value("no letter").header("a", "b"),
            counted("malformed", b"abc"),
            counted("negative", b"-1"),
            counted("huge", b"99999999999999999999"),
            counted("binary", &[0, 0, 0, 4]),
        ]
        .map(|record| record.partition(0)),
    );
    let builder = world.redriver().allow(&gone).allow_pattern(".*letters.*");
    let report = world.redrive_once(builder).await;
    assert_eq!(report.redriven, BTreeMap::from([(world.topic.clone(), 4)]));
    let parked = BTreeMap::from([
        (ParkReason::Untrusted, 3),
        (ParkReason::UnknownTopic, 1),
        (ParkReason::NoOrigin, 1),
        (ParkReason::Exhausted, 1),
    ]);
    assert_eq!(report.parked, parked);
    let counts: BTreeMap<_, _> = world
        .cluster
        .read_all(&world.topic)
        .into_iter()
        .map(|it| {
            (
                it.text().to_owned(),
                it.header(names::RETRY_COUNT).unwrap().to_owned(),
            )
        })
        .collect();
    let counts: Vec<_> = counts
        .iter()
        .map(|(a, b)| (a.as_str(), b.as_str()))
        .collect();
    assert_eq!(
        counts,
        [
            ("binary", "5"),
            ("malformed", "1"),
            ("negative", "1"),
            ("plain", "1")
        ]
    );
    assert!(world.cluster.read_all(&elsewhere).is_empty());
    let reasons: BTreeMap<_, _> = world
        .cluster
        .read_all(&world.parked)
        .into_iter()
        .map(|it| {
            (
                it.text().to_owned(),
                it.header(names::PARK_REASON).unwrap().to_owned(),
            )
        })
        .collect();
    assert_eq!(reasons["to payments"], "untrusted");
    assert_eq!(reasons["to the parking lot"], "untrusted");
    assert_eq!(reasons["no letter"], "no-origin");
    assert_eq!(reasons["to a topic that is gone"], "unknown-topic");
    assert_eq!(reasons["huge"], "exhausted");
}

// D3, D4
#[tokio::test(flavor = "multi_thread")]
async fn a_letter_of_another_system_becomes_the_same_message_on_every_trip() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, 3);
    let time = now();
    world.cluster.produce(
        &world.letters,
        [Record::tombstone()
            .key(b"\xff".to_vec())
            .header(b"\xff\xfe".to_vec(), b"\x00".to_vec())
            .null_header("null")
            .header("kafka_dlt-exception-fqcn", "java.io.IOException")
            .header("kafka_dlt-original-topic", world.topic.as_str())
            .header("kafka_dlt-original-partition", 2_i32.to_be_bytes())
            .header("kafka_dlt-original-offset", 42_i64.to_be_bytes())
            .header("kafka_dlt-original-timestamp", time.to_be_bytes())
            .header("kafka_dlt-original-consumer-group", "spring-app")],
    );
    let report = world.redrive_once(world.redriver().for_group("ours")).await;
    assert_eq!(report.redriven_total(), 1);
    let [back] = &world.cluster.read_all(&world.topic)[..] else {
        panic!("one is back")
    };
    assert_eq!(
        (back.key.as_deref(), &back.value),
        (Some(&b"\xff"[..]), &None)
    );
    assert_eq!(back.timestamp, Some(time));
    assert_eq!(back.headers[0], (b"\xff\xfe".to_vec(), Some(vec![0])));
    assert_eq!(back.headers[1], (b"null".to_vec(), None));
    assert_eq!(back.header(names::REDRIVE_GROUP), Some("ours"));
    let id = format!("{}/2/42/{time}", world.topic);
    assert_eq!(back.header(names::MESSAGE_ID), Some(&*id));

    let ids = Seen::default();
    let seen = ids.clone();
    let handler = async move |message: &Message<Option<Bytes>>| -> HandlerResult {
        seen.note(message.message_id());
        Err(permanent("not here either"))
    };
    let running = Running::start(world.consumer("ours"), handler);
    until("it fails again", || {
        world.cluster.read_all(&world.letters).len() == 2
    })
    .await;
    running.stop().await;
    assert_eq!(ids.all(), std::slice::from_ref(&id));
    let letters = world.cluster.read_all(&world.letters);
    let letter = letters
        .iter()
        .find(|it| it.header(names::ERROR_KIND).is_some())
        .unwrap();
    assert_eq!(letter.header(names::MESSAGE_ID), Some(&*id));
    assert_eq!(letter.header(names::ORIGINAL_OFFSET), Some("42"));
    assert_eq!(letter.header(names::REDRIVE_GROUP), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_due_passes_what_is_not_and_that_goes_when_it_is() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, 1);
    let failed = |value: &str, ago: i64| {
        let at = (now() - ago).to_string();
        world
            .letter(value)
            .partition(0)
            .header(names::FAILED_AT, at)
    };
    world.cluster.produce(
        &world.letters,
        [
            failed("fresh", 0),
            failed("old", 60_000),
            failed("older", 90_000),
        ],
    );
    let began = Instant::now();
    let redriving = Redriving::start(world.redriver().backoff(Retry::fixed(millis(6_000))));
    until("two are back", || world.values(&world.topic).len() == 2).await;
    assert!(began.elapsed() < millis(5_000), "{:?}", began.elapsed());
    assert!(!world.values(&world.topic).contains(&"fresh".to_owned()));
    until("it to know that", || {
        redriving.handle.report().redriven_total() == 2
    })
    .await;
    let status = redriving.handle.status().await.unwrap();
    assert_eq!(
        (status.report.waiting, status.report.redriven_total()),
        (1, 2)
    );
    assert_eq!(redriving.lag().await, 3);
    until("the third is back", || {
        world.values(&world.topic).len() == 3
    })
    .await;
    assert!(began.elapsed() >= millis(5_000), "{:?}", began.elapsed());
    assert_eq!(redriving.stop().await.waiting, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_letter_that_waits_is_left_at_a_stop_and_sent_by_the_next_run() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, 1);
    let waits = world.letter("waits").partition(0);
    let old = world
        .letter("old")
        .partition(0)
        .header(names::FAILED_AT, "1000");
    world.cluster.produce(&world.letters, [waits, old]);
    let patient = || {
        world
            .redriver()
            .backoff(Retry::fixed(Duration::from_secs(3600)))
    };
    let redriving = Redriving::start(patient());
    until("one is back", || world.values(&world.topic) == ["old"]).await;
    let report = redriving.stop().await;
    assert_eq!((report.waiting, report.redriven_total()), (1, 1));
    assert_eq!(
        world.redrive_once(world.redriver()).await.redriven_total(),
        1
    );
    assert_eq!(world.values(&world.topic), ["old", "waits"], "each once");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_goes_to_the_partition_of_its_key_also_when_partitions_were_added() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, 2);
    let keys: Vec<_> = (0..20).map(|n| format!("key-{n}")).collect();
    let keyed = |key: &String| Record::value(key.as_str()).key(key.as_str());
    world.cluster.produce(&world.topic, keys.iter().map(keyed));
    let places = || -> Vec<BTreeMap<String, i32>> {
        let mut trips = vec![BTreeMap::new(); 4];
        for it in world.cluster.read_all(&world.topic) {
            let trip: usize = it
                .header(names::RETRY_COUNT)
                .unwrap_or("0")
                .parse()
                .unwrap();
            trips[trip].insert(it.text().to_owned(), it.partition);
        }
        trips
    };
    let first = places().swap_remove(0);
    let letters = |trip: &str| -> Vec<_> {
        let letter = |key: &String| {
            world
                .letter(key)
                .key(key.as_str())
                .header(names::ORIGINAL_PARTITION, first[key].to_string())
                .header(names::RETRY_COUNT, trip)
        };
        keys.iter().map(letter).collect()
    };
    world.cluster.produce(&world.letters, letters("0"));
    world.redrive_once(world.redriver()).await;
    assert_eq!(places()[1], first, "nothing has changed");

    let admin = admin(&world.cluster);
    let more = NewPartitions::new(&world.topic, 5);
    let made = admin.create_partitions([&more], &AdminOptions::new()).await;
    made.unwrap().remove(0).unwrap();
    world.cluster.wait_in_sync(&world.topic);
    world.cluster.produce(&world.letters, letters("1"));
    world.redrive_once(world.redriver()).await;
    world.cluster.produce(&world.topic, keys.iter().map(keyed));
    let new = {
        let mut new = BTreeMap::new();
        for it in world.cluster.read_all(&world.topic) {
            if it.header(names::RETRY_COUNT).is_none() {
                new.entry(it.text().to_owned())
                    .or_insert_with(Vec::new)
                    .push(it);
            }
        }
        new.into_iter()
            .map(|(key, mut its)| {
                its.sort_by_key(|it| it.timestamp);
                (key, its.last().unwrap().partition)
            })
            .collect::<BTreeMap<_, _>>()
    };
    assert_eq!(places()[2], new, "where a producer puts the key now");
    assert_ne!(new, first);

    world.cluster.produce(&world.letters, letters("2"));
    world
        .redrive_once(world.redriver().placement(Placement::Original))
        .await;
    assert_eq!(places()[3], first, "where it came from");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_gets_its_redrives_in_a_topic_of_its_own_if_wanted() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, 1);
    let group = unique("billing");
    let own = format!("{}.{group}.redrive", world.topic);
    world.cluster.create_topic_named(&own, 1, &[]);
    world
        .cluster
        .produce(&world.topic, [Record::value("a").key("k")]);
    let trips = Seen::default();
    let seen = trips.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        seen.note((message.topic().to_owned(), message.retry_count()));
        match message.retry_count() {
            0 | 1 => Err(permanent("not yet")),
            _ => Ok(()),
        }
    };
    let billing = world.consumer(&group).redrive_topics().build().unwrap();
    let handle = billing.handle();
    let routes = Routes::new().topic(&world.topic, handler);
    let run = tokio::spawn(billing.run_routes(routes).into_future());
    let redriving = Redriving::start(world.redriver().topic_per_group());
    until("it is handled", || trips.len() == 3).await;
    all_committed(&world.cluster, &group, &own);
    redriving.stop().await;
    handle.shutdown().unwrap();
    let report = run.await.unwrap().unwrap();
    assert_eq!((report.handled, report.dead_lettered), (1, 2));
    let expected = [(world.topic.clone(), 0), (own.clone(), 1), (own, 2)];
    assert_eq!(trips.all(), expected);
    assert_eq!(
        world.values(&world.topic),
        ["a"],
        "other groups see nothing of it"
    );
    assert_eq!(
        world.cluster.read_all(&world.letters)[1].header(names::ORIGINAL_TOPIC),
        Some(&*world.topic)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn records_sent_back_for_others_are_passed_over_unless_all_trips_are_wanted() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, 1);
    let back = |topic: &str| {
        Record::value("a")
            .header(names::ORIGINAL_TOPIC, topic)
            .header(names::REDRIVE_GROUP, "billing")
    };
    // The second was made by a service that copies the headers of what it handles, which came back elsewhere.
    let copied = back("elsewhere");
    world.cluster.produce(
        &world.topic,
        [back(&world.topic), copied, Record::value("b")],
    );
    for (policy, handled) in [(RedrivenForOthers::Skip, 2), (RedrivenForOthers::Handle, 3)] {
        let group = unique("shipping");
        let builder = world.consumer(&group).redriven_for_others(policy);
        let running = Running::start(builder, Seen::default().noting());
        all_committed(&world.cluster, &group, &world.topic);
        let report = running.stop().await;
        assert_eq!(
            (report.handled, report.redriven_for_others),
            (handled, 3 - handled)
        );
        assert_eq!(report.skipped, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_leaves_the_rest_where_it_is_and_nothing_is_sent_twice_by_it() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, 1);
    let letter = |value: &str, key: &str| world.letter(value).key(key);
    world.cluster.produce(
        &world.letters,
        [letter("1", "a"), letter("2", "b"), letter("3", "a")],
    );
    let filter = || LetterFilter::all().topic(&world.topic).key("a");
    let filtered = || world.redriver().filter(filter());
    let report = world.redrive_once(filtered()).await;
    assert_eq!((report.redriven_total(), report.filtered), (2, 1));
    let sorted = |topic: &str| {
        let mut values = world.values(topic);
        values.sort();
        values
    };
    assert_eq!(sorted(&world.topic), ["1", "3"]);
    let again = world.redrive_once(filtered()).await;
    assert_eq!(again, RedriveReport::default(), "it is through with these");
    world
        .cluster
        .produce(&world.letters, [letter("4", "a"), letter("5", "b")]);
    assert_eq!(world.redrive_once(filtered()).await.redriven_total(), 1);
    assert_eq!(sorted(&world.topic), ["1", "3", "4"]);

    // The redriver without a filter passes over what was sent, and over nothing else.
    let report = world.redrive_once(world.redriver()).await;
    assert_eq!(report.redriven_total(), 2);
    assert_eq!(sorted(&world.topic), ["1", "2", "3", "4", "5"]);
    // And what it is done with is not sent again by one with another filter.
    let others = world.redriver().filter(LetterFilter::all().key("b"));
    let report = world.redrive_once(others).await;
    assert_eq!((report.redriven_total(), report.done_before), (0, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_with_a_filter_beside_a_redriver_at_work_says_that_it_is_not_noted_and_the_next_one_notes_it()
 {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, 1);
    let letters = [("1", "a"), ("2", "b"), ("3", "a")];
    let letters = letters.map(|(value, key)| world.letter(value).key(key));
    world.cluster.produce(&world.letters, letters);
    // It is at work, and waits with all of them.
    let patient = Retry::fixed(Duration::from_secs(3_600));
    let at_work = Redriving::start(world.redriver().backoff(patient));
    let group = world.redriver().build().unwrap().group_id().to_owned();
    until("it to be a member", || world.cluster.members(&group) == 1).await;
    let filtered = || world.redriver().filter(LetterFilter::all().key("a"));
    let report = world.redrive_once(filtered()).await;
    assert_eq!(report.redriven_total(), 2);
    let reason = report.not_noted.expect("it cannot be noted");
    assert!(reason.contains("at work"), "{reason}");
    at_work.stop().await;

    let report = world.redrive_once(filtered()).await;
    assert_eq!(
        report,
        RedriveReport::default(),
        "nothing is sent, and all is noted"
    );
    let report = world.redrive_once(world.redriver()).await;
    assert_eq!(report.redriven_total(), 1);
    let mut values = world.values(&world.topic);
    values.sort();
    assert_eq!(values, ["1", "2", "3"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_run_with_a_filter_that_is_stopped_what_is_done_is_noted_and_the_rest_is_not() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, 1);
    let letter = |value: &str| world.letter(value).key("a").partition(0);
    let stays = letter("stays").header(names::RETRY_COUNT, "5");
    world
        .cluster
        .produce(&world.letters, [stays, letter("goes")]);
    let filtered = world
        .redriver()
        .filter(LetterFilter::all().key("a"))
        .parking_lot(unique("no-such-lot"))
        .once();
    let redriving = Redriving::start(filtered);
    until("one is back", || {
        redriving.handle.report().redriven_total() == 1
    })
    .await;
    let report = redriving.stop().await;
    assert_eq!((report.waiting, report.not_noted), (1, None));

    let report = world.redrive_once(world.redriver()).await;
    assert_eq!((report.redriven_total(), report.parked_total()), (0, 1));
    assert_eq!(world.values(&world.topic), ["goes"]);
    assert_eq!(world.values(&world.parked), ["stays"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_tells_what_would_be_and_changes_nothing() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, 1);
    let old = |value: &str| world.letter(value).header(names::FAILED_AT, "1000");
    let exhausted = old("exhausted").header(names::RETRY_COUNT, "5");
    let letters = [
        old("due").key("k"),
        world.letter("waits"),
        exhausted,
        letter_from("elsewhere", "x"),
    ];
    world.cluster.produce(&world.letters, letters);
    let patient = || {
        world
            .redriver()
            .backoff(Retry::fixed(Duration::from_secs(3600)))
    };
    let look = async |builder: RedriverBuilder| builder.build().unwrap().dry_run().await.unwrap();
    let report = look(patient()).await;
    assert_eq!(
        (
            report.redriven_total(),
            report.waiting,
            report.parked_total()
        ),
        (1, 1, 2)
    );
    assert_eq!(report.parked[&ParkReason::Exhausted], 1);
    let once = look(patient().once()).await;
    assert_eq!(
        (once.redriven_total(), once.waiting),
        (2, 0),
        "nothing waits in a run that ends"
    );
    let filtered = look(patient().once().filter(LetterFilter::all().key("k"))).await;
    assert_eq!((filtered.redriven_total(), filtered.filtered), (1, 3));

    assert!(world.values(&world.topic).is_empty() && world.values(&world.parked).is_empty());
    let group = patient().build().unwrap().group_id().to_owned();
    let committed = world.cluster.committed(&group, &world.letters);
    assert!(
        committed.iter().all(|it| it.offset.is_none()),
        "{committed:?}"
    );

    assert_eq!(
        world.redrive_once(world.redriver()).await.finished_total(),
        4
    );
    assert_eq!(
        look(patient()).await,
        RedriveReport::default(),
        "all is done"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn letters_are_parked_by_hand_and_get_another_chance_by_hand() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, 1);
    let exhausted = world.letter("exhausted").header(names::RETRY_COUNT, "5");
    world.cluster.produce(
        &world.letters,
        [
            world.letter("fresh"),
            exhausted,
            letter_from("elsewhere", "x"),
        ],
    );
    let report = world
        .redrive_once(world.redriver().action(Action::Park))
        .await;
    assert_eq!(report.parked, BTreeMap::from([(ParkReason::ByHand, 3)]));
    assert!(world.values(&world.topic).is_empty());

    let unpark = world
        .redriver()
        .dead_letter_topic(&world.parked)
        .action(Action::Unpark);
    let report = world.redrive_once(unpark).await;
    assert_eq!(report.redriven_total(), 2);
    assert_eq!(report.left, BTreeMap::from([(ParkReason::Untrusted, 1)]));
    for back in world.cluster.read_all(&world.topic) {
        assert_eq!(back.header(names::RETRY_COUNT), Some("1"), "it begins anew");
        assert_eq!(back.header(names::PARK_REASON), None);
    }
}

// D6
#[tokio::test(flavor = "multi_thread")]
async fn one_record_that_its_topic_refuses_is_parked_and_its_neighbours_go() {
    let Some(cluster) = cluster() else { return };
    let world = World::with(
        cluster,
        1,
        &[("max.message.bytes", "20000"), ("retention.ms", "-1")],
    );
    let large = "x".repeat(30_000);
    let letters = (0..100).map(|n| match n {
        50 => world.letter(&large),
        _ => world.letter(&n.to_string()),
    });
    world.cluster.produce(&world.letters, letters);
    let report = world.redrive_once(world.redriver()).await;
    assert_eq!(report.redriven_total(), 99);
    assert_eq!(report.parked, BTreeMap::from([(ParkReason::Refused, 1)]));
    assert_eq!(world.values(&world.topic).len(), 99, "each once");
    assert_eq!(world.values(&world.parked), [large]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_keeps_its_time_unless_the_topic_would_refuse_or_delete_it() {
    let Some(cluster) = cluster() else { return };
    let hour = 3_600_000;
    let timed = |world: &World, value: &str, time: i64| {
        world
            .letter(value)
            .header(names::ORIGINAL_TIMESTAMP, time.to_string())
    };
    let ages = |world: &World| -> BTreeMap<String, i64> {
        let records = world.cluster.read_all(&world.topic);
        let age =
            |it: &StoredRecord| (it.text().to_owned(), (now() - it.timestamp.unwrap()) / hour);
        records.iter().map(age).collect()
    };
    let strict = [
        ("message.timestamp.before.max.ms", "7200000"),
        ("retention.ms", "-1"),
    ];
    let world = World::with(cluster, 1, &strict);
    world.cluster.produce(
        &world.letters,
        [
            ("old", 5),
            ("older", 9),
            ("recent", 1),
            ("ancient", 400_000),
        ]
        .map(|(value, hours)| timed(&world, value, now() - hours * hour).partition(0)),
    );
    let report = world.redrive_once(world.redriver()).await;
    assert_eq!(report.redriven_total(), 4, "{report:?}");
    let ages_now = ages(&world);
    assert_eq!(
        (ages_now["old"], ages_now["older"], ages_now["recent"]),
        (0, 0, 1)
    );

    let cluster = world.cluster;
    let world = World::with(cluster, 1, &[("retention.ms", "7200000")]);
    let letters = [
        timed(&world, "old", now() - 5 * hour),
        timed(&world, "recent", now() - hour),
    ];
    world.cluster.produce(&world.letters, letters);
    world.redrive_once(world.redriver()).await;
    let ages = ages(&world);
    assert_eq!((ages["old"], ages["recent"]), (0, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_ends_leaves_what_comes_later_to_the_next_one() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, 1);
    let never = async |_: &Message<Text>| -> HandlerResult { Err(permanent("no")) };
    let running = Running::start(world.consumer(&unique("billing")), never);
    world.cluster.produce(&world.topic, [Record::value("a")]);
    for trip in 1..=2 {
        let fails = || world.cluster.read_all(&world.letters).len() == trip;
        until("it is dead-lettered", fails).await;
        let report = world.redrive_once(world.redriver()).await;
        assert_eq!((report.redriven_total(), report.waiting), (1, 0));
    }
    running.stop().await;
}

// D5
#[tokio::test(flavor = "multi_thread")]
async fn without_a_parking_lot_its_letters_wait_visibly_and_the_others_go() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, 1);
    let lot = unique("lot");
    let exhausted = world
        .letter("exhausted")
        .header(names::RETRY_COUNT, "5")
        .partition(0);
    world.cluster.produce(
        &world.letters,
        [exhausted, world.letter("fine").partition(0)],
    );
    let builder = world
        .redriver()
        .parking_lot(&lot)
        .producer_property("topic.metadata.propagation.max.ms", "500");
    let redriving = Redriving::start(builder);
    until("the other is back", || {
        world.values(&world.topic) == ["fine"]
    })
    .await;
    let mut status = redriving.handle.status().await.unwrap();
    let deadline = Instant::now() + PATIENCE;
    while status.stalled.is_empty() {
        assert!(Instant::now() < deadline, "it shows");
        tokio::time::sleep(millis(100)).await;
        status = redriving.handle.status().await.unwrap();
    }
    assert!(
        status.stalled[&lot].contains("create the topic"),
        "{status:?}"
    );
    assert_eq!(redriving.lag().await, 2, "its letter is not finished");
    world.cluster.create_topic_named(&lot, 1, &[]);
    until("it is parked", || world.values(&lot) == ["exhausted"]).await;
    until("it to know that", || {
        redriving.handle.report().parked_total() == 1
    })
    .await;
    assert!(redriving.handle.status().await.unwrap().stalled.is_empty());
    redriving.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rate_limit_is_kept_to_and_does_not_hold_up_a_stop() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, 1);
    let letters = (0..500).map(|n| world.letter(&n.to_string()));
    world.cluster.produce(&world.letters, letters);
    let redriving = Redriving::start(world.redriver().rate_limit(100));
    until("it begins", || {
        redriving.handle.report().redriven_total() > 0
    })
    .await;
    let (began, before) = (Instant::now(), redriving.handle.report().redriven_total());
    tokio::time::sleep(millis(1_500)).await;
    let sent = redriving.handle.report().redriven_total() - before;
    let most = began.elapsed().as_millis() as u64 / 10 + 20;
    assert!((50..=most).contains(&sent), "{sent} of {most}");
    redriving.handle.pause().unwrap();
    let stopping = Instant::now();
    let report = redriving.stop().await;
    assert!(
        stopping.elapsed() < Duration::from_secs(4),
        "{:?}",
        stopping.elapsed()
    );
    assert!(report.waiting > 0);
    world.redrive_once(world.redriver()).await;
    let values: BTreeSet<_> = world.values(&world.topic).into_iter().collect();
    assert_eq!(values.len(), 500);
    assert_eq!(world.values(&world.topic).len(), 500, "each once");
}

/// A redriver in a process of its own, for a test that kills it.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a process of the other tests"]
async fn redriver_process() {
    let Ok(letters) = env::var("REDRIVE_LETTERS") else {
        return;
    };
    let topic = env::var("REDRIVE_TOPIC").unwrap();
    let cluster = cluster().unwrap();
    let rate = env::var("REDRIVE_RATE").unwrap();
    let mut builder = redriver(&cluster, &letters)
        .allow(topic)
        .rate_limit(rate.parse().unwrap());
    // Whoever has the name of one that was killed takes its place at once.
    if let Ok(name) = env::var("REDRIVE_INSTANCE") {
        builder = builder.property("group.instance.id", name);
    }
    builder.once().build().unwrap().run().await.unwrap();
}

fn process(world: &World) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .args(["redriver_process", "--exact", "--ignored"])
        .env("REDRIVE_LETTERS", &world.letters)
        .env("REDRIVE_TOPIC", &world.topic)
        .env("REDRIVE_RATE", "2000")
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redriver_that_is_killed_loses_nothing_and_repeats_keep_their_message_id() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, 2);
    let letters = 10_000;
    let records = (0..letters).map(|n| world.letter(&n.to_string()).key(n.to_string()));
    world.cluster.produce(&world.letters, records);
    let back = || world.cluster.end_offsets(&world.topic).iter().sum::<i64>();
    let mut deaths = 0;
    for more in [500, 700, 900] {
        let mut command = process(&world);
        // The next one takes its place at once; only that of the last one has to be waited for.
        command.env("REDRIVE_INSTANCE", &world.letters);
        let mut process = command.spawn().unwrap();
        let enough = back() + more;
        until("it has sent some", || {
            back() >= enough || process.try_wait().unwrap().is_some()
        })
        .await;
        deaths += usize::from(process.try_wait().unwrap().is_none());
        process.kill().unwrap();
        process.wait().unwrap();
    }
    assert_eq!(deaths, 3);
    let mut last = process(&world).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let ended = loop {
        if let Some(status) = last.try_wait().unwrap() {
            break status;
        }
        assert!(Instant::now() < deadline, "the last one goes to the end");
        tokio::time::sleep(millis(50)).await;
    };
    assert!(ended.success());
    let mut times: BTreeMap<String, usize> = BTreeMap::new();
    for record in world.cluster.read_all(&world.topic) {
        let id = record.header(names::MESSAGE_ID).unwrap();
        assert_eq!(id, format!("id of {}", record.text()));
        *times.entry(id.to_owned()).or_default() += 1;
    }
    assert_eq!(times.len(), letters, "nothing is lost");
    let repeats = times.values().sum::<usize>() - letters;
    // A death repeats what was sent and not committed: at 2,000 a second and a commit every 200 ms some hundreds.
    assert!(repeats <= 3 * 2_000, "{repeats} repeats");
    println!("{repeats} repeats after {deaths} deaths");
}

// At any moment: while it starts, joins, reads, sends, parks, commits, and ends.
#[tokio::test(flavor = "multi_thread")]
async fn a_redriver_that_is_killed_again_and_again_at_any_moment_loses_nothing() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, 2);
    let letters = 3_000;
    let records = (0..letters).map(|n| {
        let letter = world.letter(&n.to_string()).key(n.to_string());
        match n % 10 {
            9 => letter.header(names::RETRY_COUNT, "5"),
            _ => letter,
        }
    });
    world.cluster.produce(&world.letters, records);
    let seed = now() as u64;
    println!("killed by the dice of {seed}");
    let mut dice = seed;
    let mut kills = 0;
    let began = Instant::now();
    loop {
        dice = dice
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        // The last one may go to the end.
        let spared = kills >= 12 || began.elapsed() > Duration::from_secs(25);
        let lives = match spared {
            true => 2 * PATIENCE,
            false => millis((dice >> 33) % 1_200),
        };
        let mut process = process(&world)
            .env("REDRIVE_INSTANCE", &world.letters)
            .env("REDRIVE_RATE", if spared { "4000" } else { "400" })
            .spawn()
            .unwrap();
        let started = Instant::now();
        let ended = loop {
            if let Some(status) = process.try_wait().unwrap() {
                break Some(status);
            }
            if started.elapsed() >= lives {
                break None;
            }
            tokio::time::sleep(millis(5)).await;
        };
        if let Some(status) = ended {
            assert!(status.success(), "{status}");
            break;
        }
        assert!(!spared, "the last one goes to the end");
        process.kill().unwrap();
        process.wait().unwrap();
        kills += 1;
    }
    let mut times: BTreeMap<String, usize> = BTreeMap::new();
    for topic in [&world.topic, &world.parked] {
        for record in world.cluster.read_all(topic) {
            let number: usize = record.text().parse().unwrap();
            assert_eq!(*topic == world.parked, number % 10 == 9);
            let id = record.header(names::MESSAGE_ID).unwrap();
            assert_eq!(id, format!("id of {number}"));
            *times.entry(id.to_owned()).or_default() += 1;
        }
    }
    assert_eq!(times.len(), letters, "nothing is lost");
    println!(
        "{} repeats after {kills} kills",
        times.values().sum::<usize>() - letters
    );
    assert!(kills >= 4, "{kills} kills");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_run_loses_nothing() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, 1);
    world.cluster.produce(
        &world.letters,
        (0..3_000).map(|n| world.letter(&n.to_string())),
    );
    let redriving = Redriving::start(world.redriver().rate_limit(1_500));
    until("it has sent some", || {
        redriving.handle.report().redriven_total() > 300
    })
    .await;
    redriving.run.abort();
    redriving.run.await.unwrap_err();
    world.redrive_once(world.redriver()).await;
    let values: BTreeSet<_> = world.values(&world.topic).into_iter().collect();
    assert_eq!(values.len(), 3_000);
}

/// Consumes a topic as fast as it can and sends each value on, as a bare loop would.
#[derive(Clone)]
struct Forward {
    producer: Arc<rdkafka::producer::FutureProducer>,
    topic: Arc<str>,
    sent: Arc<Mutex<u64>>,
}

impl Handler<reliable_consumer::Record> for Forward {
    async fn handle(&self, message: &Message<reliable_consumer::Record>) -> HandlerResult {
        let record = rdkafka::producer::FutureRecord::<[u8], [u8]>::to(&self.topic);
        let record = record.payload(message.value().unwrap_or_default());
        let sent = self.producer.send(record, PATIENCE).await;
        sent.map_err(|(error, _)| error)?;
        *self.sent.lock().unwrap() += 1;
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a figure, not a test: run it in release"]
async fn how_fast_100_000_letters_go_back() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, 4);
    let count = 100_000;
    let letters = (0..count).map(|n| world.letter(&n.to_string()).key(n.to_string()));
    world.cluster.produce(&world.letters, letters);
    let began = Instant::now();
    assert_eq!(
        world.redrive_once(world.redriver()).await.redriven_total(),
        count
    );
    let redrive = count as f64 / began.elapsed().as_secs_f64();

    let forward = Forward {
        producer: Arc::new(
            ClientConfig::new()
                .set("bootstrap.servers", world.cluster.brokers())
                .set("acks", "all")
                .set("enable.idempotence", "true")
                .create()
                .unwrap(),
        ),
        topic: world.topic.as_str().into(),
        sent: Arc::default(),
    };
    let group = unique("forward");
    let builder = consumer(&world.cluster, &group)
        .topic(&world.letters)
        .ordering(reliable_consumer::Ordering::Unordered)
        .concurrency(1_000);
    let began = Instant::now();
    let running = Running::start(builder, forward);
    all_committed(&world.cluster, &group, &world.letters);
    let plain = count as f64 / began.elapsed().as_secs_f64();
    running.stop().await;

    let began = Instant::now();
    let dry = redriver(&world.cluster, &world.letters)
        .allow(&world.topic)
        .group_id(unique("dry"))
        .build()
        .unwrap();
    dry.dry_run().await.unwrap();
    let dry = count as f64 / began.elapsed().as_secs_f64();
    println!("redrive {redrive:.0}/s, consume and produce {plain:.0}/s, dry run {dry:.0}/s");
}
