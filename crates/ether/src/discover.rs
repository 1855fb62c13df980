//! Asks the targets on some networks for their exports.

use std::io;
use std::time::{Duration, Instant};

use jericho_remote::{Discovery, Found};
use jericho_sys::poller::Poller;

use crate::links::{LinkError, Links, entropy};
use crate::outbox::Mode;
use crate::placement::topology;
use crate::socket::{LinkChoice, Opening, Side};

/// How often it asks: a frame may be lost.
const QUESTIONS: u32 = 3;

/// Why hosts cannot be asked.
#[derive(Debug, thiserror::Error)]
pub enum DiscoverError {
    /// A network interface cannot be used.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// Another error.
    #[error("cannot ask the hosts on {interfaces}: {source}")]
    Io {
        /// The interfaces.
        interfaces: String,
        /// The kernel's reason.
        source: io::Error,
    },
}

/// Asks on the interfaces, and collects answers for a time. Returns what is served and not hidden, by host and name.
pub fn discover(
    interfaces: &[String],
    ethertype: u16,
    time: Duration,
) -> Result<Vec<Found>, DiscoverError> {
    let failed = |source| DiscoverError::Io {
        interfaces: interfaces.join(", "),
        source,
    };
    let topology = topology().map_err(failed)?;
    // A few frames are no reason for an XDP program.
    let opening = Opening {
        ethertype,
        choice: LinkChoice::Packet,
        side: Side::Initiator,
    };
    let links = Links::open(interfaces, opening, &topology, 1)?;
    let mut receiver = links.receiver((0..interfaces.len() as u16).collect());
    let random = entropy().map_err(failed)?;
    let outboxes = links.outboxes(Mode::Inline);
    let mut discovery = Discovery::new(&links.links(), ethertype, random);
    let poller = Poller::new().map_err(failed)?;
    for (nic, socket) in receiver.sockets() {
        poller.add(socket, nic.into()).map_err(failed)?;
    }
    let start = Instant::now();
    for question in 1..=QUESTIONS {
        for frame in discovery.questions() {
            outboxes.add(frame, None);
        }
        outboxes.send();
        let end = start + time * question / QUESTIONS;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            poller.wait(&mut Vec::new(), Some(left)).map_err(failed)?;
            receiver.receive();
            receiver.take(|_, nic, frame| discovery.on_frame(nic, frame));
        }
    }
    Ok(discovery.found())
}
