//! Records that do not finish: how old they are, and giving them up.

use super::*;

#[test]
fn how_long_a_record_waits_and_how_long_it_runs_are_told_apart() {
    let mut world = World::with(Ordering::ByKey, |config| {
        config.retry = Arc::new(Retry::fixed(10 * SECOND).max_attempts(3));
    });
    let owner = world.assign(0);
    for (offset, key) in [(0, 7), (1, 7), (2, 1 << 40)] {
        world.receive(owner, offset, Some(key));
    }
    world.pass(2 * SECOND);
    world.hand_over();
    world.pass(3 * SECOND);
    world.finish(owner, 2);
    let head = world.engine.head(owner).unwrap();
    assert_eq!((head.offset, head.state), (0, RecordState::Running));
    assert_eq!(
        (head.in_state, head.age, head.attempt, head.holds_back),
        (3 * SECOND, 3 * SECOND, 1, 1)
    );
    assert_eq!(head.key_hash, Some(7));
    let waiting = world.status(owner).oldest_waiting.unwrap();
    assert_eq!(
        (waiting.offset, waiting.state, waiting.in_state),
        (1, RecordState::Queued, 5 * SECOND),
        "it stands behind its key"
    );

    world.fail(owner, 0);
    world.pass(4 * SECOND);
    let head = world.engine.head(owner).unwrap();
    assert_eq!((head.offset, head.state), (0, RecordState::Retrying));
    assert_eq!((head.in_state, head.attempt), (4 * SECOND, 2));
    assert_eq!(world.status(owner).oldest_running, None);

    world.pass(6 * SECOND);
    world.hand_over();
    world.pass(SECOND);
    let head = world.engine.head(owner).unwrap();
    assert_eq!((head.state, head.in_state), (RecordState::Running, SECOND));
    assert_eq!(
        head.age,
        11 * SECOND,
        "since it failed for the first time, not since it was called again"
    );

    world.fail_with(owner, 0, AfterFailure::GiveUp);
    let head = world.engine.head(owner).unwrap();
    assert_eq!(head.state, RecordState::DeadLettering);
}

#[test]
fn a_record_that_runs_for_long_is_found_though_it_is_not_the_oldest() {
    let mut world = World::new(Ordering::Unordered);
    let owner = world.partition(0..3);
    world.hand_over();
    world.pass(SECOND);
    world.engine.started(owner, 0); // It reports progress.
    world.pass(SECOND);
    world.finish(owner, 2);
    let running = world.engine.running_behind(owner).unwrap();
    assert_eq!((running.offset, running.age), (1, 2 * SECOND));
    assert_eq!(running.holds_back, 1);
    assert_eq!(world.engine.head(owner).unwrap().age, SECOND);
}

#[test]
fn a_record_without_a_free_handler_waits_until_it_is_said_to_have_started() {
    let mut world = World::with(Ordering::Unordered, |config| config.concurrency = 2);
    let first = world.partition(0..2);
    let batch = world.engine.next_batch().unwrap();
    assert!(!batch.beyond, "there are handlers for both");
    let second = world.partition(0..1);
    let batch = world.engine.next_batch().unwrap();
    assert!(batch.beyond);
    world.pass(5 * SECOND);
    let state = |world: &World, owner| {
        let head = world.engine.head(owner).unwrap();
        (head.state, head.in_state)
    };
    assert_eq!(state(&world, first), (RecordState::Running, 5 * SECOND));
    assert_eq!(state(&world, second), (RecordState::Queued, 5 * SECOND));
    world.engine.started(second, 0);
    world.pass(SECOND);
    assert_eq!(state(&world, second), (RecordState::Running, SECOND));
}

#[test]
fn what_comes_back_unstarted_has_not_run() {
    let mut world = World::new(Ordering::Unordered);
    let owner = world.partition(0..1);
    world.hand_over();
    world.pass(SECOND);
    world.give_back(0);
    let head = world.engine.head(owner).unwrap();
    assert_eq!((head.state, head.in_state), (RecordState::Queued, SECOND));
}

#[test]
fn a_record_that_waits_for_a_retry_can_be_given_up_and_its_lane_waits_for_its_dead_letter() {
    let mut world = World::with(Ordering::ByKey, |config| {
        config.retry = Arc::new(Retry::fixed(3600 * SECOND).max_attempts(3));
    });
    let owner = world.assign(0);
    for offset in 0..2 {
        world.receive(owner, offset, Some(7));
    }
    world.receive(owner, 2, Some(8));
    world.hand_over();
    world.fail(owner, 2);
    assert!(
        !world.engine.give_up(owner, 0, "stuck"),
        "its handler runs: who has it has to drop it"
    );
    world.fail(owner, 0);
    assert!(world.engine.give_up(owner, 0, "stuck"));
    assert!(!world.engine.give_up(owner, 0, "stuck"), "once is enough");
    let status = world.status(owner);
    assert_eq!((status.retrying, status.dead_lettering), (1, 1));
    world.hand_over();
    assert_eq!(
        world.running(),
        NOTHING,
        "the next of its key waits for the dead letter"
    );
    let given_up = world.engine.next_given_up().unwrap();
    assert_eq!(
        (given_up.record, given_up.attempts, given_up.cause),
        (0, 1, "stuck")
    );
    world
        .engine
        .settle(owner, given_up.seq, given_up.lane, Outcome::DeadLettered);
    assert_eq!(world.hand_over(), [1]);
    world.pass(3600 * SECOND);
    assert_eq!(world.hand_over(), [1, 2], "others keep their retries");
    world.finish_all();
    world.commit_all();
    assert_eq!(world.committed(owner), 3);
}

#[test]
fn a_record_of_an_earlier_ownership_cannot_be_given_up() {
    let mut world = World::new(Ordering::Unordered);
    let old = world.partition(0..1);
    world.hand_over();
    world.fail(old, 0);
    world.engine.end(old);
    let owner = world.partition(0..1);
    assert!(!world.engine.give_up(old, 0, "stuck"));
    assert_eq!(world.hand_over().len(), 1);
    assert_eq!(world.status(owner).dead_lettering, 0);
}
