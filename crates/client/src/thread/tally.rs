//! Where accesses are counted.

use jericho_shm::{Access, Counter};

/// Where a thread counts its accesses to a file.
#[derive(Clone, Copy, Debug)]
pub struct AccessTally<'a> {
    /// Counters in the session's area.
    pub counter: &'a Counter,
    /// Whether the counters are the thread's own.
    pub alone: bool,
    /// Whether the thread is on the node of the data.
    pub local: bool,
    /// Cell of the thread's `ThreadUse`; `None`: the access does not count for migration.
    pub used: Option<u8>,
}

impl AccessTally<'_> {
    /// Counts a call that was one hit of `bytes` bytes.
    #[inline(always)]
    pub fn count(self, write: bool, bytes: usize) {
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
