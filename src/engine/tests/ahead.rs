//! At most once: how much is committed before it is handled, and what becomes of it when there is no time left.

use super::{
    super::partition::Forfeited,
    CommitResult::{Accepted, Unavailable},
    *,
};

const HANDLERS: usize = 4;

fn world(ordering: Ordering) -> World {
    World::with(ordering, |config| {
        config.guarantee = Guarantee::AtMostOnce;
        config.concurrency = HANDLERS;
        config.retry = Arc::new(Retry::fixed(15 * SECOND).max_attempts(5));
    })
}

impl World {
    /// Reads as much as there is room for, one partition after another, and commits it.
    fn read_and_commit(&mut self, owners: &[Ownership], next: &mut i64) -> usize {
        let before = *next;
        for owner in owners {
            for _ in 0..self.engine.room(*owner) {
                self.receive(*owner, *next, Some(*next as u64 % 3));
                *next += 1;
            }
        }
        while let Some(commit) = self.commit() {
            self.answer(&vec![Accepted; commit.len()]);
        }
        (*next - before) as usize
    }

    /// Committed and not finished, over all partitions.
    fn ahead(&self, owners: &[Ownership]) -> usize {
        let left = |owner: &Ownership| self.status(*owner).committed_left;
        owners.iter().map(left).sum()
    }

    fn give_up_all(&mut self) -> Vec<i64> {
        std::iter::from_fn(|| self.dead_letter()).collect()
    }
}

#[test]
fn no_more_is_committed_ahead_than_twice_the_handlers_over_all_partitions_together() {
    for ordering in each_ordering() {
        let mut world = world(ordering);
        let owners = [0, 1, 2, 3, 4].map(|_| world.assign(0));
        let mut next = 0;
        for round in 0..50 {
            world.read_and_commit(&owners, &mut next);
            let ahead = world.ahead(&owners);
            assert!(ahead <= 2 * HANDLERS, "{ahead} {ordering:?}");
            world.hand_over();
            assert!(!world.turns.is_empty(), "{ordering:?} came to a stop");
            let TurnOut { owner, jobs } = &world.turns[0];
            let (owner, offset) = (*owner, jobs[0].record);
            match round % 5 {
                0 => world.fail(owner, offset),
                _ => world.finish(owner, offset),
            }
            world.pass(15 * SECOND);
        }
        assert!(next > 40, "only {next} records were read, {ordering:?}");
    }
}

#[test]
fn handlers_of_several_partitions_run_beside_each_other_where_each_has_an_order() {
    let mut world = world(Ordering::ByPartition);
    let owners = [0; HANDLERS].map(|_| world.assign(0));
    world.read_and_commit(&owners, &mut 0);
    assert_eq!(world.hand_over().len(), HANDLERS);
}

#[test]
fn as_many_retries_as_there_are_handlers_keep_more_from_being_committed() {
    let mut world = world(Ordering::Unordered);
    let owners = [world.assign(0), world.assign(0)];
    let mut next = 0;
    world.read_and_commit(&owners, &mut next);
    world.hand_over();
    for at in 0..HANDLERS {
        let TurnOut { owner, jobs } = &world.turns[0];
        let (owner, offset) = (*owner, jobs[0].record);
        world.fail(owner, offset);
        world.hand_over();
        let waiting = at + 1;
        let ahead = world.ahead(&owners);
        assert_eq!(
            world.engine.room(owners[1]),
            (2 * HANDLERS).saturating_sub(ahead + waiting),
            "beside {waiting} retries"
        );
    }
    world.finish_all();
    assert_eq!(world.ahead(&owners), HANDLERS, "the retries are left");
    assert_eq!(world.read_and_commit(&owners, &mut next), 0);
    world.pass(15 * SECOND);
    world.hand_over();
    let TurnOut { owner, jobs } = &world.turns[0];
    let (owner, offset) = (*owner, jobs[0].record);
    world.finish(owner, offset);
    assert!(world.read_and_commit(&owners, &mut next) > 0);
}

#[test]
fn while_a_dependency_is_down_one_record_is_committed_to_probe_with_and_no_more() {
    let mut world = world(Ordering::Unordered);
    let owners = [world.assign(0), world.assign(0)];
    let mut next = 0;
    while !world.engine.breaker().holds() {
        world.read_and_commit(&owners, &mut next);
        world.hand_over();
        let TurnOut { owner, jobs } = &world.turns[0];
        let (owner, offset) = (*owner, jobs[0].record);
        world.outage(owner, offset);
        world.pass(ms(100));
    }
    let ahead = world.ahead(&owners);
    assert!((1..=2 * HANDLERS).contains(&ahead));
    for _ in 0..100 {
        assert_eq!(world.read_and_commit(&owners, &mut next), 0);
        world.pass(SECOND);
        world.hand_over();
        if let Some(TurnOut { owner, jobs }) = world.turns.first() {
            let (owner, offset) = (*owner, jobs[0].record);
            world.outage(owner, offset);
        }
    }
    // All that was taken on is given up; there has to be something to find out with that the outage is over.
    for owner in owners {
        world.engine.drain(owner);
        world.engine.cut(owner, None, |_| "no time");
    }
    world.give_up_all();
    assert_eq!(world.ahead(&owners), 0);
    for owner in owners {
        world.engine.end(owner);
    }
    let owners = [world.assign(next), world.assign(next)];
    assert!(world.engine.breaker().holds());
    assert_eq!(world.read_and_commit(&owners, &mut next), 1);
}

#[test]
fn a_record_whose_dead_letter_is_not_acknowledged_does_not_keep_probes_from_being_read() {
    let mut world = World::with(Ordering::Unordered, |config| {
        config.guarantee = Guarantee::AtMostOnce;
        config.concurrency = HANDLERS;
        config.breaker = Some(OutageBreaker::new().min_attempts(1));
    });
    let owner = world.assign(0);
    let mut next = 0;
    world.read_and_commit(&[owner], &mut next);
    world.hand_over();
    world.fail_with(owner, 0, AfterFailure::GiveUp);
    while !world.engine.breaker().holds() {
        world.hand_over();
        let offset = world.running()[0];
        world.outage(owner, offset);
        world.pass(ms(10));
    }
    // Let only the one that was given up be left.
    while world.status(owner).committed_left > 1 {
        world.pass(SECOND);
        world.hand_over();
        if let Some(offset) = world.running().first() {
            world.end_with(owner, *offset, Outcome::Skipped);
        }
    }
    assert!(world.engine.breaker().holds());
    assert_eq!(world.engine.room(owner), 1);
}

#[test]
fn what_is_committed_is_handled_also_if_its_partition_is_paused_meanwhile() {
    let mut world = world(Ordering::ByKey);
    let (paused, other) = (world.assign(0), world.assign(0));
    let mut next = 0;
    world.read_and_commit(&[paused], &mut next);
    world.engine.set_paused(paused, true);
    assert_eq!(
        (world.engine.room(paused), world.engine.room(other)),
        (0, 0)
    );
    world.finish_all();
    assert_eq!(world.handled.len() as i64, next);
    assert_eq!(world.engine.room(paused), 0);
    assert!(
        world.engine.room(other) > 0,
        "another one does not stand still for as long as the pause lasts"
    );
}

#[test]
fn retries_that_come_too_late_for_a_drain_are_given_up_at_once_and_others_are_waited_for() {
    let mut world = world(Ordering::ByKey);
    let owner = world.partition(0..4);
    world.commit_all();
    world.hand_over();
    world.fail(owner, 0);
    world.fail_with(owner, 1, AfterFailure::RetryAfter(SECOND, None));
    let by = world.now + 5 * SECOND;
    assert!(
        !world.engine.cut(owner, Some(by), |_| "no time"),
        "it is not given away"
    );
    world.engine.drain(owner);
    assert!(world.engine.cut(owner, Some(by), |_| "no time"));
    assert!(!world.engine.cut(owner, Some(by), |_| "no time"));
    let given_up = world.engine.next_given_up().unwrap();
    assert_eq!(
        (given_up.record, given_up.attempts, given_up.cause),
        (0, 1, "no time")
    );
    let GivenUp { seq, lane, .. } = given_up;
    world.engine.settle(owner, seq, lane, Outcome::DeadLettered);
    world.pass(SECOND);
    world.finish_all();
    assert!(world.engine.is_drained(owner));
    world.handled.sort_unstable();
    assert_eq!(world.handled, [1, 2, 3]);
    assert_eq!(world.engine.forfeited(owner), None);
}

#[test]
fn when_there_is_no_time_left_all_that_has_no_handler_is_given_up_in_order() {
    for ordering in each_ordering() {
        let mut world = world(ordering);
        let owner = world.assign(0);
        for offset in 0..8 {
            world.receive(owner, offset, Some(offset as u64 % 2));
        }
        world.commit_all();
        world.hand_over();
        let running = world.running();
        world.engine.drain(owner);
        world.engine.cut(owner, None, |_| "no time");
        assert_eq!(world.hand_over(), running, "nothing starts, {ordering:?}");
        let mut given_up = world.give_up_all();
        assert!(given_up.is_sorted(), "{given_up:?} {ordering:?}");
        // Those that were handed over and have not started come back, and one that runs is stopped.
        let offset = running[0];
        world.fail_with(owner, offset, AfterFailure::GiveUp);
        while let Some(TurnOut { owner, jobs }) = world.turns.pop() {
            world.engine.not_started(owner, jobs.into());
        }
        assert_eq!(world.hand_over(), NOTHING, "{ordering:?}");
        world.engine.cut(owner, None, |_| "no time");
        given_up.extend(world.give_up_all());
        given_up.sort_unstable();
        assert_eq!(given_up, Vec::from_iter(0..8), "{ordering:?}");
        assert!(world.engine.is_drained(owner), "{ordering:?}");
        assert_eq!(world.engine.forfeited(owner), None);
        let last = world.engine.end(owner).unwrap();
        assert_eq!((last.counts.dead_lettered, last.committed_left), (8, 0));
        assert_eq!(world.engine.turns_out(), 0, "{ordering:?}");
    }
}

#[test]
fn a_record_that_fails_after_there_was_no_time_left_is_given_up_as_well() {
    let mut world = world(Ordering::ByKey);
    let owner = world.partition(0..2);
    world.commit_all();
    world.hand_over();
    world.engine.drain(owner);
    world.engine.cut(owner, None, |_| "no time");
    world.fail(owner, 0);
    world.finish(owner, 1);
    assert!(!world.engine.is_drained(owner));
    assert!(world.engine.cut(owner, None, |_| "no time"));
    assert_eq!(world.give_up_all(), [0]);
    assert!(world.engine.is_drained(owner));
}

#[test]
fn at_least_once_nothing_is_given_up_for_lack_of_time() {
    let mut world = World::new(Ordering::ByKey);
    let owner = world.partition(0..3);
    world.hand_over();
    world.fail(owner, 0);
    world.engine.drain(owner);
    assert!(!world.engine.cut(owner, None, |_| "no time"));
    assert!(world.engine.next_given_up().is_none());
    assert_eq!(world.engine.forfeited(owner), None);
}

#[test]
fn the_end_of_an_ownership_tells_which_records_nobody_will_handle() {
    let mut world = world(Ordering::ByKey);
    let owner = world.partition(10..17);
    world.commit_all();
    world.receive(owner, 17, None);
    world.hand_over();
    world.finish(owner, 10);
    world.fail(owner, 11);
    world.fail_with(owner, 12, AfterFailure::GiveUp);
    assert!(world.engine.next_given_up().is_some());
    world.hand_over();
    let told = Forfeited {
        records: 6,
        first_offset: 11,
        last_offset: 16,
        running: 4,
        dead_lettering: 1,
        in_doubt: 0,
    };
    assert_eq!(world.engine.forfeited(owner), Some(told));
    assert_eq!(world.commit(), Some(vec![(owner, 18)]));
    let in_flight = Forfeited {
        records: 7,
        last_offset: 17,
        in_doubt: 1,
        ..told
    };
    assert_eq!(world.engine.forfeited(owner), Some(in_flight));
    // It may have been applied all the same.
    world.answer(&[Unavailable]);
    assert_eq!(world.engine.forfeited(owner), Some(in_flight));
    world.engine.drain(owner);
    let last = world.engine.final_commit(&[owner], false).map(offsets);
    assert_eq!(last, Some(vec![(owner, 17)]));
    world.answer(&[Accepted]);
    assert_eq!(
        world.engine.forfeited(owner),
        Some(told),
        "it was taken back"
    );
    assert_eq!(world.engine.end(owner).unwrap().committed_left, 6);
    assert_eq!(world.engine.forfeited(owner), None);
}

#[test]
fn only_records_with_a_handler_count_as_being_at_work() {
    for ordering in each_ordering() {
        let mut world = World::with(ordering, |config| config.concurrency = 2);
        // Handlers were quick so far, so that more is handed over than can start.
        world.engine.run_ahead(100);
        let owner = world.assign(0);
        for offset in 0..20 {
            world.receive(owner, offset, Some(offset as u64 % 5));
        }
        let mut jobs = Vec::new();
        while let Some(batch) = world.engine.next_batch() {
            assert!(batch.beyond);
            jobs.extend(batch.jobs);
        }
        assert_eq!(world.status(owner).at_work, 0, "{ordering:?}");
        assert!(world.status(owner).running > 0, "{ordering:?}");
        let firsts = jobs.iter().take(2);
        firsts.for_each(|job| world.engine.started(owner, job.seq));
        assert_eq!(world.status(owner).at_work, 2, "{ordering:?}");
        let done = jobs.remove(0);
        let (seq, lane) = (done.seq, done.lane);
        world.engine.finished(owner, seq, lane, Outcome::Handled);
        assert_eq!(world.status(owner).at_work, 1, "{ordering:?}");
    }
}
