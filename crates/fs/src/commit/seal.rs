//! Seals the batches of a group of shards.
//!
//! The group has every shard to which one of its batches is linked. The changes of an inode go into the batch of its own shard, but those of
//! bitmaps go into the batch of the blocks' shard, because its store has the bitmap. If that shard is not in the group, the batch cannot
//! have the inode's size and extents. It must not become durable without them, because a later operation may be in it: a file that was
//! truncated and then renamed would have its new name and its old size after a crash. So the shard joins the group, and the next batches,
//! with the inode, are appended to those that are sealed.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use jericho_format::PAGE_BYTES;
use jericho_format::record::INODES_NAME;
use parking_lot::RwLockWriteGuard;

use super::group::Group;
use super::{Batch, Commits, Cut, Waiter};
use crate::core::Core;
use crate::data::extents::Map;
use crate::error::Error;
use crate::inode::{File, Inode};
use crate::shard::{ShardId, ShardSet};
use crate::store::Change;
use crate::types::{Ino, Kind, SliceId};

/// Seals the batch of a shard and those that must become durable with it. Appends each to the sealed batch that an earlier attempt could
/// not commit, if there is one. `waiters` wait for the batch of `first`; takes out the waiters for which it is not enough.
pub(super) fn seal<'a>(core: &'a Core, first: ShardId, waiters: &mut Vec<Waiter>) -> Group<'a> {
    let mut set = ShardSet::one(first);
    let mut lost = Vec::new();
    // Each further round has more shards.
    loop {
        let mut group = Group::lock(core, set);
        let gates = group.close_gates();
        let larger = group.with_links();
        if !set.contains_all(&larger) {
            set = larger;
            continue;
        }
        let mut held = Sealing::new(&mut group).run();
        drop(gates);
        let mut strays = ShardSet::default();
        for held in &held {
            strays.extend(held.wait_for_next(core));
        }
        for shard in core.shards.of_set(set) {
            shard.commits.room.notify_all();
        }
        lost.extend(held.extract_if(.., |held| held.lost.is_some()));
        if strays != ShardSet::default() {
            // The sealed batches stay in the cuts. A thread that locks the cuts meanwhile finds the links of the next batches.
            set.extend(strays);
            continue;
        }
        group.refused = refuse(core, &lost, waiters);
        postpone(&core.shards.get(first).commits, &held, waiters);
        let data = &mut group.data;
        waiters.iter().for_each(|waiter| data.extend(waiter.data));
        return group;
    }
}

impl<'a> Group<'a> {
    /// Closes the gates, so that no operation changes the group's batches.
    fn close_gates(&self) -> Vec<RwLockWriteGuard<'a, ()>> {
        let shards = self.core.shards.of_set(self.set);
        shards.map(|shard| shard.commits.gate.write()).collect()
    }

    /// Returns the shards of the group, and those to which a batch of the group is linked. The gates are closed.
    fn with_links(&self) -> ShardSet {
        let mut set = self.set;
        for (shard, cut) in &self.cuts {
            set.extend(cut.links);
            set.extend(self.core.shards.get(*shard).commits.batch.lock().links);
        }
        set
    }
}

/// An inode whose changes the batch does not have, or only in part.
struct Held {
    inode: Arc<Inode>,
    /// The shards outside of the group with which the inode's batch must be linked.
    strays: ShardSet,
    /// Whether the batch was to remove the inode.
    is_dead: bool,
    /// The failure that ended the changes of such a shard. No batch can have the inode's changes.
    lost: Option<Error>,
}

impl Held {
    /// Puts the inode into the next batch. Returns the shards that this batch needs and the sealed one did not have.
    fn wait_for_next(&self, core: &Core) -> ShardSet {
        let commits = core.commits_of(self.inode.ino);
        // If the changes of the inode's own shard have ended, a link would end those of the shards that the inode needs, too.
        if self.lost.is_some() || commits.failure().is_err() {
            if self.is_dead {
                // The inode stays an orphan, and a later mount removes it.
                core.leaving.remove(&[self.inode.ino]);
            }
            return ShardSet::default();
        }
        if self.strays != ShardSet::default() {
            commits.link(self.strays);
            // So a sync of a directory commits the next batch. No thread seals it while the cut is locked.
            let shard = core.shards.map().of_ino(self.inode.ino);
            (core.shared_flushes.operations).note(shard, commits.seq());
        }
        match self.is_dead {
            true => commits.push_dead(self.inode.clone()),
            false => core.mark_dirty(&self.inode),
        }
        self.strays
    }
}

/// The sealing of a group's batches, while the gates are closed.
struct Sealing<'s, 'a> {
    core: &'a Core,
    group: &'s mut Group<'a>,
    held: Vec<Held>,
}

impl<'s, 'a> Sealing<'s, 'a> {
    fn new(group: &'s mut Group<'a>) -> Sealing<'s, 'a> {
        Sealing {
            core: group.core,
            group,
            held: Vec::new(),
        }
    }

    /// Seals all batches. Returns the inodes that wait for the next ones.
    fn run(mut self) -> Vec<Held> {
        for at in 0..self.group.cuts.len() {
            let batch = self.begin(at);
            let id = self.group.cuts[at].0;
            let inodes = &self.core.shards.get(id).inodes;
            let count = inodes.sealed();
            for inode in batch.dead {
                self.bury(at, inode);
            }
            for inode in batch.dirty {
                self.snapshot(at, inode);
            }
            let cut = &mut self.group.cuts[at].1;
            if inodes.sealed() != count {
                cut.changes
                    .push(Change::PutValue(INODES_NAME, inodes.sealed()));
            }
            // While the gate is closed, so that an image is in the batch that has its extent.
            let logged = self.core.allocator.logged_of(id);
            cut.changes.extend(logged.take_changes());
        }
        self.held
    }

    /// Takes the current batch of a shard, and gives the next one its number.
    fn begin(&mut self, at: usize) -> Batch {
        let (id, cut) = &mut self.group.cuts[at];
        let commits = &self.core.shards.get(*id).commits;
        let mut batch = std::mem::take(&mut *commits.batch.lock());
        commits.weight.store(0, Ordering::Relaxed);
        cut.seq = commits.seq.load(Ordering::Acquire);
        commits.seq.store(cut.seq + 1, Ordering::Release);
        cut.changes.append(&mut batch.changes);
        cut.xattrs.append(&mut batch.xattrs);
        // All shards of the group, also those that only another batch names: if there is no room, the batches stay together.
        cut.links.extend(self.group.set);
        batch
    }

    /// Returns the shards of these slices that are outside of the group.
    fn strays(&self, slices: impl Iterator<Item = SliceId>) -> ShardSet {
        let map = self.core.shards.map();
        if map.count() == 1 {
            return ShardSet::default();
        }
        let shards = slices.map(|slice| map.of_slice(slice));
        shards
            .filter(|shard| !self.group.set.contains(*shard))
            .collect()
    }

    /// Returns the failure that ended the changes of one of these shards, if there is one.
    fn failure_of(&self, set: ShardSet) -> Option<Error> {
        let mut shards = self.core.shards.of_set(set);
        shards.find_map(|shard| shard.commits.failure().err())
    }

    fn cut(&mut self, at: usize) -> &mut Cut {
        &mut self.group.cuts[at].1
    }

    /// Moves the changes of bitmaps, from change `from` of the batch at `at` on, to the batches of the blocks' shards.
    fn route(&mut self, at: usize, from: usize) {
        let map = self.core.shards.map();
        if self.group.cuts.len() == 1 {
            return;
        }
        let own = self.group.cuts[at].0;
        let is_foreign = |change: &mut Change| match change {
            Change::Use(blocks) | Change::Free(blocks) => map.of_slice(blocks.slice) != own,
            _ => false,
        };
        let changes = &mut self.cut(at).changes;
        let foreign: Vec<Change> = changes.extract_if(from.., is_foreign).collect();
        for change in foreign {
            let (Change::Use(blocks) | Change::Free(blocks)) = &change else {
                continue;
            };
            let shard = map.of_slice(blocks.slice);
            // The group has the shard: `strays` was empty.
            if let Some((_, cut)) = self.group.cuts.iter_mut().find(|(id, _)| *id == shard) {
                cut.changes.push(change);
            }
        }
    }

    /// Writes an inode's state into the batch of its shard. The batch keeps the committed size and extents if a truncation is in
    /// progress, or if the extents change blocks of a shard outside of the group. The inode then waits for the next batch. If that
    /// shard has failed, no batch gets the size and the extents.
    fn snapshot(&mut self, at: usize, inode: Arc<Inode>) {
        let (seq, from) = (self.cut(at).seq, self.cut(at).changes.len());
        // Before `dirty` is cleared: a sync that finds the inode clean must find that it is in this batch, which is not durable.
        inode.included_in.store(seq, Ordering::Release);
        // Before its state is read: a change from here on puts the inode into the next batch.
        inode.dirty.store(false, Ordering::Release);
        let mut meta = inode.meta.write();
        if meta.buried {
            return;
        }
        let file = match inode.kind {
            Kind::File => inode.file.lock().clone(),
            _ => None,
        };
        let mut size = meta.rec.size;
        let mut strays = ShardSet::default();
        let mut lost = None;
        let mut is_held = false;
        if let Some(file) = &file {
            if meta.dead {
                size = meta.committed_size;
            } else if file.is_in_truncation() {
                size = meta.committed_size;
                is_held = true;
            } else {
                // After a truncation since the last batch, the committed size counts bytes that are gone. `synced_size` does not.
                let synced = file.synced_size.load(Ordering::Acquire);
                size = durable_size(file, meta.committed_size.min(synced), size);
                file.synced_size.fetch_max(size, Ordering::AcqRel);
                // After the size: a page that is clean by then has its extent in the map.
                let mut map = file.map.write();
                // Otherwise the batch describes no data.
                if map.has_changes() || size != meta.committed_size || !meta.stored {
                    let data = map.shards();
                    lost = self.failure_of(data);
                    if lost.is_none() {
                        strays = self.differences(at, &inode, &mut map);
                        self.cut(at).data.extend(data);
                    }
                }
                drop(map);
                is_held = lost.is_some() || strays != ShardSet::default();
                if is_held {
                    size = meta.committed_size;
                }
            }
            meta.rec.blocks = file.map.read().stored_blocks();
        }
        let mut rec = meta.rec.clone();
        rec.size = size;
        let cut = self.cut(at);
        cut.changes.push(Change::PutInode(inode.ino, rec));
        if file.is_some() {
            cut.files.push(inode.clone());
        }
        meta.committed_size = size;
        if !meta.stored {
            self.core.shards.of_ino(inode.ino).inodes.enters();
        }
        meta.stored = true;
        self.hold_images(inode.ino, is_held || meta.dead);
        drop(meta);
        self.route(at, from);
        if is_held {
            self.held.push(Held {
                inode,
                strays,
                is_dead: false,
                lost,
            });
        }
    }

    /// Has the images of a file's pages wait if the batch leaves the file's checksums as they were.
    fn hold_images(&self, ino: Ino, is_held: bool) {
        if self.core.has_checksums() {
            let shard = self.core.shards.map().of_ino(ino);
            let logged = self.core.allocator.logged_of(shard);
            logged.hold(ino, is_held);
        }
    }

    /// Adds the changes of a file's extents to the batch, unless they need shards outside of the group. Returns these shards.
    fn differences(&mut self, at: usize, inode: &Inode, map: &mut Map) -> ShardSet {
        let strays = self.strays(map.changed_slices());
        if map.has_changes() && strays == ShardSet::default() {
            let cut = self.cut(at);
            let of_batch = (inode.ino, cut.seq);
            map.differences(of_batch, &mut cut.changes, &mut cut.freed);
        }
        strays
    }

    /// Adds the removal of an inode to the batch of its shard. If the inode has blocks of a shard outside of the group, it waits.
    fn bury(&mut self, at: usize, inode: Arc<Inode>) {
        let from = self.cut(at).changes.len();
        let ino = inode.ino;
        let mut meta = inode.meta.write();
        let file = inode.file.lock().clone();
        let mut map = file.as_ref().map(|file| file.map.write());
        let strays = match &map {
            Some(map) => self.strays(map.stored_slices()),
            None => ShardSet::default(),
        };
        self.hold_images(ino, strays != ShardSet::default());
        if strays != ShardSet::default() {
            drop((map, meta));
            return self.held.push(Held {
                inode,
                strays,
                is_dead: true,
                lost: self.failure_of(strays),
            });
        }
        if let Some(map) = &mut map {
            let allocator = &self.core.allocator;
            let cut = self.cut(at);
            let of_batch = (ino, cut.seq);
            map.remove_all(of_batch, allocator, &mut cut.changes, &mut cut.freed);
        }
        let inodes = &self.core.shards.of_ino(ino).inodes;
        let cut = self.cut(at);
        for name in meta.xattrs.take().unwrap_or_default().into_keys() {
            cut.changes.push(Change::DelXattr(ino, name));
        }
        if meta.stored {
            cut.changes.push(Change::DelInode(ino));
            inodes.leaves();
        }
        cut.changes.push(Change::DelOrphan(ino));
        cut.dead.push(ino);
        meta.buried = true;
        inode.included_in.store(cut.seq, Ordering::Release);
        drop(meta);
        self.route(at, from);
    }
}

/// Takes out the waiters whose file's changes no batch can have, or whose data is on a failed device. Returns them with the reason.
fn refuse(core: &Core, held: &[Held], waiters: &mut Vec<Waiter>) -> Vec<(Waiter, Error)> {
    let mut refused = Vec::new();
    for waiter in std::mem::take(waiters) {
        let is = |inode: &Arc<Inode>| held.iter().find(|held| Arc::ptr_eq(&held.inode, inode));
        let lost = waiter.inode.as_ref().and_then(is);
        let lost = lost.and_then(|held| held.lost.clone());
        let mut data = core.shards.of_set(waiter.data);
        let failure = || data.find_map(|shard| shard.commits.failure().err());
        match lost.or_else(failure) {
            Some(error) => refused.push((waiter, error)),
            None => waiters.push(waiter),
        }
    }
    refused
}

/// Takes out the waiters whose file's changes are not in this batch: they wait for a later one.
fn postpone(commits: &Commits, held: &[Held], waiters: &mut Vec<Waiter>) {
    // Declared before the lock, so that the files are dropped after it is released.
    let files: Vec<_> = waiters
        .iter()
        .map(|waiter| waiter.inode.as_ref()?.file.lock().clone())
        .collect();
    let mut control = commits.control.lock();
    for (waiter, file) in std::mem::take(waiters).into_iter().zip(&files) {
        let is = |inode: &Arc<Inode>| held.iter().any(|held| Arc::ptr_eq(&held.inode, inode));
        if file.as_ref().is_some_and(|file| file.is_in_truncation()) {
            // Under the lock, so that the end of the truncation finds the waiter there (`released`).
            control.postponed.push(waiter);
        } else if waiter.inode.as_ref().is_some_and(is) {
            // The truncation ended after the batch was sealed. The next batch has the file.
            control.waiters.push(waiter);
        } else {
            waiters.push(waiter);
        }
    }
}

/// Returns the part of a file's size that the batch may have: all of it, or up to the first page beyond the committed size whose
/// newest bytes are only in memory. A sync that has ended raises the limit to `synced_size`.
fn durable_size(file: &File, committed: u64, size: u64) -> u64 {
    if size <= committed {
        file.size_pending.store(false, Ordering::Release);
        return size;
    }
    // Before the question below: a write-back that ends from here on finds the flag and marks the inode dirty (`write_back_ended`).
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
