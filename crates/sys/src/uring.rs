//! An io_uring that owns all memory and descriptors of its operations, so that queueing an operation is safe.
//!
//! The kernel reads and writes memory, descriptors and iovecs long after the call that queued the operation. The ring owns them
//! until the completion. Each operation in flight has a slot with iovecs and memory segments, which keep their mappings alive.
//! The ring holds duplicates of the descriptors. Dropping the ring waits for all operations in flight.
//!
//! Invariants:
//! - a slot holds a request exactly while the kernel may use the slot's memory;
//! - at most `depth` operations and one poll of the doorbell are in flight. The submission ring and the completion ring are
//!   larger than that, so neither can overflow.
//!
//! # One thread
//! The ring is created disabled and starts with its first `enter`. The flags SINGLE_ISSUER and DEFER_TASKRUN save interrupts and
//! locks. With them, the thread of the first `enter` owns the ring: it may be moved between threads before, but not after.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};

use crate::doorbell::Doorbell;
use crate::memory::{Mapping, Segment};

/// Maximum size of a registered buffer in the kernel.
pub const REGISTERED_CHUNK_BYTES: usize = 1 << 30;

/// Maximum number of iovecs of an operation in the kernel (UIO_MAXIOV).
const IOVEC_LIMIT: usize = 1024;

/// Maximum length of one transfer. The rest is left over, as after a short transfer.
const TRANSFER_BYTES_MAX: usize = 1 << 30;

/// Maximum number of operations that a ring can have in flight.
pub const DEPTH_LIMIT: u32 = 16 * 1024;

/// IORING_ENTER_GETEVENTS of io_uring_enter(2).
pub(crate) const GETEVENTS: u32 = 1;

/// Marks the completion of the doorbell's poll. Slots have small numbers.
pub(crate) const DOORBELL_TAG: u64 = u64::MAX;

/// Kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// File to memory.
    Read,
    /// Memory to file.
    Write,
    /// fdatasync(2); has no segments.
    SyncData,
}

/// An operation on one of the ring's files. The completion returns it.
#[derive(Debug)]
pub struct Request {
    /// Chosen by the caller; the ring does not use it.
    pub tag: u64,
    /// Index in the list of files that the ring was created with.
    pub file: u32,
    /// Kind of operation.
    pub operation: Operation,
    /// Byte offset in the file of the first byte of `segments`.
    pub offset_bytes: u64,
    /// Memory, in order.
    pub segments: Vec<Segment>,
    /// Bytes at the start of `segments` that are skipped because an earlier, short transfer did them.
    pub done_bytes: usize,
}

/// The completion of a request.
#[derive(Debug)]
pub struct Completed {
    /// The request that was queued.
    pub request: Request,
    /// Bytes transferred by this attempt, which may be fewer than requested, or the errno.
    pub result: Result<usize, i32>,
}

/// Why a request was not queued. Returns the request.
#[derive(Debug)]
pub enum PushError {
    /// The request is valid, but `depth` requests are in flight.
    Full(Request),
    /// The request names memory outside of its mapping, reads into a read-only mapping, names a file that the ring does not have,
    /// or transfers nothing.
    Invalid(Request),
}

struct RingSlot {
    request: Option<Request>,
    /// Kept for reuse. The kernel reads its buffer only while `request` is `Some`.
    iovecs: Vec<libc::iovec>,
}

struct RegisteredMapping {
    mapping: Arc<Mapping>,
    first_index: u16,
}

/// An io_uring; see the module's documentation.
pub struct Ring {
    ring: IoUring,
    slots: Vec<RingSlot>,
    free: Vec<u32>,
    /// A place without a file keeps the numbers of the others.
    files: Vec<Option<OwnedFd>>,
    /// Number of files, the first ones, that are registered.
    files_registered: usize,
    registered: Vec<RegisteredMapping>,
    doorbell: Arc<Doorbell>,
    doorbell_polled: bool,
    enabled: bool,
    single_issuer: bool,
}

// SAFETY: the raw pointers inside are iovecs into mappings that the same slot keeps alive; they are valid in every thread.
// Nothing is thread-local. (The kernel may refuse a second thread, which is an error and not unsound.)
unsafe impl Send for Ring {}

impl Ring {
    /// Creates a ring for at most `depth` operations in flight (clamped to 1..=`DEPTH_LIMIT`) on `files`, which it duplicates.
    /// A place without a file takes no operation. `doorbell` ends its waits. Fails with EPERM or ENOSYS where io_uring is forbidden or missing, with ENOMEM where locked
    /// memory is limited, and with EMFILE.
    pub fn new(
        depth: u32,
        files: &[Option<BorrowedFd<'_>>],
        doorbell: Arc<Doorbell>,
    ) -> io::Result<Ring> {
        let depth = depth.clamp(1, DEPTH_LIMIT);
        let (ring, single_issuer) = build(depth + 1)?;
        if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
            // Linux before 5.11 cannot wait with a time limit.
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        }
        let files = files
            .iter()
            .map(|fd| fd.map(|fd| fd.try_clone_to_owned()).transpose())
            .collect::<io::Result<Vec<_>>>()?;
        // The kernel takes -1 for a place without a file.
        let number = |file: &Option<OwnedFd>| file.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let raw: Vec<RawFd> = files.iter().map(number).collect();
        // Registered files save a reference count per operation. If the kernel refuses (RLIMIT_NOFILE), the ring uses plain
        // descriptors.
        let is_registered = !raw.is_empty() && ring.submitter().register_files(&raw).is_ok();
        let files_registered = if is_registered { raw.len() } else { 0 };
        Ok(Ring {
            ring,
            slots: (0..depth)
                .map(|_| RingSlot {
                    request: None,
                    iovecs: Vec::new(),
                })
                .collect(),
            free: (0..depth).rev().collect(),
            files,
            files_registered,
            registered: Vec::new(),
            doorbell,
            doorbell_polled: false,
            enabled: false,
            single_issuer,
        })
    }

    /// Registers the memory of `mappings` that lasts ([`Mapping::set_lasting`]), in chunks. If a transfer has one segment, which lies in one chunk, the kernel then need
    /// not look up and pin its pages. Registers all or nothing; may be called once.
    ///
    /// The pages are pinned and count as locked memory. They are populated if they were not, so bind a policy first. Fails with
    /// ENOMEM beyond RLIMIT_MEMLOCK, and with EINVAL for more than 16,384 chunks or a second call. The ring then works without
    /// registered buffers.
    pub fn register_buffers(&mut self, mappings: &[Arc<Mapping>]) -> io::Result<()> {
        if !self.registered.is_empty() {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let mut iovecs = Vec::new();
        let mut registered = Vec::new();
        for mapping in mappings {
            let first_index = u16::try_from(iovecs.len())
                .map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
            for offset in (0..mapping.lasting_len()).step_by(REGISTERED_CHUNK_BYTES) {
                iovecs.push(libc::iovec {
                    iov_base: mapping.as_ptr().wrapping_add(offset).cast(),
                    iov_len: REGISTERED_CHUNK_BYTES.min(mapping.lasting_len() - offset),
                });
            }
            registered.push(RegisteredMapping {
                mapping: Arc::clone(mapping),
                first_index,
            });
        }
        if iovecs.is_empty() {
            return Ok(());
        }
        // SAFETY: the chunks lie inside mappings that `self.registered` keeps until the ring is dropped.
        unsafe { self.ring.submitter().register_buffers(&iovecs)? };
        self.registered = registered;
        Ok(())
    }

    /// Makes each completion end the sleep of the thread that owns `doorbell`, also a sleep in another ring. Fails with EBUSY
    /// after an earlier call, and with ENOMEM.
    pub fn signal(&self, doorbell: &Doorbell) -> io::Result<()> {
        let eventfd = doorbell.as_fd().as_raw_fd();
        self.ring.submitter().register_eventfd(eventfd)
    }

    /// Appends a file, or a place without one, to the ring's list, which duplicates it. The ring does not register the file.
    pub fn add_file(&mut self, file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let file = file.map(|fd| fd.try_clone_to_owned()).transpose()?;
        self.files.push(file);
        Ok(())
    }

    /// Returns the number of places in the ring's list of files.
    pub fn files(&self) -> usize {
        self.files.len()
    }

    /// Returns whether buffers are registered.
    pub fn has_registered_buffers(&self) -> bool {
        !self.registered.is_empty()
    }

    /// Returns whether the ring must stay with the thread that first entered it.
    pub fn is_single_issuer(&self) -> bool {
        self.single_issuer
    }

    /// Returns the number of requests that were pushed and whose completion was not delivered.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Queues a request. The next `wait` or `start` starts it.
    pub fn push(&mut self, request: Request) -> Result<(), PushError> {
        let file = self.files.get(request.file as usize);
        let Some(descriptor) = file.and_then(|file| file.as_ref().map(AsRawFd::as_raw_fd)) else {
            return Err(PushError::Invalid(request));
        };
        if !is_valid(&request) {
            return Err(PushError::Invalid(request));
        }
        let Some(index) = self.free.pop() else {
            return Err(PushError::Full(request));
        };
        let slot = &mut self.slots[index as usize];
        collect_iovecs(&request, &mut slot.iovecs);
        let is_registered = (request.file as usize) < self.files_registered;
        let file = if is_registered {
            request.file as RawFd // the index of an existing file: small
        } else {
            descriptor
        };
        let buffer = fixed_buffer(&self.registered, &request, &slot.iovecs);
        let entry = entry(file, is_registered, &request, &slot.iovecs, buffer);
        slot.request = Some(request);
        // SAFETY: the memory is in bounds (`is_valid`) of mappings that the slot keeps alive; the iovecs are the slot's and stay
        // unchanged while it holds a request; the descriptor is the ring's. The slot is emptied only at the completion.
        let pushed = unsafe {
            self.ring
                .submission()
                .push(&entry.user_data(u64::from(index)))
        };
        if pushed.is_err() {
            // The submission ring has more entries than there are slots.
            let slot = &mut self.slots[index as usize];
            self.free.push(index);
            if let Some(request) = slot.request.take() {
                return Err(PushError::Full(request));
            }
        }
        Ok(())
    }

    /// Starts the pushed requests, then appends completions. Returns when there is at least one, when the doorbell was rung, or
    /// after `timeout` (`None`: no limit; zero: does not sleep). May also return early without completions. Returns whether the
    /// doorbell was rung, and resets the doorbell. Fails with EEXIST when the ring has moved between threads (see
    /// the module); any other error is a bug.
    pub fn wait(
        &mut self,
        completed: &mut Vec<Completed>,
        timeout: Option<Duration>,
    ) -> io::Result<bool> {
        self.enable()?;
        let before = completed.len();
        self.reap(completed);
        let mut want = 0;
        if completed.len() == before && timeout != Some(Duration::ZERO) {
            self.poll_doorbell()?;
            // From here on, `Doorbell::ring` writes the eventfd. The poll may reach the kernel later: the eventfd stays readable,
            // so a late poll completes at once.
            want = usize::from(self.doorbell.arm());
        }
        let entered = self.enter(want, timeout);
        let rung = self.doorbell.disarm();
        entered?;
        self.reap(completed);
        Ok(rung)
    }

    /// Starts the pushed requests without waiting and without taking completions. Fails as `wait` does. After a failure, the next
    /// `wait` starts the requests.
    pub fn start(&mut self) -> io::Result<()> {
        self.enable()?;
        self.enter(0, None)
    }

    fn enable(&mut self) -> io::Result<()> {
        if !self.enabled {
            self.ring.submitter().register_enable_rings()?;
            self.enabled = true;
        }
        Ok(())
    }

    fn poll_doorbell(&mut self) -> io::Result<()> {
        if self.doorbell_polled {
            return Ok(());
        }
        let fd = types::Fd(self.doorbell.as_fd().as_raw_fd());
        let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32)
            .build()
            .user_data(DOORBELL_TAG);
        // SAFETY: a poll uses no memory of this process; the ring keeps the doorbell open.
        unsafe { self.ring.submission().push(&entry) }
            .map_err(|_| io::Error::from_raw_os_error(libc::EBUSY))?;
        self.doorbell_polled = true;
        Ok(())
    }

    /// Calls io_uring_enter(2) once. Interruptions and temporary shortages are not errors, because the ring's user calls again.
    fn enter(&mut self, want: usize, timeout: Option<Duration>) -> io::Result<()> {
        let sq = self.ring.submission();
        let (pushed, taskrun, overflown) = (sq.len(), sq.taskrun(), sq.cq_overflow());
        drop(sq);
        if want == 0 && pushed == 0 && !taskrun && !overflown {
            // There is nothing to start, and all completions are in the completion ring already. A slice that polls between two
            // reads needs no system call here.
            return Ok(());
        }
        let entered = match timeout {
            Some(timeout) if want > 0 => {
                let timespec = types::Timespec::from(timeout);
                let args = types::SubmitArgs::new().timespec(&timespec);
                self.ring.submitter().submit_with_args(want, &args)
            }
            _ if want == 0 && taskrun => {
                // With DEFER_TASKRUN the kernel delivers completions only on request (GETEVENTS). Without the request, a poll
                // would never see them.
                // SAFETY: only numbers are passed; the pushed entries are sound by `push`.
                unsafe {
                    let submitter = self.ring.submitter();
                    submitter.enter::<libc::sigset_t>(pushed as u32, 0, GETEVENTS, None)
                }
            }
            _ => self.ring.submitter().submit_and_wait(want),
        };
        passing(entered)
    }

    fn reap(&mut self, completed: &mut Vec<Completed>) {
        for entry in self.ring.completion() {
            if entry.user_data() == DOORBELL_TAG {
                self.doorbell_polled = false;
                self.doorbell.drain();
                continue;
            }
            let Ok(index) = u32::try_from(entry.user_data()) else {
                continue;
            };
            let Some(slot) = self.slots.get_mut(index as usize) else {
                continue;
            };
            let Some(request) = slot.request.take() else {
                continue;
            };
            self.free.push(index);
            let result =
                usize::try_from(entry.result()).map_err(|_| entry.result().saturating_neg());
            completed.push(Completed { request, result });
        }
    }
}

/// Returns whether the memory of a request is in bounds and may be used.
fn is_valid(request: &Request) -> bool {
    if request.operation == Operation::SyncData {
        return request.segments.is_empty();
    }
    let mut total = 0usize;
    for segment in &request.segments {
        let end = segment.offset.checked_add(segment.len);
        if end.is_none_or(|end| end > segment.mapping.len())
            || (request.operation == Operation::Read && !segment.mapping.is_writable())
        {
            return false;
        }
        match total.checked_add(segment.len) {
            Some(sum) => total = sum,
            None => return false,
        }
    }
    request.done_bytes < total
}

impl Drop for Ring {
    /// Waits for the operations in flight, because the kernel may write to their memory until then.
    fn drop(&mut self) {
        let mut completed = Vec::new();
        while self.in_flight() > 0 {
            if self.enable().and_then(|()| self.enter(1, None)).is_err() {
                // A thread that does not own the ring drops it, so completions cannot be received. This is a bug of the caller.
                // Leaking the memory keeps it sound.
                for slot in &mut self.slots {
                    std::mem::forget(slot.request.take());
                    std::mem::forget(std::mem::take(&mut slot.iovecs));
                }
                std::mem::forget(std::mem::take(&mut self.registered));
                return;
            }
            self.reap(&mut completed);
        }
        // The kernel releases the files and buffers of a closed ring some time later. Unregistering releases them now, so that
        // locks and exclusive opens of them end with this drop. If it fails, they end later.
        if self.files_registered > 0 {
            let _ = self.ring.submitter().unregister_files();
        }
        if !self.registered.is_empty() {
            let _ = self.ring.submitter().unregister_buffers();
        }
    }
}

/// Ignores interruptions and temporary shortages in the result of entering the kernel.
pub(crate) fn passing(entered: io::Result<usize>) -> io::Result<()> {
    match entered {
        Ok(_) => Ok(()),
        Err(error) => match error.raw_os_error() {
            Some(libc::EINTR | libc::ETIME | libc::EBUSY) => Ok(()),
            Some(libc::EAGAIN) => {
                // The kernel has no memory for requests. Nothing signals when it has memory again.
                std::thread::sleep(Duration::from_millis(1));
                Ok(())
            }
            _ => Err(error),
        },
    }
}

/// Creates a disabled ring with the cheapest delivery of completions that the kernel supports. Returns whether the ring belongs
/// to one thread.
pub(crate) fn build(entries: u32) -> io::Result<(IoUring, bool)> {
    let entries = entries.next_power_of_two();
    let refused = |error: &io::Error| error.raw_os_error() == Some(libc::EINVAL);
    // Linux 6.1 and later.
    let mut builder = IoUring::builder();
    builder
        .dontfork()
        .setup_r_disabled()
        .setup_coop_taskrun()
        .setup_taskrun_flag();
    builder.setup_single_issuer().setup_defer_taskrun();
    match builder.build(entries) {
        Err(error) if refused(&error) => {}
        built => return Ok((built?, true)),
    }
    // Linux 5.19 and later.
    let mut builder = IoUring::builder();
    builder
        .dontfork()
        .setup_r_disabled()
        .setup_coop_taskrun()
        .setup_taskrun_flag();
    match builder.build(entries) {
        Err(error) if refused(&error) => {}
        built => return Ok((built?, false)),
    }
    Ok((
        IoUring::builder()
            .dontfork()
            .setup_r_disabled()
            .build(entries)?,
        false,
    ))
}

/// Collects the memory of a request that is not done yet, up to the limits of one operation.
fn collect_iovecs(request: &Request, iovecs: &mut Vec<libc::iovec>) {
    iovecs.clear();
    let mut skip = request.done_bytes;
    let mut room = TRANSFER_BYTES_MAX;
    for segment in &request.segments {
        if skip >= segment.len {
            skip -= segment.len;
            continue;
        }
        let len = (segment.len - skip).min(room);
        iovecs.push(libc::iovec {
            iov_base: segment
                .mapping
                .as_ptr()
                .wrapping_add(segment.offset + skip)
                .cast(),
            iov_len: len,
        });
        skip = 0;
        room -= len;
        if room == 0 || iovecs.len() == IOVEC_LIMIT {
            break;
        }
    }
}

/// Returns the registered buffer that contains the whole transfer, if the transfer has one iovec.
fn fixed_buffer(
    registered: &[RegisteredMapping],
    request: &Request,
    iovecs: &[libc::iovec],
) -> Option<u16> {
    let ([iovec], [segment]) = (iovecs, &request.segments[..]) else {
        return None;
    };
    let home = registered
        .iter()
        .find(|home| Arc::ptr_eq(&home.mapping, &segment.mapping))?;
    let start = (iovec.iov_base as usize).checked_sub(home.mapping.as_ptr() as usize)?;
    let chunk = start / REGISTERED_CHUNK_BYTES;
    let last = (start + iovec.iov_len).checked_sub(1)?;
    if last / REGISTERED_CHUNK_BYTES != chunk || last >= home.mapping.lasting_len() {
        return None;
    }
    u16::try_from(usize::from(home.first_index) + chunk).ok()
}

/// Builds the submission entry. `file` is an index of registered files if `registered_file`, else a descriptor.
fn entry(
    file: RawFd,
    registered_file: bool,
    request: &Request,
    iovecs: &[libc::iovec],
    fixed_buffer: Option<u16>,
) -> squeue::Entry {
    let fd = types::Fd(file);
    let offset = request
        .offset_bytes
        .saturating_add(request.done_bytes as u64);
    let count = iovecs.len() as u32; // at most IOVEC_LIMIT
    let first = iovecs.first();
    let base = first.map_or(std::ptr::null_mut(), |iovec| iovec.iov_base.cast::<u8>());
    let len = first.map_or(0, |iovec| iovec.iov_len as u32); // at most TRANSFER_BYTES_MAX
    let entry = match (request.operation, fixed_buffer) {
        (Operation::SyncData, _) => opcode::Fsync::new(fd)
            .flags(types::FsyncFlags::DATASYNC)
            .build(),
        (Operation::Read, Some(buffer)) => opcode::ReadFixed::new(fd, base, len, buffer)
            .offset(offset)
            .build(),
        (Operation::Write, Some(buffer)) => opcode::WriteFixed::new(fd, base, len, buffer)
            .offset(offset)
            .build(),
        (Operation::Read, None) if count == 1 => {
            opcode::Read::new(fd, base, len).offset(offset).build()
        }
        (Operation::Write, None) if count == 1 => {
            opcode::Write::new(fd, base, len).offset(offset).build()
        }
        (Operation::Read, None) => opcode::Readv::new(fd, iovecs.as_ptr(), count)
            .offset(offset)
            .build(),
        (Operation::Write, None) => opcode::Writev::new(fd, iovecs.as_ptr(), count)
            .offset(offset)
            .build(),
    };
    if registered_file {
        entry.flags(squeue::Flags::FIXED_FILE)
    } else {
        entry
    }
}

#[cfg(test)]
mod tests;
