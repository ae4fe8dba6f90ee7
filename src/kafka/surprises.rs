//! A log that is not what it was: the position is gone, the log was cut or begins anew, the topic is another one.
//!
//! The client stops at such a partition, or is stopped. What there is now is asked for without waiting, other partitions go
//! on meanwhile, then it is decided where reading goes on, if at all.
//!
//! What has been read already stays, and is finished and committed as before, with two exceptions. Of a topic that was made
//! anew, which its id tells, all is another log: nothing of the old one is kept. And where the same log goes on below the
//! position, since it was cut off or somebody asks for it, what was read from there on is void: the log has, or may have,
//! other records at those offsets. Brokers older than 2.8 give topics no ids: there everything is taken for the same log, so
//! that nothing below the offset where reading goes on is dropped or passed unfinished.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    BaseConsumer,
    epochs::Epochs,
    ffi::{Answer, LogEnd, Question},
    partition_errors::{Setback, way_out},
    pump::Pump,
    reread::Reread,
    topics::{QUESTION, seen},
};
use crate::{
    consumer::{Event, OutOfRange, RunErrorKind, StopReason, StoppedPartition, TopicPartition},
    engine::{CutOff, Inherited, TopicSeen},
    execute::Fence,
    record::Source,
};

/// Between two looks at the same log: an error that comes back at once is not answered in a tight loop.
const PAUSE: Duration = Duration::from_secs(1);

/// Logs that are asked about at a time: after an election there may be thousands.
const MOST_ASKED: usize = 50;

/// How long a client may be silent about a partition that has something before it is taken to be stuck.
const SILENCE: Duration = Duration::from_secs(10);

/// Whether a partition's log is what it should be.
pub(super) enum Log {
    Sound,
    /// Not read until it is known what there is now.
    Doubtful(Box<Doubt>),
    /// Not read until somebody decides.
    Stopped(StoppedPartition),
    /// Somebody has: to be read from this offset on.
    Resuming(i64),
    /// Not read until the client reads from our position again.
    Rereading(Reread),
}

pub(super) struct Doubt {
    trouble: Trouble,
    /// Asked together: the topic, and the two ends of the log.
    asked: Option<[(Question, Option<Answer>); 3]>,
}

/// The client keeps the old topic's leader epochs, and ignores those of the new one for as long as they are lower: the brokers
/// refuse what it asks for, and it asks again for ever without a word.
#[derive(Debug, Clone, Copy)]
pub(super) struct Silence {
    /// The position that has not moved.
    at: i64,
    since: Instant,
    /// There was something to read when this was looked at last.
    in_vain: bool,
}

impl Silence {
    pub(super) fn from(at: i64) -> Self {
        Self {
            at,
            since: Instant::now(),
            in_vain: false,
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Trouble {
    /// The position is not in the log.
    OutOfRange,
    /// The log was cut off below the position and has gone on from there: at this offset, if the client says so.
    Truncated(Option<i64>),
    /// This offset came, which is below the position.
    WentBack(i64),
    /// The topic's id has changed.
    Recreated,
    /// Nothing comes.
    Silent,
}

impl Log {
    pub(super) fn stopped(&self) -> Option<&StoppedPartition> {
        match self {
            Self::Stopped(stopped) => Some(stopped),
            _ => None,
        }
    }

    fn is_asked_about(&self) -> bool {
        matches!(self, Self::Doubtful(doubt) if doubt.asked.is_some())
    }
}

/// What there is now.
#[derive(Debug, Clone, Copy)]
struct Found {
    /// Not known when the brokers give no ids.
    topic: TopicSeen,
    first: i64,
    next: i64,
}

/// Where reading goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// Where it stood.
    Here,
    /// From here on, what lies before was skipped.
    Skip(i64),
    /// From here on, which is below the position: in the same log, which was cut off or is to be read again.
    CutOff(i64),
    Stop(StopReason),
    EndRun,
}

impl Pump {
    /// Nothing more is read from this partition until it is known what there is.
    pub(super) fn doubt(&mut self, slot: usize, trouble: Trouble) {
        if let Some(held) = &mut self.held[slot]
            && !matches!(held.log, Log::Doubtful(_))
        {
            held.log = Log::Doubtful(Box::new(Doubt {
                trouble,
                asked: None,
            }));
            self.surprised = true;
        }
    }

    /// Doubts the partitions of topics that were made anew as long as nothing comes from them.
    pub(super) fn listen_into_silence(&mut self, now: Instant) {
        for slot in 0..self.held.len() {
            let Some(held) = &mut self.held[slot] else {
                continue;
            };
            let Some(silence) = &mut held.silence else {
                continue;
            };
            let status = self.engine.status(held.owner);
            if status.and_then(|status| status.position) != Some(silence.at) {
                held.silence = None;
                continue;
            }
            if self.engine.room(held.owner) == 0 || self.outage.is_some() {
                silence.since = now;
            }
            if now.duration_since(silence.since) >= SILENCE && matches!(held.log, Log::Sound) {
                silence.since = now;
                self.doubt(slot, Trouble::Silent);
            }
        }
    }

    /// What is there was asked for, as nothing came.
    fn end_if_stuck(&mut self, slot: usize, next: i64) {
        let held = self.held[slot].as_mut().expect("it is being attended to");
        held.log = Log::Sound;
        // An error came meanwhile.
        if self.engine.is_distrusted(held.owner) {
            let position = self.engine.status(held.owner).and_then(|it| it.position);
            return self.reread(slot, position.unwrap_or(next), None);
        }
        let Some(silence) = &mut held.silence else {
            return;
        };
        let before = std::mem::replace(&mut silence.in_vain, next > silence.at);
        if !before || !silence.in_vain {
            return;
        }
        let Source {
            topic, partition, ..
        } = &*held.source;
        let message = format!(
            "partition {topic}/{partition}: the topic was deleted and made anew, and the client does not read the new one, \
             which has offsets {} to {next}: it does not accept leader epochs lower than the old topic's; start the \
             consumer again",
            silence.at
        );
        self.fail(RunErrorKind::Client, message);
    }

    /// An operator has decided where a stopped partition goes on. `false`: it is not stopped here.
    pub(super) fn resume_at(&mut self, topic: &str, partition: i32, offset: i64) -> bool {
        let mut held = self.held.iter_mut().flatten();
        let held = held.find(|held| {
            *held.source.topic == *topic
                && held.source.partition == partition
                && held.log.stopped().is_some()
        });
        let Some(held) = held else {
            return false;
        };
        held.log = Log::Resuming(offset);
        self.surprised = true;
        true
    }

    /// Looks after logs that have surprised us. Not within a rebalance: that the client is told to read from elsewhere must
    /// not be taken for the answer to it.
    pub(super) fn attend_to_logs(&mut self, consumer: &BaseConsumer) -> bool {
        let now = Instant::now();
        self.check_topics(now);
        if !std::mem::take(&mut self.surprised) {
            return false;
        }
        let mut worked = false;
        let asked = self.held.iter().flatten();
        let mut asked = asked.filter(|held| held.log.is_asked_about()).count();
        for slot in 0..self.held.len() {
            worked |= self.attend_to_log(consumer, slot, now, &mut asked);
        }
        worked | self.read_again(consumer, now)
    }

    /// `all_asked`: of how many logs answers are waited for.
    fn attend_to_log(
        &mut self,
        consumer: &BaseConsumer,
        slot: usize,
        now: Instant,
        all_asked: &mut usize,
    ) -> bool {
        let wake = self.wake();
        let Some(held) = &mut self.held[slot] else {
            return false;
        };
        match &mut held.log {
            Log::Sound | Log::Stopped(_) | Log::Rereading(_) => false,
            Log::Resuming(offset) => {
                let offset = *offset;
                self.go_on_at(slot, offset);
                true
            }
            Log::Doubtful(doubt) => {
                self.surprised = true;
                let Some(asked) = &mut doubt.asked else {
                    if *all_asked < MOST_ASKED
                        && held
                            .looked_at
                            .is_none_or(|at| now.duration_since(at) >= PAUSE)
                    {
                        *all_asked += 1;
                        let Source {
                            topic, partition, ..
                        } = &*held.source;
                        let end = |end| {
                            let wake = Arc::clone(&wake);
                            Question::offset(&self.lifeline, wake, topic, *partition, end, QUESTION)
                        };
                        let named = [&**topic];
                        let wake = Arc::clone(&wake);
                        let broker = self.topics.broker();
                        let topic =
                            Question::topics(&self.lifeline, wake, &named, broker, QUESTION);
                        let asked = [topic, end(LogEnd::First), end(LogEnd::Next)];
                        let [Some(topic), Some(first), Some(next)] = asked else {
                            return false;
                        };
                        doubt.asked = Some([(topic, None), (first, None), (next, None)]);
                        held.looked_at = Some(now);
                    }
                    return false;
                };
                for (question, answer) in asked.iter_mut().filter(|(_, answer)| answer.is_none()) {
                    *answer = question.poll(Duration::ZERO);
                }
                let (topic, first, next) = match asked {
                    [(_, Some(topic)), (_, Some(first)), (_, Some(next))] => (topic, first, next),
                    _ => return false,
                };
                let (Answer::Topics(topics), Answer::Offset(first), Answer::Offset(next)) =
                    (&*topic, &*first, &*next)
                else {
                    let Source {
                        topic: name,
                        partition,
                        ..
                    } = &*held.source;
                    tracing::warn!(
                        topic = %name, partition, answers = ?(topic, first, next),
                        "the brokers do not say what there is in this partition now; asking again"
                    );
                    doubt.asked = None;
                    self.topics.ask_another();
                    return false;
                };
                let described = topics.first().filter(|topic| topic.error.is_none());
                let found = Found {
                    topic: described.map(seen).unwrap_or_default(),
                    first: *first,
                    next: *next,
                };
                let trouble = doubt.trouble;
                if !self.stop_unreadable(consumer, slot, found) {
                    self.decide(slot, trouble, found);
                }
                true
            }
        }
    }

    /// Stops a partition at what cannot be read, if that is why its log was looked at and is still there. `false`: not so.
    fn stop_unreadable(&mut self, consumer: &BaseConsumer, slot: usize, found: Found) -> bool {
        let held = self.held[slot].as_mut().expect("it is being attended to");
        let Some((reason, error)) = held.setback.as_ref().and_then(Setback::stops) else {
            return false;
        };
        let error = error.to_owned();
        held.setback = None;
        let status = self.engine.status(held.owner);
        let status = status.expect("what is held is owned");
        let position = status.position.unwrap_or(found.first);
        if found.topic.differs_from(held.identity.topic())
            || !(found.first..=found.next).contains(&position)
        {
            return false;
        }
        let Source {
            topic, partition, ..
        } = &*held.source;
        let stopped = StoppedPartition {
            reason,
            position,
            committed: status.committed,
            log_start: found.first,
            log_end: found.next,
            error: Some(format!("{error}: {}", way_out(reason, &error))),
        };
        tracing::error!(
            group = %self.settings.group, %topic, partition, position, log_start = found.first, log_end = found.next, error,
            "partition stopped: {reason}: {}", way_out(reason, &error)
        );
        let place = TopicPartition::of(&held.source);
        held.log = Log::Stopped(stopped.clone());
        self.tell(Event::PartitionStopped {
            partition: place,
            stopped,
        });
        self.set_fetching(consumer, &[slot], Some(Instant::now()));
        true
    }

    fn decide(&mut self, slot: usize, trouble: Trouble, found: Found) {
        let held = self.held[slot].as_ref().expect("it is being attended to");
        let source = Arc::clone(&held.source);
        let Source {
            topic, partition, ..
        } = &*source;
        let status = self.engine.status(held.owner);
        let status = status.expect("what is held is owned");
        let position = status.position.unwrap_or(found.first);
        let place = TopicPartition::of(&source);
        let known = held.identity.topic();
        let Found { first, next, .. } = found;
        let unfinished = status.running + status.queued + status.retrying;
        if found.topic.differs_from(known) {
            tracing::warn!(
                %topic, partition, position, start = first, unfinished,
                "the topic was deleted and made anew: it is read from its start, and what was unfinished in the old one \
                 is let go"
            );
            self.tell(Event::TopicRecreated {
                partition: place,
                position,
                start: first,
            });
            self.note_topic(topic, found.topic);
            self.begin_anew(slot, first, found.topic.made_anew());
            if let Some(held) = &mut self.held[slot] {
                held.silence = Some(Silence::from(first));
            }
            return;
        }
        if matches!(trouble, Trouble::Silent) {
            return self.end_if_stuck(slot, next);
        }
        // Where the log was cut is known to the brokers, by the epoch.
        if matches!(trouble, Trouble::OutOfRange) && position > next {
            let held = self.held[slot].as_mut().expect("it is being attended to");
            if let Some(epoch) = held.epochs.take_unproven() {
                return self.validate(slot, position, epoch);
            }
        }
        let verdict = judge(trouble, position, first, next, self.settings.out_of_range);
        match (verdict, trouble) {
            (Verdict::Here, _) => self.reread(slot, position, None),
            (Verdict::CutOff(at), Trouble::WentBack(_)) => {
                let void = self.cut_off(slot, at);
                tracing::warn!(
                    %topic, partition, position, start = at, void,
                    "the log went back, and is read from there; what is unfinished below is handled as before"
                );
                self.tell(Event::LogReset {
                    partition: place,
                    last: position - 1,
                    offset: at,
                    void,
                });
            }
            (Verdict::CutOff(at), Trouble::Truncated(Some(_))) => {
                let void = self.cut_off(slot, at);
                tracing::warn!(
                    %topic, partition, position, start = at, void,
                    "the log was cut off below the position, most likely by an unclean leader election: what has taken \
                     the place of lost records is read, and what is unfinished below is handled as before"
                );
                self.tell(Event::LogTruncated {
                    partition: place,
                    position,
                    start: at.min(position),
                    void,
                });
            }
            (Verdict::CutOff(at) | Verdict::Skip(at), _) => {
                let skipped = skipped(position, at, first);
                let void = match verdict {
                    Verdict::CutOff(_) => self.cut_off(slot, at),
                    _ => {
                        self.skip_to(slot, at);
                        0
                    }
                };
                tracing::error!(
                    %topic, partition, position, log_start = first, log_end = next, resumed_at = at, skipped, void,
                    "the position is not in the log, and reading goes on where it was chosen to"
                );
                self.tell(Event::OffsetOutOfRange {
                    partition: place,
                    position,
                    log_start: first,
                    log_end: next,
                    resumed_at: Some(at),
                    skipped,
                    void,
                });
            }
            (Verdict::Stop(reason), _) => {
                let stopped = StoppedPartition {
                    reason,
                    position,
                    committed: status.committed,
                    log_start: first,
                    log_end: next,
                    error: None,
                };
                let group = &self.settings.group;
                tracing::error!(
                    %group, %topic, partition, position, log_start = first, log_end = next,
                    "partition stopped: {reason}; see what is lost, then call `resume_at` on the consumer's handle with \
                     the offset to go on at, or commit that offset for the group while none of its members runs; \
                     `out_of_range` on the builder decides beforehand"
                );
                self.tell(Event::OffsetOutOfRange {
                    partition: place,
                    position,
                    log_start: first,
                    log_end: next,
                    resumed_at: None,
                    skipped: 0,
                    void: 0,
                });
                if let Some(held) = &mut self.held[slot] {
                    held.log = Log::Stopped(stopped);
                }
            }
            (Verdict::EndRun, _) => {
                let message = format!(
                    "partition {topic}/{partition}: offset {position} is not in the log, which has {first} to {next}: \
                     records were deleted before group `{}` read them, or the log was cut off; decide where to go on, \
                     and commit that offset for the group",
                    self.settings.group
                );
                self.tell(Event::OffsetOutOfRange {
                    partition: place,
                    position,
                    log_start: first,
                    log_end: next,
                    resumed_at: None,
                    skipped: 0,
                    void: 0,
                });
                self.fail(RunErrorKind::OffsetOutOfRange, message);
            }
        }
    }

    fn go_on_at(&mut self, slot: usize, offset: i64) {
        let held = self.held[slot].as_ref().expect("it is being attended to");
        let Source {
            topic, partition, ..
        } = &*held.source;
        let position = self.engine.status(held.owner).and_then(|it| it.position);
        let (topic, partition) = (Arc::clone(topic), *partition);
        let void = match position {
            Some(position) if offset < position => self.cut_off(slot, offset),
            _ => {
                self.skip_to(slot, offset);
                0
            }
        };
        tracing::warn!(%topic, partition, position, offset, void, "a stopped partition goes on, as asked for");
    }

    /// Goes on at a lower offset of the same log, and returns how many unfinished records that makes void. What is below
    /// that offset goes on as if nothing had happened.
    fn cut_off(&mut self, slot: usize, offset: i64) -> usize {
        let held = self.held[slot].as_mut().expect("it is being attended to");
        let Some(cut) = self.engine.cut_off(held.owner, offset) else {
            // It is given away in this moment.
            return 0;
        };
        let CutOff {
            position,
            sequences,
            void,
            out,
            ..
        } = cut;
        held.epochs.cut_off(offset);
        if out > 0 {
            // First what has not started is called back: handlers that end would make room for it.
            let fence = Arc::clone(&held.fence);
            self.recall();
            fence.make_void(sequences);
        }
        self.reread(slot, position, None);
        void
    }

    /// Goes on at a later offset. Gaps are normal: what is unfinished below it is finished and committed first.
    fn skip_to(&mut self, slot: usize, offset: i64) {
        let held = self.held[slot].as_ref().expect("it is being attended to");
        self.engine.skip_to(held.owner, offset);
        self.reread(slot, offset, None);
    }

    /// Goes on in another log, of a topic that was made anew: a new ownership. Nothing of the old one is kept.
    fn begin_anew(&mut self, slot: usize, start: i64, topic: TopicSeen) {
        let held = self.held[slot].as_mut().expect("it is being attended to");
        held.fence.close(Instant::now());
        held.fence = Arc::new(Fence::default());
        held.identity = held.identity.with_topic(topic);
        held.epochs = Epochs::default();
        let inherited = Inherited {
            identity: held.identity,
            ..Inherited::default()
        };
        let (old, source) = (held.owner, Arc::clone(&held.source));
        self.tell_of_forfeited(old);
        let last = self.engine.end(old);
        let owner = self.engine.assign(Some(start), None, inherited);
        debug_assert_eq!(
            owner.slot(),
            slot,
            "a slot just freed is the first to be used again"
        );
        if let Some(held) = &mut self.held[slot] {
            held.owner = owner;
        }
        if let Some(last) = last {
            self.add_to_report(&source, last);
        }
        self.apply_pauses();
        self.reread(slot, start, None);
    }

    /// A leader was elected after the committed offset was written, perhaps one that had missed some of the log.
    pub(super) fn ask_about_election(&mut self, slot: usize) {
        let Some(held) = &mut self.held[slot] else {
            return;
        };
        let position = self.engine.status(held.owner).and_then(|it| it.position);
        if let Some((position, epoch)) = position.zip(held.epochs.take_unproven()) {
            self.validate(slot, position, epoch);
        }
    }

    /// Has the client ask the brokers whether the log that had this epoch reaches up to this offset, and read on there if it
    /// does. Else it says so in place of records.
    fn validate(&mut self, slot: usize, offset: i64, epoch: i32) {
        self.reread(slot, offset, Some(epoch));
        let Some(held) = &self.held[slot] else {
            return;
        };
        let Source {
            topic, partition, ..
        } = &*held.source;
        tracing::debug!(
            %topic, partition, offset, epoch,
            "a leader was elected since this offset was committed: the brokers are asked whether the log was cut off"
        );
    }
}

/// How many offsets that had not been read are passed over, at most.
fn skipped(position: i64, resumed_at: i64, log_start: i64) -> i64 {
    match position <= resumed_at {
        true => resumed_at - position,
        // What was cut off may have been replaced by anything.
        false => resumed_at - log_start,
    }
}

/// What to do about a position in a log that begins at `first` and ends before `next`.
fn judge(trouble: Trouble, position: i64, first: i64, next: i64, policy: OutOfRange) -> Verdict {
    let reason = match trouble {
        // It is the same one after all.
        Trouble::Recreated | Trouble::Silent => return Verdict::Here,
        Trouble::WentBack(offset) => return Verdict::CutOff(offset.clamp(first, next)),
        // All from there on is new, and nothing before it is skipped.
        Trouble::Truncated(Some(end)) if end >= first => return Verdict::CutOff(end.min(next)),
        _ if position < first => StopReason::Deleted,
        // There is nothing that could be skipped.
        _ if position > next && first == next => return Verdict::CutOff(next),
        _ if position > next => StopReason::Truncated,
        Trouble::Truncated(_) => StopReason::Truncated,
        Trouble::OutOfRange => return Verdict::Here,
    };
    let go_on = |at| match at < position {
        true => Verdict::CutOff(at),
        false => Verdict::Skip(at),
    };
    // Where the log was cut is not known, but that it was below its end. To go on at the end drops nothing that may still be
    // there. To go on at its start reads all again, also what had finished: any of it may have been replaced.
    match policy {
        OutOfRange::StopPartition => Verdict::Stop(reason),
        OutOfRange::Earliest => go_on(first),
        OutOfRange::Latest => go_on(next),
        OutOfRange::EndRun => Verdict::EndRun,
    }
}

/// Librdkafka tells of a log that was cut off by words only.
pub(super) fn trouble_in(offset: i64, text: &str) -> Trouble {
    if offset >= 0 && !text.contains("truncation") {
        return Trouble::OutOfRange;
    }
    let end = text
        .split_once("broker end offset is ")
        .and_then(|(_, rest)| rest.split_once(' '))
        .and_then(|(end, _)| end.parse().ok())
        .filter(|end: &i64| *end >= 0);
    Trouble::Truncated(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICIES: [OutOfRange; 4] = [
        OutOfRange::StopPartition,
        OutOfRange::Earliest,
        OutOfRange::Latest,
        OutOfRange::EndRun,
    ];

    #[test]
    fn where_records_would_be_skipped_the_policy_decides() {
        let deleted = POLICIES.map(|policy| judge(Trouble::OutOfRange, 5, 40, 90, policy));
        assert_eq!(
            deleted,
            [
                Verdict::Stop(StopReason::Deleted),
                Verdict::Skip(40),
                Verdict::Skip(90),
                Verdict::EndRun
            ]
        );
        let cut_off = POLICIES.map(|policy| judge(Trouble::OutOfRange, 95, 40, 90, policy));
        assert_eq!(
            cut_off,
            [
                Verdict::Stop(StopReason::Truncated),
                Verdict::CutOff(40),
                Verdict::CutOff(90),
                Verdict::EndRun
            ]
        );
        let unknown = judge(
            Trouble::Truncated(None),
            60,
            40,
            90,
            OutOfRange::StopPartition,
        );
        assert_eq!(unknown, Verdict::Stop(StopReason::Truncated));
        assert_eq!((skipped(5, 40, 40), skipped(5, 90, 40)), (35, 85));
        assert_eq!((skipped(95, 40, 40), skipped(95, 90, 40)), (0, 50));
    }

    #[test]
    fn where_nothing_would_be_skipped_reading_goes_on_under_any_policy() {
        for policy in POLICIES {
            let judge =
                |trouble, position, first, next| judge(trouble, position, first, next, policy);
            assert_eq!(judge(Trouble::OutOfRange, 60, 40, 90), Verdict::Here);
            assert_eq!(judge(Trouble::OutOfRange, 95, 90, 90), Verdict::CutOff(90));
            assert_eq!(judge(Trouble::Recreated, 60, 40, 90), Verdict::Here);
            assert_eq!(judge(Trouble::WentBack(7), 60, 0, 90), Verdict::CutOff(7));
            let cut_off = judge(Trouble::Truncated(Some(50)), 60, 40, 90);
            assert_eq!(cut_off, Verdict::CutOff(50));
        }
    }

    #[test]
    fn what_the_client_says_of_a_log_that_was_cut_off_is_understood() {
        let text = "Partition log truncation detected at offset 60 (leader epoch 3): broker end offset is 50 (offset \
                    leader epoch 2). Reset to INVALID.: Local: Log truncation (broker 1)";
        assert!(matches!(
            trouble_in(-1001, text),
            Trouble::Truncated(Some(50))
        ));
        assert!(matches!(
            trouble_in(-1001, "anything"),
            Trouble::Truncated(None)
        ));
        let text = "fetch failed due to requested offset not available on the broker: Broker: Offset out of range";
        assert!(matches!(trouble_in(5, text), Trouble::OutOfRange));
    }
}
