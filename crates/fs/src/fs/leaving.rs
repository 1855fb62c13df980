//! Files without a name whose space is about to come back.
//!
//! close(2) and unlink(2) return before this daemon hears of them: the kernel sends RELEASE and FORGET later, in its own time,
//! and the space is free when the batch after them is durable. On a local filesystem it is free when the calls
//! return. So a write that finds no space waits while a file without a name is left, but for [`PATIENCE`] only: the kernel does
//! not say whether such a file is open or about to be released. A file that was waited for in vain all that time is
//! not waited for again.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::core::Core;
use super::errno::ENOSPC;
use crate::error::Result;
use crate::types::Ino;

/// How long a write waits: many times what the kernel takes on a machine under load.
const PATIENCE: Duration = Duration::from_secs(5);

/// Threads that may wait at once. Others are needed to serve what is waited for: a mount has four threads or more.
const WAITERS_MAX: u32 = 2;

#[derive(Default)]
struct State {
    /// Regular files without a name that no durable batch has removed.
    files: HashMap<Ino, Nameless>,
    /// Files that have come, and that have left, so far.
    came: u64,
    left: u64,
    waiters: u32,
}

/// A file without a name.
struct Nameless {
    /// Files that came before it.
    number: u64,
    /// Somebody has waited for it in vain.
    in_vain: bool,
}

/// How long a write goes on waiting.
struct Wait {
    until: Instant,
    /// Files that had come when it began: it waits for later ones less than `PATIENCE`.
    came: u64,
}

impl State {
    fn awaits(&self, own: Ino) -> bool {
        self.files
            .iter()
            .any(|(ino, file)| *ino != own && !file.in_vain)
    }
}

/// The files.
#[derive(Default)]
pub struct Leaving {
    state: Mutex<State>,
    changed: Condvar,
}

impl Leaving {
    /// Counts a file that has lost its last name, or never had one.
    pub fn add(&self, ino: Ino) {
        let mut state = self.state.lock();
        let number = state.came;
        state.came += 1;
        let in_vain = false;
        state.files.insert(ino, Nameless { number, in_vain });
    }

    /// Takes out files that are gone, or have got a name, or will not go before the next mount.
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

    /// Whether a write waits, so that removals should not wait for company.
    pub fn is_awaited(&self) -> bool {
        self.state.lock().waiters > 0
    }

    fn left(&self) -> u64 {
        self.state.lock().left
    }

    /// Begins a wait that takes no longer than `patience`.
    fn begin(&self, patience: Duration) -> Wait {
        Wait {
            until: Instant::now() + patience,
            came: self.state.lock().came,
        }
    }

    /// Waits until more than `left` files have left. False: there is nothing to wait for, or it did not leave in time. `own`:
    /// the file that needs the space.
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
    /// Does what takes space, and does it again after space has come back if there was none. `attempt` changes nothing when it
    /// gives ENOSPC, and `own` is the file that it is for. The caller may wait, and holds no lock that the end of a file takes.
    pub fn with_space<T>(&self, own: Ino, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
        let mut attempt = || match attempt() {
            Err(error) if error.errno() == ENOSPC.errno() => None,
            result => Some(result),
        };
        if let Some(result) = attempt() {
            return result;
        }
        // Perhaps what is needed was freed by a batch that is not durable yet.
        self.commit_now()?;
        let wait = self.leaving.begin(PATIENCE);
        loop {
            // Files may leave all the time, and others take their space.
            let is_last = Instant::now() >= wait.until;
            let left = self.leaving.left();
            let result = {
                // Nor is any of it being discarded.
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
        // One that left between the attempt and the wait counts, too.
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
        // It could not have waited for itself in vain.
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
        // The other one had its time.
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
