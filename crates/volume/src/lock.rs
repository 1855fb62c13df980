//! Locks a volume: every device of it.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use jericho_storage::{Access, Claim, ClaimError, Device, is_remote, remote_holder};

use crate::check_devices::check_devices;
use crate::device::{OpenMode, inspect, open_path};
use crate::error::VolumeError;
use crate::volume::Volume;

/// A lock on the devices of a volume, held for one process until it is dropped. A reader's lock excludes writers. A writer's
/// lock excludes all other processes.
pub struct VolumeLock {
    claims: Vec<Claim>,
    /// Devices that nothing else keeps open. An open block device excludes mounts and other programs.
    kept: Vec<Arc<dyn Device>>,
    mode: OpenMode,
}

impl fmt::Debug for VolumeLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VolumeLock")
            .field("claims", &self.claims)
            .finish_non_exhaustive()
    }
}

impl Volume {
    /// Locks only the device at `path`. Fails with `Locked`, which names the process that holds it.
    pub fn lock(path: &Path, mode: OpenMode) -> Result<VolumeLock, VolumeError> {
        if !is_remote(path) {
            inspect(path)?;
        }
        let mut lock = VolumeLock {
            claims: vec![],
            kept: vec![],
            mode,
        };
        lock.claim(path)?;
        Ok(lock)
    }
}

impl VolumeLock {
    /// Locks the other devices of the volume too. The first one is already locked.
    pub fn cover(&mut self, volume: &Volume) -> Result<(), VolumeError> {
        let others = volume.devices()[1..].iter();
        for device in others.filter(|device| !device.is_absent()) {
            self.claim(Path::new(&*device.name()))?;
        }
        // Another process may have formatted one of them before it was locked.
        check_devices(volume.devices(), volume.superblocks())
    }

    /// Keeps a device open as long as the lock is held.
    pub(crate) fn keep(&mut self, device: Arc<dyn Device>) {
        self.kept.push(device);
    }

    fn claim(&mut self, path: &Path) -> Result<(), VolumeError> {
        if is_remote(path) {
            return self.claim_remote(path);
        }
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

    /// Claims a device of another host: its session excludes all other clients as long as the device is open, also readers.
    fn claim_remote(&mut self, path: &Path) -> Result<(), VolumeError> {
        let device = open_path(path, self.mode).map_err(|error| match remote_holder(path) {
            Some(pid) if matches!(error, VolumeError::Refused(_)) => VolumeError::Locked {
                path: path.into(),
                pid: Some(pid),
            },
            _ => error,
        })?;
        self.keep(device);
        Ok(())
    }
}
