//! A regular file in memory: its extent map, and what the cache asks of it.
//!
//! Locks: `exclusive` before the inode's lock before `map`. The calls of `Object` are made under a
//! slice's lock and take `map` only; so nobody may call a slice while holding `map`.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Weak};

use jericho_cache::{Error as CacheError, Object, Place, Run as PlaceRun, Slice};
use jericho_format::PAGE_BYTES;
use jericho_format::threads::ThreadsOfInode;
use parking_lot::{Condvar, Mutex, RwLock};

use super::core::Core;
use super::extents::{At, Map, State};
use super::inode::{Inode, Meta};
use crate::error::Error;
use crate::types::{Ino, SliceId};

/// The outcome of an operation of a cache.
pub type CacheResult = std::result::Result<(), CacheError>;

/// A regular file in memory: what the data path needs. Shared by every open descriptor.
pub struct File {
    pub(super) core: Arc<Core>,
    pub(super) inode: Arc<Inode>,
    home: AtomicU16,
    threads: AtomicU8,
    size: AtomicU64,
    /// Shared: reserving space, moving pieces. Exclusive: taking pages out, changing the home.
    pub(super) exclusive: RwLock<()>,
    pub(super) map: RwLock<Map>,
    /// Truncations in progress: a batch leaves size and extents as they were.
    pub(super) hold: AtomicU32,
    /// The last batch had to leave out the end of the file: the next page written changes that.
    pub(super) size_pending: AtomicBool,
    /// Bytes up to here were on the device when a sync of the file ended. Changed with `reaches` locked, or raised by
    /// the committer.
    pub(super) synced_size: AtomicU64,
    /// Sizes that the syncs in progress will have reached.
    pub(super) reaches: Mutex<Vec<Weak<AtomicU64>>>,
    /// Bytes after the end in the last page on the device may not be zero: a write reached it whose
    /// size did not become durable.
    pub(super) tail_unsure: AtomicBool,
    /// When the times were last set by a write, in ticks.
    pub(super) tick: AtomicU64,
    /// A failed write-back that no fsync has reported.
    error: Mutex<Option<Error>>,
    writers: Mutex<Writers>,
    writers_changed: Condvar,
    /// New contents replace old ones: the file was truncated to nothing, or renamed over another. Cleared by the last
    /// close.
    replacing: AtomicBool,
    /// Clients may write its pages in the cache.
    inline_writes: AtomicBool,
    /// Descriptors that use it through the kernel alone.
    kernel_users: AtomicU32,
    /// Number of times that it got a first inline writer.
    first_writers: AtomicU64,
}

/// Who holds the file's home where it is.
#[derive(Default)]
struct Writers {
    count: u32,
    /// The home is about to change: new ones wait.
    shut: bool,
    /// Number of writers that have come so far.
    came: u64,
    /// Each new writer is told that it is watched.
    watch: bool,
    /// Writers, among `count`, that were not told.
    unwatched: u32,
    /// Callbacks that wait for the writers present at the time.
    waiting: Vec<Waiting>,
}

/// A callback that waits for the writers that came before the number `before`.
struct Waiting {
    before: u64,
    left: u32,
    then: Box<dyn FnOnce() + Send>,
}

impl Writers {
    fn come(&mut self) -> u64 {
        self.count += 1;
        self.unwatched += u32::from(!self.watch);
        self.came += 1;
        self.came - 1
    }

    /// Removes a writer. Returns the callbacks for which it was the last.
    fn go(&mut self, number: u64) -> Vec<Waiting> {
        self.count -= 1;
        for waiting in &mut self.waiting {
            waiting.left -= u32::from(number < waiting.before);
        }
        // Usually there is none.
        self.waiting.extract_if(.., |w| w.left == 0).collect()
    }
}

/// A writer between `begin_write` and `end_write`. While one is held the file's home does not change, so
/// that no page is changed in a cache that was just given up. May be dropped in any thread; whoever
/// holds it must not truncate or move the same file.
pub struct Writing {
    file: Arc<File>,
    number: u64,
    is_watched: bool,
}

impl Writing {
    fn begin(file: &Arc<File>, writers: &mut Writers) -> Writing {
        Writing {
            file: file.clone(),
            number: writers.come(),
            is_watched: writers.watch,
        }
    }

    /// Returns whether the write began after `File::watch_writers`.
    pub fn is_watched(&self) -> bool {
        self.is_watched
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        let mut writers = self.file.writers.lock();
        let ready = writers.go(self.number);
        writers.unwatched -= u32::from(!self.is_watched);
        let was_last = !self.is_watched && writers.unwatched == 0;
        if writers.count == 0 || was_last {
            self.file.writers_changed.notify_all();
        }
        drop(writers);
        for waiting in ready {
            (waiting.then)();
        }
    }
}

impl File {
    pub(super) fn new(core: Arc<Core>, inode: Arc<Inode>, meta: &Meta, map: Map) -> Arc<File> {
        let size = meta.rec.size;
        inode.blocks.store(map.extents.pages(), Ordering::Relaxed);
        let home = meta
            .rec
            .slice
            .filter(|s| *s < core.slice_count())
            .unwrap_or(0);
        Arc::new(File {
            home: AtomicU16::new(home),
            threads: AtomicU8::new(meta.rec.threads.byte()),
            size: AtomicU64::new(size),
            exclusive: RwLock::new(()),
            map: RwLock::new(map),
            hold: AtomicU32::new(0),
            size_pending: AtomicBool::new(false),
            synced_size: AtomicU64::new(meta.committed_size),
            reaches: Mutex::default(),
            tail_unsure: AtomicBool::new(meta.stored && !size.is_multiple_of(PAGE_BYTES)),
            tick: AtomicU64::new(0),
            error: Mutex::new(None),
            writers: Mutex::default(),
            writers_changed: Condvar::new(),
            replacing: AtomicBool::new(false),
            inline_writes: AtomicBool::new(true),
            kernel_users: AtomicU32::new(0),
            first_writers: AtomicU64::new(0),
            core,
            inode,
        })
    }

    /// Inode number.
    pub fn ino(&self) -> Ino {
        self.inode.ino
    }

    /// The file as the cache sees it.
    pub fn object(self: &Arc<Self>) -> Arc<dyn Object> {
        self.clone()
    }

    /// Slice that caches it now. May change at any time (re-homing): a Get answers `Moved` then.
    pub fn slice(&self) -> SliceId {
        self.home.load(Ordering::Acquire)
    }

    /// When the threads that use it are moved to its data.
    pub fn threads(&self) -> ThreadsOfInode {
        ThreadsOfInode::from_byte(self.threads.load(Ordering::Relaxed))
    }

    pub(super) fn set_threads(&self, threads: ThreadsOfInode) {
        self.threads.store(threads.byte(), Ordering::Relaxed);
    }

    /// Returns whether the kernel's page cache may have pages of the file, for example after a mapping or sendfile. A file that
    /// was created in this mount, or that the kernel did not know before, has none.
    pub fn kernel_may_have_pages(&self) -> bool {
        let pages = &self.inode.kernel_pages;
        // Loads in this order: if both values are equal, no read began between the drop and the second load.
        let dropped = pages.dropped.load(Ordering::SeqCst);
        pages.filled.load(Ordering::SeqCst) != dropped
    }

    /// Records, before a read fills the kernel's page cache, that the cache may have pages.
    pub fn kernel_gets_pages(&self) {
        self.inode
            .kernel_pages
            .filled
            .fetch_add(1, Ordering::SeqCst);
    }

    /// Returns how many reads have filled the page cache so far, for `kernel_has_dropped` after the kernel has dropped its pages. A drop
    /// waits for a read in progress and covers its pages.
    pub fn kernel_pages_so_far(&self) -> u64 {
        self.inode.kernel_pages.filled.load(Ordering::SeqCst)
    }

    /// Records that the kernel has dropped what it had at `so_far`. It may still have pages of reads that began
    /// since.
    pub fn kernel_has_dropped(&self, so_far: u64) {
        let pages = &self.inode.kernel_pages;
        pages.dropped.fetch_max(so_far, Ordering::SeqCst);
    }

    /// Size in bytes now.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Holds the file's home where it is for the length of a write. Taken before `begin_write`, dropped
    /// after `end_write`.
    pub fn writing(self: &Arc<Self>) -> Writing {
        let mut writers = self.writers.lock();
        while writers.shut {
            self.writers_changed.wait(&mut writers);
        }
        Writing::begin(self, &mut writers)
    }

    /// `writing`, unless it would have to wait until the file has its new home.
    pub fn try_writing(self: &Arc<Self>) -> Option<Writing> {
        let mut writers = self.writers.try_lock()?;
        let may_begin = !writers.shut;
        may_begin.then(|| Writing::begin(self, &mut writers))
    }

    /// Calls `then` when the writers that hold the file's home now (`writing`) are done: at once, or in the thread of the last of them,
    /// which `then` must not block. Writers that come later see what the caller did before.
    pub fn after_writings(&self, then: impl FnOnce() + Send + 'static) {
        let mut writers = self.writers.lock();
        if writers.count > 0 {
            let waiting = Waiting {
                before: writers.came,
                left: writers.count,
                then: Box::new(then),
            };
            writers.waiting.push(waiting);
            return;
        }
        drop(writers);
        then();
    }

    /// Makes every writer that begins from now on watched. Returns whether all earlier writers have ended.
    pub fn watch_writers(&self) -> bool {
        let mut writers = self.writers.lock();
        writers.watch = true;
        writers.unwatched == 0
    }

    /// Waits until the writers that began before `watch_writers` have ended.
    pub fn await_unwatched_writers(&self) {
        let mut writers = self.writers.lock();
        self.writers_changed
            .wait_while(&mut writers, |writers| writers.unwatched > 0);
    }

    /// Stops making new writers watched.
    pub fn unwatch_writers(&self) {
        self.writers.lock().watch = false;
    }

    /// Returns whether a descriptor has the file open.
    pub fn is_open(&self) -> bool {
        self.inode.opens.load(Ordering::Acquire) > 0
    }

    /// Keeps new writers out and waits until those that are there are done. Not to be called with
    /// `exclusive`, which writers take for a moment.
    pub(super) fn shut_writers_out(&self) {
        let mut writers = self.writers.lock();
        while writers.shut {
            self.writers_changed.wait(&mut writers);
        }
        // New ones wait from now on, so the count only goes down.
        writers.shut = true;
        while writers.count > 0 {
            self.writers_changed.wait(&mut writers);
        }
    }

    /// Does what `shut_writers_out` does, and counts the caller as a writer: `after_writings` waits for it.
    pub(super) fn shut_other_writers_out(self: &Arc<Self>) -> Writing {
        self.shut_writers_out();
        Writing::begin(self, &mut self.writers.lock())
    }

    /// Whether clients may write pages that come into the cache from now on.
    pub fn set_inline_writes(&self, allowed: bool) {
        self.inline_writes.store(allowed, Ordering::SeqCst);
    }

    /// Counts one more open descriptor that uses the file through the kernel alone, or one less.
    pub fn count_kernel_user(&self, more: bool) {
        match more {
            true => self.kernel_users.fetch_add(1, Ordering::SeqCst),
            false => self.kernel_users.fetch_sub(1, Ordering::SeqCst),
        };
    }

    /// Returns whether a descriptor uses the file through the kernel alone, which then has to know its size.
    pub fn has_kernel_users(&self) -> bool {
        self.kernel_users.load(Ordering::SeqCst) > 0
    }

    /// Counts a first inline writer. Called after the file counts as written inline, and before the writer may write.
    pub fn count_first_writer(&self) {
        self.first_writers.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns a count that changes before the file's first inline writer writes. A reader that reads the count, finds no inline writer, and
    /// later reads the same count has read no inline writes.
    pub fn first_writers(&self) -> u64 {
        // After what was read before.
        fence(Ordering::Acquire);
        self.first_writers.load(Ordering::Acquire)
    }

    /// The page after the last one of the size, or that is promised or preallocated.
    pub fn promised_end_page(&self) -> u64 {
        self.end_page()
    }

    /// Writers may go on.
    pub(super) fn let_writers_in(&self) {
        self.writers.lock().shut = false;
        self.writers_changed.notify_all();
    }

    /// The page after the last one that can be in a cache: of the size, or promised, or preallocated.
    pub(super) fn end_page(&self) -> u64 {
        let promised = self.map.read().extents.end();
        self.size().div_ceil(PAGE_BYTES).max(promised)
    }

    pub(super) fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::Release);
    }

    pub(super) fn set_home(&self, slice: SliceId) {
        self.home.store(slice, Ordering::Release);
    }

    /// The cache of the file's home. `None` when the filesystem was opened without caches.
    pub(super) fn cache(&self) -> Option<&Arc<Slice>> {
        self.core.slices.get(usize::from(self.slice()))
    }

    /// Records that the file's contents replace others, so that a close starts their write-back.
    pub(super) fn note_replacing(&self) {
        self.replacing.store(true, Ordering::Release);
    }

    /// Returns whether the file's contents replace others since the last time that no descriptor was open.
    pub(super) fn is_replacing(&self) -> bool {
        self.replacing.load(Ordering::Acquire)
    }

    /// Clears that record.
    pub(super) fn note_replaced(&self) {
        self.replacing.store(false, Ordering::Release);
    }

    /// Whether nothing of the extents is newer than the last batch.
    pub(super) fn is_clean(&self) -> bool {
        self.map.try_read().is_some_and(|map| map.is_clean())
    }

    /// Whether the store, once the last batch is durable, knows all that matters of the file.
    pub(super) fn is_forgettable(&self) -> bool {
        self.is_clean()
            && !self.size_pending.load(Ordering::Acquire)
            && self.error.try_lock().is_some_and(|error| error.is_none())
    }

    /// After the map changed: stat's count of blocks.
    pub(super) fn count_blocks(&self, map: &Map) {
        self.inode
            .blocks
            .store(map.extents.pages(), Ordering::Relaxed);
    }

    /// The first page >= `from` whose newest bytes are only in memory.
    pub(super) fn first_dirty(&self, from: u64) -> Option<u64> {
        self.cache()?.first_dirty(self.ino(), from)
    }

    /// The remembered write-back error, which is then forgotten.
    pub(super) fn take_error(&self) -> Option<Error> {
        self.error.lock().take()
    }

    fn push(&self, at: At, count: u32, out: &mut Vec<PlaceRun>) -> CacheResult {
        let mut done = 0;
        for run in self.core.volume.runs(at.blocks(count)) {
            let place = Place::Device {
                device: run.device,
                offset_bytes: run.offset_bytes,
            };
            out.push(PlaceRun {
                pages: run.blocks,
                place,
            });
            done += run.blocks;
        }
        if done == count {
            return Ok(());
        }
        let what = format!(
            "file {} has blocks beyond the end of slice {}",
            self.ino(),
            at.slice
        );
        Err(object_error(&Error::Damaged(what)))
    }
}

fn object_error(error: &Error) -> CacheError {
    match error {
        Error::Io(error) => CacheError::Io(error.clone()),
        error => CacheError::Object {
            errno: error.errno(),
            message: error.to_string().into(),
        },
    }
}

fn range(first: u64, count: u32) -> Range<u64> {
    first..first + u64::from(count)
}

impl Object for File {
    fn id(&self) -> u64 {
        self.ino()
    }

    fn slice(&self) -> u16 {
        File::slice(self)
    }

    fn may_write_inline(&self) -> bool {
        self.inline_writes.load(Ordering::SeqCst) && !self.writers.lock().shut
    }

    fn resolve(&self, first: u64, count: u32, out: &mut Vec<PlaceRun>) -> CacheResult {
        let map = self.map.read();
        let pages = range(first, count);
        let mut at = first;
        for run in map.extents.within(pages.clone()) {
            hole(run.page - at, out);
            match run.state.readable() {
                Some(place) => self.push(place, run.count, out)?,
                None => hole(u64::from(run.count), out),
            }
            at = run.end();
        }
        hole(pages.end - at, out);
        Ok(())
    }

    fn allocate(&self, first: u64, count: u32, out: &mut Vec<PlaceRun>) -> CacheResult {
        let pages = range(first, count);
        let ready = |state| matches!(state, State::Pending { .. } | State::Data(_));
        {
            // Mostly what is overwritten was placed long ago.
            let map = self.map.read();
            let home = File::slice(self);
            let in_place = |state| matches!(state, State::Data(at) if at.slice == home);
            if map.extents.covers(pages.clone())
                && map
                    .extents
                    .within(pages.clone())
                    .all(|run| in_place(run.state))
            {
                for run in map.extents.within(pages) {
                    if let State::Data(at) = run.state {
                        self.push(at, run.count, out)?;
                    }
                }
                return Ok(());
            }
        }
        let mut map = self.map.write();
        map.place(pages.clone(), File::slice(self), &self.core.allocator)
            .map_err(|error| object_error(&error))?;
        self.count_blocks(&map);
        for run in map.extents.within(pages) {
            debug_assert!(ready(run.state));
            if let State::Pending { to: at, .. } | State::Data(at) = run.state {
                self.push(at, run.count, out)?;
            }
        }
        Ok(())
    }

    fn written(&self, first: u64, count: u32) {
        let pages = range(first, count);
        let mut changed = false;
        {
            let map = self.map.read();
            for run in map.extents.within(pages.clone()) {
                if let State::Pending { to: at, .. } | State::Data(at) = run.state {
                    // Before the state changes: a batch that sees the new state must flush.
                    self.core.took_data(at.blocks(run.count));
                }
                changed |= matches!(run.state, State::Pending { .. });
            }
        }
        if changed {
            changed = self.map.write().written(pages, &self.core.allocator);
        }
        if changed || self.size_pending.load(Ordering::Acquire) {
            self.core.mark_dirty(&self.inode);
        }
    }

    fn write_failed(&self, _first: u64, _count: u32, error: &CacheError) {
        *self.error.lock() = Some(Error::from(error.clone()));
    }
}

fn hole(pages: u64, out: &mut Vec<PlaceRun>) {
    if pages > 0 {
        out.push(PlaceRun {
            pages: pages as u32,
            place: Place::Hole,
        });
    }
}
