//! Real broker: records in, handlers run, offsets committed.

mod common;

use std::{
    collections::{HashMap, HashSet},
    sync::atomic::{AtomicUsize, Ordering as Atomic},
    time::{Duration, Instant, SystemTime},
};

use common::{
    PATIENCE, Running, Seen, all_committed, committed, consumer, millis, store_under_test, until,
};
use rdkafka::{
    ClientConfig,
    producer::{BaseProducer, BaseRecord, Producer as _},
};
use reliable_consumer::{
    Classification, DynError, Event, Exhausted, Guarantee, HandlerError, HandlerResult, Json,
    Message, Ordering, RebalanceListener, Record as Raw, ResultExt, Retry, Routes, RunErrorKind,
    StartPolicy, Text, TopicPartition, find_error, permanent, retry_after, skip,
};
use reliable_consumer_testing::{Record, cluster, unique};

fn numbered(count: usize) -> impl Iterator<Item = Record> {
    (0..count).map(|n| Record::value(format!("v{n}")).key(format!("k{}", n % 100)))
}

#[tokio::test(flavor = "multi_thread")]
async fn every_record_is_handled_once_in_the_order_asked_for_and_committed() {
    let Some(cluster) = cluster() else { return };
    let topic = cluster.create_topic("orders", 4, &[]);
    // With a store it is one call after another where there is an order.
    let count = if store_under_test().is_some() {
        4_000
    } else {
        20_000
    };
    cluster.produce(&topic, numbered(count));
    for ordering in [Ordering::Unordered, Ordering::ByKey, Ordering::ByPartition] {
        let group = unique("group");
        let seen = Seen::<(i32, i64, String)>::default();
        let noted = seen.clone();
        let handler = async move |message: &Message<Text>| -> HandlerResult {
            if message.offset() % 7 == 0 {
                tokio::time::sleep(Duration::from_micros(200)).await;
            }
            let key = message.key_str().unwrap_or_default().to_owned();
            noted.note((message.partition(), message.offset(), key));
            Ok(())
        };
        let run = Running::start(
            consumer(&cluster, &group).topic(&topic).ordering(ordering),
            handler,
        );
        all_committed(&cluster, &group, &topic);
        let report = run.stop().await;
        assert_eq!(
            (report.received, report.handled),
            (count as u64, count as u64),
            "{ordering:?}"
        );
        let seen = seen.all();
        let mut places: Vec<_> = seen
            .iter()
            .map(|(partition, offset, _)| (*partition, *offset))
            .collect();
        places.sort_unstable();
        places.dedup();
        assert_eq!((seen.len(), places.len()), (count, count), "{ordering:?}");
        if ordering == Ordering::Unordered {
            continue;
        }
        let mut last = HashMap::new();
        for (partition, offset, key) in seen {
            let lane = if ordering == Ordering::ByKey {
                key
            } else {
                partition.to_string()
            };
            let before = last.insert(lane, offset);
            assert!(
                before.is_none_or(|before| before < offset),
                "{ordering:?} is kept"
            );
        }
    }
}

// T5
#[tokio::test(flavor = "multi_thread")]
async fn the_only_record_of_a_topic_is_committed_and_lag_is_zero() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("single", 1, &[]), unique("group"));
    cluster.produce(&topic, numbered(1));
    let run = Running::start(
        consumer(&cluster, &group).topic(&topic),
        Seen::default().noting(),
    );
    all_committed(&cluster, &group, &topic);
    let handle = run.handle.clone();
    let mut lag = None;
    for _ in 0..100 {
        lag = handle.status().await.unwrap().partitions[0].lag;
        if lag.is_some() {
            break;
        }
        tokio::time::sleep(millis(50)).await;
    }
    assert_eq!(lag.map(|lag| lag.records), Some(0));
    run.stop().await;
}

// T4
#[tokio::test(flavor = "multi_thread")]
async fn skipped_records_are_finished_and_counted() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("skipped", 1, &[]), unique("group"));
    cluster.produce(&topic, numbered(100));
    let handler = async |message: &Message<Text>| -> HandlerResult {
        assert!(message.offset() % 2 == 1, "the filter comes first");
        Err(skip("not for us"))
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .filter(|record| record.offset() % 2 == 1);
    let run = Running::start(builder, handler);
    all_committed(&cluster, &group, &topic);
    let report = run.stop().await;
    assert_eq!((report.skipped, report.handled), (100, 0));
}

// T6
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_committed_beyond_the_start_while_nothing_is_finished() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("hanging", 1, &[]), unique("group"));
    cluster.produce(&topic, numbered(10));
    let seen = Seen::default();
    let noted = seen.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        noted.note(message.offset());
        std::future::pending().await
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .ordering(Ordering::Unordered);
    let run = Running::start(builder, handler);
    until("all to be running", || seen.len() == 10).await;
    run.handle.shutdown_within(millis(800)).unwrap();
    let report = run.ended().await.unwrap();
    assert_eq!((report.abandoned, report.handled), (10, 0));
    assert_eq!(
        committed(&cluster, &group, &topic),
        [0],
        "the start itself is committed, and nothing beyond"
    );
}

// T7
#[tokio::test(flavor = "multi_thread")]
async fn what_finishes_last_is_committed_without_more_traffic() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("quiet", 1, &[]), unique("group"));
    cluster.produce(&topic, numbered(20));
    let handler = async |message: &Message<Text>| -> HandlerResult {
        tokio::time::sleep(millis(20 * message.offset() as u64)).await;
        Ok(())
    };
    let run = Running::start(consumer(&cluster, &group).topic(&topic), handler);
    all_committed(&cluster, &group, &topic);
    run.stop().await;
}

// D15
#[tokio::test(flavor = "multi_thread")]
async fn a_failed_record_is_tried_again_after_its_delay_also_when_idle() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("retried", 1, &[]), unique("group"));
    cluster.produce(&topic, numbered(1));
    let seen = Seen::<(u32, Instant)>::default();
    let noted = seen.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        noted.note((message.attempt(), Instant::now()));
        if message.attempt() < 3 {
            return Err("not yet".into());
        }
        Ok(())
    };
    let run = Running::start(
        consumer(&cluster, &group)
            .topic(&topic)
            .retry(Retry::fixed(millis(50))),
        handler,
    );
    all_committed(&cluster, &group, &topic);
    let report = run.stop().await;
    assert_eq!((report.handled, report.retried), (1, 2));
    let seen = seen.all();
    for pair in seen.windows(2) {
        let waited = pair[1].1 - pair[0].1;
        assert_eq!(pair[1].0, pair[0].0 + 1);
        assert!((millis(50)..millis(150)).contains(&waited), "{waited:?}");
    }
}

// D16
#[tokio::test(flavor = "multi_thread")]
async fn a_failing_key_holds_back_its_own_records_only() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("keys", 1, &[]), unique("group"));
    let records = (0..60).map(|n| Record::value(n.to_string()).key(["bad", "good", "fine"][n % 3]));
    cluster.produce(&topic, records);
    let seen = Seen::<(String, i64)>::default();
    let noted = seen.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        if message.offset() == 0 && message.attempt() < 6 {
            return Err("not yet".into());
        }
        noted.note((message.key_str().unwrap().to_owned(), message.offset()));
        Ok(())
    };
    // For as long as the others need, with a store that is asked twice for each.
    let wait = millis(if store_under_test().is_some() {
        500
    } else {
        60
    });
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .retry(Retry::fixed(wait).max_attempts(10));
    let run = Running::start(builder, handler);
    all_committed(&cluster, &group, &topic);
    run.stop().await;
    let seen = seen.all();
    let first_bad = seen.iter().position(|(key, _)| key == "bad").unwrap();
    assert_eq!(first_bad, 40, "all records of other keys went ahead");
    let bad: Vec<_> = seen[first_bad..]
        .iter()
        .map(|(_, offset)| *offset)
        .collect();
    assert!(bad.is_sorted());
}

// D12
#[tokio::test(flavor = "multi_thread")]
async fn panics_and_timeouts_are_failed_attempts_and_the_consumer_goes_on() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("panics", 1, &[]), unique("group"));
    cluster.produce(&topic, numbered(30));
    let handler = async |message: &Message<Text>| -> HandlerResult {
        if message.attempt() == 1 {
            match message.offset() % 3 {
                0 => panic!("at once"),
                1 => {
                    tokio::task::yield_now().await;
                    panic!("later");
                }
                _ => std::future::pending::<()>().await,
            }
        }
        Ok(())
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .ordering(Ordering::Unordered)
        .handler_timeout(millis(100))
        .retry(Retry::fixed(millis(10)));
    let run = Running::start(builder, handler);
    all_committed(&cluster, &group, &topic);
    let report = run.stop().await;
    assert_eq!((report.handled, report.retried), (30, 30));
}

#[derive(Debug, thiserror::Error)]
#[error("out of stock")]
struct OutOfStock;

#[tokio::test(flavor = "multi_thread")]
async fn a_classifier_decides_by_the_type_of_the_error_and_the_handler_has_the_last_word() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("classified", 1, &[]), unique("group"));
    cluster.produce(&topic, numbered(4));
    let handler = async |message: &Message<Text>| -> HandlerResult {
        match (message.offset(), message.attempt()) {
            (0, _) => Err(OutOfStock)?,
            (1, 1) => Err(HandlerError::retry(OutOfStock)),
            (2, 1) => Err(OutOfStock).retry_after(millis(5)),
            (3, _) => Err(anyhow::Error::new(OutOfStock))?,
            _ => Ok(()),
        }
    };
    let classifier = |error: &DynError, _: &Raw| match find_error::<OutOfStock>(error) {
        Some(_) => Classification::skip(),
        None => Classification::permanent(),
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .classifier(classifier)
        .exhausted(Exhausted::Skip);
    let run = Running::start(builder, handler);
    all_committed(&cluster, &group, &topic);
    let report = run.stop().await;
    assert_eq!((report.handled, report.retried), (2, 2));
    // Without the feature `anyhow` the error inside an `anyhow::Error` cannot be seen by its type.
    let (skipped, dropped) = if cfg!(feature = "anyhow") {
        (2, 0)
    } else {
        (1, 1)
    };
    assert_eq!((report.skipped, report.dropped), (skipped, dropped));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_failed_for_good_stops_the_run_when_there_is_no_dead_letter_topic() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("stopping", 1, &[]), unique("group"));
    cluster.produce(&topic, numbered(10));
    let handler = async |message: &Message<Text>| -> HandlerResult {
        if message.offset() == 4 {
            return Err(permanent("no such customer"));
        }
        Ok(())
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .ordering(Ordering::ByPartition);
    let error = Running::start(builder, handler).ended().await.unwrap_err();
    assert_eq!(error.kind(), RunErrorKind::RecordFailed);
    let text = error.to_string();
    assert!(
        text.contains(&format!("{topic}/0/4")) && text.contains("no such customer"),
        "{text}"
    );
    assert_eq!(
        committed(&cluster, &group, &topic),
        [4],
        "what came before it is committed, itself not"
    );
    assert_eq!(error.report().handled, 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_topic_goes_to_its_own_handler_with_its_own_payload() {
    let Some(cluster) = cluster() else { return };
    let group = unique("group");
    let (texts, numbers) = (
        cluster.create_topic("texts", 1, &[]),
        cluster.create_topic("numbers", 1, &[]),
    );
    // T14: the same keys and partition numbers in both.
    cluster.produce(
        &texts,
        (0..50).map(|n| Record::value(format!("t{n}")).key("same")),
    );
    cluster.produce(
        &numbers,
        (0..50).map(|n| Record::value(n.to_string()).key("same")),
    );
    let (seen_texts, seen_numbers) = (Seen::<String>::default(), Seen::<u64>::default());
    let routes = {
        let (seen_texts, seen_numbers) = (seen_texts.clone(), seen_numbers.clone());
        Routes::new()
            .topic(
                &texts,
                async move |message: &Message<Text>| -> HandlerResult {
                    seen_texts.note(message.payload().to_string());
                    tokio::time::sleep(millis(100_000)).await;
                    Ok(())
                },
            )
            .topic(
                &numbers,
                async move |message: &Message<Json<u64>>| -> HandlerResult {
                    seen_numbers.note(**message.payload());
                    Ok(())
                },
            )
    };
    let consumer = consumer(&cluster, &group)
        .topics([&texts, &numbers])
        .build()
        .unwrap();
    let handle = consumer.handle();
    let run = tokio::spawn(consumer.run_routes(routes).into_future());
    all_committed(&cluster, &group, &numbers);
    assert_eq!(seen_numbers.all(), (0..50).collect::<Vec<_>>());
    assert_eq!(
        seen_texts.all(),
        ["t0"],
        "the hanging record holds back its own topic's key only"
    );
    handle.stop_now().unwrap();
    run.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_without_a_route_ends_the_run_with_its_name() {
    let Some(cluster) = cluster() else { return };
    let topic = cluster.create_topic("unrouted", 1, &[]);
    let consumer = consumer(&cluster, &unique("group"))
        .topic(&topic)
        .build()
        .unwrap();
    let routes = Routes::new().topic("other", Seen::default().noting());
    let error = consumer.run_routes(routes).await.unwrap_err();
    assert_eq!(error.kind(), RunErrorKind::NoHandler);
    assert!(error.to_string().contains(&topic), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pattern_takes_in_the_topics_that_match() {
    let Some(cluster) = cluster() else { return };
    let group = unique("group");
    let prefix = unique("pattern");
    let (one, two) = (
        cluster.create_topic(&prefix, 1, &[]),
        cluster.create_topic(&prefix, 2, &[]),
    );
    cluster.produce(&one, numbered(10));
    cluster.produce(&two, numbered(10));
    let seen = Seen::default();
    let builder = consumer(&cluster, &group).topic_pattern(format!("{prefix}.*"));
    let run = Running::start(builder, seen.noting());
    all_committed(&cluster, &group, &one);
    all_committed(&cluster, &group, &two);
    assert_eq!(run.stop().await.handled, 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_group_starts_where_its_policy_says_and_keeps_that_start() {
    let Some(cluster) = cluster() else { return };
    let topic = cluster.create_topic("starts", 1, &[]);
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap()
        .as_millis() as i64;
    cluster.produce(
        &topic,
        (0..10).map(|n| Record::value("x").timestamp(now - 10_000 + n * 1_000)),
    );
    let since = SystemTime::UNIX_EPOCH + millis(now as u64 - 3_500);
    for (policy, first) in [
        (StartPolicy::Earliest, 0),
        (StartPolicy::Latest, 10),
        (StartPolicy::Time(since), 7),
    ] {
        let group = unique("group");
        let seen = Seen::default();
        let run = Running::start(
            consumer(&cluster, &group)
                .topic(&topic)
                .ordering(Ordering::ByPartition)
                .start(policy),
            seen.noting(),
        );
        all_committed(&cluster, &group, &topic);
        run.stop().await;
        assert_eq!(seen.all(), (first..10).collect::<Vec<_>>(), "{policy:?}");
    }
    let refusing = consumer(&cluster, &unique("group"))
        .topic(&topic)
        .start(StartPolicy::Refuse);
    let error = Running::start(refusing, Seen::default().noting())
        .ended()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), RunErrorKind::NoCommittedOffset);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_topic_rests_until_it_is_resumed() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("paused", 2, &[]), unique("group"));
    let seen = Seen::default();
    let run = Running::start(consumer(&cluster, &group).topic(&topic), seen.noting());
    run.handle.pause(&topic).unwrap();
    until("the assignment", || {
        !committed(&cluster, &group, &topic).contains(&-1)
    })
    .await;
    cluster.produce(&topic, numbered(100));
    tokio::time::sleep(millis(500)).await;
    let status = run.handle.status().await.unwrap();
    assert!(
        status.partitions.iter().all(|partition| partition.paused),
        "{status:?}"
    );
    assert_eq!(seen.len(), 0);
    run.handle.resume(&topic).unwrap();
    all_committed(&cluster, &group, &topic);
    assert_eq!(run.stop().await.handled, 100);
}

#[tokio::test(flavor = "multi_thread")]
async fn status_tells_what_runs_what_waits_and_what_is_held_back() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("status", 1, &[]), unique("group"));
    cluster.produce(
        &topic,
        (0..100).map(|n| Record::value(n.to_string()).key(if n == 0 { "slow" } else { "quick" })),
    );
    let seen = Seen::default();
    let noted = seen.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        match (message.offset(), message.attempt()) {
            (0, 1) => Err("once more".into()),
            (0, _) => std::future::pending().await,
            (99, _) => Err(retry_after(Duration::from_secs(600), "in a while")),
            _ => {
                noted.note(message.offset());
                Ok(())
            }
        }
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .retry(Retry::fixed(millis(10)));
    let run = Running::start(builder, handler);
    until("the quick ones", || seen.len() == 98).await;
    tokio::time::sleep(millis(1_300)).await;
    let status = run.handle.status().await.unwrap();
    let partition = &status.partitions[0];
    assert_eq!(
        (partition.position, partition.committed),
        (Some(100), Some(0))
    );
    assert_eq!(partition.finished_out_of_order, 98);
    assert_eq!(
        (partition.running, partition.queued, partition.retrying),
        (1, 0, 1)
    );
    assert_eq!(partition.lag.unwrap().records, 100);
    let oldest = partition.oldest_running.unwrap();
    assert_eq!((oldest.offset, oldest.attempt), (0, 2));
    assert!(oldest.age >= millis(1_000), "{oldest:?}");
    run.handle.stop_now().unwrap();
    let report = run.ended().await.unwrap();
    assert_eq!(
        (report.handled, report.abandoned, report.unstarted),
        (98, 1, 1)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrency_bounds_the_handlers_in_progress() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("bounded", 4, &[]), unique("group"));
    cluster.produce(&topic, numbered(400));
    static NOW: AtomicUsize = AtomicUsize::new(0);
    static MOST: AtomicUsize = AtomicUsize::new(0);
    let handler = async |_: &Message<Text>| -> HandlerResult {
        MOST.fetch_max(NOW.fetch_add(1, Atomic::SeqCst) + 1, Atomic::SeqCst);
        tokio::time::sleep(millis(5)).await;
        NOW.fetch_sub(1, Atomic::SeqCst);
        Ok(())
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .concurrency(7)
        .ordering(Ordering::Unordered);
    let run = Running::start(builder, handler);
    all_committed(&cluster, &group, &topic);
    run.stop().await;
    assert_eq!(MOST.load(Atomic::SeqCst), 7);
}

// R13
#[tokio::test(flavor = "multi_thread")]
async fn dropping_the_run_ends_it_without_committing_what_is_unfinished() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("dropped", 1, &[]), unique("group"));
    cluster.produce(&topic, numbered(10));
    let seen = Seen::default();
    let noted = seen.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        noted.note(message.offset());
        if message.offset() == 5 {
            std::future::pending::<()>().await;
        }
        Ok(())
    };
    let run = Running::start(
        consumer(&cluster, &group)
            .topic(&topic)
            .ordering(Ordering::ByPartition),
        handler,
    );
    until("the sixth to run", || seen.len() == 6).await;
    let handle = run.handle.clone();
    run.drop_it().await;
    until("the pump to end", || handle.pause(&topic).is_err()).await;
    assert_eq!(committed(&cluster, &group, &topic), [5]);
    // Another member takes over at once: the group was left.
    let next = Seen::default();
    let began = Instant::now();
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .ordering(Ordering::ByPartition);
    let run = Running::start(builder, next.noting());
    all_committed(&cluster, &group, &topic);
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "{:?}",
        began.elapsed()
    );
    run.stop().await;
    assert_eq!(next.all(), [5, 6, 7, 8, 9]);
}

// R3
#[tokio::test(flavor = "multi_thread")]
async fn what_runs_when_another_member_joins_is_awaited_and_handled_once() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("shared", 8, &[]), unique("group"));
    cluster.produce(
        &topic,
        (0..800).map(|n| Record::value("x").partition(n % 8)),
    );
    let seen = Seen::<(i32, i64)>::default();
    let handler = {
        let seen = seen.clone();
        async move |message: &Message<Text>| -> HandlerResult {
            tokio::time::sleep(millis(20)).await;
            seen.note((message.partition(), message.offset()));
            Ok(())
        }
    };
    let builder = || {
        consumer(&cluster, &group)
            .topic(&topic)
            .concurrency(4)
            .ordering(Ordering::ByPartition)
    };
    let first = Running::start(builder(), handler.clone());
    until("some work", || seen.len() > 20).await;
    let second = Running::start(builder(), handler);
    all_committed(&cluster, &group, &topic);
    let (one, two) = (first.stop().await, second.stop().await);
    assert!(two.handled > 0, "the second took its share");
    assert_eq!(one.handled + two.handled, 800);
    let mut places = seen.all();
    assert_eq!(places.len(), 800);
    places.sort_unstable();
    places.dedup();
    assert_eq!(places.len(), 800, "none twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_asked_for_before_the_run_holds_and_nothing_answers_after_it() {
    let Some(cluster) = cluster() else { return };
    let topic = cluster.create_topic("handle", 1, &[]);
    let consumer = consumer(&cluster, &unique("group"))
        .topic(&topic)
        .build()
        .unwrap();
    let handle = consumer.handle();
    handle.shutdown().unwrap();
    let run = tokio::time::timeout(
        PATIENCE,
        consumer.run(Seen::default().noting()).into_future(),
    );
    assert_eq!(
        run.await.unwrap().unwrap().received,
        0,
        "a shutdown asked for before the run holds"
    );
    assert!(handle.status().await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_can_notice_that_its_partition_is_taken_away_and_until_when_it_may_run() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("cancelled", 2, &[]), unique("group"));
    cluster.produce(&topic, (0..2).map(|n| Record::value("x").partition(n)));
    let seen = Seen::<(i32, Duration)>::default();
    let noted = seen.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        assert!(!message.is_cancelled() && message.deadline().is_none());
        message.cancelled().await;
        let left = message.deadline().unwrap() - Instant::now();
        noted.note((message.partition(), left));
        Err("another owner".into())
    };
    let builder = || {
        consumer(&cluster, &group)
            .topic(&topic)
            .drain_timeout(millis(4_000))
    };
    let first = Running::start(builder(), handler);
    until("both to be committed at their start", || {
        committed(&cluster, &group, &topic) == [0, 0]
    })
    .await;
    tokio::time::sleep(millis(300)).await;
    let began = Instant::now();
    let second = Running::start(builder(), Seen::default().noting());
    until("the second to handle its share", || {
        committed(&cluster, &group, &topic).contains(&1)
    })
    .await;
    assert!(
        began.elapsed() < Duration::from_secs(4),
        "nobody waited for the deadline"
    );
    let [(partition, left)] = seen.all()[..] else {
        panic!("one handler was told: {:?}", seen.all());
    };
    assert!((millis(2_000)..millis(4_000)).contains(&left), "{left:?}");
    assert_eq!(committed(&cluster, &group, &topic)[partition as usize], 1);
    second.stop().await;
    first.handle.shutdown().unwrap();
    let report = first.ended().await.unwrap();
    assert_eq!((report.handled, report.abandoned), (0, 0));
}

#[derive(Clone, Default)]
struct Listener(Seen<String>);

impl RebalanceListener for Listener {
    fn assigned(&self, partitions: &[TopicPartition]) {
        self.0.note(format!("+{}", partitions.len()));
    }

    fn revoked(&self, partitions: &[TopicPartition]) {
        self.0.note(format!("-{}", partitions.len()));
        panic!("of the listener");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listener_and_the_events_tell_of_partitions_that_come_and_go() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("listened", 4, &[]), unique("group"));
    let listener = Listener::default();
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .rebalance_listener(listener.clone());
    let first = Running::start(builder, Seen::default().noting());
    let mut events = first.handle.events().unwrap();
    until("the assignment", || listener.0.len() == 1).await;
    let second = Running::start(
        consumer(&cluster, &group).topic(&topic),
        Seen::default().noting(),
    );
    until("half of them to go", || listener.0.len() == 2).await;
    second.stop().await;
    until("them to come back", || listener.0.len() == 3).await;
    first.stop().await;
    assert_eq!(listener.0.all(), ["+4", "-2", "+2", "-4"]);
    let mut told = Vec::new();
    while let Some(event) = events.next().await {
        told.push(match event {
            Event::Assigned(partitions) => format!("+{}", partitions.len()),
            Event::Revoked(partitions) => format!("-{}", partitions.len()),
            other => panic!("{other:?}"),
        });
    }
    assert_eq!(told, listener.0.all());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_does_not_finish_is_named_by_an_event_until_it_reports_progress() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("stuck", 1, &[]), unique("group"));
    cluster.produce(&topic, numbered(20));
    let handler = async |message: &Message<Text>| -> HandlerResult {
        if message.offset() == 3 {
            for _ in 0..20 {
                tokio::time::sleep(millis(100)).await;
                message.report_progress();
            }
            std::future::pending::<()>().await;
        }
        Ok(())
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .stuck_after(millis(1_500));
    let run = Running::start(builder, handler);
    let mut events = run.handle.events().unwrap();
    until("the others", || committed(&cluster, &group, &topic) == [3]).await;
    let began = Instant::now();
    let stuck = loop {
        match tokio::time::timeout(PATIENCE, events.next()).await.unwrap() {
            Some(Event::Stuck(stuck)) => break stuck,
            Some(_) => {}
            None => panic!("the run is over"),
        }
    };
    assert!(began.elapsed() > millis(2_500), "{:?}", began.elapsed());
    assert_eq!(
        (&*stuck.partition.topic, stuck.partition.partition),
        (&*topic, 0)
    );
    assert_eq!((stuck.offset, stuck.attempt, stuck.holds_back), (3, 1, 16));
    assert!(
        (millis(1_500)..millis(3_000)).contains(&stuck.age),
        "{stuck:?}"
    );
    run.handle.stop_now().unwrap();
    run.ended().await.unwrap();
    assert_eq!(
        events.next().await,
        Some(Event::Revoked(vec![stuck.partition]))
    );
    assert_eq!(events.next().await, None);
}

// T15
#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_ends_in_transaction_markers_is_committed_to_its_end() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (
        cluster.create_topic("transactions", 1, &[]),
        unique("group"),
    );
    let run = Running::start(
        consumer(&cluster, &group).topic(&topic),
        Seen::default().noting(),
    );
    tokio::task::block_in_place(|| {
        let producer: BaseProducer = ClientConfig::new()
            .set("bootstrap.servers", cluster.brokers())
            .set("transactional.id", unique("transaction"))
            .create()
            .unwrap();
        producer.init_transactions(PATIENCE).unwrap();
        for commit in [true, false, true, false] {
            producer.begin_transaction().unwrap();
            for _ in 0..5 {
                producer
                    .send(BaseRecord::<(), str>::to(&topic).payload("x"))
                    .unwrap();
            }
            producer.flush(PATIENCE).unwrap();
            match commit {
                true => producer.commit_transaction(PATIENCE).unwrap(),
                false => producer.abort_transaction(PATIENCE).unwrap(),
            }
        }
    });
    // The brokers write a marker some time after they have answered.
    until("four markers, the last one at the end", || {
        cluster.end_offsets(&topic) == [24]
    })
    .await;
    all_committed(&cluster, &group, &topic);
    assert_eq!(run.handle.status().await.unwrap().lag(), Some(0));
    assert_eq!(run.stop().await.handled, 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn at_most_once_what_was_started_never_comes_again_and_the_rest_is_told() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("once", 1, &[]), unique("group"));
    cluster.produce(&topic, numbered(1_000));
    let seen = Seen::default();
    let noted = seen.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        noted.note(message.offset());
        if message.offset() == 100 {
            std::future::pending::<()>().await;
        }
        Ok(())
    };
    let builder = || {
        consumer(&cluster, &group)
            .topic(&topic)
            .ordering(Ordering::ByPartition)
            .concurrency(4)
            .guarantee(Guarantee::AtMostOnce)
    };
    let run = Running::start(builder(), handler);
    until("the hundredth to hang", || seen.len() == 101).await;
    let at = committed(&cluster, &group, &topic)[0];
    assert!(
        (101..=108).contains(&at),
        "committed before it was called, and little more: {at}"
    );
    run.handle.stop_now().unwrap();
    let report = run.ended().await.unwrap();
    assert_eq!(report.handled, 100);
    let at = committed(&cluster, &group, &topic)[0];
    assert_eq!(report.committed_unhandled, at as u64 - 100);
    let next = Seen::default();
    let run = Running::start(builder(), next.noting());
    all_committed(&cluster, &group, &topic);
    until("the rest", || next.len() as i64 == 1_000 - at).await;
    run.stop().await;
    assert_eq!(next.all(), (at..1_000).collect::<Vec<_>>(), "none again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_is_told_to_log_everything_does_not_hold_the_records_up() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("verbose", 4, &[]), unique("group"));
    cluster.produce(&topic, (0..100).map(|n| Record::value(n.to_string())));
    let seen = Seen::default();
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .property("debug", "all");
    let run = Running::start(builder, seen.noting());
    tokio::task::block_in_place(|| all_committed(&cluster, &group, &topic));
    run.stop().await;
    assert_eq!(seen.len(), 100);
}

// D11b
#[tokio::test(flavor = "multi_thread")]
async fn handlers_that_are_ready_at_once_are_not_spawned_and_those_that_wait_are() {
    // No attempt is ready at once when a store is to be asked first.
    if store_under_test().is_some() {
        return;
    }
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("ready", 1, &[]), unique("group"));
    cluster.produce(&topic, numbered(1_010));
    let seen = Seen::<(bool, tokio::task::Id)>::default();
    let noted = seen.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        let waits = message.offset() >= 1_000;
        if waits {
            tokio::time::sleep(millis(5)).await;
        }
        noted.note((waits, tokio::task::id()));
        Ok(())
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .ordering(Ordering::Unordered);
    let run = Running::start(builder, handler);
    all_committed(&cluster, &group, &topic);
    run.stop().await;
    let tasks = |waiting: bool| {
        let seen = seen.all().into_iter();
        let ids = seen
            .filter(|(waits, _)| *waits == waiting)
            .map(|(_, id)| id);
        ids.collect::<HashSet<_>>().len()
    };
    let executors = tokio::runtime::Handle::current().metrics().num_workers();
    assert!(
        tasks(false) <= executors,
        "1,000 records, {} tasks",
        tasks(false)
    );
    assert_eq!(tasks(true), 10);
}

// R9
#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_has_one_deadline_commits_what_finished_and_tells_the_rest() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("deadline", 2, &[]), unique("group"));
    cluster.produce(
        &topic,
        (0..300).map(|n| Record::value(n.to_string()).partition(n % 2)),
    );
    let seen = Seen::<i32>::default();
    let noted = seen.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        noted.note(message.partition());
        // Of what runs when the end comes, partition 0 is done in time and partition 1 is not.
        let hour = Duration::from_secs(3_600);
        tokio::time::sleep(if message.partition() == 0 {
            millis(700)
        } else {
            hour
        })
        .await;
        Ok(())
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .ordering(Ordering::Unordered)
        .concurrency(100);
    let run = Running::start(builder, handler);
    // One partition may have been read so much earlier that all the first ones are its.
    until("a hundred to run, of both partitions", || {
        seen.len() >= 100 && seen.all().contains(&1)
    })
    .await;
    let began = Instant::now();
    run.handle.shutdown_within(Duration::from_secs(3)).unwrap();
    let report = run.ended().await.unwrap();
    assert!(began.elapsed() < millis(3_500), "{:?}", began.elapsed());
    assert!(report.abandoned > 0 && report.unstarted > 0, "{report:?}");
    let started = seen.len() as u64;
    assert_eq!(report.handled + report.abandoned, started);
    let partition = |number| {
        report
            .partitions
            .iter()
            .find(|p| p.partition == number)
            .unwrap()
    };
    // Executors start batches beside each other: some of what did not start may stand before some that did. That this is
    // not handled again is seen below.
    let committed = partition(0).committed.unwrap_or(0);
    assert!(
        (0..=report.handled as i64).contains(&committed),
        "{committed}"
    );
    assert_eq!(partition(1).committed, Some(0));
    // Whatever has finished does not come again, and what was abandoned and what had not started does.
    let next = Seen::default();
    let builder = consumer(&cluster, &group).topic(&topic);
    let run = Running::start(builder, next.noting());
    all_committed(&cluster, &group, &topic);
    let again = run.stop().await;
    assert_eq!(
        (next.len() as u64, again.duplicates.total()),
        (300 - report.handled, 0)
    );
}
