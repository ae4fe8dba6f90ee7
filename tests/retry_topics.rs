//! Real broker: records that wait in topics of their own for another attempt, and keys that are held.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    env,
    process::{Command, Stdio},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use common::{PATIENCE, Running, Seen, all_committed, committed, consumer, millis, until};
use reliable_consumer::{
    BuildError, Builder, DeadLetter, Event, Guarantee, HandlerResult, HoldKey, Message, Ordering,
    RecordState, Retry, RetryTopics, Routes, StartPolicy, Text, header_names, permanent,
};
use reliable_consumer_testing::{Cluster, Record, StoredRecord, cluster, eventually, unique};

/// A topic with its retry and dead-letter topics.
struct World {
    cluster: Cluster,
    topic: String,
    tiers: Vec<String>,
    letters: String,
    group: String,
    retry_topics: RetryTopics,
}

impl World {
    fn new(cluster: Cluster, delays: &[u64]) -> Self {
        let retry_topics = RetryTopics::new(delays.iter().copied().map(millis));
        // One record is old: by the default retention it might be gone before it is read.
        let topic = cluster.create_topic("orders", 2, &[("retention.ms", "-1")]);
        let tiers: Vec<_> = retry_topics.topics_of(&topic).collect();
        for tier in &tiers {
            cluster.create_topic_named(tier, 1, &[]);
        }
        let letters = cluster.create_topic("letters", 1, &[]);
        Self {
            cluster,
            topic,
            tiers,
            letters,
            group: unique("group"),
            retry_topics,
        }
    }

    fn consumer(&self) -> Builder {
        consumer(&self.cluster, &self.group)
            .topic(&self.topic)
            .ordering(Ordering::Unordered)
            .retry(Retry::fixed(millis(5)).max_attempts(2))
            .retry_topics(self.retry_topics.clone())
            .dead_letter(DeadLetter::topic(&self.letters))
    }

    fn all_committed(&self) {
        all_committed(&self.cluster, &self.group, &self.topic);
        for tier in &self.tiers {
            all_committed(&self.cluster, &self.group, tier);
        }
    }

    /// Waits until so many are in the topic, and returns them.
    fn read(&self, topic: &str, count: i64) -> Vec<StoredRecord> {
        wait_for(&self.cluster, topic, count);
        self.cluster.read_all(topic)
    }
}

/// Waits until so many are in the topic.
fn wait_for(cluster: &Cluster, topic: &str, count: i64) {
    eventually("the records to be there", PATIENCE, || {
        cluster.end_offsets(topic).iter().sum::<i64>() >= count
    });
}

fn header<'a>(record: &'a StoredRecord, name: &str) -> &'a str {
    record
        .header(name)
        .unwrap_or_else(|| panic!("no header {name}"))
}

fn now_millis() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    since.as_millis() as i64
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_fails_in_place_goes_through_the_tiers_at_their_times_and_is_handled() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, &[1_000, 2_000]);
    world.cluster.produce(
        &world.topic,
        [Record::value("hello")
            .key("k")
            .partition(1)
            .timestamp(1_700_000_000_123)
            .header("trace", "abc")],
    );
    let calls: Seen<(u32, Instant, String, String)> = Seen::default();
    let noted = calls.clone();
    let (topic, tier) = (world.topic.clone(), world.tiers[1].clone());
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        let place = format!(
            "{}/{}/{}/{:?}",
            message.topic(),
            message.partition(),
            message.offset(),
            message.timestamp().map(|it| it.as_millis())
        );
        noted.note((
            message.attempt(),
            Instant::now(),
            place,
            message.message_id(),
        ));
        assert_eq!(message.origin().topic, topic);
        if message.attempt() < 4 {
            return Err(format!("attempt {}", message.attempt()).into());
        }
        assert_eq!(message.record().topic(), tier);
        assert_eq!(message.headers().get_str("trace"), Some("abc"));
        Ok(())
    };
    let run = Running::start(world.consumer(), handler);
    until("the fourth call", || calls.len() >= 4).await;
    world.all_committed();
    let report = run.stop().await;
    assert_eq!((report.moved_to_retry, report.handled), (2, 1));
    assert_eq!((report.dead_lettered, report.retried), (0, 1));

    let calls = calls.all();
    for (at, (attempt, _, place, id)) in calls.iter().enumerate() {
        assert_eq!(*attempt, at as u32 + 1, "attempts count on");
        let first = format!("{}/1/0/Some(1700000000123)", world.topic);
        assert_eq!(*place, first, "the handler needs to know of no tiers");
        assert_eq!(*id, format!("{}/1/0/1700000000123", world.topic));
    }
    for (at, delay) in [(1, 0), (2, 1_000), (3, 2_000)] {
        let waited = calls[at].1 - calls[at - 1].1;
        // What was acknowledged late is not waited for anew.
        assert!(waited >= millis(delay), "{waited:?} before call {at}");
        assert!(
            waited < millis(delay + 1_500),
            "{waited:?} before call {at}"
        );
    }

    for (tier, number, attempts) in [(0, "1", "2"), (1, "2", "3")] {
        let [moved] = &world.read(&world.tiers[tier], 1)[..] else {
            panic!("one record in each tier")
        };
        assert_eq!(moved.key.as_deref(), Some(&b"k"[..]));
        assert_eq!(header(moved, "trace"), "abc");
        assert_eq!(header(moved, header_names::RETRY_TIER), number);
        assert_eq!(header(moved, header_names::ATTEMPTS), attempts);
        assert_eq!(header(moved, header_names::ORIGINAL_TOPIC), world.topic);
        let due: i64 = header(moved, header_names::DUE_AT).parse().unwrap();
        let failed: i64 = header(moved, header_names::FAILED_AT).parse().unwrap();
        assert_eq!(due - failed, [1_000, 2_000][tier]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_no_tier_helps_is_dead_lettered_with_all_that_happened() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, &[100, 200]);
    world.cluster.produce(
        &world.topic,
        [
            Record::value("always").key("a"),
            Record::value("permanent").key("b"),
            Record::value("once in a tier, permanent").key("c"),
        ],
    );
    let handler = async |message: &Message<Text>| -> HandlerResult {
        let (what, attempt) = (&**message.payload(), message.attempt());
        if what == "permanent" || what != "always" && attempt == 3 {
            return Err(permanent(format!("permanent at {attempt}")));
        }
        Err(format!("attempt {attempt}").into())
    };
    let run = Running::start(world.consumer(), handler);
    let letters = world.read(&world.letters, 3);
    world.all_committed();
    let report = run.stop().await;
    assert_eq!((report.dead_lettered, report.moved_to_retry), (3, 3));
    let letter = |what: &str| {
        let mut found = letters.iter().filter(|letter| letter.text() == what);
        found.next().unwrap_or_else(|| panic!("no letter {what}"))
    };
    let told = |what: &str, name: &str| letter(what).header(name).map(str::to_owned);
    for (what, attempts, kind, error, tier) in [
        ("always", "4", "attempts-exhausted", "attempt 4", Some("2")),
        ("permanent", "1", "permanent", "permanent at 1", None),
        (
            "once in a tier, permanent",
            "3",
            "permanent",
            "permanent at 3",
            Some("1"),
        ),
    ] {
        let expected = [attempts, kind, error].map(|text| Some(text.to_owned()));
        let names = [
            header_names::ATTEMPTS,
            header_names::ERROR_KIND,
            header_names::ERROR_MESSAGE,
        ];
        assert_eq!(names.map(|name| told(what, name)), expected, "{what}");
        assert_eq!(told(what, header_names::RETRY_TIER).as_deref(), tier);
        assert_eq!(told(what, header_names::DUE_AT), None);
        assert_eq!(
            told(what, header_names::ORIGINAL_TOPIC),
            Some(world.topic.clone())
        );
        assert_eq!(
            told(what, header_names::CONSUMER_GROUP),
            Some(world.group.clone())
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_in_a_tier_loses_nothing_and_keeps_the_time() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, &[5_000]);
    let records = (0..50).map(|number| Record::value(number.to_string()));
    world.cluster.produce(&world.topic, records);
    let handled: Seen<(String, i64)> = Seen::default();
    let handler = |seen: Seen<(String, i64)>| {
        async move |message: &Message<Text>| -> HandlerResult {
            if message.attempt() <= 2 {
                return Err("not yet".into());
            }
            seen.note((message.payload().to_string(), now_millis()));
            Ok(())
        }
    };
    // Nobody has read the tier before: `Latest` would pass over what is in it.
    let build = || world.consumer().start(StartPolicy::Earliest);
    let run = Running::start(build(), handler(handled.clone()));
    let moved = world.read(&world.tiers[0], 50);
    all_committed(&world.cluster, &world.group, &world.topic);
    let report = run.stop().await;
    assert_eq!((report.handled, report.moved_to_retry), (0, 50));
    assert_eq!(handled.len(), 0, "none is due yet");

    let run = Running::start(build(), handler(handled.clone()));
    until("all to be handled", || handled.len() >= 50).await;
    world.all_committed();
    assert_eq!(run.stop().await.handled, 50);
    for (value, at) in handled.all() {
        let record = moved.iter().find(|record| record.text() == value).unwrap();
        let due: i64 = header(record, header_names::DUE_AT).parse().unwrap();
        assert!((due..due + 3_000).contains(&at), "{} ms late", at - due);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_topic_is_read_from_its_start_whatever_the_start_policy() {
    for policy in [StartPolicy::Latest, StartPolicy::Refuse] {
        let Some(cluster) = cluster() else { return };
        let world = World::new(cluster, &[100]);
        // As after a first run that ended before it had committed anything in the tier.
        for partition in 0..2 {
            world
                .cluster
                .commit(&world.group, &world.topic, partition, 0, "");
        }
        let sound = sound_headers(&world, &world.topic);
        world
            .cluster
            .produce(&world.tiers[0], [with_headers("waited", &sound)]);
        let seen: Seen<String> = Seen::default();
        let noted = seen.clone();
        let handler = async move |message: &Message<Text>| -> HandlerResult {
            noted.note(message.payload().to_string());
            Ok(())
        };
        let run = Running::start(world.consumer().start(policy), handler);
        until("it to be handled", || seen.len() == 1).await;
        run.stop().await;
    }
}

fn sound_headers(world: &World, topic: &str) -> Vec<(&'static str, String)> {
    vec![
        (header_names::CONSUMER_GROUP, world.group.clone()),
        (header_names::ORIGINAL_TOPIC, topic.to_owned()),
        (header_names::ORIGINAL_PARTITION, "0".into()),
        (header_names::ORIGINAL_OFFSET, "0".into()),
        (header_names::ORIGINAL_TIMESTAMP, "-1".into()),
    ]
}

fn with_headers(value: &str, headers: &[(&'static str, String)]) -> Record {
    let record = Record::value(value);
    headers.iter().fold(record, |record, (name, value)| {
        record.header(*name, value.clone())
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn forged_headers_neither_go_round_nor_wait_for_ever() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, &[700, 900]);
    let sound = || sound_headers(&world, &world.topic);
    let without = |name: &str| {
        let mut headers = sound();
        headers.retain(|(own, _)| *own != name);
        headers
    };
    let with = |name: &'static str, value: &str| {
        let mut headers = without(name);
        headers.push((name, value.to_owned()));
        headers
    };
    world.cluster.produce(
        &world.tiers[0],
        [
            Record::value("none"),
            with_headers("elsewhere", &sound_headers(&world, "payments")),
            with_headers("no group", &without(header_names::CONSUMER_GROUP)),
            with_headers("others", &with(header_names::CONSUMER_GROUP, "shipping")),
            with_headers("far", &with(header_names::DUE_AT, "9223372036854775807")),
            with_headers("huge", &with(header_names::ATTEMPTS, "99999999999")),
        ],
    );
    let seen: Seen<(String, u32)> = Seen::default();
    let (noted, topic) = (seen.clone(), world.topic.clone());
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        assert_eq!(message.topic(), topic, "whatever its headers say");
        noted.note((message.payload().to_string(), message.attempt()));
        Err("no".into())
    };
    let run = Running::start(world.consumer(), handler);
    let letters = world.read(&world.letters, 5);
    world.all_committed();
    let report = run.stop().await;
    assert_eq!(report.skipped, 1, "another group's");
    assert_eq!(report.dead_lettered, 5);
    for letter in &letters {
        let (kind, attempts) = match letter.text() {
            "none" | "no group" => ("untrusted", "0"),
            "far" | "elsewhere" => ("attempts-exhausted", "2"),
            "huge" => ("attempts-exhausted", "4294967295"),
            other => panic!("{other} is another group's"),
        };
        assert_eq!(
            header(letter, header_names::ERROR_KIND),
            kind,
            "{}",
            letter.text()
        );
        let origin = match letter.text() {
            "none" | "no group" => &world.tiers[0],
            // It may have come to our topic from there, with these headers.
            "elsewhere" => "payments",
            _ => &world.topic,
        };
        assert_eq!(header(letter, header_names::ORIGINAL_TOPIC), origin);
        assert_eq!(
            header(letter, header_names::ATTEMPTS),
            attempts,
            "{}",
            letter.text()
        );
    }
    let mut seen: Vec<_> = seen.all().into_iter().map(|(value, _)| value).collect();
    seen.sort();
    let twice = ["elsewhere", "elsewhere", "far", "far", "huge", "huge"];
    assert_eq!(seen, twice, "once in each tier");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_tier_blocks_visibly_and_nothing_is_lost() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, &[100]);
    let missing = RetryTopics::new([millis(150)]);
    let name = missing.topics_of(&world.topic).next().unwrap();
    world
        .cluster
        .produce(&world.topic, [Record::value("x").partition(0)]);
    let handler = async |message: &Message<Text>| -> HandlerResult {
        match message.attempt() {
            3 => Ok(()),
            _ => Err("not yet".into()),
        }
    };
    let builder = world
        .consumer()
        .retry_topics(missing)
        .dead_letter(
            // By default the client takes half a minute to be sure of it.
            DeadLetter::topic(&world.letters).property("topic.metadata.propagation.max.ms", "1000"),
        )
        .property("topic.metadata.refresh.interval.ms", "1000");
    let run = Running::start(builder, handler);
    let deadline = Instant::now() + PATIENCE;
    let stalled = loop {
        let status = run.handle.status().await.unwrap();
        if let [stalled] = &status.stalled_dead_letters[..]
            && stalled.error.contains("create the topic")
        {
            break stalled.clone();
        }
        assert!(Instant::now() < deadline, "the status names the topic");
        tokio::time::sleep(millis(50)).await;
    };
    assert_eq!(stalled.topic, name);
    assert_eq!(committed(&world.cluster, &world.group, &world.topic)[0], 0);
    world.cluster.create_topic_named(&name, 1, &[]);
    wait_for(&world.cluster, &name, 1);
    tokio::task::block_in_place(|| all_committed(&world.cluster, &world.group, &name));
    assert_eq!(run.stop().await.handled, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_its_tier_calls_invalid_blocks_none_of_those_sent_with_it() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, &[100]);
    let tier = &world.tiers[0];
    world.cluster.set_topic(tier, "cleanup.policy", "compact");
    let records = (0..10).map(|n| match n {
        5 => Record::value("5").partition(0),
        _ => Record::value(n.to_string()).key(n.to_string()).partition(0),
    });
    world.cluster.produce(&world.topic, records);
    let handler = async |message: &Message<Text>| -> HandlerResult {
        match message.attempt() {
            3 => Ok(()),
            _ => Err("not yet".into()),
        }
    };
    // All of them share a batch.
    let letters = DeadLetter::topic(&world.letters).property("linger.ms", "1000");
    let run = Running::start(world.consumer().dead_letter(letters), handler);
    wait_for(&world.cluster, tier, 9);
    until("its own offset to stay", || {
        committed(&world.cluster, &world.group, &world.topic)[0] == 5
    })
    .await;
    world.cluster.set_topic(tier, "cleanup.policy", "delete");
    tokio::task::block_in_place(|| world.all_committed());
    let report = run.stop().await;
    assert_eq!((report.moved_to_retry, report.handled), (10, 10));
    assert_eq!(
        world.cluster.end_offsets(tier),
        [10],
        "each went there once"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn records_that_wait_hold_up_nobody_and_are_handled_together_when_due() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, &[3_000]);
    let bad = (0..200).map(|_| Record::value("bad"));
    world.cluster.produce(&world.topic, bad);
    let handler = async |message: &Message<Text>| -> HandlerResult {
        if &**message.payload() == "bad" {
            if message.attempt() < 3 {
                return Err("not yet".into());
            }
            // One after another, that would be 20 s.
            tokio::time::sleep(millis(100)).await;
        }
        Ok(())
    };
    let run = Running::start(world.consumer().concurrency(20), handler);
    wait_for(&world.cluster, &world.tiers[0], 200);
    let began = Instant::now();
    world
        .cluster
        .produce(&world.topic, (0..500).map(|_| Record::value("good")));
    all_committed(&world.cluster, &world.group, &world.topic);
    assert!(
        began.elapsed() < millis(2_500),
        "the good do not wait for the bad"
    );
    world.all_committed();
    assert!(began.elapsed() < millis(9_000), "{:?}", began.elapsed());
    assert_eq!(run.stop().await.handled, 700);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tiers_records_go_to_the_handler_of_their_topic_and_are_paused_with_it() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, &[2_000]);
    let other = world.cluster.create_topic("payments", 1, &[]);
    let other_tier = world.retry_topics.topics_of(&other).next().unwrap();
    world.cluster.create_topic_named(&other_tier, 1, &[]);
    let seen: Seen<String> = Seen::default();
    let handler = |name: &'static str| {
        let seen = seen.clone();
        async move |message: &Message<Text>| -> HandlerResult {
            if message.attempt() < 3 {
                return Err("not yet".into());
            }
            seen.note(format!("{name}: {}", &**message.payload()));
            Ok(())
        }
    };
    let routes = Routes::new()
        .topic(&world.topic, handler("orders"))
        .topic(&other, handler("payments"));
    let consumer = world.consumer().topic(&other).build().unwrap();
    let handle = consumer.handle();
    let run = tokio::spawn(consumer.run_routes(routes).into_future());
    world.cluster.produce(&other, [Record::value("b")]);
    until("b to be handled", || seen.len() == 1).await;
    world.cluster.produce(&world.topic, [Record::value("a")]);
    wait_for(&world.cluster, &world.tiers[0], 1);
    handle.pause(&world.topic).unwrap();
    tokio::time::sleep(millis(3_000)).await;
    assert_eq!(seen.all(), ["payments: b"]);
    handle.resume(&world.topic).unwrap();
    until("a to be handled", || seen.len() == 2).await;
    assert_eq!(seen.all(), ["payments: b", "orders: a"]);
    handle.shutdown().unwrap();
    run.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a process of the next test"]
async fn service() {
    let Ok(topic) = env::var("SERVICE_TOPIC") else {
        return;
    };
    let cluster = cluster().unwrap();
    let builder = consumer(&cluster, &env::var("SERVICE_GROUP").unwrap())
        .topic(topic)
        .ordering(Ordering::Unordered)
        .retry(Retry::fixed(millis(5)).max_attempts(1))
        .retry_topics(RetryTopics::new([millis(2_000)]))
        // It is killed before it commits.
        .commit_interval(Duration::from_secs(3_600))
        .crash_limit(None);
    let handler = async |message: &Message<Text>| -> HandlerResult {
        if message.attempt() > 1 {
            std::future::pending::<()>().await;
        }
        Err("no".into())
    };
    builder.build().unwrap().run(handler).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_is_killed_before_it_commits_makes_a_repeat_of_the_same_id() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, &[2_000]);
    world
        .cluster
        .produce(&world.topic, (0..3).map(|at| Record::value(at.to_string())));
    let mut process = Command::new(env::current_exe().unwrap())
        .args(["service", "--exact", "--ignored"])
        .env("SERVICE_TOPIC", &world.topic)
        .env("SERVICE_GROUP", &world.group)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_for(&world.cluster, &world.tiers[0], 3);
    process.kill().unwrap();
    process.wait().unwrap();

    let ids: Seen<String> = Seen::default();
    let noted = ids.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        if message.attempt() == 1 {
            return Err("no".into());
        }
        noted.note(message.message_id());
        Ok(())
    };
    let builder = world
        .consumer()
        .retry(Retry::fixed(millis(5)).max_attempts(1));
    let run = Running::start(builder, handler);
    wait_for(&world.cluster, &world.tiers[0], 6);
    world.all_committed();
    run.stop().await;
    let mut ids = ids.all();
    ids.sort();
    assert_eq!(ids.len(), 6, "each is there twice");
    assert!(ids.chunks(2).all(|pair| pair[0] == pair[1]), "{ids:?}");
}

#[test]
fn retry_topics_that_cannot_be_kept_apart_or_break_a_promise_are_refused_at_build() {
    let builder = || {
        reliable_consumer::ReliableConsumer::builder()
            .bootstrap_servers("localhost:9092")
            .group_id("group")
            .topic("orders")
            .ordering(Ordering::Unordered)
    };
    let tiers = || RetryTopics::new([millis(1_000), millis(60_000)]);
    let refused = |builder: Builder| builder.build().expect_err("it is refused");
    assert!(builder().retry_topics(tiers()).build().is_ok());

    for ordering in [Ordering::ByKey, Ordering::ByPartition] {
        let ordered = || builder().ordering(ordering);
        let error = refused(ordered().retry_topics(tiers()));
        assert!(
            matches!(error, BuildError::RetryTopicsReorder { .. }),
            "{error}"
        );
        assert!(error.to_string().contains("reorder(true)"), "{error}");
        assert!(
            ordered()
                .retry_topics(tiers().reorder(true))
                .build()
                .is_ok()
        );
    }
    for wrong in [
        builder().topic("orders.retry.1m"),
        builder().dead_letter(DeadLetter::topic("orders.retry.1s")),
        builder().topic("x".repeat(245)),
    ] {
        let error = refused(wrong.retry_topics(tiers()));
        assert!(
            matches!(error, BuildError::RetryTopicName { .. }),
            "{error}"
        );
    }
    for (wrong, says) in [
        (builder().retry_topics(RetryTopics::new([])), "at least one"),
        (
            builder().retry_topics(RetryTopics::new([millis(5), millis(5)])),
            "a topic of its own",
        ),
        (
            builder().retry_topics(RetryTopics::new([Duration::from_micros(1_500)])),
            "milliseconds",
        ),
        (
            builder().topic_pattern("pay.*").retry_topics(tiers()),
            "name the topics",
        ),
        (
            builder()
                .guarantee(Guarantee::AtMostOnce)
                .retry_topics(tiers()),
            "lost with the process",
        ),
        (builder().hold_key(HoldKey::Wait), "ByKey"),
        (
            builder()
                .ordering(Ordering::ByKey)
                .guarantee(Guarantee::AtMostOnce)
                .dead_letter(DeadLetter::topic("dlq"))
                .hold_key(HoldKey::Follow),
            "at most once",
        ),
        (
            builder()
                .ordering(Ordering::ByKey)
                .hold_key(HoldKey::Follow),
            "call `dead_letter`",
        ),
        (
            builder()
                .ordering(Ordering::ByKey)
                .dead_letter(DeadLetter::topic("dlq"))
                .retry_topics(tiers().reorder(true))
                .hold_key(HoldKey::Wait),
            "in place",
        ),
    ] {
        let error = refused(wrong).to_string();
        assert!(error.contains(says), "{error}");
    }
}

// ---- held keys ----

fn holding(world: &World, policy: HoldKey) -> Builder {
    consumer(&world.cluster, &world.group)
        .topic(&world.topic)
        .dead_letter(DeadLetter::topic(&world.letters))
        .hold_key(policy)
}

fn of_key(key: &str, value: &str) -> Record {
    Record::value(value).key(key).partition(0)
}

/// Refuses what is called bad, unless it has been sent back, and notes the rest.
fn refusing_bad(seen: &Seen<String>) -> impl reliable_consumer::Handler<Text> + use<> {
    let seen = seen.clone();
    async move |message: &Message<Text>| -> HandlerResult {
        if message.payload().starts_with("bad") && message.retry_count() == 0 {
            return Err(permanent("bad"));
        }
        seen.note(message.payload().to_string());
        Ok(())
    }
}

/// As a redriver does.
fn send_back(world: &World, letter: &StoredRecord) {
    let mut record = Record::value(letter.text()).partition(0);
    if let Some(key) = &letter.key {
        record = record.key(key.clone());
    }
    for name in [
        header_names::ORIGINAL_TOPIC,
        header_names::ORIGINAL_PARTITION,
        header_names::ORIGINAL_OFFSET,
        header_names::ORIGINAL_TIMESTAMP,
        header_names::MESSAGE_ID,
    ] {
        record = record.header(name, header(letter, name));
    }
    let record = record.header(header_names::RETRY_COUNT, "1");
    world.cluster.produce(&world.topic, [record]);
}

#[tokio::test(flavor = "multi_thread")]
async fn later_records_of_a_key_follow_a_dead_letter_until_all_have_come_back() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, &[]);
    let builder = holding(&world, HoldKey::Follow);
    let seen: Seen<String> = Seen::default();
    let run = Running::start(builder, refusing_bad(&seen));
    world.cluster.produce(
        &world.topic,
        [
            of_key("a", "bad 1"),
            of_key("a", "a 2"),
            of_key("b", "b 3"),
            of_key("a", "a 4"),
        ],
    );
    let letters = world.read(&world.letters, 3);
    until("b to be handled", || seen.len() == 1).await;
    assert_eq!(seen.all(), ["b 3"], "the other key goes on");
    let told: Vec<_> = letters
        .iter()
        .map(|letter| {
            let kind = header(letter, header_names::ERROR_KIND);
            let attempts = header(letter, header_names::ATTEMPTS);
            (letter.text(), kind, attempts)
        })
        .collect();
    assert_eq!(
        told,
        [
            ("bad 1", "permanent", "1"),
            ("a 2", "key-held", "0"),
            ("a 4", "key-held", "0")
        ],
        "in their order"
    );
    assert_eq!(run.handle.status().await.unwrap().held_keys, 1);

    send_back(&world, &letters[0]);
    until("it to be handled", || seen.len() == 2).await;
    world.cluster.produce(&world.topic, [of_key("a", "a 5")]);
    let letters = world.read(&world.letters, 4);
    assert_eq!(letters[3].text(), "a 5", "two are still away");
    for letter in &letters[1..] {
        send_back(&world, letter);
    }
    world.cluster.produce(&world.topic, [of_key("a", "a 6")]);
    until("all to be handled", || seen.len() == 6).await;
    assert_eq!(seen.all(), ["b 3", "bad 1", "a 2", "a 4", "a 5", "a 6"]);
    assert_eq!(run.handle.status().await.unwrap().held_keys, 0);
    all_committed(&world.cluster, &world.group, &world.topic);
    assert_eq!(run.stop().await.dead_lettered, 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn later_records_of_a_key_wait_for_a_dead_letter_to_come_back_or_for_a_word() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, &[]);
    let builder = holding(&world, HoldKey::Wait).stuck_after(millis(1_200));
    let seen: Seen<String> = Seen::default();
    let run = Running::start(builder, refusing_bad(&seen));
    let mut events = run.handle.events().unwrap();
    world.cluster.produce(
        &world.topic,
        [
            of_key("a", "bad 1"),
            of_key("a", "a 2"),
            of_key("b", "bad 3"),
            of_key("b", "b 4"),
            of_key("c", "c 5"),
        ],
    );
    let letters = world.read(&world.letters, 2);
    until("c to be handled", || seen.len() == 1).await;
    tokio::time::sleep(millis(1_500)).await;
    assert_eq!(seen.all(), ["c 5"]);
    let stuck = async {
        loop {
            if let Some(Event::Stuck(stuck)) = events.next().await {
                return stuck;
            }
        }
    };
    let stuck = tokio::time::timeout(PATIENCE, stuck).await.unwrap();
    assert_eq!(
        (stuck.offset, stuck.state),
        (1, RecordState::KeyHeld),
        "not that it lacks a handler: {stuck:?}"
    );
    let committed = committed(&world.cluster, &world.group, &world.topic);
    assert_eq!(committed[0], 1, "what waits is not committed");

    let first = letters.iter().find(|letter| letter.text() == "bad 1");
    send_back(&world, first.unwrap());
    until("both of its key to be handled", || seen.len() == 3).await;
    assert_eq!(
        seen.all(),
        ["c 5", "bad 1", "a 2"],
        "it passes what waits for it"
    );

    assert!(
        !run.handle.release_key(&world.topic, "a"),
        "released already"
    );
    assert!(run.handle.release_key(&world.topic, "b"));
    until("b to be handled", || seen.len() == 4).await;
    assert_eq!(seen.all()[3], "b 4");
    all_committed(&world.cluster, &world.group, &world.topic);
    let report = run.stop().await;
    assert_eq!(report.postponed, 2, "each once, for however long it waited");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_forgets_which_keys_are_held() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, &[]);
    let builder = holding(&world, HoldKey::Wait);
    let seen: Seen<String> = Seen::default();
    let run = Running::start(builder, refusing_bad(&seen));
    world
        .cluster
        .produce(&world.topic, [of_key("a", "bad 1"), of_key("a", "a 2")]);
    world.read(&world.letters, 1);
    tokio::time::sleep(millis(500)).await;
    run.stop().await;
    assert_eq!(seen.len(), 0);
    let run = Running::start(holding(&world, HoldKey::Wait), refusing_bad(&seen));
    until("it to be handled", || seen.len() == 1).await;
    assert_eq!(run.stop().await.dead_lettered, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_is_given_away_takes_its_held_keys_along() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, &[]);
    let seen: Seen<String> = Seen::default();
    let changes = common::Changes::default();
    let builder = holding(&world, HoldKey::Wait).rebalance_listener(changes.clone());
    let run = Running::start(builder, refusing_bad(&seen));
    let bad = (0..2).map(|at| Record::value("bad").key(format!("k{at}")).partition(at));
    world.cluster.produce(&world.topic, bad);
    wait_for(&world.cluster, &world.letters, 2);
    assert_eq!(run.handle.status().await.unwrap().held_keys, 2);
    let other = Running::start(holding(&world, HoldKey::Wait), refusing_bad(&seen));
    until("one partition to be given away", || changes.owned() == 1).await;
    assert_eq!(run.handle.status().await.unwrap().held_keys, 1);
    other.stop().await;
    run.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn later_records_of_a_key_follow_into_its_retry_topic_and_keep_their_order() {
    let Some(cluster) = cluster() else { return };
    let world = World::new(cluster, &[1_000, 1_500]);
    let builder = world
        .consumer()
        .ordering(Ordering::ByKey)
        .retry_topics(world.retry_topics.clone().reorder(true))
        .hold_key(HoldKey::Follow);
    let seen: Seen<String> = Seen::default();
    let noted = seen.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        if &**message.payload() == "a 1" && message.attempt() <= 3 {
            return Err("not yet".into());
        }
        noted.note(message.payload().to_string());
        Ok(())
    };
    let run = Running::start(builder, handler);
    world.cluster.produce(
        &world.topic,
        [
            of_key("a", "a 1"),
            of_key("a", "a 2"),
            of_key("b", "b 3"),
            of_key("a", "a 4"),
        ],
    );
    until("all to be handled", || seen.len() == 4).await;
    assert_eq!(seen.all(), ["b 3", "a 1", "a 2", "a 4"]);
    world.all_committed();
    assert_eq!(run.stop().await.moved_to_retry, 6, "all of its key, twice");
}
