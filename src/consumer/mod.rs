//! The public face: build a consumer, run it with a handler, watch and steer it through a handle.

mod builder;
mod error;
mod events;
mod handle;
mod routes;
mod run;
mod settings;
mod status;

use std::sync::Arc;

use tokio::sync::broadcast;

use self::handle::Readable;
pub(crate) use self::settings::{Settings, Subscription};
pub use self::{
    builder::Builder,
    error::{BuildError, HandleError, RunError, RunErrorKind},
    events::{CommittedUnhandled, Event, Events, RebalanceListener, StuckRecord, TopicPartition},
    handle::ConsumerHandle,
    routes::Routes,
    run::Run,
    settings::{Exhausted, OutOfRange, RedrivenForOthers, StartPolicy},
    status::{
        BreakerStatus, DeadLetterSpool, FetchError, IdempotencyStatus, Lag, Membership, NotStarted,
        NotStartedReason, OwnershipState, PartitionReport, PartitionStatus, Report, RunningRecord,
        StalledDeadLetters, Status, StopReason, StoppedPartition, WaitingRecord,
    },
};
use crate::{
    ByType, Decoder, Handler, Payload,
    execute::{Drive, Driver},
    kafka::{Controls, control_channel},
};

/// A Kafka consumer that commits an offset only when every record up to it is finished.
///
/// Build one, give it a handler, await it:
///
/// ```no_run
/// use reliable_consumer::{DeadLetter, HandlerResult, Json, Message, ReliableConsumer};
///
/// #[derive(serde::Deserialize)]
/// struct SignUp {
///     email: String,
/// }
///
/// async fn register(message: &Message<Json<SignUp>>) -> HandlerResult {
///     println!("welcome, {}", message.payload().email);
///     Ok(())
/// }
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let consumer = ReliableConsumer::builder()
///     .bootstrap_servers("localhost:9092")
///     .group_id("sign-ups")
///     .topic("sign-ups")
///     .dead_letter(DeadLetter::topic("sign-ups.dlq"))
///     .build()?;
/// let report = consumer.run(register).with_graceful_shutdown(stop_signal()).await?;
/// println!("handled {}", report.handled);
/// # Ok(())
/// # }
/// # async fn stop_signal() {}
/// ```
///
/// Nothing is sent to a broker before the run is awaited. While it runs, the Kafka client lives on a thread of its own
/// and handlers on the runtime that awaits the run.
pub struct ReliableConsumer {
    settings: Arc<Settings>,
    handle: ConsumerHandle,
    controls: std::sync::mpsc::Receiver<crate::kafka::Control>,
    events: broadcast::Sender<Event>,
}

/// Events that wait for whoever is slow to take them.
const EVENTS: usize = 1_024;

impl ReliableConsumer {
    /// Starts to build one.
    pub fn builder() -> Builder {
        Builder::new()
    }

    fn new(settings: Settings) -> Self {
        let (sender, controls): (Controls, _) = control_channel();
        let (events, _) = broadcast::channel(EVENTS);
        let handle = ConsumerHandle::new(
            sender,
            events.downgrade(),
            settings.held_keys.clone(),
            settings.shutdown_timeout,
            Readable {
                subscription: settings.subscription.clone(),
                retry_topics: settings.retry_topics.names().map(String::from).collect(),
            },
        );
        Self {
            settings: Arc::new(settings),
            handle,
            controls,
            events,
        }
    }

    /// A handle to steer and watch the run, from anywhere and for as long as wanted. What is asked before the run
    /// begins is done when it does.
    pub fn handle(&self) -> ConsumerHandle {
        self.handle.clone()
    }

    /// Handles every record with `handler`, until the run is shut down or cannot go on. Does nothing until awaited.
    ///
    /// The payload's type is that of the handler's argument.
    pub fn run<P: Payload, H: Handler<P>>(self, handler: H) -> Run {
        self.run_decoding(ByType, handler)
    }

    /// Like [`run`](Self::run), with a decoder that has state, such as a connection to a schema registry.
    pub fn run_decoding<P, D, H>(self, decoder: D, handler: H) -> Run
    where
        P: Send + Sync + 'static,
        D: Decoder<P>,
        H: Handler<P>,
    {
        let driver: Arc<dyn Drive> = Arc::new(Driver::new(handler, decoder));
        self.start(Box::new(move |_| Some(Arc::clone(&driver))))
    }

    /// Handles each topic with its own handler.
    pub fn run_routes(self, routes: Routes) -> Run {
        let group = Arc::clone(&self.settings.group);
        self.start(routes.into_lookup(group))
    }

    fn start(self, lookup: crate::kafka::Lookup) -> Run {
        Run::new(
            self.settings,
            self.handle,
            self.controls,
            self.events,
            lookup,
        )
    }
}

impl std::fmt::Debug for ReliableConsumer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReliableConsumer")
            .field("group", &self.settings.group)
            .field("subscription", &self.settings.subscription)
            .finish_non_exhaustive()
    }
}
