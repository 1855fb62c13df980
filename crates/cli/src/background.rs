//! Starts a daemon: this program again, in a session of its own.
//!
//! The daemon's standard output is a pipe to this process. The daemon writes an error message, or, when it serves, lines that the user
//! should see and a last line that says so. Then it closes the pipe.
//!
//! Also opens a daemon by its process id, for commands that wait for its end.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use jericho_sys::process::Process;

use crate::failure::{Context, Failure, Outcome};
use crate::{logging, preload};

/// The last line that the daemon writes when it serves.
const SERVING: &str = "serving\n";

/// Returns the command that runs a subcommand of this program as a daemon. The caller adds further arguments.
pub fn daemon(subcommand: &str) -> Result<Command, Failure> {
    let program =
        std::env::current_exe().context("cannot find this program to start its daemon")?;
    let mut command = Command::new(program);
    preload::unset(&mut command);
    command.args([subcommand, "--foreground", "--report-to-parent"]);
    Ok(command)
}

/// Starts a daemon and waits until it serves. Returns the lines that it has written.
pub fn launch(mut command: Command, log: File, log_path: &Path) -> Result<Vec<String>, Failure> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log);
    // An inherited descriptor of the caller, such as the one of flock(1), would stay open for as long as the daemon runs.
    let child = jericho_sys::process::spawn_with_standard_streams(&mut command);
    let mut child = child.context("cannot start the daemon")?;
    let mut report = String::new();
    if let Some(mut pipe) = child.stdout.take() {
        pipe.read_to_string(&mut report)
            .context("cannot read the daemon's report")?;
    }
    if let Some(lines) = report.strip_suffix(SERVING) {
        return Ok(lines.lines().map(str::to_owned).collect());
    }
    let status = child.wait().context("cannot wait for the daemon")?;
    if report.is_empty() {
        return Err(Failure::new(format!(
            "the daemon ended ({status}) before it served; see {}",
            log_path.display()
        )));
    }
    Err(Failure::new(report.trim_end()))
}

/// Runs the body of a daemon that `launch` has started. Writes its failure to the parent and to the log.
pub fn run(body: impl FnOnce() -> Outcome) -> Outcome {
    logging::start();
    let outcome = leave_directory().and_then(|()| body());
    if let Err(failure) = &outcome {
        tracing::error!(%failure, "the daemon ends");
        // If the daemon was serving already, standard output is /dev/null.
        let mut out = std::io::stdout();
        if out
            .write_all(format!("{failure}\n").as_bytes())
            .and_then(|()| out.flush())
            .is_err()
        {
            tracing::warn!(
                "cannot report this failure to the parent, because the parent has ended"
            );
        }
        return Ok(ExitCode::FAILURE);
    }
    outcome
}

/// Leaves the working directory, whose filesystem could not be unmounted otherwise.
fn leave_directory() -> Result<(), Failure> {
    std::env::set_current_dir("/").context("cannot change to /")
}

/// Reports to the parent that the daemon serves, with lines for the user, and closes the parent's pipe.
pub fn report_serving(lines: &[String]) -> Result<(), Failure> {
    let mut out = std::io::stdout();
    let report = lines.iter().map(|line| format!("{line}\n"));
    let report: String = report.chain([SERVING.to_owned()]).collect();
    let reported = out.write_all(report.as_bytes()).and_then(|()| out.flush());
    let null = File::options()
        .write(true)
        .open("/dev/null")
        .context("cannot open /dev/null")?;
    rustix::stdio::dup2_stdout(&null).context("cannot close the parent's pipe")?;
    // If the report failed, the parent was interrupted before the mount was there, so the user no longer wants the mount.
    reported.context("the process that requested the mount has ended")
}

/// Opens a daemon, to send it signals and to wait for its end. Returns `None` if it has ended.
pub fn open(pid: u32) -> Result<Option<Process>, Failure> {
    if i32::try_from(pid).map_or(true, |pid| pid == 0) {
        return Err(Failure::new(format!(
            "the daemon returned an invalid process id: {pid}"
        )));
    }
    match Process::open(pid) {
        Ok(daemon) => Ok(Some(daemon)),
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        Err(error) => Err(Failure::new(format!(
            "cannot watch the daemon, process {pid}: {error}"
        ))),
    }
}

/// Waits for the end of a daemon, for at most `patience` (`None`: no limit). Returns whether it has ended.
pub fn wait(daemon: &Process, pid: u32, patience: Option<Duration>) -> Result<bool, Failure> {
    let ended = daemon.wait(patience);
    ended.context(format_args!("cannot wait for the daemon (process {pid})"))
}
