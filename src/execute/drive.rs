//! Drives a batch through one handler. The handler's type is erased once a batch, never once a record.

use std::{
    future::{Future, poll_fn},
    marker::PhantomData,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context as TaskContext, Poll, Waker},
    time::Instant,
    vec,
};

use super::{
    Context, Done, Lease, Report, SLICE, Tasks, Work,
    turn::{Attempted, PendingTurn, Slot, attempt, judge, poll_slot},
};
use crate::{
    engine::{Batch, Failed, Job, Ownership},
    handler::Handler,
    payload::Decoder,
    record::Record,
};

/// Handlers that are known to be quick are timed together, this many at a time at the most.
const LONGEST_STRIDE: usize = 32;

/// A handler with its payload type erased.
pub(crate) trait Drive: Send + Sync {
    fn drive<'a>(
        self: Arc<Self>,
        work: Work,
        context: &'a Arc<Context>,
        tasks: &'a mut Tasks,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>>;
}

/// A handler and what decodes its payloads.
pub(crate) struct Driver<P, H, D> {
    pub(super) handler: H,
    pub(super) decoder: D,
    payload: PhantomData<fn() -> P>,
}

impl<P, H, D> Driver<P, H, D> {
    pub(crate) fn new(handler: H, decoder: D) -> Self {
        Self {
            handler,
            decoder,
            payload: PhantomData,
        }
    }
}

/// What has come of a batch and has not been reported yet.
struct Outcomes {
    owner: Ownership,
    done: Vec<Done>,
    failed: Vec<Failed<Record, super::Cause>>,
    not_started: Vec<Job<Record>>,
    spent: Vec<Job<Record>>,
}

impl Outcomes {
    fn report(&mut self, context: &Context) {
        self.report_quietly(context);
        context.reports.wake_if_wanted();
    }

    /// For when this executor goes on at once: it wakes the pump before it waits for anything.
    fn report_quietly(&mut self, context: &Context) {
        if self.done.is_empty() && self.failed.is_empty() && self.not_started.is_empty() {
            return;
        }
        let urgent = !self.failed.is_empty() || !self.not_started.is_empty();
        let report = Report::Batch {
            owner: self.owner,
            done: mem::take(&mut self.done),
            failed: mem::take(&mut self.failed),
            not_started: mem::take(&mut self.not_started),
            spent: mem::take(&mut self.spent),
        };
        if urgent {
            context.reports.send(report);
        } else {
            context.reports.send_quietly(report);
        }
    }
}

/// What stopped a run of handlers that were ready at once.
enum Stop<F> {
    /// All jobs have had their attempt.
    Empty,
    /// The fence was closed, or what has not started was called back.
    Fenced,
    /// The slice is used up.
    SliceOver,
    Pending {
        slot: Slot<F>,
        job: Job<Record>,
        /// It is not the first of its turn.
        follows: bool,
    },
}

impl<P, H, D> Drive for Driver<P, H, D>
where
    P: Send + Sync + 'static,
    H: Handler<P>,
    D: Decoder<P>,
{
    fn drive<'a>(
        self: Arc<Self>,
        work: Work,
        context: &'a Arc<Context>,
        tasks: &'a mut Tasks,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        Box::pin(async move {
            // Counted here and nowhere else, so that executors do not fight over one reference count.
            let driver = Arc::new(self);
            let lease = Arc::new(Lease {
                context: Arc::clone(context),
                fence: Arc::clone(&work.fence),
                owner: work.batch.owner,
                issue: work.issue,
                tier: work.tier.clone(),
            });
            let call = move |job: &Job<Record>| {
                let origin = (Arc::clone(&lease), job.seq);
                attempt(Arc::clone(&driver), origin, job.record.clone(), job.attempt)
            };
            drive(work, context, tasks, call).await;
        })
    }
}

async fn drive<F, C>(work: Work, context: &Arc<Context>, tasks: &mut Tasks, call: C)
where
    F: Future<Output = Attempted> + Send + 'static,
    C: Fn(&Job<Record>) -> F + Clone + Send + 'static,
{
    let Work {
        batch:
            Batch {
                owner,
                jobs: mut buffer,
                mut beyond,
            },
        mut done,
        fence,
        issue,
        driver,
        tier,
    } = work;
    done.reserve(buffer.len());
    let mut outcomes = Outcomes {
        owner,
        done,
        failed: Vec::new(),
        not_started: Vec::new(),
        spent: Vec::new(),
    };
    let mut jobs = buffer.drain(..);
    let mut slot: Slot<F> = Box::pin(None);
    let wanted = || !fence.is_closed() && !context.recall.has_called(issue);
    if !context.permits.try_take() {
        report_waiting(context, owner, jobs.as_slice(), &mut beyond);
        context.reports.wake_if_wanted();
        if !context.permits.take(wanted).await {
            outcomes.not_started.extend(jobs);
            return outcomes.report(context);
        }
    }
    loop {
        // `unconstrained`: the runtime's budget would make the 129th ready handler look pending.
        let run = poll_fn(|_| {
            Poll::Ready(run_ready(
                &mut jobs,
                &mut slot,
                context,
                wanted,
                &call,
                &mut outcomes,
            ))
        });
        match tokio::task::unconstrained(run).await {
            Stop::Empty => break,
            Stop::Fenced => {
                outcomes.not_started.extend(jobs.by_ref());
                break;
            }
            Stop::SliceOver => {
                outcomes.report(context);
                let rest: Vec<_> = jobs.by_ref().collect();
                let rest = halves(rest).map(|jobs| Work {
                    batch: Batch {
                        owner,
                        jobs,
                        // The first of them may be in the middle of its turn.
                        beyond: true,
                    },
                    done: Vec::new(),
                    fence: Arc::clone(&fence),
                    issue,
                    driver: Arc::clone(&driver),
                    tier: tier.clone(),
                });
                context.queue.push(rest, usize::MAX);
                context.permits.give_back();
                return outcomes.report(context);
            }
            Stop::Pending { slot, job, follows } => {
                // Where there is a store, it is told when the handler has a place.
                if (beyond || follows) && context.claims.is_none() {
                    let seq = job.seq;
                    context
                        .reports
                        .send_quietly(Report::Progress { owner, seq });
                }
                let followers = jobs.by_ref().take(job.followers as usize).collect();
                let turn = PendingTurn {
                    owner,
                    fence: Arc::clone(&fence),
                    issue,
                    context: Arc::clone(context),
                    slot,
                    job,
                    followers,
                };
                // The permit goes with the task; this executor needs another to go on.
                tasks.push(tokio::spawn(turn.run(call.clone())));
                if context.permits.try_take() {
                    continue;
                }
                if jobs.len() == 0 {
                    return outcomes.report(context);
                }
                report_waiting(context, owner, jobs.as_slice(), &mut beyond);
                outcomes.report(context);
                if !context.permits.take(wanted).await {
                    outcomes.not_started.extend(jobs);
                    return outcomes.report(context);
                }
            }
        }
    }
    context.permits.give_back();
    drop(jobs);
    outcomes.spent = buffer;
    outcomes.report_quietly(context);
}

/// Says that jobs wait which are taken to be with their handlers. From then on each start is reported.
fn report_waiting(context: &Context, owner: Ownership, jobs: &[Job<Record>], beyond: &mut bool) {
    // Where there is a store, every start is reported anyway.
    if mem::replace(beyond, true) || context.claims.is_some() {
        return;
    }
    let seqs = jobs.iter().map(|job| job.seq).collect();
    let report = Report::Waiting { owner, seqs };
    context.reports.send_quietly(report);
}

/// Splits what one executor was too slow for, so that others can share it. Turns stay whole.
fn halves<R>(mut jobs: Vec<Job<R>>) -> impl Iterator<Item = Vec<Job<R>>> {
    let ends_turn = |at: &usize| jobs[at - 1].followers == 0;
    let middle = (jobs.len().div_ceil(2)..jobs.len()).find(ends_turn);
    let second = middle.map(|at| jobs.split_off(at));
    [Some(jobs), second].into_iter().flatten()
}

/// Runs handlers for as long as they are ready at once.
fn run_ready<F: Future<Output = Attempted>>(
    jobs: &mut vec::Drain<'_, Job<Record>>,
    slot: &mut Slot<F>,
    context: &Context,
    wanted: impl Fn() -> bool,
    call: impl Fn(&Job<Record>) -> F,
    outcomes: &mut Outcomes,
) -> Stop<F> {
    let began = Instant::now();
    let (mut stride, mut untimed) = (1, 0);
    let mut follows = false;
    while let Some(job) = jobs.next() {
        if !wanted() {
            outcomes.not_started.push(job);
            return Stop::Fenced;
        }
        slot.as_mut().set(Some(call(&job)));
        match poll_slot(slot, &mut TaskContext::from_waker(Waker::noop())) {
            Poll::Pending => {
                return Stop::Pending {
                    slot: mem::replace(slot, Box::pin(None)),
                    job,
                    follows,
                };
            }
            Poll::Ready(Attempted::NotStarted) => {
                let followers = job.followers as usize;
                follows = false;
                outcomes.not_started.push(job);
                outcomes.not_started.extend(jobs.take(followers));
            }
            Poll::Ready(attempted) => {
                let followers = job.followers as usize;
                follows = followers > 0;
                match judge(context, job, attempted) {
                    Ok(done) => outcomes.done.push(done),
                    Err(failed) => {
                        follows = false;
                        outcomes.failed.push(failed);
                        outcomes.not_started.extend(jobs.take(followers));
                    }
                }
            }
        }
        untimed += 1;
        if untimed >= stride {
            if began.elapsed() >= SLICE {
                return if jobs.len() == 0 {
                    Stop::Empty
                } else {
                    Stop::SliceOver
                };
            }
            (stride, untimed) = ((stride * 2).min(LONGEST_STRIDE), 0);
        }
    }
    Stop::Empty
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shared_with_other_executors_keeps_turns_whole() {
        let split = |followers: &[u32]| -> Vec<usize> {
            let job = |&followers| Job {
                record: (),
                seq: 0,
                lane: 0,
                attempt: 1,
                followers,
            };
            let parts = halves(followers.iter().map(job).collect());
            parts.map(|part| part.len()).collect()
        };
        assert_eq!(split(&[0, 0, 0, 0]), [2, 2]);
        assert_eq!(split(&[0]), [1]);
        assert_eq!(split(&[3, 2, 1, 0, 1, 0]), [4, 2]);
        assert_eq!(split(&[2, 1, 0]), [3], "a single turn has nothing to share");
        assert_eq!(split(&[0, 2, 1, 0]), [4], "its end is the batch's");
    }
}
