//! Spool files in a directory: appending, reading in order, setting aside.
//!
//! ```text
//! lock                                held by the process that uses the directory
//! orders.dlq/00000000000000000007.spool      a segment: read and removed in the order of the numbers
//! orders.dlq/00000000000000000005.damaged    what could not be read of segment 5
//! orders.dlq/00000000000000000006-3.refused  a record that its topic does not take, as a spool file of its own
//! ```
//!
//! A segment is removed as a whole when all of it is sent, so that nothing is ever rewritten. After a crash, what had
//! been sent of the oldest segment is sent again.

use std::{
    collections::{BTreeMap, HashMap, VecDeque, hash_map::RandomState},
    fs::{self, File, OpenOptions},
    hash::{BuildHasher, Hasher},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

use super::format::{HEADER, Piece, Pieces, Salt, Unreadable, head, header};
use crate::{kafka::lock_file, origin::is_topic_name};

/// A segment that is larger is not added to.
const SEGMENT: u64 = 1 << 20;

/// A record to append.
pub(crate) struct Append<'a> {
    pub(crate) topic: &'a Arc<str>,
    pub(crate) body: &'a [u8],
    pub(crate) spooled_at_ms: i64,
}

/// Why a record was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    #[error("the spool has reached its limit of {0} bytes")]
    Full(u64),
    #[error("`{0}` cannot be the name of a topic")]
    Topic(Arc<str>),
    /// Of the file system, or the lock.
    #[error("{0}")]
    Unavailable(String),
}

/// The oldest segment of a topic.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) number: u64,
    pub(crate) bytes: Vec<u8>,
    /// How many of its whole records have been dealt with already.
    pub(crate) done: usize,
}

/// How much there is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Contents {
    /// Records that are still to be sent, by topic.
    pub(crate) topics: BTreeMap<Arc<str>, usize>,
    /// All files together.
    pub(crate) bytes: u64,
    /// Unix milliseconds.
    pub(crate) oldest_ms: Option<i64>,
    /// Files with what cannot be read, or what its topic does not take.
    pub(crate) set_aside: usize,
}

pub(crate) struct Store {
    directory: PathBuf,
    max_bytes: u64,
    queues: BTreeMap<Arc<str>, Queue>,
    /// Of all files.
    bytes: u64,
    set_aside: usize,
    /// Until this is closed.
    _lock: File,
}

struct Queue {
    folder: PathBuf,
    /// By number. The last one may still be written to.
    segments: VecDeque<Segment>,
    /// The file of the last segment, while there may be more for it.
    open: Option<(File, Salt)>,
    /// Of the first segment.
    done: usize,
    next_number: u64,
}

struct Segment {
    number: u64,
    records: usize,
    bytes: u64,
    oldest_ms: i64,
}

impl Store {
    /// Takes the directory for this process, and looks through what is in it.
    pub(crate) fn open(directory: &Path, max_bytes: u64) -> io::Result<Self> {
        fs::create_dir_all(directory)?;
        let path = directory.join("lock");
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)?;
        if !lock_file(&lock)? {
            let held = "another process uses it: give each process a directory of its own";
            return Err(io::Error::new(io::ErrorKind::WouldBlock, held));
        }
        let mut store = Store {
            directory: directory.into(),
            max_bytes,
            queues: BTreeMap::new(),
            bytes: 0,
            set_aside: 0,
            _lock: lock,
        };
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let name = entry.file_name();
            if let Some(topic) = name.to_str().filter(|name| is_folder_name(name))
                && entry.file_type()?.is_dir()
            {
                store.take_in(topic.into(), &entry.path())?;
            }
        }
        Ok(store)
    }

    fn take_in(&mut self, topic: Arc<str>, folder: &Path) -> io::Result<()> {
        let mut numbers = Vec::new();
        let mut refused = Vec::new();
        let mut last = 0;
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let name = entry.file_name();
            let Some((stem, kind)) = name.to_str().and_then(|name| name.rsplit_once('.')) else {
                continue;
            };
            let number = stem.split('-').next().and_then(|text| text.parse().ok());
            let Some(number) = number else { continue };
            last = last.max(number);
            self.bytes += entry.metadata()?.len();
            match kind {
                "spool" => numbers.push(number),
                "refused" => refused.push(entry.path()),
                "damaged" => self.set_aside += 1,
                _ => {}
            }
        }
        // Its topic may take it by now.
        refused.sort_unstable();
        for path in refused {
            last += 1;
            fs::rename(path, segment_path(folder, last))?;
            numbers.push(last);
        }
        numbers.sort_unstable();
        let mut queue = Queue::new(folder.into());
        queue.next_number = last + 1;
        for number in numbers {
            let path = queue.path(number);
            cut_torn_end(&path)?;
            queue.segments.push_back(Segment {
                number,
                records: 0,
                bytes: fs::metadata(&path)?.len(),
                oldest_ms: 0,
            });
            let index = queue.segments.len() - 1;
            // Damage is found now, and not when the disk is needed.
            if let Some(bytes) = self.examine(&mut queue, index)? {
                let found = whole(&bytes);
                let oldest_ms = found.clone().next().unwrap_or(0);
                let segment = &mut queue.segments[index];
                (segment.records, segment.oldest_ms) = (found.count(), oldest_ms);
            }
        }
        self.queues.insert(topic, queue);
        Ok(())
    }

    /// Reads a segment and keeps aside what is damaged in it. `None`: nothing of it can be read, and it is gone from the
    /// queue.
    fn examine(&mut self, queue: &mut Queue, index: usize) -> io::Result<Option<Vec<u8>>> {
        let number = queue.segments[index].number;
        let path = queue.path(number);
        let bytes = fs::read(&path)?;
        let pieces = match Pieces::of(&bytes) {
            Ok(pieces) => pieces,
            Err(error) => {
                // A later version knows what to do with its own: it is left as it is.
                if error == Unreadable::Damaged {
                    fs::rename(&path, path.with_extension("damaged"))?;
                    sync_directory(&queue.folder)?;
                }
                tracing::error!(file = %path.display(), %error, "a spool file cannot be read and is kept aside");
                self.set_aside += 1;
                queue.segments.remove(index);
                return Ok(None);
            }
        };
        let damaged = pieces.filter(|(_, piece)| *piece == Piece::Damaged);
        let damaged: Vec<_> = damaged.map(|(range, _)| range).collect();
        let aside = path.with_extension("damaged");
        if !damaged.is_empty() && !aside.exists() {
            let parts: Vec<_> = damaged.iter().map(|range| &bytes[range.clone()]).collect();
            let parts = parts.concat();
            write_whole(&aside, &parts)?;
            self.bytes += parts.len() as u64;
            self.set_aside += 1;
            tracing::error!(
                file = %path.display(),
                kept_in = %aside.display(),
                places = ?damaged,
                "records in a spool file are damaged and cannot be sent; they are kept aside"
            );
        }
        Ok(Some(bytes))
    }

    /// Each answer in its place. What was taken is on the disk.
    pub(crate) fn append(&mut self, records: &[Append<'_>]) -> Vec<Result<(), Refused>> {
        let mut answers = vec![Ok(()); records.len()];
        let mut by_topic: HashMap<&Arc<str>, Vec<usize>> = HashMap::new();
        let mut planned = self.bytes;
        for (index, record) in records.iter().enumerate() {
            let more = (HEADER + super::format::HEAD + record.body.len()) as u64;
            if !is_folder_name(record.topic) {
                answers[index] = Err(Refused::Topic(Arc::clone(record.topic)));
            } else if planned + more > self.max_bytes {
                answers[index] = Err(Refused::Full(self.max_bytes));
            } else {
                planned += more;
                by_topic.entry(record.topic).or_default().push(index);
            }
        }
        for (topic, indices) in by_topic {
            let queue = self
                .queues
                .entry(Arc::clone(topic))
                .or_insert_with(|| Queue::new(self.directory.join(&**topic)));
            let bodies = indices
                .iter()
                .map(|index| (records[*index].body, records[*index].spooled_at_ms));
            match queue.append(bodies) {
                Ok(bytes) => self.bytes += bytes,
                Err(error) => {
                    let refused = Refused::Unavailable(format!(
                        "cannot write in `{}`: {error}",
                        queue.folder.display()
                    ));
                    for index in indices {
                        answers[index] = Err(refused.clone());
                    }
                }
            }
        }
        answers
    }

    /// The oldest segment with something to send for this topic. Nothing more is added to it from now on.
    pub(crate) fn oldest(&mut self, topic: &str) -> io::Result<Option<Loaded>> {
        let Some((topic, mut queue)) = self.queues.remove_entry(topic) else {
            return Ok(None);
        };
        let found = self.load(&mut queue);
        self.queues.insert(topic, queue);
        found
    }

    fn load(&mut self, queue: &mut Queue) -> io::Result<Option<Loaded>> {
        while let Some(segment) = queue.segments.front() {
            let number = segment.number;
            if queue.segments.len() == 1 {
                queue.open = None;
            }
            let Some(bytes) = self.examine(queue, 0)? else {
                queue.done = 0;
                continue;
            };
            let records = whole(&bytes).count();
            queue.segments[0].records = records;
            if queue.done < records {
                return Ok(Some(Loaded {
                    number,
                    bytes,
                    done: queue.done,
                }));
            }
            self.bytes = self.bytes.saturating_sub(queue.remove_first()?);
        }
        Ok(None)
    }

    /// The first `done` records of the oldest segment are dealt with. With the last one it is removed.
    pub(crate) fn done(&mut self, topic: &str, number: u64, done: usize) -> io::Result<()> {
        let Some(queue) = self.queues.get_mut(topic) else {
            return Ok(());
        };
        if let Some(first) = queue.segments.front()
            && first.number == number
        {
            queue.done = done;
            if done >= first.records {
                self.bytes = self.bytes.saturating_sub(queue.remove_first()?);
            }
        }
        Ok(())
    }

    /// Keeps a record aside that its topic does not take, for the next start or for people; returns where.
    pub(crate) fn set_aside(
        &mut self,
        topic: &str,
        number: u64,
        index: usize,
        body: &[u8],
    ) -> io::Result<PathBuf> {
        let salt = new_salt();
        let file = [&header(salt)[..], &head(salt, body), body].concat();
        let path = self
            .directory
            .join(topic)
            .join(format!("{number:020}-{index}.refused"));
        write_whole(&path, &file)?;
        self.bytes += file.len() as u64;
        self.set_aside += 1;
        Ok(path)
    }

    pub(crate) fn contents(&self) -> Contents {
        let mut contents = Contents {
            bytes: self.bytes,
            set_aside: self.set_aside,
            ..Contents::default()
        };
        for (topic, queue) in &self.queues {
            let records: usize = queue.segments.iter().map(|segment| segment.records).sum();
            let left = records.saturating_sub(queue.done);
            if left > 0 {
                contents.topics.insert(Arc::clone(topic), left);
                let oldest = queue
                    .segments
                    .iter()
                    .map(|segment| segment.oldest_ms)
                    .next();
                contents.oldest_ms = contents.oldest_ms.into_iter().chain(oldest).min();
            }
        }
        contents
    }
}

impl Queue {
    fn new(folder: PathBuf) -> Self {
        Queue {
            folder,
            segments: VecDeque::new(),
            open: None,
            done: 0,
            next_number: 1,
        }
    }

    fn path(&self, number: u64) -> PathBuf {
        segment_path(&self.folder, number)
    }

    /// Writes them all and syncs once; returns by how much the files have grown.
    fn append<'a>(
        &mut self,
        bodies: impl Iterator<Item = (&'a [u8], i64)> + Clone,
    ) -> io::Result<u64> {
        if self
            .segments
            .back()
            .is_none_or(|last| last.bytes >= SEGMENT)
        {
            self.open = None;
        }
        let mut data = Vec::new();
        let mut made = None;
        let (mut file, salt) = match self.open.take() {
            Some(open) => open,
            None => {
                fs::create_dir_all(&self.folder)?;
                let number = self.next_number;
                // A number is not used twice, whatever becomes of its file.
                self.next_number += 1;
                let path = self.path(number);
                let file = OpenOptions::new()
                    .append(true)
                    .create_new(true)
                    .open(&path)?;
                let salt = new_salt();
                data.extend(header(salt));
                made = Some((number, path));
                (file, salt)
            }
        };
        let oldest_ms = bodies.clone().next().map_or(0, |(_, at)| at);
        for (body, _) in bodies.clone() {
            data.extend(head(salt, body));
            data.extend(body);
        }
        let before = match &made {
            Some(_) => 0,
            None => self.segments.back().map_or(0, |last| last.bytes),
        };
        let written = file.write_all(&data).and_then(|()| file.sync_data());
        let written = written.and_then(|()| match &made {
            // The names have to be safe too, and that of the folder, which may be new.
            Some(_) => sync_directory(&self.folder).and_then(|()| {
                let parent = self.folder.parent();
                parent.map_or(Ok(()), sync_directory)
            }),
            None => Ok(()),
        });
        if let Err(error) = written {
            // What is in the file now nobody knows. It is not added to any more; a whole record in it is sent, although
            // its writer was told otherwise, and that is a repeat.
            match made {
                Some((_, path)) => drop(fs::remove_file(path)),
                None => drop(file.set_len(before)),
            }
            return Err(error);
        }
        self.open = Some((file, salt));
        if let Some((number, _)) = made {
            self.segments.push_back(Segment {
                number,
                records: 0,
                bytes: 0,
                oldest_ms,
            });
        }
        let last = self
            .segments
            .back_mut()
            .expect("an open file has its segment");
        last.records += bodies.count();
        last.bytes += data.len() as u64;
        Ok(data.len() as u64)
    }

    /// Returns how large it was.
    fn remove_first(&mut self) -> io::Result<u64> {
        let Some(first) = self.segments.front() else {
            return Ok(0);
        };
        match fs::remove_file(self.path(first.number)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let bytes = first.bytes;
        self.segments.pop_front();
        self.done = 0;
        if self.segments.is_empty() {
            self.open = None;
        }
        Ok(bytes)
    }
}

/// The times at which the whole records of a file were spooled.
fn whole(bytes: &[u8]) -> impl Iterator<Item = i64> + Clone {
    let pieces = Pieces::of(bytes).into_iter().flatten();
    pieces.filter_map(|(_, piece)| match piece {
        Piece::Whole(entry) => Some(entry.spooled_at_ms),
        Piece::Damaged | Piece::Torn => None,
    })
}

/// A crash in the middle of a write leaves a record that nobody was told is safe.
fn cut_torn_end(path: &Path) -> io::Result<()> {
    let bytes = fs::read(path)?;
    let torn = Pieces::of(&bytes).into_iter().flatten();
    if let Some((range, _)) = torn.last().filter(|(_, piece)| *piece == Piece::Torn) {
        tracing::warn!(
            file = %path.display(),
            bytes = range.len(),
            "a spool file ends in the middle of a record, as after a crash: it is cut there, and its record comes again"
        );
        let file = OpenOptions::new().write(true).open(path)?;
        file.set_len(range.start as u64)?;
        file.sync_all()?;
    }
    Ok(())
}

fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut file = File::create(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    path.parent().map_or(Ok(()), sync_directory)
}

fn segment_path(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("{number:020}.spool"))
}

fn is_folder_name(topic: &str) -> bool {
    is_topic_name(topic) && topic != "." && topic != ".." && topic != "lock"
}

/// Elsewhere a directory cannot be opened, and names are as safe as they get.
fn sync_directory(directory: &Path) -> io::Result<()> {
    if cfg!(unix) {
        File::open(directory)?.sync_all()?;
    }
    Ok(())
}

/// The hasher's keys are random: two files have the same salt about never.
fn new_salt() -> Salt {
    let hasher = RandomState::new().build_hasher();
    Salt(hasher.finish().to_le_bytes())
}
