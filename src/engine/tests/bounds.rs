//! Bounds on records, bytes and handlers, and how partitions share them.

use super::*;

/// Fills partitions as the pump does: as much as there is room for, never more than they have.
fn read(world: &mut World, owner: Ownership, size: usize, left: &mut usize) {
    for _ in 0..world.engine.room(owner).min(*left) {
        let offset = world.status(owner).position.unwrap();
        let received = world.engine.receive(owner, offset, None, size, offset);
        assert_eq!(received, Received::Queued);
        *left -= 1;
    }
}

/// Reads for as long as anything is read.
fn read_all(world: &mut World, owner: Ownership, size: usize, mut left: usize) {
    while left > 0 && world.engine.room(owner) > 0 {
        read(world, owner, size, &mut left);
    }
}

// R12
#[test]
fn intake_waits_when_the_window_is_full_and_goes_on_when_its_oldest_record_finishes() {
    let mut world = World::with(Ordering::Unordered, |config| {
        config.window = 1_000;
        config.concurrency = 1_000;
    });
    let owner = world.assign(0);
    read_all(&mut world, owner, SIZE, 5_000);
    assert_eq!(world.status(owner).counts.received, 1_000);
    world.hand_over();
    for offset in 1..1_000 {
        world.finish(owner, offset);
    }
    assert_eq!(
        world.engine.room(owner),
        0,
        "the span counts, not what is unfinished"
    );
    world.finish(owner, 0);
    assert!(world.engine.room(owner) > 0);
}

// R12
#[test]
fn intake_waits_when_the_bytes_are_used_up() {
    for size in [2_000, 50_000] {
        let budget = 1_000_000;
        let mut world = World::with(Ordering::Unordered, |config| config.max_bytes = budget);
        let owner = world.assign(0);
        read_all(&mut world, owner, size, 5_000);
        assert_eq!(world.engine.bytes(), budget, "records of {size}");
        world.hand_over();
        world.finish(owner, 0);
        assert_eq!(world.engine.room(owner), 1);
        world.finish_all();
        assert_eq!(world.engine.bytes(), 0);
    }
}

#[test]
fn a_record_larger_than_all_that_is_allowed_passes_alone() {
    let mut world = World::with(Ordering::ByKey, |config| config.max_bytes = 1_000);
    let owner = world.assign(0);
    for _ in 0..3 {
        assert_eq!(world.engine.room(owner), 1);
        read_all(&mut world, owner, 50_000, 3);
        assert_eq!(world.engine.room(owner), 0);
        world.finish_all();
    }
    assert_eq!(world.handled, [0, 1, 2]);
}

#[test]
fn a_partition_that_keeps_nothing_may_read_while_anothers_backlog_takes_all_the_bytes() {
    let mut world = World::with(Ordering::Unordered, |config| {
        config.max_bytes = 10_000;
        config.concurrency = 4;
    });
    let (busy, quiet) = (world.assign(0), world.assign(0));
    let mut backlog = 10_000;
    let mut few = 20;
    for _ in 0..200 {
        // The busy one always asks first, and takes whatever was given back.
        read(&mut world, busy, 1_000, &mut backlog);
        read(&mut world, quiet, 1_500, &mut few);
        assert!(world.engine.bytes() <= 11_500);
        world.hand_over();
        let TurnOut { owner, jobs } = &world.turns[0];
        world.finish(*owner, jobs[0].record);
    }
    let handled = world.status(quiet).counts.handled;
    assert!(
        handled >= 10,
        "only {handled} of the quiet partition's records ran"
    );
}

/// Eight handlers of 10 ms each end, those that were handed over first.
fn round(world: &mut World) {
    world.hand_over();
    world.pass(ms(10));
    for _ in 0..8 {
        let TurnOut { owner, jobs } = &world.turns[0];
        world.finish(*owner, jobs[0].record);
    }
}

// R11
#[test]
fn a_large_backlog_does_not_keep_quiet_partitions_waiting() {
    for ordering in [Ordering::Unordered, Ordering::ByKey] {
        let mut world = World::with(ordering, |config| config.concurrency = 8);
        let busy = world.assign(0);
        let quiet = [0, 1, 2].map(|_| world.assign(0));
        (0..10_000).for_each(|offset| world.receive(busy, offset, Some(offset as u64)));
        // Until the pace is known and what was stocked before has gone.
        (0..20).for_each(|_| round(&mut world));
        for offset in 0..20 {
            for owner in quiet {
                world.receive(owner, offset, Some(offset as u64));
            }
            (0..3).for_each(|_| round(&mut world));
            for owner in quiet {
                let handled = world.status(owner).counts.handled;
                assert!(
                    handled > offset as u64,
                    "{ordering:?}: {offset} still waits"
                );
            }
        }
    }
}

#[test]
fn partitions_take_turns() {
    let mut world = World::with(Ordering::ByPartition, |config| config.concurrency = 3);
    let owners: Vec<_> = (0..100)
        .map(|start| world.partition(start..start + 1_000))
        .collect();
    let mut turns = vec![0; 100];
    for _ in 0..1_000 {
        world.hand_over();
        let TurnOut { owner, jobs } = &world.turns[0];
        turns[owner.slot()] += 1;
        let (owner, last) = (*owner, jobs.len());
        (0..last).for_each(|_| {
            let next = world.turns[0].jobs[0].record;
            world.finish(owner, next);
        });
        let position = world.status(owner).position.unwrap();
        (position..position + last as i64).for_each(|offset| world.receive(owner, offset, None));
    }
    assert_eq!(owners.len(), turns.len());
    assert!(
        turns.iter().all(|turns| (9..=11).contains(turns)),
        "{turns:?}"
    );
}

#[test]
fn free_handlers_are_shared_between_partitions_with_a_backlog() {
    let mut world = World::with(Ordering::Unordered, |config| config.concurrency = 30);
    let owners = [0, 1, 2].map(|_| world.partition(0..1_000));
    world.hand_over();
    let half_a_share = world.turns.len() / 3 / 2;
    for owner in owners {
        let out = world.turns.iter().filter(|turn| turn.owner == owner);
        assert!(out.count() >= half_a_share);
    }
}

#[test]
fn handlers_in_progress_keep_to_their_number_but_for_a_small_stock() {
    let mut world = World::with(Ordering::Unordered, |config| config.concurrency = 10);
    let owner = world.partition(0..5_000);
    for round in 0..50 {
        world.hand_over();
        world.pass(ms(20));
        (round * 10..(round + 1) * 10).for_each(|offset| world.finish(owner, offset));
        assert!(world.engine.turns_out() <= 10 + 64);
    }
    world.hand_over();
    let stock = world.engine.turns_out() - 10;
    assert!(
        stock <= 4,
        "{stock} records wait at executors that take 2 ms for one"
    );
}

#[test]
fn handlers_that_are_ready_at_once_get_a_large_stock() {
    let mut world = World::with(Ordering::Unordered, |config| config.concurrency = 10);
    let owner = world.assign(0);
    let (mut offset, mut most) = (0, 0);
    for _ in 0..20 {
        for _ in world.status(owner).queued..5_000 {
            world.receive(owner, offset, None);
            offset += 1;
        }
        world.hand_over();
        most = most.max(world.turns.len());
        world.pass(Duration::from_micros(600));
        for TurnOut { owner, jobs } in world.turns.drain(..) {
            let Job { seq, lane, .. } = jobs[0];
            world.engine.finished(owner, seq, lane, Outcome::Handled);
        }
    }
    assert!(
        most > 1_000,
        "no more than {most} were handed over at a time"
    );
}

#[test]
fn a_paused_partition_is_neither_read_nor_handed_over_and_what_runs_goes_on() {
    let mut world = World::with(Ordering::ByPartition, |config| config.concurrency = 1);
    let owner = world.partition(0..300);
    let other = world.partition(0..1);
    world.hand_over();
    world.finish(owner, 0);
    world.engine.set_paused(owner, true);
    assert_eq!(world.engine.room(owner), 0);
    assert!(world.status(owner).paused);
    world.finish_all();
    assert_eq!(world.committable(owner), 64, "the turn that was out ends");
    assert_eq!(world.committable(other), 1);

    world.engine.set_paused(owner, false);
    assert!(world.engine.room(owner) > 0);
    world.finish_all();
    assert_eq!(world.committable(owner), 300);
}

#[test]
fn what_can_be_seen_of_a_partition_tells_where_each_record_is() {
    let mut world = World::with(Ordering::Unordered, |config| config.concurrency = 4);
    let owner = world.partition(0..100);
    world.hand_over();
    world.fail(owner, 0);
    world.pass(ms(50));
    world.fail_with(owner, 1, AfterFailure::GiveUp);
    world.finish(owner, 3);
    let status = world.status(owner);
    assert_eq!(
        (status.retrying, status.dead_lettering, status.held),
        (1, 1, 1)
    );
    assert_eq!(status.running + status.queued, 97);
    assert_eq!(
        (status.position, status.committable, status.committed),
        (Some(100), Some(0), Some(0))
    );
    let oldest = status.oldest_running.unwrap();
    assert_eq!(
        (oldest.offset, oldest.in_state, oldest.attempt),
        (2, ms(50), 1)
    );

    world.finish_all();
    world.pass(ms(50));
    world.hand_over();
    world.pass(ms(7));
    let oldest = world.status(owner).oldest_running.unwrap();
    assert_eq!(
        (oldest.offset, oldest.in_state, oldest.attempt),
        (0, ms(7), 2)
    );
}

#[test]
fn each_record_gives_back_its_own_bytes_however_many_are_open() {
    let mut world = World::with(Ordering::Unordered, |config| config.concurrency = 10_000);
    let owner = world.assign(0);
    let mut open = 0;
    for lot in 0..10 {
        for offset in lot * 500..(lot + 1) * 500 {
            world.receive(owner, offset, None);
            open += size(offset);
        }
        world.hand_over();
        // Every third stays, and the first of all.
        for offset in (lot * 500..(lot + 1) * 500).filter(|offset| offset % 3 > 0) {
            world.finish(owner, offset);
            open -= size(offset);
        }
        assert_eq!(
            (world.engine.bytes(), world.status(owner).bytes),
            (open, open)
        );
    }
    world.finish_all();
    assert_eq!(world.engine.bytes(), 0);
}

#[test]
fn the_age_of_a_handler_is_right_however_long_the_partition_has_been_ours() {
    let mut world = World::new(Ordering::Unordered);
    let owner = world.partition(0..1);
    world.finish_all();
    let day = Duration::from_secs(24 * 3600);
    // The second of these handlers starts before, and is looked at after, the 32-bit milliseconds are through.
    for (offset, gap) in [(1, 40 * day), (2, 9 * day), (3, 100 * day)] {
        world.pass(gap);
        world.receive(owner, 2 * offset, None);
        world.hand_over();
        world.pass(day / 2);
        world.receive(owner, 2 * offset + 1, None);
        world.hand_over();
        let oldest = world.status(owner).oldest_running.unwrap();
        assert_eq!((oldest.offset, oldest.in_state), (2 * offset, day / 2));
        world.finish_all();
    }
}

// R12
#[test]
fn a_partition_whose_records_are_stuck_leaves_the_others_their_shares_of_bytes_and_records() {
    let mut by_bytes = World::with(Ordering::Unordered, |config| {
        config.max_bytes = 1_000_000;
        config.concurrency = 1_000;
    });
    let mut by_records = World::with(Ordering::Unordered, |config| {
        config.max_records = 1_000;
        config.concurrency = 1_000;
    });
    for world in [&mut by_bytes, &mut by_records] {
        let owners = [0; 8].map(|_| world.assign(0));
        let stuck = owners[0];
        read_all(world, stuck, 1_000, 5_000);
        world.hand_over();
        assert_eq!(world.engine.records(), 562, "the pool and its own share");
        let pace = |world: &mut World| {
            for owner in &owners[1..] {
                read_all(world, *owner, 1_000, 5_000);
            }
            assert!(world.engine.bytes() <= 1_000_000 && world.engine.records() <= 1_000);
            world.hand_over();
            let others = world.turns.iter().filter(|turn| turn.owner != stuck);
            let others: Vec<_> = others
                .map(|turn| (turn.owner, turn.jobs[0].record))
                .collect();
            for (owner, offset) in &others {
                world.finish(*owner, *offset);
            }
            others.len()
        };
        for _ in 0..10 {
            let read = pace(world);
            assert!(read >= 7 * 60, "only {read} of the others' records came");
        }
        assert_eq!(world.engine.room(stuck), 0);
        world.finish_all();
        assert_eq!((world.engine.bytes(), world.engine.records()), (0, 0));
        read_all(world, stuck, 1_000, 5_000);
        assert_eq!(world.engine.records(), 562, "it goes on");
    }
}

#[test]
fn partitions_that_come_while_a_stuck_one_has_used_up_everything_get_their_shares() {
    let mut world = World::with(Ordering::Unordered, |config| {
        config.max_bytes = 100_000;
        config.concurrency = 100;
    });
    let stuck = world.assign(0);
    read_all(&mut world, stuck, 1_000, 5_000);
    let all = world.engine.bytes();
    assert!((97_000..=100_000).contains(&all), "{all}");
    let others = [0; 4].map(|_| world.assign(0));
    for owner in others {
        read_all(&mut world, owner, 1_000, 5_000);
        let bytes = world.status(owner).bytes;
        assert!((8_000..=10_000).contains(&bytes), "{bytes}");
    }
    // They go, and all is as before.
    for owner in others {
        world.engine.end(owner);
    }
    assert_eq!(world.engine.bytes(), all);
    world.finish_all();
    assert_eq!((world.engine.bytes(), world.engine.records()), (0, 0));
}

const MIB: usize = 1 << 20;

fn defaults(config: &mut Config) {
    (config.max_bytes, config.max_records) = (64 * MIB, 250_000);
}

/// Reads as the pump does, records of these sizes by offset, and returns how many.
fn read_sizes(world: &mut World, owner: Ownership, size: impl Fn(i64) -> usize) -> usize {
    let mut count = 0;
    loop {
        let mut reading = world.engine.reading(owner);
        let before = count;
        while reading.next() > 0 {
            let (records, mut bytes) = (reading.next(), 0);
            for _ in 0..records {
                let offset = world.status(owner).position.unwrap();
                let size = size(offset);
                world.engine.receive(owner, offset, None, size, offset);
                bytes += size;
            }
            reading.took(records, bytes);
            count += records;
        }
        if count == before {
            return count;
        }
    }
}

#[test]
fn as_many_large_records_are_with_handlers_as_the_budget_has_room_for() {
    for (concurrency, size) in [
        (64, 450 << 10),
        (64, 700 << 10),
        (64, MIB),
        (512, 100 << 10),
        (8, 5 * MIB),
        (64, 20 * MIB),
    ] {
        let mut world = World::with(Ordering::Unordered, |config| {
            defaults(config);
            config.concurrency = concurrency;
        });
        let owner = world.assign(0);
        for round in 0..3 {
            read_sizes(&mut world, owner, |_| size);
            let running = world.hand_over().len();
            let room_for = 64 * MIB / size;
            assert!(
                running >= concurrency.min(room_for),
                "round {round}: {running} of {size} bytes, {concurrency} handlers"
            );
            assert!(world.engine.bytes() <= 64 * MIB);
            world.finish_all();
        }
    }
}

#[test]
fn small_records_go_on_past_a_large_one_that_takes_its_time_for_the_whole_window() {
    let mut world = World::with(Ordering::Unordered, defaults);
    let owner = world.assign(0);
    let size = |offset| if offset == 5_000 { 600 << 10 } else { 1_000 };
    let mut rounds = 0;
    while world.status(owner).position.unwrap() < 5_000 + 16_384 {
        rounds += 1;
        assert!(rounds < 2_000, "{:?}", world.status(owner));
        read_sizes(&mut world, owner, size);
        for offset in world.hand_over() {
            if offset != 5_000 {
                world.finish(owner, offset);
            }
        }
    }
    assert_eq!(world.committable(owner), 5_000);
}

#[test]
fn a_large_record_among_small_ones_does_not_have_the_next_ones_read_one_by_one() {
    let mut world = World::with(Ordering::Unordered, defaults);
    let owner = world.assign(0);
    while world.status(owner).position.unwrap() < 3_000 {
        read_sizes(&mut world, owner, |_| 1_000);
        world.finish_all();
    }
    let offset = world.status(owner).position.unwrap();
    world.engine.receive(owner, offset, None, 600 << 10, offset);
    assert!(
        world.engine.room(owner) > 30,
        "{}",
        world.engine.room(owner)
    );
}

#[test]
fn a_read_ends_once_records_are_larger_than_those_before_them() {
    let mut world = World::with(Ordering::Unordered, defaults);
    let owner = world.assign(0);
    while world.status(owner).position.unwrap() < 3_000 {
        read_sizes(&mut world, owner, |_| 100);
        world.finish_all();
    }
    let mut reading = world.engine.reading(owner);
    assert_eq!(reading.records(), 1024);
    reading.took(reading.next(), 32 * MIB);
    assert_eq!(reading.next(), 0);
    // The less is left, the fewer are taken unseen.
    read_sizes(&mut world, owner, |_| MIB);
    let bytes = world.engine.bytes();
    assert!(bytes <= 66 * MIB, "{bytes}");
}

#[test]
fn a_thousand_fresh_partitions_with_large_records_stay_near_the_budget() {
    for partitions in [10, 100, 1_000] {
        let mut world = World::with(Ordering::Unordered, defaults);
        let owners: Vec<_> = (0..partitions).map(|_| world.assign(0)).collect();
        for _ in 0..3 {
            for owner in &owners {
                read_sizes(&mut world, *owner, |_| MIB);
            }
            let taken = world.engine.bytes();
            assert!(
                taken <= (2 * 64 + 1) * MIB,
                "{partitions} partitions: {taken}"
            );
            assert!(
                taken >= (60 * MIB).min(partitions * MIB),
                "{partitions} partitions: {taken}"
            );
            world.finish_all();
        }
        // Those that had to wait come as well.
        for _ in 0..20 {
            for owner in owners.iter().rev() {
                if world.status(*owner).counts.received == 0 {
                    read_sizes(&mut world, *owner, |_| MIB);
                }
            }
            world.finish_all();
        }
        for owner in &owners {
            assert!(world.status(*owner).counts.handled > 0);
        }
    }
}

#[test]
fn a_few_partitions_stuck_on_records_larger_than_all_that_is_allowed_keep_no_other_out() {
    let mut world = World::with(Ordering::Unordered, |config| config.max_bytes = 10_000);
    for _ in 0..3 {
        let stuck = world.assign(0);
        assert!(world.engine.room(stuck) > 0);
        world.engine.receive(stuck, 0, None, 100_000, 0);
    }
    let other = world.assign(0);
    assert!(world.engine.room(other) > 0, "whatever its records may be");
    world.engine.receive(other, 0, None, 500, 0);
    assert_eq!(world.engine.room(other), 1, "its share is its own");
}
