//! What a store knows a message by: namespace, group and id as one key of bounded length.

use std::fmt::{self, Write};

use sha2::{Digest, Sha256};

/// The key under which a [`Store`](super::Store) keeps a message: a namespace, the consumer group, and the message's id.
///
/// Different parts never give the same key, whatever bytes are in them. Up to [`Id::MAX_LEN`] bytes it is
/// `namespace:group:id`, with `:`, `#` and `%` of the first two percent-encoded, so that people recognise it in the store.
/// A longer one ends in the SHA-256 of all that, in hexadecimal: `namespace:group#…`, or `#…` where not even those fit.
///
/// ```
/// use reliable_consumer::idempotency::Id;
///
/// let id = Id::new("shop", "billing", "order-17");
/// assert_eq!(id.as_bytes(), b"shop:billing:order-17");
/// assert_ne!(Id::new("a:b", "c", "d"), Id::new("a", "b:c", "d"));
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id(Box<[u8]>);

impl Id {
    /// The most bytes that a key has: 256. What fits into an index of every common database.
    pub const MAX_LEN: usize = 256;

    /// The key of the message `id` for `group`, apart from other uses of the same store by `namespace`.
    pub fn new(namespace: &str, group: &str, id: impl AsRef<[u8]>) -> Self {
        Self::under(&Self::prefix(namespace, group), id.as_ref())
    }

    /// The key of a message where ids are told apart by topics too, see [`IdScope::Topic`](super::IdScope::Topic):
    /// `namespace:group#topic:id`.
    ///
    /// ```
    /// use reliable_consumer::idempotency::Id;
    ///
    /// let id = Id::in_topic("shop", "billing", "orders", "17");
    /// assert_eq!(id.as_bytes(), b"shop:billing#orders:17");
    /// ```
    pub fn in_topic(namespace: &str, group: &str, topic: &str, id: impl AsRef<[u8]>) -> Self {
        Self::under_topic(&Self::prefix(namespace, group), topic, id.as_ref())
    }

    /// No group has a `#`, and what was hashed without a topic has no colon after it.
    pub(super) fn under_topic(prefix: &str, topic: &str, id: &[u8]) -> Self {
        let mut with_topic = String::with_capacity(prefix.len() + 1 + topic.len());
        with_topic.push_str(prefix);
        with_topic.push('#');
        escape(&mut with_topic, topic);
        Self::under(&with_topic, id)
    }

    /// What the keys of all messages have in common.
    pub(super) fn prefix(namespace: &str, group: &str) -> String {
        let mut key = String::with_capacity(64);
        escape(&mut key, namespace);
        key.push(':');
        escape(&mut key, group);
        key
    }

    /// The key of `id` in an inbox of this name: a table of its own has no namespaces.
    #[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
    pub(super) fn of_inbox(name: &str, id: &[u8]) -> Self {
        let mut key = String::with_capacity(64);
        escape(&mut key, name);
        Self::under(&key, id)
    }

    /// `prefix` holds no more `#` and colons than the caller always puts there: so a whole key (one colon more) and those that
    /// were hashed (one `#` more) are told apart.
    pub(super) fn under(prefix: &str, id: &[u8]) -> Self {
        let mut key = Vec::with_capacity(prefix.len() + 1 + id.len());
        key.extend_from_slice(prefix.as_bytes());
        key.push(b':');
        key.extend_from_slice(id);
        if key.len() > Self::MAX_LEN {
            let hash = hexadecimal(&Sha256::digest(&key));
            key.clear();
            if prefix.len() + 1 + hash.len() <= Self::MAX_LEN {
                key.extend_from_slice(prefix.as_bytes());
            }
            key.push(b'#');
            key.extend_from_slice(hash.as_bytes());
        }
        Self(key.into())
    }

    /// The bytes to store: from 2 to [`Id::MAX_LEN`], of any value.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Ids come from messages: what is not text shows as escapes.
impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

fn escape(to: &mut String, part: &str) {
    for character in part.chars() {
        match character {
            ':' => to.push_str("%3A"),
            '#' => to.push_str("%23"),
            '%' => to.push_str("%25"),
            other => to.push(other),
        }
    }
}

pub(super) fn hexadecimal(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        write!(text, "{byte:02x}").expect("a string takes what is written");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_short_key_can_be_read_and_a_long_one_ends_in_a_hash() {
        assert_eq!(Id::new("", "g", "").as_bytes(), b":g:");
        assert_eq!(
            Id::new("shop", "billing#1", [0, 255]).as_bytes(),
            b"shop:billing%231:\x00\xff"
        );
        assert_eq!(Id::new("n", "g", "x".repeat(252)).as_bytes().len(), 256);

        let hashed = Id::new("n", "g", "x".repeat(253));
        assert!(hashed.as_bytes().starts_with(b"n:g#"), "{hashed:?}");
        assert_eq!(hashed.as_bytes().len(), 4 + 64);
        let all_hashed = Id::new("n", &"g".repeat(254), "x");
        assert_eq!(
            (all_hashed.as_bytes()[0], all_hashed.as_bytes().len()),
            (b'#', 65)
        );
    }

    #[test]
    fn an_id_that_looks_like_a_hash_is_another() {
        let long = "x".repeat(300);
        let hashed = Id::new("n", "g", &long);
        let tail = String::from_utf8(hashed.as_bytes()[3..].to_vec()).expect("hexadecimal");
        for (namespace, group, id) in [("n", "g", tail.as_str()), ("n", "g#", &tail[1..])] {
            assert_ne!(Id::new(namespace, group, id), hashed);
        }
        let whole = format!("n:g{tail}");
        assert_ne!(Id::new("", "", whole), hashed);
    }

    #[test]
    fn a_topic_in_the_key_makes_it_another_whatever_the_group_and_the_id_are() {
        let id = Id::in_topic("n", "g", "t", "i");
        assert_ne!(id, Id::in_topic("n", "g", "u", "i"));
        for (group, id_of_group) in [("g#t", "i"), ("g", "t:i"), ("g", "#t:i"), ("g%23t", "i")] {
            assert_ne!(id, Id::new("n", group, id_of_group));
        }
        // Hashed ones too.
        let long = "x".repeat(300);
        let keys: HashSet<Id> = [
            Id::new("n", "g", &long),
            Id::in_topic("n", "g", "t", &long),
            Id::in_topic("n", "g", "u", &long),
        ]
        .into();
        assert_eq!(keys.len(), 3);
    }

    proptest! {
        #[test]
        fn different_parts_give_different_keys(
            parts in proptest::collection::hash_set(
                ("[a:#%]{0,4}", "[a:#%]{0,4}", "[a:#%]{0,4}"),
                1..40,
            )
        ) {
            let keys: HashSet<Id> = parts.iter().map(|(n, g, id)| Id::new(n, g, id)).collect();
            prop_assert_eq!(keys.len(), parts.len());
        }
    }
}
