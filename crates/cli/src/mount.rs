//! `jericho mount`.

use std::process::{Command, ExitCode};

use jericho_storage::is_remote;

use crate::args::{MountArgs, MountOptions};
use crate::failure::{Context, Failure, Outcome};
use crate::mountable::{self, Checked};
use crate::{background, logging, remote, serve, umount};

pub fn run(args: &MountArgs) -> Outcome {
    if args.report_to_parent {
        return serve::as_daemon(args);
    }
    let checked = mountable::check(&args.volume, &args.dir, &args.options)?;
    umount::wait_for_former(&checked.volume);
    if args.foreground {
        return serve::in_foreground(&checked, &args.options);
    }
    start(&checked, &args.options)?;
    Ok(ExitCode::SUCCESS)
}

/// Starts the daemon and waits until it serves.
pub fn start(checked: &Checked, options: &MountOptions) -> Result<(), Failure> {
    let (log, log_path) = logging::open(options.log.as_deref(), &checked.volume)?;
    let warnings = background::launch(daemon(checked, options)?, log, &log_path)?;
    for warning in &warnings {
        eprintln!("jericho: {warning}");
    }
    Ok(())
}

/// Returns the command that runs the daemon.
fn daemon(checked: &Checked, options: &MountOptions) -> Result<Command, Failure> {
    let mut command = background::daemon("mount")?;
    command
        .args(["--topology", &options.topology])
        .args(["--transport", options.transport.name()]);
    if let Some(policy) = options.threads {
        command.args(["--threads", policy.name()]);
    }
    if options.with_parent {
        command.arg("--with-parent");
    }
    if let Some(bytes) = options.cache {
        command.args(["--cache", &bytes.to_string()]);
    }
    if let Some(bytes) = options.spill {
        command.args(["--spill", &bytes.to_string()]);
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
    command.args(remote::options(&options.remote));
    command.arg("--").arg(&checked.volume).arg(&checked.dir);
    Ok(command)
}
