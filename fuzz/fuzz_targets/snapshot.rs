//! Snapshots in commit metadata: any text, any content under a right checksum, and what was written by us.
#![no_main]

use std::ops::Range;

use libfuzzer_sys::fuzz_target;
use reliable_consumer::internals::Snapshots;

fuzz_target!(|input: &[u8]| {
    let Some((&form, rest)) = input.split_first() else {
        return;
    };
    let Some((offset, data)) = rest.split_first_chunk() else {
        return;
    };
    let committed = i64::from_le_bytes(*offset) & i64::MAX;
    let snapshots = Snapshots::new();

    for text in [data, &[b"rc1", data].concat()] {
        if let Some(finished) = snapshots.decode(text, committed) {
            assert_sound(&finished, committed, text.len());
        }
    }

    let forged = snapshots.forge(committed as u64, form & 3, data);
    if let Some(finished) = snapshots.decode(forged.as_bytes(), committed) {
        assert_sound(&finished, committed, forged.len());
    }

    let mut at = committed;
    let written: Vec<_> = data
        .chunks_exact(3)
        .map_while(|step| {
            let start = at.checked_add(i64::from(step[0]) * (1 << (step[2] & 15)))?;
            at = start.checked_add(i64::from(step[1]) + 1)?;
            // No log is that long, and a bitmap that reaches beyond the largest number is refused.
            (at < i64::MAX - (1 << 16)).then_some(start..at)
        })
        .collect();
    let limit = usize::from(form) * 17;
    let (text, cut) = snapshots.encode(committed, &written, limit);
    assert!(text.len() <= limit);
    let kept = joined(&written, cut.unwrap_or(i64::MAX));
    assert_eq!(snapshots.decode(text.as_bytes(), committed), Some(kept));
});

/// Ascending ranges at or above the committed offset that do not touch, and no more than a text this long can hold.
fn assert_sound(finished: &[Range<i64>], committed: i64, length: usize) {
    assert!(finished.len() <= 4 * length);
    assert!(
        finished
            .iter()
            .all(|range| committed <= range.start && range.start < range.end)
    );
    assert!(finished.windows(2).all(|pair| pair[0].end < pair[1].start));
}

fn joined(ranges: &[Range<i64>], cut: i64) -> Vec<Range<i64>> {
    let mut joined: Vec<Range<i64>> = Vec::new();
    for range in ranges {
        let range = range.start..range.end.min(cut);
        match joined.last_mut() {
            _ if range.is_empty() => {}
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range),
        }
    }
    joined
}
