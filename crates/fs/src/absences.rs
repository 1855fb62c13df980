//! Tells that a shard is suspended because a host does not answer.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Wakes a thread when a host does not answer. The thread then calls `Fs::resume` until the host answers again.
#[derive(Default)]
pub struct Absences {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    is_noted: bool,
    is_closed: bool,
    has_thread: bool,
}

impl Absences {
    /// Notes that a shard is suspended, or that its store cannot be read.
    pub(crate) fn note(&self) {
        self.state.lock().is_noted = true;
        self.changed.notify_all();
    }

    /// Ends the waits: the filesystem is being closed.
    pub(crate) fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_all();
    }

    /// Returns true to the first caller, which starts the thread.
    pub fn begin(&self) -> bool {
        !std::mem::replace(&mut self.state.lock().has_thread, true)
    }

    /// Sleeps until a shard is suspended. Returns false if the filesystem is being closed.
    pub fn wait(&self) -> bool {
        let mut state = self.state.lock();
        while !state.is_noted && !state.is_closed {
            self.changed.wait(&mut state);
        }
        state.is_noted = false;
        !state.is_closed
    }

    /// Sleeps for a time. Returns false if the filesystem is being closed.
    pub fn pause(&self, time: Duration) -> bool {
        let mut state = self.state.lock();
        let is_open = |state: &mut State| !state.is_closed;
        self.changed.wait_while_for(&mut state, is_open, time);
        !state.is_closed
    }
}
