//! Threads that measure: each is pinned, and checks at its start and at its end that it runs where it should.
//!
//! The threads of one measurement begin together. They wait at a gate until all are pinned. If one cannot be, none begins. A load runs from
//! before the measurement begins until after it ends.

use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::thread::{self, Builder, ScopedJoinHandle};

use jericho_sys::affinity;
use jericho_sys::rseq::current_cpu;

/// Why something could not be measured, for users.
pub(crate) type Reason = String;

/// States of the gate.
const CLOSED: u8 = 0;
const OPEN: u8 = 1;
const GIVEN_UP: u8 = 2;

/// Calls `work` in a thread that runs only on the given CPUs.
pub(crate) fn on_cpus<T: Send>(cpus: &[u32], work: impl Fn() -> T + Sync) -> Result<T, Reason> {
    let mut results = run(&[cpus], |_| work())?;
    results.pop().ok_or_else(panicked)
}

/// Calls `work` in one thread on each of the CPUs, at the same time, with the index of the CPU. Returns the results in the same order.
pub(crate) fn on_each_cpu<T: Send>(
    cpus: &[u32],
    work: impl Fn(usize) -> T + Sync,
) -> Result<Vec<T>, Reason> {
    let each: Vec<&[u32]> = cpus.chunks(1).collect();
    run(&each, work)
}

/// Calls `prepare` and then `work` in one thread on each of the CPUs, with the index of the CPU. No `work` begins before each `prepare` has ended.
/// A thread that waits for others, to prepare or to work, calls `go_on` meanwhile. So what `go_on` does goes on in all threads during each `work`.
pub(crate) fn on_each_cpu_together<T: Send>(
    cpus: &[u32],
    prepare: impl Fn(usize) + Sync,
    work: impl Fn(usize) -> T + Sync,
    go_on: impl Fn(usize) + Sync,
) -> Result<Vec<T>, Reason> {
    let (prepared, done) = (Point::new(cpus.len()), Point::new(cpus.len()));
    on_each_cpu(cpus, |index| {
        let (is_prepared, is_done) = (prepared.token(), done.token());
        prepare(index);
        drop(is_prepared);
        while !prepared.is_reached() {
            go_on(index);
        }
        let result = work(index);
        drop(is_done);
        while !done.is_reached() {
            go_on(index);
        }
        result
    })
}

/// Calls `work` on `cpu`, while a thread on each of the CPUs `load` calls `go_on`, again and again. `work` begins when each of these threads has ended
/// `prepare`. Their functions get the index of the CPU in `load`.
pub(crate) fn on_cpu_beside<T: Send>(
    cpu: u32,
    load: &[u32],
    work: impl Fn() -> T + Sync,
    prepare: impl Fn(usize) + Sync,
    go_on: impl Fn(usize) + Sync,
) -> Result<T, Reason> {
    let cpus: Vec<u32> = [cpu].into_iter().chain(load.iter().copied()).collect();
    let (prepared, over) = (Point::new(load.len()), Point::new(1));
    let results = on_each_cpu(&cpus, |index| {
        let Some(index) = index.checked_sub(1) else {
            let _is_over = over.token();
            while !prepared.is_reached() {
                thread::yield_now();
            }
            return Some(work());
        };
        let is_prepared = prepared.token();
        prepare(index);
        drop(is_prepared);
        while !over.is_reached() {
            go_on(index);
        }
        None
    })?;
    results.into_iter().flatten().next().ok_or_else(panicked)
}

/// A point that each of some threads passes once.
struct Point {
    passed: AtomicUsize,
    threads: usize,
}

/// The thread that drops it has passed the point. A thread that panics drops it, too, so no other thread waits for ever.
struct Token<'a>(&'a Point);

impl Point {
    fn new(threads: usize) -> Point {
        Point {
            passed: AtomicUsize::new(0),
            threads,
        }
    }

    fn token(&self) -> Token<'_> {
        Token(self)
    }

    /// Returns whether all threads have passed.
    fn is_reached(&self) -> bool {
        self.passed.load(Ordering::Acquire) >= self.threads
    }
}

impl Drop for Token<'_> {
    fn drop(&mut self) {
        self.0.passed.fetch_add(1, Ordering::Release);
    }
}

/// Lets the calling thread run on the given CPUs only.
pub(crate) fn pin(cpus: &[u32]) -> Result<(), Reason> {
    let set = affinity::set(None, cpus);
    set.map_err(|error| format!("cannot run a thread on {}: {error}", name(cpus)))?;
    check(cpus)
}

/// Fails if the calling thread runs on another CPU than these.
pub(crate) fn check(cpus: &[u32]) -> Result<(), Reason> {
    let cpu = current_cpu();
    match cpus.contains(&cpu) {
        true => Ok(()),
        false => Err(format!(
            "a thread that was pinned to {} ran on CPU {cpu}; does another program change its affinity?",
            name(cpus)
        )),
    }
}

fn name(cpus: &[u32]) -> String {
    match cpus {
        [cpu] => format!("CPU {cpu}"),
        _ => format!("CPUs {cpus:?}"),
    }
}

fn panicked() -> Reason {
    "a thread that measures has panicked".into()
}

fn run<T: Send>(places: &[&[u32]], work: impl Fn(usize) -> T + Sync) -> Result<Vec<T>, Reason> {
    let (gate, pinned, failed) = (
        AtomicU8::new(CLOSED),
        AtomicUsize::new(0),
        AtomicUsize::new(0),
    );
    let one = |index: usize, cpus: &[u32]| -> Result<Option<T>, Reason> {
        let result = pin(cpus);
        let counter = if result.is_ok() { &pinned } else { &failed };
        counter.fetch_add(1, Ordering::Relaxed);
        result?;
        let state = loop {
            match gate.load(Ordering::Acquire) {
                CLOSED => thread::yield_now(),
                state => break state,
            }
        };
        if state == GIVEN_UP {
            return Ok(None);
        }
        let result = work(index);
        check(cpus)?;
        Ok(Some(result))
    };
    let one = &one;
    thread::scope(|scope| {
        let mut threads: Vec<ScopedJoinHandle<'_, _>> = Vec::with_capacity(places.len());
        let mut refused = None;
        for (index, cpus) in places.iter().enumerate() {
            let builder = Builder::new().name("probe".into());
            match builder.spawn_scoped(scope, move || one(index, cpus)) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    refused = Some(format!(
                        "cannot start a thread: {error}; is the limit of processes reached?"
                    ));
                    break;
                }
            }
        }
        let settled = || pinned.load(Ordering::Relaxed) + failed.load(Ordering::Relaxed);
        while settled() < threads.len() {
            thread::yield_now();
        }
        let is_complete = refused.is_none() && failed.load(Ordering::Relaxed) == 0;
        let state = if is_complete { OPEN } else { GIVEN_UP };
        gate.store(state, Ordering::Release);
        let results: Vec<_> = threads.into_iter().map(ScopedJoinHandle::join).collect();
        let mut done = Vec::with_capacity(results.len());
        for result in results {
            done.extend(result.map_err(|_| panicked())??);
        }
        match refused {
            Some(reason) => Err(reason),
            None => Ok(done),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn each_thread_runs_on_its_cpu() {
        let cpus = affinity::get(None).unwrap();
        let ran_on = on_each_cpu(&cpus, |index| (index, current_cpu())).unwrap();
        let expected: Vec<_> = cpus.iter().copied().enumerate().collect();
        assert_eq!(ran_on, expected);
        assert_eq!(on_cpus(&cpus, || 7), Ok(7));
    }

    #[test]
    fn no_thread_begins_when_one_cannot_be_pinned() {
        let first = affinity::get(None).unwrap()[0];
        let begun = AtomicUsize::new(0);
        let reason = on_each_cpu(&[first, 1023, first], |_| {
            begun.fetch_add(1, Ordering::Relaxed)
        });
        assert!(reason.unwrap_err().contains("CPU 1023"));
        assert_eq!(begun.into_inner(), 0);
    }

    /// Returns the CPUs of this process, two at most.
    fn two_cpus() -> Vec<u32> {
        affinity::get(None).unwrap().into_iter().take(2).collect()
    }

    fn spin() {
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(20) {
            std::hint::spin_loop();
        }
    }

    #[test]
    fn a_load_has_begun_before_the_work_and_ends_after_it() {
        let cpus = two_cpus();
        let (prepared, rounds) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let work = || {
            let begun = (
                prepared.load(Ordering::SeqCst),
                rounds.load(Ordering::SeqCst),
            );
            // Ends only if the load goes on.
            while cpus.len() > 1 && rounds.load(Ordering::SeqCst) < begun.1 + 3 {
                thread::yield_now();
            }
            begun.0
        };
        let prepare = |_| {
            spin();
            prepared.fetch_add(1, Ordering::SeqCst);
        };
        let go_on = |_| {
            rounds.fetch_add(1, Ordering::SeqCst);
        };
        let seen = on_cpu_beside(cpus[0], &cpus[1..], work, prepare, go_on);
        assert_eq!(seen, Ok(cpus.len() - 1));
        assert_eq!(on_cpu_beside(cpus[0], &[], || 5, |_| (), |_| ()), Ok(5));
    }

    #[test]
    fn all_prepare_before_one_works_and_go_on_until_all_have_worked() {
        let cpus = two_cpus();
        let (prepared, worked, rounds) = (
            AtomicUsize::new(0),
            AtomicUsize::new(0),
            AtomicUsize::new(0),
        );
        let prepare = |index| {
            // The first is prepared at once, and waits for the second.
            if index > 0 {
                spin();
            }
            prepared.fetch_add(1, Ordering::SeqCst);
        };
        let work = |index| {
            let seen = prepared.load(Ordering::SeqCst);
            if index > 0 {
                while worked.load(Ordering::SeqCst) == 0 {
                    thread::yield_now();
                }
                let before = rounds.load(Ordering::SeqCst);
                while rounds.load(Ordering::SeqCst) < before + 3 {
                    thread::yield_now();
                }
            }
            worked.fetch_add(1, Ordering::SeqCst);
            seen
        };
        let go_on = |_| {
            rounds.fetch_add(1, Ordering::SeqCst);
        };
        let seen = on_each_cpu_together(&cpus, prepare, work, go_on);
        assert_eq!(seen, Ok(vec![cpus.len(); cpus.len()]));
    }

    #[test]
    fn a_load_that_panics_is_an_error_and_no_wait() {
        let cpus = two_cpus();
        let fails = |_| assert!(cpus.is_empty(), "as the test wants it");
        let result = on_cpu_beside(cpus[0], &cpus[1..], || (), fails, |_| ());
        assert_eq!(result.is_err(), cpus.len() > 1);
    }

    #[test]
    fn a_thread_elsewhere_is_noticed() {
        let reason = on_cpus(&affinity::get(None).unwrap(), || check(&[1023])).unwrap();
        assert!(reason.unwrap_err().contains("was pinned to CPU 1023"));
    }
}
