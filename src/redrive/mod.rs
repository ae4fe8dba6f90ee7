//! Dead letters on their way back: to the topic they came from, or to the parking lot.

mod builder;
mod filter;
mod noting;
mod outbox;
mod pace;
mod placement;
mod report;
mod rules;
mod run;

use std::sync::Arc;

use crate::{ConsumerHandle, HandleError, OAuthTokenProvider, ReliableConsumer, consumer::Status};

pub use self::{
    builder::RedriverBuilder,
    filter::LetterFilter,
    placement::Placement,
    report::{RedriveReport, RedriveStatus},
    rules::{Action, ParkReason},
    run::{RedriveError, RedriveRun},
};
use self::{pace::Pace, report::Ledger, rules::Rules};

/// Consumes a dead-letter topic and sends each record back to the topic it came from, until it has been sent back often
/// enough: then it goes to the *parking lot*, a topic for people to look at.
///
/// ```no_run
/// use reliable_consumer::Redriver;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let redriver = Redriver::builder()
///     .bootstrap_servers("localhost:9092")
///     .dead_letter_topic("orders.dlq")
///     .allow("orders") // No header can send a record anywhere else.
///     .build()?;
/// let stop = async { tokio::signal::ctrl_c().await.expect("signals can be received") };
/// let report = redriver.run().with_graceful_shutdown(stop).await?;
/// println!("{} sent back, {} parked", report.redriven_total(), report.parked_total());
/// # Ok(())
/// # }
/// ```
///
/// A record goes back with its key, its value and its headers, a `retryCount` one higher, its first timestamp, and the
/// name of the group that it failed for in the header [`redriveGroup`](crate::header_names::REDRIVE_GROUP). Its `messageId`
/// and `original…` headers are kept, or written where a letter of [another system](crate::Dialect) has none, so that it is
/// the same message on every trip. Where the topic's retention or `message.timestamp.before.max.ms` would not let a record
/// of that age be, it goes with the current time. [`Placement`] says to which partition. Its letter counts as finished
/// when all in-sync replicas have the record (`acks=all`, `enable.idempotence=true`).
///
/// # Waiting
///
/// A record waits before it goes back, longer each time ([`backoff`](RedriverBuilder::backoff)), counted from
/// `failedAt`. Letters whose time has come pass those that wait, within the consumer's
/// [window](RedriverBuilder::window) of each partition. The order among records of a key is not kept: it was given up
/// when the first of them was dead-lettered.
///
/// # Stopping and starting
///
/// The redriver is a [`ReliableConsumer`](crate::ReliableConsumer) of the dead-letter topic, in a group of its own. What
/// it is done with is what its group has committed. It can be stopped, killed and started again at any time, and several
/// may run. After a death, records that were sent and not committed yet are sent again, with the same `messageId`.
///
/// A dead-letter topic is a log: what has been sent back stays in it until retention deletes it, and a tool that lists
/// the topic shows it still. What is *left* in it is what the redriver's group is not done with.
///
/// # Runs by hand
///
/// [`once`](RedriverBuilder::once) makes a run that ends with the letters that are there when it begins, and lets none of
/// them wait. With a [`filter`](RedriverBuilder::filter) it sends some of them only. Such a run has a group of its own,
/// named after the filter: interrupted and run again it goes on where it was, and what it leaves out stays where it is, for
/// the redriver without a filter too. It passes over what that one is done with.
///
/// The other way round, what it has done is noted for the group of the redriver without a filter when the run ends, which
/// needs that group to be idle: then nobody sends it again. Where that cannot be, because that redriver is at work, or
/// because of too many separate letters for a note beside a committed offset,
/// [`RedriveReport::not_noted`] says so, and they will be sent twice. The same run, started again, notes what an earlier one
/// could not. Don't end two runs with different filters on a topic at the same moment: the later note may replace the
/// other.
///
/// # Several groups on a topic
///
/// A record that goes back to its topic is seen by all groups there. Consumers of this library pass over what is meant
/// for [others](crate::RedrivenForOthers). Where some group on the topic does not use this library, and must not see
/// records twice, choose a [topic for each group](RedriverBuilder::topic_per_group) instead.
pub struct Redriver {
    plan: Arc<Plan>,
    consumer: ReliableConsumer,
    handle: RedriveHandle,
}

/// All that has been settled when a redriver is built.
struct Plan {
    rules: Rules,
    group: String,
    /// The group of the redriver without a filter, if this one has a filter.
    unfiltered_group: Option<String>,
    filter: LetterFilter,
    placement: Placement,
    pace: Option<Pace>,
    once: bool,
    consumer: rdkafka::ClientConfig,
    producer: rdkafka::ClientConfig,
    oauth: Option<Arc<dyn OAuthTokenProvider>>,
}

impl Redriver {
    /// Starts to build one.
    pub fn builder() -> RedriverBuilder {
        RedriverBuilder::new()
    }

    /// A handle to steer and watch the run.
    pub fn handle(&self) -> RedriveHandle {
        self.handle.clone()
    }

    /// The consumer group in which it reads the dead-letter topic.
    pub fn group_id(&self) -> &str {
        &self.plan.group
    }

    /// Redrives until it is shut down or cannot go on; one that is to run [once](RedriverBuilder::once), until it is
    /// through. Does nothing until awaited.
    pub fn run(self) -> RedriveRun {
        RedriveRun::new(self)
    }

    /// Tells what a run would do with the letters that are there now, and changes nothing: nothing is sent, nothing is
    /// committed, no group is joined. What a topic would say to a record that is sent to it is not found out.
    /// Dropping the future ends it.
    ///
    /// # Errors
    ///
    /// [`RedriveError::Brokers`] if the topic cannot be read.
    pub async fn dry_run(self) -> Result<RedriveReport, RedriveError> {
        run::dry(self).await
    }
}

impl std::fmt::Debug for Redriver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Redriver")
            .field("rules", &self.plan.rules)
            .field("group", &self.plan.group)
            .field("filter", &self.plan.filter)
            .field("once", &self.plan.once)
            .finish_non_exhaustive()
    }
}

/// Steers and watches a [`Redriver`]. Clones are cheap and all mean the same one.
#[derive(Clone)]
pub struct RedriveHandle {
    consumer: ConsumerHandle,
    ledger: Arc<Ledger>,
    topic: Arc<str>,
}

impl RedriveHandle {
    /// Ends the run in order: what is being sent may arrive, what is finished is committed.
    ///
    /// # Errors
    ///
    /// [`HandleError::NotRunning`] if it has ended already; so for all of these methods.
    pub fn shutdown(&self) -> Result<(), HandleError> {
        self.consumer.shutdown()
    }

    /// Ends the run at once.
    pub fn stop_now(&self) -> Result<(), HandleError> {
        self.consumer.stop_now()
    }

    /// Sends nothing more until [`resume`](Self::resume).
    pub fn pause(&self) -> Result<(), HandleError> {
        self.consumer.pause(&*self.topic)
    }

    /// Undoes a [`pause`](Self::pause).
    pub fn resume(&self) -> Result<(), HandleError> {
        self.consumer.resume(&*self.topic)
    }

    /// What has been done so far, in a dry run too. Answered at once.
    pub fn report(&self) -> RedriveReport {
        self.ledger.open().report.clone()
    }

    /// Where everything stands. Answered by the consumer's own thread within 15 s or not at all, as
    /// [`ConsumerHandle::status`] is.
    ///
    /// # Errors
    ///
    /// [`HandleError::NotRunning`] after the run has ended and in a dry run, [`HandleError::TimedOut`] after 15 s.
    pub async fn status(&self) -> Result<RedriveStatus, HandleError> {
        let status = self.consumer.status().await?;
        let entries = self.ledger.open();
        let mut report = entries.report.clone();
        report.waiting = waiting(&status).saturating_sub(entries.later);
        Ok(RedriveStatus {
            report,
            total: entries.total,
            lag: status.lag().and_then(|lag| u64::try_from(lag).ok()),
            stalled: entries.stalled.clone(),
        })
    }
}

fn waiting(status: &Status) -> u64 {
    let partitions = status.partitions.iter();
    partitions.map(|partition| partition.retrying as u64).sum()
}

impl std::fmt::Debug for RedriveHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedriveHandle")
            .field("topic", &self.topic)
            .finish_non_exhaustive()
    }
}

/// The topic in which records of `topic` come back for this group alone.
pub(crate) fn redrive_topic(topic: &str, group: &str) -> String {
    format!("{topic}.{group}.redrive")
}

/// Whose redrive topic it is, if it is one of this group.
pub(crate) fn redriven_from<'a>(topic: &'a str, group: &str) -> Option<&'a str> {
    let rest = topic.strip_suffix(".redrive")?;
    rest.strip_suffix(group)?.strip_suffix('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redrive_topic_is_known_by_its_group() {
        let topic = redrive_topic("orders.eu", "billing");
        assert_eq!(topic, "orders.eu.billing.redrive");
        assert_eq!(redriven_from(&topic, "billing"), Some("orders.eu"));
        assert_eq!(redriven_from(&topic, "shipping"), None);
        assert_eq!(redriven_from("orders.eu", "billing"), None);
    }
}
