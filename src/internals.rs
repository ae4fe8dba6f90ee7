//! What this crate's own benchmarks reach into. Not part of the API: it changes without notice.

use crate::engine;

/// The window of a partition.
#[derive(Debug)]
pub struct Window(engine::Window);

impl Window {
    /// At most `limit` records from the lowest unfinished one to the newest; empty, and starting at `start`.
    pub fn new(limit: usize, start: i64) -> Self {
        Self(engine::Window::new(limit, Some(start)))
    }

    /// Takes in a record and returns its sequence.
    #[inline]
    pub fn deliver(&mut self, offset: i64) -> u64 {
        self.0.deliver(offset)
    }

    /// `true`: the watermark moved.
    #[inline]
    pub fn finish(&mut self, seq: u64) -> bool {
        self.0.finish(seq) == engine::Finish::Advanced
    }

    /// What may be committed.
    pub fn committable(&self) -> Option<i64> {
        self.0.committable()
    }
}
