//! A cluster as seen by somebody who speaks for a group without being a member: which topics there are, where they begin
//! and end. All of it blocks its thread.

use std::{
    error::Error,
    fmt,
    ops::Range,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rdkafka::{
    ClientConfig, ClientContext,
    client::OAuthToken,
    config::RDKafkaLogLevel,
    consumer::{BaseConsumer, Consumer as _, ConsumerContext},
    error::{KafkaError, KafkaResult},
    metadata::MetadataTopic,
    types::RDKafkaErrorCode as Code,
};

use super::{
    OAuthTokenProvider,
    client::generate_token,
    errors::is_login_failure,
    ffi::{Consumer, Lifeline},
    log::ClientLog,
    properties::PropertyError,
};
use crate::record::Residency;

/// What a client of this kind reads ahead of each partition, in KiB.
pub(crate) const PREFETCH: u32 = 1_024;

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InspectError {
    /// See there.
    #[error(transparent)]
    Property(#[from] PropertyError),
    /// librdkafka refused.
    #[error("no client could be made: {0}")]
    Client(String),
    /// Nobody answers, or not to us.
    #[error(
        "{what}: no broker answered within {waited:?}{reason}; check the address, the network and the login"
    )]
    Unreachable {
        /// What was asked.
        what: String,
        /// For how long.
        waited: Duration,
        /// What the client met with, if it told.
        reason: String,
    },
    /// There is none.
    #[error("there is no topic `{0}`; check the name, and that this principal may Describe it")]
    UnknownTopic(String),
    /// The answer is an error.
    #[error("{what}: {code}; {}", advice_on(*.code))]
    Refused {
        /// What was asked.
        what: String,
        /// The error.
        code: Code,
    },
    /// Reading stands still.
    #[error(
        "{topic}/{partition}: nothing came for {waited:?} at offset {offset}, and the log goes on there{reason}"
    )]
    Silent {
        /// Where.
        topic: String,
        /// Where.
        partition: i32,
        /// Where.
        offset: i64,
        /// For how long.
        waited: Duration,
        /// What the client met with, if it told.
        reason: String,
    },
    /// Nobody but its members may commit for a group that has some.
    #[error("group `{0}` is at work, so that nothing can be noted for it; stop its members first")]
    GroupAtWork(String),
    /// The note must not be lost.
    #[error(
        "beside the committed offset of {topic}/{partition} stands what was not written there by group `{group}`: {reason}"
    )]
    StrangeNote {
        /// Where.
        topic: String,
        /// Where.
        partition: i32,
        /// Whose.
        group: String,
        /// Why it is not believed.
        reason: String,
    },
    /// The note has no room left.
    #[error(
        "{topic}/{partition}: too many separate letters are finished above offset {committed} to note one more; finish the older ones first"
    )]
    NoRoom {
        /// Where.
        topic: String,
        /// Where.
        partition: i32,
        /// Above which offset.
        committed: i64,
    },
    /// A record did not arrive.
    #[error("{0}")]
    NotSent(String),
}

fn advice_on(code: Code) -> &'static str {
    match code {
        Code::GroupAuthorizationFailed => "grant this principal Describe and Read on the group",
        Code::TopicAuthorizationFailed => "grant this principal Read and Describe on the topic",
        Code::ClusterAuthorizationFailed => "grant this principal what the cluster asks for",
        Code::PolicyViolation | Code::InvalidConfig | Code::InvalidReplicationFactor => {
            "the brokers' own rules forbid it: see their log, and choose other settings"
        }
        _ => "try again, and see the brokers' log if it stays",
    }
}

/// A cluster, as seen by somebody who speaks for a group without being a member.
pub struct Cluster {
    pub(super) client: Consumer<Outside>,
    /// For clients that write.
    pub(super) producer: ClientConfig,
    pub(super) group: String,
    pub(super) patience: Patience,
    pub(super) spare: Arc<Residency>,
    oauth: Option<Arc<dyn OAuthTokenProvider>>,
    stopped: AtomicBool,
}

/// How long brokers may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    /// For an answer.
    pub(crate) answer: Duration,
    /// While a topic is read, without anything coming.
    pub(crate) silence: Duration,
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster")
            .field("group", &self.group)
            .finish_non_exhaustive()
    }
}

impl Cluster {
    /// Makes a client; it connects when it is asked something. `consumer` reads ahead by [`PREFETCH`] at best.
    pub(crate) fn with(
        consumer: &ClientConfig,
        producer: ClientConfig,
        group: &str,
        oauth: Option<Arc<dyn OAuthTokenProvider>>,
        patience: Patience,
    ) -> Result<Self, InspectError> {
        let mut config = consumer.clone();
        // It is never a member. And where a log has been cut off, what is left of it is shown.
        config.remove("group.instance.id");
        config
            .set("group.id", group)
            .set("enable.partition.eof", "true")
            .set("auto.offset.reset", "earliest");
        let context = |_: Lifeline| Outside::new(oauth.clone());
        let client = Consumer::create(&config, Arc::new(|| ()), context);
        let client = client.map_err(|error| InspectError::Client(error.to_string()))?;
        if oauth.is_some() {
            // The first token is fetched inside a poll.
            client.poll(Duration::from_millis(200));
        }
        Ok(Self {
            client,
            producer,
            group: group.to_owned(),
            patience,
            spare: Arc::default(),
            oauth,
            stopped: AtomicBool::new(false),
        })
    }

    /// For another client of the same cluster.
    pub(super) fn context(&self) -> Outside {
        Outside::new(self.oauth.clone())
    }

    /// Nobody waits any more for what is being asked or read.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    pub(super) fn id(&self) -> String {
        let id = self.client.client().fetch_cluster_id(self.patience.answer);
        id.unwrap_or_default()
    }

    /// How many partitions the topic has; `None`, if there is no such topic.
    ///
    /// # Errors
    ///
    /// If the brokers don't answer; so for all that follow.
    pub fn find(&self, topic: &str) -> Result<Option<i32>, InspectError> {
        let what = format!("topic `{topic}`");
        let metadata = self.ask(&what, |client| {
            client.fetch_metadata(Some(topic), self.patience.answer)
        })?;
        let found = metadata.topics().first();
        match found.and_then(MetadataTopic::error).map(Code::from) {
            Some(Code::UnknownTopic | Code::UnknownTopicOrPartition | Code::InvalidTopic) => {
                Ok(None)
            }
            Some(code) => Err(InspectError::Refused { what, code }),
            None => Ok(found
                .map(|topic| topic.partitions().len() as i32)
                .filter(|partitions| *partitions > 0)),
        }
    }

    /// As [`find`](Self::find), for a topic that there has to be.
    pub fn partitions(&self, topic: &str) -> Result<i32, InspectError> {
        self.find(topic)?
            .ok_or_else(|| InspectError::UnknownTopic(topic.to_owned()))
    }

    /// First offset and end of a partition.
    pub fn bounds(&self, topic: &str, partition: i32) -> Result<Range<i64>, InspectError> {
        let what = format!("ends of {topic}/{partition}");
        let (start, end) = self.ask(&what, |client| {
            client.fetch_watermarks(topic, partition, self.patience.answer)
        })?;
        Ok(start..end)
    }

    /// Lets the client call back with what it has met.
    pub(super) fn serve(&self) {
        // An empty queue and a line of the client's log look the same: the log must not hide the errors behind it.
        const EVENTS: usize = 256;
        for _ in 0..EVENTS {
            self.client.poll(Duration::ZERO);
        }
    }

    /// Asks until there is an answer: leaders are elected, coordinators begin, and a topic that has just been made is not
    /// known everywhere at once.
    pub(super) fn ask<T>(
        &self,
        what: &str,
        mut question: impl FnMut(&BaseConsumer<Outside>) -> KafkaResult<T>,
    ) -> Result<T, InspectError> {
        let deadline = Instant::now() + self.patience.answer;
        // Tokens are asked for there.
        self.serve();
        loop {
            let error = match question(&self.client) {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let passes = matches!(
                error.rdkafka_error_code(),
                Some(
                    Code::UnknownPartition
                        | Code::LeaderNotAvailable
                        | Code::NotLeaderForPartition
                        | Code::NotCoordinator
                        | Code::CoordinatorNotAvailable
                        | Code::CoordinatorLoadInProgress
                )
            );
            if !passes || self.is_stopped() || Instant::now() >= deadline {
                return Err(self.explain(what, &error));
            }
            thread::sleep(Duration::from_millis(100));
        }
    }

    pub(super) fn explain(&self, what: &str, error: &KafkaError) -> InspectError {
        self.serve();
        let code = error.rdkafka_error_code().unwrap_or(Code::Fail);
        let no_answer = is_login_failure(code)
            || matches!(
                code,
                Code::AllBrokersDown
                    | Code::BrokerTransportFailure
                    | Code::OperationTimedOut
                    | Code::RequestTimedOut
                    | Code::Resolve
            );
        if !no_answer {
            return InspectError::Refused {
                what: what.to_owned(),
                code,
            };
        }
        InspectError::Unreachable {
            what: what.to_owned(),
            waited: self.patience.answer,
            reason: self.client.context().reason(),
        }
    }
}

/// Keeps what the client met with last, for whoever waits in vain.
pub(super) struct Outside {
    oauth: Option<Arc<dyn OAuthTokenProvider>>,
    log: ClientLog,
    reason: Mutex<Option<String>>,
}

impl Outside {
    fn new(oauth: Option<Arc<dyn OAuthTokenProvider>>) -> Self {
        Self {
            oauth,
            log: ClientLog::default(),
            reason: Mutex::default(),
        }
    }

    /// In brackets, if there is one.
    pub(super) fn reason(&self) -> String {
        let reason = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        reason
            .as_ref()
            .map(|reason| format!(" ({reason})"))
            .unwrap_or_default()
    }
}

impl ClientContext for Outside {
    const ENABLE_REFRESH_OAUTH_TOKEN: bool = true;

    fn generate_oauth_token(&self, _: Option<&str>) -> Result<OAuthToken, Box<dyn Error>> {
        generate_token(self.oauth.as_ref())
    }

    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        self.log.line(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.log.error(&error, reason);
        // "All brokers are down" says less than what came before it.
        if error.rdkafka_error_code() != Some(Code::AllBrokersDown) {
            let mut last = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
            *last = Some(reason.to_owned());
        }
    }
}

impl ConsumerContext for Outside {}
