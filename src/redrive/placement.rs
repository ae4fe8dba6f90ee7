//! To which partition a record goes back.

/// How a [`Redriver`](crate::Redriver) chooses the partition that a record goes back to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Placement {
    /// The partition that Java's default partitioner (`murmur2_random` of librdkafka) gives to its key now: the one that
    /// it came from, unless partitions were added since. A record without a key goes to the one that it came from, to any
    /// if that is no more. The default.
    #[default]
    ByKey,
    /// The partition that it came from, and the one for its key only if that is no more. For producers that choose
    /// partitions in another way than Java's: librdkafka's own default is `consistent_random`.
    Original,
}

impl Placement {
    /// `None` leaves it to the producer: any.
    pub(super) fn choose(self, key: Option<&[u8]>, original: i32, partitions: i32) -> Option<i32> {
        let still_there = (0..partitions).contains(&original).then_some(original);
        let by_key = key
            .filter(|_| partitions > 0)
            .map(|key| ((murmur2(key) & 0x7fff_ffff) % partitions as u32) as i32);
        match self {
            Self::ByKey => by_key.or(still_there),
            Self::Original => still_there.or(by_key),
        }
    }
}

/// The hash that Kafka's Java clients use: Austin Appleby's MurmurHash2 with their seed.
fn murmur2(data: &[u8]) -> u32 {
    const M: u32 = 0x5bd1_e995;
    let mut hash = 0x9747_b28c ^ data.len() as u32;
    let (words, tail) = data.as_chunks::<4>();
    for word in words {
        let mut k = u32::from_le_bytes(*word).wrapping_mul(M);
        k ^= k >> 24;
        hash = hash.wrapping_mul(M) ^ k.wrapping_mul(M);
    }
    if !tail.is_empty() {
        let mut last = [0; 4];
        last[..tail.len()].copy_from_slice(tail);
        hash = (hash ^ u32::from_le_bytes(last)).wrapping_mul(M);
    }
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(M);
    hash ^ (hash >> 15)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_hashed_as_javas_clients_do() {
        for (key, hash) in [
            ("21", -973_932_308),
            ("foobar", -790_332_482),
            ("a-little-bit-long-string", -985_981_536),
            ("a-little-bit-longer-string", -1_486_304_829),
            (
                "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8",
                -58_897_971,
            ),
            ("abc", 479_470_107),
        ] {
            assert_eq!(murmur2(key.as_bytes()) as i32, hash, "{key}");
        }
    }

    #[test]
    fn a_record_goes_where_its_key_belongs_now_and_without_a_key_where_it_was() {
        let by_key =
            |key: &str, partitions| Placement::ByKey.choose(Some(key.as_bytes()), 0, partitions);
        let moved = (0..100).find(|n| by_key(&n.to_string(), 2) != by_key(&n.to_string(), 4));
        assert!(moved.is_some(), "partitions that are added move keys");
        assert!(by_key("", 3).is_some(), "an empty key is a key");
        let placed = Placement::ByKey;
        assert_eq!(placed.choose(None, 2, 3), Some(2));
        assert_eq!(placed.choose(None, 2, 2), None);
        let placed = Placement::Original;
        assert_eq!(placed.choose(Some(b"k"), 2, 3), Some(2));
        assert_eq!(placed.choose(Some(b"k"), 2, 2), by_key("k", 2));
        for partitions in [i32::MIN, -1, 0] {
            assert_eq!(Placement::ByKey.choose(Some(b"k"), 0, partitions), None);
        }
    }
}
