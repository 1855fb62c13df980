//! Pages that a writer asks for in advance: reserved beyond the end of the file, and read ahead.

use std::ops::Range;
use std::sync::Arc;

use jericho_cache::{Intent, Object, PAGES_PER_GET_MAX, PagePlace};
use jericho_format::{FILE_BYTES_MAX, PAGE_BYTES};
use jericho_fs::File;
use jericho_shm::Refusal;

use super::Fast;
use crate::handle::Handle;

/// Pages that a job reserves before other jobs of its thread run.
const RESERVE_STEP: u32 = 128;

impl Fast {
    /// Reads pages ahead into the cache.
    pub(super) fn prefetch(&self, handle: &Handle, first: u64, pages: u32) {
        let file = &handle.file;
        let end = file.size().div_ceil(PAGE_BYTES);
        let stop = first.saturating_add(u64::from(pages)).min(end);
        self.volume.prefetch(file, first..stop);
    }

    /// Returns whether one of the pages is in a slice with too many dirty pages.
    fn is_throttling(&self, file: &File, pages: Range<u64>) -> bool {
        let mut runs = file.layout().runs(pages);
        runs.any(|(slice, _)| self.volume.slice(slice).is_throttling())
    }

    /// Posts the reservation to another thread, while the writer uses the pages that it has. Returns how many pages that thread
    /// will try to reserve. Fails with `Space` when too many pages are dirty, and as `post_reserve` does.
    pub(super) fn reserve_soon(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        first: u64,
        pages: u32,
    ) -> Result<u32, Refusal> {
        let wanted = first..first.saturating_add(u64::from(pages));
        if wanted.is_empty() || self.is_throttling(&handle.file, wanted.clone()) {
            return Err(Refusal::Space);
        }
        if handle.soon.lock().is_empty() {
            handle.grants.lock().written()?;
        }
        self.post_reserve(handle, wanted)
    }

    /// Posts a job that reserves pages, or extends the job that is already posted. Returns how many pages, from the first on,
    /// the job will try to reserve. Fails with `Space` while the posted job has pages elsewhere, or as many as one job may have.
    pub(super) fn post_reserve(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        pages: Range<u64>,
    ) -> Result<u32, Refusal> {
        let mut soon = handle.soon.lock();
        let is_posted = !soon.is_empty();
        let from_first = joined(&soon, &pages).ok_or(Refusal::Space)?;
        let end_max = (from_first.start).saturating_add(u64::from(self.reserved_max(&handle.file)));
        *soon = from_first.start..from_first.end.min(end_max);
        let count = soon.end.saturating_sub(pages.start);
        drop(soon);
        if !is_posted {
            let (weak, open) = (Arc::downgrade(self), Arc::downgrade(handle));
            self.later(move || {
                if let (Some(fast), Some(open)) = (weak.upgrade(), open.upgrade()) {
                    fast.reserve_posted(&open);
                }
            });
        }
        match u32::try_from(count) {
            Ok(count) if count > 0 => Ok(count),
            _ => Err(Refusal::Space),
        }
    }

    /// Reserves a few pages of the posted job and posts another job for the rest, so that jobs of other files run in between.
    fn reserve_posted(self: &Arc<Self>, handle: &Arc<Handle>) {
        let pages = std::mem::take(&mut *handle.soon.lock());
        let step = (pages.end - pages.start).min(u64::from(RESERVE_STEP)) as u32;
        let rest = pages.start + u64::from(step)..pages.end;
        if self.reserve(handle, pages.start, step) == Ok(step) && !rest.is_empty() {
            // Fails when another request has posted a job for pages elsewhere.
            let _ = self.post_reserve(handle, rest);
        }
    }

    /// Returns the most pages that a writer may have reserved at once. Most of the cache stays available for written pages.
    fn reserved_max(&self, file: &File) -> u32 {
        (self.volume.home_frames_of(file.layout().home()) / 16).max(1)
    }

    /// Reserves space for pages and caches zeroed ones where there are none. Returns the number of pages reserved, from the first
    /// on.
    pub(super) fn reserve(&self, handle: &Handle, first: u64, pages: u32) -> Result<u32, Refusal> {
        let file = &handle.file;
        // Holds the lock until the end: no thread would release space that is reserved after the release of the handle.
        let grants = handle.grants.lock();
        let slot_file = grants.written()?;
        let end_max = FILE_BYTES_MAX / PAGE_BYTES;
        if pages == 0 || first >= end_max {
            return Err(Refusal::ReadOnly);
        }
        self.absorb(file.ino());
        // The file already has these pages: another writer has extended it since this writer checked.
        if first < file.size() / PAGE_BYTES {
            return Err(Refusal::Busy);
        }
        let pages = (end_max - first).min(u64::from(pages)) as u32;
        let pages = pages.min(self.reserved_max(file));
        // Keeps the file in its slice. Taken before the slice is looked up, because a move changes it.
        let _writing = file.writing();
        let layout = file.layout();
        if self.is_throttling(file, first..first + u64::from(pages)) {
            return Err(Refusal::Space);
        }
        let bytes = u64::from(pages) * PAGE_BYTES;
        let fs = &self.volume.fs;
        if fs.begin_write(file, first * PAGE_BYTES, bytes).is_err() {
            return Err(Refusal::Space);
        }
        let object = file.object();
        let (mut done, mut why) = (0, Refusal::Space);
        while done < pages {
            let at = first + u64::from(done);
            // The page in which the file ends has bytes, which must be fetched. The pages after it have none.
            let end = self.slot(slot_file).size().bytes().max(file.size());
            let (count_max, intent) = if at * PAGE_BYTES < end {
                (1, Intent::Modify)
            } else {
                ((pages - done).min(PAGES_PER_GET_MAX), Intent::Overwrite)
            };
            let (slice, run) = layout.first_run(at..at + u64::from(count_max));
            let (slice, count) = (self.volume.slice(slice), (run.end - at) as u32);
            let mut grant = match slice.try_get(&object, at, count, intent) {
                Ok(Some(grant)) => grant,
                Ok(None) => {
                    why = Refusal::Busy;
                    break;
                }
                Err(_) => break,
            };
            // Another program may have extended the file through the kernel since the size was read, and the pages may have left
            // the cache. The grant holds the pages, so the result of this check stays true.
            if intent == Intent::Overwrite && !is_hole(&*object, at, count) {
                break;
            }
            grant.offer();
            done += count;
        }
        match done {
            0 => Err(why),
            _ => Ok(done),
        }
    }
}

/// Returns one range that covers both, if they overlap or touch or the first is empty.
fn joined(one: &Range<u64>, other: &Range<u64>) -> Option<Range<u64>> {
    if one.is_empty() {
        return Some(other.clone());
    }
    let touch = one.start <= other.end && other.start <= one.end;
    touch.then(|| one.start.min(other.start)..one.end.max(other.end))
}

/// Returns whether no page of a range has bytes on a device.
fn is_hole(object: &dyn Object, first: u64, count: u32) -> bool {
    let mut runs = Vec::new();
    object.resolve(first, count, &mut runs).is_ok()
        && runs.iter().all(|run| matches!(run.place, PagePlace::Hole))
}
