//! A volume that is up.

use std::path::PathBuf;
use std::sync::Arc;

use crossbeam_queue::ArrayQueue;
use jericho_cache::Slice;
use jericho_fs::Result;
use jericho_fs::fs::{File, Fs};
use jericho_fs::types::{Ino, SliceId};
use jericho_fs::volume::{Volume, VolumeLock};
use jericho_topology::{NodeId, Topology};

use crate::handle::Handle;

/// Buffers kept, of at most the longest read each: 64 MiB at the very most.
const BUFFERS: usize = 64;

/// A volume that is up.
pub struct Mounted {
    pub(crate) path: PathBuf,
    read_only: bool,
    topology: Topology,
    pub(crate) volume: Arc<Volume>,
    homes: Vec<NodeId>,
    pub(crate) slices: Vec<Arc<Slice>>,
    frames_per_slice: u32,
    /// Buffers of reads that had to wait, for the next ones: fresh ones would be zeroed, and large ones mapped,
    /// each time.
    pub(crate) buffers: ArrayQueue<Vec<u8>>,
    fs: Arc<Fs>,
    /// Held until the last user is gone.
    _lock: Option<VolumeLock>,
}

impl Mounted {
    #[allow(clippy::too_many_arguments)] // called once, by `open`
    pub(crate) fn assemble(
        path: PathBuf,
        read_only: bool,
        topology: Topology,
        volume: Arc<Volume>,
        homes: Vec<NodeId>,
        slices: Vec<Arc<Slice>>,
        fs: Arc<Fs>,
        lock: Option<VolumeLock>,
    ) -> Arc<Mounted> {
        let frames_per_slice = slices.first().map_or(0, |s| s.memory().geometry().frames);
        Arc::new(Mounted {
            path,
            read_only,
            topology,
            volume,
            homes,
            slices,
            frames_per_slice,
            buffers: ArrayQueue::new(BUFFERS),
            fs,
            _lock: lock,
        })
    }

    /// The filesystem.
    pub fn fs(&self) -> &Arc<Fs> {
        &self.fs
    }

    /// Whether nothing is changed.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// Nodes in use.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Home node of a slice.
    pub fn node_of_slice(&self, slice: SliceId) -> NodeId {
        self.homes
            .get(usize::from(slice))
            .copied()
            .unwrap_or(NodeId(0))
    }

    /// Number of slices.
    pub fn slice_count(&self) -> u16 {
        self.slices.len() as u16
    }

    pub(crate) fn slice(&self, slice: SliceId) -> &Arc<Slice> {
        &self.slices[usize::from(slice)]
    }

    pub(crate) fn frames_per_slice(&self) -> u32 {
        self.frames_per_slice
    }

    /// Opens a file for the data path.
    pub fn open_file(&self, ino: Ino, truncate: bool) -> Result<Arc<Handle>> {
        Ok(Handle::new(self.fs.open_file(ino, truncate)?))
    }

    /// Closes it.
    pub fn close_file(&self, handle: &Arc<Handle>) {
        self.fs.close_file(&handle.file);
    }

    /// The file behind a handle.
    pub fn file<'a>(&self, handle: &'a Handle) -> &'a Arc<File> {
        &handle.file
    }

    /// Writes everything back, commits, marks the volume clean, stops all threads. Reports what could not be
    /// written. The volume stays locked until the last reference is gone.
    pub fn close(&self) -> Result<()> {
        let result = self.fs.close();
        for slice in &self.slices {
            slice.close();
        }
        result
    }
}
