//! Headers of a record, flattened into its chunk's buffer, and the reading of them.
//!
//! One header is the name's length, the name, the value's length plus one (zero for a null value), the value. Lengths
//! are LEB128, which makes a record in memory never longer than it was on the wire: a chunk's 32-bit positions hold.

use std::fmt;

/// The headers of a record, in the order they were produced. Names may repeat, and neither names nor values need be
/// UTF-8: they are kept byte for byte.
#[derive(Clone, Copy)]
pub struct Headers<'a> {
    flat: &'a [u8],
}

/// One header of a record.
#[derive(Clone, Copy)]
pub struct Header<'a> {
    name: &'a [u8],
    value: Option<&'a [u8]>,
}

impl<'a> Headers<'a> {
    pub(super) fn new(flat: &'a [u8]) -> Self {
        Self { flat }
    }

    /// All headers, in the order they were produced.
    pub fn iter(&self) -> impl Iterator<Item = Header<'a>> + use<'a> {
        let mut rest = self.flat;
        std::iter::from_fn(move || (!rest.is_empty()).then(|| read(&mut rest)))
    }

    /// The value of the last header with this name whose value is not null.
    pub fn get(&self, name: &str) -> Option<&'a [u8]> {
        self.get_all(name).flatten().last()
    }

    /// The values of all headers with this name, in the order they were produced. `None` is a null value.
    pub fn get_all(&self, name: &str) -> impl Iterator<Item = Option<&'a [u8]>> {
        self.iter()
            .filter(move |header| header.name == name.as_bytes())
            .map(|header| header.value)
    }

    /// [`get`](Self::get) as text, or `None` if that value is not UTF-8.
    pub fn get_str(&self, name: &str) -> Option<&'a str> {
        self.get(name).and_then(|value| str::from_utf8(value).ok())
    }

    /// How many headers there are. Counts them: takes time in proportion.
    pub fn len(&self) -> usize {
        self.iter().count()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.flat.is_empty()
    }
}

impl<'a> Header<'a> {
    /// The name, or `None` if it is not UTF-8.
    pub fn name(&self) -> Option<&'a str> {
        str::from_utf8(self.name).ok()
    }

    /// The name as it stands in the record.
    pub fn name_bytes(&self) -> &'a [u8] {
        self.name
    }

    /// The value. `None` is a null value, which differs from an empty one.
    pub fn value(&self) -> Option<&'a [u8]> {
        self.value
    }
}

/// Names and sizes; never a value.
impl fmt::Debug for Headers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// Name and size; never the value.
impl fmt::Debug for Header<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Header")
            .field("name", &String::from_utf8_lossy(self.name))
            .field("value_bytes", &self.value.map(<[u8]>::len))
            .finish()
    }
}

pub(super) fn write(flat: &mut Vec<u8>, name: &[u8], value: Option<&[u8]>) {
    write_length(flat, name.len());
    flat.extend_from_slice(name);
    write_length(flat, value.map_or(0, |value| value.len() + 1));
    flat.extend_from_slice(value.unwrap_or_default());
}

#[inline]
fn read<'a>(flat: &mut &'a [u8]) -> Header<'a> {
    let name_length = read_length(flat);
    let name = take(flat, name_length);
    let value = read_length(flat)
        .checked_sub(1)
        .map(|length| take(flat, length));
    Header { name, value }
}

fn take<'a>(flat: &mut &'a [u8], length: usize) -> &'a [u8] {
    flat.split_off(..length)
        .expect("flattened headers hold what their lengths say")
}

fn write_length(flat: &mut Vec<u8>, mut length: usize) {
    while length >= 0x80 {
        flat.push(length as u8 | 0x80);
        length >>= 7;
    }
    flat.push(length as u8);
}

#[inline]
fn read_length(flat: &mut &[u8]) -> usize {
    // Nearly all of them.
    if let [byte @ ..0x80, rest @ ..] = *flat {
        *flat = rest;
        return usize::from(*byte);
    }
    let (mut length, mut shift) = (0, 0);
    loop {
        let byte = *flat
            .split_off_first()
            .expect("flattened headers hold a length before each name and value");
        length |= usize::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return length;
        }
        shift += 7;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flatten(headers: &[(&[u8], Option<&[u8]>)]) -> Vec<u8> {
        let mut flat = Vec::new();
        for (name, value) in headers {
            write(&mut flat, name, *value);
        }
        flat
    }

    // D4
    #[test]
    fn hostile_headers_come_back_byte_for_byte_and_in_order() {
        let large = vec![0xa5; 64 * 1024];
        let written: &[(&[u8], Option<&[u8]>)] = &[
            (b"\xff\xfe name", Some(b"\x80\x00\xff")),
            (b"twice", Some(b"1")),
            (b"", Some(b"no name")),
            (b"null", None),
            (b"empty", Some(b"")),
            (b"large", Some(&large)),
            (b"twice", Some(b"2")),
            (b"127", Some(&large[..127])),
            (b"128", Some(&large[..128])),
        ];
        let flat = flatten(written);
        let headers = Headers::new(&flat);
        let read: Vec<_> = headers
            .iter()
            .map(|h| (h.name_bytes(), h.value()))
            .collect();
        assert_eq!(read, written);
        assert_eq!(headers.len(), written.len());
        assert_eq!(headers.iter().next().and_then(|h| h.name()), None);
    }

    #[test]
    fn the_last_value_that_is_not_null_wins() {
        let flat = flatten(&[
            (b"a", Some(b"1")),
            (b"a", Some(b"2")),
            (b"a", None),
            (b"b", Some(b"\xff")),
        ]);
        let headers = Headers::new(&flat);
        assert_eq!(headers.get("a"), Some(&b"2"[..]));
        assert_eq!(headers.get_str("a"), Some("2"));
        assert_eq!(headers.get_all("a").count(), 3);
        assert_eq!(headers.get_str("b"), None, "not UTF-8");
        assert_eq!(headers.get("c"), None);
    }

    #[test]
    fn debug_output_shows_names_and_sizes_but_no_values() {
        let flat = flatten(&[(b"authorization", Some(b"secret"))]);
        let shown = format!("{:?}", Headers::new(&flat));
        assert!(shown.contains("authorization") && shown.contains("Some(6)"));
        assert!(!shown.contains("secret"));
    }
}
