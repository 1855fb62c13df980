//! Memory of one node: bound to it, populated, and found there by the kernel.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use jericho_sys::limits::{Memory, node_available_bytes};
use jericho_sys::memory::Mapping;
use jericho_topology::Node;

use crate::plan::Plan;

/// Length of a cache line, and distance of two places in a chain.
const LINE_BYTES: usize = 64;
/// The part of a node's free memory that a probe may use.
const SHARE: u64 = 4;
/// What the bytes of streams are before the first stream writes. No byte is ever 0: some machines write lines of zeros twice as fast as others.
pub(crate) const FILL: u8 = 255;
/// Distance of the pages whose node is checked.
const CHECK_EVERY: usize = 512 << 10;

/// Memory of one node, which is measured.
pub(crate) struct Buffer {
    pub mapping: Arc<Mapping>,
    /// The chain of reads.
    pub chain: Range<usize>,
    /// Where the chain goes on, so that a read finds no line that an earlier one has brought into a cache.
    pub chain_at: AtomicUsize,
    /// The bytes that streams read and write.
    pub stream: Range<usize>,
    /// How many bytes are on huge pages.
    pub huge_bytes: usize,
}

impl Buffer {
    /// Allocates a buffer in the memory of a node. Returns the reason when that is not possible.
    pub fn new(node: &Node, plan: &Plan, memory: &Memory) -> Result<Buffer, String> {
        let room = room_bytes(node, memory);
        let (chain, stream) = plan.parts(room).ok_or_else(|| {
            format!(
                "a quarter of its free memory is {} MiB, and at least {} are needed to exceed the caches; \
                 free memory, or raise the limit of the control group",
                room >> 20,
                plan.room_min().div_ceil(1 << 20)
            )
        })?;
        let (mapping, huge_bytes) = bound(node, chain + stream)?;
        Ok(Buffer::from_parts(mapping, chain, huge_bytes))
    }

    /// Makes a buffer of memory that is there: first the chain, and streams in the rest. Fills both.
    pub(crate) fn from_parts(mapping: Mapping, chain: usize, huge_bytes: usize) -> Buffer {
        make_chain(&mapping, 0..chain);
        mapping.stream_write(chain..mapping.len(), FILL);
        Buffer {
            chain: 0..chain,
            chain_at: AtomicUsize::new(0),
            stream: chain..mapping.len(),
            mapping: Arc::new(mapping),
            huge_bytes,
        }
    }

    /// Returns how many bytes a stream reads before the caches of its CPU hold nothing that was read before. The chain has twice as many.
    pub fn warm_bytes(&self) -> usize {
        self.chain.len() / 2
    }
}

/// Returns how much memory a probe may use on a node.
fn room_bytes(node: &Node, memory: &Memory) -> u64 {
    let of_node = node.kernel_node.and_then(node_available_bytes);
    let of_process = memory.usable_now_bytes();
    of_process.min(of_node.unwrap_or(u64::MAX)) / SHARE
}

/// Allocates `len` bytes in a node's memory, and checks that they are there. Returns also how many of them are on huge pages.
pub(crate) fn bound(node: &Node, len: usize) -> Result<(Mapping, usize), String> {
    let failed = |action: &str, error: std::io::Error| match node.kernel_node {
        Some(kernel_node) => format!("cannot {action} kernel node {kernel_node}: {error}"),
        None => format!("cannot {action} this machine: {error}"),
    };
    let mapping = Mapping::create("jericho-probe", len, true)
        .map_err(|error| failed("map memory for", error))?;
    if let Some(kernel_node) = node.kernel_node {
        let bound = mapping.bind(0..mapping.len(), kernel_node);
        bound.map_err(|error| {
            let reason = failed("bind memory to", error);
            format!("{reason}; a container may forbid mbind(2): run jericho probe outside of it")
        })?;
    }
    let populated = mapping.populate_huge(0..mapping.len());
    let huge_bytes = populated.map_err(|error| failed("allocate memory of", error))?;
    if let Some(kernel_node) = node.kernel_node {
        check_nodes(&mapping, kernel_node)?;
    }
    Ok((mapping, huge_bytes))
}

/// Asks the kernel where the pages are.
fn check_nodes(mapping: &Mapping, kernel_node: u32) -> Result<(), String> {
    // A kernel without NUMA has no directory of nodes, does not tell where pages are, and has one node only.
    if !Path::new("/sys/devices/system/node").exists() {
        return Ok(());
    }
    let offsets: Vec<usize> = (0..mapping.len()).step_by(CHECK_EVERY).collect();
    let nodes = mapping
        .nodes_of(&offsets)
        .map_err(|error| format!("the kernel does not tell where its pages are: {error}"))?;
    match nodes.iter().find(|node| **node != Some(kernel_node)) {
        None => Ok(()),
        Some(Some(other)) => Err(format!(
            "its pages are on kernel node {other} instead of {kernel_node}, although they were bound"
        )),
        Some(None) => Err("some of its pages are not there, although they were populated".into()),
    }
}

/// Writes a chain through all lines of a range: one cycle, in random order (Sattolo's algorithm), so that no prefetcher can guess the next
/// line.
fn make_chain(mapping: &Mapping, range: Range<usize>) {
    let lines = range.len() / LINE_BYTES;
    let offset = |line: usize| range.start + line * LINE_BYTES;
    let get = |line: usize| {
        let mut next = [0; 8];
        mapping.copy_out(offset(line), &mut next);
        next
    };
    for line in 0..lines {
        mapping.copy_in(offset(line), &(offset(line) as u64).to_ne_bytes());
    }
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    for line in (1..lines).rev() {
        let other = random.below(line);
        let (one, two) = (get(line), get(other));
        mapping.copy_in(offset(line), &two);
        mapping.copy_in(offset(other), &one);
    }
}

/// Pseudo-random numbers (xorshift64*). The same order each time makes probes comparable.
struct Random(u64);

impl Random {
    /// Returns a number below `limit`, which is not 0.
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let number = self.0.wrapping_mul(0x2545_F491_4F6C_DD1D);
        ((u128::from(number) * limit as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jericho_topology::Topology;

    fn node() -> Node {
        Topology::from_spec("virtual:2").unwrap().nodes[1].clone()
    }

    #[test]
    fn the_chain_is_one_cycle_through_all_lines() {
        let mapping = Mapping::create("chain", 64 << 10, false).unwrap();
        let range = 4096..4096 + 300 * LINE_BYTES;
        make_chain(&mapping, range.clone());
        let mut visited = std::collections::BTreeSet::new();
        let mut at = range.start;
        while visited.insert(at) {
            assert!(range.contains(&at) && at.is_multiple_of(LINE_BYTES));
            at = mapping.chase(at, 1);
        }
        assert_eq!((visited.len(), at), (300, range.start));
    }

    #[test]
    fn memory_is_on_the_node_that_it_was_bound_to() {
        let node = node();
        let (mapping, _) = bound(&node, 4 << 20).unwrap();
        if let Some(kernel_node) = node.kernel_node {
            assert_eq!(mapping.bound_node(4096).unwrap(), Some(kernel_node));
            check_nodes(&mapping, kernel_node).unwrap();
            let reason = check_nodes(&mapping, kernel_node + 1).unwrap_err();
            assert!(reason.contains("although they were bound"), "{reason}");
        }
    }

    #[test]
    fn a_node_that_does_not_exist_is_named() {
        let node = Node {
            kernel_node: Some(1000),
            ..node()
        };
        let reason = bound(&node, 4 << 20).unwrap_err();
        assert!(reason.contains("kernel node 1000"), "{reason}");
    }

    #[test]
    fn a_node_short_of_memory_is_refused_before_it_is_used() {
        let topology = Topology::from_spec("virtual:2").unwrap();
        let plan = Plan::new(&topology, &crate::Options::default());
        let memory = Memory {
            total_bytes: 1 << 30,
            available_bytes: 1 << 30,
            limit: None,
            group_available_bytes: Some(32 << 20),
        };
        let reason = Buffer::new(&node(), &plan, &memory).err().unwrap();
        assert!(reason.contains("is 8 MiB"), "{reason}");
    }
}
