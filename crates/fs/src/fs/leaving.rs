//! Files without a name whose space will soon be free.
//!
//! close(2) and unlink(2) return before this daemon learns of them. The kernel sends RELEASE and FORGET later, and the space is
//! free only when the following batch is durable. On a local filesystem the space is free when the calls return. So a write
//! that finds no space waits while a file without a name exists, but for at most [`PATIENCE`]: the kernel does not tell whether
//! such a file is still open or about to be released. A file that a write has awaited that long in vain is not awaited again.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::core::Core;
use super::errno::ENOSPC;
use crate::error::Result;
use crate::types::Ino;

/// Longest wait of a write: many times what the kernel needs on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(5);

/// Most threads that wait at once. The others must serve the requests that end the wait; a mount has four threads or
/// more.
const WAITERS_MAX: u32 = 2;

#[derive(Default)]
struct State {
    /// Regular files without a name whose removal is not durable yet.
    files: HashMap<Ino, Nameless>,
    /// Number of files that have come, and that have left, so far.
    came: u64,
    left: u64,
    waiters: u32,
}

/// A file without a name.
struct Nameless {
    /// Number of files that came before it.
    number: u64,
    /// A write has waited for the file in vain.
    in_vain: bool,
}

/// Limit of a write's wait.
struct Wait {
    until: Instant,
    /// Value of `State::came` when the wait began. The write waits less than `PATIENCE` for files that came later.
    came: u64,
}

impl State {
    fn awaits(&self, own: Ino) -> bool {
        self.files
            .iter()
            .any(|(ino, file)| *ino != own && !file.in_vain)
    }
}

/// The files without a name.
#[derive(Default)]
pub struct Leaving {
    state: Mutex<State>,
    changed: Condvar,
}

impl Leaving {
    /// Adds a file that has lost its last name, or never had one.
    pub fn add(&self, ino: Ino) {
        let mut state = self.state.lock();
        let number = state.came;
        state.came += 1;
        let in_vain = false;
        state.files.insert(ino, Nameless { number, in_vain });
    }

    /// Removes files that are gone, have got a name again, or will stay until the next mount.
    pub fn remove(&self, files: &[Ino]) {
        if files.is_empty() {
            return;
        }
        let mut state = self.state.lock();
        for ino in files {
            if state.files.remove(ino).is_some() {
                state.left += 1;
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Returns whether a write waits, so that removals should be committed without delay.
    pub fn is_awaited(&self) -> bool {
        self.state.lock().waiters > 0
    }

    fn left(&self) -> u64 {
        self.state.lock().left
    }

    /// Begins a wait that takes at most `patience`.
    fn begin(&self, patience: Duration) -> Wait {
        Wait {
            until: Instant::now() + patience,
            came: self.state.lock().came,
        }
    }

    /// Waits until more than `left` files have left. Returns false when there is nothing to wait for, or when no file left in
    /// time. `own` is the file that needs the space.
    fn wait(&self, own: Ino, left: u64, Wait { until, came }: &Wait) -> bool {
        let mut state = self.state.lock();
        if state.left == left && state.waiters >= WAITERS_MAX {
            return false;
        }
        state.waiters += 1;
        while state.left == left && state.awaits(own) {
            if self.changed.wait_until(&mut state, *until).timed_out() {
                if state.left == left {
                    let files = state.files.iter_mut();
                    files
                        .filter(|(ino, file)| **ino != own && file.number < *came)
                        .for_each(|(_, file)| file.in_vain = true);
                }
                break;
            }
        }
        state.waiters -= 1;
        state.left != left
    }
}

impl Core {
    /// Runs `attempt`, which takes space; if it fails because the volume is full, waits for space and runs it again. `attempt`
    /// must change nothing when it fails so. `own` is the file that needs the space. The caller may block, and holds no lock
    /// that the removal of a file takes.
    pub fn with_space<T>(&self, own: Ino, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
        let mut attempt = || match attempt() {
            Err(error) if error.is_full_volume() => None,
            result => Some(result),
        };
        if let Some(result) = attempt() {
            return result;
        }
        // A batch that is not durable yet may have freed the space.
        self.commit_now()?;
        let wait = self.leaving.begin(PATIENCE);
        loop {
            // Files may leave continually while other writers take their space.
            let is_last = Instant::now() >= wait.until;
            let left = self.leaving.left();
            let result = {
                // Also wait until no free block is being discarded.
                let _all = self.allocator.recall();
                attempt()
            };
            if let Some(result) = result {
                return result;
            }
            if is_last || !self.leaving.wait(own, left, &wait) {
                return Err(ENOSPC);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(600);
    const NO_TIME: Duration = Duration::ZERO;

    fn wait_for_waiter(leaving: &Leaving) {
        while !leaving.is_awaited() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_write_waits_for_a_file_that_leaves() {
        let leaving = Leaving::default();
        leaving.add(7);
        let left = leaving.left();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| leaving.wait(8, left, &leaving.begin(LONG)));
            wait_for_waiter(&leaving);
            leaving.remove(&[7]);
            assert!(waiter.join().unwrap());
        });
        // A file that left between the attempt and the wait counts too.
        assert!(leaving.wait(8, left, &leaving.begin(LONG)));
        assert!(!leaving.wait(8, leaving.left(), &leaving.begin(LONG)));
    }

    #[test]
    fn nobody_waits_for_itself_nor_twice_in_vain() {
        let leaving = Leaving::default();
        leaving.add(7);
        assert!(!leaving.wait(7, 0, &leaving.begin(LONG)));
        assert!(!leaving.wait(8, 0, &leaving.begin(NO_TIME)));
        assert!(!leaving.wait(8, 0, &leaving.begin(LONG)));
        // The file could not have waited for itself in vain.
        leaving.add(8);
        assert!(!leaving.wait(8, 0, &leaving.begin(LONG)));
        leaving.remove(&[7]);
        assert!(!leaving.wait(7, leaving.left(), &leaving.begin(NO_TIME)));
    }

    #[test]
    fn a_file_that_came_in_the_middle_of_a_vain_wait_is_waited_for_by_the_next() {
        let leaving = Leaving::default();
        leaving.add(7);
        let over = leaving.begin(NO_TIME);
        leaving.add(8);
        assert!(!leaving.wait(9, 0, &over));
        std::thread::scope(|scope| {
            let next = scope.spawn(|| leaving.wait(9, 0, &leaving.begin(LONG)));
            let until = Instant::now() + Duration::from_secs(60);
            while !leaving.is_awaited() {
                assert!(!next.is_finished(), "it does not wait");
                assert!(Instant::now() < until);
                std::thread::yield_now();
            }
            leaving.remove(&[8]);
            assert!(next.join().unwrap());
        });
        // The other write has used up its time.
        assert!(!leaving.wait(9, leaving.left(), &leaving.begin(LONG)));
    }

    #[test]
    fn threads_are_left_to_serve_what_is_waited_for() {
        let leaving = Leaving::default();
        leaving.add(7);
        std::thread::scope(|scope| {
            let wait = || leaving.wait(8, 0, &leaving.begin(LONG));
            let waiters: Vec<_> = (0..WAITERS_MAX).map(|_| scope.spawn(wait)).collect();
            while leaving.state.lock().waiters < WAITERS_MAX {
                std::thread::yield_now();
            }
            assert!(!wait());
            leaving.remove(&[7]);
            assert!(waiters.into_iter().all(|waiter| waiter.join().unwrap()));
        });
    }
}
