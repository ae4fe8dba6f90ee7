//! Which letters are meant.

use reliable_consumer::LetterFilter;

use crate::{arguments::Filter, failure::Failure};

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
    /// That it can mean anything.
    pub fn check(&self) -> Result<(), Failure> {
        match (self.since, self.until) {
            (Some(since), Some(until)) if since >= until => Err(Failure::Usage(
                "no letter failed both --since and before --until: the first has to be the earlier time"
                    .into(),
            )),
            _ => Ok(()),
        }
    }

    /// What is asked for, as the library understands it.
    pub fn letters(&self) -> LetterFilter {
        let mut filter = LetterFilter::all();
        for origin in &self.origin {
            filter = filter.topic(origin);
        }
        for name in &self.kind {
            filter = filter.error_named(name);
        }
        if let Some(since) = self.since {
            filter = filter.failed_after(since.system_time());
        }
        if let Some(until) = self.until {
            filter = filter.failed_before(until.system_time());
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
        filter
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
        which.letters().matches(&letter)
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
        let between = |since, until| Filter {
            since: Some(Moment(since)),
            until: Some(Moment(until)),
            ..Filter::default()
        };
        assert!(between(1, 2).check().is_ok() && between(2, 1).check().is_err());
        for wrong in ["hex:6", "hex:zz", "hex:+1"] {
            let read = key_wanted(wrong);
            assert!(read.is_err(), "{wrong}: {read:?}");
        }
    }
}
