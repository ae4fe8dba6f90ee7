//! What every [`Store`] has to do, as a test that any implementation can run. Feature `test-kit`.
//!
//! ```
//! # async fn test() {
//! use std::sync::Arc;
//! use reliable_consumer::idempotency::{MemoryStore, contract};
//!
//! contract::check(Arc::new(MemoryStore::new(10_000))).await;
//! # }
//! # tokio::runtime::Builder::new_multi_thread().enable_time().build().expect("a runtime").block_on(test());
//! ```
//!
//! It uses ids of its own, and may run against a store that is in use, and several times at once.

use std::{collections::HashSet, sync::Arc, time::Duration};

use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use super::{Claim, Fingerprint, Id, Store, Token, Update};

/// Checks a store with leases of 1 s, in about 7 s.
///
/// # Panics
///
/// If the store breaks a rule, or fails.
pub async fn check(store: Arc<dyn Store>) {
    check_with_unit(store, Duration::from_secs(1)).await;
}

/// As [`check`], with leases of `unit`: longer where a call takes more than a tenth of a second.
///
/// # Panics
///
/// If the store breaks a rule, or fails.
pub async fn check_with_unit(store: Arc<dyn Store>, unit: Duration) {
    let trial = &Trial {
        store,
        unit,
        run: Token::unique().to_string(),
    };
    tokio::join!(
        trial.a_claim_is_one_holders_until_it_is_released(),
        trial.a_lapsed_lease_frees_the_id(),
        trial.a_renewed_lease_lasts(),
        trial.what_is_done_is_remembered_for_its_time(),
        trial.a_completion_can_be_asked_for_again(),
        trial.a_stale_token_changes_nothing(),
        trial.a_token_is_good_for_its_id_only(),
        trial.ids_are_told_apart_whatever_bytes_they_have(),
        trial.of_a_hundred_claimants_one_wins(),
    );
    // After the others: it removes what they look at when its time is over.
    trial.cleaning_removes_nothing_that_stands().await;
}

struct Trial {
    store: Arc<dyn Store>,
    unit: Duration,
    run: String,
}

impl Trial {
    fn id(&self, name: impl AsRef<[u8]>) -> Id {
        Id::new("contract", &self.run, name)
    }

    async fn claim(&self, id: &Id, units: u32) -> Claim {
        let claim = self.store.claim(id, self.unit * units).await;
        claim.unwrap_or_else(|error| panic!("{id:?} could not be claimed: {error}"))
    }

    async fn claimed(&self, id: &Id, units: u32) -> Token {
        match self.claim(id, units).await {
            Claim::Claimed(token) => token,
            other => panic!("{id:?} is free, but the answer to its claim was {other:?}"),
        }
    }

    async fn renew(&self, id: &Id, token: &Token, units: u32) -> Update {
        let update = self.store.renew(id, token, self.unit * units).await;
        update.unwrap_or_else(|error| panic!("{id:?} could not be renewed: {error}"))
    }

    async fn complete(
        &self,
        id: &Id,
        token: &Token,
        units: u32,
        fingerprint: Option<Fingerprint>,
    ) -> Update {
        let update = self
            .store
            .complete(id, token, self.unit * units, fingerprint)
            .await;
        update.unwrap_or_else(|error| panic!("{id:?} could not be completed: {error}"))
    }

    async fn release(&self, id: &Id, token: &Token) -> Update {
        let update = self.store.release(id, token).await;
        update.unwrap_or_else(|error| panic!("{id:?} could not be released: {error}"))
    }

    async fn is_in_progress(&self, id: &Id, when: &str) {
        let claim = self.claim(id, 1).await;
        assert!(
            matches!(claim, Claim::InProgress { .. }),
            "{when}, {id:?} is in progress, but the answer to a claim was {claim:?}"
        );
    }

    async fn is_done(&self, id: &Id, fingerprint: Option<Fingerprint>, when: &str) {
        let claim = self.claim(id, 1).await;
        assert_eq!(claim, Claim::Done { fingerprint }, "{when}, {id:?} is done");
    }

    /// Until leases of so many units, made before, have lapsed for certain.
    async fn pass(&self, units: u32) {
        sleep(self.unit * units + self.unit / 4).await;
    }

    async fn a_claim_is_one_holders_until_it_is_released(&self) {
        let id = self.id("exclusive");
        let token = self.claimed(&id, 10).await;
        let claim = self.claim(&id, 10).await;
        let Claim::InProgress { lapses_in } = claim else {
            panic!("while its lease lasts, a second claim of {id:?} got {claim:?}");
        };
        assert!(
            lapses_in > self.unit * 5 && lapses_in <= self.unit * 10,
            "a lease of {:?} just taken lapses in {lapses_in:?}",
            self.unit * 10
        );
        assert_eq!(
            self.release(&id, &token).await,
            Update::Applied,
            "{id:?} was held"
        );
        let second = self.claimed(&id, 10).await;
        assert_ne!(second, token, "two claims have the same token");
        assert_eq!(
            self.release(&id, &token).await,
            Update::Stale,
            "{id:?} was released with the token of an earlier claim"
        );
        self.is_in_progress(&id, "after a release with an older token")
            .await;
    }

    async fn a_lapsed_lease_frees_the_id(&self) {
        let id = self.id("lapsed");
        let start = Instant::now();
        let _ = self.claimed(&id, 1).await;
        let second = self.claim(&id, 1).await;
        assert!(
            matches!(second, Claim::InProgress { .. }) || start.elapsed() >= self.unit,
            "before its lease has lapsed, {id:?} is in progress, but the answer to a claim was {second:?}"
        );
        self.pass(1).await;
        let _ = self.claimed(&id, 1).await;
    }

    async fn a_renewed_lease_lasts(&self) {
        let renew = async |id: &Id, token: &Token| self.renew(id, token, 60).await;
        let (id, token) = self.in_time("renewed", renew).await;
        self.is_in_progress(&id, "after its first lease, which was renewed")
            .await;
        let update = self.renew(&id, &token, 1).await;
        assert_eq!(update, Update::Applied, "{id:?} was held");
        self.pass(1).await;
        let _ = self.claimed(&id, 1).await;
    }

    async fn what_is_done_is_remembered_for_its_time(&self) {
        // Both ways: once it is done, its lease has no say.
        let fingerprint = Some(Fingerprint::of(b"content"));
        let complete =
            async |id: &Id, token: &Token| self.complete(id, token, 60, fingerprint).await;
        let (long, _) = self.in_time("done for long", complete).await;
        self.is_done(&long, fingerprint, "after its lease").await;

        let short = self.id("done for short");
        let token = self.claimed(&short, 60).await;
        let start = Instant::now();
        let update = self.complete(&short, &token, 1, None).await;
        assert_eq!(update, Update::Applied, "{short:?} was held");
        let claim = self.claim(&short, 1).await;
        assert!(
            claim == Claim::Done { fingerprint: None } || start.elapsed() >= self.unit,
            "{short:?} is done, but the answer to a claim was {claim:?}"
        );
        self.pass(1).await;
        let again = self.claimed(&short, 60).await;
        let update = self.complete(&short, &again, 60, fingerprint).await;
        assert_eq!(update, Update::Applied, "{short:?} was held again");
        self.is_done(&short, fingerprint, "done anew with a fingerprint")
            .await;
    }

    /// Changes a claim before its lease has lapsed, and lets that time pass. A machine that was too busy for that has
    /// proved nothing: it is given a longer lease.
    async fn in_time(
        &self,
        name: &str,
        change: impl AsyncFn(&Id, &Token) -> Update,
    ) -> (Id, Token) {
        for lease in [1, 2, 4, 8, 16] {
            let id = self.id(format!("{name}, {lease}"));
            let start = Instant::now();
            let token = self.claimed(&id, lease).await;
            let update = change(&id, &token).await;
            if update == Update::Stale && start.elapsed() >= self.unit * lease {
                continue;
            }
            assert_eq!(update, Update::Applied, "{id:?} was held");
            self.pass(lease).await;
            return (id, token);
        }
        panic!(
            "a claim and a change take longer than a lease of {:?}",
            self.unit * 16
        );
    }

    async fn a_completion_can_be_asked_for_again(&self) {
        let id = self.id("completed twice");
        let token = self.claimed(&id, 10).await;
        for _ in 0..2 {
            let update = self.complete(&id, &token, 10, None).await;
            assert_eq!(
                update,
                Update::Applied,
                "{id:?} was completed with this token"
            );
        }
        self.is_done(&id, None, "after all that").await;
    }

    async fn a_stale_token_changes_nothing(&self) {
        let id = self.id("stale");
        let never = Token::unique();
        self.all_stale(&id, &never, "never claimed").await;

        let lapsed = self.claimed(&id, 1).await;
        self.pass(1).await;
        self.all_stale(&id, &lapsed, "lapsed").await;
        let held = self.claimed(&id, 60).await;
        for (token, which) in [
            (&never, "never claimed"),
            (&lapsed, "claimed by another since"),
        ] {
            self.all_stale(&id, token, which).await;
            self.is_in_progress(&id, "after somebody used a stale token")
                .await;
        }
        let update = self.complete(&id, &held, 60, None).await;
        assert_eq!(
            update,
            Update::Applied,
            "{id:?} is still held, whatever was done with stale tokens"
        );

        self.all_stale(&id, &lapsed, "done by another").await;
        // What is done is not the claim any more.
        assert_eq!(
            self.renew(&id, &held, 1).await,
            Update::Stale,
            "{id:?} is done"
        );
        assert_eq!(
            self.release(&id, &held).await,
            Update::Stale,
            "{id:?} is done"
        );
        self.pass(1).await;
        self.is_done(&id, None, "after all that").await;

        let id = self.id("released");
        let released = self.claimed(&id, 10).await;
        assert_eq!(
            self.release(&id, &released).await,
            Update::Applied,
            "{id:?} was held"
        );
        self.all_stale(&id, &released, "released").await;
        let _ = self.claimed(&id, 1).await;
    }

    async fn all_stale(&self, id: &Id, token: &Token, which: &str) {
        let renewed = self.renew(id, token, 10).await;
        assert_eq!(
            renewed,
            Update::Stale,
            "{id:?} was renewed with a token that was {which}"
        );
        let fingerprint = Some(Fingerprint::of(which.as_bytes()));
        let completed = self.complete(id, token, 10, fingerprint).await;
        assert_eq!(
            completed,
            Update::Stale,
            "{id:?} was completed with a token that was {which}"
        );
        let released = self.release(id, token).await;
        assert_eq!(
            released,
            Update::Stale,
            "{id:?} was released with a token that was {which}"
        );
    }

    async fn a_token_is_good_for_its_id_only(&self) {
        let (one, other) = (self.id("one"), self.id("other"));
        let token = self.claimed(&one, 10).await;
        let _ = self.claimed(&other, 10).await;
        self.all_stale(&other, &token, "another id's").await;
        self.is_in_progress(&other, "after somebody used another's token")
            .await;
        assert_eq!(
            self.release(&one, &token).await,
            Update::Applied,
            "{one:?} was held"
        );
    }

    async fn cleaning_removes_nothing_that_stands(&self) {
        let (held, done, over) = (self.id("held"), self.id("done"), self.id("over"));
        let _ = self.claimed(&held, 60).await;
        let token = self.claimed(&done, 60).await;
        assert_eq!(
            self.complete(&done, &token, 60, None).await,
            Update::Applied
        );
        let _ = self.claimed(&over, 1).await;
        self.pass(1).await;
        for at_most in [1, 100, 100] {
            let removed = self.store.remove_expired(at_most).await;
            let removed = removed.unwrap_or_else(|error| panic!("cleaning failed: {error}"));
            assert!(
                removed <= at_most.into(),
                "{removed} entries were removed, where {at_most} were allowed"
            );
        }
        self.is_in_progress(&held, "after cleaning").await;
        self.is_done(&done, None, "after cleaning").await;
        let _ = self.claimed(&over, 1).await;
    }

    async fn ids_are_told_apart_whatever_bytes_they_have(&self) {
        let mut ids: Vec<Id> = [
            "", " ", "a", "A", "a ", " a", "a\0", "\0", "\0a", "á", "a\u{301}", "ﬀ", "ff", "'",
            "\"", "\\", "%", "_", ":", "#", "{a}", "a\n", "a\r\n", "NULL", "'; --", "0", "00",
            "0.0",
        ]
        .iter()
        .map(|it| self.id(it))
        .collect();
        ids.extend((0..=255).map(|byte| self.id([b'=', byte])));
        ids.extend(
            [100, 199, 200, 201, 255, 256, 257, 10_000, 1_000_000]
                .map(|length| self.id("x".repeat(length))),
        );
        let distinct: HashSet<&Id> = ids.iter().collect();
        assert_eq!(distinct.len(), ids.len(), "the kit's ids differ");
        for id in &ids {
            let _ = self.claimed(id, 60).await;
        }
        self.is_in_progress(&ids[0], "while others were claimed")
            .await;
    }

    async fn of_a_hundred_claimants_one_wins(&self) {
        let id = self.id("wanted");
        let first = self.claimed(&id, 1).await;
        self.pass(1).await;
        let second = self.one_of_a_hundred(&id, 60).await;
        assert_ne!(first, second, "two claims have the same token");
        assert_eq!(
            self.release(&id, &second).await,
            Update::Applied,
            "{id:?} was held"
        );
        let third = self.one_of_a_hundred(&id, 60).await;
        assert_eq!(
            self.complete(&id, &third, 60, None).await,
            Update::Applied,
            "{id:?} was held"
        );
    }

    async fn one_of_a_hundred(&self, id: &Id, units: u32) -> Token {
        let mut claimants = JoinSet::new();
        for _ in 0..100 {
            let (store, id, lease) = (self.store.clone(), id.clone(), self.unit * units);
            claimants.spawn(async move { store.claim(&id, lease).await });
        }
        let mut winners = Vec::new();
        while let Some(claim) = claimants.join_next().await {
            match claim.expect("a store does not panic") {
                Ok(Claim::Claimed(token)) => winners.push(token),
                Ok(Claim::InProgress { lapses_in }) if lapses_in <= self.unit * units => {}
                other => panic!("{id:?} is wanted by a hundred, and one got {other:?}"),
            }
        }
        assert_eq!(
            winners.len(),
            1,
            "so many of a hundred claimants won {id:?}"
        );
        winners[0]
    }
}
