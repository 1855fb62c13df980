//! The reentrancy guard: tells which inline call this thread is making.
//!
//! A signal handler may interrupt an inline call and make another. It must not wait for what the interrupted call
//! holds, so its call goes through the kernel. If the interrupted call is a write through the same description, the
//! handler's bytes go after those of that write. An interrupted write may hold a page's latch, for which the daemon
//! would wait. So the handler asks the daemon to take the latch away (`interrupted`), and the write repeats itself.

use std::cell::Cell;
use std::sync::atomic::{Ordering, compiler_fence};

use super::locked_offset::LockedOffset;
use super::recent_hits::RecentHits;
use super::spilled::Spilled;
use crate::migration::ThreadUse;
use crate::session::SESSIONS_MAX;

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

/// The library's record of a thread. A call gets it once, from `enter`, and passes it on, because each access to thread-local
/// storage calls the dynamic linker in a preloaded library.
pub struct Thread {
    doing: Cell<Doing>,
    /// The thread's use of data, and its migration.
    pub migration: ThreadUse,
    /// The thread's memory of its last hits.
    pub recent_hits: RecentHits,
    /// Pages in spill ranges that the present call has accessed.
    pub spilled: Spilled,
    /// The offset that the thread has locked.
    pub offset: LockedOffset,
    /// Block in each session's area, as `remember` packs it; 0: none yet.
    blocks: [Cell<u16>; SESSIONS_MAX],
}

thread_local! {
    // Constant and without a destructor. So its use allocates and registers nothing, and works in a signal handler and while the
    // thread ends.
    static THREAD: Thread = const {
        Thread {
            doing: Cell::new(Doing::Nothing),
            migration: ThreadUse::new(),
            recent_hits: RecentHits::new(),
            spilled: Spilled::new(),
            offset: LockedOffset::new(),
            blocks: [const { Cell::new(0) }; SESSIONS_MAX],
        }
    };
}

/// Passes the calling thread's record to `act`. Does not begin an inline call: the caller may be in one or not.
#[inline]
pub fn current<T>(act: impl FnOnce(&Thread) -> T) -> T {
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
}
