//! Direct writes against the kernel's copies of pages.
//!
//! When a program without the library maps a file, the kernel reads pages into its page cache. Later it writes each changed page
//! back whole, which would overwrite what another program has since written to the page with write(2). So a write to a file of
//! which the kernel may have pages is made page by page under the file's lock. For each byte that it changes, it records the
//! value that the kernel was given (`changes`). Write-backs of the kernel are compared with these records.
//!
//! ```text
//!               a read that fills the page cache
//!   unwatched ───────────────────────────────────▶ watched: writes make records ◀─┐
//!     ▲ ▲                                            │    │ records of pages that  │
//!     │ └── all pages dropped, none read meanwhile ──┘    └─ were dropped end ─────┘
//!     └── the last descriptor is closed
//! ```
//!
//! Why each step is right: docs/internals/fuse.md, *A mapped page that is written*.

mod changes;
#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use jericho_cache::{Grant, Latched};
use jericho_format::PAGE_BYTES;
use jericho_fs::File;
use jericho_fs::types::Ino;
use parking_lot::{Condvar, Mutex, RwLock};

use crate::counters::MountCounts;
use crate::kernel_cache::KernelCache;
use crate::pages::put_new;
use changes::Changes;

const PAGE: usize = PAGE_BYTES as usize;
/// Most records of all files; each takes 8 KiB.
const RECORDS_MAX: usize = 1024;
/// A file with this many records has its pages dropped at once; a file with fewer, after the delay.
const RECORDS_MANY: usize = 64;
const DELAY: Duration = Duration::from_millis(20);
/// Bounds of `Watch::writes_wanted`: after that many writes without a fill, it pays off to drop all of the kernel's pages. The
/// number starts at the minimum. Each such drop multiplies it, up to the maximum: if another drop follows, the kernel has read
/// pages again, so the previous drop has not paid off.
const WRITES_MIN: u32 = 1 << 10;
const WRITES_MAX: u32 = 1 << 20;

/// The files of which the kernel may have pages.
pub(crate) struct Mapped {
    files: RwLock<HashMap<Ino, Arc<MappedFile>>>,
    /// Number of files in `files`; checked before the lock is taken.
    count: AtomicUsize,
    dropper: Arc<PageDropper>,
}

/// Makes the kernel drop pages with records, in a thread of its own.
pub(crate) struct PageDropper {
    counts: Arc<MountCounts>,
    /// Number of records now.
    records: AtomicUsize,
    queue: Mutex<DropQueue>,
    changed: Condvar,
}

/// The files whose pages the kernel is to drop.
#[derive(Default)]
struct DropQueue {
    files: Vec<Arc<MappedFile>>,
    at_once: bool,
    closing: bool,
}

/// A file of which the kernel may have pages.
pub(crate) struct MappedFile {
    file: Arc<File>,
    dropper: Arc<PageDropper>,
    /// Held while a page is changed or given to the kernel. No thread blocks while it holds the lock.
    watch: Mutex<Watch>,
}

/// What the daemon knows of the kernel's pages of a file.
struct Watch {
    changes: Changes<PAGE>,
    /// Number of reads into the page cache that have begun.
    fills: u64,
    /// Writes since the last fill.
    writes: u32,
    /// Drop all of the kernel's pages when `writes` reaches this.
    writes_wanted: u32,
    /// Set while the file is queued for the dropping thread. True: its pages are to be dropped at once.
    queued: Option<bool>,
}

/// Why bytes were not put into a page.
pub(crate) enum NotPut {
    /// Another writer holds the page's latch.
    Latched(Latched),
    /// The page's contents have to be fetched first.
    Unfilled,
}

impl From<Latched> for NotPut {
    fn from(latched: Latched) -> NotPut {
        NotPut::Latched(latched)
    }
}

impl Mapped {
    /// Creates an empty table that counts in `counts`.
    pub fn new(counts: Arc<MountCounts>) -> Mapped {
        Mapped {
            files: RwLock::default(),
            count: AtomicUsize::new(0),
            dropper: Arc::new(PageDropper {
                counts,
                records: AtomicUsize::new(0),
                queue: Mutex::default(),
                changed: Condvar::default(),
            }),
        }
    }

    /// Records that the kernel is about to be given pages of a file. Waits for writes that began before the file was
    /// watched.
    pub fn begin_fill(&self, file: &Arc<File>) -> Arc<MappedFile> {
        let (mapped, may_go_on) = self.try_begin_fill(file);
        if !may_go_on {
            file.await_unwatched_writers();
        }
        mapped
    }

    /// Does the same as `begin_fill` without waiting. Returns whether the caller may proceed.
    pub fn try_begin_fill(&self, file: &Arc<File>) -> (Arc<MappedFile>, bool) {
        let mapped = self.file(file.ino()).unwrap_or_else(|| self.add(file));
        {
            let mut watch = mapped.watch.lock();
            // From here on, a drop in progress does not end the watch.
            watch.fills += 1;
            watch.writes = 0;
        }
        let may_go_on = file.watch_writers();
        (mapped, may_go_on)
    }

    fn add(&self, file: &Arc<File>) -> Arc<MappedFile> {
        let mut files = self.files.write();
        let mapped = files.entry(file.ino()).or_insert_with(|| {
            self.count.fetch_add(1, Ordering::AcqRel);
            Arc::new(MappedFile {
                file: file.clone(),
                dropper: self.dropper.clone(),
                watch: Mutex::new(Watch {
                    changes: Changes::default(),
                    fills: 0,
                    writes: 0,
                    writes_wanted: WRITES_MIN,
                    queued: None,
                }),
            })
        });
        mapped.clone()
    }

    /// Returns the watched file with this inode number, if the kernel may have pages of it.
    pub fn file(&self, ino: Ino) -> Option<Arc<MappedFile>> {
        match self.count.load(Ordering::Acquire) {
            0 => None,
            _ => self.files.read().get(&ino).cloned(),
        }
    }

    /// Records the file's new size.
    pub fn truncated(&self, ino: Ino, size: u64) {
        if let Some(mapped) = self.file(ino) {
            let (page, len) = (size / PAGE_BYTES, size % PAGE_BYTES);
            mapped.with(|watch| watch.changes.truncate(page, len as usize));
        }
    }

    /// Forgets a file that no program has open: the kernel has written its mapped pages back, and no program can change the pages
    /// that it keeps.
    pub fn closed(&self, file: &File) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut files = self.files.write();
        // A program that opens the file from here on begins a fill after this.
        if !file.is_open()
            && let Some(mapped) = files.remove(&file.ino())
        {
            self.count.fetch_sub(1, Ordering::AcqRel);
            mapped.with(|watch| watch.changes = Changes::default());
            mapped.file.unwatch_writers();
        }
    }

    /// Returns the part that makes the kernel drop pages.
    pub fn dropper(&self) -> Arc<PageDropper> {
        self.dropper.clone()
    }

    /// Stops `PageDropper::serve`.
    pub fn close(&self) {
        self.dropper.queue.lock().closing = true;
        self.dropper.changed.notify_all();
    }
}

impl MappedFile {
    /// Changes the watch, and updates the number of records of all files.
    fn with<T>(&self, change: impl FnOnce(&mut Watch) -> T) -> T {
        let mut watch = self.watch.lock();
        let before = watch.changes.len();
        let result = change(&mut watch);
        let (after, records) = (watch.changes.len(), &self.dropper.records);
        if after > before {
            records.fetch_add(after - before, Ordering::Relaxed);
        } else if after < before {
            records.fetch_sub(before - after, Ordering::Relaxed);
        }
        result
    }

    /// Returns whether a write of whole pages needs their old contents. `of_mapping`: the kernel writes them back.
    pub fn compares(&self, first: u64, count: u32, of_mapping: bool) -> bool {
        !of_mapping || {
            let watch = self.watch.lock();
            let mut pages = first..first + u64::from(count);
            pages.any(|page| watch.changes.has(page))
        }
    }

    /// Copies a page from `at` on for the kernel's page cache. `out` ends with the page or with the file.
    pub fn give(&self, grant: &Grant, page: u64, at: usize, out: &mut [u8]) -> Result<(), Latched> {
        if at > 0 {
            // The page cache reads whole pages, so this is no fill.
            return grant.read(page, at, out);
        }
        self.with(|watch| {
            let mut now = [0; PAGE];
            grant.read(page, 0, &mut now)?;
            out.copy_from_slice(&now[..out.len()]);
            watch.changes.give(page, out.len(), &now);
            Ok(())
        })
    }

    /// Writes bytes to a page of the grant. `is_new`: the page is all zeros if it is not filled. `of_mapping`: the kernel writes
    /// them back.
    pub fn put(
        self: &Arc<Self>,
        grant: &mut Grant,
        (page, at): (u64, usize),
        bytes: &[u8],
        is_new: bool,
        of_mapping: bool,
    ) -> Result<(), NotPut> {
        self.with(|watch| {
            let is_filled = grant.is_filled(page);
            let is_compared = !of_mapping || watch.changes.has(page);
            if is_compared && !is_filled && !is_new {
                return Err(NotPut::Unfilled);
            }
            let mut now = [0; PAGE];
            if is_compared && is_filled {
                grant.read(page, 0, &mut now)?;
            }
            if of_mapping {
                let mut merged = [0; PAGE];
                let merged = &mut merged[..bytes.len()];
                merged.copy_from_slice(bytes);
                watch.changes.merge(page, at, merged, &now);
                put_new(grant, page, at, merged)?;
                watch.changes.written_back(page, at, bytes);
                return Ok(());
            }
            put_new(grant, page, at, bytes)?;
            self.note(watch, (page, at), &now[at..at + bytes.len()], bytes);
            Ok(())
        })
    }

    /// Records that a direct write has changed bytes of a page.
    fn note(self: &Arc<Self>, watch: &mut Watch, (page, at): (u64, usize), old: &[u8], new: &[u8]) {
        let (dropper, before) = (&self.dropper, watch.changes.len());
        watch.changes.change(page, at, old, new);
        if watch.changes.len() > before {
            dropper.counts.mapped_kept.fetch_add(1, Ordering::Relaxed);
            if dropper.records.load(Ordering::Relaxed) >= RECORDS_MAX {
                watch.changes.forget_oldest();
                dropper
                    .counts
                    .mapped_forgotten
                    .fetch_add(1, Ordering::Relaxed);
            }
        }
        watch.writes = watch.writes.saturating_add(1);
        let many = watch.changes.len() >= RECORDS_MANY || watch.is_worth_all();
        let due = (many || watch.changes.len() > 0).then_some(many);
        if due > watch.queued {
            let mut queue = dropper.queue.lock();
            if watch.queued.is_none() {
                queue.files.push(self.clone());
            }
            queue.at_once |= many;
            watch.queued = due;
            dropper.changed.notify_all();
        }
    }

    /// Tells the kernel to drop the pages with a record, or all pages when that pays off, and ends the records. May wait for
    /// requests of the kernel, so it must not run in a thread that serves them.
    fn drop_pages(&self, kernel: &dyn KernelCache) {
        let (records, fills, all) = {
            let mut watch = self.watch.lock();
            watch.queued = None;
            (watch.changes.all(), watch.fills, watch.is_worth_all())
        };
        if all {
            kernel.drop_pages(self.file.ino());
        } else {
            for pages in records.chunk_by(|a, b| a.0 + 1 == b.0) {
                let (first, end) = (pages[0].0, pages[0].0 + pages.len() as u64);
                kernel.drop_some_pages(self.file.ino(), first * PAGE_BYTES..end * PAGE_BYTES);
            }
        }
        self.with(|watch| {
            for record in records {
                watch.changes.dropped(record);
            }
            if all {
                watch.writes = 0;
                watch.writes_wanted = (watch.writes_wanted * 4).min(WRITES_MAX);
                if watch.fills == fills {
                    self.file.unwatch_writers();
                }
            }
        });
    }
}

impl Watch {
    fn is_worth_all(&self) -> bool {
        self.writes >= self.writes_wanted
    }
}

impl PageDropper {
    /// Makes the kernel drop pages with records, until the volume is unmounted.
    pub fn serve(&self, kernel: &dyn KernelCache) {
        while let Some(files) = self.take_files() {
            for file in files {
                file.drop_pages(kernel);
            }
        }
    }

    /// Waits for queued files, and takes those that are due. Returns `None` when the volume closes.
    fn take_files(&self) -> Option<Vec<Arc<MappedFile>>> {
        let mut queue = self.queue.lock();
        let is_idle = |queue: &mut DropQueue| queue.files.is_empty() && !queue.closing;
        self.changed.wait_while(&mut queue, is_idle);
        let is_early = |queue: &mut DropQueue| !queue.at_once && !queue.closing;
        self.changed.wait_while_for(&mut queue, is_early, DELAY);
        queue.at_once = false;
        (!queue.closing).then(|| std::mem::take(&mut queue.files))
    }
}
