//! Decides which slice is home to new inodes: their directory's, the next in turn, or the one that users have set.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use jericho_cache::{Object, Slice};
use jericho_format::threads::{ThreadPolicy, ThreadsOfInode};
use jericho_metadata::errno::*;

use crate::core::{Core, PAGES, wait};
use crate::data::extents::PageState;
use crate::error::Result;
use crate::fs::Fs;
use crate::inode::File;
use crate::inode::Meta;
use crate::times::now_ns;
use crate::types::{Ino, Kind, ROOT, SliceId};

/// Number of pages that a move copies at a time, which is the most that one get of the cache returns. Truncations of the file
/// wait for one piece.
const MOVE_PAGES: u64 = jericho_cache::PAGES_PER_GET_MAX as u64;
/// Number of pieces that a move copies before it lets a discard run, which takes about as long.
const PIECES_IN_TURN: usize = 16;

/// Returns the home of a new inode of this kind: the home of its directory. In the root, which has none unless a user has set it,
/// directories take the `slices` slices in turn and files go to slice 0. `turn` is the number of directories created in the root
/// before. Slices that take no changes, or whose device answers nothing, miss their turns.
fn home_of_new(
    parent: Option<SliceId>,
    kind: Kind,
    slices: SliceId,
    turn: u64,
    takes_changes: impl Fn(SliceId) -> bool,
) -> SliceId {
    match parent {
        Some(slice) => slice,
        None if kind == Kind::Directory => {
            let from = |turn| (turn % u64::from(slices)) as SliceId;
            let mut turns = (turn..turn + u64::from(slices)).map(from);
            turns
                .find(|slice| takes_changes(*slice))
                .unwrap_or(from(turn))
        }
        None => 0,
    }
}

impl Core {
    /// Returns the home of a new inode in the directory with this metadata.
    pub fn home_for(&self, parent: &Meta, kind: Kind) -> SliceId {
        let slices = self.place_count().max(1);
        let home = parent.rec.placement.or(parent.rec.slice);
        let turn = self.turn.load(Ordering::Relaxed);
        let takes_changes = |slice| self.slice_failure(slice).is_ok() && !self.is_silent(slice);
        let home = home.filter(|slice| *slice < slices);
        home_of_new(home, kind, slices, turn, takes_changes)
    }
}

impl Fs {
    /// Returns the slice of a file's data or of new inodes in a directory, and whether a user has set it for this inode itself.
    pub fn placement(&self, ino: Ino) -> Result<(SliceId, bool)> {
        let inode = self.core.inode(ino)?;
        let meta = inode.meta.read();
        let slice = meta.rec.placement.or(meta.rec.slice).unwrap_or(0);
        Ok((slice, meta.rec.placement.is_some()))
    }

    /// Makes `slice` the home of inodes created in a directory from now on. Fails with ENOTDIR for other inodes, and with
    /// EINVAL for a slice that does not exist.
    pub fn set_placement(&self, ino: Ino, slice: SliceId) -> Result<()> {
        let core = &self.core;
        core.may_change_inode(ino)?;
        if slice >= core.place_count() {
            return Err(EINVAL);
        }
        let inode = core.directory(ino)?;
        let mut meta = inode.meta.write();
        meta.rec.placement = Some(slice);
        if ino != ROOT {
            meta.rec.slice = Some(slice);
        }
        meta.rec.ctime_ns = now_ns();
        drop(meta);
        core.mark_dirty(&inode);
        Ok(())
    }

    /// Returns when threads migrate to the inode's data, or for a directory to the data of inodes created in it.
    pub fn threads(&self, ino: Ino) -> Result<ThreadsOfInode> {
        let inode = self.core.inode(ino)?;
        let meta = inode.meta.read();
        Ok(meta.rec.threads)
    }

    /// Sets when threads migrate to the inode's data, also for an open file. `None` restores the setting of its directory.
    /// Inodes that exist in a directory keep their own setting.
    pub fn set_threads(&self, ino: Ino, policy: Option<ThreadPolicy>) -> Result<()> {
        let core = &self.core;
        core.may_change_inode(ino)?;
        let inode = core.inode(ino)?;
        let threads = match policy {
            Some(policy) => ThreadsOfInode::set_here(policy),
            None if ino == ROOT => ThreadsOfInode::default(),
            None => {
                let parent = inode.meta.read().rec.parent;
                match core.inode(parent) {
                    Ok(parent) => parent.meta.read().rec.threads.inherited(),
                    // The inode remembers the directory that it was created in, which may have been removed.
                    Err(_) => ThreadsOfInode::default(),
                }
            }
        };
        let mut meta = inode.meta.write();
        meta.rec.threads = threads;
        meta.rec.ctime_ns = now_ns();
        drop(meta);
        // Comes after the change of the record, so that a thread that loads the file later gets the new setting from it.
        let file = inode.file.lock().clone();
        if let Some(file) = file {
            file.set_threads(threads);
        }
        core.mark_dirty(&inode);
        Ok(())
    }

    /// Moves an inode to another home. A file may be in use; its data moves to the cache and the space of the slice, and the
    /// call returns when the move is durable. Does the same as `set_placement` for a directory, and nothing for other kinds.
    pub fn move_to(&self, ino: Ino, slice: SliceId) -> Result<()> {
        let core = &self.core;
        core.may_change_inode(ino)?;
        if slice >= core.place_count() {
            return Err(EINVAL);
        }
        let inode = core.inode(ino)?;
        match inode.kind {
            Kind::Directory => return self.set_placement(ino, slice),
            Kind::File => {}
            _ => return Ok(()),
        }
        let file = core.file(&inode)?;
        let away = pages_away(&file, slice);
        if core.allocator.free_of(slice) < away {
            return Err(ENOSPC);
        }
        self.switch_home(&file, slice)?;
        self.move_pieces(&file, slice)?;
        // Pages written back during a discard may have missed the last free blocks of the slice, so tries once more.
        let left = pages_away(&file, slice);
        if left > 0 && left <= core.allocator.free_of(slice) {
            self.move_pieces(&file, slice)?;
        }
        core.mark_dirty(&inode);
        // A slice that takes no changes does not concern this one, unless the file is in it.
        core.commit_working()?;
        core.may_change_inode(ino)?;
        core.slice_failure(slice)?;
        // Pages that did not fit, because the slice filled up meanwhile, are still in their old slice.
        if pages_away(&file, slice) > 0 {
            Err(ENOSPC)
        } else {
            Ok(())
        }
    }

    /// Moves the data in other slices to the file's home.
    fn move_pieces(&self, file: &Arc<File>, slice: SliceId) -> Result<()> {
        let mut at = 0;
        loop {
            // A search for space would miss blocks that are being discarded, so none is lent meanwhile. A discard can run after
            // some pieces.
            let _all = self.core.allocator.recall_in_turn();
            for _ in 0..PIECES_IN_TURN {
                let Some((page, count)) = next_away(file, slice, at) else {
                    let _alone = file.exclusive.write();
                    let mut map = file.map.write();
                    return map.rehome_unwritten(slice, &self.core.allocator);
                };
                // Truncations wait for one piece. Writers do not wait.
                let _shared = file.exclusive.read();
                // Reads the map again, so that pages removed by a truncation do not come back.
                let pages: Vec<_> = file
                    .map
                    .read()
                    .extents
                    .within(page..page + count)
                    .filter(|run| run.state.readable().is_some_and(|at| at.slice != slice))
                    .map(|run| run.page..run.end())
                    .collect();
                if let Some(cache) = file.cache() {
                    for pages in pages {
                        let object = file.object();
                        wait(|done| cache.touch(&object, pages.clone(), done))?;
                        wait(|done| cache.sync(&object, pages, done))?;
                    }
                }
                at = page + count;
            }
        }
    }

    /// Moves the file's pages from one cache to another.
    fn switch_home(&self, file: &Arc<File>, slice: SliceId) -> Result<()> {
        let old = file.cache().cloned();
        let object = file.object();
        if let Some(old) = &old {
            // Writes back most pages before any writer has to wait.
            wait(|done| old.sync(&object, 0..PAGES, done))?;
        }
        file.shut_writers_out();
        let result = self.switch_alone(file, slice, old.as_ref(), &object);
        file.let_writers_in();
        result
    }

    fn switch_alone(
        &self,
        file: &Arc<File>,
        slice: SliceId,
        old: Option<&Arc<Slice>>,
        object: &Arc<dyn Object>,
    ) -> Result<()> {
        let _alone = file.exclusive.write();
        // Another move may have ended first.
        if file.home() == slice || old.is_some_and(|old| old.id() != file.home()) {
            return Ok(());
        }
        if let Some(old) = old {
            // Clients write inline without a request. From here on they have to ask the daemon, and wait like other writers.
            if !old.revoke_writes(object) {
                return Err(EBUSY);
            }
            wait(|done| old.sync(object, 0..PAGES, done))?;
        }
        file.inode.meta.write().rec.slice = Some(slice);
        file.set_home(slice);
        file.map.write().unplace(slice, &self.core.allocator);
        self.core.mark_dirty(&file.inode);
        match old {
            Some(old) => wait(|done| old.invalidate(file.object_id(), 0..PAGES, done)),
            None => Ok(()),
        }
    }

    /// Returns the number of the file's blocks in each slice that has some, as (slice, blocks).
    pub fn blocks_by_slice(&self, ino: Ino) -> Result<Vec<(SliceId, u64)>> {
        let inode = self.core.inode(ino)?;
        if inode.kind != Kind::File {
            return Ok(Vec::new());
        }
        let file = self.core.file(&inode)?;
        let mut blocks = vec![0u64; usize::from(self.core.slice_count())];
        for run in file.map.read().extents.from(0) {
            if let PageState::Pending { to: at, .. }
            | PageState::Data(at)
            | PageState::Unwritten(at) = run.state
                && let Some(sum) = blocks.get_mut(usize::from(at.slice))
            {
                *sum += u64::from(run.count);
            }
        }
        let by_slice = blocks.into_iter().enumerate().filter(|(_, n)| *n > 0);
        Ok(by_slice.map(|(slice, n)| (slice as SliceId, n)).collect())
    }
}

/// Returns the number of pages whose blocks are in other slices.
fn pages_away(file: &File, slice: SliceId) -> u64 {
    let map = file.map.read();
    let away = |state| match state {
        PageState::Pending { to: at, .. } | PageState::Data(at) | PageState::Unwritten(at) => {
            at.slice != slice
        }
        PageState::Delalloc => false,
    };
    map.extents
        .from(0)
        .filter(|r| away(r.state))
        .map(|r| u64::from(r.count))
        .sum()
}

/// Returns the next piece, from page `from` on, whose data is in another slice.
fn next_away(file: &File, slice: SliceId, from: u64) -> Option<(u64, u64)> {
    let map = file.map.read();
    // Includes pages after the end: programs that write inline report the new size later.
    map.extents.within(from..u64::MAX).find_map(|run| {
        let at = run.state.readable()?;
        (at.slice != slice).then(|| (run.page, u64::from(run.count).min(MOVE_PAGES)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_in_the_root_take_turns_and_the_rest_follows() {
        let home = |parent, kind| home_of_new(parent, kind, 3, 4, |_| true);
        assert_eq!(home(None, Kind::Directory), 1);
        assert_eq!(home(None, Kind::File), 0);
        assert_eq!(home(Some(2), Kind::Directory), 2);
        let without = |missing: &[SliceId]| {
            home_of_new(None, Kind::Directory, 3, 4, |slice| {
                !missing.contains(&slice)
            })
        };
        assert_eq!(without(&[1]), 2);
        assert_eq!(without(&[1, 2]), 0);
        assert_eq!(without(&[0, 1, 2]), 1);
    }
}
