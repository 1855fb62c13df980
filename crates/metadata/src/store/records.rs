//! What the store holds: records of inodes, extents and entries, and the changes of a batch.

use std::sync::Arc;

use jericho_format::threads::ThreadsOfInode;
use jericho_volume::{Blocks, SliceId};

use crate::types::{Ino, Kind};

/// The contents of a block: 4096 bytes.
pub type Image = Arc<[u8]>;

/// A block: slice, and block within it.
pub type Block = (SliceId, u64);

/// Everything durable about an inode but its extents, entries and attributes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InodeRecord {
    /// File type.
    pub kind: Kind,
    /// Permission bits (07777).
    pub perm: u16,
    /// Hard links (directories: 2 + subdirectories).
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Special files.
    pub rdev: u32,
    /// Differs between the mounts in which inodes are created.
    pub generation: u32,
    /// Size in bytes that is backed by data on the device; directories: number of entries.
    pub size: u64,
    /// Times in nanoseconds since the epoch (i64 seconds in range 1901-2446 at least).
    pub atime_ns: i128,
    /// Contents changed.
    pub mtime_ns: i128,
    /// Inode changed.
    pub ctime_ns: i128,
    /// Created.
    pub btime_ns: i128,
    /// Home slice of the data (files) or of what is created below (directories, once decided).
    pub slice: Option<SliceId>,
    /// Directories: the placement that the user set here, for what is created from then on.
    pub placement: Option<SliceId>,
    /// When threads are moved to the data (files), and what is created below inherits (directories).
    pub threads: ThreadsOfInode,
    /// Directories: the parent; files: the directory they were created in (a hint for messages).
    pub parent: Ino,
    /// Blocks of the extents.
    pub blocks: u64,
    /// Symbolic links: the target.
    pub target: Option<Box<[u8]>>,
}

/// A run of pages of a file and where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First page of the file.
    pub page: u64,
    /// Where; `blocks.count` is also the number of pages.
    pub blocks: Blocks,
    /// Allocated but never written (fallocate): reads as zeros.
    pub unwritten: bool,
    /// The table of checksums has the pages.
    pub summed: bool,
}

/// One change of a batch. Applied in order; a later change of the same key wins.
#[derive(Clone, Debug)]
pub enum Change {
    /// Creates or replaces an inode.
    PutInode(Ino, InodeRecord),
    /// Removes an inode (its extents and xattrs are removed by changes of their own).
    DelInode(Ino),
    /// Adds an entry. `hash` is the namespace's hash of the name; the key is (dir, hash, name).
    PutEntry {
        /// Directory.
        dir: Ino,
        /// Hash of the name.
        hash: u64,
        /// Name.
        name: Box<[u8]>,
        /// Inode that it names.
        ino: Ino,
        /// Its type.
        kind: Kind,
    },
    /// Removes an entry.
    DelEntry {
        /// Directory.
        dir: Ino,
        /// Hash of the name.
        hash: u64,
        /// Name.
        name: Box<[u8]>,
    },
    /// Adds or replaces the extent that starts at `extent.page`. Never overlaps others.
    PutExtent(Ino, Extent),
    /// Removes the extent that starts at the page.
    DelExtent(Ino, u64),
    /// Adds or replaces an extended attribute.
    PutXattr(Ino, Box<[u8]>, Box<[u8]>),
    /// Removes one.
    DelXattr(Ino, Box<[u8]>),
    /// Marks blocks as used in the durable bitmap.
    Use(Blocks),
    /// Marks blocks as free in the durable bitmap.
    Free(Blocks),
    /// The inode is open but has no name: remove it at the next mount.
    PutOrphan(Ino),
    /// No longer.
    DelOrphan(Ino),
    /// A number in the small table of named values (placement cursor, ...).
    PutValue(&'static str, u64),
    /// The mark of a slice's inode numbers: all numbers that were given out have a smaller counter.
    PutInoMark(SliceId, u64),
    /// Adds or replaces the image of a block: the contents that it has from this batch on (`logged`).
    PutLogged(Block, Image),
    /// Removes the image of a block, if there is one: the block itself has newer contents, or no file has it.
    DelLogged(Block),
    /// Changes the checksums of a group of pages of a file, by a change as `jericho_format::sums` encodes it.
    Sums(Ino, u64, Box<[u8]>),
}

/// Bytes of a change that count as one change.
pub(super) const WEIGHT_BYTES: usize = 256;

impl Change {
    /// Returns as how many changes this one counts. The bytes of a batch are bounded so, because the journal must have room for it.
    pub fn weight(&self) -> usize {
        let bytes = match self {
            Change::PutXattr(_, name, value) => name.len() + value.len(),
            Change::PutInode(_, inode) => inode.target.as_ref().map_or(0, |target| target.len()),
            Change::PutLogged(_, image) => image.len(),
            Change::Sums(_, _, change) => change.len(),
            _ => 0,
        };
        1 + bytes / WEIGHT_BYTES
    }
}

/// An entry as stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Hash of the name.
    pub hash: u64,
    /// Name.
    pub name: Box<[u8]>,
    /// Inode.
    pub ino: Ino,
    /// Its type.
    pub kind: Kind,
}
