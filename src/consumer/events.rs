//! What happens to a running consumer, as it happens.

use std::{sync::Arc, time::Duration};

use tokio::sync::broadcast::{self, error::RecvError};

use super::{DeadLetterSpool, NotStartedReason, StoppedPartition};
use crate::{RecordState, record::Source};

/// A partition of a topic.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub struct TopicPartition {
    /// The topic.
    pub topic: Arc<str>,
    /// The partition's number.
    pub partition: i32,
}

impl TopicPartition {
    pub(crate) fn of(source: &Source) -> Self {
        Self {
            topic: Arc::clone(&source.topic),
            partition: source.partition,
        }
    }
}

/// Something that happened to a consumer. See [`ConsumerHandle::events`](super::ConsumerHandle::events).
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Event {
    /// These partitions are ours from now on, and are read.
    Assigned(Vec<TopicPartition>),
    /// These partitions are ours, and not read yet: it is not known where they start. Others go on. Told once, and again when
    /// the reason changes; [`Assigned`](Self::Assigned) follows when they start.
    NotStarted {
        /// The partitions.
        partitions: Vec<TopicPartition>,
        /// What is in the way.
        reason: NotStartedReason,
        /// What the broker or the client said, if anything.
        error: Option<String>,
    },
    /// These partitions went to another member; what had finished in them is committed, as far as the brokers let us.
    Revoked(Vec<TopicPartition>),
    /// These partitions were lost: the group had given them to others before we knew.
    Lost(Vec<TopicPartition>),
    /// No broker can be reached. Handlers go on with what has been read.
    BrokersDown,
    /// A broker answers again, after this long.
    BrokersUp(Duration),
    /// The consumer is not a member of its group yet, or not any more, and waits for that to change. Told after some
    /// seconds, and again each time that the wait has doubled. What waiting cannot mend ends the run instead.
    Joining {
        /// For how long.
        waiting: Duration,
        /// What keeps it from joining.
        cause: String,
    },
    /// The consumer leaves its group and joins it again: an answer of the group's coordinator was lost, and the two differ in
    /// which partitions are its own. Only under KIP-848 (`group.protocol=consumer`). The partitions that it has are drained
    /// and given away first, as in any rebalance.
    Rejoining {
        /// What the group says that it has, and it has not: nobody has handled these.
        missing: Vec<TopicPartition>,
        /// What the group has taken away, and it still has: other members wait for these.
        surplus: Vec<TopicPartition>,
    },
    /// It has become a member, after [`Joining`](Self::Joining).
    Joined {
        /// After this long.
        after: Duration,
    },
    /// A dependency of the handlers is down: the outage breaker has opened, and nothing is handled but probes. See
    /// [`OutageBreaker`](crate::OutageBreaker).
    BreakerOpened {
        /// Attempts within the window that met an outage.
        outages: u64,
        /// All attempts within the window that tell of the dependency.
        attempts: u64,
        /// The time until the first probe.
        next_probe: Duration,
    },
    /// The dependency is still down, by a probe, or by too many of the records let through after one.
    BreakerProbeFailed {
        /// The time until the next probe.
        next_probe: Duration,
    },
    /// A probe succeeded: more and more records are let through.
    BreakerOpening,
    /// The outage is over, and handling goes on at full speed.
    BreakerClosed {
        /// Since the breaker opened.
        after: Duration,
    },
    /// Dead letters wait on the disk, under [`Unavailable::Spool`](crate::Unavailable::Spool). Told when the first one
    /// does and once a minute from then on, when all are sent, when some had to be set aside, and when none can be
    /// spooled or can be again.
    DeadLetterSpool(DeadLetterSpool),
    /// The [idempotency store](super::Builder::idempotency) does not answer, or refuses. What becomes of records meanwhile
    /// [`Unreachable`](crate::idempotency::Unreachable) decides. Looked at once a second.
    IdempotencyStoreDown {
        /// What it failed with last.
        error: String,
    },
    /// The idempotency store answers again, and has done so for a second.
    IdempotencyStoreUp {
        /// Since its first failure.
        after: Duration,
    },
    /// A commit of this partition failed; it is tried again with what is newest then.
    CommitFailed {
        /// The partition.
        partition: TopicPartition,
        /// What the broker said.
        error: String,
    },
    /// A record holds up its partition, or has been with its handler, for longer than
    /// [`stuck_after`](super::Builder::stuck_after). Told again each time its age has doubled.
    Stuck(StuckRecord),
    /// The log of this partition began anew: offsets at or below `last` came again. Unfinished records below `offset` are
    /// handled as before.
    LogReset {
        /// The partition.
        partition: TopicPartition,
        /// The last offset of the old log that was read.
        last: i64,
        /// The first of the new one.
        offset: i64,
        /// Records from there on that had been read and were not finished: they are let go, as others have their offsets.
        void: usize,
    },
    /// Records were deleted before the group had read them, or the log was cut off below what it had read. What becomes of
    /// that [`OutOfRange`](super::OutOfRange) decides.
    OffsetOutOfRange {
        /// The partition.
        partition: TopicPartition,
        /// The offset that should have been read next.
        position: i64,
        /// The oldest offset in the log.
        log_start: i64,
        /// One past the newest.
        log_end: i64,
        /// Where reading goes on; `None` when it does not, and the partition or the run has stopped.
        resumed_at: Option<i64>,
        /// How many offsets that had not been read are passed over by that, at most.
        skipped: i64,
        /// Where the log was cut off: records from `resumed_at` on that had been read and were not finished. They are let
        /// go, as others have their offsets.
        void: usize,
    },
    /// This partition cannot be read, and is tried again. Nothing of it is passed over. Told each time that the number of
    /// attempts has doubled.
    FetchFailed {
        /// The partition.
        partition: TopicPartition,
        /// The offset that is to be read next.
        position: i64,
        /// What the broker or the client said.
        error: String,
        /// How often in a row.
        attempts: u32,
    },
    /// This partition is not read any further: it holds a batch that cannot be read. Others go on; see
    /// [`ConsumerHandle::resume_at`](super::ConsumerHandle::resume_at).
    PartitionStopped {
        /// The partition.
        partition: TopicPartition,
        /// Why, and what can be done.
        stopped: StoppedPartition,
    },
    /// The log of this partition was cut off below the position, and is read from there: nothing is skipped. Records from
    /// `start` on that had been handled are not in the log any more, and others may have taken their offsets. Unfinished
    /// records below are handled as before, and nothing that finished there is handled again.
    LogTruncated {
        /// The partition.
        partition: TopicPartition,
        /// The offset that should have been read next.
        position: i64,
        /// Where the log was cut, and reading goes on.
        start: i64,
        /// Records from there on that had been read and were not finished. Those that had not started do not; handlers that
        /// run are told that they are cancelled, and whatever they answer changes nothing. A dead letter that is on its way
        /// is not called back.
        void: usize,
    },
    /// The topic was deleted and made anew under the same name. This partition is read from the start of the new one.
    TopicRecreated {
        /// The partition.
        partition: TopicPartition,
        /// Where it stood in the old one; the committed offset if it was noticed at an assignment, and 0 if there was none.
        position: i64,
        /// Where it starts in the new one.
        start: i64,
    },
    /// This partition was added to a topic that the group reads already. It is read from its start, whatever the
    /// [`StartPolicy`](super::StartPolicy).
    PartitionAdded {
        /// The partition.
        partition: TopicPartition,
        /// Where it starts.
        start: i64,
    },
    /// Under [`Guarantee::AtMostOnce`](crate::Guarantee::AtMostOnce): records were committed and are handled by nobody, since
    /// their partition is gone or the run ends. Without a crash there are never more of them, in all partitions together,
    /// than twice the [`concurrency`](super::Builder::concurrency).
    CommittedUnhandled(CommittedUnhandled),
    /// The topic of this partition is new to a group that reads others by the same pattern. It is read from its start, whatever
    /// the [`StartPolicy`](super::StartPolicy).
    TopicAdded {
        /// The partition.
        partition: TopicPartition,
        /// Where it starts.
        start: i64,
    },
    /// The group has no committed offset in this partition, but in others of its topic: it was deleted, or has expired.
    CommittedOffsetMissing {
        /// The partition.
        partition: TopicPartition,
        /// Where it starts: at the log's start if it is known that the group has read it, so that what was handled comes again.
        /// Otherwise, as in a group that is just beginning, where the [`StartPolicy`](super::StartPolicy) says.
        start: i64,
        /// How many offsets before that are not read, at most.
        skipped: i64,
    },
    /// This many events were not taken in time and are gone.
    Missed(u64),
}

/// Records that were committed and will not be handled. They are still in the log.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CommittedUnhandled {
    /// Where they are.
    pub partition: TopicPartition,
    /// How many. Others between the first and the last have finished.
    pub records: usize,
    /// The lowest of their offsets.
    pub first_offset: i64,
    /// The highest.
    pub last_offset: i64,
    /// Of these, records whose handler runs: it may have had its effect, or have it yet.
    pub running: usize,
    /// Of these, records whose dead letter is on its way and was not acknowledged in time: it may arrive.
    pub dead_lettering: usize,
    /// Of these, records whose commit was not answered: if it was not applied, they come again.
    pub in_doubt: usize,
}

/// A record that holds up its partition, or runs for very long.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StuckRecord {
    /// Where it is.
    pub partition: TopicPartition,
    /// Its offset.
    pub offset: i64,
    /// Tells keys apart without showing them: the same for the same key for as long as this process lives. `None` for a
    /// null key.
    pub key_hash: Option<u32>,
    /// What it waits for.
    pub state: RecordState,
    /// For how long it has held things up: since its handler started or last reported progress, or since its first
    /// failure if that is longer ago; if it has not been called yet, since it became the oldest unfinished one.
    pub age: Duration,
    /// How long the call that runs has been running, since its last progress; `None` if none runs.
    pub run_age: Option<Duration>,
    /// How long it has waited without running, since it was read or last failed; `None` while it runs.
    pub queue_age: Option<Duration>,
    /// Which call of the handler this is, from 1; of one that waits, which comes next.
    pub attempt: u32,
    /// Finished records behind it. They cannot be committed before it finishes.
    pub holds_back: usize,
}

/// The events of a consumer, from [`ConsumerHandle::events`](super::ConsumerHandle::events).
#[derive(Debug)]
pub struct Events(broadcast::Receiver<Event>);

impl Events {
    pub(super) fn new(receiver: broadcast::Receiver<Event>) -> Self {
        Self(receiver)
    }

    /// The next event; `None` when the run is over. Up to 1,024 events wait for whoever is slow.
    pub async fn next(&mut self) -> Option<Event> {
        match self.0.recv().await {
            Ok(event) => Some(event),
            Err(RecvError::Lagged(missed)) => Some(Event::Missed(missed)),
            Err(RecvError::Closed) => None,
        }
    }
}

/// Is told of partitions that come and go, in time to keep what belongs to them: caches, files, connections.
///
/// Called on the consumer's own thread, which does nothing else meanwhile: be quick, and do not block. A panic here is
/// logged and goes no further.
///
/// ```
/// use reliable_consumer::{RebalanceListener, TopicPartition};
///
/// struct Caches;
///
/// impl RebalanceListener for Caches {
///     fn revoked(&self, partitions: &[TopicPartition]) {
///         for partition in partitions {
///             println!("the cache of {}/{} is not needed any more", partition.topic, partition.partition);
///         }
///     }
/// }
/// ```
pub trait RebalanceListener: Send + Sync + 'static {
    /// These partitions are ours; none of their records has been handled yet.
    fn assigned(&self, partitions: &[TopicPartition]) {
        let _ = partitions;
    }

    /// These partitions are about to go to another member. Their handlers have ended or run out of time, and what had
    /// finished is committed.
    fn revoked(&self, partitions: &[TopicPartition]) {
        let _ = partitions;
    }

    /// These partitions are gone: another member may be at work on them, and handlers of ours may still run. By default
    /// the same as [`revoked`](Self::revoked).
    fn lost(&self, partitions: &[TopicPartition]) {
        self.revoked(partitions);
    }
}
