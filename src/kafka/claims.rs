//! The idempotency store, as it is told of.

use super::pump::Pump;
use crate::{
    consumer::{Event, IdempotencyStatus, RunErrorKind},
    idempotency::News,
};

impl Pump {
    pub(super) fn watch_store(&mut self) {
        let Some(claims) = &self.context.claims else {
            return;
        };
        let group = &self.settings.group;
        match claims.news() {
            Some(News::Down { error }) => {
                tracing::warn!(%group, error, "the idempotency store is down");
                self.tell(Event::IdempotencyStoreDown { error });
            }
            Some(News::Up { after }) => {
                let after_ms = after.as_millis() as u64;
                tracing::info!(%group, after_ms, "the idempotency store answers again");
                self.tell(Event::IdempotencyStoreUp { after });
            }
            None => {}
        }
        if let Some(concerns) = claims.new_concerns() {
            let concerns = concerns.join("; ");
            tracing::warn!(%group, concerns, "the idempotency store's server may forget or lose ids");
            if claims.refuses_unsafe_server() && !self.is_stopping() {
                let message = format!(
                    "group `{group}` is told to refuse an idempotency store whose server may forget or lose ids: {concerns}"
                );
                self.fail(RunErrorKind::IdempotencyStoreUnsafe, message);
                return;
            }
        }
        if let Some(down) = claims.is_to_stop()
            && !self.is_stopping()
        {
            let message = format!(
                "group `{group}` cannot use its idempotency store, for {} ms by now; the records that wait for it are \
                 uncommitted, start again when it answers: {}",
                down.since.elapsed().as_millis(),
                down.error
            );
            self.fail(RunErrorKind::IdempotencyStoreUnavailable, message);
        }
    }

    pub(super) fn idempotency_status(&self) -> Option<IdempotencyStatus> {
        let claims = self.context.claims.as_ref()?;
        let down = claims.down();
        Some(IdempotencyStatus {
            scope: claims.scope(),
            concerns: claims.concerns(),
            duplicates: claims.duplicates(),
            possible_repeats: claims.possible_repeats(),
            id_conflicts: claims.id_conflicts(),
            unusable_entries: claims.unusable(),
            down_for: down.as_ref().map(|down| down.since.elapsed()),
            error: down.map(|down| down.error),
        })
    }

    pub(super) fn report_claims(&mut self) {
        if let Some(claims) = &self.context.claims {
            self.report.duplicates = claims.duplicates();
            self.report.possible_repeats = claims.possible_repeats();
            self.report.id_conflicts = claims.id_conflicts();
            self.report.unusable_entries = claims.unusable();
        }
    }
}
