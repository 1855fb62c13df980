//! Tracks which clients have reported pages that the daemon has not absorbed: one bit for each owner number.
//!
//! ```text
//! client: store key in its ring ─▶ set bit                 (unless it is set)
//! daemon: lock the owner's ring ─▶ set the draining note ─▶ clear bit ─▶ drain ring, absorb pages ─▶ clear note
//! ```
//!
//! A thread that asks for dirty pages visits the owners whose bit is set and those whose ring another thread is draining. It
//! waits for the latter: a report that another thread took out of a ring counts only after that thread has absorbed it.

use crate::entry::PageState;
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// Number of words with a bit for each owner number.
pub(crate) const OWNER_WORDS: usize = (PageState::OWNER_MAX as usize + 1) / 64;

/// The report words that clients and the daemon share.
#[derive(Clone, Copy)]
pub(crate) struct Reports<'a, const W: usize> {
    pub words: &'a [AtomicU64; W],
    pub armed: &'a AtomicU32,
}

impl<'a, const W: usize> Reports<'a, W> {
    /// Sets the bit of the client `owner`, which has put a key into its ring. Returns true if the daemon wants the
    /// doorbell rung.
    #[inline]
    pub fn set(&self, owner: u16) -> bool {
        let (word, bit) = word_and_bit::<W>(owner);
        // Loads first: all clients share the line, and the bit stays set until the daemon comes.
        if self.words[word].load(Ordering::SeqCst) & bit == 0 {
            self.words[word].fetch_or(bit, Ordering::SeqCst);
        }
        self.armed.load(Ordering::SeqCst) != 0 && self.armed.swap(0, Ordering::SeqCst) != 0
    }

    /// Arms or disarms the doorbell. The daemon must check for reports once more afterwards.
    pub fn arm_doorbell(&self, armed: bool) {
        self.armed.store(u32::from(armed), Ordering::SeqCst);
        // That check uses no SeqCst access. It must not move before the store: the daemon could then miss the report of a client
        // that saw the doorbell disarmed.
        fence(Ordering::SeqCst);
    }

    /// Returns the owners with reports that may not be absorbed yet.
    pub fn owners(self, draining: &'a Draining<W>) -> impl Iterator<Item = u16> + use<'a, W> {
        (0..W).flat_map(move |word| {
            // Loads in this order: a thread that sees the bit cleared also sees the note, unless the drain is over.
            let reported = self.words[word].load(Ordering::Acquire);
            let left = reported | draining.words[word].load(Ordering::Acquire);
            bits(left).map(move |bit| word as u16 * 64 + bit)
        })
    }

    /// Begins to drain the ring of `owner`, which the caller has locked.
    pub fn begin(&self, draining: &Draining<W>, owner: u16) {
        let (word, bit) = word_and_bit::<W>(owner);
        draining.words[word].fetch_or(bit, Ordering::Relaxed);
        self.words[word].fetch_and(!bit, Ordering::SeqCst);
        // Clears the bit before it reads the ring: a client that found the bit set has its key there.
        fence(Ordering::SeqCst);
    }

    /// Ends the drain: the pages that the ring named are absorbed. The caller still holds the ring's lock.
    pub fn end(&self, draining: &Draining<W>, owner: u16) {
        let (word, bit) = word_and_bit::<W>(owner);
        draining.words[word].fetch_and(!bit, Ordering::Release);
    }
}

/// Owners whose rings threads of the daemon are draining. Clients do not see it.
#[derive(Debug)]
pub struct Draining<const W: usize = OWNER_WORDS> {
    words: [AtomicU64; W],
}

impl<const W: usize> Default for Draining<W> {
    fn default() -> Draining<W> {
        let words = std::array::from_fn(|_| AtomicU64::new(0));
        Draining { words }
    }
}

/// Returns the numbers of the bits that are set.
pub(crate) fn bits(mut left: u64) -> impl Iterator<Item = u16> {
    std::iter::from_fn(move || {
        let bit = left.trailing_zeros() as u16;
        left &= left.wrapping_sub(1);
        (bit < 64).then_some(bit)
    })
}

/// Returns the word and bit of an owner.
#[inline]
pub(crate) fn word_and_bit<const W: usize>(owner: u16) -> (usize, u64) {
    (usize::from(owner / 64) % W, 1 << (owner % 64))
}
