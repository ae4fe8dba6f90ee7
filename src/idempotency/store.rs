//! What a store is asked, and what it answers.

use std::{
    fmt,
    hash::{BuildHasher, RandomState},
    pin::Pin,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use sha2::{Digest, Sha256};

use super::{Id, id::hexadecimal};
use crate::BoxError;

/// What the methods of a [`Store`] return: a boxed future, so that stores can be used behind `dyn`.
pub type Reply<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// Remembers which messages are being handled, and which have been.
///
/// A message's id is *claimed* before its handler runs, for a lease that is renewed while it runs. Then it is *completed*,
/// and remembered for a while, or *released*, and free again. A claim that is neither lapses with its lease: whoever made
/// it has died, and the message may be handled again.
///
/// # Writing one
///
/// Each method is one atomic step. Whatever runs at the same time, an id has at most one claim whose lease has not lapsed.
/// Time is the store's own, never that of its callers. A token is good until its lease has lapsed, or it was released;
/// from then on it is stale, and nothing that is done with it changes anything. Calls may be dropped half-way, and come
/// concurrently: as many as handlers are in progress, and up to 4,096 more. `contract` (feature `test-kit`) checks all of it.
///
/// ```
/// use std::{collections::HashMap, sync::Mutex, time::{Duration, Instant}};
/// use reliable_consumer::idempotency::{Claim, Fingerprint, Id, Reply, Store, Token, Update};
///
/// #[derive(Default)]
/// struct Toy(Mutex<HashMap<Id, Entry>>);
///
/// struct Entry {
///     token: Token,
///     done: Option<Option<Fingerprint>>,
///     until: Instant,
/// }
///
/// impl Toy {
///     /// What is done may only be completed once more.
///     fn change(&self, id: &Id, token: &Token, done_too: bool, change: impl FnOnce(&mut Entry)) -> Update {
///         let mut entries = self.0.lock().expect("nothing panics while it holds the lock");
///         let entry = entries.get_mut(id).filter(|it| it.token == *token && it.until > Instant::now());
///         match entry.filter(|it| done_too || it.done.is_none()) {
///             Some(entry) => change(entry),
///             None => return Update::Stale,
///         }
///         Update::Applied
///     }
/// }
///
/// impl Store for Toy {
///     fn claim<'a>(&'a self, id: &'a Id, lease: Duration) -> Reply<'a, Claim> {
///         Box::pin(async move {
///             let now = Instant::now();
///             let mut entries = self.0.lock().expect("nothing panics while it holds the lock");
///             if let Some(entry) = entries.get(id).filter(|it| it.until > now) {
///                 return Ok(match entry.done {
///                     Some(fingerprint) => Claim::Done { fingerprint },
///                     None => Claim::InProgress { lapses_in: entry.until - now },
///                 });
///             }
///             let token = Token::unique();
///             entries.insert(id.clone(), Entry { token, done: None, until: now + lease });
///             Ok(Claim::Claimed(token))
///         })
///     }
///
///     fn renew<'a>(&'a self, id: &'a Id, token: &'a Token, lease: Duration) -> Reply<'a, Update> {
///         Box::pin(async move { Ok(self.change(id, token, false, |it| it.until = Instant::now() + lease)) })
///     }
///
///     fn complete<'a>(
///         &'a self,
///         id: &'a Id,
///         token: &'a Token,
///         keep_for: Duration,
///         fingerprint: Option<Fingerprint>,
///     ) -> Reply<'a, Update> {
///         Box::pin(async move {
///             Ok(self.change(id, token, true, |it| {
///                 it.done = Some(fingerprint);
///                 it.until = Instant::now() + keep_for;
///             }))
///         })
///     }
///
///     fn release<'a>(&'a self, id: &'a Id, token: &'a Token) -> Reply<'a, Update> {
///         Box::pin(async move { Ok(self.change(id, token, false, |it| it.until = Instant::now())) })
///     }
/// }
/// # tokio::runtime::Builder::new_multi_thread().enable_time().build()?.block_on(async {
/// # #[cfg(feature = "test-kit")]
/// # reliable_consumer::idempotency::contract::check(std::sync::Arc::new(Toy::default())).await;
/// # });
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Store: Send + Sync + 'static {
    /// Claims `id` for `lease`, unless somebody else holds it or it is done.
    ///
    /// A claim whose answer was lost on the way stands until its lease lapses.
    fn claim<'a>(&'a self, id: &'a Id, lease: Duration) -> Reply<'a, Claim>;

    /// Makes a claim last for `lease` from now. It does not revive one that has lapsed, and what is done is stale.
    fn renew<'a>(&'a self, id: &'a Id, token: &'a Token, lease: Duration) -> Reply<'a, Update>;

    /// Turns a claim into the memory that the message has been handled, for `keep_for` from now; `fingerprint` is kept
    /// with it. With the token that completed it already it is applied again: an answer that was lost can be asked for.
    fn complete<'a>(
        &'a self,
        id: &'a Id,
        token: &'a Token,
        keep_for: Duration,
        fingerprint: Option<Fingerprint>,
    ) -> Reply<'a, Update>;

    /// Gives a claim up: the id is free at once. What is done stays, and is stale.
    fn release<'a>(&'a self, id: &'a Id, token: &'a Token) -> Reply<'a, Update>;

    /// What its server is set to that may have it forget ids early, or lose them; empty if nothing is known. Asked for once,
    /// when a run begins, see [`UnsafeServer`](super::UnsafeServer). The default knows nothing.
    fn check(&self) -> Reply<'_, Vec<String>> {
        Box::pin(async { Ok(Vec::new()) })
    }

    /// Removes at most `at_most` entries whose time is over, and says how many it removed. For stores in which such
    /// entries stay where they are; the default does nothing. See [`keep_clean`](super::keep_clean).
    fn remove_expired(&self, at_most: u32) -> Reply<'_, u64> {
        let _ = at_most;
        Box::pin(async { Ok(0) })
    }
}

macro_rules! forward {
    ($($pointer:ident),*) => { $(
        impl<S: Store + ?Sized> Store for $pointer<S> {
            fn claim<'a>(&'a self, id: &'a Id, lease: Duration) -> Reply<'a, Claim> {
                (**self).claim(id, lease)
            }

            fn renew<'a>(&'a self, id: &'a Id, token: &'a Token, lease: Duration) -> Reply<'a, Update> {
                (**self).renew(id, token, lease)
            }

            fn complete<'a>(
                &'a self,
                id: &'a Id,
                token: &'a Token,
                keep_for: Duration,
                fingerprint: Option<Fingerprint>,
            ) -> Reply<'a, Update> {
                (**self).complete(id, token, keep_for, fingerprint)
            }

            fn release<'a>(&'a self, id: &'a Id, token: &'a Token) -> Reply<'a, Update> {
                (**self).release(id, token)
            }

            fn check(&self) -> Reply<'_, Vec<String>> {
                (**self).check()
            }

            fn remove_expired(&self, at_most: u32) -> Reply<'_, u64> {
                (**self).remove_expired(at_most)
            }
        }
    )* };
}

forward!(Arc, Box);

/// What came of asking for an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// It is the caller's, until the lease lapses.
    Claimed(Token),
    /// Somebody else's claim stands.
    InProgress {
        /// When it lapses unless it is renewed, by the store's clock, counted from its answer.
        lapses_in: Duration,
    },
    /// The message has been handled.
    Done {
        /// As given to [`Store::complete`].
        fingerprint: Option<Fingerprint>,
    },
}

/// What came of changing a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a stale token means that the message may be handled again by somebody else"]
pub enum Update {
    /// It is done as asked.
    Applied,
    /// The claim was not the caller's any more: its lease had lapsed, or it was over. Nothing was changed.
    Stale,
}

/// Tells one claim from every other, in every process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token([u8; 16]);

impl Token {
    /// A new one.
    pub fn unique() -> Self {
        // Keyed by the operating system's randomness: a count becomes 128 bits that no other process has.
        static KEYS: LazyLock<[RandomState; 2]> =
            LazyLock::new(|| [RandomState::new(), RandomState::new()]);
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let [high, low] = [0, 1].map(|half| KEYS[half].hash_one((half, count)));
        Self((u128::from(high) << 64 | u128::from(low)).to_be_bytes())
    }

    /// The bytes to store.
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// One that was stored.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

/// In hexadecimal.
impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hexadecimal(&self.0))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({self})")
    }
}

/// The SHA-256 of a message's content. It is kept with what is done, so that another message under the same id is not
/// taken for a repeat of it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// That of `content`.
    pub fn of(content: &[u8]) -> Self {
        Self(Sha256::digest(content).into())
    }

    /// That of a record's value; a null one differs from an empty one.
    pub(super) fn of_value(value: Option<&[u8]>) -> Self {
        value.map_or_else(|| Self(Sha256::digest(b"\0null").into()), Self::of)
    }

    /// The bytes to store.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// One that was stored.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

/// In hexadecimal.
impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hexadecimal(&self.0))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

/// Why a store has no answer. Whether what was asked for has happened is not known.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// It cannot be reached, is overloaded, or is failing over: worth retrying, after a while.
    #[error("the idempotency store cannot answer at the moment, try again later: {0}")]
    Unavailable(#[source] BoxError),
    /// It will go on refusing until somebody acts: a missing table or permission, a wrong password.
    #[error("the idempotency store refuses, see to its set-up: {0}")]
    Refused(#[source] BoxError),
    /// It does well, but cannot use what it has under this id, or keep this id: something else wrote there, or the table has
    /// a column that is too short. The message fails as one whose handler failed.
    #[error(
        "the idempotency store cannot use the entry of this message, look at what is there: {0}"
    )]
    Entry(#[source] BoxError),
}

impl StoreError {
    /// Worth retrying.
    pub fn unavailable(source: impl Into<BoxError>) -> Self {
        Self::Unavailable(source.into())
    }

    /// Not worth retrying until somebody has acted.
    pub fn refused(source: impl Into<BoxError>) -> Self {
        Self::Refused(source.into())
    }

    /// The fault of one entry, which no other message meets.
    pub fn entry(source: impl Into<BoxError>) -> Self {
        Self::Entry(source.into())
    }

    /// Whether the same call may succeed later without anybody's doing.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable(_))
    }
}

/// Milliseconds as stores count them: at least 1, since 0 is no time to live, and at most a hundred years.
#[cfg(any(
    feature = "redis",
    feature = "postgres",
    feature = "mysql",
    feature = "sqlite"
))]
pub(super) fn millis(duration: Duration) -> i64 {
    const CENTURY: i64 = 100 * 366 * 24 * 3600 * 1000;
    i64::try_from(duration.as_millis())
        .unwrap_or(CENTURY)
        .clamp(1, CENTURY)
}
