//! `jericho umount`: detaches, waits for the daemon to end, and looks whether the volume is clean.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use jericho_fs::volume::Volume;
use jericho_fuse::{MountError, attach};
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags};

use crate::args::UmountArgs;
use crate::failure::{Context, Failure, Outcome};
use crate::{busy, control, mounts};

pub fn run(args: &UmountArgs) -> Outcome {
    unmount(&args.dir)?;
    Ok(ExitCode::SUCCESS)
}

/// Unmounts `dir`; returns when everything is on the device.
pub fn unmount(dir: &Path) -> Result<(), Failure> {
    let path = mounts::resolve(dir)?;
    let shown = dir.display();
    let mount = mounts::at(&path)?
        .filter(|m| m.filesystem == mounts::FILESYSTEM)
        .ok_or_else(|| Failure::new(format!("no Jericho volume is mounted on {shown}")))?;

    if daemon_is_gone(&path) {
        attach::unmount(&path, true).map_err(|e| Failure::new(e.to_string()))?;
        return Err(Failure::new(format!(
            "the daemon of {shown} had died; the mount was taken away. What programs had synced is \
             safe: mount {0} again, or look at it with: jericho check {0}",
            mount.source.display()
        )));
    }
    let stat = control::stat(&path)?;
    let daemon = watch(stat.pid)?;
    match attach::unmount(&path, false) {
        Ok(()) => {}
        Err(MountError::Busy { .. }) => return Err(in_use(dir, &mount)),
        Err(e) => return Err(Failure::new(e.to_string())),
    }
    if let Some(daemon) = daemon {
        wait_for_end(&daemon, stat.pid)?;
    }
    if stat.read_only {
        return Ok(());
    }
    let volume = PathBuf::from(&stat.volume);
    let is_dirty = Volume::is_dirty_at(&volume).context(format_args!(
        "{shown} was unmounted, but whether everything is on {} cannot be seen",
        volume.display()
    ))?;
    if is_dirty {
        return Err(Failure::new(format!(
            "{shown} was unmounted, but not everything reached {0}: the daemon's log says why; \
             look at it with: jericho check {0}",
            volume.display()
        )));
    }
    Ok(())
}

fn daemon_is_gone(dir: &Path) -> bool {
    std::fs::metadata(dir).is_err_and(|e| mounts::says_dead(&e))
}

/// A descriptor that tells when the process has ended; `None` when it has.
fn watch(pid: u32) -> Result<Option<OwnedFd>, Failure> {
    let pid = i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| Failure::new(format!("the daemon gives an impossible process id: {pid}")))?;
    match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(descriptor) => Ok(Some(descriptor)),
        Err(rustix::io::Errno::SRCH) => Ok(None),
        Err(e) => Err(Failure::new(format!("cannot watch the daemon: {e}"))),
    }
}

fn wait_for_end(daemon: &OwnedFd, pid: u32) -> Result<(), Failure> {
    let mut events = [PollFd::new(daemon, PollFlags::IN)];
    rustix::io::retry_on_intr(|| rustix::event::poll(&mut events, None))
        .context(format_args!("cannot wait for the daemon (process {pid})"))?;
    Ok(())
}

fn in_use(dir: &Path, mount: &mounts::Mount) -> Failure {
    let users = busy::users(mount, 10);
    let who = if users.is_empty() {
        String::from("; by whom cannot be seen (try as root)")
    } else {
        format!(":\n  {}", users.join("\n  "))
    };
    Failure::new(format!(
        "{} is busy; end what uses it and try again{who}",
        dir.display()
    ))
}
