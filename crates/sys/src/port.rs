//! A port of a bridge: receives all frames that come in on a network interface, as they would be on a cable, and sends frames out of it.
//!
//! The kernel keeps parts of a frame beside its bytes, and a port puts them back:
//! - the outer VLAN tag (PACKET_AUXDATA);
//! - an unfinished checksum, and the division of a frame of up to 64 KiB (PACKET_VNET_HDR). A host leaves both to its interface, and a virtual
//!   interface passes the frame on as it is. The interface of the port also joins frames (GRO). Without the port's work, such a frame
//!   would be too long for the other interface, or its checksum would be wrong.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use crate::packet::{PacketError, PacketSocket};
use crate::unfinished::{Checksum, Protocol, Segments, Unfinished, finish};

/// All frames of an interface.
#[derive(Debug)]
pub struct Port {
    socket: PacketSocket,
    buffer: Vec<u8>,
    /// Frames that the port could not give to its caller.
    unusable: u64,
}

/// The kernel's struct virtio_net_hdr (linux/virtio_net.h), in the byte order of this host.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct OffloadHeader {
    flags: u8,
    kind: u8,
    header_bytes: u16,
    segment_bytes: u16,
    checksum_start: u16,
    checksum_offset: u16,
}

const _: () = assert!(size_of::<OffloadHeader>() == 10);

/// The bytes of a VLAN tag, which stands between the addresses and the Ethertype.
const TAG_BYTES: usize = 4;
const ADDRESSES_BYTES: usize = 12;
/// Room for the longest frame that the kernel hands over as one: 64 KiB and headers.
const FRAME_BYTES_MAX: usize = (64 << 10) + 256;
const ETHERTYPE_VLAN: u16 = 0x8100;
/// Values of `flags` and `kind` in the struct virtio_net_hdr.
const NEEDS_CHECKSUM: u8 = 1;
const KIND_NONE: u8 = 0;
const KIND_TCP_V4: u8 = 1;
const KIND_TCP_V6: u8 = 4;
const KIND_UDP: u8 = 5;
/// Set beside the kind if the first segment has the flag CWR.
const KIND_ECN: u8 = 0x80;
/// Set beside the kind if the flag CWR is a bit of a counter.
const KIND_ACC_ECN: u8 = 0x10;

impl Port {
    /// Opens a port. Puts the interface into promiscuous mode until the port is dropped. Asks for a receive buffer of `receive_bytes`.
    pub fn open(interface: &str, receive_bytes: usize) -> Result<Port, PacketError> {
        let failed = |action| PacketError::of(interface, action);
        let socket = PacketSocket::unbound(interface, receive_bytes)?;
        for option in [libc::PACKET_AUXDATA, libc::PACKET_VNET_HDR] {
            socket
                .set_option(libc::SOL_PACKET, option, 1)
                .map_err(failed("learn about the offloads of frames"))?;
        }
        let port = Port {
            socket,
            buffer: vec![0; TAG_BYTES + FRAME_BYTES_MAX],
            unusable: 0,
        };
        port.be_promiscuous()
            .map_err(failed("receive the frames for other hosts"))?;
        port.socket
            .bind(libc::ETH_P_ALL as u16)
            .map_err(failed("receive frames"))?;
        Ok(port)
    }

    /// Returns the interface's number.
    pub fn index(&self) -> i32 {
        self.socket.index()
    }

    /// Returns the interface's MTU in bytes.
    pub fn mtu(&self) -> usize {
        self.socket.mtu()
    }

    /// Sends a finished frame, with its Ethernet header. Fails as [`PacketSocket::send_many`] does for its first frame.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        let mut header = OffloadHeader::default();
        let mut parts = [
            part(&raw mut header, size_of::<OffloadHeader>()),
            part(frame.as_ptr().cast_mut(), frame.len()),
        ];
        // SAFETY: all zeros are a valid msghdr.
        let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
        message.msg_iov = parts.as_mut_ptr();
        message.msg_iovlen = parts.len() as _;
        let fd = self.socket.as_fd().as_raw_fd();
        // SAFETY: the parts are `header` and `frame`, which outlive the call; it only reads them.
        match unsafe { libc::sendmsg(fd, &raw const message, libc::MSG_DONTWAIT) } {
            0.. => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Receives what the kernel holds as one frame, and calls `take` with each frame that a cable would have carried for it. Returns false
    /// when none has arrived. Fails with ENETDOWN, once, when the interface went down.
    pub fn receive(&mut self, take: impl FnMut(&[u8])) -> io::Result<bool> {
        let mut header = OffloadHeader::default();
        let (length, tag) = match self.receive_parts(&mut header) {
            Ok(parts) => parts,
            Err(error) => {
                return match error.raw_os_error() {
                    Some(libc::EAGAIN | libc::EINTR) => Ok(false),
                    // The kernel has a kind of frame that OffloadHeader cannot describe.
                    Some(libc::EINVAL) => {
                        self.unusable += 1;
                        Ok(true)
                    }
                    _ => Err(error),
                };
            }
        };
        let mut unfinished = unfinished(&header);
        let mut start = TAG_BYTES;
        if let Some(tag) = tag
            && length >= ADDRESSES_BYTES
        {
            let addresses = TAG_BYTES..TAG_BYTES + ADDRESSES_BYTES;
            self.buffer.copy_within(addresses, 0);
            self.buffer[ADDRESSES_BYTES..ADDRESSES_BYTES + TAG_BYTES].copy_from_slice(&tag);
            start = 0;
            if let Some(Unfinished {
                checksum: Some(checksum),
                ..
            }) = &mut unfinished
            {
                checksum.start += TAG_BYTES;
            }
        }
        let frame = self.buffer.get_mut(start..TAG_BYTES + length);
        let finished = frame
            .zip(unfinished)
            .and_then(|(frame, unfinished)| finish(frame, unfinished, take));
        if finished.is_none() {
            self.unusable += 1;
        }
        Ok(true)
    }

    /// Returns the number of frames that were lost since the last call: the receive buffer was full, or their kind is unknown.
    pub fn take_lost(&mut self) -> u64 {
        let mut statistics = libc::tpacket_stats {
            tp_packets: 0,
            tp_drops: 0,
        };
        let mut length = size_of::<libc::tpacket_stats>() as libc::socklen_t;
        // SAFETY: the pointers are those of `statistics` and of its length. The call sets the kernel's counters to zero.
        let result = unsafe {
            libc::getsockopt(
                self.socket.as_fd().as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_STATISTICS,
                (&raw mut statistics).cast(),
                &raw mut length,
            )
        };
        let overflowed = match result {
            0 => u64::from(statistics.tp_drops),
            _ => 0,
        };
        overflowed + std::mem::take(&mut self.unusable)
    }

    /// Receives into `header`, and into `buffer` behind the room for a tag. Returns the length of the frame, which may exceed the room for it, and the VLAN tag that the
    /// kernel has taken out.
    fn receive_parts(
        &mut self,
        header: &mut OffloadHeader,
    ) -> io::Result<(usize, Option<[u8; TAG_BYTES]>)> {
        let room = &mut self.buffer[TAG_BYTES..];
        let mut parts = [
            part(&raw mut *header, size_of::<OffloadHeader>()),
            part(room.as_mut_ptr(), room.len()),
        ];
        // Of u64, because control messages are aligned to 8 bytes.
        let mut control = [0_u64; 16];
        // SAFETY: all zeros are a valid msghdr.
        let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
        message.msg_iov = parts.as_mut_ptr();
        message.msg_iovlen = parts.len() as _;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control) as _;
        let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
        let fd = self.socket.as_fd().as_raw_fd();
        // SAFETY: the parts are `header`, of which all bytes are valid values, and the rest of `buffer`; the call writes into them and into `control`.
        let length = unsafe { libc::recvmsg(fd, &raw mut message, flags) };
        if length < 0 {
            return Err(io::Error::last_os_error());
        }
        let length = (length as usize).saturating_sub(size_of::<OffloadHeader>());
        Ok((length, tag_of(&message)))
    }

    fn be_promiscuous(&self) -> io::Result<()> {
        let membership = libc::packet_mreq {
            mr_ifindex: self.socket.index(),
            mr_type: libc::PACKET_MR_PROMISC as _,
            mr_alen: 0,
            mr_address: [0; 8],
        };
        // SAFETY: the pointer and the length are those of `membership`.
        let result = unsafe {
            libc::setsockopt(
                self.socket.as_fd().as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_ADD_MEMBERSHIP,
                (&raw const membership).cast(),
                size_of::<libc::packet_mreq>() as libc::socklen_t,
            )
        };
        match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl AsFd for Port {
    /// Returns the socket, which is readable when a frame has arrived.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn part<T>(start: *mut T, bytes: usize) -> libc::iovec {
    libc::iovec {
        iov_base: start.cast(),
        iov_len: bytes,
    }
}

/// Returns the VLAN tag in the control messages of a received frame.
fn tag_of(message: &libc::msghdr) -> Option<[u8; TAG_BYTES]> {
    // SAFETY: recvmsg has filled the control messages and set their length.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !next.is_null() {
        // SAFETY: `next` points to a control message of `message`.
        let kind = unsafe { ((*next).cmsg_level, (*next).cmsg_type) };
        if kind == (libc::SOL_PACKET, libc::PACKET_AUXDATA) {
            // SAFETY: the kernel writes a whole tpacket_auxdata for this type.
            let data = unsafe {
                let data: *const libc::tpacket_auxdata = libc::CMSG_DATA(next).cast();
                data.read_unaligned()
            };
            if data.tp_status & libc::TP_STATUS_VLAN_VALID == 0 {
                return None;
            }
            let ethertype = match data.tp_status & libc::TP_STATUS_VLAN_TPID_VALID {
                0 => ETHERTYPE_VLAN,
                _ => data.tp_vlan_tpid,
            };
            let ([a, b], [c, d]) = (ethertype.to_be_bytes(), data.tp_vlan_tci.to_be_bytes());
            return Some([a, b, c, d]);
        }
        // SAFETY: `next` points to a control message of `message`.
        next = unsafe { libc::CMSG_NXTHDR(message, next) };
    }
    None
}

/// Returns what is to be done for a frame. Returns `None` for an unknown kind.
fn unfinished(header: &OffloadHeader) -> Option<Unfinished> {
    let protocol = match header.kind & !(KIND_ECN | KIND_ACC_ECN) {
        KIND_NONE => None,
        KIND_TCP_V4 | KIND_TCP_V6 => Some(Protocol::Tcp),
        KIND_UDP => Some(Protocol::Udp),
        _ => return None,
    };
    let needs_checksum = header.flags & NEEDS_CHECKSUM != 0;
    Some(Unfinished {
        checksum: needs_checksum.then(|| Checksum {
            start: header.checksum_start.into(),
            offset: header.checksum_offset.into(),
        }),
        segments: protocol.map(|protocol| Segments {
            protocol,
            bytes: header.segment_bytes.into(),
            keeps_cwr: header.kind & KIND_ACC_ECN != 0,
        }),
    })
}
