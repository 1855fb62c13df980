//! The offset that this thread has locked, as its signal handlers see it.
//!
//! A handler may interrupt a write that has the description's offset locked, and write through the same description. Its bytes go
//! after those of the write. The thread adds their number when it unlocks the offset.

use std::cell::Cell;
use std::sync::atomic::{Ordering, compiler_fence};
use std::time::Duration;

use crate::descriptors::Offset;

/// A handler polls the offset's word this number of times, with this pause, until the word changes: another thread may have set it.
const LOCK_POLLS: u32 = 20;
const LOCK_POLL: Duration = Duration::from_millis(1);

/// A thread's notes of the offset that it locks.
pub struct LockedOffset {
    /// Description whose offset this thread has locked or is about to lock; `u32::MAX`: none.
    locking: Cell<u32>,
    /// The word that the offset has while this thread has it locked. The thread notes the word before each attempt to lock. 0: no
    /// attempt yet, or the thread waits for another thread.
    locked: Cell<u64>,
    /// The end of the interrupted write; `u64::MAX`: the thread does not know yet whether it has the lock.
    end: Cell<u64>,
    /// Bytes that signal handlers have written: `before` the thread knew that it has the lock, and `displaced` after the write.
    before: Cell<u64>,
    displaced: Cell<u64>,
}

impl LockedOffset {
    /// Returns the notes of a thread that locks no offset.
    pub const fn new() -> LockedOffset {
        LockedOffset {
            locking: Cell::new(u32::MAX),
            locked: Cell::new(0),
            end: Cell::new(0),
            before: Cell::new(0),
            displaced: Cell::new(0),
        }
    }

    /// Notes that this thread is about to lock the offset of a description.
    #[inline]
    pub fn locking(&self, description: u32) {
        self.locked.set(0);
        self.before.set(0);
        self.displaced.set(0);
        self.end.set(u64::MAX);
        compiler_fence(Ordering::SeqCst);
        self.locking.set(description);
        compiler_fence(Ordering::SeqCst);
    }

    /// Notes that the thread is about to set the offset's word to `word`; 0: it waits for another thread.
    #[inline]
    pub fn about_to_lock(&self, word: u64) {
        self.locked.set(word);
        compiler_fence(Ordering::SeqCst);
    }

    /// Records that the thread has locked the offset, which is `at`, to write `len` bytes. Returns the offset at which to write
    /// them: after the bytes that a signal handler has written meanwhile.
    #[inline]
    pub fn has_locked(&self, at: u64, len: u64) -> u64 {
        compiler_fence(Ordering::SeqCst);
        self.end.set(at + len);
        compiler_fence(Ordering::SeqCst);
        at + self.before.get()
    }

    /// Returns the offset's word for `Offset::release`, and the number of bytes that signal handlers have written after the write.
    /// A handler that uses the offset later changes the word, so the release fails.
    #[inline]
    pub fn unlocking(&self) -> (u64, u64) {
        compiler_fence(Ordering::SeqCst);
        let locked = self.locked.get();
        compiler_fence(Ordering::SeqCst);
        (locked, self.displaced.get())
    }

    /// Notes that the thread has unlocked the offset, or has not locked it.
    #[inline]
    pub fn unlocked(&self) {
        compiler_fence(Ordering::SeqCst);
        self.locking.set(u32::MAX);
        compiler_fence(Ordering::SeqCst);
    }

    /// Returns whether this thread has the offset of `description` locked. For its signal handlers, which interrupt the thread
    /// meanwhile.
    pub fn has_offset(&self, description: u32, offset: &Offset) -> bool {
        let locked = self.locked.get();
        if self.locking.get() != description || locked == 0 {
            return false;
        }
        // Another thread's lock may make the same word while this thread does not know yet whether it has the lock. That thread
        // changes the word soon.
        for _ in 0..LOCK_POLLS {
            if !offset.is(locked) || self.end.get() != u64::MAX {
                break;
            }
            std::thread::sleep(LOCK_POLL);
        }
        offset.is(locked)
    }

    /// Returns the offset for the I/O of a handler that has interrupted a call which has the offset locked.
    pub fn behind(&self, offset: &Offset) -> u64 {
        match self.end.get() {
            u64::MAX => offset.value(),
            end => end + self.before.get() + self.displaced.get(),
        }
    }

    /// Records that the handler has used the offset for `bytes` bytes at `at`, which `behind` returned.
    pub fn displace(&self, offset: &Offset, tag: u16, at: u64, bytes: u64) {
        let displaced = match self.end.get() {
            u64::MAX => &self.before,
            _ => &self.displaced,
        };
        displaced.set(displaced.get() + bytes);
        self.locked
            .set(offset.keep(tag, self.locked.get(), at + bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::descriptors::Position;

    /// Locks the offset as a write of `len` bytes does. Returns the offset for the write.
    fn lock(thread: &LockedOffset, offset: &Offset, len: u64) -> u64 {
        let Position::At(at) = offset.lock_as(1, |word| thread.about_to_lock(word)) else {
            panic!("the offset is here");
        };
        thread.has_locked(at, len)
    }

    #[test]
    fn a_handlers_bytes_follow_the_write_that_it_interrupted() {
        let offset = Offset::new();
        offset.begin(1, Some(70));
        let thread = LockedOffset::new();
        thread.locking(5);
        assert!(!thread.has_offset(5, &offset), "not locked yet");
        assert_eq!(lock(&thread, &offset, 30), 70);
        assert!(thread.has_offset(5, &offset) && !thread.has_offset(6, &offset));
        assert_eq!(thread.behind(&offset), 100);
        thread.displace(&offset, 1, 100, 10);
        assert!(thread.has_offset(5, &offset));
        assert_eq!(thread.behind(&offset), 110);
        // A handler comes between reading the word and unlocking it.
        let (word, displaced) = thread.unlocking();
        assert_eq!(displaced, 10);
        thread.displace(&offset, 1, 110, 5);
        assert!(!offset.release(1, word, 110));
        let (word, displaced) = thread.unlocking();
        assert_eq!(displaced, 15);
        assert!(offset.release(1, word, 115));
        // Another thread locks the offset before this thread notes that it has unlocked it.
        assert!(!thread.has_offset(5, &offset));
        assert!(offset.advance(1, 115, 120));
        assert_eq!(offset.lock(1), Position::At(120));
        assert!(!thread.has_offset(5, &offset));
        thread.unlocked();
    }

    #[test]
    fn a_handlers_bytes_precede_a_write_that_has_no_offset_yet() {
        let offset = Offset::new();
        offset.begin(1, Some(70));
        let thread = LockedOffset::new();
        thread.locking(5);
        let Position::At(at) = offset.lock_as(1, |word| thread.about_to_lock(word)) else {
            panic!("the offset is here");
        };
        for place in [70, 74] {
            assert!(thread.has_offset(5, &offset));
            assert_eq!(thread.behind(&offset), place);
            thread.displace(&offset, 1, place, 4);
        }
        assert_eq!(thread.has_locked(at, 30), 78);
        assert_eq!(thread.behind(&offset), 108);
        let (word, displaced) = thread.unlocking();
        assert_eq!(displaced, 0);
        assert!(offset.release(1, word, 108));
        thread.unlocked();
    }

    #[test]
    fn another_threads_lock_is_not_this_threads() {
        let offset = Offset::new();
        offset.begin(1, Some(70));
        let thread = LockedOffset::new();
        thread.locking(5);
        assert_eq!(offset.lock(1), Position::At(70));
        thread.about_to_lock(0);
        assert!(
            !thread.has_offset(5, &offset),
            "the thread waits for the offset"
        );
        thread.unlocked();
    }
}
