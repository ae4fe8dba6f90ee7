//! One retry topic: which of its records are to be handled, and when.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use crate::{dead_letter::values, header_names, origin::Origin, record::Record};

#[derive(Debug)]
pub(crate) struct Tier {
    pub(crate) topic: Arc<str>,
    /// The topic whose records it is for.
    pub(crate) source: Arc<str>,
    pub(super) group: Arc<str>,
    /// From 1.
    pub(crate) number: u32,
    pub(crate) delay: Duration,
    /// The one after it.
    pub(super) next: Option<Arc<str>>,
}

/// What is to be done with a record that was found in a retry topic.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    Ours,
    /// Another group's, which reads it too.
    Foreign,
    /// It is nobody's, for this reason.
    Untrusted(String),
}

impl Tier {
    pub(crate) fn admit(&self, record: &Record) -> Admission {
        let headers = record.headers();
        match headers.get_str(header_names::CONSUMER_GROUP) {
            Some(group) if group == &*self.group => {}
            Some(_) => return Admission::Foreign,
            None => return Admission::Untrusted("its headers name no consumer group".into()),
        }
        match Origin::from_headers(headers) {
            // Which topic that was decides nothing. It may have come to ours from elsewhere, with its headers.
            Some(_) => Admission::Ours,
            None => {
                Admission::Untrusted("its headers do not tell where the record was first".into())
            }
        }
    }

    /// For how long it is not to be handled yet. Never longer than the tier's delay, whatever its headers say.
    pub(crate) fn wait(&self, record: &Record, now: SystemTime) -> Duration {
        if self.admit(record) != Admission::Ours {
            return Duration::ZERO;
        }
        let told = record.headers().get_str(header_names::DUE_AT);
        let told = told.and_then(|text| text.parse().ok());
        let due = told.or_else(|| {
            let written = record.timestamp()?.as_millis();
            Some(written.saturating_add(millis(self.delay)))
        });
        let Some(due) = due else {
            return self.delay;
        };
        let left = i64::saturating_sub(due, unix_millis(now)).max(0);
        Duration::from_millis(left as u64).min(self.delay)
    }

    /// When a record is due that moves here now, in Unix milliseconds.
    pub(crate) fn due_at(&self, now_millis: i64) -> i64 {
        now_millis.saturating_add(millis(self.delay))
    }

    /// Calls of the handler before the record came here.
    pub(crate) fn attempts_before(record: &Record) -> u32 {
        let attempts = record.headers().get(header_names::ATTEMPTS);
        attempts.and_then(values::count).unwrap_or(0)
    }
}

pub(crate) fn unix_millis(now: SystemTime) -> i64 {
    let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    millis(since)
}

fn millis(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Message;

    const NOW: i64 = 1_700_000_000_000;

    fn tier() -> Tier {
        Tier {
            topic: "orders.retry.10s".into(),
            source: "orders".into(),
            group: "billing".into(),
            number: 1,
            delay: Duration::from_secs(10),
            next: None,
        }
    }

    fn record(headers: &[(&str, &str)]) -> Record {
        let sound = [
            ("originalTopic", "orders"),
            ("originalPartition", "0"),
            ("originalOffset", "7"),
            ("originalTimestamp", "-1"),
            ("consumerGroup", "billing"),
        ];
        let changed = |name: &str| headers.iter().any(|(other, _)| *other == name);
        let kept = sound.into_iter().filter(|(name, _)| !changed(name));
        let mut record = Message::builder().timestamp_millis(NOW - 4_000);
        for (name, value) in kept.chain(headers.iter().copied()) {
            if !value.is_empty() {
                record = record.header(name, value);
            }
        }
        record.record()
    }

    fn wait(headers: &[(&str, &str)]) -> u128 {
        let now = UNIX_EPOCH + Duration::from_millis(NOW as u64);
        tier().wait(&record(headers), now).as_millis()
    }

    #[test]
    fn only_records_of_this_group_and_topic_are_handled() {
        let admit = |headers: &[(&str, &str)]| tier().admit(&record(headers));
        assert_eq!(admit(&[]), Admission::Ours);
        assert_eq!(admit(&[("consumerGroup", "shipping")]), Admission::Foreign);
        assert_eq!(admit(&[("originalTopic", "payments")]), Admission::Ours);
        for forged in [
            ("consumerGroup", ""),
            ("originalTopic", ""),
            ("originalOffset", "x"),
            ("originalTimestamp", ""),
        ] {
            let admission = admit(&[forged]);
            assert!(matches!(admission, Admission::Untrusted(_)), "{forged:?}");
        }
    }

    #[test]
    fn no_header_makes_a_record_wait_for_longer_than_the_delay() {
        for (due, millis) in [
            ("1700000006500", 6_500),
            ("1700000000000", 0),
            ("1600000000000", 0),
            ("-1", 0),
            ("1800000000000", 10_000),
            ("9223372036854775807", 10_000),
            // As if there were none: 10 s from the record's own timestamp.
            ("99999999999999999999", 6_000),
            ("soon", 6_000),
            ("", 6_000),
        ] {
            assert_eq!(wait(&[("dueAt", due)]), millis, "{due}");
        }
        let due = ("dueAt", "1700000006500");
        assert_eq!(wait(&[due, ("consumerGroup", "shipping")]), 0, "not ours");
    }
}
