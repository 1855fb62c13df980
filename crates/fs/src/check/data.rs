//! Reads all data of files, and compares it with its checksums if the volume keeps some. Writes nothing.
//!
//! Extents are read in batches, from all stores at the same time. A thread for each device reads the pieces of a batch in the order of
//! the device. So the memory is bounded, and a large file is still read from its start to its end.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use jericho_format::PAGE_BYTES;
use jericho_format::sums::{Group, Sum, checksum, place_of};
use jericho_metadata::shard::ShardId;
use jericho_metadata::store::tables::{Table, block_key};
use jericho_metadata::store::{Extent, Image, codec};
use jericho_storage::{AlignedBuffer, Device};
use jericho_volume::{DeviceOverlay, OpenMode, Volume, VolumeError};
use parking_lot::Mutex;

use super::extents::possible;
use super::findings::FINDINGS_MAX;
use super::limits::Limits;
use super::paths::paths;
use super::stores::{Range, Stores};
use super::{CheckOptions, Finding, Progress, Report, Severity, Stage, check_with, open_stores};
use crate::data::extents::At;
use crate::data::summed::place_name;
use crate::error::Error;
use crate::types::Ino;

/// Most pages of one read: 1 MiB.
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

/// The pages that are not as they were written. Keeps as many as there may be findings.
#[derive(Default)]
struct AllBad {
    kept: Vec<Bad>,
    count: u64,
}

/// What the threads share, one for each device.
struct Reading<'v> {
    volume: &'v Volume,
    stores: &'v Stores<'v>,
    /// For each store, whether it has images.
    have_images: Vec<bool>,
    bad: Mutex<AllBad>,
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
    check_data_within(devices, report, Limits::USUAL, progress)
}

/// Does the same as `check_data` within these limits. Finds no data if the metadata cannot be read: the report says so already.
pub(super) fn check_data_within(
    devices: &[Arc<dyn Device>],
    report: &mut Report,
    limits: Limits,
    progress: &Arc<Progress>,
) -> Result<(), VolumeError> {
    let views = devices.iter().map(|d| DeviceOverlay::over(d.clone()));
    let volume = Volume::open_from_devices(views.collect(), OpenMode::WRITE)?;
    let stores = match open_stores(&volume, false, progress) {
        Ok((stores, _)) => stores,
        Err(Error::Io(error)) => return Err(error.into()),
        Err(_) => return Ok(()),
    };
    let all_bytes = data_bytes(&volume, &stores)?;
    progress.begin(Stage::Data, all_bytes);
    let reading = Reading {
        volume: &volume,
        stores: &stores,
        have_images: have_images(&stores)?,
        bad: Mutex::default(),
        progress,
    };
    let pieces_max = (limits.data_bytes / size_of::<Piece>()).max(1);
    let mut walk = Walk::new(&stores);
    while let Some(batch) = walk.next(&volume, &stores, (devices.len(), pieces_max))? {
        reading.read_batch(devices, &batch);
    }
    let bad = reading.bad.into_inner();
    report.read_bytes = Some(all_bytes);
    report.damaged_pages = bad.count;
    let before = report.findings.len();
    report.findings.append(&mut findings(&stores, bad)?);
    report.data_findings = report.findings.len() - before;
    Ok(())
}

/// Returns the findings, in the order of the files.
fn findings(stores: &Stores, bad: AllBad) -> Result<Vec<Finding>, Error> {
    let AllBad { mut kept, count } = bad;
    kept.sort_by_key(|bad| (bad.ino, bad.page));
    let left_out = count - kept.len() as u64;
    let paths = paths(stores, &kept.iter().map(|bad| bad.ino).collect())?;
    let text = |bad: &Bad| {
        let offset = bad.page * PAGE_BYTES;
        let name = match paths.get(&bad.ino) {
            Some(path) => format!("{path} (inode {})", bad.ino),
            None => format!("inode {}", bad.ino),
        };
        format!("{name}, offset {offset}: {}", bad.what)
    };
    let mut texts: Vec<String> = kept.iter().map(text).collect();
    if left_out > 0 {
        texts.push(format!("and {left_out} more pages of data"));
    }
    let finding = |text| Finding {
        severity: Severity::Damage,
        text,
    };
    Ok(texts.into_iter().map(finding).collect())
}

/// Returns the extent of a row if it has data.
fn data_of(volume: &Volume, key: &[u8], value: &[u8]) -> Option<(Ino, Extent)> {
    possible(volume, key, value).filter(|(_, extent)| !extent.unwritten)
}

fn data_bytes(volume: &Volume, stores: &Stores) -> Result<u64, Error> {
    let mut pages = 0;
    for shard in stores.shards() {
        stores.scan(Range::all(shard, Table::Extents), |key, value| {
            let found = data_of(volume, key, value);
            pages += found.map_or(0, |(_, extent)| u64::from(extent.blocks.count));
            true
        })?;
    }
    Ok(pages * PAGE_BYTES)
}

fn have_images(stores: &Stores) -> Result<Vec<bool>, Error> {
    let has_some = |shard: ShardId| {
        let mut has_some = false;
        stores.scan(Range::all(shard, Table::Logged), |_, _| {
            has_some = true;
            false
        })?;
        Ok(has_some)
    };
    stores.shards().into_iter().map(has_some).collect()
}

/// The way through the extents of all stores.
struct Walk {
    /// For each store that is not at its end, the first key of the next batch.
    next: Vec<(ShardId, Vec<u8>)>,
}

impl Walk {
    fn new(stores: &Stores) -> Walk {
        let begin = |shard| (shard, Vec::new());
        Walk {
            next: stores.shards().into_iter().map(begin).collect(),
        }
    }

    /// Returns the pieces of the next extents of each store, at least one extent of each, by devices and in the order of each device.
    /// `limits` has the number of devices and of pieces. Returns `None` at the end.
    fn next(
        &mut self,
        volume: &Volume,
        stores: &Stores,
        (devices, pieces_max): (usize, usize),
    ) -> Result<Option<Vec<Vec<Piece>>>, Error> {
        if self.next.is_empty() {
            return Ok(None);
        }
        let mut batch: Vec<Vec<Piece>> = (0..devices).map(|_| Vec::new()).collect();
        let share = pieces_max / self.next.len();
        let mut left = Vec::new();
        for (shard, from) in std::mem::take(&mut self.next) {
            let (mut count, mut stopped_at) = (0, None);
            let range = Range {
                from: &from,
                ..Range::all(shard, Table::Extents)
            };
            stores.scan(range, |key, value| {
                if count > 0 && count >= share {
                    stopped_at = Some(key.to_vec());
                    return false;
                }
                if let Some((ino, extent)) = data_of(volume, key, value) {
                    count += add_pieces(volume, (ino, extent), &mut batch);
                }
                true
            })?;
            left.extend(stopped_at.map(|key| (shard, key)));
        }
        self.next = left;
        for pieces in &mut batch {
            pieces.sort_unstable_by_key(|piece| piece.offset_bytes);
        }
        Ok(Some(batch))
    }
}

/// Adds the pieces of an extent. Returns their number.
fn add_pieces(volume: &Volume, (ino, extent): (Ino, Extent), batch: &mut [Vec<Piece>]) -> usize {
    let (mut done, mut count) = (0, 0);
    for run in volume.runs(extent.blocks) {
        if let Some(of_device) = batch.get_mut(usize::from(run.device)) {
            of_device.push(Piece {
                offset_bytes: run.offset_bytes,
                ino,
                page: extent.page + done,
                count: run.blocks,
                at: At {
                    slice: extent.blocks.slice,
                    block: extent.blocks.first + done,
                },
            });
            count += 1;
        }
        done += u64::from(run.blocks);
    }
    count
}

impl Reading<'_> {
    /// Reads the pieces of each device.
    fn read_batch(&self, devices: &[Arc<dyn Device>], batch: &[Vec<Piece>]) {
        let parts = devices.iter().zip(batch);
        std::thread::scope(|scope| {
            for (device, pieces) in parts.filter(|(_, pieces)| !pieces.is_empty()) {
                scope.spawn(move || self.read_device(&**device, pieces));
            }
        });
    }

    /// Reads the pieces of a device, which are in order.
    fn read_device(&self, device: &dyn Device, pieces: &[Piece]) {
        let mut buffer = AlignedBuffer::new(PAGES_AT_ONCE * PAGE);
        let mut sums = Sums {
            stores: self.stores,
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
        let mut done = 0;
        for piece in batch {
            let own = &mut bytes[done * PAGE..][..piece.count as usize * PAGE];
            done += piece.count as usize;
            self.compare(device, piece, (own, whole.is_ok()), sums);
        }
        self.progress.add_data(bytes.len() as u64);
    }

    /// Compares the bytes of a piece, which were read if `is_read` is true.
    fn compare(
        &self,
        device: &dyn Device,
        piece: &Piece,
        (bytes, is_read): (&mut [u8], bool),
        sums: &mut Sums<'_>,
    ) {
        let images = self.images_of(piece);
        for (at, block) in piece.pages().zip(bytes.chunks_exact_mut(PAGE)) {
            let place = || place_name(self.volume, at.at);
            if !is_read && let Err(error) = device.read_at(at.offset_bytes, block) {
                let what = format!("the data cannot be read: {error}{}", place());
                self.note(&at, what);
                continue;
            }
            let mut images = images.iter();
            let image = images.find(|(block, _)| *block == at.at.block);
            let found = checksum(image.map_or(&*block, |(_, image)| image));
            if self.volume.has_checksums()
                && let Sum::Of(expected) = sums.of(at.ino, at.page)
                && found != expected
            {
                let what = format!(
                    "the data is damaged: checksum {found:#010x} instead of {expected:#010x}{}",
                    place()
                );
                self.note(&at, what);
            }
        }
    }

    /// Returns the images of the blocks of a piece. An image that cannot be read is a finding of the metadata's check.
    fn images_of(&self, piece: &Piece) -> Vec<(u64, Image)> {
        let (slice, first) = (piece.at.slice, piece.at.block);
        let shard = self.stores.map().of_slice(slice);
        let mut images = Vec::new();
        if !self.have_images[shard.index()] {
            return images;
        }
        let range = Range {
            shard,
            table: Table::Logged,
            from: &block_key((slice, first)),
            to: Some(&block_key((slice, first + u64::from(piece.count)))),
        };
        let read = self.stores.scan(range, |key, value| {
            let image = codec::image_of_row(key, value);
            images.extend(image.map(|((_, block), image)| (block, image)));
            true
        });
        read.map_or(Vec::new(), |()| images)
    }

    fn note(&self, page: &Piece, what: String) {
        let mut bad = self.bad.lock();
        bad.count += 1;
        if bad.kept.len() < FINDINGS_MAX {
            let (ino, page) = (page.ino, page.page);
            bad.kept.push(Bad { ino, page, what });
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

    /// Returns each page of the piece alone.
    fn pages(&self) -> impl Iterator<Item = Piece> + '_ {
        (0..self.count).map(|skip| self.part(skip, 1))
    }
}

/// Looks up checksums of pages.
struct Sums<'s> {
    stores: &'s Stores<'s>,
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
                let shard = self.stores.map().of_ino(ino);
                let found = self.stores.all[shard.index()].sums(ino, group);
                let (_, sums) = last.insert(((ino, group), found.unwrap_or_default()));
                sums.get(at)
            }
        }
    }
}

#[cfg(test)]
mod tests;
