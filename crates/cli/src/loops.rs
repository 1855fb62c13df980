//! Loop devices over the file of a disk.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use jericho_storage::BLOCK_BYTES;
use jericho_sys::loop_device::{self, LoopOptions};

use crate::failure::{Context, Failure};
use crate::{busy, mounts};

/// How long programs that look at every new device, such as udev, may have it open.
const PATIENCE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(10);
/// Maximum number of users in a message.
const USERS_MAX: usize = 10;

/// Makes a loop device over a file. Returns its path.
pub fn make(file: &Path, read_only: bool) -> Result<PathBuf, Failure> {
    let backing = OpenOptions::new().read(true).write(!read_only).open(file);
    let backing = backing.context(format_args!("cannot open {}", file.display()))?;
    let options = LoopOptions {
        read_only,
        block_bytes: BLOCK_BYTES as u32,
    };
    loop_device::attach(&backing, file, options).map_err(|error| {
        let what_to_do = match error.kind() {
            ErrorKind::PermissionDenied => "; run as root, or leave out --loop",
            ErrorKind::NotFound => {
                "; load the module with `modprobe loop`, give the container the devices, or leave out --loop"
            }
            _ => "",
        };
        Failure::new(format!("cannot make a loop device: {error}{what_to_do}"))
    })
}

/// Returns the file under a loop device. Returns `None` for other files, and for a loop device without a file.
pub fn backing(device: &Path) -> Option<PathBuf> {
    let metadata = std::fs::metadata(device).ok()?;
    let rdev = metadata.rdev();
    let numbers = format!("{}:{}", rustix::fs::major(rdev), rustix::fs::minor(rdev));
    let is_block = metadata.file_type().is_block_device();
    is_block.then(|| backing_of(&Path::new("/sys/dev/block").join(numbers)))?
}

/// Reads the file under a loop device from its directory in sysfs.
fn backing_of(sysfs: &Path) -> Option<PathBuf> {
    let text = std::fs::read_to_string(sysfs.join("loop/backing_file")).ok()?;
    Some(text.trim_end_matches('\n').into())
}

/// Returns the loop devices over files in a directory.
pub fn over(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/sys/block")
        .into_iter()
        .flatten()
        .flatten();
    let is_over = |path: &Path| backing_of(path).is_some_and(|file| file.parent() == Some(dir));
    let found = entries.filter(|entry| is_over(&entry.path()));
    found
        .map(|entry| Path::new("/dev").join(entry.file_name()))
        .collect()
}

/// Writes everything that the kernel has cached of a loop device, and takes its file away. Fails, with the names of the users, if the
/// device is in use.
pub fn release(device: &Path) -> Result<(), Failure> {
    let begun = Instant::now();
    let shown = device.display();
    let open = loop {
        // O_EXCL fails with EBUSY while the device is mounted, or is part of another device.
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_EXCL)
            .open(device);
        let users = match opened {
            Ok(open) => match openers(device) {
                users if users.is_empty() => break open,
                users => users,
            },
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => users(device),
            Err(error) => return Err(Failure::new(format!("cannot open {shown}: {error}"))),
        };
        let is_mounted = users.iter().any(|user| user.starts_with("mounted"));
        if is_mounted || begun.elapsed() > PATIENCE {
            return Err(Failure::new(format!(
                "{shown} is in use: {}",
                users.join("; ")
            )));
        }
        std::thread::sleep(POLL);
    };
    open.sync_all()
        .context(format_args!("cannot write {shown} back"))?;
    clear(open, device)
}

/// Takes the file away from a loop device of a disk whose server is dead. The kernel does so when nothing uses the device any more. Returns
/// whether that is so.
pub fn abandon(device: &Path) -> Result<bool, Failure> {
    let open = File::open(device).context(format_args!("cannot open {}", device.display()))?;
    loop_device::detach(&open).context(format_args!("cannot release {}", device.display()))?;
    drop(open);
    Ok(mounted_on(device).is_empty() && is_gone(device))
}

fn clear(open: File, device: &Path) -> Result<(), Failure> {
    let shown = device.display();
    loop_device::detach(&open).context(format_args!("cannot release {shown}"))?;
    drop(open);
    match is_gone(device) {
        true => Ok(()),
        false => Err(Failure::new(format!(
            "{shown} ends when it is closed by: {}",
            users(device).join("; ")
        ))),
    }
}

/// Waits for the end of a loop device.
fn is_gone(device: &Path) -> bool {
    let begun = Instant::now();
    while backing(device).is_some() {
        if begun.elapsed() > PATIENCE {
            return false;
        }
        std::thread::sleep(POLL);
    }
    true
}

fn openers(device: &Path) -> Vec<String> {
    let rdev = std::fs::metadata(device).map(|metadata| metadata.rdev());
    rdev.map(|rdev| busy::openers(rdev, USERS_MAX))
        .unwrap_or_default()
}

/// Returns what uses a loop device: mounts, other devices, and processes.
fn users(device: &Path) -> Vec<String> {
    let mut users = mounted_on(device);
    let name = device.file_name().unwrap_or_default();
    let holders = Path::new("/sys/block").join(name).join("holders");
    let holders = std::fs::read_dir(holders).into_iter().flatten().flatten();
    users.extend(holders.map(|holder| format!("part of {}", holder.file_name().display())));
    users.extend(openers(device));
    if users.is_empty() {
        users.push("by the kernel, for example as swap space".into());
    }
    users
}

/// Returns where a device is mounted, in all mount namespaces that this user can see.
fn mounted_on(device: &Path) -> Vec<String> {
    let Ok(rdev) = std::fs::metadata(device).map(|metadata| metadata.rdev()) else {
        return vec![];
    };
    let numbers = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
    let is_it = |mount: &mounts::Mount| {
        // A partition has the name of its device and a number after it.
        let source = mount.source.as_os_str().as_encoded_bytes();
        let partition = source.strip_prefix(device.as_os_str().as_encoded_bytes());
        mount.device == numbers || partition.is_some_and(|rest| matches!(rest, [] | [b'p', ..]))
    };
    let here = mounts::list().unwrap_or_default();
    let dirs: Vec<String> = (here.iter().filter(|mount| is_it(mount)))
        .map(|mount| format!("mounted on {}", mount.dir.display()))
        .collect();
    if !dirs.is_empty() {
        return dirs;
    }
    let mut seen = HashSet::new();
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    for process in processes {
        let Ok(namespace) = std::fs::read_link(process.path().join("ns/mnt")) else {
            continue;
        };
        if !seen.insert(namespace) {
            continue;
        }
        let there = mounts::seen_by(&process.path().join("mountinfo")).unwrap_or_default();
        if let Some(mount) = there.iter().find(|mount| is_it(mount)) {
            return vec![format!(
                "mounted on {} in the mount namespace of process {}",
                mount.dir.display(),
                process.file_name().display()
            )];
        }
    }
    vec![]
}
