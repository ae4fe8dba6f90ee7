//! A spool on a real disk: what survives, what is set aside, who may use it.

use std::{
    env, fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Spool,
    format::{Entry, HEAD, HEADER, Piece, Pieces},
    store::{Append, Refused, Store},
};

/// A folder of its own, gone with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = env::temp_dir().join(format!("spool-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Folder(path)
    }

    fn files(&self, topic: &str, extension: &str) -> Vec<PathBuf> {
        let mut files: Vec<_> = fs::read_dir(self.0.join(topic))
            .into_iter()
            .flatten()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|it| it == extension))
            .collect();
        files.sort();
        files
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const ROOM: u64 = 64 << 20;

fn body(value: &[u8]) -> Vec<u8> {
    let entry = Entry {
        spooled_at_ms: 1_000,
        topic: "letters",
        partition: None,
        timestamp_ms: None,
        key: None,
        value: Some(value),
        origin: None,
        headers: Vec::new(),
    };
    entry.encode().unwrap()
}

fn append(store: &mut Store, topic: &str, value: &[u8]) -> Result<(), Refused> {
    let (topic, body) = (Arc::from(topic), body(value));
    let record = Append {
        topic: &topic,
        body: &body,
        spooled_at_ms: 1_000,
    };
    store.append(&[record]).remove(0)
}

/// Takes out all that is there for the topic.
fn drain(store: &mut Store, topic: &str) -> Vec<String> {
    let mut values = Vec::new();
    while let Some(loaded) = store.oldest(topic).unwrap() {
        let found = values_in(&loaded.bytes);
        values.extend_from_slice(&found[loaded.done..]);
        store.done(topic, loaded.number, found.len()).unwrap();
    }
    values
}

fn values_in(bytes: &[u8]) -> Vec<String> {
    let pieces = Pieces::of(bytes).unwrap();
    pieces
        .filter_map(|(_, piece)| match piece {
            Piece::Whole(entry) => Some(String::from_utf8_lossy(entry.value.unwrap()).into()),
            _ => None,
        })
        .collect()
}

fn open(path: &Path) -> Store {
    Store::open(path, ROOM).unwrap()
}

#[test]
fn records_come_back_in_order_by_topic_after_a_restart_and_their_files_go() {
    let folder = Folder::new("order");
    let mut store = open(&folder.0);
    for n in 0..5 {
        append(&mut store, "a.dlq", format!("a{n}").as_bytes()).unwrap();
        append(&mut store, "b.dlq", format!("b{n}").as_bytes()).unwrap();
    }
    drop(store);
    let mut store = open(&folder.0);
    append(&mut store, "a.dlq", b"a5").unwrap();
    let contents = store.contents();
    assert_eq!(
        contents.topics.values().copied().collect::<Vec<_>>(),
        [6, 5]
    );
    assert_eq!(contents.oldest_ms, Some(1_000));
    assert_eq!(
        drain(&mut store, "a.dlq"),
        ["a0", "a1", "a2", "a3", "a4", "a5"]
    );
    assert_eq!(drain(&mut store, "b.dlq"), ["b0", "b1", "b2", "b3", "b4"]);
    assert_eq!(store.contents().bytes, 0);
    assert_eq!(folder.files("a.dlq", "spool"), [] as [PathBuf; 0]);
}

#[test]
fn what_comes_while_a_segment_is_being_sent_is_kept_behind_it() {
    let folder = Folder::new("behind");
    let mut store = open(&folder.0);
    append(&mut store, "letters", b"0").unwrap();
    append(&mut store, "letters", b"1").unwrap();
    let first = store.oldest("letters").unwrap().unwrap();
    append(&mut store, "letters", b"2").unwrap();
    store.done("letters", first.number, 1).unwrap();
    assert_eq!(store.contents().topics["letters"], 2);
    assert_eq!(store.oldest("letters").unwrap().unwrap().done, 1);
    assert_eq!(drain(&mut store, "letters"), ["1", "2"]);
}

// P1
#[test]
fn a_crash_in_the_middle_of_a_write_costs_what_was_not_written_and_nothing_else() {
    for cut in 1..HEAD + 10 {
        let folder = Folder::new("torn");
        let mut store = open(&folder.0);
        append(&mut store, "letters", b"first").unwrap();
        append(&mut store, "letters", b"second").unwrap();
        drop(store);
        let path = folder.files("letters", "spool").remove(0);
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - cut]).unwrap();
        let mut store = open(&folder.0);
        let left = fs::read(&path).unwrap().len();
        assert_eq!(
            left,
            HEADER + HEAD + body(b"first").len(),
            "cut at a record"
        );
        assert_eq!(drain(&mut store, "letters"), ["first"]);
        assert_eq!(store.contents().set_aside, 0);
    }
}

// P2
#[test]
fn a_damaged_record_is_kept_aside_byte_for_byte_and_those_behind_it_are_still_there() {
    let folder = Folder::new("damaged");
    let mut store = open(&folder.0);
    for value in [&b"first"[..], b"second", b"third"] {
        append(&mut store, "letters", value).unwrap();
    }
    drop(store);
    let path = folder.files("letters", "spool").remove(0);
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.windows(6).position(|it| it == b"second").unwrap();
    bytes[at] ^= 0x20;
    fs::write(&path, &bytes).unwrap();
    let mut store = open(&folder.0);
    assert_eq!(store.contents().topics["letters"], 2);
    assert_eq!(drain(&mut store, "letters"), ["first", "third"]);
    assert_eq!(store.contents().set_aside, 1);
    let kept = fs::read(folder.files("letters", "damaged").remove(0)).unwrap();
    assert!(bytes.windows(kept.len()).any(|it| it == kept));
    assert!(kept.windows(6).any(|it| it == b"Second"));
    drop(store);
    assert_eq!(open(&folder.0).contents().set_aside, 1, "it still shows");
}

#[test]
fn a_file_that_cannot_be_read_at_all_is_kept_aside_and_others_are_not_held_up() {
    let folder = Folder::new("foreign");
    let mut store = open(&folder.0);
    append(&mut store, "letters", b"mine").unwrap();
    drop(store);
    let foreign = folder.0.join("letters/00000000000000000000.spool");
    fs::write(&foreign, [7; 100]).unwrap();
    let mut store = open(&folder.0);
    assert_eq!(drain(&mut store, "letters"), ["mine"]);
    assert_eq!(store.contents().set_aside, 1);
    assert_eq!(
        fs::read(foreign.with_extension("damaged")).unwrap(),
        [7; 100]
    );
}

#[test]
fn its_size_is_bounded_and_there_is_room_again_when_something_was_sent() {
    let folder = Folder::new("bounded");
    let mut store = Store::open(&folder.0, 2_000).unwrap();
    let mut taken = 0;
    while append(&mut store, "letters", &[b'x'; 300]).is_ok() {
        taken += 1;
    }
    assert_eq!(
        append(&mut store, "letters", &[b'x'; 300]),
        Err(Refused::Full(2_000))
    );
    let on_disk: u64 = folder
        .files("letters", "spool")
        .iter()
        .map(|path| fs::metadata(path).unwrap().len())
        .sum();
    assert!(on_disk <= 2_000 && taken >= 4, "{taken} in {on_disk} bytes");
    assert_eq!(store.contents().bytes, on_disk);
    assert_eq!(drain(&mut store, "letters").len(), taken);
    append(&mut store, "letters", &[b'x'; 300]).unwrap();
}

#[test]
fn a_record_that_its_topic_does_not_take_is_kept_and_comes_again_with_the_next_start() {
    let folder = Folder::new("refused");
    let mut store = open(&folder.0);
    append(&mut store, "letters", b"large").unwrap();
    append(&mut store, "letters", b"small").unwrap();
    let loaded = store.oldest("letters").unwrap().unwrap();
    store
        .set_aside("letters", loaded.number, 0, &body(b"large"))
        .unwrap();
    store.done("letters", loaded.number, 2).unwrap();
    assert_eq!(drain(&mut store, "letters"), [] as [&str; 0]);
    assert_eq!(store.contents().set_aside, 1);
    drop(store);
    let mut store = open(&folder.0);
    assert_eq!(store.contents().set_aside, 0);
    assert_eq!(drain(&mut store, "letters"), ["large"]);
}

#[test]
fn a_directory_has_one_user_at_a_time() {
    let folder = Folder::new("lock");
    let store = open(&folder.0);
    let refused = Store::open(&folder.0, ROOM).err().unwrap();
    assert!(refused.to_string().contains("another process"), "{refused}");
    drop(store);
    open(&folder.0);
}

#[test]
fn a_name_that_is_no_topic_makes_no_folder() {
    let folder = Folder::new("names");
    let mut store = open(&folder.0);
    for name in ["..", ".", "a/b", "", "lock"] {
        let refused = append(&mut store, name, b"x");
        assert!(
            matches!(refused, Err(Refused::Topic(_))),
            "{name}: {refused:?}"
        );
    }
}

#[tokio::test]
async fn many_that_wait_are_written_together_and_each_is_on_the_disk_when_it_is_answered() {
    let folder = Folder::new("together");
    let spool = Spool::start(folder.0.clone(), ROOM).unwrap();
    let appends: Vec<_> = (0..300)
        .map(|n| {
            let (spool, path) = (spool.clone(), folder.0.join("letters"));
            tokio::spawn(async move {
                let value = format!("value-{n:03}");
                spool
                    .append("letters".into(), body(value.as_bytes()), 1_000)
                    .await
                    .unwrap();
                let on_disk = fs::read(path.join("00000000000000000001.spool")).unwrap();
                assert!(values_in(&on_disk).contains(&value));
            })
        })
        .collect();
    for append in appends {
        append.await.unwrap();
    }
    assert_eq!(spool.contents().records(), 300);
    assert!(spool.holds("letters").await && !spool.holds("others").await);
}

#[tokio::test]
async fn a_directory_that_cannot_be_used_refuses_with_the_reason_and_is_taken_when_it_can() {
    let folder = Folder::new("unusable");
    let holder = open(&folder.0);
    let spool = Spool::start(folder.0.clone(), ROOM).unwrap();
    assert!(!spool.holds("letters").await);
    let refused = spool.append("letters".into(), body(b"x"), 1_000).await;
    let reason = refused.unwrap_err().to_string();
    assert!(reason.contains("another process"), "{reason}");
    assert!(spool.contents().error.is_some());
    drop(holder);
    let until = Instant::now() + Duration::from_secs(10);
    while spool
        .append("letters".into(), body(b"x"), 1_000)
        .await
        .is_err()
    {
        assert!(Instant::now() < until);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(spool.contents().error, None);
}

// P3
#[test]
fn a_file_that_cannot_be_written_refuses_and_what_was_taken_before_stays() {
    let folder = Folder::new("unwritable");
    let mut store = open(&folder.0);
    append(&mut store, "letters", b"before").unwrap();
    drop(store);
    let mut store = open(&folder.0);
    fs::create_dir(folder.0.join("letters/00000000000000000002.spool")).unwrap();
    let refused = append(&mut store, "letters", b"during");
    assert!(
        matches!(refused, Err(Refused::Unavailable(_))),
        "{refused:?}"
    );
    append(&mut store, "letters", b"after").unwrap();
    assert_eq!(drain(&mut store, "letters"), ["before", "after"]);
}
