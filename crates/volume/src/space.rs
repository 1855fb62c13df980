//! The space of the slices: blocks of a slice, and the ranges of devices in which they are.

use jericho_format::superblock::{NO_NODE, Superblock};

/// Index of a slice in the volume.
pub type SliceId = u16;

/// A contiguous range of blocks of one slice, numbered from the slice's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Blocks {
    /// Slice that contains the blocks.
    pub slice: SliceId,
    /// First block within the slice.
    pub first: u64,
    /// Number of blocks.
    pub count: u32,
}

/// A contiguous range of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRun {
    /// Index in `Volume::devices`.
    pub device: u16,
    /// First byte of the range.
    pub offset_bytes: u64,
    /// Length in blocks.
    pub blocks: u32,
}

/// A region of a slice: a contiguous range of its blocks, and the device that holds it.
#[derive(Clone, Copy, Debug)]
pub struct SliceRegion {
    /// First block within the slice.
    pub slice_first: u64,
    /// Index of the device.
    pub device: u16,
    /// First block on the device.
    pub device_first: u64,
    /// Number of blocks.
    pub blocks: u64,
}

/// The space of one slice.
#[derive(Clone, Debug)]
pub struct SliceSpace {
    /// Index of the slice.
    pub id: SliceId,
    /// Home node that format planned for the slice, if any. Only a hint: each mount chooses the home nodes itself.
    pub node: Option<u32>,
    /// Capacity in blocks.
    pub blocks: u64,
    pub(crate) regions: Vec<SliceRegion>,
}

impl SliceSpace {
    /// Returns the index of the device that holds the slice's first block.
    pub fn device(&self) -> u16 {
        self.regions.first().map_or(0, |r| r.device)
    }

    /// Returns the regions of the slice, in order.
    pub fn regions(&self) -> &[SliceRegion] {
        &self.regions
    }
}

/// Returns the space of each slice of a volume.
pub(crate) fn slices_of(superblock: &Superblock) -> Vec<SliceSpace> {
    let of = |(id, slice): (usize, &jericho_format::superblock::SliceEntry)| {
        let mut slice_first = 0;
        let regions = (superblock.regions_of(slice).iter())
            .map(|region| {
                let here = SliceRegion {
                    slice_first,
                    device: region.device.get(),
                    device_first: region.first_block.get(),
                    blocks: region.blocks.get(),
                };
                slice_first += here.blocks;
                here
            })
            .collect();
        let node = slice.node.get();
        SliceSpace {
            id: id as SliceId,
            node: (node != NO_NODE).then_some(node),
            blocks: slice.blocks.get(),
            regions,
        }
    };
    superblock.slices.iter().enumerate().map(of).collect()
}
