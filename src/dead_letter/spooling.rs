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
    sync::RwLock,
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
    pub(super) fn send_by(&self, producer: Arc<AckedProducer>, company: Arc<RwLock<()>>) {
        let post = Post {
            spool: self.spool.clone(),
            producer,
            company,
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
    company: Arc<RwLock<()>>,
    errors: Arc<Mutex<SendErrors>>,
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
            let (acknowledged, error) = self.send(batch).await;
            takes_them = error.is_none();
            done += acknowledged;
            *sent += acknowledged;
            let mut blocked = None;
            if let Some(error) = error {
                // A broker refuses a batch for one letter in it.
                let fate = if error.kind().is_about_the_record() {
                    self.send_alone(&letters[done]).await
                } else {
                    Err(error)
                };
                match fate {
                    Ok(()) => (done, *sent) = (done + 1, *sent + 1),
                    Err(error) if error.kind().is_about_the_record() => {
                        self.set_aside(topic, number, done, &letters[done], &error)
                            .await?;
                        done += 1;
                    }
                    Err(error) => blocked = Some(error.to_string()),
                }
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

    /// How many were acknowledged without one before them that was not, and why that one was not.
    async fn send(&self, letters: &[Entry<'_>]) -> (usize, Option<ProduceError>) {
        let _company = self.company.read().await;
        let mut sends: Vec<Pin<Box<dyn Future<Output = _> + Send + '_>>> = letters
            .iter()
            .map(|letter| Box::pin(self.deliver(letter, u8::MAX)) as _)
            .collect();
        // The first poll puts a letter into the producer's queue: that is their order.
        let mut outcomes: Vec<Option<Result<(), ProduceError>>> = vec![None; letters.len()];
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
        let mut acknowledged = 0;
        for outcome in outcomes.into_iter().flatten() {
            match outcome {
                Ok(()) => acknowledged += 1,
                Err(error) => return (acknowledged, Some(error)),
            }
        }
        (acknowledged, None)
    }

    async fn send_alone(&self, letter: &Entry<'_>) -> Result<(), ProduceError> {
        let _alone = self.company.write().await;
        let mut outcome = Ok(());
        for most_expendable in [2, 1, 0] {
            outcome = self.deliver(letter, most_expendable).await;
            match &outcome {
                Err(error) if error.kind().is_about_the_record() => {}
                _ => break,
            }
        }
        outcome
    }

    async fn deliver(&self, letter: &Entry<'_>, most_expendable: u8) -> Result<(), ProduceError> {
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
        self.producer.send(letter).await.map(drop)
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
