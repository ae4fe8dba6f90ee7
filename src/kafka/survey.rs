//! What can be asked of the brokers without a consumer at work: partitions and ends of topics, what a group has finished,
//! and the records themselves, read without any group's knowledge. All of it blocks: it is for tokio's threads for
//! blocking work.

use std::{
    error::Error,
    mem,
    ops::Range,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use rdkafka::{
    ClientConfig, ClientContext, Offset, TopicPartitionList,
    admin::{AdminClient, AdminOptions, ResourceSpecifier},
    client::OAuthToken,
    config::RDKafkaLogLevel,
    consumer::{Consumer as _, ConsumerContext},
    error::KafkaError,
    types::RDKafkaErrorCode as Code,
};

use tokio::runtime::Handle;

use super::{
    OAuthTokenProvider,
    client::generate_token,
    ffi::{Consumer, PartitionQueue, metadata_of},
    intake::copy_into,
    log::ClientLog,
};
use crate::{
    engine::{Identity, decode_snapshot},
    record::{ChunkBuilder, Record, Source},
};

/// How long one question may take.
const ANSWER: Duration = Duration::from_secs(10);
/// How long reading goes on without anything being read.
const PATIENCE: Duration = Duration::from_secs(60);
/// Records taken from a partition at a time.
const BITE: usize = 256;
/// Kafka's own default for a topic whose retention we may not see.
const DEFAULT_RETENTION_MS: i64 = 7 * 24 * 3600 * 1000;

/// The brokers did not answer, or not as hoped.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{subject}: {reason}")]
pub(crate) struct SurveyError {
    subject: String,
    reason: String,
}

fn failed<E: std::fmt::Display>(subject: &str) -> impl FnOnce(E) -> SurveyError {
    move |error| SurveyError {
        subject: subject.to_owned(),
        reason: error.to_string(),
    }
}

/// What a group is done with in one partition.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Finished {
    pub(crate) committed: Option<i64>,
    /// Above the committed offset.
    pub(crate) above: Vec<Range<i64>>,
}

impl Finished {
    pub(crate) fn contains(&self, offset: i64) -> bool {
        self.committed.is_some_and(|committed| offset < committed)
            || self.above.iter().any(|range| range.contains(&offset))
    }
}

/// What a topic does to the records that are sent to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TopicLimits {
    /// 0: there is no such topic.
    pub(crate) partitions: i32,
    /// Records whose timestamps are older than this are deleted. `None`: none are.
    pub(crate) retention_ms: Option<i64>,
}

/// Speaks for a group that it never joins.
pub(crate) struct Survey {
    client: Consumer<Quiet>,
    admin: AdminClient<Quiet>,
    group: String,
}

impl Survey {
    pub(crate) fn new(
        consumer: &ClientConfig,
        producer: &ClientConfig,
        group: &str,
        oauth: Option<Arc<dyn OAuthTokenProvider>>,
    ) -> Result<Self, SurveyError> {
        let mut config = consumer.clone();
        config.set("group.id", group);
        // It is never a member.
        config.remove("group.instance.id");
        let quiet = |_| Quiet {
            oauth: oauth.clone(),
            log: ClientLog::default(),
        };
        let client = Consumer::create(&config, Arc::new(|| ()), quiet).map_err(failed("client"))?;
        let admin = producer
            .create_with_context(quiet(client.lifeline().clone()))
            .map_err(failed("client"))?;
        if oauth.is_some() {
            // The first token is fetched inside a poll.
            client.poll(Duration::from_millis(200));
        }
        Ok(Self {
            client,
            admin,
            group: group.to_owned(),
        })
    }

    /// How many partitions the topic has; 0 if there is no such topic.
    pub(crate) fn partitions(&self, topic: &str) -> Result<i32, SurveyError> {
        self.client.poll(Duration::ZERO);
        let subject = format!("topic `{topic}`");
        let metadata = self
            .client
            .fetch_metadata(Some(topic), ANSWER)
            .map_err(failed(&subject))?;
        let Some(found) = metadata.topics().first() else {
            return Ok(0);
        };
        match found.error().map(Code::from) {
            None => Ok(i32::try_from(found.partitions().len()).unwrap_or(i32::MAX)),
            Some(Code::UnknownTopic | Code::UnknownTopicOrPartition | Code::InvalidTopic) => Ok(0),
            Some(code) => Err(failed(&subject)(code)),
        }
    }

    /// First offset and end of each partition.
    pub(crate) fn bounds(&self, topic: &str) -> Result<Vec<Range<i64>>, SurveyError> {
        let partitions = self.partitions(topic)?;
        if partitions == 0 {
            return Err(failed(&format!("topic `{topic}`"))(
                "there is no such topic",
            ));
        }
        (0..partitions)
            .map(|partition| {
                let (start, end) = self
                    .client
                    .fetch_watermarks(topic, partition, ANSWER)
                    .map_err(failed(&format!("end of {topic}/{partition}")))?;
                Ok(start..end)
            })
            .collect()
    }

    /// What the group has finished in each partition, by its commits.
    pub(crate) fn finished(
        &self,
        topic: &str,
        partitions: usize,
    ) -> Result<Vec<Finished>, SurveyError> {
        let subject = format!("committed offsets of group `{}`", self.group);
        let cluster = self.client.client().fetch_cluster_id(ANSWER);
        let cluster = cluster.unwrap_or_default();
        let mut asked = TopicPartitionList::with_capacity(partitions);
        let numbers = 0..i32::try_from(partitions).unwrap_or(i32::MAX);
        for partition in numbers.clone() {
            asked.add_partition(topic, partition);
        }
        let answer = self
            .client
            .committed_offsets(asked, ANSWER)
            .map_err(failed(&subject))?;
        let metadata = metadata_of(&answer);
        let mut finished = vec![Finished::default(); partitions];
        for (element, metadata) in answer.elements().iter().zip(metadata) {
            element.error().map_err(failed(&subject))?;
            let (partition, Offset::Offset(committed)) = (element.partition(), element.offset())
            else {
                continue;
            };
            let identity = Identity::new(&cluster, &self.group, topic, partition);
            // What cannot be read there is what the group itself would not believe either.
            let above = decode_snapshot(metadata, identity, committed)
                .map(|inherited| inherited.finished.from(committed).collect())
                .unwrap_or_default();
            finished[partition as usize] = Finished {
                committed: Some(committed),
                above,
            };
        }
        Ok(finished)
    }

    /// What becomes of records that are sent to the topic.
    pub(crate) fn limits(&self, topic: &str) -> Result<TopicLimits, SurveyError> {
        let partitions = self.partitions(topic)?;
        let retention_ms = if partitions == 0 {
            None
        } else {
            // Who may not see it goes by Kafka's default: too short a time costs a timestamp, too long a one the record.
            self.retention(topic).unwrap_or(Some(DEFAULT_RETENTION_MS))
        };
        Ok(TopicLimits {
            partitions,
            retention_ms,
        })
    }

    /// `None` if it is not told.
    fn retention(&self, topic: &str) -> Option<Option<i64>> {
        let options = AdminOptions::new().request_timeout(Some(ANSWER));
        let asked = [ResourceSpecifier::Topic(topic)];
        let described = Handle::current().block_on(self.admin.describe_configs(&asked, &options));
        let config = described.ok()?.pop()?.ok()?;
        let value = |name| config.get(name)?.value.clone();
        if !value("cleanup.policy")?.contains("delete") {
            return Some(None);
        }
        let retention: i64 = value("retention.ms")?.parse().ok()?;
        Some((retention >= 0).then_some(retention))
    }

    /// Reads these offsets of each partition, in the order of their partitions at best, until `each` says that it has
    /// had enough. The group learns nothing of it.
    pub(crate) fn read(
        &self,
        topic: &str,
        spans: &[Range<i64>],
        mut each: impl FnMut(Record) -> bool,
    ) -> Result<(), SurveyError> {
        let subject = format!("topic `{topic}` cannot be read");
        let reader = thread::current();
        let mut unread = Vec::new();
        let mut assignment = TopicPartitionList::new();
        for (partition, span) in (0..).zip(spans) {
            if span.is_empty() {
                continue;
            }
            let thread = reader.clone();
            let wake = Arc::new(move || thread.unpark());
            let queue = PartitionQueue::take(self.client.lifeline(), topic, partition, wake)
                .ok_or_else(|| failed(&subject)("a partition has no queue"))?;
            assignment
                .add_partition_offset(topic, partition, Offset::Offset(span.start))
                .map_err(failed(&subject))?;
            let source = Arc::new(Source::new(topic, partition));
            unread.push((source, queue, span.end));
        }
        self.client.assign(&assignment).map_err(failed(&subject))?;
        let outcome = self.read_to_ends(&mut unread, &subject, &mut each);
        drop(unread);
        self.client.unassign().map_err(failed(&subject))?;
        outcome
    }

    fn read_to_ends(
        &self,
        unread: &mut Vec<(Arc<Source>, PartitionQueue, i64)>,
        subject: &str,
        each: &mut impl FnMut(Record) -> bool,
    ) -> Result<(), SurveyError> {
        let mut last_progress = Instant::now();
        while !unread.is_empty() {
            // Events, and tokens; brokers that are away for a moment are no end.
            self.client.poll(Duration::ZERO);
            let mut any = false;
            let mut trouble = None;
            let mut enough = false;
            unread.retain_mut(|(source, queue, end)| {
                let begin = || ChunkBuilder::new(Arc::clone(source), None);
                let (mut chunk, mut chunks) = (begin(), Vec::new());
                let mut last = None;
                queue.read(BITE, |message| {
                    if message.error().is_some() {
                        trouble = Some(message.error_text());
                        return;
                    }
                    last = Some(message.offset());
                    if message.offset() < *end {
                        if chunk.is_full() {
                            chunks.push(mem::replace(&mut chunk, begin()).finish());
                        }
                        // Headers that cannot be parsed are none, as they are for a consumer.
                        let _ = copy_into(&mut chunk, &message);
                    }
                });
                any |= last.is_some();
                chunks.push(chunk.finish());
                for chunk in chunks {
                    for index in 0..chunk.len() {
                        enough = enough || !each(chunk.record(index));
                    }
                }
                last.is_none_or(|last| last + 1 < *end)
            });
            if let Some(text) = trouble {
                return Err(failed(subject)(text));
            }
            if enough {
                return Ok(());
            }
            if any {
                last_progress = Instant::now();
                continue;
            }
            // Behind the last record there may be markers of transactions: only the position passes them.
            self.forget_read(unread);
            if last_progress.elapsed() > PATIENCE {
                return Err(failed(subject)(
                    "the brokers have sent nothing for a minute",
                ));
            }
            thread::park_timeout(Duration::from_millis(20));
        }
        Ok(())
    }

    fn forget_read(&self, unread: &mut Vec<(Arc<Source>, PartitionQueue, i64)>) {
        let Ok(positions) = self.client.position() else {
            return;
        };
        unread.retain(|(source, _, end)| {
            let found = positions.find_partition(&source.topic, source.partition);
            match found.map(|element| element.offset()) {
                Some(Offset::Offset(position)) => position < *end,
                _ => true,
            }
        });
    }
}

/// Lets librdkafka's log and tokens through, and no more.
struct Quiet {
    oauth: Option<Arc<dyn OAuthTokenProvider>>,
    log: ClientLog,
}

impl ClientContext for Quiet {
    const ENABLE_REFRESH_OAUTH_TOKEN: bool = true;

    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        self.log.line(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.log.error(&error, reason);
    }

    fn generate_oauth_token(&self, _: Option<&str>) -> Result<OAuthToken, Box<dyn Error>> {
        generate_token(self.oauth.as_ref())
    }
}

impl ConsumerContext for Quiet {}
