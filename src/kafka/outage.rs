//! Outages: no broker can be reached. They begin with an error, and end with an answer: an absence of errors proves
//! nothing, as librdkafka tries again as seldom as `reconnect.backoff.max.ms` lets it.

use std::time::{Duration, Instant};

use tokio::sync::oneshot::{self, error::TryRecvError};

use super::pump::Pump;
use crate::consumer::Event;

/// How long a broker has to answer when it is asked whether it is there. The client's end waits for that.
const ANSWER: Duration = Duration::from_millis(500);

/// No broker can be reached.
pub(super) struct Outage {
    pub(super) since: Instant,
    /// Whether any broker answers, while that is being asked.
    asked: Option<oneshot::Receiver<bool>>,
    /// An error came since that was asked: the broker that answers may be gone.
    doubted: bool,
}

impl Pump {
    /// The client cannot reach any broker.
    pub(super) fn brokers_are_down(&mut self, now: Instant) {
        match &mut self.outage {
            Some(outage) => outage.doubted = true,
            None => {
                self.outage = Some(Outage {
                    since: now,
                    asked: None,
                    doubted: false,
                });
                self.tell(Event::BrokersDown);
            }
        }
    }

    /// A broker has answered.
    pub(super) fn brokers_answer(&mut self) {
        if let Some(outage) = self.outage.take() {
            self.tell(Event::BrokersUp(outage.since.elapsed()));
        }
    }

    /// During an outage, asks any broker for an answer, again and again: a consumer with nothing to read or commit learns
    /// in no other way that it is over. The question waits in librdkafka, which is no place for this thread to be.
    pub(super) fn ask_for_brokers(&mut self) {
        let stopping = self.is_stopping();
        let Some(outage) = &mut self.outage else {
            return;
        };
        if let Some(asked) = &mut outage.asked {
            let answered = match asked.try_recv() {
                Ok(answered) => answered,
                Err(TryRecvError::Empty) => return,
                // The runtime is shut down.
                Err(TryRecvError::Closed) => false,
            };
            outage.asked = None;
            if answered && !outage.doubted {
                return self.brokers_answer();
            }
        }
        if !stopping {
            let lifeline = self.lifeline.clone();
            let (answer, asked) = oneshot::channel();
            outage.asked = Some(asked);
            outage.doubted = false;
            self.runtime
                .spawn_blocking(move || answer.send(lifeline.any_broker_answers(ANSWER)));
        }
    }
}
