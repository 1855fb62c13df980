//! The nouns of the filesystem's interface.

use std::time::SystemTime;

/// Inode number, 1 is the root.
pub type Ino = u64;
/// The root directory.
pub const ROOT: Ino = 1;

/// Index of a slice in the volume.
pub type SliceId = u16;

/// File type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Regular file.
    File,
    /// Directory.
    Directory,
    /// Symbolic link.
    Symlink,
    /// FIFO.
    Fifo,
    /// Socket.
    Socket,
    /// Character device.
    CharDevice,
    /// Block device.
    BlockDevice,
}

/// stat(2), with nanosecond times relative to the epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// Inode number.
    pub ino: Ino,
    /// Changes each time an inode number is used again.
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
    /// Space held, in 512-byte units; delayed allocations count.
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

/// On whose behalf an operation is made.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// umask to apply when the parent has no default ACL.
    pub umask: u32,
}

/// When a read changes the access time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum AccessTimes {
    /// When the access time is not newer than the last change, or a day old (`relatime`).
    #[default]
    Relative,
    /// Never (`noatime`).
    Never,
    /// At every read (`strictatime`), to one tick of the clock.
    Always,
}

/// A time to set.
#[derive(Clone, Copy, Debug)]
pub enum SetTime {
    /// The time of the call.
    Now,
    /// This time.
    At(SystemTime),
}

/// What setattr changes; `None` stays.
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
    /// utimens.
    pub atime: Option<SetTime>,
    /// utimens.
    pub mtime: Option<SetTime>,
    /// Clear the set-id bits, unless it is a directory.
    pub drop_set_id: bool,
    /// Set by the kernel with some setattrs.
    pub ctime: Option<SystemTime>,
}

/// statfs(2), in blocks of `format::PAGE_BYTES`.
#[derive(Clone, Copy, Debug)]
pub struct StatFs {
    /// Blocks that hold data, in all.
    pub blocks: u64,
    /// Blocks neither used nor promised to unwritten data.
    pub free: u64,
    /// Inodes, in all.
    pub files: u64,
    /// Inodes that can still be made.
    pub files_free: u64,
    /// Longest name in bytes.
    pub name_max: u32,
}

/// Result of one part of a trim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trimmed {
    /// Blocks that devices discarded.
    pub blocks: u64,
    /// Where the next part begins; `None` when the trim is complete.
    pub next: Option<u64>,
}

/// One directory entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// Inode.
    pub ino: Ino,
    /// Its type.
    pub kind: Kind,
    /// Name bytes.
    pub name: Vec<u8>,
    /// Pass to readdir to go on after this entry.
    pub cookie: u64,
}
