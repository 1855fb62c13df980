//! Locks of a file's slot, released on drop.

use jericho_shm::{Ahead, Holding, Lock, RangeHeld, Slot};

/// A lock, released on drop.
pub struct HeldLock<'a> {
    pub lock: &'a Lock,
    pub held: Holding,
}

impl Drop for HeldLock<'_> {
    fn drop(&mut self) {
        self.lock.unlock(self.held);
    }
}

/// The right to ask for pages beyond the end, released on drop.
pub struct AskingGuard<'a> {
    pub ahead: &'a Ahead,
    pub held: Holding,
}

impl Drop for AskingGuard<'_> {
    fn drop(&mut self) {
        self.ahead.end_asking(self.held);
    }
}

/// Words of the range lock, released on drop.
pub struct LockedRange<'a> {
    pub slot: &'a Slot,
    pub held: RangeHeld,
}

impl LockedRange<'_> {
    /// Returns whether the bytes of the page at `at` may still be written.
    #[inline]
    pub fn is_held(&self, at: u64) -> bool {
        self.slot.holds(&self.held, at)
    }
}

impl Drop for LockedRange<'_> {
    fn drop(&mut self) {
        self.slot.unlock_range(&self.held);
    }
}
