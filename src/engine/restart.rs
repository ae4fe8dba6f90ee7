//! Tests: one ownership after another, with nothing between them but what was committed.

use std::{
    collections::{BTreeMap, BTreeSet},
    iter,
    ops::Range,
    time::{Duration, Instant},
};

use proptest::prelude::*;

use super::{
    AfterFailure, Batch, Commit, CommitEntry, CommitResult, Config, Engine, Failed, Identity,
    Inherited, Job, Ordering, Outcome, Ownership, PartitionStatus, Received,
    snapshot::{self, FinishedAbove},
};
use crate::backoff::Retry;

const TICK: Duration = Duration::from_secs(1);

fn config(ordering: Ordering) -> Config {
    Config {
        guarantee: crate::Guarantee::default(),
        ordering,
        concurrency: 1_000_000,
        window: 1 << 17,
        max_bytes: usize::MAX,
        max_records: 1 << 30,
        retry: Retry::exponential(TICK, TICK).max_attempts(5).into(),
        commit_interval: TICK,
        crash_limit: None,
        breaker: Some(super::OutageBreaker::new()),
        seed: 7,
    }
}

fn identity() -> Identity {
    Identity::new("cluster", "group", "topic", 0)
}

/// A process that owns the one partition there is, until it is dropped.
struct Life {
    engine: Engine<i64, ()>,
    owner: Ownership,
    now: Instant,
    /// Handed out and not answered, by offset.
    out: BTreeMap<i64, Job<i64>>,
    handed_out: Vec<i64>,
}

/// What the broker keeps between two lives.
#[derive(Debug, Clone, Default)]
struct Kept {
    offset: i64,
    metadata: String,
}

impl Life {
    fn begin(kept: &Kept, ordering: Ordering) -> Self {
        let inherited = snapshot::decode(kept.metadata.as_bytes(), identity(), kept.offset)
            .expect("it stands where it was written");
        let now = Instant::now();
        let mut engine = Engine::new(config(ordering), now);
        let owner = engine.assign(Some(kept.offset), Some(kept.offset), inherited);
        Self {
            engine,
            owner,
            now,
            out: BTreeMap::new(),
            handed_out: Vec::new(),
        }
    }

    fn receive(&mut self, offset: i64) -> Received {
        let received =
            self.engine
                .receive(self.owner, offset, Some(offset as u64 % 5), 100, offset);
        self.hand_out();
        received
    }

    fn hand_out(&mut self) {
        while let Some(Batch { jobs, .. }) = self.engine.next_batch() {
            self.handed_out.extend(jobs.iter().map(|job| job.record));
            self.out
                .extend(jobs.into_iter().map(|job| (job.record, job)));
        }
    }

    fn receive_all(&mut self, offsets: impl IntoIterator<Item = i64>) {
        for offset in offsets {
            self.receive(offset);
        }
    }

    fn take(&mut self, offset: i64) -> Job<i64> {
        self.out.remove(&offset).expect("it was handed out")
    }

    fn finish(&mut self, offset: i64) {
        let job = self.take(offset);
        self.engine
            .finished(self.owner, job.seq, job.lane, Outcome::Handled);
    }

    fn fail(&mut self, offset: i64) {
        let failed = Failed {
            job: self.take(offset),
            then: AfterFailure::Retry(None),
            cause: (),
        };
        self.engine.failed(self.owner, failed);
    }

    /// The commit that is due, if one is.
    fn next_commit(&mut self) -> Option<Commit> {
        self.now += TICK;
        self.engine.advance(self.now);
        self.engine.next_commit()
    }

    fn commit(&mut self, kept: &mut Kept) -> CommitEntry {
        let Commit { mut entries } = self.next_commit().expect("a commit is due");
        let entry = entries.remove(0);
        assert!(entry.metadata.len() <= snapshot::LIMIT);
        self.engine
            .commit_answered(&[CommitResult::Accepted], CommitResult::Accepted);
        kept.offset = entry.offset;
        kept.metadata.clone_from(&entry.metadata);
        entry
    }

    fn status(&self) -> PartitionStatus {
        self.engine.status(self.owner).expect("it is owned")
    }
}

/// What a snapshot says is finished.
fn ranges(entry: &CommitEntry) -> Vec<Range<i64>> {
    snapshot::decode(entry.metadata.as_bytes(), identity(), entry.offset)
        .expect("it was just written")
        .finished
        .from(0)
        .collect()
}

#[test]
fn what_finished_out_of_order_is_not_handed_out_to_the_next_owner() {
    let mut kept = Kept::default();
    let mut first = Life::begin(&kept, Ordering::Unordered);
    first.receive_all(0..10);
    for offset in [8, 3, 4, 0, 6] {
        first.finish(offset);
    }
    first.fail(2);
    first.commit(&mut kept);
    assert_eq!(kept.offset, 1);

    let mut second = Life::begin(&kept, Ordering::Unordered);
    second.receive_all(1..12);
    assert_eq!(second.handed_out, [1, 2, 5, 7, 9, 10, 11]);
    let status = second.status();
    assert_eq!((status.counts.already_finished, status.held), (4, 4));
    assert_eq!(status.counts.received, 11);
    assert_eq!(status.bytes, 700, "what is finished costs nothing");
    for offset in second.handed_out.clone() {
        second.finish(offset);
    }
    let entry = second.commit(&mut kept);
    assert_eq!((entry.offset, entry.metadata.as_str()), (12, ""));
    assert_eq!(second.engine.bytes(), 0);
}

#[test]
fn what_finished_above_an_unmoved_watermark_is_committed() {
    let mut kept = Kept::default();
    let mut life = Life::begin(&kept, Ordering::Unordered);
    life.receive_all(0..5);
    life.finish(2);
    assert_eq!(
        ranges(&life.commit(&mut kept)),
        vec![Range { start: 2, end: 3 }]
    );
    assert_eq!(life.next_commit(), None, "nothing has changed since");
    life.finish(4);
    let entry = life.commit(&mut kept);
    assert_eq!((entry.offset, ranges(&entry)), (0, vec![2..3, 4..5]));
}

#[test]
fn records_finished_by_an_earlier_owner_move_the_watermark_and_are_committed() {
    let mut kept = Kept::default();
    let mut first = Life::begin(&kept, Ordering::Unordered);
    first.receive_all(0..4);
    first.finish(1);
    first.finish(2);
    first.commit(&mut kept);

    let mut second = Life::begin(&kept, Ordering::Unordered);
    second.receive(0);
    second.finish(0);
    assert_eq!(second.commit(&mut kept).offset, 1);
    // All that was received is finished; what comes next advances the watermark without any verdict.
    assert_eq!(second.receive(1), Received::AlreadyFinished);
    assert_eq!(second.receive(2), Received::AlreadyFinished);
    let entry = second.commit(&mut kept);
    assert_eq!((entry.offset, entry.metadata.as_str()), (3, ""));
}

// T9b
#[test]
fn a_second_restart_before_the_inherited_ranges_were_passed_repeats_nothing() {
    let mut kept = Kept::default();
    let mut first = Life::begin(&kept, Ordering::Unordered);
    first.receive_all(0..100);
    (50..100).for_each(|offset| first.finish(offset));
    first.commit(&mut kept);

    let mut second = Life::begin(&kept, Ordering::Unordered);
    second.receive_all(0..60);
    second.finish(0);
    second.finish(20);
    let entry = second.commit(&mut kept);
    assert_eq!((entry.offset, ranges(&entry)), (1, vec![20..21, 50..100]));

    let mut third = Life::begin(&kept, Ordering::Unordered);
    third.receive_all(1..101);
    let expected: Vec<i64> = (1..20).chain(21..50).chain([100]).collect();
    assert_eq!(third.handed_out, expected);
}

// T3: offsets that are not in the log are nothing that could be handed out.
#[test]
fn gaps_in_the_log_do_not_split_what_is_finished() {
    let mut kept = Kept::default();
    let mut first = Life::begin(&kept, Ordering::Unordered);
    first.receive_all([0, 10, 20, 31, 1_000]);
    for offset in [10, 20, 1_000] {
        first.finish(offset);
    }
    assert_eq!(ranges(&first.commit(&mut kept)), [10..21, 1_000..1_001]);

    let mut second = Life::begin(&kept, Ordering::Unordered);
    second.receive_all([0, 10, 20, 31, 1_000, 1_001]);
    assert_eq!(second.handed_out, [0, 31, 1_001]);
}

// T9
#[test]
fn a_snapshot_that_is_cut_says_how_many_records_it_leaves_out() {
    let mut kept = Kept::default();
    let mut life = Life::begin(&kept, Ordering::Unordered);
    life.receive_all(0..=120_000);
    (2..=120_000)
        .step_by(2)
        .for_each(|offset| life.finish(offset));
    let entry = life.commit(&mut kept);
    let kept_ranges = ranges(&entry);
    assert_eq!(entry.offset, 0);
    assert_eq!(kept_ranges.len() + entry.cut, 60_000, "all accounted for");
    assert!(kept_ranges.len() > 12_000, "{}", kept_ranges.len());
    assert_eq!(
        kept_ranges.last().map(|range| range.end),
        Some(kept_ranges.len() as i64 * 2 + 1),
        "the near end is kept"
    );
    assert_eq!(life.status().beyond_snapshot, entry.cut);
    let handed_out = kept_ranges.len();

    let mut next = Life::begin(&kept, Ordering::Unordered);
    next.receive_all(0..=120_000);
    assert_eq!(next.handed_out.len(), 120_001 - handed_out);
    next.handed_out
        .clone()
        .into_iter()
        .for_each(|offset| next.finish(offset));
    let entry = next.commit(&mut kept);
    assert_eq!((entry.cut, next.status().beyond_snapshot), (0, 0));
}

#[test]
fn a_broker_that_takes_less_metadata_gets_less_at_once() {
    let broker_limit = 100;
    let mut life = Life::begin(&Kept::default(), Ordering::Unordered);
    life.receive_all(0..4_000);
    (0..2_000).for_each(|n| life.finish(2 * n + 1));
    let mut commit = life.next_commit().expect("a commit is due");
    let mut refused = 0;
    let entry = loop {
        let entry = commit.entries[0].clone();
        if entry.metadata.len() <= broker_limit {
            break entry;
        }
        refused += 1;
        life.engine
            .commit_answered(&[CommitResult::Shrink], CommitResult::Shrink);
        commit = life
            .engine
            .next_commit()
            .expect("a smaller one goes out without any wait");
    };
    assert!(refused <= 4, "{refused}");
    assert!(!entry.metadata.is_empty());
    assert_eq!(ranges(&entry)[0], 1..2);
    assert_eq!(ranges(&entry).len() + entry.cut, 2_000);
    life.engine
        .commit_answered(&[CommitResult::Accepted], CommitResult::Accepted);
    life.finish(0);
    let next = life.next_commit().expect("the watermark moved");
    assert!(
        next.entries[0].metadata.len() <= broker_limit,
        "it is remembered"
    );
}

#[test]
fn a_partition_that_was_lost_and_comes_back_repeats_neither_our_work_nor_what_others_did_meanwhile()
{
    let mut kept = Kept::default();
    let mut ours = Life::begin(&kept, Ordering::Unordered);
    ours.receive_all(0..10);
    ours.finish(0);
    ours.commit(&mut kept);
    ours.finish(5);
    let remembered = ours.engine.finished_above_committed(ours.owner);

    let mut theirs = Life::begin(&kept, Ordering::Unordered);
    theirs.receive_all(1..10);
    for offset in [1, 7, 8] {
        theirs.finish(offset);
    }
    theirs.commit(&mut kept);

    let inherited = |remembered| {
        let snapshot = snapshot::decode(kept.metadata.as_bytes(), identity(), kept.offset);
        let inherited = snapshot
            .unwrap()
            .and_remembered(Some(kept.offset), remembered);
        inherited.finished
    };
    let mut ours_again = inherited(remembered);
    let left: Vec<_> = (kept.offset..10)
        .filter(|offset| !ours_again.contains(*offset))
        .collect();
    assert_eq!(left, [2, 3, 4, 6, 9]);
    let set_back = Some((kept.offset + 1, FinishedAbove::of(iter::once(3..4))));
    assert_eq!(
        inherited(set_back),
        inherited(None),
        "an offset that was set back asks for it again"
    );
}

#[test]
fn what_was_inherited_and_does_not_fit_any_more_counts_as_left_out() {
    let mut kept = Kept::default();
    let mut first = Life::begin(&kept, Ordering::Unordered);
    first.receive_all(0..800);
    (0..400).for_each(|n| first.finish(2 * n + 1));
    first.commit(&mut kept);

    let mut second = Life::begin(&kept, Ordering::Unordered);
    second.receive_all(0..10);
    second.finish(4);
    second.next_commit().expect("a commit is due");
    second
        .engine
        .commit_answered(&[CommitResult::Shrink], CommitResult::Shrink);
    let entry = second.engine.next_commit().expect("a smaller one").entries;
    let named: i64 = ranges(&entry[0]).iter().map(|r| r.end - r.start).sum();
    assert!(entry[0].cut > 0);
    assert_eq!(named as usize + entry[0].cut, 401);
}

#[test]
fn too_much_metadata_of_one_partition_costs_its_neighbours_nothing() {
    let now = Instant::now();
    let mut engine: Engine<i64, ()> = Engine::new(config(Ordering::Unordered), now);
    let owners = [0, 1].map(|partition| {
        let inherited = Inherited {
            identity: Identity::new("cluster", "group", "topic", partition),
            ..Inherited::default()
        };
        engine.assign(Some(0), Some(0), inherited)
    });
    for owner in owners {
        for offset in 0..400 {
            engine.receive(owner, offset, None, 1, offset);
        }
        while let Some(batch) = engine.next_batch() {
            for job in batch.jobs.iter().filter(|job| job.record % 3 == 1) {
                engine.finished(batch.owner, job.seq, job.lane, Outcome::Handled);
            }
        }
    }
    engine.advance(now + TICK);
    let both = engine.next_commit().expect("a commit is due");
    assert_eq!(both.entries.len(), 2);
    let whole = both.entries[1].metadata.clone();
    // The broker refused one, and the client reports that for both.
    engine.commit_answered(&[CommitResult::Shrink; 2], CommitResult::Shrink);
    let mut accepted = Vec::new();
    while let Some(commit) = engine.next_commit() {
        let [entry] = commit.entries.as_slice() else {
            panic!("one by one, not {commit:?}")
        };
        let too_long = entry.owner == owners[0] && entry.metadata.len() > 60;
        let result = if too_long {
            CommitResult::Shrink
        } else {
            accepted.push(entry.clone());
            CommitResult::Accepted
        };
        engine.commit_answered(&[result], result);
    }
    let [first, second] = accepted.as_slice() else {
        panic!("each went through once: {accepted:?}")
    };
    let (shrunk, untouched) = if first.owner == owners[0] {
        (first, second)
    } else {
        (second, first)
    };
    assert!(shrunk.cut > 0);
    assert_eq!((untouched.cut, &untouched.metadata), (0, &whole));
}

#[test]
fn a_broker_that_refuses_even_no_metadata_is_not_asked_in_a_tight_loop() {
    let mut life = Life::begin(&Kept::default(), Ordering::Unordered);
    life.receive_all(0..10);
    life.finish(5);
    let mut asked = 0;
    life.now += TICK;
    life.engine.advance(life.now);
    while life.engine.next_commit().is_some() {
        asked += 1;
        assert!(asked < 20, "asked for ever");
        life.engine
            .commit_answered(&[CommitResult::Shrink], CommitResult::Shrink);
    }
    assert_eq!(life.status().beyond_snapshot, 1);
}

#[test]
fn the_last_commit_of_a_partition_shrinks_too() {
    let mut life = Life::begin(&Kept::default(), Ordering::Unordered);
    life.receive_all(0..400);
    (0..200).for_each(|n| life.finish(2 * n + 1));
    life.engine.drain(life.owner);
    let whole = life
        .engine
        .final_commit(&[life.owner], false)
        .expect("there is something to commit");
    life.engine
        .commit_answered(&[CommitResult::Shrink], CommitResult::Shrink);
    let less = life
        .engine
        .final_commit(&[life.owner], true)
        .expect("it is tried again");
    assert!(less.entries[0].metadata.len() <= whole.entries[0].metadata.len() / 2);
    assert!(!less.entries[0].metadata.is_empty());
}

/// A life: how many records arrive, which of those handed out finish (by a choice for each), and when it commits last.
#[derive(Debug, Clone)]
struct Plan {
    arrive: usize,
    finish: Vec<prop::sample::Index>,
    commit_after: prop::sample::Index,
}

fn plan() -> impl Strategy<Value = Plan> {
    let finish = prop::collection::vec(any::<prop::sample::Index>(), 0..60);
    (1..80usize, finish, any::<prop::sample::Index>()).prop_map(|(arrive, finish, commit_after)| {
        Plan {
            arrive,
            finish,
            commit_after,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn over_any_lives_nothing_acknowledged_as_finished_comes_again_and_nothing_is_lost(
        gaps in prop::collection::vec(1..4i64, 100),
        lives in prop::collection::vec(plan(), 1..6),
        ordering in prop_oneof![Just(Ordering::Unordered), Just(Ordering::ByKey)],
    ) {
        let log: Vec<i64> = gaps
            .iter()
            .scan(0, |offset, gap| {
                *offset += gap;
                Some(*offset)
            })
            .collect();
        let mut kept = Kept::default();
        // Finished, and acknowledged as such by the broker.
        let mut safe = BTreeSet::new();
        for plan in lives {
            let mut life = Life::begin(&kept, ordering);
            let mut finished = BTreeSet::new();
            let arrives = log.iter().filter(|offset| **offset >= kept.offset).take(plan.arrive);
            life.receive_all(arrives.copied());
            for offset in &life.handed_out {
                prop_assert!(!safe.contains(offset), "{} came again", offset);
            }
            let commit_after = plan.commit_after.index(plan.finish.len() + 1);
            for (at, which) in plan.finish.iter().enumerate() {
                if life.out.is_empty() {
                    break;
                }
                // A turn runs in its order: the first record of the lane that was hit.
                let lane = life.out.values().nth(which.index(life.out.len())).map(|job| job.lane);
                let first = life.out.values().find(|job| Some(job.lane) == lane);
                let unordered = life.out.keys().nth(which.index(life.out.len())).copied();
                let offset = match ordering {
                    Ordering::Unordered => unordered,
                    _ => first.map(|job| job.record),
                };
                let offset = offset.expect("something is out");
                life.finish(offset);
                finished.insert(offset);
                if at + 1 == commit_after {
                    life.commit(&mut kept);
                    safe.extend(finished.iter().copied());
                }
            }
        }
        // A last life reads to the end: what is neither safe nor handed out now would be lost.
        let mut last = Life::begin(&kept, ordering);
        last.receive_all(log.iter().copied().filter(|offset| *offset >= kept.offset));
        while let Some((&offset, _)) = last.out.first_key_value() {
            last.finish(offset);
            last.hand_out();
        }
        let mut all = safe.clone();
        for offset in last.handed_out {
            prop_assert!(all.insert(offset), "{} came again", offset);
        }
        prop_assert_eq!(all.into_iter().collect::<Vec<_>>(), log);
    }
}
