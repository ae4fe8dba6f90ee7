//! Records that wait for their next attempt.

use std::{
    cmp::Ordering,
    collections::{BTreeSet, BinaryHeap},
    mem,
    time::Instant,
};

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

/// All retries, soonest first: a heap for each partition, so that what is asked about one, or ends with it, costs nothing
/// for the others. Bounded by the windows: a waiting record is unfinished.
#[derive(Debug)]
pub(crate) struct Schedule<R> {
    /// By [`Ownership::slot`]: of the ownership that has it now, since all of the one before is forgotten.
    waiting: Vec<BinaryHeap<Waiting<R>>>,
    /// Of each partition that has any the soonest: when, its `turn`, and the partition's slot.
    soonest: BTreeSet<(Instant, u64, usize)>,
    len: usize,
    turns: u64,
}

impl<R> Schedule<R> {
    pub(crate) fn new() -> Self {
        Self {
            waiting: Vec::new(),
            soonest: BTreeSet::new(),
            len: 0,
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
        let slot = owner.slot();
        if self.waiting.len() <= slot {
            self.waiting.resize_with(slot + 1, BinaryHeap::new);
        }
        self.turns += 1;
        let waiting = Waiting {
            due,
            turn: self.turns,
            owner,
            lane,
            queued,
            outage,
        };
        match self.first_of(slot) {
            Some(first) if first < (due, self.turns, slot) => {}
            first => {
                first.map(|first| self.soonest.remove(&first));
                self.soonest.insert((due, self.turns, slot));
            }
        }
        self.waiting[slot].push(waiting);
        self.len += 1;
    }

    fn first_of(&self, slot: usize) -> Option<(Instant, u64, usize)> {
        let first = self.waiting.get(slot)?.peek()?;
        Some((first.due, first.turn, slot))
    }

    /// Changes all that waits in a partition.
    fn rebuild(&mut self, slot: usize, change: impl FnOnce(&mut Vec<Waiting<R>>)) {
        let Some(first) = self.first_of(slot) else {
            return;
        };
        self.soonest.remove(&first);
        let mut waiting = mem::take(&mut self.waiting[slot]).into_vec();
        self.len -= waiting.len();
        change(&mut waiting);
        self.len += waiting.len();
        self.waiting[slot] = waiting.into();
        self.soonest.extend(self.first_of(slot));
    }

    /// What waits for a dependency is due now, the oldest first: the breaker says when it goes on.
    pub(crate) fn end_outage_waits(&mut self, now: Instant) {
        for slot in 0..self.waiting.len() {
            self.rebuild(slot, |all| {
                for waiting in all.iter_mut().filter(|waiting| waiting.outage) {
                    waiting.due = waiting.due.min(now);
                    waiting.turn = waiting.queued.seq;
                }
            });
        }
    }

    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.soonest.first().map(|(due, ..)| *due)
    }

    pub(crate) fn take_due(&mut self, now: Instant) -> Option<Waiting<R>> {
        if self.next_due()? > now {
            return None;
        }
        let (_, _, slot) = self.soonest.pop_first()?;
        let waiting = self.waiting[slot].pop();
        self.len -= usize::from(waiting.is_some());
        self.soonest.extend(self.first_of(slot));
        waiting
    }

    /// Takes a record out before it is due.
    pub(crate) fn take(&mut self, owner: Ownership, seq: u64) -> Option<(LaneId, Queued<R>)> {
        let wanted = |waiting: &Waiting<R>| waiting.owner == owner && waiting.queued.seq == seq;
        let mut taken = None;
        self.rebuild(owner.slot(), |all| {
            let at = all.iter().position(wanted);
            taken = at.map(|at| all.swap_remove(at));
        });
        let Waiting { lane, queued, .. } = taken?;
        Some((lane, queued))
    }

    /// Takes out what waits for this partition and is due after `by`, or all of it, what is due first in front.
    pub(crate) fn take_of(
        &mut self,
        owner: Ownership,
        by: Option<Instant>,
    ) -> Vec<(LaneId, Queued<R>)> {
        let mut taken = Vec::new();
        self.rebuild(owner.slot(), |all| {
            let wanted = |waiting: &mut Waiting<R>| by.is_none_or(|by| waiting.due > by);
            taken.extend(all.extract_if(.., wanted));
        });
        taken.sort_unstable_by_key(|waiting| (waiting.due, waiting.turn));
        let taken = taken.into_iter();
        taken
            .map(|waiting| (waiting.lane, waiting.queued))
            .collect()
    }

    /// How many wait, of all partitions.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn count(&self, owner: Ownership) -> usize {
        self.waiting.get(owner.slot()).map_or(0, BinaryHeap::len)
    }

    /// Drops what waits for a partition from this sequence on, and returns the lanes that are held by that.
    pub(crate) fn cut_off(&mut self, owner: Ownership, first: u64) -> Vec<LaneId> {
        let mut lanes = Vec::new();
        self.rebuild(owner.slot(), |all| {
            let void = all.extract_if(.., |waiting| waiting.queued.seq >= first);
            lanes.extend(void.map(|waiting| waiting.lane));
        });
        lanes
    }

    /// Drops what waits for a partition that is given away.
    pub(crate) fn forget(&mut self, owner: Ownership) {
        self.rebuild(owner.slot(), |all| *all = Vec::new());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn owner(slot: u32) -> Ownership {
        Ownership { slot, id: slot + 1 }
    }

    fn queued(seq: u64) -> Queued<()> {
        Queued {
            record: (),
            seq,
            attempts: 1,
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Insert { slot: u32, after: u64, outage: bool },
        TakeDue { now: u64 },
        Take { slot: u32, seq: u64 },
        EndOutageWaits { now: u64 },
        Forget { slot: u32 },
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            6 => (0..3u32, 0..50u64, any::<bool>())
                .prop_map(|(slot, after, outage)| Step::Insert { slot, after, outage }),
            4 => (0..60u64).prop_map(|now| Step::TakeDue { now }),
            1 => (0..3u32, 0..40u64).prop_map(|(slot, seq)| Step::Take { slot, seq }),
            1 => (0..60u64).prop_map(|now| Step::EndOutageWaits { now }),
            1 => (0..3u32).prop_map(|slot| Step::Forget { slot }),
        ];
        prop::collection::vec(step, 1..120)
    }

    proptest! {
        /// One list of everything, searched from end to end, is the model.
        #[test]
        fn what_is_due_first_comes_first_whatever_partition_it_is_of(steps in steps()) {
            let began = Instant::now();
            let at = |millis| began + Duration::from_millis(millis);
            let (mut schedule, mut model) = (Schedule::new(), Vec::<(Instant, u64, u32, u64, bool)>::new());
            let mut seqs = 0;
            for step in steps {
                match step {
                    Step::Insert { slot, after, outage } => {
                        seqs += 1;
                        schedule.insert(at(after), owner(slot), 0, queued(seqs), outage);
                        model.push((at(after), seqs, slot, seqs, outage));
                    }
                    Step::TakeDue { now } => {
                        let first = model.iter().min_by_key(|(due, turn, slot, ..)| (*due, *turn, *slot)).copied();
                        let first = first.filter(|(due, ..)| *due <= at(now));
                        let taken = schedule.take_due(at(now));
                        prop_assert_eq!(
                            taken.map(|it| (it.owner, it.queued.seq)),
                            first.map(|(_, _, slot, seq, _)| (owner(slot), seq))
                        );
                        model.retain(|it| Some(*it) != first);
                    }
                    Step::Take { slot, seq } => {
                        let there = model.iter().any(|it| (it.2, it.3) == (slot, seq));
                        let taken = schedule.take(owner(slot), seq);
                        prop_assert_eq!(taken.map(|(_, queued)| queued.seq), there.then_some(seq));
                        model.retain(|it| (it.2, it.3) != (slot, seq));
                    }
                    Step::EndOutageWaits { now } => {
                        schedule.end_outage_waits(at(now));
                        for it in model.iter_mut().filter(|it| it.4) {
                            (it.0, it.1) = (it.0.min(at(now)), it.3);
                        }
                    }
                    Step::Forget { slot } => {
                        schedule.forget(owner(slot));
                        model.retain(|it| it.2 != slot);
                    }
                }
                for slot in 0..3 {
                    let count = model.iter().filter(|it| it.2 == slot).count();
                    prop_assert_eq!(schedule.count(owner(slot)), count);
                }
                prop_assert_eq!(schedule.len(), model.len());
                prop_assert_eq!(schedule.next_due(), model.iter().map(|it| it.0).min());
            }
        }
    }
}
