//! When which offsets are committed, and what the broker's answers mean.
//!
//! One commit is in flight at a time and it always carries the newest state. What has been committed is known only
//! from an answer; after an error nothing is known about any of the partitions it named (librdkafka reports one
//! partition's error on its neighbours), so they are committed again, apart from the others and in ever smaller groups,
//! until the broker accepts them: see [`Doubt`].

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use super::Ownership;

/// Pause after a commit that failed, doubled up to [`SLOWEST`] while failures go on.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const SLOWEST: Duration = Duration::from_secs(10);
/// How often all that is owned is committed again, whether anything has changed or not. The broker does not check who
/// owns a partition: a late commit of an earlier owner sets it back, people and tools write over metadata, and nobody is
/// told. A restart after that repeats records, so it should not stay for long.
pub(super) const RECOMMIT: Duration = Duration::from_secs(60);

/// What to ask of the broker: one offset for each of these partitions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Commit {
    pub(crate) entries: Vec<CommitEntry>,
}

/// One partition's part of a [`Commit`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommitEntry {
    pub owner: Ownership,
    pub offset: i64,
    /// What is finished above the offset, see [`snapshot`](super::snapshot).
    pub metadata: String,
    /// Finished records for which the metadata had no room: they are handed out again after a restart now.
    pub cut: usize,
    /// The partition's state that this carries, see [`Committed::is_due`].
    pub(super) version: u64,
    /// Sequence of the lowest unfinished record.
    pub(super) passed: u64,
    /// It names a record that is to run alone, see [`suspects`](super::suspects).
    pub(super) noted: bool,
}

/// How the broker took one partition of a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CommitResult {
    Accepted,
    /// The metadata is longer than this broker takes: of one partition, or of all that the commit names.
    Shrink,
    /// Passing trouble with a broker, the coordinator or an authorisation: wait, and tell somebody.
    Unavailable,
    /// The group is rebalancing, or this member is no longer part of it: nothing to do here. The next rebalance either
    /// takes the partition away or lets a later commit through.
    Rejoining,
    /// Never going to work: the consumer must stop.
    Fatal,
}

/// What is known of one partition's committed offset.
#[derive(Debug, Default)]
pub(crate) struct Committed {
    /// The broker's last word.
    pub(crate) offset: Option<i64>,
    /// Version of the state that the broker has acknowledged.
    version: Option<u64>,
    /// The last answer was an error: this partition is committed apart from those that are well until it goes through.
    apart: bool,
    /// That error may have been a neighbour's.
    doubtful: bool,
    /// That error said that this member is out of the group's current generation, or has no say in the group any more.
    in_vain: bool,
    /// Consecutive failures, and when to try again.
    failures: u32,
    not_before: Option<Instant>,
}

impl Committed {
    pub(crate) fn at(offset: Option<i64>) -> Self {
        Self {
            offset,
            ..Self::default()
        }
    }

    /// Whether there is a state worth sending. `version` counts every finished record, so that what finished above an
    /// unmoved watermark is due as well.
    pub(crate) fn is_due(&self, version: u64) -> bool {
        self.version != Some(version) && version > 0
    }

    /// What the broker has is not known to be what it acknowledged last.
    pub(super) fn is_in_doubt(&self) -> bool {
        self.version.is_none()
    }

    pub(crate) fn may_send(&self, now: Instant) -> bool {
        self.not_before.is_none_or(|at| at <= now)
    }

    pub(crate) fn goes_apart(&self) -> bool {
        self.apart
    }

    pub(crate) fn is_doubtful(&self) -> bool {
        self.doubtful
    }

    pub(crate) fn failures(&self) -> u32 {
        self.failures
    }

    pub(crate) fn accepted(&mut self, offset: i64, version: u64) {
        *self = Self {
            offset: Some(offset),
            version: Some(version),
            ..Self::default()
        };
    }

    /// The log was cut off at this offset: what the broker has says nothing of the records that are above it now, and is
    /// to be replaced.
    pub(super) fn cut_off(&mut self, offset: i64) {
        self.offset = self.offset.map(|known| known.min(offset));
        self.doubt();
    }

    /// What the broker has may not be what it acknowledged any more.
    pub(super) fn doubt(&mut self) {
        self.version = None;
    }

    /// It shared a commit with a partition that failed: what became of its own part is not known.
    pub(crate) fn isolate(&mut self) {
        (self.apart, self.doubtful) = (true, true);
        self.version = None;
    }

    /// The partition is given away: what has failed before says nothing about its last commit.
    pub(super) fn begin_last(&mut self) {
        (self.failures, self.not_before, self.in_vain) = (0, None, false);
    }

    /// When a last commit that failed may be sent again, unless this member cannot expect it to go through.
    pub(super) fn last_retry(&self) -> Option<Instant> {
        self.not_before.filter(|_| !self.in_vain)
    }

    pub(crate) fn failed(&mut self, now: Instant, in_vain: bool) {
        let pause = FIRST_PAUSE
            .saturating_mul(1 << self.failures.min(8))
            .min(SLOWEST);
        self.failures = self.failures.saturating_add(1);
        (self.apart, self.doubtful, self.in_vain) = (true, false, in_vain);
        self.version = None;
        self.not_before = Some(now + pause);
    }
}

/// How many of those whose commit has failed share the next one.
///
/// A group that fails is halved as long as it fails, and one that goes through doubles the next: of `n` partitions the `k`
/// that fail by themselves are found in some `4 k log2 n` commits. Where everything fails there is nobody to be found. So
/// when a commit fails as a whole and the coordinator has accepted none lately, a single partition is sent to find out: if
/// that fails too, all of them pause, and an outage costs one commit a pause.
#[derive(Debug)]
pub(super) struct Doubt {
    /// How many may share a commit.
    company: usize,
    /// How many were in the commit that failed as a whole, while a single one is sent to find out.
    probing: Option<usize>,
    /// Where the last of those was: the next one is another, since that one may be the only one that fails.
    probed: usize,
    accepted_at: Option<Instant>,
}

impl Doubt {
    pub(super) fn none() -> Self {
        Self {
            company: usize::MAX,
            probing: None,
            probed: 0,
            accepted_at: None,
        }
    }

    /// Which of these partitions, given by their slots in order, go into the next commit.
    pub(super) fn choose(&mut self, slots: &[usize]) -> Range<usize> {
        if self.probing.is_none() {
            return 0..slots.len().min(self.company);
        }
        let after = slots.iter().position(|slot| *slot > self.probed);
        let at = after.unwrap_or(0);
        slots.get(at).map_or(0..0, |slot| {
            self.probed = *slot;
            at..at + 1
        })
    }

    /// A commit went through.
    pub(super) fn accepted(&mut self, now: Instant) {
        self.accepted_at = Some(now);
        self.company = match self.probing.take() {
            Some(failed) => (failed / 2).max(1),
            None => self.company.saturating_mul(2),
        };
    }

    /// One of so many partitions failed for reasons of its own.
    pub(super) fn some_failed(&mut self, of: usize, now: Instant) {
        self.accepted_at = Some(now);
        self.halve(of);
    }

    /// All of so many partitions failed in the same way.
    pub(super) fn all_failed(&mut self, of: usize, now: Instant) {
        if self.is_answering(now) {
            self.halve(of);
        } else {
            self.probing = Some(of);
        }
    }

    /// This member has no say in the group, whatever it commits.
    pub(super) fn in_vain(&mut self) {
        (self.company, self.probing) = (usize::MAX, None);
    }

    /// Whether the coordinator has accepted something so lately that a failure is that of a partition.
    pub(super) fn is_answering(&self, now: Instant) -> bool {
        let lately = |at| now.saturating_duration_since(at) < FIRST_PAUSE;
        self.accepted_at.is_some_and(lately)
    }

    fn halve(&mut self, of: usize) {
        (self.company, self.probing) = ((of / 2).max(1), None);
    }
}
