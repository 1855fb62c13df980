//! Writes that stop half-way.
//!
//! A later page of a write over several pages may turn out not to be writable inline. The rest then goes through the kernel.
//! Until the kernel's write has ended, the library keeps the write's locks and lends them to the daemon (`KeptLocks`), so that no
//! reader sees the first half alone. If another write over both halves came in between, or the file was truncated, the library
//! makes the whole write once more.

use jericho_shm::{Lent, Miss, Segments, Slot, SlotInfo, is_in_page};
use jericho_sys::files;

use crate::session::{HeldLock, InlineFile, LockedRange, Session, Why};
use crate::thread;

/// Most bytes of one inline write. A caller splits a longer write, as the kernel does. The limit bounds the time for which the
/// locks are held.
pub const WRITE_MAX: usize = 8 << 20;

/// Why a write was not made inline, and the locks that the library keeps until the kernel has made the rest.
#[derive(Debug)]
pub struct Failed<'a> {
    /// The reason.
    pub why: Why,
    /// The locks of a write of which some pages are written.
    pub kept: Option<KeptLocks<'a>>,
}

impl From<Why> for Failed<'_> {
    fn from(why: Why) -> Self {
        Failed { why, kept: None }
    }
}

impl From<Miss> for Failed<'_> {
    fn from(miss: Miss) -> Self {
        Why::from(miss).into()
    }
}

/// Locks of a write whose rest is being made through the kernel. Reads of several of its pages wait meanwhile, except reads into
/// the page cache. The daemon may borrow the locks for each request that changes the file, whichever program made the request.
/// Dropping the value releases the locks. A thread has at most one such value, because it makes no inline write meanwhile.
#[derive(Debug)]
pub struct KeptLocks<'a> {
    pub(super) session: &'a Session,
    pub(super) info: &'a SlotInfo,
    pub(super) slot: &'a Slot,
    pub(super) lent: Lent<'a>,
    pub(super) begun: Begun,
    pub(super) generation: u32,
}

/// The progress of a write that stopped half-way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Begun {
    pub at: u64,
    pub done: usize,
    /// The slot's removals before the first byte was written.
    pub removals: u64,
}

impl KeptLocks<'_> {
    /// Returns the number of bytes of the write that are written.
    pub fn done(&self) -> usize {
        self.begun.done
    }

    /// Returns the offset of the first byte that is not written.
    fn rest(&self) -> u64 {
        self.begun.at + self.begun.done as u64
    }

    /// Returns how often the daemon borrows the *first word of the rest* (the word of the range lock that covers the rest's first
    /// byte) for the lender's own request, which writes `len` bytes from there on. Returns `None` if that is unknown: the kernel
    /// splits a long request, and more than one part may need the word.
    pub fn own_borrows(&self, len: usize) -> Option<u32> {
        let is_split = Segments::is_wrapped(self.rest(), len as u64);
        (!is_split).then(|| u32::from(!is_in_page(self.rest(), len)))
    }

    /// Returns false if other writers may have written over the first part and the rest, or removed the first part. `own`: how
    /// often the daemon has borrowed the first word of the rest for the lender's own request (`own_borrows`). It also borrows that
    /// word for another writer that writes over both parts.
    pub fn is_one_write(&self, own: u32) -> bool {
        self.info.word().generation() == self.generation
            && self.slot.removals() == self.begun.removals
            && (self.lent).was_borrowed_at_most(self.slot, Segments::word_of(self.rest()), own)
    }
}

impl Drop for KeptLocks<'_> {
    fn drop(&mut self) {
        // After a fork, the child's copy belongs to its parent.
        if self.session.is_own() {
            self.lent.take_back(self.slot);
        }
    }
}

impl<'a> InlineFile<'a> {
    /// Keeps and lends the locks of a half-done write, so that no reader sees the first part alone.
    #[cold]
    pub(super) fn keep(
        &self,
        why: Why,
        range: LockedRange<'a>,
        extend: Option<HeldLock<'a>>,
        begun: Begun,
    ) -> Failed<'a> {
        let lent = thread::current(|thread| thread.lent(self.session));
        let Some(lent) = lent else {
            return why.into();
        };
        let now = files::coarse_realtime_ns();
        let extend_held = extend.as_ref().map(|extend| extend.held);
        lent.lend(self.index, &range.held, extend_held, now);
        // `KeptLocks` releases them.
        std::mem::forget((range, extend));
        let kept = KeptLocks {
            session: self.session,
            info: self.info,
            slot: self.slot,
            lent,
            begun,
            generation: self.word.generation(),
        };
        Failed {
            why,
            kept: Some(kept),
        }
    }
}
