//! How many turns are handed over ahead of free permits.
//!
//! Executors need a little stock, or they idle while the pump goes round. Too much stock makes a quiet partition wait
//! behind a busy one's, and leaves more to give back at a rebalance. So the stock is what finishes in two
//! milliseconds at the rate measured last: thousands of turns for handlers that are ready at once, a handful for slow
//! ones.

use std::time::{Duration, Instant};

const STOCK: Duration = Duration::from_millis(2);
const SAMPLE: Duration = Duration::from_micros(500);
/// A rate of zero is believed only after this long with work out.
const SILENCE: Duration = Duration::from_millis(4);
const FIRST: usize = 64;
const LEAST: usize = 4;
const MOST: usize = 4096;

#[derive(Debug)]
pub(crate) struct Pace {
    ahead: usize,
    done: usize,
    since: Option<Instant>,
}

impl Pace {
    pub(crate) fn new() -> Self {
        Self {
            ahead: FIRST,
            done: 0,
            since: None,
        }
    }

    /// Turns that may be out beyond the permits.
    pub(crate) fn ahead(&self) -> usize {
        self.ahead
    }

    #[inline]
    pub(crate) fn turn_over(&mut self) {
        self.done += 1;
    }

    /// Takes a sample. `busy`: turns are out now.
    pub(crate) fn sample(&mut self, now: Instant, busy: bool) {
        if !busy {
            // What comes after a rest is not known: neither starve it nor flood it.
            self.ahead = self.ahead.clamp(FIRST, FIRST * 8);
            (self.since, self.done) = (None, 0);
            return;
        }
        let Some(since) = self.since else {
            self.since = Some(now);
            self.done = 0;
            return;
        };
        let elapsed = now.saturating_duration_since(since);
        if elapsed < SAMPLE || (self.done == 0 && elapsed < SILENCE) {
            return;
        }
        let finishes = (self.done as u128 * STOCK.as_nanos() / elapsed.as_nanos().max(1)) as usize;
        self.ahead = finishes.min(self.ahead * 2).clamp(LEAST, MOST);
        (self.since, self.done) = (Some(now), 0);
    }
}
