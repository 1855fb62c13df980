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
                "{what} was being written when the volume's last use ended, or is damaged"
            ),
        },
        false => Finding {
            severity: Severity::Damage,
            text: format!("{what} is unusable: {error}"),
        },
    }
}

/// Returns the findings for the copies of the superblock on a device. A device that has missed the last change may have a torn copy, too.
pub(super) fn superblock_copies(device: &str, copies: &Copies, volume: &Volume) -> Vec<Finding> {
    let newest = volume.superblocks().with(|s| s.head.sequence.get());
    let mut valid = copies.iter().flatten();
    let is_behind = valid
        .next()
        .is_some_and(|copy| copy.head.sequence.get() < newest);
    let mut findings = Vec::new();
    for (index, copy) in copies.iter().enumerate() {
        if let Err(error) = copy {
            let what = format!("copy {index} of the superblock on {device}");
            let is_torn = *error == SuperblockError::Checksum;
            let may_be_torn = is_torn && (is_behind || volume.is_dirty());
            findings.push(finding(&what, error, may_be_torn));
        }
    }
    findings
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
