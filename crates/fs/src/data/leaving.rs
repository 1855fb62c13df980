//! Files without a name whose space will soon be free.
//!
//! close(2) and unlink(2) return before the daemon learns of them. The kernel sends RELEASE and FORGET later, and the space is
//! free only when the next batch is durable. On a local filesystem the space is free when the calls return. A write that finds
//! no space therefore waits while a file without a name exists, but at most for [`PATIENCE`]: the kernel does not tell whether
//! the file is still open or about to be released. If a write has waited for a file in vain, later writes do not wait for that file. A
//! waiting write takes any space that becomes free meanwhile, not only the space of these files.
//!
//! Every removal of a file adds it here. So the files are in parts by slice, with a lock each, and a removal in one slice writes to no cache
//! line of another one. Only the thread that waits looks at all parts.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use jericho_metadata::errno::ENOSPC;
use jericho_metadata::numbers::slice_of_ino;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::error::Result;
use crate::types::{Ino, SliceId};

/// Longest wait of a write: many times the delay of the kernel on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(5);

/// Interval at which a waiting write checks for space that became free without a commit: reserved space, and blocks that the
/// store does not have.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Number of parts of `Leaving`.
const PARTS: usize = 16;

/// The files of a slice, or of several if there are more slices than parts.
#[derive(Default)]
struct Part {
    /// Regular files without a name whose removal is not durable yet.
    files: HashMap<Ino, Nameless>,
    /// Number of files added so far.
    added: u64,
    /// Number of times that files were removed from `files` or a commit freed blocks.
    freed: u64,
}

/// A file without a name.
struct Nameless {
    /// Number of files that were added to the part before this one.
    added_before: u64,
    /// Whether a write has waited for the file in vain.
    in_vain: bool,
}

/// Has cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
struct Padded<T>(T);

/// How threads wait.
#[derive(Default)]
struct Waiting {
    /// Longest wait, if it is not `PATIENCE`.
    patience: Option<Duration>,
    /// Whether all waits must end, and no new ones may begin.
    closed: bool,
}

/// Limits of a write's wait.
struct Wait {
    until: Instant,
    /// Values of `Part::added` when the wait began. The write also waits for files that are added later, but for less than
    /// its full time, so the end of the time does not mark them as `in_vain`.
    added: [u64; PARTS],
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

impl Part {
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
    parts: [Padded<Mutex<Part>>; PARTS],
    /// Number of waiting writes. Only waits write to it. A thread that changes a part reads it afterwards. A waiting thread counts itself
    /// before it looks at a part, so one of the two sees the other: the lock of the part orders them.
    waiters: Padded<AtomicUsize>,
    /// Locked before a part.
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

impl Leaving {
    fn part(&self, slice: SliceId) -> MutexGuard<'_, Part> {
        self.parts[usize::from(slice) % PARTS].0.lock()
    }

    fn part_of(&self, ino: Ino) -> MutexGuard<'_, Part> {
        self.part(slice_of_ino(ino).unwrap_or(0))
    }

    fn parts(&self) -> impl Iterator<Item = MutexGuard<'_, Part>> {
        self.parts.iter().map(|part| part.0.lock())
    }

    /// Holds the lock of a slice's files until the returned value is dropped.
    #[cfg(test)]
    pub fn hold_all(&self, slice: SliceId) -> impl Sized {
        self.part(slice)
    }

    /// Adds a file that has lost its last name, or that was created without one.
    pub fn add(&self, ino: Ino) {
        let mut part = self.part_of(ino);
        let added_before = part.added;
        part.added += 1;
        let in_vain = false;
        part.files.insert(
            ino,
            Nameless {
                added_before,
                in_vain,
            },
        );
    }

    /// Takes files off the list: those that were removed or got a name again, and those that stay until the next mount.
    pub fn remove(&self, files: &[Ino]) {
        for ino in files {
            let mut part = self.part_of(*ino);
            if part.files.remove(ino).is_some() {
                part.freed += 1;
            }
        }
        if !files.is_empty() {
            self.wake();
        }
    }

    /// Wakes the waiting writes, after blocks became free. `slice`: the slice of these blocks, or any one.
    pub fn freed(&self, slice: SliceId) {
        self.part(slice).freed += 1;
        self.wake();
    }

    /// Wakes the waiting writes, after a part has changed.
    fn wake(&self) {
        if self.waiters() > 0 {
            // A thread that has not seen the change holds the lock until it sleeps.
            drop(self.waiting.lock());
            self.changed.notify_all();
        }
    }

    /// Returns the files that a write to `own` may wait for.
    pub fn awaited(&self, own: Ino) -> Vec<Ino> {
        let mut files = Vec::new();
        for part in self.parts() {
            files.extend(part.awaited(own));
        }
        files
    }

    /// Returns the number of waiting writes. If it is not 0, removals should be committed without delay.
    pub fn waiters(&self) -> usize {
        self.waiters.0.load(Ordering::Acquire)
    }

    fn freed_so_far(&self) -> u64 {
        self.parts().map(|part| part.freed).sum()
    }

    /// Sets the longest wait.
    pub fn set_patience(&self, patience: Duration) {
        self.waiting.lock().patience = Some(patience);
    }

    /// Ends all current and future waits.
    pub fn close(&self) {
        self.waiting.lock().closed = true;
        self.changed.notify_all();
    }

    /// Begins a wait.
    fn begin(&self) -> Wait {
        let patience = self.waiting.lock().patience.unwrap_or(PATIENCE);
        Wait {
            until: Instant::now() + patience,
            added: std::array::from_fn(|part| self.parts[part].0.lock().added),
        }
    }

    /// Waits until space has become free since `freed` was read, or until `grown` returns true. `own` is the file that needs
    /// the space.
    fn wait(&self, own: Ino, freed: u64, wait: &Wait, grown: impl Fn() -> bool) -> End {
        let mut waiting = self.waiting.lock();
        self.waiters.0.fetch_add(1, Ordering::AcqRel);
        let end = loop {
            let awaits =
                !waiting.closed && self.parts().any(|part| part.awaited(own).next().is_some());
            // After the files: a file that has left meanwhile counts here.
            if self.freed_so_far() != freed || grown() {
                break End::Freed;
            }
            if !awaits {
                break End::Nothing;
            }
            let now = Instant::now();
            if now >= wait.until {
                self.mark_in_vain(own, wait);
                break End::Late;
            }
            let poll_at = (now + POLL_INTERVAL).min(wait.until);
            self.changed.wait_until(&mut waiting, poll_at);
        };
        self.waiters.0.fetch_sub(1, Ordering::AcqRel);
        end
    }

    /// Records that a write to `own` has waited for its full time.
    fn mark_in_vain(&self, own: Ino, wait: &Wait) {
        for (mut part, added) in self.parts().zip(wait.added) {
            let files = part.files.iter_mut();
            files
                .filter(|(ino, file)| **ino != own && file.added_before < added)
                .for_each(|(_, file)| file.in_vain = true);
        }
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
    use std::sync::atomic::AtomicU64;

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
    fn a_write_waits_for_files_of_all_slices_but_twice_in_vain_for_none() {
        let leaving = Leaving::default();
        let files = [7, (1 << 40) + 7, (5 << 40) + 9];
        for (count, file) in files.into_iter().enumerate() {
            let freed = leaving.freed_so_far();
            assert_eq!(leaving.awaited(8).len(), count);
            leaving.add(file);
            std::thread::scope(|scope| {
                let waiter = scope.spawn(|| leaving.wait(8, freed, &leaving.long(), never));
                wait_for_waiter(&leaving);
                leaving.remove(&[file]);
                assert_eq!(waiter.join().unwrap(), End::Freed);
            });
            leaving.add(file);
        }
        let freed = leaving.freed_so_far();
        assert_eq!(leaving.wait(8, freed, &leaving.no_time(), never), End::Late);
        assert_eq!(leaving.wait(8, freed, &leaving.long(), never), End::Nothing);
        assert_eq!(leaving.waiters(), 0);
    }

    #[test]
    fn files_of_one_slice_come_and_go_while_the_locks_of_the_others_are_held() {
        let leaving = Leaving::default();
        let mut others: Vec<_> = leaving.parts().collect();
        drop(others.remove(2));
        let own = &leaving;
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                own.add((2 << 40) + 7);
                own.freed(2);
                own.remove(&[(2 << 40) + 7]);
                assert_eq!(own.waiters(), 0);
                sender.send(()).unwrap();
            });
            let done = receiver.recv_timeout(Duration::from_secs(60));
            drop(others);
            done.expect("it waits for a lock of another slice");
        });
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
            while leaving.waiters() < 5 {
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
            leaving.freed(3);
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
