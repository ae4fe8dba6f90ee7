//! A store in Redis or Valkey.

mod connection;

use std::{
    collections::HashMap,
    fmt, mem,
    sync::{Arc, LazyLock},
    time::Duration,
};

use redis::{
    AsyncConnectionConfig, Client, ErrorKind, RedisError, RedisResult, Script, ServerErrorKind,
    aio::{ConnectionLike, MultiplexedConnection},
};
use tokio::runtime::Handle;

pub use connection::RedisConnection;

use super::{Claim, Fingerprint, Id, Reply, Store, StoreError, Token, Update, store::millis};

/// Remembers ids in Redis 7 or later, Valkey, or another server that knows `SET` with `NX` and `GET` together.
///
/// One key an id, named as [`Id`] says, which expires by the server's clock: nothing has to be cleaned up. Every call is
/// one command or one script, and one round trip; only the answer "in progress" takes a second. Calls that are made
/// beside each other share one connection and are pipelined.
///
/// # What it survives
///
/// - Crashes of consumers: the claims of a dead one lapse with their leases.
/// - A restart of the server, as far as it saves. With `appendfsync always` nothing is forgotten; with `everysec` the last
///   second may be, and with snapshots only, all since the last one. What was claimed or completed then can be handled
///   again.
/// - Losing the connection, and servers that stop answering, refuse the handshake or become replicas: the name is resolved
///   again, and the connection made again with growing pauses of up to a second. Calls fail meanwhile. So a failover is
///   followed within seconds where a name or an address moves along, also if the old master lives on as a replica. With
///   Sentinel, ask it for the address: [`RedisStore::connect_with`].
///
/// It does not survive a failover to a replica that had not received everything yet: Redis replicates after it has
/// answered. Messages whose keys are missing there are handled again, and one that is in progress can be claimed a second
/// time. Nor does it survive eviction: set `maxmemory-policy noeviction`, or volatile keys of this store are forgotten
/// early. Effects that must not repeat even then belong into one transaction with their marker, in a database.
///
/// ```no_run
/// use reliable_consumer::idempotency::RedisStore;
///
/// # fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let store = RedisStore::connect("redis://localhost:6379/")?;
/// # Ok(())
/// # }
/// ```
///
/// `rediss://` needs a TLS feature of the crate `redis` 1, such as `tokio-native-tls-comp`, in your own `Cargo.toml`.
#[derive(Clone)]
pub struct RedisStore<C = RedisConnection> {
    connection: C,
}

/// Without the connection, which may show a password.
impl<C> fmt::Debug for RedisStore<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").finish_non_exhaustive()
    }
}

/// For a connection, and for a command.
const TIMEOUT: Duration = Duration::from_secs(5);

impl RedisStore {
    /// A store at this URL. The connection is made with the first call, so that a server which is away now is waited for
    /// like one that goes away later. Commands time out after 5 s.
    ///
    /// # Errors
    ///
    /// [`StoreError::Refused`] if the URL is malformed, or this is not called from within the tokio runtime that the
    /// connection is to live on.
    pub fn connect(url: &str) -> Result<Self, StoreError> {
        let client = Client::open(url).map_err(error)?;
        Self::connect_with(move || {
            let client = client.clone();
            async move {
                let config = AsyncConnectionConfig::new()
                    .set_connection_timeout(Some(TIMEOUT))
                    .set_response_timeout(Some(TIMEOUT));
                let connection = client.get_multiplexed_async_connection_with_config(&config);
                connection.await
            }
        })
    }

    /// A store on the connections that this function makes: for the first call, and whenever the last one is of no use any
    /// more. For servers that are not found by a name alone, such as those that Redis Sentinel watches:
    ///
    /// ```no_run
    /// use std::io::{Error, ErrorKind};
    /// use redis::{Client, RedisResult, aio::MultiplexedConnection};
    /// use reliable_consumer::idempotency::RedisStore;
    ///
    /// async fn master() -> RedisResult<MultiplexedConnection> {
    ///     for sentinel in ["redis://sentinel-1:26379/", "redis://sentinel-2:26379/"] {
    ///         let Ok(mut sentinel) = Client::open(sentinel)?.get_multiplexed_async_connection().await else {
    ///             continue;
    ///         };
    ///         let asked = redis::cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg("mymaster").to_owned();
    ///         if let Ok(Some((host, port))) = asked.query_async::<Option<(String, u16)>>(&mut sentinel).await {
    ///             return Client::open((host, port))?.get_multiplexed_async_connection().await;
    ///         }
    ///     }
    ///     Err(Error::from(ErrorKind::NotConnected).into())
    /// }
    ///
    /// # fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// let store = RedisStore::connect_with(master)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`StoreError::Refused`] if this is not called from within the tokio runtime that the connection is to live on.
    pub fn connect_with<F>(
        connect: impl Fn() -> F + Send + Sync + 'static,
    ) -> Result<Self, StoreError>
    where
        F: Future<Output = RedisResult<MultiplexedConnection>> + Send + 'static,
    {
        let Ok(runtime) = Handle::try_current() else {
            let reason = "its connection lives on a tokio runtime: call `RedisStore::connect` from within one";
            return Err(StoreError::refused(reason));
        };
        let connect = Arc::new(move || Box::pin(connect()) as _);
        Ok(Self::new(RedisConnection::new(connect, runtime)))
    }
}

impl<C> RedisStore<C>
where
    C: ConnectionLike + Clone + Send + Sync + 'static,
{
    /// A store on a connection that you have made: one to a cluster, for instance. It has to reconnect by itself, also when a
    /// server has become a replica, and clones have to share it.
    pub fn new(connection: C) -> Self {
        Self { connection }
    }
}

// The value of a key: `c` and the token while it is claimed; `d`, the token and the fingerprint when it is done.

fn claimed(token: &Token) -> Vec<u8> {
    [b"c", token.as_bytes().as_slice()].concat()
}

fn done(token: &Token, fingerprint: Option<&Fingerprint>) -> Vec<u8> {
    let fingerprint = fingerprint.map(|it| it.as_bytes().as_slice());
    [
        b"d",
        token.as_bytes().as_slice(),
        fingerprint.unwrap_or_default(),
    ]
    .concat()
}

/// Swap or delete only what is still the caller's. The server runs a script as one step.
static RENEW: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
         return redis.call('PEXPIRE', KEYS[1], ARGV[2])",
    )
});
static COMPLETE: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local value = redis.call('GET', KEYS[1])
         if value ~= ARGV[1] and value ~= ARGV[2] then return 0 end
         redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
         return 1",
    )
});
const RELEASE_TEXT: &str = "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
         return redis.call('DEL', KEYS[1])";
static RELEASE: LazyLock<Script> = LazyLock::new(|| Script::new(RELEASE_TEXT));

fn update(changed: u8) -> Update {
    if changed == 1 {
        Update::Applied
    } else {
        Update::Stale
    }
}

impl<C> Store for RedisStore<C>
where
    C: ConnectionLike + Clone + Send + Sync + 'static,
{
    fn claim<'a>(&'a self, id: &'a Id, lease: Duration) -> Reply<'a, Claim> {
        let mut connection = self.connection.clone();
        Box::pin(async move {
            let token = Token::unique();
            loop {
                let unanswered = Unanswered {
                    store: self,
                    id,
                    token: &token,
                };
                let answer = redis::cmd("SET")
                    .arg(id.as_bytes())
                    .arg(claimed(&token))
                    .arg("NX")
                    .arg("PX")
                    .arg(millis(lease))
                    .arg("GET")
                    .query_async(&mut connection)
                    .await;
                if !answer.as_ref().is_err_and(RedisError::is_timeout) {
                    mem::forget(unanswered);
                }
                let holder: Option<Vec<u8>> = answer.map_err(error)?;
                match holder.as_deref().map(parse) {
                    None => return Ok(Claim::Claimed(token)),
                    Some(Some(Holder::Done(fingerprint))) => {
                        return Ok(Claim::Done { fingerprint });
                    }
                    Some(Some(Holder::Claim)) => {}
                    Some(None) => return Err(foreign("its value is none that a store writes")),
                }
                let lapses_in: i64 = redis::cmd("PTTL")
                    .arg(id.as_bytes())
                    .query_async(&mut connection)
                    .await
                    .map_err(error)?;
                if lapses_in == NEVER {
                    return Err(foreign("its key does not expire"));
                }
                // Negative when the key has gone meanwhile.
                if let Ok(lapses_in) = u64::try_from(lapses_in) {
                    return Ok(Claim::InProgress {
                        lapses_in: Duration::from_millis(lapses_in),
                    });
                }
            }
        })
    }

    /// By `INFO`, which most users may ask for, and the configuration where that may be seen.
    fn check(&self) -> Reply<'_, Vec<String>> {
        let mut connection = self.connection.clone();
        Box::pin(async move {
            let asked: RedisResult<redis::Value> =
                redis::cmd("INFO").query_async(&mut connection).await;
            let info = match asked {
                Ok(value) => value,
                Err(of) if of.code() == Some("NOPERM") => return Ok(Vec::new()),
                Err(of) => return Err(error(of)),
            };
            // A cluster answers with one for each node.
            let Ok(info) = redis::from_redis_value::<String>(info) else {
                return Ok(Vec::new());
            };
            let mut settings = HashMap::new();
            for name in ["save", "appendfsync", "min-replicas-to-write"] {
                let mut call = redis::cmd("CONFIG");
                call.arg("GET").arg(name);
                let set: RedisResult<HashMap<String, String>> =
                    call.query_async(&mut connection).await;
                settings.extend(set.unwrap_or_default());
            }
            Ok(concerns(&info, &settings))
        })
    }

    fn renew<'a>(&'a self, id: &'a Id, token: &'a Token, lease: Duration) -> Reply<'a, Update> {
        let mut connection = self.connection.clone();
        Box::pin(async move {
            let mut call = RENEW.key(id.as_bytes());
            call.arg(claimed(token)).arg(millis(lease));
            call.invoke_async(&mut connection)
                .await
                .map(update)
                .map_err(error)
        })
    }

    fn complete<'a>(
        &'a self,
        id: &'a Id,
        token: &'a Token,
        keep_for: Duration,
        fingerprint: Option<Fingerprint>,
    ) -> Reply<'a, Update> {
        let mut connection = self.connection.clone();
        Box::pin(async move {
            let done = done(token, fingerprint.as_ref());
            let mut call = COMPLETE.key(id.as_bytes());
            call.arg(claimed(token)).arg(done).arg(millis(keep_for));
            call.invoke_async(&mut connection)
                .await
                .map(update)
                .map_err(error)
        })
    }

    fn release<'a>(&'a self, id: &'a Id, token: &'a Token) -> Reply<'a, Update> {
        let mut connection = self.connection.clone();
        Box::pin(async move {
            let mut call = RELEASE.key(id.as_bytes());
            call.arg(claimed(token));
            call.invoke_async(&mut connection)
                .await
                .map(update)
                .map_err(error)
        })
    }
}

/// A claim that the server may grant although nobody waits for it any more: a server that did not answer goes on with all
/// that it was sent, and its lease would begin then. So its release is sent after it, on the same connection.
struct Unanswered<'a, C>
where
    C: ConnectionLike + Clone + Send + Sync + 'static,
{
    store: &'a RedisStore<C>,
    id: &'a Id,
    token: &'a Token,
}

impl<C> Drop for Unanswered<'_, C>
where
    C: ConnectionLike + Clone + Send + Sync + 'static,
{
    fn drop(&mut self) {
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        let mut connection = self.store.connection.clone();
        // The text itself: by its hash a server that does not know it would be asked twice, and others come in between.
        let mut call = redis::cmd("EVAL");
        call.arg(RELEASE_TEXT).arg(1).arg(self.id.as_bytes());
        call.arg(claimed(self.token));
        runtime.spawn(async move {
            // If that fails it lapses.
            let _ = call.query_async::<u8>(&mut connection).await;
        });
    }
}

/// What is unsafe about a server.
fn concerns(info: &str, settings: &HashMap<String, String>) -> Vec<String> {
    let is = |name: &str| {
        let line = info
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.unwrap_or_default().trim()
    };
    let set = |name: &str| settings.get(name).map(String::as_str);
    let mut concerns = Vec::new();
    let policy = is("maxmemory_policy");
    if is("maxmemory") != "0" && !matches!(policy, "" | "noeviction") {
        concerns.push(format!(
            "Redis evicts ids when its memory is full (maxmemory-policy {policy}): set it to noeviction"
        ));
    }
    if is("aof_enabled") == "0" {
        concerns.push(match set("save") {
            Some("") => "Redis keeps nothing over a restart: set appendonly to yes".to_owned(),
            _ => "a crash of Redis loses all ids since its last snapshot: set appendonly to yes"
                .to_owned(),
        });
    } else if set("appendfsync") == Some("no") {
        concerns
            .push("Redis does not sync its file: set appendfsync to everysec or always".to_owned());
    }
    if is("role") == "slave" {
        concerns.push("Redis is a replica and takes no writes: connect to its master".to_owned());
    }
    if is("role") == "master"
        && !matches!(is("connected_slaves"), "" | "0")
        && set("min-replicas-to-write") == Some("0")
    {
        concerns.push(
            "Redis has replicas and does not need them for a write: what it takes while it is cut off is lost with a \
             failover, set min-replicas-to-write to 1"
                .to_owned(),
        );
    }
    concerns
}

/// What `PTTL` answers about a key without an end.
const NEVER: i64 = -1;

/// What stands under an id.
enum Holder {
    Claim,
    Done(Option<Fingerprint>),
}

fn parse(value: &[u8]) -> Option<Holder> {
    let (kind, rest) = value.split_first()?;
    let (_, fingerprint) = rest.split_at_checked(size_of::<Token>())?;
    match (kind, fingerprint) {
        (b'c', []) => Some(Holder::Claim),
        (b'd', []) => Some(Holder::Done(None)),
        (b'd', bytes) => {
            let bytes = bytes.try_into().ok()?;
            Some(Holder::Done(Some(Fingerprint::from_bytes(bytes))))
        }
        _ => None,
    }
}

fn foreign(what: &str) -> StoreError {
    StoreError::entry(format!("something else wrote there, {what}"))
}

fn error(error: RedisError) -> StoreError {
    let refused = match error.kind() {
        // One of many nodes, which sends us to others for their ids.
        ErrorKind::Server(ServerErrorKind::Moved | ServerErrorKind::Ask) => {
            let advice = format!(
                "the server is a node of a cluster: give `RedisStore::new` a connection to the cluster ({error})"
            );
            return StoreError::refused(advice);
        }
        _ if error.code() == Some("WRONGTYPE") => return StoreError::entry(error),
        ErrorKind::InvalidClientConfig
        | ErrorKind::AuthenticationFailed
        | ErrorKind::UnexpectedReturnType
        | ErrorKind::Server(ServerErrorKind::ResponseError | ServerErrorKind::NoPerm) => true,
        // Those that the client has no name for. `OOM`, `MISCONF`, `NOREPLICAS` and `BUSY` pass.
        _ => matches!(error.code(), Some("NOAUTH" | "WRONGPASS" | "UNKNOWN")),
    };
    if refused {
        StoreError::refused(error)
    } else {
        StoreError::unavailable(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_runtime_or_with_a_malformed_url_there_is_no_store() {
        let refused = |url| RedisStore::connect(url).expect_err("it cannot work");
        assert!(
            refused("redis://localhost/")
                .to_string()
                .contains("runtime")
        );
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime can be made");
        let _entered = runtime.enter();
        assert!(!refused("no url").is_transient());
        RedisStore::connect("redis://localhost/").expect("nothing is asked yet");
    }
}
