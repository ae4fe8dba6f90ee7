//! The pump: the one thread that owns the Kafka client and the engine.
//!
//! It goes round between the client's queues, the executors' reports and the engine's decisions, in bounded bites, and
//! sleeps when nothing has happened. Whatever could give it work unparks it: partition queues, the main queue, answers
//! to commits, reports, and controls. It never sleeps for longer than [`LONGEST_SLEEP`], since wake-ups have been lost
//! in bindings to librdkafka before.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

use foldhash::quality::FixedState;
use rdkafka::{consumer::Consumer as _, types::RDKafkaErrorCode as Code};
use tokio::{
    runtime::Handle,
    sync::{broadcast, oneshot},
    task::JoinHandle,
};

use super::{
    agreement::Agreement,
    client::Shell,
    epochs::Epochs,
    errors::{Course, advice, course, is_login_failure, is_terminal, kind},
    ffi::{Consumer, Lifeline, PartitionQueue, ReplyQueue, Wake, cached_watermarks, has_member_id},
    log::Throttle,
    membership::Joining,
    outage::Outage,
    partition_errors::Setback,
    prefetch::Prefetch,
    spooled::Told,
    starts::Starts,
    surprises::{Log, Silence},
    topics::Topics,
    watch::{Change, Watch},
};
use crate::{
    Retry,
    consumer::{
        Event, RedrivenForOthers, Report as RunReport, RunError, RunErrorKind, Settings, Status,
    },
    dead_letter::Publisher,
    engine::{AfterFailure, Config, Engine, FinishedAbove, Guarantee, Identity, Ownership},
    execute::{
        self, Cause, Context, Done, Drive, Fence, MOST_AHEAD, Permits, Places, Queue, Recall,
        Report, Reports, Work,
    },
    idempotency::Claims,
    record::{Record, Residency, Source},
    retry_topics::Tier,
};

const LONGEST_SLEEP: Duration = Duration::from_millis(100);
/// While handlers are at work, whose reports do not wake the pump when nothing waits for them.
const SLEEP_AT_WORK: Duration = Duration::from_millis(10);
/// Reports taken in one round, so that intake and commits have their share under any load.
const REPORTS: usize = 1024;
/// Buffers for reports that are kept: as many as are out when handlers are quick.
const SPENT: usize = 8;
/// Events of the main queue served in one round.
const EVENTS: usize = 16;
/// How often watermarks are noted.
const TICK: Duration = Duration::from_secs(1);
/// How often every queue is looked at, woken or not.
const LOOK: Duration = LONGEST_SLEEP;
/// Of a shutdown's time, what is kept for the last commit and for leaving the group.
const RESERVE: Duration = Duration::from_secs(3);
/// Of that, what is kept for the answer to LeaveGroup.
const LEAVE: Duration = Duration::from_millis(500);
/// Between two tries of a last commit.
const COMMIT_PAUSE: Duration = Duration::from_millis(100);
/// A user may give any time; the clock ends somewhere.
const LONGEST_LIMIT: Duration = Duration::from_secs(365 * 24 * 3600);
/// After a run has ended without having left its group, for leaving it all the same.
const LINGER: Duration = Duration::from_secs(5);
/// For leaving the group when there is neither a partition nor a handler to wait for.
const LEAVE_AT_ONCE: Duration = Duration::from_secs(2);
/// After a run has ended while its member was still being admitted to the group, for leaving it when that is over: a session
/// by default, which is what joining may have to wait for.
const LINGER_JOINING: Duration = Duration::from_secs(60);
/// Granted to the last commit and to leaving when the consumer is told to stop at once.
const AT_ONCE: Duration = Duration::from_secs(2);

/// What the consumer's handle asks of the pump.
pub(crate) enum Control {
    /// Finish what runs, commit and leave, all within this time.
    Shutdown(Duration),
    /// Commit what is finished and leave.
    StopNow,
    Pause(Selection),
    Resume(Selection),
    /// Read a stopped partition from this offset on. `false`: it is not stopped here.
    ResumeAt {
        topic: String,
        partition: i32,
        offset: i64,
        answer: oneshot::Sender<bool>,
    },
    Status(oneshot::Sender<Status>),
}

/// Partitions of a topic, or all of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Selection {
    pub(crate) topic: String,
    pub(crate) partition: Option<i32>,
}

impl Selection {
    fn covers(&self, topic: &str, partition: i32) -> bool {
        self.topic == topic && self.partition.is_none_or(|wanted| wanted == partition)
    }
}

/// The way to a pump, from any thread, also before it has started.
#[derive(Clone)]
pub(crate) struct Controls {
    sender: mpsc::Sender<Control>,
    pump: Arc<OnceLock<Thread>>,
}

impl Controls {
    /// There is a pump, or there was one.
    pub(crate) fn have_begun(&self) -> bool {
        self.pump.get().is_some()
    }

    /// `false`: the pump has ended.
    pub(crate) fn send(&self, control: Control) -> bool {
        let sent = self.sender.send(control).is_ok();
        if let Some(pump) = self.pump.get() {
            pump.unpark();
        }
        sent
    }
}

pub(crate) fn control_channel() -> (Controls, mpsc::Receiver<Control>) {
    let (sender, controls) = mpsc::channel();
    (
        Controls {
            sender,
            pump: Arc::default(),
        },
        controls,
    )
}

/// Finds the handler for a topic.
pub(crate) type Lookup = Box<dyn Fn(&str) -> Option<Arc<dyn Drive>> + Send>;

/// What a pump starts with.
pub(crate) struct Start {
    pub(crate) settings: Arc<Settings>,
    pub(crate) lookup: Lookup,
    pub(crate) controls: mpsc::Receiver<Control>,
    pub(crate) events: broadcast::Sender<Event>,
    pub(crate) runtime: Handle,
    pub(crate) ended: oneshot::Sender<Result<RunReport, RunError>>,
}

/// Starts the pump's thread.
pub(crate) fn start(start: Start, controls: &Controls) -> std::io::Result<()> {
    let name = format!("kafka-{}", start.settings.group);
    let thread = thread::Builder::new()
        .name(name)
        .spawn(move || run(start))?;
    controls.pump.get_or_init(|| thread.thread().clone());
    Ok(())
}

fn run(start: Start) {
    let Start {
        settings,
        lookup,
        controls,
        events,
        runtime,
        ended,
    } = start;
    let pump_thread = thread::current();
    let wake: Wake = {
        let pump_thread = pump_thread.clone();
        Arc::new(move || pump_thread.unpark())
    };
    let pump = Pump::new(
        Arc::clone(&settings),
        lookup,
        runtime,
        controls,
        events,
        pump_thread,
    );
    let pump = Arc::new(Mutex::new(pump));
    lock(&pump).open_spool();
    let (consumer, result) = loop {
        let created = Consumer::create(&settings.client, Arc::clone(&wake), |lifeline| {
            lock(&pump).lifeline = lifeline;
            Shell::new(Arc::clone(&pump), Arc::clone(&settings))
        });
        let consumer = match created {
            Ok(consumer) => consumer,
            Err(error) => {
                let message = format!("librdkafka could not create a consumer: {error}");
                let failed = RunError::new(RunErrorKind::Client, message, RunReport::default());
                drop(ended.send(Err(failed)));
                return;
            }
        };
        match live(&consumer, Arc::clone(&wake)) {
            Some(result) => break (consumer, result),
            None => consumer.abandon(),
        }
    };
    let is_asking = consumer.context().lock().starts.have_a_thread();
    if consumer.closed() && !is_asking {
        // Destroying a client that has left its group takes a moment. A process that ends with its run had better not
        // end in the middle of that.
        drop(consumer);
        drop(ended.send(result));
    } else {
        // Brokers are away, or have not answered yet. The run is over for everybody; should they answer soon, the group is
        // left in order.
        consumer.context().lock().retire();
        drop(ended.send(result));
        if !consumer.context().lock().closing {
            let until = Instant::now() + LINGER_JOINING;
            while is_joining(&consumer) && Instant::now() < until {
                if !serve_events(&consumer) {
                    thread::park_timeout(LONGEST_SLEEP);
                }
            }
            let _ = consumer.close_queue();
        }
        let until = Instant::now() + LINGER;
        while !consumer.closed() && Instant::now() < until {
            if !serve_events(&consumer) {
                thread::park_timeout(LONGEST_SLEEP);
            }
        }
        if consumer.closed() {
            drop(consumer);
        } else {
            consumer.abandon();
        }
    }
}

/// From subscribing to having left the group. `None`: this client can do no more, and another one is to go on.
fn live(consumer: &Consumer<Shell>, wake: Wake) -> Option<Result<RunReport, RunError>> {
    let lock = || consumer.context().lock();
    {
        let mut pump = lock();
        pump.reply = ReplyQueue::new(consumer.lifeline(), wake);
        pump.subscribe(consumer);
    }
    loop {
        let more = serve_events(consumer);
        let mut pump = lock();
        let worked = pump.step(consumer)
            | pump.attend_to_starts(consumer)
            | pump.attend_to_logs(consumer)
            | pump.attend_to_assignment(consumer)
            | more;
        if pump.stop.is_some() {
            break;
        }
        if pump.joining.wants_another_client(Instant::now()) {
            pump.part_from_client();
            return None;
        }
        let sleep = pump.sleep();
        drop(pump);
        if !worked {
            thread::park_timeout(sleep);
        }
    }
    Some(leave(consumer))
}

/// Drains, commits, and leaves the group, within the time that was given.
fn leave(consumer: &Consumer<Shell>) -> Result<RunReport, RunError> {
    let lock = || consumer.context().lock();
    let began;
    {
        let mut pump = lock();
        pump.starts.clear();
        if pump.owners().is_empty() {
            let leave = Instant::now() + LEAVE_AT_ONCE;
            pump.end_by(Deadline {
                drain: leave,
                commit: leave,
                leave,
            });
        }
        let (owners, until) = (pump.owners(), pump.deadline().drain);
        began = Instant::now();
        pump.begin_drain(&owners, until);
        let handlers = pump
            .handlers_at_work()
            .map(|(_, count)| count)
            .sum::<usize>();
        tracing::info!(
            group = %pump.settings.group,
            partitions = owners.len(),
            handlers,
            wait_ms = until.saturating_duration_since(Instant::now()).as_millis() as u64,
            "shutting down: nothing new starts, and handlers that run may finish"
        );
    }
    loop {
        let more = serve_events(consumer);
        let mut pump = lock();
        let worked = pump.step(consumer) || more;
        // Looked up each time: a shorter time may be given meanwhile.
        let until = pump.deadline().drain;
        let owners = pump.owners();
        let cut = pump.cut(&owners, began, until);
        let left = until.saturating_duration_since(Instant::now());
        if pump.drained() || left.is_zero() {
            break;
        }
        let sleep = pump.sleep().min(cut.unwrap_or(left));
        drop(pump);
        if !worked {
            thread::park_timeout(sleep.min(left));
        }
    }
    lock().tell_of_abandoned_handlers();
    lock().abort_handlers();
    loop {
        let mut pump = lock();
        // What finished at the last moment.
        while pump.take_reports() {}
        let owners = pump.owners();
        let until = pump.deadline().commit;
        if pump.commit_all(&owners, until) || Instant::now() >= pump.deadline().commit {
            let gone = pump.named(&owners);
            owners.iter().for_each(|owner| pump.end(*owner));
            pump.announce(Change::Revoked, &gone);
            pump.reply = None;
            break;
        }
        drop(pump);
        // A commit that meets a rebalance is refused until this member has joined the new generation.
        serve_events(consumer);
        thread::park_timeout(COMMIT_PAUSE);
    }
    unsubscribe(consumer);
    // While it is being admitted it can only be closed without leaving.
    let joining = is_joining(consumer);
    consumer.context().lock().closing = !joining;
    if !joining && consumer.close_queue().is_ok() {
        serve_until(consumer, Duration::ZERO, || consumer.closed());
    }
    if joining {
        tracing::warn!(
            "the group admits no member at the moment, and this one is left in the background when it does; should the process \
             end before that, the group waits for it until its session.timeout.ms has passed"
        );
    } else if !consumer.closed() {
        tracing::warn!(
            "the group was not left within the shutdown's time: the broker will notice after session.timeout.ms"
        );
    }
    let mut pump = lock();
    pump.report_claims();
    let report = std::mem::take(&mut pump.report);
    match pump.failure.take() {
        None => Ok(report),
        Some((kind, message)) => Err(RunError::new(kind, message, report)),
    }
}

/// Leaves a classic group, where closing alone might not: librdkafka's close sends no LeaveGroup for a member that owns
/// nothing, and grants it five seconds, while brokers answer nothing else to a member whose JoinGroup they hold back, as
/// they do until the session of a member that died has ended. A member that is gone without having left holds up the
/// group for another session.
fn unsubscribe(consumer: &Consumer<Shell>) {
    let settings = Arc::clone(&consumer.context().lock().settings);
    let property = |name| settings.client.get(name);
    // A static member does not leave: it is expected back.
    if property("group.instance.id").is_some() || property("group.protocol") == Some("consumer") {
        return;
    }
    // Takes effect when a rebalance that is under way is over.
    consumer.unsubscribe();
    serve_until(consumer, LEAVE, || {
        let brokers_down = consumer.context().lock().outage.is_some();
        brokers_down || consumer.client().fatal_error().is_some() || !has_member_id(consumer)
    });
}

/// The brokers hold back the answer to this member's JoinGroup still, and do not take its LeaveGroup before.
fn is_joining(consumer: &Consumer<Shell>) -> bool {
    let pump = consumer.context().lock();
    let property = |name| pump.settings.client.get(name);
    property("group.instance.id").is_none()
        && property("group.protocol") != Some("consumer")
        && pump.outage.is_none()
        && consumer.client().fatal_error().is_none()
        && has_member_id(consumer)
}

/// Serves events until this is `done`, or no more than `reserve` is left of the shutdown's time.
fn serve_until(consumer: &Consumer<Shell>, reserve: Duration, done: impl Fn() -> bool) {
    while !done() {
        let more = serve_events(consumer);
        let mut pump = consumer.context().lock();
        pump.take_controls();
        if Instant::now() + reserve >= pump.deadline().leave {
            return;
        }
        drop(pump);
        if !more {
            thread::park_timeout(Duration::from_millis(1));
        }
    }
}

/// Serves rebalances, errors and log lines. Called without the pump's lock: the callbacks take it.
///
/// `true`: there may be more. Nothing wakes the pump for what is in the queue already, and with the property `debug`
/// set that is a lot.
fn serve_events(consumer: &Consumer<Shell>) -> bool {
    for _ in 0..EVENTS {
        match consumer.poll(Duration::ZERO) {
            // Also returned for an event that a callback has dealt with.
            None if consumer.context().take_called_back() => {}
            None => return false,
            Some(Ok(message)) => {
                use rdkafka::Message as _;
                let mut pump = consumer.context().lock();
                if pump.stop.is_none() {
                    // Dropping it would be a gap that the window cannot know of, and that a commit would pass.
                    let place = format!(
                        "{}/{}/{}",
                        message.topic(),
                        message.partition(),
                        message.offset()
                    );
                    pump.fail(
                        RunErrorKind::Client,
                        format!("record {place} came on the main queue, past its partition's own: please report this"),
                    );
                }
            }
            Some(Err(error)) => {
                let Some(code) = error.rdkafka_error_code() else {
                    continue;
                };
                client_error(consumer, code);
            }
        }
    }
    true
}

/// An error from the main queue.
fn client_error(consumer: &Consumer<Shell>, code: Code) {
    let shell = consumer.context();
    let reason = shell.take_reason();
    let mut pump = shell.lock();
    if let Some((cause, reason)) = consumer.client().fatal_error() {
        if course(cause) == Course::WaitForSession && pump.waits_for_session() {
            return;
        }
        return pump.end_with(cause, None, &reason);
    }
    // A wrong password or certificate authority is worth stopping for; a broker that turns away somebody whom the
    // cluster has let in before is not.
    if is_login_failure(code)
        && !shell.is_token_missing()
        && pump.cluster_id.is_empty()
        && consumer.client().fetch_cluster_id(Duration::ZERO).is_none()
    {
        return pump.end_with(code, None, &reason);
    }
    pump.client_error(code, None, &reason);
}

/// A partition that is ours, with what belongs to it outside the engine.
pub(super) struct Held {
    pub(super) owner: Ownership,
    pub(super) source: Arc<Source>,
    pub(super) queue: PartitionQueue,
    /// Set by the queue's wake-up: something came since the queue was last found empty.
    pub(super) filled: Arc<AtomicBool>,
    pub(super) fence: Arc<Fence>,
    pub(super) driver: Arc<dyn Drive>,
    /// The retry topic that it is of.
    pub(super) tier: Option<Arc<Tier>>,
    pub(super) end: Option<(i64, Instant)>,
    pub(super) identity: Identity,
    pub(super) log: Log,
    /// When its log was looked at last, for some trouble.
    pub(super) looked_at: Option<Instant>,
    pub(super) epochs: Epochs,
    /// Since the topic was made anew nothing has been read.
    pub(super) silence: Option<Silence>,
    /// The client was told to ask the brokers whether the log of this epoch reaches up to the position; nothing has come since.
    pub(super) validated: Option<i32>,
    /// When it was assigned the group had committed something of it: it could be read then.
    pub(super) was_read: bool,
    /// It could not be read.
    pub(super) setback: Option<Setback>,
    /// It was said in the log that its snapshot is cut; once, until it fits again.
    pub(super) cut_reported: bool,
    pub(super) watch: Watch,
    pub(super) prefetch: Prefetch,
}

/// By when each part of an orderly end is over. Counted from the moment it was asked for: whatever a rebalance takes
/// meanwhile is part of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadline {
    pub(super) drain: Instant,
    pub(super) commit: Instant,
    leave: Instant,
}

impl Deadline {
    fn within(limit: Duration) -> Self {
        if limit.is_zero() {
            return Self::at_once();
        }
        let now = Instant::now();
        let limit = limit.min(LONGEST_LIMIT);
        let reserve = RESERVE.min(limit / 4);
        Self {
            drain: now + limit - reserve,
            commit: now + limit - reserve / 3,
            leave: now + limit,
        }
    }

    fn at_once() -> Self {
        let now = Instant::now();
        Self {
            drain: now,
            commit: now + AT_ONCE,
            leave: now + 2 * AT_ONCE,
        }
    }

    fn or_sooner(self, other: Self) -> Self {
        Self {
            drain: self.drain.min(other.drain),
            commit: self.commit.min(other.commit),
            leave: self.leave.min(other.leave),
        }
    }
}

/// What the pump's thread works on. Only that thread locks it, in a round or in a rebalance callback.
pub(crate) struct Pump {
    pub(super) settings: Arc<Settings>,
    pub(super) engine: Engine<Record, Cause>,
    /// By [`Ownership::slot`].
    pub(super) held: Vec<Option<Held>>,
    /// To the client there is now.
    pub(super) lifeline: Lifeline,
    pub(super) lookup: Lookup,
    pub(super) residency: Arc<Residency>,
    pub(super) key_hash: FixedState,
    pub(super) reply: Option<ReplyQueue>,
    pub(super) thread: Thread,
    pub(super) paused: Vec<Selection>,
    /// Partitions that were paused in the client when they were given away.
    pub(super) left_paused: Vec<(Arc<str>, i32)>,
    /// When a paused partition last took the place of another.
    pub(super) last_swap: Instant,
    /// What was finished in partitions that were lost before it could be committed, above the offset that was. Should
    /// one come back, nothing of that is handled again.
    pub(super) remembered: HashMap<(Arc<str>, i32), (i64, FinishedAbove)>,
    /// Empty until the brokers have told it.
    pub(super) cluster_id: String,
    pub(super) topics: Topics,
    pub(super) starts: Starts,
    /// There may be partitions whose logs are to be looked after.
    pub(super) surprised: bool,
    /// When partitions that the client had given up were last assigned to it anew.
    pub(super) assigned_anew: Option<Instant>,
    pub(super) controls: mpsc::Receiver<Control>,
    events: broadcast::Sender<Event>,
    pub(super) reports: mpsc::Receiver<Report>,
    pub(super) send_report: Reports,
    pub(super) context: Arc<Context>,
    /// Filled and emptied in every round.
    pub(super) outgoing: Vec<Work>,
    /// Empty buffers for what comes of batches.
    pub(super) spent: Vec<Vec<Done>>,
    pub(super) executors: Vec<JoinHandle<()>>,
    pub(super) runtime: Handle,
    pub(super) publisher: Option<Arc<Publisher>>,
    /// Dead letters on their way, with the ownership that each is for.
    pub(super) dead_letters: Vec<(Ownership, JoinHandle<()>)>,
    pub(super) last_tick: Instant,
    pub(super) last_look: Instant,
    /// Which partition is read first in this round.
    pub(super) first_read: usize,
    pub(super) told_of_spool: Told,
    pub(super) outage: Option<Outage>,
    pub(super) joining: Joining,
    pub(super) agreement: Agreement,
    pub(super) unknown_topic: Throttle,
    pub(super) dependency_down: Throttle,
    /// Set when the run is to end.
    pub(super) stop: Option<Deadline>,
    pub(super) failure: Option<(RunErrorKind, String)>,
    /// The group does not take commits from us any more.
    pub(super) commits_refused: bool,
    /// The client has been told to close.
    closing: bool,
    pub(super) report: RunReport,
}

impl Pump {
    fn new(
        settings: Arc<Settings>,
        lookup: Lookup,
        runtime: Handle,
        controls: mpsc::Receiver<Control>,
        events: broadcast::Sender<Event>,
        thread: Thread,
    ) -> Self {
        let now = Instant::now();
        let (report_sender, reports) = mpsc::channel();
        let send_report = Reports::new(report_sender, thread.clone());
        let Config {
            concurrency,
            ref retry,
            ..
        } = settings.engine;
        let count = runtime.metrics().num_workers().clamp(1, concurrency.max(1));
        let permits = match &settings.idempotency {
            // Never short then: the engine hands over no more.
            Some(_) => concurrency + MOST_AHEAD + count,
            None => concurrency,
        };
        let context = Arc::new(Context {
            queue: Queue::default(),
            permits: Permits::new(permits),
            recall: Recall::default(),
            reports: send_report.clone(),
            handler_timeout: settings.handler_timeout,
            stuck_limit: settings.stuck_limit,
            interrupts: settings.engine.guarantee == Guarantee::AtMostOnce,
            retry: Arc::clone(retry),
            classifier: settings.classifier.clone(),
            filter: settings.filter.clone(),
            error_message: settings.error_message(),
            failed_attempts: Throttle::default(),
            own_redrives_of: match settings.redriven_for_others {
                RedrivenForOthers::Skip => Some(Arc::clone(&settings.group)),
                RedrivenForOthers::Handle => None,
            },
            held_keys: settings.held_keys.clone(),
            claims: settings.idempotency.clone().map(|idempotency| {
                let claims = Claims::new(idempotency, &settings.group, runtime.clone());
                let claims = Arc::new(claims);
                claims.check_server();
                claims
            }),
            places: Places::new(concurrency),
        });
        let executors = (0..count)
            .map(|_| runtime.spawn(execute::run(Arc::clone(&context))))
            .collect();
        Self {
            engine: Engine::new(settings.engine.clone(), now),
            held: Vec::new(),
            lifeline: Lifeline::default(),
            lookup,
            residency: Arc::default(),
            key_hash: FixedState::with_seed(settings.engine.seed),
            reply: None,
            thread,
            paused: Vec::new(),
            left_paused: Vec::new(),
            last_swap: now,
            remembered: HashMap::new(),
            cluster_id: String::new(),
            topics: Topics::default(),
            starts: Starts::default(),
            surprised: false,
            assigned_anew: None,
            controls,
            events,
            reports,
            send_report,
            context,
            outgoing: Vec::new(),
            spent: Vec::new(),
            executors,
            runtime,
            publisher: None,
            dead_letters: Vec::new(),
            last_tick: now,
            last_look: now,
            first_read: 0,
            told_of_spool: Told::default(),
            outage: None,
            joining: Joining::begin(now),
            agreement: Agreement::new(now, settings.engine.seed),
            unknown_topic: Throttle::default(),
            dependency_down: Throttle::default(),
            stop: None,
            failure: None,
            commits_refused: false,
            closing: false,
            report: RunReport::default(),
            settings,
        }
    }

    pub(super) fn subscribe(&mut self, consumer: &super::BaseConsumer) {
        let settings = Arc::clone(&self.settings);
        let mut topics = settings.subscription.names();
        topics.extend(settings.retry_topics.names());
        if let Err(error) = consumer.subscribe(&topics) {
            let message = format!("could not subscribe to {topics:?}: {error}");
            self.fail(RunErrorKind::Client, message);
        }
    }

    /// Lets go of all that belongs to a client that can do no more, and has lost what it had.
    fn part_from_client(&mut self) {
        let owners = self.owners();
        self.close_fences(&owners, Instant::now());
        while self.take_reports() {}
        let gone = self.named(&owners);
        owners.iter().for_each(|owner| self.lose(*owner));
        self.announce(Change::Lost, &gone);
        self.reply = None;
        self.starts.clear();
        self.topics.forget_question();
        self.joining.begin_again();
        self.agreement.begin_again(Instant::now());
    }

    /// Lets go of all that others could wait for, or that belongs to the user.
    fn retire(&mut self) {
        self.controls = mpsc::channel().1;
        self.events = broadcast::Sender::new(1);
        self.lookup = Box::new(|_| None);
        self.publisher = None;
        self.remembered.clear();
    }

    /// One round. `true`: something happened, so that another round may find more.
    pub(super) fn step(&mut self, consumer: &super::BaseConsumer) -> bool {
        let now = Instant::now();
        self.engine.advance(now);
        let mut worked = self.take_reports();
        self.follow_breaker();
        self.take_controls();
        if now.duration_since(self.last_tick) >= TICK {
            self.last_tick = now;
            self.tick(consumer, now);
        }
        let look = now.duration_since(self.last_look) >= LOOK;
        if look {
            self.last_look = now;
            if self.stop.is_none() && !self.engine.holds_commits() {
                self.bound_prefetch(consumer, now);
            }
        }
        worked |= self.read(look);
        worked |= self.hand_over();
        worked |= self.give_up();
        worked |= self.commit();
        // Records that are done are worth waking up for where others wait behind them; else they are looked at when
        // something happens, or after a short sleep.
        worked
            | self
                .send_report
                .set_wanted(self.stop.is_some() || self.engine.waits_for_reports())
    }

    pub(super) fn sleep(&self) -> Duration {
        let until = self
            .engine
            .next_wake()
            .map(|at| at.saturating_duration_since(Instant::now()));
        let longest = if self.engine.turns_out() > 0 {
            SLEEP_AT_WORK
        } else {
            LONGEST_SLEEP
        };
        until.map_or(longest, |until| until.min(longest))
    }

    /// Ends the run with this error, in order. The first one counts.
    pub(super) fn fail(&mut self, kind: RunErrorKind, message: String) {
        if self.failure.is_none() {
            tracing::error!(group = %self.settings.group, ?kind, "{message}");
            self.failure = Some((kind, message));
        }
        let limit = self.settings.shutdown_timeout;
        self.stop.get_or_insert_with(|| Deadline::within(limit));
    }

    fn end_by(&mut self, deadline: Deadline) {
        self.stop = Some(self.stop.map_or(deadline, |stop| stop.or_sooner(deadline)));
    }

    fn deadline(&self) -> Deadline {
        self.stop
            .expect("the group is left only when the run is to end")
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stop.is_some()
    }

    /// An error that the client reports, of a partition where one is named.
    pub(super) fn client_error(&mut self, code: Code, place: Option<(&str, i32)>, reason: &str) {
        if is_terminal(code) {
            return self.end_with(code, place, reason);
        }
        let now = Instant::now();
        if place.is_none() {
            self.joining.note_refusal(code, reason);
        }
        match code {
            Code::AllBrokersDown => self.brokers_are_down(now),
            Code::UnknownTopicOrPartition | Code::UnknownTopic | Code::UnknownPartition
                if self.unknown_topic.admit(now).is_some() =>
            {
                let mut topics = self.settings.subscription.names();
                topics.extend(self.settings.retry_topics.names());
                tracing::warn!(
                    group = %self.settings.group,
                    topics = %topics.join(", "),
                    "a topic of the subscription does not exist: it is taken up when it is created"
                );
            }
            _ => {}
        }
        tracing::debug!(error = %code, reason, "the client met an error and goes on");
    }

    /// Ends the run over an error of the client, with librdkafka's reason if there is one.
    fn end_with(&mut self, code: Code, place: Option<(&str, i32)>, reason: &str) {
        let group = &self.settings.group;
        let place = place.map_or_else(String::new, |(topic, partition)| {
            format!(", partition {topic}/{partition}")
        });
        let reason = if reason.is_empty() {
            code.to_string()
        } else {
            reason.trim_end_matches('.').to_owned()
        };
        let message = format!("group `{group}`{place}: {reason}: {}", advice(code));
        self.fail(kind(code), message);
    }

    /// Tells those who listen, if any.
    pub(super) fn tell(&self, event: Event) {
        let _ = self.events.send(event);
    }

    // ---- reports and controls ----

    pub(super) fn take_reports(&mut self) -> bool {
        let mut any = false;
        for _ in 0..REPORTS {
            let Ok(report) = self.reports.try_recv() else {
                break;
            };
            any = true;
            match report {
                Report::Batch {
                    owner,
                    mut done,
                    failed,
                    not_started,
                    spent,
                } => {
                    for done in done.drain(..) {
                        self.engine
                            .finished(owner, done.seq, done.lane, done.outcome);
                    }
                    for mut failed in failed {
                        // It stays for as long as its retries take, and must not keep its neighbours in memory.
                        failed.job.record = failed.job.record.compact();
                        self.note_outage(&failed);
                        if self
                            .settings
                            .retry_topics
                            .get(failed.job.record.topic())
                            .is_some()
                        {
                            once_only(&mut failed.then);
                        }
                        self.engine.failed(owner, failed);
                    }
                    if !not_started.is_empty() {
                        self.engine.not_started(owner, not_started);
                    }
                    self.engine.reuse(spent);
                    if done.capacity() > 0 && self.spent.len() < SPENT {
                        self.spent.push(done);
                    }
                }
                Report::One { owner, done, next } => {
                    self.engine
                        .finished(owner, done.seq, done.lane, done.outcome);
                    if let Some(next) = next {
                        self.engine.started(owner, next);
                    }
                }
                Report::Progress { owner, seq } => self.engine.started(owner, seq),
                Report::Waiting { owner, seqs } => self.engine.waiting(owner, &seqs),
                Report::SetAside {
                    owner,
                    seq,
                    lane,
                    outcome,
                } => self.engine.settle(owner, seq, lane, outcome),
                Report::Unwritten { owner, message } => {
                    self.engine.abandon(owner);
                    self.fail(RunErrorKind::DeadLetterUnavailable, message);
                }
            }
        }
        any
    }

    pub(super) fn take_controls(&mut self) {
        loop {
            match self.controls.try_recv() {
                Ok(Control::Shutdown(limit)) => self.end_by(Deadline::within(limit)),
                Ok(Control::StopNow) => self.end_by(Deadline::at_once()),
                Ok(Control::Pause(selection)) => {
                    if !self.paused.contains(&selection) {
                        self.paused.push(selection);
                    }
                    self.apply_pauses();
                }
                Ok(Control::Resume(selection)) => {
                    self.resume(&selection);
                    self.apply_pauses();
                }
                Ok(Control::ResumeAt {
                    topic,
                    partition,
                    offset,
                    answer,
                }) => drop(answer.send(self.resume_at(&topic, partition, offset))),
                Ok(Control::Status(answer)) => drop(answer.send(self.status())),
                Err(mpsc::TryRecvError::Empty) => break,
                Err(mpsc::TryRecvError::Disconnected) => {
                    // Nobody is left who could ask for an orderly end.
                    self.stop.get_or_insert_with(Deadline::at_once);
                    break;
                }
            }
        }
    }

    fn resume(&mut self, selection: &Selection) {
        match selection.partition {
            // Resuming a topic resumes all of its partitions, however they were paused.
            None => self.paused.retain(|paused| paused.topic != selection.topic),
            Some(_) => self.paused.retain(|paused| paused != selection),
        }
    }

    pub(super) fn apply_pauses(&mut self) {
        for held in self.held.iter().flatten() {
            let Source {
                topic, partition, ..
            } = &*held.source;
            let source = held.tier.as_ref().map(|tier| &*tier.source);
            let paused = self.paused.iter().any(|paused| {
                // A topic's retry topics are paused with it; its partitions are not theirs.
                paused.covers(topic, *partition)
                    || paused.partition.is_none() && source == Some(&*paused.topic)
            });
            self.engine.set_paused(held.owner, paused);
        }
    }

    fn tick(&mut self, consumer: &super::BaseConsumer, now: Instant) {
        for held in self.held.iter_mut().flatten() {
            if let Some((_, high)) =
                cached_watermarks(consumer, &held.source.topic, held.source.partition)
            {
                held.end = Some((high, now));
            }
        }
        self.dead_letters.retain(|(_, task)| !task.is_finished());
        self.ask_for_brokers();
        self.watch_membership(consumer, now);
        self.pass_markers(consumer);
        self.end_setbacks(now);
        self.watch_for_stuck_records(now);
        self.tell_of_spool(now);
        self.watch_store();
        self.listen_into_silence(now);
        if self.executors.iter().any(JoinHandle::is_finished) && self.stop.is_none() {
            let message = "an executor has ended: the tokio runtime that `run` was called on is shut down, \
                           keep it alive until `run` returns";
            self.fail(RunErrorKind::RuntimeGone, message.into());
        }
    }

    // ---- decisions carried out ----

    fn hand_over(&mut self) -> bool {
        let mut any = false;
        if self.context.claims.is_some() {
            self.engine.run_ahead(self.context.places.ahead());
        }
        while let Some(batch) = self.engine.next_batch() {
            any = true;
            let held = self.held[batch.owner.slot()]
                .as_ref()
                .expect("the engine hands over records of held partitions only");
            self.outgoing.push(Work {
                batch,
                done: self.spent.pop().unwrap_or_default(),
                fence: Arc::clone(&held.fence),
                issue: self.context.recall.issue(),
                driver: Arc::clone(&held.driver),
                tier: held.tier.clone(),
            });
        }
        // Quick handlers are done with a round's batches sooner than a second executor is awake. Should they turn out
        // not to be, the first executor calls the others when its slice is over.
        let awake = if self.engine.is_quick() {
            1
        } else {
            usize::MAX
        };
        self.context.queue.push(self.outgoing.drain(..), awake);
        any
    }
}

/// In a retry topic a record has one attempt: the next topic is where it waits for another.
fn once_only(then: &mut AfterFailure) {
    if let AfterFailure::Retry(policy) | AfterFailure::RetryAfter(_, policy) = then {
        *policy = Some(Arc::new(Retry::none()));
    }
}

/// Locks what only one thread ever locks; after a panic on it there is nobody left to be protected.
pub(super) fn lock(pump: &Mutex<Pump>) -> MutexGuard<'_, Pump> {
    pump.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn filled_wake(thread: &Thread) -> (Wake, Arc<AtomicBool>) {
    // What a queue already holds wakes nobody: look once.
    let filled = Arc::new(AtomicBool::new(true));
    let (thread, flag) = (thread.clone(), Arc::clone(&filled));
    let wake = Arc::new(move || {
        flag.store(true, Ordering::Release);
        thread.unpark();
    });
    (wake, filled)
}
