//! fsync and its kin: data to the device, then what is needed to find it again.
//!
//! The data is written back by the cache. Its completion comes in a thread of the slice, which must
//! not wait: it hands the rest to the committer, which flushes the devices and, if the file has metadata
//! that is not durable, commits. All who wait at that moment share one commit.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use jericho_format::PAGE_BYTES;

use super::commit::Waiter;
use super::core::PAGES;
use super::file::{CacheResult, File};
use super::inode::Inode;
use super::table::Table;
use super::{Done, Fs};
use crate::error::Error;
use crate::types::Ino;

impl Fs {
    /// fsync / fdatasync: data written back and flushed, metadata committed (datasync: only what is needed
    /// to read the data). Reports a write-back error not reported to this file yet. `done` may run in
    /// another thread.
    pub fn fsync(&self, file: &Arc<File>, datasync: bool, done: Done) {
        let scope = if datasync { Scope::Data } else { Scope::All };
        self.sync_pages(file, 0..PAGES, scope, done);
    }

    /// Durability of a range only (O_DSYNC, RWF_DSYNC).
    pub fn sync_range(&self, file: &Arc<File>, offset: u64, len: u64, done: Done) {
        let end = offset.saturating_add(len);
        // The size that the range needs may be committed only with all that is before it.
        let synced = file.synced_size.load(Ordering::Acquire);
        let start = if end > synced {
            offset.min(synced)
        } else {
            offset
        };
        let pages = start / PAGE_BYTES..end.div_ceil(PAGE_BYTES);
        self.sync_pages(file, pages, Scope::Range(end), done);
    }

    /// fsync of a directory: commits every namespace change made so far.
    pub fn fsync_dir(&self, ino: Ino, done: Done) {
        let core = &self.core;
        if let Err(error) = core.inode(ino) {
            return done(Err(error));
        }
        if core.options.read_only {
            return done(Ok(()));
        }
        core.commits.enqueue(Waiter {
            inode: None,
            commit: true,
            done,
        });
    }

    fn sync_pages(&self, file: &Arc<File>, pages: Range<u64>, scope: Scope, done: Done) {
        let core = self.core.clone();
        if let Err(error) = core.alive().and_then(|()| core.commits.failure()) {
            return done(Err(error));
        }
        if core.options.read_only {
            return done(Ok(()));
        }
        let (size, cuts) = (file.size(), file.cuts());
        let synced = file.clone();
        let after = move |result: CacheResult| {
            let remembered = synced.take_error();
            let failed = result.err().map(Error::from).or(remembered);
            if let Some(error) = failed {
                return done(Err(error));
            }
            let reached = match &scope {
                Scope::All | Scope::Data => size,
                Scope::Range(end) => size.min(*end),
            };
            synced.note_synced(reached, cuts);
            let inode = synced.inode.clone();
            let commit = match scope {
                Scope::All => inode.is_uncommitted(core.commits.durable()),
                Scope::Data | Scope::Range(_) => needs_metadata(&synced, core.commits.durable()),
            };
            core.commits.enqueue(Waiter {
                inode: Some(inode),
                commit,
                done,
            });
        };
        match file.cache() {
            Some(cache) => cache.sync(&file.object(), pages, Box::new(after)),
            None => after(Ok(())),
        }
    }
}

/// What is synced.
enum Scope {
    All,
    Data,
    /// Up to this byte.
    Range(u64),
}

/// Whether the data of a file could not be read after a crash now: extents or size are not durable. In
/// doubt (a lock is taken: this runs where nobody may wait) it is so.
fn needs_metadata(file: &File, durable: u64) -> bool {
    let inode: &Inode = &file.inode;
    if inode.included_in.load(Ordering::Acquire) > durable {
        return true;
    }
    let size_durable = inode
        .meta
        .try_read()
        .is_some_and(|m| m.committed_size == m.rec.size && m.stored);
    !size_durable || file.map.try_read().is_none_or(|map| map.has_changes())
}

impl File {
    /// Changes whenever pages are taken out of the file.
    pub(super) fn cuts(&self) -> u64 {
        self.cuts.load(Ordering::Acquire)
    }

    /// All pages were written back that were dirty when the file had this size; nothing was taken out
    /// since. So that much may be committed though a page was changed again meanwhile.
    pub(super) fn note_synced(&self, size: u64, cuts: u64) {
        if self.cuts() != cuts || self.hold.load(Ordering::Acquire) > 0 {
            return;
        }
        if self.synced_size.fetch_max(size, Ordering::AcqRel) < size
            && self.size_pending.load(Ordering::Acquire)
        {
            self.core.mark_dirty(&self.inode);
        }
    }
}

impl Table {
    /// Files in memory with their sizes now, to note what a sync of everything reached.
    pub fn files_and_sizes(&self) -> Vec<(Arc<File>, u64, u64)> {
        let file_of = |inode: &Arc<Inode>| inode.file.try_lock().and_then(|file| file.clone());
        self.collect(file_of)
            .into_iter()
            .map(|f| (f.clone(), f.size(), f.cuts()))
            .collect()
    }
}
