//! Giving partitions away: drain, commit, end.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::pump::{Held, Pump};
use crate::{
    consumer::PartitionReport,
    engine::{self, Counts, Guarantee, Ownership, RecordState},
    record::Source,
};

impl Pump {
    pub(super) fn owners(&self) -> Vec<Ownership> {
        self.held.iter().flatten().map(|held| held.owner).collect()
    }

    pub(super) fn begin_drain(&mut self, owners: &[Ownership], until: Instant) {
        // At most once, what is committed already is handled here or nowhere.
        if self.settings.engine.guarantee == Guarantee::AtLeastOnce {
            self.close_fences(owners, until);
        }
        for owner in owners {
            self.engine.drain(*owner);
        }
        self.take_back();
    }

    /// Batches that no executor has taken yet would otherwise wait for one to be free.
    pub(super) fn take_back(&mut self) {
        for work in self.context.queue.take_unwanted(&self.context.recall) {
            self.engine.not_started(work.batch.owner, work.batch.jobs);
        }
    }

    /// What has not started does not start any more.
    pub(super) fn close_fences(&self, owners: &[Ownership], until: Instant) {
        for owner in owners {
            if let Some(held) = &self.held[owner.slot()] {
                held.fence.close(until);
            }
        }
        self.context.fence_closed();
    }

    pub(super) fn drained(&self) -> bool {
        self.held
            .iter()
            .flatten()
            .all(|held| self.engine.is_drained(held.owner))
    }

    /// The drain of a rebalance: other partitions go on meanwhile.
    pub(super) fn drain_until(
        &mut self,
        consumer: &super::BaseConsumer,
        owners: &[Ownership],
        until: Instant,
    ) {
        // Between the group's question and our answer only the last commit of these partitions is sent.
        self.engine.hold_commits(true);
        self.begin_drain(owners, until);
        loop {
            let worked = self.step(consumer);
            let now = Instant::now();
            if owners.iter().all(|owner| self.engine.is_drained(*owner)) {
                return;
            }
            // A run that is to end may have less time than that.
            let until = self.stop.map_or(until, |stop| until.min(stop.drain));
            if now >= until {
                for owner in owners
                    .iter()
                    .filter(|owner| !self.engine.is_drained(**owner))
                {
                    let source = self.source(*owner);
                    tracing::warn!(
                        topic = %source.topic,
                        partition = source.partition,
                        "handlers did not finish within the drain's time; their records go to the next owner"
                    );
                }
                return;
            }
            if !worked {
                let wake = self.sleep().min(until - now);
                thread::park_timeout(wake);
            }
        }
    }

    /// Commits what is finished, waiting for the answer until then, and ends the ownerships.
    pub(super) fn commit_and_end(&mut self, owners: &[Ownership], until: Instant) {
        self.commit_all(owners, until);
        // What has finished meanwhile is not committed any more; should the partition come back, it is remembered.
        while self.take_reports() {}
        for owner in owners {
            if self.engine.commit_is_due(&[*owner]) {
                self.lose(*owner);
            } else {
                self.end(*owner);
            }
        }
    }

    /// Commits what is finished and waits for the answer. `false`: trying again may help.
    pub(super) fn commit_all(&mut self, owners: &[Ownership], until: Instant) -> bool {
        let mut sent = false;
        loop {
            self.take_controls();
            let until = self.stop.map_or(until, |stop| until.min(stop.commit));
            let now = Instant::now();
            let left = until.saturating_duration_since(now);
            self.engine.advance(now);
            if self.engine.commit_in_flight() {
                self.take_commit_answer(left.min(Duration::from_millis(50)));
            } else if !left.is_zero()
                && let Some(commit) = self.engine.final_commit(owners, sent)
            {
                self.send_commit(&commit);
                sent = true;
            } else if let Some(at) = self.engine.last_commit_retry(owners) {
                thread::park_timeout(left.min(at.saturating_duration_since(now)));
            } else {
                break;
            }
            if left.is_zero() {
                tracing::warn!(
                    "a last commit was not answered in time; what it carried may be handled again"
                );
                break;
            }
        }
        self.commits_refused || !self.engine.commit_is_due(owners)
    }

    /// Ends an ownership whose last state could not be committed, and remembers that state: the partition may come back.
    pub(super) fn lose(&mut self, owner: Ownership) {
        let Some(held) = &self.held[owner.slot()] else {
            return;
        };
        let place = (Arc::clone(&held.source.topic), held.source.partition);
        if let Some(finished) = self.engine.finished_above_committed(owner) {
            self.remembered.insert(place, finished);
        }
        self.end(owner);
    }

    /// Ends an ownership at once: what is out for it is out for nobody.
    pub(super) fn end(&mut self, owner: Ownership) {
        let Some(held) = self.held[owner.slot()].take() else {
            return;
        };
        held.fence.close(Instant::now());
        if let Some(keys) = &self.context.held_keys {
            keys.forget(&held.source.topic, held.source.partition);
        }
        self.context.fence_closed();
        if held.prefetch.is_paused() {
            let Source {
                topic, partition, ..
            } = &*held.source;
            self.left_paused.push((Arc::clone(topic), *partition));
        }
        // The next owner sends it: two would make two dead letters, and during an outage ever more would wait.
        self.dead_letters.retain(|(sender, task)| {
            if *sender == owner {
                task.abort();
            }
            *sender != owner
        });
        if let Some(last) = self.engine.end(owner) {
            self.add_to_report(&held.source, last);
        }
    }

    pub(super) fn add_to_report(&mut self, source: &Source, last: engine::PartitionStatus) {
        let Counts {
            received,
            already_finished,
            handled,
            skipped,
            for_others,
            dead_lettered,
            moved,
            dropped,
            retried,
            postponed,
            outages,
        } = last.counts;
        let report = &mut self.report;
        report.received += received;
        report.already_finished += already_finished;
        report.handled += handled;
        report.skipped += skipped;
        report.redriven_for_others += for_others;
        report.dead_lettered += dead_lettered;
        report.moved_to_retry += moved;
        report.dropped += dropped;
        report.retried += retried;
        report.postponed += postponed;
        report.outages += outages;
        report.committed_unhandled += last.committed_left as u64;
        report.abandoned += last.running as u64;
        report.unstarted +=
            (last.queued + last.delayed + last.retrying + last.dead_lettering) as u64;
        let Source {
            topic, partition, ..
        } = source;
        report
            .partitions
            .retain(|known| known.topic != *topic || known.partition != *partition);
        report.partitions.push(PartitionReport {
            topic: Arc::clone(topic),
            partition: *partition,
            committed: last.committed,
            committable: last.committable,
        });
    }

    /// Where handlers are at work, and how many.
    pub(super) fn handlers_at_work(&self) -> impl Iterator<Item = (&Held, usize)> {
        let held = self.held.iter().flatten();
        held.filter_map(|held| Some((held, self.engine.status(held.owner)?.running)))
            .filter(|(_, running)| *running > 0)
    }

    /// Tells of those that are about to be cancelled.
    pub(super) fn tell_of_abandoned_handlers(&self) {
        for (held, handlers) in self.handlers_at_work() {
            let oldest = self
                .engine
                .head(held.owner)
                .filter(|head| head.state == RecordState::Running);
            let oldest = oldest.or_else(|| self.engine.running_behind(held.owner));
            tracing::warn!(
                topic = %held.source.topic,
                partition = held.source.partition,
                handlers,
                oldest_offset = oldest.map(|record| record.offset),
                "handlers did not finish within the shutdown's time and are abandoned: see what they wait for, or raise \
                 `shutdown_timeout`"
            );
        }
    }

    /// Cancels what handlers still do.
    pub(super) fn abort_handlers(&mut self) {
        let dead_letters = self.dead_letters.drain(..).map(|(_, task)| task);
        for task in self.executors.drain(..).chain(dead_letters) {
            task.abort();
        }
    }
}
