//! The daemon's writes take the same locks as inline writers of the file.

use std::ops::Range;
use std::sync::Arc;

use jericho_fs::File;
use jericho_shm::{RangeTaken, Segments};

use super::Fast;
use super::slot_file::SlotFile;
use crate::pages::is_over_several_pages;

/// Locks held for a write; given back on drop, in any thread.
pub(crate) struct WriteGuard {
    fast: Arc<Fast>,
    file: Arc<SlotFile>,
    extend: bool,
    range: RangeTaken,
}

impl WriteGuard {
    /// Takes the locks for a write of `len` bytes at `offset` (`None`: at the end) if clients write the file inline. Takes a lock
    /// away from a client that has held it for a second, because a stopped client must not stop others. Borrows the locks of a
    /// client that has made half of a write: this request, or a later one, repeats or ends that write.
    pub fn take(
        fast: &Arc<Fast>,
        file: Arc<SlotFile>,
        offset: Option<u64>,
        len: u64,
    ) -> WriteGuard {
        let slot = fast.slot(&file);
        let beyond = offset.is_none_or(|offset| offset + len > slot.size().bytes());
        let seized = beyond && fast.hold_extend(&file);
        let several = offset.filter(|offset| is_over_several_pages(*offset, len));
        let range = several.map_or_else(RangeTaken::none, |offset| {
            fast.lock_range(&file, Segments::of(offset, len))
        });
        match seized {
            true => fast.clear_seized(&file),
            false => fast.absorb_file(&file),
        }
        WriteGuard {
            fast: fast.clone(),
            file,
            extend: beyond,
            range,
        }
    }

    /// Takes the words for a change that zeroes bytes of a file page by page, so that no write over several of the pages begins
    /// and ends in between. Returns `None` if the file has no slot, or the bytes are within one page. The caller is inside
    /// `Fast::resize`, so the file gets no slot and is not extended meanwhile.
    pub fn for_zeroing(fast: &Arc<Fast>, file: &File, bytes: Range<u64>) -> Option<WriteGuard> {
        // Only bytes within the file count, because writes beyond its end wait for the extend lock.
        let len = bytes.end.min(file.size()).saturating_sub(bytes.start);
        if !is_over_several_pages(bytes.start, len) {
            return None;
        }
        let file = fast.slot_file(file.ino())?;
        let range = fast.lock_range(&file, Segments::of(bytes.start, len));
        Some(WriteGuard {
            fast: fast.clone(),
            file,
            extend: false,
            range,
        })
    }

    /// Returns whether the guard holds the locks of a file.
    pub fn is_of(&self, file: &Arc<SlotFile>) -> bool {
        Arc::ptr_eq(&self.file, file)
    }
}

impl Drop for WriteGuard {
    fn drop(&mut self) {
        self.fast.unlock_range(&self.file, &self.range);
        if self.extend {
            self.fast.give_back_extend(&self.file);
        }
    }
}

#[cfg(test)]
mod tests;
