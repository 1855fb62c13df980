//! Types that the rows of a store and their users share.

/// Inode number: a slice and the value of its counter (`jericho_format::record::ino_of`). 1 is the root.
pub type Ino = u64;
/// The root directory.
pub const ROOT: Ino = 1;

pub use jericho_volume::SliceId;

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
