//! A cost model: predicts throughput over threads for a placement, on machines that are described and not there.
//!
//! It knows bandwidths, and shares them fairly among threads. It does not know caches of CPUs, locks or interrupts: docs/internals/model.md
//! has the equations, the limits, and how far the predictions are from the papers.
//!
//! Layers, from the bottom: `fair` shares resources among flows. `routes` has links and ways over them, `machine` a machine. `check` makes one
//! from the parts that a `file` or a `probe` gives. `demand` is what a byte of an operation takes of each resource. `placement` and
//! `network` make flows of named placements, and `trace` those of a real run. `predict` is the throughput of flows. `papers` has results of
//! the papers, `values` computes them, and `judged` compares. `sensitivity` shows which figures matter. The crate does no I/O.
#![forbid(unsafe_code)]

mod check;
mod demand;
mod fair;
mod file;
mod judged;
mod machine;
mod network;
mod papers;
mod placement;
mod predict;
mod probe;
mod routes;
mod sensitivity;
mod shipped;
mod threads;
mod trace;
mod values;

pub use check::{Invalid, NODES_MAX};
pub use fair::{Flow, Share, Stop, share};
pub use file::{MachineError, parse};
pub use judged::{Row, Verdict, rows};
pub use machine::{Device, Machine, Node, Traffic};
pub use network::{Buffers, Network, OneNode};
pub use papers::{NOT_PREDICTED, NotPredicted};
pub use placement::{Devices, Placement, named, names, predict_placement};
pub use predict::{Limit, Prediction};
pub use routes::{Carries, Link};
pub use sensitivity::{Change, changes};
pub use shipped::{SHIPPED, Shipped, shipped};
pub use threads::{PlacementError, THREADS_MAX};
pub use trace::{LINE_BYTES_MAX, TRACE_THREADS_MAX, Trace, TraceError};
