//! Dead letters on the disk: written there while their topic takes none, and sent from there when it does again.

use std::{
    collections::{BTreeMap, HashSet},
    future::Future,
    io,
    path::{Path, PathBuf},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::Poll,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use tokio::{
    runtime::Handle,
    task::{AbortHandle, JoinSet},
};

use super::{
    Failure,
    headers::{Detail, Manner, dead_letter_headers},
};
use crate::{
    consumer::DeadLetterSpool,
    kafka::{AckedProducer, Outgoing, ProduceError, RawHeader, Throttle},
    record::Record,
    spool::{
        Loaded, Refused, Spool,
        format::{Entry, Header, Piece, Pieces, Place},
    },
};

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// On their way at a time, once the topic has shown that it takes them.
const TOGETHER: usize = 500;

/// The spool of a consumer's dead letters.
pub(crate) struct Spooling {
    spool: Spool,
    directory: PathBuf,
    runtime: Handle,
    log: Throttle,
    send_errors: Arc<Mutex<SendErrors>>,
    sending: Mutex<Option<AbortHandle>>,
}

/// What the topics that do not take what is sent to them said last.
type SendErrors = BTreeMap<Arc<str>, String>;

impl Spooling {
    pub(crate) fn start(directory: &Path, max_bytes: u64, runtime: Handle) -> io::Result<Self> {
        Ok(Spooling {
            spool: Spool::start(directory.into(), max_bytes)?,
            directory: directory.into(),
            runtime,
            log: Throttle::default(),
            send_errors: Arc::default(),
            sending: Mutex::default(),
        })
    }

    /// Whether letters for this topic are still to be sent.
    pub(super) async fn holds(&self, topic: &str) -> bool {
        self.spool.holds(topic).await
    }

    /// Ends when the letter is on the disk.
    pub(super) async fn keep(
        &self,
        topic: &str,
        record: &Record,
        failure: &Failure,
        manner: &Manner,
        why: &str,
    ) -> Result<(), Refused> {
        let spooled_at_ms = millis(SystemTime::now());
        let body = encode(topic, record, failure, manner, spooled_at_ms)
            .ok_or_else(|| Refused::Unavailable("it is larger than 4 GiB".into()))?;
        self.spool.append(topic.into(), body, spooled_at_ms).await?;
        if let Some(held_back) = self.log.admit(Instant::now()) {
            tracing::error!(
                topic = %record.topic(),
                partition = record.partition(),
                offset = record.offset(),
                dead_letter_topic = %topic,
                error = why,
                spooled = self.spool.contents().records(),
                held_back,
                "a dead letter cannot be written; it is kept in the spool"
            );
        }
        Ok(())
    }

    /// Sends what is in the spool, now and for as long as this lives.
    pub(super) fn send_by(&self, producer: Arc<AckedProducer>) {
        let post = Post {
            spool: self.spool.clone(),
            producer,
            errors: Arc::clone(&self.send_errors),
        };
        let task = self.runtime.spawn(send_all(Arc::new(post)));
        let task = Some(task.abort_handle());
        *self.sending.lock().unwrap_or_else(PoisonError::into_inner) = task;
    }

    /// `None` until the directory has been looked through: nothing waits, or nobody knows yet, are not the same.
    pub(crate) fn status(&self) -> Option<DeadLetterSpool> {
        let contents = self.spool.contents();
        if !contents.known {
            return None;
        }
        let oldest = contents.oldest_ms().and_then(|at| u64::try_from(at).ok());
        Some(DeadLetterSpool {
            directory: self.directory.clone(),
            letters: contents.records(),
            bytes: contents.bytes(),
            oldest: oldest.map(|at| UNIX_EPOCH + Duration::from_millis(at)),
            set_aside: contents.set_aside(),
            send_error: lock(&self.send_errors).values().next().cloned(),
            spool_error: contents.error,
        })
    }
}

impl Drop for Spooling {
    fn drop(&mut self) {
        let task = self
            .sending
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(task) = task {
            task.abort();
        }
    }
}

fn lock(errors: &Mutex<SendErrors>) -> MutexGuard<'_, SendErrors> {
    errors.lock().unwrap_or_else(PoisonError::into_inner)
}

fn millis(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// A letter in full; each header knows whether it may be left out should the topic find the letter too large.
fn encode(
    topic: &str,
    record: &Record,
    failure: &Failure,
    manner: &Manner,
    spooled_at_ms: i64,
) -> Option<Vec<u8>> {
    let [full, less, least] = [Detail::Full, Detail::NoMessage, Detail::OriginOnly]
        .map(|detail| dead_letter_headers(record, failure, manner, detail));
    // The record's own come first, are in all of them, and can be many.
    let own = full.iter().zip(&least).take_while(|(a, b)| a == b).count();
    let headers = full.iter().enumerate().map(|(index, header)| Header {
        name: &header.0,
        value: header.1.as_deref(),
        expendable: if index < own || least[own..].contains(header) {
            0
        } else if less[own..].contains(header) {
            1
        } else {
            2
        },
    });
    let entry = Entry {
        spooled_at_ms,
        topic,
        // The topic may have fewer partitions than the record's.
        partition: None,
        // By its own time, an old record would be past the topic's retention when it arrives.
        timestamp_ms: None,
        key: record.key(),
        value: record.value(),
        origin: Some(Place {
            topic: record.topic(),
            partition: record.partition(),
            offset: record.offset(),
        }),
        headers: headers.collect(),
    };
    entry.encode()
}

/// What sends spooled letters.
struct Post {
    spool: Spool,
    producer: Arc<AckedProducer>,
    errors: Arc<Mutex<SendErrors>>,
}

/// How a letter is sent.
#[derive(Clone, Copy)]
enum Way {
    Together,
    /// In a batch of its own, without the headers that are more expendable than this.
    Alone(u8),
}

/// Each topic by itself: one that takes nothing holds up no other.
async fn send_all(post: Arc<Post>) {
    let mut spool = post.spool.clone();
    let mut at_work = HashSet::new();
    let mut tasks = JoinSet::new();
    loop {
        for topic in spool.contents().topics().keys() {
            if at_work.insert(Arc::clone(topic)) {
                let (post, topic) = (Arc::clone(&post), Arc::clone(topic));
                tasks.spawn(async move {
                    post.empty(&topic).await;
                    topic
                });
            }
        }
        tokio::select! {
            there = spool.changed() => if !there { return },
            Some(done) = tasks.join_next() => match done {
                Ok(topic) => drop(at_work.remove(&topic)),
                // It has panicked, and nobody knows which one it was.
                Err(_) => at_work.clear(),
            }
        }
    }
}

impl Post {
    /// Sends until nothing is left for this topic.
    async fn empty(&self, topic: &Arc<str>) {
        let mut pause = FIRST_PAUSE;
        let mut sent = 0;
        let log = Throttle::default();
        loop {
            let before = sent;
            let trouble = match self.spool.oldest(Arc::clone(topic)).await {
                Ok(None) => break,
                Ok(Some(segment)) => match self.send_segment(topic, &segment, &mut sent).await {
                    Ok(()) => continue,
                    Err(trouble) => trouble,
                },
                Err(error) => format!("the spool cannot be read: {error}"),
            };
            if sent > before {
                pause = FIRST_PAUSE;
            }
            if let Some(held_back) = log.admit(Instant::now()) {
                let left = self.spool.contents().topics().get(topic).copied();
                tracing::error!(
                    dead_letter_topic = %topic,
                    error = %trouble,
                    left,
                    held_back,
                    "dead letters in the spool cannot be sent; they stay there"
                );
            }
            lock(&self.errors).insert(Arc::clone(topic), trouble);
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        lock(&self.errors).remove(topic);
        if sent > 0 {
            tracing::info!(dead_letter_topic = %topic, letters = sent, "all dead letters in the spool are sent");
        }
    }

    /// The error says why not all of it could be sent.
    async fn send_segment(
        &self,
        topic: &Arc<str>,
        segment: &Loaded,
        sent: &mut usize,
    ) -> Result<(), String> {
        let Loaded {
            number,
            ref bytes,
            mut done,
        } = *segment;
        let pieces = Pieces::of(bytes).into_iter().flatten();
        let letters: Vec<Entry<'_>> = pieces
            .filter_map(|(_, piece)| match piece {
                Piece::Whole(letter) => Some(letter),
                // Kept aside when the segment was read.
                Piece::Damaged | Piece::Torn => None,
            })
            .collect();
        let mut takes_them = false;
        while done < letters.len() {
            let together = if takes_them { TOGETHER } else { 1 };
            let batch = &letters[done..letters.len().min(done + together)];
            let outcomes = self.send(batch).await;
            takes_them = outcomes.iter().all(Result::is_ok);
            let mut blocked = None;
            for (letter, outcome) in batch.iter().zip(outcomes) {
                match outcome {
                    Ok(()) => *sent += 1,
                    Err(error) if error.kind().is_about_the_record() => {
                        let aside = self.set_aside(topic, number, done, letter, &error);
                        if let Err(trouble) = aside.await {
                            blocked = Some(trouble);
                            break;
                        }
                    }
                    // Those behind it are sent once more: their order is worth more than a repeat.
                    Err(error) => {
                        blocked = Some(error.to_string());
                        break;
                    }
                }
                done += 1;
            }
            self.spool
                .done(Arc::clone(topic), number, done)
                .await
                .map_err(|error| format!("the spool cannot be written: {error}"))?;
            if let Some(trouble) = blocked {
                return Err(trouble);
            }
        }
        Ok(())
    }

    /// What became of each. Refused for good is only who was refused alone and with as few headers as can be: those that
    /// were refused along with it have been sent again, in their order and each at most three times.
    async fn send(&self, letters: &[Entry<'_>]) -> Vec<Result<(), ProduceError>> {
        type Refused = fn(&ProduceError) -> bool;
        let again: [(Refused, Way); 4] = [
            (ProduceError::is_anothers, Way::Together),
            (ProduceError::may_be_anothers, Way::Alone(2)),
            (|error| error.kind().is_about_the_record(), Way::Alone(1)),
            (|error| error.kind().is_about_the_record(), Way::Alone(0)),
        ];
        let mut outcomes = self.wave(letters.iter(), Way::Together).await;
        for (is_meant, way) in again {
            let meant: Vec<usize> = (0..letters.len())
                .filter(|at| outcomes[*at].as_ref().is_err_and(is_meant))
                .collect();
            let letters = meant.iter().map(|at| &letters[*at]);
            for (at, outcome) in meant.iter().zip(self.wave(letters, way).await) {
                outcomes[*at] = outcome;
            }
        }
        outcomes
    }

    async fn wave<'a>(
        &self,
        letters: impl Iterator<Item = &'a Entry<'a>>,
        way: Way,
    ) -> Vec<Result<(), ProduceError>> {
        let mut sends: Vec<Pin<Box<dyn Future<Output = _> + Send + '_>>> = letters
            .map(|letter| Box::pin(self.deliver(letter, way)) as _)
            .collect();
        // The first poll puts a letter into the producer's queue: that is their order.
        let mut outcomes: Vec<Option<Result<(), ProduceError>>> = vec![None; sends.len()];
        std::future::poll_fn(|context| {
            for (send, outcome) in sends.iter_mut().zip(&mut outcomes) {
                if outcome.is_none()
                    && let Poll::Ready(ended) = send.as_mut().poll(context)
                {
                    *outcome = Some(ended);
                }
            }
            match outcomes.iter().all(Option::is_some) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })
        .await;
        outcomes.into_iter().flatten().collect()
    }

    async fn deliver(&self, letter: &Entry<'_>, way: Way) -> Result<(), ProduceError> {
        let most_expendable = match way {
            Way::Together => u8::MAX,
            Way::Alone(most_expendable) => most_expendable,
        };
        let headers: Vec<RawHeader<'_>> = letter
            .headers
            .iter()
            .filter(|header| header.expendable <= most_expendable)
            .map(|header| (header.name, header.value))
            .collect();
        let letter = Outgoing {
            topic: letter.topic,
            partition: letter.partition,
            key: letter.key,
            value: letter.value,
            timestamp: letter.timestamp_ms,
            headers: &headers,
        };
        let sent = match way {
            Way::Together => self.producer.send_in_company(letter).await,
            Way::Alone(_) => self.producer.send_alone(letter).await,
        };
        sent.map(drop)
    }

    async fn set_aside(
        &self,
        topic: &Arc<str>,
        number: u64,
        index: usize,
        letter: &Entry<'_>,
        error: &ProduceError,
    ) -> Result<(), String> {
        let body = letter
            .encode()
            .expect("what was decoded is not larger than it was");
        let kept_in = self
            .spool
            .set_aside(Arc::clone(topic), number, index, body)
            .await
            .map_err(|error| format!("the spool cannot be written: {error}"))?;
        let origin = letter.origin.as_ref();
        tracing::error!(
            topic = origin.map(|origin| origin.topic),
            partition = origin.map(|origin| origin.partition),
            offset = origin.map(|origin| origin.offset),
            dead_letter_topic = %topic,
            %error,
            kept_in = %kept_in.display(),
            "its topic does not take this dead letter: it is kept aside, and tried again at the next start"
        );
        Ok(())
    }
}
