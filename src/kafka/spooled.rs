//! The spool of dead letters, as the pump sees it: there from the start of the run, and told of.

use std::time::{Duration, Instant};

use super::pump::Pump;
use crate::{
    consumer::{DeadLetterSpool, Event, RunErrorKind},
    dead_letter::{Spooling, Unavailable},
};

/// How often letters that wait are told of.
const REMIND: Duration = Duration::from_secs(60);

/// What was told last.
#[derive(Default)]
pub(super) struct Told {
    at: Option<Instant>,
    waiting: bool,
    set_aside: usize,
    cannot_spool: bool,
}

impl Pump {
    /// What an earlier run left is sent also when nothing fails in this one.
    pub(super) fn open_spool(&mut self) {
        let policy = self
            .settings
            .dead_letter
            .as_ref()
            .map(|dead_letter| &dead_letter.unavailable);
        if let Some(Unavailable::Spool { .. }) = policy {
            self.publisher();
        }
    }

    pub(super) fn start_spooling(&mut self) -> Option<Spooling> {
        let policy = &self.settings.dead_letter.as_ref()?.unavailable;
        let Unavailable::Spool {
            directory,
            max_bytes,
        } = policy
        else {
            return None;
        };
        match Spooling::start(directory, *max_bytes, self.runtime.clone()) {
            Ok(spooling) => Some(spooling),
            Err(error) => {
                let message =
                    format!("the thread of the dead-letter spool cannot be started: {error}");
                self.fail(RunErrorKind::Client, message);
                None
            }
        }
    }

    pub(super) fn spool_status(&self) -> Option<DeadLetterSpool> {
        self.publisher.as_ref()?.spooling()?.status()
    }

    pub(super) fn tell_of_spool(&mut self, now: Instant) {
        let Some(status) = self.spool_status() else {
            return;
        };
        let waiting = status.letters > 0;
        let cannot_spool = status.spool_error.is_some();
        let last = &self.told_of_spool;
        let told_long_ago = last
            .at
            .is_none_or(|at| now.saturating_duration_since(at) >= REMIND);
        let differs = waiting != last.waiting
            || status.set_aside > last.set_aside
            || cannot_spool != last.cannot_spool;
        let remind = waiting && told_long_ago;
        if !(differs || remind) {
            return;
        }
        self.told_of_spool = Told {
            at: Some(now),
            waiting,
            set_aside: status.set_aside,
            cannot_spool,
        };
        let oldest_s = status
            .oldest
            .map(|oldest| oldest.elapsed().unwrap_or_default().as_secs());
        if let Some(error) = &status.spool_error {
            tracing::error!(
                group = %self.settings.group,
                error,
                "no dead letter can be spooled: while their topic cannot be written either, records wait"
            );
        }
        if waiting {
            tracing::warn!(
                group = %self.settings.group,
                letters = status.letters,
                bytes = status.bytes,
                oldest_s,
                set_aside = status.set_aside,
                error = status.send_error,
                directory = %status.directory.display(),
                "dead letters wait in the spool"
            );
        }
        self.tell(Event::DeadLetterSpool(status));
    }
}
