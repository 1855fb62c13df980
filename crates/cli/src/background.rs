//! Starts the daemon: this program again, in a session of its own.
//!
//! The daemon's standard output is a pipe to this process. The daemon writes one line when it serves, or an error message, and
//! then closes the pipe.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use jericho_fuse::attach;

use crate::args::MountOptions;
use crate::failure::{Context, Failure};
use crate::{logging, mounts, preload, serve};

/// The line that the daemon writes when it serves.
pub const SERVING: &str = "serving\n";

/// The checked volume and directory of a mount.
pub struct Checked {
    /// Absolute path of the volume.
    pub volume: PathBuf,
    /// Absolute path of the directory, which is empty and not a mount point.
    pub dir: PathBuf,
}

/// Checks a mount before anything is touched. Changes nothing, except that it detaches from `dir` a mount whose daemon has died.
pub fn check(volume: &Path, dir: &Path, options: &MountOptions) -> Result<Checked, Failure> {
    let volume = std::fs::canonicalize(volume).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Failure::new(format!(
            "{0} does not exist; make a volume there with: jericho format {0} --size 1G",
            volume.display()
        )),
        _ => Failure::new(format!("cannot open {}: {e}", volume.display())),
    })?;
    jericho_topology::Topology::from_spec(&options.topology)
        .map_err(|e| Failure::new(e.to_string()))?;
    serve::trusted(options)?;
    attach::check_available(dir).map_err(|e| Failure::new(e.to_string()))?;
    let dir = check_dir(dir)?;
    Ok(Checked { volume, dir })
}

fn check_dir(dir: &Path) -> Result<PathBuf, Failure> {
    let shown = dir.display();
    let missing = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::NotFound => Failure::new(format!(
            "{shown} does not exist; make it with: mkdir -p {shown}"
        )),
        _ => Failure::new(format!("cannot mount on {shown}: {e}")),
    };
    if let Err(e) = std::fs::metadata(dir) {
        if !mounts::says_dead(&e) {
            return Err(missing(e));
        }
        let dir = mounts::resolve(dir)?;
        if mounts::at(&dir)?.is_some_and(|m| m.filesystem == mounts::FILESYSTEM) {
            attach::unmount(&dir, true).map_err(|e| Failure::new(e.to_string()))?;
            eprintln!("jericho: removed the mount on {shown}, whose daemon is dead");
        }
        return check_dir(&dir);
    }
    let dir = mounts::resolve(dir)?;
    if let Some(mount) = mounts::at(&dir)? {
        return Err(Failure::new(format!(
            "{shown} is already a mount (of {}, type {}); unmount it first or choose another \
             directory",
            mount.source.display(),
            mount.filesystem
        )));
    }
    let mut entries = std::fs::read_dir(&dir).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotADirectory => Failure::new(format!(
            "{shown} is not a directory; choose an empty directory"
        )),
        _ => missing(e),
    })?;
    match entries.next() {
        None => Ok(dir),
        Some(_) => Err(Failure::new(format!(
            "{shown} is not empty: what is in it would be hidden; choose an empty directory"
        ))),
    }
}

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
    for name in &options.fast_path {
        command.arg(format!("--fast-path={name}"));
    }
    if options.read_only {
        command.arg("--read-only");
    }
    for device in &options.device {
        // The daemon has another working directory.
        let path = std::path::absolute(device)
            .context(format_args!("cannot find the device {}", device.display()))?;
        command.arg("--device").arg(path);
    }
    if options.force {
        command.arg("--force");
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
    if report == SERVING {
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
