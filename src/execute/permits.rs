//! Permits for handlers in progress: one for each handler future that is pending, and one for each executor at work.

use tokio::sync::{Notify, Semaphore};

/// The bound that `concurrency` sets.
#[derive(Debug)]
pub(crate) struct Permits {
    free: Semaphore,
    /// Told when a fence was closed, so that whoever waits for a permit looks whether its work is still wanted.
    fenced: Notify,
}

impl Permits {
    pub(crate) fn new(concurrency: usize) -> Self {
        Self {
            free: Semaphore::new(concurrency),
            fenced: Notify::new(),
        }
    }

    /// Takes a permit if there is one.
    pub(super) fn try_take(&self) -> bool {
        self.free
            .try_acquire()
            .map(|permit| permit.forget())
            .is_ok()
    }

    /// Waits for a permit for as long as `wanted` says so. `false`: not wanted any more.
    pub(super) async fn take(&self, wanted: impl Fn() -> bool) -> bool {
        loop {
            // Registered before the look, so that no closing of a fence falls in between.
            let mut fenced = std::pin::pin!(self.fenced.notified());
            fenced.as_mut().enable();
            if !wanted() {
                return false;
            }
            tokio::select! {
                biased;
                permit = self.free.acquire() => {
                    permit.expect("this semaphore is never closed").forget();
                    return true;
                }
                () = fenced => {}
            }
        }
    }

    pub(super) fn give_back(&self) {
        self.free.add_permits(1);
    }

    pub(crate) fn fence_closed(&self) {
        self.fenced.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            Arc,
            atomic::{AtomicBool, Ordering},
        },
        time::Duration,
    };

    use super::*;

    #[tokio::test]
    async fn whoever_waits_for_a_permit_is_told_that_its_work_is_not_wanted_any_more() {
        let permits = Arc::new(Permits::new(1));
        assert!(permits.try_take());
        let fenced = Arc::new(AtomicBool::new(false));
        let waits = {
            let (permits, fenced) = (Arc::clone(&permits), Arc::clone(&fenced));
            tokio::spawn(async move { permits.take(|| !fenced.load(Ordering::Relaxed)).await })
        };
        tokio::task::yield_now().await;
        permits.fence_closed();
        tokio::task::yield_now().await;
        assert!(!waits.is_finished(), "another's fence is not its own");
        fenced.store(true, Ordering::Relaxed);
        permits.fence_closed();
        let took = tokio::time::timeout(Duration::from_secs(5), waits).await;
        assert!(!took.expect("it is told").unwrap());
        permits.give_back();
        assert!(permits.try_take(), "and has taken no permit");
    }
}
