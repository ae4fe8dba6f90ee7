//! Rebalances: where a partition starts, and how it is given away.
//!
//! Both run inside the client's callback, on the pump's thread. The callback may block: while partitions are drained
//! the others go on, as the same round runs here.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant, UNIX_EPOCH},
};

use rdkafka::{
    Offset, TopicPartitionList,
    consumer::{Consumer as _, RebalanceProtocol},
    error::{KafkaError, KafkaResult},
};

use super::{
    BaseConsumer,
    epochs::Epochs,
    ffi::{PartitionQueue, leader_epochs_of, metadata_of},
    prefetch::Prefetch,
    pump::{Held, Pump, filled_wake},
    surprises::{Log, Silence},
    topics::QUESTION,
    watch::{Change, Watch},
};
use crate::{
    consumer::{Event, RunErrorKind, StartPolicy, TopicPartition},
    engine::{Identity, Inherited, Marks, Ownership, TopicSeen, decode_snapshot},
    execute::Fence,
    record::Source,
};

/// Between two tries.
const PAUSE: Duration = Duration::from_millis(200);
/// Of a drain's time, what is kept for the commit at its end.
const COMMIT: Duration = Duration::from_secs(2);

/// Where reading of a partition begins, and what the group had committed.
#[derive(Debug)]
struct Position {
    start: i64,
    committed: Option<i64>,
    /// What stands beside the committed offset: a snapshot, or whatever somebody wrote there.
    metadata: Vec<u8>,
    /// The leader epoch that stands beside the committed offset.
    epoch: Option<i32>,
    /// As it goes into the snapshots of this ownership.
    topic: TopicSeen,
    surprise: Option<Surprise>,
}

/// What a group did not expect that knows the topic.
#[derive(Debug, Clone, Copy)]
enum Surprise {
    /// It was made anew; the group stood here in the old one.
    Recreated(i64),
    /// The partition was added to it.
    Added,
}

/// What others have committed in the topic of a partition without a committed offset: which topic that was for each.
type Neighbours = Vec<(i32, TopicSeen)>;

/// Committed offsets, each with what stands beside it.
type Committed = HashMap<(Arc<str>, i32), (i64, Option<i32>, Vec<u8>)>;

enum NoPosition {
    /// The brokers do not answer.
    Unavailable(String),
    /// The start policy refuses.
    Refused,
}

impl Pump {
    /// The group gives us these partitions.
    pub(super) fn assigned(&mut self, consumer: &BaseConsumer, list: &TopicPartitionList) {
        let partitions = named(list);
        let mut assignment = TopicPartitionList::with_capacity(partitions.len());
        if !self.is_stopping() {
            self.take_over(consumer, &partitions, &mut assignment);
        }
        self.resume_before_assign(consumer, &assignment);
        // An assignment must be answered whatever became of it; what was not taken over is read by nobody.
        let answered = match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_assign(&assignment),
            _ => consumer.assign(&assignment),
        };
        if let Err(error) = answered {
            let message = format!("the client did not accept its assignment: {error}");
            self.fail(RunErrorKind::Client, message);
        }
    }

    fn take_over(
        &mut self,
        consumer: &BaseConsumer,
        partitions: &[(Arc<str>, i32)],
        assignment: &mut TopicPartitionList,
    ) {
        self.learn_cluster_id(consumer);
        // Before the offsets: of a topic that is made anew in between, the old id is known beside the old offset.
        let mut names: Vec<_> = partitions.iter().map(|(topic, _)| topic.clone()).collect();
        names.sort_unstable();
        names.dedup();
        let topics = self.describe(consumer, &names);
        let mut changed = names;
        changed.retain(|topic| {
            let now = topics.get(&**topic).copied().unwrap_or_default();
            self.note_topic(topic, now)
        });
        let Some(positions) = self.positions(consumer, partitions, &topics, &changed) else {
            return;
        };
        let mut taken = Vec::with_capacity(partitions.len());
        let mut surprises = Vec::new();
        for ((topic, partition), position) in partitions.iter().zip(positions) {
            if self
                .settings
                .dead_letter
                .as_ref()
                .is_some_and(|dead_letter| dead_letter.topic == **topic)
            {
                let message = format!(
                    "the subscription takes in `{topic}`, which is the dead-letter topic: every dead letter would come \
                     back at once, for ever; choose another name or pattern"
                );
                self.fail(RunErrorKind::DeadLetterTopicConsumed, message);
                return;
            }
            let tier = self.settings.retry_topics.get(topic).cloned();
            let handled_as = tier.as_ref().map_or(topic, |tier| &tier.source);
            let Some(driver) = (self.lookup)(handled_as) else {
                self.fail(
                    RunErrorKind::NoHandler,
                    format!("there is no handler for topic `{handled_as}`: add a route for it, or a narrower subscription"),
                );
                return;
            };
            let (wake, filled) = filled_wake(&self.thread);
            let Some(queue) = PartitionQueue::take(&self.lifeline, topic, *partition, wake) else {
                self.fail(
                    RunErrorKind::Client,
                    format!("partition {topic}/{partition} has no queue"),
                );
                return;
            };
            let added =
                assignment.add_partition_offset(topic, *partition, Offset::Offset(position.start));
            if let Err(error) = added {
                let message = format!(
                    "partition {topic}/{partition}: cannot start at {}: {error}",
                    position.start
                );
                self.fail(RunErrorKind::Client, message);
                return;
            }
            let inherited = self.inherited(topic, *partition, &position);
            let identity = inherited.identity;
            let owner = self
                .engine
                .assign(Some(position.start), position.committed, inherited);
            let held = Held {
                owner,
                source: Arc::new(Source::new(Arc::clone(topic), *partition)),
                queue,
                filled,
                fence: Arc::new(Fence::default()),
                driver,
                tier,
                end: None,
                identity,
                log: Log::Sound,
                looked_at: None,
                epochs: Epochs::from(position.start, position.epoch),
                silence: match position.surprise {
                    Some(Surprise::Recreated(_)) => Some(Silence::from(position.start)),
                    _ => None,
                },
                outdated: None,
                cut_reported: false,
                watch: Watch::default(),
                prefetch: Prefetch::default(),
            };
            if self.held.len() <= owner.slot() {
                self.held.resize_with(owner.slot() + 1, || None);
            }
            tracing::info!(
                topic = %topic,
                partition,
                start = position.start,
                committed = position.committed,
                "partition assigned"
            );
            self.held[owner.slot()] = Some(held);
            taken.push(owner);
            surprises.extend(
                position
                    .surprise
                    .map(|surprise| (owner, position.start, surprise)),
            );
        }
        self.apply_pauses();
        self.announce(Change::Assigned, &self.named(&taken));
        for (owner, start, surprise) in surprises {
            self.tell_of_surprise(owner, start, surprise);
        }
    }

    fn tell_of_surprise(&self, owner: Ownership, start: i64, surprise: Surprise) {
        let partition = TopicPartition::of(self.source(owner));
        let (topic, number) = (&partition.topic, partition.partition);
        match surprise {
            Surprise::Recreated(position) => {
                tracing::warn!(
                    %topic, partition = number, position, start,
                    "the topic was deleted and made anew since it was last read: it is read from its start"
                );
                self.tell(Event::TopicRecreated {
                    partition,
                    position,
                    start,
                });
            }
            Surprise::Added => {
                tracing::info!(
                    %topic, partition = number, start,
                    "the partition was added to a topic that the group reads already: it is read from its start"
                );
                self.tell(Event::PartitionAdded { partition, start });
            }
        }
    }

    /// The client knows it as soon as it has talked to a broker, as it has by now. Should it not be had, snapshots are
    /// written without it, and not believed once it is known: their records are repeated, none is lost.
    fn learn_cluster_id(&mut self, consumer: &BaseConsumer) {
        if self.cluster_id.is_empty() {
            let id = consumer.client().fetch_cluster_id(QUESTION);
            self.cluster_id = id.unwrap_or_default();
        }
    }

    fn identity(&self, topic: &str, partition: i32) -> Identity {
        Identity::new(&self.cluster_id, &self.settings.group, topic, partition)
    }

    fn inherited(&mut self, topic: &Arc<str>, partition: i32, position: &Position) -> Inherited {
        let identity = self.identity(topic, partition).with_topic(position.topic);
        let written = decode_snapshot(&position.metadata, identity, position.start)
            .inspect_err(|error| {
                tracing::warn!(
                    %topic,
                    partition,
                    committed = position.committed,
                    "the metadata of the committed offset is ignored, as {error}; records above that offset which \
                     were finished already may be handled again"
                );
            })
            .unwrap_or_else(|_| Inherited {
                identity,
                ..Inherited::default()
            });
        // What we finished before we lost it is finished, whatever has been committed since: by us, in a commit whose
        // answer we did not see, or by another owner.
        let remembered = self.remembered.remove(&(Arc::clone(topic), partition));
        let inherited = written.and_remembered(position.committed, remembered);
        if self.settings.engine.crash_limit.is_some() {
            tell_of_suspects(topic, partition, position.committed, &inherited.marks);
        }
        inherited
    }

    /// Asks the brokers until they answer or the callback has taken all the time that it may.
    fn positions(
        &mut self,
        consumer: &BaseConsumer,
        partitions: &[(Arc<str>, i32)],
        topics: &HashMap<String, TopicSeen>,
        changed: &[Arc<str>],
    ) -> Option<Vec<Position>> {
        let until = Instant::now() + self.settings.longest_callback();
        // Nothing is committed between the group's question and our answer: see `drain_until`.
        self.engine.hold_commits(true);
        let ask = |pump: &Self| pump.ask_positions(consumer, partitions, topics, changed);
        let positions = self.positions_until(consumer, ask, until);
        self.engine.hold_commits(false);
        positions
    }

    fn positions_until(
        &mut self,
        consumer: &BaseConsumer,
        ask: impl Fn(&Self) -> Result<Vec<Position>, NoPosition>,
        until: Instant,
    ) -> Option<Vec<Position>> {
        loop {
            match ask(self) {
                Ok(positions) => return Some(positions),
                Err(NoPosition::Refused) => {
                    let message = format!(
                        "group `{}` has no committed offset for some of its partitions and is told to refuse that: \
                         commit an offset for it, or choose another start policy",
                        self.settings.group
                    );
                    self.fail(RunErrorKind::NoCommittedOffset, message);
                    return None;
                }
                Err(NoPosition::Unavailable(error)) if Instant::now() >= until => {
                    let message = format!(
                        "the committed offsets of group `{}` could not be read in time ({error}): see whether its \
                         coordinator is up",
                        self.settings.group
                    );
                    self.fail(RunErrorKind::OffsetsUnavailable, message);
                    return None;
                }
                Err(NoPosition::Unavailable(error)) => {
                    tracing::warn!(
                        error,
                        "the group's committed offsets cannot be read; asking again"
                    );
                    self.step(consumer);
                    std::thread::park_timeout(PAUSE);
                }
            }
            if self.is_stopping() {
                return None;
            }
        }
    }

    /// `topics`: what they are now, as far as that is known. `changed`: those that were made anew while this process lives.
    fn ask_positions(
        &self,
        consumer: &BaseConsumer,
        partitions: &[(Arc<str>, i32)],
        topics: &HashMap<String, TopicSeen>,
        changed: &[Arc<str>],
    ) -> Result<Vec<Position>, NoPosition> {
        let mut committed = self.ask_committed(consumer, partitions)?;
        let neighbours = self.ask_neighbours(consumer, partitions, topics, &committed)?;
        let mut positions = Vec::with_capacity(partitions.len());
        for (topic, partition) in partitions {
            let now = topics.get(&**topic).copied().unwrap_or_default();
            let start_of_log = || {
                let ends = consumer.fetch_watermarks(topic, *partition, QUESTION);
                ends.map(|(first, _)| first).map_err(unavailable)
            };
            let position = match committed.remove(&(Arc::clone(topic), *partition)) {
                Some((offset, epoch, metadata)) => {
                    let written = self.topic_in(&metadata, topic, *partition, offset);
                    if now.differs_from(written) {
                        let surprise = Surprise::Recreated(offset);
                        Position::surprising(start_of_log()?, now.made_anew(), surprise)
                    } else {
                        Position {
                            start: offset,
                            committed: Some(offset),
                            metadata,
                            epoch,
                            topic: TopicSeen {
                                id: if now.id == 0 { written.id } else { now.id },
                                partitions: written.partitions,
                            },
                            surprise: None,
                        }
                    }
                }
                None if changed.contains(topic) => {
                    Position::surprising(start_of_log()?, now.made_anew(), Surprise::Recreated(0))
                }
                None => {
                    let neighbours = neighbours.get(topic).map_or(&[][..], Vec::as_slice);
                    if is_added(*partition, now, neighbours) {
                        let began_with = neighbours.iter().map(|(_, seen)| seen.partitions);
                        let began_with = began_with.filter(|partitions| *partitions > 0).min();
                        let topic = TopicSeen {
                            partitions: began_with.unwrap_or_default(),
                            ..now
                        };
                        Position::surprising(start_of_log()?, topic, Surprise::Added)
                    } else {
                        let start = self.first_position(consumer, topic, *partition)?;
                        Position {
                            start: start.map_err(unavailable)?,
                            committed: None,
                            metadata: Vec::new(),
                            epoch: None,
                            topic: now,
                            surprise: None,
                        }
                    }
                }
            };
            positions.push(position);
        }
        Ok(positions)
    }

    fn ask_committed(
        &self,
        consumer: &BaseConsumer,
        partitions: &[(Arc<str>, i32)],
    ) -> Result<Committed, NoPosition> {
        let mut list = TopicPartitionList::with_capacity(partitions.len());
        for (topic, partition) in partitions {
            list.add_partition(topic, *partition);
        }
        let answer = consumer
            .committed_offsets(list, QUESTION)
            .map_err(unavailable)?;
        let mut committed = HashMap::with_capacity(partitions.len());
        let beside = metadata_of(&answer)
            .into_iter()
            .zip(leader_epochs_of(&answer));
        for (element, (metadata, epoch)) in answer.elements().iter().zip(beside) {
            element.error().map_err(unavailable)?;
            if let Offset::Offset(offset) = element.offset() {
                let key = (Arc::from(element.topic()), element.partition());
                committed.insert(key, (offset, epoch, metadata.to_vec()));
            }
        }
        Ok(committed)
    }

    /// For topics with a partition that has no committed offset: what the group has committed in all others.
    fn ask_neighbours(
        &self,
        consumer: &BaseConsumer,
        partitions: &[(Arc<str>, i32)],
        topics: &HashMap<String, TopicSeen>,
        committed: &Committed,
    ) -> Result<HashMap<Arc<str>, Neighbours>, NoPosition> {
        let mut asked = Vec::new();
        for (topic, _) in partitions
            .iter()
            .filter(|place| !committed.contains_key(*place))
        {
            let count = topics.get(&**topic).map_or(0, |now| now.partitions);
            let all = (0..count as i32).map(|partition| (Arc::clone(topic), partition));
            asked.extend(all);
        }
        asked.sort_unstable();
        asked.dedup();
        let mut neighbours: HashMap<_, Neighbours> = HashMap::new();
        if asked.is_empty() {
            return Ok(neighbours);
        }
        for ((topic, partition), (offset, _, metadata)) in self.ask_committed(consumer, &asked)? {
            let written = self.topic_in(&metadata, &topic, partition, offset);
            neighbours
                .entry(topic)
                .or_default()
                .push((partition, written));
        }
        Ok(neighbours)
    }

    /// Which topic a committed offset belongs to, as far as it stands beside it.
    fn topic_in(&self, metadata: &[u8], topic: &str, partition: i32, offset: i64) -> TopicSeen {
        let read = decode_snapshot(metadata, self.identity(topic, partition), offset);
        read.map(|read| read.written).unwrap_or_default()
    }

    /// Where a group begins that has committed nothing: a number from the start, so that it can be committed.
    fn first_position(
        &self,
        consumer: &BaseConsumer,
        topic: &str,
        partition: i32,
    ) -> Result<KafkaResult<i64>, NoPosition> {
        let ends = || consumer.fetch_watermarks(topic, partition, QUESTION);
        // Whatever lies in a retry topic is unfinished, from before the group first read it too.
        let start = match self.settings.retry_topics.get(topic) {
            Some(_) => StartPolicy::Earliest,
            None => self.settings.start,
        };
        Ok(match start {
            StartPolicy::Refuse => return Err(NoPosition::Refused),
            StartPolicy::Earliest => ends().map(|(low, _)| low),
            StartPolicy::Latest => ends().map(|(_, high)| high),
            StartPolicy::Time(time) => {
                let millis = time
                    .duration_since(UNIX_EPOCH)
                    .unwrap_or_default()
                    .as_millis();
                let mut list = TopicPartitionList::new();
                let asked = Offset::Offset(i64::try_from(millis).unwrap_or(i64::MAX));
                list.add_partition_offset(topic, partition, asked)
                    .and_then(|()| consumer.offsets_for_times(list, QUESTION))
                    .and_then(|answer| {
                        match answer.elements().first().map(|element| element.offset()) {
                            Some(Offset::Offset(offset)) => Ok(offset),
                            // Nothing is that young: the end.
                            _ => ends().map(|(_, high)| high),
                        }
                    })
            }
        })
    }

    /// The group takes these partitions away. When they are lost already, another member may be at work on them.
    pub(super) fn revoked(&mut self, consumer: &BaseConsumer, list: &TopicPartitionList) {
        let began = Instant::now();
        let lost = consumer.assignment_lost();
        let partitions = named(list);
        let owners: Vec<_> = self
            .held
            .iter()
            .flatten()
            .filter(|held| {
                partitions.iter().any(|(topic, partition)| {
                    *topic == held.source.topic && *partition == held.source.partition
                })
            })
            .map(|held| held.owner)
            .collect();
        // None are left at an orderly end, which has given them back before it leaves the group.
        if !owners.is_empty() {
            tracing::info!(partitions = owners.len(), lost, "partitions are taken away");
        }
        let gone = self.named(&owners);
        if lost {
            // Nothing more starts, so that each handler that runs now is the last one in its place. What has finished
            // up to here has finished under this ownership.
            self.close_fences(&owners, began);
            while self.take_reports() {}
            self.set_aside_what_is_lost(&owners);
            owners.iter().for_each(|owner| self.lose(*owner));
            self.announce(Change::Lost, &gone);
        } else if !owners.is_empty() {
            let limit = self
                .settings
                .drain_timeout
                .min(self.settings.longest_callback());
            let until = began + limit;
            self.drain_until(consumer, &owners, until - COMMIT.min(limit / 4));
            self.commit_and_end(&owners, until);
            self.announce(Change::Revoked, &gone);
            self.engine.hold_commits(false);
        }
        let answered = match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => {
                consumer.incremental_unassign(&assigned_of(consumer, list))
            }
            _ => consumer.unassign(),
        };
        if let Err(error) = answered {
            tracing::warn!(%error, "the client did not accept that partitions are gone");
        }
    }
}

impl Position {
    /// From the start of a log of which nothing is known.
    fn surprising(start: i64, topic: TopicSeen, surprise: Surprise) -> Self {
        Self {
            start,
            committed: None,
            metadata: Vec::new(),
            epoch: None,
            topic,
            surprise: Some(surprise),
        }
    }
}

/// Whether a partition without a committed offset was added after the group had begun with its topic. In a group that is
/// new itself, another member may have committed its first offsets a moment ago: those say how many partitions it began
/// with. Those of other clients, and of a topic of that name that is no more, say only that the group is not new.
fn is_added(partition: i32, now: TopicSeen, neighbours: &[(i32, TopicSeen)]) -> bool {
    neighbours.iter().any(|(neighbour, seen)| {
        let began_without = i64::from(seen.partitions) <= i64::from(partition);
        *neighbour != partition && (began_without || now.differs_from(*seen))
    })
}

fn unavailable(error: KafkaError) -> NoPosition {
    NoPosition::Unavailable(error.to_string())
}

fn tell_of_suspects(topic: &str, partition: i32, committed: Option<i64>, marks: &Marks) {
    if let Some(offset) = marks.running {
        let before = marks.deaths.iter().find(|deaths| deaths.offset == offset);
        let deaths = before.map_or(1, |before| before.count.saturating_add(1));
        tracing::error!(
            %topic,
            partition,
            offset,
            deaths,
            "the process that had this partition died while this record ran alone; see what it does to its handler"
        );
    } else if marks.dirty {
        let alone = marks.alone;
        tracing::warn!(
            %topic,
            partition,
            committed,
            alone,
            "the process that had this partition died, and one of the records from here on may have killed it: they are handled few at a time, and one at a time should it die again"
        );
    }
}

/// Of these partitions, those that the client has been assigned. What was not taken over cannot be given back: asked for
/// it, the client would accept nothing, and wait for a better answer without leaving its group.
fn assigned_of(consumer: &BaseConsumer, list: &TopicPartitionList) -> TopicPartitionList {
    let Ok(assigned) = consumer.assignment() else {
        return list.clone();
    };
    let mut given = TopicPartitionList::with_capacity(list.count());
    for element in list.elements() {
        let (topic, partition) = (element.topic(), element.partition());
        if assigned.find_partition(topic, partition).is_some() {
            given.add_partition(topic, partition);
        }
    }
    given
}

fn named(list: &TopicPartitionList) -> Vec<(Arc<str>, i32)> {
    list.elements()
        .iter()
        .map(|element| (Arc::from(element.topic()), element.partition()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partition_is_added_when_the_group_knew_its_topic_without_it() {
        let topic = |id, partitions| TopicSeen { id, partitions };
        let now = topic(7, 6);
        for (neighbours, added) in [
            (&[][..], false),
            // Of other members of a new group, a moment ago.
            (&[(0, topic(7, 6)), (1, topic(7, 6))], false),
            (&[(0, topic(7, 6)), (1, topic(7, 5))], true),
            (&[(0, topic(7, 5))], true),
            // Its own, committed just now by an earlier owner.
            (&[(5, topic(7, 0))], false),
            // By another client.
            (&[(0, TopicSeen::default())], true),
            // In a topic of that name that is no more, and since it was made anew.
            (&[(0, topic(3, 6))], true),
            (&[(0, now.made_anew())], true),
        ] {
            assert_eq!(is_added(5, now, neighbours), added, "{neighbours:?}");
        }
    }
}
