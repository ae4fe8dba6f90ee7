//! The one place with `unsafe`: what librdkafka can do and the safe binding cannot, and the lock on a file.
//!
//! Partition queues read in batches, commits answered on a queue of our own, questions about topics, logs and groups that
//! block nobody, header names that are not UTF-8, leader epochs, and producing with raw headers. librdkafka's handles are
//! thread-safe; what it does not check is that a queue is gone before its client is. [`Lifeline`] does: every wrapper
//! holds it locked while it calls, and
//! [`Consumer`], the only owner of a client that wrappers can reach, cuts it before the client is destroyed. From then
//! on every wrapper is inert: it does nothing, and drops by leaking its small handle.
#![allow(unsafe_code)] // The audited exception that the crate's `deny(unsafe_code)` allows for.

use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use rdkafka::bindings as sys;
use rdkafka::client::Client;
use rdkafka::consumer::{BaseConsumer, Consumer as _, ConsumerContext};
use rdkafka::error::KafkaResult;
use rdkafka::producer::{BaseProducer, Producer as _, ProducerContext};
use rdkafka::types::{
    RDKafka, RDKafkaErrorCode, RDKafkaHeaders, RDKafkaMessage, RDKafkaQueue, RDKafkaRespErr,
};
use rdkafka::{ClientConfig, IntoOpaque, Offset, TopicPartitionList};

/// librdkafka's "no such offset" (`RD_KAFKA_OFFSET_INVALID`).
const OFFSET_INVALID: i64 = -1001;

/// "Let the partitioner choose" (`RD_KAFKA_PARTITION_UA`, a macro that the bindings lack).
const PARTITION_UNASSIGNED: i32 = -1;

/// Called by librdkafka when a queue that was empty got something, on one of its own threads and under the queue's
/// lock: it must not call into this module, block or panic (a panic aborts the process).
pub(crate) type Wake = Arc<dyn Fn() + Send + Sync>;

/// The way to a consumer's native client, for as long as there is one.
#[derive(Clone, Default)]
pub(crate) struct Lifeline(Arc<RwLock<Option<Handle>>>);

#[derive(Clone, Copy)]
struct Handle(NonNull<RDKafka>);

// SAFETY: librdkafka's client handle may be used from any thread; the lock above bounds for how long.
unsafe impl Send for Handle {}
// SAFETY: as for `Send`.
unsafe impl Sync for Handle {}

/// A client that stays alive for as long as this is held.
struct Alive<'a> {
    client: *mut RDKafka,
    _held: RwLockReadGuard<'a, Option<Handle>>,
}

impl Lifeline {
    fn hold(&self) -> Option<Alive<'_>> {
        let guard = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let client = guard.as_ref()?.0.as_ptr();
        Some(Alive {
            client,
            _held: guard,
        })
    }

    /// Whether any broker answers a question within this time, which is waited for. The client's end waits for it too.
    pub(crate) fn any_broker_answers(&self, timeout: Duration) -> bool {
        let Some(alive) = self.hold() else {
            return false;
        };
        let millis = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
        let mut metadata = ptr::null();
        // SAFETY: the client is alive, the name is a C string, a null configuration is the default one, and the topic's
        // handle is ours to destroy, as the metadata are when there are any. Named, the topic is the only one asked for:
        // without a name, all that the client knows would be, and be made anew where they have been deleted.
        unsafe {
            let name = c"__consumer_offsets".as_ptr();
            let topic = sys::rd_kafka_topic_new(alive.client, name, ptr::null_mut());
            if topic.is_null() {
                return false;
            }
            let error = sys::rd_kafka_metadata(alive.client, 0, topic, &mut metadata, millis);
            sys::rd_kafka_topic_destroy(topic);
            if !metadata.is_null() {
                sys::rd_kafka_metadata_destroy(metadata);
            }
            error_code(error).is_none()
        }
    }

    fn set(&self, handle: Option<Handle>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = handle;
    }
}

/// A `BaseConsumer` whose native client can be reached through a [`Lifeline`] until this is dropped.
///
/// It hands out its consumer by shared reference only: moving it out would let the client outlive the cut.
pub(crate) struct Consumer<C: ConsumerContext + 'static> {
    lifeline: Lifeline,
    /// Dropped by [`Consumer::drop`], one way or the other.
    inner: ManuallyDrop<BaseConsumer<C>>,
}

impl<C: ConsumerContext + 'static> Consumer<C> {
    /// Creates the consumer; `context` is given the lifeline to keep, which comes alive when this returns. `wake` is
    /// called when the main queue gets something.
    pub(crate) fn create(
        config: &ClientConfig,
        wake: Wake,
        context: impl FnOnce(Lifeline) -> C,
    ) -> KafkaResult<Self> {
        let lifeline = Lifeline::default();
        let mut inner: BaseConsumer<C> = config.create_with_context(context(lifeline.clone()))?;
        inner.set_nonempty_callback(move || wake());
        lifeline.set(NonNull::new(inner.client().native_ptr()).map(Handle));
        let inner = ManuallyDrop::new(inner);
        Ok(Consumer { lifeline, inner })
    }

    pub(crate) fn lifeline(&self) -> &Lifeline {
        &self.lifeline
    }

    /// Destroys the client without leaving the group: dropping it would wait for as long as no broker answers.
    ///
    /// Requests that wait for a broker are not sent any more. Calls back no more after it returns.
    pub(crate) fn abandon(self) {
        let mut consumer = ManuallyDrop::new(self);
        // SAFETY: `consumer` is neither used nor dropped any more.
        unsafe { consumer.destroy(sys::RD_KAFKA_DESTROY_F_NO_CONSUMER_CLOSE) };
        // SAFETY: as above; it is dropped once.
        unsafe { ptr::drop_in_place(&mut consumer.lifeline) };
    }

    /// Destroys the client without the binding's own drop, which closes the consumer whatever it is, waits until it is
    /// closed, and logs an error if it was. What that would free beside client and context, a queue's handle and a
    /// callback, is lost.
    ///
    /// # Safety
    /// `inner` must not be used any more.
    unsafe fn destroy(&mut self, flags: i32) {
        // What it holds is freed here; the one that is lost holds nothing.
        self.inner.set_nonempty_callback(|| {});
        // Waits for calls that are under way elsewhere.
        self.lifeline.set(None);
        let context = Arc::as_ptr(self.inner.context());
        // SAFETY: the client is alive, nobody else destroys it, as `inner` is never dropped after this, and nobody calls
        // it any more: wrappers see the lifeline cut. Callbacks have their context until this returns.
        unsafe { sys::rd_kafka_destroy_flags(self.inner.client().native_ptr(), flags) };
        // SAFETY: this is the count that `inner` held; it is not used again.
        unsafe { Arc::decrement_strong_count(context) };
    }
}

impl<C: ConsumerContext + 'static> Deref for Consumer<C> {
    type Target = BaseConsumer<C>;

    fn deref(&self) -> &BaseConsumer<C> {
        &self.inner
    }
}

impl<C: ConsumerContext + 'static> Drop for Consumer<C> {
    fn drop(&mut self) {
        if self.inner.closed() {
            // SAFETY: this is the end of it.
            unsafe { self.destroy(0) };
        } else {
            // Waits for calls that are under way elsewhere.
            self.lifeline.set(None);
            // SAFETY: as above.
            unsafe { ManuallyDrop::drop(&mut self.inner) };
        }
    }
}

/// A native queue with its wake-up. Dropping it disables the one and gives back the other.
struct Queue {
    lifeline: Lifeline,
    ptr: NonNull<RDKafkaQueue>,
    wake: NonNull<Wake>,
}

// SAFETY: queue operations lock inside librdkafka and `Wake` is `Send + Sync`; nothing is bound to a thread.
unsafe impl Send for Queue {}

impl Queue {
    /// # Safety
    /// `ptr` must be null or a queue handle of `alive`'s client, which passes to the new `Queue`.
    unsafe fn own(
        lifeline: &Lifeline,
        _alive: &Alive<'_>,
        ptr: *mut RDKafkaQueue,
        wake: Wake,
    ) -> Option<Queue> {
        let ptr = NonNull::new(ptr)?;
        let wake = NonNull::from(Box::leak(Box::new(wake)));
        // SAFETY: the queue is valid, and `wake` outlives the callback: `drop` frees it only after disabling that.
        unsafe {
            sys::rd_kafka_queue_cb_event_enable(ptr.as_ptr(), Some(nonempty), wake.as_ptr().cast())
        };
        Some(Queue {
            lifeline: lifeline.clone(),
            ptr,
            wake,
        })
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let Some(_alive) = self.lifeline.hold() else {
            return;
        };
        // SAFETY: the client is alive, so the queue is. Disabling takes the lock that callbacks run under: once it
        // returns none is running and none will come, so `wake`, leaked in `own`, has no user left.
        unsafe {
            sys::rd_kafka_queue_cb_event_enable(self.ptr.as_ptr(), None, ptr::null_mut());
            drop(Box::from_raw(self.wake.as_ptr()));
            sys::rd_kafka_queue_destroy(self.ptr.as_ptr());
        }
    }
}

unsafe extern "C" fn nonempty(_: *mut RDKafka, wake: *mut c_void) {
    // SAFETY: `wake` is the pointer that `Queue::own` registered, alive until the callback is disabled.
    let wake = unsafe { &*wake.cast::<Wake>() };
    wake();
}

/// A partition's own queue, cut off from the consumer's main one.
///
/// Take it before the partition is assigned and drop it when it is revoked. Taking a partition again while an earlier
/// queue of it lives is safe, but dropping the earlier one then silences the wake-ups of both.
pub(crate) struct PartitionQueue {
    queue: Queue,
    scratch: Vec<*mut RDKafkaMessage>,
}

// SAFETY: as for `Queue`; `scratch` points at messages only while `read` has the queue to itself.
unsafe impl Send for PartitionQueue {}

impl PartitionQueue {
    /// None when the consumer is gone. What the queue already holds wakes nobody: look once after taking.
    pub(crate) fn take(
        lifeline: &Lifeline,
        topic: &str,
        partition: i32,
        wake: Wake,
    ) -> Option<PartitionQueue> {
        let topic = CString::new(topic).ok()?;
        let alive = lifeline.hold()?;
        // SAFETY: the client is alive, `topic` a C string; the handle that comes back is ours.
        let queue = unsafe {
            let ptr = sys::rd_kafka_queue_get_partition(alive.client, topic.as_ptr(), partition);
            Queue::own(lifeline, &alive, ptr, wake)?
        };
        // SAFETY: the queue is valid; no destination means that its messages stay in it.
        unsafe { sys::rd_kafka_queue_forward(queue.ptr.as_ptr(), ptr::null_mut()) };
        Some(PartitionQueue {
            queue,
            scratch: Vec::new(),
        })
    }

    /// How many messages and events it holds.
    pub(crate) fn len(&self) -> usize {
        let Some(_alive) = self.queue.lifeline.hold() else {
            return 0;
        };
        // SAFETY: the client is alive, so the queue is.
        unsafe { sys::rd_kafka_queue_length(self.queue.ptr.as_ptr()) }
    }

    /// Hands `each` what is there, at most `max`, without waiting; returns how many that were.
    ///
    /// Dropping the consumer inside `each` would wait for itself.
    pub(crate) fn read(&mut self, max: usize, mut each: impl FnMut(RawMessage<'_>)) -> usize {
        let Some(_alive) = self.queue.lifeline.hold() else {
            return 0;
        };
        self.scratch.resize(max, ptr::null_mut());
        // SAFETY: the client is alive, so the queue is; `scratch` has room for `max` pointers.
        let count = unsafe {
            sys::rd_kafka_consume_batch_queue(
                self.queue.ptr.as_ptr(),
                0,
                self.scratch.as_mut_ptr(),
                max,
            )
        };
        let count = usize::try_from(count).unwrap_or(0).min(max);
        let mut unread = Unread(&self.scratch[..count]);
        while let Some((&message, rest)) = unread.0.split_first() {
            // SAFETY: librdkafka filled `count` slots with messages that are ours until destroyed. `unread` still
            // holds this one, so it is destroyed once also if `each` panics, and no `RawMessage` outlives `each`.
            each(RawMessage(unsafe { &*message }));
            unread.0 = rest;
            // SAFETY: it has just left `unread`.
            unsafe { sys::rd_kafka_message_destroy(message) };
        }
        count
    }
}

/// Messages of a batch that nobody has destroyed yet.
struct Unread<'a>(&'a [*mut RDKafkaMessage]);

impl Drop for Unread<'_> {
    fn drop(&mut self) {
        for &message in self.0 {
            // SAFETY: ours, and in no other hands; `read` holds the client alive around this.
            unsafe { sys::rd_kafka_message_destroy(message) };
        }
    }
}

/// A message, or an event in a message's place, as it lies in librdkafka's memory.
pub(crate) struct RawMessage<'a>(&'a RDKafkaMessage);

impl<'a> RawMessage<'a> {
    /// An event about the partition rather than a record: then `value` is `None` and `error_text` has the details.
    pub(crate) fn error(&self) -> Option<RDKafkaErrorCode> {
        error_code(self.0.err)
    }

    pub(crate) fn error_text(&self) -> String {
        // SAFETY: the message is alive; the string, when there is one, lives in it or is static.
        unsafe {
            let text = sys::rd_kafka_message_errstr(self.0);
            if text.is_null() {
                String::new()
            } else {
                CStr::from_ptr(text).to_string_lossy().into_owned()
            }
        }
    }

    pub(crate) fn offset(&self) -> i64 {
        self.0.offset
    }

    /// Unix milliseconds, and whether the broker's clock (log append time) gave them.
    pub(crate) fn timestamp(&self) -> Option<(i64, bool)> {
        let mut kind = sys::rd_kafka_timestamp_type_t::RD_KAFKA_TIMESTAMP_NOT_AVAILABLE;
        // SAFETY: the message is alive and `kind` is writable.
        let millis = unsafe { sys::rd_kafka_message_timestamp(self.0, &mut kind) };
        match kind {
            sys::rd_kafka_timestamp_type_t::RD_KAFKA_TIMESTAMP_NOT_AVAILABLE => None,
            sys::rd_kafka_timestamp_type_t::RD_KAFKA_TIMESTAMP_CREATE_TIME => Some((millis, false)),
            sys::rd_kafka_timestamp_type_t::RD_KAFKA_TIMESTAMP_LOG_APPEND_TIME => {
                Some((millis, true))
            }
        }
    }

    pub(crate) fn key(&self) -> Option<&'a [u8]> {
        // SAFETY: librdkafka's pointer and length of the key, which live as long as the message.
        unsafe { bytes(self.0.key, self.0.key_len) }
    }

    pub(crate) fn value(&self) -> Option<&'a [u8]> {
        if self.error().is_some() {
            return None;
        }
        // SAFETY: as for the key.
        unsafe { bytes(self.0.payload, self.0.len) }
    }

    pub(crate) fn leader_epoch(&self) -> Option<i32> {
        // SAFETY: the message is alive.
        let epoch = unsafe { sys::rd_kafka_message_leader_epoch(self.0) };
        (epoch >= 0).then_some(epoch)
    }

    /// Name and value of each header, in order. A name is cut at a NUL byte: librdkafka does not tell its length.
    ///
    /// An error means that the headers could not be parsed; there are none then.
    pub(crate) fn for_each_header(
        &self,
        mut each: impl FnMut(&[u8], Option<&[u8]>),
    ) -> Result<(), RDKafkaErrorCode> {
        let mut headers: *mut RDKafkaHeaders = ptr::null_mut();
        // SAFETY: the message is alive and `headers` writable; what it is set to belongs to the message.
        match error_code(unsafe { sys::rd_kafka_message_headers(self.0, &mut headers) }) {
            Some(RDKafkaErrorCode::NoEnt) => return Ok(()),
            Some(error) => return Err(error),
            None => {}
        }
        for index in 0.. {
            let (mut name, mut value, mut size) = (ptr::null::<c_char>(), ptr::null::<c_void>(), 0);
            // SAFETY: the list is valid and the three places are writable; an index past the end is an error.
            let found = unsafe {
                sys::rd_kafka_header_get_all(headers, index, &mut name, &mut value, &mut size)
            };
            if error_code(found).is_some() {
                break;
            }
            // SAFETY: the name is a C string, the value null or of that size; both live as long as the message.
            unsafe { each(CStr::from_ptr(name).to_bytes(), bytes(value, size)) };
        }
        Ok(())
    }
}

/// # Safety
/// `data` must be null or valid for `len` bytes during `'a`.
unsafe fn bytes<'a>(data: *const c_void, len: usize) -> Option<&'a [u8]> {
    // SAFETY: handed on to the caller.
    NonNull::new(data.cast_mut().cast::<u8>())
        .map(|data| unsafe { slice::from_raw_parts(data.as_ptr(), len) })
}

fn error_code(code: RDKafkaRespErr) -> Option<RDKafkaErrorCode> {
    (code != RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR).then(|| code.into())
}

/// What to commit for one partition.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CommitEntry<'a> {
    pub(crate) topic: &'a str,
    pub(crate) partition: i32,
    pub(crate) offset: i64,
    pub(crate) leader_epoch: Option<i32>,
    pub(crate) metadata: Option<&'a str>,
}

/// The broker's answer to a commit.
#[derive(Debug)]
pub(crate) struct CommitAnswer {
    pub(crate) error: Option<RDKafkaErrorCode>,
    pub(crate) partitions: Vec<CommitAnswerEntry>,
}

#[derive(Debug)]
pub(crate) struct CommitAnswerEntry {
    pub(crate) topic: String,
    pub(crate) partition: i32,
    pub(crate) offset: i64,
    pub(crate) error: Option<RDKafkaErrorCode>,
}

/// The queue that the answers to our commits come back on, in the order in which those were sent.
pub(crate) struct ReplyQueue(Queue);

impl ReplyQueue {
    /// None when the consumer is gone.
    pub(crate) fn new(lifeline: &Lifeline, wake: Wake) -> Option<ReplyQueue> {
        let alive = lifeline.hold()?;
        // SAFETY: the client is alive; the new queue is ours.
        unsafe {
            Queue::own(
                lifeline,
                &alive,
                sys::rd_kafka_queue_new(alive.client),
                wake,
            )
        }
        .map(ReplyQueue)
    }

    /// Sends a commit and returns at once; `Ok` means that exactly one answer will come, whenever the broker gives it.
    pub(crate) fn commit(&self, entries: &[CommitEntry<'_>]) -> Result<(), RDKafkaErrorCode> {
        let mut list = TopicPartitionList::with_capacity(entries.len());
        for entry in entries {
            if entry.topic.contains('\0')
                || entry.offset < 0
                || entry.metadata.is_some_and(|m| m.contains('\0'))
            {
                return Err(RDKafkaErrorCode::InvalidArgument);
            }
            let mut element = list.add_partition(entry.topic, entry.partition);
            if element.set_offset(Offset::Offset(entry.offset)).is_err() {
                return Err(RDKafkaErrorCode::InvalidArgument);
            }
            if let Some(metadata) = entry.metadata {
                element.set_metadata(metadata);
            }
            if let Some(epoch) = entry.leader_epoch {
                set_last_leader_epoch(&mut list, epoch);
            }
        }
        let Some(alive) = self.0.lifeline.hold() else {
            return Err(RDKafkaErrorCode::BrokerDestroy);
        };
        // SAFETY: client, list and queue are alive; librdkafka copies the list, and keeps the queue by its own count.
        let sent = unsafe {
            sys::rd_kafka_commit_queue(
                alive.client,
                list.ptr(),
                self.0.ptr.as_ptr(),
                None,
                ptr::null_mut(),
            )
        };
        error_code(sent).map_or(Ok(()), Err)
    }

    /// The next answer, waiting up to `timeout` for it.
    pub(crate) fn poll(&self, timeout: Duration) -> Option<CommitAnswer> {
        let _alive = self.0.lifeline.hold()?;
        let millis = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: the client is alive, so the queue is. The event is ours until destroyed, its list lives as long, and
        // each element's topic is a C string. `answer` copies everything before the event goes.
        unsafe {
            let event =
                NonNull::new(sys::rd_kafka_queue_poll(self.0.ptr.as_ptr(), millis))?.as_ptr();
            let error = error_code(sys::rd_kafka_event_error(event));
            let list = sys::rd_kafka_event_topic_partition_list(event);
            let elements = match list.as_ref() {
                Some(list) if list.cnt > 0 => slice::from_raw_parts(list.elems, list.cnt as usize),
                _ => &[],
            };
            let partitions = elements.iter().map(|element| CommitAnswerEntry {
                topic: CStr::from_ptr(element.topic).to_string_lossy().into_owned(),
                partition: element.partition,
                offset: element.offset,
                error: error_code(element.err),
            });
            let answer = CommitAnswer {
                error,
                partitions: partitions.collect(),
            };
            sys::rd_kafka_event_destroy(event);
            Some(answer)
        }
    }
}

/// A topic as the brokers describe it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DescribedTopic {
    pub(crate) name: String,
    /// Zero where the brokers give topics no ids.
    pub(crate) id: u128,
    pub(crate) partitions: usize,
    /// The broker that leads each partition, by number; `None` for a partition without a leader.
    pub(crate) leaders: Vec<Option<i32>>,
    pub(crate) error: Option<RDKafkaErrorCode>,
}

/// What a group has committed in a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Committed {
    pub(crate) topic: String,
    pub(crate) partition: i32,
    /// `None` where nothing is committed.
    pub(crate) offset: Option<i64>,
    pub(crate) leader_epoch: Option<i32>,
    pub(crate) metadata: Vec<u8>,
    pub(crate) error: Option<RDKafkaErrorCode>,
}

/// An offset in a partition's log, as its leader gives it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ListedOffset {
    pub(crate) topic: String,
    pub(crate) partition: i32,
    pub(crate) offset: Result<i64, RDKafkaErrorCode>,
}

/// One of the two ends of a partition's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LogEnd {
    First,
    /// The offset that the next record gets.
    Next,
}

/// A consumer group as its coordinator describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DescribedGroup {
    /// Its coordinator waits for members to join, or for what they are to have.
    pub(crate) rebalancing: bool,
    pub(crate) members: Vec<Member>,
}

/// A member of a consumer group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// What the coordinator knows it by.
    pub id: String,
    /// What its client calls itself, `client.id`.
    pub client_id: String,
    /// Where it is, as the brokers see it.
    pub host: String,
    /// Its `group.instance.id`, if it is a static member.
    pub instance: Option<String>,
    /// What it has been assigned: topics and partitions. Under KIP-848, what it is to give away but has not is in it.
    pub partitions: Vec<(String, i32)>,
    /// What it is to have in the end, under KIP-848.
    pub target: Option<Vec<(String, i32)>>,
}

/// How long a question waits for a group's coordinator: as long as librdkafka lets it. One that has run out before it could
/// be sent is sent all the same when the coordinator comes up, by a client that has freed it already, which ends the process
/// (`Assertion eonce->refcnt > 0 failed`, confluentinc/librdkafka#4605). So whoever cannot wait for that keeps the question.
const COORDINATOR: Duration = Duration::from_secs(3600);

/// A question to the brokers, answered on a queue of its own. Dropped, it is forgotten.
pub(crate) struct Question(Queue);

/// What is answered to a [`Question`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    Topics(Vec<DescribedTopic>),
    Group(DescribedGroup),
    Offset(i64),
    Failed(RDKafkaErrorCode),
}

impl Question {
    /// What these topics, each named once, are. Asked of that broker, else of the controller. None when the consumer is
    /// gone.
    pub(crate) fn topics(
        lifeline: &Lifeline,
        wake: Wake,
        topics: &[&str],
        broker: Option<i32>,
        limit: Duration,
    ) -> Option<Question> {
        let names: Vec<_> = topics
            .iter()
            .map(|topic| CString::new(*topic))
            .collect::<Result<_, _>>()
            .ok()?;
        let mut pointers: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
        let op = sys::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBETOPICS;
        Self::ask(lifeline, wake, op, limit, |client, options, queue| {
            // SAFETY: client, options and queue are valid, and so are the names; librdkafka copies them into the
            // collection, and out of that, which is ours to destroy. Null for an error text of size 0 is allowed.
            unsafe {
                if let Some(broker) = broker {
                    sys::rd_kafka_AdminOptions_set_broker(options, broker, ptr::null_mut(), 0);
                }
                let names = pointers.as_mut_ptr();
                let topics = sys::rd_kafka_TopicCollection_of_topic_names(names, pointers.len());
                sys::rd_kafka_DescribeTopics(client, topics, options, queue);
                sys::rd_kafka_TopicCollection_destroy(topics);
            }
        })
    }

    /// Where a partition's log begins or ends. None when the consumer is gone.
    pub(crate) fn offset(
        lifeline: &Lifeline,
        wake: Wake,
        topic: &str,
        partition: i32,
        end: LogEnd,
        limit: Duration,
    ) -> Option<Question> {
        let mut list = TopicPartitionList::with_capacity(1);
        // Their numbers are those of `rd_kafka_OffsetSpec_t`.
        let asked = match end {
            LogEnd::First => Offset::Beginning,
            LogEnd::Next => Offset::End,
        };
        list.add_partition_offset(topic, partition, asked).ok()?;
        let op = sys::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_LISTOFFSETS;
        Self::ask(lifeline, wake, op, limit, |client, options, queue| {
            // SAFETY: all are valid, and librdkafka copies the list.
            unsafe { sys::rd_kafka_ListOffsets(client, list.ptr(), options, queue) };
        })
    }

    /// Offsets of several partitions in one request to each leader; for [`poll_offsets`](Self::poll_offsets). `asked`:
    /// topic, partition, and an end of the log or a timestamp in milliseconds. A leader that does not answer holds up all of
    /// them; a partition without one does not. None when the consumer is gone.
    pub(crate) fn offsets<'a>(
        lifeline: &Lifeline,
        wake: Wake,
        asked: impl IntoIterator<Item = (&'a str, i32, Wanted)>,
        limit: Duration,
    ) -> Option<Question> {
        let mut list = TopicPartitionList::new();
        for (topic, partition, wanted) in asked {
            let offset = match wanted {
                // Their numbers are those of `rd_kafka_OffsetSpec_t`.
                Wanted::End(LogEnd::First) => Offset::Beginning,
                Wanted::End(LogEnd::Next) => Offset::End,
                Wanted::Time(millis) => Offset::Offset(millis.max(0)),
            };
            list.add_partition_offset(topic, partition, offset).ok()?;
        }
        let op = sys::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_LISTOFFSETS;
        Self::ask(lifeline, wake, op, limit, |client, options, queue| {
            // SAFETY: all are valid, and librdkafka copies the list.
            unsafe { sys::rd_kafka_ListOffsets(client, list.ptr(), options, queue) };
        })
    }

    /// Who is in the group. None when the consumer is gone. The answer may be long in coming, see [`COORDINATOR`].
    pub(crate) fn group(lifeline: &Lifeline, wake: Wake, group: &str) -> Option<Question> {
        let group = CString::new(group).ok()?;
        let op = sys::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBECONSUMERGROUPS;
        Self::ask(lifeline, wake, op, COORDINATOR, |client, options, queue| {
            // SAFETY: client, options and queue are valid, and so is the name, which librdkafka copies.
            unsafe {
                let mut names = [group.as_ptr()];
                sys::rd_kafka_DescribeConsumerGroups(client, names.as_mut_ptr(), 1, options, queue);
            }
        })
    }

    fn ask(
        lifeline: &Lifeline,
        wake: Wake,
        op: sys::rd_kafka_admin_op_t,
        limit: Duration,
        send: impl FnOnce(*mut RDKafka, *mut sys::rd_kafka_AdminOptions_t, *mut RDKafkaQueue),
    ) -> Option<Question> {
        let alive = lifeline.hold()?;
        // SAFETY: the client is alive; the new queue is ours.
        let queue = unsafe {
            let queue = sys::rd_kafka_queue_new(alive.client);
            Queue::own(lifeline, &alive, queue, wake)?
        };
        let millis = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: the client is alive. The options are ours to destroy, and copied by what `send` calls; the queue is
        // kept by librdkafka's own count until it has answered. Null for an error text of size 0 is allowed.
        unsafe {
            let options = sys::rd_kafka_AdminOptions_new(alive.client, op);
            sys::rd_kafka_AdminOptions_set_request_timeout(options, millis, ptr::null_mut(), 0);
            send(alive.client, options, queue.ptr.as_ptr());
            sys::rd_kafka_AdminOptions_destroy(options);
        }
        Some(Question(queue))
    }

    /// The answer, waiting up to `timeout` for it. There is one, at the end of the question's limit at the latest.
    pub(crate) fn poll(&self, timeout: Duration) -> Option<Answer> {
        // SAFETY: the event is valid.
        let answer = self.poll_with(timeout, |event| unsafe { answer_in(event) })?;
        Some(answer.unwrap_or_else(Answer::Failed))
    }

    /// The answer to [`offsets`](Self::offsets), if it is there.
    pub(crate) fn poll_offsets(&self) -> Option<Result<Vec<ListedOffset>, RDKafkaErrorCode>> {
        // SAFETY: the event is valid; the array has `count` valid pointers that live as long, and so do their elements.
        self.poll_with(Duration::ZERO, |event| unsafe {
            let mut count = 0;
            let offsets = sys::rd_kafka_event_ListOffsets_result(event);
            if offsets.is_null() {
                return Vec::new();
            }
            let offsets = sys::rd_kafka_ListOffsets_result_infos(offsets, &mut count);
            let listed = slice_of(offsets, count).iter().map(|&info| {
                let element = &*sys::rd_kafka_ListOffsetsResultInfo_topic_partition(info);
                ListedOffset {
                    topic: CStr::from_ptr(element.topic).to_string_lossy().into_owned(),
                    partition: element.partition,
                    offset: error_code(element.err).map_or(Ok(element.offset), Err),
                }
            });
            listed.collect()
        })
    }

    /// Whatever is read out of the event, which is valid until `read` returns.
    fn poll_with<T>(
        &self,
        timeout: Duration,
        read: impl FnOnce(*mut sys::rd_kafka_event_t) -> T,
    ) -> Option<Result<T, RDKafkaErrorCode>> {
        let _alive = self.0.lifeline.hold()?;
        let millis = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: the client is alive, so the queue is. The event is ours until destroyed, and what is read out of it
        // lives as long; a result that it does not carry is null.
        unsafe {
            let event =
                NonNull::new(sys::rd_kafka_queue_poll(self.0.ptr.as_ptr(), millis))?.as_ptr();
            let answer = match error_code(sys::rd_kafka_event_error(event)) {
                Some(error) => Err(error),
                None => Ok(read(event)),
            };
            sys::rd_kafka_event_destroy(event);
            Some(answer)
        }
    }
}

/// What an offset is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    End(LogEnd),
    /// The first record of this time, in Unix milliseconds, or younger. The answer is below 0 where there is none.
    Time(i64),
}

/// As [`Question::committed`], asked through the group's own membership, which knows its coordinator when other requests still
/// go to the one before. Blocks for as long as `limit`, and the client cannot be destroyed meanwhile.
pub(crate) fn committed_of_member<'a>(
    lifeline: &Lifeline,
    partitions: impl IntoIterator<Item = (&'a str, i32)>,
    limit: Duration,
) -> Result<Vec<Committed>, RDKafkaErrorCode> {
    let list = list_of(partitions);
    let alive = lifeline.hold().ok_or(RDKafkaErrorCode::BrokerDestroy)?;
    let millis = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: client and list are alive. The list goes before the client does: it may keep that from being destroyed.
    unsafe {
        let error = sys::rd_kafka_committed(alive.client, list.ptr(), millis);
        let committed = match error_code(error) {
            Some(error) => Err(error),
            None => Ok(committed_in(list.ptr())),
        };
        drop(list);
        committed
    }
}

fn list_of<'a>(partitions: impl IntoIterator<Item = (&'a str, i32)>) -> TopicPartitionList {
    let mut list = TopicPartitionList::new();
    for (topic, partition) in partitions {
        list.add_partition(topic, partition);
    }
    list
}

/// # Safety
/// `list` must be null or a valid list.
unsafe fn committed_in(list: *const sys::rd_kafka_topic_partition_list_t) -> Vec<Committed> {
    // SAFETY: the list has as many elements as it says; topics are C strings, metadata null or of the size given.
    unsafe {
        let elements = match list.as_ref() {
            Some(list) => slice_of(list.elems, usize::try_from(list.cnt).unwrap_or(0)),
            None => &[],
        };
        let committed = elements.iter().map(|element| {
            let epoch = sys::rd_kafka_topic_partition_get_leader_epoch(element);
            Committed {
                topic: CStr::from_ptr(element.topic).to_string_lossy().into_owned(),
                partition: element.partition,
                offset: (element.offset >= 0).then_some(element.offset),
                leader_epoch: (epoch >= 0).then_some(epoch),
                metadata: bytes(element.metadata, element.metadata_size)
                    .unwrap_or_default()
                    .to_vec(),
                error: error_code(element.err),
            }
        });
        committed.collect()
    }
}

/// # Safety
/// `event` must be a valid event.
unsafe fn answer_in(event: *mut sys::rd_kafka_event_t) -> Answer {
    let mut count = 0;
    // SAFETY: as the caller promises. Each array has `count` valid pointers, which live as long as the event; names are
    // C strings, ids and elements valid, and the error of a topic may be null.
    unsafe {
        let topics = sys::rd_kafka_event_DescribeTopics_result(event);
        if !topics.is_null() {
            let topics = sys::rd_kafka_DescribeTopics_result_topics(topics, &mut count);
            let described = slice_of(topics, count).iter().map(|&topic| {
                let id = sys::rd_kafka_TopicDescription_topic_id(topic);
                let high = sys::rd_kafka_Uuid_most_significant_bits(id);
                let low = sys::rd_kafka_Uuid_least_significant_bits(id);
                let mut partitions = 0;
                let infos = sys::rd_kafka_TopicDescription_partitions(topic, &mut partitions);
                let mut leaders = vec![None; partitions];
                for &info in slice_of(infos, partitions) {
                    let leader = sys::rd_kafka_TopicPartitionInfo_leader(info);
                    let partition = sys::rd_kafka_TopicPartitionInfo_partition(info);
                    let place = usize::try_from(partition).ok();
                    if let Some(place) = place.and_then(|place| leaders.get_mut(place)) {
                        let id = (!leader.is_null()).then(|| sys::rd_kafka_Node_id(leader));
                        *place = id.filter(|id| *id >= 0);
                    }
                }
                let name = CStr::from_ptr(sys::rd_kafka_TopicDescription_name(topic));
                let error = sys::rd_kafka_TopicDescription_error(topic);
                DescribedTopic {
                    name: name.to_string_lossy().into_owned(),
                    id: u128::from(high as u64) << 64 | u128::from(low as u64),
                    partitions,
                    leaders,
                    error: error_code(sys::rd_kafka_error_code(error)),
                }
            });
            return Answer::Topics(described.collect());
        }
        let offsets = sys::rd_kafka_event_ListOffsets_result(event);
        if !offsets.is_null() {
            let offsets = sys::rd_kafka_ListOffsets_result_infos(offsets, &mut count);
            if let Some(&first) = slice_of(offsets, count).first() {
                let element = &*sys::rd_kafka_ListOffsetsResultInfo_topic_partition(first);
                return match error_code(element.err) {
                    Some(error) => Answer::Failed(error),
                    None => Answer::Offset(element.offset),
                };
            }
        }
    }
    // SAFETY: as above; what `members_in` is given lives as long as the event.
    unsafe {
        use sys::rd_kafka_consumer_group_state_t as State;
        let groups = sys::rd_kafka_event_DescribeConsumerGroups_result(event);
        if !groups.is_null() {
            let groups = sys::rd_kafka_DescribeConsumerGroups_result_groups(groups, &mut count);
            if let Some(&group) = slice_of(groups, count).first() {
                let error = sys::rd_kafka_ConsumerGroupDescription_error(group);
                return match error_code(sys::rd_kafka_error_code(error)) {
                    Some(error) => Answer::Failed(error),
                    None => Answer::Group(DescribedGroup {
                        rebalancing: matches!(
                            sys::rd_kafka_ConsumerGroupDescription_state(group),
                            State::RD_KAFKA_CONSUMER_GROUP_STATE_PREPARING_REBALANCE
                                | State::RD_KAFKA_CONSUMER_GROUP_STATE_COMPLETING_REBALANCE
                        ),
                        members: members_in(group),
                    }),
                };
            }
        }
    }
    Answer::Failed(RDKafkaErrorCode::BadMessage)
}

/// # Safety
/// `group` must be a valid description.
unsafe fn members_in(group: *const sys::rd_kafka_ConsumerGroupDescription_t) -> Vec<Member> {
    // SAFETY: members below the count are valid; their texts are C strings or null; an assignment and its list may be
    // null, and the list's elements are as many as it says, with C strings for topics.
    unsafe {
        let text = |text: *const c_char| {
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        };
        let member = |index| {
            let member = sys::rd_kafka_ConsumerGroupDescription_member(group, index);
            let partitions = |assignment: *const sys::rd_kafka_MemberAssignment_t| {
                let list = match assignment.is_null() {
                    true => return None,
                    false => sys::rd_kafka_MemberAssignment_partitions(assignment),
                };
                let elements = match list.as_ref() {
                    Some(list) => slice_of(list.elems, usize::try_from(list.cnt).unwrap_or(0)),
                    None => &[],
                };
                let named = elements.iter();
                let named = named.filter_map(|it| Some((text(it.topic)?, it.partition)));
                Some(named.collect())
            };
            let assigned = partitions(sys::rd_kafka_MemberDescription_assignment(member));
            Member {
                id: text(sys::rd_kafka_MemberDescription_consumer_id(member)).unwrap_or_default(),
                client_id: text(sys::rd_kafka_MemberDescription_client_id(member))
                    .unwrap_or_default(),
                host: text(sys::rd_kafka_MemberDescription_host(member)).unwrap_or_default(),
                instance: text(sys::rd_kafka_MemberDescription_group_instance_id(member)),
                partitions: assigned.unwrap_or_default(),
                target: partitions(sys::rd_kafka_MemberDescription_target_assignment(member)),
            }
        };
        let count = sys::rd_kafka_ConsumerGroupDescription_member_count(group);
        (0..count).map(member).collect()
    }
}

/// # Safety
/// `data` must be null or valid for `len` elements during `'a`.
unsafe fn slice_of<'a, T>(data: *const T, len: usize) -> &'a [T] {
    match data.is_null() {
        true => &[],
        // SAFETY: handed on to the caller.
        false => unsafe { slice::from_raw_parts(data, len) },
    }
}

/// Gives the list's last element, which there must be, a leader epoch.
pub(crate) fn set_last_leader_epoch(list: &mut TopicPartitionList, epoch: i32) {
    assert!(list.count() > 0, "there is a last element");
    // SAFETY: the list is borrowed by us alone, and has `cnt` elements, one at least.
    unsafe {
        let native = &*list.ptr();
        let last = native.elems.add(native.cnt as usize - 1);
        sys::rd_kafka_topic_partition_set_leader_epoch(last, epoch);
    }
}

/// The leader epoch of each element, in the list's order.
pub(crate) fn leader_epochs_of(list: &TopicPartitionList) -> Vec<Option<i32>> {
    // SAFETY: the list has `cnt` elements that live as long as the borrow, and nothing changes them meanwhile.
    unsafe {
        let native = &*list.ptr();
        let epochs = slice_of(native.elems, native.cnt.max(0) as usize).iter();
        let epochs = epochs.map(|it| sys::rd_kafka_topic_partition_get_leader_epoch(it));
        epochs.map(|epoch| (epoch >= 0).then_some(epoch)).collect()
    }
}

/// The metadata of each element, in the list's order. The safe binding panics on what is not UTF-8, and anybody may have
/// committed that.
pub(crate) fn metadata_of(list: &TopicPartitionList) -> Vec<&[u8]> {
    // SAFETY: the list and what its elements point to live as long as the borrow, and nothing changes them meanwhile.
    unsafe {
        let native = &*list.ptr();
        let elements = match native.cnt {
            ..=0 => &[],
            count => slice::from_raw_parts(native.elems, count as usize),
        };
        elements
            .iter()
            .map(|element| bytes(element.metadata, element.metadata_size).unwrap_or_default())
            .collect()
    }
}

/// The partition's low and high watermark as of the last fetch, without asking the broker.
pub(crate) fn cached_watermarks<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    topic: &str,
    partition: i32,
) -> Option<(i64, i64)> {
    let topic = CString::new(topic).ok()?;
    let client: &Client<C> = consumer.client();
    let (mut low, mut high) = (OFFSET_INVALID, OFFSET_INVALID);
    // SAFETY: the borrowed consumer keeps its client alive; `topic` is a C string, both places are writable.
    let error = unsafe {
        sys::rd_kafka_get_watermark_offsets(
            client.native_ptr(),
            topic.as_ptr(),
            partition,
            &mut low,
            &mut high,
        )
    };
    (error_code(error).is_none() && low >= 0 && high >= 0).then_some((low, high))
}

/// The id that the group knows this member by, and the generation, or epoch, that it has joined: as far as the client
/// knows. None once it has left for good.
pub(crate) fn membership<C: ConsumerContext>(consumer: &BaseConsumer<C>) -> Option<(String, i32)> {
    let client = consumer.client().native_ptr();
    // SAFETY: the borrowed consumer keeps its client alive; the metadata are null or ours to destroy, and the id in them is
    // null or a C string that lives as long.
    unsafe {
        let metadata = sys::rd_kafka_consumer_group_metadata(client);
        if metadata.is_null() {
            return None;
        }
        let id = sys::rd_kafka_consumer_group_metadata_member_id(metadata);
        let id = match id.is_null() {
            true => String::new(),
            false => CStr::from_ptr(id).to_string_lossy().into_owned(),
        };
        let generation = sys::rd_kafka_consumer_group_metadata_generation_id(metadata);
        sys::rd_kafka_consumer_group_metadata_destroy(metadata);
        Some((id, generation))
    }
}

/// Whether a classic group knows this member, as far as the client knows: from its first JoinGroup until it has sent
/// LeaveGroup.
pub(crate) fn has_member_id<C: ConsumerContext>(consumer: &BaseConsumer<C>) -> bool {
    let client = consumer.client().native_ptr();
    // SAFETY: the borrowed consumer keeps its client alive; the id is null or a C string that is ours to free.
    unsafe {
        let id = sys::rd_kafka_memberid(client);
        let known = !id.is_null() && *id != 0;
        sys::rd_kafka_mem_free(client, id.cast());
        known
    }
}

/// Locks a file for this process until it is closed, also by a crash. `false`: another one has it.
///
/// The standard library can do this from Rust 1.89 on.
#[cfg(unix)]
pub(crate) fn lock_file(file: &std::fs::File) -> std::io::Result<bool> {
    use std::{ffi::c_int, io, os::fd::AsRawFd};

    unsafe extern "C" {
        fn flock(fd: c_int, operation: c_int) -> c_int;
    }
    // `LOCK_EX | LOCK_NB`, the same on all systems that have it.
    const EXCLUSIVE_OR_FAIL: c_int = 2 | 4;
    // SAFETY: the descriptor is open for as long as `file` is borrowed; nothing else is passed.
    if unsafe { flock(file.as_raw_fd(), EXCLUSIVE_OR_FAIL) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.kind() {
        io::ErrorKind::WouldBlock => Ok(false),
        _ => Err(error),
    }
}

/// Elsewhere nobody is kept out.
#[cfg(not(unix))]
pub(crate) fn lock_file(_: &std::fs::File) -> std::io::Result<bool> {
    Ok(true)
}

/// A header as it is sent: name and value byte for byte, a null value distinct from an empty one.
pub(crate) type RawHeader<'a> = (&'a [u8], Option<&'a [u8]>);

/// A record to produce; everything in it is copied.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outgoing<'a> {
    pub(crate) topic: &'a str,
    /// `None` leaves the choice to the configured partitioner.
    pub(crate) partition: Option<i32>,
    pub(crate) key: Option<&'a [u8]>,
    pub(crate) value: Option<&'a [u8]>,
    /// Unix milliseconds; `None` means now.
    pub(crate) timestamp: Option<i64>,
    pub(crate) headers: &'a [RawHeader<'a>],
}

/// Puts a record into the producer's queue. `opaque` goes to the context's `delivery`, or comes back with the error.
pub(crate) fn produce<C: ProducerContext>(
    producer: &BaseProducer<C>,
    record: Outgoing<'_>,
    opaque: C::DeliveryOpaque,
) -> Result<(), (RDKafkaErrorCode, C::DeliveryOpaque)> {
    use sys::rd_kafka_vtype_t as tag;
    type Content = sys::rd_kafka_vu_s__bindgen_ty_1;
    let memory = |data: Option<&[u8]>| Content {
        mem: sys::rd_kafka_vu_s__bindgen_ty_1__bindgen_ty_1 {
            ptr: data.map_or(ptr::null_mut(), |data| data.as_ptr().cast_mut().cast()),
            size: data.map_or(0, <[u8]>::len),
        },
    };
    let Ok(topic) = CString::new(record.topic) else {
        return Err((RDKafkaErrorCode::InvalidTopic, opaque));
    };
    let opaque = opaque.into_ptr();
    let mut fields = vec![
        (
            tag::RD_KAFKA_VTYPE_TOPIC,
            Content {
                cstr: topic.as_ptr(),
            },
        ),
        (
            tag::RD_KAFKA_VTYPE_PARTITION,
            Content {
                i32_: record.partition.unwrap_or(PARTITION_UNASSIGNED),
            },
        ),
        (
            tag::RD_KAFKA_VTYPE_MSGFLAGS,
            Content {
                i: sys::RD_KAFKA_MSG_F_COPY,
            },
        ),
        (tag::RD_KAFKA_VTYPE_KEY, memory(record.key)),
        (tag::RD_KAFKA_VTYPE_VALUE, memory(record.value)),
        (
            tag::RD_KAFKA_VTYPE_TIMESTAMP,
            Content {
                i64_: record.timestamp.unwrap_or(0),
            },
        ),
        (tag::RD_KAFKA_VTYPE_OPAQUE, Content { ptr: opaque }),
    ];
    // SAFETY: the new list is ours; name and value are valid for the lengths given and are copied. The borrowed
    // producer keeps its client alive, and every pointer in `fields` lives until the call returns, which copies key
    // and value (`F_COPY`). On success librdkafka owns list and opaque; on failure both are still ours, and `opaque`
    // is what `into_ptr` of this very type made.
    unsafe {
        let headers = if record.headers.is_empty() {
            ptr::null_mut()
        } else {
            let headers = sys::rd_kafka_headers_new(record.headers.len());
            for (name, value) in record.headers {
                let (data, size) =
                    value.map_or((ptr::null(), 0), |value| (value.as_ptr(), value.len()));
                let (name, name_size) = (name.as_ptr().cast(), name.len() as isize);
                sys::rd_kafka_header_add(headers, name, name_size, data.cast(), size as isize);
            }
            fields.push((tag::RD_KAFKA_VTYPE_HEADERS, Content { headers }));
            headers
        };
        let fields: Vec<_> = fields
            .into_iter()
            .map(|(vtype, u)| sys::rd_kafka_vu_t { vtype, u })
            .collect();
        let error = sys::rd_kafka_produceva(
            producer.client().native_ptr(),
            fields.as_ptr(),
            fields.len(),
        );
        if error.is_null() {
            return Ok(());
        }
        let code = sys::rd_kafka_error_code(error).into();
        sys::rd_kafka_error_destroy(error);
        if !headers.is_null() {
            sys::rd_kafka_headers_destroy(headers);
        }
        Err((code, C::DeliveryOpaque::from_ptr(opaque)))
    }
}

/// Makes the producer believe that it met a fatal error.
#[cfg(test)]
pub(super) fn raise_fatal_error<C: ProducerContext>(producer: &BaseProducer<C>) {
    let code = RDKafkaRespErr::RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER;
    // SAFETY: the borrowed producer keeps its client alive, and the reason is a C string.
    unsafe {
        sys::rd_kafka_test_fatal_error(producer.client().native_ptr(), code, c"a test".as_ptr())
    };
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Instant;

    use rdkafka::ClientContext;
    use rdkafka::consumer::DefaultConsumerContext;
    use rdkafka::message::{DeliveryResult, Message as _};
    use rdkafka::mocking::MockCluster;
    use rdkafka::producer::DefaultProducerContext;

    use super::*;

    const TOPIC: &str = "orders";

    struct World {
        cluster: MockCluster<'static, DefaultProducerContext>,
        producer: BaseProducer<Delivered>,
        delivered: Receiver<(u32, i64)>,
    }

    struct Delivered(Sender<(u32, i64)>);

    impl ClientContext for Delivered {}

    impl ProducerContext for Delivered {
        type DeliveryOpaque = Box<u32>;

        fn delivery(&self, result: &DeliveryResult<'_>, opaque: Box<u32>) {
            let offset = result.as_ref().map_or(-1, |message| message.offset());
            self.0.send((*opaque, offset)).unwrap();
        }
    }

    impl World {
        fn new() -> World {
            let cluster = MockCluster::new(1).unwrap();
            cluster.create_topic(TOPIC, 2, 1).unwrap();
            let (sender, delivered) = channel();
            let producer = ClientConfig::new()
                .set("bootstrap.servers", cluster.bootstrap_servers())
                .create_with_context(Delivered(sender))
                .unwrap();
            World {
                cluster,
                producer,
                delivered,
            }
        }

        fn produce(
            &self,
            key: Option<&[u8]>,
            value: Option<&[u8]>,
            headers: &[RawHeader<'_>],
        ) -> i64 {
            let record = Outgoing {
                topic: TOPIC,
                partition: Some(0),
                key,
                value,
                timestamp: Some(1_234),
                headers,
            };
            produce(&self.producer, record, Box::new(7)).unwrap();
            self.producer.flush(Duration::from_secs(5)).unwrap();
            let (opaque, offset) = self.delivered.recv().unwrap();
            assert_eq!(opaque, 7, "the opaque comes back with the delivery report");
            offset
        }

        fn consumer(&self) -> Consumer<DefaultConsumerContext> {
            let mut config = ClientConfig::new();
            config
                .set("bootstrap.servers", self.cluster.bootstrap_servers())
                .set("group.id", "shipping")
                .set("enable.auto.commit", "false");
            Consumer::create(&config, Arc::new(|| ()), |_| DefaultConsumerContext).unwrap()
        }
    }

    fn counting() -> (Wake, Arc<AtomicUsize>) {
        let count = Arc::new(AtomicUsize::new(0));
        let counter = count.clone();
        (
            Arc::new(move || _ = counter.fetch_add(1, Ordering::SeqCst)),
            count,
        )
    }

    fn assign(consumer: &Consumer<DefaultConsumerContext>) {
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(TOPIC, 0, Offset::Beginning)
            .unwrap();
        consumer.assign(&list).unwrap();
    }

    fn read_until<T>(
        consumer: &Consumer<DefaultConsumerContext>,
        queue: &mut PartitionQueue,
        count: usize,
        mut map: impl FnMut(&RawMessage<'_>) -> T,
    ) -> Vec<T> {
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut all = Vec::new();
        while all.len() < count && Instant::now() < deadline {
            assert!(
                consumer.poll(Duration::from_millis(5)).is_none(),
                "the main queue carries no records"
            );
            queue.read(2, |message| all.push(map(&message)));
        }
        all
    }

    type Owned = (
        i64,
        Option<Vec<u8>>,
        Option<Vec<u8>>,
        Vec<(Vec<u8>, Option<Vec<u8>>)>,
    );

    fn owned(message: &RawMessage<'_>) -> Owned {
        let mut headers = Vec::new();
        let collect = |name: &[u8], value: Option<&[u8]>| {
            headers.push((name.to_vec(), value.map(<[u8]>::to_vec)))
        };
        message.for_each_header(collect).unwrap();
        (
            message.offset(),
            message.key().map(<[u8]>::to_vec),
            message.value().map(<[u8]>::to_vec),
            headers,
        )
    }

    // D4, D2
    #[test]
    fn records_come_as_they_were_sent_null_and_empty_and_with_raw_header_names() {
        let world = World::new();
        let headers: &[RawHeader<'_>] = &[
            (b"\xff\xfe", Some(b"\x00\x01")),
            (b"again", None),
            (b"again", Some(b"")),
            (b"", Some(b"x")),
        ];
        world.produce(None, None, &[]);
        world.produce(Some(b""), Some(b""), &[]);
        world.produce(Some(b"k"), Some(b"v\0v"), headers);

        let consumer = world.consumer();
        let (wake, woken) = counting();
        let mut queue = PartitionQueue::take(consumer.lifeline(), TOPIC, 0, wake).unwrap();
        assign(&consumer);
        let mut stamps = Vec::new();
        let records = read_until(&consumer, &mut queue, 3, |message| {
            assert_eq!(message.error(), None);
            stamps.push(message.timestamp());
            owned(message)
        });

        let headers = headers
            .iter()
            .map(|(name, value)| (name.to_vec(), value.map(<[u8]>::to_vec)))
            .collect();
        assert_eq!(
            records,
            [
                (0, None, None, vec![]),
                (1, Some(vec![]), Some(vec![]), vec![]),
                (2, Some(b"k".to_vec()), Some(b"v\0v".to_vec()), headers),
            ]
        );
        assert_eq!(stamps, [Some((1_234, false)); 3]);
        assert!(
            woken.load(Ordering::SeqCst) > 0,
            "the queue wakes its reader"
        );
        assert_eq!(cached_watermarks(&consumer, TOPIC, 0), Some((0, 3)));
        assert_eq!(
            cached_watermarks(&consumer, TOPIC, 1),
            None,
            "never fetched"
        );
    }

    #[test]
    fn a_panicking_reader_leaks_nothing_and_the_queue_reads_on() {
        let world = World::new();
        for _ in 0..4 {
            world.produce(None, Some(b"v"), &[]);
        }
        let consumer = world.consumer();
        let mut queue = PartitionQueue::take(consumer.lifeline(), TOPIC, 0, counting().0).unwrap();
        assign(&consumer);
        let first = read_until(&consumer, &mut queue, 1, |message| message.offset());
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            while queue.read(1, |_| panic!("a reader gives up")) == 0 {}
        }));
        assert!(panicked.is_err());
        let rest = read_until(&consumer, &mut queue, 3 - first.len(), |message| {
            message.offset()
        });
        assert_eq!(rest.last(), Some(&3));
    }

    #[test]
    fn a_commit_is_answered_on_its_own_queue_and_its_metadata_is_stored() {
        let world = World::new();
        let offset = world.produce(None, Some(b"v"), &[]);
        let consumer = world.consumer();
        let (wake, woken) = counting();
        let replies = ReplyQueue::new(consumer.lifeline(), wake).unwrap();
        let entry = CommitEntry {
            topic: TOPIC,
            partition: 0,
            offset: offset + 1,
            leader_epoch: Some(0),
            metadata: Some("what was finished"),
        };
        replies.commit(&[entry]).unwrap();
        let answer = replies.poll(Duration::from_secs(10)).expect("an answer");
        assert_eq!(answer.error, None);
        let [partition] = &answer.partitions[..] else {
            panic!("{answer:?}")
        };
        assert_eq!(
            (&*partition.topic, partition.partition, partition.offset),
            (TOPIC, 0, offset + 1)
        );
        assert_eq!(partition.error, None);
        assert!(woken.load(Ordering::SeqCst) > 0);

        let mut list = TopicPartitionList::new();
        list.add_partition(TOPIC, 0);
        let list = consumer
            .committed_offsets(list, Duration::from_secs(5))
            .unwrap();
        let stored = list.find_partition(TOPIC, 0).unwrap();
        assert_eq!(
            (stored.offset(), stored.metadata()),
            (Offset::Offset(offset + 1), "what was finished")
        );
    }

    // T11
    #[test]
    fn metadata_is_read_as_bytes_whatever_they_are() {
        let mut list = TopicPartitionList::new();
        list.add_partition("t", 0).set_metadata("xyz");
        list.add_partition("t", 1);
        // SAFETY: the first element owns three bytes of metadata, which nobody else looks at now.
        unsafe { (*(*list.ptr()).elems).metadata.cast::<u8>().write(0xff) };
        assert_eq!(metadata_of(&list), [b"\xffyz".as_slice(), b""]);
        assert!(metadata_of(&TopicPartitionList::new()).is_empty());
    }

    #[test]
    fn a_refused_commit_says_so() {
        let world = World::new();
        let consumer = world.consumer();
        let replies = ReplyQueue::new(consumer.lifeline(), counting().0).unwrap();
        let refusal = RDKafkaRespErr::RD_KAFKA_RESP_ERR_OFFSET_METADATA_TOO_LARGE;
        world
            .cluster
            .request_errors(rdkafka::types::RDKafkaApiKey::OffsetCommit, &[refusal]);
        let entry = CommitEntry {
            topic: TOPIC,
            partition: 0,
            offset: 1,
            leader_epoch: None,
            metadata: None,
        };
        replies.commit(&[entry]).unwrap();
        let answer = replies.poll(Duration::from_secs(10)).expect("an answer");
        assert_eq!(
            answer.error,
            Some(RDKafkaErrorCode::OffsetMetadataTooLarge),
            "{answer:?}"
        );

        let entry = CommitEntry {
            offset: -1,
            ..entry
        };
        assert_eq!(
            replies.commit(&[entry]),
            Err(RDKafkaErrorCode::InvalidArgument)
        );
    }

    #[test]
    fn what_outlives_the_consumer_is_inert() {
        let world = World::new();
        world.produce(None, Some(b"v"), &[]);
        let consumer = world.consumer();
        let lifeline = consumer.lifeline().clone();
        let mut queue = PartitionQueue::take(&lifeline, TOPIC, 0, counting().0).unwrap();
        let replies = ReplyQueue::new(&lifeline, counting().0).unwrap();
        assign(&consumer);
        assert_eq!(
            read_until(&consumer, &mut queue, 1, |message| message.offset()),
            [0]
        );
        world.produce(None, Some(b"v"), &[]);
        drop(consumer);

        assert_eq!(queue.read(10, |_| panic!("nothing may be read")), 0);
        assert_eq!(replies.commit(&[]), Err(RDKafkaErrorCode::BrokerDestroy));
        assert!(replies.poll(Duration::from_secs(1)).is_none());
        assert!(PartitionQueue::take(&lifeline, TOPIC, 0, counting().0).is_none());
        drop((queue, replies));
    }

    #[test]
    fn what_is_dropped_before_the_consumer_gives_its_wake_up_back() {
        let world = World::new();
        let consumer = world.consumer();
        let (wake, count) = counting();
        let queue = PartitionQueue::take(consumer.lifeline(), TOPIC, 0, wake.clone()).unwrap();
        let replies = ReplyQueue::new(consumer.lifeline(), wake).unwrap();
        drop((queue, replies));
        assert_eq!(Arc::strong_count(&count), 1);
        drop(consumer);
    }

    #[test]
    fn a_consumer_that_is_closed_ends_without_an_error_in_the_log_and_frees_its_context() {
        thread_local! {
            static ERRORS: Cell<usize> = const { Cell::new(0) };
        }
        struct Count;
        impl log::Log for Count {
            fn enabled(&self, _: &log::Metadata<'_>) -> bool {
                true
            }
            fn log(&self, line: &log::Record<'_>) {
                ERRORS.set(ERRORS.get() + usize::from(line.level() == log::Level::Error));
            }
            fn flush(&self) {}
        }
        log::set_logger(&Count).unwrap();
        log::set_max_level(log::LevelFilter::Error);
        let world = World::new();
        let consumer = world.consumer();
        let context = Arc::downgrade(consumer.context());
        consumer.subscribe(&[TOPIC]).unwrap();
        consumer.close_queue().unwrap();
        while !consumer.closed() {
            consumer.poll(Duration::from_millis(10));
        }
        drop(consumer);
        assert_eq!(ERRORS.get(), 0);
        assert_eq!(context.strong_count(), 0);
    }

    #[test]
    fn a_record_that_cannot_be_queued_gives_its_opaque_back() {
        let world = World::new();
        let value = vec![0; 2_000_000];
        let record = Outgoing {
            topic: TOPIC,
            partition: None,
            key: None,
            value: Some(&value),
            timestamp: None,
            headers: &[(b"name", Some(b"value"))],
        };
        let (error, opaque) = produce(&world.producer, record, Box::new(9)).unwrap_err();
        assert_eq!((error, *opaque), (RDKafkaErrorCode::MessageSizeTooLarge, 9));
        let record = Outgoing {
            topic: "nul\0byte",
            value: None,
            ..record
        };
        let (error, _) = produce(&world.producer, record, Box::new(9)).unwrap_err();
        assert_eq!(error, RDKafkaErrorCode::InvalidTopic);
    }
}
