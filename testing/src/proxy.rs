//! A proxy in front of brokers that understands one answer, that to ConsumerGroupHeartbeat, and can hold it back.

use std::{
    collections::HashMap,
    io::{self, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

const METADATA: i16 = 3;
const FIND_COORDINATOR: i16 = 10;
const CONSUMER_GROUP_HEARTBEAT: i16 = 68;

/// Which answer is held back: asked about each one that brings an assignment, with its number of partitions.
type Choice = Box<dyn FnMut(usize) -> bool + Send>;

/// Clients that are told its address reach the brokers through it, and only through it: answers that name brokers name the
/// proxy. It ends with the process.
pub struct Proxy {
    brokers: String,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// Host and port of each broker as Kafka writes them, and what is written in their place.
    names: Vec<(Vec<u8>, Vec<u8>)>,
    choice: Mutex<Option<(Choice, Duration)>>,
    held: AtomicUsize,
}

impl Proxy {
    /// In front of these brokers, `host:port,…`. Each host must be named as the brokers name it themselves.
    pub fn start(brokers: &str) -> Self {
        let mut listeners = Vec::new();
        let mut names = Vec::new();
        for broker in brokers.split(',') {
            let (host, port) = broker.rsplit_once(':').expect("a broker is host:port");
            let listener = TcpListener::bind((host, 0)).expect("a port is free");
            let ours = listener.local_addr().expect("it is bound").port();
            let name = |port: u16| {
                let mut bytes = host.as_bytes().to_vec();
                bytes.extend(i32::from(port).to_be_bytes());
                bytes
            };
            names.push((name(port.parse().expect("a port is a number")), name(ours)));
            listeners.push((listener, broker.to_owned(), format!("{host}:{ours}")));
        }
        let shared = Arc::new(Shared {
            names,
            ..Shared::default()
        });
        let brokers: Vec<_> = listeners.iter().map(|(_, _, ours)| ours.clone()).collect();
        for (listener, broker, _) in listeners {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                for client in listener.incoming().flatten() {
                    // Broken connections are the client's to see.
                    drop(connect(client, &broker, &shared));
                }
            });
        }
        Self {
            brokers: brokers.join(","),
            shared,
        }
    }

    /// `host:port,…` of the proxy.
    pub fn brokers(&self) -> &str {
        &self.brokers
    }

    /// From now on, holds back for this long the first answer to a heartbeat that brings an assignment of which `choice`,
    /// asked with its number of partitions, says so. What follows on its connection waits behind it.
    pub fn hold_back(&self, time: Duration, choice: impl FnMut(usize) -> bool + Send + 'static) {
        let choice: Choice = Box::new(choice);
        *self.shared.choice.lock().expect("nobody panics with it") = Some((choice, time));
    }

    /// How many answers have been held back.
    pub fn held_back(&self) -> usize {
        self.shared.held.load(Ordering::SeqCst)
    }
}

/// The kind of each request that is not answered yet, by its number.
type Pending = Arc<Mutex<HashMap<i32, i16>>>;

fn connect(client: TcpStream, broker: &str, shared: &Arc<Shared>) -> io::Result<()> {
    let broker = TcpStream::connect(broker)?;
    client.set_nodelay(true)?;
    broker.set_nodelay(true)?;
    let pending = Pending::default();
    let ways = [
        (client.try_clone()?, broker.try_clone()?, None),
        (broker, client, Some(Arc::clone(shared))),
    ];
    for (mut from, mut to, answers) in ways {
        let pending = Arc::clone(&pending);
        thread::spawn(move || {
            // Ends with either side.
            drop(forward(&mut from, &mut to, &pending, answers.as_deref()));
            drop((from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both)));
        });
    }
    Ok(())
}

/// Requests, or answers where it is given what those may need.
fn forward(
    from: &mut TcpStream,
    to: &mut TcpStream,
    pending: &Pending,
    answers: Option<&Shared>,
) -> io::Result<()> {
    loop {
        let mut size = [0; 4];
        from.read_exact(&mut size)?;
        let mut frame = vec![0; u32::from_be_bytes(size) as usize];
        from.read_exact(&mut frame)?;
        let mut pending_now = pending.lock().expect("nobody panics with it");
        match answers {
            None => {
                let mut reader = Reader(&frame);
                let (kind, _version) = (reader.int::<2>() as i16, reader.int::<2>());
                pending_now.insert(reader.int::<4>() as i32, kind);
                drop(pending_now);
            }
            Some(shared) => {
                let kind = pending_now.remove(&(Reader(&frame).int::<4>() as i32));
                drop(pending_now);
                match kind {
                    Some(METADATA | FIND_COORDINATOR) => shared.rename(&mut frame),
                    Some(CONSUMER_GROUP_HEARTBEAT) => shared.hold_back(&frame),
                    _ => {}
                }
            }
        }
        to.write_all(&size)?;
        to.write_all(&frame)?;
    }
}

impl Shared {
    /// Hosts and ports are written side by side in all versions, and no port changes its length.
    fn rename(&self, frame: &mut [u8]) {
        for (broker, ours) in &self.names {
            for at in 0..frame.len().saturating_sub(broker.len() - 1) {
                let window = &mut frame[at..at + broker.len()];
                if window == &broker[..] {
                    window.copy_from_slice(ours);
                }
            }
        }
    }

    fn hold_back(&self, frame: &[u8]) {
        let Some(partitions) = assigned(frame) else {
            return;
        };
        let mut choice = self.choice.lock().expect("nobody panics with it");
        let held = choice.take_if(|(choice, _)| choice(partitions));
        drop(choice);
        if let Some((_, time)) = held {
            self.held.fetch_add(1, Ordering::SeqCst);
            thread::sleep(time);
        }
    }
}

/// The number of partitions in the assignment that an answer to ConsumerGroupHeartbeat brings, if it does.
fn assigned(frame: &[u8]) -> Option<usize> {
    let mut reader = Reader(frame);
    let _correlation = reader.int::<4>();
    let _tags = reader.varint();
    let _throttle = reader.int::<4>();
    let _error = reader.int::<2>();
    reader.skip_text();
    reader.skip_text();
    let (_epoch, _interval) = (reader.int::<4>(), reader.int::<4>());
    if reader.int::<1>() != 1 {
        return None;
    }
    let mut partitions = 0;
    for _ in 1..reader.varint() {
        reader.skip(16);
        let count = (reader.varint() as usize).saturating_sub(1);
        partitions += count;
        reader.skip(4 * count);
        let _tags = reader.varint();
    }
    Some(partitions)
}

/// Reads Kafka's encoding; past the end there are zeros.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn skip(&mut self, bytes: usize) {
        self.0 = self.0.get(bytes..).unwrap_or_default();
    }

    fn int<const SIZE: usize>(&mut self) -> u32 {
        let bytes = self.0.get(..SIZE).unwrap_or_default();
        let value = bytes
            .iter()
            .fold(0, |value, byte| value << 8 | u32::from(*byte));
        self.skip(SIZE);
        value
    }

    fn varint(&mut self) -> u32 {
        let (mut value, mut shift) = (0, 0);
        loop {
            let byte = self.int::<1>();
            value |= (byte & 0x7f) << shift;
            shift += 7;
            if byte < 0x80 || shift > 28 {
                return value;
            }
        }
    }

    /// Text that may be null.
    fn skip_text(&mut self) {
        let length = self.varint() as usize;
        self.skip(length.saturating_sub(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_partitions_of_an_assignment_are_counted() {
        // Number, tags, throttle, error, no message, member "m", epoch, interval.
        let mut frame = vec![0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 2, b'm'];
        frame.extend([0, 0, 0, 3, 0, 0, 0x13, 0x88]);
        let without = [&frame[..], &[0xff, 0]].concat();
        assert_eq!(assigned(&without), None);
        frame.extend([1, 3]);
        for partitions in [1_u8, 2] {
            frame.extend([7; 16]);
            frame.push(partitions + 1);
            frame.extend(vec![0; 4 * usize::from(partitions)]);
            frame.push(0);
        }
        frame.extend([0, 0]);
        assert_eq!(assigned(&frame), Some(3));
        assert_eq!(assigned(&[]), None);
    }

    #[test]
    fn brokers_are_named_as_the_proxy_wherever_they_are() {
        let shared = Shared {
            names: vec![(b"host\0\0\x01\x02".into(), b"host\0\0\x03\x04".into())],
            ..Shared::default()
        };
        let mut frame = b"ahost\0\0\x01\x02host\0\0\x01\x03host\0\0\x01\x02".to_vec();
        shared.rename(&mut frame);
        assert_eq!(frame, b"ahost\0\0\x03\x04host\0\0\x01\x03host\0\0\x03\x04");
    }
}
