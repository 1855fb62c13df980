//! The thread that makes checkpoints of the metadata store, and settles images.

use jericho_metadata::errno::ENOSPC;
use jericho_metadata::shard::{ShardId, ShardSet};
use jericho_metadata::store::CheckpointNeed;
use jericho_sys::heap;

use super::checkpoints::Work;
use crate::core::Core;
use crate::data::settle;

/// Runs the thread of a shard's checkpointer.
pub fn run(core: &Core, id: ShardId) {
    let shard = core.shards.get(id);
    while let Some(work) = shard.checkpoints.wait() {
        let done = match work {
            Work::Settle => settle::settle(core, id),
            Work::Checkpoint => settle::checkpoint(core, id),
        };
        match done {
            Err(error) if error.errno() == ENOSPC.errno() => {
                tracing::debug!(%error, "no room for a checkpoint of the metadata store");
                shard.checkpoints.try_later();
            }
            // The settlement's commit has failed and ended all changes, or the filesystem is being closed.
            Err(_) if work == Work::Settle => {}
            Err(error) => {
                core.end_changes(ShardSet::one(id), &error);
                if !error.is_unreachable() {
                    return;
                }
            }
            Ok(()) if work == Work::Settle => {}
            Ok(()) => {
                let need = match shard.store.checkpoint_need() {
                    // A device has refused an image, so the next checkpoint tries it again.
                    CheckpointNeed::None if !core.allocator.logged_of(id).is_empty() => {
                        CheckpointNeed::AtLast
                    }
                    need => need,
                };
                shard.checkpoints.note_after_checkpoint(need);
                // The rows of the checkpoint are free now.
                heap::give_back();
            }
        }
    }
}
