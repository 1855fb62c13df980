//! Ids of nodes.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Maximum number of nodes of a topology; no kernel supports more.
pub const NODES_MAX: usize = 1024;

/// A node of a `Topology`: its position in `Topology::nodes`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct NodeId(pub u16);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
