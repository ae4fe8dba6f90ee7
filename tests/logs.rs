//! Real broker: logs that are not what they were. Records deleted before they were read, topics made anew, partitions added.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use common::{PATIENCE, Running, Seen, all_committed, committed, consumer, millis, until};
use reliable_consumer::{
    Builder, ConsumerHandle, Event, HandleError, HandlerResult, Message, Ordering, OutOfRange,
    PartitionStatus, Report, RunError, RunErrorKind, StartPolicy, StopReason, Text,
};
use reliable_consumer_testing::{Cluster, Record, cluster, own_cluster, unique};
use tokio::sync::Semaphore;

/// Group protocols and assignors, by the properties that choose them.
const PROTOCOLS: [&[(&str, &str)]; 3] = [
    &[("session.timeout.ms", "6000")],
    &[
        ("session.timeout.ms", "6000"),
        ("partition.assignment.strategy", "range"),
    ],
    &[("group.protocol", "consumer")],
];

fn member(cluster: &Cluster, group: &str, topic: &str, protocol: &[(&str, &str)]) -> Builder {
    let builder = reliable_consumer::ReliableConsumer::builder()
        .bootstrap_servers(cluster.brokers())
        .group_id(group)
        .topic(topic)
        .commit_interval(millis(100))
        .property("topic.metadata.refresh.interval.ms", "500");
    let builder = common::with_store_under_test(builder);
    protocol.iter().fold(builder, |builder, (name, value)| {
        builder.property(*name, *value)
    })
}

/// A consumer that notes what it handles, and what happens to it.
struct Noting {
    run: Option<Running>,
    handle: ConsumerHandle,
    values: Seen<String>,
    events: Arc<Mutex<Vec<Event>>>,
}

impl Noting {
    fn start(builder: Builder) -> Self {
        let values = Seen::<String>::default();
        let noted = values.clone();
        Self::start_with(
            builder,
            values,
            async move |message: &Message<Text>| -> HandlerResult {
                noted.note(message.payload().to_string());
                Ok(())
            },
        )
    }

    fn start_with(
        builder: Builder,
        values: Seen<String>,
        handler: impl reliable_consumer::Handler<Text>,
    ) -> Self {
        let run = Running::start(builder, handler);
        let handle = run.handle.clone();
        let mut happening = handle.events().unwrap();
        let events = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&events);
        tokio::spawn(async move {
            while let Some(event) = happening.next().await {
                noted.lock().unwrap().push(event);
            }
        });
        Self {
            run: Some(run),
            handle,
            values,
            events,
        }
    }

    async fn stop(&mut self) -> Report {
        self.run.take().unwrap().stop().await
    }

    async fn ended(&mut self) -> Result<Report, RunError> {
        self.run.take().unwrap().ended().await
    }

    fn count(&self, prefix: &str) -> usize {
        let mut values = self.values.all();
        values.retain(|value| value.starts_with(prefix));
        values.sort_unstable();
        values.dedup();
        values.len()
    }

    fn happened(&self, what: impl Fn(&Event) -> bool) -> bool {
        self.events.lock().unwrap().iter().any(what)
    }

    /// Waits until its only partition has been read up to there.
    async fn reads_to(&self, position: i64) {
        let began = Instant::now();
        loop {
            let partitions = self.handle.status().await.unwrap().partitions;
            if partitions[0].position == Some(position) {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "{partitions:?}");
            tokio::time::sleep(millis(50)).await;
        }
    }

    async fn stopped(&self, topic: &str, partition: i32) -> PartitionStatus {
        let began = Instant::now();
        loop {
            let status = self.handle.status().await.unwrap();
            let mut partitions = status.partitions.into_iter();
            let found =
                partitions.find(|status| &*status.topic == topic && status.partition == partition);
            if let Some(found) = found.filter(|found| found.stopped.is_some()) {
                return found;
            }
            assert!(
                began.elapsed() < PATIENCE,
                "{topic}/{partition} does not stop"
            );
            tokio::time::sleep(millis(50)).await;
        }
    }
}

fn numbered(prefix: &str, count: usize, partition: i32) -> impl Iterator<Item = Record> {
    (0..count).map(move |n| Record::value(format!("{prefix}/{n}")).partition(partition))
}

/// A group that has committed offset 10 in a partition whose log now begins at 40, and in one that is whole.
fn behind(cluster: &Cluster) -> (String, String) {
    let (topic, group) = (cluster.create_topic("behind", 2, &[]), unique("group"));
    for partition in 0..2 {
        cluster.produce(&topic, numbered(&format!("p{partition}"), 100, partition));
        cluster.commit(&group, &topic, partition, 10, "");
    }
    cluster.delete_records(&topic, 0, 40);
    (topic, group)
}

// T13
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_whose_records_were_deleted_stops_alone_until_somebody_decides() {
    let Some(cluster) = cluster() else { return };
    for protocol in PROTOCOLS {
        let (topic, group) = behind(&cluster);
        let mut first = Noting::start(member(&cluster, &group, &topic, protocol));
        let status = first.stopped(&topic, 0).await;
        let stopped = status.stopped.unwrap();
        assert_eq!(
            (stopped.reason, stopped.position, stopped.committed),
            (StopReason::Deleted, 10, Some(10))
        );
        assert_eq!((stopped.log_start, stopped.log_end), (40, 100));
        until("the other one to go on", || {
            committed(&cluster, &group, &topic) == [10, 100]
        })
        .await;
        assert!(first.happened(|event| matches!(
            event,
            Event::OffsetOutOfRange { partition, position: 10, log_start: 40, log_end: 100, resumed_at: None, .. }
                if partition.partition == 0
        )));
        assert!(!first.handle.status().await.unwrap().is_caught_up());
        assert_eq!(first.stop().await.handled, 90, "{protocol:?}");

        let mut second = Noting::start(member(&cluster, &group, &topic, protocol));
        second.stopped(&topic, 0).await;
        assert_eq!(
            committed(&cluster, &group, &topic),
            [10, 100],
            "{protocol:?}"
        );
        let resume = async |partition| second.handle.resume_at(&*topic, partition, 40).await;
        assert_eq!(resume(1).await, Err(HandleError::NotStopped));
        assert_eq!(resume(0).await, Ok(()));
        all_committed(&cluster, &group, &topic);
        assert_eq!(
            (second.count("p0"), second.values.len()),
            (60, 60),
            "{protocol:?}"
        );
        cluster.produce(&topic, numbered("new", 5, 0));
        until("traffic to go on", || second.count("new") == 5).await;
        second.stop().await;
        assert_eq!(committed(&cluster, &group, &topic), [105, 100]);
    }
}

// T13
#[tokio::test(flavor = "multi_thread")]
async fn going_on_where_records_were_deleted_tells_how_many_are_skipped() {
    let Some(cluster) = cluster() else { return };
    for (policy, start, missed) in [
        (OutOfRange::Earliest, 40, 30),
        (OutOfRange::Latest, 100, 90),
    ] {
        let (topic, group) = behind(&cluster);
        let builder = consumer(&cluster, &group)
            .topic(&topic)
            .out_of_range(policy);
        let mut run = Noting::start(builder);
        all_committed(&cluster, &group, &topic);
        assert!(run.happened(|event| matches!(
            event,
            Event::OffsetOutOfRange { resumed_at, skipped, .. }
                if (*resumed_at, *skipped) == (Some(start), missed)
        )));
        assert_eq!(
            (run.count("p0"), run.count("p1")),
            (100 - start as usize, 90)
        );
        cluster.produce(&topic, numbered("new", 5, 0));
        all_committed(&cluster, &group, &topic);
        run.stop().await;
        assert_eq!(run.values.len(), 190 - start as usize + 5);
    }
    let (topic, group) = behind(&cluster);
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .out_of_range(OutOfRange::EndRun);
    let error = Noting::start(builder).ended().await.unwrap_err();
    assert_eq!(error.kind(), RunErrorKind::OffsetOutOfRange);
    assert!(
        error
            .to_string()
            .contains("offset 10 is not in the log, which has 40 to 100"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_read_before_the_rest_was_deleted_is_finished_and_committed_first() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("read-before", 1, &[]), unique("group"));
    let large = |n: usize| Record::value(format!("{n:02}{}", "x".repeat(20_000)));
    (0..10).for_each(|n| cluster.produce(&topic, [large(n)]));
    let (values, gate) = (Seen::<String>::default(), Arc::new(Semaphore::new(0)));
    let (noted, pass) = (values.clone(), Arc::clone(&gate));
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        pass.acquire().await.unwrap().forget();
        noted.note(message.payload()[..2].to_owned());
        Ok(())
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .out_of_range(OutOfRange::Earliest)
        .property("fetch.message.max.bytes", "1000")
        .property("queued.min.messages", "1");
    let mut run = Noting::start_with(builder, values, handler);
    let began = Instant::now();
    while run.handle.status().await.unwrap().bytes < 10 * 20_000 {
        assert!(began.elapsed() < PATIENCE);
        tokio::time::sleep(millis(20)).await;
    }
    // Each record is in a batch of its own, so that the client does not fetch all of them ahead.
    run.handle.pause(&*topic).unwrap();
    (10..40).for_each(|n| cluster.produce(&topic, [large(n)]));
    cluster.delete_records(&topic, 0, 40);
    (40..45).for_each(|n| cluster.produce(&topic, [large(n)]));
    run.handle.resume(&*topic).unwrap();
    let gone_on = |event: &Event| {
        matches!(
            event,
            Event::OffsetOutOfRange {
                resumed_at: Some(40),
                ..
            }
        )
    };
    until("reading to go on", || run.happened(gone_on)).await;
    assert_eq!(run.values.len(), 0);
    gate.add_permits(100);
    all_committed(&cluster, &group, &topic);
    let report = run.stop().await;
    let mut values = run.values.all();
    values.sort();
    assert_eq!(
        values[..10],
        ["00", "01", "02", "03", "04", "05", "06", "07", "08", "09"]
    );
    assert_eq!(values[values.len() - 5..], ["40", "41", "42", "43", "44"]);
    let handled = values.len() as u64;
    assert_eq!(
        (report.handled, report.unstarted, report.abandoned),
        (handled, 0, 0)
    );
}

// T13
#[tokio::test(flavor = "multi_thread")]
async fn a_topic_made_anew_while_its_group_was_away_is_read_from_its_start() {
    let Some(cluster) = cluster() else { return };
    for policy in [StartPolicy::Earliest, StartPolicy::Latest] {
        let (topic, group) = (cluster.create_topic("anew", 1, &[]), unique("group"));
        let builder = || consumer(&cluster, &group).topic(&topic).start(policy);
        let mut first = Noting::start(builder());
        until("its start", || committed(&cluster, &group, &topic) == [0]).await;
        cluster.produce(&topic, numbered("old", 100, 0));
        all_committed(&cluster, &group, &topic);
        first.stop().await;
        let left = cluster.committed(&group, &topic).remove(0);
        cluster.delete_topic(&topic);
        tokio::time::sleep(millis(300)).await;
        cluster.create_topic_named(&topic, 1, &[]);
        cluster.produce(&topic, numbered("new", 150, 0));
        // The brokers forget what was committed in a topic that is deleted. A member that has not noticed writes it again.
        cluster.commit(&group, &topic, 0, 100, &left.metadata);
        let mut second = Noting::start(builder());
        all_committed(&cluster, &group, &topic);
        second.stop().await;
        assert_eq!(
            (second.count("new"), second.values.len()),
            (150, 150),
            "{policy:?}"
        );
        assert!(second.happened(|event| matches!(
            event,
            Event::TopicRecreated {
                position: 100,
                start: 0,
                ..
            }
        )));
        let mut third = Noting::start(builder());
        cluster.produce(&topic, numbered("newer", 1, 0));
        all_committed(&cluster, &group, &topic);
        third.stop().await;
        assert_eq!(third.values.len(), 1, "it is known by now");
    }
}

// T13
#[tokio::test(flavor = "multi_thread")]
async fn a_topic_made_anew_under_a_running_consumer_is_read_from_its_start() {
    let Some(cluster) = cluster() else { return };
    for protocol in PROTOCOLS {
        for (new, policy, pause) in [
            (10, StartPolicy::Earliest, 0),
            (150, StartPolicy::Earliest, 0),
            (150, StartPolicy::Latest, 0),
            (150, StartPolicy::Latest, 3_000),
        ] {
            let (topic, group) = (cluster.create_topic("anew", 1, &[]), unique("group"));
            let mut run = Noting::start(member(&cluster, &group, &topic, protocol).start(policy));
            until("its start", || committed(&cluster, &group, &topic) == [0]).await;
            cluster.produce(&topic, numbered("old", 100, 0));
            all_committed(&cluster, &group, &topic);
            cluster.delete_topic(&topic);
            tokio::time::sleep(millis(pause)).await;
            cluster.create_topic_named(&topic, 1, &[]);
            cluster.produce(&topic, numbered("new", new, 0));
            until("all of the new topic", || run.count("new") == new).await;
            all_committed(&cluster, &group, &topic);
            assert!(run.happened(|event| matches!(event, Event::TopicRecreated { .. })));
            run.stop().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_added_to_a_topic_lose_nothing_whatever_the_start_policy() {
    let Some(cluster) = cluster() else { return };
    for protocol in PROTOCOLS {
        let (topic, group) = (cluster.create_topic("added", 1, &[]), unique("group"));
        let builder = || member(&cluster, &group, &topic, protocol).start(StartPolicy::Latest);
        cluster.produce(&topic, numbered("before", 10, 0));
        let mut first = Noting::start(builder());
        until("its start", || committed(&cluster, &group, &topic) == [10]).await;
        // While it runs: the records are there before it knows the partition.
        cluster.add_partitions(&topic, 2);
        cluster.produce(&topic, numbered("running", 20, 1));
        all_committed(&cluster, &group, &topic);
        assert_eq!(
            (first.count("running"), first.values.len()),
            (20, 20),
            "{protocol:?}"
        );
        let added = |event: &Event, number| matches!(event, Event::PartitionAdded { partition, start: 0 } if partition.partition == number);
        assert!(first.happened(|event| added(event, 1)));
        first.stop().await;
        // While it is away.
        cluster.add_partitions(&topic, 4);
        for partition in 2..4 {
            cluster.produce(&topic, numbered(&format!("away{partition}"), 20, partition));
        }
        let mut second = Noting::start(builder());
        all_committed(&cluster, &group, &topic);
        assert_eq!(
            (second.count("away"), second.values.len()),
            (40, 40),
            "{protocol:?}"
        );
        assert!(second.happened(|event| added(event, 2)));
        assert!(second.happened(|event| added(event, 3)));
        second.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn members_of_a_new_group_do_not_take_each_others_first_commits_for_an_old_group() {
    let Some(cluster) = cluster() else { return };
    for protocol in PROTOCOLS {
        let (topic, group) = (cluster.create_topic("new-group", 12, &[]), unique("group"));
        for partition in 0..12 {
            cluster.produce(&topic, numbered("before", 10, partition));
        }
        let builder = || member(&cluster, &group, &topic, protocol).start(StartPolicy::Latest);
        let mut members = Vec::new();
        for _ in 0..4 {
            members.push(Noting::start(builder()));
            tokio::time::sleep(millis(150)).await;
        }
        until("their starts", || {
            committed(&cluster, &group, &topic) == [10; 12]
        })
        .await;
        let began = Instant::now();
        loop {
            let mut owned = Vec::new();
            for member in &members {
                owned.push(member.handle.status().await.unwrap().partitions.len());
            }
            if owned == [3; 4] {
                break;
            }
            assert!(began.elapsed() < PATIENCE, "{protocol:?}: {owned:?}");
            tokio::time::sleep(millis(50)).await;
        }
        for partition in 0..12 {
            cluster.produce(&topic, numbered("after", 1, partition));
        }
        all_committed(&cluster, &group, &topic);
        let seen: usize = members.iter().map(|member| member.values.len()).sum();
        assert_eq!(seen, 12, "{protocol:?}");
        for mut member in members {
            member.stop().await;
        }
    }
}

/// What other clients have committed stands without a note of how many partitions there were.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_another_client_never_committed_is_read_from_its_start() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("taken-over", 2, &[]), unique("group"));
    for partition in 0..2 {
        cluster.produce(&topic, numbered(&format!("p{partition}"), 10, partition));
    }
    cluster.commit(&group, &topic, 0, 10, "");
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .start(StartPolicy::Latest);
    let mut run = Noting::start(builder);
    all_committed(&cluster, &group, &topic);
    tokio::time::sleep(Duration::from_millis(300)).await;
    run.stop().await;
    assert_eq!((run.count("p1"), run.values.len()), (10, 10));
}

fn cut_off_at_100(event: &Event) -> bool {
    matches!(
        event,
        Event::LogTruncated {
            position: 150,
            start: 100,
            ..
        }
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_was_cut_off_is_read_from_there_by_a_running_consumer_and_by_the_next_one() {
    let Some(cluster) = own_cluster(3) else {
        return;
    };
    for runs in [true, false] {
        let topic = cluster.create_topic_on(
            "cut-off",
            &[1, 2],
            &[
                ("unclean.leader.election.enable", "true"),
                ("min.insync.replicas", "1"),
            ],
        );
        let group = unique("group");
        cluster.produce(&topic, numbered("kept", 100, 0));
        let builder = || member(&cluster, &group, &topic, PROTOCOLS[0]);
        let mut first = Noting::start(builder());
        all_committed(&cluster, &group, &topic);
        tokio::task::block_in_place(|| {
            cluster.kill([2]);
            cluster.produce(&topic, numbered("lost", 50, 0));
        });
        all_committed(&cluster, &group, &topic);
        if !runs {
            first.stop().await;
        }
        tokio::task::block_in_place(|| {
            cluster.kill([1]);
            cluster.restart([2]);
            cluster.produce(&topic, numbered("after", 80, 0));
        });
        let mut second = if runs {
            first
        } else {
            Noting::start(builder())
        };
        until("what took the place of lost records", || {
            second.count("after") == 80
        })
        .await;
        assert!(second.happened(cut_off_at_100));
        second.stop().await;
        assert_eq!(committed(&cluster, &group, &topic), [180]);
        tokio::task::block_in_place(|| cluster.restart([1]));
    }
}

/// What stands beside the committed offset tells that 110 records above it are finished, and 50 of them are not those that the
/// log has there now.
#[tokio::test(flavor = "multi_thread")]
async fn what_takes_the_place_of_records_that_were_finished_above_the_committed_offset_is_handled()
{
    let Some(cluster) = own_cluster(3) else {
        return;
    };
    let topic = cluster.create_topic_on(
        "cut-off-above",
        &[1, 2],
        &[
            ("unclean.leader.election.enable", "true"),
            ("min.insync.replicas", "1"),
        ],
    );
    let group = unique("group");
    cluster.produce(&topic, numbered("kept", 100, 0));
    let builder = || {
        // The group's coordinator may be one of those that are killed: the last commit goes through all the same.
        member(&cluster, &group, &topic, &[("session.timeout.ms", "45000")])
            .ordering(Ordering::Unordered)
            .concurrency(48)
    };
    let values = Seen::<String>::default();
    let noted = values.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        if message.offset() < 40 {
            message.cancelled().await;
            return Err("not now".into());
        }
        noted.note(message.payload().to_string());
        Ok(())
    };
    let mut first = Noting::start_with(builder(), values, handler);
    until("what may finish below", || first.count("kept") == 60).await;
    tokio::task::block_in_place(|| {
        cluster.kill([2]);
        cluster.produce(&topic, numbered("lost", 50, 0));
    });
    until("what may finish above", || first.count("lost") == 50).await;
    let report = first.stop().await;
    assert_eq!(
        (report.handled, report.partitions[0].committed),
        (110, Some(0))
    );
    tokio::task::block_in_place(|| {
        cluster.kill([1]);
        cluster.restart([2]);
        cluster.produce(&topic, numbered("after", 80, 0));
    });
    let mut second = Noting::start(builder());
    all_committed(&cluster, &group, &topic);
    let report = second.stop().await;
    assert_eq!((second.count("kept"), second.count("after")), (40, 80));
    assert_eq!(report.already_finished, 60);
    assert_eq!(second.values.len(), 120, "what finished below comes again");
}

/// A log with 100 records is cut off at 100, where 150 had been read: 40 of those below are unfinished, and all above.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_unfinished_below_a_cut_is_handled_and_committed_and_what_finished_there_does_not_come_again()
 {
    let Some(cluster) = own_cluster(3) else {
        return;
    };
    for ordering in [Ordering::Unordered, Ordering::ByKey] {
        let topic = cluster.create_topic_on(
            "cut-off-at-work",
            &[1, 2],
            &[
                ("unclean.leader.election.enable", "true"),
                ("min.insync.replicas", "1"),
            ],
        );
        let group = unique("group");
        cluster.produce(&topic, numbered("kept", 100, 0));
        let (open, gate) = tokio::sync::watch::channel(false);
        let (values, cancelled) = (Seen::<String>::default(), Seen::<String>::default());
        let (noted, told) = (values.clone(), cancelled.clone());
        let handler = async move |message: &Message<Text>| -> HandlerResult {
            let value = message.payload().to_string();
            if value.starts_with("lost") {
                message.cancelled().await;
                told.note(value);
                return Err("it is not in the log any more".into());
            }
            if message.offset() < 40 {
                gate.clone().wait_for(|open| *open).await?;
            }
            noted.note(value);
            Ok(())
        };
        // The group's coordinator may be one of those that are killed: the partition stays where it is all the same.
        let builder = member(&cluster, &group, &topic, &[("session.timeout.ms", "45000")])
            .ordering(ordering)
            .concurrency(48);
        let mut run = Noting::start_with(builder, values, handler);
        until("what may finish below", || run.count("kept") == 60).await;
        tokio::task::block_in_place(|| {
            cluster.kill([2]);
            cluster.produce(&topic, numbered("lost", 50, 0));
        });
        run.reads_to(150).await;
        tokio::task::block_in_place(|| {
            cluster.kill([1]);
            cluster.restart([2]);
            cluster.produce(&topic, numbered("after", 80, 0));
        });
        until("the new records", || run.count("after") == 80).await;
        let void = |event: &Event| matches!(event, Event::LogTruncated { void: 50, .. });
        assert!(run.happened(cut_off_at_100) && run.happened(void));
        assert_eq!(committed(&cluster, &group, &topic), [0]);
        open.send(true).unwrap();
        until("all that the log has", || {
            committed(&cluster, &group, &topic) == [180]
        })
        .await;
        let report = run.stop().await;
        assert_eq!((run.count("kept"), run.count("after")), (100, 80));
        assert_eq!(run.values.len(), 180, "each came once");
        assert_eq!((report.void, report.handled), (50, 180));
        // Those that were with handlers; the others never started.
        assert_eq!(cancelled.len(), 8, "{:?}", cancelled.all());
        tokio::task::block_in_place(|| cluster.restart([1]));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_cannot_read_a_topic_made_anew_after_elections_ends_the_run_instead_of_stalling()
 {
    let Some(cluster) = own_cluster(1) else {
        return;
    };
    let (topic, group) = (cluster.create_topic("elected", 1, &[]), unique("group"));
    for _ in 0..2 {
        tokio::task::block_in_place(|| {
            cluster.kill([1]);
            cluster.restart([1]);
            cluster.wait_in_sync(&topic);
        });
    }
    cluster.produce(&topic, numbered("old", 100, 0));
    let mut run = Noting::start(member(&cluster, &group, &topic, PROTOCOLS[0]));
    all_committed(&cluster, &group, &topic);
    cluster.delete_topic(&topic);
    cluster.create_topic_named(&topic, 1, &[]);
    cluster.produce(&topic, numbered("new", 150, 0));
    // The client keeps the old leader epochs, asks for records with them, and is refused for ever.
    let error = run.ended().await.unwrap_err();
    assert_eq!(error.kind(), RunErrorKind::Client);
    assert!(
        error.to_string().ends_with("start the consumer again"),
        "{error}"
    );
    let mut next = Noting::start(member(&cluster, &group, &topic, PROTOCOLS[0]));
    all_committed(&cluster, &group, &topic);
    next.stop().await;
    assert_eq!(next.count("new"), 150);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_is_created_while_all_members_are_away_is_read_from_its_start_by_a_pattern() {
    let Some(cluster) = cluster() else { return };
    let (prefix, group) = (unique("pattern"), unique("group"));
    let name = |number: i32| format!("{prefix}.{number}");
    let seen = Seen::<String>::default();
    let start = || {
        let noted = seen.clone();
        let builder = consumer(&cluster, &group)
            .topic_pattern(format!("^{prefix}\\..*"))
            .start(StartPolicy::Latest);
        Running::start(
            builder,
            async move |message: &Message<Text>| -> HandlerResult {
                noted.note(message.topic().to_owned());
                Ok(())
            },
        )
    };
    cluster.create_topic_named(&name(0), 1, &[]);
    cluster.produce(&name(0), (0..5).map(|_| Record::value("before the group")));
    let first = start();
    until("the start to be committed", || {
        committed(&cluster, &group, &name(0)) == [5]
    })
    .await;
    first.stop().await;
    tokio::task::block_in_place(|| cluster.create_topic_named(&name(1), 2, &[]));
    let records = (0..30).map(|n| Record::value("while it is away").partition(n % 2));
    cluster.produce(&name(1), records);
    let second = start();
    let mut events = second.handle.events().unwrap();
    until("the new topic to be handled", || seen.len() == 30).await;
    assert!(seen.all().iter().all(|topic| *topic == name(1)));
    second.stop().await;
    let mut added = 0;
    while let Some(event) = events.next().await {
        added += usize::from(matches!(event, Event::TopicAdded { start: 0, .. }));
    }
    assert_eq!(added, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_whose_committed_offset_is_deleted_is_read_from_its_start_and_told_of() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("deleted", 3, &[]), unique("group"));
    let seen = Seen::<(i32, i64)>::default();
    let start = || {
        let noted = seen.clone();
        let builder = consumer(&cluster, &group)
            .topic(&topic)
            .start(StartPolicy::Latest);
        Running::start(
            builder,
            async move |message: &Message<Text>| -> HandlerResult {
                noted.note((message.partition(), message.offset()));
                Ok(())
            },
        )
    };
    let produce = || cluster.produce(&topic, (0..3).map(|n| Record::value("x").partition(n)));
    let first = start();
    until("the starts to be committed", || {
        committed(&cluster, &group, &topic) == [0, 0, 0]
    })
    .await;
    produce();
    until("the first three", || seen.len() == 3).await;
    first.stop().await;
    tokio::task::block_in_place(|| {
        let mut kept = cluster.committed(&group, &topic);
        kept.remove(1);
        cluster.delete_group(&group);
        for kept in kept {
            let offset = kept.offset.unwrap();
            cluster.commit(&group, &topic, kept.partition, offset, &kept.metadata);
        }
    });
    produce();
    let second = start();
    let mut events = second.handle.events().unwrap();
    until(
        "what is new, and all of the one whose offset is gone",
        || seen.len() == 3 + 3 + 1,
    )
    .await;
    second.stop().await;
    let mut last: Vec<_> = seen.all().split_off(3);
    last.sort_unstable();
    assert_eq!(last, [(0, 1), (1, 0), (1, 1), (2, 1)]);
    let mut missing = Vec::new();
    while let Some(event) = events.next().await {
        if let Event::CommittedOffsetMissing {
            partition,
            start,
            skipped,
        } = event
        {
            missing.push((partition.partition, start, skipped));
        }
    }
    assert_eq!(missing, [(1, 0, 0)]);
}
