//! A name that servers move behind, as DNS or a virtual address gives them.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU16, AtomicUsize, Ordering},
    },
    thread,
};

/// An address on loopback whose new connections go where it points at the moment. Those that it has stay where they are.
pub struct Name {
    port: u16,
    to: Arc<AtomicU16>,
    /// Connections of earlier epochs pass nothing on any more, and are not closed.
    epoch: Arc<AtomicUsize>,
}

impl Name {
    /// One that points to the server at this port.
    pub fn of(server: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("loopback has free ports");
        let port = listener.local_addr().expect("it is bound").port();
        let to = Arc::new(AtomicU16::new(server));
        let epoch = Arc::new(AtomicUsize::new(0));
        let name = Self {
            port,
            to: Arc::clone(&to),
            epoch: Arc::clone(&epoch),
        };
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(("127.0.0.1", to.load(Ordering::SeqCst)))
                else {
                    continue;
                };
                let of = epoch.load(Ordering::SeqCst);
                let clone = |it: &TcpStream| it.try_clone().expect("a socket can be shared");
                for (from, into) in [(clone(&client), clone(&server)), (server, client)] {
                    let epoch = Arc::clone(&epoch);
                    thread::spawn(move || {
                        pass_on(from, into, || epoch.load(Ordering::SeqCst) == of)
                    });
                }
            }
        });
        name
    }

    /// Where clients connect to.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// From now on it is another server's.
    pub fn move_to(&self, server: u16) {
        self.to.store(server, Ordering::SeqCst);
    }

    /// The connections that it has now get nothing through any more, as when a machine is gone without a word.
    pub fn cut_off(&self) {
        self.epoch.fetch_add(1, Ordering::SeqCst);
    }
}

fn pass_on(mut from: TcpStream, mut into: TcpStream, is_connected: impl Fn() -> bool) {
    let mut buffer = [0; 65_536];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        if is_connected() && into.write_all(&buffer[..length]).is_err() {
            break;
        }
    }
    if is_connected() {
        let _ = into.shutdown(Shutdown::Both);
    }
}
