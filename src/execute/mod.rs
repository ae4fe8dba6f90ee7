//! Runs handlers on the user's runtime.
//!
//! Executors take batches of jobs from one shared queue. A handler is polled once where it is, and only when it is
//! pending does it become a task of its own: one that is ready at once costs no allocation, no lock and no spawn.
//! What came of the jobs goes back to the pump in reports, which never block the sender: there are never more than
//! records handed over.

mod drive;
mod lease;
mod once;
mod permits;
mod places;
mod queue;
mod recall;
mod turn;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering, fence},
        mpsc,
    },
    thread::Thread,
    time::{Duration, Instant},
};

use tokio::task::JoinHandle;

pub(crate) use self::{
    drive::{Drive, Driver},
    lease::{Fence, Lease},
    permits::Permits,
    places::{MOST_AHEAD, Places},
    queue::Queue,
    recall::{Issue, Recall},
};
use crate::{
    backoff::Retry,
    classify::Classifier,
    dead_letter::{ErrorMessage, FailureKind},
    engine::{AfterFailure, Batch, Failed, Job, LaneId, Outcome, Ownership},
    held_keys::HeldKeys,
    idempotency::Claims,
    kafka::Throttle,
    record::Record,
    retry_topics::Tier,
};

/// How long an executor keeps its thread: for a batch before it lets others have the rest, and in all before it yields.
const SLICE: Duration = Duration::from_millis(1);

/// Why an attempt failed, as it will stand in a dead letter.
#[derive(Debug, Clone)]
pub(crate) struct Cause {
    pub(crate) kind: FailureKind,
    pub(crate) message: String,
    /// Where this record is to go instead of the consumer's own dead-letter topic: the classifier wants it, or its key is
    /// held.
    pub(crate) dead_letter_topic: Option<Arc<str>>,
}

impl Cause {
    /// The record has held up its partition for longer than this.
    pub(crate) fn stuck(limit: Duration) -> Self {
        Self {
            kind: FailureKind::Stuck,
            message: format!(
                "the record held up its partition for longer than {} ms",
                limit.as_millis()
            ),
            dead_letter_topic: None,
        }
    }

    /// At most once, no time is left for a record that was called so often.
    pub(crate) fn out_of_time(attempts: u32) -> Self {
        let message = match attempts {
            0 => "it was committed and could not be handled before its partition was given away or the run ended".into(),
            _ => format!(
                "it was committed, and after {attempts} attempts there was no time for another one before its partition \
                 was given away or the run ended"
            ),
        };
        Self {
            kind: FailureKind::OutOfTime,
            message,
            dead_letter_topic: None,
        }
    }

    /// At most once, no time is left for a handler that runs.
    fn interrupted() -> Self {
        Self {
            kind: FailureKind::Interrupted,
            message: "its handler was stopped when its partition was given away or the run ended; it may have had its \
                      effect"
                .into(),
            dead_letter_topic: None,
        }
    }
}

/// A batch on its way to an executor.
pub(crate) struct Work {
    pub(crate) batch: Batch<Record>,
    /// Empty, for what comes of the batch: buffers travel round rather than through the allocator.
    pub(crate) done: Vec<Done>,
    pub(crate) fence: Arc<Fence>,
    pub(crate) issue: Issue,
    pub(crate) driver: Arc<dyn Drive>,
    /// The retry topic that the partition is of.
    pub(crate) tier: Option<Arc<Tier>>,
}

/// A record that an executor is done with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Done {
    pub(crate) seq: u64,
    pub(crate) lane: LaneId,
    pub(crate) outcome: Outcome,
}

/// What came of jobs that were handed over.
pub(crate) enum Report {
    /// Of a batch, as far as its handlers were ready at once.
    Batch {
        owner: Ownership,
        done: Vec<Done>,
        failed: Vec<Failed<Record, Cause>>,
        not_started: Vec<Job<Record>>,
        /// The batch's own buffer, empty now, when all of the batch is reported.
        spent: Vec<Job<Record>>,
    },
    /// Of one record in a task of its own, and which record of its turn has started since.
    One {
        owner: Ownership,
        done: Done,
        next: Option<u64>,
    },
    /// The handler of this record has been started, or says that it gets on.
    Progress { owner: Ownership, seq: u64 },
    /// These were taken to start at once, and there was no permit for them: whoever ran on after the end of an earlier
    /// ownership has them.
    Waiting { owner: Ownership, seqs: Vec<u64> },
    /// What was sent of a record that was given up is safe: the broker has acknowledged it, or it is in the spool.
    SetAside {
        owner: Ownership,
        seq: u64,
        lane: LaneId,
        outcome: Outcome,
    },
    /// The dead letter of a record that was given up could not be written: the run is to end.
    Unwritten { owner: Ownership, message: String },
}

/// The executors' way back to the pump.
#[derive(Clone)]
pub(crate) struct Reports {
    sender: mpsc::Sender<Report>,
    pump: Thread,
    /// Whether the pump has a use for reports of records that are done: something waits behind them.
    wanted: Arc<AtomicBool>,
}

impl Reports {
    pub(crate) fn new(sender: mpsc::Sender<Report>, pump: Thread) -> Self {
        Self {
            sender,
            pump,
            wanted: Arc::default(),
        }
    }

    /// Sends what the pump has to act on.
    pub(crate) fn send(&self, report: Report) {
        self.send_quietly(report);
        self.pump.unpark();
    }

    /// Sends what is no news to anybody unless something waits for it, see [`wake_if_wanted`](Self::wake_if_wanted).
    fn send_quietly(&self, report: Report) {
        // The pump is gone only after every ownership has ended: nobody would act on the report.
        let _ = self.sender.send(report);
    }

    fn wake_if_wanted(&self) {
        // Either this sees that the pump wants reports, or the pump, which looks once more after saying so, sees them.
        fence(Ordering::SeqCst);
        if self.wanted.load(Ordering::Relaxed) {
            self.pump.unpark();
        }
    }

    /// Said by the pump. `true`: it has to look for reports once more before it sleeps.
    pub(crate) fn set_wanted(&self, wanted: bool) -> bool {
        let newly = !self.wanted.swap(wanted, Ordering::Relaxed) && wanted;
        fence(Ordering::SeqCst);
        newly
    }
}

/// Tells whether a raw record is to be handled at all.
pub(crate) type Filter = Arc<dyn Fn(&Record) -> bool + Send + Sync>;

/// What all executors share.
pub(crate) struct Context {
    pub(crate) queue: Queue,
    pub(crate) permits: Permits,
    pub(crate) recall: Recall,
    pub(crate) reports: Reports,
    pub(crate) handler_timeout: Option<Duration>,
    pub(crate) stuck_limit: Option<Duration>,
    /// Handlers may be stopped in the middle, see [`Fence::interrupt`].
    pub(crate) interrupts: bool,
    /// The consumer's policy, where a classifier changes only a part of it.
    pub(crate) retry: Arc<Retry>,
    pub(crate) classifier: Option<Arc<dyn Classifier>>,
    pub(crate) filter: Option<Filter>,
    /// What may be told of errors.
    pub(crate) error_message: ErrorMessage,
    /// Of failed attempts, as warnings.
    pub(crate) failed_attempts: Throttle,
    /// The group, if it passes over records that were sent back for others.
    pub(crate) own_redrives_of: Option<Arc<str>>,
    pub(crate) held_keys: Option<Arc<HeldKeys>>,
    /// Of the idempotency store, if there is one.
    pub(crate) claims: Option<Arc<Claims>>,
    /// Of handlers, where there is one: [`permits`](Self::permits) are for records then, wherever they are in between.
    pub(crate) places: Places,
}

impl Context {
    /// Whoever waits for a permit or a place is to look whether its work is still wanted.
    pub(crate) fn fence_closed(&self) {
        self.permits.fence_closed();
        self.places.fence_closed();
    }
}

/// Tasks of handlers that were pending. They are aborted when this is dropped.
#[derive(Default)]
pub(crate) struct Tasks {
    handles: Vec<JoinHandle<()>>,
    tidy_at: usize,
}

impl Tasks {
    fn push(&mut self, task: JoinHandle<()>) {
        self.handles.push(task);
        if self.handles.len() >= self.tidy_at {
            self.handles.retain(|task| !task.is_finished());
            self.tidy_at = self.handles.len() * 2 + 64;
        }
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        for task in &self.handles {
            task.abort();
        }
    }
}

/// One executor: lives until it is aborted, together with the handlers that it started.
pub(crate) async fn run(context: Arc<Context>) {
    let mut tasks = Tasks::default();
    let mut since = Instant::now();
    loop {
        let work = match context.queue.try_pop() {
            Some(work) => work,
            None => {
                // Reports of whole batches have not woken the pump: there was work left. Now there is not.
                context.reports.wake_if_wanted();
                let work = context.queue.pop().await;
                since = Instant::now();
                work
            }
        };
        let driver = Arc::clone(&work.driver);
        driver.drive(work, &context, &mut tasks).await;
        // Handlers that are ready at once never give the thread back by themselves.
        if since.elapsed() >= SLICE {
            tokio::task::yield_now().await;
            since = Instant::now();
        }
    }
}

fn failed(job: Job<Record>, then: AfterFailure, cause: Cause) -> Failed<Record, Cause> {
    Failed { job, then, cause }
}
