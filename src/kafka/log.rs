//! What librdkafka has to say, as `tracing` events that an outage cannot turn into a flood.

use std::mem;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::KafkaError;

/// Lets a few events through per interval, one by default, and counts the others.
#[derive(Debug)]
pub(crate) struct Throttle {
    events: u32,
    interval: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// When the current interval began, and how many were let through in it.
    current: Option<(Instant, u32)>,
    held_back: u64,
}

impl Default for Throttle {
    fn default() -> Self {
        Self::of(1, Self::INTERVAL)
    }
}

impl Throttle {
    /// Long enough to keep a log readable through an outage, short enough to show that it still lasts.
    pub(crate) const INTERVAL: Duration = Duration::from_secs(10);

    /// Lets so many through in an interval, which begins with the first of them.
    pub(crate) fn of(events: u32, interval: Duration) -> Self {
        Self {
            events,
            interval,
            state: Mutex::default(),
        }
    }

    /// How many events were held back since the last one let through, or `None` to hold this one back too.
    pub(crate) fn admit(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let within = |since: Instant| now.saturating_duration_since(since) < self.interval;
        let current = state.current.filter(|(since, _)| within(*since));
        let (since, let_through) = current.unwrap_or((now, 0));
        if let_through == self.events {
            state.held_back += 1;
            return None;
        }
        state.current = Some((since, let_through + 1));
        Some(mem::take(&mut state.held_back))
    }
}

/// The client-wide events of one client.
#[derive(Debug, Default)]
pub(crate) struct ClientLog {
    errors: Throttle,
    lines: Throttle,
}

impl ClientLog {
    /// For `ClientContext::error`. Clients recover from these by themselves, so none is more than a warning.
    pub(crate) fn error(&self, error: &KafkaError, reason: &str) {
        if let Some(held_back) = self.errors.admit(Instant::now()) {
            tracing::warn!(target: "reliable_consumer::kafka", %error, reason, held_back, "librdkafka reports an error");
        }
    }

    /// For `ClientContext::log`. What the property `debug` asked for is passed on in full.
    pub(crate) fn line(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        use RDKafkaLogLevel::{Debug, Info, Notice};
        match level {
            Debug => tracing::debug!(target: "librdkafka", facility, "{line}"),
            Info | Notice => tracing::info!(target: "librdkafka", facility, "{line}"),
            _ => {
                if let Some(held_back) = self.lines.admit(Instant::now()) {
                    tracing::warn!(target: "librdkafka", facility, held_back, "{line}");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_event_passes_per_interval_and_tells_how_many_did_not() {
        let throttle = Throttle::default();
        let start = Instant::now();
        assert_eq!(throttle.admit(start), Some(0));
        assert_eq!(throttle.admit(start + Throttle::INTERVAL / 2), None);
        assert_eq!(throttle.admit(start + Throttle::INTERVAL / 2), None);
        assert_eq!(throttle.admit(start + Throttle::INTERVAL), Some(2));
        assert_eq!(throttle.admit(start + Throttle::INTERVAL * 3), Some(0));
    }
}
