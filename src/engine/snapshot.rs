//! What is finished above a committed offset, as text that the broker keeps beside it.
//!
//! A committed offset says only where the unfinished records begin. Its metadata says which of the later ones are
//! finished already, so that the partition's next owner does not hand them out again. It holds, in printable ASCII:
//!
//! - `rc` and the format's version, one digit: 2 with the topic or marks, 1 with neither;
//! - in base 85: a checksum of the rest; a hash of where it belongs (cluster, group, topic, partition); the offset that
//!   it stands beside; which topic of that name it was, and the marks, as far as there are any; which of two forms
//!   follows; and what is finished, in the form that is shorter: pairs of varints (how far to the next range, how long it
//!   is), or a bitmap that begins at the committed offset. In version 2, form and ranges may be missing.
//!
//! Topic and marks stand before the ranges, so that a cut never costs them.
//!
//! Replication tools copy metadata to other clusters beside translated offsets, people copy it between groups, and
//! anybody may write it. What does not match is refused: that repeats records, where believing it would lose some.

use std::ops::Range;

/// The longest metadata that brokers take unless told otherwise (`offset.metadata.max.bytes`). They count UTF-16
/// units, which are characters here.
pub const LIMIT: usize = 4096;

const MAGIC: &str = "rc";
const PLAIN: char = '1';
const HEADED: char = '2';
const PREFIX: usize = MAGIC.len() + PLAIN.len_utf8();
const CHECKSUM: usize = 4;
const RANGES: u8 = 0;
const BITMAP: u8 = 1;
const DIRTY: u8 = 1;
const RUNNING: u8 = 2;
const TOPIC: u8 = 4;
/// How many records are to run alone and carefully, and the deaths.
const COUNTS: u8 = 8;
/// The highest leader epoch of what has finished.
const EPOCH: u8 = 16;
/// Records whose deaths are counted at a time: each death of a process adds one at most, and those at the limit leave.
const MOST_DEATHS: usize = 16;

/// Where a snapshot belongs: a hash of cluster id, group, topic and partition. Beside it, which topic of that name it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Identity {
    place: [u8; 6],
    topic: TopicSeen,
}

/// Which topic of its name a group has been reading. One that is deleted and made again has another id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TopicSeen {
    /// A hash of the topic's id; 0 where that is not known.
    pub id: u32,
    /// How many partitions it had when the group began with it. One with a higher number was added later. 0 where that is
    /// not known, and for a topic that was made anew: all of it is new to a group that knew its predecessor.
    pub partitions: u32,
}

impl TopicSeen {
    pub fn is_known(self) -> bool {
        self != Self::default()
    }

    pub fn made_anew(self) -> Self {
        Self {
            partitions: 0,
            ..self
        }
    }

    /// Both are known, and not the same topic.
    pub fn differs_from(self, other: Self) -> bool {
        self.id != 0 && other.id != 0 && self.id != other.id
    }
}

impl Identity {
    /// A cluster whose id is not known has an empty one: a snapshot written then is believed only by a reader who does
    /// not know it either.
    pub fn new(cluster: &str, group: &str, topic: &str, partition: i32) -> Self {
        let mut bytes = Vec::new();
        for part in [cluster, group, topic] {
            // With its length, so that what is cut off one part cannot be made up for by the next.
            bytes.extend((part.len() as u64).to_le_bytes());
            bytes.extend(part.as_bytes());
        }
        bytes.extend(partition.to_le_bytes());
        let [a, b, c, d, e, f, ..] = hash(&bytes).to_le_bytes();
        Self {
            place: [a, b, c, d, e, f],
            topic: TopicSeen::default(),
        }
    }

    pub fn with_topic(self, topic: TopicSeen) -> Self {
        Self { topic, ..self }
    }

    pub fn topic(self) -> TopicSeen {
        self.topic
    }
}

/// What a new ownership is told of those before it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Inherited {
    /// Goes into the snapshots of this ownership.
    pub identity: Identity,
    /// Of which topic the committed offset is, as far as it stands beside it.
    pub written: TopicSeen,
    pub finished: FinishedAbove,
    pub marks: Marks,
}

/// What an ownership leaves in its commits in case that the process dies, see [`suspects`](super::suspects).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Marks {
    /// Records are with handlers, any number at a time.
    pub dirty: bool,
    /// So many records are to run alone. Beside `dirty`: they would have to, should the process die now.
    pub alone: u32,
    /// And so many behind those are to be handed out carefully.
    pub careful: u32,
    /// The record that runs alone.
    pub running: Option<i64>,
    /// Of records that have not finished, ascending.
    pub deaths: Vec<Deaths>,
}

/// How often the process has died while this record ran alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deaths {
    pub offset: i64,
    pub count: u32,
}

impl Marks {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    pub fn count_death(&mut self, offset: i64) {
        match self.deaths.binary_search_by_key(&offset, |it| it.offset) {
            Ok(at) => self.deaths[at].count = self.deaths[at].count.saturating_add(1),
            Err(at) if self.deaths.len() < MOST_DEATHS => {
                self.deaths.insert(at, Deaths { offset, count: 1 });
            }
            Err(_) => {}
        }
    }

    /// As an orderly end would have left it: the process that had written it has not died.
    pub fn of_a_living_process(mut self) -> Self {
        if std::mem::take(&mut self.dirty) {
            self.alone = 0;
        }
        self.running = None;
        self
    }

    fn has_counts(&self) -> bool {
        self.alone > 0 || self.careful > 0 || !self.deaths.is_empty()
    }
}

/// Topic, marks and epoch, in front of the ranges.
fn write_head(
    topic: TopicSeen,
    marks: &Marks,
    epoch: Option<u32>,
    committed: i64,
    bytes: &mut Vec<u8>,
) {
    let running = marks.running.map(|offset| offset - committed);
    bytes.push(
        u8::from(marks.dirty) * DIRTY
            + u8::from(running.is_some()) * RUNNING
            + u8::from(topic.is_known()) * TOPIC
            + u8::from(marks.has_counts()) * COUNTS
            + u8::from(epoch.is_some()) * EPOCH,
    );
    if topic.is_known() {
        bytes.extend(topic.id.to_le_bytes());
        push_varint(bytes, topic.partitions.into());
    }
    if let Some(running) = running {
        push_varint(bytes, running as u64);
    }
    if marks.has_counts() {
        push_varint(bytes, marks.alone.into());
        push_varint(bytes, marks.careful.into());
        push_varint(bytes, marks.deaths.len() as u64);
        for deaths in &marks.deaths {
            push_varint(bytes, (deaths.offset - committed) as u64);
            push_varint(bytes, deaths.count.into());
        }
    }
    if let Some(epoch) = epoch {
        push_varint(bytes, epoch.into());
    }
}

type Head = (TopicSeen, Marks, Option<i32>);

fn read_head(committed: i64, bytes: &mut &[u8]) -> Result<Head, SnapshotError> {
    const BEYOND: SnapshotError = SnapshotError::Damaged("a mark lies beyond all offsets");
    const WRONG: SnapshotError = SnapshotError::Damaged("its marks make no sense");
    let count = |bytes: &mut &[u8]| u32::try_from(take_offset(bytes)?).map_err(|_| WRONG);
    let offset = |bytes: &mut &[u8]| committed.checked_add(take_offset(bytes)?).ok_or(BEYOND);
    let flags = bytes.split_off_first().copied().ok_or(WRONG)?;
    if flags & !(DIRTY | RUNNING | TOPIC | COUNTS | EPOCH) != 0 {
        return Err(WRONG);
    }
    let mut topic = TopicSeen::default();
    if flags & TOPIC != 0 {
        let (id, rest) = bytes.split_first_chunk().ok_or(WRONG)?;
        *bytes = rest;
        topic.id = u32::from_le_bytes(*id);
        topic.partitions = count(bytes)?;
    }
    let mut marks = Marks {
        dirty: flags & DIRTY != 0,
        ..Marks::default()
    };
    if flags & RUNNING != 0 {
        marks.running = Some(offset(bytes)?);
    }
    if flags & COUNTS != 0 {
        (marks.alone, marks.careful) = (count(bytes)?, count(bytes)?);
        for _ in 0..count(bytes)? {
            let (offset, count) = (offset(bytes)?, count(bytes)?);
            let ascends = marks.deaths.last().is_none_or(|last| last.offset < offset);
            if !ascends || marks.deaths.len() == MOST_DEATHS {
                return Err(WRONG);
            }
            marks.deaths.push(Deaths { offset, count });
        }
    }
    let epoch = match flags & EPOCH {
        0 => None,
        _ => Some(i32::try_from(count(bytes)?).map_err(|_| WRONG)?),
    };
    Ok((topic, marks, epoch))
}

impl Inherited {
    /// With what this process `remembered`: the offset that it had committed when it lost the partition, and what it had
    /// finished above.
    pub fn and_remembered(
        self,
        committed: Option<i64>,
        remembered: Option<(i64, FinishedAbove)>,
    ) -> Self {
        match remembered {
            // Others may have owned it meanwhile: what they finished they alone have written down.
            Some((then, ours)) if committed.is_some_and(|now| now >= then) => Self {
                finished: self.finished.or(ours),
                marks: self.marks.of_a_living_process(),
                ..self
            },
            // Somebody moved the group back: what it asks for is handled again.
            _ => self,
        }
    }
}

/// A snapshot as it goes into a commit.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Snapshot {
    /// Empty when nothing is finished above the committed offset, or when not even one range would fit.
    pub text: String,
    /// Of what is finished from this offset on nothing is in it: it did not fit.
    pub cut: Option<i64>,
}

/// Why a snapshot is not believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    #[error("it was not written by this library")]
    Foreign,
    #[error("its format has version {0}, and this library reads versions 1 and 2")]
    Version(char),
    #[error("it has {0} characters, and there are never more than {LIMIT}")]
    TooLong(usize),
    #[error("it is damaged: {0}")]
    Damaged(&'static str),
    #[error(
        "it belongs to another cluster, group, topic or partition: it was copied, or written when the cluster's id \
         was not known"
    )]
    Elsewhere,
    #[error(
        "it was written beside offset {written}, and stands beside {beside}: the offset was moved"
    )]
    OffsetMoved { written: i64, beside: i64 },
}

/// Writes down the topic, the `marks`, and what is `finished` (ascending) at or above the `committed` offset, with the highest
/// leader `epoch` of any of it where that is known, in at most `limit` characters. What does not fit is cut from the far end. Costs a step a range, and stops where both forms are
/// full.
pub fn encode(
    identity: Identity,
    committed: i64,
    marks: &Marks,
    finished: impl Iterator<Item = Range<i64>>,
    epoch: Option<i32>,
    limit: usize,
) -> Snapshot {
    let mut finished = joined(finished).peekable();
    let first = finished.peek().map(|range| range.start);
    let epoch = epoch.filter(|_| first.is_some());
    let epoch = epoch.and_then(|epoch| u32::try_from(epoch).ok());
    let version = match marks.is_empty() && !identity.topic.is_known() && epoch.is_none() {
        true => PLAIN,
        false => HEADED,
    };
    if first.is_none() && version == PLAIN {
        return Snapshot::default();
    }
    let mut head = identity.place.to_vec();
    push_varint(&mut head, committed as u64);
    if version == HEADED {
        write_head(identity.topic, marks, epoch, committed, &mut head);
    }
    let room = bytes_in(limit.min(LIMIT).saturating_sub(PREFIX));
    let Some(room) = room.checked_sub(CHECKSUM + head.len() + 1) else {
        return Snapshot {
            text: String::new(),
            cut: first,
        };
    };
    let mut ranges = RangesForm::new(committed, room);
    let mut bitmap = BitmapForm::new(committed, room);
    for range in finished {
        ranges.push(&range);
        bitmap.push(&range);
        if ranges.cut.is_some() && bitmap.cut.is_some() {
            break;
        }
    }
    let (form, data, cut) = match (ranges.cut, bitmap.cut) {
        (None, None) if bitmap.bytes.len() < ranges.bytes.len() => (BITMAP, bitmap.bytes, None),
        (None, _) => (RANGES, ranges.bytes, None),
        (Some(_), None) => (BITMAP, bitmap.bytes, None),
        (Some(a), Some(b)) if a < b => (BITMAP, bitmap.bytes, Some(b)),
        (Some(a), Some(_)) => (RANGES, ranges.bytes, Some(a)),
    };
    if !data.is_empty() {
        head.push(form);
        head.extend(data);
    } else if version == PLAIN {
        return Snapshot {
            text: String::new(),
            cut,
        };
    }
    Snapshot {
        text: seal(version, &head),
        cut,
    }
}

/// Reads what [`encode`] wrote, if it belongs here and stands beside the offset that it was written for.
///
/// # Errors
///
/// On anything else. No input makes it panic, or use more than some hundred bytes for each of its own.
pub fn decode(text: &[u8], identity: Identity, committed: i64) -> Result<Inherited, SnapshotError> {
    if text.is_empty() {
        return Ok(Inherited {
            identity,
            ..Inherited::default()
        });
    }
    if text.len() > LIMIT {
        return Err(SnapshotError::TooLong(text.len()));
    }
    let body = text
        .strip_prefix(MAGIC.as_bytes())
        .ok_or(SnapshotError::Foreign)?;
    let (version, body) = body
        .split_first()
        .filter(|(version, _)| version.is_ascii_digit())
        .ok_or(SnapshotError::Foreign)?;
    let version = char::from(*version);
    if version != PLAIN && version != HEADED {
        return Err(SnapshotError::Version(version));
    }
    let body = unseal(version, body)?;
    let short = SnapshotError::Damaged("it is too short");
    let (owner, mut data) = body.split_first_chunk().ok_or(short)?;
    if *owner != identity.place {
        return Err(SnapshotError::Elsewhere);
    }
    let written = take_offset(&mut data)?;
    if written != committed {
        return Err(SnapshotError::OffsetMoved {
            written,
            beside: committed,
        });
    }
    let (topic, marks, epoch) = match version {
        HEADED => read_head(committed, &mut data)?,
        _ => Default::default(),
    };
    let ranges = match data.split_first() {
        Some((&RANGES, data)) => read_ranges(committed, data)?,
        Some((&BITMAP, data)) => read_bitmap(committed, data)?,
        Some(_) => return Err(SnapshotError::Damaged("its form is not known")),
        None if version == HEADED => Vec::new(),
        None => return Err(short),
    };
    Ok(Inherited {
        identity,
        written: topic,
        finished: FinishedAbove {
            ranges,
            passed: 0,
            epoch,
            beside: None,
        },
        marks,
    })
}

/// Metadata with a right checksum around any content, as somebody who knows the format could forge it.
#[cfg(any(test, feature = "internals"))]
pub fn forge(identity: Identity, committed: u64, form: u8, data: &[u8]) -> String {
    let mut body = identity.place.to_vec();
    push_varint(&mut body, committed);
    body.push(form);
    body.extend(data);
    seal(PLAIN, &body)
}

/// Offsets that an earlier owner finished, as ascending ranges that do not touch. Asked from low to high.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FinishedAbove {
    ranges: Vec<Range<i64>>,
    /// How many of the ranges lie below everything that has been asked for.
    passed: usize,
    /// No leader epoch of what it holds is higher. A record with a higher one was written later, in place of what it holds at
    /// that offset and above.
    epoch: Option<i32>,
    /// The same of another highest epoch.
    beside: Option<Box<FinishedAbove>>,
}

impl FinishedAbove {
    /// Takes in ranges that ascend.
    pub fn of(ranges: impl Iterator<Item = Range<i64>>) -> Self {
        Self {
            ranges: joined(ranges.filter(|range| !range.is_empty())).collect(),
            passed: 0,
            epoch: None,
            beside: None,
        }
    }

    pub fn with_epoch(self, epoch: Option<i32>) -> Self {
        Self { epoch, ..self }
    }

    /// The highest leader epoch for which all that it holds is known to be finished.
    pub fn epoch(&self) -> Option<i32> {
        let own = (!self.left().is_empty()).then_some(self.epoch);
        let beside = self.beside.as_ref().filter(|it| !it.is_empty());
        let beside = beside.map(|it| it.epoch());
        own.into_iter().chain(beside).min().flatten()
    }

    /// What of it goes into a commit of this position: all of one epoch, the one that the last commit had. What the process
    /// remembers of a lower one would have the rest believed less; that of a higher one is believed as far as the rest is.
    pub fn to_commit(&self, position: i64) -> Self {
        let above = self.above(position);
        let mut next = Some(&above);
        let mut chosen = Self::default();
        while let Some(part) = next {
            next = part.beside.as_deref();
            if part.ranges.is_empty() || !chosen.ranges.is_empty() && part.epoch < chosen.epoch {
                continue;
            }
            let epoch = match chosen.ranges.is_empty() {
                true => part.epoch,
                false => chosen.epoch,
            };
            chosen.add(Self::of(part.ranges.iter().cloned()).with_epoch(epoch));
        }
        chosen
    }

    fn left(&self) -> &[Range<i64>] {
        &self.ranges[self.passed..]
    }

    fn is_empty(&self) -> bool {
        self.left().is_empty() && self.beside.as_ref().is_none_or(|it| it.is_empty())
    }

    /// Whether it holds this offset. No lower one is asked for afterwards.
    #[inline]
    pub fn contains(&mut self, offset: i64) -> bool {
        let beside = self.beside.as_mut();
        let beside = beside.is_some_and(|it| it.contains(offset));
        while let Some(range) = self.ranges.get(self.passed) {
            if offset < range.end {
                return beside || range.start <= offset;
            }
            self.passed += 1;
        }
        self.ranges = Vec::new();
        self.passed = 0;
        beside
    }

    /// Forgets what it holds at this offset and above: the log has other records there.
    pub fn cut_off(&mut self, offset: i64) {
        self.cut_own(offset);
        if let Some(beside) = &mut self.beside {
            beside.cut_off(offset);
        }
    }

    fn cut_own(&mut self, offset: i64) {
        let kept = self.ranges.partition_point(|range| range.start < offset);
        self.ranges.truncate(kept);
        if let Some(last) = self.ranges.last_mut() {
            last.end = last.end.min(offset);
        }
        self.passed = self.passed.min(kept);
    }

    /// The record at this offset was written under this leader. `true`: something was taken to be finished that was written
    /// before it, at this offset or above.
    pub fn written_at(&mut self, offset: i64, epoch: i32) -> bool {
        let mut gone = false;
        if self.epoch.is_some_and(|last| last < epoch)
            && self.left().last().is_some_and(|range| range.end > offset)
        {
            gone = true;
            self.cut_own(offset);
        }
        let beside = self.beside.as_mut();
        gone | beside.is_some_and(|it| it.written_at(offset, epoch))
    }

    /// What either of them holds.
    pub fn or(mut self, other: Self) -> Self {
        let mut next = Some(other);
        while let Some(mut part) = next {
            next = part.beside.take().map(|it| *it);
            self.add(part);
        }
        self
    }

    fn add(&mut self, part: Self) {
        if part.left().is_empty() {
            return;
        }
        if self.left().is_empty() || self.epoch == part.epoch {
            let mut ranges = [self.left(), part.left()].concat();
            ranges.sort_unstable_by_key(|range| range.start);
            self.ranges = joined(ranges.into_iter()).collect();
            (self.passed, self.epoch) = (0, part.epoch);
            return;
        }
        match &mut self.beside {
            Some(beside) => beside.add(part),
            None => self.beside = Some(Box::new(part)),
        }
    }

    /// What of it lies at or above `position`, ascending.
    pub fn from(&self, position: i64) -> impl Iterator<Item = Range<i64>> + use<> {
        let part = self.above(position);
        let mut all = part.ranges;
        if let Some(beside) = part.beside {
            all.extend(beside.from(position));
            all.sort_unstable_by_key(|range| range.start);
            all = joined(all.into_iter()).collect();
        }
        all.into_iter()
    }

    /// The same without what lies below `position`.
    pub fn above(&self, position: i64) -> Self {
        let left = self.left().iter();
        let ranges = left.map(|range| range.start.max(position)..range.end);
        Self {
            ranges: ranges.filter(|range| !range.is_empty()).collect(),
            passed: 0,
            epoch: self.epoch,
            beside: self.beside.as_ref().map(|it| Box::new(it.above(position))),
        }
    }
}

/// Joins ranges that touch, so that both forms may count on a gap between any two.
fn joined(ranges: impl Iterator<Item = Range<i64>>) -> impl Iterator<Item = Range<i64>> {
    let mut ranges = ranges.peekable();
    std::iter::from_fn(move || {
        let mut range = ranges.next()?;
        while let Some(next) = ranges.next_if(|next| next.start <= range.end) {
            range.end = next.end.max(range.end);
        }
        Some(range)
    })
}

struct RangesForm {
    bytes: Vec<u8>,
    room: usize,
    /// The lowest offset at which the next range can begin.
    at: i64,
    cut: Option<i64>,
}

impl RangesForm {
    fn new(committed: i64, room: usize) -> Self {
        Self {
            bytes: Vec::new(),
            room,
            at: committed,
            cut: None,
        }
    }

    fn push(&mut self, range: &Range<i64>) {
        if self.cut.is_some() {
            return;
        }
        let before = self.bytes.len();
        push_varint(&mut self.bytes, (range.start - self.at) as u64);
        push_varint(&mut self.bytes, (range.end - range.start - 1) as u64);
        if self.bytes.len() > self.room {
            self.bytes.truncate(before);
            self.cut = Some(range.start);
        }
        self.at = range.end + 1;
    }
}

struct BitmapForm {
    bytes: Vec<u8>,
    base: i64,
    /// The offset behind the last one that it has room for.
    end: i64,
    cut: Option<i64>,
}

impl BitmapForm {
    fn new(committed: i64, room: usize) -> Self {
        Self {
            bytes: Vec::new(),
            base: committed,
            end: committed.saturating_add(room as i64 * 8),
            cut: None,
        }
    }

    fn push(&mut self, range: &Range<i64>) {
        if self.cut.is_some() {
            return;
        }
        if range.end > self.end {
            self.cut = Some(range.start.max(self.end));
        }
        let mut bit = (range.start - self.base) as usize;
        let Ok(end) = usize::try_from(range.end.min(self.end) - self.base) else {
            return;
        };
        if bit >= end {
            return;
        }
        self.bytes.resize(end.div_ceil(8), 0);
        while bit < end {
            let (at, low) = (bit / 8, bit % 8);
            let count = (end - bit).min(8 - low);
            self.bytes[at] |= (0xff >> (8 - count)) << low;
            bit += count;
        }
    }
}

/// Gaps and lengths cannot be negative, so ranges ascend and never touch whatever the bytes say.
fn read_ranges(committed: i64, mut data: &[u8]) -> Result<Vec<Range<i64>>, SnapshotError> {
    const BEYOND: SnapshotError = SnapshotError::Damaged("a range ends beyond the largest offset");
    let mut ranges = Vec::new();
    let mut at = committed;
    while !data.is_empty() {
        let start = at.checked_add(take_offset(&mut data)?).ok_or(BEYOND)?;
        let last = start.checked_add(take_offset(&mut data)?).ok_or(BEYOND)?;
        let end = last.checked_add(1).ok_or(BEYOND)?;
        ranges.push(start..end);
        at = end.checked_add(1).ok_or(BEYOND)?;
    }
    Ok(ranges)
}

fn read_bitmap(committed: i64, data: &[u8]) -> Result<Vec<Range<i64>>, SnapshotError> {
    if committed.checked_add(data.len() as i64 * 8 + 1).is_none() {
        return Err(SnapshotError::Damaged(
            "its bitmap ends beyond the largest offset",
        ));
    }
    let is_set = |bit: usize| data[bit / 8] >> (bit % 8) & 1 == 1;
    let mut ranges: Vec<Range<i64>> = Vec::new();
    for bit in (0..data.len() * 8).filter(|bit| is_set(*bit)) {
        let offset = committed + bit as i64;
        match ranges.last_mut().filter(|last| last.end == offset) {
            Some(last) => last.end += 1,
            None => ranges.push(offset..offset + 1),
        }
    }
    Ok(ranges)
}

/// Puts prefix and checksum before the bytes and makes text of them.
fn seal(version: char, body: &[u8]) -> String {
    let mut bytes = checksum(version, body).to_vec();
    bytes.extend(body);
    let mut text = String::from(MAGIC);
    text.push(version);
    for group in bytes.chunks(4) {
        let mut word = [0; 4];
        word[..group.len()].copy_from_slice(group);
        let word = u32::from_be_bytes(word);
        let digits = (0..5).map(|at| word / 85u32.pow(4 - at) % 85);
        // The low digits of a last, short group say nothing about its bytes.
        text.extend(
            digits
                .take(group.len() + 1)
                .map(|digit| char::from(ALPHABET[digit as usize])),
        );
    }
    text
}

fn unseal(version: char, text: &[u8]) -> Result<Vec<u8>, SnapshotError> {
    let mut bytes = Vec::with_capacity(bytes_in(text.len()) + 4);
    for group in text.chunks(5) {
        let mut word: u64 = 0;
        for at in 0..5 {
            // Digits left out are counted as the highest ones, which makes up for their having been rounded down.
            let digit = match group.get(at) {
                Some(&character) => digit(character).ok_or(SnapshotError::Damaged(
                    "there is a character in it that is never written",
                ))?,
                None => 84,
            };
            word = word * 85 + u64::from(digit);
        }
        let word = u32::try_from(word)
            .map_err(|_| SnapshotError::Damaged("a group of digits is too large"))?;
        bytes.extend(&word.to_be_bytes()[..group.len() - 1]);
    }
    let (sum, body) = bytes
        .split_first_chunk()
        .ok_or(SnapshotError::Damaged("it is too short"))?;
    if *sum != checksum(version, body) {
        return Err(SnapshotError::Damaged("its checksum is wrong"));
    }
    Ok(body.to_vec())
}

/// How many bytes so many characters of base 85 hold.
fn bytes_in(characters: usize) -> usize {
    characters / 5 * 4 + (characters % 5).saturating_sub(1)
}

/// Printable ASCII without what shells, JSON and CSV give a meaning to.
const ALPHABET: [u8; 85] = {
    let mut alphabet = [0; 85];
    let (mut character, mut count) = (b'!', 0);
    while character <= b'~' {
        if !matches!(
            character,
            b'"' | b'\'' | b'`' | b'\\' | b'$' | b'&' | b',' | b';' | b'|'
        ) {
            alphabet[count] = character;
            count += 1;
        }
        character += 1;
    }
    assert!(count == 85);
    alphabet
};

fn digit(character: u8) -> Option<u8> {
    ALPHABET.binary_search(&character).ok().map(|at| at as u8)
}

/// Of the version as well, from the second one on: what one version means is nonsense in the other.
fn checksum(version: char, body: &[u8]) -> [u8; CHECKSUM] {
    let hash = match version {
        PLAIN => hash(body),
        _ => hash(&[&[version as u8], body].concat()),
    };
    ((hash >> 32) as u32 ^ hash as u32).to_le_bytes()
}

/// FNV-1a: it is stored, so it must be the same in every build and every release.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

fn push_varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

/// A varint that is not larger than an offset can be.
fn take_offset(bytes: &mut &[u8]) -> Result<i64, SnapshotError> {
    let mut value: u64 = 0;
    for shift in (0..63).step_by(7) {
        let (byte, rest) = bytes
            .split_first()
            .ok_or(SnapshotError::Damaged("a number ends too early"))?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value as i64);
        }
    }
    Err(SnapshotError::Damaged("a number is too large"))
}

#[cfg(test)]
#[allow(
    clippy::single_range_in_vec_init,
    reason = "lists of ranges, some of them with one, are what is tested"
)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn here() -> Identity {
        Identity::new("cluster", "group", "topic", 3)
    }

    fn written(committed: i64, finished: &[Range<i64>], limit: usize) -> Snapshot {
        marked(committed, &Marks::default(), finished, limit)
    }

    fn marked(committed: i64, marks: &Marks, finished: &[Range<i64>], limit: usize) -> Snapshot {
        encode(
            here(),
            committed,
            marks,
            finished.iter().cloned(),
            None,
            limit,
        )
    }

    fn read(text: &str, committed: i64) -> Result<Vec<Range<i64>>, SnapshotError> {
        decode(text.as_bytes(), here(), committed).map(|read| read.finished.ranges)
    }

    fn forged(committed: u64, form: u8, data: &[u8]) -> String {
        forge(here(), committed, form, data)
    }

    fn form_of(text: &str, committed: i64) -> u8 {
        let body = unseal(PLAIN, &text.as_bytes()[PREFIX..]).expect("it was just written");
        let mut data = &body[here().place.len()..];
        assert_eq!(take_offset(&mut data), Ok(committed));
        data[0]
    }

    fn alternate(from: i64, records: i64) -> Vec<Range<i64>> {
        (0..records)
            .map(|n| from + 2 * n..from + 2 * n + 1)
            .collect()
    }

    #[test]
    fn what_is_written_is_read_back() {
        for finished in [
            vec![6..7],
            vec![5..9],
            vec![6..10, 12..13, 1_000_000_000_000..1_000_000_000_001],
            vec![i64::MAX - 3..i64::MAX - 1],
            alternate(7, 3_000),
        ] {
            let snapshot = written(5, &finished, LIMIT);
            assert_eq!(snapshot.cut, None);
            assert!(snapshot.text.bytes().all(|byte| byte.is_ascii_graphic()));
            assert_eq!(read(&snapshot.text, 5), Ok(finished));
        }
    }

    #[test]
    fn nothing_finished_above_is_no_metadata_and_no_metadata_is_nothing_finished() {
        assert_eq!(written(5, &[], LIMIT), Snapshot::default());
        assert_eq!(read("", 5), Ok(vec![]));
    }

    #[test]
    fn ranges_that_touch_become_one() {
        let snapshot = written(0, &[1..3, 3..5, 6..7], LIMIT);
        assert_eq!(read(&snapshot.text, 0), Ok(vec![1..5, 6..7]));
    }

    #[test]
    fn the_shorter_form_is_chosen() {
        let (few, many) = (
            written(0, &[1..9_000], LIMIT),
            written(0, &alternate(1, 500), LIMIT),
        );
        assert_eq!(form_of(&few.text, 0), RANGES);
        assert!(few.text.len() < 30, "{few:?}");
        assert_eq!(form_of(&many.text, 0), BITMAP);
        assert!(many.text.len() < 200, "{many:?}");
    }

    // T9
    #[test]
    fn sixty_thousand_alternate_records_stay_within_the_limit_as_a_bitmap_cut_at_the_far_end() {
        let finished = alternate(1, 60_000);
        let snapshot = written(0, &finished, LIMIT);
        let cut = snapshot.cut.expect("15 kB of bitmap do not fit into 4 kB");

        assert!(snapshot.text.len() <= LIMIT);
        assert!(snapshot.text.len() > LIMIT - 8, "room was left unused");
        assert_eq!(form_of(&snapshot.text, 0), BITMAP);
        assert!(cut > 25_000, "the near end is kept, up to {cut}");
        let near: Vec<_> = finished.into_iter().filter(|r| r.end <= cut).collect();
        assert_eq!(read(&snapshot.text, 0), Ok(near));
    }

    #[test]
    fn a_limit_too_small_for_anything_gives_nothing_and_says_so() {
        for limit in 0..24 {
            let snapshot = written(1_000, &[1_001..1_002, 2_000..2_001], limit);
            assert!(snapshot.text.len() <= limit);
            assert_eq!(
                snapshot.cut,
                Some(if snapshot.text.is_empty() {
                    1_001
                } else {
                    2_000
                }),
                "{limit}"
            );
        }
    }

    // T9c
    #[test]
    fn a_snapshot_is_believed_only_where_it_was_written() {
        let text = written(5, &[7..8], LIMIT).text;
        for (cluster, group, topic, partition) in [
            ("other", "group", "topic", 3),
            ("", "group", "topic", 3),
            ("cluster", "group2", "topic", 3),
            ("cluster", "group", "topic2", 3),
            ("cluster", "group", "topic", 4),
            ("clusterg", "roup", "topic", 3),
        ] {
            let elsewhere = Identity::new(cluster, group, topic, partition);
            assert_eq!(
                decode(text.as_bytes(), elsewhere, 5).err(),
                Some(SnapshotError::Elsewhere),
                "{cluster}/{group}/{topic}/{partition}"
            );
        }
        assert_eq!(
            read(&text, 6),
            Err(SnapshotError::OffsetMoved {
                written: 5,
                beside: 6
            })
        );
    }

    // T11
    #[test]
    fn what_others_wrote_is_refused_with_the_reason() {
        for foreign in ["AgAAAX9hYmM=", "rc", "rcx", "{\"host\":\"a\"}", "\u{fffd}"] {
            assert_eq!(read(foreign, 5), Err(SnapshotError::Foreign), "{foreign}");
        }
        assert_eq!(
            decode(b"\xff\xfe", here(), 5).err(),
            Some(SnapshotError::Foreign),
            "not even text"
        );
        assert_eq!(read("rc3abc", 5), Err(SnapshotError::Version('3')));
        let long = format!("rc1{}", "!".repeat(LIMIT));
        assert_eq!(read(&long, 5), Err(SnapshotError::TooLong(LIMIT + 3)));
        assert!(matches!(read("rc1", 5), Err(SnapshotError::Damaged(_))));
    }

    // T11
    #[test]
    fn forged_numbers_are_refused() {
        let mut beyond = Vec::new();
        push_varint(&mut beyond, i64::MAX as u64);
        push_varint(&mut beyond, 0);
        let mut huge = Vec::new();
        push_varint(&mut huge, u64::MAX);
        push_varint(&mut huge, 1);
        let mut long = Vec::new();
        push_varint(&mut long, 1);
        push_varint(&mut long, i64::MAX as u64 - 1);
        for (form, data) in [
            (RANGES, beyond),
            (RANGES, huge),
            (RANGES, long),
            (RANGES, vec![0x80]),
            (RANGES, vec![1]),
            (RANGES, vec![0x80; 3_000]),
            (7, vec![1, 1]),
        ] {
            let outcome = read(&forged(5, form, &data), 5);
            assert!(
                matches!(outcome, Err(SnapshotError::Damaged(_))),
                "{form} {data:?}: {outcome:?}"
            );
        }
        let at_the_end = forged(i64::MAX as u64, BITMAP, &[0xff]);
        assert!(matches!(
            read(&at_the_end, i64::MAX),
            Err(SnapshotError::Damaged(_))
        ));
    }

    #[test]
    fn a_set_of_ranges_is_asked_from_low_to_high() {
        let mut finished = FinishedAbove {
            ranges: vec![3..5, 9..10],
            passed: 0,
            epoch: None,
            beside: None,
        };
        assert_eq!(finished.from(4).collect::<Vec<_>>(), [4..5, 9..10]);
        let held: Vec<_> = (0..10).filter(|n| finished.contains(*n)).collect();
        assert_eq!(held, [3, 4, 9]);
        assert_eq!(finished.from(10).count(), 0);
        assert!(!finished.contains(10));
        assert_eq!(finished, FinishedAbove::default(), "passed, and let go");
    }

    fn some_marks(committed: i64) -> Marks {
        let deaths = |offset, count| Deaths { offset, count };
        Marks {
            dirty: true,
            alone: 64,
            careful: 16_384,
            running: Some(committed + 3),
            deaths: vec![deaths(committed + 3, 2), deaths(committed + 900, u32::MAX)],
        }
    }

    #[test]
    fn marks_are_read_back_with_ranges_and_without() {
        for marks in [
            some_marks(5),
            Marks {
                dirty: true,
                ..Marks::default()
            },
            Marks {
                running: Some(5),
                ..Marks::default()
            },
        ] {
            for finished in [vec![], vec![6..8, 20..21], alternate(7, 3_000)] {
                let text = marked(5, &marks, &finished, LIMIT).text;
                let read = decode(text.as_bytes(), here(), 5).expect("it was just written");
                assert_eq!(
                    (read.marks, read.finished.ranges),
                    (marks.clone(), finished)
                );
            }
        }
    }

    #[test]
    fn the_topic_stands_in_every_snapshot_and_costs_few_characters() {
        let topic = TopicSeen {
            id: u32::MAX,
            partitions: 200,
        };
        let here = here().with_topic(topic);
        for marks in [Marks::default(), some_marks(5)] {
            for finished in [vec![], vec![6..8, 20..21], alternate(7, 30_000)] {
                let text = encode(here, 5, &marks, finished.iter().cloned(), Some(7), LIMIT).text;
                let read = decode(text.as_bytes(), here, 5).expect("it was just written");
                let epoch = (!finished.is_empty()).then_some(7);
                assert_eq!(read.finished.epoch(), epoch);
                assert_eq!((read.written, read.marks), (topic, marks.clone()));
            }
        }
        let nothing = std::iter::empty;
        let text = encode(here, 1 << 40, &Marks::default(), nothing(), Some(7), LIMIT).text;
        assert!(text.len() < 35, "{text}");
        let later = here.with_topic(TopicSeen::default());
        let read = decode(text.as_bytes(), later, 1 << 40).expect("it belongs to the same place");
        assert_eq!(
            read.written, topic,
            "whatever the reader knows of the topic"
        );
    }

    #[test]
    fn the_mark_of_an_ownership_that_has_just_begun_is_short() {
        let dirty = Marks {
            dirty: true,
            ..Marks::default()
        };
        assert!(marked(1 << 40, &dirty, &[], LIMIT).text.len() < 35);
    }

    #[test]
    fn a_cut_costs_ranges_and_never_marks() {
        let marks = some_marks(0);
        for limit in 45..400 {
            let snapshot = marked(0, &marks, &alternate(1, 3_000), limit);
            assert!(snapshot.text.len() <= limit && snapshot.cut.is_some());
            let read = decode(snapshot.text.as_bytes(), here(), 0).expect("it was just written");
            assert_eq!(read.marks, marks, "{limit}");
        }
        let nothing = marked(0, &marks, &[], 20);
        assert_eq!(nothing.text, "", "there is no room even for them");
    }

    #[test]
    fn what_was_written_before_there_were_marks_is_still_read() {
        let text = written(5, &[7..9], LIMIT).text;
        assert!(text.starts_with("rc1"));
        assert!(
            marked(5, &some_marks(5), &[7..9], LIMIT)
                .text
                .starts_with("rc2")
        );
        // As the first version of this library wrote it.
        let old = "rc1izbb_z~t<iGzu4{(q";
        assert_eq!(text, old);
        assert_eq!(read(old, 5), Ok(vec![7..9]));
    }

    // T11
    #[test]
    fn a_version_that_was_changed_is_damage() {
        for text in [
            written(5, &[7..9], LIMIT).text,
            marked(5, &some_marks(5), &[7..9], LIMIT).text,
        ] {
            let changed = match text.as_bytes()[MAGIC.len()] {
                b'1' => text.replacen('1', "2", 1),
                _ => text.replacen('2', "1", 1),
            };
            assert!(matches!(read(&changed, 5), Err(SnapshotError::Damaged(_))));
        }
    }

    // T11
    #[test]
    fn forged_marks_are_refused() {
        let forged = |marks: &[u8]| {
            let mut body = here().place.to_vec();
            push_varint(&mut body, 5);
            body.extend(marks);
            decode(seal(HEADED, &body).as_bytes(), here(), 5)
        };
        let deaths_of_one_record = [9, 0, 0, 2, 7, 1, 7, 1];
        let mut too_many = vec![9, 0, 0, 40];
        (0..40).for_each(|n| too_many.extend([n, 1]));
        let mut beyond = vec![2];
        push_varint(&mut beyond, i64::MAX as u64);
        let mut huge = vec![9];
        push_varint(&mut huge, u64::from(u32::MAX) + 1);
        huge.extend([0, 0]);
        for marks in [
            &[][..],
            &[16, 0, 0, 0],
            &[9, 0],
            &[4, 1, 1, 1],
            &deaths_of_one_record,
            &too_many,
            &beyond,
            &huge,
        ] {
            let outcome = forged(marks);
            assert!(
                matches!(outcome, Err(SnapshotError::Damaged(_))),
                "{marks:?}: {outcome:?}"
            );
        }
        assert!(forged(&[9, 0, 0, 0]).is_ok());
        assert!(forged(&[4, 1, 1, 1, 1, 8]).is_ok());
    }

    fn finished_from(committed: i64) -> impl Strategy<Value = Vec<Range<i64>>> {
        let gap = prop_oneof![8 => 1..4i64, 2 => 1..300i64, 1 => 1..1_000_000_000i64];
        let length = prop_oneof![8 => 1..3i64, 2 => 1..200i64, 1 => 1..100_000i64];
        let steps = prop_oneof![
            7 => prop::collection::vec((gap.clone(), length.clone()), 0..60),
            1 => prop::collection::vec((gap, length), 3_000..4_000),
        ];
        steps.prop_map(move |steps| {
            let mut at = committed;
            let range = |(gap, length)| {
                let start = at + gap;
                at = start + length;
                start..at
            };
            steps.into_iter().map(range).collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

        #[test]
        fn any_set_survives_and_a_cut_keeps_the_near_end(
            finished in finished_from(40),
            limit in prop_oneof![Just(LIMIT), 0..LIMIT],
        ) {
            let snapshot = written(40, &finished, limit);
            prop_assert!(snapshot.text.len() <= limit);
            let cut = snapshot.cut.unwrap_or(i64::MAX);
            let near: Vec<_> = finished
                .iter()
                .map(|range| range.start..range.end.min(cut))
                .filter(|range| !range.is_empty())
                .collect();
            if let Some(cut) = snapshot.cut {
                prop_assert!(finished.iter().any(|range| range.contains(&cut)));
            }
            prop_assert_eq!(read(&snapshot.text, 40), Ok(near));
        }

        #[test]
        fn no_input_makes_the_reader_panic(
            text in prop::collection::vec(any::<u8>(), 0..5_000),
            committed in any::<i64>(),
        ) {
            let _ = decode(&text, here(), committed);
            let _ = decode(&[b"rc1", text.as_slice()].concat(), here(), committed);
            let mut body = here().place.to_vec();
            push_varint(&mut body, committed as u64);
            body.extend(&text);
            let _ = decode(seal(HEADED, &body).as_bytes(), here(), committed);
        }

        #[test]
        fn no_forged_body_makes_the_reader_panic_or_go_wild(
            data in prop::collection::vec(any::<u8>(), 0..3_000),
            committed in prop_oneof![0..1_000i64, i64::MAX - 30_000..=i64::MAX],
            form in 0..3u8,
        ) {
            if let Ok(finished) = read(&forged(committed as u64, form, &data), committed) {
                prop_assert!(finished.len() <= data.len() * 4);
                prop_assert!(finished.iter().all(|range| committed <= range.start && !range.is_empty()));
                prop_assert!(finished.windows(2).all(|pair| pair[0].end < pair[1].start));
            }
        }

        // T11
        #[test]
        fn damaged_text_is_refused_or_says_the_same(
            finished in finished_from(40),
            at in any::<prop::sample::Index>(),
            change in 1..128u8,
        ) {
            prop_assume!(!finished.is_empty());
            let text = written(40, &finished, LIMIT).text.into_bytes();
            let mut flipped = text.clone();
            flipped[at.index(text.len())] ^= change;
            // The last character holds bits that stand for nothing.
            let outcome = decode(&flipped, here(), 40);
            prop_assert!(outcome.is_err() || outcome == decode(&text, here(), 40));
            let cut = &text[..at.index(text.len())];
            prop_assert!(cut.is_empty() || decode(cut, here(), 40).is_err());
        }
    }
}
