//! Runs commands and waits for conditions, in every suite of this crate.
#![allow(dead_code)] // each suite uses its own part

use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Limit of every wait. Only a hang takes this long.
pub const LONG: Duration = Duration::from_secs(90);

/// Runs a command and returns its output. Panics if it cannot be started.
pub fn output(command: &mut Command) -> Output {
    command
        .output()
        .unwrap_or_else(|e| panic!("cannot start {command:?}: {e}"))
}

/// Runs a command that must succeed. Returns its standard output.
pub fn succeed(command: &mut Command) -> String {
    let output = output(command);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{command:?} ended with {}\n{text}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

/// Waits until a condition holds. Panics after `LONG`.
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Sends a process a signal.
pub fn kill(signal: &str, pid: u64) {
    succeed(Command::new("kill").args(["-s", signal, &pid.to_string()]));
}
