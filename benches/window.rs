//! What tracking costs: delivering records into a window and finishing all of them, per record, by how many are open
//! at a time and by the order in which they finish.
//!
//! `cargo bench --bench window --features internals`

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use criterion::{BenchmarkId, Criterion, Throughput};
use reliable_consumer::internals::Window;

const OPEN: [usize; 4] = [1_000, 10_000, 100_000, 1_000_000];

/// Sequences of one fill, in the order in which they finish.
fn orders(open: usize) -> [(&'static str, Vec<u64>); 3] {
    let ascending: Vec<u64> = (0..open as u64).collect();
    let reversed = ascending.iter().rev().copied().collect();
    let mut random = ascending.clone();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for last in (1..random.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        random.swap(last, (state % (last as u64 + 1)) as usize);
    }
    [
        ("in order", ascending),
        ("reversed", reversed),
        ("random", random),
    ]
}

/// Fills the window and empties it once, as a partition does over and over.
fn fill_and_empty(window: &mut Window, order: &[u64]) {
    let mut offset = window.committable().expect("it has a start");
    let first = window.deliver(offset);
    for _ in 1..order.len() {
        offset += 1;
        window.deliver(offset);
    }
    for seq in order {
        black_box(window.finish(first + seq));
    }
    assert_eq!(window.committable(), Some(offset + 1));
}

fn deliver_and_finish(criterion: &mut Criterion) {
    let mut table = Vec::new();
    for open in OPEN {
        let mut group = criterion.benchmark_group("deliver and finish");
        group.throughput(Throughput::Elements(open as u64));
        for (name, order) in orders(open) {
            let mut window = Window::new(open, 0);
            fill_and_empty(&mut window, &order);
            let mut best = Duration::MAX;
            group.bench_function(BenchmarkId::new(name, open), |bencher| {
                bencher.iter_custom(|rounds| {
                    let began = Instant::now();
                    for _ in 0..rounds {
                        fill_and_empty(&mut window, &order);
                    }
                    let elapsed = began.elapsed();
                    best = best.min(elapsed / rounds as u32);
                    elapsed
                });
            });
            table.push((name, open, best.as_nanos() as f64 / open as f64));
        }
        group.finish();
    }
    println!("ns per record, deliver and finish, best sample:");
    for (name, open, nanos) in table {
        println!("{name:<10} {open:>9} open {nanos:>6.2}");
    }
}

fn main() {
    let mut criterion = Criterion::default()
        .without_plots()
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1))
        .sample_size(20)
        .configure_from_args();
    deliver_and_finish(&mut criterion);
    criterion.final_summary();
}
