//! How fast records are sent: so many a second, evenly.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// What was not sent in time may be made up for, up to this much: a timer that fires late costs no speed, and a pause is
/// not followed by a burst.
const MADE_UP_FOR: Duration = Duration::from_millis(100);

pub(super) struct Pace {
    interval: Duration,
    next: Mutex<Option<Instant>>,
}

impl Pace {
    /// `per_second` is more than zero.
    pub(super) fn new(per_second: u32) -> Self {
        Self {
            interval: Duration::from_secs(1) / per_second,
            next: Mutex::new(None),
        }
    }

    /// When the next record may be sent: that moment is taken.
    pub(super) fn reserve(&self, now: Instant) -> Instant {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let earliest = now.checked_sub(MADE_UP_FOR).unwrap_or(now);
        let mine = next.map_or(now, |next| next.max(earliest));
        *next = Some(mine + self.interval);
        mine
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_spread_evenly_and_a_pause_is_not_made_up_for() {
        let pace = Pace::new(100);
        let start = Instant::now();
        let at = |moment: Instant| moment.duration_since(start).as_millis();
        let first: Vec<_> = (0..4).map(|_| at(pace.reserve(start))).collect();
        assert_eq!(first, [0, 10, 20, 30]);
        let later = start + Duration::from_secs(10);
        let burst = (0..100).filter(|_| pace.reserve(later) <= later).count();
        assert!(burst <= 11, "{burst} at once after a pause");
    }
}
