//! What follows when the outage breaker opens and closes: work that has not started is called back, and others are told.

use std::time::Instant;

use super::pump::Pump;
use crate::{
    consumer::{BreakerStatus, Event},
    engine::{AfterFailure, BreakerChange, Failed},
    execute::Cause,
    record::Record,
};

impl Pump {
    pub(super) fn follow_breaker(&mut self) {
        while let Some(change) = self.engine.next_breaker_change() {
            let group = &self.settings.group;
            match change {
                BreakerChange::Opened {
                    outages,
                    attempts,
                    next_probe,
                } => {
                    tracing::warn!(
                        %group,
                        outages,
                        attempts,
                        next_probe_ms = next_probe.as_millis() as u64,
                        "a dependency of the handlers is down: nothing is handled until a probe succeeds"
                    );
                    self.tell(Event::BreakerOpened {
                        outages,
                        attempts,
                        next_probe,
                    });
                    self.recall();
                }
                BreakerChange::StillDown { next_probe } => {
                    self.tell(Event::BreakerProbeFailed { next_probe });
                    self.recall();
                }
                BreakerChange::Answers => {
                    tracing::info!(%group, "the dependency answers a probe: handling goes on, step by step");
                    self.tell(Event::BreakerOpening);
                }
                BreakerChange::Closed { after } => {
                    tracing::info!(%group, after_ms = after.as_millis() as u64, "the outage is over");
                    self.tell(Event::BreakerClosed { after });
                }
            }
        }
    }

    /// Executors have a stock, each record of which would be thrown at what is down. What is called back is sorted again.
    pub(super) fn recall(&mut self) {
        self.context.recall.call();
        self.context.fence_closed();
        self.take_back();
    }

    /// Says what is down, also where the breaker never opens; not once a record.
    pub(super) fn note_outage(&self, failed: &Failed<Record, Cause>) {
        if let AfterFailure::Outage = failed.then
            && let Some(held_back) = self.dependency_down.admit(Instant::now())
        {
            let record = &failed.job.record;
            tracing::warn!(
                topic = %record.topic(),
                partition = record.partition(),
                offset = record.offset(),
                error = self.context.error_message.apply(&failed.cause.message).map(display),
                held_back,
                "an attempt met an outage: its record is tried again, and nothing counts against it"
            );
        }
    }

    pub(super) fn breaker_status(&self, now: Instant) -> BreakerStatus {
        let breaker = self.engine.breaker();
        BreakerStatus {
            state: breaker.state(),
            open_for: breaker
                .opened_at()
                .map(|at| now.saturating_duration_since(at)),
            next_probe: breaker
                .probe_at()
                .map(|at| at.saturating_duration_since(now)),
        }
    }
}
