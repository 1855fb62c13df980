//! The results of `jericho stat` and `jericho where`.

use std::collections::BTreeMap;

use jericho_cache::Counters;
use jericho_format::PAGE_BYTES;
use jericho_fs::types::{Ino, SliceId};
use jericho_fs::{Result, ScrubStatus};
use jericho_storage::NetworkStat;
use serde::{Deserialize, Serialize};

use crate::counters::MountCounters;
use crate::fast::ClientStat;
use crate::locality::Locality;
use crate::mounted::Mounted;

/// Most characters of a reason in `Stat`: all pages of it must fit into attributes.
const FAILURE_BYTES_MAX: usize = 300;

/// The result of `jericho stat --json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Stat {
    /// Absolute path of the volume.
    pub volume: String,
    /// UUID of the volume.
    pub uuid: String,
    /// Process id of the daemon.
    pub pid: u32,
    /// The volume is mounted read-only.
    pub read_only: bool,
    /// Nodes of the topology in use.
    pub topology: String,
    /// How the kernel sends requests: `device` or `ring`. Empty for a volume without a mount.
    #[serde(default)]
    pub transport: String,
    /// Build of the daemon: the build id of its program. Empty if it has none.
    #[serde(default)]
    pub build: String,
    /// All slices.
    pub slices: Vec<SliceStat>,
    /// All nodes, with the sums over their slices.
    pub nodes: Vec<NodeStat>,
    /// One line per device.
    pub devices: Vec<String>,
    /// Sum over all slices.
    pub locality: Locality,
    /// The policy for migrating threads, for files and directories without their own.
    pub threads: String,
    /// The companions of threads migrate with them.
    #[serde(default)]
    pub with_parent: bool,
    /// Threads that work on other nodes than their data at present, because the CPUs of their data's nodes are busy.
    #[serde(default)]
    pub threads_away: u64,
    /// Where the costs of moves of threads come from: `defaults`, `probe of DATE`, or `defaults` and why a report is not used.
    #[serde(default)]
    pub move_costs: String,
    /// Counters that belong to no slice.
    #[serde(flatten)]
    pub counters: MountCounters,
    /// The programs on the fast path.
    pub clients: Vec<ClientStat>,
    /// The reads of all data in the background. `None` on a volume without checksums, or one that is mounted for reading.
    #[serde(default)]
    pub scrub: Option<ScrubStat>,
    /// The networks of devices of other hosts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub network: Vec<NetworkStat>,
}

/// The reads of all data in the background in `Stat`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubStat {
    /// Bytes that are read in a second; 0: none.
    pub bytes_per_s: u64,
    /// A pass is in progress, or waits for a rate.
    pub in_pass: bool,
    /// Damaged or unreadable pages that the pass in progress has found so far.
    pub found: u64,
    /// The end of the last whole pass, in seconds since the epoch.
    pub last_ended_s: Option<u64>,
    /// Damaged or unreadable pages that it has found.
    pub last_found: u64,
}

impl From<ScrubStatus> for ScrubStat {
    fn from(status: ScrubStatus) -> ScrubStat {
        ScrubStat {
            bytes_per_s: status.bytes_per_s,
            in_pass: status.is_in_pass,
            found: status.found,
            last_ended_s: status.last_ended_s,
            last_found: status.last_found,
        }
    }
}

/// Frames of a slice on a node that is not its home, or that its home has given it since the mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // as below
pub struct SpilledStat {
    pub node: u16,
    pub frames: u64,
}

/// A slice in `Stat`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[allow(missing_docs)] // the names are the contract; see the manual page
pub struct SliceStat {
    pub id: u16,
    pub node: u16,
    pub capacity_bytes: u64,
    pub used_bytes: u64,
    pub frames: u64,
    pub resident: u64,
    pub dirty: u64,
    /// Those of `frames` that the slice has had since the mount. `None`: an older daemon does not tell.
    #[serde(default)]
    pub home_frames: Option<u64>,
    /// Where those of `frames` are that the slice took after the mount.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spilled: Vec<SpilledStat>,
    #[serde(flatten)]
    pub counters: Counters,
    pub locality: Locality,
    /// Why the slice takes no changes until the next mount, or until its host answers. `None`: it takes them, as far as the mount does.
    #[serde(default)]
    pub refuses_changes: Option<String>,
    /// The slice takes changes again, without a mount, when its host answers.
    #[serde(default)]
    pub waits_for_host: bool,
    /// A device of the slice is missing, so its files cannot be read either.
    #[serde(default)]
    pub absent: bool,
}

/// A node in `Stat`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct NodeStat {
    pub node: u16,
    pub frames: u64,
    pub resident: u64,
    pub dirty: u64,
    /// Frames that slices of other nodes have on this node.
    #[serde(default)]
    pub lent_frames: u64,
    #[serde(flatten)]
    pub counters: Counters,
    pub locality: Locality,
}

/// The result of `jericho where --json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Where {
    /// Slice that caches and stores the file, or that takes new files of the directory.
    pub slice: SliceId,
    /// Home node of that slice.
    pub home_node: u16,
    /// Size of the file.
    pub size_bytes: u64,
    /// Cached bytes by the kernel's node, as move_pages(2) reports them.
    pub resident_bytes_by_kernel_node: Vec<(u32, u64)>,
    /// Cached bytes.
    pub resident_bytes: u64,
    /// Cached bytes that are newer than those on the device.
    pub dirty_bytes: u64,
    /// Bytes on the volume, by slice.
    pub stored_bytes_by_slice: Vec<(SliceId, u64)>,
}

/// Adds frames that nodes lend a slice, as (node, frames).
fn count_lent(nodes: &mut BTreeMap<u16, NodeStat>, lent: Vec<(u16, u64)>) {
    for (node, frames) in lent {
        let lender = NodeStat {
            node,
            ..NodeStat::default()
        };
        nodes.entry(node).or_insert(lender).lent_frames += frames;
    }
}

impl Stat {
    /// Returns the size of the cache, without the memory that slices have taken since the mount and may give back. `None`: an older daemon does not tell.
    pub fn cache_bytes(&self) -> Option<u64> {
        let frames: Option<u64> = self.slices.iter().map(|slice| slice.home_frames).sum();
        Some(frames?.saturating_mul(PAGE_BYTES))
    }
}

impl Mounted {
    /// Returns the counters for `jericho stat`.
    pub fn stat(&self) -> Stat {
        let mut nodes: BTreeMap<u16, NodeStat> = BTreeMap::new();
        let mut slices = vec![];
        let mut all = Locality::default();
        for slice in self.volume.slices.iter() {
            let (id, usage) = (slice.id(), slice.usage());
            let node = self.node_of_slice(id).0;
            let inline = self.client_pages(id);
            // Programs count their inline hits themselves, and may store any number.
            let mut counters = slice.counters();
            let inline_hits = inline.0.saturating_add(inline.1);
            counters.hits = counters.hits.saturating_add(inline_hits);
            let mount = self.locality.of(id);
            let locality = Locality::new(mount.0, mount.1).and(Locality::new(inline.0, inline.1));
            all = all.and(locality);
            let of_node = nodes.entry(node).or_insert(NodeStat {
                node,
                ..NodeStat::default()
            });
            of_node.frames += usage.frames;
            of_node.resident += usage.resident;
            of_node.dirty += usage.dirty;
            of_node.counters = of_node.counters.and(counters);
            of_node.locality = of_node.locality.and(locality);
            let spilled = self.spilled_of(id);
            count_lent(&mut nodes, self.spiller.lent_to(id));
            let (capacity, free) = self.fs().space_of(id);
            slices.push(SliceStat {
                id,
                node,
                capacity_bytes: capacity * PAGE_BYTES,
                used_bytes: (capacity - free) * PAGE_BYTES,
                frames: usage.frames,
                resident: usage.resident,
                dirty: usage.dirty,
                home_frames: Some(usage.frames - usage.spilled),
                spilled,
                counters,
                locality,
                refuses_changes: self.failure_of(id),
                waits_for_host: self.waits_for_host(id),
                absent: self.missing_of(id).is_some(),
            });
        }
        Stat {
            volume: self.volume.path.display().to_string(),
            uuid: self
                .volume
                .devices
                .uuid()
                .iter()
                .map(|b| format!("{b:02x}"))
                .collect(),
            pid: std::process::id(),
            read_only: self.read_only(),
            topology: self.topology().source.clone(),
            transport: String::new(),
            build: jericho_sys::build_id::build_id().unwrap_or_default(),
            slices,
            nodes: nodes.into_values().collect(),
            devices: self
                .volume
                .devices
                .devices()
                .iter()
                .map(|d| d.describe())
                .collect(),
            locality: all,
            threads: self.threads().to_string(),
            with_parent: self.volume.with_parent,
            threads_away: self.migrator.count_away() + self.fast.clients_away(),
            move_costs: format!("{:.FAILURE_BYTES_MAX$}", self.volume.move_costs.origin),
            counters: self.fast.counts().values(),
            clients: self.client_counters(),
            scrub: self.fs().scrub_status().map(ScrubStat::from),
            network: (self.volume.devices.devices().iter())
                .filter_map(|device| device.network())
                .collect(),
        }
    }

    /// Returns where a slice has the frames that it took after the mount.
    fn spilled_of(&self, slice: SliceId) -> Vec<SpilledStat> {
        let frames = self.spiller.frames_of(slice).into_iter();
        frames
            .map(|(node, frames)| SpilledStat { node, frames })
            .collect()
    }

    /// Returns which device of a slice is missing, if one is.
    fn missing_of(&self, slice: SliceId) -> Option<String> {
        let volume = &self.volume.devices;
        let space = volume.slices().get(usize::from(slice))?;
        let name = volume.missing_of(space)?.name();
        let mut devices = volume.devices().iter();
        let index = devices.position(|device| device.name() == name)?;
        Some(format!("device {index} ({name}) is missing"))
    }

    /// Returns whether a slice takes changes again when its host answers.
    fn waits_for_host(&self, slice: SliceId) -> bool {
        let failure = self.fs().failure_of(slice);
        failure.is_some_and(|failure| failure.is_unreachable())
    }

    /// Returns why a slice takes no changes until the next mount, or until its host answers; `None` if it takes them.
    fn failure_of(&self, slice: SliceId) -> Option<String> {
        let failed = || self.fs().failure_of(slice).map(|error| error.to_string());
        let reason = self.missing_of(slice).or_else(failed)?;
        Some(format!("{reason:.FAILURE_BYTES_MAX$}"))
    }

    /// Returns the slices that take no changes until the next mount: a line for each reason, with what it means. A mount that has just begun has such
    /// slices if a device is missing.
    pub fn warnings(&self) -> Vec<String> {
        let mut by_reason: BTreeMap<(String, bool), Vec<String>> = BTreeMap::new();
        for slice in 0..self.slice_count() {
            if let Some(reason) = self.failure_of(slice) {
                let is_absent = self.missing_of(slice).is_some();
                if self.waits_for_host(slice) {
                    continue;
                }
                let slices = by_reason.entry((reason, is_absent)).or_default();
                slices.push(slice.to_string());
            }
        }
        let line = |((reason, is_absent), slices): ((String, bool), Vec<String>)| {
            let what = if slices.len() == 1 { "slice" } else { "slices" };
            let slices = slices.join(", ");
            match is_absent {
                true => format!(
                    "{reason}: {what} {slices} cannot be used, and files there fail with ENODEV, until the volume is mounted with the device \
                     (--device PATH, if it is at another place), or until its host answers, if it is a device of another host"
                ),
                false => format!("{reason}: no changes of {what} {slices} until the next mount"),
            }
        };
        by_reason.into_iter().map(line).collect()
    }

    /// Returns the placement of an inode for `jericho where`.
    pub fn where_is(&self, ino: Ino) -> Result<Where> {
        let attr = self.getattr(ino)?;
        let (slice, _) = self.fs().placement(ino)?;
        let mut answer = Where {
            slice,
            home_node: self.node_of_slice(slice).0,
            size_bytes: attr.size,
            resident_bytes_by_kernel_node: vec![],
            resident_bytes: 0,
            dirty_bytes: 0,
            stored_bytes_by_slice: vec![],
        };
        if attr.kind != jericho_fs::types::Kind::File {
            return Ok(answer);
        }
        let mut by_node: BTreeMap<u32, u64> = BTreeMap::new();
        let pages = 0..attr.size.div_ceil(PAGE_BYTES);
        let object = self.fs().file(ino)?.object_id();
        for page in self.slice(slice).resident_of(object, pages) {
            answer.resident_bytes += PAGE_BYTES;
            answer.dirty_bytes += if page.dirty { PAGE_BYTES } else { 0 };
            if let Some(node) = page.kernel_node {
                *by_node.entry(node).or_default() += PAGE_BYTES;
            }
        }
        answer.resident_bytes_by_kernel_node = by_node.into_iter().collect();
        answer.stored_bytes_by_slice = self.fs().blocks_by_slice(ino)?;
        answer
            .stored_bytes_by_slice
            .iter_mut()
            .for_each(|(_, blocks)| *blocks *= PAGE_BYTES);
        Ok(answer)
    }
}
