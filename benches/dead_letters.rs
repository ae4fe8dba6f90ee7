//! Reading dead letters by the hundred thousand: speed and memory of the command line beside a bare consumer, and how fast
//! the redriver sends them back.
//!
//! ```text
//! KAFKA_BROKERS=localhost:9092 cargo bench --bench dead_letters --features cli
//! KAFKA_BROKERS=localhost:9092 cargo bench --bench dead_letters --features cli -- --quick
//! ```
//!
//! Two topics are filled with letters as this library writes them: one with a million, one with a tenth of that. Each subject
//! is a process of its own, started anew in every round, and its time is all of that process's life, connecting included. The
//! bare consumer is this program too: a loop around rdkafka's `BaseConsumer` with all of its prefetch, which looks at no
//! header. A row's ratio is the median of those with the bare consumer of the same round.

use std::{
    collections::BTreeMap,
    env, fs,
    ops::RangeInclusive,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use clap::{Parser, Subcommand};
use rdkafka::{
    ClientConfig, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer as _},
};
use reliable_consumer_testing::{Cluster, Record, cluster, unique};

const PARTITIONS: i32 = 4;
const PAYLOAD: usize = 200;

#[derive(Parser)]
struct Options {
    /// One round, a tenth of the letters
    #[arg(long)]
    quick: bool,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    #[arg(long, default_value_t = 1_000_000)]
    letters: usize,
    /// `cargo bench` says so
    #[arg(long, hide = true)]
    bench: bool,
    #[command(subcommand)]
    command: Option<Task>,
}

#[derive(Subcommand)]
enum Task {
    /// The bare consumer, in this process
    #[command(hide = true)]
    Bare { brokers: String, topic: String },
}

/// What a process took.
#[derive(Clone, Copy)]
struct Sample {
    rate: f64,
    memory_mib: f64,
}

fn main() {
    let options = Options::parse();
    if let Some(Task::Bare { brokers, topic }) = options.command {
        return read_bare(&brokers, &topic);
    }
    let (rounds, many) = match options.quick {
        true => (1, options.letters / 10),
        false => (options.rounds, options.letters),
    };
    let cluster = cluster().expect("KAFKA_BROKERS names a cluster");
    let few = many / 10;
    println!("{many} and {few} letters, {PARTITIONS} partitions, {rounds} rounds");
    let world = World::new(cluster, many, few);
    let mut samples = BTreeMap::<(usize, &str, usize), Vec<Sample>>::new();
    for _ in 0..rounds {
        for (place, (name, letters)) in [
            ("bare", many),
            ("dlq stats", many),
            ("dlq list --kind", many),
            ("dlq redrive --dry-run", many),
            ("dlq redrive", few),
            ("bare", few),
            ("dlq stats", few),
            ("dlq list --kind", few),
            ("dlq redrive --dry-run", few),
        ]
        .into_iter()
        .enumerate()
        {
            let sample = world.run(name, letters);
            samples
                .entry((place, name, letters))
                .or_default()
                .push(sample);
        }
    }
    tell(&samples, many, few);
}

fn tell(samples: &BTreeMap<(usize, &str, usize), Vec<Sample>>, many: usize, few: usize) {
    println!(
        "\n{:<24}{:>10}{:>12}{:>22}{:>10}{:>16}{:>12}",
        "", "letters", "letters/s", "of the rounds", "of bare", "of the rounds", "peak MiB"
    );
    let of = |name: &str, letters: usize| {
        let found = samples
            .iter()
            .find(|((_, it, count), _)| (*it, *count) == (name, letters));
        found
            .map(|(_, samples)| samples.as_slice())
            .unwrap_or_default()
    };
    for ((_, name, letters), runs) in samples {
        let bare = of("bare", *letters);
        let (rate, rates) = median(runs.iter().map(|it| it.rate));
        let (ratio, ratios) = median(runs.iter().zip(bare).map(|(it, bare)| it.rate / bare.rate));
        let (memory, _) = median(runs.iter().map(|it| it.memory_mib));
        println!(
            "{name:<24}{letters:>10}{rate:>12.0}{:>22}{ratio:>10.2}{:>16}{memory:>12.1}",
            format!("{:.0} to {:.0}", rates.start(), rates.end()),
            format!("{:.2} to {:.2}", ratios.start(), ratios.end()),
        );
    }
    let (ratio, _) = median(
        of("dlq stats", many)
            .iter()
            .zip(of("bare", many))
            .map(|(it, bare)| it.rate / bare.rate),
    );
    let memory = |letters| median(of("dlq stats", letters).iter().map(|it| it.memory_mib)).0;
    println!(
        "\ndlq stats: {ratio:.2} of the bare consumer's speed, to be at least 0.5; {:.1} MiB more for ten times the letters, to \
         be about none",
        memory(many) - memory(few)
    );
}

fn median(values: impl Iterator<Item = f64>) -> (f64, RangeInclusive<f64>) {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    (
        values[values.len() / 2],
        values[0]..=values[values.len() - 1],
    )
}

struct World {
    cluster: Cluster,
    /// Where letters come from.
    origin: String,
    /// Dead-letter topics by their numbers of letters.
    topics: BTreeMap<usize, String>,
}

impl World {
    fn new(cluster: Cluster, many: usize, few: usize) -> Self {
        let origin = cluster.create_topic("orders", PARTITIONS, &[]);
        let topics = [few, many].map(|letters| {
            let topic = cluster.create_topic("orders.dlq", PARTITIONS, &[]);
            for start in (0..letters).step_by(50_000) {
                let batch = start..letters.min(start + 50_000);
                cluster.produce(&topic, batch.map(|number| letter(&origin, number)));
            }
            (letters, topic)
        });
        Self {
            cluster,
            origin,
            topics: topics.into(),
        }
    }

    fn run(&self, name: &str, letters: usize) -> Sample {
        let topic = &self.topics[&letters];
        let brokers = self.cluster.brokers();
        let mut command = Command::new(env!("CARGO_BIN_EXE_reliable-consumer"));
        match name {
            "bare" => {
                command = Command::new(env::current_exe().expect("this program has a path"));
                command.args(["bare", brokers, topic]);
            }
            "dlq stats" => _ = command.args(["dlq", "stats", topic]),
            "dlq list --kind" => _ = command.args(["dlq", "list", topic, "--kind", "panic"]),
            _ => {
                let group = unique("redriver");
                command.args(["dlq", "redrive", topic, "--to", &self.origin, "--yes"]);
                command.args(["--redriver-group", &group]);
                if name.ends_with("--dry-run") {
                    command.arg("--dry-run");
                }
            }
        }
        if name != "bare" {
            command.args(["--brokers", brokers, "--output", "json"]);
        }
        let (time, memory_mib, output) = watch(command);
        if name != "dlq list --kind" {
            let count = letters.to_string();
            assert!(
                output.contains(&count),
                "{name} tells of {count} letters: {output}"
            );
        }
        Sample {
            rate: letters as f64 / time.as_secs_f64(),
            memory_mib,
        }
    }
}

/// Runs it to its end: how long that took, the most memory it had, and its output.
fn watch(mut command: Command) -> (Duration, f64, String) {
    let began = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it can be started");
    let status = format!("/proc/{}/status", child.id());
    let mut peak_kib = 0_u64;
    let ended = loop {
        if let Some(ended) = child.try_wait().expect("it is ours") {
            break ended;
        }
        let status = fs::read_to_string(&status).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
        peak_kib = peak_kib.max(kib.unwrap_or(0));
        thread::sleep(Duration::from_millis(2));
    };
    let time = began.elapsed();
    let output = child.wait_with_output().expect("it has ended").stdout;
    let output = String::from_utf8_lossy(&output).into_owned();
    assert!(ended.success(), "{command:?} has failed: {output}");
    (time, peak_kib as f64 / 1024.0, output)
}

/// As this library writes it, with an application's own headers.
fn letter(origin: &str, number: usize) -> Record {
    let kinds = ["timeout", "permanent", "attempts-exhausted", "undecodable"];
    let kind = match number % 10_000 {
        0 => "panic",
        _ => kinds[number % kinds.len()],
    };
    let failed_at = 1_790_000_000_000 + number as i64 * 40;
    Record::value(vec![b'x'; PAYLOAD])
        .key(format!("customer-{}", number % 50_000))
        .partition((number % PARTITIONS as usize) as i32)
        .header("traceparent", format!("00-{number:032x}-{number:016x}-01"))
        .header("content-type", "application/json")
        .header(
            "messageId",
            format!("{origin}/{}/{number}/{failed_at}", number % 12),
        )
        .header("retryCount", (number % 3).to_string())
        .header("originalTopic", origin)
        .header("originalPartition", (number % 12).to_string())
        .header("originalOffset", number.to_string())
        .header("originalTimestamp", (failed_at - 5_000).to_string())
        .header("consumerGroup", "billing")
        .header("attempts", "5")
        .header("errorKind", kind)
        .header(
            "errorMessage",
            format!(
                "ledger {} did not answer: connection reset by peer",
                number % 97
            ),
        )
        .header("failedAt", failed_at.to_string())
}

/// As fast as rdkafka goes: every record looked at once, nothing kept.
fn read_bare(brokers: &str, topic: &str) {
    let consumer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", "nobody")
        .set("enable.auto.commit", "false")
        .create()
        .expect("the properties are sound");
    let patience = Duration::from_secs(30);
    let mut assignment = TopicPartitionList::new();
    let mut left = 0;
    for partition in 0..PARTITIONS {
        let ends = consumer.fetch_watermarks(topic, partition, patience);
        let (start, end) = ends.expect("the brokers answer");
        left += end - start;
        let added = assignment.add_partition_offset(topic, partition, Offset::Beginning);
        added.expect("it is an offset");
    }
    consumer.assign(&assignment).expect("they can be read");
    let (mut count, mut bytes) = (0, 0);
    while count < left {
        if let Some(message) = consumer.poll(patience) {
            let message = message.expect("it can be read");
            bytes += rdkafka::Message::payload(&message).map_or(0, <[u8]>::len);
            count += 1;
        }
    }
    println!("{count} letters, {bytes} bytes");
}
