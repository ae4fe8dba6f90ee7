//! Real broker: records that kill the process, and processes that are killed from outside. The processes are this test
//! binary, started again for the one test that is ignored otherwise.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    collections::BTreeSet,
    env,
    process::{Command, Output, Stdio},
    thread,
    time::Duration,
};

use common::{all_committed, consumer, millis};
use reliable_consumer::{DeadLetter, HandlerResult, Message, Text};
use reliable_consumer_testing::{Cluster, Record, cluster};

/// What a service is told by its environment.
#[derive(Clone)]
struct Service {
    topic: String,
    dead_letters: Option<String>,
    poison: Vec<i64>,
    limit: u32,
    work: Duration,
}

impl Service {
    fn command(&self) -> Command {
        let mut command = Command::new(env::current_exe().unwrap());
        let poison = self.poison.iter().map(i64::to_string);
        command
            .args(["service", "--exact", "--ignored", "--nocapture"])
            .env("SERVICE_TOPIC", &self.topic)
            .env("SERVICE_POISON", poison.collect::<Vec<_>>().join(","))
            .env("SERVICE_LIMIT", self.limit.to_string())
            .env("SERVICE_WORK_MS", self.work.as_millis().to_string())
            .env("RUST_BACKTRACE", "0")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if let Some(topic) = &self.dead_letters {
            command.env("SERVICE_DEAD_LETTERS", topic);
        }
        command
    }

    /// Starts it until it ends by itself; returns how often it died, and what it said in the end.
    fn run_until_it_ends(&self, handled: &mut BTreeSet<i64>) -> (usize, Output) {
        for deaths in 0..12 {
            let output = self.command().output().unwrap();
            note_handled(&output, handled);
            if output.status.code().is_some() {
                return (deaths, output);
            }
        }
        panic!("it dies again and again");
    }
}

fn note_handled(output: &Output, handled: &mut BTreeSet<i64>) {
    let text = String::from_utf8_lossy(&output.stdout);
    let lines = text.lines().filter_map(|line| line.split_once("handled "));
    handled.extend(lines.filter_map(|(_, number)| number.trim().parse::<i64>().ok()));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a process of the other tests"]
async fn service() {
    let told = |name: &str| env::var(name).ok();
    let Some(topic) = told("SERVICE_TOPIC") else {
        return;
    };
    let cluster = cluster().unwrap();
    let poison = told("SERVICE_POISON").unwrap_or_default();
    let poison: BTreeSet<i64> = poison.split(',').flat_map(str::parse).collect();
    let work = millis(told("SERVICE_WORK_MS").unwrap().parse().unwrap());
    let mut builder = consumer(&cluster, &topic)
        .topic(&topic)
        .concurrency(4)
        .crash_limit(told("SERVICE_LIMIT").unwrap().parse::<u32>().unwrap())
        .property("group.instance.id", "the-only-one");
    if let Some(topic) = told("SERVICE_DEAD_LETTERS") {
        builder = builder.dead_letter(DeadLetter::topic(topic));
    }
    let consumer = builder.build().unwrap();
    let handle = consumer.handle();
    let done = async move {
        loop {
            tokio::time::sleep(millis(50)).await;
            if handle.status().await.is_ok_and(|it| it.is_caught_up()) {
                return;
            }
        }
    };
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        tokio::time::sleep(work).await;
        let number = message.payload().parse()?;
        if poison.contains(&number) {
            std::process::abort();
        }
        println!("handled {number}");
        Ok(())
    };
    let ended = consumer.run(handler).with_graceful_shutdown(done).await;
    ended.unwrap_or_else(|error| panic!("{error}"));
}

fn numbered(cluster: &Cluster, partitions: i32, count: i64) -> (String, String) {
    let topic = cluster.create_topic("crash", partitions, &[]);
    let dead_letters = cluster.create_topic("crash-dlq", 1, &[]);
    let record =
        |n: i64| Record::value(n.to_string()).partition((n % i64::from(partitions)) as i32);
    cluster.produce(&topic, (0..count).map(record));
    (topic, dead_letters)
}

#[test]
fn records_that_kill_the_process_are_dead_lettered_as_crashed_and_all_others_are_handled() {
    let Some(cluster) = cluster() else { return };
    let (topic, dead_letters) = numbered(&cluster, 3, 150);
    let service = Service {
        topic: topic.clone(),
        dead_letters: Some(dead_letters.clone()),
        poison: vec![31, 100],
        limit: 2,
        work: millis(1),
    };
    let mut handled = BTreeSet::new();
    let (deaths, last) = service.run_until_it_ends(&mut handled);
    assert!(last.status.success(), "{last:?}");
    assert!((4..=10).contains(&deaths), "{deaths}");
    let expected = (0..150).filter(|n| !service.poison.contains(n));
    assert_eq!(handled, expected.collect(), "{deaths} deaths");
    all_committed(&cluster, &topic, &topic);

    let mut letters = cluster.read_all(&dead_letters);
    letters.sort_by_key(|letter| letter.text().parse::<i64>().unwrap());
    let values: Vec<_> = letters.iter().map(|letter| letter.text()).collect();
    assert_eq!(values, ["31", "100"]);
    for letter in &letters {
        assert_eq!(letter.header("errorKind"), Some("crashed"));
        assert_eq!(letter.header("attempts"), Some("2"));
        assert_eq!(
            letter.header("errorMessage"),
            Some("the process died 2 times while this record ran alone")
        );
        let offset = letter.text().parse::<i64>().unwrap() / 3;
        assert_eq!(letter.header("originalOffset"), Some(&*offset.to_string()));
    }
}

#[test]
fn a_service_that_is_killed_from_outside_again_and_again_gives_up_no_healthy_record() {
    let Some(cluster) = cluster() else { return };
    let (topic, dead_letters) = numbered(&cluster, 3, 60);
    let service = Service {
        topic: topic.clone(),
        dead_letters: Some(dead_letters.clone()),
        poison: Vec::new(),
        limit: 3,
        work: millis(150),
    };
    let mut handled = BTreeSet::new();
    for round in 0..8 {
        let mut process = service.command().spawn().unwrap();
        thread::sleep(millis(700 + 130 * (round % 4)));
        process.kill().unwrap();
        note_handled(&process.wait_with_output().unwrap(), &mut handled);
    }
    let (_, last) = service.run_until_it_ends(&mut handled);
    assert!(last.status.success(), "{last:?}");
    assert_eq!(handled, (0..60).collect());
    assert!(cluster.read_all(&dead_letters).is_empty());
}

#[test]
fn without_a_dead_letter_topic_the_run_ends_with_an_error_that_names_the_record() {
    let Some(cluster) = cluster() else { return };
    let (topic, _) = numbered(&cluster, 1, 20);
    let service = Service {
        topic: topic.clone(),
        dead_letters: None,
        poison: vec![7],
        limit: 1,
        work: millis(1),
    };
    let mut handled = BTreeSet::new();
    // The record is not run again by the next process, either.
    for (round, deaths) in [(1, 2..=4), (2, 0..=0)] {
        let (died, last) = service.run_until_it_ends(&mut handled);
        assert!(deaths.contains(&died), "round {round}: {died} deaths");
        let error = String::from_utf8_lossy(&last.stderr);
        let named = error.contains(&format!("{topic}/0/7")) && error.contains("crashed");
        assert!(!last.status.success() && named, "round {round}: {error}");
    }
    let committed = &cluster.committed(&topic, &topic)[0];
    assert_eq!(committed.offset, Some(7));
}
