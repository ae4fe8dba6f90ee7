//! How records lie in a spool file: bytes in, entries out. No I/O.
//!
//! A file is a header and then frames, one a record. Numbers are little-endian.
//!
//! ```text
//! header   "rcspool" | version u8 | salt [8] | CRC-32C of all before it
//! frame    salt [8] | length of the body u32 | CRC-32C of the body | CRC-32C of all before it in the frame | body
//! ```
//!
//! The salt is random and differs from file to file. It marks where frames begin, so that reading can go on behind a
//! damaged one, and since nobody who writes a record can know it, no payload can pass for a frame. The head of a frame
//! has a checksum of its own, so that a frame which was cut off (its length is right, and the file ends before) is told
//! from one whose length is damaged.

use std::ops::Range;

use super::crc::crc32c;

const MAGIC: &[u8; 7] = b"rcspool";
const VERSION: u8 = 1;
/// Of a file.
pub(crate) const HEADER: usize = 20;
/// Before the body of a frame.
pub(crate) const HEAD: usize = 20;

/// What marks the frames of one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Salt(pub(crate) [u8; 8]);

/// A record that is still to be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry<'a> {
    /// When it was spooled, in Unix milliseconds.
    pub(crate) spooled_at_ms: i64,
    pub(crate) topic: &'a str,
    /// `None` leaves the choice to the partitioner.
    pub(crate) partition: Option<i32>,
    /// In Unix milliseconds; `None` for the time at which it is sent.
    pub(crate) timestamp_ms: Option<i64>,
    pub(crate) key: Option<&'a [u8]>,
    pub(crate) value: Option<&'a [u8]>,
    /// The consumed record that it comes from, if there is one.
    pub(crate) origin: Option<Place<'a>>,
    pub(crate) headers: Vec<Header<'a>>,
}

/// Where a consumed record lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place<'a> {
    pub(crate) topic: &'a str,
    pub(crate) partition: i32,
    pub(crate) offset: i64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header<'a> {
    pub(crate) name: &'a [u8],
    pub(crate) value: Option<&'a [u8]>,
    /// 0: it is part of the record. Others may be left out where the record is too large, the highest number first.
    pub(crate) expendable: u8,
}

const HAS_PARTITION: u8 = 1;
const HAS_TIMESTAMP: u8 = 2;
const HAS_KEY: u8 = 4;
const HAS_VALUE: u8 = 8;
const HAS_ORIGIN: u8 = 16;

impl<'a> Entry<'a> {
    /// The body of its frame. `None`: it is larger than a frame can be, 4 GiB.
    pub(crate) fn encode(&self) -> Option<Vec<u8>> {
        let mut body = Vec::with_capacity(
            64 + self.key.map_or(0, <[u8]>::len) + self.value.map_or(0, <[u8]>::len),
        );
        body.extend(self.spooled_at_ms.to_le_bytes());
        body.push(
            flag(self.partition, HAS_PARTITION)
                | flag(self.timestamp_ms, HAS_TIMESTAMP)
                | flag(self.key, HAS_KEY)
                | flag(self.value, HAS_VALUE)
                | flag(self.origin, HAS_ORIGIN),
        );
        put(&mut body, self.topic.as_bytes())?;
        if let Some(partition) = self.partition {
            body.extend(partition.to_le_bytes());
        }
        if let Some(timestamp) = self.timestamp_ms {
            body.extend(timestamp.to_le_bytes());
        }
        for data in [self.key, self.value].into_iter().flatten() {
            put(&mut body, data)?;
        }
        if let Some(origin) = self.origin {
            put(&mut body, origin.topic.as_bytes())?;
            body.extend(origin.partition.to_le_bytes());
            body.extend(origin.offset.to_le_bytes());
        }
        body.extend(u32::try_from(self.headers.len()).ok()?.to_le_bytes());
        for header in &self.headers {
            body.push(header.expendable << 1 | flag(header.value, 1));
            put(&mut body, header.name)?;
            if let Some(value) = header.value {
                put(&mut body, value)?;
            }
        }
        u32::try_from(body.len()).is_ok().then_some(body)
    }

    fn decode(body: &'a [u8]) -> Option<Self> {
        let mut rest = Rest(body);
        let spooled_at_ms = i64::from_le_bytes(rest.array()?);
        let [flags] = rest.array()?;
        if flags >= HAS_ORIGIN << 1 {
            return None;
        }
        let has = |flag| flags & flag != 0;
        let topic = rest.text()?;
        let partition = rest.when(has(HAS_PARTITION), |rest| {
            rest.array().map(i32::from_le_bytes)
        })?;
        let timestamp_ms = rest.when(has(HAS_TIMESTAMP), |rest| {
            rest.array().map(i64::from_le_bytes)
        })?;
        let key = rest.when(has(HAS_KEY), Rest::data)?;
        let value = rest.when(has(HAS_VALUE), Rest::data)?;
        let origin = rest.when(has(HAS_ORIGIN), |rest| {
            Some(Place {
                topic: rest.text()?,
                partition: i32::from_le_bytes(rest.array()?),
                offset: i64::from_le_bytes(rest.array()?),
            })
        })?;
        let count = u32::from_le_bytes(rest.array()?);
        // Each takes five bytes at least: a count that lies reserves nothing.
        let mut headers = Vec::with_capacity((count as usize).min(rest.0.len() / 5));
        for _ in 0..count {
            let [flags] = rest.array()?;
            headers.push(Header {
                name: rest.data()?,
                value: rest.when(flags & 1 != 0, Rest::data)?,
                expendable: flags >> 1,
            });
        }
        rest.0.is_empty().then_some(Entry {
            spooled_at_ms,
            topic,
            partition,
            timestamp_ms,
            key,
            value,
            origin,
            headers,
        })
    }
}

fn flag<T>(value: Option<T>, flag: u8) -> u8 {
    if value.is_some() { flag } else { 0 }
}

fn put(body: &mut Vec<u8>, data: &[u8]) -> Option<()> {
    body.extend(u32::try_from(data.len()).ok()?.to_le_bytes());
    body.extend(data);
    Some(())
}

/// What is left to decode.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*array)
    }

    fn data(&mut self) -> Option<&'a [u8]> {
        let length = u32::from_le_bytes(self.array()?);
        let (data, rest) = self.0.split_at_checked(length as usize)?;
        self.0 = rest;
        Some(data)
    }

    fn text(&mut self) -> Option<&'a str> {
        std::str::from_utf8(self.data()?).ok()
    }

    /// The outer `None`: malformed.
    fn when<T>(
        &mut self,
        there: bool,
        read: impl FnOnce(&mut Self) -> Option<T>,
    ) -> Option<Option<T>> {
        if there {
            read(self).map(Some)
        } else {
            Some(None)
        }
    }
}

/// What a file begins with.
pub(crate) fn header(salt: Salt) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..7].copy_from_slice(MAGIC);
    header[7] = VERSION;
    header[8..16].copy_from_slice(&salt.0);
    seal(&mut header);
    header
}

/// What stands before a body. Bodies come from [`Entry::encode`], which bounds them.
pub(crate) fn head(salt: Salt, body: &[u8]) -> [u8; HEAD] {
    let length = u32::try_from(body.len()).expect("no body is larger than 4 GiB");
    let mut head = [0; HEAD];
    head[..8].copy_from_slice(&salt.0);
    head[8..12].copy_from_slice(&length.to_le_bytes());
    head[12..16].copy_from_slice(&crc32c(body).to_le_bytes());
    seal(&mut head);
    head
}

fn seal(sealed: &mut [u8; 20]) {
    let crc = crc32c(&sealed[..16]);
    sealed[16..].copy_from_slice(&crc.to_le_bytes());
}

fn is_sealed(sealed: &[u8]) -> bool {
    sealed.len() == 20 && crc32c(&sealed[..16]).to_le_bytes() == sealed[16..]
}

/// Why nothing can be read from a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unreadable {
    #[error("it is no spool file, or its beginning is damaged")]
    Damaged,
    #[error("it is of version {0}, and this library reads version {VERSION}")]
    Version(u8),
}

/// A piece of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Piece<'a> {
    /// A frame that is as it was written.
    Whole(Entry<'a>),
    /// It is not what was written; whatever it was, it was whole once.
    Damaged,
    /// The end of a file whose writer did not get any further.
    Torn,
}

/// Goes through a file piece by piece: together they are all of it, but for the header.
#[derive(Debug, Clone)]
pub(crate) struct Pieces<'a> {
    bytes: &'a [u8],
    salt: Salt,
    at: usize,
    /// There are frames behind it all the same.
    header_damaged: bool,
}

enum Frame<'a> {
    Whole(usize, Option<Entry<'a>>),
    CutOff,
    Broken,
}

impl<'a> Pieces<'a> {
    pub(crate) fn of(bytes: &'a [u8]) -> Result<Self, Unreadable> {
        let pieces = |salt, at, header_damaged| Pieces {
            bytes,
            salt,
            at,
            header_damaged,
        };
        let Some(header) = bytes.get(..HEADER) else {
            // Nothing was ever said to be in it.
            let begun = bytes.iter().zip(MAGIC).all(|(a, b)| a == b);
            return begun
                .then(|| pieces(Salt([0; 8]), 0, false))
                .ok_or(Unreadable::Damaged);
        };
        let salt = |bytes: &[u8]| Salt(bytes.try_into().expect("a salt has eight bytes"));
        if header.starts_with(MAGIC) && is_sealed(header) {
            return match header[7] {
                VERSION => Ok(pieces(salt(&header[8..16]), HEADER, false)),
                other => Err(Unreadable::Version(other)),
            };
        }
        // The first frame vouches for the salt as well.
        match bytes.get(HEADER..HEADER + HEAD) {
            Some(head) if is_sealed(head) => Ok(pieces(salt(&head[..8]), 0, true)),
            _ => Err(Unreadable::Damaged),
        }
    }

    fn frame(&self, at: usize) -> Frame<'a> {
        let rest = &self.bytes[at..];
        let Some((head, rest)) = rest.split_at_checked(HEAD) else {
            return Frame::CutOff;
        };
        if head[..8] != self.salt.0 || !is_sealed(head) {
            return Frame::Broken;
        }
        let number = |at: usize| {
            let bytes = head[at..at + 4].try_into().expect("four bytes");
            u32::from_le_bytes(bytes)
        };
        match rest.get(..number(8) as usize) {
            None => Frame::CutOff,
            Some(body) if crc32c(body) == number(12) => {
                Frame::Whole(at + HEAD + body.len(), Entry::decode(body))
            }
            Some(_) => Frame::Broken,
        }
    }

    /// Where the next frame begins whose head is right.
    fn resume(&self, from: usize) -> usize {
        let starts = self.bytes[from..].windows(HEAD).enumerate();
        starts
            .filter(|(_, head)| head[..8] == self.salt.0 && is_sealed(head))
            .map(|(at, _)| from + at)
            .next()
            .unwrap_or(self.bytes.len())
    }
}

impl<'a> Iterator for Pieces<'a> {
    type Item = (Range<usize>, Piece<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let at = self.at;
        if at == self.bytes.len() {
            return None;
        }
        let (end, piece) = if std::mem::take(&mut self.header_damaged) {
            (HEADER, Piece::Damaged)
        } else {
            match self.frame(at) {
                Frame::Whole(end, entry) => (end, entry.map_or(Piece::Damaged, Piece::Whole)),
                Frame::CutOff => (self.bytes.len(), Piece::Torn),
                Frame::Broken => (self.resume(at + 1), Piece::Damaged),
            }
        };
        self.at = end;
        Some((at..end, piece))
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, option, prelude::*};

    use super::*;

    type Data = Vec<u8>;

    #[derive(Debug, Clone)]
    struct Owned {
        numbers: (i64, Option<i32>, Option<i64>),
        topic: String,
        key: Option<Data>,
        value: Option<Data>,
        origin: Option<(String, i32, i64)>,
        headers: Vec<(Data, Option<Data>, u8)>,
    }

    impl Owned {
        fn entry(&self) -> Entry<'_> {
            Entry {
                spooled_at_ms: self.numbers.0,
                topic: &self.topic,
                partition: self.numbers.1,
                timestamp_ms: self.numbers.2,
                key: self.key.as_deref(),
                value: self.value.as_deref(),
                origin: self
                    .origin
                    .as_ref()
                    .map(|(topic, partition, offset)| Place {
                        topic,
                        partition: *partition,
                        offset: *offset,
                    }),
                headers: self
                    .headers
                    .iter()
                    .map(|(name, value, expendable)| Header {
                        name,
                        value: value.as_deref(),
                        expendable: *expendable,
                    })
                    .collect(),
            }
        }
    }

    fn data() -> impl Strategy<Value = Data> {
        vec(any::<u8>(), 0..20)
    }

    prop_compose! {
        fn owned()(
            numbers in any::<(i64, Option<i32>, Option<i64>)>(),
            topic in "[a-z.]{1,12}",
            key in option::of(data()),
            value in option::of(data()),
            origin in option::of(("[a-z]{1,5}", any::<i32>(), any::<i64>())),
            headers in vec((data(), option::of(data()), 0_u8..3), 0..4),
        ) -> Owned {
            Owned { numbers, topic, key, value, origin, headers }
        }
    }

    const SALT: Salt = Salt(*b"\x01salt\xff\x00\x02");

    /// The file, and where each frame ends.
    fn file(entries: &[Owned]) -> (Vec<u8>, Vec<usize>) {
        let mut file = header(SALT).to_vec();
        let ends = entries.iter().map(|entry| {
            let body = entry.entry().encode().unwrap();
            file.extend(head(SALT, &body));
            file.extend(body);
            file.len()
        });
        let ends = ends.collect();
        (file, ends)
    }

    fn whole<'a>(bytes: &'a [u8]) -> Vec<Entry<'a>> {
        let pieces = Pieces::of(bytes).into_iter().flatten();
        pieces
            .filter_map(|(_, piece)| match piece {
                Piece::Whole(entry) => Some(entry),
                _ => None,
            })
            .collect()
    }

    fn count(bytes: &[u8], wanted: &Piece<'_>) -> usize {
        let pieces = Pieces::of(bytes).into_iter().flatten();
        pieces.filter(|(_, piece)| piece == wanted).count()
    }

    proptest! {
        #[test]
        fn what_was_written_is_read(entries in vec(owned(), 0..6)) {
            let (file, _) = file(&entries);
            let expected: Vec<_> = entries.iter().map(Owned::entry).collect();
            prop_assert_eq!(whole(&file), expected);
            prop_assert_eq!(count(&file, &Piece::Damaged) + count(&file, &Piece::Torn), 0);
        }

        // P1
        #[test]
        fn of_a_file_that_was_cut_off_anywhere_every_whole_record_is_read_and_the_rest_is_torn(
            entries in vec(owned(), 1..5),
            at in any::<prop::sample::Index>(),
        ) {
            let (file, ends) = file(&entries);
            let cut = at.index(file.len() + 1);
            let left = ends.iter().filter(|end| **end <= cut).count();
            let expected: Vec<_> = entries[..left].iter().map(Owned::entry).collect();
            prop_assert_eq!(whole(&file[..cut]), expected);
            prop_assert_eq!(count(&file[..cut], &Piece::Damaged), 0);
            let boundary = ends.contains(&cut) || cut == HEADER || cut == 0;
            prop_assert_eq!(count(&file[..cut], &Piece::Torn), usize::from(!boundary));
        }

        // P2
        #[test]
        fn a_byte_that_flipped_anywhere_costs_one_record_at_most_and_is_noticed(
            entries in vec(owned(), 1..5),
            at in any::<prop::sample::Index>(),
            flip in 1_u8..,
        ) {
            let (mut file, ends) = file(&entries);
            let at = at.index(file.len());
            file[at] ^= flip;
            let hit = ends.iter().position(|end| at < *end).filter(|_| at >= HEADER);
            let others = entries.iter().enumerate().filter(|(n, _)| Some(*n) != hit);
            let expected: Vec<_> = others.map(|(_, entry)| entry.entry()).collect();
            prop_assert_eq!(whole(&file), expected);
            prop_assert_eq!(count(&file, &Piece::Damaged), 1, "it is not taken for a torn end");
            prop_assert_eq!(count(&file, &Piece::Torn), 0);
        }

        // P1, P2: whatever happened, what is read had been written.
        #[test]
        fn no_damage_makes_a_record_that_was_never_written(
            entries in vec(owned(), 0..5),
            damage in vec((any::<prop::sample::Index>(), 0_usize..30, vec(any::<u8>(), 0..30)), 1..4),
        ) {
            let (mut file, _) = file(&entries);
            for (at, length, bytes) in damage {
                let at = at.index(file.len() + 1);
                let end = (at + length).min(file.len());
                file.splice(at..end, bytes);
            }
            let written: Vec<_> = entries.iter().map(Owned::entry).collect();
            let mut at = 0;
            for entry in whole(&file) {
                let found = written[at..].iter().position(|known| *known == entry);
                prop_assert!(found.is_some(), "{entry:?}");
                at += found.unwrap() + 1;
            }
            if let Ok(pieces) = Pieces::of(&file) {
                let header = if pieces.at == 0 { 0 } else { HEADER };
                let covered: usize = pieces.map(|(range, _)| range.len()).sum();
                prop_assert_eq!(covered + header, file.len(), "every byte is in one piece");
            }
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in vec(any::<u8>(), 0..200)) {
            let _ = whole(&bytes);
            let _ = whole(&[&header(SALT)[..], &bytes].concat());
            let _ = Entry::decode(&bytes);
            let sealed = [&header(SALT)[..], &head(SALT, &bytes), &bytes].concat();
            let _ = whole(&sealed);
        }
    }

    fn plain(value: &[u8]) -> Owned {
        Owned {
            numbers: (1, None, None),
            topic: "letters".into(),
            key: None,
            value: Some(value.into()),
            origin: None,
            headers: Vec::new(),
        }
    }

    #[test]
    fn a_payload_that_looks_like_a_spool_file_is_not_read_as_one() {
        let inner = {
            let body = plain(b"forged").entry().encode().unwrap();
            let other = Salt(*b"anything");
            [&header(other)[..], &head(other, &body), &body].concat()
        };
        let (mut file, ends) = file(&[plain(&inner), plain(b"next")]);
        file[ends[0] - 1] ^= 1;
        assert_eq!(whole(&file), [plain(b"next").entry()]);
        file[HEADER + 10] ^= 1;
        assert_eq!(whole(&file), [plain(b"next").entry()]);
    }

    #[test]
    fn a_file_of_a_later_version_is_not_touched() {
        let mut later = header(SALT);
        later[7] = 2;
        seal(&mut later);
        assert_eq!(Pieces::of(&later).unwrap_err(), Unreadable::Version(2));
        assert_eq!(
            Pieces::of(&[7; 40]).unwrap_err(),
            Unreadable::Damaged,
            "and nor is a file of somebody else"
        );
    }
}
