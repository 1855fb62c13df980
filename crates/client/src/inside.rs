//! What this thread is in the middle of.
//!
//! A signal handler may interrupt an inline call and make another. It must not wait for what the call that it
//! interrupted holds, so it goes to the kernel; and when that call is a write through the same description,
//! what the handler writes comes after it.

use std::cell::Cell;

use crate::placement;

/// Sessions that a process can have; see `session`.
pub const SESSIONS_MAX: usize = 64;

struct Thread {
    inside: Cell<bool>,
    /// Description whose offset this thread has locked, or is about to; `u32::MAX`: none.
    locking: Cell<u32>,
    /// Where the interrupted write ends.
    end: Cell<u64>,
    /// What a signal handler has written after it.
    displaced: Cell<u64>,
    /// Line of counters in the area of each session, as `remembered` packs it; 0: none yet.
    lines: [Cell<u8>; SESSIONS_MAX],
    /// Line of the process's own counters.
    own_line: Cell<u8>,
}

thread_local! {
    // Constant and without a destructor: no allocation, no registration, usable in a signal handler and while
    // the thread ends.
    static THREAD: Thread = const {
        Thread {
            inside: Cell::new(false),
            locking: Cell::new(u32::MAX),
            end: Cell::new(0),
            displaced: Cell::new(0),
            lines: [const { Cell::new(0) }; SESSIONS_MAX],
            own_line: Cell::new(0),
        }
    };
}

/// An inline call of this thread is under way while this lives.
pub struct Inside(());

/// Begins an inline call; `None`: this thread is in one.
#[inline]
pub fn enter() -> Option<Inside> {
    // Made only when it is: dropping one ends the call.
    THREAD.with(|thread| (!thread.inside.replace(true)).then(|| Inside(())))
}

impl Drop for Inside {
    #[inline]
    fn drop(&mut self) {
        // Everything that the call has held is given back by now. Before the mark goes, so that a handler that
        // comes into the middle of a move makes none.
        placement::settle();
        THREAD.with(|thread| thread.inside.set(false));
    }
}

/// This thread is about to lock the offset of a description.
#[inline]
pub fn locking(description: u32) {
    THREAD.with(|thread| {
        thread.displaced.set(0);
        thread.end.set(u64::MAX);
        thread.locking.set(description);
    });
}

/// It has it, and the write is going to end there.
#[inline]
pub fn ends_at(end: u64) {
    THREAD.with(|thread| thread.end.set(end));
}

/// It is about to unlock it: what was written after the write, in bytes.
#[inline]
pub fn unlocking() -> u64 {
    THREAD.with(|thread| {
        thread.locking.set(u32::MAX);
        thread.displaced.get()
    })
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

/// This thread's line of counters of a session (below `SESSIONS_MAX`), and whether it is the thread's alone:
/// what `take` gave the first time.
#[inline]
pub fn line(session: usize, take: impl FnOnce() -> (u32, bool)) -> (u32, bool) {
    THREAD.with(|thread| remembered(&thread.lines[session], take))
}

/// The same for the process's own counters.
#[inline]
pub fn own_line(take: impl FnOnce() -> (u32, bool)) -> (u32, bool) {
    THREAD.with(|thread| remembered(&thread.own_line, take))
}

#[inline]
fn remembered(cell: &Cell<u8>, take: impl FnOnce() -> (u32, bool)) -> (u32, bool) {
    const TAKEN: u8 = 0x80;
    const ALONE: u8 = 0x40;
    if cell.get() == 0 {
        let (line, alone) = take();
        cell.set(TAKEN | if alone { ALONE } else { 0 } | (line as u8 & !(TAKEN | ALONE)));
    }
    let line = cell.get();
    (u32::from(line & !(TAKEN | ALONE)), line & ALONE != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_inside_once() {
        let outer = enter().unwrap();
        for _ in 0..3 {
            assert!(enter().is_none());
        }
        assert!(
            std::thread::spawn(|| enter().is_some()).join().unwrap(),
            "others are not"
        );
        drop(outer);
        assert!(enter().is_some());
    }

    #[test]
    fn what_a_handler_writes_comes_after_the_write_that_it_interrupted() {
        assert!(!is_locking(5));
        locking(5);
        assert_eq!((is_locking(5), is_locking(6)), (true, false));
        assert_eq!(behind(70), 70, "its end is not known yet");
        ends_at(100);
        assert_eq!(behind(70), 100);
        displace(10);
        assert_eq!(behind(70), 110);
        assert_eq!(unlocking(), 10);
        assert!(!is_locking(5));
    }
}
