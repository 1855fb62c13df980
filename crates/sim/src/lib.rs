//! A simulated device with seeded faults.
//!
//! For tests: the code under test cannot tell it from a real device, and the test decides when an
//! operation fails, when the power goes, and can repeat both from a seed. It knows nothing of what
//! is stored on it.
//!
//! `device` is the device, `image` its contents and what a power cut leaves of them, `plan` what
//! goes wrong when, `hook` what a test runs before an operation, `random` the generator behind
//! both.

#![forbid(unsafe_code)]

mod device;
mod hook;
mod image;
mod plan;
mod random;

pub use device::{Logged, SimDevice};
pub use plan::{Effect, Fault, FaultPlan, Operation};
pub use random::Random;
