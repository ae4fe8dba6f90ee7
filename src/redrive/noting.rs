//! What a run with a filter has done, noted for the redriver without one, so that it does not send it again.

use std::{collections::HashMap, ops::Range};

use super::LetterFilter;
use crate::kafka::{Cluster, InspectError, Next};

/// `own` speaks for the group of the run, `unfiltered` for that of the redriver without a filter, which must be idle.
pub(super) fn note(
    topic: &str,
    filter: &LetterFilter,
    own: &Cluster,
    unfiltered: &Cluster,
) -> Result<(), InspectError> {
    let partitions = [(topic.to_owned(), own.partitions(topic)?)];
    let done = own.committed(&partitions)?;
    let before = unfiltered.committed(&partitions)?;
    let mut spans = Vec::with_capacity(done.len());
    for (done, before) in done.iter().zip(&before) {
        let bounds = own.bounds(topic, done.partition)?;
        let reached = done.note.finished().last().map(|range| range.end);
        let reached = reached.or(done.offset).unwrap_or(0).min(bounds.end);
        spans.push((
            done.partition,
            before.offset.unwrap_or(0).max(bounds.start)..reached,
        ));
    }
    let mut marked = HashMap::<i32, Marked>::new();
    own.read(topic, &spans, |letter| {
        let (partition, offset) = (letter.partition(), letter.offset());
        let place = partition as usize;
        let is_done = done[place].covers(offset);
        let news = is_done && !before[place].covers(offset) && filter.matches(letter);
        marked.entry(partition).or_default().next(offset, news);
        Ok::<_, InspectError>(Next::More)
    })?;
    for (partition, marked) in &marked {
        if !marked.ranges.is_empty() {
            unfiltered.mark_finished(topic, *partition, &marked.ranges)?;
        }
    }
    Ok(())
}

/// Offsets that are to be marked, as few ranges as may be: between two letters that follow each other there is nothing.
#[derive(Default)]
struct Marked {
    ranges: Vec<Range<i64>>,
    goes_on: bool,
}

impl Marked {
    fn next(&mut self, offset: i64, marked: bool) {
        match self.ranges.last_mut() {
            Some(last) if marked && self.goes_on => last.end = offset + 1,
            _ if marked => self.ranges.push(offset..offset + 1),
            _ => {}
        }
        self.goes_on = marked;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_that_follow_each_other_are_one_range_whatever_gaps_the_log_has() {
        let mut marked = Marked::default();
        for (offset, is_marked) in [(1, true), (2, true), (7, true), (8, false), (9, true)] {
            marked.next(offset, is_marked);
        }
        assert_eq!(marked.ranges, [1..8, 9..10]);
    }
}
