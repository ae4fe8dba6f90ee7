//! Calls back what was handed over and has not started, of all partitions at once.

use std::sync::atomic::{AtomicU32, Ordering};

/// Which of the recalls a batch was handed over after.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Issue(u32);

/// Counts recalls. Looked at before each record: changed rarely, so that it stays in every core's cache.
#[derive(Debug, Default)]
pub(crate) struct Recall(AtomicU32);

impl Recall {
    /// For what is handed over now.
    pub(crate) fn issue(&self) -> Issue {
        Issue(self.0.load(Ordering::Relaxed))
    }

    /// Calls back all that was handed over before.
    pub(crate) fn call(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }

    #[inline]
    pub(crate) fn has_called(&self, issue: Issue) -> bool {
        self.0.load(Ordering::Acquire) != issue.0
    }
}
