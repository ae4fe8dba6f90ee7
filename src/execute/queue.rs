//! The queue from the pump to the executors.

use std::{
    collections::VecDeque,
    pin::pin,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

use super::{Recall, Work};

/// Batches that no executor has taken yet, oldest first.
#[derive(Default)]
pub(crate) struct Queue {
    work: Mutex<VecDeque<Work>>,
    filled: Notify,
}

impl Queue {
    /// Adds batches and wakes an executor for each, at most so many.
    pub(crate) fn push(&self, batches: impl IntoIterator<Item = Work>, most: usize) {
        let mut work = self.lock();
        let before = work.len();
        work.extend(batches);
        let added = work.len() - before;
        // Whoever is woken takes this lock first of all.
        drop(work);
        for _ in 0..added.min(most) {
            self.filled.notify_one();
        }
    }

    /// Whether it is time for the pump to bring more.
    pub(super) fn is_low(&self) -> bool {
        self.lock().len() <= 1
    }

    pub(super) fn try_pop(&self) -> Option<Work> {
        self.lock().pop_front()
    }

    pub(super) async fn pop(&self) -> Work {
        loop {
            // Waits before it looks: of several notifications only one is kept for whoever comes later, and two may be
            // between the look and the wait.
            let mut filled = pin!(self.filled.notified());
            filled.as_mut().enable();
            if let Some(work) = self.try_pop() {
                return work;
            }
            filled.await;
        }
    }

    /// Takes out what is fenced, or was called back.
    pub(crate) fn take_unwanted(&self, recall: &Recall) -> Vec<Work> {
        let mut work = self.lock();
        let (unwanted, wanted): (Vec<_>, Vec<_>) = work
            .drain(..)
            .partition(|work| work.fence.is_closed() || recall.has_called(work.issue));
        work.extend(wanted);
        unwanted
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Work>> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
