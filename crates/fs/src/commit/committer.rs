//! How a batch is sealed and made durable, and the thread that does it when no caller does (`leader`).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use jericho_format::PAGE_BYTES;
use jericho_format::record::INODES_NAME;

use super::{Commits, Cut, Waiter};
use crate::core::Core;
use crate::errno::{ENOSPC, ESHUTDOWN};
use crate::error::{Error, Result};
use crate::inode::{File, Inode};
use crate::numbers::InodeCount;
use crate::store::Change;
use crate::types::{Ino, Kind};

/// Overlay entries dropped under one hold of a directory's lock.
const SETTLE_ENTRIES: usize = 128;

/// Runs the committer's thread.
pub fn run(core: &Core) {
    while let Some(round) = core.commits.next() {
        round.run(core);
    }
    let mut control = core.commits.control.lock();
    // A caller that leads may still postpone waiters.
    while control.is_led {
        core.commits.ended.wait(&mut control);
    }
    let mut left = std::mem::take(&mut control.waiters);
    left.append(&mut control.postponed);
    drop(control);
    for waiter in left {
        (waiter.done)(Err(ESHUTDOWN));
    }
}

/// Seals the batch and appends it to a batch that an earlier attempt could not commit.
pub(super) fn take_batch(core: &Core, cut: &mut Cut, waiters: &mut Vec<Waiter>) {
    let commits = &core.commits;
    let gate = commits.gate.write();
    let mut batch = std::mem::take(&mut *commits.batch.lock());
    commits.weight.store(0, Ordering::Relaxed);
    cut.seq = commits.seq.load(Ordering::Acquire);
    commits.seq.store(cut.seq + 1, Ordering::Release);
    cut.changes.append(&mut batch.changes);
    cut.xattrs.append(&mut batch.xattrs);
    let inodes = core.inodes.sealed();
    for inode in batch.dead {
        bury(core, cut, &inode);
    }
    let mut held = Vec::new();
    for inode in batch.dirty {
        // Before `dirty` is cleared: a sync that finds the inode clean must find that this batch, which is not durable, has it.
        inode.included_in.store(cut.seq, Ordering::Release);
        // Before its state is read: a change from here on puts it into the next batch.
        inode.dirty.store(false, Ordering::Release);
        if !snapshot(&core.inodes, cut, &inode) {
            held.push(inode);
        }
    }
    if core.inodes.sealed() != inodes {
        let inodes = core.inodes.sealed();
        cut.changes.push(Change::PutValue(INODES_NAME, inodes));
    }
    // In the gate: an image is in the batch that has its extent.
    cut.changes.extend(core.allocator.logged().take_changes());
    drop(gate);
    for inode in &held {
        core.mark_dirty(inode);
    }
    postpone(commits, &held, waiters);
    commits.room.notify_all();
}

/// Takes out the waiters for whom this batch is not enough, because a truncation held their files' extents back.
fn postpone(commits: &Commits, held: &[Arc<Inode>], waiters: &mut Vec<Waiter>) {
    // Dropped after the lock is released.
    let files: Vec<_> = waiters
        .iter()
        .map(|waiter| waiter.inode.as_ref()?.file.lock().clone())
        .collect();
    let mut control = commits.control.lock();
    for (waiter, file) in std::mem::take(waiters).into_iter().zip(&files) {
        let is = |inode: &Arc<Inode>| held.iter().any(|held| Arc::ptr_eq(held, inode));
        if file.as_ref().is_some_and(|file| file.is_in_truncation()) {
            // Under the lock: when the truncation ends, it finds the waiter there (`released`).
            control.postponed.push(waiter);
        } else if waiter.inode.as_ref().is_some_and(is) {
            // The truncation ended after the batch was sealed. The next batch has the file.
            control.waiters.push(waiter);
        } else {
            waiters.push(waiter);
        }
    }
}

/// Writes an inode's state into the batch. Returns false if a truncation is in progress: the batch then keeps the committed size
/// and extents.
fn snapshot(inodes: &InodeCount, cut: &mut Cut, inode: &Arc<Inode>) -> bool {
    let mut meta = inode.meta.write();
    if meta.buried {
        return true;
    }
    let mut size = meta.rec.size;
    let mut whole = true;
    let file = if inode.kind == Kind::File {
        inode.file.lock().clone()
    } else {
        None
    };
    if let Some(file) = &file {
        if meta.dead {
            size = meta.committed_size;
        } else if file.is_in_truncation() {
            size = meta.committed_size;
            whole = false;
        } else {
            // After a truncation since the last batch, the committed size counts bytes that are gone. `synced_size` does not.
            let synced = file.synced_size.load(Ordering::Acquire);
            size = durable_size(file, meta.committed_size.min(synced), size);
            file.synced_size.fetch_max(size, Ordering::AcqRel);
            // After the size: a page that is clean by then has its extent in the map.
            let mut map = file.map.write();
            if map.has_changes() {
                map.differences(inode.ino, &mut cut.changes, &mut cut.freed);
            }
        }
    }
    if let Some(file) = &file {
        meta.rec.blocks = file.map.read().stored_blocks();
    }
    let mut rec = meta.rec.clone();
    rec.size = size;
    cut.changes.push(Change::PutInode(inode.ino, rec));
    if file.is_some() {
        cut.files.push(inode.clone());
    }
    meta.committed_size = size;
    if !meta.stored {
        inodes.enters();
    }
    meta.stored = true;
    whole
}

/// Returns the part of a file's size that the batch may have: all of it, or up to the first page beyond the committed size whose
/// newest bytes are only in memory. A sync that has ended raises the limit to `synced_size`.
fn durable_size(file: &File, committed: u64, size: u64) -> u64 {
    if size <= committed {
        file.size_pending.store(false, Ordering::Release);
        return size;
    }
    // Before asking: a write-back that ends from here on finds it set and brings the inode back (`write_back_ended`).
    file.size_pending.store(true, Ordering::Release);
    // The cache keeps a page dirty until the map records its new place. A page that has blocks and is not dirty was
    // never written: it was reserved ahead and is now a gap, so it reads as zeros.
    let Some(page) = file.first_dirty(committed / PAGE_BYTES) else {
        file.size_pending.store(false, Ordering::Release);
        return size;
    };
    let limit = (page * PAGE_BYTES)
        .max(committed)
        .max(file.synced_size.load(Ordering::Acquire));
    if limit >= size {
        file.size_pending.store(false, Ordering::Release);
    }
    limit.min(size)
}

/// Adds the removal of an inode to the batch.
fn bury(core: &Core, cut: &mut Cut, inode: &Arc<Inode>) {
    let mut meta = inode.meta.write();
    let ino = inode.ino;
    let file = inode.file.lock().clone();
    if let Some(file) = file {
        let mut map = file.map.write();
        map.remove_all(ino, &core.allocator, &mut cut.changes, &mut cut.freed);
    }
    for name in meta.xattrs.take().unwrap_or_default().into_keys() {
        cut.changes.push(Change::DelXattr(ino, name));
    }
    if meta.stored {
        cut.changes.push(Change::DelInode(ino));
        core.inodes.leaves();
    }
    cut.changes.push(Change::DelOrphan(ino));
    cut.dead.push(ino);
    meta.buried = true;
    inode.included_in.store(cut.seq, Ordering::Release);
}

pub(super) fn make_durable(core: &Core, cut: &mut Cut, commit: bool) -> Result<()> {
    core.commits.failure()?;
    if let Err(error) = core.flushes.flush_all().map_err(Error::from) {
        core.commits.flush_failed(&error);
        return Err(error);
    }
    if !commit {
        return Ok(());
    }
    match core.store.commit(&cut.changes) {
        Ok(()) => {
            core.commits.note_room(None);
            core.allocator.logged().changes_durable();
            core.checkpoints.note(core.store.checkpoint_need());
            if core.allocator.logged().is_half_full() {
                core.checkpoints.note_settlement();
            }
            settle(core, std::mem::take(cut));
            Ok(())
        }
        Err(error) if error.errno() == ENOSPC.errno() => {
            core.commits.note_room(Some(&error));
            core.commits.try_later();
            Err(error)
        }
        Err(error) => {
            tracing::error!(
                "{error}; no more changes are accepted until the volume is mounted again"
            );
            core.commits.fail(error.clone());
            Err(error)
        }
    }
}

/// Drops from memory what the store has, now that the batch is durable.
fn settle(core: &Core, cut: Cut) {
    core.commits.durable.store(cut.seq, Ordering::Release);
    core.table.set_durable(cut.seq);
    let mut changes = cut.changes.into_iter().peekable();
    while let Some(change) = changes.next() {
        let Some((dir, hash, name)) = entry_of(change) else {
            continue;
        };
        let Some(inode) = core.table.get(dir) else {
            continue;
        };
        let mut meta = inode.meta.write();
        meta.overlay.settle(hash, name, cut.seq);
        for _ in 1..SETTLE_ENTRIES {
            let Some(change) = changes.next_if(|c| directory_of(c) == Some(dir)) else {
                break;
            };
            if let Some((_, hash, name)) = entry_of(change) {
                meta.overlay.settle(hash, name, cut.seq);
            }
        }
    }
    for inode in cut.xattrs {
        let mut meta = inode.meta.write();
        for xattr in meta.xattrs.iter_mut().flatten().map(|(_, xattr)| xattr) {
            if xattr.seq <= cut.seq {
                xattr.value = None;
            }
        }
    }
    let has_freed = !cut.freed.is_empty();
    for blocks in cut.freed {
        core.allocator.release_committed(blocks);
    }
    if has_freed {
        core.leaving.freed();
    }
    if core.allocator.has_freed() {
        core.discards.wake();
    }
    for inode in cut.files {
        inode.give_up_file(cut.seq);
    }
    for ino in &cut.dead {
        core.table.remove(*ino);
    }
    core.leaving.remove(&cut.dead);
    core.inodes.removed(cut.dead.len() as u64);
    core.table.trim();
}

fn directory_of(change: &Change) -> Option<Ino> {
    match change {
        Change::PutEntry { dir, .. } | Change::DelEntry { dir, .. } => Some(*dir),
        _ => None,
    }
}

fn entry_of(change: Change) -> Option<(Ino, u64, Box<[u8]>)> {
    match change {
        Change::PutEntry {
            dir, hash, name, ..
        }
        | Change::DelEntry { dir, hash, name } => Some((dir, hash, name)),
        _ => None,
    }
}
