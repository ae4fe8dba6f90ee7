//! What others write into headers, made sense of: any bytes at all may stand there, and what is malformed counts as
//! absent.

/// Longer names of classes and groups are taken for malformed: no real one is, and a part of one would be another.
const LONGEST_NAME: usize = 512;

/// Enough for a message and its causes, too little to push a record over its topic's limit.
pub(super) const LONGEST_MESSAGE: usize = 1_024;

/// A count in decimal or in binary, clamped.
pub(crate) fn count(value: &[u8]) -> Option<u32> {
    integer(value).map(|number| u32::try_from(number).unwrap_or(u32::MAX))
}

/// A count that Spring Kafka wrote in one byte once, and reads so to this day. A digit is decimal.
pub(super) fn count_in_a_byte(value: &[u8]) -> Option<u32> {
    match value {
        &[byte] if !byte.is_ascii_digit() => Some(byte.into()),
        _ => count(value),
    }
}

/// Not clamped: a partition in range but not the one that was written would be the place of some other record.
pub(super) fn partition(value: &[u8]) -> Option<i32> {
    i32::try_from(integer(value)?).ok()
}

/// Not clamped, for the same reason.
pub(super) fn offset(value: &[u8]) -> Option<i64> {
    i64::try_from(integer(value)?).ok()
}

/// Unix milliseconds; what is neither negative nor too large.
pub(super) fn timestamp(value: &[u8]) -> Option<i64> {
    offset(value)
}

/// Unix milliseconds as Java's `BigInteger` writes them: two's complement in as few bytes as they need.
pub(super) fn shortest_timestamp(value: &[u8]) -> Option<i64> {
    let negative = *value.first()? >= 0x80;
    (!negative && value.len() <= 8).then(|| big_endian(value) as i64)
}

/// The name of a class or a group.
pub(super) fn name(value: &[u8]) -> Option<&str> {
    (1..=LONGEST_NAME).contains(&value.len()).then_some(())?;
    str::from_utf8(value).ok()
}

/// Text, cut at [`LONGEST_MESSAGE`] between two characters. What is cut off is not looked at.
pub(super) fn message(value: &[u8]) -> Option<&str> {
    let Some((start, _)) = value.split_at_checked(LONGEST_MESSAGE) else {
        return str::from_utf8(value).ok();
    };
    match str::from_utf8(start) {
        Ok(text) => Some(text),
        // The cut went through a character.
        Err(error) if error.error_len().is_none() => {
            str::from_utf8(&start[..error.valid_up_to()]).ok()
        }
        Err(_) => None,
    }
}

/// Decimal digits, or 4 or 8 bytes with the highest first.
///
/// Bytes that begin with neither a digit nor a zero are no number that anybody has counted to, but text or a negative
/// number. Bytes that are all digits are decimal: as a binary number they would be an offset of more than 10^18.
fn integer(value: &[u8]) -> Option<u64> {
    match value {
        [] => None,
        digits if digits.iter().all(u8::is_ascii_digit) => {
            Some(digits.iter().fold(0, |number: u64, digit| {
                number
                    .saturating_mul(10)
                    .saturating_add(u64::from(digit - b'0'))
            }))
        }
        [0, ..] if matches!(value.len(), 4 | 8) => Some(big_endian(value)),
        _ => None,
    }
}

fn big_endian(value: &[u8]) -> u64 {
    value
        .iter()
        .fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    // D10
    #[test]
    fn a_count_is_read_in_decimal_and_in_binary_and_clamped() {
        for (value, expected) in [
            (&b"0"[..], Some(0)),
            (b"007", Some(7)),
            (b"4294967295", Some(u32::MAX)),
            (b"99999999999999999999", Some(u32::MAX)),
            (&[b'9'; 5_000], Some(u32::MAX)),
            (&[0, 0, 0, 2], Some(2)),
            (&[0, 0, 0, 0, 0, 0, 0, 3], Some(3)),
            (&[0, 1, 0, 0, 0, 0, 0, 0], Some(u32::MAX)),
            (b"", None),
            (b"abc", None),
            (b"abcd", None),
            (b"x", None),
            (&[5], None),
            (b"-1", None),
            (b"+1", None),
            (b"1.5", None),
            (b" 1", None),
            (b"1 ", None),
            (&[0xff; 4], None),
            (&[0xff; 8], None),
            (&[0, 2], None),
            (&[0, 0, 2], None),
            (&[0; 9], None),
            ("٣".as_bytes(), None),
        ] {
            assert_eq!(count(value), expected, "{value:?}");
        }
        assert_eq!(count_in_a_byte(&[5]), Some(5));
        assert_eq!(count_in_a_byte(&[0xff]), Some(255));
        assert_eq!(count_in_a_byte(&[0, 0, 0, 5]), Some(5));
        assert_eq!(count_in_a_byte(b"5"), Some(5));
    }

    #[test]
    fn a_partition_or_an_offset_out_of_range_is_none_at_all() {
        assert_eq!(partition(b"2147483647"), Some(i32::MAX));
        assert_eq!(partition(b"2147483648"), None);
        assert_eq!(partition(&[0, 0, 1, 4]), Some(260));
        assert_eq!(offset(b"9223372036854775807"), Some(i64::MAX));
        assert_eq!(offset(b"9223372036854775808"), None);
        assert_eq!(offset(&42_i64.to_be_bytes()), Some(42));
        assert_eq!(offset(&(-1_i64).to_be_bytes()), None);
    }

    #[test]
    fn a_timestamp_may_come_in_as_few_bytes_as_it_needs() {
        assert_eq!(
            shortest_timestamp(&[0x01, 0x8b, 0xcf, 0xe5, 0x68, 0x00]),
            Some(1_700_000_000_000)
        );
        assert_eq!(shortest_timestamp(&[0x00, 0x80]), Some(128));
        assert_eq!(shortest_timestamp(&i64::MAX.to_be_bytes()), Some(i64::MAX));
        for malformed in [&[][..], &[0xff], &[0x80, 0], &[0; 9], &[0xff; 8]] {
            assert_eq!(shortest_timestamp(malformed), None, "{malformed:?}");
        }
    }

    #[test]
    fn text_is_bounded_and_no_character_is_cut_in_two() {
        let long = "x".repeat(1_023) + "ü";
        assert_eq!(message(long.as_bytes()), Some(&long[..1_023]));
        assert_eq!(message(&long.as_bytes()[1..]), Some(&long[1..]));
        assert_eq!(message(b"\xff"), None);
        assert_eq!(message(&[0xff; 2_000]), None);
        assert_eq!(message(b""), Some(""));
        assert_eq!(name("x".repeat(512).as_bytes()).map(str::len), Some(512));
        for malformed in [&b""[..], &[b'x'; 513], b"\xff"] {
            assert_eq!(name(malformed), None);
        }
    }

    proptest! {
        #[test]
        fn numbers_come_back_from_every_encoding(number in 0..i64::MAX >> 8) {
            let text = number.to_string();
            prop_assert_eq!(offset(text.as_bytes()), Some(number));
            prop_assert_eq!(offset(&number.to_be_bytes()), Some(number));
            let bytes = number.to_be_bytes();
            // As `BigInteger`: no zero byte before one whose highest bit is clear.
            let mut start = 0;
            while start < 7 && bytes[start] == 0 && bytes[start + 1] < 0x80 {
                start += 1;
            }
            prop_assert_eq!(shortest_timestamp(&bytes[start..]), Some(number));
        }

        #[test]
        fn any_bytes_are_read_within_bounds(value in proptest::collection::vec(any::<u8>(), 0..2_000)) {
            let _ = (count(&value), partition(&value), offset(&value), shortest_timestamp(&value));
            prop_assert!(message(&value).is_none_or(|text| text.len() <= LONGEST_MESSAGE));
            prop_assert!(name(&value).is_none_or(|text| text.len() <= LONGEST_NAME));
        }
    }
}
