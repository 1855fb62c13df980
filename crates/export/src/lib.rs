//! Serves one device to clients of the NBD protocol: qemu, libnbd, the kernel's nbd driver.
//!
//! The crate knows no volume and no filesystem: a client sees the blocks of a device. Clients are not trusted. A client that sends
//! nonsense, stops reading or disappears loses its own connection, and takes a bounded amount of memory meanwhile.
//!
//! # The way of a request
//! ```text
//! reader thread of the connection: header, checks, budget, payload
//!        │ queue of the connection
//! a worker thread of the connection: range lock, blocking call of the device, unlock, reply
//! ```
//! The next request is read while earlier ones run, and replies are sent as the requests end. A worker holds no lock that other
//! connections use while it sends.
//!
//! # Where to read on
//! `protocol` has the numbers of the protocol. `span` has the blocks around a range of bytes. [`Disk`] turns requests for
//! bytes into requests for blocks, and `ranges` keeps requests apart that change the same block. [`Export`] is what NBD adds to it. `options` parses the options of the negotiation and `negotiation` answers them;
//! `request` parses and checks a request, and `reply` makes replies. `transmission` runs the requests of a connection within the
//! limits of `budget`. `socket` listens, and [`Server`] runs the connections and ends them.

#![forbid(unsafe_code)]

mod budget;
mod disk;
mod ended;
mod export;
mod negotiation;
mod options;
mod protocol;
mod ranges;
mod reply;
mod request;
mod server;
mod socket;
mod span;
mod transmission;

use std::io::{Read, Write};

pub use disk::{Disk, Zeroed, Zeroes};
pub use ended::Ended;
pub use export::{Export, ExportOptions, NAME_BYTES_MAX};
pub use protocol::TCP_PORT;
pub use server::{ServeError, Server};
pub use socket::{ListenError, Listener};

/// Serves one client whose bytes come from `input` until it disconnects. Replies go to `output`. Servers use [`Server`]; this is
/// for tests that have no socket.
pub fn converse(
    export: &Export,
    mut input: impl Read,
    mut output: impl Write + Send,
) -> Result<(), Ended> {
    match negotiation::negotiate(export, &mut input, &mut output)? {
        Some(agreed) => transmission::transmit(export, agreed, "a test", &mut input, output),
        None => Ok(()),
    }
}
