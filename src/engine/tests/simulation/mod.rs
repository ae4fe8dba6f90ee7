//! Whole lives of a group, in milliseconds: several processes, each an engine with a model of the shell around it, and
//! the brokers that they talk to. Everything that can go wrong does: processes die, hang, are cut off and come back;
//! commits are refused, answered late, applied and not answered; partitions move, are lost, and are made anew.
//! In some worlds logs are cut off while their records are handled and committed, see [`Setup::add_elections`].
//! In some worlds records kill their process, users pause, or a commit comes before its handlers, see [`Setup::add`]; in
//! some what handlers depend on is down for a while, or records are not due yet, see [`Setup::add_from_outside`].
//!
//! One seed decides the setup, the clock and every order, so that what fails once fails again:
//!
//! ```sh
//! cargo test --lib simulation                       # some hundred seeds
//! SEEDS=10000 cargo test --release --lib simulation # so many of them
//! SEED=17 cargo test --lib simulation               # this one
//! ```

mod kafka;
mod member;
mod random;
mod seeds;

use std::{
    env,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicU64, Ordering as Atomically},
    thread,
    time::{Duration, Instant},
};

use self::{
    kafka::{Counts, Kafka},
    member::Member,
    random::Random,
};
use crate::{
    backoff::Retry,
    engine::{Config, Guarantee, Ordering},
};

/// Bytes of no record reach this, but for those of [`Setup::large`].
const LARGEST: usize = 1000;

/// A record as the engine carries it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Record {
    partition: usize,
    epoch: u32,
    cuts: usize,
    offset: i64,
    key: Option<u64>,
}

/// What one world is like. Chances are out of a thousand.
#[derive(Debug, Clone)]
struct Setup {
    engine: Config,
    partitions: usize,
    members: usize,
    eager: bool,
    /// Characters of metadata that the brokers take.
    metadata_limit: usize,
    drain_timeout: Duration,
    session: Duration,
    handler_timeout: Option<Duration>,
    /// The longest that a handler takes which does not hang, in milliseconds.
    slowest: u64,
    keys: u64,
    /// Else records that failed for good are passed over.
    dead_letters: bool,
    /// The client is asked for its positions, so that offsets without records are passed.
    positions: bool,
    gaps: u64,
    keyless: u64,
    trouble: u64,
    /// Records that kill the process, at most.
    killers: u32,
    /// Members are static: a process that is started again takes the place of the one before.
    static_members: bool,
    /// The user pauses partitions and resumes them.
    pauses: bool,
    /// Processes are forbidden to commit.
    forbids: bool,
    /// Records are deleted, read or not.
    deletes: bool,
    /// Logs are cut off, by leaders that had missed some of them.
    cuts: bool,
    /// Records have anything from one byte to this: more than the whole budget, where that is small.
    large: Option<usize>,
    /// What handlers depend on is down at times.
    outages: bool,
    /// By partition: after how long its records are due, where that is not at once.
    delays: Vec<Option<Duration>>,
    longest_probe_pause: Duration,
    max_attempts: u32,
    /// For how long a record may go on failing.
    retries_for: Option<Duration>,
    /// Handlers that are ready at once.
    ready: u64,
    hangs: u64,
    chaos: u64,
    /// Of a thousand records, in place of how many an error comes, or a batch that cannot be decoded.
    fetch_errors: u64,
}

impl Setup {
    fn new(random: &mut Random) -> Self {
        let retry = Retry::exponential(random.ms(0..200), Duration::from_millis(400));
        let max_attempts = random.within(2..5) as u32;
        let retry = retry.max_attempts(max_attempts);
        let engine = Config {
            guarantee: Guarantee::AtLeastOnce,
            crash_limit: None,
            breaker: Some(crate::OutageBreaker::new()),
            ordering: random.pick(&[Ordering::Unordered, Ordering::ByKey, Ordering::ByPartition]),
            concurrency: random.pick(&[1, 2, 5, 20, 100]),
            window: random.pick(&[1, 7, 16, 64, 300, 2048]),
            max_bytes: random.pick(&[1, 3_000, 20_000, 1 << 30]),
            max_records: 1 << 30,
            retry: retry.into(),
            commit_interval: random.ms(10..500),
            seed: random.next(),
        };
        Self {
            engine,
            partitions: random.within(1..6) as usize,
            members: random.within(1..5) as usize,
            eager: random.chance(400),
            metadata_limit: random.pick(&[0, 25, 40, 80, 4096, 4096, 4096]),
            drain_timeout: random.ms(200..3_000),
            session: random.ms(300..2_000),
            handler_timeout: random.chance(300).then(|| random.ms(50..1_000)),
            slowest: random.pick(&[2, 30, 300]),
            keys: random.within(1..12),
            dead_letters: random.chance(800),
            positions: random.chance(500),
            gaps: random.pick(&[0, 50, 400]),
            keyless: random.pick(&[0, 100, 1000]),
            trouble: random.pick(&[0, 50, 300]),
            killers: 0,
            static_members: false,
            pauses: false,
            forbids: false,
            deletes: false,
            cuts: false,
            large: None,
            outages: false,
            delays: Vec::new(),
            longest_probe_pause: Duration::ZERO,
            max_attempts,
            retries_for: None,
            ready: random.pick(&[0, 500, 950]),
            hangs: random.pick(&[0, 0, 5, 20]),
            chaos: random.pick(&[0, 10, 40, 100]),
            fetch_errors: 0,
        }
    }

    fn add(&mut self, more: &mut Random) {
        if more.chance(250) {
            self.engine.guarantee = Guarantee::AtMostOnce;
        }
        if more.chance(400) {
            self.engine.crash_limit = Some(more.pick(&[1, 2, 3, 3, 10]));
        }
        // Without room for marks nobody could ever find them.
        let found = self.engine.crash_limit.is_some() && self.metadata_limit >= 4096;
        if (found || self.at_most_once()) && more.chance(600) {
            self.killers = more.within(1..4) as u32;
        }
        self.static_members = more.chance(250);
        self.pauses = more.chance(250);
        self.forbids = more.chance(250);
        self.deletes = more.chance(250);
    }

    fn add_from_outside(&mut self, outside: &mut Random) {
        if outside.chance(500) {
            self.outages = true;
            let (first, longest) = (outside.ms(1..100), outside.ms(100..1_000));
            let breaker = crate::OutageBreaker::new()
                .window(outside.ms(100..5_000))
                .min_attempts(outside.within(1..8) as u32)
                .ratio(outside.pick(&[0.1, 0.5, 1.0]))
                .probe_pauses(first, longest)
                .record_waits(outside.ms(1..100), outside.ms(100..1_000));
            self.engine.breaker = outside.chance(900).then_some(breaker);
            self.longest_probe_pause = longest;
            if outside.chance(500) {
                let limit = outside.ms(50..2_000);
                let retry = Retry::clone(&self.engine.retry);
                self.engine.retry = retry.max_elapsed(limit).into();
                self.retries_for = Some(limit);
            }
        }
        // A delay would begin behind the commit there.
        if outside.chance(400) && !self.at_most_once() {
            let delay = |_| outside.chance(600).then(|| outside.ms(1..3_000));
            self.delays = (0..self.partitions).map(delay).collect();
        }
    }

    fn add_elections(&mut self, elections: &mut Random) {
        self.cuts = elections.chance(400);
    }

    fn add_sizes(&mut self, sizes: &mut Random) {
        let largest = self.engine.max_bytes.saturating_mul(3).min(3 << 20);
        self.large = sizes.chance(500).then_some(largest.max(LARGEST));
    }

    /// The size of a record at this offset, where that is not told by the dice of all worlds.
    fn size(&self, offset: i64) -> Option<usize> {
        let largest = self.large? as u64;
        let mut dice = Random::new(self.engine.seed ^ offset as u64);
        // Small ones in rows, and then a large one, or several.
        let size = match dice.below(8) + (offset / 16 % 3) as usize {
            0..7 => dice.within(1..100),
            7 => dice.within(1..largest),
            _ => largest - dice.within(0..largest / 4),
        };
        Some(size as usize)
    }

    fn largest(&self) -> usize {
        self.large.unwrap_or(LARGEST)
    }

    pub(super) fn at_most_once(&self) -> bool {
        self.engine.guarantee == Guarantee::AtMostOnce
    }

    /// Where records do not come again: from when on a drain sets them aside.
    fn cut(&self, began: Instant, until: Instant) -> Option<Instant> {
        (self.at_most_once() && self.dead_letters).then(|| began + (until - began) / 2)
    }

    /// When a handler that starts now ends, and whether it is not cut off by its timeout.
    fn handler_ends(&self, now: Instant, calm: bool, random: &mut Random) -> (Instant, bool) {
        let takes = if !calm && random.chance(self.hangs) {
            Duration::from_secs(3_600)
        } else {
            random.ms(0..self.slowest)
        };
        match self.handler_timeout.filter(|limit| *limit < takes && !calm) {
            Some(limit) => (now + limit, false),
            None => (now + takes, true),
        }
    }
}

/// What is in a world beside what is in all of them: it has dice of its own, so that the rest stays as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trouble {
    None,
    BySeed,
}

struct World {
    setup: Setup,
    random: Random,
    /// For what is not in every world.
    more: Random,
    /// For what comes from outside of Kafka and the group.
    outside: Random,
    /// For leaders that have missed something.
    elections: Random,
    now: Instant,
    kafka: Kafka,
    members: Vec<Member>,
    processes: u32,
    /// Processes whose sessions end then.
    sessions: Vec<(u32, Instant)>,
    starts: Vec<(Instant, Option<u32>)>,
    instances: u32,
}

impl World {
    fn new(seed: u64, trouble: Trouble) -> Self {
        let mut random = Random::new(seed);
        let mut more = Random::new(!seed);
        let mut outside = Random::new(seed.rotate_left(32));
        let mut elections = Random::new(!seed.rotate_left(32));
        let mut setup = Setup::new(&mut random);
        // Some stay as plain as they were.
        if trouble == Trouble::BySeed && more.chance(800) {
            setup.add(&mut more);
        }
        if trouble == Trouble::BySeed {
            setup.add_from_outside(&mut outside);
            setup.add_elections(&mut elections);
            setup.add_sizes(&mut Random::new(seed ^ 0x5125));
            setup.fetch_errors = Random::new(!seed.rotate_left(16)).pick(&[0, 0, 2, 20, 200]);
        }
        let now = Instant::now();
        let mut world = Self {
            kafka: Kafka::new(&setup, now),
            setup,
            random,
            more,
            outside,
            elections,
            now,
            members: Vec::new(),
            processes: 0,
            sessions: Vec::new(),
            starts: Vec::new(),
            instances: 0,
        };
        for partition in 0..world.setup.partitions {
            let count = world.random.within(1..60);
            (0..count).for_each(|_| world.produce(partition));
        }
        (0..world.setup.members).for_each(|_| world.start());
        world
    }

    fn produce(&mut self, partition: usize) {
        let Self {
            setup,
            random,
            more,
            outside,
            ..
        } = self;
        self.kafka.produce(partition, setup, random, more, outside);
    }

    fn start(&mut self) {
        self.instances += 1;
        self.start_as(self.setup.static_members.then_some(self.instances));
    }

    fn start_as(&mut self, instance: Option<u32>) {
        self.processes += 1;
        let member = Member::new(self.processes, instance, &self.setup, self.now);
        self.members.push(member);
        self.kafka.join(self.processes, instance, &mut self.random);
    }

    /// Somebody sees to it that there is a process again.
    fn start_again(&mut self, instance: Option<u32>) {
        let at = self.now + self.random.ms(0..2_000);
        self.starts.push((at, instance));
    }

    /// A little time passes, and everybody does what there is to do, in some order.
    fn step(&mut self, time: Duration) {
        self.now += time;
        let Self {
            setup,
            random,
            now,
            kafka,
            members,
            ..
        } = self;
        kafka.now = *now;
        kafka.coordinate();
        kafka.serve(*now, random);
        for at in (0..kafka.answers.len()).rev() {
            if kafka.answers[at].arrives > *now {
                continue;
            }
            let answer = kafka.answers.remove(at);
            if let Some(member) = members
                .iter_mut()
                .find(|member| member.process == answer.process)
            {
                member.answered(answer);
            }
        }
        for _ in 0..kafka.mail.len() {
            let Some((process, event)) = kafka.mail.pop_front() else {
                break;
            };
            kafka.tell(|| format!("process {process} is told {event:?}"));
            match members.iter_mut().find(|member| member.process == process) {
                Some(member) if *now < member.cut_off_until || *now < member.frozen_until => {
                    kafka.mail.push_back((process, event));
                }
                Some(member) => member.deliver(event),
                None => {}
            }
        }
        let first = random.below(members.len().max(1));
        for at in 0..members.len() {
            let count = members.len();
            let member = &mut members[(first + at) % count];
            if *now < member.frozen_until {
                continue;
            }
            member.execute(kafka, setup, *now, random);
            if !member.killed && (kafka.calm || random.chance(800)) {
                member.pump(kafka, setup, *now, random);
            }
        }
        while let Some(at) = self.members.iter().position(|member| member.killed) {
            self.dies(at);
        }
        let Self { now, members, .. } = self;
        let gone: Vec<_> = members.extract_if(.., |member| member.gone).collect();
        // Static members do not say goodbye.
        let sessions = gone.iter().filter(|member| member.instance.is_some());
        let ends = *now + self.setup.session;
        self.sessions
            .extend(sessions.map(|member| (member.process, ends)));
        for member in gone.iter().filter(|member| member.failed) {
            self.start_again(member.instance);
        }
        let Self {
            random, now, kafka, ..
        } = self;
        self.sessions.retain(|(process, ends)| {
            let over = ends <= now && *now >= kafka.down_until;
            if over && kafka.group.contains(process) {
                kafka.counts.lost += 1;
                kafka.remove(*process, random);
            }
            !over
        });
        let due: Vec<_> = self
            .starts
            .extract_if(.., |(at, _)| *at <= self.now)
            .collect();
        for (_, instance) in due {
            self.start_as(instance);
        }
    }

    fn something_happens(&mut self) {
        let count = self.members.len();
        let partition = self.random.below(self.setup.partitions);
        let what = self.random.below(16);
        self.kafka.tell(|| format!("trouble {what}"));
        match what {
            0..4 => (0..self.random.within(1..30)).for_each(|_| self.produce(partition)),
            4 => self.kafka.mark(partition),
            // Nor can a commit name what has killed a process once the brokers know another log.
            //
            // To somebody who has read nothing yet, the first record of a new log looks like that of the old one. And
            // so do all of them to somebody who remembers the old one, but is told that it is gone if the partition is
            // its own.
            5 if self.random.chance(300)
                && !self.kafka.blames(partition)
                && !self
                    .members
                    .iter()
                    .any(|member| member.is_new_to(partition) || member.remembers(partition)) =>
            {
                self.kafka.reset(partition);
                self.produce(partition);
            }
            6 => self.kafka.spoil_metadata(partition, &mut self.random),
            7 => self.kafka.rebalance(&mut self.random),
            8 => self.kafka.down_until = self.now + self.random.ms(10..1_500),
            9 => self.kafka.letters_down_until = self.now + self.random.ms(10..2_000),
            10 if count < 5 => self.start(),
            11 | 12 if count > 0 => {
                let at = self.random.below(count);
                self.kafka.counts.crashes += 1;
                self.dies(at);
            }
            13 if count > 0 => {
                let limit = self.random.pick(&[0, 50, 1_000, 10_000]);
                let at = self.random.below(count);
                if !self.members[at].is_stopping() {
                    self.start_again(self.members[at].instance);
                }
                self.members[at].stop(Duration::from_millis(limit));
            }
            14 if count > 0 => {
                let until = self.now + self.random.ms(10..3_000);
                let at = self.random.below(count);
                self.members[at].frozen_until = until;
                self.session_of(at, until);
            }
            15 if count > 0 => {
                let until = self.now + self.random.ms(10..3_000);
                let at = self.random.below(count);
                self.members[at].cut_off_until = until;
                for request in &mut self.kafka.requests {
                    if request.process == self.members[at].process {
                        request.arrives = until;
                    }
                }
                for answer in &mut self.kafka.answers {
                    if answer.process == self.members[at].process {
                        answer.arrives = until;
                    }
                }
                self.session_of(at, until);
            }
            _ => {}
        }
    }

    fn session_of(&mut self, at: usize, back: Instant) {
        let ends = self.now + self.setup.session;
        if ends < back {
            self.sessions.push((self.members[at].process, ends));
        }
    }

    fn dies(&mut self, at: usize) {
        let mut member = self.members.swap_remove(at);
        member.dies(&mut self.kafka, &mut self.random);
        // What it had sent may be on the network still.
        let random = &mut self.random;
        self.kafka
            .requests
            .retain(|request| request.process != member.process || random.chance(500));
        self.sessions
            .push((member.process, self.now + self.setup.session));
        if !member.is_stopping() || member.failed {
            self.start_again(member.instance);
        }
    }

    /// What is not in every world.
    fn something_else_happens(&mut self) {
        let Self {
            setup,
            more,
            kafka,
            members,
            ..
        } = self;
        let partition = more.below(setup.partitions);
        let what = more.below(4);
        if what == 0 && setup.deletes {
            kafka.delete(partition, more);
        }
        if members.is_empty() {
            return;
        }
        let at = more.below(members.len());
        match what {
            1 if setup.forbids && more.chance(300) => kafka.forbidden.push(members[at].process),
            2 | 3 if setup.pauses => members[at].pause_or_resume(partition, kafka),
            _ => {}
        }
    }

    fn lives(&mut self) {
        for _ in 0..300 {
            let time = match self.random.below(50) {
                0 => self.random.ms(200..2_000),
                _ => self.random.ms(0..20),
            };
            if self.random.chance(self.setup.chaos) {
                self.something_happens();
            }
            if self.more.chance(self.setup.chaos) {
                self.something_else_happens();
            }
            if self.setup.outages && self.outside.chance(self.setup.chaos.max(20)) {
                self.kafka.goes_down(self.outside.ms(1..3_000));
            }
            if self.setup.cuts && self.elections.chance(self.setup.chaos.max(20)) {
                self.has_a_new_leader();
            }
            self.step(time);
        }
    }

    fn has_a_new_leader(&mut self) {
        let partition = self.elections.below(self.setup.partitions);
        if self.elections.chance(300) {
            return self.kafka.elect(partition);
        }
        self.kafka.cut(partition, &mut self.elections);
        let count = self.elections.within(0..30);
        (0..count).for_each(|_| self.produce(partition));
    }

    /// Nothing goes wrong any more: all work comes to its end, and all is committed.
    fn calms_down(&mut self) {
        self.kafka.calm = true;
        self.kafka.dependency_down_until = self.now;
        for member in &mut self.members {
            member.unhang(self.now);
            member.resume();
        }
        self.kafka.forbidden.clear();
        if self.members.is_empty() {
            self.start();
        }
        let mut waits_for = None;
        for _ in 0..4_000 {
            self.step(Duration::from_millis(50));
            waits_for = self
                .kafka
                .unfinished(self.setup.positions)
                .or_else(|| self.members.iter().find_map(Member::leftover));
            let held: usize = self.members.iter().map(Member::holds).sum();
            let settled = self.starts.is_empty()
                && self.sessions.is_empty()
                && self.kafka.mail.is_empty()
                && self.kafka.requests.is_empty()
                && self.members.iter().all(Member::is_settled);
            if waits_for.is_none() && held == self.setup.partitions && settled {
                return;
            }
        }
        panic!(
            "it never calmed down: {}",
            waits_for.unwrap_or("partitions are held by nobody".into())
        );
    }

    /// Everybody leaves in order, and who comes then finds nothing to do.
    fn ends(&mut self) {
        let torn = self.kafka.counts.torn;
        for member in &mut self.members {
            member.stop(Duration::from_secs(60));
        }
        for _ in 0..4_000 {
            if self.members.is_empty() && self.sessions.is_empty() {
                break;
            }
            self.step(Duration::from_millis(20));
        }
        assert!(
            self.members.is_empty(),
            "a shutdown took longer than it may"
        );
        assert_eq!(
            self.kafka.counts.torn, torn,
            "a shutdown in calm times left something"
        );
        let started = self.kafka.counts.started;
        self.start();
        (0..100).for_each(|_| self.step(Duration::from_millis(20)));
        assert_eq!(
            self.kafka.counts.started, started,
            "finished records came again"
        );
        let unfinished = self.kafka.unfinished(self.setup.positions);
        assert_eq!(unfinished, None);
    }
}

fn simulate(seed: u64, trouble: Trouble, told: bool) -> Counts {
    let mut world = World::new(seed, trouble);
    world.kafka.told = told;
    if told {
        println!("{:#?}", world.setup);
    }
    world.lives();
    world.calms_down();
    world.ends();
    world.kafka.counts
}

fn number(name: &str) -> Option<u64> {
    let text = env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is to be a number, not {text:?}")),
    )
}

#[test]
fn whatever_happens_nothing_is_lost_nothing_comes_again_without_a_reason_and_order_is_kept() {
    if let Some(seed) = number("SEED") {
        println!("{:?}", simulate(seed, Trouble::BySeed, true));
        return;
    }
    let seeds = number("SEEDS").unwrap_or(if cfg!(debug_assertions) { 500 } else { 10_000 });
    let (next, failed) = (AtomicU64::new(0), AtomicU64::new(u64::MAX));
    let began = Instant::now();
    let work = || {
        let mut counts = Vec::new();
        loop {
            let seed = next.fetch_add(1, Atomically::Relaxed);
            if seed >= seeds || failed.load(Atomically::Relaxed) != u64::MAX {
                return counts;
            }
            match catch_unwind(AssertUnwindSafe(|| simulate(seed, Trouble::BySeed, false))) {
                Ok(seen) => counts.push(seen),
                Err(_) => {
                    failed.fetch_min(seed, Atomically::Relaxed);
                }
            }
        }
    };
    let counts: Vec<Counts> = thread::scope(|scope| {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .flat_map(|worker| worker.join().expect("it catches panics"))
            .collect()
    });
    let failed = failed.into_inner();
    assert_eq!(
        failed,
        u64::MAX,
        "replay it: SEED={failed} cargo test --lib simulation"
    );
    let total = counts.into_iter().fold(Counts::default(), Counts::and);
    println!("{seeds} seeds in {:.1?}: {total:?}", began.elapsed());
    total.assert_all_seen();
}
