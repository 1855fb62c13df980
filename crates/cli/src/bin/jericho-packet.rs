//! The program `jericho-packet`, which opens a packet socket for a user without the capability CAP_NET_RAW. Its code is in the crate `packet`. This
//! crate builds the program, so that it is always beside `jericho`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    jericho_packet::lend(std::env::args_os().skip(1))
}
