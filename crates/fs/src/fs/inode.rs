//! Inodes in memory.
//!
//! What is here is the truth; the store has what the last durable batch had. An inode stays in the
//! table while anything of it is newer than the store (`dirty`, or `included_in` a batch that is
//! not durable), while it is open, and while it has no name but is still referenced.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};

use super::File;
use super::overlay::Overlay;
use super::privileges::Privileges;
use super::times::to_system;
use crate::store::InodeRecord;
use crate::types::{Attr, Ino, Kind};

/// In `Inode::blocks`: nobody counted yet.
pub const BLOCKS_UNKNOWN: u64 = u64::MAX;

/// An extended attribute.
pub struct Xattr {
    /// `None`: the store has it.
    pub value: Option<Box<[u8]>>,
    /// Batch that the value belongs to.
    pub seq: u64,
}

/// What an inode's lock guards.
pub struct Meta {
    /// Attributes as they are now. The size that is committed may be smaller.
    pub rec: InodeRecord,
    /// Size in the record of the last batch.
    pub committed_size: u64,
    /// A batch has it, so the store has it or will.
    pub stored: bool,
    /// Nobody can reach it any more; it is being removed.
    pub dead: bool,
    /// A batch has removed it.
    pub buried: bool,
    /// Directories: entries newer than the store.
    pub overlay: Overlay,
    /// Extended attributes by name, all of them; `None`: not read yet.
    pub xattrs: Option<BTreeMap<Box<[u8]>, Xattr>>,
}

/// An inode in memory.
pub struct Inode {
    pub ino: Ino,
    pub kind: Kind,
    pub meta: RwLock<Meta>,
    /// Regular files: the data side, once used. The file points back here; the table breaks the cycle
    /// when it drops the inode.
    pub file: Mutex<Option<Arc<File>>>,
    /// Opens not closed.
    pub opens: AtomicU32,
    /// Has no name (nlink 0): kept in the table until nobody refers to it.
    pub unlinked: AtomicBool,
    /// In the list of inodes to be written with the next batch.
    pub dirty: AtomicBool,
    /// The last batch that wrote it.
    pub included_in: AtomicU64,
    /// Used since the evictor last looked.
    pub referenced: AtomicBool,
    /// Pages that hold space.
    pub blocks: AtomicU64,
    /// Changed with the lock of `meta` held.
    pub privileges: Privileges,
    /// See `File::kernel_may_have_pages`.
    pub kernel_pages: KernelPages,
}

/// Tracks whether the kernel's page cache may have pages of a file.
pub struct KernelPages {
    /// Number of reads that fill the page cache and have begun.
    pub filled: AtomicU64,
    /// How many of these reads, in order, had their pages dropped by the kernel.
    pub dropped: AtomicU64,
}

impl KernelPages {
    fn new(may_have: bool) -> KernelPages {
        KernelPages {
            filled: AtomicU64::new(u64::from(may_have)),
            dropped: AtomicU64::new(0),
        }
    }
}

impl Inode {
    /// Creates an inode from its record in the store. `known`: the kernel knows the inode already, so it may have
    /// pages of it.
    pub fn loaded(ino: Ino, rec: InodeRecord, known: bool) -> Arc<Inode> {
        let blocks = if rec.kind == Kind::File {
            BLOCKS_UNKNOWN
        } else {
            0
        };
        Inode::build(ino, rec, true, blocks, None, known)
    }

    /// One that is being made.
    pub fn made(ino: Ino, rec: InodeRecord) -> Arc<Inode> {
        Inode::build(ino, rec, false, 0, Some(BTreeMap::new()), false)
    }

    fn build(
        ino: Ino,
        rec: InodeRecord,
        stored: bool,
        blocks: u64,
        xattrs: Option<BTreeMap<Box<[u8]>, Xattr>>,
        known: bool,
    ) -> Arc<Inode> {
        let privileges = match &xattrs {
            Some(none) if none.is_empty() => Privileges::without_capability(rec.perm),
            _ => Privileges::default(),
        };
        Arc::new(Inode {
            ino,
            kind: rec.kind,
            unlinked: AtomicBool::new(rec.nlink == 0),
            meta: RwLock::new(Meta {
                committed_size: if stored { rec.size } else { 0 },
                rec,
                stored,
                dead: false,
                buried: false,
                overlay: Overlay::default(),
                xattrs,
            }),
            file: Mutex::new(None),
            opens: AtomicU32::new(0),
            dirty: AtomicBool::new(false),
            included_in: AtomicU64::new(0),
            referenced: AtomicBool::new(true),
            blocks: AtomicU64::new(blocks),
            privileges,
            kernel_pages: KernelPages::new(known),
        })
    }

    /// Whether anything of it is newer than the last durable batch.
    pub fn is_uncommitted(&self, durable: u64) -> bool {
        self.dirty.load(Ordering::Acquire) || self.included_in.load(Ordering::Acquire) > durable
    }

    /// Forgets the data side of a file that is closed and durable: the store can tell it again.
    pub fn give_up_file(&self, durable: u64) {
        let Some(mut slot) = self.file.try_lock() else {
            return;
        };
        // Only the slot hands out more references, so a count of one stays one.
        let is_idle = slot
            .as_ref()
            .is_some_and(|f| Arc::strong_count(f) == 1 && f.is_forgettable());
        if is_idle
            && self.opens.load(Ordering::Acquire) == 0
            && !self.unlinked.load(Ordering::Acquire)
            && !self.is_uncommitted(durable)
        {
            slot.take();
        }
    }

    /// stat. `blocks` of a file must have been counted.
    pub fn attr(&self, meta: &Meta) -> Attr {
        let rec = &meta.rec;
        let pages = match self.blocks.load(Ordering::Relaxed) {
            BLOCKS_UNKNOWN => 0,
            pages => pages,
        };
        Attr {
            ino: self.ino,
            generation: rec.generation,
            kind: rec.kind,
            perm: rec.perm,
            nlink: rec.nlink,
            uid: rec.uid,
            gid: rec.gid,
            rdev: rec.rdev,
            size: rec.size,
            blocks: pages * (jericho_format::PAGE_BYTES / 512),
            atime: to_system(rec.atime_ns),
            mtime: to_system(rec.mtime_ns),
            ctime: to_system(rec.ctime_ns),
            btime: to_system(rec.btime_ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_takes_no_more_memory_than_is_documented() {
        assert!(size_of::<Inode>() <= 512, "{}", size_of::<Inode>());
        assert!(size_of::<File>() <= 512, "{}", size_of::<File>());
    }
}
