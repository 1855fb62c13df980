//! Files without a name whose space will soon be free.
//!
//! close(2) and unlink(2) return before the daemon learns of them. The kernel sends RELEASE and FORGET later, and the space is
//! free only when the next batch is durable. On a local filesystem the space is free when the calls return. A write that finds
//! no space therefore waits while a file without a name exists, but at most for [`PATIENCE`]: the kernel does not tell whether
//! the file is still open or about to be released. If a write has waited for a file in vain, later writes do not wait for that file. A
//! waiting write takes any space that becomes free meanwhile, not only the space of these files.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use jericho_metadata::errno::ENOSPC;
use parking_lot::{Condvar, Mutex};

use crate::error::Result;
use crate::types::Ino;

/// Longest wait of a write: many times the delay of the kernel on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(5);

/// Interval at which a waiting write checks for space that became free without a commit: reserved space, and blocks that the
/// store does not have.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Default)]
struct LeavingState {
    /// Regular files without a name whose removal is not durable yet.
    files: HashMap<Ino, Nameless>,
    /// Number of files added so far.
    added: u64,
    /// Number of times that files were removed from `files` or a commit freed blocks.
    freed: u64,
    waiters: usize,
    /// Longest wait, if it is not `PATIENCE`.
    patience: Option<Duration>,
    /// Whether all waits must end, and no new ones may begin.
    closed: bool,
}

/// A file without a name.
struct Nameless {
    /// Number of files added before this one.
    added_before: u64,
    /// Whether a write has waited for the file in vain.
    in_vain: bool,
}

/// Limits of a write's wait.
struct Wait {
    until: Instant,
    /// Value of `LeavingState::added` when the wait began. The write also waits for files that are added later, but for less than
    /// its full time, so the end of the time does not mark them as `in_vain`.
    added: u64,
}

/// Reason for the end of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Space became free.
    Freed,
    /// The time is up.
    Late,
    /// There is no file that the write may wait for.
    Nothing,
}

impl LeavingState {
    fn awaits(&self, own: Ino) -> bool {
        !self.closed && self.awaited(own).next().is_some()
    }

    fn awaited(&self, own: Ino) -> impl Iterator<Item = Ino> {
        let files = self.files.iter();
        files
            .filter(move |(ino, file)| **ino != own && !file.in_vain)
            .map(|(ino, _)| *ino)
    }
}

/// The files without a name.
#[derive(Default)]
pub struct Leaving {
    state: Mutex<LeavingState>,
    changed: Condvar,
}

impl Leaving {
    /// Adds a file that has lost its last name, or that was created without one.
    pub fn add(&self, ino: Ino) {
        let mut state = self.state.lock();
        let added_before = state.added;
        state.added += 1;
        let in_vain = false;
        state.files.insert(
            ino,
            Nameless {
                added_before,
                in_vain,
            },
        );
    }

    /// Takes files off the list: those that were removed or got a name again, and those that stay until the next mount.
    pub fn remove(&self, files: &[Ino]) {
        if files.is_empty() {
            return;
        }
        let mut state = self.state.lock();
        for ino in files {
            if state.files.remove(ino).is_some() {
                state.freed += 1;
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Wakes the waiting writes, after blocks became free.
    pub fn freed(&self) {
        self.state.lock().freed += 1;
        self.changed.notify_all();
    }

    /// Returns the files that a write to `own` may wait for.
    pub fn awaited(&self, own: Ino) -> Vec<Ino> {
        self.state.lock().awaited(own).collect()
    }

    /// Returns the number of waiting writes. If it is not 0, removals should be committed without delay.
    pub fn waiters(&self) -> usize {
        self.state.lock().waiters
    }

    fn freed_so_far(&self) -> u64 {
        self.state.lock().freed
    }

    /// Sets the longest wait.
    pub fn set_patience(&self, patience: Duration) {
        self.state.lock().patience = Some(patience);
    }

    /// Ends all current and future waits.
    pub fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }

    /// Begins a wait.
    fn begin(&self) -> Wait {
        let state = self.state.lock();
        Wait {
            until: Instant::now() + state.patience.unwrap_or(PATIENCE),
            added: state.added,
        }
    }

    /// Waits until space has become free since `freed` was read, or until `grown` returns true. `own` is the file that needs
    /// the space.
    fn wait(
        &self,
        own: Ino,
        freed: u64,
        Wait { until, added }: &Wait,
        grown: impl Fn() -> bool,
    ) -> End {
        let mut state = self.state.lock();
        state.waiters += 1;
        let end = loop {
            if state.freed != freed || grown() {
                break End::Freed;
            }
            if !state.awaits(own) {
                break End::Nothing;
            }
            let now = Instant::now();
            if now >= *until {
                let files = state.files.iter_mut();
                files
                    .filter(|(ino, file)| **ino != own && file.added_before < *added)
                    .for_each(|(_, file)| file.in_vain = true);
                break End::Late;
            }
            let poll_at = (now + POLL_INTERVAL).min(*until);
            self.changed.wait_until(&mut state, poll_at);
        };
        state.waiters -= 1;
        end
    }

    /// Runs `attempt`, which takes space. If it fails because the volume is full, makes removals durable (`commit`) and runs
    /// `attempt` again: once at first, each time space has become free, and once more when the time is up. Holds a guard returned
    /// by `recall` during each of these attempts. `available` returns the number of free blocks. Does not wait if `may_wait`
    /// returns false. `own` is the file that needs the space.
    pub fn retry<T, G>(
        &self,
        own: Ino,
        commit: impl FnOnce() -> Result<()>,
        recall: impl Fn() -> G,
        available: impl Fn() -> u64,
        may_wait: impl Fn() -> bool,
        mut attempt: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        let mut attempt = || match attempt() {
            Err(error) if error.is_full_volume() => None,
            result => Some(result),
        };
        if let Some(result) = attempt() {
            return result;
        }
        // A batch that is not durable yet may free the space. If the metadata region is too full for that batch, no
        // removal becomes durable, so waiting for files is useless. One more attempt follows, because a discard may hold free
        // blocks.
        let mut is_last = match commit() {
            Ok(()) => false,
            Err(error) if error.is_full_volume() => true,
            Err(error) => return Err(error),
        };
        let wait = self.begin();
        loop {
            let freed = self.freed_so_far();
            let too_few = {
                let _all = recall();
                if let Some(result) = attempt() {
                    return result;
                }
                // Nothing is lent while the guard exists.
                available()
            };
            if is_last || !may_wait() {
                return Err(ENOSPC);
            }
            is_last = match self.wait(own, freed, &wait, || available() > too_few) {
                // The time limit holds for these rounds too: otherwise the loop would not end while files leave continually and
                // other writers take their space.
                End::Freed => Instant::now() >= wait.until,
                End::Late => true,
                End::Nothing => return Err(ENOSPC),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

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

    fn never() -> bool {
        false
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
        let freed = leaving.freed_so_far();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| leaving.wait(8, freed, &leaving.long(), never));
            wait_for_waiter(&leaving);
            leaving.remove(&[7]);
            assert_eq!(waiter.join().unwrap(), End::Freed);
        });
        // A file that left between the attempt and the wait counts, too.
        assert_eq!(leaving.wait(8, freed, &leaving.long(), never), End::Freed);
        assert_eq!(
            leaving.wait(8, leaving.freed_so_far(), &leaving.long(), never),
            End::Nothing
        );
    }

    #[test]
    fn a_write_waits_neither_for_its_own_file_nor_twice_in_vain_for_another() {
        let leaving = Leaving::default();
        leaving.add(7);
        assert_eq!(leaving.wait(7, 0, &leaving.long(), never), End::Nothing);
        assert_eq!(leaving.wait(8, 0, &leaving.no_time(), never), End::Late);
        assert_eq!(leaving.wait(8, 0, &leaving.long(), never), End::Nothing);
        // The write could not wait for its own file, so its file has not been waited for in vain.
        leaving.add(8);
        assert_eq!(leaving.wait(8, 0, &leaving.long(), never), End::Nothing);
        leaving.remove(&[7]);
        assert_eq!(
            leaving.wait(7, leaving.freed_so_far(), &leaving.no_time(), never),
            End::Late
        );
    }

    #[test]
    fn a_file_added_during_a_vain_wait_is_waited_for_by_the_next_write() {
        let leaving = Leaving::default();
        leaving.add(7);
        let over = leaving.no_time();
        leaving.add(8);
        assert_eq!(leaving.wait(9, 0, &over, never), End::Late);
        std::thread::scope(|scope| {
            let next = scope.spawn(|| leaving.wait(9, 0, &leaving.long(), never));
            let until = Instant::now() + Duration::from_secs(60);
            while leaving.waiters() == 0 {
                assert!(!next.is_finished(), "the second write did not wait");
                assert!(Instant::now() < until);
                std::thread::yield_now();
            }
            leaving.remove(&[8]);
            assert_eq!(next.join().unwrap(), End::Freed);
        });
        // Only file 7 is left, and the first write has waited for it in vain.
        assert_eq!(
            leaving.wait(9, leaving.freed_so_far(), &leaving.long(), never),
            End::Nothing
        );
    }

    /// Runs an attempt that succeeds at call number `succeeds_at`. Returns the number of calls, and whether the last one
    /// succeeded.
    fn attempts(leaving: &Leaving, succeeds_at: u32, commit: Result<()>) -> (u32, bool) {
        let mut count = 0;
        let attempt = || {
            count += 1;
            (count == succeeds_at).then_some(()).ok_or(ENOSPC)
        };
        let result = leaving.retry(8, || commit, || (), || 0, || true, attempt);
        (count, result.is_ok())
    }

    #[test]
    fn a_write_that_cannot_make_removals_durable_tries_once_more_and_does_not_wait() {
        let leaving = Leaving::default();
        leaving.add(7);
        leaving.set_patience(Duration::from_secs(600));
        // A discard may hold free blocks, so one more attempt follows.
        assert_eq!(attempts(&leaving, 2, Err(ENOSPC)), (2, true));
        assert_eq!(attempts(&leaving, 3, Err(ENOSPC)), (2, false));
        let no_more = jericho_metadata::errno::ESHUTDOWN;
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

    #[test]
    fn a_write_that_has_waited_in_vain_tries_once_more() {
        let leaving = Leaving::default();
        leaving.add(7);
        leaving.set_patience(Duration::ZERO);
        assert_eq!(attempts(&leaving, 3, Ok(())), (3, true));
        // The only file has been waited for in vain.
        assert_eq!(attempts(&leaving, 3, Ok(())), (2, false));
    }

    #[test]
    fn a_waiting_write_takes_space_that_another_file_released() {
        let leaving = Leaving::default();
        leaving.add(7);
        leaving.set_patience(Duration::from_secs(600));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| attempts(&leaving, 3, Ok(())));
            wait_for_waiter(&leaving);
            leaving.freed();
            assert_eq!(waiter.join().unwrap(), (3, true));
        });
        // Space that becomes free without a commit.
        let blocks = AtomicU64::new(0);
        let attempt = || match blocks.load(Ordering::Relaxed) {
            0 => Err(ENOSPC),
            _ => Ok(()),
        };
        let available = || blocks.load(Ordering::Relaxed);
        std::thread::scope(|scope| {
            let waiter =
                scope.spawn(|| leaving.retry(8, || Ok(()), || (), available, || true, attempt));
            wait_for_waiter(&leaving);
            blocks.store(1, Ordering::Relaxed);
            waiter.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_write_that_may_not_wait_tries_once_more_after_the_commit() {
        let leaving = Leaving::default();
        leaving.add(7);
        leaving.set_patience(Duration::from_secs(600));
        for (succeeds_at, is_ok) in [(2, true), (3, false)] {
            let mut count = 0;
            let attempt = || {
                count += 1;
                (count == succeeds_at).then_some(()).ok_or(ENOSPC)
            };
            let result = leaving.retry(8, || Ok(()), || (), || 0, || false, attempt);
            assert_eq!((count, result.is_ok()), (2, is_ok));
        }
    }
}
