//! What waits for what: lanes as seen from the whole engine.

use super::*;

const A: Option<u64> = Some(1);
const B: Option<u64> = Some(2);

// D16
#[test]
fn a_failing_key_holds_back_its_own_later_records_and_no_other_key() {
    let mut world = World::new(Ordering::ByKey);
    let owner = world.assign(0);
    for (offset, key) in [(0, A), (1, B), (2, A), (3, B)] {
        world.receive(owner, offset, key);
    }
    assert_eq!(world.hand_over(), [0, 1]);
    world.fail(owner, 0);
    world.receive(owner, 4, A);
    world.receive(owner, 5, B);
    world.finish_all();
    assert_eq!(world.handled, [1, 3, 5]);
    assert_eq!(world.committable(owner), 0);

    world.pass(ms(100));
    world.finish_all();
    assert_eq!(world.handled, [1, 3, 5, 0, 2, 4]);
    assert_eq!(world.committable(owner), 6);
}

#[test]
fn a_failing_record_holds_back_its_partition_when_that_is_the_order_and_no_other_partition() {
    let mut world = World::new(Ordering::ByPartition);
    let (one, other) = (world.partition(0..3), world.partition(10..13));
    assert_eq!(world.hand_over(), [0, 10]);
    world.fail(one, 0);
    world.finish_all();
    assert_eq!(world.handled, [10, 11, 12]);
    world.pass(ms(100));
    world.finish_all();
    assert_eq!(world.handled, [10, 11, 12, 0, 1, 2]);
    assert_eq!([world.committable(one), world.committable(other)], [3, 13]);
}

#[test]
fn a_failing_record_holds_back_nobody_without_an_order() {
    let mut world = World::new(Ordering::Unordered);
    let owner = world.partition(0..4);
    world.hand_over();
    world.fail(owner, 0);
    world.finish_all();
    assert_eq!(world.handled, [1, 2, 3]);
}

#[test]
fn records_behind_a_failed_one_in_its_turn_run_after_its_retry_in_their_order() {
    for ordering in [Ordering::ByKey, Ordering::ByPartition] {
        let mut world = World::new(ordering);
        let owner = world.assign(0);
        (0..5).for_each(|offset| world.receive(owner, offset, A));
        assert_eq!(world.hand_over(), [0], "{ordering:?}");
        world.finish(owner, 0);
        world.finish(owner, 1);
        world.fail(owner, 2);
        world.receive(owner, 5, A);
        assert_eq!(world.hand_over(), NOTHING, "{ordering:?}");
        world.pass(ms(100));
        world.finish_all();
        assert_eq!(world.handled, [0, 1, 2, 3, 4, 5], "{ordering:?}");
    }
}

#[test]
fn what_comes_back_without_having_started_is_handed_over_again_in_its_order() {
    for ordering in each_ordering() {
        let mut world = World::new(ordering);
        let owner = world.assign(0);
        (0..6).for_each(|offset| world.receive(owner, offset, A));
        world.hand_over();
        if ordering != Ordering::Unordered {
            world.finish(owner, 0);
        }
        // An executor gives back the rest of its batch as one.
        let turns = std::mem::take(&mut world.turns);
        let jobs = turns.into_iter().flat_map(|turn| turn.jobs).collect();
        world.engine.not_started(owner, jobs);
        world.receive(owner, 6, A);
        let attempts: Vec<u32> = {
            world.hand_over();
            let jobs = world.turns.iter().flat_map(|turn| &turn.jobs);
            jobs.map(|job| job.attempt).collect()
        };
        assert!(attempts.iter().all(|attempt| *attempt == 1), "{ordering:?}");
        world.finish_all();
        assert_eq!(world.handled, [0, 1, 2, 3, 4, 5, 6], "{ordering:?}");
        assert_eq!(world.committable(owner), 7, "{ordering:?}");
    }
}

// T14
#[test]
fn the_same_key_in_two_partitions_is_two_lanes() {
    let mut world = World::new(Ordering::ByKey);
    let (one, other) = (world.assign(0), world.assign(0));
    world.receive(one, 0, A);
    world.receive(other, 0, A);
    assert_eq!(world.hand_over(), [0, 0]);
    world.fail(one, 0);
    world.receive(other, 1, A);
    world.finish_all();
    assert_eq!([world.committable(one), world.committable(other)], [0, 2]);
}

#[test]
fn records_without_a_key_have_no_order_among_themselves() {
    let mut world = World::new(Ordering::ByKey);
    let owner = world.partition(0..3);
    assert_eq!(world.hand_over(), [0, 1, 2]);
    world.fail(owner, 1);
    world.receive(owner, 3, None);
    assert_eq!(world.hand_over(), [0, 2, 3]);
}
