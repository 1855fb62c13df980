//! A simulated device with seeded faults.
//!
//! For tests. The code under test cannot distinguish it from a real device. The test decides when an operation fails and when the
//! power is cut, and repeats both from a seed. The device does not interpret the stored bytes.
//!
//! `device` is the device, `image` its contents before and after a power cut, `plan` the planned faults, `hook` the test's code
//! before an operation, and `random` the generator of random numbers.

#![forbid(unsafe_code)]

mod device;
mod hook;
mod image;
mod plan;
mod random;

pub use device::{Logged, SimDevice};
pub use plan::{Effect, Fault, FaultPlan, Operation};
pub use random::Random;
