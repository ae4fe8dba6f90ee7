//! The engine with real threads at its other end.

use std::{
    sync::{Mutex, mpsc},
    thread,
};

use super::*;

// T12
#[test]
fn eight_threads_finish_50_000_records_in_any_order_and_the_watermark_reaches_the_end() {
    const RECORDS: i64 = 50_000;
    let mut world = World::with(Ordering::ByKey, |config| config.window = 4_096);
    let owner = world.assign(0);
    let (give, work) = mpsc::channel::<Vec<Job<i64>>>();
    let work = Arc::new(Mutex::new(work));
    let (report, reports) = mpsc::channel();
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let (work, report) = (Arc::clone(&work), report.clone());
            thread::spawn(move || {
                loop {
                    let turn = work.lock().unwrap().recv();
                    let Ok(turn) = turn else { break };
                    for job in turn {
                        report
                            .send((job.seq, job.lane, job.record))
                            .expect("the test outlives its threads");
                        thread::yield_now();
                    }
                }
            })
        })
        .collect();

    let key = |offset: i64| offset as u64 % 100;
    let mut last = vec![-1; 100];
    let (mut read, mut finished) = (0, 0);
    while finished < RECORDS {
        world.pass(Duration::from_micros(100));
        for offset in (read..RECORDS).take(world.engine.room(owner)) {
            world.receive(owner, offset, Some(key(offset)));
            read += 1;
        }
        world.hand_over();
        for turn in world.turns.drain(..) {
            give.send(turn.jobs.into())
                .expect("the threads wait for work");
        }
        let first = reports.recv_timeout(5 * SECOND);
        let first = first.expect("with records unfinished, some are with a thread");
        for (seq, lane, offset) in std::iter::once(first).chain(reports.try_iter()) {
            let before = std::mem::replace(&mut last[key(offset) as usize], offset);
            assert!(before < offset, "{offset} ran after {before} of its key");
            world.engine.finished(owner, seq, lane, Outcome::Handled);
            finished += 1;
        }
    }
    assert_eq!(world.committable(owner), RECORDS);
    assert_eq!((world.engine.bytes(), world.engine.turns_out()), (0, 0));
    drop(give);
    for thread in threads {
        thread.join().unwrap();
    }
}
