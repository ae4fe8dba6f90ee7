//! One attempt at one record, and a turn that goes on as a task of its own.

use std::{
    future::{Future, poll_fn},
    iter,
    pin::Pin,
    sync::Arc,
    task::{Context as TaskContext, Poll},
    time::{Duration, Instant},
};

use super::{Cause, Context, Done, Driver, Fence, Issue, Lease, Report, failed, once::once};
use crate::{
    dead_letter::FailureKind,
    engine::{AfterFailure, Failed, Job, Outcome, Ownership},
    handler::{Disposition, Handler, HandlerError, HandlerResult},
    header_names,
    held_keys::Ruling,
    idempotency::StoreError,
    message::Message,
    payload::{DecodeError, Decoder},
    record::Record,
    redrive::redriven_from,
    retry_topics::{Admission, Tier},
    shown::{caught, chain, drop_quietly},
};

/// Between two looks at whether a key is still held.
const HELD: Duration = Duration::from_secs(1);

/// What came of one call.
pub(super) enum Attempted {
    Handled,
    Filtered,
    ForOthers,
    /// Its message had been handled before.
    Duplicate,
    Failed(HandlerError),
    Undecodable(DecodeError),
    Panicked(String),
    TimedOut(Duration),
    /// It was not over when the record had held up its partition for this long.
    Stuck(Duration),
    /// It was not over when its partition was given away, at most once.
    Interrupted,
    /// It does not belong into the retry topic where it was found, for this reason.
    Untrusted(String),
    /// A record of its key was set aside.
    KeyHeld(Ruling),
    /// Its handler has not been called, and was not to be any more.
    NotStarted,
    /// Its message is in progress elsewhere: worth another look after this time.
    InProgress(Duration),
    /// Another message has the same id.
    IdConflict,
    /// The idempotency store cannot use what it has under the id of its message.
    EntryUnusable(String),
    /// The idempotency store has no answer.
    StoreUnreachable(StoreError),
}

#[expect(
    clippy::redundant_allocation,
    reason = "the outer count belongs to one executor, the inner one to all of them"
)]
pub(super) async fn attempt<P, H, D>(
    driver: Arc<Arc<Driver<P, H, D>>>,
    origin: (Arc<Lease>, u64),
    record: Record,
    attempt: u32,
) -> Attempted
where
    P: Send + Sync + 'static,
    H: Handler<P>,
    D: Decoder<P>,
{
    let Lease { context, tier, .. } = &*origin.0;
    if let Some(group) = &context.own_redrives_of
        && is_for_another(group, &record)
    {
        return Attempted::ForOthers;
    }
    let mut calls = attempt;
    if let Some(tier) = tier {
        match tier.admit(&record) {
            Admission::Ours => calls = calls.saturating_add(Tier::attempts_before(&record)),
            Admission::Foreign => return Attempted::Filtered,
            Admission::Untrusted(reason) => return Attempted::Untrusted(reason),
        }
    }
    if let Some(held) = &context.held_keys
        && let Some(ruling) = held.ruling(&record, Instant::now())
    {
        return Attempted::KeyHeld(ruling);
    }
    if let Some(filter) = &context.filter
        && !filter(&record)
    {
        return Attempted::Filtered;
    }
    let payload = match driver.decoder.decode(&record) {
        Ok(payload) => payload,
        Err(error) => return Attempted::Undecodable(error),
    };
    let store = context.claims.is_some().then(|| Arc::clone(&origin.0));
    let seq = origin.1;
    let message = Message::new(record, calls, payload, Some(origin));
    let Some(lease) = store else {
        return answer(driver.handler.handle(&message).await);
    };
    claimed(&driver, &message, &lease, seq).await
}

/// Boxed, and made out of the attempt's sight, so that whoever has no store moves no larger futures.
fn claimed<'a, P, H, D>(
    driver: &'a Driver<P, H, D>,
    message: &'a Message<P>,
    lease: &'a Lease,
    seq: u64,
) -> Pin<Box<impl Future<Output = Attempted> + use<'a, P, H, D>>>
where
    P: Send + Sync + 'static,
    H: Handler<P>,
    D: Decoder<P>,
{
    let handler = async { answer(driver.handler.handle(message).await) };
    Box::pin(once(lease, seq, message.record(), handler))
}

fn answer(result: HandlerResult) -> Attempted {
    match result {
        Ok(()) => Attempted::Handled,
        Err(error) => Attempted::Failed(error),
    }
}

/// Whether it was sent back from a dead-letter topic for some other group. A name that is not UTF-8 names no group.
///
/// Services copy headers to what they produce: in a topic where the record was never sent back to, the name means nothing.
fn is_for_another(group: &str, record: &Record) -> bool {
    let headers = record.headers();
    let Some(named) = headers.get_str(header_names::REDRIVE_GROUP) else {
        return false;
    };
    let came_back = |origin: &str| {
        origin == record.topic() || redriven_from(record.topic(), named) == Some(origin)
    };
    let origin = headers.get_str(header_names::ORIGINAL_TOPIC);
    named != group && origin.is_some_and(came_back)
}

/// A place for one future at a time, so that ready handlers share one allocation.
pub(super) type Slot<F> = Pin<Box<Option<F>>>;

/// Polls what is in the slot. A panic is an outcome; whatever the outcome, the slot is empty after it.
pub(super) fn poll_slot<F: Future<Output = Attempted>>(
    slot: &mut Slot<F>,
    cx: &mut TaskContext<'_>,
) -> Poll<Attempted> {
    let polled = caught(|| {
        let future = slot
            .as_mut()
            .as_pin_mut()
            .expect("a slot is polled only while it holds a future");
        future.poll(cx)
    });
    let outcome = match polled {
        Ok(Poll::Pending) => return Poll::Pending,
        Ok(Poll::Ready(outcome)) => outcome,
        Err(message) => Attempted::Panicked(message),
    };
    empty(slot);
    Poll::Ready(outcome)
}

/// Drops the future in the slot; a handler may panic even then.
fn empty<F>(slot: &mut Slot<F>) {
    let dropped = caught(|| slot.as_mut().set(None));
    if dropped.is_err() {
        // The slot's content is half dropped: leave it be and start with a new one.
        std::mem::forget(std::mem::replace(slot, Box::pin(None)));
    }
}

/// Turns the outcome of a call into what the engine is told.
pub(super) fn judge(
    context: &Context,
    job: Job<Record>,
    attempted: Attempted,
) -> Result<Done, Failed<Record, Cause>> {
    let done = |outcome| {
        if let Some(held) = &context.held_keys {
            held.finished(&job.record);
        }
        Ok(Done {
            seq: job.seq,
            lane: job.lane,
            outcome,
        })
    };
    let (kind, then, message, topic) = match attempted {
        Attempted::Handled => return done(Outcome::Handled),
        Attempted::Filtered => return done(Outcome::Skipped),
        Attempted::ForOthers => return done(Outcome::ForOthers),
        Attempted::NotStarted => unreachable!("what has not started has no outcome to judge"),
        Attempted::Duplicate => {
            tracing::debug!(
                topic = %job.record.topic(),
                partition = job.record.partition(),
                offset = job.record.offset(),
                "its message has been handled: a duplicate"
            );
            return done(Outcome::Duplicate);
        }
        Attempted::Panicked(message) => {
            (FailureKind::Panic, AfterFailure::Retry(None), message, None)
        }
        Attempted::TimedOut(limit) => {
            let message = format!("the handler did not finish within {} ms", limit.as_millis());
            (
                FailureKind::Timeout,
                AfterFailure::Retry(None),
                message,
                None,
            )
        }
        Attempted::Stuck(limit) => {
            let cause = Cause::stuck(limit);
            (cause.kind, AfterFailure::GiveUp, cause.message, None)
        }
        Attempted::Interrupted => {
            let cause = Cause::interrupted();
            (cause.kind, AfterFailure::GiveUp, cause.message, None)
        }
        Attempted::Untrusted(reason) => {
            (FailureKind::Untrusted, AfterFailure::GiveUp, reason, None)
        }
        Attempted::KeyHeld(ruling) => {
            let message = "an earlier record of its key was set aside".into();
            match ruling {
                Ruling::Follow(topic) => {
                    let kind = FailureKind::KeyHeld;
                    (kind, AfterFailure::GiveUp, message, Some(topic))
                }
                Ruling::Wait => {
                    let kind = FailureKind::AttemptsExhausted;
                    (kind, AfterFailure::Hold(HELD), message, None)
                }
            }
        }
        Attempted::InProgress(wait) => {
            let message = "its message is in progress elsewhere".into();
            let kind = FailureKind::AttemptsExhausted;
            (kind, AfterFailure::Postpone(wait), message, None)
        }
        Attempted::IdConflict => {
            let message = "another message with the same id and other content has been handled";
            let kind = FailureKind::IdConflict;
            (kind, AfterFailure::GiveUp, message.into(), None)
        }
        Attempted::EntryUnusable(reason) => {
            let kind = FailureKind::AttemptsExhausted;
            (kind, AfterFailure::Retry(None), reason, None)
        }
        Attempted::StoreUnreachable(error) => {
            let (kind, message) = (FailureKind::AttemptsExhausted, chain(&error));
            drop_quietly(error);
            (kind, AfterFailure::Outage, message, None)
        }
        Attempted::Undecodable(error) => {
            let (kind, then) = match error {
                DecodeError::Invalid(_) => (FailureKind::Undecodable, AfterFailure::GiveUp),
                _ => (FailureKind::AttemptsExhausted, AfterFailure::Retry(None)),
            };
            let message = chain(&error);
            drop_quietly(error);
            (kind, then, message, None)
        }
        Attempted::Failed(error) => {
            let mut retry = None;
            let mut topic = None;
            let mut disposition = error.disposition();
            if let (Disposition::Unclassified, Some(classifier)) =
                (disposition, &context.classifier)
            {
                let classification = caught(|| classifier.classify(error.source(), &job.record));
                match classification {
                    Ok(classification) => {
                        disposition = classification.disposition();
                        retry = classification.policy(&context.retry).map(Arc::new);
                        topic = classification.topic().cloned();
                    }
                    Err(_) => tracing::error!(
                        topic = %job.record.topic(),
                        partition = job.record.partition(),
                        offset = job.record.offset(),
                        "the classifier panicked; the error is retried by the consumer's own policy"
                    ),
                }
            }
            let message = chain(error.source());
            drop_quietly(error);
            match disposition {
                Disposition::Skip => {
                    tracing::debug!(
                        topic = %job.record.topic(),
                        partition = job.record.partition(),
                        offset = job.record.offset(),
                        reason = %message,
                        "skipped"
                    );
                    return done(Outcome::Skipped);
                }
                Disposition::Permanent => {
                    (FailureKind::Permanent, AfterFailure::GiveUp, message, topic)
                }
                Disposition::Postpone(wait) => (
                    FailureKind::AttemptsExhausted,
                    AfterFailure::Postpone(wait),
                    message,
                    topic,
                ),
                Disposition::Outage => (
                    FailureKind::AttemptsExhausted,
                    AfterFailure::Outage,
                    message,
                    topic,
                ),
                Disposition::RetryAfter(wait) => (
                    FailureKind::AttemptsExhausted,
                    AfterFailure::RetryAfter(wait, retry),
                    message,
                    topic,
                ),
                _ => (
                    FailureKind::AttemptsExhausted,
                    AfterFailure::Retry(retry),
                    message,
                    topic,
                ),
            }
        }
    };
    tell_of_failure(context, &job, &then, kind, &message);
    Err(failed(
        job,
        then,
        Cause {
            kind,
            message,
            dead_letter_topic: topic,
        },
    ))
}

/// Each failed attempt at the level of debugging, and one now and then as a warning: without it a service whose every
/// attempt fails says nothing before the first record is given up.
fn tell_of_failure(
    context: &Context,
    job: &Job<Record>,
    then: &AfterFailure,
    kind: FailureKind,
    message: &str,
) {
    let error = || context.error_message.apply(message);
    macro_rules! tell {
        ($level:ident, $($field:tt)*) => {
            tracing::$level!(
                topic = %job.record.topic(),
                partition = job.record.partition(),
                offset = job.record.offset(),
                attempt = job.attempt,
                kind = kind.as_str(),
                error = error().map(display),
                $($field)*
            )
        };
    }
    // What waits has not failed, and of outages the breaker tells.
    let failed = matches!(
        then,
        AfterFailure::Retry(_) | AfterFailure::RetryAfter(..) | AfterFailure::GiveUp
    ) && kind != FailureKind::KeyHeld;
    match failed.then(|| context.failed_attempts.admit(Instant::now())) {
        Some(Some(held_back)) => tell!(warn, held_back, "an attempt failed"),
        _ => tell!(debug, "an attempt failed"),
    }
}

/// A turn whose first handler was pending: runs it to its end, and then those behind it.
pub(super) struct PendingTurn<F> {
    pub(super) owner: Ownership,
    pub(super) fence: Arc<Fence>,
    pub(super) issue: Issue,
    pub(super) context: Arc<Context>,
    pub(super) slot: Slot<F>,
    pub(super) job: Job<Record>,
    pub(super) followers: Vec<Job<Record>>,
}

/// Gives the permit back however the task ends.
struct Permit(Arc<Context>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.permits.give_back();
    }
}

impl<F: Future<Output = Attempted>> PendingTurn<F> {
    /// `call` makes the future of one attempt at a job.
    pub(super) async fn run(self, call: impl Fn(&Job<Record>) -> F) {
        let Self {
            owner,
            fence,
            issue,
            context,
            mut slot,
            mut job,
            followers,
        } = self;
        let _permit = Permit(Arc::clone(&context));
        let mut followers = followers.into_iter();
        loop {
            let attempted = finish(&mut slot, &context, &fence, job.seq).await;
            if let Attempted::NotStarted = attempted {
                let not_started = iter::once(job).chain(followers).collect();
                report_not_started(&context, owner, not_started);
                return;
            }
            let next = match judge(&context, job, attempted) {
                Ok(done) => {
                    let fenced = fence.is_closed() || context.recall.has_called(issue);
                    let next = if fenced { None } else { followers.next() };
                    let started = next.as_ref().filter(|_| context.claims.is_none());
                    context.reports.send_quietly(Report::One {
                        owner,
                        done,
                        next: started.map(|job| job.seq),
                    });
                    // With batches in stock, what waits behind this record would wait for its turn all the same.
                    if fenced || context.queue.is_low() {
                        context.reports.wake_if_wanted();
                    }
                    next
                }
                Err(failed) => {
                    context.reports.send(Report::Batch {
                        owner,
                        done: Vec::new(),
                        failed: vec![failed],
                        not_started: followers.by_ref().collect(),
                        spent: Vec::new(),
                    });
                    None
                }
            };
            let Some(next) = next else { break };
            slot.as_mut().set(Some(call(&next)));
            job = next;
        }
        let not_started: Vec<_> = followers.collect();
        if !not_started.is_empty() {
            report_not_started(&context, owner, not_started);
        }
    }
}

fn report_not_started(context: &Context, owner: Ownership, not_started: Vec<Job<Record>>) {
    context.reports.send(Report::Batch {
        owner,
        done: Vec::new(),
        failed: Vec::new(),
        not_started,
        spent: Vec::new(),
    });
}

/// Runs a handler to its end, or until its record has held up its partition for too long, or nobody waits any longer.
async fn finish<F: Future<Output = Attempted>>(
    slot: &mut Slot<F>,
    context: &Context,
    fence: &Fence,
    seq: u64,
) -> Attempted {
    // With a store the time of the handler alone is taken, inside of the attempt.
    let limit = context.handler_timeout.filter(|_| context.claims.is_none());
    let in_time = finish_in_time(slot, limit);
    if context.stuck_limit.is_none() && !context.interrupts {
        return in_time.await;
    }
    let limit = context.stuck_limit.unwrap_or_default();
    let stopped = |fence: &Fence| fence.is_condemned(seq) || fence.is_interrupted();
    // The handler is polled first: it has been told as well, and may have something to put in order.
    let attempted = tokio::select! {
        biased;
        attempted = in_time => attempted,
        () = fence.wait_until(stopped) => match fence.is_condemned(seq) {
            true => Attempted::Stuck(limit),
            false => Attempted::Interrupted,
        },
    };
    match &attempted {
        Attempted::Handled | Attempted::Filtered | Attempted::Duplicate => {}
        Attempted::Stuck(_) | Attempted::Interrupted => empty(slot),
        // Not to be tried again, whatever it says now.
        _ if fence.is_condemned(seq) => {
            drop_quietly(attempted);
            return Attempted::Stuck(limit);
        }
        _ => {}
    }
    attempted
}

/// Runs a handler to its end, or for as long as it may take.
pub(super) async fn finish_in_time<F: Future<Output = Attempted>>(
    slot: &mut Slot<F>,
    limit: Option<Duration>,
) -> Attempted {
    let Some(limit) = limit else {
        return poll_fn(|cx| poll_slot(slot, cx)).await;
    };
    match tokio::time::timeout(limit, poll_fn(|cx| poll_slot(slot, cx))).await {
        Ok(attempted) => attempted,
        Err(_) => {
            empty(slot);
            Attempted::TimedOut(limit)
        }
    }
}
