//! Counts the pages in spill ranges that a call of the thread accesses. A range may be on any node, so the client compares the range's node with the
//! thread's.

use std::cell::Cell;

use crate::session::InlineFile;

/// Pages and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pages {
    /// Pages.
    pub pages: u64,
    /// Bytes.
    pub bytes: u64,
}

/// Pages in spill ranges that a call, or a part of it, has accessed.
#[derive(Debug)]
pub struct Spilled {
    /// On the node of the thread.
    near: Cell<Pages>,
    /// On another node.
    far: Cell<Pages>,
}

impl Spilled {
    /// Returns no pages.
    pub const fn new() -> Spilled {
        const NONE: Pages = Pages { pages: 0, bytes: 0 };
        Spilled {
            near: Cell::new(NONE),
            far: Cell::new(NONE),
        }
    }

    /// Notes that the calling thread has accessed `bytes` bytes of a page of a file. The page is in `frame`, which is in a spill range.
    #[cold]
    pub fn note(&self, file: &InlineFile<'_>, frame: u32, bytes: usize) {
        let cpu = jericho_sys::rseq::current_cpu();
        let node = file.session.control.node_of_cpu(cpu);
        let is_near = file.memory.node_of_spilled(frame) == Some(node);
        self.add_pages(is_near, 1, bytes as u64);
    }

    fn add_pages(&self, is_near: bool, pages: u64, bytes: u64) {
        let cell = if is_near { &self.near } else { &self.far };
        let before = cell.get();
        cell.set(Pages {
            pages: before.pages + pages,
            bytes: before.bytes + bytes,
        });
    }

    /// Adds what a part of the call has accessed.
    pub fn add(&self, part: &Spilled) {
        for (is_near, of_part) in [(true, part.near.get()), (false, part.far.get())] {
            self.add_pages(is_near, of_part.pages, of_part.bytes);
        }
    }

    /// Replaces the counts by those of an attempt.
    pub fn set(&self, attempt: &Spilled) {
        self.near.set(attempt.near.get());
        self.far.set(attempt.far.get());
    }

    /// Returns the pages on the thread's node and those elsewhere, and forgets them.
    pub fn take(&self) -> [Pages; 2] {
        [self.near.take(), self.far.take()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up_attempts_replace_each_other_and_pages_are_taken_once() {
        let (call, part) = (Spilled::new(), Spilled::new());
        part.add_pages(true, 1, 10);
        part.add_pages(false, 1, 4096);
        part.add_pages(false, 1, 4);
        let pages = |pages, bytes| Pages { pages, bytes };
        call.add(&part);
        call.add(&part);
        assert_eq!(call.take(), [pages(2, 20), pages(4, 8200)]);
        assert_eq!(call.take(), [Pages::default(); 2]);
        call.set(&part);
        call.set(&part);
        assert_eq!(call.take(), [pages(1, 10), pages(2, 4100)]);
    }
}
