//! The machine as the kernel has it: nodes, their CPUs, and the distances between them.

use std::fs;
use std::path::{Path, PathBuf};

/// The nodes of the machine, which are numbered from 0.
pub struct Shape {
    /// The CPUs of each node.
    pub cpus: Vec<Vec<usize>>,
    /// The distances from each node to each node.
    pub distances: Vec<Vec<u64>>,
}

impl Shape {
    pub fn of_machine() -> Shape {
        let nodes = (0..).map(|node| PathBuf::from(format!("/sys/devices/system/node/node{node}")));
        let nodes: Vec<PathBuf> = nodes.take_while(|path| path.exists()).collect();
        let text =
            |path: &Path, name: &str| fs::read_to_string(path.join(name)).expect("an attribute");
        let distances = |path: &PathBuf| {
            let text = text(path, "distance");
            let numbers = text
                .split_whitespace()
                .map(|n| n.parse().expect("a number"));
            numbers.collect()
        };
        Shape {
            cpus: nodes
                .iter()
                .map(|path| parse_cpus(text(path, "cpulist").trim()))
                .collect(),
            distances: nodes.iter().map(distances).collect(),
        }
    }

    pub fn nodes(&self) -> usize {
        self.cpus.len()
    }

    /// Returns the node of a CPU.
    pub fn node_of(&self, cpu: usize) -> usize {
        let mut nodes = self.cpus.iter();
        nodes
            .position(|cpus| cpus.contains(&cpu))
            .expect("a node has the CPU")
    }

    /// Returns the node on which threads are local to memory of `node`: the nearest one with CPUs.
    pub fn node_of_threads(&self, node: usize) -> usize {
        self.with_cpus()
            .min_by_key(|other| self.distances[node][*other])
            .expect("a node has CPUs")
    }

    /// Returns the node with CPUs that is farthest from memory of `node`.
    pub fn farthest(&self, node: usize) -> usize {
        self.with_cpus()
            .max_by_key(|other| self.distances[node][*other])
            .expect("a node has CPUs")
    }

    fn with_cpus(&self) -> impl Iterator<Item = usize> {
        (0..self.nodes()).filter(|node| !self.cpus[*node].is_empty())
    }
}

/// Parses a list of CPUs: `0-2,5`. The list may be empty.
pub fn parse_cpus(list: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| text.parse::<usize>().expect("a CPU");
        number(first)..=number(last)
    };
    list.split_terminator(',').flat_map(range).collect()
}
