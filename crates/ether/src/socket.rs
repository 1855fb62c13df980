//! The socket of one interface: a packet socket, alone or with an XDP socket beside it.
//!
//! An XDP program that took all frames of the Ethertype would take those of other processes, too. So the program takes only frames whose index
//! this process has chosen. All others reach the packet sockets of all processes, as if there was no program. A frame of this process that the
//! program lets pass reaches the packet socket of this process, so each frame is received once, by one of the two.

use std::io::{self, IoSlice};
use std::mem::offset_of;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use jericho_format::wire::{FLAG_FROM_TARGET, FrameHeader, Handshake, frame_kind};
use jericho_packet::BorrowError;
use jericho_sys::packet::{Frames, PacketError, PacketSocket};
use jericho_sys::xdp::{Numbers, Selection, XdpError, XdpSocket};
use zerocopy::FromBytes;

use crate::probe;

/// What is asked for as a receive buffer.
const RECEIVE_BYTES: usize = 8 << 20;
/// What the kernel counts for a frame of the largest size, with room to spare: 4 MiB hold 640 frames of 8 KiB.
const FRAME_COST_BYTES: usize = 16 << 10;
/// How long the kernel may take to send what is in all chunks: 2.8 MB on a link of 1 Gbit/s.
const SENT_WITHIN: Duration = Duration::from_millis(30);
/// The packet socket has its turn after this many batches from the XDP socket at the latest.
const BATCHES: u32 = 8;

/// Which sockets carry frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkChoice {
    /// XDP on each interface whose driver has zero copy and where a probe at the start finds that XDP is faster. Else packet sockets.
    #[default]
    Auto,
    /// Packet sockets.
    Packet,
    /// XDP sockets. An interface that has none is refused.
    Xdp,
}

/// Which side of the protocol receives on a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The only target on its interfaces: `server` reserves them before it opens sockets.
    Target,
    /// One of several initiators, perhaps.
    Initiator,
}

/// What all sockets of a process have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opening {
    pub ethertype: u16,
    pub choice: LinkChoice,
    pub side: Side,
}

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SocketError {
    #[error(transparent)]
    Packet(#[from] PacketError),
    #[error(transparent)]
    Borrow(#[from] BorrowError),
    #[error(transparent)]
    Xdp(#[from] XdpError),
}

/// The socket of one interface. Any thread may send; one receives.
#[derive(Debug)]
pub(crate) enum Socket {
    Packet(PacketSocket),
    Xdp(Box<Both>),
}

/// A packet socket, and an XDP socket for frames whose index this process has chosen.
#[derive(Debug)]
pub(crate) struct Both {
    packet: PacketSocket,
    xdp: XdpSocket,
    /// Batches that the XDP socket has given since the packet socket had its turn.
    batches: AtomicU32,
}

impl Opening {
    /// Opens the socket of an interface. The memory of an XDP socket is on a node, if the kernel has some there.
    pub fn open(&self, interface: &str, node: Option<u32>) -> Result<Socket, SocketError> {
        match self.choice {
            LinkChoice::Packet => Ok(Socket::Packet(self.lent_or_opened(interface)?)),
            LinkChoice::Xdp => {
                let packet = self.opened(interface).map_err(|error| match error {
                    // The helper of users without capabilities gives packet sockets only.
                    PacketError::Denied(interface) => XdpError::Denied(interface).into(),
                    error => SocketError::Packet(error),
                })?;
                let xdp = self.xdp(interface, &packet, node)?;
                tracing::info!("{interface}: {}", description(&xdp));
                Ok(Socket::with(packet, xdp))
            }
            LinkChoice::Auto => {
                let packet = self.lent_or_opened(interface)?;
                if !XdpSocket::may_be_zero_copy(interface, packet.mtu()) {
                    tracing::debug!("{interface}: a packet socket; its driver has no zero copy");
                    return Ok(Socket::Packet(packet));
                }
                match self.probed(interface, &packet, node) {
                    Ok(xdp) => {
                        tracing::info!("{interface}: {}", description(&xdp));
                        Ok(Socket::with(packet, xdp))
                    }
                    Err(why) => {
                        tracing::debug!("{interface}: a packet socket; {why}");
                        Ok(Socket::Packet(packet))
                    }
                }
            }
        }
    }

    /// Returns an XDP socket that is faster than the packet socket, or why there is none.
    fn probed(
        &self,
        interface: &str,
        packet: &PacketSocket,
        node: Option<u32>,
    ) -> Result<XdpSocket, String> {
        let opened = self.xdp(interface, packet, node);
        let xdp = opened.map_err(|error| error.to_string())?;
        if !xdp.is_zero_copy() {
            return Err("the kernel copies the frames of its XDP socket".into());
        }
        match probe::is_faster(packet, &xdp, self.ethertype) {
            true => Ok(xdp),
            false => Err("XDP does not send a burst in less time".into()),
        }
    }

    fn xdp(
        &self,
        interface: &str,
        packet: &PacketSocket,
        node: Option<u32>,
    ) -> Result<XdpSocket, XdpError> {
        // No other process needs these frames. A target is alone on its interface, and gets all frames of initiators. An initiator gets frames of
        // targets, with an index that it has sent in a HANDSHAKE.
        let (flags, numbers) = match self.side {
            Side::Target => (0, Numbers::AllButZero),
            Side::Initiator => (FLAG_FROM_TARGET, Numbers::Listed),
        };
        let selection = Selection {
            ethertype: self.ethertype,
            flags_at: offset_of!(FrameHeader, flags) as u8,
            flags_mask: FLAG_FROM_TARGET,
            flags,
            number_at: offset_of!(FrameHeader, index) as u8,
            numbers,
        };
        XdpSocket::open(interface, (packet.mac(), packet.mtu()), &selection, node)
    }

    fn opened(&self, interface: &str) -> Result<PacketSocket, PacketError> {
        PacketSocket::open(interface, self.ethertype, RECEIVE_BYTES)
    }

    /// Opens a packet socket. A process without the right to do so lets the helper open it.
    fn lent_or_opened(&self, interface: &str) -> Result<PacketSocket, SocketError> {
        match self.opened(interface) {
            Err(PacketError::Denied(_)) => {
                tracing::debug!(
                    "no right to open a packet socket on {interface}: asking jericho-packet"
                );
                let lent = jericho_packet::borrow(interface, self.ethertype, RECEIVE_BYTES);
                Ok(lent?)
            }
            opened => Ok(opened?),
        }
    }
}

fn description(xdp: &XdpSocket) -> &'static str {
    match xdp.is_zero_copy() {
        true => "an XDP socket with zero copy",
        false => "an XDP socket; the kernel copies its frames",
    }
}

impl Socket {
    fn with(packet: PacketSocket, xdp: XdpSocket) -> Socket {
        Socket::Xdp(Box::new(Both {
            packet,
            xdp,
            batches: AtomicU32::new(0),
        }))
    }

    fn packet(&self) -> &PacketSocket {
        match self {
            Socket::Packet(packet) => packet,
            Socket::Xdp(both) => &both.packet,
        }
    }

    /// Returns the interface's MAC address.
    pub fn mac(&self) -> [u8; 6] {
        self.packet().mac()
    }

    /// Returns the interface's MTU in bytes.
    pub fn mtu(&self) -> usize {
        self.packet().mtu()
    }

    /// Returns how many frames of the largest size the socket holds until they are received.
    pub fn frames(&self) -> usize {
        let packet = self.packet().receive_bytes() / FRAME_COST_BYTES;
        match self {
            Socket::Packet(_) => packet,
            // A frame may come on each of the two.
            Socket::Xdp(both) => packet.min(both.xdp.frames()),
        }
    }

    /// Returns the descriptors that are readable when frames have arrived.
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        let mut fds = vec![self.packet().as_fd()];
        if let Socket::Xdp(both) = self {
            fds.extend(both.xdp.fds());
        }
        fds
    }

    /// Sends frames, each in two pieces: a header and the rest. Returns the number of frames that were taken. Fails, if none was taken, as
    /// [`PacketSocket::send_many`].
    pub fn send_many(&self, frames: &[[IoSlice<'_>; 2]]) -> io::Result<usize> {
        let both = match self {
            Socket::Packet(packet) => return packet.send_many(frames),
            Socket::Xdp(both) => both,
        };
        for index in frames.iter().filter_map(chosen_index) {
            if let Err(error) = both.xdp.list(index) {
                tracing::debug!(%error, "the frames of a channel come without XDP");
            }
        }
        match both.xdp.send_many(frames) {
            // The kernel has all chunks. Frames that go by the packet socket would overtake these, so this waits.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                match both.xdp.await_sent(SENT_WITHIN) {
                    true => both.xdp.send_many(frames),
                    false => both.packet.send_many(frames),
                }
            }
            // The packet socket knows the kernel's reason.
            Err(_) => both.packet.send_many(frames),
            sent => sent,
        }
    }

    /// Receives frames, as [`PacketSocket::receive_many`]. The descriptors stay readable while frames are left.
    pub fn receive_many(&self, frames: &mut Frames) -> io::Result<bool> {
        let both = match self {
            Socket::Packet(packet) => return packet.receive_many(frames),
            Socket::Xdp(both) => both,
        };
        if both.batches.fetch_add(1, Ordering::Relaxed) < BATCHES {
            let has_more = both.xdp.receive_many(frames);
            if frames.iter().next().is_some() {
                return Ok(has_more);
            }
        }
        both.batches.store(0, Ordering::Relaxed);
        both.packet.receive_many(frames)
    }
}

/// Returns the index that a HANDSHAKE chooses for answers and for the frames of a channel.
fn chosen_index([header, payload]: &[IoSlice<'_>; 2]) -> Option<[u8; 4]> {
    if header.get(offset_of!(FrameHeader, kind)) != Some(&frame_kind::HANDSHAKE) {
        return None;
    }
    let (handshake, _) = Handshake::ref_from_prefix(payload).ok()?;
    Some(handshake.index.get().to_le_bytes())
}
