//! Loop devices over the file of a disk.

use std::collections::HashSet;
use std::fs::{File, Metadata, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use jericho_fuse::disk;
use jericho_storage::BLOCK_BYTES;
use jericho_sys::block::{self, Open};
use jericho_sys::loop_device::{self, LoopOptions};

use crate::busy;
use crate::failure::{Context, Failure};
use crate::mounts::{self, Mount};

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

/// A loop device over the file of a disk, as sysfs shows it. Another mount namespace may have a file of the same path, and another program may
/// get the number of the device after its end. So every use opens the device first and compares the file under it.
pub struct LoopDevice {
    path: PathBuf,
    /// The path of the file as sysfs shows it.
    file: PathBuf,
    /// st_dev of the disk.
    disk: u64,
}

/// Returns the loop devices over the file of a disk.
pub fn over(mount: &Mount) -> Vec<LoopDevice> {
    let entries = std::fs::read_dir("/sys/block")
        .into_iter()
        .flatten()
        .flatten();
    let found = entries.filter_map(|entry| {
        let file = backing_of(&entry.path()).filter(|file| file.parent() == Some(&mount.dir))?;
        Some(LoopDevice {
            path: Path::new("/dev").join(entry.file_name()),
            file,
            disk: device_of(mount),
        })
    });
    found.collect()
}

/// Returns whether a path is a loop device over the file of a disk.
pub fn is_over(device: &Path, mount: &Mount) -> bool {
    backing(device).is_some()
        && File::open(device).is_ok_and(|open| is_of(&open, device_of(mount)).unwrap_or(false))
}

/// Returns a loop device over a file or block device. The kernel's locks do not show such a use.
pub fn over_file(file: &Path) -> Option<PathBuf> {
    let wanted = std::fs::metadata(file).ok()?;
    let is_block = |metadata: &Metadata| metadata.file_type().is_block_device();
    let is_it = |device: &Path, named: &Path| {
        let open = block::open(device, Open::default());
        match open.and_then(block::loop_backing) {
            Ok(backing) => match is_block(&wanted) {
                true => backing.rdevice == wanted.rdev(),
                false => (backing.device, backing.inode) == (wanted.dev(), wanted.ino()),
            },
            Err(error) if has_no_file(&error) => false,
            // An ordinary user may not open it. Then its path must do, which may be that of another mount namespace.
            Err(_) => std::fs::metadata(named).is_ok_and(|named| match is_block(&wanted) {
                true => is_block(&named) && named.rdev() == wanted.rdev(),
                false => (named.dev(), named.ino()) == (wanted.dev(), wanted.ino()),
            }),
        }
    };
    let mut entries = std::fs::read_dir("/sys/block").ok()?.flatten();
    entries.find_map(|entry| {
        let named = backing_of(&entry.path())?;
        let device = Path::new("/dev").join(entry.file_name());
        is_it(&device, &named).then_some(device)
    })
}

/// Takes the files away from all loop devices of a disk whose server is dead, as `LoopDevice::abandon` does. Goes on after a failure. Calls
/// `note` with a message for each device in use.
pub fn abandon_all(mount: &Mount, note: impl Fn(String)) -> Result<(), Failure> {
    let mut failures = vec![];
    for device in over(mount) {
        match device.abandon() {
            Ok(true) => {}
            Ok(false) => note(format!(
                "{} ends when nothing uses it any more; it is in use now",
                device.path.display()
            )),
            Err(failure) => failures.push(failure.to_string()),
        }
    }
    match failures.is_empty() {
        true => Ok(()),
        false => Err(Failure::new(failures.join("; "))),
    }
}

fn device_of(mount: &Mount) -> u64 {
    rustix::fs::makedev(mount.device.0, mount.device.1)
}

/// Returns whether an open loop device is over the file of the disk with this st_dev.
fn is_of(open: &File, disk: u64) -> std::io::Result<bool> {
    match block::loop_backing(open) {
        Ok(backing) => Ok((backing.device, backing.inode) == (disk, disk::FILE)),
        Err(error) if has_no_file(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns whether an error means that a loop device has no file.
fn has_no_file(error: &std::io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENXIO)
}

impl LoopDevice {
    /// Opens the device so that nothing can mount it. Returns `None` if it has ended. Fails, with the names of the users, if it is in use.
    pub fn hold(self) -> Result<Option<Held>, Failure> {
        let begun = Instant::now();
        let shown = self.path.display();
        loop {
            match self.open(0).context(format_args!("cannot open {shown}"))? {
                Some(_) => {}
                None => return Ok(None),
            }
            // O_EXCL fails with EBUSY while the device is mounted, or is part of another device.
            let users = match self.open(libc::O_EXCL) {
                Ok(None) => return Ok(None),
                Ok(Some(open)) => match openers(&self.path) {
                    users if users.is_empty() => return Ok(Some(Held { device: self, open })),
                    users => users,
                },
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => users(&self.path),
                Err(error) => return Err(Failure::new(format!("cannot open {shown}: {error}"))),
            };
            let is_mounted = users.iter().any(|user| user.starts_with("mounted"));
            if is_mounted || begun.elapsed() > PATIENCE {
                return Err(in_use(&self.path, &users));
            }
            std::thread::sleep(POLL);
        }
    }

    /// Takes the file away from the device of a disk whose server is dead. The kernel does so when nothing uses the device any more. Returns
    /// whether that is so.
    pub fn abandon(&self) -> Result<bool, Failure> {
        let shown = self.path.display();
        let open = match self.open(0) {
            Ok(Some(open)) => open,
            Ok(None) => return Ok(true),
            // The kernel asks the dead server for the attributes of the file if it no longer has them.
            Err(error) if mounts::says_dead(&error) => {
                File::open(&self.path).context(format_args!("cannot open {shown}"))?
            }
            Err(error) => return Err(Failure::new(format!("cannot open {shown}: {error}"))),
        };
        match loop_device::detach(&open) {
            Err(error) if !has_no_file(&error) => {
                return Err(Failure::new(format!("cannot release {shown}: {error}")));
            }
            _ => drop(open),
        }
        Ok(mounted_on(&self.path).is_empty() && self.is_gone())
    }

    /// Opens the device. Returns `None` if it is not over the file of the disk.
    fn open(&self, flags: i32) -> std::io::Result<Option<File>> {
        let mut options = OpenOptions::new();
        match options.read(true).custom_flags(flags).open(&self.path) {
            Ok(open) => Ok(is_of(&open, self.disk)?.then_some(open)),
            Err(error) if has_no_file(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Waits until the device has another file or none.
    fn is_gone(&self) -> bool {
        let begun = Instant::now();
        while backing(&self.path).as_ref() == Some(&self.file) {
            if begun.elapsed() > PATIENCE {
                return false;
            }
            std::thread::sleep(POLL);
        }
        true
    }
}

/// A loop device that nothing can mount. While it is open, the kernel takes no file away from it.
pub struct Held {
    device: LoopDevice,
    open: File,
}

impl Held {
    /// Writes everything that the kernel has cached of the device.
    pub fn sync(&self) -> Result<(), Failure> {
        let shown = self.device.path.display();
        (self.open.sync_all()).context(format_args!("cannot write {shown} back"))
    }

    /// Fails, with the names of the users, if a process has opened the device meanwhile.
    pub fn check_unused(&self) -> Result<(), Failure> {
        match openers(&self.device.path) {
            users if users.is_empty() => Ok(()),
            users => Err(in_use(&self.device.path, &users)),
        }
    }

    /// Takes the file away from the device.
    pub fn release(self) -> Result<(), Failure> {
        let Held { device, open } = self;
        let shown = device.path.display();
        loop_device::detach(&open).context(format_args!("cannot release {shown}"))?;
        drop(open);
        match device.is_gone() {
            true => Ok(()),
            false => Err(Failure::new(format!(
                "{shown} ends when it is closed by: {}",
                users(&device.path).join("; ")
            ))),
        }
    }
}

fn in_use(device: &Path, users: &[String]) -> Failure {
    Failure::new(format!(
        "{} is in use: {}",
        device.display(),
        users.join("; ")
    ))
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
    let is_it = |mount: &Mount| {
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
