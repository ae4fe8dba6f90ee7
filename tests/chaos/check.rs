//! What the ledgers say, held against the topic: nothing lost, nothing repeated without a reason, in order, and no
//! partition standing still.

use std::{cmp::max, collections::HashMap, fs};

use reliable_consumer_testing::StoredRecord;

use crate::{
    Chaos, FAILOVER, Outage, SESSION, Trouble,
    commits::Commits,
    ledgers::{FAIL_PERCENT, Ledgers, Life},
};

/// From the end of a handler to the commit that may carry it, and from the loss of a partition to the end of the handlers
/// that ran just then: some 20 ms, but this may be a slow machine.
const SLACK: u64 = 2_000;
/// How long a partition may stand still with work to do, or without a commit, the full outage aside: a dead member's session, a coordinator
/// that died with it, the sessions that its successor grants anew, 12 s for reconnecting on a slow machine, and three sessions
/// of processes that were told to end while the group admitted nobody: they end within two seconds, before they can leave.
const LONGEST_STALL: u64 = 48_000;
/// The same where faults overlap: what the dead member had may have gone to the one that is frozen then, and waits for that
/// one's session too, which a new coordinator grants anew.
const LONGEST_STALL_OVERLAPPING: u64 = 60_000;
/// The drain of a rebalance, its commit included.
const DRAIN: u64 = 10_000;

/// How an ownership ended with something uncommitted: a kill, a loss, a deadline that passed. Unix milliseconds.
struct Loss {
    /// Until here what it committed surely arrived; its partitions may have gone to others from here on.
    committing: u64,
    /// Until here it went on working.
    working: u64,
}

/// One record finished, once. Unix milliseconds.
struct Finish {
    /// Unknown for a dead letter.
    by: Option<usize>,
    at: u64,
    /// When it was given up, for a dead letter; else the same.
    begun: u64,
    /// By then a commit would have carried it.
    known: u64,
}

pub(crate) fn check(chaos: &Chaos<'_>, ledgers: &Ledgers, commits: &Commits, trouble: &Trouble) {
    let topic = chaos.cluster.read_all(&chaos.topic);
    let dlq = chaos.cluster.read_all(&chaos.dlq);
    let name = &ledgers.name;
    let outages = trouble.outages();
    let longest_allowed = match chaos.overlap {
        true => LONGEST_STALL_OVERLAPPING,
        false => LONGEST_STALL,
    };
    let mut handled = HashMap::<_, Vec<Finish>>::new();
    for (number, life) in ledgers.lives.iter().enumerate() {
        for (place, at) in lines(life) {
            handled.entry(place).or_default().push(Finish {
                by: Some(number),
                at,
                begun: at,
                known: at + SLACK,
            });
        }
    }
    let mut set_aside = HashMap::<_, Vec<Finish>>::new();
    for letter in &dlq {
        let (place, finish) = dead_letter(letter, &outages);
        set_aside.entry(place).or_default().push(finish);
    }
    let losses: Vec<_> = ledgers
        .lives
        .iter()
        .map(|life| losses(life, ledgers.began))
        .collect();
    // From its finish to its owner's end without a commit, where that is why a record came again.
    let excuse = |partition, finish: &Finish, before: u64| {
        let (first, last) = finish.by.map_or((0, losses.len()), |by| (by, by + 1));
        let mut losses = losses[first..last].iter().flatten();
        losses.find_map(|loss| {
            let was_uncommitted = finish.known >= commits.cover(partition, loss.committing);
            let came = finish.begun <= loss.working + SLACK && loss.committing <= before;
            (was_uncommitted && came).then_some((finish.at, max(finish.at, loss.committing)))
        })
    };

    let (mut repeats, mut oldest) = (0, 0);
    let mut firsts = Vec::with_capacity(topic.len());
    for record in &topic {
        let place @ (partition, offset) = (record.partition, record.offset);
        let fails = crc32fast::hash(record.value.as_deref().unwrap()) % 100 < FAIL_PERCENT;
        let (here, elsewhere) = match fails {
            true => (&mut set_aside, &handled),
            false => (&mut handled, &set_aside),
        };
        assert!(
            !elsewhere.contains_key(&place),
            "{name}: {partition}@{offset} has both succeeded and failed"
        );
        let mut finishes = here
            .remove(&place)
            .unwrap_or_else(|| panic!("{name}: {partition}@{offset} is lost"));
        finishes.sort_unstable_by_key(|finish| finish.at);
        for pair in finishes.windows(2) {
            let [earlier, later] = pair else {
                unreachable!("windows of two")
            };
            // Either the earlier owner's commit is missing, or a late one did what another had done meanwhile.
            let (from, until) = excuse(partition, earlier, later.at)
                .or_else(|| excuse(partition, later, u64::MAX))
                .unwrap_or_else(|| {
                    panic!(
                        "{name}: {partition}@{offset} was finished by ledger {:?} at {} and again by {:?} at {}, \
                         without need",
                        earlier.by, earlier.at, later.by, later.at
                    )
                });
            repeats += 1;
            // Which owner's end it was is not known of a dead letter.
            if earlier.by.is_some() {
                oldest = max(oldest, until - from);
                assert!(
                    without_outages(from, until, &outages) < longest_allowed,
                    "{name}: {partition}@{offset} was not committed from {from} to {until}"
                );
            }
        }
        firsts.push((finishes[0].at, record, fails));
    }
    assert!(
        handled.is_empty() && set_aside.is_empty(),
        "{name}: {:?} come from nowhere",
        handled.keys().chain(set_aside.keys())
    );
    firsts.sort_unstable_by_key(|(at, record, _)| (*at, record.offset));
    if chaos.ordering == "key" {
        check_order(name, &firsts);
    }
    let stall = longest_stall(name, &firsts, &outages, longest_allowed);

    let lives = &ledgers.lives;
    let kills = lives.iter().filter(|life| life.killed.is_some()).count();
    let lost = losses.iter().flatten().count() - kills;
    let full = outages.iter().filter(|outage| outage.full).count();
    println!(
        "chaos, {name}: {} records, {} lives, {kills} killed, {lost} losses otherwise, {} broker kills, {full} full \
         outages; {repeats} repeats ({:.1} a kill or loss, finished up to {oldest} ms before it); longest stall \
         {stall} ms, longest exit {} ms, peak memory {} MiB",
        topic.len(),
        lives.len(),
        outages.len() - full,
        f64::from(repeats) / max(1, kills + lost) as f64,
        ledgers.longest_exit.as_millis(),
        lives.iter().map(|life| life.peak_memory).max().unwrap_or(0) >> 20
    );
}

fn check_order(name: &str, firsts: &[(u64, &StoredRecord, bool)]) {
    let mut last = HashMap::new();
    // The time of a dead letter is the brokers': too coarse to be compared.
    for (_, record, _) in firsts.iter().filter(|(.., fails)| !fails) {
        let before = last.insert(&record.key, record.offset);
        assert!(
            before.is_none_or(|before| before < record.offset),
            "{name}: {}@{} was handled after {before:?}, of the same key",
            record.partition,
            record.offset
        );
    }
}

/// The longest time in which a partition had work and finished nothing.
fn longest_stall(
    name: &str,
    firsts: &[(u64, &StoredRecord, bool)],
    outages: &[Outage],
    allowed: u64,
) -> u64 {
    let mut partitions = HashMap::<_, Vec<(u64, u64)>>::new();
    for (at, record, _) in firsts {
        let there = record.timestamp.expect("topics are stamped") as u64;
        let finishes = partitions.entry(record.partition).or_default();
        finishes.push((*at, there));
    }
    let mut longest = 0;
    for (partition, finishes) in partitions {
        let mut there = u64::MAX;
        // From the last to the first: what finished later was waiting, as soon as it was there.
        for (index, &(until, this)) in finishes.iter().enumerate().rev() {
            there = there.min(this);
            let before = index.checked_sub(1).map_or(0, |index| finishes[index].0);
            let from = max(before, there);
            let stall = without_outages(from, until, outages);
            assert!(
                stall < allowed,
                "{name}: partition {partition} stood still from {from} to {until}"
            );
            longest = longest.max(stall);
        }
    }
    longest
}

/// How much of this time there was a broker.
fn without_outages(from: u64, until: u64, outages: &[Outage]) -> u64 {
    let full = outages.iter().filter(|outage| outage.full);
    let down: u64 = full
        .map(|outage| {
            until
                .min(outage.until)
                .saturating_sub(from.max(outage.from))
        })
        .sum();
    until.saturating_sub(from + down)
}

/// Place and time of each line. A process that was killed before it wrote any has left no file.
fn lines(life: &Life) -> Vec<((i32, i64), u64)> {
    let text = fs::read_to_string(&life.ledger).unwrap_or_default();
    let fields = |line: &str| {
        let fields: Vec<_> = line.split('\t').collect();
        let place = (fields[0].parse().unwrap(), fields[1].parse().unwrap());
        (place, fields[4].parse().unwrap())
    };
    text.lines().map(fields).collect()
}

fn dead_letter(letter: &StoredRecord, outages: &[Outage]) -> ((i32, i64), Finish) {
    let number = |name: &str| -> i64 {
        let text = letter.header(name).expect("the header is there");
        text.parse().unwrap()
    };
    let at = letter.timestamp.expect("topics are stamped") as u64;
    // It counts once it is acknowledged, which takes longer while a replica has just died.
    let disturbed = outages.iter().filter(|it| it.from <= at && at <= it.until);
    let acknowledged = disturbed.map(|outage| outage.until + FAILOVER.as_millis() as u64);
    let finish = Finish {
        by: None,
        at,
        begun: number("failedAt") as u64,
        known: acknowledged.max().unwrap_or(at) + SLACK,
    };
    let place = (number("originalPartition") as i32, number("originalOffset"));
    (place, finish)
}

fn losses(life: &Life, began: u64) -> Vec<Loss> {
    let killed = life.killed.map(|at| Loss {
        committing: at,
        working: at,
    });
    let log = fs::read_to_string(&life.log).unwrap();
    let logged = log.lines().filter_map(|line| {
        let at = || time_of(line, began);
        let committing = if line.contains("lost=true") {
            let at = at();
            let mut frozen = life.frozen.iter();
            // Others may have been given its partitions while it was frozen; else a session after its last heartbeat.
            match frozen.find(|(_, until)| (*until..until + SLACK + DRAIN).contains(&at)) {
                Some((from, _)) => *from,
                None => at - SESSION.as_millis() as u64 - SLACK,
            }
        } else if line.contains("did not finish within the drain's time")
            || line.contains("a last commit was not answered in time")
        {
            life.terminated.unwrap_or_else(|| at() - DRAIN)
        } else {
            return None;
        };
        Some(Loss {
            committing,
            working: at(),
        })
    });
    // Whether or not it lived to say so: it was killed before it met a broker again, perhaps.
    let frozen = life.frozen.iter();
    let expired = frozen
        .filter(|(from, until)| until - from >= SESSION.as_millis() as u64)
        .map(|(from, until)| Loss {
            committing: *from,
            working: until + SLACK,
        });
    killed.into_iter().chain(expired).chain(logged).collect()
}

/// Of a line of a log, in Unix milliseconds. The log's date is not needed: no run takes a day.
fn time_of(line: &str, began: u64) -> u64 {
    const DAY: u64 = 24 * 60 * 60 * 1_000;
    // 2030-01-31T23:59:59.999999Z
    let number = |from, to| -> u64 { line[from..to].parse().unwrap() };
    let seconds = (number(11, 13) * 60 + number(14, 16)) * 60 + number(17, 19);
    let since_midnight = seconds * 1_000 + number(20, 23);
    began + (since_midnight + DAY - began % DAY) % DAY
}
