//! When a dependency is taken to be down, and how the flow comes back once it answers: the outage breaker.
//!
//! It is told how attempts ended, and tells how many turns may be out. *Closed*: as many as there are. *Open*: none.
//! *Probing* (half open): one, the probe; more only when a probe does not come back. *Opening*: two, four, eight … while
//! it goes well.

use std::{
    collections::{HashSet, VecDeque},
    time::{Duration, Instant},
};

use super::{Ownership, later, splitmix};
use crate::backoff::Retry;

/// The window moves on by a tenth of its length.
const SLOTS: usize = 10;

/// What happens when a dependency of the handlers is down: nothing is thrown at it, and nothing counts against records.
///
/// The breaker goes by the errors that are said to be outages, by [`outage`](crate::outage) or a
/// [`Classification::outage`](crate::Classification::outage); without such errors it does nothing. Each attempt counts, not
/// each record. It opens when at least [`min_attempts`](Self::min_attempts) attempts ended within the
/// [`window`](Self::window) and the [`ratio`](Self::ratio) of them were outages; or when twice as many in a row, and no
/// fewer than [`concurrency`](crate::Builder::concurrency), were, whatever was before.
///
/// While it is open, nothing is handed to handlers, what was handed over and has not started comes back, and nothing more
/// is read; handlers at work go on, and so do commits, rebalances and shutdowns. After a pause one record is handled, the
/// probe. If that is an outage again, the next pause is longer. If not, two records may be at work, then four, and so on
/// up to the concurrency, at which the breaker closes; or it closes when a window's time went by without trouble. Should
/// the ratio of one of these steps be outages, it opens again.
///
/// An attempt answers for the dependency if the handler succeeded or failed with an error that is to be retried and is
/// no outage, timeouts and panics included. What was skipped, postponed, or failed for good, says nothing about it.
///
/// Records whose attempt was an outage lose neither attempts nor time of their [`Retry`](crate::Retry), whether the breaker
/// opens or not. Where it does not, since there is little traffic or other records do well, they are tried again after
/// [waits of their own](Self::record_waits). While it is open and being probed, the time of no record's retries goes on.
///
/// A consumer has one breaker for all of its topics. Where handlers of different topics depend on different things that
/// fail apart, use a consumer for each.
///
/// ```
/// use std::time::Duration;
/// use reliable_consumer::{OutageBreaker, ReliableConsumer};
///
/// let eager = OutageBreaker::new()
///     .window(Duration::from_secs(30))
///     .ratio(0.9)
///     .probe_pauses(Duration::from_millis(500), Duration::from_secs(5));
/// let builder = ReliableConsumer::builder().outage_breaker(eager);
/// ```
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct OutageBreaker {
    window: Duration,
    min_attempts: u32,
    /// Above 0, at most 1.
    ratio: f64,
    probes: (Duration, Duration),
    waits: (Duration, Duration),
}

impl Default for OutageBreaker {
    fn default() -> Self {
        Self::new()
    }
}

impl OutageBreaker {
    /// A breaker with the defaults named below.
    pub fn new() -> Self {
        Self {
            window: Duration::from_secs(10),
            min_attempts: 10,
            ratio: 0.5,
            probes: (Duration::from_secs(1), Duration::from_secs(10)),
            waits: (Duration::from_millis(500), Duration::from_secs(5)),
        }
    }

    /// The time whose attempts are looked at; 10 s by default. It moves on by a tenth at a time.
    pub fn window(mut self, length: Duration) -> Self {
        self.window = length;
        self
    }

    /// Attempts within the window below which their ratio says nothing; 10 by default. 0 is taken for 1.
    pub fn min_attempts(mut self, attempts: u32) -> Self {
        self.min_attempts = attempts.max(1);
        self
    }

    /// The part of attempts that have to be outages, above 0 and up to 1; 0.5 by default. Out of range is taken for the
    /// nearest end, no number for the default.
    pub fn ratio(mut self, ratio: f64) -> Self {
        self.ratio = if ratio.is_nan() {
            0.5
        } else {
            ratio.clamp(f64::MIN_POSITIVE, 1.0)
        };
        self
    }

    /// The pause before the first probe, which doubles with each one that fails, up to the longest. 1 s and 10 s by
    /// default: a dependency that is back is noticed within that time, and a process costs it one call in it meanwhile.
    /// With 20 % of jitter.
    pub fn probe_pauses(mut self, first: Duration, longest: Duration) -> Self {
        self.probes = (first, longest);
        self
    }

    /// How long a record waits after an outage while the breaker is closed: the first time, doubling with each further
    /// outage of it up to the longest. 0.5 s and 5 s by default, with 20 % of jitter.
    pub fn record_waits(mut self, first: Duration, longest: Duration) -> Self {
        self.waits = (first, longest);
        self
    }
}

/// The state of the breaker, from [`BreakerStatus`](crate::BreakerStatus).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum BreakerState {
    /// All is well, or there is too little traffic to say otherwise.
    #[default]
    Closed,
    /// A dependency is down: nothing is handed to handlers before the next probe.
    Open,
    /// A probe is at work, or there is no record to probe with.
    HalfOpen,
    /// The dependency answers; the flow grows step by step.
    Opening,
}

/// What the end of an attempt says about the dependency.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Evidence {
    Answered,
    Down,
    /// The attempt may never have come to it.
    Nothing,
}

/// Something to tell of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BreakerChange {
    Opened {
        outages: u64,
        attempts: u64,
        next_probe: Duration,
    },
    /// Probing, or opening step by step, has met the outage again.
    StillDown {
        next_probe: Duration,
    },
    Answers,
    Closed {
        after: Duration,
    },
}

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    answered: u64,
    outages: u64,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Closed,
    Open {
        probe_at: Instant,
    },
    Probing {
        /// The newest probe, and when it is no longer waited for: a hung one must not keep the breaker open for ever. Those
        /// before it, which are overdue, neither make room nor take it.
        awaited: Option<(Ownership, u64, Instant)>,
    },
    Opening {
        allowed: usize,
        answered: usize,
        outages: usize,
        /// Without trouble until then, it closes even if there was too little traffic to go through all steps.
        until: Instant,
    },
}

/// See the module's first lines.
#[derive(Debug)]
pub(crate) struct Breaker {
    settings: OutageBreaker,
    enabled: bool,
    concurrency: usize,
    random: u64,
    state: State,
    current: Slot,
    /// Those before the current one, in no order.
    past: [Slot; SLOTS - 1],
    next_past: usize,
    current_ends: Instant,
    /// Outages since the last attempt that was none.
    in_a_row: u64,
    /// Records whose attempt began after the breaker had opened. Whatever began earlier says nothing about now.
    on_trial: HashSet<(Ownership, u64)>,
    /// Pauses in this outage so far.
    pauses: u32,
    opened_at: Option<Instant>,
    /// Open or probing since then.
    holding_since: Option<Instant>,
    /// How long it was open or probing before.
    held: Duration,
    changes: VecDeque<BreakerChange>,
}

impl Breaker {
    /// Without settings it never opens.
    pub(crate) fn new(
        settings: Option<OutageBreaker>,
        concurrency: usize,
        seed: u64,
        now: Instant,
    ) -> Self {
        let enabled = settings.is_some();
        let settings = settings.unwrap_or_default();
        Self {
            current_ends: later(now, slot_length(&settings)),
            settings,
            enabled,
            concurrency,
            random: seed.rotate_left(32),
            state: State::Closed,
            current: Slot::default(),
            past: [Slot::default(); SLOTS - 1],
            next_past: 0,
            in_a_row: 0,
            on_trial: HashSet::new(),
            pauses: 0,
            opened_at: None,
            holding_since: None,
            held: Duration::ZERO,
            changes: VecDeque::new(),
        }
    }

    /// An attempt ended. On the path of each record: while closed, a success is two stores.
    #[inline]
    pub(crate) fn ended(&mut self, owner: Ownership, seq: u64, evidence: Evidence, now: Instant) {
        match (self.state, evidence) {
            (State::Closed, Evidence::Answered) => {
                self.current.answered += 1;
                self.in_a_row = 0;
            }
            (State::Closed, Evidence::Nothing) => {}
            (State::Closed, Evidence::Down) => self.met_outage(now),
            _ => self.trial_ended(owner, seq, evidence, now),
        }
    }

    #[cold]
    fn met_outage(&mut self, now: Instant) {
        self.current.outages += 1;
        self.in_a_row += 1;
        let window = self.past.iter().chain([&self.current]);
        let (mut answered, mut outages) = (0, 0);
        for slot in window {
            answered += slot.answered;
            outages += slot.outages;
        }
        let attempts = answered + outages;
        let least = u64::from(self.settings.min_attempts);
        let many = attempts >= least && outages as f64 >= self.settings.ratio * attempts as f64;
        // Under much traffic, what went well just before the outage would outnumber it for half a window.
        let all = self.in_a_row >= (2 * least).max(self.concurrency as u64);
        if self.enabled && (many || all) {
            let next_probe = self.hold(now);
            self.opened_at = Some(now);
            self.changes.push_back(BreakerChange::Opened {
                outages,
                attempts,
                next_probe,
            });
        }
    }

    fn trial_ended(&mut self, owner: Ownership, seq: u64, evidence: Evidence, now: Instant) {
        if !self.on_trial.remove(&(owner, seq)) {
            return;
        }
        match (&mut self.state, evidence) {
            (State::Closed | State::Open { .. }, _) => {}
            (_, Evidence::Nothing) => self.trial_is_void(|of, it| (of, it) == (owner, seq)),
            (State::Probing { .. }, Evidence::Answered) => {
                if let Some(since) = self.holding_since.take() {
                    self.held += now.saturating_duration_since(since);
                }
                self.changes.push_back(BreakerChange::Answers);
                self.step_up(1, now);
            }
            (State::Probing { .. }, Evidence::Down) => self.still_down(now),
            (
                State::Opening {
                    allowed,
                    answered,
                    outages,
                    ..
                },
                _,
            ) => {
                match evidence {
                    Evidence::Down => *outages += 1,
                    _ => *answered += 1,
                }
                let (allowed, ended) = (*allowed, *answered + *outages);
                if *outages as f64 >= self.settings.ratio * allowed as f64 {
                    self.still_down(now);
                } else if ended >= allowed {
                    self.step_up(allowed, now);
                }
            }
        }
    }

    fn step_up(&mut self, went_well: usize, now: Instant) {
        if went_well >= self.concurrency {
            return self.close(now);
        }
        self.state = State::Opening {
            allowed: (2 * went_well).min(self.concurrency),
            answered: 0,
            outages: 0,
            until: later(now, self.settings.window),
        };
    }

    fn still_down(&mut self, now: Instant) {
        let next_probe = self.hold(now);
        self.changes
            .push_back(BreakerChange::StillDown { next_probe });
    }

    fn hold(&mut self, now: Instant) -> Duration {
        self.pauses = self.pauses.saturating_add(1);
        let (first, longest) = self.settings.probes;
        let pause = self.spread(first, longest, self.pauses);
        self.on_trial.clear();
        self.holding_since.get_or_insert(now);
        self.state = State::Open {
            probe_at: later(now, pause),
        };
        pause
    }

    fn close(&mut self, now: Instant) {
        self.state = State::Closed;
        self.on_trial.clear();
        self.past = Default::default();
        self.current = Slot::default();
        (self.in_a_row, self.pauses) = (0, 0);
        let opened_at = self.opened_at.take().unwrap_or(now);
        self.changes.push_back(BreakerChange::Closed {
            after: now.saturating_duration_since(opened_at),
        });
    }

    /// How long a record waits that has met so many outages in a row.
    pub(crate) fn record_wait(&mut self, outages: u32) -> Duration {
        let (first, longest) = self.settings.waits;
        self.spread(first, longest, outages)
    }

    fn spread(&mut self, first: Duration, longest: Duration, times: u32) -> Duration {
        let waits = Retry::exponential(first, longest).unlimited_attempts();
        waits
            .next(times, Duration::ZERO, splitmix(&mut self.random))
            .expect("without limits there is always a next time")
    }

    /// A record is handed over.
    pub(crate) fn began(&mut self, owner: Ownership, seq: u64, now: Instant) {
        if let State::Closed = self.state {
            return;
        }
        self.on_trial.insert((owner, seq));
        if let State::Probing { awaited } = &mut self.state {
            *awaited = Some((owner, seq, later(now, self.settings.probes.1)));
        }
    }

    /// A record that was handed over came back untouched.
    pub(crate) fn not_begun(&mut self, owner: Ownership, seq: u64) {
        if self.on_trial.remove(&(owner, seq)) {
            self.trial_is_void(|of, it| (of, it) == (owner, seq));
        }
    }

    /// Nothing will be heard of this ownership any more.
    pub(crate) fn forget(&mut self, owner: Ownership) {
        self.on_trial.retain(|(of, _)| *of != owner);
        self.trial_is_void(|of, _| of == owner);
    }

    fn trial_is_void(&mut self, which: impl Fn(Ownership, u64) -> bool) {
        if let State::Probing { awaited } = &mut self.state {
            *awaited = awaited.filter(|(owner, seq, _)| !which(*owner, *seq));
        }
    }

    /// Tells the time.
    #[inline]
    pub(crate) fn advance(&mut self, now: Instant) {
        if now >= self.current_ends {
            self.move_window(now);
        }
        match &mut self.state {
            State::Closed => {}
            State::Open { probe_at } if now >= *probe_at => {
                self.state = State::Probing { awaited: None };
            }
            State::Probing { awaited } => *awaited = awaited.filter(|(.., at)| now < *at),
            State::Opening { until, .. } if now >= *until => self.close(now),
            _ => {}
        }
    }

    #[cold]
    fn move_window(&mut self, now: Instant) {
        let length = slot_length(&self.settings);
        for _ in 0..SLOTS {
            if now < self.current_ends {
                return;
            }
            self.past[self.next_past] = std::mem::take(&mut self.current);
            self.next_past = (self.next_past + 1) % self.past.len();
            self.current_ends = later(self.current_ends, length);
        }
        // Longer than the window without a look: it is empty now.
        if now >= self.current_ends {
            self.current_ends = later(now, length);
        }
    }

    pub(crate) fn next_wake(&self) -> Option<Instant> {
        match self.state {
            State::Closed => None,
            State::Open { probe_at } => Some(probe_at),
            State::Probing { awaited } => awaited.map(|(.., at)| at),
            State::Opening { until, .. } => Some(until),
        }
    }

    /// How many more turns may go out, of one record each; `None`: as many as you like, as long as you like.
    #[inline]
    pub(crate) fn room(&self) -> Option<usize> {
        match self.state {
            State::Closed => None,
            State::Open { .. } => Some(0),
            State::Probing { awaited } => Some(usize::from(awaited.is_none())),
            State::Opening { allowed, .. } => Some(allowed.saturating_sub(self.on_trial.len())),
        }
    }

    /// Whether nothing goes on but probes.
    #[inline]
    pub(crate) fn holds(&self) -> bool {
        matches!(self.state, State::Open { .. } | State::Probing { .. })
    }

    /// A clock that stands still while the breaker holds.
    pub(crate) fn clock(&self, now: Instant) -> Instant {
        let holding = self
            .holding_since
            .map(|since| now.saturating_duration_since(since));
        let held = self.held + holding.unwrap_or_default();
        now.checked_sub(held).unwrap_or(now)
    }

    pub(crate) fn state(&self) -> BreakerState {
        match self.state {
            State::Closed => BreakerState::Closed,
            State::Open { .. } => BreakerState::Open,
            State::Probing { .. } => BreakerState::HalfOpen,
            State::Opening { .. } => BreakerState::Opening,
        }
    }

    /// Since when it is not closed.
    pub(crate) fn opened_at(&self) -> Option<Instant> {
        self.opened_at
    }

    pub(crate) fn probe_at(&self) -> Option<Instant> {
        match self.state {
            State::Open { probe_at } => Some(probe_at),
            _ => None,
        }
    }

    pub(crate) fn next_change(&mut self) -> Option<BreakerChange> {
        self.changes.pop_front()
    }
}

fn slot_length(settings: &OutageBreaker) -> Duration {
    (settings.window / SLOTS as u32).max(Duration::from_millis(1))
}
