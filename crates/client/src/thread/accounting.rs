//! What a thread has in a session: its block of the area, with its counters, its intent and the locks that it lends.

use std::ops::Range;

use jericho_format::PAGE_BYTES;
use jericho_format::threads::ThreadPolicy;
use jericho_shm::{Access, Lent, Writer};

use super::record::Thread;
use super::spilled::Pages;
use super::tally::AccessTally;
use crate::session::{InlineFile, Session};

impl Thread {
    /// Returns the index of this thread's block, and whether the thread has it for itself.
    #[inline]
    fn block_of(&self, session: &Session) -> (u32, bool) {
        self.block(session.index, || session.take_block())
    }

    /// Returns the index of this thread's block. Returns `None` when the thread has none for itself.
    #[inline]
    pub fn own_block(&self, session: &Session) -> Option<u32> {
        let (block, alone) = self.block_of(session);
        alone.then_some(block)
    }

    /// Returns the identity under which this thread writes to a slice. Returns `None` when the thread has no block of its own; it
    /// then writes through the kernel.
    #[inline]
    pub fn writer<'a>(&self, session: &'a Session, slice: u16) -> Option<Writer<'a>> {
        let block = self.own_block(session)?;
        Some(session.area.writer(session.owner, block, slice))
    }

    /// Returns the words in which this thread notes the locks that it lends, if it has a block of its own.
    #[cold]
    pub fn lent<'a>(&self, session: &'a Session) -> Option<Lent<'a>> {
        Some(session.area.lent(self.own_block(session)?))
    }

    /// Marks an entry of a slice as used by this thread, when the slice's memory is mapped read-only.
    pub fn touch(&self, session: &Session, slice: u16, entry: u32) {
        session.area.touch(self.block_of(session).0, slice, entry);
    }

    /// Returns where accesses of this thread to a file count now: as local when the thread is on the node of the file's slice.
    pub fn tally<'a>(&self, file: &InlineFile<'a>) -> AccessTally<'a> {
        let (session, slice) = (file.session, file.home());
        let home = session.control.node_of_slice(slice);
        let node = session
            .control
            .node_of_cpu(jericho_sys::rseq::current_cpu());
        let used = session.may_migrate.then(|| {
            let policy = session.policy_of_run.or(file.info.policy());
            let policy: ThreadPolicy = policy.unwrap_or_else(|| session.control.policy());
            self.migration.cell(policy, home, node)
        });
        let (block, alone) = self.block_of(session);
        if self.migration.works_away() {
            let now_s = jericho_sys::files::coarse_realtime_ns() / 1_000_000_000;
            session.area.works_away(block, now_s);
        }
        AccessTally {
            counter: session.area.counter(block, slice),
            alone,
            local: node == home,
            used: used.flatten(),
        }
    }

    /// Accounts an inline access to the bytes `bytes` of a file. `calls`: 0 when a part of the call was made elsewhere, else 1.
    ///
    /// A page in a spill range counts as local if it is on the node of the thread. It does not count for the migration of the thread, which follows
    /// the home nodes of data.
    pub fn account(&self, file: &InlineFile<'_>, write: bool, bytes: Range<u64>, calls: u64) {
        let spilled = self.spilled.take();
        if bytes.is_empty() {
            return;
        }
        let tally = self.tally(file);
        let mut access = Access {
            local: tally.local,
            write,
            pages: bytes.end.div_ceil(PAGE_BYTES) - bytes.start / PAGE_BYTES,
            bytes: bytes.end - bytes.start,
            calls,
        };
        for (local, of_ranges) in [true, false].into_iter().zip(spilled) {
            if of_ranges == Pages::default() {
                continue;
            }
            let (pages, bytes) = (
                of_ranges.pages.min(access.pages),
                of_ranges.bytes.min(access.bytes),
            );
            access.pages -= pages;
            access.bytes -= bytes;
            let part = Access {
                local,
                pages,
                bytes,
                calls: 0,
                ..access
            };
            tally.counter.add(part, tally.alone);
        }
        if let Some(cell) = tally.used.filter(|_| access.bytes > 0) {
            self.migration.add(cell, 1, access.bytes as usize);
        }
        tally.counter.add(access, tally.alone);
    }

    /// Counts a hit of `bytes` bytes of the thread's last file.
    #[inline(always)]
    pub fn count_hit(&self, write: bool, bytes: usize) {
        self.recent_hits.count(write, bytes, || self.renew_tally());
    }

    #[cold]
    fn renew_tally(&self) {
        self.recent_hits
            .renew(&self.migration, |file| self.tally(file));
    }
}
