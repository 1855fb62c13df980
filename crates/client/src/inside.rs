//! The reentrancy guard: tells which inline call this thread is making.
//!
//! A signal handler may interrupt an inline call and make another. It must not wait for what the interrupted call
//! holds, so its call goes through the kernel. If the interrupted call is a write through the same description, the
//! handler's bytes go after those of that write. An interrupted write may hold a page's latch, for which the daemon
//! would wait. So the handler asks the daemon to take the latch away (`interrupted`), and the write repeats itself.

use std::cell::Cell;
use std::sync::atomic::{Ordering, compiler_fence};

use crate::lately::Lately;
use crate::placement;

/// Sessions that a process can have; see `session`.
pub const SESSIONS_MAX: usize = 64;

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

/// The library's state of a thread. A call gets it once, from `enter`, and passes it on, because each access to
/// thread-local storage calls the dynamic linker in a preloaded library.
pub struct Thread {
    inside: Cell<Doing>,
    /// What it has used, and where it runs.
    pub placement: placement::Thread,
    /// What its last hit found out.
    pub lately: Lately,
    /// Description whose offset this thread has locked, or is about to; `u32::MAX`: none.
    locking: Cell<u32>,
    /// Where the interrupted write ends.
    end: Cell<u64>,
    /// What a signal handler has written after it.
    displaced: Cell<u64>,
    /// Block in the area of each session, as `remember` packs it; 0: none yet.
    blocks: [Cell<u16>; SESSIONS_MAX],
}

thread_local! {
    // Constant and without a destructor: no allocation, no registration, usable in a signal handler and while
    // the thread ends.
    static THREAD: Thread = const {
        Thread {
            inside: Cell::new(Doing::Nothing),
            placement: placement::Thread::new(),
            lately: Lately::new(),
            locking: Cell::new(u32::MAX),
            end: Cell::new(0),
            displaced: Cell::new(0),
            blocks: [const { Cell::new(0) }; SESSIONS_MAX],
        }
    };
}

/// What is remembered of this thread, for who makes no inline call.
#[inline]
pub fn thread<T>(act: impl FnOnce(&Thread) -> T) -> T {
    THREAD.with(act)
}

/// Ends the call.
struct Inside<'a>(&'a Thread);

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        // Everything that the call has held is given back by now. Before the mark goes, so that a handler that
        // comes into the middle of a move makes none.
        if self.0.placement.is_due() {
            self.0.placement.settle();
            self.0.lately.forget(&self.0.placement);
        }
        compiler_fence(Ordering::SeqCst);
        self.0.inside.set(Doing::Nothing);
    }
}

/// Makes an inline call; `None`: this thread is in one already, and nothing is done.
#[inline]
pub fn enter<T>(doing: Doing, call: impl FnOnce(&Thread) -> T) -> Option<T> {
    THREAD.with(|thread| {
        if thread.inside.get() != Doing::Nothing {
            return None;
        }
        thread.inside.set(doing);
        let _inside = Inside(thread);
        // A handler of this thread sees the mark before anything of the call, and as long as there is any.
        compiler_fence(Ordering::SeqCst);
        Some(call(thread))
    })
}

/// As `enter`, for a call that is over in a moment, and leaves what is due for the thread to others.
#[inline(always)]
pub fn enter_briefly<T>(doing: Doing, call: impl FnOnce(&Thread) -> Option<T>) -> Option<T> {
    THREAD.with(|thread| {
        if thread.inside.get() != Doing::Nothing {
            return None;
        }
        thread.inside.set(doing);
        compiler_fence(Ordering::SeqCst);
        let result = call(thread);
        if result.is_none() {
            thread.lately.forget(&thread.placement);
        }
        compiler_fence(Ordering::SeqCst);
        thread.inside.set(Doing::Nothing);
        result
    })
}

/// Returns whether this thread is in a signal handler that has interrupted an inline write of the same thread.
#[inline]
pub fn is_writing() -> bool {
    THREAD.with(|thread| thread.inside.get() == Doing::Writing)
}

impl Thread {
    /// This thread is about to lock the offset of a description.
    #[inline]
    pub fn locking(&self, description: u32) {
        self.displaced.set(0);
        self.end.set(u64::MAX);
        self.locking.set(description);
        compiler_fence(Ordering::SeqCst);
    }

    /// It has it, and the write is going to end there.
    #[inline]
    pub fn ends_at(&self, end: u64) {
        self.end.set(end);
        compiler_fence(Ordering::SeqCst);
    }

    /// Whether a signal handler has written behind the write.
    #[inline]
    pub fn is_displaced(&self) -> bool {
        compiler_fence(Ordering::SeqCst);
        self.displaced.get() != 0
    }

    /// It is about to unlock it: what was written after the write, in bytes.
    #[inline]
    pub fn unlocking(&self) -> u64 {
        compiler_fence(Ordering::SeqCst);
        self.locking.set(u32::MAX);
        compiler_fence(Ordering::SeqCst);
        self.displaced.get()
    }

    /// Returns this thread's block of a session (below `SESSIONS_MAX`), and whether the thread has it for itself. Calls `take`
    /// the first time. A thread that ends releases nothing: a later thread notices that its owner has ended.
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

/// Whether this thread has the offset of that description locked, or is about to.
#[inline]
pub fn is_locking(description: u32) -> bool {
    THREAD.with(|thread| thread.locking.get() == description)
}

/// Where the I/O of a handler goes that has interrupted a call with the offset locked; `begin` is where that call
/// began, for one that has not yet said where it ends.
pub fn behind(begin: u64) -> u64 {
    THREAD.with(|thread| match thread.end.get() {
        u64::MAX => begin,
        end => end + thread.displaced.get(),
    })
}

/// The handler has moved the offset on by that many bytes.
pub fn displace(bytes: u64) {
    THREAD.with(|thread| thread.displaced.set(thread.displaced.get() + bytes));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_inside_once() {
        enter(Doing::Reading, |_| {
            for _ in 0..3 {
                assert!(enter(Doing::Reading, |_| ()).is_none());
            }
            let other = std::thread::spawn(|| enter(Doing::Reading, |_| ()).is_some());
            assert!(other.join().unwrap(), "others are not");
        })
        .unwrap();
        assert!(enter(Doing::Reading, |_| ()).is_some());
    }

    #[test]
    fn what_a_handler_writes_comes_after_the_write_that_it_interrupted() {
        assert!(!is_locking(5));
        enter(Doing::Writing, |thread| {
            thread.locking(5);
            assert_eq!((is_locking(5), is_locking(6)), (true, false));
            assert_eq!(behind(70), 70, "its end is not known yet");
            thread.ends_at(100);
            assert_eq!(behind(70), 100);
            displace(10);
            assert_eq!(behind(70), 110);
            assert_eq!(thread.unlocking(), 10);
        })
        .unwrap();
        assert!(!is_locking(5));
    }
}
