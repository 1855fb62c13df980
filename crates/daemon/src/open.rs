//! Bringing a volume up: lock, devices, homes of the slices, their memory, the filesystem.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jericho_cache::{Config, FRAMES_MIN, Slice, StartError};
use jericho_format::PAGE_BYTES;
use jericho_format::threads::ThreadPolicy;
use jericho_fs::fs::{Fs, FsOptions};
use jericho_fs::volume::{OpenMode, Volume, VolumeError, VolumeLock};
use jericho_sys::limits::Memory;
use jericho_topology::{NodeId, Topology};

use crate::fast::Fast;
use crate::mounted::Mounted;

/// Pages that were dirty this long are written back.
const DIRTY_AGE: Duration = Duration::from_secs(5);
/// A change of the namespace is durable after this time at the latest.
const COMMIT_INTERVAL_MS: u64 = 2000;
/// Inodes kept in memory beyond those in use.
const INODE_CACHE: usize = 65_536;
/// Memory that must be left for the rest of the daemon.
const HEADROOM_BYTES: u64 = 256 << 20;
/// Cache when none was asked for, at most.
const CACHE_BYTES_DEFAULT_MAX: u64 = 1 << 30;

/// How a volume is brought up.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// The volume (its first device).
    pub volume: PathBuf,
    /// Nothing is changed.
    pub read_only: bool,
    /// Also when another machine has not unmounted the volume, and when another use of a loop device's file would not be noticed.
    pub force: bool,
    /// Bytes of cache frames over all slices; `None`: an eighth of the memory, at most 1 GiB.
    pub cache_bytes: Option<u64>,
    /// Nodes.
    pub topology: Topology,
    /// When threads are moved to the data, where no directory says otherwise.
    pub threads: ThreadPolicy,
}

/// Why a volume could not be brought up; the message names the thing and what to do.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The volume can't be opened.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// The cache is smaller than its slices need.
    #[error(
        "a cache of {given} bytes is too small for {slices} slices: give at least --cache {needed}"
    )]
    CacheTooSmall {
        /// Asked for.
        given: u64,
        /// Slices of the volume.
        slices: usize,
        /// Smallest size.
        needed: u64,
    },
    /// The cache is larger than what memory can hold.
    #[error(
        "a cache of {given} bytes does not fit into this machine's {memory} bytes of memory: give a smaller --cache"
    )]
    CacheTooLarge {
        /// Asked for.
        given: u64,
        /// Memory.
        memory: u64,
    },
    /// The kernel does not tell how much memory there is.
    #[error("cannot read how much memory this machine has: {0}; is /proc mounted?")]
    MemorySize(std::io::Error),
    /// A slice could not be started.
    #[error(transparent)]
    Slice(#[from] StartError),
    /// The segments that programs on the fast path map could not be made.
    #[error(
        "cannot make the shared memory for programs: {0}; is the limit of open files high enough?"
    )]
    SharedMemory(std::io::Error),
    /// The filesystem could not be opened.
    #[error("cannot open the filesystem of {volume}: {cause}")]
    Fs {
        /// The volume.
        volume: PathBuf,
        /// What went wrong.
        cause: jericho_fs::Error,
    },
}

impl Mounted {
    /// Locks the volume, opens its devices, makes the slices' memory, opens the filesystem.
    pub fn open(options: OpenOptions) -> Result<Arc<Mounted>, OpenError> {
        let path = std::fs::canonicalize(&options.volume).unwrap_or(options.volume.clone());
        let mode = OpenMode {
            read_only: options.read_only,
            force: options.force,
        };
        let mut lock = Volume::lock(&path, mode)?;
        let volume = Volume::open(&path, mode)?;
        lock.cover(&volume)?;
        Mounted::start(Arc::new(volume), path, Some(lock), &options)
    }

    /// As `open`, of a volume that the caller has opened (and locked, if others could open it too).
    pub fn open_volume(volume: Volume, options: &OpenOptions) -> Result<Arc<Mounted>, OpenError> {
        Mounted::start(Arc::new(volume), options.volume.clone(), None, options)
    }

    fn start(
        volume: Arc<Volume>,
        path: PathBuf,
        lock: Option<VolumeLock>,
        options: &OpenOptions,
    ) -> Result<Arc<Mounted>, OpenError> {
        let topology = &options.topology;
        let frames = frames_per_slice(options.cache_bytes, volume.slices().len())?;
        let homes = homes(&volume, topology);
        let mut slices = vec![];
        for (slice, home) in volume.slices().iter().zip(&homes) {
            let config = Config {
                id: slice.id,
                frames,
                kernel_node: topology.node(*home).and_then(|node| node.kernel_node),
                cpus: topology.cpus_of(*home).to_vec(),
                dirty_age: DIRTY_AGE,
            };
            slices.push(Slice::start(&config, volume.devices())?);
        }
        let read_only = options.read_only;
        let fs_options = FsOptions {
            read_only,
            inode_cache: INODE_CACHE,
            commit_interval_ms: COMMIT_INTERVAL_MS,
        };
        let fs = Fs::open(volume.clone(), slices.clone(), fs_options).map_err(|cause| {
            OpenError::Fs {
                volume: path.clone(),
                cause,
            }
        })?;
        // Who owns the volume may look into its cache.
        let owner = std::fs::metadata(&path).map_or_else(
            |_| jericho_sys::process::effective_uid(),
            |metadata| std::os::unix::fs::MetadataExt::uid(&metadata),
        );
        let fast = Fast::new("volume", owner, &slices, &homes, topology)
            .map_err(OpenError::SharedMemory)?;
        fast.set_thread_policy(options.threads);
        let topology = options.topology.clone();
        Ok(Mounted::assemble(
            path,
            read_only,
            options.threads,
            topology,
            volume,
            homes,
            slices,
            fs,
            fast,
            lock,
        ))
    }
}

/// Frames of each slice.
fn frames_per_slice(cache_bytes: Option<u64>, slices: usize) -> Result<u32, OpenError> {
    let memory = Memory::read()
        .map_err(OpenError::MemorySize)?
        .usable_bytes();
    let needed = slices as u64 * u64::from(FRAMES_MIN) * PAGE_BYTES;
    let default = (memory / 8).min(CACHE_BYTES_DEFAULT_MAX).max(needed);
    let given = cache_bytes.unwrap_or(default);
    if given < needed {
        return Err(OpenError::CacheTooSmall {
            given,
            slices,
            needed,
        });
    }
    if given.saturating_add(HEADROOM_BYTES) > memory {
        return Err(OpenError::CacheTooLarge { given, memory });
    }
    let frames = given / PAGE_BYTES / slices as u64;
    Ok(frames.min(u64::from(jericho_shm::State::FRAMES_MAX)) as u32)
}

/// Home node of each slice: that of its device, where the devices of the volume are on several nodes; otherwise
/// the nodes in turn, so that every node's memory and CPUs have a share.
fn homes(volume: &Volume, topology: &Topology) -> Vec<NodeId> {
    let of_device = |device: u16| {
        let name = volume.devices()[usize::from(device)].name();
        topology.node_of_block_device(Path::new(&*name))
    };
    let known: Vec<Option<NodeId>> = volume
        .slices()
        .iter()
        .map(|s| of_device(s.device()))
        .collect();
    let distinct: BTreeSet<NodeId> = known.iter().flatten().copied().collect();
    let nodes: Vec<NodeId> = topology.nodes.iter().map(|node| node.id).collect();
    let turn = |slice: usize| nodes[slice % nodes.len()];
    let homes = known.iter().enumerate();
    homes
        .map(|(i, node)| node.filter(|_| distinct.len() > 1).unwrap_or(turn(i)))
        .collect()
}
