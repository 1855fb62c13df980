//! Flushes requested by many threads. A failure is never forgotten.
//!
//! The kernel reports a failed write-back once per open file and then considers the pages clean: a second fdatasync succeeds
//! although the data is gone. So the `Flusher` keeps the first failure and returns it to every later flush. Only opening the
//! device again clears it.
//!
//! # Groups
//! One sync runs at a time. If two ran at once and data was lost, the kernel would report the failure to only one of them. A
//! thread that comes while no sync runs begins one. The first thread that comes while a sync runs forms a *group*, and the
//! others join it. When the running sync has ended, the first thread of the group closes the group and runs the next sync, for
//! all of them. So a sync covers each thread that joined before it began, and a thread sleeps once: the first one of a group
//! until its turn, the others until the outcome.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use jericho_sys::errno;

use crate::Cause;

/// The flush state of one device. Has cache lines of its own, and so has the device that holds it: flushes of two devices would share a
/// line if the allocator of memory put the devices side by side.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Flusher {
    queue: Mutex<FlushQueue>,
    /// The first failure.
    failed: OnceLock<Cause>,
}

#[derive(Debug, Default)]
struct FlushQueue {
    /// The group whose first thread runs a sync, or has its turn.
    running: Option<Arc<Group>>,
    /// The threads that the next sync covers.
    gathering: Option<Arc<Group>>,
}

/// Threads that share a sync.
#[derive(Debug, Default)]
struct Group {
    /// Is set when the first thread of the group may begin the sync.
    turn: OnceLock<()>,
    /// Is set when the sync has ended.
    outcome: OnceLock<Result<(), Cause>>,
}

impl Flusher {
    /// Makes durable what was written before the call, with `sync` or with another thread's sync that begins after the call.
    pub(crate) fn flush(&self, sync: impl Fn() -> io::Result<()>) -> Result<(), Cause> {
        self.check()?;
        let mut queue = self.lock();
        if let Some(group) = &queue.gathering {
            let group = Arc::clone(group);
            drop(queue);
            return *group.outcome.wait();
        }
        let group = Arc::new(Group::default());
        let must_wait = queue.running.is_some();
        if must_wait {
            queue.gathering = Some(Arc::clone(&group));
        } else {
            queue.running = Some(Arc::clone(&group));
        }
        drop(queue);
        if must_wait {
            group.turn.wait();
            // Threads that come from here on form the next group: they may have written after the sync has begun.
            self.lock().gathering = None;
        }
        let mut lead = Lead {
            flusher: self,
            group,
            outcome: Err(Cause::Errno(errno::EIO)),
        };
        lead.outcome = self.check().and_then(|()| uninterrupted(sync));
        lead.outcome
    }

    /// Fails with the first failure, if there was one.
    pub(crate) fn check(&self) -> Result<(), Cause> {
        self.failed.get().map_or(Ok(()), |cause| Err(*cause))
    }

    /// Records that written data may not be durable. Returns the first failure.
    pub(crate) fn fail(&self, cause: Cause) -> Cause {
        *self.failed.get_or_init(|| cause)
    }

    /// Ignores poisoning: no user of this lock can leave the queue in a bad state.
    fn lock(&self) -> MutexGuard<'_, FlushQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread that runs a sync for others. Its end wakes them, even if the thread panics.
struct Lead<'a> {
    flusher: &'a Flusher,
    group: Arc<Group>,
    outcome: Result<(), Cause>,
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        if let Err(cause) = self.outcome {
            self.outcome = Err(self.flusher.fail(cause));
        }
        let next = {
            let mut queue = self.flusher.lock();
            queue.running = queue.gathering.clone();
            queue.gathering.clone()
        };
        // First, so that the device is not idle while the threads of this group wake.
        if let Some(next) = next {
            let _ = next.turn.set(());
        }
        let _ = self.group.outcome.set(self.outcome);
    }
}

/// Runs a sync until no signal interrupts it.
fn uninterrupted(sync: impl Fn() -> io::Result<()>) -> Result<(), Cause> {
    loop {
        match sync() {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Cause::of(&error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    /// Waits for a condition that other threads bring about.
    fn until(what: &str, mut is_true: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_true() {
            assert!(Instant::now() < deadline, "not within a minute: {what}");
            std::thread::yield_now();
        }
    }

    /// Returns the number of threads that the running sync covers, and of those that wait for the next one.
    fn members(flusher: &Flusher) -> (usize, usize) {
        let queue = flusher.lock();
        // One reference is the queue's.
        let count = |group: &Option<Arc<Group>>| {
            group
                .as_ref()
                .map_or(0, |group| Arc::strong_count(group) - 1)
        };
        (count(&queue.running), count(&queue.gathering))
    }

    #[test]
    fn a_failed_flush_fails_every_later_one() {
        let flusher = Flusher::default();
        flusher.flush(|| Ok(())).unwrap();
        let failed = flusher.flush(|| Err(io::Error::from_raw_os_error(errno::ENOSPC)));
        assert_eq!(failed, Err(Cause::Errno(errno::ENOSPC)));
        assert_eq!(flusher.flush(|| Ok(())), Err(Cause::Errno(errno::ENOSPC)));
        assert_eq!(
            flusher.fail(Cause::Errno(errno::EIO)),
            Cause::Errno(errno::ENOSPC),
            "the first failure is kept"
        );
    }

    #[test]
    fn a_failed_durable_write_fails_every_later_flush() {
        let flusher = Flusher::default();
        flusher.check().unwrap();
        flusher.fail(Cause::Errno(errno::EIO));
        assert_eq!(flusher.check(), Err(Cause::Errno(errno::EIO)));
        assert_eq!(flusher.flush(|| Ok(())), Err(Cause::Errno(errno::EIO)));
    }

    #[test]
    fn an_interrupted_flush_is_repeated() {
        let flusher = Flusher::default();
        let calls = AtomicU64::new(0);
        flusher
            .flush(|| match calls.fetch_add(1, Ordering::Relaxed) {
                0 => Err(io::Error::from_raw_os_error(errno::EINTR)),
                _ => Ok(()),
            })
            .unwrap();
        assert_eq!(calls.into_inner(), 2);
    }

    /// Lets eight threads flush while a sync runs, which then ends with `first`. Returns the outcomes of the eight, and the number
    /// of their syncs.
    fn flush_during(
        first: impl FnOnce() -> io::Result<()> + Send,
    ) -> (Vec<Result<(), Cause>>, u64) {
        let flusher = &Flusher::default();
        let syncs = &AtomicU64::new(0);
        let (began, has_began) = mpsc::channel();
        let (finish, may_finish) = mpsc::channel::<()>();
        let sync = Mutex::new(Some((began, may_finish, first)));
        let outcomes = std::thread::scope(|scope| {
            scope.spawn(|| {
                let sync = || {
                    let (began, may_finish, first) = sync.lock().unwrap().take().unwrap();
                    began.send(()).unwrap();
                    may_finish.recv().unwrap();
                    first()
                };
                // A panic of the sync is a part of a test.
                let sync = std::panic::AssertUnwindSafe(|| flusher.flush(sync));
                let _ = std::panic::catch_unwind(sync);
            });
            has_began.recv().unwrap();
            let flush = || {
                flusher.flush(|| {
                    syncs.fetch_add(1, Ordering::Relaxed);
                    Ok(())
                })
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(flush)).collect();
            until("eight threads wait", || members(flusher) == (1, 8));
            assert_eq!(syncs.load(Ordering::Relaxed), 0);
            finish.send(()).unwrap();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        assert_eq!(members(flusher), (0, 0));
        (outcomes, syncs.load(Ordering::Relaxed))
    }

    #[test]
    fn flushes_that_wait_for_a_running_one_share_a_new_one() {
        // The first sync began before the others asked, so it does not cover them. The second covers them all.
        assert_eq!(flush_during(|| Ok(())), (vec![Ok(()); 8], 1));
    }

    #[test]
    fn flushes_that_wait_for_a_failing_one_fail_without_a_sync() {
        let failed = flush_during(|| Err(io::Error::from_raw_os_error(errno::ENOSPC)));
        assert_eq!(failed, (vec![Err(Cause::Errno(errno::ENOSPC)); 8], 0));
    }

    #[test]
    fn flushes_that_wait_for_one_that_panics_fail() {
        let failed = flush_during(|| panic!("a sync that panics, in a test"));
        assert_eq!(failed, (vec![Err(Cause::Errno(errno::EIO)); 8], 0));
    }

    /// Eight threads write and flush in a loop, on a device whose sync lasts longer than a write: each sync ends when all threads
    /// are in it or wait for the next one.
    #[test]
    fn eight_threads_need_four_syncs_for_ten_flushes_at_most() {
        const THREADS: usize = 8;
        const ROUNDS: usize = 200;
        let flusher = &Flusher::default();
        let (written, durable) = (&AtomicUsize::new(0), &AtomicUsize::new(0));
        let (ended, syncs) = (&AtomicUsize::new(0), &AtomicUsize::new(0));
        let sync = || {
            let covered = written.load(Ordering::SeqCst);
            until("all threads flush", || {
                let (running, gathered) = members(flusher);
                running + gathered + ended.load(Ordering::SeqCst) == THREADS
            });
            durable.fetch_max(covered, Ordering::SeqCst);
            syncs.fetch_add(1, Ordering::SeqCst);
            Ok(())
        };
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    for _ in 0..ROUNDS {
                        let mine = written.fetch_add(1, Ordering::SeqCst) + 1;
                        flusher.flush(sync).unwrap();
                        assert!(durable.load(Ordering::SeqCst) >= mine);
                    }
                    ended.fetch_add(1, Ordering::SeqCst);
                });
            }
        });
        let syncs = syncs.load(Ordering::SeqCst);
        assert!(syncs * 10 <= THREADS * ROUNDS * 4, "{syncs} syncs");
    }
}
