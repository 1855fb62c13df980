//! The guest: the nodes that `scripts/lab` gives it, its disk, and the volume on the disk.

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use crate::commands::succeed;

/// The guest's nodes. All have memory.
pub const NODES: usize = 5;
/// The nodes that have CPUs. They come first.
pub const CPU_NODES: usize = 4;
/// The node that has no CPUs.
pub const MEMORY_ONLY: usize = 4;
/// The node with CPUs that is nearest to `MEMORY_ONLY`.
pub const NEAREST: usize = 1;
/// The guest's CPUs. They are assigned in turn to the nodes with CPUs, two to each.
pub const CPUS: usize = 8;
/// Distances between nodes.
pub const DISTANCES: [[u64; NODES]; NODES] = [
    [10, 12, 21, 21, 24],
    [12, 10, 21, 21, 17],
    [21, 21, 10, 12, 28],
    [21, 21, 12, 10, 28],
    [24, 17, 28, 28, 10],
];
/// Memory that `scripts/lab` gives each node. The kernel keeps some of it.
pub const MEMORY_BYTES: u64 = 768 << 20;

const DISK: &str = "/dev/vda";
const MNT: &str = "/mnt";

/// Returns the node of a CPU.
pub fn node_of(cpu: usize) -> usize {
    cpu % CPU_NODES
}

/// Runs `jericho` with arguments that are separated by spaces. Returns its standard output. Panics unless it succeeds.
pub fn jericho(arguments: &str) -> String {
    let mut command = Command::new("/usr/bin/jericho");
    succeed(command.args(arguments.split_whitespace()))
}

/// Runs `jericho` with arguments that make it print JSON. Returns the parsed value.
pub fn ask(arguments: &str) -> Value {
    let text = jericho(arguments);
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("jericho {arguments}: {e}: {text}"))
}

/// A mounted volume on the guest's first disk. It is unmounted when dropped.
pub struct Volume;

impl Volume {
    /// Formats and mounts a volume with the number of slices that `format` chooses.
    pub fn new() -> Volume {
        jericho(&format!("format {DISK} --force"));
        let volume = Volume;
        volume.mount();
        volume
    }

    /// Does the same, with a cache of this size for all slices together.
    pub fn with_cache(size: &str) -> Volume {
        jericho(&format!("format {DISK} --force"));
        jericho(&format!("mount {DISK} {MNT} --cache {size}"));
        Volume
    }

    pub fn mount(&self) {
        jericho(&format!("mount {DISK} {MNT} --cache 64M"));
    }

    /// Mounts the volume with a daemon that may run only on the CPUs of this node.
    pub fn mount_on_cpus_of(&self, node: usize) {
        let cpus = (0..CPUS).filter(|cpu| node_of(*cpu) == node);
        let mask: u64 = cpus.map(|cpu| 1 << cpu).sum();
        let mut command = Command::new("taskset");
        command.arg(format!("{mask:x}")).arg("/usr/bin/jericho");
        succeed(command.args(["mount", DISK, MNT, "--cache", "64M"]));
    }

    pub fn umount(&self) {
        jericho(&format!("umount {MNT}"));
    }

    pub fn check(&self) {
        jericho(&format!("check {DISK}"));
    }

    /// Makes a directory on each node. Returns them in the order of the nodes.
    fn dirs_on_nodes(&self, nodes: usize) -> Vec<PathBuf> {
        let mut dirs = vec![PathBuf::new(); nodes];
        for number in 0..nodes {
            let dir = PathBuf::from(format!("{MNT}/{number}"));
            std::fs::create_dir(&dir).expect("mkdir");
            let home = self.where_is(&dir)["home_node"].as_u64().expect("a node") as usize;
            assert_eq!(dirs[home], PathBuf::new(), "two directories on node {home}");
            dirs[home] = dir;
        }
        dirs
    }

    /// Writes `each` files of `bytes` bytes on each node, in a directory for each node. Returns the files in the order of the nodes.
    pub fn files_on_nodes(&self, nodes: usize, each: usize, bytes: usize) -> Vec<PathBuf> {
        let files = self.dirs_on_nodes(nodes);
        let files = files
            .iter()
            .flat_map(|dir| (0..each).map(|number| dir.join(number.to_string())));
        let files: Vec<PathBuf> = files.collect();
        for file in &files {
            std::fs::write(file, vec![b'j'; bytes]).expect("write");
        }
        files
    }

    /// Writes one file of `mib` MiB on each node, in directories of their own. Returns the files in the order of the nodes. Their bytes
    /// differ from page to page and from file to file.
    pub fn file_on_each_node(&self, mib: usize) -> Vec<PathBuf> {
        let dirs = self.dirs_on_nodes(NODES).into_iter().enumerate();
        dirs.map(|(node, dir)| {
            let file = dir.join("file");
            std::fs::write(&file, content(node, mib)).expect("write");
            assert_eq!(self.where_is(&file)["home_node"], node);
            file
        })
        .collect()
    }

    pub fn where_is(&self, file: &std::path::Path) -> Value {
        ask(&format!("where {} --json", file.display()))
    }

    pub fn stat(&self) -> Value {
        ask(&format!("stat {MNT} --json"))
    }

    /// Returns how many pages were accessed so far from their own node and from other nodes.
    pub fn accesses(&self) -> [u64; 2] {
        let stat = self.stat();
        ["local", "remote"].map(|which| stat["locality"][which].as_u64().expect("a number"))
    }

    /// Returns how many pages were evicted so far.
    pub fn evictions(&self) -> u64 {
        let stat = self.stat();
        let slices = stat["slices"].as_array().expect("slices").iter();
        slices
            .map(|slice| slice["evictions"].as_u64().expect("a number"))
            .sum()
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        // A case that failed before its end leaves the volume mounted.
        let _ = Command::new("/usr/bin/jericho")
            .args(["umount", MNT])
            .output();
    }
}

/// Returns the content of the file with this number.
pub fn content(number: usize, mib: usize) -> Vec<u8> {
    let words = (0..mib << 17).map(|word| (word * NODES + number) as u64);
    words.flat_map(u64::to_le_bytes).collect()
}

/// Prints a number that the documentation of the lab quotes.
pub fn tell(what: &str, number: f64) {
    println!("\nlab: {what}: {number:.3}");
}

/// Returns the sectors that were written to a disk so far, by the kernel.
pub fn sectors_written(disk: &str) -> u64 {
    let stat = std::fs::read_to_string(format!("/sys/block/{disk}/stat")).expect("counters");
    let sectors = stat.split_whitespace().nth(6).expect("sectors");
    sectors.parse().expect("a number")
}
