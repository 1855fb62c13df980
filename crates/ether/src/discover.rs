//! Asks the targets on some networks for their exports.

use std::io;
use std::time::{Duration, Instant};

use jericho_remote::{Discovery, Found};
use jericho_sys::poller::Poller;

use crate::links::{LinkError, Links, entropy};

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
    let mut links = Links::open(interfaces, ethertype)?;
    let failed = |source| DiscoverError::Io {
        interfaces: interfaces.join(", "),
        source,
    };
    let random = entropy().map_err(failed)?;
    let mut discovery = Discovery::new(&links.links(), ethertype, random);
    let poller = Poller::new().map_err(failed)?;
    for (key, socket) in (0..).zip(links.sockets()) {
        poller.add(socket, key).map_err(failed)?;
    }
    let start = Instant::now();
    for question in 1..=QUESTIONS {
        for frame in discovery.questions() {
            links.queue(frame);
        }
        links.send_queued(|_| &[]);
        let end = start + time * question / QUESTIONS;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            poller.wait(&mut Vec::new(), Some(left)).map_err(failed)?;
            links.receive(|link, frame| discovery.on_frame(link, frame));
        }
    }
    Ok(discovery.found())
}
