//! Files with a slot: grants of inline access, and absorbing what clients have changed.

use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};

use jericho_cache::OWNER_DAEMON;
use jericho_format::PAGE_BYTES;
use jericho_format::threads::ThreadPolicy;
use jericho_fs::fs::File;
use jericho_fs::types::{Ino, SliceId};
use jericho_shm::{Refusal, SizeWord, Slot, SlotInfo};
use parking_lot::Mutex;

use super::Fast;
use super::changing::Change;
use super::extend::Extend;
use super::kernel_pages::KernelPages;
use super::range::RangeHolders;
use crate::handle::Handle;
use crate::mounted::Mounted;

/// Number of truncations that may interrupt a thread that absorbs the size, before it leaves the size to the next request. Bounds
/// what a malicious client can cost by faking truncations.
const ABSORB_TRIES: u32 = 8;

/// A file that may be accessed inline.
pub(crate) struct SlotFile {
    pub slot: u32,
    pub file: Arc<File>,
    /// Number of handles that were granted inline access, and number of them that may write. Changed with `Fast::files` locked
    /// for writing.
    pub granted: AtomicU32,
    pub writers: AtomicU32,
    /// Number of reasons against inline access of the file: mapped handles, and changes that gave the file set-id
    /// bits or capabilities (these count until the slot is freed). Changed with `Fast::files` locked for writing.
    pub mapped: AtomicU32,
    pub kernel_pages: KernelPages,
    /// The daemon's hold on the slot's extend lock.
    pub extend: Extend,
    /// The daemon's hold on the words of the range lock.
    pub range: RangeHolders,
    /// The daemon has logged that a client claims a size beyond the reserved space.
    size_warned: AtomicBool,
    /// Held while a writable handle is released.
    closing: Mutex<()>,
    free: Arc<Mutex<FreeSlots>>,
}

/// The inline access that a handle was granted.
#[derive(Default)]
pub(crate) struct Grants {
    pub file: Option<Arc<SlotFile>>,
    pub write: bool,
    pub mapped: bool,
    /// The handle counts as one that uses the file through the kernel alone; see `File::count_kernel_user`.
    pub kernel_user: bool,
}

impl Grants {
    /// Returns the file if the handle writes it inline. Fails with `ReadOnly` otherwise.
    pub(super) fn written(&self) -> Result<&Arc<SlotFile>, Refusal> {
        let file = self.file.as_ref().filter(|_| self.write && !self.mapped);
        file.ok_or(Refusal::ReadOnly)
    }
}

/// Numbers of free slots.
#[derive(Default)]
pub(crate) struct FreeSlots {
    back: Vec<u32>,
    next: u32,
}

impl FreeSlots {
    /// Takes a free number below `count`. Returns `None` when all are taken.
    fn take(&mut self, count: u32) -> Option<u32> {
        if let Some(slot) = self.back.pop() {
            return Some(slot);
        }
        let slot = self.next;
        self.next += u32::from(slot < count);
        (slot < count).then_some(slot)
    }
}

impl Drop for SlotFile {
    /// Frees the slot's number with the last reference to the slot. A thread that still holds the `SlotFile` would otherwise
    /// apply its change to the slot's next file.
    fn drop(&mut self) {
        self.free.lock().back.push(self.slot);
    }
}

/// The changes that clients have made to a file.
#[derive(Clone, Copy)]
struct Changes {
    size: SizeWord,
    /// A client has written, so the times change.
    written: bool,
}

impl SlotFile {
    pub fn is_written(&self) -> bool {
        self.writers.load(Ordering::Acquire) > 0
    }
}

impl Fast {
    /// Returns the file's slot, if it has one.
    pub fn slot_file(&self, ino: Ino) -> Option<Arc<SlotFile>> {
        if self.in_use.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.files.get(ino)
    }

    /// Returns the file's slot, if the file is written inline.
    pub fn written_file(&self, ino: Ino) -> Option<Arc<SlotFile>> {
        if self.written.load(Ordering::Acquire) == 0 {
            return None;
        }
        let files = self.files.part(ino).read();
        files.get(&ino).filter(|file| file.is_written()).cloned()
    }

    pub fn written_files(&self) -> Vec<Arc<SlotFile>> {
        if self.written.load(Ordering::Acquire) == 0 {
            return vec![];
        }
        self.files.all(SlotFile::is_written)
    }

    /// Returns the file's slot, if it has one. A file without a slot gets none until the change is dropped.
    pub(super) fn begin_change(&self, ino: Ino) -> (Change<'_>, Option<Arc<SlotFile>>) {
        let files = self.files.part(ino).read();
        (self.changing.begin(ino), files.get(&ino).cloned())
    }

    pub fn slot(&self, file: &SlotFile) -> &Slot {
        self.slots
            .slot(file.slot)
            .expect("slots are given out within the segment")
    }

    pub fn info(&self, file: &SlotFile) -> &SlotInfo {
        self.control
            .slot(file.slot)
            .expect("slots are given out within the segment")
    }

    /// Grants a handle inline access to its file. Returns the slot and whether the handle is the file's first writer. Fails with
    /// `Slots` when no slot is free, with `SetId` when the handle wants to write and the file may have set-id bits or
    /// capabilities, with `Mapped` while there is another reason against inline access, and with `Busy` when the file has no slot
    /// and gets none during a change; see `await_changes`. A refused handle is not counted, so the file's next writer is its
    /// first one.
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
                let slot = self.free.lock().take(self.slots.count());
                let slot = slot.ok_or(Refusal::Slots)?;
                let made = Arc::new(SlotFile {
                    slot,
                    size_warned: AtomicBool::new(false),
                    closing: Mutex::default(),
                    free: self.free.clone(),
                    file: file.clone(),
                    granted: AtomicU32::new(0),
                    writers: AtomicU32::new(0),
                    mapped: AtomicU32::new(0),
                    kernel_pages: KernelPages::default(),
                    extend: Extend::default(),
                    range: RangeHolders::default(),
                });
                self.slot(&made).open_all(OWNER_DAEMON);
                self.slot(&made).set_size(file.size(), true);
                self.slot(&made).take_modified();
                self.info(&made).set_policy(file.threads().policy());
                self.info(&made).set(file.ino(), file.layout().home(), 0);
                // The file's previous slot may have ended inline writes.
                file.set_inline_writes(true);
                files.insert(file.ino(), made.clone());
                self.in_use.fetch_add(1, Ordering::AcqRel);
                // A write that found no slot has extended the file earlier; see `size_grew`.
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
                // Counts the file as written first: a write of the mount that `begin_writes` does not wait for then takes the
                // locks.
                self.written.fetch_add(1, Ordering::AcqRel);
                self.begin_writes(&slot_file);
                file.count_first_writer();
            }
        }
        Ok((slot_file, first))
    }

    /// Waits until no change is in progress that keeps the file from getting a slot.
    pub(super) fn await_changes(&self, ino: Ino) {
        if self.slot_file(ino).is_none() {
            self.changing.wait(ino);
        }
    }

    /// Counts a handle as one that uses the file through the kernel alone, until it is granted inline access or released. Such a
    /// handle keeps clients from extending the file inline, because the kernel uses the size that it last learned: for sendfile,
    /// splice, copies and mappings of a program without the library, and for appends of that program (RWF_APPEND begins there,
    /// O_APPEND moves the offset there).
    pub(crate) fn uses_kernel(&self, handle: &Handle) {
        let mut grants = handle.grants.lock();
        if !grants.kernel_user && grants.file.is_none() {
            grants.kernel_user = true;
            handle.file.count_kernel_user(true);
            self.update_growth(&handle.file);
        }
    }

    /// Tells the file's writers whether they may extend it, after the number of such handles has changed.
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
    pub fn release(&self, mounted: &Mounted, handle: &Handle) {
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
        let mut last_writer = false;
        if grants.write {
            // Serializes closes: of two concurrent closes, one must see that it is the last.
            let _closing = slot_file.closing.lock();
            // Runs while the file still counts as written, because a thread that extends the file checks that.
            if slot_file.writers.load(Ordering::Acquire) == 1 {
                self.end_writes(mounted, &slot_file);
            }
            mounted.absorb_file(&slot_file);
            let _files = part.write();
            last_writer = slot_file.writers.fetch_sub(1, Ordering::AcqRel) == 1;
            if last_writer {
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
        if last_writer {
            let (file, weak) = (slot_file.file.clone(), self.mounted.get().cloned());
            self.later(move || {
                let Some(mounted) = weak.and_then(|m| m.upgrade()) else {
                    return;
                };
                // The kernel keeps attributes from now on. Its present ones may be stale, so they are dropped.
                mounted.fast.drop_kernel_pages(&file);
                // The file may have another writer by now. A client that becomes a writer later waits until this job is over; see
                // `begin_writes`.
                let is_written = || mounted.fast.written_file(file.ino()).is_some();
                if let Err(error) = mounted.fs().release_promises(&file, is_written) {
                    tracing::warn!(ino = file.ino(), %error, "cannot release the space that was reserved for an inline writer");
                }
            });
        }
    }
}

impl Mounted {
    /// Sets the policy for migrating threads to an inode's data (see `Fs::set_threads`), also for programs that have it open.
    pub fn set_threads(&self, ino: Ino, policy: Option<ThreadPolicy>) -> jericho_fs::Result<()> {
        self.fs().set_threads(ino, policy)?;
        if let Some(slot_file) = self.fast.slot_file(ino) {
            let policy = slot_file.file.threads().policy();
            self.fast.info(&slot_file).set_policy(policy);
        }
        Ok(())
    }

    /// Returns whether the kernel may keep a file's attributes. It may not while clients change them inline.
    pub fn attributes_may_be_kept(&self, ino: Ino) -> bool {
        self.fast.written_file(ino).is_none()
    }

    /// Absorbs the inline changes of clients to a file: dirty pages, size, times. Costs one load when no file is written inline.
    pub fn absorb(&self, ino: Ino) {
        if let Some(slot_file) = self.fast.written_file(ino) {
            self.absorb_file(&slot_file);
        }
    }

    pub(crate) fn absorb_file(&self, slot_file: &SlotFile) {
        for _ in 0..ABSORB_TRIES {
            let changes = self.take_changes(slot_file);
            if self.apply(slot_file, changes) {
                return;
            }
        }
    }

    /// Reads the size and times that clients have changed, and absorbs the pages that the size covers.
    fn take_changes(&self, slot_file: &SlotFile) -> Changes {
        let slot = self.fast.slot(slot_file);
        // Reads the size before it drains the rings: the rings then report every page that the size covers.
        let size = slot.size();
        let written = slot.take_modified() != 0;
        self.fast.drain_reports();
        Changes { size, written }
    }

    /// Applies the size and times in `changes` to the file. Returns false when the file was truncated after they were
    /// read: that size is stale.
    fn apply(&self, slot_file: &SlotFile, changes: Changes) -> bool {
        let file = &slot_file.file;
        let size = changes.size.bytes();
        if size > file.size() {
            // Applies the size only up to the reserved space: a client that claims more is malicious.
            let reserved = file.promised_end_page() * PAGE_BYTES;
            let end = size.min(reserved);
            if size > reserved {
                self.warn_of_size(slot_file, changes.size, reserved);
            }
            if end > file.size() {
                // A truncation increments the truncation count before it changes the size. Both happen under the lock
                // that `still` runs under.
                let slot = self.fast.slot(slot_file);
                let still = || slot.size().same_cuts(changes.size);
                if self.fs().end_write_if(file, end, still) {
                    return true;
                }
                if changes.written {
                    self.fs().end_write(file, 0, 0);
                }
                return false;
            }
        }
        if changes.written {
            self.fs().end_write(file, 0, 0);
        }
        true
    }

    /// Logs, once per slot, that a client claims a size beyond the reserved space. Any of the file's writers may have claimed it.
    /// Logs nothing if the file was truncated since: the reserved space is then newer than the size.
    fn warn_of_size(&self, slot_file: &SlotFile, claimed: SizeWord, reserved: u64) {
        let now = self.fast.slot(slot_file).size();
        if now.same_cuts(claimed) && !slot_file.size_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                ino = slot_file.file.ino(),
                claimed = claimed.bytes(),
                reserved,
                "a program claims that a file is longer than the space reserved for it; bytes beyond it are ignored"
            );
        }
    }

    /// Updates the slot after the daemon may have extended the file.
    pub(crate) fn size_grew(&self, file: &File) {
        // Pairs with the creation of a slot: either its creator sees the new size, or this thread sees the slot.
        fence(Ordering::SeqCst);
        if let Some(slot_file) = self.fast.slot_file(file.ino()) {
            self.fast.slot(&slot_file).grow(|| file.size());
        }
    }

    /// Changes a file by `change` while inline writers are kept out, and notifies readers. `to`: the size after a truncation or
    /// O_TRUNC; `None` for fallocate.
    pub(crate) fn resize<T>(
        &self,
        ino: Ino,
        to: Option<u64>,
        change: impl FnOnce() -> jericho_fs::Result<T>,
    ) -> jericho_fs::Result<T> {
        let (_changing, slot_file) = self.fast.begin_change(ino);
        let Some(slot_file) = slot_file else {
            return change();
        };
        let slot = self.fast.slot(&slot_file);
        let seized = self.fast.hold_extend(&slot_file);
        if slot_file.is_written() {
            self.absorb_file(&slot_file);
        }
        // Increments the truncation count before bytes are zeroed or removed: readers and writers compare it
        // (docs/formats/shm.md).
        match to {
            Some(to) => slot.set_size(to.min(slot_file.file.size()), true),
            None => slot.cut(),
        }
        slot.note_removal();
        let wiped = match seized {
            true => self.fs().clear_behind_end(&slot_file.file),
            false => Ok(()),
        };
        let result = wiped.and_then(|()| change());
        match to {
            Some(_) => slot.set_size(slot_file.file.size(), true),
            None => slot.grow(|| slot_file.file.size()),
        }
        self.fast.give_back_extend(&slot_file);
        result
    }

    /// Zeroes what a client left beyond the end of file when it died, or lost the extend lock, during a write that
    /// extends the file.
    pub(crate) fn clear_behind_end(&self, file: &Arc<File>) {
        // Taking the lock away also zeroes those bytes.
        if let Err(error) = self.resize(file.ino(), None, || Ok(())) {
            tracing::warn!(ino = file.ino(), %error, "cannot zero what an interrupted write left beyond the end of the file");
        }
    }

    /// Zeroes the same bytes after the extend lock was taken from a client. The caller holds the lock.
    pub(super) fn clear_seized(&self, slot_file: &SlotFile) {
        self.absorb_file(slot_file);
        if let Err(error) = self.fs().clear_behind_end(&slot_file.file) {
            tracing::warn!(ino = slot_file.file.ino(), %error, "cannot zero what an interrupted write left beyond the end of the file");
        }
    }

    /// Moves an inode to another slice; see `Fs::move_to`.
    pub fn move_to(&self, ino: Ino, slice: SliceId) -> jericho_fs::Result<()> {
        let result = self.fs().move_to(ino, slice);
        if let Some(slot_file) = self.fast.slot_file(ino) {
            let home = slot_file.file.layout().home();
            self.fast.info(&slot_file).set_home(home);
        }
        result
    }
}

#[cfg(test)]
pub(super) mod tests;
