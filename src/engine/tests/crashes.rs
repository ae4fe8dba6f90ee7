//! Processes that die, one after another, with nothing between them but what was committed.

use std::collections::{BTreeMap, BTreeSet};

use proptest::{prelude::*, sample::Index};

use super::*;
use crate::engine::snapshot;

const LIMIT: u32 = 3;

fn identity(partition: usize) -> Identity {
    Identity::new("cluster", "group", "topic", partition as i32)
}

/// What outlives processes.
#[derive(Debug)]
struct Broker {
    /// Records in each partition.
    ends: Vec<i64>,
    /// Committed offset and metadata.
    kept: Vec<(i64, String)>,
    dead_letters: Vec<(usize, i64, u32)>,
    handled: BTreeMap<(usize, i64), usize>,
    deaths: usize,
}

impl Broker {
    fn new<const N: usize>(ends: [i64; N]) -> Self {
        Self {
            ends: ends.into(),
            kept: vec![(0, String::new()); N],
            dead_letters: Vec::new(),
            handled: BTreeMap::new(),
            deaths: 0,
        }
    }

    fn inherited(&self, partition: usize) -> Inherited {
        let (offset, metadata) = &self.kept[partition];
        snapshot::decode(metadata.as_bytes(), identity(partition), *offset).unwrap()
    }

    fn marks(&self, partition: usize) -> Marks {
        self.inherited(partition).marks
    }

    fn all_committed(&self) -> bool {
        let committed = self.kept.iter().map(|(offset, _)| offset);
        committed.eq(&self.ends)
    }

    /// Each record but these was handled, and these are dead letters.
    fn assert_lost_nothing_but(&self, poison: &[(usize, i64)]) {
        let dead = self.dead_letters.iter();
        let dead: BTreeSet<_> = dead.map(|(at, offset, _)| (*at, *offset)).collect();
        assert_eq!(dead, poison.iter().copied().collect());
        for (at, end) in self.ends.iter().enumerate() {
            for offset in (0..*end).filter(|offset| !dead.contains(&(at, *offset))) {
                assert!(
                    self.handled.contains_key(&(at, offset)),
                    "{at}/{offset} lost"
                );
            }
        }
    }
}

struct Process {
    engine: Engine<i64, ()>,
    now: Instant,
    /// By partition; `None`: of another process, or handed over.
    owners: Vec<Option<Ownership>>,
    read: Vec<i64>,
    out: Vec<(usize, Job<i64>)>,
    in_flight: Option<Commit>,
}

fn config(ordering: Ordering) -> Config {
    Config {
        ordering,
        guarantee: Guarantee::default(),
        concurrency: 4,
        window: 500,
        max_bytes: usize::MAX,
        max_records: 1 << 30,
        retry: Arc::new(Retry::fixed(ms(10)).max_attempts(3)),
        commit_interval: SECOND,
        crash_limit: Some(LIMIT),
        breaker: None,
        seed: 7,
    }
}

impl Process {
    fn start(broker: &Broker, config: Config) -> Self {
        let all = 0..broker.ends.len();
        Self::owning(all, broker, config)
    }

    fn owning(
        partitions: impl IntoIterator<Item = usize>,
        broker: &Broker,
        config: Config,
    ) -> Self {
        let now = Instant::now();
        let mut engine = Engine::new(config, now);
        let mut owners = vec![None; broker.ends.len()];
        for at in partitions {
            let start = Some(broker.kept[at].0);
            owners[at] = Some(engine.assign(start, start, broker.inherited(at)));
        }
        Self {
            engine,
            now,
            owners,
            read: broker.kept.iter().map(|(offset, _)| *offset).collect(),
            out: Vec::new(),
            in_flight: None,
        }
    }

    fn partition(&self, owner: Ownership) -> usize {
        let known = self.owners.iter().position(|known| *known == Some(owner));
        known.unwrap()
    }

    fn read(&mut self, broker: &Broker) {
        for at in 0..self.owners.len() {
            let Some(owner) = self.owners[at] else {
                continue;
            };
            for _ in 0..self.engine.room(owner) {
                if self.read[at] == broker.ends[at] {
                    break;
                }
                let offset = self.read[at];
                self.engine
                    .receive(owner, offset, Some(offset as u64 % 7), SIZE, offset);
                self.read[at] += 1;
            }
        }
    }

    fn hand_over(&mut self, broker: &mut Broker) {
        while let Some(batch) = self.engine.next_batch() {
            let at = self.partition(batch.owner);
            self.out.extend(batch.jobs.into_iter().map(|job| (at, job)));
        }
        while let Some(crashed) = self.engine.next_crashed() {
            let at = self.partition(crashed.owner);
            let Crashed {
                owner, seq, lane, ..
            } = crashed;
            broker
                .dead_letters
                .push((at, crashed.record, crashed.deaths));
            self.engine.settle(owner, seq, lane, Outcome::DeadLettered);
        }
    }

    fn out_of(&self, at: usize) -> Vec<i64> {
        let of = self.out.iter().filter(|(known, _)| *known == at);
        of.map(|(_, job)| job.record).collect()
    }

    /// Finishes the record that has been with its handler for this long.
    fn finish(&mut self, index: usize, broker: &mut Broker) {
        let (at, job) = self.out.remove(index);
        *broker.handled.entry((at, job.record)).or_default() += 1;
        let owner = self.owners[at].unwrap();
        self.engine
            .finished(owner, job.seq, job.lane, Outcome::Handled);
    }

    fn finish_all(&mut self, broker: &mut Broker) {
        while !self.out.is_empty() {
            self.finish(0, broker);
        }
    }

    fn fail(&mut self, index: usize) {
        self.fail_with(index, AfterFailure::Retry(None));
    }

    fn fail_with(&mut self, index: usize, then: AfterFailure) {
        let (at, job) = self.out.remove(index);
        let failed = Failed {
            job,
            then,
            cause: (),
        };
        self.engine.failed(self.owners[at].unwrap(), failed);
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.engine.advance(self.now);
    }

    fn send_commit(&mut self) -> bool {
        self.in_flight = self.engine.next_commit();
        self.in_flight.is_some()
    }

    fn answer(&mut self, broker: &mut Broker, result: CommitResult) {
        let Some(commit) = self.in_flight.take() else {
            return;
        };
        let results = vec![result; commit.entries.len()];
        if result == CommitResult::Accepted {
            self.keep(broker, commit);
        }
        self.engine.commit_answered(&results, result);
    }

    fn keep(&self, broker: &mut Broker, commit: Commit) {
        for entry in commit.entries {
            let at = self.partition(entry.owner);
            broker.kept[at] = (entry.offset, entry.metadata);
        }
    }

    fn commit(&mut self, broker: &mut Broker) {
        if self.send_commit() {
            self.answer(broker, CommitResult::Accepted);
        }
    }

    /// One round: what may run starts, all of it ends, and a commit goes through. `false`: the process died of it.
    fn round(&mut self, broker: &mut Broker, poison: &[(usize, i64)]) -> bool {
        self.read(broker);
        self.hand_over(broker);
        let kills = |(at, job): &(usize, Job<i64>)| poison.contains(&(*at, job.record));
        if self.out.iter().any(kills) {
            broker.deaths += 1;
            return false;
        }
        self.finish_all(broker);
        self.commit(broker);
        self.pass(ms(5));
        true
    }

    /// Until all is done. `false`: the process died.
    fn live(mut self, broker: &mut Broker, poison: &[(usize, i64)]) -> bool {
        for _ in 0..20_000 {
            if !self.round(broker, poison) {
                return false;
            }
            if broker.all_committed() {
                self.hand_back(broker);
                return true;
            }
        }
        panic!("no end to it: {broker:?}");
    }

    fn hand_back(mut self, broker: &mut Broker) {
        let owners: Vec<_> = self.owners.iter().copied().flatten().collect();
        owners.iter().for_each(|owner| self.engine.drain(*owner));
        self.finish_all(broker);
        self.answer(broker, CommitResult::Accepted);
        while let Some(commit) = self.engine.final_commit(&owners, false) {
            let results = vec![CommitResult::Accepted; commit.entries.len()];
            self.keep(broker, commit);
            self.engine
                .commit_answered(&results, CommitResult::Accepted);
        }
    }
}

/// Starts processes until one comes to the end.
fn restart_until_done(broker: &mut Broker, ordering: Ordering, poison: &[(usize, i64)]) {
    while !Process::start(broker, config(ordering)).live(broker, poison) {
        assert!(
            broker.deaths < 100,
            "the record is never found: {:?}",
            broker.kept
        );
    }
}

#[test]
fn a_record_that_kills_the_process_is_given_up_and_all_others_are_handled() {
    for ordering in each_ordering() {
        for poison in [0, 3, 37, 4_321] {
            let mut broker = Broker::new([5_000]);
            restart_until_done(&mut broker, ordering, &[(0, poison)]);
            broker.assert_lost_nothing_but(&[(0, poison)]);
            assert_eq!(broker.dead_letters, [(0, poison, LIMIT)], "{ordering:?}");
            // Within a commit interval many windows can go by.
            let most = if poison < 500 { 6 } else { 8 };
            assert!(broker.deaths <= most, "{ordering:?}: {}", broker.deaths);
        }
    }
}

#[test]
fn a_record_far_behind_what_was_committed_is_found_within_a_few_deaths() {
    let mut broker = Broker::new([20_000]);
    // Handlers so quick that 1,500 records go between two commits.
    let slow_commits = |broker: &mut Broker| {
        let config = Config {
            commit_interval: 10 * SECOND,
            window: 16_384,
            ..config(Ordering::Unordered)
        };
        Process::start(broker, config).live(broker, &[(0, 1_500)])
    };
    while !slow_commits(&mut broker) {
        assert!(broker.deaths < 10);
    }
    assert_eq!(broker.dead_letters, [(0, 1_500, LIMIT)]);
}

#[test]
fn several_poison_records_are_each_given_up() {
    let mut broker = Broker::new([300, 300]);
    let poison = [(0, 5), (0, 6), (0, 150), (1, 20)];
    restart_until_done(&mut broker, Ordering::ByKey, &poison);
    broker.assert_lost_nothing_but(&poison);
    assert!(
        broker
            .dead_letters
            .iter()
            .all(|(_, _, deaths)| *deaths == LIMIT)
    );
}

#[test]
fn the_first_record_waits_for_the_mark_to_be_acknowledged() {
    let mut broker = Broker::new([10]);
    let mut process = Process::start(&broker, config(Ordering::Unordered));
    process.read(&broker);
    process.hand_over(&mut broker);
    assert_eq!(process.out_of(0), NOTHING);
    assert!(process.send_commit(), "at once");
    process.hand_over(&mut broker);
    assert_eq!(process.out_of(0), NOTHING);
    process.answer(&mut broker, CommitResult::Accepted);
    assert!(broker.marks(0).dirty);
    process.hand_over(&mut broker);
    assert_eq!(process.out_of(0), Vec::from_iter(0..10));

    process.finish(0, &mut broker);
    process.pass(SECOND);
    process.commit(&mut broker);
    assert_eq!(broker.marks(0), Marks::default(), "the head has moved");
}

#[test]
fn the_mark_is_not_waited_for_while_the_coordinator_is_away() {
    let mut broker = Broker::new([10]);
    let mut process = Process::start(&broker, config(Ordering::Unordered));
    process.read(&broker);
    process.hand_over(&mut broker);
    assert!(process.send_commit());
    let sleep = process.engine.next_wake().unwrap() - process.now;
    assert_eq!(sleep, SECOND);
    process.pass(sleep);
    process.hand_over(&mut broker);
    assert_eq!(process.out_of(0).len(), 10);
}

#[test]
fn a_partition_without_records_leaves_no_mark() {
    let mut broker = Broker::new([0]);
    let mut process = Process::start(&broker, config(Ordering::Unordered));
    process.hand_over(&mut broker);
    process.pass(10 * SECOND);
    assert!(!process.send_commit());
}

#[test]
fn an_orderly_end_leaves_no_mark_although_the_head_has_not_moved() {
    let mut broker = Broker::new([10]);
    let mut process = Process::start(&broker, config(Ordering::Unordered));
    process.read(&broker);
    process.hand_over(&mut broker);
    process.commit(&mut broker);
    process.hand_over(&mut broker);
    process.finish(9, &mut broker);
    assert!(broker.marks(0).dirty);
    while !process.out.is_empty() {
        process.fail(0);
    }
    process.hand_back(&mut broker);
    assert_eq!(broker.marks(0), Marks::default());
    assert_eq!(broker.kept[0].0, 0);
    assert!(broker.inherited(0).finished.contains(9));
}

/// A broker whose partition 0 was left by a process that died with a few suspects in it.
fn with_suspects(ends: [i64; 2]) -> Broker {
    let mut broker = Broker::new(ends);
    for _ in 0..2 {
        let process = Process::owning([0], &broker, config(Ordering::Unordered));
        assert!(!process.live(&mut broker, &[(0, 2)]));
    }
    assert!(broker.marks(0).alone > 0);
    broker
}

#[test]
fn a_suspect_runs_alone_and_not_before_a_commit_that_names_it_was_acknowledged() {
    let mut broker = with_suspects([10, 0]);
    let mut process = Process::start(&broker, config(Ordering::Unordered));
    for offset in 0..5 {
        process.read(&broker);
        process.hand_over(&mut broker);
        assert_eq!(process.out_of(0), NOTHING);
        assert!(process.send_commit(), "at once");
        process.answer(&mut broker, CommitResult::Unavailable);
        process.hand_over(&mut broker);
        assert_eq!(process.out_of(0), NOTHING, "it was refused");
        process.pass(SECOND);
        process.commit(&mut broker);
        assert_eq!(broker.marks(0).running, Some(offset));
        process.hand_over(&mut broker);
        assert_eq!(process.out_of(0), [offset]);
        process.pass(10 * SECOND);
        process.hand_over(&mut broker);
        assert_eq!(process.out_of(0), [offset], "nothing beside it");
        process.finish(0, &mut broker);
    }
}

#[test]
fn partitions_that_are_not_suspect_go_on_beside_a_suspect() {
    let mut broker = with_suspects([10, 100]);
    let mut process = Process::start(&broker, config(Ordering::Unordered));
    for _ in 0..4 {
        process.read(&broker);
        process.hand_over(&mut broker);
        process.commit(&mut broker);
    }
    assert_eq!(process.out_of(0), [0]);
    assert!(!process.out_of(1).is_empty());
    while let Some(index) = process.out.iter().position(|(at, _)| *at == 1) {
        process.finish(index, &mut broker);
        process.hand_over(&mut broker);
    }
    assert_eq!(process.out_of(0), [0]);
    assert_eq!(
        broker.handled.len(),
        100,
        "while one record of the suspect partition runs"
    );
}

#[test]
fn of_several_suspect_partitions_one_record_runs_at_a_time() {
    let mut broker = Broker::new([200, 200, 200]);
    let poison = [(0, 7), (1, 0), (2, 13)];
    loop {
        assert!(broker.deaths < 100, "{:?}", broker.kept);
        let mut process = Process::start(&broker, config(Ordering::ByKey));
        let suspects: Vec<_> = (0..3).filter(|at| broker.marks(*at).alone > 0).collect();
        let died = loop {
            process.read(&broker);
            process.hand_over(&mut broker);
            let noted = (0..3).filter(|at| broker.marks(*at).running.is_some());
            assert!(noted.count() <= 1);
            if suspects.len() == 3 && broker.dead_letters.is_empty() {
                assert!(process.out.len() <= 1, "{:?}", process.out);
            }
            if !process.round(&mut broker, &poison) {
                break true;
            }
            if broker.all_committed() {
                break false;
            }
        };
        if !died {
            break;
        }
    }
    broker.assert_lost_nothing_but(&poison);
}

#[test]
fn the_note_of_a_process_that_died_is_taken_back_before_another_partition_has_its_turn() {
    let mut broker = Broker::new([20, 20]);
    let poison = [(0, 1), (1, 1)];
    while broker.marks(0).running.is_none() || broker.marks(1).alone == 0 {
        assert!(broker.deaths < 20, "{:?}", broker.kept);
        assert!(!Process::start(&broker, config(Ordering::Unordered)).live(&mut broker, &poison));
    }
    let mut process = Process::start(&broker, config(Ordering::Unordered));
    process.engine.set_paused(process.owners[0].unwrap(), true);
    for _ in 0..4 {
        process.read(&broker);
        process.hand_over(&mut broker);
        process.commit(&mut broker);
    }
    assert_eq!(broker.marks(0).running, None);
    assert_eq!(broker.marks(0).deaths.len(), 1, "it is counted");
    assert_eq!(process.out.len(), 1, "the other one has its turn");
}

#[test]
fn two_processes_look_for_their_own_suspects_and_blame_no_record_of_each_other() {
    let mut broker = Broker::new([100, 100]);
    let poison = [(0, 5), (1, 60)];
    let start = |at: usize, broker: &Broker| Process::owning([at], broker, config(Ordering::ByKey));
    let mut processes = [start(0, &broker), start(1, &broker)];
    let mut rounds = 0;
    while !broker.all_committed() {
        rounds += 1;
        assert!(rounds < 20_000, "{:?}", broker.kept);
        let at = rounds % 2;
        if !processes[at].round(&mut broker, &poison) {
            processes[at] = start(at, &broker);
        }
    }
    assert_eq!(broker.dead_letters, [(0, 5, LIMIT), (1, 60, LIMIT)]);
    broker.assert_lost_nothing_but(&poison);
}

#[test]
fn a_partition_that_was_lost_and_comes_back_to_the_same_process_tells_of_no_death() {
    let mut broker = with_suspects([100, 0]);
    let mut process = Process::start(&broker, config(Ordering::Unordered));
    for _ in 0..2 {
        process.read(&broker);
        process.hand_over(&mut broker);
        process.commit(&mut broker);
    }
    let written = broker.marks(0);
    assert!(written.running.is_some());
    let known = written.clone().of_a_living_process();
    assert_eq!((known.running, &known.deaths), (None, &written.deaths));
    assert_eq!(known.alone, written.alone, "they are suspect still");

    let freely = Marks {
        dirty: true,
        ..Marks::default()
    };
    assert!(freely.of_a_living_process().is_empty());
}

#[test]
fn a_record_that_finishes_alone_is_suspect_no_more() {
    let mut broker = with_suspects([100, 0]);
    for deaths in 0..LIMIT - 1 {
        let count = broker.marks(0).deaths.first().map_or(0, |it| it.count);
        assert_eq!(count, deaths.saturating_sub(1), "as far as it is committed");
        assert!(!Process::start(&broker, config(Ordering::Unordered)).live(&mut broker, &[(0, 2)]));
    }
    // Whatever made it kill the process has been mended.
    assert!(Process::start(&broker, config(Ordering::Unordered)).live(&mut broker, &[]));
    broker.assert_lost_nothing_but(&[]);
    assert_eq!(broker.marks(0).deaths, []);
}

#[test]
fn an_orderly_end_amid_suspects_keeps_what_is_known_of_them_and_blames_nobody() {
    let mut broker = with_suspects([100, 0]);
    assert!(!Process::start(&broker, config(Ordering::Unordered)).live(&mut broker, &[(0, 2)]));
    let mut process = Process::start(&broker, config(Ordering::Unordered));
    for _ in 0..2 {
        process.read(&broker);
        process.hand_over(&mut broker);
        process.commit(&mut broker);
    }
    assert_eq!(broker.marks(0).running, Some(2), "it is the oldest by now");
    let out = process.out_of(0);
    assert_eq!(out, [2]);
    process.fail(0);
    process.hand_back(&mut broker);
    let marks = broker.marks(0);
    assert_eq!((marks.running, marks.dirty), (None, false));
    assert_eq!(
        marks.deaths,
        [snapshot::Deaths {
            offset: 2,
            count: 1
        }]
    );
    restart_until_done(&mut broker, Ordering::Unordered, &[(0, 2)]);
    assert_eq!(broker.dead_letters, [(0, 2, LIMIT)]);
    assert_eq!(broker.deaths, 2 + LIMIT as usize);
}

#[test]
fn a_record_at_the_limit_that_is_not_given_up_for_good_is_not_run_by_the_next_process_either() {
    let mut broker = with_suspects([100, 0]);
    for _ in 0..LIMIT {
        assert!(!Process::start(&broker, config(Ordering::Unordered)).live(&mut broker, &[(0, 2)]));
    }
    for _ in 0..2 {
        let mut process = Process::start(&broker, config(Ordering::Unordered));
        process.read(&broker);
        assert!(process.engine.next_batch().is_none());
        let crashed = process.engine.next_crashed().unwrap();
        assert_eq!((crashed.record, crashed.deaths), (2, LIMIT));
        // Without a dead-letter topic the consumer stops.
        process.engine.abandon(crashed.owner);
        process.hand_back(&mut broker);
        assert_eq!(broker.kept[0].0, 2);
    }
}

#[test]
fn what_comes_after_a_crashed_record_waits_for_its_dead_letter() {
    let mut broker = Broker::new([20]);
    let by_partition = || config(Ordering::ByPartition);
    while broker.marks(0).deaths.first().map(|it| it.count) != Some(LIMIT - 1)
        || broker.marks(0).running.is_none()
    {
        assert!(broker.deaths < 20, "{:?}", broker.kept);
        assert!(!Process::start(&broker, by_partition()).live(&mut broker, &[(0, 2)]));
    }
    let mut process = Process::start(&broker, by_partition());
    process.read(&broker);
    assert!(process.engine.next_batch().is_none());
    let Crashed {
        owner, seq, lane, ..
    } = process.engine.next_crashed().unwrap();
    for _ in 0..5 {
        process.commit(&mut broker);
        process.hand_over(&mut broker);
        assert_eq!(process.out_of(0), NOTHING, "its dead letter is on the way");
        process.pass(SECOND);
    }
    process
        .engine
        .settle(owner, seq, lane, Outcome::DeadLettered);
    for _ in 0..3 {
        process.hand_over(&mut broker);
        process.commit(&mut broker);
    }
    assert_eq!(process.out_of(0)[0], 3);
}

#[test]
fn a_suspect_that_fails_is_tried_again_alone_while_others_have_their_turn() {
    let mut broker = with_suspects([10, 0]);
    let slow_retries = Config {
        retry: Arc::new(Retry::fixed(ms(100))),
        ..config(Ordering::Unordered)
    };
    let mut process = Process::start(&broker, slow_retries);
    let mut order = Vec::new();
    for _ in 0..60 {
        process.read(&broker);
        process.hand_over(&mut broker);
        if let Some((_, job)) = process.out.first() {
            assert_eq!(process.out.len(), 1);
            assert_eq!(broker.marks(0).running, Some(job.record));
            order.push((job.record, job.attempt));
            match order.len() {
                1 => process.fail(0),
                _ => process.finish(0, &mut broker),
            }
        }
        process.commit(&mut broker);
        process.pass(ms(5));
    }
    let again = order.iter().position(|run| *run == (0, 2));
    assert!(again.is_some_and(|at| at > 3), "{order:?}");
}

/// As while its message is claimed by the process that it has killed.
#[test]
fn a_suspect_that_is_postponed_again_and_again_has_yet_to_run_alone() {
    let mut broker = with_suspects([10, 0]);
    let mut process = Process::start(&broker, config(Ordering::Unordered));
    let mut looks = 0;
    while looks < 50 {
        process.read(&broker);
        process.hand_over(&mut broker);
        if let Some((_, job)) = process.out.first() {
            let record = job.record;
            assert_eq!(process.out.len(), 1);
            assert_eq!(broker.marks(0).running, Some(record), "after {looks} looks");
            if record == 2 {
                looks += 1;
                process.fail_with(0, AfterFailure::Postpone(ms(10)));
            } else {
                process.finish(0, &mut broker);
            }
        }
        process.commit(&mut broker);
        process.pass(ms(5));
    }
}

#[test]
fn what_was_suspect_is_handed_out_freely_once_it_has_all_run() {
    let mut broker = with_suspects([5_000, 0]);
    let mut process = Process::start(&broker, config(Ordering::Unordered));
    let mut most = 0;
    while !broker.all_committed() {
        process.read(&broker);
        process.hand_over(&mut broker);
        most = most.max(process.out.len());
        process.finish_all(&mut broker);
        process.commit(&mut broker);
        process.pass(ms(5));
    }
    assert!(most > 16, "more than a few are out at a time again: {most}");
    assert_eq!(broker.marks(0), Marks::default());
}

#[test]
fn a_quiet_partition_is_suspect_no_more_when_all_has_run() {
    let mut broker = with_suspects([4, 0]);
    let mut process = Process::start(&broker, config(Ordering::Unordered));
    while !broker.all_committed() {
        process.round(&mut broker, &[]);
    }
    process.pass(SECOND);
    process.commit(&mut broker);
    assert!(broker.marks(0).alone > 0, "more may be on its way");
    process.pass(2 * SECOND);
    process.commit(&mut broker);
    assert_eq!(broker.marks(0), Marks::default());
}

#[test]
fn switched_off_nothing_is_marked_and_marks_of_others_are_taken_back() {
    let mut broker = with_suspects([10, 0]);
    let off = Config {
        crash_limit: None,
        ..config(Ordering::Unordered)
    };
    let mut process = Process::start(&broker, off);
    process.read(&broker);
    process.hand_over(&mut broker);
    assert_eq!(process.out_of(0).len(), 10 - broker.kept[0].0 as usize);
    process.finish(9, &mut broker);
    process.pass(SECOND);
    process.commit(&mut broker);
    assert_eq!(broker.marks(0), Marks::default());
    assert!(broker.inherited(0).finished.contains(9));
}

#[test]
fn a_broker_without_room_for_marks_gets_none_and_consumption_goes_on() {
    let mut broker = with_suspects([50, 0]);
    let mut process = Process::start(&broker, config(Ordering::Unordered));
    for _ in 0..2_000 {
        process.read(&broker);
        process.hand_over(&mut broker);
        process.finish_all(&mut broker);
        if process.send_commit() {
            let commit = process.in_flight.as_ref().unwrap();
            let fits = commit.entries.iter().all(|entry| entry.metadata.is_empty());
            let result = match fits {
                true => CommitResult::Accepted,
                false => CommitResult::Shrink,
            };
            process.answer(&mut broker, result);
        }
        process.pass(ms(5));
    }
    assert!(broker.all_committed(), "{:?}", broker.kept);
}

/// How a process of a random history ends, and after how much.
#[derive(Debug, Clone)]
enum Step {
    ReadAndHandOver,
    Finish(Index),
    Fail(Index),
    SendCommit,
    Answer(bool),
    Pass(u64),
    /// From outside.
    Kill,
    HandBack,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => Just(Step::ReadAndHandOver),
        8 => any::<Index>().prop_map(Step::Finish),
        1 => any::<Index>().prop_map(Step::Fail),
        5 => Just(Step::SendCommit),
        5 => (0..8u8).prop_map(|n| Step::Answer(n > 0)),
        3 => (0..1_200u64).prop_map(Step::Pass),
        1 => Just(Step::Kill),
        1 => Just(Step::HandBack),
    ];
    prop::collection::vec(step, 1..300)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn no_record_is_given_up_unless_the_process_died_under_it_alone_as_often_as_the_limit(
        ordering in prop_oneof![Just(Ordering::Unordered), Just(Ordering::ByKey), Just(Ordering::ByPartition)],
        steps in steps(),
        poison in prop::collection::btree_set((0..2usize, 0..40i64), 0..3),
    ) {
        let poison = Vec::from_iter(poison);
        let mut broker = Broker::new([60, 40]);
        let mut died_alone: BTreeMap<(usize, i64), u32> = BTreeMap::new();
        let mut note_deaths = |broker: &Broker| {
            for at in 0..2 {
                if let Some(offset) = broker.marks(at).running {
                    *died_alone.entry((at, offset)).or_default() += 1;
                }
            }
        };
        let mut process = Process::start(&broker, config(ordering));
        for step in steps {
            let mut dies = false;
            match step {
                Step::ReadAndHandOver => {
                    process.read(&broker);
                    process.hand_over(&mut broker);
                    let noted: Vec<_> = (0..2)
                        .filter_map(|at| Some((at, broker.marks(at).running?)))
                        .filter(|(at, offset)| process.out_of(*at).contains(offset))
                        .collect();
                    prop_assert!(noted.len() <= 1, "two suspects at a time: {:?}", noted);
                    for (at, _) in noted {
                        prop_assert_eq!(process.out_of(at).len(), 1);
                    }
                    let kills = |(at, job): &(usize, Job<i64>)| poison.contains(&(*at, job.record));
                    dies = process.out.iter().any(kills);
                }
                Step::Finish(index) if !process.out.is_empty() => {
                    process.finish(index.index(process.out.len()), &mut broker);
                }
                Step::Fail(index) if !process.out.is_empty() && ordering == Ordering::Unordered => {
                    process.fail(index.index(process.out.len()));
                    // Out of attempts is another story.
                    if process.engine.next_given_up().is_some() {
                        break;
                    }
                }
                Step::SendCommit if process.in_flight.is_none() => {
                    process.send_commit();
                }
                Step::Answer(well) => {
                    let result = if well { CommitResult::Accepted } else { CommitResult::Unavailable };
                    process.answer(&mut broker, result);
                }
                Step::Pass(millis) => process.pass(ms(millis)),
                Step::Kill => dies = true,
                Step::HandBack => {
                    process.hand_back(&mut broker);
                    process = Process::start(&broker, config(ordering));
                }
                _ => {}
            }
            if dies {
                note_deaths(&broker);
                process = Process::start(&broker, config(ordering));
            }
        }
        // A last one from outside, and nobody kills any more but the poison.
        note_deaths(&broker);
        broker.deaths = 0;
        while !Process::start(&broker, config(ordering)).live(&mut broker, &poison) {
            note_deaths(&broker);
            prop_assert!(broker.deaths < 40, "never found: {:?}", broker);
        }
        for (at, offset, _) in &broker.dead_letters {
            let deaths = died_alone.get(&(*at, *offset)).copied().unwrap_or(0);
            prop_assert!(deaths >= LIMIT, "{}/{} after {} deaths", at, offset, deaths);
        }
        for place in poison {
            let dead = broker.dead_letters.iter().any(|(at, offset, _)| (*at, *offset) == place);
            prop_assert!(dead, "{:?} is no dead letter", place);
        }
    }
}
