//! Measures how uneven a machine is: bandwidth and latency from the CPUs of every node to the memory of every node, the cost of a thread's
//! migration, and the rates at which devices fill memory of every node.
//!
//! Invariants:
//! - A measurement touches only memory that was bound to its node, populated, and then found there by the kernel (`buffer`).
//! - A thread that measures is pinned to one CPU, or for a device to the CPUs of one node. It checks this at its start and at its end (`threads`).
//! - Devices are opened for reading only, and are never written.
//! - What could not be measured is `None` in a [`Report`], with the reason in its list. It is never a number.
//!
//! Reading order: `report` (the results, and the contract of the file, specified in `docs/formats/probe.md`), `run` (the order of the
//! measurements), `plan` (sizes and times), `buffer`, `threads`, `streams`, `memory` and `device` (the measurements), `store` (the file), `costs` (what
//! migration takes from a report), `table` and `heat_map` (reports for people). The page is `docs/internals/probe.md`.

#![forbid(unsafe_code)]

mod buffer;
mod caches;
mod costs;
mod device;
mod digest;
mod error;
#[cfg(test)]
mod example;
mod heat_map;
mod memory;
mod plan;
mod report;
mod run;
mod store;
mod streams;
mod table;
mod threads;
mod time;

pub use costs::{move_costs, move_ns};
pub use digest::digest;
pub use error::{LoadError, ProbeError, SaveError};
pub use heat_map::{Cell, Grid, grids, head, heat_map};
pub use plan::{Options, Plan};
pub use report::{
    DeviceRates, FORMAT, Latency, Machine, Matrix, NodeReport, OneCpu, Report, Skipped,
    TopologyReport,
};
pub use run::{Progress, run};
pub use store::{FILE_NAME, load, load_any, save};
pub use table::table;
