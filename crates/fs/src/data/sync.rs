//! Syncs of files, ranges and directories: writes the data to the device, and then the metadata needed to find it.
//!
//! A caller that may block writes a few dirty pages itself (`Slice::sync_small`), durably if one write suffices. If the file has other data
//! that may not be durable (`unflushed`), the caller flushes the devices. If the file has metadata that is not durable, the caller commits
//! (`commit/leader.rs`). No other thread takes part. If the caller commits, the pages go into the batch and not into their blocks
//! (`logged`), so the sync is one durable write.
//!
//! Otherwise the cache writes the data back and reports the completion in a thread of the slice, which must not wait. That thread
//! passes the request to the committer. The committer flushes the devices and, if the file has metadata that is not durable,
//! commits. All requests that wait at that moment share one commit.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use jericho_cache::SmallSync;
use jericho_format::PAGE_BYTES;
use jericho_metadata::shard::ShardId;

use crate::commit::{Needs, Waiter, leader};
use crate::core::{Core, PAGES};
use crate::data::file::CacheResult;
use crate::error::{self, Result};
use crate::fs::Fs;
use crate::inode::File;
use crate::inode::Inode;
use crate::table::Table;
use crate::types::Done;
use crate::types::Ino;

impl Fs {
    /// Writes the file's data back, flushes it and commits its metadata, as fsync and fdatasync do. With `datasync` commits
    /// only the metadata needed to read the data. Tries pages whose write-back has failed again; `File::report_errors` reports
    /// the failure. May call `done` in another thread.
    pub fn fsync(&self, file: &Arc<File>, datasync: bool, done: Done) {
        let scope = if datasync { Scope::Data } else { Scope::All };
        self.sync_pages(file, 0..PAGES, scope, Caller::MustNotBlock, done);
    }

    /// Does the same as `fsync`, in the calling thread where this wakes fewer threads. The calling thread may wait
    /// for devices and run the callbacks of other syncs. It holds no lock of a file.
    pub fn fsync_blocking(&self, file: &Arc<File>, datasync: bool, done: Done) {
        let scope = if datasync { Scope::Data } else { Scope::All };
        self.sync_pages(file, 0..PAGES, scope, Caller::MayBlock, done);
    }

    /// Makes a range of the file durable (O_DSYNC, RWF_DSYNC).
    pub fn sync_range(&self, file: &Arc<File>, offset: u64, len: u64, done: Done) {
        let (pages, scope) = needed_for(file, offset, len);
        self.sync_pages(file, pages, scope, Caller::MustNotBlock, done);
    }

    /// Does the same as `sync_range` in the calling thread, as `fsync_blocking` does.
    pub fn sync_range_blocking(&self, file: &Arc<File>, offset: u64, len: u64, done: Done) {
        let (pages, scope) = needed_for(file, offset, len);
        self.sync_pages(file, pages, scope, Caller::MayBlock, done);
    }

    /// Commits all operations on names and attributes of the directory's shard that have ended, as fsync of a directory does.
    pub fn fsync_dir(&self, ino: Ino, done: Done) {
        self.sync_names(ino, Caller::MustNotBlock, done);
    }

    /// Does the same as `fsync_dir` in the calling thread, as `fsync_blocking` does. Commits nothing if all these operations are durable.
    pub fn fsync_dir_blocking(&self, ino: Ino, done: Done) {
        self.sync_names(ino, Caller::MayBlock, done);
    }

    fn sync_names(&self, ino: Ino, caller: Caller, done: Done) {
        let core = &self.core;
        let dir = match core.inode(ino) {
            Ok(dir) => dir,
            Err(error) => return done(Err(error)),
        };
        if core.options.read_only {
            return done(Ok(()));
        }
        if caller == Caller::MayBlock && !needs_commit(core, &dir) {
            return done(core.commits_of(ino).failure());
        }
        let waiter = Waiter {
            needs: Needs::Names,
            ..Waiter::for_all(done)
        };
        commit_for(core, core.shards.map().of_ino(ino), waiter, caller);
    }

    fn sync_pages(
        &self,
        file: &Arc<File>,
        pages: Range<u64>,
        scope: Scope,
        caller: Caller,
        done: Done,
    ) {
        let core = &self.core;
        let commits = core.commits_of(file.ino());
        if let Err(error) = core.alive().and_then(|()| commits.failure()) {
            return done(Err(error));
        }
        if core.options.read_only {
            return done(Ok(()));
        }
        let sync = FileSync {
            reach: file.sync_begins(),
            file: file.clone(),
            scope,
            done,
        };
        let Some(cache) = file.cache() else {
            return match caller {
                Caller::MayBlock => sync.written_here(core, Ok(())),
                Caller::MustNotBlock => sync.written(core, Ok(())),
            };
        };
        if caller == Caller::MayBlock {
            let _fails = FailsOnPanic(core);
            let commits = sync.commits(core);
            // Otherwise a flush has to follow in any case.
            let durably = !commits && unflushed(core, file).is_empty();
            if let Some(result) =
                cache.sync_small(&file.object(), &pages, SmallSync { commits, durably })
            {
                return sync.written_here(core, result);
            }
        }
        let core = core.clone();
        let after = move |result| sync.written(&core, result);
        cache.sync(&file.object(), pages, Box::new(after));
    }
}

/// What the thread that asks for a sync may do.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Caller {
    MayBlock,
    /// The caller is, for example, a thread of a slice.
    MustNotBlock,
}

/// Ends all changes if the calling thread unwinds from a panic, because it may have left a file's extents half changed.
struct FailsOnPanic<'a>(&'a Core);

impl Drop for FailsOnPanic<'_> {
    fn drop(&mut self) {
        self.0.shards.fail_if_panicking();
    }
}

/// A sync in progress. A thread that blocks needs no reference to the filesystem, so it does not write to the count of all.
struct FileSync {
    file: Arc<File>,
    reach: Reach,
    scope: Scope,
    done: Done,
}

impl FileSync {
    /// Returns whether the sync must commit: metadata of the file that it needs is not durable.
    fn commits(&self, core: &Core) -> bool {
        let durable = core.commits_of(self.file.ino()).durable();
        match self.scope {
            Scope::All => self.file.inode.is_uncommitted(durable),
            Scope::Data | Scope::Range(_) => needs_metadata(&self.file, durable),
        }
    }

    /// Continues after the cache has written the data back, or has failed to. The calling thread must not block.
    fn written(self, core: &Core, result: CacheResult) {
        let Ok(sync) = self.note_written(result) else {
            return;
        };
        let commit = sync.commits(core);
        sync.commit(core, commit, Caller::MustNotBlock);
    }

    /// Continues after the calling thread has written the data back itself, or has failed to. It may block.
    fn written_here(self, core: &Core, result: CacheResult) {
        let Ok(sync) = self.note_written(result) else {
            return;
        };
        match sync.commits(core) {
            // The commit flushes the devices itself.
            true => sync.commit(core, true, Caller::MayBlock),
            false => (sync.done)(flush(core, &sync.file)),
        }
    }

    /// Records how far the file was written back. After a failure calls `done` with the error and returns `Err`.
    fn note_written(self, result: CacheResult) -> std::result::Result<FileSync, ()> {
        if let Err(error) = result {
            (self.done)(Err(error::of_cache(error)));
            return Err(());
        }
        let end = match &self.scope {
            Scope::All | Scope::Data => u64::MAX,
            Scope::Range(end) => *end,
        };
        self.file.note_synced(&self.reach, end);
        Ok(self)
    }

    /// Makes the file's data durable, and with `commit` its metadata.
    fn commit(self, core: &Core, commit: bool, caller: Caller) {
        let inode = self.file.inode.clone();
        let shard = core.shards.map().of_ino(inode.ino);
        let waiter = Waiter {
            inode: Some(inode),
            commit,
            data: core.shards_of(&self.file),
            ..Waiter::for_all(self.done)
        };
        commit_for(core, shard, waiter, caller);
    }
}

/// Returns whether the directory is not durable, or an operation on names or attributes of its shard that has ended is not.
fn needs_commit(core: &Core, dir: &Inode) -> bool {
    let shard = core.shards.map().of_ino(dir.ino);
    let newest = core.operations.newest(shard);
    // Read after `newest`, so that a batch that became durable meanwhile counts.
    let durable = core.commits_of(dir.ino).durable();
    newest > durable || dir.is_uncommitted(durable)
}

/// Makes durable what a waiter needs of a shard: in the calling thread if that may block, else in the committer.
fn commit_for(core: &Core, shard: ShardId, waiter: Waiter, caller: Caller) {
    match caller {
        Caller::MayBlock => leader::lead(core, shard, waiter),
        Caller::MustNotBlock => core.shards.get(shard).commits.enqueue(waiter),
    }
}

/// Returns the devices that have data of a file that may not be durable.
fn unflushed(core: &Core, file: &File) -> Vec<u16> {
    let mut devices = file.unflushed.devices(&core.flushes);
    if !devices.is_empty() {
        // If the file has just come into memory, these are all devices with such data of any file. Another one may hang or fail. Each
        // write that was recorded is on a device of the shards that the file has now.
        let own = core.devices_of(core.shards_of(file));
        devices.retain(|device| own.contains(device));
    }
    devices
}

/// Flushes the devices that have data of a file that may not be durable. Threads that flush a device at the same time share a flush.
fn flush(core: &Core, file: &File) -> Result<()> {
    let _fails = FailsOnPanic(core);
    let flushed = core.flush(unflushed(core, file));
    let mut shards = core.shards.of_set(core.shards_of(file));
    let failure = shards.try_for_each(|shard| shard.commits.failure());
    failure.and(flushed)
}

/// Returns the pages that `sync_range` has to write, and its scope.
fn needed_for(file: &File, offset: u64, len: u64) -> (Range<u64>, Scope) {
    let end = offset.saturating_add(len);
    // A commit can record the size that the range needs only if all bytes before are on the device.
    let synced = file.synced_size.load(Ordering::Acquire);
    let start = if end > synced {
        offset.min(synced)
    } else {
        offset
    };
    let pages = start / PAGE_BYTES..end.div_ceil(PAGE_BYTES);
    (pages, Scope::Range(end))
}

/// Part of a file to sync.
enum Scope {
    All,
    Data,
    /// The range that ends before this byte.
    Range(u64),
}

/// Returns whether a crash now could make the file's data unreadable, because extents or size are not durable. Also returns true if
/// another thread holds a lock, because the calling thread must not wait.
fn needs_metadata(file: &File, durable: u64) -> bool {
    let inode: &Inode = &file.inode;
    let size_committed = inode
        .meta
        .try_read()
        .is_some_and(|m| m.committed_size == m.rec.size && m.stored);
    let map_committed = file.map.try_read().is_some_and(|map| !map.has_changes());
    // Last: the committer stores its batch in `included_in` before it takes the state, so committed state that was read above is in this
    // batch or in an earlier one.
    let is_in_batch = inode.included_in.load(Ordering::Acquire) > durable;
    !size_committed || !map_committed || is_in_batch
}

/// The number of bytes, from the start of the file, that a sync in progress will make durable: the size when the sync began, or
/// less after a truncation.
pub(crate) struct Reach(Arc<AtomicU64>);

impl File {
    /// Records the size that a sync beginning now can guarantee.
    pub(crate) fn sync_begins(&self) -> Reach {
        let mut reaches = self.reaches.lock();
        reaches.retain(|reach| reach.strong_count() > 0);
        // The lock orders this with a concurrent truncation: either the truncation has set the size already, or it finds this sync.
        let reach = Arc::new(AtomicU64::new(self.size()));
        reaches.push(Arc::downgrade(&reach));
        Reach(reach)
    }

    /// Records that the file was truncated, or grew, to `size`. No sync in progress has written bytes beyond it.
    pub(crate) fn note_truncated(&self, size: u64) {
        let reaches = self.reaches.lock();
        for reach in reaches.iter().filter_map(Weak::upgrade) {
            reach.fetch_min(size, Ordering::Relaxed);
        }
        self.synced_size.fetch_min(size, Ordering::AcqRel);
    }

    /// Records that all pages up to byte `end` that were dirty when the sync began were written back. A commit can then record the size
    /// that the sync reached, even if a page was changed again since.
    pub(crate) fn note_synced(&self, reach: &Reach, end: u64) {
        let is_larger = {
            let _reaches = self.reaches.lock();
            let size = reach.0.load(Ordering::Relaxed).min(end);
            self.synced_size.fetch_max(size, Ordering::AcqRel) < size
        };
        if is_larger && self.size_pending.load(Ordering::Acquire) {
            self.host.mark_dirty(&self.inode);
        }
    }
}

impl Table {
    /// Returns the files in memory, each with the size that a sync beginning now reaches.
    pub(crate) fn files_to_sync(&self) -> Vec<(Arc<File>, Reach)> {
        let file_of = |inode: &Arc<Inode>| inode.file.try_lock().and_then(|file| file.clone());
        let files = self.collect(file_of).into_iter();
        files
            .map(|file| {
                let reach = file.sync_begins();
                (file, reach)
            })
            .collect()
    }
}
