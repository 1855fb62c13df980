//! Turns a directory into a mount and back: by mount(2) where the kernel permits it, otherwise by the setuid helper fusermount3.

use std::ffi::CString;
use std::fs::{File, TryLockError};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, UnmountFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

use crate::config::MountConfig;

const DEVICE: &str = "/dev/fuse";
const HELPER: &str = "fusermount3";

/// Why a directory could not be mounted or unmounted. The message names the directory and what to do.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the fields are what the messages name
pub enum MountError {
    /// The directory cannot be used.
    #[error("cannot mount on {}: {cause}", dir.display())]
    Directory { dir: PathBuf, cause: io::Error },
    /// The kernel has no FUSE, or the container has no device for it.
    #[error(
        "{DEVICE} does not exist: load the module with `modprobe fuse`, or give the container the \
         device (`--device /dev/fuse --cap-add SYS_ADMIN`)"
    )]
    NoDevice,
    /// The process may not use the device, and there is no helper.
    #[error(
        "mounting on {} is not permitted: run as root, or install {HELPER} (package fuse3), which \
         lets ordinary users mount", dir.display()
    )]
    NotPermitted { dir: PathBuf },
    /// The kernel refused the mount.
    #[error("mounting on {} failed: {cause}", dir.display())]
    Kernel { dir: PathBuf, cause: io::Error },
    /// The helper refused the mount.
    #[error("{HELPER} refused {}: {message}", dir.display())]
    Helper { dir: PathBuf, message: String },
    /// The mount was made, but serving it failed.
    #[error("serving the mount on {} failed: {cause}", dir.display())]
    Session { dir: PathBuf, cause: io::Error },
    /// Another mount covers the directory.
    #[error(
        "{} is already a mount: unmount it first or choose another directory", dir.display()
    )]
    Taken { dir: PathBuf },
    /// Another process holds the directory's lock.
    #[error(
        "{} is locked by another program (flock), or something else is being mounted on it", dir.display()
    )]
    Locked { dir: PathBuf },
    /// Files or working directories of the mount are in use.
    #[error("{} is busy: close the files and leave the directories in it", dir.display())]
    Busy { dir: PathBuf },
    /// Unmounting failed for another reason.
    #[error("unmounting {} failed: {message}", dir.display())]
    Unmount { dir: PathBuf, message: String },
}

/// Returns whether this process may open the device.
pub fn may_open_device() -> bool {
    open_device().is_ok()
}

fn open_device() -> Result<OwnedFd, Errno> {
    rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

/// Longest wait for another process that is mounting on the directory.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(30);

/// Locks a directory on which nothing is mounted, against other processes that are about to mount on it. The lock is on the
/// directory below the new mount.
fn reserve(dir: &Path) -> Result<File, MountError> {
    let failed = |cause: io::Error| MountError::Directory {
        dir: dir.to_owned(),
        cause,
    };
    // Checks before the open as well: otherwise the daemon of an existing mount would have to answer the open.
    refuse_mount(dir)?;
    let file = File::open(dir).map_err(failed)?;
    let deadline = Instant::now() + LOCK_WAIT_MAX;
    loop {
        match file.try_lock() {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(TryLockError::WouldBlock) => {
                return Err(MountError::Locked {
                    dir: dir.to_owned(),
                });
            }
            Err(TryLockError::Error(cause)) => return Err(failed(cause)),
        }
    }
    refuse_mount(dir)?;
    Ok(file)
}

/// Fails when something is mounted on exactly this directory.
fn refuse_mount(dir: &Path) -> Result<(), MountError> {
    // Requests nothing that a daemon would have to answer.
    let flags = AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    let found = rustix::fs::statx(CWD, dir, flags, StatxFlags::empty());
    let found = found.map_err(|cause| MountError::Directory {
        dir: dir.to_owned(),
        cause: cause.into(),
    })?;
    if found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
        return Err(MountError::Taken {
            dir: dir.to_owned(),
        });
    }
    Ok(())
}

/// Mounts on `dir`, on which nothing may be mounted, and returns the channel to the kernel.
pub(crate) fn attach(dir: &Path, config: &MountConfig) -> Result<OwnedFd, MountError> {
    let _reserved = reserve(dir)?;
    match open_device() {
        Ok(device) => match mount_directly(&device, dir, config) {
            Ok(()) => Ok(device),
            Err(Errno::PERM | Errno::ACCESS) => ask_helper(dir, config),
            Err(Errno::NODEV) => Err(MountError::NoDevice),
            Err(cause) => Err(MountError::Kernel {
                dir: dir.to_owned(),
                cause: cause.into(),
            }),
        },
        Err(Errno::NOENT | Errno::NODEV | Errno::NXIO) => Err(MountError::NoDevice),
        Err(Errno::ACCESS | Errno::PERM) => ask_helper(dir, config),
        Err(cause) => Err(MountError::Kernel {
            dir: dir.to_owned(),
            cause: cause.into(),
        }),
    }
}

fn mount_directly(device: &OwnedFd, dir: &Path, config: &MountConfig) -> Result<(), Errno> {
    let mut data = format!(
        "fd={},rootmode=40000,user_id={},group_id={},default_permissions",
        device.as_raw_fd(),
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw(),
    );
    if config.allow_other {
        data.push_str(",allow_other");
    }
    let mut flags = MountFlags::empty();
    if config.read_only {
        flags |= MountFlags::RDONLY;
    }
    if !config.privileged {
        flags |= MountFlags::NOSUID | MountFlags::NODEV;
    }
    let data = CString::new(data).map_err(|_| Errno::INVAL)?;
    rustix::mount::mount(
        config.source.as_str(),
        dir,
        format!("fuse.{}", config.subtype),
        flags,
        data.as_c_str(),
    )
}

/// Mounts by fusermount3, which passes the channel back over a socket.
fn ask_helper(dir: &Path, config: &MountConfig) -> Result<OwnedFd, MountError> {
    let kernel = |cause: io::Error| MountError::Kernel {
        dir: dir.to_owned(),
        cause,
    };
    let mut options = format!(
        "fsname={},subtype={},default_permissions",
        // A comma would end the option.
        config.source.replace('\\', "\\\\").replace(',', "\\,"),
        config.subtype,
    );
    if config.allow_other {
        options.push_str(",allow_other");
    }
    if config.read_only {
        options.push_str(",ro");
    }
    let (ours, theirs) = UnixStream::pair().map_err(kernel)?;
    // Lets the helper inherit its end: other descriptors are closed on exec.
    rustix::io::fcntl_setfd(&theirs, rustix::io::FdFlags::empty()).map_err(|e| kernel(e.into()))?;
    let child = Command::new(HELPER)
        .arg("-o")
        .arg(options)
        .arg("--")
        .arg(dir)
        .env("_FUSE_COMMFD", theirs.as_raw_fd().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    drop(theirs);
    let child = match child {
        Ok(child) => child,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(MountError::NotPermitted {
                dir: dir.to_owned(),
            });
        }
        Err(cause) => return Err(kernel(cause)),
    };
    let device = receive_descriptor(&ours);
    drop(ours);
    let output = child.wait_with_output().map_err(kernel)?;
    match device.map_err(kernel)? {
        Some(device) => Ok(device),
        None => {
            let mut message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            if message.contains(DEVICE) && message.contains("ermission") {
                message.push_str("; to let ordinary users mount, run as root: chmod 666 /dev/fuse");
            }
            Err(MountError::Helper {
                dir: dir.to_owned(),
                message,
            })
        }
    }
}

/// Receives one descriptor from the socket. Returns `None` when the other end closed the socket without sending one.
fn receive_descriptor(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut byte = [0u8; 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(
            socket.as_fd(),
            &mut [IoSliceMut::new(&mut byte)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )
    })?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut descriptors) = message {
            return Ok(descriptors.next());
        }
    }
    Ok(None)
}

/// Detaches the mount on `dir`. With `lazy`, also detaches a mount that is in use.
pub fn unmount(dir: &Path, lazy: bool) -> Result<(), MountError> {
    let mut flags = UnmountFlags::NOFOLLOW;
    if lazy {
        flags |= UnmountFlags::DETACH;
    }
    match rustix::mount::unmount(dir, flags) {
        Ok(()) => Ok(()),
        Err(Errno::BUSY) => Err(MountError::Busy {
            dir: dir.to_owned(),
        }),
        Err(Errno::PERM) => unmount_by_helper(dir, lazy),
        Err(cause) => Err(MountError::Unmount {
            dir: dir.to_owned(),
            message: io::Error::from(cause).to_string(),
        }),
    }
}

fn unmount_by_helper(dir: &Path, lazy: bool) -> Result<(), MountError> {
    let failed = |message: String| MountError::Unmount {
        dir: dir.to_owned(),
        message,
    };
    let mut command = Command::new(HELPER);
    command.arg("-u");
    if lazy {
        command.arg("-z");
    }
    let output = command
        .arg("--")
        .arg(dir)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output();
    let output = match output {
        Ok(output) => output,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(failed(format!(
                "not permitted, and {HELPER} (package fuse3) is missing"
            )));
        }
        Err(e) => return Err(failed(e.to_string())),
    };
    if output.status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if message.contains("busy") {
        return Err(MountError::Busy {
            dir: dir.to_owned(),
        });
    }
    Err(failed(message))
}

/// A handle that aborts the kernel's connection to a mount's daemon. Keeps neither the connection nor the mount alive.
pub struct Connection(OwnedFd);

impl Connection {
    /// Finds the connection of the mount whose files have a st_dev with this minor number. The mount must not have ended, because
    /// another mount may then have the number. Requires root. Fails with EPERM or ENOENT.
    pub fn of_mount(minor: u32) -> io::Result<Connection> {
        // Mounts the control filesystem privately, because not every machine mounts it at /sys/fs/fuse/connections.
        let control = rustix::mount::fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
        rustix::mount::fsconfig_create(control.as_fd())?;
        let connections = rustix::mount::fsmount(
            control.as_fd(),
            FsMountFlags::FSMOUNT_CLOEXEC,
            MountAttrFlags::empty(),
        )?;
        let file = rustix::fs::openat(
            &connections,
            format!("{minor}/abort"),
            OFlags::WRONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        Ok(Connection(file))
    }

    /// Aborts the connection although the detached mount is still in use. Waiting requests get ECONNABORTED, later ones ENOTCONN.
    /// Does nothing when the connection has ended, even if another mount has its number now.
    pub fn abort(&self) -> io::Result<()> {
        rustix::io::write(&self.0, b"1")?;
        Ok(())
    }
}

/// Checks whether this process can mount at all, and changes nothing. `dir` is for the message.
pub fn check_available(dir: &Path) -> Result<(), MountError> {
    match open_device() {
        Err(Errno::NOENT | Errno::NODEV | Errno::NXIO) => return Err(MountError::NoDevice),
        Ok(_) if rustix::process::geteuid().is_root() => return Ok(()),
        _ => {}
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    if std::env::split_paths(&path).any(|p| p.join(HELPER).is_file()) {
        Ok(())
    } else {
        Err(MountError::NotPermitted {
            dir: dir.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec};

    use super::*;

    /// Mounts a filesystem without a daemon. Returns its channel and the minor of its st_dev.
    fn mount_unserved(dir: &Path) -> (OwnedFd, u32) {
        let channel = attach(dir, &MountConfig::for_this_user("none".into(), false)).unwrap();
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let dir = dir.to_str().unwrap();
        let fields = |line: &str| line.split(' ').map(String::from).collect::<Vec<_>>();
        let mount = mounts.lines().map(fields).rfind(|f| f[4] == dir).unwrap();
        let minor = mount[2].strip_prefix("0:").unwrap().parse().unwrap();
        (channel, minor)
    }

    fn has_ended(channel: &OwnedFd) -> bool {
        let mut events = [PollFd::new(channel, PollFlags::IN)];
        rustix::event::poll(&mut events, Some(&Timespec::default())).unwrap();
        events[0].revents().contains(PollFlags::ERR)
    }

    #[test]
    fn another_mount_with_the_number_of_an_ended_one_is_not_aborted() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: only root aborts connections");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        let begun = Instant::now();
        loop {
            let (first, minor) = mount_unserved(&dir);
            let connection = Connection::of_mount(minor).unwrap();
            unmount(&dir, true).unwrap();
            while !has_ended(&first) {
                assert!(begun.elapsed() < Duration::from_secs(60));
                std::thread::yield_now();
            }
            let (second, its_minor) = mount_unserved(&dir);
            connection.abort().unwrap();
            let aborted = has_ended(&second);
            Connection::of_mount(its_minor).unwrap().abort().unwrap();
            assert!(has_ended(&second));
            unmount(&dir, true).unwrap();
            assert!(!aborted);
            // The numbers differ if another process mounted at the same moment.
            if its_minor == minor {
                return;
            }
            assert!(begun.elapsed() < Duration::from_secs(60));
        }
    }
}
