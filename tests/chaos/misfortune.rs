//! What tests need that treat processes badly: chance from a seed, signals, children that do not outlive their test.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::{
    env,
    ffi::OsStr,
    fs::{self, File},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{self, Child, Command, Stdio},
    str::FromStr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// Should this process be killed, or interrupted, its children still end: also one that is frozen just then.
///
/// Process ids are used again: only one with this argument is ours.
fn end_with_us(child: &Child, argument: impl AsRef<OsStr>) {
    let watch = r#"
        ours() { tr '\0' '\n' </proc/$1/cmdline | grep -qxF "$2"; }
        (while ours "$@"; do kill -0 $0 || { ours "$@" && kill -KILL $1; }; sleep 1; done) &
    "#;
    let started = Command::new("sh")
        .args(["-c", watch])
        .args([process::id().to_string(), child.id().to_string()])
        .arg(argument)
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    assert!(started.unwrap().success());
}

pub(crate) fn signal(process: &Child, signal: &str) {
    let sent = Command::new("kill")
        .args([signal, &process.id().to_string()])
        .status();
    assert!(sent.unwrap().success(), "kill {signal}");
}

/// Starts an example of ours that logs to a file, and ends with us: known by this argument, which no other has.
pub(crate) fn start(command: &mut Command, log: &Path, argument: impl AsRef<OsStr>) -> Child {
    let started = command
        .env("RUST_LOG", "reliable_consumer=debug,info")
        .env("NO_COLOR", "1")
        .stdin(Stdio::null())
        .stderr(File::create(log).unwrap())
        .spawn();
    let process = started.unwrap();
    end_with_us(&process, argument);
    process
}

/// Waits for the orderly end of a process that was told to, for so long since then.
pub(crate) fn assert_ends(process: &mut Child, told: Instant, limit: Duration, who: &str) {
    let status = loop {
        if let Some(status) = process.try_wait().unwrap() {
            break status;
        }
        assert!(told.elapsed() < limit, "{who} did not end within {limit:?}");
        thread::sleep(Duration::from_millis(20));
    };
    assert!(status.success(), "{who} ended with {status}");
}

/// Ends what has not: with a failing test also those that are frozen. What a test that passes has written is removed.
pub(crate) fn clean_up<'a>(
    processes: impl Iterator<Item = &'a mut Child>,
    folder: &Path,
    name: &str,
) {
    for process in processes {
        let _ = process.kill();
        let _ = process.wait();
    }
    if thread::panicking() {
        println!(
            "{name}: what the processes wrote is in {}",
            folder.display()
        );
    } else {
        let _ = fs::remove_dir_all(folder);
    }
}

/// `cargo test` builds examples next to its tests.
pub(crate) fn example(name: &str) -> PathBuf {
    let test = env::current_exe().unwrap();
    let examples = test.ancestors().nth(2).unwrap().join("examples");
    let program = examples.join(name);
    assert!(
        program.exists(),
        "build it first: cargo build --example {name}"
    );
    program
}

/// What the system tells of a process under this name.
pub(crate) fn status(process: &Child, name: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{}/status", process.id())).ok()?;
    let value = status.lines().find_map(|line| line.strip_prefix(name))?;
    Some(value.trim().to_owned())
}

pub(crate) fn heeds_sigterm(process: &Child) -> bool {
    const SIGTERM: u32 = 15;
    let caught = status(process, "SigCgt:").and_then(|mask| u64::from_str_radix(&mask, 16).ok());
    caught.is_some_and(|mask| mask >> (SIGTERM - 1) & 1 == 1)
}

pub(crate) struct SetOnDrop<'a>(pub(crate) &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

pub(crate) fn variable<T: FromStr>(name: &str) -> Option<T> {
    let text = env::var(name).ok().filter(|text| !text.is_empty())?;
    let value = text.parse().ok();
    Some(value.unwrap_or_else(|| panic!("{name}={text} is not understood")))
}

/// Unix milliseconds.
pub(crate) fn now() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
    since_epoch.unwrap().as_millis() as u64
}

/// Xorshift: which victim, which misfortune.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        // Small seeds would begin with small numbers, and zero would stay zero.
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    pub(crate) fn pause(&mut self, millis: std::ops::Range<u64>) {
        let millis = millis.start + self.below(millis.end - millis.start);
        thread::sleep(Duration::from_millis(millis));
    }
}
