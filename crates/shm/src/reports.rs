//! Which clients have reported pages that nobody has taken in: a bit for each owner number.
//!
//! ```text
//! client: key into its ring ─▶ bit set                 (unless it is set)
//! daemon: owner's ring locked ─▶ noted as being drained ─▶ bit cleared ─▶ ring drained, pages taken in ─▶ note cleared
//! ```
//!
//! Who asks for dirty pages visits the owners whose bit is set and those that are being drained: it waits for these, because what
//! another thread has taken out of a ring is known only when that thread has taken it in.

use crate::entry::State;
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// Words with a bit for each owner number.
pub(crate) const OWNER_WORDS: usize = (State::OWNER_MAX as usize + 1) / 64;

/// The words that clients and the daemon share, wherever they are.
#[derive(Clone, Copy)]
pub(crate) struct Reports<'a, const W: usize> {
    pub words: &'a [AtomicU64; W],
    pub wanted: &'a AtomicU32,
}

impl<'a, const W: usize> Reports<'a, W> {
    /// The client `owner` has put a key into its ring. Returns true if the daemon wants the bell rung.
    #[inline]
    pub fn set(&self, owner: u16) -> bool {
        let (word, bit) = place::<W>(owner);
        // A load first: the line is of all clients, and the bit stays until the daemon comes.
        if self.words[word].load(Ordering::SeqCst) & bit == 0 {
            self.words[word].fetch_or(bit, Ordering::SeqCst);
        }
        self.wanted.load(Ordering::SeqCst) != 0 && self.wanted.swap(0, Ordering::SeqCst) != 0
    }

    /// Says whether the daemon wants the bell rung. It looks for reports once more afterwards.
    pub fn want_bell(&self, wanted: bool) {
        self.wanted.store(u32::from(wanted), Ordering::SeqCst);
        // The look that follows is no SeqCst access; it must not come before the store, or a client that saw no wish for the bell
        // could be missed by it too.
        fence(Ordering::SeqCst);
    }

    /// Owners that have reported pages which the caller cannot rely on to be known.
    pub fn owners(self, draining: &'a Draining<W>) -> impl Iterator<Item = u16> + use<'a, W> {
        (0..W).flat_map(move |word| {
            // In this order: who sees that the bit was cleared sees the note, too, unless the drain is over.
            let reported = self.words[word].load(Ordering::Acquire);
            let mut left = reported | draining.words[word].load(Ordering::Acquire);
            std::iter::from_fn(move || {
                let bit = left.trailing_zeros() as u16;
                left &= left.wrapping_sub(1);
                (bit < 64).then_some(word as u16 * 64 + bit)
            })
        })
    }

    /// Begins to drain the ring of `owner`, which the caller has locked.
    pub fn begin(&self, draining: &Draining<W>, owner: u16) {
        let (word, bit) = place::<W>(owner);
        draining.words[word].fetch_or(bit, Ordering::Relaxed);
        self.words[word].fetch_and(!bit, Ordering::SeqCst);
        // Before the look at the ring: a client that found the bit set has its key there.
        fence(Ordering::SeqCst);
    }

    /// Ends what `begin` began: the pages that the ring named are known. The caller has the ring locked still.
    pub fn end(&self, draining: &Draining<W>, owner: u16) {
        let (word, bit) = place::<W>(owner);
        draining.words[word].fetch_and(!bit, Ordering::Release);
    }
}

/// Owners whose rings threads of the daemon are draining. No client sees it.
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

/// Word and bit of an owner.
#[inline]
fn place<const W: usize>(owner: u16) -> (usize, u64) {
    (usize::from(owner / 64) % W, 1 << (owner % 64))
}
