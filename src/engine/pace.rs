//! How many turns are handed over ahead of free permits.
//!
//! Executors need a little stock, or they idle while the pump goes round. Too much stock makes a quiet partition wait
//! behind a busy one's, and leaves more to give back at a rebalance. So the stock is what finishes in two
//! milliseconds at the rate measured last: thousands of turns for handlers that are ready at once, a handful for slow
//! ones.
//!
//! The same rate says how many records of one lane go out in one turn: what a lane works off in a few milliseconds. A
//! turn that is out cannot be called back but record by record, so a pause, a rebalance and a retry act soon.

use std::time::{Duration, Instant};

const STOCK: Duration = Duration::from_millis(2);
/// The work of one turn.
const TURN: Duration = Duration::from_millis(5);
const SAMPLE: Duration = Duration::from_micros(500);
/// A rate of zero is believed only after this long with work out.
const SILENCE: Duration = Duration::from_millis(4);
const FIRST: usize = 64;
const LEAST: usize = 4;
const MOST: usize = 4096;
const SHORTEST_TURN: usize = 8;
const LONGEST_TURN: usize = 1024;

#[derive(Debug)]
pub(crate) struct Pace {
    ahead: usize,
    turn: usize,
    turns: usize,
    records: usize,
    since: Option<Instant>,
}

impl Pace {
    pub(crate) fn new() -> Self {
        Self {
            ahead: FIRST,
            turn: FIRST,
            turns: 0,
            records: 0,
            since: None,
        }
    }

    /// Turns that may be out beyond the permits.
    pub(crate) fn ahead(&self) -> usize {
        self.ahead
    }

    /// Records of one lane that may go out together.
    pub(crate) fn turn(&self) -> usize {
        self.turn
    }

    #[inline]
    pub(crate) fn record_done(&mut self) {
        self.records += 1;
    }

    #[inline]
    pub(crate) fn turn_over(&mut self) {
        self.turns += 1;
    }

    /// Takes a sample. `out`: turns that are out now.
    pub(crate) fn sample(&mut self, now: Instant, out: usize) {
        if out == 0 {
            // What comes after a rest is not known: neither starve it nor flood it.
            self.ahead = self.ahead.clamp(FIRST, FIRST * 8);
            self.since = None;
            return;
        }
        let Some(since) = self.since else {
            self.begin(now);
            return;
        };
        let elapsed = now.saturating_duration_since(since);
        if elapsed < SAMPLE || (self.records == 0 && elapsed < SILENCE) {
            return;
        }
        let within = |count: usize, time: Duration| {
            (count as u128 * time.as_nanos() / elapsed.as_nanos().max(1)) as usize
        };
        self.ahead = within(self.turns, STOCK)
            .min(self.ahead * 2)
            .clamp(LEAST, MOST);
        self.turn = (within(self.records, TURN) / out)
            .min(self.turn * 2)
            .clamp(SHORTEST_TURN, LONGEST_TURN);
        self.begin(now);
    }

    fn begin(&mut self, now: Instant) {
        (self.since, self.turns, self.records) = (Some(now), 0, 0);
    }
}
