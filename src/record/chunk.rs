//! Chunks: the records that one read of a partition brought, in one buffer.
//!
//! An allocation per record, freed on another core, costs several times what taking the record from librdkafka does.
//! Here a record is a row of positions into its chunk's bytes, and all it takes to hand one over is a reference count.

use std::{
    mem,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::{Headers, Record, Timestamp, headers};

/// From here on a builder is full: whatever record comes next still ends below 4 GiB, as Kafka's record lengths are
/// signed 32-bit numbers.
const FULL: usize = i32::MAX as usize;
/// From this size on a record has a chunk to itself: otherwise one that takes its time would keep its neighbours in memory
/// for as long, or they it.
const LARGE: usize = 64 << 10;
/// Bytes of spare buffers that are kept: what is in use at a time when handlers are quick.
const MOST_SPARED: usize = 4 << 20;
/// Smaller buffers are no trouble to the allocator.
const SMALLEST_SPARE: usize = 4 << 10;

/// What all records of a partition have in common.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) topic: Arc<str>,
    pub(crate) partition: i32,
    /// Bytes of living chunks, as in [`Residency`].
    held: AtomicUsize,
}

impl Source {
    pub(crate) fn new(topic: impl Into<Arc<str>>, partition: i32) -> Self {
        Self {
            topic: topic.into(),
            partition,
            held: AtomicUsize::new(0),
        }
    }

    /// Bytes that living chunks of this partition hold.
    pub(crate) fn resident(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }
}

/// The bytes that living chunks hold, and the buffers of dead ones for those to come.
///
/// A chunk is allocated by the thread that reads and freed by whichever was the last to use a record of it. Without
/// spare buffers the allocator would hand pages back to the kernel and ask for them again, thousands of times a second.
#[derive(Debug, Default)]
pub(crate) struct Residency {
    held: AtomicUsize,
    spare: Mutex<Vec<Buffers>>,
}

impl Residency {
    pub(crate) fn bytes(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    fn take_spare(&self) -> Buffers {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        spare.pop().unwrap_or_default()
    }

    fn give_spare(&self, mut buffers: Buffers) {
        if buffers.capacity() < SMALLEST_SPARE {
            return;
        }
        buffers.entries.clear();
        buffers.bytes.clear();
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        let spared: usize = spare.iter().map(Buffers::capacity).sum();
        if spared + buffers.capacity() <= MOST_SPARED {
            spare.push(buffers);
        }
    }
}

pub(crate) struct Chunk {
    pub(super) source: Arc<Source>,
    buffers: Buffers,
    gauge: Option<Arc<Residency>>,
}

#[derive(Debug, Default)]
struct Buffers {
    entries: Vec<Entry>,
    /// Per record key, value, headers, with nothing between them: each part ends where the next one starts.
    bytes: Vec<u8>,
}

impl Buffers {
    fn capacity(&self) -> usize {
        self.bytes.capacity() + self.entries.capacity() * size_of::<Entry>()
    }

    fn used(&self) -> usize {
        self.bytes.len() + self.entries.len() * size_of::<Entry>()
    }
}

#[derive(Debug, Clone, Copy)]
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
        self.buffers.entries.len()
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
        &self.buffers.entries[index as usize]
    }

    pub(super) fn key(&self, index: u32) -> Option<&[u8]> {
        let entry = self.entry(index);
        (!entry.null_key).then(|| &self.buffers.bytes[entry.key as usize..entry.value as usize])
    }

    pub(super) fn value(&self, index: u32) -> Option<&[u8]> {
        let entry = self.entry(index);
        (!entry.null_value)
            .then(|| &self.buffers.bytes[entry.value as usize..entry.headers as usize])
    }

    pub(super) fn headers(&self, index: u32) -> Headers<'_> {
        Headers::new(&self.buffers.bytes[self.entry(index).headers as usize..self.end(index)])
    }

    /// The bytes of key, value and headers together.
    pub(super) fn record_bytes(&self, index: u32) -> usize {
        self.end(index) - self.entry(index).key as usize
    }

    fn end(&self, index: u32) -> usize {
        self.buffers
            .entries
            .get(index as usize + 1)
            .map_or(self.buffers.bytes.len(), |next| next.key as usize)
    }

    /// What this chunk takes from the heap.
    pub(super) fn held(&self) -> usize {
        self.buffers.capacity()
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
            Buffers {
                entries: vec![copy],
                bytes: self.buffers.bytes[shift as usize..self.end(index)].to_vec(),
            },
            self.gauge.clone(),
        ))
    }

    fn counted(source: Arc<Source>, buffers: Buffers, gauge: Option<Arc<Residency>>) -> Self {
        let chunk = Self {
            source,
            buffers,
            gauge,
        };
        if let Some(gauge) = &chunk.gauge {
            gauge.held.fetch_add(chunk.held(), Ordering::Relaxed);
            chunk.source.held.fetch_add(chunk.held(), Ordering::Relaxed);
        }
        chunk
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if let Some(gauge) = &self.gauge {
            gauge.held.fetch_sub(self.held(), Ordering::Relaxed);
            self.source.held.fetch_sub(self.held(), Ordering::Relaxed);
            gauge.give_spare(mem::take(&mut self.buffers));
        }
    }
}

/// Copies records into a chunk, one after another.
pub(crate) struct ChunkBuilder {
    source: Arc<Source>,
    buffers: Buffers,
    gauge: Option<Arc<Residency>>,
}

impl ChunkBuilder {
    pub(crate) fn new(source: Arc<Source>, gauge: Option<Arc<Residency>>) -> Self {
        Self {
            source,
            buffers: Buffers::default(),
            gauge,
        }
    }

    /// Room for this many more records with this many bytes of keys, values and headers.
    pub(crate) fn reserve(&mut self, records: usize, bytes: usize) {
        if let (0, Some(gauge)) = (self.buffers.capacity(), &self.gauge) {
            self.buffers = gauge.take_spare();
        }
        self.buffers.entries.reserve_exact(records);
        self.buffers.bytes.reserve_exact(bytes);
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
        self.buffers
            .bytes
            .extend_from_slice(key.unwrap_or_default());
        let value_at = self.position();
        self.buffers
            .bytes
            .extend_from_slice(value.unwrap_or_default());
        self.buffers.entries.push(Entry {
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
        debug_assert!(
            !self.buffers.entries.is_empty(),
            "a header comes after its record"
        );
        headers::write(&mut self.buffers.bytes, name, value);
    }

    pub(crate) fn len(&self) -> usize {
        self.buffers.entries.len()
    }

    /// Whether the next record, whose key and value have so many bytes, has to go to another chunk.
    pub(crate) fn is_full(&self, next: usize) -> bool {
        let used = self.buffers.bytes.len();
        let a_large_one = next >= LARGE || self.len() == 1 && used >= LARGE;
        self.len() > 0 && a_large_one || used >= FULL
    }

    pub(crate) fn finish(mut self) -> Arc<Chunk> {
        // Room was made for many records and few came: they may stay for long, and must not hold on to all of it.
        if self.buffers.used() < self.buffers.capacity() / 2 {
            let fitting = Buffers {
                entries: self.buffers.entries.to_vec(),
                bytes: self.buffers.bytes.to_vec(),
            };
            let roomy = mem::replace(&mut self.buffers, fitting);
            if let Some(gauge) = &self.gauge {
                gauge.give_spare(roomy);
            }
        }
        Arc::new(Chunk::counted(self.source, self.buffers, self.gauge))
    }

    fn position(&self) -> u32 {
        u32::try_from(self.buffers.bytes.len())
            .expect("nothing is pushed to a builder that is full")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_records_do_not_hold_on_to_the_room_made_for_many() {
        let gauge = Arc::new(Residency::default());
        let source = Arc::new(Source::new("t", 0));
        let mut chunks = Vec::new();
        for offset in 0..100 {
            let mut builder = ChunkBuilder::new(Arc::clone(&source), Some(Arc::clone(&gauge)));
            builder.reserve(500, 50_000);
            builder.push(offset, None, None, None, Some(&[1; 100]));
            chunks.push(builder.finish());
        }
        assert!(gauge.bytes() < 100 * 300, "{}", gauge.bytes());
        assert_eq!(chunks[40].record(0).offset(), 40);
        assert_eq!(chunks[40].record(0).value(), Some(&[1; 100][..]));
    }

    #[test]
    fn a_large_record_shares_its_chunk_with_no_other() {
        let mut builder = ChunkBuilder::new(Arc::new(Source::new("t", 0)), None);
        for (size, full) in [(LARGE, false), (10, true)] {
            assert_eq!(builder.is_full(size), full);
            builder.push(0, None, None, Some(b"key"), Some(&vec![0; size]));
        }
        let mut builder = ChunkBuilder::new(Arc::new(Source::new("t", 0)), None);
        for offset in 0..1_000 {
            assert!(!builder.is_full(1_000));
            builder.push(offset, None, None, None, Some(&[0; 1_000]));
        }
        assert!(builder.is_full(LARGE));
    }

    #[test]
    fn buffers_of_dead_chunks_are_used_again_up_to_a_bound() {
        let gauge = Arc::new(Residency::default());
        let source = Arc::new(Source::new("t", 0));
        let chunk = |offset| {
            let mut builder = ChunkBuilder::new(Arc::clone(&source), Some(Arc::clone(&gauge)));
            builder.reserve(1, 1 << 20);
            builder.push(
                offset,
                None,
                None,
                Some(b"key"),
                Some(&[offset as u8; 1 << 20]),
            );
            builder.finish()
        };
        let address = |chunk: &Arc<Chunk>| chunk.record(0).key().map(<[u8]>::as_ptr);
        let first = chunk(1);
        let place = address(&first);
        drop(first);
        let second = chunk(2);
        assert_eq!(address(&second), place);
        assert_eq!(second.record(0).value(), Some(&[2; 1 << 20][..]));

        drop((0..100).map(chunk).collect::<Vec<_>>());
        let spared = gauge.spare.lock().unwrap();
        assert!(spared.iter().map(Buffers::capacity).sum::<usize>() <= MOST_SPARED);
        assert!(!spared.is_empty());
    }

    #[test]
    fn residency_counts_what_living_chunks_hold_and_returns_to_zero() {
        let gauge = Arc::new(Residency::default());
        let source = Arc::new(Source::new("t", 0));
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
