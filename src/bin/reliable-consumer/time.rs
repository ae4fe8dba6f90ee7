//! Times as operators write and read them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jiff::{Timestamp, civil::DateTime, tz::TimeZone};

/// A point in time, in Unix milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(pub i64);

impl Moment {
    pub fn system_time(self) -> SystemTime {
        let distance = Duration::from_millis(self.0.unsigned_abs());
        match self.0 < 0 {
            true => UNIX_EPOCH - distance,
            false => UNIX_EPOCH + distance,
        }
    }
}

pub fn now() -> i64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    millis(since)
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// `90s`, `15m`, `2h`, `7d`, `250ms`.
pub fn duration(text: &str) -> Result<Duration, String> {
    let wanted = || "expected a number and a unit: 250ms, 90s, 15m, 2h or 7d".to_owned();
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .ok_or_else(wanted)?;
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| wanted())?;
    let unit = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(wanted()),
    };
    let millis = number.checked_mul(unit).ok_or_else(wanted)?;
    (millis > 0)
        .then_some(Duration::from_millis(millis))
        .ok_or_else(|| "expected more than 0".to_owned())
}

/// A tier's delay, as it ends its topic's name.
pub fn tier(text: &str) -> Result<String, String> {
    duration(text).map(|_| text.to_owned())
}

/// A time, or how long ago it was.
pub fn moment(text: &str) -> Result<Moment, String> {
    if let Ok(ago) = duration(text) {
        return Ok(Moment(now().saturating_sub(millis(ago))));
    }
    if let Ok(time) = text.parse::<Timestamp>() {
        return Ok(Moment(time.as_millisecond()));
    }
    let utc = text
        .parse::<DateTime>()
        .or_else(|_| text.parse::<jiff::civil::Date>().map(|date| date.into()))
        .and_then(|time| TimeZone::UTC.to_timestamp(time));
    utc.map(|time| Moment(time.as_millisecond()))
        .map_err(|_| "expected how long ago (2h) or a time (2026-11-29T03:00:00Z)".into())
}

/// To the second, in UTC; a number where no calendar has it.
pub fn shown(millis: i64) -> String {
    match Timestamp::from_millisecond(millis) {
        Ok(time) => time.strftime("%Y-%m-%d %H:%M:%S").to_string(),
        Err(_) => format!("{millis} ms"),
    }
}

/// The hour that it is in.
pub fn hour(millis: i64) -> String {
    match Timestamp::from_millisecond(millis) {
        Ok(time) => time.strftime("%Y-%m-%dT%H:00:00Z").to_string(),
        Err(_) => "unknown".into(),
    }
}

/// In its two largest units.
pub fn age(millis: i64) -> String {
    let seconds = millis.max(0) / 1_000;
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m {}s", seconds % 60),
        (0, ..) => format!("{hours}h {minutes}m"),
        _ => format!("{days}d {hours}h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_people_write_them() {
        let at = |text| moment(text).unwrap().0;
        assert_eq!(at("2023-11-14T22:13:20Z"), 1_700_000_000_000);
        assert_eq!(at("2023-11-14T23:13:20+01:00"), 1_700_000_000_000);
        assert_eq!(at("2023-11-14T22:13:20"), 1_700_000_000_000);
        assert_eq!(at("2023-11-14"), 1_699_920_000_000);
        assert_eq!(duration("0s").unwrap_err(), "expected more than 0");
        assert!((now() - at("2h") - 7_200_000).abs() < 10_000);
        for wrong in [
            "",
            "yesterday",
            "2",
            "2x",
            "-2h",
            "h",
            "99999999999999999999d",
            "0s",
        ] {
            assert!(moment(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn any_number_of_milliseconds_can_be_shown() {
        assert_eq!(shown(1_700_000_000_000), "2023-11-14 22:13:20");
        assert_eq!(hour(1_700_000_000_000), "2023-11-14T22:00:00Z");
        for millis in [i64::MIN, -1, 0, i64::MAX] {
            assert!(!shown(millis).is_empty() && !hour(millis).is_empty());
            assert!(!age(millis).is_empty());
        }
        assert_eq!(age(61_000), "1m 1s");
        assert_eq!(age(90_000_000), "1d 1h");
    }
}
