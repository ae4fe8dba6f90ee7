//! A Kafka consumer that loses nothing.
//!
//! You write an async function for one message. [`ReliableConsumer`] runs it for many messages at a time, keeps the order
//! you ask for, tries again what fails, sets aside what cannot be handled, and commits an offset only when every record
//! up to it is finished. It builds on [rdkafka] and runs handlers on [tokio].
//!
//! ```no_run
//! use reliable_consumer::{DeadLetter, HandlerResult, Json, Message, ReliableConsumer, ResultExt};
//!
//! #[derive(serde::Deserialize)]
//! struct SignUp {
//!     email: String,
//! }
//!
//! async fn register(message: &Message<Json<SignUp>>) -> HandlerResult {
//!     let email = &message.payload().email;
//!     email.split_once('@').ok_or("not an e-mail address").permanent()?; // To the dead letters.
//!     insert(email).await?; // Tried again if it fails.
//!     Ok(())
//! }
//!
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let consumer = ReliableConsumer::builder()
//!         .bootstrap_servers("localhost:9092")
//!         .group_id("sign-ups")
//!         .topic("sign-ups")
//!         .dead_letter(DeadLetter::topic("sign-ups.dlq"))
//!         .build()?;
//!     let stop = async { tokio::signal::ctrl_c().await.expect("signals can be received") };
//!     let report = consumer.run(register).with_graceful_shutdown(stop).await?;
//!     println!("handled {}, dead-lettered {}", report.handled, report.dead_lettered);
//!     Ok(())
//! }
//! # async fn insert(_: &str) -> std::io::Result<()> { Ok(()) }
//! ```
//!
//! Without a broker at hand, `cargo run --example quickstart` shows what the library is for. The README has the table of
//! promises, with what each needs and what it does not cover, and says what to know when an existing group is taken over.
//!
//! # What becomes of a record
//!
//! A record is *finished* when its outcome is final: its handler returned `Ok`, it was skipped on purpose, or its dead
//! letter is safe: acknowledged by the brokers, or in a [spool](Unavailable::Spool). The committed offset of a partition is that of its oldest unfinished
//! record. What has finished above it is noted in the commit's metadata, so that it is not handled again after a restart.
//!
//! Delivery is at least once. A finished record comes again only if the process died, the ownership of its partition was
//! lost, a deadline passed, or the note had to be cut. Effects that must not be repeated even then are the subject of
//! [`idempotency`]; [`Message::message_id`] is the same every time.
//!
//! # Handlers and payloads
//!
//! An `async fn(&Message<P>) -> HandlerResult` is a [`Handler`], and so is an `async move` closure, or a type of your own
//! with state. `P` says how records are decoded: [`Json`], [`Text`], [`Bytes`], [`Record`] for no decoding, an `Option` of
//! any of them where null values (tombstones) have a meaning, or your own [`Payload`]. A codec with state, such as a
//! client of a schema registry, is a [`Decoder`]. [`Routes`] give each topic its own handler and payload.
//!
//! ```no_run
//! # use reliable_consumer::{HandlerResult, Json, Message, ReliableConsumer};
//! # #[derive(serde::Deserialize)] struct Profile { name: String }
//! # async fn example(consumer: ReliableConsumer) -> Result<(), Box<dyn std::error::Error>> {
//! let greeting: std::sync::Arc<str> = "hello".into();
//! let handler = async move |message: &Message<Option<Json<Profile>>>| -> HandlerResult {
//!     match message.payload() {
//!         Some(profile) => println!("{greeting}, {}", profile.name),
//!         None => println!("{:?} is gone", message.key_str()),
//!     }
//!     Ok(())
//! };
//! consumer.run(handler).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Order and concurrency
//!
//! [`Builder::concurrency`] bounds how many handlers are in progress, [`Ordering`] which records may be among them.
//!
//! | | at the same time | a failed record holds back |
//! |---|---|---|
//! | [`Ordering::ByKey`], the default | records of different keys | the later ones of its key |
//! | [`Ordering::ByPartition`] | one record a partition | the later ones of its partition |
//! | [`Ordering::Unordered`] | any records | nobody |
//!
//! # Failures
//!
//! An error from a handler, a panic, and an attempt that ran into [`Builder::handler_timeout`] are failed attempts. The
//! record is tried again by the [`Retry`] policy. The wait is inside the consumer: it takes no place of the concurrency
//! and does not endanger group membership. A handler can say what an error means, by [`permanent`], [`retry_after`],
//! [`outage`] and [`skip`] or the same methods on a `Result` ([`ResultExt`]). A [`Classifier`] decides it in one place by error type.
//! What is said to be an outage of something that handlers depend on counts against no record, and when there is much of it
//! the [`OutageBreaker`] stops the flow until a probe succeeds.
//!
//! A record whose attempts are used up, whose error is permanent, or which cannot be decoded, goes to the dead-letter
//! topic ([`DeadLetter`]), with headers that say where it was and why it failed ([`header_names`]). Without such a topic
//! [`Exhausted`] decides: end the run, or log and pass over. [`Story`] reads dead letters, of this library and of others
//! ([`Dialect`]). A [`Redriver`] sends them back, later each time, and parks those that have been back often enough.
//!
//! # Watching and stopping
//!
//! [`ReliableConsumer::handle`] gives a [`ConsumerHandle`]: it tells the [`Status`] of every partition (lag, what runs,
//! what waits, the oldest running record), pauses and resumes topics, and shuts down. Events go to [tracing].
//!
//! A shutdown starts nothing new, awaits what runs up to [`Builder::shutdown_timeout`], commits what finished, leaves the
//! group, and returns a [`Report`]. [`ConsumerHandle::stop_now`], or dropping the run's future, cancels handlers at once.
//!
//! ```no_run
//! # use reliable_consumer::{Handler, ReliableConsumer, Text};
//! # async fn example(consumer: ReliableConsumer, handler: impl Handler<Text>) -> Result<(), Box<dyn std::error::Error>> {
//! let handle = consumer.handle();
//! tokio::spawn(async move {
//!     tokio::signal::ctrl_c().await?;
//!     let _ = handle.shutdown(); // An error means that the run has ended already.
//!     tokio::signal::ctrl_c().await?;
//!     let _ = handle.stop_now();
//!     Ok::<_, std::io::Error>(())
//! });
//! let report = consumer.run(handler).await?;
//! for partition in &report.partitions {
//!     println!("{}/{}: {:?}", partition.topic, partition.partition, partition.committed);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Testing handlers
//!
//! A handler is an ordinary function: call it with a message from [`Message::builder`].
//!
//! ```
//! # use reliable_consumer::{ResultExt, permanent};
//! use reliable_consumer::{Disposition, Handler, HandlerResult, Message, Text};
//!
//! async fn double(message: &Message<Text>) -> HandlerResult {
//!     let number: u32 = message.payload().parse().permanent()?;
//!     number.checked_mul(2).ok_or_else(|| permanent("too large"))?;
//!     Ok(())
//! }
//!
//! # tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
//! let fine = Message::builder().value("21").decode::<Text>()?;
//! assert!(double(&fine).await.is_ok());
//!
//! let poison = Message::builder().key("a").value("many").attempt(3).decode::<Text>()?;
//! let error = double(&poison).await.expect_err("many is no number");
//! assert_eq!(error.disposition(), Disposition::Permanent);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Cargo features
//!
//! The default build needs a C compiler and make, and reads gzip, snappy, lz4 and zstd.
//!
//! | feature | |
//! |---|---|
//! | `libz`, `zstd` | gzip and zstd; on by default |
//! | `ssl`, `ssl-vendored` | TLS, SASL SCRAM and OAUTHBEARER; the system's OpenSSL, or one built along. SASL PLAIN is always there |
//! | `gssapi`, `gssapi-vendored` | Kerberos; the system's Cyrus SASL, or one built along. `sasl` is the same as `gssapi` |
//! | `curl` | with `ssl`, and libcurl's headers installed: OAUTHBEARER with OIDC |
//! | `cmake-build`, `dynamic-linking` | how librdkafka is built, or found |
//! | `cli` | the program `reliable-consumer`, for operators: `cargo install reliable-consumer --features cli` |
//! | `anyhow` | a classifier sees the concrete error inside an `anyhow::Error` |
//! | `redis`, `postgres`, `mysql`, `sqlite` | stores that remember which messages are done, and the inbox: [`idempotency`] |
//! | `test-kit` | `idempotency::contract`, which tests a store of your own |
//!
//! [rdkafka]: https://docs.rs/rdkafka
//! [tokio]: https://docs.rs/tokio
//! [tracing]: https://docs.rs/tracing

mod backoff;
mod classify;
mod consumer;
mod dead_letter;
mod engine;
mod execute;
mod handler;
pub mod header_names;
mod held_keys;
pub mod idempotency;
#[doc(hidden)]
#[cfg(feature = "internals")]
pub mod internals;
mod kafka;
mod message;
#[doc(hidden)]
#[cfg(feature = "cli")]
pub mod operate;
mod origin;
mod payload;
mod record;
mod redrive;
mod retry_topics;
mod shown;
mod spool;

// The consumer.
pub use consumer::{
    BuildError, Builder, CommittedUnhandled, ConsumerHandle, Event, Events, Exhausted, HandleError,
    OutOfRange, RebalanceListener, RedrivenForOthers, ReliableConsumer, Routes, Run, RunError,
    RunErrorKind, StartPolicy, StuckRecord, TopicPartition,
};
pub use engine::{BreakerState, Guarantee, Ordering, OutageBreaker};
pub use kafka::{OAuthToken, OAuthTokenProvider, PropertyError};

// What handlers get and answer.
pub use handler::{
    Disposition, Handler, HandlerError, HandlerResult, ResultExt, outage, permanent, postpone,
    retry_after, skip,
};
pub use message::{Message, MessageBuilder};
pub use payload::{ByType, Bytes, DecodeError, Decoder, Json, Payload, Text};
pub use record::{Header, Headers, Record, Timestamp, TimestampKind};

// What happens to failures.
pub use backoff::Retry;
pub use classify::{Classification, Classifier, DynError, find_error};
pub use dead_letter::{
    DeadLetter, Dialect, ErrorMessage, FailureKind, LastError, Story, Unavailable,
};
pub use held_keys::HoldKey;
pub use origin::Origin;
pub use redrive::{
    Action, LetterFilter, ParkReason, Placement, RedriveError, RedriveHandle, RedriveReport,
    RedriveRun, RedriveStatus, Redriver, RedriverBuilder,
};
pub use retry_topics::RetryTopics;

// What can be seen.
pub use consumer::{
    BreakerStatus, DeadLetterSpool, FetchError, IdempotencyStatus, Lag, Membership, NotStarted,
    NotStartedReason, OwnershipState, PartitionReport, PartitionStatus, Report, RunningRecord,
    StalledDeadLetters, Status, StopReason, StoppedPartition, WaitingRecord,
};
pub use engine::RecordState;

/// Any error, boxed.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

// Its examples use the inbox.
#[cfg(all(doctest, feature = "postgres"))]
#[doc = include_str!("../README.md")]
struct Readme;
