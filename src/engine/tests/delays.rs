//! Records that are not to be handled before a certain time.

use super::*;

/// Due so long after the world's beginning.
fn receive_due(world: &mut World, owner: Ownership, offset: i64, after: Duration) {
    let (due, size) = (Some(world.now + after), size(offset));
    let received = world
        .engine
        .receive_due(owner, offset, None, size, offset, due);
    assert_eq!(received, Received::Queued);
}

#[test]
fn a_record_is_handed_over_when_it_is_due_and_not_before() {
    for ordering in each_ordering() {
        let mut world = World::new(ordering);
        let owner = world.assign(0);
        receive_due(&mut world, owner, 0, 10 * SECOND);
        assert_eq!(world.hand_over(), NOTHING);
        assert_eq!(world.sleep(), Some(10 * SECOND), "it is woken up for it");
        world.pass(10 * SECOND - ms(1));
        assert_eq!(world.hand_over(), NOTHING);
        world.pass(ms(1));
        assert_eq!(world.hand_over(), [0]);
        world.finish(owner, 0);
        world.commit_all();
        assert_eq!(world.committed(owner), 1);
    }
}

#[test]
fn records_that_are_not_due_take_no_place_of_those_that_are() {
    let mut world = World::with(Ordering::Unordered, |config| config.concurrency = 2);
    let tier = world.assign(0);
    for offset in 0..100 {
        receive_due(&mut world, tier, offset, 10 * SECOND);
    }
    let source = world.partition(0..3);
    assert_eq!(world.hand_over().len(), 3, "and one in stock");
    world.finish_all();
    assert_eq!(world.status(source).counts.handled, 3);
    let status = world.status(tier);
    assert_eq!((status.delayed, status.queued, status.running), (100, 0, 0));
    world.pass(10 * SECOND);
    world.finish_all();
    assert_eq!(world.status(tier).counts.handled, 100);
}

#[test]
fn a_record_waits_for_those_in_front_of_it_to_be_due() {
    let mut world = World::new(Ordering::Unordered);
    let owner = world.assign(0);
    receive_due(&mut world, owner, 0, 2 * SECOND);
    receive_due(&mut world, owner, 1, SECOND);
    receive_due(&mut world, owner, 2, 3 * SECOND);
    world.pass(SECOND);
    assert_eq!(world.hand_over(), NOTHING);
    world.pass(SECOND);
    assert_eq!(world.hand_over(), [0, 1]);
    assert_eq!(world.sleep(), Some(SECOND));
}

#[test]
fn not_much_is_read_of_what_is_not_due() {
    let mut world = World::new(Ordering::ByKey);
    let owner = world.assign(0);
    let mut offset = 0;
    while world.engine.room(owner) > 0 {
        receive_due(&mut world, owner, offset, 10 * SECOND);
        offset += 1;
    }
    assert_eq!(offset, 2_048);
    world.pass(10 * SECOND);
    assert!(world.engine.room(owner) > 0, "reading goes on");
}

#[test]
fn a_record_that_is_not_due_is_not_stuck_and_its_age_begins_when_it_is() {
    let mut world = World::new(Ordering::Unordered);
    let owner = world.assign(0);
    receive_due(&mut world, owner, 0, 100 * SECOND);
    world.pass(99 * SECOND);
    let head = world.engine.head(owner).expect("it is unfinished");
    assert!(world.engine.is_delayed(owner, head.seq));
    world.pass(2 * SECOND);
    assert!(!world.engine.is_delayed(owner, head.seq));
    let head = world.engine.head(owner).expect("it is unfinished");
    assert_eq!(head.age, Duration::ZERO);
}

#[test]
fn a_drain_does_not_wait_for_what_is_not_due() {
    let mut world = World::new(Ordering::Unordered);
    let owner = world.assign(0);
    receive_due(&mut world, owner, 0, 10 * SECOND);
    world.engine.drain(owner);
    assert!(world.engine.is_drained(owner));
    assert_eq!(world.status(owner).delayed, 0, "nothing is kept of it");
    world.pass(10 * SECOND);
    assert_eq!(world.hand_over(), NOTHING, "it is the next owner's");
    world.engine.end(owner);
    assert_eq!((world.engine.records(), world.engine.bytes()), (0, 0));
}

#[test]
fn waiting_to_be_due_leaves_no_mark_of_records_at_work() {
    let mut world = World::with(Ordering::Unordered, |config| config.crash_limit = Some(3));
    let owner = world.assign(0);
    receive_due(&mut world, owner, 0, 10 * SECOND);
    world.hand_over();
    world.pass(SECOND);
    assert_eq!(
        world.commit(),
        None,
        "a process that dies now died under nothing"
    );
    world.pass(9 * SECOND);
    assert_eq!(world.hand_over(), NOTHING);
    assert_eq!(
        world.commit(),
        Some(vec![(owner, 0)]),
        "the mark comes first"
    );
}
