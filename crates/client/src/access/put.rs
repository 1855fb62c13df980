//! Writes to cached pages under the locks of a write.

use jericho_shm::{
    Key, RangeHeld, Segments, SizeWord, Slot, SourceParts, Writer, WrittenPage, is_in_page, pieces,
};
use jericho_sys::files;

use super::kept::{Begun, Failed};
use crate::session::{InlineFile, LockedRange, Session, Why};
use crate::thread::{self, Spilled};

impl<'a> InlineFile<'a> {
    /// Checks that the file may be written inline now.
    #[inline]
    pub(super) fn may_write(&self) -> Result<(), Why> {
        if !self.may_write {
            return Err(Why::Withheld);
        }
        if self.memory.is_throttled() {
            return Err(Why::Throttled);
        }
        Ok(())
    }

    /// Returns the identity under which the calling thread writes. Returns `None` when it cannot write inline.
    pub(super) fn writer(&self) -> Option<Writer<'a>> {
        thread::current(|thread| thread.writer(self.session, self.home()))
    }

    /// Writes bytes that lie within the file. `seen`: the size before the locks were taken.
    #[inline]
    pub(super) fn write_within(
        &self,
        seen: SizeWord,
        at: u64,
        len: usize,
        source: SourceParts<'_, '_>,
    ) -> Result<(), Failed<'a>> {
        let removals = self.slot.removals();
        let range = self.lock_range(at, len)?;
        // Compares only the truncation count, because other writers may extend the file.
        let still = |at| {
            self.is_still() && self.slot.size().same_truncation_count(seen) && range.is_held(at)
        };
        self.check_pages(at, len)?;
        match self.put(at, len, source, still) {
            Ok(()) => {
                self.wrote();
                Ok(())
            }
            Err((0, why)) => Err(why.into()),
            Err((done, why)) => {
                self.wrote();
                let begun = Begun { at, done, removals };
                Err(self.keep(why, range, None, begun))
            }
        }
    }

    /// Locks the pages of a write over several pages against overlapping writes. A write within one page needs only the page's
    /// latch.
    #[inline]
    pub(super) fn lock_range(&self, at: u64, len: usize) -> Result<LockedRange<'a>, Why> {
        let held = if is_in_page(at, len) {
            Some(RangeHeld::none())
        } else {
            self.slot
                .lock_range(Segments::of(at, len as u64), self.session.owner)
        };
        let held = held.ok_or(Why::Busy)?;
        Ok(LockedRange {
            slot: self.slot,
            held,
        })
    }

    /// Checks all pages first: a write that stops half-way costs more than lookups.
    #[inline]
    pub(super) fn check_pages(&self, at: u64, len: usize) -> Result<(), Why> {
        if !is_in_page(at, len) {
            for (page, _, _) in pieces(at, len) {
                self.memory.is_writable_page(self.key.with_page(page))?;
            }
        }
        Ok(())
    }

    /// Writes page by page while `still` holds. Fails with the number of bytes written so far.
    #[inline]
    pub(super) fn put(
        &self,
        at: u64,
        len: usize,
        source: SourceParts<'_, '_>,
        still: impl Fn(u64) -> bool,
    ) -> Result<(), (usize, Why)> {
        let epoch = self.memory.epoch();
        let writer = self.writer().ok_or((0, Why::Withheld))?;
        let (mut ring, spilled) = (false, Spilled::new());
        let written = |key, page: WrittenPage, len| {
            // Reports each page before the write is acknowledged and before the size covers it.
            if page.was_clean {
                ring |= self.session.report(key);
            }
            if self.memory.is_spilled(page.frame) {
                spilled.note(self, page.frame, len);
            }
        };
        let written = self
            .memory
            .write_bytes(self.key, at, len, source, writer, epoch, still, written);
        if ring {
            self.session.slots.ring();
        }
        // A write that stops half-way is not counted here.
        written.map_err(|(done, miss)| (done, miss.into()))?;
        thread::current(|thread| thread.spilled.add(&spilled));
        Ok(())
    }

    /// Sets the mark of inline writes, unless it is set. The daemon gives the file the time at which it takes the mark, which is
    /// after this write.
    #[inline]
    pub(super) fn wrote(&self) {
        if self.slot.modified() == 0 {
            set_modified(self.slot);
        }
    }
}

/// Reports a page that became dirty, and rings the doorbell if the daemon asked for that.
#[inline(never)]
pub(super) fn report(session: &Session, key: Key) {
    if session.report(key) {
        session.slots.ring();
    }
}

#[cold]
fn set_modified(slot: &Slot) {
    slot.set_modified(files::coarse_realtime_ns());
}
