//! What an operator asks of a cluster from outside: the ends of topics, what a group has committed and noted, and the
//! records themselves. Joins no group, and commits for one only when told to. All of it blocks its thread.

use std::{
    fmt,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use rdkafka::{
    ClientConfig, ClientContext, Offset, TopicPartitionList,
    config::RDKafkaLogLevel,
    consumer::{BaseConsumer, Consumer as _, ConsumerContext},
    error::{KafkaError, KafkaResult},
    metadata::MetadataTopic,
    types::RDKafkaErrorCode as Code,
};

use super::{
    errors::is_login_failure,
    ffi::{
        CommitEntry, Consumer, PartitionQueue, RawHeader, ReplyQueue, leader_epochs_of, metadata_of,
    },
    intake::copy_into,
    log::ClientLog,
    producer::{AckedProducer, Outgoing},
    properties::{Properties, PropertyError, consumer_config, producer_config},
};
use crate::{
    engine::{
        FinishedAbove, Identity, Inherited, SNAPSHOT_LIMIT, decode_snapshot, encode_snapshot,
    },
    record::{ChunkBuilder, Record, Source},
};

/// Read ahead of each partition, in KiB, and partitions read at a time: together they bound the memory.
const PREFETCH: u32 = 1_024;
const AT_A_TIME: usize = 16;
/// Records taken from a partition at a time.
const BITE: usize = 512;
/// Topics asked about in one request for committed offsets.
const ASKED: usize = 5_000;

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InspectError {
    /// See there.
    #[error(transparent)]
    Property(#[from] PropertyError),
    /// librdkafka refused.
    #[error("no client could be made: {0}")]
    Client(String),
    /// Nobody answers, or not to us.
    #[error(
        "{what}: no broker answered within {waited:?}{reason}; check the address, the network and the login"
    )]
    Unreachable {
        /// What was asked.
        what: String,
        /// For how long.
        waited: Duration,
        /// What the client met with, if it told.
        reason: String,
    },
    /// There is none.
    #[error("there is no topic `{0}`; check the name, and that this principal may Describe it")]
    UnknownTopic(String),
    /// The answer is an error.
    #[error("{what}: {code}; {}", advice_on(*.code))]
    Refused {
        /// What was asked.
        what: String,
        /// The error.
        code: Code,
    },
    /// Reading stands still.
    #[error(
        "{topic}/{partition}: nothing came for {waited:?} at offset {offset}, and the log goes on there{reason}"
    )]
    Silent {
        /// Where.
        topic: String,
        /// Where.
        partition: i32,
        /// Where.
        offset: i64,
        /// For how long.
        waited: Duration,
        /// What the client met with, if it told.
        reason: String,
    },
    /// Nobody but its members may commit for a group that has some.
    #[error("group `{0}` is at work, so that nothing can be noted for it; stop its members first")]
    GroupAtWork(String),
    /// The note must not be lost.
    #[error(
        "beside the committed offset of {topic}/{partition} stands what was not written there by group `{group}`: {reason}"
    )]
    StrangeNote {
        /// Where.
        topic: String,
        /// Where.
        partition: i32,
        /// Whose.
        group: String,
        /// Why it is not believed.
        reason: String,
    },
    /// The note has no room left.
    #[error(
        "{topic}/{partition}: too many separate letters are finished above offset {committed} to note one more; finish the older ones first"
    )]
    NoRoom {
        /// Where.
        topic: String,
        /// Where.
        partition: i32,
        /// Above which offset.
        committed: i64,
    },
    /// A record did not arrive.
    #[error("{0}")]
    NotSent(String),
}

fn advice_on(code: Code) -> &'static str {
    match code {
        Code::GroupAuthorizationFailed => "grant this principal Describe and Read on the group",
        Code::TopicAuthorizationFailed => "grant this principal Read and Describe on the topic",
        Code::ClusterAuthorizationFailed => "grant this principal what the cluster asks for",
        Code::PolicyViolation | Code::InvalidConfig | Code::InvalidReplicationFactor => {
            "the brokers' own rules forbid it: see their log, and choose other settings"
        }
        _ => "try again, and see the brokers' log if it stays",
    }
}

/// A cluster, as seen by somebody who speaks for a group without being a member.
pub struct Cluster {
    client: Consumer<Outside>,
    properties: Properties,
    group: String,
    patience: Duration,
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster")
            .field("properties", &self.properties)
            .field("group", &self.group)
            .finish_non_exhaustive()
    }
}

/// Where a group stands in a partition.
#[derive(Debug, Clone)]
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
pub struct Remark {
    /// Ascending.
    pub finished: Vec<Range<i64>>,
    /// The record that runs alone, since the process has died and it may be the cause.
    pub alone: Option<i64>,
    /// Records under which the process has died, and how often.
    pub deaths: Vec<(i64, u32)>,
    inherited: Inherited,
}

/// What is wanted after a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// The next one.
    More,
    /// Nothing more of this partition.
    Enough,
    /// Nothing more at all.
    Stop,
}

impl Cluster {
    /// Makes a client; it connects when it is asked something. Each question may take `patience`.
    ///
    /// # Errors
    ///
    /// Properties that cannot be.
    pub fn new(
        properties: impl IntoIterator<Item = (String, String)>,
        group: &str,
        patience: Duration,
    ) -> Result<Self, InspectError> {
        let mut own = Properties::default();
        for (name, value) in properties {
            own.set(name, value);
        }
        own.set("group.id", group);
        let mut config = consumer_config(&own, PREFETCH)?;
        // It is never a member. And where a log has been cut off, what is left of it is shown.
        config.remove("group.instance.id");
        config
            .set("enable.partition.eof", "true")
            .set("auto.offset.reset", "earliest");
        let client = Consumer::create(&config, Arc::new(|| ()), |_| Outside::default());
        Ok(Self {
            client: client.map_err(|error| InspectError::Client(error.to_string()))?,
            properties: own,
            group: group.to_owned(),
            patience,
        })
    }

    /// For whom it speaks.
    pub fn group(&self) -> &str {
        &self.group
    }

    pub(super) fn producer_config(&self) -> Result<ClientConfig, InspectError> {
        Ok(producer_config(&self.properties, &Properties::default())?)
    }

    pub(super) fn patience(&self) -> Duration {
        self.patience
    }

    /// The number of brokers that the cluster has now.
    ///
    /// # Errors
    ///
    /// If they don't answer; so for all that follow.
    pub fn brokers(&self) -> Result<usize, InspectError> {
        let metadata = self.ask("the cluster's brokers", |client| {
            client.fetch_metadata(Some("__consumer_offsets"), self.patience)
        })?;
        Ok(metadata.brokers().len())
    }

    /// How many partitions the topic has; `None`, if there is no such topic.
    pub fn find(&self, topic: &str) -> Result<Option<i32>, InspectError> {
        let what = format!("topic `{topic}`");
        let metadata = self.ask(&what, |client| {
            client.fetch_metadata(Some(topic), self.patience)
        })?;
        let found = metadata.topics().first();
        match found.and_then(MetadataTopic::error).map(Code::from) {
            Some(Code::UnknownTopic | Code::UnknownTopicOrPartition | Code::InvalidTopic) => {
                Ok(None)
            }
            Some(code) => Err(InspectError::Refused { what, code }),
            None => Ok(found
                .map(|topic| topic.partitions().len() as i32)
                .filter(|partitions| *partitions > 0)),
        }
    }

    /// As [`find`](Self::find), for a topic that there has to be.
    pub fn partitions(&self, topic: &str) -> Result<i32, InspectError> {
        self.find(topic)?
            .ok_or_else(|| InspectError::UnknownTopic(topic.to_owned()))
    }

    /// All topics but Kafka's own, with their numbers of partitions.
    pub fn topics(&self) -> Result<Vec<(String, i32)>, InspectError> {
        let metadata = self.ask("the cluster's topics", |client| {
            client.fetch_metadata(None, self.patience)
        })?;
        let topics = metadata.topics().iter();
        let mut topics: Vec<_> = topics
            .filter(|topic| !topic.name().starts_with("__"))
            .map(|topic| (topic.name().to_owned(), topic.partitions().len() as i32))
            .collect();
        topics.sort_unstable();
        Ok(topics)
    }

    /// First offset and end of a partition.
    pub fn bounds(&self, topic: &str, partition: i32) -> Result<Range<i64>, InspectError> {
        let what = format!("ends of {topic}/{partition}");
        let (start, end) = self.ask(&what, |client| {
            client.fetch_watermarks(topic, partition, self.patience)
        })?;
        Ok(start..end)
    }

    /// Where the group stands in all partitions of these topics, as far as they are told, in their order.
    pub fn committed(&self, topics: &[(String, i32)]) -> Result<Vec<Committed>, InspectError> {
        let what = format!("committed offsets of group `{}`", self.group);
        let cluster = self.client.client().fetch_cluster_id(self.patience);
        let cluster = cluster.unwrap_or_default();
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
                client.committed_offsets(asked.clone(), self.patience)
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
        offsets: &[i64],
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
                let cluster = self.client.client().fetch_cluster_id(self.patience);
                let cluster = cluster.unwrap_or_default();
                let inherited = Inherited {
                    identity: Identity::new(&cluster, &self.group, topic, partition),
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
        let (committed, finished) = and_finished(start, before.note.finished(), offsets);
        let snapshot = encode_snapshot(
            inherited.identity.with_topic(inherited.written),
            committed,
            &inherited.marks,
            finished.into_iter(),
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

    fn commit(&self, entry: CommitEntry<'_>) -> Result<(), InspectError> {
        let what = format!(
            "committing {}/{} for group `{}`",
            entry.topic, entry.partition, self.group
        );
        let gone = || InspectError::Client("it is gone".into());
        let replies = ReplyQueue::new(self.client.lifeline(), Arc::new(|| ())).ok_or_else(gone)?;
        let deadline = Instant::now() + self.patience;
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

    /// Reads these offsets of the topic, a partition's records in their order, until they are read or `each` has had
    /// enough.
    pub fn read<E: From<InspectError>>(
        &self,
        topic: &str,
        spans: &[(i32, Range<i64>)],
        mut each: impl FnMut(&Record) -> Result<Next, E>,
    ) -> Result<(), E> {
        let spans: Vec<_> = spans.iter().filter(|(_, span)| !span.is_empty()).collect();
        for spans in spans.chunks(AT_A_TIME) {
            let mut open = Vec::with_capacity(spans.len());
            let mut assignment = TopicPartitionList::with_capacity(spans.len());
            for (partition, span) in spans {
                open.push(self.open(topic, *partition, span, &mut assignment)?);
            }
            let what = format!("reading topic `{topic}`");
            let assigned = self.client.assign(&assignment);
            assigned.map_err(|error| self.explain(&what, &error))?;
            let outcome = self.read_all(&mut open, &mut each);
            drop(open);
            let unassigned = self.client.unassign();
            let stopped = outcome?;
            unassigned.map_err(|error| self.explain(&what, &error))?;
            if stopped {
                break;
            }
        }
        Ok(())
    }

    fn open(
        &self,
        topic: &str,
        partition: i32,
        span: &Range<i64>,
        assignment: &mut TopicPartitionList,
    ) -> Result<Open, InspectError> {
        let reader = thread::current();
        let wake = Arc::new(move || reader.unpark());
        let queue = PartitionQueue::take(self.client.lifeline(), topic, partition, wake);
        let queue = queue.ok_or_else(|| InspectError::UnknownTopic(topic.to_owned()))?;
        assignment
            .add_partition_offset(topic, partition, Offset::Offset(span.start))
            .map_err(|error| InspectError::Client(error.to_string()))?;
        Ok(Open {
            source: Arc::new(Source::new(topic, partition)),
            queue,
            start: span.start,
            position: span.start,
            end: span.end,
            done: false,
        })
    }

    /// `true`: `each` has had enough.
    fn read_all<E: From<InspectError>>(
        &self,
        open: &mut Vec<Open>,
        each: &mut impl FnMut(&Record) -> Result<Next, E>,
    ) -> Result<bool, E> {
        let mut quiet_since = Instant::now();
        while let Some(Open {
            source, position, ..
        }) = open.first()
        {
            if quiet_since.elapsed() > self.patience {
                return Err(E::from(InspectError::Silent {
                    topic: source.topic.to_string(),
                    partition: source.partition,
                    offset: *position,
                    waited: self.patience,
                    reason: self.client.context().reason(),
                }));
            }
            self.serve();
            let mut any = false;
            for partition in &mut *open {
                any |= match partition.read(each)? {
                    Progress::Nothing => false,
                    Progress::Some => true,
                    Progress::Stop => return Ok(true),
                };
            }
            open.retain(|partition| !partition.done);
            if any {
                quiet_since = Instant::now();
            } else if !open.is_empty() {
                // Wake-ups have been lost in librdkafka.
                thread::park_timeout(Duration::from_millis(50));
            }
        }
        Ok(false)
    }

    /// Lets the client call back with what it has met.
    fn serve(&self) {
        while self.client.poll(Duration::ZERO).is_some() {}
    }

    /// Asks until there is an answer: leaders are elected, coordinators begin, and a topic that has just been made is not
    /// known everywhere at once.
    fn ask<T>(
        &self,
        what: &str,
        mut question: impl FnMut(&BaseConsumer<Outside>) -> KafkaResult<T>,
    ) -> Result<T, InspectError> {
        let deadline = Instant::now() + self.patience;
        loop {
            let error = match question(&self.client) {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let passes = matches!(
                error.rdkafka_error_code(),
                Some(
                    Code::UnknownPartition
                        | Code::LeaderNotAvailable
                        | Code::NotLeaderForPartition
                        | Code::NotCoordinator
                        | Code::CoordinatorNotAvailable
                        | Code::CoordinatorLoadInProgress
                )
            );
            if !passes || Instant::now() >= deadline {
                return Err(self.explain(what, &error));
            }
            thread::sleep(Duration::from_millis(100));
        }
    }

    fn explain(&self, what: &str, error: &KafkaError) -> InspectError {
        self.serve();
        let code = error.rdkafka_error_code().unwrap_or(Code::Fail);
        let no_answer = is_login_failure(code)
            || matches!(
                code,
                Code::AllBrokersDown
                    | Code::BrokerTransportFailure
                    | Code::OperationTimedOut
                    | Code::RequestTimedOut
                    | Code::Resolve
            );
        if !no_answer {
            return InspectError::Refused {
                what: what.to_owned(),
                code,
            };
        }
        InspectError::Unreachable {
            what: what.to_owned(),
            waited: self.patience,
            reason: self.client.context().reason(),
        }
    }

    /// What sends copies, each until the brokers have it.
    ///
    /// # Errors
    ///
    /// Properties that a producer cannot have.
    pub fn courier(&self) -> Result<Courier, InspectError> {
        let producer = AckedProducer::new(self.producer_config()?, None);
        let producer = producer.map_err(|error| InspectError::Client(error.to_string()))?;
        Ok(Courier(producer))
    }
}

/// Sends copies of records.
pub struct Courier(AckedProducer);

impl fmt::Debug for Courier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Courier").finish_non_exhaustive()
    }
}

impl Courier {
    /// Partition and offset of the copy, once all in-sync replicas have it. Key and value are the record's, the time is
    /// now.
    ///
    /// # Errors
    ///
    /// If the brokers refuse it, or don't answer within a minute.
    pub async fn send(
        &self,
        topic: &str,
        record: &Record,
        headers: &[RawHeader<'_>],
    ) -> Result<(i32, i64), InspectError> {
        let copy = Outgoing {
            topic,
            partition: None,
            key: record.key(),
            value: record.value(),
            timestamp: None,
            headers,
        };
        let sent = self.0.send(copy).await;
        sent.map_err(|error| InspectError::NotSent(error.to_string()))
    }
}

/// A partition that is being read.
struct Open {
    source: Arc<Source>,
    queue: PartitionQueue,
    start: i64,
    position: i64,
    end: i64,
    done: bool,
}

enum Progress {
    Nothing,
    Some,
    Stop,
}

impl Open {
    fn read<E: From<InspectError>>(
        &mut self,
        each: &mut impl FnMut(&Record) -> Result<Next, E>,
    ) -> Result<Progress, E> {
        if self.done {
            return Ok(Progress::Nothing);
        }
        let mut builder = ChunkBuilder::new(Arc::clone(&self.source), None);
        let mut chunks = Vec::new();
        let (mut done, mut refused) = (false, None);
        let (start, end) = (self.start, self.end);
        let count = self.queue.read(BITE, |message| match message.error() {
            // The end of the log, or of what may be read of it: behind the last record stand markers, or nothing.
            Some(Code::PartitionEOF) => done = true,
            Some(code @ (Code::TopicAuthorizationFailed | Code::UnknownTopicOrPartition)) => {
                refused = Some(code);
            }
            // The client goes on by itself.
            Some(_) => {}
            // Below its start: there is no such record any more, and the client began anew.
            None if message.offset() >= end || message.offset() < start => done = true,
            None => {
                if builder.is_full() {
                    let next = ChunkBuilder::new(Arc::clone(&self.source), None);
                    chunks.push(std::mem::replace(&mut builder, next).finish());
                }
                // Headers that cannot be parsed are none, as they are for a consumer.
                let _ = copy_into(&mut builder, &message);
                done |= message.offset() + 1 >= end;
            }
        });
        if let Some(code) = refused {
            let what = format!("reading topic `{}`", self.source.topic);
            return Err(E::from(InspectError::Refused { what, code }));
        }
        chunks.push(builder.finish());
        for chunk in chunks {
            for index in 0..chunk.len() {
                let record = chunk.record(index);
                self.position = record.offset() + 1;
                match each(&record)? {
                    Next::More => {}
                    Next::Enough => {
                        self.done = true;
                        return Ok(Progress::Some);
                    }
                    Next::Stop => return Ok(Progress::Stop),
                }
            }
        }
        self.done = done;
        Ok(match count {
            0 => Progress::Nothing,
            _ => Progress::Some,
        })
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
fn and_finished(committed: i64, above: &[Range<i64>], offsets: &[i64]) -> (i64, Vec<Range<i64>>) {
    let offsets = offsets.iter().filter(|offset| **offset >= committed);
    let mut ranges: Vec<_> = offsets
        .map(|offset| *offset..offset.saturating_add(1))
        .chain(above.iter().cloned())
        .collect();
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

/// Keeps what the client met with last, for whoever waits in vain.
#[derive(Default)]
struct Outside {
    log: ClientLog,
    reason: Mutex<Option<String>>,
}

impl Outside {
    fn reason(&self) -> String {
        let reason = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        reason
            .as_ref()
            .map(|reason| format!(" ({reason})"))
            .unwrap_or_default()
    }
}

impl ClientContext for Outside {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        self.log.line(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.log.error(&error, reason);
        // "All brokers are down" says less than what came before it.
        if error.rdkafka_error_code() != Some(Code::AllBrokersDown) {
            let mut last = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
            *last = Some(reason.to_owned());
        }
    }
}

impl ConsumerContext for Outside {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_marked_at_the_head_moves_the_offset_and_what_is_above_is_noted() {
        let after = |committed, above: &[(i64, i64)], offsets: &[i64]| {
            let above: Vec<_> = above.iter().map(|(from, to)| *from..*to).collect();
            let (committed, above) = and_finished(committed, &above, offsets);
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
