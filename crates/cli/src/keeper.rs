//! The keeper of a daemon: this program once more. See `jericho_daemon::keeper`.

use std::process::{Command, ExitCode};

use crate::failure::{Context, Outcome};
use crate::{logging, preload};

/// Makes the command that runs it: this very program, also when its file was replaced since.
pub fn command() -> Command {
    let mut command = Command::new("/proc/self/exe");
    preload::unset(&mut command);
    command.arg("keeper");
    command
}

/// Runs it, until the daemon has ended.
pub fn run() -> Outcome {
    logging::start();
    jericho_daemon::keeper::run().context("the keeper of the shared memory ends")?;
    Ok(ExitCode::SUCCESS)
}
