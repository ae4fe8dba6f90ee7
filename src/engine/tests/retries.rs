//! Failed attempts: what is tried again, when, and what is given up.

use super::*;

/// Offset and number of the attempt of everything that is with a handler.
fn attempts(world: &mut World) -> Vec<(i64, u32)> {
    world.hand_over();
    let jobs = world.turns.iter().map(|turn| &turn.jobs[0]);
    jobs.map(|job| (job.record, job.attempt)).collect()
}

// D1
#[test]
fn two_records_that_fail_at_once_are_both_tried_again() {
    for ordering in [Ordering::Unordered, Ordering::ByKey] {
        let mut world = World::new(ordering);
        let owner = world.partition(0..10);
        world.hand_over();
        world.fail(owner, 7);
        world.fail(owner, 3);
        world.finish_all();
        assert_eq!(world.handled, [0, 1, 2, 4, 5, 6, 8, 9]);
        assert_eq!(world.committable(owner), 3);

        world.pass(ms(100));
        let mut again = attempts(&mut world);
        again.sort();
        assert_eq!(again, [(3, 2), (7, 2)], "{ordering:?}");
        world.finish_all();
        assert_eq!(world.handled.len(), 10);
        assert_eq!(world.committable(owner), 10);
    }
}

#[test]
fn a_record_is_given_up_after_its_last_attempt_and_holds_its_lane_until_its_dead_letter_is_safe() {
    for ordering in each_ordering() {
        let mut world = World::new(ordering);
        let owner = world.assign(0);
        world.receive(owner, 0, Some(1));
        for attempt in 1..=3 {
            assert_eq!(attempts(&mut world), [(0, attempt)], "{ordering:?}");
            world.fail(owner, 0);
            world.pass(ms(100));
        }
        world.receive(owner, 1, Some(1));
        world.finish_all();
        let waits = ordering != Ordering::Unordered;
        assert_eq!(world.handled.is_empty(), waits, "{ordering:?}");
        assert_eq!(world.committable(owner), 0);
        assert_eq!(world.status(owner).dead_lettering, 1);

        let given_up = world.engine.next_given_up().unwrap();
        assert_eq!((given_up.record, given_up.attempts), (0, 3));
        assert_eq!(given_up.cause, "the database is down");
        world.finish_all();
        assert_eq!(world.committable(owner), 0, "it is on its way only");
        let GivenUp { seq, lane, .. } = given_up;
        world.engine.settle(owner, seq, lane, Outcome::DeadLettered);
        world.finish_all();
        assert_eq!(world.committable(owner), 2, "{ordering:?}");
        let counts = world.status(owner).counts;
        assert_eq!((counts.dead_lettered, counts.handled), (1, 1));
        assert_eq!(counts.retried, 2);
    }
}

#[test]
fn what_cannot_be_helped_by_trying_again_is_given_up_at_once() {
    let mut world = World::new(Ordering::ByKey);
    let owner = world.partition(0..1);
    world.hand_over();
    world.fail_with(owner, 0, AfterFailure::GiveUp);
    assert_eq!(world.engine.next_given_up().unwrap().attempts, 1);
}

#[test]
fn a_postponed_record_comes_again_with_nothing_counted_against_it() {
    for ordering in each_ordering() {
        let mut world = World::new(ordering);
        let owner = world.assign(0);
        world.receive(owner, 0, Some(1));
        assert_eq!(attempts(&mut world), [(0, 1)]);
        world.fail(owner, 0);
        world.pass(ms(100));
        for _ in 0..10 {
            assert_eq!(attempts(&mut world), [(0, 2)], "{ordering:?}");
            world.fail_with(owner, 0, AfterFailure::Postpone(SECOND));
            world.pass(SECOND - ms(1));
            assert!(attempts(&mut world).is_empty(), "{ordering:?}: too early");
            world.pass(ms(1));
        }
        assert_eq!(attempts(&mut world), [(0, 2)]);
        world.finish_all();
        let counts = world.status(owner).counts;
        assert_eq!((counts.retried, counts.postponed), (1, 10));
        assert_eq!(world.committable(owner), 1);
    }
}

#[test]
fn a_record_that_waits_for_its_key_is_counted_once_and_told_from_those_without_a_handler() {
    let mut world = World::new(Ordering::ByKey);
    let owner = world.assign(0);
    world.receive(owner, 0, Some(1));
    for looked in 0..5 {
        assert_eq!(attempts(&mut world), [(0, 1)], "it is no attempt");
        world.fail_with(owner, 0, AfterFailure::Hold(SECOND));
        let head = world.engine.head(owner).expect("it is unfinished");
        assert_eq!(head.state, RecordState::KeyHeld);
        assert_eq!(head.age, looked * SECOND, "and it is no younger for it");
        assert_eq!(head.counts, Duration::ZERO, "nor is it to blame");
        world.pass(SECOND);
    }
    assert_eq!(attempts(&mut world), [(0, 1)]);
    world.fail(owner, 0);
    let head = world.engine.head(owner).expect("it is unfinished");
    assert_eq!(head.state, RecordState::Retrying);
    world.pass(ms(100));
    assert_eq!(attempts(&mut world), [(0, 2)]);
    world.finish_all();
    let counts = world.status(owner).counts;
    assert_eq!((counts.postponed, counts.retried), (1, 1));
}

#[test]
fn the_time_that_a_record_was_postponed_for_is_no_time_of_failing() {
    let mut world = World::new(Ordering::ByKey);
    let owner = world.partition(0..1);
    let limited = Arc::new(Retry::fixed(ms(100)).max_elapsed(SECOND));
    let fail = |world: &mut World| {
        world.hand_over();
        world.fail_with(owner, 0, AfterFailure::Retry(Some(Arc::clone(&limited))));
        world.pass(ms(100));
    };
    fail(&mut world);
    for _ in 0..5 {
        world.hand_over();
        world.fail_with(owner, 0, AfterFailure::Postpone(SECOND));
        world.pass(SECOND);
    }
    fail(&mut world);
    assert!(world.engine.next_given_up().is_none());
    world.pass(SECOND);
    fail(&mut world);
    assert!(world.engine.next_given_up().is_some(), "this time counts");
}

#[test]
fn a_wait_that_the_handler_asked_for_is_kept_to_and_counts_as_an_attempt() {
    let mut world = World::new(Ordering::ByKey);
    let owner = world.partition(0..1);
    for _ in 0..2 {
        world.hand_over();
        world.fail_with(owner, 0, AfterFailure::RetryAfter(SECOND, None));
        world.pass(ms(999));
        assert_eq!(world.hand_over(), NOTHING);
        world.pass(ms(1));
    }
    assert_eq!(attempts(&mut world), [(0, 3)]);
    world.fail_with(owner, 0, AfterFailure::RetryAfter(SECOND, None));
    assert_eq!(world.dead_letter(), Some(0));
}

#[test]
fn a_failure_may_bring_a_policy_of_its_own() {
    let mut world = World::new(Ordering::ByKey);
    let owner = world.partition(0..1);
    world.hand_over();
    let policy = Arc::new(Retry::fixed(ms(5)).max_attempts(2));
    world.fail_with(owner, 0, AfterFailure::Retry(Some(Arc::clone(&policy))));
    world.pass(ms(5));
    assert_eq!(attempts(&mut world), [(0, 2)]);
    world.fail_with(owner, 0, AfterFailure::Retry(Some(policy)));
    assert_eq!(world.dead_letter(), Some(0));
}

#[test]
fn the_time_for_retries_counts_from_the_first_failure() {
    let mut world = World::with(Ordering::ByKey, |config| {
        let policy = Retry::fixed(ms(400)).unlimited_attempts();
        config.retry = Arc::new(policy.max_elapsed(SECOND));
    });
    let owner = world.partition(0..1);
    // Waiting for a handler is no failure.
    world.pass(10 * SECOND);
    for wait in [400, 400, 200] {
        world.hand_over();
        world.fail(owner, 0);
        world.pass(ms(wait - 1));
        assert_eq!(world.hand_over(), NOTHING);
        world.pass(ms(1));
    }
    world.hand_over();
    world.fail(owner, 0);
    assert_eq!(world.dead_letter(), Some(0));
}

// D15
#[test]
fn a_retry_is_due_on_time_when_nothing_else_happens() {
    let mut world = World::with(Ordering::ByKey, |config| {
        config.retry = Arc::new(Retry::fixed(ms(50)));
    });
    let owner = world.partition(0..1);
    world.hand_over();
    world.fail(owner, 0);
    assert_eq!(world.sleep(), Some(ms(50)));
    world.pass(ms(49));
    assert_eq!(world.hand_over(), NOTHING);
    world.pass(ms(1));
    assert_eq!(world.hand_over(), [0]);
}

// D11
#[test]
fn a_retry_that_waits_longer_than_anything_stops_no_other_lane() {
    let mut world = World::with(Ordering::ByKey, |config| config.concurrency = 1);
    let owner = world.partition(0..1);
    world.hand_over();
    let hour = Duration::from_secs(3600);
    world.fail_with(owner, 0, AfterFailure::RetryAfter(hour, None));
    for offset in 1..1_000 {
        world.pass(SECOND);
        world.receive(owner, offset, Some(offset as u64));
        assert_eq!(world.hand_over(), [offset]);
        world.finish(owner, offset);
    }
    assert_eq!(world.committable(owner), 0);
    world.pass(hour);
    world.finish_all();
    assert_eq!(world.committable(owner), 1_000);
}

#[test]
fn a_wait_without_end_is_not_beyond_the_clock() {
    let mut world = World::with(Ordering::ByKey, |config| {
        config.commit_interval = Duration::MAX;
    });
    let owner = world.partition(0..2);
    world.hand_over();
    world.fail_with(owner, 0, AfterFailure::RetryAfter(Duration::MAX, None));
    world.finish(owner, 1);
    world.pass(24 * 3600 * SECOND);
    assert_eq!(world.hand_over(), NOTHING);
    assert_eq!(world.status(owner).retrying, 1);
}

// D14
#[test]
fn poison_records_under_steady_traffic_do_not_clog_intake() {
    let mut world = World::with(Ordering::ByKey, |config| {
        config.retry = Arc::new(Retry::fixed(ms(100)).max_attempts(5));
    });
    let owner = world.assign(0);
    let poison = |offset: i64| offset % 50 == 0;
    let mut most_waiting = 0;
    for round in 0..1_000 {
        world.pass(ms(10));
        for offset in round * 10..(round + 1) * 10 {
            assert!(world.engine.room(owner) > 0, "intake stands at {offset}");
            world.receive(owner, offset, Some(offset as u64));
        }
        while let Some(&offset) = world.hand_over().first() {
            if poison(offset) {
                world.fail(owner, offset);
            } else {
                world.finish(owner, offset);
            }
        }
        while let Some(offset) = world.dead_letter() {
            assert!(poison(offset));
        }
        most_waiting = most_waiting.max(world.status(owner).retrying);
    }
    assert_eq!(world.handled.len(), 9_800);
    assert!(
        most_waiting <= 10,
        "{most_waiting} records wait for a retry"
    );
    let behind = 10_000 - world.committable(owner);
    assert!(behind <= 500, "{behind} records behind");
}

#[test]
fn what_failed_together_does_not_come_back_together() {
    let mut world = World::with(Ordering::Unordered, |config| {
        config.retry = Arc::new(Retry::fixed(ms(100)).jitter(0.5));
    });
    let owner = world.partition(0..50);
    world.hand_over();
    (0..50).for_each(|offset| world.fail(owner, offset));
    world.pass(ms(75));
    let early = world.hand_over().len();
    world.pass(ms(75));
    assert_eq!(world.hand_over().len(), 50);
    assert!((3..30).contains(&early), "{early} of 50 came back early");
}

#[test]
fn what_is_asked_of_a_partition_and_its_end_cost_nothing_for_the_retries_of_others() {
    let mut world = World::with(Ordering::Unordered, |config| {
        config.concurrency = 50_000;
        config.breaker = None;
        config.retry = Arc::new(Retry::fixed(60 * SECOND).max_attempts(100));
    });
    let owners: Vec<_> = (0..500).map(|_| world.partition(0..100)).collect();
    while let Some(batch) = world.engine.next_batch() {
        for job in batch.jobs {
            let failed = Failed {
                job,
                then: AfterFailure::Retry(None),
                cause: "the database is down",
            };
            world.engine.failed(batch.owner, failed);
        }
    }
    for owner in &owners {
        assert_eq!(world.status(*owner).retrying, 100);
    }
    // Whatever else this machine does, the quickest of many is quick. One that looked at all retries would look at five
    // hundred times as many as it has.
    let quickest = |times: &mut dyn Iterator<Item = Duration>| times.min().unwrap_or_default();
    let own = quickest(&mut (0..20).map(|_| {
        let began = Instant::now();
        let mut own: Vec<_> = (0..100).map(|n| ms(n * 7919 % 101)).collect();
        own.sort_unstable();
        assert_eq!(std::hint::black_box(own).len(), 100);
        began.elapsed()
    }));
    let asked = quickest(&mut owners.iter().map(|owner| {
        let began = Instant::now();
        assert_eq!(world.engine.schedule.count(*owner), 100);
        began.elapsed()
    }));
    assert!(
        asked < own,
        "to be asked took {asked:?}, to sort as many as it has {own:?}"
    );
    let all = world.engine.schedule.len();
    let ended = quickest(&mut owners.iter().map(|owner| {
        let began = Instant::now();
        world.engine.schedule.forget(*owner);
        began.elapsed()
    }));
    assert_eq!((all, world.engine.schedule.next_due()), (50_000, None));
    assert!(
        ended < 20 * own,
        "to be ended took {ended:?}, to sort as many as it has {own:?}"
    );
}
