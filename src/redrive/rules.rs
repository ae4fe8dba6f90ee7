//! What becomes of a dead letter: decided from its headers and the time alone.

use std::{
    fmt,
    hash::{BuildHasher, Hasher},
    time::Duration,
};

use foldhash::fast::FixedState;
use regex_lite::Regex;

use super::redrive_topic;
use crate::{
    backoff::Retry,
    dead_letter::Story,
    origin::{Origin, is_topic_name},
    record::Record,
};

/// What the name of a parking lot adds to that of its dead-letter topic, unless somebody has chosen another.
pub(super) const PARKED: &str = ".parked";

/// What a [`Redriver`](crate::Redriver) does with the letters it reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Action {
    /// Sends each back to its topic, or parks it. The default.
    #[default]
    SendBack,
    /// Parks all of them.
    Park,
    /// The letters are those of a parking lot: somebody has decided that they get another chance. They are sent back
    /// with a `retryCount` of 1, whatever it was. What cannot be sent stays where it is, and is counted in
    /// [`RedriveReport::left`](crate::RedriveReport::left). Only for runs that [end](crate::RedriverBuilder::once).
    Unpark,
}

/// Why a letter was not sent back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ParkReason {
    /// It has been sent back as often as [allowed](crate::RedriverBuilder::threshold).
    Exhausted,
    /// It comes from a topic that is not [allowed](crate::RedriverBuilder::allow), as its headers tell.
    Untrusted,
    /// Its headers don't tell where it comes from.
    NoOrigin,
    /// It is to go to a [topic of its group](crate::RedriverBuilder::topic_per_group), and its headers name no group, or
    /// one whose name no topic can have.
    NoGroup,
    /// The topic it comes from does not exist any more.
    UnknownTopic,
    /// The topic it comes from does not take it: it is too large, or not what is allowed there.
    Refused,
    /// [Somebody](Action::Park) wanted it parked.
    ByHand,
}

impl ParkReason {
    /// How it stands in the header [`parkReason`](crate::header_names::PARK_REASON): `exhausted`, `untrusted`,
    /// `no-origin`, `no-group`, `unknown-topic`, `refused` or `by-hand`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Exhausted => "exhausted",
            Self::Untrusted => "untrusted",
            Self::NoOrigin => "no-origin",
            Self::NoGroup => "no-group",
            Self::UnknownTopic => "unknown-topic",
            Self::Refused => "refused",
            Self::ByHand => "by-hand",
        }
    }
}

impl fmt::Display for ParkReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[derive(Debug)]
pub(super) enum Verdict<'a> {
    SendBack(Return<'a>),
    /// Its time has not come.
    Wait(Duration),
    Park(ParkReason),
}

/// A record on its way back.
#[derive(Debug)]
pub(super) struct Return<'a> {
    pub(super) topic: String,
    pub(super) origin: Origin<'a>,
    /// Of the trip that begins.
    pub(super) retry_count: u32,
    pub(super) message_id: String,
    pub(super) group: Option<&'a str>,
}

#[derive(Debug)]
pub(super) struct Rules {
    pub(super) action: Action,
    pub(super) source: String,
    pub(super) parking_lot: String,
    pub(super) allowed: Vec<String>,
    pub(super) allowed_patterns: Vec<Regex>,
    /// Whose names don't tell it.
    pub(super) retry_topics: Vec<String>,
    pub(super) threshold: u32,
    /// `None`: nothing waits.
    pub(super) backoff: Option<Retry>,
    /// For whom all letters are, whatever they say.
    pub(super) group: Option<String>,
    pub(super) topic_per_group: bool,
}

impl Rules {
    /// `now` is in Unix milliseconds.
    pub(super) fn judge<'a>(&'a self, letter: &'a Record, now: i64) -> Verdict<'a> {
        if self.action == Action::Park {
            return Verdict::Park(ParkReason::ByHand);
        }
        let Some((story, origin)) = Story::of(letter).and_then(|it| Some((it, it.origin?))) else {
            return Verdict::Park(ParkReason::NoOrigin);
        };
        if !self.allows(origin.topic) {
            return Verdict::Park(ParkReason::Untrusted);
        }
        let trips = match self.action {
            Action::Unpark => 0,
            _ => story.retry_count,
        };
        if trips >= self.threshold {
            return Verdict::Park(ParkReason::Exhausted);
        }
        let group = self.group.as_deref().or(story.group);
        let topic = if self.topic_per_group {
            let own = group.map(|group| redrive_topic(origin.topic, group));
            match own.filter(|topic| is_topic_name(topic) && !self.is_of_ours(topic)) {
                Some(topic) => topic,
                None => return Verdict::Park(ParkReason::NoGroup),
            }
        } else {
            origin.topic.to_owned()
        };
        if let Some(wait) = self.wait(letter, trips, story.failed_at, now) {
            return Verdict::Wait(wait);
        }
        Verdict::SendBack(Return {
            topic,
            origin,
            retry_count: trips + 1,
            // With an origin there is one.
            message_id: story.message_id().unwrap_or_else(|| origin.to_string()),
            group,
        })
    }

    pub(super) fn allows(&self, topic: &str) -> bool {
        let allowed = self.allowed.iter().any(|name| name == topic)
            || self.allowed_patterns.iter().any(|it| it.is_match(topic));
        allowed && !self.is_of_ours(topic)
    }

    /// Topics of dead letters, parked ones, and those that wait for a retry: what is sent there goes round in circles.
    fn is_of_ours(&self, topic: &str) -> bool {
        topic == self.source
            || topic == self.parking_lot
            || self.source.strip_suffix(PARKED) == Some(topic)
            || is_retry_tier(topic)
            || self.retry_topics.iter().any(|tier| tier == topic)
    }

    /// How long until it may be sent; `None` if that time has come, or nobody knows when it failed.
    fn wait(
        &self,
        letter: &Record,
        trips: u32,
        failed_at: Option<i64>,
        now: i64,
    ) -> Option<Duration> {
        let backoff = self.backoff.as_ref()?;
        // The same each time that this letter is looked at, and in each process.
        let mut hasher = FixedState::default().build_hasher();
        hasher.write_i32(letter.partition());
        hasher.write_i64(letter.offset());
        let delay = backoff.next(trips + 1, Duration::ZERO, hasher.finish())?;
        let delay_ms = i64::try_from(delay.as_millis()).unwrap_or(i64::MAX);
        // Who claims to fail in a future that is farther than the delay would wait for ever.
        let failed_at = failed_at.filter(|at| *at <= now.saturating_add(delay_ms))?;
        let due = failed_at.saturating_add(delay_ms);
        let wait = u64::try_from(due.saturating_sub(now)).ok()?;
        (wait > 0).then(|| Duration::from_millis(wait).min(delay))
    }
}

/// `….retry.10s`, `….retry.5m`: the name of a topic in which records wait for their next attempt.
pub(super) fn is_retry_tier(topic: &str) -> bool {
    let tier = topic
        .rsplit_once(".retry.")
        .map_or("", |(_, delay)| delay)
        .trim_end_matches(|unit: char| unit.is_ascii_lowercase());
    !tier.is_empty() && tier.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Message, MessageBuilder, header_names as names};

    const NOW: i64 = 1_800_000_000_000;
    const MINUTE: Duration = Duration::from_secs(60);

    fn rules() -> Rules {
        Rules {
            action: Action::SendBack,
            source: "orders.dlq".into(),
            parking_lot: "orders.dlq.parked".into(),
            allowed: vec!["orders".into()],
            allowed_patterns: vec![Regex::new("^(?:refunds.*)$").unwrap()],
            retry_topics: vec!["orders-retry-0".into()],
            threshold: 5,
            backoff: None,
            group: None,
            topic_per_group: false,
        }
    }

    fn letter_from(topic: &str) -> MessageBuilder {
        Message::builder()
            .topic("orders.dlq")
            .header(names::ORIGINAL_TOPIC, topic)
            .header(names::ORIGINAL_PARTITION, "3")
            .header(names::ORIGINAL_OFFSET, "42")
            .header(names::ORIGINAL_TIMESTAMP, "7")
            .header(names::CONSUMER_GROUP, "billing")
            .header(names::ERROR_KIND, "timeout")
    }

    fn parked(verdict: &Verdict<'_>) -> Option<ParkReason> {
        match verdict {
            Verdict::Park(reason) => Some(*reason),
            _ => None,
        }
    }

    // D10
    #[test]
    fn a_letter_goes_back_with_one_trip_more_until_the_threshold_whatever_its_headers_claim() {
        let rules = rules();
        for (count, next) in [
            (None, Some(1)),
            (Some(&b"0"[..]), Some(1)),
            (Some(b"4"), Some(5)),
            (Some(b"5"), None),
            (Some(b"6"), None),
            (Some(b"abc"), Some(1)),
            (Some(b"-1"), Some(1)),
            (Some(b"99999999999999999999"), None),
            (Some(&[0, 0, 0, 4]), Some(5)),
            (Some(&[0xff; 4]), Some(1)),
        ] {
            let letter = letter_from("orders");
            let letter = match count {
                Some(count) => letter.header(names::RETRY_COUNT, count),
                None => letter,
            };
            let letter = letter.record();
            match rules.judge(&letter, NOW) {
                Verdict::SendBack(back) => {
                    assert_eq!(Some(back.retry_count), next, "{count:?}");
                    assert_eq!(back.topic, "orders");
                    assert_eq!(back.message_id, "orders/3/42/7");
                    assert_eq!(back.group, Some("billing"));
                }
                verdict => {
                    assert_eq!(parked(&verdict), Some(ParkReason::Exhausted));
                    assert_eq!(next, None, "{count:?}");
                }
            }
        }
    }

    // D8
    #[test]
    fn only_allowed_topics_are_sent_to_and_never_those_of_dead_letters() {
        let mut rules = rules();
        let verdict =
            |rules: &Rules, topic: &str| parked(&rules.judge(&letter_from(topic).record(), NOW));
        assert_eq!(verdict(&rules, "orders"), None);
        assert_eq!(verdict(&rules, "refunds.eu"), None);
        for topic in ["orders2", "payments", "my-refunds", "../orders"] {
            let reason = verdict(&rules, topic);
            assert!(reason.is_some(), "{topic}");
        }
        rules.allowed_patterns = vec![Regex::new("^(?:.*)$").unwrap()];
        assert_eq!(verdict(&rules, "payments"), None);
        for topic in [
            "orders.dlq",
            "orders.dlq.parked",
            "orders.retry.10s",
            "orders-retry-0",
        ] {
            assert_eq!(verdict(&rules, topic), Some(ParkReason::Untrusted));
        }
        let nobody = Message::builder().topic("orders.dlq").value("v").record();
        assert_eq!(
            parked(&rules.judge(&nobody, NOW)),
            Some(ParkReason::NoOrigin)
        );
    }

    #[test]
    fn waiting_is_counted_from_the_failure_and_longer_from_trip_to_trip() {
        let mut rules = rules();
        rules.backoff = Some(Retry::exponential(MINUTE, 10 * MINUTE).jitter(0.0));
        let wait = |trips: &str, failed_at: i64| {
            let letter = letter_from("orders")
                .header(names::RETRY_COUNT, trips)
                .header(names::FAILED_AT, failed_at.to_string())
                .record();
            match rules.judge(&letter, NOW) {
                Verdict::Wait(wait) => Some(wait.as_secs()),
                Verdict::SendBack(_) => None,
                Verdict::Park(reason) => panic!("{reason}"),
            }
        };
        assert_eq!(wait("0", NOW), Some(60));
        assert_eq!(wait("0", NOW - 59_000), Some(1));
        assert_eq!(wait("0", NOW - 60_000), None);
        assert_eq!(wait("1", NOW - 60_000), Some(60));
        assert_eq!(wait("4", NOW), Some(600));
        assert_eq!(wait("0", 0), None);
        assert_eq!(wait("0", NOW + 10_000), Some(60), "a clock that is ahead");
        assert_eq!(wait("0", NOW + 61_000), None, "a time that nobody will see");
        assert_eq!(wait("0", i64::MAX), None);
    }

    #[test]
    fn a_group_has_a_topic_of_its_own_if_wanted() {
        let mut rules = rules();
        rules.topic_per_group = true;
        let letter = letter_from("orders").record();
        let Verdict::SendBack(back) = rules.judge(&letter, NOW) else {
            panic!("it is sent back")
        };
        assert_eq!(back.topic, "orders.billing.redrive");
        for group in ["", "no such group!", &"x".repeat(300)] {
            rules.group = Some(group.into());
            let verdict = rules.judge(&letter, NOW);
            let reason = parked(&verdict);
            // An empty name makes `orders..redrive`, which is a name.
            assert!(group.is_empty() || reason == Some(ParkReason::NoGroup));
        }
        rules.group = Some("ours".into());
        let Verdict::SendBack(back) = rules.judge(&letter, NOW) else {
            panic!("it is sent back")
        };
        assert_eq!(
            (back.topic.as_str(), back.group),
            ("orders.ours.redrive", Some("ours"))
        );
    }

    #[test]
    fn by_hand_letters_are_parked_or_begin_anew() {
        let mut rules = rules();
        let letter = letter_from("orders")
            .header(names::RETRY_COUNT, "9")
            .record();
        rules.action = Action::Park;
        assert_eq!(parked(&rules.judge(&letter, NOW)), Some(ParkReason::ByHand));
        rules.action = Action::Unpark;
        let Verdict::SendBack(back) = rules.judge(&letter, NOW) else {
            panic!("it is sent back")
        };
        assert_eq!(back.retry_count, 1);
    }

    #[test]
    fn retry_tiers_are_known_by_their_names() {
        for topic in ["orders.retry.10s", "a.retry.b.retry.1m", "x.retry.600"] {
            assert!(is_retry_tier(topic), "{topic}");
        }
        for topic in [
            "orders",
            "orders.retry",
            "orders.retry.",
            "orders.retry.log",
        ] {
            assert!(!is_retry_tier(topic), "{topic}");
        }
    }
}
