//! The records of one partition that were delivered and cannot be committed yet.
//!
//! A ring indexed by *arrival sequence*: records are numbered densely as they come, so gaps in the log (compaction,
//! transaction markers, aborted records) cost nothing and memory follows the number of records, never the distance
//! between their offsets. One bit a record says "finished"; the watermark moves over finished records 64 at a time.
//!
//! When the log is cut off, sequences at and above the cut are *void*: the log has other records at their offsets now, and
//! those get sequences of their own. Void sequences are passed as finished ones are, and are told of by nothing. Their
//! offsets are set to the one below the cut, so that offsets go on ascending with the sequence.

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
    /// Void sequences that the watermark may not have passed, ascending. Their bits are set.
    void: Vec<Range<u64>>,
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
            void: Vec::new(),
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

    /// Sequence of the next record, and so how many there have been.
    pub(crate) fn delivered(&self) -> u64 {
        self.next
    }

    /// How many records from the first on are finished.
    pub(crate) fn passed(&self) -> u64 {
        self.base
    }

    /// Finished records that wait behind an unfinished one.
    pub(crate) fn held(&self) -> usize {
        self.above - self.void_from(self.base)
    }

    /// Delivered records that are not finished.
    #[inline]
    pub(crate) fn unfinished(&self) -> usize {
        self.span() - self.above
    }

    /// The last delivered offset plus one; the start offset before the first delivery.
    #[inline]
    pub(crate) fn position(&self) -> Option<i64> {
        self.position
    }

    /// Moves the position past offsets that hold no records for us, such as transaction markers.
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

    /// Unfinished records at this offset and above it, by sequence: what [`cut_off`](Self::cut_off) would make void.
    pub(crate) fn open_from(&self, offset: i64) -> impl Iterator<Item = u64> {
        (self.first_from(offset)..self.next).filter(|seq| self.is_open(*seq))
    }

    /// The log ends before this offset, or has other records from there on: what was delivered of it is void, and
    /// consumption goes on there.
    pub(crate) fn cut_off(&mut self, offset: i64) {
        let first = self.first_from(offset);
        for seq in first..self.next {
            self.offsets[(seq & self.mask) as usize] = offset - 1;
            let word = &mut self.finished[((seq & self.mask) / WORD) as usize];
            self.above += usize::from(*word >> (seq % WORD) & 1 == 0);
            *word |= 1 << (seq % WORD);
        }
        // Earlier ones from there on are part of the new range.
        self.void
            .retain(|void| void.start < first && void.end > self.base);
        if first < self.next {
            self.void.push(first..self.next);
        }
        self.position = Some(self.position.map_or(offset, |known| known.min(offset)));
        self.advance();
    }

    /// Void sequences in the window from this one on.
    fn void_from(&self, seq: u64) -> usize {
        let from = seq.max(self.base);
        let void = self.void.iter();
        void.map(|void| void.end.saturating_sub(void.start.max(from)) as usize)
            .sum()
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
        let shift = seq % WORD;
        let word = &mut self.finished[((seq & self.mask) / WORD) as usize];
        if *word >> shift & 1 != 0 {
            return Finish::Stale;
        }
        if seq != self.base {
            *word |= 1 << shift;
            self.above += 1;
            return Finish::Held;
        }
        // In order, the most common case, the bit is never stored: a store and a load of the same word in each call
        // would take twice as long as all the rest.
        let behind = u64::from((*word >> shift >> 1).trailing_ones());
        if behind > 0 {
            *word &= !(u64::MAX >> (WORD - behind) << shift << 1);
        }
        self.base += behind + 1;
        self.above -= behind as usize;
        if shift + behind + 1 == WORD {
            self.advance();
        }
        Finish::Advanced
    }

    #[inline]
    fn word(&self, seq: u64) -> u64 {
        self.finished[((seq & self.mask) / WORD) as usize]
    }

    /// Goes on over records that had finished before.
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
        let first = self.first_from(offset);
        let (mut from, mut count) = (first, 0);
        while from < self.next {
            let bits = (WORD - from % WORD).min(self.next - from);
            // In a full ring the bits above those of the newest records are of the oldest ones.
            let beyond = WORD - bits;
            count += (self.word(from) >> (from % WORD) << beyond).count_ones() as usize;
            from += bits;
        }
        count - self.void_from(first)
    }

    /// Finished records behind this one, which has not finished.
    pub(crate) fn finished_behind(&self, seq: u64) -> usize {
        if seq == self.base {
            return self.held();
        }
        self.offset(seq)
            .map_or(0, |offset| self.finished_from(offset))
    }

    /// Whether the record with this offset was delivered and has not finished.
    pub(crate) fn is_unfinished(&self, offset: i64) -> bool {
        let seq = self.first_from(offset);
        self.offset(seq) == Some(offset) && self.is_open(seq)
    }

    /// The first sequence in the window whose offset is this one or a higher one. Void ones lie below all that came
    /// after them, and behind all that they came after.
    pub(crate) fn first_from(&self, offset: i64) -> u64 {
        let (mut from, mut to) = (self.base, self.next);
        while from < to {
            let middle = from + (to - from) / 2;
            if self.offsets[(middle & self.mask) as usize] < offset {
                from = middle + 1;
            } else {
                to = middle;
            }
        }
        from
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
        let (first, end) = loop {
            let first = self.next_with(self.seq, true);
            if first == self.window.next {
                return None;
            }
            let end = self.next_with(first, false);
            let void = self.window.void.iter();
            match void
                .clone()
                .find(|void| void.start < end && void.end > first)
            {
                None => break (first, end),
                Some(void) if void.start > first => break (first, void.start),
                Some(void) => self.seq = void.end,
            }
        };
        self.seq = end;
        let offset = |seq: u64| self.window.offsets[(seq & self.window.mask) as usize];
        Some(offset(first)..offset(end - 1) + 1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A window from `start` with these offsets delivered, their sequences being 0, 1, 2 …
    fn delivered(start: i64, offsets: impl IntoIterator<Item = i64>) -> Window {
        let mut window = Window::new(1 << 20, Some(start));
        for offset in offsets {
            window.deliver(offset);
        }
        window
    }

    #[test]
    fn in_a_full_ring_no_record_is_counted_twice_for_sharing_a_word_with_the_oldest() {
        let mut window = Window::new(FIRST_CAPACITY, Some(0));
        let end = FIRST_CAPACITY as i64 + 10;
        for offset in 0..FIRST_CAPACITY as i64 {
            window.deliver(offset);
        }
        for seq in 0..10 {
            window.finish(seq);
        }
        for offset in FIRST_CAPACITY as i64..end {
            window.deliver(offset);
        }
        assert_eq!(window.room(), 0);
        for seq in 11..64 {
            window.finish(seq);
        }
        assert_eq!(window.finished_from(100), 0);
        assert_eq!(window.finished_from(60), 4);
        window.finish(end as u64 - 1);
        assert_eq!(window.finished_from(100), 1);
        assert_eq!(window.finished_from(0), window.held());
    }

    // T1
    #[test]
    fn gaps_in_the_log_do_not_hold_back_the_watermark() {
        let mut window = delivered(0, [0, 2, 4, 6]);
        let committable = [0, 1, 3, 2].map(|seq| {
            window.finish(seq);
            window.committable().unwrap()
        });
        assert_eq!(committable, [2, 4, 4, 7]);
    }

    // T2
    #[test]
    fn memory_follows_the_records_and_not_the_distance_between_their_offsets() {
        let mut window = delivered(5, [5, 90, 1_000_007]);
        for seq in 0..3 {
            assert_eq!(window.finish(seq), Finish::Advanced);
        }
        assert_eq!(window.committable(), Some(1_000_008));
        assert_eq!(window.offsets.len(), FIRST_CAPACITY);
    }

    // T3
    #[test]
    fn the_watermark_stops_at_the_lowest_unfinished_record() {
        let mut window = delivered(1, [1, 2, 9]);
        assert_eq!(window.finish(2), Finish::Held);
        assert_eq!(window.finish(0), Finish::Advanced);
        assert_eq!(window.committable(), Some(2));
        assert_eq!(window.held(), 1);
        assert!(window.finished_ranges().eq(std::iter::once(9..10)));
    }

    // T5
    #[test]
    fn the_record_at_offset_zero_counts() {
        let mut window = delivered(0, [0]);
        window.finish(0);
        assert_eq!(window.committable(), Some(1));
    }

    // T6
    #[test]
    fn nothing_beyond_the_start_is_committable_before_a_record_finishes() {
        let window = delivered(40, 40..50);
        assert_eq!(window.committable(), Some(40));
    }

    #[test]
    fn without_a_start_there_is_nothing_to_commit_before_the_first_record() {
        let mut window = Window::new(8, None);
        assert_eq!(window.committable(), None);
        window.deliver(70);
        assert_eq!(window.committable(), Some(70));
    }

    // T15
    #[test]
    fn offsets_without_records_are_passed_when_all_is_finished_and_not_before() {
        let mut window = delivered(0, [0]);
        window.skip_to(5);
        assert_eq!(window.committable(), Some(0));
        window.finish(0);
        assert_eq!(window.committable(), Some(5));
        window.skip_to(3);
        assert_eq!(window.committable(), Some(5), "a position never goes back");
    }

    #[test]
    fn finishing_twice_or_what_was_never_delivered_changes_nothing() {
        let mut window = delivered(0, 0..3);
        assert_eq!(window.finish(3), Finish::Stale);
        assert_eq!(window.finish(1), Finish::Held);
        assert_eq!(window.finish(1), Finish::Stale);
        assert_eq!(window.held(), 1);
        assert_eq!(window.finish(0), Finish::Advanced);
        assert_eq!(window.finish(0), Finish::Stale);
        assert_eq!(window.committable(), Some(2));
    }

    #[test]
    fn one_slow_record_bounds_the_span_however_many_finished_behind_it() {
        let mut window = Window::new(1_000, Some(0));
        for offset in 0..1_000 {
            window.deliver(offset);
        }
        for seq in 1..1_000 {
            window.finish(seq);
        }
        assert_eq!((window.room(), window.held()), (0, 999));
        assert_eq!(window.finish(0), Finish::Advanced);
        assert_eq!((window.room(), window.held()), (1_000, 0));
    }

    #[test]
    fn a_window_that_grows_keeps_what_has_finished() {
        let full = FIRST_CAPACITY as i64;
        let mut window = delivered(0, 0..100);
        (0..100).for_each(|seq| assert_eq!(window.finish(seq), Finish::Advanced));
        // The ring is full and begins in its middle.
        (100..100 + full).for_each(|offset| assert_eq!(window.deliver(offset), offset as u64));
        let odd = |seq: &u64| seq % 2 == 1;
        for seq in (100..100 + full as u64).filter(odd) {
            window.finish(seq);
        }
        for offset in 100 + full..5_000 {
            window.deliver(offset);
        }
        assert_eq!(window.held(), FIRST_CAPACITY / 2);
        let ranges = (100..100 + full).filter(|offset| offset % 2 == 1);
        assert!(
            window
                .finished_ranges()
                .eq(ranges.map(|offset| offset..offset + 1))
        );
        for seq in (100..5_000).filter(|seq| !odd(seq) || *seq >= 100 + full as u64) {
            assert_ne!(window.finish(seq), Finish::Stale);
        }
        assert_eq!(window.committable(), Some(5_000));
    }

    #[test]
    fn a_log_that_was_cut_off_keeps_what_is_unfinished_below_and_has_new_records_above() {
        let mut window = delivered(0, 0..10);
        for seq in [1, 2, 6, 8] {
            window.finish(seq);
        }
        window.cut_off(5);
        assert_eq!(
            (window.position(), window.committable()),
            (Some(5), Some(0))
        );
        assert_eq!((window.held(), window.unfinished()), (2, 3));
        assert!(window.finished_ranges().eq(std::iter::once(1..3)));
        // The same offsets again, and none of the old sequences.
        let again: Vec<_> = (5..8).map(|offset| window.deliver(offset)).collect();
        assert_eq!(again, [10, 11, 12]);
        assert!(window.is_unfinished(5) && window.is_unfinished(4));
        assert_eq!(window.finish(5), Finish::Stale, "it was void");
        window.finish(11);
        assert!(window.finished_ranges().eq([1..3, 6..7]));
        assert_eq!((window.finished_from(0), window.finished_from(5)), (3, 1));
        for seq in [0, 3, 4] {
            window.finish(seq);
        }
        assert_eq!(window.committable(), Some(5), "the new one is not finished");
        window.finish(10);
        assert_eq!(window.committable(), Some(7));
    }

    #[test]
    fn a_cut_below_all_that_is_in_the_window_takes_the_committable_offset_back() {
        let mut window = delivered(0, 0..10);
        (0..7).for_each(|seq| assert_eq!(window.finish(seq), Finish::Advanced));
        window.cut_off(4);
        assert_eq!((window.committable(), window.span()), (Some(4), 0));
        assert_eq!(window.finish(8), Finish::Stale);
        assert_eq!(window.deliver(4), 10);
        assert_eq!(window.committable(), Some(4));
    }

    #[test]
    fn a_second_cut_below_the_first_makes_void_what_came_in_between() {
        let mut window = delivered(0, 0..10);
        window.cut_off(7);
        window.deliver(7);
        window.cut_off(8);
        window.deliver(8);
        window.cut_off(3);
        window.deliver(3);
        assert_eq!((window.unfinished(), window.held()), (4, 0));
        assert!(window.finished_ranges().eq([]));
        for seq in 0..3 {
            window.finish(seq);
        }
        assert_eq!((window.committable(), window.span()), (Some(3), 1));
    }

    /// Every delivered record in a list, looked through from the front each time.
    #[derive(Default)]
    struct Model {
        /// By sequence.
        records: Vec<Known>,
        position: i64,
    }

    #[derive(Clone, Copy)]
    struct Known {
        offset: i64,
        finished: bool,
        void: bool,
    }

    impl Known {
        fn is_open(&self) -> bool {
            !self.finished && !self.void
        }
    }

    impl Model {
        fn open(&self) -> Option<(u64, i64)> {
            let first = self.records.iter().position(Known::is_open)?;
            Some((first as u64, self.records[first].offset))
        }

        /// The records from the lowest unfinished one on.
        fn in_window(&self) -> &[Known] {
            &self.records[self.records.len() - self.span()..]
        }

        fn committable(&self) -> i64 {
            self.open().map_or(self.position, |(_, offset)| offset)
        }

        fn span(&self) -> usize {
            self.open()
                .map_or(0, |(seq, _)| self.records.len() - seq as usize)
        }

        fn ranges(&self) -> Vec<Range<i64>> {
            let mut ranges: Vec<Range<i64>> = Vec::new();
            let mut joins = false;
            for known in self.in_window() {
                let (offset, finished) = (known.offset, known.finished && !known.void);
                match ranges.last_mut() {
                    _ if !finished => {}
                    Some(last) if joins => last.end = offset + 1,
                    _ => ranges.push(offset..offset + 1),
                }
                joins = finished;
            }
            ranges
        }

        fn cut_off(&mut self, at: i64) {
            for known in &mut self.records {
                known.void |= known.offset >= at;
            }
            self.position = self.position.min(at);
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        /// So many records, each so far behind the one before.
        Deliver(usize, i64),
        /// Finishes what is this far into the delivered records, and as many behind it, by a stride.
        Finish(prop::sample::Index, usize, usize),
        FinishOldest(usize),
        SkipTo(i64),
        /// So far below the position.
        CutOff(i64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (1..200usize, 1..4i64).prop_map(|(count, gap)| Step::Deliver(count, gap)),
            (any::<prop::sample::Index>(), 1..150usize, 1..4usize)
                .prop_map(|(at, count, stride)| Step::Finish(at, count, stride)),
            (1..150usize).prop_map(Step::FinishOldest),
            (0..20i64).prop_map(Step::SkipTo),
            prop_oneof![-3..40i64, 0..600i64].prop_map(Step::CutOff),
        ];
        prop::collection::vec(step, 1..40)
    }

    fn finish_both(window: &mut Window, model: &mut Model, seq: u64) {
        let before = model.committable();
        let Some(known) = model.records.get_mut(seq as usize) else {
            assert_eq!(window.finish(seq), Finish::Stale);
            return;
        };
        let expected = match std::mem::replace(&mut known.finished, true) || known.void {
            true => Finish::Stale,
            false if model.committable() != before => Finish::Advanced,
            false => Finish::Held,
        };
        assert_eq!(window.finish(seq), expected);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_window_does_what_a_plain_list_of_records_would(
            limit in prop_oneof![1..80usize, 60..70usize, 900..3_000usize],
            start in 0..100i64,
            steps in steps(),
        ) {
            let mut window = Window::new(limit, Some(start));
            let mut model = Model { position: start, ..Model::default() };
            for step in steps {
                let delivered = model.records.len() as u64;
                match step {
                    Step::Deliver(count, gap) => {
                        for _ in 0..count.min(window.room()) {
                            let offset = model.position + gap - 1;
                            let seq = window.deliver(offset);
                            prop_assert_eq!(seq, model.records.len() as u64);
                            model.records.push(Known { offset, finished: false, void: false });
                            model.position = offset + 1;
                        }
                    }
                    Step::Finish(at, count, stride) => {
                        // One beyond the end, now and then.
                        let first = at.index(delivered as usize + 1);
                        for seq in (first..).step_by(stride).take(count) {
                            finish_both(&mut window, &mut model, seq as u64);
                        }
                    }
                    Step::FinishOldest(count) => {
                        for _ in 0..count {
                            if let Some((seq, _)) = model.open() {
                                finish_both(&mut window, &mut model, seq);
                            }
                        }
                    }
                    Step::SkipTo(by) => {
                        model.position += by;
                        window.skip_to(model.position);
                    }
                    Step::CutOff(below) => {
                        let at = (model.position - below).max(0);
                        let open = |known: &&Known| known.is_open() && known.offset >= at;
                        let void = model.records.iter().filter(open).count();
                        prop_assert_eq!(window.open_from(at).count(), void);
                        window.cut_off(at);
                        model.cut_off(at);
                    }
                }
                prop_assert_eq!(window.committable(), Some(model.committable()));
                prop_assert_eq!(window.position(), Some(model.position));
                prop_assert_eq!(window.span(), model.span());
                prop_assert_eq!(window.room(), limit - model.span());
                prop_assert_eq!(window.head(), model.open().map(|(seq, _)| seq));
                let ranges = model.ranges();
                let is_held = |known: &&Known| known.finished && !known.void;
                let held = model.in_window().iter().filter(is_held).count();
                prop_assert_eq!(window.held(), held);
                let unfinished = model.records.iter().filter(|known| known.is_open()).count();
                prop_assert_eq!(window.unfinished(), unfinished);
                prop_assert_eq!(window.finished_ranges().collect::<Vec<_>>(), ranges);
                let first = model.records.len() - model.span();
                for (at, known) in model.in_window().iter().enumerate() {
                    let seq = (first + at) as u64;
                    prop_assert_eq!(window.is_open(seq), known.is_open());
                    if !known.void {
                        prop_assert_eq!(window.offset(seq), Some(known.offset));
                        prop_assert_eq!(window.is_unfinished(known.offset), known.is_open());
                    }
                }
            }
        }
    }
}
