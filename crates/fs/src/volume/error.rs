//! Why a volume cannot be made or opened: each message names the thing and what to do.

use std::path::PathBuf;
use std::sync::Arc;

use jericho_storage::IoError;

/// Why a volume cannot be made or opened.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// There is no such file or device.
    #[error("{0} does not exist; make a volume there with: jericho format {0} --size 1G")]
    Missing(PathBuf),
    /// A directory where a file or a device is needed.
    #[error("{0} is a directory; name a file in it or a block device")]
    IsDirectory(PathBuf),
    /// Neither a regular file nor a block device.
    #[error("{0} is neither a regular file nor a block device; name one of these")]
    WrongKind(PathBuf),
    /// The file may not be written.
    #[error("{0} is read-only; make it writable (chmod u+w) or open it with --read-only")]
    ReadOnly(PathBuf),
    /// The system refused to open, create, resize or look at it.
    #[error("cannot {action} {path}: {cause}")]
    System {
        /// What was tried, as a verb.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
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
    /// The device could not be opened; the storage's own message.
    #[error("{0}")]
    Open(String),
    /// No label.
    #[error("{0} is not a Jericho volume; make one there with: jericho format {0}")]
    NotAVolume(Arc<str>),
    /// A label or superblock of a newer format.
    #[error(
        "{device} has format version {found}, and this program knows versions up to {known}; use a newer jericho"
    )]
    Newer {
        /// Device.
        device: Arc<str>,
        /// Its version.
        found: u32,
        /// The newest that is known.
        known: u32,
    },
    /// The label is damaged.
    #[error("the label of {0} is damaged; run jericho check on its volume")]
    LabelDamaged(Arc<str>),
    /// Both copies of the superblock are damaged.
    #[error("the superblock of {device} is damaged ({what}); restore the volume from a backup")]
    SuperblockDamaged {
        /// First device.
        device: Arc<str>,
        /// Of each copy.
        what: String,
    },
    /// The device is smaller than the volume says.
    #[error(
        "{device} is truncated: the volume needs {needed_bytes} bytes of it, it has {found_bytes}; restore its full length"
    )]
    Truncated {
        /// Device.
        device: Arc<str>,
        /// What the volume needs.
        needed_bytes: u64,
        /// What is there.
        found_bytes: u64,
    },
    /// A device of the volume was not found.
    #[error(
        "device {index} of the volume is missing: it was {path} when the volume was made, and no block device and no file beside the first device has its label; say where it is with --device"
    )]
    DeviceMissing {
        /// Index in the volume.
        index: usize,
        /// Where it was.
        path: PathBuf,
    },
    /// A device of another volume, or another device of this one.
    #[error("{device} should be device {index} of the volume but {is}; exchange it")]
    WrongDevice {
        /// Device.
        device: Arc<str>,
        /// Which one is needed.
        index: usize,
        /// What it is instead.
        is: String,
    },
    /// Not the first device.
    #[error("{device} is device {index} of a volume; name the volume's first device instead")]
    NotFirst {
        /// Device.
        device: Arc<str>,
        /// Its index.
        index: usize,
    },
    /// Something is there already.
    #[error(
        "{path} already holds {what}; formatting would destroy it: add --force to do it anyway"
    )]
    InUse {
        /// File or device.
        path: Arc<str>,
        /// What was recognised.
        what: String,
    },
    /// `--slices 0`.
    #[error("a volume needs at least 1 slice; leave --slices out for one per node")]
    NoSlices,
    /// Too many slices.
    #[error("{asked} slices are too many; a volume has at most {most}")]
    TooManySlices {
        /// Asked for.
        asked: usize,
        /// Most that are possible.
        most: usize,
    },
    /// Too many devices.
    #[error("{asked} devices are too many; a volume has at most {most}")]
    TooManyDevices {
        /// Asked for.
        asked: usize,
        /// Most that are possible.
        most: usize,
    },
    /// No device was named.
    #[error("a volume needs at least one file or device; name one")]
    NoDevices,
    /// One device is named twice.
    #[error("{0} is named twice; name each device once")]
    Twice(PathBuf),
    /// No size is known for a new file.
    #[error("{0} has no size yet; say how large the volume should be, for example --size 1G")]
    NoSize(PathBuf),
    /// Too small for its slices.
    #[error(
        "{device} is too small: {slices} slices there need at least {minimum_bytes} bytes ({minimum_mib} MiB), it has {size_bytes}; give more space or fewer slices",
        minimum_mib = minimum_bytes.div_ceil(1 << 20)
    )]
    TooSmall {
        /// Device.
        device: Arc<str>,
        /// Slices on it.
        slices: usize,
        /// Least size.
        minimum_bytes: u64,
        /// Its size.
        size_bytes: u64,
    },
    /// Somebody else has it.
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
    /// Another machine has mounted it.
    #[error(
        "{device} is mounted by host {host} (process {pid} there), or was not unmounted by it: two mounts would destroy the volume; if that host does not use it any more, add --force"
    )]
    OtherHost {
        /// First device.
        device: Arc<str>,
        /// Name of that machine.
        host: String,
        /// The process there.
        pid: u32,
    },
    /// A device failed.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The metadata store could not be made or opened.
    #[error(transparent)]
    Store(#[from] crate::error::Error),
}
