//! Looks again for a device of another host that was missing when the volume was opened, and at one whose host was away since.

use std::path::PathBuf;
use std::sync::Arc;

use jericho_storage::{Device, absent_device, is_remote};

use crate::device::{OpenMode, open_path};
use crate::error::VolumeError;
use crate::labels::{check_label, check_length, path_of};
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
        check_label(&device, index, (&uuid, &entry))?;
        check_length(&device, entry.blocks.get())?;
        if !self.superblocks().agrees_with(index, &device)? {
            return Err(VolumeError::WrongDevice {
                device: device.name(),
                index,
                is: "has grown since, or its slices have".into(),
            });
        }
        Ok(Some(device))
    }

    /// Checks that a device whose host was away still has the label of this volume. Another disk may be there under the device's name, or the disk may have
    /// been formatted meanwhile. Reads only the label.
    pub fn check_returned(&self, index: u16) -> Result<(), VolumeError> {
        let index = usize::from(index);
        let (entry, uuid) = self
            .superblocks()
            .with(|s| (s.devices.get(index).cloned(), s.head.volume_uuid));
        match (self.devices().get(index), entry) {
            (Some(device), Some(entry)) => check_label(device, index, (&uuid, &entry)),
            _ => Ok(()),
        }
    }

    /// Has nothing more written to a device that turned out to be another one: no superblock, and no data in its slices.
    pub fn exclude(&self, index: u16) {
        let Some(device) = self.devices().get(usize::from(index)) else {
            return;
        };
        self.note_excluded(index);
        let missing = absent_device(&device.name(), device.size_bytes());
        self.superblocks().take_away(index.into(), &missing);
    }
}
