//! How many threads a placement has on which nodes, and why it cannot have them.

/// Most threads of a prediction.
pub const THREADS_MAX: u32 = 1 << 20;

/// A placement that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// There is no such name.
    #[error("there is no placement {name}; those of this machine: {known}")]
    Unknown {
        /// The name.
        name: String,
        /// All names for the machine.
        known: String,
    },
    /// There are no threads, or too many.
    #[error("{0} threads: expected 1 to {THREADS_MAX}")]
    Threads(u32),
    /// The machine lacks what the placement uses.
    #[error("the machine {machine} has no {what}, which the placement needs")]
    Lacks {
        /// The machine.
        machine: String,
        /// Nodes, devices or hosts.
        what: &'static str,
    },
}

/// Assigns threads to nodes in turn. Returns the nodes that get some, and how many.
pub(crate) fn in_turn(nodes: &[usize], threads: u32) -> impl Iterator<Item = (usize, u32)> {
    let all = nodes.len() as u32;
    let count = move |i: usize| threads / all + u32::from((i as u32) < threads % all);
    nodes
        .iter()
        .enumerate()
        .map(move |(i, node)| (*node, count(i)))
        .filter(|(_, count)| *count > 0)
}
