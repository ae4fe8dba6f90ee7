//! `dlq show`: all about single records.

use std::{collections::BTreeSet, io::Write};

use console::style;
use reliable_consumer::{Record, Story, Timestamp};

use super::{fetch, partitions_told};
use crate::{
    arguments::{Connection, Format, Show},
    failure::Failure,
    letter::Letter,
    text, time,
};

/// So much of a header's value, and of a payload, is shown unless all is wanted.
const HEADER: usize = 200;
const PAYLOAD: usize = 16 << 10;

pub fn run(
    show: &Show,
    connection: &Connection,
    format: Format,
    out: &mut impl Write,
) -> Result<(), Failure> {
    // Nothing is asked of the group; librdkafka wants a name.
    let cluster = connection.cluster(&format!("{}.redriver", show.topic))?;
    let partitions = cluster.partitions(&show.topic)?;
    let mut missing = Vec::new();
    for place in &show.places {
        let here = BTreeSet::from([place.offset]);
        let mut found = fetch(&cluster, &show.topic, place.partition, &here)?;
        let Some(record) = found.pop() else {
            missing.push(place.to_string());
            continue;
        };
        let committed = cluster.committed_in(&show.topic, place.partition);
        let letter = Letter {
            record: &record,
            story: Story::of(&record),
            // Who may not see the group's commits may look at letters all the same.
            done: committed.is_ok_and(|it| it.covers(place.offset)),
        };
        match format {
            Format::Json => writeln!(out, "{}", text::json_line(&letter.whole()))?,
            Format::Table => write(&letter, show.full, out)?,
        }
    }
    match missing.is_empty() {
        true => Ok(()),
        false => {
            let beyond = show.places.iter().any(|it| it.partition >= partitions);
            let told = match beyond {
                true => format!("; {}", partitions_told(&show.topic, partitions)),
                false => String::new(),
            };
            Err(Failure::NotFound(format!(
                "there is no record at {} in {}: deleted by now, a transaction's marker, or not written yet{told}",
                missing.join(", "),
                show.topic,
            )))
        }
    }
}

fn write(letter: &Letter<'_>, full: bool, out: &mut impl Write) -> Result<(), Failure> {
    let Letter {
        record,
        story,
        done,
    } = letter;
    let limit = |cut: usize| if full { usize::MAX } else { cut };
    let mut facts: Vec<(&str, String)> = Vec::new();
    let when = |millis: i64| {
        let ago = time::age(time::now().saturating_sub(millis));
        format!("{} UTC, {ago} ago", time::shown(millis))
    };
    if let Some(story) = story {
        let message = letter.message().unwrap_or_default();
        let message = text::line(message.as_bytes(), usize::MAX);
        let kind = text::line(letter.kind().as_bytes(), HEADER);
        facts.push(("error", format!("{kind}: {message}")));
        let parked = letter.park_reason();
        facts.extend(parked.map(|it| ("parked", text::line(it.as_bytes(), HEADER))));
        facts.extend(story.failed_at.map(|at| ("failed", when(at))));
        facts.extend(story.attempts.map(|it| ("attempts", it.to_string())));
        facts.push(("redrives", story.retry_count.to_string()));
        let group = story
            .group
            .map(|group| text::line(group.as_bytes(), HEADER));
        facts.extend(group.map(|group| ("group", group)));
        facts.extend(story.origin.map(|origin| {
            let place = format!("{} {}@{}", origin.topic, origin.partition, origin.offset);
            let written = origin.timestamp.map(|at| format!(", written {}", when(at)));
            ("from", place + &written.unwrap_or_default())
        }));
        let id = story.message_id().map(|id| text::line(id.as_bytes(), 512));
        facts.extend(id.map(|id| ("message id", id)));
        let state = match done {
            true => "done: sent back, or parked",
            false => "open",
        };
        facts.push(("state", state.into()));
        facts.push(("headers by", story.dialect.as_str().into()));
    }
    let written = record.timestamp().map(Timestamp::as_millis);
    facts.extend(written.map(|at| ("written", when(at))));
    let key = record.key().map(|key| text::line(key, limit(HEADER)));
    facts.push(("key", key.unwrap_or_else(|| "null".into())));

    writeln!(
        out,
        "{}",
        style(format!("{} {}", record.topic(), letter.place())).bold()
    )?;
    for (name, value) in facts {
        writeln!(out, "  {name:<11} {value}")?;
    }
    write_headers(record, limit(HEADER), out)?;
    match record.value() {
        None => writeln!(out, "\n{}", style("Payload: null, a tombstone").bold())?,
        Some(value) => {
            let heading = format!("Payload, {} bytes", value.len());
            writeln!(out, "\n{}", style(heading).bold())?;
            writeln!(out, "{}", text::payload(value, limit(PAYLOAD)))?;
        }
    }
    writeln!(out)?;
    Ok(())
}

fn write_headers(record: &Record, limit: usize, out: &mut impl Write) -> Result<(), Failure> {
    if record.headers().is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{}", style("Headers").bold())?;
    for header in record.headers().iter() {
        let name = text::line(header.name_bytes(), limit);
        let value = header.value().map(|value| text::line(value, limit));
        writeln!(out, "  {name}: {}", value.as_deref().unwrap_or("null"))?;
    }
    Ok(())
}
