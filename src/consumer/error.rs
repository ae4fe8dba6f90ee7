//! Why a consumer could not be built, or ended.

use std::fmt;

use crate::kafka::PropertyError;

use super::Report;

/// Why [`Builder::build`](super::Builder::build) refused. `Debug` shows the message, too: it is what a `main` prints that
/// returns the error.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// A setting that has no default was left out.
    #[error("{what} is missing: call `{call}` on the builder")]
    Missing {
        /// What is needed.
        what: &'static str,
        /// The builder's method that sets it.
        call: &'static str,
    },
    /// A setting has a value that cannot work.
    #[error("{what} cannot be {value}: {reason}")]
    Invalid {
        /// The setting.
        what: &'static str,
        /// What it was set to.
        value: String,
        /// Why that cannot work, and what can.
        reason: String,
    },
    /// A librdkafka property is refused or does not exist.
    #[error(transparent)]
    Property(#[from] PropertyError),
    /// The dead-letter topic is one of those that are consumed: each dead letter would come back at once, for ever.
    #[error(
        "dead-letter topic `{topic}` is also consumed (by `{subscription}`): choose another name or subscription"
    )]
    DeadLetterTopicConsumed {
        /// The dead-letter topic.
        topic: String,
        /// The topic name or pattern that takes it in.
        subscription: String,
    },
    /// A retry topic has the name of another topic that is used, or a name that cannot be.
    #[error("retry topic `{topic}` {reason}: choose other delays or topics")]
    RetryTopicName {
        /// The retry topic.
        topic: String,
        /// What is wrong with its name.
        reason: String,
    },
    /// Retry topics would break the order that was asked for.
    #[error(
        "retry topics give up the order by {ordering}: later records are handled before one that waits in them. Let \
         records wait in place with a longer `retry`, choose `Ordering::Unordered`, or allow it by \
         `RetryTopics::reorder(true)`"
    )]
    RetryTopicsReorder {
        /// The order that was asked for.
        ordering: &'static str,
    },
    /// The pattern is not a regular expression.
    #[error("topic pattern `{pattern}` is not a regular expression: {reason}")]
    Pattern {
        /// The pattern as given.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },
    /// librdkafka could not create a client from these properties.
    #[error("librdkafka refused to create a client: {reason}")]
    Client {
        /// librdkafka's own words.
        reason: String,
    },
}

/// What kind of trouble ended a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunErrorKind {
    /// The cluster does not let us in or lacks a permission for us, or TLS does not vouch for its brokers.
    ///
    /// A login that is refused after the cluster has once answered is tried again instead: brokers are replaced, and
    /// their certificates and credentials with them.
    Authorization,
    /// Another process holds the same `group.instance.id`.
    Fenced,
    /// The group does not take this consumer as a member, and waiting would not change that: a session timeout outside
    /// the brokers' limits, a protocol or an assignor that they or the other members do not have, a full group.
    CannotJoin,
    /// A record used up its attempts, there is no dead-letter topic, and the consumer is told to stop then.
    RecordFailed,
    /// A dead letter could not be written for as long as [`Unavailable::Stop`](crate::Unavailable::Stop) allows.
    DeadLetterUnavailable,
    /// The idempotency store could not be used for as long as
    /// [`Unreachable::Stop`](crate::idempotency::Unreachable::Stop) allows.
    IdempotencyStoreUnavailable,
    /// The idempotency store's server may forget or lose ids, and
    /// [`UnsafeServer::Refuse`](crate::idempotency::UnsafeServer::Refuse) was chosen.
    IdempotencyStoreUnsafe,
    /// The group has no committed offset and the start policy is to refuse.
    NoCommittedOffset,
    /// The position is not in the log any more, and [`OutOfRange::EndRun`](super::OutOfRange::EndRun) was chosen.
    OffsetOutOfRange,
    /// The subscription gave us our own dead-letter topic.
    DeadLetterTopicConsumed,
    /// There is no handler for a topic that was assigned.
    NoHandler,
    /// librdkafka gave up, or could not create the client.
    Client,
    /// The runtime that executes the handlers was shut down under the consumer.
    RuntimeGone,
}

/// Why a run ended by itself. What had been handled up to then was committed as far as the brokers let us; see
/// [`report`](Self::report).
#[derive(thiserror::Error)]
#[error("{message}")]
pub struct RunError {
    kind: RunErrorKind,
    message: String,
    report: Box<Report>,
}

impl RunError {
    pub(crate) fn new(kind: RunErrorKind, message: String, report: Report) -> Self {
        Self {
            kind,
            message,
            report: Box::new(report),
        }
    }

    /// What kind of trouble it was.
    pub fn kind(&self) -> RunErrorKind {
        self.kind
    }

    /// What had been done by then, and what was left.
    pub fn report(&self) -> &Report {
        &self.report
    }
}

/// As `Display`: a `main` that returns the error prints this.
impl fmt::Debug for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Debug for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Why a [`ConsumerHandle`](super::ConsumerHandle) got no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandleError {
    /// The run has not begun: [`Run`](super::Run) is not awaited yet.
    #[error("the consumer is not running yet: await its run first")]
    NotStarted,
    /// The consumer does not read that topic, and never will.
    #[error("the consumer does not read topic `{topic}`: it reads {subscribed}")]
    NotSubscribed {
        /// The topic that was named.
        topic: String,
        /// The topics and the pattern of the subscription, and the retry topics.
        subscribed: String,
    },
    /// The run has ended.
    #[error("the consumer is not running any more")]
    NotRunning,
    /// It did not answer in time.
    #[error(
        "the consumer did not answer within {0:?}: its process has no processor time, or is being ended"
    )]
    TimedOut(std::time::Duration),
    /// The partition is not stopped, or not in this process.
    #[error(
        "the partition is not stopped here: ask `status` of each member of the group which one has it"
    )]
    NotStopped,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_main_prints_of_an_error_is_its_message() {
        let build = BuildError::Missing {
            what: "the group",
            call: "group_id",
        };
        let run = RunError::new(RunErrorKind::Client, "no client".into(), Report::default());
        assert_eq!(
            format!("{build:?}"),
            "the group is missing: call `group_id` on the builder"
        );
        assert_eq!(format!("{run:?}"), "no client");
    }
}
