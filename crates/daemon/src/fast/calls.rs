//! The ioctls on a file's descriptor.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use jericho_cache::{Intent, OWNER_DAEMON, Object, PAGES_PER_GET_MAX, Place};
use jericho_format::{FILE_BYTES_MAX, PAGE_BYTES};
use jericho_fs::fs::{CAPABILITY, File};
use jericho_fs::types::Ino;
use jericho_shm::{Answer, Call, Refusal, Segments};

use super::{Grants, SlotFile};

use crate::handle::Handle;
use crate::mounted::Mounted;

/// Most pages that one call reserves or reads ahead: 8 MiB.
const PAGES_MAX: u32 = 2048;
/// Most pages that one call of a program can touch: the kernel moves at most 2 GiB.
const CALL_PAGES_MAX: u64 = (2 << 30) / PAGE_BYTES + 1;
/// Pages that a job reserves before other jobs of its thread run.
const RESERVE_STEP: u32 = 128;

/// The thread that issued the ioctl.
#[derive(Debug, Clone, Copy)]
pub struct Asker {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Thread id in the daemon's pid namespace; 0 when the thread has none there.
    pub thread: u32,
}

impl Mounted {
    /// Answers an ioctl on an open file. May call `reply` later, from another thread.
    pub fn call<R>(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        call: Call,
        Asker { uid, gid, thread }: Asker,
        reply: R,
    ) where
        R: FnOnce(Answer) + Send + 'static,
    {
        let fast = &self.fast;
        if fast.closing.load(Ordering::SeqCst) {
            return reply(Answer::refused(Refusal::Off));
        }
        // A mapping affects the access of all programs, so any user may report it.
        if call != Call::Mapped && !fast.trusted.includes(uid, gid) {
            return reply(Answer::refused(Refusal::Owner));
        }
        match call {
            Call::Fast {
                write,
                thread: block,
            } => {
                fast.counts.slots_by_request.fetch_add(1, Ordering::Relaxed);
                if let Some(block) = block {
                    fast.knows_thread(block, thread);
                }
                self.grant(handle, write, reply);
            }
            Call::ReadAhead { first, pages } => {
                self.prefetch(handle, first, pages.min(PAGES_MAX));
                reply(Answer::default());
            }
            Call::Reserve { first, pages, soon } => {
                let pages = pages.min(PAGES_MAX);
                let pages = match soon {
                    true => self.reserve_soon(handle, first, pages),
                    false => self.reserve(handle, first, pages),
                };
                reply(pages.map_or_else(Answer::refused, |pages| Answer {
                    pages,
                    ..Answer::default()
                }));
            }
            Call::Mapped => self.mapped(handle, reply),
            Call::Token => reply(self.token(handle, uid)),
            Call::Interrupted {
                first,
                pages,
                owner,
                instance,
            } => {
                // Gives up only the caller's latches: another client may still be copying into its frame, which the evictor would
                // reuse.
                reply(self.of_writer((owner, instance), thread, || Answer {
                    pages: self.give_up_latches(handle, first, pages, owner),
                    ..Answer::default()
                }));
            }
            Call::Copied {
                slice,
                frame,
                owner,
                instance,
            } => {
                reply(self.of_writer((owner, instance), thread, || {
                    if let Some(slice) = fast.slices.get(usize::from(slice)) {
                        slice.copy_ended(owner, frame);
                    }
                    Answer::default()
                }));
            }
        }
    }

    /// Answers a call in which a client names itself by owner number and instance: refuses it unless `thread` belongs to that
    /// client. A call meant for an earlier instance has nothing to do.
    fn of_writer(
        &self,
        (owner, instance): (u16, u64),
        thread: u32,
        answer: impl FnOnce() -> Answer,
    ) -> Answer {
        if instance != self.fast.control.instance() {
            Answer::default()
        } else if !self.fast.is_writer(owner, thread) {
            Answer::refused(Refusal::Owner)
        } else {
            answer()
        }
    }

    /// Returns a token (the right to write inline) to a process of `uid` that has the file open for writing.
    fn token(&self, handle: &Handle, uid: u32) -> Answer {
        if !handle.writable || self.read_only() {
            return Answer::refused(Refusal::ReadOnly);
        }
        match self.fast.tokens.give(uid) {
            Some(token) => Answer {
                token,
                ..Answer::default()
            },
            None => Answer::refused(Refusal::Off),
        }
    }

    /// Gives up the client's latches on pages, and its locks if no latch is left. Returns how many of the pages it still has
    /// latched.
    fn give_up_latches(&self, handle: &Handle, first: u64, pages: u32, owner: u16) -> u32 {
        let file = &handle.file;
        self.absorb(file.ino());
        let (object, size) = (file.object(), file.size());
        let give_up = |pages: Range<u64>| -> u32 {
            let runs = file.layout().runs(pages);
            runs.map(|(slice, pages)| self.slice(slice).give_up_latches(&object, pages, owner))
                .sum()
        };
        let beyond = size.div_ceil(PAGE_BYTES);
        let end = first.saturating_add(u64::from(pages));
        let mut left = give_up(pages_to_check(first, pages, beyond));
        // A write beyond the end of file must first clear what an interrupted write left there.
        if end > beyond || first.saturating_add(1) >= beyond {
            let from = beyond.saturating_sub(1);
            left += give_up(from..beyond + u64::from(PAGES_MAX));
        }
        if left == 0
            && let Some(slot_file) = self.fast.written_file(file.ino())
        {
            let (slot, bytes) = (self.fast.slot(&slot_file), u64::from(pages) * PAGE_BYTES);
            let at = first.saturating_mul(PAGE_BYTES);
            if bytes > 0 && at < FILE_BYTES_MAX {
                slot.take_range_from(Segments::of(at, bytes), owner, OWNER_DAEMON);
            }
            if end > beyond || first.saturating_add(1) >= beyond {
                self.take_extend_lock_from(&slot_file, owner);
            }
        }
        left
    }

    /// Takes the extend lock from a client that interrupted its own write. Zeroes what that write left beyond the end of file.
    fn take_extend_lock_from(&self, slot_file: &SlotFile, owner: u16) {
        let slot = self.fast.slot(slot_file);
        // As in `Slot::seize`. If a thread of the daemon holds the lock by now, that thread zeroes the bytes.
        let Some(held) = slot.extend_lock().take_from(owner, OWNER_DAEMON) else {
            return;
        };
        slot.cut();
        self.clear_seized(slot_file);
        slot.extend_lock().unlock(held);
    }

    fn grant<R>(self: &Arc<Self>, handle: &Arc<Handle>, write: bool, reply: R)
    where
        R: FnOnce(Answer) + Send + 'static,
    {
        let file = &handle.file;
        let granted = loop {
            // Every write has to clear these bits, which only the kernel path does.
            if write && !matches!(self.fs().has_privileges(file.ino()), Ok(false)) {
                break Err(Refusal::SetId);
            }
            self.fast.await_changes(file.ino());
            match self.grant_slot(handle, &mut handle.grants.lock(), write) {
                // The mode changed after it was checked, or another change began.
                Err(Refusal::SetId | Refusal::Busy) => {}
                granted => break granted,
            }
        };
        match granted {
            Ok((answer, None)) => reply(answer),
            Ok((answer, Some(first))) => self.begin_inline_writes(first, move || reply(answer)),
            Err(refusal) => reply(Answer::refused(refusal)),
        }
    }

    /// Grants a handle inline access without waiting. Returns the slot too if the handle is the file's first writer; the caller
    /// then calls `begin_inline_writes`. Fails as `Fast::grant` does.
    pub(super) fn grant_slot(
        &self,
        handle: &Handle,
        grants: &mut Grants,
        write: bool,
    ) -> Result<(Answer, Option<Arc<SlotFile>>), Refusal> {
        let (fast, file) = (&self.fast, &handle.file);
        if write && (!handle.writable || self.read_only()) {
            return Err(Refusal::ReadOnly);
        }
        let (slot_file, first_writer) = fast.grant(file, grants, write)?;
        let answer = Answer {
            status: 0,
            slot: slot_file.slot,
            generation: fast.info(&slot_file).word().generation(),
            pages: 0,
            instance: fast.control.instance(),
            object: file.ino(),
            token: 0,
        };
        Ok((answer, first_writer.then_some(slot_file)))
    }

    /// Lets clients write a file that has its first inline writer, as soon as possible, and calls `then`.
    ///
    /// From here on the kernel asks for the attributes each time. Before the first inline write, the job drops the kernel's
    /// attributes and pages, and all writes of the mount that take no locks have ended. The job thread does not wait for those
    /// writes, because they may wait for a device.
    pub(super) fn begin_inline_writes(
        self: &Arc<Self>,
        slot_file: Arc<SlotFile>,
        then: impl FnOnce() + Send + 'static,
    ) {
        let (file, weak) = (slot_file.file.clone(), Arc::downgrade(self));
        file.after_writings(move || {
            let Some(mounted) = weak.upgrade() else {
                return;
            };
            if mounted.fast.try_grant_writes(&slot_file) {
                return then();
            }
            let weak = Arc::downgrade(&mounted);
            mounted.fast.later(move || {
                if let Some(mounted) = weak.upgrade() {
                    mounted.fast.grant_writes(&slot_file);
                }
                then();
            });
        });
    }

    fn prefetch(&self, handle: &Handle, first: u64, pages: u32) {
        let file = &handle.file;
        let end = file.size().div_ceil(PAGE_BYTES);
        let stop = first.saturating_add(u64::from(pages)).min(end);
        self.prefetch_pages(file, first..stop);
    }

    /// Returns whether one of the pages is in a slice with too many dirty pages.
    fn is_throttling(&self, file: &File, pages: Range<u64>) -> bool {
        let mut runs = file.layout().runs(pages);
        runs.any(|(slice, _)| self.slice(slice).is_throttling())
    }

    /// Posts the reservation to another thread, while the writer uses the pages that it has. Returns how many pages that thread
    /// will reserve. Fails with `Space` when there is no room for them.
    fn reserve_soon(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        first: u64,
        pages: u32,
    ) -> Result<u32, Refusal> {
        let wanted = first..first.saturating_add(u64::from(pages));
        if wanted.is_empty() || self.is_throttling(&handle.file, wanted.clone()) {
            return Err(Refusal::Space);
        }
        if handle.soon.lock().is_empty() {
            handle.grants.lock().written()?;
        }
        self.post_reserve(handle, wanted)
    }

    /// Posts a job that reserves pages, or extends the job that is already posted. Returns how many pages, from the first on,
    /// the job will reserve. Fails with `Space` while the posted job reserves pages elsewhere.
    pub(super) fn post_reserve(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        pages: Range<u64>,
    ) -> Result<u32, Refusal> {
        let mut soon = handle.soon.lock();
        let is_posted = !soon.is_empty();
        let from_first = joined(&soon, &pages).ok_or(Refusal::Space)?;
        let end_max = (from_first.start).saturating_add(u64::from(self.reserved_max()));
        *soon = from_first.start..from_first.end.min(end_max);
        let count = soon.end.saturating_sub(pages.start);
        drop(soon);
        if !is_posted {
            let (weak, open) = (Arc::downgrade(self), Arc::downgrade(handle));
            self.fast.later(move || {
                if let (Some(mounted), Some(open)) = (weak.upgrade(), open.upgrade()) {
                    mounted.reserve_posted(&open);
                }
            });
        }
        match u32::try_from(count) {
            Ok(count) if count > 0 => Ok(count),
            _ => Err(Refusal::Space),
        }
    }

    /// Reserves a few pages of the posted job and posts another job for the rest, so that jobs of other files run in between.
    fn reserve_posted(self: &Arc<Self>, handle: &Arc<Handle>) {
        let pages = std::mem::take(&mut *handle.soon.lock());
        let step = (pages.end - pages.start).min(u64::from(RESERVE_STEP)) as u32;
        let rest = pages.start + u64::from(step)..pages.end;
        if self.reserve(handle, pages.start, step) == Ok(step) && !rest.is_empty() {
            // Fails when another request has posted a job for pages elsewhere.
            let _ = self.post_reserve(handle, rest);
        }
    }

    /// Returns the most pages that a writer may have reserved at once. Most of the cache stays available for written pages.
    fn reserved_max(&self) -> u32 {
        (self.frames_per_slice() / 16).max(1)
    }

    /// Reserves space for pages and caches zeroed ones where there are none. Returns the number of pages reserved, from the first
    /// on.
    pub(super) fn reserve(&self, handle: &Handle, first: u64, pages: u32) -> Result<u32, Refusal> {
        let (fast, file) = (&self.fast, &handle.file);
        // Holds the lock until the end: no thread would release space that is reserved after the release of the handle.
        let grants = handle.grants.lock();
        let slot_file = grants.written()?;
        let end_max = jericho_format::FILE_BYTES_MAX / PAGE_BYTES;
        if pages == 0 || first >= end_max {
            return Err(Refusal::ReadOnly);
        }
        self.absorb(file.ino());
        // The file already has these pages: another writer has extended it since this writer checked.
        if first < file.size() / PAGE_BYTES {
            return Err(Refusal::Busy);
        }
        let pages = (end_max - first).min(u64::from(pages)) as u32;
        let pages = pages.min(self.reserved_max());
        // Runs before the slice is looked up, because a move changes the file's slice.
        let _writing = file.writing();
        let layout = file.layout();
        if self.is_throttling(file, first..first + u64::from(pages)) {
            return Err(Refusal::Space);
        }
        let bytes = u64::from(pages) * PAGE_BYTES;
        if self
            .fs()
            .begin_write(file, first * PAGE_BYTES, bytes)
            .is_err()
        {
            return Err(Refusal::Space);
        }
        let object = file.object();
        let (mut done, mut why) = (0, Refusal::Space);
        while done < pages {
            let at = first + u64::from(done);
            // The page in which the file ends has bytes, which must be fetched. The pages after it have none.
            let end = fast.slot(slot_file).size().bytes().max(file.size());
            let (count_max, intent) = if at * PAGE_BYTES < end {
                (1, Intent::Modify)
            } else {
                ((pages - done).min(PAGES_PER_GET_MAX), Intent::Overwrite)
            };
            let (slice, run) = layout.first_run(at..at + u64::from(count_max));
            let count = (run.end - at) as u32;
            let mut grant = match self.slice(slice).try_get(&object, at, count, intent) {
                Ok(Some(grant)) => grant,
                Ok(None) => {
                    why = Refusal::Busy;
                    break;
                }
                Err(_) => break,
            };
            // Another program may have extended the file through the kernel since then, and the pages may have left the cache.
            // The grant holds the pages, so the result of this check stays true.
            if intent == Intent::Overwrite && !is_hole(&*object, at, count) {
                break;
            }
            grant.offer();
            done += count;
        }
        match done {
            0 => Err(why),
            _ => Ok(done),
        }
    }

    /// Ends inline access of the file, which the program is about to map through this handle.
    fn mapped<R>(self: &Arc<Self>, handle: &Arc<Handle>, reply: R)
    where
        R: FnOnce(Answer) + Send + 'static,
    {
        let fast = &self.fast;
        let slot_file = fast.map(handle);
        let mounted = Arc::downgrade(self);
        // Runs even if no inline access has to end: changes of this file that are under way now are complete before
        // this job begins.
        fast.later(move || {
            if let (Some(slot_file), Some(mounted)) = (slot_file, mounted.upgrade()) {
                mounted.revoke_inline_writes(&slot_file.file);
                mounted.fast.drop_kernel_pages(&slot_file.file);
            }
            reply(Answer::default());
        });
    }
}

impl Mounted {
    /// Makes a change that gives a file set-id bits or capabilities. Every write has to clear them, so programs write the file
    /// through the kernel from now on, until no program has it open inline.
    pub(crate) fn give_privileges<T>(&self, ino: Ino, change: impl FnOnce() -> T) -> T {
        let (_changing, slot_file) = self.fast.begin_change(ino);
        if let Some(slot_file) = slot_file {
            self.end_inline_writes(&slot_file);
        }
        change()
    }

    fn end_inline_writes(&self, slot_file: &SlotFile) {
        // Grants then fail with the reason that the file is mapped.
        self.fast.end_inline(slot_file);
        self.revoke_inline_writes(&slot_file.file);
    }

    /// Revokes the clients' right to write the file's pages, and then absorbs their writes.
    fn revoke_inline_writes(&self, file: &Arc<File>) {
        let object = file.object();
        for slice in file.layout().slices() {
            if self.slice(slice).revoke_writes(&object) {
                continue;
            }
            tracing::warn!(ino = file.ino(), "an inline writer does not finish");
        }
        self.absorb(file.ino());
    }

    /// Sets an extended attribute; see `Fs::setxattr`, and `Fs::setxattr_of_outsider` when `outsider` is true.
    pub fn setxattr(
        &self,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: u32,
        outsider: bool,
    ) -> jericho_fs::Result<()> {
        let change = || match outsider {
            true => self.fs().setxattr_of_outsider(ino, name, value, flags),
            false => self.fs().setxattr(ino, name, value, flags),
        };
        match name == CAPABILITY {
            true => self.give_privileges(ino, change),
            false => change(),
        }
    }
}

/// Returns which of the named pages an interrupted write may hold: none after the page that follows the end of file, and at most
/// as many as one call can touch, because a thread that answers requests checks each.
fn pages_to_check(first: u64, pages: u32, beyond: u64) -> Range<u64> {
    let pages = u64::from(pages).min(CALL_PAGES_MAX);
    first..first.saturating_add(pages).min(beyond + 1)
}

/// Returns one range that covers both, if they overlap or touch or the first is empty.
fn joined(one: &Range<u64>, other: &Range<u64>) -> Option<Range<u64>> {
    if one.is_empty() {
        return Some(other.clone());
    }
    let touch = one.start <= other.end && other.start <= one.end;
    touch.then(|| one.start.min(other.start)..one.end.max(other.end))
}

/// Returns whether no page of a range has bytes on a device.
fn is_hole(object: &dyn Object, first: u64, count: u32) -> bool {
    let mut runs = Vec::new();
    object.resolve(first, count, &mut runs).is_ok()
        && runs.iter().all(|run| matches!(run.place, Place::Hole))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_for_all_pages_of_a_large_file_checks_those_of_one_call() {
        let beyond = 1 << 40;
        assert_eq!(pages_to_check(7, u32::MAX, beyond), 7..7 + CALL_PAGES_MAX);
        assert_eq!(pages_to_check(7, 2, beyond), 7..9);
        assert_eq!(pages_to_check(7, u32::MAX, 9), 7..10);
        assert!(pages_to_check(u64::MAX, u32::MAX, 9).is_empty());
    }
}
