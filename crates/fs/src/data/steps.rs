//! What batches change in the store, in steps: a batch takes as many changes of a file's extents as its share permits (`share`).
//!
//! After a batch that took a part, the store has the rows of `extents` in some pages and the earlier ones in all others. The blocks of
//! both belong to the file, so each page has contents that it had at some time. Two things must not show after a crash, and the
//! size in the batch ends before them (`size_for_batch`): pages whose new extents are not in the store yet, and pages that were
//! truncated away and are still there.

use std::ops::Range;

use jericho_format::PAGE_BYTES;
use jericho_metadata::alloc::{Allocator, Blocks};
use jericho_metadata::store::{Change, Extent};

use crate::data::extents::{Map, Replacement, Row};
use crate::data::ranges::Ranges;
use crate::data::runs::{Run, Runs, Step};
use crate::data::share::Share;
use crate::types::{Ino, SliceId};

/// The pages whose changes a batch takes.
pub struct Steps {
    /// In order.
    pub ranges: Vec<Range<u64>>,
    /// Nothing is left for later batches.
    pub is_all: bool,
}

impl Map {
    /// Chooses what the next batch takes of the file's changes.
    pub fn next_steps(&self, share: &mut Share) -> Steps {
        self.steps_of(&self.changed, share)
    }

    /// Chooses the changes for the batch with the name of a replacing file: all, if they fit into the share. Otherwise only those that the file
    /// had at the rename, because later changes could use the share up.
    pub fn next_steps_of_replacement(&self, share: impl Fn() -> Share) -> Steps {
        let all = self.next_steps(&mut share());
        let changed = match &self.replacement {
            Some(replacement) if !all.is_all => &replacement.changed,
            _ => return all,
        };
        let steps = self.steps_of(changed, &mut share());
        Steps {
            is_all: steps.is_all && *changed == self.changed,
            ..steps
        }
    }

    fn steps_of(&self, changed: &Ranges, share: &mut Share) -> Steps {
        share.begin_file();
        let mut ranges = Vec::new();
        for range in changed.iter() {
            if share.is_spent() {
                return Steps {
                    ranges,
                    is_all: false,
                };
            }
            let end = self.fitting(range.clone(), true, share);
            if end > range.start {
                ranges.push(range.start..end);
            }
            if end < range.end {
                return Steps {
                    ranges,
                    is_all: false,
                };
            }
        }
        Steps {
            ranges,
            is_all: true,
        }
    }

    /// Chooses what the next batch takes of the removal of the whole file.
    pub fn next_removals(&self, share: &mut Share) -> Steps {
        share.begin_file();
        let end = self.fitting(0..u64::MAX, false, share);
        Steps {
            ranges: Vec::from_iter([Range { start: 0, end }]),
            is_all: end == u64::MAX,
        }
    }

    /// Returns the end of the pages of a range, from its first one on, for whose changes the share suffices. `stays`: they become as
    /// in `extents`; otherwise they become holes.
    fn fitting(&self, range: Range<u64>, stays: bool, share: &mut Share) -> u64 {
        let mut at = range.start;
        // A range that has nothing costs a step, too, because there may be many.
        let mut is_empty = stays;
        while at < range.end {
            let row = self.stored.from(at).next();
            let run = self.extents.from(at).next();
            let starts = [row.map(|row| row.page), run.map(|run| run.page)];
            let first = starts.into_iter().flatten().min();
            let Some(first) = first
                .map(|first| first.max(at))
                .filter(|at| *at < range.end)
            else {
                break;
            };
            is_empty = false;
            let bound = |page: u64, end: u64| if page > first { page } else { end };
            let ends = [
                row.map(|row| bound(row.page, row.end())),
                run.map(|run| bound(run.page, run.end())),
            ];
            let end = ends.into_iter().flatten().fold(range.end, u64::min);
            let old = row.filter(|row| row.page <= first);
            let old = old.map(|row| row.state.advance(first - row.page).at);
            let new = run.filter(|run| stays && run.page <= first);
            let new = new.and_then(|run| run.state.advance(first - run.page).durable());
            let new = new.map(|row| row.at);
            let blocks = if old == new { [None; 2] } else { [old, new] };
            at = first + share.take_step(end - first, blocks);
            if at == first {
                return first;
            }
        }
        if is_empty {
            share.take_nothing();
        }
        range.end
    }

    /// Returns the slices with blocks that become used or free by these steps, some of them several times.
    pub fn slices_of(&self, steps: &Steps) -> impl Iterator<Item = SliceId> {
        steps.ranges.iter().flat_map(|range| {
            let now = self.extents.within(range.clone());
            let now = now.filter_map(|run| Some(run.state.durable()?.at.slice));
            let before = self.stored.within(range.clone());
            now.chain(before.map(|row| row.state.at.slice))
        })
    }

    /// Appends the changes of the store for batch `seq`, and the blocks that are free once it is durable.
    pub fn take_steps(
        &mut self,
        (ino, seq): (Ino, u64),
        steps: Steps,
        changes: &mut Vec<Change>,
        freed: &mut Vec<Blocks>,
    ) {
        for range in &steps.ranges {
            self.changed.take(range.clone());
            self.difference(ino, range.clone(), changes, freed);
        }
        // Only of these pages: each page's extent and checksum are in one batch.
        if let Some(sums) = &mut self.sums {
            sums.take_changes((ino, seq), &steps.ranges, changes);
        }
        self.took(steps.is_all, seq);
    }

    /// Notes that the present batch has the file's size and all of its extents. Call it also if the batch took no changes: otherwise
    /// `cut_at` of a truncation over a hole would shorten the size in later batches.
    pub fn nothing_left(&mut self) {
        self.replacement = None;
        (self.cut_at, self.left_since) = (None, None);
    }

    fn took(&mut self, is_all: bool, batch: u64) {
        if is_all {
            return self.nothing_left();
        }
        self.left_since = self.left_since.or(Some(batch));
    }

    /// Has no batch get a size that covers bytes from this one on, until a batch has taken all changes. Call it before pages beyond
    /// the end of the file are taken out.
    pub fn cut_at(&mut self, byte: u64) {
        self.cut_at = Some(self.cut_at.map_or(byte, |cut| cut.min(byte)));
    }

    /// Returns the first batch that did not take all changes, if the last one did not.
    pub fn left_since(&self) -> Option<u64> {
        self.left_since
    }

    /// Has the next batch take all changes that the file has now and a size of at least `size` bytes, because the batch has the name that
    /// replaces another file's. The bytes before `size` are on the device.
    pub fn note_replacement(&mut self, size: u64) {
        self.replacement = Some(Replacement {
            changed: self.changed.clone(),
            size,
        });
    }

    /// Forgets the replacement: later batches treat the file like any other.
    pub fn end_replacement(&mut self) {
        self.replacement = None;
    }

    /// Returns whether no batch has the changes of a page.
    pub fn is_left(&self, page: u64) -> bool {
        self.changed.containing(page).is_some()
    }

    /// Returns whether the next batch has the name that replaces another file's.
    pub fn is_replacement(&self) -> bool {
        self.replacement.is_some()
    }

    /// Removes extents of a file that is being removed, as `take_steps` does. No transfer of the file is in flight.
    pub fn take_removals(
        &mut self,
        (ino, seq): (Ino, u64),
        steps: Steps,
        allocator: &Allocator,
        changes: &mut Vec<Change>,
        freed: &mut Vec<Blocks>,
    ) {
        for range in &steps.ranges {
            let removed = self.take_out(range.clone(), allocator);
            self.release(&removed, allocator);
            let end = range.end;
            let after = self.stored.containing(end).filter(|row| row.page < end);
            for row in self.stored.remove(range.clone()) {
                let blocks = row.state.at.blocks(row.count);
                changes.push(Change::DelExtent(ino, row.page));
                changes.push(Change::Free(blocks));
                freed.push(blocks);
                if let Some(sums) = self.sums.as_mut().filter(|_| !row.state.unwritten) {
                    sums.note_gone(row.page..row.end());
                }
            }
            // The rest of the last row.
            if let Some(row) = after.and_then(|_| self.stored.containing(end)) {
                changes.push(self.put(ino, row));
            }
        }
        if let Some(sums) = &mut self.sums {
            sums.take_changes((ino, seq), &steps.ranges, changes);
        }
        self.changed = Ranges::default();
        self.took(steps.is_all, seq);
    }

    /// Returns the part of a file's size that a batch may have that took a part of the changes only. All bytes before `committed` are
    /// in earlier batches, unless they were truncated away since. Call it after `take_steps`. A replacement ends with this batch.
    pub fn size_for_batch(&mut self, committed: u64, size: u64) -> u64 {
        let left = |page| self.changed.first_from(page);
        let replaced = self.replacement.take().map_or(0, |replacement| {
            // Pages that changed afterwards may be left: without these changes they are as they were in the replacement.
            let mut ranges = replacement.changed.iter();
            let first_left = ranges.find_map(|r| left(r.start).filter(|page| *page < r.end));
            first_left.map_or(replacement.size, |page| {
                replacement.size.min(page * PAGE_BYTES)
            })
        });
        let committed = committed.max(replaced);
        let base = self.cut_at.map_or(committed, |cut| committed.min(cut));
        let first_left = left(base / PAGE_BYTES);
        first_left.map_or(size, |page| size.min((page * PAGE_BYTES).max(base)))
    }

    /// Appends the changes of the rows in a range of pages. Rows of other pages stay as they are, but may be split, or joined with those
    /// of the range.
    fn difference(
        &mut self,
        ino: Ino,
        range: Range<u64>,
        changes: &mut Vec<Change>,
        freed: &mut Vec<Blocks>,
    ) {
        // Compares whole rows, and includes the neighbours, because new rows may join with them.
        let before = range.start.saturating_sub(1);
        let start = self.stored.containing(before);
        let start = start.map_or(range.start, |row| row.page.min(range.start));
        let end = self.stored.containing(range.end);
        let end = end.map_or(range.end, |row| row.end());
        let old = {
            let mut taken = Runs::default();
            self.stored
                .remove(start..end)
                .into_iter()
                .for_each(|row| taken.insert_alone(row));
            taken
        };
        let mut new: Runs<Row> = Runs::default();
        old.within(start..range.start)
            .for_each(|row| new.insert(row));
        for run in self.extents.within(range.clone()) {
            if let Some(state) = run.state.durable() {
                new.insert(Run {
                    page: run.page,
                    count: run.count,
                    state,
                });
            }
        }
        old.within(range.end..end).for_each(|row| new.insert(row));
        let every = start..end;
        if let Some(sums) = &mut self.sums {
            let written = |row: &Run<Row>| !row.state.unwritten;
            for row in old.within(every.clone()).filter(written) {
                // The pages of the row that the next batch does not have as data.
                let mut next = row.page;
                for kept in new.within(row.page..row.end()).filter(written) {
                    sums.note_gone(next..kept.page);
                    next = kept.end();
                }
                sums.note_gone(next..row.end());
            }
        }
        for row in old.within(every.clone()) {
            if new.containing(row.page).is_none_or(|n| n.page != row.page) {
                changes.push(Change::DelExtent(ino, row.page));
            }
            only_in_first(row, &new, |blocks| {
                changes.push(Change::Free(blocks));
                freed.push(blocks);
            });
        }
        for row in new.within(every) {
            if old.containing(row.page) != Some(row) {
                changes.push(self.put(ino, row));
            }
            only_in_first(row, &old, |blocks| changes.push(Change::Use(blocks)));
            self.stored.insert_alone(row);
        }
    }

    /// Returns the change that puts a row.
    fn put(&self, ino: Ino, row: Run<Row>) -> Change {
        let unwritten = row.state.unwritten;
        Change::PutExtent(
            ino,
            Extent {
                page: row.page,
                blocks: row.state.at.blocks(row.count),
                unwritten,
                summed: self.sums.is_some() && !unwritten,
            },
        )
    }
}

/// Calls `each` with the blocks of a row that the other map does not have at the same pages.
fn only_in_first(row: Run<Row>, other: &Runs<Row>, mut each: impl FnMut(Blocks)) {
    let mut next = row.page;
    for o in other.within(row.page..row.end()) {
        if o.state.at != row.state.at.advance(o.page - row.page) {
            continue;
        }
        if o.page > next {
            each(
                row.state
                    .at
                    .advance(next - row.page)
                    .blocks((o.page - next) as u32),
            );
        }
        next = o.end();
    }
    if next < row.end() {
        each(
            row.state
                .at
                .advance(next - row.page)
                .blocks((row.end() - next) as u32),
        );
    }
}
