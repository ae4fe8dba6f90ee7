//! What an operator asks of a cluster beside that: how large it is, who is in a group; copies of records; and putting a
//! group somewhere.

use std::{fmt, sync::Arc, time::Duration};

use rdkafka::{consumer::Consumer as _, error::KafkaError, types::RDKafkaErrorCode as Code};

use super::{
    cluster::{Cluster, InspectError, PREFETCH, Patience},
    ffi::{Answer, CommitEntry, Member, Question, RawHeader},
    producer::{AckedProducer, Outgoing},
    properties::{Properties, consumer_config, producer_config},
};
use crate::record::Record;

impl Cluster {
    /// Makes a client; it connects when it is asked something. Each question may take `patience`, and so may brokers that
    /// send nothing while something is read.
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
        let consumer = consumer_config(&own, PREFETCH)?;
        let producer = producer_config(&own, &Properties::default())?;
        let patience = Patience {
            answer: patience,
            silence: patience,
        };
        Self::with(&consumer, producer, group, None, patience)
    }

    /// For whom it speaks.
    pub fn group(&self) -> &str {
        &self.group
    }

    /// Who is in the group now, and what each has. Empty also for a group that nobody knows.
    ///
    /// # Errors
    ///
    /// If the brokers don't answer.
    pub fn members(&self) -> Result<Vec<Member>, InspectError> {
        let what = format!("members of group `{}`", self.group);
        let asked = Question::group(self.client.lifeline(), Arc::new(|| ()), &self.group);
        self.serve();
        let limit = self.patience.answer;
        match asked.and_then(|question| question.poll(limit)) {
            Some(Answer::Group(group)) => Ok(group.members),
            Some(Answer::Failed(Code::GroupIdNotFound)) => Ok(Vec::new()),
            Some(Answer::Failed(code)) => Err(self.explain(&what, &KafkaError::Global(code))),
            _ => Err(self.explain(&what, &KafkaError::Global(Code::OperationTimedOut))),
        }
    }

    /// The number of brokers that the cluster has now.
    ///
    /// # Errors
    ///
    /// If they don't answer; so for all that follow.
    pub fn brokers(&self) -> Result<usize, InspectError> {
        let metadata = self.ask("the cluster's brokers", |client| {
            client.fetch_metadata(Some("__consumer_offsets"), self.patience.answer)
        })?;
        Ok(metadata.brokers().len())
    }

    /// All topics but Kafka's own, with their numbers of partitions.
    pub fn topics(&self) -> Result<Vec<(String, i32)>, InspectError> {
        let metadata = self.ask("the cluster's topics", |client| {
            client.fetch_metadata(None, self.patience.answer)
        })?;
        let topics = metadata.topics().iter();
        let mut topics: Vec<_> = topics
            .filter(|topic| !topic.name().starts_with("__"))
            .map(|topic| (topic.name().to_owned(), topic.partitions().len() as i32))
            .collect();
        topics.sort_unstable();
        Ok(topics)
    }

    /// Puts the group at this offset of a partition, whatever stood there.
    ///
    /// # Errors
    ///
    /// [`InspectError::GroupAtWork`] if the group has members.
    pub fn stand_at(&self, topic: &str, partition: i32, offset: i64) -> Result<(), InspectError> {
        self.commit(CommitEntry {
            topic,
            partition,
            offset,
            leader_epoch: None,
            metadata: None,
        })
    }

    /// What sends copies, each until the brokers have it.
    ///
    /// # Errors
    ///
    /// Properties that a producer cannot have.
    pub fn courier(&self) -> Result<Courier, InspectError> {
        let producer = AckedProducer::new(self.producer.clone(), None);
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
