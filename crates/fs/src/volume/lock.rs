//! Holding a volume: every device of it.

use std::path::Path;

use jericho_storage::{Access, Claim, ClaimError};

use super::Volume;
use super::error::VolumeError;
use super::open::{OpenMode, check_devices, inspect};

/// Holds devices of a volume for one process, against writers if the process reads, else against everybody; released when
/// dropped.
#[derive(Debug)]
pub struct VolumeLock {
    claims: Vec<Claim>,
    mode: OpenMode,
}

impl Volume {
    /// Takes the device at `path`, by itself. Errors: `Locked` with the process that has it.
    pub fn lock(path: &Path, mode: OpenMode) -> Result<VolumeLock, VolumeError> {
        inspect(path)?;
        let mut lock = VolumeLock {
            claims: vec![],
            mode,
        };
        lock.claim(path)?;
        Ok(lock)
    }
}

impl VolumeLock {
    /// Takes the other devices of the volume too, whose first device this holds.
    pub fn cover(&mut self, volume: &Volume) -> Result<(), VolumeError> {
        for device in &volume.devices()[1..] {
            self.claim(Path::new(&*device.name()))?;
        }
        // Somebody may have formatted one of them before it was locked.
        check_devices(volume.devices(), volume.superblocks())
    }

    fn claim(&mut self, path: &Path) -> Result<(), VolumeError> {
        let access = if self.mode.read_only {
            Access::Shared
        } else {
            Access::Exclusive
        };
        let claim = Claim::take(path, access, self.mode.force).map_err(|error| match error {
            ClaimError::Held { path, pid } => VolumeError::Locked { path, pid },
            error @ ClaimError::Hidden { .. } => VolumeError::Hidden(error.to_string()),
            error => VolumeError::Open(error.to_string()),
        })?;
        self.claims.push(claim);
        Ok(())
    }
}
