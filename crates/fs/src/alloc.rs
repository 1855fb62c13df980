//! Space of the slices: containers (allocation groups) with a bitmap each.
//!
//! In memory: one bitmap per container, loaded when first used, of blocks that are in use, promised
//! to a write-back in flight, or freed by a transaction that is not yet durable. On the volume: the
//! store's bitmap, changed by the same transaction that adds or removes the extents, so the two
//! always agree there.

use crate::error::Result;
use crate::types::SliceId;

/// A contiguous range of blocks of one slice, numbered from the slice's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Blocks {
    /// Which slice's space.
    pub slice: SliceId,
    /// First block within the slice.
    pub first: u64,
    /// How many.
    pub count: u32,
}

/// The allocator of the volume. All calls are thread-safe; none does device I/O but the first touch
/// of a container (a read of the store).
pub struct Allocator {
    _todo: (),
}

impl Allocator {
    /// The allocator of a volume whose store is open.
    pub fn of_volume(
        _store: &crate::store::StoreRef,
        _volume: &crate::volume::Volume,
    ) -> Result<std::sync::Arc<Allocator>> {
        todo!()
    }

    /// Promises `blocks` blocks of the volume to data that will be written later (delayed
    /// allocation), preferring nothing. Errors: ENOSPC when free minus promised is less.
    pub fn reserve(&self, _blocks: u64) -> Result<()> {
        todo!()
    }

    /// Takes back a promise.
    pub fn unreserve(&self, _blocks: u64) {
        todo!()
    }

    /// Turns `count` promised blocks into blocks: in `slice` if it has room, else in the others
    /// (most free first). `near`: a block after which the file's data should continue. Appends
    /// ranges that add up to `count` (few and long rather than many). Cannot fail for lack of space,
    /// since the space was promised.
    pub fn allocate(
        &self,
        _slice: SliceId,
        _near: Option<u64>,
        _count: u32,
        _out: &mut Vec<Blocks>,
    ) -> Result<()> {
        todo!()
    }

    /// Gives blocks back that no committed extent names (an allocation that was never committed).
    pub fn release_uncommitted(&self, _blocks: Blocks) {
        todo!()
    }

    /// Gives blocks back whose removal has just become durable.
    pub fn release_committed(&self, _blocks: Blocks) {
        todo!()
    }

    /// Blocks of a slice that are free (neither used nor allocated in flight).
    pub fn free_of(&self, _slice: SliceId) -> u64 {
        todo!()
    }

    /// Capacity of a slice in blocks.
    pub fn capacity_of(&self, _slice: SliceId) -> u64 {
        todo!()
    }

    /// Blocks promised but not allocated.
    pub fn reserved(&self) -> u64 {
        todo!()
    }
}
