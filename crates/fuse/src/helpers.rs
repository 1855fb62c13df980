//! Threads for requests that may have to wait, which a thread of the FUSE ring must not do.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::crew::{Body, Crew, Place};
use crate::workers::WorkerNodes;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    /// The jobs, at most one for each entry of the rings; and whether the threads end when no job is left.
    jobs: Mutex<(VecDeque<Job>, bool)>,
    changed: Condvar,
}

/// The queue of jobs, and the threads that run them. While jobs hang, there are more threads (`crew`). Dropping it runs the queued jobs first.
pub(crate) struct Helpers {
    queue: Arc<Queue>,
    crew: Arc<Crew>,
}

impl Helpers {
    /// Starts the threads. `most`: the limit of all threads. Fails when one cannot be started.
    pub(crate) fn new(
        threads: usize,
        most: usize,
        nodes: &Arc<WorkerNodes>,
    ) -> io::Result<Helpers> {
        let queue: Arc<Queue> = Arc::default();
        let of_threads = queue.clone();
        let prepare = move |_| -> io::Result<Body> {
            let queue = of_threads.clone();
            Ok(Box::new(move |place| {
                work(&queue, place);
                Ok(())
            }))
        };
        let crew = Crew::start(
            "mount-helper",
            threads,
            most,
            nodes,
            Box::new(prepare),
            None,
        )
        .inspect_err(|_| queue.end())?;
        Ok(Helpers { queue, crew })
    }

    /// Queues a job.
    pub(crate) fn run(&self, job: Job) {
        self.queue.jobs.lock().0.push_back(job);
        self.queue.changed.notify_one();
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        self.queue.end();
        // The crew ends with the first thread that finds no job. Until then it also has further threads for jobs that hang. The threads
        // return no errors.
        let _ = self.crew.wait();
    }
}

impl Queue {
    /// Lets the threads end when no job is left.
    fn end(&self) {
        self.jobs.lock().1 = true;
        self.changed.notify_all();
    }

    /// Waits for a job. Returns `None` when no job is left, and none will come or the thread is one too many.
    fn next(&self, place: &Place) -> Option<Job> {
        let mut jobs = self.jobs.lock();
        loop {
            if let Some(job) = jobs.0.pop_front() {
                return Some(job);
            }
            if jobs.1 || place.is_surplus() {
                return None;
            }
            self.changed.wait(&mut jobs);
        }
    }
}

fn work(queue: &Queue, place: &Place) {
    while let Some(job) = queue.next(place) {
        let job = AssertUnwindSafe(job);
        if place.serve(|| catch_unwind(job)).is_err() {
            tracing::error!("a request panicked; it was answered with an I/O error");
        }
    }
}
