//! `dlq park` and `dlq unpark`: single letters between the dead-letter topic and the parking lot.
//!
//! First the copy, acknowledged by all in-sync replicas. Then the note for the group that reads the source, that it is done
//! with the letter. Whatever happens in between leaves a letter in both places, and loses none.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write,
};

use reliable_consumer::{
    Record, header_names,
    operate::{Cluster, InspectError},
};
use serde_json::json;
use tokio::runtime;

use super::{fetch, partitions_told};
use crate::{
    arguments::{Connection, Format, Move, Park, Source, Unpark},
    confirm::confirm,
    failure::Failure,
    place::Place,
    text,
};

/// More than these are moved only if somebody says yes.
const MANY: usize = 100;
const BY_HAND: &str = "by-hand";
const PARKED: &str = ".parked";

pub fn park(
    park: &Park,
    connection: &Connection,
    format: Format,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let topic = &park.source.topic;
    let parking_lot = park.parking_lot.clone();
    Transport {
        source: &park.source,
        which: &park.which,
        target: parking_lot.unwrap_or_else(|| format!("{topic}{PARKED}")),
        set: &[(header_names::PARK_REASON, Some(BY_HAND))],
        verb: "parked",
    }
    .run(connection, format, out)
}

pub fn unpark(
    unpark: &Unpark,
    connection: &Connection,
    format: Format,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let topic = &unpark.source.topic;
    let dlq = unpark.dlq.as_deref().or_else(|| topic.strip_suffix(PARKED));
    let target = dlq.map(str::to_owned).ok_or_else(|| {
        Failure::Usage(format!(
            "{topic} does not end in {PARKED}: name the dead-letter topic with --dlq"
        ))
    })?;
    Transport {
        source: &unpark.source,
        which: &unpark.which,
        target,
        set: &[
            (header_names::PARK_REASON, None),
            (header_names::RETRY_COUNT, Some("0")),
        ],
        verb: "unparked",
    }
    .run(connection, format, out)
}

struct Transport<'a> {
    source: &'a Source,
    which: &'a Move,
    target: String,
    /// Headers that the copy has instead of the letter's, or has not at all.
    set: &'a [(&'a str, Option<&'a str>)],
    verb: &'static str,
}

impl Transport<'_> {
    fn run(
        &self,
        connection: &Connection,
        format: Format,
        out: &mut impl Write,
    ) -> Result<(), Failure> {
        let Self {
            source,
            which,
            target,
            ..
        } = self;
        let topic = &source.topic;
        if topic == target {
            let message = format!("letters of {topic} would be copied to where they are");
            return Err(Failure::Usage(message));
        }
        let cluster = connection.cluster(&source.group())?;
        let letters = self.find(&cluster)?;
        if cluster.find(target)?.is_none() {
            let message = format!(
                "there is no topic {target}; `topics create-dlq` makes what a topic's dead letters need"
            );
            return Err(Failure::NotFound(message));
        }
        let count = letters.len();
        if which.dry_run {
            for letter in &letters {
                self.tell(letter, None, format, out)?;
            }
            return Ok(());
        }
        if count > MANY && !which.yes {
            confirm(&format!(
                "{count} letters of {topic} would be {} to {target}",
                self.verb
            ))?;
        }
        let partitions: BTreeSet<_> = letters.iter().map(Record::partition).collect();
        for partition in &partitions {
            // Before anything is copied: the group must be idle.
            cluster.mark_finished(topic, *partition, &[])?;
        }
        let mut moved = BTreeMap::<i32, Vec<i64>>::new();
        let mut copies = Vec::new();
        let outcome = self.copy(&cluster, &letters, |letter, copy| {
            let offsets = moved.entry(letter.partition()).or_default();
            offsets.push(letter.offset());
            copies.push((letter.clone(), copy));
        });
        for (partition, offsets) in &moved {
            let done: Vec<_> = offsets.iter().map(|it| *it..*it + 1).collect();
            cluster.mark_finished(topic, *partition, &done).map_err(|error| {
                Failure::InPart(format!(
                    "copied to {target}, but still open in {topic}, partition {partition}, offsets {offsets:?}: {error}"
                ))
            })?;
        }
        for (letter, copy) in &copies {
            self.tell(letter, Some(*copy), format, out)?;
        }
        outcome.map_err(|error| match copies.len() {
            0 => Failure::Kafka(error),
            done => Failure::InPart(format!("{done} of {count} letters {}: {error}", self.verb)),
        })
    }

    /// The letters, if all are there and open.
    fn find(&self, cluster: &Cluster) -> Result<Vec<Record>, Failure> {
        let topic = &self.source.topic;
        let partitions = cluster.partitions(topic)?;
        let mut places = BTreeMap::<i32, BTreeSet<i64>>::new();
        for Place { partition, offset } in &self.which.places {
            places.entry(*partition).or_default().insert(*offset);
        }
        let mut letters = Vec::with_capacity(self.which.places.len());
        for (partition, offsets) in places {
            let at = |offset| Place { partition, offset };
            let found = fetch(cluster, topic, partition, &offsets)?;
            let is_found = |offset: &i64| found.iter().any(|it| it.offset() == *offset);
            if let Some(missing) = offsets.iter().find(|offset| !is_found(offset)) {
                let why = match partition >= partitions {
                    true => format!(": {}", partitions_told(topic, partitions)),
                    false => String::new(),
                };
                let message = format!(
                    "there is no letter at {} in {topic}{why}; nothing was changed",
                    at(*missing)
                );
                return Err(Failure::NotFound(message));
            }
            let committed = cluster.committed_in(topic, partition)?;
            if let Some(done) = offsets.iter().find(|offset| committed.covers(**offset)) {
                let message = format!(
                    "group {} is done with the letter at {} in {topic} already; nothing was changed",
                    cluster.group(),
                    at(*done)
                );
                return Err(Failure::NotFound(message));
            }
            letters.extend(found);
        }
        Ok(letters)
    }

    fn copy(
        &self,
        cluster: &Cluster,
        letters: &[Record],
        mut copied: impl FnMut(&Record, (i32, i64)),
    ) -> Result<(), InspectError> {
        let runtime = runtime::Builder::new_current_thread().enable_time().build();
        let runtime = runtime.map_err(|error| InspectError::Client(error.to_string()))?;
        let courier = cluster.courier()?;
        for letter in letters {
            let headers = letter.headers();
            let kept = headers.iter().filter(|header| {
                let name = header.name_bytes();
                self.set.iter().all(|(set, _)| set.as_bytes() != name)
            });
            let set = self.set.iter().filter_map(|(name, value)| {
                Some((name.as_bytes(), Some(value.as_ref()?.as_bytes())))
            });
            let headers: Vec<_> = kept
                .map(|header| (header.name_bytes(), header.value()))
                .chain(set)
                .collect();
            let copy = runtime.block_on(courier.send(&self.target, letter, &headers))?;
            copied(letter, copy);
        }
        Ok(())
    }

    fn tell(
        &self,
        letter: &Record,
        copy: Option<(i32, i64)>,
        format: Format,
        out: &mut impl Write,
    ) -> Result<(), Failure> {
        let place = Place {
            partition: letter.partition(),
            offset: letter.offset(),
        };
        let target = &self.target;
        let topic = &self.source.topic;
        match (format, copy) {
            (Format::Json, copy) => {
                let copy = copy
                    .map(|(partition, offset)| json!({ "partition": partition, "offset": offset }));
                let value = json!({
                    "topic": topic,
                    "partition": place.partition,
                    "offset": place.offset,
                    "target": target,
                    "copy": copy,
                    "dryRun": copy.is_none(),
                });
                writeln!(out, "{}", text::json_line(&value))?;
            }
            (Format::Table, Some((partition, offset))) => {
                let copy = Place { partition, offset };
                writeln!(out, "{topic} {place} is {} to {target} {copy}", self.verb)?;
            }
            (Format::Table, None) => {
                writeln!(out, "{topic} {place} would be {} to {target}", self.verb)?;
            }
        }
        Ok(())
    }
}
