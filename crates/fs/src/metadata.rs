//! Opens the metadata store and the allocator of a volume.

use std::sync::Arc;

use jericho_journal::{JournalArea, JournalVolume};
use jericho_volume::superblocks::{ReadError, Superblocks};
use jericho_volume::{DeviceOverlay, Volume};

use crate::alloc::Allocator;
use crate::error::{Error, Result};
use crate::shard::ShardId;
use crate::store::recovery::{Damage, JournalPlace};
use crate::store::region::Region;
use crate::store::{Store, StoreOptions, StoreRef};

/// Opens the metadata stores, one for each shard, with `cache_bytes` of memory together, and the allocator over them.
pub fn open(volume: &Volume, cache_bytes: usize) -> Result<(Vec<StoreRef>, Arc<Allocator>)> {
    let damage = match volume.read_only() {
        true => Damage::GiveUpRest,
        false => Damage::Refuse,
    };
    let store = open_redb(volume, cache_bytes)?;
    let recovered = store.recover(journal_of(volume), damage)?;
    if let Some(damage) = &recovered.damage {
        tracing::warn!("{damage}; the volume shows its state before that");
    }
    let allocator = Allocator::of_volume(std::slice::from_ref(&store), volume)?;
    if !volume.read_only() {
        // After the allocator, which can add space to the metadata region.
        store.finish_recovery(recovered)?;
    }
    let stores = vec![store];
    for (shard, store) in allocator.shards().all().iter().zip(&stores) {
        load_images(store, &allocator, shard)?;
    }
    Ok((stores, allocator))
}

/// Makes the images of a shard live whose blocks belong to files. The first batch removes the others: their files were removed just
/// before the end of the last mount, or never durable.
fn load_images(store: &Store, allocator: &Allocator, shard: ShardId) -> Result<()> {
    let container_blocks = u64::from(store.container_blocks());
    let logged = allocator.logged_of(shard);
    logged.set_max(store.images_max());
    // The container of the last image, and its bitmap. The images are in the order of their blocks.
    let mut last = None;
    for ((slice, block), image) in store.images()? {
        let is_own = allocator.shards().of_slice(slice) == shard;
        if !is_own || block >= allocator.capacity_of(slice) {
            let what =
                format!("a logged page is of block {block} of slice {slice}, which does not exist");
            let error = Error::Damaged(what);
            store.note_damage(&error);
            return Err(error);
        }
        let (container, bit) = (
            block / container_blocks,
            (block % container_blocks) as usize,
        );
        let bitmap = match last.take() {
            Some((at, bitmap)) if at == (slice, container) => bitmap,
            _ => store.bitmap(slice, container as u32)?,
        };
        let is_set = |words: &[u64]| words[bit / 64] >> (bit % 64) & 1 == 1;
        let is_used = bitmap.as_deref().is_some_and(is_set);
        last = Some(((slice, container), bitmap));
        match is_used {
            true => logged.load((slice, block), image),
            false => logged.drop_orphan((slice, block)),
        }
    }
    Ok(())
}

/// Makes the metadata stores and the journals of a new volume.
pub(crate) fn create(
    volume: &Volume,
    cache_bytes: usize,
) -> Result<(Vec<StoreRef>, Arc<Allocator>)> {
    let store = open_redb(volume, cache_bytes)?;
    store.create_journal(journal_of(volume))?;
    let stores = vec![store];
    let allocator = Allocator::of_volume(&stores, volume)?;
    Ok((stores, allocator))
}

/// Opens the stores without an allocator, for callers that cannot trust the bitmaps. The metadata region then grows only into its
/// spare chunks. Gives up the part of a journal after damage, and returns descriptions of the damage. With `repair` the
/// stores take commits, and a journal that cannot be read is made again.
pub(crate) fn open_stores_only(
    volume: &Volume,
    cache_bytes: usize,
    repair: bool,
) -> Result<(Vec<StoreRef>, Vec<String>)> {
    let store = open_redb(volume, cache_bytes)?;
    let recovered = store.recover(journal_of(volume), Damage::GiveUpRest)?;
    let damage = recovered.damage.clone().into_iter().collect();
    if repair {
        store.finish_recovery(recovered)?;
    }
    Ok((vec![store], damage))
}

/// Returns the place of the volume's journal.
fn journal_of(volume: &Volume) -> JournalPlace {
    let (first_block, blocks, uuid) = volume.superblocks().with(|s| {
        (
            s.head.journal_first_block.get(),
            s.head.journal_blocks.get(),
            s.head.volume_uuid,
        )
    });
    let device = volume.devices()[0].clone();
    JournalPlace {
        // Recovery flushes the device, which a volume that is open for reading must not do.
        device: match volume.read_only() {
            true => DeviceOverlay::over(device),
            false => device,
        },
        area: JournalArea {
            first_block,
            blocks,
        },
        volume: JournalVolume {
            uuid,
            // No file can have this name, so no listing of a directory shows its hash.
            secret: volume.hash_name(b"\0journal").to_le_bytes(),
        },
        slices_blocks: volume.slices().iter().map(|slice| slice.blocks).collect(),
    }
}

fn open_redb(volume: &Volume, cache_bytes: usize) -> Result<StoreRef> {
    let region = if volume.read_only() {
        // redb writes when it is opened, and more so after a crash. The overlay keeps these writes in memory.
        let views: Vec<_> = volume
            .devices()
            .iter()
            .map(|d| DeviceOverlay::over(d.clone()))
            .collect();
        let superblocks = Superblocks::read(views[0].clone()).map_err(|e| match e {
            ReadError::Io(error) => Error::Io(error),
            error => Error::Damaged(error.to_string()),
        })?;
        Region::new(views, Arc::new(superblocks))
    } else {
        let region = Region::new(volume.devices().to_vec(), volume.superblocks().clone());
        if let Err(error) = region.provision_all() {
            tracing::warn!("cannot allocate space for the metadata on the host: {error}");
        }
        region
    };
    let container_blocks = volume.superblocks().with(|s| s.head.container_blocks.get());
    let options = StoreOptions {
        cache_bytes,
        container_blocks,
    };
    Ok(Arc::new(Store::open(region, options, !volume.read_only())?))
}

#[cfg(test)]
mod recovery_tests;
#[cfg(test)]
pub(crate) mod tests;
