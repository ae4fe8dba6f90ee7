//! `topics create-dlq`: what a topic's dead letters need, set so that none is lost.

use std::{collections::BTreeMap, io::Write};

use reliable_consumer::operate::{Administrator, Cluster, InspectError, Planned};
use serde_json::json;
use tokio::runtime;

use crate::{
    arguments::{Connection, CreateDlq, Format, Topics},
    failure::Failure,
    table::Table,
    text,
};

/// What a letter may be larger than its record: our headers, those of a neighbour, and a message in each.
const ROOM_FOR_HEADERS: i64 = 64 << 10;
/// Kafka's own `max.message.bytes`.
const DEFAULT_LARGEST: i64 = 1_048_588;
const FOR_EVER: &str = "-1";

pub fn run(
    command: &Topics,
    connection: &Connection,
    format: Format,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let Topics::CreateDlq(create) = command;
    let cluster = connection.cluster("reliable-consumer")?;
    let administrator = cluster.administrator()?;
    let runtime = runtime::Builder::new_current_thread()
        .enable_time()
        .build()?;
    runtime.block_on(create.run(&cluster, &administrator, format, out))
}

enum Outcome {
    Created,
    WouldBeCreated,
    /// And what is unsafe about it.
    Exists(Vec<String>),
    Failed(InspectError),
}

impl CreateDlq {
    async fn run(
        &self,
        cluster: &Cluster,
        administrator: &Administrator,
        format: Format,
        out: &mut impl Write,
    ) -> Result<(), Failure> {
        let plan = self.plan(cluster, administrator).await?;
        let mut outcomes = Vec::with_capacity(plan.len());
        for topic in &plan {
            outcomes.push(match cluster.find(&topic.name)? {
                Some(_) => {
                    let settings = administrator.settings(&topic.name).await?;
                    Outcome::Exists(dangers(&topic.settings, &settings))
                }
                None => match administrator.create(topic, true).await {
                    Ok(true) => Outcome::WouldBeCreated,
                    Ok(false) => made_meanwhile(administrator, topic).await,
                    Err(error) => Outcome::Failed(error),
                },
            });
        }
        // All, or none: half of them would look like all.
        let refused = outcomes.iter().any(|it| matches!(it, Outcome::Failed(_)));
        if !self.dry_run && !refused {
            for (topic, outcome) in plan.iter().zip(&mut outcomes) {
                if let Outcome::WouldBeCreated = outcome {
                    *outcome = match administrator.create(topic, false).await {
                        Ok(true) => Outcome::Created,
                        Ok(false) => made_meanwhile(administrator, topic).await,
                        Err(error) => Outcome::Failed(error),
                    };
                }
            }
        }
        let outcomes: Vec<_> = plan.iter().zip(outcomes).collect();
        match format {
            Format::Json => write_json(&outcomes, out)?,
            Format::Table => write_table(&outcomes, out)?,
        }
        if plan.iter().any(|topic| topic.replication < 3) {
            eprintln!(
                "With fewer than three replicas, letters are lost when a broker is: this cluster has too few brokers, or \
                 --replication says so"
            );
        }
        let failed = outcomes
            .iter()
            .filter(|(_, it)| matches!(it, Outcome::Failed(_)));
        match failed.count() {
            0 => Ok(()),
            _ if refused => Err(Failure::Refused("nothing was made: see above".into())),
            failed => Err(Failure::InPart(format!(
                "{failed} of {} topics could not be made",
                plan.len()
            ))),
        }
    }

    async fn plan(
        &self,
        cluster: &Cluster,
        administrator: &Administrator,
    ) -> Result<Vec<Planned>, Failure> {
        let topic = &self.topic;
        let partitions = cluster.partitions(topic)?;
        let source = administrator.settings(topic).await.unwrap_or_default();
        let number = |name: &str| source.get(name).and_then(|value| value.parse::<i64>().ok());
        let largest = number("max.message.bytes").unwrap_or(DEFAULT_LARGEST);
        let largest = largest
            .saturating_add(ROOM_FOR_HEADERS)
            .min(i64::from(i32::MAX));
        let brokers = i32::try_from(cluster.brokers()?).unwrap_or(i32::MAX);
        let replication = self.replication.unwrap_or_else(|| brokers.clamp(1, 3));
        let planned = |name: String, retention: String| Planned {
            name,
            partitions: self.partitions.unwrap_or(partitions),
            replication,
            settings: BTreeMap::from(
                [
                    ("cleanup.policy", "delete".to_owned()),
                    ("retention.ms", retention),
                    // A bound in bytes would cut off letters, whatever their age.
                    ("retention.bytes", FOR_EVER.into()),
                    ("min.insync.replicas", (replication - 1).max(1).to_string()),
                    ("unclean.leader.election.enable", "false".into()),
                    ("max.message.bytes", largest.to_string()),
                ]
                .map(|(name, value)| (name.to_owned(), value)),
            ),
        };
        let kept = match self.retention {
            Some(time) => time.as_millis().to_string(),
            None => FOR_EVER.into(),
        };
        let dlq = self.dlq.clone().unwrap_or_else(|| format!("{topic}.dlq"));
        let parking_lot = self.parking_lot.clone();
        let parking_lot = parking_lot.unwrap_or_else(|| format!("{dlq}.parked"));
        let tiers = self
            .tiers
            .iter()
            .map(|tier| format!("{topic}.retry.{tier}"));
        let mut plan = vec![planned(dlq, kept.clone()), planned(parking_lot, kept)];
        plan.extend(tiers.map(|tier| planned(tier, self.tier_retention.as_millis().to_string())));
        let mut names: Vec<_> = plan
            .iter()
            .map(|it| it.name.as_str())
            .chain([&**topic])
            .collect();
        names.sort_unstable();
        if names.windows(2).any(|pair| pair[0] == pair[1]) {
            let message = "the topic, its dead-letter topic, its parking lot and its tiers have to be different topics";
            return Err(Failure::Usage(message.into()));
        }
        Ok(plan)
    }
}

/// A topic that was not there a moment ago, and is not known to all brokers yet.
async fn made_meanwhile(administrator: &Administrator, topic: &Planned) -> Outcome {
    Outcome::Exists(match administrator.settings(&topic.name).await {
        Ok(settings) => dangers(&topic.settings, &settings),
        Err(error) => vec![format!(
            "it is new, and how it is set is not known: {error}"
        )],
    })
}

/// By which letters of a topic that exists can be lost.
fn dangers(wanted: &BTreeMap<String, String>, is: &BTreeMap<String, String>) -> Vec<String> {
    let number = |settings: &BTreeMap<String, String>, name: &str| {
        let number = settings.get(name)?.parse::<i64>().ok()?;
        // -1 stands for no bound.
        Some(if number < 0 { i64::MAX } else { number })
    };
    let differs = |name: &&str| match *name {
        "cleanup.policy" => is.get(*name).is_some_and(|it| it.contains("compact")),
        "unclean.leader.election.enable" => is.get(*name).is_some_and(|it| it == "true"),
        name => number(is, name) < number(wanted, name),
    };
    let names = wanted.keys().map(String::as_str).filter(differs);
    names
        .map(|name| {
            let value = is.get(name).map_or("not told", String::as_str);
            format!("{name} is {value}, safe would be {}", wanted[name])
        })
        .collect()
}

impl Outcome {
    fn word(&self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::WouldBeCreated => "would be created",
            Self::Exists(_) => "exists",
            Self::Failed(_) => "failed",
        }
    }

    fn remarks(&self) -> Vec<String> {
        match self {
            Self::Created | Self::WouldBeCreated => Vec::new(),
            Self::Exists(dangers) => dangers.clone(),
            Self::Failed(error) => vec![error.to_string()],
        }
    }
}

fn write_json(outcomes: &[(&Planned, Outcome)], out: &mut impl Write) -> Result<(), Failure> {
    for (topic, outcome) in outcomes {
        let value = json!({
            "topic": topic.name,
            "outcome": outcome.word(),
            "remarks": outcome.remarks(),
            "partitions": topic.partitions,
            "replication": topic.replication,
            "settings": topic.settings,
        });
        writeln!(out, "{}", text::json_line(&value))?;
    }
    Ok(())
}

fn write_table(outcomes: &[(&Planned, Outcome)], out: &mut impl Write) -> Result<(), Failure> {
    let mut table = Table::new(["TOPIC", "OUTCOME", "#PARTITIONS", "#REPLICAS", "SETTINGS"]);
    for (topic, outcome) in outcomes {
        let shown = text::line(topic.name.as_bytes(), 250);
        if let Outcome::Exists(_) = outcome {
            table.row([
                shown,
                outcome.word().into(),
                "".into(),
                "".into(),
                "left as they are".into(),
            ]);
            continue;
        }
        let settings = topic
            .settings
            .iter()
            .map(|(name, value)| format!("{name}={value}"));
        table.row([
            shown,
            outcome.word().into(),
            topic.partitions.to_string(),
            topic.replication.to_string(),
            settings.collect::<Vec<_>>().join(" "),
        ]);
    }
    table.write(out)?;
    for (topic, outcome) in outcomes {
        for remark in outcome.remarks() {
            writeln!(
                out,
                "{}: {}",
                topic.name,
                text::line(remark.as_bytes(), 500)
            )?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_unsafe_about_a_topic_that_exists_is_named() {
        let settings = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            let owned = |(name, value): &(&str, &str)| (name.to_string(), value.to_string());
            pairs.iter().map(owned).collect()
        };
        let safe = settings(&[
            ("cleanup.policy", "delete"),
            ("retention.ms", "-1"),
            ("min.insync.replicas", "2"),
            ("unclean.leader.election.enable", "false"),
            ("max.message.bytes", "100"),
        ]);
        assert_eq!(dangers(&safe, &safe), [""; 0]);
        let mut other = safe.clone();
        other.extend(settings(&[
            ("cleanup.policy", "compact,delete"),
            ("retention.ms", "1000"),
            ("min.insync.replicas", "1"),
            ("unclean.leader.election.enable", "true"),
            ("max.message.bytes", "500"),
        ]));
        let found = dangers(&safe, &other);
        assert_eq!(found.len(), 4, "{found:?}");
        assert!(
            found
                .iter()
                .any(|it| it == "min.insync.replicas is 1, safe would be 2")
        );
    }
}
