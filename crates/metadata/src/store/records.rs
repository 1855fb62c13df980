//! What the store holds: records of inodes, extents and entries, and the changes of a batch.

use std::sync::Arc;

use jericho_format::threads::ThreadsOfInode;
use jericho_volume::{Blocks, SliceId};

use crate::types::{Ino, Kind};

/// The contents of a block: 4096 bytes.
pub type Image = Arc<[u8]>;

/// A block: slice, and block within it.
pub type Block = (SliceId, u64);

/// All durable metadata of an inode but its extents, entries and attributes.
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
    /// Device number of special files.
    pub rdev: u32,
    /// Random number of the mount that created the inode.
    pub generation: u32,
    /// Files: size in bytes; the data before it becomes durable with the record, or earlier. Directories: number of entries.
    pub size: u64,
    /// Times in nanoseconds since the epoch (i64 seconds in range 1901-2446 at least).
    pub atime_ns: i128,
    /// Time of the last change of contents.
    pub mtime_ns: i128,
    /// Time of the last change of the inode.
    pub ctime_ns: i128,
    /// Time of creation.
    pub btime_ns: i128,
    /// Home slice of the data (files) or of what is created below (directories, once decided).
    pub slice: Option<SliceId>,
    /// Directories: the placement that the user set here, for what is created from then on.
    pub placement: Option<SliceId>,
    /// When threads migrate to the data. New inodes inherit it from their directory.
    pub threads: ThreadsOfInode,
    /// Directories: the parent; others: the directory in which they were created (a hint for messages).
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
    /// The blocks of the pages. `blocks.count` is also the number of pages.
    pub blocks: Blocks,
    /// Allocated but never written (fallocate): reads as zeros.
    pub unwritten: bool,
    /// The table of checksums has the pages.
    pub summed: bool,
}

/// One change of a batch. Changes are applied in order; the last change of a key wins.
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
    /// Removes an extended attribute.
    DelXattr(Ino, Box<[u8]>),
    /// Marks blocks as used in the durable bitmap.
    Use(Blocks),
    /// Marks blocks as free in the durable bitmap.
    Free(Blocks),
    /// Records that the inode is open without a name: the next mount removes it.
    PutOrphan(Ino),
    /// Removes this record.
    DelOrphan(Ino),
    /// Sets a number in the small table of named values (placement cursor, ...).
    PutValue(&'static str, u64),
    /// Sets the mark of a slice's inode numbers: every number in the store has a smaller counter.
    PutInoMark(SliceId, u64),
    /// Adds or replaces the image of a block: the contents that the block has from this batch on (`logged`).
    PutLogged(Block, Image),
    /// Removes the image of a block, if there is one: the device has these contents or newer ones, or no file has the block.
    DelLogged(Block),
    /// Changes the checksums of a group of pages of a file, by a change as `jericho_format::sums` encodes it.
    Sums(Ino, u64, Box<[u8]>),
}

/// Bytes of a change that count as one change.
pub(super) const WEIGHT_BYTES: usize = 256;

impl Change {
    /// Returns the number of changes that this change counts as. It bounds the bytes of a batch, because the journal must have room for them.
    pub fn weight(&self) -> usize {
        let bytes = match self {
            Change::PutXattr(_, name, value) => name.len() + value.len(),
            Change::PutInode(_, inode) => inode.target.as_ref().map_or(0, |target| target.len()),
            Change::PutLogged(_, image) => image.len(),
            Change::Sums(_, _, change) => change.len(),
            _ => 0,
        };
        weight_of(bytes)
    }
}

/// Returns as how many changes one counts that has this many bytes besides the usual ones.
pub fn weight_of(bytes: usize) -> usize {
    1 + bytes / WEIGHT_BYTES
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
