//! How the hits of a thread count: looked up once for several of them, as that takes longer than counting.
//!
//! So a thread that the kernel has moved counts a few small hits for the node that it left.

use std::cell::Cell;

use jericho_shm::{Access, Area};

/// Hits for which what was looked up is good.
const HITS: u8 = 16;

/// Where hits of a file count.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Line of counters in the session's area.
    pub line: u32,
    /// Whether that is the thread's alone.
    pub alone: bool,
    /// Whether the thread is on the node of the data.
    pub local: bool,
    /// Cell of `placement::Thread`; `None`: not followed.
    pub used: Option<u8>,
}

/// The file that the thread used last, and where its hits count.
#[derive(Debug)]
pub struct Tally {
    file: Cell<u64>,
    hits: Cell<u8>,
    place: Cell<Place>,
}

impl Tally {
    /// Of a thread that has used none.
    pub const fn new() -> Tally {
        Tally {
            file: Cell::new(0),
            hits: Cell::new(0),
            place: Cell::new(Place {
                line: 0,
                alone: false,
                local: false,
                used: None,
            }),
        }
    }

    /// Where the next hit of a file counts. `file`: a number that tells it from others; `find`: looks that up.
    #[inline(always)]
    pub fn place(&self, file: u64, find: impl FnOnce() -> Place) -> Place {
        let hits = self.hits.get();
        if self.file.get() != file || hits == 0 {
            self.file.set(file);
            self.hits.set(HITS);
            self.place.set(find());
        } else {
            self.hits.set(hits - 1);
        }
        self.place.get()
    }

    /// Things are different now.
    pub fn forget(&self) {
        self.hits.set(0);
    }
}

impl Place {
    /// Counts a call that was one hit of that many bytes.
    #[inline(always)]
    pub fn count(self, area: &Area, write: bool, bytes: usize) {
        let access = Access {
            local: self.local,
            write,
            pages: 1,
            bytes: bytes as u64,
            calls: 1,
        };
        area.counter_at(self.line).add(access, self.alone);
    }
}
