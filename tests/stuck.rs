//! Real broker: records that do not finish, how they are named, and giving them up.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering as Atomic},
    },
    time::{Duration, Instant},
};

use common::{PATIENCE, Running, Seen, all_committed, committed, consumer, millis, until};
use reliable_consumer::{
    DeadLetter, Event, Exhausted, HandlerResult, Message, Ordering, RecordState, Retry,
    RunErrorKind, StuckRecord, Text, header_names,
};
use reliable_consumer_testing::{Record, cluster, unique};

const SECOND: Duration = Duration::from_secs(1);

/// The next stuck record that an event names.
async fn next_stuck(events: &mut reliable_consumer::Events) -> StuckRecord {
    loop {
        match tokio::time::timeout(PATIENCE, events.next()).await.unwrap() {
            Some(Event::Stuck(stuck)) => return stuck,
            Some(_) => {}
            None => panic!("the run is over"),
        }
    }
}

/// Notes that it was dropped.
struct Dropped(Arc<AtomicUsize>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.fetch_add(1, Atomic::SeqCst);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_hangs_is_dropped_at_the_limit_and_its_record_dead_lettered_as_stuck() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("hang", 1, &[]), unique("group"));
    let letters = cluster.create_topic("letters", 1, &[]);
    cluster.produce(
        &topic,
        (0..40).map(|n| Record::value(n.to_string()).key(format!("k{}", n % 4))),
    );
    let (seen, dropped, told) = (
        Seen::default(),
        Arc::new(AtomicUsize::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let handler = {
        let (seen, dropped, told) = (seen.clone(), dropped.clone(), told.clone());
        async move |message: &Message<Text>| -> HandlerResult {
            if message.offset() == 2 {
                let _guard = Dropped(Arc::clone(&dropped));
                let (elsewhere, told) = (message.clone(), Arc::clone(&told));
                tokio::spawn(async move {
                    elsewhere.cancelled().await;
                    told.store(elsewhere.is_cancelled(), Atomic::SeqCst);
                });
                std::future::pending::<()>().await;
            }
            seen.note(message.offset());
            Ok(())
        }
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .ordering(Ordering::ByKey)
        .stuck_after(SECOND)
        .stuck_limit(3 * SECOND)
        .dead_letter(DeadLetter::topic(&letters));
    let began = Instant::now();
    let run = Running::start(builder, handler);
    until("the other keys", || seen.len() == 30).await;
    assert_eq!(dropped.load(Atomic::SeqCst), 0, "not before the limit");
    all_committed(&cluster, &group, &topic);
    assert!(began.elapsed() >= 3 * SECOND, "{:?}", began.elapsed());
    let report = run.stop().await;
    assert_eq!((report.dead_lettered, report.handled), (1, 39));
    assert_eq!(dropped.load(Atomic::SeqCst), 1);
    assert!(
        told.load(Atomic::SeqCst),
        "what goes on elsewhere is told as well"
    );
    let own: Vec<_> = seen.all().into_iter().filter(|o| o % 4 == 2).collect();
    assert_eq!(own, [6, 10, 14, 18, 22, 26, 30, 34, 38], "in order");
    let found = cluster.read_all(&letters);
    let [letter] = &found[..] else {
        panic!("{found:?}")
    };
    assert_eq!(letter.text(), "2");
    assert_eq!(letter.header(header_names::ERROR_KIND), Some("stuck"));
    assert_eq!(letter.header(header_names::ATTEMPTS), Some("1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_oldest_record_is_given_up_and_progress_keeps_it() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("patient", 1, &[]), unique("group"));
    cluster.produce(&topic, (0..10).map(|n| Record::value(n.to_string())));
    let seen = Seen::default();
    let noted = seen.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        match message.offset() {
            // The oldest gets on, five seconds of it.
            0 => {
                for _ in 0..10 {
                    tokio::time::sleep(millis(500)).await;
                    message.report_progress();
                }
            }
            // This one does not, but it holds up nobody.
            5 => tokio::time::sleep(5 * SECOND - millis(500)).await,
            _ => {}
        }
        noted.note(message.offset());
        Ok(())
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .ordering(Ordering::Unordered)
        .stuck_limit(2 * SECOND);
    let run = Running::start(builder, handler);
    all_committed(&cluster, &group, &topic);
    assert_eq!(run.stop().await.handled, 10);
    assert_eq!(seen.len(), 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_waits_for_a_far_retry_is_given_up_at_the_limit() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("far", 1, &[]), unique("group"));
    cluster.produce(&topic, (0..10).map(|n| Record::value(n.to_string())));
    let handler = async |message: &Message<Text>| -> HandlerResult {
        if message.offset() == 0 {
            return Err("no".into());
        }
        Ok(())
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .ordering(Ordering::ByPartition)
        .retry(Retry::fixed(Duration::from_secs(3600)))
        .stuck_limit(2 * SECOND)
        .exhausted(Exhausted::Skip);
    let run = Running::start(builder, handler);
    all_committed(&cluster, &group, &topic);
    let report = run.stop().await;
    assert_eq!((report.dropped, report.handled), (1, 9));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_dead_letter_topic_a_stuck_record_ends_the_run_and_comes_again() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("ends", 1, &[]), unique("group"));
    cluster.produce(&topic, (0..3).map(|n| Record::value(n.to_string())));
    let handler = async |message: &Message<Text>| -> HandlerResult {
        if message.offset() == 1 {
            std::future::pending::<()>().await;
        }
        Ok(())
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .ordering(Ordering::ByPartition)
        .stuck_limit(SECOND);
    let error = Running::start(builder, handler).ended().await.unwrap_err();
    assert_eq!(error.kind(), RunErrorKind::RecordFailed);
    let text = error.to_string();
    assert!(text.contains(&format!("{topic}/0/1")), "{text}");
    assert!(text.contains("stuck"), "{text}");
    assert_eq!(committed(&cluster, &group, &topic), [1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_no_handler_is_free_for_is_told_from_those_that_run() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("busy", 2, &[]), unique("group"));
    cluster.produce(&topic, (0..2).map(|_| Record::value("hangs").partition(0)));
    let running = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&running);
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        counted.fetch_add(1, Atomic::SeqCst);
        if message.partition() == 0 {
            std::future::pending::<()>().await;
        }
        Ok(())
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .ordering(Ordering::Unordered)
        .concurrency(2)
        .stuck_after(2 * SECOND);
    let run = Running::start(builder, handler);
    let mut events = run.handle.events().unwrap();
    until("both handlers to hang", || {
        running.load(Atomic::SeqCst) == 2
    })
    .await;
    cluster.produce(&topic, [Record::value("waits").key("k").partition(1)]);
    let mut stuck = [
        next_stuck(&mut events).await,
        next_stuck(&mut events).await,
        next_stuck(&mut events).await,
    ];
    stuck.sort_by_key(|stuck| (stuck.partition.partition, stuck.offset));
    let [head, other, waits] = &stuck;
    // The second one is not the oldest of its partition, and is named since it runs for so long.
    for running in [head, other] {
        assert_eq!(running.state, RecordState::Running, "{running:?}");
        assert!(running.run_age.is_some_and(|age| age >= 2 * SECOND));
        assert_eq!((running.queue_age, running.key_hash), (None, None));
    }
    assert_eq!((head.offset, other.offset), (0, 1));
    assert_eq!(waits.partition.partition, 1);
    assert_eq!(waits.state, RecordState::Queued, "{waits:?}");
    assert!(waits.queue_age.is_some_and(|age| age >= 2 * SECOND));
    assert_eq!(waits.run_age, None);
    assert!(waits.key_hash.is_some());

    let status = run.handle.status().await.unwrap();
    let named: Vec<_> = status
        .stuck
        .iter()
        .map(|stuck| (stuck.partition.partition, stuck.offset, stuck.state))
        .collect();
    assert_eq!(
        named,
        [
            (0, 0, RecordState::Running),
            (0, 1, RecordState::Running),
            (1, 0, RecordState::Queued)
        ]
    );
    let waiting = status.partitions[1].oldest_waiting.unwrap();
    assert!(waiting.age >= 2 * SECOND, "{waiting:?}");
    assert_eq!(status.partitions[1].oldest_running, None);

    // What the user has paused is not stuck.
    run.handle.pause(&*topic).unwrap();
    let status = run.handle.status().await.unwrap();
    assert_eq!(status.stuck.len(), 2, "{:?}", status.stuck);
    run.handle.stop_now().unwrap();
    run.ended().await.unwrap();
}
