//! Rebalances: where a partition starts, and how it is given away.
//!
//! Both run inside the client's callback, on the pump's thread. The callback may block: while partitions are drained
//! the others go on, as the same round runs here.

use std::{
    collections::HashSet,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use rdkafka::{
    Offset, TopicPartitionList,
    consumer::{Consumer as _, RebalanceProtocol},
};

use super::{
    BaseConsumer,
    epochs::Epochs,
    ffi::PartitionQueue,
    prefetch::Prefetch,
    pump::{Held, Pump, filled_wake},
    starts::{Found, Place, Position, Surprise},
    surprises::{Log, Silence},
    topics::QUESTION,
    watch::{Change, Watch},
};
use crate::{
    consumer::{Event, RunErrorKind, TopicPartition},
    engine::{Identity, Inherited, Marks, Ownership, decode_snapshot},
    execute::Fence,
    record::Source,
};

/// What an assignment's answer waits for starts to be known. The client reads nothing meanwhile.
const CALLBACK: Duration = Duration::from_secs(1);
/// Of a drain's time, what is kept for the commit at its end.
const COMMIT: Duration = Duration::from_secs(2);

impl Pump {
    /// The group gives us these partitions. Those whose start is known soon are assigned to the client with the answer, the
    /// others as soon as it is: see [`Starts`](super::starts::Starts).
    pub(super) fn assigned(&mut self, consumer: &BaseConsumer, list: &TopicPartitionList) {
        let mut assignment = TopicPartitionList::with_capacity(list.count());
        if !self.is_stopping() {
            self.learn_cluster_id(consumer);
            let found = self.starts_within(consumer, &named(list), CALLBACK);
            self.take_over(found, &mut assignment);
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

    fn starts_within(
        &mut self,
        consumer: &BaseConsumer,
        partitions: &[Place],
        limit: Duration,
    ) -> Vec<Found> {
        let began = Instant::now();
        self.starts.add(partitions, began);
        // Nothing is committed between the group's question and our answer: see `drain_until`.
        self.engine.hold_commits(true);
        let mut found = Vec::with_capacity(partitions.len());
        loop {
            found.extend(self.look_for_starts(consumer, Instant::now()));
            let left = limit.saturating_sub(began.elapsed());
            if self.starts.are_settled() || self.is_stopping() || left.is_zero() {
                break;
            }
            if !self.step(consumer) {
                thread::park_timeout(self.sleep().min(left));
            }
        }
        self.engine.hold_commits(false);
        found
    }

    /// Takes over partitions whose start was not known when they were assigned. Not within a rebalance: that more is assigned
    /// to the client must not be taken for the answer to it.
    pub(super) fn attend_to_starts(&mut self, consumer: &BaseConsumer) -> bool {
        // Those of a lost assignment are about to be taken away, and assigning anything would hide that they are lost.
        if self.is_stopping() || self.starts.are_none() || consumer.assignment_lost() {
            return false;
        }
        let found = self.look_for_starts(consumer, Instant::now());
        if found.is_empty() || self.is_stopping() {
            return false;
        }
        let cooperative = matches!(
            consumer.rebalance_protocol(),
            RebalanceProtocol::Cooperative
        );
        let mut assignment = TopicPartitionList::new();
        if !cooperative {
            // Eager protocols assign all or nothing: the others go on where they are.
            for held in self.held.iter().flatten() {
                let position = self.engine.status(held.owner).and_then(|it| it.position);
                let Source {
                    topic, partition, ..
                } = &*held.source;
                if let Some(position) = position {
                    let offset = Offset::Offset(position);
                    let _ = assignment.add_partition_offset(topic, *partition, offset);
                }
            }
        }
        self.take_over(found, &mut assignment);
        self.resume_before_assign(consumer, &assignment);
        let assigned = match cooperative {
            true => consumer.incremental_assign(&assignment),
            false => consumer.assign(&assignment),
        };
        if let Err(error) = assigned {
            let message = format!("the client does not accept partitions that are ours: {error}");
            self.fail(RunErrorKind::Client, message);
        }
        if !cooperative {
            self.seek_all();
        }
        true
    }

    fn take_over(&mut self, found: Vec<Found>, assignment: &mut TopicPartitionList) {
        let mut taken = Vec::with_capacity(found.len());
        let mut surprises = Vec::new();
        for Found {
            place,
            position,
            waited,
        } in found
        {
            let (topic, partition) = &place;
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
                validated: None,
                // A new group commits where it starts at once.
                was_read: position.committed.is_some_and(|offset| offset > 0),
                setback: None,
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
                waited_ms = (waited > CALLBACK).then_some(waited.as_millis() as u64),
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
            Surprise::TopicAdded => {
                tracing::info!(
                    %topic, partition = number, start,
                    "the topic is new to a group that reads others by the same pattern: it is read from its start"
                );
                self.tell(Event::TopicAdded { partition, start });
            }
            Surprise::Missing { skipped } => {
                if skipped == 0 {
                    tracing::warn!(
                        %topic, partition = number, start,
                        "the committed offset is gone, while the group has others in this topic: it was deleted, or has \
                         expired; the partition is read from its start, and what was handled comes again"
                    );
                } else {
                    tracing::warn!(
                        %topic, partition = number, start, skipped,
                        "there is no committed offset, while other members have some in this topic: unless the group is just \
                         beginning it was deleted, or has expired; the partition starts where the start policy says, and what \
                         is before is not read: to read it, commit an offset for the group while none of its members runs"
                    );
                }
                self.tell(Event::CommittedOffsetMissing {
                    partition,
                    start,
                    skipped,
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

    pub(super) fn identity(&self, topic: &str, partition: i32) -> Identity {
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

    /// The group takes these partitions away. When they are lost already, another member may be at work on them.
    pub(super) fn revoked(&mut self, consumer: &BaseConsumer, list: &TopicPartitionList) {
        let began = Instant::now();
        let lost = consumer.assignment_lost();
        let partitions: HashSet<Place> = named(list).into_iter().collect();
        self.starts.remove(&partitions);
        let owners: Vec<_> = self
            .held
            .iter()
            .flatten()
            .filter(|held| {
                let place = (Arc::clone(&held.source.topic), held.source.partition);
                partitions.contains(&place)
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
    let elements = assigned.elements();
    let assigned: HashSet<_> = elements
        .iter()
        .map(|element| (element.topic(), element.partition()))
        .collect();
    let mut given = TopicPartitionList::with_capacity(list.count());
    for element in list.elements() {
        let (topic, partition) = (element.topic(), element.partition());
        if assigned.contains(&(topic, partition)) {
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
