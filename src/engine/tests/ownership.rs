//! From assign to revoke, and what comes too late.

use super::*;

// R1
#[test]
fn verdicts_that_come_after_the_partition_was_taken_away_change_nothing_for_its_next_owner() {
    for ordering in each_ordering() {
        let mut world = World::new(ordering);
        let old = world.assign(0);
        (0..6).for_each(|offset| world.receive(old, offset, Some(offset as u64)));
        world.hand_over();
        world.fail_with(old, 0, AfterFailure::GiveUp);
        let given_up = world.engine.next_given_up().unwrap();
        let late = std::mem::take(&mut world.turns);
        world.engine.end(old);

        let new = world.assign(0);
        assert_eq!(
            new.slot(),
            old.slot(),
            "the worst case: it has the same place"
        );
        (0..6).for_each(|offset| world.receive(new, offset, Some(offset as u64)));
        world.hand_over();
        let before = (
            world.status(new),
            world.engine.turns_out(),
            world.engine.bytes(),
        );
        for (at, job) in late.into_iter().flat_map(|turn| turn.jobs).enumerate() {
            match at % 3 {
                0 => world
                    .engine
                    .finished(old, job.seq, job.lane, Outcome::Handled),
                1 => world.engine.not_started(old, vec![job]),
                _ => world.engine.failed(
                    old,
                    Failed {
                        job,
                        then: AfterFailure::Retry(None),
                        cause: "",
                    },
                ),
            }
        }
        world.engine.started(old, 1);
        world.engine.skip_to(old, 1_000);
        let GivenUp { seq, lane, .. } = given_up;
        world.engine.settle(old, seq, lane, Outcome::DeadLettered);
        world.engine.drain(old);
        world.engine.set_paused(old, true);
        assert_eq!(world.engine.receive(old, 9, None, SIZE, 9), Received::Stale);
        assert_eq!((world.engine.room(old), world.engine.end(old)), (0, None));
        assert_eq!(world.engine.next_given_up().map(|late| late.owner), None);
        let after = (
            world.status(new),
            world.engine.turns_out(),
            world.engine.bytes(),
        );
        assert_eq!(after, before, "{ordering:?}");
        world.finish_all();
        assert_eq!(world.committable(new), 6);
    }
}

// T13
#[test]
fn after_an_error_of_the_client_nothing_that_it_says_is_believed_until_it_reads_from_our_position_again()
 {
    for ordering in each_ordering() {
        let mut world = World::new(ordering);
        let owner = world.partition(0..3);
        world.engine.client_is_at(owner, 5);
        assert_eq!(world.status(owner).position, Some(5), "markers are passed");
        assert_eq!(world.engine.distrust(owner), Some(5));
        // Behind an error at 5, as if that had been a record; and what follows it.
        world.engine.client_is_at(owner, 6);
        for offset in [6, 5, 0] {
            let received = world.engine.receive(owner, offset, None, SIZE, offset);
            assert_eq!(received, Received::Unproven, "{ordering:?}");
        }
        world.finish_all();
        assert_eq!(world.status(owner).position, Some(5));
        assert_eq!(world.committable(owner), 5, "{ordering:?}");
        world.engine.reads_from_position(owner);
        world.receive(owner, 5, None);
        world.engine.client_is_at(owner, 7);
        assert_eq!(world.status(owner).position, Some(7));
        // A decision is no hint.
        world.engine.distrust(owner);
        world.engine.skip_to(owner, 40);
        assert_eq!(world.status(owner).position, Some(40));
    }
}

// R1
#[test]
fn an_answer_to_a_commit_of_an_ended_ownership_says_nothing_about_the_next_one() {
    let mut world = World::new(Ordering::Unordered);
    let old = world.partition(0..3);
    world.hand_over();
    world.finish(old, 0);
    world.pass(SECOND);
    assert!(world.commit().is_some());
    world.engine.end(old);
    let new = world.assign(0);
    world.answer(&[CommitResult::Accepted]);
    assert_eq!(world.committed(new), 0);
}

// R2
#[test]
fn taken_away_and_given_back_at_once_each_record_is_handed_over_once_per_ownership() {
    for ordering in each_ordering() {
        let mut world = World::new(ordering);
        let mut owner = world.assign(0);
        for _ in 0..3 {
            (0..20).for_each(|offset| world.receive(owner, offset, Some(offset as u64 % 3)));
            world.hand_over();
            world.turns.clear();
            world.engine.drain(owner);
            world.engine.end(owner);
            owner = world.assign(0);
            assert_eq!(
                world.hand_over(),
                NOTHING,
                "nothing of the old lanes is left"
            );
        }
        (0..20).for_each(|offset| world.receive(owner, offset, Some(offset as u64 % 3)));
        world.finish_all();
        world.handled.sort();
        assert_eq!(world.handled, Vec::from_iter(0..20), "{ordering:?}");
    }
}

#[test]
fn a_drain_drops_what_has_not_started_and_waits_for_what_runs() {
    for ordering in each_ordering() {
        let mut world = World::with(ordering, |config| config.concurrency = 1);
        let owner = world.assign(0);
        world.receive(owner, 0, Some(1));
        world.hand_over();
        (1..200).for_each(|offset| world.receive(owner, offset, Some(1)));
        world.engine.drain(owner);
        assert_eq!((world.engine.room(owner), world.hand_over()), (0, vec![0]));
        assert!(!world.engine.is_drained(owner));
        assert!(world.status(owner).draining);
        let partition = world.engine.partition(owner).unwrap();
        assert!(partition.lanes.queued().is_empty(), "their memory is free");
        world.finish(owner, 0);
        assert!(world.engine.is_drained(owner));
        assert_eq!(world.hand_over(), NOTHING);
        let last = world.engine.end(owner).unwrap();
        assert_eq!(
            (last.committable, last.queued),
            (Some(1), 199),
            "{ordering:?}"
        );
    }
}

// R4
#[test]
fn a_drain_is_over_at_once_when_nothing_runs() {
    let mut world = World::new(Ordering::ByKey);
    let owner = world.partition(0..3);
    world.hand_over();
    world.finish(owner, 0);
    world.fail(owner, 1);
    let at = world.turn_at(owner, 2);
    world.give_back(at);
    world.receive(owner, 3, None);
    world.engine.drain(owner);
    assert!(
        world.engine.is_drained(owner),
        "one is queued, one waits for a retry"
    );
    assert_eq!(world.status(owner).retrying, 0);
    world.pass(10 * SECOND);
    assert_eq!(world.hand_over(), NOTHING);
}

// R4
#[test]
fn a_record_that_ends_the_consumer_is_not_waited_for() {
    let mut world = World::new(Ordering::ByKey);
    let owner = world.partition(0..1);
    world.hand_over();
    world.fail_with(owner, 0, AfterFailure::GiveUp);
    assert!(world.engine.next_given_up().is_some());
    world.engine.abandon(owner);
    world.engine.drain(owner);
    assert!(world.engine.is_drained(owner));
    assert_eq!(world.engine.end(owner).unwrap().committable, Some(0));
}

#[test]
fn a_handler_that_fails_during_a_drain_leaves_its_record_to_the_next_owner() {
    let mut world = World::new(Ordering::ByKey);
    let owner = world.partition(0..2);
    world.hand_over();
    world.engine.drain(owner);
    world.fail(owner, 0);
    world.finish(owner, 1);
    assert!(world.engine.is_drained(owner));
    assert_eq!(
        world.sleep(),
        Some(SECOND),
        "for the commit, not for a retry"
    );
    world.pass(SECOND);
    assert_eq!(world.hand_over(), NOTHING);
    let last = world.engine.end(owner).unwrap();
    assert_eq!((last.committable, last.retrying), (Some(0), 0));
}

#[test]
fn a_draining_partition_hands_over_nothing_that_comes_back_or_comes_in() {
    for ordering in each_ordering() {
        let mut world = World::new(ordering);
        let owner = world.partition(0..3);
        world.hand_over();
        world.engine.drain(owner);
        while !world.turns.is_empty() {
            world.give_back(0);
        }
        let partition = world.engine.partition(owner).unwrap();
        assert!(partition.lanes.queued().is_empty(), "{ordering:?}");
        world.receive(owner, 3, None);
        assert_eq!(world.hand_over(), NOTHING, "{ordering:?}");
        assert!(world.engine.is_drained(owner));
        assert_eq!(world.engine.end(owner).unwrap().committable, Some(0));
    }
}

#[test]
fn a_drain_waits_for_dead_letters_on_their_way() {
    let mut world = World::new(Ordering::ByKey);
    let owner = world.partition(0..1);
    world.hand_over();
    world.engine.drain(owner);
    world.fail_with(owner, 0, AfterFailure::GiveUp);
    assert!(!world.engine.is_drained(owner));
    assert_eq!(world.dead_letter(), Some(0));
    assert!(world.engine.is_drained(owner));
    assert_eq!(world.committable(owner), 1);
}

// R6
#[test]
fn other_partitions_keep_what_they_have_when_one_is_taken_away() {
    let mut world = World::with(Ordering::ByKey, |config| config.concurrency = 2);
    let (going, staying) = (world.partition(0..50), world.partition(100..150));
    world.hand_over();
    world.fail(staying, 100);
    world.engine.drain(going);
    world.engine.end(going);
    world.turns.retain(|turn| turn.owner == staying);
    world.pass(ms(100));
    world.finish_all();
    assert_eq!(world.committable(staying), 150);
    world.handled.sort();
    assert_eq!(world.handled, Vec::from_iter(100..150));
}

// R7
#[test]
fn after_a_hundred_rebalances_with_work_in_flight_nothing_is_left() {
    for ordering in each_ordering() {
        let mut world = World::new(ordering);
        for round in 0..100 {
            let owners = [0, 1, 2].map(|_| world.assign(0));
            for owner in owners {
                (0..30).for_each(|offset| world.receive(owner, offset, Some(offset as u64 % 7)));
            }
            world.hand_over();
            // Something of everything: finished, failed, given up, given back, running, queued.
            for then in [AfterFailure::Retry(None), AfterFailure::GiveUp] {
                let TurnOut { owner, jobs } = &world.turns[0];
                world.fail_with(*owner, jobs[0].record, then);
            }
            let TurnOut { owner, jobs } = &world.turns[0];
            world.finish(*owner, jobs[0].record);
            if world.turns.len() > 1 {
                world.give_back(1);
            }
            for owner in owners.iter().filter(|_| round % 2 == 0) {
                world.engine.drain(*owner);
            }
            world.pass(ms(30));
            for owner in owners {
                world.engine.end(owner);
            }
            assert_eq!(world.engine.bytes(), 0, "{ordering:?}, round {round}");
            assert_eq!(world.engine.turns_out(), 0, "{ordering:?}, round {round}");
            assert!(world.engine.next_given_up().is_none());
            world.turns.clear();
        }
        world.pass(10 * SECOND);
        assert_eq!(world.hand_over(), NOTHING);
        assert_eq!(world.engine.partitions.len(), 3, "places are used again");
        assert_eq!(world.engine.schedule.next_due(), None);
    }
}

#[test]
fn an_offset_that_went_back_needs_a_new_ownership() {
    let mut world = World::new(Ordering::ByKey);
    let owner = world.partition(100..105);
    for offset in [104, 100, 3] {
        let received = world.engine.receive(owner, offset, None, SIZE, offset);
        assert_eq!(received, Received::WentBack { last: 104 });
    }
    assert_eq!(
        world.status(owner).counts.received,
        5,
        "nothing was taken in"
    );
    world.engine.end(owner);
    let new = world.engine.assign(Some(3), None, Inherited::default());
    assert_eq!(
        world.commit(),
        Some(vec![(new, 3)]),
        "what is committed lies beyond the end"
    );
}
