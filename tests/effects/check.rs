//! Effects, counted: none missing, none from nowhere, and none twice without a reason.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
};

use sqlx::{Connection, PgConnection};

use crate::{
    ACCOUNTS, Outage, Run,
    processes::{CONCURRENCY, MEMBERS, Processes},
};

/// What a process has with its handlers, and on the way to their completion.
const IN_PROGRESS: usize = 4 * CONCURRENCY;
/// From an effect to the answer of a store that is up, in ms: 2 ms and an `fsync`, but this may be a slow machine.
const COMPLETION: u64 = 1_000;

pub(crate) struct Figures {
    /// When each payment had its first effect, in Unix milliseconds.
    pub(crate) effects: HashMap<u64, u64>,
    pub(crate) total: u64,
    /// Beyond the first of each payment.
    pub(crate) repeated: u64,
    /// How many repeats the deaths and outages of this run excuse.
    pub(crate) at_most: usize,
}

/// The tables that the inbox's effects are in.
pub(crate) async fn prepare(run: &Run<'_>) {
    let mut database = PgConnection::connect(&run.url).await.unwrap();
    let schema = format!(
        "{};
         CREATE TABLE effects (
             id TEXT NOT NULL,
             at BIGINT NOT NULL DEFAULT extract(epoch FROM clock_timestamp()) * 1000
         );
         CREATE TABLE accounts (id BIGINT PRIMARY KEY, payments BIGINT NOT NULL);
         INSERT INTO accounts SELECT id, 0 FROM generate_series(0, {ACCOUNTS} - 1) AS id",
        <sqlx::Postgres as reliable_consumer::idempotency::inbox::InboxDatabase>::SCHEMA
    );
    sqlx::raw_sql(&schema).execute(&mut database).await.unwrap();
}

/// With the inbox: every row once, and the accounts as full as the payments make them.
pub(crate) async fn rows(run: &Run<'_>, payments: u64) -> Figures {
    let name = &run.name;
    let mut database = PgConnection::connect(&run.url).await.unwrap();
    let rows: Vec<(String, i64)> = sqlx::query_as("SELECT id, at FROM effects ORDER BY at")
        .fetch_all(&mut database)
        .await
        .unwrap();
    let rows = rows.into_iter().map(|(id, at)| (id, at as u64));
    let effects = by_payment(name, payments, rows.map(|(id, at)| (id, (at, ()))));
    let twice: Vec<_> = effects.iter().filter(|(_, all)| all.len() > 1).collect();
    assert!(
        twice.is_empty(),
        "{name}: {} of {payments} payments have more than one row: {:?} …",
        twice.len(),
        &twice[..twice.len().min(10)]
    );
    let (accounts, markers): (i64, i64) = sqlx::query_as(
        "SELECT (SELECT sum(payments)::bigint FROM accounts), (SELECT count(*) FROM reliable_consumer_inbox)",
    )
    .fetch_one(&mut database)
    .await
    .unwrap();
    let expected = payments as i64;
    assert_eq!(
        (accounts, markers),
        (expected, expected),
        "{name}: accounts, markers"
    );
    Figures {
        effects: effects
            .into_iter()
            .map(|(id, all)| (id, all[0].0))
            .collect(),
        total: payments,
        repeated: 0,
        at_most: 0,
    }
}

/// With a store: a payment whose effect was not completed has another one, and no other has. A process was killed in
/// between, or could not reach the store until the lease had lapsed. That is as many as it had in progress then.
pub(crate) fn lines(
    run: &Run<'_>,
    payments: u64,
    processes: &Processes,
    outages: &[Outage],
) -> Figures {
    let name = &run.name;
    let mut written = Vec::new();
    for (number, life) in processes.lives.iter().enumerate() {
        // Who was killed early may have left none.
        let text = fs::read_to_string(&life.effects).unwrap_or_default();
        written.extend(text.lines().map(|line| {
            let (id, at) = line.split_once('\t').unwrap();
            (id.to_owned(), (at.parse().unwrap(), number))
        }));
    }
    let total = written.len() as u64;
    written.sort_unstable_by_key(|(_, (at, _))| *at);
    let effects = by_payment(name, payments, written);

    // By process, and the outage if it was one.
    let mut excused = BTreeMap::<(usize, Option<usize>), usize>::new();
    let repeated: Vec<_> = effects
        .iter()
        .flat_map(|(id, all)| all.windows(2).map(move |pair| (*id, pair[0], pair[1])))
        .collect();
    for &(id, earlier @ (at, number), later) in &repeated {
        let outage = outages
            .iter()
            .position(|outage| outage.covers(at) || outage.covers(at + COMPLETION));
        let killed = processes.lives[number].killed;
        let excuse = match (outage, killed) {
            (Some(outage), _) => (number, Some(outage)),
            (None, Some(killed)) if at + COMPLETION >= killed => (number, None),
            _ => panic!(
                "{name}: payment {id} has an effect at {earlier:?} and another at {later:?}, by (time, process), \
                 without need; {} payments have more than one",
                repeated.len()
            ),
        };
        *excused.entry(excuse).or_default() += 1;
    }
    for ((number, outage), count) in &excused {
        assert!(
            *count <= IN_PROGRESS,
            "{name}: {count} effects of process {number} are repeated, more than it had in progress when it was {}",
            if outage.is_some() {
                "without the store"
            } else {
                "killed"
            }
        );
    }
    // Each outage finds all members at work, and whoever dies in it has died of that.
    let killed = processes.lives.iter().filter_map(|life| life.killed);
    let at_work = killed.filter(|at| !outages.iter().any(|outage| outage.covers(*at)));
    let at_most = IN_PROGRESS * (at_work.count() + outages.len() * MEMBERS);
    assert!(
        repeated.len() <= at_most,
        "{name}: {} repeats",
        repeated.len()
    );
    Figures {
        effects: effects
            .into_iter()
            .map(|(id, all)| (id, all[0].0))
            .collect(),
        total,
        repeated: repeated.len() as u64,
        at_most,
    }
}

/// All effects of each payment, in the order given; none of them is missing, none unknown.
fn by_payment<T: Copy>(
    name: &str,
    payments: u64,
    effects: impl IntoIterator<Item = (String, T)>,
) -> BTreeMap<u64, Vec<T>> {
    let mut by_payment = BTreeMap::<u64, Vec<T>>::new();
    for (id, effect) in effects {
        by_payment
            .entry(id.parse().unwrap())
            .or_default()
            .push(effect);
    }
    let missing: Vec<_> = (0..payments)
        .filter(|id| !by_payment.contains_key(id))
        .collect();
    assert!(
        missing.is_empty(),
        "{name}: {} of {payments} payments have no effect: {:?} …",
        missing.len(),
        &missing[..missing.len().min(10)]
    );
    assert_eq!(
        by_payment.len() as u64,
        payments,
        "{name}: payments that nobody sent"
    );
    by_payment
}

/// How many records came back from the dead letters when the other record of their payment had gone through.
pub(crate) fn sent_back_when_it_was_done(run: &Run<'_>, effects: &HashMap<u64, u64>) -> usize {
    let records = run.cluster.read_all(&run.topic);
    let came_back = records.iter().filter(|record| {
        let trips = record.header(reliable_consumer::header_names::RETRY_COUNT);
        let id: u64 = record.header("messageId").unwrap().parse().unwrap();
        let at = record.timestamp.expect("topics are stamped") as u64;
        trips.is_some() && effects[&id] < at
    });
    let count = came_back.count();
    assert!(count > 0, "{}: that was to be seen too", run.name);
    count
}
