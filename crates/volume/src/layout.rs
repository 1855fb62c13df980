//! Divides the devices of a new volume: head, journals and first metadata chunks, and the slices.
//!
//! A slice is on a device of its own node if there is one. Slices on the same device share it evenly. A device without a slice
//! is added to a slice of its host, of its node if possible. Each host that has a device has a slice, so that no slice needs two hosts.
//! Each slice has its journal and its metadata store on its first device. If all devices are on one host and a slice is small, all slices share those of slice 0.
//! No I/O.

use std::collections::BTreeSet;
use std::sync::Arc;

use jericho_format::PAGE_BYTES;
use jericho_format::superblock::{
    CHUNK_BY_FORMAT, CHUNK_SPARE, CONTAINER_BLOCKS, ChunkEntry, HEAD_BLOCKS, NO_NODE, RegionEntry,
    SLICES_MAX, SliceEntry, Superblock,
};
use zerocopy::byteorder::little_endian::{U16, U32, U64};

use crate::error::VolumeError;

/// Smallest size of a slice.
const SLICE_BLOCKS_MIN: u64 = (4 << 20) / PAGE_BYTES;
/// Smallest size of a slice with a metadata store of its own, if the caller does not choose: the journal and the store take an eighth
/// of it.
const STORE_SLICE_BLOCKS_MIN: u64 = (64 << 20) / PAGE_BYTES;
/// Smallest initial size of a metadata store.
const METADATA_BLOCKS_MIN: u64 = (4 << 20) / PAGE_BYTES;
/// A store begins with a multiple of this number of chunks.
const CHUNKS_AT_A_TIME: u64 = 8;
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
    /// The other host that has the device.
    pub(crate) host: Option<Arc<str>>,
}

/// Returns the number of hosts that have devices.
pub(crate) fn hosts(devices: &[Space]) -> usize {
    let hosts: BTreeSet<_> = devices.iter().map(|device| &device.host).collect();
    hosts.len()
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

/// The blocks that a slice has before its region, for its journal and its metadata store.
#[derive(Clone, Copy, Default)]
struct Own {
    journal: u64,
    metadata: u64,
}

/// Returns the initial size of the metadata of `blocks` blocks: a 64th of them, but 16 to 256 MiB, at most an eighth of them, and
/// in any case at least 4 MiB.
fn metadata_blocks(blocks: u64) -> u64 {
    let mib = (1 << 20) / PAGE_BYTES;
    (blocks / 64)
        .clamp(16 * mib, 256 * mib)
        .min(blocks / 8)
        .max(METADATA_BLOCKS_MIN)
}

/// Returns the size of a journal for the metadata of `blocks` blocks: a 64th of them, but 8 to 64 MiB, at most a 16th of them, and in
/// any case at least 1 MiB.
fn journal_blocks(blocks: u64) -> u64 {
    let mib = (1 << 20) / PAGE_BYTES;
    (blocks / 64)
        .clamp(8 * mib, 64 * mib)
        .min(blocks / 16)
        .max(JOURNAL_BLOCKS_MIN)
}

/// Returns what each slice has for its metadata. `room` is how many blocks the slices can spare on the device of each slice. The
/// metadata are a multiple of `CHUNKS_AT_A_TIME` chunks.
fn own_blocks(blocks: &[u64], room: &[u64], chunk_blocks: u64) -> Vec<Own> {
    let own = |(blocks, room): (&u64, &u64)| {
        let journal = journal_blocks(*blocks)
            .min(room.saturating_sub(METADATA_BLOCKS_MIN))
            .max(JOURNAL_BLOCKS_MIN);
        let metadata = metadata_blocks(*blocks)
            .min(room.saturating_sub(journal))
            .max(METADATA_BLOCKS_MIN);
        // redb gets as much space at a time as eight chunks have.
        let unit = CHUNKS_AT_A_TIME * chunk_blocks;
        let metadata = (metadata / unit * unit).max(unit);
        Own { journal, metadata }
    };
    blocks.iter().zip(room).map(own).collect()
}

/// Returns the device of each slice. There are at least as many slices as hosts.
fn choose_devices(devices: &[Space], nodes: &[Option<u32>]) -> Vec<usize> {
    let mut count = vec![0usize; devices.len()];
    let mut chosen = Vec::with_capacity(nodes.len());
    let mut without: BTreeSet<_> = devices.iter().map(|device| &device.host).collect();
    for (slice, node) in nodes.iter().enumerate() {
        // The last slices go to the hosts that have none.
        let must_spread = nodes.len() - slice <= without.len();
        let may = |d: &usize| !must_spread || without.contains(&devices[*d].host);
        let own = |d: &usize| node.is_some() && devices[*d].node == *node;
        let least = |candidates: &mut dyn Iterator<Item = usize>| {
            candidates.min_by_key(|d| (count[*d], *d))
        };
        let device = least(&mut (0..devices.len()).filter(may).filter(own))
            .or_else(|| least(&mut (0..devices.len()).filter(may)))
            .unwrap_or(0);
        without.remove(&devices[device].host);
        count[device] += 1;
        chosen.push(device);
    }
    chosen
}

/// Returns the range of each device that is available to slices, as first block and blocks. Fails if a device is too small.
fn usable_ranges(
    devices: &[Space],
    device_of: &[usize],
    own: &[Own],
) -> Result<Vec<(u64, u64)>, VolumeError> {
    let mut usable = Vec::new();
    for (index, device) in devices.iter().enumerate() {
        let here = |slice: &usize| device_of[*slice] == index;
        let slices = (0..device_of.len()).filter(here).count().max(1);
        let own = (0..own.len()).filter(here).map(|slice| own[slice]);
        let head = HEAD_BLOCKS + own.map(|own| own.journal + own.metadata).sum::<u64>();
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
        let is_there = |slice: &usize| devices[device_of[*slice]].host == devices[device].host;
        let slice = (0..nodes.len())
            .filter(is_there)
            .min_by_key(|s| (node.is_none() || nodes[*s] != node, regions[*s].len(), *s))
            .unwrap_or(0);
        let (first, blocks) = usable[device];
        regions[slice].push(region(device, first, blocks));
    }
    regions
}

/// Plans slices, regions, chunks and the sizes in the head. `nodes` holds the home node of each slice. `has_stores` says whether each
/// slice has a metadata store; without it, each has one if all are large enough, or if the devices are on several hosts.
pub(crate) fn plan(
    superblock: &mut Superblock,
    devices: &[Space],
    nodes: &[Option<u32>],
    has_stores: Option<bool>,
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
    if nodes.len() < hosts(devices) {
        return Err(VolumeError::TooFewSlices {
            asked: nodes.len(),
            hosts: hosts(devices),
        });
    }
    let volume_blocks: u64 = devices.iter().map(|d| d.blocks).sum();
    let chunk_blocks = chunk_blocks(volume_blocks);
    let device_of = choose_devices(devices, nodes);
    let slices_on = |device: usize| device_of.iter().filter(|d| **d == device).count() as u64;
    let share =
        |device: &usize| devices[*device].blocks.saturating_sub(HEAD_BLOCKS) / slices_on(*device);
    let shares: Vec<u64> = device_of.iter().map(share).collect();
    let are_large = || {
        shares
            .iter()
            .all(|blocks| *blocks >= STORE_SLICE_BLOCKS_MIN)
    };
    // A store for the slices of several hosts would stop with the host that has it.
    let own = match has_stores.unwrap_or_else(|| hosts(devices) > 1 || are_large()) {
        true => {
            let room: Vec<u64> = shares
                .iter()
                .map(|b| b.saturating_sub(SLICE_BLOCKS_MIN))
                .collect();
            own_blocks(&shares, &room, chunk_blocks)
        }
        false => {
            // The slices on the device must have enough space after the head and the metadata.
            let first = device_of[0];
            let wanted = HEAD_BLOCKS + slices_on(first) * SLICE_BLOCKS_MIN;
            let room = devices[first].blocks.saturating_sub(wanted);
            own_blocks(&[volume_blocks], &[room], chunk_blocks)
        }
    };
    let usable = usable_ranges(devices, &device_of, &own)?;
    let regions = regions_of_slices(devices, nodes, &device_of, &usable);
    let sum = |regions: &[RegionEntry]| regions.iter().map(|r| r.blocks.get()).sum::<u64>();
    let smallest = regions.iter().map(|r| sum(r)).min().unwrap_or(0);
    let containers = (smallest / 16).clamp(CONTAINER_BLOCKS_MIN, CONTAINER_BLOCKS_MAX);
    let container_blocks = 1 << containers.ilog2();

    superblock.head.container_blocks = U32::new(container_blocks as u32);
    superblock.head.chunk_blocks = U32::new(chunk_blocks as u32);
    let mut next = vec![HEAD_BLOCKS; devices.len()];
    for (slice, own_regions) in regions.iter().enumerate() {
        let own = own.get(slice).copied().unwrap_or_default();
        let device = device_of[slice];
        superblock.slices.push(SliceEntry {
            blocks: U64::new(sum(own_regions)),
            node: U32::new(nodes[slice].unwrap_or(NO_NODE)),
            first_region: U16::new(superblock.regions.len() as u16),
            regions: U16::new(own_regions.len() as u16),
            journal_first_block: U64::new(if own.journal > 0 { next[device] } else { 0 }),
            journal_blocks: U32::new(own.journal as u32),
            store_blocks: U32::new(0),
        });
        superblock.regions.extend_from_slice(own_regions);
        next[device] += own.journal;
        for _ in 0..own.metadata / chunk_blocks {
            superblock.chunks.push(ChunkEntry {
                first_block: U64::new(next[device]),
                position: U32::new(CHUNK_SPARE),
                device: U16::new(device as u16),
                slice: U16::new(slice as u16),
                slice_first: U64::new(CHUNK_BY_FORMAT),
            });
            next[device] += chunk_blocks;
        }
    }
    Ok(())
}

/// Plans `slices` new slices, each with a journal and a metadata store, on a device that is the last entry of the device table.
pub(crate) fn plan_added(
    superblock: &mut Superblock,
    space: &Space,
    slices: usize,
) -> Result<(), VolumeError> {
    let device = (superblock.devices.len() - 1) as u16;
    let count = slices as u64;
    let chunk_blocks = u64::from(superblock.head.chunk_blocks.get());
    let share = space.blocks.saturating_sub(HEAD_BLOCKS) / count;
    let share = share.max(STORE_SLICE_BLOCKS_MIN);
    let own = own_blocks(&[share], &[share - SLICE_BLOCKS_MIN], chunk_blocks)[0];
    let own_blocks = own.journal + own.metadata;
    let least = HEAD_BLOCKS + count * STORE_SLICE_BLOCKS_MIN.max(own_blocks + SLICE_BLOCKS_MIN);
    if space.blocks < least {
        return Err(VolumeError::TooSmall {
            device: space.name.clone(),
            slices,
            minimum_bytes: least * PAGE_BYTES,
            size_bytes: space.blocks * PAGE_BYTES,
        });
    }
    let first = HEAD_BLOCKS + count * own_blocks;
    let blocks = (space.blocks - first) / count;
    let mut next = HEAD_BLOCKS;
    for turn in 0..count {
        let slice = superblock.slices.len() as u16;
        superblock.slices.push(SliceEntry {
            blocks: U64::new(blocks),
            node: U32::new(space.node.unwrap_or(NO_NODE)),
            first_region: U16::new(superblock.regions.len() as u16),
            regions: U16::new(1),
            journal_first_block: U64::new(next),
            journal_blocks: U32::new(own.journal as u32),
            store_blocks: U32::new(0),
        });
        superblock.regions.push(RegionEntry {
            first_block: U64::new(first + turn * blocks),
            blocks: U64::new(blocks),
            device: U16::new(device),
            reserved: [0; 6],
        });
        next += own.journal;
        for _ in 0..own.metadata / chunk_blocks {
            superblock.chunks.push(ChunkEntry {
                first_block: U64::new(next),
                position: U32::new(CHUNK_SPARE),
                device: U16::new(device),
                slice: U16::new(slice),
                slice_first: U64::new(CHUNK_BY_FORMAT),
            });
            next += chunk_blocks;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use jericho_format::superblock::DeviceEntry;
    use zerocopy::FromZeros;

    fn devices(of: &[(u64, Option<u32>)]) -> Vec<Space> {
        let space = |(mib, node): &(u64, Option<u32>)| Space {
            name: "d".into(),
            blocks: mib * 256,
            node: *node,
            host: None,
        };
        of.iter().map(space).collect()
    }

    fn planned(of: &[(u64, Option<u32>)], nodes: &[Option<u32>]) -> Superblock {
        let mut superblock = Superblock::new();
        plan(&mut superblock, &devices(of), nodes, None).unwrap();
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
    fn each_host_has_a_slice_and_no_slice_is_on_two_hosts() {
        let host = |index: usize| [None, Some("b"), Some("c")][index].map(Arc::from);
        for hosts in [
            vec![0, 1],
            vec![0, 0, 1, 1],
            vec![1, 0, 2],
            vec![2],
            vec![1, 1, 0],
        ] {
            let mut spaces = devices(&vec![(1024, None); hosts.len()]);
            for (space, index) in spaces.iter_mut().zip(&hosts) {
                (space.host, space.node) = (host(*index), Some(*index as u32));
            }
            for nodes in [
                vec![None; 4],
                vec![Some(0); 3],
                vec![Some(1), Some(0)],
                vec![None],
            ] {
                let mut s = Superblock::new();
                let planned = plan(&mut s, &spaces, &nodes, None);
                if nodes.len() < super::hosts(&spaces) {
                    assert!(matches!(planned, Err(VolumeError::TooFewSlices { .. })));
                    continue;
                }
                planned.unwrap();
                let host_of = |region: &RegionEntry| &spaces[usize::from(region.device.get())].host;
                let mut seen = BTreeSet::new();
                for slice in &s.slices {
                    let first = usize::from(slice.first_region.get());
                    let of = &s.regions[first..first + usize::from(slice.regions.get())];
                    assert!(of.iter().all(|region| host_of(region) == host_of(&of[0])));
                    seen.insert(host_of(&of[0]));
                }
                assert_eq!(seen.len(), super::hosts(&spaces));
            }
        }
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

    /// Gives the planned devices the sizes and ids that a reader expects. Returns the superblock as a reader gets it.
    fn read(mut planned: Superblock, of: &[(u64, Option<u32>)]) -> Superblock {
        for (index, (mib, _)) in of.iter().enumerate() {
            planned.devices.push(DeviceEntry {
                uuid: [index as u8; 16],
                blocks: U64::new(mib * 256),
                ..DeviceEntry::new_zeroed()
            });
        }
        // Refuses parts of a device that overlap.
        Superblock::decode(&planned.encode()).unwrap()
    }

    #[test]
    fn no_two_parts_of_a_device_overlap() {
        for (of, slices) in [(vec![(64, None)], 3), (vec![(512, None), (16, None)], 5)] {
            for has_stores in [Some(false), Some(true), None] {
                let mut planned = Superblock::new();
                let nodes = vec![None; slices];
                match plan(&mut planned, &devices(&of), &nodes, has_stores) {
                    Ok(()) => drop(read(planned, &of)),
                    Err(error) => assert_eq!((has_stores, of.len()), (Some(true), 2), "{error}"),
                }
            }
        }
    }

    #[test]
    fn large_slices_have_a_store_each_on_their_own_device() {
        let of = [(256, None), (300, None)];
        let s = read(planned(&of, &[None, None, None]), &of);
        assert_eq!(s.stores(), 3);
        for (slice, entry) in (0..).zip(&s.slices) {
            let device = s.first_device_of(entry).unwrap();
            assert_eq!(u64::from(device), slice % 2);
            let own = s
                .chunks
                .iter()
                .filter(|c| u64::from(c.slice.get()) == slice);
            assert!(own.clone().count() > 0);
            assert!(own.clone().all(|chunk| chunk.device.get() == device));
        }
        let of = [(120, None)];
        let s = read(planned(&of, &[None, None]), &of);
        assert_eq!(s.stores(), 1, "slices of 60 MiB share a store");
    }

    #[test]
    fn the_error_of_a_small_device_names_the_least_size() {
        let mut s = Superblock::new();
        let Err(VolumeError::TooSmall { minimum_bytes, .. }) =
            plan(&mut s, &devices(&[(8, None)]), &[None, None, None], None)
        else {
            panic!("8 MiB cannot hold three slices");
        };
        let enough = [Space {
            name: "d".into(),
            blocks: minimum_bytes / 4096,
            node: None,
            host: None,
        }];
        plan(&mut Superblock::new(), &enough, &[None, None, None], None).unwrap();
    }
}
