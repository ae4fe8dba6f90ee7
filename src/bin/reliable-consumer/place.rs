//! A record's place in a topic, as `PARTITION@OFFSET`.

use std::{fmt, str::FromStr};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    pub partition: i32,
    pub offset: i64,
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wanted = || "expected PARTITION@OFFSET, such as 3@1042".to_owned();
        let (partition, offset) = text.split_once('@').ok_or_else(wanted)?;
        let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if !digits(partition) || !digits(offset) {
            return Err(wanted());
        }
        let place = Self {
            partition: partition.parse().map_err(|_| wanted())?,
            offset: offset.parse().map_err(|_| wanted())?,
        };
        // The offset behind it has to exist too, and librdkafka counts partitions up to here.
        (place.offset < i64::MAX && place.partition < i32::MAX)
            .then_some(place)
            .ok_or_else(wanted)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.partition, self.offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_partition_at_offset_and_nothing_else() {
        let place = "3@1042".parse::<Place>().unwrap();
        assert_eq!((place.partition, place.offset), (3, 1042));
        assert_eq!(place.to_string(), "3@1042");
        for wrong in [
            "",
            "@",
            "3",
            "3@",
            "@4",
            "-1@2",
            "+1@2",
            "1@-2",
            "1@2@3",
            "2147483647@1",
        ] {
            assert!(wrong.parse::<Place>().is_err(), "{wrong}");
        }
    }
}
