//! Real broker: the program `reliable-consumer`, as an operator runs it.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;
#[path = "common/program.rs"]
mod program;

use std::{
    collections::BTreeMap,
    env, fs,
    io::Read as _,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{SystemTime, UNIX_EPOCH},
};

use common::{Running, committed, consumer, millis, until};
use program::{Ended, program};
use reliable_consumer::operate::{Cluster as Operated, Planned};
use reliable_consumer::{
    Handler, HandlerResult, Message, Ordering, Record as Raw, ReliableConsumer, Text,
};
use reliable_consumer_testing::{Cluster, Record, StoredRecord, cluster, unique};
use serde_json::Value;

fn run(arguments: &str) -> Ended {
    program(arguments).into()
}

fn on(cluster: &Cluster, arguments: &str) -> Ended {
    let mut command = program(arguments);
    command.args(["--brokers", cluster.brokers()]);
    command.into()
}

/// A letter of this library, about the record at this offset of `orders`.
fn letter(offset: usize, kind: &str, failed_at: i64) -> Record {
    let value = format!(r#"{{"order":{offset},"total":1.10}}"#);
    letter_about(Record::value(value), offset, kind, failed_at)
}

fn letter_about(record: Record, offset: usize, kind: &str, failed_at: i64) -> Record {
    record
        .key(format!("k{offset}"))
        .partition(0)
        .header("tenant", "blue")
        .header("retryCount", "2")
        .header("originalTopic", "orders")
        .header("originalPartition", "3")
        .header("originalOffset", offset.to_string())
        .header("originalTimestamp", "1700000000000")
        .header("messageId", format!("order-{offset}"))
        .header("consumerGroup", "billing")
        .header("attempts", "5")
        .header("errorKind", kind)
        .header("errorMessage", format!("no route to host {}", offset % 2))
        .header("failedAt", failed_at.to_string())
}

fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    since.as_millis() as i64
}

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(unique(name))
}

/// A dead-letter topic with six letters, `timeout` and `permanent` by turns, a minute apart, the last one just now.
fn six_letters(cluster: &Cluster) -> String {
    let dlq = cluster.create_topic("orders.dlq", 2, &[]);
    let letters = (0..6).map(|n| {
        let kind = if n % 2 == 0 { "timeout" } else { "permanent" };
        letter(n, kind, now() - 60_000 * (5 - n as i64))
    });
    cluster.produce(&dlq, letters);
    dlq
}

fn offsets(letters: &[Value]) -> Vec<i64> {
    let offsets = letters.iter().map(|letter| letter["offset"].as_i64());
    offsets.map(|offset| offset.expect("a number")).collect()
}

fn copies(cluster: &Cluster, topic: &str) -> Vec<StoredRecord> {
    cluster.read_all(topic)
}

#[test]
fn a_list_tells_what_failed_newest_first_and_filters_it() {
    let Some(cluster) = cluster() else { return };
    let dlq = six_letters(&cluster);
    let list = on(&cluster, &format!("dlq list {dlq}")).well();
    let rows: Vec<_> = list
        .out
        .lines()
        .filter(|line| line.contains("orders 3@"))
        .collect();
    assert_eq!(rows.len(), 6, "{}", list.out);
    for word in [
        "0@5",
        "orders 3@5",
        "permanent",
        "2",
        "k5",
        "no route to host 1",
    ] {
        assert!(rows[0].contains(word), "{word}: {}", rows[0]);
    }
    assert!(rows[5].contains("0@0"));

    let listed = |more: &str| {
        let list = on(&cluster, &format!("dlq list {dlq} --output json {more}")).well();
        offsets(&list.json())
    };
    assert_eq!(listed(""), [5, 4, 3, 2, 1, 0]);
    assert_eq!(listed("--limit 2"), [5, 4]);
    assert_eq!(listed("--kind timeout --limit 2"), [4, 2]);
    assert_eq!(listed("--kind timeout --kind permanent").len(), 6);
    assert_eq!(listed("--origin orders --since 150s"), [5, 4, 3]);
    assert_eq!(listed("--until 150s"), [2, 1, 0]);
    assert_eq!(listed("--key k3 --key hex:6b31"), [3, 1]);
    assert_eq!(
        listed("--header tenant=blue --header messageId=order-2"),
        [2]
    );
    assert_eq!(listed("--header tenant=red").len(), 0);
    assert_eq!(listed("--origin refunds").len(), 0);

    // What the redriver's group is done with is not open any more.
    cluster.commit(&format!("{dlq}.redriver"), &dlq, 0, 4, "");
    assert_eq!(listed(""), [5, 4]);
    assert_eq!(listed("--all").len(), 6);
    assert_eq!(listed("--redriver-group another").len(), 6);

    // Why there are none.
    let none = |topic: &str, more: &str| on(&cluster, &format!("dlq list {topic} {more}")).well();
    let slip = none(&dlq, "--kind Timeout --all");
    assert!(
        slip.contains("There are: permanent, timeout."),
        "{}",
        slip.out
    );
    let slip = none(&dlq, "--origin refunds");
    assert!(
        slip.contains("what the filter means; --all"),
        "{}",
        slip.out
    );
    let empty = cluster.create_topic("empty.dlq", 1, &[]);
    assert!(none(&empty, "").contains("is empty"));
    let never = format!("dlq list {dlq} --since 1h --until 2h");
    on(&cluster, &never).with(2, "the earlier time");
}

#[test]
fn one_letter_is_shown_with_all_that_is_in_it() {
    let Some(cluster) = cluster() else { return };
    let dlq = six_letters(&cluster);
    let shown = on(&cluster, &format!("dlq show {dlq} 0@3")).well();
    for words in [
        "permanent: no route to host 1",
        "orders 3@3",
        "billing",
        "order-3",
        "tenant: blue",
        "{\n  \"order\": 3,\n  \"total\": 1.10\n}",
    ] {
        assert!(shown.contains(words), "{words}: {}", shown.out);
    }
    let shown = on(&cluster, &format!("dlq show {dlq} 0@3 0@1 -o json")).well();
    let letters = shown.json();
    assert_eq!(offsets(&letters), [3, 1]);
    let letter = &letters[0];
    assert_eq!(letter["origin"]["topic"], "orders");
    assert_eq!(letter["error"]["kind"], "permanent");
    assert_eq!(
        (&letter["retryCount"], &letter["attempts"]),
        (&2.into(), &5.into())
    );
    assert_eq!(letter["value"]["text"], r#"{"order":3,"total":1.10}"#);
    assert_eq!(letter["headers"][0]["name"], "tenant");
    assert_eq!(letter["done"], false);

    // The group of the redriver is done with the first three.
    cluster.commit(&format!("{dlq}.redriver"), &dlq, 0, 3, "");
    let shown = on(&cluster, &format!("dlq show {dlq} 0@2 0@3 -o json")).well();
    let done = shown.json().into_iter().map(|it| it["done"].clone());
    assert_eq!(done.collect::<Vec<_>>(), [true, false]);

    let missing = on(&cluster, &format!("dlq show {dlq} 0@3 0@6 1@0 7@1"));
    let missing = missing.with(3, "no record at 0@6, 1@0, 7@1");
    assert!(
        missing.err.contains("has partitions 0-1"),
        "{}",
        missing.err
    );
    assert!(missing.contains("order-3"), "what is there is shown");

    cluster.produce(
        &dlq,
        [letter_about(
            Record::value("x".repeat(20_000)),
            6,
            "panic",
            now(),
        )],
    );
    let cut = on(&cluster, &format!("dlq show {dlq} 0@6")).well();
    assert!(cut.contains("16384 of 20000 bytes are shown") && cut.out.len() < 20_000);
    let full = on(&cluster, &format!("dlq show {dlq} 0@6 --full")).well();
    assert!(full.contains(&"x".repeat(20_000)));
}

#[test]
fn statistics_count_by_topic_kind_hour_and_redrives() {
    let Some(cluster) = cluster() else { return };
    let dlq = six_letters(&cluster);
    let spring = Record::value("x")
        .header("kafka_dlt-exception-fqcn", "java.io.IOException")
        .header("kafka_dlt-original-topic", "refunds")
        .header("kafka_dlt-original-partition", 0_i32.to_be_bytes())
        .header("kafka_dlt-original-offset", 7_i64.to_be_bytes());
    cluster.produce(&dlq, [spring, Record::value("no letter at all")]);
    let stats = on(&cluster, &format!("dlq stats {dlq} -o json")).well();
    let stats = &stats.json()[0];
    let counted = |what: &str, name: &str| {
        let top = stats[what]["top"].as_array().unwrap();
        let row = top.iter().find(|row| row["name"] == name);
        row.map_or(0, |row| row["letters"].as_u64().unwrap())
    };
    assert_eq!((&stats["letters"], &stats["open"]), (&8.into(), &8.into()));
    assert_eq!(counted("byOrigin", "orders"), 6);
    assert_eq!(counted("byOrigin", "refunds"), 1);
    assert_eq!(counted("byOrigin", "unknown"), 1);
    assert_eq!(counted("byKind", "timeout"), 3);
    assert_eq!(counted("byKind", "java.io.IOException"), 1);
    assert_eq!(counted("byRetryCount", "2"), 6);
    assert_eq!(counted("byGroup", "billing"), 6);
    assert_eq!(counted("byMessage", "no route to host 0"), 3);
    let hours = stats["byHour"]["top"].as_array().unwrap();
    let hours: u64 = hours
        .iter()
        .map(|row| row["letters"].as_u64().unwrap())
        .sum();
    assert_eq!(hours, 8);

    let top = on(
        &cluster,
        &format!("dlq stats {dlq} -o json --top 1 --kind timeout"),
    )
    .well();
    let top = &top.json()[0];
    assert_eq!(top["letters"], 3);
    let table = on(&cluster, &format!("dlq stats {dlq} --top 1")).well();
    assert!(table.contains("8 letters open; --all"), "{}", table.out);
    let all = on(&cluster, &format!("dlq stats {dlq} --all")).well();
    assert!(all.contains("8 letters, 8 of them open"), "{}", all.out);
    assert!(table.contains("(all others)"), "{}", table.out);
}

/// The most memory that a run of the program had, in MiB, with what it left.
fn at_its_largest(mut command: Command) -> (u64, Ended) {
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut largest = 0;
    let output = program::output_watched(child, || {
        let status = fs::read_to_string(&status).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
        largest = largest.max(kib.unwrap_or(0));
    });
    (largest >> 10, output.into())
}

#[test]
#[cfg(target_os = "linux")]
fn letters_are_counted_and_listed_in_memory_that_does_not_grow_with_them() {
    let Some(cluster) = cluster() else { return };
    let dlq = cluster.create_topic("large.dlq", 2, &[]);
    let (count, payload, began) = (20_000, "x".repeat(4 << 10), now());
    let letters = (0..count).map(|n| {
        let kind = ["timeout", "permanent", "panic"][n % 3];
        let letter = letter_about(Record::value(&*payload), n, kind, began - n as i64);
        letter.partition(n as i32 % 2)
    });
    cluster.produce(&dlq, letters);
    // All of them are more than 80 MiB.
    let bounded = |arguments: &str| {
        let mut command = program(&format!("{arguments} -o json"));
        command.args(["--brokers", cluster.brokers()]);
        let (memory, ended) = at_its_largest(command);
        assert!(memory > 0 && memory < 64, "{arguments}: {memory} MiB");
        ended.well().json()
    };
    let stats = &bounded(&format!("dlq stats {dlq}"))[0];
    assert_eq!(stats["letters"], count);
    assert_eq!(stats["valueBytes"], count * payload.len());
    let kinds = stats["byKind"]["top"].as_array().unwrap();
    let kinds = kinds.iter().map(|row| row["letters"].as_u64().unwrap());
    assert_eq!(kinds.collect::<Vec<_>>(), [6_667, 6_667, 6_666]);
    let listed = bounded(&format!("dlq list {dlq} --kind panic --limit 2"));
    assert_eq!(offsets(&listed), [1, 2], "the newest of that kind");
    let dry = &bounded(&format!("dlq redrive {dlq} --to-pattern orders --dry-run"))[0];
    assert_eq!(dry["redriven"]["orders"], count);
}

#[test]
fn an_export_has_every_letter_whole_and_a_file_only_when_it_is_complete() {
    let Some(cluster) = cluster() else { return };
    let dlq = six_letters(&cluster);
    let bytes = vec![0xff, 0x00, 0x1b];
    cluster.produce(
        &dlq,
        [Record::value(bytes)
            .key([0xfe])
            .null_header(b"\xff".to_vec())],
    );
    let exported = on(&cluster, &format!("dlq export {dlq}")).well();
    assert!(exported.err.contains("7 letters exported"));
    let letters = exported.json();
    let last = letters
        .iter()
        .find(|it| it["value"]["base64"] == "/wAb")
        .expect("it is there");
    assert_eq!(last["key"]["base64"], "/g==");
    assert_eq!(last["headers"][0]["name"]["base64"], "/w==");
    assert_eq!(last["headers"][0]["value"], Value::Null);

    let path = file("letters.jsonl");
    let to = format!("dlq export {dlq} --kind timeout --to {}", path.display());
    on(&cluster, &format!("{to} --dry-run")).with(0, "3 letters would be exported");
    assert!(!path.exists());
    on(&cluster, &to).well();
    assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 3);
    let nowhere = format!("dlq export {dlq} --to {}/x/y", path.display());
    on(&cluster, &nowhere).with(1, "letters.jsonl");

    // Whoever reads the file meanwhile reads all of the old one; and one that cannot be kept leaves nothing.
    let mut old = String::new();
    let mut reader = fs::File::open(&path).unwrap();
    on(
        &cluster,
        &format!("dlq export {dlq} --to {}", path.display()),
    )
    .well();
    reader.read_to_string(&mut old).unwrap();
    assert_eq!(old.lines().count(), 3);
    assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 7);
    let folder = file("folder");
    fs::create_dir(&folder).unwrap();
    on(
        &cluster,
        &format!("dlq export {dlq} --to {}", folder.display()),
    )
    .with(1, "folder");
    assert!(!PathBuf::from(format!("{}.part", folder.display())).exists());
}

// D4
#[test]
fn nothing_that_stands_in_a_record_reaches_the_terminal_as_it_is() {
    let Some(cluster) = cluster() else { return };
    let dlq = cluster.create_topic("orders.dlq", 1, &[]);
    let evil = "\u{1b}[2J\u{1b}]0;owned\u{7}\u{9b}31m\r\u{202e}\u{8}";
    let values = [
        evil.to_owned(),
        format!(r#"{{"a":["{}"]}}"#, "\u{9b}\u{202e}"),
        "[".repeat(200_000),
    ];
    let hostile = values.map(|value| {
        Record::value(value)
            .key(evil)
            .header("originalTopic", evil)
            .header("errorKind", evil)
            .header("failedAt", "1700000000000")
            .header("errorMessage", evil)
            .header("messageId", evil)
            .header("consumerGroup", evil)
            .header(evil, evil)
            .header(b"\xff\x1b[2J".to_vec(), b"\xfe\x1b[2J".to_vec())
            .header("x", "y".repeat(50_000))
    });
    cluster.produce(&dlq, hostile);
    cluster.produce(
        &dlq,
        [
            Record::value(evil),
            Record::tombstone().header("failedAt", "9".repeat(300)),
        ],
    );
    for command in ["list", "show", "stats", "export"] {
        for format in ["table", "json"] {
            let places = if command == "show" {
                "0@0 0@1 0@2 0@3 0@4"
            } else {
                ""
            };
            let ended = on(
                &cluster,
                &format!("dlq {command} {dlq} {places} -o {format}"),
            )
            .well();
            let bad = ended
                .out
                .chars()
                .find(|c| *c != '\n' && (c.is_control() || matches!(*c, '\u{202a}'..='\u{202e}')));
            assert_eq!(bad, None, "{command} {format}");
            assert!(!ended.out.is_empty());
        }
    }
    let list = on(&cluster, &format!("dlq list {dlq}")).well();
    assert!(
        list.contains("\\u{1b}[2J"),
        "escaped, and there: {}",
        list.out
    );
    assert!(list.out.lines().all(|line| line.chars().count() < 1_000));
}

#[test]
fn a_parked_letter_is_in_the_parking_lot_and_no_longer_open_and_comes_back() {
    let Some(cluster) = cluster() else { return };
    let dlq = six_letters(&cluster);
    let lot = format!("{dlq}.parked");
    on(&cluster, &format!("dlq park {dlq} 0@1")).with(3, "topics create-dlq");
    cluster.create_topic_named(&lot, 1, &[]);
    let open = |topic: &str| {
        let list = on(&cluster, &format!("dlq list {topic} -o json")).well();
        let mut offsets = offsets(&list.json());
        offsets.sort_unstable();
        offsets
    };

    let dry = on(&cluster, &format!("dlq park {dlq} 0@1 0@4 --dry-run")).well();
    assert!(dry.contains("0@4 would be parked"), "{}", dry.out);
    assert_eq!(copies(&cluster, &lot).len(), 0);
    assert_eq!(open(&dlq).len(), 6);
    let group = format!("{dlq}.redriver");
    assert_eq!(committed(&cluster, &group, &dlq), [-1, -1]);

    let parked = on(&cluster, &format!("dlq park {dlq} 0@4 0@1 -o json")).well();
    assert_eq!(offsets(&parked.json()), [1, 4]);
    assert_eq!(open(&dlq), [0, 2, 3, 5]);
    let lying = copies(&cluster, &lot);
    assert_eq!(lying.len(), 2);
    let original = &copies(&cluster, &dlq)[1];
    assert_eq!(
        (&lying[0].key, &lying[0].value),
        (&original.key, &original.value)
    );
    assert_eq!(lying[0].header("parkReason"), Some("by-hand"));
    assert_eq!(lying[0].header("messageId"), Some("order-1"));
    assert_eq!(lying[0].headers.len(), original.headers.len() + 1);
    for shown in [format!("list {lot}"), format!("show {lot} 0@0")] {
        let shown = on(&cluster, &format!("dlq {shown}")).well();
        assert!(shown.contains("by-hand"), "{}", shown.out);
        assert!(shown.contains("no route to host 1"), "{}", shown.out);
    }

    // The head, and with it what stands finished behind it.
    on(&cluster, &format!("dlq park {dlq} 0@0")).well();
    assert_eq!(committed(&cluster, &group, &dlq)[0], 2);
    assert_eq!(open(&dlq), [2, 3, 5]);

    on(&cluster, &format!("dlq park {dlq} 0@1")).with(3, "done with the letter at 0@1");
    on(&cluster, &format!("dlq park {dlq} 0@2 0@17")).with(3, "no letter at 0@17");
    assert_eq!(copies(&cluster, &lot).len(), 3, "all or nothing");

    let dry = on(&cluster, &format!("dlq unpark {lot} 0@0 --dry-run")).well();
    assert!(dry.contains("would be unparked"));
    on(&cluster, &format!("dlq unpark {lot} 0@0")).well();
    assert_eq!(open(&lot), [1, 2]);
    let back = copies(&cluster, &dlq);
    let back = back
        .iter()
        .rfind(|it| it.header("messageId") == Some("order-1"))
        .unwrap();
    assert_eq!(back.header("retryCount"), Some("0"));
    assert_eq!(back.header("parkReason"), None);
    assert_eq!(back.header("errorMessage"), Some("no route to host 1"));
    assert_eq!(open(&dlq).len(), 4);
    on(&cluster, &format!("dlq unpark {dlq} 0@2")).with(2, "--dlq");
}

#[test]
fn a_letter_that_cannot_be_copied_stays_and_so_does_one_whose_note_is_strange() {
    let Some(cluster) = cluster() else { return };
    let dlq = cluster.create_topic("orders.dlq", 1, &[]);
    let (lot, group) = (format!("{dlq}.parked"), format!("{dlq}.redriver"));
    cluster.create_topic_named(&lot, 1, &[("max.message.bytes", "10000")]);
    let large = letter_about(Record::value("x".repeat(20_000)), 1, "panic", now());
    cluster.produce(
        &dlq,
        [letter(0, "panic", now()), large, letter(2, "panic", now())],
    );
    let ended = on(&cluster, &format!("dlq park {dlq} 0@0 0@1 0@2 -o json"));
    let ended = ended.with(5, "1 of 3 letters parked");
    assert_eq!(offsets(&ended.json()), [0], "it tells what it has done");
    assert_eq!(copies(&cluster, &lot).len(), 1);
    assert_eq!(committed(&cluster, &group, &dlq), [1]);
    let open = on(&cluster, &format!("dlq list {dlq} -o json"))
        .well()
        .json();
    let mut open = offsets(&open);
    open.sort_unstable();
    assert_eq!(open, [1, 2]);

    // What another tool has noted is not written over.
    cluster.commit(&group, &dlq, 0, 1, "a note of somebody else");
    on(&cluster, &format!("dlq park {dlq} 0@2")).with(1, "");
    assert_eq!(copies(&cluster, &lot).len(), 1);
    let noted = &cluster.committed(&group, &dlq)[0];
    assert_eq!(noted.metadata, "a note of somebody else");
}

#[test]
fn many_letters_are_moved_only_if_somebody_says_yes() {
    let Some(cluster) = cluster() else { return };
    let dlq = cluster.create_topic("many.dlq", 1, &[]);
    cluster.create_topic_named(&format!("{dlq}.parked"), 1, &[]);
    cluster.produce(&dlq, (0..101).map(|n| letter(n, "timeout", now())));
    let places: Vec<_> = (0..101).map(|n| format!("0@{n}")).collect();
    let park = format!("dlq park {dlq} {}", places.join(" "));
    on(&cluster, &park).with(4, "--yes");
    assert_eq!(copies(&cluster, &format!("{dlq}.parked")).len(), 0);
    on(&cluster, &format!("{park} --yes")).well();
    assert_eq!(copies(&cluster, &format!("{dlq}.parked")).len(), 101);
    assert_eq!(committed(&cluster, &format!("{dlq}.redriver"), &dlq), [101]);
}

#[test]
fn letters_go_back_once_whether_with_a_filter_or_without() {
    let Some(cluster) = cluster() else { return };
    let topic = cluster.create_topic("orders", 1, &[]);
    let dlq = cluster.create_topic("orders.dlq", 1, &[]);
    let letters = (0..6).map(|n| {
        let kind = if n % 2 == 0 { "timeout" } else { "permanent" };
        letter(n, kind, now()).header("originalTopic", &*topic)
    });
    cluster.produce(&dlq, letters);
    let redrive = |more: &str| on(&cluster, &format!("dlq redrive {dlq} {more}"));
    let ids = || {
        let back = cluster.read_all(&topic).into_iter();
        let mut ids: Vec<_> = back
            .map(|it| it.header("messageId").unwrap().to_owned())
            .collect();
        ids.sort_unstable();
        ids
    };
    redrive("").with(2, "--to");
    let none = redrive(&format!("--to {topic} --kind java.io.IOException -o json")).well();
    assert_eq!(none.json()[0]["notMeant"], 6);

    let dry = redrive(&format!("--to {topic} --kind timeout --dry-run -o json")).well();
    assert_eq!(dry.json()[0]["redriven"][&topic], 3);
    assert_eq!(dry.json()[0]["notMeant"], 3);
    assert_eq!(ids().len(), 0);

    let done = redrive(&format!("--to {topic} --kind timeout -o json")).well();
    assert_eq!(done.json()[0]["redriven"][&topic], 3);
    assert_eq!(ids(), ["order-0", "order-2", "order-4"]);
    assert_eq!(cluster.read_all(&topic)[0].header("retryCount"), Some("3"));
    let open = on(&cluster, &format!("dlq list {dlq} -o json")).well();
    assert_eq!(
        offsets(&open.json()),
        [5, 3, 1],
        "what went back is not open"
    );

    let done = redrive(&format!("--to {topic}")).well();
    assert!(done.contains("3  sent back to"), "{}", done.out);
    assert_eq!(ids().len(), 6, "none went twice");
    let nothing = redrive(&format!("--to {topic}")).well();
    assert!(nothing.contains("nothing to send back"), "{}", nothing.out);
    let again = redrive(&format!("--to {topic} --kind permanent")).well();
    assert!(again.contains("3  done already"), "{}", again.out);
    assert_eq!(ids().len(), 6);
}

#[test]
fn what_may_not_go_back_is_parked_and_many_letters_need_a_yes() {
    let Some(cluster) = cluster() else { return };
    let topic = cluster.create_topic("orders", 1, &[]);
    let dlq = cluster.create_topic("orders.dlq", 1, &[]);
    let worn_out = letter(0, "timeout", now()).header("originalTopic", &*topic);
    cluster.produce(
        &dlq,
        [
            worn_out.header("retryCount", "5"),
            letter(1, "timeout", now()),
        ],
    );
    let redrive = |more: &str| on(&cluster, &format!("dlq redrive {dlq} --to {topic} {more}"));
    redrive("").with(3, "topics create-dlq");
    // A slip in the name must not park whatever came from the topic that was meant, not even as a service.
    for more in ["", "--dry-run", "--follow"] {
        let slip = format!("dlq redrive {dlq} --to {topic}x {more}");
        on(&cluster, &slip).with(3, &format!("no topic `{topic}x`"));
    }
    on(&cluster, &format!("dlq redrive {dlq} --to {dlq}")).with(2, "--to cannot be");
    assert_eq!(committed(&cluster, &format!("{dlq}.redriver"), &dlq), [-1]);
    let lot = format!("{dlq}.parked");
    cluster.create_topic_named(&lot, 1, &[]);
    let done = redrive("-o json").well();
    assert_eq!(
        done.json()[0]["parked"].to_string(),
        r#"{"exhausted":1,"untrusted":1}"#
    );
    assert_eq!(copies(&cluster, &lot).len(), 2);
    assert_eq!(copies(&cluster, &topic).len(), 0);
    // One of them may go back from the parking lot, the other one stays there.
    let back = on(&cluster, &format!("dlq redrive {lot} --to {topic} -o json"));
    let back = back.with(5, "still there");
    assert_eq!(back.json()[0]["left"]["untrusted"], 1);
    assert_eq!(copies(&cluster, &topic)[0].header("retryCount"), Some("1"));

    cluster.produce(
        &dlq,
        (0..101).map(|n| letter(n, "timeout", now()).header("originalTopic", &*topic)),
    );
    redrive("").with(4, "101 letters would be sent back");
    assert_eq!(copies(&cluster, &topic).len(), 1);
    redrive("--yes").well();
    assert_eq!(copies(&cluster, &topic).len(), 102);
}

#[test]
fn every_filter_holds_for_what_is_sent_back() {
    let Some(cluster) = cluster() else { return };
    let topic = cluster.create_topic("orders", 1, &[]);
    let dlq = cluster.create_topic("orders.dlq", 1, &[]);
    let letters = (0..6).map(|n| {
        let failed_at = now() - 60_000 * (5 - n as i64);
        letter(n, "timeout", failed_at).header("originalTopic", &*topic)
    });
    cluster.produce(&dlq, letters);
    let meant = |filter: &str| {
        let redrive = format!("dlq redrive {dlq} --to {topic} {filter} --dry-run -o json");
        let report = on(&cluster, &redrive).well().json().remove(0);
        let meant = report["redriven"][&topic].as_i64().unwrap_or(0);
        assert_eq!(meant + report["notMeant"].as_i64().unwrap(), 6, "{report}");
        meant
    };
    for (filter, count) in [
        ("--key k3 --key hex:6b31", 2),
        ("--key k", 0),
        ("--header messageId=order-2", 1),
        ("--header tenant=red", 0),
        ("--header tenant --header nothing", 0),
        ("--since 150s", 3),
        ("--until 150s", 3),
        ("--since 200s --until 100s", 2),
        ("--kind permanent", 0),
    ] {
        assert_eq!(meant(filter), count, "{filter}");
    }
    assert_eq!(meant(&format!("--origin {topic}")), 6);
    assert_eq!(meant("--origin refunds"), 0);
}

#[test]
fn every_option_holds_for_what_is_sent_back() {
    let Some(cluster) = cluster() else { return };
    let topic = cluster.create_topic("orders", 1, &[]);
    let dlq = cluster.create_topic("orders.dlq", 1, &[]);
    let waits = format!("{topic}-again");
    let own = format!("{topic}.billing.redrive");
    let lot = unique("lot");
    for name in [&waits, &own, &lot] {
        cluster.create_topic_named(name, 1, &[]);
    }
    let from = |n, origin: &str| letter(n, "timeout", now()).header("originalTopic", origin);
    cluster.produce(&dlq, [from(0, &topic), from(1, &waits)]);
    let dry = |options: &str| {
        let redrive = format!("dlq redrive {dlq} {options} --dry-run -o json");
        let report = on(&cluster, &redrive).well().json().remove(0);
        (report["redriven"].to_string(), report["parked"].to_string())
    };
    let counts = |pairs: &[(&str, u64)]| {
        let pairs = pairs
            .iter()
            .map(|(name, n)| ((*name).to_owned(), (*n).into()));
        Value::Object(pairs.collect()).to_string()
    };
    let both = format!("--to-pattern {topic}.*");
    assert_eq!(
        dry(&both),
        (counts(&[(&topic, 1), (&waits, 1)]), counts(&[]))
    );
    assert_eq!(
        dry(&format!("{both} --retry-topic {waits}")),
        (counts(&[(&topic, 1)]), counts(&[("untrusted", 1)]))
    );
    assert_eq!(
        dry(&format!("{both} --threshold 2")),
        (counts(&[]), counts(&[("exhausted", 2)]))
    );
    assert_eq!(
        dry(&format!("--to {topic} --topic-per-group")),
        (counts(&[(&own, 1)]), counts(&[("untrusted", 1)]))
    );
    let real = format!("dlq redrive {dlq} --to {topic} --parking-lot {lot} --for-group shipping");
    on(&cluster, &real).well();
    assert_eq!(
        copies(&cluster, &lot)[0].header("parkReason"),
        Some("untrusted")
    );
    assert_eq!(
        copies(&cluster, &topic)[0].header("redriveGroup"),
        Some("shipping")
    );
}

#[test]
fn one_that_is_interrupted_says_that_some_are_left_and_the_next_one_sends_those() {
    let Some(cluster) = cluster() else { return };
    let topic = cluster.create_topic("orders", 1, &[]);
    let dlq = cluster.create_topic("orders.dlq", 1, &[]);
    let letters = (0..90).map(|n| letter(n, "timeout", now()).header("originalTopic", &*topic));
    cluster.produce(&dlq, letters);
    let redrive = format!("dlq redrive {dlq} --to {topic}");
    let child = program(&format!("{redrive} --rate 10"))
        .args(["--brokers", cluster.brokers()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let began = || cluster.end_offsets(&topic)[0] > 0;
    reliable_consumer_testing::eventually("it to begin", common::PATIENCE, began);
    interrupt(&child);
    Ended::from(program::output(child)).with(5, "run it again");
    assert!(cluster.end_offsets(&topic)[0] < 90, "it kept to its rate");
    on(&cluster, &redrive).well();
    let mut ids: Vec<_> = copies(&cluster, &topic)
        .iter()
        .map(|it| it.header("messageId").unwrap().to_owned())
        .collect();
    assert_eq!(ids.len(), 90, "each once");
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 90);
}

// The end of a partition is looked at first.
#[test]
fn what_is_open_behind_many_that_are_done_is_listed() {
    let Some(cluster) = cluster() else { return };
    let topic = cluster.create_topic("orders", 1, &[]);
    let dlq = cluster.create_topic("orders.dlq", 1, &[]);
    let letters = (0..1_102).map(|n| {
        let kind = if n < 2 { "permanent" } else { "timeout" };
        letter(n, kind, now()).header("originalTopic", &*topic)
    });
    cluster.produce(&dlq, letters);
    on(
        &cluster,
        &format!("dlq redrive {dlq} --to {topic} --kind timeout --yes"),
    )
    .well();
    let list = on(&cluster, &format!("dlq list {dlq} -o json")).well();
    let mut open = offsets(&list.json());
    open.sort_unstable();
    assert_eq!(open, [0, 1]);
}

fn interrupt(child: &Child) {
    let interrupt = format!("kill -INT {}", child.id());
    let sent = Command::new("sh").args(["-c", &interrupt]).status();
    assert!(sent.unwrap().success());
}

#[test]
fn as_a_service_it_sends_back_what_comes_until_it_is_interrupted() {
    let Some(cluster) = cluster() else { return };
    let topic = cluster.create_topic("orders", 1, &[]);
    let dlq = cluster.create_topic("orders.dlq", 1, &[]);
    let follow = format!("dlq redrive {dlq} --to {topic} --follow");
    on(&cluster, &follow).with(3, "topics create-dlq");
    cluster.create_topic_named(&format!("{dlq}.parked"), 1, &[]);
    let mut service = program(&follow)
        .args(["--brokers", cluster.brokers()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    for n in 0..2 {
        let old = letter(n, "timeout", now() - 86_400_000);
        cluster.produce(&dlq, [old.header("originalTopic", &*topic)]);
        let back = || cluster.end_offsets(&topic) == [n as i64 + 1];
        reliable_consumer_testing::eventually("it to be back", common::PATIENCE, back);
    }
    assert!(service.try_wait().unwrap().is_none(), "it waits for more");
    interrupt(&service);
    let ended = Ended::from(program::output(service)).well();
    assert!(ended.contains("2  sent back to"), "{}", ended.out);
    assert_eq!(committed(&cluster, &format!("{dlq}.redriver"), &dlq), [2]);
}

#[test]
fn letters_are_not_copied_to_where_they_are() {
    let Some(cluster) = cluster() else { return };
    let dlq = six_letters(&cluster);
    on(&cluster, &format!("dlq park {dlq} 0@1 --parking-lot {dlq}")).with(2, "where they are");
    assert_eq!(cluster.end_offsets(&dlq)[0], 6);
}

fn postpones() -> impl Handler<Raw> {
    async |_: &Message<Raw>| -> HandlerResult {
        Err(reliable_consumer::postpone(millis(60_000), "later"))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_parked_behind_the_back_of_a_redriver_at_work() {
    let Some(cluster) = cluster() else { return };
    let dlq = six_letters(&cluster);
    let lot = format!("{dlq}.parked");
    cluster.create_topic_named(&lot, 1, &[]);
    let group = format!("{dlq}.redriver");
    let running = Running::start(consumer(&cluster, &group).topic(&dlq), postpones());
    until("it to be a member", || cluster.members(&group) == 1).await;
    until("it to have committed where it starts", || {
        committed(&cluster, &group, &dlq) == [0, 0]
    })
    .await;
    on(&cluster, &format!("dlq park {dlq} 0@2")).with(1, "at work");
    assert_eq!(copies(&cluster, &lot).len(), 0);
    // Nor can it be told what a run with a filter has done.
    let redrive = format!("dlq redrive {dlq} --to-pattern orders --kind timeout");
    on(&cluster, &redrive).with(5, "will send it again");
    running.stop().await;

    // And a redriver that comes afterwards passes over what was parked meanwhile.
    on(&cluster, &format!("dlq park {dlq} 0@2")).well();
    let seen = common::Seen::default();
    let noting = {
        let seen = seen.clone();
        async move |message: &Message<Raw>| -> HandlerResult {
            seen.note(message.offset());
            Ok(())
        }
    };
    let running = Running::start(consumer(&cluster, &group).topic(&dlq), noting);
    until("all to be done", || {
        committed(&cluster, &group, &dlq)[0] == 6
    })
    .await;
    running.stop().await;
    let mut seen = seen.all();
    seen.sort_unstable();
    assert_eq!(seen, [0, 1, 3, 4, 5]);
}

#[tokio::test(flavor = "multi_thread")]
async fn lag_names_the_head_that_holds_a_running_group_back_and_what_is_finished_behind_it() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("orders", 2, &[]), unique("billing"));
    let written = now() - 600_000;
    cluster.produce(
        &topic,
        (0..40).map(|n| {
            Record::value("x")
                .key(format!("k{n}\u{1b}"))
                .partition(0)
                .timestamp(written + n)
        }),
    );
    let handler = async |message: &Message<Text>| -> HandlerResult {
        match message.offset() {
            3 | 20 => Err(reliable_consumer::postpone(millis(120_000), "it hangs")),
            _ => Ok(()),
        }
    };
    let builder = consumer(&cluster, &group)
        .topic(&topic)
        .property("client.id", "till-7")
        .ordering(Ordering::Unordered);
    let running = Running::start(builder, handler);
    until("the others to be done", || {
        let lag = on(&cluster, &format!("lag {group} -o json")).json();
        lag.first().is_some_and(|it| it["heldBack"] == 35)
    })
    .await;
    let lag = on(&cluster, &format!("lag {group} -o json")).well();
    let lag = lag.json();
    assert_eq!(lag.len(), 2);
    let first = &lag[0];
    assert_eq!(
        (&first["topic"], &first["partition"]),
        (&topic.as_str().into(), &0.into())
    );
    assert_eq!(
        (&first["committed"], &first["end"], &first["lag"]),
        (&3.into(), &40.into(), &37.into())
    );
    assert_eq!(first["head"]["offset"], 3);
    assert_eq!(first["head"]["key"]["text"], "k3\u{1b}");
    assert_eq!(first["finishedAbove"].to_string(), "[[4,20],[21,40]]");
    assert_eq!(first["state"], "head holds others back");
    let age = first["head"]["ageMs"].as_i64().unwrap();
    assert!((590_000..700_000).contains(&age), "{age}");
    assert_eq!(lag[1]["state"], "caught up");
    let (client, host) = (&first["owner"]["clientId"], &first["owner"]["host"]);
    assert_eq!((client, host), (&"till-7".into(), &"127.0.0.1".into()));

    let table = on(&cluster, &format!("lag {group} --topic {topic}")).well();
    let row = table.out.lines().nth(1).unwrap();
    for word in [
        "10m",
        "37",
        "35",
        "head holds others back",
        "k3\\u{1b}",
        "till-7@127.0.0.1",
    ] {
        assert!(row.contains(word), "{word}: {row}");
    }
    on(&cluster, &format!("lag {group} --max-age 5m")).with(6, "older than 5m");
    on(&cluster, &format!("lag {group} --max-age 1h")).well();
    running.stop().await;
    // When the head itself has gone, the oldest that is there may be finished.
    cluster.delete_records(&topic, 0, 10);
    let lag = on(&cluster, &format!("lag {group} -o json")).well();
    assert_eq!(lag.json()[0]["head"]["offset"], 20);
    // Somebody else's note, and a group that nobody knows.
    cluster.commit(&group, &topic, 0, 5, "rc1 of somewhere else");
    let table = on(&cluster, &format!("lag {group}")).well();
    assert!(table.contains("is ignored"), "{}", table.out);
    on(&cluster, "lag nobody").with(3, "committed nothing that");
    on(&cluster, "lag nobody --topic nothing").with(3, "no topic `nothing`");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_members_of_a_group_are_listed_with_what_each_has_whatever_its_protocol() {
    let Some(cluster) = cluster() else { return };
    for protocol in ["classic", "consumer"] {
        let (topic, group) = (cluster.create_topic("orders", 3, &[]), unique("billing"));
        let start = |name: &str| {
            let builder = ReliableConsumer::builder()
                .bootstrap_servers(cluster.brokers())
                .group_id(&group)
                .topic(&topic)
                .property("client.id", name)
                .property("group.protocol", protocol);
            Running::start(builder, postpones())
        };
        let running = [start("till-1"), start("till-2")];
        let members = || on(&cluster, &format!("lag {group} --members -o json")).json();
        until("both to have something", || {
            let members = members();
            let count = |it: &Value| it["partitions"].as_array().unwrap().len();
            let counts = members.iter().map(count);
            members.len() == 2 && counts.clone().sum::<usize>() == 3 && counts.min() == Some(1)
        })
        .await;
        for (member, name) in members().iter().zip(["till-1", "till-2"]) {
            assert_eq!(member["clientId"], name);
            assert_eq!(member["host"], "127.0.0.1");
            assert_eq!(member["partitions"][0]["topic"], *topic);
        }
        let table = on(&cluster, &format!("lag {group} --members")).well();
        assert!(table.contains(&format!("{topic} ")), "{}", table.out);
        for running in running {
            running.stop().await;
        }
        let nobody = on(&cluster, &format!("lag {group} --members")).well();
        assert!(nobody.contains("Nobody is in group"), "{}", nobody.out);
    }
    let unknown = on(&cluster, "lag no-such-group --members").well();
    assert!(unknown.contains("Nobody is in group"), "{}", unknown.out);
}

#[test]
fn lag_tells_what_was_deleted_unread_committed_beyond_the_end_and_never_committed() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (cluster.create_topic("orders", 4, &[]), unique("billing"));
    let records = |partition| (0..10).map(move |_| Record::value("x").partition(partition));
    cluster.produce(&topic, (0..4).flat_map(records));
    cluster.commit(&group, &topic, 0, 2, "");
    cluster.delete_records(&topic, 0, 5);
    cluster.commit(&group, &topic, 1, 17, "");
    cluster.commit(&group, &topic, 2, 4, "");
    let lag = on(&cluster, &format!("lag {group} --topic {topic} -o json")).well();
    let lag = lag.json();
    let states: Vec<_> = lag.iter().map(|it| it["state"].as_str().unwrap()).collect();
    let expected = [
        "records deleted unread",
        "committed beyond the log's end",
        "behind",
        "nothing committed",
    ];
    assert_eq!(states, expected);
    assert_eq!(
        lag[0]["head"]["offset"], 5,
        "the oldest that is still there"
    );
    assert_eq!((&lag[1]["lag"], &lag[2]["lag"]), (&0.into(), &6.into()));
    assert_eq!(
        (&lag[3]["lag"], &lag[3]["head"]),
        (&Value::Null, &Value::Null)
    );
    let nobody = format!("lag {} --topic {topic}", unique("nobody"));
    on(&cluster, &nobody).with(3, "committed nothing");

    // How often the head has been sent back.
    cluster.produce(&topic, [letter(0, "timeout", now())]);
    cluster.commit(&group, &topic, 0, 10, "");
    let lag = on(&cluster, &format!("lag {group} --topic {topic} -o json")).well();
    assert_eq!(lag.json()[0]["head"]["retryCount"], 2);
}

/// Dies under a record; in a process of its own, for the test after it.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a process of the other tests"]
async fn dying_process() {
    let Ok(topic) = env::var("DYING_TOPIC") else {
        return;
    };
    let handler = async |message: &Message<Text>| -> HandlerResult {
        match message.offset() {
            2 => std::process::abort(),
            _ => Ok(()),
        }
    };
    // Whoever has the name of one that died takes its place at once.
    let builder = consumer(&cluster().unwrap(), &topic)
        .topic(&topic)
        .property("group.instance.id", "the-only-one");
    Running::start(builder, handler).ended().await.unwrap();
}

#[test]
fn lag_names_the_record_under_which_processes_died() {
    let Some(cluster) = cluster() else { return };
    let topic = cluster.create_topic("orders", 1, &[]);
    cluster.produce(&topic, (0..5).map(|n| Record::value(n.to_string())));
    // The first ones are needed to find out which record it is.
    for _ in 0..4 {
        let died = Command::new(env::current_exe().unwrap())
            .args(["dying_process", "--exact", "--ignored"])
            .env("DYING_TOPIC", &topic)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        assert_eq!(program::output(died.unwrap()).status.code(), None);
    }
    let lag = on(&cluster, &format!("lag {topic} -o json")).well();
    let lag = &lag.json()[0];
    assert_eq!(lag["runsAlone"], 2, "{lag}");
    assert_eq!(lag["deaths"][0]["offset"], 2, "{lag}");
    let deaths = lag["deaths"][0]["deaths"].as_i64().unwrap();
    assert!((1..=2).contains(&deaths), "{lag}");
    let table = on(&cluster, &format!("lag {topic}")).well();
    let told = format!("the process has died {deaths} times under the record at offset 2");
    assert!(table.contains(&told), "{}", table.out);
}

#[test]
fn topics_for_dead_letters_are_made_with_safe_settings_and_left_alone_if_they_exist() {
    let Some(cluster) = cluster() else { return };
    let topic = cluster.create_topic("orders", 3, &[("max.message.bytes", "2000000")]);
    let create = format!("topics create-dlq {topic} --tiers 10s,1m -o json --replication 1");
    let names = ["dlq", "dlq.parked", "retry.10s", "retry.1m"].map(|it| format!("{topic}.{it}"));

    let dry = on(&cluster, &format!("{create} --dry-run")).with(0, "fewer than three replicas");
    let as_many_as_brokers = format!("topics create-dlq {topic} -o json --dry-run");
    on(&cluster, &as_many_as_brokers).well();
    assert_eq!(dry.json().len(), 4);
    assert!(
        dry.json()
            .iter()
            .all(|it| it["outcome"] == "would be created")
    );
    on(&cluster, &format!("dlq list {}", names[0])).with(3, "no topic");

    let made = on(&cluster, &create).well();
    let made = made.json();
    assert!(
        made.iter()
            .zip(&names)
            .all(|(it, name)| it["topic"] == **name)
    );
    assert!(
        made.iter()
            .all(|it| it["outcome"] == "created" && it["partitions"] == 3)
    );
    assert_eq!(made[0]["settings"]["retention.ms"], "-1");
    assert_eq!(made[0]["settings"]["max.message.bytes"], "2065536");
    assert_eq!(made[0]["settings"]["cleanup.policy"], "delete");
    assert_eq!(made[2]["settings"]["retention.ms"], "2592000000");
    for name in &names {
        cluster.wait_in_sync(name);
        assert_eq!(cluster.end_offsets(name), [0, 0, 0]);
    }
    // What these brokers refuse, being too few, and how it would be set: with all that can be said.
    let wide = format!(
        "topics create-dlq {topic} --dlq {topic}.wide --tiers 5s --replication 30 --partitions 5 --retention 7d \
         --tier-retention 2d -o json"
    );
    let wide = on(&cluster, &wide).with(1, "nothing was made").json();
    let settings = |of: usize, name: &str| wide[of]["settings"][name].as_str().unwrap().to_owned();
    assert_eq!(settings(0, "min.insync.replicas"), "29");
    assert_eq!(settings(0, "unclean.leader.election.enable"), "false");
    assert_eq!(settings(0, "retention.bytes"), "-1");
    let kept = [0, 1, 2].map(|of| settings(of, "retention.ms"));
    assert_eq!(kept, ["604800000", "604800000", "172800000"]);
    assert!(wide.iter().all(|it| it["partitions"] == 5));
    on(&cluster, &format!("dlq list {topic}.wide")).with(3, "no topic");
    // By what the brokers tell of them, nothing is to be said against what was made.
    let again = on(&cluster, &create).well();
    for it in again.json() {
        assert_eq!(it["outcome"], "exists");
        assert_eq!(it["remarks"].as_array().unwrap().len(), 0, "{it}");
    }
    names.iter().for_each(|name| cluster.delete_topic(name));

    let unsafe_one = [("cleanup.policy", "compact"), ("retention.ms", "1000")];
    cluster.create_topic_named(&names[0], 1, &unsafe_one);
    let seen = on(
        &cluster,
        &format!("topics create-dlq {topic} --replication 1"),
    )
    .well();
    assert!(seen.contains("cleanup.policy is compact"), "{}", seen.out);
    assert!(seen.contains("retention.ms is 1000"), "{}", seen.out);
    cluster.delete_topic(&names[1]);
    on(
        &cluster,
        &format!("topics create-dlq {topic} --dlq {topic}"),
    )
    .with(2, "different topics");
    let refused = on(&cluster, &format!("{create} --dlq no/topic")).with(1, "nothing was made");
    assert!(refused.contains("InvalidTopic"), "{}", refused.out);
    on(&cluster, &format!("dlq list {}", names[2])).with(3, "no topic");
}

#[tokio::test]
async fn a_topic_that_somebody_else_has_made_meanwhile_exists() {
    let Some(cluster) = cluster() else { return };
    let topic = Planned {
        name: unique("orders.dlq"),
        partitions: 1,
        replication: 1,
        settings: BTreeMap::new(),
    };
    let properties = [("bootstrap.servers".into(), cluster.brokers().into())];
    let asked = Operated::new(properties, "nobody", millis(15_000)).unwrap();
    let administrator = asked.administrator().unwrap();
    assert!(administrator.create(&topic, false).await.unwrap());
    for dry in [true, false] {
        assert!(!administrator.create(&topic, dry).await.unwrap());
    }
}

#[test]
fn the_exit_code_tells_what_went_wrong() {
    run("dlq list").with(2, "Usage");
    run("dlq show t 3").with(2, "PARTITION@OFFSET");
    run("dlq list t").with(2, "which cluster?");
    run("dlq list t --brokers 127.0.0.1:1 --since never").with(2, "how long ago");
    run("dlq list t -b 127.0.0.1:1 -X no.such=1").with(2, "no librdkafka property `no.such`");
    run("dlq list t -b 127.0.0.1:1 -X enable.auto.commit=true").with(2, "cannot be set");
    let refused = run("dlq list t -b 127.0.0.1:1 --timeout 1s");
    let refused = refused.with(1, "no broker answered within 1s");
    assert!(refused.err.contains("Connection refused"), "{refused:?}");
    run("dlq list t --config /no/such/file").with(1, "/no/such/file");
    let oauth = "-X security.protocol=sasl_plaintext -X sasl.mechanism=OAUTHBEARER";
    run(&format!("dlq list t -b 127.0.0.1:1 {oauth}")).with(2, "sasl.oauthbearer.method=oidc");
    let Some(cluster) = cluster() else { return };
    on(&cluster, "dlq stats no-such-topic").with(3, "no topic `no-such-topic`");
    // Brokers by a variable, and by a file.
    let dlq = six_letters(&cluster);
    let mut by_variable = program(&format!("dlq list {dlq}"));
    by_variable.env("KAFKA_BROKERS", cluster.brokers());
    Ended::from(by_variable).well();
    let path = file("client.properties");
    let properties = format!("# a comment\nbootstrap.servers = {}\n", cluster.brokers());
    fs::write(&path, properties).unwrap();
    run(&format!("dlq list {dlq} --config {}", path.display())).well();
    let mut by_property = program(&format!("dlq list {dlq}"));
    by_property.env("KAFKA_PROPERTY_BOOTSTRAP_SERVERS", cluster.brokers());
    Ended::from(by_property).well();
}

#[test]
fn secrets_are_not_shown_whatever_is_wrong_with_them() {
    const SECRET: &str = "hunter2-hunter2";
    let path = file("secret.properties");
    let config = |text: String| {
        fs::write(&path, text).unwrap();
        run(&format!(
            "dlq list t -b 127.0.0.1:1 --timeout 1s --config {}",
            path.display()
        ))
    };
    let ends = [
        config(format!(
            "sasl.password={SECRET}\nsasl.username=me\nsecurity.protocol=sasl_plaintext\nsasl.mechanism=PLAIN\n"
        )),
        config(format!("sasl.password {SECRET}\n")),
        config(format!(
            "sasl.jaas.config=required password=\"{SECRET}\";\n"
        )),
        config(format!("sasl.password={SECRET}\\\n{SECRET}==\n")),
        config(format!("sasl.password: {SECRET}=\n")),
        config(format!("ssl.key.password={SECRET}\nssl.key.pem={SECRET}\n")),
        config(format!(
            "sasl.oauthbearer.client.secret={SECRET}\nno.such.property=1\n"
        )),
        run(&format!("dlq list t -X {SECRET}")),
        run(&format!(
            "dlq list t -b 127.0.0.1:1 -X sasl.password={SECRET} -X socket.keepalive.enable={SECRET}x --help"
        )),
    ];
    for ended in ends {
        assert!(
            !ended.out.contains(SECRET) && !ended.err.contains(SECRET),
            "{ended:?}"
        );
    }
    let mut by_variable = program("dlq list t --brokers 127.0.0.1:1 --timeout 1s");
    by_variable.env("KAFKA_PROPERTY_SASL_PASSWORD", SECRET);
    let ended = Ended::from(by_variable);
    assert!(ended.code != 0 && !ended.err.contains(SECRET), "{ended:?}");
}

#[test]
fn shells_get_completions_and_help_names_every_command() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = run(&format!("completions {shell}")).well();
        assert!(script.contains("create-dlq"), "{shell}");
    }
    let help = run("--help").well();
    for word in [
        "dlq",
        "lag",
        "topics",
        "completions",
        "Exit codes",
        "--output",
    ] {
        assert!(help.contains(word), "{word}");
    }
    let help = run("dlq --help").well();
    for word in [
        "list", "show", "stats", "export", "redrive", "park", "unpark",
    ] {
        assert!(help.contains(word), "{word}");
    }
}

#[test]
fn a_reader_who_has_had_enough_is_no_error() {
    let Some(cluster) = cluster() else { return };
    let dlq = cluster.create_topic("large.dlq", 1, &[]);
    cluster.produce(&dlq, (0..5_000).map(|n| letter(n, "timeout", now())));
    let mut child = program(&format!("dlq export {dlq} --brokers {}", cluster.brokers()))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let ended = Ended::from(program::output(child));
    assert_eq!(
        (ended.code, ended.err.contains("panicked")),
        (0, false),
        "{ended:?}"
    );
}
