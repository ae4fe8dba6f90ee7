//! The processes that are killed.

use std::{
    env, fs,
    path::PathBuf,
    process::{Child, Command},
    sync::Mutex,
    time::{Duration, Instant},
};

use reliable_consumer_testing::eventually;

use crate::{
    Outage, Run, Store,
    misfortune::{self, Random, assert_ends, clean_up, example, heeds_sigterm, now, signal},
    tell,
};

pub(crate) const CONCURRENCY: usize = 16;
pub(crate) const MEMBERS: usize = 3;
const LONGEST_EXIT: Duration = Duration::from_secs(30);

/// One life of a process.
pub(crate) struct Life {
    process: Child,
    /// Its name in the group.
    member: String,
    /// Where its effects are, if they are in no database.
    pub(crate) effects: PathBuf,
    /// Unix milliseconds.
    pub(crate) killed: Option<u64>,
}

pub(crate) struct Processes {
    pub(crate) lives: Vec<Life>,
    name: String,
    /// Unix milliseconds.
    began: u64,
    group: String,
    arguments: Vec<String>,
    folder: PathBuf,
    /// Those that are alive, as indices into `lives`.
    alive: Vec<usize>,
}

impl Processes {
    pub(crate) fn new(run: &Run<'_>, began: u64) -> Self {
        let folder = env::temp_dir().join(&run.group);
        fs::create_dir(&folder).unwrap();
        let store = match run.store {
            Store::Inbox => "inbox",
            Store::Redis => "redis",
        };
        let concurrency = CONCURRENCY.to_string();
        let arguments = [
            ["--brokers", run.cluster.brokers()],
            ["--group", &run.group],
            ["--topic", &run.topic],
            ["--dlq", &run.dlq],
            ["--concurrency", &concurrency],
            ["--store", store],
            ["--url", &run.url],
            ["--set", "session.timeout.ms=6000"],
            ["--set", "heartbeat.interval.ms=500"],
        ];
        let mut processes = Self {
            lives: Vec::new(),
            name: run.name.clone(),
            began,
            group: run.group.clone(),
            arguments: arguments.concat().into_iter().map(String::from).collect(),
            folder,
            alive: Vec::new(),
        };
        for _ in 0..MEMBERS {
            processes.start(processes.stranger());
        }
        processes
    }

    /// Most of those who die are back at once, under their name. The partitions of the others go to the rest, when the
    /// group has noticed.
    pub(crate) fn suffer_until(
        &mut self,
        end: Instant,
        mut random: Random,
        outages: &Mutex<Vec<Outage>>,
    ) {
        while Instant::now() < end {
            // More often while there is something to be interrupted.
            let last = outages.lock().unwrap().last().copied();
            match last.is_some_and(|outage| outage.covers(now())) {
                true => random.pause(1_500..4_000),
                false => random.pause(300..1_300),
            }
            self.assert_alive();
            let number = self.alive.remove(random.below(MEMBERS as u64) as usize);
            let life = &mut self.lives[number];
            life.process.kill().unwrap();
            life.process.wait().unwrap();
            life.killed = Some(now());
            let comes_back = random.below(5) > 0;
            tell(self.began, &format!("{} is killed", life.member));
            let member = match comes_back {
                true => life.member.clone(),
                false => self.stranger(),
            };
            self.start(member);
        }
    }

    fn stranger(&self) -> String {
        format!("{}-{}", self.group, self.lives.len())
    }

    fn start(&mut self, member: String) {
        let number = self.lives.len();
        let effects = self.folder.join(format!("{number}.effects"));
        let log = self.folder.join(format!("{number}.log"));
        let mut command = Command::new(example("effects"));
        command
            .args(&self.arguments)
            .args(["--set", &format!("group.instance.id={member}"), "--effects"])
            .arg(&effects);
        let process = misfortune::start(&mut command, &log, &effects);
        self.alive.push(number);
        self.lives.push(Life {
            process,
            member,
            effects,
            killed: None,
        });
    }

    /// In order.
    pub(crate) fn end(&mut self) {
        for number in self.alive.drain(..) {
            let process = &mut self.lives[number].process;
            eventually("a new process to heed signals", LONGEST_EXIT, || {
                heeds_sigterm(process)
            });
            signal(process, "-TERM");
        }
        let start = Instant::now();
        for life in self.lives.iter_mut().filter(|life| life.killed.is_none()) {
            let who = format!("{}: {}", self.name, life.member);
            assert_ends(&mut life.process, start, LONGEST_EXIT, &who);
        }
    }

    pub(crate) fn kills(&self) -> usize {
        self.lives.len() - MEMBERS
    }

    pub(crate) fn assert_alive(&mut self) {
        for &number in &self.alive {
            let life = &mut self.lives[number];
            if let Some(status) = life.process.try_wait().unwrap() {
                panic!("{}: {} ended with {status}", self.name, life.member);
            }
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        let processes = self.lives.iter_mut().map(|life| &mut life.process);
        clean_up(processes, &self.folder, &self.name);
    }
}
