//! An open volume: what all other parts of the daemon work on.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use jericho_cache::{PAGES_PER_GET_MAX, Slice};
use jericho_format::threads::ThreadPolicy;
use jericho_fs::types::SliceId;
use jericho_fs::{File, Fs, Layout};
use jericho_storage::Appended;
use jericho_topology::{NodeId, Topology};
use jericho_volume::{Volume, VolumeLock};
use parking_lot::Mutex;

use crate::move_costs::MoveCosts;
use crate::outage::Outages;

/// An open volume. While it is open, it only gets further slices.
///
/// The volume's lock is released when the last reference is dropped. Fields are dropped in order, so a struct with a reference has
/// it as its last field: its other fields may keep files, and with them the devices, which must not outlive the lock.
pub(crate) struct OpenVolume {
    pub path: PathBuf,
    pub read_only: bool,
    /// The policy for migrating threads, for files and directories without their own.
    pub threads: ThreadPolicy,
    /// Companions migrate with threads that access their data through the kernel.
    pub with_parent: bool,
    /// What moves of threads cost, for the policy *adaptive*.
    pub move_costs: MoveCosts,
    pub topology: Topology,
    pub devices: Arc<Volume>,
    /// The home node of each slice. A slice comes after its home.
    pub homes: Appended<NodeId>,
    pub slices: Appended<Arc<Slice>>,
    pub outages: Outages,
    pub fs: Arc<Fs>,
    /// The locks of devices that were added since the mount.
    pub added: Mutex<Vec<VolumeLock>>,
    /// Keeps the volume locked until the last reference is dropped.
    pub _lock: Option<VolumeLock>,
}

impl OpenVolume {
    /// Returns the slice with this number.
    pub fn slice(&self, slice: SliceId) -> &Arc<Slice> {
        let found = self.slices.get(usize::from(slice));
        found.expect("a slice of the volume")
    }

    /// Returns the home node of a slice.
    pub fn node_of_slice(&self, slice: SliceId) -> NodeId {
        let home = self.homes.get(usize::from(slice));
        home.copied().unwrap_or(NodeId(0))
    }

    /// Returns the number of frames at home of a slice, which always have memory. A slice that was added to the mounted volume may have fewer than the
    /// others.
    pub fn home_frames_of(&self, slice: SliceId) -> u32 {
        self.slice(slice).memory().geometry().home_frames
    }

    /// Returns a slice that has too many dirty pages and holds a byte of the range.
    pub fn throttling(&self, layout: Layout, bytes: Range<u64>) -> Option<&Arc<Slice>> {
        let mut slices = layout.parts(bytes).map(|(slice, _)| self.slice(slice));
        slices.find(|slice| slice.is_throttling())
    }

    /// Makes the slices fetch pages of a file that are not cached.
    pub fn prefetch(&self, file: &Arc<File>, pages: Range<u64>) {
        let object = file.object();
        for (slice, pages) in file.layout().runs(pages) {
            let slice = self.slice(slice);
            let mut at = pages.start;
            while at < pages.end {
                let count = (pages.end - at).min(u64::from(PAGES_PER_GET_MAX)) as u32;
                slice.prefetch(&object, at, count);
                at += u64::from(count);
            }
        }
    }
}
