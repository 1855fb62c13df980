//! The ring in which a client announces the pages that it made dirty, and the bell.

use crate::area::Area;
use crate::entry::Key;
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// The words of a ring with room for `N` keys, wherever they are.
pub(crate) struct Ring<'a, const N: usize> {
    pub wanted: &'a AtomicU32,
    pub overflow: &'a AtomicU32,
    pub given_out: &'a AtomicU64,
    pub done: &'a AtomicU64,
    pub words: &'a [AtomicU64; N],
}

impl<const N: usize> Ring<'_, N> {
    /// See `Area::announce`.
    #[inline]
    pub fn announce(&self, key: Key) -> bool {
        let position = self.given_out.fetch_add(1, Ordering::SeqCst) as usize % N;
        if self.words[position]
            .compare_exchange(0, key.0, Ordering::SeqCst, Ordering::Relaxed)
            .is_err()
        {
            // A swap: a plain store would hide what an earlier one says of its own writer's pages.
            self.overflow.swap(1, Ordering::SeqCst);
        }
        self.done.fetch_add(1, Ordering::Release);
        // Part of a turn without a look: the daemon is late.
        let full = position.is_multiple_of(N / 4);
        (self.wanted.load(Ordering::SeqCst) != 0 && self.wanted.swap(0, Ordering::SeqCst) != 0)
            || full
    }

    /// See `Area::want_bell`.
    pub fn want_bell(&self, wanted: bool) {
        self.wanted.store(u32::from(wanted), Ordering::SeqCst);
        // The look at the ring that follows is no SeqCst access; it must not come before the store, or a writer that
        // saw no wish for the bell could be missed by it too.
        fence(Ordering::SeqCst);
    }
}

/// The daemon's reader of a client's ring.
#[derive(Debug, Default)]
pub struct RingReader {
    /// All positions before this one were done with, and looked at after that.
    settled: u64,
}

impl RingReader {
    #[cfg(all(test, loom))]
    pub(crate) fn from(settled: u64) -> RingReader {
        RingReader { settled }
    }

    /// Takes the keys that are there: calls `each` for every one. Returns false when keys were lost, and the
    /// tables have to be gone through instead. Bounded by the ring's length, whatever the client does.
    pub fn drain(&mut self, area: &Area, each: impl FnMut(Key)) -> bool {
        self.drain_ring(&area.ring(), each)
    }

    pub(crate) fn drain_ring<const N: usize>(
        &mut self,
        ring: &Ring<'_, N>,
        mut each: impl FnMut(Key),
    ) -> bool {
        // Before the keys are looked at: what is lost afterwards is found the next time.
        let complete = ring.overflow.load(Ordering::SeqCst) == 0
            || ring.overflow.swap(0, Ordering::SeqCst) == 0;
        // In this order: where both are equal nobody was between his two steps at the first look, and all keys of
        // positions given out before it are there.
        let done = ring.done.load(Ordering::Acquire);
        let given_out = ring.given_out.load(Ordering::Acquire);
        let fresh = given_out.wrapping_sub(self.settled).min(N as u64);
        for nth in (1..=fresh).rev() {
            let word = &ring.words[(given_out.wrapping_sub(nth) % N as u64) as usize];
            if word.load(Ordering::Relaxed) != 0
                && let Some(key) = Key::from_word(word.swap(0, Ordering::AcqRel))
            {
                each(key);
            }
        }
        // Else all are looked at again: a writer that was held up may put its key where another's, of the next turn,
        // was taken from, so which positions were found empty says nothing.
        if done == given_out {
            self.settled = given_out;
        }
        complete
    }
}
