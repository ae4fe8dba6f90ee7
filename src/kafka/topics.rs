//! Which topics these are. One that is deleted and made again keeps its name and has another id; librdkafka goes on in it
//! where it stood in the old one.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use rdkafka::consumer::Consumer as _;

use super::{
    BaseConsumer,
    ffi::{Answer, DescribedTopic, Question, Wake},
    pump::Pump,
    surprises::Trouble,
};
use crate::engine::TopicSeen;

/// How often the topics of held partitions are looked up, unless the client's own metadata are refreshed more often. It
/// bounds how much of a new topic is read from the old one's position before it is read from its start.
const LONGEST_INTERVAL: Duration = Duration::from_secs(10);
/// One question to the brokers may take this long.
pub(super) const QUESTION: Duration = Duration::from_secs(5);
/// Finding out who answers.
const WHO: Duration = Duration::from_secs(1);

/// What is known of topics, and what is being asked.
#[derive(Default)]
pub(super) struct Topics {
    /// The ids that topics had when they were last assigned to us.
    seen: HashMap<Arc<str>, u32>,
    /// Who is asked. Any broker can answer, but librdkafka asks the controller, and waits for it where it is away.
    broker: Option<i32>,
    question: Option<Question>,
    next: Option<Instant>,
}

impl Topics {
    pub(super) fn broker(&self) -> Option<i32> {
        self.broker
    }

    /// A broker that answers. One that has just done so will do it again.
    pub(super) fn who_answers(&mut self, consumer: &BaseConsumer, topic: &str) -> Option<i32> {
        if self.broker.is_none() {
            let answered = consumer.fetch_metadata(Some(topic), WHO);
            let broker = answered.map(|metadata| metadata.orig_broker_id());
            self.broker = broker.ok().filter(|broker| *broker >= 0);
        }
        self.broker
    }

    /// The client that was to ask is gone.
    pub(super) fn forget_question(&mut self) {
        self.question = None;
    }

    /// The broker that was asked does not answer: the next question goes to the controller.
    pub(super) fn ask_another(&mut self) {
        self.broker = None;
    }
}

impl Pump {
    /// `true`: this process had a topic of that name, and it was another one.
    pub(super) fn note_topic(&mut self, topic: &Arc<str>, now: TopicSeen) -> bool {
        if now.id == 0 {
            return false;
        }
        let before = self.topics.seen.insert(Arc::clone(topic), now.id);
        let changed = before.is_some_and(|before| before != now.id);
        if changed {
            self.remembered.retain(|(known, _), _| known != topic);
        }
        changed
    }

    /// Looks now and then whether a topic was made anew under our hands.
    pub(super) fn check_topics(&mut self, now: Instant) {
        match &self.topics.question {
            Some(question) => {
                let Some(answer) = question.poll(Duration::ZERO) else {
                    return;
                };
                self.topics.question = None;
                match answer {
                    Answer::Topics(described) => {
                        described.iter().for_each(|topic| self.compare(topic));
                    }
                    _ => self.topics.ask_another(),
                }
            }
            None if self.topics.next.is_none_or(|next| next <= now) => {
                let interval = self.settings.metadata_refresh().min(LONGEST_INTERVAL);
                self.topics.next = Some(now + interval);
                let held = self.held.iter().flatten();
                let mut names: Vec<_> = held.map(|held| &*held.source.topic).collect();
                names.sort_unstable();
                names.dedup();
                if !names.is_empty() {
                    let (wake, broker) = (self.wake(), self.topics.broker);
                    self.topics.question =
                        Question::topics(&self.lifeline, wake, &names, broker, QUESTION);
                }
            }
            None => {}
        }
    }

    fn compare(&mut self, topic: &DescribedTopic) {
        if topic.error.is_some() {
            return;
        }
        let now = seen(topic);
        for slot in 0..self.held.len() {
            let other = self.held[slot].as_ref().is_some_and(|held| {
                *held.source.topic == *topic.name && now.differs_from(held.identity.topic())
            });
            if other {
                self.doubt(slot, Trouble::Recreated);
            }
        }
    }

    /// Wakes the pump.
    pub(super) fn wake(&self) -> Wake {
        let thread = self.thread.clone();
        Arc::new(move || thread.unpark())
    }
}

/// What a snapshot says of this topic.
pub(super) fn seen(topic: &DescribedTopic) -> TopicSeen {
    let folded = (topic.id >> 64) as u64 ^ topic.id as u64;
    TopicSeen {
        id: match (topic.id, (folded >> 32) as u32 ^ folded as u32) {
            (0, _) => 0,
            // Zero means that it is not known.
            (_, hash) => hash.max(1),
        },
        partitions: u32::try_from(topic.partitions).unwrap_or(u32::MAX),
    }
}

#[cfg(test)]
mod tests {
    use rdkafka::{
        ClientConfig,
        mocking::MockCluster,
        producer::{BaseProducer, BaseRecord, Producer as _},
    };

    use super::*;
    use crate::{Message, ReliableConsumer, Text};

    #[tokio::test]
    async fn a_controller_that_is_away_delays_no_assignment() {
        // The controller that the mock cluster names is no broker of its.
        let cluster = MockCluster::new(1).unwrap();
        cluster.create_topic("orders", 1, 1).unwrap();
        let servers = cluster.bootstrap_servers();
        let producer: BaseProducer = ClientConfig::new()
            .set("bootstrap.servers", &servers)
            .create()
            .unwrap();
        producer
            .send(BaseRecord::<(), _>::to("orders").payload("first"))
            .unwrap();
        producer.flush(Duration::from_secs(5)).unwrap();
        let consumer = ReliableConsumer::builder()
            .bootstrap_servers(&servers)
            .group_id("shipping")
            .topic("orders")
            .property("group.protocol", "consumer")
            .build()
            .unwrap();
        let handle = consumer.handle();
        let began = Instant::now();
        let run = consumer.run(async move |_: &Message<Text>| {
            handle.shutdown()?;
            Ok(())
        });
        assert_eq!(run.await.unwrap().handled, 1);
        assert!(began.elapsed() < QUESTION, "{:?}", began.elapsed());
    }
}
