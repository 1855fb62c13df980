//! Devices that hold a volume, and queues of asynchronous transfers to them.
//!
//! A `Device` moves whole blocks between memory and storage. It reports exactly what happened: a short transfer, EIO or ENOSPC is
//! the error of the operation that met it. It knows nothing of slices, pages or files.
//!
//! # Assumptions about the medium
//! - After a power failure during the write of a block (`BLOCK_BYTES`), the block may hold any mix of its old
//!   and new sectors of 512 bytes. Nothing outside the written range changes.
//! - A completed write may still be lost. It is durable after a successful `flush` that began after the write completed.
//! - A successful `write_durable` makes its own bytes durable, and no others.
//! - After a failed flush, nothing is known about any write since the last flush that succeeded.
//!
//! # Where to read on
//! [`Claim`] holds a device against all other processes. [`open_device`] opens a device by path. `file` and `block` are the two
//! kinds of devices; they share the steps in `opening` and the blocking calls in `handle`. `flush` shares one sync between
//! threads, and [`FlushEpochs`] tells which writes a flush has covered. `durable` tells which part of a durable write failed.
//! `absent` stands for a device that was not found, `faults` fails the operations of a device and `volatile` loses
//! unflushed writes of a killed process, both in test builds.
//! [`open_queue`] chooses between `ring_queue` (io_uring) and `pool_queue` (threads that make blocking calls). `elsewhere` has the
//! transfers of devices that perform them by themselves ([`Asynchronous`]). `schemes` opens devices of other hosts. `bounce` copies
//! memory that must not change during its write. [`Appended`] is a list that grows while threads read it, and [`Devices`] such a list of
//! devices.

#![forbid(unsafe_code)]

mod absent;
mod aligned;
mod appended;
mod block;
mod bounce;
mod claim;
mod devices;
mod durable;
mod elsewhere;
mod epochs;
#[cfg(feature = "faults")]
mod faults;
mod file;
mod flush;
mod handle;
mod layer;
mod network;
mod open;
mod opening;
mod pool_queue;
mod queue;
mod ring_queue;
mod schemes;
mod transfer;
#[cfg(feature = "faults")]
mod volatile;

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use jericho_sys::errno;

pub use absent::absent_device;
pub use aligned::AlignedBuffer;
pub use appended::Appended;
pub use claim::{Access, Claim, ClaimError};
pub use devices::Devices;
pub use epochs::{FlushEpoch, FlushEpochs};
pub use handle::is_in_range;
pub use jericho_sys::memory::Segment;
pub use layer::Layer;
pub use network::{ChannelStat, LockStat, NetworkStat};
pub use open::open_device;
pub use opening::{OpenError, OpenOptions};
pub use queue::{open_pool_queue, open_queue, open_signalling_queue};
pub use schemes::{Remotes, is_remote, remote_holder, remote_host, set_remotes};
pub use transfer::{gather, gather_to, scatter};

/// Unit of offsets and lengths: each is a multiple of it.
pub const BLOCK_BYTES: u64 = 4096;

/// Maximum size of a write of zeros.
const ZEROS_BYTES_MAX: u64 = 1 << 20;

/// The error of a transfer, flush, discard, provision or growth. `Clone`, because one failed write concerns many pages.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{operation} of {length_bytes} bytes at offset {offset_bytes} of {device}: {cause}")]
pub struct IoError {
    /// "read", "write", "flush", "discard", "provision", "grow", "measure", "look for holes"
    pub operation: &'static str,
    /// The device as the user named it.
    pub device: Arc<str>,
    /// Offset of the failed range.
    pub offset_bytes: u64,
    /// Requested length.
    pub length_bytes: u64,
    /// The cause.
    pub cause: Cause,
}

/// Why a queue could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} for the I/O queue: {source}")]
pub struct QueueError {
    /// For example "start threads".
    pub action: &'static str,
    /// The kernel's reason.
    #[source]
    pub source: io::Error,
}

/// Why an operation on a device failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The kernel's errno.
    Errno(i32),
    /// Fewer bytes than requested were transferred, without an error (end of the device).
    Short {
        /// Bytes that were transferred.
        done_bytes: u64,
    },
    /// The host of the device does not answer, and the user wants no longer wait. The device has lost nothing; see `Device`.
    Unreachable,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::Errno(e) => write!(f, "{}", std::io::Error::from_raw_os_error(*e)),
            Cause::Short { done_bytes } => {
                write!(
                    f,
                    "only {done_bytes} bytes were transferred: is the device truncated?"
                )
            }
            Cause::Unreachable => f.write_str("its host does not answer"),
        }
    }
}

impl Cause {
    pub(crate) fn of(error: &io::Error) -> Cause {
        Cause::Errno(error.raw_os_error().unwrap_or(errno::EIO))
    }
}

impl IoError {
    /// Returns whether the device or its host does not support the operation.
    pub fn is_unsupported(&self) -> bool {
        self.cause == Cause::Errno(errno::EOPNOTSUPP)
    }

    /// Returns whether the host of the device does not answer.
    pub fn is_unreachable(&self) -> bool {
        self.cause == Cause::Unreachable
    }

    /// Returns the errno that a program should see.
    pub fn errno(&self) -> i32 {
        match self.cause {
            Cause::Errno(e) => e,
            Cause::Short { .. } | Cause::Unreachable => errno::EIO,
        }
    }
}

/// Effect of a discard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiscardEffect {
    /// None: the device does not support discards.
    Nothing,
    /// A file's host gets the space back. A later write may need space again.
    FreesSpace,
    /// A block device learns that the blocks hold no data.
    FreesBlocks,
}

/// A run of blocks of a device that are all holes or all no holes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length, a multiple of `BLOCK_BYTES`.
    pub length_bytes: u64,
    /// Whether the blocks have no storage. They read as zeros, and a write may need space.
    pub is_hole: bool,
}

/// A place where blocks are stored.
///
/// The blocking calls take any buffer whose length is a multiple of `BLOCK_BYTES`, may be made from
/// any thread, and either transfer everything or fail.
///
/// `Cause::Unreachable` says that a device of another host does not answer. After that error
/// - a flush may be repeated. If a later one succeeds, it covers every write that completed before it began;
/// - a change takes effect, has no effect, or takes effect later. While it may take effect later, `has_abandoned` returns true, and an
///   operation on the same blocks that begins later runs after it.
pub trait Device: Send + Sync {
    /// Returns the name by which the user knows the device (its path).
    fn name(&self) -> Arc<str>;
    /// Returns the usable size, a multiple of `BLOCK_BYTES`. Only `grow` changes it.
    fn size_bytes(&self) -> u64;
    /// Returns the size that the file or hardware has at this moment, in whole blocks. It differs from `size_bytes` if another
    /// program has changed it since the device was opened or has last grown.
    fn present_bytes(&self) -> Result<u64, IoError> {
        Ok(self.size_bytes())
    }
    /// Makes the first `size_bytes` usable. Extends a file that is shorter, durably. With `allocate_from`, a file then has space
    /// on its host for all bytes from there to `size_bytes`; these must hold nothing of value. After a failure, `size_bytes` is as
    /// before, and a file has its earlier length. Fails with EOPNOTSUPP when the device is smaller and cannot be extended.
    fn grow(&self, size_bytes: u64, _allocate_from: Option<u64>) -> Result<(), IoError> {
        match size_bytes <= self.size_bytes() {
            true => Ok(()),
            false => Err(IoError {
                operation: "grow",
                device: self.name(),
                offset_bytes: self.size_bytes(),
                length_bytes: size_bytes - self.size_bytes(),
                cause: Cause::Errno(errno::EOPNOTSUPP),
            }),
        }
    }
    /// Returns the kernel's NUMA node of the hardware, if the kernel knows it.
    fn home_node(&self) -> Option<u32>;
    /// Reads `buf.len()` bytes.
    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> Result<(), IoError>;
    /// Writes `buf.len()` bytes. They are not durable before `flush`.
    fn write_at(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError>;
    /// Makes all writes durable that completed before the call. After a failure other than `Cause::Unreachable` every later `flush` and
    /// `write_durable` fails.
    fn flush(&self) -> Result<(), IoError>;
    /// Writes `buf.len()` bytes and makes this write durable. Promises nothing about earlier writes. The operation of the error is
    /// "flush" when the bytes were written and may not be durable.
    fn write_durable(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        self.write_at(offset_bytes, buf)?;
        self.flush()
    }
    /// Discards a range: its contents become unspecified. Fails with EOPNOTSUPP, without effect, when the device can never
    /// discard it.
    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError>;
    /// Returns the effect of `discard`, as far as it is known before the first one.
    fn discard_effect(&self) -> DiscardEffect {
        DiscardEffect::Nothing
    }
    /// Returns whether a discarded range reads as zeros afterwards.
    fn discard_makes_zeros(&self) -> bool {
        false
    }
    /// Returns the run of holes or data that begins at an offset, cut off after `length_bytes`. The caller passes whole blocks
    /// inside the device, at least one. A device that does not know its holes reports data.
    fn extent_at(&self, _offset_bytes: u64, length_bytes: u64) -> Result<Extent, IoError> {
        Ok(Extent {
            length_bytes,
            is_hole: false,
        })
    }
    /// Ensures that a range can be written even if its host becomes full: a sparse file allocates space for it. Keeps the
    /// contents. Does nothing on devices that own all their space. Fails with EOPNOTSUPP when the host can allocate only by
    /// writing.
    fn provision(&self, _offset_bytes: u64, _length_bytes: u64) -> Result<(), IoError> {
        Ok(())
    }
    /// Writes zeros and makes them durable. In a filesystem's file, a later write to the range then needs no space and changes no
    /// extent, so `write_durable` costs one write and one flush, not a commit of the filesystem too. After a failure, some of the
    /// range may hold zeros.
    fn write_zeros(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        write_zeros_in_parts(self, offset_bytes, length_bytes)
    }
    /// Returns whether the device is missing: all operations fail with ENODEV.
    fn is_absent(&self) -> bool {
        false
    }
    /// Puts a missing device back, of which this one has the place: all operations go to it from now on. Returns false, without effect, for a
    /// device that is not missing, or if the other one cannot take its place.
    fn put_back(&self, _device: Arc<dyn Device>) -> bool {
        false
    }
    /// Returns whether the device may fall silent (`is_silent`), because it is on another host.
    fn may_fall_silent(&self) -> bool {
        false
    }
    /// Returns whether the device answers no operation at present, so that an operation would wait long. May take some tenths of a second to
    /// find out.
    fn is_silent(&self) -> bool {
        false
    }
    /// Returns whether a change that has failed with `Cause::Unreachable` may still take effect.
    fn has_abandoned(&self) -> bool {
        false
    }
    /// Returns whether the device refuses writes (EROFS).
    fn is_read_only(&self) -> bool {
        false
    }
    /// Returns whether the memory of a write must not change until the write has ended, because the device reads it
    /// more than once (for a checksum or parity). Queues then write from a copy. Callers of `write_at` must ensure it
    /// themselves.
    fn needs_stable_writes(&self) -> bool {
        false
    }
    /// Returns the descriptor that io_uring uses for transfers, if there is one.
    fn queue_fd(&self) -> Option<std::os::fd::BorrowedFd<'_>>;
    /// Returns the device's own transfers, if it has no descriptor and performs them by itself.
    fn asynchronous(&self) -> Option<&dyn Asynchronous> {
        None
    }
    /// Returns whether all calls return at once, without I/O, so that a thread that must not wait may make them.
    fn is_instant(&self) -> bool {
        false
    }
    /// Returns whether the device has only the blocking calls, as a simulated one. A queue to it needs threads.
    fn is_blocking_only(&self) -> bool {
        self.queue_fd().is_none() && self.asynchronous().is_none()
    }
    /// Returns one line for logs and `jericho stat`: the kind, direct or buffered, and whether and why io_uring is not used.
    fn describe(&self) -> String;
    /// Returns what is known of the network, for a device of another host.
    fn network(&self) -> Option<NetworkStat> {
        None
    }
}

/// Writes zeros with writes and one flush.
fn write_zeros_in_parts<D: Device + ?Sized>(
    device: &D,
    offset_bytes: u64,
    length_bytes: u64,
) -> Result<(), IoError> {
    let end_bytes = offset_bytes.saturating_add(length_bytes);
    if end_bytes > device.size_bytes() {
        return Err(IoError {
            operation: "write",
            device: device.name(),
            offset_bytes,
            length_bytes,
            cause: Cause::Errno(errno::EINVAL),
        });
    }
    let zeros = vec![0; length_bytes.min(ZEROS_BYTES_MAX) as usize];
    let mut at = offset_bytes;
    while at < end_bytes {
        let part = &zeros[..(end_bytes - at).min(ZEROS_BYTES_MAX) as usize];
        device.write_at(at, part)?;
        at += part.len() as u64;
    }
    device.flush()
}

/// Transfers that a device performs by itself, without a thread that waits.
pub trait Asynchronous {
    /// Begins a transfer whose range and memory are valid. Calls `end` once, from any thread, perhaps before `begin` returns. Does not use
    /// the memory after that call.
    fn begin(&self, transfer: Transfer, end: Arc<dyn Finish>);

    /// Begins several transfers, in order. A device that sends messages may send fewer of them for all together.
    fn begin_all(&self, transfers: Vec<Transfer>, end: Arc<dyn Finish>) {
        for transfer in transfers {
            self.begin(transfer, Arc::clone(&end));
        }
    }
}

/// Takes the ends of transfers. Never blocks.
pub trait Finish: Send + Sync {
    /// Takes the end of a transfer.
    fn finish(&self, completion: Completion);
}

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Device to memory.
    Read,
    /// Memory to device.
    Write,
}

/// One asynchronous transfer between a contiguous range of a device and memory.
#[derive(Clone, Debug)]
pub struct Transfer {
    /// Identifies the transfer in its completion.
    pub tag: u64,
    /// Index of the device in the list that the queue was opened with.
    pub device: u16,
    /// Direction.
    pub direction: Direction,
    /// Offset on the device.
    pub offset_bytes: u64,
    /// Memory, in order. The caller should merge adjacent segments. Offsets and lengths are multiples of `BLOCK_BYTES`.
    pub segments: Vec<Segment>,
}

/// The end of a transfer.
#[derive(Debug)]
pub struct Completion {
    /// Tag of the transfer.
    pub tag: u64,
    /// `Ok` if everything was transferred.
    pub result: Result<(), IoError>,
}

/// Wakes a thread that waits in `Queue::wait`. Cheap when the thread is awake.
pub trait Wake: Send + Sync {
    /// Makes the current or the next `Queue::wait` return.
    fn wake(&self);
}

/// Asynchronous transfers of one thread. A queue may move to another thread while nothing is in flight (`in_flight() == 0`), for
/// example between its opening and its first use.
///
/// Dropping a queue waits for the transfers that the device has begun and cancels the others. It delivers no completions.
pub trait Queue: Send {
    /// Queues a transfer. Never blocks and never fails: errors come in the completion.
    fn submit(&mut self, transfer: Transfer);
    /// Starts the submitted transfers, then appends completions. Returns when there is at least one, when woken, or after
    /// `timeout` (`None`: no limit; zero: does not sleep).
    fn wait(&mut self, completions: &mut Vec<Completion>, timeout: Option<Duration>);
    /// Returns the handle with which other threads wake the owner of this queue.
    fn waker(&self) -> Arc<dyn Wake>;
    /// Returns the number of submitted transfers whose completion was not delivered yet.
    fn in_flight(&self) -> usize;
    /// Returns one line for logs: io_uring or threads and why, with registered buffers or not and why.
    fn describe(&self) -> String;
}
