//! Takes new space at the ends of slices into use, while blocks are allocated and freed.

use std::sync::atomic::Ordering;

use super::{Allocator, Container, Space, SpaceOptions, container_lengths};

impl Allocator {
    /// Makes the slices as large as `slices` says. The superblock names the new blocks durably. Skips a slice that has that
    /// many blocks already. Ignores `chunks`: new chunks are taken from this allocator. Returns the number of new blocks.
    pub fn grow(&self, slices: Vec<SpaceOptions>) -> u64 {
        let _alone = self.growing.lock();
        let grown = self.slices.iter().zip(slices);
        let added = grown.map(|(space, new)| self.grow_slice(space, new)).sum();
        // Last: only blocks that an allocation finds may be reserved.
        self.counts.available.fetch_add(added, Ordering::AcqRel);
        added
    }

    fn grow_slice(&self, space: &Space, new: SpaceOptions) -> u64 {
        let old = space.capacity();
        if new.blocks <= old {
            return 0;
        }
        *space.regions.write() = new.regions;
        let container_blocks = self.container_blocks;
        let containers = old.div_ceil(container_blocks);
        self.lengthen_last(space, old, new.blocks);
        let count = new.blocks.div_ceil(container_blocks);
        let lengths = container_lengths(new.blocks, container_blocks, containers..count);
        space.containers.append(lengths.map(Container::empty));
        new.blocks - old
    }

    /// Sets the capacity and counts the new blocks, then frees those of the last container, which may be shorter than the others.
    /// While its bits are locked, no thread loads them with the old capacity. A thread that has reserved space anywhere can
    /// allocate a new block as soon as the block is free, so the count must include it by then.
    fn lengthen_last(&self, space: &Space, old: u64, new: u64) {
        let count = || {
            space.capacity.store(new, Ordering::Release);
            space.free.fetch_add(new - old, Ordering::AcqRel);
        };
        let Some(last) = space.containers.last() else {
            return count();
        };
        let first = (space.containers.len() - 1) as u64 * self.container_blocks;
        let end = new.min(first + self.container_blocks);
        let mut bits = last.bits.lock();
        count();
        if let Some(bits) = bits.as_mut() {
            bits.clear((old - first) as usize, (end - old) as usize);
        }
        last.free.fetch_add((end - old) as u32, Ordering::AcqRel);
    }
}
