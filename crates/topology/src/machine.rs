//! The machine as the kernel reports it: its NUMA nodes.
//!
//! Only this module applies two limits of the process. A CPU outside of its affinity is never assigned. The memory of a node
//! outside of its cpuset (`Mems_allowed`) counts as absent, because binding memory to the node would fail.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::TopologyError;
use crate::list::{NUMBER_MAX, parse_list};

/// ACPI distance of a node to itself.
pub(crate) const DISTANCE_LOCAL: u32 = 10;
/// Distance to another node if it is unknown; kernels assume the same.
pub(crate) const DISTANCE_REMOTE: u32 = 20;

/// An online NUMA node of the kernel.
#[derive(Clone, Debug)]
pub(crate) struct KernelNode {
    /// The kernel's number of the node. Numbers may have holes.
    pub(crate) id: u32,
    /// Its online CPUs, ascending.
    pub(crate) cpus_online: Vec<u32>,
    /// The CPUs of `cpus_online` that this process may run on.
    pub(crate) cpus: Vec<u32>,
    /// Its memory; 0 if it has none or this process may not use it.
    pub(crate) memory_bytes: u64,
    /// Distances to all online nodes, in their order.
    pub(crate) distances: Vec<u32>,
}

/// The machine as this process may use it.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    /// The directory that contains `sys` and `proc`: `/`, or a fake tree in tests.
    pub(crate) root: PathBuf,
    /// Online nodes, ascending. Never empty.
    pub(crate) nodes: Vec<KernelNode>,
    /// Whether the kernel supports nodes. Without that, memory cannot be bound.
    pub(crate) is_numa: bool,
}

impl Machine {
    /// Reads the machine below `root` for a process that may run on the CPUs in `affinity`.
    pub(crate) fn read(root: &Path, affinity: &[u32]) -> Result<Machine, TopologyError> {
        let affinity: BTreeSet<u32> = affinity.iter().copied().collect();
        let node_dir = root.join("sys/devices/system/node");
        let is_numa = node_dir.join("online").exists();
        let mut nodes = match is_numa {
            true => read_nodes(root, &node_dir, &affinity)?,
            false => vec![whole_machine(root, &affinity)?],
        };
        // Some containers show nodes with blank CPU lists. The affinity is always right.
        if nodes.iter().all(|node| node.cpus.is_empty()) {
            nodes[0].cpus = usable_cpus(root, &affinity)?;
            nodes[0].cpus_online = nodes[0].cpus.clone();
            if nodes[0].cpus.is_empty() {
                return Err(TopologyError::NoCpus);
            }
        }
        Ok(Machine {
            root: root.to_path_buf(),
            nodes,
            is_numa,
        })
    }

    /// Returns the position in `nodes` of the node whose memory is nearest to node `from`: `from` itself if it has memory; `None`
    /// if no node has usable memory.
    pub(crate) fn memory_home(&self, from: usize) -> Option<usize> {
        nearest(from, &self.nodes[from].distances, |to| {
            self.nodes[to].memory_bytes > 0
        })
    }

    /// Returns the positions in `nodes` of the nodes with usable memory.
    pub(crate) fn memory_nodes(&self) -> Vec<usize> {
        (0..self.nodes.len())
            .filter(|&at| self.nodes[at].memory_bytes > 0)
            .collect()
    }

    /// Returns the kernel's number of the node at this position, to bind memory to. Returns `None` if memory cannot be bound.
    pub(crate) fn bindable(&self, at: usize) -> Option<u32> {
        self.is_numa.then(|| self.nodes[at].id)
    }
}

/// Returns the eligible node nearest to `from` by its row of distances: `from` itself if eligible, the lower one of two equally
/// near nodes.
pub(crate) fn nearest(
    from: usize,
    distances: &[u32],
    is_eligible: impl Fn(usize) -> bool,
) -> Option<usize> {
    (0..distances.len())
        .filter(|&to| is_eligible(to))
        .min_by_key(|&to| (to != from, distances[to]))
}

/// Returns the CPUs that this process may run on. Asks for the main thread's, so a worker that pinned itself gets the same
/// answer.
pub(crate) fn process_affinity() -> Result<Vec<u32>, TopologyError> {
    use rustix::thread::{CpuSet, sched_getaffinity};
    match sched_getaffinity(Some(rustix::process::getpid())) {
        Ok(set) => {
            let cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu));
            Ok(cpus.map(|cpu| cpu as u32).collect())
        }
        // The kernel has more CPUs than the fixed set can hold. The text has no such limit.
        Err(rustix::io::Errno::INVAL) => status_list(Path::new("/"), "Cpus_allowed_list:")?
            .ok_or_else(|| TopologyError::Affinity {
                source: rustix::io::Errno::INVAL.into(),
            }),
        Err(errno) => Err(TopologyError::Affinity {
            source: errno.into(),
        }),
    }
}

fn read_nodes(
    root: &Path,
    node_dir: &Path,
    affinity: &BTreeSet<u32>,
) -> Result<Vec<KernelNode>, TopologyError> {
    let online_path = node_dir.join("online");
    let online = read_list(&online_path)?.unwrap_or_default();
    if online.is_empty() {
        return Err(not_understood(
            &online_path,
            "at least one node, such as `0`",
            "",
        ));
    }
    let has_memory = read_list(&node_dir.join("has_memory"))?;
    let mems_allowed = status_list(root, "Mems_allowed_list:")?;
    let is_in = |list: &Option<Vec<u32>>, id| list.as_ref().is_none_or(|list| list.contains(&id));

    let mut nodes = Vec::with_capacity(online.len());
    for (at, &id) in online.iter().enumerate() {
        let dir = node_dir.join(format!("node{id}"));
        let cpus_online = read_list(&dir.join("cpulist"))?.unwrap_or_default();
        let cpus = cpus_online
            .iter()
            .copied()
            .filter(|cpu| affinity.contains(cpu))
            .collect();
        let memory_bytes = match is_in(&has_memory, id) && is_in(&mems_allowed, id) {
            true => read_memory(&dir.join("meminfo"))?,
            false => 0,
        };
        let distances = read_distances(&dir.join("distance"), at, online.len())?;
        nodes.push(KernelNode {
            id,
            cpus_online,
            cpus,
            memory_bytes,
            distances,
        });
    }
    Ok(nodes)
}

/// Returns one node with everything, for a kernel without NUMA.
fn whole_machine(root: &Path, affinity: &BTreeSet<u32>) -> Result<KernelNode, TopologyError> {
    let cpus = usable_cpus(root, affinity)?;
    let online = read_list(&root.join("sys/devices/system/cpu/online"))?;
    Ok(KernelNode {
        id: 0,
        cpus_online: online.unwrap_or_else(|| cpus.clone()),
        cpus,
        memory_bytes: read_memory(&root.join("proc/meminfo"))?,
        distances: vec![DISTANCE_LOCAL],
    })
}

/// Returns the affinity without CPUs that are known to be offline.
fn usable_cpus(root: &Path, affinity: &BTreeSet<u32>) -> Result<Vec<u32>, TopologyError> {
    let online = read_list(&root.join("sys/devices/system/cpu/online"))?;
    let is_online = |cpu: &u32| online.as_ref().is_none_or(|online| online.contains(cpu));
    Ok(affinity.iter().copied().filter(is_online).collect())
}

/// Returns the number of bytes after `MemTotal:`, which the kernel writes in KiB; 0 if the file is missing.
fn read_memory(path: &Path) -> Result<u64, TopologyError> {
    let Some(text) = read_optional(path)? else {
        return Ok(0);
    };
    let total_kib = text.lines().find_map(|line| {
        let (_, rest) = line.split_once("MemTotal:")?;
        rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    });
    let total = total_kib.and_then(|kib| kib.checked_mul(1024));
    total.ok_or_else(|| not_understood(path, "a line `MemTotal: N kB`", &text))
}

/// Reads a row of the distance matrix: one number for each of `count` online nodes.
fn read_distances(path: &Path, at: usize, count: usize) -> Result<Vec<u32>, TopologyError> {
    let Some(text) = read_optional(path)? else {
        return Ok(default_distances(at, count));
    };
    let row: Result<Vec<u32>, _> = text.split_whitespace().map(str::parse).collect();
    match row {
        Ok(row) if row.len() == count => Ok(row),
        _ => Err(not_understood(path, &format!("{count} distances"), &text)),
    }
}

/// Returns the row of node `at` if distances are unknown: every other node is equally far.
pub(crate) fn default_distances(at: usize, count: usize) -> Vec<u32> {
    let distance = |to| {
        if to == at {
            DISTANCE_LOCAL
        } else {
            DISTANCE_REMOTE
        }
    };
    (0..count).map(distance).collect()
}

/// Returns the list after `key` in `/proc/self/status`; `None` if there is none, which means no limit.
fn status_list(root: &Path, key: &str) -> Result<Option<Vec<u32>>, TopologyError> {
    let path = root.join("proc/self/status");
    let Some(text) = read_optional(&path)? else {
        return Ok(None);
    };
    let list = text.lines().find_map(|line| line.strip_prefix(key));
    list.map(|list| numbers(&path, list)).transpose()
}

/// Returns the maximum number of CPUs of this machine. The kernel has per-CPU structures for all of them. Returns 1 if the kernel
/// does not tell. Fails on a malformed list.
pub fn possible_cpus() -> Result<usize, TopologyError> {
    let cpus = read_list(Path::new("/sys/devices/system/cpu/possible"))?;
    Ok(cpus.map_or(1, |cpus| cpus.len().max(1)))
}

/// Reads the list in a file, ascending and without repetitions; `None` if there is no such file.
fn read_list(path: &Path) -> Result<Option<Vec<u32>>, TopologyError> {
    read_optional(path)?
        .map(|text| numbers(path, &text))
        .transpose()
}

fn numbers(path: &Path, text: &str) -> Result<Vec<u32>, TopologyError> {
    let text = text.trim();
    let placed = parse_list(text).map_err(|_| {
        let expected = format!("a list such as `0-3,8-11` of numbers up to {NUMBER_MAX}");
        not_understood(path, &expected, text)
    })?;
    let ascending: BTreeSet<u32> = placed.into_iter().map(|(_, number)| number).collect();
    Ok(ascending.into_iter().collect())
}

fn read_optional(path: &Path) -> Result<Option<String>, TopologyError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TopologyError::Read {
            path: path.to_path_buf(),
            source,
        }),
    }
}

fn not_understood(path: &Path, expected: &str, found: &str) -> TopologyError {
    const SHOWN_CHARS_MAX: usize = 80;
    TopologyError::Sysfs {
        path: path.to_path_buf(),
        expected: expected.to_string(),
        found: found.trim().chars().take(SHOWN_CHARS_MAX).collect(),
    }
}
