//! Bytes that anybody may have written, made fit for a terminal and for JSON.

use std::fmt::Write as _;

use serde::de::IgnoredAny;
use serde_json::{Value, json};

/// A line of a hexadecimal dump has so many bytes.
const ROW: usize = 16;

/// Changes nothing on a terminal but the place where the next character goes. Not so: control characters, which terminals
/// obey, and those that hide themselves or turn the direction of what stands beside them.
fn is_harmless(c: char) -> bool {
    !c.is_control()
        && !matches!(
            c,
            '\u{ad}'
                | '\u{61c}'
                | '\u{180e}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}'
        )
}

/// So many of a thing.
pub fn count(number: u64, thing: &str) -> String {
    let ending = if number == 1 { "" } else { "s" };
    format!("{number} {thing}{ending}")
}

/// On one line, with everything escaped that is not harmless. Longer than `limit` characters it is cut.
pub fn line(bytes: &[u8], limit: usize) -> String {
    let mut out = String::new();
    let mut left = limit;
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            if left == 0 {
                out.push('…');
                return out;
            }
            left -= 1;
            match c {
                '\\' => out.push_str("\\\\"),
                c if is_harmless(c) => out.push(c),
                c => out.extend(c.escape_default()),
            }
        }
        for byte in chunk.invalid() {
            if left == 0 {
                out.push('…');
                return out;
            }
            left -= 1;
            let _ = write!(out, "\\x{byte:02x}");
        }
    }
    out
}

/// A payload on as many lines as it needs: JSON indented, text as it is but for what is not harmless, else hexadecimal.
/// What is longer than about `limit` bytes is cut, and that is said.
pub fn payload(bytes: &[u8], limit: usize) -> String {
    if let Some(json) = indented(bytes, limit) {
        return json;
    }
    let mut out = String::new();
    match str::from_utf8(bytes) {
        Ok(text) if !text.contains(is_binary) => {
            let shown = cut(text, limit);
            for c in shown.chars() {
                match c {
                    '\n' | '\t' => out.push(c),
                    c if is_harmless(c) => out.push(c),
                    c => out.extend(c.escape_default()),
                }
            }
            said_if_cut(&mut out, shown.len(), bytes.len());
        }
        _ => {
            // A byte takes four characters.
            let shown = bytes.len().min(limit / 4);
            for (row, bytes) in bytes[..shown].chunks(ROW).enumerate() {
                if row > 0 {
                    out.push('\n');
                }
                let _ = write!(out, "{:08x} ", row * ROW);
                for byte in bytes {
                    let _ = write!(out, " {byte:02x}");
                }
                let gap = (ROW - bytes.len()) * 3 + 2;
                let _ = write!(out, "{:gap$}", "");
                out.extend(bytes.iter().map(|byte| match byte {
                    b' '..=b'~' => char::from(*byte),
                    _ => '.',
                }));
            }
            said_if_cut(&mut out, shown, bytes.len());
        }
    }
    out
}

/// No text has it.
fn is_binary(c: char) -> bool {
    c.is_control() && !matches!(c, '\n' | '\r' | '\t' | '\u{1b}')
}

fn said_if_cut(out: &mut String, shown: usize, all: usize) {
    if shown < all {
        let _ = write!(
            out,
            "\n… {} of {all} bytes are shown; --full shows all",
            shown
        );
    }
}

/// An object or an array of JSON, a value a line. Numbers and names stay as they are written.
fn indented(bytes: &[u8], limit: usize) -> Option<String> {
    let text = str::from_utf8(bytes).ok()?.trim_ascii();
    if !text.starts_with(['{', '[']) {
        return None;
    }
    serde_json::from_str::<IgnoredAny>(text).ok()?;
    let mut out = String::new();
    let (mut depth, mut in_string, mut escaped, mut opened) = (0, false, false, false);
    let break_line = |out: &mut String, depth: usize| {
        out.push('\n');
        out.extend(std::iter::repeat_n("  ", depth));
    };
    for (at, c) in text.char_indices() {
        if out.len() > limit {
            said_if_cut(&mut out, at, bytes.len());
            return Some(out);
        }
        if in_string {
            match c {
                c if is_harmless(c) => out.push(c),
                c => escape_json(&mut out, c),
            }
            in_string = escaped || c != '"';
            escaped = !escaped && c == '\\';
            continue;
        }
        if c.is_ascii_whitespace() {
            continue;
        }
        if matches!(c, '}' | ']') {
            depth -= 1;
            if !opened {
                break_line(&mut out, depth);
            }
        } else if opened {
            break_line(&mut out, depth);
        }
        opened = matches!(c, '{' | '[');
        out.push(c);
        match c {
            '{' | '[' => depth += 1,
            ',' => break_line(&mut out, depth),
            ':' => out.push(' '),
            '"' => in_string = true,
            _ => {}
        }
    }
    Some(out)
}

fn escape_json(out: &mut String, c: char) {
    for unit in c.encode_utf16(&mut [0; 2]) {
        let _ = write!(out, "\\u{unit:04x}");
    }
}

/// JSON on one line, in which a terminal finds nothing to obey either.
pub fn json_line(value: &Value) -> String {
    let written = value.to_string();
    if written.chars().all(is_harmless) {
        return written;
    }
    let mut out = String::with_capacity(written.len());
    for c in written.chars() {
        match c {
            c if is_harmless(c) => out.push(c),
            // Only strings have such characters.
            c => escape_json(&mut out, c),
        }
    }
    out
}

/// Its beginning, of at most so many bytes.
pub fn cut(text: &str, limit: usize) -> &str {
    let mut end = text.len().min(limit);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// `{"text": …}`, `{"base64": …}` or null.
pub fn json_bytes(bytes: Option<&[u8]>) -> Value {
    match bytes.map(|bytes| (bytes, str::from_utf8(bytes))) {
        None => Value::Null,
        Some((_, Ok(text))) => json!({ "text": text }),
        Some((bytes, Err(_))) => json!({ "base64": base64(bytes) }),
    }
}

pub fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let mut word = [0; 4];
        word[1..=three.len()].copy_from_slice(three);
        let word = u32::from_be_bytes(word);
        for digit in 0..4 {
            let sextet = word >> (18 - 6 * digit) & 63;
            out.push(match digit <= three.len() {
                true => char::from(DIGITS[sextet as usize]),
                false => '=',
            });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "a\u{1b}[2J\u{9b}31m\u{7}\r\u{202e}evil\u{200b}\u{2028}b";

    #[test]
    fn what_hides_or_turns_what_stands_beside_it_is_escaped() {
        let hidden = "\u{0}\u{7f}\u{9b}\u{ad}\u{61c}\u{180e}\u{200b}\u{200e}\u{200f}\u{2028}\u{2029}\u{202a}\u{202e}\
                      \u{2060}\u{2066}\u{2069}\u{206f}\u{feff}\u{fff9}\u{fffb}\u{e0001}\u{e0041}\u{e007f}";
        for c in hidden.chars() {
            let text = format!("a{c}b");
            assert!(!line(text.as_bytes(), 100).contains(c), "{c:?}");
            assert!(!payload(text.as_bytes(), 100).contains(c), "{c:?}");
            let json = json_line(&json!({ "a": text }));
            assert!(!json.contains(c), "{c:?}");
            let indented = payload(format!("[\"{text}\"]").as_bytes(), 100);
            assert!(!indented.contains(c), "{c:?}");
        }
        assert_eq!(line("äß漢👍".as_bytes(), 100), "äß漢👍");
    }

    #[test]
    fn nothing_that_a_terminal_obeys_comes_through() {
        let harmless = |text: &str| text.chars().all(|c| c == '\n' || is_harmless(c));
        let json = format!(r#"{{"a": "{}"}}"#, "\u{9b}\u{7f}\u{202e}x\u{e0041}");
        for bytes in [
            HOSTILE.as_bytes(),
            json.as_bytes(),
            b"\xff\x1b[0m\x00",
            b"\x1b]0;t\x07",
        ] {
            assert!(harmless(&line(bytes, 100)), "{:?}", line(bytes, 100));
            assert!(
                harmless(&payload(bytes, 1_000)),
                "{:?}",
                payload(bytes, 1_000)
            );
            let line = json_line(&json_bytes(Some(bytes)));
            assert!(harmless(&line), "{line:?}");
        }
        let line = json_line(&json_bytes(Some(HOSTILE.as_bytes())));
        let back: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(back["text"], HOSTILE, "and nothing is lost by it");
    }

    #[test]
    fn json_is_indented_and_otherwise_as_it_was_written() {
        let written = br#" {"b":1e999 , "a":[1.10,{}, []],"b":"x\"}{",  "c":9007199254740993}"#;
        let expected = r#"{
  "b": 1e999,
  "a": [
    1.10,
    {},
    []
  ],
  "b": "x\"}{",
  "c": 9007199254740993
}"#;
        assert_eq!(payload(written, 10_000), expected);
    }

    #[test]
    fn what_is_no_json_is_text_or_hexadecimal_and_nothing_panics() {
        assert_eq!(payload(b"{\"a\": tru}\nb\t", 100), "{\"a\": tru}\nb\t");
        assert_eq!(payload(b"", 100), "");
        let deep = "[".repeat(100_000);
        assert!(payload(deep.as_bytes(), 100).contains("of 100000 bytes are shown"));
        let dump = payload(b"\x00\x01abcdefghijklmnop\xff", 1_000);
        let expected = "00000000  00 01 61 62 63 64 65 66 67 68 69 6a 6b 6c 6d 6e  ..abcdefghijklmn\n\
                        00000010  6f 70 ff                                         op.";
        assert_eq!(dump, expected);
        assert_eq!(line("äöü".as_bytes(), 2), "äö…");
        assert_eq!(line(b"a\\x1b\xf0\x9f", 9), "a\\\\x1b\\xf0\\x9f");
        assert!(payload("ä".repeat(100).as_bytes(), 51).starts_with(&"ä".repeat(25)));
    }

    #[test]
    fn long_json_is_cut_where_it_stands() {
        let long = format!("[{}1]", "1,".repeat(10_000));
        let shown = payload(long.as_bytes(), 200);
        assert!(shown.len() < 400 && shown.contains("--full"), "{shown}");
    }

    #[test]
    fn bytes_that_are_no_text_are_base64_in_json() {
        for (bytes, expected) in [
            (&b"\xff"[..], "/w=="),
            (b"\xff\xfe", "//4="),
            (b"\xffab", "/2Fi"),
        ] {
            assert_eq!(json_bytes(Some(bytes))["base64"], expected);
        }
        assert_eq!(json_bytes(Some(b""))["text"], "");
        assert_eq!(json_bytes(None), Value::Null);
    }
}
