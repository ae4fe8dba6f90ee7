//! Spool files: any bytes, any content of a frame under right checksums, and files of ours that were damaged.
#![no_main]

use libfuzzer_sys::fuzz_target;
use reliable_consumer::internals::{spool_entries, spool_file};

fuzz_target!(|input: &[u8]| {
    spool_entries(input);
    let Some((damage, data)) = input.split_first_chunk::<8>() else {
        return;
    };
    let [cut, at, flip, size, salt @ ..] = *damage;
    let salt = [&salt[..], b"salt"].concat();
    let salt = salt.try_into().expect("eight bytes");
    let values: Vec<&[u8]> = data.chunks(usize::from(size) + 1).collect();
    let whole = spool_file(salt, &values);
    let written = spool_entries(&whole);
    assert!(
        written
            .iter()
            .map(|(_, value)| value.as_deref())
            .eq(values.iter().map(|value| Some(*value)))
    );

    // A file within a file, and bytes of the fuzzer's own behind the right beginning.
    spool_entries(&[&whole[..20], data].concat());
    let mut damaged = whole.clone();
    let place = usize::from(at) * 37 % damaged.len();
    damaged[place] ^= flip;
    damaged.truncate(whole.len() - usize::from(cut) % whole.len());
    // Data that holds frames of this very file could be read as such; a salt that nobody knows prevents that.
    if data.windows(8).any(|it| it == salt) {
        return;
    }
    let mut at = 0;
    for entry in spool_entries(&damaged) {
        let found = written[at..].iter().position(|known| *known == entry);
        at += found.expect("what is read had been written, in that order") + 1;
    }
});
