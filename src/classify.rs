//! What errors mean for records, decided in one place rather than in every handler.

use std::{error::Error, io, sync::Arc, time::Duration};

use crate::{Disposition, Record, Retry, shown::DEEPEST};

/// Any error, behind a reference. Short for the arguments of a [`Classifier`].
pub type DynError = dyn Error + Send + Sync;

/// Decides by an error and its record what happens next.
///
/// It is asked about errors that the handler did not dispose of itself, those that `?` converts; what a handler says by
/// [`permanent`](crate::permanent), [`retry_after`](crate::retry_after), [`skip`](crate::skip) or
/// [`HandlerError::retry`](crate::HandlerError::retry) is final. It is called after each such failed attempt, and must
/// not block. Closures `Fn(&DynError, &Record) -> Classification` are classifiers:
///
/// ```
/// use std::{io, num::ParseIntError, time::Duration};
/// use reliable_consumer::{Classification, DynError, Record, Retry, find_error};
///
/// let classifier = |error: &DynError, _: &Record| {
///     if find_error::<ParseIntError>(error).is_some() {
///         Classification::permanent().dead_letter_topic("malformed")
///     } else if find_error::<io::Error>(error).is_some() {
///         let calmly = Retry::exponential(Duration::from_secs(1), Duration::from_secs(60));
///         Classification::retry().backoff(calmly).max_attempts(100)
///     } else {
///         Classification::default_policy()
///     }
/// };
/// # fn check(_: impl reliable_consumer::Classifier) {}
/// # check(classifier);
/// ```
pub trait Classifier: Send + Sync + 'static {
    /// Decides what happens to `record` after a handler failed with `error`.
    fn classify(&self, error: &DynError, record: &Record) -> Classification;
}

impl<F> Classifier for F
where
    F: Fn(&DynError, &Record) -> Classification + Send + Sync + 'static,
{
    fn classify(&self, error: &DynError, record: &Record) -> Classification {
        self(error, record)
    }
}

/// What a [`Classifier`] decided. What it leaves open is as the consumer is configured.
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct Classification {
    disposition: Disposition,
    backoff: Option<Retry>,
    max_attempts: Option<u32>,
    dead_letter_topic: Option<Arc<str>>,
}

impl Classification {
    /// The record is retried by the consumer's retry policy, as without a classifier.
    pub fn default_policy() -> Self {
        Self::retry()
    }

    /// The record is retried, by the consumer's retry policy unless [`backoff`](Self::backoff) or
    /// [`max_attempts`](Self::max_attempts) follow.
    pub fn retry() -> Self {
        Self::with(Disposition::Retry)
    }

    /// The record is retried after `wait` instead of the policy's delay. The attempt counts.
    pub fn retry_after(wait: Duration) -> Self {
        Self::with(Disposition::RetryAfter(wait))
    }

    /// The record is handled again after `wait`, and nothing counts against it, see
    /// [`Disposition::Postpone`].
    pub fn postpone(wait: Duration) -> Self {
        Self::with(Disposition::Postpone(wait))
    }

    /// What the handler depends on is down, see [`Disposition::Outage`]. Name those errors that any record would have
    /// met, such as a refused connection; one that a single record can cause would keep that record for ever.
    ///
    /// ```
    /// use std::io::{self, ErrorKind};
    /// use reliable_consumer::{Classification, DynError, Record, find_error};
    ///
    /// let classifier = |error: &DynError, _: &Record| match find_error::<io::Error>(error) {
    ///     Some(error) if error.kind() == ErrorKind::ConnectionRefused => Classification::outage(),
    ///     _ => Classification::default_policy(),
    /// };
    /// # fn check(_: impl reliable_consumer::Classifier) {}
    /// # check(classifier);
    /// ```
    pub fn outage() -> Self {
        Self::with(Disposition::Outage)
    }

    /// The record is dead-lettered at once.
    pub fn permanent() -> Self {
        Self::with(Disposition::Permanent)
    }

    /// The record is finished without being handled, and counted as skipped.
    pub fn skip() -> Self {
        Self::with(Disposition::Skip)
    }

    /// Retries by this policy instead of the consumer's, its maximum of attempts included. Attempts made before, under
    /// another policy, count.
    pub fn backoff(mut self, policy: Retry) -> Self {
        self.backoff = Some(policy);
        self
    }

    /// Handler calls in all before the record is dead-lettered, whatever the policy says; 0 is taken for 1.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = Some(attempts);
        self
    }

    /// The topic for the record's dead letter, now or when attempts are exhausted, instead of the configured one.
    pub fn dead_letter_topic(mut self, topic: impl Into<String>) -> Self {
        self.dead_letter_topic = Some(topic.into().into());
        self
    }

    pub(crate) fn disposition(&self) -> Disposition {
        self.disposition
    }

    /// The policy that holds for this error where `configured` is the consumer's; `None` if it is that one unchanged.
    pub(crate) fn policy(&self, configured: &Retry) -> Option<Retry> {
        match (&self.backoff, self.max_attempts) {
            (backoff, Some(attempts)) => {
                let policy = backoff.as_ref().unwrap_or(configured).clone();
                Some(policy.max_attempts(attempts))
            }
            (backoff, None) => backoff.clone(),
        }
    }

    pub(crate) fn topic(&self) -> Option<&Arc<str>> {
        self.dead_letter_topic.as_ref()
    }

    fn with(disposition: Disposition) -> Self {
        Self {
            disposition,
            backoff: None,
            max_attempts: None,
            dead_letter_topic: None,
        }
    }
}

/// [`Classification::default_policy`].
impl Default for Classification {
    fn default() -> Self {
        Self::default_policy()
    }
}

/// Looks for an error of type `T`: the error itself, else the nearest of its causes.
///
/// An error wrapped by [`io::Error::other`] is found too, although it is not among the causes that
/// [`source`](Error::source) gives. No more than 128 causes are looked at: an error may be its own.
pub fn find_error<'a, T: Error + 'static>(error: &'a (dyn Error + 'static)) -> Option<&'a T> {
    let mut next = Some(error);
    for _ in 0..DEEPEST {
        let error = next?;
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        next = match error.downcast_ref().and_then(io::Error::get_ref) {
            Some(wrapped) => Some(wrapped),
            None => error.source(),
        };
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HandlerError, Message};

    #[derive(Debug, thiserror::Error)]
    #[error("step failed")]
    struct Step(#[source] io::Error);

    #[derive(Debug, thiserror::Error)]
    #[error("root")]
    struct Root;

    #[test]
    fn an_error_is_found_by_type_however_deep() {
        let error = HandlerError::from(Step(io::Error::other(Root)));
        assert!(find_error::<Step>(error.source()).is_some());
        assert!(find_error::<io::Error>(error.source()).is_some());
        assert!(find_error::<Root>(error.source()).is_some());
        assert!(find_error::<std::fmt::Error>(error.source()).is_none());
    }

    #[test]
    fn an_error_that_is_its_own_source_is_looked_through_and_not_for_ever() {
        #[derive(Debug)]
        struct Own;

        impl std::fmt::Display for Own {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("round")
            }
        }

        impl Error for Own {
            fn source(&self) -> Option<&(dyn Error + 'static)> {
                Some(self)
            }
        }

        assert!(find_error::<Own>(&Own).is_some());
        assert!(find_error::<Root>(&Own).is_none());
    }

    #[test]
    fn a_closure_classifies_by_error_and_record() {
        let by_topic = |error: &DynError, record: &Record| {
            if error.is::<Root>() && record.topic() == "audit" {
                Classification::permanent()
            } else {
                Classification::default_policy()
            }
        };
        let classify = |topic| {
            let record = Message::builder().topic(topic).record();
            by_topic.classify(HandlerError::from(Root).source(), &record)
        };
        assert_eq!(classify("audit").disposition(), Disposition::Permanent);
        assert_eq!(classify("orders").disposition(), Disposition::Retry);
    }

    #[test]
    fn what_is_left_open_is_as_configured() {
        let second = Duration::from_secs(1);
        let (configured, own) = (Retry::default(), Retry::fixed(second).max_attempts(9));
        let retry = Classification::retry;
        assert_eq!(retry().policy(&configured), None);
        assert_eq!(
            retry().backoff(own.clone()).policy(&configured),
            Some(own.clone())
        );
        assert_eq!(
            retry().max_attempts(2).policy(&configured),
            Some(configured.clone().max_attempts(2))
        );
        for both in [
            retry().backoff(own.clone()).max_attempts(2),
            retry().max_attempts(2).backoff(own.clone()),
        ] {
            assert_eq!(both.policy(&configured), Some(own.clone().max_attempts(2)));
        }
    }
}
