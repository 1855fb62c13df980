//! The reentrancy guard: tells which inline call this thread is making.
//!
//! A signal handler may interrupt an inline call and make another. It must not wait for what the interrupted call
//! holds, so its call goes through the kernel. If the interrupted call is a write through the same description, the
//! handler's bytes go after those of that write. An interrupted write may hold a page's latch, for which the daemon
//! would wait. So the handler asks the daemon to take the latch away (`interrupted`), and the write repeats itself.

use std::cell::Cell;
use std::sync::atomic::{Ordering, compiler_fence};
use std::time::Duration;

use crate::migration;
use crate::offset::Offset;
use crate::recent_hits::RecentHits;

/// Sessions that a process can have; see `session`.
pub const SESSIONS_MAX: usize = 64;

/// Polls, and the pause between them, with which a handler waits for a word to change that may be another thread's.
const LOCK_POLLS: u32 = 20;
const LOCK_POLL: Duration = Duration::from_millis(1);

/// The kind of inline call that a thread is making.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// No inline call.
    Nothing,
    /// A call that holds no latch and no lock of a file.
    Reading,
    /// A call that may hold latches and locks of a file.
    Writing,
}

/// The library's state of a thread. A call gets it once, from `enter`, and passes it on, because each access to thread-local
/// storage calls the dynamic linker in a preloaded library.
pub struct Thread {
    doing: Cell<Doing>,
    /// The thread's use of data, and its migration.
    pub migration: migration::Thread,
    /// The thread's memory of its last hits.
    pub recent_hits: RecentHits,
    /// Description whose offset this thread has locked or is about to lock; `u32::MAX`: none.
    locking: Cell<u32>,
    /// The offset's word while this thread has it locked, or as the thread is about to lock it; 0: the thread waits for another
    /// thread.
    locked: Cell<u64>,
    /// The end of the interrupted write; `u64::MAX`: the thread does not know yet whether it has the lock.
    end: Cell<u64>,
    /// Bytes that signal handlers have written: `before` the thread knew that it has the lock, and `displaced` after the write.
    before: Cell<u64>,
    displaced: Cell<u64>,
    /// Block in each session's area, as `remember` packs it; 0: none yet.
    blocks: [Cell<u16>; SESSIONS_MAX],
}

thread_local! {
    // Constant and without a destructor. So its use allocates and registers nothing, and works in a signal handler and while the
    // thread ends.
    static THREAD: Thread = const {
        Thread {
            doing: Cell::new(Doing::Nothing),
            migration: migration::Thread::new(),
            recent_hits: RecentHits::new(),
            locking: Cell::new(u32::MAX),
            locked: Cell::new(0),
            end: Cell::new(0),
            before: Cell::new(0),
            displaced: Cell::new(0),
            blocks: [const { Cell::new(0) }; SESSIONS_MAX],
        }
    };
}

/// Passes this thread's state to code that makes no inline call.
#[inline]
pub fn thread<T>(act: impl FnOnce(&Thread) -> T) -> T {
    THREAD.with(act)
}

/// Ends the inline call.
struct EndOfCall<'a>(&'a Thread);

impl Drop for EndOfCall<'_> {
    #[inline]
    fn drop(&mut self) {
        // The call holds nothing now. Migrates before it clears `doing`, so that a signal handler that interrupts a migration
        // begins no other.
        if self.0.migration.is_due() {
            self.0.migration.migrate_if_due();
            self.0.recent_hits.forget(&self.0.migration);
        }
        compiler_fence(Ordering::SeqCst);
        self.0.doing.set(Doing::Nothing);
    }
}

/// Makes an inline call. Does nothing and returns `None` when this thread already is in one.
#[inline]
pub fn enter<T>(doing: Doing, call: impl FnOnce(&Thread) -> T) -> Option<T> {
    THREAD.with(|thread| {
        if thread.doing.get() != Doing::Nothing {
            return None;
        }
        thread.doing.set(doing);
        let _end = EndOfCall(thread);
        // A handler of this thread sees `doing` set from before the call's first step until after its last.
        compiler_fence(Ordering::SeqCst);
        Some(call(thread))
    })
}

/// Does as `enter`, for a short call. Leaves the thread's due migration to other calls.
#[inline(always)]
pub fn enter_briefly<T>(doing: Doing, call: impl FnOnce(&Thread) -> Option<T>) -> Option<T> {
    THREAD.with(|thread| {
        if thread.doing.get() != Doing::Nothing {
            return None;
        }
        thread.doing.set(doing);
        compiler_fence(Ordering::SeqCst);
        let result = call(thread);
        if result.is_none() {
            thread.recent_hits.forget(&thread.migration);
        }
        compiler_fence(Ordering::SeqCst);
        thread.doing.set(Doing::Nothing);
        result
    })
}

/// Returns whether this thread is in a signal handler that has interrupted an inline write of the same thread.
#[inline]
pub fn is_writing() -> bool {
    THREAD.with(|thread| thread.doing.get() == Doing::Writing)
}

impl Thread {
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

    /// Notes that the thread is about to unlock the offset. Returns its word, and the bytes that signal handlers have written
    /// after the write. Handlers that use the offset later change the word.
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

    /// Returns this thread's block of a session (below `SESSIONS_MAX`), and whether the thread has it for itself. Calls `take`
    /// the first time. A thread that ends does not release its block: a later thread notices that the owner has ended.
    #[inline]
    pub fn block(&self, session: usize, take: impl FnOnce() -> (u32, bool)) -> (u32, bool) {
        let cell = &self.blocks[session];
        if cell.get() == 0 {
            remember(cell, take());
        }
        let block = cell.get();
        (u32::from(block & !(TAKEN | ALONE)), block & ALONE != 0)
    }
}

const TAKEN: u16 = 0x8000;
const ALONE: u16 = 0x4000;
const _: () = assert!(jericho_shm::BLOCKS <= ALONE as usize);

#[cold]
fn remember(cell: &Cell<u16>, (block, alone): (u32, bool)) {
    cell.set(TAKEN | if alone { ALONE } else { 0 } | (block as u16 & !(TAKEN | ALONE)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offset::Position;

    #[test]
    fn a_thread_makes_one_inline_call_at_a_time() {
        enter(Doing::Reading, |_| {
            for _ in 0..3 {
                assert!(enter(Doing::Reading, |_| ()).is_none());
            }
            let other = std::thread::spawn(|| enter(Doing::Reading, |_| ()).is_some());
            assert!(other.join().unwrap(), "another thread is in no call");
        })
        .unwrap();
        assert!(enter(Doing::Reading, |_| ()).is_some());
    }

    /// Locks the offset as a write of `len` bytes does. Returns the offset for the write.
    fn lock(thread: &Thread, offset: &Offset, len: u64) -> u64 {
        let Position::At(at) = offset.lock_as(1, |word| thread.about_to_lock(word)) else {
            panic!("the offset is here");
        };
        thread.has_locked(at, len)
    }

    #[test]
    fn a_handlers_bytes_follow_the_write_that_it_interrupted() {
        let offset = Offset::new();
        offset.begin(1, Some(70));
        enter(Doing::Writing, |thread| {
            thread.locking(5);
            assert!(!thread.has_offset(5, &offset), "not locked yet");
            assert_eq!(lock(thread, &offset, 30), 70);
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
        })
        .unwrap();
    }

    #[test]
    fn a_handlers_bytes_precede_a_write_that_has_no_offset_yet() {
        let offset = Offset::new();
        offset.begin(1, Some(70));
        enter(Doing::Writing, |thread| {
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
        })
        .unwrap();
    }

    #[test]
    fn another_threads_lock_is_not_this_threads() {
        let offset = Offset::new();
        offset.begin(1, Some(70));
        enter(Doing::Writing, |thread| {
            thread.locking(5);
            assert_eq!(offset.lock(1), Position::At(70));
            thread.about_to_lock(0);
            assert!(
                !thread.has_offset(5, &offset),
                "the thread waits for the offset"
            );
            thread.unlocked();
        })
        .unwrap();
    }
}
