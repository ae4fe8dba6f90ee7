//! Chaos: `ledger`s share a topic under traffic while processes are killed, frozen and ended, members come and go, and
//! brokers die. What they wrote down is held against the topic afterwards.
//!
//! The tests here spare the brokers, which others use too; `scripts/chaos` runs the last one, on three of its own.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod check;
mod commits;
mod ledgers;
mod misfortune;

use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use ledgers::Ledgers;
use misfortune::{Random, SetOnDrop, now, variable};
use rdkafka::{
    ClientConfig,
    producer::{BaseRecord, DefaultProducerContext, Producer, ThreadedProducer},
};
use reliable_consumer_testing::{Cluster, cluster, eventually};

/// The group waits for a member that died until its session has ended. Of the members' setting and the brokers'.
const SESSION: Duration = Duration::from_secs(6);
/// A broker that died leads its partitions and groups until the controller has missed it for so long
/// (`broker.session.timeout.ms`).
const FAILOVER: Duration = Duration::from_secs(6);
const PARTITIONS: i32 = 6;
const FULL_OUTAGE: Duration = Duration::from_secs(15);

#[test]
fn by_key_nothing_is_lost_or_out_of_order_and_only_what_a_dead_owner_had_not_committed_comes_again()
{
    spare_the_brokers("key");
}

#[test]
fn unordered_nothing_is_lost_and_only_what_a_dead_owner_had_not_committed_comes_again() {
    spare_the_brokers("unordered");
}

fn spare_the_brokers(ordering: &str) {
    let Some(cluster) = cluster() else { return };
    let time = Duration::from_secs(40);
    Chaos::new(&cluster, "classic", ordering).survive(time, false);
}

#[test]
#[ignore = "takes minutes, and brokers of its own: scripts/chaos runs it"]
fn with_brokers_that_die_as_well() {
    let protocol = variable("CHAOS_PROTOCOL").unwrap_or_else(|| "classic".to_owned());
    let ordering = variable("CHAOS_ORDERING").unwrap_or_else(|| "key".to_owned());
    let minutes: f64 = variable("CHAOS_MINUTES").unwrap_or(2.0);
    let overlap = variable::<String>("CHAOS_FAULTS").is_some_and(|faults| faults == "overlapping");
    let cluster = Cluster::start(3);
    let mut chaos = Chaos::new(&cluster, &protocol, &ordering);
    chaos.overlap = overlap;
    chaos.survive(Duration::from_secs_f64(minutes * 60.0), true);
}

struct Chaos<'a> {
    cluster: &'a Cluster,
    protocol: &'a str,
    ordering: &'a str,
    topic: String,
    dlq: String,
    /// Faults come together: while a broker is away a member is killed, another frozen, and a third joins.
    overlap: bool,
}

impl<'a> Chaos<'a> {
    fn new(cluster: &'a Cluster, protocol: &'a str, ordering: &'a str) -> Self {
        // The broker's clock says when a record was there to be handled.
        let stamped = [("message.timestamp.type", "LogAppendTime")];
        Self {
            cluster,
            protocol,
            ordering,
            topic: cluster.create_topic("chaos", PARTITIONS, &stamped),
            dlq: cluster.create_topic("chaos.dlq", 3, &stamped),
            overlap: false,
        }
    }

    fn survive(&self, time: Duration, brokers_die: bool) {
        let seed = variable("SEED").unwrap_or_else(now);
        println!("chaos by seed {seed}");
        let name = format!("seed {seed}, {}, {}", self.protocol, self.ordering);
        let mut ledgers = Ledgers::new(self, name);
        let trouble = Trouble::new();
        let over = AtomicBool::new(false);
        let end = Instant::now() + time;
        let group = ledgers.group.clone();
        let seen = thread::scope(|scope| {
            let stop = SetOnDrop(&over);
            let traffic = scope.spawn(|| self.produce_until(&over));
            let commits = scope.spawn(|| commits::watch(self.cluster, &group, &self.topic, &over));
            let brokers = brokers_die.then(|| {
                scope.spawn(|| self.kill_brokers_until(end, &over, Random::new(!seed), &trouble))
            });
            ledgers.suffer_until(end, Random::new(seed), &trouble);
            if let Some(brokers) = brokers {
                brokers.join().expect("brokers come back");
            }
            drop(stop);
            traffic.join().expect("the brokers take the traffic");
            commits.join().expect("the brokers tell what is committed")
        });
        let ends = self.cluster.end_offsets(&self.topic);
        eventually(
            "everything to be committed",
            Duration::from_secs(60),
            || {
                ledgers.assert_alive();
                let committed = self.cluster.committed(&ledgers.group, &self.topic);
                let committed = committed
                    .iter()
                    .map(|committed| committed.offset.unwrap_or(-1));
                committed.collect::<Vec<_>>() == ends
            },
        );
        while ledgers.count() > 0 {
            ledgers.leave(0, &trouble);
        }
        check::check(self, &ledgers, &seen, &trouble);
    }

    /// Keys repeat often enough that most have records waiting behind one at work.
    fn produce_until(&self, over: &AtomicBool) {
        // Goes on taking records while brokers are away: then there is work for whoever comes back.
        let producer: ThreadedProducer<_> = ClientConfig::new()
            .set("bootstrap.servers", self.cluster.brokers())
            .set("acks", "all")
            .set("enable.idempotence", "true")
            .create_with_context(DefaultProducerContext)
            .unwrap();
        let mut next = 0;
        while !over.load(Ordering::Relaxed) {
            for n in next..next + 60 {
                let (key, value) = (format!("k{}", n % 97), n.to_string());
                let record = BaseRecord::to(&self.topic).key(&key).payload(&value);
                producer.send(record).map_err(|(error, _)| error).unwrap();
            }
            next += 60;
            thread::sleep(Duration::from_millis(100));
        }
        producer.flush(Duration::from_secs(60)).unwrap();
    }

    /// One at a time, each only once the one before has caught up, so that two of three replicas are always there. Once,
    /// after a third of the time, all.
    fn kill_brokers_until(
        &self,
        end: Instant,
        over: &AtomicBool,
        mut random: Random,
        trouble: &Trouble,
    ) {
        let third = Instant::now() + end.saturating_duration_since(Instant::now()) / 3;
        let mut outage_due = true;
        // Dead, coming back and catching up take a while: in the last seconds nobody dies, except all of them where the
        // machine is so slow that it is still to come.
        while !over.load(Ordering::Relaxed)
            && (outage_due || Instant::now() + Duration::from_secs(15) < end)
        {
            if !trouble.may_begin() {
                thread::sleep(Duration::from_millis(100));
                continue;
            }
            if outage_due && Instant::now() >= third {
                outage_due = false;
                let outage = trouble.begins(true);
                self.cluster.kill(1..=3);
                thread::sleep(FULL_OUTAGE);
                self.cluster.restart(1..=3);
                trouble.ends(outage);
                trouble.death();
            } else {
                let broker = 1 + random.below(3) as usize;
                let outage = trouble.begins(false);
                self.cluster.kill([broker]);
                if self.overlap {
                    trouble.faults_due.store(true, Ordering::Relaxed);
                }
                random.pause(2_000..9_000);
                self.cluster.restart([broker]);
                trouble.ends(outage);
            }
            for topic in [&self.topic, &self.dlq, "__consumer_offsets"] {
                self.cluster.wait_in_sync(topic);
            }
            random.pause(10_000..18_000);
        }
    }
}

/// A group stands still for a session when a member dies, and for twice that and the failover when its coordinator does.
/// If whoever is given the partitions then dies as well, and the next one again, a partition stands still for as long as
/// that goes on: between two deaths there is time for some work.
const BETWEEN_DEATHS: Duration = Duration::from_secs(15);

/// When brokers were down, and when somebody died last.
struct Trouble {
    outages: Mutex<Vec<Outage>>,
    /// A broker has just died, and members are to suffer as well.
    faults_due: AtomicBool,
    last_death: Mutex<Instant>,
}

#[derive(Clone, Copy)]
struct Outage {
    full: bool,
    /// Unix milliseconds; `until` is [`u64::MAX`] while it lasts.
    from: u64,
    until: u64,
}

impl Trouble {
    fn new() -> Self {
        Self {
            outages: Mutex::default(),
            faults_due: AtomicBool::new(false),
            last_death: Mutex::new(Instant::now()),
        }
    }

    fn may_begin(&self) -> bool {
        self.last_death.lock().unwrap().elapsed() > BETWEEN_DEATHS
    }

    fn death(&self) {
        *self.last_death.lock().unwrap() = Instant::now();
    }

    fn begins(&self, full: bool) -> usize {
        println!(
            "{}",
            if full {
                "all brokers are killed"
            } else {
                "a broker is killed"
            }
        );
        self.death();
        let mut outages = self.outages.lock().unwrap();
        outages.push(Outage {
            full,
            from: now(),
            until: u64::MAX,
        });
        outages.len() - 1
    }

    fn ends(&self, outage: usize) {
        println!("brokers are up again");
        self.outages.lock().unwrap()[outage].until = now();
    }

    fn outages(&self) -> Vec<Outage> {
        self.outages.lock().unwrap().clone()
    }

    fn is_full_now(&self) -> bool {
        let outages = self.outages();
        outages.iter().any(|it| it.full && it.until == u64::MAX)
    }

    /// Whether brokers were up since then, and groups had recovered: their new coordinators give every session its full
    /// time again.
    fn is_calm_since(&self, since: u64) -> bool {
        let aftermath = (FAILOVER + SESSION).as_millis() as u64;
        let outages = self.outages();
        outages
            .iter()
            .all(|it| it.until.saturating_add(aftermath) < since)
    }
}
