//! A group of shards whose batches become durable together.
//!
//! Most groups have one shard. A group has more after an operation that changed several shards at once. A thread locks the sealed
//! batches of all shards of a group before it commits the group.

use std::sync::atomic::Ordering;

use jericho_metadata::errno::ENOSPC;
use jericho_metadata::shard::{ShardId, ShardSet};
use jericho_metadata::store::{Change, Prepared, Requirement};
use parking_lot::MutexGuard;

use super::{Cut, Waiter};
use crate::core::Core;
use crate::error::{Error, Result};
use crate::types::{Ino, SliceId};

/// Most overlay entries that are dropped under one hold of a directory's lock.
const SETTLE_ENTRIES: usize = 128;

/// The sealed batches of a group, locked.
pub(super) struct Group<'a> {
    pub core: &'a Core,
    pub set: ShardSet,
    /// In the order of the shards.
    pub cuts: Vec<(ShardId, MutexGuard<'a, Cut>)>,
    /// Further shards whose data must be durable, because waiters need it.
    pub data: ShardSet,
    /// Waiters that no batch can serve, each with the reason.
    pub refused: Vec<(Waiter, Error)>,
}

impl Drop for Group<'_> {
    /// Ends the changes of all shards of the group if the thread panics: a batch may be half sealed, or the group durable in part.
    fn drop(&mut self) {
        for shard in self.core.shards.of_set(self.set) {
            shard.commits.fail_if_panicking();
        }
    }
}

impl<'a> Group<'a> {
    /// Locks the sealed batches of these shards: waits for other threads that commit their batches.
    pub fn lock(core: &'a Core, set: ShardSet) -> Group<'a> {
        let lock = |id| (id, core.shards.get(id).commits.cut.lock());
        let cuts = set.iter().map(lock).collect();
        Group {
            core,
            set,
            cuts,
            data: ShardSet::default(),
            refused: Vec::new(),
        }
    }

    /// Makes the data that waiters need besides the batches durable. Takes out the waiters whose data is on a failed device.
    pub fn flush_for(&mut self, waiters: &mut Vec<Waiter>) {
        if flush(self.core, self.data).is_err() {
            self.refused.extend(take_lost(self.core, waiters));
        }
    }

    /// Makes the sealed batches durable, after the data that they describe. After ENOSPC they stay sealed, and none is durable. Any other
    /// error ends the changes of all shards of the group, as does ENOSPC if a store has failed: its journal may have a part of a batch.
    pub fn commit(&mut self) -> Result<()> {
        let core = self.core;
        let mut shards = core.shards.of_set(self.set);
        if let Err(error) = shards.try_for_each(|shard| shard.commits.failure()) {
            // The other batches are linked to the one that cannot become durable.
            core.end_changes(self.set, &error);
            return Err(error);
        }
        let mut data = self.set;
        self.cuts.iter().for_each(|(_, cut)| data.extend(cut.data));
        if let Err(error) = flush(core, data) {
            // The batches may describe data that is lost.
            core.end_changes(self.set, &error);
            return Err(error);
        }
        if let Err(error) = self.append() {
            return Err(self.could_not_append(error));
        }
        for (id, cut) in &mut self.cuts {
            became_durable(core, *id, std::mem::take(&mut **cut));
        }
        Ok(())
    }

    /// Keeps the sealed batches for later if a store only has no room, and ends the changes of the group otherwise. Returns the error.
    fn could_not_append(&self, mut error: Error) -> Error {
        let core = self.core;
        let is_full = error.errno() == ENOSPC.errno();
        let failed = is_full.then(|| failure_of_stores(core, self.set)).flatten();
        if is_full && failed.is_none() {
            for shard in core.shards.of_set(self.set) {
                shard.commits.note_room(Some(&error));
                shard.commits.try_later();
            }
        } else {
            // A lack of room ends nothing by itself.
            error = failed.unwrap_or(error);
            core.end_changes(self.set, &error);
        }
        error
    }

    /// Writes the batches to the stores. After a crash all of them are there or none.
    fn append(&self) -> Result<()> {
        let store = |id: ShardId| &self.core.shards.get(id).store;
        let batches = self.cuts.iter().filter(|(_, cut)| !cut.changes.is_empty());
        let mut batches: Vec<_> = batches.collect();
        if let [(id, cut)] = batches[..] {
            return store(*id).commit(&cut.changes);
        }
        let mut prepared = Vec::with_capacity(batches.len());
        for (id, cut) in batches.drain(..) {
            let store = store(*id);
            prepared.push(Linked::of(*id, store.prepare(&cut.changes)?)?);
        }
        if let Err(error) = append_linked(&mut prepared) {
            for linked in prepared {
                linked.batch.abandon(&error);
            }
            return Err(error);
        }
        for linked in prepared {
            linked.batch.publish();
        }
        Ok(())
    }
}

/// Returns why a store of these shards has failed: an error that ends its changes until the next mount, if there is one.
fn failure_of_stores(core: &Core, set: ShardSet) -> Option<Error> {
    let mut first = None;
    for error in core
        .shards
        .of_set(set)
        .filter_map(|shard| shard.store.check().err())
    {
        error.note_in(&mut first);
    }
    first
}

/// A prepared batch of a group.
struct Linked<'a> {
    batch: Prepared<'a>,
    /// The requirement by which the other batches name this one. `None`: this one changes nothing.
    own: Option<Requirement>,
}

impl<'a> Linked<'a> {
    fn of(shard: ShardId, batch: Prepared<'a>) -> Result<Linked<'a>> {
        // A shard has the number of its store.
        let own = batch.as_requirement(shard.index() as u16)?;
        Ok(Linked { batch, own })
    }

    /// Makes the batch durable. It counts only with all others.
    fn append(&mut self, all: &[Requirement]) -> Result<()> {
        let others = all.iter().filter(|one| self.own != Some(**one)).copied();
        self.batch.append(&others.collect::<Vec<_>>())
    }
}

/// Makes batches durable that count only together: those for the journals at the same time, then the one for redb, if there is one.
/// No other batch is appended to these stores before all are durable or one has failed, so a recovery has to check only the
/// requirements of the last batch of each journal.
fn append_linked(batches: &mut [Linked<'_>]) -> Result<()> {
    let all: Vec<Requirement> = batches.iter().filter_map(|linked| linked.own).collect();
    let (mut for_redb, mut for_journals): (Vec<_>, Vec<_>) = batches
        .iter_mut()
        .partition(|linked| linked.batch.is_for_redb());
    if for_redb.len() > 1 {
        // Each of them would count without the other. Later a checkpoint, or a removal, makes room in one of the regions.
        return Err(ENOSPC);
    }
    let all = &all[..];
    let results = std::thread::scope(|scope| {
        let mut journals = for_journals.iter_mut();
        let first = journals.next();
        let others: Vec<_> = journals
            .map(|linked| scope.spawn(move || linked.append(all)))
            .collect();
        let first = first.map(|linked| linked.append(all));
        let others = others.into_iter().map(|thread| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        first.into_iter().chain(others).collect::<Vec<_>>()
    });
    results.into_iter().collect::<Result<()>>()?;
    for_redb
        .iter_mut()
        .try_for_each(|linked| linked.append(all))
}

/// Takes out the waiters with data in a shard whose changes have ended. Returns them with the reason.
pub(super) fn take_lost(core: &Core, waiters: &mut Vec<Waiter>) -> Vec<(Waiter, Error)> {
    let mut lost = Vec::new();
    for waiter in std::mem::take(waiters) {
        let mut shards = core.shards.of_set(waiter.data);
        match shards.find_map(|shard| shard.commits.failure().err()) {
            Some(error) => lost.push((waiter, error)),
            None => waiters.push(waiter),
        }
    }
    lost
}

/// Makes every write to the slices of these shards durable that ended before the call. See `Core::flush`.
pub(super) fn flush(core: &Core, data: ShardSet) -> Result<()> {
    core.flush(core.devices_of(data))
}

/// Has all parts take note that a sealed batch is durable and visible to readers. The caller has the shard's sealed batch locked.
pub(super) fn became_durable(core: &Core, id: ShardId, cut: Cut) {
    let shard = core.shards.get(id);
    let logged = core.allocator.logged_of(id);
    shard.commits.note_room(None);
    logged.changes_durable();
    shard.checkpoints.note(shard.store.checkpoint_need());
    if logged.is_half_full() {
        shard.checkpoints.note_settlement();
    }
    settle(core, id, cut);
}

/// Drops from memory what a shard's store has since its batch is durable, and releases the blocks that the batch freed.
fn settle(core: &Core, id: ShardId, cut: Cut) {
    let shard = core.shards.get(id);
    shard.commits.durable.store(cut.seq, Ordering::Release);
    core.table.set_durable(id, cut.seq);
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
        core.leaving.freed(id.index() as SliceId);
    }
    if core.allocator.has_freed() {
        core.discards.wake();
    }
    for inode in cut.files {
        if core.has_checksums() {
            let file = inode.file.lock().clone();
            file.inspect(|file| file.map.write().settle_sums(cut.seq));
        }
        inode.give_up_file(cut.seq);
    }
    for ino in &cut.dead {
        core.table.remove(*ino);
    }
    core.leaving.remove(&cut.dead);
    shard.inodes.removed(cut.dead.len() as u64);
    core.table.trim(id);
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

#[cfg(test)]
mod tests;
