//! Adds a device with new slices to an open volume. Stores of the volume may be in use meanwhile. The volume keeps the slices with which it
//! was opened, until `Volume::take` takes the new device into use or the volume is opened again.
//!
//! The order of the durable writes makes a crash at any point leave the old volume or the new one:
//!
//! 1. If an earlier addition failed in its last step, the devices of the volume get its superblock once more: the first device may name that
//!    new device. The label of the new device becomes zeros, so its former contents are lost.
//! 2. The new device gets both copies of the new superblock, the journals and the stores of its slices, and then its label. No other device
//!    refers to it, so the volume is still the old one.
//! 3. The devices of the volume get the new superblock, whose sequence is greater than those of step 2. As soon as the first device has it,
//!    the volume is the new one.
//!
//! An interrupted addition leaves a device with a label of the volume that is not in the volume's device table.

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use jericho_format::PAGE_BYTES;
use jericho_format::label::LabelState;
use jericho_format::superblock::{
    CHUNKS_MAX, ChunkEntry, DEVICES_MAX, REGIONS_MAX, SLICES_MAX, SliceEntry, Superblock,
};
use jericho_storage::{Device, IoError, absent_device, remote_host};

use crate::error::VolumeError;
use crate::format::{Summary, device_entry};
use crate::growth::CONTAINERS_MAX;
use crate::labels::{label, path_of, read_label};
use crate::layout::{self, Space};
use crate::superblocks::Superblocks;
use crate::volume::Volume;

/// Why a device cannot be added. Unless it is `Last`, the volume is as before.
#[derive(Debug, thiserror::Error)]
pub enum AddError {
    /// The volume has one metadata store for several slices.
    #[error(
        "the slices of the volume share one metadata store, because one of them had less than 64 MiB when the volume was \
         formatted, and cannot be joined by slices with their own; make a new volume and copy the files"
    )]
    SharedStore,
    /// The volume is open for reading only.
    #[error("the volume is mounted read-only; mount it for writing first")]
    ReadOnly,
    /// The volume takes no more changes.
    #[error("the volume takes no changes: {0}")]
    Failed(String),
    /// The device has the label of a device of this volume.
    #[error(
        "it has the label of device {0} of this volume, so it is this device or a copy of it; if it is a copy that you do not need, add \
         --force"
    )]
    Own(usize),
    /// The device has a label of this volume, but is not in the device table.
    #[error(
        "it was to become a device of this volume, and that addition did not end; if it holds nothing else, add --force"
    )]
    Interrupted,
    /// A device of the volume is missing.
    #[error("{0} is missing; a device can be added when all others are there")]
    Incomplete(Arc<str>),
    /// A table of the superblock has no room.
    #[error(
        "the volume would have {asked} {what}, and {most} is the most; use fewer slices or a smaller device"
    )]
    TooMany {
        /// Name of what the table holds.
        what: &'static str,
        /// Number that it would hold.
        asked: u64,
        /// Largest number.
        most: u64,
    },
    /// The device or the volume cannot be used.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// The last step failed.
    #[error("{0}; the next mount shows whether the volume has the new device")]
    Last(IoError),
}

impl From<IoError> for AddError {
    fn from(error: IoError) -> AddError {
        AddError::Volume(error.into())
    }
}

/// A device that was added.
#[derive(Clone)]
pub struct Added {
    /// The device.
    pub device: Arc<dyn Device>,
    /// Number of its first slice.
    pub first_slice: usize,
    /// The new device and its slices.
    pub summary: Summary,
}

impl fmt::Debug for Added {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Added")
            .field("device", &self.device.name())
            .field("slices", &self.slices())
            .finish_non_exhaustive()
    }
}

impl Added {
    /// Returns the index of the device.
    pub(crate) fn device_index(&self) -> usize {
        let of_slice = |slice: &(Option<u32>, u16, u64)| usize::from(slice.1);
        self.summary.slices.first().map_or(usize::MAX, of_slice)
    }

    /// Returns the numbers of the new slices.
    pub fn slices(&self) -> Range<usize> {
        self.first_slice..self.first_slice + self.summary.slices.len()
    }
}

/// Fails if nothing can be added to the volume.
pub(crate) fn check(volume: &Volume, slices: usize) -> Result<(), AddError> {
    if volume.read_only() {
        return Err(AddError::ReadOnly);
    }
    if slices == 0 {
        return Err(VolumeError::NoSlices.into());
    }
    if let Some(missing) = volume.devices().iter().find(|device| device.is_absent()) {
        return Err(AddError::Incomplete(missing.name()));
    }
    match volume.superblocks().with(|s| s.stores() < s.slices.len()) {
        true => Err(AddError::SharedStore),
        false => Ok(()),
    }
}

/// Fails if a device has a label of this volume.
pub(crate) fn check_label(volume: &Volume, device: &dyn Device) -> Result<(), AddError> {
    let LabelState::Valid(label) = read_label(device)? else {
        return Ok(());
    };
    if label.volume_uuid != volume.uuid() {
        return Ok(());
    }
    let is_it = |s: &Superblock| s.devices.iter().position(|d| d.uuid == label.device_uuid);
    Err(match volume.superblocks().with(is_it) {
        Some(index) => AddError::Own(index),
        None => AddError::Interrupted,
    })
}

/// Fails if a device of this size cannot be added.
pub(crate) fn check_plan(volume: &Volume, space: &Space, slices: usize) -> Result<(), AddError> {
    plan(volume, space, None, slices).map(drop)
}

/// Plans the volume with a new device.
fn plan(
    volume: &Volume,
    space: &Space,
    path: Option<&Path>,
    slices: usize,
) -> Result<Superblock, AddError> {
    let mut planned = volume.superblocks().with(Superblock::clone);
    planned.devices.push(device_entry(space, path)?);
    layout::plan_added(&mut planned, space, slices)?;
    let container_blocks = u64::from(planned.head.container_blocks.get());
    let containers = |slice: &SliceEntry| slice.blocks.get().div_ceil(container_blocks);
    let tables = [
        ("devices", planned.devices.len() as u64, DEVICES_MAX as u64),
        ("slices", planned.slices.len() as u64, SLICES_MAX as u64),
        ("regions", planned.regions.len() as u64, REGIONS_MAX as u64),
        (
            "chunks of metadata",
            planned.chunks.len() as u64,
            CHUNKS_MAX as u64,
        ),
        (
            "containers",
            planned.slices.iter().map(containers).sum(),
            CONTAINERS_MAX,
        ),
    ];
    match tables.into_iter().find(|(_, asked, most)| asked > most) {
        Some((what, asked, most)) => Err(AddError::TooMany { what, asked, most }),
        None => Ok(planned),
    }
}

/// Adds a device that is open for writing. Its contents are lost. Stores `path`, so that a mount finds the device. `make_contents` makes
/// the metadata stores of the given indices, on a volume that has no device but the new one.
pub fn add_device(
    volume: &Volume,
    device: Arc<dyn Device>,
    path: &Path,
    slices: usize,
    make_contents: impl FnOnce(&Volume, Range<usize>) -> Result<(), VolumeError>,
) -> Result<Added, AddError> {
    check(volume, slices)?;
    // From here on, only stores change the superblock: they append chunks, and change the positions of chunks and their own lengths.
    let _alone = volume.lock_growth();
    let space = Space {
        name: device.name(),
        blocks: device.size_bytes() / PAGE_BYTES,
        node: device.home_node(),
        host: remote_host(path).map(Into::into),
    };
    volume.superblocks().settle()?;
    let mut planned = plan(volume, &space, Some(path), slices)?;
    planned.head.sequence += 1;
    let first = First {
        device: planned.devices.len() - 1,
        slice: planned.slices.len() - slices,
        region: planned.regions.len() - slices,
    };
    let label = label(&planned, first.device).encode();

    device.write_at(0, &vec![0; PAGE_BYTES as usize])?;
    device.flush()?;
    // The steps below write nothing to the old devices before the last one.
    let old = planned.devices[..first.device].iter();
    let absent = old.map(|old| {
        let name = path_of(old);
        absent_device(&name.to_string_lossy(), old.blocks.get() * PAGE_BYTES)
    });
    let devices: Vec<_> = absent.chain([device.clone()]).collect();
    let superblocks = Superblocks::create(vec![device.clone()], planned)?.over(devices.clone());
    let staged = Volume::assemble(devices, superblocks, false);
    make_contents(&staged, first.slice..first.slice + slices)?;
    device.flush()?;
    device.write_at(0, &label)?;
    device.flush()?;

    let new = staged.superblocks().with(Superblock::clone);
    let summary = summary(&new, &device, first.slice..first.slice + slices);
    join(volume, &new, &first)?;
    // Writes the other copy, too, so that the loss of one copy does not cost the device. A failure does not undo the addition.
    if let Err(error) = volume.superblocks().update(&[], |_| {}) {
        tracing::warn!(%error, "the older copy of the superblock does not have the new device");
    }
    Ok(Added {
        device,
        first_slice: first.slice,
        summary,
    })
}

/// Where the new entries begin in the tables.
struct First {
    device: usize,
    slice: usize,
    region: usize,
}

/// Appends the entries of the new device and its slices to the superblock of the volume.
fn join(volume: &Volume, new: &Superblock, first: &First) -> Result<(), AddError> {
    let on_it = |chunk: &&ChunkEntry| usize::from(chunk.device.get()) == first.device;
    let chunks: Vec<ChunkEntry> = new.chunks.iter().filter(on_it).cloned().collect();
    let mut too_many = None;
    let append = |s: &mut Superblock| {
        let asked = s.chunks.len() + chunks.len();
        if asked > CHUNKS_MAX {
            too_many = Some(asked as u64);
            return;
        }
        s.head.sequence = s.head.sequence.get().max(new.head.sequence.get()).into();
        s.devices.extend_from_slice(&new.devices[first.device..]);
        s.slices.extend_from_slice(&new.slices[first.slice..]);
        s.regions.extend_from_slice(&new.regions[first.region..]);
        s.chunks.extend_from_slice(&chunks);
    };
    let joined = volume.superblocks().update(&[0], append);
    // Stores of the volume may have taken chunks since the plan.
    if let Some(asked) = too_many {
        return Err(AddError::TooMany {
            what: "chunks of metadata",
            asked,
            most: CHUNKS_MAX as u64,
        });
    }
    joined.map_err(AddError::Last)
}

/// Describes the new device and its slices.
fn summary(new: &Superblock, device: &Arc<dyn Device>, slices: Range<usize>) -> Summary {
    let index = (new.devices.len() - 1) as u16;
    let chunks = new.chunks.iter().filter(|c| c.device.get() == index);
    let chunk_bytes = u64::from(new.head.chunk_blocks.get()) * PAGE_BYTES;
    let node = |slice: &SliceEntry| {
        let node = slice.node.get();
        (node != jericho_format::superblock::NO_NODE).then_some(node)
    };
    Summary {
        uuid: new.head.volume_uuid,
        devices: vec![(device.name(), device.size_bytes())],
        slices: new.slices[slices]
            .iter()
            .map(|slice| (node(slice), index, slice.blocks.get() * PAGE_BYTES))
            .collect(),
        metadata_bytes: chunks.count() as u64 * chunk_bytes,
    }
}
