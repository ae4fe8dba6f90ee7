//! A dead letter as it is shown, for people and for scripts.

use std::borrow::Cow;

use reliable_consumer::{Record, Story, Timestamp, header_names};
use serde_json::{Map, Value, json};

use crate::{place::Place, text};

/// Nothing on a line of a table is longer.
const LONGEST_CELL: usize = 60;

pub struct Letter<'a> {
    pub record: &'a Record,
    pub story: Option<Story<'a>>,
    /// The redriver's group is done with it.
    pub done: bool,
}

impl<'a> Letter<'a> {
    pub fn place(&self) -> Place {
        Place {
            partition: self.record.partition(),
            offset: self.record.offset(),
        }
    }

    /// When it failed or, where that is not told, when it was written.
    pub fn time(&self) -> Option<i64> {
        let told = self.story.and_then(|story| story.failed_at);
        told.or_else(|| self.record.timestamp().map(Timestamp::as_millis))
    }

    /// Why it was given up, in a word.
    pub fn kind(&self) -> &'a str {
        let Some(error) = self.story.map(|story| story.error) else {
            return "unknown";
        };
        match (error.kind, error.class) {
            (Some(kind), _) => kind.as_str(),
            (None, Some(class)) => class,
            (None, None) => {
                let told = self.record.headers().get_str(header_names::ERROR_KIND);
                told.unwrap_or("unknown")
            }
        }
    }

    pub fn message(&self) -> Option<&'a str> {
        self.story.and_then(|story| story.error.message)
    }

    /// Why it is in a parking lot, in a word.
    pub fn park_reason(&self) -> Option<&'a str> {
        self.record.headers().get_str(header_names::PARK_REASON)
    }

    pub fn row(&self) -> [String; 7] {
        let story = self.story;
        let cell = |bytes: &[u8]| text::line(bytes, LONGEST_CELL);
        let class = |name: &str| match name.rsplit_once(['.', '$']) {
            Some((_, class)) if !class.is_empty() => cell(class.as_bytes()),
            _ => cell(name.as_bytes()),
        };
        let origin = story.and_then(|story| story.origin);
        [
            self.time().map_or_else(|| "-".into(), crate::time::shown),
            self.place().to_string(),
            origin.map_or_else(
                || "-".into(),
                |origin| format!("{} {}@{}", origin.topic, origin.partition, origin.offset),
            ),
            class(self.kind()),
            story.map_or(0, |story| story.retry_count).to_string(),
            self.record.key().map_or_else(|| "-".into(), cell),
            // Where the line ends, the terminal's width decides.
            text::line(self.told().as_bytes(), 4 * LONGEST_CELL),
        ]
    }

    /// The message, behind the reason why the letter is parked.
    fn told(&self) -> Cow<'a, str> {
        match (self.park_reason(), self.message().unwrap_or_default()) {
            (None, message) => message.into(),
            (Some(reason), "") => format!("parked: {reason}").into(),
            (Some(reason), message) => format!("parked: {reason}; {message}").into(),
        }
    }

    /// Everything but headers and value.
    pub fn summary(&self) -> Map<String, Value> {
        let Self {
            record,
            story,
            done,
        } = self;
        let error = story.map(|story| story.error);
        let origin = story.and_then(|story| story.origin).map(|origin| {
            json!({
                "topic": origin.topic,
                "partition": origin.partition,
                "offset": origin.offset,
                "timestamp": origin.timestamp,
            })
        });
        let value = json!({
            "topic": record.topic(),
            "partition": record.partition(),
            "offset": record.offset(),
            "timestamp": record.timestamp().map(Timestamp::as_millis),
            "done": done,
            "dialect": story.map(|story| story.dialect.as_str()),
            "messageId": story.and_then(|story| story.message_id()),
            "retryCount": story.map(|story| story.retry_count),
            "attempts": story.and_then(|story| story.attempts),
            "failedAt": story.and_then(|story| story.failed_at),
            "group": story.and_then(|story| story.group),
            "origin": origin,
            "error": story.map(|_| json!({
                "kind": self.kind(),
                "class": error.and_then(|error| error.class),
                "message": self.message(),
            })),
            "parkReason": self.park_reason(),
            "key": text::json_bytes(record.key()),
            "valueBytes": record.value().map(<[u8]>::len),
        });
        match value {
            Value::Object(map) => map,
            _ => Map::new(),
        }
    }

    pub fn whole(&self) -> Value {
        let mut all = self.summary();
        let headers = self.record.headers().iter().map(|header| {
            let name = match header.name() {
                Some(name) => json!(name),
                None => text::json_bytes(Some(header.name_bytes())),
            };
            json!({ "name": name, "value": text::json_bytes(header.value()) })
        });
        all.insert("headers".into(), headers.collect());
        all.insert("value".into(), text::json_bytes(self.record.value()));
        Value::Object(all)
    }
}
