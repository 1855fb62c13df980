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
    /// What the control groups around this process leave it: a limit, less what the group uses for more than cached files. `None`: no group has a limit.
    pub group_available_bytes: Option<u64>,
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
            group_available_bytes: group_available_bytes(root),
        })
    }

    /// Returns the maximum that this process can ever use.
    pub fn usable_bytes(&self) -> u64 {
        self.limit
            .as_ref()
            .map_or(self.total_bytes, |limit| limit.bytes)
    }

    /// Returns what this process can have now without swapping: what the machine has available, or less if a control group leaves less.
    pub fn usable_now_bytes(&self) -> u64 {
        let of_group = self.group_available_bytes.unwrap_or(u64::MAX);
        self.available_bytes.min(of_group)
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

/// Names of files of a version of control groups.
struct GroupFiles {
    /// Where the groups are.
    mount: &'static str,
    limit: &'static str,
    used: &'static str,
    /// Keys in `memory.stat` of memory that the kernel takes back when a group needs it.
    cached: [&'static str; 2],
}

const VERSION_1: GroupFiles = GroupFiles {
    mount: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: ["total_active_file", "total_inactive_file"],
};
const VERSION_2: GroupFiles = GroupFiles {
    mount: "sys/fs/cgroup",
    limit: "memory.max",
    used: "memory.current",
    cached: ["active_file", "inactive_file"],
};

/// Returns the directories from this process's groups up to the root, of either version.
fn groups(root: &Path) -> Vec<(PathBuf, &'static GroupFiles)> {
    let text = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut found = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let files = match controllers {
            "" => &VERSION_2,
            list if list.split(',').any(|name| name == "memory") => &VERSION_1,
            _ => continue,
        };
        let mount = root.join(files.mount);
        let mut group: PathBuf = mount.join(path.trim_start_matches('/'));
        loop {
            found.push((group.clone(), files));
            if group == mount || !group.pop() {
                break;
            }
        }
    }
    found
}

/// Returns a number in a file. `None` if there is no such file, or if it says "max".
fn number_in(file: &Path) -> Option<u64> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// Returns the smallest limit from this process's group up to the root.
fn group_limit(root: &Path) -> Option<GroupLimit> {
    let limit = |(group, files): (PathBuf, &GroupFiles)| {
        let file = group.join(files.limit);
        let bytes = number_in(&file)?;
        Some(GroupLimit { bytes, file })
    };
    groups(root).into_iter().filter_map(limit).min()
}

/// Returns the least that a group with a limit, from this process's up to the root, leaves.
fn group_available_bytes(root: &Path) -> Option<u64> {
    let available = |(group, files): (PathBuf, &GroupFiles)| {
        let limit = number_in(&group.join(files.limit))?;
        let used = number_in(&group.join(files.used)).unwrap_or(0);
        let stat = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        let cached = stat.lines().filter_map(|line| {
            let (key, bytes) = line.split_once(' ')?;
            let bytes: u64 = bytes.parse().ok()?;
            files.cached.contains(&key).then_some(bytes)
        });
        let cached = cached.fold(0, u64::saturating_add);
        Some(limit.saturating_sub(used.saturating_sub(cached)))
    };
    groups(root).into_iter().filter_map(available).min()
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
    fn a_group_leaves_its_limit_less_what_it_uses_for_more_than_cached_files() {
        let stat = "anon 40000\nactive_file 3000\ninactive_file 7000\nkernel 5\n";
        let limits = [
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/memory.max", "100000\n"),
            ("sys/fs/cgroup/a/memory.current", "60000\n"),
            ("sys/fs/cgroup/a/memory.stat", stat),
        ];
        let (_directory, memory) = machine("0::/a/b\n", &limits);
        assert_eq!(memory.group_available_bytes, Some(50_000));
        assert_eq!(memory.usable_now_bytes(), 50_000);
        let limits = [
            ("sys/fs/cgroup/memory/y/memory.limit_in_bytes", "5000"),
            ("sys/fs/cgroup/memory/y/memory.usage_in_bytes", "6000"),
        ];
        let (_directory, memory) = machine("3:memory:/y\n", &limits);
        assert_eq!(memory.group_available_bytes, Some(0));
        let (_directory, memory) = machine("0::/a\n", &[]);
        assert_eq!(memory.group_available_bytes, None);
        assert_eq!(memory.usable_now_bytes(), memory.available_bytes);
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
