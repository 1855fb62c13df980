//! Takes the locks of a slot for threads of the daemon, and borrows the locks that a client lends to the daemon.

use jericho_shm::{RangeTaken, Segments, SlotLock};

use super::Fast;
use super::slot_file::SlotFile;

impl Fast {
    /// Takes the extend lock of a file for the daemon; see `ExtendHolders::hold`.
    #[must_use]
    pub(super) fn hold_extend(&self, file: &SlotFile) -> bool {
        let lends = |held| self.lends(file, SlotLock::Extend, held);
        file.extend.hold(self.slot(file), lends)
    }

    /// Gives back what `hold_extend` took, in any thread.
    pub(super) fn give_back_extend(&self, file: &SlotFile) {
        let is_lent = |held| self.has_lent(file, SlotLock::Extend, held);
        file.extend.give_back(self.slot(file), is_lent);
    }

    /// Takes the words of a file that a write of the daemon covers; see `RangeHolders::lock`.
    pub(super) fn lock_range(&self, file: &SlotFile, segments: Segments) -> RangeTaken {
        let lends = |word, held| self.lends(file, SlotLock::Word(word), held);
        let taken = file.range.lock(self.slot(file), segments, lends);
        for (word, held) in taken.borrowed() {
            self.note_borrowed(file, word, held);
        }
        taken
    }

    /// Takes the words of a file for a read; see `RangeHolders::lock_out`.
    pub(super) fn lock_out(&self, file: &SlotFile, segments: Segments) -> RangeTaken {
        let lends = |word, held| self.lends(file, SlotLock::Word(word), held);
        file.range.lock_out(self.slot(file), segments, lends)
    }

    /// Releases what `lock_range` or `lock_out` took, in any thread.
    pub(super) fn unlock_range(&self, file: &SlotFile, taken: &RangeTaken) {
        let is_lent = |word, held| self.has_lent(file, SlotLock::Word(word), held);
        file.range.unlock(self.slot(file), taken, is_lent);
    }
}
