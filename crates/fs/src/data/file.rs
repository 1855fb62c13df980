//! A regular file in memory: its extent map, and the calls that the cache makes to it.
//!
//! Order of locks: `exclusive`, then the inode's lock, then `map`. A slice may call `slice_of` and `may_write_inline` under its
//! own lock; they take at most `writers`. It calls the other methods of `Object` without that lock; they take `map`, `errors`, and
//! locks that are taken after `map`. A thread that holds `map` or `writers` must not call a slice.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use jericho_cache::{Error as CacheError, Object, PagePlace, PageRun, Slice};
use jericho_format::PAGE_BYTES;
use jericho_format::threads::ThreadsOfInode;
use jericho_metadata::store::Image;
use jericho_volume::{Blocks, Volume};
use parking_lot::{Condvar, Mutex, RwLock};

use crate::data::extents::{At, Map, PageState, Placing};
use crate::data::layout::Layout;
use crate::data::unflushed::Unflushed;
use crate::data::write_errors::{SeenErrors, WriteErrors};
use crate::data::writers::{Waiting, Writers};
use crate::error::{self, Error, Result};
use crate::inode::{File, FileHost, Inode, Meta};
use crate::objects::ObjectNumber;
use crate::types::{Ino, SliceId};

/// Result of an operation of a cache.
pub type CacheResult = std::result::Result<(), CacheError>;

/// A writer between `begin_write` and `end_write`. While it exists, the file's home does not change, so the writer changes no
/// page in a cache that the file has just left. May be dropped in any thread. The thread that holds it must not truncate or
/// move the same file.
pub struct Writing {
    file: Arc<File>,
    number: u64,
    is_watched: bool,
}

impl Writing {
    fn begin(file: &Arc<File>, writers: &mut Writers) -> Writing {
        Writing {
            file: file.clone(),
            number: writers.enter(),
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
        let ready = writers.leave(self.number);
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
    pub(crate) fn new(
        host: Arc<dyn FileHost>,
        inode: Arc<Inode>,
        object: ObjectNumber,
        meta: &Meta,
        map: Map,
    ) -> Arc<File> {
        let size = meta.rec.size;
        inode.blocks.store(map.extents.pages(), Ordering::Relaxed);
        let home = meta
            .rec
            .slice
            .filter(|s| usize::from(*s) < host.volume().slices().len())
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
            errors: WriteErrors::default(),
            unflushed: Unflushed::default(),
            writers: Mutex::default(),
            writers_changed: Condvar::new(),
            replacing: AtomicBool::new(false),
            inline_writes: AtomicBool::new(true),
            kernel_users: AtomicU32::new(0),
            first_writers: AtomicU64::new(0),
            host,
            inode,
            object,
        })
    }

    /// Returns the inode number.
    pub fn ino(&self) -> Ino {
        self.inode.ino
    }

    /// Returns the number that the file has in the keys of its cached pages, as long as it is in memory.
    #[inline]
    pub fn object_id(&self) -> u64 {
        self.object.get()
    }

    /// Returns the file as the object that the cache uses.
    pub fn object(self: &Arc<Self>) -> Arc<dyn Object> {
        self.clone()
    }

    /// Returns which slice holds which pages now. It may change at any time, when the file is moved.
    #[inline]
    pub fn layout(&self) -> Layout {
        Layout::in_slice(self.home())
    }

    /// Returns the home slice, to which the placement of the file or its last move has assigned it.
    #[inline]
    pub(crate) fn home(&self) -> SliceId {
        self.home.load(Ordering::Acquire)
    }

    /// Returns when the threads that use the file migrate to its data.
    pub fn threads(&self) -> ThreadsOfInode {
        ThreadsOfInode::from_byte(self.threads.load(Ordering::Relaxed))
    }

    pub(crate) fn set_threads(&self, threads: ThreadsOfInode) {
        self.threads.store(threads.byte(), Ordering::Relaxed);
    }

    /// Returns whether the kernel's page cache may have pages of the file, for example after a mapping or sendfile. At first the
    /// kernel has no pages if the file was created in this mount, or if the kernel did not know the inode when it was loaded.
    pub fn kernel_may_have_pages(&self) -> bool {
        let pages = &self.inode.kernel_pages;
        // The order of the loads matters: if both values are equal, no read began between the drop and the second load.
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

    /// Returns the number of reads into the kernel's page cache that have begun. The caller gets the number, makes the kernel drop
    /// its pages, and then passes the number to `kernel_has_dropped`. A drop waits for a read in progress and covers its pages.
    pub fn kernel_pages_so_far(&self) -> u64 {
        self.inode.kernel_pages.filled.load(Ordering::SeqCst)
    }

    /// Records that the kernel has dropped the pages of the first `so_far` reads. It may still have pages of reads that began
    /// later.
    pub fn kernel_has_dropped(&self, so_far: u64) {
        let pages = &self.inode.kernel_pages;
        pages.dropped.fetch_max(so_far, Ordering::SeqCst);
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Prevents changes of the file's home during a write. The caller takes the guard before `begin_write` and drops it after
    /// `end_write`.
    pub fn writing(self: &Arc<Self>) -> Writing {
        let mut writers = self.writers.lock();
        while writers.shut {
            self.writers_changed.wait(&mut writers);
        }
        Writing::begin(self, &mut writers)
    }

    /// Does the same as `writing`, but returns `None` instead of waiting for a change of the home.
    pub fn try_writing(self: &Arc<Self>) -> Option<Writing> {
        let mut writers = self.writers.try_lock()?;
        let may_begin = !writers.shut;
        may_begin.then(|| Writing::begin(self, &mut writers))
    }

    /// Calls `then` when all current writers (`writing`) have ended: at once, or in the thread of the last one, which `then`
    /// must not block. Writers that begin later see all changes that the caller made before.
    pub fn after_writings(&self, then: impl FnOnce() + Send + 'static) {
        let mut writers = self.writers.lock();
        if writers.count > 0 {
            let waiting = Waiting {
                before: writers.begun,
                left: writers.count,
                then: Box::new(then),
            };
            writers.waiting.push(waiting);
            return;
        }
        drop(writers);
        then();
    }

    /// Makes every writer that begins from now on watched (`Writing::is_watched`), until `unwatch_writers`. A watched writer has
    /// to record its changes, because the kernel may have the pages. Returns whether all earlier writers have ended.
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

    /// Stops new writers from beginning, and waits until the current ones have ended. The caller must not hold `exclusive`,
    /// which writers take briefly.
    pub(crate) fn shut_writers_out(&self) {
        let mut writers = self.writers.lock();
        while writers.shut {
            self.writers_changed.wait(&mut writers);
        }
        // New writers wait from now on, so the count only decreases.
        writers.shut = true;
        while writers.count > 0 {
            self.writers_changed.wait(&mut writers);
        }
    }

    /// Does what `shut_writers_out` does, and counts the caller as a writer: `after_writings` waits for it.
    pub(crate) fn shut_other_writers_out(self: &Arc<Self>) -> Writing {
        self.shut_writers_out();
        Writing::begin(self, &mut self.writers.lock())
    }

    /// Sets whether clients may write pages that enter the cache from now on.
    pub fn set_inline_writes(&self, allowed: bool) {
        self.inline_writes.store(allowed, Ordering::SeqCst);
    }

    /// Counts a descriptor that uses the file through the kernel alone: adds one with `more`, else subtracts one.
    pub fn count_kernel_user(&self, more: bool) {
        match more {
            true => self.kernel_users.fetch_add(1, Ordering::SeqCst),
            false => self.kernel_users.fetch_sub(1, Ordering::SeqCst),
        };
    }

    /// Returns whether a descriptor uses the file through the kernel alone. The kernel then has to know the file's size.
    pub fn has_kernel_users(&self) -> bool {
        self.kernel_users.load(Ordering::SeqCst) > 0
    }

    /// Counts a first inline writer. The caller has already registered the file as written inline, and has not let the writer
    /// write yet.
    pub fn count_first_writer(&self) {
        self.first_writers.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns a count that changes before the file's first inline writer writes. A reader loads the count, sees that the file
    /// has no inline writer, reads, and loads the count again. If it did not change, the reader has read no inline writes.
    pub fn first_writers(&self) -> u64 {
        // Orders the load after the caller's reads of the data.
        fence(Ordering::Acquire);
        self.first_writers.load(Ordering::Acquire)
    }

    /// Returns the first page after the size and after all reserved or preallocated pages.
    pub fn reserved_end_page(&self) -> u64 {
        self.end_page()
    }

    /// Lets writers begin again.
    pub(crate) fn let_writers_in(&self) {
        self.writers.lock().shut = false;
        self.writers_changed.notify_all();
    }

    /// Returns the first page after all that can be in a cache: pages within the size, reserved pages and preallocated pages.
    pub(crate) fn end_page(&self) -> u64 {
        let reserved = self.map.read().extents.end();
        self.size().div_ceil(PAGE_BYTES).max(reserved)
    }

    pub(crate) fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::Release);
    }

    pub(crate) fn set_home(&self, slice: SliceId) {
        self.home.store(slice, Ordering::Release);
    }

    /// Returns the cache of the file's home, or `None` if the filesystem was opened without caches.
    pub(crate) fn cache(&self) -> Option<&Arc<Slice>> {
        self.host.cache(self.home())
    }

    /// Records that the file's contents replace others, so that a close starts their write-back.
    pub(crate) fn note_replacing(&self) {
        self.replacing.store(true, Ordering::Release);
    }

    /// Returns whether the file's contents replace others: `note_replacing` was called, and `note_replaced` was not called since.
    pub(crate) fn is_replacing(&self) -> bool {
        self.replacing.load(Ordering::Acquire)
    }

    /// Clears the record made by `note_replacing`.
    pub(crate) fn note_replaced(&self) {
        self.replacing.store(false, Ordering::Release);
    }

    /// Returns whether the last batch has all extents as they are now.
    pub(crate) fn is_clean(&self) -> bool {
        self.map.try_read().is_some_and(|map| map.is_clean())
    }

    /// Returns whether the store will have all of the file's state once the last batch is durable.
    pub(crate) fn is_forgettable(&self) -> bool {
        self.is_clean() && !self.size_pending.load(Ordering::Acquire) && !self.errors.is_unseen()
    }

    /// Sets the number of blocks for stat. Called after the map changed.
    pub(crate) fn count_blocks(&self, map: &Map) {
        self.inode
            .blocks
            .store(map.extents.pages(), Ordering::Relaxed);
    }

    /// Returns the first page at or after `from` whose newest bytes are only in memory.
    pub(crate) fn first_dirty(&self, from: u64) -> Option<u64> {
        self.cache()?.first_dirty(self.object_id(), from)
    }

    /// Begins to remember the write-back errors that a description sees that is opened now.
    pub fn errors_seen(&self) -> SeenErrors {
        self.errors.opened()
    }

    /// Fails with the cause if the write-back of a page of the file has failed and the description has not seen it. Called after a
    /// sync, which may have written the page meanwhile.
    pub fn report_errors(&self, seen: &SeenErrors) -> Result<()> {
        self.errors.report(seen)
    }

    fn push(&self, at: At, count: u32, out: &mut Vec<PageRun>) -> CacheResult {
        let mut done = 0;
        for run in self.host.volume().runs(at.blocks(count)) {
            let place = PagePlace::Device {
                device: run.device,
                offset_bytes: run.offset_bytes,
            };
            out.push(PageRun {
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

    /// Fails if one of these places is on a device of another host that was exchanged: data of others may be there.
    fn refuse_excluded(&self, places: &[PageRun]) -> CacheResult {
        for run in places {
            if let PagePlace::Device { device, .. } = run.place {
                let checked = check_not_excluded(self.host.volume(), device);
                checked.map_err(|error| object_error(&error))?;
            }
        }
        Ok(())
    }

    /// Appends the places of readable blocks: the images of those that have one, and the others on their devices.
    fn push_newest(&self, at: At, count: u32, out: &mut Vec<PageRun>) -> CacheResult {
        let blocks = at.blocks(count);
        let images = self.host.allocator().logged(blocks).images(blocks);
        let end = at.block + u64::from(count);
        // The first block that is not in `out`.
        let mut next = at.block;
        for (block, image) in images {
            self.push(At { block: next, ..at }, (block - next) as u32, out)?;
            out.push(PageRun {
                pages: 1,
                place: PagePlace::Memory(image),
            });
            next = block + 1;
        }
        self.push(At { block: next, ..at }, (end - next) as u32, out)
    }

    /// Appends the runs of pages, for reading.
    fn resolve_in(&self, map: &Map, pages: Range<u64>, out: &mut Vec<PageRun>) -> CacheResult {
        let mut at = pages.start;
        for run in map.extents.within(pages.clone()) {
            hole(run.page - at, out);
            match run.state.readable() {
                Some(place) => self.push_newest(place, run.count, out)?,
                None => hole(u64::from(run.count), out),
            }
            at = run.end();
        }
        hole(pages.end - at, out);
        Ok(())
    }

    /// Returns whether a sync of pages changes metadata: not if each overwrites its block in the home slice, and the block has no image,
    /// nor had one whose removal is not durable.
    fn write_commits(&self, pages: Range<u64>) -> bool {
        let allocator = self.host.allocator();
        let has_rows = |blocks| allocator.logged(blocks).has_rows(blocks);
        let home = self.home();
        let map = self.map.read();
        let overwrites = |state, count| match state {
            PageState::Data(at) => at.slice == home && !has_rows(At::blocks(at, count)),
            _ => false,
        };
        let mut runs = map.extents.within(pages.clone());
        !(map.extents.covers(pages) && runs.all(|run| overwrites(run.state, run.count)))
    }

    /// Gives pages their blocks for write-back, and appends these in order, as (first block, number).
    pub(crate) fn place(
        &self,
        first: u64,
        count: u32,
        placing: Placing,
        out: &mut Vec<(At, u32)>,
    ) -> CacheResult {
        let pages = range(first, count);
        let ready = |state| matches!(state, PageState::Pending { .. } | PageState::Data(_));
        if placing == Placing::Keep {
            // Overwritten pages usually have their place already, so this case needs only a read lock.
            let map = self.map.read();
            let home = self.home();
            let in_place = |state| matches!(state, PageState::Data(at) if at.slice == home);
            if map.extents.covers(pages.clone())
                && map
                    .extents
                    .within(pages.clone())
                    .all(|run| in_place(run.state))
            {
                for run in map.extents.within(pages) {
                    if let PageState::Data(at) = run.state {
                        out.push((at, run.count));
                    }
                }
                return Ok(());
            }
        }
        let mut map = self.map.write();
        map.place(pages.clone(), self.home(), self.host.allocator(), placing)
            .map_err(|error| object_error(&error))?;
        self.count_blocks(&map);
        for run in map.extents.within(pages) {
            debug_assert!(ready(run.state));
            if let PageState::Pending { to: at, .. } | PageState::Data(at) = run.state {
                out.push((at, run.count));
            }
        }
        Ok(())
    }
}

/// Fails if nothing may be written to a device, because another one is in its place (`Volume::exclude`).
pub(crate) fn check_not_excluded(volume: &Volume, device: u16) -> Result<()> {
    if !volume.is_excluded(device) {
        return Ok(());
    }
    let name = volume.devices()[usize::from(device)].name();
    let error = format!("{name}: another device is in its place since its host was away");
    Err(Error::WrongDevice(error.into()))
}

pub(crate) fn object_error(error: &Error) -> CacheError {
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
        self.object_id()
    }

    fn slice_of(&self, page: u64) -> u16 {
        self.layout().slice_of(page)
    }

    fn may_write_inline(&self) -> bool {
        self.inline_writes.load(Ordering::SeqCst) && !self.writers.lock().shut
    }

    fn resolve(&self, first: u64, count: u32, out: &mut Vec<PageRun>) -> CacheResult {
        self.resolve_in(&self.map.read(), range(first, count), out)
    }

    fn has_checksums(&self) -> bool {
        self.host.volume().has_checksums()
    }

    fn resolve_summed(
        &self,
        first: u64,
        count: u32,
        out: &mut Vec<PageRun>,
        sums: &mut Vec<Option<u32>>,
    ) -> CacheResult {
        let map = self.map.read();
        self.sums_in(&map, range(first, count), sums)?;
        self.resolve_in(&map, range(first, count), out)
    }

    fn checksum_failed(&self, page: u64, expected: u32, found: u32) -> CacheError {
        self.report_difference(page, expected, found)
    }

    fn allocate(&self, first: u64, count: u32, out: &mut Vec<PageRun>) -> CacheResult {
        let mut places = Vec::new();
        match self.has_checksums() {
            true => self.place_anew(first, count, &mut places)?,
            false => self.place(first, count, Placing::Keep, &mut places)?,
        }
        // Without a lock, because it may wait for a write to a device.
        for (at, count) in places {
            let blocks = at.blocks(count);
            self.host.allocator().logged(blocks).claim(blocks);
            self.push(at, count, out)?;
        }
        self.refuse_excluded(out)
    }

    fn log(&self, first: u64, bytes: &[u8], commits: bool) -> bool {
        let count = bytes.len() / PAGE_BYTES as usize;
        let pages = range(first, count as u32);
        let allocator = self.host.allocator();
        let shard = allocator.shards().of_ino(self.ino());
        let logged = allocator.logged_of(shard);
        let mut places = Vec::new();
        if !logged.has_room(count)
            || !(commits || self.has_checksums() || self.write_commits(pages.clone()))
            || (self.place(first, count as u32, Placing::Keep, &mut places)).is_err()
        {
            return false;
        }
        for (at, count) in places {
            let blocks = at.blocks(count);
            allocator.logged(blocks).claim(blocks);
        }
        let sums = self.checksums_of(bytes);
        let images = bytes.chunks_exact(PAGE_BYTES as usize);
        let images: Vec<Image> = images.map(Image::from).collect();
        // An image and the extent that names its block must be in one batch.
        let is_ours = |blocks: Blocks| allocator.shards().of_slice(blocks.slice) == shard;
        let put = |page: u64, blocks: Blocks| {
            for (block, page) in (blocks.first..).zip(page..page + u64::from(blocks.count)) {
                let image = images[(page - first) as usize].clone();
                logged.put((blocks.slice, block), image, (self.ino(), page));
            }
        };
        self.host.in_one_batch(self.ino(), &mut || {
            let mut map = self.map.write();
            let is_logged = map.logged(pages.clone(), allocator, is_ours, put);
            if is_logged {
                map.set_sums(first, &sums);
            }
            drop(map);
            if is_logged {
                self.host.mark_dirty(&self.inode);
            }
            is_logged
        })
    }

    fn written(&self, first: u64, count: u32) {
        self.wrote(range(first, count), &[], Durability::AfterFlush);
    }

    fn written_durably(&self, first: u64, count: u32) {
        self.wrote(range(first, count), &[], Durability::Durable);
    }

    fn written_summed(&self, first: u64, sums: &[u32]) {
        self.wrote(
            range(first, sums.len() as u32),
            sums,
            Durability::AfterFlush,
        );
    }

    fn write_back_ended(&self) {
        // Set by the committer before it asks `first_dirty`. So either it found the pages on the device, or this finds the flag.
        if self.size_pending.load(Ordering::Acquire) {
            self.host.mark_dirty(&self.inode);
        }
    }

    fn write_failed(&self, _first: u64, _count: u32, error: &CacheError) {
        let error = error::of_cache(error.clone());
        self.errors.note(&error);
        self.host.write_failed(&error);
    }
}

/// Whether data that was written is durable.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Durability {
    Durable,
    /// The device may have it in its cache.
    AfterFlush,
}

impl File {
    /// Records that data was written to blocks. Their devices are flushed before the next batch, and before the end of the file's next sync.
    fn note_write(&self, blocks: Blocks) {
        for run in self.host.volume().runs(blocks) {
            if let Some(epoch) = self.host.flushes().note_write(run.device) {
                self.unflushed.note(run.device, epoch);
            }
        }
    }

    /// Records that pages are on the device, where they were placed. `sums` are their checksums, or empty.
    fn wrote(&self, pages: Range<u64>, sums: &[u32], durability: Durability) {
        let mut changed = !sums.is_empty();
        let mut had_images = false;
        {
            let map = self.map.read();
            for run in map.extents.within(pages.clone()) {
                if let PageState::Pending { to: at, .. } | PageState::Data(at) = run.state {
                    let blocks = at.blocks(run.count);
                    if durability == Durability::AfterFlush {
                        // Comes before the change of state: a batch that sees the new state must flush this device.
                        self.note_write(blocks);
                    }
                    had_images |= self.host.allocator().logged(blocks).wrote(blocks);
                }
                changed |= matches!(run.state, PageState::Pending { .. });
            }
        }
        if changed || had_images {
            let mut map = self.map.write();
            changed = map.written(pages.clone(), self.host.allocator());
            if !sums.is_empty() {
                map.set_sums(pages.start, sums);
                changed = true;
            }
            if had_images {
                // A sync that ends without this batch would leave older images in the journal, for a recovery to write.
                map.images_removed(pages);
            }
        }
        if changed || had_images {
            self.host.mark_dirty(&self.inode);
        }
    }
}

fn hole(pages: u64, out: &mut Vec<PageRun>) {
    if pages > 0 {
        out.push(PageRun {
            pages: pages as u32,
            place: PagePlace::Hole,
        });
    }
}
