//! What a thread found out for its last hit, which mostly is good for the next one.

use std::cell::Cell;

use jericho_shm::{Access, Counter, Key};

use crate::description::Description;
use crate::fast::File;
use crate::migration;
use crate::reentrancy::Thread;

/// Hits for which it is good where they count. A thread that the kernel moves counts so many, of a page at most, for the
/// node that it left.
const HITS: u8 = 32;

/// Pages that were read or written one behind the other lie in neighbouring frames: so many, mostly.
const REGION_PAGES: u64 = 256;
/// Regions of which a thread remembers where they are: of 128 MiB.
const REGIONS: usize = 128;

/// Where hits of a file count.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// Counters in the session's area.
    pub counter: &'a Counter,
    /// Whether they are the thread's alone.
    pub alone: bool,
    /// Whether the thread is on the node of the data.
    pub local: bool,
    /// Cell of `migration::Thread`; `None`: not followed.
    pub used: Option<u8>,
}

/// See the module.
pub struct RecentHits {
    /// Word of its number; 0: none.
    word: Cell<u64>,
    /// The same if the file may be written inline; 0: it may not.
    word_to_write: Cell<u64>,
    file: Cell<Option<(&'static Description, File<'static>)>>,
    /// Group of pages (0: none), and its line.
    group: Cell<u64>,
    line: Cell<u32>,
    /// Hits for which `place` is good, and bytes of those before.
    hits: Cell<u8>,
    bytes: Cell<u32>,
    place: Cell<Option<Place<'static>>>,
    /// Of each region of a file, the frame of one of its pages less the page: the same for all that lie in neighbouring frames.
    /// What a file before this one has left is a wrong guess.
    frames: [Cell<u32>; REGIONS],
}

impl RecentHits {
    /// Of a thread that had no hit.
    pub const fn new() -> RecentHits {
        RecentHits {
            word: Cell::new(0),
            word_to_write: Cell::new(0),
            file: Cell::new(None),
            group: Cell::new(0),
            line: Cell::new(0),
            hits: Cell::new(0),
            bytes: Cell::new(0),
            place: Cell::new(None),
            frames: [const { Cell::new(0) }; REGIONS],
        }
    }

    /// Returns the description and the file of the last hit, if that was by a number with this word, and, with `write`, if the file may be
    /// written inline.
    #[inline(always)]
    pub fn file(&self, word: u64, write: bool) -> Option<(&'static Description, File<'static>)> {
        let last = match write {
            true => &self.word_to_write,
            false => &self.word,
        };
        match last.get() == word {
            true => self.file.get(),
            false => None,
        }
    }

    /// This hit is of another.
    pub fn set(
        &self,
        migration: &migration::Thread,
        word: u64,
        description: &'static Description,
        file: File<'static>,
    ) {
        self.forget(migration);
        self.file.set(Some((description, file)));
        self.word.set(word);
        let may_write = file.is_for_writing();
        self.word_to_write.set(if may_write { word } else { 0 });
    }

    /// The line of the tables to which a page belongs; `find` looks that up. Neighbouring pages share one.
    #[inline(always)]
    pub fn line(&self, key: Key, find: impl FnOnce() -> u32) -> u32 {
        if self.group.get() != key.group() {
            self.group.set(key.group());
            self.line.set(find());
        }
        self.line.get()
    }

    /// The frame where a page of the last file probably is.
    #[inline(always)]
    pub fn frame(&self, page: u64) -> u32 {
        self.region(page).get().wrapping_add(page as u32)
    }

    /// A page of the last file was there.
    #[inline(always)]
    pub fn was_in(&self, page: u64, frame: u32) {
        self.region(page).set(frame.wrapping_sub(page as u32));
    }

    #[inline(always)]
    fn region(&self, page: u64) -> &Cell<u32> {
        &self.frames[(page / REGION_PAGES) as usize % REGIONS]
    }

    /// Counts a hit of the last file, of that many bytes.
    #[inline(always)]
    pub fn count(&self, thread: &Thread, write: bool, bytes: usize) {
        let (left, is_over) = self.hits.get().overflowing_sub(1);
        self.hits.set(left);
        if is_over {
            self.renew(thread);
        }
        self.bytes.set(self.bytes.get().wrapping_add(bytes as u32));
        if let Some(place) = self.place.get() {
            place.count(write, bytes);
        }
    }

    #[cold]
    fn renew(&self, thread: &Thread) {
        self.hits.set(0);
        self.flush(&thread.migration);
        self.hits.set(HITS - 1);
        if let Some((_, file)) = self.file.get() {
            self.place.set(Some(file.place(thread)));
        }
        if thread.migration.is_due() {
            // Whoever looks for the file anew sees to it.
            self.word.set(0);
            self.word_to_write.set(0);
        }
    }

    /// Marks an entry of the last file as used.
    #[cold]
    pub fn mark(&self, index: u32) {
        if let Some((_, file)) = self.file.get() {
            file.mark_anew(index);
        }
    }

    /// What was used is told to who decides where the thread runs.
    fn flush(&self, migration: &migration::Thread) {
        let bytes = self.bytes.take();
        if bytes == 0 {
            return;
        }
        if let Some(cell) = self.place.get().and_then(|place| place.used) {
            let hits = u32::from(HITS - self.hits.get().min(HITS));
            migration.add(cell, hits, bytes as usize);
        }
    }

    /// Things are different now.
    #[cold]
    pub fn forget(&self, migration: &migration::Thread) {
        self.flush(migration);
        self.word.set(0);
        self.word_to_write.set(0);
        self.group.set(0);
        self.hits.set(0);
    }
}

impl Place<'_> {
    /// Counts a call that was one hit of that many bytes.
    #[inline(always)]
    fn count(self, write: bool, bytes: usize) {
        let access = Access {
            local: self.local,
            write,
            pages: 1,
            bytes: bytes as u64,
            calls: 1,
        };
        self.counter.add(access, self.alone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_where_its_neighbours_say() {
        let recent_hits = RecentHits::new();
        recent_hits.was_in(1000, 5000);
        assert_eq!(
            (recent_hits.frame(1000), recent_hits.frame(1001)),
            (5000, 5001)
        );
        assert_eq!(recent_hits.frame(770), 4770);
        // Neighbours that lie before the first frame, and pages beyond what 32 bits say, are as good as any guess.
        recent_hits.was_in(3, 1);
        assert_eq!((recent_hits.frame(4), recent_hits.frame(2)), (2, 0));
        let far = 1 << 33 | 5;
        recent_hits.was_in(far, 9);
        assert_eq!(recent_hits.frame(far + 1), 10);
        assert_eq!(recent_hits.frame(1000), 5000, "another region");
    }
}
