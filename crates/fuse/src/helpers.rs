//! Threads for what may have to wait: a thread of the ring must not.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use jericho_sys::service as threads;
use parking_lot::{Condvar, Mutex};

use crate::workers::Placement;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    /// At most one of each entry of the rings.
    jobs: Mutex<(VecDeque<Job>, bool)>,
    changed: Condvar,
}

/// Jobs, and the threads that do them. Dropping it does what is left first.
pub(crate) struct Helpers {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

impl Helpers {
    /// Errors: no thread could be made.
    pub(crate) fn new(threads: usize, placement: &Arc<Placement>) -> io::Result<Helpers> {
        let mut helpers = Helpers {
            queue: Arc::default(),
            threads: Vec::new(),
        };
        for n in 0..threads {
            let (queue, placement) = (helpers.queue.clone(), placement.clone());
            let thread = std::thread::Builder::new()
                .name(format!("mount-helper-{n}"))
                .spawn(move || {
                    placement.bind_this_thread();
                    threads::run(|| work(&queue));
                })?;
            helpers.threads.push(thread);
        }
        Ok(helpers)
    }

    /// Has `job` done, soon.
    pub(crate) fn run(&self, job: Job) {
        self.queue.jobs.lock().0.push_back(job);
        self.queue.changed.notify_one();
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        self.queue.jobs.lock().1 = true;
        self.queue.changed.notify_all();
        for thread in self.threads.drain(..) {
            // Panics of jobs are caught.
            let _ = thread.join();
        }
    }
}

fn work(queue: &Queue) {
    loop {
        let job = {
            let mut jobs = queue.jobs.lock();
            loop {
                if let Some(job) = jobs.0.pop_front() {
                    break job;
                }
                if jobs.1 {
                    return;
                }
                queue.changed.wait(&mut jobs);
            }
        };
        if catch_unwind(AssertUnwindSafe(job)).is_err() {
            tracing::error!("a request panicked; it was answered with an I/O error");
        }
    }
}
