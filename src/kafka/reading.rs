//! Reading a topic from here to its end, as it is now: no group learns of it, memory is bounded, and whoever waits in vain
//! is told what for.

use std::{
    mem,
    ops::Range,
    sync::Arc,
    thread,
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
use crate::record::{ChunkBuilder, Record, Residency, Source};

/// Partitions read at a time: with what is read ahead of each, that bounds the memory.
const AT_A_TIME: usize = 16;
/// Records taken from a partition at a time.
const BITE: usize = 512;

/// What is wanted after a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// The next one.
    More,
    /// Nothing more of this partition.
    Enough,
    /// Nothing more at all.
    Stop,
}

impl Cluster {
    /// Reads these offsets of the topic, a partition's records in their order, until they are read or `each` has had
    /// enough.
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
        for spans in spans.chunks(AT_A_TIME) {
            let mut open = Vec::with_capacity(spans.len());
            let mut assignment = TopicPartitionList::with_capacity(spans.len());
            for (partition, span) in spans {
                open.push(self.open(topic, *partition, span, &mut assignment)?);
            }
            let what = format!("reading topic `{topic}`");
            let assigned = self.client.assign(&assignment);
            assigned.map_err(|error| self.explain(&what, &error))?;
            let outcome = self.read_all(&mut open, &mut each);
            drop(open);
            let unassigned = self.client.unassign();
            let stopped = outcome?;
            unassigned.map_err(|error| self.explain(&what, &error))?;
            if stopped {
                break;
            }
        }
        Ok(())
    }

    fn open(
        &self,
        topic: &str,
        partition: i32,
        span: &Range<i64>,
        assignment: &mut TopicPartitionList,
    ) -> Result<Open, InspectError> {
        let reader = thread::current();
        let wake = Arc::new(move || reader.unpark());
        let queue = PartitionQueue::take(self.client.lifeline(), topic, partition, wake);
        let queue = queue.ok_or_else(|| InspectError::UnknownTopic(topic.to_owned()))?;
        assignment
            .add_partition_offset(topic, partition, Offset::Offset(span.start))
            .map_err(|error| InspectError::Client(error.to_string()))?;
        Ok(Open {
            source: Arc::new(Source::new(topic, partition)),
            spare: Arc::clone(&self.spare),
            queue,
            start: span.start,
            position: span.start,
            end: span.end,
            done: false,
        })
    }

    /// `true`: `each` has had enough.
    fn read_all<E: From<InspectError>>(
        &self,
        open: &mut Vec<Open>,
        each: &mut impl FnMut(&Record) -> Result<Next, E>,
    ) -> Result<bool, E> {
        let mut quiet_since = Instant::now();
        while let Some(Open {
            source, position, ..
        }) = open.first()
        {
            if self.is_stopped() {
                return Ok(true);
            }
            if quiet_since.elapsed() > self.patience.silence {
                return Err(E::from(InspectError::Silent {
                    topic: source.topic.to_string(),
                    partition: source.partition,
                    offset: *position,
                    waited: self.patience.silence,
                    reason: self.client.context().reason(),
                }));
            }
            self.serve();
            let mut any = false;
            for partition in &mut *open {
                any |= match partition.read(each)? {
                    Progress::Nothing => false,
                    Progress::Some => true,
                    Progress::Stop => return Ok(true),
                };
            }
            open.retain(|partition| !partition.done);
            if any {
                quiet_since = Instant::now();
            } else if !open.is_empty() {
                // Wake-ups have been lost in librdkafka.
                thread::park_timeout(Duration::from_millis(50));
            }
        }
        Ok(false)
    }
}

/// A partition that is being read.
struct Open {
    source: Arc<Source>,
    spare: Arc<Residency>,
    queue: PartitionQueue,
    start: i64,
    position: i64,
    end: i64,
    done: bool,
}

enum Progress {
    Nothing,
    Some,
    Stop,
}

impl Open {
    fn read<E: From<InspectError>>(
        &mut self,
        each: &mut impl FnMut(&Record) -> Result<Next, E>,
    ) -> Result<Progress, E> {
        if self.done {
            return Ok(Progress::Nothing);
        }
        let begin = || ChunkBuilder::new(Arc::clone(&self.source), Some(Arc::clone(&self.spare)));
        let mut builder = begin();
        let mut chunks = Vec::new();
        let (mut done, mut refused) = (false, None);
        let (start, end) = (self.start, self.end);
        let count = self.queue.read(BITE, |message| match message.error() {
            // The end of the log, or of what may be read of it: behind the last record stand markers, or nothing.
            Some(Code::PartitionEOF) => done = true,
            Some(code @ (Code::TopicAuthorizationFailed | Code::UnknownTopicOrPartition)) => {
                refused = Some(code);
            }
            // The client goes on by itself.
            Some(_) => {}
            // Below its start: there is no such record any more, and the client began anew.
            None if message.offset() >= end || message.offset() < start => done = true,
            None => {
                if builder.is_full() {
                    chunks.push(mem::replace(&mut builder, begin()).finish());
                }
                // Headers that cannot be parsed are none, as they are for a consumer.
                let _ = copy_into(&mut builder, &message);
                done |= message.offset() + 1 >= end;
            }
        });
        if let Some(code) = refused {
            let what = format!("reading topic `{}`", self.source.topic);
            return Err(E::from(InspectError::Refused { what, code }));
        }
        chunks.push(builder.finish());
        for chunk in chunks {
            for index in 0..chunk.len() {
                let record = chunk.record(index);
                self.position = record.offset() + 1;
                match each(&record)? {
                    Next::More => {}
                    Next::Enough => {
                        self.done = true;
                        return Ok(Progress::Some);
                    }
                    Next::Stop => return Ok(Progress::Stop),
                }
            }
        }
        self.done = done;
        Ok(match count {
            0 => Progress::Nothing,
            _ => Progress::Some,
        })
    }
}
