//! Reading a topic from here to its end, as it is now: no group learns of it, memory is bounded, and whoever waits in vain
//! is told what for.

use std::{
    mem,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::{self, ScopedJoinHandle, Thread},
    time::{Duration, Instant},
};

use rdkafka::{
    Offset, TopicPartitionList, consumer::Consumer as _, types::RDKafkaErrorCode as Code,
};

use super::{
    cluster::{Cluster, InspectError},
    ffi::PartitionQueue,
    intake::copy_into,
};
use crate::record::{Chunk, ChunkBuilder, Record, Residency, Source};

/// Partitions read at a time: with what is read ahead of each, that bounds the memory.
const AT_A_TIME: usize = 16;
/// Records taken from a partition at a time.
const BITE: usize = 512;

/// What is wanted after a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(
    not(feature = "cli"),
    allow(
        dead_code,
        reason = "the command line needs more of it than the redriver"
    )
)]
pub enum Next {
    /// The next one.
    More,
    /// Nothing more of this partition.
    Enough,
    /// Nothing more at all.
    Stop,
}

/// Chunks that are read and not looked at yet.
const AHEAD: usize = 4;

impl Cluster {
    /// Reads these offsets of the topic, a partition's records in their order, until they are read or `each` has had
    /// enough. Threads of their own take records from the client while `each` looks at those before them: most of the work
    /// is that of parsing headers.
    ///
    /// # Errors
    ///
    /// What `each` says; and if nothing comes for too long, or the topic may not be read.
    pub fn read<E: From<InspectError>>(
        &self,
        topic: &str,
        spans: &[(i32, Range<i64>)],
        mut each: impl FnMut(&Record) -> Result<Next, E>,
    ) -> Result<(), E> {
        let spans: Vec<_> = spans.iter().filter(|(_, span)| !span.is_empty()).collect();
        let enough: Vec<_> = spans.iter().map(|_| AtomicBool::new(false)).collect();
        thread::scope(|scope| {
            let (send, chunks) = mpsc::sync_channel(AHEAD);
            let (spans, enough) = (&spans, &enough);
            let reader = scope.spawn(move || {
                let groups = spans.chunks(AT_A_TIME).zip(enough.chunks(AT_A_TIME));
                for (number, (spans, enough)) in groups.enumerate() {
                    let first = number * AT_A_TIME;
                    let hand_on = |index: usize, chunk| send.send((first + index, chunk)).is_ok();
                    if !self.read_together(topic, spans, enough, &hand_on)? {
                        break;
                    }
                }
                Ok(())
            });
            let looked = look_at(chunks, enough, &mut each);
            if !matches!(looked, Ok(true)) {
                // The reader may wait for what does not come.
                end(enough);
                return looked.map(|_| ());
            }
            joined(reader).map_err(E::from)
        })
    }

    /// `false`: nobody wants more. `enough` tells it of each of the partitions.
    fn read_together(
        &self,
        topic: &str,
        spans: &[&(i32, Range<i64>)],
        enough: &[AtomicBool],
        hand_on: &HandOn<'_>,
    ) -> Result<bool, InspectError> {
        if enough.iter().all(|it| it.load(Ordering::Relaxed)) {
            return Ok(true);
        }
        thread::scope(|scope| {
            let (share, shared) = mpsc::sync_channel::<Vec<Open>>(1);
            let other = scope.spawn(move || {
                let open = shared.recv().unwrap_or_default();
                self.read_all(open, enough, hand_on)
            });
            let readers = [thread::current(), other.thread().clone()];
            let mut open = [const { Vec::new() }; 2];
            let mut assignment = TopicPartitionList::with_capacity(spans.len());
            for (index, (partition, span)) in spans.iter().enumerate() {
                let at = index % readers.len();
                let reader = readers[at].clone();
                open[at].push(self.open(topic, index, *partition, span, reader)?);
                assignment
                    .add_partition_offset(topic, *partition, Offset::Offset(span.start))
                    .map_err(|error| InspectError::Client(error.to_string()))?;
            }
            let what = format!("reading topic `{topic}`");
            let assigned = self.client.assign(&assignment);
            assigned.map_err(|error| self.explain(&what, &error))?;
            let [own, others] = open;
            // It waits for them.
            let _ = share.send(others);
            let outcome = self.read_all(own, enough, hand_on);
            let of_other = joined(other);
            let unassigned = self.client.unassign();
            let goes_on = outcome? & of_other?;
            unassigned.map_err(|error| self.explain(&what, &error))?;
            Ok(goes_on)
        })
    }

    fn open(
        &self,
        topic: &str,
        index: usize,
        partition: i32,
        span: &Range<i64>,
        reader: Thread,
    ) -> Result<Open, InspectError> {
        let wake = Arc::new(move || reader.unpark());
        let queue = PartitionQueue::take(self.client.lifeline(), topic, partition, wake);
        let queue = queue.ok_or_else(|| InspectError::UnknownTopic(topic.to_owned()))?;
        Ok(Open {
            source: Arc::new(Source::new(topic, partition)),
            spare: Arc::clone(&self.spare),
            index,
            queue,
            start: span.start,
            position: span.start,
            end: span.end,
            done: false,
        })
    }

    /// What ends it early ends the other reader too.
    fn read_all(
        &self,
        open: Vec<Open>,
        enough: &[AtomicBool],
        hand_on: &HandOn<'_>,
    ) -> Result<bool, InspectError> {
        let outcome = self.read_until_done(open, enough, hand_on);
        if !matches!(outcome, Ok(true)) {
            end(enough);
        }
        outcome
    }

    fn read_until_done(
        &self,
        mut open: Vec<Open>,
        enough: &[AtomicBool],
        hand_on: &HandOn<'_>,
    ) -> Result<bool, InspectError> {
        let mut quiet_since = Instant::now();
        while let Some(Open {
            source, position, ..
        }) = open.first()
        {
            if self.is_stopped() {
                return Ok(false);
            }
            if quiet_since.elapsed() > self.patience.silence {
                return Err(InspectError::Silent {
                    topic: source.topic.to_string(),
                    partition: source.partition,
                    offset: *position,
                    waited: self.patience.silence,
                    reason: self.client.context().reason(),
                });
            }
            self.serve();
            let mut any = false;
            for partition in &mut open {
                let index = partition.index;
                let chunks = partition.read()?;
                for chunk in chunks {
                    any = true;
                    if !hand_on(index, chunk) {
                        return Ok(false);
                    }
                }
                partition.done |= enough[index].load(Ordering::Relaxed);
            }
            open.retain(|partition| !partition.done);
            if any {
                quiet_since = Instant::now();
            } else if !open.is_empty() {
                // Wake-ups have been lost in librdkafka.
                thread::park_timeout(Duration::from_millis(50));
            }
        }
        Ok(true)
    }
}

/// Takes a chunk of the partition at this place; `false`: nobody wants more.
type HandOn<'a> = dyn Fn(usize, Arc<Chunk>) -> bool + Sync + 'a;

fn end(enough: &[AtomicBool]) {
    enough
        .iter()
        .for_each(|it| it.store(true, Ordering::Relaxed));
}

fn joined<T>(reader: ScopedJoinHandle<'_, T>) -> T {
    match reader.join() {
        Ok(outcome) => outcome,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// `false`: nothing more is wanted at all.
fn look_at<E>(
    chunks: mpsc::Receiver<(usize, Arc<Chunk>)>,
    enough: &[AtomicBool],
    each: &mut impl FnMut(&Record) -> Result<Next, E>,
) -> Result<bool, E> {
    for (index, chunk) in chunks {
        let enough = &enough[index];
        for place in 0..chunk.len() {
            if enough.load(Ordering::Relaxed) {
                break;
            }
            match each(&chunk.record(place))? {
                Next::More => {}
                Next::Enough => enough.store(true, Ordering::Relaxed),
                Next::Stop => return Ok(false),
            }
        }
    }
    Ok(true)
}

/// A partition that is being read.
struct Open {
    source: Arc<Source>,
    spare: Arc<Residency>,
    index: usize,
    queue: PartitionQueue,
    start: i64,
    position: i64,
    end: i64,
    done: bool,
}

impl Open {
    fn read(&mut self) -> Result<Vec<Arc<Chunk>>, InspectError> {
        let begin = || ChunkBuilder::new(Arc::clone(&self.source), Some(Arc::clone(&self.spare)));
        let mut builder = begin();
        let mut chunks = Vec::new();
        let mut refused = None;
        let (start, end) = (self.start, self.end);
        let (done, position) = (&mut self.done, &mut self.position);
        self.queue.read(BITE, |message| match message.error() {
            // The end of the log, or of what may be read of it: behind the last record stand markers, or nothing.
            Some(Code::PartitionEOF) => *done = true,
            Some(code @ (Code::TopicAuthorizationFailed | Code::UnknownTopicOrPartition)) => {
                refused = Some(code);
            }
            // The client goes on by itself.
            Some(_) => {}
            // Below its start: there is no such record any more, and the client began anew.
            None if message.offset() >= end || message.offset() < start => *done = true,
            None => {
                if builder.is_full(message.value().map_or(0, <[u8]>::len)) {
                    chunks.push(mem::replace(&mut builder, begin()).finish());
                }
                // Headers that cannot be parsed are none, as they are for a consumer.
                let _ = copy_into(&mut builder, &message);
                *position = message.offset() + 1;
                *done |= *position >= end;
            }
        });
        if let Some(code) = refused {
            let what = format!("reading topic `{}`", self.source.topic);
            return Err(InspectError::Refused { what, code });
        }
        if builder.len() > 0 {
            chunks.push(builder.finish());
        }
        Ok(chunks)
    }
}
