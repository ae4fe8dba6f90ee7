//! Records that are not to be handled before a certain time.
//!
//! They wait in the order of the log, outside the lanes, and only the first is looked at: where all have the same delay,
//! what came first is due first. A record that does not keep to that waits for those in front of it. None of them takes
//! part in what lanes, executors or the hunt for records that kill the process do.

use std::{collections::VecDeque, time::Instant};

use super::lanes::Queued;

#[derive(Debug)]
struct Waiting<R> {
    due: Instant,
    key: Option<u64>,
    queued: Queued<R>,
}

#[derive(Debug)]
pub(crate) struct Delayed<R> {
    line: VecDeque<Waiting<R>>,
}

impl<R> Delayed<R> {
    pub(crate) fn new() -> Self {
        Self {
            line: VecDeque::new(),
        }
    }

    pub(crate) fn push(&mut self, due: Instant, key: Option<u64>, queued: Queued<R>) {
        self.line.push_back(Waiting { due, key, queued });
    }

    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.line.front().map(|first| first.due)
    }

    pub(crate) fn take_due(&mut self, now: Instant) -> Option<(Option<u64>, Queued<R>)> {
        if self.next_due()? > now {
            return None;
        }
        let first = self.line.pop_front()?;
        Some((first.key, first.queued))
    }

    /// All from the first one on wait, and nothing else of the partition has come later.
    pub(crate) fn has(&self, seq: u64) -> bool {
        self.line
            .front()
            .is_some_and(|first| first.queued.seq <= seq)
    }

    pub(crate) fn len(&self) -> usize {
        self.line.len()
    }

    /// Forgets records from this sequence on, and returns how many that were.
    pub(crate) fn cut_off(&mut self, first: u64) -> usize {
        let kept = self.line.partition_point(|it| it.queued.seq < first);
        self.line.drain(kept..).count()
    }

    pub(crate) fn clear(&mut self) {
        self.line.clear();
    }
}
