//! The keeper process of a daemon: this program with another command. See `jericho_daemon::keeper`.

use std::process::{Command, ExitCode};

use crate::failure::{Context, Outcome};
use crate::{logging, preload};

/// Builds the command that runs the keeper. Runs this same program, even if its file was replaced since.
pub fn command() -> Command {
    let mut command = Command::new("/proc/self/exe");
    preload::unset(&mut command);
    command.arg("keeper");
    command
}

/// Runs the keeper until the daemon has ended.
pub fn run() -> Outcome {
    logging::start();
    jericho_daemon::keeper::run().context("the keeper of the shared memory ends")?;
    Ok(ExitCode::SUCCESS)
}
