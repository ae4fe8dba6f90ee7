//! Whether the group and we agree on which partitions are ours, in the protocol of KIP-848.
//!
//! There an answer to a heartbeat brings what has changed, once. librdkafka gives up such an answer after one heartbeat
//! interval and never asks for the whole assignment, while the brokers believe that it came: a partition that was given to
//! us in it is nobody's, and one that was to be taken away stays ours until `max.poll.interval.ms` throws us out. So what
//! we have been given is compared with what the group's description says. Where the two differ and nothing comes of it, we
//! leave and join again, which makes the coordinator tell everything: see
//! `docs/decisions/0001-rejoin-after-a-lost-heartbeat.md`.
//!
//! A description names every member with all of its partitions, and every member asks for it. So members ask the less often
//! the more they are, as a rule; more often only after an answer did not come in time, or while there is a difference.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

use rdkafka::{TopicPartitionList, consumer::Consumer as _};

use super::{
    BaseConsumer,
    ffi::{Answer, Question, membership},
    pump::Pump,
};
use crate::consumer::{Event, TopicPartition};

/// How often all members of a small group ask together, at most.
const REGULAR: Duration = Duration::from_secs(60);
/// By so much longer is that for each member: all together they ask once in this time.
const PER_MEMBER: Duration = Duration::from_secs(3);
/// Between two looks while something seems wrong.
const LOOK: Duration = Duration::from_secs(1);
/// In large groups the first of those is put off by up to this, so that not all ask at once.
const LONGEST_SPREAD: Duration = Duration::from_secs(3);
const SPREAD_PER_MEMBER: Duration = Duration::from_millis(20);
/// What follows from a heartbeat whose answer did not come in time shows within this, or is no trouble.
const SUSPICION: Duration = Duration::from_secs(30);
/// A difference that has been there for this long after such a heartbeat will not pass by itself. What the coordinator
/// says that we have changes as it answers us, so a client that gets its answers differs for no longer than these are under
/// way and topics are looked up. What it wants us to give away, it says in answer to the next heartbeat.
const STEADY: Duration = Duration::from_secs(4);
/// The brokers' default for the time between two heartbeats, and the most that they allow unless told otherwise.
const HEARTBEAT: Duration = Duration::from_secs(5);
const LONGEST_HEARTBEAT: Duration = Duration::from_secs(15);
/// The same when no heartbeat is known to have been lost.
const STEADY_UNSUSPECTED: Duration = Duration::from_secs(15);
/// Between joining again and doing so once more: doubled each time, up to the longest.
const SHORTEST_PAUSE: Duration = Duration::from_secs(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

type Place = (Arc<str>, i32);

/// What the group says that a member has.
#[derive(Debug, Clone, Copy)]
struct Said<'a> {
    /// As far as it knows.
    current: &'a [Place],
    /// In the end. It asks for the rest of what there is now to be given away.
    target: &'a [Place],
}

/// What the group says is ours and we do not have, and the other way round.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Difference {
    missing: Vec<TopicPartition>,
    surplus: Vec<TopicPartition>,
}

/// What is known of the assignment.
pub(super) struct Agreement {
    /// What rebalances gave us, and did not take away.
    given: HashSet<Place>,
    /// When one last did either.
    changed: Instant,
    /// Between zero and one: other members ask at other times.
    jitter: f64,
    members: u32,
    question: Option<(Question, Instant)>,
    next: Instant,
    suspicious_until: Option<Instant>,
    /// Between two heartbeats.
    heartbeat: Duration,
    differs: Option<(Difference, Instant)>,
    rejoined: Option<Instant>,
    pause: Duration,
}

impl Agreement {
    pub(super) fn new(now: Instant, seed: u64) -> Self {
        let jitter = (seed % 1024) as f64 / 1024.0;
        Self {
            given: HashSet::new(),
            changed: now,
            jitter,
            members: 0,
            question: None,
            next: now + REGULAR.mul_f64(jitter),
            suspicious_until: None,
            heartbeat: HEARTBEAT,
            differs: None,
            rejoined: None,
            pause: SHORTEST_PAUSE,
        }
    }

    pub(super) fn give(&mut self, list: &TopicPartitionList) {
        self.given.extend(places(list));
    }

    pub(super) fn take_away(&mut self, list: &TopicPartitionList) {
        places(list).for_each(|place| _ = self.given.remove(&place));
    }

    /// A rebalance is over: what was seen before it says nothing any more.
    pub(super) fn note_change(&mut self, now: Instant) {
        self.changed = now;
        self.differs = None;
    }

    /// Another client starts, with nothing.
    pub(super) fn begin_again(&mut self, now: Instant) {
        self.given.clear();
        self.question = None;
        self.note_change(now);
    }

    /// A heartbeat was not answered before the next one was due.
    fn suspect(&mut self, heartbeat: Option<Duration>, now: Instant) {
        self.heartbeat = heartbeat.unwrap_or(self.heartbeat).min(LONGEST_HEARTBEAT);
        if !self.is_suspicious(now) {
            let spread = (SPREAD_PER_MEMBER * self.members).min(LONGEST_SPREAD);
            self.next = self.next.min(now + spread.mul_f64(self.jitter));
        }
        self.suspicious_until = Some(now + SUSPICION);
    }

    fn is_suspicious(&self, now: Instant) -> bool {
        self.suspicious_until.is_some_and(|until| now < until)
    }

    /// What the group said at that time is ours. An answer: the two have differed for too long.
    fn compare(&mut self, asked: Instant, said: Said<'_>, now: Instant) -> Option<Difference> {
        let often = self.is_suspicious(now);
        self.next = now + self.interval(often);
        if asked <= self.changed {
            // What has been going on since may explain anything.
            self.differs = None;
            self.next = now + LOOK;
            return None;
        }
        let Some(difference) = self.difference(said) else {
            self.differs = None;
            return None;
        };
        self.next = now + LOOK;
        let since = match &self.differs {
            Some((before, since)) if *before == difference => *since,
            _ => {
                self.differs = Some((difference, now));
                return None;
            }
        };
        let mut steady = match often {
            true => STEADY,
            false => STEADY_UNSUSPECTED,
        };
        if !difference.surplus.is_empty() {
            steady = steady.max(self.heartbeat + STEADY / 2);
        }
        let paused = |at: Instant| now.duration_since(at) < self.pause;
        if now.duration_since(since) < steady || self.rejoined.is_some_and(paused) {
            return None;
        }
        Some(difference)
    }

    fn interval(&self, often: bool) -> Duration {
        match often {
            true => LOOK,
            false => (REGULAR + PER_MEMBER * self.members).mul_f64(0.75 + self.jitter / 2.0),
        }
    }

    fn difference(&self, said: Said<'_>) -> Option<Difference> {
        let named = |(topic, partition): &Place| TopicPartition {
            topic: Arc::clone(topic),
            partition: *partition,
        };
        let target: HashSet<_> = said.target.iter().collect();
        // What we have given away may still be said to be ours: that goes with our next heartbeat.
        let missing = said.current.iter();
        let missing = missing.filter(|place| target.contains(place) && !self.given.contains(place));
        let surplus = self.given.iter().filter(|place| !target.contains(place));
        let mut missing: Vec<_> = missing.map(named).collect();
        let mut surplus: Vec<_> = surplus.map(named).collect();
        missing.sort_unstable();
        surplus.sort_unstable();
        let differs = !missing.is_empty() || !surplus.is_empty();
        differs.then_some(Difference { missing, surplus })
    }

    fn note_rejoin(&mut self, now: Instant) {
        let quiet = |at: Instant| now.duration_since(at) > 4 * self.pause;
        self.pause = match self.rejoined.is_none_or(quiet) {
            true => SHORTEST_PAUSE,
            false => (self.pause * 2).min(LONGEST_PAUSE),
        };
        self.rejoined = Some(now);
        self.note_change(now);
    }
}

fn places(list: &TopicPartitionList) -> impl Iterator<Item = Place> {
    let elements = list.elements().into_iter();
    elements.map(|element| (Arc::from(element.topic()), element.partition()))
}

impl Pump {
    /// Looks whether the group and we agree on what is ours, and joins again if they do not. Not within a rebalance: what
    /// comes of that is still to be told to the group.
    pub(super) fn attend_to_assignment(&mut self, consumer: &BaseConsumer) -> bool {
        if !self.settings.is_kip_848() || self.is_stopping() {
            return false;
        }
        let now = Instant::now();
        if let Some(after) = consumer.context().take_lost_heartbeat() {
            self.agreement.suspect(after, now);
        }
        if let Some((question, asked)) = &self.agreement.question {
            let asked = *asked;
            let Some(answer) = question.poll(Duration::ZERO) else {
                return false;
            };
            self.agreement.question = None;
            self.take_description(consumer, answer, asked, now);
            return true;
        }
        if now < self.agreement.next || self.outage.is_some() || !self.joining.is_member() {
            return false;
        }
        let group = &self.settings.group;
        let question = Question::group(&self.lifeline, self.wake(), group);
        self.agreement.question = question.map(|question| (question, now));
        self.agreement.next = now + LOOK;
        true
    }

    fn take_description(
        &mut self,
        consumer: &BaseConsumer,
        answer: Answer,
        asked: Instant,
        now: Instant,
    ) {
        let group = match answer {
            Answer::Group(group) => group,
            other => {
                tracing::debug!(answer = ?other, "the group's coordinator does not describe it; it is asked again");
                let often = self.agreement.is_suspicious(now);
                self.agreement.next = now + self.agreement.interval(often);
                return;
            }
        };
        let members = &group.members;
        self.agreement.members = u32::try_from(members.len()).unwrap_or(u32::MAX);
        let id = membership(consumer).map(|(id, _)| id);
        let Some(ours) = members
            .iter()
            .find(|member| Some(&member.id) == id.as_ref())
        else {
            // The coordinator has thrown us out, and our next heartbeat will tell.
            self.agreement.next = now + LOOK;
            return;
        };
        let current = placed(&ours.partitions);
        let target = ours.target.as_deref().map(placed);
        let said = Said {
            current: &current,
            target: target.as_deref().unwrap_or(&current),
        };
        if let Some(difference) = self.agreement.compare(asked, said, now) {
            self.rejoin(consumer, difference, now);
        }
    }

    /// Leaves the group and joins it again. What leaves us is drained and committed, as ever.
    fn rejoin(&mut self, consumer: &BaseConsumer, difference: Difference, now: Instant) {
        let Difference { missing, surplus } = difference;
        let named = |places: &[TopicPartition]| {
            let mut text = String::new();
            for place in places.iter().take(10) {
                text.push_str(&format!(" {}/{}", place.topic, place.partition));
            }
            if places.len() > 10 {
                text.push_str(" …");
            }
            text
        };
        tracing::warn!(
            group = %self.settings.group,
            missing = missing.len(),
            surplus = surplus.len(),
            "an answer of the group's coordinator was lost, and it and this member differ in which partitions are its own: \
             it leaves the group and joins again. The group says that it has, and it has not:{}; the group has taken away, \
             and it still has:{}",
            named(&missing),
            named(&surplus),
        );
        self.agreement.note_rejoin(now);
        self.tell(Event::Rejoining { missing, surplus });
        consumer.unsubscribe();
        self.subscribe(consumer);
    }
}

fn placed(partitions: &[(String, i32)]) -> Vec<Place> {
    let places = partitions.iter();
    let places = places.map(|(topic, partition)| (Arc::from(&**topic), *partition));
    places.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(partition: i32) -> Place {
        (Arc::from("orders"), partition)
    }

    struct World {
        agreement: Agreement,
        now: Instant,
    }

    impl World {
        /// A member that was given these partitions some time ago.
        fn given(partitions: &[i32]) -> Self {
            let now = Instant::now();
            let mut agreement = Agreement::new(now, 7);
            agreement
                .given
                .extend(partitions.iter().copied().map(place));
            Self {
                agreement,
                now: now + Duration::from_secs(100),
            }
        }

        /// The group is asked as often as it should be, for this long, and says each time that these are the member's.
        /// Returns after what time the member is to join again.
        fn hears(&mut self, group: &[i32], within: Duration) -> Option<Duration> {
            self.hears_with_target(group, group, within)
        }

        fn hears_with_target(
            &mut self,
            current: &[i32],
            target: &[i32],
            within: Duration,
        ) -> Option<Duration> {
            let [current, target] = [current, target]
                .map(|partitions| partitions.iter().copied().map(place).collect::<Vec<_>>());
            let said = Said {
                current: &current,
                target: &target,
            };
            let (began, until) = (self.now, self.now + within);
            self.now = self.now.max(self.agreement.next);
            while self.now <= until {
                let asked = self.now;
                self.now += Duration::from_millis(10);
                if self.agreement.compare(asked, said, self.now).is_some() {
                    return Some(self.now - began);
                }
                self.now = self.agreement.next;
            }
            self.now = until;
            None
        }
    }

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn a_member_that_agrees_with_its_group_is_left_alone_whatever_is_lost() {
        let mut world = World::given(&[0, 1]);
        assert_eq!(world.hears(&[1, 0], LONG), None);
        for _ in 0..100 {
            world.agreement.suspect(None, world.now);
            assert_eq!(world.hears(&[0, 1], Duration::from_secs(3)), None);
        }
    }

    #[test]
    fn a_difference_that_lasts_after_a_lost_heartbeat_is_mended_within_seconds() {
        for group in [&[0, 1, 2][..], &[0], &[]] {
            let mut world = World::given(&[0, 1]);
            world.agreement.suspect(None, world.now);
            let after = world.hears(group, LONG).unwrap();
            assert!(after >= STEADY && after < 2 * STEADY + LOOK, "{after:?}");
        }
    }

    #[test]
    fn what_the_group_wants_back_is_waited_for_as_long_as_a_heartbeat_takes() {
        for heartbeat in [1, 5, 15].map(Duration::from_secs) {
            let mut world = World::given(&[0, 1, 2, 3]);
            world.agreement.suspect(Some(heartbeat), world.now);
            let after = world.hears_with_target(&[0, 1, 2, 3], &[0, 1], LONG);
            let after = after.unwrap();
            assert!(after > heartbeat, "{after:?}");
            assert!(after <= heartbeat.max(STEADY / 2) + STEADY, "{after:?}");
        }
    }

    #[test]
    fn what_others_are_still_to_give_away_or_the_group_is_still_to_hear_of_is_no_difference() {
        let mut world = World::given(&[0, 1]);
        world.agreement.suspect(None, world.now);
        // 2 will be ours, 3 was, and is not any more.
        assert_eq!(world.hears_with_target(&[0, 1, 3], &[0, 1, 2], LONG), None);
    }

    #[test]
    fn a_difference_that_nothing_has_announced_is_mended_too() {
        let mut world = World::given(&[0, 1]);
        let after = world.hears(&[0], LONG).unwrap();
        assert!(
            after >= STEADY_UNSUSPECTED && after < 2 * REGULAR,
            "{after:?}"
        );
    }

    #[test]
    fn a_difference_that_a_rebalance_explains_or_that_changes_is_waited_for() {
        let mut world = World::given(&[0, 1]);
        for round in 0..20 {
            world.agreement.suspect(None, world.now);
            assert_eq!(world.hears(&[0, 1, 2], STEADY / 2), None);
            if round % 2 == 0 {
                world.agreement.note_change(world.now);
            } else {
                assert_eq!(world.hears(&[0, 1, 3], STEADY / 2), None);
            }
        }
    }

    #[test]
    fn an_answer_from_before_a_rebalance_counts_for_nothing() {
        let mut world = World::given(&[0, 1]);
        world.agreement.suspect(None, world.now);
        assert_eq!(world.hears(&[0], STEADY / 2), None);
        let asked = world.now;
        world.agreement.changed = asked + Duration::from_millis(1);
        let later = asked + STEADY;
        let said = Said {
            current: &[place(0)],
            target: &[place(0)],
        };
        assert_eq!(world.agreement.compare(asked, said, later), None);
        assert!(world.agreement.differs.is_none());
    }

    #[test]
    fn a_difference_that_joining_again_does_not_mend_is_tried_less_and_less_often() {
        let mut world = World::given(&[0, 1]);
        let mut waits = Vec::new();
        for _ in 0..12 {
            world.agreement.suspect(None, world.now);
            waits.push(world.hears(&[0], LONG).unwrap());
            world.agreement.note_rejoin(world.now);
        }
        let last = waits.last().unwrap();
        assert!(
            *last >= LONGEST_PAUSE && *last < LONGEST_PAUSE + REGULAR,
            "{waits:?}"
        );
        assert!(
            waits.iter().sum::<Duration>() > 8 * LONGEST_PAUSE / 2,
            "{waits:?}"
        );
    }

    #[test]
    fn members_ask_the_less_often_the_more_they_are() {
        let mut agreement = Agreement::new(Instant::now(), 0);
        agreement.members = 1_000;
        let all_together = agreement.interval(false) / 1_000;
        assert!(all_together >= PER_MEMBER * 3 / 4, "{all_together:?}");
    }
}
