//! Looks again for a device of another host that was missing when the volume was opened.

use std::path::PathBuf;
use std::sync::Arc;

use jericho_storage::{Device, is_remote};

use crate::device::{OpenMode, open_path};
use crate::error::VolumeError;
use crate::labels::{check_length, good_label, path_of};
use crate::volume::Volume;

impl Volume {
    /// Returns the missing devices of other hosts: their indices.
    pub fn missing_remotes(&self) -> Vec<usize> {
        let devices = self.devices().iter().enumerate();
        let missing = devices.filter(|(_, device)| device.is_absent() && device.may_fall_silent());
        missing.map(|(index, _)| index).collect()
    }

    /// Opens a missing device of another host, for writing. Its session excludes other users as long as the device is open. Returns `None` if its host does not
    /// answer. Fails if only a mount can take the device into use: it is another one, or its superblock knows of other parts of the volume.
    pub fn open_missing(&self, index: usize) -> Result<Option<Arc<dyn Device>>, VolumeError> {
        let (entry, uuid) = self.superblocks().with(|s| {
            let entry = s.devices.get(index).cloned();
            (entry, s.head.volume_uuid)
        });
        let entry = entry.ok_or(VolumeError::DeviceMissing {
            index,
            path: PathBuf::new(),
        })?;
        let path = path_of(&entry);
        if !is_remote(&path) {
            return Ok(None);
        }
        let device = match open_path(&path, OpenMode::WRITE) {
            Err(VolumeError::Unreachable(_) | VolumeError::Refused(_)) => return Ok(None),
            opened => opened?,
        };
        let wrong = |is: &str| VolumeError::WrongDevice {
            device: device.name(),
            index,
            is: is.to_owned(),
        };
        let label = good_label(&device)?;
        if label.volume_uuid != uuid || label.device_uuid != entry.uuid {
            return Err(wrong("is another device"));
        }
        check_length(&device, entry.blocks.get())?;
        if !self.superblocks().agrees_with(index, &device)? {
            return Err(wrong("has grown since, or its slices have"));
        }
        Ok(Some(device))
    }
}
