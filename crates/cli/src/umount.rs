//! `jericho umount`: writes everything back, detaches the mount, waits for the daemon to end, and checks that the volume is
//! clean. If not everything can be written, the volume stays mounted, unless --force discards the rest.

use std::ffi::{OsStr, OsString};
use std::io::IsTerminal;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use jericho_fuse::{MountError, attach};
use jericho_storage::{is_remote, remote_holder};
use jericho_sys::process::Signal;
use jericho_volume::{OpenMode, Volume, VolumeError};

use crate::args::UmountArgs;
use crate::failure::{Context, Failure, Outcome};
use crate::{background, busy, control, mounts, remote};

/// Maximum time in which the daemon must end after everything was written. Longer than its requests wait for another host by default.
const PATIENCE: Duration = Duration::from_secs(240);
/// Time between two polls of the daemon of the previous mount.
const FORMER_POLL: Duration = Duration::from_secs(1);
/// Pause between two signals to a daemon that shall discard unwritten data.
const SIGNALS_EVERY: Duration = Duration::from_millis(300);

pub fn run(args: &UmountArgs) -> Outcome {
    if args.force {
        discard(&args.dir)?;
    } else if args.lazy {
        detach(&args.dir)?;
    } else {
        unmount(&args.dir)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Unmounts a directory, or ends the daemon that still writes back a volume without a mount. Discards data that cannot be
/// written.
fn discard(path: &Path) -> Result<(), Failure> {
    if is_remote(path) {
        remote::prepare_as(&[]);
    }
    let resolved = match is_remote(path) {
        true => path.to_owned(),
        false => mounts::resolve(path)?,
    };
    let mount = mounts::at(&resolved)?.filter(|m| m.filesystem == mounts::FILESYSTEM);
    let Some(mount) = mount else {
        return match lock_holder(path) {
            Some(pid) => match served(pid) {
                Some(dir) => Err(Failure::new(format!(
                    "{} is mounted on {dir}; to discard what cannot be written to it: jericho umount --force {dir}",
                    path.display(),
                    dir = dir.display()
                ))),
                None if !shares_mount_namespace(pid) => Err(Failure::new(format!(
                    "process {pid} holds {path} in another mount namespace, where it may be mounted; to discard what cannot be \
                     written to it, say so there: nsenter --target {pid} --mount jericho umount --force {path}",
                    path = path.display()
                ))),
                None => end(pid, path),
            },
            None => Err(Failure::new(format!(
                "{} is neither mounted nor still being written back",
                path.display()
            ))),
        };
    };
    if mounts::is_dead(&resolved) {
        return unmount(path);
    }
    let stat = control::stat(&resolved)?;
    if let Err(failure) = control::sync(&resolved) {
        eprintln!("jericho: {failure}; what cannot be written is discarded, see the daemon's log");
    }
    match attach::unmount(&resolved, false) {
        Ok(()) => end(stat.pid, path),
        Err(MountError::Busy { .. }) => Err(in_use(path, &mount)),
        Err(e) => Err(Failure::new(e.to_string())),
    }
}

/// Returns the daemon that holds a volume. Ignores other commands that hold one, such as a repairing check.
pub fn lock_holder(volume: &Path) -> Option<u32> {
    let mode = OpenMode {
        read_only: true,
        force: false,
    };
    let holder = match is_remote(volume) {
        true => remote_holder(volume),
        false => match Volume::lock(volume, mode) {
            Err(VolumeError::Locked { pid, .. }) => pid,
            _ => None,
        },
    };
    match holder {
        Some(pid) => {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            let mounts = arguments_of(pid)
                .iter()
                .skip(1)
                .any(|argument| argument == "mount");
            (name.trim() == "jericho" && mounts).then_some(pid)
        }
        _ => None,
    }
}

/// Ends a daemon whose mount has ended, even if it could not write everything.
fn end(pid: u32, shown: &Path) -> Result<(), Failure> {
    let Some(daemon) = background::open(pid)? else {
        return Ok(());
    };
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        (daemon.send(Signal::Terminate))
            .context(format_args!("cannot end the daemon (process {pid})"))?;
        if background::wait(&daemon, pid, Some(SIGNALS_EVERY))? {
            return Ok(());
        }
    }
    Err(Failure::new(format!(
        "the daemon of {} (process {pid}) does not end",
        shown.display()
    )))
}

/// Returns the arguments with which a process was started.
fn arguments_of(pid: u32) -> Vec<OsString> {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    // Each argument ends with a zero.
    let line = line.strip_suffix(&[0]).unwrap_or(&line);
    let arguments = line.split(|byte| *byte == 0);
    arguments
        .map(|argument| OsStr::from_bytes(argument).to_owned())
        .collect()
}

/// Returns the directory on which a daemon has mounted its volume. Both paths are among the daemon's arguments.
fn served(pid: u32) -> Option<PathBuf> {
    let cwd = std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_default();
    let path_of = |argument: &OsString| match is_remote(Path::new(argument)) {
        true => Some(argument.into()),
        false => mounts::resolve(&cwd.join(argument)).ok(),
    };
    let paths: Vec<PathBuf> = arguments_of(pid).iter().filter_map(path_of).collect();
    let all = mounts::list().ok()?;
    let ours = all.into_iter().find(|mount| {
        mount.filesystem == mounts::FILESYSTEM
            && paths.contains(&mount.dir)
            && paths.contains(&mounts::resolve(&mount.source).unwrap_or(mount.source.clone()))
    })?;
    Some(ours.dir)
}

/// Returns whether a daemon has no mount. Returns false when its mounts are invisible from here.
fn is_going_away(pid: u32) -> bool {
    shares_mount_namespace(pid) && served(pid).is_none()
}

/// Returns whether a process sees the same mounts as this one.
fn shares_mount_namespace(pid: u32) -> bool {
    let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
    let own = namespace("self");
    own.is_some() && own == namespace(&pid.to_string())
}

/// Waits until the daemon of a previous mount has released the volume: as long as it holds the volume and has no mount.
pub fn wait_for_former(volume: &Path) {
    let begun = Instant::now();
    let on_terminal = std::io::stderr().is_terminal();
    let (mut reported, mut counts) = (None, false);
    // A daemon that has just started has no mount yet either. The loop ends when that daemon has mounted.
    while let Some(pid) = lock_holder(volume).filter(|pid| is_going_away(*pid)) {
        if reported != Some(pid) {
            reported = Some(pid);
            eprintln!(
                "jericho: waiting for process {pid}, which still writes {} back",
                volume.display()
            );
        } else if on_terminal {
            counts = true;
            eprint!("\rjericho: waiting for {} s ", begun.elapsed().as_secs());
        }
        // If the daemon cannot be watched, taking the volume's lock reports that the volume is in use.
        let Ok(Some(daemon)) = background::open(pid) else {
            break;
        };
        if background::wait(&daemon, pid, Some(FORMER_POLL)).is_err() {
            break;
        }
    }
    if counts {
        // Ends the line of the count.
        eprintln!();
    }
}

/// Returns the volume that is mounted on `path`.
fn mount_at(path: &Path, shown: &Path) -> Result<mounts::Mount, Failure> {
    mounts::at(path)?
        .filter(|m| m.filesystem == mounts::FILESYSTEM)
        .ok_or_else(|| {
            let shown = shown.display();
            Failure::new(format!("no Jericho volume is mounted on {shown}"))
        })
}

/// Detaches `dir` even if it is in use. Sends no request to the daemon: the daemon writes everything back when no program uses
/// the mount any more, and retries if that fails.
fn detach(dir: &Path) -> Result<(), Failure> {
    let path = mounts::resolve(dir)?;
    mount_at(&path, dir)?;
    attach::unmount(&path, true).map_err(|e| Failure::new(e.to_string()))
}

/// Unmounts `dir`. Returns when everything is on the device.
pub fn unmount(dir: &Path) -> Result<(), Failure> {
    let path = mounts::resolve(dir)?;
    let shown = dir.display();
    let mount = mount_at(&path, dir)?;

    if mounts::is_dead(&path) {
        attach::unmount(&path, true).map_err(|e| Failure::new(e.to_string()))?;
        return Err(Failure::new(format!(
            "the daemon of {shown} had died; the mount was removed. What programs had synced is \
             safe: mount {0} again, or check it with: jericho check {0}",
            mount.source.display()
        )));
    }
    let stat = control::stat(&path)?;
    // Whether the volume is clean may be on another host.
    remote::prepare_as(&arguments_of(stat.pid));
    let daemon = background::open(stat.pid)?;
    if let Err(failure) = control::sync(&path) {
        return Err(stays_mounted(&path, shown, &stat.volume, failure));
    }
    match attach::unmount(&path, false) {
        Ok(()) => {}
        Err(MountError::Busy { .. }) => return Err(in_use(dir, &mount)),
        Err(e) => return Err(Failure::new(e.to_string())),
    }
    if let Some(daemon) = daemon
        && !background::wait(&daemon, stat.pid, Some(PATIENCE))?
    {
        return Err(Failure::new(format!(
            "{shown} was unmounted, but process {0} still writes {1} back; its log says why. To give up what it \
                 cannot write: jericho umount --force {1}",
            stat.pid, stat.volume
        )));
    }
    if stat.read_only {
        return Ok(());
    }
    let volume = PathBuf::from(&stat.volume);
    let is_dirty = Volume::is_dirty_at(&volume).context(format_args!(
        "{shown} was unmounted, but whether everything is on {} cannot be checked",
        volume.display()
    ))?;
    if is_dirty {
        return Err(Failure::new(format!(
            "{shown} was unmounted, but not everything reached {0}: the daemon's log says why; \
             check it with: jericho check {0}",
            volume.display()
        )));
    }
    Ok(())
}

/// Returns the failure of an unmount for which not everything could be written.
fn stays_mounted(
    path: &Path,
    shown: impl std::fmt::Display,
    volume: &str,
    failure: Failure,
) -> Failure {
    // Asks after the attempt, which may have met the reason.
    let refusals: Vec<String> = match control::stat(path) {
        Ok(stat) => crate::stat::refusals(&stat).collect(),
        Err(_) => Vec::new(),
    };
    Failure::new(match &refusals[..] {
        [] => format!(
            "{shown} stays mounted, because not everything can be written to {volume}: {failure}. Make room there, or repair the \
             device, and try again; or discard what cannot be written: jericho umount --force {shown}"
        ),
        _ => format!(
            "{shown} stays mounted, because not everything can be written to {volume}: {}. Repair the device, discard what cannot \
             be written (jericho umount --force {shown}), and mount again",
            refusals.join("; ")
        ),
    })
}

fn in_use(dir: &Path, mount: &mounts::Mount) -> Failure {
    let users = busy::users(mount, 10);
    let list = if users.is_empty() {
        String::from("; the processes that use it are invisible (try as root)")
    } else {
        format!(":\n  {}", users.join("\n  "))
    };
    Failure::new(format!(
        "{} is busy; end the programs that use it and try again{list}",
        dir.display()
    ))
}
