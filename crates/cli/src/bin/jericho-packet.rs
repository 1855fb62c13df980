//! The program `jericho-packet`, which opens a packet socket for a user who may not. Its code is in the crate `packet`; it is built here so that it is
//! always beside `jericho`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    jericho_packet::lend(std::env::args_os().skip(1))
}
