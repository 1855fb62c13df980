//! The state of lending: how many ranges are lent, and which threads wait for the end of loans.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex};

use crate::types::SliceId;

/// The loans of all slices, and the containers in which blocks were freed.
#[derive(Default)]
pub(super) struct Loans {
    pub(super) state: Mutex<LoanState>,
    /// Notified when a loan ends or when lending is allowed again.
    pub(super) changed: Condvar,
    /// Whether freed blocks are recorded.
    pub(super) remember: AtomicBool,
    /// Containers in which blocks were freed, each once.
    freed: Mutex<VecDeque<(SliceId, usize)>>,
    /// Whether there are such containers. Every commit reads it, and most commits free nothing.
    pub(super) has_freed: AtomicBool,
}

impl Loans {
    /// Adds a container in which blocks were freed.
    pub(super) fn push_freed(&self, container: (SliceId, usize)) {
        let mut freed = self.freed.lock();
        freed.push_back(container);
        self.has_freed.store(true, Ordering::Release);
    }

    /// Takes out the container that was added first.
    pub(super) fn pop_freed(&self) -> Option<(SliceId, usize)> {
        let mut freed = self.freed.lock();
        let first = freed.pop_front();
        self.has_freed.store(!freed.is_empty(), Ordering::Release);
        first
    }
}

/// Counts of the loans, of the recalls, and of the threads that wait for them to end.
#[derive(Default)]
pub(super) struct LoanState {
    pub(super) lent: usize,
    pub(super) recalls: usize,
    /// Number of recalls that `recall_in_turn` made.
    pub(super) in_turn: usize,
    /// Threads in `recall_in_turn` that let a lender go first.
    pub(super) yielding: usize,
    /// Threads in `lend` that wait for the end of a recall.
    pub(super) waiting: usize,
    /// Number of waits in `lend` that have ended.
    pub(super) waited: u64,
    /// Prevents `lend` from waiting for the end of a recall.
    pub(super) at_once: bool,
}

/// Prevents lending while it exists.
pub struct Recall<'a> {
    pub(super) loans: &'a Loans,
    pub(super) in_turn: bool,
}

impl Drop for Recall<'_> {
    fn drop(&mut self) {
        let mut state = self.loans.state.lock();
        state.recalls -= 1;
        state.in_turn -= usize::from(self.in_turn);
        drop(state);
        self.loans.changed.notify_all();
    }
}
