//! Frames to be sent, and random numbers.

use jericho_format::wire::{FrameHeader, HEADER_BYTES, LANES_MAX};
use zerocopy::IntoBytes;
use zerocopy::byteorder::big_endian;

use jericho_format::wire::Mac;

use crate::seal::Seal;

/// Returns random numbers. The caller gives numbers that nobody can guess, except in tests.
pub type Entropy = Box<dyn FnMut() -> u64 + Send>;

/// One of this host's network interfaces.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    /// Its MAC address.
    pub mac: Mac,
    /// MTU in bytes, at least `wire::MTU_MIN`.
    pub mtu: usize,
    /// Frames of the largest size that its receive buffer holds.
    pub credit: u16,
    /// Its NUMA node, if it is known.
    pub node: Option<u32>,
    /// Number of the network interface. An initiator may have several links, and so several channels, on one.
    pub nic: u16,
}

/// Returns the distinct nodes of links, in order. A lane stands for each. Links without a known node have the first lane.
pub(crate) fn nodes_of(links: &[Link]) -> Vec<u32> {
    let mut nodes: Vec<u32> = links.iter().filter_map(|link| link.node).collect();
    nodes.sort_unstable();
    nodes.dedup();
    nodes.truncate(LANES_MAX.into());
    nodes
}

/// Returns the lane of a node, if there is one.
pub(crate) fn lane_of(nodes: &[u32], node: Option<u32>) -> Option<u16> {
    let lane = nodes.iter().position(|&other| Some(other) == node)?;
    Some(lane as u16)
}

/// The payload of a frame to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// These bytes.
    Bytes(Vec<u8>),
    /// Bytes of a pool.
    Pool {
        /// Target: the session whose pool it is. Initiator: 0.
        session: u64,
        /// Offset in the pool.
        offset_bytes: u64,
        /// Length.
        length_bytes: u32,
    },
}

/// A frame to be sent. Its checksum is not set yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Index of the link in the list that the initiator or target was made with.
    pub link: u16,
    /// Header, without the checksum.
    pub header: FrameHeader,
    /// Payload.
    pub body: Body,
    /// What protects it.
    pub seal: Seal,
}

impl Frame {
    /// Returns a frame from a link to an address.
    pub(crate) fn new(
        (link, source): (u16, Mac),
        destination: Mac,
        ethertype: u16,
        mut header: FrameHeader,
        body: Body,
    ) -> Frame {
        (header.source, header.destination) = (source, destination);
        header.ethertype = big_endian::U16::new(ethertype);
        Frame {
            link,
            header,
            body,
            seal: Seal::Checksum(0),
        }
    }

    /// Puts the bytes of the frame into `room`, as they go out on the link. `copy` copies bytes of the pool of the body's session, from an offset in it.
    pub fn seal_into(&self, room: &mut Vec<u8>, copy: impl FnOnce(usize, &mut [u8])) {
        let length = match &self.body {
            Body::Bytes(bytes) => bytes.len(),
            Body::Pool { length_bytes, .. } => *length_bytes as usize,
        };
        // The room has the bytes of an earlier frame. Only what it grows by is zeroed.
        room.resize(HEADER_BYTES + length, 0);
        let (head, payload) = room.split_at_mut(HEADER_BYTES);
        match &self.body {
            Body::Bytes(bytes) => payload.copy_from_slice(bytes),
            Body::Pool { offset_bytes, .. } => copy(*offset_bytes as usize, payload),
        }
        let mut header = self.header;
        if let Seal::Checksum(salt) = &self.seal {
            header.seal(*salt, payload);
        }
        head.copy_from_slice(header.as_bytes());
        if let Seal::Key(key) = &self.seal {
            key.seal(header.number.get(), room);
        }
    }

    /// Returns the bytes of the frame. `pool` is the pool of the body's session.
    ///
    /// # Panics
    /// Panics if the body is not in the pool.
    pub fn to_bytes(&self, pool: &[u8]) -> Vec<u8> {
        let mut room = Vec::new();
        self.seal_into(&mut room, |at, out| {
            out.copy_from_slice(&pool[at..at + out.len()]);
        });
        room
    }
}

/// Returns 16 random bytes.
pub(crate) fn random_id(entropy: &mut Entropy) -> [u8; 16] {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&entropy().to_le_bytes());
    id[8..].copy_from_slice(&entropy().to_le_bytes());
    id
}

/// Returns a random index that is not 0.
pub(crate) fn random_index(entropy: &mut Entropy) -> u32 {
    loop {
        let index = (entropy() >> 32) as u32;
        if index != 0 {
            return index;
        }
    }
}
