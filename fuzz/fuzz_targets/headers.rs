//! Headers of any content: read as they were written, and kept on every trip through a dead-letter topic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use reliable_consumer::{
    Dialect, Message, MessageBuilder, header_names as names, internals::dead_letter_headers,
};

type Owned = (Vec<u8>, Option<Vec<u8>>);

/// Names that mean something, so that the fuzzer need not guess them.
const KNOWN: [&str; 6] = [
    names::RETRY_COUNT,
    names::MESSAGE_ID,
    names::ORIGINAL_TOPIC,
    names::ORIGINAL_PARTITION,
    names::ORIGINAL_OFFSET,
    names::ORIGINAL_TIMESTAMP,
];

fuzz_target!(|input: &[u8]| {
    let written = parse(input);
    let message = message(&written).payload(());
    let read: Vec<Owned> = message
        .headers()
        .iter()
        .map(|header| {
            (
                header.name_bytes().to_vec(),
                header.value().map(<[u8]>::to_vec),
            )
        })
        .collect();
    assert_eq!(read, written);
    assert_eq!(message.headers().len(), written.len());
    let _ = format!("{:?}", message.headers());
    let _ = message.retry_count();
    assert!((1..=512).contains(&message.message_id().len()));

    let first = dead_letter_headers(message.record(), "no such customer", Dialect::Own);
    let foreign: Vec<_> = written
        .iter()
        .filter(|(name, _)| !is_ours(name, &first))
        .collect();
    assert!(first.iter().take(foreign.len()).eq(foreign.iter().copied()));

    let second = self::message(&first).offset(99).payload(());
    assert_eq!(second.message_id(), message.message_id());
    assert_eq!(second.retry_count(), message.retry_count());
    assert_eq!(
        dead_letter_headers(second.record(), "no such customer", Dialect::Own),
        first
    );
});

fn message(headers: &[Owned]) -> MessageBuilder {
    let builder = Message::builder().topic("orders").partition(3).offset(42);
    headers
        .iter()
        .fold(builder, |builder, (name, value)| match value {
            Some(value) => builder.header(name, value),
            None => builder.null_header(name),
        })
}

/// A dead letter ends with its own eleven headers.
fn is_ours(name: &[u8], letter: &[Owned]) -> bool {
    letter[letter.len() - 11..]
        .iter()
        .any(|(own, _)| own == name)
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
        let value = take(&mut input, 1).and_then(|length| take(&mut input, usize::from(length[0])));
        headers.push((name, value.map(<[u8]>::to_vec)));
    }
    headers
}

fn take<'a>(input: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, rest) = input.split_at_checked(length)?;
    *input = rest;
    Some(taken)
}
