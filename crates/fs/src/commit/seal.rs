//! Seals the batches of a group of shards.
//!
//! The group has every shard to which one of its batches is linked. The changes of an inode go into the batch of its own shard, but those of
//! bitmaps go into the batch of the blocks' shard, because its store has the bitmap. If that shard is not in the group, the batch cannot
//! have the inode's size and extents. It must not become durable without them, because a later operation may be in it: a file that was
//! truncated and then renamed would have its new name and its old size after a crash. So the shard joins the group, and the next batches,
//! with the inode, are appended to those that are sealed.
//!
//! A batch takes a bounded number of changes of extents (`Share`). An inode that has more is in several batches, one right after the
//! other. A removed one is an orphan meanwhile, so a mount after a crash goes on with its removal.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use jericho_format::PAGE_BYTES;
use jericho_format::record::INODES_NAME;
use jericho_metadata::logged::LoggedPages;
use jericho_metadata::shard::{ShardId, ShardSet};
use jericho_metadata::store::Change;
use parking_lot::RwLockWriteGuard;

use super::group::{Group, take_lost};
use super::{Batch, Commits, Cut, Left, Needs, Parked, Waiter};
use crate::core::Core;
use crate::data::extents::Map;
use crate::data::share::Share;
use crate::error::Error;
use crate::inode::{File, Inode, Meta};
use crate::types::{Ino, Kind, SliceId};

/// Seals the batch of a shard and those that must become durable with it. Appends each to the sealed batch that an earlier attempt could
/// not commit, if there is one. `waiters` wait for the batch of `first`; takes out the waiters for which it is not enough.
pub(super) fn seal<'a>(core: &'a Core, first: ShardId, waiters: &mut Vec<Waiter>) -> Group<'a> {
    let mut set = ShardSet::one(first);
    let mut lost = Vec::new();
    let (mut is_kept, mut sealed) = (false, ShardSet::default());
    let asked = waiters.iter().filter_map(|waiter| waiter.inode.as_ref());
    let asked: BTreeSet<Ino> = asked.map(|inode| inode.ino).collect();
    // Each further round has more shards.
    loop {
        let mut group = Group::lock(core, set);
        let gates = group.close_gates();
        let larger = group.with_links();
        if !set.contains_all(&larger) {
            set = larger;
            continue;
        }
        let mut shards = core.shards.of_set(set);
        if shards.any(|shard| shard.commits.suspension().is_some()) {
            // The sealed batches stay as they are: one may be in a journal. The commit fails with the suspension.
            return group;
        }
        // Not by an earlier round of this loop.
        let is_old = |id: ShardId, cut: &Cut| !sealed.contains(id) && !cut.changes.is_empty();
        is_kept |= group.cuts.iter().any(|(id, cut)| is_old(*id, cut));
        sealed.extend(set);
        let (mut held, untouched) = Sealing::new(&mut group, &asked).run();
        drop(gates);
        let mut later = Later::of(core, first, &held);
        // Before the others, so that they have their turn first.
        for (shard, left) in untouched {
            if shard == first {
                later.add(&left);
            }
            wait_for_turn(core, shard, left, is_kept);
        }
        let mut strays = ShardSet::default();
        let (had_turn, without): (Vec<&Held>, _) = held.iter().partition(|held| held.had_turn);
        for held in without.into_iter().chain(had_turn) {
            strays.extend(held.wait_for_next(core, is_kept));
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
        postpone(core, first, &group, &later, waiters);
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
    /// The batch has a part of the inode's changes. The first batch that had only a part.
    left_since: Option<u64>,
    /// The batch took some of its changes of extents.
    had_turn: bool,
    /// The shards that the inode's later changes need. Those of changes that are lost, or have only a part in the batch.
    data: ShardSet,
}

impl Held {
    /// Returns an inode whose changes the batch omits.
    fn whole(inode: Arc<Inode>, is_dead: bool, strays: ShardSet, lost: Option<Error>) -> Held {
        Held {
            inode,
            strays,
            is_dead,
            lost,
            left_since: None,
            had_turn: true,
            data: ShardSet::default(),
        }
    }

    /// Returns an inode of which the batch has a part. `since`: the first batch that had not all, if that was before the first part.
    fn part(inode: Arc<Inode>, is_dead: bool, map: &Map, since: Option<u64>) -> Held {
        Held {
            left_since: since.or(map.left_since()),
            data: map.shards(),
            ..Held::whole(inode, is_dead, ShardSet::default(), None)
        }
    }

    /// Puts the inode into the next batch. Returns the shards that this batch needs and the sealed one did not have. `is_kept`: an
    /// earlier batch found no room, so the next one need not come soon.
    fn wait_for_next(&self, core: &Core, is_kept: bool) -> ShardSet {
        let commits = core.commits_of(self.inode.ino);
        if self.lost.as_ref().is_some_and(Error::is_unreachable) && !commits.has_ended() {
            // A later batch may have it. Without a link, which would suspend the changes of the inode's own shard.
            if self.is_dead {
                core.leaving.remove(&[self.inode.ino]);
            }
            commits.park(Parked {
                inode: self.inode.clone(),
                is_dead: self.is_dead,
                data: self.data,
            });
            if !is_suspended(core, self.data) {
                // The shard has come back meanwhile, and `try_parked` may not have seen the inode.
                commits.try_later();
            }
            return ShardSet::default();
        }
        // If the changes of the inode's own shard have ended, a link would end those of the shards that the inode needs, too.
        if self.lost.is_some() || commits.has_ended() {
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
            core.operations.note(shard, commits.seq());
        }
        let (inode, is_dead) = (self.inode.clone(), self.is_dead);
        if let Some(since) = self.left_since {
            let left = Left {
                inode,
                is_dead,
                since,
                data: self.data,
            };
            let shard = core.shards.map().of_ino(self.inode.ino);
            wait_for_turn(core, shard, vec![left], is_kept);
            return ShardSet::default();
        }
        match is_dead {
            true => commits.push_dead(inode),
            false => core.mark_dirty(&inode),
        }
        self.strays
    }
}

/// Puts inodes of a shard, of which the sealed batch had a part or nothing, into the next batch. `is_kept`: as for `wait_for_next`.
fn wait_for_turn(core: &Core, shard: ShardId, left: Vec<Left>, is_kept: bool) {
    let commits = &core.shards.get(shard).commits;
    if commits.has_ended() {
        // The removed ones stay orphans, and a later mount removes them.
        let dead = left.iter().filter(|left| left.is_dead);
        return core
            .leaving
            .remove(&dead.map(|left| left.inode.ino).collect::<Vec<_>>());
    }
    // So the next batch can have a part, whichever blocks it changes. A link to a shard that has failed would end the changes.
    let works = |id: &ShardId| core.shards.get(*id).commits.failure().is_ok();
    let mut data = ShardSet::default();
    left.iter().for_each(|left| data.extend(left.data));
    commits.link(data.iter().filter(works).collect());
    commits.push_left(left, !is_kept);
}

/// Returns the failure that ended the changes of one of these shards, if there is one.
fn failure_of(core: &Core, set: ShardSet) -> Option<Error> {
    let mut shards = core.shards.of_set(set);
    shards.find_map(|shard| shard.commits.failure().err())
}

/// Returns whether a batch can have no changes of blocks in these shards, but may later.
fn is_suspended(core: &Core, set: ShardSet) -> bool {
    failure_of(core, set).is_some_and(|failure| failure.is_unreachable())
}

/// What a batch of one shard has left for later ones.
struct Later {
    /// The files that are not removed.
    files: Vec<Arc<Inode>>,
    /// The first batch that has not all of such a file.
    files_since: Option<u64>,
    /// The same for files that are removed.
    removals_since: Option<u64>,
}

impl Later {
    fn of(core: &Core, shard: ShardId, held: &[Held]) -> Later {
        let of_shard = |held: &&Held| core.shards.map().of_ino(held.inode.ino) == shard;
        let since = |is_dead| {
            let held = held.iter().filter(of_shard);
            let held = held.filter(|held| held.is_dead == is_dead);
            held.filter_map(|held| held.left_since).min()
        };
        Later {
            files: held.iter().map(|held| held.inode.clone()).collect(),
            files_since: since(false),
            removals_since: since(true),
        }
    }

    /// Adds inodes that the batch left as they were.
    fn add(&mut self, left: &[Left]) {
        for left in left {
            let since = match left.is_dead {
                true => &mut self.removals_since,
                false => {
                    self.files.push(left.inode.clone());
                    &mut self.files_since
                }
            };
            *since = Some(since.map_or(left.since, |since| since.min(left.since)));
        }
    }
}

/// What a batch takes of extents: of files with new changes, of files that an earlier batch had in part, and of removals.
struct Shares {
    of_new: Share,
    of_left: Share,
    of_removals: Share,
}

/// The sealing of a group's batches, while the gates are closed.
struct Sealing<'s, 'a> {
    core: &'a Core,
    group: &'s mut Group<'a>,
    /// The inodes for which callers wait.
    asked: &'s BTreeSet<Ino>,
    held: Vec<Held>,
    /// By shard, the inodes for whose changes the shares of its batch did not suffice.
    untouched: Vec<(ShardId, Vec<Left>)>,
}

impl<'s, 'a> Sealing<'s, 'a> {
    fn new(group: &'s mut Group<'a>, asked: &'s BTreeSet<Ino>) -> Sealing<'s, 'a> {
        Sealing {
            core: group.core,
            group,
            asked,
            held: Vec::new(),
            untouched: Vec::new(),
        }
    }

    /// Seals all batches. Returns the inodes that wait for the next ones: those of which the batches have a part, and those that they left
    /// as they were.
    fn run(mut self) -> (Vec<Held>, Vec<(ShardId, Vec<Left>)>) {
        for at in 0..self.group.cuts.len() {
            let batch = self.begin(at);
            let id = self.group.cuts[at].0;
            let inodes = &self.core.shards.get(id).inodes;
            let count = inodes.sealed();
            self.take_inodes(at, batch);
            let cut = &mut self.group.cuts[at].1;
            if inodes.sealed() != count {
                cut.changes
                    .push(Change::PutValue(INODES_NAME, inodes.sealed()));
            }
            // While the gate is closed, so that an image is in the batch that has its extent.
            let logged = self.core.allocator.logged_of(id);
            cut.changes.extend(logged.take_changes());
        }
        (self.held, self.untouched)
    }

    /// Takes the inodes of a batch, as far as its shares suffice. A batch must have the attributes of each inode that has changed. Each other
    /// one waits without a row in the batch, so its length does not depend on their number.
    fn take_inodes(&mut self, at: usize, batch: Batch) {
        let (id, seq) = (self.group.cuts[at].0, self.group.cuts[at].1.seq);
        let Shares {
            mut of_new,
            of_left,
            of_removals,
        } = self.shares(at);
        let mut untouched = Vec::new();
        for inode in batch.dirty {
            self.snapshot_once(at, inode, &mut of_new);
        }
        let mut of_left = of_left.with_rest(&of_new);
        let (removals, files): (Vec<_>, Vec<_>) =
            batch.left.into_iter().partition(|left| left.is_dead);
        for left in files {
            // `dirty` may have had it, too.
            let is_taken = !left.inode.dirty.load(Ordering::Acquire);
            let is_touched = left.inode.touched.load(Ordering::Acquire);
            if is_taken || is_touched || !of_left.is_used_up() {
                self.snapshot_once(at, left.inode, &mut of_left);
            } else if !left.inode.meta.try_read().is_some_and(|meta| meta.dead) {
                untouched.push(left);
            }
        }
        let mut of_removals = of_removals.with_rest(&of_left);
        for left in removals {
            if of_removals.is_used_up() {
                untouched.push(left);
            } else {
                self.bury(at, left.inode, Some(left.since), &mut of_removals);
            }
        }
        for inode in batch.dead {
            let file = inode.file.lock().clone();
            match file.filter(|_| of_removals.is_used_up()) {
                Some(file) => {
                    // No batch needs the images before the one that removes the inode.
                    self.hold_images(inode.ino, true);
                    untouched.push(Left {
                        data: file.map.read().shards(),
                        inode,
                        is_dead: true,
                        since: seq,
                    });
                }
                None => self.bury(at, inode, None, &mut of_removals),
            }
        }
        if !untouched.is_empty() {
            self.untouched.push((id, untouched));
        }
    }

    /// Takes the current batch of a shard, and gives the next one its number.
    fn begin(&mut self, at: usize) -> Batch {
        let commits = &self.core.shards.get(self.group.cuts[at].0).commits;
        let mut batch = self.take_batch(commits);
        let cut = &mut self.group.cuts[at].1;
        commits.weight.store(0, Ordering::Relaxed);
        commits.removals.store(0, Ordering::Relaxed);
        commits.waiting.store(0, Ordering::Relaxed);
        cut.seq = commits.seq.load(Ordering::Acquire);
        commits.seq.store(cut.seq + 1, Ordering::Release);
        cut.changes.append(&mut batch.changes);
        cut.xattrs.append(&mut batch.xattrs);
        // All shards of the group, also those that only another batch names: if there is no room, the batches stay together.
        cut.links.extend(self.group.set);
        batch
    }

    /// Takes the current batch of a shard, with those parked inodes that need no suspended shard any more. Takes a bounded number of them at once.
    fn take_batch(&self, commits: &Commits) -> Batch {
        let mut current = commits.batch.lock();
        let mut batch = std::mem::take(&mut *current);
        let mut room = commits.full_at;
        let mut are_more = false;
        for (ino, parked) in std::mem::take(&mut batch.parked) {
            let is_touched = !parked.is_dead && parked.inode.touched.load(Ordering::Acquire);
            let is_free = !is_suspended(self.core, parked.data);
            are_more |= is_free && room == 0;
            if is_touched || self.asked.contains(&ino) || is_free && room > 0 {
                room = room.saturating_sub(1);
                match parked.is_dead {
                    true => batch.dead.push(parked.inode),
                    false => batch.dirty.push(parked.inode),
                }
            } else {
                current.parked.insert(ino, parked);
            }
        }
        drop(current);
        if are_more {
            commits.hurry();
        }
        batch
    }

    /// Returns how many changes of extents a shard's batch takes. The batches of a group together take as much as one, because the changes of
    /// bitmaps may all be in one of them.
    fn shares(&self, at: usize) -> Shares {
        let shard = self.core.shards.get(self.group.cuts[at].0);
        let container_blocks = shard.store.container_blocks();
        if let Some(pages) = shard.commits.step_pages() {
            let share = || Share::of_short_steps(pages, container_blocks);
            return Shares {
                of_new: share(),
                of_left: share(),
                of_removals: share(),
            };
        }
        let full_at = shard.commits.full_at / self.group.cuts.len();
        let share = || Share::of_left(full_at, container_blocks);
        Shares {
            of_new: Share::of_new(full_at, container_blocks),
            of_left: share(),
            of_removals: share(),
        }
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
        failure_of(self.core, set)
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

    /// Does `snapshot`, unless the batch has the inode's state: an inode of which the batch before had a part may be in `left` and, if it
    /// changed while that batch was sealed, in `dirty`.
    fn snapshot_once(&mut self, at: usize, inode: Arc<Inode>, share: &mut Share) {
        if inode.dirty.load(Ordering::Acquire) {
            self.snapshot(at, inode, share);
        }
    }

    /// Writes an inode's state into the batch of its shard. The batch keeps the committed size and extents if a truncation is in
    /// progress, or if the extents change blocks of a shard outside of the group. The inode then waits for the next batch. If that
    /// shard has failed, no batch gets the size and the extents.
    fn snapshot(&mut self, at: usize, inode: Arc<Inode>, share: &mut Share) {
        let (seq, from) = (self.cut(at).seq, self.cut(at).changes.len());
        // Before `dirty` is cleared: a sync that finds the inode clean must find that it is in this batch, which is not durable.
        inode.included_in.store(seq, Ordering::Release);
        // Before its state is read: a change from here on puts the inode into the next batch.
        inode.dirty.store(false, Ordering::Release);
        inode.touched.store(false, Ordering::Release);
        let mut meta = inode.meta.write();
        if meta.buried {
            return;
        }
        let file = match inode.kind {
            Kind::File => inode.file.lock().clone(),
            _ => None,
        };
        let (size, held) = match &file {
            Some(file) => {
                let found = self.size_and_extents(at, &inode, &meta, file, share);
                meta.rec.blocks = file.map.read().stored_blocks();
                found
            }
            None => (meta.rec.size, None),
        };
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
        drop(meta);
        self.route(at, from);
        self.held.extend(held);
    }

    /// Adds changes of a file's extents to the batch. Returns the size that the batch may have, and the inode if it waits for the next
    /// batch.
    fn size_and_extents(
        &mut self,
        at: usize,
        inode: &Arc<Inode>,
        meta: &Meta,
        file: &File,
        share: &mut Share,
    ) -> (u64, Option<Held>) {
        if meta.dead || file.is_in_truncation() {
            self.hold_images(inode.ino, true);
            return match meta.dead {
                true => (meta.committed_size, None),
                false => {
                    let held = Held::whole(inode.clone(), false, ShardSet::default(), None);
                    (meta.committed_size, Some(held))
                }
            };
        }
        // After a truncation since the last batch, the committed size counts bytes that are gone. `synced_size` does not.
        let synced = file.synced_size.load(Ordering::Acquire);
        let committed = meta.committed_size.min(synced);
        let size = durable_size(file, committed, meta.rec.size);
        file.synced_size.fetch_max(size, Ordering::AcqRel);
        // After the size: a page that is clean by then has its extent in the map.
        let mut map = file.map.write();
        if !map.has_changes() && size == meta.committed_size && meta.stored {
            // The batch describes no data.
            map.nothing_left();
            self.hold_images(inode.ino, false);
            return (size, None);
        }
        let data = map.shards();
        let lost = self.failure_of(data);
        let (mut strays, mut is_any) = (ShardSet::default(), false);
        if lost.is_none() {
            (strays, is_any) = self.differences(at, inode, &mut map, share);
            self.cut(at).data.extend(data);
        }
        if lost.is_some() || strays != ShardSet::default() {
            if lost.as_ref().is_some_and(|lost| !lost.is_unreachable()) {
                // A shard with blocks of the file has failed, so no batch can take the contents. A truncation would wait for ever.
                map.end_replacement();
            }
            self.hold_images(inode.ino, true);
            let held = Held::whole(inode.clone(), false, strays, lost);
            return (meta.committed_size, Some(Held { data, ..held }));
        }
        if !map.has_changes() {
            map.nothing_left();
            self.hold_images(inode.ino, false);
            return (size, None);
        }
        match is_any {
            true => self.hold_images_left(inode.ino, &map),
            false => self.hold_images(inode.ino, true),
        }
        let held = Held {
            had_turn: is_any,
            ..Held::part(inode.clone(), false, &map, None)
        };
        (map.size_for_batch(committed, size), Some(held))
    }

    fn images_of(&self, ino: Ino) -> &LoggedPages {
        let shard = self.core.shards.map().of_ino(ino);
        self.core.allocator.logged_of(shard)
    }

    /// Has the images of a file's pages wait if the batch leaves the file's extents and checksums as they were.
    fn hold_images(&self, ino: Ino, is_held: bool) {
        self.images_of(ino).hold(ino, is_held);
    }

    /// Has the images of those pages of a file wait that the batch leaves as they were.
    fn hold_images_left(&self, ino: Ino, map: &Map) {
        self.images_of(ino).hold_left(ino, |page| map.is_left(page));
    }

    /// Adds changes of a file's extents to the batch: as many as the share permits. Changes nothing if they need shards outside of the
    /// group. Returns these shards, and whether the share permits any change.
    fn differences(
        &mut self,
        at: usize,
        inode: &Inode,
        map: &mut Map,
        share: &mut Share,
    ) -> (ShardSet, bool) {
        let steps = match map.is_replacement() {
            true => map.next_steps_of_replacement(|| self.core.share_of_replacement(inode.ino)),
            false => map.next_steps(share),
        };
        let is_any = !steps.ranges.is_empty();
        let strays = self.strays(map.slices_of(&steps));
        if map.has_changes() && strays == ShardSet::default() {
            let cut = self.cut(at);
            let of_batch = (inode.ino, cut.seq);
            map.take_steps(of_batch, steps, &mut cut.changes, &mut cut.freed);
        }
        (strays, is_any)
    }

    /// Adds the removal of an inode to the batch of its shard, or as much of it as the share permits. Has the inode wait if that needs
    /// blocks of a shard outside of the group. `since`: the first batch that did not have all of it.
    fn bury(&mut self, at: usize, inode: Arc<Inode>, since: Option<u64>, share: &mut Share) {
        let from = self.cut(at).changes.len();
        let ino = inode.ino;
        let mut meta = inode.meta.write();
        let file = inode.file.lock().clone();
        let mut map = file.as_ref().map(|file| file.map.write());
        if let Some(map) = &mut map {
            let steps = map.next_removals(share);
            let strays = self.strays(map.slices_of(&steps));
            // No batch needs the images before the one that removes the inode.
            self.hold_images(ino, strays != ShardSet::default() || !steps.is_all);
            if strays != ShardSet::default() {
                let lost = self.failure_of(strays);
                let held = Held::whole(inode.clone(), true, strays, lost);
                let data = strays;
                return self.held.push(Held { data, ..held });
            }
            let is_all = steps.is_all;
            let allocator = &self.core.allocator;
            let cut = self.cut(at);
            let (changes, freed) = (&mut cut.changes, &mut cut.freed);
            map.take_removals((ino, cut.seq), steps, allocator, changes, freed);
            if !is_all {
                if meta.stored {
                    meta.rec.blocks = map.stored_blocks();
                    let mut rec = meta.rec.clone();
                    rec.size = meta.committed_size;
                    changes.push(Change::PutInode(ino, rec));
                }
                inode.included_in.store(cut.seq, Ordering::Release);
                let held = Held::part(inode.clone(), true, map, since);
                self.held.push(held);
                return self.route(at, from);
            }
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
        drop((map, meta));
        self.route(at, from);
    }
}

/// Takes out the waiters whose file's changes no batch can have, or whose data is on a failed device. Returns them with the reason.
fn refuse(core: &Core, held: &[Held], waiters: &mut Vec<Waiter>) -> Vec<(Waiter, Error)> {
    let mut refused = Vec::new();
    for waiter in std::mem::take(waiters) {
        let is = |inode: &Arc<Inode>| held.iter().find(|held| Arc::ptr_eq(&held.inode, inode));
        let lost = waiter.inode.as_ref().and_then(is);
        match lost.and_then(|held| held.lost.clone()) {
            Some(error) => refused.push((waiter, error)),
            None => waiters.push(waiter),
        }
    }
    refused.extend(take_lost(core, waiters));
    refused
}

/// Takes out the waiters for whom this batch of `first` is not enough, because it omits the changes of their files, or has a part of them.
fn postpone(
    core: &Core,
    first: ShardId,
    group: &Group<'_>,
    later: &Later,
    waiters: &mut Vec<Waiter>,
) {
    let commits = &core.shards.get(first).commits;
    // Declared before the lock, so that the files are dropped after it is released.
    let files: Vec<_> = waiters
        .iter()
        .map(|waiter| waiter.inode.as_ref()?.file.lock().clone())
        .collect();
    let cuts = group.cuts.iter();
    let batch = cuts
        .filter(|(id, _)| *id == first)
        .map(|(_, cut)| cut.seq)
        .next();
    let mut control = commits.control.lock();
    for (mut waiter, file) in std::mem::take(waiters).into_iter().zip(&files) {
        let is = |inode: &Arc<Inode>| later.files.iter().any(|file| Arc::ptr_eq(file, inode));
        let since = waiter.since.or(batch);
        let files_since = later.files_since.filter(|_| waiter.needs >= Needs::Files);
        let removals_since = later.removals_since.filter(|_| waiter.needs >= Needs::All);
        // Not for changes that came later: there may be more with each batch.
        let mut left = files_since.into_iter().chain(removals_since);
        let is_left = left.any(|left| Some(left) <= since);
        let of_all = waiter.commit && is_left;
        if file.as_ref().is_some_and(|file| file.is_in_truncation()) {
            // Under the lock, so that the end of the truncation finds the waiter there (`released`).
            control.postponed.push(waiter);
        } else if waiter.inode.as_ref().map_or(of_all, is) {
            // The truncation ended after the batch was sealed, or the batch has a part of the file. The next batch has the file. A waiter that
            // names no file waits for all files.
            waiter.since = since;
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
