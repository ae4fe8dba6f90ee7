//! The rules: what may run, what may be committed, what is retried, and when.
//!
//! The engine is pure. Events go in (assigned, received, reported, committed, the time is now *t*), decisions come out
//! (hand over these records, commit these offsets, dead-letter this one, wake me at *t*). It knows no clock, no I/O,
//! no Kafka client and no runtime, so every rule can be tested by replaying events. `R` is a record, carried and never
//! looked into; `C` is the cause of a failure.

mod breaker;
mod budget;
mod commit;
mod delayed;
mod lanes;
mod pace;
mod partition;
#[cfg(test)]
mod restart;
mod schedule;
mod snapshot;
mod staged;
mod suspects;
#[cfg(test)]
mod tests;
mod window;

use std::{
    cell::Cell,
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

pub(crate) use self::{
    breaker::BreakerChange,
    budget::Budget,
    commit::{Commit, CommitEntry, CommitResult},
    lanes::LaneId,
    partition::{Counts, CutOff, Forfeited, OpenRecord, PartitionStatus},
    snapshot::{
        FinishedAbove, Identity, Inherited, LIMIT as SNAPSHOT_LIMIT, Marks, TopicSeen,
        decode as decode_snapshot, encode as encode_snapshot,
    },
};
use self::{
    breaker::{Breaker, Evidence},
    commit::Doubt,
    lanes::{Queued, Turn},
    pace::Pace,
    partition::{Partition, State, clock},
    schedule::Schedule,
    suspects::Pass,
};
pub use self::{
    breaker::{BreakerState, OutageBreaker},
    lanes::Ordering,
    partition::RecordState,
    staged::Guarantee,
};
#[cfg(feature = "internals")]
pub(crate) use self::{
    snapshot::forge as forge_snapshot,
    window::{Finish, Window},
};
use crate::backoff::Retry;

/// Records in one batch. A batch crosses to the executors in one send.
const BATCH: usize = 1024;
/// Records of a partition that wait for executors which have enough to do, before reading goes on.
const STOCK: usize = 2 * READ;
/// Buffers of batches that are kept: as many as are out when handlers are quick.
const SPENT: usize = 8;
/// Records taken from a partition in one read, so that none keeps the pump for long.
const READ: usize = 1024;
/// Bytes that one read may always bring.
const LEAST_READ: usize = 64 << 10;
/// Records of a first read, each of which is looked at, and to probe with while a dependency is down.
const FIRST_READ: usize = 16;
/// Records that are taken before anybody looks at how large they are, and what each of them is reckoned to be then.
const STRIDE: usize = 32;
const UNSEEN: usize = 512 << 10;
/// So many partitions may each have one record whatever else is in the process: a few that are stuck with more than the
/// whole budget keep nobody out.
const ALWAYS: usize = 4;

/// One holding of a partition, from assign to revoke. Whatever carries the id of an earlier one changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Ownership {
    slot: u32,
    id: u32,
}

impl Ownership {
    /// A small number that no other current ownership has: an index for what is kept beside the engine.
    pub(crate) fn slot(self) -> usize {
        self.slot as usize
    }
}

/// What the engine is told once.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    pub(crate) ordering: Ordering,
    pub(crate) guarantee: Guarantee,
    /// Handlers in progress at a time.
    pub(crate) concurrency: usize,
    /// Records of a partition from the lowest unfinished to the newest.
    pub(crate) window: usize,
    /// Bytes and number of all unfinished records together, see [`budget`]. A partition that has none may pass it by
    /// one record.
    pub(crate) max_bytes: usize,
    pub(crate) max_records: usize,
    pub(crate) retry: Arc<Retry>,
    pub(crate) commit_interval: Duration,
    /// Times that the process may die while a record runs alone before that record is given up. `None`: deaths are not
    /// looked at.
    pub(crate) crash_limit: Option<u32>,
    /// `None`: it never opens.
    pub(crate) breaker: Option<OutageBreaker>,
    /// Spreads retries; two consumers should not have the same.
    pub(crate) seed: u64,
}

/// A record that goes to a handler.
#[derive(Debug)]
pub(crate) struct Job<R> {
    pub(crate) record: R,
    pub(crate) seq: u64,
    pub(crate) lane: LaneId,
    /// Which call of the handler this is, from 1.
    pub(crate) attempt: u32,
    /// How many of the jobs behind this one in the batch belong to the same turn: they run after it, or not at all.
    pub(crate) followers: u32,
}

/// Jobs of one ownership that are handed over in one send.
#[derive(Debug)]
pub(crate) struct Batch<R> {
    pub(crate) owner: Ownership,
    pub(crate) jobs: Vec<Job<R>>,
    /// There may be no handlers free for them yet: that one has started is to be told by [`Engine::started`], unless it
    /// is done at once.
    pub(crate) beyond: bool,
}

/// How a record was finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Handled,
    /// The handler, a filter or a classifier said that there is nothing to do.
    Skipped,
    /// It was sent back from a dead-letter topic for another group.
    ForOthers,
    /// Its message had been handled: it came twice.
    Duplicate,
    /// Its dead letter was acknowledged by the broker.
    DeadLettered,
    /// Its copy in a retry topic was acknowledged by the broker.
    Moved,
    /// It was given up without a dead letter, as the user chose.
    Dropped,
}

/// What is to be done with a record whose attempt failed.
#[derive(Debug, Clone)]
pub(crate) enum AfterFailure {
    /// Try again by the consumer's schedule, or by the given one.
    Retry(Option<Arc<Retry>>),
    /// Try again after exactly this long, as the handler asked. It counts as an attempt.
    RetryAfter(Duration, Option<Arc<Retry>>),
    /// Nothing speaks against this record, its time has not come: again after this long, as if this attempt and this
    /// time had not been.
    Postpone(Duration),
    /// The same, for a record that waits for others of its key to come back, each time that it is looked at.
    Hold(Duration),
    /// What the handler depends on is down: again when that is worth trying, as if this attempt and this time had not
    /// been.
    Outage,
    /// Trying again cannot help.
    GiveUp,
}

/// A failed attempt.
#[derive(Debug)]
pub(crate) struct Failed<R, C> {
    pub(crate) job: Job<R>,
    pub(crate) then: AfterFailure,
    pub(crate) cause: C,
}

/// A record that is not going to be tried again. It stays unfinished until [`Engine::settle`] says how it ended.
#[derive(Debug)]
pub(crate) struct GivenUp<R, C> {
    pub(crate) owner: Ownership,
    pub(crate) seq: u64,
    pub(crate) lane: LaneId,
    pub(crate) record: R,
    /// Calls of the handler on this trip.
    pub(crate) attempts: u32,
    pub(crate) cause: C,
}

/// A record that is not going to be run again, since the process died under it. As with [`GivenUp`], it stays unfinished
/// until [`Engine::settle`] says how it ended.
#[derive(Debug)]
pub(crate) struct Crashed<R> {
    pub(crate) owner: Ownership,
    pub(crate) seq: u64,
    pub(crate) lane: LaneId,
    pub(crate) record: R,
    /// While it ran alone.
    pub(crate) deaths: u32,
}

/// What [`Engine::receive`] did with a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Received {
    Queued,
    /// An earlier owner has finished it: it counts as finished here too, and is not handed out.
    AlreadyFinished,
    /// The offset is at or below one already delivered: the log was cut off, or is another one. Nothing was taken in before
    /// it is known which, see [`Engine::cut_off`].
    WentBack {
        last: i64,
    },
    /// The client's position is not trusted: records may be missing before this one. Nothing was taken in.
    Unproven,
    /// The ownership has ended.
    Stale,
}

/// What one read of a partition may bring. What records weigh is known once they are there, so that they are taken few at
/// a time for as long as not much is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Reading {
    records: usize,
    bytes: usize,
    stride: usize,
}

impl Reading {
    /// How many records to take now. 0: this read is over.
    pub(crate) fn next(&self) -> usize {
        self.records.min(self.stride)
    }

    /// So many have come, with so many bytes.
    pub(crate) fn took(&mut self, records: usize, bytes: usize) {
        self.bytes = self.bytes.saturating_sub(bytes);
        self.records = match self.bytes {
            0 => 0,
            _ => self.records.saturating_sub(records),
        };
    }

    pub(crate) fn records(&self) -> usize {
        self.records
    }
}

/// What all partitions together take from the pools of the budgets, and after which events that was found.
#[derive(Debug, Clone, Copy, Default)]
struct Pools {
    found_at: (u64, u64, u32),
    bytes: usize,
    records: usize,
}

/// See the module's first lines.
#[derive(Debug)]
pub(crate) struct Engine<R, C> {
    config: Config,
    now: Instant,
    began: Instant,
    /// The same as `now`, for what is noted with each record.
    clock: u32,
    partitions: Vec<Option<Partition<R>>>,
    free: Vec<u32>,
    ids: u32,
    /// Where the round robin over partitions stands.
    next_partition: usize,
    /// Partitions that are ours.
    owned: usize,
    /// Unfinished records, in bytes and in turns that are out, over all partitions.
    bytes: usize,
    turns_out: usize,
    /// Records that have come, and of those how many are unfinished no more. Neither ever goes back.
    came: u64,
    went: u64,
    /// What was found last of how the pools of the budgets are used.
    pools: Cell<Pools>,
    pace: Pace,
    run_ahead: Option<usize>,
    schedule: Schedule<R>,
    breaker: Breaker,
    given_up: VecDeque<GivenUp<R, C>>,
    crashed: VecDeque<Crashed<R>>,
    /// Records that were given up and have not ended, over all partitions.
    setting_aside: usize,
    /// There may be partitions that are suspect, or whose first mark is on its way.
    attentive: bool,
    /// There may be partitions with records that are not due yet.
    delays: bool,
    /// Buffers of batches that have been worked off, for the next ones.
    spent: Vec<Vec<Job<R>>>,
    random: u64,
    next_commit: Option<Instant>,
    /// When all is committed again, see [`commit::RECOMMIT`].
    recommit: Instant,
    commit_in_flight: Option<Commit>,
    doubt: Doubt,
    /// While partitions are given away only the drain's own commits are sent.
    hold_commits: bool,
}

impl<R, C> Engine<R, C> {
    pub(crate) fn new(config: Config, now: Instant) -> Self {
        let random = config.seed | 1;
        let breaker = Breaker::new(config.breaker.clone(), config.concurrency, config.seed, now);
        Self {
            config,
            now,
            began: now,
            clock: 0,
            partitions: Vec::new(),
            free: Vec::new(),
            ids: 0,
            next_partition: 0,
            owned: 0,
            bytes: 0,
            turns_out: 0,
            came: 0,
            went: 0,
            pools: Cell::default(),
            pace: Pace::new(),
            run_ahead: None,
            schedule: Schedule::new(),
            breaker,
            given_up: VecDeque::new(),
            crashed: VecDeque::new(),
            setting_aside: 0,
            attentive: false,
            delays: false,
            spent: Vec::new(),
            random,
            next_commit: None,
            recommit: later(now, commit::RECOMMIT),
            commit_in_flight: None,
            doubt: Doubt::none(),
            hold_commits: false,
        }
    }

    // ---- ownership ----

    /// A partition is ours from now on. `start` is where reading begins, where that is known as a number. A start
    /// that is not the committed offset is committed first of all: what was decided once stays decided, even if the
    /// process dies before its first record is finished. What was finished above the committed offset is `inherited`.
    pub fn assign(
        &mut self,
        start: Option<i64>,
        committed: Option<i64>,
        inherited: Inherited,
    ) -> Ownership {
        self.ids = self.ids.wrapping_add(1);
        let slot = self.free.pop().unwrap_or_else(|| {
            self.partitions.push(None);
            (self.partitions.len() - 1) as u32
        });
        let owner = Ownership { slot, id: self.ids };
        let partition = Partition::new(owner, &self.config, start, committed, inherited);
        if partition.commit_is_due() {
            self.next_commit = Some(self.now);
        }
        self.attentive |= partition.suspects.needs_attention();
        self.partitions[slot as usize] = Some(partition);
        self.owned += 1;
        owner
    }

    /// The partition is to be given away: what has not been handed over is dropped, what runs may finish.
    pub(crate) fn drain(&mut self, owner: Ownership) {
        let in_flight = self
            .commit_in_flight
            .iter()
            .flat_map(|commit| &commit.entries);
        let in_flight = in_flight
            .filter(|entry| entry.owner == owner)
            .map(|entry| entry.offset)
            .next();
        if let Some(partition) = self.partition_mut(owner) {
            partition.drain(in_flight);
            if !partition.goes_on() {
                self.schedule.forget(owner);
            }
        }
    }

    /// At most once, of a partition that is given away: what waits for its next attempt and is due only after `by` is
    /// given up with a cause that is told how often it has been tried; without a time all that waits, and nothing is handed
    /// over any more. Asked again for as long as records come back from where they were.
    pub(crate) fn cut(
        &mut self,
        owner: Ownership,
        by: Option<Instant>,
        cause: impl Fn(u32) -> C,
    ) -> bool {
        let Some(partition) = find_mut(&mut self.partitions, owner) else {
            return false;
        };
        if !partition.commits_first() || partition.state == State::Running {
            return false;
        }
        let mut waiting = self.schedule.take_of(owner, by);
        if by.is_none() {
            partition.state = State::Cut;
            waiting.append(&mut partition.take_queued());
            waiting.sort_by_key(|(_, queued)| queued.seq);
        }
        let any = !waiting.is_empty();
        for (lane, queued) in waiting {
            partition.give_up(queued.seq, self.breaker.clock(self.now));
            self.setting_aside += 1;
            self.given_up.push_back(GivenUp {
                owner,
                seq: queued.seq,
                lane,
                record: queued.record,
                attempts: queued.attempts,
                cause: cause(queued.attempts),
            });
        }
        any
    }

    /// At most once: what nobody will handle if the ownership ends now.
    pub(crate) fn forfeited(&self, owner: Ownership) -> Option<Forfeited> {
        self.partition(owner)?.forfeited()
    }

    /// Nothing of a draining partition is out any more: neither a handler nor a dead letter.
    pub(crate) fn is_drained(&self, owner: Ownership) -> bool {
        self.partition(owner).is_none_or(|partition| {
            partition.is_drained() && (partition.staged() == 0 || self.commit_in_flight.is_none())
        })
    }

    /// The ownership ends. Verdicts, answers and dead letters that still come for it change nothing.
    /// Returns where it stood.
    pub(crate) fn end(&mut self, owner: Ownership) -> Option<PartitionStatus> {
        let last = self.status(owner)?;
        self.schedule.forget(owner);
        self.breaker.forget(owner);
        if last.dead_lettering > 0 {
            self.given_up.retain(|given_up| given_up.owner != owner);
            self.crashed.retain(|crashed| crashed.owner != owner);
        }
        let partition = self.partitions[owner.slot as usize]
            .take()
            .expect("its status was read just now");
        self.free.push(owner.slot);
        self.owned -= 1;
        self.setting_aside -= partition.given_up;
        self.bytes -= partition.bytes;
        self.went += partition.unfinished() as u64;
        self.turns_out -= partition.lanes.turns_out();
        Some(last)
    }

    /// The offset that the broker has acknowledged, and all that is finished above it, committed or not.
    pub(crate) fn finished_above_committed(
        &self,
        owner: Ownership,
    ) -> Option<(i64, FinishedAbove)> {
        self.partition(owner)?.finished_above_committed()
    }

    /// Stops or goes on handing out records of a partition, as the user asked.
    pub(crate) fn set_paused(&mut self, owner: Ownership, paused: bool) {
        if let Some(partition) = self.partition_mut(owner) {
            partition.paused = paused;
        }
    }

    // ---- intake ----

    /// How many records may be read from the partition now, if they are as large as those before them.
    pub(crate) fn room(&self, owner: Ownership) -> usize {
        self.reading(owner).records
    }

    /// What may be read from the partition now.
    pub(crate) fn reading(&self, owner: Ownership) -> Reading {
        const NOTHING: Reading = Reading {
            records: 0,
            bytes: 0,
            stride: 0,
        };
        let Some(partition) = self.partition(owner) else {
            return NOTHING;
        };
        if partition.state != State::Running || partition.paused || partition.delayed.len() >= STOCK
        {
            return NOTHING;
        }
        let holds = self.breaker.holds();
        // While a dependency is down there is something to probe with, and no more.
        if holds && (partition.lanes.is_ready() || partition.lanes.len() >= FIRST_READ) {
            return NOTHING;
        }
        // Executors have plenty: what is read now would only be cold in the cache when its turn comes. More lanes would
        // not help either, with more turns out than there are permits, or one lane only.
        let enough = self.config.ordering == Ordering::ByPartition
            || self.turns_out >= self.config.concurrency + self.ahead() / 2;
        if enough && partition.lanes.len() >= STOCK {
            return NOTHING;
        }
        // One handler that takes its time keeps the whole read of its record in memory: with all handlers slow, at most
        // half of the budget is kept so. That bounds a read. What is admitted follows what is left of the budget.
        let max_read = (self.config.max_bytes / self.config.concurrency / 2).max(LEAST_READ);
        let expected = partition.typical_size();
        let (bytes, records) = self.left(partition, max_read.max(expected));
        let is_known = partition.counts.received > 0;
        if !self.takes_one(partition, is_known && bytes >= expected, records) {
            return NOTHING;
        }
        let left = (bytes.min(max_read) / expected).min(records).max(1);
        // What a partition's records weigh is learned from the first ones: few of them, then more.
        let read = if holds {
            1
        } else {
            READ.min(FIRST_READ + partition.counts.received as usize)
        };
        let careful = partition.suspects.room(&partition.window);
        let mut room = partition.window.room().min(read).min(left).min(careful);
        if partition.commits_first() {
            room = room.min(self.room_ahead(partition, holds));
        }
        let budget = Budget::new(self.config.max_bytes, self.owned);
        let stride = match budget.is_plenty(self.bytes, STRIDE * UNSEEN) {
            _ if !is_known => 1,
            true => STRIDE,
            false => (bytes / UNSEEN).clamp(1, STRIDE),
        };
        Reading {
            records: room,
            bytes: bytes.min(max_read).max(1),
            stride,
        }
    }

    /// Whether one more record of the partition is admitted, which may turn out to be larger than what is left.
    fn takes_one(&self, partition: &Partition<R>, fits: bool, records: usize) -> bool {
        if records > 0 && (fits || self.bytes < self.config.max_bytes / 2) {
            return true;
        }
        // Whoever has nothing has one, be it larger than the whole budget: a partition's backlog, which takes whatever is
        // given back, would otherwise keep a quiet one, or one with larger records, out for as long as it lasts. Of a
        // thousand partitions those wait that would bring it all to more than twice of what is allowed.
        let crowded = || {
            let partitions = self.partitions.iter().flatten();
            let holding = partitions.filter(|partition| partition.unfinished() > 0);
            self.bytes >= self.config.max_bytes.saturating_mul(2) && holding.count() >= ALWAYS
        };
        partition.unfinished() == 0 && !crowded()
    }

    /// At most once: how many more records may be read, and so committed before they are handled, by all partitions
    /// together. A crash loses as many as there are then: as few as keep the handlers busy, and while handlers fail no
    /// more than can be tried again. What waits for another attempt counts twice: it is committed, and it keeps another one
    /// from being committed for the handler that it will need.
    fn room_ahead(&self, partition: &Partition<R>, holds: bool) -> usize {
        let most = 2 * self.config.concurrency;
        // While a dependency is down, one record is enough to probe with.
        if holds && self.records() > self.setting_aside {
            return 0;
        }
        let left = most.saturating_sub(self.records() + self.schedule.len());
        match self.config.ordering {
            // Handlers run beside each other only if each partition has its share.
            Ordering::ByPartition => {
                let share = (most / self.owned.max(1)).max(2);
                left.min(share.saturating_sub(partition.unfinished()))
            }
            Ordering::ByKey | Ordering::Unordered => left,
        }
    }

    /// Bytes and records that a partition may still take of the budgets, at least as far as it wants that much.
    fn left(&self, partition: &Partition<R>, bytes_wanted: usize) -> (usize, usize) {
        let bytes = Budget::new(self.config.max_bytes, self.owned);
        let records = Budget::new(self.config.max_records, self.owned);
        if bytes.is_plenty(self.bytes, bytes_wanted) && records.is_plenty(self.records(), READ) {
            return (bytes_wanted, READ);
        }
        let found_at = (self.came, self.went, self.ids);
        let mut pools = self.pools.get();
        if pools.found_at != found_at {
            pools = Pools {
                found_at,
                bytes: 0,
                records: 0,
            };
            for partition in self.partitions.iter().flatten() {
                pools.bytes += bytes.pooled(partition.bytes);
                pools.records += records.pooled(partition.unfinished());
            }
            self.pools.set(pools);
        }
        (
            bytes.left(partition.bytes, pools.bytes),
            records.left(partition.unfinished(), pools.records),
        )
    }

    /// [`receive_due`](Self::receive_due), at once.
    #[cfg(test)]
    pub(crate) fn receive(
        &mut self,
        owner: Ownership,
        offset: i64,
        key: Option<u64>,
        bytes: usize,
        record: R,
    ) -> Received {
        self.receive_due(owner, offset, key, bytes, record, None)
    }

    /// Takes in the next record of a partition. `key` is the hash of its key; `bytes` is what it keeps in memory. Before it
    /// is `due` it is not handled, nor are those that come after it and may be due later; not for
    /// [`Guarantee::AtMostOnce`], where it would be committed long before.
    #[inline]
    pub(crate) fn receive_due(
        &mut self,
        owner: Ownership,
        offset: i64,
        key: Option<u64>,
        bytes: usize,
        record: R,
        due: Option<Instant>,
    ) -> Received {
        let Some(partition) = find_mut(&mut self.partitions, owner) else {
            return Received::Stale;
        };
        if partition.distrusted {
            return Received::Unproven;
        }
        if let Some(last) = partition
            .window
            .position()
            .filter(|position| offset < *position)
        {
            return Received::WentBack { last: last - 1 };
        }
        if partition.receive(offset, key, bytes, record, due, self.clock) {
            self.delays |= due.is_some();
            self.bytes += bytes;
            self.came += 1;
            if partition.commits_first() {
                self.next_commit = Some(self.now);
            }
            return Received::Queued;
        }
        if partition.commit_is_due() {
            self.note_change();
        }
        Received::AlreadyFinished
    }

    /// The record of a partition that comes next, at this offset, was written under another leader than the one before.
    pub(crate) fn elected(&mut self, owner: Ownership, offset: i64, epoch: i32) {
        if let Some(partition) = self.partition_mut(owner) {
            partition.elected(offset, epoch);
            if partition.commit_is_due() {
                self.note_change();
            }
        }
    }

    /// The client said something of this partition that may have moved its position past records it has not given us. From
    /// here on neither its position nor what it delivers is believed, until it reads from ours again: see
    /// [`reads_from_position`](Self::reads_from_position). Returns that position.
    pub(crate) fn distrust(&mut self, owner: Ownership) -> Option<i64> {
        let partition = self.partition_mut(owner)?;
        partition.distrusted = true;
        partition.window.position()
    }

    /// The client has dropped what it had fetched, and reads on from our position.
    pub(crate) fn reads_from_position(&mut self, owner: Ownership) {
        if let Some(partition) = self.partition_mut(owner) {
            partition.distrusted = false;
        }
    }

    pub(crate) fn is_distrusted(&self, owner: Ownership) -> bool {
        self.partition(owner)
            .is_some_and(|partition| partition.distrusted)
    }

    /// Where the client says that it stands: past offsets without records for us, such as transaction markers, unless that
    /// is not trusted.
    pub(crate) fn client_is_at(&mut self, owner: Ownership, position: i64) {
        if !self.is_distrusted(owner) {
            self.skip_to(owner, position);
        }
    }

    /// It was decided that the partition goes on at this offset, or it is known that there are no records for us below.
    pub(crate) fn skip_to(&mut self, owner: Ownership, position: i64) {
        if let Some(partition) = self.partition_mut(owner)
            && partition.skip_to(position)
        {
            self.note_change();
        }
    }

    /// The log was cut off at this offset, or has other records from there on: those are read next. Below it all goes on as
    /// before. What was at it and above is void, finished or not: what waits is dropped, the reports of what runs change
    /// nothing, and nothing of it is said in commits any more. Dead letters that are on their way are not called back.
    ///
    /// `None`: the partition is being given away, and where its log ends is for the next owner to find.
    pub(crate) fn cut_off(&mut self, owner: Ownership, offset: i64) -> Option<CutOff> {
        let partition = find_mut(&mut self.partitions, owner)?;
        if partition.state != State::Running {
            return None;
        }
        let first = partition.window.first_from(offset);
        let mut held = self.schedule.cut_off(owner, first);
        let retries = held.len();
        let mut keep = |of, seq, lane| {
            let void = of == owner && seq >= first;
            if void {
                held.push(lane);
            }
            !void
        };
        self.given_up.retain(|it| keep(it.owner, it.seq, it.lane));
        self.crashed.retain(|it| keep(it.owner, it.seq, it.lane));
        let unsent = held.len() - retries;
        let cut = partition.cut_off(offset, first, retries, unsent, &held);
        self.setting_aside -= unsent;
        self.bytes -= cut.bytes;
        self.went += cut.void as u64;
        self.note_change();
        Some(cut)
    }

    // ---- time ----

    /// Tells the time; retries that are due come back to their lanes, and records that are due enter them.
    pub(crate) fn advance(&mut self, now: Instant) {
        self.now = self.now.max(now);
        self.pace.sample(self.now, self.turns_out);
        self.breaker.advance(self.now);
        let now = self.breaker.clock(self.now);
        self.clock = clock(self.began, now);
        while let Some(waiting) = self.schedule.take_due(self.now) {
            if let Some(partition) = find_mut(&mut self.partitions, waiting.owner) {
                partition.resumed(waiting.queued.seq, now, self.clock);
                if waiting.outage {
                    partition.lanes.push_again(waiting.lane, waiting.queued);
                } else {
                    partition.lanes.push_front(waiting.lane, waiting.queued);
                }
                partition.lanes.release(waiting.lane);
            }
        }
        if self.delays {
            self.delays = false;
            for partition in self.partitions.iter_mut().flatten() {
                partition.release_due(self.now, self.clock);
                self.delays |= partition.delayed.len() > 0;
            }
        }
        self.attend_to_suspects();
    }

    /// When [`advance`](Self::advance) has something to do without any other event.
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        let commit = self
            .next_commit
            .filter(|_| self.commit_in_flight.is_none() && !self.hold_commits);
        let partitions = self.partitions.iter().flatten();
        let held_until = partitions
            .filter(|_| self.attentive)
            .filter_map(|partition| partition.suspects.held_until())
            .min();
        let breaker = self.breaker.next_wake();
        let partitions = self.partitions.iter().flatten();
        let due = partitions
            .filter(|_| self.delays)
            .filter_map(|partition| partition.delayed.next_due())
            .min();
        [self.schedule.next_due(), commit, held_until, due, breaker]
            .into_iter()
            .flatten()
            .min()
    }

    // ---- handing over ----

    /// So many turns may be out beyond the handlers, since they do something else first. Without, it is the [`Pace`] that
    /// says how much is in stock.
    pub(crate) fn run_ahead(&mut self, turns: usize) {
        self.run_ahead = Some(turns);
    }

    fn ahead(&self) -> usize {
        self.run_ahead.unwrap_or_else(|| self.pace.ahead())
    }

    /// The next batch for the executors, from the partition whose turn it is.
    pub(crate) fn next_batch(&mut self) -> Option<Batch<R>> {
        self.attend_to_suspects();
        let limit = self.config.concurrency + self.ahead();
        // How many turns may start at once; with others ahead of them nobody knows but who starts them.
        let at_once = self.run_ahead.map_or(self.config.concurrency, |_| 0);
        let on_trial = self.breaker.room();
        let allowed = limit
            .saturating_sub(self.turns_out)
            .min(on_trial.unwrap_or(usize::MAX));
        if allowed == 0 {
            return None;
        }
        let count = self.partitions.len();
        for step in 0..count {
            let at = (self.next_partition + step) % count;
            let Some(partition) = &mut self.partitions[at] else {
                continue;
            };
            // What is committed is handled, even if the user has paused its partition since: else it would keep others from
            // being read for as long as the pause lasts.
            let paused = partition.paused && !partition.commits_first();
            if paused
                || !partition.goes_on()
                || partition.state == State::Cut
                || !partition.lanes.is_ready()
            {
                continue;
            }
            // While permits are short, no partition takes the whole stock in one go.
            let mut turns = if allowed > 2 * count {
                (allowed / count).max(1)
            } else {
                1
            };
            let mut length = on_trial.map_or(self.pace.turn(), |_| 1);
            match self.pass(at) {
                Pass::Freely => {}
                Pass::Alone => (turns, length) = (1, 1),
                Pass::Held | Pass::Crashed(_) => continue,
            }
            self.next_partition = (at + 1) % count;
            let partition = self.partitions[at].as_mut()?;
            let buffer = self.spent.pop().unwrap_or_default();
            let beyond = self.turns_out + turns.min(partition.lanes.len()) > at_once;
            let (batch, taken) =
                partition.take_batch(turns.min(BATCH), length, beyond, self.clock, buffer);
            self.turns_out += taken;
            if on_trial.is_some() {
                for job in &batch.jobs {
                    self.breaker.began(batch.owner, job.seq, self.now);
                }
            }
            return Some(batch);
        }
        None
    }

    /// Whether the partition at this place may hand over its next record. What may not be run any more is taken out.
    #[inline]
    fn pass(&mut self, at: usize) -> Pass {
        let now = self.now;
        loop {
            let suspect = |partition: &Partition<R>| partition.suspects.is_any();
            let alone_is_free = !self.partitions[at].as_ref().is_some_and(suspect)
                || !self
                    .partitions
                    .iter()
                    .enumerate()
                    .any(|(other, partition)| {
                        let noted = |partition: &Partition<R>| partition.suspects.may_be_noted();
                        other != at && partition.as_ref().is_some_and(noted)
                    });
            let Some(partition) = &mut self.partitions[at] else {
                return Pass::Held;
            };
            match partition.pass(alone_is_free, now) {
                Pass::Crashed(deaths) => self.give_up_crashed(at, deaths),
                Pass::Held => {
                    self.attentive = true;
                    self.press(at);
                    return Pass::Held;
                }
                pass => return pass,
            }
        }
    }

    /// The next record is given up; what stands behind it in its lane waits until that is settled.
    fn give_up_crashed(&mut self, at: usize, deaths: u32) {
        let Some(partition) = &mut self.partitions[at] else {
            return;
        };
        let (batch, _) = partition.take_batch(1, 1, true, self.clock, Vec::new());
        for job in batch.jobs {
            partition.lanes.hold(job.lane);
            partition.report(job.lane);
            partition.give_up(job.seq, self.breaker.clock(self.now));
            self.setting_aside += 1;
            self.crashed.push_back(Crashed {
                owner: batch.owner,
                seq: job.seq,
                lane: job.lane,
                record: job.record,
                deaths,
            });
        }
    }

    /// The next record under which the process has died as often as it may.
    pub(crate) fn next_crashed(&mut self) -> Option<Crashed<R>> {
        self.crashed.pop_front()
    }

    /// Records of suspect partitions wait for commits: those are sent as soon as they say something new.
    fn attend_to_suspects(&mut self) {
        if !self.attentive {
            return;
        }
        self.attentive = false;
        for at in 0..self.partitions.len() {
            let Some(partition) = &mut self.partitions[at] else {
                continue;
            };
            if partition.suspects.needs_attention() {
                partition.attend_to_suspects(self.now);
                self.attentive = true;
                self.press(at);
            }
        }
    }

    fn press(&mut self, at: usize) {
        let now = self.now;
        let due = |partition: &Partition<R>| {
            partition.commit_is_due() && partition.committed.may_send(now)
        };
        if self.commit_in_flight.is_none() && self.partitions[at].as_ref().is_some_and(due) {
            self.next_commit = Some(now);
        }
    }

    /// Gives back the empty buffer of a batch.
    pub fn reuse(&mut self, spent: Vec<Job<R>>) {
        debug_assert!(spent.is_empty());
        if spent.capacity() > 0 && self.spent.len() < SPENT {
            self.spent.push(spent);
        }
    }

    /// Whether handlers have lately taken a fraction of a millisecond: many more finish in the time that [`Pace`] looks
    /// ahead than can be in progress.
    pub fn is_quick(&self) -> bool {
        self.pace.ahead() / 4 > self.config.concurrency
    }

    /// Whether more could be handed over or read, or a drain could end, once records that are out were reported.
    pub fn waits_for_reports(&self) -> bool {
        self.turns_out > 0
            && self.partitions.iter().flatten().any(|partition| {
                partition.out > 0 && partition.state != State::Running
                    || partition.lanes.len() > 0
                    || self.room(partition.owner) == 0
            })
    }

    // ---- verdicts ----

    /// A handed-over record is finished.
    #[inline]
    pub(crate) fn finished(&mut self, owner: Ownership, seq: u64, lane: LaneId, outcome: Outcome) {
        let Some(partition) = find_mut(&mut self.partitions, owner) else {
            return;
        };
        let evidence = match outcome {
            Outcome::Handled => Evidence::Answered,
            // It has come past the store, which may be what was down. Else a log of duplicates only, one probe after
            // another, would never end the outage.
            Outcome::Duplicate if self.breaker.room().is_some() => Evidence::Answered,
            _ => Evidence::Nothing,
        };
        self.breaker.ended(owner, seq, evidence, self.now);
        match partition.finish(seq, outcome) {
            Some(bytes) => {
                self.bytes -= bytes;
                self.went += 1;
            }
            None => partition.void_is_back(),
        }
        self.pace.record_done();
        if partition.report(lane) == Turn::Over {
            self.turns_out -= 1;
            self.pace.turn_over();
        }
        self.note_change();
    }

    /// The record starts now: its predecessor in the turn is done, or it has got its handler.
    pub(crate) fn started(&mut self, owner: Ownership, seq: u64) {
        let clock = self.clock;
        if let Some(partition) = self.partition_mut(owner) {
            partition.started(seq, clock);
        }
    }

    /// They were to start at once, and there was no handler free for them.
    pub(crate) fn waiting(&mut self, owner: Ownership, seqs: &[u64]) {
        if let Some(partition) = self.partition_mut(owner) {
            seqs.iter().for_each(|seq| partition.waits(*seq));
        }
    }

    /// Jobs that were handed over come back untouched, in their order.
    pub(crate) fn not_started(&mut self, owner: Ownership, jobs: Vec<Job<R>>) {
        let Some(partition) = find_mut(&mut self.partitions, owner) else {
            return;
        };
        for job in jobs.into_iter().rev() {
            let queued = Queued {
                record: job.record,
                seq: job.seq,
                attempts: job.attempt - 1,
            };
            self.breaker.not_begun(owner, job.seq);
            if partition.is_void(job.seq) {
                partition.void_is_back();
            } else {
                partition.not_started(job.seq);
                if partition.goes_on() {
                    partition.lanes.push_front(job.lane, queued);
                }
            }
            if partition.report(job.lane) == Turn::Over {
                self.turns_out -= 1;
            }
        }
    }

    /// An attempt failed. The record is tried again or given up; its lane waits either way.
    ///
    /// Its followers in the turn come back by [`not_started`](Self::not_started) before the time is told again: a retry
    /// that is due at once would otherwise stand behind them.
    pub(crate) fn failed(&mut self, owner: Ownership, failed: Failed<R, C>) {
        let Some(partition) = find_mut(&mut self.partitions, owner) else {
            return;
        };
        let Failed { job, then, cause } = failed;
        let void = partition.is_void(job.seq);
        if !void {
            partition.lanes.hold(job.lane);
        }
        if partition.report(job.lane) == Turn::Over {
            self.turns_out -= 1;
            self.pace.turn_over();
        }
        let evidence = match then {
            AfterFailure::Outage => Evidence::Down,
            AfterFailure::Retry(_) | AfterFailure::RetryAfter(..) => Evidence::Answered,
            AfterFailure::Postpone(_) | AfterFailure::Hold(_) | AfterFailure::GiveUp => {
                Evidence::Nothing
            }
        };
        let clock = self.breaker.clock(self.now);
        let held = self.breaker.holds();
        self.breaker.ended(owner, job.seq, evidence, self.now);
        if self.breaker.holds() && !held {
            self.schedule.end_outage_waits(self.now);
        }
        if void {
            return partition.void_is_back();
        }
        // How to try again, if at all; or for how long to wait where the record is not to blame.
        let retry = match then {
            AfterFailure::Retry(policy) => Ok(Some((policy, None))),
            AfterFailure::RetryAfter(wait, policy) => Ok(Some((policy, Some(wait)))),
            AfterFailure::GiveUp => Ok(None),
            AfterFailure::Postpone(wait) => {
                partition.postponed(job.seq, self.clock);
                partition.counts.postponed += 1;
                Err(wait)
            }
            AfterFailure::Hold(wait) => {
                let first = partition.held_by_its_key(job.seq, clock, self.clock);
                partition.counts.postponed += u64::from(first);
                Err(wait)
            }
            AfterFailure::Outage => {
                let outages = partition.met_outage(job.seq, clock, self.clock);
                partition.counts.outages += 1;
                Err(if self.breaker.holds() {
                    Duration::ZERO
                } else {
                    self.breaker.record_wait(outages)
                })
            }
        };
        let retry = match retry {
            Ok(retry) => retry,
            Err(wait) => {
                if partition.goes_on() {
                    let queued = Queued {
                        record: job.record,
                        seq: job.seq,
                        attempts: job.attempt - 1,
                    };
                    let due = later(self.now, wait);
                    let outage = evidence == Evidence::Down;
                    self.schedule.insert(due, owner, job.lane, queued, outage);
                }
                return;
            }
        };
        let random = splitmix(&mut self.random);
        let since_first = partition.failed_for(job.seq, clock, self.clock);
        let wait = retry.and_then(|(policy, asked)| {
            let policy = policy.as_ref().unwrap_or(&self.config.retry);
            match asked {
                Some(_) if policy.is_exhausted(job.attempt, since_first) => None,
                Some(wait) => Some(wait),
                None => policy.next(job.attempt, since_first, random),
            }
        });
        match wait {
            Some(wait) => {
                if partition.goes_on() {
                    partition.counts.retried += 1;
                    let due = later(self.now, wait);
                    let queued = Queued {
                        record: job.record,
                        seq: job.seq,
                        attempts: job.attempt,
                    };
                    self.schedule.insert(due, owner, job.lane, queued, false);
                }
            }
            None => {
                partition.give_up(job.seq, self.breaker.clock(self.now));
                self.setting_aside += 1;
                self.given_up.push_back(GivenUp {
                    owner,
                    seq: job.seq,
                    lane: job.lane,
                    record: job.record,
                    attempts: job.attempt,
                    cause,
                });
            }
        }
    }

    /// Gives up a record that waits for its next attempt. `false`: it does not.
    pub(crate) fn give_up(&mut self, owner: Ownership, seq: u64, cause: C) -> bool {
        let Some(partition) = find_mut(&mut self.partitions, owner) else {
            return false;
        };
        let Some((lane, queued)) = self.schedule.take(owner, seq) else {
            return false;
        };
        partition.give_up(seq, self.breaker.clock(self.now));
        self.setting_aside += 1;
        self.given_up.push_back(GivenUp {
            owner,
            seq,
            lane,
            record: queued.record,
            attempts: queued.attempts,
            cause,
        });
        true
    }

    /// The next record to dead-letter, or to do with what the user chose.
    pub(crate) fn next_given_up(&mut self) -> Option<GivenUp<R, C>> {
        self.given_up.pop_front()
    }

    /// A record that was given up has ended; its lane goes on.
    pub(crate) fn settle(&mut self, owner: Ownership, seq: u64, lane: LaneId, outcome: Outcome) {
        let Some(partition) = find_mut(&mut self.partitions, owner) else {
            return;
        };
        partition.given_up -= 1;
        self.setting_aside -= 1;
        match partition.finish(seq, outcome) {
            Some(bytes) => {
                self.bytes -= bytes;
                self.went += 1;
            }
            None => partition.void_is_settled(),
        }
        partition.lanes.release(lane);
        self.note_change();
    }

    /// A record that was given up will not end, since the consumer does: it stays unfinished, its lane waits, and
    /// nobody waits for it.
    pub(crate) fn abandon(&mut self, owner: Ownership) {
        if let Some(partition) = self.partition_mut(owner) {
            partition.given_up -= 1;
            self.setting_aside -= 1;
        }
    }

    // ---- commits ----

    #[inline]
    fn note_change(&mut self) {
        if self.next_commit.is_none() {
            self.next_commit = Some(later(self.now, self.config.commit_interval));
        }
    }

    /// The commit that is due now. Until it is answered there is no other.
    pub(crate) fn next_commit(&mut self) -> Option<Commit> {
        if self.hold_commits || self.commit_in_flight.is_some() {
            return None;
        }
        if self.recommit <= self.now {
            self.recommit = later(self.now, commit::RECOMMIT);
            self.next_commit = Some(self.now);
            for partition in self.partitions.iter_mut().flatten() {
                partition.commit_again();
            }
        }
        if self.next_commit.is_none_or(|at| at > self.now) {
            return None;
        }
        let now = self.now;
        let due = |partition: &&Partition<R>| partition.commit_is_due();
        let ready = self
            .partitions
            .iter()
            .flatten()
            .filter(due)
            .filter(|partition| partition.committed.may_send(now));
        let (mut apart, together): (Vec<_>, Vec<_>) =
            ready.partition(|partition| partition.committed.goes_apart());
        // First those that go apart. They are not many for long, as each either goes through or has to pause, whereas
        // the others are due again all the time.
        let chosen = if apart.is_empty() {
            together
        } else {
            choose(&mut self.doubt, &mut apart);
            apart
        };
        let entries: Vec<_> = chosen
            .into_iter()
            .filter_map(|partition| partition.commit_entry(false))
            .collect();
        if entries.is_empty() {
            let pending = self
                .partitions
                .iter()
                .flatten()
                .any(|partition| partition.commit_is_due());
            self.next_commit = pending.then(|| later(now, self.config.commit_interval));
            return None;
        }
        Some(self.send_commit(entries))
    }

    /// A last commit of partitions that are given away, whatever the time: first all together, `again` in smaller groups
    /// those that a failure has left in doubt, and after a pause those that it has hit. `None` when there is no more to send,
    /// for good or until [`last_commit_retry`](Self::last_commit_retry).
    pub(crate) fn final_commit(&mut self, owners: &[Ownership], again: bool) -> Option<Commit> {
        if self.commit_in_flight.is_some() {
            return None;
        }
        for owner in owners {
            if let Some(partition) = self.partition_mut(*owner) {
                partition.hand_over();
                if !again {
                    partition.committed.begin_last();
                }
            }
        }
        let now = self.now;
        let retry_is_due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        let mut owners: Vec<_> = owners.to_vec();
        owners.sort_unstable_by_key(|owner| owner.slot());
        let mut chosen: Vec<_> = owners
            .iter()
            .filter_map(|owner| {
                self.partitions
                    .get(owner.slot())?
                    .as_ref()
                    .filter(|it| it.owner == *owner)
            })
            .filter(|partition| partition.commit_is_due())
            .filter(|Partition { committed, .. }| {
                !again || committed.is_doubtful() || retry_is_due(committed.last_retry())
            })
            .collect();
        if again {
            choose(&mut self.doubt, &mut chosen);
        }
        let entries: Vec<_> = chosen
            .into_iter()
            .filter_map(|partition| partition.commit_entry(true))
            .collect();
        (!entries.is_empty()).then(|| self.send_commit(entries))
    }

    /// When a last commit that met passing trouble is worth another try.
    pub(crate) fn last_commit_retry(&self, owners: &[Ownership]) -> Option<Instant> {
        owners
            .iter()
            .filter_map(|owner| self.partition(*owner))
            .filter(|partition| partition.commit_is_due())
            .filter_map(|partition| partition.committed.last_retry())
            .min()
    }

    fn send_commit(&mut self, entries: Vec<CommitEntry>) -> Commit {
        let commit = Commit { entries };
        for entry in &commit.entries {
            if let Some(partition) = self.partition_mut(entry.owner) {
                partition.sent(entry);
            }
        }
        self.commit_in_flight = Some(commit.clone());
        commit
    }

    /// Whether any of them has something that the broker has not acknowledged.
    pub(crate) fn commit_is_due(&self, owners: &[Ownership]) -> bool {
        owners
            .iter()
            .filter_map(|owner| self.partition(*owner))
            .any(Partition::commit_is_due)
    }

    pub(crate) fn commit_in_flight(&self) -> bool {
        self.commit_in_flight.is_some()
    }

    /// The broker has answered the commit in flight: `results` for each of its partitions, in its order, as far as the
    /// answer named them, and `overall`.
    pub(crate) fn commit_answered(&mut self, results: &[CommitResult], overall: CommitResult) {
        let Some(commit) = self.commit_in_flight.take() else {
            return;
        };
        let refused = overall != CommitResult::Accepted
            || results.len() != commit.entries.len()
            || results
                .iter()
                .any(|result| *result != CommitResult::Accepted);
        // With several partitions in one commit an error says nothing sure about any of them: see [`Doubt`]. Which of
        // several had too much metadata is found out in the same way.
        let count = commit.entries.len();
        let shrink = overall == CommitResult::Shrink || results.contains(&CommitResult::Shrink);
        let differ = (shrink && count > 1) || results.windows(2).any(|pair| pair[0] != pair[1]);
        let too_long = match commit.entries.as_slice() {
            [only] if shrink && !only.metadata.is_empty() => Some(only.metadata.len()),
            _ => None,
        };
        let said = |result| overall == result || results.contains(&result);
        let in_vain = said(CommitResult::Rejoining) || said(CommitResult::Fatal);
        let now = self.now;
        let doubtful = refused && (differ || (count > 1 && !in_vain));
        for entry in &commit.entries {
            let Some(partition) = find_mut(&mut self.partitions, entry.owner) else {
                continue;
            };
            match too_long {
                _ if !refused => partition.accepted(entry),
                Some(length) => partition.shrink_metadata(length),
                None if doubtful => partition.committed.isolate(),
                None => partition.committed.failed(now, in_vain),
            }
        }
        if !refused {
            self.doubt.accepted(now);
        } else if differ || too_long.is_some() {
            self.doubt.some_failed(count, now);
        } else if in_vain {
            self.doubt.in_vain();
        } else if count > 1 {
            self.doubt.all_failed(count, now);
        } else if !self.doubt.is_answering(now) {
            // Nor would the others go through now.
            let partitions = self.partitions.iter_mut().flatten();
            partitions
                .filter(|partition| partition.commit_is_due())
                .map(|partition| &mut partition.committed)
                .filter(|committed| committed.goes_apart() && committed.may_send(now))
                .for_each(|committed| committed.failed(now, false));
        }
        let mut due = self
            .partitions
            .iter()
            .flatten()
            .filter(|partition| partition.commit_is_due())
            .peekable();
        self.next_commit = due
            .peek()
            .is_some()
            .then_some(later(now, self.config.commit_interval));
        if due.any(|partition| {
            (partition.committed.goes_apart() || partition.commits_first())
                && partition.committed.may_send(now)
        }) {
            self.next_commit = Some(now);
        }
    }

    /// A rebalance is being answered.
    pub(crate) fn holds_commits(&self) -> bool {
        self.hold_commits
    }

    /// While a rebalance is being answered only the drain's own commits go out.
    pub(crate) fn hold_commits(&mut self, hold: bool) {
        self.hold_commits = hold;
        if !hold {
            self.note_change();
        }
    }

    // ---- what can be seen ----

    /// The lowest unfinished record of a partition: what has finished behind it waits for it.
    pub(crate) fn head(&self, owner: Ownership) -> Option<OpenRecord> {
        let now = self.breaker.clock(self.now);
        self.partition(owner)?.head(now, self.clock)
    }

    /// The record of a partition that has been with its handler for longest, but for the head.
    pub(crate) fn running_behind(&self, owner: Ownership) -> Option<OpenRecord> {
        let now = self.breaker.clock(self.now);
        self.partition(owner)?.running_behind(now, self.clock)
    }

    /// Whether records of the partition may go to handlers: it is neither paused nor being given away.
    pub(crate) fn is_going(&self, owner: Ownership) -> bool {
        self.partition(owner)
            .is_some_and(|partition| partition.goes_on() && !partition.paused)
    }

    pub(crate) fn breaker(&self) -> &Breaker {
        &self.breaker
    }

    /// What the breaker has done since it was last asked. After an opening, what executors have not started is worth
    /// taking back.
    pub(crate) fn next_breaker_change(&mut self) -> Option<BreakerChange> {
        self.breaker.next_change()
    }

    /// Whether the record waits for its time to come: nothing is wrong with it.
    pub(crate) fn is_delayed(&self, owner: Ownership, seq: u64) -> bool {
        self.partition(owner)
            .is_some_and(|partition| partition.delayed.has(seq))
    }

    pub(crate) fn status(&self, owner: Ownership) -> Option<PartitionStatus> {
        let partition = self.partition(owner)?;
        let retrying = self.schedule.count(owner);
        Some(partition.status(retrying, self.now, self.clock))
    }

    /// Whether the partition has unfinished records.
    pub(crate) fn has_unfinished(&self, owner: Ownership) -> bool {
        self.partition(owner)
            .is_some_and(|partition| partition.unfinished() > 0)
    }

    /// What a record of the partition takes on average.
    pub(crate) fn typical_size(&self, owner: Ownership) -> usize {
        self.partition(owner).map_or(0, Partition::typical_size)
    }

    /// Number of all unfinished records.
    pub(crate) fn records(&self) -> usize {
        (self.came - self.went) as usize
    }

    /// Bytes of all unfinished records.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Turns that are out, over all partitions.
    pub(crate) fn turns_out(&self) -> usize {
        self.turns_out
    }

    fn partition(&self, owner: Ownership) -> Option<&Partition<R>> {
        self.partitions
            .get(owner.slot as usize)?
            .as_ref()
            .filter(|partition| partition.owner == owner)
    }

    fn partition_mut(&mut self, owner: Ownership) -> Option<&mut Partition<R>> {
        find_mut(&mut self.partitions, owner)
    }
}

/// Leaves those that go into the next commit.
fn choose<R>(doubt: &mut Doubt, ready: &mut Vec<&Partition<R>>) {
    let slots: Vec<_> = ready
        .iter()
        .map(|partition| partition.owner.slot())
        .collect();
    let chosen = doubt.choose(&slots);
    ready.truncate(chosen.end);
    ready.drain(..chosen.start);
}

/// Free-standing so that other fields of the engine can be used beside it.
#[inline]
fn find_mut<R>(
    partitions: &mut [Option<Partition<R>>],
    owner: Ownership,
) -> Option<&mut Partition<R>> {
    partitions
        .get_mut(owner.slot as usize)?
        .as_mut()
        .filter(|partition| partition.owner == owner)
}

/// A wait may be as long as a user likes; the clock ends somewhere.
fn later(now: Instant, wait: Duration) -> Instant {
    const FAR: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    now + wait.min(FAR)
}

/// Steele, Lea and Flood's SplitMix64: enough to spread retries.
fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
