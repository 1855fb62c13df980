//! Writes of a file in shared memory.

use jericho_format::{FILE_BYTES_MAX, PAGE_BYTES};

use super::kept::Failed;
use super::put::report;
use crate::session::{InlineFile, Why};
use crate::thread::Thread;
use jericho_shm::SourceParts;

const PAGE: usize = PAGE_BYTES as usize;

impl<'a> InlineFile<'a> {
    /// Writes to one cached page, within the file. Most writes are of this kind. The caller has checked `is_for_writing`. Returns
    /// `None` for any other write; the caller then makes the write with `write`, and some bytes may be written already.
    #[inline(always)]
    pub fn write_page(&self, thread: &Thread, at: u64, data: &[u8]) -> Option<()> {
        let (page, within) = (at / PAGE_BYTES, (at % PAGE_BYTES) as usize);
        self.memory.fetch(thread.recent_hits.frame(page), within, 1);
        debug_assert!(self.may_write);
        if self.memory.is_throttled() {
            return None;
        }
        let seen = self.size_word().ok()?;
        let left = seen.bytes().checked_sub(at)?;
        if data.len() as u64 > left || data.len() > PAGE - within {
            return None;
        }
        let key = self.key.with_page(page);
        let still = || self.is_still() && self.slot.size().same_truncation_count(seen);
        let writer = thread.writer(self.session, self.home())?;
        let line = thread.recent_hits.line(key, || self.memory.home_line(key));
        let written = self
            .memory
            .try_write(line, key, within, data, writer, still)?;
        thread.recent_hits.was_in(page, written.frame);
        if written.was_clean {
            report(self.session, key);
        }
        self.wrote();
        Some(())
    }

    /// Writes `len` bytes (1..=`WRITE_MAX`) of `source` at `at`. When it fails, some bytes may be written, but the file is as
    /// long as before.
    #[inline]
    pub fn write(
        &self,
        at: u64,
        len: usize,
        source: SourceParts<'_, '_>,
    ) -> Result<(), Failed<'a>> {
        self.may_write()?;
        let end = at
            .checked_add(len as u64)
            .filter(|end| *end < FILE_BYTES_MAX);
        let end = end.ok_or(Why::Far)?;
        let seen = self.size_word()?;
        if end <= seen.bytes() {
            return self.write_within(seen, at, len, source);
        }
        self.write_beyond(at, len, source)
    }
}
