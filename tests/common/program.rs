//! The program `reliable-consumer`, and what a run of it has left.

#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::{
    io::Read,
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Longer than any run takes that ends.
const LONGEST: Duration = Duration::from_secs(60);

/// What a run of the program has left.
#[derive(Debug)]
pub struct Ended {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl From<Command> for Ended {
    fn from(mut command: Command) -> Self {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        output(command.spawn().unwrap()).into()
    }
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code().expect("it was not killed"),
            out: String::from_utf8(output.stdout).expect("output is text"),
            err: String::from_utf8(output.stderr).expect("output is text"),
        }
    }
}

impl Ended {
    #[track_caller]
    pub fn well(self) -> Self {
        assert_eq!(self.code, 0, "{self:?}");
        self
    }

    #[track_caller]
    pub fn with(self, code: i32, words: &str) -> Self {
        assert_eq!(self.code, code, "{self:?}");
        assert!(self.err.contains(words), "{words}: {self:?}");
        self
    }

    /// One object a line.
    #[track_caller]
    pub fn json(&self) -> Vec<serde_json::Value> {
        let lines = self.out.lines();
        lines
            .map(|line| serde_json::from_str(line).expect(line))
            .collect()
    }

    pub fn contains(&self, words: &str) -> bool {
        self.out.contains(words)
    }
}

/// It knows of no cluster but the one that these arguments name.
pub fn program(arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_reliable-consumer"));
    command
        .env_remove("KAFKA_BROKERS")
        .env_remove("RELIABLE_CONSUMER_CONFIG")
        .stdin(Stdio::null())
        .args(arguments.split_whitespace());
    command
}

/// What a program has left when it has ended. One that goes on for too long is killed, and what it had said is shown.
#[track_caller]
pub fn output(child: Child) -> Output {
    output_watched(child, || ())
}

/// The same, with something to do while it runs.
#[track_caller]
pub fn output_watched(mut child: Child, mut watch: impl FnMut()) -> Output {
    let stdout = child.stdout.take().map(in_background);
    let stderr = child.stderr.take().map(in_background);
    let deadline = Instant::now() + LONGEST;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break Some(status);
        }
        if Instant::now() >= deadline {
            child.kill().unwrap();
            child.wait().unwrap();
            break None;
        }
        watch();
        thread::sleep(Duration::from_millis(2));
    };
    let said = |reading: Option<thread::JoinHandle<Vec<u8>>>| {
        reading.map_or_else(Vec::new, |it| it.join().unwrap())
    };
    let (stdout, stderr) = (said(stdout), said(stderr));
    let Some(status) = status else {
        let (out, err) = (
            String::from_utf8_lossy(&stdout),
            String::from_utf8_lossy(&stderr),
        );
        panic!("it does not end: {out}\n{err}");
    };
    Output {
        status,
        stdout,
        stderr,
    }
}

fn in_background(mut pipe: impl Read + Send + 'static) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).unwrap();
        bytes
    })
}
