//! `dlq redrive`: letters sent back, or parked, by the library's redriver.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write,
    time::Duration,
};

use reliable_consumer::{
    Action, RedriveHandle, RedriveReport, Redriver, RedriverBuilder, operate::Cluster,
};
use serde_json::{Value, json};
use tokio::runtime;

use crate::{
    arguments::{Connection, Format, Redrive},
    confirm::confirm,
    failure::Failure,
    interruptions::Interruptions,
    progress::Progress,
    table::Table,
    text,
};

/// More than these are dealt with only if somebody says yes.
const MANY: u64 = 100;
const LOOK: Duration = Duration::from_millis(500);

pub fn run(
    redrive: &Redrive,
    connection: &Connection,
    format: Format,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let cluster = connection.cluster(&redrive.source.group())?;
    cluster.partitions(&redrive.source.topic)?;
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
    if count > MANY && !redrive.yes {
        let (back, parked) = (plan.redriven_total(), plan.parked_total());
        let topic = &redrive.source.topic;
        confirm(&format!(
            "of {topic}, {back} letters are sent back and {parked} are parked"
        ))?;
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
        built.map_err(|error| Failure::Usage(error.to_string()))
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
        let mut stopped = false;
        let mut interruptions = Interruptions::new()?;
        let mut running = std::pin::pin!(redriver.run().into_future());
        let report = loop {
            tokio::select! {
                report = &mut running => break report.map_err(|error| Failure::Refused(error.to_string()))?,
                () = tokio::time::sleep(LOOK) => watch(&handle, &mut progress, &mut told).await,
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
            true => writeln!(
                out,
                "There is nothing to send back in {}.",
                self.source.topic
            )?,
            false => table.write(out)?,
        }
        Ok(())
    }
}

async fn watch(handle: &RedriveHandle, progress: &mut Progress, told: &mut BTreeSet<String>) {
    let Ok(status) = handle.status().await else {
        return;
    };
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
