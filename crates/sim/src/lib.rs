//! A simulated device with seeded faults.
//!
//! For tests. The code under test cannot distinguish it from a real device. The test decides when an operation fails and when the
//! power is cut, and repeats both from a seed. The device does not interpret the stored bytes.
//!
//! `device` is the device, `image` its contents before and after a power cut, `history` the recorded changes of a device, `supply`
//! the power of several devices, `set` devices that lose their power together, `plan` the planned faults, `hook` the test's code
//! before an operation, and `traffic` the numbers of operations. Two more tools are for tests: `lines` records the cache lines that parts of a
//! program use, and `wire` carries frames and loses some. The generator of random numbers is that of the crate `badlink`.

#![forbid(unsafe_code)]

mod device;
mod history;
mod hook;
mod image;
pub mod lines;
mod plan;
mod set;
mod supply;
mod traffic;
mod wire;

pub use device::{Begun, Logged, SimDevice};
pub use jericho_badlink::Random;
pub use plan::{Effect, Fault, FaultPlan, Operation};
pub use set::DeviceSet;
pub use supply::PowerSupply;
pub use traffic::Traffic;
pub use wire::{Arrival, Wire, WireFaults};
