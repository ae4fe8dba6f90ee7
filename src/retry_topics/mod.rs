//! Retry topics: where a record waits for another attempt without holding up others.

mod tier;

use std::{collections::HashMap, sync::Arc, time::Duration};

use crate::redrive::redrive_topic;

pub(crate) use tier::{Admission, Tier, unix_millis};

/// Retry topics, one for each delay: where records go whose attempts are used up, to be handled again later.
///
/// With delays of ten seconds, a minute and ten minutes, a record of `orders` that has failed as often as
/// [`Builder::retry`](crate::Builder::retry) allows moves to `orders.retry.10s`. Ten seconds after that its handler is
/// called once more. If that fails too, it moves on to `orders.retry.1m`, and so on; after the last one it goes to the
/// dead-letter topic, or [`Builder::exhausted`](crate::Builder::exhausted) decides. Errors that another attempt cannot
/// mend (permanent ones, payloads that cannot be decoded, records that kill the process, stuck ones) go there at once. The
/// consumer subscribes to its retry topics by itself.
///
/// ```
/// use std::time::Duration;
/// use reliable_consumer::{DeadLetter, Ordering, ReliableConsumer, Retry, RetryTopics};
///
/// let [seconds, minutes] = [Duration::from_secs, |minutes| Duration::from_secs(60 * minutes)];
/// let consumer = ReliableConsumer::builder()
///     .bootstrap_servers("localhost:9092")
///     .group_id("billing")
///     .topic("orders")
///     .ordering(Ordering::Unordered)
///     // In place: two more attempts within a second or so.
///     .retry(Retry::exponential(Duration::from_millis(200), Duration::from_secs(1)).max_attempts(3))
///     .retry_topics(RetryTopics::new([seconds(10), minutes(1), minutes(10)]))
///     .dead_letter(DeadLetter::topic("orders.dlq"))
///     .build()?;
/// # Ok::<(), reliable_consumer::BuildError>(())
/// ```
///
/// # What is promised
///
/// - A record moves as a dead letter does: its copy has been acknowledged by all in-sync replicas before it counts as
///   finished where it was. If the process dies in between it is there twice, with the same
///   [`message_id`](crate::Message::message_id).
/// - It is not handled before it is due, by the clocks of the process that moved it and of the one that handles it. When
///   that is stands in its header `dueAt`, so that a restart changes nothing about it. It is late when the retry topic has
///   a backlog, or nobody runs.
/// - Key, value and headers stay as they are, byte for byte. [`header_names`](crate::header_names) tell where it was first,
///   how many attempts it has had in all, its id, and which error was the last. The same headers are on its dead letter.
/// - Records that are not due wait in the order of their partition, and take neither a handler nor a place among the
///   [`concurrency`](crate::Builder::concurrency). Only the first is looked at: all of a retry topic have the same delay,
///   so that those behind it are due later. No more than 2,048 of a partition wait in memory, within its share of
///   [`max_bytes`](crate::Builder::max_bytes). Once due, they are handled in the order asked for and as concurrently.
///
/// # What a handler sees
///
/// [`Message::topic`](crate::Message::topic), `partition`, `offset` and `timestamp` are those of the record where it was
/// first, so that a handler does not need to know of retry topics; [`Message::attempt`](crate::Message::attempt) counts
/// on. Where it lies now tells [`Message::record`](crate::Message::record), which is also what decoders, filters and
/// classifiers get. [`Routes`](crate::Routes) are by the first topic.
///
/// # The topics
///
/// They must exist, or the brokers must create topics on demand: [`topics_of`](Self::topics_of) names them. While one is
/// missing, records that should move there stay unfinished, and log and status name it, as with dead letters. One that is
/// created later is read within `topic.metadata.refresh.interval.ms`, five minutes by default. Their number of partitions
/// is free; a record's key decides which it goes to. Their retention must be longer than the delay and any backlog. The
/// consumer needs the permission to read and to write them.
///
/// Several groups may share them: a record names the group that it is for, and others count it as skipped.
///
/// # What others write into them
///
/// Headers can be forged. A record that names no group, or does not tell where it was first, is not handled; it goes to the dead-letter topic as
/// [`Untrusted`](crate::FailureKind::Untrusted), from the place where it was found. One that names an origin in another topic is handled
/// as any of the topic that the retry topic is for: so it would be if it stood there. A `dueAt` that is missing or malformed
/// stands for the record's timestamp and the delay; none makes a record wait for longer than the delay from when it is
/// read. Which retry topic comes next is decided by the one it lies in and by no header, so that nothing goes round.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct RetryTopics {
    pub(crate) delays: Vec<Duration>,
    pub(crate) reorder: bool,
}

impl RetryTopics {
    /// Tiers with these delays, gone through in this order. Each in whole milliseconds, none twice; they are part of the
    /// topics' names: `<topic>.retry.<delay>`, with the largest of the units `h`, `m`, `s` and `ms` that needs no
    /// fraction.
    pub fn new(delays: impl IntoIterator<Item = Duration>) -> Self {
        Self {
            delays: delays.into_iter().collect(),
            reorder: false,
        }
    }

    /// Allows them although an order by key or by partition was asked for. Default: not, and
    /// [`build`](crate::Builder::build) refuses.
    ///
    /// The price: later records of its key or partition are handled while a failed one waits in its retry topic, and
    /// before it; even at the same time as it, since it lies in another partition then. Only what is in one partition of
    /// one retry topic keeps its order. Where that is not bearable, let records wait in place with a longer
    /// [`retry`](crate::Builder::retry): that holds up their key or partition, nothing else, and keeps the order.
    /// [`HoldKey::Follow`](crate::HoldKey::Follow) lies in between.
    pub fn reorder(mut self, allowed: bool) -> Self {
        self.reorder = allowed;
        self
    }

    /// The names of a topic's retry topics, in their order.
    ///
    /// ```
    /// use std::time::Duration;
    /// use reliable_consumer::RetryTopics;
    ///
    /// let tiers = RetryTopics::new([10, 90, 600].map(Duration::from_secs));
    /// let names: Vec<_> = tiers.topics_of("orders").collect();
    /// assert_eq!(names, ["orders.retry.10s", "orders.retry.90s", "orders.retry.10m"]);
    /// ```
    pub fn topics_of(&self, topic: &str) -> impl Iterator<Item = String> {
        self.delays
            .iter()
            .map(move |delay| format!("{topic}.retry.{}", in_words(*delay)))
    }

    /// Together, and some time for being handled.
    pub(crate) fn all_gone_through(&self) -> Duration {
        const HANDLING: Duration = Duration::from_secs(60);
        let delays = self.delays.iter();
        delays.fold(HANDLING, |sum, delay| sum.saturating_add(*delay))
    }
}

fn in_words(delay: Duration) -> String {
    let millis = delay.as_millis();
    let units = [(3_600_000, "h"), (60_000, "m"), (1_000, "s"), (1, "ms")];
    let (unit, name) = units
        .into_iter()
        .find(|(unit, _)| millis.is_multiple_of(*unit))
        .expect("every number of milliseconds is a multiple of one");
    format!("{}{name}", millis / unit)
}

/// The retry topics of all topics that are consumed.
#[derive(Debug, Default)]
pub(crate) struct Tiers {
    by_topic: HashMap<Arc<str>, Arc<Tier>>,
    /// The first one of each topic that is consumed.
    first: HashMap<Arc<str>, Arc<str>>,
}

impl Tiers {
    pub(crate) fn new(settings: &RetryTopics, topics: &[String], group: &Arc<str>) -> Self {
        let mut tiers = Self::default();
        for source in topics {
            let source: Arc<str> = source.as_str().into();
            let names: Vec<Arc<str>> = settings.topics_of(&source).map(Arc::from).collect();
            for (at, delay) in settings.delays.iter().enumerate() {
                let tier = Tier {
                    topic: Arc::clone(&names[at]),
                    source: Arc::clone(&source),
                    group: Arc::clone(group),
                    number: at as u32 + 1,
                    delay: *delay,
                    next: names.get(at + 1).cloned(),
                };
                tiers
                    .by_topic
                    .insert(Arc::clone(&names[at]), Arc::new(tier));
            }
            if let Some(first) = names.first() {
                // What comes back to the group by a topic of its own is still the topic's.
                let redriven = redrive_topic(&source, group).into();
                tiers.first.insert(redriven, Arc::clone(first));
                tiers.first.insert(source, Arc::clone(first));
            }
        }
        tiers
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.by_topic.keys().map(|name| &**name)
    }

    pub(crate) fn get(&self, topic: &str) -> Option<&Arc<Tier>> {
        self.by_topic.get(topic)
    }

    /// Where a record goes next that was read from this topic.
    pub(crate) fn after(&self, topic: &str) -> Option<&Arc<Tier>> {
        let next = match self.by_topic.get(topic) {
            Some(tier) => tier.next.as_ref(),
            None => self.first.get(topic),
        };
        self.by_topic.get(next?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delay_is_named_in_the_largest_unit_that_needs_no_fraction() {
        for (millis, name) in [
            (1, "1ms"),
            (1_500, "1500ms"),
            (10_000, "10s"),
            (60_000, "1m"),
            (90_000, "90s"),
            (3_600_000, "1h"),
            (86_400_000, "24h"),
        ] {
            assert_eq!(in_words(Duration::from_millis(millis)), name);
        }
    }

    #[test]
    fn a_record_goes_from_tier_to_tier_and_then_nowhere() {
        let settings = RetryTopics::new([1, 2].map(Duration::from_secs));
        let tiers = Tiers::new(&settings, &["orders".into()], &"billing".into());
        let first = tiers.after("orders").expect("a first tier");
        assert_eq!((&*first.topic, first.number), ("orders.retry.1s", 1));
        let second = tiers.after(&first.topic).expect("a second tier");
        assert_eq!((&*second.topic, second.number), ("orders.retry.2s", 2));
        assert!(tiers.after(&second.topic).is_none());
        assert!(tiers.after("payments").is_none());
    }
}
