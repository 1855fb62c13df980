//! Commits (`prepared` has their steps), and the limits of the memory for rows.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::batch::{Bitmaps, Operations};
use super::log::Log;
use super::records::WEIGHT_BYTES;
use super::tables::Row;
use super::view::View;
use super::{Change, Store};
use crate::errno::EROFS;
use crate::error::{Error, Result};

/// A checkpoint should begin when this many rows are in memory.
const ROWS_TARGET: usize = 32_768;
/// Most rows in memory. A commit that would exceed this makes a checkpoint first.
const ROWS_MAX: usize = 4 * ROWS_TARGET;
/// The same limits for the bytes of the rows.
const BYTES_TARGET: u64 = 8 << 20;
const BYTES_MAX: u64 = 4 * BYTES_TARGET;
/// Memory of the store for which these limits hold. With less memory, the limits are lower.
const CACHE_BYTES: usize = 128 << 20;
/// Largest number by which the limits are divided.
const DIVISOR_MAX: usize = 64;

/// How soon the store wants a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckpointNeed {
    /// redb has everything.
    None,
    /// Some rows are only in the journal.
    AtLast,
    /// The journal is half full, the memory for rows a quarter, or the region may soon lack room.
    Now,
}

impl Store {
    /// Applies a batch and makes it durable. `Errno(ENOSPC)` (the metadata region cannot grow) and `Damaged` (the batch contradicts the
    /// bitmaps) leave the store unchanged, and it goes on. Any other error ends all changes: further batches get it again, and
    /// after a crash all of this batch is there or none.
    pub fn commit(&self, changes: &[Change]) -> Result<()> {
        if changes.is_empty() {
            return Ok(());
        }
        let mut prepared = self.prepare(changes)?;
        prepared.append(&[])?;
        prepared.publish();
        Ok(())
    }

    /// Puts and removes rows durably, as `commit` does, for changes that no `Change` describes, such as repairs.
    pub fn commit_rows(&self, rows: Vec<Row>) -> Result<()> {
        if !self.writable {
            return Err(EROFS);
        }
        let mut prepared =
            self.prepare_operations(&Operations::new(rows, Vec::new(), Vec::new()))?;
        prepared.append(&[])?;
        prepared.publish();
        Ok(())
    }

    /// Returns whether the memory for rows takes a batch. Empty memory takes any batch.
    pub(super) fn memory_takes(&self, view: &View, added: &[Row]) -> bool {
        let divisor = self.memory_divisor();
        view.is_in_redb()
            || view.rows() + added.len() <= ROWS_MAX / divisor
                && view.bytes() + weight(added) <= BYTES_MAX / divisor as u64
    }

    /// Returns the number of rows in memory and of their bytes.
    pub fn rows_in_memory(&self) -> (usize, u64) {
        let view = self.view.load_full();
        (view.rows(), view.bytes())
    }

    /// Returns the number of images for which the journal and the memory have room beside other rows. Returns 0 without a journal.
    pub fn images_max(&self) -> usize {
        let journal_bytes = self.journal_bytes.load(Ordering::Relaxed) as u64;
        let divisor = self.memory_divisor() as u64;
        let bytes = (journal_bytes / 8).min(BYTES_TARGET / 2 / divisor);
        (bytes / jericho_format::PAGE_BYTES) as usize
    }

    /// Returns the number by which the limits of the rows in memory are divided, because the store has little memory.
    fn memory_divisor(&self) -> usize {
        let cache_bytes = self.options.cache_bytes.max(1);
        CACHE_BYTES.div_ceil(cache_bytes).clamp(1, DIVISOR_MAX)
    }

    /// Returns the number by which the limit of a batch is divided, because the store has little memory or a short journal. The
    /// rows of a full batch then take at most half of the journal, unless `DIVISOR_MAX` limits the number.
    pub fn limits_divisor(&self) -> usize {
        let batch_bytes = ROWS_MAX * WEIGHT_BYTES;
        let by_journal = match self.journal_bytes.load(Ordering::Relaxed) {
            0 => 1,
            bytes => (2 * batch_bytes).div_ceil(bytes),
        };
        by_journal.clamp(self.memory_divisor(), DIVISOR_MAX)
    }

    /// Returns the rows of a batch over the present view. The caller holds `log`, or is the only user of the store.
    pub(super) fn rows_of(&self, operations: &Operations) -> Result<Vec<Row>> {
        self.read(|view| operations.to_rows(view, self.bitmaps(false)))
    }

    fn bitmaps(&self, is_replay: bool) -> Bitmaps {
        Bitmaps {
            container_blocks: self.options.container_blocks,
            is_replay,
        }
    }

    /// Returns how soon a checkpoint is wanted.
    pub fn checkpoint_need(&self) -> CheckpointNeed {
        let view = self.view.load_full();
        let divisor = self.memory_divisor();
        let is_half_full = match &*self.log.lock() {
            Log::Journal(journal) => journal.used_bytes() > journal.ring_bytes() / 2,
            _ => false,
        };
        if view.rows() == 0 {
            CheckpointNeed::None
        } else if is_half_full
            || self.is_short_of_room()
            || view.rows() >= ROWS_TARGET / divisor
            || view.bytes() >= BYTES_TARGET / divisor as u64
        {
            CheckpointNeed::Now
        } else {
            CheckpointNeed::AtLast
        }
    }

    /// Puts a batch of the journal into memory, when the store is opened.
    pub(super) fn replay(&self, operations: &Operations) -> Result<()> {
        let rows = self.read(|view| operations.to_rows(view, self.bitmaps(true)))?;
        let mut next = View::clone(&self.view.load());
        rows.into_iter().for_each(|row| next.active.put(row));
        if next.rows() > ROWS_MAX || next.bytes() > BYTES_MAX {
            let what = "the batches of the journal have more rows than a writer keeps in memory";
            return Err(Error::Damaged(what.into()));
        }
        self.view.store(Arc::new(next));
        Ok(())
    }
}

/// Returns whether a batch of these rows exceeds the memory for rows on its own.
pub(super) fn is_too_large(rows: &[Row]) -> bool {
    rows.len() > ROWS_MAX || weight(rows) > BYTES_MAX
}

/// Returns the bytes of rows.
fn weight(rows: &[Row]) -> u64 {
    let bytes = |row: &Row| row.key.len() + row.value.as_ref().map_or(0, Vec::len) + 1;
    rows.iter().map(|row| bytes(row) as u64).sum()
}

impl View {
    /// Returns the number of rows in memory.
    fn rows(&self) -> usize {
        self.active.len() + self.frozen.len()
    }

    /// Returns the bytes of the rows in memory.
    fn bytes(&self) -> u64 {
        self.active.bytes() + self.frozen.bytes()
    }
}
