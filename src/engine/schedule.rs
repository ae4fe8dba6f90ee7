//! Records that wait for their next attempt.

use std::{cmp::Ordering, collections::BinaryHeap, time::Instant};

use super::{
    Ownership,
    lanes::{LaneId, Queued},
};

/// A record in front of its lane that is handed out again at `due`.
#[derive(Debug)]
pub(crate) struct Waiting<R> {
    pub(crate) due: Instant,
    /// Breaks ties: what failed first is retried first.
    turn: u64,
    pub(crate) owner: Ownership,
    pub(crate) lane: LaneId,
    pub(crate) queued: Queued<R>,
    /// It waits for a dependency, and not because of itself.
    pub(crate) outage: bool,
}

impl<R> PartialEq for Waiting<R> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl<R> Eq for Waiting<R> {}
impl<R> PartialOrd for Waiting<R> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl<R> Ord for Waiting<R> {
    /// Reversed: `BinaryHeap` gives the greatest first, and the soonest is wanted.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.due, other.turn).cmp(&(self.due, self.turn))
    }
}

/// All retries of all partitions, soonest first. Bounded by the windows: a waiting record is unfinished.
#[derive(Debug)]
pub(crate) struct Schedule<R> {
    waiting: BinaryHeap<Waiting<R>>,
    turns: u64,
}

impl<R> Schedule<R> {
    pub(crate) fn new() -> Self {
        Self {
            waiting: BinaryHeap::new(),
            turns: 0,
        }
    }

    pub(crate) fn insert(
        &mut self,
        due: Instant,
        owner: Ownership,
        lane: LaneId,
        queued: Queued<R>,
        outage: bool,
    ) {
        self.turns += 1;
        self.waiting.push(Waiting {
            due,
            turn: self.turns,
            owner,
            lane,
            queued,
            outage,
        });
    }

    /// What waits for a dependency is due now, the oldest first: the breaker says when it goes on.
    pub(crate) fn end_outage_waits(&mut self, now: Instant) {
        let mut waiting = std::mem::take(&mut self.waiting).into_vec();
        for waiting in waiting.iter_mut().filter(|waiting| waiting.outage) {
            waiting.due = waiting.due.min(now);
            waiting.turn = waiting.queued.seq;
        }
        self.waiting = waiting.into();
    }

    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.waiting.peek().map(|first| first.due)
    }

    pub(crate) fn take_due(&mut self, now: Instant) -> Option<Waiting<R>> {
        if self.next_due()? > now {
            return None;
        }
        self.waiting.pop()
    }

    /// Takes a record out before it is due.
    pub(crate) fn take(&mut self, owner: Ownership, seq: u64) -> Option<(LaneId, Queued<R>)> {
        let wanted = |waiting: &Waiting<R>| waiting.owner == owner && waiting.queued.seq == seq;
        if !self.waiting.iter().any(wanted) {
            return None;
        }
        let mut waiting = std::mem::take(&mut self.waiting).into_vec();
        let at = waiting.iter().position(wanted)?;
        let Waiting { lane, queued, .. } = waiting.swap_remove(at);
        self.waiting = waiting.into();
        Some((lane, queued))
    }

    /// Takes out what waits for this partition and is due after `by`, or all of it, what is due first in front.
    pub(crate) fn take_of(
        &mut self,
        owner: Ownership,
        by: Option<Instant>,
    ) -> Vec<(LaneId, Queued<R>)> {
        let wanted =
            |waiting: &Waiting<R>| waiting.owner == owner && by.is_none_or(|by| waiting.due > by);
        if !self.waiting.iter().any(wanted) {
            return Vec::new();
        }
        let (taken, kept): (Vec<_>, Vec<_>) = std::mem::take(&mut self.waiting)
            .into_sorted_vec()
            .into_iter()
            .rev()
            .partition(wanted);
        self.waiting = kept.into();
        let taken = taken.into_iter();
        taken
            .map(|waiting| (waiting.lane, waiting.queued))
            .collect()
    }

    /// How many wait, of all partitions.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn count(&self, owner: Ownership) -> usize {
        self.waiting
            .iter()
            .filter(|waiting| waiting.owner == owner)
            .count()
    }

    /// Drops what waits for a partition from this sequence on, and returns the lanes that are held by that.
    pub(crate) fn cut_off(&mut self, owner: Ownership, first: u64) -> Vec<LaneId> {
        let mut lanes = Vec::new();
        self.waiting.retain(|waiting| {
            let void = waiting.owner == owner && waiting.queued.seq >= first;
            if void {
                lanes.push(waiting.lane);
            }
            !void
        });
        lanes
    }

    /// Drops what waits for a partition that is given away.
    pub(crate) fn forget(&mut self, owner: Ownership) {
        self.waiting.retain(|waiting| waiting.owner != owner);
    }
}
