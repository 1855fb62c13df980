//! Which slice is home to what is created: a policy, and what users set.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use jericho_cache::{Object, Slice};
use jericho_format::threads::{ThreadPolicy, ThreadsOfInode};

use super::Fs;
use super::core::{Core, PAGES, wait};
use super::errno::*;
use super::extents::State;
use super::file::File;
use super::inode::Meta;
use super::times::now_ns;
use crate::error::Result;
use crate::types::{Ino, Kind, ROOT, SliceId};

/// Pages that a move copies at a time, no more than the cache grants at once: truncations of the file wait
/// that long.
const MOVE_PAGES: u64 = jericho_cache::PAGES_PER_GET_MAX as u64;
/// Pieces that are moved before a discard of about that length has its turn.
const PIECES_IN_TURN: usize = 16;

/// What a policy may look at.
#[derive(Clone, Copy, Debug)]
pub struct PlacementContext<'a> {
    /// Directory in which something is created.
    pub parent: Ino,
    /// Home of what is created there: set by a user, or decided when the directory was made. `None` only
    /// for a root that nobody placed.
    pub parent_slice: Option<SliceId>,
    /// What is created.
    pub kind: Kind,
    /// Its name.
    pub name: &'a [u8],
    /// Slices of the volume.
    pub slices: SliceId,
    /// Directories made in the root before.
    pub turn: u64,
}

/// Decides where things go.
pub trait Policy: Send + Sync {
    /// The home of what is created; below `context.slices`, or it is taken modulo that.
    fn slice_for(&self, context: &PlacementContext<'_>) -> SliceId;
}

/// The default: directories in the root take the slices in turn, everything below follows its parent,
/// and files in the root are in slice 0.
#[derive(Clone, Copy, Debug, Default)]
pub struct FollowParent;

impl Policy for FollowParent {
    fn slice_for(&self, context: &PlacementContext<'_>) -> SliceId {
        match context.parent_slice {
            Some(slice) => slice,
            None if context.kind == Kind::Directory => {
                (context.turn % u64::from(context.slices.max(1))) as SliceId
            }
            None => 0,
        }
    }
}

impl Core {
    /// The home of something made in `parent`.
    pub fn home_for(&self, parent: Ino, meta: &Meta, kind: Kind, name: &[u8]) -> SliceId {
        let slices = self.slice_count().max(1);
        let context = PlacementContext {
            parent,
            parent_slice: meta
                .rec
                .placement
                .or(meta.rec.slice)
                .filter(|s| *s < slices),
            kind,
            name,
            slices,
            turn: self.turn.load(Ordering::Relaxed),
        };
        self.policy.slice_for(&context) % slices
    }
}

impl Fs {
    /// Slice where the inode's data is (files) or what is created in it goes (directories), and whether it
    /// was set on this very inode by a user.
    pub fn placement(&self, ino: Ino) -> Result<(SliceId, bool)> {
        let inode = self.core.inode(ino)?;
        let meta = inode.meta.read();
        let slice = meta.rec.placement.or(meta.rec.slice).unwrap_or(0);
        Ok((slice, meta.rec.placement.is_some()))
    }

    /// Directories: what is created below from now on goes to `slice`. ENOTDIR for others, EINVAL for a
    /// slice that is not there.
    pub fn set_placement(&self, ino: Ino, slice: SliceId) -> Result<()> {
        let core = &self.core;
        core.may_change()?;
        if slice >= core.slice_count() {
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

    /// When threads are moved to the inode's data, or to that of what is created in it.
    pub fn threads(&self, ino: Ino) -> Result<ThreadsOfInode> {
        let inode = self.core.inode(ino)?;
        let meta = inode.meta.read();
        Ok(meta.rec.threads)
    }

    /// Sets that, also of a file that is open; `None`: as its directory has it now. What is in a directory already
    /// stays as it is.
    pub fn set_threads(&self, ino: Ino, policy: Option<ThreadPolicy>) -> Result<()> {
        let core = &self.core;
        core.may_change()?;
        let inode = core.inode(ino)?;
        let threads = match policy {
            Some(policy) => ThreadsOfInode::set_here(policy),
            None if ino == ROOT => ThreadsOfInode::default(),
            None => {
                let parent = inode.meta.read().rec.parent;
                match core.inode(parent) {
                    Ok(parent) => parent.meta.read().rec.threads.inherited(),
                    // A file keeps the directory that it was made in, which may be gone by now.
                    Err(_) => ThreadsOfInode::default(),
                }
            }
        };
        let mut meta = inode.meta.write();
        meta.rec.threads = threads;
        meta.rec.ctime_ns = now_ns();
        drop(meta);
        // After the record: whoever loads the file later has it from there.
        let file = inode.file.lock().clone();
        if let Some(file) = file {
            file.set_threads(threads);
        }
        core.mark_dirty(&inode);
        Ok(())
    }

    /// Re-homes one inode: a file's data to the slice's cache and space, while it is in use; returns when
    /// done and durable. Directories: as set_placement. Other kinds: nothing to do.
    pub fn move_to(&self, ino: Ino, slice: SliceId) -> Result<()> {
        let core = &self.core;
        core.may_change()?;
        if slice >= core.slice_count() {
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
        // What was written back during a discard may not have found the slice's last free blocks.
        let left = pages_away(&file, slice);
        if left > 0 && left <= core.allocator.free_of(slice) {
            self.move_pieces(&file, slice)?;
        }
        core.mark_dirty(&inode);
        core.commit_now()?;
        // The slice filled up meanwhile: what did not fit is where it was.
        if pages_away(&file, slice) > 0 {
            Err(ENOSPC)
        } else {
            Ok(())
        }
    }

    /// Moves what is in other slices to the file's home.
    fn move_pieces(&self, file: &Arc<File>, slice: SliceId) -> Result<()> {
        let mut at = 0;
        loop {
            // The search would miss blocks that are being discarded now. A discard has its turn after some pieces.
            let _all = self.core.allocator.recall_in_turn();
            for _ in 0..PIECES_IN_TURN {
                let Some((page, count)) = next_away(file, slice, at) else {
                    let _alone = file.exclusive.write();
                    let mut map = file.map.write();
                    return map.rehome_unwritten(slice, &self.core.allocator);
                };
                // Truncations wait for one piece, writers do not.
                let _shared = file.exclusive.read();
                // What a truncation took out meanwhile must not come back.
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

    /// Hands the file's pages from one cache to another.
    fn switch_home(&self, file: &Arc<File>, slice: SliceId) -> Result<()> {
        let old = file.cache().cloned();
        let object = file.object();
        if let Some(old) = &old {
            // Most of it before anybody has to wait.
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
        // Another move may have come first.
        if file.slice() == slice || old.is_some_and(|old| old.id() != file.slice()) {
            return Ok(());
        }
        if let Some(old) = old {
            // Clients write inline without asking: they have to ask from here on, and wait with the others.
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
            Some(old) => wait(|done| old.invalidate(file.ino(), 0..PAGES, done)),
            None => Ok(()),
        }
    }

    /// The file's blocks by slice: (slice, blocks).
    pub fn blocks_by_slice(&self, ino: Ino) -> Result<Vec<(SliceId, u64)>> {
        let inode = self.core.inode(ino)?;
        if inode.kind != Kind::File {
            return Ok(Vec::new());
        }
        let file = self.core.file(&inode)?;
        let mut blocks = vec![0u64; usize::from(self.core.slice_count())];
        for run in file.map.read().extents.from(0) {
            if let State::Pending { to: at, .. } | State::Data(at) | State::Unwritten(at) =
                run.state
                && let Some(sum) = blocks.get_mut(usize::from(at.slice))
            {
                *sum += u64::from(run.count);
            }
        }
        let by_slice = blocks.into_iter().enumerate().filter(|(_, n)| *n > 0);
        Ok(by_slice.map(|(slice, n)| (slice as SliceId, n)).collect())
    }
}

/// Pages whose blocks are in other slices.
fn pages_away(file: &File, slice: SliceId) -> u64 {
    let map = file.map.read();
    let away = |state| match state {
        State::Pending { to: at, .. } | State::Data(at) | State::Unwritten(at) => at.slice != slice,
        State::Delalloc => false,
    };
    map.extents
        .from(0)
        .filter(|r| away(r.state))
        .map(|r| u64::from(r.count))
        .sum()
}

/// The next piece from page `from` on whose data is in another slice.
fn next_away(file: &File, slice: SliceId, from: u64) -> Option<(u64, u64)> {
    let map = file.map.read();
    // Also behind the end: programs that write inline tell the new size later.
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
        let context = PlacementContext {
            parent: ROOT,
            parent_slice: None,
            kind: Kind::Directory,
            name: b"d",
            slices: 3,
            turn: 4,
        };
        assert_eq!(FollowParent.slice_for(&context), 1);
        assert_eq!(
            FollowParent.slice_for(&PlacementContext {
                kind: Kind::File,
                ..context
            }),
            0
        );
        let below = PlacementContext {
            parent: 9,
            parent_slice: Some(2),
            ..context
        };
        assert_eq!(FollowParent.slice_for(&below), 2);
    }
}
