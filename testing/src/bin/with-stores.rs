//! Runs a command beside Redis and PostgreSQL: at `REDIS_URL` and `POSTGRES_URL` where these are set, else started from the
//! system's packages and stopped afterwards. Ends as the command does.

use std::{
    env,
    process::{Command, ExitCode},
};

use reliable_consumer_testing::{ServiceKind, service};

fn main() -> ExitCode {
    let mut arguments = env::args_os().skip(1);
    let Some(program) = arguments.next() else {
        eprintln!("usage: with-stores COMMAND [ARGUMENT]...");
        return ExitCode::from(2);
    };
    let mut command = Command::new(program);
    command.args(arguments);
    for (variable, kind) in [
        ("REDIS_URL", ServiceKind::Redis),
        ("POSTGRES_URL", ServiceKind::Postgres),
    ] {
        let Some(store) = service(kind) else {
            return ExitCode::FAILURE;
        };
        command.env(variable, store.url());
    }
    match command.status() {
        // By a signal there is no code.
        Ok(status) => status.code().map_or(ExitCode::FAILURE, |code| {
            ExitCode::from(u8::try_from(code).unwrap_or(1))
        }),
        Err(error) => {
            eprintln!("with-stores: {error}");
            ExitCode::FAILURE
        }
    }
}
