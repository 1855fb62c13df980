//! The ring in which a client reports the pages that it made dirty.

use crate::entry::Key;
use crate::reports::Reports;
use crate::sync::{AtomicU64, Ordering};

/// The words of a ring with room for `N` keys, in an area or in a test.
pub(crate) struct Ring<'a, const N: usize> {
    /// Threads that may report at a time.
    pub threads: u64,
    pub given_out: &'a AtomicU64,
    pub done: &'a AtomicU64,
    pub taken: &'a AtomicU64,
    pub words: &'a [AtomicU64; N],
}

impl<const N: usize> Ring<'_, N> {
    /// Returns whether there is room for a key of the calling thread, even if each other thread reports a page first.
    #[inline]
    pub fn has_room(&self) -> bool {
        // Loads `taken` first, because positions are taken after they were given out. Acquire: the daemon is done with the
        // positions it has taken.
        let taken = self.taken.load(Ordering::Acquire);
        // `given_out` may have grown since. The reserve of `threads` positions holds one extra key of each other thread. No
        // thread needs more: at its next check it sees its own position and all earlier ones.
        let used = self.given_out.load(Ordering::Relaxed).wrapping_sub(taken);
        used <= N as u64 - self.threads
    }

    /// Reports a page that the client `owner` made dirty. The thread found room before it made the page dirty. Returns true if the
    /// caller must ring the doorbell.
    #[inline]
    pub fn report<const W: usize>(&self, key: Key, owner: u16, reports: Reports<'_, W>) -> bool {
        let position = self.given_out.fetch_add(1, Ordering::SeqCst) as usize % N;
        self.words[position].store(key.0, Ordering::Release);
        self.done.fetch_add(1, Ordering::SeqCst);
        // A quarter of the ring has passed: rings once in case the daemon is late.
        let late = position.is_multiple_of(N / 4);
        // Sets the bit after the key: a thread that clears the bit reads the ring afterwards.
        reports.set(owner) || late
    }
}

/// The daemon's reader of a client's ring.
#[derive(Debug, Default)]
pub struct RingReader {
    /// All keys before this position are taken. The key of a later position may be stored after the daemon has read the position.
    absorbed: u64,
}

impl RingReader {
    #[cfg(all(test, loom))]
    pub(crate) fn from(absorbed: u64) -> RingReader {
        RingReader { absorbed }
    }

    /// Takes all keys in the ring and calls `each` for each one. The ring's length bounds the work, even for a malicious client.
    pub(crate) fn drain_ring<const N: usize>(
        &mut self,
        ring: &Ring<'_, N>,
        mut each: impl FnMut(Key),
    ) {
        // Loads in this order. If both counts are equal, no thread was between its two steps at the first load, and all keys of
        // positions given out before it are stored.
        let done = ring.done.load(Ordering::Acquire);
        let given_out = ring.given_out.load(Ordering::Acquire);
        let fresh = given_out.wrapping_sub(self.absorbed).min(N as u64);
        for nth in (1..=fresh).rev() {
            let word = &ring.words[(given_out.wrapping_sub(nth) % N as u64) as usize];
            if word.load(Ordering::Relaxed) != 0
                && let Some(key) = Key::from_word(word.swap(0, Ordering::AcqRel))
            {
                each(key);
            }
        }
        // If the counts differ, the next drain reads all of these positions again: the key of an empty position may not be stored
        // yet.
        if done == given_out && given_out != self.absorbed {
            self.absorbed = given_out;
            // Release: a client that finds room here stores its key after the daemon's read.
            ring.taken.store(given_out, Ordering::Release);
        }
    }
}
