//! The power of one or several devices.

use std::sync::Arc;

use parking_lot::Mutex;

/// The power of one or several devices. Numbers their changes in one order, and cuts the power of all of them at once.
///
/// A change is a write, a durable write, a flush or a discard.
#[derive(Debug)]
pub struct PowerSupply(Mutex<SupplyState>);

#[derive(Debug)]
struct SupplyState {
    is_on: bool,
    /// Number of changes that have begun.
    changes: u64,
    /// Number of the change that the cut interrupts.
    cut_at: Option<u64>,
}

/// The power during an operation, with the number of the operation if it is a change (0 if not).
pub(crate) enum Power {
    On(u64),
    /// The power fails during the operation.
    Fails(u64),
    Off,
}

impl PowerSupply {
    /// Returns a supply whose power is on.
    pub fn new() -> Arc<PowerSupply> {
        Arc::new(PowerSupply(Mutex::new(SupplyState {
            is_on: true,
            changes: 0,
            cut_at: None,
        })))
    }

    /// Cuts the power during change number `nth`, counted from 1 over all devices from now on.
    pub fn cut_at(&self, nth: u64) {
        let mut state = self.0.lock();
        state.cut_at = Some(state.changes + nth);
    }

    /// Cuts the power now.
    pub fn cut(&self) {
        self.0.lock().is_on = false;
    }

    /// Returns the number of changes that have begun on all devices.
    pub fn changes(&self) -> u64 {
        self.0.lock().changes
    }

    /// Begins an operation. If `is_cut_here`, the power fails during it. The caller holds the lock of the device until the operation
    /// has ended, so a device's changes have their numbers in the order in which they happen.
    pub(crate) fn begin(&self, is_change: bool, is_cut_here: bool) -> Power {
        let mut state = self.0.lock();
        if !state.is_on {
            return Power::Off;
        }
        state.changes += u64::from(is_change);
        let number = if is_change { state.changes } else { 0 };
        if is_cut_here || (is_change && state.cut_at == Some(number)) {
            state.is_on = false;
            return Power::Fails(number);
        }
        Power::On(number)
    }
}
