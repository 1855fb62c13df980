//! The thread that makes checkpoints of the metadata store.

use crate::core::Core;
use crate::errno::ENOSPC;

/// Runs the checkpointer's thread.
pub fn run(core: &Core) {
    while core.checkpoints.wait() {
        match core.store.checkpoint() {
            Ok(()) => {
                let need = core.store.checkpoint_need();
                core.checkpoints.note_after_checkpoint(need);
            }
            Err(error) if error.errno() == ENOSPC.errno() => {
                tracing::debug!(%error, "no room for a checkpoint of the metadata store");
                core.checkpoints.try_later();
            }
            Err(error) => return core.commits.fail(error),
        }
    }
}
