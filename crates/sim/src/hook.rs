//! Code of a test that runs before the operations of a device.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::plan::Operation;

type Before = Arc<dyn Fn(Operation) + Send + Sync>;

#[derive(Default)]
pub(crate) struct Hook(Mutex<Option<Before>>);

impl Hook {
    /// Replaces the test's code.
    pub(crate) fn set(&self, before: impl Fn(Operation) + Send + Sync + 'static) {
        *self.0.lock() = Some(Arc::new(before));
    }

    /// Runs the test's code without holding a lock, so that it may use the device.
    pub(crate) fn run(&self, operation: Operation) {
        let before = self.0.lock().clone();
        if let Some(before) = before {
            before(operation);
        }
    }
}

impl fmt::Debug for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hook")
    }
}
