//! A handler's view of the ownership that it works under.

use std::{
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use tokio::sync::Notify;

use super::{Context, Issue, Report};
use crate::{engine::Ownership, retry_topics::Tier};

/// Closed when its ownership ends or is about to: what has not started by then does not start.
#[derive(Debug, Default)]
pub(crate) struct Fence {
    closed: AtomicBool,
    /// Until when handlers that run are awaited. Set before `closed`.
    until: OnceLock<Instant>,
    /// Records that are not to finish any more, by sequence; and whether there are any.
    condemned: Mutex<Vec<u64>>,
    condemns: AtomicBool,
    /// No handler of this ownership is awaited any longer.
    interrupts: AtomicBool,
    /// Sequences of records that the log does not have any more; and whether there are any.
    void: Mutex<Vec<Range<u64>>>,
    has_void: AtomicBool,
    /// Told when it was closed, or records were condemned or became void.
    told: Notify,
}

impl Fence {
    /// Closes it. Handlers that run are awaited until then; the first time given holds.
    pub(crate) fn close(&self, until: Instant) {
        self.until.get_or_init(|| until);
        self.closed.store(true, Ordering::Release);
        self.told.notify_waiters();
    }

    /// The record has held up its partition for too long: its handler is to be dropped.
    pub(crate) fn condemn(&self, seq: u64) {
        let mut condemned = self.condemned();
        if condemned.contains(&seq) {
            return;
        }
        condemned.push(seq);
        drop(condemned);
        self.condemns.store(true, Ordering::Release);
        self.told.notify_waiters();
    }

    /// At most once: handlers that run are dropped, so that their records can be set aside in time.
    pub(crate) fn interrupt(&self) {
        self.interrupts.store(true, Ordering::Release);
        self.told.notify_waiters();
    }

    pub(super) fn is_interrupted(&self) -> bool {
        self.interrupts.load(Ordering::Acquire)
    }

    /// The log was cut off below these: their handlers are told that they are cancelled. They are few, and one more at each
    /// cut.
    pub(crate) fn make_void(&self, sequences: Range<u64>) {
        lock(&self.void).push(sequences);
        self.has_void.store(true, Ordering::Release);
        self.told.notify_waiters();
    }

    fn is_void(&self, seq: u64) -> bool {
        self.has_void.load(Ordering::Acquire)
            && lock(&self.void).iter().any(|void| void.contains(&seq))
    }

    pub(super) fn is_condemned(&self, seq: u64) -> bool {
        self.condemns.load(Ordering::Acquire) && self.condemned().contains(&seq)
    }

    fn condemned(&self) -> MutexGuard<'_, Vec<u64>> {
        lock(&self.condemned)
    }

    /// Nothing that this record's handler does counts any more, or it is soon to be over.
    fn is_cancelled(&self, seq: u64) -> bool {
        self.is_closed() || self.is_condemned(seq) || self.is_void(seq)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub(super) async fn wait_until(&self, told: impl Fn(&Self) -> bool) {
        loop {
            let mut news = std::pin::pin!(self.told.notified());
            // Registered before the look, so that nothing falls in between.
            news.as_mut().enable();
            if told(self) {
                return;
            }
            news.await;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What all attempts of a batch share. One executor makes it and counts it, so that executors do not fight over the
/// reference counts of what is in it.
pub(crate) struct Lease {
    pub(super) context: Arc<Context>,
    pub(super) fence: Arc<Fence>,
    pub(super) owner: Ownership,
    pub(super) issue: Issue,
    /// The retry topic that the partition is of.
    pub(crate) tier: Option<Arc<Tier>>,
}

impl Lease {
    /// Whether what has not started is still to start.
    pub(super) fn is_wanted(&self) -> bool {
        !self.fence.is_closed() && !self.context.recall.has_called(self.issue)
    }

    pub(crate) fn is_cancelled(&self, seq: u64) -> bool {
        self.fence.is_cancelled(seq)
    }

    pub(crate) async fn cancelled(&self, seq: u64) {
        self.fence.wait_until(|fence| fence.is_cancelled(seq)).await;
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.fence.until.get().copied()
    }

    pub(crate) fn report_progress(&self, seq: u64) {
        let owner = self.owner;
        self.context
            .reports
            .send_quietly(Report::Progress { owner, seq });
    }
}
