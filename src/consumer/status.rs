//! What can be seen of a running consumer, and what it leaves behind.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};

use super::StuckRecord;
use crate::{
    engine::BreakerState,
    idempotency::{Duplicates, IdScope},
};

/// A consumer at one moment. See [`ConsumerHandle::status`](super::ConsumerHandle::status).
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Status {
    /// Partitions that this process owns, by topic and number.
    pub partitions: Vec<PartitionStatus>,
    /// Bytes of all records that are not finished.
    pub bytes: usize,
    /// Bytes that fetched records hold in memory, finished neighbours of unfinished ones included.
    pub resident_bytes: usize,
    /// Bytes that librdkafka has read ahead, estimated from the number of records ten times a second. See
    /// [`max_prefetch_bytes`](super::Builder::max_prefetch_bytes).
    pub prefetched_bytes: usize,
    /// Records that hold up their partition, or have been with their handler, for longer than
    /// [`stuck_after`](super::Builder::stuck_after): at most two a partition.
    pub stuck: Vec<StuckRecord>,
    /// Dead letters that the brokers have refused or not acknowledged for a while, by topic.
    pub stalled_dead_letters: Vec<StalledDeadLetters>,
    /// Dead letters that wait on the disk, under [`Unavailable::Spool`](crate::Unavailable::Spool). `None` until the
    /// directory has been looked through at the start.
    pub dead_letter_spool: Option<DeadLetterSpool>,
    /// What the outage breaker thinks of the handlers' dependencies.
    pub breaker: BreakerStatus,
    /// Keys whose later records wait or follow, see [`hold_key`](super::Builder::hold_key).
    pub held_keys: usize,
    /// What came of the idempotency store; `None` without [one](super::Builder::idempotency).
    pub idempotency: Option<IdempotencyStatus>,
    /// Whether it is a member of its group.
    pub membership: Membership,
    /// No broker can be reached, for this long: since an error said so, and until one answers.
    pub brokers_down: Option<Duration>,
}

impl Status {
    /// Records behind, over all partitions of this process; `None` until the end of each of them is known.
    pub fn lag(&self) -> Option<i64> {
        self.partitions
            .iter()
            .map(|partition| Some(partition.lag?.records))
            .sum()
    }

    /// Every partition that this process owns is handled and committed to its end, as far as that was known when it
    /// was last looked at. `false` while it owns none.
    pub fn is_caught_up(&self) -> bool {
        !self.partitions.is_empty()
            && self.lag() == Some(0)
            && self.partitions.iter().all(|partition| {
                partition.committed == partition.position && partition.stopped.is_none()
            })
    }
}

/// Whether a consumer is a member of its group. A consumer that is none has no partitions.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Membership {
    /// It is none yet, or not any more, and goes on trying.
    Joining {
        /// For how long.
        since: Duration,
        /// Why it takes so long. `None` in the first seconds.
        cause: Option<String>,
    },
    /// The group knows it. With more members than partitions it may have none of them.
    Member {
        /// For how long.
        since: Duration,
    },
}

/// The outage breaker at one moment. See [`OutageBreaker`](crate::OutageBreaker).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct BreakerStatus {
    /// Whether records are handled.
    pub state: BreakerState,
    /// How long ago it opened; `None` while it is closed.
    pub open_for: Option<Duration>,
    /// The time until the next probe, while it is open.
    pub next_probe: Option<Duration>,
}

/// What came of the idempotency store, since the run began. See [`Builder::idempotency`](super::Builder::idempotency).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct IdempotencyStatus {
    /// Within what an id names one message.
    pub scope: IdScope,
    /// What the store's server is set to that may have it forget ids early, or lose them, as far as it has been looked at. See
    /// [`UnsafeServer`](crate::idempotency::UnsafeServer).
    pub concerns: Vec<String>,
    /// As in [`Report::duplicates`].
    pub duplicates: Duplicates,
    /// As in [`Report::possible_repeats`].
    pub possible_repeats: u64,
    /// As in [`Report::id_conflicts`].
    pub id_conflicts: u64,
    /// As in [`Report::unusable_entries`].
    pub unusable_entries: u64,
    /// The store has not answered since it failed: for how long, from the first failure.
    pub down_for: Option<Duration>,
    /// What it failed with last.
    pub error: Option<String>,
}

/// Dead letters that do not get through. Their records stay unfinished, nothing is lost, and sending goes on.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct StalledDeadLetters {
    /// The dead-letter topic.
    pub topic: String,
    /// How many records wait.
    pub records: usize,
    /// When the first of them found it so.
    pub since: SystemTime,
    /// What the last attempt to send one met.
    pub error: String,
}

/// Dead letters that wait on the disk for their topic to be written again. See
/// [`Unavailable::Spool`](crate::Unavailable::Spool).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeadLetterSpool {
    /// Where they are.
    pub directory: PathBuf,
    /// Dead letters that are still to be sent.
    pub letters: usize,
    /// Bytes of all files in the directory; `max_bytes` bounds them.
    pub bytes: u64,
    /// When the oldest of them was written there, give or take those that are just being sent.
    pub oldest: Option<SystemTime>,
    /// Files with letters that were damaged on the disk, or that their topic does not take: `.damaged` and `.refused`
    /// in the directory. They are not sent; the refused ones are tried again by the next consumer on this directory.
    pub set_aside: usize,
    /// What the last attempt to send one met.
    pub send_error: Option<String>,
    /// Why no dead letter can be spooled now: the disk, the directory, its limit, or another process that uses it. Until
    /// that is over, records wait as under [`Unavailable::Block`](crate::Unavailable::Block).
    pub spool_error: Option<String>,
}

/// One partition of a [`Status`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct PartitionStatus {
    /// The topic.
    pub topic: Arc<str>,
    /// The partition's number.
    pub partition: i32,
    /// Whether it is ours, or just being given away.
    pub ownership: OwnershipState,
    /// The user asked that nothing of it is handled for now.
    pub paused: bool,
    /// It is not read, since going on would pass over records: see [`StopReason`].
    pub stopped: Option<StoppedPartition>,
    /// It is not read yet, since it is not known where it starts. Others go on, and it begins by itself.
    pub not_started: Option<NotStarted>,
    /// It could not be read the last time, and is tried again.
    pub fetch_error: Option<FetchError>,
    /// Offset of the next record to read; `None` before the first.
    pub position: Option<i64>,
    /// The offset that the broker has acknowledged as committed.
    pub committed: Option<i64>,
    /// Commits that failed in a row. Above zero the broker's view is older than ours.
    pub commit_failures: u32,
    /// How far the committed offset is behind the end of the partition.
    pub lag: Option<Lag>,
    /// Records that finished out of order: they wait for an older one before they can be committed.
    pub finished_out_of_order: usize,
    /// Finished records that a restart now would repeat: the last commit's metadata had no room to name them. They are
    /// those with the highest offsets; the brokers' `offset.metadata.max.bytes` (4,096 by default) is the limit.
    /// Above zero one record is far behind the others: see `oldest_running`.
    pub beyond_snapshot: usize,
    /// Records with a handler, or on the way to one.
    pub running: usize,
    /// Records read and not handed to a handler yet.
    pub queued: usize,
    /// Records of a [retry topic](crate::RetryTopics) that are not due yet, as far as they have been read.
    pub delayed: usize,
    /// Records that wait for their next attempt.
    pub retrying: usize,
    /// Records given up whose dead letter is not acknowledged yet.
    pub dead_lettering: usize,
    /// Bytes of its unfinished records.
    pub bytes: usize,
    /// Bytes that its fetched records hold in memory.
    pub resident_bytes: usize,
    /// It is not fetched for now, to keep to [`max_prefetch_bytes`](super::Builder::max_prefetch_bytes). It goes on by
    /// itself.
    pub fetch_paused: bool,
    /// The record that has been with its handler for longest.
    pub oldest_running: Option<RunningRecord>,
    /// The record that has waited for longest without running: behind its key or partition, for a handler to be free,
    /// or for its next attempt.
    pub oldest_waiting: Option<WaitingRecord>,
    /// Records that are still to be handled with care, few at a time or each alone: the process that had this partition
    /// before died, and one of them may be why. See [`crash_limit`](super::Builder::crash_limit).
    pub suspects: usize,
}

impl PartitionStatus {
    pub(crate) fn not_started(topic: Arc<str>, partition: i32, not_started: NotStarted) -> Self {
        Self {
            topic,
            partition,
            ownership: OwnershipState::Owned,
            paused: false,
            stopped: None,
            fetch_error: None,
            not_started: Some(not_started),
            position: None,
            committed: None,
            commit_failures: 0,
            lag: None,
            finished_out_of_order: 0,
            beyond_snapshot: 0,
            running: 0,
            queued: 0,
            delayed: 0,
            retrying: 0,
            dead_lettering: 0,
            bytes: 0,
            resident_bytes: 0,
            fetch_paused: false,
            oldest_running: None,
            oldest_waiting: None,
            suspects: 0,
        }
    }
}

/// Why a partition that is ours is not read yet. It is asked for again every second or so.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NotStarted {
    /// What is in the way.
    pub reason: NotStartedReason,
    /// What the broker or the client said, if anything.
    pub error: Option<String>,
    /// For how long, since the partition was assigned to us.
    pub waited: Duration,
}

/// What keeps a partition from being started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NotStartedReason {
    /// The group has no committed offset for it, and it has no leader, who alone knows where its log begins and ends.
    NoLeader,
    /// The group has no committed offset for it, and its leader does not say where its log begins and ends.
    LeaderUnavailable,
    /// The group's coordinator does not give its committed offset.
    CommittedOffsetUnavailable,
}

impl NotStartedReason {
    /// What can be done about it.
    pub(crate) fn advice(self) -> &'static str {
        match self {
            Self::NoLeader => {
                "see whether the brokers with its replicas are up; it starts when one of them leads it"
            }
            Self::LeaderUnavailable => {
                "see whether that broker is up and can be reached from here; it starts when it answers"
            }
            Self::CommittedOffsetUnavailable => {
                "see whether the group's coordinator is up, and whether a transaction with offsets of the group is open; it \
                 starts when there is an answer"
            }
        }
    }
}

impl std::fmt::Display for NotStartedReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::NoLeader => "it has no committed offset and no leader",
            Self::LeaderUnavailable => "it has no committed offset, and its leader does not answer",
            Self::CommittedOffsetUnavailable => "its committed offset cannot be read",
        })
    }
}

/// Why a partition is not read any further, and what somebody needs to know who decides where it goes on: see
/// [`ConsumerHandle::resume_at`](super::ConsumerHandle::resume_at).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoppedPartition {
    /// What happened to its log.
    pub reason: StopReason,
    /// The offset that should have been read next.
    pub position: i64,
    /// The offset that was committed when it stopped.
    pub committed: Option<i64>,
    /// The oldest offset in the log at that time: going on there skips what was deleted, and no more.
    pub log_start: i64,
    /// One past the newest.
    pub log_end: i64,
    /// Of a batch that cannot be read: what librdkafka says of it, with its offset, and what to do.
    pub error: Option<String>,
}

/// Why a partition is not read at the moment. Nothing of it is passed over.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FetchError {
    /// What the broker or the client said.
    pub error: String,
    /// How often in a row.
    pub attempts: u32,
    /// Since the first of them.
    pub lasting: Duration,
}

/// What happened to the log of a [`StoppedPartition`]: it is not what it was, or holds what cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// Records from the position on were deleted.
    Deleted,
    /// The log ends below the position, or did so: records that had been read are gone from it, and others may have taken
    /// their place.
    Truncated,
    /// A batch is compressed with a codec that this program was built without. [`StoppedPartition::error`] names the cargo
    /// feature.
    UnsupportedCodec,
    /// A batch has a format that librdkafka does not know.
    UnknownFormat,
    /// A batch is damaged: its checksum is wrong, or it cannot be decompressed. It was read three times.
    Corrupt,
    /// A record is larger than `receive.message.max.bytes` lets through.
    TooLarge,
}

impl std::fmt::Display for StopReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Deleted => "records were deleted before they were read",
            Self::Truncated => "the log was cut off below what had been read",
            Self::UnsupportedCodec => "a batch is compressed with a codec that is not built in",
            Self::UnknownFormat => "a batch has a format that this client does not know",
            Self::Corrupt => "a batch is damaged",
            Self::TooLarge => "a record is too large to be fetched",
        })
    }
}

/// Whether a partition is held or on its way out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OwnershipState {
    /// Ours.
    Owned,
    /// Being given away: what runs may finish, nothing new starts.
    Draining,
}

/// How far behind a partition is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Lag {
    /// Records between the committable offset and the end of the partition, by offset.
    pub records: i64,
    /// How long ago the end was looked at. It comes with every fetch and is noted once a second.
    pub age: Duration,
}

/// A record that is with its handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunningRecord {
    /// Its offset.
    pub offset: i64,
    /// For how long.
    pub age: Duration,
    /// Which call of the handler this is, from 1.
    pub attempt: u32,
}

/// A record that waits for a handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct WaitingRecord {
    /// Its offset.
    pub offset: i64,
    /// Since it was read, or its last attempt failed.
    pub age: Duration,
    /// Which call of the handler comes next, from 1.
    pub attempt: u32,
}

/// What a run did, from start to shutdown.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Report {
    /// Records read.
    pub received: u64,
    /// Records that an earlier owner of their partition had finished out of order: they were not handled again.
    pub already_finished: u64,
    /// Records whose handler succeeded.
    pub handled: u64,
    /// Records that a filter, handler or classifier skipped on purpose.
    pub skipped: u64,
    /// Records that were sent back from a dead-letter topic for another group, and passed over: see
    /// [`RedrivenForOthers`](crate::RedrivenForOthers).
    pub redriven_for_others: u64,
    /// Records whose message had been handled, by the [idempotency store](crate::Builder::idempotency).
    pub duplicates: Duplicates,
    /// Records that were handled and finished without the idempotency store's knowing of it: it could not be told before the
    /// lease had lapsed or the partition had to be given away, or they were not claimed, under
    /// [`Unreachable::Process`](crate::idempotency::Unreachable::Process). Should their messages come again, they are
    /// handled again. They are counted in `handled` as well.
    pub possible_repeats: u64,
    /// Records that were set aside as [`IdConflict`](crate::FailureKind::IdConflict).
    pub id_conflicts: u64,
    /// Attempts that failed because the [idempotency store](super::Builder::idempotency) cannot use what it has under the id
    /// of the message: something else wrote there. The error names the id. See
    /// [`StoreError::Entry`](crate::idempotency::StoreError::Entry).
    pub unusable_entries: u64,
    /// Records whose dead letter was acknowledged, or is in the spool.
    pub dead_lettered: u64,
    /// Records whose copy in a [retry topic](crate::RetryTopics) was acknowledged. They are received again from there, and
    /// counted as whatever becomes of them then.
    pub moved_to_retry: u64,
    /// Records given up without a dead letter, under [`Exhausted::Skip`](crate::Exhausted::Skip).
    pub dropped: u64,
    /// Failed attempts that were followed by another one.
    pub retried: u64,
    /// Attempts that ended with [`postpone`](crate::postpone): the record came again, and nothing counted against it. Also,
    /// once each, records that waited for their key to be [released](crate::HoldKey::Wait); and each look at one whose
    /// message is in progress elsewhere, by the [idempotency store](crate::Builder::idempotency).
    pub postponed: u64,
    /// Attempts that met an [`outage`](crate::outage), that of an idempotency store included: the record came again, and
    /// nothing counted against it.
    pub outages: u64,
    /// Records whose handler was still running at the deadline; at the end of the run it was cancelled. They come again,
    /// except [at most once](crate::Guarantee::AtMostOnce).
    pub abandoned: u64,
    /// Records read and not started, or waiting for a retry or a dead letter. They come again, except those that were
    /// committed [at most once](crate::Guarantee::AtMostOnce).
    pub unstarted: u64,
    /// Records that were received and had not finished when their log was cut off below them, see
    /// [`Event::LogTruncated`](super::Event::LogTruncated). What their handlers did after that is not counted.
    pub void: u64,
    /// Under [`Guarantee::AtMostOnce`](crate::Guarantee::AtMostOnce): records that were committed and neither handled nor
    /// dead-lettered. They do not come again. Each is told of when that is certain, by
    /// [`Event::CommittedUnhandled`](crate::Event::CommittedUnhandled) and in the log.
    pub committed_unhandled: u64,
    /// Where each partition stood when it was given up.
    pub partitions: Vec<PartitionReport>,
}

/// One partition of a [`Report`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PartitionReport {
    /// The topic.
    pub topic: Arc<str>,
    /// The partition's number.
    pub partition: i32,
    /// The offset that the broker has acknowledged; where the next owner goes on.
    pub committed: Option<i64>,
    /// What could have been committed. Above `committed` when brokers were away: those records come again.
    pub committable: Option<i64>,
}
