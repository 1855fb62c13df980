//! The messages between a daemon and its keeper, and what the keeper does to the segments. All integers are native-endian,
//! because both run on one machine: docs/formats/shm.md.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::area;

/// Version of the messages.
pub const KEEPER_VERSION: u32 = 1;
/// Length of a message in bytes.
pub const KEEPER_BYTES: usize = 32;

const MAGIC: u64 = u64::from_ne_bytes(*b"JRCHkeep");

/// The kinds of segments, in the order in which the keeper empties them. Each step makes the next one safe: a client that still
/// reads or writes fails when it checks a segment that an earlier step has emptied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum Segment {
    /// The file of each slot.
    Control = 0,
    /// The page of each frame.
    Table = 1,
    /// The reference age of each entry.
    Ages = 2,
    /// Sizes and locks of files.
    Slots = 3,
    /// The pages.
    Frames = 4,
}

impl Segment {
    const ALL: [Segment; 5] = [
        Segment::Control,
        Segment::Table,
        Segment::Ages,
        Segment::Slots,
        Segment::Frames,
    ];
}

/// A message. Each kind names the fds that come with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeeperMessage {
    /// A pidfd of the daemon.
    Daemon,
    /// Segments of one kind, one for each fd.
    Segments(Segment),
    /// The area of the client with this owner number.
    Area(u16),
    /// The client with this owner number is gone: the keeper closes its area.
    Forget(u16),
    /// To the keeper: the daemon has sent everything. From the keeper: everything has arrived.
    Complete,
    /// The notes of the masks that the daemon has narrowed in other processes.
    Masks,
}

impl KeeperMessage {
    /// Returns the message's bytes.
    pub fn encode(self) -> [u8; KEEPER_BYTES] {
        let (kind, value) = match self {
            KeeperMessage::Daemon => (1u32, 0),
            KeeperMessage::Segments(segment) => (2, segment as u32),
            KeeperMessage::Area(owner) => (3, u32::from(owner)),
            KeeperMessage::Forget(owner) => (4, u32::from(owner)),
            KeeperMessage::Complete => (5, 0),
            KeeperMessage::Masks => (6, 0),
        };
        let mut bytes = [0; KEEPER_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC.to_ne_bytes());
        bytes[8..12].copy_from_slice(&KEEPER_VERSION.to_ne_bytes());
        bytes[12..16].copy_from_slice(&kind.to_ne_bytes());
        bytes[16..20].copy_from_slice(&value.to_ne_bytes());
        bytes
    }

    /// Decodes a message. Returns `None` for other bytes and for another version.
    pub fn decode(bytes: &[u8]) -> Option<KeeperMessage> {
        let bytes = <&[u8; KEEPER_BYTES]>::try_from(bytes).ok()?;
        let word = |at: usize| {
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        if bytes[0..8] != MAGIC.to_ne_bytes() || word(8) != KEEPER_VERSION {
            return None;
        }
        let value = word(16);
        let owner = || u16::try_from(value).ok();
        Some(match word(12) {
            1 => KeeperMessage::Daemon,
            2 => KeeperMessage::Segments(
                *Segment::ALL
                    .iter()
                    .find(|segment| **segment as u32 == value)?,
            ),
            3 => KeeperMessage::Area(owner()?),
            4 => KeeperMessage::Forget(owner()?),
            5 => KeeperMessage::Complete,
            6 => KeeperMessage::Masks,
            _ => return None,
        })
    }
}

/// Revokes the client with this area, without mapping the area. The client uses the kernel path from its next call
/// on.
pub fn revoke(area: &File) -> io::Result<()> {
    area.write_all_at(&1u32.to_ne_bytes(), area::REVOKED_AT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Area;

    #[test]
    fn messages_decode_to_themselves_and_other_bytes_are_refused() {
        let mut all = vec![
            KeeperMessage::Daemon,
            KeeperMessage::Area(1023),
            KeeperMessage::Forget(2),
            KeeperMessage::Complete,
            KeeperMessage::Masks,
        ];
        all.extend(Segment::ALL.map(KeeperMessage::Segments));
        for message in all {
            let bytes = message.encode();
            assert_eq!(KeeperMessage::decode(&bytes), Some(message));
            assert_eq!(KeeperMessage::decode(&bytes[..31]), None);
            for at in [0, 8] {
                let mut other = bytes;
                other[at] += 1;
                assert_eq!(KeeperMessage::decode(&other), None);
            }
        }
        let mut unknown = KeeperMessage::Segments(Segment::Control).encode();
        unknown[16] = 5;
        assert_eq!(KeeperMessage::decode(&unknown), None);
    }

    #[test]
    fn a_client_is_revoked_through_its_segments_descriptor() {
        let area = Area::create("test", 2).unwrap();
        assert!(!area.is_revoked());
        revoke(&File::from(
            area.mapping().fd().try_clone_to_owned().unwrap(),
        ))
        .unwrap();
        assert!(area.is_revoked());
        assert_eq!(area.owner(), 2);
    }
}
