//! Which letters are meant.

use std::time::{Duration, UNIX_EPOCH};

use reliable_consumer::{LetterFilter, Record, Story, header_names, operate::failure_kind};

use crate::arguments::Filter;

/// A header's name, and its value if that matters.
pub type HeaderWanted = (String, Option<String>);

pub fn header_wanted(text: &str) -> Result<HeaderWanted, String> {
    let (name, value) = match text.split_once('=') {
        Some((name, value)) => (name, Some(value.to_owned())),
        None => (text, None),
    };
    match name {
        "" => Err("expected NAME or NAME=VALUE".into()),
        name => Ok((name.to_owned(), value)),
    }
}

pub fn key_wanted(text: &str) -> Result<Vec<u8>, String> {
    let Some(digits) = text.strip_prefix("hex:") else {
        return Ok(text.as_bytes().to_vec());
    };
    let digits = digits.as_bytes();
    let digit = |digit: u8| char::from(digit).to_digit(16);
    let bytes = digits.chunks(2).map(|pair| match *pair {
        [high, low] => u8::try_from(digit(high)? * 16 + digit(low)?).ok(),
        _ => None,
    });
    let bytes: Option<Vec<u8>> = bytes.collect();
    bytes.ok_or_else(|| "expected an even number of hexadecimal digits after hex:".into())
}

impl Filter {
    /// Whether the letter is meant; whether it is open is another matter.
    pub fn means(&self, letter: &Record, story: Option<&Story<'_>>) -> bool {
        let origin = story.and_then(|story| story.origin);
        let failed_at = story.and_then(|story| story.failed_at);
        (self.origin.is_empty()
            || origin.is_some_and(|origin| self.origin.iter().any(|it| it == origin.topic)))
            && (self.kind.is_empty() || self.kind.iter().any(|it| is_kind(it, letter, story)))
            && self
                .since
                .is_none_or(|since| failed_at.is_some_and(|at| at >= since.0))
            && self
                .until
                .is_none_or(|until| failed_at.is_some_and(|at| at < until.0))
            && (self.key.is_empty()
                || letter
                    .key()
                    .is_some_and(|key| self.key.iter().any(|it| it == key)))
            && self.header.iter().all(|(name, wanted)| {
                letter.headers().get_all(name).any(|value| match wanted {
                    None => true,
                    Some(wanted) => value == Some(wanted.as_bytes()),
                })
            })
    }
}

impl Filter {
    pub fn is_empty(&self) -> bool {
        let Self {
            origin,
            kind,
            since,
            until,
            key,
            header,
        } = self;
        let lists = [
            origin.is_empty(),
            kind.is_empty(),
            key.is_empty(),
            header.is_empty(),
        ];
        !lists.contains(&false) && since.is_none() && until.is_none()
    }

    /// The same for a redriver, which knows this library's kinds only.
    pub fn for_redriver(&self) -> Result<LetterFilter, String> {
        let mut filter = LetterFilter::all();
        for origin in &self.origin {
            filter = filter.topic(origin);
        }
        for name in &self.kind {
            let kind = failure_kind(name);
            let kind = kind.ok_or_else(|| format!("letters cannot be sent back by the kind {name}: it is none of this library's; filter by --origin, --header or time"))?;
            filter = filter.error_kind(kind);
        }
        let time = |millis: i64| {
            let distance = Duration::from_millis(millis.unsigned_abs());
            match millis < 0 {
                true => UNIX_EPOCH - distance,
                false => UNIX_EPOCH + distance,
            }
        };
        if let Some(since) = self.since {
            filter = filter.failed_after(time(since.0));
        }
        if let Some(until) = self.until {
            filter = filter.failed_before(time(until.0));
        }
        for key in &self.key {
            filter = filter.key(key.clone());
        }
        for (name, value) in &self.header {
            filter = match value {
                Some(value) => filter.header(name, value.as_bytes()),
                None => filter.has_header(name),
            };
        }
        Ok(filter)
    }
}

/// A kind of ours, also of a later version's, or a class with or without its package.
fn is_kind(wanted: &str, letter: &Record, story: Option<&Story<'_>>) -> bool {
    let Some(error) = story.map(|story| story.error) else {
        return false;
    };
    if let Some(class) = error.class {
        return class == wanted || class.rsplit(['.', '$']).next() == Some(wanted);
    }
    match error.kind {
        Some(kind) => kind.as_str() == wanted,
        None => letter.headers().get_str(header_names::ERROR_KIND) == Some(wanted),
    }
}

#[cfg(test)]
mod tests {
    use reliable_consumer::Message;

    use super::*;
    use crate::time::Moment;

    fn means(which: &Filter) -> bool {
        let letter = Message::builder()
            .key(b"k\xff")
            .header("tenant", "blue")
            .header("originalTopic", "orders")
            .header("originalPartition", "0")
            .header("originalOffset", "1")
            .header("originalTimestamp", "5")
            .header("errorKind", "timeout")
            .header("failedAt", "60000")
            .record();
        which.means(&letter, Story::of(&letter).as_ref())
    }

    #[test]
    fn a_letter_has_to_meet_all_that_is_asked_and_one_of_each() {
        let asked = |change: &dyn Fn(&mut Filter)| {
            let mut which = Filter::default();
            change(&mut which);
            means(&which)
        };
        let key = |text| key_wanted(text).unwrap();
        let header = |text| header_wanted(text).unwrap();
        assert!(asked(&|_| ()));
        assert!(asked(&|it| it.origin = vec!["x".into(), "orders".into()]));
        assert!(!asked(&|it| it.origin = vec!["order".into()]));
        assert!(asked(&|it| it.kind = vec!["timeout".into()]));
        assert!(!asked(&|it| it.kind = vec!["panic".into()]));
        assert!(asked(&|it| it.since = Some(Moment(60_000))));
        assert!(!asked(&|it| it.until = Some(Moment(60_000))));
        assert!(asked(&|it| it.key = vec![key("hex:6bff")]));
        assert!(!asked(&|it| it.key = vec![key("k")]));
        assert!(asked(
            &|it| it.header = vec![header("tenant"), header("tenant=blue")]
        ));
        assert!(!asked(
            &|it| it.header = vec![header("tenant=blue"), header("x")]
        ));
        for wrong in ["hex:6", "hex:zz", "hex:+1"] {
            let read = key_wanted(wrong);
            assert!(read.is_err(), "{wrong}: {read:?}");
        }
    }

    #[test]
    fn a_class_is_named_with_or_without_its_package() {
        let letter = Message::builder()
            .header("kafka_dlt-exception-fqcn", "java.io.IOException")
            .record();
        let story = Story::of(&letter);
        for (kind, expected) in [
            ("java.io.IOException", true),
            ("IOException", true),
            ("io", false),
        ] {
            let which = Filter {
                kind: vec![kind.into()],
                ..Filter::default()
            };
            assert_eq!(which.means(&letter, story.as_ref()), expected, "{kind}");
        }
    }
}
