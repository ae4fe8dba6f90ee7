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
    match is_yes(&answer) {
        true => Ok(()),
        false => Err(Failure::NotConfirmed(what.to_owned())),
    }
}

fn is_yes(answer: &str) -> bool {
    matches!(answer.trim(), "y" | "Y" | "yes")
}

#[cfg(test)]
mod tests {
    use super::is_yes;

    #[test]
    fn only_a_yes_is_one() {
        assert!(["y\n", "Y\r\n", "yes"].into_iter().all(is_yes));
        // The second is that of somebody who has hung up.
        assert!(
            !["\n", "", "n\n", "yellow\n", "no\n"]
                .into_iter()
                .any(is_yes)
        );
    }
}
