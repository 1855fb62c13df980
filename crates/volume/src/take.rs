//! Takes a device that was added, and its slices, into use while the volume is open.

use crate::add::Added;
use crate::space::slices_of;
use crate::volume::Volume;

impl Volume {
    /// Takes a device that was added, and its slices, into use: the calls of the volume return them from now on. Returns false, and changes
    /// nothing, if an earlier device waits for the next mount, because the indices of devices have no gaps.
    pub fn take(&self, added: &Added) -> bool {
        let _alone = self.lock_growth();
        if added.device_index() != self.devices().len() {
            return false;
        }
        self.superblocks().join(added.device.clone());
        // The devices come first: a reader that finds a slice finds its device.
        self.adopt_device(&added.device);
        let mut slices = self.superblocks().with(slices_of);
        slices.truncate(added.slices().end);
        self.adopt(slices);
        // The new device gets what has changed since its addition. A failure costs nothing: each change of its slices writes the superblock
        // there again.
        if let Err(error) = self.superblocks().update(&[], |_| {}) {
            tracing::warn!(%error, "the superblock could not be written when a device was taken into use");
        }
        true
    }
}
