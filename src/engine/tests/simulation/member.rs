//! A process: an engine, and around it what the pump, the executors and the tasks for dead letters do, in the same
//! order. See `src/kafka/pump.rs`, `drain.rs`, `assignment.rs`, and `src/execute/`.

use std::{
    collections::{HashMap, VecDeque},
    time::{Duration, Instant},
};

use super::{
    Record, Setup,
    kafka::{Answer, End, Fate, GroupEvent, Kafka, Request, Sent, identity},
    random::Random,
};
use crate::engine::{
    AfterFailure, Batch, BreakerChange, BreakerState, Commit, CommitEntry, CommitResult, Crashed,
    Engine, Failed, FinishedAbove, GivenUp, Inherited, Job, LaneId, Outcome, Ownership, Received,
    partition::{Partition, State},
};

struct Held {
    owner: Ownership,
    tenure: usize,
    partition: usize,
    /// Index of the next record to read, in the log of this epoch.
    next: usize,
    epoch: u32,
    /// Leader epoch of the record that was read last.
    leader: Option<i32>,
    /// An error has moved the client's own position, until it is told to read from ours again.
    astray: Option<Astray>,
}

/// What librdkafka does when it delivers an error in place of records.
struct Astray {
    /// Where it says that it stands: behind the error, as if that had been a record.
    client_at: i64,
    read_again: Instant,
}

/// A turn whose first handler did not end at once.
struct Turn {
    owner: Ownership,
    tenure: usize,
    job: Job<Record>,
    followers: VecDeque<Job<Record>>,
    ends: Instant,
    in_time: bool,
    issue: u32,
}

struct Work {
    tenure: usize,
    /// The recalls before it was handed over.
    issue: u32,
    batch: Batch<Record>,
}

#[derive(Clone, Copy)]
struct Done {
    record: Record,
    seq: u64,
    lane: LaneId,
    outcome: Outcome,
}

enum Report {
    Batch {
        owner: Ownership,
        done: Vec<Done>,
        failed: Vec<Failed<Record, Why>>,
        not_started: Vec<Job<Record>>,
    },
    One {
        owner: Ownership,
        done: Done,
        next: Option<u64>,
    },
    DeadLettered(Ownership, Done),
}

/// Why a record is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    Failed,
    /// At most once, it could not be handled in time.
    OutOfTime,
    /// At most once, its handler was stopped.
    Interrupted,
}

struct Letter {
    tenure: usize,
    given_up: GivenUp<Record, Why>,
    acknowledged: Instant,
}

/// What the pump's thread is in the middle of.
enum Phase {
    Normal,
    Assigning {
        partitions: Vec<usize>,
        answered: Instant,
    },
    Draining {
        owners: Vec<Ownership>,
        /// At most once: from when on nothing is handled any more, but set aside.
        cut: Option<Instant>,
        until: Instant,
        commit_until: Instant,
    },
    LastCommit {
        owners: Vec<Ownership>,
        until: Instant,
        sent: bool,
    },
}

pub(super) struct Member {
    pub(super) process: u32,
    /// Of a static member.
    pub(super) instance: Option<u32>,
    engine: Engine<Record, Why>,
    held: Vec<Option<Held>>,
    queue: VecDeque<Work>,
    turns: Vec<Turn>,
    reports: VecDeque<Report>,
    letters: Vec<Letter>,
    events: VecDeque<GroupEvent>,
    answer: Option<Answer>,
    phase: Phase,
    revoked: Vec<usize>,
    remembered: HashMap<usize, (i64, FinishedAbove)>,
    /// To end within this time.
    stop: Option<Duration>,
    leaving: bool,
    /// The group has asked for something and waits for the answer.
    answering: bool,
    pub(super) gone: bool,
    /// It ends because of an error, and not because somebody wants it to.
    pub(super) failed: bool,
    /// Tenures in the last commit that is on its way, and those of which the answer said that none will ever go through.
    last_sent: Vec<usize>,
    refused: Vec<usize>,
    /// What the user has paused.
    paused: Vec<usize>,
    /// A record has killed it.
    pub(super) killed: bool,
    /// Stopped by a signal, handlers and all.
    pub(super) frozen_until: Instant,
    /// No broker can be reached.
    pub(super) cut_off_until: Instant,
    last_tick: Instant,
    most_ahead: usize,
    /// How often the breaker has called back what had not started.
    recalls: u32,
    /// For how long the breaker has held until the last step, and whether it does.
    held_for: Duration,
    holds: bool,
    last_step: Instant,
    /// What was handed over to probe with and has not come back.
    probes: Vec<(Ownership, u64, Instant)>,
    /// For fetches that fail.
    fetches: Random,
}

impl Member {
    pub(super) fn new(process: u32, instance: Option<u32>, setup: &Setup, now: Instant) -> Self {
        let mut config = setup.engine.clone();
        config.seed ^= u64::from(process);
        Self {
            process,
            instance,
            engine: Engine::new(config, now),
            held: Vec::new(),
            queue: VecDeque::new(),
            turns: Vec::new(),
            reports: VecDeque::new(),
            letters: Vec::new(),
            events: VecDeque::new(),
            answer: None,
            phase: Phase::Normal,
            revoked: Vec::new(),
            remembered: HashMap::new(),
            stop: None,
            leaving: false,
            answering: false,
            gone: false,
            failed: false,
            last_sent: Vec::new(),
            refused: Vec::new(),
            paused: Vec::new(),
            killed: false,
            frozen_until: now,
            cut_off_until: now,
            last_tick: now,
            most_ahead: 0,
            recalls: 0,
            held_for: Duration::ZERO,
            holds: false,
            last_step: now,
            probes: Vec::new(),
            fetches: Random::new(setup.engine.seed.rotate_left(16) ^ u64::from(process)),
        }
    }

    pub(super) fn stop(&mut self, limit: Duration) {
        self.stop = Some(self.stop.map_or(limit, |known| known.min(limit)));
    }

    /// Ends the run over an error, in order.
    fn fail(&mut self) {
        if self.stop.is_none() {
            self.failed = true;
            self.stop = Some(Duration::from_secs(5));
        }
    }

    /// The user does.
    pub(super) fn pause_or_resume(&mut self, partition: usize, kafka: &mut Kafka) {
        match self.paused.iter().position(|paused| *paused == partition) {
            Some(at) => drop(self.paused.swap_remove(at)),
            None => {
                kafka.counts.paused += 1;
                self.paused.push(partition);
            }
        }
        self.apply_pauses();
    }

    pub(super) fn resume(&mut self) {
        self.paused.clear();
        self.apply_pauses();
    }

    fn apply_pauses(&mut self) {
        for held in self.held.iter().flatten() {
            let paused = self.paused.contains(&held.partition);
            self.engine.set_paused(held.owner, paused);
        }
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stop.is_some()
    }

    /// It is in the middle of nothing.
    pub(super) fn is_settled(&self) -> bool {
        matches!(self.phase, Phase::Normal)
            && self.events.is_empty()
            && self.stop.is_none()
            && !self.engine.commit_in_flight()
    }

    pub(super) fn deliver(&mut self, event: GroupEvent) {
        self.events.push_back(event);
    }

    pub(super) fn answered(&mut self, answer: Answer) {
        assert!(self.answer.is_none(), "two commits were in flight");
        self.answer = Some(answer);
    }

    fn owners(&self) -> Vec<Ownership> {
        self.held.iter().flatten().map(|held| held.owner).collect()
    }

    fn held(&self, owner: Ownership) -> &Held {
        let held = self.held[owner.slot()].as_ref();
        held.filter(|held| held.owner == owner).expect("it is held")
    }

    fn tenure(&self, owner: Ownership) -> usize {
        self.held(owner).tenure
    }

    fn partition_of(&self, owner: Ownership) -> usize {
        self.held(owner).partition
    }

    // ---- the runtime ----

    /// What executors and tasks do until now.
    pub(super) fn execute(
        &mut self,
        kafka: &mut Kafka,
        setup: &Setup,
        now: Instant,
        random: &mut Random,
    ) {
        for at in (0..self.turns.len()).rev() {
            if self.turns[at].ends <= now && !self.killed {
                let turn = self.turns.swap_remove(at);
                self.go_on(turn, kafka, setup, now, random);
            }
        }
        while self.turns.len() < setup.engine.concurrency && !self.killed {
            let Some(work) = self.queue.pop_front() else {
                break;
            };
            self.drive(work, kafka, setup, now, random);
        }
        if self.killed {
            return;
        }
        for at in (0..self.letters.len()).rev() {
            if self.letters[at].acknowledged <= now && kafka.letters_down_until <= now {
                let Letter {
                    tenure, given_up, ..
                } = self.letters.swap_remove(at);
                let GivenUp {
                    owner,
                    seq,
                    lane,
                    record,
                    ..
                } = given_up;
                kafka.finished(tenure, record, Outcome::DeadLettered);
                let done = Done {
                    record,
                    seq,
                    lane,
                    outcome: Outcome::DeadLettered,
                };
                self.reports.push_back(Report::DeadLettered(owner, done));
            }
        }
    }

    /// A pending handler has ended, and the next of its turn is called.
    fn go_on(
        &mut self,
        turn: Turn,
        kafka: &mut Kafka,
        setup: &Setup,
        now: Instant,
        random: &mut Random,
    ) {
        let Turn {
            owner,
            tenure,
            job,
            mut followers,
            in_time,
            issue,
            ..
        } = turn;
        if in_time && kafka.fate(job.record) == Fate::Kills {
            self.killed = true;
            return kafka.kills(job.record);
        }
        match end(job, tenure, in_time, kafka, random) {
            Ok(done) => {
                let next = if kafka.tenures[tenure].fenced || issue != self.recalls {
                    None
                } else {
                    followers.pop_front()
                };
                let seq = next.as_ref().map(|job| job.seq);
                self.reports.push_back(Report::One {
                    owner,
                    done,
                    next: seq,
                });
                if let Some(job) = next {
                    self.starts(tenure, &job, kafka);
                    let (ends, in_time) = setup.handler_ends(now, kafka.calm, random);
                    self.turns.push(Turn {
                        owner,
                        tenure,
                        job,
                        followers,
                        ends,
                        in_time,
                        issue,
                    });
                } else if !followers.is_empty() {
                    self.give_back(owner, followers.into());
                }
            }
            Err(failed) => self.reports.push_back(Report::Batch {
                owner,
                done: Vec::new(),
                failed: vec![failed],
                not_started: followers.into(),
            }),
        }
    }

    fn give_back(&mut self, owner: Ownership, jobs: Vec<Job<Record>>) {
        self.reports.push_back(Report::Batch {
            owner,
            done: Vec::new(),
            failed: Vec::new(),
            not_started: jobs,
        });
    }

    /// A batch through an executor, up to where handlers are pending and permits are out.
    fn drive(
        &mut self,
        work: Work,
        kafka: &mut Kafka,
        setup: &Setup,
        now: Instant,
        random: &mut Random,
    ) {
        let Work {
            tenure,
            issue,
            batch:
                Batch {
                    owner,
                    jobs,
                    beyond,
                },
        } = work;
        let (mut done, mut failed, mut not_started) = (Vec::new(), Vec::new(), Vec::new());
        let mut jobs = VecDeque::from(jobs);
        while let Some(job) = jobs.pop_front() {
            if kafka.tenures[tenure].fenced || issue != self.recalls {
                not_started.push(job);
                not_started.extend(jobs.drain(..));
                break;
            }
            let followers = job.followers as usize;
            self.starts(tenure, &job, kafka);
            if random.chance(setup.ready) {
                if kafka.fate(job.record) == Fate::Kills {
                    self.killed = true;
                    return kafka.kills(job.record);
                }
                match end(job, tenure, true, kafka, random) {
                    Ok(what) => done.push(what),
                    Err(what) => {
                        failed.push(what);
                        not_started.extend(jobs.drain(..followers));
                    }
                }
            } else {
                let followers = jobs.drain(..followers).collect();
                let (ends, in_time) = setup.handler_ends(now, kafka.calm, random);
                self.turns.push(Turn {
                    owner,
                    tenure,
                    job,
                    followers,
                    ends,
                    in_time,
                    issue,
                });
            }
            // No permit is left, or the slice of time is used up.
            if self.turns.len() >= setup.engine.concurrency || random.chance(20) {
                break;
            }
        }
        self.reports.push_back(Report::Batch {
            owner,
            done,
            failed,
            not_started,
        });
        if !jobs.is_empty() {
            let batch = Batch {
                owner,
                jobs: jobs.into(),
                beyond,
            };
            self.queue.push_back(Work {
                tenure,
                issue,
                batch,
            });
        }
    }

    fn starts(&self, tenure: usize, job: &Job<Record>, kafka: &mut Kafka) {
        let state = self.engine.breaker().state();
        assert_ne!(
            state,
            BreakerState::Open,
            "{:?} is handled while the breaker is open",
            job.record
        );
        kafka.started(tenure, job.record, job.attempt);
    }

    /// The process dies.
    pub(super) fn dies(&mut self, kafka: &mut Kafka, random: &mut Random) {
        self.abort(kafka, random);
        for held in self.held.iter().flatten() {
            kafka.end_tenure(held.tenure, End::Torn);
        }
        self.gone = true;
    }

    /// Handlers and dead letters are cut off wherever they are: some had done their work already.
    fn abort(&mut self, kafka: &mut Kafka, random: &mut Random) {
        for turn in self.turns.drain(..) {
            let succeeds = matches!(kafka.fate(turn.job.record), Fate::Fine | Fate::Skipped);
            if succeeds && !kafka.dependency_is_down() && random.chance(300) {
                kafka.finished(turn.tenure, turn.job.record, Outcome::Handled);
            }
            kafka.stopped(turn.tenure, turn.job.record);
        }
        for letter in self.letters.drain(..) {
            if random.chance(500) {
                kafka.finished(letter.tenure, letter.given_up.record, Outcome::DeadLettered);
            }
        }
        self.queue.clear();
    }

    // ---- the pump ----

    /// One round, as far as the pump is not held up by a question to the brokers.
    pub(super) fn pump(
        &mut self,
        kafka: &mut Kafka,
        setup: &Setup,
        now: Instant,
        random: &mut Random,
    ) {
        self.answering = !self.leaving && !matches!(self.phase, Phase::Normal);
        match std::mem::replace(&mut self.phase, Phase::Normal) {
            Phase::LastCommit {
                owners,
                until,
                sent,
            } => {
                self.go_on_with_last_commit(owners, until, sent, kafka, now, random);
            }
            Phase::Normal => {
                self.step(kafka, setup, now, random);
                self.next_event(kafka, setup, now, random);
            }
            Phase::Assigning {
                partitions,
                answered,
            } => {
                let away = now < kafka.down_until || now < self.cut_off_until;
                if now < answered || away {
                    self.step(kafka, setup, now, random);
                    self.phase = Phase::Assigning {
                        partitions,
                        answered,
                    };
                } else {
                    self.take_over(&partitions, kafka);
                    self.engine.hold_commits(false);
                }
            }
            Phase::Draining {
                owners,
                cut,
                until,
                commit_until,
            } => {
                self.step(kafka, setup, now, random);
                if let Some(at) = cut {
                    self.cut(&owners, at, setup, kafka, now, random);
                }
                let drained = owners.iter().all(|owner| self.engine.is_drained(*owner));
                assert!(
                    drained || setup.at_most_once() || self.is_at_work_for(&owners),
                    "a drain waits for nothing"
                );
                self.phase = if drained || now >= until {
                    if cut.is_some_and(|cut| now >= cut) {
                        self.assert_nothing_waits(&owners);
                    }
                    if self.leaving {
                        self.abort(kafka, random);
                    }
                    Phase::LastCommit {
                        owners,
                        until: commit_until,
                        sent: false,
                    }
                } else {
                    Phase::Draining {
                        owners,
                        cut,
                        until,
                        commit_until,
                    }
                };
            }
        }
        self.check(setup, kafka);
    }

    /// At most once, what cannot be handled in time is set aside.
    fn cut(
        &mut self,
        owners: &[Ownership],
        at: Instant,
        setup: &Setup,
        kafka: &mut Kafka,
        now: Instant,
        random: &mut Random,
    ) {
        let waits = (now < at).then_some(at);
        if waits.is_none() {
            for owner in owners {
                kafka.tenures[self.tenure(*owner)].fenced = true;
            }
            self.take_back(kafka);
            for at in (0..self.turns.len()).rev() {
                if owners.contains(&self.turns[at].owner) {
                    let turn = self.turns.swap_remove(at);
                    self.interrupt(turn, kafka, random);
                }
            }
        }
        for owner in owners {
            self.engine.cut(*owner, waits, |_| Why::OutOfTime);
        }
        self.give_up(setup, kafka, now, random);
    }

    /// A handler is dropped in the middle. It may have done its work.
    fn interrupt(&mut self, turn: Turn, kafka: &mut Kafka, random: &mut Random) {
        let Turn {
            owner,
            tenure,
            job,
            followers,
            ..
        } = turn;
        kafka.counts.interrupted += 1;
        kafka.stopped(tenure, job.record);
        if !kafka.dependency_is_down() && random.chance(300) {
            kafka.finished(tenure, job.record, Outcome::Handled);
        }
        let failed = Failed {
            job,
            then: AfterFailure::GiveUp,
            cause: Why::Interrupted,
        };
        self.reports.push_back(Report::Batch {
            owner,
            done: Vec::new(),
            failed: vec![failed],
            not_started: followers.into(),
        });
    }

    /// Whatever was committed has been handled or is on its way to the dead-letter topic.
    fn assert_nothing_waits(&self, owners: &[Ownership]) {
        if !self.reports.is_empty() {
            return;
        }
        for owner in owners {
            if let Some(left) = self.engine.forfeited(*owner) {
                assert_eq!(
                    left.records,
                    left.dead_lettering + left.in_doubt,
                    "a drain has cut {left:?}, and some of them were not set aside"
                );
            }
        }
    }

    fn is_at_work_for(&self, owners: &[Ownership]) -> bool {
        let reported = self.reports.iter().map(|report| match report {
            Report::Batch { owner, .. }
            | Report::One { owner, .. }
            | Report::DeadLettered(owner, _) => *owner,
        });
        let turns = self.turns.iter().map(|turn| turn.owner);
        let queued = self.queue.iter().map(|work| work.batch.owner);
        let letters = self.letters.iter().map(|letter| letter.given_up.owner);
        let mut all = reported.chain(turns).chain(queued).chain(letters);
        all.any(|owner| owners.contains(&owner))
    }

    fn step(&mut self, kafka: &mut Kafka, setup: &Setup, now: Instant, random: &mut Random) {
        self.engine.advance(now);
        if self.holds {
            self.held_for += now - self.last_step;
        }
        self.last_step = now;
        self.most_ahead = self.most_ahead.max(self.engine.pace.ahead());
        let most = if random.chance(200) {
            random.below(4)
        } else {
            usize::MAX
        };
        self.take_reports(most, kafka);
        self.follow_breaker(kafka);
        if setup.positions && now.duration_since(self.last_tick) >= Duration::from_millis(100) {
            self.last_tick = now;
            self.pass_offsets_without_records(kafka);
        }
        if now >= self.cut_off_until && now >= kafka.down_until && !self.failed {
            self.read(kafka, setup, random);
        }
        self.read_again(kafka, now);
        let state = self.engine.breaker().state();
        while let Some(batch) = self.engine.next_batch() {
            self.is_admitted(&batch, state, setup, now);
            let tenure = self.tenure(batch.owner);
            let partition = self.partition_of(batch.owner);
            // At most once, what is committed is handled also if its partition has been paused since.
            assert!(
                setup.at_most_once() || !self.paused.contains(&partition),
                "partition {partition} is paused, and something of it is handed over"
            );
            self.queue.push_back(Work {
                tenure,
                issue: self.recalls,
                batch,
            });
        }
        self.assert_somebody_probes(setup, now);
        self.holds = self.engine.breaker().holds();
        self.give_up(setup, kafka, now, random);
        self.take_answer(now);
        if let Some(commit) = self.engine.next_commit() {
            self.send(commit, false, kafka, now, random);
        }
    }

    fn give_up(&mut self, setup: &Setup, kafka: &mut Kafka, now: Instant, random: &mut Random) {
        while let Some(given_up) = self.next_given_up(kafka) {
            let GivenUp {
                owner,
                seq,
                lane,
                record,
                ..
            } = given_up;
            let tenure = self.tenure(owner);
            if setup.dead_letters {
                let acknowledged = now + random.ms(0..200);
                self.letters.push(Letter {
                    tenure,
                    given_up,
                    acknowledged,
                });
            } else {
                kafka.finished(tenure, record, Outcome::Dropped);
                kafka.reported(tenure, record);
                self.engine.settle(owner, seq, lane, Outcome::Dropped);
            }
        }
    }

    fn next_given_up(&mut self, kafka: &mut Kafka) -> Option<GivenUp<Record, Why>> {
        let Some(crashed) = self.engine.next_crashed() else {
            let given_up = self.engine.next_given_up()?;
            let (record, attempts) = (given_up.record, given_up.attempts);
            match given_up.cause {
                Why::Failed => {
                    kafka.given_up(self.tenure(given_up.owner), record, attempts, self.clock());
                }
                Why::OutOfTime => kafka.counts.out_of_time += 1,
                Why::Interrupted => {}
            }
            return Some(given_up);
        };
        let Crashed {
            owner,
            seq,
            lane,
            record,
            deaths,
        } = crashed;
        kafka.crashed(self.tenure(owner), record, deaths);
        Some(GivenUp {
            owner,
            seq,
            lane,
            record,
            attempts: deaths,
            cause: Why::Failed,
        })
    }

    /// It stands still while the breaker holds.
    fn clock(&self) -> Instant {
        self.last_step - self.held_for
    }

    fn follow_breaker(&mut self, kafka: &mut Kafka) {
        while let Some(change) = self.engine.next_breaker_change() {
            kafka.tell(|| format!("process {}: {change:?}", self.process));
            match change {
                BreakerChange::Opened { .. } => kafka.counts.opened += 1,
                BreakerChange::StillDown { .. } => kafka.counts.still_down += 1,
                BreakerChange::Closed { .. } => kafka.counts.closed += 1,
                BreakerChange::Answers => {}
            }
            self.probes.clear();
            if let BreakerChange::Opened { .. } | BreakerChange::StillDown { .. } = change {
                self.recalls += 1;
                for Work { batch, .. } in std::mem::take(&mut self.queue) {
                    kafka.counts.recalled += batch.jobs.len() as u64;
                    self.not_started(batch.owner, batch.jobs);
                }
            }
        }
    }

    /// While a dependency is down only probes are handed over, one after another.
    fn is_admitted(
        &mut self,
        batch: &Batch<Record>,
        state: BreakerState,
        setup: &Setup,
        now: Instant,
    ) {
        match state {
            BreakerState::Closed => return,
            BreakerState::Open => panic!("{batch:?} is handed over while the breaker is open"),
            BreakerState::HalfOpen | BreakerState::Opening => {}
        }
        assert!(
            batch.jobs.iter().all(|job| job.followers == 0),
            "more than one record of a lane is handed over while the breaker is not closed"
        );
        if state == BreakerState::HalfOpen {
            let overdue = |at: &Instant| *at + setup.longest_probe_pause <= now;
            assert!(
                batch.jobs.len() == 1 && self.probes.iter().all(|(.., at)| overdue(at)),
                "{batch:?} is handed over beside {:?}",
                self.probes
            );
            self.probes.push((batch.owner, batch.jobs[0].seq, now));
        }
    }

    /// Neither a probe that hangs nor one that was taken away keeps the breaker from finding out.
    fn assert_somebody_probes(&self, setup: &Setup, now: Instant) {
        // Suspect records wait for commits first.
        let free = setup.engine.crash_limit.is_none()
            && self.engine.turns_out() < setup.engine.concurrency;
        let overdue = |at: &Instant| *at + setup.longest_probe_pause <= now;
        if self.engine.breaker().state() != BreakerState::HalfOpen
            || !free
            || !self.probes.iter().all(|(.., at)| overdue(at))
        {
            return;
        }
        let waits = self.held.iter().flatten().find(|held| {
            let partition = self.engine.partition(held.owner);
            // When a drain's time is over nothing more is handed over, and what comes back is set aside.
            let ready = |it: &Partition<Record>| it.state != State::Cut && it.lanes.is_ready();
            self.engine.is_going(held.owner) && partition.is_some_and(ready)
        });
        assert!(
            waits.is_none(),
            "a dependency may be back, and nobody looks, beside {:?}",
            self.probes
        );
    }

    fn not_started(&mut self, owner: Ownership, jobs: Vec<Job<Record>>) {
        for job in &jobs {
            self.came_back(owner, job.seq);
        }
        self.engine.not_started(owner, jobs);
    }

    fn came_back(&mut self, owner: Ownership, seq: u64) {
        if !self.probes.is_empty() {
            self.probes.retain(|(of, it, _)| (*of, *it) != (owner, seq));
        }
    }

    fn take_reports(&mut self, most: usize, kafka: &mut Kafka) {
        for _ in 0..most {
            let Some(report) = self.reports.pop_front() else {
                break;
            };
            match report {
                Report::Batch {
                    owner,
                    done,
                    failed,
                    not_started,
                } => {
                    for done in done {
                        self.finished(owner, done, kafka);
                    }
                    for failed in failed {
                        self.came_back(owner, failed.job.seq);
                        if let (Some(tenure), false) = (
                            self.current_tenure(owner),
                            matches!(failed.then, AfterFailure::Outage),
                        ) {
                            kafka.failed(tenure, failed.job.record, self.clock());
                        }
                        self.engine.failed(owner, failed);
                    }
                    if !not_started.is_empty() {
                        self.not_started(owner, not_started);
                    }
                }
                Report::One { owner, done, next } => {
                    self.finished(owner, done, kafka);
                    if let Some(next) = next {
                        self.engine.started(owner, next);
                    }
                }
                Report::DeadLettered(owner, done) => {
                    self.note(owner, done.record, kafka);
                    self.engine.settle(owner, done.seq, done.lane, done.outcome);
                }
            }
        }
    }

    fn finished(&mut self, owner: Ownership, done: Done, kafka: &mut Kafka) {
        self.came_back(owner, done.seq);
        self.note(owner, done.record, kafka);
        self.engine
            .finished(owner, done.seq, done.lane, done.outcome);
    }

    fn note(&self, owner: Ownership, record: Record, kafka: &mut Kafka) {
        if let Some(tenure) = self.current_tenure(owner) {
            kafka.reported(tenure, record);
        }
    }

    fn current_tenure(&self, owner: Ownership) -> Option<usize> {
        let held = self.held[owner.slot()].as_ref();
        Some(held.filter(|held| held.owner == owner)?.tenure)
    }

    /// What the client's position tells where all that there is has been read, and after an error anywhere.
    fn pass_offsets_without_records(&mut self, kafka: &Kafka) {
        for held in self.held.iter().flatten() {
            let log = &kafka.logs[held.partition];
            let known = kafka.tenures[held.tenure].cuts == log.cuts.len();
            if let Some(astray) = &held.astray {
                self.engine.client_is_at(held.owner, astray.client_at);
            } else if held.epoch == log.epoch && known && held.next == log.entries.len() {
                self.engine.client_is_at(held.owner, log.end);
            }
        }
    }

    /// A fetch fails, or a batch cannot be decoded: the client delivers an error in its place, takes that for a record, and
    /// goes on behind what it could not read, or where it thinks that it stands.
    fn fetch_fails(&mut self, slot: usize, kafka: &mut Kafka) {
        let held = self.held[slot].as_mut().expect("it is read from");
        let log = &kafka.logs[held.partition];
        let offset = log.entries.get(held.next).map_or(log.end, |it| it.offset);
        if held.astray.is_none() {
            kafka.counts.fetch_errors += 1;
        }
        let client_at = offset + 1;
        if self.fetches.chance(500) {
            let unreadable = self.fetches.within(1..6) as usize;
            held.next = (held.next + unreadable).min(log.entries.len());
        } else if self.fetches.chance(300) {
            held.next = log.entries.partition_point(|it| it.offset < client_at);
        }
        held.astray = Some(Astray {
            client_at,
            read_again: kafka.now + self.fetches.ms(0..400),
        });
        self.engine.distrust(held.owner);
    }

    /// The client is told to read from the engine's position.
    fn read_again(&mut self, kafka: &Kafka, now: Instant) {
        for held in self.held.iter_mut().flatten() {
            if held.astray.as_ref().is_none_or(|it| now < it.read_again) {
                continue;
            }
            held.astray = None;
            let status = self.engine.status(held.owner);
            let position = status.and_then(|it| it.position);
            let position = position.expect("it began somewhere");
            let log = &kafka.logs[held.partition];
            // What had been read was that of another log.
            let anew = kafka.tenures[held.tenure].epoch != log.epoch;
            held.next = match anew {
                true => 0,
                false => log.entries.partition_point(|it| it.offset < position),
            };
            self.engine.reads_from_position(held.owner);
        }
    }

    fn read(&mut self, kafka: &mut Kafka, setup: &Setup, random: &mut Random) {
        let count = self.held.len();
        if count == 0 {
            return;
        }
        let first = random.below(count);
        for slot in (0..count).map(|step| (first + step) % count) {
            let Some(owner) = self.held[slot].as_ref().map(|held| held.owner) else {
                continue;
            };
            self.assert_admits(owner, setup);
            let Some(held) = &mut self.held[slot] else {
                continue;
            };
            let mut reading = self.engine.reading(held.owner);
            let room = reading.records();
            assert!(
                room <= 1 || !self.engine.breaker().holds(),
                "{room} records may be read while a dependency is down"
            );
            // Prefetching is never ahead of everything.
            let fetched = random.within(1..40) as usize;
            let log = &kafka.logs[held.partition];
            if room > 0 && held.epoch != log.epoch {
                (held.next, held.epoch) = (0, log.epoch);
            }
            if room > 0 && kafka.tenures[held.tenure].cuts != log.cuts.len() {
                self.notice_cut(slot, kafka);
            }
            let mut fetched = room.min(fetched);
            while fetched > 0 && reading.next() > 0 {
                let taken = reading.next().min(fetched);
                let before = self.engine.bytes();
                for _ in 0..taken {
                    let fails = setup.fetch_errors > 0 && !kafka.calm;
                    if fails && self.fetches.chance(setup.fetch_errors) {
                        self.fetch_fails(slot, kafka);
                    }
                    self.receive_next(slot, kafka);
                }
                reading.took(taken, self.engine.bytes().saturating_sub(before));
                fetched -= taken;
            }
        }
    }

    /// The brokers say where the log of the records that were read ends. Where that is above all of them, the client does not
    /// ask: the next record's leader epoch tells.
    fn notice_cut(&mut self, slot: usize, kafka: &mut Kafka) {
        let held = self.held[slot].as_mut().expect("it is read from");
        let tenure = &mut kafka.tenures[held.tenure];
        let log = &kafka.logs[held.partition];
        if tenure.epoch != log.epoch {
            // Nothing has been read of this one.
            tenure.cuts = log.cuts.len();
            return;
        }
        let offset = log.cut_since(tenure.cuts);
        let before = self.engine.status(held.owner).and_then(|it| it.position);
        if before.is_none_or(|position| position <= offset) {
            kafka.counts.cut_ahead += 1;
            return kafka.noticed_cut(held.tenure, offset);
        }
        let cut = self.engine.cut_off(held.owner, offset);
        let cut = cut.expect("nothing is read of what is given away");
        assert_eq!(cut.position, offset);
        held.next = log
            .entries
            .partition_point(|entry| entry.offset < cut.position);
        let kept = self.engine.has_unfinished(held.owner);
        kafka.noticed_cut(held.tenure, offset);
        kafka.counts.cut_off += 1;
        kafka.counts.void += cut.void as u64;
        kafka.counts.void_out += cut.out as u64;
        kafka.counts.kept += u64::from(kept && cut.void > 0);
        // What has not started is called back, and what of it is gone is dropped then.
        self.recalls += 1;
        for Work { batch, .. } in std::mem::take(&mut self.queue) {
            self.not_started(batch.owner, batch.jobs);
        }
    }

    fn receive_next(&mut self, slot: usize, kafka: &mut Kafka) {
        let held = self.held[slot].as_mut().expect("it is read from");
        let (partition, epoch) = (held.partition, held.epoch);
        let Some(entry) = kafka.logs[partition].entries.get(held.next) else {
            return;
        };
        let start = kafka.logs[partition].start;
        if entry.offset < start {
            if held.astray.is_some() {
                return;
            }
            // Out of range: the run ends, and somebody has to say where to go on.
            let from = kafka.tenures[held.tenure].read_to;
            kafka.tells_deleted(partition, from);
            return self.fail();
        }
        held.next += 1;
        assert!(
            !self.paused.contains(&partition),
            "partition {partition} is paused, and read"
        );
        let (offset, cuts, key) = (entry.offset, entry.cuts, entry.key);
        let (bytes, due, leader) = (entry.bytes, entry.due, entry.leader);
        if held.astray.is_none() && held.leader.replace(leader) != Some(leader) {
            self.engine.elected(held.owner, offset, leader);
        }
        kafka.counts.delayed += u64::from(due > Some(kafka.now));
        let record = Record {
            partition,
            epoch,
            cuts,
            offset,
            key,
        };
        if held.astray.is_some() {
            let received = self
                .engine
                .receive_due(held.owner, offset, key, bytes, record, due);
            assert_eq!(received, Received::Unproven, "{record:?} follows an error");
            return;
        }
        if kafka.tenures[held.tenure].epoch == epoch || offset > 0 {
            kafka.tenures[held.tenure].read_to = offset + 1;
            match self
                .engine
                .receive_due(held.owner, offset, key, bytes, record, due)
            {
                Received::Queued => {}
                Received::AlreadyFinished => kafka.passed_over(held.tenure, record),
                other => panic!("{record:?} was read, and is {other:?}"),
            }
            return;
        }
        // The first record of a log that was made anew.
        if matches!(
            self.engine
                .receive_due(held.owner, offset, key, bytes, record, due),
            Received::WentBack { .. }
        ) {
            let (old, next) = (held.tenure, held.next);
            let ended = self.engine.end(held.owner);
            assert!(ended.is_some());
            self.probes.retain(|(of, ..)| of.slot() != slot);
            kafka.end_tenure(old, End::Torn);
            let inherited = Inherited {
                identity: identity(partition),
                ..Inherited::default()
            };
            let owner = self.engine.assign(Some(offset), None, inherited);
            assert_eq!(owner.slot(), slot);
            let cuts = kafka.logs[partition].cuts.len();
            let tenure = kafka.begin_tenure(self.process, partition, offset, cuts, true);
            self.held[slot] = Some(Held {
                owner,
                tenure,
                partition,
                next,
                epoch,
                leader: None,
                astray: None,
            });
            self.engine
                .receive_due(owner, offset, key, bytes, record, due);
            kafka.tenures[tenure].read_to = offset + 1;
        } else {
            kafka.tenures[held.tenure].epoch = epoch;
            kafka.tenures[held.tenure].read_to = offset + 1;
        }
    }

    // ---- commits ----

    fn send(
        &mut self,
        commit: Commit,
        last: bool,
        kafka: &mut Kafka,
        now: Instant,
        random: &mut Random,
    ) {
        assert!(
            self.answer.is_none() && !kafka.has_requests_of(self.process),
            "two commits in flight"
        );
        assert!(
            last || !self.answering,
            "a commit goes out while a rebalance is answered"
        );
        let sent = |entry: CommitEntry| {
            let tenure = self.tenure(entry.owner);
            let cuts = kafka.tenures[tenure].cuts;
            Sent {
                tenure,
                cuts,
                entry,
            }
        };
        let entries: Vec<Sent> = commit.entries.into_iter().map(sent).collect();
        self.last_sent.clear();
        if last {
            self.last_sent
                .extend(entries.iter().map(|sent| sent.tenure));
            assert!(
                !self.last_sent.iter().any(|it| self.refused.contains(it)),
                "a last commit that will never go through is sent again"
            );
        }
        let arrives = (now + Kafka::delay(random)).max(self.cut_off_until);
        kafka.requests.push(Request {
            process: self.process,
            entries,
            arrives,
            last,
        });
    }

    fn take_answer(&mut self, now: Instant) {
        if let Some(Answer {
            results, overall, ..
        }) = self.answer.take_if(|answer| answer.arrives <= now)
        {
            self.engine.commit_answered(&results, overall);
            if overall == CommitResult::Fatal {
                self.refused.append(&mut self.last_sent);
                self.fail();
            }
        }
    }

    // ---- rebalances ----

    fn next_event(&mut self, kafka: &mut Kafka, setup: &Setup, now: Instant, random: &mut Random) {
        match self.events.pop_front() {
            Some(GroupEvent::Assigned(partitions)) if self.stop.is_none() => {
                self.engine.hold_commits(true);
                let answered = now + random.ms(0..100);
                self.phase = Phase::Assigning {
                    partitions,
                    answered,
                };
            }
            Some(GroupEvent::Revoked(partitions)) => {
                self.engine.hold_commits(true);
                let revoked = |held: &&Held| partitions.contains(&held.partition);
                let owners: Vec<_> = self
                    .held
                    .iter()
                    .flatten()
                    .filter(revoked)
                    .map(|held| held.owner)
                    .collect();
                self.begin_drain(&owners, kafka);
                self.revoked = partitions;
                let until = now + setup.drain_timeout * 3 / 4;
                self.phase = Phase::Draining {
                    owners,
                    cut: setup.cut(now, until),
                    until,
                    commit_until: now + setup.drain_timeout,
                };
            }
            Some(GroupEvent::Lost) => {
                // Nothing more starts, and what has finished up to here counts.
                for held in self.held.iter().flatten() {
                    kafka.tenures[held.tenure].fenced = true;
                }
                self.take_reports(usize::MAX, kafka);
                for owner in self.owners() {
                    self.lose(owner, kafka);
                }
                if self.stop.is_none() {
                    kafka.join(self.process, self.instance, random);
                }
            }
            Some(GroupEvent::Assigned(_)) => {}
            None => {
                if let Some(limit) = self.stop {
                    let owners = self.owners();
                    self.begin_drain(&owners, kafka);
                    self.leaving = true;
                    let until = now + limit * 3 / 4;
                    self.phase = Phase::Draining {
                        owners,
                        cut: setup.cut(now, until),
                        until,
                        commit_until: now + limit.max(Duration::from_millis(100)),
                    };
                }
            }
        }
    }

    fn take_over(&mut self, partitions: &[usize], kafka: &mut Kafka) {
        for &partition in partitions {
            let (mut start, committed, mut inherited) = kafka.position(partition);
            let log = &kafka.logs[partition];
            let first = log.start;
            let written = log.committed.as_ref().filter(|it| it.epoch() == log.epoch);
            let cuts = written.map_or(log.cuts.len(), |it| it.cuts);
            if start < first {
                // Somebody has looked at what was deleted, and goes on behind it.
                kafka.tells_deleted(partition, start);
                // The metadata stands beside another offset.
                kafka.metadata_is_of_no_use(partition, first);
                start = first;
                inherited = Inherited {
                    identity: inherited.identity,
                    ..Inherited::default()
                };
            }
            let remembered = self.remembered.remove(&partition);
            let was_set_back = |(then, _): &(i64, _)| committed.is_none_or(|now| now < *then);
            if remembered.as_ref().is_some_and(was_set_back) {
                kafka.forgets(self.process, partition);
            }
            let knows = remembered.is_some() && !remembered.as_ref().is_some_and(was_set_back);
            let inherited = inherited.and_remembered(committed, remembered);
            let owner = self.engine.assign(Some(start), committed, inherited);
            let tenure = kafka.begin_tenure(self.process, partition, start, cuts, knows);
            let log = &kafka.logs[partition];
            let next = log.entries.partition_point(|entry| entry.offset < start);
            if self.held.len() <= owner.slot() {
                self.held.resize_with(owner.slot() + 1, || None);
            }
            self.held[owner.slot()] = Some(Held {
                owner,
                tenure,
                partition,
                next,
                epoch: log.epoch,
                leader: None,
                astray: None,
            });
        }
        self.apply_pauses();
    }

    fn begin_drain(&mut self, owners: &[Ownership], kafka: &mut Kafka) {
        for owner in owners {
            // What is committed already is handled here or nowhere.
            if !kafka.at_most_once {
                kafka.tenures[self.tenure(*owner)].fenced = true;
            }
            self.engine.drain(*owner);
        }
        self.take_back(kafka);
    }

    fn take_back(&mut self, kafka: &Kafka) {
        let (fenced, others): (Vec<_>, Vec<_>) = self
            .queue
            .drain(..)
            .partition(|work| kafka.tenures[work.tenure].fenced);
        self.queue = others.into();
        for Work { batch, .. } in fenced {
            self.not_started(batch.owner, batch.jobs);
        }
    }

    fn go_on_with_last_commit(
        &mut self,
        owners: Vec<Ownership>,
        until: Instant,
        mut sent: bool,
        kafka: &mut Kafka,
        now: Instant,
        random: &mut Random,
    ) {
        self.engine.advance(now);
        self.take_answer(now);
        let late = now >= until;
        if !late {
            if !self.engine.commit_in_flight()
                && let Some(commit) = self.engine.final_commit(&owners, sent)
            {
                self.send(commit, true, kafka, now, random);
                sent = true;
            }
            if self.engine.commit_in_flight() || self.engine.last_commit_retry(&owners).is_some() {
                self.phase = Phase::LastCommit {
                    owners,
                    until,
                    sent,
                };
                return;
            }
        }
        for owner in owners {
            if self.engine.commit_is_due(&[owner]) {
                self.lose(owner, kafka);
                continue;
            }
            let torn = late || !self.engine.is_drained(owner);
            kafka.forgets(self.process, self.partition_of(owner));
            self.end(owner, if torn { End::Torn } else { End::Clean }, kafka);
        }
        if self.leaving {
            // A static member does not say goodbye.
            if self.instance.is_none() {
                kafka.remove(self.process, random);
            }
            self.gone = true;
        } else {
            kafka.released(self.process, &std::mem::take(&mut self.revoked));
            self.engine.hold_commits(false);
        }
    }

    /// It ends, and what has finished there may not be committed.
    fn lose(&mut self, owner: Ownership, kafka: &mut Kafka) {
        let (partition, tenure) = (self.partition_of(owner), self.tenure(owner));
        // A log that is gone tells nothing about the next one, see `World::something_happens`.
        let finished = self.engine.finished_above_committed(owner);
        match finished.filter(|_| kafka.is_there(tenure)) {
            Some(finished) => {
                self.remembered.insert(partition, finished);
                kafka.remembers(tenure);
            }
            None => kafka.forgets(self.process, partition),
        }
        self.end(owner, End::Torn, kafka);
    }

    fn end(&mut self, owner: Ownership, how: End, kafka: &mut Kafka) {
        let held = self.held[owner.slot()].take().expect("what ends is held");
        self.probes.retain(|(of, ..)| *of != owner);
        let forfeited = self.engine.forfeited(owner);
        let last = self.engine.end(owner).expect("what is held is known");
        kafka.tells_left(held.tenure, last.committed, last.committed_left);
        let records = forfeited.map_or(0, |it| it.records - it.in_doubt);
        assert_eq!(records, last.committed_left, "{forfeited:?}");
        let range = forfeited.map(|it| (it.first_offset, it.last_offset));
        kafka.tells_forfeited(held.tenure, range);
        kafka.end_tenure(held.tenure, how);
    }

    // ---- what must hold at any time, and at the end ----

    fn check(&self, setup: &Setup, kafka: &Kafka) {
        let config = &setup.engine;
        if setup.at_most_once() {
            let held = self.held.iter().flatten();
            let ahead: usize = held.map(|held| kafka.ahead(held.tenure)).sum();
            assert!(
                ahead <= 2 * config.concurrency,
                "{ahead} records are committed and not finished, with {} handlers",
                config.concurrency
            );
        }
        for held in self.held.iter().flatten() {
            let partition = self
                .engine
                .partition(held.owner)
                .expect("what is held is known");
            let span = partition.window.span();
            assert!(
                span <= config.window,
                "{span} records in a window of {}",
                config.window
            );
        }
        // A record for each partition may pass the budget, and a few may come before anybody knows how large they are.
        let unseen = if config.max_bytes < super::LARGEST << 10 {
            1
        } else {
            32
        };
        let most =
            config.max_bytes.saturating_mul(5) / 3 + setup.partitions * setup.largest() * unseen;
        assert!(
            self.engine.bytes() <= most,
            "{} bytes, where {most} are too many",
            self.engine.bytes()
        );
        let most = config.concurrency + self.most_ahead.max(64);
        assert!(
            self.engine.turns_out() <= most,
            "{} turns out",
            self.engine.turns_out()
        );
    }

    /// As long as there is budget, a partition that goes on may be read.
    fn assert_admits(&self, owner: Ownership, setup: &Setup) {
        let partition = self.engine.partition(owner).expect("what is held is known");
        if setup.at_most_once()
            || !self.engine.is_going(owner)
            || self.engine.breaker().holds()
            || partition.suspects.is_any()
            || partition.window.room() == 0
            || partition.lanes.len() + partition.delayed.len() >= 2_000
        {
            return;
        }
        let (bytes, limit) = (self.engine.bytes(), setup.engine.max_bytes);
        let has_nothing = partition.unfinished() == 0 && bytes < 2 * limit;
        assert!(
            self.engine.room(owner) > 0 || bytes >= limit / 2 && !has_nothing,
            "with {bytes} of {limit} bytes in use, a partition is not read"
        );
    }

    /// Whatever is left of work that has ended, if anything is.
    pub(super) fn leftover(&self) -> Option<String> {
        let engine = &self.engine;
        let left = [
            ("bytes", engine.bytes()),
            ("turns out", engine.turns_out()),
            ("retries", engine.schedule.next_due().map_or(0, |_| 1)),
            ("given up", engine.given_up.len()),
            ("crashed", engine.crashed.len()),
            ("turns", self.turns.len()),
            ("batches", self.queue.len()),
            ("reports", self.reports.len()),
            ("dead letters", self.letters.len()),
        ];
        let (what, count) = left.into_iter().find(|(_, count)| *count > 0)?;
        Some(format!("process {} has {count} {what}", self.process))
    }

    pub(super) fn is_new_to(&self, partition: usize) -> bool {
        let mut held = self
            .held
            .iter()
            .flatten()
            .filter(|held| held.partition == partition);
        held.any(|held| {
            self.engine
                .status(held.owner)
                .is_some_and(|status| status.position == Some(0))
        })
    }

    pub(super) fn remembers(&self, partition: usize) -> bool {
        self.remembered.contains_key(&partition)
    }

    pub(super) fn holds(&self) -> usize {
        self.held.iter().flatten().count()
    }

    /// Handlers that hang are let go.
    pub(super) fn unhang(&mut self, now: Instant) {
        for turn in &mut self.turns {
            turn.ends = turn.ends.min(now + Duration::from_millis(50));
        }
    }
}

/// A handler's call ends.
fn end(
    job: Job<Record>,
    tenure: usize,
    in_time: bool,
    kafka: &mut Kafka,
    random: &mut Random,
) -> Result<Done, Failed<Record, Why>> {
    let record = job.record;
    kafka.stopped(tenure, record);
    let fail = |job, then| {
        Err(Failed {
            job,
            then,
            cause: Why::Failed,
        })
    };
    if !in_time {
        return fail(job, AfterFailure::Retry(None));
    }
    let fate = kafka.fate(record);
    let does_without = matches!(fate, Fate::Skipped | Fate::Poison | Fate::Kills);
    if kafka.dependency_is_down() && !does_without {
        kafka.counts.outages += 1;
        return fail(job, AfterFailure::Outage);
    }
    let outcome = match fate {
        Fate::Fails(times) if job.attempt <= times => return fail(job, AfterFailure::Retry(None)),
        Fate::AsksToWait if job.attempt == 1 => {
            let wait = random.ms(0..300);
            return fail(job, AfterFailure::RetryAfter(wait, None));
        }
        Fate::Hopeless => return fail(job, AfterFailure::Retry(None)),
        Fate::Poison => return fail(job, AfterFailure::GiveUp),
        Fate::Kills => unreachable!("the process is dead"),
        Fate::Skipped => Outcome::Skipped,
        Fate::Fine | Fate::Fails(_) | Fate::AsksToWait => Outcome::Handled,
    };
    kafka.finished(tenure, record, outcome);
    Ok(Done {
        record,
        seq: job.seq,
        lane: job.lane,
        outcome,
    })
}
