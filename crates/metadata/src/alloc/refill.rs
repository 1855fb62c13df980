//! What the allocator does for the metadata stores. Before a commit it loads the containers whose blocks the batch frees. For
//! checkpoints it takes chunks from the slices for the metadata region.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use jericho_format::superblock::{CHUNK_BY_FORMAT, CHUNK_SPARE, ChunkEntry};
use jericho_volume::Blocks;
use jericho_volume::Volume;
use zerocopy::byteorder::little_endian::{U16, U32, U64};

use super::{Allocator, SpaceOptions};
use crate::error::Result;
use crate::store::region::{PART_CHUNKS, Region};
use crate::store::{Change, Store, StoreRef, Supply};
use crate::types::SliceId;

/// Spare chunks that are kept in stock as long as there is space, beyond what a store asks for.
const STOCK_CHUNKS: u64 = 4;
/// Divisor of the capacity: the stock has at least one in this many blocks.
const STOCK_PART: u64 = 256;

/// Returns whether a new chunk has its space on the host. A write to a chunk without space could fail when the host
/// is full, and a failed write ends all changes of the store until the next mount.
fn provision(region: &Region, entry: &ChunkEntry) -> bool {
    let provisioned = region.provision(entry);
    if let Err(error) = &provisioned {
        tracing::debug!(%error, "the metadata region cannot grow");
    }
    provisioned.is_ok()
}

/// A store's reference to the allocator. Weak, because the allocator holds the store. Has cache lines of its own, with the count of its
/// users: each commit changes the count, and the references of two stores would share a line.
#[repr(align(128))]
pub(super) struct Before {
    allocator: Weak<Allocator>,
    /// The only slice whose blocks the store's region may get, if each slice has its own store.
    only: Option<SliceId>,
}

impl Supply for Before {
    fn before_commit(&self, changes: &[Change]) -> Result<()> {
        let mut freed = changes.iter().filter_map(|change| match change {
            Change::Free(blocks) => Some(*blocks),
            _ => None,
        });
        let Some(first) = freed.next() else {
            // Most batches free nothing, and a reference to the allocator counts in a place of all stores.
            return Ok(());
        };
        let Some(allocator) = self.allocator.upgrade() else {
            return Ok(());
        };
        allocator.load_for(first)?;
        freed.try_for_each(|blocks| allocator.load_for(blocks))
    }

    fn has_enough(&self, region: &Region, pages: u64, free: u64) -> bool {
        let allocator = self.allocator.upgrade();
        allocator.is_none_or(|allocator| {
            let stock = allocator.stock_chunks(region, self.only) * region.chunk_blocks();
            free >= pages + stock
        })
    }

    fn refill(&self, region: &Region, pages: u64) -> Result<()> {
        match self.allocator.upgrade() {
            Some(allocator) => allocator.refill(region, self.only, pages),
            None => Ok(()),
        }
    }

    fn read_unreachable(&self) {
        if let Some(allocator) = self.allocator.upgrade()
            && let Some(notify) = allocator.on_unreachable.get()
        {
            notify();
        }
    }
}

impl Allocator {
    /// Has a function called, once, when a read of a store has failed because a host does not answer.
    pub fn set_on_unreachable(&self, notify: Box<dyn Fn() + Send + Sync>) {
        let _ = self.on_unreachable.set(notify);
    }

    /// Creates the allocator from the capacities of the slices and the stores' counts of used blocks. `stores` holds the store of each
    /// shard. `chunk_blocks` is the number of blocks in a chunk of a metadata region; without chunks its value does not matter.
    pub fn new(
        stores: Vec<StoreRef>,
        slices: Vec<SpaceOptions>,
        chunk_blocks: u64,
    ) -> Result<Arc<Allocator>> {
        // A store of all slices gets chunks from any of them.
        let has_own = stores.len() == slices.len();
        let allocator = Allocator::load(stores, slices, chunk_blocks)?;
        for (slice, shard) in allocator.shards.iter().enumerate() {
            allocator.supply(&shard.store, has_own.then_some(slice as SliceId));
        }
        Ok(allocator)
    }

    /// Has a store call the allocator before commits. `only`: the slice whose store it is, if it is not that of all slices.
    pub(super) fn supply(self: &Arc<Self>, store: &Store, only: Option<SliceId>) {
        store.set_supply(Arc::new(Before {
            allocator: Arc::downgrade(self),
            only,
        }));
    }

    /// Returns the allocator of a volume whose stores, one for each shard, are open. The regions of the stores grow from it.
    pub fn of_volume(stores: &[StoreRef], volume: &Volume) -> Result<Arc<Allocator>> {
        let space = |slice| SpaceOptions {
            is_absent: volume.missing_of(slice).is_some(),
            ..SpaceOptions::from(slice)
        };
        let mut slices: Vec<SpaceOptions> = volume.slices().iter().map(space).collect();
        let chunk_blocks = volume.superblocks().with(|s| {
            for chunk in &s.chunks {
                // Chunks that format made are in no slice; the superblock was validated.
                if chunk.slice_first.get() != CHUNK_BY_FORMAT {
                    let slice = &mut slices[usize::from(chunk.slice.get())];
                    slice.chunks.push(chunk.slice_first.get());
                }
            }
            u64::from(s.head.chunk_blocks.get())
        });
        Allocator::new(stores.to_vec(), slices, chunk_blocks)
    }

    /// Returns the spare chunks that are kept in stock.
    fn stock_chunks(&self, region: &Region, only: Option<SliceId>) -> u64 {
        let is_of = |slice: &SliceId| only.is_none_or(|only| only == *slice);
        let slices = (0..self.slices.len() as SliceId).filter(is_of);
        let capacity: u64 = slices.map(|slice| self.capacity_of(slice)).sum();
        (capacity / STOCK_PART / region.chunk_blocks()).max(STOCK_CHUNKS)
    }

    /// Makes `pages` spare pages and a stock, as far as there is space for them: in the slice `only`, or in any.
    fn refill(&self, region: &Region, only: Option<SliceId>, pages: u64) -> Result<()> {
        let stock = self.stock_chunks(region, only) * region.chunk_blocks();
        let missing = (pages + stock).saturating_sub(region.spare_pages());
        if missing == 0 {
            return Ok(());
        }
        // redb's file grows by whole parts, so further chunks would have no use.
        let chunks = missing.div_ceil(region.chunk_blocks()) + region.chunks() as u64;
        let chunks = chunks.next_multiple_of(PART_CHUNKS) - region.chunks() as u64;
        let missing = chunks.min(region.free_entries() as u64);
        let mut entries = Vec::new();
        while (entries.len() as u64) < missing {
            let mut taken = self.take_chunk(only, region.chunk_blocks())?;
            if taken.is_none() {
                let _all = self.recall();
                taken = self.take_chunk(only, region.chunk_blocks())?;
            }
            match taken {
                Some(entry) if provision(region, &entry) => entries.push(entry),
                Some(entry) => {
                    self.give_back_chunk(region, &entry);
                    break;
                }
                None => break,
            }
        }
        while !((region.chunks() + entries.len()) as u64).is_multiple_of(PART_CHUNKS)
            && let Some(entry) = entries.pop()
        {
            self.give_back_chunk(region, &entry);
        }
        if entries.is_empty() {
            return Ok(());
        }
        // After an error it is unknown whether the superblock has the chunks, so they stay taken until the next mount.
        let added = region.add_spares(&entries)?;
        for entry in &entries[added..] {
            self.give_back_chunk(region, entry);
        }
        Ok(())
    }

    /// Gives back a chunk that the region does not get.
    fn give_back_chunk(&self, region: &Region, entry: &ChunkEntry) {
        let blocks = Blocks {
            slice: entry.slice.get(),
            first: entry.slice_first.get(),
            count: region.chunk_blocks() as u32,
        };
        let freed = self.give_back(blocks, "chunk");
        self.counts.available.fetch_add(freed, Ordering::AcqRel);
    }

    /// Takes one contiguous chunk, near the end of the slice `only`, or of any slice (those with the most free blocks first). Returns `None`
    /// if there is no such range, or its space is reserved.
    fn take_chunk(&self, only: Option<SliceId>, blocks: u64) -> Result<Option<ChunkEntry>> {
        if self.reserve(blocks).is_err() {
            return Ok(None);
        }
        let mut slices: Vec<SliceId> = (0..self.slices.len() as SliceId).collect();
        slices.retain(|slice| only.is_none_or(|only| only == *slice));
        slices.sort_by_key(|slice| std::cmp::Reverse(self.free_of(*slice)));
        for slice in slices {
            match self.take_chunk_in(slice, blocks) {
                Ok(None) => {}
                Ok(Some(entry)) => {
                    self.counts.reserved.fetch_sub(blocks, Ordering::AcqRel);
                    return Ok(Some(entry));
                }
                Err(error) => {
                    self.unreserve(blocks);
                    return Err(error);
                }
            }
        }
        self.unreserve(blocks);
        Ok(None)
    }

    fn take_chunk_in(&self, slice: SliceId, blocks: u64) -> Result<Option<ChunkEntry>> {
        let space = self.space(slice);
        let want = blocks as usize;
        for index in (0..space.containers.len()).rev() {
            let container = self.container(slice, index)?;
            if u64::from(container.free.load(Ordering::Relaxed)) < blocks {
                continue;
            }
            let mut guard = self.lock(slice, index)?;
            let Some((at, count)) = guard.as_mut().and_then(|b| b.take_last(want)) else {
                continue;
            };
            self.took(slice, index, count);
            drop(guard);
            let first = index as u64 * self.container_blocks + at as u64;
            match space.place(first, blocks) {
                Some((device, first_block)) => {
                    return Ok(Some(ChunkEntry {
                        first_block: U64::new(first_block),
                        position: U32::new(CHUNK_SPARE),
                        device: U16::new(device),
                        slice: U16::new(slice),
                        slice_first: U64::new(first),
                    }));
                }
                // It would cross from one region of the slice to another.
                None => drop(self.give_back(
                    Blocks {
                        slice,
                        first,
                        count: count as u32,
                    },
                    "chunk",
                )),
            }
        }
        Ok(None)
    }
}
