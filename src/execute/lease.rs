//! A handler's view of the ownership that it works under.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use tokio::sync::Notify;

use super::{Context, Report};
use crate::engine::Ownership;

/// Closed when its ownership ends or is about to: what has not started by then does not start.
#[derive(Debug, Default)]
pub(crate) struct Fence {
    closed: AtomicBool,
    /// Until when handlers that run are awaited. Set before `closed`.
    until: OnceLock<Instant>,
    taken: Notify,
}

impl Fence {
    /// Closes it. Handlers that run are awaited until then; the first time given holds.
    pub(crate) fn close(&self, until: Instant) {
        self.until.get_or_init(|| until);
        self.closed.store(true, Ordering::Release);
        self.taken.notify_waiters();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    async fn closed(&self) {
        let mut taken = std::pin::pin!(self.taken.notified());
        // Registered before the look, so that no closing falls in between.
        taken.as_mut().enable();
        if !self.is_closed() {
            taken.await;
        }
    }
}

/// What all attempts of a batch share. One executor makes it and counts it, so that executors do not fight over the
/// reference counts of what is in it.
pub(crate) struct Lease {
    pub(super) context: Arc<Context>,
    pub(super) fence: Arc<Fence>,
    pub(super) owner: Ownership,
}

impl Lease {
    pub(crate) fn is_cancelled(&self) -> bool {
        self.fence.is_closed()
    }

    pub(crate) async fn cancelled(&self) {
        self.fence.closed().await;
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
