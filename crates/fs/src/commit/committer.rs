//! The thread that commits a shard's batches when no caller does (`leader`).

use jericho_metadata::errno::ESHUTDOWN;
use jericho_metadata::shard::ShardId;

use crate::core::Core;

/// Runs the thread of a shard's committer.
pub fn run(core: &Core, shard: ShardId) {
    let commits = &core.shards.get(shard).commits;
    while let Some(round) = commits.next() {
        round.run(core, shard);
    }
    let mut control = commits.control.lock();
    // A caller that leads may still postpone waiters.
    while control.is_led {
        commits.ended.wait(&mut control);
    }
    let mut left = std::mem::take(&mut control.waiters);
    left.append(&mut control.postponed);
    drop(control);
    for waiter in left {
        (waiter.done)(Err(ESHUTDOWN));
    }
}
