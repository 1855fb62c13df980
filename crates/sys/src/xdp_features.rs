//! What the driver of a network interface says of XDP, without a change of the interface (generic netlink, the family "netdev").

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};

/// What a driver can do for XDP sockets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// It reads and writes the memory of a socket itself.
    pub is_zero_copy: bool,
    /// Chunks of a frame that it reads and writes itself, at most.
    pub zero_copy_chunks: u32,
}

/// Numbers of linux/netlink.h, linux/genetlink.h and linux/netdev.h.
const REQUEST: u16 = 1;
const ERROR: u16 = 2;
const CONTROL: u16 = 0x10;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;
const GET_DEVICE: u8 = 1;
const DEVICE_INDEX: u16 = 1;
const DEVICE_FEATURES: u16 = 3;
const DEVICE_ZERO_COPY_CHUNKS: u16 = 4;
const FEATURE_ZERO_COPY: u64 = 1 << 3;
/// Bytes of the header of a message, with the one of generic netlink.
const HEADER_BYTES: usize = 20;

/// Asks the kernel what the driver of an interface can do. Fails with ENOENT before Linux 6.3.
pub(crate) fn of(interface: i32) -> io::Result<Features> {
    let kind = SocketType::RAW;
    let family = AddressFamily::NETLINK;
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, Some(netlink::GENERIC))?;
    let answer = ask(&socket, CONTROL, GET_FAMILY, FAMILY_NAME, b"netdev\0")?;
    let id = attribute(&answer, FAMILY_ID).and_then(|bytes| bytes.first_chunk().copied());
    let id = u16::from_ne_bytes(id.ok_or(io::ErrorKind::InvalidData)?);
    let index = (interface as u32).to_ne_bytes();
    let answer = ask(&socket, id, GET_DEVICE, DEVICE_INDEX, &index)?;
    let features = attribute(&answer, DEVICE_FEATURES).and_then(|bytes| bytes.first_chunk());
    let chunks = attribute(&answer, DEVICE_ZERO_COPY_CHUNKS).and_then(|bytes| bytes.first_chunk());
    Ok(Features {
        is_zero_copy: features
            .is_some_and(|bits| u64::from_ne_bytes(*bits) & FEATURE_ZERO_COPY != 0),
        // A driver without frames of several chunks does not tell.
        zero_copy_chunks: chunks.map_or(1, |bytes| u32::from_ne_bytes(*bytes)),
    })
}

/// Sends a message with one attribute. Returns the attributes of the answer.
fn ask(
    socket: &OwnedFd,
    family: u16,
    command: u8,
    attribute: u16,
    value: &[u8],
) -> io::Result<Vec<u8>> {
    let padded = value.len().next_multiple_of(4);
    let mut message = Vec::new();
    message.extend(((HEADER_BYTES + 4 + padded) as u32).to_ne_bytes());
    message.extend(family.to_ne_bytes());
    message.extend(REQUEST.to_ne_bytes());
    message.extend([0; 8]);
    message.extend([command, 1, 0, 0]);
    message.extend((4 + value.len() as u16).to_ne_bytes());
    message.extend(attribute.to_ne_bytes());
    message.extend(value);
    message.resize(HEADER_BYTES + 4 + padded, 0);
    send(socket, &message, SendFlags::empty())?;
    let mut answer = vec![0; 16 << 10];
    // The kernel has answered before `send` returns.
    let (length, _) = recv(socket, &mut answer[..], RecvFlags::DONTWAIT)?;
    answer.truncate(length);
    let kind = answer.get(4..6).and_then(|bytes| bytes.first_chunk());
    let kind = u16::from_ne_bytes(*kind.ok_or(io::ErrorKind::InvalidData)?);
    if kind == ERROR {
        let errno = answer.get(16..20).and_then(|bytes| bytes.first_chunk());
        let errno = i32::from_ne_bytes(*errno.ok_or(io::ErrorKind::InvalidData)?);
        return Err(io::Error::from_raw_os_error(-errno));
    }
    let attributes = answer.get(HEADER_BYTES..).unwrap_or_default();
    Ok(attributes.to_vec())
}

/// Returns the value of the attribute with a number.
fn attribute(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    while let [a, b, c, d, ..] = *attributes {
        let length = usize::from(u16::from_ne_bytes([a, b]));
        let value = attributes.get(4..length)?;
        if u16::from_ne_bytes([c, d]) == wanted {
            return Some(value);
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_knows_its_interfaces() {
        // The loopback interface has number 1, and its driver no XDP.
        match of(1) {
            Ok(features) => assert!(!features.is_zero_copy, "{features:?}"),
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOENT), "{error}"),
        }
        let error = of(i32::MAX).expect_err("no interface");
        let errno = error.raw_os_error();
        assert!(
            matches!(errno, Some(libc::ENODEV | libc::ENOENT)),
            "{error}"
        );
    }

    #[test]
    fn attributes_are_found_by_their_numbers() {
        let bytes = [5_u16.to_ne_bytes(), 7_u16.to_ne_bytes()].concat();
        let mut bytes = [&bytes[..], &[9, 0, 0, 0]].concat();
        bytes.extend([8_u16.to_ne_bytes(), 3_u16.to_ne_bytes()].concat());
        bytes.extend([1, 2, 3, 4]);
        assert_eq!(attribute(&bytes, 7), Some(&[9][..]));
        assert_eq!(attribute(&bytes, 3), Some(&[1, 2, 3, 4][..]));
        assert_eq!(attribute(&bytes, 4), None);
        // A length that is too short or too long.
        assert_eq!(attribute(&[0, 0, 1, 0, 0, 0], 2), None);
        assert_eq!(attribute(&[99, 0, 1, 0, 0, 0], 1), None);
    }
}
