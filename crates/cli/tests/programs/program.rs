//! Runs a program to its end, within a limit of time, and tells everything when it fails.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Far more than any program here needs: only something that hangs meets it.
const LIMIT_S: u32 = 300;

/// A command that is killed when it hangs, so that a stuck mount fails its test instead of blocking all.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("timeout");
    command
        .arg("--signal=KILL")
        .arg(LIMIT_S.to_string())
        .arg(program.as_ref());
    command.stdin(Stdio::null()).env("LC_ALL", "C");
    command
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
