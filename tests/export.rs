//! Real broker, real OpenSearch: dead letters in an index, whatever happens on the way.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;
#[path = "common/program.rs"]
mod program;

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread::{self, JoinHandle},
};

use common::{PATIENCE, committed};
use program::{Ended, program};
use reliable_consumer_testing::{
    Cluster, Record, Service, ServiceKind, cluster, eventually, own_service, service, unique,
};
use serde_json::{Value, json};
use ureq::http::{Method, Request, StatusCode};

const HOUR: i64 = 3_600_000;
/// The beginning of an hour.
const NOON: i64 = 1_700_049_600_000;

fn export(cluster: &Cluster, dlq: &str, url: &str, more: &str) -> Command {
    let mut command = program(&format!("dlq export {dlq} --elasticsearch {url} {more}"));
    command.args(["--brokers", cluster.brokers()]);
    command
}

fn exported(cluster: &Cluster, dlq: &str, url: &str, more: &str) -> Ended {
    export(cluster, dlq, url, more).into()
}

/// A program that goes on, with what it has said so far.
struct Running {
    child: Child,
    said: Arc<Mutex<String>>,
    reading: Option<JoinHandle<()>>,
}

impl Running {
    fn start(mut command: Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let said = Arc::<Mutex<String>>::default();
        let into = Arc::clone(&said);
        let reading = thread::spawn(move || {
            for line in stderr.lines() {
                let mut said = into.lock().unwrap();
                said.push_str(&line.unwrap());
                said.push('\n');
            }
        });
        Self {
            child,
            said,
            reading: Some(reading),
        }
    }

    fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    #[track_caller]
    fn says(&self, words: &str) {
        eventually(words, PATIENCE, || self.said().contains(words));
    }

    /// As a service is ended.
    fn terminate(mut self) -> (Option<i32>, String) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").arg(&pid).status().unwrap().success());
        eventually("it to end", PATIENCE, || {
            self.child.try_wait().unwrap().is_some()
        });
        let code = self.child.wait().unwrap().code();
        self.reading.take().unwrap().join().unwrap();
        (code, self.said())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn opensearch() -> Option<&'static Service> {
    service(ServiceKind::OpenSearch)
}

/// What the server answers.
fn ask(method: Method, url: &str, body: Option<Value>) -> (StatusCode, Value) {
    let config = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .allow_non_standard_methods(true)
        .build();
    let request = Request::builder()
        .method(method)
        .uri(url)
        .header("content-type", "application/json");
    let body = body.map(|it| it.to_string()).unwrap_or_default();
    let agent = ureq::Agent::from(config);
    let mut answer = match body.is_empty() {
        true => agent.run(request.body(()).unwrap()).unwrap(),
        false => agent.run(request.body(body).unwrap()).unwrap(),
    };
    let text = answer.body_mut().read_to_string().unwrap();
    let value = serde_json::from_str(&text).unwrap_or(Value::Null);
    (answer.status(), value)
}

/// Documents that the index holds now.
fn count(url: &str, index: &str) -> u64 {
    ask(Method::POST, &format!("{url}/{index}/_refresh"), None);
    let (_, answer) = ask(Method::GET, &format!("{url}/{index}/_count"), None);
    answer["count"].as_u64().unwrap_or(0)
}

/// The counts of an aggregation, by value.
fn counts(url: &str, index: &str, aggregation: Value) -> Vec<(String, u64)> {
    let query = json!({ "size": 0, "aggs": { "it": aggregation } });
    let (_, answer) = ask(Method::POST, &format!("{url}/{index}/_search"), Some(query));
    let buckets = answer["aggregations"]["it"]["buckets"].as_array();
    let mut counts: Vec<_> = buckets
        .unwrap_or_else(|| panic!("{answer}"))
        .iter()
        .map(|bucket| {
            let name = match &bucket["key"] {
                Value::String(name) => name.clone(),
                other => other.to_string(),
            };
            (name, bucket["doc_count"].as_u64().unwrap())
        })
        .collect();
    counts.sort_unstable();
    counts
}

fn terms(field: &str) -> Value {
    json!({ "terms": { "field": field, "size": 100 } })
}

/// A letter of this library, the `n`th: of `orders` or `refunds`, for one of three kinds, within three hours.
fn letter(n: usize) -> Record {
    let topic = ["orders", "refunds"][n % 2];
    let kind = ["timeout", "permanent", "panic"][n % 3];
    let failed_at = NOON + (n % 3) as i64 * HOUR + n as i64;
    Record::value(format!(r#"{{"order":{n}}}"#))
        .key(format!("k{n}"))
        .timestamp(failed_at)
        .header("retryCount", (n % 5).to_string())
        .header("originalTopic", topic)
        .header("originalPartition", "3")
        .header("originalOffset", n.to_string())
        .header("originalTimestamp", "1700000000000")
        .header("messageId", n.to_string())
        .header("consumerGroup", "billing")
        .header("errorKind", kind)
        .header("errorMessage", format!("no route to host {n}"))
        .header("failedAt", failed_at.to_string())
}

fn dlq(cluster: &Cluster, partitions: i32, letters: usize) -> String {
    let configs = [("retention.ms", "-1")];
    let dlq = cluster.create_topic("orders.dlq", partitions, &configs);
    let letters = (0..letters).map(|n| letter(n).partition(n as i32 % partitions));
    cluster.produce(&dlq, letters);
    dlq
}

#[test]
fn the_index_has_each_letter_once_and_counts_them_by_topic_kind_hour_and_redrives() {
    let (Some(cluster), Some(server)) = (cluster(), opensearch()) else {
        return;
    };
    let (url, index) = (server.url(), unique("letters"));
    let dlq = dlq(&cluster, 2, 60);
    // What is done was a failure too.
    cluster.commit(&format!("{dlq}.redriver"), &dlq, 0, 10, "");
    let more = format!("--index {index}");

    let dry = exported(&cluster, &dlq, url, &format!("{more} --dry-run"));
    dry.with(0, "60 letters would be exported");
    let (status, _) = ask(Method::HEAD, &format!("{url}/{index}"), None);
    assert_eq!(status, StatusCode::NOT_FOUND);

    let check = || {
        assert_eq!(count(url, &index), 60);
        let counted = |aggregation| counts(url, &index, aggregation);
        let expected = |pairs: &[(&str, u64)]| -> Vec<(String, u64)> {
            let pairs = pairs.iter();
            pairs.map(|(name, n)| ((*name).to_owned(), *n)).collect()
        };
        let by_topic = counted(terms("origin.topic"));
        assert_eq!(by_topic, expected(&[("orders", 30), ("refunds", 30)]));
        let by_kind = counted(terms("error.kind"));
        let kinds = [("panic", 20), ("permanent", 20), ("timeout", 20)];
        assert_eq!(by_kind, expected(&kinds));
        let hours = [0, 1, 2].map(|hour| ((NOON + hour * HOUR).to_string(), 20));
        let hourly = json!({ "field": "@timestamp", "fixed_interval": "1h" });
        let by_hour = counted(json!({ "date_histogram": hourly }));
        assert_eq!(by_hour, hours);
        let by_redrives = counted(terms("retryCount"));
        let twelve = [("0", 12), ("1", 12), ("2", 12), ("3", 12), ("4", 12)];
        assert_eq!(by_redrives, expected(&twelve));
    };
    exported(&cluster, &dlq, url, &more).with(0, "60 letters exported");
    check();
    exported(&cluster, &dlq, url, &more).with(0, "0 letters exported");
    let again = exported(&cluster, &dlq, url, &format!("{more} --from-start"));
    again.with(0, "60 letters exported");
    check();
    let (_, document) = ask(Method::GET, &format!("{url}/{index}/_doc/{dlq}:1:3"), None);
    assert_eq!(document["_version"], 2);
    let source = &document["_source"];
    assert_eq!(source["messageId"], "7");
    assert_eq!(source["error"]["message"], "no route to host 7");
    // Only when asked for: it may be anybody's data.
    assert_eq!(source.get("value"), None);
    assert_eq!(source.get("headers"), None);

    // Some of them, with what was in them, elsewhere; and nothing is noted for them.
    let (index, group) = (unique("letters"), unique("group"));
    let some = format!("--index {index} --kind panic --payload");
    exported(&cluster, &dlq, url, &some).with(0, "20 letters exported");
    exported(&cluster, &dlq, url, &some).with(0, "20 letters exported");
    let named = format!("{some} --group {group}");
    exported(&cluster, &dlq, url, &named).with(0, "20 letters exported");
    exported(&cluster, &dlq, url, &named).with(0, "0 letters exported");
    assert_eq!(count(url, &index), 20);
    let (_, document) = ask(Method::GET, &format!("{url}/{index}/_doc/{dlq}:0:1"), None);
    assert_eq!(document["_source"]["value"]["text"], r#"{"order":2}"#);

    // An index that has gone is written anew, whatever was noted.
    ask(Method::DELETE, &format!("{url}/{index}"), None);
    exported(&cluster, &dlq, url, &named).with(0, "20 letters exported");
    assert_eq!(count(url, &index), 20);
}

#[test]
fn what_a_killed_export_has_not_written_the_next_one_writes_and_nothing_is_there_twice() {
    let (Some(cluster), Some(server)) = (cluster(), opensearch()) else {
        return;
    };
    const LETTERS: usize = 30_000;
    let (url, index) = (server.url(), unique("letters"));
    let dlq = dlq(&cluster, 3, LETTERS);
    let (more, group) = (format!("--index {index}"), format!("{dlq}.export.{index}"));
    let noted = || {
        let positions = committed(&cluster, &group, &dlq);
        positions.iter().map(|it| (*it).max(0) as u64).sum::<u64>()
    };
    let running = Running::start(export(&cluster, &dlq, url, &more));
    eventually("a position", PATIENCE, || noted() > 0);
    drop(running);
    let (noted, written) = (noted(), count(url, &index));
    assert!(noted <= written, "{noted} are noted, {written} written");
    assert!(noted < LETTERS as u64, "it was killed too late");

    let rest = LETTERS as u64 - noted;
    exported(&cluster, &dlq, url, &more).with(0, &format!("{rest} letters exported"));
    assert_eq!(count(url, &index), LETTERS as u64);
}

#[test]
fn a_followed_topic_is_written_as_it_grows_and_a_server_that_dies_is_waited_for() {
    let (Some(cluster), Some(mut server)) = (cluster(), own_service(ServiceKind::OpenSearch))
    else {
        return;
    };
    let (url, index) = (server.url().to_owned(), unique("letters"));
    let dlq = dlq(&cluster, 1, 5);
    let group = format!("{dlq}.export.{index}");
    let more = format!("--index {index} --follow");
    let running = Running::start(export(&cluster, &dlq, &url, &more));
    eventually("what is there", PATIENCE, || count(&url, &index) == 5);
    cluster.produce(&dlq, [letter(5)]);
    eventually("a new letter", PATIENCE, || count(&url, &index) == 6);

    server.stop();
    cluster.produce(&dlq, (6..20).map(letter));
    running.says(&format!("waiting for {url}"));
    cluster.add_partitions(&dlq, 2);
    cluster.produce(&dlq, [letter(20).partition(1)]);
    // Meanwhile somebody without patience.
    let hasty = format!("--index {index} --group {} --wait 300ms", unique("hasty"));
    exported(&cluster, &dlq, &url, &hasty).with(1, "in vain");
    server.start();
    eventually("what came meanwhile", PATIENCE, || {
        count(&url, &index) == 21
    });
    running.says("is back after");

    let (code, said) = running.terminate();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("21 letters exported"), "{said}");
    assert_eq!(committed(&cluster, &group, &dlq), [20, 1]);
}

#[test]
fn a_letter_that_does_not_fit_the_index_is_named_and_holds_up_no_other() {
    let (Some(cluster), Some(server)) = (cluster(), opensearch()) else {
        return;
    };
    let (url, index) = (server.url(), unique("letters"));
    let mapping = json!({ "mappings": { "properties": { "messageId": { "type": "long" } } } });
    let (status, _) = ask(Method::PUT, &format!("{url}/{index}"), Some(mapping));
    assert_eq!(status, StatusCode::OK);
    let dlq = dlq(&cluster, 1, 3);
    let strange = Record::value("x")
        .header("messageId", "no number\u{1b}[2J")
        .header("failedAt", NOON.to_string())
        .header("errorKind", "panic");
    cluster.produce(&dlq, [strange, letter(4)]);
    let more = format!("--index {index}");
    let ended = exported(&cluster, &dlq, url, &more);
    let ended = ended.with(5, &format!("{dlq}/0@3 is refused: "));
    assert!(ended.err.contains("4 letters exported"), "{}", ended.err);
    assert!(!ended.err.contains('\u{1b}'), "{}", ended.err);
    assert_eq!(count(url, &index), 4);
    exported(&cluster, &dlq, url, &more).with(0, "0 letters exported");
}

#[test]
fn an_index_that_takes_nothing_ends_the_run_and_nothing_is_passed_over() {
    let (Some(cluster), Some(server)) = (cluster(), opensearch()) else {
        return;
    };
    let (url, index) = (server.url(), unique("letters"));
    let blocked = json!({ "settings": { "index.blocks.write": true } });
    ask(Method::PUT, &format!("{url}/{index}"), Some(blocked));
    let dlq = dlq(&cluster, 1, 3);
    let more = format!("--index {index}");
    exported(&cluster, &dlq, url, &more).with(1, "nothing was passed over");
    let settings = json!({ "index.blocks.write": false });
    ask(
        Method::PUT,
        &format!("{url}/{index}/_settings"),
        Some(settings),
    );
    exported(&cluster, &dlq, url, &more).with(0, "3 letters exported");
}

/// A server that gives these answers, one a connection, and what it was asked.
fn scripted(
    answers: impl IntoIterator<Item = (u16, Value)> + Send + 'static,
) -> (String, JoinHandle<Vec<(String, String)>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let serving = thread::spawn(move || {
        let answers = answers.into_iter();
        let asked = answers.map(|(status, answer)| {
            let (mut stream, _) = listener.accept().unwrap();
            let asked = request(&mut stream);
            let answer = answer.to_string();
            let length = answer.len();
            write!(
                stream,
                "HTTP/1.1 {status} x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{}",
                if asked.0.starts_with("HEAD") {
                    ""
                } else {
                    &answer
                }
            )
            .unwrap();
            asked
        });
        asked.collect()
    });
    (url, serving)
}

/// Head and body.
fn request(stream: &mut TcpStream) -> (String, String) {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length")
            .then(|| value.trim().parse::<usize>().unwrap())
    });
    let mut body = vec![0; length.unwrap_or(0)];
    stream.read_exact(&mut body).unwrap();
    (head, String::from_utf8(body).unwrap())
}

#[test]
fn of_a_batch_that_is_too_much_only_what_was_not_taken_is_sent_again() {
    let Some(cluster) = cluster() else { return };
    let dlq = dlq(&cluster, 1, 4);
    let taken = || json!({ "index": { "status": 201 } });
    let busy = |status| {
        let error = json!({ "type": "rejected", "reason": "too much to do" });
        json!({ "index": { "status": status, "error": error } })
    };
    let (url, serving) = scripted([
        (200, Value::Null),
        (503, json!({})),
        (413, json!({})),
        (200, json!({ "items": [taken(), busy(429)] })),
        (200, json!({ "items": [taken()] })),
        (200, json!({ "items": [busy(503), taken()] })),
        (200, json!({ "items": [taken()] })),
    ]);
    exported(&cluster, &dlq, &url, "").with(0, "4 letters exported");
    let asked = serving.join().unwrap();
    let ids = asked.iter().map(|(_, body)| {
        let actions = body.lines().step_by(2);
        let offsets = actions.map(|action| {
            let action: Value = serde_json::from_str(action).unwrap();
            let id = action["index"]["_id"].as_str().unwrap();
            id.rsplit(':').next().unwrap().parse::<i64>().unwrap()
        });
        offsets.collect::<Vec<_>>()
    });
    let ids: Vec<_> = ids.collect();
    let (none, all) = (vec![], vec![0, 1, 2, 3]);
    // The two halves after the whole was too large, in either order.
    let sent = [
        none,
        all.clone(),
        all,
        vec![0, 1],
        vec![1],
        vec![2, 3],
        vec![2],
    ];
    assert_eq!(ids, sent);
}

#[test]
fn secrets_go_to_the_server_only() {
    let Some(cluster) = cluster() else { return };
    let dlq = dlq(&cluster, 1, 1);
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(unique("credentials"));
    let secret = "hunter2";
    // What the server should be told: for `eve:hunter2`.
    for (written, header) in [
        ("api-key=hunter2", "authorization: ApiKey hunter2"),
        (
            "user=eve\npassword=hunter2",
            "authorization: Basic ZXZlOmh1bnRlcjI=",
        ),
    ] {
        fs::write(&path, written).unwrap();
        let from_file = format!("--credentials {}", path.display());
        let by_variables = match written.split_once('\n') {
            None => vec![("ELASTICSEARCH_API_KEY", secret)],
            Some(_) => vec![
                ("ELASTICSEARCH_USER", "eve"),
                ("ELASTICSEARCH_PASSWORD", secret),
            ],
        };
        let refusal = || (401, json!({ "error": { "reason": "no" } }));
        let (url, serving) = scripted([refusal(), refusal()]);
        let file = exported(&cluster, &dlq, &url, &from_file);
        let mut command = export(&cluster, &dlq, &url, "");
        command.envs(by_variables);
        let variables = Ended::from(command);
        for ended in [file, variables] {
            let ended = ended.with(1, "401");
            assert!(!format!("{}{}", ended.out, ended.err).contains(secret));
        }
        for (head, _) in serving.join().unwrap() {
            assert!(head.contains(header), "{head}");
        }
    }
    fs::write(&path, "passwort=hunter2").unwrap();
    let wrong_file = format!("--credentials {}", path.display());
    for (url, more) in [
        ("http://eve:hunter2@127.0.0.1:1", ""),
        ("hunter2", ""),
        ("http://127.0.0.1:1", &*wrong_file),
    ] {
        let ended = exported(&cluster, &dlq, url, more).with(2, "expected");
        assert!(!ended.err.contains(secret), "{}", ended.err);
    }
}

/// All that stands in quotes after this, on any line.
fn quoted_after<'a>(text: &'a str, before: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(before)
        .skip(1)
        .filter_map(|rest| rest.split('"').next())
}

// Without a Docker engine nothing of `analytics/` runs here. What can be checked is that it speaks of the fields there are.
#[test]
fn dashboard_and_pipeline_speak_of_the_fields_that_the_template_has() {
    let printed = Ended::from(program("dlq export any --print-template"));
    let template: Value = serde_json::from_str(&printed.out).unwrap();
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("analytics");
    let file = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
    let kept: Value = serde_json::from_str(&file("template.json")).unwrap();
    assert_eq!(kept, template, "write it anew with --print-template");
    let properties = &template["template"]["mappings"]["properties"];
    let has = |field: &str| {
        let mut at = properties;
        for (depth, name) in field.split('.').enumerate() {
            let inside = if at["properties"].is_object() {
                "properties"
            } else {
                "fields"
            };
            at = if depth == 0 {
                &at[name]
            } else {
                &at[inside][name]
            };
        }
        at["type"].is_string()
    };
    assert!(has("error.kind") && has("error.message.keyword") && !has("error.cause"));

    let dashboard = file("dashboard.ndjson");
    let objects: Vec<Value> = dashboard
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let mut fields = Vec::new();
    for object in &objects {
        // What is referred to is there.
        for reference in object["references"].as_array().unwrap() {
            let found = objects
                .iter()
                .any(|it| it["id"] == reference["id"] && it["type"] == reference["type"]);
            assert!(found, "{reference}");
        }
        // Objects have JSON inside of JSON.
        for inner in [
            "/visState",
            "/panelsJSON",
            "/kibanaSavedObjectMeta/searchSourceJSON",
        ] {
            if let Some(inner) = object["attributes"].pointer(inner) {
                let inner: Value = serde_json::from_str(inner.as_str().unwrap()).unwrap();
                let text = inner.to_string();
                fields.extend(quoted_after(&text, r#""field":""#).map(str::to_owned));
            }
        }
    }
    for needed in ["origin.topic", "error.kind", "@timestamp", "retryCount"] {
        assert!(fields.iter().any(|it| it == needed), "{needed}");
    }
    for field in fields {
        assert!(has(&field), "{field}");
    }

    let pipeline = file("logstash.conf");
    let bracketed = pipeline.lines().filter_map(|line| {
        let (_, to) = line.trim().split_once("=> \"[")?;
        Some(to.trim_end_matches("]\"").replace("][", "."))
    });
    let bracketed: Vec<_> = bracketed.collect();
    assert!(bracketed.len() >= 14, "{bracketed:?}");
    for field in bracketed {
        assert!(has(&field), "{field}");
    }
    assert!(pipeline.contains(r#"document_id => "%{topic}:%{partition}:%{offset}""#));
}
