//! The transfers of a queue that devices perform by themselves, without the queue's ring.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use jericho_sys::doorbell::{Doorbell, Signal};

use crate::{Asynchronous, Completion, Finish, Transfer};

/// The transfers that the devices have and those that have ended.
pub(crate) struct Elsewhere(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    is_idle: Condvar,
    doorbell: Arc<Doorbell>,
    /// Wakes an owner that sleeps elsewhere.
    signal: Option<Signal>,
}

#[derive(Default)]
struct State {
    begun: usize,
    done: Vec<Completion>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No user of the lock can leave the state bad.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Finish for Shared {
    fn finish(&self, completion: Completion) {
        let mut state = self.lock();
        state.done.push(completion);
        state.begun -= 1;
        if state.begun == 0 {
            self.is_idle.notify_all();
        }
        drop(state);
        self.doorbell.ring();
        if let Some(signal) = &self.signal {
            signal.send();
        }
    }
}

impl Elsewhere {
    /// Returns a list without transfers. Each end of a transfer rings `doorbell`, and sends `signal`.
    pub(crate) fn new(doorbell: Arc<Doorbell>, signal: Option<Signal>) -> Elsewhere {
        Elsewhere(Arc::new(Shared {
            state: Mutex::default(),
            is_idle: Condvar::new(),
            doorbell,
            signal,
        }))
    }

    /// Begins checked transfers.
    pub(crate) fn begin(&self, device: &dyn Asynchronous, transfers: Vec<Transfer>) {
        self.0.lock().begun += transfers.len();
        device.begin_all(transfers, Arc::clone(&self.0) as Arc<dyn Finish>);
    }

    /// Appends the transfers that have ended.
    pub(crate) fn take(&self, completions: &mut Vec<Completion>) {
        completions.append(&mut self.0.lock().done);
    }
}

impl Drop for Elsewhere {
    /// Waits for the devices, which use the memory of the transfers.
    fn drop(&mut self) {
        let mut state = self.0.lock();
        while state.begun > 0 {
            let waited = self.0.is_idle.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}
