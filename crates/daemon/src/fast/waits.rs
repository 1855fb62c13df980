//! Reads that wait for the end of a loan: a client has written half of its data, and a later request writes the rest.
//!
//! One thread, which serves no requests, polls all of them and blocks for none.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use jericho_fs::types::Ino;
use jericho_shm::{Segments, WAIT_MAX};
use parking_lot::Mutex;

use super::Fast;
use super::read_guard::{Gathered, Gathering, ReadGuard};

/// Time between two polls of the reads that wait.
const POLL: Duration = Duration::from_millis(10);

/// The result of the wait.
pub(crate) enum Waited {
    /// Writers over several pages are locked out.
    Alone(ReadGuard),
    /// The file has no inline writer any more.
    Unwritten,
    /// The wait was too long, or the volume closes: the read may see half of a write.
    GaveUp,
}

/// A read that waits.
pub(crate) struct LoanWait {
    fast: Arc<Fast>,
    ino: Ino,
    segments: Segments,
    gathering: Option<Gathering>,
    until: Instant,
    then: Box<dyn FnOnce(Waited) + Send>,
}

impl LoanWait {
    /// Polls once. Returns `None` if the read has to wait longer.
    fn poll(&mut self) -> Option<Waited> {
        let Some(file) = self.fast.written_file(self.ino) else {
            return Some(Waited::Unwritten);
        };
        let gathering = match &mut self.gathering {
            Some(gathering) if gathering.is_of(&file) => gathering,
            other => other.insert(Gathering::new(&self.fast, file, self.segments)),
        };
        match gathering.poll() {
            Gathered::All(guard) => Some(Waited::Alone(guard)),
            Gathered::GaveUp => Some(Waited::GaveUp),
            Gathered::Some if Instant::now() >= self.until => Some(Waited::GaveUp),
            Gathered::Some => None,
        }
    }

    /// Polls once. Returns the read if it has to wait longer.
    fn poll_or_end(mut self: Box<Self>) -> Option<Box<Self>> {
        let Some(waited) = self.poll() else {
            return Some(self);
        };
        self.end(waited);
        None
    }

    fn end(self: Box<Self>, waited: Waited) {
        drop(self.gathering);
        (self.then)(waited);
    }

    fn end_now(mut self: Box<Self>) {
        let waited = self.poll().unwrap_or(Waited::GaveUp);
        self.end(waited);
    }
}

/// The queue of the reads that wait.
#[derive(Default)]
pub(crate) struct LoanWaits {
    /// Queue of the thread `fast-waits`, which serves no requests.
    queue: Mutex<Option<Sender<Box<LoanWait>>>>,
}

impl LoanWaits {
    /// Opens the queue. Returns its end for `serve`.
    pub fn open(&self) -> Receiver<Box<LoanWait>> {
        let (sender, reads) = channel();
        *self.queue.lock() = Some(sender);
        reads
    }

    /// Closes the queue: `serve` ends the reads that still wait.
    pub fn close(&self) {
        *self.queue.lock() = None;
    }

    /// Calls `then` once the writers of a range are locked out, or the wait ends for another reason. Never waits itself: `then`
    /// runs in the thread `fast-waits`, or in this thread when the volume closes.
    pub fn wait_alone(
        &self,
        fast: &Arc<Fast>,
        ino: Ino,
        segments: Segments,
        then: impl FnOnce(Waited) + Send + 'static,
    ) {
        let wait = Box::new(LoanWait {
            fast: fast.clone(),
            ino,
            segments,
            gathering: None,
            until: Instant::now() + WAIT_MAX,
            then: Box::new(then),
        });
        let queue = self.queue.lock().clone();
        match queue {
            Some(queue) => {
                if let Err(unsent) = queue.send(wait) {
                    unsent.0.end_now();
                }
            }
            None => wait.end_now(),
        }
    }
}

/// Polls the reads until the volume closes. The close ends the reads that still wait.
pub(crate) fn serve(queue: &Receiver<Box<LoanWait>>) {
    let mut all: Vec<Box<LoanWait>> = vec![];
    let mut next = Instant::now();
    loop {
        let received = match all.is_empty() {
            true => queue.recv().map_err(|_| RecvTimeoutError::Disconnected),
            false => queue.recv_timeout(next.saturating_duration_since(Instant::now())),
        };
        match received {
            Ok(waiting) => {
                if all.is_empty() {
                    next = Instant::now() + POLL;
                }
                all.extend(waiting.poll_or_end());
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        if Instant::now() >= next {
            all = all.into_iter().filter_map(LoanWait::poll_or_end).collect();
            next = Instant::now() + POLL;
        }
    }
    all.into_iter().for_each(LoanWait::end_now);
}
