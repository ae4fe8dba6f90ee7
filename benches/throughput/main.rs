//! What reliable consuming costs: this library beside the loops one would write without it, on a real cluster.
//!
//! ```text
//! KAFKA_BROKERS=localhost:9092 cargo bench --bench throughput             # all arms, three rounds
//! KAFKA_BROKERS=localhost:9092 cargo bench --bench throughput -- --quick  # a tenth of it, one round
//! KAFKA_BROKERS=localhost:9092 cargo bench --bench throughput -- latency  # produce to handler, and idle CPU
//! ```
//!
//! Each arm runs in a process of its own, so that none inherits another's memory, and arms take turns within a round.
//! Time and CPU count from the first record handled to the last: joining a group is nobody's merit. After each arm its
//! committed offsets are read back and must be the ends of the topic, so that none wins by not committing. The bare
//! loops are exempt: not tracking and not committing anything is what they are for.

mod arms;
mod latency;
mod meter;

use std::process::{Command, ExitCode};

use clap::{Parser, Subcommand};
use reliable_consumer::Ordering;
use reliable_consumer_testing::{Cluster, Record, cluster, unique};

use arms::{Arm, Data, Subject, Work};

#[derive(Parser)]
struct Options {
    /// One round, a tenth of the records
    #[arg(long)]
    quick: bool,
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Records that the fastest arms handle; slower ones take a fraction of it
    #[arg(long, default_value_t = 1_000_000)]
    records: usize,
    /// Only these arms, separated by commas
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// `cargo bench` says so
    #[arg(long, hide = true)]
    bench: bool,
    #[command(subcommand)]
    command: Option<Task>,
}

#[derive(Subcommand)]
enum Task {
    /// From produce to handler with default settings, and what an idle consumer costs
    Latency,
    /// One arm, in this process
    #[command(hide = true)]
    Arm {
        name: String,
        brokers: String,
        topic: String,
        group: String,
        records: u64,
    },
}

#[rustfmt::skip] // One a line, to be read as a table.
const ARMS: &[Arm] = &[
    // No work. Arms that are compared with each other run next to each other.
    Arm::new("bare", Subject::Bare, Work::None, Data::PLAIN),
    Arm::new("unordered", Subject::Ours(Ordering::Unordered, 64), Work::None, Data::PLAIN),
    Arm::new("by-key", Subject::Ours(Ordering::ByKey, 64), Work::None, Data::PLAIN),
    Arm::new("by-partition", Subject::Ours(Ordering::ByPartition, 64), Work::None, Data::PLAIN),
    Arm::new("bare/defaults", Subject::BareDefaults, Work::None, Data::PLAIN),
    Arm::new("commit-each", Subject::CommitEach, Work::None, Data::PLAIN.one_in(100)),
    Arm::new("barrier", Subject::Barrier, Work::None, Data::PLAIN.one_in(5)),
    Arm::new("bare/headers", Subject::Bare, Work::None, Data::HEADERS),
    Arm::new("by-key/headers", Subject::Ours(Ordering::ByKey, 64), Work::None, Data::HEADERS),
    Arm::new("bare/1kib", Subject::Bare, Work::None, Data::KIB),
    Arm::new("by-key/1kib", Subject::Ours(Ordering::ByKey, 64), Work::None, Data::KIB),
    // A millisecond of waiting in each handler.
    Arm::new("bare/1ms", Subject::Bare, Work::Even, Data::PLAIN.one_in(500)),
    Arm::new("commit-each/1ms", Subject::CommitEach, Work::Even, Data::PLAIN.one_in(500)),
    Arm::new("barrier/1ms", Subject::Barrier, Work::Even, Data::PLAIN.one_in(20)),
    Arm::new("by-partition/1ms", Subject::Ours(Ordering::ByPartition, 64), Work::Even, Data::PLAIN.one_in(100)),
    Arm::new("sleepers-100/1ms", Subject::Sleepers(100), Work::Even, Data::PLAIN.one_in(5)),
    Arm::new("by-key-100/1ms", Subject::Ours(Ordering::ByKey, 100), Work::Even, Data::PLAIN.one_in(5)),
    Arm::new("sleepers-1000/1ms", Subject::Sleepers(1_000), Work::Even, Data::PLAIN),
    Arm::new("unordered-1000/1ms", Subject::Ours(Ordering::Unordered, 1_000), Work::Even, Data::PLAIN),
    // The same, and one record in a hundred takes 100 ms.
    Arm::new("bare/slow", Subject::Bare, Work::Uneven, Data::PLAIN.one_in(500)),
    Arm::new("commit-each/slow", Subject::CommitEach, Work::Uneven, Data::PLAIN.one_in(500)),
    Arm::new("barrier/slow", Subject::Barrier, Work::Uneven, Data::PLAIN.one_in(100)),
    Arm::new("by-partition/slow", Subject::Ours(Ordering::ByPartition, 64), Work::Uneven, Data::PLAIN.one_in(500)),
    Arm::new("by-key-100/slow", Subject::Ours(Ordering::ByKey, 100), Work::Uneven, Data::PLAIN.one_in(10)),
    Arm::new("unordered-1000/slow", Subject::Ours(Ordering::Unordered, 1_000), Work::Uneven, Data::PLAIN),
];

/// One arm over another.
struct Goal {
    name: &'static str,
    of: &'static str,
    over: &'static str,
    what: fn(&Sample) -> f64,
    bound: Bound,
}

enum Bound {
    AtLeast(f64),
    AtMost(f64),
    /// A ratio to be known.
    None,
}

#[rustfmt::skip] // One a line, to be read as a table.
const GOALS: &[Goal] = &[
    Goal::rate("throughput-unordered", "unordered", "bare", 0.9),
    Goal::rate("throughput-by-key", "by-key", "bare", 0.9),
    Goal::rate("throughput-by-partition", "by-partition", "bare", 0.9),
    Goal::cpu("cpu-unordered", "unordered", "bare", 1.2),
    Goal::cpu("cpu-by-key", "by-key", "bare", 1.2),
    Goal::cpu("cpu-by-partition", "by-partition", "bare", 1.2),
    Goal::none("throughput-by-key-headers", "by-key/headers", "bare/headers"),
    Goal::none("throughput-by-key-1kib", "by-key/1kib", "bare/1kib"),
    Goal::rate("slow-records-unordered-over-barrier", "unordered-1000/slow", "barrier/slow", 15.0),
    Goal::rate("1ms-unordered-over-bare-noop", "unordered-1000/1ms", "bare", 0.18),
    Goal::rate("1ms-by-key-over-100-sleepers", "by-key-100/1ms", "sleepers-100/1ms", 0.9),
];

impl Goal {
    const fn rate(name: &'static str, of: &'static str, over: &'static str, least: f64) -> Self {
        Self {
            name,
            of,
            over,
            what: |sample| sample.rate,
            bound: Bound::AtLeast(least),
        }
    }

    const fn none(name: &'static str, of: &'static str, over: &'static str) -> Self {
        Self {
            name,
            of,
            over,
            what: |sample| sample.rate,
            bound: Bound::None,
        }
    }

    const fn cpu(name: &'static str, of: &'static str, over: &'static str, most: f64) -> Self {
        Self {
            name,
            of,
            over,
            what: |sample| sample.cpu,
            bound: Bound::AtMost(most),
        }
    }
}

/// What one run of an arm measured.
#[derive(Clone, Copy)]
struct Sample {
    /// Records a second.
    rate: f64,
    /// CPU seconds for a million records, of the whole process.
    cpu: f64,
    /// MiB that the process grew by at its largest.
    memory: f64,
}

fn main() -> ExitCode {
    let options = Options::parse();
    if let Some(Task::Arm {
        name,
        brokers,
        topic,
        group,
        records,
    }) = &options.command
    {
        let arm = ARMS
            .iter()
            .find(|arm| arm.name == name)
            .expect("the parent passes names of arms");
        let measured = arm.run(brokers, topic, group, *records);
        println!(
            "{} {} {}",
            measured.rate, measured.cpu_per_million, measured.memory_mib
        );
        return ExitCode::SUCCESS;
    }
    let Some(cluster) = cluster() else {
        return ExitCode::SUCCESS;
    };
    let met = match options.command {
        Some(Task::Latency) => latency::run(&cluster),
        _ => compare(&cluster, &options),
    };
    if met {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Runs the arms, prints what they measured, and tells whether every goal was met.
fn compare(cluster: &Cluster, options: &Options) -> bool {
    let (rounds, records) = if options.quick {
        (1, options.records / 10)
    } else {
        (options.rounds, options.records)
    };
    let chosen =
        |arm: &&Arm| options.only.is_empty() || options.only.iter().any(|name| name == arm.name);
    let arms: Vec<&Arm> = ARMS.iter().filter(chosen).collect();
    let topics = Topics::produce(cluster, &arms, records);
    let mut samples: Vec<Vec<Sample>> = vec![Vec::new(); arms.len()];
    for round in 1..=rounds {
        for (arm, samples) in arms.iter().zip(&mut samples) {
            eprintln!("round {round} of {rounds}: {}", arm.name);
            samples.push(run_apart(
                cluster,
                arm,
                topics.of(arm),
                arm.data.count(records),
            ));
        }
    }
    println!(
        "{:<32} {:>12} {:>16} {:>10}",
        "arm", "records/s", "CPU s/million", "MiB"
    );
    for (arm, samples) in arms.iter().zip(&samples) {
        let of = |what: fn(&Sample) -> f64| median(samples.iter().map(what));
        let (rate, cpu, memory) = (of(|it| it.rate), of(|it| it.cpu), of(|it| it.memory));
        println!("{:<32} {rate:>12.0} {cpu:>16.2} {memory:>10.0}", arm.name);
    }
    let samples_of = |name| {
        arms.iter()
            .position(|arm| arm.name == name)
            .map(|at| &samples[at])
    };
    let mut all_met = true;
    for goal in GOALS {
        let (Some(of), Some(over)) = (samples_of(goal.of), samples_of(goal.over)) else {
            continue;
        };
        // Within a round: what slows the machine down for minutes then slows both.
        let ratio = median(
            of.iter()
                .zip(over)
                .map(|(of, over)| (goal.what)(of) / (goal.what)(over)),
        );
        all_met &= judge(goal.name, ratio, &goal.bound);
    }
    all_met
}

fn judge(name: &str, value: f64, bound: &Bound) -> bool {
    println!("ratio {name} {value:.3}");
    let (met, bound) = match *bound {
        Bound::AtLeast(least) => (value >= least, format!("at least {least}")),
        Bound::AtMost(most) => (value <= most, format!("at most {most}")),
        Bound::None => return true,
    };
    println!(
        "goal {name} {} ({bound})",
        if met { "met" } else { "missed" }
    );
    met
}

/// Runs an arm in a process of its own, and checks what it has committed.
fn run_apart(cluster: &Cluster, arm: &Arm, topic: &str, records: usize) -> Sample {
    let group = unique("bench");
    let output = Command::new(std::env::current_exe().expect("this program has a path"))
        .args([
            "arm",
            arm.name,
            cluster.brokers(),
            topic,
            &group,
            &records.to_string(),
        ])
        .stderr(std::process::Stdio::inherit())
        .output()
        .expect("this program can be started again");
    assert!(output.status.success(), "{}: {}", arm.name, output.status);
    let printed = String::from_utf8_lossy(&output.stdout);
    let numbers: Vec<f64> = printed
        .split_whitespace()
        .map(|it| it.parse().expect("an arm prints numbers"))
        .collect();
    let &[rate, cpu, memory] = &numbers[..] else {
        panic!("{} printed {printed:?}", arm.name)
    };
    if arm.subject.commits() {
        let committed: Vec<_> = cluster
            .committed(&group, topic)
            .into_iter()
            .filter_map(|it| it.offset)
            .collect();
        assert_eq!(
            committed,
            cluster.end_offsets(topic),
            "{}: committed offsets, ends of the topic",
            arm.name
        );
    }
    Sample { rate, cpu, memory }
}

/// The topics that the arms of a run read.
struct Topics(Vec<(Data, String)>);

impl Topics {
    fn produce(cluster: &Cluster, arms: &[&Arm], records: usize) -> Self {
        let mut topics: Vec<(Data, String)> = Vec::new();
        for arm in arms
            .iter()
            .filter(|arm| !matches!(arm.subject, Subject::Sleepers(_)))
        {
            if topics.iter().any(|(data, _)| *data == arm.data) {
                continue;
            }
            let topic = cluster.create_topic("bench", 4, &[]);
            let count = arm.data.count(records);
            eprintln!(
                "producing {count} records of {} bytes with {} headers",
                arm.data.bytes, arm.data.headers
            );
            cluster.produce(&topic, (0..count).map(|n| record(&arm.data, n)));
            topics.push((arm.data, topic));
        }
        Self(topics)
    }

    fn of(&self, arm: &Arm) -> &str {
        let topic = self.0.iter().find(|(data, _)| *data == arm.data);
        topic.map_or("none", |(_, topic)| topic)
    }
}

fn record(data: &Data, n: usize) -> Record {
    let mut record = Record::value(vec![b'x'; data.bytes]).key(format!("key-{:03}", n % 1_000));
    for header in 0..data.headers {
        record = record.header(format!("header-{header}"), format!("value-{n}"));
    }
    record
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
