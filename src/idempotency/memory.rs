//! A store in this process's memory.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use tokio::time::Instant;

use super::{Claim, Fingerprint, Id, Reply, Store, StoreError, Token, Update};

/// Remembers ids in memory: for one process, and for tests.
///
/// It suppresses what comes twice while the process lives: what a producer sent twice, a redrive, what comes again after a
/// rebalance that gave a partition away and back. It survives nothing: after a crash or a restart, and in another
/// process of the group, every message is new.
///
/// It keeps at most as many ids as it was made for, at some 400 bytes each. When it is full, the done one that would be
/// forgotten first is forgotten early; claims never are, and [`StoreError::Unavailable`] is the answer when there is
/// nothing but claims. Its clock is tokio's, which tests can pause.
///
/// ```
/// use std::time::Duration;
/// use reliable_consumer::idempotency::{Claim, Id, MemoryStore, Store, Update};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = MemoryStore::new(100_000);
/// let id = Id::new("shop", "billing", "order-17");
/// let Claim::Claimed(token) = store.claim(&id, Duration::from_secs(10)).await? else {
///     unreachable!("nobody else is here");
/// };
/// let day = Duration::from_secs(24 * 3600);
/// assert_eq!(store.complete(&id, &token, day, None).await?, Update::Applied);
/// assert_eq!(store.claim(&id, day).await?, Claim::Done { fingerprint: None });
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct MemoryStore {
    capacity: usize,
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    by_id: HashMap<Id, Entry>,
    /// Every entry of `by_id` at its place in one of the two, by when its time is over.
    claims: BTreeMap<Place, Id>,
    done: BTreeMap<Place, Id>,
    placed: u64,
}

#[derive(Debug)]
struct Entry {
    token: Token,
    /// `None` while it is a claim.
    done: Option<Option<Fingerprint>>,
    place: Place,
}

/// When its time is over, and a count that tells apart those that end together.
type Place = (Instant, u64);

impl MemoryStore {
    /// A store of at most `capacity` ids, in progress and done; 0 is taken for 1.
    ///
    /// Make it larger than the number of messages that come while an id is worth remembering.
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity: capacity.max(1),
            entries: Mutex::default(),
        }
    }

    /// How many ids it holds. Those whose time is over count until their room is needed, or they are removed.
    pub fn len(&self) -> usize {
        self.lock().by_id.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries
            .lock()
            .expect("nothing panics while it holds the lock")
    }

    fn claim_now(&self, id: &Id, lease: Duration) -> Result<Claim, StoreError> {
        let now = Instant::now();
        let mut entries = self.lock();
        match entries.by_id.get(id) {
            Some(entry) if entry.place.0 > now => {
                return Ok(match entry.done {
                    Some(fingerprint) => Claim::Done { fingerprint },
                    None => Claim::InProgress {
                        lapses_in: entry.place.0 - now,
                    },
                });
            }
            Some(_) => entries.remove(id),
            None if entries.by_id.len() >= self.capacity => entries.make_room(now)?,
            None => {}
        }
        let token = Token::unique();
        entries.insert(id.clone(), token, None, end(now, lease));
        Ok(Claim::Claimed(token))
    }

    /// Replaces an entry that is the caller's.
    fn change(
        &self,
        id: &Id,
        token: &Token,
        done: Option<Option<Fingerprint>>,
        time: Duration,
    ) -> Update {
        let now = Instant::now();
        let mut entries = self.lock();
        if !entries.is_held(id, token, done.is_some(), now) {
            return Update::Stale;
        }
        entries.remove(id);
        entries.insert(id.clone(), *token, done, end(now, time));
        Update::Applied
    }
}

impl Entries {
    /// Whether `token` is good for `id`; `done_too`: also if that is what is done.
    fn is_held(&self, id: &Id, token: &Token, done_too: bool, now: Instant) -> bool {
        self.by_id.get(id).is_some_and(|it| {
            it.token == *token && it.place.0 > now && (done_too || it.done.is_none())
        })
    }

    fn insert(&mut self, id: Id, token: Token, done: Option<Option<Fingerprint>>, until: Instant) {
        let place = (until, self.placed);
        self.placed += 1;
        let places = if done.is_some() {
            &mut self.done
        } else {
            &mut self.claims
        };
        places.insert(place, id.clone());
        self.by_id.insert(id, Entry { token, done, place });
    }

    fn remove(&mut self, id: &Id) {
        if let Some(entry) = self.by_id.remove(id) {
            let places = if entry.done.is_some() {
                &mut self.done
            } else {
                &mut self.claims
            };
            places.remove(&entry.place);
        }
    }

    /// Removes an entry whose time is over, or the done one that comes next.
    fn make_room(&mut self, now: Instant) -> Result<(), StoreError> {
        let lapsed = self.claims.iter().next().filter(|(it, _)| it.0 <= now);
        let id = lapsed.or_else(|| self.done.iter().next());
        let id = id.map(|(_, id)| id.clone()).ok_or_else(|| {
            StoreError::unavailable(format!(
                "all {} ids that the memory store may hold are in progress: make it larger",
                self.by_id.len()
            ))
        })?;
        self.remove(&id);
        Ok(())
    }

    fn remove_expired(&mut self, at_most: u32, now: Instant) -> u64 {
        let over = |places: &BTreeMap<Place, Id>| {
            let first = places.iter().next().filter(|(it, _)| it.0 <= now);
            first.map(|(_, id)| id.clone())
        };
        let mut removed = 0;
        while removed < u64::from(at_most) {
            let Some(id) = over(&self.claims).or_else(|| over(&self.done)) else {
                break;
            };
            self.remove(&id);
            removed += 1;
        }
        removed
    }
}

/// Later than any clock goes is a century from now.
fn end(now: Instant, time: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 366 * 24 * 3600);
    now + time.min(CENTURY)
}

impl Store for MemoryStore {
    fn claim<'a>(&'a self, id: &'a Id, lease: Duration) -> Reply<'a, Claim> {
        Box::pin(async move { self.claim_now(id, lease) })
    }

    fn renew<'a>(&'a self, id: &'a Id, token: &'a Token, lease: Duration) -> Reply<'a, Update> {
        Box::pin(async move { Ok(self.change(id, token, None, lease)) })
    }

    fn complete<'a>(
        &'a self,
        id: &'a Id,
        token: &'a Token,
        keep_for: Duration,
        fingerprint: Option<Fingerprint>,
    ) -> Reply<'a, Update> {
        Box::pin(async move { Ok(self.change(id, token, Some(fingerprint), keep_for)) })
    }

    fn release<'a>(&'a self, id: &'a Id, token: &'a Token) -> Reply<'a, Update> {
        Box::pin(async move {
            let mut entries = self.lock();
            if !entries.is_held(id, token, false, Instant::now()) {
                return Ok(Update::Stale);
            }
            entries.remove(id);
            Ok(Update::Applied)
        })
    }

    fn remove_expired(&self, at_most: u32) -> Reply<'_, u64> {
        Box::pin(async move { Ok(self.lock().remove_expired(at_most, Instant::now())) })
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;

    const LONG: Duration = Duration::from_secs(600);
    const SHORT: Duration = Duration::from_millis(20);

    fn id(n: usize) -> Id {
        Id::new("", "memory", n.to_string())
    }

    async fn claimed(store: &MemoryStore, n: usize, lease: Duration) -> Token {
        match store.claim(&id(n), lease).await {
            Ok(Claim::Claimed(token)) => token,
            other => panic!("{n} is free, not {other:?}"),
        }
    }

    async fn done(store: &MemoryStore, n: usize, keep_for: Duration) {
        let token = claimed(store, n, LONG).await;
        let update = store.complete(&id(n), &token, keep_for, None).await;
        assert_eq!(update.expect("memory answers"), Update::Applied);
    }

    async fn is_done(store: &MemoryStore, n: usize) -> bool {
        let claim = store.claim(&id(n), SHORT).await;
        matches!(claim, Ok(Claim::Done { .. }))
    }

    #[tokio::test]
    async fn a_full_store_forgets_first_what_it_would_forget_next_and_never_a_claim() {
        let store = MemoryStore::new(3);
        let running = claimed(&store, 0, LONG).await;
        done(&store, 1, LONG * 3).await;
        done(&store, 2, LONG * 2).await;

        let newest = claimed(&store, 3, LONG).await;

        assert_eq!(store.len(), 3);
        assert!(is_done(&store, 1).await);
        let _ = claimed(&store, 2, LONG).await; // In the place of 1.
        for (n, token) in [(0, running), (3, newest)] {
            let update = store.renew(&id(n), &token, LONG).await;
            assert_eq!(update.expect("memory answers"), Update::Applied);
        }
        let refused = store.claim(&id(4), LONG).await;
        let refused = refused.expect_err("three are in progress");
        assert!(refused.is_transient(), "{refused}");
    }

    #[tokio::test]
    async fn claims_that_lapsed_make_room_before_what_is_done() {
        let store = MemoryStore::new(2);
        done(&store, 0, LONG).await;
        let _ = claimed(&store, 1, SHORT).await;
        sleep(SHORT * 2).await;
        let _ = claimed(&store, 2, LONG).await;
        assert!(is_done(&store, 0).await);
    }

    #[tokio::test]
    async fn what_is_over_is_removed_in_batches_and_nothing_else() {
        let store = MemoryStore::new(100);
        for n in 0..10 {
            done(&store, n, SHORT).await;
            let _ = claimed(&store, 10 + n, SHORT).await;
        }
        done(&store, 20, LONG).await;
        let _ = claimed(&store, 21, LONG).await;
        sleep(SHORT * 2).await;
        let mut removed = Vec::new();
        for _ in 0..4 {
            removed.push(store.remove_expired(8).await.expect("memory answers"));
        }
        assert_eq!((removed, store.len()), (vec![8, 8, 4, 0], 2));
    }
}
