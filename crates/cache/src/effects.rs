//! What a step of the slice leaves to do after the lock is released.

use crate::object::Error;
use crate::requests::{Done, Fill, GetDone, PinnedPages};

/// Work that steps have collected. The scheduler performs it (`scheduler::perform`).
#[derive(Default)]
pub(crate) struct Effects {
    /// Pages to read, or to zero.
    pub fills: Vec<Fill>,
    /// Gets that have ended.
    pub granted: Vec<(GetDone, Result<PinnedPages, Error>)>,
    /// Other callbacks.
    pub done: Vec<(Done, Result<(), Error>)>,
    pub wake_evictor: bool,
    /// A Get has released its pins, because it failed or waits for frames. So `waiting::retry` must follow before the lock is released.
    pub released: bool,
}
