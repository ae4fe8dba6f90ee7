//! What is committed, when, and what the broker's answers change.

use super::{CommitResult::*, *};

/// A world with one partition of ten records, all handed over.
fn ten() -> (World, Ownership) {
    let mut world = World::new(Ordering::Unordered);
    let owner = world.partition(0..10);
    world.hand_over();
    (world, owner)
}

// T1
#[test]
fn gaps_in_the_log_are_committed_over() {
    let mut world = World::new(Ordering::Unordered);
    let owner = world.assign(0);
    for offset in [0, 2, 4, 6] {
        world.receive(owner, offset, None);
    }
    world.hand_over();
    for (offset, committable) in [(0, 2), (2, 4), (6, 4), (4, 7)] {
        world.finish(owner, offset);
        assert_eq!(world.committable(owner), committable);
    }
    world.commit_all();
    assert_eq!(world.committed(owner), 7);
}

// T2
#[test]
fn far_apart_offsets_are_committed_over() {
    let mut world = World::new(Ordering::Unordered);
    let owner = world.assign(5);
    for offset in [5, 90, 1_000_007] {
        world.receive(owner, offset, None);
    }
    world.finish_all();
    world.commit_all();
    assert_eq!(world.committed(owner), 1_000_008);
}

// T3
#[test]
fn a_commit_stops_at_the_lowest_unfinished_record() {
    let mut world = World::new(Ordering::Unordered);
    let owner = world.assign(1);
    for offset in [1, 2, 9] {
        world.receive(owner, offset, None);
    }
    world.hand_over();
    world.finish(owner, 9);
    world.finish(owner, 1);
    world.commit_all();
    assert_eq!(world.committed(owner), 2);
}

// T4
#[test]
fn records_that_are_all_skipped_are_committed_over() {
    let (mut world, owner) = ten();
    (0..10).for_each(|offset| world.end_with(owner, offset, Outcome::Skipped));
    world.commit_all();
    assert_eq!(world.committed(owner), 10);
    assert_eq!(world.status(owner).counts.skipped, 10);
}

// T5
#[test]
fn the_only_record_at_offset_zero_is_committed_over() {
    let mut world = World::new(Ordering::ByKey);
    let owner = world.partition(0..1);
    world.finish_all();
    world.commit_all();
    assert_eq!(world.committed(owner), 1);
}

// T6
#[test]
fn nothing_is_committed_when_nothing_has_finished() {
    let (mut world, owner) = ten();
    world.pass(10 * SECOND);
    assert_eq!(world.commit(), None);
    world.engine.drain(owner);
    assert_eq!(world.engine.final_commit(&[owner], false), None);
    assert_eq!(world.engine.end(owner).unwrap().committable, Some(0));
}

#[test]
fn a_start_that_nobody_committed_is_committed_before_the_first_record() {
    let mut world = World::new(Ordering::ByKey);
    let owner = world.engine.assign(Some(40), None, Inherited::default());
    assert_eq!(world.commit(), Some(vec![(owner, 40)]));
    world.answer(&[Accepted]);
    world.pass(10 * SECOND);
    assert_eq!(world.commit(), None);
}

#[test]
fn commits_are_an_interval_apart() {
    let (mut world, owner) = ten();
    world.finish(owner, 0);
    assert_eq!(world.sleep(), Some(SECOND));
    world.pass(ms(999));
    assert_eq!(world.commit(), None);
    world.pass(ms(1));
    assert_eq!(world.commit(), Some(vec![(owner, 1)]));
}

// T7
#[test]
fn what_finishes_while_a_commit_is_in_flight_is_committed_without_new_traffic() {
    let (mut world, owner) = ten();
    world.finish(owner, 0);
    world.pass(SECOND);
    assert_eq!(world.commit(), Some(vec![(owner, 1)]));
    world.finish(owner, 1);
    world.pass(SECOND);
    assert_eq!(world.commit(), None, "one is in flight");
    world.answer(&[Accepted]);
    assert_eq!(world.committed(owner), 1);

    let sleep = world.sleep().expect("there is something to wake up for");
    world.pass(sleep);
    assert_eq!(world.commit(), Some(vec![(owner, 2)]));
    world.answer(&[Accepted]);
    assert_eq!(world.committed(owner), 2);
    assert_eq!(world.sleep(), None);
}

// T8
#[test]
fn after_a_commit_that_failed_committed_catches_up_by_itself() {
    for failure in [Unavailable, Rejoining] {
        let (mut world, owner) = ten();
        world.finish(owner, 0);
        world.pass(SECOND);
        assert!(world.commit().is_some());
        world.answer(&[failure]);
        assert_eq!(
            (world.committed(owner), world.status(owner).commit_failures),
            (0, 1)
        );

        let mut sent = None;
        for _ in 0..5 {
            world.pass(world.sleep().expect("it must be tried again"));
            sent = world.commit();
            if sent.is_some() {
                break;
            }
        }
        assert_eq!(sent, Some(vec![(owner, 1)]), "{failure:?}");
        world.answer(&[Accepted]);
        assert_eq!(
            (world.committed(owner), world.status(owner).commit_failures),
            (1, 0)
        );
    }
}

// R5
#[test]
fn a_commit_that_keeps_failing_is_not_retried_in_a_tight_loop() {
    let (mut world, owner) = ten();
    world.finish(owner, 0);
    let mut sent = 0;
    for _ in 0..6_000 {
        world.pass(ms(10));
        if world.commit().is_some() {
            sent += 1;
            world.answer(&[Rejoining]);
        }
    }
    assert!((5..=12).contains(&sent), "{sent} commits in a minute");

    // The last one before the partition goes away carries it all the same.
    world.engine.hold_commits(true);
    world.engine.drain(owner);
    let last = world.engine.final_commit(&[owner], false).map(offsets);
    assert_eq!(last, Some(vec![(owner, 1)]));
}

// R5b
#[test]
fn a_partition_that_fails_is_committed_alone_and_the_others_move_on_under_traffic() {
    let mut world = World::new(Ordering::Unordered);
    let owners = [0, 1, 2].map(|_| world.partition(0..1_000));
    let bad = owners[1];
    world.hand_over();
    let mut alone = 0;
    for offset in 0..1_000 {
        for owner in owners {
            world.hand_over();
            world.finish(owner, offset);
        }
        world.pass(ms(100));
        // Each finishes more while a commit is in flight: none of them is ever at rest.
        if let Some(commit) = world.commit() {
            let results: Vec<_> = commit
                .iter()
                .map(|(owner, _)| if *owner == bad { Unavailable } else { Accepted })
                .collect();
            alone += usize::from(commit.len() == 1 && commit[0].0 == bad);
            world.answer(&results);
        }
    }
    assert_eq!(world.committed(bad), 0);
    assert!(alone >= 5, "it was tried alone only {alone} times");
    for owner in [owners[0], owners[2]] {
        assert!(world.committed(owner) > 900, "{}", world.committed(owner));
        assert_eq!(world.status(owner).commit_failures, 0);
    }
    assert!(world.status(bad).commit_failures > 0);
}

// R5b
#[test]
fn partitions_in_doubt_are_committed_again_under_traffic_of_the_others() {
    let mut world = World::new(Ordering::Unordered);
    let owners = [0, 1, 2].map(|_| world.partition(0..1_000));
    for owner in owners {
        world.hand_over();
        world.finish(owner, 0);
    }
    world.pass(SECOND);
    assert_eq!(world.commit().unwrap().len(), 3);
    world.answer(&[Accepted, Unavailable, Accepted]);
    let mut again = Vec::new();
    for offset in 1..3 {
        world.hand_over();
        world.finish(owners[0], offset);
        let commit = world.commit().expect("doubt does not wait");
        again.extend(commit.iter().map(|(owner, _)| *owner));
        world.answer(&vec![Accepted; commit.len()]);
    }
    assert_eq!(again, owners, "in small groups, none twice");
}

#[test]
fn an_answer_that_names_other_partitions_is_an_error_for_all() {
    let (mut world, owner) = ten();
    world.finish(owner, 0);
    world.pass(SECOND);
    world.commit();
    world.answer(&[]);
    assert_eq!(world.committed(owner), 0);
    world.pass(SECOND);
    assert_eq!(world.commit(), Some(vec![(owner, 1)]));
    world.engine.commit_answered(&[Accepted], Unavailable);
    assert_eq!(world.committed(owner), 0);
}

#[test]
fn a_commit_that_is_refused_for_good_is_told() {
    let (mut world, owner) = ten();
    world.finish(owner, 0);
    world.pass(SECOND);
    world.commit();
    world.answer(&[Fatal]);
}

#[test]
fn only_the_drains_own_commit_is_sent_while_partitions_are_given_away() {
    let mut world = World::new(Ordering::Unordered);
    let (going, staying) = (world.partition(0..3), world.partition(0..3));
    world.hand_over();
    world.finish(going, 0);
    world.finish(staying, 0);
    world.engine.hold_commits(true);
    world.engine.drain(going);
    world.pass(10 * SECOND);
    assert_eq!(world.commit(), None);
    assert_eq!(world.sleep(), None);

    let last = world.engine.final_commit(&[going], false).map(offsets);
    assert_eq!(last, Some(vec![(going, 1)]));
    world.answer(&[Accepted]);
    assert_eq!(world.engine.final_commit(&[going], true), None);
    world.engine.end(going);
    world.engine.hold_commits(false);
    world.commit_all();
    assert_eq!(world.committed(staying), 1);
}

#[test]
fn a_last_commit_waits_for_the_one_in_flight() {
    let (mut world, owner) = ten();
    world.finish(owner, 0);
    world.pass(SECOND);
    world.commit();
    world.finish(owner, 1);
    world.engine.drain(owner);
    assert_eq!(world.engine.final_commit(&[owner], false), None);
    world.answer(&[Accepted]);
    let last = world.engine.final_commit(&[owner], false).map(offsets);
    assert_eq!(last, Some(vec![(owner, 2)]));
}

#[test]
fn a_last_commit_that_leaves_partitions_in_doubt_is_followed_by_others_until_all_are_known() {
    let mut world = World::new(Ordering::Unordered);
    let owners = [0, 1, 2].map(|_| world.partition(0..1));
    world.hand_over();
    world.finish(owners[2], 0);
    // This one has failed before.
    world.pass(SECOND);
    world.commit();
    world.answer(&[Unavailable]);
    world.finish(owners[0], 0);
    world.finish(owners[1], 0);

    for owner in owners {
        world.engine.drain(owner);
    }
    let first = world.engine.final_commit(&owners, false);
    assert_eq!(first.unwrap().entries.len(), 3);
    world.answer(&[Accepted, Unavailable, Accepted]);
    let mut each = Vec::new();
    while let Some(commit) = world.engine.final_commit(&owners, true) {
        let commit = offsets(commit);
        let results = commit.iter().map(|(owner, _)| match *owner == owners[1] {
            true => Unavailable,
            false => Accepted,
        });
        world.answer(&results.collect::<Vec<_>>());
        each.extend(commit);
    }
    each.sort_unstable_by_key(|(owner, _)| owner.slot());
    each.dedup();
    assert_eq!(each, owners.map(|owner| (owner, 1)));
    assert_eq!(world.committed(owners[2]), 1);
}

#[test]
fn a_last_commit_that_met_passing_trouble_is_tried_again_after_a_pause() {
    let (mut world, owner) = ten();
    world.finish(owner, 0);
    world.engine.drain(owner);
    let last = world.engine.final_commit(&[owner], false).map(offsets);
    world.answer(&[Unavailable]);
    assert_eq!(
        world.engine.final_commit(&[owner], true),
        None,
        "not at once"
    );
    let retry = world.engine.last_commit_retry(&[owner]);
    let retry = retry.expect("it is worth another try");
    world.pass(retry - world.now);
    let again = world.engine.final_commit(&[owner], true).map(offsets);
    assert_eq!(again, last);
    world.answer(&[Accepted]);
    assert_eq!(world.engine.last_commit_retry(&[owner]), None);
}

// R5
#[test]
fn a_last_commit_of_a_member_that_is_out_of_its_generation_is_not_tried_again() {
    let (mut world, owner) = ten();
    world.finish(owner, 0);
    world.engine.drain(owner);
    assert!(world.engine.final_commit(&[owner], false).is_some());
    world.answer(&[Rejoining]);
    assert_eq!(world.engine.last_commit_retry(&[owner]), None);
    world.pass(10 * SECOND);
    assert_eq!(world.engine.final_commit(&[owner], true), None);
}

// R5c
#[test]
fn what_is_owned_is_committed_again_now_and_then_although_nothing_has_changed() {
    let mut world = World::new(Ordering::ByKey);
    let (busy, quiet) = (world.partition(0..3), world.assign(70));
    world.finish_all();
    world.commit_all();
    world.pass(30 * SECOND);
    assert_eq!(world.commit(), None);
    // In the meantime a late commit of an earlier owner has set both back, which nobody is told of.
    world.pass(30 * SECOND);
    assert_eq!(world.commit(), Some(vec![(busy, 3), (quiet, 70)]));
    world.answer(&[Accepted, Accepted]);
    world.pass(30 * SECOND);
    assert_eq!(world.commit(), None);
}

// T14
#[test]
fn partitions_with_one_number_of_two_topics_are_committed_apart() {
    let mut world = World::new(Ordering::ByKey);
    let (one, other) = (world.assign(0), world.assign(500));
    world.receive(one, 0, Some(1));
    world.receive(other, 500, Some(1));
    world.hand_over();
    world.finish(other, 500);
    world.commit_all();
    assert_eq!([world.committed(one), world.committed(other)], [0, 501]);
}

// T15
#[test]
fn passing_transaction_markers_is_committed_without_new_traffic() {
    let (mut world, owner) = ten();
    (0..10).for_each(|offset| world.finish(owner, offset));
    world.commit_all();
    world.engine.skip_to(owner, 12);
    world.pass(world.sleep().expect("there is something to commit"));
    assert_eq!(world.commit(), Some(vec![(owner, 12)]));
}

fn at_most_once(ordering: Ordering) -> World {
    World::with(ordering, |config| {
        config.guarantee = Guarantee::AtMostOnce;
        config.concurrency = 4;
    })
}

#[test]
fn at_most_once_nothing_is_handed_over_before_its_commit_is_acknowledged() {
    for ordering in each_ordering() {
        let mut world = at_most_once(ordering);
        let owner = world.partition(0..3);
        assert!(world.hand_over().is_empty(), "{ordering:?}");
        assert_eq!(world.commit(), Some(vec![(owner, 3)]));
        assert!(world.hand_over().is_empty());
        world.receive(owner, 3, None);
        world.answer(&[Unavailable]);
        assert!(
            world.hand_over().is_empty(),
            "a commit that failed lets nothing in"
        );
        world.pass(Duration::from_secs(2));
        assert_eq!(
            world.commit(),
            Some(vec![(owner, 4)]),
            "the newest state goes out"
        );
        world.receive(owner, 4, None);
        world.answer(&[Accepted]);
        world.finish_all();
        assert_eq!(
            world.committable(owner),
            4,
            "what came after the commit waits for the next one"
        );
        world.commit_all();
        world.finish_all();
        assert_eq!(world.committable(owner), 5);
        assert_eq!(world.commit(), None, "there is nothing more to commit");
    }
}

#[test]
fn at_most_once_a_drain_handles_what_is_committed_and_drops_what_is_not() {
    let mut world = at_most_once(Ordering::ByPartition);
    let owner = world.partition(0..5);
    world.commit_all();
    world.hand_over();
    for offset in 5..8 {
        world.receive(owner, offset, None);
    }
    assert_eq!(world.commit(), Some(vec![(owner, 8)]));
    for offset in 8..10 {
        world.receive(owner, offset, None);
    }
    world.engine.drain(owner);
    world.finish_all();
    assert!(
        !world.engine.is_drained(owner),
        "the commit in flight is not answered"
    );
    world.answer(&[Accepted]);
    assert!(
        !world.engine.is_drained(owner),
        "what it covers is not handled"
    );
    world.finish_all();
    assert!(world.engine.is_drained(owner));
    assert_eq!(world.committable(owner), 8);
    assert_eq!(world.engine.final_commit(&[owner], false), None);
    let last = world.engine.end(owner).unwrap();
    assert_eq!((last.committed, last.committed_left), (Some(8), 0));
}

#[test]
fn at_most_once_the_end_tells_what_was_committed_and_not_handled() {
    let mut world = at_most_once(Ordering::ByPartition);
    let owner = world.partition(0..6);
    world.commit_all();
    world.receive(owner, 6, None);
    world.hand_over();
    world.finish(owner, 0);
    world.fail(owner, 1);
    world.engine.drain(owner);
    let last = world.engine.end(owner).unwrap();
    assert_eq!((last.committed, last.committed_left), (Some(6), 5));
}

#[test]
fn at_most_once_a_commit_that_failed_is_taken_back_when_the_partition_is_given_away() {
    let mut world = at_most_once(Ordering::Unordered);
    let owner = world.partition(0..3);
    world.commit_all();
    world.finish_all();
    for offset in 3..6 {
        world.receive(owner, offset, None);
    }
    assert_eq!(world.commit(), Some(vec![(owner, 6)]));
    // The broker may have applied it all the same: then nobody would handle these three.
    world.answer(&[Unavailable]);
    world.receive(owner, 6, None);
    world.engine.drain(owner);
    assert!(world.engine.is_drained(owner));
    assert!(world.engine.commit_is_due(&[owner]));
    let last = world.engine.final_commit(&[owner], false).map(offsets);
    assert_eq!(last, Some(vec![(owner, 3)]));
    world.answer(&[Accepted]);
    assert!(!world.engine.commit_is_due(&[owner]));
    assert_eq!(world.hand_over(), NOTHING);
}

#[test]
fn at_most_once_a_commit_that_fails_during_the_drain_is_taken_back_as_well() {
    let mut world = at_most_once(Ordering::Unordered);
    let owner = world.partition(0..3);
    assert_eq!(world.commit(), Some(vec![(owner, 3)]));
    world.receive(owner, 3, None);
    world.engine.drain(owner);
    assert!(!world.engine.is_drained(owner));
    world.answer(&[Unavailable]);
    assert!(world.engine.is_drained(owner));
    let last = world.engine.final_commit(&[owner], false).map(offsets);
    assert_eq!(last, Some(vec![(owner, 0)]));
}

#[test]
fn at_most_once_a_drain_that_is_asked_for_twice_counts_what_it_dropped_once() {
    let mut world = at_most_once(Ordering::Unordered);
    let owner = world.partition(0..3);
    world.engine.drain(owner);
    world.engine.drain(owner);
    assert_eq!(world.status(owner).committed_left, 0);
    assert!(world.engine.is_drained(owner));
}

#[test]
fn at_most_once_what_somebody_set_back_is_committed_again_now_and_then() {
    let mut world = at_most_once(Ordering::Unordered);
    let owner = world.partition(0..3);
    world.commit_all();
    world.finish_all();
    world.commit_all();
    assert_eq!(world.commit(), None);
    world.pass(Duration::from_secs(60));
    assert_eq!(world.commit(), Some(vec![(owner, 3)]));
    world.answer(&[Accepted]);
    world.pass(SECOND);
    assert_eq!(world.commit(), None);
}

#[test]
fn a_last_commit_that_will_never_go_through_is_not_tried_again() {
    let mut world = World::new(Ordering::Unordered);
    let owner = world.partition(0..3);
    world.finish_all();
    world.engine.drain(owner);
    assert!(world.engine.final_commit(&[owner], false).is_some());
    world
        .engine
        .commit_answered(&[CommitResult::Fatal], CommitResult::Fatal);
    assert_eq!(world.engine.last_commit_retry(&[owner]), None);
    assert_eq!(world.engine.final_commit(&[owner], true), None);
    assert!(world.engine.commit_is_due(&[owner]), "it is not committed");
}

#[test]
fn at_most_once_a_start_that_nobody_committed_is_committed_also_when_the_partition_goes_at_once() {
    let mut world = at_most_once(Ordering::Unordered);
    let owner = world.engine.assign(Some(100), None, Inherited::default());
    world.receive(owner, 107, None);
    world.engine.drain(owner);
    let last = world.engine.final_commit(&[owner], false).map(offsets);
    assert_eq!(last, Some(vec![(owner, 107)]), "what it read comes next");
}

/// How the commits that follow a failed one go, in a world where some partitions cannot be committed.
struct Sorting {
    world: World,
    owners: Vec<Ownership>,
}

impl Sorting {
    fn of(partitions: usize) -> Self {
        let mut world = World::new(Ordering::Unordered);
        let owners: Vec<_> = (0..partitions).map(|_| world.partition(0..1)).collect();
        world.finish_all();
        world.pass(SECOND);
        Self { world, owners }
    }

    /// Lets commits be answered, a millisecond each, until none is sent at once. How many there were.
    fn settle(
        &mut self,
        mut answer: impl FnMut(&[(Ownership, i64)]) -> Vec<CommitResult>,
    ) -> usize {
        let mut trips = 0;
        while let Some(commit) = self.world.commit() {
            trips += 1;
            assert!(trips < 10_000);
            self.world.pass(ms(1));
            self.world.answer(&answer(&commit));
        }
        trips
    }

    fn committed(&self) -> usize {
        let committed = |owner: &&Ownership| self.world.committed(**owner) == 1;
        self.owners.iter().filter(committed).count()
    }
}

/// Commits that it may take to sort out a failed one of `n` partitions of which `k` fail by themselves.
fn bound(n: usize, k: usize) -> usize {
    4 * k * (n.ilog2() as usize + 2) + 4
}

#[test]
fn of_a_thousand_partitions_those_that_fail_are_found_in_a_few_commits() {
    for culprits in [&[500][..], &[0], &[999], &[3, 700], &[10, 11, 12, 500, 998]] {
        for manner in 0..3 {
            let mut sorting = Sorting::of(1_000);
            let bad: Vec<_> = culprits.iter().map(|at| sorting.owners[*at]).collect();
            let answer = |commit: &[(Ownership, i64)]| {
                let fails = |(owner, _): &(Ownership, i64)| bad.contains(owner);
                if !commit.iter().any(fails) {
                    return vec![Accepted; commit.len()];
                }
                match manner {
                    // Each by itself.
                    0 => commit
                        .iter()
                        .map(|entry| if fails(entry) { Unavailable } else { Accepted })
                        .collect(),
                    // One partition's error is reported on its neighbours.
                    1 => vec![Unavailable; commit.len()],
                    _ => vec![Shrink; commit.len()],
                }
            };
            let mut trips = sorting.settle(answer);
            if manner == 1 && sorting.committed() == 0 {
                // The one that was to find out whether anything goes through did not go through itself.
                sorting.world.pass(SECOND);
                trips += sorting.settle(answer);
            }
            let (n, k) = (1_000, culprits.len());
            assert_eq!(sorting.committed(), n - k, "{culprits:?} {manner}");
            assert!(
                trips <= bound(n, k),
                "{trips} commits, {culprits:?} {manner}"
            );
        }
    }
}

#[test]
fn while_no_commit_goes_through_one_a_pause_is_sent_and_after_that_a_few_for_all() {
    let mut sorting = Sorting::of(1_000);
    let fails = |commit: &[(Ownership, i64)]| vec![Unavailable; commit.len()];
    let mut trips = sorting.settle(fails);
    for _ in 0..600 {
        sorting.world.pass(ms(100));
        trips += sorting.settle(fails);
    }
    assert!((5..=15).contains(&trips), "{trips} commits in a minute");
    assert_eq!(sorting.committed(), 0);
    sorting.world.pass(10 * SECOND);
    let trips = sorting.settle(|commit| vec![Accepted; commit.len()]);
    assert_eq!(sorting.committed(), 1_000);
    assert!(trips <= 4, "{trips} commits");
}
