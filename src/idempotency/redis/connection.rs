//! The connection of a store to whatever server its name stands for: made again when it is lost, when the server at its
//! other end takes no writes any more, and when that has stopped answering.

use std::{
    fmt, io, mem,
    pin::Pin,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use redis::{
    Cmd, ErrorKind, Pipeline, RedisError, RedisFuture, RedisResult, ServerErrorKind, Value,
    aio::{ConnectionLike, MultiplexedConnection},
};
use tokio::{
    runtime::Handle,
    sync::watch,
    time::{Instant, sleep, timeout},
};

/// For a connection with its handshake.
const CONNECT: Duration = Duration::from_secs(5);
/// Between two tries to connect: the first follows at once.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// A call that was given up after so long without an answer makes its connection a suspect.
const SILENCE: Duration = Duration::from_millis(500);
/// After the first tries one in so many is logged, if it fails as the others did.
const LOGGED: u32 = 60;

type Connecting = Pin<Box<dyn Future<Output = RedisResult<MultiplexedConnection>> + Send>>;
type Connect = dyn Fn() -> Connecting + Send + Sync;

/// The connection that [`RedisStore::connect`](super::RedisStore::connect) makes, and makes again. Clones share it.
///
/// It is replaced when it is lost; when the server answers that it is a replica, or lacks its replicas, since then another
/// one may have taken its place; and when calls get no answer any more. For each new one the name is resolved again. Tries
/// that fail are repeated, after pauses that grow from 50 ms to a second, and logged.
#[derive(Clone)]
pub struct RedisConnection {
    shared: Arc<Shared>,
}

/// Without the address, which may show a password.
impl fmt::Debug for RedisConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisConnection").finish_non_exhaustive()
    }
}

struct Shared {
    connect: Arc<Connect>,
    runtime: Handle,
    link: watch::Sender<Link>,
    /// Looked at for each answer: set until a connection has proved itself.
    troubled: AtomicBool,
}

#[derive(Default)]
struct Link {
    /// Calls go here, also while it is about to be replaced because it does not answer.
    connection: Option<MultiplexedConnection>,
    /// Counts connections, so that what an earlier one answers is not taken for the fault of its successor.
    generation: u64,
    connecting: bool,
    /// Why there was no connection, the last time that it was tried.
    error: Option<RedisError>,
    /// Tries that failed, and connections that were of no use, since one was.
    failures: u32,
}

/// What is wrong with a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// It is closed, or its server takes no writes: no more calls go there.
    Useless,
    /// Another one is worth a try; until that has succeeded, this one may still do.
    Suspect,
}

impl RedisConnection {
    /// Nothing is connected before the first call.
    pub(super) fn new(connect: Arc<Connect>, runtime: Handle) -> Self {
        Self {
            shared: Arc::new(Shared {
                connect,
                runtime,
                link: watch::Sender::default(),
                troubled: AtomicBool::new(true),
            }),
        }
    }

    /// The connection and its generation. Waits for one try to make it, if there is none.
    async fn link(&self) -> RedisResult<(MultiplexedConnection, u64)> {
        if let Some(connection) = self.shared.link.borrow().usable() {
            return Ok(connection);
        }
        let mut links = self.shared.link.subscribe();
        let mut failures = {
            let link = links.borrow_and_update();
            // What the server itself has said is not said otherwise in a moment.
            if let Some(error) = link.error.as_ref().filter(|it| !it.is_io_error()) {
                return Err(error.clone());
            }
            link.failures
        };
        self.shared.reconnect(None);
        loop {
            {
                let link = links.borrow_and_update();
                if let Some(connection) = link.usable() {
                    return Ok(connection);
                }
                match &link.error {
                    Some(error) if link.failures > failures => return Err(error.clone()),
                    // It was made, and lost again, between two looks.
                    _ => failures = failures.min(link.failures),
                }
            }
            links
                .changed()
                .await
                .expect("the sender lives as long as this");
        }
    }

    /// Makes a call, and once more where it was refused without effect by a server that is not the one any more.
    async fn call<T, F: Future<Output = RedisResult<T>>>(
        &self,
        call: impl Fn(MultiplexedConnection) -> F,
    ) -> RedisResult<T> {
        let mut again = true;
        loop {
            let (connection, generation) = self.link().await?;
            let unanswered = Unanswered {
                connection: self,
                generation,
                since: Instant::now(),
            };
            let answer = call(connection).await;
            mem::forget(unanswered);
            let Err(error) = &answer else {
                self.shared.proved(generation);
                return answer;
            };
            if let Some(fault) = fault(error) {
                self.shared.reconnect(Some((generation, fault, error)));
            }
            if !(takes_no_writes(error) && mem::take(&mut again)) {
                return answer;
            }
        }
    }
}

impl Link {
    fn usable(&self) -> Option<(MultiplexedConnection, u64)> {
        Some((self.connection.clone()?, self.generation))
    }
}

impl Shared {
    /// Starts to make a connection, unless that is going on: the first one, or another in the place of that generation.
    fn reconnect(self: &Arc<Self>, instead: Option<(u64, Fault, &RedisError)>) {
        self.link.send_if_modified(|link| {
            if let Some((generation, fault, error)) = instead {
                if generation != link.generation || link.connection.is_none() {
                    return false;
                }
                if fault == Fault::Useless {
                    link.connection = None;
                    // The next try is made at once, and worth waiting for, unless the last one led here too.
                    link.error = (link.failures > 0).then(|| error.clone());
                }
            } else if link.connection.is_some() {
                return false;
            }
            self.troubled.store(true, Ordering::Release);
            if !mem::replace(&mut link.connecting, true) {
                let pause = pause(link.failures);
                if instead.is_some() {
                    link.failures = link.failures.saturating_add(1);
                }
                let connect = Arc::clone(&self.connect);
                let task = connect_again(Arc::downgrade(self), connect, pause);
                self.runtime.spawn(task);
            }
            true
        });
    }

    /// A call on this connection was answered as it should be.
    fn proved(&self, generation: u64) {
        if !self.troubled.load(Ordering::Acquire) {
            return;
        }
        self.link.send_if_modified(|link| {
            if link.generation == generation && !link.connecting {
                link.failures = 0;
                self.troubled.store(false, Ordering::Release);
            }
            false
        });
    }
}

/// Tries until there is a connection, or nobody is there any more to use it.
async fn connect_again(shared: Weak<Shared>, connect: Arc<Connect>, first: Duration) {
    let mut pause_before = first;
    let mut tries: u32 = 0;
    let mut told = String::new();
    loop {
        sleep(pause_before).await;
        if shared.strong_count() == 0 {
            return;
        }
        let made = timeout(CONNECT, connect()).await.unwrap_or_else(|_| {
            let late = io::Error::from(io::ErrorKind::TimedOut);
            Err(RedisError::from(late))
        });
        let Some(shared) = shared.upgrade() else {
            return;
        };
        let error = match made {
            Ok(connection) => {
                if tries > 0 {
                    tracing::info!(
                        tries,
                        "the idempotency store has a connection to Redis again"
                    );
                }
                shared.link.send_modify(|link| {
                    link.connection = Some(connection);
                    link.generation += 1;
                    link.connecting = false;
                    link.error = None;
                });
                return;
            }
            Err(error) => error,
        };
        tries = tries.saturating_add(1);
        let text = error.to_string();
        shared.link.send_modify(|link| {
            link.failures = link.failures.saturating_add(1);
            link.error = Some(error);
            pause_before = pause(link.failures);
        });
        if tries.is_multiple_of(LOGGED) || text != told {
            let pause_ms = pause_before.as_millis() as u64;
            tracing::warn!(
                error = text,
                tries,
                pause_ms,
                "the idempotency store cannot connect to Redis, it is tried again"
            );
            told = text;
        }
    }
}

fn pause(failures: u32) -> Duration {
    let (shortest, longest) = PAUSES;
    match failures.checked_sub(1) {
        None => Duration::ZERO,
        Some(doublings) => (shortest * 2u32.pow(doublings.min(10))).min(longest),
    }
}

/// Whether the server refused a write that another one would take: it has become a replica, or a master without replicas,
/// as one that was cut off and replaced.
fn takes_no_writes(error: &RedisError) -> bool {
    let demoted = matches!(
        error.kind(),
        ErrorKind::Server(ServerErrorKind::ReadOnly | ServerErrorKind::MasterDown)
    );
    demoted || error.code() == Some("NOREPLICAS")
}

fn fault(error: &RedisError) -> Option<Fault> {
    if takes_no_writes(error) || error.is_unrecoverable_error() {
        Some(Fault::Useless)
    } else if error.is_timeout() {
        Some(Fault::Suspect)
    } else {
        None
    }
}

/// A call without an answer. Those who wait for it may give it up before the client does.
struct Unanswered<'a> {
    connection: &'a RedisConnection,
    generation: u64,
    since: Instant,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if self.since.elapsed() >= SILENCE {
            let late = RedisError::from(io::Error::from(io::ErrorKind::TimedOut));
            let instead = (self.generation, Fault::Suspect, &late);
            self.connection.shared.reconnect(Some(instead));
        }
    }
}

impl ConnectionLike for RedisConnection {
    fn req_packed_command<'a>(&'a mut self, command: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(self.call(move |mut connection| async move {
            let value = connection.send_packed_command(command).await?;
            value.extract_error()
        }))
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        Box::pin(self.call(move |mut connection| async move {
            let values = connection.send_packed_commands(pipeline, offset, count);
            values.await
        }))
    }

    /// Of the connection that is there. The store does not ask for it.
    fn get_db(&self) -> i64 {
        let link = self.shared.link.borrow();
        link.connection.as_ref().map_or(0, ConnectionLike::get_db)
    }
}
