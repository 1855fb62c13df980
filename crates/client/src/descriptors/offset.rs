//! The offset of an open file description, while this process keeps it.
//!
//! One word: `[tag:16][locked:1][offset:47]`. An offset of all ones means that the kernel has it. The tag is the description's
//! generation. A thread may be delayed while its fd is closed; the tag then keeps it from moving the offset of the next
//! description in that place.
//!
//! A reader takes no lock. It reads first and then advances the offset from its earlier value. If another thread moved it, the
//! reader reads again elsewhere. So two threads never get the same bytes. A writer locks, because a write cannot be undone.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use jericho_sys::futex;

const OFFSET_BITS: u32 = 47;
const LOCKED: u64 = 1 << OFFSET_BITS;
const OFFSET_MASK: u64 = LOCKED - 1;
/// Largest offset that this process keeps. A seek beyond it moves the offset to the kernel.
pub const OFFSET_MAX: u64 = OFFSET_MASK - 1;
/// Ways to count an offset, as in lseek(2): from the beginning, from the present offset, from the end.
pub const SEEK_SET: i32 = 0;
pub const SEEK_CUR: i32 = 1;
pub const SEEK_END: i32 = 2;

const SPINS: u32 = 64;
const YIELDS: u32 = 32;
const SLEEP: Duration = Duration::from_millis(20);
/// Sleeps after which a waiter takes a lock away. Its holder has left without unlocking: a signal handler jumped out of a write.
const SLEEPS: u32 = 1000;

/// The place of the offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// In this process.
    At(u64),
    /// In the kernel.
    Kernel,
    /// The word belongs to another description now.
    Gone,
}

/// The word, and its waiters.
#[derive(Debug)]
pub struct Offset {
    word: AtomicU64,
    wakes: AtomicU32,
    sleepers: AtomicU32,
}

fn pack(tag: u16, offset: u64) -> u64 {
    u64::from(tag) << (OFFSET_BITS + 1) | offset
}

impl Offset {
    /// Returns an offset that belongs to no description: its tag is 0, and the tags of descriptions are odd.
    pub const fn new() -> Offset {
        Offset {
            word: AtomicU64::new(0),
            wakes: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
        }
    }

    /// Begins a new description with its offset here, or (`None`) in the kernel.
    pub fn begin(&self, tag: u16, offset: Option<u64>) {
        let offset = offset.filter(|o| *o <= OFFSET_MAX).unwrap_or(OFFSET_MASK);
        self.word.store(pack(tag, offset), Ordering::Release);
    }

    #[inline]
    fn decode(word: u64, tag: u16) -> Position {
        if (word >> (OFFSET_BITS + 1)) as u16 != tag {
            return Position::Gone;
        }
        match word & OFFSET_MASK {
            OFFSET_MASK => Position::Kernel,
            offset => Position::At(offset),
        }
    }

    /// Returns whether the kernel has the offset, without waiting for a writer.
    #[inline]
    pub fn is_in_kernel(&self, tag: u16) -> bool {
        Offset::decode(self.word.load(Ordering::Acquire), tag) == Position::Kernel
    }

    /// Returns the offset in the word, also while it is locked. For the thread that holds the lock, and its signal handlers.
    pub fn value(&self) -> u64 {
        self.word.load(Ordering::Relaxed) & OFFSET_MASK
    }

    /// Returns whether the word equals `word`.
    pub fn is(&self, word: u64) -> bool {
        self.word.load(Ordering::Relaxed) == word
    }

    /// Returns the offset after any writer has unlocked it.
    #[inline]
    pub fn get(&self, tag: u16) -> Position {
        let word = self.word.load(Ordering::Acquire);
        if word & LOCKED == 0 {
            return Offset::decode(word, tag);
        }
        Offset::decode(self.wait(tag), tag)
    }

    /// Returns the offset; `None` while a writer has it locked.
    #[inline]
    pub fn get_free(&self, tag: u16) -> Option<Position> {
        let word = self.word.load(Ordering::Acquire);
        (word & LOCKED == 0).then(|| Offset::decode(word, tag))
    }

    /// Moves the offset of a reader from `from` to `to`. Returns false when another thread has moved it meanwhile.
    #[inline]
    pub fn advance(&self, tag: u16, from: u64, to: u64) -> bool {
        to <= OFFSET_MAX
            && self
                .word
                .compare_exchange(
                    pack(tag, from),
                    pack(tag, to),
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                )
                .is_ok()
    }

    /// Locks the offset if this process keeps it (`At`), for `unlock`.
    #[inline]
    pub fn lock(&self, tag: u16) -> Position {
        self.lock_as(tag, |_| ())
    }

    /// Locks the offset for `release`. Passes the new word to `about` before each attempt to lock, and 0 before it waits.
    #[inline]
    pub fn lock_as(&self, tag: u16, about: impl Fn(u64)) -> Position {
        let mut word = self.word.load(Ordering::Relaxed);
        loop {
            if word & LOCKED != 0 {
                about(0);
                word = self.wait(tag);
            }
            let Position::At(at) = Offset::decode(word, tag) else {
                return Offset::decode(word, tag);
            };
            about(word | LOCKED);
            match self.word.compare_exchange(
                word,
                word | LOCKED,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Position::At(at),
                Err(now) => word = now,
            }
        }
    }

    /// Unlocks the offset and sets it to `to`; `None`: moves it to the kernel. Does nothing when the lock was taken away, or the
    /// description is gone.
    #[inline]
    pub fn unlock(&self, tag: u16, to: Option<u64>) {
        let to = to.filter(|to| *to <= OFFSET_MAX).unwrap_or(OFFSET_MASK);
        let mine = |word: u64| {
            let held = word & LOCKED != 0 && Offset::decode(word, tag) != Position::Gone;
            held.then_some(pack(tag, to))
        };
        let _ = self
            .word
            .fetch_update(Ordering::SeqCst, Ordering::Relaxed, mine);
        self.wake();
    }

    /// Unlocks the offset if its word is `mine`, as `lock_as` or `keep` set it. Returns false otherwise.
    #[inline]
    pub fn release(&self, tag: u16, mine: u64, to: u64) -> bool {
        let to = if to <= OFFSET_MAX { to } else { OFFSET_MASK };
        let free = pack(tag, to);
        let is_mine = self
            .word
            .compare_exchange(mine, free, Ordering::SeqCst, Ordering::Relaxed)
            .is_ok();
        if is_mine {
            self.wake();
        }
        is_mine
    }

    /// Keeps the offset locked and moves it to `at`. Returns the new word. A signal handler thereby tells its thread that it has
    /// used the offset.
    pub fn keep(&self, tag: u16, mine: u64, at: u64) -> u64 {
        let new = pack(tag, at.min(OFFSET_MAX)) | LOCKED;
        let kept = self
            .word
            .compare_exchange(mine, new, Ordering::SeqCst, Ordering::Relaxed);
        if kept.is_ok() { new } else { mine }
    }

    #[inline]
    fn wake(&self) {
        if self.sleepers.load(Ordering::SeqCst) != 0 {
            self.wakes.fetch_add(1, Ordering::SeqCst);
            futex::wake_all(&self.wakes);
        }
    }

    /// Waits until the word is unlocked. Returns it.
    #[cold]
    fn wait(&self, tag: u16) -> u64 {
        for poll in 0..SPINS + YIELDS {
            if poll < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
            let word = self.word.load(Ordering::Acquire);
            if word & LOCKED == 0 {
                return word;
            }
        }
        // A holder that keeps the lock for this long waits for the daemon.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut sleeps = 0;
        let word = loop {
            let seen = self.wakes.load(Ordering::SeqCst);
            let word = self.word.load(Ordering::SeqCst);
            if word & LOCKED == 0 {
                break word;
            }
            if sleeps == SLEEPS {
                let open = word & !LOCKED;
                let same = Offset::decode(word, tag) != Position::Gone;
                if !same
                    || self
                        .word
                        .compare_exchange(word, open, Ordering::SeqCst, Ordering::Relaxed)
                        .is_ok()
                {
                    break open;
                }
            }
            futex::wait(&self.wakes, seen, SLEEP);
            sleeps += 1;
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        word
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_readers_never_get_the_same_offset() {
        let offset = Offset::new();
        offset.begin(3, Some(0));
        let taken: Vec<u64> = std::thread::scope(|scope| {
            let reader = || {
                let mut taken = vec![];
                while taken.len() < 10_000 {
                    let Position::At(at) = offset.get(3) else {
                        panic!("the offset is here");
                    };
                    if offset.advance(3, at, at + 1) {
                        taken.push(at);
                    }
                }
                taken
            };
            let threads = [(); 3].map(|()| scope.spawn(reader));
            threads
                .into_iter()
                .flat_map(|t| t.join().unwrap())
                .collect()
        });
        let mut sorted = taken.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..30_000));
    }

    #[test]
    fn a_writers_lock_keeps_readers_out_and_wakes_them() {
        let offset = Offset::new();
        offset.begin(1, Some(100));
        assert_eq!(offset.lock(1), Position::At(100));
        assert!(!offset.advance(1, 100, 101));
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| offset.get(1));
            while offset.sleepers.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            offset.unlock(1, Some(200));
            assert_eq!(reader.join().unwrap(), Position::At(200));
        });
    }

    #[test]
    fn a_delayed_thread_moves_no_other_descriptions_offset() {
        let offset = Offset::new();
        offset.begin(1, Some(5));
        offset.begin(2, Some(5));
        assert_eq!(offset.get(1), Position::Gone);
        assert_eq!(offset.lock(1), Position::Gone);
        assert!(!offset.advance(1, 5, 6));
        assert_eq!(offset.get(2), Position::At(5));
    }

    #[test]
    fn a_too_large_offset_moves_to_the_kernel() {
        let offset = Offset::new();
        offset.begin(1, Some(5));
        assert_eq!(offset.lock(1), Position::At(5));
        offset.unlock(1, Some(OFFSET_MAX + 1));
        assert_eq!(offset.get(1), Position::Kernel);
        assert_eq!(offset.lock(1), Position::Kernel);
    }
}
