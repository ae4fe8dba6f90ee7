//! The retry policy as users write it, and the delay that follows from it.

use std::time::Duration;

/// How often, and after which delays, a failed record is tried again.
///
/// The default is `Retry::exponential` from 100 ms to 30 s and ten attempts, some 50 s from first to last: it rides out a
/// restart or a failover of what a handler talks to. Errors that mean an outage are better called so, see
/// [`OutageBreaker`](crate::OutageBreaker): they count against no record. Allow fewer, where a lane must not wait for a bad
/// record.
///
/// ```
/// use std::time::Duration;
/// use reliable_consumer::Retry;
///
/// let patient = Retry::exponential(Duration::from_millis(100), Duration::from_secs(30))
///     .unlimited_attempts()
///     .max_elapsed(Duration::from_secs(600));
/// ```
///
/// Delays are waited out inside the consumer. They do not endanger group membership, whatever
/// `max.poll.interval.ms` is, but the partition's committed offset stands at the failed record until it is finished.
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct Retry {
    initial: Duration,
    cap: Duration,
    /// Finite and at least 1.
    multiplier: f64,
    /// From 0 to 1.
    jitter: f64,
    /// At least 1; `None` is without limit.
    max_attempts: Option<u32>,
    max_elapsed: Option<Duration>,
}

impl Default for Retry {
    fn default() -> Self {
        Self::exponential(Duration::from_millis(100), Duration::from_secs(30))
    }
}

impl Retry {
    /// Waits `initial` after the first failed attempt, twice as long after each further one, and never longer than
    /// `cap`. With the defaults of the methods below: doubling, 20 % of jitter, ten attempts.
    pub fn exponential(initial: Duration, cap: Duration) -> Self {
        Self {
            initial,
            cap,
            multiplier: 2.0,
            jitter: 0.2,
            max_attempts: Some(10),
            max_elapsed: None,
        }
    }

    /// Waits `delay` after each failed attempt; without jitter unless asked for, ten attempts.
    pub fn fixed(delay: Duration) -> Self {
        Self::exponential(delay, delay).jitter(0.0)
    }

    /// One attempt, and no retry.
    pub fn none() -> Self {
        Self::default().max_attempts(1)
    }

    /// Sets the factor by which a delay is longer than the one before; 2 by default. Below 1, or no number: 1.
    pub fn multiplier(mut self, factor: f64) -> Self {
        self.multiplier = if factor.is_finite() {
            factor.max(1.0)
        } else {
            1.0
        };
        self
    }

    /// Sets how much a delay varies at random, as a fraction from 0 to 1; 0.2 by default, so that what failed together
    /// does not come back together.
    ///
    /// A delay *d* becomes one evenly spread from *d* × (1 − fraction) to *d* × (1 + fraction) or the cap, whichever is
    /// less. The cap is never exceeded, and delays do not pile up on it. Out of range is taken for the nearest end, no
    /// number for 0.
    pub fn jitter(mut self, fraction: f64) -> Self {
        self.jitter = if fraction.is_nan() {
            0.0
        } else {
            fraction.clamp(0.0, 1.0)
        };
        self
    }

    /// Sets how often the handler is called in all, the first call included; 5 by default. 0 is taken for 1.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = Some(attempts.max(1));
        self
    }

    /// Retries for ever, or until [`max_elapsed`](Self::max_elapsed). A record that can never be handled then blocks
    /// its lane, and its partition's committed offset, for good.
    pub fn unlimited_attempts(mut self) -> Self {
        self.max_attempts = None;
        self
    }

    /// Gives up this long after the first attempt failed; without limit by default.
    ///
    /// A delay that would end later is cut, so that a last attempt starts when the time is up. The attempts that are
    /// allowed may be used up earlier.
    pub fn max_elapsed(mut self, elapsed: Duration) -> Self {
        self.max_elapsed = Some(elapsed);
        self
    }

    /// The delay before the next attempt, or `None` when there is to be none. `random` is uniform.
    pub(crate) fn next(
        &self,
        attempts_made: u32,
        since_first_failure: Duration,
        random: u64,
    ) -> Option<Duration> {
        if self.is_exhausted(attempts_made, since_first_failure) {
            return None;
        }
        let delay = self.spread(self.delay(attempts_made), random);
        Some(match self.max_elapsed {
            Some(limit) => delay.min(limit.saturating_sub(since_first_failure)),
            None => delay,
        })
    }

    /// Whether no attempt is left, for an error that brings a delay of its own as much as for one that does not.
    pub(crate) fn is_exhausted(&self, attempts_made: u32, since_first_failure: Duration) -> bool {
        self.max_attempts.is_some_and(|most| attempts_made >= most)
            || self
                .max_elapsed
                .is_some_and(|limit| since_first_failure >= limit)
    }

    /// No delay is longer.
    pub(crate) fn longest(&self) -> Duration {
        self.cap
    }

    fn delay(&self, attempts_made: u32) -> Duration {
        // Zero times infinity would be no number.
        if self.initial.is_zero() {
            return Duration::ZERO;
        }
        let exponent = f64::from(attempts_made.saturating_sub(1));
        let seconds = self.initial.as_secs_f64() * self.multiplier.powf(exponent);
        Duration::try_from_secs_f64(seconds)
            .unwrap_or(Duration::MAX)
            .min(self.cap)
    }

    fn spread(&self, delay: Duration, random: u64) -> Duration {
        if self.jitter == 0.0 {
            return delay;
        }
        let delay = delay.as_secs_f64();
        let least = delay * (1.0 - self.jitter);
        let most = (delay * (1.0 + self.jitter)).min(self.cap.as_secs_f64());
        let position = random as f64 / u64::MAX as f64;
        Duration::try_from_secs_f64(least + (most - least) * position)
            .unwrap_or(Duration::MAX)
            .min(self.cap)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ANY_RANDOM: u64 = 0x9e37_79b9_7f4a_7c15;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn delays(policy: &Retry) -> Vec<Duration> {
        let mut elapsed = Duration::ZERO;
        (1..=100)
            .map_while(|attempts| {
                let delay = policy.next(attempts, elapsed, ANY_RANDOM)?;
                elapsed += delay;
                Some(delay)
            })
            .collect()
    }

    #[test]
    fn delays_double_up_to_the_cap_and_end_with_the_attempts() {
        let policy = Retry::exponential(ms(100), ms(1_000)).jitter(0.0);
        let five = policy.clone().max_attempts(5);
        assert_eq!(delays(&five), [100, 200, 400, 800].map(ms));
        let delays = delays(&policy.max_attempts(7));
        assert_eq!(delays, [100, 200, 400, 800, 1_000, 1_000].map(ms));
    }

    #[test]
    fn the_default_makes_ten_attempts_over_some_50_s() {
        let delays = delays(&Retry::default());
        assert_eq!(delays.len(), 9);
        assert!((ms(80)..=ms(120)).contains(&delays[0]));
        let all: Duration = delays.iter().sum();
        assert!((ms(40_000)..=ms(62_000)).contains(&all), "{all:?}");
    }

    #[test]
    fn a_fixed_delay_is_always_the_same() {
        assert_eq!(delays(&Retry::fixed(ms(50)).max_attempts(4)), [ms(50); 3]);
    }

    #[test]
    fn a_delay_of_zero_stays_zero_however_many_attempts() {
        let policy = Retry::exponential(Duration::ZERO, ms(1_000)).unlimited_attempts();
        let delay = policy.next(100_000, Duration::ZERO, ANY_RANDOM);
        assert_eq!(delay, Some(Duration::ZERO));
    }

    #[test]
    fn none_means_one_attempt() {
        assert_eq!(delays(&Retry::none()), []);
        assert_eq!(delays(&Retry::default().max_attempts(0)), []);
    }

    #[test]
    fn the_last_attempt_falls_at_the_end_of_the_elapsed_time() {
        let policy = Retry::fixed(ms(400))
            .unlimited_attempts()
            .max_elapsed(ms(1_000));
        assert_eq!(delays(&policy), [400, 400, 200].map(ms));
        assert!(policy.is_exhausted(1, ms(1_000)));
        assert!(!policy.is_exhausted(u32::MAX, ms(999)));
    }

    #[test]
    fn jitter_spreads_delays_evenly_and_does_not_pile_them_up_on_the_cap() {
        let policy = Retry::exponential(ms(100), ms(1_000)).jitter(0.5);
        let at = |attempts, random| policy.next(attempts, Duration::ZERO, random);
        assert_eq!(at(1, 0), Some(ms(50)));
        assert_eq!(at(1, u64::MAX / 2), Some(ms(100)));
        assert_eq!(at(1, u64::MAX), Some(ms(150)));

        let capped = policy.clone().max_attempts(30);
        let at_cap = |random| capped.next(20, Duration::ZERO, random);
        assert_eq!(at_cap(0), Some(ms(500)));
        assert_eq!(at_cap(u64::MAX / 2), Some(ms(750)));
        assert_eq!(at_cap(u64::MAX), Some(ms(1_000)));
    }

    #[test]
    fn settings_out_of_range_are_taken_for_the_nearest_sensible_ones() {
        let policy = Retry::exponential(ms(100), ms(1_000));
        for factor in [0.5, -3.0, f64::NAN, f64::INFINITY] {
            let policy = policy.clone().jitter(0.0).multiplier(factor);
            assert_eq!(delays(&policy), [ms(100); 9], "{factor}");
        }
        assert_eq!(policy.clone().jitter(f64::NAN), policy.clone().jitter(0.0));
        assert_eq!(policy.clone().jitter(7.0), policy.jitter(1.0));
    }

    fn durations() -> impl Strategy<Value = Duration> {
        prop_oneof![
            Just(Duration::ZERO),
            Just(Duration::from_nanos(1)),
            Just(Duration::MAX),
            (0..100_000_000u64).prop_map(Duration::from_micros),
            any::<u64>().prop_map(Duration::from_nanos),
        ]
    }

    fn attempts() -> impl Strategy<Value = u32> {
        prop_oneof![0..40u32, any::<u32>(), Just(u32::MAX)]
    }

    proptest! {
        #[test]
        fn no_delay_exceeds_the_cap_or_what_is_left_of_the_time(
            initial in durations(),
            cap in durations(),
            multiplier in prop_oneof![1.0..10.0, Just(f64::MAX), Just(f64::MIN_POSITIVE)],
            jitter in 0.0..=1.0,
            limit in proptest::option::of(durations()),
            attempts in attempts(),
            elapsed in durations(),
            random: u64,
        ) {
            let mut policy = Retry::exponential(initial, cap)
                .multiplier(multiplier)
                .jitter(jitter)
                .unlimited_attempts();
            policy.max_elapsed = limit;
            match policy.next(attempts, elapsed, random) {
                Some(delay) => {
                    prop_assert!(delay <= cap);
                    if let Some(limit) = limit {
                        prop_assert!(elapsed < limit && delay <= limit - elapsed);
                    }
                }
                None => prop_assert!(limit.is_some_and(|limit| elapsed >= limit)),
            }
        }

        #[test]
        fn without_jitter_no_delay_is_shorter_than_the_one_before(
            initial in durations(),
            cap in durations(),
            multiplier in 1.0..10.0,
            attempts in attempts(),
        ) {
            let policy = Retry::exponential(initial, cap)
                .multiplier(multiplier)
                .jitter(0.0)
                .unlimited_attempts();
            let delay = |attempts| policy.next(attempts, Duration::ZERO, ANY_RANDOM);
            prop_assert!(delay(attempts) <= delay(attempts.saturating_add(1)));
        }

        #[test]
        fn jitter_stays_within_its_fraction(
            initial in (1..1_000u64).prop_map(ms),
            jitter in 0.0..=1.0,
            attempts in 1..10u32,
            random: u64,
        ) {
            let policy = Retry::exponential(initial, Duration::MAX).unlimited_attempts();
            let exact = policy.clone().jitter(0.0).next(attempts, Duration::ZERO, random);
            let spread = policy.jitter(jitter).next(attempts, Duration::ZERO, random);
            let ratio = spread.unwrap().as_secs_f64() / exact.unwrap().as_secs_f64();
            let tolerance = 1e-5;
            prop_assert!((1.0 - jitter - tolerance..=1.0 + jitter + tolerance).contains(&ratio));
        }
    }
}
