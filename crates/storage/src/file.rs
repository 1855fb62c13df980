//! A device on a regular file.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use jericho_sys::block::{self, Open};
use jericho_sys::errno;
use jericho_sys::files::size_limit;

use crate::aligned::AlignedBuffer;
use crate::handle::{Handle, Kind, Opened};
use crate::opening::{self, OpenError, OpenOptions};
use crate::{BLOCK_BYTES, Device, DiscardEffect, Extent, IoError, ZEROS_BYTES_MAX};

/// A regular file as a device. Uses direct I/O if the filesystem supports it, else the page cache.
///
/// After a failed flush every later one fails with the same cause, because the kernel no longer knows which data was lost.
#[derive(Debug)]
struct RegularFile;

/// Opens the file at `path`. With `create_size`, creates or resizes it. Removes a file that it created if a later step fails.
pub(crate) fn open(path: &Path, options: OpenOptions) -> Result<Arc<dyn Device>, OpenError> {
    let write = !options.read_only;
    let creates = write && options.create_size.is_some_and(|size| size >= BLOCK_BYTES);
    if !creates {
        return open_existing(path, options);
    }
    match create(path)? {
        true => open_existing(path, options).inspect_err(|_| {
            if let Err(error) = std::fs::remove_file(path) {
                tracing::warn!(path = %path.display(), %error, "cannot remove the new file");
            }
        }),
        false if options.create_new => Err(OpenError::Exists { path: path.into() }),
        false => open_existing(path, options),
    }
}

fn open_existing(path: &Path, options: OpenOptions) -> Result<Arc<dyn Device>, OpenError> {
    let how = Open {
        write: !options.read_only,
        ..Open::default()
    };
    let (file, is_direct) = opening::open_direct(path, how)?;
    let metadata = file
        .metadata()
        .map_err(opening::failed(path, "examine it"))?;
    if !metadata.is_file() {
        return Err(opening::wrong_kind(path, metadata.file_type()));
    }
    let mut size_bytes = metadata.len();
    if let Some(size) = options
        .create_size
        .filter(|size| how.write && *size >= BLOCK_BYTES)
    {
        resize(&file, size_bytes, size).map_err(opening::failed(path, "set its size"))?;
        size_bytes = size;
    }
    let disk = metadata.dev();
    Ok(Arc::new(Opened {
        handle: Handle::new(
            path,
            (file, is_direct),
            &metadata,
            disk,
            size_bytes,
            options,
        )?,
        kind: RegularFile,
    }))
}

/// Creates an empty file durably. Returns false when the path exists already.
fn create(path: &Path) -> Result<bool, OpenError> {
    let how = Open {
        write: true,
        create_new: true,
        ..Open::default()
    };
    match block::open(path, how) {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(false),
        Err(error) => return Err(opening::failed(path, "create it")(error)),
    }
    // The name must survive a power failure. Otherwise all data flushed later is lost with it.
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let synced = File::open(parent).and_then(|directory| directory.sync_all());
    if let Err(error) = synced {
        tracing::warn!(path = %parent.display(), %error, "cannot flush the directory");
    }
    Ok(true)
}

fn resize(file: &File, old_bytes: u64, new_bytes: u64) -> io::Result<()> {
    if old_bytes != new_bytes {
        file.set_len(new_bytes)?;
    }
    file.sync_all()
}

impl Kind for RegularFile {
    const NAME: &'static str = "regular file";
    const DISCARD_MAKES_ZEROS: bool = true;

    /// Punches a hole. The range reads as zeros afterwards, and writes to it may need space again.
    fn discard(&self, handle: &Handle, range: Range<u64>) -> Result<(), IoError> {
        handle.run_on_range("discard", range, |file, at, len| {
            block::punch_hole(file, at, len)
        })
    }

    fn discard_effect(&self) -> DiscardEffect {
        DiscardEffect::FreesSpace
    }

    /// A block that has storage for some of its bytes, on a filesystem with smaller blocks, is no hole.
    fn extent_at(&self, file: &File, range: Range<u64>) -> io::Result<Extent> {
        let (start, end_max) = (range.start, range.end);
        let extent = |end: u64, is_hole| Extent {
            length_bytes: end.clamp(start + BLOCK_BYTES, end_max) - start,
            is_hole,
        };
        let (is_data, end) = block::run_at(file, start)?;
        if is_data {
            return Ok(extent(end.next_multiple_of(BLOCK_BYTES), false));
        }
        let hole_end = end - end % BLOCK_BYTES;
        if hole_end > start {
            return Ok(extent(hole_end, true));
        }
        let (_, end) = block::run_at(file, end)?;
        Ok(extent(end.next_multiple_of(BLOCK_BYTES), false))
    }

    fn provision(&self, handle: &Handle, range: Range<u64>) -> Result<(), IoError> {
        handle.run_on_range("provision", range, |file, at, len| {
            block::allocate(file, at, len)
        })
    }

    fn present_bytes(&self, file: &File) -> io::Result<u64> {
        Ok(file.metadata()?.len())
    }

    fn extend(&self, file: &File, size_bytes: u64, allocate_from: Option<u64>) -> io::Result<()> {
        let length = file.metadata()?.len();
        let extended = (|| {
            if length < size_bytes {
                if size_limit().is_some_and(|limit| limit < size_bytes) {
                    return Err(io::Error::from_raw_os_error(errno::EFBIG));
                }
                file.set_len(size_bytes)?;
            }
            match allocate_from {
                Some(from) if from < size_bytes => allocate(file, from..size_bytes),
                _ => Ok(()),
            }
        })();
        if extended.is_err() && length < size_bytes {
            // Returns the space that was allocated before the failure, too.
            if let Err(error) = file.set_len(length) {
                tracing::warn!(length, %error, "cannot give the file its earlier length");
            }
        }
        extended
    }
}

/// Allocates space for a range that holds nothing of value. Writes zeros if the host allocates only by writing.
fn allocate(file: &File, range: Range<u64>) -> io::Result<()> {
    match block::allocate(file, range.start, range.end - range.start) {
        Err(error) if error.raw_os_error() == Some(errno::EOPNOTSUPP) => {}
        allocated => return allocated,
    }
    let zeros = AlignedBuffer::new(ZEROS_BYTES_MAX.min(range.end - range.start) as usize);
    let mut at = range.start;
    while at < range.end {
        let run = ZEROS_BYTES_MAX.min(range.end - at) as usize;
        file.write_all_at(&zeros.as_slice()[..run], at)?;
        at += run as u64;
    }
    Ok(())
}
