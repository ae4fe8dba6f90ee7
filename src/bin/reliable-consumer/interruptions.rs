//! Being asked to end.

use std::{
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use tokio::{runtime, signal};

use crate::failure::Failure;

/// Ctrl-C, or what ends a service. Made once: what comes between two of them would be missed.
pub struct Interruptions {
    #[cfg(unix)]
    interrupt: signal::unix::Signal,
    #[cfg(unix)]
    terminate: signal::unix::Signal,
}

impl Interruptions {
    pub fn new() -> Result<Self, Failure> {
        #[cfg(unix)]
        {
            use signal::unix::{SignalKind, signal};
            Ok(Self {
                interrupt: signal(SignalKind::interrupt())?,
                terminate: signal(SignalKind::terminate())?,
            })
        }
        #[cfg(not(unix))]
        Ok(Self {})
    }

    pub async fn next(&mut self) -> Result<(), Failure> {
        #[cfg(unix)]
        {
            tokio::select! {
                _ = self.interrupt.recv() => {}
                _ = self.terminate.recv() => {}
            }
            Ok(())
        }
        #[cfg(not(unix))]
        Ok(signal::ctrl_c().await?)
    }
}

/// Set when the first one comes. The second ends the process.
pub fn flag() -> Result<Arc<AtomicBool>, Failure> {
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let mut interruptions = {
        let _inside = runtime.enter();
        Interruptions::new()?
    };
    let flag = Arc::new(AtomicBool::new(false));
    let set = Arc::clone(&flag);
    thread::spawn(move || {
        runtime.block_on(async {
            if interruptions.next().await.is_ok() {
                set.store(true, Ordering::Relaxed);
            }
            if interruptions.next().await.is_ok() {
                process::exit(130);
            }
        });
    });
    Ok(flag)
}
