//! Cases for the machine `nics`: two hosts whose interfaces are on two nodes. The initiator is this process, or a daemon, and the target is in the network
//! namespace `target`.

mod bad_network;
mod configurations;
mod hosts;
mod intervals;
mod kernel;
mod load;
mod nodes;
mod persistent;
mod pools;
