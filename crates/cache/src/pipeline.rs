//! The pipeline thread: starts reads, ends them, and runs the callbacks of finished Gets.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use jericho_storage::{Completion, Queue};

use crate::scheduler;
use crate::shared::SliceShared;

/// How long the pipeline polls for more work before it sleeps, while reads are in flight. A sleep and the wake-up from it cost
/// more than a fast device needs for a block.
const POLL: Duration = Duration::from_micros(50);

/// Period at which the pipeline checks parked Gets while there are any.
const ROUND: Duration = Duration::from_millis(1);

/// Runs until the slice closes and no read is in flight.
pub(crate) fn run(shared: &Arc<SliceShared>, mut queue: Box<dyn Queue>) {
    let mut completions = vec![];
    let mut rounds = Rounds::new();
    loop {
        rounds.check(shared);
        while let Some(transfer) = shared.reads.pop() {
            queue.submit(transfer);
        }
        let idle = queue.in_flight() == 0;
        if shared.context.closing.load(SeqCst) && idle && shared.reads.is_empty() {
            return;
        }
        if !idle {
            poll(shared, queue.as_mut(), &mut completions);
        }
        if completions.is_empty() && shared.reads.is_empty() {
            queue.wait(&mut completions, rounds.sleep(shared));
        }
        for completion in completions.drain(..) {
            scheduler::read_ended(shared, completion);
            // Reads that the callback requested start before the other completions are handled.
            while let Some(transfer) = shared.reads.pop() {
                queue.submit(transfer);
            }
        }
    }
}

/// Starts submitted reads and polls briefly for completions and new reads. Yields the CPU between polls.
fn poll(shared: &SliceShared, queue: &mut dyn Queue, completions: &mut Vec<Completion>) {
    let begun = Instant::now();
    loop {
        queue.wait(completions, Some(Duration::ZERO));
        if !completions.is_empty() || !shared.reads.is_empty() || begun.elapsed() > POLL {
            return;
        }
        std::thread::yield_now();
    }
}

/// Decides when parked Gets are checked.
struct Rounds(Instant);

impl Rounds {
    fn new() -> Rounds {
        Rounds(Instant::now())
    }

    /// Returns how long the pipeline may sleep; `None` when without limit.
    fn sleep(&self, shared: &SliceShared) -> Option<Duration> {
        (shared.context.parked.load(SeqCst) > 0).then_some(ROUND)
    }

    /// Resumes the Gets whose latch has changed hands, if a check is due.
    fn check(&mut self, shared: &Arc<SliceShared>) {
        if shared.context.parked.load(SeqCst) > 0 && self.0.elapsed() >= ROUND {
            scheduler::retry_parked(shared);
            self.0 = Instant::now();
        }
    }
}
