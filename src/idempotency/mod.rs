//! Making the effect of a message happen once, although the message comes twice.
//!
//! Delivery is at least once, and producers, redrives and crashes repeat messages whatever a consumer does. This module
//! has two answers: a [`Store`] that remembers which messages are in progress and which are done, and, for effects in an
//! SQL database, an [`inbox`](#the-inbox) that keeps the memory in the same transaction as the effect.
//!
//! # What repeats, and when
//!
//! | what happened | what comes again | told by its [message id] |
//! |---|---|---|
//! | a producer sent twice: a retry of its own without idempotence, a request that was made twice | the message, as another record | if the producer sets the header `messageId`, or by a key or a field that names the thing; not by position |
//! | a consumer process died | what it had finished since the last commit, and what was in progress | yes |
//! | a partition was lost while handlers ran, or a deadline passed | what was in progress: also *at the same time* in two processes | yes |
//! | a dead letter was sent back | the message, as another record | yes: dead letters keep the first position |
//! | somebody set the group's offsets back | everything since | yes, if it is still remembered |
//!
//! # Which one for which effect
//!
//! | the effect | take | it repeats |
//! |---|---|---|
//! | rows in PostgreSQL, MySQL or SQLite | the inbox, in the transaction that writes them | never, while its markers are kept |
//! | an upsert, a state that is set, a delete | neither: it can be repeated anyway | harmlessly |
//! | a call that takes an idempotency key (payments, most cloud APIs) | the message id as the key; a store saves calls | as the other side promises |
//! | anything else: e-mails, calls, files, other databases | a store | if a process dies, or a lease lapses, between the effect and the completion |
//!
//! | store | for | survives |
//! |---|---|---|
//! | [`MemoryStore`] | one process, tests | nothing |
//! | `RedisStore` (feature `redis`) | many processes, the fastest | crashes of consumers; restarts of Redis as far as it saves; no failover that loses writes |
//! | `PostgresStore`, `MySqlStore` (`postgres`, `mysql`) | many processes that have a database anyway | what the database survives |
//! | `SqliteStore` (`sqlite`) | processes of one machine | crashes and restarts of the machine |
//! | your own | | implement [`Store`]; `contract` (feature `test-kit`) tests it |
//!
//! # Where ids are unique
//!
//! An id names one message of its consumer group, **across all topics of the group**: two topics that count their messages
//! from 1 suppress each other's. [`IdScope::Topic`] tells ids apart by topic. Which one is used shows in
//! [`IdempotencyStatus::scope`](crate::IdempotencyStatus::scope).
//!
//! # What the server has to be set to
//!
//! When a run begins the server is looked at: whether Redis evicts keys, keeps nothing on its disk, or has replicas and does
//! not wait for them (`min-replicas-to-write`); whether PostgreSQL or MySQL acknowledges what is not on its disk, is
//! read-only, or keeps the table in memory; the isolation level. [`UnsafeServer`] decides what follows.
//!
//! # A store in the consumer
//!
//! [`Builder::idempotency`](crate::Builder::idempotency) has the consumer use a store for every record:
//!
//! ```
//! use reliable_consumer::{ReliableConsumer, idempotency::{Idempotency, IdSource, MemoryStore}};
//!
//! let builder = ReliableConsumer::builder()
//!     .idempotency(Idempotency::new(MemoryStore::new(100_000)).id(IdSource::header("payment-id")));
//! ```
//!
//! | | what happens |
//! |---|---|
//! | the message is new | it is claimed, the claim is renewed while its handler runs, and the record is finished when the store knows that it is done |
//! | it has been handled | the record is finished without its handler, and counted in [`Report::duplicates`](crate::Report::duplicates) by where its id was found |
//! | it is in progress elsewhere | the record is looked at again, from 10 ms to a second later, and when that lease lapses. Its key or partition waits, if there is an [order](crate::Ordering); it takes no place among the handlers, no attempt is counted, and nobody waits for it when its partition is given away |
//! | the handler fails, panics or is timed out, or is dropped at a deadline | the message is free at once: for a retry, a [retry topic](crate::RetryTopics), and a redrive. An id is the same on all of these ways |
//! | the store cannot be told that it is done | that is tried until the lease lapses, or the partition has to be given away. Then the record is finished and counted in [`Report::possible_repeats`](crate::Report::possible_repeats): its repeat, if one comes, is handled |
//! | the store does not answer, or refuses | [`Unreachable`] decides; it is told by events, in the log and in [`Status::idempotency`](crate::Status::idempotency). A call that takes longer than half of the lease has no answer |
//! | something else wrote under the id in the store | the attempt fails, with an error that names the id, and is counted in [`Report::unusable_entries`](crate::Report::unusable_entries): the record is retried, and given up like any other |
//! | the id is that of a message with other content | with [`Idempotency::fingerprint`], the record is dead-lettered as [`IdConflict`](crate::FailureKind::IdConflict) |
//!
//! Records that a [filter](crate::Builder::filter) passes over, that cannot be decoded, or that follow or wait for a
//! [held key](crate::Builder::hold_key) are not claimed. A duplicate of a dead letter that came back releases its key as
//! the letter itself would. [`Guarantee::AtMostOnce`](crate::Guarantee::AtMostOnce) goes with a store: what waits for it
//! has been committed, and is lost if the process dies. A record that is given up for its
//! [`stuck_limit`](crate::Builder::stuck_limit) leaves its message free; while it waits for a store or for another consumer,
//! no time counts towards that.
//!
//! The calls for many records run beside each other, and take none of the places that
//! [`concurrency`](crate::Builder::concurrency) gives to handlers: as many more records are claimed ahead, or completed, as
//! it takes to keep handlers at work, up to 4,096. So a store that is slow for some ids slows only those and what is behind
//! them in their order; one that takes 100 ms for every call still leaves 20,000 records a second, if there are as many keys
//! or no order. What a crash, or a store that goes away, can repeat is what is with handlers, and what they have done within
//! the last answer of the store.
//!
//! # How a store works
//!
//! The id is *claimed* for a lease before the handler runs, *renewed* while it runs, and *completed* afterwards. A second
//! delivery finds it in progress and waits, or done and is passed over. A handler that failed *releases* it. If the process
//! dies the lease lapses, and the message is handled again: a crash never suppresses a retry. By hand that is:
//!
//! ```
//! use std::time::Duration;
//! use reliable_consumer::idempotency::{Claim, Id, Store, StoreError};
//!
//! async fn once(store: &dyn Store, id: &Id) -> Result<(), StoreError> {
//!     let (lease, keep_for) = (Duration::from_secs(10), Duration::from_secs(7 * 24 * 3600));
//!     match store.claim(id, lease).await? {
//!         Claim::Done { .. } => println!("a repeat"),
//!         Claim::InProgress { lapses_in } => println!("try again in {lapses_in:?} at the latest"),
//!         Claim::Claimed(token) => {
//!             // The effect; for longer than the lease, with `renew` every third of it.
//!             let _ = store.complete(id, &token, keep_for, None).await?;
//!         }
//!     }
//!     Ok(())
//! }
//! # tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
//! # once(&reliable_consumer::idempotency::MemoryStore::new(10), &Id::new("", "", "1")).await
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! **How long a lease.** A message whose consumer died waits for its lease; an effect can overlap with its repeat when a
//! living consumer could not renew in time. 10 s, renewed every third of it, rides out a failed renewal or two, and is about
//! what a group takes to notice a death. Make it longer where the store is often away for longer, or processes are
//! frozen (virtual machines that are moved, long pauses for swapping); the store's clock decides, not the consumer's. A
//! handler that blocks its thread is not renewed meanwhile.
//!
//! **How long to keep ids.** Longer than the longest way on which a repeat can come: the retention of the topic if offsets
//! may be set back or dead letters sent back late, else the longest outage of a producer that sends again. Seven days, the
//! default retention of a topic, is a good start. An id takes some 100 to 400 bytes. SQL stores keep rows whose time is over
//! until they are removed: run [`keep_clean`] in one of the processes, or in all of them.
//!
//! # The inbox
//!
//! An `Inbox` (`inbox::Inbox`, with the feature of a database) writes a marker row in the transaction that the handler has
//! begun. Effect and marker are committed together or vanish together, so there is nothing to lapse, to renew or to
//! complete, and no moment between the effect and its memory. A repeat is told before any work is done; one that comes
//! while the first is in progress waits for its end.
//!
//! # What no store can do
//!
//! - Take back an e-mail that went out just before the crash: its completion was not written, so it goes out again. Whether
//!   it is sent twice or perhaps never is a choice, and the choice here is twice.
//! - Stop a handler that was cancelled or timed out, but whose commit, or request, was on its way to somebody else already.
//!   It may have its effect after the retry had its own: its message is released when it is dropped. The inbox does not
//!   mind: one of the two transactions finds the marker of the other.
//! - Fence off an effect: a process that was frozen for longer than its lease goes on where it was, beside whoever has
//!   claimed the message since. It learns that its token is stale only when it completes.
//! - Know that two messages mean the same, if their ids differ; or different things under the same id, unless a
//!   [`Fingerprint`] of the content is kept.
//!
//! [message id]: crate::Message::message_id

mod claims;
#[cfg(feature = "test-kit")]
pub mod contract;
mod id;
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
pub mod inbox;
mod memory;
mod options;
#[cfg(feature = "redis")]
mod redis;
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
mod sql;
mod store;

use std::{convert::Infallible, time::Duration};

pub(crate) use claims::{Claims, Entry, News};
pub use id::Id;
pub use memory::MemoryStore;
pub use options::{
    Duplicates, IdFunction, IdScope, IdSource, Idempotency, Unreachable, UnsafeServer,
};
#[cfg(feature = "redis")]
pub use redis::{RedisConnection, RedisStore};
#[cfg(feature = "mysql")]
pub use sql::MySqlStore;
#[cfg(feature = "postgres")]
pub use sql::PostgresStore;
#[cfg(feature = "sqlite")]
pub use sql::SqliteStore;
pub use store::{Claim, Fingerprint, Reply, Store, StoreError, Token, Update};

/// Removes what is over from a store, now and then for as long as it is polled: a thousand entries at a time until there
/// are no more, then again after `every`. What fails is logged and tried again.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// use std::{sync::Arc, time::Duration};
/// use reliable_consumer::idempotency::{MemoryStore, keep_clean};
///
/// let store = Arc::new(MemoryStore::new(1_000));
/// let cleaning = tokio::spawn(keep_clean(store.clone(), Duration::from_secs(60)));
/// // … and at the end:
/// cleaning.abort();
/// # }
/// ```
pub async fn keep_clean(store: impl Store, every: Duration) -> Infallible {
    const BATCH: u32 = 1_000;
    loop {
        match store.remove_expired(BATCH).await {
            // The next batch at once, but not before those who claim have had their turn.
            Ok(removed) if removed >= u64::from(BATCH) => tokio::task::yield_now().await,
            Ok(_) => tokio::time::sleep(every).await,
            Err(error) => {
                tracing::warn!(%error, "ids whose time is over could not be removed");
                tokio::time::sleep(every).await;
            }
        }
    }
}
