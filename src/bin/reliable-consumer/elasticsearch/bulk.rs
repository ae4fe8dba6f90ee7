//! What is sent with one request, and what the answer says about each document of it.

use serde_json::Value;

use crate::place::Place;

/// Documents, and bytes, of a request.
pub const DOCUMENTS: usize = 1_000;
const BYTES: usize = 4 << 20;

/// What `_bulk` is asked to leave out: all but what is looked at.
pub const PATH: &str = "_bulk?filter_path=items.*.status,items.*.error";

#[derive(Clone, Debug)]
pub struct Document {
    pub place: Place,
    /// Action and source, a line each.
    pub lines: String,
}

impl Document {
    pub fn new(index: &str, id: &str, place: Place, source: &Value) -> Self {
        let action = serde_json::json!({ "index": { "_index": index, "_id": id } });
        Self {
            place,
            lines: format!("{action}\n{source}\n"),
        }
    }
}

/// Documents on their way.
#[derive(Debug, Default)]
pub struct Batch {
    pub documents: Vec<Document>,
    bytes: usize,
}

impl Batch {
    pub fn push(&mut self, document: Document) {
        self.bytes += document.lines.len();
        self.documents.push(document);
    }

    pub fn is_full(&self) -> bool {
        self.documents.len() >= DOCUMENTS || self.bytes >= BYTES
    }
}

/// What became of a document.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    Taken,
    /// The server has too much to do, or a shard is away.
    Later(String),
    /// This one does not fit the index.
    Refused(String),
    /// No other will do better.
    Stop(String),
}

/// One for each document that was sent; `None` if this is no answer of `_bulk`.
pub fn verdicts(answer: &[u8], sent: usize) -> Option<Vec<Verdict>> {
    let answer: Value = serde_json::from_slice(answer).ok()?;
    let items = answer.get("items")?.as_array()?;
    if items.len() != sent {
        return None;
    }
    let items = items.iter().map(|item| {
        let outcome = item.as_object()?.values().next()?;
        Some((outcome.get("status")?.as_u64()?, outcome.get("error")))
    });
    let items: Vec<_> = items.collect::<Option<_>>()?;
    let any_taken = items.iter().any(|(status, _)| is_taken(*status));
    let verdicts = items.into_iter().map(|(status, error)| {
        let reason = reason(error);
        // Where nothing at all is taken, it may be the index that is wrong, not each letter.
        let is_its_own = || {
            let kind = error.and_then(|error| error.get("type"));
            kind.and_then(Value::as_str).is_some_and(|kind| {
                kind.ends_with("_parsing_exception") || kind.starts_with("strict_dynamic_mapping")
            })
        };
        match status {
            status if is_taken(status) => Verdict::Taken,
            429 | 500.. => Verdict::Later(reason),
            400 if any_taken || is_its_own() => Verdict::Refused(reason),
            _ => Verdict::Stop(reason),
        }
    });
    Some(verdicts.collect())
}

fn is_taken(status: u64) -> bool {
    (200..300).contains(&status)
}

/// The error with what caused it, as the server tells it.
pub fn reason(error: Option<&Value>) -> String {
    let mut reasons = Vec::new();
    let mut next = error;
    while let Some(error) = next {
        let told = error.as_str().or_else(|| error.get("reason")?.as_str());
        reasons.extend(told);
        next = error.get("caused_by");
        if reasons.len() == 3 {
            break;
        }
    }
    match reasons.is_empty() {
        true => "it does not say why".into(),
        false => reasons.join(": "),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn judged(items: &[(u64, &str)]) -> Option<Vec<Verdict>> {
        let items: Vec<_> = items
            .iter()
            .map(|(status, kind)| match *kind {
                "" => json!({ "index": { "status": status } }),
                kind => json!({ "index": { "status": status, "error": { "type": kind, "reason": "r" } } }),
            })
            .collect();
        verdicts(json!({ "items": items }).to_string().as_bytes(), 2)
    }

    #[test]
    fn each_document_is_judged_by_its_own_answer() {
        let r = || "r".to_owned();
        for (items, expected) in [
            ([(201, ""), (200, "")], [Verdict::Taken, Verdict::Taken]),
            (
                [
                    (429, "rejected_execution"),
                    (503, "unavailable_shards_exception"),
                ],
                [Verdict::Later(r()), Verdict::Later(r())],
            ),
            (
                [
                    (400, "mapper_parsing_exception"),
                    (400, "document_parsing_exception"),
                ],
                [Verdict::Refused(r()), Verdict::Refused(r())],
            ),
            (
                [(201, ""), (400, "illegal_argument_exception")],
                [Verdict::Taken, Verdict::Refused(r())],
            ),
            // Such as an alias without an index to write to, or an index that is read-only.
            (
                [
                    (400, "illegal_argument_exception"),
                    (403, "cluster_block_exception"),
                ],
                [Verdict::Stop(r()), Verdict::Stop(r())],
            ),
        ] {
            assert_eq!(judged(&items), Some(expected.into()), "{items:?}");
        }
    }

    #[test]
    fn what_does_not_speak_of_every_document_is_no_answer() {
        for wrong in [
            "",
            "<html>",
            "[]",
            "{}",
            r#"{"items":[{"index":{"status":200}}]}"#,
            r#"{"items":[{},{}]}"#,
            r#"{"items":[{"index":{"status":"x"}},{"index":{"status":200}}]}"#,
        ] {
            assert_eq!(verdicts(wrong.as_bytes(), 2), None, "{wrong}");
        }
    }

    #[test]
    fn a_batch_is_bounded_in_documents_and_in_bytes() {
        let place = Place {
            partition: 0,
            offset: 0,
        };
        let mut batch = Batch::default();
        while !batch.is_full() {
            batch.push(Document::new("i", "x", place, &json!({})));
        }
        assert_eq!(batch.documents.len(), DOCUMENTS);
        let mut batch = Batch::default();
        while !batch.is_full() {
            batch.push(Document::new("i", "x", place, &json!("x".repeat(1 << 20))));
        }
        assert_eq!(batch.documents.len(), 4);
    }
}
