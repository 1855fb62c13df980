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

#[derive(Default)]
struct State {
    /// Regular files without a name whose removal is not durable yet.
    files: HashMap<Ino, Nameless>,
    /// Number of files that have come, and that have left, so far.
    came: u64,
    left: u64,
    waiters: usize,
    /// Longest wait, if not `PATIENCE`.
    patience: Option<Duration>,
    /// Nobody waits any more.
    closed: bool,
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
    /// Value of `State::came` when the wait began. The write waits less than its full time for files that came later.
    came: u64,
}

impl State {
    fn awaits(&self, own: Ino) -> bool {
        let mut files = self.files.iter();
        !self.closed && files.any(|(ino, file)| *ino != own && !file.in_vain)
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

    /// Returns how many writes wait. If any does, removals should be committed without delay.
    pub fn waiters(&self) -> usize {
        self.state.lock().waiters
    }

    fn left(&self) -> u64 {
        self.state.lock().left
    }

    /// Sets the longest wait.
    pub fn set_patience(&self, patience: Duration) {
        self.state.lock().patience = Some(patience);
    }

    /// Ends all waits, and those that come.
    pub fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }

    /// Begins a wait.
    fn begin(&self) -> Wait {
        let state = self.state.lock();
        Wait {
            until: Instant::now() + state.patience.unwrap_or(PATIENCE),
            came: state.came,
        }
    }

    /// Waits until more than `left` files have left. Returns false when there is nothing to wait for, or when no file left in
    /// time. `own` is the file that needs the space.
    fn wait(&self, own: Ino, left: u64, Wait { until, came }: &Wait) -> bool {
        let mut state = self.state.lock();
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

    /// Runs `attempt`, which takes space. If it fails because the volume is full, makes what was removed durable (`commit`) and
    /// waits for files that leave, and runs `attempt` again, each time with a guard that `recall` returns. `own` is the file
    /// that needs the space.
    fn retry<T, G>(
        &self,
        own: Ino,
        commit: impl FnOnce() -> Result<()>,
        recall: impl Fn() -> G,
        mut attempt: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        let mut attempt = || match attempt() {
            Err(error) if error.is_full_volume() => None,
            result => Some(result),
        };
        if let Some(result) = attempt() {
            return result;
        }
        // A batch that is not durable yet may have freed the space. If the metadata region is too full for that batch, no
        // removal becomes durable, and no file is worth a wait; a discard may still hold back what is free.
        let may_wait = match commit() {
            Ok(()) => true,
            Err(error) if error.is_full_volume() => false,
            Err(error) => return Err(error),
        };
        let wait = self.begin();
        loop {
            // Files may leave continually while other writers take their space.
            let is_last = !may_wait || Instant::now() >= wait.until;
            let left = self.left();
            let result = {
                let _all = recall();
                attempt()
            };
            if let Some(result) = result {
                return result;
            }
            if is_last || !self.wait(own, left, &wait) {
                return Err(ENOSPC);
            }
        }
    }
}

impl Core {
    /// Runs `attempt`, which takes space; if it fails because the volume is full, waits for space and runs it again. `attempt`
    /// must change nothing when it fails so. `own` is the file that needs the space. The caller may block for seconds: it
    /// holds no lock, and its thread is none that serves requests.
    pub fn with_space<T>(&self, own: Ino, attempt: impl FnMut() -> Result<T>) -> Result<T> {
        // Until no free block is being discarded.
        let recall = || self.allocator.recall();
        self.leaving
            .retry(own, || self.commit_now(), recall, attempt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Leaving {
        fn long(&self) -> Wait {
            self.set_patience(Duration::from_secs(600));
            self.begin()
        }

        fn no_time(&self) -> Wait {
            self.set_patience(Duration::ZERO);
            self.begin()
        }
    }

    fn wait_for_waiter(leaving: &Leaving) {
        while leaving.waiters() == 0 {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_write_waits_for_a_file_that_leaves() {
        let leaving = Leaving::default();
        leaving.add(7);
        let left = leaving.left();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| leaving.wait(8, left, &leaving.long()));
            wait_for_waiter(&leaving);
            leaving.remove(&[7]);
            assert!(waiter.join().unwrap());
        });
        // A file that left between the attempt and the wait counts too.
        assert!(leaving.wait(8, left, &leaving.long()));
        assert!(!leaving.wait(8, leaving.left(), &leaving.long()));
    }

    #[test]
    fn nobody_waits_for_itself_nor_twice_in_vain() {
        let leaving = Leaving::default();
        leaving.add(7);
        assert!(!leaving.wait(7, 0, &leaving.long()));
        assert!(!leaving.wait(8, 0, &leaving.no_time()));
        assert!(!leaving.wait(8, 0, &leaving.long()));
        // The file could not have waited for itself in vain.
        leaving.add(8);
        assert!(!leaving.wait(8, 0, &leaving.long()));
        leaving.remove(&[7]);
        assert!(!leaving.wait(7, leaving.left(), &leaving.no_time()));
    }

    #[test]
    fn a_file_that_came_in_the_middle_of_a_vain_wait_is_waited_for_by_the_next() {
        let leaving = Leaving::default();
        leaving.add(7);
        let over = leaving.no_time();
        leaving.add(8);
        assert!(!leaving.wait(9, 0, &over));
        std::thread::scope(|scope| {
            let next = scope.spawn(|| leaving.wait(9, 0, &leaving.long()));
            let until = Instant::now() + Duration::from_secs(60);
            while leaving.waiters() == 0 {
                assert!(!next.is_finished(), "it does not wait");
                assert!(Instant::now() < until);
                std::thread::yield_now();
            }
            leaving.remove(&[8]);
            assert!(next.join().unwrap());
        });
        // The other write has used up its time.
        assert!(!leaving.wait(9, leaving.left(), &leaving.long()));
    }

    /// Runs an attempt that succeeds the `wanted`th time. Returns how many there were, and whether the last one succeeded.
    fn attempts(leaving: &Leaving, wanted: u32, commit: Result<()>) -> (u32, bool) {
        let mut count = 0;
        let attempt = || {
            count += 1;
            (count == wanted).then_some(()).ok_or(ENOSPC)
        };
        let result = leaving.retry(8, || commit, || (), attempt);
        (count, result.is_ok())
    }

    #[test]
    fn who_cannot_make_removals_durable_tries_once_more_and_does_not_wait() {
        let leaving = Leaving::default();
        leaving.add(7);
        leaving.set_patience(Duration::from_secs(600));
        // Free blocks may be held back by a discard.
        assert_eq!(attempts(&leaving, 2, Err(ENOSPC)), (2, true));
        assert_eq!(attempts(&leaving, 3, Err(ENOSPC)), (2, false));
        let no_more = super::super::errno::ESHUTDOWN;
        assert_eq!(attempts(&leaving, 2, Err(no_more)), (1, false));
        assert_eq!(attempts(&leaving, 2, Ok(())), (2, true));
    }

    #[test]
    fn the_end_of_the_mount_ends_all_waits() {
        let leaving = Leaving::default();
        leaving.add(7);
        leaving.set_patience(Duration::from_secs(600));
        std::thread::scope(|scope| {
            let waiters = [(); 5].map(|()| scope.spawn(|| attempts(&leaving, 3, Ok(()))));
            while leaving.state.lock().waiters < 5 {
                std::thread::yield_now();
            }
            leaving.close();
            for waiter in waiters {
                assert_eq!(waiter.join().unwrap(), (2, false));
            }
        });
        assert_eq!(attempts(&leaving, 3, Ok(())), (2, false));
    }
}
