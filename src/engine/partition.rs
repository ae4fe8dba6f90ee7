//! One partition while it is ours: its window, its lanes, and what is known of its commits.

use std::{
    cmp::Reverse,
    collections::HashMap,
    mem,
    ops::Range,
    time::{Duration, Instant},
};

use super::{
    BATCH, Batch, Config, Job, Outcome, Ownership,
    commit::{CommitEntry, Committed},
    delayed::Delayed,
    lanes::{LaneId, Lanes, Ordering, Queued, Turn},
    snapshot::{self, FinishedAbove, Identity, Inherited, Marks},
    staged::{Guarantee, Staged},
    suspects::{Pass, Suspects},
    window::{Finish, Window},
};

/// Assumed before the first record was seen.
const FIRST_SIZE: usize = 1024;
/// How many records the average size is of, roughly.
const SIZES_SEEN: u64 = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Running,
    /// To be given away: nothing is handed over any more.
    Draining,
    /// The same at most once, when there is no time left to handle what is committed: [`Engine::cut`](super::Engine::cut).
    Cut,
}

/// How the records of an ownership have ended so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    pub received: u64,
    /// Finished by an earlier owner, and not handed out again.
    pub already_finished: u64,
    pub handled: u64,
    pub skipped: u64,
    pub for_others: u64,
    pub dead_lettered: u64,
    /// To retry topics.
    pub moved: u64,
    pub dropped: u64,
    /// Received and not finished when the log was cut off below them.
    pub(crate) void: u64,
    /// Failed attempts after which the record was scheduled again.
    pub(crate) retried: u64,
    pub(crate) postponed: u64,
    /// Attempts that met an outage.
    pub(crate) outages: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.received += other.received;
        self.already_finished += other.already_finished;
        self.handled += other.handled;
        self.skipped += other.skipped;
        self.for_others += other.for_others;
        self.dead_lettered += other.dead_lettered;
        self.moved += other.moved;
        self.dropped += other.dropped;
        self.void += other.void;
        self.retried += other.retried;
        self.postponed += other.postponed;
        self.outages += other.outages;
    }
}

/// What an unfinished record is waiting for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RecordState {
    /// Its first call: for a record that has to come before it, or for a handler to be free.
    Queued,
    /// Its handler.
    Running,
    /// Its next attempt.
    Retrying,
    /// Records of its key that were set aside, under [`HoldKey::Wait`](crate::HoldKey::Wait).
    KeyHeld,
    /// The acknowledgement of its dead letter.
    DeadLettering,
}

/// A record that has not finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OpenRecord {
    pub(crate) seq: u64,
    pub(crate) offset: i64,
    pub(crate) key_hash: Option<u32>,
    pub(crate) state: RecordState,
    /// With its handler, since it was handed to it or had to report progress; otherwise without one, since it came or
    /// last failed.
    pub(crate) in_state: Duration,
    /// The same, or since its first failure if that is longer.
    pub(crate) age: Duration,
    /// Of that, what is not due to something else: time for which it was postponed, or met an outage.
    pub(crate) counts: Duration,
    /// Of the call that runs, or else comes next.
    pub(crate) attempt: u32,
    /// Finished records behind it.
    pub(crate) holds_back: usize,
}

/// What can be seen of a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PartitionStatus {
    pub(crate) position: Option<i64>,
    pub(crate) committable: Option<i64>,
    pub(crate) committed: Option<i64>,
    pub(crate) commit_failures: u32,
    /// Finished above the committable offset.
    pub held: usize,
    /// Of what is finished, how many records the last commit's snapshot had no room for.
    pub beyond_snapshot: usize,
    pub running: usize,
    pub queued: usize,
    /// Not due yet.
    pub delayed: usize,
    pub retrying: usize,
    /// Given up, its dead letter not acknowledged yet.
    pub(crate) dead_lettering: usize,
    pub(crate) bytes: usize,
    pub(crate) oldest_running: Option<OpenRecord>,
    /// Of those that are queued or wait for a retry.
    pub(crate) oldest_waiting: Option<OpenRecord>,
    /// Records to be handled with care, since the process that had the partition died.
    pub(crate) suspects: usize,
    pub(crate) draining: bool,
    pub(crate) paused: bool,
    /// Records whose handler runs. `running` counts those too that are on the way to one.
    pub(crate) at_work: usize,
    /// Committed and not finished, under [`Guarantee::AtMostOnce`].
    pub(crate) committed_left: usize,
    pub(crate) counts: Counts,
}

/// At most once: records that were committed, or may have been, and will not be handled, where their ownership ends now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Forfeited {
    /// All of them.
    pub(crate) records: usize,
    pub(crate) first_offset: i64,
    pub(crate) last_offset: i64,
    /// Those whose handler runs: it may have its effect all the same.
    pub(crate) running: usize,
    /// Those whose dead letter is on its way, and not acknowledged.
    pub(crate) dead_lettering: usize,
    /// Those whose commit was not answered: if it was not applied, they come again.
    pub(crate) in_doubt: usize,
}

/// What is known of a delivered record beside its offset.
#[derive(Debug, Clone, Copy)]
struct Slot {
    bytes: u32,
    /// Of the key's hash, and not zero; zero for a record without a key.
    key: u32,
    /// Since when it waits, by the engine's [`clock`]; with [`RUNNING`], since when it is with its handler.
    since: u32,
}
const RUNNING: u32 = 1 << 31;

/// A record that has failed before, or is given up. All times are of the clock that stands still while the outage breaker
/// holds.
#[derive(Debug, Clone, Copy)]
struct Failing {
    /// The first trouble of any kind.
    since: Instant,
    /// The first failure that counts, moved on by all time that does not.
    first: Instant,
    /// When it was last due.
    resumed: Instant,
    /// That counted.
    attempts: u32,
    given_up: bool,
    /// In a row.
    outages: u32,
    /// What passes from `resumed` until it is due again does not count.
    postponed: bool,
    /// It waits for its key.
    held: bool,
}

impl Failing {
    fn new(now: Instant) -> Self {
        Self {
            since: now,
            first: now,
            resumed: now,
            attempts: 0,
            given_up: false,
            outages: 0,
            postponed: false,
            held: false,
        }
    }
}

/// Of records that are gone, since the log was cut off below them: what has not come back yet. It changes nothing when it
/// does, and nothing waits for it but what comes next in its lane.
#[derive(Debug, Default)]
struct Void {
    /// Handed over.
    out: usize,
    /// Given up, their dead letters on their way.
    given_up: usize,
    /// Of the first state after the last cut. What was sent before is of the log as it was.
    version: u64,
}

/// What becomes of the records that a cut makes void, see [`Engine::cut_off`](super::Engine::cut_off).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CutOff {
    /// Where reading goes on.
    pub(crate) position: i64,
    /// Of the records at the cut and above it.
    pub(crate) sequences: Range<u64>,
    /// How many of them are unfinished.
    pub(crate) void: usize,
    /// And of those, how many are with handlers, or on the way to them.
    pub(crate) out: usize,
    /// What they all take, in bytes.
    pub(super) bytes: usize,
}

#[derive(Debug)]
pub(crate) struct Partition<R> {
    pub(crate) owner: Ownership,
    pub(crate) state: State,
    pub(crate) paused: bool,
    pub(crate) window: Window,
    /// The client's position is not ours: what it delivers and what it says of itself may pass over records.
    pub(crate) distrusted: bool,
    pub(crate) lanes: Lanes<R>,
    /// Under [`Guarantee::AtMostOnce`]: what must be committed before it may enter the lanes.
    staged: Option<Staged<R>>,
    /// What may not enter the lanes yet.
    pub(crate) delayed: Delayed<R>,
    /// Staged records that were dropped when the partition began to be given away, and the first of them.
    forgotten: usize,
    forgotten_from: Option<i64>,
    /// At most once: how far the broker may have committed beyond its last word.
    sent_to: Option<i64>,
    pub(crate) committed: Committed,
    pub(crate) counts: Counts,
    /// Bytes of unfinished records.
    pub(crate) bytes: usize,
    /// Records handed over and not reported.
    pub(crate) out: usize,
    /// Records given up and not settled.
    pub given_up: usize,
    void: Void,
    /// Finished records that the last commit's snapshot had no room for.
    pub beyond_snapshot: usize,
    /// What earlier owners finished, as far as the position has not passed it.
    inherited: FinishedAbove,
    /// The highest leader epoch of what was received.
    epoch: Option<i32>,
    identity: Identity,
    /// Characters that the broker takes as metadata, as far as is known.
    metadata_limit: usize,
    /// By `seq % len`, as long as the window's span at least.
    slots: Vec<Slot>,
    failing: HashMap<u64, Failing>,
    pub(super) suspects: Suspects,
    /// Moving average of record sizes: of all of them at first.
    size: usize,
    /// Moves with every finished record: what the broker has not seen yet is a commit to send.
    version: u64,
    ordering: Ordering,
}

impl<R> Partition<R> {
    pub(crate) fn new(
        owner: Ownership,
        config: &Config,
        start: Option<i64>,
        committed: Option<i64>,
        inherited: Inherited,
    ) -> Self {
        // The note of a process that died is taken back first of all: it would count again for what kills this one.
        let noted = inherited.marks.running.is_some() && config.crash_limit.is_some();
        let moved = start.is_some() && start != committed;
        Self {
            owner,
            state: State::Running,
            paused: false,
            window: Window::new(config.window, start),
            distrusted: false,
            lanes: Lanes::new(config.ordering),
            staged: (config.guarantee == Guarantee::AtMostOnce).then(Staged::new),
            delayed: Delayed::new(),
            forgotten: 0,
            forgotten_from: None,
            sent_to: None,
            committed: Committed::at(committed),
            counts: Counts::default(),
            bytes: 0,
            out: 0,
            given_up: 0,
            void: Void::default(),
            beyond_snapshot: 0,
            inherited: inherited.finished,
            epoch: None,
            identity: inherited.identity,
            metadata_limit: snapshot::LIMIT,
            slots: Vec::new(),
            failing: HashMap::new(),
            suspects: Suspects::new(
                // What was committed before it was handled does not come again, whatever it does to the process.
                config
                    .crash_limit
                    .filter(|_| config.guarantee == Guarantee::AtLeastOnce),
                config.concurrency,
                config.window,
                inherited.marks,
            ),
            size: FIRST_SIZE,
            version: u64::from(moved || noted),
            ordering: config.ordering,
        }
    }

    /// What one more record is expected to take.
    pub(crate) fn typical_size(&self) -> usize {
        self.size.max(1)
    }

    /// `false`: an earlier owner has finished it, so that nothing is kept of it.
    #[inline]
    pub fn receive(
        &mut self,
        offset: i64,
        key: Option<u64>,
        bytes: usize,
        record: R,
        due: Option<Instant>,
        clock: u32,
    ) -> bool {
        let seq = self.window.deliver(offset);
        if self.window.span() > self.slots.len() {
            self.grow_slots();
        }
        self.counts.received += 1;
        self.learn_size(bytes);
        if self.inherited.contains(offset) {
            self.counts.already_finished += 1;
            if self.window.finish(seq) == Finish::Advanced {
                self.version += 1;
            }
            return false;
        }
        let at = self.slot(seq);
        self.slots[at] = Slot {
            bytes: u32::try_from(bytes).unwrap_or(u32::MAX),
            key: key.map_or(0, |key| (key as u32).max(1)),
            since: clock,
        };
        self.bytes += bytes;
        let queued = Queued {
            record,
            seq,
            attempts: 0,
        };
        match (&mut self.staged, due) {
            (None, None) => self.lanes.push(key, queued),
            (None, Some(due)) => self.delayed.push(due, key, queued),
            (Some(staged), _) => staged.push(offset, key, queued),
        }
        true
    }

    /// One large record among small ones is not what the next ones are taken for.
    #[inline]
    fn learn_size(&mut self, bytes: usize) {
        let more = bytes as isize - self.size as isize;
        let moved = match self.counts.received {
            SIZES_SEEN.. => more / SIZES_SEEN as isize,
            count => more / count as isize,
        };
        self.size = self.size.wrapping_add_signed(moved);
    }

    #[inline]
    fn slot(&self, seq: u64) -> usize {
        seq as usize & (self.slots.len() - 1)
    }

    #[cold]
    fn grow_slots(&mut self) {
        let grown = (self.slots.len() * 2).max(256);
        let mut slots = vec![
            Slot {
                bytes: 0,
                key: 0,
                since: 0
            };
            grown
        ];
        let next = self
            .window
            .head()
            .map_or(0, |head| head + self.window.span() as u64);
        if let (Some(head), false) = (self.window.head(), self.slots.is_empty()) {
            // The newest record has no slot yet.
            for seq in head..next - 1 {
                slots[seq as usize & (grown - 1)] = self.slots[self.slot(seq)];
            }
        }
        self.slots = slots;
    }

    /// `true`: more can be committed than before.
    pub(crate) fn skip_to(&mut self, position: i64) -> bool {
        let before = self.window.committable();
        self.window.skip_to(position);
        let moved = self.window.committable() != before;
        self.version += u64::from(moved);
        moved
    }

    /// The log was cut off at this offset. `first`: the sequence from which on records are void. Of those, `retries` were
    /// taken out of the schedule and `unsent` were given up and nothing was done with them yet; their lanes are `held`.
    pub(super) fn cut_off(
        &mut self,
        offset: i64,
        first: u64,
        retries: usize,
        unsent: usize,
        held: &[LaneId],
    ) -> CutOff {
        let (mut void, mut bytes) = (0, 0);
        for seq in self.window.open_from(offset) {
            void += 1;
            bytes += self.slots[self.slot(seq)].bytes as usize;
        }
        let given_up = self.failing.extract_if(|seq, _| *seq >= first);
        let given_up = given_up.filter(|(_, failing)| failing.given_up).count();
        let waiting = self.lanes.cut_off(first)
            + self.delayed.cut_off(first)
            + self.staged.as_mut().map_or(0, |it| it.cut_off(offset))
            + retries;
        for lane in held {
            self.lanes.release(*lane);
        }
        let out = void - waiting - given_up;
        self.given_up -= unsent;
        self.void.given_up += given_up - unsent;
        self.void.out += out;
        debug_assert!(self.void.out <= self.out && self.void.given_up <= self.given_up);
        self.bytes -= bytes;
        self.counts.void += void as u64;
        let sequences = first..self.window.delivered();
        self.window.cut_off(offset);
        self.inherited.cut_off(offset);
        self.suspects.cut_off(offset, first);
        // What is committed may be above the cut.
        self.version += 1;
        self.void.version = self.version;
        self.committed.cut_off(offset);
        self.sent_to = self.sent_to.map(|sent| sent.min(offset));
        CutOff {
            position: self.window.position().unwrap_or(offset),
            sequences,
            void,
            out,
            bytes,
        }
    }

    /// The record at this offset, which is received next, has another leader epoch than the one before.
    pub(super) fn elected(&mut self, offset: i64, epoch: i32) {
        self.epoch = self.epoch.max(Some(epoch));
        // If it was written after all that an earlier owner has finished, so was what comes behind it.
        self.version += u64::from(self.inherited.written_at(offset, epoch));
    }

    /// Whether a report of this record changes nothing.
    pub(super) fn is_void(&self, seq: u64) -> bool {
        !self.window.is_open(seq)
    }

    /// A record that is gone has come back.
    pub(super) fn void_is_back(&mut self) {
        self.void.out = self.void.out.saturating_sub(1);
    }

    /// The dead letter of a record that is gone is acknowledged.
    pub(super) fn void_is_settled(&mut self) {
        self.void.given_up = self.void.given_up.saturating_sub(1);
    }

    /// Takes up to `turns` turns of up to `length` records each, and [`BATCH`] records in all, into an empty buffer.
    /// `beyond`: there are no handlers for them yet.
    pub(crate) fn take_batch(
        &mut self,
        turns: usize,
        length: usize,
        beyond: bool,
        clock: u32,
        mut jobs: Vec<Job<R>>,
    ) -> (Batch<R>, usize) {
        jobs.reserve(BATCH.min(turns.max(16)));
        let mut taken = 0;
        let mask = self.slots.len() - 1;
        while taken < turns && jobs.len() < BATCH {
            let first = jobs.len();
            let slots = &mut self.slots;
            let give = |queued: Queued<R>| {
                if jobs.len() == first && !beyond {
                    slots[queued.seq as usize & mask].since = clock | RUNNING;
                }
                jobs.push(Job {
                    record: queued.record,
                    seq: queued.seq,
                    lane: 0,
                    attempt: queued.attempts + 1,
                    followers: 0,
                });
            };
            let Some((lane, count)) = self.lanes.take_turn(length.min(BATCH - first), give) else {
                break;
            };
            for (at, job) in jobs[first..].iter_mut().enumerate() {
                job.lane = lane;
                job.followers = (count - 1 - at) as u32;
            }
            taken += 1;
        }
        self.out += jobs.len();
        (
            Batch {
                owner: self.owner,
                jobs,
                beyond,
            },
            taken,
        )
    }

    /// Records that are received and not finished.
    #[inline]
    pub(crate) fn unfinished(&self) -> usize {
        self.window.unfinished()
    }

    /// Marks a record as finished and returns the bytes that it had kept; `None`: it was finished already.
    #[inline]
    pub(crate) fn finish(&mut self, seq: u64, outcome: Outcome) -> Option<usize> {
        // The slot is read first: once the window has moved past it, a later record may take it.
        let at = self.slot(seq);
        if self.window.finish(seq) == Finish::Stale {
            return None;
        }
        self.version += 1;
        match outcome {
            Outcome::Handled => self.counts.handled += 1,
            Outcome::Skipped => self.counts.skipped += 1,
            Outcome::ForOthers => self.counts.for_others += 1,
            // Whoever found it has counted it, by where its id was.
            Outcome::Duplicate => {}
            Outcome::DeadLettered => self.counts.dead_lettered += 1,
            Outcome::Moved => self.counts.moved += 1,
            Outcome::Dropped => self.counts.dropped += 1,
        }
        if !self.failing.is_empty() {
            self.failing.remove(&seq);
        }
        let bytes = self.slots[at].bytes as usize;
        self.bytes -= bytes;
        Some(bytes)
    }

    #[inline]
    pub(crate) fn report(&mut self, lane: LaneId) -> Turn {
        self.out -= 1;
        self.lanes.report(lane)
    }

    /// It is handed over, and has no handler yet.
    pub(crate) fn waits(&mut self, seq: u64) {
        if self.window.is_open(seq) {
            let at = self.slot(seq);
            self.slots[at].since &= !RUNNING;
        }
    }

    pub(crate) fn started(&mut self, seq: u64, clock: u32) {
        if self.window.is_open(seq) {
            let at = self.slot(seq);
            self.slots[at].since = clock | RUNNING;
        }
    }

    /// The record has come back untouched.
    pub(crate) fn not_started(&mut self, seq: u64) {
        self.suspects.came_back(seq);
        let at = self.slot(seq);
        self.slots[at].since &= !RUNNING;
    }

    /// Notes a failed attempt, and returns for how long the record has been failing.
    pub(crate) fn failed_for(&mut self, seq: u64, now: Instant, clock: u32) -> Duration {
        let failing = self.failing(seq, now);
        if failing.attempts == 0 {
            failing.first = now;
        }
        failing.attempts += 1;
        failing.outages = 0;
        failing.held = false;
        let first = failing.first;
        let at = self.slot(seq);
        self.slots[at].since = clock;
        now.saturating_duration_since(first)
    }

    /// It waits through no fault of its own: that time does not count as failing.
    pub(crate) fn postponed(&mut self, seq: u64, clock: u32) {
        if let Some(failing) = self.failing.get_mut(&seq) {
            failing.postponed = true;
        }
        self.suspects.came_back(seq);
        let at = self.slot(seq);
        self.slots[at].since = clock;
    }

    /// It waits for its key; returns whether that is new.
    pub(crate) fn held_by_its_key(&mut self, seq: u64, now: Instant, clock: u32) -> bool {
        let first = !mem::replace(&mut self.failing(seq, now).held, true);
        self.postponed(seq, clock);
        first
    }

    /// The record is not going to be run again.
    pub(crate) fn give_up(&mut self, seq: u64, now: Instant) {
        self.given_up += 1;
        self.failing(seq, now).given_up = true;
    }

    fn failing(&mut self, seq: u64, now: Instant) -> &mut Failing {
        self.failing.entry(seq).or_insert(Failing::new(now))
    }

    /// Its attempt met an outage; returns how many of them have done so in a row.
    pub(crate) fn met_outage(&mut self, seq: u64, now: Instant, clock: u32) -> u32 {
        let failing = self.failing(seq, now);
        failing.outages = failing.outages.saturating_add(1);
        failing.held = false;
        let outages = failing.outages;
        self.postponed(seq, clock);
        outages
    }

    /// It is due again.
    pub(crate) fn resumed(&mut self, seq: u64, now: Instant, clock: u32) {
        let at = self.slot(seq);
        let Some(failing) = self.failing.get_mut(&seq) else {
            return;
        };
        if mem::take(&mut failing.postponed) {
            failing.first += now.saturating_duration_since(failing.resumed);
            self.slots[at].since = clock;
        }
        failing.resumed = now;
    }

    pub(crate) fn commit_is_due(&self) -> bool {
        match &self.staged {
            None => self.committed.is_due(self.version),
            Some(_) if self.state == State::Running => {
                self.window.position() > self.committed.offset
                    || self.version > 0 && self.committed.is_in_doubt()
            }
            // What is given away takes nothing more on. But a commit that failed may have been applied all the same, and
            // what it covers would be handled by nobody. And where to start stays decided.
            Some(_) => {
                self.committed.goes_apart() || self.version > 0 && self.committed.is_in_doubt()
            }
        }
    }

    /// Under [`Guarantee::AtMostOnce`]: the first record that was read and is not known to be committed.
    fn not_taken_on(&self) -> Option<i64> {
        let staged = self.staged.as_ref().and_then(Staged::first);
        staged.or(self.forgotten_from)
    }

    /// Whether handlers may start only after a commit.
    pub(crate) fn commits_first(&self) -> bool {
        self.staged.is_some()
    }

    /// The broker has acknowledged this offset: what is below it may be handled.
    pub(crate) fn release(&mut self, committed: i64) {
        let Some(staged) = &mut self.staged else {
            return;
        };
        while let Some((key, queued)) = staged.release(committed) {
            self.lanes.push(key, queued);
        }
    }

    /// What is due enters the lanes. How long it waits for a handler counts from here.
    pub(crate) fn release_due(&mut self, now: Instant, clock: u32) {
        while let Some((key, queued)) = self.delayed.take_due(now) {
            let at = self.slot(queued.seq);
            self.slots[at].since = clock;
            self.lanes.push(key, queued);
        }
    }

    /// Drops what has not been handed over; but for records that are committed, or about to be by the commit in flight.
    pub(crate) fn drain(&mut self, in_flight: Option<i64>) {
        if self.state == State::Running {
            self.state = State::Draining;
        }
        match &mut self.staged {
            None => {
                self.lanes.clear_queued();
                self.delayed.clear();
            }
            Some(staged) => {
                // What is committed is handled now or never: a pause would only wait for its deadline.
                self.paused = false;
                let before = staged.len();
                // A second time what is lower.
                let first = staged.forget_from(in_flight.unwrap_or(i64::MIN));
                self.forgotten_from = first.or(self.forgotten_from);
                self.forgotten += before - staged.len();
            }
        }
    }

    /// Takes out what waits for a handler.
    pub(crate) fn take_queued(&mut self) -> Vec<(LaneId, Queued<R>)> {
        self.lanes.take_queued()
    }

    /// What its end now would leave to nobody.
    pub(crate) fn forfeited(&self) -> Option<Forfeited> {
        self.staged.as_ref()?;
        let position = self.window.position()?;
        let committed = self.not_taken_on().unwrap_or(position);
        let sent = self.sent_to.unwrap_or(committed).max(committed);
        let open = (self.window.passed()..self.window.delivered())
            .filter(|seq| self.window.is_open(*seq))
            .filter_map(|seq| Some((seq, self.window.offset(seq)?)))
            .take_while(|(_, offset)| *offset < sent);
        let mut forfeited = None;
        for (seq, offset) in open {
            let all = forfeited.get_or_insert(Forfeited {
                records: 0,
                first_offset: offset,
                last_offset: offset,
                running: 0,
                dead_lettering: 0,
                in_doubt: 0,
            });
            all.records += 1;
            all.last_offset = offset;
            let state = self.state_of(seq);
            all.running += usize::from(state == RecordState::Running);
            all.dead_lettering += usize::from(state == RecordState::DeadLettering);
            all.in_doubt += usize::from(offset >= committed);
        }
        forfeited
    }

    /// A commit goes out.
    pub(super) fn sent(&mut self, entry: &CommitEntry) {
        self.beyond_snapshot = entry.cut;
        if self.staged.is_some() {
            self.sent_to = self.sent_to.max(Some(entry.offset));
        }
    }

    /// Whether records of it may still be handed to handlers, again or for the first time.
    pub(crate) fn goes_on(&self) -> bool {
        self.state == State::Running || self.staged.is_some()
    }

    pub(crate) fn is_drained(&self) -> bool {
        self.out == self.void.out
            && self.given_up <= self.void.given_up
            && self.committed_left() == 0
    }

    /// Records that wait for the acknowledgement of a commit.
    pub(crate) fn staged(&self) -> usize {
        self.staged.as_ref().map_or(0, Staged::len)
    }

    /// Under [`Guarantee::AtMostOnce`]: records that are committed and not finished.
    pub(crate) fn committed_left(&self) -> usize {
        if self.staged.is_none() {
            return 0;
        }
        self.unfinished() - self.staged() - self.forgotten
    }

    /// Makes a commit due although nothing has changed.
    pub(super) fn commit_again(&mut self) {
        self.version = self.version.max(1);
        self.committed.doubt();
    }

    /// Whether the next record may be handed over.
    #[inline]
    pub(super) fn pass(&mut self, alone_is_free: bool, now: Instant) -> Pass {
        if self.suspects.are_none() {
            return Pass::Freely;
        }
        if self.suspects.runs_alone() && self.void.out > 0 {
            // What runs still of the log as it was may kill the process, and its record could not be named any more.
            return Pass::Held;
        }
        let Some(next) = self.lanes.peek() else {
            return Pass::Held;
        };
        let (window, version) = (&self.window, &mut self.version);
        self.suspects
            .pass(next, window, alone_is_free, now, version)
    }

    pub(super) fn attend_to_suspects(&mut self, now: Instant) {
        let reads = self.state == State::Running && !self.paused;
        let (window, version) = (&self.window, &mut self.version);
        self.suspects.attend(window, self.out, reads, now, version);
    }

    pub(super) fn accepted(&mut self, commit: &CommitEntry) {
        if commit.version < self.void.version {
            // It was sent before the log was cut off, and is to be replaced.
            self.committed = Committed::at(self.committed.offset);
            return;
        }
        self.committed.accepted(commit.offset, commit.version);
        self.sent_to = None;
        self.suspects.accepted(commit, &mut self.version);
        self.release(commit.offset);
    }

    /// It is given away in order: the last commit takes back what was marked in case of the process's death.
    pub(super) fn hand_over(&mut self) {
        self.version += u64::from(self.suspects.hand_over());
    }

    /// `last`: the one with which the partition is handed over.
    pub fn commit_entry(&self, last: bool) -> Option<CommitEntry> {
        if self.staged.is_some() {
            let offset = match self.state {
                State::Running => self.window.position(),
                State::Draining | State::Cut => self.not_taken_on().or(self.window.position()),
            }?;
            let none = std::iter::empty();
            let topic = snapshot::encode(
                self.identity,
                offset,
                &Marks::default(),
                none,
                None,
                self.metadata_limit,
            );
            return Some(CommitEntry {
                owner: self.owner,
                offset,
                metadata: topic.text,
                cut: 0,
                version: self.version,
                passed: 0,
                noted: false,
            });
        }
        let offset = self.window.committable()?;
        // Inherited ranges above the position stay in every commit: the next restart may come before they are passed.
        let position = self.window.position().unwrap_or(offset);
        let finished = self.window.finished_ranges();
        let inherited = self.inherited.to_commit(position);
        // What is left of that is not older than what was received.
        let epoch = match inherited.from(position).next() {
            None => self.epoch,
            Some(_) => inherited.epoch(),
        };
        let marks = self.suspects.marks(offset, last);
        let snapshot = snapshot::encode(
            self.identity,
            offset,
            &marks,
            finished.chain(inherited.from(position)),
            epoch,
            self.metadata_limit,
        );
        let cut = snapshot.cut.map_or(0, |cut| {
            let ahead = inherited.from(position.max(cut));
            let ahead = ahead.map(|range| range.end - range.start).sum::<i64>();
            self.window.finished_from(cut) + ahead as usize
        });
        Some(CommitEntry {
            owner: self.owner,
            offset,
            metadata: snapshot.text,
            cut,
            version: self.version,
            passed: self.window.passed(),
            noted: marks.running.is_some(),
        })
    }

    /// All that is finished above what the broker has acknowledged.
    pub(crate) fn finished_above_committed(&self) -> Option<(i64, FinishedAbove)> {
        let (committed, committable) = (self.committed.offset?, self.window.committable()?);
        let position = self.window.position().unwrap_or(committable);
        let finished = std::iter::once(committed..committable).chain(self.window.finished_ranges());
        let finished = FinishedAbove::of(finished).with_epoch(self.epoch);
        Some((committed, finished.or(self.inherited.above(position))))
    }

    /// The broker does not take metadata of this length.
    pub fn shrink_metadata(&mut self, refused: usize) {
        self.metadata_limit = refused / 2;
        self.committed = Committed::at(self.committed.offset);
        self.committed.isolate();
    }

    pub fn status(&self, retrying: usize, now: Instant, clock: u32) -> PartitionStatus {
        let (unfinished, delayed) = (self.unfinished(), self.delayed.len());
        let open = self.window.passed()..self.window.delivered();
        let at_work = open
            .filter(|_| self.out > 0)
            .filter(|seq| self.window.is_open(*seq) && self.state_of(*seq) == RecordState::Running)
            .count();
        let out = self.out - self.void.out;
        let running = match self.ordering {
            Ordering::Unordered => out,
            // A turn has one kind of records only, and nobody looks which.
            Ordering::ByKey | Ordering::ByPartition => self.lanes.turns_out().min(out),
        };
        let given_up = self.given_up.saturating_sub(self.void.given_up);
        PartitionStatus {
            position: self.window.position(),
            committable: self.window.committable(),
            committed: self.committed.offset,
            commit_failures: self.committed.failures(),
            held: self.window.held(),
            beyond_snapshot: self.beyond_snapshot,
            running,
            at_work,
            queued: unfinished.saturating_sub(running + retrying + given_up + delayed),
            delayed,
            retrying,
            dead_lettering: given_up,
            bytes: self.bytes,
            oldest_running: self.oldest(self.window.passed(), now, clock, |state| {
                state == RecordState::Running
            }),
            oldest_waiting: self.oldest(self.window.passed(), now, clock, |state| {
                matches!(
                    state,
                    RecordState::Queued | RecordState::Retrying | RecordState::KeyHeld
                )
            }),
            suspects: self.suspects.count(),
            draining: self.state != State::Running,
            paused: self.paused,
            committed_left: self.committed_left(),
            counts: self.counts,
        }
    }

    /// The lowest unfinished record.
    pub(crate) fn head(&self, now: Instant, clock: u32) -> Option<OpenRecord> {
        self.open_record(self.window.head()?, now, clock)
    }

    /// The record that has been with its handler for longest, but for the head.
    pub(crate) fn running_behind(&self, now: Instant, clock: u32) -> Option<OpenRecord> {
        let head = self.window.head().filter(|_| self.out > 0)?;
        self.oldest(head + 1, now, clock, |state| state == RecordState::Running)
    }

    /// Of unfinished records from this one on that are in such a state, the one that has been in it for longest.
    fn oldest(
        &self,
        from: u64,
        now: Instant,
        clock: u32,
        wanted: impl Fn(RecordState) -> bool,
    ) -> Option<OpenRecord> {
        let open = (from..self.window.delivered())
            .filter(|seq| self.window.is_open(*seq) && wanted(self.state_of(*seq)));
        let oldest = open.min_by_key(|seq| Reverse(self.in_state(*seq, clock)))?;
        self.open_record(oldest, now, clock)
    }

    fn state_of(&self, seq: u64) -> RecordState {
        if self.slots[self.slot(seq)].since & RUNNING != 0 {
            return RecordState::Running;
        }
        if self.failing.is_empty() {
            return RecordState::Queued;
        }
        match self.failing.get(&seq) {
            None => RecordState::Queued,
            Some(failing) if failing.given_up => RecordState::DeadLettering,
            Some(failing) if failing.held => RecordState::KeyHeld,
            Some(_) => RecordState::Retrying,
        }
    }

    fn in_state(&self, seq: u64, clock: u32) -> u32 {
        clock.wrapping_sub(self.slots[self.slot(seq)].since) & !RUNNING
    }

    /// `now` is of the clock of [`Failing`].
    fn open_record(&self, seq: u64, now: Instant, clock: u32) -> Option<OpenRecord> {
        let failing = self.failing.get(&seq);
        let in_state = Duration::from_millis(self.in_state(seq, clock).into());
        let failing_for = failing.map(|failing| now.saturating_duration_since(failing.since));
        let counts = match failing {
            None => in_state,
            Some(failing) if failing.postponed => {
                failing.resumed.saturating_duration_since(failing.first)
            }
            Some(failing) => in_state.max(now.saturating_duration_since(failing.first)),
        };
        let key = self.slots[self.slot(seq)].key;
        Some(OpenRecord {
            seq,
            offset: self.window.offset(seq)?,
            key_hash: (key != 0).then_some(key),
            state: self.state_of(seq),
            in_state,
            age: in_state.max(failing_for.unwrap_or_default()),
            counts,
            attempt: failing.map_or(1, |failing| failing.attempts + 1),
            holds_back: self.window.finished_behind(seq),
        })
    }
}

/// A clock for ages only. It begins anew every 24 days, and a partition may be ours for longer than that.
pub(super) fn clock(began: Instant, now: Instant) -> u32 {
    now.saturating_duration_since(began).as_millis() as u32 & !RUNNING
}
