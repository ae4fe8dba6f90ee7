//! Chunks: the records that one read of a partition brought, in one buffer.
//!
//! An allocation per record, freed on another core, costs several times what taking the record from librdkafka does.
//! Here a record is a row of positions into its chunk's bytes, and all it takes to hand one over is a reference count.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use super::{Headers, Record, Timestamp, headers};

/// From here on a builder is full: whatever record comes next still ends below 4 GiB, as Kafka's record lengths are
/// signed 32-bit numbers.
const FULL: usize = i32::MAX as usize;

/// What all records of a partition have in common.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) topic: Arc<str>,
    pub(crate) partition: i32,
}

/// The bytes that living chunks hold.
#[derive(Debug, Default)]
pub(crate) struct Residency(AtomicUsize);

impl Residency {
    pub(crate) fn bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

pub(crate) struct Chunk {
    pub(super) source: Arc<Source>,
    entries: Vec<Entry>,
    /// Per record key, value, headers, with nothing between them: each part ends where the next one starts.
    bytes: Vec<u8>,
    gauge: Option<Arc<Residency>>,
}

#[derive(Clone, Copy)]
pub(super) struct Entry {
    pub(super) offset: i64,
    pub(super) timestamp: Option<Timestamp>,
    /// Negative when not known.
    pub(super) leader_epoch: i32,
    key: u32,
    value: u32,
    headers: u32,
    null_key: bool,
    null_value: bool,
}

impl Chunk {
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// # Panics
    ///
    /// If there is no such record.
    pub(crate) fn record(self: &Arc<Self>, index: usize) -> Record {
        assert!(
            index < self.len(),
            "a chunk of {} has no {index}",
            self.len()
        );
        Record {
            chunk: Arc::clone(self),
            index: index as u32,
        }
    }

    pub(super) fn entry(&self, index: u32) -> &Entry {
        &self.entries[index as usize]
    }

    pub(super) fn key(&self, index: u32) -> Option<&[u8]> {
        let entry = self.entry(index);
        (!entry.null_key).then(|| &self.bytes[entry.key as usize..entry.value as usize])
    }

    pub(super) fn value(&self, index: u32) -> Option<&[u8]> {
        let entry = self.entry(index);
        (!entry.null_value).then(|| &self.bytes[entry.value as usize..entry.headers as usize])
    }

    pub(super) fn headers(&self, index: u32) -> Headers<'_> {
        Headers::new(&self.bytes[self.entry(index).headers as usize..self.end(index)])
    }

    /// The bytes of key, value and headers together.
    pub(super) fn record_bytes(&self, index: u32) -> usize {
        self.end(index) - self.entry(index).key as usize
    }

    fn end(&self, index: u32) -> usize {
        self.entries
            .get(index as usize + 1)
            .map_or(self.bytes.len(), |next| next.key as usize)
    }

    /// What this chunk takes from the heap.
    pub(super) fn held(&self) -> usize {
        self.bytes.capacity() + self.entries.capacity() * size_of::<Entry>()
    }

    /// A chunk that holds this one record only.
    pub(super) fn single(&self, index: u32) -> Arc<Self> {
        let entry = self.entry(index);
        let shift = entry.key;
        let copy = Entry {
            key: 0,
            value: entry.value - shift,
            headers: entry.headers - shift,
            ..*entry
        };
        Arc::new(Self::counted(
            Arc::clone(&self.source),
            vec![copy],
            self.bytes[shift as usize..self.end(index)].to_vec(),
            self.gauge.clone(),
        ))
    }

    fn counted(
        source: Arc<Source>,
        entries: Vec<Entry>,
        bytes: Vec<u8>,
        gauge: Option<Arc<Residency>>,
    ) -> Self {
        let chunk = Self {
            source,
            entries,
            bytes,
            gauge,
        };
        if let Some(gauge) = &chunk.gauge {
            gauge.0.fetch_add(chunk.held(), Ordering::Relaxed);
        }
        chunk
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if let Some(gauge) = &self.gauge {
            gauge.0.fetch_sub(self.held(), Ordering::Relaxed);
        }
    }
}

/// Copies records into a chunk, one after another.
pub(crate) struct ChunkBuilder {
    source: Arc<Source>,
    entries: Vec<Entry>,
    bytes: Vec<u8>,
    gauge: Option<Arc<Residency>>,
}

impl ChunkBuilder {
    pub(crate) fn new(source: Arc<Source>, gauge: Option<Arc<Residency>>) -> Self {
        Self {
            source,
            entries: Vec::new(),
            bytes: Vec::new(),
            gauge,
        }
    }

    /// Room for this many more records with this many bytes of keys, values and headers.
    pub(crate) fn reserve(&mut self, records: usize, bytes: usize) {
        self.entries.reserve_exact(records);
        self.bytes.reserve_exact(bytes);
    }

    /// # Panics
    ///
    /// If the builder was full already and the chunk would pass 4 GiB.
    pub(crate) fn push(
        &mut self,
        offset: i64,
        timestamp: Option<Timestamp>,
        leader_epoch: Option<i32>,
        key: Option<&[u8]>,
        value: Option<&[u8]>,
    ) {
        let key_at = self.position();
        self.bytes.extend_from_slice(key.unwrap_or_default());
        let value_at = self.position();
        self.bytes.extend_from_slice(value.unwrap_or_default());
        self.entries.push(Entry {
            offset,
            timestamp,
            leader_epoch: leader_epoch.unwrap_or(-1),
            key: key_at,
            value: value_at,
            headers: self.position(),
            null_key: key.is_none(),
            null_value: value.is_none(),
        });
    }

    /// Adds a header to the record pushed last.
    pub(crate) fn header(&mut self, name: &[u8], value: Option<&[u8]>) {
        debug_assert!(!self.entries.is_empty(), "a header comes after its record");
        headers::write(&mut self.bytes, name, value);
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Bytes of keys, values and headers so far.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Whether the next record has to go to another chunk.
    pub(crate) fn is_full(&self) -> bool {
        self.bytes.len() >= FULL
    }

    pub(crate) fn finish(self) -> Arc<Chunk> {
        Arc::new(Chunk::counted(
            self.source,
            self.entries,
            self.bytes,
            self.gauge,
        ))
    }

    fn position(&self) -> u32 {
        u32::try_from(self.bytes.len()).expect("nothing is pushed to a builder that is full")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn residency_counts_what_living_chunks_hold_and_returns_to_zero() {
        let gauge = Arc::new(Residency::default());
        let source = Arc::new(Source {
            topic: "t".into(),
            partition: 0,
        });
        let mut builder = ChunkBuilder::new(source, Some(Arc::clone(&gauge)));
        builder.reserve(3, 3_000);
        for offset in 0..3 {
            builder.push(offset, None, None, None, Some(&[0; 1_000]));
        }
        assert_eq!(gauge.bytes(), 0, "a builder is not counted yet");
        let chunk = builder.finish();
        let whole = gauge.bytes();
        assert!((3_000..3_500).contains(&whole), "{whole}");

        let kept = chunk.record(1).compact();
        drop(chunk);
        let kept_bytes = gauge.bytes();
        assert!((1_000..1_200).contains(&kept_bytes), "{kept_bytes}");
        drop(kept);
        assert_eq!(gauge.bytes(), 0);
    }
}
