//! Who is in a group, and what each has: for `lag`.

use std::{collections::HashMap, io::Write};

use reliable_consumer::operate::Member;
use serde_json::{Value, json};

use crate::{arguments::Format, failure::Failure, table::Table, text};

/// Nothing on a line of a table is longer.
const NAME: usize = 60;

/// The member that a partition is assigned to, by topic and partition.
pub fn owners(members: &[Member]) -> HashMap<(&str, i32), &Member> {
    let mut owners = HashMap::new();
    for member in members {
        for (topic, partition) in &member.partitions {
            owners.insert((topic.as_str(), *partition), member);
        }
    }
    owners
}

/// `client-id@host`.
pub fn shown(member: &Member) -> String {
    text::line(
        format!("{}@{}", member.client_id, host(member)).as_bytes(),
        NAME,
    )
}

pub fn json(member: &Member) -> Value {
    json!({
        "clientId": member.client_id,
        "host": host(member),
        "instanceId": member.instance,
    })
}

/// Brokers show an address as Java does, behind a slash.
fn host(member: &Member) -> &str {
    member.host.trim_start_matches('/')
}

pub fn tell(
    group: &str,
    mut members: Vec<Member>,
    format: Format,
    out: &mut impl Write,
) -> Result<(), Failure> {
    members.sort_by(|a, b| (&a.client_id, &a.host).cmp(&(&b.client_id, &b.host)));
    let mut table = Table::new(["CLIENT", "HOST", "INSTANCE", "#PARTITIONS", "ASSIGNED"]);
    for member in &members {
        if format == Format::Json {
            let mut value = json(member);
            let partitions = member.partitions.iter();
            let partitions = partitions
                .map(|(topic, partition)| json!({ "topic": topic, "partition": partition }));
            value["group"] = group.into();
            value["partitions"] = partitions.collect();
            writeln!(out, "{}", text::json_line(&value))?;
            continue;
        }
        let cell = |text: &str| text::line(text.as_bytes(), NAME);
        table.row([
            cell(&member.client_id),
            cell(host(member)),
            member.instance.as_deref().map_or_else(|| "-".into(), cell),
            member.partitions.len().to_string(),
            assigned(member),
        ]);
    }
    match format {
        Format::Json => {}
        Format::Table if table.is_empty() => writeln!(out, "Nobody is in group {group} now.")?,
        Format::Table => table.write(out)?,
    }
    Ok(())
}

/// `orders 0-3,7; refunds 1`.
fn assigned(member: &Member) -> String {
    let mut places: Vec<_> = member.partitions.iter().collect();
    places.sort_unstable();
    let mut shown = String::new();
    for topic in places.chunk_by(|a, b| a.0 == b.0) {
        let ranges = topic.chunk_by(|a, b| a.1 + 1 == b.1);
        let ranges = ranges.map(|range| match range {
            [first, .., last] => format!("{}-{}", first.1, last.1),
            _ => range[0].1.to_string(),
        });
        let separator = if shown.is_empty() { "" } else { "; " };
        let ranges: Vec<_> = ranges.collect();
        shown += &format!("{separator}{} {}", topic[0].0, ranges.join(","));
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_member_has_is_told_by_topic_and_in_ranges() {
        let place = |(topic, partition): (&str, i32)| (topic.to_owned(), partition);
        let places = [("b", 1), ("a", 7), ("a", 0), ("a", 2), ("a", 1)];
        let member = Member {
            client_id: "c".into(),
            host: "/127.0.0.1".into(),
            id: String::new(),
            instance: None,
            partitions: places.map(place).into(),
            target: None,
        };
        assert_eq!(assigned(&member), "a 0-2,7; b 1");
        assert_eq!(shown(&member), "c@127.0.0.1");
    }
}
