//! `dlq export --elasticsearch`: letters become documents, and how far it has come is kept as commits of a group.
//!
//! A position is moved and noted only behind letters that are in the index, or that it has refused. Whatever happens in
//! between, letters are written again, under the same ids.

use std::{
    collections::BTreeMap,
    io::Write,
    mem,
    ops::Range,
    time::{Duration, Instant},
};

use reliable_consumer::{
    LetterFilter, Record, Story,
    operate::{Cluster, InspectError, Next},
};

use crate::{
    arguments::{Connection, Export},
    elasticsearch::{Batch, Document, Patience, Put, Server, document, id},
    failure::Failure,
    interruptions,
    letter::Letter,
    progress::Progress,
    text, time,
};

/// Between two looks at a topic that is followed, and between two notes of the position.
const OFTEN: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(600);
/// Refused letters that are named; all are counted.
const NAMED: u64 = 20;
/// Characters of why one was refused.
const REASON: usize = 400;
/// Records, meant or not, after which the position moves.
const LOOKED_AT: usize = 10_000;
const BROKERS: &str = "the brokers";

pub fn print_template(export: &Export, out: &mut impl Write) -> Result<(), Failure> {
    let template = export.into.index.template();
    let pretty = serde_json::to_string_pretty(&template).expect("a value can be written");
    Ok(writeln!(out, "{pretty}")?)
}

pub fn run(export: &Export, connection: &Connection, url: &str) -> Result<(), Failure> {
    let server = Server::new(url, &export.into)?;
    let topic = &export.source.topic;
    let filter = export.which.filter.letters();
    let group = export.into.group.clone();
    let keeps_position = group.is_some() || filter.is_all();
    let group = group.unwrap_or_else(|| format!("{topic}.export.{}", server.index()));
    let cluster = connection.cluster(&group)?;
    let partitions = cluster.partitions(topic)?;
    let mut positions = BTreeMap::new();
    if keeps_position {
        let committed = cluster.committed(&[(topic.clone(), partitions)])?;
        let committed = committed.into_iter();
        positions.extend(committed.filter_map(|it| Some((it.partition, it.offset?))));
    }
    let limit = match export.into.follow {
        true => export.into.wait,
        false => Some(export.into.wait.unwrap_or(PATIENCE)),
    };
    let mut indexing = Indexing {
        export,
        topic,
        filter,
        keeps_position,
        cluster: &cluster,
        noted: positions.clone(),
        positions,
        last_note: Instant::now(),
        server,
        patience: Patience::new(limit, interruptions::flag()?),
        batch: Batch::default(),
        reached: BTreeMap::new(),
        taken: 0,
        refused: 0,
    };
    if export.dry_run {
        return indexing.count();
    }
    indexing.run()
}

struct Indexing<'a> {
    export: &'a Export,
    topic: &'a str,
    filter: LetterFilter,
    cluster: &'a Cluster,
    server: Server,
    patience: Patience,
    keeps_position: bool,
    /// Where to go on: all below is in the index or refused.
    positions: BTreeMap<i32, i64>,
    /// As the group has committed it.
    noted: BTreeMap<i32, i64>,
    last_note: Instant,
    /// What is read and not sent, and where to go on when it is.
    batch: Batch,
    reached: BTreeMap<i32, i64>,
    taken: u64,
    refused: u64,
}

impl Indexing<'_> {
    fn run(&mut self) -> Result<(), Failure> {
        let into = &self.export.into;
        let put = match into.put_template {
            true => Put::Always,
            false => Put::WhereMissing,
        };
        if self.is_anew(put)? {
            self.begin_anew()?;
        }
        let done = self.go_on();
        // Also where it failed: what is written is noted, and told.
        let noted = match self.keeps_position {
            true => self.note(),
            false => Ok(()),
        };
        let index = self.server.index();
        match self.refused {
            0 => eprintln!("{} letters exported to {index}", self.taken),
            refused => eprintln!(
                "{} letters exported to {index}, {refused} refused",
                self.taken
            ),
        }
        done.and(noted)?;
        if self.patience.is_stopped() && !into.follow {
            return Err(Failure::InPart(
                "stopped before all was exported; run it again to go on".into(),
            ));
        }
        match self.refused {
            0 => Ok(()),
            refused => Err(Failure::InPart(format!(
                "{refused} letters do not fit index {index} and were passed over; when it takes them, --from-start writes all again"
            ))),
        }
    }

    fn go_on(&mut self) -> Result<(), Failure> {
        let follow = self.export.into.follow;
        let say = |what: &str| eprintln!("{what}");
        while !self.patience.is_stopped() {
            let begun = Instant::now();
            match self.pass() {
                Ok(()) if follow => {
                    self.patience.ends(&say);
                    self.patience.sleep_until(begun + OFTEN);
                }
                Err(Failure::Kafka(
                    error @ (InspectError::Unreachable { .. } | InspectError::Silent { .. }),
                )) if follow => {
                    self.patience.wait_for(BROKERS, &error.to_string(), &say)?;
                }
                done => return done,
            }
        }
        Ok(())
    }

    /// Writes all that is in the topic now and not in the index.
    fn pass(&mut self) -> Result<(), Failure> {
        self.batch = Batch::default();
        self.reached.clear();
        let spans = self.spans()?;
        let all = spans.iter().map(|(_, span)| (span.end - span.start) as u64);
        let mut progress = Progress::new("exporting", all.sum());
        let (cluster, mut looked_at) = (self.cluster, 0);
        cluster.read(self.topic, &spans, |record| {
            progress.step();
            looked_at += 1;
            self.take(record);
            if self.batch.is_full() || looked_at == LOOKED_AT {
                looked_at = 0;
                self.flush(&progress)?;
            }
            Ok::<_, Failure>(match self.patience.is_stopped() {
                true => Next::Stop,
                false => Next::More,
            })
        })?;
        match self.patience.is_stopped() {
            true => Ok(()),
            false => self.flush(&progress),
        }
    }

    /// What is there and was not dealt with.
    fn spans(&mut self) -> Result<Vec<(i32, Range<i64>)>, Failure> {
        let mut spans = Vec::new();
        for partition in 0..self.cluster.partitions(self.topic)? {
            let mut span = self.cluster.bounds(self.topic, partition)?;
            if let Some(position) = self.positions.get(&partition).copied() {
                let place = format!("{}/{partition}", self.topic);
                if position > span.end {
                    eprintln!(
                        "{place} ends at {} and was read up to {position}: it was made anew, and is read from its start",
                        span.end
                    );
                } else if position < span.start {
                    eprintln!(
                        "{place}: what was between {position} and {} was deleted before it was exported",
                        span.start
                    );
                } else {
                    span.start = position;
                }
                self.positions.insert(partition, span.start);
            }
            spans.push((partition, span));
        }
        Ok(spans)
    }

    fn take(&mut self, record: &Record) {
        let behind = record.offset().saturating_add(1);
        self.reached.insert(record.partition(), behind);
        let story = Story::of(record);
        if !self.filter.matches_told(record, story.as_ref()) {
            return;
        }
        let letter = Letter {
            record,
            story,
            done: false,
        };
        let place = letter.place();
        let source = document(&letter, self.export.into.payload, time::now());
        let id = id(self.topic, place);
        self.batch
            .push(Document::new(self.server.index(), &id, place, &source));
    }

    /// Sends what has been read; then all of it is dealt with.
    fn flush(&mut self, progress: &Progress) -> Result<(), Failure> {
        let batch = mem::take(&mut self.batch);
        let say = |what: &str| progress.say(what);
        let sent = self.server.send(batch, &mut self.patience, &say)?;
        self.taken += sent.taken;
        for (place, reason) in sent.refused {
            self.refused += 1;
            if self.refused <= NAMED {
                let reason = text::line(reason.as_bytes(), REASON);
                say(&format!("{}/{place} is refused: {reason}", self.topic));
            }
            if self.refused == NAMED {
                say("those that follow are only counted");
            }
        }
        if sent.all {
            self.positions.append(&mut self.reached);
            if self.keeps_position && self.last_note.elapsed() >= OFTEN {
                self.note()?;
            }
        }
        Ok(())
    }

    fn note(&mut self) -> Result<(), Failure> {
        for (partition, position) in &self.positions {
            if self.noted.get(partition) != Some(position) {
                self.cluster.stand_at(self.topic, *partition, *position)?;
                self.noted.insert(*partition, *position);
            }
        }
        self.last_note = Instant::now();
        Ok(())
    }

    /// Whether nothing counts as dealt with.
    fn is_anew(&mut self, put: Put) -> Result<bool, Failure> {
        let say = |what: &str| eprintln!("{what}");
        let exists = self.server.prepare(put, &mut self.patience, &say)?;
        Ok(self.export.into.from_start || exists == Some(false))
    }

    /// Forgets what was dealt with, for good: a crash in the middle must not bring back where an earlier index was.
    fn begin_anew(&mut self) -> Result<(), Failure> {
        let known: Vec<_> = self.positions.keys().copied().collect();
        for partition in known {
            let start = self.cluster.bounds(self.topic, partition)?.start;
            self.positions.insert(partition, start);
        }
        if self.keeps_position {
            self.note()?;
        }
        Ok(())
    }

    /// What would be exported.
    fn count(&mut self) -> Result<(), Failure> {
        if self.is_anew(Put::Never)? {
            self.positions.clear();
        }
        let spans = self.spans()?;
        let all = spans.iter().map(|(_, span)| (span.end - span.start) as u64);
        let mut progress = Progress::new("looking", all.sum());
        let mut count = 0_u64;
        self.cluster.read(self.topic, &spans, |record| {
            progress.step();
            count += u64::from(self.filter.matches(record));
            Ok::<_, Failure>(Next::More)
        })?;
        eprintln!(
            "{count} letters would be exported to {}",
            self.server.index()
        );
        Ok(())
    }
}
