//! Opens the metadata stores and the allocator of a volume.

mod again;

use std::sync::Arc;

use jericho_format::superblock::{CHUNK_BY_FORMAT, ChunkEntry};
use jericho_journal::{JournalArea, JournalVolume};
use jericho_storage::Device;
use jericho_volume::{DeviceOverlay, SliceSpace, Volume};

use crate::alloc::{Allocator, SpaceOptions};
use crate::error::{Error, Result};
use crate::shard::ShardId;
use crate::store::recovery::{Damage, JournalPlace, Recovered};
use crate::store::region::Region;
use crate::store::{Requirement, Store, StoreOptions, StoreRef};

pub use again::open_again;

/// Least memory of a store.
const STORE_CACHE_BYTES_MIN: usize = 1 << 20;

/// Opens the metadata stores, one for each shard, with `cache_bytes` of memory together, and the allocator over them.
pub fn open(volume: &Volume, cache_bytes: usize) -> Result<(Vec<StoreRef>, Arc<Allocator>)> {
    let damage = match volume.read_only() {
        true => Damage::GiveUpRest,
        false => Damage::Refuse,
    };
    let (stores, recovered) = recover(volume, cache_bytes, damage)?;
    for damage in recovered.iter().flatten().filter_map(|r| r.damage.as_ref()) {
        tracing::warn!("{damage}; the volume shows its state before the damage");
    }
    let allocator = Allocator::of_volume(&stores, volume)?;
    if !volume.read_only() {
        // After the allocator, which can add space to the metadata regions.
        finish(&stores, recovered)?;
    }
    for (shard, store) in allocator.shards().all().iter().zip(&stores) {
        if !store.is_absent() {
            load_images(store, &allocator, shard, volume.has_checksums())?;
        }
    }
    Ok((stores, allocator))
}

/// Runs `act` for all stores at the same time. Returns the results in the order of the stores, or the first error.
fn for_each_store<I: Send, T: Send>(
    items: impl IntoIterator<Item = I>,
    act: impl Fn(usize, I) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let act = &act;
    std::thread::scope(|scope| {
        let run = |(store, item)| scope.spawn(move || act(store, item));
        let threads: Vec<_> = items.into_iter().enumerate().map(run).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<T>>| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        // Joins all threads, so that the error of one does not hide the panic of another.
        let results: Vec<Result<T>> = threads.into_iter().map(join).collect();
        results.into_iter().collect()
    })
}

/// Opens the stores and reads their journals. Puts the batches that count into memory: a batch that requires others counts only if
/// these are there. Writes nothing to the journals. Recovers nothing of a store whose device is missing.
///
/// If the last batch of a store requires one of a missing store, the store shows its batch and takes no changes: it is unknown whether
/// the missing store has the required batch.
fn recover(
    volume: &Volume,
    cache_bytes: usize,
    damage: Damage,
) -> Result<(Vec<StoreRef>, Vec<Option<Recovered>>)> {
    let count = volume.superblocks().with(|s| s.stores());
    let cache_bytes = (cache_bytes / count).max(STORE_CACHE_BYTES_MIN);
    let opened = for_each_store(0..count, |_, store| {
        let missing = (volume.slices().get(store)).and_then(|slice| volume.missing_of(slice));
        if let Some(error) = missing.and_then(|device| device.flush().err()) {
            let container_blocks = volume.superblocks().with(|s| s.head.container_blocks.get());
            let options = StoreOptions {
                cache_bytes,
                container_blocks,
            };
            let journal = journal_of(volume, volume.devices(), store);
            let absent = Store::absent(error.into(), options, journal.area)?;
            return Ok((absent.into(), None));
        }
        let opened = open_redb(volume, volume.devices(), cache_bytes, store)?;
        let recovered = opened.recover(journal_of(volume, volume.devices(), store), damage)?;
        Ok((opened.into(), Some(recovered)))
    })?;
    let (stores, mut recovered): (Vec<_>, Vec<_>) = opened.into_iter().unzip();
    // Judges all batches before it drops the first one.
    let mut verdicts = Vec::new();
    for recovered_of in recovered.iter().flatten() {
        verdicts.push(match judge(&stores, &recovered, recovered_of)? {
            Verdict::Unknown(Error::Journal(_)) if damage == Damage::GiveUpRest => Verdict::Drop,
            verdict => verdict,
        });
    }
    let present = stores.iter().zip(recovered.iter_mut());
    let present = present.filter_map(|(store, recovered)| Some((store, recovered.as_mut()?)));
    for ((store, recovered), verdict) in present.zip(verdicts) {
        store.decide(recovered, !matches!(verdict, Verdict::Drop))?;
        if let Verdict::Unknown(error) = verdict {
            tracing::error!(
                "{error}; a slice whose last operation depends on this takes no changes"
            );
            store.fail(error);
        }
    }
    for (store, recovered) in stores.iter().zip(&recovered) {
        if let Some(recovered) = recovered {
            store.note_past(recovered)?;
        }
    }
    Ok((stores, recovered))
}

/// What becomes of the last batch of a journal.
enum Verdict {
    Keep,
    Drop,
    /// It is unknown whether a batch that the last one requires is there.
    Unknown(Error),
}

/// Decides about the last batch of a journal: it counts if all batches that it requires are there.
fn judge(stores: &[StoreRef], all: &[Option<Recovered>], recovered: &Recovered) -> Result<Verdict> {
    let mut verdict = Verdict::Keep;
    for required in recovered.requires() {
        let at = usize::from(required.store);
        match all.get(at) {
            Some(Some(other)) => match stores[at].has(other, required)? {
                Some(true) => {}
                Some(false) => return Ok(Verdict::Drop),
                None => {
                    let what = format!(
                        "the last operation of a slice also changed slice {at}, too many mounts ago to know whether slice {at} has its part; run \
                         jericho check --repair, which undoes the operation"
                    );
                    verdict = Verdict::Unknown(Error::Journal(what.into()));
                }
            },
            Some(None) => {
                if let Err(error) = stores[at].check() {
                    verdict = Verdict::Unknown(error);
                }
            }
            _ => return Ok(Verdict::Drop),
        }
    }
    Ok(verdict)
}

/// Makes the recovered batches durable in the stores, and empties the journals. Skips stores that take no changes.
fn finish(stores: &[StoreRef], recovered: Vec<Option<Recovered>>) -> Result<()> {
    let finish = |at: usize, recovered: Option<Recovered>| match recovered {
        Some(recovered) if stores[at].check().is_ok() => stores[at].finish_recovery(recovered),
        _ => Ok(()),
    };
    for_each_store(recovered, finish).map(drop)
}

/// Makes each image of a shard live whose block belongs to a file. Call it before anything reads the blocks of the shard's slices. The first batch
/// removes the other images: their files were removed just before the end of the last mount, or never durable.
pub fn load_images(
    store: &Store,
    allocator: &Allocator,
    shard: ShardId,
    has_checksums: bool,
) -> Result<()> {
    let container_blocks = u64::from(store.container_blocks());
    let logged = allocator.logged_of(shard);
    logged.set_max(store.images_max());
    if has_checksums {
        logged.wait_for_batch();
    }
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
pub fn create(volume: &Volume, cache_bytes: usize) -> Result<(Vec<StoreRef>, Arc<Allocator>)> {
    let count = volume.superblocks().with(|s| s.stores());
    let stores = for_each_store(0..count, |_, store| {
        let opened = open_redb(volume, volume.devices(), cache_bytes, store)?;
        opened.create_journal(journal_of(volume, volume.devices(), store))?;
        Ok(opened.into())
    })?;
    let allocator = Allocator::of_volume(&stores, volume)?;
    Ok((stores, allocator))
}

/// Makes the metadata stores and the journals of slices that are added to a volume.
pub fn create_added(
    volume: &Volume,
    cache_bytes: usize,
    stores: std::ops::Range<usize>,
) -> Result<()> {
    for store in stores {
        let opened = open_redb(volume, volume.devices(), cache_bytes, store)?;
        opened.create_journal(journal_of(volume, volume.devices(), store))?;
        opened.close()?;
    }
    Ok(())
}

/// Opens the store of a slice that was added to an open volume and has never been in use. `cache_bytes` is its memory.
pub fn open_added(volume: &Volume, cache_bytes: usize, store: usize) -> Result<StoreRef> {
    let cache_bytes = cache_bytes.max(STORE_CACHE_BYTES_MIN);
    let opened = open_redb(volume, volume.devices(), cache_bytes, store)?;
    let mut recovered =
        opened.recover(journal_of(volume, volume.devices(), store), Damage::Refuse)?;
    opened.decide(&mut recovered, true)?;
    opened.finish_recovery(recovered)?;
    Ok(opened.into())
}

/// Recovers the stores of slices whose device has come back, as a mount does. `devices` has this device in its place, and `others_have` tells whether another
/// store has a batch. Fails if only a mount can decide about a last batch. Writes nothing before all last batches are judged.
pub fn open_returned(
    volume: &Volume,
    devices: &[Arc<dyn Device>],
    cache_bytes: usize,
    stores: &[usize],
    others_have: &dyn Fn(&Requirement) -> Option<bool>,
) -> Result<Vec<Store>> {
    let cache_bytes = cache_bytes.max(STORE_CACHE_BYTES_MIN);
    let mut opened = Vec::new();
    for store in stores {
        let place = journal_of(volume, devices, *store);
        let returned = open_redb(volume, devices, cache_bytes, *store)?;
        let recovered = returned.recover(place, Damage::Refuse)?;
        opened.push((*store, returned, recovered));
    }
    let has = |required: &Requirement| -> Result<Option<bool>> {
        let at = usize::from(required.store);
        if let Some((_, store, recovered)) = opened.iter().find(|(store, ..)| *store == at) {
            return store.has(recovered, required);
        }
        Ok(others_have(required))
    };
    let mut verdicts = Vec::new();
    for (store, _, recovered) in &opened {
        let mut counts = true;
        for required in recovered.requires() {
            counts &= has(required)?.ok_or_else(|| {
                let what = format!(
                    "the last operation of slice {store} also changed slice {}, and only a mount can tell whether that one has its part",
                    required.store
                );
                Error::Journal(what.into())
            })?;
        }
        verdicts.push(counts);
    }
    let mut stores = Vec::new();
    for ((_, store, mut recovered), counts) in opened.into_iter().zip(verdicts) {
        store.decide(&mut recovered, counts)?;
        store.note_past(&recovered)?;
        store.finish_recovery(recovered)?;
        stores.push(store);
    }
    Ok(stores)
}

/// Returns what the allocator has to know of a slice.
pub fn space_options(volume: &Volume, slice: &SliceSpace) -> SpaceOptions {
    let own = |chunk: &&ChunkEntry| {
        // Chunks that format made are in no slice.
        chunk.slice.get() == slice.id && chunk.slice_first.get() != CHUNK_BY_FORMAT
    };
    let first = |chunk: &ChunkEntry| chunk.slice_first.get();
    SpaceOptions {
        is_absent: volume.missing_of(slice).is_some(),
        chunks: (volume.superblocks()).with(|s| s.chunks.iter().filter(own).map(first).collect()),
        ..SpaceOptions::from(slice)
    }
}

/// Opens the stores without an allocator, for callers that cannot trust the bitmaps. A metadata region then grows only into its
/// spare chunks. Gives up the part of a journal after damage, and returns descriptions of the damage. With `repair` makes the
/// stores take commits, and creates a new journal in place of one that cannot be read.
pub fn open_stores_only(
    volume: &Volume,
    cache_bytes: usize,
    repair: bool,
) -> Result<(Vec<StoreRef>, Vec<String>)> {
    let (stores, recovered) = recover(volume, cache_bytes, Damage::GiveUpRest)?;
    let damage = recovered.iter().flatten();
    let damage = damage.filter_map(|r| r.damage.clone()).collect();
    if repair {
        finish(&stores, recovered)?;
    }
    Ok((stores, damage))
}

/// Returns the place of a store's journal.
fn journal_of(volume: &Volume, devices: &[Arc<dyn Device>], store: usize) -> JournalPlace {
    let (device, first_block, blocks) = volume.superblocks().with(|s| {
        let slice = &s.slices[store];
        let device = s.first_device_of(slice).unwrap_or(0);
        let blocks = slice.journal_blocks.get();
        (device, slice.journal_first_block.get(), blocks)
    });
    let device = devices[usize::from(device)].clone();
    JournalPlace {
        store: store as u16,
        // Recovery flushes the device, which a volume that is open for reading must not do.
        device: match volume.read_only() {
            true => DeviceOverlay::over(device),
            false => device,
        },
        area: JournalArea {
            first_block,
            blocks: blocks.into(),
        },
        volume: JournalVolume {
            uuid: volume.uuid(),
            // No file can have this name, so no listing of a directory shows its hash.
            secret: volume.hash_name(b"\0journal").to_le_bytes(),
        },
        slices_blocks: volume.slices().iter().map(|slice| slice.blocks).collect(),
    }
}

/// Returns the metadata regions of the stores over views of the devices, for a check of their bytes. `view` makes the views for a
/// region, and a value that is returned with the region.
pub fn regions<T>(
    volume: &Volume,
    view: impl Fn(&[Arc<dyn Device>]) -> (Vec<Arc<dyn Device>>, T),
) -> Vec<(Arc<Region>, T)> {
    let count = volume.superblocks().with(|s| s.stores());
    let region = |store| {
        let (views, with) = view(volume.devices());
        let superblocks = volume.superblocks().clone();
        (Region::new(views, superblocks, store), with)
    };
    (0..count).map(region).collect()
}

/// Returns the places of the journals of all stores.
pub fn journals(volume: &Volume) -> impl Iterator<Item = JournalPlace> {
    let count = volume.superblocks().with(|s| s.stores());
    (0..count).map(|store| journal_of(volume, volume.devices(), store))
}

/// Opens a store without its journal.
fn open_redb(
    volume: &Volume,
    devices: &[Arc<dyn Device>],
    cache_bytes: usize,
    store: usize,
) -> Result<Store> {
    let region = if volume.read_only() {
        // redb writes when it is opened, most after a crash. The overlay keeps these writes in memory.
        let over = |device: &Arc<dyn Device>| DeviceOverlay::over(device.clone());
        let views: Vec<_> = devices.iter().map(over).collect();
        let superblocks = volume.superblocks().over(views.clone());
        Region::new(views, Arc::new(superblocks), store)
    } else {
        let superblocks = volume.superblocks().clone();
        let region = Region::new(devices.to_vec(), superblocks, store);
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
    let opened = Store::open(region.clone(), options, !volume.read_only());
    // redb's error does not say that a host was away.
    let unreachable = || region.last_error().filter(Error::is_unreachable);
    opened.map_err(|error| unreachable().unwrap_or(error))
}

#[cfg(test)]
mod tests;
