//! Settles live images: writes them into their blocks, so that the journal can be freed.

use jericho_format::PAGE_BYTES;
use jericho_metadata::logged::Settlement;
use jericho_metadata::shard::ShardId;
use jericho_metadata::store::Block;
use jericho_storage::AlignedBuffer;

use crate::core::Core;
use crate::data::file::check_not_excluded;
use crate::error::Result;

/// Most pages of one write: 1 MiB.
const PAGES_AT_ONCE: usize = 256;

/// Settles the live images of a shard durably. If a device fails, its images stay in the journal or the store, where they do no
/// harm. Does nothing on a volume that is mounted for reading.
pub(crate) fn settle(core: &Core, shard: ShardId) -> Result<()> {
    let logged = core.allocator.logged_of(shard);
    if logged.is_empty() || core.options.read_only {
        return Ok(());
    }
    if core.has_checksums() && logged.has_changes() {
        core.commit_shard_now(shard)?;
    }
    let mut from: Block = (0, 0);
    let mut copy = AlignedBuffer::new(PAGES_AT_ONCE * PAGE_BYTES as usize);
    let mut failed = None;
    let mut is_settled = false;
    while let Some(settlement) = logged.begin_settling(from, PAGES_AT_ONCE) {
        let blocks = settlement.blocks();
        from = (blocks.slice, blocks.first + u64::from(blocks.count));
        match write(core, &settlement, &mut copy) {
            Ok(()) => {
                // Before the images are removed: the batch that removes them must flush this device.
                core.took_data(blocks);
                settlement.written();
                is_settled = true;
            }
            Err(error) => failed = Some(error),
        }
    }
    if let Some(error) = failed {
        tracing::warn!("{error}; synced pages stay in the journal until the device takes them");
        core.shards.get(shard).checkpoints.settlement_failed();
    }
    // Commits only if there is a reason. While many images cannot be settled, each commit would ask for the next settlement at once.
    match is_settled || logged.has_changes() {
        true => core.commit_shard_now(shard),
        false => Ok(()),
    }
}

/// Writes images into their blocks.
fn write(core: &Core, settlement: &Settlement<'_>, copy: &mut AlignedBuffer) -> Result<()> {
    let page_bytes = PAGE_BYTES as usize;
    let images = settlement.images().iter();
    for ((_, image), bytes) in images.zip(copy.as_mut_slice().chunks_mut(page_bytes)) {
        bytes.copy_from_slice(image);
    }
    let mut rest = &copy.as_slice()[..settlement.images().len() * page_bytes];
    for run in core.volume.runs(settlement.blocks()) {
        check_not_excluded(&core.volume, run.device)?;
        let (own, after) = rest.split_at(run.blocks as usize * page_bytes);
        core.volume.devices()[usize::from(run.device)].write_at(run.offset_bytes, own)?;
        rest = after;
    }
    Ok(())
}

/// Settles the images of a shard, so that redb need not store them, and makes a checkpoint of the shard's store.
pub(crate) fn checkpoint(core: &Core, shard: ShardId) -> Result<()> {
    if let Err(error) = settle(core, shard) {
        tracing::debug!(%error, "the images are not settled");
    }
    core.shards.get(shard).store.checkpoint()
}
