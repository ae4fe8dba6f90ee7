//! Which records of a partition may run now, and which wait behind another one.
//!
//! A *lane* is a line of records that must run one after another: those of one key, or of the whole partition, or each
//! record alone. A lane has at most one *turn* out: a few records handed over together and run in sequence.
//! A lane is told apart by a 64-bit hash of the key. Two keys with one hash would share a lane, which keeps every
//! promise of order and merely makes one wait for the other.

use std::{
    collections::{HashMap, VecDeque},
    hash::{BuildHasherDefault, Hasher},
    mem,
};

/// Records of one key that go out together. Long turns save work for fast handlers; a slow one delays only its own key.
const KEYED_TURN: usize = 32;
/// No record: more than will ever arrive.
const NIL: u64 = u64::MAX;
const FIRST_NODES: usize = 64;
/// Idle lanes are kept (a key often comes back at once) until there are this many.
const IDLE_LANES: usize = 4096;

/// Which records may run at the same time, within [`Builder::concurrency`](crate::Builder::concurrency).
///
/// The order is kept through retries: a record that waits for its next attempt, or for its dead letter to be
/// acknowledged, holds back what has to come after it. There is no order across partitions or topics.
///
/// ```
/// use reliable_consumer::{Ordering, ReliableConsumer};
///
/// // E-mails may go out in any order.
/// let mailer = ReliableConsumer::builder().ordering(Ordering::Unordered).concurrency(500);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ordering {
    /// Every record on its own: the most concurrency, no order at all.
    Unordered,
    /// Records with the same key run one after another, in the order of the log; others beside them.
    /// Records without a key have no order among themselves.
    #[default]
    ByKey,
    /// All records of a partition run one after another. Concurrency comes from the number of partitions.
    ByPartition,
}

/// A record that waits for its turn.
#[derive(Debug)]
pub(crate) struct Queued<R> {
    pub(crate) record: R,
    pub(crate) seq: u64,
    /// Calls of the handler made so far on this trip.
    pub(crate) attempts: u32,
}

/// What there is to know of the record whose turn is next, without taking it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Next {
    pub(crate) seq: u64,
    pub(crate) attempts: u32,
}

/// Names a lane of one partition. Unordered records share one that is never busy.
pub(crate) type LaneId = u32;

/// The lanes of one partition.
#[derive(Debug)]
pub(crate) enum Lanes<R> {
    Each {
        ready: VecDeque<Queued<R>>,
        out: usize,
    },
    One(Line<R>),
    Keyed(Keyed<R>),
}

#[derive(Debug)]
pub(crate) struct Line<R> {
    queue: VecDeque<Queued<R>>,
    out: usize,
    /// Its first record waits for a retry or a dead letter: nothing behind it may run.
    held: bool,
}

/// How far a turn has come, told by [`Lanes::report`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    Goes,
    Over,
}

impl<R> Lanes<R> {
    pub(crate) fn new(ordering: Ordering) -> Self {
        match ordering {
            Ordering::Unordered => Self::Each {
                ready: VecDeque::new(),
                out: 0,
            },
            Ordering::ByPartition => Self::One(Line {
                queue: VecDeque::new(),
                out: 0,
                held: false,
            }),
            Ordering::ByKey => Self::Keyed(Keyed::new()),
        }
    }

    /// Puts a record at the end of its lane. `key` is the hash of the record's key, `None` for a record without one.
    #[inline]
    pub(crate) fn push(&mut self, key: Option<u64>, queued: Queued<R>) {
        match self {
            Self::Each { ready, .. } => ready.push_back(queued),
            Self::One(line) => line.queue.push_back(queued),
            Self::Keyed(keyed) => keyed.push(key, queued),
        }
    }

    /// Whether [`take_turn`](Self::take_turn) would give something.
    #[inline]
    pub(crate) fn is_ready(&self) -> bool {
        match self {
            Self::Each { ready, .. } => !ready.is_empty(),
            Self::One(line) => line.out == 0 && !line.held && !line.queue.is_empty(),
            Self::Keyed(keyed) => !keyed.ready.is_empty(),
        }
    }

    /// The first record that [`take_turn`](Self::take_turn) would give.
    pub(crate) fn peek(&self) -> Option<Next> {
        let next = |queued: &Queued<R>| Next {
            seq: queued.seq,
            attempts: queued.attempts,
        };
        match self {
            Self::Each { ready, .. } => ready.front().map(next),
            Self::One(line) => line.queue.front().filter(|_| self.is_ready()).map(next),
            Self::Keyed(keyed) => {
                let seq = keyed.lanes[*keyed.ready.front()? as usize].head;
                let node = keyed.nodes.get(seq as usize & (keyed.nodes.len() - 1))?;
                let attempts = node.attempts;
                Some(Next { seq, attempts })
            }
        }
    }

    /// Records that have not been handed over. Those that wait for a retry are elsewhere.
    pub fn len(&self) -> usize {
        match self {
            Self::Each { ready, .. } => ready.len(),
            Self::One(line) => line.queue.len(),
            Self::Keyed(keyed) => keyed.queued,
        }
    }

    /// Hands over the next turn, at most `most` records, and returns its lane.
    #[inline]
    pub(crate) fn take_turn(
        &mut self,
        most: usize,
        mut give: impl FnMut(Queued<R>),
    ) -> Option<(LaneId, usize)> {
        match self {
            Self::Each { ready, out } => {
                give(ready.pop_front()?);
                *out += 1;
                Some((0, 1))
            }
            Self::One(line) if line.out == 0 && !line.held && !line.queue.is_empty() => {
                line.out = line.queue.len().min(most.max(1));
                line.queue.drain(..line.out).for_each(give);
                Some((0, line.out))
            }
            Self::One(_) => None,
            Self::Keyed(keyed) => keyed.take_turn(most, give),
        }
    }

    /// One record of the lane's turn has come back, whatever its outcome.
    #[inline]
    pub(crate) fn report(&mut self, lane: LaneId) -> Turn {
        match self {
            Self::Each { out, .. } => {
                *out -= 1;
                Turn::Over
            }
            Self::One(line) => {
                line.out -= 1;
                if line.out == 0 {
                    Turn::Over
                } else {
                    Turn::Goes
                }
            }
            Self::Keyed(keyed) => keyed.report(lane),
        }
    }

    /// The lane waits from now on: its first record is to be retried or dead-lettered. Said before the `report` of
    /// that record, so that nothing behind it slips through.
    pub(crate) fn hold(&mut self, lane: LaneId) {
        match self {
            Self::Each { .. } => {}
            Self::One(line) => line.held = true,
            Self::Keyed(keyed) => keyed.lanes[lane as usize].held = true,
        }
    }

    /// The record that held the lane has finished: those behind it may go on.
    pub(crate) fn release(&mut self, lane: LaneId) {
        match self {
            Self::Each { .. } => {}
            Self::One(line) => line.held = false,
            // Of several records that were taken out of a lane together the first one to finish releases it.
            Self::Keyed(keyed) => {
                if mem::take(&mut keyed.lanes[lane as usize].held) {
                    keyed.settle(lane);
                }
            }
        }
    }

    /// Puts a record back in front of its lane: it was handed over and not started, or its retry is due.
    pub(crate) fn push_front(&mut self, lane: LaneId, queued: Queued<R>) {
        match self {
            Self::Each { ready, .. } => ready.push_front(queued),
            Self::One(line) => line.queue.push_front(queued),
            Self::Keyed(keyed) => keyed.push_front(lane, queued),
        }
    }

    /// Puts back a record that has waited for a dependency: in front of its lane, and where there is no order behind all
    /// others, so that not always the same one is tried.
    pub(crate) fn push_again(&mut self, lane: LaneId, queued: Queued<R>) {
        match self {
            Self::Each { ready, .. } => ready.push_back(queued),
            Self::One(_) | Self::Keyed(_) => self.push_front(lane, queued),
        }
    }

    /// Turns that are out: handler futures in progress, or about to be.
    pub(crate) fn turns_out(&self) -> usize {
        match self {
            Self::Each { out, .. } => *out,
            Self::One(line) => usize::from(line.out > 0),
            Self::Keyed(keyed) => keyed.turns_out,
        }
    }

    /// Sequences of all records that have not been handed over, in no order.
    #[cfg(test)]
    pub(crate) fn queued(&self) -> Vec<u64> {
        match self {
            Self::Each { ready, .. } => ready.iter().map(|queued| queued.seq).collect(),
            Self::One(line) => line.queue.iter().map(|queued| queued.seq).collect(),
            Self::Keyed(keyed) => {
                let taken = keyed.nodes.iter().filter(|node| node.record.is_some());
                taken.map(|node| node.seq).collect()
            }
        }
    }

    /// Takes out all records that have not been handed over, in the order in which they came; each holds its lane.
    pub(crate) fn take_queued(&mut self) -> Vec<(LaneId, Queued<R>)> {
        match self {
            Self::Each { ready, .. } => ready.drain(..).map(|queued| (0, queued)).collect(),
            Self::One(line) => {
                line.held |= !line.queue.is_empty();
                line.queue.drain(..).map(|queued| (0, queued)).collect()
            }
            Self::Keyed(keyed) => keyed.take_queued(),
        }
    }

    /// Forgets records from this sequence on that have not been handed over, and returns how many. What is out stays, and
    /// lanes that are held stay held.
    pub(crate) fn cut_off(&mut self, first: u64) -> usize {
        let before = self.len();
        match self {
            Self::Each { ready, .. } => ready.retain(|queued| queued.seq < first),
            Self::One(line) => line.queue.retain(|queued| queued.seq < first),
            Self::Keyed(keyed) => keyed.cut_off(first),
        }
        before - self.len()
    }

    /// Forgets all records that have not been handed over. Turns that are out stay.
    pub(crate) fn clear_queued(&mut self) {
        match self {
            Self::Each { ready, .. } => ready.clear(),
            Self::One(line) => line.queue.clear(),
            Self::Keyed(keyed) => keyed.clear_queued(),
        }
    }
}

/// Lanes by key: a hash table of lanes, each with an intrusive list of records.
///
/// A record waits in a ring at its own sequence, so that records that came one after another lie side by side: a slab
/// with a free list would scatter them, and each visit be a miss of the cache.
#[derive(Debug)]
pub(crate) struct Keyed<R> {
    by_hash: HashMap<u64, LaneId, BuildHasherDefault<AlreadyHashed>>,
    lanes: Vec<Lane>,
    free_lanes: Vec<LaneId>,
    idle: usize,
    /// By sequence modulo its length, a power of two. Two sequences never meet in it: it grows before they would.
    nodes: Vec<Node<R>>,
    /// Lanes with records and no turn out, longest waiting first.
    ready: VecDeque<LaneId>,
    turns_out: usize,
    /// Records in all lanes together.
    queued: usize,
}

#[derive(Debug)]
struct Lane {
    /// `None`: the lane of one record without a key, gone when it is idle.
    hash: Option<u64>,
    /// First and last record that waits, by sequence; the last one counts only where there is a first.
    head: u64,
    tail: u64,
    out: u32,
    held: bool,
    /// Stands in `ready`.
    ready: bool,
}

#[derive(Debug)]
struct Node<R> {
    record: Option<R>,
    seq: u64,
    attempts: u32,
    /// How much higher the sequence of the lane's next record is; 0 at the end.
    next: u32,
}

impl<R> Node<R> {
    fn free() -> Self {
        Self {
            record: None,
            seq: 0,
            attempts: 0,
            next: 0,
        }
    }
}

impl Lane {
    fn is_idle(&self) -> bool {
        self.out == 0 && self.head == NIL && !self.held
    }
}

impl<R> Keyed<R> {
    fn new() -> Self {
        Self {
            by_hash: HashMap::default(),
            lanes: Vec::new(),
            free_lanes: Vec::new(),
            idle: 0,
            nodes: Vec::new(),
            ready: VecDeque::new(),
            turns_out: 0,
            queued: 0,
        }
    }

    #[inline]
    fn push(&mut self, key: Option<u64>, queued: Queued<R>) {
        let lane = match key {
            None => self.new_lane(None),
            Some(hash) => match self.by_hash.get(&hash) {
                Some(&lane) => {
                    self.idle -= usize::from(self.lanes[lane as usize].is_idle());
                    lane
                }
                None => {
                    let lane = self.new_lane(Some(hash));
                    self.by_hash.insert(hash, lane);
                    lane
                }
            },
        };
        let seq = queued.seq;
        self.place(queued, 0);
        let at = &mut self.lanes[lane as usize];
        if at.head == NIL {
            at.head = seq;
        } else {
            let mask = self.nodes.len() - 1;
            self.nodes[at.tail as usize & mask].next = (seq - at.tail) as u32;
        }
        at.tail = seq;
        self.mark_ready(lane);
    }

    fn push_front(&mut self, lane: LaneId, queued: Queued<R>) {
        let (seq, next) = (queued.seq, self.lanes[lane as usize].head);
        let distance = if next == NIL { 0 } else { next - seq };
        self.place(queued, distance as u32);
        let at = &mut self.lanes[lane as usize];
        at.head = seq;
        if next == NIL {
            at.tail = seq;
        }
        self.mark_ready(lane);
    }

    #[inline]
    fn mark_ready(&mut self, lane: LaneId) {
        let at = &mut self.lanes[lane as usize];
        if at.out == 0 && !at.held && !at.ready && at.head != NIL {
            at.ready = true;
            self.ready.push_back(lane);
        }
    }

    #[inline]
    fn new_lane(&mut self, hash: Option<u64>) -> LaneId {
        let lane = Lane {
            hash,
            head: NIL,
            tail: NIL,
            out: 0,
            held: false,
            ready: false,
        };
        if let Some(id) = self.free_lanes.pop() {
            self.lanes[id as usize] = lane;
            return id;
        }
        self.lanes.push(lane);
        (self.lanes.len() - 1) as LaneId
    }

    /// Puts a record into the ring.
    #[inline]
    fn place(&mut self, queued: Queued<R>, next: u32) {
        self.queued += 1;
        while self
            .nodes
            .get(queued.seq as usize & self.nodes.len().wrapping_sub(1))
            .is_none_or(|node| node.record.is_some())
        {
            self.grow();
        }
        let mask = self.nodes.len() - 1;
        self.nodes[queued.seq as usize & mask] = Node {
            record: Some(queued.record),
            seq: queued.seq,
            attempts: queued.attempts,
            next,
        };
    }

    #[cold]
    fn grow(&mut self) {
        let length = (self.nodes.len() * 2).max(FIRST_NODES);
        let mut nodes: Vec<_> = std::iter::repeat_with(Node::free).take(length).collect();
        for node in self.nodes.drain(..).filter(|node| node.record.is_some()) {
            let at = node.seq as usize & (length - 1);
            nodes[at] = node;
        }
        self.nodes = nodes;
    }

    /// Takes a record out of the ring, and tells which one is behind it in its lane.
    #[inline]
    fn take_node(&mut self, seq: u64) -> (Queued<R>, u64) {
        let mask = self.nodes.len() - 1;
        let node = &mut self.nodes[seq as usize & mask];
        debug_assert_eq!(node.seq, seq);
        let record = node
            .record
            .take()
            .expect("a node in a lane's list holds a record");
        let next = match node.next {
            0 => NIL,
            distance => seq + u64::from(distance),
        };
        let attempts = node.attempts;
        (
            Queued {
                record,
                seq,
                attempts,
            },
            next,
        )
    }

    #[inline]
    fn take_turn(
        &mut self,
        most: usize,
        mut give: impl FnMut(Queued<R>),
    ) -> Option<(LaneId, usize)> {
        let lane = self.ready.pop_front()?;
        let mut head = self.lanes[lane as usize].head;
        let mut taken = 0;
        while head != NIL && taken < most.clamp(1, KEYED_TURN) {
            let (queued, next) = self.take_node(head);
            give(queued);
            head = next;
            taken += 1;
        }
        let at = &mut self.lanes[lane as usize];
        (at.head, at.ready, at.out) = (head, false, taken as u32);
        self.turns_out += 1;
        self.queued -= taken;
        Some((lane, taken))
    }

    #[inline]
    fn report(&mut self, lane: LaneId) -> Turn {
        let at = &mut self.lanes[lane as usize];
        at.out -= 1;
        if at.out > 0 {
            return Turn::Goes;
        }
        self.turns_out -= 1;
        self.settle(lane);
        Turn::Over
    }

    /// A lane with nothing out goes on with its records, or is idle.
    #[inline]
    fn settle(&mut self, lane: LaneId) {
        let at = &self.lanes[lane as usize];
        if !at.is_idle() {
            return self.mark_ready(lane);
        }
        if at.hash.is_none() {
            return self.free_lanes.push(lane);
        }
        self.idle += 1;
        if self.idle >= IDLE_LANES && self.idle * 2 > self.by_hash.len() {
            self.sweep();
        }
    }

    /// Lets go of idle lanes, all at once: the cost a lane stays constant.
    #[cold]
    fn sweep(&mut self) {
        let (lanes, free) = (&self.lanes, &mut self.free_lanes);
        self.by_hash.retain(|_, lane| {
            let idle = lanes[*lane as usize].is_idle();
            if idle {
                free.push(*lane);
            }
            !idle
        });
        self.idle = 0;
    }

    fn take_queued(&mut self) -> Vec<(LaneId, Queued<R>)> {
        let mut taken = Vec::with_capacity(self.queued);
        for lane in 0..self.lanes.len() {
            let mut head = self.lanes[lane].head;
            while head != NIL {
                let (queued, next) = self.take_node(head);
                taken.push((lane as LaneId, queued));
                head = next;
            }
            let at = &mut self.lanes[lane];
            if at.head != NIL {
                (at.head, at.ready, at.held) = (NIL, false, true);
            }
        }
        self.ready.clear();
        self.queued = 0;
        taken.sort_by_key(|(_, queued)| queued.seq);
        taken
    }

    fn cut_off(&mut self, first: u64) {
        for id in 0..self.lanes.len() {
            let lane = &self.lanes[id];
            let (mut kept, mut at) = (NIL, lane.head);
            while at < first {
                (kept, at) = (at, self.next_of(at));
            }
            if at == NIL {
                continue;
            }
            while at != NIL {
                at = self.take_node(at).1;
                self.queued -= 1;
            }
            if kept != NIL {
                let mask = self.nodes.len() - 1;
                self.nodes[kept as usize & mask].next = 0;
                self.lanes[id].tail = kept;
                continue;
            }
            (self.lanes[id].head, self.lanes[id].ready) = (NIL, false);
            self.settle(id as LaneId);
        }
        let lanes = &self.lanes;
        self.ready.retain(|lane| lanes[*lane as usize].ready);
    }

    /// The sequence behind this one in its lane.
    fn next_of(&self, seq: u64) -> u64 {
        match self.nodes[seq as usize & (self.nodes.len() - 1)].next {
            0 => NIL,
            distance => seq + u64::from(distance),
        }
    }

    fn clear_queued(&mut self) {
        self.ready.clear();
        self.nodes.fill_with(Node::free);
        self.queued = 0;
        for lane in &mut self.lanes {
            (lane.head, lane.tail, lane.ready) = (NIL, NIL, false);
        }
        // Lanes with nothing out are dropped from the table; their slots stay unused until the ownership ends, which
        // follows at once.
        let lanes = &self.lanes;
        self.by_hash
            .retain(|_, lane| !lanes[*lane as usize].is_idle());
        self.idle = 0;
    }
}

/// The table's keys are hashes already.
#[derive(Debug, Default)]
pub(crate) struct AlreadyHashed(u64);

impl Hasher for AlreadyHashed {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, _: &[u8]) {
        unreachable!("lanes are looked up by u64 only")
    }
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    type Key = Option<u64>;

    fn push(lanes: &mut Lanes<Key>, seq: u64, key: Key) {
        lanes.push(
            key,
            Queued {
                record: key,
                seq,
                attempts: 0,
            },
        );
    }

    fn take(lanes: &mut Lanes<Key>, most: usize) -> Option<(LaneId, Vec<u64>)> {
        let mut seqs = Vec::new();
        let (lane, count) = lanes.take_turn(most, |queued| seqs.push(queued.seq))?;
        assert_eq!(count, seqs.len());
        Some((lane, seqs))
    }

    fn take_all(lanes: &mut Lanes<Key>) -> Vec<Vec<u64>> {
        std::iter::from_fn(|| take(lanes, 256).map(|(_, seqs)| seqs)).collect()
    }

    #[test]
    fn records_of_a_key_go_out_together_and_other_keys_beside_them() {
        let mut lanes = Lanes::new(Ordering::ByKey);
        for (seq, key) in [(0, 7), (1, 8), (2, 7), (3, 8), (4, 7)] {
            push(&mut lanes, seq, Some(key));
        }
        assert_eq!(take_all(&mut lanes), [vec![0, 2, 4], vec![1, 3]]);
        push(&mut lanes, 5, Some(7));
        assert!(!lanes.is_ready(), "the key has a turn out");
    }

    #[test]
    fn a_long_line_of_one_key_does_not_go_out_all_at_once() {
        let mut lanes = Lanes::new(Ordering::ByKey);
        (0..100).for_each(|seq| push(&mut lanes, seq, Some(7)));
        let turns = take_all(&mut lanes);
        assert_eq!(turns.len(), 1);
        assert_eq!(turns[0].len(), KEYED_TURN);
    }

    #[test]
    fn records_without_a_key_wait_for_nobody() {
        let mut lanes = Lanes::new(Ordering::ByKey);
        (0..3).for_each(|seq| push(&mut lanes, seq, None));
        assert_eq!(take_all(&mut lanes), [[0], [1], [2]]);
    }

    #[test]
    fn lanes_of_records_without_a_key_are_used_again() {
        let mut lanes = Lanes::new(Ordering::ByKey);
        for seq in 0..10_000 {
            push(&mut lanes, seq, None);
            let (lane, _) = take(&mut lanes, 1).unwrap();
            assert_eq!(lanes.report(lane), Turn::Over);
        }
        let Lanes::Keyed(keyed) = lanes else {
            unreachable!()
        };
        assert_eq!((keyed.lanes.len(), keyed.nodes.len()), (1, FIRST_NODES));
    }

    #[test]
    fn a_key_that_is_at_work_keeps_its_lane_when_idle_ones_are_swept() {
        let mut lanes = Lanes::new(Ordering::ByKey);
        push(&mut lanes, 0, Some(u64::MAX));
        let (busy, _) = take(&mut lanes, 1).unwrap();
        push(&mut lanes, 1, Some(u64::MAX - 1));
        let (failed, _) = take(&mut lanes, 1).unwrap();
        lanes.hold(failed);
        lanes.report(failed);

        let keys = 3 * IDLE_LANES as u64;
        for key in 0..keys {
            push(&mut lanes, 2 + key, Some(key));
            let (lane, _) = take(&mut lanes, 1).unwrap();
            lanes.report(lane);
        }
        let Lanes::Keyed(keyed) = &lanes else {
            unreachable!()
        };
        assert!(keyed.by_hash.len() <= 2 * IDLE_LANES, "nothing was swept");

        push(&mut lanes, keys + 2, Some(u64::MAX));
        push(&mut lanes, keys + 3, Some(u64::MAX - 1));
        assert!(
            !lanes.is_ready(),
            "a record overtook an earlier one of its key"
        );
        lanes.report(busy);
        assert_eq!(take_all(&mut lanes), [[keys + 2]]);
        lanes.release(failed);
        assert_eq!(take_all(&mut lanes), [[keys + 3]]);
    }

    /// What lanes should do, said plainly: per lane the unfinished records in order, and what became of the first.
    #[derive(Debug, Default)]
    struct Line {
        unfinished: VecDeque<u64>,
        /// Of those, how many are out.
        out: usize,
        held: bool,
    }

    /// The other side of the lanes: turns in the hands of handlers, and failed records.
    struct World {
        ordering: Ordering,
        lanes: Lanes<Key>,
        lines: BTreeMap<u64, Line>,
        keys: Vec<Key>,
        turns: Vec<(LaneId, VecDeque<u64>)>,
        failed: Vec<(LaneId, u64)>,
        finished: usize,
    }

    impl World {
        fn new(ordering: Ordering) -> Self {
            Self {
                ordering,
                lanes: Lanes::new(ordering),
                lines: BTreeMap::new(),
                keys: Vec::new(),
                turns: Vec::new(),
                failed: Vec::new(),
                finished: 0,
            }
        }

        fn line(&mut self, seq: u64) -> &mut Line {
            let name = match (self.ordering, self.keys[seq as usize]) {
                (Ordering::ByPartition, _) => 0,
                (Ordering::ByKey, Some(key)) => key,
                _ => 1_000 + seq,
            };
            self.lines.entry(name).or_default()
        }

        fn queued(&self, seq: u64) -> Queued<Key> {
            Queued {
                record: self.keys[seq as usize],
                seq,
                attempts: 1,
            }
        }

        fn push(&mut self, key: Key) {
            let seq = self.keys.len() as u64;
            self.keys.push(key);
            push(&mut self.lanes, seq, key);
            self.line(seq).unfinished.push_back(seq);
        }

        fn take(&mut self, most: usize) {
            let Some((lane, seqs)) = take(&mut self.lanes, most) else {
                return;
            };
            let line = self.line(seqs[0]);
            assert!(
                line.out == 0 && !line.held,
                "a second turn of a lane is out"
            );
            let first: Vec<u64> = line.unfinished.iter().copied().take(seqs.len()).collect();
            assert_eq!(seqs, first, "a turn starts at the lane's oldest record");
            line.out = seqs.len();
            self.turns.push((lane, seqs.into()));
        }

        /// The first record of a turn comes back.
        fn report(&mut self, at: usize) -> (LaneId, u64, Turn) {
            let (lane, turn) = &mut self.turns[at];
            let (lane, seq) = (*lane, turn.pop_front().unwrap());
            let over = turn.is_empty();
            if over {
                self.turns.remove(at);
            }
            self.line(seq).out -= 1;
            let told = self.lanes.report(lane);
            let alone = self.ordering == Ordering::Unordered;
            assert_eq!(told == Turn::Over, over || alone);
            (lane, seq, told)
        }

        fn finish(&mut self, at: usize) {
            let (_, seq, _) = self.report(at);
            assert_eq!(self.line(seq).unfinished.pop_front(), Some(seq));
            self.finished += 1;
        }

        fn fail(&mut self, at: usize) {
            let (lane, turn) = &self.turns[at];
            let (lane, seq, behind) = (*lane, turn[0], turn.len() - 1);
            self.lanes.hold(lane);
            self.line(seq).held = true;
            self.report(at);
            if behind > 0 {
                self.not_started(at);
            }
            self.failed.push((lane, seq));
        }

        fn not_started(&mut self, at: usize) {
            let (lane, turn) = self.turns.remove(at);
            for seq in turn.into_iter().rev() {
                self.line(seq).out -= 1;
                let queued = self.queued(seq);
                self.lanes.push_front(lane, queued);
                self.lanes.report(lane);
            }
        }

        fn retry(&mut self, at: usize) {
            let (lane, seq) = self.failed.remove(at);
            let queued = self.queued(seq);
            self.lanes.push_front(lane, queued);
            self.lanes.release(lane);
            self.line(seq).held = false;
        }

        fn dead_letter(&mut self, at: usize) {
            let (lane, seq) = self.failed.remove(at);
            self.lanes.release(lane);
            let line = self.line(seq);
            line.held = false;
            assert_eq!(line.unfinished.pop_front(), Some(seq));
            self.finished += 1;
        }

        fn check(&self) {
            let lines = || self.lines.values();
            let ready =
                lines().any(|line| !line.held && line.out == 0 && !line.unfinished.is_empty());
            assert_eq!(self.lanes.is_ready(), ready);
            let out = lines().filter(|line| line.out > 0).count();
            assert_eq!(self.lanes.turns_out(), out);
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Push(Key, usize),
        Take(usize),
        Finish(prop::sample::Index),
        Fail(prop::sample::Index),
        NotStarted(prop::sample::Index),
        Retry(prop::sample::Index),
        DeadLetter(prop::sample::Index),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let at = any::<prop::sample::Index>;
        let key = prop::option::weighted(0.8, 0..6u64);
        let step = prop_oneof![
            4 => (key, 1..40usize).prop_map(|(key, count)| Step::Push(key, count)),
            6 => (1..40usize).prop_map(Step::Take),
            8 => at().prop_map(Step::Finish),
            2 => at().prop_map(Step::Fail),
            1 => at().prop_map(Step::NotStarted),
            2 => at().prop_map(Step::Retry),
            1 => at().prop_map(Step::DeadLetter),
        ];
        prop::collection::vec(step, 1..120)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]

        #[test]
        fn lanes_keep_their_order_have_one_turn_out_and_lose_nothing(
            ordering in prop_oneof![
                Just(Ordering::Unordered), Just(Ordering::ByKey), Just(Ordering::ByPartition)
            ],
            steps in steps(),
        ) {
            let mut world = World::new(ordering);
            for step in steps {
                let (turns, failed) = (world.turns.len(), world.failed.len());
                match step {
                    Step::Push(key, count) => (0..count).for_each(|_| world.push(key)),
                    Step::Take(most) => world.take(most),
                    Step::Finish(at) if turns > 0 => world.finish(at.index(turns)),
                    Step::Fail(at) if turns > 0 => world.fail(at.index(turns)),
                    Step::NotStarted(at) if turns > 0 => world.not_started(at.index(turns)),
                    Step::Retry(at) if failed > 0 => world.retry(at.index(failed)),
                    Step::DeadLetter(at) if failed > 0 => world.dead_letter(at.index(failed)),
                    _ => {}
                }
                world.check();
            }
            // Failing records hold back only what is theirs: all others can be finished beside them.
            loop {
                if !world.turns.is_empty() {
                    world.finish(0);
                } else if world.lanes.is_ready() {
                    world.take(256);
                } else {
                    break;
                }
            }
            let held: usize = world.lines.values().filter(|line| line.held).map(|line| line.unfinished.len()).sum();
            prop_assert_eq!(world.finished + held, world.keys.len());
            while !world.failed.is_empty() {
                world.retry(0);
            }
            while world.lanes.is_ready() {
                world.take(256);
                while !world.turns.is_empty() {
                    world.finish(0);
                }
            }
            prop_assert_eq!(world.finished, world.keys.len());
            world.check();
        }
    }
}
