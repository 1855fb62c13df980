//! The protocol on a simulated wire, with a device that loses what is not flushed, and an oracle for each block.

mod disk;
mod keys;
mod lanes;
mod oracle;
mod promises;
mod random;
mod strangers;
mod world;
