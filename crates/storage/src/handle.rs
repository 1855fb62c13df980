//! An open file or block device: the code that both kinds of devices share.

use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use jericho_sys::doorbell::Doorbell;
use jericho_sys::errno;
use jericho_sys::uring::Ring;
use jericho_sys::{block, queued_write};

use crate::aligned::{AlignedBuffer, is_aligned};
use crate::durable::{Attempt, DurableError, write_durable};
use crate::flush::Flusher;
use crate::opening::{self, OpenError, OpenOptions};
use crate::{BLOCK_BYTES, Cause, Device, DiscardEffect, Extent, IoError};

/// Transfers from unaligned memory go through a bounce buffer of at most this size.
const BOUNCE_BYTES_MAX: usize = 1 << 20;

/// Smallest sector. A transfer that ends inside a sector met the end of the file.
pub(crate) const SECTOR_BYTES: u64 = 512;

#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) name: Arc<str>,
    pub(crate) file: File,
    /// A multiple of `BLOCK_BYTES`. Grows only.
    size_bytes: AtomicU64,
    pub(crate) is_direct: bool,
    pub(crate) is_read_only: bool,
    /// False with buffered I/O: the kernel then writes from its own copy.
    pub(crate) needs_stable_writes: bool,
    /// How one system call writes durably, at the cost of one write and at most one flush of the hardware, if there is a way.
    durable_writes: Option<DurableWrites>,
    pub(crate) home_node: Option<u32>,
    pub(crate) flusher: Flusher,
}

/// A system call that writes durably.
#[derive(Clone, Copy, Debug)]
enum DurableWrites {
    /// pwritev2(2) with RWF_DSYNC, for files of some filesystems.
    Called,
    /// The same through io_uring, for block devices.
    Queued,
}

/// Returns whether an error says that a durable write was not tried.
fn is_unsupported(error: &io::Error) -> bool {
    let unsupported = [
        errno::ENOSYS,
        errno::EOPNOTSUPP,
        errno::EINVAL,
        errno::EAGAIN,
    ];
    error
        .raw_os_error()
        .is_some_and(|errno| unsupported.contains(&errno))
}

/// The differences between the kinds of devices.
pub(crate) trait Kind: Send + Sync {
    /// Name of the kind in `Device::describe`.
    const NAME: &'static str;
    /// See `Device::discard_makes_zeros`.
    const DISCARD_MAKES_ZEROS: bool;
    /// See `Device::discard`.
    fn discard(&self, handle: &Handle, range: Range<u64>) -> Result<(), IoError>;
    /// See `Device::discard_effect`. Called only for writable devices.
    fn discard_effect(&self) -> DiscardEffect;
    /// See `Device::extent_at`.
    fn extent_at(&self, _file: &File, range: Range<u64>) -> io::Result<Extent> {
        Ok(Extent {
            length_bytes: range.end - range.start,
            is_hole: false,
        })
    }
    /// See `Device::provision`.
    fn provision(&self, _handle: &Handle, _range: Range<u64>) -> Result<(), IoError> {
        Ok(())
    }
    /// Returns the size of the file or hardware in bytes.
    fn present_bytes(&self, file: &File) -> io::Result<u64>;
    /// Makes the file or hardware at least `size_bytes` long. See `Device::grow`.
    fn extend(&self, file: &File, size_bytes: u64, allocate_from: Option<u64>) -> io::Result<()>;
}

/// An open device of one kind.
#[derive(Debug)]
pub(crate) struct Opened<K> {
    pub(crate) handle: Handle,
    pub(crate) kind: K,
}

impl<K: Kind> Device for Opened<K> {
    fn name(&self) -> Arc<str> {
        Arc::clone(&self.handle.name)
    }

    fn size_bytes(&self) -> u64 {
        self.handle.size_bytes()
    }

    fn present_bytes(&self) -> Result<u64, IoError> {
        let handle = &self.handle;
        let present = self.kind.present_bytes(&handle.file);
        present
            .map(|bytes| bytes - bytes % BLOCK_BYTES)
            .map_err(|error| handle.error("measure", 0, handle.size_bytes(), Cause::of(&error)))
    }

    fn grow(&self, size_bytes: u64, allocate_from: Option<u64>) -> Result<(), IoError> {
        let handle = &self.handle;
        let old_bytes = handle.size_bytes();
        let added_bytes = size_bytes.saturating_sub(old_bytes);
        let failed = |cause| handle.error("grow", old_bytes, added_bytes, cause);
        if handle.is_read_only {
            return Err(failed(Cause::Errno(errno::EROFS)));
        }
        if !size_bytes.is_multiple_of(BLOCK_BYTES) {
            return Err(failed(Cause::Errno(errno::EINVAL)));
        }
        let extended = self.kind.extend(&handle.file, size_bytes, allocate_from);
        extended.map_err(|error| failed(Cause::of(&error)))?;
        handle.flush()?;
        handle.size_bytes.fetch_max(size_bytes, Ordering::AcqRel);
        Ok(())
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

    fn write_durable(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        self.handle.write_durable(offset_bytes, buf)
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        let range = range_of(offset_bytes, length_bytes);
        self.kind.discard(&self.handle, range)
    }

    fn discard_effect(&self) -> DiscardEffect {
        match self.handle.is_read_only {
            true => DiscardEffect::Nothing,
            false => self.kind.discard_effect(),
        }
    }

    fn discard_makes_zeros(&self) -> bool {
        K::DISCARD_MAKES_ZEROS
    }

    fn extent_at(&self, offset_bytes: u64, length_bytes: u64) -> Result<Extent, IoError> {
        let handle = &self.handle;
        handle.check_range("look for holes", offset_bytes, length_bytes)?;
        let range = range_of(offset_bytes, length_bytes);
        self.kind.extent_at(&handle.file, range).map_err(|error| {
            handle.error(
                "look for holes",
                offset_bytes,
                length_bytes,
                Cause::of(&error),
            )
        })
    }

    fn provision(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        let range = range_of(offset_bytes, length_bytes);
        self.kind.provision(&self.handle, range)
    }

    fn write_zeros(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        let range = range_of(offset_bytes, length_bytes);
        let at_once = self
            .handle
            .run_on_range("write", range.clone(), |file, at, len| {
                block::write_zeros(file, at, len)
            });
        match at_once {
            Err(error) if error.is_unsupported() => {
                // One allocation gives larger extents than one for each write.
                let provisioned = self.kind.provision(&self.handle, range.clone());
                provisioned.or_else(|error| match error.is_unsupported() {
                    true => Ok(()),
                    false => Err(error),
                })?;
                self.handle.write_zeros(range)?;
            }
            at_once => at_once?,
        }
        self.handle.flush()
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
        self.handle.describe(K::NAME)
    }
}

/// Returns a range of `length_bytes`. A range that would end beyond the largest u64 ends there, and `check_range` refuses it,
/// because no device is that large.
fn range_of(offset_bytes: u64, length_bytes: u64) -> Range<u64> {
    offset_bytes..offset_bytes.saturating_add(length_bytes)
}

/// A blocking transfer that stopped early: the bytes done, and the cause.
type Stopped = (usize, Cause);

impl Handle {
    /// Takes a file or block device that `opening::open_direct` opened. `metadata` is the file's; `disk` is the number of the block
    /// device that stores the bytes. Fails if the device has less than one block, or less than `options` require.
    pub(crate) fn new(
        path: &Path,
        (file, is_direct): (File, bool),
        metadata: &Metadata,
        disk: u64,
        size_bytes: u64,
        options: OpenOptions,
    ) -> Result<Handle, OpenError> {
        let required_bytes = options.create_size.unwrap_or(BLOCK_BYTES);
        let durable_writes = if !is_direct {
            None
        } else if metadata.file_type().is_block_device() {
            Some(DurableWrites::Queued)
        } else {
            block::has_cheap_durable_writes(&file, metadata).then_some(DurableWrites::Called)
        };
        Ok(Handle {
            name: path.to_string_lossy().into(),
            size_bytes: opening::usable_size(path, size_bytes, required_bytes)?.into(),
            is_direct,
            is_read_only: options.read_only,
            needs_stable_writes: is_direct && block::needs_stable_writes(&file, metadata),
            durable_writes,
            home_node: options.home_node.or_else(|| block::home_node(disk)),
            flusher: Flusher::default(),
            file,
        })
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    pub(crate) fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> Result<(), IoError> {
        let total = buf.len();
        self.check_range("read", offset_bytes, total as u64)?;
        let done = if !self.is_direct || is_aligned(buf) {
            self.read_fully(offset_bytes, buf)
        } else {
            let mut bounce = AlignedBuffer::new(total.min(BOUNCE_BYTES_MAX));
            let mut done = 0;
            buf.chunks_mut(BOUNCE_BYTES_MAX).try_for_each(|chunk| {
                let bounce = &mut bounce.as_mut_slice()[..chunk.len()];
                self.read_fully(offset_bytes + done as u64, bounce)
                    .map_err(|(partly, cause)| (done + partly, cause))?;
                chunk.copy_from_slice(bounce);
                done += chunk.len();
                Ok(())
            })
        };
        done.map_err(|stopped| self.stopped("read", offset_bytes, total, stopped))
    }

    pub(crate) fn write_at(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        let total = buf.len();
        self.check_range("write", offset_bytes, total as u64)?;
        self.check_writable("write", offset_bytes, total as u64)?;
        let done = if !self.is_direct || is_aligned(buf) {
            self.write_fully(offset_bytes, buf)
        } else {
            let mut bounce = AlignedBuffer::new(total.min(BOUNCE_BYTES_MAX));
            let mut done = 0;
            buf.chunks(BOUNCE_BYTES_MAX).try_for_each(|chunk| {
                let bounce = &mut bounce.as_mut_slice()[..chunk.len()];
                bounce.copy_from_slice(chunk);
                self.write_fully(offset_bytes + done as u64, bounce)
                    .map_err(|(partly, cause)| (done + partly, cause))?;
                done += chunk.len();
                Ok(())
            })
        };
        done.map_err(|stopped| self.stopped("write", offset_bytes, total, stopped))
    }

    /// Writes zeros to a range of the device, block by block.
    fn write_zeros(&self, range: Range<u64>) -> Result<(), IoError> {
        let length_bytes = range.end - range.start;
        let zeros = AlignedBuffer::new(length_bytes.min(BOUNCE_BYTES_MAX as u64) as usize);
        let mut at = range.start;
        while at < range.end {
            let length = (range.end - at).min(BOUNCE_BYTES_MAX as u64);
            self.write_at(at, &zeros.as_slice()[..length as usize])?;
            at += length;
        }
        Ok(())
    }

    /// Writes with one system call if that is cheap, else writes and flushes. The kernel merges the flushes of threads that make
    /// the system call at the same time, as `flush` does.
    pub(crate) fn write_durable(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        let total = buf.len();
        let is_one_buffer = is_aligned(buf) || total <= BOUNCE_BYTES_MAX;
        let Some(how) = self.durable_writes.filter(|_| is_one_buffer) else {
            self.write_at(offset_bytes, buf)?;
            return self.flush();
        };
        self.check_range("write", offset_bytes, total as u64)?;
        self.check_writable("write", offset_bytes, total as u64)?;
        let lost = |cause| self.error("flush", offset_bytes, total as u64, cause);
        self.flusher.check().map_err(lost)?;
        let mut bounce;
        let bytes = match is_aligned(buf) {
            true => buf,
            false => {
                bounce = AlignedBuffer::new(total);
                bounce.as_mut_slice().copy_from_slice(buf);
                bounce.as_slice()
            }
        };
        let mut first = None;
        if matches!(how, DurableWrites::Queued) && total > 0 {
            match queued_write::write_durable(&self.file, bytes, offset_bytes) {
                // This thread has no io_uring, or the device does not support the request. Nothing was lost.
                Err(error) if is_unsupported(&error) => {
                    self.write_at(offset_bytes, bytes)?;
                    return self.flush();
                }
                written => first = Some(written),
            }
        }
        let written = write_durable(total, |done, attempt| {
            let (rest, at) = (&bytes[done..], offset_bytes + done as u64);
            match (first.take(), attempt, how) {
                (Some(first), ..) => first,
                (None, Attempt::Plain, _) => self.file.write_at(rest, at),
                (None, _, DurableWrites::Called) => block::write_durable(&self.file, rest, at),
                (None, _, DurableWrites::Queued) => {
                    queued_write::write_durable(&self.file, rest, at)
                }
            }
        });
        match written {
            // Another thread's flush may have failed and lost these bytes before they were made durable.
            Ok(()) => self.flusher.check().map_err(lost),
            Err(DurableError::Data { done, cause }) => {
                Err(self.stopped("write", offset_bytes, total, (done, cause)))
            }
            Err(DurableError::Durability(cause)) => Err(lost(self.flusher.fail(cause))),
        }
    }

    pub(crate) fn flush(&self) -> Result<(), IoError> {
        let flushed = self.flusher.flush(|| self.file.sync_data());
        flushed.map_err(|cause| self.error("flush", 0, self.size_bytes(), cause))
    }

    /// Checks a range and runs a discard or a provision on it. `act` takes the file, and the range's offset and length in bytes.
    pub(crate) fn run_on_range(
        &self,
        operation: &'static str,
        range: Range<u64>,
        act: impl FnOnce(&File, u64, u64) -> io::Result<()>,
    ) -> Result<(), IoError> {
        let (offset_bytes, length_bytes) = (range.start, range.end - range.start);
        self.check_range(operation, offset_bytes, length_bytes)?;
        self.check_writable(operation, offset_bytes, length_bytes)?;
        if length_bytes == 0 {
            return Ok(());
        }
        act(&self.file, offset_bytes, length_bytes)
            .map_err(|error| self.error(operation, offset_bytes, length_bytes, Cause::of(&error)))
    }

    /// Returns the text of `Device::describe`.
    fn describe(&self, kind: &str) -> String {
        let access = match (self.is_direct, self.is_read_only) {
            (true, false) => "direct I/O",
            (true, true) => "direct I/O, read-only",
            (false, false) => "buffered I/O (direct I/O is refused here)",
            (false, true) => "buffered I/O (direct I/O is refused here), read-only",
        };
        let ring = match ring_refusal() {
            None => "io_uring".to_string(),
            Some(why) => format!("threads instead of io_uring ({why})"),
        };
        let copies = match self.needs_stable_writes {
            true => ", writes from copies (it has checksums or parity)",
            false => "",
        };
        format!(
            "{} ({kind}, {} bytes): {access}, {ring}{copies}",
            self.name,
            self.size_bytes()
        )
    }

    fn read_fully(&self, offset_bytes: u64, buf: &mut [u8]) -> Result<(), Stopped> {
        let mut done = 0;
        while done < buf.len() {
            match self
                .file
                .read_at(&mut buf[done..], offset_bytes + done as u64)
            {
                Ok(0) => return Err((done, Cause::Short { done_bytes: 0 })),
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err((done, Cause::of(&error))),
            }
            // Direct I/O answers EINVAL for an offset inside a sector. That would hide the real cause: the file ends here.
            if done < buf.len() && !(done as u64).is_multiple_of(SECTOR_BYTES) {
                return Err((done, Cause::Short { done_bytes: 0 }));
            }
        }
        Ok(())
    }

    fn write_fully(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), Stopped> {
        let mut done = 0;
        while done < buf.len() {
            match self.file.write_at(&buf[done..], offset_bytes + done as u64) {
                Ok(0) => return Err((done, Cause::Short { done_bytes: 0 })),
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err((done, Cause::of(&error))),
            }
        }
        Ok(())
    }

    fn check_range(
        &self,
        operation: &'static str,
        offset_bytes: u64,
        length_bytes: u64,
    ) -> Result<(), IoError> {
        if is_in_range(offset_bytes, length_bytes, self.size_bytes()) {
            return Ok(());
        }
        Err(self.error(
            operation,
            offset_bytes,
            length_bytes,
            Cause::Errno(errno::EINVAL),
        ))
    }

    fn check_writable(
        &self,
        operation: &'static str,
        offset_bytes: u64,
        length_bytes: u64,
    ) -> Result<(), IoError> {
        if !self.is_read_only {
            return Ok(());
        }
        Err(self.error(
            operation,
            offset_bytes,
            length_bytes,
            Cause::Errno(errno::EROFS),
        ))
    }

    fn stopped(
        &self,
        operation: &'static str,
        offset_bytes: u64,
        total: usize,
        stopped: Stopped,
    ) -> IoError {
        stopped_error(
            operation,
            &self.name,
            offset_bytes,
            total as u64,
            stopped.0 as u64,
            stopped.1,
        )
    }

    fn error(
        &self,
        operation: &'static str,
        offset_bytes: u64,
        length_bytes: u64,
        cause: Cause,
    ) -> IoError {
        IoError {
            operation,
            device: Arc::clone(&self.name),
            offset_bytes,
            length_bytes,
            cause,
        }
    }
}

/// Returns the error of a transfer that stopped after `done_bytes`. If the cause is an errno, the error names the remaining range.
/// If the transfer was short, the error names the whole range and the number of bytes done.
pub(crate) fn stopped_error(
    operation: &'static str,
    device: &Arc<str>,
    offset_bytes: u64,
    length_bytes: u64,
    done_bytes: u64,
    cause: Cause,
) -> IoError {
    let device = Arc::clone(device);
    match cause {
        Cause::Errno(_) | Cause::Unreachable => IoError {
            operation,
            device,
            offset_bytes: offset_bytes + done_bytes,
            length_bytes: length_bytes - done_bytes,
            cause,
        },
        Cause::Short { .. } => {
            let cause = Cause::Short { done_bytes };
            IoError {
                operation,
                device,
                offset_bytes,
                length_bytes,
                cause,
            }
        }
    }
}

/// Returns whether a range consists of whole blocks of a device.
pub fn is_in_range(offset_bytes: u64, length_bytes: u64, size_bytes: u64) -> bool {
    offset_bytes.is_multiple_of(BLOCK_BYTES)
        && length_bytes.is_multiple_of(BLOCK_BYTES)
        && offset_bytes
            .checked_add(length_bytes)
            .is_some_and(|end| end <= size_bytes)
}

/// Returns why the kernel refuses io_uring to this process. Asks the kernel once.
fn ring_refusal() -> Option<&'static str> {
    static REFUSAL: OnceLock<Option<String>> = OnceLock::new();
    let ask = || {
        let ring = Doorbell::new().and_then(|bell| Ring::new(1, &[], Arc::new(bell)));
        ring.err().map(|error| error.to_string())
    };
    REFUSAL.get_or_init(ask).as_deref()
}
