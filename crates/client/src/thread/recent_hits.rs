//! What a thread remembers of its last hit. The next hit can usually use it again.

use std::cell::Cell;

use jericho_shm::Key;

use super::tally::AccessTally;
use crate::descriptors::Description;
use crate::migration::ThreadUse;
use crate::session::InlineFile;

/// Hits after which a thread checks again where its hits count. After the kernel has moved the thread, at most this number of
/// hits, of at most a page each, counts for the node that it left.
const HITS: u8 = 32;

/// Pages in a region. Pages that were read or written in sequence usually lie in neighbouring frames.
const REGION_PAGES: u64 = 256;
/// Regions whose frames a thread remembers: 128 MiB.
const REGIONS: usize = 128;

/// A thread's memory of its last hits.
pub struct RecentHits {
    /// Word of the fd; 0: none.
    word: Cell<u64>,
    /// The same word if the file may be written inline; otherwise 0.
    word_to_write: Cell<u64>,
    file: Cell<Option<(&'static Description, InlineFile<'static>)>>,
    /// Group of pages (0: none), and its line of the table.
    group: Cell<u64>,
    line: Cell<u32>,
    /// Hits until `tally` is renewed, and the bytes of the hits since the last renewal.
    hits: Cell<u8>,
    bytes: Cell<u32>,
    tally: Cell<Option<AccessTally<'static>>>,
    /// For each region of a file, the frame of one of its pages minus the page number. The difference is equal for all pages that
    /// lie in neighbouring frames. Entries of an earlier file are harmless: they are hints.
    frames: [Cell<u32>; REGIONS],
}

impl RecentHits {
    /// Returns the memory of a thread without hits.
    pub const fn new() -> RecentHits {
        RecentHits {
            word: Cell::new(0),
            word_to_write: Cell::new(0),
            file: Cell::new(None),
            group: Cell::new(0),
            line: Cell::new(0),
            hits: Cell::new(0),
            bytes: Cell::new(0),
            tally: Cell::new(None),
            frames: [const { Cell::new(0) }; REGIONS],
        }
    }

    /// Returns the description and the file of the last hit, if its fd had the word `word`, and, with `write`, if the file may be
    /// written inline.
    #[inline(always)]
    pub fn file(
        &self,
        word: u64,
        write: bool,
    ) -> Option<(&'static Description, InlineFile<'static>)> {
        let last = match write {
            true => &self.word_to_write,
            false => &self.word,
        };
        match last.get() == word {
            true => self.file.get(),
            false => None,
        }
    }

    /// Remembers a hit of another file.
    pub fn set(
        &self,
        migration: &ThreadUse,
        word: u64,
        description: &'static Description,
        file: InlineFile<'static>,
    ) {
        self.forget(migration);
        self.file.set(Some((description, file)));
        self.word.set(word);
        let may_write = file.is_for_writing();
        self.word_to_write.set(if may_write { word } else { 0 });
    }

    /// Returns the line of the table to which a page belongs. Calls `find` when the last hit was in another group: neighbouring
    /// pages share a line.
    #[inline(always)]
    pub fn line(&self, key: Key, find: impl FnOnce() -> u32) -> u32 {
        if self.group.get() != key.group() {
            self.group.set(key.group());
            self.line.set(find());
        }
        self.line.get()
    }

    /// Returns the frame where a page of the last file probably is.
    #[inline(always)]
    pub fn frame(&self, page: u64) -> u32 {
        self.region(page).get().wrapping_add(page as u32)
    }

    /// Records that `frame` held a page of the last file.
    #[inline(always)]
    pub fn was_in(&self, page: u64, frame: u32) {
        self.region(page).set(frame.wrapping_sub(page as u32));
    }

    #[inline(always)]
    fn region(&self, page: u64) -> &Cell<u32> {
        &self.frames[(page / REGION_PAGES) as usize % REGIONS]
    }

    /// Counts a hit of the last file, of `bytes` bytes. Calls `renew` first if the thread has to check again where its hits count.
    #[inline(always)]
    pub fn count(&self, write: bool, bytes: usize, renew: impl FnOnce()) {
        let (left, is_over) = self.hits.get().overflowing_sub(1);
        self.hits.set(left);
        if is_over {
            renew();
        }
        self.bytes.set(self.bytes.get().wrapping_add(bytes as u32));
        if let Some(tally) = self.tally.get() {
            tally.count(write, bytes);
        }
    }

    /// Calls `find` to learn where the hits of the last file count from now on.
    pub fn renew(
        &self,
        migration: &ThreadUse,
        find: impl FnOnce(&InlineFile<'static>) -> AccessTally<'static>,
    ) {
        self.hits.set(0);
        self.flush(migration);
        self.hits.set(HITS - 1);
        if let Some((_, file)) = self.file.get() {
            self.tally.set(Some(find(&file)));
        }
        if migration.is_due() {
            // The next call then looks the file up again, and migrates the thread if due.
            self.word.set(0);
            self.word_to_write.set(0);
        }
    }

    /// Returns the file of the last hit.
    pub fn last_file(&self) -> Option<InlineFile<'static>> {
        Some(self.file.get()?.1)
    }

    /// Adds the bytes since the last renewal to the thread's use, from which its migration is decided.
    fn flush(&self, migration: &ThreadUse) {
        let bytes = self.bytes.take();
        if bytes == 0 {
            return;
        }
        if let Some(cell) = self.tally.get().and_then(|tally| tally.used) {
            let hits = u32::from(HITS - self.hits.get().min(HITS));
            migration.add(cell, hits, bytes as usize);
        }
    }

    /// Forgets the last hit.
    #[cold]
    pub fn forget(&self, migration: &ThreadUse) {
        self.flush(migration);
        self.word.set(0);
        self.word_to_write.set(0);
        self.group.set(0);
        self.hits.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_guessed_from_neighbouring_pages() {
        let recent_hits = RecentHits::new();
        recent_hits.was_in(1000, 5000);
        assert_eq!(
            (recent_hits.frame(1000), recent_hits.frame(1001)),
            (5000, 5001)
        );
        assert_eq!(recent_hits.frame(770), 4770);
        // Neighbours before the first frame and pages beyond 32 bits give a guess, which does no harm.
        recent_hits.was_in(3, 1);
        assert_eq!((recent_hits.frame(4), recent_hits.frame(2)), (2, 0));
        let far = 1 << 33 | 5;
        recent_hits.was_in(far, 9);
        assert_eq!(recent_hits.frame(far + 1), 10);
        assert_eq!(recent_hits.frame(1000), 5000, "another region");
    }
}
