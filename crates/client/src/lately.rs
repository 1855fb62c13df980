//! What a thread found out for its last hit, which mostly is good for the next one.

use std::cell::Cell;

use jericho_shm::{Access, Area};

use crate::fast::File;

/// Hits for which it is good where they count. A thread that the kernel moves counts so many, of a page at most, for the
/// node that it left.
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

/// See the module.
pub struct Lately {
    /// Index and generation; 0: none. A description's generation is odd.
    description: Cell<u64>,
    file: Cell<Option<File<'static>>>,
    hits: Cell<u8>,
    place: Cell<Place>,
}

impl Lately {
    /// Of a thread that had no hit.
    pub const fn new() -> Lately {
        Lately {
            description: Cell::new(0),
            file: Cell::new(None),
            hits: Cell::new(0),
            place: Cell::new(Place {
                line: 0,
                alone: false,
                local: false,
                used: None,
            }),
        }
    }

    /// Whether the last hit was of this description.
    #[inline(always)]
    pub fn is(&self, index: u32, generation: u32) -> bool {
        self.description.get() == u64::from(index) << 32 | u64::from(generation)
    }

    /// The file of the last hit.
    #[inline(always)]
    pub fn file(&self) -> Option<File<'static>> {
        self.file.get()
    }

    /// This hit is of another.
    pub fn set(&self, index: u32, generation: u32, file: File<'static>) {
        self.file.set(Some(file));
        self.description
            .set(u64::from(index) << 32 | u64::from(generation));
        self.hits.set(0);
    }

    /// Where a hit of the file counts; `find` looks that up.
    #[inline(always)]
    pub fn place(&self, find: impl FnOnce() -> Place) -> Place {
        match self.hits.get() {
            0 => {
                self.hits.set(HITS);
                self.place.set(find());
            }
            hits => self.hits.set(hits - 1),
        }
        self.place.get()
    }

    /// Things are different now.
    pub fn forget(&self) {
        self.description.set(0);
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
