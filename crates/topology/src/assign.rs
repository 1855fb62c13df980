//! `virtual:N`: assigns the CPUs and the memory of the machine to N virtual nodes.
//!
//! Virtual nodes get their memory from the kernel's memory nodes in turn, and their CPUs from near that memory if possible, so
//! that measurements on a real machine stay meaningful. Every CPU is assigned. If there are enough CPUs, each is assigned once
//! and every node gets at least one. With more nodes than CPUs, the remaining nodes share CPUs round robin.

use crate::assemble::{Draft, assemble};
use crate::locality::Locality;
use crate::machine::{DISTANCE_LOCAL, DISTANCE_REMOTE, Machine};
use crate::nodes::Topology;

/// Returns the topology of `count` (1 to `NODES_MAX`) virtual nodes on `machine`.
pub(crate) fn virtual_nodes(machine: &Machine, count: usize) -> Topology {
    let homes = memory_homes(machine, count);
    let cpus = assign_cpus(machine, &homes);
    let draft = |(at, cpus): (usize, Vec<u32>)| Draft {
        cpus,
        memory_bytes: memory_share(machine, &homes, at),
        kernel_node: homes[at].and_then(|home| machine.bindable(home)),
        distances: (0..count)
            .map(|to| distance(machine, &homes, at, to))
            .collect(),
    };
    let drafts = cpus.into_iter().enumerate().map(draft).collect();
    assemble(
        drafts,
        &[],
        true,
        format!("virtual:{count}"),
        Locality::new(&machine.root),
    )
}

/// Returns for each virtual node the position of the underlying kernel node: the nodes with memory, round robin; `None` if this
/// process may use no node's memory.
pub(crate) fn memory_homes(machine: &Machine, count: usize) -> Vec<Option<usize>> {
    let memory_nodes = machine.memory_nodes();
    (0..count)
        .map(|at| memory_nodes.get(at % memory_nodes.len().max(1)).copied())
        .collect()
}

/// Returns node `at`'s share of its kernel node's memory, in bytes. All virtual nodes on a kernel node get equal shares.
pub(crate) fn memory_share(machine: &Machine, homes: &[Option<usize>], at: usize) -> u64 {
    let Some(home) = homes[at] else { return 0 };
    let sharers = homes.iter().filter(|&&other| other == Some(home)).count();
    machine.nodes[home].memory_bytes / sharers as u64
}

/// Returns the distance between two virtual nodes. It is at least the usual distance of two real nodes, so that locality shows.
fn distance(machine: &Machine, homes: &[Option<usize>], from: usize, to: usize) -> u32 {
    match (homes[from], homes[to]) {
        _ if from == to => DISTANCE_LOCAL,
        (Some(a), Some(b)) => machine.nodes[a].distances[b].max(DISTANCE_REMOTE),
        _ => DISTANCE_REMOTE,
    }
}

fn assign_cpus(machine: &Machine, homes: &[Option<usize>]) -> Vec<Vec<u32>> {
    let mut assigned: Vec<Vec<u32>> = vec![Vec::new(); homes.len()];
    let mut far = Vec::new();
    let mut near = vec![Vec::new(); machine.nodes.len()];
    for (at, node) in machine.nodes.iter().enumerate() {
        let home = machine
            .memory_home(at)
            .filter(|&home| homes.contains(&Some(home)));
        match home {
            Some(home) => near[home].extend(&node.cpus),
            None => far.extend(&node.cpus),
        }
    }
    for (home, cpus) in near.iter_mut().enumerate() {
        cpus.sort_unstable();
        let sharers: Vec<usize> = (0..homes.len())
            .filter(|&at| homes[at] == Some(home))
            .collect();
        assign_blocks(cpus, &sharers, &mut assigned);
    }
    // CPUs whose own memory underlies no virtual node go to the nodes with the fewest CPUs.
    for cpu in far {
        if let Some(smallest) = assigned.iter_mut().min_by_key(|cpus| cpus.len()) {
            smallest.push(cpu);
        }
    }
    for at in 0..assigned.len() {
        if assigned[at].is_empty() {
            take_cpu_from_largest(&mut assigned, at);
        }
    }
    share_round_robin(machine, homes, &near, &mut assigned);
    for cpus in &mut assigned {
        cpus.sort_unstable();
    }
    assigned
}

/// Assigns `cpus` to `nodes` in blocks of neighbours, whose sizes differ by at most one.
fn assign_blocks(cpus: &[u32], nodes: &[usize], assigned: &mut [Vec<u32>]) {
    for (position, &node) in nodes.iter().enumerate() {
        let base = cpus.len() / nodes.len();
        let longer = cpus.len() % nodes.len();
        let start = position * base + position.min(longer);
        let len = base + usize::from(position < longer);
        assigned[node].extend(&cpus[start..start + len]);
    }
}

fn take_cpu_from_largest(assigned: &mut [Vec<u32>], to: usize) {
    let largest = assigned.iter_mut().max_by_key(|cpus| cpus.len());
    let taken = largest.filter(|cpus| cpus.len() > 1).and_then(Vec::pop);
    assigned[to].extend(taken);
}

/// Gives each node without CPUs a CPU that another node has too, near its memory if possible.
fn share_round_robin(
    machine: &Machine,
    homes: &[Option<usize>],
    near: &[Vec<u32>],
    assigned: &mut [Vec<u32>],
) {
    let mut all: Vec<u32> = machine
        .nodes
        .iter()
        .flat_map(|node| node.cpus.clone())
        .collect();
    all.sort_unstable();
    let mut next_near = vec![0; machine.nodes.len()];
    let mut next = 0;
    for (at, cpus) in assigned
        .iter_mut()
        .enumerate()
        .filter(|(_, cpus)| cpus.is_empty())
    {
        let (pool, next) = match homes[at].filter(|&home| !near[home].is_empty()) {
            Some(home) => (&near[home], &mut next_near[home]),
            None => (&all, &mut next),
        };
        cpus.push(pool[*next % pool.len()]);
        *next += 1;
    }
}
