//! The superblock, of which each device has two copies. Reads the newest valid copies, and writes the older copy of each device.

use std::sync::Arc;

use jericho_format::PAGE_BYTES;
use jericho_format::superblock::{
    COPY_BYTES, COPY_FIRST_BLOCK, FLAG_DIRTY, OwnerRecord, Superblock, SuperblockError,
};
use jericho_storage::{Cause, Device, IoError};
use jericho_sys::errno::ENODEV;
use parking_lot::Mutex;
use zerocopy::{FromZeros, IntoBytes};

use crate::error::VolumeError;
use crate::labels::check_label;
use crate::merge::merge;
use crate::owner;

/// The superblock of an open volume. Every change is durable before `update` returns.
pub struct Superblocks {
    state: Mutex<State>,
}

struct State {
    /// By device index. Is shorter than the device table while the volume is being opened, and after an addition until the new device joins.
    devices: Vec<Arc<dyn Device>>,
    current: Superblock,
    /// The greatest sequence that any device may have.
    sequence: u64,
    /// The copy of each device that counts there; `None` until the first update. An update writes the other one.
    counting: Vec<Option<usize>>,
    /// The devices have their labels. Those of a volume that is being made get them last.
    have_labels: bool,
    /// An update has failed since `settle`: a device may have a superblock that is not the current one.
    has_failed: bool,
}

/// Why the superblock cannot be read.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ReadError {
    /// The device failed.
    #[error(transparent)]
    Io(#[from] IoError),
    /// Neither copy is valid.
    #[error("first copy: {0}; second copy: {1}")]
    Unusable(SuperblockError, SuperblockError),
}

/// Both copies on a device.
pub type Copies = [Result<Superblock, SuperblockError>; 2];

/// Reads both copies.
pub fn read_copies(device: &dyn Device) -> Result<Copies, IoError> {
    let read = |first_block: u64| {
        let mut bytes = vec![0; COPY_BYTES];
        device.read_at(first_block * PAGE_BYTES, &mut bytes)?;
        Ok::<_, IoError>(Superblock::decode(&bytes))
    };
    Ok([read(COPY_FIRST_BLOCK[0])?, read(COPY_FIRST_BLOCK[1])?])
}

/// Returns the newer of two valid copies, and which one it is.
fn newest(
    [first, second]: Copies,
) -> Result<(usize, Superblock), (SuperblockError, SuperblockError)> {
    // Such a copy has a right checksum, so it is not torn. The older one would let a version that does not know a feature use the volume.
    for copy in [&first, &second] {
        if let Err(error @ (SuperblockError::Features(_) | SuperblockError::Records(_))) = copy {
            return Err((error.clone(), error.clone()));
        }
    }
    match (first, second) {
        (Ok(a), Ok(b)) if a.head.sequence.get() >= b.head.sequence.get() => Ok((0, a)),
        (_, Ok(b)) => Ok((1, b)),
        (Ok(a), Err(_)) => Ok((0, a)),
        (Err(a), Err(b)) => Err((a, b)),
    }
}

/// Writes the copy of a device that does not count there, and returns which one it is. Reads the copies if `counting` is `None`.
fn write_other(
    device: &dyn Device,
    counting: Option<usize>,
    bytes: &[u8],
) -> Result<usize, IoError> {
    let counting = match counting {
        Some(copy) => copy,
        None => newest(read_copies(device)?).map_or(0, |(copy, _)| copy),
    };
    let other = 1 - counting;
    device.write_at(COPY_FIRST_BLOCK[other] * PAGE_BYTES, bytes)?;
    Ok(other)
}

/// Fails if a device of another host is not the one that the superblock names: its host may have been away, and may have come back with another disk.
fn check_identity(
    device: &Arc<dyn Device>,
    index: usize,
    superblock: &Superblock,
) -> Result<(), IoError> {
    let Some(entry) = superblock.devices.get(index) else {
        return Ok(());
    };
    if !device.may_fall_silent() {
        return Ok(());
    }
    match check_label(device, index, (&superblock.head.volume_uuid, entry)) {
        Ok(()) => Ok(()),
        Err(VolumeError::Io(error)) => Err(error),
        Err(error) => {
            tracing::error!("the superblock is not written: {error}");
            Err(IoError {
                operation: "write",
                device: device.name(),
                offset_bytes: COPY_FIRST_BLOCK[0] * PAGE_BYTES,
                length_bytes: COPY_BYTES as u64,
                cause: Cause::Errno(ENODEV),
            })
        }
    }
}

impl Superblocks {
    /// Reads the superblock on one device of a volume. Changes are written to this device only, until `over`.
    pub fn read(device: Arc<dyn Device>) -> Result<Superblocks, ReadError> {
        let copies = read_copies(&*device)?;
        let (_, current) = newest(copies).map_err(|(a, b)| ReadError::Unusable(a, b))?;
        Ok(Superblocks::new(vec![device], current, true))
    }

    /// Writes both copies of a new volume to all of its devices, which get their labels later. Not flushed.
    pub fn create(
        devices: Vec<Arc<dyn Device>>,
        superblock: Superblock,
    ) -> Result<Superblocks, IoError> {
        let bytes = superblock.encode();
        for device in &devices {
            for first_block in COPY_FIRST_BLOCK {
                device.write_at(first_block * PAGE_BYTES, &bytes)?;
            }
        }
        Ok(Superblocks::new(devices, superblock, false))
    }

    fn new(devices: Vec<Arc<dyn Device>>, current: Superblock, have_labels: bool) -> Superblocks {
        let counting = vec![None; devices.len()];
        Superblocks {
            state: Mutex::new(State {
                devices,
                sequence: current.head.sequence.get(),
                current,
                counting,
                have_labels,
                has_failed: false,
            }),
        }
    }

    /// Returns the superblock of the volume; `self` is that of the first device. Reads the copies of the other devices, and
    /// ignores a device without a usable copy. Fails if the copies contradict each other.
    pub(crate) fn joined(
        &self,
        devices: Vec<Arc<dyn Device>>,
    ) -> Result<Superblocks, SuperblockError> {
        let first = self.with(Superblock::clone);
        let read = |(index, device): (usize, &Arc<dyn Device>)| {
            if index == 0 {
                return Some(first.clone());
            }
            let (_, found) = newest(read_copies(&**device).ok()?).ok()?;
            (found.head.volume_uuid == first.head.volume_uuid).then_some(found)
        };
        let copies: Vec<_> = devices.iter().enumerate().map(read).collect();
        Ok(Superblocks::new(devices, merge(&first, &copies)?, true))
    }

    /// Returns the same superblock over all devices of the volume, by index, or over views of them. Reads and writes nothing.
    pub fn over(&self, devices: Vec<Arc<dyn Device>>) -> Superblocks {
        let (current, have_labels) = {
            let state = self.state.lock();
            (state.current.clone(), state.have_labels)
        };
        Superblocks::new(devices, current, have_labels)
    }

    /// Reads fields of the superblock.
    pub fn with<T>(&self, read: impl FnOnce(&Superblock) -> T) -> T {
        read(&self.state.lock().current)
    }

    /// Changes the superblock durably, on all devices that take it. Fails if a device in `needed` does not take it, or no device does.
    /// On an error memory keeps the old superblock, but after a crash the new one may count.
    ///
    /// `needed` has the devices whose copies count for the change (`merge`). Another device that misses the change keeps an older
    /// superblock, which is harmless.
    pub fn update(
        &self,
        needed: &[u16],
        change: impl FnOnce(&mut Superblock),
    ) -> Result<(), IoError> {
        let mut state = self.state.lock();
        let mut next = state.current.clone();
        change(&mut next);
        // `change` may have raised the sequence above those of a device that joins the volume.
        state.sequence = state.sequence.max(next.head.sequence.get()) + 1;
        next.head.sequence.set(state.sequence);
        let bytes = next.encode();
        let devices = state.devices.clone();
        let is_needed = |index: usize| needed.iter().any(|needed| usize::from(*needed) == index);
        // A device of a host that does not answer would keep all others waiting here.
        let takes = |(index, device): (usize, &Arc<dyn Device>)| {
            !device.is_absent() && (is_needed(index) || !device.is_silent())
        };
        let taking: Vec<bool> = devices.iter().enumerate().map(takes).collect();
        let write = |(index, device): (usize, &Arc<dyn Device>)| {
            taking[index].then(|| {
                if state.have_labels {
                    check_identity(device, index, &state.current)?;
                }
                write_other(&**device, state.counting[index], &bytes)
            })
        };
        let written: Vec<_> = devices.iter().enumerate().map(write).collect();
        let mut causes = vec![];
        for (index, (device, written)) in devices.iter().zip(written).enumerate() {
            let Some(written) = written else { continue };
            match written {
                Ok(copy) => match device.flush() {
                    Ok(()) => state.counting[index] = Some(copy),
                    Err(cause) => {
                        // After a failed flush the device may return the new copy now and lose it later. So the next update
                        // writes the same copy again.
                        state.counting[index] = Some(1 - copy);
                        causes.push((index, cause));
                    }
                },
                Err(cause) => causes.push((index, cause)),
            }
        }
        let missing = devices.iter().enumerate();
        let mut missing = missing.filter(|(index, device)| is_needed(*index) && device.is_absent());
        if let Some((_, missing)) = missing.next() {
            state.has_failed = true;
            missing.flush()?;
        }
        let are_all = causes.len() == taking.iter().filter(|takes| **takes).count();
        if let Some(at) = causes
            .iter()
            .position(|(index, _)| are_all || is_needed(*index))
        {
            state.has_failed = true;
            return Err(causes.swap_remove(at).1);
        }
        for (index, cause) in causes {
            let name = devices[index].name();
            tracing::warn!("the superblock on {name} is out of date: {cause}");
        }
        state.current = next;
        Ok(())
    }

    /// Writes the superblock also to a device that was missing, from the next update on. The caller has checked that they agree.
    pub fn put_back(&self, index: usize, device: &Arc<dyn Device>) -> Result<(), IoError> {
        let copies = read_copies(&**device)?;
        let sequences = copies.iter().flatten().map(|copy| copy.head.sequence.get());
        let mut state = self.state.lock();
        // The next update must be newer than each copy there.
        state.sequence = sequences.fold(state.sequence, u64::max);
        state.devices[index] = device.clone();
        state.counting[index] = None;
        Ok(())
    }

    /// Undoes `put_back`. `missing` stands for the device.
    pub fn take_away(&self, index: usize, missing: &Arc<dyn Device>) {
        let mut state = self.state.lock();
        state.devices[index] = missing.clone();
        state.counting[index] = None;
    }

    /// Returns whether a device that was missing has the same parts of the volume as this superblock. It has others if its slices have changed them
    /// while another device missed it.
    pub(crate) fn agrees_with(
        &self,
        index: usize,
        device: &Arc<dyn Device>,
    ) -> Result<bool, IoError> {
        let Ok((_, found)) = newest(read_copies(&**device)?) else {
            return Ok(false);
        };
        let current = self.with(Superblock::clone);
        if found.head.volume_uuid != current.head.volume_uuid {
            return Ok(false);
        }
        let mut copies = vec![Some(current.clone()); current.devices.len()];
        let Some(own) = copies.get_mut(index) else {
            return Ok(false);
        };
        *own = Some(found);
        let merged = merge(&current, &copies);
        Ok(merged.is_ok_and(|merged| has_same_parts(&merged, &current)))
    }

    /// Writes further changes to a device that was added, too. The superblock names it durably.
    pub(crate) fn join(&self, device: Arc<dyn Device>) {
        let mut state = self.state.lock();
        state.devices.push(device);
        state.counting.push(None);
    }

    /// Makes the superblock the only one that a mount can find on the first device, also if updates have failed.
    pub(crate) fn settle(&self) -> Result<(), IoError> {
        if self.state.lock().has_failed {
            self.update(&[0], |_| {})?;
            self.state.lock().has_failed = false;
        }
        Ok(())
    }

    /// Durably sets or clears the dirty flag with the owner record.
    pub fn set_dirty(&self, dirty: bool) -> Result<(), IoError> {
        let owner = if dirty {
            owner::record(&self.with(|s| s.head.hash_seed))
        } else {
            OwnerRecord::new_zeroed()
        };
        if self.is_dirty() == dirty && self.with(|s| s.head.owner == owner) {
            return Ok(());
        }
        // A mount needs the first device, so it learns of an earlier mount that did not end cleanly.
        self.update(&[0], |s| {
            let flags = s.head.flags.get();
            s.head.owner = owner;
            s.head.flags.set(if dirty {
                flags | FLAG_DIRTY
            } else {
                flags & !FLAG_DIRTY
            });
        })
    }

    /// Returns whether the dirty flag is set.
    pub fn is_dirty(&self) -> bool {
        self.with(|s| s.head.flags.get() & FLAG_DIRTY != 0)
    }
}

/// Returns whether two superblocks give the slices the same space, journals and chunks of metadata, in whatever order.
fn has_same_parts(one: &Superblock, other: &Superblock) -> bool {
    let parts = |superblock: &Superblock| {
        let slices: Vec<_> = superblock
            .slices
            .iter()
            .map(|slice| {
                let regions = superblock.regions_of(slice).iter();
                let regions: Vec<_> = regions.map(|region| region.as_bytes().to_vec()).collect();
                let journal = (
                    slice.journal_first_block.get(),
                    slice.journal_blocks.get(),
                    slice.store_blocks.get(),
                );
                (slice.blocks.get(), journal, regions)
            })
            .collect();
        let mut chunks: Vec<_> = superblock
            .chunks
            .iter()
            .map(|chunk| chunk.as_bytes().to_vec())
            .collect();
        chunks.sort_unstable();
        let blocks: Vec<_> = superblock
            .devices
            .iter()
            .map(|device| device.blocks.get())
            .collect();
        (slices, chunks, blocks)
    };
    parts(one) == parts(other)
}
