//! `jericho attach`: starts the server of a disk, and prints the path of the disk.

use std::path::Path;
use std::process::{Command, ExitCode};

use jericho_fuse::attach;

use crate::args::AttachArgs;
use crate::attached::Device;
use crate::failure::{Context, Failure, Outcome, print};
use crate::{background, disk, logging, remote};

pub fn run(args: &AttachArgs) -> Outcome {
    if args.report_to_parent {
        return background::run(|| {
            disk::serve(args, |path| background::report_serving(&[text(path)?]))
        });
    }
    if args.with_loop && !rustix::process::geteuid().is_root() {
        return Err(Failure::new(
            "only root makes loop devices: run as root, or leave out --loop and use the file",
        ));
    }
    let device = Device::named(&args.device)?;
    attach::check_available(&args.device).map_err(|e| Failure::new(e.to_string()))?;
    if args.foreground {
        logging::start();
        return disk::serve(args, |path| print(&format!("{}\n", text(path)?)));
    }
    let (log, log_path) = logging::open(args.log.as_deref(), &device.name())?;
    let lines = background::launch(server(args, &device)?, log, &log_path)?;
    print(&format!("{}\n", lines.join("\n")))?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the path as text, because a line is all that scripts read.
fn text(path: &Path) -> Result<String, Failure> {
    match path.to_str().filter(|text| !text.contains('\n')) {
        Some(text) => Ok(text.to_owned()),
        None => Err(Failure::new(format!(
            "{} cannot be printed as a line: name another directory with --at",
            path.display()
        ))),
    }
}

/// Returns the command that runs the server.
fn server(args: &AttachArgs, device: &Device) -> Result<Command, Failure> {
    let mut command = background::daemon("attach")?;
    if args.with_loop {
        command.arg("--loop");
    }
    if args.read_only {
        command.arg("--read-only");
    }
    if let Some(at) = &args.at {
        // The server has another working directory.
        let at = std::path::absolute(at).context(format_args!("cannot find {}", at.display()))?;
        command.arg("--at").arg(at);
    }
    command.args(remote::options(&args.remote));
    command.arg("--").arg(device.source());
    Ok(command)
}
