//! Absorbs what clients have changed in a file, and changes the file while clients are kept out.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use jericho_format::PAGE_BYTES;
use jericho_fs::File;
use jericho_fs::types::Ino;
use jericho_shm::SizeWord;

use super::Fast;
use super::slot_file::SlotFile;

/// Number of truncations that may interrupt a thread that absorbs the size, before it leaves the size to the next request. Bounds
/// what a malicious client can cost by faking truncations.
const ABSORB_TRIES: u32 = 8;

/// The changes that clients have made to a file.
#[derive(Clone, Copy)]
struct InlineChanges {
    size: SizeWord,
    /// A client has written, so the times change.
    written: bool,
}

impl Fast {
    /// Absorbs the inline changes of clients to a file: dirty pages, size, times. Costs one load when no file is written inline.
    pub fn absorb(&self, ino: Ino) {
        if let Some(slot_file) = self.written_file(ino) {
            self.absorb_file(&slot_file);
        }
    }

    pub(crate) fn absorb_file(&self, slot_file: &SlotFile) {
        // Recursive: a thread that holds locks of `fs` may absorb, while a release waits for one that waits for those locks.
        let _absorbing = slot_file.absorbing.read_recursive();
        for _ in 0..ABSORB_TRIES {
            let changes = self.take_changes(slot_file);
            if self.apply(slot_file, changes) {
                return;
            }
        }
    }

    /// Reads the size and times that clients have changed, and absorbs the pages that the size covers.
    fn take_changes(&self, slot_file: &SlotFile) -> InlineChanges {
        let slot = self.slot(slot_file);
        // Reads the size before it drains the rings: the rings then report every page that the size covers.
        let size = slot.size();
        let written = slot.take_modified() != 0;
        self.drain_reports();
        InlineChanges { size, written }
    }

    /// Applies the size and times in `changes` to the file. Returns false when the file was truncated after they were
    /// read: that size is stale.
    fn apply(&self, slot_file: &SlotFile, changes: InlineChanges) -> bool {
        let file = &slot_file.file;
        let size = changes.size.bytes();
        if size > file.size() {
            // Applies the size only up to the reserved space: a client that claims more is malicious.
            let reserved = file.reserved_end_page() * PAGE_BYTES;
            let end = size.min(reserved);
            if size > reserved {
                self.warn_of_size(slot_file, changes.size, reserved);
            }
            if end > file.size() {
                // A truncation increments the truncation count before it changes the size. Both happen under the lock
                // that `still` runs under.
                let slot = self.slot(slot_file);
                let still = || slot.size().same_truncation_count(changes.size);
                if self.volume.fs.end_write_if(file, end, still) {
                    return true;
                }
                if changes.written {
                    self.volume.fs.end_write(file, 0, 0);
                }
                return false;
            }
        }
        if changes.written {
            self.volume.fs.end_write(file, 0, 0);
        }
        true
    }

    /// Logs, once per slot, that a client claims a size beyond the reserved space. Any of the file's writers may have claimed it.
    /// Logs nothing if the file was truncated since: the reserved space is then newer than the size.
    fn warn_of_size(&self, slot_file: &SlotFile, claimed: SizeWord, reserved: u64) {
        let now = self.slot(slot_file).size();
        if now.same_truncation_count(claimed)
            && !slot_file.size_warned.swap(true, Ordering::Relaxed)
        {
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
        if let Some(slot_file) = self.slot_file(file.ino()) {
            self.slot(&slot_file).grow(|| file.size());
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
        let (_changing, slot_file) = self.begin_change(ino);
        let Some(slot_file) = slot_file else {
            return change();
        };
        let slot = self.slot(&slot_file);
        let seized = self.hold_extend(&slot_file);
        if slot_file.is_written() {
            self.absorb_file(&slot_file);
        }
        // Increments the truncation count before bytes are zeroed or removed: readers and writers compare it
        // (docs/formats/shm.md).
        match to {
            Some(to) => slot.set_size(to.min(slot_file.file.size()), true),
            None => slot.raise_truncation_count(),
        }
        slot.note_removal();
        let wiped = match seized {
            true => self.volume.fs.clear_behind_end(&slot_file.file),
            false => Ok(()),
        };
        let result = wiped.and_then(|()| change());
        match to {
            Some(_) => slot.set_size(slot_file.file.size(), true),
            None => slot.grow(|| slot_file.file.size()),
        }
        self.give_back_extend(&slot_file);
        result
    }

    /// Zeroes what a client left beyond the end of file when it died, or lost the extend lock, during a write that
    /// extends the file.
    pub(crate) fn clear_behind_end(&self, file: &Arc<File>) {
        // `resize` takes the extend lock. If it has to take the lock away from a client, it also zeroes those bytes.
        if let Err(error) = self.resize(file.ino(), None, || Ok(())) {
            tracing::warn!(ino = file.ino(), %error, "cannot zero what an interrupted write left beyond the end of the file");
        }
    }

    /// Zeroes what a client's interrupted write left beyond the end of file. The caller has taken the extend lock from the
    /// client, and holds it.
    pub(super) fn clear_seized(&self, slot_file: &SlotFile) {
        self.absorb_file(slot_file);
        if let Err(error) = self.volume.fs.clear_behind_end(&slot_file.file) {
            tracing::warn!(ino = slot_file.file.ino(), %error, "cannot zero what an interrupted write left beyond the end of the file");
        }
    }
}

#[cfg(test)]
mod tests;
