//! How a consumer uses a store.

use std::{fmt, sync::Arc, time::Duration};

use super::{Fingerprint, Store};
use crate::{message::message_id_header, origin::Origin, record::Record};

/// Leases shorter than this cannot be renewed in time on a busy machine.
const SHORTEST_LEASE: Duration = Duration::from_millis(100);
/// Whoever dies keeps its messages for so long.
const LONGEST_LEASE: Duration = Duration::from_secs(24 * 3600);

/// A store, and how the consumer uses it. See [`Builder::idempotency`](crate::Builder::idempotency).
///
/// A store alone becomes one with every default:
///
/// ```
/// use std::time::Duration;
/// use reliable_consumer::{ReliableConsumer, idempotency::{Idempotency, IdSource, MemoryStore}};
///
/// let simple = ReliableConsumer::builder().idempotency(MemoryStore::new(100_000));
///
/// let idempotency = Idempotency::new(MemoryStore::new(100_000))
///     .id(IdSource::header("payment-id"))
///     .keep_for(Duration::from_secs(30 * 24 * 3600))
///     .fingerprint();
/// let chosen = ReliableConsumer::builder().idempotency(idempotency);
/// ```
#[derive(Clone)]
#[must_use]
pub struct Idempotency {
    pub(super) store: Arc<dyn Store>,
    pub(super) namespace: String,
    pub(super) id: IdSource,
    pub(super) scope: IdScope,
    pub(super) lease: Duration,
    pub(super) keep_for: Duration,
    pub(super) unreachable: Unreachable,
    pub(super) unsafe_server: UnsafeServer,
    pub(super) fingerprint: Option<FingerprintOf>,
}

pub(super) type FingerprintOf = Arc<dyn Fn(&Record) -> Fingerprint + Send + Sync>;

impl Idempotency {
    /// With this store, and the defaults that are named below.
    pub fn new(store: impl Store) -> Self {
        Self {
            store: Arc::new(store),
            namespace: "reliable-consumer".into(),
            id: IdSource::default(),
            scope: IdScope::default(),
            lease: Duration::from_secs(10),
            keep_for: Duration::from_secs(7 * 24 * 3600),
            unreachable: Unreachable::default(),
            unsafe_server: UnsafeServer::default(),
            fingerprint: None,
        }
    }

    /// What a message is known by. [`IdSource::MessageId`] by default.
    pub fn id(mut self, source: IdSource) -> Self {
        self.id = source;
        self
    }

    /// Within what an id names one message. [`IdScope::Group`] by default.
    pub fn scope(mut self, scope: IdScope) -> Self {
        self.scope = scope;
        self
    }

    /// Sets this use of the store apart from others, which may have the same groups and ids. `reliable-consumer` by
    /// default. The key in the store is made of it, the group, and the id: see [`Id`](super::Id).
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// For how long a claim stands without being renewed; it is renewed every third of it while the handler runs. 10 s by
    /// default, 100 ms to a day. What speaks for another time: see [the module](super#how-a-store-works).
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// For how long what is done is remembered. Seven days by default, the default retention of a topic: see
    /// [the module](super#how-a-store-works). Not less than the lease.
    pub fn keep_for(mut self, time: Duration) -> Self {
        self.keep_for = time;
        self
    }

    /// What becomes of records while the store cannot be reached. [`Unreachable::Wait`] by default.
    pub fn on_unreachable(mut self, policy: Unreachable) -> Self {
        self.unreachable = policy;
        self
    }

    /// What follows when the store's server is set in a way that may have it forget ids early, or lose them: it is looked at
    /// once, when a run begins. [`UnsafeServer::Warn`] by default.
    pub fn on_unsafe_server(mut self, policy: UnsafeServer) -> Self {
        self.unsafe_server = policy;
        self
    }

    /// Remembers the SHA-256 of a message's value with its id. A message with the id of another one and a different value
    /// is then dead-lettered as [`IdConflict`](crate::FailureKind::IdConflict), not taken for a repeat. Off by default:
    /// it costs the hash, and 32 bytes an id in the store; and a producer may write the same thing in two ways (the time of
    /// sending in it, fields in another order): see [`fingerprint_of`](Self::fingerprint_of) for that.
    ///
    /// What was done while this was off has no fingerprint, and whatever has its id counts as a repeat.
    pub fn fingerprint(self) -> Self {
        self.fingerprint_of(|record| Fingerprint::of_value(record.value()))
    }

    /// As [`fingerprint`](Self::fingerprint), of what the function takes for the content.
    ///
    /// ```
    /// use reliable_consumer::{Record, idempotency::{Fingerprint, Idempotency, MemoryStore}};
    ///
    /// let idempotency = Idempotency::new(MemoryStore::new(1_000))
    ///     .fingerprint_of(|record: &Record| Fingerprint::of(record.headers().get("digest").unwrap_or_default()));
    /// ```
    pub fn fingerprint_of(
        mut self,
        fingerprint: impl Fn(&Record) -> Fingerprint + Send + Sync + 'static,
    ) -> Self {
        self.fingerprint = Some(Arc::new(fingerprint));
        self
    }

    /// The setting that cannot work, its value, and what can.
    pub(crate) fn flaw(&self) -> Option<(&'static str, String, &'static str)> {
        let empty_name = matches!(&self.id, IdSource::Header(name) if name.is_empty());
        if !(SHORTEST_LEASE..=LONGEST_LEASE).contains(&self.lease) {
            let value = format!("{:?}", self.lease);
            return Some((
                "the lease of an idempotency store",
                value,
                "choose 100 ms to a day",
            ));
        }
        if self.keep_for < self.lease {
            let value = format!("{:?}", self.keep_for);
            let reason = "what is done is to be remembered for at least a lease";
            return Some(("keep_for of an idempotency store", value, reason));
        }
        let reason = "name the header";
        empty_name.then(|| ("IdSource::Header", "without a name".into(), reason))
    }
}

impl<S: Store> From<S> for Idempotency {
    fn from(store: S) -> Self {
        Self::new(store)
    }
}

impl fmt::Debug for Idempotency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotency")
            .field("namespace", &self.namespace)
            .field("id", &self.id)
            .field("scope", &self.scope)
            .field("lease", &self.lease)
            .field("keep_for", &self.keep_for)
            .field("unreachable", &self.unreachable)
            .field("unsafe_server", &self.unsafe_server)
            .field("fingerprint", &self.fingerprint.is_some())
            .finish_non_exhaustive()
    }
}

/// What a message is known by in the store: two messages with the same id are the same message.
///
/// A record that does not have what is named here, or has it empty, is known by the place where it was first, as
/// `topic/partition/offset/timestamp`: what comes again after a crash or from the dead letters is recognised, what a producer
/// sent twice is not.
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum IdSource {
    /// The header [`messageId`](crate::header_names::MESSAGE_ID), which producers may set and dead letters keep. The
    /// default. See [`Message::message_id`](crate::Message::message_id).
    #[default]
    MessageId,
    /// Another header, whatever bytes are in it. The last one that has this name and a value.
    Header(String),
    /// The record's key. Only where a key comes once: it suppresses every later record of the key for as long as ids are
    /// kept.
    Key,
    /// What the function makes of the record, see [`IdSource::function`].
    Function(IdFunction),
}

/// Within what an id names one message, and a second one with the same id is a repeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum IdScope {
    /// A consumer group, across all of its topics: the same id in two topics is one message, and takes effect once. Right
    /// for ids that are unique everywhere, such as UUIDs, also where a message moves from one topic to another. The
    /// default.
    #[default]
    Group,
    /// A topic of a consumer group: the same id in two topics is two messages. Right for ids that are unique in their topic
    /// only, such as a number of an order or of a row. What comes back from a retry or dead-letter topic belongs to the
    /// topic where it was first.
    ///
    /// A group that changes its scope knows none of its messages any more.
    Topic,
}

impl IdSource {
    /// [`IdSource::Header`].
    pub fn header(name: impl Into<String>) -> Self {
        Self::Header(name.into())
    }

    /// What this function makes of a record. It has to be the same on every way on which the message can come: sent again,
    /// from a retry topic, and back from the dead letters, where topic, partition and offset differ. It runs on the
    /// runtime's threads, for each record, and must be quick. A panic of it is one of the handler.
    ///
    /// ```
    /// use reliable_consumer::{Record, idempotency::IdSource};
    ///
    /// let by_order_and_event = IdSource::function(|record: &Record| {
    ///     let event = record.headers().get("event-type")?;
    ///     Some([record.key()?, b"/", event].concat())
    /// });
    /// ```
    pub fn function<I: Into<Vec<u8>>>(
        id: impl Fn(&Record) -> Option<I> + Send + Sync + 'static,
    ) -> Self {
        Self::Function(IdFunction(Arc::new(move |record| {
            id(record).map(Into::into)
        })))
    }

    /// Hands the record's id to `with`, and where it was found.
    pub(super) fn of<T>(&self, record: &Record, with: impl FnOnce(&[u8], IdFrom) -> T) -> T {
        let made;
        let found = match self {
            Self::MessageId => {
                let id = message_id_header(record.headers());
                id.map(|id| (id.as_bytes(), IdFrom::MessageId))
            }
            Self::Header(name) => {
                let id = record.headers().get(name);
                id.map(|id| (id, IdFrom::Header))
            }
            Self::Key => record.key().map(|id| (id, IdFrom::Key)),
            Self::Function(function) => {
                made = function.0(record);
                made.as_deref().map(|id| (id, IdFrom::Function))
            }
        };
        match found.filter(|(id, _)| !id.is_empty()) {
            Some((id, from)) => with(id, from),
            None => with(Origin::of(record).to_string().as_bytes(), IdFrom::Position),
        }
    }
}

impl fmt::Debug for IdSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MessageId => f.write_str("MessageId"),
            Self::Header(name) => f.debug_tuple("Header").field(name).finish(),
            Self::Key => f.write_str("Key"),
            Self::Function(_) => f.write_str("Function(..)"),
        }
    }
}

/// The function of [`IdSource::function`].
#[derive(Clone)]
pub struct IdFunction(Arc<IdOf>);

type IdOf = dyn Fn(&Record) -> Option<Vec<u8>> + Send + Sync;

/// Where a record's id was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IdFrom {
    MessageId,
    Header,
    Key,
    Function,
    /// The record had none of these.
    Position,
}

/// What becomes of records while the store does not answer, or refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Unreachable {
    /// They wait, as in any [`outage`](crate::outage): nothing counts against them, they are not dead-lettered, and the
    /// [`OutageBreaker`](crate::OutageBreaker) stops the flow until a record gets through to the store. The default.
    #[default]
    Wait,
    /// They are handled without having been claimed: what is a repeat takes effect again, and a repeat of them will.
    /// Counted in [`Report::possible_repeats`](crate::Report::possible_repeats). While the store is known to be down, one
    /// record in a second asks for it, and those beside it do without.
    Process,
    /// They wait; but when the store could not be reached for this long, or refuses and somebody has to see to it, the run
    /// ends with an error of the kind
    /// [`IdempotencyStoreUnavailable`](crate::RunErrorKind::IdempotencyStoreUnavailable). Looked at once a second.
    Stop {
        /// How long, from the first failure.
        after: Duration,
    },
}

/// What follows when the store's server is found to be set in a way that may have it forget ids early, or lose them:
/// evicting keys, keeping nothing on its disk, acknowledging what is not written, being a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum UnsafeServer {
    /// It is logged, and shown in [`IdempotencyStatus::concerns`](crate::IdempotencyStatus::concerns). The default.
    #[default]
    Warn,
    /// No record is handled before the server has been looked at, and the run ends with an error of the kind
    /// [`IdempotencyStoreUnsafe`](crate::RunErrorKind::IdempotencyStoreUnsafe) that says what to change.
    Refuse,
}

/// Records that were finished without calling the handler, since their messages had been handled; by where their ids
/// were found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Duplicates {
    /// In the header [`messageId`](crate::header_names::MESSAGE_ID).
    pub message_id: u64,
    /// In the header that [`IdSource::Header`] names.
    pub header: u64,
    /// In the key.
    pub key: u64,
    /// By [`IdSource::function`].
    pub function: u64,
    /// Nowhere: they were known by where they had been first.
    pub position: u64,
}

impl Duplicates {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.message_id + self.header + self.key + self.function + self.position
    }

    pub(super) fn note(&mut self, from: IdFrom) {
        *match from {
            IdFrom::MessageId => &mut self.message_id,
            IdFrom::Header => &mut self.header,
            IdFrom::Key => &mut self.key,
            IdFrom::Function => &mut self.function,
            IdFrom::Position => &mut self.position,
        } += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Message, idempotency::MemoryStore};

    fn id(source: &IdSource, builder: crate::MessageBuilder) -> (String, IdFrom) {
        source.of(&builder.record(), |id, from| {
            (String::from_utf8_lossy(id).into_owned(), from)
        })
    }

    #[test]
    fn a_lease_is_neither_too_short_to_be_renewed_nor_endless_and_ids_may_be_kept_for_ever() {
        let of = |lease| {
            Idempotency::new(MemoryStore::new(1))
                .lease(lease)
                .keep_for(Duration::MAX)
        };
        for lease in [SHORTEST_LEASE, LONGEST_LEASE] {
            assert!(of(lease).flaw().is_none(), "{lease:?}");
        }
        for lease in [Duration::ZERO, Duration::from_millis(99), Duration::MAX] {
            assert!(of(lease).flaw().is_some(), "{lease:?}");
        }
        let short = of(LONGEST_LEASE).keep_for(SHORTEST_LEASE);
        assert!(
            short.flaw().is_some(),
            "forgotten before its lease has lapsed"
        );
    }

    #[test]
    fn an_id_is_found_where_it_was_said_to_be() {
        let record = Message::builder()
            .key("k")
            .header("messageId", "m")
            .header("payment", "p");
        let function =
            IdSource::function(|record: &Record| record.key().map(|key| [key, b"!"].concat()));
        for (source, expected) in [
            (IdSource::MessageId, ("m", IdFrom::MessageId)),
            (IdSource::header("payment"), ("p", IdFrom::Header)),
            (IdSource::Key, ("k", IdFrom::Key)),
            (function, ("k!", IdFrom::Function)),
        ] {
            let (text, from) = id(&source, record.clone());
            assert_eq!((text.as_str(), from), expected);
        }
    }

    #[test]
    fn a_record_without_an_id_is_known_by_where_it_was_first() {
        let bare = Message::builder()
            .topic("t")
            .partition(1)
            .offset(7)
            .timestamp_millis(5);
        let function = IdSource::function(|_: &Record| None::<Vec<u8>>);
        let empty = bare
            .clone()
            .key("")
            .header("payment", "")
            .header("messageId", "");
        for source in [
            IdSource::MessageId,
            IdSource::header("payment"),
            IdSource::Key,
            function,
        ] {
            for record in [bare.clone(), empty.clone()] {
                let (text, from) = id(&source, record);
                assert_eq!(
                    (text.as_str(), from),
                    ("t/1/7/5", IdFrom::Position),
                    "{source:?}"
                );
            }
        }
        // The same when it comes back from the dead letters to another place.
        let back = Message::builder()
            .topic("t")
            .partition(3)
            .offset(99)
            .header("originalTopic", "t")
            .header("originalPartition", "1")
            .header("originalOffset", "7")
            .header("originalTimestamp", "5");
        assert_eq!(id(&IdSource::Key, back).0, "t/1/7/5");
    }
}
