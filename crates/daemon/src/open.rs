//! Opens a volume: takes the lock, opens the devices, assigns homes to the slices, allocates their memory, opens the filesystem.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jericho_cache::{Config, FRAMES_MIN, Slice, StartError};
use jericho_format::PAGE_BYTES;
use jericho_format::threads::ThreadPolicy;
use jericho_fs::types::SliceId;
use jericho_fs::{Fs, FsOptions};
use jericho_sys::limits::Memory;
use jericho_topology::{NodeId, Topology};
use jericho_volume::{OpenMode, Volume, VolumeError, VolumeLock};

use crate::fast::{Fast, KeeperCommand, Trusted};
use crate::mounted::Mounted;
use crate::move_costs::MoveCosts;
use crate::outage::Outages;
use crate::spill::{Plan, Spiller};
use crate::volume::OpenVolume;

/// Age at which dirty pages are written back.
const DIRTY_AGE: Duration = Duration::from_secs(5);
/// Longest time until a change of the namespace is durable.
const COMMIT_INTERVAL_MS: u64 = 2000;
/// Most inodes kept in memory beyond those in use, and the memory budgeted for each.
const INODE_CACHE_MAX: u64 = 65_536;
const INODE_BYTES: u64 = 1 << 10;
/// Most memory for all metadata stores together. Half of it is for pages of redb.
const STORE_CACHE_BYTES_MAX: u64 = 64 << 20;
/// Memory kept free for the rest of the daemon: a quarter of what it may use, within these bounds. The lower bound is
/// twice what a daemon with small inode and store caches was measured to need.
const REST_BYTES: std::ops::RangeInclusive<u64> = 32 << 20..=256 << 20;
/// Most memory for the cache when the user has set no size.
const CACHE_BYTES_DEFAULT_MAX: u64 = 1 << 30;

/// How a volume is opened.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// The volume's first device.
    pub volume: PathBuf,
    /// Where to look for the other devices, in addition to the default places.
    pub devices: Vec<PathBuf>,
    /// The volume is opened read-only.
    pub read_only: bool,
    /// Opens the volume even if another machine has not unmounted it, or if a second use of a loop device's file could not be
    /// detected.
    pub force: bool,
    /// Bytes of cache frames over all slices. `None`: an eighth of the memory, at most 1 GiB.
    pub cache_bytes: Option<u64>,
    /// Most bytes of these that each slice may have on other nodes, while its own node is short of memory. 0: none.
    pub spill_bytes: u64,
    /// The nodes in use.
    pub topology: Topology,
    /// The policy for migrating threads, for files and directories without their own.
    pub threads: ThreadPolicy,
    /// The companions of threads that access their data through the kernel migrate with them: the other threads of the process, and its parent process.
    pub with_parent: bool,
    /// What moves of threads cost, for the policy *adaptive*.
    pub move_costs: MoveCosts,
    /// Users that are trusted with the whole cache, in addition to the volume's owner and this process's user.
    pub fast_path: Trusted,
    /// Starts the process that ends inline access when this process has ended. With `None`, programs continue to read cached
    /// pages after this process dies.
    pub keeper: Option<KeeperCommand>,
}

/// Why a volume could not be opened. Each message names the thing and what to do.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The volume's devices could not be opened.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// The cache is smaller than its slices need.
    #[error(
        "a cache of {given} bytes is too small for {slices} slices: give at least --cache {needed}"
    )]
    CacheTooSmall {
        /// Requested size.
        given: u64,
        /// Slices of the volume.
        slices: usize,
        /// Smallest size.
        needed: u64,
    },
    /// The cache is larger than the memory allows.
    #[error(
        "a cache of {} MiB does not fit: {whose} has {} MiB of memory, of which {} are kept for the rest of the daemon; give at most --cache {}M",
        .given >> 20, .memory >> 20, .rest >> 20, .most >> 20
    )]
    CacheTooLarge {
        /// Requested size.
        given: u64,
        /// The machine or the control group that limits `memory`.
        whose: String,
        /// Memory.
        memory: u64,
        /// The part of `memory` that is not for the cache.
        rest: u64,
        /// Largest cache.
        most: u64,
    },
    /// The memory is too small even for the smallest cache.
    #[error(
        "{whose} has {} MiB of memory, and a volume of {slices} slices needs at least {}: allow it more",
        .memory >> 20, needed.div_ceil(1 << 20)
    )]
    MemoryTooSmall {
        /// The machine or the control group that limits `memory`.
        whose: String,
        /// Available memory.
        memory: u64,
        /// Slices of the volume.
        slices: usize,
        /// Smallest sufficient memory.
        needed: u64,
    },
    /// The kernel does not report how much memory there is.
    #[error("cannot read how much memory this machine has: {0}; is /proc mounted?")]
    MemorySize(std::io::Error),
    /// A slice could not be started.
    #[error(transparent)]
    Slice(#[from] StartError),
    /// The segments that programs on the fast path map could not be created.
    #[error(
        "cannot create the shared memory for programs: {0}; is the limit of open files high enough?"
    )]
    SharedMemory(std::io::Error),
    /// The process that ends programs' access to the cache after the daemon's death could not be started.
    #[error(
        "cannot start the keeper of the shared memory: {0}; is the limit of processes or of open files reached?"
    )]
    Keeper(std::io::Error),
    /// The thread that takes memory on other nodes could not be started.
    #[error("cannot start the thread for --spill: {0}; is the limit of processes reached?")]
    Spill(std::io::Error),
    /// The filesystem could not be opened.
    #[error("cannot open the filesystem of {volume}: {cause}")]
    Fs {
        /// The volume.
        volume: PathBuf,
        /// The cause.
        cause: jericho_fs::Error,
    },
}

impl Mounted {
    /// Locks the volume, opens its devices, allocates the slices' memory, and opens the filesystem.
    pub fn open(options: OpenOptions) -> Result<Arc<Mounted>, OpenError> {
        let path = std::fs::canonicalize(&options.volume).unwrap_or(options.volume.clone());
        let mode = OpenMode {
            read_only: options.read_only,
            force: options.force,
        };
        let mut lock = Volume::lock(&path, mode)?;
        let volume = Volume::open_among(&path, &options.devices, mode)?;
        lock.cover(&volume)?;
        Mounted::start(Arc::new(volume), path, Some(lock), &options)
    }

    /// Does the same as `open` for a volume that the caller has opened, and locked if others could open it too.
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
        let memory = Memory::read().map_err(OpenError::MemorySize)?;
        let frames = frames_per_slice(options.cache_bytes, volume.slices().len(), &memory)?;
        let homes = homes(&volume, topology);
        let mut slices = vec![];
        let mut plan = Plan::new(topology, options.spill_bytes, &homes);
        let outages = Outages::new(&path);
        for (slice, home) in volume.slices().iter().zip(&homes) {
            let divided = plan.divide(frames, *home);
            if divided.0 < frames {
                tell_shortage(slice.id, *home, frames, divided);
            }
            let cache = start_cache(&volume, (slice.id, divided, *home), topology)?;
            outages.watch(&cache);
            slices.push(cache);
        }
        let read_only = options.read_only;
        let fs_options = FsOptions {
            read_only,
            inode_cache: (rest_bytes(&memory) / 4 / INODE_BYTES).min(INODE_CACHE_MAX) as usize,
            store_cache_bytes: (rest_bytes(&memory) / 4).min(STORE_CACHE_BYTES_MAX) as usize,
            commit_interval_ms: COMMIT_INTERVAL_MS,
        };
        let fs = Fs::open(volume.clone(), slices.clone(), fs_options).map_err(|cause| {
            OpenError::Fs {
                volume: path.clone(),
                cause,
            }
        })?;
        // The volume's owner may access its cache.
        let owner = std::fs::metadata(&path).map_or_else(
            |_| jericho_sys::process::effective_uid(),
            |metadata| std::os::unix::fs::MetadataExt::uid(&metadata),
        );
        let mut trusted = options.fast_path.clone();
        trusted.add_uid(owner);
        trusted.add_uid(jericho_sys::process::effective_uid());
        let volume = Arc::new(OpenVolume {
            path,
            read_only,
            threads: options.threads,
            with_parent: options.with_parent,
            move_costs: options.move_costs.clone(),
            topology: options.topology.clone(),
            devices: volume,
            homes: homes.into_iter().collect(),
            slices: slices.into_iter().collect(),
            outages,
            fs,
            added: Default::default(),
            _lock: lock,
        });
        let fast = Fast::new(volume.clone(), trusted, options.keeper);
        let fast = Arc::new(fast.map_err(OpenError::SharedMemory)?);
        fast.start_keeper().map_err(OpenError::Keeper)?;
        fast.set_thread_policy(options.threads);
        fast.set_move_costs(&options.move_costs);
        let slices = volume.slices.iter().cloned();
        let spiller = Spiller::start(slices.zip(volume.homes.iter().copied()), &volume.topology);
        let spiller = spiller.map_err(OpenError::Spill)?;
        Ok(Mounted::new(volume, fast, spiller))
    }
}

/// Logs that a slice does not get all its frames on its home node: (there, at most elsewhere).
fn tell_shortage(slice: SliceId, home: NodeId, promised: u32, divided: (u32, u32)) {
    let [promised, at_home, elsewhere] =
        [promised, divided.0, divided.1].map(|frames| (u64::from(frames) * PAGE_BYTES) >> 20);
    tracing::info!(
        "slice {slice}: node {home} has room for {at_home} MiB of the {promised} MiB of its cache; up to {elsewhere} MiB come from other \
         nodes while they have plenty"
    );
}

/// Starts the cache of a slice: its id, its frames (on its home node, and at most elsewhere) and its home.
pub(crate) fn start_cache(
    volume: &Volume,
    (id, (frames, spill_frames), home): (SliceId, (u32, u32), NodeId),
    topology: &Topology,
) -> Result<Arc<Slice>, StartError> {
    let config = Config {
        id,
        frames,
        kernel_node: topology.node(home).and_then(|node| node.kernel_node),
        cpus: topology.cpus_of(home).to_vec(),
        dirty_age: DIRTY_AGE,
    };
    Slice::start_spilling(&config, spill_frames, volume.device_list())
}

/// Returns the memory that is not for the cache.
pub(crate) fn rest_bytes(memory: &Memory) -> u64 {
    (memory.usable_bytes() / 4).clamp(*REST_BYTES.start(), *REST_BYTES.end())
}

/// Returns the number of frames of each slice.
fn frames_per_slice(
    cache_bytes: Option<u64>,
    slices: usize,
    memory: &Memory,
) -> Result<u32, OpenError> {
    let least = slices as u64 * u64::from(FRAMES_MIN) * PAGE_BYTES;
    let rest = rest_bytes(memory);
    let memory_bytes = memory.usable_bytes();
    let most = memory_bytes.saturating_sub(rest);
    if most < least {
        return Err(OpenError::MemoryTooSmall {
            whose: memory.whose(),
            memory: memory_bytes,
            slices,
            needed: (least + REST_BYTES.start())
                .max((least * 4).div_ceil(3).min(least + REST_BYTES.end())),
        });
    }
    let default = (memory_bytes / 8)
        .min(CACHE_BYTES_DEFAULT_MAX)
        .clamp(least, most);
    let given = cache_bytes.unwrap_or(default);
    if given < least {
        return Err(OpenError::CacheTooSmall {
            given,
            slices,
            needed: least,
        });
    }
    if given > most {
        return Err(OpenError::CacheTooLarge {
            given,
            whose: memory.whose(),
            memory: memory_bytes,
            rest,
            most,
        });
    }
    let frames = given / PAGE_BYTES / slices as u64;
    Ok(frames.min(u64::from(jericho_shm::PageState::FRAMES_MAX)) as u32)
}

/// Returns the home node of each slice. If the volume's devices are on several nodes, a slice is at home on the node of its
/// device. Otherwise the slices are assigned to the nodes in turn, so that every node's memory and CPUs are used.
pub(crate) fn homes(volume: &Volume, topology: &Topology) -> Vec<NodeId> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use jericho_sys::limits::GroupLimit;

    fn machine(limit: Option<u64>) -> Memory {
        Memory {
            total_bytes: 8 << 30,
            available_bytes: 8 << 30,
            limit: limit.map(|bytes| GroupLimit {
                bytes,
                file: "/group/memory.max".into(),
            }),
            group_available_bytes: limit,
        }
    }

    #[test]
    fn a_size_that_a_message_suggests_is_enough() {
        for slices in [1, 2, 7, 32, 200] {
            for mib in 8..2000 {
                let limited = |bytes| frames_per_slice(None, slices, &machine(Some(bytes)));
                match limited(mib << 20) {
                    Err(OpenError::MemoryTooSmall { needed, .. }) => {
                        assert!(needed > mib << 20);
                        limited(needed).unwrap();
                    }
                    other => drop(other.unwrap()),
                }
                let asked = frames_per_slice(Some(1 << 30), slices, &machine(Some(mib << 20)));
                if let Err(OpenError::CacheTooLarge { most, .. }) = asked {
                    frames_per_slice(Some(most), slices, &machine(Some(mib << 20))).unwrap();
                }
            }
        }
    }

    #[test]
    fn the_limit_is_named_by_its_file() {
        let error = frames_per_slice(None, 8, &machine(Some(48 << 20))).unwrap_err();
        assert!(error.to_string().contains("/group/memory.max"), "{error}");
        frames_per_slice(None, 8, &machine(None)).unwrap();
    }
}
