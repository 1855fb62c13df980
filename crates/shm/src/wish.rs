//! Wishes: a thread that makes an ordinary read or write asks the daemon to grant the file a slot with that request.
//!
//! ```text
//!   thread: answer = 0, inode, wish ── read(2), write(2) ──▶ daemon: takes the wish; slot, generation, pages, answer
//!   thread: wish = 0, checks the answer ◀────── reply ────────┘
//! ```
//!
//! The interleavings: docs/formats/shm.md, *Wishes*.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

const EXISTS: u64 = 1;
const WRITE: u64 = 2;
const RESERVE: u64 = 4;
const NUMBER_SHIFT: u32 = 32;

/// The part of a thread's block for its wish and the answer.
#[derive(Debug)]
#[repr(C)]
pub struct Wishing {
    wish: AtomicU64,
    ino: AtomicU64,
    answer: AtomicU64,
    slot: AtomicU32,
    generation: AtomicU32,
    reserved_to: AtomicU64,
}

const _: () = assert!(size_of::<Wishing>() == 40);

/// A thread asks for a slot for a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// Distinguishes the wishes of a process. Not 0.
    pub number: u32,
    /// The file's inode number. The slot tells its object.
    pub ino: u64,
    /// The thread asks for inline writes, too.
    pub write: bool,
    /// The thread asks for pages beyond the end of the file, if the request is a write that ends there.
    pub reserve: bool,
}

/// The slot that the daemon granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    /// The slot.
    pub slot: u32,
    /// The slot's generation.
    pub generation: u32,
    /// One more than the last page reserved beyond the end of the file; 0: none.
    pub reserved_to: u64,
}

impl Wishing {
    /// Leaves a wish for the next request of the calling thread, to which the block belongs.
    pub fn leave(&self, wish: Wish) {
        self.wish.store(0, Ordering::Relaxed);
        self.answer.store(0, Ordering::Relaxed);
        self.ino.store(wish.ino, Ordering::Relaxed);
        let write = if wish.write { WRITE } else { 0 };
        let reserve = if wish.reserve { RESERVE } else { 0 };
        let word = u64::from(wish.number) << NUMBER_SHIFT | reserve | write | EXISTS;
        self.wish.store(word, Ordering::Release);
    }

    /// Takes the wish back after the request. Returns the granted slot, if the daemon has answered.
    pub fn end(&self, wish: Wish) -> Option<Granted> {
        self.wish.store(0, Ordering::Relaxed);
        let is_answered = || self.answer.load(Ordering::Acquire) == u64::from(wish.number);
        if !is_answered() {
            return None;
        }
        let granted = Granted {
            slot: self.slot.load(Ordering::Relaxed),
            generation: self.generation.load(Ordering::Relaxed),
            reserved_to: self.reserved_to.load(Ordering::Relaxed),
        };
        // A signal handler that interrupted `leave` may have left another inode there.
        let is_same = self.ino.load(Ordering::Relaxed) == wish.ino;
        fence(Ordering::Acquire);
        (is_same && is_answered()).then_some(granted)
    }

    /// Takes the wish for the daemon, if it is for this inode. Returns what the client has stored, unchecked.
    pub fn take(&self, ino: u64) -> Option<Wish> {
        let word = self.wish.load(Ordering::Acquire);
        if word & EXISTS == 0 || self.ino.load(Ordering::Relaxed) != ino {
            return None;
        }
        let wish = Wish {
            number: (word >> NUMBER_SHIFT) as u32,
            ino,
            write: word & WRITE != 0,
            reserve: word & RESERVE != 0,
        };
        let taken = self
            .wish
            .compare_exchange(word, 0, Ordering::AcqRel, Ordering::Relaxed);
        taken.is_ok().then_some(wish)
    }

    /// Answers a wish that the daemon has taken.
    pub fn grant(&self, wish: Wish, granted: Granted) {
        self.slot.store(granted.slot, Ordering::Relaxed);
        self.generation.store(granted.generation, Ordering::Relaxed);
        self.reserved_to
            .store(granted.reserved_to, Ordering::Relaxed);
        self.answer.store(u64::from(wish.number), Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn wishing() -> Wishing {
        Wishing {
            wish: 0.into(),
            ino: 0.into(),
            answer: 0.into(),
            slot: 0.into(),
            generation: 0.into(),
            reserved_to: 0.into(),
        }
    }

    fn wish(number: u32, ino: u64) -> Wish {
        Wish {
            number,
            ino,
            write: true,
            reserve: number.is_multiple_of(2),
        }
    }

    const GRANTED: Granted = Granted {
        slot: 5,
        generation: 6,
        reserved_to: 7,
    };

    #[test]
    fn a_wish_is_taken_once_and_for_its_inode() {
        let words = wishing();
        assert_eq!(words.take(0), None);
        words.leave(wish(1, 9));
        assert_eq!(words.take(8), None);
        assert_eq!(words.take(9), Some(wish(1, 9)));
        assert_eq!(words.take(9), None);
        words.grant(wish(1, 9), GRANTED);
        assert_eq!(words.end(wish(1, 9)), Some(GRANTED));
    }

    #[test]
    fn an_answer_is_for_one_wish() {
        let words = wishing();
        words.leave(wish(1, 9));
        assert_eq!(words.end(wish(1, 9)), None, "the daemon has not answered");
        assert_eq!(words.take(9), None, "the wish was taken back");
        // The answer comes after the thread has left its next wish.
        words.leave(wish(2, 9));
        words.grant(wish(1, 9), GRANTED);
        assert_eq!(words.end(wish(2, 9)), None);
        words.leave(wish(3, 9));
        assert_eq!(words.end(wish(2, 9)), None, "the answer was cleared");
    }

    #[test]
    fn an_answer_for_the_inode_of_a_handler_that_interrupted_the_stores_is_refused() {
        let words = wishing();
        words.leave(wish(1, 9));
        words.ino.store(8, Ordering::Relaxed);
        let taken = words.take(8).unwrap();
        words.grant(taken, GRANTED);
        assert_eq!(words.end(wish(1, 9)), None);
    }
}
