//! Inodes in memory, and the data side of those that are regular files. The two refer to one another.
//!
//! Inodes in memory are current; the store has the state of the last durable batch. An inode stays in the table while any part
//! of it is newer than the store (`dirty`, or `included_in` a batch that is not durable), while it is open, and while it has no
//! name but is still referenced.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use jericho_cache::Slice;
use jericho_format::sums::Group;
use jericho_metadata::alloc::Allocator;
use jericho_metadata::store::InodeRecord;
use jericho_volume::{SliceId, Volume};
use parking_lot::{Condvar, Mutex, RwLock};

use crate::data::extents::Map;
use crate::data::unflushed::Unflushed;
use crate::data::write_errors::WriteErrors;
use crate::data::writers::Writers;
use crate::error::Error;
use crate::flushes::DataFlushes;
use crate::names::known_privileges::KnownPrivileges;
use crate::names::overlay::Overlay;
use crate::objects::ObjectNumber;
use crate::times::to_system;
use crate::types::{Attr, Ino, Kind};

/// An extended attribute.
pub struct Xattr {
    /// The value, or `None` if the value is in the store.
    pub value: Option<Box<[u8]>>,
    /// Batch that includes the value.
    pub seq: u64,
}

/// The data that an inode's lock guards.
pub struct Meta {
    /// Current attributes. The committed size may be smaller.
    pub rec: InodeRecord,
    /// Size in the record of the last batch.
    pub committed_size: u64,
    /// A batch has included the inode, so the store has it or will have it.
    pub stored: bool,
    /// The inode is being removed. No name and no reference leads to it.
    pub dead: bool,
    /// A batch has removed it.
    pub buried: bool,
    /// Entries of a directory that are newer than the store.
    pub overlay: Overlay,
    /// All extended attributes by name, or `None` if they were not read yet.
    pub xattrs: Option<BTreeMap<Box<[u8]>, Xattr>>,
}

/// An inode in memory.
pub struct Inode {
    pub ino: Ino,
    pub kind: Kind,
    pub meta: RwLock<Meta>,
    /// The data side of a regular file, once it was used. The file refers back to the inode; the table breaks the cycle when it
    /// drops the inode.
    pub file: Mutex<Option<Arc<File>>>,
    /// Number of opens that were not closed.
    pub opens: AtomicU32,
    /// The inode has no name (nlink 0). It stays in the table until its last reference is gone.
    pub unlinked: AtomicBool,
    /// The inode is in the list for the next batch.
    pub dirty: AtomicBool,
    /// It has changed since a batch got its attributes last. Differs from `dirty` while batches have only a part of its extents.
    pub touched: AtomicBool,
    /// The last batch that included the inode.
    pub included_in: AtomicU64,
    /// The inode was used since the table's hand last passed it.
    pub referenced: AtomicBool,
    /// Number of pages that have space.
    pub blocks: AtomicU64,
    /// Changes only with the lock of `meta` held.
    pub privileges: KnownPrivileges,
    /// See `File::kernel_may_have_pages`.
    pub kernel_pages: KernelPages,
}

/// A regular file in memory: the state that the data path needs. All open descriptors share it.
pub struct File {
    /// The filesystem that has the file.
    pub(crate) host: Arc<dyn FileHost>,
    pub(crate) inode: Arc<Inode>,
    pub(crate) object: ObjectNumber,
    pub(crate) home: AtomicU16,
    pub(crate) threads: AtomicU8,
    pub(crate) size: AtomicU64,
    /// Held shared to reserve space, to move pieces, and to replace another file. Held exclusively to take pages out and to change the home.
    pub(crate) exclusive: RwLock<()>,
    pub(crate) map: RwLock<Map>,
    /// Number of truncations in progress. Meanwhile a batch leaves size and extents as they were.
    pub(crate) hold: AtomicU32,
    /// The last batch left out the end of the file. The end of the next write-back has to mark the inode dirty again.
    pub(crate) size_pending: AtomicBool,
    /// Bytes up to this one were on the device when a sync of the file ended. Changed with `reaches` locked, or increased by
    /// the committer.
    pub(crate) synced_size: AtomicU64,
    /// The sizes that the syncs in progress can guarantee when they end.
    pub(crate) reaches: Mutex<Vec<Weak<AtomicU64>>>,
    /// The last page on the device may hold other bytes than zeros after the end of the file: a write extended the file over
    /// them, and its size did not become durable.
    pub(crate) tail_unsure: AtomicBool,
    /// Time of the last write that set the times, in ticks.
    pub(crate) tick: AtomicU64,
    pub(crate) errors: WriteErrors,
    pub(crate) unflushed: Unflushed,
    pub(crate) writers: Mutex<Writers>,
    pub(crate) writers_changed: Condvar,
    /// New contents replace old ones: the file was truncated to nothing, or renamed over another. The last close clears this.
    pub(crate) replacing: AtomicBool,
    /// Clients may write the file's pages in the cache.
    pub(crate) inline_writes: AtomicBool,
    /// Number of descriptors that use the file through the kernel alone.
    pub(crate) kernel_users: AtomicU32,
    /// Number of times that the file got a first inline writer.
    pub(crate) first_writers: AtomicU64,
}

/// The filesystem that has a file, as its files use it.
pub trait FileHost: Send + Sync {
    /// Returns the volume.
    fn volume(&self) -> &Volume;
    /// Returns the allocator of the volume.
    fn allocator(&self) -> &Allocator;
    /// Returns the cache of a slice, or `None` if the filesystem was opened without caches.
    fn cache(&self, slice: SliceId) -> Option<&Arc<Slice>>;
    /// Returns the flushes of the devices.
    fn flushes(&self) -> &DataFlushes;
    /// Includes the inode's attributes in the next batch.
    fn mark_dirty(&self, inode: &Arc<Inode>);
    /// Has the next batch remove an inode, after the cache has dropped its pages or has failed to.
    fn bury(&self, dead: &Arc<Inode>, result: Result<(), jericho_cache::Error>);
    /// Records that the write-back of a file's pages failed.
    fn write_failed(&self, error: &Error);
    /// Returns the number of the last durable batch of the inode's shard.
    fn durable(&self, ino: Ino) -> u64;
    /// Makes the changes of the inode's shard durable that were made so far, and waits for it.
    fn commit(&self, ino: Ino) -> crate::error::Result<()>;
    /// Returns the checksums of a group of pages of a file that the store has.
    fn stored_sums(&self, ino: Ino, group: u64) -> crate::error::Result<Group>;
    /// Runs `change`, all of whose changes go into one batch of the inode's shard. Returns what `change` returns, or false,
    /// without running it, if contents of pages cannot go into a batch now.
    fn in_one_batch(&self, ino: Ino, change: &mut dyn FnMut() -> bool) -> bool;
}

/// Tracks whether the kernel's page cache may have pages of a file.
pub struct KernelPages {
    /// Number of reads that fill the page cache and have begun.
    pub filled: AtomicU64,
    /// The kernel has dropped the pages of this many of these reads, counted from the first one.
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
    /// Creates an inode from its record in the store. `known` tells that the kernel already knows the inode, so it may have
    /// pages of it.
    pub fn loaded(ino: Ino, rec: InodeRecord, known: bool) -> Arc<Inode> {
        Inode::build(ino, rec, true, None, known)
    }

    /// Creates an inode that the store does not have yet.
    pub fn made(ino: Ino, rec: InodeRecord) -> Arc<Inode> {
        Inode::build(ino, rec, false, Some(BTreeMap::new()), false)
    }

    fn build(
        ino: Ino,
        rec: InodeRecord,
        stored: bool,
        xattrs: Option<BTreeMap<Box<[u8]>, Xattr>>,
        known: bool,
    ) -> Arc<Inode> {
        let privileges = match &xattrs {
            Some(none) if none.is_empty() => KnownPrivileges::without_capability(rec.perm),
            _ => KnownPrivileges::default(),
        };
        Arc::new(Inode {
            ino,
            kind: rec.kind,
            blocks: AtomicU64::new(rec.blocks),
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
            touched: AtomicBool::new(false),
            included_in: AtomicU64::new(0),
            referenced: AtomicBool::new(true),
            privileges,
            kernel_pages: KernelPages::new(known),
        })
    }

    /// Returns whether any part of the inode is newer than the last durable batch.
    pub fn is_uncommitted(&self, durable: u64) -> bool {
        self.dirty.load(Ordering::Acquire) || self.included_in.load(Ordering::Acquire) > durable
    }

    /// Drops the data side of a file that is closed and durable. It can be loaded from the store again.
    pub fn give_up_file(&self, durable: u64) {
        let Some(mut slot) = self.file.try_lock() else {
            return;
        };
        // New references come only from the slot, which is locked, so a count of one stays one.
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

    /// Returns the attributes for stat.
    pub fn attr(&self, meta: &Meta) -> Attr {
        let rec = &meta.rec;
        let pages = self.blocks.load(Ordering::Relaxed);
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
            blocks: pages.saturating_mul(jericho_format::PAGE_BYTES / 512),
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
