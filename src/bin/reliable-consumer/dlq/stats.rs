//! `dlq stats`: letters counted, in bounded memory however many there are.

use std::{borrow::Borrow, collections::HashMap, hash::Hash, io::Write};

use console::style;
use foldhash::fast::RandomState;
use serde_json::{Value, json};

use super::Letters;
use crate::{
    arguments::{Connection, Format, Stats},
    failure::Failure,
    letter::Letter,
    table::Table,
    text, time,
};

/// Different values that are told apart. Anybody can write headers: what comes after so many is counted together.
const DISTINCT: usize = 10_000;
/// Bytes of an error's message by which it is told apart.
const MESSAGE: usize = 160;
const HOUR: i64 = 3_600_000;

pub fn run(
    stats: &Stats,
    connection: &Connection,
    format: Format,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let letters = Letters::open(connection, &stats.source, &stats.which)?;
    let mut counts = Counts::default();
    letters.each(&letters.spans(), "counting", |letter| {
        counts.count(letter);
        Ok(())
    })?;
    let top = usize::from(stats.top);
    match format {
        Format::Json => {
            let value = counts.json(&stats.source.topic, top);
            writeln!(out, "{}", text::json_line(&value))?;
            Ok(())
        }
        Format::Table => counts.write(&stats.source.topic, stats.which.all, top, out),
    }
}

#[derive(Default)]
struct Counts {
    letters: u64,
    done: u64,
    bytes: u64,
    oldest: Option<i64>,
    newest: Option<i64>,
    origins: Tally<String>,
    kinds: Tally<String>,
    hours: Tally<i64>,
    redrives: Tally<u32>,
    groups: Tally<String>,
    messages: Tally<String>,
}

impl Counts {
    fn count(&mut self, letter: &Letter<'_>) {
        self.letters += 1;
        self.done += u64::from(letter.done);
        let bytes = letter.record.value().map_or(0, <[u8]>::len);
        self.bytes += bytes as u64;
        let story = letter.story;
        let origin = story.and_then(|story| story.origin);
        self.origins
            .add(origin.map_or("unknown", |origin| origin.topic));
        self.kinds.add(text::cut(letter.kind(), MESSAGE));
        self.redrives
            .add(&story.map_or(0, |story| story.retry_count));
        let group = story.and_then(|story| story.group);
        self.groups.add(group.unwrap_or("unknown"));
        if let Some(message) = letter.message() {
            self.messages.add(text::cut(message, MESSAGE));
        }
        if let Some(at) = letter.time() {
            self.hours.add(&at.div_euclid(HOUR));
            self.oldest = Some(self.oldest.map_or(at, |oldest| oldest.min(at)));
            self.newest = Some(self.newest.map_or(at, |newest| newest.max(at)));
        }
    }

    /// Name, heading, most frequent values with their counts, and the count of all others.
    fn tables(&self, top: usize) -> [Counted; 6] {
        let of = |name, heading, (rows, others)| Counted {
            name,
            heading,
            rows,
            others,
        };
        let hours = |(mut rows, others): (Vec<(i64, u64)>, u64)| {
            rows.sort_unstable();
            let rows = rows.into_iter();
            let rows = rows.map(|(hour, count)| (time::hour(hour.saturating_mul(HOUR)), count));
            (rows.collect(), others)
        };
        let redrives = |(rows, others): (Vec<(u32, u64)>, u64)| {
            let rows = rows.into_iter().map(|(it, count)| (it.to_string(), count));
            (rows.collect(), others)
        };
        [
            of("byOrigin", "TOPIC", self.origins.top(top)),
            of("byKind", "KIND", self.kinds.top(top)),
            of("byHour", "HOUR", hours(self.hours.top(top))),
            of("byRetryCount", "REDRIVES", redrives(self.redrives.top(top))),
            of("byGroup", "GROUP", self.groups.top(top)),
            of("byMessage", "MESSAGE", self.messages.top(top)),
        ]
    }

    fn json(&self, topic: &str, top: usize) -> Value {
        let mut value = json!({
            "topic": topic,
            "letters": self.letters,
            "done": self.done,
            "open": self.letters - self.done,
            "valueBytes": self.bytes,
            "oldest": self.oldest,
            "newest": self.newest,
        });
        for counted in self.tables(top) {
            let rows = counted.rows.into_iter();
            let rows = rows.map(|(name, count)| json!({ "name": name, "letters": count }));
            value[counted.name] = json!({
                "top": rows.collect::<Vec<_>>(),
                "others": counted.others,
            });
        }
        value
    }

    fn write(
        &self,
        topic: &str,
        all: bool,
        top: usize,
        out: &mut impl Write,
    ) -> Result<(), Failure> {
        let letters = text::count(self.letters, "letter");
        let heading = match all {
            true => format!(
                "{topic}: {letters}, {} of them open",
                self.letters - self.done
            ),
            false => format!("{topic}: {letters} open; --all counts what is done, too"),
        };
        writeln!(out, "{}", style(heading).bold())?;
        if let (Some(oldest), Some(newest)) = (self.oldest, self.newest) {
            let (oldest, newest) = (time::shown(oldest), time::shown(newest));
            writeln!(
                out,
                "from {oldest} to {newest} UTC, {} bytes of payload",
                self.bytes
            )?;
        }
        for counted in self.tables(top) {
            if counted.rows.is_empty() {
                continue;
            }
            writeln!(out)?;
            let mut table = Table::new(["#LETTERS", counted.heading]);
            for (name, count) in counted.rows {
                table.row([count.to_string(), text::line(name.as_bytes(), MESSAGE)]);
            }
            if counted.others > 0 {
                table.row([counted.others.to_string(), "(all others)".into()]);
            }
            table.write(out)?;
        }
        Ok(())
    }
}

struct Counted {
    name: &'static str,
    heading: &'static str,
    rows: Vec<(String, u64)>,
    others: u64,
}

/// How often each value was there.
struct Tally<K> {
    counts: HashMap<K, u64, RandomState>,
    beyond: u64,
}

impl<K> Default for Tally<K> {
    fn default() -> Self {
        Self {
            counts: HashMap::default(),
            beyond: 0,
        }
    }
}

impl<K: Hash + Ord + Clone> Tally<K> {
    fn add<Q>(&mut self, value: &Q)
    where
        Q: ToOwned<Owned = K> + Hash + Eq + ?Sized,
        K: Borrow<Q>,
    {
        if let Some(count) = self.counts.get_mut(value) {
            *count += 1;
        } else if self.counts.len() < DISTINCT {
            self.counts.insert(value.to_owned(), 1);
        } else {
            self.beyond += 1;
        }
    }

    /// The most frequent, and how many the others are together.
    fn top(&self, top: usize) -> (Vec<(K, u64)>, u64) {
        let mut all: Vec<_> = self.counts.iter().collect();
        all.sort_unstable_by(|a, b| b.1.cmp(a.1).then_with(|| a.0.cmp(b.0)));
        let others: u64 = all.iter().skip(top).map(|(_, count)| **count).sum();
        let top = all.into_iter().take(top);
        let top = top.map(|(value, count)| (value.clone(), *count));
        (top.collect(), others + self.beyond)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_frequent_are_told_apart_and_all_are_counted_in_bounded_memory() {
        let mut tally = Tally::<String>::default();
        for value in ["a", "b", "b", "c", "c"] {
            tally.add(value);
        }
        let expected = vec![("b".to_owned(), 2), ("c".to_owned(), 2)];
        assert_eq!(tally.top(2), (expected, 1));
        for hostile in 0..3 * DISTINCT {
            tally.add(&*hostile.to_string());
        }
        tally.add("b");
        let (top, others) = tally.top(1);
        assert_eq!(top, [("b".to_owned(), 3)]);
        assert_eq!(others, 3 + 3 * DISTINCT as u64);
        assert!(tally.counts.len() <= DISTINCT);
    }
}
