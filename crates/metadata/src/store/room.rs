//! Room in the metadata region.
//!
//! A checkpoint must always find room, or the journal could not be emptied. Removals must find room, too: their rows are in the
//! journal before they free a page. So something may be created only while the region has more free pages than
//!
//! - redb needs at most for the rows that it does not have yet, with those of creations that no commit has yet (*promised*), and
//! - twice the *reserve*, which is what two transactions with one row each need at most, and a small margin.
//!
//! Free pages are those that redb can add to its file, and those that are free in the file. redb tells the number of the latter only at
//! the cost of reading all of its pages. So the store keeps a lower bound, which falls with each checkpoint. It has redb count when a
//! creation would be refused (`Store::make_room`), and before the region grows if that may help (`Room::is_worth_a_count`).
//!
//! Why the reserve suffices: a checkpoint makes its transactions smaller until they fit, down to one row. redb
//! copies the leaf of the row and at most one neighbour, and the branches above. A leaf has at most 32 pages, for a value of 64 KiB. With
//! the pages of the system tables, and redb's record of its free pages, this is one transaction. Its old pages become free only after the
//! next transaction, so the reserve has all of it twice.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use jericho_format::PAGE_BYTES;

use super::memtable::pages_max;
use super::region::Region;

/// Most rows of a transaction of a checkpoint, in a region with small chunks and in other regions.
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
/// Largest region, in pages, in which a lower bound that has fallen is a reason to count. In a larger one a count takes long.
const COUNT_PAGES_MAX: u64 = 1 << 16;
/// Bits of `Room::promised` that count bytes. The others count rows.
const BYTES_BITS: u32 = 40;

/// What is known about the free pages of the region.
pub(super) struct Room {
    /// Lower bound of the free pages in redb's file.
    free_in_file: AtomicU64,
    /// Whether checkpoints have changed redb since its free pages were counted.
    is_stale: AtomicBool,
    /// Bytes and scattered rows (`BYTES_BITS`) of creations that were permitted since the last commit.
    promised: AtomicU64,
    /// The same for creations that were permitted between the last two commits. The batch of the last commit may not have them.
    promised_before: AtomicU64,
    /// Number of commits.
    commits: AtomicU64,
    /// Bytes of the rows that were removed from redb, or replaced, since its free pages were counted.
    freed_bytes: AtomicU64,
    /// By how much the lower bound has fallen since that count. Before the first count, more than any number of pages.
    fallen: AtomicU64,
    piece_rows_max: AtomicUsize,
    /// Most rows of the next transaction: fewer after a transaction that found no room.
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

    /// Returns the lower bound of the free pages in redb's file.
    pub fn free_in_file(&self) -> u64 {
        self.free_in_file.load(Ordering::Relaxed)
    }

    /// Returns whether a count may find more free pages than the lower bound says.
    pub fn is_stale(&self) -> bool {
        self.is_stale.load(Ordering::Relaxed)
    }

    /// Notes redb's count of its free pages.
    pub fn counted(&self, free: u64) {
        self.free_in_file.store(free, Ordering::Relaxed);
        self.is_stale.store(false, Ordering::Relaxed);
        self.freed_bytes.store(0, Ordering::Relaxed);
        self.fallen.store(0, Ordering::Relaxed);
    }

    /// Notes that a checkpoint has taken at most `needed` pages, and that at least `left` pages are free in the file.
    pub fn wrote(&self, needed: u64, left: u64) {
        self.fallen.fetch_add(needed, Ordering::Relaxed);
        self.free_in_file.store(left, Ordering::Relaxed);
        self.is_stale.store(true, Ordering::Relaxed);
    }

    /// Takes room for a creation.
    pub fn promise(&self, scattered: u64, bytes: u64) {
        let promise = scattered << BYTES_BITS | bytes;
        self.promised.fetch_add(promise, Ordering::Relaxed);
    }

    /// Runs `commit`, and forgets the creations that were permitted before. Each of these is then in a committed batch or in none, because
    /// its thread held the gate.
    pub fn settle_promises<E>(&self, commit: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let commits = self.commits.load(Ordering::Relaxed);
        let promised = self.promised.swap(0, Ordering::Relaxed);
        self.promised_before.fetch_add(promised, Ordering::Relaxed);
        commit()?;
        // Otherwise `committed` has done this.
        if self.commits.load(Ordering::Relaxed) == commits {
            self.promised_before.store(0, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Returns the bytes of the rows that were removed or replaced since the last count.
    pub fn freed_bytes(&self) -> u64 {
        self.freed_bytes.load(Ordering::Relaxed)
    }

    /// Returns the number of rows of the next transaction.
    pub fn piece_rows(&self) -> usize {
        self.piece_rows.load(Ordering::Relaxed)
    }

    /// Makes the next transactions smaller, because one with `rows` rows found no room. Returns false if it had `min` rows or fewer.
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

    /// Returns whether a count may find many more free pages than the lower bound says: more than a sixteenth of the `pages` pages of
    /// the region. So counts cost little compared with the changes between them.
    pub fn is_worth_a_count(&self, pages: u64) -> bool {
        let freed = self.freed_bytes.load(Ordering::Relaxed) / PAGE_BYTES;
        let fallen = self.fallen.load(Ordering::Relaxed);
        let part = pages / 16;
        freed > part || pages <= COUNT_PAGES_MAX && freed + fallen > part
    }

    pub fn promised_pages(&self) -> u64 {
        let sum =
            self.promised.load(Ordering::Relaxed) + self.promised_before.load(Ordering::Relaxed);
        pages_max(sum >> BYTES_BITS, sum & ((1 << BYTES_BITS) - 1))
    }
}

/// Returns the reserve: the pages of one transaction with one row, and of the one before it, whose old pages are not free yet.
fn reserve_pages(region: &Region) -> u64 {
    // redb writes two bits for each page of the region, as one value for 2^20 pages.
    let pages = region.len_bytes() / PAGE_BYTES;
    let record = |pages: u64| (pages / 4 + 4096).div_ceil(PAGE_BYTES).next_power_of_two();
    let records = (pages >> 20) * record(1 << 20) + record(pages & ((1 << 20) - 1));
    2 * (ROW_PAGES + records)
}

/// Returns the number of free pages below which creations are refused: twice the reserve, and a margin so that redb counts the pages of a
/// large region less often.
pub(super) fn kept_pages(region: &Region) -> u64 {
    2 * reserve_pages(region) + (region.pages() / 256).max(32)
}
