//! Checks a volume, and repairs it where possible.
//!
//! A check works on a copy-on-write view in memory, so that it writes nothing, not even the recovery of a store whose last
//! writer died. A repair checks first and then changes rows in passes. Rows that one pass removes make counts wrong, which the
//! next pass finds. The repair ends when a pass finds nothing.

mod counts;
mod names;
mod space;
mod stores;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jericho_format::PAGE_BYTES;
use jericho_format::label::LabelState;
use jericho_format::superblock::SuperblockError;
use jericho_storage::{Device, OpenOptions, open_device};
use jericho_volume::labels;
use jericho_volume::superblocks::{Copies, Superblocks, read_copies};
use jericho_volume::{DeviceOverlay, OpenMode, Volume, VolumeError};

use self::stores::{Fix, Stores};
use crate::alloc::Allocator;
use crate::error::Error;
use crate::metadata;
use crate::store::region::Region;
use crate::store::{InodeRecord, Store};
use crate::types::{Ino, Kind};

/// Options of a check.
#[derive(Clone, Copy, Debug, Default)]
pub struct CheckOptions {
    /// Repairs the volume where possible, and checks again.
    pub repair: bool,
    /// Checks the volume even if another machine has not unmounted it (`OpenMode::force`).
    pub force: bool,
}

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Nothing is wrong.
    Info,
    /// Space that belongs to nothing. It is lost, but does no harm.
    Leak,
    /// The volume contradicts itself.
    Damage,
}

/// A result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Severity.
    pub severity: Severity,
    /// Description, with the place.
    pub text: String,
}

/// All results of a check.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The findings in order. After a repair, the remaining ones.
    pub findings: Vec<Finding>,
    /// The findings that a repair has put right.
    pub repaired: Vec<Finding>,
    /// Number of directories.
    pub directories: u64,
    /// Number of other inodes.
    pub files: u64,
    /// Bytes of the slices used by extents.
    pub used_bytes: u64,
    /// Bytes of the slices and of the first device used by metadata.
    pub metadata_bytes: u64,
}

impl Report {
    /// Returns whether nothing is wrong, after a repair if one was requested.
    pub fn is_sound(&self) -> bool {
        self.findings.iter().all(|f| f.severity == Severity::Info)
    }
}

/// Largest number of passes of a repair. Each pass removes at least one finding or is the last.
const PASSES_MAX: usize = 8;
/// Largest number of findings kept, so that messages about a badly damaged volume do not fill memory.
const FINDINGS_MAX: usize = 10_000;

/// The findings of one pass over the stores, and the rows that would put them right.
struct Pass<'v> {
    volume: &'v Volume,
    stores: &'v Stores,
    report: Report,
    fixes: Vec<Fix>,
    more: u64,
    inodes: BTreeMap<Ino, Seen>,
    counts: Counts,
    lost_and_found: Option<Ino>,
}

/// The marks of the inode numbers and the numbers of inodes, as the stores have them, and what the inodes say about them.
#[derive(Default)]
struct Counts {
    /// By slice: the mark, if it is a possible one.
    marks: Vec<Option<u64>>,
    /// By slice: whether its store has a row for the mark.
    has_mark: Vec<bool>,
    /// By shard: the number of inodes that its store says.
    inodes: Vec<Option<u64>>,
    /// By shard: the number of rows with inodes.
    inode_rows: Vec<u64>,
    /// By slice: the largest counter of an inode number in use, or 0.
    highest: Vec<u64>,
    /// The counter of an inode of slice 0 that the repair makes, or 0.
    made: u64,
}

/// An inode, and the entries that refer to it.
struct Seen {
    record: InodeRecord,
    /// Number of entries that name the inode.
    names: u64,
    /// Number of entries that a directory has.
    entries: u64,
    /// Number of these entries that name directories.
    subdirectories: u64,
    /// A path leads from the root to the inode.
    reachable: bool,
    orphan: bool,
    /// Number of blocks of its extents.
    blocks: u64,
    /// Key of the entry that names a directory.
    name_key: Option<Box<[u8]>>,
}

impl Pass<'_> {
    fn find(&mut self, severity: Severity, text: String) {
        if self.report.findings.len() < FINDINGS_MAX {
            self.report.findings.push(Finding { severity, text });
        } else {
            self.more += 1;
        }
    }

    fn damage(&mut self, text: String) {
        self.find(Severity::Damage, text);
    }

    /// Reports the rows that are in a store where they do not belong.
    fn misplaced(&mut self) {
        for fix in self.stores.take_misplaced() {
            let (table, key) = (fix.row.table, &fix.row.key);
            self.damage(format!(
                "a row of table {table:?} with the key {key:02x?} is in the metadata of another slice"
            ));
            self.fixes.push(fix);
        }
    }
}

/// Checks the volume whose first device is at `path`. Fails if the volume cannot be opened at all (it is mounted, or a device is
/// missing, truncated or of another volume) or if a device fails. The report has all other results.
pub fn check(path: &Path, options: CheckOptions) -> Result<Report, VolumeError> {
    check_among(path, &[], options)
}

/// Does the same as `check`, but first looks for the other devices at `others`.
pub fn check_among(
    path: &Path,
    others: &[PathBuf],
    options: CheckOptions,
) -> Result<Report, VolumeError> {
    let mode = OpenMode {
        read_only: !options.repair,
        force: options.force,
    };
    let mut lock = Volume::lock(path, mode)?;
    let mut before = Vec::new();
    if check_label(path, options.repair, &mut before)? && !options.repair {
        return Ok(Report {
            findings: before,
            ..Report::default()
        });
    }
    let volume = Volume::open_among(path, others, mode)?;
    lock.cover(&volume)?;
    let mut report = check_devices(volume.devices().to_vec(), options)?;
    if options.repair {
        report.repaired.splice(0..0, before);
    }
    Ok(report)
}

/// Checks a volume on open devices, in the order of their indices.
pub fn check_devices(
    devices: Vec<Arc<dyn Device>>,
    options: CheckOptions,
) -> Result<Report, VolumeError> {
    let report = check_once(&devices)?;
    let sound = report.is_sound() && report.findings.is_empty();
    if !options.repair
        || sound
        || report
            .findings
            .iter()
            .any(|f| f.text.contains(BEYOND_REPAIR))
    {
        return Ok(report);
    }
    let mut repaired = report.findings;
    repaired.retain(|f| f.severity != Severity::Info);
    repair(&devices, &mut repaired)?;
    let mut report = check_once(&devices)?;
    // Findings that are still there were not repaired.
    repaired.retain(|f| !report.findings.contains(f));
    report.repaired = repaired;
    Ok(report)
}

/// Part of the text of findings that no repair can put right.
const BEYOND_REPAIR: &str = "restore the volume from a backup";

/// Checks the label of the first device. Returns whether it is damaged. With `repair` writes it again from the superblock.
fn check_label(
    path: &Path,
    repair: bool,
    findings: &mut Vec<Finding>,
) -> Result<bool, VolumeError> {
    let options = OpenOptions {
        read_only: !repair,
        ..OpenOptions::default()
    };
    let device = open_device(path, options).map_err(|e| VolumeError::Open(e.to_string()))?;
    if !matches!(labels::read_label(&*device)?, LabelState::Damaged) {
        return Ok(false);
    }
    let Ok(superblocks) = Superblocks::read(device.clone()) else {
        return Err(VolumeError::LabelDamaged(device.name()));
    };
    findings.push(Finding {
        severity: Severity::Damage,
        text: format!("the label of {} is damaged", device.name()),
    });
    if repair {
        let label = superblocks.with(|s| labels::label(s, 0).encode());
        device.write_at(0, &label)?;
        device.flush()?;
    }
    Ok(true)
}

/// Checks a device's copies of the superblock.
fn check_copies(
    volume: &Volume,
    device: &str,
    copies: &Copies,
    find: &mut impl FnMut(Severity, String),
) {
    let newest = volume.superblocks().with(|s| s.head.sequence.get());
    let mut valid = copies.iter().flatten();
    let is_behind = !valid.any(|copy| copy.head.sequence.get() == newest);
    for (index, copy) in copies.iter().enumerate() {
        match copy {
            Ok(_) => {}
            // A crash may tear the copy that is being written. Another copy counts then, and the next write repairs this one.
            Err(SuperblockError::Checksum) if volume.is_dirty() || is_behind => find(
                Severity::Info,
                format!(
                    "copy {index} of the superblock on {device} was being written when the volume's last use ended, or is damaged"
                ),
            ),
            Err(error) => find(
                Severity::Damage,
                format!("copy {index} of the superblock on {device} is unusable: {error}"),
            ),
        }
    }
}

/// Runs one check over a view that keeps writes in memory.
fn check_once(devices: &[Arc<dyn Device>]) -> Result<Report, VolumeError> {
    let copies = devices.iter().map(|device| read_copies(&**device));
    let copies = copies.collect::<Result<Vec<_>, _>>()?;
    let views = devices
        .iter()
        .map(|d| DeviceOverlay::over(d.clone()))
        .collect();
    let volume = Volume::open_from_devices(views, OpenMode::WRITE)?;
    let mut report = Report::default();
    let mut find = |severity, text| report.findings.push(Finding { severity, text });
    for (device, copies) in devices.iter().zip(&copies) {
        check_copies(&volume, &device.name(), copies, &mut find);
    }
    if volume.is_dirty() {
        find(
            Severity::Info,
            "the volume is mounted or was not cleanly unmounted".into(),
        );
    }
    for store in 0..volume.superblocks().with(|s| s.stores()) {
        let devices = volume.devices().to_vec();
        let region = Region::new(devices, volume.superblocks().clone(), store);
        match Store::verify(&region) {
            Ok(true) => {}
            // After an unclean end a recovery is expected, and is not a finding.
            Ok(false) if volume.is_dirty() => {}
            Ok(false) => find(
                Severity::Leak,
                format!("the metadata store of slice {store} needed recovery"),
            ),
            Err(Error::Io(error)) => return Err(error.into()),
            Err(error) => {
                find(
                    Severity::Damage,
                    format!(
                        "the metadata store of slice {store} is lost ({error}); {BEYOND_REPAIR}"
                    ),
                );
                return Ok(report);
            }
        }
    }
    let opened = open_stores(&volume, false).and_then(|(stores, damage)| {
        for damage in damage {
            let text = format!("{damage}; the changes from there on are lost");
            find(Severity::Damage, text);
        }
        pass(&volume, &stores).map(|p| p.0)
    });
    match opened {
        Ok(found) => {
            let before = std::mem::take(&mut report.findings);
            report = found;
            report.findings.splice(0..0, before);
            Ok(report)
        }
        Err(Error::Io(error)) => Err(error.into()),
        Err(error) => {
            find(
                Severity::Damage,
                format!("the metadata store cannot be read ({error}); {BEYOND_REPAIR}"),
            );
            Ok(report)
        }
    }
}

/// Opens the stores. Returns also what is wrong with their journals.
fn open_stores(volume: &Volume, repair: bool) -> Result<(Stores, Vec<String>), Error> {
    let (stores, damage) = metadata::open_stores_only(volume, 64 << 20, repair)?;
    Ok((Stores::new(stores, volume), damage))
}

/// Finds everything that is wrong in the stores, and the rows that would put it right.
fn pass(volume: &Volume, stores: &Stores) -> Result<(Report, Vec<Fix>), Error> {
    let report = Report {
        metadata_bytes: volume
            .superblocks()
            .with(|s| s.chunks.len() as u64 * u64::from(s.head.chunk_blocks.get()) * PAGE_BYTES),
        ..Report::default()
    };
    let mut pass = Pass {
        volume,
        stores,
        report,
        fixes: vec![],
        more: 0,
        inodes: BTreeMap::new(),
        counts: Counts::default(),
        lost_and_found: None,
    };
    pass.values()?;
    pass.inodes()?;
    pass.orphans()?;
    pass.entries()?;
    pass.links();
    pass.xattrs()?;
    pass.space()?;
    pass.counts();
    pass.misplaced();
    for seen in pass.inodes.values() {
        match seen.record.kind {
            Kind::Directory => pass.report.directories += 1,
            _ => pass.report.files += 1,
        }
    }
    if pass.more > 0 {
        let text = format!("and {} more findings", pass.more);
        pass.report.findings.push(Finding {
            severity: Severity::Damage,
            text,
        });
    }
    Ok((pass.report, pass.fixes))
}

/// Changes the volume until a pass finds nothing or cannot improve it.
fn repair(devices: &[Arc<dyn Device>], repaired: &mut Vec<Finding>) -> Result<(), VolumeError> {
    let volume = Volume::open_from_devices(devices.to_vec(), OpenMode::WRITE)?;
    volume.mark_dirty()?;
    // Also writes the other copy of the superblock, so that both are valid again.
    volume.superblocks().update(None, |_| {})?;
    for _ in 0..PASSES_MAX {
        let (stores, _) = open_stores(&volume, true)?;
        let (report, fixes) = pass(&volume, &stores)?;
        for finding in report.findings {
            if finding.severity != Severity::Info && !repaired.contains(&finding) {
                repaired.push(finding);
            }
        }
        if fixes.is_empty() {
            // The commits of this repair may have used spare chunks of the metadata region. Opening an allocator proves that the
            // counts agree: each container has room for its used blocks and its chunks.
            let allocator = Allocator::of_volume(&stores.all, &volume)?;
            drop(allocator);
            break;
        }
        stores.commit(fixes)?;
        stores.close()?;
    }
    let (stores, _) = open_stores(&volume, true)?;
    stores.note_repair()?;
    stores.close()?;
    volume.mark_clean()?;
    Ok(())
}

#[cfg(test)]
mod tests;
