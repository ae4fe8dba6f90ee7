//! A dead letter as a document of an index, and the template of such an index.
//!
//! Index and id come from the operator and from where the letter lies, never from what it says; what it says is cut.

use std::str::FromStr;

use reliable_consumer::{Story, Timestamp};
use serde_json::{Map, Value, json};

use crate::{
    letter::Letter,
    place::Place,
    text::{self, cut},
};

/// Bytes of a text by which letters are found and counted.
const TERM: usize = 512;
/// Bytes of an error's message, and of a header's value.
const MESSAGE: usize = 1_024;
/// Bytes of a record's value.
const VALUE: usize = 8_192;
/// Headers of a letter.
const HEADERS: usize = 64;
/// 2010, when there was no Kafka yet.
const OLDEST: i64 = 1_262_304_000_000;
const DAY: i64 = 86_400_000;

/// The name of an index, as servers allow it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexName(String);

impl IndexName {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// What makes the index so that what is in a letter can be counted.
    pub fn template(&self) -> Value {
        let mut template: Value =
            serde_json::from_str(include_str!("template.json")).expect("the template is JSON");
        template["index_patterns"] = json!([self.0]);
        template
    }
}

impl FromStr for IndexName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_.".contains(c);
        (name.len() <= 200 && !name.starts_with(['-', '_', '.']))
            .then_some(name)
            .filter(|name| !name.is_empty() && name.chars().all(fits))
            .map(|name| Self(name.to_owned()))
            .ok_or_else(|| {
                "expected lower-case letters, digits, - _ and ., beginning with a letter or a digit"
                    .into()
            })
    }
}

/// The same for the same letter, so that a repeat overwrites.
pub fn id(topic: &str, place: Place) -> String {
    format!("{topic}:{}:{}", place.partition, place.offset)
}

/// What `dlq export` tells of the letter but for what may change: whether it is done.
pub fn document(letter: &Letter<'_>, with_payload: bool, now: i64) -> Value {
    let Letter { record, story, .. } = letter;
    let place = letter.place();
    let time = |millis: i64| (OLDEST..now.saturating_add(DAY)).contains(&millis);
    let time = |millis: Option<i64>| millis.filter(|millis| time(*millis));
    let term = |text: &str| cut(text, TERM).to_owned();
    let error = story.map(|story| story.error);
    let origin = story.and_then(|story| story.origin).map(|origin| {
        json!({
            "topic": origin.topic,
            "partition": origin.partition,
            "offset": origin.offset,
            "timestamp": time(origin.timestamp),
        })
    });
    let mut document = json!({
        "@timestamp": time(letter.time()),
        "topic": record.topic(),
        "partition": place.partition,
        "offset": place.offset,
        "timestamp": time(record.timestamp().map(Timestamp::as_millis)),
        "dialect": story.map(|story| story.dialect.as_str()),
        "messageId": story.as_ref().and_then(Story::message_id).map(|id| term(&id)),
        "retryCount": story.map_or(0, |story| story.retry_count),
        "attempts": story.and_then(|story| story.attempts),
        "failedAt": time(story.and_then(|story| story.failed_at)),
        "group": story.and_then(|story| story.group).map(term),
        "origin": origin,
        "error": {
            "kind": term(letter.kind()),
            "class": error.and_then(|error| error.class).map(term),
            "message": letter.message().map(|message| cut(message, MESSAGE)),
        },
        "key": bytes(record.key(), TERM),
        "valueBytes": record.value().map(<[u8]>::len),
    });
    if with_payload {
        let headers = record.headers().iter().take(HEADERS).map(|header| {
            let name = match header.name() {
                Some(name) => json!(cut(name, TERM)),
                None => bytes(Some(header.name_bytes()), TERM),
            };
            json!({ "name": name, "value": bytes(header.value(), MESSAGE) })
        });
        document["headers"] = headers.collect();
        document["value"] = bytes(record.value(), VALUE);
    }
    without_nulls(document)
}

/// As `dlq export` writes bytes, cut.
fn bytes(bytes: Option<&[u8]>, limit: usize) -> Value {
    let Some(all) = bytes else {
        return Value::Null;
    };
    let kept = match str::from_utf8(all) {
        Ok(text) => cut(text, limit).as_bytes(),
        Err(_) => &all[..all.len().min(limit)],
    };
    // What begins with text and goes on otherwise must not look like text for its beginning.
    let mut value = match str::from_utf8(all) {
        Ok(_) => text::json_bytes(Some(kept)),
        Err(_) => json!({ "base64": text::base64(kept) }),
    };
    if kept.len() < all.len() {
        value["cut"] = json!(true);
    }
    value
}

fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let map = map.into_iter().filter(|(_, value)| !value.is_null());
            let map: Map<_, _> = map
                .map(|(name, value)| (name, without_nulls(value)))
                .collect();
            Value::Object(map)
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use reliable_consumer::{Message, Record};

    use super::*;

    fn of(record: &Record, with_payload: bool) -> Value {
        let letter = Letter {
            record,
            story: Story::of(record),
            done: false,
        };
        document(&letter, with_payload, 1_800_000_000_000)
    }

    #[test]
    fn an_index_has_a_name_that_reaches_nothing_else() {
        assert!("dead-letters_2026.11".parse::<IndexName>().is_ok());
        let long = "x".repeat(201);
        for wrong in [
            "", ".kibana", "_all", "-a", "A", "a*", "a,b", "a/b", "a b", "a?x", "ä", "..", &long,
        ] {
            assert!(wrong.parse::<IndexName>().is_err(), "{wrong}");
        }
    }

    // D4
    #[test]
    fn what_a_letter_claims_is_cut_and_times_that_cannot_be_are_left_out() {
        let huge = "é".repeat(100_000);
        let mut letter = Message::builder()
            .key(huge.as_bytes())
            .value(vec![0xff; 100_000])
            .header("originalTopic", "orders")
            .header("originalPartition", "0")
            .header("originalOffset", i64::MAX.to_string())
            .header("originalTimestamp", i64::MAX.to_string())
            .header("messageId", &*huge)
            .header("consumerGroup", &*huge)
            .header("errorKind", &*huge)
            .header("errorMessage", &*huge)
            .header("failedAt", i64::MAX.to_string());
        for n in 0..1_000 {
            letter = letter.header(format!("{n}{huge}"), &*huge);
        }
        let letter = letter.record();
        let document = of(&letter, true);
        assert!(document.to_string().len() < 300_000);
        assert_eq!(document["headers"].as_array().unwrap().len(), HEADERS);
        assert_eq!(document["value"]["cut"], true);
        assert_eq!(document["valueBytes"], 100_000);
        assert!(document["error"]["kind"].as_str().unwrap().len() <= TERM);
        for time in ["@timestamp", "failedAt"] {
            assert!(document.get(time).is_none(), "{time}");
        }
        assert!(document["origin"].get("timestamp").is_none());
        let without = of(&letter, false);
        assert!(without.get("value").is_none() && without.get("headers").is_none());
    }

    #[test]
    fn a_record_that_is_no_letter_is_counted_as_unknown() {
        let record = Message::builder().record();
        let document = of(&record, false);
        assert_eq!(document["error"]["kind"], "unknown");
        assert_eq!(document["retryCount"], 0);
    }

    /// All names of fields of a document, with those that are inside of others.
    fn names(value: &Value, prefix: &str, into: &mut Vec<String>) {
        for (name, value) in value.as_object().into_iter().flatten() {
            let name = format!("{prefix}{name}");
            names(value, &format!("{name}."), into);
            into.push(name);
        }
    }

    #[test]
    fn all_that_a_document_has_is_in_the_template() {
        let letter = Message::builder()
            .key(b"k")
            .value(b"v".as_slice())
            .timestamp_millis(1_700_000_000_000)
            .header("kafka_dlt-exception-fqcn", "java.io.IOException")
            .header("kafka_dlt-exception-message", "no route")
            .header("kafka_dlt-original-topic", "orders")
            .header("kafka_dlt-original-partition", 3_i32.to_be_bytes())
            .header("kafka_dlt-original-offset", 42_i64.to_be_bytes())
            .header("kafka_dlt-original-consumer-group", "g")
            .header("attempts", "3")
            .record();
        let mut found = Vec::new();
        names(&of(&letter, true), "", &mut found);
        assert!(found.len() > 15, "{found:?}");
        let template = "dead-letters".parse::<IndexName>().unwrap().template();
        for name in found {
            let path = name.replace('.', "/properties/");
            let path = format!("/template/mappings/properties/{path}");
            // What is not looked into has no fields.
            let outside = ["headers", "value"].map(|it| format!("{it}."));
            if outside.iter().any(|it| name.starts_with(it)) {
                continue;
            }
            assert!(template.pointer(&path).is_some(), "{name}");
        }
    }
}
