//! Asking before much is changed.

use std::io::{self, BufRead, IsTerminal, Write};

use crate::failure::Failure;

pub fn somebody_can_answer() -> bool {
    io::stdin().is_terminal() && io::stderr().is_terminal()
}

/// Asks on a terminal. Where nobody can answer, the answer is no.
pub fn confirm(what: &str) -> Result<(), Failure> {
    let stdin = io::stdin();
    if !somebody_can_answer() {
        let message = format!("{what}, and there is nobody to ask: say --yes");
        return Err(Failure::NotConfirmed(message));
    }
    eprint!("{what}. Go on? [y/N] ");
    io::stderr().flush()?;
    let mut answer = String::new();
    stdin.lock().read_line(&mut answer)?;
    match answer.trim() {
        "y" | "Y" | "yes" => Ok(()),
        _ => Err(Failure::NotConfirmed(what.to_owned())),
    }
}
