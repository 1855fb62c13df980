//! Recognises existing data on a device before it is formatted.

use jericho_format::label::{Label, LabelState};
use jericho_storage::{BLOCK_BYTES, Device, IoError};

/// Magic bytes of other formats, as (offset, bytes, name).
const MAGICS: [(usize, &[u8], &str); 9] = [
    (1080, &[0x53, 0xef], "an ext2, ext3 or ext4 filesystem"),
    (0, b"XFSB", "an XFS filesystem"),
    (65600, b"_BHRfS_M", "a btrfs filesystem"),
    (0, b"LUKS\xba\xbe", "an encrypted LUKS volume"),
    (512, b"EFI PART", "a partition table (GPT)"),
    (4086, b"SWAPSPACE2", "swap space"),
    (536, b"LVM2 001", "an LVM physical volume"),
    (0, b"hsqs", "a squashfs filesystem"),
    (510, &[0x55, 0xaa], "a partition table or boot sector"),
];
const HEAD_BYTES: u64 = 128 << 10;

/// Returns the name of the format on a device, or `None` if it is not recognised.
pub(crate) fn recognise(device: &dyn Device) -> Result<Option<String>, IoError> {
    let bytes = device.size_bytes().min(HEAD_BYTES) / BLOCK_BYTES * BLOCK_BYTES;
    let mut head = vec![0; bytes as usize];
    device.read_at(0, &mut head)?;
    Ok(recognise_bytes(&head))
}

fn recognise_bytes(head: &[u8]) -> Option<String> {
    match Label::decode(head) {
        LabelState::Foreign => {}
        LabelState::Newer(version) | LabelState::Older(version) => {
            return Some(format!("a Jericho volume of format version {version}"));
        }
        LabelState::Damaged => return Some("a Jericho volume with a damaged label".into()),
        LabelState::Valid(label) => {
            return Some(match label.device_index.get() {
                0 => "a Jericho volume".into(),
                index => format!("device {index} of a Jericho volume"),
            });
        }
    }
    let found = MAGICS.iter().find(|(at, magic, _)| {
        head.get(*at..*at + magic.len())
            .is_some_and(|b| b == *magic)
    });
    found.map(|(_, _, name)| (*name).to_owned())
}

/// Returns whether the head of a device has a byte that is not zero.
pub(crate) fn holds_data(device: &dyn Device) -> Result<bool, IoError> {
    let bytes = device.size_bytes().min(HEAD_BYTES) / BLOCK_BYTES * BLOCK_BYTES;
    let mut head = vec![0; bytes as usize];
    device.read_at(0, &mut head)?;
    Ok(head.iter().any(|byte| *byte != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_filesystems_are_named() {
        for (at, magic, name) in MAGICS {
            let mut head = vec![0; HEAD_BYTES as usize];
            assert_eq!(recognise_bytes(&head), None);
            head[at..at + magic.len()].copy_from_slice(magic);
            assert_eq!(recognise_bytes(&head).as_deref(), Some(name));
        }
        assert!(
            recognise_bytes(&Label::new().encode())
                .unwrap()
                .contains("Jericho")
        );
    }
}
