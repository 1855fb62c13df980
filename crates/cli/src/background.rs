//! Starts the daemon: this program again, in a session of its own.
//!
//! The daemon's standard output is a pipe to this process. The daemon writes an error message, or, when it serves, lines that the user
//! should see and a last line that says so. Then it closes the pipe.

use std::io::Read;
use std::process::{Command, Stdio};

use jericho_storage::is_remote;

use crate::args::MountOptions;
use crate::failure::{Context, Failure};
use crate::mountable::Checked;
use crate::{logging, preload};

/// The last line that the daemon writes when it serves.
pub const SERVING: &str = "serving\n";

/// Starts the daemon and waits until it serves.
pub fn start(checked: &Checked, options: &MountOptions) -> Result<(), Failure> {
    let (log, log_path) = logging::open(options.log.as_deref(), &checked.volume)?;
    let program =
        std::env::current_exe().context("cannot find this program to start its daemon")?;
    let mut command = Command::new(program);
    preload::unset(&mut command);
    command
        .arg("mount")
        .args(["--foreground", "--report-to-parent"])
        .args(["--topology", &options.topology])
        .args(["--transport", options.transport.name()]);
    if let Some(policy) = options.threads {
        command.args(["--threads", policy.name()]);
    }
    if let Some(bytes) = options.cache {
        command.args(["--cache", &bytes.to_string()]);
    }
    if let Some(rate) = options.scrub_rate {
        command.args(["--scrub-rate", &rate.to_string()]);
    }
    for name in &options.fast_path {
        command.arg(format!("--fast-path={name}"));
    }
    if options.read_only {
        command.arg("--read-only");
    }
    for device in &options.device {
        // The daemon has another working directory.
        let path = match is_remote(device) {
            true => device.clone(),
            false => std::path::absolute(device)
                .context(format_args!("cannot find the device {}", device.display()))?,
        };
        command.arg("--device").arg(path);
    }
    if options.force {
        command.arg("--force");
    }
    let remote = &options.remote;
    for interface in &remote.nic {
        command.arg(format!("--nic={interface}"));
    }
    command.arg(format!("--ethertype={}", remote.ethertype));
    command.arg(format!("--dead-after={}", options.dead_after));
    if remote.take_over {
        command.arg("--take-over");
    }
    if remote.no_replay {
        command.arg("--no-replay");
    }
    command.arg("--").arg(&checked.volume).arg(&checked.dir);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log);
    // An inherited descriptor of the caller, such as the one of flock(1), would stay open for as long as the volume is mounted.
    let child = jericho_sys::process::spawn_with_standard_streams(&mut command);
    let mut child = child.context("cannot start the daemon")?;
    let mut report = String::new();
    if let Some(mut pipe) = child.stdout.take() {
        pipe.read_to_string(&mut report)
            .context("cannot read the daemon's report")?;
    }
    if let Some(warnings) = report.strip_suffix(SERVING) {
        for warning in warnings.lines() {
            eprintln!("jericho: {warning}");
        }
        return Ok(());
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
