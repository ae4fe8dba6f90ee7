//! The brokers: logs, a group's coordinator, committed offsets. And, beside each record, what has become of it: every
//! promise that can be broken by an event is checked when that event happens.

use std::{
    collections::{HashMap, VecDeque},
    time::{Duration, Instant},
};

use super::{Record, Setup, random::Random};
use crate::engine::{
    CommitEntry, CommitResult, FinishedAbove, Identity, Inherited, Marks, Ordering, Outcome,
    decode_snapshot,
};

/// How a record's handler takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Fine,
    /// There is nothing to do.
    Skipped,
    /// Fails at its first calls, then succeeds.
    Fails(u32),
    /// Asks for a certain wait once, then succeeds.
    AsksToWait,
    /// Fails at every call.
    Hopeless,
    /// Fails for good at once.
    Poison,
    /// The process dies of it.
    Kills,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) offset: i64,
    /// How often the log had been cut off when it was written.
    pub(super) cuts: usize,
    /// Leader epoch.
    pub(super) leader: i32,
    pub(super) key: Option<u64>,
    pub(super) bytes: usize,
    pub(super) fate: Fate,
    /// Nobody handles it before.
    pub(super) due: Option<Instant>,
    /// By tenure: somebody who is expelled and does not know it goes on.
    failing: Vec<Failing>,
    /// The tenures in which it finished.
    finished_in: Vec<usize>,
    /// And those of them whose engine was told so while they lasted.
    reported_in: Vec<usize>,
    /// The tenure that called its handler last.
    started_in: Option<usize>,
    /// Owners were told by a commit that the process before them died while it ran alone.
    deaths: u32,
    /// Processes that died of it since nothing else goes wrong.
    killed: u32,
    /// Committed before it was handled, by an owner that could not go on. At most once, that is its end.
    forfeited: bool,
    /// It was deleted before it was read, and that was told.
    told_deleted: bool,
    /// It was committed, and a late commit of an earlier owner has taken that back.
    set_back: bool,
    /// Processes that finished it in a partition which they lost, and have to know that.
    remembered_by: Vec<u32>,
    /// What is committed tells that it is finished.
    covered: bool,
    /// A commit told so once, and a later one could not or did not know: it may come again.
    exposed: bool,
}

/// What counts against a record in one tenure.
#[derive(Debug, Clone, Copy)]
struct Failing {
    tenure: usize,
    attempts: u32,
    /// On a clock that stands still while no more than probes goes on.
    first: Instant,
}

#[derive(Debug, Clone)]
pub(super) struct Committed {
    pub(super) offset: i64,
    pub(super) metadata: String,
    epoch: u32,
    /// Cuts of the log that its owner knew of.
    pub(super) cuts: usize,
    /// The tenure that committed it.
    by: usize,
}

#[derive(Default)]
pub(super) struct Log {
    /// One more each time that the topic is made anew.
    pub(super) epoch: u32,
    pub(super) entries: Vec<Entry>,
    pub(super) start: i64,
    pub(super) end: i64,
    /// Where it was cut off, one time after the other.
    pub(super) cuts: Vec<i64>,
    /// The leader's epoch.
    leader: i32,
    pub(super) committed: Option<Committed>,
    /// The process that the coordinator gave it to.
    owner: Option<u32>,
    revoking: bool,
    current: Option<usize>,
}

/// One ownership of one partition, as somebody sees it who sees everything.
#[derive(Debug)]
pub(super) struct Tenure {
    process: u32,
    pub(super) partition: usize,
    pub(super) epoch: u32,
    /// Cuts of the log that it knows of.
    pub(super) cuts: usize,
    /// Where it began, and where it has read to.
    start: i64,
    pub(super) read_to: i64,
    /// The highest offset that the brokers have committed for it.
    committed: i64,
    pub(super) end: Option<End>,
    /// Its executors are told to start nothing.
    pub(super) fenced: bool,
    /// Its last commit had no room for all that had finished.
    cut: bool,
    /// Started and not finished, with the lane where there is one.
    running: Vec<(Option<u64>, Record)>,
    /// Its last commit names this record as one that runs alone.
    noted: Option<i64>,
    /// Records under which processes have died, as it was told: each is named by a commit before it runs.
    blamed: Vec<i64>,
    /// It began where nobody had committed anything, and has committed nothing yet.
    owes_start: bool,
    /// At most once: between which offsets its owner has said, at its end, that records are committed and not handled.
    told: Option<Option<(i64, i64)>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// All that ran had finished, and the last commit was acknowledged.
    Clean,
    /// The process died, the ownership was lost, or a deadline passed.
    Torn,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum GroupEvent {
    Assigned(Vec<usize>),
    Revoked(Vec<usize>),
    Lost,
}

/// One partition's part of a commit, as its tenure meant it when it knew of so many cuts.
pub(super) struct Sent {
    pub(super) tenure: usize,
    pub(super) cuts: usize,
    pub(super) entry: CommitEntry,
}

/// A commit on its way to the coordinator.
pub(super) struct Request {
    pub(super) process: u32,
    pub(super) entries: Vec<Sent>,
    pub(super) arrives: Instant,
    /// Of partitions that are given away: the coordinator waits for it.
    pub(super) last: bool,
}

pub(super) struct Answer {
    pub(super) process: u32,
    pub(super) arrives: Instant,
    pub(super) results: Vec<CommitResult>,
    pub(super) overall: CommitResult,
}

pub(super) struct Kafka {
    pub(super) ordering: Ordering,
    pub(super) at_most_once: bool,
    crash_limit: Option<u32>,
    /// Records that kill the process are still to come, so many at most.
    killers: u32,
    pub(super) logs: Vec<Log>,
    pub(super) tenures: Vec<Tenure>,
    /// Processes in the group.
    pub(super) group: Vec<u32>,
    target: Vec<Option<u32>>,
    eager: bool,
    /// Everybody has to give back everything before anybody gets anything.
    all_revoked: bool,
    /// By process, of those that are static members.
    instances: HashMap<u32, u32>,
    /// Another process has taken their place.
    fenced: Vec<u32>,
    /// They may not commit any more.
    pub(super) forbidden: Vec<u32>,
    pub(super) mail: VecDeque<(u32, GroupEvent)>,
    pub(super) requests: Vec<Request>,
    pub(super) answers: Vec<Answer>,
    metadata_limit: usize,
    pub(super) down_until: Instant,
    pub(super) letters_down_until: Instant,
    /// What handlers depend on does not answer.
    pub(super) dependency_down_until: Instant,
    max_attempts: u32,
    retries_for: Option<Duration>,
    /// Nothing goes wrong any more.
    pub(super) calm: bool,
    /// Tells the story as it goes.
    pub(super) told: bool,
    began: Instant,
    pub(super) now: Instant,
    pub(super) counts: Counts,
}

/// What the world has seen, so that a test can tell that it has seen enough.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) records: u64,
    pub(super) started: u64,
    pub(super) repeats: u64,
    pub(super) crashes: u64,
    pub(super) lost: u64,
    pub(super) clean: u64,
    pub(super) torn: u64,
    pub(super) commits: u64,
    pub(super) refused: u64,
    pub(super) rewinds: u64,
    pub(super) cuts: u64,
    pub(super) resets: u64,
    pub(super) dead_letters: u64,
    pub(super) remembered: u64,
    pub(super) forfeited: u64,
    pub(super) taken_back: u64,
    pub(super) killed: u64,
    pub(super) crashed: u64,
    pub(super) replaced: u64,
    pub(super) fatal: u64,
    pub(super) paused: u64,
    pub(super) deleted: u64,
    pub(super) unread: u64,
    pub(super) outages: u64,
    pub(super) opened: u64,
    pub(super) still_down: u64,
    pub(super) closed: u64,
    pub(super) recalled: u64,
    pub(super) delayed: u64,
    pub(super) out_of_time: u64,
    pub(super) interrupted: u64,
    pub(super) elected: u64,
    pub(super) cut_off: u64,
    pub(super) cut_ahead: u64,
    pub(super) void: u64,
    pub(super) void_out: u64,
    pub(super) kept: u64,
    pub(super) committed_beyond: u64,
    pub(super) fetch_errors: u64,
}

impl Counts {
    pub(super) fn and(mut self, other: Self) -> Self {
        for (mine, other) in self.all_mut().into_iter().zip(other.clone().all_mut()) {
            *mine += *other;
        }
        self
    }

    fn all_mut(&mut self) -> [&mut u64; 39] {
        let Self {
            records,
            started,
            repeats,
            crashes,
            lost,
            clean,
            torn,
            commits,
            refused,
            rewinds,
            cuts,
            resets,
            dead_letters,
            remembered,
            forfeited,
            taken_back,
            killed,
            crashed,
            replaced,
            fatal,
            paused,
            deleted,
            unread,
            outages,
            opened,
            still_down,
            closed,
            recalled,
            delayed,
            out_of_time,
            interrupted,
            elected,
            cut_off,
            cut_ahead,
            void,
            void_out,
            kept,
            committed_beyond,
            fetch_errors,
        } = self;
        [
            records,
            started,
            repeats,
            crashes,
            lost,
            clean,
            torn,
            commits,
            refused,
            rewinds,
            cuts,
            resets,
            dead_letters,
            remembered,
            forfeited,
            taken_back,
            killed,
            crashed,
            replaced,
            fatal,
            paused,
            deleted,
            unread,
            outages,
            opened,
            still_down,
            closed,
            recalled,
            delayed,
            out_of_time,
            interrupted,
            elected,
            cut_off,
            cut_ahead,
            void,
            void_out,
            kept,
            committed_beyond,
            fetch_errors,
        ]
    }

    /// A world in which something never happens proves nothing about it.
    pub(super) fn assert_all_seen(mut self) {
        let shown = format!("{self:?}");
        assert!(
            self.all_mut().iter().all(|count| **count > 0),
            "something never happened: {shown}"
        );
    }
}

pub(super) fn identity(partition: usize) -> Identity {
    Identity::new("cluster", "group", "topic", partition as i32)
}

impl Committed {
    pub(super) fn epoch(&self) -> u32 {
        self.epoch
    }
}

impl Entry {
    fn is_open(&self) -> bool {
        self.finished_in.is_empty() && !self.forfeited && !self.told_deleted
    }
}

impl Log {
    fn entry_mut(&mut self, offset: i64) -> Option<&mut Entry> {
        let at = self
            .entries
            .binary_search_by_key(&offset, |entry| entry.offset)
            .ok()?;
        Some(&mut self.entries[at])
    }

    /// The lowest offset at which it was cut off since somebody knew of so many cuts.
    pub(super) fn cut_since(&self, known: usize) -> i64 {
        self.cuts
            .iter()
            .skip(known)
            .copied()
            .min()
            .unwrap_or(i64::MAX)
    }

    /// What is committed goes back. `true`: it was ahead.
    fn set_back_to(&mut self, offset: i64) -> bool {
        let before = self.committed.as_ref();
        let before = before.map_or(offset, |committed| committed.offset);
        for entry in &mut self.entries {
            entry.set_back |= (offset..before).contains(&entry.offset);
        }
        offset < before
    }
}

impl Kafka {
    pub(super) fn new(setup: &Setup, now: Instant) -> Self {
        Self {
            ordering: setup.engine.ordering,
            at_most_once: setup.at_most_once(),
            crash_limit: setup.engine.crash_limit,
            killers: setup.killers,
            logs: (0..setup.partitions).map(|_| Log::default()).collect(),
            tenures: Vec::new(),
            group: Vec::new(),
            target: vec![None; setup.partitions],
            eager: setup.eager,
            all_revoked: false,
            instances: HashMap::new(),
            fenced: Vec::new(),
            forbidden: Vec::new(),
            mail: VecDeque::new(),
            requests: Vec::new(),
            answers: Vec::new(),
            metadata_limit: setup.metadata_limit,
            down_until: now,
            letters_down_until: now,
            dependency_down_until: now,
            max_attempts: setup.max_attempts,
            retries_for: setup.retries_for,
            calm: false,
            told: false,
            began: now,
            now,
            counts: Counts::default(),
        }
    }

    pub(super) fn tell(&self, what: impl FnOnce() -> String) {
        if self.told {
            let at = self.now.duration_since(self.began).as_millis();
            println!("{at:>7} ms  {}", what());
        }
    }

    // ---- logs ----

    pub(super) fn produce(
        &mut self,
        partition: usize,
        setup: &Setup,
        random: &mut Random,
        more: &mut Random,
        outside: &mut Random,
    ) {
        let log = &mut self.logs[partition];
        // What was compacted away, or is a marker of a transaction.
        if !log.entries.is_empty() && random.chance(setup.gaps) {
            log.end += random.within(1..5) as i64;
        }
        let trouble = random.within(0..1000);
        let fate = if trouble >= setup.trouble {
            Fate::Fine
        } else {
            match random.below(6) {
                0 => Fate::Skipped,
                1 => Fate::AsksToWait,
                2 => Fate::Hopeless,
                3 => Fate::Poison,
                _ => Fate::Fails(random.within(1..3) as u32),
            }
        };
        let kills = self.killers > 0 && more.chance(20);
        self.killers -= u32::from(kills);
        let fate = if kills { Fate::Kills } else { fate };
        // Some say that they are due sooner than what stands in front of them.
        let due = setup.delays.get(partition).copied().flatten().map(|delay| {
            let sooner = outside.chance(100);
            let millis = delay.as_millis() as u64;
            self.now + if sooner { outside.ms(0..millis) } else { delay }
        });
        let keyless = random.chance(setup.keyless);
        let key = random.within(0..setup.keys);
        let bytes = random.within(600..super::LARGEST as u64) as usize;
        log.entries.push(Entry {
            offset: log.end,
            cuts: log.cuts.len(),
            leader: log.leader,
            key: (!keyless).then_some(key),
            bytes: setup.size(log.end).unwrap_or(bytes),
            fate,
            due,
            failing: Vec::new(),
            finished_in: Vec::new(),
            reported_in: Vec::new(),
            started_in: None,
            deaths: 0,
            killed: 0,
            forfeited: false,
            told_deleted: false,
            set_back: false,
            remembered_by: Vec::new(),
            covered: false,
            exposed: false,
        });
        log.end += 1;
        self.counts.records += 1;
    }

    /// A transaction ends: its marker is an offset without a record.
    pub(super) fn mark(&mut self, partition: usize) {
        self.logs[partition].end += 1;
    }

    /// The topic is deleted and made anew, and its group's offsets with it.
    pub(super) fn reset(&mut self, partition: usize) {
        self.tell(|| format!("partition {partition} is made anew"));
        let log = &mut self.logs[partition];
        log.epoch += 1;
        log.entries.clear();
        (log.start, log.end) = (0, 0);
        log.cuts.clear();
        log.committed = None;
        self.counts.resets += 1;
    }

    /// Another broker becomes the leader, and has the whole log.
    pub(super) fn elect(&mut self, partition: usize) {
        self.logs[partition].leader += 1;
        self.counts.elected += 1;
    }

    /// Something in this partition has killed a process, and may run again.
    pub(super) fn blames(&self, partition: usize) -> bool {
        let mut owned = self.tenures.iter().filter(|tenure| tenure.end.is_none());
        owned.any(|tenure| tenure.partition == partition && !tenure.blamed.is_empty())
    }

    /// A broker that had missed some of the log has become its leader: they are gone, and others take their offsets.
    pub(super) fn cut(&mut self, partition: usize, random: &mut Random) {
        let log = &mut self.logs[partition];
        // Somewhere near the end, but for the first record: by that another log is told.
        let first = log.entries.len().saturating_sub(60).max(1);
        let Some(range) = log.entries.get(first..).filter(|range| !range.is_empty()) else {
            return;
        };
        let at = first + random.below(range.len());
        let offset = log.entries[at].offset;
        if offset < log.start {
            return;
        }
        log.entries.truncate(at);
        log.end = offset;
        log.cuts.push(offset);
        log.leader += 1;
        self.tell(|| format!("partition {partition} is cut off at {offset}"));
    }

    /// An owner has noticed the cuts up to now, and goes on from the lowest of them, or from where it was.
    pub(super) fn noticed_cut(&mut self, tenure: usize, offset: i64) {
        let this = &mut self.tenures[tenure];
        this.cuts = self.logs[this.partition].cuts.len();
        this.read_to = this.read_to.min(offset);
        this.start = this.start.min(offset);
        this.committed = this.committed.min(offset);
        this.noted = this.noted.filter(|noted| *noted < offset);
        this.blamed.retain(|blamed| *blamed < offset);
        // It may have noticed the same in an earlier tenure, lost the partition before it could commit, and been given an
        // offset above the cut once more: what it remembers of that is void then.
        let (process, log) = (this.process, &mut self.logs[this.partition]);
        for entry in log.entries.iter_mut().filter(|it| it.offset >= offset) {
            entry.remembered_by.retain(|by| *by != process);
        }
        self.tell(|| format!("tenure {tenure} notices that its log was cut off at {offset}"));
    }

    /// The oldest records are deleted, whether somebody has read them or not.
    pub(super) fn delete(&mut self, partition: usize, random: &mut Random) {
        let log = &mut self.logs[partition];
        let to = random.below(log.entries.len() + 1);
        let start = log.entries.get(to).map_or(log.end, |entry| entry.offset);
        log.start = log.start.max(start);
        let start = log.start;
        self.counts.deleted += 1;
        self.tell(|| format!("partition {partition} begins at {start} now"));
    }

    /// Somebody is told that what is deleted from this offset on was not read.
    pub(super) fn tells_deleted(&mut self, partition: usize, from: i64) {
        let log = &mut self.logs[partition];
        let deleted = from..log.start;
        let mut count = 0;
        for entry in &mut log.entries {
            if deleted.contains(&entry.offset) && entry.finished_in.is_empty() {
                count += u64::from(!entry.told_deleted);
                entry.told_deleted = true;
            }
        }
        self.counts.unread += count;
        self.tell(|| {
            format!("of partition {partition}, {deleted:?} was deleted before it was read")
        });
    }

    /// Somebody writes over the metadata.
    pub(super) fn spoil_metadata(&mut self, partition: usize, random: &mut Random) {
        let log = &mut self.logs[partition];
        let Some(committed) = log.committed.as_mut() else {
            return;
        };
        match random.below(3) {
            0 => committed.metadata = "owner=billing".into(),
            1 => {
                let half = committed.metadata.len() / 2;
                committed.metadata.truncate(half);
            }
            _ => committed.metadata.clear(),
        }
        let offset = committed.offset;
        self.metadata_is_of_no_use(partition, offset);
    }

    /// What has finished at this offset and above may come again.
    pub(super) fn metadata_is_of_no_use(&mut self, partition: usize, offset: i64) {
        let entries = self.logs[partition].entries.iter_mut();
        for entry in entries.filter(|entry| entry.offset >= offset && entry.covered) {
            (entry.covered, entry.exposed) = (false, true);
        }
    }

    // ---- the group ----

    pub(super) fn join(&mut self, process: u32, instance: Option<u32>, random: &mut Random) {
        self.tell(|| format!("process {process} joins as {instance:?}"));
        if let Some(instance) = instance {
            self.instances.insert(process, instance);
            let same = |other: &u32| self.instances.get(other) == Some(&instance);
            if let Some(at) = self.group.iter().position(same) {
                return self.take_place(at, process);
            }
        }
        self.group.push(process);
        self.rebalance(random);
    }

    /// A static member has been started again within its session: no partition moves.
    fn take_place(&mut self, at: usize, process: u32) {
        let old = std::mem::replace(&mut self.group[at], process);
        self.counts.replaced += 1;
        self.fenced.push(old);
        self.mail.retain(|(to, _)| *to != old);
        for target in self.target.iter_mut().filter(|it| **it == Some(old)) {
            *target = Some(process);
        }
        let mut kept = Vec::new();
        for partition in 0..self.logs.len() {
            let log = &mut self.logs[partition];
            if log.owner != Some(old) {
                continue;
            }
            log.owner = (!log.revoking).then_some(process);
            if !std::mem::take(&mut log.revoking) {
                kept.push(partition);
            }
            if let Some(tenure) = log.current.take() {
                self.end_tenure(tenure, End::Torn);
            }
        }
        if !kept.is_empty() {
            self.mail.push_back((process, GroupEvent::Assigned(kept)));
        }
    }

    /// It has left, or its session has ended.
    pub(super) fn remove(&mut self, process: u32, random: &mut Random) {
        let before = self.group.len();
        self.group.retain(|member| *member != process);
        if self.group.len() == before {
            return;
        }
        self.tell(|| format!("process {process} is out of the group"));
        self.mail.retain(|(to, _)| *to != process);
        for partition in 0..self.logs.len() {
            if self.logs[partition].owner == Some(process) {
                self.logs[partition].owner = None;
                self.logs[partition].revoking = false;
                if let Some(tenure) = self.logs[partition].current.take() {
                    self.end_tenure(tenure, End::Torn);
                }
            }
        }
        self.mail.push_back((process, GroupEvent::Lost));
        self.rebalance(random);
    }

    pub(super) fn rebalance(&mut self, random: &mut Random) {
        let mut order = self.group.clone();
        random.shuffle(&mut order);
        let first = random.below(order.len().max(1));
        for (partition, target) in self.target.iter_mut().enumerate() {
            *target = (!order.is_empty()).then(|| order[(first + partition) % order.len()]);
        }
        self.all_revoked |= self.eager;
    }

    pub(super) fn coordinate(&mut self) {
        for process in self.group.clone() {
            let going: Vec<_> = (0..self.logs.len())
                .filter(|at| self.logs[*at].owner == Some(process) && !self.logs[*at].revoking)
                .filter(|at| self.all_revoked || self.target[*at] != Some(process))
                .collect();
            for partition in &going {
                self.logs[*partition].revoking = true;
            }
            if !going.is_empty() {
                self.mail.push_back((process, GroupEvent::Revoked(going)));
            }
        }
        if self.logs.iter().all(|log| log.owner.is_none()) {
            self.all_revoked = false;
        }
        if self.all_revoked {
            return;
        }
        for process in self.group.clone() {
            let coming: Vec<_> = (0..self.logs.len())
                .filter(|at| self.logs[*at].owner.is_none() && self.target[*at] == Some(process))
                .collect();
            for partition in &coming {
                self.logs[*partition].owner = Some(process);
            }
            if !coming.is_empty() {
                self.mail.push_back((process, GroupEvent::Assigned(coming)));
            }
        }
    }

    /// A member answers that it has given these back.
    pub(super) fn released(&mut self, process: u32, partitions: &[usize]) {
        for partition in partitions {
            let log = &mut self.logs[*partition];
            if log.owner == Some(process) {
                (log.owner, log.revoking) = (None, false);
            }
        }
    }

    // ---- tenures ----

    /// Where a new owner begins, and what it inherits.
    pub(super) fn position(&self, partition: usize) -> (i64, Option<i64>, Inherited) {
        let log = &self.logs[partition];
        let identity = identity(partition);
        // An offset of a log that is gone is out of range: somebody decides to begin with the new one.
        let committed = log
            .committed
            .as_ref()
            .filter(|committed| committed.epoch == log.epoch);
        let nothing = || Inherited {
            identity,
            ..Inherited::default()
        };
        let inherited = committed.and_then(|committed| {
            decode_snapshot(committed.metadata.as_bytes(), identity, committed.offset).ok()
        });
        let inherited = inherited.unwrap_or_else(nothing);
        let committed = committed.map(|committed| committed.offset);
        (committed.unwrap_or(0), committed, inherited)
    }

    /// `knows`: the process had it before, and has not died since.
    pub(super) fn begin_tenure(
        &mut self,
        process: u32,
        partition: usize,
        start: i64,
        cuts: usize,
        knows: bool,
    ) -> usize {
        let tenure = self.tenures.len();
        if let (Some(noted), false) = (self.marks(partition).running, knows)
            && let Some(entry) = self.logs[partition].entry_mut(noted)
        {
            entry.deaths += 1;
        }
        let marks = self.marks(partition);
        let deaths = marks.deaths.iter().map(|deaths| deaths.offset);
        let mut blamed: Vec<_> = deaths.chain(marks.running).collect();
        // Where nobody is looked for, where there is no room for names, and where what was written belongs elsewhere.
        let committed = self.logs[partition].committed.as_ref();
        if self.crash_limit.is_none()
            || self.at_most_once
            || self.metadata_limit < 4096
            || knows
            || committed.is_none_or(|committed| committed.offset != start)
        {
            blamed.clear();
        }
        let log = &mut self.logs[partition];
        self.tenures.push(Tenure {
            process,
            partition,
            epoch: log.epoch,
            cuts,
            start,
            read_to: start,
            committed: i64::MIN,
            end: None,
            fenced: false,
            cut: false,
            running: Vec::new(),
            noted: None,
            blamed,
            owes_start: log.committed.as_ref().map(|committed| committed.offset) != Some(start),
            told: None,
        });
        if log.owner == Some(process) {
            log.current = Some(tenure);
        } else {
            // It has been expelled and does not know it yet.
            self.tenures[tenure].end = Some(End::Torn);
        }
        self.tell(|| {
            let committed = &self.logs[partition].committed;
            format!("process {process} begins tenure {tenure} of partition {partition} after {committed:?}")
        });
        tenure
    }

    pub(super) fn end_tenure(&mut self, tenure: usize, end: End) {
        let Tenure {
            partition,
            epoch,
            end: known,
            fenced,
            cut,
            owes_start,
            ..
        } = &mut self.tenures[tenure];
        *fenced = true;
        let owes_start = *owes_start;
        if known.is_some() {
            return;
        }
        *known = Some(end);
        let (partition, epoch, cut) = (*partition, *epoch, *cut);
        self.tell(|| format!("tenure {tenure} ends {end:?}"));
        let log = &mut self.logs[partition];
        if log.current == Some(tenure) {
            log.current = None;
        }
        if end == End::Torn {
            self.counts.torn += 1;
            self.forfeit(tenure);
            return;
        }
        self.counts.clean += 1;
        if epoch != log.epoch {
            return;
        }
        assert!(
            !owes_start,
            "handed over in order, and where partition {partition} began is not committed"
        );
        if log.committed.as_ref().is_some_and(|it| it.by == tenure) {
            let marks = self.marks(partition);
            assert!(
                !marks.dirty && marks.running.is_none(),
                "partition {partition} was handed over in order, and looks as if its owner had died: {marks:?}"
            );
        }
        let log = &mut self.logs[partition];
        if self.at_most_once {
            let left = self.committed_and_not_finished(tenure);
            let left: Vec<_> = left.map(|entry| entry.offset).collect();
            assert!(
                left.is_empty(),
                "handed over in order, and {left:?} of partition {partition} are committed and not handled"
            );
            return;
        }
        let forgotten = log.entries.iter_mut().filter(|entry| {
            entry.finished_in.contains(&tenure) && !entry.covered && !entry.exposed
        });
        for entry in forgotten {
            assert!(
                cut,
                "handed over in order, and offset {} of partition {partition}, which finished, is not committed",
                entry.offset
            );
            entry.exposed = true;
        }
    }

    /// What an owner that commits first has taken on and not done.
    fn committed_and_not_finished(&mut self, tenure: usize) -> impl Iterator<Item = &mut Entry> {
        let Tenure {
            partition,
            epoch,
            cuts,
            start,
            read_to,
            committed,
            ..
        } = self.tenures[tenure];
        let log = &mut self.logs[partition];
        let there = epoch == log.epoch;
        let taken_on = start..read_to.min(committed);
        log.entries.iter_mut().filter(move |entry| {
            there
                && entry.cuts <= cuts
                && taken_on.contains(&entry.offset)
                && entry.finished_in.is_empty()
        })
    }

    fn forfeit(&mut self, tenure: usize) {
        if !self.at_most_once {
            return;
        }
        let mut count = 0;
        let told = self.tenures[tenure].told;
        for entry in self.committed_and_not_finished(tenure) {
            let said = told.is_none_or(|told| {
                told.is_some_and(|(first, last)| (first..=last).contains(&entry.offset))
            });
            assert!(
                said,
                "offset {} is committed, handled by nobody, and its owner has told of {told:?}",
                entry.offset
            );
            count += u64::from(!entry.forfeited);
            entry.forfeited = true;
        }
        self.counts.forfeited += count;
    }

    /// At most once: which records an owner says that nobody will handle, where it is still there to say something.
    pub(super) fn tells_forfeited(&mut self, tenure: usize, offsets: Option<(i64, i64)>) {
        self.tenures[tenure].told = Some(offsets);
    }

    /// At most once: how many records are committed and have not finished.
    pub(super) fn ahead(&self, tenure: usize) -> usize {
        let Tenure {
            partition,
            epoch,
            cuts,
            start,
            read_to,
            committed,
            ..
        } = self.tenures[tenure];
        let log = &self.logs[partition];
        let taken_on = start..read_to.min(committed);
        let ahead = log.entries.iter().filter(|entry| {
            entry.cuts <= cuts && taken_on.contains(&entry.offset) && entry.finished_in.is_empty()
        });
        if epoch == log.epoch { ahead.count() } else { 0 }
    }

    /// What an owner says at its end, where it is still there to say something: how many records it had committed and
    /// has not handled.
    pub(super) fn tells_left(&self, tenure: usize, acknowledged: Option<i64>, told: usize) {
        if !self.at_most_once {
            assert_eq!(told, 0, "nothing is committed before it is handled");
        }
        if !self.at_most_once || !self.is_there(tenure) {
            return;
        }
        let Tenure {
            partition,
            cuts,
            start,
            read_to,
            ..
        } = self.tenures[tenure];
        if self.logs[partition].cuts.len() > cuts {
            // What it knows of is gone, and what there is now it has not read.
            return;
        }
        let end = acknowledged.map_or(start, |offset| offset.min(read_to));
        let left = self.logs[partition].entries.iter().filter(|entry| {
            (start..end).contains(&entry.offset) && !entry.reported_in.contains(&tenure)
        });
        assert_eq!(
            left.count(),
            told,
            "committed and not handled, by tenure {tenure} of partition {partition}"
        );
    }

    /// What the partition's last owner has left in case that its process dies.
    fn marks(&self, partition: usize) -> Marks {
        let (.., inherited) = self.position(partition);
        inherited.marks
    }

    fn is_current(&self, tenure: usize) -> bool {
        self.logs[self.tenures[tenure].partition].current == Some(tenure)
    }

    /// Its log is the one that there is now.
    pub(super) fn is_there(&self, tenure: usize) -> bool {
        let Tenure {
            partition, epoch, ..
        } = self.tenures[tenure];
        self.logs[partition].epoch == epoch
    }

    // ---- what handlers do ----

    fn index(&self, record: Record) -> Option<usize> {
        let log = &self.logs[record.partition];
        if log.epoch != record.epoch {
            return None;
        }
        let at = log
            .entries
            .binary_search_by_key(&record.offset, |entry| entry.offset)
            .ok()?;
        // Another may have taken its place.
        (log.entries[at].cuts == record.cuts).then_some(at)
    }

    pub(super) fn fate(&self, record: Record) -> Fate {
        self.index(record).map_or(Fate::Fine, |at| {
            self.logs[record.partition].entries[at].fate
        })
    }

    /// A handler is called.
    pub(super) fn started(&mut self, tenure: usize, record: Record, attempt: u32) {
        assert!(
            !self.tenures[tenure].fenced,
            "{record:?} started behind a fence"
        );
        self.counts.started += 1;
        self.tell(|| {
            format!("tenure {tenure} calls the handler for {record:?}, attempt {attempt}")
        });
        let lane = match self.ordering {
            Ordering::Unordered => None,
            Ordering::ByKey => record.key,
            Ordering::ByPartition => Some(0),
        };
        let running = &mut self.tenures[tenure].running;
        let beside = running
            .iter()
            .find(|(other, _)| lane.is_some() && *other == lane);
        assert!(
            beside.is_none(),
            "{record:?} runs beside {beside:?} of its lane"
        );
        running.push((lane, record));
        self.runs_alone_if_it_has_to(tenure, record);
        let Some(at) = self.index(record) else {
            return;
        };
        if self.at_most_once {
            self.started_once(tenure, record, at);
        }
        let entries = &self.logs[record.partition].entries;
        let failing = entries[at].failing.iter();
        let failures = failing.filter(|it| it.tenure == tenure);
        let failures: u32 = failures.map(|it| it.attempts).sum();
        assert_eq!(attempt, 1 + failures, "{record:?} is handled by {tenure}");
        if entries[at].due.is_some() {
            let not_due = entries[..=at].iter().find(|entry| {
                entry.due > Some(self.now) && (entry.is_open() || entry.offset == record.offset)
            });
            assert!(
                not_due.is_none(),
                "{record:?} is handled, and {not_due:?} is not due"
            );
        }
        if lane.is_some() {
            let before = entries[..at].iter().find(|entry| {
                (self.ordering == Ordering::ByPartition || entry.key == record.key)
                    && entry.is_open()
            });
            if let Some(before) = before {
                panic!("{record:?} overtook offset {}", before.offset);
            }
        }
        let entry = &entries[at];
        assert!(
            !entry.finished_in.contains(&tenure),
            "{record:?} was handled again by the same owner"
        );
        if entry.finished_in.is_empty() || self.at_most_once {
            return;
        }
        if attempt == 1 {
            self.counts.repeats += 1;
        }
        assert!(
            !entry.remembered_by.contains(&self.tenures[tenure].process),
            "{record:?} came again to the process that had finished it before the partition was lost"
        );
        if !self.is_current(tenure) {
            // Another member is at work here, which this one cannot know.
            return;
        }
        assert!(
            !entry.covered,
            "{record:?} came again, although what is committed tells that it has finished"
        );
        let torn = |tenure: &usize| self.tenures[*tenure].end == Some(End::Torn);
        assert!(
            entry.exposed || entry.finished_in.iter().all(torn),
            "{record:?} came again without a reason"
        );
    }

    /// Whatever is blamed if the process dies now is the only suspect that runs.
    fn runs_alone_if_it_has_to(&self, tenure: usize, record: Record) {
        if self.crash_limit.is_none() {
            return;
        }
        let suspects = |tenure: &Tenure| {
            let mut running = tenure.running.iter();
            let is_out = |noted: &i64| running.any(|(_, record)| record.offset == *noted);
            tenure.noted.filter(is_out)
        };
        let this = &self.tenures[tenure];
        assert!(
            !this.blamed.contains(&record.offset) || this.noted == Some(record.offset),
            "{record:?} has killed a process, and runs before a commit names it"
        );
        if let Some(suspect) = suspects(this) {
            assert_eq!(
                this.running.len(),
                1,
                "{record:?} is started, and offset {suspect} runs alone"
            );
            let mut others = self.tenures.iter().filter(|other| {
                other.process == this.process && other.end.is_none() && suspects(other).is_some()
            });
            others.next();
            assert!(
                others.next().is_none(),
                "{record:?} runs alone, and so does one of another partition"
            );
        }
    }

    /// What handlers depend on is down from now on.
    pub(super) fn goes_down(&mut self, time: Duration) {
        self.dependency_down_until = self.now + time;
        self.tell(|| format!("what handlers depend on is down for {time:?}"));
    }

    pub(super) fn dependency_is_down(&self) -> bool {
        self.now < self.dependency_down_until
    }

    /// An engine is told that an attempt has failed in a way that counts. Its clock stands still while its breaker holds.
    pub(super) fn failed(&mut self, tenure: usize, record: Record, clock: Instant) {
        let Some(at) = self.index(record) else {
            return;
        };
        let entry = &mut self.logs[record.partition].entries[at];
        match entry.failing.iter_mut().find(|it| it.tenure == tenure) {
            Some(failing) => failing.attempts += 1,
            None => entry.failing.push(Failing {
                tenure,
                attempts: 1,
                first: clock,
            }),
        }
    }

    /// An engine gives up a record over its failures.
    pub(super) fn given_up(&self, tenure: usize, record: Record, attempts: u32, clock: Instant) {
        let Some(at) = self.index(record) else {
            return;
        };
        let entry = &self.logs[record.partition].entries[at];
        let failing = entry.failing.iter().find(|it| it.tenure == tenure);
        let failing = failing.expect("what never failed is not given up");
        assert_eq!(
            attempts, failing.attempts,
            "{record:?} is given up, and its attempts were {failing:?}"
        );
        let age = clock.saturating_duration_since(failing.first);
        let exhausted =
            attempts >= self.max_attempts || self.retries_for.is_some_and(|limit| age >= limit);
        assert!(
            exhausted || entry.fate == Fate::Poison,
            "{record:?} is given up after {attempts} attempts in {age:?}, and others were left"
        );
    }

    /// Its process dies of it.
    pub(super) fn kills(&mut self, record: Record) {
        self.counts.killed += 1;
        self.tell(|| format!("{record:?} kills its process"));
        let (calm, at_most_once, limit) = (self.calm, self.at_most_once, self.crash_limit);
        let at = self.index(record).expect("others kill nobody");
        let entry = &mut self.logs[record.partition].entries[at];
        entry.killed += u32::from(calm);
        // As often as the limit says, and before that mostly three times: more where others of its partition finished
        // and were committed each time, so that nothing was suspect.
        let most = limit.map_or(u32::MAX, |limit| limit + 8);
        assert!(
            at_most_once || entry.killed <= most,
            "{record:?} has killed {} processes and is not found",
            entry.killed
        );
    }

    /// An engine takes it that the process has died of it as often as it may.
    pub(super) fn crashed(&mut self, tenure: usize, record: Record, deaths: u32) {
        self.counts.crashed += 1;
        self.tell(|| format!("tenure {tenure} gives up {record:?} after {deaths} deaths"));
        let Some(at) = self.index(record) else {
            return;
        };
        let seen = self.logs[record.partition].entries[at].deaths;
        assert!(
            self.crash_limit.is_some_and(|limit| deaths >= limit) && deaths <= seen,
            "{record:?} is given up after {deaths} deaths, where {seen} were seen"
        );
    }

    /// At most once: its commit comes first, and nobody else calls a handler for it.
    fn started_once(&mut self, tenure: usize, record: Record, at: usize) {
        let committed = self.tenures[tenure].committed;
        assert!(
            record.offset < committed,
            "{record:?} is handled before it is committed"
        );
        let entry = &mut self.logs[record.partition].entries[at];
        let before = entry.started_in.replace(tenure);
        assert!(
            before.is_none_or(|before| before == tenure) || entry.set_back,
            "{record:?} is handled by tenure {before:?} and by tenure {tenure}"
        );
    }

    pub(super) fn stopped(&mut self, tenure: usize, record: Record) {
        self.tenures[tenure]
            .running
            .retain(|(_, other)| *other != record);
    }

    /// What a handler did is done, or a dead letter is safe.
    pub(super) fn finished(&mut self, tenure: usize, record: Record, outcome: Outcome) {
        if outcome == Outcome::DeadLettered {
            self.counts.dead_letters += 1;
        }
        self.tell(|| format!("tenure {tenure} has {outcome:?} {record:?}"));
        if let Some(at) = self.index(record) {
            let entry = &mut self.logs[record.partition].entries[at];
            entry.finished_in.push(tenure);
        }
    }

    /// The engine knows that it has finished.
    pub(super) fn reported(&mut self, tenure: usize, record: Record) {
        if let Some(at) = self.index(record) {
            let entry = &mut self.logs[record.partition].entries[at];
            entry.reported_in.push(tenure);
        }
    }

    /// The engine takes it that it has finished already.
    pub(super) fn passed_over(&mut self, tenure: usize, record: Record) {
        let Some(at) = self.index(record) else {
            return;
        };
        let entry = &mut self.logs[record.partition].entries[at];
        entry.reported_in.push(tenure);
        assert!(
            !entry.finished_in.is_empty(),
            "{record:?} is passed over and has not finished"
        );
        let process = self.tenures[tenure].process;
        if !entry.covered && entry.remembered_by.contains(&process) {
            self.counts.remembered += 1;
        }
    }

    // ---- what processes remember ----

    /// A partition ends whose last state is not committed: its process knows what has finished there, should it get it
    /// back.
    pub(super) fn remembers(&mut self, tenure: usize) {
        let Tenure {
            process,
            partition,
            epoch,
            ..
        } = self.tenures[tenure];
        let log = &mut self.logs[partition];
        if epoch != log.epoch {
            return;
        }
        for entry in &mut log.entries {
            if entry.reported_in.contains(&tenure) && !entry.remembered_by.contains(&process) {
                entry.remembered_by.push(process);
            }
        }
    }

    /// All of that is committed, or somebody has set the group back and asks for it again.
    pub(super) fn forgets(&mut self, process: u32, partition: usize) {
        for entry in &mut self.logs[partition].entries {
            entry.remembered_by.retain(|by| *by != process);
        }
    }

    // ---- commits ----

    pub(super) fn serve(&mut self, now: Instant, random: &mut Random) {
        if now < self.down_until {
            return;
        }
        while let Some(at) = self
            .requests
            .iter()
            .position(|request| request.arrives <= now)
        {
            let request = self.requests.remove(at);
            self.take_commit(request, now, random);
        }
    }

    fn take_commit(&mut self, request: Request, now: Instant, random: &mut Random) {
        let Request {
            process,
            entries,
            last,
            ..
        } = request;
        let count = entries.len();
        let too_long = |sent: &Sent| sent.entry.metadata.len() > self.metadata_limit;
        let in_group = self.group.contains(&process);
        let trouble = !self.calm && random.chance(100);
        let mut slow = false;
        self.counts.commits += 1;
        let (applied, results, overall) = if entries.iter().any(too_long) {
            // The others go through, and librdkafka reports the whole list as failed.
            let applied = entries.iter().map(|sent| !too_long(sent)).collect();
            let everywhere = vec![CommitResult::Shrink; count];
            (applied, everywhere, CommitResult::Shrink)
        } else if self.fenced.contains(&process) || self.forbidden.contains(&process) {
            self.counts.fatal += 1;
            (
                vec![false; count],
                vec![CommitResult::Fatal; count],
                CommitResult::Fatal,
            )
        } else if !in_group && (self.at_most_once || random.chance(500)) {
            (
                vec![false; count],
                vec![CommitResult::Rejoining; count],
                CommitResult::Rejoining,
            )
        } else if !trouble || !in_group {
            (
                vec![true; count],
                vec![CommitResult::Accepted; count],
                CommitResult::Accepted,
            )
        } else {
            match random.below(6) {
                // One fails, and which one the answer blames cannot be relied on.
                0 | 1 => {
                    let fails = random.below(count);
                    let applied = (0..count).map(|at| at != fails).collect();
                    let mut results = vec![CommitResult::Accepted; count];
                    results[random.below(count)] = CommitResult::Unavailable;
                    (applied, results, CommitResult::Accepted)
                }
                2 if !last => (
                    vec![false; count],
                    vec![CommitResult::Rejoining; count],
                    CommitResult::Rejoining,
                ),
                3 => (
                    vec![random.chance(500); count],
                    Vec::new(),
                    CommitResult::Unavailable,
                ),
                4 => {
                    // The answer is lost; the client notices after a while.
                    slow = true;
                    (
                        vec![random.chance(800); count],
                        Vec::new(),
                        CommitResult::Unavailable,
                    )
                }
                _ => (
                    vec![false; count],
                    vec![CommitResult::Unavailable; count],
                    CommitResult::Unavailable,
                ),
            }
        };
        self.counts.refused += u64::from(overall != CommitResult::Accepted);
        for (sent, applied) in entries.iter().zip(applied) {
            if applied {
                self.apply(sent);
            }
        }
        self.tell(|| format!("process {process} is answered {overall:?} {results:?}"));
        let delay = if slow {
            random.ms(1_000..4_000)
        } else {
            random.ms(0..40)
        };
        self.answers.push(Answer {
            process,
            arrives: now + delay,
            results,
            overall,
        });
    }

    fn apply(&mut self, sent: &Sent) {
        let &Sent {
            tenure,
            cuts,
            entry: ref commit,
        } = sent;
        let current = self.is_current(tenure);
        self.tell(|| {
            format!(
                "tenure {tenure} commits {} {:?}",
                commit.offset, commit.metadata
            )
        });
        let Tenure {
            partition,
            epoch,
            end,
            cut,
            noted,
            owes_start,
            ..
        } = &mut self.tenures[tenure];
        let partition = *partition;
        assert_ne!(
            *end,
            Some(End::Clean),
            "a commit of partition {partition} came after it was handed over in order"
        );
        let log = &mut self.logs[partition];
        let committed = Committed {
            offset: commit.offset,
            metadata: commit.metadata.clone(),
            epoch: *epoch,
            cuts,
            by: tenure,
        };
        if *epoch != log.epoch {
            for entry in log.entries.iter_mut().filter(|entry| entry.covered) {
                (entry.covered, entry.exposed) = (false, true);
            }
            log.set_back_to(0);
            log.committed = Some(committed);
            return;
        }
        *cut = commit.cut > 0;
        self.counts.cuts += u64::from(*cut);
        // Where the log was cut off and its owner did not know: what it says is true below that only, and no more can be
        // asked of it.
        let gone = log.cut_since(cuts);
        assert!(
            commit.offset.min(gone) <= log.end,
            "committed beyond the end"
        );
        self.counts.committed_beyond += u64::from(commit.offset > gone);
        if self.at_most_once {
            self.take_commit_ahead(tenure, committed);
            return;
        }
        let mut above = decode_snapshot(
            commit.metadata.as_bytes(),
            identity(partition),
            commit.offset,
        )
        .expect("a snapshot is read where it was written");
        *noted = above.marks.running.filter(|noted| *noted < gone);
        *owes_start = false;
        let mut rewound = false;
        let epoch = above.finished.epoch();
        for entry in &mut log.entries {
            // A reader takes a record that was written under a later leader for another one.
            let known = Some(entry.leader) <= epoch;
            let covers = entry.offset < gone
                && (entry.offset < commit.offset || known && above.finished.contains(entry.offset));
            if covers {
                assert!(
                    !entry.is_open(),
                    "offset {} of partition {partition} is committed and has not finished",
                    entry.offset
                );
                if current {
                    (entry.covered, entry.exposed) = (true, false);
                }
            } else if entry.covered {
                assert!(
                    !current || *cut,
                    "a commit of the owner took back that offset {} of partition {partition} has finished",
                    entry.offset
                );
                (entry.covered, entry.exposed) = (false, true);
                rewound |= !current;
            }
        }
        self.counts.rewinds += u64::from(rewound);
        log.committed = Some(committed);
    }

    /// At most once, what is committed is what was read.
    fn take_commit_ahead(&mut self, tenure: usize, committed: Committed) {
        let current = self.is_current(tenure);
        let gone = self.logs[self.tenures[tenure].partition].cut_since(committed.cuts);
        let offset = committed.offset.min(gone);
        let Tenure {
            partition,
            read_to,
            committed: known,
            end,
            owes_start,
            ..
        } = &mut self.tenures[tenure];
        *owes_start = false;
        let log = &mut self.logs[*partition];
        let unread = log
            .entries
            .iter()
            .find(|entry| (*read_to..offset).contains(&entry.offset) && !entry.told_deleted);
        assert!(
            unread.is_none(),
            "a commit of {offset} passes records that were not read, from {read_to} on"
        );
        if current {
            // It may take back what it has not begun.
            let begun = log.entries.iter().find(|entry| {
                (offset..*known).contains(&entry.offset) && entry.started_in == Some(tenure)
            });
            assert!(
                begun.is_none(),
                "{begun:?} has begun, and is not committed any more"
            );
            self.counts.taken_back += u64::from(offset < *known);
            *known = offset;
        } else {
            *known = offset.max(*known);
            self.counts.rewinds += u64::from(log.set_back_to(offset));
        }
        log.committed = Some(committed);
        if end.is_some() {
            // It was on its way when its owner died or lost the partition.
            self.forfeit(tenure);
        }
    }

    // ---- the end ----

    /// What is still missing, if anything is. `to_the_end`: owners pass offsets without records.
    pub(super) fn unfinished(&self, to_the_end: bool) -> Option<String> {
        for (partition, log) in self.logs.iter().enumerate() {
            if let Some(entry) = log.entries.iter().find(|entry| entry.is_open()) {
                return Some(format!(
                    "offset {} of partition {partition} is not finished",
                    entry.offset
                ));
            }
            let last = log.entries.last().map_or(0, |entry| entry.offset + 1);
            let end = if to_the_end { log.end } else { last };
            let is_there = log.committed.as_ref().is_some_and(|committed| {
                committed.epoch == log.epoch
                    && committed.offset <= log.cut_since(committed.cuts)
                    && (end..=log.end).contains(&committed.offset)
                    && self.says_nothing(partition, committed)
            });
            if !is_there {
                let committed = &log.committed;
                return Some(format!(
                    "of partition {partition}, which ends at {end}, {committed:?} is committed"
                ));
            }
        }
        None
    }

    /// Where all is finished, there may be left that what comes next is looked at more closely.
    fn says_nothing(&self, partition: usize, committed: &Committed) -> bool {
        let Committed {
            offset, metadata, ..
        } = committed;
        let Ok(left) = decode_snapshot(metadata.as_bytes(), identity(partition), *offset) else {
            return false;
        };
        let Marks {
            dirty,
            running,
            deaths,
            ..
        } = left.marks;
        let log = &self.logs[partition];
        // What was finished in what was cut off, and nothing has taken its place: the next record's epoch will tell.
        let of_what_is_gone = left.finished.epoch() < Some(log.leader)
            && left.finished.from(0).all(|range| range.start >= log.end);
        metadata.is_empty()
            || (self.crash_limit.is_some() && left.finished == FinishedAbove::default()
                || of_what_is_gone)
                && !dirty
                && running.is_none()
                && deaths.is_empty()
    }

    pub(super) fn has_requests_of(&self, process: u32) -> bool {
        self.requests
            .iter()
            .any(|request| request.process == process)
    }

    pub(super) fn delay(random: &mut Random) -> Duration {
        random.ms(0..30)
    }
}
