//! Reads all data of files, in the order of the devices, and compares it with its checksums if the volume keeps some. Writes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jericho_format::PAGE_BYTES;
use jericho_format::sums::{Group, Sum, checksum, place_of};
use jericho_storage::{AlignedBuffer, Device};
use jericho_volume::{Blocks, DeviceOverlay, OpenMode, Volume, VolumeError};
use parking_lot::Mutex;

use super::findings::FINDINGS_MAX;
use super::stores::{Range, Stores};
use super::{CheckOptions, Finding, Progress, Report, Severity, Stage, check_with, open_stores};
use crate::data::extents::At;
use crate::data::summed::place_name;
use crate::error::Error;
use crate::shard::ShardMap;
use crate::store::codec;
use crate::store::tables::Table;
use crate::store::{Block, Image, StoreRef};
use crate::types::{Ino, Kind, ROOT};

/// Pages that one read takes at most: 1 MiB.
const PAGES_AT_ONCE: usize = 256;
const PAGE: usize = PAGE_BYTES as usize;

/// Neighbouring pages of a file that are neighbours on a device.
#[derive(Clone, Copy)]
struct Piece {
    offset_bytes: u64,
    ino: Ino,
    page: u64,
    count: u32,
    at: At,
}

/// A page that is not as it was written.
struct Bad {
    ino: Ino,
    page: u64,
    what: String,
}

/// What the threads share, one for each device.
struct Reading<'v> {
    volume: &'v Volume,
    stores: &'v [StoreRef],
    map: ShardMap,
    /// The contents of blocks that are not in them yet.
    images: BTreeMap<Block, Image>,
    bad: Mutex<Vec<Bad>>,
    progress: &'v Progress,
}

/// Does the same as `check_among`, and then reads all data of files. Compares it with its checksums if the volume keeps some.
pub fn check_data_among(
    path: &Path,
    others: &[PathBuf],
    options: CheckOptions,
    progress: &Arc<Progress>,
) -> Result<Report, VolumeError> {
    check_with(path, others, options, progress, |devices, report| {
        check_data(devices, report, progress)
    })
}

/// Reads all data of the files on open devices, and adds the findings to a report.
pub fn check_data(
    devices: &[Arc<dyn Device>],
    report: &mut Report,
    progress: &Arc<Progress>,
) -> Result<(), VolumeError> {
    let (mut findings, bytes) = check(devices, progress)?;
    report.read_bytes = Some(bytes);
    report.damaged_pages = findings.len();
    report.findings.append(&mut findings);
    Ok(())
}

/// Reads the data of the volume on these devices. Returns the findings and the number of bytes. Data of a volume whose metadata
/// cannot be read is not found.
fn check(
    devices: &[Arc<dyn Device>],
    progress: &Arc<Progress>,
) -> Result<(Vec<Finding>, u64), VolumeError> {
    let views = devices.iter().map(|d| DeviceOverlay::over(d.clone()));
    let volume = Volume::open_from_devices(views.collect(), OpenMode::WRITE)?;
    let Ok((stores, _)) = open_stores(&volume, false, progress) else {
        return Ok((Vec::new(), 0));
    };
    let pieces = pieces(&volume, &stores, devices.len())?;
    let pages = pieces.iter().flatten().map(|piece| u64::from(piece.count));
    let all_bytes = pages.sum::<u64>() * PAGE_BYTES;
    // After the rows were read, which counts.
    let images = images(&stores)?;
    progress.begin(Stage::Data, all_bytes);
    let mut reading = Reading {
        images,
        bad: Mutex::default(),
        volume: &volume,
        stores: &stores.all,
        map: stores.map(),
        progress,
    };
    std::thread::scope(|scope| {
        for (device, pieces) in devices.iter().zip(&pieces) {
            let reading = &reading;
            scope.spawn(move || reading.read_device(&**device, pieces));
        }
    });
    let mut bad = std::mem::take(reading.bad.get_mut());
    bad.sort_by_key(|bad| (bad.ino, bad.page));
    let paths = paths(&stores, bad.iter().map(|bad| bad.ino).collect())?;
    let finding = |bad: Bad| {
        let offset = bad.page * PAGE_BYTES;
        let name = match paths.get(&bad.ino) {
            Some(path) => format!("{path} (inode {})", bad.ino),
            None => format!("inode {}", bad.ino),
        };
        Finding {
            severity: Severity::Damage,
            text: format!("{name}, offset {offset}: {}", bad.what),
        }
    };
    Ok((bad.into_iter().map(finding).collect(), all_bytes))
}

/// Returns the data of each device, in the order of the blocks.
fn pieces(volume: &Volume, stores: &Stores, devices: usize) -> Result<Vec<Vec<Piece>>, Error> {
    let mut pieces: Vec<Vec<Piece>> = (0..devices).map(|_| Vec::new()).collect();
    scan(stores, Table::Extents, |key, value| {
        let Ok((ino, extent)) = codec::extent_of_row(key, value) else {
            return;
        };
        if extent.unwritten || !is_possible(volume, extent.blocks) {
            return;
        }
        let mut done = 0;
        for run in volume.runs(extent.blocks) {
            if let Some(of_device) = pieces.get_mut(usize::from(run.device)) {
                of_device.push(Piece {
                    offset_bytes: run.offset_bytes,
                    ino,
                    page: extent.page.saturating_add(done),
                    count: run.blocks,
                    at: At {
                        slice: extent.blocks.slice,
                        block: extent.blocks.first + done,
                    },
                });
            }
            done += u64::from(run.blocks);
        }
    })?;
    for pieces in &mut pieces {
        pieces.sort_by_key(|piece| piece.offset_bytes);
    }
    Ok(pieces)
}

/// Passes each row of a table to `each`, store by store.
fn scan(stores: &Stores, table: Table, mut each: impl FnMut(&[u8], &[u8])) -> Result<(), Error> {
    for shard in stores.shards() {
        stores.scan(Range::all(shard, table), |key, value| {
            each(key, value);
            true
        })?;
    }
    Ok(())
}

fn is_possible(volume: &Volume, blocks: Blocks) -> bool {
    let slice = volume.slices().get(usize::from(blocks.slice));
    let end = blocks.first.checked_add(u64::from(blocks.count));
    slice.is_some_and(|slice| end.is_some_and(|end| end <= slice.blocks))
}

fn images(stores: &Stores) -> Result<BTreeMap<Block, Image>, Error> {
    let mut images = BTreeMap::new();
    scan(stores, Table::Logged, |key, value| {
        images.extend(codec::image_of_row(key, value).ok());
    })?;
    Ok(images)
}

impl Reading<'_> {
    /// Reads the pieces of a device, which are in order.
    fn read_device(&self, device: &dyn Device, pieces: &[Piece]) {
        let mut buffer = AlignedBuffer::new(PAGES_AT_ONCE * PAGE);
        let mut sums = Sums {
            stores: self.stores,
            map: self.map,
            last: None,
        };
        let mut batch: Vec<Piece> = Vec::new();
        for piece in pieces {
            let mut skip = 0;
            while skip < piece.count {
                let last = batch.last().map(|last| last.end_bytes());
                let pages: usize = batch.iter().map(|piece| piece.count as usize).sum();
                let part = piece.part(skip, PAGES_AT_ONCE - pages);
                if part.count == 0 || last.is_some_and(|end| end != part.offset_bytes) {
                    self.read(device, &batch, &mut buffer, &mut sums);
                    batch.clear();
                    continue;
                }
                skip += part.count;
                batch.push(part);
            }
        }
        self.read(device, &batch, &mut buffer, &mut sums);
    }

    /// Reads neighbouring pieces with one call.
    fn read(
        &self,
        device: &dyn Device,
        batch: &[Piece],
        buffer: &mut AlignedBuffer,
        sums: &mut Sums<'_>,
    ) {
        let Some(first) = batch.first() else { return };
        let pages: usize = batch.iter().map(|piece| piece.count as usize).sum();
        let bytes = &mut buffer.as_mut_slice()[..pages * PAGE];
        let whole = device.read_at(first.offset_bytes, bytes);
        let each = batch.iter().flat_map(Piece::pages);
        for ((at, page), block) in each.zip(bytes.chunks_exact_mut(PAGE)) {
            if whole.is_err()
                && let Err(error) = device.read_at(at.offset_bytes, block)
            {
                self.note(&at, page, format!("the data cannot be read: {error}"));
                continue;
            }
            let image = self.images.get(&(at.at.slice, at.at.block));
            let found = checksum(image.map_or(&*block, |image| image));
            if self.volume.has_checksums()
                && let Sum::Of(expected) = sums.of(at.ino, page)
                && found != expected
            {
                let place = place_name(self.volume, at.at);
                let what = format!(
                    "the data is damaged: checksum {found:#010x} instead of {expected:#010x}{place}"
                );
                self.note(&at, page, what);
            }
        }
        self.progress.add_data(bytes.len() as u64);
    }

    fn note(&self, piece: &Piece, page: u64, what: String) {
        let mut bad = self.bad.lock();
        if bad.len() < FINDINGS_MAX {
            let ino = piece.ino;
            bad.push(Bad { ino, page, what });
        }
    }
}

impl Piece {
    fn end_bytes(&self) -> u64 {
        self.offset_bytes + u64::from(self.count) * PAGE_BYTES
    }

    /// Returns at most `most` pages from page `skip` of the piece on.
    fn part(&self, skip: u32, most: usize) -> Piece {
        let done = u64::from(skip);
        Piece {
            offset_bytes: self.offset_bytes + done * PAGE_BYTES,
            page: self.page + done,
            count: (self.count - skip).min(most as u32),
            at: At {
                slice: self.at.slice,
                block: self.at.block + done,
            },
            ..*self
        }
    }

    /// Returns each page of the piece alone, with its number.
    fn pages(&self) -> impl Iterator<Item = (Piece, u64)> + '_ {
        (0..self.count).map(|skip| {
            let page = self.part(skip, 1);
            (page, page.page)
        })
    }
}

/// Looks checksums up.
struct Sums<'s> {
    stores: &'s [StoreRef],
    map: ShardMap,
    /// The last group that was read.
    last: Option<((Ino, u64), Group)>,
}

impl Sums<'_> {
    /// Returns the checksum of a page. A row that cannot be read is a finding of the metadata's check.
    fn of(&mut self, ino: Ino, page: u64) -> Sum {
        let (group, at) = place_of(page);
        match &mut self.last {
            Some((key, sums)) if *key == (ino, group) => sums.get(at),
            last => {
                let shard = self.map.of_ino(ino);
                let found = self.stores[shard.index()].sums(ino, group);
                let (_, sums) = last.insert(((ino, group), found.unwrap_or_default()));
                sums.get(at)
            }
        }
    }
}

/// Returns a path of each of these inodes that has one.
fn paths(stores: &Stores, wanted: BTreeSet<Ino>) -> Result<BTreeMap<Ino, String>, Error> {
    // The directory and the name of each directory, and of each wanted inode.
    let mut names: BTreeMap<Ino, (Ino, String)> = BTreeMap::new();
    if wanted.is_empty() {
        return Ok(BTreeMap::new());
    }
    scan(stores, Table::Entries, |key, value| {
        let dir = jericho_format::record::key_number(key);
        let (Some(dir), Ok(entry)) = (dir, codec::entry_of_row(key, value)) else {
            return;
        };
        if entry.kind == Kind::Directory || wanted.contains(&entry.ino) {
            let name = String::from_utf8_lossy(&entry.name).into_owned();
            names.insert(entry.ino, (dir, name));
        }
    })?;
    let path = |ino: Ino| {
        let (mut path, mut at) = (String::new(), ino);
        // A damaged tree may have circles.
        for _ in 0..names.len() {
            let (dir, name) = names.get(&at)?;
            path = format!("/{name}{path}");
            at = *dir;
            if at == ROOT {
                return Some((ino, path));
            }
        }
        None
    };
    Ok(wanted.iter().filter_map(|ino| path(*ino)).collect())
}
