//! How far a check is, for a thread that shows it.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// A part of a check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stage {
    /// Reading the pages of the metadata stores, in bytes.
    #[default]
    Pages,
    /// Comparing inodes and names, in rows. The number of rows is not known.
    Names,
    /// Comparing extents and bitmaps, in rows. The number of rows is not known.
    Space,
    /// Reading the data of files, in bytes.
    Data,
}

/// How far a check is. The check changes it, and another thread may read it at any time.
#[derive(Debug, Default)]
pub struct Progress {
    stage: AtomicU8,
    done: AtomicU64,
    total: AtomicU64,
    rows: AtomicU64,
}

impl Progress {
    /// Returns the present stage, what is done of it, and the whole if that is known.
    pub fn state(&self) -> (Stage, u64, Option<u64>) {
        let stage = match self.stage.load(Ordering::Relaxed) {
            0 => Stage::Pages,
            1 => Stage::Names,
            2 => Stage::Space,
            _ => Stage::Data,
        };
        let total = self.total.load(Ordering::Relaxed);
        let done = self.done.load(Ordering::Relaxed);
        (stage, done, (total > 0).then_some(total))
    }

    /// Returns the number of rows that were read from the stores, in all stages.
    pub fn rows(&self) -> u64 {
        self.rows.load(Ordering::Relaxed)
    }

    pub(super) fn begin(&self, stage: Stage, total: u64) {
        self.done.store(0, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
        self.stage.store(stage as u8, Ordering::Relaxed);
    }

    pub(super) fn add_bytes(&self, bytes: u64) {
        if self.state().0 == Stage::Pages {
            self.done.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    pub(super) fn add_data(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn add_rows(&self, rows: u64) {
        self.rows.fetch_add(rows, Ordering::Relaxed);
        if self.state().0 != Stage::Data {
            self.done.fetch_add(rows, Ordering::Relaxed);
        }
    }
}
