//! The metadata store: redb tables in the volume's metadata region, changed by batches.
//!
//! A batch is one redb transaction: after a crash all of it is there or none of it. Reads see the
//! last committed batch only; what is newer is the namespace's business (its overlay).

use std::sync::Arc;

use crate::alloc::Blocks;
use crate::error::Result;
use crate::types::{Ino, Kind, SliceId};

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
    /// Changes each time the number is used again.
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
    /// Directories: the parent; files: the directory they were created in (a hint for messages).
    pub parent: Ino,
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
}

/// One change of a batch. Applied in order; a later change of the same key wins.
#[derive(Clone, Debug)]
pub enum Change {
    /// Creates or replaces an inode.
    PutInode(Ino, InodeRecord),
    /// Removes an inode (its extents and xattrs are removed by changes of their own).
    DelInode(Ino),
    /// Adds an entry. `hash` is the namespace's hash of the name; the key is (dir, hash, name).
    PutEntry { dir: Ino, hash: u64, name: Box<[u8]>, ino: Ino, kind: Kind },
    /// Removes an entry.
    DelEntry { dir: Ino, hash: u64, name: Box<[u8]> },
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

/// The store of an open volume. Thread-safe.
pub struct Store {
    _todo: (),
}

impl Store {
    /// Applies a batch and makes it durable. On error nothing of the batch is there, and the store
    /// refuses further batches (the error is sticky).
    pub fn commit(&self, _changes: &[Change]) -> Result<()> {
        todo!()
    }
    /// An inode.
    pub fn inode(&self, _ino: Ino) -> Result<Option<InodeRecord>> {
        todo!()
    }
    /// A directory's entry.
    pub fn entry(&self, _dir: Ino, _hash: u64, _name: &[u8]) -> Result<Option<(Ino, Kind)>> {
        todo!()
    }
    /// Entries of a directory in order of (hash, name) with hash >= `from`, at most `limit`, but never
    /// ending between two entries of one hash.
    pub fn entries(&self, _dir: Ino, _from: u64, _limit: usize) -> Result<Vec<Entry>> {
        todo!()
    }
    /// All extents of a file, in order.
    pub fn extents(&self, _ino: Ino) -> Result<Vec<Extent>> {
        todo!()
    }
    /// An extended attribute.
    pub fn xattr(&self, _ino: Ino, _name: &[u8]) -> Result<Option<Box<[u8]>>> {
        todo!()
    }
    /// Names of extended attributes.
    pub fn xattr_names(&self, _ino: Ino) -> Result<Vec<Box<[u8]>>> {
        todo!()
    }
    /// Inodes that were open without a name when the volume was last written.
    pub fn orphans(&self) -> Result<Vec<Ino>> {
        todo!()
    }
    /// A named value.
    pub fn value(&self, _name: &str) -> Result<Option<u64>> {
        todo!()
    }
    /// Inode numbers in use, in order from `from`, at most `limit` (to rebuild the number allocator).
    pub fn inode_numbers(&self, _from: Ino, _limit: usize) -> Result<Vec<Ino>> {
        todo!()
    }
    /// Number of inodes.
    pub fn inode_count(&self) -> Result<u64> {
        todo!()
    }
}

/// Shared handle.
pub type StoreRef = Arc<Store>;
