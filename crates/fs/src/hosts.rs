//! The filesystem as the files of each shard hold it.
//!
//! Every file in memory holds the filesystem. If all files counted in one place, threads that create files in different slices would write
//! one cache line in turn. So the files of a shard hold it through a reference of the shard, which has the count.

use std::sync::Arc;

use jericho_cache::Slice;
use jericho_format::sums::Group;
use jericho_format::superblock::SLICES_MAX;
use jericho_metadata::alloc::Allocator;
use jericho_metadata::shard::ShardId;
use jericho_volume::Volume;
use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::flushes::DataFlushes;
use crate::inode::{FileHost, Inode};
use crate::types::{Ino, SliceId};

/// The references of all shards.
pub struct Hosts(Box<[Slot]>);

/// Has cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
struct Slot(Mutex<Option<Arc<Host>>>);

/// Has cache lines of its own, with the count of the files that hold it.
#[repr(align(128))]
struct Host(Arc<dyn FileHost>);

impl Hosts {
    /// Makes the places of all shards that a volume can have.
    pub fn new() -> Hosts {
        Hosts((0..SLICES_MAX).map(|_| Slot::default()).collect())
    }

    /// Returns the reference for a file of a shard. `filesystem` is called for the first one.
    pub fn of(
        &self,
        shard: ShardId,
        filesystem: impl FnOnce() -> Arc<dyn FileHost>,
    ) -> Arc<dyn FileHost> {
        let mut slot = self.0[shard.index()].0.lock();
        slot.get_or_insert_with(|| Arc::new(Host(filesystem())))
            .clone()
    }

    /// Holds the lock of a shard until the returned value is dropped.
    #[cfg(test)]
    pub fn hold_all(&self, shard: ShardId) -> impl Sized {
        self.0[shard.index()].0.lock()
    }

    /// Drops the references, which ends the cycles between them and the filesystem.
    pub fn clear(&self) {
        for slot in &self.0 {
            slot.0.lock().take();
        }
    }
}

impl FileHost for Host {
    fn volume(&self) -> &Volume {
        self.0.volume()
    }

    fn allocator(&self) -> &Allocator {
        self.0.allocator()
    }

    fn cache(&self, slice: SliceId) -> Option<&Arc<Slice>> {
        self.0.cache(slice)
    }

    fn flushes(&self) -> &DataFlushes {
        self.0.flushes()
    }

    fn mark_dirty(&self, inode: &Arc<Inode>) {
        self.0.mark_dirty(inode);
    }

    fn bury(&self, dead: &Arc<Inode>, result: std::result::Result<(), jericho_cache::Error>) {
        self.0.bury(dead, result);
    }

    fn write_failed(&self, error: &Error) {
        self.0.write_failed(error);
    }

    fn durable(&self, ino: Ino) -> u64 {
        self.0.durable(ino)
    }

    fn commit(&self, ino: Ino) -> Result<()> {
        self.0.commit(ino)
    }

    fn stored_sums(&self, ino: Ino, group: u64) -> Result<Group> {
        self.0.stored_sums(ino, group)
    }

    fn in_one_batch(&self, ino: Ino, change: &mut dyn FnMut() -> bool) -> bool {
        self.0.in_one_batch(ino, change)
    }
}
