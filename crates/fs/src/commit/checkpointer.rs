//! The thread that makes checkpoints of the metadata store.

use crate::core::Core;

/// Runs the checkpointer's thread.
pub fn run(core: &Core) {
    while core.checkpoints.wait() {
        if let Err(error) = core.store.checkpoint() {
            // The next commit gets an error that ended all changes.
            tracing::debug!(%error, "no checkpoint of the metadata store");
            core.checkpoints.try_later();
        }
    }
}
