//! Dead letters of any dialect and content: read within bounds, and told on in every dialect without growing.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use reliable_consumer::{
    Dialect, Message, Record, Story,
    internals::{dead_letter_headers, names_in},
};

type Owned = (Vec<u8>, Option<Vec<u8>>);

/// Names that mean something, so that the fuzzer need not guess them.
static KNOWN: LazyLock<Vec<String>> = LazyLock::new(|| {
    let names = Dialect::ALL.iter().flat_map(|dialect| names_in(*dialect));
    let of_letters = names.map(|name| name.to_string());
    // Those of retry topics differ in their beginning.
    let of_retries = of_letters.clone().flat_map(|name| {
        [("kafka_dlt-", "kafka_"), ("dead-letter-", "delayed-retry-")]
            .map(|(letter, retry)| name.replace(letter, retry))
    });
    let others = [
        "retry_topic-attempts",
        "retry_topic-original-timestamp",
        "delayed-retry-count",
        "delayed-retry-original-timestamp",
        "x-exception-class",
        "x-retry-count",
    ];
    let mut known: Vec<_> = of_letters.chain(of_retries).collect();
    known.extend(others.map(String::from));
    known.sort_unstable();
    known.dedup();
    known
});

fuzz_target!(|input: &[u8]| {
    // One dialect a run: all of them would take seven times as long, and most of an input is of no use to most.
    let Some((which, input)) = input.split_first() else {
        return;
    };
    let dialect = Dialect::ALL[usize::from(*which) % Dialect::ALL.len()];
    let written = parse(input);
    let first = record("orders.dlq", 7, &written);
    check(&first);

    let letter = dead_letter_headers(&first, "no such customer", dialect);
    let second = record("orders.dlq", 8, &letter);
    let story = check(&second).expect("a dead letter of ours tells what became of it");
    assert_eq!(story.dialect, Dialect::Own);
    assert_eq!(story.error.message, Some("no such customer"));
    assert_eq!(story.message_id(), Some(message_id(&letter)));
    assert_eq!(
        dead_letter_headers(&second, "no such customer", dialect),
        letter
    );
});

fn check(record: &Record) -> Option<Story<'_>> {
    let story = Story::of(record)?;
    if let Some(origin) = story.origin {
        assert!((1..=249).contains(&origin.topic.len()) && origin.topic.is_ascii());
        assert!(origin.partition >= 0 && origin.offset >= 0);
        assert!(origin.timestamp.is_none_or(|millis| millis >= 0));
    }
    assert!(story.error.message.is_none_or(|text| text.len() <= 1_024));
    for name in [story.error.class, story.group] {
        assert!(name.is_none_or(|name| (1..=512).contains(&name.len())));
    }
    assert!(story.failed_at.is_none_or(|millis| millis >= 0));
    assert!(
        story
            .message_id()
            .is_none_or(|id| (1..=512).contains(&id.len()))
    );
    Some(story)
}

fn message_id(letter: &[Owned]) -> String {
    let id = letter.iter().rfind(|(name, _)| name == b"messageId");
    let id = id.and_then(|(_, value)| value.clone());
    String::from_utf8(id.expect("a letter has an id")).expect("an id is UTF-8")
}

fn record(topic: &str, offset: i64, headers: &[Owned]) -> Record {
    let builder = Message::builder().topic(topic).offset(offset);
    let builder = builder.timestamp_millis(1_700_000_000_000);
    headers
        .iter()
        .fold(builder, |builder, (name, value)| match value {
            Some(value) => builder.header(name, value),
            None => builder.null_header(name),
        })
        .record()
}

/// Lengths and bytes, as they come.
fn parse(mut input: &[u8]) -> Vec<Owned> {
    let mut headers = Vec::new();
    while let Some(which) = take(&mut input, 1) {
        let name = match KNOWN.get(usize::from(which[0])) {
            Some(known) => known.as_bytes().to_vec(),
            None => take(&mut input, usize::from(which[0] >> 3))
                .unwrap_or_default()
                .to_vec(),
        };
        // 255 stands for a value that is longer than anything that is read in whole.
        let value = take(&mut input, 1).and_then(|length| match length[0] {
            255 => take(&mut input, 1).map(|byte| byte.repeat(1_500)),
            length => take(&mut input, usize::from(length)).map(<[u8]>::to_vec),
        });
        headers.push((name, value));
    }
    headers
}

fn take<'a>(input: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, rest) = input.split_at_checked(length)?;
    *input = rest;
    Some(taken)
}
