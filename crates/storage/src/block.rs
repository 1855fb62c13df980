//! A device on a block device.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use jericho_sys::block::{self, Open};

use crate::flush::Flusher;
use crate::handle::Handle;
use crate::open::{self, OpenError, OpenOptions};
use crate::{BLOCK_BYTES, Device, IoError, TakesBack};

/// A whole disk, a partition, or any other block device, with direct I/O.
///
/// A device opened for writing is held exclusively. Opening fails while it is mounted, used as swap, or held by another volume;
/// while it is open, these fail. A failed flush is kept, as for a `FileDevice`.
#[derive(Debug)]
pub struct BlockDevice {
    handle: Handle,
    can_discard: bool,
}

impl BlockDevice {
    /// Opens the block device at `path`. `create_size` is the required minimum size.
    pub fn open(path: &Path, options: OpenOptions) -> Result<Arc<dyn Device>, OpenError> {
        let write = !options.read_only;
        let how = Open {
            write,
            exclusive: write,
            ..Open::default()
        };
        let (file, is_direct) = open::open_direct(path, how)?;
        let metadata = file.metadata().map_err(open::failed(path, "examine it"))?;
        if !metadata.file_type().is_block_device() {
            return Err(open::wrong_kind(path, metadata.file_type()));
        }
        let size_bytes =
            block::device_size_bytes(&file).map_err(open::failed(path, "find out its size"))?;
        let sector_bytes = block::logical_block_bytes(&file)
            .map_err(open::failed(path, "find out its sector size"))?;
        if u64::from(sector_bytes) > BLOCK_BYTES {
            return Err(OpenError::Sectors {
                path: path.to_path_buf(),
                sector_bytes,
            });
        }
        let wanted_bytes = options.create_size.unwrap_or(BLOCK_BYTES);
        let handle = Handle {
            name: path.to_string_lossy().into(),
            size_bytes: open::usable_size(path, size_bytes, wanted_bytes)?,
            is_direct,
            is_read_only: options.read_only,
            needs_stable_writes: is_direct && block::needs_stable_writes(&file, &metadata),
            home_node: options
                .home_node
                .or_else(|| block::home_node(metadata.rdev())),
            flusher: Flusher::default(),
            file,
        };
        let can_discard = block::can_discard(metadata.rdev());
        Ok(Arc::new(BlockDevice {
            handle,
            can_discard,
        }))
    }
}

impl Device for BlockDevice {
    fn name(&self) -> Arc<str> {
        Arc::clone(&self.handle.name)
    }

    fn size_bytes(&self) -> u64 {
        self.handle.size_bytes
    }

    fn home_node(&self) -> Option<u32> {
        self.handle.home_node
    }

    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> Result<(), IoError> {
        self.handle.read_at(offset_bytes, buf)
    }

    fn write_at(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        self.handle.write_at(offset_bytes, buf)
    }

    fn flush(&self) -> Result<(), IoError> {
        self.handle.flush()
    }

    /// Discards sectors. Later reads of them return what the device chooses.
    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        self.handle
            .give_or_take("discard", offset_bytes, length_bytes, |file| {
                block::discard_device(file, offset_bytes, length_bytes)
            })
    }

    fn takes_back(&self) -> TakesBack {
        match self.can_discard && !self.handle.is_read_only {
            true => TakesBack::Blocks,
            false => TakesBack::Nothing,
        }
    }

    fn is_read_only(&self) -> bool {
        self.handle.is_read_only
    }

    fn needs_stable_writes(&self) -> bool {
        self.handle.needs_stable_writes
    }

    fn queue_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.handle.file.as_fd())
    }

    fn describe(&self) -> String {
        self.handle.describe("block device")
    }
}
