//! Real broker, real Redis: messages that come twice take effect once, whatever happens to consumers and store. The process
//! that is killed is this test binary, started again for the one test that is ignored otherwise.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    collections::BTreeMap,
    env,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering as Atomic},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use common::{Changes, PATIENCE, Running, Seen, all_committed, committed, consumer, millis, until};
use reliable_consumer::{
    BuildError, Builder, DeadLetter, Event, Events, Guarantee, HandlerResult, HoldKey, Message,
    Ordering, OutageBreaker, Report, Retry, RetryTopics, RunErrorKind, Text,
    idempotency::{
        Claim, Fingerprint, Id, IdSource, Idempotency, MemoryStore, RedisStore, Reply, Store,
        Token, Unreachable, UnsafeServer, Update,
    },
    permanent,
};
use reliable_consumer_testing::{
    Cluster, Record, Service, ServiceKind, cluster, own_service, service, unique,
};

const SECOND: Duration = Duration::from_secs(1);
const LEASE: Duration = Duration::from_secs(3);

/// A topic, a group, and the Redis that all tests share.
struct World {
    cluster: Cluster,
    url: String,
    topic: String,
    group: String,
    effects: Seen<String>,
}

impl World {
    fn new(partitions: i32) -> Option<Self> {
        let url = tokio::task::block_in_place(|| service(ServiceKind::Redis))?.url();
        Self::on(url, partitions)
    }

    fn on(url: &str, partitions: i32) -> Option<Self> {
        let cluster = cluster()?;
        Some(Self {
            topic: cluster.create_topic("payments", partitions, &[]),
            group: unique("group"),
            url: url.into(),
            effects: Seen::default(),
            cluster,
        })
    }

    fn store(&self) -> RedisStore {
        RedisStore::connect(&self.url).unwrap()
    }

    fn consumer(&self, idempotency: impl Into<Idempotency>) -> Builder {
        consumer(&self.cluster, &self.group)
            .topic(&self.topic)
            .ordering(Ordering::Unordered)
            .idempotency(idempotency)
    }

    /// Has its effect after so long.
    fn start(&self, builder: Builder, work: Duration) -> Running {
        let effects = self.effects.clone();
        let handler = async move |message: &Message<Text>| -> HandlerResult {
            tokio::time::sleep(work).await;
            effects.note(message.payload().to_string());
            Ok(())
        };
        Running::start(builder, handler)
    }

    /// What took effect, and how often.
    fn counted(&self) -> BTreeMap<String, usize> {
        let mut counted = BTreeMap::new();
        for effect in self.effects.all() {
            *counted.entry(effect).or_default() += 1;
        }
        counted
    }

    fn all_once(&self, count: usize) {
        let counted = self.counted();
        assert_eq!(counted.len(), count, "messages without an effect");
        let more: Vec<_> = counted.iter().filter(|(_, count)| **count > 1).collect();
        assert!(more.is_empty(), "effects that happened again: {more:?}");
    }

    fn all_committed(&self) {
        tokio::task::block_in_place(|| all_committed(&self.cluster, &self.group, &self.topic));
    }
}

fn payment(n: usize) -> Record {
    Record::value(n.to_string())
        .key(format!("account {}", n % 50))
        .header("messageId", format!("payment {n}"))
}

/// Twice each, the second time soon after and in another partition.
fn sent_twice(count: usize) -> impl Iterator<Item = Record> {
    (0..count).flat_map(|n| [0, 1].map(|partition| payment(n).partition(partition)))
}

async fn next(events: &mut Events, wanted: impl Fn(&Event) -> bool) {
    let found = async {
        while let Some(event) = events.next().await {
            if wanted(&event) {
                return;
            }
        }
        panic!("the run is over");
    };
    let found = tokio::time::timeout(PATIENCE, found).await;
    found.expect("it is told of");
}

// P7
#[tokio::test(flavor = "multi_thread")]
async fn what_a_producer_sends_twice_takes_effect_once_over_all_consumers_of_a_group() {
    let Some(world) = World::new(2) else { return };
    let changes = [Changes::default(), Changes::default()];
    let running: Vec<_> = changes
        .iter()
        .map(|changes| {
            let builder = world
                .consumer(world.store())
                .rebalance_listener(changes.clone());
            world.start(builder, millis(2))
        })
        .collect();
    until("one partition each", || {
        changes.iter().all(|it| it.owned() == 1)
    })
    .await;
    world.cluster.produce(&world.topic, sent_twice(500));
    world.all_committed();
    let mut reports = Vec::new();
    for running in running {
        reports.push(running.stop().await);
    }
    world.all_once(500);
    let sum = |of: fn(&Report) -> u64| reports.iter().map(of).sum::<u64>();
    assert_eq!(sum(|it| it.handled), 500);
    assert_eq!(sum(|it| it.duplicates.message_id), 500);
    assert_eq!(sum(|it| it.duplicates.total()), 500);
    assert_eq!(sum(|it| it.possible_repeats), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_are_known_by_a_header_their_key_or_a_function_and_else_by_their_place() {
    let Some(world) = World::new(2) else { return };
    let records = (0..20).flat_map(|n| {
        [0, 1].map(|partition| {
            Record::value(n.to_string())
                .key(format!("key {n}"))
                .header("payment-id", [b'#', n as u8])
                .partition(partition)
        })
    });
    world.cluster.produce(&world.topic, records);
    let function = IdSource::function(|record: &reliable_consumer::Record| {
        record.value().map(|value| value.to_vec())
    });
    for (source, repeats) in [
        (IdSource::header("payment-id"), true),
        (IdSource::Key, true),
        (function, true),
        (IdSource::MessageId, false),
    ] {
        let world = World {
            cluster: cluster().unwrap(),
            url: world.url.clone(),
            topic: world.topic.clone(),
            group: unique("group"),
            effects: Seen::default(),
        };
        let idempotency = Idempotency::new(world.store()).id(source.clone());
        let running = world.start(world.consumer(idempotency), Duration::ZERO);
        world.all_committed();
        let report = running.stop().await;
        let expected = if repeats { 20 } else { 0 };
        assert_eq!(report.duplicates.total(), expected, "{source:?}");
        let by_source = match source {
            IdSource::Header(_) => report.duplicates.header,
            IdSource::Key => report.duplicates.key,
            IdSource::Function(_) => report.duplicates.function,
            _ => report.duplicates.message_id,
        };
        assert_eq!(by_source, expected, "{source:?}");
        assert_eq!(world.effects.len() as u64, 40 - expected);
    }
}

/// A process of the group, which says what it does.
struct Process {
    child: Child,
    lines: mpsc::Receiver<(Instant, String)>,
}

impl Process {
    fn start(world: &World, hangs: bool) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["process", "--exact", "--ignored", "--nocapture"])
            .env("PROCESS_TOPIC", &world.topic)
            .env("PROCESS_GROUP", &world.group)
            .env("PROCESS_HANGS", if hangs { "1" } else { "" })
            .env("REDIS_URL", &world.url)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let _ = sender.send((Instant::now(), line));
            }
        });
        Self { child, lines }
    }

    /// When it has had its effect of this payment.
    fn effect_of(&self, n: usize) -> Instant {
        loop {
            let (at, line) = self.lines.recv_timeout(PATIENCE).expect("it goes on");
            if line.ends_with(&format!("effect {n}")) {
                return at;
            }
        }
    }

    fn kill(mut self) -> Vec<String> {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.lines.iter().map(|(_, line)| line).collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a process of the other tests"]
async fn process() {
    let told = |name: &str| env::var(name).ok();
    let Some(topic) = told("PROCESS_TOPIC") else {
        return;
    };
    let cluster = cluster().unwrap();
    let store = RedisStore::connect(&told("REDIS_URL").unwrap()).unwrap();
    let hangs = told("PROCESS_HANGS").is_some_and(|it| !it.is_empty());
    let consumer = consumer(&cluster, &told("PROCESS_GROUP").unwrap())
        .topic(topic)
        .ordering(Ordering::ByKey)
        .property("group.instance.id", "the-only-one")
        .idempotency(Idempotency::new(store).lease(LEASE))
        .build()
        .unwrap();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        println!("\neffect {}", &**message.payload());
        if hangs && &**message.payload() == "3" {
            std::future::pending::<()>().await;
        }
        Ok(())
    };
    let ended = consumer.run(handler).await;
    ended.unwrap_or_else(|error| panic!("{error}"));
}

// P6
#[tokio::test(flavor = "multi_thread")]
async fn a_message_whose_consumer_is_killed_after_its_effect_comes_again_when_the_lease_is_over() {
    let Some(world) = World::new(1) else { return };
    world.cluster.produce(&world.topic, (0..6).map(payment));
    tokio::task::block_in_place(|| {
        let first = Process::start(&world, true);
        first.effect_of(3);
        // Long enough for a renewal, and for the others to be committed.
        thread::sleep(LEASE / 2);
        let _ = first.kill();
        let killed = Instant::now();
        let second = Process::start(&world, false);
        let again = second.effect_of(3).duration_since(killed);
        assert!(again <= LEASE + SECOND, "it came after {again:?}");
        all_committed(&world.cluster, &world.group, &world.topic);
        let lines = second.kill();
        let effects = lines.iter().filter(|line| line.contains("effect")).count();
        assert_eq!(effects, 0, "the others had taken effect: {lines:?}");
    });
}

// P7
#[tokio::test(flavor = "multi_thread")]
async fn a_message_in_progress_elsewhere_holds_up_its_key_and_neither_a_handler_nor_a_shutdown() {
    let Some(world) = World::new(1) else { return };
    let keyed = |n: usize, key: &str| {
        Record::value(n.to_string())
            .key(key)
            .header("messageId", format!("payment {n}"))
    };
    let busy = [keyed(0, "busy"), keyed(1, "busy")];
    let others = (2..22).map(|n| keyed(n, "other"));
    world
        .cluster
        .produce(&world.topic, busy.into_iter().chain(others));
    let store = world.store();
    let id = Id::new("reliable-consumer", &world.group, "payment 0");
    let claim = store.claim(&id, PATIENCE * 2).await.unwrap();
    assert!(matches!(claim, Claim::Claimed(_)));

    let builder = world
        .consumer(store)
        .ordering(Ordering::ByKey)
        .concurrency(1);
    let running = world.start(builder, Duration::ZERO);
    until("the other key", || world.effects.len() == 20).await;
    // It is looked at now and then, and waits in between.
    let since = Instant::now();
    loop {
        let status = running.handle.status().await.unwrap();
        let partition = &status.partitions[0];
        if (partition.running, partition.retrying) == (0, 1) {
            break;
        }
        assert!(since.elapsed() < PATIENCE, "{partition:?}");
        tokio::time::sleep(millis(5)).await;
    }
    assert_eq!(committed(&world.cluster, &world.group, &world.topic), [0]);
    let since = Instant::now();
    let report = running.stop().await;
    assert!(since.elapsed() < SECOND * 5, "{:?}", since.elapsed());
    assert_eq!((report.unstarted, report.abandoned), (2, 0));
    assert_eq!((report.handled, report.retried), (20, 0));
    assert!(report.postponed > 0);
}

/// What happens to payments that are sent twice while Redis is away for longer than leases last.
struct Away {
    world: World,
    redis: Service,
    letters: String,
}

/// Those that were with one of 8 handlers, which take 5 ms, or on the way to their completion for at most 50 ms.
const IN_PROGRESS: u64 = 8 + 8 * 10;

impl Away {
    fn new() -> Option<Self> {
        let redis = tokio::task::block_in_place(|| own_service(ServiceKind::Redis))?;
        let world = World::on(redis.url(), 2)?;
        let letters = world.cluster.create_topic("letters", 1, &[]);
        Some(Self {
            world,
            redis,
            letters,
        })
    }

    fn start(&self, policy: Unreachable) -> Running {
        let idempotency = Idempotency::new(self.world.store())
            .lease(LEASE)
            .on_unreachable(policy);
        let builder = self
            .world
            .consumer(idempotency)
            .concurrency(8)
            .outage_breaker(OutageBreaker::new().probe_pauses(millis(200), SECOND))
            .retry(Retry::fixed(millis(10)).max_attempts(2))
            .dead_letter(DeadLetter::topic(&self.letters));
        self.world.start(builder, millis(5))
    }

    fn produce(&self, range: std::ops::Range<usize>) {
        let records = range.flat_map(|n| [0, 1].map(|partition| payment(n).partition(partition)));
        self.world.cluster.produce(&self.world.topic, records);
    }

    async fn effects(&self, least: usize) {
        until("effects", || self.world.effects.len() >= least).await;
    }

    /// A repeat is an effect of a message whose completion could not be written.
    fn repeats_are_those_that_were_told_of(&self, count: usize, possible: u64) {
        let counted = self.world.counted();
        assert_eq!(counted.len(), count, "messages without an effect");
        let more = self.world.effects.len() - count;
        assert!(
            more as u64 <= possible,
            "{more} repeats, where {possible} were possible"
        );
        assert!(self.world.cluster.read_all(&self.letters).is_empty());
    }
}

// P8
#[tokio::test(flavor = "multi_thread")]
async fn while_redis_is_away_records_wait_and_none_is_dropped_dead_lettered_or_handled_twice() {
    let Some(mut away) = Away::new() else { return };
    away.produce(0..400);
    let running = away.start(Unreachable::Wait);
    let mut events = running.handle.events().unwrap();
    away.effects(100).await;
    tokio::task::block_in_place(|| away.redis.stop());
    next(&mut events, |it| {
        matches!(it, Event::IdempotencyStoreDown { .. })
    })
    .await;
    tokio::time::sleep(LEASE * 2).await;
    let status = running.handle.status().await.unwrap().idempotency.unwrap();
    assert!(status.down_for.is_some_and(|it| it > LEASE) && status.error.is_some());
    let before = away.world.effects.len();
    away.produce(400..500);
    tokio::time::sleep(SECOND).await;
    assert_eq!(
        away.world.effects.len(),
        before,
        "nothing is handled meanwhile"
    );

    tokio::task::block_in_place(|| away.redis.start());
    next(&mut events, |it| {
        matches!(it, Event::IdempotencyStoreUp { .. })
    })
    .await;
    away.world.all_committed();
    let status = running.handle.status().await.unwrap().idempotency.unwrap();
    assert_eq!((status.down_for, status.error), (None, None));
    let report = running.stop().await;
    assert!(
        report.possible_repeats <= IN_PROGRESS,
        "{}",
        report.possible_repeats
    );
    away.repeats_are_those_that_were_told_of(500, report.possible_repeats);
    assert!(report.outages > 0);
    assert_eq!((report.retried, report.dead_lettered), (0, 0));
}

// P8: a store that is there and does not answer, and which goes on with what it was sent meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn when_redis_has_been_frozen_for_longer_than_leases_last_nothing_is_lost_and_the_flow_is_soon_back()
 {
    let Some(mut away) = Away::new() else { return };
    away.produce(0..400);
    let running = away.start(Unreachable::Wait);
    let mut events = running.handle.events().unwrap();
    away.effects(100).await;
    away.redis.freeze();
    let frozen = Instant::now();
    next(&mut events, |it| {
        matches!(it, Event::IdempotencyStoreDown { .. })
    })
    .await;
    let until = frozen + LEASE * 2;
    tokio::time::sleep_until(until.into()).await;
    let before = away.world.effects.len();
    away.redis.thaw();
    let thawed = Instant::now();
    away.effects(before + 200).await;
    assert!(thawed.elapsed() < SECOND * 3, "{:?}", thawed.elapsed());
    away.world.all_committed();
    let report = running.stop().await;
    assert!(
        report.possible_repeats <= IN_PROGRESS,
        "{}",
        report.possible_repeats
    );
    away.repeats_are_those_that_were_told_of(400, report.possible_repeats);
    assert_eq!((report.retried, report.dead_lettered), (0, 0));
    assert_eq!(report.handled + report.duplicates.total(), 800);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_a_frozen_redis_grants_when_nobody_waits_for_it_any_more_is_free_at_once() {
    let redis = tokio::task::block_in_place(|| own_service(ServiceKind::Redis));
    let Some(mut redis) = redis else { return };
    let store = RedisStore::connect(redis.url()).unwrap();
    let [before, id] = ["before", "late"].map(|id| Id::new("test", "test", id));
    let claim = store.claim(&before, LEASE).await.unwrap();
    assert!(matches!(claim, Claim::Claimed(_)), "it is connected");
    redis.freeze();
    let unanswered = tokio::time::timeout(millis(300), store.claim(&id, PATIENCE * 2)).await;
    assert!(unanswered.is_err());
    redis.thaw();
    let claim = store.claim(&id, LEASE).await.unwrap();
    assert!(matches!(claim, Claim::Claimed(_)), "{claim:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn while_redis_is_away_records_are_handled_all_the_same_if_that_is_wanted() {
    let Some(mut away) = Away::new() else { return };
    away.produce(0..50);
    let running = away.start(Unreachable::Process);
    let mut events = running.handle.events().unwrap();
    away.effects(50).await;
    away.world.all_committed();
    tokio::task::block_in_place(|| away.redis.stop());
    let before = running.handle.status().await.unwrap().idempotency.unwrap();
    assert_eq!(before.possible_repeats, 0);
    away.produce(50..300);
    away.world.all_committed();
    let during = running.handle.status().await.unwrap().idempotency.unwrap();
    assert_eq!(during.possible_repeats, 500, "each of them, both times");
    tokio::task::block_in_place(|| away.redis.start());
    // One record in a second asks for it, those beside it do without.
    tokio::time::sleep(SECOND).await;
    away.produce(300..301);
    next(&mut events, |it| {
        matches!(it, Event::IdempotencyStoreUp { .. })
    })
    .await;
    away.produce(301..350);
    away.world.all_committed();
    let report = running.stop().await;
    let possible = report.possible_repeats;
    assert!((500..=501).contains(&possible), "{possible}");
    assert!(report.duplicates.message_id >= 49);
    away.repeats_are_those_that_were_told_of(350, possible);
}

#[tokio::test(flavor = "multi_thread")]
async fn when_redis_is_away_for_too_long_the_run_ends_and_the_next_one_goes_on() {
    let Some(mut away) = Away::new() else { return };
    away.produce(0..300);
    let running = away.start(Unreachable::Stop { after: SECOND });
    away.effects(50).await;
    tokio::task::block_in_place(|| away.redis.stop());
    let error = running.ended().await.unwrap_err();
    assert_eq!(error.kind(), RunErrorKind::IdempotencyStoreUnavailable);
    assert!(error.to_string().contains("idempotency store"), "{error}");
    tokio::task::block_in_place(|| away.redis.start());
    let running = away.start(Unreachable::Stop { after: SECOND });
    away.world.all_committed();
    let report = running.stop().await;
    let possible = report.possible_repeats + error.report().possible_repeats;
    assert!(possible <= IN_PROGRESS, "{possible}");
    away.repeats_are_those_that_were_told_of(300, possible);
}

/// Takes its time for ids that end in `slow`.
struct Slow {
    store: MemoryStore,
    time: Duration,
    calls: AtomicUsize,
}

impl Slow {
    async fn pass(&self, id: &Id) {
        self.calls.fetch_add(1, Atomic::SeqCst);
        if id.as_bytes().ends_with(b"slow") {
            tokio::time::sleep(self.time).await;
        }
    }
}

impl Store for Slow {
    fn claim<'a>(&'a self, id: &'a Id, lease: Duration) -> Reply<'a, Claim> {
        Box::pin(async move {
            self.pass(id).await;
            self.store.claim(id, lease).await
        })
    }

    fn renew<'a>(&'a self, id: &'a Id, token: &'a Token, lease: Duration) -> Reply<'a, Update> {
        Box::pin(async move {
            self.pass(id).await;
            self.store.renew(id, token, lease).await
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
            self.pass(id).await;
            self.store.complete(id, token, keep_for, fingerprint).await
        })
    }

    fn release<'a>(&'a self, id: &'a Id, token: &'a Token) -> Reply<'a, Update> {
        Box::pin(async move {
            self.pass(id).await;
            self.store.release(id, token).await
        })
    }
}

fn slow(time: Duration) -> Arc<Slow> {
    Arc::new(Slow {
        store: MemoryStore::new(10_000),
        time,
        calls: AtomicUsize::new(0),
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_store_slows_only_the_records_that_wait_for_it() {
    let Some(world) = World::new(1) else { return };
    let record = |n: usize, id: &str| {
        Record::value(n.to_string())
            .key(n.to_string())
            .header("messageId", format!("{n} {id}"))
    };
    let slowly = (0..10).map(|n| record(n, "slow"));
    let quickly = (10..1_000).map(|n| record(n, "quick"));
    world.cluster.produce(&world.topic, slowly.chain(quickly));
    let store = slow(SECOND * 2);
    let running = world.start(
        world.consumer(store).ordering(Ordering::ByKey),
        Duration::ZERO,
    );
    until("the quick ones", || world.effects.len() == 990).await;
    let status = running.handle.status().await.unwrap();
    assert_eq!(
        status.partitions[0].running, 10,
        "the slow ones are still at it"
    );
    world.all_committed();
    running.stop().await;
    world.all_once(1_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_takes_100_ms_is_asked_for_more_records_than_there_are_handlers() {
    const RECORDS: usize = 6_000;
    let Some(world) = World::new(2) else { return };
    let records = (0..RECORDS).map(|n| {
        Record::value(n.to_string())
            .key(n.to_string())
            .header("messageId", format!("{n} slow"))
    });
    world.cluster.produce(&world.topic, records);
    let store = slow(millis(100));
    let builder = world.consumer(store.clone()).handler_timeout(millis(50));
    let running = world.start(builder, Duration::ZERO);
    until("the first one", || world.effects.len() > 0).await;
    let since = Instant::now();
    until("all", || world.effects.len() == RECORDS).await;
    // 64 at a time would take 19 seconds.
    assert!(since.elapsed() < SECOND * 9, "{:?}", since.elapsed());
    world.all_committed();
    let report = running.stop().await;
    assert_eq!(report.retried, 0, "only the handler is timed");
    assert_eq!(store.calls.load(Atomic::SeqCst), 2 * RECORDS);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_with_the_id_of_another_is_dead_lettered_as_a_conflict_and_not_suppressed() {
    let Some(world) = World::new(1) else { return };
    let letters = world.cluster.create_topic("letters", 1, &[]);
    let named = |value: &str| Record::value(value).key("k").header("messageId", "one");
    let records = [named("ten"), named("ten"), named("eleven"), named("ten")];
    world.cluster.produce(&world.topic, records);
    let builder = world
        .consumer(Idempotency::new(world.store()).fingerprint())
        .ordering(Ordering::ByKey)
        .dead_letter(DeadLetter::topic(&letters));
    let running = world.start(builder, Duration::ZERO);
    world.all_committed();
    let report = running.stop().await;
    assert_eq!(world.effects.all(), ["ten"]);
    assert_eq!(
        (
            report.duplicates.total(),
            report.id_conflicts,
            report.dead_lettered
        ),
        (2, 1, 1)
    );
    let letters = world.cluster.read_all(&letters);
    assert_eq!(letters[0].text(), "eleven");
    assert_eq!(letters[0].header("errorKind"), Some("id-conflict"));
    assert_eq!(
        letters[0].header("attempts"),
        Some("0"),
        "no handler saw it"
    );
}

/// Fails as often as its value says, for good at `for good`.
fn failing(effects: &Seen<String>) -> impl reliable_consumer::Handler<Text> + use<> {
    let (calls, effects) = (Arc::new(AtomicUsize::new(0)), effects.clone());
    async move |message: &Message<Text>| -> HandlerResult {
        let call = calls.fetch_add(1, Atomic::SeqCst);
        match &**message.payload() {
            "for good" if message.retry_count() == 0 => return Err(permanent("not now")),
            "for good" => {}
            times if call < times.parse()? => return Err("not yet".into()),
            _ => {}
        }
        effects.note(message.message_id());
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_fails_is_free_for_its_retry_and_for_its_retry_topic_and_then_it_is_done() {
    let Some(world) = World::new(1) else { return };
    let retry_topics = RetryTopics::new([millis(200)]);
    let tier = retry_topics.topics_of(&world.topic).next().unwrap();
    world.cluster.create_topic_named(&tier, 1, &[]);
    let letters = world.cluster.create_topic("letters", 1, &[]);
    // Twice in place and once from the tier.
    world
        .cluster
        .produce(&world.topic, [Record::value("2").key("k")]);
    let builder = world
        .consumer(Idempotency::new(world.store()).lease(PATIENCE * 2))
        .retry(Retry::fixed(millis(10)).max_attempts(2))
        .retry_topics(retry_topics)
        .dead_letter(DeadLetter::topic(&letters));
    let running = Running::start(builder, failing(&world.effects));
    until("its effect", || world.effects.len() == 1).await;
    // It is known by where it was first, and came on as an id.
    let id = world.effects.all().remove(0);
    world
        .cluster
        .produce(&world.topic, [Record::value("0").header("messageId", id)]);
    world.all_committed();
    let report = running.stop().await;
    assert_eq!(world.effects.len(), 1);
    assert_eq!(
        (report.moved_to_retry, report.retried, report.handled),
        (1, 1, 1)
    );
    assert_eq!(report.duplicates.message_id, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_that_comes_back_is_handled_once_and_when_it_comes_back_twice_its_key_is_released()
 {
    let Some(world) = World::new(1) else { return };
    let letters = world.cluster.create_topic("letters", 1, &[]);
    let start = || {
        let builder = world
            .consumer(Idempotency::new(world.store()).lease(PATIENCE * 2))
            .ordering(Ordering::ByKey)
            .hold_key(HoldKey::Wait)
            .dead_letter(DeadLetter::topic(&letters));
        Running::start(builder, failing(&world.effects))
    };
    let poison = Record::value("for good").key("k").header("messageId", "p");
    world.cluster.produce(&world.topic, [poison.clone()]);
    let running = start();
    until("its letter", || world.cluster.end_offsets(&letters)[0] == 1).await;
    // Handled by somebody else meanwhile: what comes back is a duplicate, and the key is free for what waits behind it.
    let store = world.store();
    let id = Id::new("reliable-consumer", &world.group, "p");
    let Claim::Claimed(token) = store.claim(&id, LEASE).await.unwrap() else {
        panic!("a dead letter's message is free")
    };
    let done = store
        .complete(&id, &token, PATIENCE * 2, None)
        .await
        .unwrap();
    assert_eq!(done, Update::Applied);
    let behind = Record::value("0").key("k").header("messageId", "behind");
    let back = poison.header("retryCount", "1");
    world.cluster.produce(&world.topic, [behind, back]);
    world.all_committed();
    let report = running.stop().await;
    assert_eq!(world.effects.all(), ["behind"]);
    assert_eq!((report.dead_lettered, report.duplicates.message_id), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn at_most_once_a_duplicate_is_suppressed_too() {
    let Some(world) = World::new(2) else { return };
    world.cluster.produce(&world.topic, sent_twice(50));
    let builder = world
        .consumer(world.store())
        .guarantee(Guarantee::AtMostOnce);
    let running = world.start(builder, millis(1));
    until("all of it", || world.effects.len() >= 50).await;
    world.all_committed();
    let report = running.stop().await;
    world.all_once(50);
    assert_eq!(report.handled, 50);
}

#[test]
fn an_idempotency_that_cannot_work_is_refused_at_build() {
    let builder = || {
        reliable_consumer::ReliableConsumer::builder()
            .bootstrap_servers("localhost:9092")
            .group_id("g")
            .topic("t")
    };
    let new = || Idempotency::new(MemoryStore::new(1));
    for (idempotency, complaint) in [
        (new().lease(millis(99)), "lease"),
        (new().keep_for(SECOND), "keep_for"),
        (new().id(IdSource::header("")), "IdSource::Header"),
    ] {
        let error = builder().idempotency(idempotency).build().unwrap_err();
        assert!(matches!(error, BuildError::Invalid { .. }));
        assert!(error.to_string().contains(complaint), "{error}");
    }
    builder().idempotency(MemoryStore::new(1)).build().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_whose_keys_in_redis_are_somebody_elses_are_dead_lettered_and_the_store_is_well() {
    let Some(world) = World::new(1) else { return };
    let letters = world.cluster.create_topic("letters", 1, &[]);
    let client = redis::Client::open(world.url.as_str()).unwrap();
    let mut somebody = client.get_multiplexed_async_connection().await.unwrap();
    let key = |n: usize| format!("reliable-consumer:{}:payment {n}", world.group);
    // A list, and texts that no store writes: with an end and without.
    for (command, n, value) in [
        ("LPUSH", 5, "x"),
        ("SET", 6, "not a claim"),
        ("SET", 7, "c0123456789abcdef"),
    ] {
        let mut command = redis::cmd(command);
        command.arg(key(n)).arg(value);
        let _: redis::Value = command.query_async(&mut somebody).await.unwrap();
    }
    world.cluster.produce(&world.topic, (0..20).map(payment));
    let stop = Unreachable::Stop {
        after: Duration::from_secs(60),
    };
    let builder = world
        .consumer(Idempotency::new(world.store()).on_unreachable(stop))
        .retry(Retry::fixed(millis(50)).max_attempts(2))
        .dead_letter(DeadLetter::topic(&letters));
    let running = world.start(builder, Duration::ZERO);
    world.all_committed();
    let status = running.handle.status().await.unwrap();
    let report = running.stop().await;
    world.all_once(17);
    let idempotency = status.idempotency.unwrap();
    assert_eq!((idempotency.down_for, idempotency.error), (None, None));
    assert_eq!((report.outages, report.dead_lettered), (0, 3));
    assert_eq!(report.unusable_entries, 6, "each of them was tried twice");
    let letters = world.cluster.read_all(&letters);
    let errors = letters.iter().map(|it| it.header("errorMessage").unwrap());
    let errors: Vec<_> = errors.collect();
    for n in 5..8 {
        // In whatever order they failed for good.
        assert!(errors.iter().any(|it| it.contains(&key(n))), "{errors:?}");
    }
}

// P8
#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_evicts_ids_is_told_of_or_refused_before_a_record_is_handled() {
    let started = tokio::task::block_in_place(|| own_service(ServiceKind::Redis));
    let Some(redis) = started else { return };
    let Some(world) = World::on(redis.url(), 1) else {
        return;
    };
    let client = redis::Client::open(redis.url()).unwrap();
    let mut operator = client.get_multiplexed_async_connection().await.unwrap();
    for (name, value) in [("maxmemory", "100mb"), ("maxmemory-policy", "allkeys-lru")] {
        let mut command = redis::cmd("CONFIG");
        command.arg("SET").arg(name).arg(value);
        let _: redis::Value = command.query_async(&mut operator).await.unwrap();
    }
    world.cluster.produce(&world.topic, (0..5).map(payment));
    let idempotency = Idempotency::new(world.store());
    let refuses = idempotency.clone().on_unsafe_server(UnsafeServer::Refuse);
    let running = world.start(world.consumer(refuses), Duration::ZERO);
    let error = running.ended().await.unwrap_err();
    assert_eq!(error.kind(), RunErrorKind::IdempotencyStoreUnsafe);
    assert!(error.to_string().contains("allkeys-lru"), "{error}");
    assert_eq!(world.effects.len(), 0);

    let running = world.start(world.consumer(idempotency), Duration::ZERO);
    world.all_committed();
    let status = running.handle.status().await.unwrap();
    let concerns = status.idempotency.unwrap().concerns;
    assert!(
        concerns.iter().any(|it| it.contains("allkeys-lru")),
        "{concerns:?}"
    );
    running.stop().await;
    world.all_once(5);
}
