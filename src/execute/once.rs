//! A handler under a claim of its message in the idempotency store.

#[cfg(test)]
mod tests;

use std::{future::pending, sync::Arc, time::Instant};

use super::{
    Fence, Lease,
    turn::{Attempted, Slot, finish_in_time},
};
use crate::{
    idempotency::{Claims, Entry},
    record::Record,
};

/// Runs `handler` unless the record's message has been handled, or somebody else is at it.
///
/// Whatever the store is asked counts neither for the handler's timeout nor for the handlers in progress, and since it is
/// awaited here only this record's lane waits for it.
pub(super) async fn once<F: Future<Output = Attempted>>(
    lease: &Lease,
    seq: u64,
    record: &Record,
    handler: F,
) -> Attempted {
    let claims = claims_of(lease);
    let places = &lease.context.places;
    let limit = lease.context.handler_timeout;
    let wanted = || lease.is_wanted();
    let _out = places.enter();
    let entry = tokio::select! {
        biased;
        entry = claims.enter(record) => entry,
        // What waits for the store has not started: nobody shall wait for it when its partition is taken away.
        () = lease.fence.wait_until(Fence::is_closed) => return Attempted::NotStarted,
    };
    let mut held = match entry {
        Entry::Claimed(held) => held,
        Entry::Unclaimed => {
            let Some(_place) = places.take(wanted).await else {
                return Attempted::NotStarted;
            };
            lease.report_progress(seq);
            let mut slot: Slot<F> = Box::pin(Some(handler));
            let attempted = finish_in_time(&mut slot, limit).await;
            if let Attempted::Handled = attempted {
                claims.note_possible_repeat();
            }
            return attempted;
        }
        Entry::Duplicate => return Attempted::Duplicate,
        Entry::InProgress(wait) => return Attempted::InProgress(wait),
        Entry::Conflict => return Attempted::IdConflict,
        Entry::Unusable(reason) => return Attempted::EntryUnusable(reason),
        Entry::Unreachable(error) => return Attempted::StoreUnreachable(error),
    };
    let turn = async {
        loop {
            let place = places.take(wanted).await?;
            if claims.is_answering() {
                return Some(place);
            }
            drop(place);
            if !claims.answers_again().await {
                return None;
            }
        }
    };
    let place = tokio::select! {
        biased;
        place = turn => place,
        () = held.keep() => None,
        // Also while the store is waited for.
        () = lease.fence.wait_until(Fence::is_closed) => None,
    };
    // What has not started when its partition is taken away does not start: its next owner shall not have to wait for it.
    // Nor does what somebody else may have claimed meanwhile.
    let Some(place) = place.filter(|_| !held.may_have_lapsed()) else {
        held.release().await;
        return Attempted::NotStarted;
    };
    lease.report_progress(seq);
    // Made after the claim, so that it is dropped before the claim is given up.
    let mut slot: Slot<F> = Box::pin(Some(handler));
    let kept = async {
        held.keep().await;
        // The effect is not to be stopped any more; completing it will tell.
        pending().await
    };
    let attempted = tokio::select! {
        biased;
        attempted = finish_in_time(&mut slot, limit) => attempted,
        attempted = kept => attempted,
    };
    drop(place);
    if !matches!(attempted, Attempted::Handled) {
        held.release().await;
        return attempted;
    }
    if let Err(reason) = held.complete(is_over(lease, seq)).await {
        claims.note_possible_repeat();
        if let Some(omitted) = claims.is_worth_telling() {
            tracing::warn!(
                topic = %record.topic(),
                partition = record.partition(),
                offset = record.offset(),
                error = reason,
                omitted,
                "a record was handled, and the idempotency store could not be told: if its message comes again it is \
                 handled again"
            );
        }
    }
    attempted
}

fn claims_of(lease: &Lease) -> &Arc<Claims> {
    let claims = lease.context.claims.as_ref();
    claims.expect("records are handled under claims only where there is a store")
}

/// Completes when the record's outcome is awaited and can wait no longer: it is better finished and not remembered than
/// handled again for certain. The effect of a record whose partition is lost already is for its next owner to know of:
/// there is as much time for that as the lease leaves.
async fn is_over(lease: &Lease, seq: u64) {
    let condemned = lease.fence.wait_until(|fence| fence.is_condemned(seq));
    let drained = async {
        lease.fence.wait_until(Fence::is_closed).await;
        let left = lease
            .deadline()
            .map(|until| until.saturating_duration_since(Instant::now()));
        match left.filter(|left| !left.is_zero()) {
            Some(left) => tokio::time::sleep(left * 3 / 4).await,
            None => pending().await,
        }
    };
    tokio::select! {
        () = condemned => {}
        () = drained => {}
    }
}
