//! Records as they came from Kafka: what one holds, and how a batch of them shares one buffer.

use std::{fmt, sync::Arc};

mod chunk;
mod headers;
mod timestamp;

pub(crate) use chunk::{Chunk, ChunkBuilder, Residency, Source};
pub use headers::{Header, Headers};
pub use timestamp::{Timestamp, TimestampKind};

/// What keeping track of a record takes besides its bytes: its row in the chunk, its places in window and lane.
const OVERHEAD: usize = 96;

/// One record of a Kafka topic, undecoded.
///
/// A record is a reference into the batch it was fetched with: cloning it copies no bytes. The other side of it is
/// that a record keeps its whole batch in memory. To keep one for long after the handler returned, copy what is needed
/// of it.
///
/// Its `Debug` output names the place and the sizes, never contents.
#[derive(Clone)]
pub struct Record {
    chunk: Arc<Chunk>,
    index: u32,
}

impl Record {
    /// The topic it was read from.
    pub fn topic(&self) -> &str {
        &self.chunk.source.topic
    }

    /// The partition it was read from.
    pub fn partition(&self) -> i32 {
        self.chunk.source.partition
    }

    /// Its offset in the partition.
    pub fn offset(&self) -> i64 {
        self.chunk.entry(self.index).offset
    }

    /// The key. `None` is a null key, which differs from an empty one.
    pub fn key(&self) -> Option<&[u8]> {
        self.chunk.key(self.index)
    }

    /// The value. `None` is a null value, a *tombstone*, which differs from an empty one.
    pub fn value(&self) -> Option<&[u8]> {
        self.chunk.value(self.index)
    }

    /// When it was produced or appended; `None` for records written without one.
    pub fn timestamp(&self) -> Option<Timestamp> {
        self.chunk.entry(self.index).timestamp
    }

    /// Its headers.
    pub fn headers(&self) -> Headers<'_> {
        self.chunk.headers(self.index)
    }

    /// The epoch of the partition leader that wrote it, if the broker told.
    pub fn leader_epoch(&self) -> Option<i32> {
        let epoch = self.chunk.entry(self.index).leader_epoch;
        (epoch >= 0).then_some(epoch)
    }

    /// Bytes that this record counts for in memory budgets.
    pub(crate) fn size(&self) -> usize {
        self.chunk.record_bytes(self.index) + OVERHEAD
    }

    /// This record without the rest of its chunk, for one that stays while its neighbours go: copied if it is less
    /// than half of the chunk, since what it would hold on to is then more than what it needs.
    pub(crate) fn compact(&self) -> Record {
        if self.size() < self.chunk.held() / 2 {
            self.chunk.single(self.index).record(0)
        } else {
            self.clone()
        }
    }
}

impl fmt::Debug for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Record")
            .field("topic", &self.topic())
            .field("partition", &self.partition())
            .field("offset", &self.offset())
            .field("timestamp", &self.timestamp())
            .field("key_bytes", &self.key().map(<[u8]>::len))
            .field("value_bytes", &self.value().map(<[u8]>::len))
            .field("headers", &self.headers().len())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn builder() -> ChunkBuilder {
        let source = Source::new("orders", 3);
        ChunkBuilder::new(Arc::new(source), None)
    }

    #[test]
    fn every_record_of_a_chunk_reads_as_it_was_pushed() {
        let mut builder = builder();
        let created = Timestamp::new(1_700_000_000_000, TimestampKind::Create);
        builder.push(7, Some(created), Some(4), Some(b"k"), Some(b"value"));
        builder.header(b"h", Some(b"1"));
        builder.header(b"h", None);
        builder.push(9, None, None, Some(b"key"), Some(b"v"));
        builder.push(12, None, Some(-1), None, None);
        builder.header(b"last", Some(b""));
        assert_eq!(builder.len(), 3);
        assert!(!builder.is_full(10));
        let chunk = builder.finish();

        let first = chunk.record(0);
        assert_eq!(
            (first.topic(), first.partition(), first.offset()),
            ("orders", 3, 7)
        );
        assert_eq!(first.timestamp(), Some(created));
        assert_eq!(first.leader_epoch(), Some(4));
        assert_eq!(first.key(), Some(&b"k"[..]));
        assert_eq!(first.value(), Some(&b"value"[..]));
        assert_eq!(first.headers().len(), 2);
        assert_eq!(first.headers().get("h"), Some(&b"1"[..]));

        let second = chunk.record(1);
        assert_eq!((second.offset(), second.timestamp()), (9, None));
        assert_eq!(second.key(), Some(&b"key"[..]));
        assert_eq!(second.value(), Some(&b"v"[..]));
        assert!(second.headers().is_empty());
        assert_eq!(second.leader_epoch(), None);

        let third = chunk.record(2);
        assert_eq!(third.offset(), 12);
        assert_eq!(third.headers().get("last"), Some(&b""[..]));
        assert_eq!(third.leader_epoch(), None, "-1 is Kafka's unknown");
    }

    // D2
    #[test]
    fn a_null_key_or_value_differs_from_an_empty_one() {
        let mut builder = builder();
        builder.push(0, None, None, None, Some(b""));
        builder.push(1, None, None, Some(b""), None);
        let chunk = builder.finish();
        let (empty, tombstone) = (chunk.record(0), chunk.record(1));
        assert_eq!((empty.key(), empty.value()), (None, Some(&b""[..])));
        assert_eq!((tombstone.key(), tombstone.value()), (Some(&b""[..]), None));
    }

    #[test]
    fn a_compact_record_is_the_same_record_without_its_neighbours() {
        let mut builder = builder();
        for offset in 0..100 {
            builder.push(
                offset,
                None,
                Some(2),
                Some(b"key"),
                Some(&[offset as u8; 50]),
            );
            builder.header(b"name", Some(&[offset as u8]));
        }
        let chunk = builder.finish();
        let record = chunk.record(40).compact();
        assert!(!Arc::ptr_eq(&record.chunk, &chunk));
        assert_eq!(
            (record.topic(), record.offset(), record.partition()),
            ("orders", 40, 3)
        );
        assert_eq!(
            (record.key(), record.leader_epoch()),
            (Some(&b"key"[..]), Some(2))
        );
        assert_eq!(record.value(), Some(&[40; 50][..]));
        assert_eq!(record.headers().get("name"), Some(&[40][..]));
        assert_eq!(record.headers().len(), 1);
        assert_eq!(record.size(), chunk.record(40).size());
    }

    #[test]
    fn a_record_that_is_most_of_its_chunk_is_not_copied() {
        let mut builder = builder();
        builder.push(0, None, None, None, Some(&[1; 10_000]));
        builder.push(1, None, None, None, Some(b"small"));
        let chunk = builder.finish();
        assert!(Arc::ptr_eq(&chunk.record(0).compact().chunk, &chunk));
    }

    #[test]
    fn size_counts_key_value_and_headers() {
        let mut builder = builder();
        builder.push(0, None, None, Some(&[0; 10]), Some(&[0; 100]));
        builder.push(1, None, None, Some(&[0; 10]), Some(&[0; 100]));
        builder.header(&[b'h'; 20], Some(&[0; 1_000]));
        let chunk = builder.finish();
        let (bare, with_header) = (chunk.record(0).size(), chunk.record(1).size());
        assert!(bare > 110);
        assert!((1_020..1_030).contains(&(with_header - bare)));
    }

    #[test]
    fn a_record_is_two_words() {
        assert!(size_of::<Record>() <= 16);
    }

    #[test]
    fn debug_output_has_the_place_and_no_contents() {
        let mut builder = builder();
        builder.push(5, None, None, Some(b"secret-key"), Some(b"secret-value"));
        builder.header(b"name", Some(b"secret-header"));
        let shown = format!("{:?}", builder.finish().record(0));
        assert!(
            shown.contains("orders") && shown.contains("Some(12)"),
            "{shown}"
        );
        assert!(!shown.contains("secret"), "{shown}");
    }
}
