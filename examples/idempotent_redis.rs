//! Welcome e-mails for sign-ups, each sent once although the sign-up is produced twice and the service dies: the consumer
//! asks Redis before it calls the handler, and notes there what is done.
//!
//! It dies twice. Before an e-mail: what was in progress is handled by the next process, as soon as its lease has lapsed.
//! Right after an e-mail, before Redis knows of it: that one is sent again, and so may be the others that were in progress.
//! No store can help it, see "what no store can do" in the documentation of `idempotency`; `inbox_postgres` shows what has
//! no such gap.
//!
//! Without arguments it is the supervisor, which starts this program again as the service and counts the e-mails at the
//! end. It takes the brokers from `KAFKA_BROKERS`, Redis from `REDIS_URL`, makes a topic of its own, ends within 30 s, and
//! with 0 if nothing is missing, and nothing was sent twice but for that.

mod common;

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::Write,
    os::unix::process::ExitStatusExt,
    path::Path,
    process::ExitCode,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use reliable_consumer::{
    Handler, HandlerResult, Json, Message, ReliableConsumer,
    idempotency::{IdSource, Idempotency, RedisStore},
};
use tokio::{process::Command, time::sleep};

const SIGN_UPS: usize = 300;
const CONCURRENCY: usize = 16;

#[derive(serde::Deserialize)]
struct SignUp {
    email: String,
}

struct Welcome {
    /// Stands for the mail server.
    sent: File,
    crash: common::Crash,
}

impl Handler<Json<SignUp>> for Welcome {
    async fn handle(&self, message: &Message<Json<SignUp>>) -> HandlerResult {
        sleep(Duration::from_millis(5)).await;
        self.crash.here("before-a-mail");
        (&self.sent).write_all(format!("{}\n", message.payload().email).as_bytes())?;
        self.crash.here("after-a-mail");
        Ok(())
    }
}

/// The service: welcomes whoever there is, and ends.
async fn serve(name: &str, sent: &str, crash: common::Crash) -> common::Result<()> {
    let url = std::env::var("REDIS_URL").unwrap_or_else(|_| "redis://localhost:6379/".into());
    let idempotency = Idempotency::new(RedisStore::connect(&url)?)
        // Each sign-up has a key of its own. The default is the header `messageId`.
        .id(IdSource::Key)
        // So short that the example need not wait for long; 10 s is the default.
        .lease(Duration::from_secs(2))
        .keep_for(Duration::from_secs(600));
    let consumer = ReliableConsumer::builder()
        .bootstrap_servers(common::brokers())
        .group_id(name)
        .topic(name)
        .concurrency(CONCURRENCY)
        .idempotency(idempotency)
        // With a name that outlives the process, its successor need not wait until the group has noticed the death.
        .property("group.instance.id", "the-only-one")
        .build()?;
    let sent = OpenOptions::new().create(true).append(true).open(sent)?;
    let done = common::caught_up(consumer.handle());
    let run = consumer.run(Welcome { sent, crash });
    let report = run.with_graceful_shutdown(done).await?;
    println!(
        "handled {}, passed over {} repeats",
        report.handled,
        report.duplicates.total()
    );
    Ok(())
}

#[tokio::main]
async fn main() -> common::Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [name, sent, place] = &arguments[..] {
        serve(name, sent, common::Crash::at(place.clone())).await?;
        return Ok(ExitCode::SUCCESS);
    }
    common::checked(30, supervise()).await
}

async fn supervise() -> common::Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
    let name = format!("example-idempotent-{now}");
    let sent = std::env::temp_dir().join(&name);
    common::create_topics([&name], 4).await?;
    let sign_ups = (0..SIGN_UPS).map(|n| {
        let value = format!(r#"{{"email": "user-{n}@example.com"}}"#);
        (format!("sign-up-{n}"), value)
    });
    common::produce(&name, sign_ups.clone().chain(sign_ups)).await?;

    for crash in ["before-a-mail", "after-a-mail", "never"] {
        let mut service = Command::new(std::env::current_exe()?)
            .arg(&name)
            .arg(&sent)
            .arg(crash)
            .kill_on_drop(true)
            .spawn()?;
        let status = service.wait().await?;
        let sent = count(&sent)?.values().sum::<usize>();
        match (status.signal(), crash) {
            (Some(signal), "before-a-mail" | "after-a-mail") => {
                println!("killed by signal {signal} {crash}: {sent} e-mails; starting it again");
            }
            (None, "never") if status.success() => println!("it came to the end"),
            _ => return Err(format!("to crash {crash}, the service ended by {status}").into()),
        }
    }

    let mails = count(&sent)?;
    let twice: Vec<_> = mails.iter().filter(|(_, times)| **times > 1).collect();
    println!(
        "{SIGN_UPS} sign-ups, produced twice: {} people have an e-mail, {} of them two, by the crash right after it",
        mails.len(),
        twice.len()
    );
    let all_had_theirs = mails.len() == SIGN_UPS;
    let none_had_three = mails.values().all(|times| *times <= 2);
    if !all_had_theirs || !none_had_three || !(1..=CONCURRENCY).contains(&twice.len()) {
        return Err(format!(
            "it should be all, and from 1 to {CONCURRENCY}: {}",
            sent.display()
        )
        .into());
    }
    std::fs::remove_file(sent)?;
    Ok(())
}

/// How many e-mails there are to each address.
fn count(sent: &Path) -> common::Result<BTreeMap<String, usize>> {
    let mut mails = BTreeMap::new();
    for address in std::fs::read_to_string(sent)?.lines() {
        *mails.entry(address.to_owned()).or_default() += 1;
    }
    Ok(mails)
}
