//! Decides which copy of the superblock counts for what.
//!
//! A device that misses a change keeps an older superblock. A later mount in which the devices that have the change are missing may write
//! greater sequences than theirs. So a copy may lack changes whatever its sequence. Each part comes from a device that has all its changes:
//!
//! - the devices and the slices that the volume has: from the first device, without which there is no mount
//! - the flags and the owner: from the first device, too. Otherwise a mount without a device that is ahead would not be seen with it
//! - a slice's entry, its regions and the chunks of its store: from the device of its first region
//! - the blocks of a device: from the same copies as the slices with a region on it
//!
//! `Superblocks::update` fails if a device does not take a change that it must have.

use jericho_format::superblock::{
    CHUNKS_MAX, ChunkEntry, REGIONS_MAX, RegionEntry, SliceEntry, Superblock, SuperblockError,
};
use zerocopy::byteorder::little_endian::{U16, U64};

/// Returns the superblock of a volume. `first` is the newest usable copy on the first device. `copies` has the newest usable copy on each
/// device, by index.
pub(crate) fn merge(
    first: &Superblock,
    copies: &[Option<Superblock>],
) -> Result<Superblock, SuperblockError> {
    let copies = Copies { first, copies };
    let mut merged = Superblock {
        head: first.head.clone(),
        devices: first.devices.clone(),
        slices: vec![],
        regions: vec![],
        chunks: vec![],
    };
    merged.head.sequence = copies.latest().head.sequence;
    let stores = first.stores();
    for index in 0..first.slices.len() {
        let counting = copies.counting(index);
        let regions = counting.regions_of(&counting.slices[index]);
        merged.slices.push(SliceEntry {
            first_region: U16::new(merged.regions.len() as u16),
            ..counting.slices[index]
        });
        merged.regions.extend_from_slice(regions);
        if index < stores {
            let own = |chunk: &&ChunkEntry| counting.store_of(chunk) == index;
            merged.chunks.extend(counting.chunks.iter().filter(own));
        }
    }
    for index in 0..merged.devices.len() {
        let blocks = copies.blocks_of(&merged, index);
        merged.devices[index].blocks = U64::new(blocks);
    }
    let tables = [
        ("regions", merged.regions.len(), REGIONS_MAX),
        ("chunks of metadata", merged.chunks.len(), CHUNKS_MAX),
    ];
    if let Some((what, count, most)) = tables.iter().find(|(_, count, most)| count > most) {
        return Err(SuperblockError::Inconsistent(format!(
            "the devices together name {count} {what}, and {most} is the most"
        )));
    }
    Superblock::decode(&merged.encode())
}

struct Copies<'a> {
    first: &'a Superblock,
    copies: &'a [Option<Superblock>],
}

impl<'a> Copies<'a> {
    /// Returns the copy with the greatest sequence.
    fn latest(&self) -> &'a Superblock {
        let newer = |latest: &'a Superblock, copy: &'a Superblock| match copy.head.sequence.get()
            > latest.head.sequence.get()
        {
            true => copy,
            false => latest,
        };
        self.copies.iter().flatten().fold(self.first, newer)
    }

    /// Returns the copy on a device.
    fn on(&self, device: u16) -> Option<&'a Superblock> {
        self.copies.get(usize::from(device))?.as_ref()
    }

    /// Returns the copy that counts for a slice: that of its own device. If this device is missing or has no usable copy, returns the latest
    /// copy, which most probably has all changes.
    fn counting(&self, slice: usize) -> &'a Superblock {
        let place = |copy: &Superblock| {
            let entry = copy.slices.get(slice)?;
            let region = copy.regions_of(entry).first();
            let begin = region.map(|r| (r.device.get(), r.first_block.get()));
            Some((begin, entry.journal_first_block.get()))
        };
        let own = self.first.first_device_of(&self.first.slices[slice]);
        let own = own.and_then(|device| self.on(device));
        // A copy from before the addition of the slice does not have it.
        let has_it = |copy: &&Superblock| place(copy) == place(self.first);
        let candidates = [own, Some(self.latest())];
        let counting = candidates.into_iter().flatten().find(has_it);
        counting.unwrap_or(self.first)
    }

    /// Returns how many blocks of a device the volume uses: as many as the copies say from which the slices with space on it come. So a growth
    /// that missed one of these copies can be repeated.
    fn blocks_of(&self, merged: &Superblock, device: usize) -> u64 {
        let first = &self.first.devices[device];
        let has_space = |slice: &usize| {
            let mut regions = merged.regions_of(&merged.slices[*slice]).iter();
            regions.any(|region| usize::from(region.device.get()) == device)
        };
        let blocks = |slice: usize| {
            let entry = self.counting(slice).devices.get(device)?;
            (entry.uuid == first.uuid).then_some(entry.blocks.get())
        };
        let slices = (0..merged.slices.len()).filter(has_space);
        let least = slices.filter_map(blocks).min();
        // The copies differ if slices that begin on different devices share this one.
        let end = end_of_parts(merged, device);
        least.unwrap_or(first.blocks.get()).max(end)
    }
}

/// Returns the end of the last region on a device.
fn end_of_parts(superblock: &Superblock, device: usize) -> u64 {
    let on_it = superblock
        .regions
        .iter()
        .filter(|region| usize::from(region.device.get()) == device);
    let end = |region: &RegionEntry| region.first_block.get() + region.blocks.get();
    on_it.map(end).max().unwrap_or(0)
}
