//! Plans the growth of devices: which slice gets which of the new blocks. No I/O.

use std::ops::Range;

use jericho_format::PAGE_BYTES;
use jericho_format::superblock::{
    CHUNK_BY_FORMAT, HEAD_BLOCKS, REGIONS_MAX, RegionEntry, Superblock,
};
use zerocopy::byteorder::little_endian::{U16, U64};

/// Most containers of a volume: the allocator keeps some 80 bytes of memory for each.
pub(crate) const CONTAINERS_MAX: u64 = 1 << 22;

/// Why the planned growth is impossible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Each slice of the device would get less than a container. Holds the least size of the device.
    TooLittle { least_bytes: u64 },
    /// The region table is full.
    Regions,
    /// The volume would have too many containers. Holds the size of a container.
    Containers { container_bytes: u64 },
}

/// Returns the devices of the first regions of the slices that have space on a device.
pub(crate) fn first_devices(superblock: &Superblock, device: u16) -> Vec<u16> {
    let (slices, _) = parts_of(superblock, device);
    let first = |slice: usize| superblock.first_device_of(&superblock.slices[slice]);
    slices.into_iter().filter_map(first).collect()
}

/// Returns the slices that have space on a device, and the first block of the device after all its parts.
fn parts_of(superblock: &Superblock, device: u16) -> (Vec<usize>, u64) {
    let on_it = |region: &&RegionEntry| region.device.get() == device;
    let end_of = |region: &RegionEntry| region.first_block.get() + region.blocks.get();
    let region_ends = superblock.regions.iter().filter(on_it).map(end_of);
    let chunks = superblock.chunks.iter();
    let chunk_ends = chunks
        .filter(|c| c.device.get() == device && c.slice_first.get() == CHUNK_BY_FORMAT)
        .map(|c| c.first_block.get() + u64::from(superblock.head.chunk_blocks.get()));
    let journals = superblock.slices.iter();
    let journal_ends = journals
        .filter(|slice| superblock.first_device_of(slice) == Some(device))
        .map(|slice| slice.journal_first_block.get() + u64::from(slice.journal_blocks.get()));
    let ends = region_ends.chain(chunk_ends).chain(journal_ends);
    let end = ends.fold(HEAD_BLOCKS, u64::max);
    let continues = |slice: &usize| {
        let last = superblock.regions_of(&superblock.slices[*slice]).last();
        last.is_some_and(|r| on_it(&r) && end_of(r) == end)
    };
    let has_space = |slice: &usize| {
        let regions = superblock.regions_of(&superblock.slices[*slice]);
        regions.iter().any(|r| on_it(&r))
    };
    let mut slices: Vec<usize> = (0..superblock.slices.len()).filter(has_space).collect();
    // The slice whose last region ends here gets the first of the new blocks, so that the region gets longer and the table does not.
    slices.sort_by_key(|slice| !continues(slice));
    (slices, end)
}

/// Appends blocks of a device to the slice that has the regions `own`.
fn append(own: &mut Vec<RegionEntry>, device: u16, blocks: Range<u64>) {
    let count = blocks.end - blocks.start;
    if let Some(last) = own.last_mut()
        && last.device.get() == device
        && last.first_block.get() + last.blocks.get() == blocks.start
    {
        last.blocks += count;
        return;
    }
    own.push(RegionEntry {
        first_block: U64::new(blocks.start),
        blocks: U64::new(count),
        device: U16::new(device),
        reserved: [0; 6],
    });
}

/// Makes a device `blocks` long, and gives the new blocks to the slices that have space on it. A refusal changes nothing.
pub(crate) fn grow_device(
    superblock: &mut Superblock,
    device: u16,
    blocks: u64,
) -> Result<(), Refusal> {
    let container_blocks = u64::from(superblock.head.container_blocks.get());
    let (slices, first) = parts_of(superblock, device);
    let count = slices.len().max(1) as u64;
    let share = blocks.saturating_sub(first) / count;
    if share < container_blocks {
        let least_blocks = first + count * container_blocks;
        return Err(Refusal::TooLittle {
            least_bytes: least_blocks * PAGE_BYTES,
        });
    }
    let mut regions = Vec::with_capacity(superblock.regions.len() + slices.len());
    let mut entries = superblock.slices.clone();
    let mut containers = 0;
    for (index, slice) in entries.iter_mut().enumerate() {
        let mut own = superblock.regions_of(slice).to_vec();
        if let Some(turn) = slices.iter().position(|s| *s == index) {
            let from = first + turn as u64 * share;
            append(&mut own, device, from..from + share);
            slice.blocks += share;
        }
        slice.first_region = U16::new(regions.len() as u16);
        slice.regions = U16::new(own.len() as u16);
        regions.append(&mut own);
        containers += slice.blocks.get().div_ceil(container_blocks);
    }
    if regions.len() > REGIONS_MAX {
        return Err(Refusal::Regions);
    }
    if containers > CONTAINERS_MAX {
        return Err(Refusal::Containers {
            container_bytes: container_blocks * PAGE_BYTES,
        });
    }
    superblock.regions = regions;
    superblock.slices = entries;
    superblock.devices[usize::from(device)].blocks = U64::new(blocks);
    Ok(())
}

/// Returns the most bytes that a volume with containers of this size can have.
pub(crate) fn most_bytes(container_bytes: u64) -> u64 {
    CONTAINERS_MAX * container_bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Space, plan};
    use jericho_format::superblock::DeviceEntry;
    use zerocopy::FromZeros;

    const MIB: u64 = (1 << 20) / PAGE_BYTES;

    /// Plans a volume on devices of these sizes in MiB.
    fn planned(sizes: &[u64], slices: usize) -> Superblock {
        let mut superblock = Superblock::new();
        let spaces: Vec<Space> = sizes
            .iter()
            .map(|mib| Space {
                name: "d".into(),
                blocks: mib * MIB,
                node: None,
                host: None,
            })
            .collect();
        for (index, mib) in sizes.iter().enumerate() {
            superblock.devices.push(DeviceEntry {
                uuid: [index as u8; 16],
                blocks: U64::new(mib * MIB),
                ..DeviceEntry::new_zeroed()
            });
        }
        plan(&mut superblock, &spaces, &vec![None; slices], None).unwrap();
        superblock
    }

    /// Checks that a reader accepts the superblock. Returns the capacity of each slice.
    fn capacities(superblock: &Superblock) -> Vec<u64> {
        let read = Superblock::decode(&superblock.encode()).unwrap();
        read.slices.iter().map(|slice| slice.blocks.get()).collect()
    }

    #[test]
    fn the_only_slice_gets_all_new_blocks_in_its_last_region() {
        let mut superblock = planned(&[64], 1);
        let before = capacities(&superblock)[0];
        grow_device(&mut superblock, 0, 100 * MIB).unwrap();
        assert_eq!(capacities(&superblock), [before + 36 * MIB]);
        assert_eq!(superblock.regions.len(), 1);
        assert_eq!(superblock.devices[0].blocks.get(), 100 * MIB);
    }

    #[test]
    fn slices_share_the_new_blocks_evenly_and_the_last_region_grows_in_place() {
        let mut superblock = planned(&[64], 3);
        let old = superblock.clone();
        let before = capacities(&superblock);
        for round in 1..=4 {
            grow_device(&mut superblock, 0, (64 + round * 30) * MIB).unwrap();
            let after = capacities(&superblock);
            for (slice, blocks) in after.iter().enumerate() {
                let added = blocks - before[slice];
                assert!(added.abs_diff(round * 10 * MIB) <= 4, "{added}");
            }
            // One of the three slices continues its last region.
            assert_eq!(superblock.regions.len(), 3 + 2 * round as usize);
        }
        // The blocks that the slices had are where they were.
        for (slice, entry) in old.slices.iter().enumerate() {
            let first = old.regions[usize::from(entry.first_region.get())];
            let index = usize::from(superblock.slices[slice].first_region.get());
            let now = superblock.regions[index];
            assert_eq!(now.first_block, first.first_block);
            assert!(now.blocks.get() >= first.blocks.get());
        }
    }

    #[test]
    fn only_the_slices_on_the_device_grow() {
        let mut superblock = planned(&[64, 64], 2);
        let before = capacities(&superblock);
        grow_device(&mut superblock, 1, 128 * MIB).unwrap();
        assert_eq!(capacities(&superblock), [before[0], before[1] + 64 * MIB]);
        grow_device(&mut superblock, 0, 80 * MIB).unwrap();
        assert_eq!(capacities(&superblock)[0], before[0] + 16 * MIB);
    }

    #[test]
    fn a_slice_on_two_devices_gets_new_blocks_after_all_that_it_has() {
        let mut superblock = planned(&[64, 64], 1);
        assert_eq!(superblock.regions.len(), 2);
        grow_device(&mut superblock, 0, 80 * MIB).unwrap();
        capacities(&superblock);
        let devices: Vec<u16> = superblock.regions.iter().map(|r| r.device.get()).collect();
        assert_eq!(devices, [0, 1, 0]);
    }

    #[test]
    fn growth_that_is_too_small_or_needs_too_many_parts_is_refused_and_changes_nothing() {
        let mut superblock = planned(&[64], 2);
        let before = superblock.clone();
        let Err(Refusal::TooLittle { least_bytes }) = grow_device(&mut superblock, 0, 64 * MIB + 9)
        else {
            panic!("9 blocks are no container");
        };
        assert!(superblock == before);
        grow_device(&mut superblock.clone(), 0, least_bytes / PAGE_BYTES).unwrap();
        let below = grow_device(&mut superblock, 0, least_bytes / PAGE_BYTES - 1);
        assert_eq!(below, Err(Refusal::TooLittle { least_bytes }));

        let far = grow_device(&mut superblock, 0, 1 << 40);
        let container_bytes = u64::from(before.head.container_blocks.get()) * PAGE_BYTES;
        assert_eq!(far, Err(Refusal::Containers { container_bytes }));
        assert!(superblock == before);

        let mut refused = None;
        for round in 1..2000 {
            let grown = grow_device(&mut superblock, 0, (64 + round * 2) * MIB);
            if grown.is_err() {
                refused = grown.err();
                break;
            }
        }
        assert_eq!(refused, Some(Refusal::Regions));
        assert_eq!(superblock.regions.len(), REGIONS_MAX);
        capacities(&superblock);
    }
}
