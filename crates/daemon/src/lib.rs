//! A mounted volume in a process: devices, slices, filesystem, and the data path that joins them.
//!
//! Skeleton: signatures that `fuse` and `cli` code against.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;

use jericho_fs::fs::{File, Fs};
use jericho_fs::types::{Ino, SliceId};
use jericho_topology::Topology;
use serde::{Deserialize, Serialize};

/// How a volume is brought up.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// The volume (its first device).
    pub volume: PathBuf,
    /// Nothing is changed.
    pub read_only: bool,
    /// Bytes of cache frames over all slices; `None`: an eighth of the memory that may be used.
    pub cache_bytes: Option<u64>,
    /// Nodes.
    pub topology: Topology,
}

/// Why a volume could not be brought up; the message names the thing and what to do.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Placeholder of the skeleton.
    #[error("{0}")]
    Other(String),
}

/// `jericho stat --json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Stat {
    /// Absolute path of the volume.
    pub volume: String,
    /// UUID of the volume.
    pub uuid: String,
    /// Process id of the daemon.
    pub pid: u32,
    /// Mounted read-only.
    pub read_only: bool,
    /// Nodes of the topology in use.
    pub topology: String,
    /// Per slice.
    pub slices: Vec<SliceStat>,
    /// Per node (sums).
    pub nodes: Vec<NodeStat>,
    /// One line per device.
    pub devices: Vec<String>,
}

/// One slice in `Stat`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs)] // the names are the contract; see the manual page
pub struct SliceStat {
    pub id: u16,
    pub node: u16,
    pub capacity_bytes: u64,
    pub used_bytes: u64,
    pub frames: u64,
    pub resident: u64,
    pub dirty: u64,
    pub hits: u64,
    pub misses: u64,
    pub evictions: u64,
    pub read_bytes: u64,
    pub read_ahead_bytes: u64,
    pub written_back_bytes: u64,
    pub write_backs: u64,
    pub stalled: u64,
    pub clashed: u64,
    pub throttled: u64,
    pub write_errors: u64,
}

/// One node in `Stat`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct NodeStat {
    pub node: u16,
    pub frames: u64,
    pub resident: u64,
    pub dirty: u64,
    pub hits: u64,
    pub misses: u64,
}

/// `jericho where --json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Where {
    /// Slice that caches and stores the file (or takes what is created in the directory).
    pub slice: SliceId,
    /// Its home node.
    pub home_node: u16,
    /// Size of the file.
    pub size_bytes: u64,
    /// Bytes in the cache by the kernel's node, as move_pages(2) reports them.
    pub resident_bytes_by_kernel_node: Vec<(u32, u64)>,
    /// Bytes in the cache.
    pub resident_bytes: u64,
    /// Of those, newer than the device.
    pub dirty_bytes: u64,
    /// Bytes on the volume by slice.
    pub stored_bytes_by_slice: Vec<(SliceId, u64)>,
}

/// An open file with the state of its reader (read-ahead).
pub struct Handle {
    _file: Arc<File>,
}

/// Durability that a write asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteSync {
    /// None.
    No,
    /// O_DSYNC.
    Data,
    /// O_SYNC.
    Full,
}

/// A volume that is up.
pub struct Mounted {
    _todo: (),
}

impl Mounted {
    /// Locks the volume, opens its devices, makes the slices' memory, opens the filesystem.
    pub fn open(_options: OpenOptions) -> Result<Arc<Mounted>, OpenError> {
        todo!()
    }
    /// The filesystem.
    pub fn fs(&self) -> &Arc<Fs> {
        todo!()
    }
    /// Nodes in use.
    pub fn topology(&self) -> &Topology {
        todo!()
    }
    /// Home node of a slice.
    pub fn node_of_slice(&self, _slice: SliceId) -> jericho_topology::NodeId {
        todo!()
    }
    /// Number of slices.
    pub fn slice_count(&self) -> u16 {
        todo!()
    }
    /// Opens a file for the data path.
    pub fn open_file(&self, _ino: Ino, _truncate: bool) -> jericho_fs::Result<Arc<Handle>> {
        todo!()
    }
    /// Closes it.
    pub fn close_file(&self, _handle: &Arc<Handle>) {
        todo!()
    }
    /// Reads up to `len` bytes at `offset` and calls `reply` once with the bytes (fewer only at the end of the file):
    /// at once, in this thread and through `scratch` when all hit, else later in a slice's thread.
    pub fn read<R>(&self, _handle: &Arc<Handle>, _offset: u64, _len: u32, _scratch: &mut Vec<u8>, _reply: R)
    where
        R: FnOnce(jericho_fs::Result<&[u8]>) + Send + 'static,
    {
        todo!()
    }
    /// Writes `data` at `offset` (at the end of the file when `append`) and calls `reply` once with the bytes written: at once in
    /// this thread when no page has to be fetched, else later.
    #[allow(clippy::too_many_arguments)]
    pub fn write<R>(
        self: &Arc<Self>,
        _handle: &Arc<Handle>,
        _offset: u64,
        _data: &[u8],
        _append: bool,
        _sync: WriteSync,
        _strip_suid: bool,
        _reply: R,
    ) where
        R: FnOnce(jericho_fs::Result<u32>) + Send + 'static,
    {
        todo!()
    }
    /// The file behind a handle.
    pub fn file<'a>(&self, _handle: &'a Handle) -> &'a Arc<File> {
        todo!()
    }
    /// Counters for `jericho stat`.
    pub fn stat(&self) -> Stat {
        todo!()
    }
    /// Placement of an inode for `jericho where`.
    pub fn where_is(&self, _ino: Ino) -> jericho_fs::Result<Where> {
        todo!()
    }
    /// Writes everything back, commits, marks the volume clean, stops all threads, unlocks. Reports what could not be
    /// written.
    pub fn close(&self) -> jericho_fs::Result<()> {
        todo!()
    }
}
