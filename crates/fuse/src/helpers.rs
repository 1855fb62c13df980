//! Threads for requests that may have to wait, which a thread of the FUSE ring must not do.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use jericho_sys::service as threads;
use parking_lot::{Condvar, Mutex};

use crate::workers::WorkerNodes;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    /// The jobs, at most one for each entry of the rings; and whether the threads end when no job is left.
    jobs: Mutex<(VecDeque<Job>, bool)>,
    changed: Condvar,
}

/// The queue of jobs, and the threads that run them. Dropping it runs the queued jobs first.
pub(crate) struct Helpers {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

impl Helpers {
    /// Starts the threads. Fails when one cannot be started.
    pub(crate) fn new(threads: usize, nodes: &Arc<WorkerNodes>) -> io::Result<Helpers> {
        let mut helpers = Helpers {
            queue: Arc::default(),
            threads: Vec::new(),
        };
        for n in 0..threads {
            let (queue, nodes) = (helpers.queue.clone(), nodes.clone());
            let thread = std::thread::Builder::new()
                .name(format!("mount-helper-{n}"))
                .spawn(move || {
                    nodes.bind_this_thread();
                    threads::run(|| work(&queue));
                })?;
            helpers.threads.push(thread);
        }
        Ok(helpers)
    }

    /// Queues a job.
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
            // The threads catch panics of jobs.
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
