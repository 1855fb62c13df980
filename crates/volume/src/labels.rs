//! The labels of the devices: they tell whether a device belongs to the volume that its superblock describes.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

use jericho_format::PAGE_BYTES;
use jericho_format::label::{Label, LabelState, VERSION};
use jericho_format::superblock::{DeviceEntry, Superblock};
use jericho_storage::Device;
use zerocopy::byteorder::little_endian::U16;

use crate::error::VolumeError;

/// Returns the label of a device of the volume.
pub fn label(superblock: &Superblock, index: usize) -> Box<Label> {
    let entry = &superblock.devices[index];
    let mut label = Label::new();
    label.volume_uuid = superblock.head.volume_uuid;
    label.device_uuid = entry.uuid;
    label.device_index = U16::new(index as u16);
    label.devices = U16::new(superblock.devices.len() as u16);
    label.device_blocks = entry.blocks;
    label
}

/// Reads the label of a device.
pub fn read_label(device: &dyn Device) -> Result<LabelState, VolumeError> {
    if device.size_bytes() < PAGE_BYTES {
        return Ok(LabelState::Foreign);
    }
    let mut block = vec![0; PAGE_BYTES as usize];
    device.read_at(0, &mut block)?;
    Ok(Label::decode(&block))
}

/// Returns the label of a device. Fails if the label is missing, damaged or of a newer format.
pub(crate) fn good_label(device: &Arc<dyn Device>) -> Result<Box<Label>, VolumeError> {
    match read_label(&**device)? {
        LabelState::Valid(label) => Ok(label),
        LabelState::Foreign => Err(VolumeError::NotAVolume(device.name())),
        LabelState::Damaged => Err(VolumeError::LabelDamaged(device.name())),
        LabelState::Newer(found) => Err(VolumeError::Newer {
            device: device.name(),
            found,
            known: VERSION,
        }),
        LabelState::Older(found) => Err(VolumeError::Older {
            device: device.name(),
            found,
            known: VERSION,
        }),
    }
}

pub(crate) fn check_length(device: &Arc<dyn Device>, blocks: u64) -> Result<(), VolumeError> {
    let needed_bytes = blocks.saturating_mul(PAGE_BYTES);
    let found_bytes = device.size_bytes();
    if found_bytes < needed_bytes {
        return Err(VolumeError::Truncated {
            device: device.name(),
            needed_bytes,
            found_bytes,
        });
    }
    Ok(())
}

/// Returns the path that a device had when the volume was formatted.
pub(crate) fn path_of(entry: &DeviceEntry) -> PathBuf {
    let len = usize::from(entry.path_bytes.get()).min(entry.path.len());
    PathBuf::from(OsStr::from_bytes(&entry.path[..len]))
}

/// Checks that a device is the one with this index and entry, of the volume with this UUID. Reads only the label.
pub(crate) fn check_label(
    device: &Arc<dyn Device>,
    index: usize,
    (uuid, entry): (&[u8; 16], &DeviceEntry),
) -> Result<(), VolumeError> {
    let wrong = |is: &str| VolumeError::WrongDevice {
        device: device.name(),
        index,
        is: is.to_owned(),
    };
    let label = match good_label(device) {
        Ok(label) => label,
        Err(VolumeError::NotAVolume(_)) => return Err(wrong("holds no part of a volume")),
        Err(error) => return Err(error),
    };
    if label.volume_uuid != *uuid {
        return Err(wrong("belongs to another volume"));
    }
    if label.device_uuid != entry.uuid {
        return Err(wrong(&format!("is device {}", label.device_index.get())));
    }
    Ok(())
}
