//! The ring in which a client reports the pages that it made dirty.

use crate::area::Area;
use crate::entry::Key;
use crate::reports::Reports;
use crate::sync::{AtomicU64, Ordering};

/// The words of a ring with room for `N` keys, wherever they are.
pub(crate) struct Ring<'a, const N: usize> {
    /// Threads that may report at a time.
    pub threads: u64,
    pub given_out: &'a AtomicU64,
    pub done: &'a AtomicU64,
    pub taken: &'a AtomicU64,
    pub words: &'a [AtomicU64; N],
}

impl<const N: usize> Ring<'_, N> {
    /// Whether there is room for a key of the calling thread, also when each other thread reports a page before.
    #[inline]
    pub fn has_room(&self) -> bool {
        // In this order, as positions are taken after they were given out. Acquire: the daemon is done with what it has taken.
        let taken = self.taken.load(Ordering::Acquire);
        // It may be more by now. For a key too many of each other thread there is room, and a thread that takes a position sees all.
        let used = self.given_out.load(Ordering::Relaxed).wrapping_sub(taken);
        used <= N as u64 - self.threads
    }

    /// The client `owner` reports a page that it made dirty; before it was, the thread found room. Returns true if the bell is to be
    /// rung.
    #[inline]
    pub fn report<const W: usize>(&self, key: Key, owner: u16, reports: Reports<'_, W>) -> bool {
        let position = self.given_out.fetch_add(1, Ordering::SeqCst) as usize % N;
        self.words[position].store(key.0, Ordering::Release);
        self.done.fetch_add(1, Ordering::SeqCst);
        // Part of a turn without a look: the daemon is late.
        let late = position.is_multiple_of(N / 4);
        // After the key: who clears the bit looks at the ring afterwards.
        reports.set(owner) || late
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

    /// Takes the keys that are there: calls `each` for every one. Bounded by the ring's length, whatever the client does.
    pub fn drain(&mut self, area: &Area, each: impl FnMut(Key)) {
        self.drain_ring(&area.ring(), each);
    }

    pub(crate) fn drain_ring<const N: usize>(
        &mut self,
        ring: &Ring<'_, N>,
        mut each: impl FnMut(Key),
    ) {
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
        // Else all are looked at again the next time: which positions were found empty says nothing.
        if done == given_out && given_out != self.settled {
            self.settled = given_out;
            // Release: a client that finds room here stores its key after the look.
            ring.taken.store(given_out, Ordering::Release);
        }
    }
}
