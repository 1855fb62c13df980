//! Which writes to a device a flush has made durable.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Identifies a flush of a device. Flushes are numbered in the order in which they begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct FlushEpoch(u64);

/// The flushes of a device, and the writes that they cover. Any thread may use it.
///
/// A completed write has the epoch of the next flush that begins. So the write is durable when a flush with this epoch or a larger
/// one has succeeded. A flush that runs when the write completes does not count, because it may have begun before the write.
#[derive(Debug, Default)]
pub struct FlushEpochs(Mutex<Epochs>);

#[derive(Debug, Default)]
struct Epochs {
    /// The newest flush that began.
    begun: FlushEpoch,
    /// The newest flush that succeeded.
    flushed: FlushEpoch,
    /// The epoch of the newest write.
    written: FlushEpoch,
}

impl FlushEpochs {
    /// Records that a write completed, and returns its epoch.
    pub fn note_write(&self) -> FlushEpoch {
        let mut epochs = self.lock();
        epochs.written = FlushEpoch(epochs.begun.0 + 1);
        epochs.written
    }

    /// Returns whether a recorded write may not be durable.
    pub fn needs_flush(&self) -> bool {
        self.unflushed().is_some()
    }

    /// Returns the epoch of the newest recorded write, if it may not be durable.
    pub fn unflushed(&self) -> Option<FlushEpoch> {
        let epochs = self.lock();
        (epochs.written > epochs.flushed).then_some(epochs.written)
    }

    /// Returns whether all writes with this epoch are durable.
    pub fn is_flushed(&self, epoch: FlushEpoch) -> bool {
        epoch <= self.lock().flushed
    }

    /// Returns the epoch of a flush that the caller begins after the call.
    pub fn begin_flush(&self) -> FlushEpoch {
        let mut epochs = self.lock();
        epochs.begun.0 += 1;
        epochs.begun
    }

    /// Records that a flush succeeded. A failed flush is recorded nowhere: its writes stay as they are, and the device fails all
    /// later flushes.
    pub fn flushed(&self, epoch: FlushEpoch) {
        let mut epochs = self.lock();
        epochs.flushed = epochs.flushed.max(epoch);
    }

    /// Ignores poisoning: no user of this lock can leave the numbers in a bad state.
    fn lock(&self) -> MutexGuard<'_, Epochs> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_is_flushed_by_a_flush_that_begins_after_it() {
        let epochs = FlushEpochs::default();
        assert!(!epochs.needs_flush());
        let first = epochs.note_write();
        assert_eq!(epochs.note_write(), first);
        assert!(epochs.needs_flush() && !epochs.is_flushed(first));
        let flush = epochs.begin_flush();
        assert!(epochs.needs_flush() && !epochs.is_flushed(first));
        epochs.flushed(flush);
        assert!(!epochs.needs_flush() && epochs.is_flushed(first));
    }

    #[test]
    fn a_write_during_a_flush_needs_another_one() {
        let epochs = FlushEpochs::default();
        let before = epochs.note_write();
        let flush = epochs.begin_flush();
        let during = epochs.note_write();
        epochs.flushed(flush);
        assert!(epochs.is_flushed(before) && !epochs.is_flushed(during));
        assert!(epochs.needs_flush());
        epochs.flushed(epochs.begin_flush());
        assert!(epochs.is_flushed(during) && !epochs.needs_flush());
    }

    #[test]
    fn flushes_may_end_in_any_order() {
        let epochs = FlushEpochs::default();
        let first = epochs.note_write();
        let old = epochs.begin_flush();
        let second = epochs.note_write();
        let new = epochs.begin_flush();
        epochs.flushed(new);
        assert!(epochs.is_flushed(first) && epochs.is_flushed(second));
        epochs.flushed(old);
        assert!(epochs.is_flushed(second) && !epochs.needs_flush());
    }

    #[test]
    fn a_flush_without_writes_changes_nothing() {
        let epochs = FlushEpochs::default();
        epochs.flushed(epochs.begin_flush());
        assert!(!epochs.needs_flush());
        let write = epochs.note_write();
        assert!(epochs.needs_flush() && !epochs.is_flushed(write));
    }
}
