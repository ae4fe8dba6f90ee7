//! A dependency that is down: what opens the outage breaker, what goes on meanwhile, and how the flow comes back.

use proptest::{prelude::*, sample::Index};

use super::*;
use crate::engine::breaker::{Breaker, Evidence};

/// The probes' pauses and records' waits, with their jitter.
const LONGEST: Duration = Duration::from_secs(10);

fn world(ordering: Ordering, concurrency: usize) -> World {
    World::with(ordering, |config| config.concurrency = concurrency)
}

fn keyed(world: &mut World, offsets: std::ops::Range<i64>) -> Ownership {
    let owner = world.assign(offsets.start);
    offsets.for_each(|offset| world.receive(owner, offset, Some(offset as u64)));
    owner
}

/// All that runs meets an outage.
fn all_down(world: &mut World) {
    while let Some(turn) = world.turns.first() {
        let (owner, offset) = (turn.owner, turn.jobs[0].record);
        world.outage(owner, offset);
    }
}

/// Ten records meet an outage, and the breaker is open.
fn open(world: &mut World) {
    world.hand_over();
    all_down(world);
    assert_eq!(world.engine.breaker().state(), BreakerState::Open);
}

fn until_probe(world: &mut World) -> Vec<i64> {
    let pause = world.engine.breaker().probe_at().expect("it is open") - world.now;
    world.pass(pause - ms(1));
    assert_eq!(world.hand_over(), NOTHING, "it is not time");
    world.pass(ms(1));
    world.hand_over()
}

fn changes(world: &mut World) -> Vec<BreakerChange> {
    std::iter::from_fn(|| world.engine.next_breaker_change()).collect()
}

#[test]
fn an_outage_never_exhausts_a_record_and_its_waits_grow_up_to_a_bound() {
    for (ordering, breaker) in each_ordering()
        .into_iter()
        .flat_map(|ordering| [(ordering, None), (ordering, Some(OutageBreaker::new()))])
    {
        let mut world = World::with(ordering, |config| {
            config.breaker = breaker;
            config.retry = Arc::new(Retry::fixed(ms(100)).max_attempts(2).max_elapsed(SECOND));
        });
        let owner = world.partition(0..1);
        let mut waits = Vec::new();
        for _ in 0..30 {
            assert_eq!(world.hand_over(), [0]);
            assert_eq!(world.turns[0].jobs[0].attempt, 1);
            world.outage(owner, 0);
            waits.push(world.sleep().unwrap());
            world.pass(waits[waits.len() - 1]);
        }
        assert!(waits[0] <= ms(600), "{waits:?}");
        assert!(waits[3] >= 4 * ms(800), "{waits:?}");
        assert!(waits.iter().all(|wait| *wait <= 5 * SECOND), "{waits:?}");
        // An error of its own exhausts it, by its own attempts and time, as if nothing had been.
        for attempt in 1..=2 {
            assert_eq!(world.hand_over(), [0]);
            world.pass(ms(1_100));
            assert_eq!(world.turns[0].jobs[0].attempt, attempt);
            assert_eq!(
                world.engine.next_given_up().map(|given_up| given_up.record),
                None
            );
            world.fail(owner, 0);
            world.pass(ms(100));
        }
        assert_eq!(world.dead_letter(), Some(0));
        assert_eq!(world.status(owner).counts.outages, 30);
        assert_eq!(world.status(owner).counts.retried, 1);
    }
}

#[test]
fn it_opens_when_enough_attempts_within_the_window_were_outages_and_not_before() {
    let down = |answered: i64, outages: i64, apart: Duration| {
        let mut world = world(Ordering::Unordered, 64);
        let owner = world.partition(0..40);
        world.hand_over();
        (0..answered).for_each(|offset| world.finish(owner, offset));
        for offset in answered..answered + outages {
            world.outage(owner, offset);
            world.pass(apart);
        }
        world.engine.breaker().state() == BreakerState::Open
    };
    assert!(!down(0, 9, ms(0)), "too few");
    assert!(down(0, 10, ms(0)));
    assert!(!down(11, 10, ms(0)), "not half of them");
    assert!(down(10, 10, ms(0)));
    assert!(!down(0, 12, 2 * SECOND), "not within the window");
}

#[test]
fn other_failures_are_no_outages() {
    let mut world = world(Ordering::Unordered, 64);
    let owner = world.partition(0..60);
    world.hand_over();
    (0..20).for_each(|offset| world.fail(owner, offset));
    (20..40).for_each(|offset| world.fail_with(owner, offset, AfterFailure::GiveUp));
    (40..55).for_each(|offset| world.outage(owner, offset));
    assert_eq!(world.engine.breaker().state(), BreakerState::Closed);
    assert_eq!(world.status(owner).counts.outages, 15);
}

#[test]
fn under_much_traffic_a_run_of_outages_opens_it_at_once() {
    let mut world = world(Ordering::Unordered, 30);
    let owner = world.partition(0..10_000);
    for offset in 0..9_900 {
        world.hand_over();
        world.finish(owner, offset);
    }
    for offset in 9_900..9_929 {
        world.hand_over();
        world.outage(owner, offset);
    }
    assert_eq!(world.engine.breaker().state(), BreakerState::Closed);
    world.outage(owner, 9_929);
    assert_eq!(world.engine.breaker().state(), BreakerState::Open);
}

#[test]
fn while_it_is_open_only_probes_go_out_one_at_a_time_after_growing_pauses() {
    for ordering in [Ordering::Unordered, Ordering::ByKey] {
        let mut world = world(ordering, 10);
        keyed(&mut world, 0..500);
        open(&mut world);
        let mut pauses = Vec::new();
        let began = world.now;
        while world.now - began < 600 * SECOND {
            let before = world.now;
            let probe = until_probe(&mut world);
            pauses.push(world.now - before);
            assert_eq!(probe.len(), 1);
            world.pass(ms(100));
            assert_eq!(world.hand_over(), probe, "one at a time");
            all_down(&mut world);
        }
        assert!((ms(800)..=ms(1_200)).contains(&pauses[0]), "{pauses:?}");
        assert!((ms(1_600)..=ms(2_400)).contains(&pauses[1]), "{pauses:?}");
        assert!(pauses.iter().all(|pause| *pause <= LONGEST), "{pauses:?}");
        assert!((55..90).contains(&pauses.len()), "{} probes", pauses.len());
        let changes = changes(&mut world);
        assert!(matches!(
            changes[0],
            BreakerChange::Opened {
                outages: 10,
                attempts: 10,
                ..
            }
        ));
        assert_eq!(changes.len(), 1 + pauses.len());
    }
}

#[test]
fn when_a_probe_succeeds_the_flow_opens_up_step_by_step() {
    let mut world = world(Ordering::ByKey, 16);
    let owner = keyed(&mut world, 0..500);
    open(&mut world);
    world.pass(10 * SECOND);
    let mut steps = Vec::new();
    while world.engine.breaker().state() != BreakerState::Closed {
        let out = world.hand_over();
        steps.push(out.len());
        out.into_iter()
            .for_each(|offset| world.finish(owner, offset));
    }
    assert_eq!(steps, [1, 2, 4, 8, 16]);
    assert!(world.hand_over().len() > 16);
    let changes = changes(&mut world);
    assert_eq!(changes.len(), 3);
    assert_eq!(changes[1], BreakerChange::Answers);
    assert_eq!(changes[2], BreakerChange::Closed { after: 10 * SECOND });
    world.finish_all();
    assert_eq!(world.committable(owner), 500);
}

#[test]
fn duplicates_end_an_outage_and_before_one_they_do_not_make_it_look_smaller() {
    let mut world = world(Ordering::ByKey, 16);
    let owner = keyed(&mut world, 0..500);
    world.hand_over();
    for offset in 0..11 {
        world.end_with(owner, offset, Outcome::Duplicate);
    }
    world.hand_over();
    (11..21).for_each(|offset| world.outage(owner, offset));
    assert_eq!(world.engine.breaker().state(), BreakerState::Open);
    world.pass(10 * SECOND);
    while world.engine.breaker().state() != BreakerState::Closed {
        let out = world.hand_over();
        assert!(!out.is_empty());
        for offset in out {
            world.end_with(owner, offset, Outcome::Duplicate);
        }
    }
}

#[test]
fn what_was_before_the_end_of_an_outage_does_not_open_it_again() {
    let mut world = world(Ordering::ByKey, 1);
    let owner = keyed(&mut world, 0..30);
    open(&mut world);
    let probe = until_probe(&mut world);
    world.finish(owner, probe[0]);
    assert_eq!(world.engine.breaker().state(), BreakerState::Closed);
    let next = world.hand_over()[0];
    world.outage(owner, next);
    assert_eq!(world.engine.breaker().state(), BreakerState::Closed);
}

#[test]
fn one_outage_among_many_does_not_stop_the_opening_and_the_ratio_of_a_step_does() {
    for (outages, state) in [(3, BreakerState::Opening), (4, BreakerState::Open)] {
        let mut world = world(Ordering::ByKey, 16);
        let owner = keyed(&mut world, 0..500);
        open(&mut world);
        world.pass(10 * SECOND);
        for _ in 0..3 {
            let out = world.hand_over();
            out.into_iter()
                .for_each(|offset| world.finish(owner, offset));
        }
        let out = world.hand_over();
        assert_eq!(out.len(), 8);
        out[..outages]
            .iter()
            .for_each(|offset| world.outage(owner, *offset));
        assert_eq!(world.engine.breaker().state(), state);
    }
}

#[test]
fn with_little_traffic_the_opening_ends_with_the_window() {
    let mut world = world(Ordering::ByKey, 16);
    let owner = keyed(&mut world, 0..10);
    open(&mut world);
    world.pass(10 * SECOND);
    while let Some(offset) = world.hand_over().first() {
        world.finish(owner, *offset);
    }
    assert_eq!(world.engine.breaker().state(), BreakerState::Opening);
    world.commit_all();
    world.pass(world.sleep().expect("it wakes up for that"));
    assert_eq!(world.engine.breaker().state(), BreakerState::Closed);
}

#[test]
fn retries_and_waits_that_end_while_it_is_open_are_kept_for_the_end_of_the_outage() {
    let mut world = world(Ordering::ByKey, 64);
    let owner = keyed(&mut world, 0..14);
    world.hand_over();
    for _ in 0..4 {
        world.outage(owner, 3);
        world.pass(6 * SECOND);
        world.hand_over();
    }
    (0..3).for_each(|offset| world.fail(owner, offset));
    // It would wait for some 5 s.
    world.outage(owner, 3);
    world.pass(ms(50));
    (4..13).for_each(|offset| world.outage(owner, offset));
    world.finish(owner, 13);
    assert_eq!(world.engine.breaker().state(), BreakerState::Open);
    world.pass(ms(700));
    assert_eq!(world.hand_over(), NOTHING);
    world.pass(ms(500));
    let probe = world.hand_over();
    assert_eq!(probe.len(), 1);
    world.finish(owner, probe[0]);
    // However long a record would have waited by itself: it has waited for this.
    world.finish_all();
    assert_eq!(world.committable(owner), 14);
}

#[test]
fn no_time_of_retries_goes_on_while_it_is_open() {
    let mut world = World::with(Ordering::ByKey, |config| {
        let retry = Retry::fixed(ms(400)).unlimited_attempts();
        config.retry = Arc::new(retry.max_elapsed(SECOND));
    });
    let owner = keyed(&mut world, 0..11);
    world.hand_over();
    world.fail(owner, 0);
    world.pass(ms(100));
    all_down(&mut world);
    for _ in 0..100 {
        world.pass(6 * SECOND);
        if world.hand_over() == [0] {
            // It is left in peace, so that nothing but the clock spares it.
            world.give_back(0);
            world.hand_over();
        }
        all_down(&mut world);
    }
    world.pass(LONGEST);
    let until_it_runs = |world: &mut World| {
        while world.hand_over() != [0] {
            let TurnOut { owner, jobs } = world
                .turns
                .iter()
                .find(|turn| turn.jobs[0].record != 0)
                .expect("it comes");
            world.finish(*owner, jobs[0].record);
        }
    };
    until_it_runs(&mut world);
    world.fail(owner, 0);
    assert_eq!(world.dead_letter(), None, "ten minutes have not counted");
    world.pass(SECOND);
    until_it_runs(&mut world);
    world.fail(owner, 0);
    assert_eq!(world.dead_letter(), Some(0), "what comes after them does");
}

#[test]
fn nothing_is_read_while_it_is_open_but_something_to_probe_with() {
    let mut world = world(Ordering::ByKey, 10);
    let owner = keyed(&mut world, 0..10);
    open(&mut world);
    world.pass(ms(1));
    assert_eq!(world.engine.room(owner), 0);
    // All that could be probed with goes, and an empty partition comes.
    world.engine.end(owner);
    let owner = world.assign(0);
    assert_eq!(world.engine.room(owner), 1);
    world.receive(owner, 0, Some(0));
    assert_eq!(world.engine.room(owner), 0);
    world.pass(2 * SECOND);
    assert_eq!(world.hand_over(), [0]);
    world.finish(owner, 0);
    assert!(world.engine.room(owner) > 1);
}

#[test]
fn records_that_are_held_back_do_not_make_it_read_on_and_on() {
    let mut world = world(Ordering::ByKey, 10);
    let owner = keyed(&mut world, 0..11);
    world.hand_over();
    let hour = Duration::from_secs(3600);
    world.fail_with(owner, 10, AfterFailure::RetryAfter(hour, None));
    all_down(&mut world);
    world.pass(2 * SECOND);
    let mut next = 11;
    world.engine.end(owner);
    let owner = world.assign(next);
    // The only probe there is fails in its own way, and its key waits for an hour.
    world.receive(owner, next, Some(0));
    assert_eq!(world.hand_over(), [next]);
    world.fail_with(owner, next, AfterFailure::Postpone(hour));
    while world.engine.room(owner) > 0 {
        next += 1;
        world.receive(owner, next, Some(0));
    }
    assert!(next < 11 + 2 * FIRST_READ as i64, "{next}");
}

#[test]
fn a_probe_that_hangs_does_not_keep_it_open() {
    let mut world = world(Ordering::ByKey, 10);
    let owner = keyed(&mut world, 0..100);
    open(&mut world);
    let probe = until_probe(&mut world);
    world.pass(LONGEST - ms(1));
    assert_eq!(world.hand_over(), probe);
    world.pass(ms(1));
    let both = world.hand_over();
    assert_eq!(both.len(), 2);
    world.finish(owner, both[1]);
    assert_eq!(world.engine.breaker().state(), BreakerState::Opening);
    // It may also just have been slow.
    world.finish(owner, both[0]);
}

#[test]
fn a_record_that_always_meets_an_outage_does_not_keep_it_open() {
    for (ordering, bad) in [Ordering::Unordered, Ordering::ByKey]
        .into_iter()
        .flat_map(|ordering| (0..30).map(move |bad| (ordering, bad)))
    {
        let mut world = world(ordering, 10);
        let owner = keyed(&mut world, 0..30);
        open(&mut world);
        for _ in 0..200 {
            world.commit_all();
            for offset in world.hand_over() {
                if offset == bad {
                    world.outage(owner, offset);
                } else {
                    world.finish(owner, offset);
                }
            }
        }
        assert_eq!(world.handled.len(), 29, "{ordering:?}, {bad}");
    }
}

#[test]
fn what_a_probe_says_of_itself_only_lets_the_next_one_go() {
    let mut world = world(Ordering::ByKey, 10);
    let owner = keyed(&mut world, 0..30);
    open(&mut world);
    let mut probe = until_probe(&mut world);
    for step in 0..6 {
        assert_eq!(probe.len(), 1);
        match step % 3 {
            0 => world.fail_with(owner, probe[0], AfterFailure::GiveUp),
            1 => world.fail_with(owner, probe[0], AfterFailure::Postpone(SECOND)),
            _ => world.end_with(owner, probe[0], Outcome::Skipped),
        }
        assert_eq!(world.engine.breaker().state(), BreakerState::HalfOpen);
        probe = world.hand_over();
    }
    // An error that is to be retried is an answer.
    world.fail(owner, probe[0]);
    assert_eq!(world.engine.breaker().state(), BreakerState::Opening);
}

#[test]
fn a_probe_that_came_back_untouched_or_was_taken_away_is_followed_by_another() {
    let mut world = world(Ordering::ByKey, 10);
    let one = keyed(&mut world, 0..30);
    let other = keyed(&mut world, 100..130);
    open(&mut world);
    until_probe(&mut world);
    world.give_back(0);
    assert_eq!(world.hand_over().len(), 1);
    let TurnOut { owner, jobs } = &world.turns[0];
    let (owner, probe) = (*owner, jobs[0].record);
    world.engine.drain(owner);
    world.engine.end(owner);
    let next = world.hand_over();
    assert_eq!(next.len(), 2, "one of them is of nobody any more");
    world.finish(owner, probe);
    assert_eq!(world.engine.breaker().state(), BreakerState::HalfOpen);
    let left = if owner == one { other } else { one };
    world.finish(left, next[1]);
    assert_eq!(world.engine.breaker().state(), BreakerState::Opening);
}

#[test]
fn what_began_before_the_outage_says_nothing_about_its_end() {
    let mut world = world(Ordering::ByKey, 20);
    let owner = keyed(&mut world, 0..20);
    world.hand_over();
    (0..10).for_each(|offset| world.outage(owner, offset));
    (10..20).for_each(|offset| world.finish(owner, offset));
    assert_eq!(world.engine.breaker().state(), BreakerState::Open);
    until_probe(&mut world);
    assert_eq!(world.engine.breaker().state(), BreakerState::HalfOpen);
}

#[test]
fn commits_go_on_and_partitions_are_given_away_while_it_is_open() {
    let mut world = world(Ordering::ByKey, 20);
    let owner = keyed(&mut world, 0..30);
    world.hand_over();
    world.finish(owner, 0);
    all_down(&mut world);
    assert_eq!(world.engine.breaker().state(), BreakerState::Open);
    world.commit_all();
    assert_eq!(world.committed(owner), 1);
    world.engine.drain(owner);
    assert!(world.engine.is_drained(owner));
}

#[test]
fn an_outage_is_not_taken_for_a_stuck_record_while_it_is_waited_out() {
    let mut world = world(Ordering::ByKey, 10);
    let owner = keyed(&mut world, 0..10);
    open(&mut world);
    world.pass(600 * SECOND);
    let age = world.engine.head(owner).map(|head| head.age);
    assert!(age < Some(SECOND), "{age:?}");
}

#[test]
fn a_record_that_meets_outages_while_others_do_well_is_a_stuck_one() {
    let mut world = world(Ordering::ByKey, 10);
    let owner = keyed(&mut world, 0..200);
    for offset in 1..120 {
        world.hand_over();
        if world.running().contains(&0) {
            world.outage(owner, 0);
        }
        world.finish(owner, offset);
        world.pass(SECOND);
    }
    assert_eq!(world.engine.breaker().state(), BreakerState::Closed);
    let head = world.engine.head(owner).expect("it holds up its partition");
    assert_eq!((head.offset, head.holds_back), (0, 119));
    assert!(head.age > 110 * SECOND, "{:?}", head.age);
}

#[test]
fn what_a_record_waits_for_an_outage_to_end_is_not_held_against_it() {
    let mut world = world(Ordering::ByKey, 10);
    let owner = keyed(&mut world, 0..1);
    for _ in 0..600 {
        world.hand_over();
        if world.running().contains(&0) {
            world.outage(owner, 0);
        }
        world.pass(SECOND);
    }
    let head = world.engine.head(owner).expect("it is not finished");
    assert!(
        head.age > 20 * SECOND,
        "until the breaker opened: {:?}",
        head.age
    );
    assert!(head.counts <= 5 * SECOND, "{:?}", head.counts);
}

// ---- the breaker alone, against an obvious one ----

const WINDOW: u64 = 1_000;
const CONCURRENCY: usize = 6;

#[derive(Debug, Clone)]
enum Step {
    Pass(u64),
    Begin(u64),
    End(Index, Evidence),
    EndAll(Evidence),
    NotBegun(Index),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    use Evidence::*;
    let evidence = || prop_oneof![3 => Just(Answered), 4 => Just(Down), 1 => Just(Nothing)];
    let step = prop_oneof![
        6 => (0..WINDOW).prop_map(Step::Pass),
        6 => (1..8u64).prop_map(Step::Begin),
        6 => (any::<Index>(), evidence()).prop_map(|(at, evidence)| Step::End(at, evidence)),
        2 => evidence().prop_map(Step::EndAll),
        1 => any::<Index>().prop_map(Step::NotBegun),
    ];
    prop::collection::vec(step, 1..200)
}

/// Keeps everything that ever happened, and counts anew each time.
#[derive(Default)]
struct Obvious {
    now: u64,
    /// When, and whether it was an outage.
    ended: Vec<(u64, bool)>,
    /// What is out, and in which outage's which pause it began; `None`: while closed.
    out: Vec<(u64, Option<usize>)>,
    pauses: usize,
    state: BreakerState,
    probe_at: u64,
    /// A probe, and until when it is waited for.
    awaited: Option<(u64, u64)>,
    allowed: usize,
    step: Vec<bool>,
    opening_ends: u64,
    /// Milliseconds in which it held.
    held: u64,
}

impl Obvious {
    fn on_trial(&self) -> usize {
        let current = |out: &&(u64, Option<usize>)| out.1 == Some(self.pauses);
        self.out.iter().filter(current).count()
    }

    fn room(&self) -> Option<usize> {
        match self.state {
            BreakerState::Closed => None,
            BreakerState::Open => Some(0),
            BreakerState::HalfOpen => Some(usize::from(self.awaited.is_none())),
            BreakerState::Opening => Some(self.allowed.saturating_sub(self.on_trial())),
        }
    }

    fn pass(&mut self, millis: u64) {
        use BreakerState::*;
        if matches!(self.state, Open | HalfOpen) {
            self.held += millis;
        }
        self.now += millis;
        match self.state {
            Open if self.now >= self.probe_at => {
                self.state = HalfOpen;
                self.awaited = None;
            }
            HalfOpen if self.awaited.is_some_and(|(_, at)| self.now >= at) => self.awaited = None,
            Opening if self.now >= self.opening_ends => self.close(),
            _ => {}
        }
    }

    fn close(&mut self) {
        self.state = BreakerState::Closed;
        self.ended.clear();
        self.pauses += 1;
    }

    fn begin(&mut self, seq: u64) {
        let closed = self.state == BreakerState::Closed;
        self.out.push((seq, (!closed).then_some(self.pauses)));
        if self.state == BreakerState::HalfOpen {
            self.awaited = Some((seq, self.now + WINDOW));
        }
    }

    /// `true`: it opens, now or again.
    fn end(&mut self, at: usize, evidence: Evidence) -> bool {
        use BreakerState::*;
        let (seq, began) = self.out.remove(at);
        if self.state == Closed {
            if evidence == Evidence::Nothing {
                return false;
            }
            self.ended.push((self.now, evidence == Evidence::Down));
            let slot = |at: u64| at / (WINDOW / 10);
            let recent = self
                .ended
                .iter()
                .filter(|(at, _)| slot(*at) + 10 > slot(self.now));
            let (outages, all) = recent.fold((0, 0), |(outages, all), (_, down)| {
                (outages + usize::from(*down), all + 1)
            });
            let run = self
                .ended
                .iter()
                .rev()
                .take_while(|(_, down)| *down)
                .count();
            return evidence == Evidence::Down && (all >= 4 && 2 * outages >= all || run >= 8);
        }
        if began != Some(self.pauses) {
            return false;
        }
        match (self.state, evidence) {
            (_, Evidence::Nothing) => self.void(seq),
            (HalfOpen, Evidence::Down) => return true,
            (HalfOpen, Evidence::Answered) => self.step_to(2),
            (Opening, _) => {
                self.step.push(evidence == Evidence::Down);
                let outages = self.step.iter().filter(|down| **down).count();
                if 2 * outages >= self.allowed {
                    return true;
                }
                if self.step.len() >= self.allowed {
                    if self.allowed == CONCURRENCY {
                        self.close();
                    } else {
                        self.step_to(2 * self.allowed);
                    }
                }
            }
            _ => {}
        }
        false
    }

    fn void(&mut self, seq: u64) {
        self.awaited = self.awaited.filter(|(awaited, _)| *awaited != seq);
    }

    fn step_to(&mut self, allowed: usize) {
        self.state = BreakerState::Opening;
        self.allowed = allowed.min(CONCURRENCY);
        self.step.clear();
        self.opening_ends = self.now + WINDOW;
    }

    fn open(&mut self, next_probe: Duration) {
        self.state = BreakerState::Open;
        self.pauses += 1;
        self.probe_at = self.now + next_probe.as_millis() as u64;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn the_breaker_does_what_the_obvious_one_does(steps in steps()) {
        let owner = Ownership { slot: 0, id: 1 };
        let start = Instant::now();
        let settings = OutageBreaker::new()
            .window(ms(WINDOW))
            .min_attempts(4)
            .probe_pauses(ms(100), ms(WINDOW));
        let mut breaker = Breaker::new(Some(settings), CONCURRENCY, 7, start);
        let mut obvious = Obvious::default();
        let mut seqs = 0..;
        for step in steps {
            let now = start + ms(obvious.now);
            let ends = match step {
                Step::Pass(millis) => {
                    obvious.pass(millis);
                    breaker.advance(start + ms(obvious.now));
                    0
                }
                Step::Begin(count) => {
                    for seq in seqs.by_ref().take(count as usize) {
                        if obvious.room() != Some(0) {
                            obvious.begin(seq);
                            breaker.began(owner, seq, now);
                        }
                    }
                    0
                }
                Step::NotBegun(at) if !obvious.out.is_empty() => {
                    let (seq, _) = obvious.out.remove(at.index(obvious.out.len()));
                    obvious.void(seq);
                    breaker.not_begun(owner, seq);
                    0
                }
                Step::End(..) => obvious.out.len().min(1),
                Step::EndAll(_) => obvious.out.len(),
                Step::NotBegun(_) => 0,
            };
            for _ in 0..ends {
                let (at, evidence) = match &step {
                    Step::End(at, evidence) => (at.index(obvious.out.len()), *evidence),
                    Step::EndAll(evidence) => (0, *evidence),
                    _ => unreachable!("nothing ends in another step"),
                };
                let (seq, _) = obvious.out[at];
                let opens = obvious.end(at, evidence);
                breaker.ended(owner, seq, evidence, now);
                if opens {
                    let probe_at = breaker.probe_at();
                    prop_assert!(probe_at.is_some(), "it has not opened");
                    // Rounded up: the obvious one counts in milliseconds.
                    let pause = probe_at.unwrap() - now + Duration::from_nanos(999_999);
                    obvious.open(pause);
                }
            }
            prop_assert_eq!(breaker.state(), obvious.state);
            prop_assert_eq!(breaker.room(), obvious.room());
            let clock = breaker.clock(start + ms(obvious.now));
            prop_assert_eq!(clock, start + ms(obvious.now - obvious.held));
        }
    }
}

#[test]
fn a_probe_that_was_not_waited_for_and_says_nothing_makes_no_room_for_a_second_one() {
    let mut world = world(Ordering::Unordered, 64);
    let owner = world.partition(0..20);
    open(&mut world);
    let first = until_probe(&mut world);
    assert_eq!(first.len(), 1);
    world.pass(LONGEST);
    assert_eq!(world.hand_over().len(), 2, "the first may hang");
    world.end_with(owner, first[0], Outcome::Skipped);
    assert_eq!(world.hand_over().len(), 1, "the second is waited for");
    world.pass(LONGEST);
    assert_eq!(world.hand_over().len(), 2);
}
