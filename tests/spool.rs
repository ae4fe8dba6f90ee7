//! Real broker: what becomes of dead letters while their topic cannot be written. The process that is killed is this test
//! binary, started again for the one test that is ignored otherwise.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant, SystemTime},
};

use common::{Running, Seen, all_committed, committed, consumer, millis, until};
use reliable_consumer::{
    Builder, ConsumerHandle, DeadLetter, DeadLetterSpool, Event, HandlerResult, Message, Ordering,
    Record as Raw, Retry, RetryTopics, RunErrorKind, Unavailable, header_names, permanent,
};
use reliable_consumer_testing::{Cluster, Record, cluster, unique};

async fn refuse_all(_: &Message<Raw>) -> HandlerResult {
    Err(permanent("no thanks"))
}

/// A directory of its own, gone with the test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        Folder(env::temp_dir().join(unique("spool")))
    }

    /// Files with letters that are still to be sent.
    fn files(&self, topic: &str) -> usize {
        let files = fs::read_dir(self.0.join(topic)).into_iter().flatten();
        files
            .filter(|file| {
                let path = file.as_ref().unwrap().path();
                path.extension().is_some_and(|it| it == "spool")
            })
            .count()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
        let _ = fs::remove_file(&self.0);
    }
}

/// Its dead letters go to a topic that may not be there.
fn spooling(
    cluster: &Cluster,
    topic: &str,
    letters: &str,
    directory: &Path,
    max_bytes: u64,
) -> Builder {
    let policy = Unavailable::Spool {
        directory: directory.into(),
        max_bytes,
    };
    consumer(cluster, topic)
        .topic(topic)
        .ordering(Ordering::ByPartition)
        .dead_letter(DeadLetter::topic(letters).unavailable(policy))
}

async fn spool(handle: &ConsumerHandle) -> DeadLetterSpool {
    for _ in 0..600 {
        if let Some(spool) = handle.status().await.unwrap().dead_letter_spool {
            return spool;
        }
        tokio::time::sleep(millis(50)).await;
    }
    panic!("it has no spool")
}

async fn spool_until(
    handle: &ConsumerHandle,
    what: &str,
    condition: impl Fn(&DeadLetterSpool) -> bool,
) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let spool = spool(handle).await;
        if condition(&spool) {
            return;
        }
        assert!(Instant::now() < deadline, "{what}: {spool:?}");
        tokio::time::sleep(millis(50)).await;
    }
}

fn numbered(range: std::ops::Range<usize>) -> impl Iterator<Item = Record> {
    range.map(|n| Record::value(n.to_string()).key("k"))
}

fn texts(cluster: &Cluster, topic: &str) -> Vec<String> {
    let letters = cluster.read_all(topic);
    letters.iter().map(|letter| letter.text().into()).collect()
}

fn numbers(range: std::ops::Range<usize>) -> Vec<String> {
    range.map(|n| n.to_string()).collect()
}

// D5
#[tokio::test(flavor = "multi_thread")]
async fn letters_wait_on_the_disk_while_their_topic_is_missing_and_are_sent_in_order_when_it_is_there()
 {
    let Some(cluster) = cluster() else { return };
    let (topic, letters) = (cluster.create_topic("spooled", 1, &[]), unique("letters"));
    let folder = Folder::new();
    cluster.produce(&topic, numbered(0..20));
    let began = SystemTime::now();
    let run = Running::start(
        spooling(&cluster, &topic, &letters, &folder.0, 1 << 20),
        refuse_all,
    );
    let handle = run.handle.clone();
    let mut events = handle.events().unwrap();
    // Their records are finished all the same.
    all_committed(&cluster, &topic, &topic);
    let waiting = spool(&handle).await;
    assert_eq!((waiting.letters, waiting.set_aside), (20, 0));
    assert!(waiting.bytes > 20 * 200 && waiting.oldest.unwrap() >= began);
    assert_eq!(handle.status().await.unwrap().stalled_dead_letters, []);
    loop {
        if let Some(Event::DeadLetterSpool(told)) = events.next().await {
            assert!(told.letters > 0 && told.directory == folder.0);
            break;
        }
    }

    cluster.create_topic_named(&letters, 1, &[]);
    spool_until(&handle, "all to be sent", |spool| spool.letters == 0).await;
    assert_eq!(texts(&cluster, &letters), numbers(0..20));
    let last = spool(&handle).await;
    assert_eq!((last.bytes, last.oldest, last.send_error), (0, None, None));
    assert_eq!(folder.files(&letters), 0);
    let letter = &cluster.read_all(&letters)[7];
    for (name, value) in [
        (header_names::ORIGINAL_TOPIC, &*topic),
        (header_names::ORIGINAL_OFFSET, "7"),
        (header_names::ERROR_MESSAGE, "no thanks"),
    ] {
        assert_eq!(letter.header(name), Some(value));
    }
    assert_eq!(letter.key.as_deref(), Some(&b"k"[..]));

    // And straight there from then on.
    cluster.produce(&topic, numbered(20..25));
    all_committed(&cluster, &topic, &topic);
    let report = run.stop().await;
    assert_eq!(report.dead_lettered, 25);
    assert_eq!(texts(&cluster, &letters), numbers(0..25));
}

/// Killed when it is dropped, also by a test that fails.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a process of another test"]
async fn service() {
    let told = |name: &str| env::var(name).ok();
    let (Some(topic), Some(letters), Some(directory)) = (
        told("SPOOL_TOPIC"),
        told("SPOOL_LETTERS"),
        told("SPOOL_DIRECTORY"),
    ) else {
        return;
    };
    let cluster = cluster().unwrap();
    let builder = spooling(&cluster, &topic, &letters, Path::new(&directory), 64 << 20)
        // Many at a time wait for the disk.
        .ordering(Ordering::Unordered)
        .property("group.instance.id", "the-only-one")
        .crash_limit(None);
    builder.build().unwrap().run(refuse_all).await.unwrap();
}

// P1
#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_is_killed_while_it_spools_loses_no_letter_and_the_next_one_sends_them() {
    let Some(cluster) = cluster() else { return };
    let (topic, letters) = (cluster.create_topic("killed", 1, &[]), unique("letters"));
    let folder = Folder::new();
    let start = || {
        Command::new(env::current_exe().unwrap())
            .args(["service", "--exact", "--ignored", "--nocapture"])
            .env("SPOOL_TOPIC", &topic)
            .env("SPOOL_LETTERS", &letters)
            .env("SPOOL_DIRECTORY", &folder.0)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    let mut produced = 0;
    for round in 0..3 {
        let process = Process(start());
        let past = committed(&cluster, &topic, &topic)[0].max(0);
        cluster.produce(&topic, numbered(produced..produced + 2_000));
        produced += 2_000;
        // Commits go on while the topic cannot be written; kill it in the middle of that.
        let deadline = Instant::now() + Duration::from_secs(60);
        while committed(&cluster, &topic, &topic)[0] < past + 100 {
            assert!(Instant::now() < deadline, "round {round}");
            thread::sleep(millis(20));
        }
        drop(process);
    }
    let committed = committed(&cluster, &topic, &topic)[0];
    assert!(committed > 0 && folder.files(&letters) > 0);

    cluster.create_topic_named(&letters, 1, &[]);
    let seen = Seen::<i64>::default();
    let builder = spooling(&cluster, &topic, &letters, &folder.0, 64 << 20)
        .property("group.instance.id", "the-only-one");
    // Nothing fails any more: what it sends, others have left.
    let run = Running::start(builder, seen.noting());
    all_committed(&cluster, &topic, &topic);
    spool_until(&run.handle, "all to be sent", |spool| spool.letters == 0).await;
    let spool = spool(&run.handle).await;
    assert_eq!((spool.set_aside, spool.spool_error), (0, None));
    run.stop().await;
    let sent: BTreeSet<i64> = texts(&cluster, &letters)
        .iter()
        .map(|text| text.parse().unwrap())
        .collect();
    let missing: Vec<_> = (0..committed).filter(|n| !sent.contains(n)).collect();
    assert!(
        missing.is_empty(),
        "{} of {committed} are committed and not in the topic, the first is {}",
        missing.len(),
        missing[0]
    );
    assert_eq!(folder.files(&letters), 0);
    let done: BTreeSet<i64> = sent.into_iter().chain(seen.all()).collect();
    assert_eq!(done, (0..produced as i64).collect());
}

// D5
#[tokio::test(flavor = "multi_thread")]
async fn when_the_spool_is_full_records_wait_visibly_and_nothing_is_lost() {
    let Some(cluster) = cluster() else { return };
    let (topic, letters) = (cluster.create_topic("full", 1, &[]), unique("letters"));
    let folder = Folder::new();
    cluster.produce(&topic, numbered(0..30));
    let run = Running::start(
        spooling(&cluster, &topic, &letters, &folder.0, 5_000),
        refuse_all,
    );
    let handle = run.handle.clone();
    spool_until(&handle, "the spool to be full", |spool| {
        spool.spool_error.is_some()
    })
    .await;
    let full = spool(&handle).await;
    assert!(
        full.bytes <= 5_000 && (3..20).contains(&full.letters),
        "{full:?}"
    );
    assert!(full.spool_error.unwrap().contains("5000 bytes"));
    let stalled = handle.status().await.unwrap().stalled_dead_letters;
    assert!(
        stalled[0].error.contains("cannot be spooled"),
        "{stalled:?}"
    );
    let full = full.letters as i64;
    until("what is in the spool to be committed", || {
        committed(&cluster, &topic, &topic) == [full]
    })
    .await;
    tokio::time::sleep(millis(500)).await;
    assert_eq!(committed(&cluster, &topic, &topic), [full]);

    cluster.create_topic_named(&letters, 1, &[]);
    all_committed(&cluster, &topic, &topic);
    spool_until(&handle, "all to be sent", |spool| spool.letters == 0).await;
    assert_eq!(spool(&handle).await.spool_error, None);
    run.stop().await;
    assert_eq!(texts(&cluster, &letters), numbers(0..30));
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_directory_cannot_be_used_records_wait_visibly() {
    let Some(cluster) = cluster() else { return };
    let (topic, letters) = (cluster.create_topic("unusable", 1, &[]), unique("letters"));
    let folder = Folder::new();
    fs::write(&folder.0, "a file is in the way").unwrap();
    cluster.produce(&topic, numbered(0..3));
    let run = Running::start(
        spooling(&cluster, &topic, &letters, &folder.0, 1 << 20),
        refuse_all,
    );
    let handle = run.handle.clone();
    spool_until(&handle, "it to show", |spool| spool.spool_error.is_some()).await;
    let deadline = Instant::now() + Duration::from_secs(30);
    while handle
        .status()
        .await
        .unwrap()
        .stalled_dead_letters
        .is_empty()
    {
        assert!(Instant::now() < deadline);
        tokio::time::sleep(millis(50)).await;
    }
    assert!(committed(&cluster, &topic, &topic)[0] <= 0);
    // Once the way is free the spool is used.
    fs::remove_file(&folder.0).unwrap();
    all_committed(&cluster, &topic, &topic);
    assert_eq!(spool(&handle).await.letters, 3);
    run.stop().await;
}

// D5
#[tokio::test(flavor = "multi_thread")]
async fn a_record_on_its_way_to_a_missing_retry_topic_waits_in_the_spool_and_is_handled_in_the_end()
{
    let Some(cluster) = cluster() else { return };
    let (topic, letters) = (cluster.create_topic("orders", 1, &[]), unique("letters"));
    let folder = Folder::new();
    let tiers = RetryTopics::new([millis(100)]);
    let tier = tiers.topics_of(&topic).next().unwrap();
    let handler = async |message: &Message<Raw>| -> HandlerResult {
        match message.attempt() {
            1 => Err("not yet".into()),
            _ => Ok(()),
        }
    };
    let builder = spooling(&cluster, &topic, &letters, &folder.0, 1 << 20)
        .ordering(Ordering::Unordered)
        .retry(Retry::none())
        .retry_topics(tiers)
        .property("topic.metadata.refresh.interval.ms", "1000");
    let run = Running::start(builder, handler);
    cluster.produce(&topic, numbered(0..20));
    spool_until(&run.handle, "they are spooled", |it| it.letters == 20).await;
    all_committed(&cluster, &topic, &topic);
    assert_eq!(run.handle.status().await.unwrap().stalled_dead_letters, []);
    cluster.create_topic_named(&tier, 1, &[]);
    spool_until(&run.handle, "they are sent", |it| it.letters == 0).await;
    all_committed(&cluster, &topic, &tier);
    let report = run.stop().await;
    assert_eq!(
        (report.moved_to_retry, report.handled, report.dead_lettered),
        (20, 20, 0)
    );
}

// D6, P5
#[tokio::test(flavor = "multi_thread")]
async fn a_spooled_letter_that_its_topic_does_not_take_is_set_aside_and_those_behind_it_are_sent() {
    let Some(cluster) = cluster() else { return };
    let (topic, letters) = (cluster.create_topic("unfit", 1, &[]), unique("letters"));
    let folder = Folder::new();
    let values = [
        "first".into(),
        "x".repeat(3_000),
        "y".repeat(1_300),
        "last".into(),
    ];
    cluster.produce(
        &topic,
        values.iter().map(|value| Record::value(value.as_str())),
    );
    let handler = async |_: &Message<Raw>| -> HandlerResult { Err(permanent("why ".repeat(200))) };
    let run = Running::start(
        spooling(&cluster, &topic, &letters, &folder.0, 1 << 20),
        handler,
    );
    all_committed(&cluster, &topic, &topic);
    cluster.create_topic_named(&letters, 1, &[("max.message.bytes", "2000")]);
    spool_until(&run.handle, "all to be sent", |spool| spool.letters == 0).await;
    assert_eq!(spool(&run.handle).await.set_aside, 1);
    run.stop().await;
    let found = cluster.read_all(&letters);
    let lengths: Vec<_> = found.iter().map(|letter| letter.text().len()).collect();
    assert_eq!(lengths, [5, 1_300, 4]);
    assert!(found[0].header(header_names::ERROR_MESSAGE).is_some());
    assert_eq!(found[1].header(header_names::ERROR_MESSAGE), None);
    assert_eq!(found[1].header(header_names::ORIGINAL_OFFSET), Some("2"));
}

// D6: the broker refuses the whole batch.
#[tokio::test(flavor = "multi_thread")]
async fn spooled_letters_that_the_broker_calls_invalid_take_no_others_along_and_none_comes_twice() {
    let Some(cluster) = cluster() else { return };
    let (topic, letters) = (cluster.create_topic("invalid", 1, &[]), unique("letters"));
    let folder = Folder::new();
    // A compacted topic takes no record without a key.
    let is_invalid = |n: usize| n % 30 == 20;
    cluster.produce(
        &topic,
        (0..100).map(|n| match is_invalid(n) {
            true => Record::value(n.to_string()),
            false => Record::value(n.to_string()).key(format!("key {}", n % 7)),
        }),
    );
    let run = Running::start(
        spooling(&cluster, &topic, &letters, &folder.0, 1 << 20),
        refuse_all,
    );
    spool_until(&run.handle, "all to be spooled", |it| it.letters == 100).await;
    cluster.create_topic_named(&letters, 4, &[("cleanup.policy", "compact")]);
    spool_until(&run.handle, "all to be sent", |it| it.letters == 0).await;
    assert_eq!(spool(&run.handle).await.set_aside, 3);
    run.stop().await;
    let mut found: Vec<usize> = texts(&cluster, &letters)
        .iter()
        .map(|text| text.parse().unwrap())
        .collect();
    found.sort_unstable();
    let expected: Vec<usize> = (0..100).filter(|n| !is_invalid(*n)).collect();
    assert_eq!(found, expected, "each once");
}

// D5
#[tokio::test(flavor = "multi_thread")]
async fn with_stop_the_run_ends_in_time_with_an_error_that_names_the_topic_and_the_offset_stays() {
    let Some(cluster) = cluster() else { return };
    let (topic, letters) = (cluster.create_topic("stop", 1, &[]), unique("letters"));
    cluster.produce(&topic, numbered(0..10));
    let handler = async |message: &Message<Raw>| -> HandlerResult {
        if message.offset() >= 4 {
            return Err(permanent("poison"));
        }
        Ok(())
    };
    let policy = Unavailable::Stop {
        after: Duration::from_secs(2),
    };
    let builder = consumer(&cluster, &topic)
        .topic(&topic)
        .ordering(Ordering::Unordered)
        .dead_letter(DeadLetter::topic(&letters).unavailable(policy));
    let began = Instant::now();
    let error = Running::start(builder, handler).ended().await.unwrap_err();
    assert_eq!(error.kind(), RunErrorKind::DeadLetterUnavailable);
    let text = error.to_string();
    let named = text.contains(&letters) && text.contains(&format!("{topic}/0/"));
    assert!(named && text.contains("start again"), "{text}");
    let took = began.elapsed();
    // Not the 25 s that a shutdown may take: nobody waits for the others either.
    assert!((2..12).contains(&took.as_secs()), "{took:?}");
    assert_eq!(committed(&cluster, &topic, &topic), [4]);
    assert_eq!(
        (error.report().handled, error.report().dead_lettered),
        (4, 0)
    );
}
