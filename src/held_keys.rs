//! Keys of which a record was set aside, and what that means for the later records of the same key.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use crate::{message::message_id, record::Record};

/// Keys, and records expected back, that are remembered over all; at some hundred bytes each.
const LIMIT: usize = 10_000;

/// What later records of a key do when one of that key was set aside: dead-lettered, or moved to a
/// [retry topic](crate::RetryTopics). See [`Builder::hold_key`](crate::Builder::hold_key).
///
/// A key is held in its topic and in this process, and until one of these:
///
/// - Its records come back from the dead-letter topic (known by their [id](crate::Message::message_id)) and are handled
///   or skipped: all that were dead-lettered. They pass those that wait.
/// - [`ConsumerHandle::release_key`](crate::ConsumerHandle::release_key) is called.
/// - The partition is given away, or the process ends. **What is held is kept in memory only.** The next owner of the
///   partition does not know that a record of the key was set aside, and handles the later ones. Where that must not happen,
///   the handler itself has to look up whether the key is in order.
/// - In a retry topic, and for records that moved to one: when none of the key has moved for as long as all retry topics
///   take together, and a minute. What becomes of them there may be known to another process only, so that a backlog in
///   a retry topic, or a dead letter from it, lets later records of the key pass.
/// - More than 10,000 keys and dead letters of held keys are remembered: the key that was held first is released, with a
///   warning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HoldKey {
    /// They wait, uncommitted, as if the record were still being tried again; when the window is full, so does their
    /// partition. Not with retry topics.
    Wait,
    /// They go where it went, without being handled: to the same retry topic, or to the dead-letter topic as
    /// [`KeyHeld`](crate::FailureKind::KeyHeld).
    Follow,
}

/// What holding its key means for a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ruling {
    Wait,
    Follow(Arc<str>),
}

#[derive(Debug)]
pub(crate) struct HeldKeys {
    policy: HoldKey,
    lasts: Duration,
    hasher: RandomState,
    /// Keys that are held, so that nobody locks while there are none.
    count: AtomicUsize,
    holds: Mutex<Holds>,
}

#[derive(Debug, Default)]
struct Holds {
    by_key: HashMap<Place, Hold>,
    /// Keys, and records expected back, of all holds together.
    weight: usize,
    turns: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Place {
    topic: Arc<str>,
    key: u64,
}

#[derive(Debug)]
struct Hold {
    partition: i32,
    /// Where its records went last.
    to: Arc<str>,
    /// Of records that are expected back.
    ids: Vec<u64>,
    /// Until when it lasts if nothing more happens; `None` while records are expected back.
    until: Option<Instant>,
    turn: u64,
}

impl Holds {
    fn remove(&mut self, place: &Place) -> bool {
        let Some(hold) = self.by_key.remove(place) else {
            return false;
        };
        self.weight -= hold.weight();
        true
    }

    fn remove_all(&mut self, gone: impl Fn(&Place, &Hold) -> bool) -> bool {
        let before = self.by_key.len();
        self.by_key.retain(|place, hold| !gone(place, hold));
        self.weight = self.by_key.values().map(Hold::weight).sum();
        self.by_key.len() < before
    }
}

impl Hold {
    fn weight(&self) -> usize {
        1 + self.ids.len()
    }
}

impl HeldKeys {
    /// `lasts`: how long a hold lasts whose end nobody tells us.
    pub(crate) fn new(policy: HoldKey, lasts: Duration) -> Self {
        Self {
            policy,
            lasts,
            hasher: RandomState::new(),
            count: AtomicUsize::new(0),
            holds: Mutex::default(),
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// A record goes `to` that topic; `moves`: to be handled again there. Said before its lane goes on. `in_tier`: it was
    /// read from a retry topic.
    pub(crate) fn set_aside(
        &self,
        record: &Record,
        in_tier: bool,
        to: &Arc<str>,
        moves: bool,
        now: Instant,
    ) {
        let Some(key) = record.key() else {
            return;
        };
        let place = self.place(record.topic(), key);
        // What was dead-lettered from a retry topic comes back to the topic that it was in first.
        let comes_back = !in_tier && !moves;
        let id = self.id(record);
        self.change(|holds| {
            holds.turns += 1;
            let turn = holds.turns;
            let hold = holds.by_key.entry(place).or_insert_with(|| {
                holds.weight += 1;
                Hold {
                    partition: record.partition(),
                    to: Arc::clone(to),
                    ids: Vec::new(),
                    until: None,
                    turn,
                }
            });
            let before = hold.ids.len();
            hold.ids.retain(|known| *known != id);
            if comes_back {
                hold.ids.push(id);
            }
            // While some are expected back, where those went decides.
            if comes_back || hold.ids.is_empty() {
                hold.to = Arc::clone(to);
                hold.until = (!comes_back).then(|| now + self.lasts);
            }
            holds.weight = holds.weight - before + hold.ids.len();
            while holds.weight > LIMIT {
                let first = holds.by_key.iter().min_by_key(|(_, hold)| hold.turn);
                let Some((first, _)) = first else { break };
                let first = first.clone();
                tracing::warn!(
                    topic = %first.topic,
                    limit = LIMIT,
                    "too many records of held keys are remembered: the key that was held first is released, and its \
                     later records are handled although one of that key was set aside"
                );
                holds.remove(&first);
            }
        });
    }

    /// What is to be done with a record, other than handling it.
    pub(crate) fn ruling(&self, record: &Record, now: Instant) -> Option<Ruling> {
        let place = self.place_of(record)?;
        let mut holds = self.holds();
        let hold = holds.by_key.get(&place)?;
        if hold.until.is_some_and(|until| until <= now) {
            holds.remove(&place);
            self.note_count(&holds);
            return None;
        }
        if hold.ids.contains(&self.id(record)) {
            return None;
        }
        Some(match self.policy {
            HoldKey::Wait => Ruling::Wait,
            HoldKey::Follow => Ruling::Follow(Arc::clone(&hold.to)),
        })
    }

    /// Whether the record is one that others wait for: it may not stand behind them.
    pub(crate) fn is_waited_for(&self, record: &Record) -> bool {
        self.policy == HoldKey::Wait
            && self.place_of(record).is_some_and(|place| {
                let id = self.id(record);
                let holds = self.holds();
                let hold = holds.by_key.get(&place);
                hold.is_some_and(|hold| hold.ids.contains(&id))
            })
    }

    /// A record was handled, or skipped. The last one that was expected back releases its key.
    pub(crate) fn finished(&self, record: &Record) {
        let Some(place) = self.place_of(record) else {
            return;
        };
        let id = self.id(record);
        self.change(|holds| {
            let Some(hold) = holds.by_key.get_mut(&place) else {
                return;
            };
            let Some(at) = hold.ids.iter().position(|known| *known == id) else {
                return;
            };
            hold.ids.swap_remove(at);
            holds.weight -= 1;
            if hold.ids.is_empty() {
                holds.remove(&place);
            }
        });
    }

    /// The key is released, in the topic and its retry topics. `false`: it was not held.
    pub(crate) fn release(&self, topic: &str, key: &[u8]) -> bool {
        let key = self.place(topic, key).key;
        let tiers = format!("{topic}.retry.");
        let of_topic = |other: &str| other == topic || other.starts_with(&tiers);
        self.change(|holds| holds.remove_all(|place, _| place.key == key && of_topic(&place.topic)))
    }

    /// The partition is not ours any more.
    pub(crate) fn forget(&self, topic: &str, partition: i32) {
        if self.count() > 0 {
            self.change(|holds| {
                holds.remove_all(|place, hold| {
                    *place.topic == *topic && hold.partition == partition
                });
            });
        }
    }

    fn change<T>(&self, change: impl FnOnce(&mut Holds) -> T) -> T {
        let mut holds = self.holds();
        let changed = change(&mut holds);
        self.note_count(&holds);
        changed
    }

    fn place_of(&self, record: &Record) -> Option<Place> {
        let key = record.key().filter(|_| self.count() > 0)?;
        Some(self.place(record.topic(), key))
    }

    fn place(&self, topic: &str, key: &[u8]) -> Place {
        Place {
            topic: topic.into(),
            key: self.hasher.hash_one(key),
        }
    }

    fn id(&self, record: &Record) -> u64 {
        self.hasher.hash_one(message_id(record))
    }

    fn holds(&self) -> MutexGuard<'_, Holds> {
        self.holds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_count(&self, holds: &Holds) {
        self.count.store(holds.by_key.len(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Message;

    const LASTS: Duration = Duration::from_secs(60);

    fn record(key: &str, offset: i64) -> Record {
        Message::builder()
            .topic("orders")
            .key(key)
            .offset(offset)
            .record()
    }

    /// The record of that offset, sent back.
    fn back(key: &str, offset: i64) -> Record {
        let id = message_id(&record(key, offset));
        Message::builder()
            .topic("orders")
            .key(key)
            .offset(offset + 100)
            .header("messageId", id)
            .record()
    }

    fn letters() -> Arc<str> {
        "orders.dlq".into()
    }

    #[test]
    fn a_key_is_released_when_all_its_dead_letters_have_come_back_and_were_handled() {
        let (held, now) = (HeldKeys::new(HoldKey::Follow, LASTS), Instant::now());
        assert_eq!(held.ruling(&record("a", 1), now), None);
        held.set_aside(&record("a", 1), false, &letters(), false, now);
        let follow = Some(Ruling::Follow(letters()));
        assert_eq!(held.ruling(&record("a", 2), now + 100 * LASTS), follow);
        assert_eq!(held.ruling(&record("b", 3), now), None);
        held.set_aside(&record("a", 2), false, &letters(), false, now);

        assert_eq!(held.ruling(&back("a", 1), now), None);
        held.finished(&back("a", 1));
        assert_eq!(
            held.ruling(&record("a", 4), now),
            follow,
            "one is still away"
        );
        assert_eq!(held.ruling(&back("a", 2), now), None);
        // Once more in vain.
        held.set_aside(&back("a", 2), false, &letters(), false, now);
        held.finished(&record("b", 3));
        assert_eq!(held.ruling(&record("a", 4), now), follow);
        held.finished(&back("a", 2));
        assert_eq!(held.ruling(&record("a", 4), now), None);
        assert_eq!((held.count(), held.holds().weight), (0, 0));
    }

    #[test]
    fn a_key_whose_records_moved_is_released_when_none_has_moved_for_long() {
        let (held, now) = (HeldKeys::new(HoldKey::Follow, LASTS), Instant::now());
        let tier: Arc<str> = "orders.retry.10s".into();
        held.set_aside(&record("a", 1), false, &tier, true, now);
        held.set_aside(&record("a", 2), false, &tier, true, now + LASTS / 2);
        let follow = Some(Ruling::Follow(tier));
        assert_eq!(held.ruling(&record("a", 3), now + LASTS), follow);
        assert_eq!(held.ruling(&record("a", 3), now + LASTS * 3 / 2), None);
        assert_eq!(held.count(), 0);
    }

    #[test]
    fn a_key_is_released_by_hand_or_with_its_partition() {
        let (held, now) = (HeldKeys::new(HoldKey::Wait, LASTS), Instant::now());
        let aside = |key| held.set_aside(&record(key, 1), false, &letters(), false, now);
        aside("a");
        aside("b");
        assert_eq!(held.ruling(&record("a", 2), now), Some(Ruling::Wait));
        assert!(held.is_waited_for(&back("a", 1)) && !held.is_waited_for(&record("a", 2)));
        assert!(held.release("orders", b"a"));
        assert!(!held.release("orders", b"a") && !held.release("payments", b"b"));
        assert_eq!(held.ruling(&record("a", 2), now), None);
        held.forget("orders", 1);
        assert_eq!(held.count(), 1);
        held.forget("orders", 0);
        assert_eq!((held.count(), held.holds().weight), (0, 0));
    }

    #[test]
    fn a_key_is_held_in_its_topic_and_its_partition_and_released_in_its_retry_topics_too() {
        let (held, now) = (HeldKeys::new(HoldKey::Follow, LASTS), Instant::now());
        let of = |topic: &str| Message::builder().topic(topic).key("a").record();
        let topics = ["orders", "orders.retry.10s", "orders.returns", "payments"];
        for topic in topics {
            held.set_aside(&of(topic), false, &letters(), true, now);
        }
        let later = |topic| Message::builder().topic(topic).key("a").offset(7).record();
        let holds = || topics.map(|topic| held.ruling(&later(topic), now).is_some());
        assert_eq!(held.ruling(&later("refunds"), now), None);
        assert!(held.release("orders", b"a"));
        assert_eq!(holds(), [false, false, true, true]);
        held.forget("payments", 1);
        held.forget("refunds", 0);
        assert_eq!(holds(), [false, false, true, true]);
        held.forget("payments", 0);
        assert_eq!(holds(), [false, false, true, false]);
    }

    #[test]
    fn what_is_handled_in_a_retry_topic_is_not_waited_for_in_the_topic() {
        let (held, now) = (HeldKeys::new(HoldKey::Follow, LASTS), Instant::now());
        // What was dead-lettered out of a retry topic comes back elsewhere: its hold ends by time.
        held.set_aside(&record("a", 1), true, &letters(), false, now);
        assert_eq!(
            held.ruling(&record("a", 2), now),
            Some(Ruling::Follow(letters()))
        );
        assert_eq!(held.ruling(&record("a", 2), now + LASTS), None);

        held.set_aside(&record("b", 1), false, &letters(), false, now);
        assert_eq!(held.ruling(&back("b", 1), now), None, "it is expected back");
        assert!(
            !held.is_waited_for(&back("b", 1)),
            "nobody waits where all follow"
        );
    }

    #[test]
    fn beyond_the_limit_the_key_that_was_held_first_is_released() {
        let (held, now) = (HeldKeys::new(HoldKey::Wait, LASTS), Instant::now());
        for number in 0..LIMIT as i64 / 2 + 2 {
            let key = format!("key {number}");
            held.set_aside(&record(&key, number), false, &letters(), false, now);
        }
        assert_eq!(held.count(), LIMIT / 2);
        assert_eq!(held.ruling(&record("key 1", -1), now), None);
        assert_eq!(held.ruling(&record("key 2", -1), now), Some(Ruling::Wait));
    }

    #[test]
    fn records_without_a_key_hold_nobody() {
        let (held, now) = (HeldKeys::new(HoldKey::Wait, LASTS), Instant::now());
        let keyless = Message::builder().topic("orders").record();
        held.set_aside(&keyless, false, &letters(), false, now);
        assert_eq!(held.count(), 0);
    }
}
