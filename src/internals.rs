//! What this crate's own benchmarks and fuzz targets reach into. Not part of the API: it changes without notice.

use std::ops::Range;

use crate::{Dialect, Record, dead_letter, engine, spool::format};

/// The window of a partition.
#[derive(Debug)]
pub struct Window(engine::Window);

impl Window {
    /// At most `limit` records from the lowest unfinished one to the newest; empty, and starting at `start`.
    pub fn new(limit: usize, start: i64) -> Self {
        Self(engine::Window::new(limit, Some(start)))
    }

    /// Takes in a record and returns its sequence.
    #[inline]
    pub fn deliver(&mut self, offset: i64) -> u64 {
        self.0.deliver(offset)
    }

    /// `true`: the watermark moved.
    #[inline]
    pub fn finish(&mut self, seq: u64) -> bool {
        self.0.finish(seq) == engine::Finish::Advanced
    }

    /// What may be committed.
    pub fn committable(&self) -> Option<i64> {
        self.0.committable()
    }
}

/// Snapshots of one partition, as they stand in commit metadata.
#[derive(Debug)]
pub struct Snapshots(engine::Identity);

impl Snapshots {
    /// Those of partition 3 of some topic.
    #[allow(
        clippy::new_without_default,
        reason = "it stands for one certain place, which is not a default of anything"
    )]
    pub fn new() -> Self {
        Self(engine::Identity::new("cluster", "group", "topic", 3))
    }

    /// At most `limit` characters, and from where on what has finished is not in it.
    pub fn encode(
        &self,
        committed: i64,
        finished: &[Range<i64>],
        limit: usize,
    ) -> (String, Option<i64>) {
        let snapshot = engine::encode_snapshot(
            self.0,
            committed,
            &engine::Marks::default(),
            finished.iter().cloned(),
            None,
            limit,
        );
        (snapshot.text, snapshot.cut)
    }

    /// A snapshot with any content and a right checksum.
    pub fn forge(&self, committed: u64, form: u8, data: &[u8]) -> String {
        engine::forge_snapshot(self.0, committed, form, data)
    }

    /// What has finished, if the text is believed.
    pub fn decode(&self, text: &[u8], committed: i64) -> Option<Vec<Range<i64>>> {
        let inherited = engine::decode_snapshot(text, self.0, committed).ok()?;
        Some(inherited.finished.from(i64::MIN).collect())
    }
}

/// The headers of a record's dead letter: names and values, null or not.
pub fn dead_letter_headers(
    record: &Record,
    error: &str,
    dialect: Dialect,
) -> Vec<(Vec<u8>, Option<Vec<u8>>)> {
    dead_letter::headers_of_letter(record, error, dialect)
}

/// Names of the headers that a dead letter in this dialect may have.
pub fn names_in(dialect: Dialect) -> &'static [&'static str] {
    dialect.replaced()
}

/// A spool file with a record for each value.
pub fn spool_file(salt: [u8; 8], values: &[&[u8]]) -> Vec<u8> {
    let mut file = format::header(format::Salt(salt)).to_vec();
    for value in values {
        let entry = format::Entry {
            spooled_at_ms: 1,
            topic: "letters",
            partition: None,
            timestamp_ms: Some(2),
            key: Some(value),
            value: Some(value),
            origin: None,
            headers: vec![format::Header {
                name: b"name",
                value: None,
                expendable: 1,
            }],
        };
        let body = entry
            .encode()
            .expect("a fuzzer's input is smaller than 4 GiB");
        file.extend(format::head(format::Salt(salt), &body));
        file.extend(body);
    }
    file
}

/// The whole records of a spool file: what they would be written as again, and their values.
pub fn spool_entries(file: &[u8]) -> Vec<(Vec<u8>, Option<Vec<u8>>)> {
    let pieces = format::Pieces::of(file).into_iter().flatten();
    pieces
        .filter_map(|(_, piece)| match piece {
            format::Piece::Whole(entry) => Some((
                entry.encode().expect("it was not larger than 4 GiB"),
                entry.value.map(<[u8]>::to_vec),
            )),
            _ => None,
        })
        .collect()
}
