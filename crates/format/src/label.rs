//! The label: block 0 of every device of a volume. It identifies the device, so that a missing, exchanged or foreign device is
//! named in an error instead of being read.

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First bytes of every device of a volume.
pub const LABEL_MAGIC: [u8; 8] = *b"JERICHO\0";
/// Version of the volume format that this code writes, and the only one that it reads.
pub const VERSION: u32 = 2;

/// Block 0 of a device.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Label {
    /// `LABEL_MAGIC`.
    pub magic: [u8; 8],
    /// `VERSION`.
    pub version: U32,
    /// crc32c of the 4096 bytes with this field zero.
    pub crc: U32,
    /// The volume that the device belongs to.
    pub volume_uuid: [u8; 16],
    /// Id of the device.
    pub device_uuid: [u8; 16],
    /// Index in the volume's device table.
    pub device_index: U16,
    /// Number of devices of the volume.
    pub devices: U16,
    /// Zero.
    pub reserved0: U32,
    /// Blocks of the device that the volume uses. A device with fewer blocks was truncated.
    pub device_blocks: U64,
    /// Zero.
    pub reserved: [u8; 4032],
}
const _: () = assert!(size_of::<Label>() == 4096);

/// Result of decoding block 0 of a device.
#[derive(Debug, PartialEq, Eq)]
pub enum LabelState {
    /// The device belongs to no volume.
    Foreign,
    /// The device belongs to a volume of this version, which is newer than `VERSION`.
    Newer(u32),
    /// The device belongs to a volume of this version, which is older than `VERSION`.
    Older(u32),
    /// The magic is right but the checksum is not.
    Damaged,
    /// A valid label.
    Valid(Box<Label>),
}

impl Label {
    /// Returns a label with magic and version set and the rest zero.
    pub fn new() -> Box<Label> {
        let mut label = Box::new(Label::new_zeroed());
        label.magic = LABEL_MAGIC;
        label.version = U32::new(VERSION);
        label
    }

    /// Returns the 4096 bytes to store, with the checksum set.
    pub fn encode(&self) -> Vec<u8> {
        let mut label = self.clone();
        label.crc = U32::new(0);
        let crc = crc32c::crc32c(label.as_bytes());
        label.crc = U32::new(crc);
        label.as_bytes().to_vec()
    }

    /// Decodes the first 4096 bytes of a device.
    pub fn decode(block: &[u8]) -> LabelState {
        let Ok((label, _)) = Label::read_from_prefix(block) else {
            return LabelState::Foreign;
        };
        if label.magic != LABEL_MAGIC {
            return LabelState::Foreign;
        }
        // A newer version may have another checksum or layout. Only magic and version are in the same place in all versions.
        if label.version.get() > VERSION {
            return LabelState::Newer(label.version.get());
        }
        match label.encode() == block[..size_of::<Label>()] {
            // All older versions have the same label.
            true if label.version.get() < VERSION => LabelState::Older(label.version.get()),
            true => LabelState::Valid(Box::new(label)),
            false => LabelState::Damaged,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flipped_bit_anywhere_in_a_label_is_detected() {
        let bytes = Label::new().encode();
        assert!(matches!(Label::decode(&bytes), LabelState::Valid(_)));
        for at in (12..bytes.len()).step_by(7) {
            let mut bad = bytes.clone();
            bad[at] ^= 0x10;
            assert_eq!(Label::decode(&bad), LabelState::Damaged, "byte {at}");
        }
    }

    #[test]
    fn an_older_version_is_distinguished_from_damage() {
        let mut label = Label::new();
        label.version = U32::new(VERSION - 1);
        let mut bytes = label.encode();
        assert_eq!(Label::decode(&bytes), LabelState::Older(VERSION - 1));
        bytes[100] ^= 1;
        assert_eq!(Label::decode(&bytes), LabelState::Damaged);
    }

    #[test]
    fn a_newer_version_is_distinguished_from_damage() {
        let mut label = Label::new();
        label.version = U32::new(VERSION + 1);
        assert_eq!(
            Label::decode(&label.encode()),
            LabelState::Newer(VERSION + 1)
        );
    }
}
