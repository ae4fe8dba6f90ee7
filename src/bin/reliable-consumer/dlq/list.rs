//! `dlq list`: the newest letters, in bounded memory however many there are.

use std::{cmp::Reverse, collections::BinaryHeap, io::Write, ops::Range};

use serde_json::Value;

use super::{Letters, OtherKinds};
use crate::{
    arguments::{Connection, Format, List},
    failure::Failure,
    letter::Letter,
    place::Place,
    table::Table,
    text,
};

/// Offsets at the end of each partition that are looked at first where nothing is searched for.
const TAIL: i64 = 1_000;

pub fn run(
    list: &List,
    connection: &Connection,
    format: Format,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let letters = Letters::open(connection, &list.source, &list.which)?;
    let spans = letters.spans();
    let limit = list.limit as usize;
    let mut newest = Newest::new(limit, format);
    let tails = tails(&spans, i64::from(list.limit).max(TAIL));
    let searches = !list.which.filter.letters().is_all();
    let mut others = OtherKinds::new();
    if !searches {
        letters.each(&tails, "reading", |letter| newest.offer(letter))?;
    }
    // Transactions and compaction leave gaps; and what is done may be behind what is open.
    if searches || newest.heap.len() < limit && tails != spans {
        newest = Newest::new(limit, format);
        others = letters.each(&spans, "reading", |letter| newest.offer(letter))?;
    }
    if newest.heap.is_empty() && format == Format::Table {
        let is_empty = letters.bounds.iter().all(|(_, span)| span.is_empty());
        writeln!(out, "{}", none(list, is_empty, &others))?;
        return Ok(());
    }
    newest.write(list, out)
}

/// Why nothing is listed.
fn none(list: &List, is_empty: bool, others: &OtherKinds) -> String {
    let topic = &list.source.topic;
    if is_empty {
        return format!("{topic} is empty.");
    }
    let filtered = !list.which.filter.letters().is_all();
    let mut told = match (list.which.all, filtered) {
        (false, false) => format!("No letter is open in {topic}; --all shows what is done, too."),
        (false, true) => format!(
            "No open letter in {topic} is what the filter means; --all looks at what is done, too."
        ),
        (true, _) => format!("No letter in {topic} is what the filter means."),
    };
    if !others.is_empty() {
        let kinds = others.iter().map(|kind| text::line(kind.as_bytes(), 100));
        told += &format!(" There are: {}.", kinds.collect::<Vec<_>>().join(", "));
    }
    told
}

fn tails(spans: &[(i32, Range<i64>)], length: i64) -> Vec<(i32, Range<i64>)> {
    let tail = |span: &Range<i64>| span.start.max(span.end - length)..span.end;
    spans.iter().map(|(it, span)| (*it, tail(span))).collect()
}

/// The first is the oldest, which leaves when a newer one comes.
struct Newest {
    limit: usize,
    format: Format,
    heap: BinaryHeap<Reverse<(Option<i64>, Place, Shown)>>,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Shown {
    Row([String; 7]),
    Json(String),
}

impl Newest {
    fn new(limit: usize, format: Format) -> Self {
        Self {
            limit,
            format,
            heap: BinaryHeap::new(),
        }
    }

    fn offer(&mut self, letter: &Letter<'_>) -> Result<(), Failure> {
        let at = (letter.time(), letter.place());
        if self.heap.len() == self.limit {
            let oldest = self.heap.peek();
            if oldest.is_some_and(|Reverse((time, place, _))| (*time, *place) >= at) {
                return Ok(());
            }
            self.heap.pop();
        }
        let shown = match self.format {
            Format::Table => Shown::Row(letter.row()),
            Format::Json => Shown::Json(text::json_line(&Value::Object(letter.summary()))),
        };
        self.heap.push(Reverse((at.0, at.1, shown)));
        Ok(())
    }

    fn write(self, list: &List, out: &mut impl Write) -> Result<(), Failure> {
        let full = self.heap.len() == self.limit;
        let mut table = Table::new([
            "FAILED (UTC)",
            "LETTER",
            "FROM",
            "KIND",
            "#REDRIVES",
            "KEY",
            "ERROR",
        ]);
        for Reverse((_, _, shown)) in self.heap.into_sorted_vec() {
            match shown {
                Shown::Json(line) => writeln!(out, "{line}")?,
                Shown::Row(row) => table.row(row),
            }
        }
        if self.format == Format::Json {
            return Ok(());
        }
        let topic = &list.source.topic;
        table.write(out)?;
        let more = match full {
            true => format!("There may be more: --limit, or count them with `dlq stats {topic}`. "),
            false => String::new(),
        };
        writeln!(out, "\n{more}All about one: `dlq show {topic} LETTER`.")?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use reliable_consumer::Message;

    use super::*;

    #[test]
    fn the_newest_stay_and_come_first() {
        let mut newest = Newest::new(3, Format::Table);
        for (offset, failed_at) in [(0, 50), (1, 10), (2, 70), (3, 60), (4, 20), (5, 70)] {
            let record = Message::builder()
                .offset(offset)
                .timestamp_millis(failed_at)
                .record();
            let letter = Letter {
                record: &record,
                story: None,
                done: false,
            };
            newest.offer(&letter).unwrap();
        }
        let kept: Vec<_> = newest.heap.into_sorted_vec();
        let offsets: Vec<_> = kept
            .iter()
            .map(|Reverse((_, place, _))| place.offset)
            .collect();
        assert_eq!(offsets, [5, 2, 3]);
    }
}
