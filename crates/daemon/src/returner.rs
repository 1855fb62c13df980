//! Looks for the missing devices of a mounted volume, and takes their slices into use when they have come back.
//!
//! Only devices of other hosts come back: their hosts may have been away at the mount. The thread ends when none is missing, or when the volume is
//! closed. Nothing waits for the thread, because an attempt to reach a host takes seconds.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::io;
use std::ops::ControlFlow;
use std::sync::{Arc, Weak};
use std::time::Duration;

use jericho_fs::{Fs, PutBackError, ReturnedDevice};
use jericho_sys::service;
use jericho_volume::{Volume, VolumeError};

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

/// The devices that are not in use.
#[derive(Default)]
struct Search {
    /// Those that were not found, by index.
    missing: Vec<usize>,
    /// Those that were found and wait for another missing one. Their sessions are open.
    waiting: Vec<ReturnedDevice>,
    /// Those whose failure the log has.
    logged: BTreeSet<usize>,
}

/// Looks for these devices until each has been found.
fn look(mounted: &Weak<Mounted>, missing: Vec<usize>) {
    let mut search = Search {
        missing,
        ..Search::default()
    };
    while !search.missing.is_empty() {
        std::thread::sleep(PERIOD);
        // Without the mounted volume, so that it can be closed meanwhile.
        let Some(volume) = mounted
            .upgrade()
            .map(|mounted| mounted.volume.devices.clone())
        else {
            return;
        };
        let found = search.find(&volume);
        drop(volume);
        if found.is_empty() {
            continue;
        }
        let Some(mounted) = mounted.upgrade() else {
            return;
        };
        if search.put_back(mounted.fs(), found).is_break() {
            return;
        }
    }
}

impl Search {
    /// Looks for each missing device once. Returns those that it has found, and forgets those that only a mount can use.
    fn find(&mut self, volume: &Volume) -> Vec<ReturnedDevice> {
        let mut found = Vec::new();
        for index in std::mem::take(&mut self.missing) {
            match volume.open_missing(index) {
                Ok(None) => self.missing.push(index),
                Ok(Some(device)) => found.push((index, device)),
                Err(error @ VolumeError::WrongDevice { .. }) => tracing::warn!(
                    "a missing device has been found, and is used after the next mount: {error}"
                ),
                Err(error) => self.look_again(index, &error),
            }
        }
        found
    }

    /// Looks for a device again after an error.
    fn look_again(&mut self, index: usize, error: &dyn Display) {
        self.missing.push(index);
        if self.logged.insert(index) {
            tracing::warn!("missing device {index} cannot be used yet: {error}");
        }
    }

    /// Takes the slices of found devices, and of those that wait, into use. Ends the search when the volume is being closed.
    fn put_back(&mut self, fs: &Fs, found: Vec<ReturnedDevice>) -> ControlFlow<()> {
        self.waiting.extend(found);
        loop {
            let before = std::mem::take(&mut self.waiting);
            let mut has_returned = false;
            for one in before {
                has_returned |= self.put_together(fs, vec![one])?;
            }
            if !has_returned {
                break;
            }
        }
        // Each may wait for the other one.
        if self.waiting.len() > 1 {
            let all = std::mem::take(&mut self.waiting);
            self.put_together(fs, all)?;
        }
        ControlFlow::Continue(())
    }

    /// Takes the slices of these devices into use. Returns whether they are in use.
    fn put_together(&mut self, fs: &Fs, came: Vec<ReturnedDevice>) -> ControlFlow<(), bool> {
        let names: Vec<_> = came.iter().map(|(_, device)| device.name()).collect();
        match fs.put_back(&came) {
            Ok(slices) => {
                tracing::info!(devices = ?names, ?slices, "a missing device has come back: its slices are in use");
                return ControlFlow::Continue(true);
            }
            Err(PutBackError::Closing) => return ControlFlow::Break(()),
            Err(PutBackError::Waits(why)) => {
                tracing::info!(devices = ?names, "a missing device has come back, and its slices wait for another one: {why}");
                self.waiting.extend(came);
            }
            Err(PutBackError::Failed(why)) => {
                for (index, _) in came {
                    self.look_again(index, &why);
                }
            }
            Err(why) => tracing::warn!(
                devices = ?names,
                "a missing device has come back, and its slices are used after the next mount: {why}"
            ),
        }
        ControlFlow::Continue(false)
    }
}
