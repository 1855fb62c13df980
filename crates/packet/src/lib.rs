//! Packet sockets for users who may not open them. The program `jericho-packet` has the capability CAP_NET_RAW, and does one thing with it: it opens
//! one socket for one Ethertype on one interface, and hands it over.
//!
//! `lend` is all that the program does, and `borrow` is its caller's side. Between them, `request` is the program's arguments, and `answer` the
//! message that it sends. Everything in `request` and `lend` runs with the capability, for a user who is not trusted.
#![forbid(unsafe_code)]

mod answer;
mod borrow;
mod lend;
mod request;

pub use answer::{ANSWER_BYTES_MAX, Answer};
pub use borrow::{BorrowError, borrow};
pub use lend::lend;
pub use request::{Request, RequestError};
