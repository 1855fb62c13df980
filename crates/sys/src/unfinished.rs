//! Finishes frames that their sender left to its network interface: checksums and the division into segments.
//!
//! A kernel hands frames of up to 64 KiB with an unfinished checksum to an interface that can finish them. A virtual interface (veth)
//! passes such frames on as they are. On a cable there are only finished ones.

/// What an interface still has to do for a frame: the kernel's struct virtio_net_hdr.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unfinished {
    /// The checksum, if it is unfinished.
    pub checksum: Option<Checksum>,
    /// The division into segments, if the frame is too long.
    pub segments: Option<Segments>,
}

/// An unfinished checksum. Its field has the sum of the pseudo header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Checksum {
    /// Where the checksum's range starts in the frame: at the TCP or UDP header. It ends with the frame.
    pub start: usize,
    /// Where the checksum's field is, from `start`.
    pub offset: usize,
}

/// A division into segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segments {
    /// The protocol.
    pub protocol: Protocol,
    /// Bytes of payload of each segment.
    pub bytes: usize,
    /// All segments keep the TCP flag CWR, which then is a bit of a counter (AccECN). Otherwise only the first one does.
    pub keeps_cwr: bool,
}

/// A protocol whose frames are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Tcp,
    Udp,
}

const ETHERTYPE_AT: usize = 12;
const VLAN_BYTES: usize = 4;
const IP_V6_HEADER_BYTES: usize = 40;
const UDP_HEADER_BYTES: usize = 8;
/// Protocol numbers of IP.
const TCP: u8 = 6;
const UDP: u8 = 17;
const SCTP: u8 = 132;
/// Extension headers of IPv6 that may precede the transport header: hop by hop, routing, destination options.
const EXTENSIONS: [u8; 3] = [0, 43, 60];
/// TCP flags.
const FIN: u8 = 0x01;
const PUSH: u8 = 0x08;
const CONGESTION_WINDOW_REDUCED: u8 = 0x80;

/// Calls `take` with each finished frame. Returns `None` if the frame is not what the kernel says, is a long frame of a tunnel, or has an unfinished
/// checksum of SCTP.
pub(crate) fn finish(
    frame: &mut [u8],
    unfinished: Unfinished,
    mut take: impl FnMut(&[u8]),
) -> Option<()> {
    match (unfinished.checksum, unfinished.segments) {
        (None, None) => {}
        (Some(checksum), None) => finish_checksum(frame, checksum)?,
        (Some(checksum), Some(segments)) => return divide(frame, checksum, segments, take),
        (None, Some(_)) => return None,
    }
    take(frame);
    Some(())
}

fn finish_checksum(frame: &mut [u8], checksum: Checksum) -> Option<()> {
    if transport_of(frame) == Some((checksum.start, SCTP)) {
        // It has a checksum of another kind.
        return None;
    }
    let range = frame.get(checksum.start..)?;
    // Zero means "no checksum" in UDP.
    let sum = match !sum_of(range, 0) {
        0 => 0xffff,
        sum => sum,
    };
    write_u16(frame, checksum.start + checksum.offset, sum)
}

/// Divides a frame as an interface does (segmentation offload).
fn divide(
    frame: &[u8],
    checksum: Checksum,
    segments: Segments,
    mut take: impl FnMut(&[u8]),
) -> Option<()> {
    let transport = checksum.start;
    let header_bytes = transport
        + match segments.protocol {
            Protocol::Tcp => usize::from(frame.get(transport + 12)? >> 4) * 4,
            Protocol::Udp => UDP_HEADER_BYTES,
        };
    let (header, payload) = frame.split_at_checked(header_bytes)?;
    let network = network_at(frame)?;
    let protocol = match segments.protocol {
        Protocol::Tcp => TCP,
        Protocol::Udp => UDP,
    };
    // In a tunnel the kernel means the inner headers, and the outer ones would need new lengths, too.
    if transport_of(frame)? != (transport, protocol) || payload.is_empty() {
        return None;
    }
    let whole_bytes = (frame.len() - transport) as u32;
    let pseudo = read_u16(frame, transport + checksum.offset)?;
    if segments.bytes == 0 {
        return None;
    }
    let count = payload.len().div_ceil(segments.bytes);
    for (number, chunk) in payload.chunks(segments.bytes).enumerate() {
        let mut segment = [header, chunk].concat();
        let bytes = (segment.len() - transport) as u32;
        finish_network_header(&mut segment, network, transport, number)?;
        match segments.protocol {
            Protocol::Tcp => {
                let sequence = read_u32(header, transport + 4)?;
                let sequence = sequence.wrapping_add((number * segments.bytes) as u32);
                let field = segment.get_mut(transport + 4..transport + 8)?;
                field.copy_from_slice(&sequence.to_be_bytes());
                let flags = segment.get_mut(transport + 13)?;
                if number > 0 && !segments.keeps_cwr {
                    *flags &= !CONGESTION_WINDOW_REDUCED;
                }
                if number + 1 < count {
                    *flags &= !(FIN | PUSH);
                }
            }
            Protocol::Udp => write_u16(&mut segment, transport + 4, bytes as u16)?,
        }
        // The pseudo header has the length: replaces that of the whole by that of the segment.
        let pseudo =
            fold(u64::from(pseudo) + u64::from(!fold(whole_bytes.into())) + u64::from(bytes));
        write_u16(&mut segment, transport + checksum.offset, pseudo)?;
        finish_checksum(&mut segment, checksum)?;
        take(&segment);
    }
    Some(())
}

/// Returns where the IP header starts: after the addresses, the VLAN tags and the Ethertype.
fn network_at(frame: &[u8]) -> Option<usize> {
    let mut at = ETHERTYPE_AT;
    while let 0x8100 | 0x88a8 = read_u16(frame, at)? {
        at += VLAN_BYTES;
    }
    Some(at + 2)
}

/// Returns where the transport header of the outermost IP packet starts, and its protocol number.
fn transport_of(frame: &[u8]) -> Option<(usize, u8)> {
    let network = network_at(frame)?;
    let version = *frame.get(network)?;
    match version >> 4 {
        4 => {
            let header_bytes = usize::from(version & 0xf) * 4;
            Some((network + header_bytes, *frame.get(network + 9)?))
        }
        6 => {
            let (mut at, mut next) = (network + IP_V6_HEADER_BYTES, *frame.get(network + 6)?);
            while EXTENSIONS.contains(&next) {
                let (following, length) = (*frame.get(at)?, *frame.get(at + 1)?);
                (next, at) = (following, at + (usize::from(length) + 1) * 8);
            }
            Some((at, next))
        }
        _ => None,
    }
}

/// Writes the length, and for IPv4 the identification and the checksum.
fn finish_network_header(
    segment: &mut [u8],
    network: usize,
    transport: usize,
    number: usize,
) -> Option<()> {
    let bytes = segment.len().checked_sub(network)?;
    match segment.get(network)? >> 4 {
        4 => {
            let identification = read_u16(segment, network + 4)?.wrapping_add(number as u16);
            write_u16(segment, network + 2, bytes as u16)?;
            write_u16(segment, network + 4, identification)?;
            write_u16(segment, network + 10, 0)?;
            let sum = !sum_of(segment.get(network..transport)?, 0);
            write_u16(segment, network + 10, sum)
        }
        6 => {
            let payload_bytes = bytes.checked_sub(IP_V6_HEADER_BYTES)?;
            write_u16(segment, network + 4, payload_bytes as u16)
        }
        _ => None,
    }
}

/// Returns the Internet checksum's sum (RFC 1071), not complemented.
fn sum_of(bytes: &[u8], start: u16) -> u16 {
    let mut pairs = bytes.chunks_exact(2);
    let mut sum = u64::from(start);
    for pair in &mut pairs {
        sum += u64::from(u16::from_be_bytes([pair[0], pair[1]]));
    }
    if let [last] = pairs.remainder() {
        sum += u64::from(u16::from_be_bytes([*last, 0]));
    }
    fold(sum)
}

/// Adds the carries.
fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    let field = bytes.get(at..at + 2)?;
    field.try_into().map(u16::from_be_bytes).ok()
}

fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    let field = bytes.get(at..at + 4)?;
    field.try_into().map(u32::from_be_bytes).ok()
}

fn write_u16(bytes: &mut [u8], at: usize, value: u16) -> Option<()> {
    let field = bytes.get_mut(at..at + 2)?;
    field.copy_from_slice(&value.to_be_bytes());
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEQUENCE: u32 = u32::MAX - 100;

    /// A frame as a program's kernel hands it to an interface that finishes it.
    fn handed_over(is_v4: bool, protocol: u8, tags: usize, payload: &[u8]) -> (Vec<u8>, Checksum) {
        let mut frame = vec![0xaa; 12];
        for _ in 0..tags {
            frame.extend([0x81, 0, 0, 5]);
        }
        let header = match protocol {
            TCP => {
                let mut header = vec![0; 32];
                header[4..8].copy_from_slice(&SEQUENCE.to_be_bytes());
                header[12] = 8 << 4;
                header[13] = FIN | PUSH | CONGESTION_WINDOW_REDUCED;
                header
            }
            _ => vec![0; 8],
        };
        let bytes = header.len() + payload.len();
        match is_v4 {
            true => {
                frame.extend([0x08, 0x00, 0x45, 0, 0, 0, 0xff, 0xff, 0x40, 0, 64, protocol]);
                frame.extend([0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
            }
            false => {
                frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, protocol, 64]);
                frame.extend(1..33);
            }
        }
        let offset = if protocol == TCP { 16 } else { 6 };
        let start = frame.len();
        frame.extend(header);
        let pseudo = pseudo_sum(&frame, start, bytes, protocol);
        frame[start + offset..][..2].copy_from_slice(&pseudo.to_be_bytes());
        frame.extend(payload);
        (frame, Checksum { start, offset })
    }

    /// Returns the sum of the pseudo header: both addresses, which are before the TCP or UDP header, the length and the protocol.
    fn pseudo_sum(frame: &[u8], transport: usize, bytes: usize, protocol: u8) -> u16 {
        let network = network_at(frame).unwrap();
        let addresses = if frame[network] >> 4 == 4 { 8 } else { 32 };
        let start = fold(bytes as u64 + u64::from(protocol));
        sum_of(&frame[transport - addresses..transport], start)
    }

    fn assert_finished(frame: &[u8], transport: usize, protocol: u8) {
        let network = network_at(frame).unwrap();
        let field = |at| usize::from(read_u16(frame, at).unwrap());
        match frame[network] >> 4 {
            4 => {
                assert_eq!(sum_of(&frame[network..transport], 0), 0xffff);
                assert_eq!(field(network + 2), frame.len() - network);
            }
            _ => assert_eq!(field(network + 4), frame.len() - transport),
        }
        let pseudo = pseudo_sum(frame, transport, frame.len() - transport, protocol);
        assert_eq!(sum_of(&frame[transport..], pseudo), 0xffff);
    }

    fn payload(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|at| (at * 7 / 3) as u8).collect()
    }

    #[test]
    fn a_checksum_is_finished() {
        for (is_v4, protocol) in [(true, TCP), (false, TCP), (true, UDP), (false, UDP)] {
            for bytes in [0, 1, 1000, 1001] {
                let payload = payload(bytes);
                let (mut frame, checksum) = handed_over(is_v4, protocol, 1, &payload);
                let at = checksum.start;
                let unfinished = Unfinished {
                    checksum: Some(checksum),
                    segments: None,
                };
                let mut finished = Vec::new();
                finish(&mut frame, unfinished, |frame| finished = frame.to_vec()).unwrap();
                let pseudo = pseudo_sum(&finished, at, finished.len() - at, protocol);
                assert_eq!(sum_of(&finished[at..], pseudo), 0xffff);
            }
        }
    }

    #[test]
    fn a_long_frame_is_divided_into_segments_that_a_cable_carries() {
        for (is_v4, protocol) in [(true, TCP), (false, TCP), (true, UDP), (false, UDP)] {
            for tags in [0, 1, 2] {
                let payload = payload(60_001);
                let (mut frame, checksum) = handed_over(is_v4, protocol, tags, &payload);
                let unfinished = Unfinished {
                    checksum: Some(checksum),
                    segments: Some(Segments {
                        protocol: if protocol == TCP {
                            Protocol::Tcp
                        } else {
                            Protocol::Udp
                        },
                        bytes: 1400,
                        keeps_cwr: tags == 2,
                    }),
                };
                let mut segments = Vec::new();
                finish(&mut frame, unfinished, |frame| {
                    segments.push(frame.to_vec())
                })
                .unwrap();
                assert_eq!(segments.len(), 60_001_usize.div_ceil(1400));
                let header_bytes = frame.len() - payload.len();
                let mut joined: Vec<u8> = Vec::new();
                for segment in &segments {
                    assert_finished(segment, checksum.start, protocol);
                    joined.extend(&segment[header_bytes..]);
                }
                assert!(joined == payload);
                if protocol == TCP {
                    let at = checksum.start;
                    let sequence = |segment: &Vec<u8>| read_u32(segment, at + 4).unwrap();
                    assert_eq!(sequence(&segments[1]), SEQUENCE.wrapping_add(1400));
                    let flags: Vec<u8> = segments.iter().map(|segment| segment[at + 13]).collect();
                    assert_eq!(flags[0], CONGESTION_WINDOW_REDUCED);
                    let kept = if tags == 2 {
                        CONGESTION_WINDOW_REDUCED
                    } else {
                        0
                    };
                    assert_eq!(flags[1], kept);
                    assert_eq!(flags.last(), Some(&(kept | FIN | PUSH)));
                }
            }
        }
    }

    #[test]
    fn a_frame_that_is_not_what_the_kernel_says_is_refused() {
        let (frame, checksum) = handed_over(true, TCP, 0, &payload(100));
        let segments = Some(Segments {
            protocol: Protocol::Tcp,
            bytes: 10,
            keeps_cwr: false,
        });
        let whole = Unfinished {
            checksum: Some(checksum),
            segments,
        };
        let mut refused = vec![(frame[..50].to_vec(), whole), (vec![], whole)];
        refused.push((
            frame.clone(),
            Unfinished {
                checksum: None,
                segments,
            },
        ));
        // In a tunnel, the kernel means an inner header.
        let mut tunnel = frame.clone();
        tunnel[14 + 9] = 47;
        refused.push((tunnel, whole));
        // SCTP has another checksum.
        let mut sctp = frame.clone();
        sctp[14 + 9] = SCTP;
        refused.push((
            sctp,
            Unfinished {
                checksum: Some(checksum),
                segments: None,
            },
        ));
        let beyond = Checksum {
            start: 1000,
            offset: 0,
        };
        refused.push((
            frame,
            Unfinished {
                checksum: Some(beyond),
                segments: None,
            },
        ));
        for (mut frame, unfinished) in refused {
            assert_eq!(finish(&mut frame, unfinished, |_| ()), None);
        }
    }
}
