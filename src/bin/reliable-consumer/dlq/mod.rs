//! Dead letters: what all commands on them do alike.

mod export;
mod indexing;
mod list;
mod moving;
mod redrive;
mod show;
mod stats;

use std::{collections::BTreeSet, io::Write, ops::Range};

use reliable_consumer::{
    Record, Story,
    operate::{Cluster, Committed, Next},
};

use crate::{
    arguments::{Connection, Dlq, Format, Source, Which},
    failure::Failure,
    letter::Letter,
    progress::Progress,
};

pub fn run(
    command: &Dlq,
    connection: &Connection,
    format: Format,
    out: &mut impl Write,
) -> Result<(), Failure> {
    match command {
        Dlq::List(list) => list::run(list, connection, format, out),
        Dlq::Show(show) => show::run(show, connection, format, out),
        Dlq::Stats(stats) => stats::run(stats, connection, format, out),
        Dlq::Export(export) => export::run(export, connection, out),
        Dlq::Redrive(redrive) => redrive::run(redrive, connection, format, out),
        Dlq::Park(park) => moving::park(park, connection, format, out),
        Dlq::Unpark(unpark) => moving::unpark(unpark, connection, format, out),
    }
}

/// Kinds of letters that a filter for kinds does not mean, for whoever has found none. Anybody can write headers: no more
/// than so many.
type OtherKinds = BTreeSet<String>;
const KINDS: usize = 12;

/// A topic of dead letters as it lies there now.
struct Letters<'a> {
    cluster: Cluster,
    source: &'a Source,
    which: &'a Which,
    committed: Vec<Committed>,
    /// First offset and end of each partition.
    bounds: Vec<(i32, Range<i64>)>,
}

impl<'a> Letters<'a> {
    fn open(
        connection: &Connection,
        source: &'a Source,
        which: &'a Which,
    ) -> Result<Self, Failure> {
        which.filter.check()?;
        let cluster = connection.cluster(&source.group())?;
        let topic = &source.topic;
        let partitions = cluster.partitions(topic)?;
        let bounds = (0..partitions)
            .map(|partition| Ok((partition, cluster.bounds(topic, partition)?)))
            .collect::<Result<_, Failure>>()?;
        let mut committed = cluster.committed(&[(topic.clone(), partitions)])?;
        committed.sort_by_key(|it| it.partition);
        Ok(Self {
            cluster,
            source,
            which,
            committed,
            bounds,
        })
    }

    fn committed(&self, partition: i32) -> Option<&Committed> {
        self.committed.get(usize::try_from(partition).ok()?)
    }

    /// Where letters that are meant can be.
    fn spans(&self) -> Vec<(i32, Range<i64>)> {
        let mut spans = self.bounds.clone();
        if !self.which.all {
            for (partition, span) in &mut spans {
                let committed = self.committed(*partition).and_then(|it| it.offset);
                span.start = committed.unwrap_or(0).clamp(span.start, span.end);
            }
        }
        spans
    }

    /// Hands out what is meant, and tells of which kinds the others are.
    fn each(
        &self,
        spans: &[(i32, Range<i64>)],
        what: &'static str,
        mut each: impl FnMut(&Letter<'_>) -> Result<(), Failure>,
    ) -> Result<OtherKinds, Failure> {
        let mut others = OtherKinds::new();
        let asked_for_kinds = !self.which.filter.kind.is_empty();
        let total = spans.iter().map(|(_, span)| (span.end - span.start) as u64);
        let mut progress = Progress::new(what, total.sum());
        let filter = self.which.filter.letters();
        self.cluster.read(&self.source.topic, spans, |record| {
            progress.step();
            let committed = self.committed(record.partition());
            let done = committed.is_some_and(|it| it.covers(record.offset()));
            if done && !self.which.all {
                return Ok::<_, Failure>(Next::More);
            }
            let story = Story::of(record);
            let letter = Letter {
                record,
                story,
                done,
            };
            if filter.matches_told(record, story.as_ref()) {
                each(&letter)?;
            } else if asked_for_kinds && others.len() < KINDS && !others.contains(letter.kind()) {
                others.insert(letter.kind().to_owned());
            }
            Ok(Next::More)
        })?;
        Ok(others)
    }
}

/// What there is, where somebody asks for a partition that there is not.
fn partitions_told(topic: &str, partitions: i32) -> String {
    match partitions {
        1 => format!("{topic} has partition 0 only"),
        _ => format!("{topic} has partitions 0-{}", partitions - 1),
    }
}

/// Offsets that lie so close to each other are read together.
const NEAR: i64 = 16;

/// The records at these offsets of a partition, as far as there are any, in their order.
fn fetch(
    cluster: &Cluster,
    topic: &str,
    partition: i32,
    offsets: &BTreeSet<i64>,
) -> Result<Vec<Record>, Failure> {
    let mut found = Vec::with_capacity(offsets.len());
    if partition >= cluster.partitions(topic)? {
        return Ok(found);
    }
    let bounds = cluster.bounds(topic, partition)?;
    let there: Vec<_> = offsets.iter().filter(|it| bounds.contains(it)).collect();
    for together in there.chunk_by(|one, next| *next - *one <= NEAR) {
        let (Some(first), Some(last)) = (together.first(), together.last()) else {
            continue;
        };
        cluster.read(topic, &[(partition, **first..**last + 1)], |record| {
            if offsets.contains(&record.offset()) {
                found.push(record.clone());
            }
            Ok::<_, Failure>(Next::More)
        })?;
    }
    Ok(found)
}
