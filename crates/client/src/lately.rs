//! What a thread found out for its last hit, which mostly is good for the next one.

use std::cell::Cell;

use jericho_shm::{Access, Area, Key};

use crate::fast::File;
use crate::inside::Thread;
use crate::placement;

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
    /// Group of pages (0: none), and its line.
    group: Cell<u64>,
    line: Cell<u32>,
    /// Hits for which `place` is good, and bytes of those before.
    hits: Cell<u8>,
    bytes: Cell<u32>,
    place: Cell<Place>,
}

impl Lately {
    /// Of a thread that had no hit.
    pub const fn new() -> Lately {
        Lately {
            description: Cell::new(0),
            file: Cell::new(None),
            group: Cell::new(0),
            line: Cell::new(0),
            hits: Cell::new(0),
            bytes: Cell::new(0),
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
    pub fn set(
        &self,
        placement: &placement::Thread,
        index: u32,
        generation: u32,
        file: File<'static>,
    ) {
        self.forget(placement);
        self.file.set(Some(file));
        self.description
            .set(u64::from(index) << 32 | u64::from(generation));
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

    /// Where a hit of the last file counts, of that many bytes.
    #[inline(always)]
    pub fn place(&self, thread: &Thread, bytes: usize) -> Place {
        if self.hits.get() == 0 {
            self.renew(thread);
        }
        self.hits.set(self.hits.get().wrapping_sub(1));
        self.bytes.set(self.bytes.get().wrapping_add(bytes as u32));
        self.place.get()
    }

    #[cold]
    fn renew(&self, thread: &Thread) {
        self.flush(&thread.placement);
        self.hits.set(HITS);
        if let Some(file) = self.file.get() {
            self.place.set(file.place(thread));
        }
        if thread.placement.is_due() {
            // Whoever looks for the file anew sees to it.
            self.description.set(0);
        }
    }

    /// Marks an entry of the last file as used.
    #[cold]
    pub fn mark(&self, index: u32) {
        if let Some(file) = self.file.get() {
            file.mark_anew(index);
        }
    }

    /// What was used is told to who decides where the thread runs.
    fn flush(&self, placement: &placement::Thread) {
        let bytes = self.bytes.take();
        if bytes == 0 {
            return;
        }
        if let Some(cell) = self.place.get().used {
            let hits = u32::from(HITS - self.hits.get().min(HITS));
            placement.add(cell, hits, bytes as usize);
        }
    }

    /// Things are different now.
    #[cold]
    pub fn forget(&self, placement: &placement::Thread) {
        self.flush(placement);
        self.description.set(0);
        self.group.set(0);
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
