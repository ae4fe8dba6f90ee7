//! The whole engine against random lives of partitions, checked after each event.

use std::collections::BTreeMap;

use proptest::{prelude::*, sample::Index};

use super::*;

#[derive(Debug, Clone)]
enum Event {
    Receive(Index, usize),
    HandOver,
    Finish(Index, usize),
    Fail(Index),
    RetryAfter(Index, u64),
    Postpone(Index, u64),
    Outage(Index),
    GiveUp(Index),
    TakeGivenUp,
    Settle(Index),
    NotStarted(Index),
    Commit,
    Answer(CommitResult, CommitResult),
    Pass(u64),
    Pause(Index, bool),
    Drain(Index),
    End(Index),
    Assign,
    SkipTo(Index),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    use CommitResult::*;
    let at = any::<Index>;
    let result = || prop_oneof![3 => Just(Accepted), 1 => Just(Unavailable), 1 => Just(Rejoining)];
    let event = prop_oneof![
        8 => (at(), 1..30usize).prop_map(|(at, count)| Event::Receive(at, count)),
        8 => Just(Event::HandOver),
        12 => (at(), 1..20usize).prop_map(|(at, count)| Event::Finish(at, count)),
        3 => at().prop_map(Event::Fail),
        1 => (at(), 0..300u64).prop_map(|(at, wait)| Event::RetryAfter(at, wait)),
        1 => (at(), 0..300u64).prop_map(|(at, wait)| Event::Postpone(at, wait)),
        3 => at().prop_map(Event::Outage),
        1 => at().prop_map(Event::GiveUp),
        2 => Just(Event::TakeGivenUp),
        2 => at().prop_map(Event::Settle),
        2 => at().prop_map(Event::NotStarted),
        4 => Just(Event::Commit),
        4 => (result(), result()).prop_map(|(one, other)| Event::Answer(one, other)),
        6 => (0..1_500u64).prop_map(Event::Pass),
        1 => (at(), any::<bool>()).prop_map(|(at, paused)| Event::Pause(at, paused)),
        1 => at().prop_map(Event::Drain),
        1 => at().prop_map(Event::End),
        2 => Just(Event::Assign),
        1 => at().prop_map(Event::SkipTo),
    ];
    prop::collection::vec(event, 1..150)
}

/// One ownership, as the events alone say it.
#[derive(Debug, Default)]
struct Log {
    /// By offset; `true`: finished.
    records: BTreeMap<i64, bool>,
    /// Failures that count, by offset.
    failures: BTreeMap<i64, u32>,
    position: i64,
    committed: i64,
    draining: bool,
    paused: bool,
}

impl Log {
    fn unfinished(&self) -> impl Iterator<Item = i64> {
        let open = self.records.iter().filter(|(_, finished)| !**finished);
        open.map(|(offset, _)| *offset)
    }

    fn committable(&self) -> i64 {
        self.unfinished().next().unwrap_or(self.position)
    }
}

fn key(offset: i64) -> Option<u64> {
    (offset % 5 != 0).then_some(offset as u64 % 4)
}

struct Life {
    ordering: Ordering,
    /// Turns of ended ownerships stay out: their verdicts still come.
    world: World,
    logs: Vec<(Ownership, Log)>,
    assigned: i64,
    /// On the way to the dead-letter topic.
    leaving: Vec<GivenUp<i64, &'static str>>,
    in_flight: Option<Vec<(Ownership, i64)>>,
}

impl Life {
    fn new(ordering: Ordering) -> Self {
        let world = World::with(ordering, |config| {
            config.window = 100;
            config.concurrency = 5;
            config.max_bytes = 150 * SIZE;
            config.breaker = Some(OutageBreaker::new().min_attempts(3));
        });
        let mut life = Self {
            ordering,
            world,
            logs: Vec::new(),
            assigned: 0,
            leaving: Vec::new(),
            in_flight: None,
        };
        (0..3).for_each(|_| life.assign());
        life
    }

    fn assign(&mut self) {
        self.assigned += 1;
        let start = 10 * self.assigned;
        let log = Log {
            position: start,
            committed: start,
            ..Log::default()
        };
        self.logs.push((self.world.assign(start), log));
    }

    fn log(&mut self, owner: Ownership) -> Option<&mut Log> {
        let known = self.logs.iter_mut().find(|(known, _)| *known == owner);
        known.map(|(_, log)| log)
    }

    /// Nothing in front of this record in its lane is unfinished.
    fn is_first_of_its_lane(&self, log: &Log, offset: i64) -> bool {
        match self.ordering {
            Ordering::Unordered => true,
            Ordering::ByKey if key(offset).is_none() => true,
            Ordering::ByKey => {
                log.unfinished().find(|other| key(*other) == key(offset)) == Some(offset)
            }
            Ordering::ByPartition => log.unfinished().next() == Some(offset),
        }
    }

    fn finished(&mut self, owner: Ownership, offset: i64) {
        if let Some((_, log)) = self.logs.iter().find(|(known, _)| *known == owner) {
            assert!(
                self.is_first_of_its_lane(log, offset),
                "{offset} overtook another"
            );
        }
        if let Some(log) = self.log(owner) {
            let before = log.records.insert(offset, true);
            assert_eq!(before, Some(false), "{offset} ended twice");
        }
    }

    fn hand_over(&mut self) {
        let known = self.world.turns.len();
        let room = self.world.engine.breaker().room();
        self.world.hand_over();
        let given = &self.world.turns[known..];
        if let Some(room) = room {
            assert!(given.len() <= room, "more than the breaker lets through");
            assert!(given.iter().all(|turn| turn.jobs.len() == 1));
        }
        for turn in &self.world.turns[known..] {
            let log = self.logs.iter().find(|(owner, _)| *owner == turn.owner);
            let (_, log) = log.expect("the ownership of what is handed over is current");
            assert!(!log.draining && !log.paused);
            for job in &turn.jobs {
                let failures = log.failures.get(&job.record).copied().unwrap_or_default();
                assert_eq!(job.attempt, failures + 1);
            }
            assert!(
                self.is_first_of_its_lane(log, turn.jobs[0].record),
                "a second turn of a lane"
            );
        }
    }

    fn finish(&mut self, at: usize) {
        let TurnOut { owner, jobs } = &self.world.turns[at];
        let (owner, offset) = (*owner, jobs[0].record);
        self.world.finish(owner, offset);
        self.finished(owner, offset);
    }

    fn fail(&mut self, at: Index, then: AfterFailure) {
        if !self.world.turns.is_empty() {
            let TurnOut { owner, jobs } = at.get(&self.world.turns);
            let (owner, offset) = (*owner, jobs[0].record);
            let counts = matches!(then, AfterFailure::Retry(_) | AfterFailure::RetryAfter(..));
            self.world.fail_with(owner, offset, then);
            if let (true, Some(log)) = (counts, self.log(owner)) {
                *log.failures.entry(offset).or_default() += 1;
            }
        }
    }

    fn settle(&mut self, at: usize) {
        let GivenUp {
            owner,
            seq,
            lane,
            record,
            ..
        } = self.leaving.remove(at);
        self.world
            .engine
            .settle(owner, seq, lane, Outcome::DeadLettered);
        self.finished(owner, record);
    }

    fn take_given_up(&mut self) {
        if let Some(given_up) = self.world.engine.next_given_up() {
            assert!(self.log(given_up.owner).is_some(), "of an ended ownership");
            self.leaving.push(given_up);
        }
    }

    fn commit(&mut self) {
        let Some(commit) = self.world.commit() else {
            return;
        };
        assert!(self.in_flight.is_none(), "two commits in flight");
        for (owner, offset) in &commit {
            let log = self.log(*owner).expect("only what is ours is committed");
            assert_eq!(*offset, log.committable());
        }
        self.in_flight = Some(commit);
    }

    fn answer(&mut self, one: CommitResult, other: CommitResult) {
        let Some(commit) = self.in_flight.take() else {
            return;
        };
        let mut results = vec![other; commit.len()];
        results[0] = one;
        self.world.answer(&results);
        if results
            .iter()
            .any(|result| *result != CommitResult::Accepted)
        {
            return;
        }
        for (owner, offset) in commit {
            if let Some(log) = self.log(owner) {
                log.committed = offset;
            }
        }
    }

    fn receive(&mut self, at: Index, count: usize) {
        let owned = self.logs.len();
        let (owner, log) = &mut self.logs[at.index(owned)];
        let mut reading = self.world.engine.reading(*owner);
        for _ in 0..count {
            if reading.next() == 0 {
                break;
            }
            // Now and then there is a gap in the log.
            let offset = log.position + i64::from(log.position % 7 == 0);
            self.world.receive(*owner, offset, key(offset));
            log.records.insert(offset, false);
            log.position = offset + 1;
            reading.took(1, size(offset));
        }
    }

    fn happens(&mut self, event: Event) {
        let (turns, owned) = (self.world.turns.len(), self.logs.len());
        match event {
            Event::Assign if owned < 5 => self.assign(),
            Event::Receive(at, count) if owned > 0 => self.receive(at, count),
            Event::HandOver => self.hand_over(),
            Event::Finish(at, count) => {
                for _ in 0..count.min(turns) {
                    let turns = self.world.turns.len();
                    if turns > 0 {
                        self.finish(at.index(turns));
                    }
                }
            }
            Event::Fail(at) => self.fail(at, AfterFailure::Retry(None)),
            Event::RetryAfter(at, wait) => self.fail(at, AfterFailure::RetryAfter(ms(wait), None)),
            Event::Postpone(at, wait) => self.fail(at, AfterFailure::Postpone(ms(wait))),
            Event::Outage(at) => self.fail(at, AfterFailure::Outage),
            Event::GiveUp(at) => self.fail(at, AfterFailure::GiveUp),
            Event::TakeGivenUp => self.take_given_up(),
            Event::Settle(at) if !self.leaving.is_empty() => {
                self.settle(at.index(self.leaving.len()))
            }
            Event::NotStarted(at) if turns > 0 => self.world.give_back(at.index(turns)),
            Event::Commit => self.commit(),
            Event::Answer(one, other) => self.answer(one, other),
            Event::Pass(millis) => self.world.pass(ms(millis)),
            Event::Pause(at, paused) if owned > 0 => {
                let (owner, log) = &mut self.logs[at.index(owned)];
                log.paused = paused;
                self.world.engine.set_paused(*owner, paused);
            }
            Event::Drain(at) if owned > 0 => {
                let (owner, log) = &mut self.logs[at.index(owned)];
                log.draining = true;
                self.world.engine.drain(*owner);
            }
            Event::End(at) if owned > 0 => {
                let (owner, _) = self.logs.remove(at.index(owned));
                self.world.engine.end(owner);
            }
            Event::SkipTo(at) if owned > 0 => {
                let (owner, log) = &mut self.logs[at.index(owned)];
                log.position += 3;
                self.world.engine.skip_to(*owner, log.position);
            }
            _ => {}
        }
        self.check();
    }

    fn check(&self) {
        let engine = &self.world.engine;
        for (owner, log) in &self.logs {
            let status = self.world.status(*owner);
            assert_eq!(status.committable, Some(log.committable()));
            assert_eq!(status.committed, Some(log.committed));
            assert_eq!(status.position, Some(log.position));

            let partition = engine.partition(*owner).unwrap();
            let queued = partition.lanes.queued();
            let queued = queued
                .iter()
                .map(|seq| partition.window.offset(*seq).unwrap());
            let turns = self.world.turns.iter().filter(|turn| turn.owner == *owner);
            let out = turns.flat_map(|turn| turn.jobs.iter().map(|job| job.record));
            let given_up = engine
                .given_up
                .iter()
                .chain(&self.leaving)
                .filter(|given_up| given_up.owner == *owner);
            let mut places: Vec<_> = queued
                .chain(out)
                .chain(given_up.map(|given_up| given_up.record))
                .collect();
            let count = places.len() + status.retrying;
            places.sort();
            places.dedup();
            assert_eq!(
                places.len() + status.retrying,
                count,
                "a record is in two places"
            );
            let unfinished: Vec<_> = log.unfinished().collect();
            assert!(
                places.iter().all(|offset| unfinished.contains(offset)),
                "a finished record is about"
            );
            if log.draining {
                assert!(count <= unfinished.len());
            } else {
                assert_eq!(count, unfinished.len(), "a record is nowhere");
            }
        }
        let unfinished = self.logs.iter().flat_map(|(_, log)| log.unfinished());
        assert_eq!(engine.bytes(), unfinished.map(size).sum::<usize>());
        let current = |turn: &&TurnOut| self.logs.iter().any(|(owner, _)| *owner == turn.owner);
        assert_eq!(
            engine.turns_out(),
            self.world.turns.iter().filter(current).count()
        );
        assert!(
            engine.bytes() <= 155 * SIZE,
            "one more for each partition at the most"
        );
    }

    /// All trouble is over: everything that is still owned comes to its end.
    fn comes_to_its_end(&mut self) {
        let Self { logs, world, .. } = self;
        logs.retain(|(owner, log)| {
            if log.draining {
                world.engine.end(*owner);
            }
            !log.draining
        });
        for (owner, log) in &mut self.logs {
            log.paused = false;
            self.world.engine.set_paused(*owner, false);
        }
        for _ in 0..40 {
            self.hand_over();
            while !self.world.turns.is_empty() {
                self.finish(0);
                self.hand_over();
            }
            self.take_given_up();
            while !self.leaving.is_empty() {
                self.settle(0);
            }
            self.answer(CommitResult::Accepted, CommitResult::Accepted);
            self.commit();
            self.world.pass(SECOND);
            self.check();
        }
        // What is committed again every minute may have been so in the last round.
        self.answer(CommitResult::Accepted, CommitResult::Accepted);
        for (_, log) in &self.logs {
            assert_eq!(log.unfinished().next(), None);
            assert_eq!(log.committed, log.position);
        }
        assert_eq!(
            (self.world.engine.bytes(), self.world.engine.turns_out()),
            (0, 0)
        );
        assert_eq!(self.world.sleep(), None, "nothing is left to wake up for");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn whatever_happens_no_record_is_lost_doubled_overtaken_or_committed_over(
        ordering in prop_oneof![Just(Ordering::Unordered), Just(Ordering::ByKey), Just(Ordering::ByPartition)],
        events in events(),
    ) {
        let mut life = Life::new(ordering);
        events.into_iter().for_each(|event| life.happens(event));
        life.comes_to_its_end();
    }
}
