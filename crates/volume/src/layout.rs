//! Divides the devices of a new volume: head, first metadata chunks, and the slices.
//!
//! A slice is on a device of its own node if there is one. Slices on the same device share it evenly. A device without a slice
//! is added to a slice, of its node if possible. No I/O.

use std::sync::Arc;

use jericho_format::PAGE_BYTES;
use jericho_format::superblock::{
    CHUNK_NO_SLICE, CHUNK_SPARE, CONTAINER_BLOCKS, ChunkEntry, HEAD_BLOCKS, NO_NODE, RegionEntry,
    SLICES_MAX, SliceEntry, Superblock,
};
use zerocopy::byteorder::little_endian::{U16, U32, U64};

use crate::error::VolumeError;

/// Smallest size of a slice.
const SLICE_BLOCKS_MIN: u64 = (4 << 20) / PAGE_BYTES;
/// Smallest size of the metadata on the first device.
const METADATA_BLOCKS_MIN: u64 = (4 << 20) / PAGE_BYTES;
/// Smallest size of the journal.
const JOURNAL_BLOCKS_MIN: u64 = (1 << 20) / PAGE_BYTES;
/// Largest container.
const CONTAINER_BLOCKS_MAX: u64 = *CONTAINER_BLOCKS.end() as u64;
/// Smallest container.
const CONTAINER_BLOCKS_MIN: u64 = *CONTAINER_BLOCKS.start() as u64;

/// Facts about a device that the layout needs.
pub(crate) struct Space {
    pub(crate) name: Arc<str>,
    pub(crate) blocks: u64,
    pub(crate) node: Option<u32>,
}

/// Returns the number of blocks in a metadata chunk. Chunks are small enough not to waste a small volume, and large enough that
/// the table of chunks can hold a sixteenth of a large one.
fn chunk_blocks(volume_blocks: u64) -> u64 {
    match (volume_blocks * PAGE_BYTES) >> 30 {
        0..4 => 64,
        4..64 => 256,
        64..1024 => 1024,
        _ => 16384,
    }
}

/// Returns the initial size of the metadata region: a 64th of the volume, but 16 to 256 MiB, at most an eighth of the volume, and
/// in any case at least 4 MiB.
fn metadata_blocks(volume_blocks: u64) -> u64 {
    let mib = (1 << 20) / PAGE_BYTES;
    (volume_blocks / 64)
        .clamp(16 * mib, 256 * mib)
        .min(volume_blocks / 8)
        .max(METADATA_BLOCKS_MIN)
}

/// Returns the size of the journal: a 64th of the volume, but 8 to 64 MiB, at most a 16th of the volume, and in any case at least
/// 1 MiB.
fn journal_blocks(volume_blocks: u64) -> u64 {
    let mib = (1 << 20) / PAGE_BYTES;
    (volume_blocks / 64)
        .clamp(8 * mib, 64 * mib)
        .min(volume_blocks / 16)
        .max(JOURNAL_BLOCKS_MIN)
}

/// Returns the device of each slice.
fn choose_devices(devices: &[Space], nodes: &[Option<u32>]) -> Vec<usize> {
    let mut count = vec![0usize; devices.len()];
    let mut chosen = Vec::with_capacity(nodes.len());
    for node in nodes {
        let own = |d: &usize| node.is_some() && devices[*d].node == *node;
        let least = |candidates: &mut dyn Iterator<Item = usize>| {
            candidates.min_by_key(|d| (count[*d], *d))
        };
        let device = least(&mut (0..devices.len()).filter(own))
            .or_else(|| least(&mut (0..devices.len())))
            .unwrap_or(0);
        count[device] += 1;
        chosen.push(device);
    }
    chosen
}

/// Returns the range of each device that is available to slices, as first block and blocks. `own` is the number of blocks for journal
/// and metadata on the first device. Fails if a device is too small.
fn usable_ranges(
    devices: &[Space],
    device_of: &[usize],
    own: u64,
) -> Result<Vec<(u64, u64)>, VolumeError> {
    let slices_on = |device| device_of.iter().filter(|d| **d == device).count();
    let mut usable = Vec::new();
    for (index, device) in devices.iter().enumerate() {
        let head = if index == 0 { HEAD_BLOCKS + own } else { 1 };
        let slices = slices_on(index).max(1);
        let minimum = head + slices as u64 * SLICE_BLOCKS_MIN;
        if device.blocks < minimum {
            return Err(VolumeError::TooSmall {
                device: device.name.clone(),
                slices,
                minimum_bytes: minimum * PAGE_BYTES,
                size_bytes: device.blocks * PAGE_BYTES,
            });
        }
        usable.push((head, device.blocks - head));
    }
    Ok(usable)
}

/// Returns the regions of each slice: its share of its device, and the devices that no slice chose.
fn regions_of_slices(
    devices: &[Space],
    nodes: &[Option<u32>],
    device_of: &[usize],
    usable: &[(u64, u64)],
) -> Vec<Vec<RegionEntry>> {
    let slices_on = |device| device_of.iter().filter(|d| **d == device).count();
    let region = |device: usize, first: u64, blocks: u64| RegionEntry {
        first_block: U64::new(first),
        blocks: U64::new(blocks),
        device: U16::new(device as u16),
        reserved: [0; 6],
    };
    let mut regions: Vec<Vec<RegionEntry>> = vec![Vec::new(); nodes.len()];
    for (slice, device) in device_of.iter().enumerate() {
        let (first, blocks) = usable[*device];
        let share = blocks / slices_on(*device) as u64;
        let before = device_of[..slice].iter().filter(|d| *d == device).count() as u64;
        regions[slice].push(region(*device, first + before * share, share));
    }
    for device in (0..devices.len()).filter(|d| slices_on(*d) == 0) {
        let node = devices[device].node;
        let slice = (0..nodes.len())
            .min_by_key(|s| (node.is_none() || nodes[*s] != node, regions[*s].len(), *s))
            .unwrap_or(0);
        let (first, blocks) = usable[device];
        regions[slice].push(region(device, first, blocks));
    }
    regions
}

/// Plans slices, regions, chunks and the sizes in the head. `nodes` holds the home node of each slice.
pub(crate) fn plan(
    superblock: &mut Superblock,
    devices: &[Space],
    nodes: &[Option<u32>],
) -> Result<(), VolumeError> {
    if nodes.is_empty() {
        return Err(VolumeError::NoSlices);
    }
    if nodes.len() > SLICES_MAX {
        return Err(VolumeError::TooManySlices {
            asked: nodes.len(),
            most: SLICES_MAX,
        });
    }
    let volume_blocks: u64 = devices.iter().map(|d| d.blocks).sum();
    let chunk_blocks = chunk_blocks(volume_blocks);
    // The slices on the first device must have enough space after the head and the metadata.
    let device_of = choose_devices(devices, nodes);
    let slices_on = |device| device_of.iter().filter(|d| **d == device).count();
    let first_wanted = HEAD_BLOCKS + slices_on(0).max(1) as u64 * SLICE_BLOCKS_MIN;
    let room = devices[0].blocks.saturating_sub(first_wanted);
    let journal = journal_blocks(volume_blocks)
        .min(room.saturating_sub(METADATA_BLOCKS_MIN))
        .max(JOURNAL_BLOCKS_MIN);
    let metadata = metadata_blocks(volume_blocks)
        .min(room.saturating_sub(journal))
        .max(METADATA_BLOCKS_MIN)
        / chunk_blocks
        * chunk_blocks;
    let metadata = metadata.max(chunk_blocks);

    let usable = usable_ranges(devices, &device_of, journal + metadata)?;
    let regions = regions_of_slices(devices, nodes, &device_of, &usable);
    let sum = |regions: &[RegionEntry]| regions.iter().map(|r| r.blocks.get()).sum::<u64>();
    let smallest = regions.iter().map(|r| sum(r)).min().unwrap_or(0);
    let containers = (smallest / 16).clamp(CONTAINER_BLOCKS_MIN, CONTAINER_BLOCKS_MAX);
    let container_blocks = 1 << containers.ilog2();

    superblock.head.container_blocks = U32::new(container_blocks as u32);
    superblock.head.chunk_blocks = U32::new(chunk_blocks as u32);
    superblock.head.journal_first_block = U64::new(HEAD_BLOCKS);
    superblock.head.journal_blocks = U64::new(journal);
    for (slice, own) in regions.iter().enumerate() {
        superblock.slices.push(SliceEntry {
            blocks: U64::new(sum(own)),
            node: U32::new(nodes[slice].unwrap_or(NO_NODE)),
            first_region: U16::new(superblock.regions.len() as u16),
            regions: U16::new(own.len() as u16),
            reserved: [0; 16],
        });
        superblock.regions.extend_from_slice(own);
    }
    for chunk in 0..metadata / chunk_blocks {
        superblock.chunks.push(ChunkEntry {
            first_block: U64::new(HEAD_BLOCKS + journal + chunk * chunk_blocks),
            position: U32::new(CHUNK_SPARE),
            device: U16::new(0),
            slice: U16::new(CHUNK_NO_SLICE),
            slice_first: U64::new(0),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(of: &[(u64, Option<u32>)]) -> Vec<Space> {
        let space = |(mib, node): &(u64, Option<u32>)| Space {
            name: "d".into(),
            blocks: mib * 256,
            node: *node,
        };
        of.iter().map(space).collect()
    }

    fn planned(of: &[(u64, Option<u32>)], nodes: &[Option<u32>]) -> Superblock {
        let mut superblock = Superblock::new();
        plan(&mut superblock, &devices(of), nodes).unwrap();
        superblock
    }

    #[test]
    fn a_slice_is_on_a_device_of_its_node() {
        let s = planned(
            &[(1024, Some(1)), (1024, Some(0))],
            &[Some(0), Some(1), Some(0)],
        );
        let device = |slice: usize| {
            s.regions[usize::from(s.slices[slice].first_region.get())]
                .device
                .get()
        };
        assert_eq!([device(0), device(1), device(2)], [1, 0, 1]);
    }

    #[test]
    fn a_device_that_no_slice_chose_is_added_to_one_of_its_node() {
        let s = planned(
            &[(1024, Some(0)), (1024, None), (1024, Some(1))],
            &[Some(0), Some(1)],
        );
        assert_eq!(s.slices[0].regions.get(), 2);
        assert_eq!(s.slices[1].regions.get(), 1);
        assert_eq!(s.regions.len(), 3);
    }

    #[test]
    fn no_two_parts_of_a_device_overlap() {
        for (of, slices) in [(vec![(64, None)], 3), (vec![(512, None), (16, None)], 5)] {
            let s = planned(&of, &vec![None; slices]);
            let mut parts: Vec<(u16, u64, u64)> = s
                .regions
                .iter()
                .map(|r| (r.device.get(), r.first_block.get(), r.blocks.get()))
                .chain(
                    s.chunks
                        .iter()
                        .map(|c| (0, c.first_block.get(), u64::from(s.head.chunk_blocks.get()))),
                )
                .chain([(
                    0,
                    s.head.journal_first_block.get(),
                    s.head.journal_blocks.get(),
                )])
                .collect();
            parts.sort_unstable();
            assert!(parts[0].1 >= HEAD_BLOCKS);
            for pair in parts.windows(2) {
                assert!(
                    pair[0].0 < pair[1].0 || pair[0].1 + pair[0].2 <= pair[1].1,
                    "{pair:?}"
                );
            }
        }
    }

    #[test]
    fn the_error_of_a_small_device_names_the_least_size() {
        let mut s = Superblock::new();
        let Err(VolumeError::TooSmall { minimum_bytes, .. }) =
            plan(&mut s, &devices(&[(8, None)]), &[None, None, None])
        else {
            panic!("8 MiB cannot hold three slices");
        };
        let enough = [Space {
            name: "d".into(),
            blocks: minimum_bytes / 4096,
            node: None,
        }];
        plan(&mut Superblock::new(), &enough, &[None, None, None]).unwrap();
    }
}
