//! Types of the filesystem's interface.

use std::time::SystemTime;

use crate::error::Result;

pub use jericho_metadata::types::{Ino, Kind, ROOT, SliceId};

/// Longest target of a symbolic link in bytes.
pub(crate) const TARGET_MAX: usize = 4095;

/// Attributes as stat(2) returns them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// Inode number.
    pub ino: Ino,
    /// Differs between the mounts in which inodes are created.
    pub generation: u32,
    /// File type.
    pub kind: Kind,
    /// Permission bits, set-id bits and sticky bit (07777).
    pub perm: u16,
    /// Hard links.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a special file, as the kernel encodes it (new_encode_dev).
    pub rdev: u32,
    /// Size in bytes.
    pub size: u64,
    /// Space held, in units of 512 bytes. Delayed allocations count.
    pub blocks: u64,
    /// Last access.
    pub atime: SystemTime,
    /// Last change of contents.
    pub mtime: SystemTime,
    /// Last change of the inode.
    pub ctime: SystemTime,
    /// Creation.
    pub btime: SystemTime,
}

/// The user that requests an operation.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// umask to apply when the parent has no default ACL.
    pub umask: u32,
}

/// Which reads change the access time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum AccessTimes {
    /// The first read after a change, and reads when the access time is at least a day old (`relatime`).
    #[default]
    Relative,
    /// No read (`noatime`).
    Never,
    /// Every read (`strictatime`), with the resolution of one clock tick.
    Always,
}

/// A time to set.
#[derive(Clone, Copy, Debug)]
pub enum SetTime {
    /// The time at which the operation runs.
    Now,
    /// This time.
    At(SystemTime),
}

/// Attributes that setattr changes. `None` leaves the attribute as it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct SetAttr {
    /// chmod (07777).
    pub perm: Option<u16>,
    /// chown.
    pub uid: Option<u32>,
    /// chgrp.
    pub gid: Option<u32>,
    /// truncate.
    pub size: Option<u64>,
    /// Access time of utimens.
    pub atime: Option<SetTime>,
    /// Modification time of utimens.
    pub mtime: Option<SetTime>,
    /// Clears the set-id bits, except those of a directory.
    pub drop_set_id: bool,
    /// Change time. The kernel sets it with some setattr requests.
    pub ctime: Option<SystemTime>,
}

/// statfs(2), in blocks of `format::PAGE_BYTES`.
#[derive(Clone, Copy, Debug)]
pub struct StatFs {
    /// Total blocks for data.
    pub blocks: u64,
    /// Blocks that are neither used nor reserved for unwritten data.
    pub free: u64,
    /// Inodes that are possible; a nominal number, as their number is not limited.
    pub files: u64,
    /// Inodes that can still be created.
    pub files_free: u64,
    /// Longest name in bytes.
    pub name_max: u32,
}

/// Result of one part of a trim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trimmed {
    /// Blocks that devices discarded.
    pub blocks: u64,
    /// Start of the next part. `None` when the trim is complete.
    pub next: Option<u64>,
}

/// One directory entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// Inode number.
    pub ino: Ino,
    /// Type of the inode.
    pub kind: Kind,
    /// Name bytes.
    pub name: Vec<u8>,
    /// Position for `readdir` to continue after this entry.
    pub cookie: u64,
}

/// Callback of an operation that waits for devices. Called once when the operation ends, perhaps in another thread.
pub type Done = Box<dyn FnOnce(Result<()>) + Send>;

/// Options for opening the filesystem.
#[derive(Clone, Debug)]
pub struct FsOptions {
    /// Prevents all changes, also of access times.
    pub read_only: bool,
    /// Number of inodes to keep in memory besides those that are open or dirty.
    pub inode_cache: usize,
    /// Bytes of memory for all metadata stores together. Half of it is for pages of redb.
    pub store_cache_bytes: usize,
    /// Longest time in milliseconds for which a change is only in memory (group commit).
    pub commit_interval_ms: u64,
}
