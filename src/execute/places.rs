//! Where there is an idempotency store: who runs once it has answered, and how many records are out with it meanwhile.
//!
//! A record that waits for the store takes no handler's place, or a slow store would leave handlers idle. So there are
//! more turns out than handlers: as many more as it takes to have claims come in as fast as handlers end. That is learned,
//! in rounds of as many claims as may be out. If one found a place free although all turns were out, there are more in the
//! next round; if all found a queue, there are less by what was superfluous in it. So few wait, however slow the store or
//! the handlers are: what is claimed and waits has to be renewed, and keeps others waiting should this process die.

use std::sync::atomic::{
    AtomicBool, AtomicUsize,
    Ordering::{AcqRel, Relaxed},
};

use super::Permits;

/// The most turns that are out beyond the handlers: with a store that takes 100 ms to claim and to complete, enough for
/// 20,000 records a second.
pub(crate) const MOST_AHEAD: usize = 4_096;
const LEAST_AHEAD: usize = 4;
const FIRST_AHEAD: usize = 64;

/// The places of handlers, for records whose claim is there.
#[derive(Debug)]
pub(crate) struct Places {
    free: Permits,
    handlers: usize,
    /// Records from their claim to their completion.
    out: AtomicUsize,
    waiting: AtomicUsize,
    ahead: AtomicUsize,
    round: Round,
}

/// What the claims of a round have found. Two of them may fall into different rounds for different purposes: no matter.
#[derive(Debug)]
struct Round {
    claims: AtomicUsize,
    starved: AtomicBool,
    shortest_queue: AtomicUsize,
}

impl Places {
    pub(crate) fn new(handlers: usize) -> Self {
        Self {
            free: Permits::new(handlers),
            handlers,
            out: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            ahead: AtomicUsize::new(handlers.clamp(LEAST_AHEAD, FIRST_AHEAD)),
            round: Round {
                claims: AtomicUsize::new(0),
                starved: AtomicBool::new(false),
                shortest_queue: AtomicUsize::new(usize::MAX),
            },
        }
    }

    /// How many turns may be out beyond the handlers.
    pub(crate) fn ahead(&self) -> usize {
        self.ahead.load(Relaxed)
    }

    /// A record whose claim is about to be asked for.
    pub(super) fn enter(&self) -> Counted<'_> {
        Counted::one_more(&self.out)
    }

    /// Waits for a handler's place for as long as `wanted` says so. `None`: not wanted any more.
    pub(super) async fn take(&self, wanted: impl Fn() -> bool) -> Option<Place<'_>> {
        if !wanted() {
            return None;
        }
        let is_free = self.free.try_take();
        self.learn(is_free);
        if is_free {
            return Some(Place(self));
        }
        let waiting = Counted::one_more(&self.waiting);
        let taken = self.free.take(wanted).await;
        drop(waiting);
        taken.then_some(Place(self))
    }

    fn learn(&self, is_free: bool) {
        let Round {
            claims,
            starved,
            shortest_queue,
        } = &self.round;
        let ahead = self.ahead();
        let limit = self.handlers + ahead;
        if is_free && self.out.load(Relaxed) >= limit - limit / 4 {
            starved.store(true, Relaxed);
        }
        shortest_queue.fetch_min(self.waiting.load(Relaxed), Relaxed);
        if claims.fetch_add(1, AcqRel) + 1 < limit {
            return;
        }
        claims.store(0, Relaxed);
        let shortest = shortest_queue.swap(usize::MAX, Relaxed);
        let next = if starved.swap(false, Relaxed) {
            (ahead + limit / 2).min(MOST_AHEAD)
        } else {
            let superfluous = shortest.saturating_sub(self.handlers);
            ahead.saturating_sub(superfluous).max(LEAST_AHEAD)
        };
        self.ahead.store(next, Relaxed);
    }

    pub(super) fn fence_closed(&self) {
        self.free.fence_closed();
    }
}

/// A handler's place, until it is dropped.
#[derive(Debug)]
pub(super) struct Place<'a>(&'a Places);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.free.give_back();
    }
}

/// Counted until it is dropped.
#[derive(Debug)]
pub(super) struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn one_more(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Relaxed);
        Self(count)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::Future,
        pin::Pin,
        task::{Context, Poll, Waker},
    };

    use super::*;

    /// A record on its way, and until when.
    enum Stage<'a> {
        Claiming(u32),
        Waiting(Pin<Box<dyn Future<Output = Option<Place<'a>>> + 'a>>),
        Handling(u32, #[expect(dead_code, reason = "it is held")] Place<'a>),
        Completing(u32),
        Over,
    }

    /// Lets as many records be out as may be, for so many milliseconds, with a store and handlers that take so long. Says
    /// how many were handled.
    fn handle_for(places: &Places, time: u32, store: u32, work: u32) -> usize {
        let mut handled = 0;
        let mut out: Vec<(Counted<'_>, Stage<'_>)> = Vec::new();
        for now in 0..time {
            while out.len() < places.handlers + places.ahead() {
                out.push((places.enter(), Stage::Claiming(now + store)));
            }
            for (_, stage) in &mut out {
                if matches!(stage, Stage::Claiming(until) if *until <= now) {
                    *stage = Stage::Waiting(Box::pin(places.take(|| true)));
                }
                if let Stage::Waiting(place) = stage
                    && let Poll::Ready(place) =
                        place.as_mut().poll(&mut Context::from_waker(Waker::noop()))
                {
                    *stage = Stage::Handling(now + work, place.expect("it is wanted"));
                }
                match stage {
                    Stage::Handling(until, _) if *until <= now => {
                        *stage = Stage::Completing(now + store);
                        handled += 1;
                    }
                    Stage::Completing(until) if *until <= now => *stage = Stage::Over,
                    _ => {}
                }
            }
            out.retain(|(_, stage)| !matches!(stage, Stage::Over));
        }
        handled
    }

    #[test]
    fn a_slow_store_leaves_no_handler_idle_and_slow_handlers_keep_few_claims_waiting() {
        let places = Places::new(8);
        // 8 handlers of 5 ms: 1,600 a second at the most.
        handle_for(&places, 1_000, 50, 5);
        let handled = handle_for(&places, 1_000, 50, 5);
        assert!(handled >= 1_400, "{handled}, {} ahead", places.ahead());
        // What was learned is unlearned.
        handle_for(&places, 2_000, 5, 50);
        assert!(places.ahead() <= 3 * 8, "{}", places.ahead());
        let handled = handle_for(&places, 1_000, 5, 50);
        assert!(handled >= 140, "{handled} of 160 at the most");
    }

    #[tokio::test]
    async fn what_waits_for_a_place_hears_that_it_is_not_wanted_and_places_are_given_back() {
        let places = Places::new(1);
        let place = places.take(|| true).await.expect("it is free");
        let wanted = std::cell::Cell::new(true);
        let waits = places.take(|| wanted.get());
        let tells = async {
            tokio::task::yield_now().await;
            assert_eq!(places.waiting.load(Relaxed), 1);
            wanted.set(false);
            places.fence_closed();
        };
        let (none, ()) = tokio::join!(waits, tells);
        assert!(none.is_none());
        drop(place);
        assert!(places.take(|| true).await.is_some());
        assert_eq!(places.waiting.load(Relaxed), 0);
        assert!(places.take(|| false).await.is_none());
    }

    #[tokio::test]
    async fn little_traffic_asks_for_no_more_turns() {
        let places = Places::new(64);
        let before = places.ahead();
        for _ in 0..1_000 {
            let _out = places.enter();
            let _place = places.take(|| true).await;
        }
        assert_eq!(places.ahead(), before);
    }
}
