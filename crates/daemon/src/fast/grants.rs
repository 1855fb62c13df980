//! Grants of inline access: how a file gets its slot and its writers, what keeps it from being written inline, and the release.

use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use jericho_cache::OWNER_DAEMON;
use jericho_fs::File;
use jericho_fs::types::Ino;
use jericho_shm::{Answer, Refusal, SlotInfo};

use super::Fast;
use super::slot_file::{Grants, SlotFile};
use crate::handle::Handle;

impl Fast {
    /// Grants a handle inline access to its file. Returns the slot and whether the handle is the file's first writer. Fails with
    /// `Slots` when no slot is free, with `SetId` when the handle wants to write and the file may have set-id bits or
    /// capabilities, with `Mapped` while there is another reason against inline access, and with `Busy` when the file has no slot
    /// and gets none during a change; see `await_changes`. A refused handle is not counted as a writer: after it, another handle
    /// can still be the first one.
    pub fn grant(
        &self,
        file: &Arc<File>,
        grants: &mut Grants,
        write: bool,
    ) -> Result<(Arc<SlotFile>, bool), Refusal> {
        let mut files = self.files.part(file.ino()).write();
        let is_new = !files.contains_key(&file.ino());
        if is_new && self.changing.contains(file.ino()) {
            return Err(Refusal::Busy);
        }
        // Checks under the lock: a chmod that looks for a slot after this finds this one.
        if write && !file.has_no_privileges() {
            return Err(Refusal::SetId);
        }
        let slot_file = match files.get(&file.ino()) {
            Some(found) if found.mapped.load(Ordering::Acquire) > 0 => return Err(Refusal::Mapped),
            Some(found) => found.clone(),
            None if self.mappings.lock().contains_key(&file.ino()) => return Err(Refusal::Mapped),
            None => {
                let made = SlotFile::take(file, &self.free_slots, self.slots.count());
                let made = Arc::new(made.ok_or(Refusal::Slots)?);
                self.slot(&made).open_all(OWNER_DAEMON);
                self.slot(&made).set_size(file.size(), true);
                self.slot(&made).take_modified();
                self.info(&made).set_policy(file.threads().policy());
                self.info(&made)
                    .set(file.object_id(), file.layout().home(), 0);
                // The file's previous slot may have ended inline writes.
                file.set_inline_writes(true);
                files.insert(file.ino(), made.clone());
                self.in_use.fetch_add(1, Ordering::AcqRel);
                // Pairs with the fence in `size_grew`. A write that found no slot extended the file before this fence, so the
                // next line sees its size.
                fence(Ordering::SeqCst);
                self.slot(&made).grow(|| file.size());
                made
            }
        };
        let was_kernel_user = std::mem::take(&mut grants.kernel_user);
        if was_kernel_user {
            file.count_kernel_user(false);
        }
        // Runs after the fence; see `update_growth`.
        if is_new || was_kernel_user {
            self.set_growth(&slot_file);
        }
        if grants.file.is_none() {
            grants.file = Some(slot_file.clone());
            slot_file.granted.fetch_add(1, Ordering::AcqRel);
        }
        let mut first = false;
        if write && !grants.write {
            grants.write = true;
            first = slot_file.writers.fetch_add(1, Ordering::AcqRel) == 0;
            if first {
                // Counts the file as written before `begin_writes`, which withholds inline writes until earlier writes of the
                // mount have ended. Later writes of the mount see the count and take the locks.
                self.written.fetch_add(1, Ordering::AcqRel);
                self.begin_writes(&slot_file);
                file.count_first_writer();
            }
        }
        Ok((slot_file, first))
    }

    /// Grants a handle inline access without waiting. Returns the slot too if the handle is the file's first writer; the caller
    /// then calls `begin_inline_writes`. Fails as `Fast::grant` does.
    pub(super) fn grant_slot(
        &self,
        handle: &Handle,
        grants: &mut Grants,
        write: bool,
    ) -> Result<(Answer, Option<Arc<SlotFile>>), Refusal> {
        let file = &handle.file;
        if write && (!handle.writable || self.volume.read_only) {
            return Err(Refusal::ReadOnly);
        }
        let (slot_file, first_writer) = self.grant(file, grants, write)?;
        let answer = Answer {
            status: 0,
            slot: slot_file.slot,
            generation: self.info(&slot_file).word().generation(),
            pages: 0,
            instance: self.control.instance(),
            object: file.object_id(),
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
            let Some(fast) = weak.upgrade() else {
                return;
            };
            if fast.try_grant_writes(&slot_file) {
                return then();
            }
            let weak = Arc::downgrade(&fast);
            fast.later(move || {
                if let Some(fast) = weak.upgrade() {
                    fast.grant_writes(&slot_file);
                }
                then();
            });
        });
    }

    /// Waits until no change is in progress that keeps the file from getting a slot.
    pub(super) fn await_changes(&self, ino: Ino) {
        if self.slot_file(ino).is_none() {
            self.changing.wait(ino);
        }
    }

    /// Counts a handle as one that uses the file through the kernel alone, until it is granted inline access or released. Such a
    /// handle keeps clients from extending the file inline, because the kernel uses the size that it last learned: for sendfile,
    /// splice, copies and mappings of a program without the library, and for appends of that program. (With RWF_APPEND, the
    /// kernel begins the write at that size. With O_APPEND, it moves the program's offset there.)
    pub(crate) fn uses_kernel(&self, handle: &Handle) {
        let mut grants = handle.grants.lock();
        if !grants.kernel_user && grants.file.is_none() {
            grants.kernel_user = true;
            handle.file.count_kernel_user(true);
            self.update_growth(&handle.file);
        }
    }

    /// Tells the file's writers whether they may extend it, after the number of handles that use the file through the kernel
    /// alone has changed.
    fn update_growth(&self, file: &File) {
        // Pairs with the fence in `grant`: either this thread sees the new slot, or the slot's creator sees the new number.
        fence(Ordering::SeqCst);
        if self.slot_file(file.ino()).is_none() {
            return;
        }
        // Locks for writing, so that of two threads the one that sets the flag last has also read the number last.
        let files = self.files.part(file.ino()).write();
        if let Some(slot_file) = files.get(&file.ino()) {
            self.set_growth(slot_file);
        }
    }

    /// Requires `files` to be locked for writing.
    fn set_growth(&self, slot_file: &SlotFile) {
        let info = self.info(slot_file);
        match slot_file.file.has_kernel_users() {
            true => info.set_flags(SlotInfo::NO_GROW, 0),
            false => info.set_flags(0, SlotInfo::NO_GROW),
        }
    }

    /// Counts one more reason against inline access of the file. Clients that have latched a page may finish; see
    /// `Slice::revoke_writes`.
    pub(super) fn end_inline(&self, slot_file: &SlotFile) {
        // Takes the lock, so that a concurrent release does not miss this reason.
        let _files = self.files.part(slot_file.file.ino()).write();
        self.shut(slot_file);
    }

    /// Records that a handle is mapped, until it is released. Returns the file's slot, whose inline access this ends. A file
    /// without a slot needs no change: it gets none until the release.
    pub(super) fn map(&self, handle: &Handle) -> Option<Arc<SlotFile>> {
        let mut grants = handle.grants.lock();
        if grants.mapped {
            return None;
        }
        grants.mapped = true;
        let ino = handle.file.ino();
        let files = self.files.part(ino).write();
        *self.mappings.lock().entry(ino).or_default() += 1;
        let slot_file = files.get(&ino).cloned();
        slot_file.inspect(|slot_file| self.shut(slot_file))
    }

    fn unmap(&self, file: &File) {
        let files = self.files.part(file.ino()).write();
        if let Entry::Occupied(mut mappings) = self.mappings.lock().entry(file.ino()) {
            *mappings.get_mut() -= 1;
            if *mappings.get() == 0 {
                mappings.remove();
            }
        }
        // If the file has a slot, the slot is older than the mapping and counts it.
        if let Some(slot_file) = files.get(&file.ino())
            && slot_file.mapped.fetch_sub(1, Ordering::AcqRel) == 1
        {
            self.info(slot_file).set_flags(0, SlotInfo::KERNEL);
            slot_file.file.set_inline_writes(true);
        }
    }

    /// Requires the file's part of `files` to be locked for writing.
    fn shut(&self, slot_file: &SlotFile) {
        slot_file.mapped.fetch_add(1, Ordering::AcqRel);
        self.info(slot_file).set_flags(SlotInfo::KERNEL, 0);
        slot_file.file.set_inline_writes(false);
    }

    /// Ends the inline access of a handle that the kernel has released.
    pub fn release(self: &Arc<Self>, handle: &Handle) {
        let grants = std::mem::take(&mut *handle.grants.lock());
        if grants.mapped {
            self.unmap(&handle.file);
        }
        if grants.kernel_user {
            handle.file.count_kernel_user(false);
            self.update_growth(&handle.file);
        }
        let Some(slot_file) = grants.file else { return };
        let part = self.files.part(slot_file.file.ino());
        let mut settling = None;
        if grants.write {
            // Serializes closes: of two concurrent closes, one must see that it is the last.
            let _closing = slot_file.closing.lock();
            // Runs while the file still counts as written, because a thread that extends the file checks that.
            if slot_file.writers.load(Ordering::Acquire) == 1 {
                self.end_writes(&slot_file);
            }
            self.absorb_file(&slot_file);
            // Another thread may have taken the mark of the last write, and has not set the file's times yet.
            drop(slot_file.absorbing.write());
            let _files = part.write();
            if slot_file.writers.fetch_sub(1, Ordering::AcqRel) == 1 {
                // Before other threads can see that the file is not written; see `attributes_may_be_kept`.
                settling = Some(self.settling.begin(slot_file.file.ino()));
                self.written.fetch_sub(1, Ordering::AcqRel);
            } else {
                // Another program has opened the file for inline writing in the meantime.
                self.allow_grants(&slot_file);
            }
        }
        let mut files = part.write();
        if slot_file.granted.fetch_sub(1, Ordering::AcqRel) == 1 {
            files.remove(&slot_file.file.ino());
            self.info(&slot_file).set(0, 0, SlotInfo::KERNEL);
            self.in_use.fetch_sub(1, Ordering::AcqRel);
        }
        drop(files);
        if let Some(settling) = settling {
            let (file, weak) = (slot_file.file.clone(), Arc::downgrade(self));
            self.later(move || {
                let Some(fast) = weak.upgrade() else {
                    return;
                };
                // The kernel keeps attributes from now on. It asks for them before it uses its present ones, because it was not
                // allowed to keep those. So it drops nothing unless it has pages: while the kernel is told to forget attributes, it
                // ignores an answer about them. A program's sendfile would then end at an old size.
                if file.kernel_may_have_pages() {
                    fast.drop_kernel_pages(&file);
                }
                // The file may have another writer by now. A client that becomes a writer later waits until this job is over; see
                // `begin_writes`.
                let is_written = || fast.written_file(file.ino()).is_some();
                if let Err(error) = fast.volume.fs.release_reserved(&file, is_written) {
                    tracing::warn!(ino = file.ino(), %error, "cannot release the space that was reserved for an inline writer");
                }
                fast.has_settled(settling);
            });
        }
    }

    /// Makes a change that gives a file set-id bits or capabilities. Every write has to clear them, so programs write the file
    /// through the kernel from now on, until no program has it open inline.
    pub fn give_privileges<T>(&self, ino: Ino, change: impl FnOnce() -> T) -> T {
        let (_changing, slot_file) = self.begin_change(ino);
        if let Some(slot_file) = slot_file {
            self.end_inline_writes(&slot_file);
        }
        change()
    }

    fn end_inline_writes(&self, slot_file: &SlotFile) {
        // Grants then fail with the reason that the file is mapped.
        self.end_inline(slot_file);
        self.revoke_inline_writes(&slot_file.file);
    }

    /// Revokes the clients' right to write the file's pages, and then absorbs their writes.
    pub(super) fn revoke_inline_writes(&self, file: &Arc<File>) {
        let object = file.object();
        for slice in file.layout().slices() {
            if !self.volume.slice(slice).revoke_writes(&object) {
                tracing::warn!(
                    ino = file.ino(),
                    "a program has not ended an inline write of the file in time"
                );
            }
        }
        self.absorb(file.ino());
    }
}

#[cfg(test)]
pub(super) mod tests;
