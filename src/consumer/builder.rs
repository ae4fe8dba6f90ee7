//! Building a consumer: every option, its default, and the reason for it.

use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hasher},
    sync::Arc,
    time::Duration,
};

use regex_lite::Regex;

use super::{
    BuildError, Exhausted, OutOfRange, RebalanceListener, RedrivenForOthers, ReliableConsumer,
    Settings, StartPolicy, Subscription,
};
use crate::{
    Classifier, Guarantee, Ordering, OutageBreaker, Record, Retry,
    dead_letter::{DeadLetter, Unavailable},
    engine,
    execute::Filter,
    held_keys::{HeldKeys, HoldKey},
    idempotency::Idempotency,
    kafka::{OAuthTokenProvider, Properties, consumer_config, producer_config},
    origin::is_topic_name,
    redrive::redrive_topic,
    retry_topics::{RetryTopics, Tiers},
};

const MAX_CONCURRENCY: usize = 1 << 20;

/// Puts a [`ReliableConsumer`] together. Only servers, group and topics have no default.
///
/// ```
/// use std::time::Duration;
/// use reliable_consumer::{DeadLetter, Ordering, ReliableConsumer, Retry};
///
/// let consumer = ReliableConsumer::builder()
///     .bootstrap_servers("kafka-1:9092,kafka-2:9092")
///     .group_id("billing")
///     .topics(["orders", "refunds"])
///     .ordering(Ordering::ByKey)
///     .concurrency(200)
///     .retry(Retry::exponential(Duration::from_millis(200), Duration::from_secs(60)).max_attempts(8))
///     .handler_timeout(Duration::from_secs(20))
///     .dead_letter(DeadLetter::topic("billing.dlq"))
///     .property("session.timeout.ms", "30000")
///     .build()?;
/// # Ok::<(), reliable_consumer::BuildError>(())
/// ```
#[must_use = "a builder does nothing until `build` is called"]
pub struct Builder {
    properties: Properties,
    topics: Vec<String>,
    pattern: Option<String>,
    start: StartPolicy,
    out_of_range: OutOfRange,
    ordering: Ordering,
    guarantee: Guarantee,
    concurrency: usize,
    window: usize,
    max_bytes: usize,
    max_records: usize,
    max_prefetch_bytes: Option<usize>,
    retry: Retry,
    dead_letter: Option<DeadLetter>,
    exhausted: Exhausted,
    retry_topics: Option<RetryTopics>,
    hold_key: Option<HoldKey>,
    idempotency: Option<Idempotency>,
    handler_timeout: Option<Duration>,
    crash_limit: Option<u32>,
    breaker: Option<OutageBreaker>,
    classifier: Option<Arc<dyn Classifier>>,
    filter: Option<Filter>,
    redriven_for_others: RedrivenForOthers,
    redrive_topics: bool,
    commit_interval: Duration,
    stuck_after: Duration,
    stuck_limit: Option<Duration>,
    listener: Option<Arc<dyn RebalanceListener>>,
    drain_timeout: Duration,
    instance_id_timeout: Duration,
    shutdown_timeout: Duration,
    oauth: Option<Arc<dyn OAuthTokenProvider>>,
}

impl Builder {
    pub(super) fn new() -> Self {
        Self {
            properties: Properties::default(),
            topics: Vec::new(),
            pattern: None,
            start: StartPolicy::default(),
            out_of_range: OutOfRange::default(),
            ordering: Ordering::default(),
            guarantee: Guarantee::default(),
            concurrency: 64,
            window: 16_384,
            max_bytes: 64 << 20,
            max_records: 250_000,
            max_prefetch_bytes: None,
            retry: Retry::default(),
            dead_letter: None,
            exhausted: Exhausted::default(),
            retry_topics: None,
            hold_key: None,
            idempotency: None,
            handler_timeout: None,
            crash_limit: Some(3),
            breaker: Some(OutageBreaker::new()),
            classifier: None,
            filter: None,
            redriven_for_others: RedrivenForOthers::default(),
            redrive_topics: false,
            commit_interval: Duration::from_secs(1),
            stuck_after: Duration::from_secs(60),
            stuck_limit: None,
            listener: None,
            drain_timeout: Duration::from_secs(10),
            instance_id_timeout: Duration::from_secs(75),
            shutdown_timeout: Duration::from_secs(25),
            oauth: None,
        }
    }

    /// Some brokers of the cluster, as `host:port,host:port`; the others are found through them. Needed.
    /// Kafka's `bootstrap.servers`.
    pub fn bootstrap_servers(self, servers: impl Into<String>) -> Self {
        self.property("bootstrap.servers", servers)
    }

    /// The consumer group. Needed. Kafka's `group.id`.
    pub fn group_id(self, group: impl Into<String>) -> Self {
        self.property("group.id", group)
    }

    /// The name under which brokers log this client. Default `rdkafka`. Kafka's `client.id`.
    pub fn client_id(self, client: impl Into<String>) -> Self {
        self.property("client.id", client)
    }

    /// Consumes this topic. May be called several times.
    pub fn topic(mut self, topic: impl Into<String>) -> Self {
        self.topics.push(topic.into());
        self
    }

    /// Consumes these topics.
    pub fn topics<T: Into<String>>(mut self, topics: impl IntoIterator<Item = T>) -> Self {
        self.topics.extend(topics.into_iter().map(Into::into));
        self
    }

    /// Consumes all topics whose names match this regular expression from their first character on, topics made later
    /// included: they are found within `topic.metadata.refresh.interval.ms`, five minutes by default.
    pub fn topic_pattern(mut self, pattern: impl Into<String>) -> Self {
        self.pattern = Some(pattern.into());
        self
    }

    /// Where a group begins that has no committed offset. Default: [`StartPolicy::Earliest`], which misses nothing.
    ///
    /// It stands in for `auto.offset.reset`, which is refused: that would also decide, silently, what happens to a
    /// group whose committed offset has been deleted.
    pub fn start(mut self, policy: StartPolicy) -> Self {
        self.start = policy;
        self
    }

    /// What becomes of a partition whose position is not in the log any more. Default: [`OutOfRange::StopPartition`], which
    /// passes over nothing.
    pub fn out_of_range(mut self, policy: OutOfRange) -> Self {
        self.out_of_range = policy;
        self
    }

    /// Which records may be handled at the same time. Default: [`Ordering::ByKey`], which is what Kafka itself
    /// promises to those who give their records keys.
    pub fn ordering(mut self, ordering: Ordering) -> Self {
        self.ordering = ordering;
        self
    }

    /// Whether a crash may make records come again, or lose them. Default: [`Guarantee::AtLeastOnce`], which loses nothing.
    pub fn guarantee(mut self, guarantee: Guarantee) -> Self {
        self.guarantee = guarantee;
        self
    }

    /// How many handlers may be in progress at a time, over all partitions. Default 64: enough for work that waits for
    /// a database, few enough not to drown it.
    pub fn concurrency(mut self, handlers: usize) -> Self {
        self.concurrency = handlers;
        self
    }

    /// How many records of a partition, from the oldest unfinished to the newest, may be in the process. Default
    /// 16,384. It is how far one slow record lets the others of its partition run ahead; when it is reached, that
    /// partition waits. At about 16 bytes a record plus the records themselves.
    pub fn window(mut self, records: usize) -> Self {
        self.window = records;
        self
    }

    /// Bytes that unfinished records may take, over all partitions: key, value and headers, and 96 for keeping track of
    /// each. Default 64 MiB.
    ///
    /// Half of it is divided equally between the partitions that this process owns; the other half is for whichever needs
    /// more. A partition whose records are stuck so takes half of it and its own share, and the others go on. A partition
    /// that has used up what it may have is not read until some of its records finish; one record always passes, be it
    /// larger than all that is allowed. For a time after partitions have been added it can be half as much more.
    ///
    /// Records are kept by the batch in which they were read. With unfinished neighbours, finished ones take memory as
    /// well: up to as much again, shared in the same way ([`Status::resident_bytes`](super::Status::resident_bytes) has
    /// both). What librdkafka reads ahead comes on top, see [`max_prefetch_bytes`](Self::max_prefetch_bytes).
    pub fn max_bytes(mut self, bytes: usize) -> Self {
        self.max_bytes = bytes;
        self
    }

    /// How many unfinished records there may be, over all partitions. Default 250,000. Shared between partitions as
    /// [`max_bytes`](Self::max_bytes) is.
    pub fn max_records(mut self, records: usize) -> Self {
        self.max_records = records;
        self
    }

    /// Bytes that records may take which librdkafka has read ahead, over all partitions: the values, and 300 for each
    /// record. Default: twice [`max_bytes`](Self::max_bytes).
    ///
    /// A sixty-fourth part of it, from 256 KiB to 64 MiB, is how much of the values librdkafka may read ahead in one
    /// partition (`queued.max.messages.kbytes`, which can also be set as a property). It asks for more below that, and
    /// the answer comes on top: up to `fetch.message.max.bytes`, 1 MiB by default, or one batch of records.
    ///
    /// With many partitions, or small records, that could be more than this limit in all. So it is added up ten times a
    /// second, and partitions are paused in the client, which drops what it has read ahead of them: first those that have
    /// not been read for longest, and when all are being read, a few at a time in turns. What is dropped is fetched again
    /// later. Also paused is a partition with something to read that has not been read for five seconds, since it has
    /// used up what it may have, or since [you paused it](super::ConsumerHandle::pause).
    pub fn max_prefetch_bytes(mut self, bytes: usize) -> Self {
        self.max_prefetch_bytes = Some(bytes);
        self
    }

    /// When failed records are tried again. Default: [`Retry::default`], ten attempts from 100 ms on, some 50 s in all.
    ///
    /// A record that waits keeps the order that was asked for: by key, the later records of its key wait behind it.
    pub fn retry(mut self, retry: Retry) -> Self {
        self.retry = retry;
        self
    }

    /// Where records go that are not going to be tried again. Default: nowhere, see [`exhausted`](Self::exhausted).
    pub fn dead_letter(mut self, dead_letter: DeadLetter) -> Self {
        self.dead_letter = Some(dead_letter);
        self
    }

    /// What becomes of such records when there is no dead-letter topic. Default: [`Exhausted::Stop`].
    pub fn exhausted(mut self, exhausted: Exhausted) -> Self {
        self.exhausted = exhausted;
        self
    }

    /// Lets records whose attempts are used up wait in topics of their own for more attempts, before they are
    /// dead-lettered: see [`RetryTopics`]. Default: none.
    ///
    /// They are for errors that outlast the attempts in place by far, where holding back the partition's commit for that
    /// long is not wanted. Needs topics by name, no [`topic_pattern`](Self::topic_pattern), and
    /// [`Guarantee::AtLeastOnce`]. Under an [order](Self::ordering) they must be allowed by [`RetryTopics::reorder`].
    pub fn retry_topics(mut self, topics: RetryTopics) -> Self {
        self.retry_topics = Some(topics);
        self
    }

    /// What later records of a key do when one of that key was dead-lettered or moved to a retry topic. Default: nothing,
    /// they are handled. For effects that make no sense without the ones before. What that can promise, and until when a
    /// key is held, says [`HoldKey`].
    ///
    /// Needs [`Ordering::ByKey`], [`Guarantee::AtLeastOnce`] and a [dead-letter topic](Self::dead_letter).
    ///
    /// ```
    /// use reliable_consumer::{DeadLetter, HoldKey, ReliableConsumer};
    ///
    /// let builder = ReliableConsumer::builder()
    ///     .dead_letter(DeadLetter::topic("accounts.dlq"))
    ///     .hold_key(HoldKey::Follow);
    /// ```
    pub fn hold_key(mut self, policy: HoldKey) -> Self {
        self.hold_key = Some(policy);
        self
    }

    /// Has each message take effect once, although it comes twice: a store remembers which messages are in progress and
    /// which are done. Default: none, and a repeat is handled like any other record. Takes a
    /// [store](crate::idempotency::Store), or an [`Idempotency`] that says how it is used;
    /// [`idempotency`](crate::idempotency) helps to choose.
    ///
    /// Each attempt claims the record's message first. If it has been handled, the record is finished and counted in
    /// [`Report::duplicates`](super::Report::duplicates), and the handler is not called. If it is in progress elsewhere, the
    /// record waits as a [postponed](crate::postpone) one does. When the handler has returned `Ok`, the store is told, and
    /// then the record is finished; after an error (a [`skip`](crate::skip) too), a timeout or a panic the message is given
    /// up, so that the next attempt, a retry topic or a redrive finds it free. Records that are filtered, undecodable, or
    /// [held by their key](Self::hold_key) are not claimed.
    ///
    /// The price: two calls to the store a record. They take none of the places that [`concurrency`](Self::concurrency)
    /// gives to handlers: so many records more are claimed ahead, or completed, that handlers have work, up to 4,096. Those
    /// of a crash wait until their lease has lapsed. [`handler_timeout`](Self::handler_timeout) does not count the calls,
    /// [`stuck_after`](Self::stuck_after) does.
    ///
    /// ```
    /// use reliable_consumer::{ReliableConsumer, idempotency::MemoryStore};
    ///
    /// let builder = ReliableConsumer::builder().idempotency(MemoryStore::new(100_000));
    /// ```
    pub fn idempotency(mut self, store: impl Into<Idempotency>) -> Self {
        self.idempotency = Some(store.into());
        self
    }

    /// An attempt that takes longer than this has failed, and its future is dropped. Default: none, since what the
    /// handler had under way may still take effect. It is noticed at the handler's next `await`.
    pub fn handler_timeout(mut self, limit: Duration) -> Self {
        self.handler_timeout = Some(limit);
        self
    }

    /// A record that kills the process (it runs out of memory, or aborts) kills the next one as well, and so on. After
    /// so many deaths while it ran alone it is given up as [`Crashed`](crate::FailureKind::Crashed): it goes to the
    /// dead-letter topic, or [`exhausted`](Self::exhausted) decides. Default 3; `None` looks at no deaths.
    ///
    /// Deaths are found in the metadata of commits. A process that dies before the oldest unfinished record of a
    /// partition has moved leaves a mark there. The partition's next owner handles its records few at a time, the one
    /// after that, should it die as well, one at a time, each noted by a commit first. Only dying under a record so
    /// noted counts, and finishing it sets the count back: being killed from outside now and then costs some speed after
    /// the restart, and no healthy record. It takes a few more deaths than this limit, mostly three, until the record
    /// is set aside. Each process needs to be started again by somebody, with the same group.
    ///
    /// A lower limit is quicker. With 1 a single kill from outside at the wrong moment sets a healthy record aside. The
    /// price of having a limit at all: the first record of each assignment waits until the broker has acknowledged the
    /// mark, some milliseconds.
    ///
    /// ```
    /// # use reliable_consumer::ReliableConsumer;
    /// let patient = ReliableConsumer::builder().crash_limit(10);
    /// let off = ReliableConsumer::builder().crash_limit(None);
    /// ```
    pub fn crash_limit(mut self, deaths: impl Into<Option<u32>>) -> Self {
        self.crash_limit = deaths.into();
        self
    }

    /// Decides by the type of an error what happens to its record. Default: every error is retried. It is not asked
    /// where the handler has said so itself, nor about panics, timeouts and payloads that cannot be decoded.
    pub fn classifier(mut self, classifier: impl Classifier) -> Self {
        self.classifier = Some(Arc::new(classifier));
        self
    }

    /// When handling stops because a dependency is down, and how it goes on: see [`OutageBreaker`]. Default:
    /// [`OutageBreaker::new`], which does nothing before the handler or the classifier call an error an
    /// [`outage`](crate::outage). With `None` it never opens; records that meet an outage are tried again all the same,
    /// with nothing counted against them.
    pub fn outage_breaker(mut self, breaker: impl Into<Option<OutageBreaker>>) -> Self {
        self.breaker = breaker.into();
        self
    }

    /// Skips records for which `wanted` says no, before they are decoded. They count as finished. It runs on the
    /// runtime's threads, before each attempt, and must be quick.
    ///
    /// ```
    /// # use reliable_consumer::{Record, ReliableConsumer};
    /// let builder = ReliableConsumer::builder()
    ///     .filter(|record: &Record| record.headers().get("event-type") == Some(b"order-paid"));
    /// ```
    pub fn filter(mut self, wanted: impl Fn(&Record) -> bool + Send + Sync + 'static) -> Self {
        self.filter = Some(Arc::new(wanted));
        self
    }

    /// What becomes of records that a [`Redriver`](crate::Redriver) has sent back for another group on the same topic.
    /// Default: [`RedrivenForOthers::Skip`].
    pub fn redriven_for_others(mut self, policy: RedrivenForOthers) -> Self {
        self.redriven_for_others = policy;
        self
    }

    /// Consumes, for each [topic](Self::topic) by name, `<topic>.<group>.redrive` as well, where a
    /// [`Redriver`](crate::Redriver) puts records for this group when
    /// [told so](crate::RedriverBuilder::topic_per_group). With [`Routes`](crate::Routes) they go to the handler of
    /// `<topic>`. The topics must exist. Default: not.
    pub fn redrive_topics(mut self) -> Self {
        self.redrive_topics = true;
        self
    }

    /// How often what has finished is committed. Default one second: what a crash makes come again is at most what
    /// finished in that time. Nothing is sent while nothing has changed.
    pub fn commit_interval(mut self, interval: Duration) -> Self {
        self.commit_interval = interval;
        self
    }

    /// A record that holds up its partition for longer than this, or runs for longer, is named in the log, in
    /// [`Status::stuck`](super::Status::stuck) and as an [`Event::Stuck`](super::Event::Stuck), there again each time
    /// its age has doubled. Default one minute. It counts from the handler's start, from its first failure, or from its
    /// last [`report_progress`](crate::Message::report_progress); for a record that no handler was free for, from when
    /// it became the oldest unfinished one. Looked at once a second.
    pub fn stuck_after(mut self, age: Duration) -> Self {
        self.stuck_after = age;
        self
    }

    /// A record that holds up its partition for longer than this is given up: it goes to the dead-letter topic as
    /// [`Stuck`](crate::FailureKind::Stuck), or [`exhausted`](Self::exhausted) decides. Default: none, so that it is
    /// waited for, and the partition stops when its [`window`](Self::window) is full.
    ///
    /// Only the oldest unfinished record of a partition is given up, when it has been with its handler for that long
    /// (since its last [`report_progress`](crate::Message::report_progress)), or when its first failure is that long
    /// ago; whatever [`retry`](Self::retry) would still allow. It is looked at once a second.
    ///
    /// The price: a handler that is given up is [told](crate::Message::cancelled) and dropped at its `await`, and what it
    /// had under way elsewhere (a request, a blocking thread, a task of its own) may still take effect, although the
    /// record stands in the dead-letter topic. A handler that blocks its thread cannot be interrupted: its record is
    /// given up when the thread has come back, unless it has succeeded by then.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use reliable_consumer::{DeadLetter, ReliableConsumer};
    /// let builder = ReliableConsumer::builder()
    ///     .stuck_limit(Duration::from_secs(15 * 60))
    ///     .dead_letter(DeadLetter::topic("orders.dlq"));
    /// ```
    pub fn stuck_limit(mut self, limit: impl Into<Option<Duration>>) -> Self {
        self.stuck_limit = limit.into();
        self
    }

    /// Is told of partitions that come and go. Default: nobody.
    pub fn rebalance_listener(mut self, listener: impl RebalanceListener) -> Self {
        self.listener = Some(Arc::new(listener));
        self
    }

    /// How long a rebalance waits for handlers of partitions that are taken away, the last commit included. Partitions that stay
    /// are not fetched for that long: they go on with what has been read of them. Default 10 s; never more than half
    /// of `max.poll.interval.ms`, past which the group would throw this member out. At least once, what is not awaited comes
    /// again with the next owner; [at most once](Guarantee::AtMostOnce) it is dead-lettered.
    pub fn drain_timeout(mut self, limit: Duration) -> Self {
        self.drain_timeout = limit;
        self
    }

    /// How long a static member (`group.instance.id`) of a KIP-848 group waits at its start while the brokers say that
    /// another has its id. A process that was killed keeps it until its session has ended, which the brokers decide:
    /// `group.consumer.session.timeout.ms`, 45 s by default and 60 s at most unless their
    /// `group.consumer.max.session.timeout.ms` is raised. Past this the run ends with
    /// [`RunErrorKind::Fenced`](crate::RunErrorKind::Fenced). Default 75 s.
    pub fn instance_id_timeout(mut self, limit: Duration) -> Self {
        self.instance_id_timeout = limit;
        self
    }

    /// How long an orderly shutdown may take, from the signal to having left the group. Default 25 s, within the 30 s
    /// that Kubernetes gives a pod.
    pub fn shutdown_timeout(mut self, limit: Duration) -> Self {
        self.shutdown_timeout = limit;
        self
    }

    /// Any property of librdkafka's consumer. Connection settings are used for dead letters too. A name that does not
    /// exist, or one that would break what this library promises, is an error at [`build`](Self::build).
    ///
    /// ```
    /// use reliable_consumer::ReliableConsumer;
    ///
    /// let builder = ReliableConsumer::builder().bootstrap_servers("localhost:9092").group_id("g").topic("t");
    /// let error = builder.property("enable.auto.commit", "true").build().unwrap_err();
    /// assert!(error.to_string().starts_with("property `enable.auto.commit` cannot be set"));
    /// ```
    pub fn property(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.properties.set(name, value);
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
    pub fn build(mut self) -> Result<ReliableConsumer, BuildError> {
        let group = self.required("group.id", "group id", "group_id")?;
        self.required(
            "bootstrap.servers",
            "list of bootstrap servers",
            "bootstrap_servers",
        )?;
        if self.topics.is_empty() && self.pattern.is_none() {
            return Err(BuildError::Missing {
                what: "a topic",
                call: "topic",
            });
        }
        let mut topics = std::mem::take(&mut self.topics);
        topics.sort_unstable();
        topics.dedup();
        let first_topics = topics.clone();
        if self.redrive_topics {
            let own: Vec<_> = topics
                .iter()
                .map(|topic| redrive_topic(topic, &group))
                .collect();
            topics.extend(own);
        }
        topics.sort_unstable();
        // librdkafka refuses a subscription that names a topic twice.
        topics.dedup();
        for topic in &topics {
            check_topic("a topic", topic)?;
        }
        check("concurrency", self.concurrency, 1..=MAX_CONCURRENCY)?;
        check("window", self.window, 1..=(1 << 24))?;
        check("max_bytes", self.max_bytes, 1..=usize::MAX)?;
        check("max_records", self.max_records, 1..=usize::MAX)?;
        let max_prefetch_bytes = self
            .max_prefetch_bytes
            .unwrap_or_else(|| self.max_bytes.saturating_mul(2));
        check("max_prefetch_bytes", max_prefetch_bytes, 1..=usize::MAX)?;
        positive("commit_interval", self.commit_interval)?;
        positive("stuck_after", self.stuck_after)?;
        if let Some(limit) = self.stuck_limit {
            positive("stuck_limit", limit)?;
        }
        if let Some(limit) = self.crash_limit {
            check("crash_limit", limit as usize, 1..=u32::MAX as usize)?;
        }
        if let Some(limit) = self.handler_timeout {
            positive("handler_timeout", limit)?;
        }
        let pattern = self.pattern.as_deref().map(anchored).transpose()?;
        let subscription = Subscription { topics, pattern };
        if let Some(dead_letter) = &self.dead_letter {
            check_dead_letter(dead_letter, &subscription)?;
        }
        if let Some(retry_topics) = &self.retry_topics {
            self.check_retry_topics(retry_topics, &first_topics, &subscription)?;
        }
        if let Some(policy) = self.hold_key {
            self.check_hold_key(policy)?;
        }
        if let Some((what, value, reason)) = self.idempotency.as_ref().and_then(Idempotency::flaw) {
            let reason = reason.into();
            return Err(BuildError::Invalid {
                what,
                value,
                reason,
            });
        }
        let group: Arc<str> = group.into();
        let tiers = self.retry_topics.as_ref();
        let tiers = tiers.map(|topics| Tiers::new(topics, &first_topics, &group));
        let lasts = self
            .retry_topics
            .as_ref()
            .map_or(Duration::ZERO, RetryTopics::all_gone_through);
        let prefetch_kbytes = u32::try_from(max_prefetch_bytes / 64 / 1024)
            .unwrap_or(u32::MAX)
            .clamp(256, 65_536);
        let client = consumer_config(&self.properties, prefetch_kbytes)?;
        let own = self.dead_letter.as_ref().map(DeadLetter::producer);
        let producer = producer_config(&self.properties, &own.unwrap_or_default())?;
        // Any number that differs from process to process.
        let seed = RandomState::new().build_hasher().finish();
        Ok(ReliableConsumer::new(Settings {
            group,
            subscription,
            start: self.start,
            out_of_range: self.out_of_range,
            engine: engine::Config {
                ordering: self.ordering,
                guarantee: self.guarantee,
                concurrency: self.concurrency,
                window: self.window,
                max_bytes: self.max_bytes,
                max_records: self.max_records,
                retry: Arc::new(self.retry),
                commit_interval: self.commit_interval,
                crash_limit: self.crash_limit,
                breaker: self.breaker,
                seed,
            },
            handler_timeout: self.handler_timeout,
            classifier: self.classifier,
            filter: self.filter,
            redriven_for_others: self.redriven_for_others,
            stuck_after: self.stuck_after,
            stuck_limit: self.stuck_limit,
            max_prefetch_bytes,
            listener: self.listener,
            drain_timeout: self.drain_timeout,
            instance_id_timeout: self.instance_id_timeout,
            shutdown_timeout: self.shutdown_timeout,
            dead_letter: self.dead_letter,
            exhausted: self.exhausted,
            retry_topics: tiers.unwrap_or_default(),
            held_keys: self
                .hold_key
                .map(|policy| Arc::new(HeldKeys::new(policy, lasts))),
            idempotency: self.idempotency,
            client,
            producer,
            oauth: self.oauth,
        }))
    }

    fn check_retry_topics(
        &self,
        retry_topics: &RetryTopics,
        topics: &[String],
        subscription: &Subscription,
    ) -> Result<(), BuildError> {
        let invalid = |value: String, reason: &str| {
            Err(BuildError::Invalid {
                what: "retry topics",
                value,
                reason: reason.into(),
            })
        };
        let delays = &retry_topics.delays;
        if delays.is_empty() {
            return invalid("without delays".into(), "give at least one");
        }
        for (at, delay) in delays.iter().enumerate() {
            let value = format!("with a delay of {delay:?}");
            if delay.is_zero() || delay.subsec_nanos() % 1_000_000 > 0 {
                return invalid(value, "a delay is a number of milliseconds, from 1");
            }
            if delays[..at].contains(delay) {
                return invalid(format!("{value} twice"), "each has a topic of its own");
            }
        }
        if subscription.pattern.is_some() {
            let reason =
                "name the topics: which retry topics a pattern needs is not known beforehand";
            return invalid("of a topic pattern".into(), reason);
        }
        if self.guarantee == Guarantee::AtMostOnce {
            let reason =
                "a record that waits would have been committed, and be lost with the process";
            return invalid("used at most once".into(), reason);
        }
        let ordering = match self.ordering {
            Ordering::Unordered => None,
            Ordering::ByKey => Some("key"),
            Ordering::ByPartition => Some("partition"),
        };
        if let Some(ordering) = ordering.filter(|_| !retry_topics.reorder) {
            return Err(BuildError::RetryTopicsReorder { ordering });
        }
        let dead_letters = self.dead_letter.as_ref().map(|letters| &*letters.topic);
        let mut names = Vec::new();
        for topic in topics
            .iter()
            .flat_map(|topic| retry_topics.topics_of(topic))
        {
            let wrong = if !is_topic_name(&topic) {
                "has a name that is too long"
            } else if subscription.takes_in(&topic) {
                "is also among the topics to consume"
            } else if dead_letters == Some(&*topic) {
                "is also the dead-letter topic"
            } else if names.contains(&topic) {
                "would be shared by two topics"
            } else {
                names.push(topic);
                continue;
            };
            return Err(BuildError::RetryTopicName {
                topic,
                reason: wrong.into(),
            });
        }
        Ok(())
    }

    fn check_hold_key(&self, policy: HoldKey) -> Result<(), BuildError> {
        let reason = if self.ordering != Ordering::ByKey {
            "without `Ordering::ByKey` records of a key have no order that could be kept"
        } else if self.guarantee == Guarantee::AtMostOnce {
            "at most once, what waits would have been committed"
        } else if self.dead_letter.is_none() {
            "without a dead-letter topic nothing is set aside that could come back: call `dead_letter`"
        } else if policy == HoldKey::Wait && self.retry_topics.is_some() {
            "records that are to wait until one of their key has been tried again need no retry topics: let it be tried \
             again in place, with a longer `retry`; or choose `HoldKey::Follow`"
        } else {
            return Ok(());
        };
        Err(BuildError::Invalid {
            what: "hold_key",
            value: format!("{policy:?}"),
            reason: reason.into(),
        })
    }

    fn required(
        &self,
        property: &str,
        what: &'static str,
        call: &'static str,
    ) -> Result<String, BuildError> {
        let value = self
            .properties
            .get(property)
            .filter(|value| !value.is_empty());
        value
            .map(String::from)
            .ok_or(BuildError::Missing { what, call })
    }
}

fn check_dead_letter(
    dead_letter: &DeadLetter,
    subscription: &Subscription,
) -> Result<(), BuildError> {
    let topic = &*dead_letter.topic;
    check_topic("the dead-letter topic", topic)?;
    match &dead_letter.unavailable {
        Unavailable::Block => {}
        Unavailable::Stop { after } => positive("the time of Unavailable::Stop", *after)?,
        Unavailable::Spool {
            directory,
            max_bytes,
        } => {
            if directory.as_os_str().is_empty() {
                return Err(BuildError::Missing {
                    what: "the directory of Unavailable::Spool",
                    call: "unavailable",
                });
            }
            if *max_bytes == 0 {
                return Err(BuildError::Invalid {
                    what: "max_bytes of Unavailable::Spool",
                    value: "zero".into(),
                    reason: "give it room".into(),
                });
            }
        }
    }
    match subscription.taken_in_by(topic) {
        None => Ok(()),
        Some(subscription) => Err(BuildError::DeadLetterTopicConsumed {
            topic: topic.into(),
            subscription: subscription.into(),
        }),
    }
}

/// librdkafka would take a name that starts with `^` for a pattern, past all that is checked of patterns.
fn check_topic(what: &'static str, name: &str) -> Result<(), BuildError> {
    if is_topic_name(name) {
        return Ok(());
    }
    Err(BuildError::Invalid {
        what,
        value: format!("{name:?}"),
        reason: "a topic's name is 1 to 249 characters out of a-z, A-Z, 0-9, `.`, `_` and `-`; for a pattern call \
                 `topic_pattern`"
            .into(),
    })
}

/// librdkafka takes a topic for a pattern when it starts with `^`.
fn anchored(pattern: &str) -> Result<Regex, BuildError> {
    let text = if pattern.starts_with('^') {
        pattern.to_owned()
    } else {
        format!("^{pattern}")
    };
    Regex::new(&text).map_err(|error| BuildError::Pattern {
        pattern: pattern.to_owned(),
        reason: error.to_string(),
    })
}

fn check(
    what: &'static str,
    value: usize,
    allowed: std::ops::RangeInclusive<usize>,
) -> Result<(), BuildError> {
    if allowed.contains(&value) {
        return Ok(());
    }
    let reason = format!("choose from {} to {}", allowed.start(), allowed.end());
    Err(BuildError::Invalid {
        what,
        value: value.to_string(),
        reason,
    })
}

fn positive(what: &'static str, value: Duration) -> Result<(), BuildError> {
    if !value.is_zero() {
        return Ok(());
    }
    Err(BuildError::Invalid {
        what,
        value: "zero".into(),
        reason: "give it a time".into(),
    })
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder")
            .field("properties", &self.properties)
            .field("topics", &self.topics)
            .field("pattern", &self.pattern)
            .finish_non_exhaustive()
    }
}
