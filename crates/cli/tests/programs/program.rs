//! Runs a program to its end within a time limit, and prints all its output when it fails.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::again;

/// Time limit in seconds, far more than any program here needs. A program that reaches it hangs.
const LIMIT_S: u32 = 300;

/// Returns a command that is killed when it hangs, so that a stuck mount fails one test and does not block all.
pub fn within_limit(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("timeout");
    limit(&mut command, program);
    command
}

/// Returns a command with the same limit. If the test runs under `jericho run`, the command does too, with the volumes that are
/// mounted by now.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    if again::under_run() {
        under_run(program)
    } else {
        within_limit(program)
    }
}

/// Returns a command under `jericho run`, with the same limit.
pub fn under_run(program: impl AsRef<OsStr>) -> Command {
    let [jericho, run, dashes] = again::run_prefix();
    let mut command = Command::new(jericho);
    limit(command.args([run, dashes, "timeout"]), program);
    command
}

fn limit(command: &mut Command, program: impl AsRef<OsStr>) {
    command
        .args(["--signal=KILL", &LIMIT_S.to_string()])
        .arg(program.as_ref())
        .stdin(Stdio::null())
        .env("LC_ALL", "C");
}

/// Runs a command. Returns its output, with any status.
pub fn outcome(command: &mut Command) -> Output {
    command.output().expect("coreutils' timeout runs")
}

/// Runs a command and returns its standard output. Panics with all its output unless it succeeds.
pub fn succeed(command: &mut Command) -> String {
    let output = outcome(command);
    assert!(
        output.status.success(),
        "{command:?}\n{} (127: not installed, see scripts/setup; 137: hung)\n--- stdout\n{}\n--- stderr\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs `program args...` in `dir` and returns its standard output. Panics unless it succeeds.
pub fn run_in(dir: &Path, program: &str, args: &[&str]) -> String {
    succeed(command(program).args(args).current_dir(dir))
}

/// Runs a script with `sh -e` in `dir` and returns its standard output. Panics unless it succeeds.
pub fn shell_in(dir: &Path, script: &str) -> String {
    run_in(dir, "sh", &["-e", "-c", script])
}

/// Returns a command under `jericho run`, with the volumes that are mounted by now.
pub fn within_run(program: &Path) -> Command {
    let mut command = command(env!("CARGO_BIN_EXE_jericho"));
    command.args(["run", "--"]).arg(program);
    command
}
