//! Leader epochs of what has been read: they tell whether the log above a committed offset is still the one below it.
//!
//! Each election begins a new epoch. Should a log have been cut off by one that was not clean, and have grown again past the
//! committed offset, nothing else tells it. Running, the client asks the brokers itself after each election; after a
//! restart it does not.

/// Of one ownership.
#[derive(Debug, Default)]
pub(super) struct Epochs {
    /// Where each begins, as far as it is needed still. Ascending.
    known: Vec<(i64, i32)>,
    /// The one of the committed offset that reading began at, until it is known that the log goes on from there.
    unproven: Option<i32>,
    /// The newest record, with its epoch.
    newest: Option<(i64, i32)>,
    /// Of the last record that was read.
    last: Option<i32>,
}

/// What a record's epoch says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Election {
    /// It is that of the record before, or not known.
    None,
    /// It is this one, and that of the record before was another or is not known.
    Before(i32),
    /// There was an election between the committed offset and this record, and the log may have been cut off by it.
    Unproven,
}

impl Epochs {
    /// `committed`: what stands beside the committed offset.
    pub(super) fn from(start: i64, committed: Option<i32>) -> Self {
        Self {
            known: committed
                .map(|epoch| (start - 1, epoch))
                .into_iter()
                .collect(),
            unproven: committed,
            last: None,
            newest: None,
        }
    }

    /// Takes in the next record.
    #[inline]
    pub(super) fn read(&mut self, offset: i64, epoch: Option<i32>) -> Election {
        let Some(epoch) = epoch else {
            return Election::None;
        };
        if self.unproven.is_some_and(|committed| committed < epoch) {
            return Election::Unproven;
        }
        self.unproven = None;
        let before = self.last.replace(epoch);
        self.newest = Some((offset, epoch));
        if self.known.last().is_none_or(|(_, last)| *last != epoch) {
            self.known.push((offset, epoch));
        }
        match before == Some(epoch) {
            true => Election::None,
            false => Election::Before(epoch),
        }
    }

    /// The epoch to ask the brokers about, once.
    pub(super) fn take_unproven(&mut self) -> Option<i32> {
        self.unproven.take()
    }

    /// Of the log up to this offset, where the record before it was the last that was read: of markers and of what was
    /// skipped it is not known.
    pub(super) fn at(&self, offset: i64) -> Option<i32> {
        let (last, epoch) = self.newest?;
        (last + 1 == offset).then_some(epoch)
    }

    /// Of the last record before this offset.
    pub(super) fn below(&self, offset: i64) -> Option<i32> {
        let before = self.known.partition_point(|(first, _)| *first < offset);
        Some(self.known[before.checked_sub(1)?].1)
    }

    /// The log was cut off at this offset, and that is known now.
    pub(super) fn cut_off(&mut self, offset: i64) {
        let kept = self.known.partition_point(|(first, _)| *first < offset);
        self.known.truncate(kept);
        self.unproven = None;
        self.newest = None;
    }

    pub(super) fn forget_below(&mut self, offset: i64) {
        let before = self.known.partition_point(|(first, _)| *first < offset);
        self.known.drain(..before.saturating_sub(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_committed_offset_has_the_epoch_of_the_record_before_it() {
        let mut epochs = Epochs::default();
        for (offset, epoch) in [(3, 0), (4, 0), (10, 2), (11, 2), (20, 5)] {
            assert_ne!(epochs.read(offset, Some(epoch)), Election::Unproven);
        }
        let below = |epochs: &Epochs| [3, 4, 10, 11, 20, 21].map(|offset| epochs.below(offset));
        assert_eq!(
            below(&epochs),
            [None, Some(0), Some(0), Some(2), Some(2), Some(5)]
        );
        assert_eq!(
            [20, 21, 22].map(|offset| epochs.at(offset)),
            [None, Some(5), None]
        );
        epochs.forget_below(11);
        assert_eq!(epochs.known.len(), 2);
        assert_eq!(below(&epochs)[3..], [Some(2), Some(2), Some(5)]);
        assert_eq!(Epochs::from(7, Some(3)).below(7), Some(3));
    }

    #[test]
    fn a_log_that_was_cut_off_goes_on_with_the_epochs_below_the_cut() {
        let mut epochs = Epochs::from(3, Some(0));
        for (offset, epoch) in [(3, 0), (10, 2), (20, 5)] {
            assert_ne!(epochs.read(offset, Some(epoch)), Election::Unproven);
        }
        epochs.cut_off(15);
        assert_eq!(epochs.below(21), Some(2));
        assert_eq!(epochs.read(15, Some(6)), Election::Before(6));
        assert_eq!((epochs.below(15), epochs.below(16)), (Some(2), Some(6)));
    }

    #[test]
    fn an_election_after_the_committed_offset_is_noticed_once() {
        let mut epochs = Epochs::from(100, Some(3));
        assert_eq!(epochs.read(100, Some(4)), Election::Unproven);
        assert_eq!(epochs.take_unproven(), Some(3));
        assert_eq!(epochs.read(100, Some(4)), Election::Before(4));
        assert_eq!(epochs.read(101, Some(4)), Election::None);
        let mut epochs = Epochs::from(100, Some(3));
        assert_eq!(epochs.read(100, Some(3)), Election::Before(3));
        let next = epochs.read(101, Some(4));
        assert_eq!(next, Election::Before(4), "the client asks itself then");
    }
}
