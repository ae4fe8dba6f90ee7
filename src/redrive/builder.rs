//! Building a redriver: every option, its default, and the reason for it.

use std::{sync::Arc, time::Duration};

use regex_lite::Regex;

use super::{
    Action, LetterFilter, Pace, Placement, Plan, RedriveHandle, Redriver, Rules,
    rules::{PARKED, is_retry_tier},
};
use crate::{
    BuildError, OAuthToken, OAuthTokenProvider, Ordering, RedrivenForOthers, ReliableConsumer,
    Retry,
    kafka::{PREFETCH, Properties, consumer_config, producer_config},
    origin::is_topic_name,
};

/// Puts a [`Redriver`] together. Servers, the dead-letter topic and the topics that may be sent to have no default.
///
/// ```
/// use std::time::Duration;
/// use reliable_consumer::{Redriver, Retry};
///
/// let redriver = Redriver::builder()
///     .bootstrap_servers("localhost:9092")
///     .dead_letter_topic("shop.dlq")
///     .allow_pattern("(orders|refunds)")
///     .threshold(3)
///     .backoff(Retry::exponential(Duration::from_secs(300), Duration::from_secs(6 * 3600)))
///     .rate_limit(200)
///     .build()?;
/// assert_eq!(redriver.group_id(), "shop.dlq.redriver");
/// # Ok::<(), reliable_consumer::BuildError>(())
/// ```
#[must_use = "a builder does nothing until `build` is called"]
pub struct RedriverBuilder {
    properties: Properties,
    set: Vec<(String, String)>,
    producer: Properties,
    oauth: Option<Arc<dyn OAuthTokenProvider>>,
    source: Option<String>,
    parking_lot: Option<String>,
    group: Option<String>,
    allowed: Vec<String>,
    patterns: Vec<String>,
    retry_topics: Vec<String>,
    action: Action,
    threshold: u32,
    backoff: Retry,
    rate: Option<u32>,
    filter: LetterFilter,
    once: bool,
    for_group: Option<String>,
    topic_per_group: bool,
    placement: Placement,
    concurrency: usize,
    window: usize,
    shutdown_timeout: Duration,
}

impl RedriverBuilder {
    pub(super) fn new() -> Self {
        Self {
            properties: Properties::default(),
            set: Vec::new(),
            producer: Properties::default(),
            oauth: None,
            source: None,
            parking_lot: None,
            group: None,
            allowed: Vec::new(),
            patterns: Vec::new(),
            retry_topics: Vec::new(),
            action: Action::default(),
            threshold: 5,
            backoff: Retry::exponential(Duration::from_secs(60), Duration::from_secs(3600)),
            rate: None,
            filter: LetterFilter::default(),
            once: false,
            for_group: None,
            topic_per_group: false,
            placement: Placement::default(),
            concurrency: 1_000,
            window: 16_384,
            shutdown_timeout: Duration::from_secs(25),
        }
    }

    /// Some brokers of the cluster, as `host:port,host:port`. Needed. Kafka's `bootstrap.servers`.
    pub fn bootstrap_servers(self, servers: impl Into<String>) -> Self {
        self.property("bootstrap.servers", servers)
    }

    /// The topic that dead letters are read from. Needed.
    pub fn dead_letter_topic(mut self, name: impl Into<String>) -> Self {
        self.source = Some(name.into());
        self
    }

    /// Records may be sent back to this topic. At least one topic or [pattern](Self::allow_pattern) is needed: where a
    /// letter comes from is what its headers say, and anybody can write headers. A letter that names another topic is
    /// parked as [`Untrusted`](super::ParkReason::Untrusted). Dead-letter topic, parking lot, and topics that are named
    /// like retry tiers (`….retry.10s`) are never sent to; nor are [those that go by other names](Self::retry_topics).
    pub fn allow(mut self, topic: impl Into<String>) -> Self {
        self.allowed.push(topic.into());
        self
    }

    /// Records may be sent back to all topics whose whole name this regular expression matches.
    pub fn allow_pattern(mut self, pattern: impl Into<String>) -> Self {
        self.patterns.push(pattern.into());
        self
    }

    /// Topics in which records wait for another attempt: those of other systems, whose names don't tell, such as Spring's
    /// `orders-retry-0`. Records are never sent back to them, whatever is [allowed](Self::allow_pattern): what is sent there
    /// moves on by itself, and back here. This library's own are known by their names. Default: none.
    pub fn retry_topics(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.retry_topics.extend(names.into_iter().map(Into::into));
        self
    }

    /// Where letters go that are not sent back. Default: `<dead-letter topic>.parked`. It must exist, or the brokers must
    /// create topics on demand; until it does, letters that are to go there wait, and the status says so.
    pub fn parking_lot(mut self, topic: impl Into<String>) -> Self {
        self.parking_lot = Some(topic.into());
        self
    }

    /// Letters whose `retryCount` has come to this are parked. Default 5: with the default backoff that is half an hour
    /// of trying after the first failure. A count that is malformed counts as 0.
    pub fn threshold(mut self, trips: u32) -> Self {
        self.threshold = trips;
        self
    }

    /// How long after its failure a record goes back, by how often it has gone back before. Limits on attempts and time
    /// do not count here: [`threshold`](Self::threshold) does. Default: one minute, doubling, an hour at most, 20 %
    /// of jitter. Runs that [end](Self::once) wait for nothing.
    ///
    /// Letters that wait stay in memory, up to the [window](Self::window) and 64 MiB; then reading waits too.
    pub fn backoff(mut self, backoff: Retry) -> Self {
        self.backoff = backoff;
        self
    }

    /// At most so many records a second leave this process, evenly spread. Default: no limit.
    pub fn rate_limit(mut self, per_second: u32) -> Self {
        self.rate = Some(per_second);
        self
    }

    /// What is done with the letters. Default: [`Action::SendBack`].
    pub fn action(mut self, action: Action) -> Self {
        self.action = action;
        self
    }

    /// Deals with some of the letters only, in a run that ends: needs [`once`](Self::once). Default: all.
    ///
    /// What it leaves out stays in the dead-letter topic. The run's group is named after the filter, see
    /// [`group_id`](Self::group_id).
    pub fn filter(mut self, filter: LetterFilter) -> Self {
        self.filter = filter;
        self
    }

    /// The run ends when all letters are dealt with that lay in the topic when it began. None of them waits for its
    /// [backoff](Self::backoff). Default: it goes on until it is shut down.
    pub fn once(mut self) -> Self {
        self.once = true;
        self
    }

    /// The consumer group that reads the dead-letter topic. Default: `<dead-letter topic>.redriver`. With a filter, a dot
    /// and a number made of the filter are added.
    pub fn group_id(mut self, group: impl Into<String>) -> Self {
        self.group = Some(group.into());
        self
    }

    /// All records go back for this group. Default: for the group that gave them up, as their headers say; for all
    /// groups, if they don't. For a group that goes by another name now, or whose letters somebody else wrote.
    pub fn for_group(mut self, group: impl Into<String>) -> Self {
        self.for_group = Some(group.into());
        self
    }

    /// Sends records not to the topic that they came from but to `<topic>.<group>.redrive`, which only the group that
    /// gave them up reads. A consumer of this library does so with [`redrive_topics`](crate::Builder::redrive_topics);
    /// others subscribe to it by name. The topics must exist. Default: to the topic that they came from, where other
    /// groups see the record again, and those of this library pass it over.
    pub fn topic_per_group(mut self) -> Self {
        self.topic_per_group = true;
        self
    }

    /// How the partition is chosen. Default: [`Placement::ByKey`].
    pub fn placement(mut self, placement: Placement) -> Self {
        self.placement = placement;
        self
    }

    /// How many records may be on their way at a time. Default 1,000; with a [rate limit](Self::rate_limit) no more than
    /// a second's worth.
    pub fn concurrency(mut self, records: usize) -> Self {
        self.concurrency = records;
        self
    }

    /// How many letters of a partition, from the oldest unfinished to the newest, may be in the process: how far letters
    /// whose time has come pass one that waits. Default 16,384.
    pub fn window(mut self, letters: usize) -> Self {
        self.window = letters;
        self
    }

    /// How long an orderly shutdown may take. Default 25 s.
    pub fn shutdown_timeout(mut self, limit: Duration) -> Self {
        self.shutdown_timeout = limit;
        self
    }

    /// Any property of librdkafka's consumer. Connection settings are the producer's too.
    pub fn property(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        let (name, value) = (name.into(), value.into());
        self.properties.set(&*name, &*value);
        self.set.push((name, value));
        self
    }

    /// Any property of librdkafka's producer but `acks`, `enable.idempotence` and `transactional.id`.
    pub fn producer_property(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.producer.set(name, value);
        self
    }

    /// Gives tokens for `sasl.mechanisms=OAUTHBEARER`, which needs the cargo feature `ssl`. Default: none.
    pub fn oauth_token_provider(mut self, provider: impl OAuthTokenProvider) -> Self {
        self.oauth = Some(Arc::new(provider));
        self
    }

    /// Checks everything that can be checked without a broker.
    ///
    /// # Errors
    ///
    /// See [`BuildError`]; each says which setting is wrong and what would be right.
    pub fn build(self) -> Result<Redriver, BuildError> {
        let source = self.source.clone().ok_or(BuildError::Missing {
            what: "the dead-letter topic",
            call: "dead_letter_topic",
        })?;
        let parking_lot = self
            .parking_lot
            .clone()
            .unwrap_or_else(|| format!("{source}{PARKED}"));
        self.check_topics(&source, &parking_lot)?;
        self.check_run()?;
        let whole = |pattern: &String| {
            Regex::new(&format!("^(?:{pattern})$")).map_err(|error| BuildError::Pattern {
                pattern: pattern.clone(),
                reason: error.to_string(),
            })
        };
        let allowed_patterns = self.patterns.iter().map(whole).collect::<Result<_, _>>()?;

        let unfiltered = self
            .group
            .clone()
            .unwrap_or_else(|| format!("{source}.redriver"));
        let filtered = !self.filter.is_all();
        let (group, unfiltered_group) = if filtered {
            let own = format!("{unfiltered}.{:016x}", self.filter.fingerprint());
            (own, Some(unfiltered))
        } else {
            (unfiltered, None)
        };
        let concurrency = match self.rate {
            Some(rate) => self.concurrency.min(rate as usize),
            None => self.concurrency,
        };
        let longest_wait = if self.once {
            Duration::ZERO
        } else {
            self.backoff.longest()
        };
        let mut consumer = ReliableConsumer::builder()
            .ordering(Ordering::Unordered)
            .concurrency(concurrency)
            .window(self.window)
            .retry(
                Retry::exponential(Duration::from_secs(1), Duration::from_secs(30))
                    .unlimited_attempts(),
            )
            // It does nothing with a letter but send it.
            .crash_limit(None)
            // Letters of others keep this header.
            .redriven_for_others(RedrivenForOthers::Handle)
            // Waiting is what letters do here.
            .stuck_after(longest_wait.saturating_add(Duration::from_secs(600)))
            .shutdown_timeout(self.shutdown_timeout)
            // So that it is known as what it is among the members of its group.
            .client_id(&group)
            .topic(&source);
        if self.once {
            consumer = consumer.commit_interval(Duration::from_millis(200));
        }
        for (name, value) in &self.set {
            consumer = consumer.property(name, value);
        }
        if let Some(oauth) = &self.oauth {
            consumer = consumer.oauth_token_provider(Shared(Arc::clone(oauth)));
        }
        let consumer = consumer.group_id(&group).build()?;

        let topic = source.as_str().into();
        let rules = Rules {
            action: self.action,
            source,
            parking_lot,
            allowed: self.allowed,
            allowed_patterns,
            retry_topics: self.retry_topics,
            threshold: self.threshold,
            backoff: (!self.once).then(|| self.backoff.unlimited_attempts()),
            group: self.for_group,
            topic_per_group: self.topic_per_group,
        };
        let plan = Plan {
            rules,
            group,
            unfiltered_group,
            filter: self.filter,
            placement: self.placement,
            pace: self.rate.map(Pace::new),
            once: self.once,
            consumer: consumer_config(&self.properties, PREFETCH)?,
            producer: producer_config(&self.properties, &self.producer)?,
            oauth: self.oauth,
        };
        let handle = RedriveHandle {
            consumer: consumer.handle(),
            ledger: Arc::default(),
            topic,
        };
        Ok(Redriver {
            plan: Arc::new(plan),
            consumer,
            handle,
        })
    }

    fn check_topics(&self, source: &str, parking_lot: &str) -> Result<(), BuildError> {
        let refused = |what, name: &str, reason: &str| {
            Err(BuildError::Invalid {
                what,
                value: format!("{name:?}"),
                reason: reason.into(),
            })
        };
        let names = self
            .allowed
            .iter()
            .map(|name| ("an allowed topic", &**name));
        let ours = [
            ("the dead-letter topic", source),
            ("the parking lot", parking_lot),
        ];
        for (what, name) in ours.into_iter().chain(names.clone()) {
            if !is_topic_name(name) {
                return refused(
                    what,
                    name,
                    "a topic's name is 1 to 249 characters out of a-z, A-Z, 0-9, `.`, `_` and `-`; for a pattern \
                     call `allow_pattern`",
                );
            }
            if is_retry_tier(name) || self.retry_topics.iter().any(|tier| tier == name) {
                return refused(
                    what,
                    name,
                    "records wait there for a retry, which takes them on by itself",
                );
            }
        }
        if source == parking_lot {
            return refused(
                "the parking lot",
                parking_lot,
                "letters are read from there; choose another topic",
            );
        }
        if source.ends_with(PARKED) && self.action == Action::SendBack {
            return refused(
                "the dead-letter topic",
                source,
                "it is a parking lot, whose letters would be parked again: choose `Action::Unpark`",
            );
        }
        for (what, name) in names {
            if name == source || name == parking_lot {
                return refused(
                    what,
                    name,
                    "what is sent there comes back at once, for ever; name the topics consumed",
                );
            }
        }
        if self.allowed.is_empty() && self.patterns.is_empty() && self.action != Action::Park {
            return Err(BuildError::Missing {
                what: "a topic that records may be sent back to",
                call: "allow",
            });
        }
        Ok(())
    }

    fn check_run(&self) -> Result<(), BuildError> {
        let refused = |what, value: &str, reason: &str| {
            Err(BuildError::Invalid {
                what,
                value: value.into(),
                reason: reason.into(),
            })
        };
        if !self.filter.is_all() && !self.once {
            return refused("a filter", "part of a run without an end", "call `once`");
        }
        if self.action == Action::Unpark && !self.once {
            return refused(
                "`Action::Unpark`",
                "part of a run without an end",
                "call `once`",
            );
        }
        if self.rate == Some(0) {
            return refused("rate_limit", "0", "give it a number of records a second");
        }
        if self.for_group.as_deref() == Some("") {
            return refused("for_group", "\"\"", "name a group, or leave it out");
        }
        if self.group.as_deref() == Some("") {
            return refused("group_id", "\"\"", "name a group, or leave it out");
        }
        Ok(())
    }
}

/// One provider for several clients.
struct Shared(Arc<dyn OAuthTokenProvider>);

impl OAuthTokenProvider for Shared {
    fn token(&self) -> Result<OAuthToken, crate::BoxError> {
        self.0.token()
    }
}

impl std::fmt::Debug for RedriverBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedriverBuilder")
            .field("properties", &self.properties)
            .field("dead_letter_topic", &self.source)
            .field("allowed", &self.allowed)
            .field("patterns", &self.patterns)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn builder() -> RedriverBuilder {
        Redriver::builder()
            .bootstrap_servers("localhost:9092")
            .dead_letter_topic("orders.dlq")
            .allow("orders")
    }

    #[track_caller]
    fn refused(builder: RedriverBuilder, words: &str) {
        let error = builder.build().expect_err(words).to_string();
        assert!(error.contains(words), "{error}");
    }

    // D8
    #[test]
    fn topics_of_dead_letters_are_neither_sent_to_nor_read_in_a_circle() {
        refused(builder().allow("orders.dlq"), "for ever");
        refused(builder().allow("orders.dlq.parked"), "for ever");
        refused(
            builder().allow("orders.retry.10s"),
            "wait there for a retry",
        );
        refused(builder().retry_topics(["orders"]), "wait there for a retry");
        refused(
            builder().parking_lot("orders.dlq"),
            "letters are read from there",
        );
        refused(
            builder().dead_letter_topic("orders.retry.10s"),
            "wait there",
        );
        refused(
            builder().dead_letter_topic("orders.dlq.parked"),
            "Action::Unpark",
        );
        let unpark = builder()
            .dead_letter_topic("orders.dlq.parked")
            .action(Action::Unpark)
            .once();
        unpark.build().unwrap();
    }

    #[test]
    fn what_is_missing_or_cannot_be_is_told() {
        refused(Redriver::builder(), "dead_letter_topic");
        let nothing_allowed = || {
            Redriver::builder()
                .bootstrap_servers("localhost:9092")
                .dead_letter_topic("orders.dlq")
        };
        refused(nothing_allowed(), "call `allow`");
        nothing_allowed().action(Action::Park).build().unwrap();
        refused(builder().allow("no topic"), "1 to 249 characters");
        refused(builder().allow_pattern("("), "not a regular expression");
        refused(builder().rate_limit(0), "records a second");
        refused(
            builder().filter(LetterFilter::all().topic("orders")),
            "call `once`",
        );
        refused(builder().action(Action::Unpark), "call `once`");
        refused(
            builder().property("enable.auto.commit", "true"),
            "enable.auto.commit",
        );
        refused(builder().producer_property("acks", "1"), "acks");
    }

    #[test]
    fn a_pattern_allows_topics_whose_whole_name_it_matches() {
        let redriver = builder().allow_pattern("refunds|pay.*").build().unwrap();
        let allows = |topic| redriver.plan.rules.allows(topic);
        assert!(allows("orders") && allows("refunds") && allows("payments"));
        assert!(!allows("refunds-eu") && !allows("repay") && !allows("orders-eu"));
    }

    #[test]
    fn a_run_with_a_filter_has_a_group_of_its_own() {
        let group = |builder: RedriverBuilder| builder.build().unwrap().group_id().to_owned();
        assert_eq!(group(builder()), "orders.dlq.redriver");
        assert_eq!(group(builder().once()), "orders.dlq.redriver");
        assert_eq!(group(builder().group_id("mine")), "mine");
        let filtered = |topic: &str| builder().once().filter(LetterFilter::all().topic(topic));
        assert_eq!(group(filtered("a")), group(filtered("a")));
        assert_ne!(group(filtered("a")), group(filtered("b")));
        assert!(group(filtered("a")).starts_with("orders.dlq.redriver."));
    }
}
