//! The operator's command line: what failed, why, and where everything stands.

mod arguments;
mod confirm;
mod connection;
mod dlq;
mod elasticsearch;
mod failure;
mod filter;
mod interruptions;
mod lag;
mod letter;
mod members;
mod place;
mod progress;
mod table;
mod text;
mod time;
mod topics;

use std::{
    io::{self, BufWriter, Write},
    process::ExitCode,
};

use clap::{CommandFactory, Parser};

use self::{
    arguments::{Arguments, Command},
    failure::Failure,
};

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let mut out = BufWriter::new(io::stdout().lock());
    let done = run(&arguments, &mut out);
    // What is there is shown, also when something failed after it.
    let done = out.flush().map_err(Failure::from).and(done);
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !failure.is_silent() {
                // Errors may quote what brokers said.
                let message = failure.to_string();
                eprintln!("error: {}", text::line(message.as_bytes(), 2_000));
            }
            failure.exit_code()
        }
    }
}

fn run(arguments: &Arguments, out: &mut impl Write) -> Result<(), Failure> {
    let Arguments {
        connection,
        output,
        command,
    } = arguments;
    match command {
        Command::Dlq(command) => dlq::run(command, connection, *output, out),
        Command::Lag(command) => lag::run(command, connection, *output, out),
        Command::Topics(command) => topics::run(command, connection, *output, out),
        Command::Completions { shell } => {
            // The generator panics on a pipe that is closed.
            let mut script = Vec::new();
            clap_complete::generate(
                *shell,
                &mut Arguments::command(),
                "reliable-consumer",
                &mut script,
            );
            Ok(out.write_all(&script)?)
        }
    }
}
