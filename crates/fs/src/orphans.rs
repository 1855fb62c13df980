//! The files without a name that the last mount has left: they were open, or their removal had not ended.
//!
//! A mount removes small ones before it ends. A thread removes the others afterwards, one after the other (`remove_all`), so that a
//! mount does not take longer with a removed file of very many extents.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use jericho_metadata::store::Change;

use crate::core::Core;
use crate::error::Result;
use crate::types::{Ino, Kind};

/// A mount removes at most this many files before it ends, with at most this many blocks together. So they have as many extents at most.
const FILES_MAX: usize = 1024;
const BLOCKS_MAX: u64 = 65_536;

/// Removes the small orphans of the stores that are present. Returns the others. A write that finds no space waits for them.
pub(crate) fn remove_small(core: &Arc<Core>) -> Result<Vec<Ino>> {
    let stores = core.shards.iter().map(|shard| &shard.store);
    let present = stores.filter(|store| store.check().is_ok());
    let orphans = present.map(|store| store.orphans());
    let orphans = orphans.collect::<Result<Vec<_>>>()?.concat();
    if orphans.is_empty() {
        return Ok(Vec::new());
    }
    tracing::info!(
        "removing {} files that were open without a name",
        orphans.len()
    );
    let (mut files, mut blocks, mut later) = (0, 0, Vec::new());
    for ino in orphans {
        let Some(record) = core.store_of(ino).inode(ino)? else {
            core.commits_of(ino).push(Change::DelOrphan(ino));
            continue;
        };
        files += 1;
        blocks += record.blocks;
        if files <= FILES_MAX && blocks <= BLOCKS_MAX {
            remove(core, ino)?;
            continue;
        }
        blocks -= record.blocks;
        if record.kind == Kind::File {
            core.leaving.add(ino);
        }
        later.push(ino);
    }
    // A slice that takes no changes does not prevent the mount.
    core.commit_working()?;
    Ok(later)
}

/// Removes orphans until `must_end` is set. Few of them are in memory at a time.
pub(crate) fn remove_all(core: &Arc<Core>, orphans: &[Ino], must_end: &AtomicBool) {
    for ino in orphans {
        let commits = core.commits_of(*ino);
        commits.wait_for_removals();
        if must_end.load(Ordering::Acquire) || core.alive().is_err() {
            return;
        }
        if commits.failure().is_err() {
            core.leaving.remove(&[*ino]);
            continue;
        }
        if let Err(error) = remove(core, *ino) {
            core.stays_orphan(*ino, &error);
        }
    }
}

/// Removes the orphans of stores that have come back. Like a mount, but while other threads change the slices: `orphans` were read before that.
pub(crate) fn remove_returned(core: &Arc<Core>, orphans: Vec<Ino>, must_end: &AtomicBool) {
    let mut found = Vec::new();
    for ino in orphans {
        match core.store_of(ino).inode(ino) {
            Ok(Some(record)) => {
                if record.kind == Kind::File {
                    core.leaving.add(ino);
                }
                found.push(ino);
            }
            // Without its row there is nothing to remove but the note.
            Ok(None) => {
                if let Ok(_gates) = core.begin(&[ino]) {
                    core.commits_of(ino).push(Change::DelOrphan(ino));
                }
            }
            Err(error) => core.stays_orphan(ino, &error),
        }
    }
    remove_all(core, &found, must_end);
}

fn remove(core: &Arc<Core>, ino: Ino) -> Result<()> {
    let inode = core.inode(ino)?;
    inode.meta.write().rec.nlink = 0;
    inode.unlinked.store(true, Ordering::Release);
    core.reap(&inode);
    Ok(())
}
