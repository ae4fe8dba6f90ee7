//! A world around an engine: partitions that the test fills, handlers that it plays, and a clock that it moves.

mod ahead;
mod bounds;
mod breaker;
mod commits;
mod crashes;
mod cuts;
mod delays;
mod model;
mod order;
mod ownership;
mod retries;
mod simulation;
mod stuck;
mod threads;

use std::collections::VecDeque;

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const NOTHING: [i64; 0] = [];
/// What a record may count for unless a test says otherwise.
const SIZE: usize = 100;

/// No two neighbours are the same, so that one is not taken for the other.
fn size(offset: i64) -> usize {
    SIZE - (offset % 13) as usize
}

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Records that were handed over together, the first of them in its handler.
#[derive(Debug)]
struct TurnOut {
    owner: Ownership,
    jobs: VecDeque<Job<i64>>,
}

struct World {
    engine: Engine<i64, &'static str>,
    now: Instant,
    turns: Vec<TurnOut>,
    /// Offsets in the order in which their handlers succeeded.
    handled: Vec<i64>,
}

impl World {
    fn new(ordering: Ordering) -> Self {
        Self::with(ordering, |_| {})
    }

    /// Three attempts, 100 ms apart; a commit a second.
    fn with(ordering: Ordering, set: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config {
            ordering,
            guarantee: Guarantee::default(),
            concurrency: 64,
            window: 16_384,
            max_bytes: 1 << 30,
            max_records: 1 << 30,
            retry: Arc::new(Retry::fixed(ms(100)).max_attempts(3)),
            commit_interval: SECOND,
            crash_limit: None,
            breaker: Some(OutageBreaker::new()),
            seed: 7,
        };
        set(&mut config);
        let now = Instant::now();
        Self {
            engine: Engine::new(config, now),
            now,
            turns: Vec::new(),
            handled: Vec::new(),
        }
    }

    // ---- Kafka ----

    /// A partition of which the group has committed all up to `start`.
    fn assign(&mut self, start: i64) -> Ownership {
        self.engine
            .assign(Some(start), Some(start), Inherited::default())
    }

    /// A partition with these records, each without a key.
    fn partition(&mut self, offsets: std::ops::Range<i64>) -> Ownership {
        let owner = self.assign(offsets.start);
        offsets.for_each(|offset| self.receive(owner, offset, None));
        owner
    }

    fn receive(&mut self, owner: Ownership, offset: i64, key: Option<u64>) {
        let received = self
            .engine
            .receive(owner, offset, key, size(offset), offset);
        assert_eq!(received, Received::Queued);
    }

    fn commit(&mut self) -> Option<Vec<(Ownership, i64)>> {
        self.engine.next_commit().map(offsets)
    }

    fn answer(&mut self, results: &[CommitResult]) {
        self.engine.commit_answered(results, CommitResult::Accepted);
    }

    /// Lets a commit interval pass; whatever is sent is accepted.
    fn commit_all(&mut self) {
        self.pass(SECOND);
        while let Some(commit) = self.commit() {
            self.answer(&vec![CommitResult::Accepted; commit.len()]);
        }
    }

    fn committable(&self, owner: Ownership) -> i64 {
        self.status(owner).committable.unwrap()
    }

    fn committed(&self, owner: Ownership) -> i64 {
        self.status(owner).committed.unwrap()
    }

    fn status(&self, owner: Ownership) -> PartitionStatus {
        self.engine.status(owner).unwrap()
    }

    // ---- time ----

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.engine.advance(self.now);
    }

    /// How long the engine would sleep if nothing else happened.
    fn sleep(&self) -> Option<Duration> {
        self.engine
            .next_wake()
            .map(|at| at.saturating_duration_since(self.now))
    }

    // ---- handlers ----

    /// Starts whatever may run, and returns the offsets whose handlers run then.
    fn hand_over(&mut self) -> Vec<i64> {
        while let Some(batch) = self.engine.next_batch() {
            let mut jobs = batch.jobs.into_iter();
            while let Some(first) = jobs.next() {
                let followers = first.followers as usize;
                let turn = std::iter::once(first).chain(jobs.by_ref().take(followers));
                let turn = TurnOut {
                    owner: batch.owner,
                    jobs: turn.collect(),
                };
                assert_eq!(turn.jobs.len(), followers + 1, "a turn is not torn");
                if batch.beyond {
                    self.engine.started(batch.owner, turn.jobs[0].seq);
                }
                self.turns.push(turn);
            }
        }
        self.running()
    }

    fn running(&self) -> Vec<i64> {
        self.turns.iter().map(|turn| turn.jobs[0].record).collect()
    }

    fn turn_at(&self, owner: Ownership, offset: i64) -> usize {
        self.turns
            .iter()
            .position(|turn| turn.owner == owner && turn.jobs[0].record == offset)
            .unwrap_or_else(|| panic!("offset {offset} is not with a handler"))
    }

    /// Takes the record out of its handler; `true`: there is one behind it in its turn.
    fn take(&mut self, at: usize) -> (Job<i64>, bool) {
        let job = self.turns[at].jobs.pop_front().unwrap();
        let more = !self.turns[at].jobs.is_empty();
        if !more {
            self.turns.remove(at);
        }
        (job, more)
    }

    fn end_with(&mut self, owner: Ownership, offset: i64, outcome: Outcome) {
        let at = self.turn_at(owner, offset);
        let (job, more) = self.take(at);
        self.engine.finished(owner, job.seq, job.lane, outcome);
        if more {
            let next = self.turns[at].jobs[0].seq;
            self.engine.started(owner, next);
        }
        if outcome == Outcome::Handled {
            self.handled.push(offset);
        }
    }

    fn finish(&mut self, owner: Ownership, offset: i64) {
        self.end_with(owner, offset, Outcome::Handled);
    }

    /// Finishes all that is out and all that may run after it.
    fn finish_all(&mut self) {
        while !self.hand_over().is_empty() {
            let TurnOut { owner, jobs } = &self.turns[0];
            self.finish(*owner, jobs[0].record);
        }
    }

    fn fail(&mut self, owner: Ownership, offset: i64) {
        self.fail_with(owner, offset, AfterFailure::Retry(None));
    }

    fn outage(&mut self, owner: Ownership, offset: i64) {
        self.fail_with(owner, offset, AfterFailure::Outage);
    }

    /// The attempt fails, and what stands behind it in its turn comes back.
    fn fail_with(&mut self, owner: Ownership, offset: i64, then: AfterFailure) {
        let at = self.turn_at(owner, offset);
        let (job, more) = self.take(at);
        let failed = Failed {
            job,
            then,
            cause: "the database is down",
        };
        self.engine.failed(owner, failed);
        if more {
            self.give_back(at);
        }
    }

    /// A turn comes back as far as it has not started.
    fn give_back(&mut self, at: usize) {
        let TurnOut { owner, jobs } = self.turns.remove(at);
        self.engine.not_started(owner, jobs.into());
    }

    /// The dead letter of the next record that was given up is acknowledged.
    fn dead_letter(&mut self) -> Option<i64> {
        let given_up = self.engine.next_given_up()?;
        let GivenUp {
            owner,
            seq,
            lane,
            record,
            ..
        } = given_up;
        self.engine.settle(owner, seq, lane, Outcome::DeadLettered);
        Some(record)
    }
}

fn offsets(commit: Commit) -> Vec<(Ownership, i64)> {
    let entries = commit.entries.into_iter();
    entries.map(|entry| (entry.owner, entry.offset)).collect()
}

fn each_ordering() -> [Ordering; 3] {
    [Ordering::Unordered, Ordering::ByKey, Ordering::ByPartition]
}
