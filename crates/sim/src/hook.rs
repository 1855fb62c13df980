//! Code of a test that runs before the operations of a device.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use parking_lot::Mutex;

use crate::device::SimDevice;
use crate::plan::Operation;

type Before = Arc<dyn Fn(Operation) + Send + Sync>;

#[derive(Default)]
pub(crate) struct Hook(Mutex<Option<Before>>);

impl Hook {
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

impl SimDevice {
    /// Runs `before` at the beginning of each later operation, in the thread that requests it. Replaces an earlier `before`.
    pub fn set_before(&self, before: impl Fn(Operation) + Send + Sync + 'static) {
        *self.hook.0.lock() = Some(Arc::new(before));
    }

    /// Blocks the next operation of a kind. The receiver reports that it has begun. The operation continues when the sender sends
    /// or is dropped. Replaces an earlier `before` of `set_before`.
    pub fn block_next(&self, kind: Operation) -> (Receiver<()>, Sender<()>) {
        let ((begun, has_begun), (go, go_on)) = (channel(), channel());
        let next = Mutex::new(Some((begun, go_on)));
        self.set_before(move |operation| {
            let next = (operation == kind).then(|| next.lock().take()).flatten();
            if let Some((begun, go_on)) = next {
                // The test may have ended.
                let _ = begun.send(());
                let _ = go_on.recv();
            }
        });
        (has_begun, go)
    }
}
