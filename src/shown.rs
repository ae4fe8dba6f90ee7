//! What a user's code has made, called, shown and dropped: whatever it does there, it neither unwinds into us nor goes on
//! for ever, except where it never comes back to us at all.

use std::{
    any::Any,
    error::Error,
    fmt::{self, Display, Write as _},
    mem,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
};

/// Bytes of a text that are kept. Less of it is told in the end; a function that redacts it gets all of this.
const LONGEST: usize = 64 * 1024;
/// Errors of a chain that are looked at: a longer one is taken for one without an end.
pub(crate) const DEEPEST: usize = 128;
/// Writes after the one that was refused, which a `Display` that goes on all the same may still do.
const FURTHER_WRITES: usize = 1_000;

/// What the call returns, or what it panicked with.
pub(crate) fn caught<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|payload| {
        let message = panic_message(&*payload);
        drop_quietly(payload);
        message
    })
}

/// Drops what may panic even then. The panic itself has been reported by the hook.
pub(crate) fn drop_quietly<T>(value: T) {
    let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(value))) else {
        return;
    };
    // It is a user's as well. One whose payload's payload panics is not worth a third try.
    if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        mem::forget(another);
    }
}

/// A value as its `Display` writes it, cut off where that writes too much.
pub(crate) fn shown(value: &dyn Display) -> String {
    let mut text = Text::default();
    // Its own verdict on what it wrote is of no interest.
    let written = catch_unwind(AssertUnwindSafe(|| _ = write!(text, "{value}")));
    match written {
        Err(payload) if !payload.is::<Endless>() => {
            let message = panic_message(&*payload);
            drop_quietly(payload);
            format!("an error that panics when shown: {message}")
        }
        _ => text.kept,
    }
}

/// An error with its sources, as one line.
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = shown(&error);
    let mut known: Vec<*const dyn Error> = vec![error];
    let mut next = source(error);
    while let Some(error) = next {
        let round = known.iter().any(|known| is_same(*known, error));
        if round || known.len() == DEEPEST || text.len() >= LONGEST {
            break;
        }
        known.push(error);
        let inner = shown(&error);
        if !text.ends_with(&inner) {
            text.push_str(": ");
            text.push_str(&inner);
        }
        next = source(error);
    }
    cut(&mut text);
    text
}

fn source<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a (dyn Error + 'static)> {
    caught(|| error.source()).ok().flatten()
}

#[allow(
    ambiguous_wide_pointer_comparisons,
    reason = "where a type has two tables of methods, a circle is noticed the second time round"
)]
fn is_same(known: *const dyn Error, error: &(dyn Error + 'static)) -> bool {
    // The address alone is also that of an error's first field.
    std::ptr::eq(known, error)
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let text = text.unwrap_or("a panic without a message");
    text[..end(text)].to_owned()
}

fn cut(text: &mut String) {
    text.truncate(end(text));
}

/// Where it is cut: no character in two.
fn end(text: &str) -> usize {
    let mut end = text.len().min(LONGEST);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    end
}

/// What a `Display` that does not stop writing is stopped with.
struct Endless;

/// A text that takes only so much.
#[derive(Default)]
struct Text {
    kept: String,
    /// What writing has cost: an empty piece is not free, or there could be any number of them.
    spent: usize,
    refused: usize,
}

impl fmt::Write for Text {
    fn write_str(&mut self, piece: &str) -> fmt::Result {
        if self.spent < 2 * LONGEST && self.kept.len() < LONGEST {
            self.spent = self.spent.saturating_add(piece.len()).saturating_add(1);
            self.kept.push_str(&piece[..end(piece)]);
            cut(&mut self.kept);
            return Ok(());
        }
        self.refused += 1;
        if self.refused > FURTHER_WRITES {
            // Without the hook's message: nothing is wrong here.
            resume_unwind(Box::new(Endless));
        }
        Err(fmt::Error)
    }
}

#[cfg(test)]
mod tests {
    use std::panic::panic_any;

    use super::*;

    /// An error made of two functions.
    #[derive(Clone, Copy)]
    struct Odd {
        show: fn(&mut fmt::Formatter<'_>) -> fmt::Result,
        source: fn(&Odd) -> Option<&(dyn Error + 'static)>,
    }

    impl fmt::Debug for Odd {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Odd")
        }
    }

    impl Display for Odd {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            (self.show)(f)
        }
    }

    impl Error for Odd {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            (self.source)(self)
        }
    }

    fn showing(show: fn(&mut fmt::Formatter<'_>) -> fmt::Result) -> Odd {
        Odd {
            show,
            source: |_| None,
        }
    }

    #[derive(Debug, thiserror::Error)]
    #[error("{name}")]
    struct Link {
        source: Option<Box<Link>>,
        name: String,
    }

    fn links(count: usize) -> Link {
        (0..count)
            .rev()
            .fold(None, |source, n| {
                let name = n.to_string();
                Some(Box::new(Link { source, name }))
            })
            .map(|link| *link)
            .expect("there is one at least")
    }

    #[test]
    fn an_error_is_told_with_its_sources_and_none_of_them_twice() {
        assert_eq!(chain(&links(4)), "0: 1: 2: 3");
        #[derive(Debug, thiserror::Error)]
        #[error("to the database: {0}")]
        struct Wrapped(#[source] Link);
        assert_eq!(chain(&Wrapped(links(2))), "to the database: 0: 1");
    }

    #[test]
    fn an_error_that_is_its_own_source_is_told_once() {
        let own = Odd {
            show: |f| f.write_str("round"),
            source: |own| Some(own),
        };
        assert_eq!(chain(&own), "round");
    }

    #[test]
    fn errors_that_name_each_other_are_not_told_again_and_again() {
        static FIRST: Odd = Odd {
            show: |f| f.write_str("first"),
            source: |_| Some(&SECOND),
        };
        static SECOND: Odd = Odd {
            show: |f| f.write_str("second"),
            source: |_| Some(&FIRST),
        };
        let text = chain(&FIRST);
        assert!(text.starts_with("first: second"), "{text}");
        // A second time if this place has a table of methods of its own.
        assert!(text.matches("first").count() <= 2, "{text}");
    }

    #[test]
    fn a_chain_that_makes_new_errors_for_ever_is_cut_off() {
        let endless = Odd {
            show: |f| f.write_str("another"),
            source: |own| Some(Box::leak(Box::new(*own))),
        };
        assert_eq!(chain(&endless), "another");
        let long = chain(&links(10_000));
        assert!(
            long.starts_with("0: 1: 2: ") && long.ends_with(": 127"),
            "{long}"
        );
    }

    #[test]
    fn a_text_is_cut_off_and_one_that_never_ends_is_stopped() {
        fn endlessly(f: &mut fmt::Formatter<'_>, piece: &str) -> fmt::Result {
            loop {
                _ = f.write_str(piece);
            }
        }
        for (error, length) in [
            (showing(|f| endlessly(f, "ä")), LONGEST),
            (showing(|f| endlessly(f, "")), 0),
            (
                showing(|f| write!(f, "{:>65000} {:>65000}", "x", "y")),
                LONGEST,
            ),
            (
                showing(|f| f.write_str(&"€".repeat(1 << 20))),
                LONGEST / 3 * 3,
            ),
        ] {
            assert_eq!(chain(&error).len(), length);
        }
    }

    #[test]
    fn what_panics_when_it_is_shown_or_asked_is_told_so() {
        let error = showing(|_| panic!("no {}", "words"));
        assert_eq!(chain(&error), "an error that panics when shown: no words");
        let error = Odd {
            show: |f| f.write_str("that far"),
            source: |_| panic!("no cause"),
        };
        assert_eq!(chain(&error), "that far");
        let error = showing(|f| {
            f.write_str("gives up")?;
            Err(fmt::Error)
        });
        assert_eq!(chain(&error), "gives up");
    }

    #[test]
    fn what_panics_whenever_it_is_dropped_unwinds_nobody() {
        struct Stubborn;
        impl Drop for Stubborn {
            fn drop(&mut self) {
                panic_any(Stubborn);
            }
        }
        drop_quietly(Stubborn);
        let panicked = caught(|| panic_any(Stubborn));
        assert_eq!(panicked, Err("a panic without a message".into()));
        let large = caught(|| panic_any("x".repeat(10 * LONGEST)));
        assert_eq!(large.map_err(|it| it.len()), Err(LONGEST));
    }
}
