//! Whether an operation that waits can still be given up.
//!
//! A program that waits for a silent host can be ended by a signal. Its operation then waits on in a thread of the daemon, because the thread may be
//! anywhere: in a device, in the store, before a lock. So the operation and an answer EINTR may race, and only one of them may win:
//!
//! ```text
//!             begin                       wait_again
//!   Waiting ──────────▶ Changing ──────────────────────▶ Waiting (with the bytes of a write that are there)
//!      │ interrupt
//!      ▼
//!   Interrupted: `begin` fails with EINTR, so the operation changes nothing more
//! ```
//!
//! An operation on names or attributes calls `begin_change` when it has all locks and has read everything, immediately before its first change. A
//! write calls `begin` before it changes pages and `wait_again` before it waits for further ones. An operation that only reads calls
//! neither. A sync does not either: an interrupted sync promises nothing.

use std::cell::RefCell;
use std::sync::Arc;

use jericho_metadata::errno::EINTR;
use parking_lot::Mutex;

use crate::error::Result;

thread_local! {
    /// That of the request that the thread serves.
    static OF_THREAD: RefCell<Option<Arc<Interruption>>> = const { RefCell::new(None) };
}

/// The state of one operation.
#[derive(Debug, Default)]
pub struct Interruption(Mutex<State>);

#[derive(Debug)]
enum State {
    /// May be given up. Has changed nothing, except these bytes of a write.
    Waiting { bytes: usize },
    /// Has begun a change, and will end with an answer of its own.
    Changing,
    /// Its caller has the answer.
    Interrupted,
}

impl Default for State {
    fn default() -> State {
        State::Waiting { bytes: 0 }
    }
}

impl Interruption {
    /// Gives the operation up. Returns how many bytes of a write have been written. Returns `None` if the operation has begun a change, or was
    /// given up before.
    pub fn interrupt(&self) -> Option<usize> {
        let mut state = self.0.lock();
        match *state {
            State::Waiting { bytes } => {
                *state = State::Interrupted;
                Some(bytes)
            }
            State::Changing | State::Interrupted => None,
        }
    }

    /// Begins a change, or a further one. Fails with EINTR if the operation was given up.
    pub fn begin(&self) -> Result<()> {
        let mut state = self.0.lock();
        if matches!(*state, State::Interrupted) {
            return Err(EINTR);
        }
        *state = State::Changing;
        Ok(())
    }

    /// Allows that the operation is given up again. `bytes`: all that a write has written. The caller makes no change before the next `begin`.
    pub fn wait_again(&self, bytes: usize) {
        let mut state = self.0.lock();
        if matches!(*state, State::Changing) {
            *state = State::Waiting { bytes };
        }
    }

    /// Returns the interruption of the request that this thread serves.
    pub fn of_thread() -> Option<Arc<Interruption>> {
        OF_THREAD.with_borrow(Clone::clone)
    }
}

/// Calls `serve` with `interruption` as that of the calling thread.
pub fn with_interruption<T>(
    interruption: Option<Arc<Interruption>>,
    serve: impl FnOnce() -> T,
) -> T {
    /// Restores the former value, also after a panic.
    struct Former(Option<Arc<Interruption>>);
    impl Drop for Former {
        fn drop(&mut self) {
            OF_THREAD.set(self.0.take());
        }
    }
    let _former = Former(OF_THREAD.replace(interruption));
    serve()
}

/// Begins the change of the operation that this thread performs. Fails with EINTR if its caller was interrupted. The operation has changed
/// nothing before.
pub fn begin_change() -> Result<()> {
    OF_THREAD.with_borrow(|of_thread| match of_thread {
        Some(interruption) => interruption.begin(),
        None => Ok(()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_is_given_up_before_its_change_or_not_at_all() {
        let given_up = Interruption::default();
        assert_eq!(given_up.interrupt(), Some(0));
        assert_eq!(given_up.interrupt(), None);
        assert_eq!(given_up.begin().unwrap_err().errno(), EINTR.errno());
        given_up.wait_again(7);
        assert_eq!(given_up.begin().unwrap_err().errno(), EINTR.errno());
        let begun = Interruption::default();
        begun.begin().unwrap();
        assert_eq!(begun.interrupt(), None);
        begun.begin().unwrap();
        begun.wait_again(7);
        assert_eq!(begun.interrupt(), Some(7));
    }

    #[test]
    fn a_thread_has_the_interruption_of_the_request_that_it_serves() {
        let interruption = Arc::new(Interruption::default());
        begin_change().unwrap();
        interruption.interrupt();
        let nested = || {
            assert_eq!(begin_change().unwrap_err().errno(), EINTR.errno());
            with_interruption(None, || begin_change().unwrap());
            assert!(begin_change().is_err());
        };
        with_interruption(Some(interruption), nested);
        begin_change().unwrap();
        assert!(Interruption::of_thread().is_none());
    }
}
