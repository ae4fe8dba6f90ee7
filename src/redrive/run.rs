//! A redriver at work: the handler of its consumer, the end of a run that has one, and a run that only looks.

use std::{
    fmt,
    future::{Future, IntoFuture},
    ops::Range,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use tokio::task::spawn_blocking;

use super::{
    Action, ParkReason, Plan, RedriveReport, Redriver,
    noting::note,
    outbox::{Obstacle, Outbox},
    report::Ledger,
    rules::{Return, Verdict},
};
use crate::{
    Handler, HandlerResult, Message, RunError,
    handler::{HandlerError, postpone},
    kafka::{AckedProducer, Cluster, Committed, InspectError, Next, Patience, generate_token},
    record::Record,
};

/// How soon a letter is tried again that was not taken.
const AGAIN: Duration = Duration::from_secs(1);
/// Letters that come while a run that ends is under way are for the next one.
const NOT_IN_THIS_RUN: Duration = Duration::from_secs(24 * 3600);
/// How often such a run looks whether it is through.
const LOOK: Duration = Duration::from_millis(200);
/// How long brokers may take.
const PATIENCE: Patience = Patience {
    answer: Duration::from_secs(10),
    silence: Duration::from_secs(60),
};

/// Why a redriver ended before it was told to. `Debug` shows the message, too.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum RedriveError {
    /// The brokers did not tell what has to be known before a run begins, or the topic could not be read.
    #[error(
        "{reason}; check the name of the topic, and run it again once the brokers are reachable"
    )]
    #[non_exhaustive]
    Brokers {
        /// What was asked, and what came of it.
        reason: String,
    },
    /// librdkafka did not create a client.
    #[error("a client could not be created: {reason}")]
    #[non_exhaustive]
    Client {
        /// librdkafka's own words.
        reason: String,
    },
    /// The consumer of the dead-letter topic ended. What was done up to then is committed as far as the brokers let us.
    #[error("{source}")]
    #[non_exhaustive]
    Consumer {
        /// Why.
        source: RunError,
        /// What had been done by then.
        report: Box<RedriveReport>,
    },
}

impl fmt::Debug for RedriveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<InspectError> for RedriveError {
    fn from(error: InspectError) -> Self {
        Self::Brokers {
            reason: error.to_string(),
        }
    }
}

/// A redriver, ready to be awaited. Dropping the future stops it at once: what is finished is committed in the background.
#[must_use = "a run does nothing until it is awaited"]
pub struct RedriveRun {
    redriver: Redriver,
    shutdown: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl RedriveRun {
    pub(super) fn new(redriver: Redriver) -> Self {
        Self {
            redriver,
            shutdown: None,
        }
    }

    /// Ends the run in order when `signal` completes, with whatever output.
    pub fn with_graceful_shutdown<F>(mut self, signal: F) -> Self
    where
        F: Future<Output: Send> + Send + 'static,
    {
        self.shutdown = Some(Box::pin(async move {
            signal.await;
        }));
        self
    }

    async fn live(self) -> Result<RedriveReport, RedriveError> {
        let Redriver {
            plan,
            consumer,
            handle,
        } = self.redriver;
        let ledger = Arc::clone(&handle.ledger);
        let cluster = cluster(&plan, &plan.group).await?;
        let unfiltered = unfiltered(&plan).await?;
        let snapshot = match plan.once {
            true => Some(Snapshot::take(&plan, &cluster, unfiltered.as_ref()).await?),
            false => None,
        };
        if let Some(snapshot) = &snapshot {
            ledger.open().total = Some(snapshot.total);
            if snapshot.is_through(&snapshot.finished) {
                // An earlier run may have been killed before it had noted what it had done.
                return Ok(RedriveReport {
                    not_noted: not_noted(&plan, &cluster, unfiltered).await,
                    ..RedriveReport::default()
                });
            }
        }
        let through = Arc::new(AtomicBool::new(false));
        let end = {
            let (cluster, through) = (Arc::clone(&cluster), Arc::clone(&through));
            let (plan, snapshot) = (Arc::clone(&plan), snapshot.clone());
            async move {
                let Some(snapshot) = snapshot else {
                    return std::future::pending().await;
                };
                snapshot.wait_until_through(&plan, &cluster).await;
                through.store(true, Ordering::Relaxed);
            }
        };
        let shutdown = self.shutdown;
        let signal = async move {
            match shutdown {
                Some(shutdown) => tokio::select! {
                    () = shutdown => {}
                    () = end => {}
                },
                None => end.await,
            }
        };
        let courier = Courier {
            outbox: Outbox::new(producer(&plan)?, Arc::clone(&cluster), plan.placement)?,
            plan: Arc::clone(&plan),
            ledger: Arc::clone(&ledger),
            snapshot,
        };
        let ended = consumer.run(courier).with_graceful_shutdown(signal).await;
        let not_noted = match &ended {
            Ok(_) => not_noted(&plan, &cluster, unfiltered).await,
            Err(_) => None,
        };
        let mut entries = ledger.open();
        let waiting = |report: &crate::Report| {
            let unfinished = report.unstarted + report.abandoned;
            match through.load(Ordering::Relaxed) {
                true => 0,
                false => unfinished.saturating_sub(entries.later),
            }
        };
        let waiting = match &ended {
            Ok(report) => waiting(report),
            Err(error) => waiting(error.report()),
        };
        entries.report.waiting = waiting;
        entries.report.not_noted = not_noted;
        let report = entries.report.clone();
        drop(entries);
        tracing::info!(
            redriven = report.redriven_total(),
            parked = report.parked_total(),
            waiting,
            "the redriver has ended"
        );
        match ended {
            Ok(_) => Ok(report),
            Err(source) => Err(RedriveError::Consumer {
                source,
                report: Box::new(report),
            }),
        }
    }
}

impl IntoFuture for RedriveRun {
    type Output = Result<RedriveReport, RedriveError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.live())
    }
}

impl std::fmt::Debug for RedriveRun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.redriver.fmt(f)
    }
}

/// The dead-letter topic as a run that ends has found it.
#[derive(Clone)]
struct Snapshot {
    spans: Vec<Range<i64>>,
    /// What this run's own group was done with by then.
    finished: Vec<Committed>,
    /// What the redriver without a filter was done with, if this one has a filter.
    before: Vec<Committed>,
    /// Letters to deal with, by their offsets.
    total: u64,
}

impl Snapshot {
    async fn take(
        plan: &Arc<Plan>,
        own: &Arc<Cluster>,
        unfiltered: Option<&Arc<Cluster>>,
    ) -> Result<Self, InspectError> {
        let source = plan.rules.source.clone();
        let spans = ask(own, move |cluster| {
            let partitions = 0..cluster.partitions(&source)?;
            let bounds = partitions.map(|partition| cluster.bounds(&source, partition));
            bounds.collect::<Result<Vec<_>, _>>()
        });
        let spans = spans.await?;
        let finished = finished(plan, own, spans.len()).await?;
        let before = match unfiltered {
            Some(unfiltered) => self::finished(plan, unfiltered, spans.len()).await?,
            None => Vec::new(),
        };
        let total = spans.iter().zip(&finished).map(|(span, finished)| {
            let from = finished.offset.unwrap_or(span.start).max(span.start);
            u64::try_from(span.end - from).unwrap_or(0)
        });
        let total = total.sum();
        Ok(Self {
            spans,
            finished,
            before,
            total,
        })
    }

    fn covers(&self, letter: &Record) -> bool {
        let span = usize::try_from(letter.partition())
            .ok()
            .and_then(|partition| self.spans.get(partition));
        span.is_some_and(|span| letter.offset() < span.end)
    }

    fn was_done_before(&self, letter: &Record) -> bool {
        let finished = usize::try_from(letter.partition())
            .ok()
            .and_then(|partition| self.before.get(partition));
        finished.is_some_and(|finished| finished.covers(letter.offset()))
    }

    fn is_through(&self, finished: &[Committed]) -> bool {
        self.spans.iter().zip(finished).all(|(span, finished)| {
            let reached = |committed| committed >= span.end;
            span.is_empty() || finished.offset.is_some_and(reached)
        })
    }

    /// Goes by what the group has committed: other processes may have their part of the partitions.
    async fn wait_until_through(&self, plan: &Arc<Plan>, own: &Arc<Cluster>) {
        loop {
            tokio::time::sleep(LOOK).await;
            match finished(plan, own, self.spans.len()).await {
                Ok(finished) if self.is_through(&finished) => return,
                Ok(_) => {}
                Err(error) => tracing::debug!(%error, "cannot see yet whether the run is through"),
            }
        }
    }
}

async fn ask<T: Send + 'static>(
    cluster: &Arc<Cluster>,
    question: impl FnOnce(&Cluster) -> Result<T, InspectError> + Send + 'static,
) -> Result<T, InspectError> {
    let cluster = Arc::clone(cluster);
    unpanicked(spawn_blocking(move || question(&cluster)).await)
}

/// The last that is asked, which may read all of the topic: whoever drops the future wants that to end.
async fn ask_at_length<T: Send + 'static>(
    cluster: &Arc<Cluster>,
    question: impl FnOnce(&Cluster) -> Result<T, InspectError> + Send + 'static,
) -> Result<T, InspectError> {
    struct Stop<'a>(&'a Cluster);

    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.stop();
        }
    }

    let _stop = Stop(cluster);
    ask(cluster, question).await
}

async fn cluster(plan: &Arc<Plan>, group: &str) -> Result<Arc<Cluster>, InspectError> {
    let (plan, group) = (Arc::clone(plan), group.to_owned());
    let made = spawn_blocking(move || {
        let (producer, oauth) = (plan.producer.clone(), plan.oauth.clone());
        Cluster::with(&plan.consumer, producer, &group, oauth, PATIENCE).map(Arc::new)
    });
    unpanicked(made.await)
}

/// As the redriver without a filter sees it, if this one has a filter.
async fn unfiltered(plan: &Arc<Plan>) -> Result<Option<Arc<Cluster>>, InspectError> {
    match &plan.unfiltered_group {
        Some(group) => cluster(plan, group).await.map(Some),
        None => Ok(None),
    }
}

/// Notes for the redriver without a filter what this one has done; tells why not.
async fn not_noted(
    plan: &Arc<Plan>,
    own: &Arc<Cluster>,
    unfiltered: Option<Arc<Cluster>>,
) -> Option<String> {
    let unfiltered = unfiltered?;
    let plan = Arc::clone(plan);
    let noted = ask_at_length(own, move |own| {
        note(&plan.rules.source, &plan.filter, own, &unfiltered)
    });
    let error = noted.await.err()?;
    tracing::warn!(
        %error,
        "what this run with a filter has done is not noted: a redriver without one will send it again"
    );
    Some(error.to_string())
}

fn unpanicked<T>(joined: Result<T, tokio::task::JoinError>) -> T {
    joined.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}

async fn finished(
    plan: &Arc<Plan>,
    cluster: &Arc<Cluster>,
    partitions: usize,
) -> Result<Vec<Committed>, InspectError> {
    let partitions = i32::try_from(partitions).unwrap_or(i32::MAX);
    let asked = [(plan.rules.source.clone(), partitions)];
    ask(cluster, move |cluster| cluster.committed(&asked)).await
}

fn producer(plan: &Plan) -> Result<AckedProducer, RedriveError> {
    let tokens = plan.oauth.clone().map(|provider| {
        let tokens = move |_: Option<&str>| generate_token(Some(&provider));
        Arc::new(tokens) as crate::kafka::TokenSource
    });
    AckedProducer::new(plan.producer.clone(), tokens).map_err(|error| RedriveError::Client {
        reason: error.to_string(),
    })
}

/// Unix milliseconds.
fn now() -> i64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// The handler of dead letters.
struct Courier {
    plan: Arc<Plan>,
    outbox: Outbox,
    ledger: Arc<Ledger>,
    snapshot: Option<Snapshot>,
}

impl Handler<Record> for Courier {
    async fn handle(&self, message: &Message<Record>) -> HandlerResult {
        let letter = message.record();
        if let Some(snapshot) = &self.snapshot {
            if !snapshot.covers(letter) {
                self.ledger.open().later += 1;
                return Err(postpone(
                    NOT_IN_THIS_RUN,
                    "it came after this run had begun",
                ));
            }
            if !self.plan.filter.matches(letter) {
                self.ledger.open().report.filtered += 1;
                return Ok(());
            }
            if snapshot.was_done_before(letter) {
                self.ledger.open().report.done_before += 1;
                return Ok(());
            }
        }
        match self.plan.rules.judge(letter, now()) {
            Verdict::Wait(wait) => Err(postpone(wait, "its time has not come")),
            Verdict::Park(reason) => self.park(message, reason, "").await,
            Verdict::SendBack(back) => self.send_back(message, back).await,
        }
    }
}

impl Courier {
    async fn send_back(&self, message: &Message<Record>, back: Return<'_>) -> HandlerResult {
        self.wait_for_my_turn().await;
        let letter = message.record();
        match self.outbox.send_back(letter, &back, now()).await {
            Ok(()) => {
                tracing::debug!(
                    dead_letter_topic = %letter.topic(),
                    partition = letter.partition(),
                    offset = letter.offset(),
                    topic = %back.topic,
                    retry_count = back.retry_count,
                    "sent back"
                );
                self.ledger.open().redriven(back.topic);
                Ok(())
            }
            Err(Obstacle::ForGood(reason, error)) => self.park(message, reason, &error).await,
            Err(Obstacle::ForNow(error)) => Err(self.stalled(&back.topic, error)),
        }
    }

    async fn park(
        &self,
        message: &Message<Record>,
        reason: ParkReason,
        error: &str,
    ) -> HandlerResult {
        let letter = message.record();
        let (partition, offset) = (letter.partition(), letter.offset());
        let rules = &self.plan.rules;
        if rules.action == Action::Unpark {
            tracing::info!(
                parking_lot = %letter.topic(),
                partition,
                offset,
                reason = reason.as_str(),
                error,
                "cannot be sent back; it stays parked"
            );
            self.ledger.open().left(reason);
            return Ok(());
        }
        let parked = self.outbox.park(letter, &rules.parking_lot, reason).await;
        if let Err(Obstacle::ForNow(error) | Obstacle::ForGood(_, error)) = parked {
            return Err(self.stalled(&rules.parking_lot, error));
        }
        tracing::info!(
            dead_letter_topic = %letter.topic(),
            partition,
            offset,
            parking_lot = %rules.parking_lot,
            reason = reason.as_str(),
            error,
            "parked"
        );
        self.ledger.open().parked(reason, &rules.parking_lot);
        Ok(())
    }

    fn stalled(&self, topic: &str, error: String) -> HandlerError {
        self.ledger.open().stalled(topic, &error);
        postpone(AGAIN, error)
    }

    /// No longer than a second or so: no more than a second's worth wait at a time.
    async fn wait_for_my_turn(&self) {
        if let Some(pace) = &self.plan.pace {
            let turn = pace.reserve(Instant::now());
            tokio::time::sleep_until(turn.into()).await;
        }
    }
}

/// See [`Redriver::dry_run`].
pub(super) async fn dry(redriver: Redriver) -> Result<RedriveReport, RedriveError> {
    let Redriver { plan, handle, .. } = redriver;
    let ledger = Arc::clone(&handle.ledger);
    let cluster = cluster(&plan, &plan.group).await?;
    let unfiltered = unfiltered(&plan).await?;
    let snapshot = Snapshot::take(&plan, &cluster, unfiltered.as_ref()).await?;
    ledger.open().total = Some(snapshot.total);
    let looked = ask_at_length(&cluster, move |cluster| {
        let spans = (0..).zip(snapshot.spans.iter().zip(&snapshot.finished));
        let spans: Vec<_> = spans
            .map(|(partition, (span, done))| {
                let from = done.offset.unwrap_or(0).max(span.start);
                (partition, from..span.end)
            })
            .collect();
        cluster.read(&plan.rules.source, &spans, |letter| {
            let done = &snapshot.finished[letter.partition() as usize];
            if !done.covers(letter.offset()) {
                look_at(&plan, &snapshot, &ledger, letter);
            }
            Ok(Next::More)
        })
    });
    looked.await?;
    Ok(handle.report())
}

fn look_at(plan: &Plan, snapshot: &Snapshot, ledger: &Ledger, letter: &Record) {
    let mut entries = ledger.open();
    if !plan.filter.matches(letter) {
        entries.report.filtered += 1;
    } else if snapshot.was_done_before(letter) {
        entries.report.done_before += 1;
    } else {
        match plan.rules.judge(letter, now()) {
            Verdict::Wait(_) => entries.report.waiting += 1,
            Verdict::Park(reason) if plan.rules.action == Action::Unpark => entries.left(reason),
            Verdict::Park(reason) => entries.parked(reason, &plan.rules.parking_lot),
            Verdict::SendBack(back) => entries.redriven(back.topic),
        }
    }
}

#[cfg(test)]
mod tests {
    use rdkafka::{
        mocking::MockCluster,
        producer::DefaultProducerContext,
        types::{RDKafkaApiKey, RDKafkaRespErr},
    };

    use super::*;
    use crate::{Disposition, MessageBuilder, header_names as names};

    struct World {
        cluster: MockCluster<'static, DefaultProducerContext>,
        courier: Courier,
    }

    impl World {
        async fn new() -> Self {
            let cluster = MockCluster::new(1).unwrap();
            for topic in ["orders", "orders.dlq", "orders.dlq.parked"] {
                cluster.create_topic(topic, 1, 1).unwrap();
            }
            let redriver = Redriver::builder()
                .bootstrap_servers(cluster.bootstrap_servers())
                .property("reconnect.backoff.max.ms", "200")
                .dead_letter_topic("orders.dlq")
                .allow("orders");
            let Redriver { plan, .. } = redriver.build().unwrap();
            let cluster_seen = super::cluster(&plan, &plan.group).await.unwrap();
            let outbox = Outbox::new(producer(&plan).unwrap(), cluster_seen, plan.placement);
            let courier = Courier {
                plan,
                outbox: outbox.unwrap(),
                ledger: Arc::default(),
                snapshot: None,
            };
            Self { cluster, courier }
        }

        fn counts(&self) -> (u64, u64) {
            let report = &self.courier.ledger.open().report;
            (report.redriven_total(), report.parked_total())
        }
    }

    fn letter(trips: &str) -> MessageBuilder {
        Message::builder()
            .topic("orders.dlq")
            .header(names::ORIGINAL_TOPIC, "orders")
            .header(names::ORIGINAL_PARTITION, "0")
            .header(names::ORIGINAL_OFFSET, "1")
            .header(names::ORIGINAL_TIMESTAMP, "1000")
            .header(names::RETRY_COUNT, trips)
    }

    // D7
    #[tokio::test]
    async fn a_letter_is_finished_when_its_record_is_acknowledged_and_not_before() {
        let world = World::new().await;
        for (trips, counts) in [("0", [(1, 0), (2, 0)]), ("5", [(2, 1), (2, 2)])] {
            let letter = letter(trips);
            let message = letter.clone().payload(letter.record());
            world.courier.handle(&message).await.unwrap();
            assert_eq!(world.counts(), counts[0]);
            world.cluster.broker_down(1).unwrap();
            let mut handling = std::pin::pin!(world.courier.handle(&message));
            let early = tokio::time::timeout(Duration::from_secs(1), &mut handling).await;
            assert!(early.is_err(), "nobody has acknowledged it");
            assert_eq!(world.counts(), counts[0]);
            world.cluster.broker_up(1).unwrap();
            handling.await.unwrap();
            assert_eq!(world.counts(), counts[1]);
        }
    }

    // D5
    #[tokio::test]
    async fn a_letter_that_is_refused_for_now_waits_without_a_mark_and_shows() {
        let world = World::new().await;
        for (trips, topic) in [("0", "orders"), ("5", "orders.dlq.parked")] {
            let refusal = RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED;
            let letter = letter(trips);
            let message = letter.clone().payload(letter.record());
            let before = world.counts();
            world
                .cluster
                .request_errors(RDKafkaApiKey::Produce, &[refusal]);
            let error = world.courier.handle(&message).await.unwrap_err();
            assert_eq!(error.disposition(), Disposition::Postpone(AGAIN));
            assert_eq!(world.counts(), before);
            let stalled = world.courier.ledger.open().stalled.clone();
            assert!(stalled[topic].contains("`Write`"), "{stalled:?}");
            // The client believes it until it hears otherwise.
            let began = Instant::now();
            while let Err(error) = world.courier.handle(&message).await {
                assert!(began.elapsed() < Duration::from_secs(15), "{error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            assert!(world.courier.ledger.open().stalled.is_empty());
            assert_ne!(world.counts(), before);
        }
    }
}
