//! Records that cannot be sent for now, kept in files of a directory until they can.
//!
//! All files belong to one thread. What comes in while it waits for the disk is written together and made safe by one
//! sync. Nothing is kept in memory only: an append is answered when its record is on the disk.
//!
//! [`format`] is how records lie in a file, [`store`] which files there are.

mod crc;
pub(crate) mod format;
mod store;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    io,
    path::PathBuf,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use tokio::sync::{oneshot, watch};

use self::store::{Append, Store};
pub(crate) use self::store::{Loaded, Refused};

/// Between two tries to open a directory.
const OPEN_AGAIN: Duration = Duration::from_millis(500);
/// Written with one sync, at most.
const TOGETHER: usize = 8 << 20;

/// What is in a spool.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Contents {
    /// Whether it has been tried to open the directory; before that nobody knows what is in it.
    pub(crate) known: bool,
    files: store::Contents,
    /// Why nothing can be spooled now.
    pub(crate) error: Option<String>,
}

impl Contents {
    /// Records that are still to be sent, by topic.
    pub(crate) fn topics(&self) -> &BTreeMap<Arc<str>, usize> {
        &self.files.topics
    }

    pub(crate) fn records(&self) -> usize {
        self.files.topics.values().sum()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.files.bytes
    }

    /// Unix milliseconds.
    pub(crate) fn oldest_ms(&self) -> Option<i64> {
        self.files.oldest_ms
    }

    pub(crate) fn set_aside(&self) -> usize {
        self.files.set_aside
    }
}

/// The way to a spool's thread. With the last one the thread ends, and the directory is free for others.
#[derive(Clone)]
pub(crate) struct Spool {
    requests: mpsc::Sender<Request>,
    contents: watch::Receiver<Contents>,
}

enum Request {
    Append {
        topic: Arc<str>,
        body: Vec<u8>,
        spooled_at_ms: i64,
        answer: oneshot::Sender<Result<(), Refused>>,
    },
    Oldest {
        topic: Arc<str>,
        answer: oneshot::Sender<io::Result<Option<Loaded>>>,
    },
    Done {
        topic: Arc<str>,
        number: u64,
        done: usize,
        answer: oneshot::Sender<io::Result<()>>,
    },
    SetAside {
        topic: Arc<str>,
        number: u64,
        index: usize,
        body: Vec<u8>,
        answer: oneshot::Sender<io::Result<PathBuf>>,
    },
}

impl Spool {
    /// Starts the thread. A directory that cannot be used (yet: its disk may be full, or another process may be about to
    /// leave it) is tried again for as long as the spool lives.
    pub(crate) fn start(directory: PathBuf, max_bytes: u64) -> io::Result<Self> {
        let (requests, queue) = mpsc::channel();
        let (publish, contents) = watch::channel(Contents::default());
        let desk = Desk {
            directory,
            max_bytes,
            store: None,
            contents: publish,
        };
        thread::Builder::new()
            .name("kafka-spool".into())
            .spawn(move || desk.serve(&queue))?;
        Ok(Spool { requests, contents })
    }

    pub(crate) fn contents(&self) -> Contents {
        self.contents.borrow().clone()
    }

    /// Ends when something has changed. `false`: the thread has ended.
    pub(crate) async fn changed(&mut self) -> bool {
        self.contents.changed().await.is_ok()
    }

    /// Whether records for this topic are still to be sent: what comes later has to go behind them.
    pub(crate) async fn holds(&self, topic: &str) -> bool {
        let mut contents = self.contents.clone();
        let known = contents.wait_for(|contents| contents.known).await;
        known.is_ok_and(|contents| contents.topics().contains_key(topic))
    }

    /// Ends when the record is safe on the disk. `body` comes from [`Entry::encode`](format::Entry::encode).
    pub(crate) async fn append(
        &self,
        topic: Arc<str>,
        body: Vec<u8>,
        spooled_at_ms: i64,
    ) -> Result<(), Refused> {
        self.ask(|answer| Request::Append {
            topic,
            body,
            spooled_at_ms,
            answer,
        })
        .await
        .unwrap_or_else(|error| Err(Refused::Unavailable(error.to_string())))
    }

    /// The oldest segment of this topic.
    pub(crate) async fn oldest(&self, topic: Arc<str>) -> io::Result<Option<Loaded>> {
        self.ask(|answer| Request::Oldest { topic, answer })
            .await
            .and_then(|answer| answer)
    }

    /// So many records of that segment are dealt with.
    pub(crate) async fn done(&self, topic: Arc<str>, number: u64, done: usize) -> io::Result<()> {
        self.ask(|answer| Request::Done {
            topic,
            number,
            done,
            answer,
        })
        .await
        .and_then(|answer| answer)
    }

    /// Keeps a record aside that its topic does not take.
    pub(crate) async fn set_aside(
        &self,
        topic: Arc<str>,
        number: u64,
        index: usize,
        body: Vec<u8>,
    ) -> io::Result<PathBuf> {
        self.ask(|answer| Request::SetAside {
            topic,
            number,
            index,
            body,
            answer,
        })
        .await
        .and_then(|answer| answer)
    }

    async fn ask<T>(&self, request: impl FnOnce(oneshot::Sender<T>) -> Request) -> io::Result<T> {
        let (answer, answered) = oneshot::channel();
        let gone = || io::Error::other("the spool's thread has ended");
        self.requests.send(request(answer)).map_err(|_| gone())?;
        answered.await.map_err(|_| gone())
    }
}

/// What the thread works with.
struct Desk {
    directory: PathBuf,
    max_bytes: u64,
    store: Option<Store>,
    contents: watch::Sender<Contents>,
}

impl Desk {
    fn serve(mut self, queue: &mpsc::Receiver<Request>) {
        let mut waiting = Vec::new();
        let mut open_at = Instant::now();
        loop {
            if self.store.is_none() && Instant::now() >= open_at {
                self.open();
                open_at = Instant::now() + OPEN_AGAIN;
            }
            let next = if self.store.is_some() {
                queue.recv().ok()
            } else {
                match queue.recv_timeout(open_at.saturating_duration_since(Instant::now())) {
                    Ok(request) => Some(request),
                    Err(mpsc::RecvTimeoutError::Timeout) => continue,
                    Err(mpsc::RecvTimeoutError::Disconnected) => None,
                }
            };
            let Some(first) = next else { return };
            waiting.push(first);
            let mut bytes = 0;
            while bytes < TOGETHER
                && let Ok(request) = queue.try_recv()
            {
                if let Request::Append { body, .. } = &request {
                    bytes += body.len();
                }
                waiting.push(request);
            }
            self.answer(&mut waiting);
        }
    }

    fn open(&mut self) {
        match Store::open(&self.directory, self.max_bytes) {
            Ok(store) => {
                self.store = Some(store);
                self.tell(None);
            }
            Err(error) => {
                let error = format!(
                    "the spool in `{}` cannot be used: {error}",
                    self.directory.display()
                );
                self.tell(Some(error));
            }
        }
    }

    fn tell(&self, error: Option<String>) {
        let contents = Contents {
            known: true,
            files: self.store.as_ref().map(Store::contents).unwrap_or_default(),
            error,
        };
        self.contents.send_if_modified(|last| {
            let changed = *last != contents;
            *last = contents;
            changed
        });
    }

    /// Answers come after what they tell of can be seen in the contents.
    fn answer(&mut self, requests: &mut Vec<Request>) {
        let mut error = self.contents.borrow().error.clone();
        let Some(store) = &mut self.store else {
            let reason = error.unwrap_or_default();
            for request in requests.drain(..) {
                refuse(request, &reason);
            }
            return;
        };
        let appends: Vec<_> = requests
            .iter()
            .filter_map(|request| match request {
                Request::Append {
                    topic,
                    body,
                    spooled_at_ms,
                    ..
                } => Some(Append {
                    topic,
                    body,
                    spooled_at_ms: *spooled_at_ms,
                }),
                _ => None,
            })
            .collect();
        let taken = store.append(&appends);
        for taken in &taken {
            match taken {
                Ok(()) => error = None,
                Err(refused) => error = Some(refused.to_string()),
            }
        }
        let mut taken = taken.into_iter();
        let mut answers: Vec<Box<dyn FnOnce()>> = Vec::new();
        for request in requests.drain(..) {
            match request {
                Request::Append { answer, .. } => {
                    let taken = taken.next().expect("each append is answered");
                    answers.push(Box::new(move || drop(answer.send(taken))));
                }
                Request::Oldest { topic, answer } => {
                    let oldest = store.oldest(&topic);
                    answers.push(Box::new(move || drop(answer.send(oldest))));
                }
                Request::Done {
                    topic,
                    number,
                    done,
                    answer,
                } => {
                    let done = store.done(&topic, number, done);
                    if done.is_ok() {
                        // There may be room again. If not, the next append will say so.
                        error = None;
                    }
                    answers.push(Box::new(move || drop(answer.send(done))));
                }
                Request::SetAside {
                    topic,
                    number,
                    index,
                    body,
                    answer,
                } => {
                    let path = store.set_aside(&topic, number, index, &body);
                    answers.push(Box::new(move || drop(answer.send(path))));
                }
            }
        }
        self.tell(error);
        answers.into_iter().for_each(|answer| answer());
    }
}

fn refuse(request: Request, reason: &str) {
    match request {
        Request::Append { answer, .. } => {
            drop(answer.send(Err(Refused::Unavailable(reason.into()))));
        }
        // Nothing is known to be in it.
        Request::Oldest { answer, .. } => drop(answer.send(Ok(None))),
        Request::Done { answer, .. } => drop(answer.send(Err(io::Error::other(reason)))),
        Request::SetAside { answer, .. } => drop(answer.send(Err(io::Error::other(reason)))),
    }
}
