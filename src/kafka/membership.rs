//! Whether we are a member of the group and, while we are not, why not.
//!
//! librdkafka goes on trying to join without a word about most of what keeps it from doing so. So it is asked each second
//! whether it has joined, what it does say is kept, and else the group's coordinator is asked how the group does.

use std::time::{Duration, Instant};

use rdkafka::types::RDKafkaErrorCode as Code;

use super::{
    BaseConsumer,
    errors::{Course, course},
    ffi::{Answer, DescribedGroup, Question, membership},
    pump::Pump,
};
use crate::consumer::{Event, Membership};

/// Until then it is nothing to speak of: a coordinator that moves, a rebalance.
const ASK: Duration = Duration::from_secs(8);
/// The coordinator has that long to answer, and is asked again after twice that.
const ANSWER: Duration = Duration::from_secs(8);
/// It is said again each time that the wait has doubled, up to this.
const LONGEST_SILENCE: Duration = Duration::from_secs(300);

/// Between two clients that try for an instance id which another has.
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Between the consumer and its group.
pub(super) struct Joining {
    joined: bool,
    /// Since when it is so.
    since: Instant,
    /// What librdkafka said last of why it could not join.
    refusal: Option<String>,
    cause: Option<String>,
    question: Option<Question>,
    asked: Option<Instant>,
    /// When the cause was told.
    told: Option<Instant>,
    /// Another has our `group.instance.id`.
    taken: Option<Taken>,
}

/// An instance id of ours that another has: a process that runs, or the session of one that has died.
struct Taken {
    since: Instant,
    tries: u32,
    /// The client is fatal since it was told so. When another one tries.
    next: Option<Instant>,
}

impl Joining {
    pub(super) fn begin(now: Instant) -> Self {
        Self {
            joined: false,
            since: now,
            refusal: None,
            cause: None,
            question: None,
            asked: None,
            told: None,
            taken: None,
        }
    }

    pub(super) fn is_member(&self) -> bool {
        self.joined
    }

    pub(super) fn status(&self) -> Membership {
        let since = self.since.elapsed();
        match self.joined {
            true => Membership::Member { since },
            false => Membership::Joining {
                since,
                cause: self.cause.clone(),
            },
        }
    }

    /// The client met this error: it may be why it does not join.
    pub(super) fn note_refusal(&mut self, code: Code, reason: &str) {
        let of_a_connection = matches!(
            code,
            Code::AllBrokersDown
                | Code::BrokerTransportFailure
                | Code::Resolve
                | Code::OperationTimedOut
        );
        let telling = course(code) == Course::Wait && !of_a_connection && !reason.is_empty();
        if telling && !self.joined {
            self.refusal = Some(reason.trim_end_matches('.').to_owned());
        }
    }

    /// Whether it is time for another client to try to become a member.
    pub(super) fn wants_another_client(&self, now: Instant) -> bool {
        let next = self.taken.as_ref().and_then(|taken| taken.next);
        next.is_some_and(|next| next <= now)
    }

    /// Another client tries.
    pub(super) fn begin_again(&mut self) {
        self.question = None;
        if let Some(taken) = &mut self.taken {
            taken.next = None;
        }
    }

    /// Whether it is to be said now why we have not joined, for the first time or again.
    fn is_due(&self, now: Instant) -> bool {
        self.told.is_none_or(|told| {
            let silence = told.duration_since(self.since).max(ASK);
            now.duration_since(told) >= silence.min(LONGEST_SILENCE)
        })
    }
}

impl Pump {
    /// Looks once a second whether we are a member.
    pub(super) fn watch_membership(&mut self, consumer: &BaseConsumer, now: Instant) {
        if self.is_stopping() {
            return;
        }
        // In the newer protocol the epoch 0 asks to join.
        let first = i32::from(self.settings.is_kip_848());
        let joined = membership(consumer)
            .is_some_and(|(id, generation)| !id.is_empty() && generation >= first);
        if joined != self.joining.joined {
            let before = std::mem::replace(&mut self.joining, Joining::begin(now));
            self.joining.joined = joined;
            if joined && before.told.is_some() {
                let after = now.duration_since(before.since);
                tracing::info!(
                    group = %self.settings.group,
                    after_ms = after.as_millis() as u64,
                    "a member of the group now"
                );
                self.tell(Event::Joined { after });
            }
        }
        if !joined && now.duration_since(self.joining.since) >= ASK {
            self.look_for_cause(now);
            self.tell_of_cause(now);
        }
    }

    /// The brokers say that another has our `group.instance.id`. `false`: that has been waited for for long enough.
    pub(super) fn waits_for_session(&mut self) -> bool {
        let now = Instant::now();
        let limit = self.settings.instance_id_timeout;
        let taken = self.joining.taken.get_or_insert(Taken {
            since: now,
            tries: 0,
            next: None,
        });
        let until = taken.since + limit;
        if now >= until {
            return false;
        }
        taken.tries += 1;
        let pause = LONGEST_PAUSE.min(SHORTEST_PAUSE * taken.tries);
        taken.next = Some((now + pause).min(until));
        let id = self.settings.client.get("group.instance.id");
        self.joining.cause = Some(format!(
            "its group.instance.id `{}` is taken: by another process, or still by one that has died, whose session the \
             brokers keep for group.consumer.session.timeout.ms (45 s by default); it is waited for for {} s in all",
            id.unwrap_or_default(),
            limit.as_secs()
        ));
        self.tell_of_cause(now);
        true
    }

    fn look_for_cause(&mut self, now: Instant) {
        if self.joining.taken.is_some() {
            return;
        }
        if self.outage.is_some() {
            self.joining.cause = Some("no broker can be reached".into());
            return;
        }
        if let Some(question) = &self.joining.question {
            let answer = question.poll(Duration::ZERO);
            if answer.is_some() {
                self.joining.question = None;
            }
            // It goes on waiting for the coordinator: see [`Question::group`].
            let late = |asked: Instant| now.duration_since(asked) >= ANSWER;
            let late = self.joining.asked.is_some_and(late);
            let none = late.then_some(Answer::Failed(Code::OperationTimedOut));
            if let Some(answer) = answer.or(none) {
                self.joining.cause = Some(self.cause_in(answer));
            }
            return;
        }
        let asked = self.joining.asked;
        if asked.is_none_or(|asked| now.duration_since(asked) >= 2 * ANSWER) {
            let group = &self.settings.group;
            self.joining.asked = Some(now);
            self.joining.question = Question::group(&self.lifeline, self.wake(), group);
        }
    }

    /// What keeps us from joining, by what the group's coordinator answers.
    fn cause_in(&self, answer: Answer) -> String {
        let refusal = self.joining.refusal.clone();
        let unknown = || {
            "its coordinator answers but has not let this member in: the property debug=cgrp shows what they say".into()
        };
        match answer {
            Answer::Group(DescribedGroup {
                rebalancing: true,
                members,
            }) => format!(
                "the group is rebalancing, and its {} members are waited for: one that has died until its session \
                 has ended (its session.timeout.ms), one that does not answer for its max.poll.interval.ms",
                members.len()
            ),
            Answer::Failed(code) if is_of_the_coordinator(code) => {
                let said = refusal.map_or_else(String::new, |refusal| format!(" ({refusal})"));
                format!(
                    "the group's coordinator cannot be found or does not answer: {code}{said}: see whether all partitions \
                     of the topic __consumer_offsets have a leader; if there is no such topic, whether the brokers' \
                     offsets.topic.replication.factor is larger than their number"
                )
            }
            Answer::Failed(code) => {
                refusal.unwrap_or_else(|| format!("its coordinator answers: {code}"))
            }
            _ => refusal.unwrap_or_else(unknown),
        }
    }

    /// Says why we are not a member, if it is time to.
    pub(super) fn tell_of_cause(&mut self, now: Instant) {
        let Some(cause) = self.joining.cause.clone() else {
            return;
        };
        if !self.joining.is_due(now) {
            return;
        }
        self.joining.told = Some(now);
        let waiting = now.duration_since(self.joining.since);
        tracing::warn!(
            group = %self.settings.group,
            waiting_ms = waiting.as_millis() as u64,
            "not a member of the group yet, and goes on trying: {cause}"
        );
        self.tell(Event::Joining { waiting, cause });
    }
}

/// Whether it is about finding or reaching the coordinator rather than about the group.
fn is_of_the_coordinator(code: Code) -> bool {
    matches!(
        code,
        Code::CoordinatorNotAvailable
            | Code::NotCoordinator
            | Code::CoordinatorLoadInProgress
            | Code::OperationTimedOut
            | Code::RequestTimedOut
            | Code::WaitingForCoordinator
            | Code::BrokerTransportFailure
            | Code::TimedOutQueue
    )
}

#[cfg(test)]
mod tests {
    use rdkafka::{
        ClientConfig,
        mocking::{MockCluster, MockCoordinator},
        producer::{BaseProducer, BaseRecord, DefaultProducerContext, Producer as _},
        types::{RDKafkaApiKey as Api, RDKafkaRespErr as Err},
    };

    use super::*;
    use crate::{Builder, Message, ReliableConsumer, Report, RunError, RunErrorKind, Text};

    /// A cluster with one record, whose coordinator answers with these errors first.
    fn cluster(api: Api, errors: &[Err]) -> MockCluster<'static, DefaultProducerContext> {
        let cluster = MockCluster::new(1).unwrap();
        cluster.create_topic("orders", 1, 1).unwrap();
        produce_first(&cluster);
        cluster.request_errors(api, errors);
        cluster
    }

    fn produce_first(cluster: &MockCluster<'_, DefaultProducerContext>) {
        let producer: BaseProducer = ClientConfig::new()
            .set("bootstrap.servers", cluster.bootstrap_servers())
            .create()
            .unwrap();
        producer
            .send(BaseRecord::<(), _>::to("orders").payload("first"))
            .unwrap();
        producer.flush(Duration::from_secs(5)).unwrap();
    }

    fn consumer(cluster: &MockCluster<'_, DefaultProducerContext>, protocol: &str) -> Builder {
        ReliableConsumer::builder()
            .bootstrap_servers(cluster.bootstrap_servers())
            .group_id("shipping")
            .topic("orders")
            .property("group.protocol", protocol)
    }

    /// Handles the one record and ends.
    async fn run(builder: Builder) -> Result<Report, RunError> {
        let consumer = builder.build().unwrap();
        let handle = consumer.handle();
        let run = consumer.run(async move |_: &Message<Text>| {
            handle.shutdown()?;
            Ok(())
        });
        tokio::time::timeout(Duration::from_secs(60), run)
            .await
            .expect("the run ends")
    }

    #[tokio::test]
    async fn errors_that_waiting_does_not_mend_end_a_member_that_joins_with_advice() {
        use RunErrorKind::{Authorization, CannotJoin, Fenced};
        let of_joining = [
            (
                Err::RD_KAFKA_RESP_ERR_INVALID_SESSION_TIMEOUT,
                CannotJoin,
                "group.max.session.timeout.ms",
            ),
            (
                Err::RD_KAFKA_RESP_ERR_INCONSISTENT_GROUP_PROTOCOL,
                CannotJoin,
                "partition.assignment.strategy",
            ),
            (
                Err::RD_KAFKA_RESP_ERR_GROUP_MAX_SIZE_REACHED,
                CannotJoin,
                "group.max.size",
            ),
            (
                Err::RD_KAFKA_RESP_ERR_INVALID_GROUP_ID,
                CannotJoin,
                "group id",
            ),
            (
                Err::RD_KAFKA_RESP_ERR_FENCED_INSTANCE_ID,
                Fenced,
                "group.instance.id",
            ),
            (
                Err::RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED,
                Authorization,
                "READ on the consumer group",
            ),
        ];
        for (error, kind, advice) in of_joining {
            let cluster = cluster(Api::JoinGroup, &[error; 20]);
            let ended = run(consumer(&cluster, "classic")).await.unwrap_err();
            assert_eq!(ended.kind(), kind, "{error:?}: {ended}");
            assert!(ended.to_string().contains(advice), "{error:?}: {ended}");
        }
    }

    #[tokio::test]
    async fn errors_that_pass_are_waited_for_by_a_member_that_joins() {
        for api in [Api::FindCoordinator, Api::JoinGroup] {
            let passing = [
                Err::RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS,
                Err::RD_KAFKA_RESP_ERR_COORDINATOR_NOT_AVAILABLE,
                Err::RD_KAFKA_RESP_ERR_UNKNOWN,
            ];
            let cluster = cluster(api, &passing);
            let report = run(consumer(&cluster, "classic")).await;
            assert_eq!(report.map(|report| report.handled).unwrap(), 1, "{api:?}");
        }
    }

    /// What librdkafka asks a coordinator that is away must not run out before it is sent: that would end the process, with
    /// all of its tests, when the coordinator comes back.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_coordinator_that_comes_back_after_it_was_asked_in_vain_lets_a_member_in() {
        let cluster = MockCluster::new(2).unwrap();
        cluster.create_topic("orders", 1, 1).unwrap();
        cluster
            .partition_leader("orders", 0, Some(1))
            .and_then(|()| cluster.coordinator(MockCoordinator::Group("shipping".into()), 2))
            .unwrap();
        produce_first(&cluster);
        cluster.broker_down(2).unwrap();
        let consumer = consumer(&cluster, "classic").build().unwrap();
        let handle = consumer.handle();
        let mut events = handle.events().unwrap();
        let run = tokio::spawn(
            consumer
                .run(async move |_: &Message<Text>| {
                    handle.shutdown()?;
                    Ok(())
                })
                .into_future(),
        );
        let in_vain = async {
            while let Some(event) = events.next().await {
                if let Event::Joining { cause, .. } = event
                    && cause.contains("cannot be found or does not answer")
                {
                    return;
                }
            }
            panic!("the run has ended");
        };
        tokio::time::timeout(Duration::from_secs(60), in_vain)
            .await
            .expect("it is told that the coordinator does not answer");
        cluster.broker_up(2).unwrap();
        let report = tokio::time::timeout(Duration::from_secs(60), run)
            .await
            .expect("the member joins and handles its record");
        assert_eq!(report.unwrap().unwrap().handled, 1);
    }
}
