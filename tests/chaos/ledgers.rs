//! The processes, and what is done to them.

use std::{
    env, fs,
    path::PathBuf,
    process::{Child, Command},
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use reliable_consumer_testing::{eventually, unique};

use crate::{
    Chaos, SESSION, Trouble,
    misfortune::{
        self, Random, assert_ends, clean_up, example, heeds_sigterm, now, signal, status,
    },
};

pub(crate) const FAIL_PERCENT: u32 = 5;
const LEAST: usize = 2;
const MOST: usize = 5;
/// A shutdown awaits its last commit for 25 s while brokers are away, and then leaves the group.
const LONGEST_EXIT: Duration = Duration::from_secs(40);
/// While they are up a commit waits for one dead member at most.
const CALM_EXIT: Duration = Duration::from_secs(10);

/// One life of a process. Times are Unix milliseconds.
pub(crate) struct Life {
    process: Child,
    pub(crate) ledger: PathBuf,
    pub(crate) log: PathBuf,
    pub(crate) killed: Option<u64>,
    /// When it was told to end.
    pub(crate) terminated: Option<u64>,
    pub(crate) frozen: Vec<(u64, u64)>,
    /// Bytes.
    pub(crate) peak_memory: u64,
}

pub(crate) struct Ledgers {
    /// What to tell of this run, and how to have it again.
    pub(crate) name: String,
    pub(crate) group: String,
    /// Unix milliseconds.
    pub(crate) began: u64,
    pub(crate) lives: Vec<Life>,
    pub(crate) longest_exit: Duration,
    program: PathBuf,
    arguments: Vec<String>,
    folder: PathBuf,
    /// Those that are alive, as indices into `lives`.
    alive: Vec<usize>,
}

impl Ledgers {
    pub(crate) fn new(chaos: &Chaos<'_>, name: String) -> Self {
        let group = unique("chaos");
        let folder = env::temp_dir().join(&group);
        fs::create_dir(&folder).unwrap();
        let (fail, session) = (
            FAIL_PERCENT.to_string(),
            format!("session.timeout.ms={}", SESSION.as_millis()),
        );
        let mut arguments = vec!["--brokers", chaos.cluster.brokers(), "--group", &group];
        arguments.extend(["--topic", &chaos.topic, "--dlq", &chaos.dlq]);
        arguments.extend(["--ordering", chaos.ordering, "--fail-percent", &fail]);
        arguments.extend(["--concurrency", "32", "--work-ms", "0..20"]);
        match chaos.protocol {
            "classic" => {
                arguments.extend(["--set", &session, "--set", "heartbeat.interval.ms=500"]);
            }
            // Here the brokers say how long sessions are.
            "consumer" => arguments.extend(["--set", "group.protocol=consumer"]),
            other => panic!("protocol `{other}` is neither classic nor consumer"),
        }
        let arguments = arguments.into_iter().map(String::from).collect();
        let mut ledgers = Self {
            name,
            group,
            began: now(),
            lives: Vec::new(),
            longest_exit: Duration::ZERO,
            program: example("ledger"),
            arguments,
            folder,
            alive: Vec::new(),
        };
        (0..3).for_each(|_| ledgers.join());
        ledgers
    }

    pub(crate) fn suffer_until(&mut self, end: Instant, mut random: Random, trouble: &Trouble) {
        while Instant::now() < end {
            random.pause(200..1_700);
            self.assert_alive();
            if trouble.faults_due.swap(false, Ordering::Relaxed) {
                self.suffer_all_at_once(&mut random, trouble);
                continue;
            }
            let victim = random.below(self.alive.len() as u64) as usize;
            // An orderly end needs somebody to commit to.
            let may_end = !trouble.is_full_now();
            match random.below(10) {
                0 | 1 if trouble.may_begin() => {
                    self.kill(victim);
                    trouble.death();
                    self.join();
                }
                2 if trouble.may_begin() => {
                    // Long enough to be taken for dead.
                    let longer = Duration::from_millis(1_000 + random.below(3_000));
                    self.freeze(victim, SESSION + longer);
                    trouble.death();
                }
                3 | 4 if may_end => {
                    self.leave(victim, trouble);
                    self.join();
                }
                5 if may_end && self.alive.len() > LEAST => self.leave(victim, trouble),
                6 if self.alive.len() < MOST => self.join(),
                // Shorter than a session: nothing is lost by it.
                7..=9 => self.freeze(victim, Duration::from_millis(300 + random.below(2_200))),
                _ => {}
            }
        }
    }

    /// Within ten seconds of a broker's death: a member dies, another joins, and one is frozen until it is taken for dead.
    fn suffer_all_at_once(&mut self, random: &mut Random, trouble: &Trouble) {
        if self.alive.len() < 3 {
            self.join();
        }
        let victim = random.below(self.alive.len() as u64) as usize;
        self.kill(victim);
        random.pause(200..2_000);
        self.join();
        random.pause(200..2_000);
        let victim = random.below(self.alive.len() as u64) as usize;
        let longer = Duration::from_millis(1_000 + random.below(2_000));
        self.freeze(victim, SESSION + longer);
        trouble.death();
    }

    pub(crate) fn count(&self) -> usize {
        self.alive.len()
    }

    fn join(&mut self) {
        let number = self.lives.len();
        let ledger = self.folder.join(format!("{number}.ledger"));
        let log = self.folder.join(format!("{number}.log"));
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).arg("--ledger").arg(&ledger);
        let process = misfortune::start(&mut command, &log, &ledger);
        self.lives.push(Life {
            process,
            ledger,
            log,
            killed: None,
            terminated: None,
            frozen: Vec::new(),
            peak_memory: 0,
        });
        self.alive.push(number);
        self.tell(number, "joins");
    }

    fn kill(&mut self, victim: usize) {
        self.measure();
        let number = self.alive.remove(victim);
        self.tell(number, "is killed");
        let life = &mut self.lives[number];
        life.process.kill().unwrap();
        life.process.wait().unwrap();
        life.killed = Some(now());
    }

    /// An orderly end.
    pub(crate) fn leave(&mut self, victim: usize, trouble: &Trouble) {
        self.measure();
        let number = self.alive.remove(victim);
        self.tell(number, "is told to end");
        let life = &mut self.lives[number];
        eventually(
            "a new process to heed signals",
            Duration::from_secs(30),
            || heeds_sigterm(&life.process),
        );
        let (began, start) = (now(), Instant::now());
        life.terminated = Some(began);
        signal(&life.process, "-TERM");
        let who = format!("{}: ledger {number}", self.name);
        assert_ends(&mut life.process, start, LONGEST_EXIT, &who);
        if trouble.is_calm_since(began) {
            let took = start.elapsed();
            assert!(
                took < CALM_EXIT,
                "{}: ledger {number} took {took:?} to end, with all brokers up",
                self.name
            );
            self.longest_exit = self.longest_exit.max(took);
        }
    }

    fn freeze(&mut self, victim: usize, time: Duration) {
        let number = self.alive[victim];
        self.tell(number, &format!("is frozen for {} ms", time.as_millis()));
        let life = &mut self.lives[number];
        let from = now();
        signal(&life.process, "-STOP");
        thread::sleep(time);
        signal(&life.process, "-CONT");
        life.frozen.push((from, now()));
    }

    pub(crate) fn assert_alive(&mut self) {
        for &number in &self.alive {
            if let Some(status) = self.lives[number].process.try_wait().unwrap() {
                panic!(
                    "{}: ledger {number} ended by itself with {status}",
                    self.name
                );
            }
        }
    }

    fn tell(&self, number: usize, what: &str) {
        println!("{:>7} ms  ledger {number} {what}", now() - self.began);
    }

    fn measure(&mut self) {
        for &number in &self.alive {
            let life = &mut self.lives[number];
            let peak = status(&life.process, "VmHWM:");
            let kib = peak.and_then(|peak| peak.strip_suffix(" kB")?.parse().ok());
            life.peak_memory = life.peak_memory.max(kib.unwrap_or(0) * 1024);
        }
    }
}

impl Drop for Ledgers {
    fn drop(&mut self) {
        let processes = self.lives.iter_mut().map(|life| &mut life.process);
        clean_up(processes, &self.folder, &self.name);
    }
}
