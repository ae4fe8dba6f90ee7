//! A run, from the first await to the report.

use std::{
    future::{Future, IntoFuture},
    pin::Pin,
    sync::{Arc, mpsc},
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::{broadcast, oneshot},
};

use super::{ConsumerHandle, Event, Report, RunError, RunErrorKind, Settings};
use crate::kafka::{self, Control, Lookup, Start};

/// A consumer with its handler, ready to be awaited.
///
/// Awaiting it gives the [`Report`] of an orderly end, or the error that ended it. Dropping the future stops the run at
/// once: handlers are cancelled, what is finished is committed in the background, nothing else is.
///
/// # Panics
///
/// When awaited outside a tokio runtime, or in one without timers (`enable_time` or `enable_all`).
#[must_use = "a run does nothing until it is awaited"]
pub struct Run {
    settings: Arc<Settings>,
    handle: ConsumerHandle,
    controls: mpsc::Receiver<Control>,
    events: broadcast::Sender<Event>,
    lookup: Lookup,
    shutdown: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Run {
    pub(super) fn new(
        settings: Arc<Settings>,
        handle: ConsumerHandle,
        controls: mpsc::Receiver<Control>,
        events: broadcast::Sender<Event>,
        lookup: Lookup,
    ) -> Self {
        Self {
            settings,
            handle,
            controls,
            events,
            lookup,
            shutdown: None,
        }
    }

    /// Ends the run in order when `signal` completes, with whatever output, within
    /// [`shutdown_timeout`](super::Builder::shutdown_timeout).
    ///
    /// For a second, more urgent signal use a [`ConsumerHandle`] and its
    /// [`stop_now`](ConsumerHandle::stop_now).
    pub fn with_graceful_shutdown<F>(mut self, signal: F) -> Self
    where
        F: Future<Output: Send> + Send + 'static,
    {
        self.shutdown = Some(Box::pin(async move {
            signal.await;
        }));
        self
    }

    async fn live(self) -> Result<Report, RunError> {
        let Self {
            settings,
            handle,
            controls,
            events,
            lookup,
            shutdown,
        } = self;
        // Timeouts and dead letters need the runtime's timers. Without them this panics, here rather than in a handler.
        drop(tokio::time::sleep(Duration::ZERO));
        let (ended, mut end) = oneshot::channel();
        let start = Start {
            settings,
            lookup,
            controls,
            events,
            runtime: Handle::current(),
            ended,
        };
        if let Err(error) = kafka::start(start, handle.controls()) {
            let message = format!("the consumer's thread could not be started: {error}");
            return Err(RunError::new(
                RunErrorKind::Client,
                message,
                Report::default(),
            ));
        }
        let stop = StopOnDrop(handle.clone());
        if let Some(shutdown) = shutdown {
            tokio::select! {
                end = &mut end => return finished(end),
                () = shutdown => {
                    let _ = handle.shutdown();
                }
            }
        }
        let end = end.await;
        drop(stop);
        finished(end)
    }
}

fn finished(
    end: Result<Result<Report, RunError>, oneshot::error::RecvError>,
) -> Result<Report, RunError> {
    end.unwrap_or_else(|_| {
        let message =
            "the consumer's thread has panicked: see its message above, and please report it"
                .into();
        Err(RunError::new(
            RunErrorKind::Client,
            message,
            Report::default(),
        ))
    })
}

/// Whoever drops the run's future wants it to end now.
struct StopOnDrop(ConsumerHandle);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        // An error means that the pump has ended already, as it has whenever the run went to its end.
        let _ = self.0.stop_now();
    }
}

impl IntoFuture for Run {
    type Output = Result<Report, RunError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.live())
    }
}

impl std::fmt::Debug for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Run")
            .field("group", &self.settings.group)
            .finish_non_exhaustive()
    }
}
