//! How a store keeps room in its metadata region: refusals of creations, and the search for more room. `room` says how much room is
//! kept, and why.

use jericho_format::PAGE_BYTES;

use super::memtable::{Memtable, pages_max};
use super::region::Region;
use super::room::kept_pages;
use super::{Store, Writer, explain, guarded_over};
use crate::errno::ENOSPC;
use crate::error::{Error, Result};

impl Store {
    /// Takes room for a creation of `bytes` bytes, with `scattered` rows that may split a page (entries, attributes), until the batch with
    /// the creation is committed. Fails with ENOSPC if the metadata region has no room: `make_room` may find some. Removals still find
    /// room then, because a reserve is kept for them. The caller holds the gate until the creation is in the batch.
    pub fn check_room(&self, scattered: u64, bytes: usize) -> Result<()> {
        let Some(region) = &self.region else {
            return Ok(());
        };
        if !self.has_room_for(region, pages_max(scattered, bytes as u64)) {
            return Err(ENOSPC);
        }
        self.room.promise(scattered, bytes as u64);
        Ok(())
    }

    fn has_room_for(&self, region: &Region, pages: u64) -> bool {
        let free = region.spare_pages() + self.room.free_in_file();
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

    /// Returns whether a batch may have images of blocks: the metadata region has room for them.
    pub fn takes_images(&self) -> bool {
        let images = self.images_max() as u64;
        let pages = pages_max(images, images * PAGE_BYTES);
        self.region
            .as_ref()
            .is_none_or(|region| self.has_room_for(region, pages))
    }

    /// Looks for room after a creation was refused. First calls `commit`, which commits the current batch. Then makes a checkpoint, adds
    /// chunks to the region, and has redb count its free pages. Returns false if there cannot be more room than before.
    pub fn make_room(&self, commit: impl FnOnce() -> Result<()>) -> Result<bool> {
        let Some(region) = &self.region else {
            return Ok(false);
        };
        if !self.writable {
            return Ok(false);
        }
        self.room.settle_promises(commit)?;
        self.checkpoint()?;
        let mut writer = self.writer.lock();
        self.check()?;
        self.refill(&mut writer)?;
        if !self.has_room_for(region, 1) && self.room.is_stale() {
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
        self.room.counted(free);
        Ok(())
    }

    /// Returns the lower bound of the free pages of the region.
    pub(super) fn free_pages(&self) -> u64 {
        self.region
            .as_ref()
            .map_or(0, |region| region.spare_pages() + self.room.free_in_file())
    }

    /// Notes that a checkpoint has written rows. Before it, at least `free` pages were free.
    pub(super) fn wrote(&self, rows: &Memtable, free: u64) {
        if let Some(region) = &self.region {
            let needed = rows.pages_max();
            let left = free.saturating_sub(needed);
            self.room
                .wrote(needed, left.saturating_sub(region.spare_pages()));
        }
    }

    /// Makes room for the next checkpoint, after one of these rows. A commit must not do this, because it would wait for writes to the
    /// superblock. If the rows removed more than they added, the region gets no stock, because data may need the space.
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

    /// Makes spare chunks for the kept pages and a stock, as far as there is space for them. Counts redb's free pages first if that is
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
        let free = self.room.free_in_file();
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
