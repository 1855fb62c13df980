//! The extent map of a file: where its pages are, and which part of it the store has.
//!
//! ```text
//!             begin_write           allocate             written
//!   (hole) ──────────────▶ Delalloc ────────▶ Pending ──────────▶ Data
//!      │    fallocate                            ▲                 │
//!      └───────────────▶ Unwritten ──────────────┘ allocate        │
//!                                                ▲                 │
//!                                                └─────────────────┘ allocate, to another slice
//! ```
//! `unwrite` (zeroing a range) changes every state except the hole to Unwritten, in the same blocks. `take_out` (truncate,
//! punch) changes every state to the hole. The store has only `Data` and `Unwritten` pages; for a page in `Pending` it keeps
//! the earlier state. `stored` mirrors the rows of the store as of the last batch. When a batch is sealed, the difference
//! between `extents` and `stored` gives both the rows to change and the blocks to mark used or free (`steps.rs`), so these cannot
//! contradict each other.

use std::ops::Range;

use jericho_format::sums::Sum;
use jericho_format::{PAGE_BYTES, PAGE_MAX};
use jericho_metadata::alloc::{Allocator, Blocks};
use jericho_metadata::shard::{ShardMap, ShardSet};
use jericho_metadata::store::Extent;

use crate::data::ranges::Ranges;
use crate::data::runs::{Run, Runs, Step};
use crate::data::sums::NewSums;
use crate::error::Result;
use crate::types::SliceId;

/// Largest number of pages to place at once beyond the requested ones. A large file gets long runs, but the lock is not held
/// for all of it.
const PLACE_AHEAD_PAGES: u32 = 16_384;

/// A block of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    pub slice: SliceId,
    pub block: u64,
}

impl At {
    pub(super) fn advance(self, pages: u64) -> At {
        At {
            slice: self.slice,
            block: self.block + pages,
        }
    }

    /// Returns the `count` blocks that start here.
    pub fn blocks(self, count: u32) -> Blocks {
        Blocks {
            slice: self.slice,
            first: self.block,
            count,
        }
    }
}

/// Earlier state of a page in `Pending`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Was {
    /// A hole in the store.
    Hole,
    /// Unwritten, in the same blocks.
    Unwritten,
    /// Data in these blocks.
    Data(At),
}

/// The state of a page that is not a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageState {
    /// The page has reserved space and no blocks yet.
    Delalloc,
    /// Write-back has blocks for the page and has not reported it as written yet.
    Pending { to: At, was: Was },
    /// The page's data is in these blocks.
    Data(At),
    /// The page has blocks and reads as zeros.
    Unwritten(At),
}

impl Step for PageState {
    fn advance(self, pages: u64) -> PageState {
        match self {
            PageState::Delalloc => PageState::Delalloc,
            PageState::Pending { to, was } => {
                let was = match was {
                    Was::Data(at) => Was::Data(at.advance(pages)),
                    was => was,
                };
                PageState::Pending {
                    to: to.advance(pages),
                    was,
                }
            }
            PageState::Data(at) => PageState::Data(at.advance(pages)),
            PageState::Unwritten(at) => PageState::Unwritten(at.advance(pages)),
        }
    }

    fn joins(self, next: PageState) -> bool {
        self == next
    }
}

impl PageState {
    /// Returns the blocks that a read uses, or `None` if the page reads as zeros.
    pub fn readable(self) -> Option<At> {
        match self {
            PageState::Data(at)
            | PageState::Pending {
                was: Was::Data(at), ..
            } => Some(at),
            _ => None,
        }
    }

    /// Returns the row that the store should have.
    pub(super) fn durable(self) -> Option<Row> {
        match self {
            PageState::Data(at) => Some(Row {
                at,
                unwritten: false,
            }),
            PageState::Unwritten(at) => Some(Row {
                at,
                unwritten: true,
            }),
            PageState::Pending {
                was: Was::Data(at), ..
            } => Some(Row {
                at,
                unwritten: false,
            }),
            PageState::Pending {
                to,
                was: Was::Unwritten,
            } => Some(Row {
                at: to,
                unwritten: true,
            }),
            PageState::Pending { was: Was::Hole, .. } | PageState::Delalloc => None,
        }
    }

    /// Returns the blocks that the page holds: at most two ranges.
    fn holds(self) -> [Option<At>; 2] {
        match self {
            PageState::Delalloc => [None, None],
            PageState::Data(at) | PageState::Unwritten(at) => [Some(at), None],
            PageState::Pending {
                to,
                was: Was::Data(from),
            } => [Some(to), Some(from)],
            PageState::Pending { to, .. } => [Some(to), None],
        }
    }
}

/// An extent of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    pub(super) at: At,
    pub(super) unwritten: bool,
}

impl Step for Row {
    fn advance(self, pages: u64) -> Row {
        Row {
            at: self.at.advance(pages),
            ..self
        }
    }
    fn joins(self, next: Row) -> bool {
        self == next
    }
}

/// What a file was when it replaced another one. The batch with the name has all of it.
pub(super) struct Replacement {
    /// The pages whose changes were in no batch.
    pub(super) changed: Ranges,
    /// The file's size in bytes.
    pub(super) size: u64,
}

/// The extent map of a file.
#[derive(Default)]
pub struct Map {
    pub extents: Runs<PageState>,
    pub(super) stored: Runs<Row>,
    /// Pages in which `extents` may differ from `stored`.
    pub(super) changed: Ranges,
    /// Bytes from this one on were taken out while they were beyond the end of the file, and `stored` may still have some of them.
    /// No batch may have a size that covers these.
    pub(super) cut_at: Option<u64>,
    /// The first batch that did not take all changes, if the last one did not.
    pub(super) left_since: Option<u64>,
    /// The next batch has the name of the file that this one has replaced.
    pub(super) replacement: Option<Replacement>,
    /// The shards in which the file has blocks, or had some.
    shards: ShardSet,
    /// `None` on volumes without checksums.
    pub(super) sums: Option<Box<NewSums>>,
}

/// Which blocks a dirty page gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placing {
    /// Its own, if they are in the home slice.
    Keep,
    /// New ones, if its own have contents with a checksum in a durable batch, or in one that may become durable any moment. Has the
    /// number of the last durable batch.
    Anew(u64),
}

impl Map {
    /// Builds the map from the store's rows. `capacity` returns the number of blocks of a slice, or 0 for a slice that does not
    /// exist. Data beyond `size_pages` comes from a write whose size never became durable. It is dropped, because otherwise a
    /// later growth of the file would show it. Fails with a message if a correct writer cannot have produced a row. `shards` names
    /// the volume's shards. `has_checksums` is a property of the volume.
    pub fn load(
        rows: Vec<Extent>,
        size_pages: u64,
        (shards, has_checksums): (ShardMap, bool),
        capacity: impl Fn(SliceId) -> u64,
    ) -> std::result::Result<Map, String> {
        let mut map = Map {
            sums: has_checksums.then(Box::default),
            ..Map::default()
        };
        let mut next_page = 0;
        for row in rows {
            let count = u64::from(row.blocks.count);
            let ends_within =
                |first: u64, end: u64| first.checked_add(count).is_some_and(|e| e <= end);
            let wrong = if count == 0 {
                Some("is empty".to_owned())
            } else if !ends_within(row.blocks.first, capacity(row.blocks.slice)) {
                Some(format!("ends beyond slice {}", row.blocks.slice))
            } else if !ends_within(row.page, PAGE_MAX + 1) {
                Some("ends beyond the largest file".to_owned())
            } else if row.page < next_page {
                Some("overlaps the one before it".to_owned())
            } else if row.summed != (has_checksums && !row.unwritten) {
                Some("should have checksums if and only if the volume has some".to_owned())
            } else {
                None
            };
            if let Some(wrong) = wrong {
                return Err(format!("the extent at page {} {wrong}", row.page));
            }
            next_page = row.page + count;
            let at = At {
                slice: row.blocks.slice,
                block: row.blocks.first,
            };
            let run = Run {
                page: row.page,
                count: row.blocks.count,
                state: Row {
                    at,
                    unwritten: row.unwritten,
                },
            };
            map.stored.insert_alone(run);
            map.shards.insert(shards.of_slice(at.slice));
            let state = if row.unwritten {
                PageState::Unwritten(at)
            } else {
                PageState::Data(at)
            };
            map.extents.insert(Run {
                page: run.page,
                count: run.count,
                state,
            });
        }
        let lost: Vec<_> = map
            .extents
            .from(size_pages)
            .filter(|run| matches!(run.state, PageState::Data(_)) && run.end() > size_pages)
            .map(|run| run.page.max(size_pages)..run.end())
            .collect();
        for range in lost {
            map.cut_at = Some(size_pages * PAGE_BYTES);
            map.extents.remove(range.clone());
            map.mark(range);
        }
        Ok(map)
    }

    /// Returns the shards in which the file has blocks, or had some while it was in memory.
    pub fn shards(&self) -> ShardSet {
        self.shards
    }

    /// Allocates reserved blocks for the file, as `Allocator::allocate` does.
    fn allocate(
        &mut self,
        home: SliceId,
        near: Option<u64>,
        count: u32,
        allocator: &Allocator,
    ) -> (Vec<Blocks>, Result<()>) {
        let mut blocks = Vec::new();
        let result = allocator.allocate(home, near, count, &mut blocks);
        for blocks in &blocks {
            self.shards
                .insert(allocator.shards().of_slice(blocks.slice));
        }
        (blocks, result)
    }

    fn mark(&mut self, range: Range<u64>) {
        self.changed.insert(range);
    }

    /// Returns whether the store has all of the map, or will have all of it once the sealed batches are durable.
    pub fn is_clean(&self) -> bool {
        self.changed.is_empty()
            && !self
                .extents
                .from(0)
                .any(|r| matches!(r.state, PageState::Delalloc | PageState::Pending { .. }))
    }

    /// Returns whether the next batch has to change rows of this map.
    pub fn has_changes(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Reserves space for the holes of a range. Fails with ENOSPC, and then changes nothing.
    pub fn reserve(&mut self, pages: Range<u64>, allocator: &Allocator) -> Result<()> {
        let holes = self.extents.holes(pages);
        allocator.reserve(holes.iter().map(|(_, count)| count).sum())?;
        for (page, count) in holes {
            for (page, count) in chunks(page, count) {
                self.extents.insert(Run {
                    page,
                    count,
                    state: PageState::Delalloc,
                });
            }
        }
        Ok(())
    }

    /// Gives every page of a range blocks for write-back, in `home` if it has room. With `Placing::Anew`, pages keep their own blocks
    /// if there is no room; `overwrites_safely` finds them.
    pub fn place(
        &mut self,
        pages: Range<u64>,
        home: SliceId,
        allocator: &Allocator,
        placing: Placing,
    ) -> Result<()> {
        let mut at = pages.start;
        while at < pages.end {
            let found = self.extents.containing(at);
            let until = found.map_or_else(
                || {
                    self.extents
                        .from(at)
                        .next()
                        .map_or(pages.end, |next| next.page)
                },
                |run| run.end(),
            );
            let mut until = until.min(pages.end);
            match found.map(|run| run.state.advance(at - run.page)) {
                Some(PageState::Pending { .. }) => {}
                Some(PageState::Data(from)) => {
                    if from.slice != home || placing != Placing::Keep {
                        self.relocate(at, (until - at) as u32, Some(from), home, allocator)?;
                    }
                }
                Some(PageState::Unwritten(to)) => {
                    if let (Placing::Anew(durable), Some(sums)) = (placing, &self.sums) {
                        let (is_zeroed, end) = sums.zeroed_until(at..until, durable);
                        until = end;
                        let count = (until - at) as u32;
                        // A batch meanwhile has holes here, which read as zeros, too.
                        if is_zeroed && self.relocate(at, count, None, home, allocator)? {
                            self.release_unstored(at, count, to, allocator);
                            at = until;
                            continue;
                        }
                    }
                    let state = PageState::Pending {
                        to,
                        was: Was::Unwritten,
                    };
                    self.extents.set(Run {
                        page: at,
                        count: (until - at) as u32,
                        state,
                    });
                }
                Some(PageState::Delalloc) => self.place_reserved(at, until, home, allocator)?,
                None => {
                    // The page became dirty during a truncation, which has already released its reserved space.
                    self.reserve(at..until, allocator)?;
                    continue;
                }
            }
            at = until;
        }
        Ok(())
    }

    /// Places a reserved run that holds `[first, until)`. Places the whole run unless it is too long, so that a file written in
    /// one go is contiguous in whatever order its pages are written back.
    fn place_reserved(
        &mut self,
        first: u64,
        until: u64,
        home: SliceId,
        allocator: &Allocator,
    ) -> Result<()> {
        let Some(run) = self.extents.containing(first) else {
            return Ok(());
        };
        let ahead = u64::from(PLACE_AHEAD_PAGES);
        let start = run.page.max(first.saturating_sub(first % ahead));
        let end = run.end().min(until.max(start + ahead));
        let near = start.checked_sub(1).and_then(|page| {
            let before = self.extents.containing(page)?;
            let [at, _] = before.state.advance(page - before.page).holds();
            at.filter(|at| at.slice == home).map(|at| at.block)
        });
        let count = (end - start) as u32; // within one run, so it fits
        let (blocks, result) = self.allocate(home, near, count, allocator);
        // After an error `blocks` is empty, and the run stays reserved.
        let mut page = start;
        for blocks in blocks {
            let to = At {
                slice: blocks.slice,
                block: blocks.first,
            };
            let state = PageState::Pending { to, was: Was::Hole };
            self.extents.set(Run {
                page,
                count: blocks.count,
                state,
            });
            page += u64::from(blocks.count);
        }
        result
    }

    /// Frees the blocks in other slices than `home` that `place` has assigned in advance to reserved pages without data. The pages
    /// stay reserved. The file must have no dirty page and no page in flight to the device.
    pub fn unplace(&mut self, home: SliceId, allocator: &Allocator) {
        let ahead: Vec<_> = self.extents.from(0).collect();
        for run in ahead {
            if let PageState::Pending { to, was: Was::Hole } = run.state
                && to.slice != home
            {
                self.extents.set(Run {
                    state: PageState::Delalloc,
                    ..run
                });
                allocator.unallocate(to.blocks(run.count));
            }
        }
    }

    /// Gives pages new blocks in `home`: data, which is `from` there on, or pages that read as zeros. Returns false, without an effect,
    /// if there is no room.
    fn relocate(
        &mut self,
        page: u64,
        count: u32,
        from: Option<At>,
        home: SliceId,
        allocator: &Allocator,
    ) -> Result<bool> {
        if allocator.free_of(home) < u64::from(count)
            || allocator.reserve(u64::from(count)).is_err()
        {
            return Ok(false);
        }
        let near = page.checked_sub(1).and_then(|page| {
            let before = self.extents.containing(page)?;
            let [at, _] = before.state.advance(page - before.page).holds();
            at.filter(|at| at.slice == home).map(|at| at.block)
        });
        let (blocks, result) = self.allocate(home, near, count, allocator);
        let mut done = 0;
        for blocks in blocks {
            let to = At {
                slice: blocks.slice,
                block: blocks.first,
            };
            let was = from.map_or(Was::Hole, |from| Was::Data(from.advance(done)));
            let state = PageState::Pending { to, was };
            self.extents.set(Run {
                page: page + done,
                count: blocks.count,
                state,
            });
            done += u64::from(blocks.count);
        }
        if result.is_err() {
            allocator.unreserve(u64::from(count) - done);
        }
        result.map(|()| true)
    }

    /// Returns whether placed pages may be written: a crash meanwhile leaves no contents under the checksum of others. Otherwise the
    /// next batch changes: pages that would be overwritten in place are bare in it. The caller tries again when that is durable.
    pub fn overwrites_safely(&mut self, pages: Range<u64>, durable: u64) -> bool {
        let Some(sums) = &mut self.sums else {
            return true;
        };
        let mut is_safe = true;
        for run in self.extents.within(pages.clone()) {
            let own = run.page..run.end();
            match run.state {
                PageState::Data(_) => {
                    for page in own {
                        if !sums.is_durably_bare(page, durable) {
                            is_safe = false;
                            sums.give_up(page);
                        }
                    }
                }
                PageState::Pending {
                    was: Was::Unwritten,
                    ..
                } => {
                    let (is_zeroed, end) = sums.zeroed_until(own.clone(), durable);
                    is_safe &= !is_zeroed && end == own.end;
                }
                _ => {}
            }
        }
        if !is_safe {
            self.mark(pages);
        }
        is_safe
    }

    /// Sets the checksums of pages from `first` on that are data now, and has the next batch include them.
    pub fn set_sums(&mut self, first: u64, new: &[u32]) {
        let pages = first..first + new.len() as u64;
        let Some(sums) = &mut self.sums else {
            return;
        };
        for run in self.extents.within(pages.clone()) {
            if let PageState::Data(_) = run.state {
                for page in run.page..run.end() {
                    sums.set(page, Sum::Of(new[(page - first) as usize]));
                }
            }
        }
        self.mark(pages);
    }

    /// Returns the checksum of a page with data, or `None` if the store has it.
    pub fn new_sum(&self, page: u64) -> Option<Sum> {
        self.sums.as_ref()?.get(page)
    }

    /// Drops from memory what the store has, now that batch `durable` is durable.
    pub fn settle_sums(&mut self, durable: u64) {
        if let Some(sums) = &mut self.sums {
            sums.settle(durable);
        }
    }

    /// Records that pages placed by `place` are on the device. Returns whether the store has to change.
    pub fn written(&mut self, pages: Range<u64>, allocator: &Allocator) -> bool {
        let pending: Vec<_> = self
            .extents
            .within(pages)
            .filter(|run| matches!(run.state, PageState::Pending { .. }))
            .collect();
        for run in &pending {
            let PageState::Pending { to, was } = run.state else {
                continue;
            };
            self.extents.set(Run {
                state: PageState::Data(to),
                ..*run
            });
            self.mark(run.page..run.end());
            if let Was::Data(from) = was {
                self.release_unstored(run.page, run.count, from, allocator);
            }
        }
        !pending.is_empty()
    }

    /// Records that the contents of pages placed by `place` are in the batch. Passes the blocks of each run of these pages to `each`,
    /// with the run's first page; pages that have become holes are left out. The next batch changes, even if no extent does. Returns
    /// false, without an effect, if `may_log` refuses blocks.
    pub fn logged(
        &mut self,
        pages: Range<u64>,
        allocator: &Allocator,
        may_log: impl Fn(Blocks) -> bool,
        mut each: impl FnMut(u64, Blocks),
    ) -> bool {
        let placed = |run: Run<PageState>| match run.state {
            PageState::Pending { to: at, .. } | PageState::Data(at) => {
                Some((run.page, at.blocks(run.count)))
            }
            _ => None,
        };
        let runs = || self.extents.within(pages.clone()).filter_map(placed);
        if !runs().all(|(_, blocks)| may_log(blocks)) {
            return false;
        }
        runs().for_each(|(page, blocks)| each(page, blocks));
        self.written(pages.clone(), allocator);
        self.mark(pages);
        true
    }

    /// Has the next batch include the file, because it removes images of these pages.
    pub fn images_removed(&mut self, pages: Range<u64>) {
        self.mark(pages);
    }

    /// Changes the state of a range's pages, except holes, to `Unwritten`. The pages keep their blocks. Returns the changed runs in
    /// their earlier state. The caller passes them to `release_earlier` once no transfer can be in flight.
    pub fn unwrite(
        &mut self,
        pages: Range<u64>,
        home: SliceId,
        allocator: &Allocator,
    ) -> Result<Vec<Run<PageState>>> {
        let reserved: Vec<_> = self.extents.within(pages.clone()).collect();
        for run in reserved {
            if run.state == PageState::Delalloc {
                self.place(run.page..run.end(), home, allocator, Placing::Keep)?;
            }
        }
        let mut before: Vec<_> = self.extents.within(pages).collect();
        before.retain(|run| !matches!(run.state, PageState::Unwritten(_)));
        for run in &before {
            if let PageState::Data(at) | PageState::Pending { to: at, .. } = run.state {
                self.extents.set(Run {
                    state: PageState::Unwritten(at),
                    ..*run
                });
                self.mark(run.page..run.end());
                if let Some(sums) = &mut self.sums {
                    sums.forget(run.page..run.end());
                    sums.note_zeroed(run.page..run.end());
                }
            }
        }
        Ok(before)
    }

    /// Returns the blocks of a range's unwritten pages.
    pub fn unwritten(&self, pages: Range<u64>) -> impl Iterator<Item = Blocks> {
        self.extents
            .within(pages)
            .filter_map(|run| match run.state {
                PageState::Unwritten(at) => Some(at.blocks(run.count)),
                _ => None,
            })
    }

    /// Frees the earlier blocks of pages that `unwrite` returned.
    pub fn release_earlier(&mut self, before: &[Run<PageState>], allocator: &Allocator) {
        for run in before {
            if let PageState::Pending {
                was: Was::Data(from),
                ..
            } = run.state
            {
                self.release_unstored(run.page, run.count, from, allocator);
            }
        }
    }

    /// Adds unwritten blocks for the holes of a range. Fails with ENOSPC, and then changes nothing.
    pub fn preallocate(
        &mut self,
        pages: Range<u64>,
        home: SliceId,
        allocator: &Allocator,
    ) -> Result<()> {
        let holes = self.extents.holes(pages);
        let total: u64 = holes.iter().map(|(_, count)| count).sum();
        allocator.reserve(total)?;
        let mut got: Vec<Run<PageState>> = Vec::new();
        let mut missing = total;
        for (page, count) in holes {
            for (page, count) in chunks(page, count) {
                let near = got
                    .last()
                    .map(|run| run.state.advance(u64::from(run.count) - 1))
                    .and_then(|state| state.holds()[0])
                    .filter(|at| at.slice == home)
                    .map(|at| at.block);
                let (blocks, result) = self.allocate(home, near, count, allocator);
                let mut at = page;
                for blocks in blocks {
                    let state = PageState::Unwritten(At {
                        slice: blocks.slice,
                        block: blocks.first,
                    });
                    missing -= u64::from(blocks.count);
                    got.push(Run {
                        page: at,
                        count: blocks.count,
                        state,
                    });
                    at += u64::from(blocks.count);
                }
                if let Err(error) = result {
                    for run in got {
                        for at in run.state.holds().into_iter().flatten() {
                            allocator.release_uncommitted(at.blocks(run.count));
                        }
                    }
                    allocator.unreserve(missing);
                    return Err(error);
                }
            }
        }
        for run in got {
            self.mark(run.page..run.end());
            self.extents.insert(run);
        }
        Ok(())
    }

    /// Moves unwritten blocks from other slices to `home`, without copying.
    pub fn rehome_unwritten(&mut self, home: SliceId, allocator: &Allocator) -> Result<()> {
        let away: Vec<_> = self
            .extents
            .from(0)
            .filter(|run| matches!(run.state, PageState::Unwritten(at) if at.slice != home))
            .collect();
        for run in away {
            let PageState::Unwritten(from) = run.state else {
                continue;
            };
            self.extents.remove(run.page..run.end());
            if let Err(error) = self.preallocate(run.page..run.end(), home, allocator) {
                self.extents.insert(run);
                return Err(error);
            }
            self.release_unstored(run.page, run.count, from, allocator);
        }
        Ok(())
    }

    /// Makes a range of pages a hole for all later reads. Returns the removed runs. The caller passes them to `release` once no
    /// transfer to their blocks can be in flight.
    pub fn take_out(&mut self, pages: Range<u64>, allocator: &Allocator) -> Vec<Run<PageState>> {
        let removed = self.extents.remove(pages);
        for run in &removed {
            self.mark(run.page..run.end());
            if let Some(sums) = &mut self.sums {
                sums.forget(run.page..run.end());
            }
            if run.state == PageState::Delalloc {
                allocator.unreserve(u64::from(run.count));
            }
        }
        removed
    }

    /// Frees the blocks of removed pages that the store does not have. The next batch frees the others.
    pub fn release(&mut self, removed: &[Run<PageState>], allocator: &Allocator) {
        for run in removed {
            for at in run.state.holds().into_iter().flatten() {
                self.release_unstored(run.page, run.count, at, allocator);
            }
        }
    }

    fn release_unstored(&self, page: u64, count: u32, at: At, allocator: &Allocator) {
        let end = page + u64::from(count);
        let mut next = page;
        for row in self.stored.within(page..end) {
            if row.state.at != at.advance(row.page - page) {
                continue;
            }
            if row.page > next {
                allocator
                    .release_uncommitted(at.advance(next - page).blocks((row.page - next) as u32));
            }
            next = row.end();
        }
        if next < end {
            allocator.release_uncommitted(at.advance(next - page).blocks((end - next) as u32));
        }
    }

    /// Returns the part of a range, from its first page on, that has at most `runs` runs.
    pub fn piece(&self, pages: Range<u64>, runs: usize) -> Range<u64> {
        let next = self.extents.within(pages.clone()).nth(runs);
        pages.start..next.map_or(pages.end, |run| run.page)
    }

    /// Returns the number of blocks of the extents that the store has, or will have with the last batch.
    pub fn stored_blocks(&self) -> u64 {
        self.stored.pages()
    }
}

/// Splits a range of pages into runs whose length fits a run's count.
fn chunks(page: u64, count: u64) -> impl Iterator<Item = (u64, u32)> {
    const MOST: u64 = 1 << 30;
    (0..count.div_ceil(MOST)).map(move |i| {
        let done = i * MOST;
        (page + done, (count - done).min(MOST) as u32)
    })
}
