//! Where every choice of a simulated world comes from.

use std::{ops::Range, time::Duration};

use super::super::super::splitmix;

pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        // Neighbouring seeds would begin with neighbouring states otherwise.
        let mut state = seed ^ 0x6c62_272e_07bb_0142;
        Self(splitmix(&mut state))
    }

    pub(super) fn next(&mut self) -> u64 {
        splitmix(&mut self.0)
    }

    /// Less than `bound`, which is not 0.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub(super) fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.next() % (range.end - range.start)
    }

    pub(super) fn ms(&mut self, range: Range<u64>) -> Duration {
        Duration::from_millis(self.within(range))
    }

    /// True this many times in a thousand.
    pub(super) fn chance(&mut self, per_mille: u64) -> bool {
        self.next() % 1000 < per_mille
    }

    pub(super) fn pick<T: Copy>(&mut self, among: &[T]) -> T {
        among[self.below(among.len())]
    }

    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}
