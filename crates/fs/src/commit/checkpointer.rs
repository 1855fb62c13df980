//! The thread that makes checkpoints of the metadata store, and settles images.

use super::checkpoints::Work;
use crate::core::Core;
use crate::data::settle;
use crate::errno::ENOSPC;
use crate::store::CheckpointNeed;

/// Runs the checkpointer's thread.
pub fn run(core: &Core) {
    while let Some(work) = core.checkpoints.wait() {
        let done = match work {
            Work::Settle => settle::settle(core),
            Work::Checkpoint => settle::checkpoint(core),
        };
        match done {
            Err(error) if error.errno() == ENOSPC.errno() => {
                tracing::debug!(%error, "no room for a checkpoint of the metadata store");
                core.checkpoints.try_later();
            }
            // The commit of a settlement has failed and ended all changes, or the filesystem is being closed.
            Err(_) if work == Work::Settle => {}
            Err(error) => return core.commits.fail(error),
            Ok(()) if work == Work::Settle => {}
            Ok(()) => {
                let need = match core.store.checkpoint_need() {
                    // A device has refused an image.
                    CheckpointNeed::None if core.allocator.logged().len() > 0 => {
                        CheckpointNeed::AtLast
                    }
                    need => need,
                };
                core.checkpoints.note_after_checkpoint(need);
            }
        }
    }
}
