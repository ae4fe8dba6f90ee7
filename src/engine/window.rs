//! The records of one partition that were delivered and cannot be committed yet.
//!
//! A ring indexed by *arrival sequence*: records are numbered densely as they come, so gaps in the log (compaction,
//! transaction markers, aborted records) cost nothing and memory follows the number of records, never the distance
//! between their offsets. One bit a record says "finished"; the watermark moves over finished records 64 at a time.

use std::ops::Range;

const WORD: u64 = u64::BITS as u64;
/// A window starts this small and doubles as it is used, so that a thousand quiet partitions cost little.
const FIRST_CAPACITY: usize = 1024;

/// See the module's first lines.
#[derive(Debug)]
pub(crate) struct Window {
    /// Offset of the record with sequence `s`, at `s & mask`. Power of two long.
    offsets: Box<[i64]>,
    /// Bit `s & mask` is set when the record with sequence `s` is finished. Bits outside `base..next` are clear.
    finished: Box<[u64]>,
    mask: u64,
    /// Sequence of the lowest unfinished record; equal to `next` when there is none.
    base: u64,
    next: u64,
    /// Finished records in `base..next`.
    above: usize,
    /// Where consumption goes on: one above the last delivered offset, or the start offset before the first.
    position: Option<i64>,
    limit: usize,
}

/// What [`Window::finish`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finish {
    /// The watermark moved: more can be committed than before.
    Advanced,
    /// Finished, behind an older record that is not.
    Held,
    /// It had been finished before, or was never delivered; nothing changed.
    Stale,
}

impl Window {
    /// A window that holds at most `limit` records from the lowest unfinished one to the newest.
    ///
    /// `start` is the offset at which consumption begins, where it is known.
    pub(crate) fn new(limit: usize, start: Option<i64>) -> Self {
        let limit = limit.max(1);
        let capacity = limit
            .min(FIRST_CAPACITY)
            .next_power_of_two()
            .max(WORD as usize);
        Self {
            offsets: vec![0; capacity].into(),
            finished: vec![0; capacity / WORD as usize].into(),
            mask: capacity as u64 - 1,
            base: 0,
            next: 0,
            above: 0,
            position: start,
            limit,
        }
    }

    /// How many more records may be delivered now. The bound is on the span, not on how many are unfinished: a ring
    /// that braked on the latter would run over its own tail behind one slow record.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.limit - (self.next - self.base) as usize
    }

    /// Records from the lowest unfinished one to the newest.
    #[inline]
    pub(crate) fn span(&self) -> usize {
        (self.next - self.base) as usize
    }

    /// Finished records that wait behind an unfinished one.
    #[inline]
    pub(crate) fn held(&self) -> usize {
        self.above
    }

    /// The last delivered offset plus one; the start offset before the first delivery.
    #[inline]
    pub(crate) fn position(&self) -> Option<i64> {
        self.position
    }

    /// Moves the position past offsets that hold no records for us, such as transaction markers.
    #[allow(dead_code, reason = "see Engine::skip_to")]
    pub(crate) fn skip_to(&mut self, position: i64) {
        if self.position.is_none_or(|known| known < position) {
            self.position = Some(position);
        }
    }

    /// What may be committed: the lowest unfinished offset, or the position when all is finished.
    #[inline]
    pub(crate) fn committable(&self) -> Option<i64> {
        if self.base == self.next {
            self.position
        } else {
            Some(self.offsets[(self.base & self.mask) as usize])
        }
    }

    /// Takes in the next record of the log and returns its sequence.
    ///
    /// The caller keeps to [`room`](Self::room) and to ascending offsets.
    #[inline]
    pub(crate) fn deliver(&mut self, offset: i64) -> u64 {
        debug_assert!(self.room() > 0, "delivered into a full window");
        debug_assert!(
            self.position.is_none_or(|position| offset >= position),
            "offsets ascend within an ownership"
        );
        if self.next - self.base > self.mask {
            self.grow();
        }
        let seq = self.next;
        self.offsets[(seq & self.mask) as usize] = offset;
        self.next += 1;
        self.position = Some(offset + 1);
        seq
    }

    /// The offset of a record that is still in the window.
    #[inline]
    pub(crate) fn offset(&self, seq: u64) -> Option<i64> {
        (self.base..self.next)
            .contains(&seq)
            .then(|| self.offsets[(seq & self.mask) as usize])
    }

    /// Sequence of the lowest unfinished record.
    pub(crate) fn head(&self) -> Option<u64> {
        (self.base < self.next).then_some(self.base)
    }

    /// Whether that record is in the window and not finished.
    #[inline]
    pub(crate) fn is_open(&self, seq: u64) -> bool {
        (self.base..self.next).contains(&seq) && self.word(seq) >> (seq % WORD) & 1 == 0
    }

    /// Marks a record as finished and moves the watermark over all that is finished from the bottom.
    #[inline]
    pub(crate) fn finish(&mut self, seq: u64) -> Finish {
        if !(self.base..self.next).contains(&seq) {
            return Finish::Stale;
        }
        let bit = 1 << (seq % WORD);
        let word = &mut self.finished[((seq & self.mask) / WORD) as usize];
        if *word & bit != 0 {
            return Finish::Stale;
        }
        *word |= bit;
        self.above += 1;
        if seq != self.base {
            return Finish::Held;
        }
        self.advance();
        Finish::Advanced
    }

    #[inline]
    fn word(&self, seq: u64) -> u64 {
        self.finished[((seq & self.mask) / WORD) as usize]
    }

    #[inline]
    fn advance(&mut self) {
        while self.base < self.next {
            let shift = self.base % WORD;
            let word = &mut self.finished[((self.base & self.mask) / WORD) as usize];
            let run = u64::from((*word >> shift).trailing_ones());
            if run == 0 {
                break;
            }
            // `run` bits from `shift` on: all of them belong to records below `next`, since bits past it are clear.
            *word &= !(u64::MAX >> (WORD - run) << shift);
            self.base += run;
            self.above -= run as usize;
            if shift + run < WORD {
                break;
            }
        }
    }

    /// How many records are finished at this offset and above it, behind an unfinished one.
    pub fn finished_from(&self, offset: i64) -> usize {
        let (mut from, mut to) = (self.base, self.next);
        while from < to {
            let middle = from + (to - from) / 2;
            if self.offsets[(middle & self.mask) as usize] < offset {
                from = middle + 1;
            } else {
                to = middle;
            }
        }
        let mut count = 0;
        while from < self.next {
            count += (self.word(from) >> (from % WORD)).count_ones() as usize;
            from += WORD - from % WORD;
        }
        count
    }

    #[cold]
    fn grow(&mut self) {
        let capacity = self.offsets.len() * 2;
        let mask = capacity as u64 - 1;
        let mut offsets = vec![0; capacity].into_boxed_slice();
        let mut finished = vec![0u64; capacity / WORD as usize].into_boxed_slice();
        for seq in self.base..self.next {
            offsets[(seq & mask) as usize] = self.offsets[(seq & self.mask) as usize];
            finished[((seq & mask) / WORD) as usize] |=
                (self.word(seq) >> (seq % WORD) & 1) << (seq % WORD);
        }
        (self.offsets, self.finished, self.mask) = (offsets, finished, mask);
    }

    /// Ranges of offsets finished above [`committable`](Self::committable), ascending. Neighbours in the window join
    /// into one range even when offsets are missing between them: what is missing there is not in the log.
    #[allow(
        dead_code,
        reason = "what finished out of order is not in the commit's metadata yet"
    )]
    pub(crate) fn finished_ranges(&self) -> FinishedRanges<'_> {
        FinishedRanges {
            window: self,
            seq: self.base,
        }
    }
}

/// Iterator of [`Window::finished_ranges`].
#[derive(Debug)]
pub(crate) struct FinishedRanges<'a> {
    window: &'a Window,
    seq: u64,
}

impl FinishedRanges<'_> {
    /// The first sequence from `from` on whose bit is `finished`, a word at a time.
    fn next_with(&self, from: u64, finished: bool) -> u64 {
        let mut seq = from;
        while seq < self.window.next {
            let word = self.window.word(seq);
            let wanted = if finished { word } else { !word } >> (seq % WORD);
            if wanted != 0 {
                return (seq + u64::from(wanted.trailing_zeros())).min(self.window.next);
            }
            seq += WORD - seq % WORD;
        }
        self.window.next
    }
}

impl Iterator for FinishedRanges<'_> {
    type Item = Range<i64>;

    fn next(&mut self) -> Option<Range<i64>> {
        let first = self.next_with(self.seq, true);
        if first == self.window.next {
            return None;
        }
        let end = self.next_with(first, false);
        self.seq = end;
        let offset = |seq: u64| self.window.offsets[(seq & self.window.mask) as usize];
        Some(offset(first)..offset(end - 1) + 1)
    }
}
