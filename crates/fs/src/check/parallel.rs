//! Work of a check on several CPUs.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{available_parallelism, scope};

use parking_lot::Mutex;

use crate::error::Result;

/// Runs `work` for each item, in at most one thread per CPU. Returns the results in the order of the items, or the
/// first error in that order.
pub(super) fn in_parallel<T: Sync, R: Send>(
    items: &[T],
    work: impl Fn(&T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let threads = available_parallelism().map_or(1, usize::from);
    if items.len() < 2 || threads < 2 {
        return items.iter().map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Option<Result<R>>>> = items.iter().map(|_| Mutex::new(None)).collect();
    let run = || {
        while let index = next.fetch_add(1, Ordering::Relaxed)
            && let Some(item) = items.get(index)
        {
            *results[index].lock() = Some(work(item));
        }
    };
    scope(|scope| {
        let threads: Vec<_> = (0..threads.min(items.len()))
            .map(|_| scope.spawn(run))
            .collect();
        for thread in threads {
            if let Err(panic) = thread.join() {
                resume_unwind(panic);
            }
        }
    });
    // A thread has taken each item, and all threads have ended.
    let results = results.into_iter().filter_map(Mutex::into_inner);
    results.collect()
}
