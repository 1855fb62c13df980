//! The command as scripts and people use it: the life cycle of a mount, output, errors, and rights of other users.
#![forbid(unsafe_code)]

#[path = "../support/mod.rs"]
mod support;

mod add;
mod attach;
#[cfg(feature = "faults")]
mod attach_faults;
mod bad_input;
mod bench;
mod bench_generators;
mod bench_paths;
mod devices;
#[cfg(feature = "faults")]
mod failing_device;
mod fsx;
mod full_host;
mod grow;
#[cfg(feature = "faults")]
mod hanging_device;
mod helpers;
mod life;
mod memory_limit;
mod namespaces;
mod nbd;
mod nbd_clients;
mod one_user;
mod ordinary_user;
mod other_users;
mod output;
mod packet_helper;
mod pjdfstest;
mod preallocation;
mod predict;
mod probe;
mod readme;
mod report;
mod run;
mod serve;
mod trim;
mod units;
mod wire;
