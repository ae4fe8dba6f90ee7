//! Sends letters on, and finds out why one is not taken.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::task::spawn_blocking;

use super::{ParkReason, Placement, rules::Return};
use crate::{
    header_names as names,
    kafka::{
        AckedProducer, Administrator, Cluster, InspectError, Outgoing, ProduceErrorKind as Kind,
        RawHeader,
    },
    origin::Origin,
    record::Record,
};

/// How long what is known of a topic is believed: partitions that are added meanwhile get no redriven records yet.
const FRESH: Duration = Duration::from_secs(5);
/// Kafka's own default for a topic whose retention we may not see.
const DEFAULT_RETENTION_MS: i64 = 7 * 24 * 3600 * 1000;

/// Why a letter is still here.
pub(super) enum Obstacle {
    /// The topic is no more, or does not take this letter: nor will it later.
    ForGood(ParkReason, String),
    /// Brokers, permissions: to be tried again.
    ForNow(String),
}

pub(super) struct Outbox {
    producer: AckedProducer,
    cluster: Arc<Cluster>,
    administrator: Administrator,
    placement: Placement,
    topics: Mutex<HashMap<String, Arc<Topic>>>,
    /// Held while the brokers are asked about a topic: one asks, the others wait for the same answer.
    asking: tokio::sync::Mutex<()>,
}

struct Topic {
    partitions: i32,
    /// Records whose timestamps are older than this are deleted. `None`: none are.
    retention_ms: Option<i64>,
    asked: Instant,
    /// Timestamps at or below the one, and at or above the other, are known to be refused.
    too_old: AtomicI64,
    too_new: AtomicI64,
}

impl Outbox {
    pub(super) fn new(
        producer: AckedProducer,
        cluster: Arc<Cluster>,
        placement: Placement,
    ) -> Result<Self, InspectError> {
        Ok(Self {
            producer,
            administrator: cluster.administrator()?,
            cluster,
            placement,
            topics: Mutex::default(),
            asking: tokio::sync::Mutex::default(),
        })
    }

    /// Ends when all in-sync replicas of its topic have the record, or it is known why not.
    pub(super) async fn send_back(
        &self,
        letter: &Record,
        back: &Return<'_>,
        now: i64,
    ) -> Result<(), Obstacle> {
        let Return {
            topic,
            origin,
            retry_count,
            message_id,
            group,
        } = back;
        let numbers = [
            retry_count.to_string(),
            origin.partition.to_string(),
            origin.offset.to_string(),
            origin.timestamp.unwrap_or(Origin::NO_TIMESTAMP).to_string(),
        ];
        // All of them are written, since the letters of others have none: the next trip goes by ours.
        let mut set = vec![
            (names::RETRY_COUNT, numbers[0].as_str()),
            (names::ORIGINAL_PARTITION, &numbers[1]),
            (names::ORIGINAL_OFFSET, &numbers[2]),
            (names::ORIGINAL_TIMESTAMP, &numbers[3]),
            (names::ORIGINAL_TOPIC, origin.topic),
            (names::MESSAGE_ID, message_id),
        ];
        set.extend(group.map(|group| (names::REDRIVE_GROUP, group)));
        let headers = headers(letter, &set);

        let mut known = self.topic(topic, false).await?;
        let (mut asked_again, mut timely) = (false, false);
        loop {
            let original = origin.timestamp.filter(|_| !timely);
            let timestamp = original.filter(|millis| known.takes(*millis, now));
            let record = Outgoing {
                topic,
                partition: self
                    .placement
                    .choose(letter.key(), origin.partition, known.partitions),
                key: letter.key(),
                value: letter.value(),
                timestamp,
                headers: &headers,
            };
            let Err(error) = self.producer.send(record).await else {
                return Ok(());
            };
            match error.kind() {
                Kind::UnknownTopic if !asked_again => {
                    asked_again = true;
                    known = self.topic(topic, true).await?;
                }
                Kind::Invalid if error.refuses_timestamp() && timestamp.is_some() => {
                    known.refused(timestamp.unwrap_or_default(), now);
                    timely = true;
                }
                Kind::TooLarge | Kind::Invalid => {
                    return Err(Obstacle::ForGood(ParkReason::Refused, error.to_string()));
                }
                _ => return Err(Obstacle::ForNow(error.to_string())),
            }
        }
    }

    /// Ends when the parking lot has the letter. It is as it was but for the reason, and the time, which is now: by its
    /// own, retention might delete it at once.
    pub(super) async fn park(
        &self,
        letter: &Record,
        parking_lot: &str,
        reason: ParkReason,
    ) -> Result<(), Obstacle> {
        let headers = headers(letter, &[(names::PARK_REASON, reason.as_str())]);
        let record = Outgoing {
            topic: parking_lot,
            partition: None,
            key: letter.key(),
            value: letter.value(),
            timestamp: None,
            headers: &headers,
        };
        let sent = self.producer.send(record).await;
        sent.map(drop)
            .map_err(|error| Obstacle::ForNow(error.to_string()))
    }

    async fn topic(&self, name: &str, anew: bool) -> Result<Arc<Topic>, Obstacle> {
        let since = Instant::now();
        let is_fresh = |topic: &Topic| topic.asked.elapsed() < FRESH && !anew;
        if let Some(topic) = self.known(name).filter(|topic| is_fresh(topic)) {
            return Ok(topic);
        }
        let _asking = self.asking.lock().await;
        let known = self.known(name);
        if let Some(topic) = known.as_ref().filter(|topic| topic.asked > since) {
            return Ok(Arc::clone(topic));
        }
        let (cluster, asked) = (Arc::clone(&self.cluster), name.to_owned());
        let partitions = spawn_blocking(move || cluster.find(&asked)).await;
        let partitions = partitions
            .map_err(|error| Obstacle::ForNow(error.to_string()))?
            .map_err(|error| Obstacle::ForNow(error.to_string()))?;
        let Some(partitions) = partitions else {
            let message = format!("there is no topic `{name}` any more");
            return Err(Obstacle::ForGood(ParkReason::UnknownTopic, message));
        };
        let settings = self.administrator.settings(name).await;
        // Who may not see it goes by Kafka's default: too short a time costs a timestamp, too long a one the record.
        let retention = settings.ok().and_then(|settings| retention_ms(&settings));
        let retention_ms = retention.unwrap_or(Some(DEFAULT_RETENTION_MS));
        let bound = |of: fn(&Topic) -> &AtomicI64, none| {
            let known = known.as_ref();
            AtomicI64::new(known.map_or(none, |topic| of(topic).load(Ordering::Relaxed)))
        };
        let topic = Arc::new(Topic {
            partitions,
            retention_ms,
            asked: Instant::now(),
            too_old: bound(|topic| &topic.too_old, i64::MIN),
            too_new: bound(|topic| &topic.too_new, i64::MAX),
        });
        let mut topics = self.topics.lock().unwrap_or_else(PoisonError::into_inner);
        topics.insert(name.to_owned(), Arc::clone(&topic));
        Ok(topic)
    }

    fn known(&self, name: &str) -> Option<Arc<Topic>> {
        let topics = self.topics.lock().unwrap_or_else(PoisonError::into_inner);
        topics.get(name).cloned()
    }
}

impl Topic {
    /// Whether a record with this timestamp is taken, and stays. One that retention would delete before it is read goes
    /// with the current time.
    fn takes(&self, millis: i64, now: i64) -> bool {
        let retained = self
            .retention_ms
            .is_none_or(|retention| millis > now.saturating_sub(retention));
        millis >= 0
            && retained
            && millis > self.too_old.load(Ordering::Relaxed)
            && millis < self.too_new.load(Ordering::Relaxed)
    }

    fn refused(&self, millis: i64, now: i64) {
        if millis < now {
            self.too_old.fetch_max(millis, Ordering::Relaxed);
        } else {
            self.too_new.fetch_min(millis, Ordering::Relaxed);
        }
    }
}

/// `None` if it is not told.
fn retention_ms(settings: &BTreeMap<String, String>) -> Option<Option<i64>> {
    if !settings.get("cleanup.policy")?.contains("delete") {
        return Some(None);
    }
    let retention: i64 = settings.get("retention.ms")?.parse().ok()?;
    Some((retention >= 0).then_some(retention))
}

/// The letter's own headers in their order, then these in place of any of the same name.
fn headers<'a>(letter: &'a Record, set: &[(&'static str, &'a str)]) -> Vec<RawHeader<'a>> {
    let replaced = |name: &[u8]| {
        let mut names = set.iter().map(|(name, _)| *name).chain(names::OF_THE_TRIP);
        names.any(|replaced| replaced.as_bytes() == name)
    };
    let kept = letter.headers().iter();
    let mut headers: Vec<_> = kept
        .map(|header| (header.name_bytes(), header.value()))
        .filter(|(name, _)| !replaced(name))
        .collect();
    headers.extend(
        set.iter()
            .map(|(name, value)| (name.as_bytes(), Some(value.as_bytes()))),
    );
    headers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Message;

    fn topic(retention_ms: Option<i64>) -> Topic {
        Topic {
            partitions: 1,
            retention_ms,
            asked: Instant::now(),
            too_old: AtomicI64::new(i64::MIN),
            too_new: AtomicI64::new(i64::MAX),
        }
    }

    #[test]
    fn a_timestamp_is_kept_unless_its_record_would_be_refused_or_deleted_at_once() {
        let (now, hour) = (1_800_000_000_000, 3_600_000);
        let endless = topic(None);
        assert!(endless.takes(0, now));
        assert!(!endless.takes(-1, now));
        let short = topic(Some(hour));
        assert!(short.takes(now - hour + 1, now));
        assert!(!short.takes(now - hour, now));
        endless.refused(now - hour, now);
        endless.refused(now + hour, now);
        assert!(!endless.takes(now - 2 * hour, now));
        assert!(!endless.takes(now + 2 * hour, now));
        assert!(endless.takes(now, now));
    }

    #[test]
    fn headers_stay_byte_for_byte_and_in_their_order_but_for_those_of_the_trip() {
        let letter = Message::builder()
            .header(b"\xff", [0, 1])
            .header("again", "1")
            .header(names::RETRY_COUNT, "1")
            .header(names::REDRIVE_GROUP, "elsewhere")
            .header(names::PARK_REASON, "exhausted")
            .null_header("again")
            .record();
        let found = headers(&letter, &[(names::RETRY_COUNT, "2")]);
        let expected: [RawHeader<'_>; 4] = [
            (b"\xff", Some(&[0, 1])),
            (b"again", Some(b"1")),
            (b"again", None),
            (b"retryCount", Some(b"2")),
        ];
        assert_eq!(found, expected);
    }
}
