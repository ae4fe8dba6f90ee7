//! The client's callbacks: rebalances go to the pump, errors and log lines to `tracing`, tokens come from the user.

use std::{
    error::Error,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use rdkafka::{
    ClientContext, TopicPartitionList, client::OAuthToken as ClientToken, config::RDKafkaLogLevel,
    consumer::ConsumerContext, error::KafkaError, types::RDKafkaRespErr,
};

use super::{
    BaseConsumer,
    log::ClientLog,
    pump::{self, Pump},
};
use crate::{
    consumer::Settings,
    shown::{caught, chain, drop_quietly},
};

/// A token for SASL/OAUTHBEARER.
#[derive(Clone)]
pub struct OAuthToken {
    /// The token itself, a JWT in most clusters. It never reaches a log.
    pub token: String,
    /// The principal that it stands for.
    pub principal: String,
    /// When it runs out. A new one is asked for at 80 % of the time until then.
    pub expires: SystemTime,
}

impl std::fmt::Debug for OAuthToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OAuthToken")
            .field("principal", &self.principal)
            .field("expires", &self.expires)
            .finish_non_exhaustive()
    }
}

/// Gives tokens to a client with `sasl.mechanisms=OAUTHBEARER`.
///
/// Called on the consumer's own thread, which handles no rebalance meanwhile: answer from a cache, or within a second.
/// On an error the client asks again after ten seconds.
pub trait OAuthTokenProvider: Send + Sync + 'static {
    /// A token that is good now.
    fn token(&self) -> Result<OAuthToken, Box<dyn Error + Send + Sync>>;
}

impl<F> OAuthTokenProvider for F
where
    F: Fn() -> Result<OAuthToken, Box<dyn Error + Send + Sync>> + Send + Sync + 'static,
{
    fn token(&self) -> Result<OAuthToken, Box<dyn Error + Send + Sync>> {
        self()
    }
}

pub(crate) fn generate_token(
    provider: Option<&Arc<dyn OAuthTokenProvider>>,
) -> Result<ClientToken, Box<dyn Error>> {
    let provider = provider
        .ok_or("sasl.mechanisms=OAUTHBEARER needs a token provider: set `oauth_token_provider`")?;
    let OAuthToken {
        token,
        principal,
        expires,
    } = token(&**provider)?;
    let lifetime_ms = expires
        .duration_since(UNIX_EPOCH)
        .unwrap_or(Duration::ZERO)
        .as_millis();
    Ok(ClientToken {
        token,
        principal_name: principal,
        lifetime_ms: i64::try_from(lifetime_ms)?,
    })
}

/// A provider that panics has failed: librdkafka, which asks for the token, cannot be unwound through.
fn token(provider: &dyn OAuthTokenProvider) -> Result<OAuthToken, Box<dyn Error>> {
    let answer = caught(|| {
        provider.token().map_err(|error| {
            let message = chain(&*error);
            drop_quietly(error);
            message
        })
    });
    Ok(answer.map_err(|_| "the token provider panicked: see its message in the log")??)
}

/// What an error code that comes out of a poll does not tell.
#[derive(Default)]
struct Trouble {
    reason: String,
    token_missing: bool,
}

/// The consumer's context, which keeps the pump.
pub(crate) struct Shell {
    /// Outlives the client: another one may take over from it.
    pump: Arc<Mutex<Pump>>,
    settings: Arc<Settings>,
    log: ClientLog,
    trouble: Mutex<Trouble>,
    called_back: AtomicBool,
    lost_heartbeat: Mutex<Option<LostHeartbeat>>,
}

impl Shell {
    pub(super) fn new(pump: Arc<Mutex<Pump>>, settings: Arc<Settings>) -> Self {
        Self {
            pump,
            settings,
            log: ClientLog::default(),
            trouble: Mutex::default(),
            called_back: AtomicBool::new(false),
            lost_heartbeat: Mutex::default(),
        }
    }

    /// Whether a callback has run since this was last asked, on the thread that asks.
    pub(super) fn take_called_back(&self) -> bool {
        self.called_back.swap(false, Ordering::Relaxed)
    }

    /// A heartbeat that was not answered in time since this was last asked, and that time, as far as it is known.
    pub(super) fn take_lost_heartbeat(&self) -> Option<Option<Duration>> {
        let mut lost = self.lost_heartbeat.lock();
        let lost = lost.as_mut().map_or_else(|_| None, |lost| lost.take());
        lost.map(|lost| lost.after)
    }

    /// The reason for the error that the poll has just returned, in librdkafka's words.
    pub(super) fn take_reason(&self) -> String {
        std::mem::take(&mut self.trouble().reason)
    }

    /// Whether the user's own provider gave no token when it was last asked: nothing was refused then.
    pub(super) fn is_token_missing(&self) -> bool {
        self.trouble().token_missing
    }

    fn trouble(&self) -> MutexGuard<'_, Trouble> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Pump> {
        pump::lock(&self.pump)
    }
}

/// A heartbeat of KIP-848 that was not answered in time.
#[derive(Debug, PartialEq, Eq)]
struct LostHeartbeat {
    /// In what time.
    after: Option<Duration>,
}

impl LostHeartbeat {
    /// Whether this line of librdkafka's log is about one: nothing else tells. Heartbeats and commits have a connection to the
    /// group's coordinator of their own, and a line that counts what timed out on it may be about either.
    fn in_line(facility: &str, line: &str) -> Option<Self> {
        let heartbeat = line.contains("ConsumerGroupHeartbeat");
        if facility != "REQTMOUT" || !(heartbeat || line.contains("GroupCoordinator")) {
            return None;
        }
        let millis = line.split_once("(after ").filter(|_| heartbeat);
        let millis = millis.and_then(|(_, rest)| rest.split_once("ms")?.0.parse().ok());
        Some(Self {
            after: millis.map(Duration::from_millis),
        })
    }
}

impl ClientContext for Shell {
    const ENABLE_REFRESH_OAUTH_TOKEN: bool = true;

    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        self.called_back.store(true, Ordering::Relaxed);
        if let Some(lost) = LostHeartbeat::in_line(facility, message) {
            let mut before = self
                .lost_heartbeat
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let after = lost
                .after
                .or_else(|| before.as_ref().and_then(|lost| lost.after));
            *before = Some(LostHeartbeat { after });
        }
        self.log.line(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        // Those that matter come out of `poll` as well, and are judged there.
        self.log.error(&error, reason);
        self.trouble().reason = reason.to_owned();
    }

    fn generate_oauth_token(&self, _: Option<&str>) -> Result<ClientToken, Box<dyn Error>> {
        self.called_back.store(true, Ordering::Relaxed);
        let token = generate_token(self.settings.oauth.as_ref());
        self.trouble().token_missing = token.is_err() && self.settings.oauth.is_some();
        token
    }
}

impl ConsumerContext for Shell {
    fn rebalance(
        &self,
        consumer: &BaseConsumer,
        kind: RDKafkaRespErr,
        list: &mut TopicPartitionList,
    ) {
        self.called_back.store(true, Ordering::Relaxed);
        let mut pump = self.lock();
        if kind == RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS {
            pump.agreement.give(list);
            pump.assigned(consumer, list);
        } else {
            pump.agreement.take_away(list);
            pump.revoked(consumer, list);
        }
        pump.agreement.note_change(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_tells_of_heartbeats_that_were_not_answered_in_time() {
        let lost = |line| LostHeartbeat::in_line("REQTMOUT", line);
        let named = "[thrd:GroupCoordinator]: GroupCoordinator/1: Timed out ConsumerGroupHeartbeatRequest in flight \
                     (after 5003ms, timeout #0)";
        let after = Some(Duration::from_millis(5003));
        assert_eq!(lost(named), Some(LostHeartbeat { after }));
        let counted = "[thrd:GroupCoordinator]: GroupCoordinator/1: Timed out 1 in-flight, 0 retry-queued, 0 out-queue, \
                       0 partially-sent requests";
        assert_eq!(lost(counted), Some(LostHeartbeat { after: None }));
        let other = "[thrd:b:9092/1]: b:9092/1: Timed out FetchRequest in flight (after 60000ms, timeout #0)";
        assert_eq!(lost(other), None);
        assert_eq!(LostHeartbeat::in_line("FAIL", counted), None);
    }

    #[test]
    fn a_token_provider_that_panics_has_failed_and_unwinds_no_further() {
        let provider =
            || -> Result<OAuthToken, Box<dyn Error + Send + Sync>> { panic!("no token today") };
        let provider: Arc<dyn OAuthTokenProvider> = Arc::new(provider);
        let error = generate_token(Some(&provider)).err().unwrap();
        assert!(error.to_string().contains("panicked"), "{error}");
    }
}
