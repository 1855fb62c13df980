//! Memory of the machine, and of the control group that confines this process.

use std::io;
use std::path::{Path, PathBuf};

use rustix::mm::MlockAllFlags;
use rustix::thread::CapabilitySet;

/// Memory that this process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Memory of the machine.
    pub total_bytes: u64,
    /// Memory of the machine that can be had without swapping: free, or released on request.
    pub available_bytes: u64,
    /// Limit of the tightest control group around this process, if it is below the machine's memory.
    pub limit: Option<GroupLimit>,
}

/// A control group's memory limit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GroupLimit {
    /// The limit.
    pub bytes: u64,
    /// The file that sets it.
    pub file: PathBuf,
}

impl Memory {
    /// Reads /proc/meminfo and the control groups. Fails without /proc.
    pub fn read() -> io::Result<Memory> {
        Memory::read_at(Path::new("/"))
    }

    fn read_at(root: &Path) -> io::Result<Memory> {
        let text = std::fs::read_to_string(root.join("proc/meminfo"))?;
        let total_bytes = meminfo_bytes(&text, "MemTotal:").ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "/proc/meminfo has no MemTotal")
        })?;
        Ok(Memory {
            total_bytes,
            available_bytes: meminfo_bytes(&text, "MemAvailable:").unwrap_or(total_bytes),
            limit: group_limit(root).filter(|limit| limit.bytes < total_bytes),
        })
    }

    /// Returns the maximum that this process can ever use.
    pub fn usable_bytes(&self) -> u64 {
        self.limit
            .as_ref()
            .map_or(self.total_bytes, |limit| limit.bytes)
    }

    /// Returns what sets `usable_bytes`, for messages.
    pub fn whose(&self) -> String {
        match &self.limit {
            Some(limit) => format!("this process's control group ({})", limit.file.display()),
            None => "this machine".into(),
        }
    }
}

/// Raises this process's limit of open files to its maximum.
pub fn raise_open_files() {
    let resource = rustix::process::Resource::Nofile;
    let mut limit = rustix::process::getrlimit(resource);
    limit.current = limit.maximum;
    // Ignores a failure: the limit then shows when it is reached.
    let _ = rustix::process::setrlimit(resource, limit);
}

/// Returns how much memory of the kernel's NUMA node `node` is free or holds only cached files. Memory bound to the node can use
/// that much without swapping. Returns `None` when there is no such node, or the kernel has no nodes.
pub fn node_available_bytes(node: u32) -> Option<u64> {
    node_available_at(Path::new("/"), node)
}

fn node_available_at(root: &Path, node: u32) -> Option<u64> {
    let path = root.join(format!("sys/devices/system/node/node{node}/meminfo"));
    let text = std::fs::read_to_string(path).ok()?;
    // Every line begins with "Node 0 ".
    let prefix = format!("Node {node} ");
    let text = text.lines().filter_map(|line| line.strip_prefix(&prefix));
    let text = text.collect::<Vec<_>>().join("\n");
    let bytes = |key| meminfo_bytes(&text, key);
    let cached = ["Active(file):", "Inactive(file):", "SReclaimable:"];
    let cached: u64 = cached.into_iter().filter_map(bytes).sum();
    Some(bytes("MemFree:")?.saturating_add(cached))
}

/// Returns how many bytes of memory this process may lock (and register for I/O); `None`: no limit.
pub fn locked_memory_limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current
}

/// Keeps memory that this process touches from now on, or has touched, from being swapped out. Fails with EPERM if the process may
/// lock only a limited amount, because allocations beyond the limit would fail later.
pub fn lock_memory() -> io::Result<()> {
    let resource = rustix::process::Resource::Memlock;
    let mut limit = rustix::process::getrlimit(resource);
    let held = rustix::thread::capabilities(None)?.effective;
    if limit.current.is_some() && !held.contains(CapabilitySet::IPC_LOCK) {
        limit.current = None;
        limit.maximum = None;
        rustix::process::setrlimit(resource, limit)?;
    }
    // ONFAULT: the stacks and the unused parts of heaps take no memory.
    let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    Ok(rustix::mm::mlockall(flags)?)
}

fn meminfo_bytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.split_whitespace()
        .next()?
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

/// Returns the smallest limit from this process's group up to the root, of either cgroup version.
fn group_limit(root: &Path) -> Option<GroupLimit> {
    let groups = std::fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    groups
        .lines()
        .filter_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            let (mount, file) = match controllers {
                "" => ("sys/fs/cgroup", "memory.max"),
                list if list.split(',').any(|name| name == "memory") => {
                    ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
                }
                _ => return None,
            };
            let mount = root.join(mount);
            let mut group: PathBuf = mount.join(path.trim_start_matches('/'));
            let mut tightest: Option<GroupLimit> = None;
            loop {
                let file = group.join(file);
                let text = std::fs::read_to_string(&file).unwrap_or_default();
                // "max", or a missing file: no limit here.
                if let Ok(bytes) = text.trim().parse::<u64>() {
                    let limit = GroupLimit { bytes, file };
                    tightest = Some(tightest.map_or(limit.clone(), |other| other.min(limit)));
                }
                if group == mount || !group.pop() {
                    break tightest;
                }
            }
        })
        .min()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(cgroup: &str, limits: &[(&str, &str)]) -> (tempfile::TempDir, Memory) {
        let directory = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = directory.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write(
            "proc/meminfo",
            "MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:   600 kB\n",
        );
        write("proc/self/cgroup", cgroup);
        for (path, text) in limits {
            write(path, text);
        }
        let memory = Memory::read_at(directory.path()).unwrap();
        (directory, memory)
    }

    #[test]
    fn this_machine_has_memory() {
        let memory = Memory::read().unwrap();
        assert!(memory.usable_bytes() > 1 << 20);
        assert!(memory.available_bytes <= memory.total_bytes);
    }

    #[test]
    fn the_tightest_group_counts() {
        let limits = [
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/memory.max", "300000\n"),
        ];
        let (_directory, memory) = machine("0::/a/b\n", &limits);
        assert_eq!(
            (memory.total_bytes, memory.available_bytes),
            (1_024_000, 614_400)
        );
        assert!(
            memory.whose().contains("cgroup/a/memory.max"),
            "{}",
            memory.whose()
        );
        assert_eq!(memory.usable_bytes(), 300_000);
    }

    #[test]
    fn a_limit_above_the_machine_is_ignored_and_version_1_groups_count() {
        let limits = [
            (
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes",
                "9223372036854771712",
            ),
            ("sys/fs/cgroup/memory/y/memory.limit_in_bytes", "5000"),
        ];
        assert_eq!(machine("3:memory:/x\n0::/\n", &limits).1.limit, None);
        assert_eq!(
            machine("4:cpu:/x\n3:memory:/y\n", &limits).1.usable_bytes(),
            5000
        );
        assert_eq!(machine("", &limits).1.usable_bytes(), 1_024_000);
    }

    #[test]
    fn a_node_can_give_its_free_memory_and_its_cached_files() {
        let directory = tempfile::tempdir().unwrap();
        let node = directory.path().join("sys/devices/system/node/node3");
        std::fs::create_dir_all(&node).unwrap();
        let text = "Node 3 MemTotal:  1000 kB\nNode 3 MemFree:  100 kB\nNode 3 MemUsed: 900 kB\n\
                    Node 3 Active(file):  20 kB\nNode 3 Inactive(file): 3 kB\n\
                    Node 3 Shmem:  77 kB\nNode 3 SReclaimable:  4 kB\n";
        std::fs::write(node.join("meminfo"), text).unwrap();
        assert_eq!(node_available_at(directory.path(), 3), Some(127 * 1024));
        assert_eq!(node_available_at(directory.path(), 2), None);
    }
}
