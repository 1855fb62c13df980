//! Checks both copies of the superblock and of the journal's header. A mount needs only one of each.

use std::fmt::Display;

use jericho_format::PAGE_BYTES;
use jericho_format::journal::{HEADER_COPIES, JournalHeader, JournalHeaderError};
use jericho_format::superblock::SuperblockError;
use jericho_metadata::stores;
use jericho_storage::{BLOCK_BYTES, IoError};
use jericho_volume::Volume;
use jericho_volume::superblocks::Copies;

use super::findings::{Finding, Severity};

/// Returns the finding for an unusable copy. A crash may tear the copy that is being written. The other copy counts then, and the next
/// write repairs this one.
fn finding(what: &str, error: &impl Display, may_be_torn: bool) -> Finding {
    match may_be_torn {
        true => Finding {
            severity: Severity::Info,
            text: format!(
                "{what} is damaged, or a crash has interrupted its last write. The other copy counts, and the next write of this copy \
                 repairs it"
            ),
        },
        false => Finding {
            severity: Severity::Damage,
            text: format!("{what} is unusable: {error}"),
        },
    }
}

/// Returns the findings for the copies of the superblock on a device. A power cut may tear a copy at any time, also the first write after
/// the volume was cleanly unmounted. So a wrong checksum of one copy is no damage of the volume.
pub(super) fn superblock_copies(device: &str, copies: &Copies) -> Vec<Finding> {
    let unusable = copies
        .iter()
        .enumerate()
        .filter_map(|(index, copy)| Some((index, copy.as_ref().err()?)));
    unusable
        .map(|(index, error)| {
            let what = format!("copy {index} of the superblock on {device}");
            finding(&what, error, *error == SuperblockError::Checksum)
        })
        .collect()
}

/// Returns the findings for copies of journal headers whose other copy can be used. If neither can be used, the recovery fails.
pub(super) fn journal_copies(volume: &Volume) -> Result<Vec<Finding>, IoError> {
    let mut findings = Vec::new();
    for place in stores::journals(volume) {
        let mut copies = Vec::new();
        let first = place.area.first_block;
        for block in first..first + u64::from(HEADER_COPIES) {
            let mut bytes = vec![0; PAGE_BYTES as usize];
            place.device.read_at(block * BLOCK_BYTES, &mut bytes)?;
            copies.push((block, JournalHeader::decode(&bytes).map(drop)));
        }
        if copies.iter().all(|(_, copy)| copy.is_err()) {
            continue;
        }
        for (block, copy) in copies {
            if let Err(error) = copy {
                let what = format!(
                    "the copy of the journal's header at block {block} of {}",
                    place.device.name()
                );
                let is_torn = matches!(error, JournalHeaderError::Checksum);
                findings.push(finding(&what, &error, is_torn && volume.is_dirty()));
            }
        }
    }
    Ok(findings)
}
