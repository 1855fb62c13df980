//! Threads for requests that may have to wait, which a thread of the FUSE ring must not do.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::crew::Crew;
use crate::workers::WorkerNodes;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    /// The jobs, at most one for each entry of the rings; and whether the threads end when no job is left.
    jobs: Mutex<(VecDeque<Job>, bool)>,
    changed: Condvar,
}

/// The queue of jobs, and the threads that run them. While all of them have jobs, there are more (`crew`). Dropping it runs the queued
/// jobs first.
pub(crate) struct Helpers {
    queue: Arc<Queue>,
    crew: Arc<Crew>,
}

impl Helpers {
    /// Starts the threads. Fails when one cannot be started.
    pub(crate) fn new(threads: usize, nodes: &Arc<WorkerNodes>) -> io::Result<Helpers> {
        let helpers = Helpers {
            queue: Arc::default(),
            crew: Crew::new("mount-helper", threads, nodes.clone()),
        };
        for _ in 0..threads {
            start(&helpers.queue, &helpers.crew)?;
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
        // The threads return no errors.
        let _ = self.crew.wait();
    }
}

fn start(queue: &Arc<Queue>, crew: &Arc<Crew>) -> io::Result<()> {
    let queue = queue.clone();
    crew.start(move |crew| {
        work(&queue, crew);
        Ok(())
    })
}

fn work(queue: &Arc<Queue>, crew: &Arc<Crew>) {
    while let Some(job) = next(queue) {
        if crew.take_work()
            && let Err(error) = start(queue, crew)
        {
            tracing::warn!(%error, "cannot start another helper of the mount; requests wait while all helpers wait");
        }
        if catch_unwind(AssertUnwindSafe(job)).is_err() {
            tracing::error!("a request panicked; it was answered with an I/O error");
        }
        if crew.end_work() {
            return;
        }
    }
}

/// Waits for a job. Returns `None` when no job is left and none will come.
fn next(queue: &Queue) -> Option<Job> {
    let mut jobs = queue.jobs.lock();
    loop {
        if let Some(job) = jobs.0.pop_front() {
            return Some(job);
        }
        if jobs.1 {
            return None;
        }
        queue.changed.wait(&mut jobs);
    }
}
