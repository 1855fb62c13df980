//! A fake machine: a tree with the files of `/sys` and `/proc` that the code under test reads.

#![allow(dead_code)] // each test file uses its part

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

use jericho_topology::{Topology, TopologyError};

pub struct FakeMachine {
    dir: tempfile::TempDir,
}

impl FakeMachine {
    /// Creates a machine without any files of the kernel.
    pub fn bare() -> FakeMachine {
        FakeMachine {
            dir: tempfile::tempdir().expect("a temporary directory"),
        }
    }

    /// Creates a machine with nodes, given as (number, cpulist, memory in GiB, distances).
    pub fn with_nodes(nodes: &[(u32, &str, u64, &str)]) -> FakeMachine {
        let machine = FakeMachine::bare();
        let ids = |keep: fn(&(u32, &str, u64, &str)) -> bool| {
            let ids = nodes
                .iter()
                .filter(|node| keep(node))
                .map(|node| node.0.to_string());
            ids.collect::<Vec<_>>().join(",") + "\n"
        };
        machine.write("sys/devices/system/node/online", &ids(|_| true));
        machine.write(
            "sys/devices/system/node/has_memory",
            &ids(|node| node.2 > 0),
        );
        for (id, cpulist, memory_gib, distances) in nodes {
            let dir = format!("sys/devices/system/node/node{id}");
            let kib = memory_gib << 20;
            let meminfo = format!("Node {id} MemTotal:     {kib} kB\nNode {id} MemFree:  7 kB\n");
            machine.write(&format!("{dir}/cpulist"), &format!("{cpulist}\n"));
            machine.write(&format!("{dir}/distance"), &format!("{distances}\n"));
            machine.write(&format!("{dir}/meminfo"), &meminfo);
        }
        machine
    }

    /// Creates a machine of four sockets with four CPUs and 16 GiB each, in a ring.
    pub fn four_sockets() -> FakeMachine {
        FakeMachine::with_nodes(&[
            (0, "0-3", 16, "10 16 22 16"),
            (1, "4-7", 16, "16 10 16 22"),
            (2, "8-11", 16, "22 16 10 16"),
            (3, "12-15", 16, "16 22 16 10"),
        ])
    }

    /// Creates a machine of one node with `count` CPUs and 8 GiB.
    pub fn laptop(count: u32) -> FakeMachine {
        FakeMachine::with_nodes(&[(0, &format!("0-{}", count - 1), 8, "10")])
    }

    pub fn root(&self) -> &Path {
        self.dir.path()
    }

    pub fn write(&self, path: &str, text: &str) -> PathBuf {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("directories");
        fs::write(&path, text).expect("a file");
        path
    }

    pub fn link(&self, path: &str, target: &str) {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("directories");
        fs::create_dir_all(self.root().join(target)).expect("the target");
        symlink(self.root().join(target), path).expect("a link");
    }

    /// Makes the filesystem of the temporary directory appear to be on the block device
    /// with this directory in the fake sysfs. Returns the path of a file on it.
    pub fn file_on(&self, device_dir: &str) -> PathBuf {
        let file = self.write("a volume", "");
        let dev = fs::metadata(&file).expect("the file").dev();
        let (major, minor) = (rustix::fs::major(dev), rustix::fs::minor(dev));
        self.link(&format!("sys/dev/block/{major}:{minor}"), device_dir);
        file
    }

    pub fn detect(&self, affinity: &[u32]) -> Topology {
        Topology::detect_at(self.root(), affinity).expect("a topology")
    }

    pub fn spec(&self, spec: &str, affinity: &[u32]) -> Result<Topology, TopologyError> {
        Topology::from_spec_at(spec, self.root(), affinity)
    }

    /// Returns the topology that a file with this text describes.
    pub fn file(&self, text: &str, affinity: &[u32]) -> Result<Topology, TopologyError> {
        let path = self.write("nodes.topology", text);
        self.spec(path.to_str().expect("UTF-8"), affinity)
    }
}

pub fn cpus(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

/// Checks the invariants of a topology.
pub fn assert_invariants(topology: &Topology) {
    assert!(!topology.nodes.is_empty());
    let count = topology.nodes.len();
    for (at, node) in topology.nodes.iter().enumerate() {
        assert_eq!(usize::from(node.id.0), at, "ids are dense");
        assert_eq!(node.distances.len(), count);
        assert!(node.cpus.is_sorted());
        assert!(
            !topology.cpus_of(node.id).is_empty(),
            "node {at} has no CPUs near it"
        );
        let near = topology
            .node(node.nearest_cpu_node)
            .expect("the node exists");
        assert!(!near.cpus.is_empty());
        assert_eq!(near.id == node.id, !node.is_memory_only());
        for &cpu in &node.cpus {
            let home = topology
                .node_of_cpu(cpu)
                .expect("an assigned CPU has a node");
            assert!(topology.nodes[usize::from(home.0)].cpus.contains(&cpu));
        }
    }
}
