//! Packet sockets for users without the capability CAP_NET_RAW. The program `jericho-packet` has this capability, and does one thing with it: it opens
//! one socket for one Ethertype on one interface, and sends the socket to its caller.
//!
//! `lend` is all that the program does, and `borrow` is its caller's side. Between them, `request` is the program's arguments, and `answer` the
//! message that it sends. The program runs all code of `request` and `lend` with the capability, and its caller may be hostile.
#![forbid(unsafe_code)]

mod answer;
mod borrow;
mod lend;
mod request;

pub use answer::{ANSWER_BYTES_MAX, Answer};
pub use borrow::{BorrowError, borrow};
pub use lend::lend;
pub use request::{Request, RequestError};
