//! futex(2) on words in shared memory. The words are shared between processes, so the private flag is never used.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::thread::futex::{Flags, Timespec};

/// Sleeps while `word` is `expected`, for at most `timeout`. May return early.
pub fn wait(word: &AtomicU32, expected: u32, timeout: Duration) {
    let timeout = Timespec::try_from(timeout).ok();
    // EAGAIN, EINTR, ETIMEDOUT: the caller checks the word again anyway.
    let _ = rustix::thread::futex::wait(word, Flags::empty(), expected, timeout.as_ref());
}

/// Sleeps while `word` is `expected`. May return early.
pub fn wait_forever(word: &AtomicU32, expected: u32) {
    let _ = rustix::thread::futex::wait(word, Flags::empty(), expected, None);
}

/// Wakes the thread that has slept longest on `word`.
pub fn wake_one(word: &AtomicU32) {
    let _ = rustix::thread::futex::wake(word, Flags::empty(), 1);
}

/// Wakes all threads that sleep on `word`.
pub fn wake_all(word: &AtomicU32) {
    let _ = rustix::thread::futex::wake(word, Flags::empty(), i32::MAX as u32);
}
