//! A lock that knows how long threads wait for it and hold it: the counterparts of the locks in table 4 of the Tyche paper.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use jericho_storage::LockStat;
use jericho_sys::service;

/// Measures the hold time of one in `SAMPLED` acquisitions, because reading the clock costs as much as a free lock.
const SAMPLED: u64 = 16;

/// What is known of a lock since its process has begun to use it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LockStatus {
    /// How often it was acquired.
    pub acquisitions: u64,
    /// How often a thread had to wait.
    pub waits: u64,
    /// Time that threads have waited, in all.
    pub wait: Duration,
    /// Mean time for which it was held, of a sample.
    pub hold_mean: Duration,
}

impl LockStatus {
    /// Returns the status for an administrator, of a lock with a name.
    pub fn named(self, name: &str) -> LockStat {
        LockStat {
            name: name.to_owned(),
            acquisitions: self.acquisitions,
            waits: self.waits,
            wait_us: self.wait.as_micros() as u64,
            hold_mean_ns: self.hold_mean.as_nanos() as u64,
        }
    }
}

/// A lock with statistics.
#[derive(Debug, Default)]
pub(crate) struct TimedLock<T> {
    inner: Mutex<T>,
    counts: Counts,
}

#[derive(Debug, Default)]
struct Counts {
    acquisitions: AtomicU64,
    waits: AtomicU64,
    wait_ns: AtomicU64,
    samples: AtomicU64,
    hold_ns: AtomicU64,
}

/// The lock is held.
pub(crate) struct TimedGuard<'l, T> {
    // Dropped before the lock is released.
    _sample: Sample<'l>,
    guard: MutexGuard<'l, T>,
}

/// Measures how long the lock is held, if `since` is set.
struct Sample<'l> {
    counts: &'l Counts,
    since: Option<Instant>,
}

impl Drop for Sample<'_> {
    fn drop(&mut self) {
        if let Some(since) = self.since {
            add(&self.counts.samples, 1);
            add(&self.counts.hold_ns, since.elapsed().as_nanos() as u64);
        }
    }
}

impl<T> TimedLock<T> {
    /// Returns a free lock.
    pub fn new(value: T) -> TimedLock<T> {
        TimedLock {
            inner: Mutex::new(value),
            counts: Counts::default(),
        }
    }

    /// Acquires the lock. Ends the process if a thread has panicked with it: what it protects may be half changed.
    pub fn lock(&self) -> TimedGuard<'_, T> {
        self.try_lock().unwrap_or_else(|| {
            let start = Instant::now();
            let guard = self.inner.lock().unwrap_or_else(poisoned);
            self.waited(start);
            self.acquired(guard)
        })
    }

    /// Acquires the lock if no other thread has it.
    pub fn try_lock(&self) -> Option<TimedGuard<'_, T>> {
        match self.inner.try_lock() {
            Ok(guard) => Some(self.acquired(guard)),
            Err(TryLockError::Poisoned(error)) => Some(self.acquired(poisoned(error))),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Acquires the lock when `ready` holds. A thread that makes it hold notifies `changed`. All the time until then counts as waiting.
    pub fn lock_when(
        &self,
        changed: &Condvar,
        mut ready: impl FnMut(&T) -> bool,
    ) -> TimedGuard<'_, T> {
        if let Some(guard) = self.try_lock()
            && ready(&guard)
        {
            return guard;
        }
        let start = Instant::now();
        let guard = self.inner.lock().unwrap_or_else(poisoned);
        let waits = |value: &mut T| !ready(value);
        let guard = changed.wait_while(guard, waits).unwrap_or_else(poisoned);
        self.waited(start);
        self.acquired(guard)
    }

    /// Counts a wait of the holder.
    fn waited(&self, since: Instant) {
        add(&self.counts.waits, 1);
        add(&self.counts.wait_ns, since.elapsed().as_nanos() as u64);
    }

    fn acquired<'l>(&'l self, guard: MutexGuard<'l, T>) -> TimedGuard<'l, T> {
        let number = self.counts.acquisitions.load(Ordering::Relaxed);
        add(&self.counts.acquisitions, 1);
        TimedGuard {
            _sample: Sample {
                counts: &self.counts,
                since: number.is_multiple_of(SAMPLED).then(Instant::now),
            },
            guard,
        }
    }

    /// Returns the statistics.
    pub fn status(&self) -> LockStatus {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let counts = &self.counts;
        LockStatus {
            acquisitions: load(&counts.acquisitions),
            waits: load(&counts.waits),
            wait: Duration::from_nanos(load(&counts.wait_ns)),
            hold_mean: Duration::from_nanos(load(&counts.hold_ns) / load(&counts.samples).max(1)),
        }
    }
}

impl<'l, T> TimedGuard<'l, T> {
    /// Releases the lock while it waits for a condition, and acquires it again.
    pub fn wait(self, changed: &Condvar) -> TimedGuard<'l, T> {
        let TimedGuard { _sample, guard } = self;
        let counts = _sample.counts;
        drop(_sample);
        TimedGuard {
            guard: changed.wait(guard).unwrap_or_else(poisoned),
            _sample: Sample {
                counts,
                since: None,
            },
        }
    }
}

impl<T> Deref for TimedGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for TimedGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

/// Adds to a count that only the holder of the lock changes.
fn add(count: &AtomicU64, more: u64) {
    count.store(count.load(Ordering::Relaxed) + more, Ordering::Relaxed);
}

/// Acquires a lock whose holders leave what it protects whole at any moment, also if one has panicked.
pub(crate) fn unpoisoned<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn poisoned<G>(_: PoisonError<G>) -> G {
    service::run(|| panic!("another thread panicked with a lock of the network"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_counted_with_their_time() {
        let lock = TimedLock::new(0_u64);
        let time = Duration::from_millis(50);
        std::thread::scope(|scope| {
            let held = lock.lock();
            scope.spawn(|| *lock.lock() += 1);
            std::thread::sleep(time);
            drop(held);
        });
        let status = lock.status();
        assert_eq!((status.acquisitions, *lock.lock()), (2, 1));
        // The first acquisition is in the sample.
        assert!(status.hold_mean >= time);
        assert!(status.waits <= 1);
        assert!(status.waits == 0 || status.wait > Duration::ZERO);
    }
}
