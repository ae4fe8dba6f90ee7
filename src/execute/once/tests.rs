use std::{
    future::{Future, pending},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use tokio::{runtime::Handle, time::sleep};

use super::*;
use crate::{
    Message, Retry,
    engine::{Config, Engine, Guarantee, Inherited},
    execute::{Context, Permits, Places, Queue, Recall, Reports},
    handler::HandlerError,
    idempotency::{
        Claim, Fingerprint, Id, IdScope, IdSource, Idempotency, MemoryStore, Reply, Store,
        StoreError, Token, Unreachable, Update,
    },
};

const LEASE: Duration = Duration::from_millis(300);

/// A memory store that can be made to fail.
#[derive(Default)]
struct Flaky {
    inner: Option<MemoryStore>,
    claims_fail: AtomicBool,
    completions_fail: AtomicBool,
    hangs: AtomicBool,
    /// Claims are granted, and the answer takes longer than anybody waits.
    late: AtomicBool,
    /// Claims are granted, and the answer takes a while.
    slow: AtomicBool,
    asked: AtomicUsize,
    refuses: AtomicBool,
}

impl Flaky {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            inner: Some(MemoryStore::new(100)),
            ..Self::default()
        })
    }

    async fn pass(&self, fails: &AtomicBool) -> Result<&MemoryStore, StoreError> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        if self.hangs.load(Ordering::SeqCst) {
            pending::<()>().await;
        }
        if self.refuses.load(Ordering::SeqCst) {
            return Err(StoreError::refused("no such table"));
        }
        if fails.load(Ordering::SeqCst) {
            return Err(StoreError::unavailable("switched off"));
        }
        Ok(self.inner.as_ref().expect("it is there"))
    }
}

impl Store for Flaky {
    fn claim<'a>(&'a self, id: &'a Id, lease: Duration) -> Reply<'a, Claim> {
        Box::pin(async move {
            let claim = self.pass(&self.claims_fail).await?.claim(id, lease).await;
            if self.late.load(Ordering::SeqCst) {
                sleep(lease * 6 / 10).await;
            }
            if self.slow.load(Ordering::SeqCst) {
                sleep(lease / 4).await;
            }
            claim
        })
    }

    fn renew<'a>(&'a self, id: &'a Id, token: &'a Token, lease: Duration) -> Reply<'a, Update> {
        Box::pin(async move {
            let inner = self.pass(&self.completions_fail).await?;
            inner.renew(id, token, lease).await
        })
    }

    fn complete<'a>(
        &'a self,
        id: &'a Id,
        token: &'a Token,
        keep_for: Duration,
        fingerprint: Option<Fingerprint>,
    ) -> Reply<'a, Update> {
        Box::pin(async move {
            let inner = self.pass(&self.completions_fail).await?;
            inner.complete(id, token, keep_for, fingerprint).await
        })
    }

    fn release<'a>(&'a self, id: &'a Id, token: &'a Token) -> Reply<'a, Update> {
        Box::pin(async move { self.pass(&self.claims_fail).await?.release(id, token).await })
    }
}

/// A consumer's process, as far as an attempt sees of it.
struct Process {
    lease: Lease,
    store: Arc<Flaky>,
    handled: AtomicUsize,
}

impl Process {
    fn new(set: impl FnOnce(Idempotency) -> Idempotency) -> Self {
        Self::beside(Flaky::new(), set)
    }

    /// Another one of the same group.
    fn beside(store: Arc<Flaky>, set: impl FnOnce(Idempotency) -> Idempotency) -> Self {
        let idempotency = set(Idempotency::new(Arc::clone(&store)).lease(LEASE));
        let claims = Claims::new(idempotency, "group", Handle::current());
        let context = Context {
            queue: Queue::default(),
            permits: Permits::new(1),
            recall: Recall::default(),
            reports: Reports::new(mpsc::channel().0, thread::current()),
            handler_timeout: Some(LEASE * 4),
            stuck_limit: None,
            interrupts: false,
            retry: Arc::default(),
            classifier: None,
            filter: None,
            error_message: crate::ErrorMessage::default(),
            failed_attempts: crate::kafka::Throttle::default(),
            own_redrives_of: None,
            held_keys: None,
            claims: Some(Arc::new(claims)),
            places: Places::new(1),
        };
        let issue = context.recall.issue();
        Self {
            lease: Lease {
                context: Arc::new(context),
                fence: Arc::default(),
                owner: some_ownership(),
                issue,
                tier: None,
            },
            store,
            handled: AtomicUsize::new(0),
        }
    }

    fn claims(&self) -> &Arc<Claims> {
        claims_of(&self.lease)
    }

    async fn attempt(&self, record: &Record, work: impl Future<Output = Attempted>) -> Attempted {
        let counted = async {
            self.handled.fetch_add(1, Ordering::SeqCst);
            work.await
        };
        once(&self.lease, 0, record, counted).await
    }

    async fn handle(&self, record: &Record) -> Attempted {
        self.attempt(record, async { Attempted::Handled }).await
    }

    fn handled(&self) -> usize {
        self.handled.load(Ordering::SeqCst)
    }
}

fn some_ownership() -> crate::engine::Ownership {
    let config = Config {
        ordering: crate::Ordering::ByKey,
        guarantee: Guarantee::AtLeastOnce,
        concurrency: 1,
        window: 1,
        max_bytes: 1,
        max_records: 1,
        retry: Arc::new(Retry::none()),
        commit_interval: LEASE,
        crash_limit: None,
        breaker: None,
        seed: 1,
    };
    Engine::<(), ()>::new(config, Instant::now()).assign(Some(0), Some(0), Inherited::default())
}

fn record(id: &str, value: &str) -> Record {
    Message::builder()
        .header("messageId", id)
        .value(value)
        .record()
}

fn same(idempotency: Idempotency) -> Idempotency {
    idempotency
}

#[tokio::test]
async fn a_message_that_comes_twice_is_handled_once() {
    let process = Process::new(same);
    let record = record("1", "");
    assert!(matches!(process.handle(&record).await, Attempted::Handled));
    assert!(matches!(
        process.handle(&record).await,
        Attempted::Duplicate
    ));
    assert_eq!(process.handled(), 1);
    let duplicates = process.claims().duplicates();
    assert_eq!((duplicates.message_id, duplicates.total()), (1, 1));
    assert_eq!(process.claims().possible_repeats(), 0);
}

#[tokio::test]
async fn a_handler_that_fails_panics_or_takes_too_long_gives_its_message_up() {
    let process = Process::new(same);
    let record = record("1", "");
    let failed = async { Attempted::Failed(HandlerError::new("no")) };
    assert!(matches!(
        process.attempt(&record, failed).await,
        Attempted::Failed(_)
    ));
    let panicked = async { panic!("on purpose") };
    assert!(matches!(
        process.attempt(&record, panicked).await,
        Attempted::Panicked(_)
    ));
    let late = process.attempt(&record, pending()).await;
    assert!(matches!(late, Attempted::TimedOut(_)));
    assert!(matches!(process.handle(&record).await, Attempted::Handled));
    assert_eq!(process.handled(), 4);
}

#[tokio::test]
async fn an_attempt_that_is_dropped_gives_its_message_up() {
    let process = Process::new(same);
    let record = record("1", "");
    let dropped = tokio::time::timeout(LEASE / 10, process.attempt(&record, pending())).await;
    assert!(dropped.is_err());
    // In a task of its own.
    sleep(LEASE / 10).await;
    assert!(matches!(process.handle(&record).await, Attempted::Handled));
}

// P7
#[tokio::test]
async fn a_claim_is_renewed_while_its_handler_runs_and_others_wait_until_it_is_done() {
    let one = Process::new(same);
    let other = Process::beside(Arc::clone(&one.store), same);
    let record = record("1", "");
    let work = async {
        sleep(LEASE * 2).await;
        Attempted::Handled
    };
    let waits = async {
        loop {
            match other.handle(&record).await {
                Attempted::InProgress(wait) => sleep(wait).await,
                attempted => return attempted,
            }
        }
    };
    let (first, second) = tokio::join!(one.attempt(&record, work), waits);
    assert!(matches!(
        (first, second),
        (Attempted::Handled, Attempted::Duplicate)
    ));
    assert_eq!((one.handled(), other.handled()), (1, 0));
}

// P6
#[tokio::test]
async fn a_message_whose_consumer_died_is_handled_soon_after_its_lease() {
    let process = Process::new(same);
    let id = Id::new("reliable-consumer", "group", "1");
    let since = Instant::now();
    let claim = process.store.claim(&id, LEASE).await;
    assert!(matches!(claim, Ok(Claim::Claimed(_))));
    let record = record("1", "");
    while let Attempted::InProgress(wait) = process.handle(&record).await {
        sleep(wait).await;
    }
    let after = since.elapsed();
    assert_eq!(process.handled(), 1);
    assert!(
        after >= LEASE && after < LEASE + Duration::from_secs(1),
        "{after:?}"
    );
}

#[tokio::test]
async fn a_completion_is_tried_until_the_store_answers() {
    let process = Process::new(same);
    let record = record("1", "");
    process.store.completions_fail.store(true, Ordering::SeqCst);
    let comes_back = async {
        sleep(LEASE / 3).await;
        process
            .store
            .completions_fail
            .store(false, Ordering::SeqCst);
    };
    let (attempted, ()) = tokio::join!(process.handle(&record), comes_back);
    assert!(matches!(attempted, Attempted::Handled));
    assert_eq!(process.claims().possible_repeats(), 0);
    assert!(matches!(
        process.handle(&record).await,
        Attempted::Duplicate
    ));
}

#[tokio::test]
async fn a_message_that_cannot_be_completed_before_its_lease_has_lapsed_is_a_possible_repeat() {
    let process = Process::new(same);
    let record = record("1", "");
    for switch in [&process.store.completions_fail, &process.store.hangs] {
        let since = Instant::now();
        let work = async {
            switch.store(true, Ordering::SeqCst);
            Attempted::Handled
        };
        let attempted = process.attempt(&record, work).await;
        assert!(
            matches!(attempted, Attempted::Handled),
            "it is not handled again by us"
        );
        assert!(since.elapsed() >= LEASE);
        switch.store(false, Ordering::SeqCst);
    }
    assert_eq!(
        (process.claims().possible_repeats(), process.handled()),
        (2, 2)
    );
}

#[tokio::test]
async fn a_claim_that_was_lost_is_a_possible_repeat_at_once() {
    let process = Process::new(same);
    let record = record("1", "");
    let blocked = async {
        // What a frozen process does.
        thread::sleep(LEASE * 2);
        Attempted::Handled
    };
    assert!(matches!(
        process.attempt(&record, blocked).await,
        Attempted::Handled
    ));
    assert_eq!(process.claims().possible_repeats(), 1);
    assert!(matches!(process.handle(&record).await, Attempted::Handled));
}

#[tokio::test]
async fn a_drain_is_not_kept_waiting_by_a_completion_that_fails() {
    let process = Process::new(|it| it.lease(LEASE * 100));
    process.store.completions_fail.store(true, Ordering::SeqCst);
    let record = record("1", "");
    let since = Instant::now();
    let drains = async {
        sleep(LEASE / 10).await;
        process.lease.fence.close(Instant::now() + LEASE);
    };
    let (attempted, ()) = tokio::join!(process.handle(&record), drains);
    assert!(matches!(attempted, Attempted::Handled));
    assert!(since.elapsed() < LEASE, "before the deadline");
    assert_eq!(process.claims().possible_repeats(), 1);
}

#[tokio::test]
async fn what_is_claimed_when_its_partition_is_taken_away_is_not_started_and_is_free() {
    let process = Process::new(same);
    let next_owner = Process::beside(Arc::clone(&process.store), same);
    let record = record("1", "");
    process.lease.fence.close(Instant::now() + LEASE);
    assert!(matches!(
        process.handle(&record).await,
        Attempted::NotStarted
    ));
    assert_eq!(process.handled(), 0);
    assert!(matches!(
        next_owner.handle(&record).await,
        Attempted::Handled
    ));
}

#[tokio::test]
async fn a_claim_waits_for_a_handlers_place_and_others_are_asked_for_meanwhile() {
    let process = Process::new(same);
    let work = async {
        sleep(LEASE * 2).await;
        Attempted::Handled
    };
    let (one, other) = (record("1", ""), record("2", ""));
    let waits = async {
        sleep(LEASE / 10).await;
        // Known to be in progress, long before its handler is: longer than the lease, too.
        let attempted = process.attempt(&other, async { Attempted::Handled });
        let asked = async {
            sleep(LEASE / 10).await;
            assert_eq!(process.handled(), 1);
            let next_owner = Process::beside(Arc::clone(&process.store), same);
            next_owner.handle(&other).await
        };
        tokio::join!(attempted, asked)
    };
    let (first, (second, meanwhile)) = tokio::join!(process.attempt(&one, work), waits);
    assert!(matches!(
        (first, second),
        (Attempted::Handled, Attempted::Handled)
    ));
    assert!(matches!(meanwhile, Attempted::InProgress(_)));
    assert_eq!(process.claims().possible_repeats(), 0);
}

#[tokio::test]
async fn what_is_called_back_while_it_waits_for_a_place_is_not_started_and_is_free() {
    let process = Process::new(same);
    let next_owner = Process::beside(Arc::clone(&process.store), same);
    let waiting = record("2", "");
    let work = async {
        sleep(LEASE / 5).await;
        process.lease.context.recall.call();
        process.lease.context.fence_closed();
        sleep(LEASE / 5).await;
        // Before this one is over.
        assert!(matches!(
            next_owner.handle(&waiting).await,
            Attempted::Handled
        ));
        Attempted::Handled
    };
    let running = record("1", "");
    let (_, second) = tokio::join!(process.attempt(&running, work), process.handle(&waiting));
    assert!(matches!(second, Attempted::NotStarted));
    assert_eq!(process.handled(), 1);
}

#[tokio::test]
async fn what_has_lapsed_while_it_waited_for_a_place_is_not_started() {
    let process = Process::new(same);
    let work = async {
        sleep(LEASE / 10).await;
        // What a frozen process does.
        thread::sleep(LEASE * 2);
        Attempted::Handled
    };
    let (one, other) = (record("1", ""), record("2", ""));
    let (_, second) = tokio::join!(process.attempt(&one, work), process.handle(&other));
    assert!(matches!(second, Attempted::NotStarted));
    assert_eq!(process.handled(), 1);
    assert!(matches!(process.handle(&other).await, Attempted::Handled));
}

// R4
#[tokio::test]
async fn nobody_waits_for_a_claim_that_hangs_when_its_partition_is_taken_away() {
    let process = Process::new(|it| it.lease(LEASE * 100));
    process.store.hangs.store(true, Ordering::SeqCst);
    let record = record("1", "");
    let since = Instant::now();
    let drains = async {
        sleep(LEASE / 10).await;
        process.lease.fence.close(Instant::now() + LEASE * 50);
    };
    let (attempted, ()) = tokio::join!(process.handle(&record), drains);
    assert!(matches!(attempted, Attempted::NotStarted));
    assert!(since.elapsed() < LEASE * 20);
    assert_eq!(process.handled(), 0);
}

// R4
#[tokio::test]
async fn nobody_waits_for_a_store_to_come_back_when_a_partition_is_taken_away() {
    let process = Process::new(|it| it.lease(LEASE * 100));
    let running = async {
        sleep(LEASE / 10).await;
        // Claimed, and waiting for a place, while another one finds the store away.
        process.store.claims_fail.store(true, Ordering::SeqCst);
        let away = process.handle(&record("3", "")).await;
        assert!(matches!(away, Attempted::StoreUnreachable(_)));
        Attempted::Failed(HandlerError::new("no"))
    };
    let since = Instant::now();
    let drains = async {
        sleep(LEASE).await;
        process.lease.fence.close(Instant::now() + LEASE * 50);
    };
    let (one, two) = (record("1", ""), record("2", ""));
    let (_, waited, ()) =
        tokio::join!(process.attempt(&one, running), process.handle(&two), drains);
    assert!(matches!(waited, Attempted::NotStarted));
    assert!(since.elapsed() < LEASE * 20, "{:?}", since.elapsed());
}

#[tokio::test]
async fn what_is_granted_when_nobody_waits_for_it_any_more_is_free() {
    let lease = LEASE * 4;
    for taken_away in [false, true] {
        let process = Process::new(|it| it.lease(lease));
        let next = Process::beside(Arc::clone(&process.store), |it| it.lease(lease));
        process.store.late.store(true, Ordering::SeqCst);
        let record = record("1", "");
        let since = Instant::now();
        let drains = async {
            sleep(LEASE / 10).await;
            if taken_away {
                process.lease.fence.close(Instant::now() + LEASE);
            }
        };
        let (attempted, ()) = tokio::join!(process.handle(&record), drains);
        match attempted {
            Attempted::NotStarted if taken_away => {}
            Attempted::StoreUnreachable(_) if !taken_away => {}
            _ => panic!("there is no answer in time"),
        }
        process.store.late.store(false, Ordering::SeqCst);
        sleep((lease * 7 / 10).saturating_sub(since.elapsed())).await;
        assert!(matches!(next.handle(&record).await, Attempted::Handled));
        assert!(since.elapsed() < lease, "before its lease has lapsed");
    }
}

// P8
#[tokio::test]
async fn what_the_store_did_before_it_failed_starts_no_handler_afterwards() {
    let process = Process::new(|it| it.lease(LEASE * 4));
    let [one, two, three] = ["1", "2", "3"].map(|id| record(id, ""));
    process.store.slow.store(true, Ordering::SeqCst);
    let others = async {
        sleep(LEASE / 10).await;
        process.store.slow.store(false, Ordering::SeqCst);
        let fail = |fails| {
            process.store.claims_fail.store(fails, Ordering::SeqCst);
            process
                .store
                .completions_fail
                .store(fails, Ordering::SeqCst);
        };
        fail(true);
        let attempted = process.handle(&two).await;
        assert!(matches!(attempted, Attempted::StoreUnreachable(_)));
        // The answer to the first claim comes meanwhile.
        sleep(LEASE * 3 / 2).await;
        assert_eq!(process.handled(), 0, "it cannot be completed");
        fail(false);
        process.handle(&three).await
    };
    let (first, third) = tokio::join!(process.handle(&one), others);
    assert!(matches!(first, Attempted::Handled));
    assert!(matches!(third, Attempted::Handled));
}

// P8
#[tokio::test]
async fn while_the_store_is_away_records_wait_and_nothing_is_handled() {
    let process = Process::new(same);
    let record = record("1", "");
    for switch in [
        &process.store.claims_fail,
        &process.store.hangs,
        &process.store.refuses,
    ] {
        switch.store(true, Ordering::SeqCst);
        let attempted = process.handle(&record).await;
        assert!(matches!(attempted, Attempted::StoreUnreachable(_)));
        assert!(process.claims().down().is_some());
        switch.store(false, Ordering::SeqCst);
    }
    assert_eq!(process.handled(), 0);
    // A claim that hung may have been granted.
    assert!(matches!(process.handle(&record).await, Attempted::Handled));
    assert!(process.claims().down().is_none());
}

#[tokio::test]
async fn while_the_store_is_away_records_are_handled_anyway_if_that_is_wanted() {
    let process = Process::new(|it| it.on_unreachable(Unreachable::Process));
    process.store.claims_fail.store(true, Ordering::SeqCst);
    for _ in 0..20 {
        let attempted = process.handle(&record("1", "")).await;
        assert!(matches!(attempted, Attempted::Handled));
    }
    assert_eq!(
        (process.handled(), process.claims().possible_repeats()),
        (20, 20)
    );
    assert_eq!(
        process.store.asked.load(Ordering::SeqCst),
        1,
        "not for each record"
    );
}

#[tokio::test]
async fn the_run_is_to_stop_when_the_store_was_away_for_as_long_as_allowed_or_refuses() {
    let after = LEASE / 3;
    let process = Process::new(|it| it.on_unreachable(Unreachable::Stop { after }));
    process.store.claims_fail.store(true, Ordering::SeqCst);
    process.handle(&record("1", "")).await;
    assert!(process.claims().is_to_stop().is_none());
    sleep(after).await;
    assert!(
        process
            .claims()
            .is_to_stop()
            .is_some_and(|it| it.error.contains("switched off"))
    );
    process.store.claims_fail.store(false, Ordering::SeqCst);
    process.handle(&record("1", "")).await;
    assert!(process.claims().is_to_stop().is_none());
    let after = Duration::from_secs(3_600);
    let process = Process::new(|it| it.on_unreachable(Unreachable::Stop { after }));
    process.store.refuses.store(true, Ordering::SeqCst);
    process.handle(&record("2", "")).await;
    assert!(
        process
            .claims()
            .is_to_stop()
            .is_some_and(|it| it.error.contains("no such table"))
    );
}

#[tokio::test]
async fn the_same_id_with_other_content_is_no_repeat() {
    let process = Process::new(Idempotency::fingerprint);
    process.handle(&record("1", "ten")).await;
    assert!(matches!(
        process.handle(&record("1", "ten")).await,
        Attempted::Duplicate
    ));
    let other = process.handle(&record("1", "eleven")).await;
    assert!(matches!(other, Attempted::IdConflict));
    let null = Message::builder().header("messageId", "2");
    process.handle(&null.record()).await;
    assert!(matches!(
        process.handle(&record("2", "")).await,
        Attempted::IdConflict
    ));
    assert_eq!((process.handled(), process.claims().id_conflicts()), (2, 2));
}

#[tokio::test]
async fn what_was_done_without_a_fingerprint_has_no_other_content() {
    let before = Process::new(same);
    let after = Process::beside(Arc::clone(&before.store), Idempotency::fingerprint);
    before.handle(&record("1", "ten")).await;
    assert!(matches!(
        after.handle(&record("1", "ten")).await,
        Attempted::Duplicate
    ));
}

#[tokio::test]
async fn groups_and_namespaces_do_not_suppress_each_others_messages() {
    let one = Process::new(same);
    let other = Process::beside(Arc::clone(&one.store), |it| it.namespace("other"));
    one.handle(&record("1", "")).await;
    assert!(matches!(
        other.handle(&record("1", "")).await,
        Attempted::Handled
    ));
}

#[tokio::test]
async fn the_same_id_in_two_topics_is_one_message_of_the_group_or_two_as_chosen() {
    for (scope, both) in [(IdScope::Group, false), (IdScope::Topic, true)] {
        let process = Process::new(|it| it.scope(scope));
        assert_eq!(process.claims().scope(), scope);
        let of = |topic: &str| Message::builder().topic(topic).header("messageId", "1");
        process.handle(&of("orders").record()).await;
        let other = process.handle(&of("invoices").record()).await;
        assert_eq!(matches!(other, Attempted::Handled), both);
        assert_eq!(matches!(other, Attempted::Duplicate), !both);
        // From the dead letters it belongs where it was first.
        let back = of("orders.dlq")
            .header("originalTopic", "orders")
            .header("originalPartition", "0")
            .header("originalOffset", "0")
            .header("originalTimestamp", "0");
        let again = process.handle(&back.record()).await;
        assert!(matches!(again, Attempted::Duplicate));
    }
}

#[tokio::test]
async fn a_panicking_id_function_leaves_nothing_behind() {
    let calls = Arc::new(Mutex::new(0));
    let count = Arc::clone(&calls);
    let process = Process::new(|it| {
        it.id(IdSource::function(move |_: &Record| {
            let mut calls = count.lock().expect("it is dropped before the panic");
            *calls += 1;
            let first = *calls == 1;
            drop(calls);
            assert!(!first, "on purpose");
            Some("id")
        }))
    });
    let record = record("1", "");
    let mut slot: Slot<_> = Box::pin(Some(process.handle(&record)));
    assert!(matches!(
        finish_in_time(&mut slot, None).await,
        Attempted::Panicked(_)
    ));
    assert!(matches!(process.handle(&record).await, Attempted::Handled));
}
