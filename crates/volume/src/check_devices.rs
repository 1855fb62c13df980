//! Compares the devices of a volume with its superblock.

use std::sync::Arc;

use jericho_storage::Device;

use crate::error::VolumeError;
use crate::labels::{check_label, check_length, path_of};
use crate::superblocks::Superblocks;

/// Checks that each device is the one that the superblock names.
pub(crate) fn check_devices(
    devices: &[Arc<dyn Device>],
    superblocks: &Superblocks,
) -> Result<(), VolumeError> {
    let (entries, uuid) = superblocks.with(|s| (s.devices.clone(), s.head.volume_uuid));
    for (index, entry) in entries.iter().enumerate() {
        let Some(device) = devices.get(index) else {
            return Err(VolumeError::DeviceMissing {
                index,
                path: path_of(entry),
            });
        };
        if device.is_absent() {
            continue;
        }
        check_label(device, index, (&uuid, entry))?;
        check_length(device, entry.blocks.get())?;
    }
    Ok(())
}
