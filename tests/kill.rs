//! Processes that are killed, stopped and told to end at bad moments: three `ledger`s share a topic under traffic, and
//! what they wrote down is held against the topic afterwards.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::{
    collections::HashMap,
    env,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use reliable_consumer_testing::{Cluster, Record, StoredRecord, cluster, eventually, unique};

const CHAOS: Duration = Duration::from_secs(40);
const PROCESSES: usize = 3;
const FAIL_PERCENT: u32 = 5;
/// The group waits for a member that died until its session has ended, and nobody's commit is answered before that.
const SESSION: Duration = Duration::from_secs(6);
/// How long before its death a killed process may have finished what comes again: what it had not committed yet. A
/// second passes between commits; the rest is for a process that was frozen meanwhile, or a slow machine.
const UNCOMMITTED_MS: u64 = 1_000 + SESSION.as_millis() as u64 + 2 * 2_500;

#[test]
fn by_key_nothing_is_lost_or_out_of_order_and_only_what_was_killed_comes_again() {
    survive("key");
}

#[test]
fn unordered_nothing_is_lost_and_only_what_was_killed_comes_again() {
    survive("unordered");
}

fn survive(ordering: &str) {
    let Some(cluster) = cluster() else { return };
    let topic = cluster.create_topic("kill", 6, &[]);
    let dlq = cluster.create_topic("kill.dlq", 3, &[]);
    let (_, seed) = now_and_seed();
    println!("{ordering}: chaos by seed {seed}");
    let mut random = Random(seed);
    let mut world = World::new(&cluster, ordering, &topic, &dlq);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let traffic = scope.spawn(|| produce_until(&over, &cluster, &topic));
        let _stop_traffic = SetOnDrop(&over);
        let end = Instant::now() + CHAOS;
        while Instant::now() < end {
            thread::sleep(Duration::from_millis(200 + random.below(1_500)));
            let victim = random.below(PROCESSES as u64) as usize;
            match random.below(3) {
                // With one death on top of another the group would wait, without commits, for as long as there are more.
                0 if world.last_kill.elapsed() > SESSION * 3 / 2 => world.kill(victim),
                0 | 1 => world.terminate(victim),
                // Shorter than a session: nothing is lost by it.
                _ => world.freeze(victim, Duration::from_millis(300 + random.below(2_200))),
            }
        }
        over.store(true, Ordering::Relaxed);
        traffic.join().expect("the brokers take the traffic");
    });
    let ends = cluster.end_offsets(&topic);
    eventually(
        "everything to be committed",
        Duration::from_secs(60),
        || {
            world.assert_alive();
            let committed = cluster.committed(&world.group, &topic);
            let committed = committed
                .iter()
                .map(|committed| committed.offset.unwrap_or(-1));
            committed.collect::<Vec<_>>() == ends
        },
    );
    for victim in 0..PROCESSES {
        world.terminate_for_good(victim);
    }
    world.check(
        &cluster.read_all(&topic),
        &cluster.read_all(&dlq),
        ordering == "key",
    );
}

/// Keys repeat often enough that most have records waiting behind one at work.
fn produce_until(over: &AtomicBool, cluster: &Cluster, topic: &str) {
    let mut next = 0;
    while !over.load(Ordering::Relaxed) {
        let records =
            (next..next + 60).map(|n| Record::value(n.to_string()).key(format!("k{}", n % 97)));
        cluster.produce(topic, records);
        next += 60;
        thread::sleep(Duration::from_millis(100));
    }
}

struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// One life of a process.
struct Life {
    process: Child,
    ledger: PathBuf,
    /// Unix milliseconds.
    killed: Option<u64>,
}

struct World {
    program: PathBuf,
    arguments: Vec<String>,
    group: String,
    folder: PathBuf,
    /// Those at work, by victim, as indices into `lives`.
    current: Vec<usize>,
    lives: Vec<Life>,
    last_kill: Instant,
}

impl World {
    fn new(cluster: &Cluster, ordering: &str, topic: &str, dlq: &str) -> Self {
        let group = unique("kill");
        let folder = env::temp_dir().join(&group);
        fs::create_dir(&folder).unwrap();
        let fail = FAIL_PERCENT.to_string();
        let arguments = [
            "--brokers",
            cluster.brokers(),
            "--group",
            &group,
            "--topic",
            topic,
            "--dlq",
            dlq,
            "--ordering",
            ordering,
            "--concurrency",
            "32",
            "--work-ms",
            "0..20",
            "--fail-percent",
            &fail,
            "--set",
            "session.timeout.ms=6000",
            "--set",
            "heartbeat.interval.ms=500",
        ];
        let mut world = Self {
            program: ledger_program(),
            arguments: arguments.map(String::from).to_vec(),
            group,
            folder,
            current: Vec::new(),
            lives: Vec::new(),
            last_kill: Instant::now(),
        };
        for _ in 0..PROCESSES {
            let life = world.start();
            world.current.push(life);
        }
        world
    }

    fn start(&mut self) -> usize {
        let number = self.lives.len();
        let ledger = self.folder.join(format!("{number}.ledger"));
        let log = File::create(self.folder.join(format!("{number}.log"))).unwrap();
        let process = Command::new(&self.program)
            .args(&self.arguments)
            .arg("--ledger")
            .arg(&ledger)
            .env("RUST_LOG", "reliable_consumer=debug,info")
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        self.lives.push(Life {
            process,
            ledger,
            killed: None,
        });
        number
    }

    fn life(&mut self, victim: usize) -> &mut Life {
        &mut self.lives[self.current[victim]]
    }

    fn kill(&mut self, victim: usize) {
        let life = self.life(victim);
        life.process.kill().unwrap();
        life.process.wait().unwrap();
        life.killed = Some(now_and_seed().0);
        self.last_kill = Instant::now();
        self.current[victim] = self.start();
    }

    fn terminate(&mut self, victim: usize) {
        self.terminate_for_good(victim);
        self.current[victim] = self.start();
    }

    fn terminate_for_good(&mut self, victim: usize) {
        let number = self.current[victim];
        let process = &mut self.life(victim).process;
        signal(process, "-TERM");
        let mut status = None;
        eventually("an orderly end", Duration::from_secs(30), || {
            status = process.try_wait().unwrap();
            status.is_some()
        });
        let status = status.unwrap();
        assert!(
            status.success(),
            "ledger {number} ended with {status}:\n{}",
            self.log(number)
        );
    }

    fn freeze(&mut self, victim: usize, time: Duration) {
        let process = &self.life(victim).process;
        signal(process, "-STOP");
        thread::sleep(time);
        signal(process, "-CONT");
    }

    fn assert_alive(&mut self) {
        for victim in 0..PROCESSES {
            let number = self.current[victim];
            if let Some(status) = self.life(victim).process.try_wait().unwrap() {
                panic!(
                    "ledger {number} ended by itself with {status}:\n{}",
                    self.log(number)
                );
            }
        }
    }

    fn log(&self, number: usize) -> String {
        fs::read_to_string(self.folder.join(format!("{number}.log"))).unwrap()
    }

    fn check(&self, topic: &[StoredRecord], dlq: &[StoredRecord], in_order: bool) {
        // By place: who wrote it down, and when.
        let mut handled = HashMap::<(i32, i64), Vec<(usize, u64)>>::new();
        for (number, life) in self.lives.iter().enumerate() {
            for (place, at) in lines(&life.ledger) {
                handled.entry(place).or_default().push((number, at));
            }
        }
        let mut set_aside = HashMap::<(i32, i64), Vec<u64>>::new();
        for letter in dlq {
            let number = |name: &str| -> i64 {
                let header = letter
                    .headers
                    .iter()
                    .find(|(known, _)| known == name.as_bytes());
                let value = header
                    .and_then(|(_, value)| value.clone())
                    .expect("the header is there");
                String::from_utf8(value).unwrap().parse().unwrap()
            };
            let place = (number("originalPartition") as i32, number("originalOffset"));
            set_aside
                .entry(place)
                .or_default()
                .push(number("failedAt") as u64);
        }

        let (mut repeats, mut oldest) = (0, 0);
        let mut last = HashMap::new();
        let mut firsts = Vec::new();
        for record in topic {
            let place = (record.partition, record.offset);
            let value = record.value.as_deref().unwrap();
            if crc32fast::hash(value) % 100 < FAIL_PERCENT {
                assert!(
                    !handled.contains_key(&place),
                    "{place:?} fails at every attempt"
                );
                let mut letters = set_aside
                    .remove(&place)
                    .unwrap_or_else(|| panic!("{place:?} is lost"));
                letters.sort_unstable();
                letters.pop();
                for at in letters {
                    let killed = self.lives.iter().filter_map(|life| life.killed);
                    let mut soon_killed =
                        killed.filter(|killed| (at..at + UNCOMMITTED_MS).contains(killed));
                    assert!(
                        soon_killed.next().is_some(),
                        "{place:?} was dead-lettered twice, without need"
                    );
                }
                continue;
            }
            let mut calls = handled
                .remove(&place)
                .unwrap_or_else(|| panic!("{place:?} is lost"));
            calls.sort_unstable_by_key(|(_, at)| *at);
            firsts.push((calls[0].1, place, record.key.clone()));
            calls.pop();
            for (number, at) in calls {
                let killed = self.lives[number].killed.unwrap_or_else(|| {
                    panic!("{place:?} was finished by ledger {number}, which ended in order, and came again")
                });
                let age = killed.saturating_sub(at);
                assert!(
                    age < UNCOMMITTED_MS,
                    "{place:?} was finished {age} ms before ledger {number} was killed"
                );
                (repeats, oldest) = (repeats + 1, oldest.max(age));
            }
        }
        assert!(
            handled.is_empty() && set_aside.is_empty(),
            "nothing comes from nowhere"
        );
        if in_order {
            firsts.sort_unstable();
            for (_, (_, offset), key) in firsts {
                let before = last.insert(key, offset);
                assert!(
                    before.is_none_or(|before| before < offset),
                    "{offset} after {before:?}"
                );
            }
        }
        let kills = self
            .lives
            .iter()
            .filter(|life| life.killed.is_some())
            .count();
        println!(
            "{} records in {} lives, {kills} of them killed: {repeats} repeats, finished up to {oldest} ms before",
            topic.len(),
            self.lives.len()
        );
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for life in &mut self.lives {
            // Most have ended; the others end with a failing test.
            let _ = life.process.kill();
            let _ = life.process.wait();
        }
        if thread::panicking() {
            println!("ledgers and logs are in {}", self.folder.display());
        } else {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

/// Place and Unix milliseconds of each line. A process that was killed before it wrote any has left no file.
fn lines(ledger: &Path) -> Vec<((i32, i64), u64)> {
    let text = fs::read_to_string(ledger).unwrap_or_default();
    let fields = |line: &str| {
        let fields: Vec<_> = line.split('\t').map(String::from).collect();
        let place = (fields[0].parse().unwrap(), fields[1].parse().unwrap());
        (place, fields[4].parse().unwrap())
    };
    text.lines().map(fields).collect()
}

fn signal(process: &Child, signal: &str) {
    let sent = Command::new("kill")
        .args([signal, &process.id().to_string()])
        .status();
    assert!(sent.unwrap().success(), "kill {signal}");
}

/// `cargo test` builds examples next to its tests.
fn ledger_program() -> PathBuf {
    let test = env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("examples/ledger");
    assert!(
        program.exists(),
        "build it first: cargo build --example ledger"
    );
    program
}

/// Unix milliseconds, and a seed that `SEED` may set.
fn now_and_seed() -> (u64, u64) {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_millis() as u64;
    let seed = env::var("SEED").ok().and_then(|seed| seed.parse().ok());
    (now, seed.unwrap_or(now))
}

/// Xorshift: which victim, which misfortune.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}
