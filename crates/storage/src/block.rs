//! A device on a block device.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use jericho_sys::block::{self, Open};
use jericho_sys::errno;

use crate::handle::{Handle, Kind, Opened};
use crate::opening::{self, OpenError, OpenOptions};
use crate::{BLOCK_BYTES, Device, DiscardEffect, IoError};

/// A whole disk, a partition, or any other block device, with direct I/O.
///
/// A device opened for writing is held exclusively. The open fails while the device is mounted, used as swap, or held by another
/// volume. While the device is open, no process can mount it, use it as swap or hold it for another volume. After a failed flush
/// every later one fails, as for a regular file.
#[derive(Debug)]
struct WholeDevice {
    can_discard: bool,
}

/// Opens the block device at `path`. `create_size` is the required minimum size.
pub(crate) fn open(path: &Path, options: OpenOptions) -> Result<Arc<dyn Device>, OpenError> {
    let write = !options.read_only;
    let how = Open {
        write,
        exclusive: write,
        ..Open::default()
    };
    let (file, is_direct) = opening::open_direct(path, how)?;
    let metadata = file
        .metadata()
        .map_err(opening::failed(path, "examine it"))?;
    if !metadata.file_type().is_block_device() {
        return Err(opening::wrong_kind(path, metadata.file_type()));
    }
    let size_bytes =
        block::device_size_bytes(&file).map_err(opening::failed(path, "find out its size"))?;
    let sector_bytes = block::logical_block_bytes(&file)
        .map_err(opening::failed(path, "find out its sector size"))?;
    if u64::from(sector_bytes) > BLOCK_BYTES {
        return Err(OpenError::Sectors {
            path: path.to_path_buf(),
            sector_bytes,
        });
    }
    let disk = metadata.rdev();
    Ok(Arc::new(Opened {
        handle: Handle::new(
            path,
            (file, is_direct),
            &metadata,
            disk,
            size_bytes,
            options,
        )?,
        kind: WholeDevice {
            can_discard: block::can_discard(disk),
        },
    }))
}

impl Kind for WholeDevice {
    const NAME: &'static str = "block device";
    const DISCARD_MAKES_ZEROS: bool = false;

    /// Discards sectors. Later reads of them return what the device chooses.
    fn discard(&self, handle: &Handle, range: Range<u64>) -> Result<(), IoError> {
        handle.run_on_range("discard", range, |file, at, len| {
            block::discard_device(file, at, len)
        })
    }

    fn discard_effect(&self) -> DiscardEffect {
        match self.can_discard {
            true => DiscardEffect::FreesBlocks,
            false => DiscardEffect::Nothing,
        }
    }

    fn present_bytes(&self, file: &File) -> io::Result<u64> {
        block::device_size_bytes(file)
    }

    /// Succeeds if the device has become large enough: only its owner can make it larger.
    fn extend(&self, file: &File, size_bytes: u64, _: Option<u64>) -> io::Result<()> {
        match self.present_bytes(file)? >= size_bytes {
            true => Ok(()),
            false => Err(io::Error::from_raw_os_error(errno::EOPNOTSUPP)),
        }
    }
}
