//! `dlq redrive`: letters sent back, or parked, by the library's redriver.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write,
    time::{Duration, Instant},
};

use reliable_consumer::{
    Action, BuildError, ParkReason, RedriveReport, RedriveStatus, Redriver, RedriverBuilder,
    operate::Cluster,
};
use serde_json::{Value, json};
use tokio::runtime;

use crate::{
    arguments::{Connection, Format, Redrive},
    confirm::{confirm, somebody_can_answer},
    failure::Failure,
    interruptions::Interruptions,
    progress::Progress,
    table::Table,
    text,
};

/// More than these are dealt with only if somebody says yes.
const MANY: u64 = 100;
const LOOK: Duration = Duration::from_millis(500);
/// A service says this often what it has done, if it has done anything.
const NEWS: Duration = Duration::from_secs(60);

pub fn run(
    redrive: &Redrive,
    connection: &Connection,
    format: Format,
    out: &mut impl Write,
) -> Result<(), Failure> {
    redrive.filter.check()?;
    let cluster = connection.cluster(&redrive.source.group())?;
    cluster.partitions(&redrive.source.topic)?;
    redrive.require_targets(&cluster)?;
    let runtime = runtime::Builder::new_multi_thread().enable_all().build()?;
    if redrive.follow {
        redrive.require_parking_lot(&cluster)?;
        let ended = runtime.block_on(redrive.deal(connection, 0))?;
        return redrive.tell(&ended.report, false, format, out);
    }
    let plan = runtime.block_on(redrive.look(connection))?;
    if redrive.dry_run {
        return redrive.tell(&plan, true, format, out);
    }
    let count = plan.redriven_total() + plan.parked_total();
    if plan.parked_total() > 0 {
        redrive.require_parking_lot(&cluster)?;
    }
    if let Some(question) = redrive.question(&plan, somebody_can_answer()) {
        confirm(&question)?;
    }
    let ended = runtime.block_on(redrive.deal(connection, count))?;
    redrive.tell(&ended.report, false, format, out)?;
    if let Some(reason) = &ended.report.not_noted {
        return Err(Failure::InPart(format!(
            "what was sent is not noted for the redriver without a filter, which will send it again; the same command, run \
             again, notes it: {reason}"
        )));
    }
    match ended {
        Ended { stopped: true, .. } => Err(Failure::InPart(
            "stopped before all was done; the rest is still open: run it again".into(),
        )),
        Ended { report, .. } if report.waiting > 0 || !report.left.is_empty() => Err(
            Failure::InPart("some letters could not be dealt with, and are still there".into()),
        ),
        Ended { .. } => Ok(()),
    }
}

struct Ended {
    report: RedriveReport,
    stopped: bool,
}

impl Redrive {
    fn builder(&self, connection: &Connection) -> Result<RedriverBuilder, Failure> {
        let topic = &self.source.topic;
        let mut builder = Redriver::builder()
            .dead_letter_topic(topic)
            .group_id(self.source.group())
            .threshold(self.threshold)
            .retry_topics(&self.retry_topic)
            .filter(self.filter.letters());
        if topic.ends_with(".parked") {
            builder = builder.action(Action::Unpark);
        }
        if !self.follow {
            builder = builder.once();
        }
        for topic in &self.to {
            builder = builder.allow(topic);
        }
        for pattern in &self.to_pattern {
            builder = builder.allow_pattern(pattern);
        }
        if let Some(rate) = self.rate {
            builder = builder.rate_limit(rate);
        }
        builder = builder.parking_lot(self.parking_lot());
        if let Some(group) = &self.for_group {
            builder = builder.for_group(group);
        }
        if self.topic_per_group {
            builder = builder.topic_per_group();
        }
        for (name, value) in connection.properties(std::env::vars_os())? {
            builder = builder.property(name, value);
        }
        Ok(builder)
    }

    fn redriver(&self, connection: &Connection) -> Result<Redriver, Failure> {
        if self.to.is_empty() && self.to_pattern.is_empty() {
            let message = "where may records be sent back to? Name topics with --to or --to-pattern: headers alone are no \
                           reason to send anything anywhere";
            return Err(Failure::Usage(message.into()));
        }
        let built = self.builder(connection)?.build();
        built.map_err(|error| {
            Failure::Usage(match error {
                BuildError::Invalid {
                    what: "an allowed topic",
                    value,
                    reason,
                } => format!("--to cannot be {value}: {reason}"),
                error => error.to_string(),
            })
        })
    }

    /// A slip in such a name would park whatever came from the topic that was meant.
    fn require_targets(&self, cluster: &Cluster) -> Result<(), Failure> {
        if self.topic_per_group {
            // None of these is sent to, and some may be gone.
            return Ok(());
        }
        for topic in &self.to {
            cluster.partitions(topic)?;
        }
        Ok(())
    }

    /// What somebody has to say yes to. That letters would be parked since no `--to` names their topic is asked only where
    /// somebody can answer: for a script it may be what is wanted.
    fn question(&self, plan: &RedriveReport, somebody_can_answer: bool) -> Option<String> {
        let untrusted = *plan.parked.get(&ParkReason::Untrusted).unwrap_or(&0);
        let (back, parked) = (plan.redriven_total(), plan.parked_total());
        let asks = back + parked > MANY || untrusted > 0 && somebody_can_answer;
        if self.yes || !asks {
            return None;
        }
        let mut question = format!(
            "of {}, {} would be sent back and {parked} parked",
            self.source.topic,
            text::count(back, "letter")
        );
        if untrusted > 0 {
            question += &format!(
                ", {untrusted} of them as untrusted: they name no topic that --to or --to-pattern allows"
            );
        }
        Some(question)
    }

    fn parking_lot(&self) -> String {
        let named = self.parking_lot.clone();
        named.unwrap_or_else(|| format!("{}.parked", self.source.topic))
    }

    /// Letters that are to be parked would wait for it.
    fn require_parking_lot(&self, cluster: &Cluster) -> Result<(), Failure> {
        let lot = self.parking_lot();
        match cluster.find(&lot)? {
            Some(_) => Ok(()),
            None => Err(Failure::NotFound(format!(
                "there is no topic {lot} for what cannot be sent back; `topics create-dlq` makes it. Nothing was changed"
            ))),
        }
    }

    /// What would be done.
    async fn look(&self, connection: &Connection) -> Result<RedriveReport, Failure> {
        let redriver = self.redriver(connection)?;
        let handle = redriver.handle();
        let mut progress = Progress::new("looking", 0);
        let mut looking = std::pin::pin!(redriver.dry_run());
        loop {
            tokio::select! {
                report = &mut looking => return report.map_err(|error| Failure::Refused(error.to_string())),
                () = tokio::time::sleep(LOOK) => progress.at(handle.report().finished_total()),
            }
        }
    }

    async fn deal(&self, connection: &Connection, count: u64) -> Result<Ended, Failure> {
        let redriver = self.redriver(connection)?;
        let handle = redriver.handle();
        let mut progress = Progress::new("sending back", count);
        let mut told = BTreeSet::new();
        let mut news = News::new(Instant::now());
        let mut stopped = false;
        let mut interruptions = Interruptions::new()?;
        let mut running = std::pin::pin!(redriver.run().into_future());
        let report = loop {
            tokio::select! {
                report = &mut running => break report.map_err(|error| Failure::Refused(error.to_string()))?,
                () = tokio::time::sleep(LOOK) => {
                    let Ok(status) = handle.status().await else {
                        continue;
                    };
                    watch(&status, &mut progress, &mut told);
                    if self.follow && let Some(news) = news.of(&status.report, Instant::now()) {
                        progress.say(&news);
                    }
                }
                signal = interruptions.next() => {
                    signal?;
                    // A second one ends it at once. Errors mean that it has ended already.
                    let _ = if stopped { handle.stop_now() } else { handle.shutdown() };
                    stopped = true;
                }
            }
        };
        Ok(Ended {
            report,
            stopped: stopped && !self.follow,
        })
    }

    fn tell(
        &self,
        report: &RedriveReport,
        dry: bool,
        format: Format,
        out: &mut impl Write,
    ) -> Result<(), Failure> {
        let reasons = |counts: &BTreeMap<_, u64>| -> Vec<(String, u64)> {
            let counts = counts.iter();
            counts
                .map(|(reason, count): (&reliable_consumer::ParkReason, _)| {
                    (reason.to_string(), *count)
                })
                .collect()
        };
        let (parked, left) = (reasons(&report.parked), reasons(&report.left));
        if format == Format::Json {
            let object = |counts: &[(String, u64)]| -> Value {
                let counts = counts
                    .iter()
                    .map(|(name, count)| (name.clone(), json!(count)));
                Value::Object(counts.collect())
            };
            let value = json!({
                "topic": self.source.topic,
                "dryRun": dry,
                "redriven": report.redriven,
                "parked": object(&parked),
                "left": object(&left),
                "notMeant": report.filtered,
                "doneBefore": report.done_before,
                "waiting": report.waiting,
            });
            writeln!(out, "{}", text::json_line(&value))?;
            return Ok(());
        }
        let (back, park) = match dry {
            true => ("would be sent back to", "would be parked:"),
            false => ("sent back to", "parked:"),
        };
        let mut table = Table::new(["#LETTERS", "WHAT"]);
        for (topic, count) in &report.redriven {
            table.row([count.to_string(), format!("{back} {topic}")]);
        }
        for (reason, count) in &parked {
            table.row([count.to_string(), format!("{park} {reason}")]);
        }
        for (reason, count) in &left {
            table.row([count.to_string(), format!("left where they are: {reason}")]);
        }
        for (count, what) in [
            (report.filtered, "not meant"),
            (report.done_before, "done already"),
            (report.waiting, "still waiting"),
        ] {
            if count > 0 {
                table.row([count.to_string(), what.into()]);
            }
        }
        match table.is_empty() {
            true => {
                let topic = &self.source.topic;
                // A second run with the same filter does not read again what it does not mean.
                let hint = match self.filter.letters().is_all() {
                    true => String::new(),
                    false => {
                        format!(" of what the filter means; `dlq list {topic}` shows what is open")
                    }
                };
                writeln!(out, "There is nothing to send back in {topic}{hint}.")?;
            }
            false => table.write(out)?,
        }
        Ok(())
    }
}

fn watch(status: &RedriveStatus, progress: &mut Progress, told: &mut BTreeSet<String>) {
    let report = &status.report;
    progress.at(report.redriven_total() + report.parked_total());
    for (topic, error) in &status.stalled {
        if told.insert(topic.clone()) {
            let error = text::line(error.as_bytes(), 300);
            progress.say(&format!(
                "{topic} does not take what is sent to it, and is tried again: {error}"
            ));
        }
    }
}

/// What a service tells now and then.
struct News {
    next: Instant,
    told: (u64, u64),
}

impl News {
    fn new(now: Instant) -> Self {
        Self {
            next: now + NEWS,
            told: (0, 0),
        }
    }

    fn of(&mut self, report: &RedriveReport, now: Instant) -> Option<String> {
        let done = (report.redriven_total(), report.parked_total());
        if now < self.next || done == self.told {
            return None;
        }
        (self.next, self.told) = (now + NEWS, done);
        let (back, parked) = done;
        Some(format!(
            "{}: sent back {back}, parked {parked}, waiting {}",
            crate::time::shown(crate::time::now()),
            report.waiting
        ))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::arguments::{Arguments, Command, Dlq};

    fn redrive(more: &str) -> Redrive {
        let line = format!("reliable-consumer dlq redrive orders.dlq --to orders {more}");
        match Arguments::parse_from(line.split_whitespace()).command {
            Command::Dlq(Dlq::Redrive(redrive)) => redrive,
            other => panic!("{other:?}"),
        }
    }

    fn plan(back: u64, exhausted: u64, untrusted: u64) -> RedriveReport {
        let mut plan = RedriveReport::default();
        plan.redriven.insert("orders".into(), back);
        plan.parked.insert(ParkReason::Exhausted, exhausted);
        plan.parked.insert(ParkReason::Untrusted, untrusted);
        plan
    }

    #[test]
    fn many_letters_and_on_a_terminal_untrusted_ones_need_a_yes() {
        let asked = |plan: &RedriveReport, terminal| redrive("").question(plan, terminal);
        assert_eq!(asked(&plan(90, 10, 0), true), None);
        assert_eq!(asked(&plan(0, 0, 8), false), None, "a script goes on");
        let many = asked(&plan(91, 10, 0), false).unwrap();
        assert_eq!(
            many,
            "of orders.dlq, 91 letters would be sent back and 10 parked"
        );
        let slip = asked(&plan(0, 0, 8), true).unwrap();
        assert!(slip.contains("8 of them as untrusted"), "{slip}");
        assert_eq!(redrive("--yes").question(&plan(101, 0, 8), true), None);
    }

    #[test]
    fn a_service_tells_once_a_minute_what_it_has_done_and_nothing_if_it_did_nothing() {
        let start = Instant::now();
        let mut news = News::new(start);
        let minute = |n: u32| start + NEWS * n;
        assert_eq!(news.of(&plan(5, 0, 0), start), None);
        let told = news.of(&plan(5, 1, 0), minute(1)).unwrap();
        assert!(told.ends_with("sent back 5, parked 1, waiting 0"), "{told}");
        assert_eq!(news.of(&plan(6, 1, 0), minute(1)), None);
        assert_eq!(news.of(&plan(5, 1, 0), minute(2)), None);
        assert!(news.of(&plan(6, 1, 0), minute(3)).is_some());
    }
}
