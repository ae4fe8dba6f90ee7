//! Giving partitions away: drain, commit, end.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::pump::{Held, Pump};
use crate::{
    consumer::{CommittedUnhandled, Event, PartitionReport, TopicPartition},
    engine::{self, Counts, Forfeited, Guarantee, Ownership, RecordState},
    execute::Cause,
    record::Source,
};

/// Of a drain's time, what is kept for dead letters where records do not come again.
const DEAD_LETTERS: Duration = Duration::from_secs(2);

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

    /// The drain of a rebalance: other partitions go on meanwhile with what the engine has of them.
    ///
    /// With no more, since librdkafka (2.12) pauses the fetching of all that is assigned when it asks
    /// (`rd_kafka_assignment_pause`), which also makes whatever lies in partition queues outdated, and there is no way to go
    /// on before the answer: `resume_partitions` and seeks leave the library's own pause be; an incremental assign of what is
    /// assigned is refused, and an empty one resumes nothing; the first incremental unassign, of whatever partitions, is
    /// taken for the answer. Answering later, from outside of the callback, changes nothing about that. So the answer comes
    /// as soon as nothing is awaited any more.
    pub(super) fn drain_until(
        &mut self,
        consumer: &super::BaseConsumer,
        owners: &[Ownership],
        until: Instant,
    ) {
        // Between the group's question and our answer only the last commit of these partitions is sent.
        self.engine.hold_commits(true);
        let began = Instant::now();
        self.begin_drain(owners, until);
        loop {
            let worked = self.step(consumer);
            let now = Instant::now();
            // A run that is to end may have less time than that.
            let until = self.stop.map_or(until, |stop| until.min(stop.drain));
            let cut = self.cut(owners, began, until);
            if owners.iter().all(|owner| self.engine.is_drained(*owner)) {
                return;
            }
            if now >= until {
                // At most once there is more to say, see `tell_of_forfeited`.
                let comes_again = self.settings.engine.guarantee == Guarantee::AtLeastOnce;
                for owner in owners
                    .iter()
                    .filter(|owner| comes_again && !self.engine.is_drained(**owner))
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
                thread::park_timeout(cut.map_or(wake, |cut| wake.min(cut)));
            }
        }
    }

    /// At most once, what is committed is handled before its partition goes, or set aside: nobody else does either. Of the
    /// time that a drain has, the last part is kept for dead letters; what waits for longer than that is set aside at once.
    /// Returns how long it is until then.
    pub(super) fn cut(
        &mut self,
        owners: &[Ownership],
        began: Instant,
        until: Instant,
    ) -> Option<Duration> {
        if self.settings.engine.guarantee == Guarantee::AtLeastOnce {
            return None;
        }
        let now = Instant::now();
        let time = until.saturating_duration_since(began);
        let dead_letters = match self.settings.dead_letter {
            Some(_) => DEAD_LETTERS.min(time / 2),
            None => Duration::ZERO,
        };
        let by = until - dead_letters;
        let waits = (now < by).then_some(by);
        if waits.is_none() {
            self.close_fences(owners, now);
            self.take_back();
        }
        self.settings.dead_letter.as_ref()?;
        let mut any = false;
        for owner in owners {
            any |= self.engine.cut(*owner, waits, Cause::out_of_time);
            if let (None, Some(held)) = (waits, &self.held[owner.slot()]) {
                held.fence.interrupt();
            }
        }
        if any {
            self.give_up();
        }
        waits.map(|by| by.saturating_duration_since(now))
    }

    /// At most once: what is committed and has not started in partitions that are lost is set aside as well, for as long as
    /// that takes: whoever has them now never reads it.
    pub(super) fn set_aside_what_is_lost(&mut self, owners: &[Ownership]) {
        if self.settings.dead_letter.is_none() {
            return;
        }
        self.take_back();
        for owner in owners {
            self.engine.drain(*owner);
            self.engine.cut(*owner, None, Cause::out_of_time);
        }
        self.give_up();
    }

    /// At most once: what was committed and is handled by nobody, at the moment at which that is certain.
    pub(super) fn tell_of_forfeited(&mut self, owner: Ownership) {
        let Some(forfeited) = self.engine.forfeited(owner) else {
            return;
        };
        let Forfeited {
            records,
            first_offset,
            last_offset,
            running,
            dead_lettering,
            in_doubt,
        } = forfeited;
        let partition = TopicPartition::of(self.source(owner));
        tracing::warn!(
            topic = %partition.topic,
            partition = partition.partition,
            records,
            first_offset,
            last_offset,
            running,
            dead_lettering,
            in_doubt,
            "at most once: records were committed and will not be handled, since their partition is gone or the run ends: \
             look at them in the log, raise `drain_timeout` or `shutdown_timeout`, and set a dead-letter topic if there \
             is none"
        );
        self.report.committed_unhandled += records as u64;
        self.tell(Event::CommittedUnhandled(CommittedUnhandled {
            partition,
            records,
            first_offset,
            last_offset,
            running,
            dead_lettering,
            in_doubt,
        }));
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
        self.tell_of_forfeited(owner);
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
        // The next owner sends it: two would make two dead letters, and during an outage ever more would wait. At most once
        // there is no next owner, so some go on.
        let most = match self.settings.engine.guarantee {
            Guarantee::AtLeastOnce => 0,
            Guarantee::AtMostOnce => 2 * self.settings.engine.concurrency,
        };
        let mut left = self.dead_letters.len();
        self.dead_letters.retain(|(sender, task)| {
            let kept = *sender != owner || left <= most;
            if !kept {
                task.abort();
            }
            left -= 1;
            kept
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
            void,
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
        report.void += void;
        report.retried += retried;
        report.postponed += postponed;
        report.outages += outages;
        let waiting = last.running + last.queued + last.delayed + last.retrying;
        report.abandoned += last.at_work as u64;
        report.unstarted += (waiting + last.dead_lettering - last.at_work) as u64;
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
        held.filter_map(|held| Some((held, self.engine.status(held.owner)?.at_work)))
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
