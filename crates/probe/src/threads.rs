//! Threads that measure: each is pinned, and checks at its start and at its end that it runs where it should.
//!
//! The threads of one measurement begin together. They wait at a gate until all are pinned. If one cannot be, none begins.

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

    #[test]
    fn a_thread_elsewhere_is_noticed() {
        let reason = on_cpus(&affinity::get(None).unwrap(), || check(&[1023])).unwrap();
        assert!(reason.unwrap_err().contains("was pinned to CPU 1023"));
    }
}
