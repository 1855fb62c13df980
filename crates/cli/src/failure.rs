//! The failure of a subcommand: one message for the user.

use std::fmt;
use std::process::ExitCode;

/// Result of a subcommand.
pub type Outcome = Result<ExitCode, Failure>;

/// A message that names the thing, the cause and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure(String);

impl Failure {
    pub fn new(message: impl Into<String>) -> Failure {
        Failure(message.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Failure {}

/// Returns the first result if the second one is no failure. If both are failures, the message has both.
pub fn both<T>(first: Result<T, Failure>, second: Result<(), Failure>) -> Result<T, Failure> {
    match (first, second) {
        (Err(first), Err(second)) => Err(Failure(format!("{first}; {second}"))),
        (first, second) => second.and(first),
    }
}

/// Adds the failed action in front of an error.
pub trait Context<T> {
    fn context(self, doing: impl fmt::Display) -> Result<T, Failure>;
}

impl<T, E: fmt::Display> Context<T> for Result<T, E> {
    fn context(self, doing: impl fmt::Display) -> Result<T, Failure> {
        self.map_err(|e| Failure(format!("{doing}: {e}")))
    }
}

/// Prints to standard output. A reader that has gone away (`jericho stat | head`) is not an error.
pub fn print(text: &str) -> Result<(), Failure> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure(format!("cannot write to standard output: {e}")))
        }
        _ => Ok(()),
    }
}

/// Prints a value as one line of JSON.
pub fn print_json<T: serde::Serialize>(value: &T) -> Result<(), Failure> {
    let mut text = serde_json::to_string(value).context("cannot write JSON")?;
    text.push('\n');
    print(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_failure_hides_another_one() {
        let failed = |what: &str| Err(Failure::new(what));
        assert_eq!(both(Ok(1), Ok(())), Ok(1));
        assert_eq!(both(Ok(1), failed("close")), Err(Failure::new("close")));
        assert_eq!(both::<()>(failed("run"), Ok(())), Err(Failure::new("run")));
        let all = both::<()>(failed("run"), failed("close"));
        assert_eq!(all, Err(Failure::new("run; close")));
    }
}
