//! Gets that met a page latched by a writer that makes no progress. They wait for it without a thread.
//!
//! A client that is stopped, or gets no CPU time, may hold a latch for as long as `want_latched` allows. The thread that met the
//! latch continues with other work: its request is parked here, and the pipeline checks the latch periodically.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use jericho_shm::{Flags, Key, SliceMemory, State as Word};

use crate::Slice;
use crate::state::{After, Shared, State, run};

/// Period at which the pipeline checks parked Gets while there are any.
pub(crate) const ROUND: Duration = Duration::from_millis(1);

/// A page that another writer has latched.
#[derive(Debug)]
#[must_use = "the bytes were not transferred"]
pub struct Latched {
    key: Key,
    /// The latched state that was seen; `None` when the latch is free again.
    word: Option<Word>,
}

/// A request that resumes when a latch changes hands.
pub(crate) struct Parked {
    latched: Latched,
    resume: Box<dyn FnOnce() + Send>,
}

impl Latched {
    pub(crate) fn new(memory: &SliceMemory, key: Key) -> Latched {
        let word = memory.lookup(key).map(|found| found.state);
        let word = word.filter(|word| word.has(Flags::LATCH));
        Latched { key, word }
    }

    /// Returns whether the same holder still has the page. The check may take the latch away.
    fn is_held(&self, state: &mut State, shared: &Shared) -> bool {
        let (Some(seen), Some(found)) = (self.word, shared.memory.lookup(self.key)) else {
            return false;
        };
        seen.is_same_holding(found.state) && !state.want_latched(shared, found.index, found.state)
    }
}

impl Slice {
    /// Runs `resume` in a thread of the slice once the latch has changed hands. The wait is bounded, because `want_latched`
    /// takes the latch away.
    pub fn when_unlatched(&self, latched: Latched, resume: impl FnOnce() + Send + 'static) {
        park(&self.shared, latched, Box::new(resume));
    }
}

pub(crate) fn park(shared: &Shared, latched: Latched, resume: Box<dyn FnOnce() + Send>) {
    shared.counts.clashed.fetch_add(1, Relaxed);
    shared.parked.fetch_add(1, SeqCst);
    shared.lock().parked.push(Parked { latched, resume });
    shared.read_waker.wake();
}

/// Decides when parked Gets are checked.
pub(crate) struct Rounds(Instant);

impl Rounds {
    pub fn new() -> Rounds {
        Rounds(Instant::now())
    }

    /// Returns how long the pipeline may sleep; `None` when without limit.
    pub fn sleep(&self, shared: &Shared) -> Option<Duration> {
        (shared.parked.load(SeqCst) > 0).then_some(ROUND)
    }

    /// Resumes the Gets whose latch has changed hands, if a check is due.
    pub fn check(&mut self, shared: &Arc<Shared>) {
        if shared.parked.load(SeqCst) > 0 && self.0.elapsed() >= ROUND {
            retry(shared);
            self.0 = Instant::now();
        }
    }
}

/// Resumes the Gets whose latch has changed hands; all Gets when the slice closes.
pub(crate) fn retry(shared: &Arc<Shared>) {
    let mut after = After::default();
    let mut state = shared.lock();
    let closing = shared.closing.load(SeqCst);
    for parked in std::mem::take(&mut state.parked) {
        if !closing && parked.latched.is_held(&mut state, shared) {
            state.parked.push(parked);
        } else {
            shared.parked.fetch_sub(1, SeqCst);
            let resume = parked.resume;
            after.done.push((Box::new(move |_| resume()), Ok(())));
        }
    }
    drop(state);
    run(shared, after);
}
