//! What the kernel knows: the nodes of pages and threads, and the bytes that interfaces have sent.

use std::fs;

use super::hosts::{NODES, node_of_cpu, on_host_of, pci_of};
use crate::shape::parse_cpus;

/// The pages of a process that the kernel was asked to take from one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placed {
    /// Node that was asked for, then node where the page is -> pages.
    pub pages: [[u64; NODES]; NODES],
}

impl Placed {
    /// Returns the pages that are on the node that was asked for, and all.
    pub fn right(&self) -> (u64, u64) {
        let right = (0..NODES).map(|node| self.pages[node][node]).sum();
        (right, self.pages.iter().flatten().sum())
    }
}

/// Returns the pages of a process's pools of frames. The kernel's page tables say where each one is: /proc/PID/numa_maps.
pub fn pools(pid: u64) -> Placed {
    let maps = fs::read_to_string(format!("/proc/{pid}/numa_maps")).expect("numa_maps");
    let mut placed = Placed::default();
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let policy = words.nth(1).unwrap_or_default();
        let asked = policy.strip_prefix("prefer").and_then(|rest| {
            let (_, node) = rest.split_once(':')?;
            node.parse::<usize>().ok()
        });
        let words: Vec<&str> = words.collect();
        let is_pool = |word: &&str| word.starts_with("file=/memfd:jericho-pool");
        let Some(asked) = asked.filter(|_| words.iter().any(is_pool)) else {
            continue;
        };
        let mut pages = [0; NODES];
        for word in &words {
            let on = word.strip_prefix('N').and_then(|rest| rest.split_once('='));
            if let Some((node, count)) = on {
                let node: usize = node.parse().expect("a node");
                pages[node] += count.parse::<u64>().expect("a number");
            }
        }
        for (sum, count) in placed.pages[asked].iter_mut().zip(pages) {
            *sum += count;
        }
    }
    placed
}

/// A thread of a process.
#[derive(Clone, Debug)]
pub struct Thread {
    pub name: String,
    /// Nodes of the CPUs on which it may run.
    pub may_run_on: Vec<usize>,
    /// Node of the CPU on which it ran last.
    pub ran_on: usize,
}

/// Returns the threads of a process whose names begin with `prefix`.
pub fn threads(pid: u64, prefix: &str) -> Vec<Thread> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("threads");
    let of_task = |path: std::path::PathBuf| {
        let status = fs::read_to_string(path.join("status")).ok()?;
        let stat = fs::read_to_string(path.join("stat")).ok()?;
        let line = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        let allowed = line("Cpus_allowed_list:")?.trim();
        // The name, in parentheses, may contain spaces. The CPU is the 39th field, the 37th after the name.
        let ran_on = stat.rsplit_once(") ")?.1.split(' ').nth(36)?;
        let mut nodes: Vec<usize> = parse_cpus(allowed).into_iter().map(node_of_cpu).collect();
        nodes.sort();
        nodes.dedup();
        Some(Thread {
            name: line("Name:")?.trim().to_owned(),
            may_run_on: nodes,
            ran_on: node_of_cpu(ran_on.parse().ok()?),
        })
    };
    let mut threads: Vec<Thread> = tasks
        .filter_map(|task| of_task(task.expect("a thread").path()))
        .filter(|thread| thread.name.starts_with(prefix))
        .collect();
    threads.sort_by(|a, b| a.name.cmp(&b.name));
    threads
}

/// Returns the node of an interface: that of its PCI function.
pub fn node_of_interface(interface: &str) -> usize {
    let file = pci_of(interface).join("numa_node");
    let text = on_host_of(interface, &format!("cat {}", file.display()));
    text.trim().parse().expect("a node")
}

/// Returns the bytes that interfaces of one host have sent.
pub fn sent_bytes(interfaces: &[String]) -> Vec<u64> {
    let files: Vec<String> = interfaces
        .iter()
        .map(|name| format!("/sys/class/net/{name}/statistics/tx_bytes"))
        .collect();
    let text = on_host_of(&interfaces[0], &format!("cat {}", files.join(" ")));
    let bytes: Vec<u64> = text
        .lines()
        .map(|line| line.parse().expect("bytes"))
        .collect();
    assert_eq!(bytes.len(), interfaces.len(), "{text}");
    bytes
}
