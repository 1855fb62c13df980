//! The superblock on the first device. Reads the newer valid copy, and writes the other one.

use std::sync::Arc;

use jericho_format::PAGE_BYTES;
use jericho_format::superblock::{
    COPY_BYTES, COPY_FIRST_BLOCK, FLAG_DIRTY, OwnerRecord, Superblock, SuperblockError,
};
use jericho_storage::{Device, IoError};
use parking_lot::Mutex;
use zerocopy::FromZeros;

use crate::owner;

/// The superblock of an open volume. Every change is durable before `update` returns.
pub struct Superblocks {
    device: Arc<dyn Device>,
    current: Mutex<Superblock>,
}

/// The reason why the superblock cannot be read.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ReadError {
    /// The device failed.
    #[error(transparent)]
    Io(#[from] IoError),
    /// Neither copy is valid.
    #[error("first copy: {0}; second copy: {1}")]
    Unusable(SuperblockError, SuperblockError),
}

/// Both copies on the device, for `check`.
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

impl Superblocks {
    /// Reads the superblock of the volume whose first device this is.
    pub fn read(device: Arc<dyn Device>) -> Result<Superblocks, ReadError> {
        let current = match read_copies(&*device)? {
            [Ok(a), Ok(b)] if a.head.sequence.get() >= b.head.sequence.get() => a,
            [Ok(_), Ok(b)] => b,
            [Ok(one), Err(_)] | [Err(_), Ok(one)] => one,
            [Err(a), Err(b)] => return Err(ReadError::Unusable(a, b)),
        };
        Ok(Superblocks {
            device,
            current: Mutex::new(current),
        })
    }

    /// Writes both copies of a new volume. Not flushed.
    pub fn create(device: Arc<dyn Device>, superblock: Superblock) -> Result<Superblocks, IoError> {
        let bytes = superblock.encode();
        for first_block in COPY_FIRST_BLOCK {
            device.write_at(first_block * PAGE_BYTES, &bytes)?;
        }
        Ok(Superblocks {
            device,
            current: Mutex::new(superblock),
        })
    }

    /// Reads fields of the superblock.
    pub fn with<T>(&self, read: impl FnOnce(&Superblock) -> T) -> T {
        read(&self.current.lock())
    }

    /// Changes the superblock durably. On an error memory keeps the old superblock. The device also still has the old copy, but
    /// after a crash the new copy may be the valid one.
    pub fn update(&self, change: impl FnOnce(&mut Superblock)) -> Result<(), IoError> {
        let mut current = self.current.lock();
        let mut next = current.clone();
        change(&mut next);
        let sequence = current.head.sequence.get() + 1;
        next.head.sequence.set(sequence);
        // Chooses the copy with the older sequence: sequences alternate between the copies, and format writes the first
        // sequence to both.
        let first_block = COPY_FIRST_BLOCK[(sequence % 2) as usize];
        self.device
            .write_at(first_block * PAGE_BYTES, &next.encode())?;
        self.device.flush()?;
        *current = next;
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
        self.update(|s| {
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
