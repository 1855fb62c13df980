//! Checks a volume, and repairs it where possible.
//!
//! A check works on copy-on-write views of the devices, so that it writes nothing, not even the recovery of a store whose last
//! writer died. A repair checks first and then changes rows in passes. Rows that one pass removes make counts wrong, which the
//! next pass finds. The repair ends when a pass finds nothing.
//!
//! `pass` is one pass over all rows. The other files each compare a kind of rows, except these: `stores` reads them, `findings` keeps
//! what is found, `limits` bounds the memory, `progress` says how far the check is.

mod copies;
mod counts;
pub mod data;
pub(crate) mod extents;
mod findings;
mod index;
mod inodes;
mod limits;
mod lost;
mod names;
mod parallel;
mod pass;
mod paths;
mod progress;
mod reads;
mod space;
mod stores;
mod sums;
mod tree;
mod window;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jericho_format::PAGE_BYTES;
use jericho_format::label::LabelState;
use jericho_metadata::alloc::Allocator;
use jericho_metadata::store::Store;
use jericho_metadata::store::region::Region;
use jericho_storage::{Device, OpenOptions, open_device};
use jericho_volume::labels;
use jericho_volume::superblocks::{Superblocks, read_copies};
use jericho_volume::{DeviceOverlay, OpenMode, Volume, VolumeError, check_features};

use self::copies::{journal_copies, superblock_copies};
pub use self::findings::{Finding, Severity};
use self::limits::Limits;
use self::parallel::in_parallel;
use self::pass::{Pass, pass};
pub use self::progress::{Progress, Stage};
use self::reads::{LastRead, Reads};
use self::stores::{Stores, Subject};
use crate::error::Error;

/// Options of a check.
#[derive(Clone, Copy, Debug, Default)]
pub struct CheckOptions {
    /// Repairs the volume where possible, and checks again.
    pub repair: bool,
    /// Checks the volume even if another machine has not unmounted it (`OpenMode::force`).
    pub force: bool,
}

/// All results of a check.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The findings in order. After a repair, the remaining ones.
    pub findings: Vec<Finding>,
    /// The findings that the repair has put right.
    pub repaired: Vec<Finding>,
    /// Number of directories.
    pub directories: u64,
    /// Number of other inodes.
    pub files: u64,
    /// Bytes of the slices used by extents.
    pub used_bytes: u64,
    /// Bytes of the chunks of the metadata stores.
    pub metadata_bytes: u64,
    /// Windows of inodes in which the check compared them: 1 for all but huge volumes.
    pub windows: u64,
    /// Bytes of data that were read, if that was requested.
    pub read_bytes: Option<u64>,
    /// Number of findings in the data, which are at the end of `findings`. No repair can put them right.
    pub data_findings: usize,
    /// Pages of data that are damaged or cannot be read.
    pub damaged_pages: u64,
}

impl Report {
    /// Returns whether nothing is wrong, after a repair if one was requested.
    pub fn is_sound(&self) -> bool {
        self.findings.iter().all(|f| f.severity == Severity::Info)
    }
}

/// Most passes of a repair that have room for all fixes. Each removes at least one finding or is the last.
const PASSES_MAX: usize = 16;
/// Most passes of a repair that have room for a part of the fixes only: a bound for volumes that no repair can put right.
const CUT_PASSES_MAX: usize = 10_000;
/// Most findings that a repair reports as put right.
const REPAIRED_MAX: usize = 10_000;
/// Memory of the metadata stores together.
const STORE_BYTES: usize = 64 << 20;

/// Checks the volume whose first device is at `path`. Fails if the volume cannot be opened at all (it is mounted, or a device is
/// missing, truncated or of another volume) or if a device fails. The report has all other results.
pub fn check(path: &Path, options: CheckOptions) -> Result<Report, VolumeError> {
    check_among(path, &[], options, &Arc::default())
}

/// Does the same as `check`, but first looks for the other devices at `others`. Tells `progress` how far it is.
pub fn check_among(
    path: &Path,
    others: &[PathBuf],
    options: CheckOptions,
    progress: &Arc<Progress>,
) -> Result<Report, VolumeError> {
    check_with(path, others, options, progress, |_, _| Ok(()))
}

/// Does the same as `check_among`, and then calls `then` with the devices, while the volume is locked.
fn check_with(
    path: &Path,
    others: &[PathBuf],
    options: CheckOptions,
    progress: &Arc<Progress>,
    then: impl FnOnce(&[Arc<dyn Device>], &mut Report) -> Result<(), VolumeError>,
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
    let mut report = check_devices_showing(volume.devices().to_vec(), options, progress)?;
    if options.repair {
        report.repaired.splice(0..0, before);
    }
    then(volume.devices(), &mut report)?;
    Ok(report)
}

/// Checks a volume on open devices, in the order of their indices.
pub fn check_devices(
    devices: Vec<Arc<dyn Device>>,
    options: CheckOptions,
) -> Result<Report, VolumeError> {
    check_devices_showing(devices, options, &Arc::default())
}

/// Does the same as `check_devices`, and tells `progress` how far it is.
pub fn check_devices_showing(
    devices: Vec<Arc<dyn Device>>,
    options: CheckOptions,
    progress: &Arc<Progress>,
) -> Result<Report, VolumeError> {
    check_within(&devices, options, Limits::USUAL, progress)
}

fn check_within(
    devices: &[Arc<dyn Device>],
    options: CheckOptions,
    limits: Limits,
    progress: &Arc<Progress>,
) -> Result<Report, VolumeError> {
    let report = check_once(devices, limits, progress)?;
    let is_lost = |finding: &Finding| finding.text.contains(BEYOND_REPAIR);
    let is_in_order = report.is_sound() && report.findings.is_empty();
    if !options.repair || is_in_order || report.findings.iter().any(is_lost) {
        return Ok(report);
    }
    let mut repaired = Repaired::default();
    repaired.add(report.findings);
    repair(devices, limits, progress, &mut repaired)?;
    let mut report = check_once(devices, limits, progress)?;
    // Findings of the last check were not repaired.
    for finding in &report.findings {
        repaired.texts.remove(&finding.text);
    }
    let Repaired { mut list, texts } = repaired;
    list.retain(|finding| texts.contains(&finding.text));
    report.repaired = list;
    Ok(report)
}

/// The findings of the passes of a repair, once each.
#[derive(Default)]
struct Repaired {
    list: Vec<Finding>,
    texts: HashSet<String>,
}

impl Repaired {
    fn add(&mut self, findings: Vec<Finding>) {
        for finding in findings {
            let is_kept = finding.severity != Severity::Info && self.list.len() < REPAIRED_MAX;
            if is_kept && self.texts.insert(finding.text.clone()) {
                self.list.push(finding);
            }
        }
    }
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
        check_features(&device, &superblocks)?;
        let label = superblocks.with(|s| labels::label(s, 0).encode());
        device.write_at(0, &label)?;
        device.flush()?;
    }
    Ok(true)
}

/// Runs one check over a view that keeps writes in memory.
fn check_once(
    devices: &[Arc<dyn Device>],
    limits: Limits,
    progress: &Arc<Progress>,
) -> Result<Report, VolumeError> {
    let missing = devices.iter().position(|device| device.is_absent());
    if let Some(index) = missing {
        let path = PathBuf::from(&*devices[index].name());
        return Err(VolumeError::DeviceMissing { index, path });
    }
    let view = |device: &Arc<dyn Device>| {
        DeviceOverlay::over(Reads::counted(device.clone(), progress.clone()))
    };
    let views = devices.iter().map(view).collect();
    let volume = Volume::open_from_devices(views, OpenMode::WRITE)?;
    let mut report = Report::default();
    for device in devices {
        let copies = read_copies(&**device)?;
        let found = superblock_copies(&device.name(), &copies);
        report.findings.extend(found);
    }
    report.findings.extend(journal_copies(&volume)?);
    if volume.is_dirty() {
        report.findings.push(Finding {
            severity: Severity::Info,
            text: "the volume is mounted or was not cleanly unmounted".into(),
        });
    }
    if !stores_are_readable(&volume, progress, &mut report.findings)? {
        return Ok(report);
    }
    let mut find = |severity, text| report.findings.push(Finding { severity, text });
    let passed = open_stores(&volume, false, progress).and_then(|(stores, damage)| {
        for damage in damage {
            let text = format!("{damage}; the changes from there on are lost");
            find(Severity::Damage, text);
        }
        pass_over(&volume, &stores, limits)
    });
    match passed {
        Ok(pass) => {
            report.findings.extend(pass.found.findings);
            report.directories = pass.directories;
            report.files = pass.files;
            report.used_bytes = pass.used_blocks * PAGE_BYTES;
            report.metadata_bytes = volume
                .superblocks()
                .with(|s| s.chunks.len() as u64 * u64::from(s.head.chunk_blocks.get()))
                * PAGE_BYTES;
            report.windows = pass.windows;
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

/// Reads all pages of the stores. Returns whether redb finds its own pages in order, or can put them in order.
fn stores_are_readable(
    volume: &Volume,
    progress: &Progress,
    findings: &mut Vec<Finding>,
) -> Result<bool, VolumeError> {
    let regions = jericho_metadata::stores::regions(volume, LastRead::over);
    let bytes = regions.iter().map(|(region, _)| region.len_bytes()).sum();
    progress.begin(Stage::Pages, bytes);
    let verify = |(region, _): &(Arc<Region>, Arc<LastRead>)| Ok(Store::verify(region));
    let verified = in_parallel(&regions, verify)?;
    let mut are_readable = true;
    for (slice, (verified, (_, last))) in verified.into_iter().zip(&regions).enumerate() {
        let (severity, text) = match verified {
            Ok(true) => continue,
            // After an unclean end redb's recovery is expected, so it is no finding.
            Ok(false) if volume.is_dirty() => continue,
            Ok(false) => (
                Severity::Leak,
                format!("the metadata store of slice {slice} needed recovery"),
            ),
            Err(Error::Io(error)) => return Err(error.into()),
            Err(error) => {
                are_readable = false;
                let name = |index: usize| volume.devices()[index].name().to_string();
                let place = volume.superblocks().with(|s| last.describe(s, name));
                let text = format!(
                    "the metadata store of slice {slice} is lost ({error}); the page that was read last is {place}; {BEYOND_REPAIR}"
                );
                (Severity::Damage, text)
            }
        };
        findings.push(Finding { severity, text });
    }
    Ok(are_readable)
}

/// Opens the stores. Returns also what is wrong with their journals.
fn open_stores<'p>(
    volume: &Volume,
    repair: bool,
    progress: &'p Progress,
) -> Result<(Stores<'p>, Vec<String>), Error> {
    let (stores, damage) = jericho_metadata::stores::open_stores_only(volume, STORE_BYTES, repair)?;
    Ok((Stores::new(stores, volume, progress), damage))
}

fn pass_over(volume: &Volume, stores: &Stores, limits: Limits) -> Result<Pass, Error> {
    pass(Subject {
        volume,
        stores,
        limits,
    })
}

/// Changes the volume until a pass finds nothing or cannot improve it.
fn repair(
    devices: &[Arc<dyn Device>],
    limits: Limits,
    progress: &Progress,
    repaired: &mut Repaired,
) -> Result<(), VolumeError> {
    let volume = Volume::open_from_devices(devices.to_vec(), OpenMode::WRITE)?;
    check_features(&devices[0], volume.superblocks())?;
    volume.mark_dirty()?;
    // Also writes the other copy of the superblock, so that both are valid again.
    volume.superblocks().update(&[], |_| {})?;
    let (mut whole, mut cut) = (0, 0);
    while whole < PASSES_MAX && cut < CUT_PASSES_MAX {
        let (stores, _) = open_stores(&volume, true, progress)?;
        let found = pass_over(&volume, &stores, limits)?.found;
        repaired.add(found.findings);
        if found.fixes.is_empty() {
            // The commits of this repair may have used spare chunks of the metadata regions. Opening an allocator proves that the
            // counts agree: each container has room for its used blocks and its chunks.
            let allocator = Allocator::of_volume(&stores.all, &volume)?;
            drop(allocator);
            break;
        }
        stores.commit(found.fixes)?;
        stores.close()?;
        match found.is_cut {
            true => cut += 1,
            false => whole += 1,
        }
    }
    let (stores, _) = open_stores(&volume, true, progress)?;
    stores.note_repair()?;
    stores.close()?;
    volume.mark_clean()?;
    Ok(())
}

#[cfg(test)]
mod recovery_tests;
#[cfg(test)]
mod tests;
