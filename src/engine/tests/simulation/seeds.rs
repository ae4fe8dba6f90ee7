//! Seeds that showed a defect once, by what it was, and with what was in their worlds then. A change of the world makes other worlds of them: each rule that was
//! broken has a test of its own beside the engine.

use super::{Trouble, simulate};

#[test]
fn a_last_commit_that_the_coordinator_refuses_for_a_moment_is_not_given_up() {
    simulate(1, Trouble::None, false);
}

#[test]
fn metadata_that_somebody_wrote_over_is_written_again() {
    simulate(12, Trouble::None, false);
}

#[test]
fn a_commit_of_which_one_partition_failed_proves_nothing_about_the_others() {
    simulate(489, Trouble::None, false);
}

#[test]
fn ranges_that_were_inherited_and_not_passed_stay_in_every_commit() {
    simulate(236, Trouble::None, false);
}

#[test]
fn a_late_commit_of_an_earlier_owner_is_healed() {
    simulate(30_112, Trouble::None, false);
}

#[test]
fn a_commit_that_failed_is_taken_back_where_it_came_before_its_handlers() {
    simulate(328, Trouble::BySeed, false);
}

#[test]
fn a_late_commit_of_an_earlier_owner_is_healed_also_at_most_once() {
    simulate(533, Trouble::BySeed, false);
}

#[test]
fn a_last_commit_that_is_refused_for_good_is_not_waited_for() {
    simulate(58, Trouble::BySeed, false);
}
