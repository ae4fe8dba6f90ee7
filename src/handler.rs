//! What a handler is, and what it may answer.

use std::{error::Error, fmt, time::Duration};

use crate::{BoxError, Message};

/// Handles one message at a time; many calls run at once, as ordering and concurrency allow.
///
/// An `async fn(&Message<P>) -> HandlerResult` is a handler, and so is an `async move` closure. A closure is cloned for
/// each call: what it captures must be `Clone + Send + Sync`, and cheap to clone, as an `Arc` or a connection pool is.
/// A type with state of its own implements the trait, and nothing is cloned:
///
/// ```
/// use reliable_consumer::{Handler, HandlerResult, Message, Text};
///
/// struct Register { greeting: String }
///
/// impl Handler<Text> for Register {
///     async fn handle(&self, message: &Message<Text>) -> HandlerResult {
///         println!("{} {}", self.greeting, message.payload());
///         Ok(())
///     }
/// }
/// ```
///
/// `Ok(())` finishes the record. An error is retried, unless it says otherwise, see [`HandlerError`]. A panic counts as
/// a failed attempt. The future may be dropped before it ends, at a timeout or when the partition is lost, and the
/// record be handled again after that, here or elsewhere.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not handle `Message<{P}>`",
    label = "not a handler of `Message<{P}>`",
    note = "a handler is an `async fn(&Message<{P}>) -> HandlerResult`, such an `async move` closure, or a type that implements `Handler<{P}>`",
    note = "what a closure captures must be `Clone + Send + Sync + 'static`, and what is held over an `.await` must be `Send`"
)]
pub trait Handler<P>: Send + Sync + 'static {
    /// Handles a message.
    ///
    /// # Errors
    ///
    /// Whatever kept the message from being handled: see [`HandlerError`] for what happens then.
    fn handle(&self, message: &Message<P>) -> impl Future<Output = HandlerResult> + Send;
}

/// What a handler answers.
pub type HandlerResult = Result<(), HandlerError>;

/// Names the future of one call, which `AsyncFn` alone cannot, so that it can be required to be `Send`. The call
/// consumes a clone because the future of a closure may borrow from the closure.
#[doc(hidden)]
pub trait CallOnce<'m, P: 'm>: Clone + Send + Sync + 'static {
    type Future: Future<Output = HandlerResult> + Send + 'm;

    fn call_once(self, message: &'m Message<P>) -> Self::Future;
}

impl<'m, P, F, Fut> CallOnce<'m, P> for F
where
    P: 'm,
    F: FnOnce(&'m Message<P>) -> Fut + Clone + Send + Sync + 'static,
    Fut: Future<Output = HandlerResult> + Send + 'm,
{
    type Future = Fut;

    fn call_once(self, message: &'m Message<P>) -> Fut {
        self(message)
    }
}

// `AsyncFn` is what lets the compiler infer a closure's argument and the type that its `?` converts to.
impl<P, F> Handler<P> for F
where
    P: Send + Sync + 'static,
    F: AsyncFn(&Message<P>) -> HandlerResult + for<'m> CallOnce<'m, P>,
{
    fn handle(&self, message: &Message<P>) -> impl Future<Output = HandlerResult> + Send {
        self.clone().call_once(message)
    }
}

/// Why a handler did not handle a message, and what is to become of the record.
///
/// `?` makes one of every error, of `anyhow::Error`, `String` and `&'static str`. Such an error says nothing about what
/// comes next: a [`Classifier`](crate::Classifier) is asked, and without one the record is retried. What the handler
/// says itself, by the constructors here, the functions [`permanent`], [`retry_after`], [`outage`], [`skip`] or
/// [`ResultExt`], is final, and no classifier is asked.
///
/// It is no [`std::error::Error`] itself, since then `?` could not convert every other error to it; the error inside
/// is at [`source`](Self::source). With the feature `anyhow`, a classifier sees the error inside an `anyhow::Error`
/// rather than the wrapping.
///
/// ```
/// use std::time::Duration;
/// use reliable_consumer::{HandlerResult, Message, ResultExt, Text, skip};
///
/// async fn handle(message: &Message<Text>) -> HandlerResult {
///     if message.payload().starts_with('#') {
///         return Err(skip("a comment"));
///     }
///     let amount: u64 = message.payload().parse().permanent()?;
///     book(amount).await.retry_after(Duration::from_secs(10))?;
///     std::fs::write("last", message.message_id())?;
///     Ok(())
/// }
/// # async fn book(_: u64) -> std::io::Result<()> { Ok(()) }
/// ```
pub struct HandlerError {
    disposition: Disposition,
    source: BoxError,
}

/// What a [`HandlerError`] says about the record's future.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Disposition {
    /// Nothing: the classifier decides, and without one the record is retried.
    #[default]
    Unclassified,
    /// Retried by the retry policy; dead-lettered when that is exhausted.
    Retry,
    /// Retried after this time rather than the policy's delay. It counts as an attempt like any other.
    RetryAfter(Duration),
    /// Handled again after this time, as if there had been no attempt: neither the attempt nor the time counts towards
    /// the limits of the retry policy. It waits without a place among the handlers at work; under an order, what is
    /// behind it waits too.
    Postpone(Duration),
    /// What the handler depends on is down. Handled again when that is worth trying, see
    /// [`OutageBreaker`](crate::OutageBreaker); nothing counts against the record, however long it takes.
    Outage,
    /// Dead-lettered at once.
    Permanent,
    /// Finished without being handled, and counted as skipped.
    Skip,
}

impl HandlerError {
    /// An error that leaves to the classifier what happens; what `?` makes.
    pub fn new<E: Into<BoxError> + 'static>(error: E) -> Self {
        Self::with(Disposition::Unclassified, error)
    }

    /// The record is retried by the retry policy, whatever the classifier would say.
    pub fn retry<E: Into<BoxError> + 'static>(error: E) -> Self {
        Self::with(Disposition::Retry, error)
    }

    /// The record is retried after `wait` instead of the retry policy's delay. The attempt counts.
    pub fn retry_after<E: Into<BoxError> + 'static>(wait: Duration, error: E) -> Self {
        Self::with(Disposition::RetryAfter(wait), error)
    }

    /// The record's time has not come: it is handled again after `wait`, and nothing counts against it. For what is
    /// known to be asked too early, such as a dependency that has said when to come back. A record may be postponed
    /// for ever; the stuck-record warnings name it meanwhile.
    pub fn postpone<E: Into<BoxError> + 'static>(wait: Duration, reason: E) -> Self {
        Self::with(Disposition::Postpone(wait), reason)
    }

    /// What the handler depends on, such as a database, is down: nothing counts against the record, which is handled
    /// again and again until it is not. When many attempts meet an outage, the consumer stops calling handlers until a
    /// probe succeeds, see [`OutageBreaker`](crate::OutageBreaker). For errors that any record would have met.
    pub fn outage<E: Into<BoxError> + 'static>(error: E) -> Self {
        Self::with(Disposition::Outage, error)
    }

    /// The record is dead-lettered at once: no later attempt could do better.
    pub fn permanent<E: Into<BoxError> + 'static>(error: E) -> Self {
        Self::with(Disposition::Permanent, error)
    }

    /// The record is done with, on purpose, without being handled. It is counted as skipped and not dead-lettered.
    pub fn skip<E: Into<BoxError> + 'static>(reason: E) -> Self {
        Self::with(Disposition::Skip, reason)
    }

    /// What this error says about the record's future.
    pub fn disposition(&self) -> Disposition {
        self.disposition
    }

    /// The error inside; [`find_error`](crate::find_error) looks for a type in it and in its causes.
    pub fn source(&self) -> &(dyn Error + Send + Sync + 'static) {
        &*self.source
    }

    fn with<E: Into<BoxError> + 'static>(disposition: Disposition, error: E) -> Self {
        Self {
            disposition,
            source: boxed(error),
        }
    }
}

#[cfg(not(feature = "anyhow"))]
fn boxed<E: Into<BoxError> + 'static>(error: E) -> BoxError {
    error.into()
}

/// `anyhow::Error` converts to a box of a private type, which no classifier could look into.
#[cfg(feature = "anyhow")]
fn boxed<E: Into<BoxError> + 'static>(error: E) -> BoxError {
    let mut error = Some(error);
    let anyhow = (&mut error as &mut dyn std::any::Any)
        .downcast_mut::<Option<anyhow::Error>>()
        .and_then(Option::take);
    match anyhow {
        Some(anyhow) => anyhow.reallocate_into_boxed_dyn_error_without_backtrace(),
        None => error.expect("only an `anyhow::Error` is taken out").into(),
    }
}

impl<E: Into<BoxError> + 'static> From<E> for HandlerError {
    fn from(error: E) -> Self {
        Self::new(error)
    }
}

impl fmt::Display for HandlerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.source, f)
    }
}

impl fmt::Debug for HandlerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandlerError")
            .field("disposition", &self.disposition)
            .field("source", &self.source)
            .finish()
    }
}

/// [`HandlerError::permanent`], to be returned: `Err(permanent("no such account"))`.
pub fn permanent<E: Into<BoxError> + 'static>(error: E) -> HandlerError {
    HandlerError::permanent(error)
}

/// [`HandlerError::retry_after`], to be returned: `Err(retry_after(wait, "rate limited"))`.
pub fn retry_after<E: Into<BoxError> + 'static>(wait: Duration, error: E) -> HandlerError {
    HandlerError::retry_after(wait, error)
}

/// [`HandlerError::postpone`], to be returned: `Err(postpone(wait, "the account is being moved"))`.
pub fn postpone<E: Into<BoxError> + 'static>(wait: Duration, reason: E) -> HandlerError {
    HandlerError::postpone(wait, reason)
}

/// [`HandlerError::outage`], to be returned: `Err(outage("the database refuses connections"))`.
pub fn outage<E: Into<BoxError> + 'static>(error: E) -> HandlerError {
    HandlerError::outage(error)
}

/// [`HandlerError::skip`], to be returned: `Err(skip("not for us"))`.
pub fn skip<E: Into<BoxError> + 'static>(reason: E) -> HandlerError {
    HandlerError::skip(reason)
}

/// Says on a `Result` what its error means for the record.
pub trait ResultExt<T> {
    /// An error dead-letters the record at once.
    ///
    /// # Errors
    ///
    /// The error there was, by [`HandlerError::permanent`].
    fn permanent(self) -> Result<T, HandlerError>;

    /// An error has the record retried after `wait` instead of the retry policy's delay.
    ///
    /// # Errors
    ///
    /// The error there was, by [`HandlerError::retry_after`].
    fn retry_after(self, wait: Duration) -> Result<T, HandlerError>;

    /// An error means that what the handler depends on is down: nothing counts against the record.
    ///
    /// # Errors
    ///
    /// The error there was, by [`HandlerError::outage`].
    fn outage(self) -> Result<T, HandlerError>;

    /// An error skips the record: it is finished, counted as skipped, and not dead-lettered.
    ///
    /// # Errors
    ///
    /// The error there was, by [`HandlerError::skip`].
    fn skip(self) -> Result<T, HandlerError>;
}

impl<T, E: Into<BoxError> + 'static> ResultExt<T> for Result<T, E> {
    fn permanent(self) -> Result<T, HandlerError> {
        self.map_err(HandlerError::permanent)
    }

    fn retry_after(self, wait: Duration) -> Result<T, HandlerError> {
        self.map_err(|error| HandlerError::retry_after(wait, error))
    }

    fn outage(self) -> Result<T, HandlerError> {
        self.map_err(HandlerError::outage)
    }

    fn skip(self) -> Result<T, HandlerError> {
        self.map_err(HandlerError::skip)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{
            Arc,
            atomic::{AtomicU32, Ordering},
        },
    };

    use super::*;
    use crate::{Json, Text};

    /// Calls a handler as an executor does: on a task of its own, which requires the future to be `Send`.
    async fn call<P: Send + Sync + 'static>(
        handler: impl Handler<P>,
        message: Message<P>,
    ) -> HandlerResult {
        tokio::spawn(async move { handler.handle(&message).await })
            .await
            .unwrap()
    }

    fn text(value: &str) -> Message<Text> {
        Message::builder().value(value).decode().unwrap()
    }

    struct Sum {
        total: Arc<AtomicU32>,
    }

    impl Handler<Json<u32>> for Sum {
        async fn handle(&self, message: &Message<Json<u32>>) -> HandlerResult {
            tokio::task::yield_now().await;
            self.total.fetch_add(**message.payload(), Ordering::Relaxed);
            Ok(())
        }
    }

    #[tokio::test]
    async fn a_type_with_state_handles_messages() {
        let total = Arc::new(AtomicU32::new(1));
        let handler = Sum {
            total: Arc::clone(&total),
        };
        let message = Message::builder().value("41").decode().unwrap();
        call(handler, message).await.unwrap();
        assert_eq!(total.load(Ordering::Relaxed), 42);
    }

    async fn parse(message: &Message<Text>) -> HandlerResult {
        tokio::task::yield_now().await;
        message.payload().parse::<u32>()?;
        Ok(())
    }

    #[tokio::test]
    async fn an_async_function_handles_messages() {
        call(parse, text("7")).await.unwrap();
        let error = call(parse, text("seven")).await.unwrap_err();
        assert!(error.source().is::<std::num::ParseIntError>());
    }

    #[tokio::test]
    async fn a_capturing_closure_handles_messages_and_question_mark_takes_any_error() {
        let (prefix, calls) = (String::from("error: "), Arc::new(AtomicU32::new(0)));
        let counted = Arc::clone(&calls);
        let handler = async move |message: &Message<Text>| {
            counted.fetch_add(1, Ordering::Relaxed);
            tokio::task::yield_now().await;
            match &**message.payload() {
                "io" => Err(io::Error::other("disk"))?,
                "anyhow" => Err(anyhow::anyhow!("anyhow"))?,
                "string" => Err(format!("{prefix}string"))?,
                "str" => Err("str")?,
                "boxed" => Err(BoxError::from("boxed"))?,
                "handler" => Err(permanent("handler"))?,
                _ => {}
            }
            Ok(())
        };
        let answer = async |value: &str| call(handler.clone(), text(value)).await;
        for (value, shown) in [
            ("io", "disk"),
            ("anyhow", "anyhow"),
            ("string", "error: string"),
            ("str", "str"),
            ("boxed", "boxed"),
        ] {
            let error = answer(value).await.unwrap_err();
            assert_eq!(error.to_string(), shown);
            assert_eq!(error.disposition(), Disposition::Unclassified);
        }
        let error = answer("handler").await.unwrap_err();
        assert_eq!(error.disposition(), Disposition::Permanent);
        answer("fine").await.unwrap();
        assert_eq!(calls.load(Ordering::Relaxed), 7);
    }

    #[test]
    fn an_error_says_what_becomes_of_the_record() {
        let wait = Duration::from_secs(3);
        let failed = || Err::<(), _>("failed");
        for (error, disposition) in [
            (HandlerError::from("failed"), Disposition::Unclassified),
            (HandlerError::retry("failed"), Disposition::Retry),
            (permanent("failed"), Disposition::Permanent),
            (failed().permanent().unwrap_err(), Disposition::Permanent),
            (retry_after(wait, "failed"), Disposition::RetryAfter(wait)),
            (
                failed().retry_after(wait).unwrap_err(),
                Disposition::RetryAfter(wait),
            ),
            (outage("failed"), Disposition::Outage),
            (failed().outage().unwrap_err(), Disposition::Outage),
            (skip("failed"), Disposition::Skip),
            (failed().skip().unwrap_err(), Disposition::Skip),
        ] {
            assert_eq!(error.disposition(), disposition);
            assert_eq!(error.to_string(), "failed");
        }
    }

    #[cfg(feature = "anyhow")]
    #[test]
    fn the_error_inside_an_anyhow_error_can_be_found() {
        use anyhow::Context;

        let refused = || io::Error::from(io::ErrorKind::ConnectionRefused);
        let error = HandlerError::from(anyhow::Error::new(refused()));
        assert!(error.source().is::<io::Error>());

        let with_context = Err::<(), _>(refused()).context("to the database");
        let error = HandlerError::from(with_context.unwrap_err());
        assert_eq!(error.to_string(), "to the database");
        let found = crate::find_error::<io::Error>(error.source());
        assert_eq!(
            found.map(io::Error::kind),
            Some(io::ErrorKind::ConnectionRefused)
        );

        let error = Err::<(), _>(anyhow::Error::new(refused())).permanent();
        assert!(error.unwrap_err().source().is::<io::Error>());
        assert_eq!(HandlerError::from("text").to_string(), "text");
    }
}
