//! A remote device compared with NBD and AoE: `make compare-remote`.
//!
//! One thread of this process drives three [`client::Client`]s in turn over the same pair of virtual interfaces: [`jericho`], [`nbd`] and
//! [`aoe`]. Their targets run in another network namespace ([`hosts`], [`targets`]). [`load`] generates the transfers, [`usage`] counts CPU
//! time, and [`raw`] measures what frames of the same sizes reach without any protocol. [`sides`] lists what is compared: a further mode of
//! Jericho is an entry of [`modes::Mode::all`]. [`check`] compares written with read bytes before anything is measured. [`main_table`],
//! [`scaling`], [`senders`], [`failover`], [`faulty`] and [`libnbd`] are the tables; [`record`] writes their rows as JSON lines, and
//! [`conditions`] what the machine was like.

pub mod aoe;
pub mod check;
pub mod client;
pub mod conditions;
pub mod failover;
pub mod faulty;
pub mod hosts;
pub mod jericho;
pub mod libnbd;
pub mod load;
pub mod main_table;
pub mod modes;
pub mod nbd;
pub mod plan;
pub mod raw;
pub mod record;
pub mod scaling;
pub mod senders;
pub mod sides;
pub mod targets;
pub mod usage;
