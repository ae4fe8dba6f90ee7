//! Where partitions start. It is asked for without waiting, and no partition waits for another one's answer.
//!
//! A round asks for a number of partitions: which topics these are, what the group has committed, and for those without a
//! committed offset where their log begins or ends, which only a partition's leader knows. What has an answer starts; what has
//! none is named with the reason, and asked for again. Meanwhile it is ours, and nobody reads it.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant, UNIX_EPOCH},
};

use rdkafka::{consumer::Consumer as _, types::RDKafkaErrorCode as Code};

use super::{
    BaseConsumer,
    errors::is_terminal,
    ffi::{Answer, Committed as CommittedOffset, LogEnd, Question, Wanted, committed_of_member},
    log::Throttle,
    pump::Pump,
    topics::seen,
};
use crate::{
    consumer::{
        Event, NotStarted, NotStartedReason as Reason, RunErrorKind, StartPolicy, TopicPartition,
    },
    engine::{TopicSeen, decode_snapshot},
};

/// Between two questions about the same partition.
const PAUSE: Duration = Duration::from_secs(1);
/// For which topics these are. Without an answer reading goes on, and a topic that was made anew is noticed later.
const TOPICS: Duration = Duration::from_secs(2);
/// For committed offsets and the ends of logs.
const QUESTION: Duration = Duration::from_secs(3);
/// Lines about partitions that wait, within [`LINES_FOR`].
const LINES: u32 = 20;
const LINES_FOR: Duration = Duration::from_secs(60);

/// A partition of a topic.
pub(super) type Place = (Arc<str>, i32);

/// Where reading of a partition begins, and what the group had committed.
#[derive(Debug)]
pub(super) struct Position {
    pub(super) start: i64,
    pub(super) committed: Option<i64>,
    /// What stands beside the committed offset: a snapshot, or whatever somebody wrote there.
    pub(super) metadata: Vec<u8>,
    /// The leader epoch that stands beside the committed offset.
    pub(super) epoch: Option<i32>,
    /// As it goes into the snapshots of this ownership.
    pub(super) topic: TopicSeen,
    pub(super) surprise: Option<Surprise>,
}

/// What a group did not expect that knows the topic.
#[derive(Debug, Clone, Copy)]
pub(super) enum Surprise {
    /// It was made anew; the group stood here in the old one.
    Recreated(i64),
    /// The partition was added to it.
    Added,
    /// The topic itself is new to a group that reads others by the same pattern.
    TopicAdded,
    /// The group has read this topic, and its committed offset in this partition is gone. So many offsets are passed over.
    Missing { skipped: i64 },
}

/// A partition whose start is known now.
pub(super) struct Found {
    pub(super) place: Place,
    pub(super) position: Position,
    /// Since it was assigned to us.
    pub(super) waited: Duration,
}

/// Committed offsets, each with what stands beside it.
type Committed = HashMap<Place, (i64, Option<i32>, Vec<u8>)>;

/// What others have committed in the topic of a partition without a committed offset: which topic that was for each.
type Neighbours = HashMap<Arc<str>, Vec<(i32, TopicSeen)>>;

/// Partitions that are ours and whose start is not known yet.
pub(super) struct Starts {
    waiting: HashMap<Place, Waiting>,
    rounds: Vec<Round>,
    /// Tells one assignment of a partition from the next.
    assignments: u64,
    /// Held by each thread that waits for an answer.
    threads: Arc<()>,
    told: Throttle,
}

impl Default for Starts {
    fn default() -> Self {
        Self {
            waiting: HashMap::new(),
            rounds: Vec::new(),
            assignments: 0,
            threads: Arc::default(),
            told: Throttle::of(LINES, LINES_FOR),
        }
    }
}

struct Waiting {
    assignment: u64,
    since: Instant,
    /// When it is asked for again. `None` while it is.
    next: Option<Instant>,
    /// Its leader, or that of one that was asked together with it, gave no answer: it is asked by itself.
    alone: bool,
    /// Its topic was made anew while this process lives.
    changed: bool,
    held_up: Option<(Reason, Option<String>)>,
}

/// One partition in a round. What is answered to it counts for that assignment of it only.
#[derive(Clone)]
struct Asked {
    place: Place,
    assignment: u64,
}

struct Round {
    asked: Vec<Asked>,
    topics: HashMap<Arc<str>, Topic>,
    stage: Stage,
}

/// What is known of a topic. Nothing, by default.
#[derive(Default)]
struct Topic {
    seen: TopicSeen,
    leaders: Vec<Option<i32>>,
}

enum Stage {
    Topics(Question),
    Committed(CommittedQuestion),
    Neighbours(CommittedQuestion, Committed),
    /// One for each leader.
    Ends(Vec<Ends>),
}

struct Ends {
    question: Question,
    of: Vec<(Asked, Start)>,
}

/// What is to be known of a log, and what the partition's position is then.
#[derive(Clone, Copy)]
struct Start {
    wanted: Wanted,
    topic: TopicSeen,
    surprise: Option<Surprise>,
    doubt: Doubt,
}

/// Whether starting anywhere but at the start of the log may pass over what the group has not read.
#[derive(Clone, Copy, PartialEq)]
enum Doubt {
    None,
    /// Its committed offset may have been deleted. How much is passed over is asked for when the start is known.
    Unread,
    /// It starts here. The log's own start is being asked for.
    Starts(i64),
}

/// A thread waits for the answer. librdkafka's question without a thread may end the process when a coordinator comes back,
/// see [`Question::group`].
struct CommittedQuestion(mpsc::Receiver<Result<Vec<CommittedOffset>, Code>>);

impl CommittedQuestion {
    fn poll(&self) -> Option<Result<Vec<CommittedOffset>, Code>> {
        match self.0.try_recv() {
            Ok(answer) => Some(answer),
            Err(mpsc::TryRecvError::Empty) => None,
            Err(mpsc::TryRecvError::Disconnected) => Some(Err(Code::Fail)),
        }
    }
}

impl Starts {
    /// These are ours from now on.
    pub(super) fn add(&mut self, places: &[Place], now: Instant) {
        for place in places {
            self.assignments += 1;
            let waiting = Waiting {
                assignment: self.assignments,
                since: now,
                next: Some(now),
                alone: false,
                changed: false,
                held_up: None,
            };
            self.waiting.insert(place.clone(), waiting);
        }
    }

    /// These are not ours any more.
    pub(super) fn remove(&mut self, places: &HashSet<Place>) {
        self.waiting.retain(|place, _| !places.contains(place));
    }

    /// Nothing is read any more.
    pub(super) fn clear(&mut self) {
        self.waiting.clear();
        self.rounds.clear();
    }

    pub(super) fn are_none(&self) -> bool {
        self.waiting.is_empty() && self.rounds.is_empty()
    }

    /// All have been asked for, and have their answer or none.
    pub(super) fn are_settled(&self) -> bool {
        self.rounds.is_empty() && self.waiting.values().all(|it| it.held_up.is_some())
    }

    /// A thread waits for an answer, and the client cannot be destroyed meanwhile.
    pub(super) fn have_a_thread(&self) -> bool {
        Arc::strong_count(&self.threads) > 1
    }

    /// What has been asked for once at least and has no answer.
    pub(super) fn held_up(&self, now: Instant) -> impl Iterator<Item = (&Place, NotStarted)> {
        self.waiting.iter().filter_map(move |(place, waiting)| {
            let (reason, error) = waiting.held_up.clone()?;
            let not_started = NotStarted {
                reason,
                error,
                waited: now.saturating_duration_since(waiting.since),
            };
            Some((place, not_started))
        })
    }

    fn get(&mut self, asked: &Asked) -> Option<&mut Waiting> {
        let waiting = self.waiting.get_mut(&asked.place)?;
        (waiting.assignment == asked.assignment).then_some(waiting)
    }

    fn is_wanted(&self, asked: &Asked) -> bool {
        let waiting = self.waiting.get(&asked.place);
        waiting.is_some_and(|waiting| waiting.assignment == asked.assignment)
    }
}

/// What a look at the rounds has brought to light.
#[derive(Default)]
struct News {
    found: Vec<(Asked, Position)>,
    held_up: Vec<(Asked, Reason, Option<String>)>,
    refused: bool,
    terminal: Option<(Code, Place)>,
}

impl News {
    fn hold_up(&mut self, asked: Asked, reason: Reason, code: Option<Code>) {
        if let Some(code) = code.filter(|code| is_terminal(*code)) {
            self.terminal = Some((code, asked.place.clone()));
        }
        let error = code.map(|code| code.to_string());
        self.held_up.push((asked, reason, error));
    }
}

impl Pump {
    /// Asks for what is due, and takes in what is answered. Never waits.
    pub(super) fn look_for_starts(&mut self, consumer: &BaseConsumer, now: Instant) -> Vec<Found> {
        if self.starts.are_none() {
            return Vec::new();
        }
        self.begin_round(consumer, now);
        let mut news = News::default();
        let rounds = std::mem::take(&mut self.starts.rounds);
        for round in rounds {
            if let Some(round) = self.go_on_with(consumer, round, &mut news) {
                self.starts.rounds.push(round);
            }
        }
        if news.refused {
            let message = format!(
                "group `{}` has no committed offset for some of its partitions and is told to refuse that: commit an offset \
                 for it, or choose another start policy",
                self.settings.group
            );
            self.fail(RunErrorKind::NoCommittedOffset, message);
            return Vec::new();
        }
        if let Some((code, (topic, partition))) = news.terminal {
            self.client_error(code, Some((&topic, partition)), "");
            return Vec::new();
        }
        self.note_held_up(news.held_up, now);
        let mut found = Vec::with_capacity(news.found.len());
        for (asked, position) in news.found {
            if self.starts.get(&asked).is_some()
                && let Some(waiting) = self.starts.waiting.remove(&asked.place)
            {
                found.push(Found {
                    place: asked.place,
                    position,
                    waited: now.saturating_duration_since(waiting.since),
                });
            }
        }
        found
    }

    fn note_held_up(&mut self, held_up: Vec<(Asked, Reason, Option<String>)>, now: Instant) {
        let mut told: HashMap<(Reason, Option<String>), Vec<TopicPartition>> = HashMap::new();
        for (asked, reason, error) in held_up {
            let Some(waiting) = self.starts.get(&asked) else {
                continue;
            };
            waiting.next = Some(now + PAUSE);
            let waited = now.saturating_duration_since(waiting.since);
            let before = waiting.held_up.replace((reason, error.clone()));
            let (topic, partition) = asked.place;
            if let Some(held_back) = self.starts.told.admit(now) {
                tracing::warn!(
                    %topic, partition, error, waited_ms = waited.as_millis() as u64, held_back,
                    "the partition is not read yet, others go on: {reason}; {}", reason.advice()
                );
            }
            if before.is_none_or(|(before, _)| before != reason) {
                let places = told.entry((reason, error)).or_default();
                places.push(TopicPartition { topic, partition });
            }
        }
        for ((reason, error), mut partitions) in told {
            partitions.sort_unstable();
            self.tell(Event::NotStarted {
                partitions,
                reason,
                error,
            });
        }
    }

    fn begin_round(&mut self, consumer: &BaseConsumer, now: Instant) {
        let mut asked = Vec::new();
        for (place, waiting) in &mut self.starts.waiting {
            if waiting.next.is_some_and(|next| next <= now) {
                waiting.next = None;
                asked.push(Asked {
                    place: place.clone(),
                    assignment: waiting.assignment,
                });
            }
        }
        if asked.is_empty() {
            return;
        }
        asked.sort_unstable_by(|a, b| a.place.cmp(&b.place));
        let mut names: Vec<_> = asked.iter().map(|asked| &*asked.place.0).collect();
        names.dedup();
        // Before the offsets: of a topic that is made anew in between, the old id is known beside the old offset.
        let broker = self.topics.who_answers(consumer, names[0]);
        let question = Question::topics(&self.lifeline, self.wake(), &names, broker, TOPICS);
        let Some(question) = question else {
            return;
        };
        self.starts.rounds.push(Round {
            asked,
            topics: HashMap::new(),
            stage: Stage::Topics(question),
        });
    }

    /// `None`: the round is over.
    fn go_on_with(
        &mut self,
        consumer: &BaseConsumer,
        mut round: Round,
        news: &mut News,
    ) -> Option<Round> {
        loop {
            round.asked.retain(|asked| self.starts.is_wanted(asked));
            if round.asked.is_empty() {
                return None;
            }
            round.stage = match round.stage {
                Stage::Topics(question) => {
                    let Some(answer) = question.poll(Duration::ZERO) else {
                        round.stage = Stage::Topics(question);
                        return Some(round);
                    };
                    round.topics = self.take_topics(&round.asked, answer);
                    let places: Vec<_> = round.asked.iter().map(|asked| &asked.place).collect();
                    Stage::Committed(self.ask_committed(&places))
                }
                Stage::Committed(question) => {
                    let Some(answer) = question.poll() else {
                        round.stage = Stage::Committed(question);
                        return Some(round);
                    };
                    let committed = self.take_committed(&mut round.asked, answer, news);
                    let neighbours = neighbours_of(&round.asked, &round.topics, &committed);
                    if neighbours.is_empty() {
                        self.decide_starts(
                            &round.asked,
                            &round.topics,
                            committed,
                            &Neighbours::new(),
                            news,
                        )
                    } else {
                        let neighbours: Vec<_> = neighbours.iter().collect();
                        Stage::Neighbours(self.ask_committed(&neighbours), committed)
                    }
                }
                Stage::Neighbours(question, committed) => {
                    let Some(answer) = question.poll() else {
                        round.stage = Stage::Neighbours(question, committed);
                        return Some(round);
                    };
                    match answer {
                        Ok(answer) => {
                            let neighbours = self.neighbours_in(answer);
                            self.decide_starts(
                                &round.asked,
                                &round.topics,
                                committed,
                                &neighbours,
                                news,
                            )
                        }
                        Err(code) => {
                            let reason = Reason::CommittedOffsetUnavailable;
                            for asked in round.asked.drain(..) {
                                news.hold_up(asked, reason, Some(code));
                            }
                            return None;
                        }
                    }
                }
                Stage::Ends(questions) => {
                    let before = questions.len();
                    let questions = self.take_ends(consumer, questions, news);
                    if questions.is_empty() {
                        return None;
                    }
                    let same = questions.len() == before;
                    round.stage = Stage::Ends(questions);
                    if same {
                        return Some(round);
                    }
                    continue;
                }
            };
            // What has its answer is not asked about any further.
            if let Stage::Ends(questions) = &round.stage {
                round.asked = questions
                    .iter()
                    .flat_map(|ends| ends.of.iter().map(|(asked, _)| asked.clone()))
                    .collect();
            }
        }
    }

    fn take_topics(&mut self, asked: &[Asked], answer: Answer) -> HashMap<Arc<str>, Topic> {
        let Answer::Topics(described) = answer else {
            self.topics.ask_another();
            tracing::warn!(
                ?answer,
                "the brokers do not say which topics these are: should one have been made anew, that is noticed later"
            );
            return HashMap::new();
        };
        let mut topics = HashMap::new();
        let mut changed = HashSet::new();
        for topic in described {
            if topic.error.is_some() {
                continue;
            }
            let name: Arc<str> = Arc::from(&*topic.name);
            let seen = seen(&topic);
            if self.note_topic(&name, seen) {
                changed.insert(Arc::clone(&name));
            }
            let leaders = topic.leaders;
            topics.insert(name, Topic { seen, leaders });
        }
        if !changed.is_empty() {
            for asked in asked
                .iter()
                .filter(|asked| changed.contains(&asked.place.0))
            {
                if let Some(waiting) = self.starts.get(asked) {
                    waiting.changed = true;
                }
            }
        }
        topics
    }

    fn ask_committed(&self, places: &[&Place]) -> CommittedQuestion {
        let (send, answer) = mpsc::sync_channel(1);
        let (lifeline, wake) = (self.lifeline.clone(), self.wake());
        let places: Vec<Place> = places.iter().map(|place| (*place).clone()).collect();
        let alive = Arc::clone(&self.starts.threads);
        let asking = move || {
            let partitions = places
                .iter()
                .map(|(topic, partition)| (&**topic, *partition));
            let answer = committed_of_member(&lifeline, partitions, QUESTION);
            drop(alive);
            let _ = send.send(answer);
            wake();
        };
        // Should there be no thread, the channel's other end is gone, and that is the answer.
        let _ = thread::Builder::new()
            .name("kafka-offsets".into())
            .spawn(asking);
        CommittedQuestion(answer)
    }

    /// What is left in `asked` has an answer: an offset, or that there is none.
    fn take_committed(
        &mut self,
        asked: &mut Vec<Asked>,
        answer: Result<Vec<CommittedOffset>, Code>,
        news: &mut News,
    ) -> Committed {
        let reason = Reason::CommittedOffsetUnavailable;
        let answer = match answer {
            Ok(answer) => answer,
            Err(code) => {
                for asked in asked.drain(..) {
                    news.hold_up(asked, reason, Some(code));
                }
                return Committed::new();
            }
        };
        let mut errors: HashMap<Place, Code> = HashMap::new();
        let mut committed = Committed::with_capacity(answer.len());
        let mut answered = HashSet::with_capacity(answer.len());
        for entry in answer {
            let place = (Arc::from(entry.topic), entry.partition);
            match (entry.error, entry.offset) {
                (Some(error), _) => drop(errors.insert(place.clone(), error)),
                (None, Some(offset)) => {
                    let beside = (offset, entry.leader_epoch, entry.metadata);
                    committed.insert(place.clone(), beside);
                }
                (None, None) => {}
            }
            answered.insert(place);
        }
        asked.retain(|asked| {
            let error = errors.get(&asked.place).copied();
            if error.is_some() || !answered.contains(&asked.place) {
                news.hold_up(asked.clone(), reason, error);
                return false;
            }
            true
        });
        committed
    }

    fn neighbours_in(&self, answer: Vec<CommittedOffset>) -> Neighbours {
        let mut neighbours = Neighbours::new();
        for entry in answer {
            // One that is not answered for tells nothing.
            if let (None, Some(offset)) = (entry.error, entry.offset) {
                let written = self.topic_in(&entry.metadata, &entry.topic, entry.partition, offset);
                let of = neighbours.entry(Arc::from(entry.topic)).or_default();
                of.push((entry.partition, written));
            }
        }
        neighbours
    }

    /// Which topic a committed offset belongs to, as far as it stands beside it.
    fn topic_in(&self, metadata: &[u8], topic: &str, partition: i32, offset: i64) -> TopicSeen {
        let read = decode_snapshot(metadata, self.identity(topic, partition), offset);
        read.map(|read| read.written).unwrap_or_default()
    }

    /// Those with a committed offset start there. For the others their leaders are asked.
    fn decide_starts(
        &mut self,
        asked: &[Asked],
        topics: &HashMap<Arc<str>, Topic>,
        mut committed: Committed,
        neighbours: &Neighbours,
        news: &mut News,
    ) -> Stage {
        // What other members have committed may be a moment old, in a group that is new itself. What was committed in
        // partitions that are ours was so before.
        let mut ours: HashSet<Place> = committed.keys().cloned().collect();
        ours.extend(self.held.iter().flatten().filter_map(|held| {
            self.engine.status(held.owner)?.committed?;
            Some((Arc::clone(&held.source.topic), held.source.partition))
        }));
        let read: HashSet<&str> = ours.iter().map(|(topic, _)| &**topic).collect();
        let mut by_leader: HashMap<i32, Vec<(Asked, Start)>> = HashMap::new();
        let mut alone = Vec::new();
        let unknown = Topic::default();
        for asked in asked {
            let (topic, partition) = &asked.place;
            let known = topics.get(topic).unwrap_or(&unknown);
            let now = known.seen;
            let Some(waiting) = self.starts.get(asked) else {
                continue;
            };
            let (changed, by_itself) = (waiting.changed, waiting.alone);
            let from_the_start = |topic, surprise| Start {
                wanted: Wanted::End(LogEnd::First),
                topic,
                surprise: Some(surprise),
                doubt: Doubt::None,
            };
            let start = match committed.remove(&asked.place) {
                Some((offset, epoch, metadata)) => {
                    let written = self.topic_in(&metadata, topic, *partition, offset);
                    if !now.differs_from(written) {
                        let topic = TopicSeen {
                            id: if now.id == 0 { written.id } else { now.id },
                            partitions: written.partitions,
                        };
                        let position = Position {
                            start: offset,
                            committed: Some(offset),
                            metadata,
                            epoch,
                            topic,
                            surprise: None,
                        };
                        news.found.push((asked.clone(), position));
                        continue;
                    }
                    from_the_start(now.made_anew(), Surprise::Recreated(offset))
                }
                None if changed => from_the_start(now.made_anew(), Surprise::Recreated(0)),
                None => {
                    let neighbours = neighbours.get(topic).map_or(&[][..], Vec::as_slice);
                    if is_added(*partition, now, neighbours) {
                        let began_with = neighbours.iter().map(|(_, seen)| seen.partitions);
                        let began_with = began_with.filter(|partitions| *partitions > 0).min();
                        let topic = TopicSeen {
                            partitions: began_with.unwrap_or_default(),
                            ..now
                        };
                        from_the_start(topic, Surprise::Added)
                    } else if let Some(wanted) = self.first_position(topic) {
                        let mut with = neighbours
                            .iter()
                            .filter(|(neighbour, seen)| {
                                began_with(*partition, now, *neighbour, *seen)
                            })
                            .peekable();
                        let missing = with.peek().is_some();
                        if with
                            .any(|(neighbour, _)| ours.contains(&(Arc::clone(topic), *neighbour)))
                        {
                            from_the_start(now, Surprise::Missing { skipped: 0 })
                        } else if wanted != Wanted::End(LogEnd::First)
                            && neighbours.is_empty()
                            && self.is_new_in_pattern(topic, &read)
                        {
                            from_the_start(now, Surprise::TopicAdded)
                        } else {
                            let passes_over = missing && wanted != Wanted::End(LogEnd::First);
                            Start {
                                wanted,
                                topic: now,
                                surprise: None,
                                doubt: match passes_over {
                                    true => Doubt::Unread,
                                    false => Doubt::None,
                                },
                            }
                        }
                    } else {
                        news.refused = true;
                        continue;
                    }
                }
            };
            let number = usize::try_from(*partition).unwrap_or(usize::MAX);
            match known.leaders.get(number) {
                Some(None) => news.hold_up(asked.clone(), Reason::NoLeader, None),
                Some(Some(leader)) if !by_itself => {
                    let of = by_leader.entry(*leader).or_default();
                    of.push((asked.clone(), start));
                }
                _ => alone.push((asked.clone(), start)),
            }
        }
        let together = by_leader.into_values();
        let alone = alone.into_iter().map(|one| vec![one]);
        let ends = together.chain(alone).filter_map(|of| self.ask_ends(of));
        Stage::Ends(ends.collect())
    }

    /// The group reads other topics by the pattern that this one matches, and has not read this one.
    fn is_new_in_pattern(&self, topic: &str, read: &HashSet<&str>) -> bool {
        let subscription = &self.settings.subscription;
        let by_pattern = |topic: &str| {
            subscription.takes_in(topic) && !subscription.topics.iter().any(|named| named == topic)
        };
        by_pattern(topic)
            && read
                .iter()
                .any(|other| *other != topic && by_pattern(other))
    }

    /// Where a group begins that has committed nothing; a number from the start, so that it can be committed. `None`: nowhere.
    fn first_position(&self, topic: &str) -> Option<Wanted> {
        // Whatever lies in a retry topic is unfinished, from before the group first read it too.
        if self.settings.retry_topics.get(topic).is_some() {
            return Some(Wanted::End(LogEnd::First));
        }
        Some(match self.settings.start {
            StartPolicy::Refuse => return None,
            StartPolicy::Earliest => Wanted::End(LogEnd::First),
            StartPolicy::Latest => Wanted::End(LogEnd::Next),
            StartPolicy::Time(time) => {
                let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
                Wanted::Time(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
            }
        })
    }

    fn ask_ends(&self, of: Vec<(Asked, Start)>) -> Option<Ends> {
        let asked = of.iter().map(|(asked, start)| {
            let (topic, partition) = &asked.place;
            (&**topic, *partition, start.wanted)
        });
        let question = Question::offsets(&self.lifeline, self.wake(), asked, QUESTION)?;
        Some(Ends { question, of })
    }

    /// Returns the questions that are open still.
    fn take_ends(
        &mut self,
        consumer: &BaseConsumer,
        questions: Vec<Ends>,
        news: &mut News,
    ) -> Vec<Ends> {
        let mut open = Vec::with_capacity(questions.len());
        let mut in_vain = HashSet::new();
        for ends in questions {
            let Some(answer) = ends.question.poll_offsets() else {
                open.push(ends);
                continue;
            };
            let (answer, error) = match answer {
                Ok(answer) => (answer, None),
                Err(code) => (Vec::new(), Some(code)),
            };
            let mut offsets: HashMap<Place, Result<i64, Code>> = answer
                .into_iter()
                .map(|listed| {
                    let place = (Arc::from(listed.topic), listed.partition);
                    (place, listed.offset)
                })
                .collect();
            let mut again = Vec::new();
            for (asked, start) in ends.of {
                let answer = offsets.remove(&asked.place);
                match (answer, start.wanted) {
                    (Some(Ok(offset)), _) if offset >= 0 && start.doubt == Doubt::Unread => {
                        let start = Start {
                            wanted: Wanted::End(LogEnd::First),
                            doubt: Doubt::Starts(offset),
                            ..start
                        };
                        again.push((asked, start));
                    }
                    (Some(Ok(offset)), _) if offset >= 0 => {
                        let (offset, surprise) = match start.doubt {
                            Doubt::Starts(at) if at > offset => {
                                let skipped = at - offset;
                                (at, Some(Surprise::Missing { skipped }))
                            }
                            Doubt::Starts(at) => (at, start.surprise),
                            _ => (offset, start.surprise),
                        };
                        let position = Position {
                            start: offset,
                            committed: None,
                            metadata: Vec::new(),
                            epoch: None,
                            topic: start.topic,
                            surprise,
                        };
                        news.found.push((asked, position));
                    }
                    // Nothing is that young: the end.
                    (Some(Ok(_)), Wanted::Time(_)) => {
                        let wanted = Wanted::End(LogEnd::Next);
                        again.push((asked, Start { wanted, ..start }));
                    }
                    (answer, _) => {
                        let code = answer.and_then(Result::err).or(error);
                        in_vain.insert(Arc::clone(&asked.place.0));
                        if let Some(waiting) = self.starts.get(&asked) {
                            waiting.alone = true;
                        }
                        let reason = match code {
                            Some(Code::LeaderNotAvailable | Code::NoEnt) => Reason::NoLeader,
                            _ => Reason::LeaderUnavailable,
                        };
                        news.hold_up(asked, reason, code);
                    }
                }
            }
            if !again.is_empty() {
                open.extend(self.ask_ends(again));
            }
        }
        for topic in in_vain {
            // Not for its answer: the client may know leaders that are none any more, and would ask those again.
            let _ = consumer.fetch_metadata(Some(&topic), Duration::ZERO);
        }
        open
    }
}

/// All partitions of topics of which some in the round have no committed offset.
fn neighbours_of(
    asked: &[Asked],
    topics: &HashMap<Arc<str>, Topic>,
    committed: &Committed,
) -> Vec<Place> {
    let mut names: Vec<_> = asked
        .iter()
        .filter(|asked| !committed.contains_key(&asked.place))
        .map(|asked| &asked.place.0)
        .collect();
    names.sort_unstable();
    names.dedup();
    let partitions = names.into_iter().flat_map(|topic| {
        let count = topics.get(topic).map_or(0, |known| known.leaders.len());
        (0..count as i32).map(move |partition| (Arc::clone(topic), partition))
    });
    partitions.collect()
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

/// The group's committed offset in this neighbour says that the group began with this partition too.
fn began_with(partition: i32, now: TopicSeen, neighbour: i32, seen: TopicSeen) -> bool {
    neighbour != partition
        && now.id != 0
        && seen.id == now.id
        && i64::from(seen.partitions) > i64::from(partition)
}

#[cfg(test)]
mod tests {
    use rdkafka::{
        ClientConfig,
        mocking::MockCluster,
        producer::{BaseProducer, BaseRecord, Producer as _},
        types::{RDKafkaApiKey, RDKafkaRespErr},
    };
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    use super::*;
    use crate::{ConsumerHandle, Message, ReliableConsumer, Text, consumer::Status};

    const PATIENCE: Duration = Duration::from_secs(30);
    const PARTITIONS: i32 = 4;

    type Cluster = MockCluster<'static, rdkafka::producer::DefaultProducerContext>;

    /// A cluster with a record in each of these partitions of `orders`.
    fn cluster_with(partitions: impl IntoIterator<Item = i32>) -> Cluster {
        let cluster = MockCluster::new(2).unwrap();
        cluster.create_topic("orders", PARTITIONS, 1).unwrap();
        for partition in 0..PARTITIONS {
            let leader = partition % 2 + 1;
            cluster
                .partition_leader("orders", partition, Some(leader))
                .unwrap();
        }
        produce(&cluster, partitions);
        cluster
    }

    fn cluster() -> Cluster {
        cluster_with(0..PARTITIONS)
    }

    fn produce(cluster: &Cluster, partitions: impl IntoIterator<Item = i32>) {
        let producer: BaseProducer = ClientConfig::new()
            .set("bootstrap.servers", cluster.bootstrap_servers())
            .create()
            .unwrap();
        for partition in partitions {
            let record = BaseRecord::<(), _>::to("orders").partition(partition);
            producer.send(record.payload("an order")).unwrap();
        }
        producer.flush(PATIENCE).unwrap();
    }

    struct Run {
        handle: ConsumerHandle,
        handled: UnboundedReceiver<i32>,
        ended: tokio::task::JoinHandle<Result<crate::Report, crate::RunError>>,
    }

    impl Run {
        fn of(cluster: &Cluster, assignor: &str) -> Self {
            let consumer = ReliableConsumer::builder()
                .bootstrap_servers(cluster.bootstrap_servers())
                .group_id("shipping")
                .topic("orders")
                .property("partition.assignment.strategy", assignor)
                .build()
                .unwrap();
            let handle = consumer.handle();
            let (send, handled) = unbounded_channel();
            let run = consumer.run(async move |message: &Message<Text>| {
                send.send(message.partition())?;
                Ok(())
            });
            Self {
                handle,
                handled,
                ended: tokio::spawn(run.into_future()),
            }
        }

        async fn next(&mut self) -> i32 {
            let next = tokio::time::timeout(PATIENCE, self.handled.recv());
            next.await.expect("a record is handled").unwrap()
        }

        async fn status_when(&self, what: impl Fn(&Status) -> bool) -> Status {
            let until = Instant::now() + PATIENCE;
            loop {
                let status = self.handle.status().await.unwrap();
                if what(&status) {
                    return status;
                }
                assert!(Instant::now() < until, "{status:?}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }

        async fn stop(self) -> crate::Report {
            self.handle.shutdown().unwrap();
            self.ended.await.unwrap().unwrap()
        }
    }

    async fn a_leaderless_partition(assignor: &str) {
        let cluster = cluster_with([0, 1, 3]);
        cluster.partition_leader("orders", 2, None).unwrap();
        let mut run = Run::of(&cluster, assignor);
        let mut events = run.handle.events().unwrap();
        let mut handled = [run.next().await, run.next().await, run.next().await];
        handled.sort_unstable();
        assert_eq!(handled, [0, 1, 3]);
        let held_up = |status: &Status| {
            let held_up = status
                .partitions
                .iter()
                .filter(|it| it.not_started.is_some());
            held_up.map(|it| it.partition).collect::<Vec<_>>()
        };
        let status = run.status_when(|status| held_up(status) == [2]).await;
        assert_eq!(status.partitions.len(), 4);
        let not_started = status.partitions[2].not_started.as_ref().unwrap();
        assert_eq!(not_started.reason, Reason::NoLeader);
        assert_eq!((status.lag(), status.is_caught_up()), (None, false));
        cluster.partition_leader("orders", 2, Some(1)).unwrap();
        produce(&cluster, [2]);
        assert_eq!(run.next().await, 2);
        run.status_when(|status| held_up(status).is_empty() && status.partitions.len() == 4)
            .await;
        assert_eq!(run.stop().await.handled, 4);
        let mut told = Vec::new();
        while let Some(event) = events.next().await {
            match event {
                Event::NotStarted {
                    partitions, reason, ..
                } => told.push(format!("{reason:?} {}", partitions[0].partition)),
                Event::Assigned(partitions) => told.push(format!("+{}", partitions.len())),
                Event::Revoked(partitions) => told.push(format!("-{}", partitions.len())),
                _ => {}
            }
        }
        assert!(told.contains(&"NoLeader 2".to_owned()), "{told:?}");
        assert_eq!(told.last().unwrap(), "-4", "{told:?}");
        assert!(told.contains(&"+1".to_owned()), "{told:?}");
    }

    #[tokio::test]
    async fn a_partition_without_a_leader_starts_when_it_has_one_and_holds_up_no_other() {
        a_leaderless_partition("cooperative-sticky").await;
    }

    #[tokio::test]
    async fn nor_does_it_where_assignments_are_eager() {
        a_leaderless_partition("range").await;
    }

    #[tokio::test]
    async fn a_coordinator_that_does_not_give_committed_offsets_is_asked_until_it_does() {
        let cluster = cluster();
        let loading = RDKafkaRespErr::RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS;
        // The client tries again by itself for as long as it is given.
        cluster.request_errors(RDKafkaApiKey::OffsetFetch, &[loading; 1000]);
        let mut run = Run::of(&cluster, "cooperative-sticky");
        let status = run
            .status_when(|status| status.partitions.iter().any(|it| it.not_started.is_some()))
            .await;
        let reasons = status.partitions.iter().map(|it| it.not_started.as_ref());
        for not_started in reasons {
            assert_eq!(
                not_started.unwrap().reason,
                Reason::CommittedOffsetUnavailable
            );
        }
        cluster.clear_request_errors(RDKafkaApiKey::OffsetFetch);
        for _ in 0..PARTITIONS {
            run.next().await;
        }
        assert_eq!(run.stop().await.handled, 4);
    }

    #[tokio::test]
    async fn a_shutdown_waits_for_no_partition_that_has_not_started() {
        let cluster = cluster();
        for partition in 0..PARTITIONS {
            cluster.partition_leader("orders", partition, None).unwrap();
        }
        let run = Run::of(&cluster, "cooperative-sticky");
        run.status_when(|status| {
            let held_up = status
                .partitions
                .iter()
                .filter(|it| it.not_started.is_some());
            held_up.count() == 4
        })
        .await;
        let began = Instant::now();
        assert_eq!(run.stop().await.handled, 0);
        assert!(began.elapsed() < QUESTION, "{:?}", began.elapsed());
    }

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
