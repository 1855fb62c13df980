//! The workloads of the papers on NUMA and storage, with their placements and measures, on any directory or device.
//!
//! A *placement* says on which nodes the thread, its buffer, the cached page and the device are ([`placement`]). A *seat* is one thread's
//! part of it ([`seats`]). [`run`] runs the threads of a workload and measures them, and [`record`] is the line of JSON that comes of it.
//!
//! Sources: *NUMA Implications for Storage I/O Throughput in Modern Servers* (Akram, Marazakis, Bilas 2012), sections III and IV, here
//! called *Implications*; *Jericho: Achieving Scalability Through Optimal Data Placement* (MSST 2014), section III, here called *Jericho*.
#![forbid(unsafe_code)]

pub mod buffer;
pub mod case;
mod direct;
pub mod disks;
pub mod engine;
pub mod error;
pub mod fio;
mod fits;
pub mod frames;
pub mod fs_mark;
pub mod kind;
pub mod machine;
pub mod meter;
pub mod options;
pub mod part;
pub mod placement;
pub mod plan;
mod random;
pub mod reach;
pub mod record;
mod resident;
pub mod room;
pub mod run;
pub mod schedule;
pub mod seats;
mod speed;
pub mod target;
pub mod trace;
pub mod work;

pub use error::{Error, Result};
