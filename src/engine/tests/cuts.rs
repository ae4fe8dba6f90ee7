//! A log that is cut off below the position: the same log below the cut, other records above it.

use std::collections::BTreeSet;

use proptest::{prelude::*, sample::Index};

use super::*;

/// Ten records of one partition, each with a key of its own.
fn world(ordering: Ordering) -> (World, Ownership) {
    let mut world = World::new(ordering);
    let owner = world.assign(0);
    (0..10).for_each(|offset| world.receive(owner, offset, Some(offset as u64)));
    (world, owner)
}

fn cut(world: &mut World, owner: Ownership, offset: i64) -> CutOff {
    world.engine.cut_off(owner, offset).unwrap()
}

fn nothing_is_left(world: &World) {
    let engine = &world.engine;
    assert_eq!((engine.bytes(), engine.records()), (0, 0));
    assert_eq!(engine.turns_out(), 0);
    assert_eq!(engine.schedule.next_due(), None);
}

#[test]
fn what_is_unfinished_below_the_cut_is_handled_and_holds_the_commit_back() {
    for ordering in each_ordering() {
        let (mut world, owner) = world(ordering);
        assert_eq!(cut(&mut world, owner, 6).void, 4);
        assert_eq!(world.committable(owner), 0);
        world.finish_all();
        assert_eq!(world.handled, [0, 1, 2, 3, 4, 5]);
        assert_eq!(world.committable(owner), 6);
        (6..8).for_each(|offset| world.receive(owner, offset, None));
        assert_eq!(world.committable(owner), 6, "these are others");
        world.finish_all();
        assert_eq!(world.handled[6..], [6, 7]);
        world.commit_all();
        assert_eq!(world.committed(owner), 8);
        nothing_is_left(&world);
    }
}

#[test]
fn what_finished_below_the_cut_stays_finished_and_in_the_snapshot_and_nothing_above_it() {
    let (mut world, owner) = world(Ordering::Unordered);
    world.hand_over();
    for offset in [1, 2, 4, 7, 8] {
        world.finish(owner, offset);
    }
    cut(&mut world, owner, 5);
    let snapshot = |world: &World| {
        let (committed, finished) = world.engine.finished_above_committed(owner).unwrap();
        (committed, finished.from(0).collect::<Vec<_>>())
    };
    assert_eq!(snapshot(&world), (0, vec![1..3, 4..5]));
    assert_eq!(world.status(owner).held, 3);
    (5..9).for_each(|offset| world.receive(owner, offset, None));
    world.hand_over();
    let new = world
        .turns
        .iter()
        .rposition(|turn| turn.jobs[0].record == 8);
    let (job, _) = world.take(new.unwrap());
    world
        .engine
        .finished(owner, job.seq, job.lane, Outcome::Handled);
    assert_eq!(snapshot(&world), (0, vec![1..3, 4..5, 8..9]));
}

#[test]
fn a_committed_offset_above_the_cut_goes_back_to_it() {
    let (mut world, owner) = world(Ordering::ByKey);
    world.finish_all();
    world.commit_all();
    assert_eq!(world.committed(owner), 10);
    cut(&mut world, owner, 7);
    assert_eq!(world.committed(owner), 7, "of this log");
    world.pass(SECOND);
    assert_eq!(world.commit(), Some(vec![(owner, 7)]));
    world.answer(&[CommitResult::Accepted]);
    world.receive(owner, 7, None);
    assert_eq!(world.hand_over(), [7], "it is another one");
}

#[test]
fn a_commit_that_was_on_its_way_at_the_cut_is_replaced() {
    let (mut world, owner) = world(Ordering::Unordered);
    world.finish_all();
    world.pass(SECOND);
    assert_eq!(world.commit(), Some(vec![(owner, 10)]));
    cut(&mut world, owner, 4);
    (4..8).for_each(|offset| world.receive(owner, offset, None));
    world.answer(&[CommitResult::Accepted]);
    world.pass(SECOND);
    assert_eq!(world.commit(), Some(vec![(owner, 4)]));
    world.answer(&[CommitResult::Accepted]);
    assert_eq!(world.committed(owner), 4);
}

#[test]
fn reports_of_records_that_are_gone_change_nothing_and_give_back_what_they_took() {
    for ordering in each_ordering() {
        for how in 0..4 {
            let (mut world, owner) = world(ordering);
            // By partition the first of one turn runs; let it be above the cut.
            if ordering == Ordering::ByPartition {
                world.finish_all();
                world.receive(owner, 10, None);
            }
            let last = world.hand_over().pop().unwrap();
            let out = cut(&mut world, owner, last).out;
            assert_eq!(out, 1, "{ordering:?}");
            let running = world.status(owner).running;
            assert_eq!(
                running,
                if ordering == Ordering::ByPartition {
                    0
                } else {
                    9
                }
            );
            world.receive(owner, last, None);
            match how {
                0 => world.finish(owner, last),
                1 => world.fail(owner, last),
                2 => world.fail_with(owner, last, AfterFailure::GiveUp),
                _ => {
                    let at = world.turn_at(owner, last);
                    world.give_back(at);
                }
            }
            world.handled.clear();
            assert_eq!(world.dead_letter(), None, "it is not given up");
            world.pass(SECOND);
            world.finish_all();
            assert_eq!(world.handled.iter().filter(|it| **it == last).count(), 1);
            assert_eq!(world.committable(owner), last + 1);
            nothing_is_left(&world);
        }
    }
}

#[test]
fn what_waits_for_a_retry_above_the_cut_is_not_tried_again_and_its_key_goes_on() {
    for ordering in each_ordering() {
        let mut world = World::new(ordering);
        let owner = world.assign(0);
        (0..2).for_each(|offset| world.receive(owner, offset, Some(7)));
        world.hand_over();
        world.fail(owner, 0);
        if ordering == Ordering::Unordered {
            world.fail(owner, 1);
        }
        cut(&mut world, owner, 0);
        world.receive(owner, 0, Some(7));
        assert_eq!(
            world.hand_over(),
            [0],
            "{ordering:?}: it has a first attempt"
        );
        assert_eq!(world.turns[0].jobs[0].attempt, 1);
        world.pass(SECOND);
        world.finish_all();
        assert_eq!(world.handled, [0]);
        nothing_is_left(&world);
    }
}

#[test]
fn a_handler_that_works_for_a_record_that_is_gone_holds_back_its_key_and_no_drain() {
    let mut world = World::new(Ordering::ByKey);
    let owner = world.assign(0);
    world.receive(owner, 0, Some(7));
    world.hand_over();
    cut(&mut world, owner, 0);
    world.receive(owner, 0, Some(7));
    world.receive(owner, 1, Some(8));
    assert_eq!(
        world.hand_over(),
        [0, 1],
        "the old one, and that of another key"
    );
    world.finish(owner, 1);
    world.engine.drain(owner);
    assert!(world.engine.is_drained(owner));
    assert_eq!(world.committable(owner), 0);
}

#[test]
fn a_dead_letter_that_is_on_its_way_at_the_cut_is_awaited_by_its_key_and_by_nobody_else() {
    let mut world = World::new(Ordering::ByKey);
    let owner = world.assign(0);
    (0..2).for_each(|offset| world.receive(owner, offset, Some(offset as u64)));
    world.hand_over();
    (0..2).for_each(|offset| world.fail_with(owner, offset, AfterFailure::GiveUp));
    let sent = world.engine.next_given_up().unwrap();
    cut(&mut world, owner, 0);
    assert!(
        world.engine.next_given_up().is_none(),
        "the other is not sent"
    );
    (0..2).for_each(|offset| world.receive(owner, offset, Some(offset as u64)));
    assert_eq!(world.hand_over(), [1]);
    world.finish(owner, 1);
    assert_eq!(world.status(owner).dead_lettering, 0);
    world
        .engine
        .settle(owner, sent.seq, sent.lane, Outcome::DeadLettered);
    assert_eq!(world.hand_over(), [0]);
    world.finish(owner, 0);
    assert_eq!(world.committable(owner), 2);
    assert_eq!(world.status(owner).counts.dead_lettered, 0);
    nothing_is_left(&world);
}

#[test]
fn what_an_earlier_owner_finished_above_the_cut_is_handled_and_below_it_not() {
    let mut world = World::new(Ordering::Unordered);
    let inherited = Inherited {
        finished: FinishedAbove::of([3..5, 6..20].into_iter()),
        ..Inherited::default()
    };
    let owner = world.engine.assign(Some(2), Some(2), inherited);
    world.receive(owner, 2, None);
    // Nothing of what was cut off has been read yet.
    let cut = cut(&mut world, owner, 8);
    assert_eq!((cut.position, cut.void), (3, 0));
    let mut handed = Vec::new();
    for offset in 3..12 {
        let received = world.engine.receive(owner, offset, None, SIZE, offset);
        if received == Received::Queued {
            handed.push(offset);
        }
    }
    assert_eq!(handed, [5, 8, 9, 10, 11]);
}

fn inherits(epoch: Option<i32>) -> (World, Ownership) {
    let mut world = World::new(Ordering::Unordered);
    let inherited = Inherited {
        finished: FinishedAbove::of([3..5, 6..20].into_iter()).with_epoch(epoch),
        ..Inherited::default()
    };
    let owner = world.engine.assign(Some(2), Some(2), inherited);
    (world, owner)
}

/// Receives these offsets, the first of them under this leader, and returns what is not finished already.
fn read(
    world: &mut World,
    owner: Ownership,
    epoch: i32,
    offsets: std::ops::Range<i64>,
) -> Vec<i64> {
    world.engine.elected(owner, offsets.start, epoch);
    let mut queued = Vec::new();
    for offset in offsets {
        let received = world.engine.receive(owner, offset, None, SIZE, offset);
        if received == Received::Queued {
            queued.push(offset);
        }
    }
    queued
}

#[test]
fn what_is_written_under_a_later_leader_than_all_that_was_finished_is_another_record() {
    let (mut world, owner) = inherits(Some(4));
    assert_eq!(read(&mut world, owner, 3, 2..8), [2, 5]);
    assert_eq!(read(&mut world, owner, 4, 8..12), NOTHING);
    // Cut off at 12, unseen: nobody had read so far.
    assert_eq!(read(&mut world, owner, 5, 12..15), [12, 13, 14]);
    let entry = world.engine.partition(owner).unwrap().commit_entry(false);
    let entry = entry.unwrap();
    let told = decode_snapshot(entry.metadata.as_bytes(), Identity::default(), 2).unwrap();
    let ranges = told.finished.from(0).collect::<Vec<_>>();
    assert_eq!(
        (ranges, told.finished.epoch()),
        (vec![3..5, 6..12], Some(5))
    );
}

#[test]
fn where_no_epoch_was_written_what_was_finished_is_believed() {
    let (mut world, owner) = inherits(None);
    assert_eq!(read(&mut world, owner, 3, 2..8), [2, 5]);
    assert_eq!(read(&mut world, owner, 7, 8..21), [20]);
}

#[test]
fn what_a_process_remembers_and_what_was_committed_each_have_their_epoch() {
    let set = |range, epoch| FinishedAbove::of(std::iter::once(range)).with_epoch(Some(epoch));
    for (committed, remembered) in [(set(3..9, 2), set(6..12, 4)), (set(6..12, 4), set(3..9, 2))] {
        let inherited = Inherited {
            finished: committed,
            ..Inherited::default()
        };
        let inherited = inherited.and_remembered(Some(2), Some((2, remembered)));
        assert_eq!(inherited.finished.epoch(), Some(2));
        assert!(inherited.finished.from(0).eq(std::iter::once(3..12)));
        let mut world = World::new(Ordering::Unordered);
        let owner = world.engine.assign(Some(2), Some(2), inherited);
        assert_eq!(read(&mut world, owner, 2, 2..5), [2]);
        assert_eq!(read(&mut world, owner, 3, 5..14), [5, 12, 13]);
    }
}

#[test]
fn what_a_process_remembers_of_earlier_leaders_does_not_make_a_commit_less_believed() {
    let set = |range, epoch| FinishedAbove::of(std::iter::once(range)).with_epoch(Some(epoch));
    for (remembered, first) in [(2, 6), (5, 3)] {
        let inherited = Inherited {
            finished: set(6..12, 4),
            ..Inherited::default()
        };
        let inherited = inherited.and_remembered(Some(2), Some((2, set(3..5, remembered))));
        let mut world = World::new(Ordering::Unordered);
        let owner = world.engine.assign(Some(2), Some(2), inherited);
        let entry = world.engine.partition(owner).unwrap().commit_entry(false);
        let text = entry.unwrap().metadata;
        let read = decode_snapshot(text.as_bytes(), Identity::default(), 2).unwrap();
        assert_eq!(read.finished.from(0).next().unwrap().start, first);
        assert_eq!(read.finished.from(0).last(), Some(6..12));
        assert_eq!(read.finished.epoch(), Some(4));
    }
}

#[test]
fn at_most_once_a_new_record_waits_for_a_commit_that_was_sent_after_the_cut() {
    let mut world = World::with(Ordering::Unordered, |config| {
        config.guarantee = Guarantee::AtMostOnce;
    });
    let owner = world.partition(0..10);
    assert_eq!(world.commit(), Some(vec![(owner, 10)]));
    cut(&mut world, owner, 4);
    (4..6).for_each(|offset| world.receive(owner, offset, None));
    world.answer(&[CommitResult::Accepted]);
    assert_eq!(world.hand_over(), NOTHING, "that was of the log as it was");
    assert_eq!(world.commit(), Some(vec![(owner, 6)]));
    world.answer(&[CommitResult::Accepted]);
    assert_eq!(world.hand_over(), [0, 1, 2, 3, 4, 5]);
}

#[test]
fn a_record_that_killed_the_process_and_is_gone_leaves_no_blame_at_its_offset() {
    let mut world = World::with(Ordering::Unordered, |config| config.crash_limit = Some(1));
    let deaths = |offset| crate::engine::snapshot::Deaths { offset, count: 1 };
    let inherited = Inherited {
        marks: Marks {
            deaths: vec![deaths(5)],
            ..Marks::default()
        },
        ..Inherited::default()
    };
    let owner = world.engine.assign(Some(5), Some(5), inherited);
    (5..7).for_each(|offset| world.receive(owner, offset, None));
    cut(&mut world, owner, 5);
    world.receive(owner, 5, None);
    for _ in 0..10 {
        world.commit_all();
        world.finish_all();
    }
    assert!(world.engine.next_crashed().is_none());
    assert_eq!(world.committable(owner), 6);
}

#[test]
fn a_suspect_does_not_run_beside_a_record_that_is_gone() {
    let mut world = World::with(Ordering::Unordered, |config| config.crash_limit = Some(3));
    let inherited = Inherited {
        marks: Marks {
            alone: 3,
            ..Marks::default()
        },
        ..Inherited::default()
    };
    let owner = world.engine.assign(Some(0), Some(0), inherited);
    world.receive(owner, 0, None);
    let hand_over_all = |world: &mut World| {
        for _ in 0..5 {
            world.hand_over();
            world.commit_all();
        }
        world.turns.len()
    };
    assert_eq!(hand_over_all(&mut world), 1);
    cut(&mut world, owner, 0);
    world.receive(owner, 0, None);
    assert_eq!(hand_over_all(&mut world), 1, "the one that is gone");
    world.finish(owner, 0);
    assert_eq!(hand_over_all(&mut world), 1, "the one that is there");
    world.finish(owner, 0);
    assert_eq!(world.committable(owner), 1);
}

#[test]
fn a_partition_that_is_given_away_is_not_cut_off() {
    let (mut world, owner) = world(Ordering::Unordered);
    world.engine.drain(owner);
    assert_eq!(world.engine.cut_off(owner, 3), None);
}

/// What is known of a record by somebody who looks at the log: each offset with how often it was written.
#[derive(Debug, Default)]
struct Model {
    /// By offset: which record is there, and whether it has finished.
    log: Vec<(u32, bool)>,
    written: u32,
    /// Offsets that were read.
    position: usize,
}

impl Model {
    fn committable(&self) -> i64 {
        let read = &self.log[..self.position];
        let open = read.iter().position(|(_, finished)| !finished);
        open.unwrap_or(self.position) as i64
    }

    fn finished_above(&self) -> BTreeSet<i64> {
        let above = self.committable() as usize..self.position;
        above
            .filter(|at| self.log[*at].1)
            .map(|at| at as i64)
            .collect()
    }
}

/// Of the turns that are out.
#[derive(Debug, Clone, Copy)]
enum Which {
    First,
    Any(Index),
}

#[derive(Debug, Clone)]
enum Step {
    Read(usize),
    HandOver,
    Finish(Which),
    Fail(Which),
    GiveUp(Which),
    GiveBack(Which),
    DeadLetter,
    Pass,
    Cut(Index),
    Commit,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let which = || any::<Index>().prop_map(Which::Any);
    let step = prop_oneof![
        3 => (1..12usize).prop_map(Step::Read),
        4 => Just(Step::HandOver),
        6 => which().prop_map(Step::Finish),
        2 => which().prop_map(Step::Fail),
        1 => which().prop_map(Step::GiveUp),
        1 => which().prop_map(Step::GiveBack),
        2 => Just(Step::DeadLetter),
        2 => Just(Step::Pass),
        1 => any::<Index>().prop_map(Step::Cut),
        1 => Just(Step::Commit),
    ];
    prop::collection::vec(step, 1..80)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// A record carries how often its offset had been written, so that nobody takes it for another.
    #[test]
    fn after_any_cut_the_engine_says_of_the_log_what_a_look_at_it_would(
        ordering in prop::sample::select(each_ordering().to_vec()),
        keys in 1..5u64,
        steps in steps(),
    ) {
        let config = World::new(ordering).engine.config;
        let mut now = Instant::now();
        let mut engine: Engine<(usize, u32), ()> = Engine::new(config, now);
        let owner = engine.assign(Some(0), Some(0), Inherited::default());
        let mut model = Model::default();
        let mut out: Vec<VecDeque<Job<(usize, u32)>>> = Vec::new();
        let mut letters = Vec::new();
        // To the end: all that is left is done.
        let rest = (0..150).flat_map(|_| [Step::HandOver, Step::Finish(Which::First), Step::DeadLetter, Step::Pass]);
        for step in steps.into_iter().chain(rest) {
            let finish = |model: &mut Model, (offset, written): (usize, u32)| {
                if let Some(known) = model.log.get_mut(offset).filter(|it| it.0 == written) {
                    assert!(!known.1, "offset {offset} finished twice");
                    known.1 = true;
                }
            };
            let ends = |out: &mut Vec<VecDeque<_>>, which| -> Option<(Job<(usize, u32)>, VecDeque<_>)> {
                let at = match which {
                    Which::Any(at) if !out.is_empty() => at.index(out.len()),
                    _ => 0,
                };
                let mut turn = (at < out.len()).then(|| out.swap_remove(at))?;
                Some((turn.pop_front()?, turn))
            };
            match step {
                Step::Read(count) => for _ in 0..count {
                    model.written += 1;
                    model.log.push((model.written, false));
                    let record = (model.position, model.written);
                    let offset = model.position as i64;
                    model.position += 1;
                    let key = Some(u64::from(model.written) % keys);
                    prop_assert_eq!(engine.receive(owner, offset, key, 10, record), Received::Queued);
                },
                Step::HandOver => while let Some(batch) = engine.next_batch() {
                    let mut jobs = batch.jobs.into_iter();
                    while let Some(first) = jobs.next() {
                        let followers = first.followers as usize;
                        out.push(std::iter::once(first).chain(jobs.by_ref().take(followers)).collect());
                    }
                },
                Step::Finish(at) => if let Some((job, turn)) = ends(&mut out, at) {
                    finish(&mut model, job.record);
                    engine.finished(owner, job.seq, job.lane, Outcome::Handled);
                    if !turn.is_empty() {
                        out.push(turn);
                    }
                },
                Step::Fail(at) | Step::GiveUp(at) => if let Some((job, turn)) = ends(&mut out, at) {
                    let then = match step {
                        Step::Fail(_) => AfterFailure::Retry(None),
                        _ => AfterFailure::GiveUp,
                    };
                    engine.failed(owner, Failed { job, then, cause: () });
                    engine.not_started(owner, turn.into());
                },
                Step::GiveBack(at) => if let Some((job, mut turn)) = ends(&mut out, at) {
                    turn.push_front(job);
                    engine.not_started(owner, turn.into());
                },
                Step::DeadLetter => {
                    letters.extend(engine.next_given_up());
                    if letters.len() > 1 || engine.given_up.is_empty() && !letters.is_empty() {
                        let GivenUp { seq, lane, record, .. } = letters.remove(0);
                        finish(&mut model, record);
                        engine.settle(owner, seq, lane, Outcome::DeadLettered);
                    }
                }
                Step::Pass => {
                    now += ms(50);
                    engine.advance(now);
                }
                Step::Cut(at) => {
                    let at = at.index(model.position + 1);
                    let open = model.log[at..].iter().filter(|(_, finished)| !finished).count();
                    let cut = engine.cut_off(owner, at as i64).unwrap();
                    prop_assert_eq!(cut.void, open);
                    model.log.truncate(at);
                    model.position = at;
                }
                Step::Commit => if let Some(commit) = engine.next_commit() {
                    prop_assert_eq!(commit.entries[0].offset, model.committable());
                    engine.commit_answered(&[CommitResult::Accepted], CommitResult::Accepted);
                },
            }
            let status = engine.status(owner).unwrap();
            prop_assert_eq!(status.position, Some(model.position as i64));
            prop_assert_eq!(status.committable, Some(model.committable()));
            let entry = engine.partition(owner).unwrap().commit_entry(false).unwrap();
            let mut above = decode_snapshot(entry.metadata.as_bytes(), Identity::default(), entry.offset).unwrap();
            let told: BTreeSet<_> = (entry.offset..entry.offset + 200).filter(|at| above.finished.contains(*at)).collect();
            prop_assert_eq!(told, model.finished_above());
            let open = model.log.iter().filter(|(_, finished)| !finished).count();
            prop_assert_eq!(engine.records(), open);
            prop_assert_eq!(engine.bytes(), 10 * open);
        }
        prop_assert!(out.is_empty() && letters.is_empty());
        prop_assert_eq!(model.committable(), model.position as i64);
        prop_assert_eq!(engine.turns_out(), 0);
        let partition = engine.partition(owner).unwrap();
        prop_assert!(partition.out == 0 && partition.given_up == 0 && partition.is_drained());
    }
}
