//! The superblock: the parts of a volume. Each device has two copies, written in turn. Of all copies with a correct checksum the
//! newest counts, so a torn write costs only the change that it carried, and the loss of a device costs no change.

use std::collections::HashSet;

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::PAGE_BYTES;
use crate::label::VERSION;
use crate::record::{INO_SLICE_BITS, RECORD_VERSION};

/// First bytes of a superblock copy.
pub const SUPERBLOCK_MAGIC: [u8; 8] = *b"JERISUPR";
/// Maximum number of devices of a volume.
pub const DEVICES_MAX: usize = 64;
/// Maximum number of slices of a volume.
pub const SLICES_MAX: usize = 256;
const _: () = assert!(SLICES_MAX <= 1 << INO_SLICE_BITS);
/// Maximum number of regions of all slices together.
pub const REGIONS_MAX: usize = 1024;
/// Maximum number of chunks of the metadata region.
pub const CHUNKS_MAX: usize = 4096;
/// Greatest sequence. No volume gets there, and greater ones would leave none for the next write.
pub const SEQUENCE_MAX: u64 = 1 << 62;
/// Smallest and largest size of a container, in blocks. A container's size is a power of two.
pub const CONTAINER_BLOCKS: std::ops::RangeInclusive<u32> = 256..=16384;
/// Largest size of a chunk of the metadata region, in blocks.
pub const CHUNK_BLOCKS_MAX: u32 = 16384;
/// Smallest and largest size of the journal, in blocks.
pub const JOURNAL_BLOCKS: std::ops::RangeInclusive<u32> = 64..=1 << 14;
/// Value of `ChunkEntry::position`: taken from a slice but not yet part of the metadata region.
pub const CHUNK_SPARE: u32 = u32::MAX;
/// Value of `ChunkEntry::slice_first`: made by format, not from the space of the slice.
pub const CHUNK_BY_FORMAT: u64 = u64::MAX;
/// Value of `DeviceEntry::node` and `SliceEntry::node`: the node is unknown.
pub const NO_NODE: u32 = u32::MAX;
/// Bit of `SuperblockHead::flags`: not cleanly unmounted, or mounted now.
pub const FLAG_DIRTY: u32 = 1;
/// Bit of `SuperblockHead::flags`: the files that serve as devices have all their space allocated, and keep it.
pub const FLAG_PREALLOCATED: u32 = 2;
/// Bit of `SuperblockHead::incompatible`: the data of files has checksums, in table `sums`, and extents have `record::EXTENT_CHECKSUMS`.
pub const INCOMPATIBLE_CHECKSUMS: u32 = 1;
/// The bits of `SuperblockHead::incompatible` that this version knows.
const INCOMPATIBLE_KNOWN: u32 = INCOMPATIBLE_CHECKSUMS;

/// Offset of the device table in a copy.
pub const DEVICES_AT: usize = 4096;
/// Offset of the slice table in a copy.
pub const SLICES_AT: usize = DEVICES_AT + DEVICES_MAX * size_of::<DeviceEntry>();
/// Offset of the region table in a copy.
pub const REGIONS_AT: usize = SLICES_AT + SLICES_MAX * size_of::<SliceEntry>();
/// Offset of the chunk table in a copy.
pub const CHUNKS_AT: usize = REGIONS_AT + REGIONS_MAX * size_of::<RegionEntry>();
/// Size of a copy in bytes.
pub const COPY_BYTES: usize = CHUNKS_AT + CHUNKS_MAX * size_of::<ChunkEntry>();
/// Size of a copy in blocks.
pub const COPY_BLOCKS: u64 = COPY_BYTES as u64 / PAGE_BYTES;
/// First block of each copy on each device.
pub const COPY_FIRST_BLOCK: [u64; 2] = [1, 1 + COPY_BLOCKS];
/// Blocks at the start of each device: label and both copies.
pub const HEAD_BLOCKS: u64 = 1 + 2 * COPY_BLOCKS;
const _: () = assert!(COPY_BYTES.is_multiple_of(PAGE_BYTES as usize));
const _: () = assert!(COPY_BLOCKS == 37);

/// The first block of a copy.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct SuperblockHead {
    /// `SUPERBLOCK_MAGIC`.
    pub magic: [u8; 8],
    /// `label::VERSION`.
    pub version: U32,
    /// crc32c of the whole copy with this field zero.
    pub crc: U32,
    /// Grows by one with each write. The greater of two valid copies counts.
    pub sequence: U64,
    /// Id of the volume.
    pub volume_uuid: [u8; 16],
    /// Key of the hash of file names.
    pub hash_seed: [u8; 16],
    /// `FLAG_DIRTY`, `FLAG_PREALLOCATED`. A reader refuses other bits.
    pub flags: U32,
    /// Blocks of a container.
    pub container_blocks: U32,
    /// Blocks of a chunk of the metadata region.
    pub chunk_blocks: U32,
    /// Entries of the device table.
    pub devices: U16,
    /// Entries of the slice table.
    pub slices: U16,
    /// Entries of the region table.
    pub regions: U16,
    /// Zero.
    pub reserved0: U16,
    /// Entries of the chunk table.
    pub chunks: U32,
    /// Zero.
    pub reserved1: U64,
    /// Time of the format, in seconds since the epoch.
    pub created_s: U64,
    /// The host and process that have the volume mounted while `FLAG_DIRTY` is set.
    pub owner: OwnerRecord,
    /// Zero.
    pub reserved2: [u8; 16],
    /// `RECORD_VERSION`.
    pub records: U32,
    /// Features without which the volume cannot be read: `INCOMPATIBLE_CHECKSUMS`. A reader refuses other bits.
    pub incompatible: U32,
    /// Features without which the volume cannot be changed: none yet. A version that does not know a bit opens the volume only
    /// for reading.
    pub read_only: U32,
    /// Features that a version may ignore: none yet. It keeps the bits.
    pub compatible: U32,
    /// Zero.
    pub reserved: [u8; 3856],
}
const _: () = assert!(size_of::<SuperblockHead>() == 4096);

/// The host and process that mounted the volume for writing. Detects a mount on another machine, which a local lock cannot
/// detect.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct OwnerRecord {
    /// Boot id of the running kernel, which changes with every boot. Zero: not mounted.
    pub boot_id: [u8; 16],
    /// Hash of the machine's identity and `hash_seed`; 0 when it has no identity.
    pub machine: U64,
    /// Start time of the process, in ticks since boot.
    pub started: U64,
    /// Id of the process.
    pub pid: U32,
    /// Length of the name in `host`.
    pub host_bytes: U16,
    /// Zero.
    pub reserved0: U16,
    /// Name of the machine, for messages and for machines without an identity.
    pub host: [u8; 72],
}
const _: () = assert!(size_of::<OwnerRecord>() == 112);

/// A device of the volume.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DeviceEntry {
    /// Id in the device's label.
    pub uuid: [u8; 16],
    /// Blocks of the device that the volume uses.
    pub blocks: U64,
    /// Node of the hardware at the time of the format, or `NO_NODE`.
    pub node: U32,
    /// Length of the path in `path`.
    pub path_bytes: U16,
    /// Zero.
    pub reserved: U16,
    /// Absolute path of the device at the time of the format: a hint.
    pub path: [u8; 224],
}
const _: () = assert!(size_of::<DeviceEntry>() == 256);

/// A slice.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct SliceEntry {
    /// Capacity: the sum over its regions.
    pub blocks: U64,
    /// Home node, or `NO_NODE`.
    pub node: U32,
    /// Index of the first region in the region table.
    pub first_region: U16,
    /// Number of regions from there on, in the order of the slice's blocks.
    pub regions: U16,
    /// First block of the slice's journal, on the device of its first region. 0: the slice has no journal and no metadata store; its
    /// metadata are in the store of slice 0.
    pub journal_first_block: U64,
    /// Blocks of the journal.
    pub journal_blocks: U32,
    /// Length of the metadata store in blocks, as set by redb.
    pub store_blocks: U32,
}
const _: () = assert!(size_of::<SliceEntry>() == 32);

/// A range of a device that belongs to a slice.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct RegionEntry {
    /// First block on the device.
    pub first_block: U64,
    /// Number of blocks.
    pub blocks: U64,
    /// Index of the device.
    pub device: U16,
    /// Zero.
    pub reserved: [u8; 6],
}
const _: () = assert!(size_of::<RegionEntry>() == 24);

/// A part of the metadata region.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct ChunkEntry {
    /// First block on the device.
    pub first_block: U64,
    /// Position in the metadata region in units of `chunk_blocks`, or `CHUNK_SPARE`.
    pub position: U32,
    /// Index of the device.
    pub device: U16,
    /// Slice that provided the chunk, or for which format made it. Its metadata store has the chunk, or if it has no store, that of
    /// slice 0.
    pub slice: U16,
    /// First block within the slice, or `CHUNK_BY_FORMAT`.
    pub slice_first: U64,
}
const _: () = assert!(size_of::<ChunkEntry>() == 24);

/// A superblock in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Fixed fields. `encode` sets the counts and the checksum.
    pub head: Box<SuperblockHead>,
    /// Device table.
    pub devices: Vec<DeviceEntry>,
    /// Slice table.
    pub slices: Vec<SliceEntry>,
    /// Region table.
    pub regions: Vec<RegionEntry>,
    /// Chunk table.
    pub chunks: Vec<ChunkEntry>,
}

/// Why a copy of the superblock cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SuperblockError {
    /// The block has no superblock.
    #[error("no superblock found")]
    Magic,
    /// The copy has this newer version.
    #[error("it has version {0}")]
    Newer(u32),
    /// The copy has this older version.
    #[error("it has version {0}")]
    Older(u32),
    /// The copy is torn or damaged.
    #[error("its checksum is wrong")]
    Checksum,
    /// The records of the metadata have another version than `RECORD_VERSION`.
    #[error(
        "its metadata records have version {0}, and this version of jericho reads only version {RECORD_VERSION}; to go on, copy the \
         files with the version of jericho that formatted the volume, and format it again"
    )]
    Records(u32),
    /// The volume has features without which it cannot be read, and this version does not know these bits of them.
    #[error(
        "it has features ({0:#x}) that this version of jericho does not know; use a newer jericho"
    )]
    Features(u32),
    /// The checksum is right, but a field contradicts another one. Holds a description.
    #[error("{0}")]
    Inconsistent(String),
}

impl SuperblockHead {
    /// Returns whether the data of files has checksums.
    pub fn has_checksums(&self) -> bool {
        self.incompatible.get() & INCOMPATIBLE_CHECKSUMS != 0
    }

    /// Returns the features without which the volume cannot be changed and which this version does not know.
    pub fn unknown_read_only(&self) -> u32 {
        self.read_only.get()
    }

    /// Gives the data of files checksums, when the volume is formatted.
    pub fn set_checksums(&mut self) {
        self.incompatible |= INCOMPATIBLE_CHECKSUMS;
    }
}

impl Superblock {
    /// Returns an empty superblock with magic and version.
    pub fn new() -> Superblock {
        let mut head = Box::new(SuperblockHead::new_zeroed());
        head.magic = SUPERBLOCK_MAGIC;
        head.version = U32::new(VERSION);
        head.records = U32::new(u32::from(RECORD_VERSION));
        Superblock {
            head,
            devices: vec![],
            slices: vec![],
            regions: vec![],
            chunks: vec![],
        }
    }

    /// Returns the bytes of a copy. The caller ensures that no table exceeds its maximum.
    pub fn encode(&self) -> Vec<u8> {
        let mut head = self.head.clone();
        head.devices = U16::new(self.devices.len() as u16);
        head.slices = U16::new(self.slices.len() as u16);
        head.regions = U16::new(self.regions.len() as u16);
        head.chunks = U32::new(self.chunks.len() as u32);
        head.crc = U32::new(0);
        let mut bytes = vec![0; COPY_BYTES];
        bytes[..DEVICES_AT].copy_from_slice(head.as_bytes());
        put(&mut bytes[DEVICES_AT..SLICES_AT], self.devices.as_bytes());
        put(&mut bytes[SLICES_AT..REGIONS_AT], self.slices.as_bytes());
        put(&mut bytes[REGIONS_AT..CHUNKS_AT], self.regions.as_bytes());
        put(&mut bytes[CHUNKS_AT..], self.chunks.as_bytes());
        let crc = crc32c::crc32c(&bytes);
        bytes[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Decodes a copy and checks that its tables are consistent.
    pub fn decode(bytes: &[u8]) -> Result<Superblock, SuperblockError> {
        let Ok((head, _)) = SuperblockHead::read_from_prefix(bytes) else {
            return Err(SuperblockError::Magic);
        };
        if head.magic != SUPERBLOCK_MAGIC {
            return Err(SuperblockError::Magic);
        }
        if head.version.get() > VERSION {
            return Err(SuperblockError::Newer(head.version.get()));
        }
        if bytes.len() < COPY_BYTES {
            return Err(SuperblockError::Checksum);
        }
        let mut crc = crc32c::crc32c(&bytes[..CRC_AT]);
        crc = crc32c::crc32c_append(crc, &[0; 4]);
        crc = crc32c::crc32c_append(crc, &bytes[CRC_AT + 4..COPY_BYTES]);
        if crc != head.crc.get() {
            return Err(SuperblockError::Checksum);
        }
        if head.version.get() < VERSION {
            return Err(SuperblockError::Older(head.version.get()));
        }
        // Volumes from before this field have zero, and version 1.
        if head.records.get() != u32::from(RECORD_VERSION) {
            return Err(SuperblockError::Records(head.records.get().max(1)));
        }
        let unknown = head.incompatible.get() & !INCOMPATIBLE_KNOWN;
        if unknown != 0 {
            return Err(SuperblockError::Features(unknown));
        }
        let superblock = Superblock {
            devices: get(
                &bytes[DEVICES_AT..SLICES_AT],
                head.devices.get().into(),
                "devices",
            )?,
            slices: get(
                &bytes[SLICES_AT..REGIONS_AT],
                head.slices.get().into(),
                "slices",
            )?,
            regions: get(
                &bytes[REGIONS_AT..CHUNKS_AT],
                head.regions.get().into(),
                "regions",
            )?,
            chunks: get(&bytes[CHUNKS_AT..], head.chunks.get() as usize, "chunks")?,
            head: Box::new(head),
        };
        superblock.validate()?;
        Ok(superblock)
    }

    /// Returns the number of metadata stores: one for each slice, or one for all.
    pub fn stores(&self) -> usize {
        let has_journal = |slice: &SliceEntry| slice.journal_blocks.get() > 0;
        match self.slices.get(1).is_some_and(has_journal) {
            true => self.slices.len(),
            false => 1,
        }
    }

    /// Returns the metadata store that has a chunk.
    pub fn store_of(&self, chunk: &ChunkEntry) -> usize {
        match self.stores() {
            1 => 0,
            _ => chunk.slice.get().into(),
        }
    }

    /// Returns the regions of a slice, in order. The superblock was validated.
    pub fn regions_of(&self, slice: &SliceEntry) -> &[RegionEntry] {
        let first = usize::from(slice.first_region.get());
        &self.regions[first..first + usize::from(slice.regions.get())]
    }

    /// Returns the device on which a slice has its journal and its first blocks.
    pub fn first_device_of(&self, slice: &SliceEntry) -> Option<u16> {
        let first = self.regions.get(usize::from(slice.first_region.get()));
        let region = first.filter(|_| slice.regions.get() > 0)?;
        Some(region.device.get())
    }

    /// Refuses a superblock that names blocks outside of a device, names blocks twice, or makes its reader use more memory than a
    /// volume can need.
    fn validate(&self) -> Result<(), SuperblockError> {
        self.validate_head()?;
        self.validate_slices()?;
        self.validate_journals()?;
        self.validate_chunks()?;
        let chunk_blocks = u64::from(self.head.chunk_blocks.get());
        let chunk = |c: &ChunkEntry| (c.device.get(), c.first_block.get(), chunk_blocks);
        let made_by_format = |c: &&ChunkEntry| c.slice_first.get() == CHUNK_BY_FORMAT;
        let regions = self
            .regions
            .iter()
            .map(|r| (r.device.get(), r.first_block.get(), r.blocks.get()));
        // Chunks of slices lie in regions, so they are excluded here.
        let chunks = self.chunks.iter().filter(made_by_format).map(chunk);
        let journals = self.slices[..self.stores()].iter().filter_map(|slice| {
            let device = self.first_device_of(slice)?;
            Some((
                device,
                slice.journal_first_block.get(),
                slice.journal_blocks.get().into(),
            ))
        });
        let heads = (0..self.devices.len()).map(|device| (device as u16, 0, HEAD_BLOCKS));
        disjoint(chunks.chain(regions).chain(journals).chain(heads).collect())?;
        disjoint(self.chunks.iter().map(chunk).collect())
    }

    fn validate_head(&self) -> Result<(), SuperblockError> {
        let (container_blocks, chunk_blocks) = (
            self.head.container_blocks.get(),
            self.head.chunk_blocks.get(),
        );
        if !CONTAINER_BLOCKS.contains(&container_blocks) || !container_blocks.is_power_of_two() {
            return wrong(format!("a container of {container_blocks} blocks"));
        }
        if chunk_blocks == 0 || chunk_blocks > CHUNK_BLOCKS_MAX {
            return wrong(format!("a chunk of {chunk_blocks} blocks"));
        }
        let flags = self.head.flags.get();
        if flags & !(FLAG_DIRTY | FLAG_PREALLOCATED) != 0 {
            return wrong(format!("flags of {flags:#x}"));
        }
        let sequence = self.head.sequence.get();
        if sequence > SEQUENCE_MAX {
            return wrong(format!("a sequence of {sequence}"));
        }
        if self.devices.is_empty() || self.slices.is_empty() {
            return wrong("no device or no slice".into());
        }
        if let Some(index) = self
            .devices
            .iter()
            .position(|d| d.blocks.get() < HEAD_BLOCKS)
        {
            return wrong(format!("device {index} is too small for a superblock"));
        }
        let mut uuids = HashSet::new();
        if let Some(index) = self.devices.iter().position(|d| !uuids.insert(d.uuid)) {
            return wrong(format!("device {index} is in the table twice"));
        }
        Ok(())
    }

    /// Refuses journals that are not where they can be. Only slice 0 has one, or each slice has.
    fn validate_journals(&self) -> Result<(), SuperblockError> {
        let stores = self.stores();
        for (index, slice) in self.slices.iter().enumerate() {
            let (first, blocks) = (slice.journal_first_block.get(), slice.journal_blocks.get());
            let device = self.first_device_of(slice);
            let is_right = match index < stores {
                true => {
                    JOURNAL_BLOCKS.contains(&blocks)
                        && device.is_some_and(|device| self.has(device, first, blocks.into()))
                }
                false => (first, blocks, slice.store_blocks.get()) == (0, 0, 0),
            };
            if !is_right {
                return wrong(format!(
                    "slice {index} has a journal of {blocks} blocks at block {first}"
                ));
            }
        }
        Ok(())
    }

    /// Returns whether a device has these blocks.
    fn has(&self, device: u16, first: u64, blocks: u64) -> bool {
        let device = self.devices.get(usize::from(device));
        let end = first.checked_add(blocks);
        device.is_some_and(|d| end.is_some_and(|end| end <= d.blocks.get()))
    }

    fn validate_slices(&self) -> Result<(), SuperblockError> {
        for (index, region) in self.regions.iter().enumerate() {
            let (first, blocks) = (region.first_block.get(), region.blocks.get());
            if !self.has(region.device.get(), first, blocks) {
                return wrong(format!("region {index} ends beyond its device"));
            }
        }
        let mut taken = vec![false; self.regions.len()];
        for (index, slice) in self.slices.iter().enumerate() {
            let first = usize::from(slice.first_region.get());
            let range = first..first + usize::from(slice.regions.get());
            let Some(regions) = self.regions.get(range.clone()) else {
                return wrong(format!("slice {index} has regions that do not exist"));
            };
            if taken[range.clone()].contains(&true) {
                return wrong(format!("slice {index} has regions of another slice"));
            }
            taken[range].fill(true);
            let mut blocks = regions.iter().map(|r| r.blocks.get());
            if blocks.try_fold(0u64, u64::checked_add) != Some(slice.blocks.get()) {
                return wrong(format!("the regions of slice {index} do not add up"));
            }
        }
        Ok(())
    }

    fn validate_chunks(&self) -> Result<(), SuperblockError> {
        let blocks = u64::from(self.head.chunk_blocks.get());
        let mut positions = HashSet::new();
        for (index, chunk) in self.chunks.iter().enumerate() {
            let position = chunk.position.get();
            if position != CHUNK_SPARE && !positions.insert((self.store_of(chunk), position)) {
                return wrong(format!("two chunks are at position {position}"));
            }
            let (device, first, slice) = (
                chunk.device.get(),
                chunk.first_block.get(),
                chunk.slice.get(),
            );
            if !self.has(device, first, blocks) {
                return wrong(format!("chunk {index} ends beyond its device"));
            }
            let Some(entry) = self.slices.get(usize::from(slice)) else {
                return wrong(format!("chunk {index} is of a slice that does not exist"));
            };
            if chunk.slice_first.get() == CHUNK_BY_FORMAT {
                continue;
            }
            let place = self.place(entry, chunk.slice_first.get(), blocks);
            if place != Some((device, first)) {
                return wrong(format!("chunk {index} is not where slice {slice} has it"));
            }
        }
        Ok(())
    }

    /// Returns the device and block of a range of a slice, if one region contains it. The regions were validated.
    fn place(&self, slice: &SliceEntry, first: u64, blocks: u64) -> Option<(u16, u64)> {
        let mut skip = first;
        for region in self.regions_of(slice) {
            match skip.checked_sub(region.blocks.get()) {
                Some(rest) => skip = rest,
                None => {
                    let fits = skip.checked_add(blocks)? <= region.blocks.get();
                    return fits.then(|| (region.device.get(), region.first_block.get() + skip));
                }
            }
        }
        None
    }
}

fn wrong<T>(what: String) -> Result<T, SuperblockError> {
    Err(SuperblockError::Inconsistent(what))
}

/// Refuses parts (device, first block, blocks) that overlap. Each part ends on its device.
fn disjoint(mut parts: Vec<(u16, u64, u64)>) -> Result<(), SuperblockError> {
    parts.sort_unstable();
    let crossing =
        |pair: &[(u16, u64, u64)]| pair[0].0 == pair[1].0 && pair[0].1 + pair[0].2 > pair[1].1;
    match parts.windows(2).find(|pair| crossing(pair)) {
        Some(pair) => wrong(format!("two parts of device {} overlap", pair[0].0)),
        None => Ok(()),
    }
}

impl Default for Superblock {
    fn default() -> Self {
        Superblock::new()
    }
}

const CRC_AT: usize = std::mem::offset_of!(SuperblockHead, crc);

fn put(area: &mut [u8], table: &[u8]) {
    area[..table.len()].copy_from_slice(table);
}

fn get<T: FromBytes>(area: &[u8], count: usize, name: &str) -> Result<Vec<T>, SuperblockError> {
    let size = size_of::<T>();
    let Some(used) = count.checked_mul(size).and_then(|bytes| area.get(..bytes)) else {
        return Err(SuperblockError::Inconsistent(format!(
            "too many {name}: {count}"
        )));
    };
    Ok(used
        .chunks_exact(size)
        .filter_map(|entry| T::read_from_bytes(entry).ok())
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Superblock {
        let mut superblock = Superblock::new();
        superblock.head.container_blocks = U32::new(256);
        superblock.head.chunk_blocks = U32::new(16);
        let mut device = DeviceEntry::new_zeroed();
        device.blocks = U64::new(1000);
        superblock.devices.push(device);
        superblock.slices.push(SliceEntry {
            blocks: U64::new(500),
            regions: U16::new(1),
            journal_first_block: U64::new(100),
            journal_blocks: U32::new(64),
            ..SliceEntry::new_zeroed()
        });
        superblock.regions.push(RegionEntry {
            first_block: U64::new(500),
            blocks: U64::new(500),
            ..RegionEntry::new_zeroed()
        });
        superblock
    }

    #[test]
    fn an_encoded_superblock_can_be_decoded() {
        let superblock = sample();
        let decoded = Superblock::decode(&superblock.encode()).unwrap();
        assert_eq!(decoded.encode(), superblock.encode());
        assert_eq!(decoded.regions, superblock.regions);
    }

    #[test]
    fn a_torn_copy_is_refused() {
        let old = sample().encode();
        let mut superblock = sample();
        superblock.head.sequence = U64::new(1);
        superblock.chunks.push(ChunkEntry {
            first_block: U64::new(200),
            slice_first: U64::new(CHUNK_BY_FORMAT),
            ..ChunkEntry::new_zeroed()
        });
        let new = superblock.encode();
        for blocks in 1..COPY_BLOCKS as usize {
            let mut torn = new.clone();
            torn[blocks * 4096..].copy_from_slice(&old[blocks * 4096..]);
            if torn != new {
                assert_eq!(Superblock::decode(&torn), Err(SuperblockError::Checksum));
            }
        }
    }

    #[test]
    fn records_of_another_version_are_refused_by_name() {
        let mut superblock = sample();
        for (records, shown) in [(0, 1), (1, 1), (4, 4), (6, 6)] {
            superblock.head.records = U32::new(records);
            let error = Superblock::decode(&superblock.encode()).unwrap_err();
            assert_eq!(error, SuperblockError::Records(shown));
            let text = error.to_string();
            assert!(text.contains(&format!("have version {shown}")), "{text}");
            assert!(text.contains("reads only version 5"), "{text}");
        }
    }

    #[test]
    fn features_without_which_a_volume_cannot_be_read_are_refused_and_others_are_kept() {
        let mut superblock = sample();
        superblock.head.set_checksums();
        superblock.head.read_only = U32::new(6);
        superblock.head.compatible = U32::new(8);
        let decoded = Superblock::decode(&superblock.encode()).unwrap();
        assert!(decoded.head.has_checksums());
        assert_eq!(decoded.head.unknown_read_only(), 6);
        assert_eq!(decoded.head.compatible.get(), 8);
        superblock.head.incompatible |= 16;
        let error = Superblock::decode(&superblock.encode()).unwrap_err();
        assert_eq!(error, SuperblockError::Features(16));
    }

    #[test]
    fn regions_that_overlap_are_refused() {
        let mut superblock = sample();
        superblock.regions.push(RegionEntry {
            first_block: U64::new(999),
            ..superblock.regions[0]
        });
        superblock.regions[1].blocks = U64::new(1);
        let result = Superblock::decode(&superblock.encode());
        assert!(
            matches!(result, Err(SuperblockError::Inconsistent(_))),
            "{result:?}"
        );
    }

    #[test]
    fn a_region_beyond_its_device_is_refused() {
        let mut superblock = sample();
        superblock.regions[0].first_block = U64::new(501);
        let result = Superblock::decode(&superblock.encode());
        assert!(
            matches!(result, Err(SuperblockError::Inconsistent(_))),
            "{result:?}"
        );
    }

    #[track_caller]
    fn is_refused(why: &str, change: impl FnOnce(&mut Superblock)) {
        let mut superblock = sample();
        change(&mut superblock);
        match Superblock::decode(&superblock.encode()) {
            Err(SuperblockError::Inconsistent(text)) => assert!(text.contains(why), "{text}"),
            other => panic!("{other:?} instead of {why}"),
        }
    }

    #[test]
    fn impossible_values_are_refused_by_name() {
        is_refused("container of 1073741824", |s| {
            s.head.container_blocks = U32::new(1 << 30)
        });
        is_refused("container of 320", |s| {
            s.head.container_blocks = U32::new(320)
        });
        is_refused("chunk of 0", |s| s.head.chunk_blocks = U32::new(0));
        is_refused("chunk of 4294967295", |s| {
            s.head.chunk_blocks = U32::new(u32::MAX)
        });
        is_refused("flags of 0x4", |s| s.head.flags = U32::new(4));
        is_refused("sequence of 18446744073709551615", |s| {
            s.head.sequence = U64::new(u64::MAX)
        });
        is_refused("device 1 is in the table twice", |s| {
            s.devices.push(s.devices[0].clone())
        });
        is_refused("slice 1 has regions of another", |s| {
            s.slices.push(s.slices[0])
        });
        is_refused("do not add up", |s| {
            s.devices[0].blocks = U64::new(u64::MAX);
            s.regions[0].blocks = U64::new(u64::MAX - 500);
            s.regions.push(s.regions[0]);
            s.slices[0].regions = U16::new(2);
        });
    }

    /// A superblock with two slices, of which each has a journal.
    fn two_stores() -> Superblock {
        let mut superblock = sample();
        superblock.regions[0].blocks = U64::new(250);
        superblock.slices[0].blocks = U64::new(250);
        superblock.regions.push(RegionEntry {
            first_block: U64::new(750),
            ..superblock.regions[0]
        });
        superblock.slices.push(SliceEntry {
            first_region: U16::new(1),
            journal_first_block: U64::new(164),
            ..superblock.slices[0]
        });
        superblock
    }

    #[test]
    fn each_slice_has_a_store_or_one_has_all() {
        let decode = |s: &Superblock| Superblock::decode(&s.encode());
        let mut superblock = two_stores();
        assert_eq!(decode(&superblock).unwrap().stores(), 2);
        superblock.slices[1].journal_first_block = U64::new(163);
        assert!(decode(&superblock).is_err(), "two journals overlap");
        superblock.slices[1].journal_blocks = U32::new(0);
        assert!(decode(&superblock).is_err(), "a journal without blocks");
        superblock.slices[1].journal_first_block = U64::new(0);
        assert_eq!(decode(&superblock).unwrap().stores(), 1);
        superblock.slices[1].store_blocks = U32::new(1);
        assert!(decode(&superblock).is_err(), "a store without a journal");
        let mut superblock = two_stores();
        superblock.slices[0].journal_blocks = U32::new(0);
        assert!(decode(&superblock).is_err(), "only slice 1 has a journal");
        let mut superblock = two_stores();
        superblock.slices[1].journal_first_block = U64::new(10);
        assert!(decode(&superblock).is_err(), "a journal in the superblock");
    }

    #[test]
    fn positions_of_chunks_are_those_of_their_store() {
        let chunk = |slice, first_block| ChunkEntry {
            slice: U16::new(slice),
            first_block: U64::new(first_block),
            slice_first: U64::new(CHUNK_BY_FORMAT),
            ..ChunkEntry::new_zeroed()
        };
        let mut superblock = two_stores();
        superblock.chunks = vec![chunk(0, 230), chunk(1, 246)];
        Superblock::decode(&superblock.encode()).unwrap();
        superblock.chunks[1].slice = U16::new(0);
        assert!(Superblock::decode(&superblock.encode()).is_err());
    }

    #[test]
    fn a_chunk_must_be_where_its_slice_has_it() {
        let chunk = |slice_first, first_block| ChunkEntry {
            slice: U16::new(0),
            slice_first: U64::new(slice_first),
            first_block: U64::new(first_block),
            position: U32::new(CHUNK_SPARE),
            ..ChunkEntry::new_zeroed()
        };
        let mut superblock = sample();
        superblock.chunks.push(chunk(100, 600));
        Superblock::decode(&superblock.encode()).unwrap();
        is_refused("chunk 0 is not where slice 0", |s| {
            s.chunks.push(chunk(101, 600))
        });
        is_refused("chunk 0 is not where slice 0", |s| {
            s.chunks.push(chunk(490, 984))
        });
        is_refused("chunk 0 is not where slice 0", |s| {
            s.chunks.push(chunk(u64::MAX - 1, 600))
        });
        is_refused("overlap", |s| {
            s.chunks.extend([chunk(100, 600), chunk(110, 610)])
        });
    }
}
