//! Tests that start this program again, in processes that play a part of them, and what such tests share.

use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::again;

/// What a process is told of its part; none, and a test that is a part does nothing.
const ROLE: &str = "JERICHO_TEST_ROLE";
/// Only a hang takes this long.
pub const LONG: Duration = Duration::from_secs(90);

/// A number from the environment.
pub fn from_environment(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|e| panic!("{name}: {e}")))
}

/// The process that is the test `name` and is told `role`, under `jericho run` or not.
pub fn command(name: &str, role: &[&str], inline: bool) -> Command {
    let me = std::env::current_exe().expect("this program has a path");
    let mut command = if inline {
        let [jericho, run, dashes] = again::run_prefix();
        let mut command = Command::new(jericho);
        command.args([run, dashes]).arg(me);
        command
    } else {
        Command::new(me)
    };
    command
        .args([name, "--exact", "--ignored", "--nocapture"])
        .env(ROLE, role.join("\t"));
    command
}

/// What this process was told.
pub fn role<const N: usize>() -> Option<[String; N]> {
    let role = std::env::var(ROLE).ok()?;
    let parts: Vec<String> = role.split('\t').map(str::to_owned).collect();
    Some(parts.try_into().unwrap_or_else(|_| panic!("{role}")))
}

/// Starts it with pipes for what it says.
pub fn start(command: &mut Command) -> Child {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts")
}

/// What a process that has ended said.
pub fn said_by(child: &mut Child) -> String {
    let mut said = String::new();
    for pipe in [
        child.stdout.take().map(std::io::read_to_string),
        child.stderr.take().map(std::io::read_to_string),
    ] {
        said += &pipe.and_then(Result::ok).unwrap_or_default();
    }
    said
}

/// Sends a process a signal.
pub fn kill(signal: &str, pid: u64) {
    let mut kill = Command::new("kill");
    let status = kill.args(["-s", signal, &pid.to_string()]).status();
    assert!(status.expect("kill runs").success(), "{signal} to {pid}");
}

/// Waits until a condition holds. Panics when that takes as long as only a hang does.
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until it ends; panics when it takes longer than `most`.
pub fn wait_for_end(child: &mut Child, who: &str, most: Duration) -> ExitStatus {
    let deadline = Instant::now() + most;
    loop {
        if let Some(status) = child.try_wait().expect("wait") {
            return status;
        }
        if Instant::now() > deadline {
            // It does not have to die for the test to end.
            let _ = child.kill();
            panic!("{who} hangs");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
