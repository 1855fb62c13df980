//! Runs a program to its end, within a limit of time, and tells everything when it fails.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::again;

/// Far more than any program here needs: only something that hangs meets it.
const LIMIT_S: u32 = 300;

/// A command that is killed when it hangs, so that a stuck mount fails its test instead of blocking all.
pub fn within_limit(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("timeout");
    limit(&mut command, program);
    command
}

/// The same; where the test runs under `jericho run`, so does the command, with the volumes that are mounted by now.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    if again::under_run() {
        under_run(program)
    } else {
        within_limit(program)
    }
}

/// A command under `jericho run`.
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

/// Runs it, whatever its status.
pub fn outcome(command: &mut Command) -> Output {
    command.output().expect("coreutils' timeout runs")
}

/// Runs it and gives its standard output; panics with all it said unless it succeeded.
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

/// `program args...`, run in `dir`, must succeed.
pub fn run_in(dir: &Path, program: &str, args: &[&str]) -> String {
    succeed(command(program).args(args).current_dir(dir))
}

/// A script for `sh -e`, run in `dir`, must succeed.
pub fn shell_in(dir: &Path, script: &str) -> String {
    run_in(dir, "sh", &["-e", "-c", script])
}

/// A command under `jericho run`, on the volumes that are mounted by now.
pub fn within_run(program: &Path) -> Command {
    let mut command = command(env!("CARGO_BIN_EXE_jericho"));
    command.args(["run", "--"]).arg(program);
    command
}
