//! Steering and watching a run from outside.

use std::{sync::Arc, time::Duration};

use tokio::sync::{broadcast, oneshot};

use super::{Event, Events, HandleError, Status};
use crate::{
    held_keys::HeldKeys,
    kafka::{Control, Controls, Selection},
};

/// How long an answer may take: longer than a rebalance that goes well.
const ANSWER: Duration = Duration::from_secs(15);

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
}

impl ConsumerHandle {
    pub(super) fn new(
        controls: Controls,
        events: broadcast::WeakSender<Event>,
        held_keys: Option<Arc<HeldKeys>>,
        shutdown_timeout: Duration,
    ) -> Self {
        Self {
            controls,
            events,
            held_keys,
            shutdown_timeout,
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
            topic: topic.into(),
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
            topic: topic.into(),
            partition: Some(partition),
        }))
    }

    /// Undoes every pause of this topic.
    pub fn resume(&self, topic: impl Into<String>) -> Result<(), HandleError> {
        self.send(Control::Resume(Selection {
            topic: topic.into(),
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
            topic: topic.into(),
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
    /// [`HandleError::NotStopped`] if that partition is not stopped in this process, [`HandleError::NotRunning`] after the
    /// run has ended, [`HandleError::TimedOut`] after 15 s.
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

    /// Where everything stands. Answered by the consumer's own thread within 15 s or not at all; before the run begins,
    /// the answer waits for that.
    ///
    /// # Errors
    ///
    /// [`HandleError::NotRunning`] after the run has ended, [`HandleError::TimedOut`] after 15 s.
    pub async fn status(&self) -> Result<Status, HandleError> {
        let (answer, answered) = oneshot::channel();
        self.send(Control::Status(answer))?;
        self.answer(answered).await
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
