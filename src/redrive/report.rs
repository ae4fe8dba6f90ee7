//! What a redriver has done, and what it is at.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use super::ParkReason;
use crate::kafka::Throttle;

/// What a [`Redriver`](crate::Redriver) has done; for a [dry run](crate::Redriver::dry_run), what it would have done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RedriveReport {
    /// Letters sent back, by the topic they were sent to. Counted when all in-sync replicas have them.
    pub redriven: BTreeMap<String, u64>,
    /// Letters parked, by reason.
    pub parked: BTreeMap<ParkReason, u64>,
    /// Letters that an [`Action::Unpark`](crate::Action::Unpark) could not send back, by reason.
    pub left: BTreeMap<ParkReason, u64>,
    /// Letters that the [filter](crate::RedriverBuilder::filter) does not mean.
    pub filtered: u64,
    /// Letters that the filter means, and that the redriver without a filter was done with already.
    pub done_before: u64,
    /// Letters read and not finished: their time had not come, or a topic did not take them. They come again.
    pub waiting: u64,
    /// Why what this run has done could not be noted for the redriver without a filter: because that redriver is at work,
    /// for instance. It will send these letters again. `None` if all is noted, or if this run has no filter.
    pub not_noted: Option<String>,
}

impl RedriveReport {
    /// Letters sent back, to whatever topic.
    pub fn redriven_total(&self) -> u64 {
        self.redriven.values().sum()
    }

    /// Letters parked, for whatever reason.
    pub fn parked_total(&self) -> u64 {
        self.parked.values().sum()
    }

    /// All letters that are done with, in one way or another.
    pub fn finished_total(&self) -> u64 {
        let left: u64 = self.left.values().sum();
        self.redriven_total() + self.parked_total() + left + self.filtered + self.done_before
    }
}

/// A redriver at one moment. See [`RedriveHandle::status`](crate::RedriveHandle::status).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RedriveStatus {
    /// What this process has done so far. Its `waiting` are the letters that wait now.
    pub report: RedriveReport,
    /// Of a run that [ends](crate::RedriverBuilder::once): letters that lay before it when it began, by their offsets.
    /// `None` until that is known.
    pub total: Option<u64>,
    /// Letters between what is finished and the end of the topic, in the partitions that this process reads. `None` until
    /// that is known.
    pub lag: Option<u64>,
    /// Topics that do not take what is sent to them, with what the last attempt met. Their letters wait, and are tried
    /// again every second.
    pub stalled: BTreeMap<String, String>,
}

/// Where what happens is counted, while it happens.
#[derive(Default)]
pub(super) struct Ledger(Mutex<Entries>);

#[derive(Default)]
pub(super) struct Entries {
    pub(super) report: RedriveReport,
    pub(super) total: Option<u64>,
    /// Letters that came after a run that ends had begun.
    pub(super) later: u64,
    pub(super) stalled: BTreeMap<String, String>,
    log: BTreeMap<String, Throttle>,
}

impl Ledger {
    pub(super) fn open(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    pub(super) fn redriven(&mut self, topic: String) {
        self.stalled.remove(&topic);
        *self.report.redriven.entry(topic).or_default() += 1;
    }

    pub(super) fn parked(&mut self, reason: ParkReason, parking_lot: &str) {
        self.stalled.remove(parking_lot);
        *self.report.parked.entry(reason).or_default() += 1;
    }

    pub(super) fn left(&mut self, reason: ParkReason) {
        *self.report.left.entry(reason).or_default() += 1;
    }

    pub(super) fn stalled(&mut self, topic: &str, error: &str) {
        self.stalled.insert(topic.into(), error.into());
        let log = self.log.entry(topic.into()).or_default();
        if let Some(held_back) = log.admit(Instant::now()) {
            tracing::error!(
                %topic,
                error,
                held_back,
                "a dead letter cannot be sent; it stays unfinished and is tried again"
            );
        }
    }
}
