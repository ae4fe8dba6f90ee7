//! What the builder has put together, checked.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use rdkafka::ClientConfig;
use regex_lite::Regex;

use super::RebalanceListener;
use crate::{
    classify::Classifier, dead_letter::DeadLetter, engine, execute::Filter,
    kafka::OAuthTokenProvider,
};

/// Topics by name, or all that match a pattern.
#[derive(Debug, Clone)]
pub(crate) struct Subscription {
    pub(crate) topics: Vec<String>,
    /// As librdkafka takes it: starting with `^`.
    pub(crate) pattern: Option<Regex>,
}

impl Subscription {
    /// What librdkafka subscribes to.
    pub(crate) fn names(&self) -> Vec<&str> {
        let pattern = self.pattern.as_ref().map(Regex::as_str);
        self.topics
            .iter()
            .map(String::as_str)
            .chain(pattern)
            .collect()
    }

    /// The topic name or pattern by which this topic is consumed.
    pub(crate) fn taken_in_by(&self, topic: &str) -> Option<&str> {
        let named = self.topics.iter().find(|name| *name == topic);
        let matched = || {
            self.pattern
                .as_ref()
                .filter(|pattern| pattern.is_match(topic))
                .map(Regex::as_str)
        };
        named.map(String::as_str).or_else(matched)
    }

    pub(crate) fn takes_in(&self, topic: &str) -> bool {
        self.taken_in_by(topic).is_some()
    }
}

/// Where a group begins in a partition for which it has committed nothing yet.
///
/// That is a new group, a group that was empty for longer than the brokers' `offsets.retention.minutes`, and a partition
/// that was added to a topic later. `auto.offset.reset` is not used: it would also move a group whose committed offset
/// has been deleted, silently. That ends the run instead, with
/// [`RunErrorKind::OffsetOutOfRange`](crate::RunErrorKind::OffsetOutOfRange).
///
/// ```
/// use std::time::{Duration, SystemTime};
/// use reliable_consumer::{ReliableConsumer, StartPolicy};
///
/// let yesterday = SystemTime::now() - Duration::from_secs(24 * 3600);
/// let builder = ReliableConsumer::builder().start(StartPolicy::Time(yesterday));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum StartPolicy {
    /// At the oldest record there is: nothing is missed. The default.
    #[default]
    Earliest,
    /// At the end: only what is produced from now on. In a partition that is added later, records from before it was
    /// noticed are passed over.
    Latest,
    /// At the first record with this timestamp or a later one; at the end if there is none.
    Time(SystemTime),
    /// Nowhere: the run ends with an error. For groups whose offsets must exist.
    Refuse,
}

/// What becomes of a record that is not going to be tried again, when there is no dead-letter topic.
///
/// ```
/// use reliable_consumer::{Exhausted, ReliableConsumer};
///
/// // A cache that is refreshed anyway: better stale in places than standing still.
/// let builder = ReliableConsumer::builder().exhausted(Exhausted::Skip);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Exhausted {
    /// The run ends with an error that names the record, which stays uncommitted and is the first to come again. Its
    /// kind is [`RunErrorKind::RecordFailed`](crate::RunErrorKind::RecordFailed). The default: nothing is lost.
    #[default]
    Stop,
    /// The record is logged as an error, counted in [`Report::dropped`](crate::Report::dropped), and passed over.
    Skip,
}

/// What the pump needs to know.
pub(crate) struct Settings {
    pub(crate) group: Arc<str>,
    pub(crate) subscription: Subscription,
    pub(crate) start: StartPolicy,
    pub(crate) engine: engine::Config,
    pub(crate) handler_timeout: Option<Duration>,
    pub(crate) classifier: Option<Arc<dyn Classifier>>,
    pub(crate) filter: Option<Filter>,
    pub(crate) stuck_after: Duration,
    pub(crate) stuck_limit: Option<Duration>,
    pub(crate) max_prefetch_bytes: usize,
    pub(crate) listener: Option<Arc<dyn RebalanceListener>>,
    pub(crate) drain_timeout: Duration,
    pub(crate) shutdown_timeout: Duration,
    pub(crate) dead_letter: Option<DeadLetter>,
    pub(crate) exhausted: Exhausted,
    pub(crate) client: ClientConfig,
    pub(crate) producer: ClientConfig,
    pub(crate) oauth: Option<Arc<dyn OAuthTokenProvider>>,
}

impl Settings {
    /// Half of `max.poll.interval.ms`: how long a rebalance callback may take before the group throws us out.
    pub(crate) fn longest_callback(&self) -> Duration {
        let millis = self
            .client
            .get("max.poll.interval.ms")
            .and_then(|text| text.parse().ok());
        Duration::from_millis(millis.unwrap_or(300_000) / 2)
    }
}
