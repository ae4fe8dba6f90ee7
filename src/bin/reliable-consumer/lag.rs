//! `lag`: where a group stands, from outside.

use std::{collections::HashMap, io::Write};

use reliable_consumer::{
    Record, Story, Timestamp,
    operate::{Cluster, Committed, Member, Next, Note},
};
use serde_json::{Value, json};

use crate::{
    arguments::{Connection, Format, Lag},
    failure::Failure,
    members,
    table::Table,
    text, time,
};

/// What is shown of a key.
const KEY: usize = 40;

struct Standing {
    committed: Committed,
    start: i64,
    end: i64,
    /// The oldest record that is not finished.
    head: Option<Head>,
}

struct Head {
    offset: i64,
    written: Option<i64>,
    key: Option<Vec<u8>>,
    retry_count: u32,
    value_bytes: Option<usize>,
}

pub fn run(
    lag: &Lag,
    connection: &Connection,
    format: Format,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let cluster = connection.cluster(&lag.group)?;
    if lag.members {
        return members::tell(&lag.group, cluster.members()?, format, out);
    }
    let mut standings = standings(&cluster, &lag.topic)?;
    if standings.is_empty() {
        let (place, advice) = match lag.topic.is_empty() {
            true => (String::new(), "check its name"),
            false => (
                format!(" in {}", lag.topic.join(", ")),
                "without --topic all are shown in which it has",
            ),
        };
        let message = format!(
            "group {} has committed nothing{place} that this principal can see; {advice}",
            lag.group
        );
        return Err(Failure::NotFound(message));
    }
    standings.sort_by(|a, b| a.place().cmp(&b.place()));
    let unknown = find_heads(&cluster, &mut standings).err();
    if let Some(failure) = &unknown {
        eprintln!("The oldest unfinished records are not known: {failure}");
    }
    let members = cluster.members().unwrap_or_else(|error| {
        eprintln!("The members of the group are not known: {error}");
        Vec::new()
    });
    let owners = members::owners(&members);
    let now = time::now();
    match format {
        Format::Json => {
            for standing in &standings {
                let mut line = standing.json(&lag.group, now);
                line["owner"] = owners
                    .get(&standing.place())
                    .map(|it| members::json(it))
                    .into();
                writeln!(out, "{}", text::json_line(&line))?;
            }
        }
        Format::Table => write(&standings, &owners, now, out)?,
    }
    let Some(limit) = lag.max_age else {
        return Ok(());
    };
    let late = standings.iter().filter(|standing| {
        let age = standing.age(now);
        age.is_some_and(|age| u128::try_from(age).is_ok_and(|age| age > limit.as_millis()))
    });
    match late.count() {
        // Nobody knows how old the others are.
        0 => unknown.map_or(Ok(()), Err),
        late => Err(Failure::BehindTime(format!(
            "{} with an unfinished record older than {}",
            text::count(late as u64, "partition"),
            time::age(i64::try_from(limit.as_millis()).unwrap_or(i64::MAX))
        ))),
    }
}

fn standings(cluster: &Cluster, topics: &[String]) -> Result<Vec<Standing>, Failure> {
    let named = !topics.is_empty();
    let topics = match named {
        false => cluster.topics()?,
        true => topics
            .iter()
            .map(|topic| Ok((topic.clone(), cluster.partitions(topic)?)))
            .collect::<Result<_, Failure>>()?,
    };
    let mut committed = cluster.committed(&topics)?;
    if !named {
        let mut known: Vec<_> = committed
            .iter()
            .filter(|it| it.offset.is_some())
            .map(|it| it.topic.clone())
            .collect();
        known.dedup();
        committed.retain(|it| known.contains(&it.topic));
    } else if committed.iter().all(|it| it.offset.is_none()) {
        committed.clear();
    }
    committed
        .into_iter()
        .map(|committed| {
            let bounds = cluster.bounds(&committed.topic, committed.partition)?;
            Ok(Standing {
                committed,
                start: bounds.start,
                end: bounds.end,
                head: None,
            })
        })
        .collect()
}

/// The first record of each partition that is not finished.
fn find_heads(cluster: &Cluster, standings: &mut [Standing]) -> Result<(), Failure> {
    let mut topics: Vec<_> = standings
        .iter()
        .map(|it| it.committed.topic.clone())
        .collect();
    topics.dedup();
    for topic in topics {
        let mut here: HashMap<i32, &mut Standing> = standings
            .iter_mut()
            .filter(|it| it.committed.topic == topic)
            .map(|it| (it.committed.partition, it))
            .collect();
        let spans: Vec<_> = here
            .values()
            .filter_map(|it| {
                let committed = it.committed.offset?.max(it.start);
                (committed < it.end).then_some((it.committed.partition, committed..it.end))
            })
            .collect();
        cluster.read(&topic, &spans, |record| {
            let Some(standing) = here.get_mut(&record.partition()) else {
                return Ok(Next::Enough);
            };
            if standing.committed.covers(record.offset()) {
                return Ok::<_, Failure>(Next::More);
            }
            standing.head = Some(Head::of(record));
            Ok(Next::Enough)
        })?;
    }
    Ok(())
}

impl Head {
    fn of(record: &Record) -> Self {
        Self {
            offset: record.offset(),
            written: record.timestamp().map(Timestamp::as_millis),
            key: record.key().map(<[u8]>::to_vec),
            retry_count: Story::of(record).map_or(0, |story| story.retry_count),
            value_bytes: record.value().map(<[u8]>::len),
        }
    }
}

impl Standing {
    fn place(&self) -> (&str, i32) {
        (&self.committed.topic, self.committed.partition)
    }

    fn lag(&self) -> Option<i64> {
        let committed = self.committed.offset?;
        Some(self.end.saturating_sub(committed).max(0))
    }

    fn held_back(&self) -> i64 {
        let finished = self.committed.note.finished().iter();
        finished.map(|range| range.end - range.start).sum()
    }

    /// How old the oldest unfinished record is.
    fn age(&self, now: i64) -> Option<i64> {
        Some(now.saturating_sub(self.head.as_ref()?.written?))
    }

    fn state(&self) -> &'static str {
        match (self.committed.offset, self.lag()) {
            (None, _) => "nothing committed",
            (Some(offset), _) if offset < self.start => "records deleted unread",
            (Some(offset), _) if offset > self.end => "committed beyond the log's end",
            (_, Some(0)) => "caught up",
            _ if self.held_back() > 0 => "head holds others back",
            _ => "behind",
        }
    }

    fn json(&self, group: &str, now: i64) -> Value {
        let Committed {
            topic,
            partition,
            offset,
            note,
            ..
        } = &self.committed;
        let head = self.head.as_ref().map(|head| {
            json!({
                "offset": head.offset,
                "timestamp": head.written,
                "ageMs": self.age(now),
                "key": text::json_bytes(head.key.as_deref()),
                "retryCount": head.retry_count,
                "valueBytes": head.value_bytes,
            })
        });
        let finished = note.finished().iter();
        let finished = finished.map(|range| json!([range.start, range.end]));
        let (alone, deaths, ignored) = match note {
            Note::Read(remark) => (remark.alone, Some(&remark.deaths), None),
            Note::Strange(reason) => (None, None, Some(reason)),
            Note::Empty => (None, None, None),
        };
        json!({
            "group": group,
            "topic": topic,
            "partition": partition,
            "committed": offset,
            "start": self.start,
            "end": self.end,
            "lag": self.lag(),
            "state": self.state(),
            "head": head,
            "heldBack": self.held_back(),
            "finishedAbove": finished.collect::<Vec<_>>(),
            "runsAlone": alone,
            "deaths": deaths.map(|deaths| deaths.iter().map(|(offset, count)| json!({ "offset": offset, "deaths": count })).collect::<Vec<_>>()),
            "noteIgnored": ignored,
        })
    }
}

fn write(
    standings: &[Standing],
    owners: &HashMap<(&str, i32), &Member>,
    now: i64,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let mut table = Table::new([
        "TOPIC",
        "#PARTITION",
        "#COMMITTED",
        "#END",
        "#LAG",
        "#HEAD",
        "#AGE",
        "#HELD BACK",
        "STATE",
        "KEY OF HEAD",
        "OWNER",
    ]);
    let number = |number: Option<i64>| number.map_or_else(|| "-".into(), |it| it.to_string());
    for standing in standings {
        let committed = &standing.committed;
        let head = standing.head.as_ref();
        let key = head.and_then(|head| head.key.as_deref());
        table.row([
            committed.topic.clone(),
            committed.partition.to_string(),
            number(committed.offset),
            standing.end.to_string(),
            number(standing.lag()),
            number(head.map(|head| head.offset)),
            standing.age(now).map_or_else(|| "-".into(), time::age),
            standing.held_back().to_string(),
            standing.state().into(),
            key.map_or_else(|| "-".into(), |key| text::line(key, KEY)),
            owners
                .get(&standing.place())
                .map_or_else(|| "-".into(), |member| members::shown(member)),
        ]);
    }
    table.write(out)?;
    for standing in standings {
        let Committed {
            topic, partition, ..
        } = &standing.committed;
        match &standing.committed.note {
            Note::Strange(reason) => {
                let reason = text::line(reason.as_bytes(), 300);
                writeln!(
                    out,
                    "{topic}/{partition}: what stands beside the committed offset is ignored: {reason}"
                )?;
            }
            Note::Read(remark) => {
                for (offset, deaths) in &remark.deaths {
                    writeln!(
                        out,
                        "{topic}/{partition}: the process has died {deaths} times under the record at offset {offset}"
                    )?;
                }
            }
            Note::Empty => {}
        }
    }
    Ok(())
}
