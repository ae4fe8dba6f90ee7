//! What the consumer does with a store: claim a message before its handler runs, keep the claim while it does, and say
//! afterwards what came of it.

use std::{
    mem,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::watch,
    time::{Instant, sleep, sleep_until, timeout},
};

use super::{
    Claim, Duplicates, Fingerprint, Id, IdScope, Idempotency, Reply, StoreError, Token,
    Unreachable, UnsafeServer, Update, options::IdFrom,
};
use crate::{kafka::Throttle, origin::Origin, record::Record, shown::shown};

/// Between two looks at a message that is in progress elsewhere: as long as it has been, within these.
const LOOKS: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(900));
/// Between two tries to complete.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// A store that failed is down until it has answered, and not failed, for this long.
const CALM: Duration = Duration::from_secs(1);
/// How often a store that is down is asked under [`Unreachable::Process`].
const PROBE: Duration = Duration::from_secs(1);
/// For one look at the server.
const CHECK: Duration = Duration::from_secs(10);
/// Possible repeats that are logged one by one in a second.
const LINES: u32 = 20;

/// A store as the records of one consumer share it.
pub(crate) struct Claims {
    settings: Idempotency,
    prefix: String,
    runtime: Handle,
    health: Health,
    duplicates: Mutex<Duplicates>,
    possible_repeats: AtomicU64,
    told: Throttle,
    id_conflicts: AtomicU64,
    unusable: AtomicU64,
    /// What the server is set to that is unsafe, once it has been looked at.
    concerns: watch::Sender<Option<Vec<String>>>,
    concerns_told: AtomicBool,
}

/// What came of asking for a record's message.
pub(crate) enum Entry {
    /// It is ours to handle.
    Claimed(Held),
    /// It is to be handled although the store does not know of it.
    Unclaimed,
    /// It has been handled.
    Duplicate,
    /// Somebody else is handling it: worth another look after this time.
    InProgress(Duration),
    /// Another message with its id has been handled.
    Conflict,
    /// The store cannot use what it has under this message's id: what to say of it.
    Unusable(String),
    /// The store has no answer.
    Unreachable(StoreError),
}

impl Claims {
    pub(crate) fn new(settings: Idempotency, group: &str, runtime: Handle) -> Self {
        Self {
            prefix: Id::prefix(&settings.namespace, group),
            settings,
            runtime,
            health: Health::default(),
            duplicates: Mutex::default(),
            possible_repeats: AtomicU64::new(0),
            told: told(),
            id_conflicts: AtomicU64::new(0),
            unusable: AtomicU64::new(0),
            concerns: watch::Sender::default(),
            concerns_told: AtomicBool::new(false),
        }
    }

    /// Looks at the store's server, as soon as it answers.
    pub(crate) fn check_server(self: &Arc<Self>) {
        let claims = Arc::downgrade(self);
        self.runtime.spawn(async move {
            while let Some(claims) = claims.upgrade() {
                let checked = timeout(CHECK, claims.settings.store.check()).await;
                match checked {
                    Ok(Ok(concerns)) => {
                        claims.concerns.send_replace(Some(concerns));
                        return;
                    }
                    Ok(Err(error)) => claims.health.failed(&error),
                    Err(_) => {}
                }
                drop(claims);
                sleep(PROBE).await;
            }
        });
    }

    /// What is unsafe about the server, as far as that is known.
    pub(crate) fn concerns(&self) -> Vec<String> {
        self.concerns.borrow().clone().unwrap_or_default()
    }

    /// The same, once.
    pub(crate) fn new_concerns(&self) -> Option<Vec<String>> {
        let concerns = self.concerns();
        let told = concerns.is_empty() || self.concerns_told.swap(true, Ordering::Relaxed);
        (!told).then_some(concerns)
    }

    pub(crate) fn refuses_unsafe_server(&self) -> bool {
        self.settings.unsafe_server == UnsafeServer::Refuse
    }

    /// Asks for the record's message.
    pub(crate) async fn enter(self: &Arc<Self>, record: &Record) -> Entry {
        let lease = self.settings.lease;
        if self.refuses_unsafe_server() {
            let mut concerns = self.concerns.subscribe();
            let safe = concerns.wait_for(|it| it.as_ref().is_some_and(Vec::is_empty));
            // Where it is not, the run ends.
            let _ = safe.await.map(drop);
        }
        let unclaimed = self.settings.unreachable == Unreachable::Process;
        let asked = Instant::now();
        if unclaimed && !self.health.is_worth_asking(asked) {
            return Entry::Unclaimed;
        }
        let (id, from) = self.id(record);
        let fingerprint = self.settings.fingerprint.as_ref().map(|of| of(record));
        // At least half of the lease is left of what is granted.
        match self.ask(Claiming::new(self, id), lease / 2).await {
            Ok((id, Claim::Claimed(token))) => Entry::Claimed(Held {
                claims: Arc::clone(self),
                id,
                token,
                fingerprint,
                since: asked,
                standing: true,
            }),
            Ok((_, Claim::Done { fingerprint: known })) => {
                if fingerprint.is_some_and(|own| known.is_some_and(|known| known != own)) {
                    self.id_conflicts.fetch_add(1, Ordering::Relaxed);
                    return Entry::Conflict;
                }
                self.note_duplicate(from);
                Entry::Duplicate
            }
            Ok((_, Claim::InProgress { lapses_in })) => {
                // Its bits are as good as any.
                let random = Token::unique().as_bytes()[0];
                Entry::InProgress(next_look(lease, lapses_in, random))
            }
            Err(error @ StoreError::Entry(_)) => {
                self.unusable.fetch_add(1, Ordering::Relaxed);
                let (id, _) = self.id(record);
                Entry::Unusable(format!("{error} (id {id:?})"))
            }
            Err(_) if unclaimed => Entry::Unclaimed,
            Err(error) => Entry::Unreachable(error),
        }
    }

    /// What the store knows the record's message by.
    fn id(&self, record: &Record) -> (Id, IdFrom) {
        let Idempotency {
            id: source, scope, ..
        } = &self.settings;
        source.of(record, |id, from| {
            let id = match scope {
                IdScope::Group => Id::under(&self.prefix, id),
                IdScope::Topic => Id::under_topic(&self.prefix, Origin::of(record).topic, id),
            };
            (id, from)
        })
    }

    /// The store's answer, if it comes in time.
    async fn ask<T: Proof>(
        &self,
        call: impl Future<Output = Result<T, StoreError>>,
        limit: Duration,
    ) -> Result<T, StoreError> {
        let asked = Instant::now();
        let answer = timeout(limit, call).await.unwrap_or_else(|_| {
            let late = format!("it has not answered within {} ms", limit.as_millis());
            Err(StoreError::unavailable(late))
        });
        match &answer {
            Ok(answer) if answer.is_proof() => self.health.answered(asked),
            Ok(_) | Err(StoreError::Entry(_)) => {}
            Err(error) => self.health.failed(error),
        }
        answer
    }

    async fn release(&self, id: &Id, token: &Token) {
        let release = self.settings.store.release(id, token);
        // If that fails it lapses.
        let _ = self.ask(release, self.settings.lease / 3).await;
    }

    /// A record was handled, and the store does not know of it.
    pub(crate) fn note_possible_repeat(&self) {
        self.possible_repeats.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether this one is to be logged, and how many were not since the last one that was.
    pub(crate) fn is_worth_telling(&self) -> Option<u64> {
        self.told.admit(Instant::now().into_std())
    }

    fn note_duplicate(&self, from: IdFrom) {
        let mut duplicates = self
            .duplicates
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        duplicates.note(from);
    }

    pub(crate) fn scope(&self) -> IdScope {
        self.settings.scope
    }

    pub(crate) fn duplicates(&self) -> Duplicates {
        *self
            .duplicates
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn possible_repeats(&self) -> u64 {
        self.possible_repeats.load(Ordering::Relaxed)
    }

    pub(crate) fn unusable(&self) -> u64 {
        self.unusable.load(Ordering::Relaxed)
    }

    pub(crate) fn id_conflicts(&self) -> u64 {
        self.id_conflicts.load(Ordering::Relaxed)
    }

    /// Since when the store has been down, and what it said last.
    pub(crate) fn down(&self) -> Option<Down> {
        let trouble = self.health.trouble();
        let trouble = trouble.as_ref().filter(|trouble| !trouble.answered)?;
        Some(Down {
            since: trouble.since,
            error: trouble.error.clone(),
            refuses: trouble.refuses,
        })
    }

    /// Whether it makes sense to begin: what is done while the store is down cannot be completed.
    pub(crate) fn is_answering(&self) -> bool {
        self.settings.unreachable == Unreachable::Process || self.health.down_since().is_none()
    }

    /// Waits until it is. `false`: it has been down for so long that what was claimed before has lapsed.
    pub(crate) async fn answers_again(&self) -> bool {
        const LOOK: Duration = Duration::from_millis(100);
        while let Some(since) = self.health.down_since() {
            if since.elapsed() >= self.settings.lease {
                return false;
            }
            sleep(LOOK).await;
        }
        true
    }

    /// Whether somebody is to be told something new.
    pub(crate) fn news(&self) -> Option<News> {
        self.health.news()
    }

    /// What it is down with, if that is to end the run.
    pub(crate) fn is_to_stop(&self) -> Option<Down> {
        let Unreachable::Stop { after } = self.settings.unreachable else {
            return None;
        };
        self.down()
            .filter(|down| down.refuses || down.since.elapsed() >= after)
    }
}

/// An answer, and whether a store that takes no writes would have given another. One that is told that it changed nothing
/// may not even have tried.
trait Proof {
    fn is_proof(&self) -> bool;
}

impl Proof for Update {
    fn is_proof(&self) -> bool {
        *self == Self::Applied
    }
}

impl Proof for (Id, Claim) {
    fn is_proof(&self) -> bool {
        true
    }
}

/// A store that forgets its claims would have a line logged for every record.
fn told() -> Throttle {
    Throttle::of(LINES, Duration::from_secs(1))
}

/// A claim that is asked for. If nobody waits for the answer any more, since it is late or the record is not for us to
/// handle now, what it grants is given up: whoever comes next shall not have to wait for its lease.
struct Claiming {
    claims: Arc<Claims>,
    /// Not there while it is polled, so that a store that panics is not asked again.
    call: Option<Reply<'static, (Id, Claim)>>,
}

impl Claiming {
    fn new(claims: &Arc<Claims>, id: Id) -> Self {
        let claims = Arc::clone(claims);
        let asked = Arc::clone(&claims);
        let call = async move {
            let settings = &asked.settings;
            let claim = settings.store.claim(&id, settings.lease).await?;
            Ok((id, claim))
        };
        Self {
            claims,
            call: Some(Box::pin(call)),
        }
    }
}

impl Future for Claiming {
    type Output = Result<(Id, Claim), StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut call = self.call.take().expect("it has not been answered yet");
        let polled = call.as_mut().poll(cx);
        if polled.is_pending() {
            self.call = Some(call);
        }
        polled
    }
}

impl Drop for Claiming {
    fn drop(&mut self) {
        let Some(call) = self.call.take() else {
            return;
        };
        let claims = Arc::clone(&self.claims);
        self.claims.runtime.spawn(async move {
            // Later than that, it is for the lease to lapse.
            if let Ok(Ok((id, Claim::Claimed(token)))) = timeout(claims.settings.lease, call).await
            {
                claims.release(&id, &token).await;
            }
        });
    }
}

/// When to look again at a message that is in progress for another `lapses_in`, if nobody renews that.
fn next_look(lease: Duration, lapses_in: Duration, random: u8) -> Duration {
    let random = f64::from(random) / 255.0;
    let (shortest, longest) = LOOKS;
    // A longer lease than ours tells nothing of when it began.
    let age = lease.checked_sub(lapses_in).unwrap_or(longest);
    let look = age.clamp(shortest, longest).mul_f64(0.8 + 0.3 * random);
    // When it has lapsed, its consumer is dead, and everybody who has waited comes at once.
    look.min(lapses_in + shortest.mul_f64(0.1 + random))
}

/// A message that is ours to handle. Dropped without further ado, as when its handler is cancelled, it is given up.
pub(crate) struct Held {
    claims: Arc<Claims>,
    id: Id,
    token: Token,
    fingerprint: Option<Fingerprint>,
    /// When it was asked for, or last renewed. The store's lease began later.
    since: Instant,
    /// It is to be released.
    standing: bool,
}

impl Held {
    /// Renews it, until it is found to be lost.
    pub(crate) async fn keep(&mut self) {
        let Claims { settings, .. } = &*self.claims;
        let pause = settings.lease / 3;
        let mut next = self.since + pause;
        loop {
            sleep_until(next).await;
            let asked = Instant::now();
            let renewal = settings.store.renew(&self.id, &self.token, settings.lease);
            match self.claims.ask(renewal, pause).await {
                Ok(Update::Applied) => {
                    self.since = asked;
                    next = asked + pause;
                }
                Ok(Update::Stale) | Err(StoreError::Entry(_)) => return,
                Err(_) => next = Instant::now() + pause / 4,
            }
        }
    }

    /// Whether it may be somebody else's by now: the process stood still, or the store could not be reached.
    pub(crate) fn may_have_lapsed(&self) -> bool {
        self.since.elapsed() >= self.claims.settings.lease
    }

    /// Has it remembered as done. Tried until its lease has lapsed, or it is `over`; the error says why it is not known to be
    /// remembered.
    pub(crate) async fn complete(&mut self, over: impl Future<Output = ()>) -> Result<(), String> {
        // Whatever becomes of that, the effect has happened: others had better not begin before the lease has lapsed.
        self.standing = false;
        let Claims { settings, .. } = &*self.claims;
        let mut last = String::from("the store did not answer");
        let tries = async {
            let (mut pause, longest) = PAUSES;
            loop {
                let completion = settings.store.complete(
                    &self.id,
                    &self.token,
                    settings.keep_for,
                    self.fingerprint,
                );
                match self.claims.ask(completion, settings.lease / 3).await {
                    Ok(Update::Applied) => return Ok(()),
                    Ok(Update::Stale) => return Err("its lease had lapsed".into()),
                    Err(error @ StoreError::Entry(_)) => {
                        self.claims.unusable.fetch_add(1, Ordering::Relaxed);
                        return Err(format!("{error} (id {:?})", self.id));
                    }
                    Err(error) => last = shown(&error),
                }
                sleep(pause).await;
                pause = (pause * 2).min(longest);
            }
        };
        // Once at least: whether it has lapsed is for the store's clock to decide.
        let lapsed = (self.since + settings.lease).max(Instant::now() + settings.lease / 3);
        tokio::select! {
            biased;
            tried = tries => tried,
            () = sleep_until(lapsed) => Err(last),
            () = over => Err(last),
        }
    }

    /// Gives it up: it is free at once.
    pub(crate) async fn release(mut self) {
        self.standing = false;
        self.claims.release(&self.id, &self.token).await;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if mem::take(&mut self.standing) {
            let again = Self {
                claims: Arc::clone(&self.claims),
                id: self.id.clone(),
                standing: false,
                ..*self
            };
            self.claims.runtime.spawn(again.release());
        }
    }
}

/// A store that does not answer.
pub(crate) struct Down {
    pub(crate) since: Instant,
    pub(crate) error: String,
    /// Somebody has to see to it.
    pub(crate) refuses: bool,
}

pub(crate) enum News {
    Down { error: String },
    Up { after: Duration },
}

/// How the store does, by its answers.
#[derive(Default)]
struct Health {
    /// Looked at for each answer: set while there is trouble.
    troubled: AtomicBool,
    trouble: Mutex<Option<Trouble>>,
}

struct Trouble {
    since: Instant,
    failed_at: Instant,
    error: String,
    refuses: bool,
    /// Since it failed last.
    answered: bool,
    told: bool,
    next_probe: Instant,
}

impl Health {
    fn failed(&self, error: &StoreError) {
        let now = Instant::now();
        let mut trouble = self.trouble();
        let trouble = trouble.get_or_insert_with(|| Trouble {
            since: now,
            failed_at: now,
            error: String::new(),
            refuses: false,
            answered: false,
            told: false,
            next_probe: now + PROBE,
        });
        trouble.failed_at = now;
        trouble.answered = false;
        trouble.error = shown(error);
        trouble.refuses = !error.is_transient();
        self.troubled.store(true, Ordering::Release);
    }

    /// What was asked before the last failure may have been done before it, and says nothing about what comes after.
    fn answered(&self, asked: Instant) {
        if self.troubled.load(Ordering::Acquire)
            && let Some(trouble) = &mut *self.trouble()
            && asked >= trouble.failed_at
        {
            trouble.answered = true;
        }
    }

    fn down_since(&self) -> Option<Instant> {
        if !self.troubled.load(Ordering::Acquire) {
            return None;
        }
        let trouble = self.trouble();
        let trouble = trouble.as_ref().filter(|trouble| !trouble.answered)?;
        Some(trouble.since)
    }

    /// While it is down, now and then.
    fn is_worth_asking(&self, now: Instant) -> bool {
        if !self.troubled.load(Ordering::Acquire) {
            return true;
        }
        match &mut *self.trouble() {
            Some(trouble) if !trouble.answered && now < trouble.next_probe => false,
            Some(trouble) => {
                trouble.next_probe = now + PROBE;
                true
            }
            None => true,
        }
    }

    fn news(&self) -> Option<News> {
        if !self.troubled.load(Ordering::Acquire) {
            return None;
        }
        let mut trouble = self.trouble();
        let of = trouble.as_mut()?;
        if !of.answered {
            let error = of.error.clone();
            return (!mem::replace(&mut of.told, true)).then_some(News::Down { error });
        }
        if of.failed_at.elapsed() < CALM {
            return None;
        }
        let of = trouble.take()?;
        self.troubled.store(false, Ordering::Release);
        let after = of.since.elapsed();
        of.told.then_some(News::Up { after })
    }

    fn trouble(&self) -> MutexGuard<'_, Option<Trouble>> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(10);

    #[test]
    fn looks_at_what_is_in_progress_are_as_far_apart_as_it_is_old_and_one_comes_when_its_lease_lapses()
     {
        for random in [0, 128, 255] {
            let look = |age: Duration| next_look(LEASE, LEASE - age, random);
            let between = |look: Duration, least: u64, most: u64| {
                let millis = look.as_millis() as u64;
                assert!((least..=most).contains(&millis), "{look:?}");
            };
            between(look(Duration::ZERO), 8, 11);
            between(look(Duration::from_millis(100)), 80, 110);
            between(look(Duration::from_secs(5)), 720, 990);
            between(look(LEASE - Duration::from_millis(200)), 201, 211);
            between(look(LEASE), 1, 11);
            between(next_look(LEASE, LEASE * 6, random), 720, 990);
        }
    }

    #[test]
    fn a_flood_of_possible_repeats_is_logged_by_a_few_of_them_and_their_number() {
        let told = told();
        let now = std::time::Instant::now();
        let logged = (0..1_000).filter(|_| told.admit(now) == Some(0)).count();
        assert_eq!(logged, LINES as usize);
        assert_eq!(told.admit(now + CALM), Some(1_000 - u64::from(LINES)));
        assert_eq!(told.admit(now + CALM), Some(0));
    }

    #[test]
    fn an_answer_to_what_was_asked_before_a_failure_does_not_end_it() {
        let health = Health::default();
        let asked = Instant::now();
        std::thread::sleep(Duration::from_millis(2));
        health.failed(&StoreError::unavailable("read-only"));
        health.answered(asked);
        assert!(health.down_since().is_some());
        health.answered(Instant::now());
        assert!(health.down_since().is_none());
        assert!(!Update::Stale.is_proof(), "nothing was written");
    }

    #[test]
    fn trouble_is_told_of_once_and_its_end_when_it_has_been_over_for_a_while() {
        let health = Health::default();
        let error = StoreError::unavailable("away");
        assert!(health.news().is_none());
        health.failed(&error);
        assert!(matches!(health.news(), Some(News::Down { .. })));
        health.failed(&error);
        assert!(health.news().is_none());
        health.answered(Instant::now());
        assert!(health.news().is_none(), "it may fail again at once");
        std::thread::sleep(CALM);
        assert!(matches!(health.news(), Some(News::Up { .. })));
        assert!(health.news().is_none());
        // Over before anybody was told.
        health.failed(&error);
        health.answered(Instant::now());
        std::thread::sleep(CALM);
        assert!(health.news().is_none() && health.trouble().is_none());
    }
}
