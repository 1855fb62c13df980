//! `virtual:N`: deals the CPUs and the memory that there are out to N made-up nodes.
//!
//! Virtual node *i* gets its memory from the kernel's memory nodes in turn, and its CPUs from near
//! that memory where there are any, so that measurements on a real machine stay meaningful. Every CPU
//! is dealt to some node. While there are enough CPUs each is dealt once and every node gets at least
//! one; with more nodes than CPUs the nodes left over share CPUs round robin.

use crate::Topology;
use crate::assemble::{Draft, assemble};
use crate::locality::Locality;
use crate::machine::{DISTANCE_LOCAL, DISTANCE_REMOTE, Machine};

/// The topology of `count` (1 to `NODES_MAX`) virtual nodes on `machine`.
pub(crate) fn virtual_nodes(machine: &Machine, count: usize) -> Topology {
    let homes = memory_homes(machine, count);
    let cpus = deal_cpus(machine, &homes);
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

/// For each virtual node the position of the kernel node that underlies it: round robin over those
/// with memory; `None` where this process may use no node's memory.
pub(crate) fn memory_homes(machine: &Machine, count: usize) -> Vec<Option<usize>> {
    let memory_nodes = machine.memory_nodes();
    (0..count)
        .map(|at| memory_nodes.get(at % memory_nodes.len().max(1)).copied())
        .collect()
}

/// The part of its kernel node's memory that is left for node `at` by the others on it, in bytes.
pub(crate) fn memory_share(machine: &Machine, homes: &[Option<usize>], at: usize) -> u64 {
    let Some(home) = homes[at] else { return 0 };
    let sharers = homes.iter().filter(|&&other| other == Some(home)).count();
    machine.nodes[home].memory_bytes / sharers as u64
}

/// Two virtual nodes are never closer than two real ones usually are: the point is to show locality.
fn distance(machine: &Machine, homes: &[Option<usize>], from: usize, to: usize) -> u32 {
    match (homes[from], homes[to]) {
        _ if from == to => DISTANCE_LOCAL,
        (Some(a), Some(b)) => machine.nodes[a].distances[b].max(DISTANCE_REMOTE),
        _ => DISTANCE_REMOTE,
    }
}

fn deal_cpus(machine: &Machine, homes: &[Option<usize>]) -> Vec<Vec<u32>> {
    let mut dealt: Vec<Vec<u32>> = vec![Vec::new(); homes.len()];
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
        deal_blocks(cpus, &sharers, &mut dealt);
    }
    // CPUs whose own memory underlies no virtual node go where there are fewest.
    for cpu in far {
        if let Some(poorest) = dealt.iter_mut().min_by_key(|cpus| cpus.len()) {
            poorest.push(cpu);
        }
    }
    for at in 0..dealt.len() {
        if dealt[at].is_empty() {
            take_one_from_the_richest(&mut dealt, at);
        }
    }
    share_round_robin(machine, homes, &near, &mut dealt);
    for cpus in &mut dealt {
        cpus.sort_unstable();
    }
    dealt
}

/// Deals `cpus` to `nodes` in blocks of neighbours, whose sizes differ by one at most.
fn deal_blocks(cpus: &[u32], nodes: &[usize], dealt: &mut [Vec<u32>]) {
    for (position, &node) in nodes.iter().enumerate() {
        let base = cpus.len() / nodes.len();
        let longer = cpus.len() % nodes.len();
        let start = position * base + position.min(longer);
        let len = base + usize::from(position < longer);
        dealt[node].extend(&cpus[start..start + len]);
    }
}

fn take_one_from_the_richest(dealt: &mut [Vec<u32>], to: usize) {
    let richest = dealt.iter_mut().max_by_key(|cpus| cpus.len());
    let taken = richest.filter(|cpus| cpus.len() > 1).and_then(Vec::pop);
    dealt[to].extend(taken);
}

/// Gives each node that is still without CPUs one that other nodes have too, near to its memory where
/// there is any.
fn share_round_robin(
    machine: &Machine,
    homes: &[Option<usize>],
    near: &[Vec<u32>],
    dealt: &mut [Vec<u32>],
) {
    let mut all: Vec<u32> = machine
        .nodes
        .iter()
        .flat_map(|node| node.cpus.clone())
        .collect();
    all.sort_unstable();
    let mut turns = vec![0; machine.nodes.len()];
    let mut turn = 0;
    for (at, cpus) in dealt
        .iter_mut()
        .enumerate()
        .filter(|(_, cpus)| cpus.is_empty())
    {
        let (pool, turn) = match homes[at].filter(|&home| !near[home].is_empty()) {
            Some(home) => (&near[home], &mut turns[home]),
            None => (&all, &mut turn),
        };
        cpus.push(pool[*turn % pool.len()]);
        *turn += 1;
    }
}
