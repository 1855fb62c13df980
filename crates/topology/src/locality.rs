//! The home nodes of block devices and network interfaces.
//!
//! On a real topology, sysfs has the answer: the `numa_node` of the PCI function above a device. The search follows the layers in
//! between: from a partition to its disk, from a device-mapper, RAID or loop device to the devices below it, from a bond or VLAN
//! to its lower interfaces. If these are on different nodes, the device has no home node.
//!
//! On a virtual topology, only the `device` and `nic` lines of a topology file count, because real places of devices mean nothing
//! for virtual nodes.
//!
//! A query costs several system calls. Ask once, when a device is opened.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::id::NodeId;

/// Maximum depth of stacked devices. Devices are stacked a few levels deep; a deeper stack means a cycle of links.
const STACK_DEPTH_MAX: usize = 16;

/// The known home nodes of devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Locality {
    root: PathBuf,
    /// For real topologies. Empty for virtual ones, which do not use sysfs.
    pub(crate) node_by_kernel_node: BTreeMap<u32, NodeId>,
    pub(crate) node_by_nic: BTreeMap<String, NodeId>,
    /// By path or kernel name, as in the topology file.
    devices: Vec<(String, NodeId)>,
}

impl Locality {
    pub(crate) fn new(root: &Path) -> Locality {
        Locality {
            root: root.to_path_buf(),
            node_by_kernel_node: BTreeMap::new(),
            node_by_nic: BTreeMap::new(),
            devices: Vec::new(),
        }
    }

    pub(crate) fn add_device(&mut self, path_or_name: String, node: NodeId) {
        self.devices.push((path_or_name, node));
    }

    pub(crate) fn of_path(&self, path: &Path, depth: usize) -> Option<NodeId> {
        let path = canonical(path)?;
        if let Some(node) = self.given_for_path(&path) {
            return Some(node);
        }
        self.of_block_dir(&self.block_dir(&path)?, depth)
    }

    /// Returns the node of the `device` line whose path contains `path`. The longest such path wins.
    fn given_for_path(&self, path: &Path) -> Option<NodeId> {
        let given = self.devices.iter().filter(|(key, _)| key.contains('/'));
        let absolute = given.map(|(key, node)| {
            let key = canonical(Path::new(key)).unwrap_or_else(|| PathBuf::from(key));
            (key, *node)
        });
        let containing = absolute.filter(|(key, _)| path.starts_with(key));
        containing
            .max_by_key(|(key, _)| key.components().count())
            .map(|(_, node)| node)
    }

    /// Returns the node of the `device` line for the block device with this kernel name. The line has the name, or a path in
    /// /dev.
    fn given_for_name(&self, name: &str) -> Option<NodeId> {
        let is_it = |key: &str| match key.contains('/') {
            true => name_in_dev(Path::new(key)).as_deref() == Some(name),
            false => key == name,
        };
        self.devices
            .iter()
            .find(|(key, _)| is_it(key))
            .map(|(_, node)| *node)
    }

    /// Returns the sysfs directory of the block device at `path`, or of the block device under the filesystem of `path`.
    fn block_dir(&self, path: &Path) -> Option<PathBuf> {
        // A volume that does not exist yet will be where its directory is.
        let metadata = fs::metadata(path).or_else(|e| path.parent().map_or(Err(e), fs::metadata));
        let metadata = metadata.ok()?;
        let is_device = metadata.file_type().is_block_device();
        let dev = if is_device {
            metadata.rdev()
        } else {
            metadata.dev()
        };
        let (major, minor) = (rustix::fs::major(dev), rustix::fs::minor(dev));
        let by_number = self.root.join(format!("sys/dev/block/{major}:{minor}"));
        if let Ok(dir) = by_number.canonicalize() {
            return Some(dir);
        }
        // Some filesystems, such as Btrfs, have device numbers of their own. The table of mounts names their device.
        let device = (!is_device).then(|| self.mounted_device(path)).flatten()?;
        let name = name_in_dev(&device)?;
        self.root
            .join("sys/class/block")
            .join(name)
            .canonicalize()
            .ok()
    }

    /// Returns the device of the mount that contains `path`.
    fn mounted_device(&self, path: &Path) -> Option<PathBuf> {
        let mounts = fs::read_to_string(self.root.join("proc/self/mountinfo")).ok()?;
        let mounted = mounts.lines().filter_map(|line| {
            let (mount, filesystem) = line.split_once(" - ")?;
            let mount_point = unescape(mount.split(' ').nth(4)?);
            Some((
                PathBuf::from(mount_point),
                unescape(filesystem.split(' ').nth(1)?),
            ))
        });
        let containing = mounted.filter(|(mount_point, _)| path.starts_with(mount_point));
        // Of several mounts on the same point, programs see the last one.
        let (_, device) = containing.max_by_key(|(point, _)| point.components().count())?;
        Some(PathBuf::from(device))
    }

    fn of_block_dir(&self, dir: &Path, depth: usize) -> Option<NodeId> {
        if depth > STACK_DEPTH_MAX {
            return None;
        }
        if let Some(node) = self.given_for_name(dir.file_name()?.to_str()?) {
            return Some(node);
        }
        if dir.join("partition").exists() {
            return self.of_block_dir(dir.parent()?, depth + 1);
        }
        let slaves = links_in(&dir.join("slaves"), "");
        if !slaves.is_empty() {
            return agreed(
                slaves
                    .iter()
                    .map(|slave| self.of_block_dir(slave, depth + 1)),
            );
        }
        if let Ok(backing_file) = fs::read_to_string(dir.join("loop/backing_file")) {
            return self.of_path(Path::new(backing_file.trim_end_matches('\n')), depth + 1);
        }
        self.of_hardware(dir)
    }

    /// Walks up from a device to the first directory that has a node.
    fn of_hardware(&self, dir: &Path) -> Option<NodeId> {
        if self.node_by_kernel_node.is_empty() {
            return None;
        }
        let top = self.root.join("sys/devices").canonicalize().ok()?;
        for dir in dir.ancestors().take_while(|dir| dir.starts_with(&top)) {
            // The kernel writes -1, which does not parse, for an unknown node.
            let node = fs::read_to_string(dir.join("numa_node")).ok();
            if let Some(node) = node.and_then(|text| text.trim().parse::<u32>().ok()) {
                return self.node_by_kernel_node.get(&node).copied();
            }
            // In sysfs, an NVMe disk with several possible controllers is below none of them.
            let name = dir.file_name().and_then(|name| name.to_str());
            if name.is_some_and(|name| name.starts_with("nvme-subsys")) {
                let is_above = |link: &PathBuf| !link.starts_with(dir);
                let controllers = links_in(dir, "nvme").into_iter().filter(is_above);
                return agreed(controllers.map(|controller| self.of_hardware(&controller)));
            }
        }
        None
    }

    pub(crate) fn of_nic(&self, name: &str, depth: usize) -> Option<NodeId> {
        if let Some(node) = self.node_by_nic.get(name) {
            return Some(*node);
        }
        if depth > STACK_DEPTH_MAX || name.contains('/') || ["", ".", ".."].contains(&name) {
            return None;
        }
        let dir = self
            .root
            .join("sys/class/net")
            .join(name)
            .canonicalize()
            .ok()?;
        let lower = links_in(&dir, "lower_");
        if lower.is_empty() {
            return self.of_hardware(&dir);
        }
        let name_of = |link: &PathBuf| Some(link.file_name()?.to_str()?.to_string());
        agreed(
            lower
                .iter()
                .map(|link| self.of_nic(&name_of(link)?, depth + 1)),
        )
    }
}

/// Returns the node that all `nodes` name; `None` if one is unknown, they differ, or there are none.
fn agreed(nodes: impl Iterator<Item = Option<NodeId>>) -> Option<NodeId> {
    let distinct: BTreeSet<Option<NodeId>> = nodes.collect();
    match distinct.len() {
        1 => distinct.first().copied().flatten(),
        _ => None,
    }
}

/// Returns the targets of the symbolic links in `dir` whose names start with `prefix`.
fn links_in(dir: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else {
        return Vec::new();
    };
    let has_prefix = |entry: &fs::DirEntry| {
        entry
            .file_name()
            .to_str()
            .is_some_and(|n| n.starts_with(prefix))
    };
    let links = entries
        .flatten()
        .filter(|entry| has_prefix(entry) && entry.file_type().is_ok_and(|kind| kind.is_symlink()));
    links
        .filter_map(|entry| entry.path().canonicalize().ok())
        .collect()
}

/// Returns `path` absolute and without links. Its last component need not exist.
fn canonical(path: &Path) -> Option<PathBuf> {
    if let Ok(found) = path.canonicalize() {
        return Some(found);
    }
    let parent = path.parent()?;
    let parent = if parent.as_os_str().is_empty() {
        Path::new(".")
    } else {
        parent
    };
    Some(parent.canonicalize().ok()?.join(path.file_name()?))
}

/// Returns the kernel's name of the device at a path in `/dev`, which may be a link such as `/dev/disk/by-id/...`. In sysfs,
/// names have `!` where paths have `/`.
fn name_in_dev(path: &Path) -> Option<String> {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    Some(path.strip_prefix("/dev").ok()?.to_str()?.replace('/', "!"))
}

/// Replaces escapes in the kernel's table of mounts, such as `\040` for a space.
fn unescape(text: &str) -> String {
    let mut plain = text.to_string();
    for (escaped, char) in [
        ("\\040", " "),
        ("\\011", "\t"),
        ("\\012", "\n"),
        ("\\134", "\\"),
    ] {
        plain = plain.replace(escaped, char);
    }
    plain
}
