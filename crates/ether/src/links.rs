//! The sockets of a target or an initiator.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jericho_format::wire::{HEADER_BYTES, MTU_MIN, PAYLOAD_BYTES_MAX};
use jericho_packet::BorrowError;
use jericho_remote::{Entropy, Link};
use jericho_sys::packet::{self, Frames, PacketError};
use jericho_sys::xdp::XdpError;
use jericho_sys::{process, service};
use jericho_topology::Topology;

use crate::outbox::{Mode, Outboxes};
use crate::placement;
use crate::socket::{Opening, Socket, SocketError};

/// Limits of the number of frames that a peer may have in flight.
const CREDITS: std::ops::RangeInclusive<usize> = 4..=896;
/// Frames that are taken from one socket before the others have their turn.
const FRAMES_AT_ONCE: usize = 32;
/// Room for the largest frame.
const FRAME_BYTES_MAX: usize = HEADER_BYTES + PAYLOAD_BYTES_MAX + 64;

/// Why the network interfaces cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// A socket could not be opened.
    #[error(transparent)]
    Packet(#[from] PacketError),
    /// This process may not open a socket, and the helper that may has opened none.
    #[error(transparent)]
    Borrow(#[from] BorrowError),
    /// There is no XDP socket, which the user has demanded.
    #[error(transparent)]
    Xdp(#[from] XdpError),
    /// There is no interface to use: the user has named none, and none is up with a sufficient MTU.
    #[error(
        "no Ethernet interface is up here and has an MTU of at least {MTU_MIN}: bring one up, or name one with --nic"
    )]
    None,
    /// An interface was named twice.
    #[error("the network interface {0} is named twice")]
    Twice(String),
    /// An MTU is too small.
    #[error(
        "the network interface {interface} has an MTU of {mtu} bytes; at least {MTU_MIN} are needed: `ip link set {interface} mtu {MTU_MIN}`"
    )]
    Mtu {
        /// The interface.
        interface: String,
        /// Its MTU.
        mtu: usize,
    },
}

impl From<SocketError> for LinkError {
    fn from(error: SocketError) -> LinkError {
        match error {
            SocketError::Packet(error) => error.into(),
            SocketError::Borrow(error) => error.into(),
            SocketError::Xdp(error) => error.into(),
        }
    }
}

/// Sockets, one for each interface.
pub(crate) struct Links {
    sockets: Arc<Vec<Socket>>,
    names: Arc<Vec<String>>,
    /// The interfaces' NUMA nodes, as far as they are known.
    nodes: Vec<Option<u32>>,
    /// Channels on each interface.
    channels: u16,
    clock: Clock,
}

/// The time of the protocol.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock(Instant);

impl Clock {
    /// Returns the time.
    pub fn now(self) -> Duration {
        // Not zero: a time before the start must be possible.
        self.0.elapsed() + Duration::from_secs(1000)
    }
}

impl Links {
    /// Opens a socket on each interface, for some channels on each.
    pub fn open(
        interfaces: &[String],
        opening: Opening,
        topology: &Topology,
        channels: u16,
    ) -> Result<Links, LinkError> {
        let nodes = placement::nodes_of(topology, interfaces);
        let mut sockets = Vec::new();
        for (number, interface) in interfaces.iter().enumerate() {
            if interfaces[..number].contains(interface) {
                return Err(LinkError::Twice(interface.clone()));
            }
        }
        for (interface, node) in interfaces.iter().zip(&nodes) {
            let node = placement::kernel_node(topology, *node);
            let socket = opening.open(interface, node)?;
            if socket.mtu() < MTU_MIN {
                return Err(LinkError::Mtu {
                    interface: interface.clone(),
                    mtu: socket.mtu(),
                });
            }
            sockets.push(socket);
        }
        if sockets.is_empty() {
            return Err(LinkError::None);
        }
        Ok(Links {
            nodes,
            names: Arc::new(interfaces.to_vec()),
            sockets: Arc::new(sockets),
            channels,
            clock: Clock(Instant::now()),
        })
    }

    /// Returns what the protocol must know of the links: one for each channel. All interfaces have a first channel, then all have a second one.
    pub fn links(&self) -> Vec<Link> {
        let frames = |socket: &Socket| {
            let share = socket.frames() / usize::from(self.channels);
            share.clamp(*CREDITS.start(), *CREDITS.end())
        };
        let link = |(nic, socket): (u16, &Socket)| Link {
            mac: socket.mac(),
            mtu: socket.mtu(),
            credit: frames(socket) as u16,
            node: self.nodes[usize::from(nic)],
            nic,
        };
        let channels = 0..self.channels;
        channels
            .flat_map(|_| (0..).zip(&*self.sockets).map(link))
            .collect()
    }

    /// Returns the NUMA node of each interface, as far as it is known.
    pub fn nodes(&self) -> &[Option<u32>] {
        &self.nodes
    }

    /// Returns what receives the frames of some interfaces.
    pub fn receiver(&self, nics: Vec<u16>) -> Receiver {
        let batch = |nic| Batch {
            nic,
            frames: Frames::new(FRAMES_AT_ONCE, FRAME_BYTES_MAX),
            has_frames: false,
            is_dead: false,
        };
        Receiver {
            sockets: Arc::clone(&self.sockets),
            names: Arc::clone(&self.names),
            batches: nics.into_iter().map(batch).collect(),
        }
    }

    /// Returns the names of the interfaces.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the clock of the protocol.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// Returns what sends frames.
    pub fn outboxes(&self, mode: Mode) -> Outboxes {
        Outboxes::new(&self.sockets, &self.names, mode)
    }
}

/// Receives the frames of some interfaces, without the lock of the protocol.
pub(crate) struct Receiver {
    sockets: Arc<Vec<Socket>>,
    names: Arc<Vec<String>>,
    batches: Vec<Batch>,
}

/// The place of a frame among those that were received last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place(usize, usize);

struct Batch {
    nic: u16,
    frames: Frames,
    has_frames: bool,
    /// The interface is gone, which was logged.
    is_dead: bool,
}

impl Receiver {
    /// Returns the descriptors of the sockets, with the numbers of their interfaces: one or more for each.
    pub fn sockets(&self) -> impl Iterator<Item = (u16, BorrowedFd<'_>)> {
        let numbers = self.batches.iter().map(|batch| batch.nic);
        numbers.flat_map(|nic| {
            let fds = self.sockets[usize::from(nic)].fds();
            fds.into_iter().map(move |fd| (nic, fd))
        })
    }

    /// Receives frames, at most some from each interface. Returns whether more may have arrived.
    pub fn receive(&mut self) -> bool {
        let mut has_more = false;
        for batch in &mut self.batches {
            let nic = usize::from(batch.nic);
            batch.has_frames = false;
            match self.sockets[nic].receive_many(&mut batch.frames) {
                Ok(more) => {
                    has_more |= more;
                    batch.has_frames = batch.frames.iter().next().is_some();
                    batch.is_dead &= !batch.has_frames;
                }
                Err(error) => {
                    if !std::mem::replace(&mut batch.is_dead, true) {
                        let interface = &self.names[nic];
                        tracing::warn!(%error, "the network interface {interface} went down; if it was removed, start again");
                    }
                }
            }
        }
        has_more
    }

    /// Gives the frames that `receive` has received to `take`, with their place and the number of the interface. `take` may decrypt them in place.
    pub fn take(&mut self, mut take: impl FnMut(Place, u16, &mut [u8])) {
        for (at, batch) in self.batches.iter_mut().enumerate() {
            if !batch.has_frames {
                continue;
            }
            for (number, frame) in batch.frames.iter_mut().enumerate() {
                take(Place(at, number), batch.nic, frame);
            }
        }
    }

    /// Returns the frame at a place, as `take` has left it.
    pub fn frame(&self, Place(at, number): Place) -> &[u8] {
        self.batches[at].frames.iter().nth(number).unwrap_or(&[])
    }
}

/// Returns the names of the Ethernet interfaces that are up and whose MTU suffices.
pub fn interfaces() -> io::Result<Vec<String>> {
    let all = packet::interfaces()?.into_iter();
    let mut names: Vec<String> = all
        .filter(|(_, mtu)| *mtu >= MTU_MIN)
        .map(|(name, _)| name)
        .collect();
    names.sort();
    Ok(names)
}

/// Returns random numbers that nobody can guess.
pub(crate) fn entropy() -> io::Result<Entropy> {
    // The kernel may only fail the first call. Keys follow from these numbers, so there is no substitute for them.
    process::random_u64()?;
    let random =
        || process::random_u64().unwrap_or_else(|error| panic!("no random numbers: {error}"));
    Ok(Box::new(move || service::run(random)))
}
