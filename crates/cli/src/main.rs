//! The jericho command.
#![forbid(unsafe_code)]
fn main() {}
