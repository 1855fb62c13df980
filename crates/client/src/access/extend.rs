//! Writes beyond the end of a file.

use jericho_format::{FILE_BYTES_MAX, PAGE_BYTES};
use jericho_shm::{SizeWord, SlotInfo, SourceParts, pieces};

use super::kept::{Begun, Failed};
use super::put::report;
use crate::session::{HeldLock, InlineFile, Why};

const PAGE: usize = PAGE_BYTES as usize;

impl<'a> InlineFile<'a> {
    #[inline(never)]
    pub(super) fn write_beyond(
        &self,
        at: u64,
        len: usize,
        source: SourceParts<'_, '_>,
    ) -> Result<(), Failed<'a>> {
        self.may_grow()?;
        let end = at + len as u64;
        let (extend, seen) = self.lock_size()?;
        if end <= seen.bytes() {
            return self.write_within(seen, at, len, source);
        }
        self.extend(extend, seen, at, len, source, false)
    }

    /// Writes `len` bytes (1..=`WRITE_MAX`) of `source` at the end of the file, all or none. Returns the new end.
    pub fn append(&self, len: usize, source: SourceParts<'_, '_>) -> Result<u64, Why> {
        self.may_write()?;
        self.may_grow()?;
        let (extend, seen) = self.lock_size()?;
        let end = seen.bytes() + len as u64;
        if end >= FILE_BYTES_MAX {
            return Err(Why::Far);
        }
        // A failed append keeps nothing: all its bytes are beyond the end.
        let done = self.extend(extend, seen, seen.bytes(), len, source, true);
        done.map_err(|failed| failed.why)?;
        Ok(end)
    }

    /// Checks that an inline write may make the file longer.
    fn may_grow(&self) -> Result<(), Why> {
        match self.word.flags() & SlotInfo::NO_GROW {
            0 => Ok(()),
            _ => Err(Why::Withheld),
        }
    }

    /// Takes the extend lock. Returns the size, which no other client changes while the lock is held.
    pub(super) fn lock_size(&self) -> Result<(HeldLock<'a>, SizeWord), Why> {
        let lock = self.slot.extend_lock();
        let held = lock.lock(self.session.owner).ok_or(Why::Busy)?;
        let held = HeldLock { lock, held };
        let seen = self.size_word()?;
        // The daemon takes the lock away from a holder that keeps it for long, and then adds one to the truncation count. If the
        // size was read before that, the count differs and the write fails. If the size was read after that, it has the new count,
        // so only this check of the lock tells that the lock is lost.
        if !lock.is_held(held.held) {
            return Err(Why::Busy);
        }
        Ok((held, seen))
    }

    /// Writes beyond the end of the file. The caller holds the extend lock.
    pub(super) fn extend(
        &self,
        held: HeldLock<'a>,
        seen: SizeWord,
        at: u64,
        len: usize,
        source: SourceParts<'_, '_>,
        append: bool,
    ) -> Result<(), Failed<'a>> {
        let (old, end) = (seen.bytes(), at + len as u64);
        // Only the daemon makes holes: the pages in between may not be cached.
        if at / PAGE_BYTES > old / PAGE_BYTES {
            return Err(Why::Far.into());
        }
        let removals = self.slot.removals();
        let range = self.lock_range(at, len)?;
        self.check_pages(at, len)?;
        // No other client changes the size while the lock is held. If the size changes, the daemon has taken the lock away and
        // goes on without this process.
        let still = |at| self.is_still() && self.slot.size() == seen && range.is_held(at);
        if let Err((done, why)) = self.put(at, len, source, still) {
            self.wipe(seen, old.max(at), at + done as u64);
            if done == 0 || at >= old {
                // Readers see no bytes beyond the end.
                return Err(why.into());
            }
            let begun = Begun {
                at,
                done: done.min((old - at) as usize),
                removals,
            };
            self.wrote();
            return Err(self.keep(why, range, Some(held), begun));
        }
        let mut now = seen;
        while !self.slot.extend(now, end) {
            now = self.slot.size();
            if append || !now.same_truncation_count(seen) {
                return Err(Why::Changed.into());
            }
            if now.bytes() >= end {
                break;
            }
        }
        self.wrote();
        Ok(())
    }

    /// Writes zeros again after a write that stopped half-way: all bytes beyond the end of a file are zeros.
    #[cold]
    pub(super) fn wipe(&self, seen: SizeWord, from: u64, to: u64) {
        if from < to {
            const ZEROS: [u8; PAGE] = [0; PAGE];
            let epoch = self.memory.epoch();
            let Some(writer) = self.writer() else { return };
            for (page, within, len) in pieces(from, (to - from) as usize) {
                let key = self.key.with_page(page);
                let still = || self.slot.size() == seen;
                // Skips a page that this process cannot write any more: the page is the daemon's, and the daemon knows the file's
                // end.
                let zeros = &ZEROS[..len];
                let wiped = self
                    .memory
                    .write_if(key, within, zeros, writer, epoch, still);
                // The slice wrote the page back after the write had ended, so the page is newly dirty.
                if wiped.is_ok_and(|wiped| wiped.was_clean) {
                    report(self.session, key);
                }
            }
        }
    }
}
