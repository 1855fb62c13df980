//! Room in the metadata region.
//!
//! A checkpoint must always find room, or the journal could not be emptied. Removals must find room, too: their rows are in the
//! journal before they free a page. So something may be created only while the region has more free pages than
//!
//! - the rows need at most that redb does not have yet, with those of creations that no commit has yet (*promised*), and
//! - twice the *reserve*: what one transaction of a checkpoint needs at most, however few rows it has.
//!
//! Free pages are those that redb can add to its file, and those that are free in the file. redb tells their number only at the cost
//! of reading all of its pages. So the store keeps a lower bound, which falls with each checkpoint, and has redb count only when a
//! creation would be refused (`Store::make_room`).
//!
//! Why no transaction needs more than the reserve: a checkpoint makes its transactions smaller until they fit, down to one row. redb
//! copies the leaf of the row and at most one neighbour, and the branches above. A leaf has at most 32 pages, for a value of 64 KiB. With
//! the pages of the system tables, and redb's record of its free pages, this is one transaction. Its old pages are free after the next
//! transaction only, so all of it counts twice.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use jericho_format::PAGE_BYTES;

use super::memtable::{Memtable, pages_max};
use super::region::Region;
use super::{Store, Writer, explain, guarded_over};
use crate::errno::ENOSPC;
use crate::error::{Error, Result};

/// Most rows of a transaction of a checkpoint, in a region with small chunks and in any other one.
const PIECE_ROWS_SMALL: usize = 256;
const PIECE_ROWS_MAX: usize = 4096;
/// Chunks of volumes of less than 4 GiB have this many blocks.
const SMALL_CHUNK_BLOCKS: u64 = 64;
/// The region grows before transactions have fewer rows than this.
pub(super) const PIECE_ROWS_FEW: usize = 16;
/// Most bytes of the rows of a transaction.
pub(super) const PIECE_BYTES_MAX: usize = 1 << 20;
/// Pages that a transaction with one row copies at most: a leaf of 32 pages and a neighbour, six branches, the tables' tables, and the
/// lists of freed pages.
const ROW_PAGES: u64 = 32 + 1 + 6 + 26;
/// Pages of a region that redb counts before the region grows. In a larger one this would take long.
const COUNT_PAGES_MAX: u64 = 1 << 16;
/// Bits of `Room::promised` that count bytes. The others count rows.
const BYTES_BITS: u32 = 40;

/// What is known about the free pages of the region.
pub(super) struct Room {
    /// Lower bound of the free pages in redb's file.
    free_in_file: AtomicU64,
    /// Checkpoints have changed redb since its free pages were counted.
    is_stale: AtomicBool,
    /// Bytes and scattered rows (`BYTES_BITS`) of creations that were permitted since the last commit.
    promised: AtomicU64,
    /// Those permitted before it and after the commit before. The last commit may have been sealed before them.
    promised_before: AtomicU64,
    /// Number of commits.
    commits: AtomicU64,
    /// Bytes of the rows that were removed from redb, or replaced, since its free pages were counted.
    freed_bytes: AtomicU64,
    /// By how much the lower bound has fallen since then. More than any number of pages before the first count.
    fallen: AtomicU64,
    piece_rows_max: AtomicUsize,
    /// Rows of the next transaction at most: fewer after a transaction that found no room.
    piece_rows: AtomicUsize,
}

impl Room {
    /// Returns what is known about the room of a region that was just opened.
    pub fn of(region: Option<&Region>) -> Room {
        let is_small = |region: &Region| region.chunk_blocks() <= SMALL_CHUNK_BLOCKS;
        let piece_rows_max = match region.is_some_and(is_small) {
            true => PIECE_ROWS_SMALL,
            false => PIECE_ROWS_MAX,
        };
        Room {
            freed_bytes: AtomicU64::new(0),
            fallen: AtomicU64::new(1 << 40),
            piece_rows_max: AtomicUsize::new(piece_rows_max),
            free_in_file: AtomicU64::new(0),
            is_stale: AtomicBool::new(true),
            promised: AtomicU64::new(0),
            promised_before: AtomicU64::new(0),
            commits: AtomicU64::new(0),
            piece_rows: AtomicUsize::new(piece_rows_max),
        }
    }

    /// Returns the bytes of the rows that were removed or replaced since the last count.
    pub fn freed_bytes(&self) -> u64 {
        self.freed_bytes.load(Ordering::Relaxed)
    }

    /// Returns the number of rows of the next transaction.
    pub fn piece_rows(&self) -> usize {
        self.piece_rows.load(Ordering::Relaxed)
    }

    /// Makes the next transactions smaller, because one of `rows` rows found no room. Returns false if it had `min` rows or fewer.
    pub fn smaller_pieces(&self, rows: usize, min: usize) -> bool {
        let is_larger = rows > min;
        if is_larger {
            self.piece_rows.store((rows / 2).max(1), Ordering::Relaxed);
        }
        is_larger
    }

    /// Makes the next transactions larger.
    pub fn larger_pieces(&self) {
        let max = self.piece_rows_max.load(Ordering::Relaxed);
        let larger = (self.piece_rows() * 2).min(max);
        self.piece_rows.store(larger, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub fn set_piece_rows(&self, rows: usize) {
        self.piece_rows_max.store(rows, Ordering::Relaxed);
        self.piece_rows.store(rows, Ordering::Relaxed);
    }

    /// Forgets the creations that are in committed batches: those that were permitted before the last commit began.
    pub fn committed(&self) {
        self.commits.fetch_add(1, Ordering::Relaxed);
        let promised = self.promised.swap(0, Ordering::Relaxed);
        self.promised_before.store(promised, Ordering::Relaxed);
    }

    /// Counts bytes of rows that a transaction removed from redb or replaced.
    pub fn freed(&self, bytes: u64) {
        self.freed_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns whether a count of a region of `pages` pages may find many more free pages than the lower bound says: a sixteenth of
    /// the region. So counts cost little beside the changes between them.
    fn is_worth_a_count(&self, pages: u64) -> bool {
        let freed = self.freed_bytes.load(Ordering::Relaxed) / PAGE_BYTES;
        let fallen = self.fallen.load(Ordering::Relaxed);
        let part = pages / 16;
        freed > part || pages <= COUNT_PAGES_MAX && freed + fallen > part
    }

    fn promised_pages(&self) -> u64 {
        let sum =
            self.promised.load(Ordering::Relaxed) + self.promised_before.load(Ordering::Relaxed);
        pages_max(sum >> BYTES_BITS, sum & ((1 << BYTES_BITS) - 1))
    }
}

/// Returns the pages that a checkpoint must find at least: one transaction with one row, and the one before it, whose old pages are
/// not free yet.
fn reserve_pages(region: &Region) -> u64 {
    // redb writes two bits for each page of the region, as one value for 2^20 pages.
    let pages = region.len_bytes() / PAGE_BYTES;
    let record = |pages: u64| (pages / 4 + 4096).div_ceil(PAGE_BYTES).next_power_of_two();
    let records = (pages >> 20) * record(1 << 20) + record(pages & ((1 << 20) - 1));
    2 * (ROW_PAGES + records)
}

/// Returns the pages below which nothing is created. The counts of a large region may be a little off: then redb counts its pages
/// less often.
fn kept_pages(region: &Region) -> u64 {
    2 * reserve_pages(region) + (region.pages() / 256).max(32)
}

impl Store {
    /// Fails with ENOSPC if the metadata region has no room to create something of `bytes` bytes, with `scattered` rows that may split
    /// a page: entries, attributes. Removals find room then, because a reserve is kept for them. The room is taken until the batch with
    /// the creation is committed. The caller holds the gate until the creation is in the batch. `make_room` may find room.
    pub fn check_room(&self, scattered: u64, bytes: usize) -> Result<()> {
        let Some(region) = &self.region else {
            return Ok(());
        };
        if !self.has_room_for(region, pages_max(scattered, bytes as u64)) {
            return Err(ENOSPC);
        }
        let promise = scattered << BYTES_BITS | bytes as u64;
        self.room.promised.fetch_add(promise, Ordering::Relaxed);
        Ok(())
    }

    fn has_room_for(&self, region: &Region, pages: u64) -> bool {
        let free = region.spare_pages() + self.room.free_in_file.load(Ordering::Relaxed);
        let view = self.view.load();
        let pending = view.active.pages_max() + view.frozen.pages_max();
        free >= kept_pages(region) + pending + self.room.promised_pages() + pages
    }

    /// Returns whether a checkpoint should begin so that creations need not wait for it.
    pub(super) fn is_short_of_room(&self) -> bool {
        self.region.as_ref().is_some_and(|region| {
            let view = self.view.load();
            let pending = view.active.pages_max() + view.frozen.pages_max();
            !self.has_room_for(region, pending)
        })
    }

    /// Returns whether a batch may have images of blocks: not while the metadata region lacks room for them.
    pub fn takes_images(&self) -> bool {
        let images = self.images_max() as u64;
        let pages = pages_max(images, images * PAGE_BYTES);
        self.region
            .as_ref()
            .is_none_or(|region| self.has_room_for(region, pages))
    }

    /// Looks for room after a creation was refused, and calls `commit` first, which commits the current batch. Makes a checkpoint, adds
    /// chunks to the region, and has redb count its free pages. Returns false if there cannot be more room than before.
    pub fn make_room(&self, commit: impl FnOnce() -> Result<()>) -> Result<bool> {
        let Some(region) = &self.region else {
            return Ok(false);
        };
        if !self.writable {
            return Ok(false);
        }
        let room = &self.room;
        let commits = room.commits.load(Ordering::Relaxed);
        // These are in the batch that `commit` commits, or in none: who was permitted to create held the gate.
        let promised = room.promised.swap(0, Ordering::Relaxed);
        room.promised_before.fetch_add(promised, Ordering::Relaxed);
        commit()?;
        if room.commits.load(Ordering::Relaxed) == commits {
            room.promised_before.store(0, Ordering::Relaxed);
        }
        self.checkpoint()?;
        let mut writer = self.writer.lock();
        self.check()?;
        self.refill(&mut writer)?;
        if !self.has_room_for(region, 1) && room.is_stale.load(Ordering::Relaxed) {
            self.count_free_pages(&mut writer, region)?;
        }
        Ok(self.has_room_for(region, 1))
    }

    /// Has redb count its free pages. Reads all of its pages.
    pub(super) fn count_free_pages(&self, writer: &mut Writer, region: &Region) -> Result<()> {
        // Pages of earlier transactions become free with the next one.
        self.free_old_pages(writer)?;
        let Some(db) = writer.db.as_ref() else {
            return Err(Error::Store("the store is closed".into()));
        };
        let allocated = guarded_over(Some(region), || {
            let explain = |text: String| explain(Some(region), text);
            let txn = db.begin_write().map_err(|e| explain(e.to_string()))?;
            let stats = txn.stats().map_err(|e| explain(e.to_string()))?;
            txn.abort().map_err(|e| explain(e.to_string()))?;
            Ok(stats.allocated_pages())
        })
        .map_err(|error| self.fail(error))?;
        let free = region.pages().saturating_sub(allocated);
        self.room.free_in_file.store(free, Ordering::Relaxed);
        self.room.is_stale.store(false, Ordering::Relaxed);
        self.room.freed_bytes.store(0, Ordering::Relaxed);
        self.room.fallen.store(0, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the lower bound of the free pages of the region.
    pub(super) fn free_pages(&self) -> u64 {
        self.region.as_ref().map_or(0, |region| {
            region.spare_pages() + self.room.free_in_file.load(Ordering::Relaxed)
        })
    }

    /// Notes that a checkpoint has written rows. There were at least `free` free pages before.
    pub(super) fn wrote(&self, rows: &Memtable, free: u64) {
        if let Some(region) = &self.region {
            let needed = rows.pages_max();
            let left = free.saturating_sub(needed);
            self.room.fallen.fetch_add(needed, Ordering::Relaxed);
            let mapped = left.saturating_sub(region.spare_pages());
            self.room.free_in_file.store(mapped, Ordering::Relaxed);
            self.room.is_stale.store(true, Ordering::Relaxed);
        }
    }

    /// Makes room for the next checkpoint, after one of these rows. A commit must not do it, because it would wait for writes to the
    /// superblock. If the rows removed more than they added, the region gets no stock: the space may be wanted for data.
    pub(super) fn prepare_room(
        &self,
        writer: &mut Writer,
        rows: &Memtable,
        freed_before: u64,
    ) -> Result<()> {
        let freed = self.room.freed_bytes().saturating_sub(freed_before);
        let is_growing = rows.pages_max() > freed / PAGE_BYTES;
        let is_short = |region: &Region| self.free_pages() < kept_pages(region);
        match is_growing || self.region.as_deref().is_some_and(is_short) {
            true => self.refill(writer),
            false => Ok(()),
        }
    }

    /// Makes spare chunks, as far as there is space for them: for what is kept, and a stock. Counts redb's free pages first if that is
    /// worth it, because the region never gets smaller.
    pub(super) fn refill(&self, writer: &mut Writer) -> Result<()> {
        let (Some(region), Some(supply)) = (&self.region, self.supply()) else {
            return Ok(());
        };
        let wanted = kept_pages(region);
        let is_enough = || supply.has_enough(region, wanted, self.free_pages());
        if is_enough() {
            return Ok(());
        }
        if self.room.is_worth_a_count(region.pages()) {
            self.count_free_pages(writer, region)?;
            if is_enough() {
                return Ok(());
            }
        }
        let free = self.room.free_in_file.load(Ordering::Relaxed);
        let added = supply.refill(region, wanted.saturating_sub(free));
        added.map_err(|error| self.fail(error))
    }

    /// Makes at least `pages` spare pages, as far as there is space for them. Returns whether there are more spare chunks than before.
    pub(super) fn add_spares(&self, pages: u64) -> Result<bool> {
        let (Some(region), Some(supply)) = (&self.region, self.supply()) else {
            return Ok(false);
        };
        let before = region.chunks();
        let added = supply.refill(region, pages);
        added.map_err(|error| self.fail(error))?;
        Ok(region.chunks() > before)
    }
}
