//! Records that are not going to be tried again here: to a retry topic, to the dead-letter topic, or what the user chose
//! instead.

use std::{
    sync::Arc,
    time::{Instant, SystemTime},
};

use tracing::field::display;

use super::{client::generate_token, producer::AckedProducer, pump::Pump};
use crate::{
    consumer::{Exhausted, RunErrorKind},
    dead_letter::{Failure, FailureKind, Manner, Publisher},
    engine::{GivenUp, Outcome},
    execute::{Cause, Report},
    origin::Origin,
    record::Record,
    retry_topics::{Tier, unix_millis},
};

/// Where a record goes that was given up.
enum Destination {
    Retry(Arc<Tier>),
    DeadLetters(Arc<str>),
    Nowhere,
}

impl Pump {
    pub(super) fn give_up(&mut self) -> bool {
        let mut any = false;
        while let Some(given_up) = self.next_given_up() {
            any = true;
            match self.destination(&given_up) {
                Destination::Nowhere => self.do_without(given_up),
                destination => self.set_aside(destination, given_up),
            }
        }
        any
    }

    fn destination(&self, given_up: &GivenUp<Record, Cause>) -> Destination {
        let tiers = &self.settings.retry_topics;
        let Cause {
            kind,
            dead_letter_topic: wanted,
            ..
        } = &given_up.cause;
        let tier = match kind {
            FailureKind::AttemptsExhausted | FailureKind::Timeout | FailureKind::Panic => {
                tiers.after(given_up.record.topic())
            }
            FailureKind::KeyHeld => wanted.as_ref().and_then(|topic| tiers.get(topic)),
            _ => None,
        };
        match tier {
            Some(tier) => Destination::Retry(Arc::clone(tier)),
            None => self
                .dead_letter_topic(given_up)
                .map_or(Destination::Nowhere, Destination::DeadLetters),
        }
    }

    fn next_given_up(&mut self) -> Option<GivenUp<Record, Cause>> {
        let Some(crashed) = self.engine.next_crashed() else {
            return self.engine.next_given_up();
        };
        let message = match crashed.deaths {
            1 => "the process died while this record ran alone".into(),
            deaths => format!("the process died {deaths} times while this record ran alone"),
        };
        Some(GivenUp {
            owner: crashed.owner,
            seq: crashed.seq,
            lane: crashed.lane,
            record: crashed.record,
            attempts: crashed.deaths,
            cause: Cause {
                kind: FailureKind::Crashed,
                message,
                dead_letter_topic: None,
            },
        })
    }

    /// Where this record goes: where the classifier wants it, or else to the consumer's own dead-letter topic.
    fn dead_letter_topic(&self, given_up: &GivenUp<Record, Cause>) -> Option<Arc<str>> {
        let own = self
            .settings
            .dead_letter
            .as_ref()
            .map(|dead_letter| Arc::from(&*dead_letter.topic));
        let wanted = given_up.cause.dead_letter_topic.clone();
        if let Some(topic) = &wanted
            && (self.settings.subscription.takes_in(topic)
                || self.settings.retry_topics.get(topic).is_some())
        {
            tracing::error!(
                dead_letter_topic = %topic,
                "the classifier names a dead-letter topic that is consumed: the dead letter would come back at once; the \
                 consumer's own dead-letter topic is used instead"
            );
            return own;
        }
        wanted.or(own)
    }

    /// Calls of the handler, with those before the record came to a retry topic.
    fn attempts_in_all(&self, record: &Record, attempts: u32, kind: FailureKind) -> u32 {
        let called = match kind {
            // What never reached the handler the last time.
            FailureKind::Undecodable
            | FailureKind::Untrusted
            | FailureKind::KeyHeld
            | FailureKind::IdConflict => attempts - 1,
            _ => attempts,
        };
        let tier = self.settings.retry_topics.get(record.topic());
        called.saturating_add(tier.map_or(0, |_| Tier::attempts_before(record)))
    }

    fn do_without(&mut self, given_up: GivenUp<Record, Cause>) {
        let GivenUp {
            owner,
            seq,
            lane,
            record,
            attempts,
            cause,
        } = given_up;
        let attempts = self.attempts_in_all(&record, attempts, cause.kind);
        match self.settings.exhausted {
            Exhausted::Skip => {
                tracing::error!(
                    topic = %record.topic(),
                    partition = record.partition(),
                    offset = record.offset(),
                    attempts,
                    kind = cause.kind.as_str(),
                    error = %cause.message,
                    "a record is passed over for good: configure a dead-letter topic to keep such records"
                );
                self.engine.settle(owner, seq, lane, Outcome::Dropped);
            }
            Exhausted::Stop => {
                let message = format!(
                    "record {}/{}/{} failed for good after {attempts} attempts ({}: {}), and there is no dead-letter \
                     topic: configure one, or choose Exhausted::Skip",
                    record.topic(),
                    record.partition(),
                    record.offset(),
                    cause.kind.as_str(),
                    cause.message
                );
                self.engine.abandon(owner);
                self.fail(RunErrorKind::RecordFailed, message);
            }
        }
    }

    fn set_aside(&mut self, destination: Destination, given_up: GivenUp<Record, Cause>) {
        let Some(publisher) = self.publisher() else {
            return self.engine.abandon(given_up.owner);
        };
        let GivenUp {
            owner,
            seq,
            lane,
            record,
            attempts,
            cause,
        } = given_up;
        let failed_at_ms = unix_millis(SystemTime::now());
        let attempts = self.attempts_in_all(&record, attempts, cause.kind);
        let tier = self.settings.retry_topics.get(record.topic());
        let passed = tier.map_or(0, |tier| tier.number);
        let (topic, onward) = match destination {
            Destination::Retry(next) => (Arc::clone(&next.topic), Some(next)),
            Destination::DeadLetters(topic) => (topic, None),
            Destination::Nowhere => return self.engine.abandon(owner),
        };
        if let Some(held) = &self.context.held_keys {
            let (in_tier, moves) = (tier.is_some(), onward.is_some());
            held.set_aside(&record, in_tier, &topic, moves, Instant::now());
        }
        let failure = Failure {
            kind: cause.kind,
            message: cause.message,
            attempts,
            failed_at_ms,
            retry_tier: onward.as_ref().map_or(passed, |next| next.number),
            due_at_ms: onward.as_ref().map(|next| next.due_at(failed_at_ms)),
        };
        let reports = self.send_report.clone();
        let error_message = self.settings.error_message();
        let from_tier = tier.is_some();
        let task = self.runtime.spawn(async move {
            let error = || error_message.apply(&failure.message).map(display);
            // In a retry topic it has another place than it had first.
            let origin = || from_tier.then(|| display(Origin::of(&record).to_string()));
            let at = match publisher.publish(&topic, &record, &failure).await {
                Ok(at) => at,
                Err(unwritten) => {
                    let message = unwritten.to_string();
                    reports.send(Report::Unwritten { owner, message });
                    return;
                }
            };
            if let Some(due_at_ms) = failure.due_at_ms {
                tracing::info!(
                    topic = %record.topic(),
                    partition = record.partition(),
                    offset = record.offset(),
                    origin = origin(),
                    attempts = failure.attempts,
                    error = error(),
                    retry_topic = %topic,
                    due_at_ms,
                    spooled = at.is_none(),
                    "moved to a retry topic"
                );
                let outcome = Outcome::Moved;
                return reports.send(Report::SetAside {
                    owner,
                    seq,
                    lane,
                    outcome,
                });
            }
            tracing::info!(
                topic = %record.topic(),
                partition = record.partition(),
                offset = record.offset(),
                origin = origin(),
                kind = failure.kind.as_str(),
                attempts = failure.attempts,
                error = error(),
                dead_letter_topic = %topic,
                dead_letter_partition = at.map(|at| at.partition),
                dead_letter_offset = at.map(|at| at.offset),
                spooled = at.is_none(),
                "dead-lettered"
            );
            let outcome = Outcome::DeadLettered;
            reports.send(Report::SetAside {
                owner,
                seq,
                lane,
                outcome,
            });
        });
        self.dead_letters.push((owner, task));
    }

    /// The producer comes into being with the first dead letter: most consumers never need its connections.
    pub(super) fn publisher(&mut self) -> Option<Arc<Publisher>> {
        if self.publisher.is_none() {
            let tokens = self.settings.oauth.clone().map(|provider| {
                let tokens = move |_: Option<&str>| generate_token(Some(&provider));
                Arc::new(tokens) as super::producer::TokenSource
            });
            match AckedProducer::new(self.settings.producer.clone(), tokens) {
                Ok(producer) => {
                    let mut manner = Manner {
                        group: self.settings.group.to_string(),
                        ..Manner::default()
                    };
                    manner.error_message = self.settings.error_message();
                    if let Some(dead_letter) = &self.settings.dead_letter {
                        manner.dialect = dead_letter.dialect;
                    }
                    let mut publisher = Publisher::new(Arc::new(producer), manner);
                    let spooling = self.start_spooling();
                    if let Some(dead_letter) = &self.settings.dead_letter {
                        publisher = publisher.when_unavailable(&dead_letter.unavailable, spooling);
                    }
                    self.publisher = Some(Arc::new(publisher));
                }
                Err(error) => self.fail(
                    RunErrorKind::Client,
                    format!("dead letters cannot be sent: {error}"),
                ),
            }
        }
        self.publisher.clone()
    }
}
