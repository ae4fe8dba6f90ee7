//! Time, CPU and memory of this process while it handles records.

use std::{
    cell::Cell,
    fs,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

const LOOK_EVERY: Duration = Duration::from_millis(1);
const PATIENCE: Duration = Duration::from_secs(60);

/// Counts handled records at next to no cost: a line of cache for each thread.
pub(crate) struct Meter {
    total: u64,
    counts: [Count; 16],
}

#[derive(Default)]
#[repr(align(128))]
struct Count(AtomicU64);

/// From the first record handled to the last.
pub(crate) struct Measured {
    pub(crate) rate: f64,
    pub(crate) cpu_per_million: f64,
    pub(crate) memory_mib: f64,
}

impl Meter {
    pub(crate) fn new(total: u64) -> Arc<Self> {
        Arc::new(Self {
            total,
            counts: Default::default(),
        })
    }

    /// One record was handled.
    pub(crate) fn count(&self) {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static MINE: Cell<usize> = Cell::new(THREADS.fetch_add(1, Ordering::Relaxed));
        }
        let mine = MINE.get() % self.counts.len();
        self.counts[mine].0.fetch_add(1, Ordering::Relaxed);
    }

    fn counted(&self) -> u64 {
        self.counts
            .iter()
            .map(|count| count.0.load(Ordering::Relaxed))
            .sum()
    }

    /// All records are handled.
    pub(crate) fn is_full(&self) -> bool {
        self.counted() >= self.total
    }

    /// Measures on a thread of its own until all records are handled.
    pub(crate) fn watch(self: &Arc<Self>) -> JoinHandle<Measured> {
        let meter = Arc::clone(self);
        let memory = status_kib("VmRSS");
        thread::spawn(move || {
            let begin = meter.wait_for(1);
            let end = meter.wait_for(meter.total);
            let records = (end.count - begin.count) as f64;
            Measured {
                rate: records / (end.at - begin.at).as_secs_f64(),
                cpu_per_million: (end.cpu - begin.cpu).as_secs_f64() / records * 1e6,
                memory_mib: status_kib("VmHWM").saturating_sub(memory) as f64 / 1024.0,
            }
        })
    }

    fn wait_for(&self, count: u64) -> Moment {
        let (mut last, mut since) = (0, Instant::now());
        loop {
            let counted = self.counted();
            if counted >= count {
                return Moment {
                    count: counted,
                    at: Instant::now(),
                    cpu: cpu(),
                };
            }
            if counted > last {
                (last, since) = (counted, Instant::now());
            }
            assert!(
                since.elapsed() < PATIENCE,
                "{counted} of {count} records handled, and none for {PATIENCE:?}"
            );
            thread::sleep(LOOK_EVERY);
        }
    }
}

struct Moment {
    count: u64,
    at: Instant,
    cpu: Duration,
}

/// CPU time of this process's threads, in user mode and in the kernel.
pub(crate) fn cpu() -> Duration {
    // Nanoseconds by thread; /proc/self/stat counts ticks of 10 ms.
    let threads = fs::read_dir("/proc/self/task").expect("Linux lists a process's threads");
    let run_time = |thread: fs::DirEntry| -> Option<u64> {
        // A thread may end while it is looked at.
        let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse().ok()
    };
    Duration::from_nanos(threads.filter_map(|thread| run_time(thread.ok()?)).sum())
}

fn status_kib(name: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("Linux tells a process's status");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let number = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    number.unwrap_or_else(|| panic!("/proc/self/status has no {name}"))
}
