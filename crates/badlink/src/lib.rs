//! Links that spoil frames, from a seed. Frames and times go in, frames come out: the crate has no sockets, no clock and no threads.
//!
//! `direction` spoils the frames of one direction of the command `jericho wire`. The simulated wire of the crate `sim` uses the other files,
//! too: `flight` has the frames that are under way, `chance` the probability of a fault, and `random` the generator of random numbers.
#![forbid(unsafe_code)]

mod chance;
mod direction;
mod flight;
mod random;

pub use chance::{Chance, ChanceError};
pub use direction::{Counts, Cut, Direction, Faults, HOLD_MAX};
pub use flight::Flight;
pub use random::Random;
