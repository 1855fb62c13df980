//! Tests that start this test program again, in other processes that take a role in the test, and their common functions.

use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::again;

/// The variable with the arguments of a process's role. Without it, a test that is a role does nothing.
const ROLE: &str = "JERICHO_TEST_ROLE";

/// Returns a number from the environment.
pub fn from_environment(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|e| panic!("{name}: {e}")))
}

/// Returns a command that runs the test `name` with the role's arguments, under `jericho run` if `inline`.
pub fn command(name: &str, role: &[&str], inline: bool) -> Command {
    match inline {
        true => command_under(name, role, &[]),
        false => with_role(Command::new(me()), name, role),
    }
}

/// Does the same under `jericho run` with options.
pub fn command_under(name: &str, role: &[&str], options: &[&str]) -> Command {
    let [jericho, run, dashes] = again::run_prefix();
    let mut command = Command::new(jericho);
    command.arg(run).args(options).arg(dashes).arg(me());
    with_role(command, name, role)
}

fn me() -> PathBuf {
    std::env::current_exe().expect("this program has a path")
}

fn with_role(mut command: Command, name: &str, role: &[&str]) -> Command {
    command
        .args([name, "--exact", "--ignored", "--nocapture"])
        .env(ROLE, role.join("\t"));
    command
}

/// Returns the arguments of this process's role.
pub fn role<const N: usize>() -> Option<[String; N]> {
    let role = std::env::var(ROLE).ok()?;
    let parts: Vec<String> = role.split('\t').map(str::to_owned).collect();
    Some(parts.try_into().unwrap_or_else(|_| panic!("{role}")))
}

/// Starts a command with pipes for its output.
pub fn start(command: &mut Command) -> Child {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts")
}

/// Returns the output of a process that has ended.
pub fn output_of(child: &mut Child) -> String {
    let mut said = String::new();
    for pipe in [
        child.stdout.take().map(std::io::read_to_string),
        child.stderr.take().map(std::io::read_to_string),
    ] {
        said += &pipe.and_then(Result::ok).unwrap_or_default();
    }
    said
}

/// Waits until a process ends. Panics when that takes longer than `most`.
pub fn wait_for_end(child: &mut Child, name: &str, most: Duration) -> ExitStatus {
    let deadline = Instant::now() + most;
    loop {
        if let Some(status) = child.try_wait().expect("wait") {
            return status;
        }
        if Instant::now() > deadline {
            // Does not wait: a process that hangs in the kernel may not die.
            let _ = child.kill();
            panic!("{name} hangs");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
