//! `jericho detach`: removes an attached disk, and returns when everything is durable.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use jericho_fuse::MountError;
use jericho_fuse::disk::{ATTACHED, Attached, FLUSHED};
use jericho_sys::process::{Process, Signal};

use crate::args::DetachArgs;
use crate::failure::{Context, Failure, Outcome};
use crate::marker::{self, Found};
use crate::mounts::{self, Mount};
use crate::{attached, background, busy, loops};

/// Maximum size of an extended attribute's value.
const VALUE_BYTES_MAX: usize = 64 << 10;
/// Maximum number of users in a message.
const USERS_MAX: usize = 10;
/// How long a disk may be busy although no process uses it.
const MOMENT: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(10);
/// How long a killed server may take to end before its connection is aborted.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long it may take after that.
const LONG: Duration = Duration::from_secs(120);

pub fn run(args: &DetachArgs) -> Outcome {
    if let Some(device) = &args.own_mount {
        let mount = attached::find_own(&args.disk, device)?;
        attached::check_visible(&mount)?;
        release(&mount, &args.disk)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mount = attached::find(&args.disk)?;
    let shown = args.disk.display();
    attached::check_visible(&mount)?;
    if mounts::is_dead(&mount.dir) {
        clean_up(&mount)?;
        if args.force {
            return Ok(ExitCode::SUCCESS);
        }
        return Err(Failure::new(format!(
            "the server of {shown} had died. This command has removed the rest of the disk. What programs had synced is on {}",
            mount.source.display()
        )));
    }
    let disk: Attached = serde_json::from_slice(&attribute(&mount.dir, ATTACHED)?)
        .context("this program does not understand the server; is it another version?")?;
    // Without a process, the server ends by itself.
    let server = background::open(disk.pid)?;
    if args.force {
        if let Some(server) = server {
            kill(&server, disk.pid, &mount)?;
        }
        clean_up(&mount)?;
        return Ok(ExitCode::SUCCESS);
    }
    release(&mount, &args.disk)?;
    // Opened before the server's end, because the device is free after that, and the directory may get another disk.
    let left = marker_of(&mount.dir);
    if let Some(server) = server {
        background::wait(&server, disk.pid, None)?;
    }
    let message = match left.transpose() {
        None => Ok(None),
        Some(found) => found.and_then(Found::take_when_ended),
    };
    attached::remove(&mount.dir);
    match message {
        Ok(None) => Ok(ExitCode::SUCCESS),
        Ok(Some(message)) => Err(Failure::new(format!(
            "{shown} was detached, but not everything is durable: {message}"
        ))),
        Err(error) => Err(Failure::new(format!(
            "{shown} was detached, but it is unknown whether everything is durable: {error}"
        ))),
    }
}

/// Opens the marker of a disk that was just unmounted.
fn marker_of(dir: &Path) -> std::io::Result<Option<Found>> {
    match marker::directory(dir)? {
        Some(dir) => marker::find(&dir),
        None => Ok(None),
    }
}

/// Makes the disk durable and unmounts it. Changes nothing if it is in use or cannot be made durable.
fn release(mount: &Mount, shown: &Path) -> Result<(), Failure> {
    let shown = shown.display();
    let stays = |why: String| {
        Err(Failure::new(format!(
            "{shown} stays attached, because not everything can be made durable: {why}. To give up what is not durable: \
             jericho detach --force {shown}"
        )))
    };
    let in_use = || {
        let users = busy::users(mount, USERS_MAX);
        let dir = mount.dir.display();
        (!users.is_empty()).then(|| Failure::new(format!("{dir} is in use: {}", users.join("; "))))
    };
    if let Some(failure) = in_use() {
        return Err(failure);
    }
    let mut held = vec![];
    for device in loops::over(mount) {
        held.extend(device.hold()?);
    }
    for device in &held {
        if let Err(failure) = device.sync() {
            // The server knows the cause of an error.
            let cause = flush(mount).unwrap_or_default();
            return match cause.is_empty() {
                true => Err(failure),
                false => stays(cause),
            };
        }
    }
    let cause = flush(mount)?;
    if !cause.is_empty() {
        return stays(cause);
    }
    // The flush may have taken long.
    for device in &held {
        device.check_unused()?;
    }
    for device in held {
        device.release()?;
    }
    let begun = Instant::now();
    loop {
        match attached::unmount(mount, false) {
            Err(error @ MountError::Busy { .. }) => {
                if let Some(failure) = in_use() {
                    return Err(failure);
                }
                // A program may have looked at the disk at this moment.
                if begun.elapsed() > MOMENT {
                    return Err(Failure::new(error.to_string()));
                }
                std::thread::sleep(POLL);
            }
            unmounted => return unmounted.map_err(|error| Failure::new(error.to_string())),
        }
    }
}

/// Makes the disk durable. Returns the message of the server, which is empty after a success.
fn flush(mount: &Mount) -> Result<String, Failure> {
    let message = attribute(&mount.dir, FLUSHED)?;
    Ok(String::from_utf8_lossy(&message).into_owned())
}

fn attribute(dir: &Path, name: &str) -> Result<Vec<u8>, Failure> {
    let mut value = vec![0; VALUE_BYTES_MAX];
    let length = rustix::fs::lgetxattr(dir, name, &mut value[..]);
    let length = length.context(format_args!("cannot ask the server of {}", dir.display()))?;
    value.truncate(length);
    Ok(value)
}

/// Ends a server, which may wait for a device that hangs, or for its own disk.
fn kill(server: &Process, pid: u32, mount: &Mount) -> Result<(), Failure> {
    let doing = "cannot end the server";
    // Opened before the mount ends. Only root can, and an ordinary user has no loop device for which the server could wait.
    let connection = attached::connection(mount);
    server.send(Signal::Kill).context(doing)?;
    if server.wait(Some(PATIENCE)).context(doing)? {
        return Ok(());
    }
    if let Some(connection) = connection {
        // An error is ignored: the wait tells.
        let _ = connection.abort();
    }
    match server.wait(Some(LONG)).context(doing)? {
        true => Ok(()),
        false => Err(Failure::new(format!(
            "the server was killed and has not ended: process {pid} waits in the kernel. The disk stays until it ends"
        ))),
    }
}

/// Removes what a dead server has left.
fn clean_up(mount: &Mount) -> Result<(), Failure> {
    let released = loops::abandon_all(mount, |note| eprintln!("jericho: {note}"));
    let unmounted = attached::unmount(mount, true);
    if let Ok(Some(found)) = marker_of(&mount.dir) {
        // An error is ignored: the next disk there does the same.
        let _ = found.take_now();
    }
    attached::remove(&mount.dir);
    unmounted.map_err(|e| Failure::new(e.to_string()))?;
    released
}
