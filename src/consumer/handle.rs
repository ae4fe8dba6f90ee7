//! Steering and watching a run from outside.

use std::{sync::Arc, time::Duration};

use tokio::sync::{broadcast, oneshot};

use super::{Event, Events, HandleError, Status, Subscription};
use crate::{
    held_keys::HeldKeys,
    kafka::{Control, Controls, Selection},
};

/// How long an answer may take: longer than a rebalance that goes well.
const ANSWER: Duration = Duration::from_secs(15);
/// How long a run may take to begin that is being spawned at the same time.
const BEGIN: Duration = Duration::from_secs(1);
/// Between two looks whether it has.
const LOOK: Duration = Duration::from_millis(5);

/// What a consumer reads, or may come to read.
pub(super) struct Readable {
    pub(super) subscription: Subscription,
    pub(super) retry_topics: Vec<String>,
}

impl Readable {
    fn check(&self, topic: String) -> Result<String, HandleError> {
        if self.subscription.takes_in(&topic) || self.retry_topics.contains(&topic) {
            return Ok(topic);
        }
        let names = self.subscription.names().into_iter();
        let names = names.chain(self.retry_topics.iter().map(String::as_str));
        let names: Vec<_> = names.map(|name| format!("`{name}`")).collect();
        Err(HandleError::NotSubscribed {
            topic,
            subscribed: names.join(", "),
        })
    }
}

/// Steers and watches a run. Clones are cheap and all mean the same consumer.
///
/// ```no_run
/// # async fn example(consumer: reliable_consumer::ReliableConsumer) -> Result<(), Box<dyn std::error::Error>> {
/// let handle = consumer.handle();
/// tokio::spawn(async move {
///     while let Ok(status) = handle.status().await {
///         for partition in status.partitions {
///             println!("{}/{}: {:?}", partition.topic, partition.partition, partition.lag);
///         }
///         tokio::time::sleep(std::time::Duration::from_secs(10)).await;
///     }
/// });
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct ConsumerHandle {
    controls: Controls,
    events: broadcast::WeakSender<Event>,
    held_keys: Option<Arc<HeldKeys>>,
    shutdown_timeout: Duration,
    readable: Arc<Readable>,
}

impl ConsumerHandle {
    pub(super) fn new(
        controls: Controls,
        events: broadcast::WeakSender<Event>,
        held_keys: Option<Arc<HeldKeys>>,
        shutdown_timeout: Duration,
        readable: Readable,
    ) -> Self {
        Self {
            controls,
            events,
            held_keys,
            shutdown_timeout,
            readable: Arc::new(readable),
        }
    }

    pub(super) fn controls(&self) -> &Controls {
        &self.controls
    }

    /// Ends the run in order, within [`shutdown_timeout`](super::Builder::shutdown_timeout): see
    /// [`shutdown_within`](Self::shutdown_within).
    ///
    /// # Errors
    ///
    /// [`HandleError::NotRunning`] if it has ended already; so for all of these methods.
    pub fn shutdown(&self) -> Result<(), HandleError> {
        self.shutdown_within(self.shutdown_timeout)
    }

    /// Ends the run in order, within this time: nothing new is started, what runs may finish, what is finished is
    /// committed, the group is left. Returns at once; the run's own result is the report.
    ///
    /// A shorter time given later holds.
    ///
    /// # Errors
    ///
    /// [`HandleError::NotRunning`] if it has ended already.
    pub fn shutdown_within(&self, limit: Duration) -> Result<(), HandleError> {
        self.send(Control::Shutdown(limit))
    }

    /// Ends the run at once: handlers are cancelled, what is finished is committed, the group is left, each within two
    /// seconds.
    pub fn stop_now(&self) -> Result<(), HandleError> {
        self.send(Control::StopNow)
    }

    /// Starts no more handlers for this topic and its [retry topics](crate::RetryTopics), in partitions that come later too. What runs goes on, the partitions
    /// stay ours, and nothing more is read than fits into memory. [At most once](crate::Guarantee::AtMostOnce) what is committed
    /// already is still handled.
    pub fn pause(&self, topic: impl Into<String>) -> Result<(), HandleError> {
        self.send(Control::Pause(Selection {
            topic: self.readable.check(topic.into())?,
            partition: None,
        }))
    }

    /// Like [`pause`](Self::pause) for one partition.
    pub fn pause_partition(
        &self,
        topic: impl Into<String>,
        partition: i32,
    ) -> Result<(), HandleError> {
        self.send(Control::Pause(Selection {
            topic: self.readable.check(topic.into())?,
            partition: Some(partition),
        }))
    }

    /// Undoes every pause of this topic.
    pub fn resume(&self, topic: impl Into<String>) -> Result<(), HandleError> {
        self.send(Control::Resume(Selection {
            topic: self.readable.check(topic.into())?,
            partition: None,
        }))
    }

    /// Undoes a [`pause_partition`](Self::pause_partition).
    pub fn resume_partition(
        &self,
        topic: impl Into<String>,
        partition: i32,
    ) -> Result<(), HandleError> {
        self.send(Control::Resume(Selection {
            topic: self.readable.check(topic.into())?,
            partition: Some(partition),
        }))
    }

    /// Goes on with a partition that was stopped because its position is not in the log any more, see
    /// [`OutOfRange`](super::OutOfRange). `offset` is where: usually
    /// [`StoppedPartition::log_start`](super::StoppedPartition::log_start), which skips only what is gone. It is committed
    /// as soon as what is unfinished below it has finished.
    ///
    /// # Errors
    ///
    /// [`HandleError::NotStopped`] if that partition is not stopped in this process; and as [`status`](Self::status).
    ///
    /// ```no_run
    /// # async fn example(handle: reliable_consumer::ConsumerHandle) -> Result<(), reliable_consumer::HandleError> {
    /// for partition in handle.status().await?.partitions {
    ///     if let Some(stopped) = partition.stopped {
    ///         println!("{}/{}: {}", partition.topic, partition.partition, stopped.reason);
    ///         handle.resume_at(&*partition.topic, partition.partition, stopped.log_start).await?;
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn resume_at(
        &self,
        topic: impl Into<String>,
        partition: i32,
        offset: i64,
    ) -> Result<(), HandleError> {
        self.has_begun().await?;
        let (answer, answered) = oneshot::channel();
        self.send(Control::ResumeAt {
            topic: topic.into(),
            partition,
            // Below it there is nothing, and librdkafka takes such numbers for something else.
            offset: offset.max(0),
            answer,
        })?;
        match self.answer(answered).await? {
            true => Ok(()),
            false => Err(HandleError::NotStopped),
        }
    }

    /// Releases a key that is [held](super::Builder::hold_key) in this topic and its retry topics: its later records are
    /// handled from now on, those that wait for it within a second. `false`: it is not held in this process. Which keys
    /// are held is known only to the member of the group that has their partition: ask all of them.
    ///
    /// ```no_run
    /// # fn example(handle: reliable_consumer::ConsumerHandle) {
    /// if handle.release_key("orders", "customer-17") {
    ///     println!("customer 17 goes on");
    /// }
    /// # }
    /// ```
    pub fn release_key(&self, topic: &str, key: impl AsRef<[u8]>) -> bool {
        let held = self.held_keys.as_ref();
        held.is_some_and(|held| held.release(topic, key.as_ref()))
    }

    /// Where everything stands. Answered by the consumer's own thread, within milliseconds as a rule.
    ///
    /// # Errors
    ///
    /// [`HandleError::NotStarted`] if the run has not begun and does not within a second, [`HandleError::NotRunning`] after it
    /// has ended, [`HandleError::TimedOut`] after 15 s.
    pub async fn status(&self) -> Result<Status, HandleError> {
        self.has_begun().await?;
        let (answer, answered) = oneshot::channel();
        self.send(Control::Status(answer))?;
        self.answer(answered).await
    }

    async fn has_begun(&self) -> Result<(), HandleError> {
        let looks = BEGIN.as_millis() / LOOK.as_millis();
        for _ in 0..looks {
            if self.controls.have_begun() {
                return Ok(());
            }
            if self.events.strong_count() == 0 {
                return Err(HandleError::NotRunning);
            }
            tokio::time::sleep(LOOK).await;
        }
        Err(HandleError::NotStarted)
    }

    async fn answer<T>(&self, answered: oneshot::Receiver<T>) -> Result<T, HandleError> {
        match tokio::time::timeout(ANSWER, answered).await {
            Ok(answer) => answer.map_err(|_| HandleError::NotRunning),
            Err(_) => Err(HandleError::TimedOut(ANSWER)),
        }
    }

    /// What happens from now on: assignments, outages, stuck records, trouble with commits and with the log.
    ///
    /// # Errors
    ///
    /// [`HandleError::NotRunning`] when the run is over.
    ///
    /// ```no_run
    /// # use reliable_consumer::{Event, ReliableConsumer};
    /// # fn example(consumer: &ReliableConsumer) -> Result<(), Box<dyn std::error::Error>> {
    /// let mut events = consumer.handle().events()?;
    /// tokio::spawn(async move {
    ///     while let Some(event) = events.next().await {
    ///         if let Event::Stuck(record) = event {
    ///             eprintln!("offset {} has been at it for {:?}", record.offset, record.age);
    ///         }
    ///     }
    /// });
    /// # Ok(())
    /// # }
    /// ```
    pub fn events(&self) -> Result<Events, HandleError> {
        let sender = self.events.upgrade().ok_or(HandleError::NotRunning)?;
        Ok(Events::new(sender.subscribe()))
    }

    fn send(&self, control: Control) -> Result<(), HandleError> {
        self.controls
            .send(control)
            .then_some(())
            .ok_or(HandleError::NotRunning)
    }
}

impl std::fmt::Debug for ConsumerHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConsumerHandle").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::{Builder, ReliableConsumer, RetryTopics};

    fn builder() -> Builder {
        ReliableConsumer::builder()
            .bootstrap_servers("localhost:1")
            .group_id("shipping")
            .topic("orders")
    }

    #[tokio::test]
    async fn before_the_run_the_status_says_soon_that_there_is_none_and_after_it_that_it_is_over() {
        let consumer = builder().build().unwrap();
        let handle = consumer.handle();
        let asked = Instant::now();
        assert_eq!(handle.status().await, Err(HandleError::NotStarted));
        let resumed = handle.resume_at("orders", 0, 0).await;
        assert_eq!(resumed, Err(HandleError::NotStarted));
        assert!(asked.elapsed() < ANSWER);
        drop(consumer);
        assert_eq!(handle.status().await, Err(HandleError::NotRunning));
    }

    #[test]
    fn a_topic_that_is_not_read_can_be_neither_paused_nor_resumed() {
        let tiers = RetryTopics::new([Duration::from_secs(10)]).reorder(true);
        let retried = builder().retry_topics(tiers);
        let matched = builder().topic_pattern("^returns\\..*");
        for (builder, other) in [(retried, "orders.retry.10s"), (matched, "returns.eu")] {
            let consumer = builder.build().unwrap();
            let handle = consumer.handle();
            for topic in ["orders", other] {
                handle.pause(topic).unwrap();
                handle.resume_partition(topic, 1).unwrap();
            }
            for refused in [
                handle.pause("odrers"),
                handle.pause_partition("odrers", 0),
                handle.resume("odrers"),
                handle.resume_partition("odrers", 0),
            ] {
                let error = refused.unwrap_err().to_string();
                let known = &other[..other.len().min("returns".len())];
                for name in ["`odrers`", "`orders`", known] {
                    assert!(error.contains(name), "{error}");
                }
            }
        }
    }
}
