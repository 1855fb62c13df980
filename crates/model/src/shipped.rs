//! Machines of the papers, as files beside this crate. Each figure's source is in a comment there.

use crate::file::{MachineError, parse};
use crate::machine::Machine;

/// A machine file that is part of the program.
#[derive(Clone, Copy, Debug)]
pub struct Shipped {
    /// Its name in the command.
    pub name: &'static str,
    /// The machine, for users.
    pub description: &'static str,
    /// The file.
    pub text: &'static str,
}

/// All of them.
pub const SHIPPED: &[Shipped] = &[
    Shipped {
        name: "opteron",
        description: "the Jericho paper's server: 4 sockets, 8 nodes, 64 cores",
        text: include_str!("../machines/opteron.toml"),
    },
    Shipped {
        name: "tylersburg",
        description: "the server of NUMA implications for storage I/O: 2 nodes, 4 storage controllers",
        text: include_str!("../machines/tylersburg.toml"),
    },
    Shipped {
        name: "tyche",
        description: "the Tyche paper's two hosts: 2 nodes and 6 network interfaces each",
        text: include_str!("../machines/tyche.toml"),
    },
];

/// Returns the shipped machine with this name. `None`: there is none.
pub fn shipped(name: &str) -> Option<Result<Machine, MachineError>> {
    let found = SHIPPED.iter().find(|shipped| shipped.name == name)?;
    Some(parse(&format!("{}.toml", found.name), found.text))
}
