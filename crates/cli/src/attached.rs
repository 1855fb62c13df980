//! Where attached disks are: the directory and the file of each, and how the commands find them in the kernel's list of mounts.

use std::ffi::OsString;
use std::fs::DirBuilder;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use jericho_ether::Remote;
use jericho_fuse::attach::{self, Connection};
use jericho_fuse::{MountError, disk};

use crate::failure::{Context, Failure};
use crate::mounts::{self, Mount};
use crate::{loops, marker, remote};

/// Maximum length of a name that is made of a path. The end of the path distinguishes devices best.
const NAME_BYTES_MAX: usize = 200;

/// The device of a disk.
#[derive(Clone, Debug)]
pub enum Device {
    /// The absolute path of a file or block device.
    Local(PathBuf),
    /// A device of another host.
    Remote(Remote),
}

impl Device {
    /// Finds the device that a user has named.
    pub fn named(path: &Path) -> Result<Device, Failure> {
        match remote::named(path)? {
            Some(remote) => Ok(Device::Remote(remote)),
            None => std::fs::canonicalize(path)
                .map(Device::Local)
                .context(format_args!("cannot attach {}", path.display())),
        }
    }

    /// Returns what the list of mounts shows as the source of the disk.
    pub fn source(&self) -> PathBuf {
        match self {
            Device::Local(path) => path.clone(),
            Device::Remote(remote) => remote.to_string().into(),
        }
    }

    /// Returns the name of the disk's directory: /srv/a.img is srv-a.img.
    pub fn name(&self) -> PathBuf {
        let name = match self {
            Device::Local(path) => path.as_os_str().as_bytes().to_vec(),
            Device::Remote(remote) => format!("{}/{}", remote.host, remote.name).into_bytes(),
        };
        let name = name.iter().skip_while(|byte| **byte == b'/');
        let name: Vec<u8> = name
            .map(|byte| if *byte == b'/' { b'-' } else { *byte })
            .collect();
        let start = name.len().saturating_sub(NAME_BYTES_MAX);
        OsString::from_vec(name[start..].to_vec()).into()
    }

    /// Returns the name of the disk's file.
    pub fn file_name(&self) -> OsString {
        match self {
            Device::Local(path) => path.file_name().unwrap_or_default().to_owned(),
            Device::Remote(remote) => remote.name.clone().into(),
        }
    }
}

/// Returns the directory of the disks of this user.
fn base() -> Result<PathBuf, Failure> {
    if rustix::process::geteuid().is_root() {
        return Ok("/run/jericho".into());
    }
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    match runtime.filter(|path| path.is_absolute()) {
        Some(runtime) => Ok(runtime.join("jericho")),
        None => Err(Failure::new(
            "XDG_RUNTIME_DIR is not set: say with --at in which directory the file should be",
        )),
    }
}

/// Makes the directory for a disk, unless it exists. Removes the mount of a server that has died. Returns the directory, and whether the server
/// removes it at the end: if this call has made it, or if the user has named no directory.
pub fn prepare(at: Option<&Path>, device: &Device) -> Result<(PathBuf, bool), Failure> {
    let wanted = match at {
        Some(dir) => dir.to_owned(),
        None => base()?.join(device.name()),
    };
    let shown = wanted.display();
    if let Some(parent) = wanted.parent().filter(|_| at.is_none()) {
        let made = DirBuilder::new().recursive(true).mode(0o755).create(parent);
        made.context(format_args!("cannot make {}", parent.display()))?;
    }
    let is_new = match DirBuilder::new().mode(0o700).create(&wanted) {
        Ok(()) => true,
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => at.is_none(),
        Err(error) => return Err(Failure::new(format!("cannot make {shown}: {error}"))),
    };
    let dir = mounts::resolve(&wanted)?;
    if let Some(mount) = mounts::at(&dir)? {
        if !is_disk(&mount) || !mounts::is_dead(&dir) {
            return Err(Failure::new(format!(
                "{shown} is already a mount (of {}, type {})",
                mount.source.display(),
                mount.filesystem
            )));
        }
        loops::abandon_all(&mount, |note| tracing::warn!("{note}"))?;
        // Another attach may have taken the place meanwhile.
        if !mounts::is_dead(&dir) {
            return Err(Failure::new(format!(
                "{shown} was just attached by another process"
            )));
        }
        unmount(&mount, true).map_err(|e| Failure::new(e.to_string()))?;
        tracing::warn!("removed the disk at {shown}, whose server is dead");
    }
    take_marker(&dir)?;
    Ok((dir, is_new))
}

/// Removes the marker of a former server. Fails if something else is in the directory.
fn take_marker(dir: &Path) -> Result<(), Failure> {
    let shown = dir.display();
    let not_empty = || {
        Failure::new(format!(
            "{shown} is not empty: what is in it would be hidden; choose an empty directory"
        ))
    };
    let entries = std::fs::read_dir(dir).context(format_args!("cannot use {shown}"))?;
    let mut entries = entries.flatten();
    if entries.any(|entry| entry.file_name() != marker::NAME) {
        return Err(not_empty());
    }
    let below = marker::directory(dir).context(format_args!("cannot use {shown}"))?;
    let found = match below.map(|below| marker::find(&below)) {
        None | Some(Ok(None)) => return Ok(()),
        Some(Ok(Some(found))) => found,
        Some(Err(_)) => return Err(not_empty()),
    };
    let message = found.take_now();
    if let Some(message) = message.context(format_args!("cannot use {shown}"))? {
        tracing::warn!(
            "the disk that was attached at {shown} before lost what programs had not synced: {message}"
        );
    }
    Ok(())
}

/// Unmounts a disk as `attach::unmount` does. Fails if its directory shows another mount.
pub fn unmount(mount: &Mount, lazy: bool) -> Result<(), MountError> {
    match check_visible(mount) {
        Ok(()) => attach::unmount(&mount.dir, lazy),
        Err(failure) => Err(MountError::Unmount {
            dir: mount.dir.clone(),
            message: failure.to_string(),
        }),
    }
}

/// Fails if the directory of a disk does not show the disk: requests would go to the server of another one.
pub fn check_visible(mount: &Mount) -> Result<(), Failure> {
    let shown = mount.dir.display();
    match mounts::at(&mount.dir)? {
        Some(there) if there.device == mount.device => Ok(()),
        Some(there) => Err(Failure::new(format!(
            "another mount covers {shown}: unmount it first (of {}, type {})",
            there.source.display(),
            there.filesystem
        ))),
        None => Err(Failure::new(format!("{shown} is no longer mounted"))),
    }
}

/// Opens the FUSE connection of a disk. Returns `None` without the rights of root, or if the disk is no longer mounted.
pub fn connection(mount: &Mount) -> Option<Connection> {
    let opened = Connection::of_mount(mount.device.1);
    let connection = opened
        .inspect_err(|error| tracing::debug!(%error, "cannot open the FUSE connection"))
        .ok()?;
    // If the mount has ended, another one may have its number.
    let is_it = |there: &Mount| there.device == mount.device && there.source == mount.source;
    mounts::list().ok()?.iter().any(is_it).then_some(connection)
}

/// Removes the directory of a disk if it is among those that `prepare` makes. Does nothing if it is not empty.
pub fn remove(dir: &Path) {
    if base().is_ok_and(|base| dir.starts_with(base)) {
        let _ = std::fs::remove_dir(dir);
    }
}

/// Returns whether a mount is a disk of this user. Other users can make FUSE mounts with any names.
fn is_disk(mount: &Mount) -> bool {
    mount.filesystem.strip_prefix("fuse.") == Some(disk::SUBTYPE)
        && mount.user == Some(rustix::process::getuid().as_raw())
}

/// Finds the mount of a disk's server by its directory and its device number, which is "MAJOR:MINOR". Other mounts may cover it.
pub fn find_own(dir: &Path, device: &str) -> Result<Mount, Failure> {
    let is_it = |mount: &Mount| mount.dir == dir && device_text(mount) == device;
    let found = mounts::list()?.into_iter().filter(is_disk).rfind(is_it);
    found.ok_or_else(|| Failure::new(format!("{} is no longer mounted", dir.display())))
}

/// Returns the device number of a mount as text.
pub fn device_text(mount: &Mount) -> String {
    format!("{}:{}", mount.device.0, mount.device.1)
}

/// Finds an attached disk by what `attach` has printed, by its directory, or by its device.
pub fn find(what: &Path) -> Result<Mount, Failure> {
    let disks: Vec<Mount> = mounts::list()?.into_iter().filter(is_disk).collect();
    let of_dir = |dir: PathBuf| disks.iter().rfind(|disk| disk.dir == dir);
    let of_source = |source: &Path| disks.iter().rfind(|disk| disk.source == source);
    let resolved = |path: &Path| mounts::resolve(path).ok();
    // The file itself comes last: a server whose device hangs may not answer for it.
    let found = (of_source(what))
        .or_else(|| what.parent().and_then(resolved).and_then(of_dir))
        .or_else(|| resolved(what).and_then(of_dir))
        .or_else(|| disks.iter().rfind(|disk| loops::is_over(what, disk)))
        .or_else(|| of_source(&resolved(what)?));
    found.cloned().ok_or_else(|| {
        let shown = what.display();
        Failure::new(match &disks[..] {
            [] => format!("{shown} is not attached; no disk is"),
            _ => {
                let names = disks.iter().map(|disk| disk.source.display().to_string());
                let names: Vec<String> = names.collect();
                format!("{shown} is not attached; these are: {}", names.join(", "))
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_gives_its_disk_a_directory_and_a_file() {
        let named = |device: &Device| (device.name(), device.file_name());
        let local = Device::Local("/srv/a b/disk.img".into());
        assert_eq!(
            named(&local),
            ("srv-a b-disk.img".into(), "disk.img".into())
        );
        let remote = Device::Remote("tyche://hostb/data".parse().unwrap());
        assert_eq!(named(&remote), ("hostb-data".into(), "data".into()));
        let deep = Device::Local("/x".repeat(400).into());
        assert_eq!(deep.name().as_os_str().len(), NAME_BYTES_MAX);
    }

    #[test]
    fn the_mount_of_another_user_is_no_disk() {
        let uid = rustix::process::getuid().as_raw();
        let mount = |user| Mount {
            device: (0, 52),
            dir: "/mnt".into(),
            filesystem: format!("fuse.{}", disk::SUBTYPE),
            source: "/srv/a".into(),
            user,
        };
        assert!(is_disk(&mount(Some(uid))));
        assert!(!is_disk(&mount(Some(uid + 1))));
        assert!(!is_disk(&mount(None)));
    }
}
