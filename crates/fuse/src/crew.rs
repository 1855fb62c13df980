//! A crew: threads for requests that may wait, and more of them while all wait.
//!
//! A request that waits for a device holds its thread. If a device does not answer, requests for it would sooner or later hold all threads of
//! a fixed number, and no request for the other devices would be served. So the thread that takes work and leaves nobody idle starts
//! another thread first. A thread that has ended its work ends itself if enough others are idle.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use jericho_sys::service as threads;
use parking_lot::{Condvar, Mutex};

use crate::workers::WorkerNodes;

/// The most threads of a crew. Requests for a device that does not answer can hold this many.
pub(crate) const THREADS_MAX: usize = 512;

/// The threads of a crew, counted.
pub(crate) struct Crew {
    /// Threads have this name and a number.
    name: &'static str,
    /// Number of idle threads that stay.
    regular: usize,
    nodes: Arc<WorkerNodes>,
    /// Number of threads without work.
    idle: AtomicUsize,
    threads: Mutex<Threads>,
    ended: Condvar,
}

struct Threads {
    count: usize,
    /// Number of threads that were ever started.
    started: usize,
    result: io::Result<()>,
}

impl Crew {
    /// Makes a crew without threads.
    pub(crate) fn new(name: &'static str, regular: usize, nodes: Arc<WorkerNodes>) -> Arc<Crew> {
        Arc::new(Crew {
            name,
            regular,
            nodes,
            idle: AtomicUsize::new(0),
            threads: Mutex::new(Threads {
                count: 0,
                started: 0,
                result: Ok(()),
            }),
            ended: Condvar::new(),
        })
    }

    /// Starts a thread that runs `work`. Fails when none can be started.
    pub(crate) fn start(
        self: &Arc<Crew>,
        work: impl FnOnce(&Arc<Crew>) -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        let number = {
            let mut threads = self.threads.lock();
            threads.count += 1;
            threads.started += 1;
            threads.started - 1
        };
        self.idle.fetch_add(1, Ordering::AcqRel);
        let crew = self.clone();
        let started = std::thread::Builder::new()
            .name(format!("{}-{number}", self.name))
            .spawn(move || {
                crew.nodes.bind_this_thread();
                let result = threads::run(|| work(&crew));
                crew.end_thread(result);
            });
        started.map(drop).inspect_err(|_| {
            self.idle.fetch_sub(1, Ordering::AcqRel);
            self.end_thread(Ok(()));
        })
    }

    /// Records that the calling thread takes work. Returns whether it has to start another thread, because no other one is idle.
    pub(crate) fn take_work(&self) -> bool {
        self.idle.fetch_sub(1, Ordering::AcqRel) == 1 && self.threads.lock().count < THREADS_MAX
    }

    /// Records that the calling thread has ended its work. Returns whether it has to end, because enough others are idle.
    pub(crate) fn end_work(&self) -> bool {
        let surplus = self.idle.fetch_add(1, Ordering::AcqRel) >= self.regular;
        if surplus {
            self.idle.fetch_sub(1, Ordering::AcqRel);
        }
        surplus
    }

    fn end_thread(&self, result: io::Result<()>) {
        let mut threads = self.threads.lock();
        threads.count -= 1;
        if threads.result.is_ok() {
            threads.result = result;
        }
        self.ended.notify_all();
    }

    /// Waits until all threads have ended. Returns the first error of any of them.
    pub(crate) fn wait(&self) -> io::Result<()> {
        let mut threads = self.threads.lock();
        while threads.count > 0 {
            self.ended.wait(&mut threads);
        }
        std::mem::replace(&mut threads.result, Ok(()))
    }
}

#[cfg(test)]
mod tests;
