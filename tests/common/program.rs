//! The program `reliable-consumer`, and what a run of it has left.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::process::{Command, Output, Stdio};

/// What a run of the program has left.
#[derive(Debug)]
pub struct Ended {
    pub code: i32,
    pub out: String,
    pub err: String,
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
