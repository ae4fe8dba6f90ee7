//! At most once: records that wait for the acknowledged commit that must come before their handlers.
//!
//! Under this guarantee the commit runs ahead of the handlers instead of behind them. What is read is staged; the next
//! commit covers all that is staged; its acknowledgement lets those records into their lanes. A record whose commit was
//! acknowledged is never read again, so that a partition that is given away handles what it can of them first.

use std::collections::VecDeque;

use super::lanes::Queued;

/// How often a record may take effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Guarantee {
    /// A record is committed after its handler has finished: a crash may make it come again, nothing is lost. The
    /// default.
    #[default]
    AtLeastOnce,
    /// A record is committed, and the commit acknowledged, before its handler is called: it never comes again. Failed
    /// attempts are still retried within the process.
    ///
    /// No more than twice [`concurrency`](crate::Builder::concurrency) records are committed and not finished at a time, in
    /// all partitions together; a record that waits for a retry counts twice, so that handlers which fail stop the reading.
    ///
    /// - A crash, or [`stop_now`](crate::ConsumerHandle::stop_now), loses those, that many at most.
    /// - A rebalance or a shutdown handles them. What cannot be handled, or tried again, within
    ///   [`drain_timeout`](crate::Builder::drain_timeout) or [`shutdown_timeout`](crate::Builder::shutdown_timeout) goes to the
    ///   [dead-letter topic](crate::Builder::dead_letter), as [`OutOfTime`](crate::FailureKind::OutOfTime), and handlers that
    ///   still run are stopped and their records dead-lettered as [`Interrupted`](crate::FailureKind::Interrupted): they may
    ///   have had their effect. For dead letters the last 2 s of that time are kept, or half of it if that is less.
    /// - Of partitions that are lost, since the group took this process for dead, what has not started is dead-lettered too.
    /// - Whatever is neither handled nor dead-lettered, where there is no dead-letter topic or it did not acknowledge in
    ///   time, is told of then, by [`Event::CommittedUnhandled`](crate::Event::CommittedUnhandled) and in the log, and counted
    ///   in [`Report::committed_unhandled`](crate::Report::committed_unhandled).
    ///
    /// What is committed is handled also if its partition is [paused](crate::ConsumerHandle::pause) meanwhile.
    AtMostOnce,
}

/// The records of one partition that are read and not committed yet.
#[derive(Debug)]
pub(crate) struct Staged<R> {
    waiting: VecDeque<(i64, Option<u64>, Queued<R>)>,
}

impl<R> Staged<R> {
    pub(crate) fn new() -> Self {
        Self {
            waiting: VecDeque::new(),
        }
    }

    pub(crate) fn push(&mut self, offset: i64, key: Option<u64>, queued: Queued<R>) {
        self.waiting.push_back((offset, key, queued));
    }

    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// The next record below this offset, which is committed now.
    pub(crate) fn release(&mut self, committed: i64) -> Option<(Option<u64>, Queued<R>)> {
        if self.waiting.front()?.0 >= committed {
            return None;
        }
        let (_, key, queued) = self.waiting.pop_front()?;
        Some((key, queued))
    }

    /// The lowest offset that waits.
    pub(crate) fn first(&self) -> Option<i64> {
        self.waiting.front().map(|(offset, ..)| *offset)
    }

    /// Forgets what the log does not have any more, and returns how many that were.
    pub(crate) fn cut_off(&mut self, offset: i64) -> usize {
        let before = self.len();
        self.forget_from(offset);
        before - self.len()
    }

    /// Forgets what no commit in flight covers, and returns the first of that.
    pub(crate) fn forget_from(&mut self, offset: i64) -> Option<i64> {
        let kept = self.waiting.partition_point(|(at, ..)| *at < offset);
        let forgotten = self.waiting.split_off(kept);
        forgotten.front().map(|(offset, ..)| *offset)
    }
}
