//! Where a group stands, by what it has committed and noted beside that; and noting something for a group that is idle.

use std::{
    ops::Range,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use rdkafka::{
    Offset, TopicPartitionList, consumer::Consumer as _, error::KafkaError,
    types::RDKafkaErrorCode as Code,
};

use super::{
    cluster::{Cluster, InspectError},
    ffi::{CommitEntry, ReplyQueue, leader_epochs_of, metadata_of},
};
use crate::engine::{
    FinishedAbove, Identity, Inherited, SNAPSHOT_LIMIT, decode_snapshot, encode_snapshot,
};

/// Topics asked about in one request for committed offsets.
const ASKED: usize = 5_000;

/// Where a group stands in a partition.
#[derive(Debug, Clone)]
#[cfg_attr(
    not(feature = "cli"),
    allow(
        dead_code,
        reason = "the command line needs more of it than the redriver"
    )
)]
pub struct Committed {
    /// The topic.
    pub topic: String,
    /// The partition.
    pub partition: i32,
    /// `None`: nothing is committed.
    pub offset: Option<i64>,
    /// What stands beside it.
    pub note: Note,
    epoch: Option<i32>,
}

impl Committed {
    /// Whether the group is done with this offset.
    pub fn covers(&self, offset: i64) -> bool {
        // Asked for each of many records.
        let above = self.note.finished();
        let next = above.partition_point(|range| range.end <= offset);
        self.offset.is_some_and(|committed| offset < committed)
            || above.get(next).is_some_and(|range| range.contains(&offset))
    }
}

/// What stands beside a committed offset.
#[derive(Debug, Clone)]
pub enum Note {
    /// Nothing.
    Empty,
    /// What the group has noted.
    Read(Remark),
    /// Something else, or of somewhere else: the group will not believe it either. And why.
    Strange(String),
}

impl Note {
    /// What is finished above the committed offset, ascending.
    pub fn finished(&self) -> &[Range<i64>] {
        match self {
            Self::Read(remark) => &remark.finished,
            Self::Empty | Self::Strange(_) => &[],
        }
    }
}

/// What a group has noted beside its committed offset.
#[derive(Debug, Clone)]
#[cfg_attr(
    not(feature = "cli"),
    allow(
        dead_code,
        reason = "the command line needs more of it than the redriver"
    )
)]
pub struct Remark {
    /// Ascending.
    pub finished: Vec<Range<i64>>,
    /// The record that runs alone, since the process has died and it may be the cause.
    pub alone: Option<i64>,
    /// Records under which the process has died, and how often.
    pub deaths: Vec<(i64, u32)>,
    inherited: Inherited,
}

impl Cluster {
    /// Where the group stands in all partitions of these topics, as far as they are told, in their order.
    pub fn committed(&self, topics: &[(String, i32)]) -> Result<Vec<Committed>, InspectError> {
        let what = format!("committed offsets of group `{}`", self.group);
        let cluster = self.id();
        let places: Vec<_> = topics
            .iter()
            .flat_map(|(topic, partitions)| (0..*partitions).map(move |it| (topic, it)))
            .collect();
        let mut found = Vec::with_capacity(places.len());
        for places in places.chunks(ASKED) {
            let mut asked = TopicPartitionList::with_capacity(places.len());
            for (topic, partition) in places {
                asked.add_partition(topic, *partition);
            }
            let answer = self.ask(&what, |client| {
                client.committed_offsets(asked.clone(), self.patience.answer)
            })?;
            let (metadata, epochs) = (metadata_of(&answer), leader_epochs_of(&answer));
            for ((element, metadata), epoch) in answer.elements().iter().zip(metadata).zip(epochs) {
                element
                    .error()
                    .map_err(|error| self.explain(&what, &error))?;
                let (topic, partition) = (element.topic(), element.partition());
                let identity = Identity::new(&cluster, &self.group, topic, partition);
                let offset = match element.offset() {
                    Offset::Offset(offset) => Some(offset),
                    _ => None,
                };
                found.push(Committed {
                    topic: topic.to_owned(),
                    partition,
                    offset,
                    note: offset
                        .map_or(Note::Empty, |offset| read_note(metadata, identity, offset)),
                    epoch,
                });
            }
        }
        Ok(found)
    }

    /// Where the group stands in one partition.
    pub fn committed_in(&self, topic: &str, partition: i32) -> Result<Committed, InspectError> {
        let all = self.committed(&[(topic.to_owned(), partition.saturating_add(1))])?;
        all.into_iter()
            .find(|it| it.partition == partition)
            .ok_or_else(|| InspectError::UnknownTopic(topic.to_owned()))
    }

    /// Notes for the group that it is done with these offsets of a partition, as if it had finished them itself. With none,
    /// writes what stands there already: that shows whether it could.
    ///
    /// # Errors
    ///
    /// [`InspectError::GroupAtWork`] if the group has members, [`InspectError::NoRoom`], [`InspectError::StrangeNote`].
    pub fn mark_finished(
        &self,
        topic: &str,
        partition: i32,
        done: &[Range<i64>],
    ) -> Result<(), InspectError> {
        let before = self.committed_in(topic, partition)?;
        let (inherited, start) = match (&before.note, before.offset) {
            (Note::Strange(reason), _) => {
                return Err(InspectError::StrangeNote {
                    topic: topic.to_owned(),
                    partition,
                    group: self.group.clone(),
                    reason: reason.clone(),
                });
            }
            (Note::Read(remark), Some(offset)) => (remark.inherited.clone(), offset),
            (_, offset) => {
                let inherited = Inherited {
                    identity: Identity::new(&self.id(), &self.group, topic, partition),
                    ..Inherited::default()
                };
                // Where a redriver would begin.
                let start = match offset {
                    Some(offset) => offset,
                    None => self.bounds(topic, partition)?.start,
                };
                (inherited, start)
            }
        };
        let (committed, finished) = and_finished(start, before.note.finished(), done);
        let snapshot = encode_snapshot(
            inherited.identity.with_topic(inherited.written),
            committed,
            &inherited.marks,
            finished.into_iter(),
            // Not known of what is noted here.
            None,
            SNAPSHOT_LIMIT,
        );
        if snapshot.cut.is_some() {
            return Err(InspectError::NoRoom {
                topic: topic.to_owned(),
                partition,
                committed,
            });
        }
        self.commit(CommitEntry {
            topic,
            partition,
            offset: committed,
            leader_epoch: before.epoch,
            metadata: (!snapshot.text.is_empty()).then_some(&*snapshot.text),
        })
    }

    pub(super) fn commit(&self, entry: CommitEntry<'_>) -> Result<(), InspectError> {
        let what = format!(
            "committing {}/{} for group `{}`",
            entry.topic, entry.partition, self.group
        );
        let gone = || InspectError::Client("it is gone".into());
        let replies = ReplyQueue::new(self.client.lifeline(), Arc::new(|| ())).ok_or_else(gone)?;
        let deadline = Instant::now() + self.patience.answer;
        loop {
            let refused = |code| InspectError::Refused {
                what: what.clone(),
                code,
            };
            replies.commit(&[entry]).map_err(refused)?;
            let left = deadline.saturating_duration_since(Instant::now());
            let answer = replies.poll(left);
            let code = match answer {
                None => Some(Code::OperationTimedOut),
                Some(answer) => {
                    let mut each = answer.partitions.iter();
                    each.find_map(|it| it.error).or(answer.error)
                }
            };
            match code {
                None => return Ok(()),
                Some(
                    Code::UnknownMemberId
                    | Code::IllegalGeneration
                    | Code::RebalanceInProgress
                    | Code::StaleMemberEpoch
                    | Code::FencedMemberEpoch
                    | Code::NonEmptyGroup,
                ) => return Err(InspectError::GroupAtWork(self.group.clone())),
                Some(code) if Instant::now() >= deadline => {
                    return Err(self.explain(&what, &KafkaError::ConsumerCommit(code)));
                }
                Some(code @ (Code::GroupAuthorizationFailed | Code::TopicAuthorizationFailed)) => {
                    return Err(refused(code));
                }
                // A coordinator that is being found, or that has just begun.
                Some(_) => thread::sleep(Duration::from_millis(100)),
            }
        }
    }
}

fn read_note(metadata: &[u8], identity: Identity, offset: i64) -> Note {
    if metadata.is_empty() {
        return Note::Empty;
    }
    match decode_snapshot(metadata, identity, offset) {
        Ok(inherited) => Note::Read(Remark {
            finished: inherited.finished.from(offset).collect(),
            alone: inherited.marks.running,
            deaths: inherited
                .marks
                .deaths
                .iter()
                .map(|it| (it.offset, it.count))
                .collect(),
            inherited,
        }),
        Err(error) => Note::Strange(error.to_string()),
    }
}

/// What is committed, and finished above it, once these offsets are finished too.
fn and_finished(
    committed: i64,
    above: &[Range<i64>],
    done: &[Range<i64>],
) -> (i64, Vec<Range<i64>>) {
    let ranges = above.iter().chain(done);
    let ranges = ranges.map(|range| range.start.max(committed)..range.end);
    let mut ranges: Vec<_> = ranges.filter(|range| !range.is_empty()).collect();
    ranges.sort_unstable_by_key(|range| (range.start, range.end));
    let mut finished: Vec<_> = FinishedAbove::of(ranges.into_iter())
        .from(committed)
        .collect();
    match finished.first() {
        Some(first) if first.start == committed => {
            let committed = first.end;
            finished.remove(0);
            (committed, finished)
        }
        _ => (committed, finished),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_marked_at_the_head_moves_the_offset_and_what_is_above_is_noted() {
        let after = |committed, above: &[(i64, i64)], offsets: &[i64]| {
            let above: Vec<_> = above.iter().map(|(from, to)| *from..*to).collect();
            let done: Vec<_> = offsets.iter().map(|it| *it..it.saturating_add(1)).collect();
            let (committed, above) = and_finished(committed, &above, &done);
            let above: Vec<_> = above.iter().map(|it| (it.start, it.end)).collect();
            (committed, above)
        };
        assert_eq!(after(5, &[], &[]), (5, vec![]));
        assert_eq!(after(5, &[], &[5]), (6, vec![]));
        assert_eq!(after(5, &[], &[7]), (5, vec![(7, 8)]));
        assert_eq!(after(5, &[(6, 9), (11, 12)], &[5]), (9, vec![(11, 12)]));
        assert_eq!(after(5, &[(6, 9)], &[10, 9, 2, 10]), (5, vec![(6, 11)]));
        assert_eq!(after(0, &[], &[i64::MAX]), (0, vec![]));
    }
}
