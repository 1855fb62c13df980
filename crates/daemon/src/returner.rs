//! Looks for the missing devices of a mounted volume, and takes their slices into use when they have come back.
//!
//! Only devices of other hosts come back: their hosts may have been away at the mount. The thread ends when none is missing, or when the volume is
//! closed. Nothing waits for the thread, because an attempt to reach a host takes seconds.

use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use jericho_fs::PutBackError;
use jericho_sys::service;

use crate::mounted::Mounted;

/// Time from the end of one attempt to the next one.
const PERIOD: Duration = Duration::from_secs(2);

impl Mounted {
    /// Looks for missing devices of other hosts from now on.
    pub(crate) fn look_for_missing(self: &Arc<Self>) -> io::Result<()> {
        let missing = self.volume.devices.missing_remotes();
        if missing.is_empty() || self.read_only() {
            return Ok(());
        }
        let mounted = Arc::downgrade(self);
        service::spawn("returner", move || look(&mounted, missing)).map(drop)
    }
}

/// Looks for these devices until each has been found.
fn look(mounted: &Weak<Mounted>, mut missing: Vec<usize>) {
    while !missing.is_empty() {
        std::thread::sleep(PERIOD);
        missing.retain(|index| is_still_missing(mounted, *index));
    }
}

/// Looks for a device once. Returns whether to look again.
fn is_still_missing(mounted: &Weak<Mounted>, index: usize) -> bool {
    // Without the mounted volume, so that it can be closed meanwhile.
    let Some(volume) = mounted
        .upgrade()
        .map(|mounted| mounted.volume.devices.clone())
    else {
        return false;
    };
    let opened = volume.open_missing(index);
    drop(volume);
    let device = match opened {
        Ok(None) => return true,
        Ok(Some(device)) => device,
        Err(error) => {
            tracing::warn!(
                "a missing device has been found, and is used after the next mount: {error}"
            );
            return false;
        }
    };
    let Some(mounted) = mounted.upgrade() else {
        return false;
    };
    match mounted.fs().put_back(index, &device) {
        Ok(slices) => {
            tracing::info!(device = %device.name(), ?slices, "a missing device has come back: its slices are in use")
        }
        Err(PutBackError::Closing) => {}
        Err(why) => tracing::warn!(
            device = %device.name(),
            "a missing device has come back, and its slices are used after the next mount: {why}"
        ),
    }
    false
}
