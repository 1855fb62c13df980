//! Errors of formatting and opening a volume. Each message names the thing and the remedy.

use std::path::PathBuf;
use std::sync::Arc;

use jericho_format::superblock::SuperblockError;
use jericho_storage::IoError;

/// The reason why a volume cannot be formatted or opened.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// There is no such file or device.
    #[error("{0} does not exist; make a volume there with: jericho format {0} --size 1G")]
    Missing(PathBuf),
    /// The path is a directory.
    #[error("{0} is a directory; name a file in it or a block device")]
    IsDirectory(PathBuf),
    /// The path is neither a regular file nor a block device.
    #[error("{0} is neither a regular file nor a block device; name one of these")]
    WrongKind(PathBuf),
    /// The file may not be written.
    #[error("{0} is read-only; make it writable (chmod u+w) or open it with --read-only")]
    ReadOnly(PathBuf),
    /// The system refused to open, create, resize or inspect the file.
    #[error("cannot {action} {path}: {cause}")]
    System {
        /// The action that failed, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the system.
        cause: std::io::Error,
    },
    /// The host cannot allocate all of a file's space.
    #[error(
        "{} cannot have {bytes} bytes: {cause}; give a smaller --size, make room there, or take space only as it is \
         used: --sparse",
        path.display()
    )]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The host's error.
        cause: IoError,
    },
    /// The device could not be opened. Holds the message of the storage.
    #[error("{0}")]
    Open(String),
    /// The device has no label.
    #[error("{0} is not a Jericho volume; make one there with: jericho format {0}")]
    NotAVolume(Arc<str>),
    /// A label or superblock has a newer format.
    #[error(
        "{device} has format version {found}, and this program knows versions up to {known}; use a newer jericho"
    )]
    Newer {
        /// Device.
        device: Arc<str>,
        /// Version of the format.
        found: u32,
        /// Newest version that this program knows.
        known: u32,
    },
    /// The volume has an older format.
    #[error(
        "{device} has format version {found}, and this program reads only version {known}; version 1 is read by builds of jericho 0.1.0 without a journal: copy the files with one of them"
    )]
    Older {
        /// Device.
        device: Arc<str>,
        /// Version of the format.
        found: u32,
        /// The version that this program reads.
        known: u32,
    },
    /// The volume has features that this version does not know, and may be read but not changed without them.
    #[error(
        "{device} has features ({unknown:#x}) that this version of jericho does not know and without which it cannot change the volume; \
         use a newer jericho, or only read the volume: jericho mount --read-only"
    )]
    ReadOnlyFeatures {
        /// Device.
        device: Arc<str>,
        /// Bits of the features.
        unknown: u32,
    },
    /// The records of the metadata have another version, or the volume has features that this version does not know.
    #[error("{device}: {what}")]
    Records {
        /// Device.
        device: Arc<str>,
        /// Versions, and what to do.
        what: SuperblockError,
    },
    /// The label is damaged.
    #[error("the label of {0} is damaged; run jericho check on its volume")]
    LabelDamaged(Arc<str>),
    /// Both copies of the superblock are damaged.
    #[error("the superblock of {device} is damaged ({what}); restore the volume from a backup")]
    SuperblockDamaged {
        /// First device.
        device: Arc<str>,
        /// State of each copy.
        what: String,
    },
    /// The copies of the superblock on the devices do not fit together. Holds a description.
    #[error(
        "the superblocks of the volume's devices contradict each other ({0}); mount the volume without the device that was away last, or \
         restore it from a backup"
    )]
    Contradiction(String),
    /// The device is smaller than the superblock says.
    #[error(
        "{device} is truncated: the volume needs {needed_bytes} bytes of it, it has {found_bytes}; restore its full length"
    )]
    Truncated {
        /// Device.
        device: Arc<str>,
        /// Size that the volume needs.
        needed_bytes: u64,
        /// Size of the device.
        found_bytes: u64,
    },
    /// A device of the volume was not found.
    #[error(
        "device {index} of the volume is missing: it was {path} when the volume was made, and no block device and no file beside the first device has its label; say where it is with --device"
    )]
    DeviceMissing {
        /// Index in the volume.
        index: usize,
        /// Path when the volume was formatted.
        path: PathBuf,
    },
    /// The host of a remote device does not answer.
    #[error("{0}")]
    Unreachable(String),
    /// A remote device cannot be used.
    #[error("{0}")]
    Refused(String),
    /// A remote device is another one than expected.
    #[error(
        "device {index} of the volume is recorded as {name}, but the device with this name has another label or none; say where it is with --device"
    )]
    OtherRemote {
        /// Index in the volume.
        index: usize,
        /// The name.
        name: PathBuf,
    },
    /// Two files or two block devices have the same label, and the user has not said which one to use.
    #[error(
        "{one} and {other} are the same device (number {index}) of one volume, so one of them is a copy, and using parts of both would destroy the volume; name each device but the first with --device, or move the copy away"
    )]
    Copies {
        /// Index of the device.
        index: usize,
        /// A file or block device.
        one: PathBuf,
        /// The other one.
        other: PathBuf,
    },
    /// The device belongs to another volume, or is another device of this one.
    #[error(
        "{device} should be device {index} of the volume but {is}; connect the right device instead"
    )]
    WrongDevice {
        /// Device.
        device: Arc<str>,
        /// Index of the device that is needed.
        index: usize,
        /// Description of the device that was found.
        is: String,
    },
    /// The device is not the first one of its volume.
    #[error(
        "{device} is device {index} of a volume; name the volume's first device instead{}",
        first.as_ref().map_or(String::new(), |first| format!(", which was {} when the volume was made", first.display()))
    )]
    NotFirst {
        /// Device.
        device: Arc<str>,
        /// Index of the device.
        index: usize,
        /// Path of the first device when the volume was made, if it is known.
        first: Option<PathBuf>,
    },
    /// The target already holds data.
    #[error(
        "{path} already holds {what}; formatting would destroy it: add --force to do it anyway"
    )]
    InUse {
        /// File or device.
        path: Arc<str>,
        /// Name of the format that was recognised.
        what: String,
    },
    /// The user asked for 0 slices.
    #[error("a volume needs at least 1 slice; leave --slices out for one per node")]
    NoSlices,
    /// The devices are on more hosts than there are slices.
    #[error(
        "the devices are on {hosts} hosts, and a slice is on one host: {asked} slices are too few; leave --slices out, or give at least --slices {hosts}"
    )]
    TooFewSlices {
        /// Requested number.
        asked: usize,
        /// Hosts that have devices of the volume.
        hosts: usize,
    },
    /// The user asked for too many slices.
    #[error("{asked} slices are too many; a volume has at most {most}")]
    TooManySlices {
        /// Requested number.
        asked: usize,
        /// Largest number.
        most: usize,
    },
    /// The user named too many devices.
    #[error("{asked} devices are too many; a volume has at most {most}")]
    TooManyDevices {
        /// Named devices.
        asked: usize,
        /// Largest number.
        most: usize,
    },
    /// The user named no device.
    #[error("a volume needs at least one file or device; name one")]
    NoDevices,
    /// The user named one device twice.
    #[error("{0} is named twice; name each device once")]
    Twice(PathBuf),
    /// A new file needs a size.
    #[error("{0} has no size yet; say how large the volume should be, for example --size 1G")]
    NoSize(PathBuf),
    /// A device is too small for its slices.
    #[error(
        "{device} is too small: {slices} slices there need at least {minimum_bytes} bytes ({minimum_mib} MiB), it has {size_bytes}; give more space or fewer slices",
        minimum_mib = minimum_bytes.div_ceil(1 << 20)
    )]
    TooSmall {
        /// Device.
        device: Arc<str>,
        /// Number of slices on it.
        slices: usize,
        /// Smallest size.
        minimum_bytes: u64,
        /// Its size.
        size_bytes: u64,
    },
    /// Another process uses the volume.
    #[error(
        "{path} is in use by {who}: only one process may use a volume that is being written; unmount it first (if it has no mount any more, that process is still writing back)",
        who = pid.map_or("a process that cannot be seen from here".into(), |pid| format!("process {pid}"))
    )]
    Locked {
        /// The device, or the file below it.
        path: PathBuf,
        /// The process that uses it, if it can be seen.
        pid: Option<u32>,
    },
    /// The file of a loop device cannot be locked.
    #[error(
        "{0}; run this where the file can be opened, or add --force if no other program uses it"
    )]
    Hidden(String),
    /// Another machine has mounted the volume.
    #[error(
        "{device} is mounted by host {host} (process {pid} there), or was not unmounted by it: two mounts would destroy the volume; if that host does not use it any more, add --force"
    )]
    OtherHost {
        /// First device.
        device: Arc<str>,
        /// Name of that machine.
        host: String,
        /// Process on that machine.
        pid: u32,
    },
    /// A device failed.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The metadata store could not be created or opened.
    #[error(transparent)]
    Store(Box<dyn std::error::Error + Send + Sync>),
}
