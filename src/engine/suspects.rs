//! Records that kill the process: finding them among those that did not, from what commits have left behind.
//!
//! Nothing can be noted any more when a process dies, so it is noted before. Three ways of handing out a partition's
//! records, each with its own trace in the commits (see [`Marks`]):
//!
//! - **Freely.** The first commit of an ownership says that records are with handlers: the mark, acknowledged before the
//!   first of them is handed over. It is gone from the commits as soon as the head, the lowest unfinished record, has
//!   moved. Whoever finds it knows that the owner before died and that its head had not moved.
//! - **Carefully**, by an owner that has found the mark. What killed the process lies somewhere in what may have been a
//!   whole window. So at most [`MOST`] records are in the process above the acknowledged offset, until as many as a
//!   window holds have finished, and twice as many each time that this was not enough. They run together, and this costs little: most processes that die early were killed
//!   from outside, and their records are healthy. Should the process die again, the culprit is one of those few.
//! - **Alone**, by the owner after that one. Each of those few runs by itself, one in the process at a time whatever its
//!   partition, and an acknowledged commit names it first. Only this raises the count of deaths of a record. It goes
//!   back to zero when the record finishes, and at the limit the record is given up without being run again.
//!
//! A poison record moves no head past itself, so that after a few deaths the head is near it or does not move: it is
//! always found. Partitions that are not suspect notice one exchange with the broker before their first record.
//! A partition that is handed over in order leaves no mark, only what is still to be run alone or carefully.

use std::{
    mem,
    time::{Duration, Instant},
};

use super::{
    commit::CommitEntry,
    lanes::Next,
    snapshot::{Deaths, Marks},
    window::Window,
};

/// Records in the process at a time while a partition is handed out carefully, and then run alone: as many as can have
/// been with handlers, so that no concurrency is lost, within these bounds, so that running them alone has an end.
const LEAST: usize = 16;
const MOST: usize = 1024;

/// The first mark of an ownership is waited for no longer than this: it is worth less than going on.
const MARK_WAIT: Duration = Duration::from_secs(1);
/// With all finished and nothing coming for this long, what the dead owner had in its window has been run again.
const CALM: Duration = Duration::from_secs(2);

/// Whether records of a partition may be handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    Freely,
    /// One record, and nothing beside it.
    Alone,
    /// The process has died under the next record as often as it may.
    Crashed(u32),
    /// Not before a commit was acknowledged, or another suspect has finished.
    Held,
}

/// The mark that says: records are with handlers, several at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mark {
    Unset,
    /// In every commit from this version of the partition on.
    Asked {
        version: u64,
        head: i64,
        since: Instant,
    },
    Set {
        head: i64,
    },
    /// Set once, and not needed since the head has moved.
    Passed,
}

/// A record that runs alone, or is about to.
#[derive(Debug, Clone, Copy)]
struct Note {
    seq: u64,
    offset: i64,
    /// In every commit from this version on.
    version: u64,
    acknowledged: bool,
    /// With its handler.
    out: bool,
    /// It is one of those that were to run alone, and is counted as having done so.
    counted: bool,
}

/// What is suspected of one partition's records.
#[derive(Debug)]
pub(super) struct Suspects {
    /// Deaths after which a record is given up. `None`: nothing is marked and nobody is suspected.
    limit: Option<u32>,
    most: u32,
    mark: Mark,
    /// Records still to be run alone, and records to be handed out carefully after those.
    alone: u32,
    careful: u32,
    /// For how many an owner was careful that found the mark and came to their end, twice that from then on.
    longer: u32,
    /// Of unfinished records, ascending.
    deaths: Vec<Deaths>,
    note: Option<Note>,
    /// The broker may have a note, of this ownership or of the one before.
    may_be_noted: bool,
    /// The broker may have a mark or anything else that an orderly end takes back or changes.
    touched: bool,
    /// Sequence of the head that the broker has acknowledged.
    acknowledged: u64,
    idle_since: Option<Instant>,
}

impl Suspects {
    pub(super) fn new(
        limit: Option<u32>,
        concurrency: usize,
        window: usize,
        inherited: Marks,
    ) -> Self {
        let touched = !inherited.is_empty();
        let mut marks = match limit {
            Some(_) => inherited,
            None => Marks::default(),
        };
        let window = u32::try_from(window).unwrap_or(u32::MAX);
        if let Some(offset) = marks.running {
            marks.count_death(offset);
        }
        // With nothing said about how many may be to blame, it may be a whole window.
        let whole_window = marks.dirty && marks.alone == 0;
        Self {
            limit,
            most: concurrency.clamp(LEAST, MOST) as u32,
            mark: Mark::Unset,
            alone: marks.alone.min(MOST as u32),
            careful: match whole_window {
                true => marks.careful.max(window),
                false => marks.careful,
            },
            longer: match whole_window {
                true => marks.careful.max(window).saturating_mul(2),
                false => 0,
            },
            deaths: marks.deaths,
            note: None,
            may_be_noted: marks.running.is_some(),
            touched,
            acknowledged: 0,
            idle_since: None,
        }
    }

    /// Records still to be run alone, or handed out carefully.
    pub(super) fn count(&self) -> usize {
        (self.alone as usize).max(self.deaths.len()) + self.careful as usize
    }

    pub(super) fn runs_alone(&self) -> bool {
        self.note.is_some() || self.has_to_run_alone()
    }

    fn has_to_run_alone(&self) -> bool {
        self.alone > 0 || !self.deaths.is_empty()
    }

    pub(super) fn is_any(&self) -> bool {
        self.careful > 0 || self.runs_alone()
    }

    /// Nothing stands in the way of any record.
    pub(super) fn are_none(&self) -> bool {
        self.limit.is_none()
            || !self.is_any() && matches!(self.mark, Mark::Set { .. } | Mark::Passed)
    }

    pub(super) fn may_be_noted(&self) -> bool {
        self.may_be_noted
    }

    /// Something is to be done about it with time or with the next commit.
    pub(super) fn needs_attention(&self) -> bool {
        self.is_any() || self.is_held()
    }

    fn is_held(&self) -> bool {
        matches!(self.mark, Mark::Asked { .. })
    }

    /// When waiting for the mark ends.
    pub(super) fn held_until(&self) -> Option<Instant> {
        match self.mark {
            Mark::Asked { since, .. } if !self.is_any() => Some(since + MARK_WAIT),
            _ => None,
        }
    }

    /// How many more records may come into the process.
    pub(super) fn room(&self, window: &Window) -> usize {
        if !self.is_any() {
            return usize::MAX;
        }
        let inside = window.delivered() - self.acknowledged;
        (self.most as usize).saturating_sub(inside as usize)
    }

    /// Asks for the next record to be handed over. `version` is raised when that needs a commit first.
    pub(super) fn pass(
        &mut self,
        next: Next,
        window: &Window,
        alone_is_free: bool,
        now: Instant,
        version: &mut u64,
    ) -> Pass {
        let Some(limit) = self.limit else {
            return Pass::Freely;
        };
        let Some(offset) = window.offset(next.seq) else {
            return Pass::Freely;
        };
        if self.runs_alone() {
            return self.pass_alone(next, offset, limit, alone_is_free, version);
        }
        match self.mark {
            Mark::Set { .. } | Mark::Passed => Pass::Freely,
            Mark::Asked { .. } => Pass::Held,
            Mark::Unset => {
                *version += 1;
                self.touched = true;
                self.mark = Mark::Asked {
                    version: *version,
                    head: window.committable().unwrap_or(offset),
                    since: now,
                };
                Pass::Held
            }
        }
    }

    fn pass_alone(
        &mut self,
        next: Next,
        offset: i64,
        limit: u32,
        alone_is_free: bool,
        version: &mut u64,
    ) -> Pass {
        let deaths = self.deaths.iter().find(|deaths| deaths.offset == offset);
        let deaths = deaths.map_or(0, |deaths| deaths.count);
        match &mut self.note {
            Some(note) if note.out => Pass::Held,
            _ if deaths >= limit => Pass::Crashed(deaths),
            _ if !alone_is_free => Pass::Held,
            Some(note) if note.seq == next.seq => {
                if !note.acknowledged {
                    return Pass::Held;
                }
                note.out = true;
                note.counted = next.attempts == 0 && self.alone > 0;
                self.alone -= u32::from(note.counted);
                Pass::Alone
            }
            _ => {
                *version += 1;
                (self.may_be_noted, self.touched) = (true, true);
                self.note = Some(Note {
                    seq: next.seq,
                    offset,
                    version: *version,
                    acknowledged: false,
                    out: false,
                    counted: false,
                });
                Pass::Held
            }
        }
    }

    /// The record has come back without having been tried, or through no fault of its own: it has yet to run alone.
    pub(super) fn came_back(&mut self, seq: u64) {
        if let Some(note) = &mut self.note
            && note.seq == seq
            && mem::take(&mut note.counted)
        {
            self.alone += 1;
        }
    }

    /// Looks at what has become of the records that were handed over, of which `out` have not come back. `reads`: what
    /// comes is taken in.
    pub(super) fn attend(
        &mut self,
        window: &Window,
        out: usize,
        reads: bool,
        now: Instant,
        version: &mut u64,
    ) {
        if let Mark::Asked { head, .. } = self.mark
            && self.held_until().is_some_and(|until| until <= now)
        {
            self.mark = Mark::Set { head };
        }
        if !self.is_any() {
            return;
        }
        let position = window.position();
        self.deaths.retain(|deaths| {
            position.is_none_or(|position| deaths.offset >= position)
                || window.is_unfinished(deaths.offset)
        });
        let noted_for_nothing = |note: Note| match note.out {
            true => out == 0,
            false => !self.has_to_run_alone(),
        };
        if self.note.is_some_and(noted_for_nothing) {
            self.note = None;
            *version += 1;
        }
        let all_run = reads
            && window.delivered() > 0
            && window.span() == 0
            && self.acknowledged == window.delivered();
        self.idle_since = all_run.then_some(self.idle_since.unwrap_or(now));
        if self.idle_since.is_some_and(|since| now >= since + CALM) {
            self.acquit(version);
        }
    }

    /// All that was suspect has run: from here on as in an ownership that has just begun.
    fn acquit(&mut self, version: &mut u64) {
        (self.alone, self.careful) = (0, 0);
        self.mark = Mark::Unset;
        self.idle_since = None;
        *version += 1;
    }

    /// The log was cut off at this offset: what is suspected of records from this sequence on is suspected of none that
    /// there is now.
    pub(super) fn cut_off(&mut self, offset: i64, first: u64) {
        self.deaths.retain(|deaths| deaths.offset < offset);
        self.note = self.note.filter(|note| note.seq < first);
        if let Mark::Asked { head, .. } | Mark::Set { head } = self.mark
            && head >= offset
        {
            // It would be gone from the commits at once, although handlers are at work.
            self.mark = Mark::Unset;
        }
    }

    /// What a commit of this offset is to say. `handed_over`: it is the last one of an orderly end.
    pub(super) fn marks(&self, offset: i64, handed_over: bool) -> Marks {
        let marked = match self.mark {
            Mark::Asked { head, .. } | Mark::Set { head } => self.is_any() || head == offset,
            Mark::Unset | Mark::Passed => false,
        };
        let dirty = marked && !handed_over && !self.runs_alone();
        Marks {
            dirty,
            alone: match dirty && self.careful > 0 {
                true => self.most,
                false => self.alone,
            },
            careful: match dirty && self.careful == 0 {
                true => self.longer,
                false => self.careful,
            },
            running: self
                .note
                .map(|note| note.offset)
                .filter(|running| !handed_over && *running >= offset),
            deaths: self
                .deaths
                .iter()
                .filter(|deaths| deaths.offset >= offset)
                .copied()
                .collect(),
        }
    }

    /// `true`: the broker may have what an orderly end takes back.
    pub(super) fn hand_over(&mut self) -> bool {
        mem::take(&mut self.touched)
    }

    /// The broker has acknowledged this commit.
    pub(super) fn accepted(&mut self, commit: &CommitEntry, version: &mut u64) {
        let &CommitEntry {
            offset,
            version: of_version,
            passed,
            noted,
            ..
        } = commit;
        match self.mark {
            Mark::Asked { version, head, .. } if of_version >= version => {
                self.mark = Mark::Set { head };
            }
            Mark::Set { head } if offset > head && !self.is_any() => {
                (self.mark, self.longer, self.touched) = (Mark::Passed, 0, false);
            }
            _ => {}
        }
        if let Some(note) = &mut self.note {
            note.acknowledged |= of_version >= note.version;
        } else if !noted {
            self.may_be_noted = false;
        }
        let newly = u32::try_from(passed.saturating_sub(self.acknowledged)).unwrap_or(u32::MAX);
        self.acknowledged = self.acknowledged.max(passed);
        if self.careful > 0 && !self.runs_alone() {
            self.careful = self.careful.saturating_sub(newly);
            if self.careful == 0 {
                self.acquit(version);
            }
        }
    }
}
