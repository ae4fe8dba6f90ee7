//! What the builder has put together, checked.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use rdkafka::ClientConfig;
use regex_lite::Regex;

use super::RebalanceListener;
use crate::{
    classify::Classifier,
    dead_letter::{DeadLetter, ErrorMessage},
    engine,
    execute::Filter,
    held_keys::HeldKeys,
    idempotency::Idempotency,
    kafka::OAuthTokenProvider,
    retry_topics::Tiers,
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
/// That is a new group, or one that was empty for longer than the brokers' `offsets.retention.minutes`. A partition that
/// was added to a topic which the group reads already is always read from its start, since what is in it is new, and so
/// is a topic that was deleted and made again.
///
/// A topic that matches the pattern of a group which reads others by it is read from its start as well, also when the pattern
/// was made wider: it may have been created while no member ran. So is a partition whose committed offset is gone while the
/// group has others in the topic, unless a new group may just be beginning: then the policy decides, and a warning and
/// [`Event::CommittedOffsetMissing`](crate::Event::CommittedOffsetMissing) tell what is not read. [`Refuse`](Self::Refuse)
/// refuses in both cases.
///
/// `auto.offset.reset` is not used: it would also move a group whose committed offset has been deleted, silently. See
/// [`OutOfRange`] for that.
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
    /// At the end: only what is produced from now on.
    Latest,
    /// At the first record with this timestamp or a later one; at the end if there is none.
    Time(SystemTime),
    /// Nowhere: the run ends with an error. For groups whose offsets must exist.
    Refuse,
}

/// What becomes of a partition whose position is not in the log any more: records were deleted before the group had read
/// them (retention, `kafka-delete-records`), or the log was cut off below the position by an unclean leader election.
///
/// It is `auto.offset.reset` for groups that have a position, and never silent: whatever is chosen, an
/// [`Event::OffsetOutOfRange`](crate::Event::OffsetOutOfRange) tells it with numbers. Where nothing would be skipped it is
/// not asked: a topic that was deleted and made again is read from its start, and a log that was cut off from where it was
/// cut, as far as that is known.
///
/// ```
/// use reliable_consumer::{OutOfRange, ReliableConsumer};
///
/// // A dashboard would rather miss something than stand still.
/// let builder = ReliableConsumer::builder().out_of_range(OutOfRange::Earliest);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OutOfRange {
    /// That partition is not read any further, the others go on. It shows in
    /// [`PartitionStatus::stopped`](crate::PartitionStatus::stopped) until somebody decides, by
    /// [`ConsumerHandle::resume_at`](crate::ConsumerHandle::resume_at), or by committing another offset for the group while
    /// none of its members runs. Any other member that gets the partition stops at the same place. The default: nothing is
    /// passed over unseen.
    #[default]
    StopPartition,
    /// Goes on at the oldest record there is. What was deleted is skipped; of a log that was cut off, everything that it
    /// still has comes again.
    Earliest,
    /// Goes on at the end. What the log still has is skipped.
    Latest,
    /// The run ends, with an error of the kind [`RunErrorKind::OffsetOutOfRange`](crate::RunErrorKind::OffsetOutOfRange).
    EndRun,
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

/// What becomes of a record that was sent back to its topic from a dead-letter topic for another group, as its header
/// [`redriveGroup`](crate::header_names::REDRIVE_GROUP) tells. The header counts only in the topic that
/// [`originalTopic`](crate::header_names::ORIGINAL_TOPIC) names, and in [redrive topics](crate::Builder::redrive_topics)
/// of it: a service that copies headers to what it produces elsewhere makes nobody pass that over.
///
/// ```
/// use reliable_consumer::{RedrivenForOthers, ReliableConsumer};
///
/// // An archive of all that was ever in the topic.
/// let builder = ReliableConsumer::builder().redriven_for_others(RedrivenForOthers::Handle);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum RedrivenForOthers {
    /// It is finished without being handled, and counted in
    /// [`Report::redriven_for_others`](crate::Report::redriven_for_others): this group had it when it was there first.
    /// The default.
    #[default]
    Skip,
    /// It is handled like any other. For one that goes by another name since its records were dead-lettered, or that
    /// wants to see every trip.
    Handle,
}

/// What the pump needs to know.
pub(crate) struct Settings {
    pub(crate) group: Arc<str>,
    pub(crate) subscription: Subscription,
    pub(crate) start: StartPolicy,
    pub(crate) out_of_range: OutOfRange,
    pub(crate) engine: engine::Config,
    pub(crate) handler_timeout: Option<Duration>,
    pub(crate) classifier: Option<Arc<dyn Classifier>>,
    pub(crate) filter: Option<Filter>,
    pub(crate) redriven_for_others: RedrivenForOthers,
    pub(crate) stuck_after: Duration,
    pub(crate) stuck_limit: Option<Duration>,
    pub(crate) max_prefetch_bytes: usize,
    pub(crate) listener: Option<Arc<dyn RebalanceListener>>,
    pub(crate) drain_timeout: Duration,
    pub(crate) instance_id_timeout: Duration,
    pub(crate) shutdown_timeout: Duration,
    pub(crate) dead_letter: Option<DeadLetter>,
    pub(crate) exhausted: Exhausted,
    /// None by default.
    pub(crate) retry_topics: Tiers,
    pub(crate) held_keys: Option<Arc<HeldKeys>>,
    pub(crate) idempotency: Option<Idempotency>,
    pub(crate) client: ClientConfig,
    pub(crate) producer: ClientConfig,
    pub(crate) oauth: Option<Arc<dyn OAuthTokenProvider>>,
}

impl Settings {
    /// What may be told of errors, in dead letters and in the log.
    pub(crate) fn error_message(&self) -> ErrorMessage {
        let dead_letter = self.dead_letter.as_ref();
        dead_letter.map_or_else(ErrorMessage::default, |dead_letter| {
            dead_letter.error_message.clone()
        })
    }

    /// `topic.metadata.refresh.interval.ms`, if it refreshes anything.
    pub(crate) fn metadata_refresh(&self) -> Duration {
        let property = self.client.get("topic.metadata.refresh.interval.ms");
        let millis = property.and_then(|text| text.parse().ok());
        Duration::from_millis(millis.unwrap_or(300_000).max(100))
    }

    /// The group's protocol is the one of KIP-848, in which the brokers assign the partitions.
    pub(crate) fn is_kip_848(&self) -> bool {
        self.client.get("group.protocol") == Some("consumer")
    }

    /// Half of `max.poll.interval.ms`: how long a rebalance callback may take before the group throws us out.
    pub(crate) fn longest_callback(&self) -> Duration {
        let millis = self
            .client
            .get("max.poll.interval.ms")
            .and_then(|text| text.parse().ok());
        Duration::from_millis(millis.unwrap_or(300_000) / 2)
    }
}
