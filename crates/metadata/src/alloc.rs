//! Space of the slices: containers (allocation groups) with one bitmap each.
//!
//! The first use of a container loads its bitmap into memory. The set bits are blocks in use, blocks allocated to a
//! write-back in flight, and blocks freed by a batch that is not durable yet. The durable bitmap is in the store.
//! The batch that adds or removes extents also changes the durable bitmap, so the two always agree. Chunks of the metadata
//! region are in no durable bitmap: the superblock names them, and the allocator sets their bits when it loads a container.
//!
//! Invariants: `available` + `reserved` is at most the number of clear bits in all containers, so every reservation can be
//! used. (Blocks lent to be discarded, see `lend.rs`, have their bits set and count in neither.) A container is loaded before
//! the commit of a batch that frees its blocks (`load_for`). If it were loaded after the commit, these blocks would be free at
//! once and could be allocated to another file. `release_committed` would then free them although that file owns them.
//!
//! A slice grows at its end (`grow.rs`): its last container gets longer, and further containers follow. All block numbers stay. Further slices
//! come after the last one (`append.rs`).

mod append;
mod bits;
mod grow;
mod lend;
mod loans;
mod put_back;
mod refill;

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use jericho_storage::Appended;
pub use jericho_volume::Blocks;
use jericho_volume::{SliceRegion, SliceSpace};
use parking_lot::{Mutex, MutexGuard, RwLock};

pub use self::append::{AppendedShard, AppendedSlice};
use self::bits::Bits;
pub use self::lend::{Loan, LoanRequest};
use self::loans::Loans;
pub use self::loans::Recall;
use crate::error::{Error, Result};
use crate::logged::LoggedPages;
use crate::shard::{ShardId, ShardMap};
use crate::store::StoreRef;
use crate::types::SliceId;

/// One container.
struct Container {
    /// Number of clear bits and lent blocks. Correct even while the bitmap is not loaded.
    free: AtomicU32,
    bits: Mutex<Option<Bits>>,
}

impl Container {
    /// Returns a container without used blocks. `blocks` is its length.
    fn empty(blocks: u64) -> Container {
        Container {
            free: AtomicU32::new(blocks as u32),
            bits: Mutex::new(None),
        }
    }
}

/// The space of one slice.
struct Space {
    /// Changes only under the lock of the last container's bits, so that the container is loaded with one capacity.
    capacity: AtomicU64,
    free: AtomicU64,
    /// Container in which the next search starts.
    cursor: AtomicUsize,
    containers: Appended<Container>,
    /// First blocks of the metadata chunks that this slice had when the volume was opened, sorted.
    chunks: Vec<u64>,
    regions: RwLock<Vec<SliceRegion>>,
    /// Prevents further allocations here, because the device has failed or is missing.
    is_closed: AtomicBool,
    /// The blocks that `close` has subtracted from `available`.
    closed: Mutex<Option<u64>>,
}

impl Space {
    /// Returns the space of a slice with no used block. Has no free blocks before `end_opening`.
    fn new(mut options: SpaceOptions, container_blocks: u64) -> Space {
        let count = options.blocks.div_ceil(container_blocks);
        let lengths = container_lengths(options.blocks, container_blocks, 0..count);
        options.chunks.sort_unstable();
        Space {
            capacity: AtomicU64::new(options.blocks),
            free: AtomicU64::new(0),
            cursor: AtomicUsize::new(0),
            containers: lengths.map(Container::empty).collect(),
            chunks: options.chunks,
            regions: RwLock::new(options.regions),
            is_closed: AtomicBool::new(options.is_absent),
            closed: Mutex::new(None),
        }
    }

    /// Counts blocks of a container that are used when the volume is opened.
    fn take_at_opening(&self, slice: SliceId, container: usize, blocks: u32) -> Result<()> {
        let found = self.containers.get(container);
        let free = &found.ok_or_else(|| too_many(slice))?.free;
        let left = free.load(Ordering::Relaxed).checked_sub(blocks);
        free.store(left.ok_or_else(|| too_many(slice))?, Ordering::Relaxed);
        Ok(())
    }

    /// Counts the blocks of the metadata chunks, after those in the store. Returns the number of free blocks.
    fn end_opening(&self, slice: SliceId, container_blocks: u64, chunk_blocks: u64) -> Result<u64> {
        for first in &self.chunks {
            for (container, _, count) in pieces(container_blocks, *first, chunk_blocks) {
                self.take_at_opening(slice, container, count as u32)?;
            }
        }
        if self.is_closed.load(Ordering::Relaxed) {
            return Ok(0);
        }
        let containers = self.containers.iter();
        let free = containers
            .map(|c| u64::from(c.free.load(Ordering::Relaxed)))
            .sum();
        self.free.store(free, Ordering::Relaxed);
        Ok(free)
    }

    /// Returns the device of a contiguous range of the slice, and the range's first block there. Returns `None` if the range is
    /// not contiguous.
    fn place(&self, first: u64, blocks: u64) -> Option<(u16, u64)> {
        let within =
            |r: &&SliceRegion| r.slice_first <= first && first + blocks <= r.slice_first + r.blocks;
        let regions = self.regions.read();
        let region = regions.iter().find(within)?;
        Some((
            region.device,
            region.device_first + (first - region.slice_first),
        ))
    }

    fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Acquire)
    }
}

fn too_many(slice: SliceId) -> Error {
    Error::Damaged(format!("more blocks of slice {slice} are used than it has"))
}

/// Returns the lengths of these containers of a slice of `capacity` blocks.
fn container_lengths(
    capacity: u64,
    container_blocks: u64,
    containers: std::ops::Range<u64>,
) -> impl Iterator<Item = u64> {
    containers.map(move |index| (capacity - index * container_blocks).min(container_blocks))
}

/// Facts about a slice that the allocator needs.
#[derive(Clone, Debug, Default)]
pub struct SpaceOptions {
    /// Capacity in blocks.
    pub blocks: u64,
    /// First blocks of the metadata chunks within the slice.
    pub chunks: Vec<u64>,
    /// Regions of the slice, in order. May be empty if the metadata region never grows.
    pub regions: Vec<SliceRegion>,
    /// A device of the slice is missing, so nothing is allocated there.
    pub is_absent: bool,
}

impl From<&SliceSpace> for SpaceOptions {
    fn from(slice: &SliceSpace) -> SpaceOptions {
        SpaceOptions {
            blocks: slice.blocks,
            chunks: Vec::new(),
            regions: slice.regions().to_vec(),
            is_absent: false,
        }
    }
}

/// The allocator of the volume. All calls are thread-safe. Only the first use of a container does device I/O (a read of the
/// store).
pub struct Allocator {
    shards: Appended<ShardParts>,
    container_blocks: u64,
    chunk_blocks: u64,
    /// A slice comes after its shard.
    slices: Appended<Space>,
    counts: Counts,
    loans: Loans,
    growing: Mutex<()>,
    on_unreachable: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// Numbers of blocks of the whole volume. They have cache lines of their own: each write of new data changes them, and commits in all shards
/// read the allocator's other fields.
#[repr(align(128))]
struct Counts {
    /// Free blocks that are neither reserved nor lent.
    available: AtomicU64,
    reserved: AtomicU64,
}

/// What the allocator has of each shard. Has cache lines of its own.
#[repr(align(128))]
struct ShardParts {
    store: StoreRef,
    logged: LoggedPages,
}

impl ShardParts {
    fn new(store: StoreRef) -> ShardParts {
        ShardParts {
            store,
            logged: LoggedPages::default(),
        }
    }
}

/// Number of passes over all containers after which an allocation of reserved blocks fails.
const PASSES_MAX: usize = 1000;

impl Allocator {
    /// Creates the allocator as `new` does, but does not register it with the stores. So the stores do not call it before commits.
    fn load(
        stores: Vec<StoreRef>,
        slices: Vec<SpaceOptions>,
        chunk_blocks: u64,
    ) -> Result<Arc<Allocator>> {
        let container_blocks = u64::from(stores[0].container_blocks());
        let space = |options| Space::new(options, container_blocks);
        let slices: Vec<Space> = slices.into_iter().map(space).collect();
        let take = |slice: SliceId, container: usize, blocks: u32| {
            let space = slices.get(usize::from(slice));
            let space = space.ok_or_else(|| too_many(slice))?;
            space.take_at_opening(slice, container, blocks)
        };
        let map = ShardMap::new(stores.len());
        let present = |(_, store): &(ShardId, &StoreRef)| !store.is_absent();
        for (shard, store) in map.all().iter().zip(&stores).filter(present) {
            for ((slice, container), used) in store.used_counts()? {
                if map.of_slice(slice) != shard {
                    let what = format!("blocks of slice {slice} are in another slice's store");
                    return Err(Error::Damaged(what));
                }
                take(slice, container as usize, used)?;
            }
        }
        let mut available = 0;
        for (id, space) in slices.iter().enumerate() {
            available += space.end_opening(id as SliceId, container_blocks, chunk_blocks)?;
        }
        Ok(Arc::new(Allocator {
            shards: stores.into_iter().map(ShardParts::new).collect(),
            container_blocks,
            chunk_blocks,
            slices: slices.into_iter().collect(),
            counts: Counts {
                available: AtomicU64::new(available),
                reserved: AtomicU64::new(0),
            },
            loans: Loans::default(),
            growing: Mutex::new(()),
            on_unreachable: OnceLock::new(),
        }))
    }

    /// Returns the map from slices to shards.
    pub fn shards(&self) -> ShardMap {
        ShardMap::new(self.shards.len())
    }

    fn shard(&self, shard: ShardId) -> &ShardParts {
        let found = self.shards.get(shard.index());
        found.expect("a shard of the volume")
    }

    /// Returns the store of a slice.
    fn store_of(&self, slice: SliceId) -> &StoreRef {
        &self.shard(self.shards().of_slice(slice)).store
    }

    /// Holds all locks of a slice and of its shard's images until the returned value is dropped.
    #[cfg(any(test, feature = "testing"))]
    pub fn hold_all(&self, slice: SliceId) -> impl Sized {
        let space = self.space(slice);
        let containers: Vec<_> = space.containers.iter().map(|c| c.bits.lock()).collect();
        let logged = self.logged_of(self.shards().of_slice(slice));
        (containers, space.regions.write(), logged.hold_all())
    }

    /// Returns a slice that exists.
    fn space(&self, slice: SliceId) -> &Space {
        let found = self.slices.get(usize::from(slice));
        found.expect("a slice of the volume")
    }

    /// Prevents further allocations in these slices, because their changes have ended. A thread that has reserved space may then fail with
    /// ENOSPC when it allocates.
    pub fn close(&self, slices: impl Iterator<Item = SliceId>) {
        for space in slices.filter_map(|slice| self.slices.get(usize::from(slice))) {
            let mut closed = space.closed.lock();
            if !space.is_closed.swap(true, Ordering::AcqRel) {
                let free = space.free.load(Ordering::Acquire);
                let take = |available: u64| Some(available.saturating_sub(free));
                let available = &self.counts.available;
                let before = available.fetch_update(Ordering::AcqRel, Ordering::Acquire, take);
                *closed = Some(before.map_or(0, |available| available.min(free)));
            }
        }
    }

    /// Returns the images of the shard that has these blocks.
    pub fn logged(&self, blocks: Blocks) -> &LoggedPages {
        self.logged_of(self.shards().of_slice(blocks.slice))
    }

    /// Returns the images of a shard.
    pub fn logged_of(&self, shard: ShardId) -> &LoggedPages {
        &self.shard(shard).logged
    }

    /// Reserves `blocks` blocks for data that will be written later (delayed allocation), in no particular slice. Fails with
    /// ENOSPC if fewer are available. The spare chunks of the metadata region are not available, so that removals succeed on a
    /// full volume.
    pub fn reserve(&self, blocks: u64) -> Result<()> {
        let take = |available: u64| available.checked_sub(blocks);
        match self
            .counts
            .available
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, take)
        {
            Ok(_) => {
                self.counts.reserved.fetch_add(blocks, Ordering::AcqRel);
                Ok(())
            }
            Err(_) => Err(Error::Errno(28)),
        }
    }

    /// Cancels the reservation of `blocks` blocks.
    pub fn unreserve(&self, blocks: u64) {
        self.counts.reserved.fetch_sub(blocks, Ordering::AcqRel);
        self.counts.available.fetch_add(blocks, Ordering::AcqRel);
    }

    /// Allocates `count` reserved blocks, in `slice` if it has room, else in the other slices (those with the most free blocks
    /// first). `near` is a block after which the file's data should continue. Appends ranges that add up to `count`, and
    /// prefers few long ranges. Does not fail for lack of space, because the space is reserved, unless `close` was called. On an error
    /// allocates nothing, and the blocks stay reserved.
    pub fn allocate(
        &self,
        slice: SliceId,
        near: Option<u64>,
        count: u32,
        out: &mut Vec<Blocks>,
    ) -> Result<()> {
        let mut ranges = Vec::new();
        let result = self.allocate_all(slice, near, count, &mut ranges);
        if result.is_err() {
            for blocks in ranges {
                // Frees the blocks again. They stay reserved.
                self.give_back(blocks, "undone allocation");
            }
        } else {
            self.counts
                .reserved
                .fetch_sub(u64::from(count), Ordering::AcqRel);
            out.append(&mut ranges);
        }
        result
    }

    fn allocate_all(
        &self,
        slice: SliceId,
        near: Option<u64>,
        count: u32,
        out: &mut Vec<Blocks>,
    ) -> Result<()> {
        let mut left = count as usize;
        if let Some(near) = near {
            left -= self.extend(slice, near + 1, left, out)?;
        }
        let mut passes = 0;
        while left > 0 {
            // A pass can miss blocks while other threads free and allocate some. The reservation guarantees that enough blocks
            // are free.
            if passes > 0
                && self
                    .slices
                    .iter()
                    .any(|s| s.is_closed.load(Ordering::Acquire))
            {
                // The reservation may have counted blocks of a slice that was closed since.
                return Err(Error::Errno(28));
            }
            if passes == PASSES_MAX {
                return Err(Error::Damaged("the counts of free blocks are wrong".into()));
            }
            passes += 1;
            left -= self.allocate_in(slice, left, out)?;
            if left == 0 {
                break;
            }
            for other in self.by_free(slice) {
                left -= self.allocate_in(other, left, out)?;
                if left == 0 {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Returns the other slices, those with the most free blocks first.
    fn by_free(&self, but: SliceId) -> Vec<SliceId> {
        let mut slices: Vec<SliceId> = (0..self.slices.len() as SliceId).collect();
        slices.retain(|slice| *slice != but);
        slices.sort_by_key(|slice| std::cmp::Reverse(self.free_of(*slice)));
        slices
    }

    /// Allocates consecutive free blocks from `first` on. Returns their number.
    fn extend(
        &self,
        slice: SliceId,
        first: u64,
        want: usize,
        out: &mut Vec<Blocks>,
    ) -> Result<usize> {
        let mut done = 0;
        while done < want {
            let at = first + done as u64;
            let index = (at / self.container_blocks) as usize;
            let space = self.slices.get(usize::from(slice));
            let ends = |space: &Space| {
                index >= space.containers.len() || space.is_closed.load(Ordering::Acquire)
            };
            if space.is_none_or(ends) {
                break;
            }
            let mut bits = self.lock(slice, index)?;
            let Some(bits) = bits.as_mut() else { break };
            let count = bits.take_at((at % self.container_blocks) as usize, want - done);
            if count == 0 {
                break;
            }
            self.took(slice, index, count);
            push(
                out,
                Blocks {
                    slice,
                    first: at,
                    count: count as u32,
                },
            );
            done += count;
        }
        Ok(done)
    }

    /// Allocates up to `want` blocks of a slice. Returns their number.
    fn allocate_in(&self, slice: SliceId, want: usize, out: &mut Vec<Blocks>) -> Result<usize> {
        let Some(space) = self.slices.get(usize::from(slice)) else {
            return Ok(0);
        };
        if space.is_closed.load(Ordering::Acquire) {
            return Ok(0);
        }
        let containers = space.containers.len();
        let start = space.cursor.load(Ordering::Relaxed);
        let mut done = 0;
        // Tries containers that have room for all blocks or are a quarter free, and then all containers.
        for enough in [(self.container_blocks / 4).max(1), 1] {
            for step in 0..containers {
                let index = (start + step) % containers;
                let Some(container) = space.containers.get(index) else {
                    break;
                };
                loop {
                    let left = want - done;
                    let free = u64::from(container.free.load(Ordering::Relaxed));
                    if free == 0 || free < enough.min(left as u64) {
                        break;
                    }
                    let mut guard = self.lock(slice, index)?;
                    let Some((at, count)) = guard.as_mut().and_then(|b| b.take(left, 1)) else {
                        break;
                    };
                    self.took(slice, index, count);
                    drop(guard);
                    let first = index as u64 * self.container_blocks + at as u64;
                    push(
                        out,
                        Blocks {
                            slice,
                            first,
                            count: count as u32,
                        },
                    );
                    done += count;
                    if done == want {
                        space.cursor.store(index, Ordering::Relaxed);
                        return Ok(done);
                    }
                }
            }
        }
        Ok(done)
    }

    fn took(&self, slice: SliceId, container: usize, count: usize) {
        let space = self.space(slice);
        if let Some(container) = space.containers.get(container) {
            container.free.fetch_sub(count as u32, Ordering::AcqRel);
        }
        space.free.fetch_sub(count as u64, Ordering::AcqRel);
    }

    /// Returns a container that exists.
    fn container(&self, slice: SliceId, index: usize) -> Result<&Container> {
        let space = self.slices.get(usize::from(slice));
        space
            .and_then(|space| space.containers.get(index))
            .ok_or_else(|| Error::Damaged(format!("slice {slice} has no container {index}")))
    }

    /// Locks a container that exists. Loads its bitmap on first use.
    fn lock(&self, slice: SliceId, index: usize) -> Result<MutexGuard<'_, Option<Bits>>> {
        let container = self.container(slice, index)?;
        let space = self.space(slice);
        let mut guard = container.bits.lock();
        if guard.is_none() {
            let durable = self.store_of(slice).bitmap(slice, index as u32)?;
            let words = (self.container_blocks / 64) as usize;
            let mut bits = Bits::new(durable.unwrap_or_else(|| vec![0; words].into()));
            let first = index as u64 * self.container_blocks;
            let end = first + self.container_blocks;
            let capacity = space.capacity();
            if end > capacity {
                let beyond = (end - capacity) as usize;
                bits.set((capacity - first) as usize, beyond);
            }
            for chunk in &space.chunks {
                for (i, at, count) in pieces(self.container_blocks, *chunk, self.chunk_blocks) {
                    if i == index {
                        bits.set(at, count);
                    }
                }
            }
            if bits.free() != container.free.load(Ordering::Acquire) {
                return Err(Error::Damaged(format!(
                    "container {index} of slice {slice} has {} free blocks but its count says {}",
                    bits.free(),
                    container.free.load(Ordering::Acquire),
                )));
            }
            *guard = Some(bits);
        }
        Ok(guard)
    }

    /// Loads the containers of blocks that a batch is about to free. Ignores blocks beyond a slice: the commit refuses them.
    pub fn load_for(&self, blocks: Blocks) -> Result<()> {
        for (index, _, _) in pieces(self.container_blocks, blocks.first, u64::from(blocks.count)) {
            let space = self.slices.get(usize::from(blocks.slice));
            if space.is_some_and(|space| index < space.containers.len()) {
                drop(self.lock(blocks.slice, index)?);
            }
        }
        Ok(())
    }

    /// Frees blocks that no committed extent names (an allocation that was not committed).
    pub fn release_uncommitted(&self, blocks: Blocks) {
        let freed = self.give_back(blocks, "uncommitted allocation");
        self.counts.available.fetch_add(freed, Ordering::AcqRel);
    }

    /// Undoes `allocate`: frees the blocks as `release_uncommitted` does, but keeps the space reserved.
    pub fn unallocate(&self, blocks: Blocks) {
        let freed = self.give_back(blocks, "allocation without data");
        self.counts.reserved.fetch_add(freed, Ordering::AcqRel);
    }

    /// Frees blocks whose removal has just become durable.
    pub fn release_committed(&self, blocks: Blocks) {
        let freed = self.give_back(blocks, "removed extent");
        self.counts.available.fetch_add(freed, Ordering::AcqRel);
    }

    /// Clears the bits of blocks. Returns how many were set. The caller must add only this number to `available`: otherwise more
    /// space could be reserved than is free.
    fn give_back(&self, blocks: Blocks, what: &str) -> u64 {
        // Otherwise the checkpointer could write an image of a block into the next owner's file.
        self.logged(blocks).release(blocks);
        let mut cleared = 0;
        for (index, at, count) in
            pieces(self.container_blocks, blocks.first, u64::from(blocks.count))
        {
            let Some(space) = self.slices.get(usize::from(blocks.slice)) else {
                continue;
            };
            let Some(container) = space.containers.get(index) else {
                continue;
            };
            let n = match container.bits.lock().as_mut() {
                Some(bits) => {
                    let n = bits.clear(at, count);
                    if self.loans.remember.load(Ordering::Acquire) && bits.note_freed(at, count) {
                        self.loans.push_freed((blocks.slice, index));
                    }
                    container.free.fetch_add(n, Ordering::AcqRel);
                    space.free.fetch_add(u64::from(n), Ordering::AcqRel);
                    n
                }
                None => 0,
            };
            cleared += n;
        }
        if cleared != blocks.count {
            tracing::error!(?blocks, what, "blocks were freed that were free already");
        }
        u64::from(cleared)
    }

    /// Returns the number of free blocks of a slice, neither used nor allocated in flight.
    pub fn free_of(&self, slice: SliceId) -> u64 {
        self.slices
            .get(usize::from(slice))
            .map_or(0, |s| s.free.load(Ordering::Acquire))
    }

    /// Returns the capacity of a slice in blocks, including its metadata.
    pub fn capacity_of(&self, slice: SliceId) -> u64 {
        self.slices
            .get(usize::from(slice))
            .map_or(0, Space::capacity)
    }

    /// Returns the number of blocks that are reserved and not allocated.
    pub fn reserved(&self) -> u64 {
        self.counts.reserved.load(Ordering::Acquire)
    }

    /// Returns the number of blocks of the volume that can still be reserved.
    pub fn available(&self) -> u64 {
        self.counts.available.load(Ordering::Acquire)
    }
}

/// Splits a range of blocks at container boundaries. Returns (container, first bit, number of bits) for each piece.
fn pieces(
    container_blocks: u64,
    first: u64,
    count: u64,
) -> impl Iterator<Item = (usize, usize, usize)> {
    let end = first.saturating_add(count);
    let mut at = first;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let bit = at % container_blocks;
        let run = (container_blocks - bit).min(end - at);
        let piece = ((at / container_blocks) as usize, bit as usize, run as usize);
        at += run;
        Some(piece)
    })
}

/// Appends a range. Joins it with the last one if it continues that range.
fn push(out: &mut Vec<Blocks>, blocks: Blocks) {
    if let Some(last) = out.last_mut()
        && last.slice == blocks.slice
        && last.first + u64::from(last.count) == blocks.first
        && let Some(count) = last.count.checked_add(blocks.count)
    {
        last.count = count;
        return;
    }
    out.push(blocks);
}

#[cfg(test)]
mod tests;
