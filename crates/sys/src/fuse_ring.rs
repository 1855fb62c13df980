//! FUSE over io_uring (Linux 6.14; Documentation/filesystems/fuse/fuse-io-uring.rst and linux/fuse.h of the kernel).
//!
//! The kernel has one queue of requests for each possible CPU of the machine. A queue needs one *entry* for each request that may
//! be with the daemon at the same time. An entry is a header and a payload in the daemon's memory, registered by a command on the
//! ring. The command ends when the kernel has put a request into the entry; the next command commits the reply and fetches again.
//!
//! # Access to an entry
//! The kernel copies into and out of an entry only while a command of that entry is queued, and only inside io_uring_enter(2) of
//! the thread that owns the ring (because of SINGLE_ISSUER and DEFER_TASKRUN). From the end of one command until the push of the
//! next one, the daemon owns the entry, in at most two shares:
//! - [`Payload`] may read the payload of a request that has one;
//! - [`Reply`] may write the payload, but only for a request that has none.
//!
//! Any thread may return a share. The ring's thread pushes the next command after all shares were returned, so no thread reads
//! bytes while another one writes them. A share keeps the memory mapped.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use io_uring::squeue::Entry128;
use io_uring::{IoUring, opcode, types};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::doorbell::Doorbell;
use crate::uring::{DOORBELL_TAG, GETEVENTS, passing};

/// Length of `struct fuse_in_header`.
pub const IN_HEADER_BYTES: usize = 40;
/// Maximum length of an operation's arguments, without its payload.
pub const ARGUMENTS_BYTES: usize = 128;

/// Layout of `struct fuse_uring_req_header`: `fuse_in_header` or `fuse_out_header`, the arguments, and `fuse_uring_ent_in_out`.
const ARGUMENTS_AT: usize = 128;
const COMMIT_ID_AT: usize = ARGUMENTS_AT + ARGUMENTS_BYTES + 8;
const PAYLOAD_BYTES_AT: usize = COMMIT_ID_AT + 8;
const HEADER_BYTES: usize = ARGUMENTS_AT + ARGUMENTS_BYTES + 32;
/// Distance between two headers: whole cache lines.
const HEADER_STRIDE_BYTES: usize = 320;

/// `enum fuse_uring_cmd`.
const REGISTER: u32 = 1;
const COMMIT_AND_FETCH: u32 = 2;

/// Results of commands after the end of the mount or of the ring.
const ENDS: [i32; 3] = [libc::ENOTCONN, libc::ECANCELED, libc::ENODEV];

/// The entries of a ring in one anonymous mapping: first all headers, then all payloads.
struct Memory {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is process-wide and is unmapped only by its owner's drop; the protocol of the module decides which thread
// may touch which bytes.
unsafe impl Send for Memory {}
// SAFETY: as above; no method here returns references.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(len: usize) -> io::Result<Memory> {
        // SAFETY: a new mapping at an address that the kernel chooses replaces nothing.
        let base = unsafe {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            rustix::mm::mmap_anonymous(
                ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
            )?
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let memory = Memory { base, len };
        // A small request should use only a small page. If the kernel refuses, the cost is memory only.
        // SAFETY: the range is this mapping; the advice changes no contents.
        let _ = unsafe {
            rustix::mm::madvise(memory.base.as_ptr().cast(), len, Advice::LinuxNoHugepage)
        };
        Ok(memory)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: no share of an entry exists (each keeps this memory alive), and the ring whose commands used it is gone.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// The answer to a request.
enum Answer {
    /// An errno.
    Error(i32),
    /// This number of bytes at the start of the payload, written by the reply's owner.
    Filled(usize),
    /// A few bytes.
    Short([u8; 16], usize),
    /// Bytes that the ring's thread copies.
    Owned(Vec<u8>),
}

struct ReplySlot {
    /// Number of shares that were not returned.
    shares: AtomicU32,
    /// `Some` once the reply was returned.
    answer: Mutex<Option<Answer>>,
}

struct SharedReplies {
    memory: Memory,
    payload_bytes: usize,
    slots: Box<[ReplySlot]>,
    /// Entries whose shares were all returned.
    returned: Mutex<Vec<u32>>,
    doorbell: Arc<Doorbell>,
}

impl SharedReplies {
    fn header(&self, index: u32) -> *mut u8 {
        let at = index as usize * HEADER_STRIDE_BYTES;
        self.memory.base.as_ptr().wrapping_add(at)
    }

    fn payload(&self, index: u32) -> *mut u8 {
        let headers = (self.slots.len() * HEADER_STRIDE_BYTES).next_multiple_of(4096);
        let at = headers + index as usize * self.payload_bytes;
        self.memory.base.as_ptr().wrapping_add(at)
    }

    fn return_share(&self, index: u32) {
        // Release: orders accesses to the payload before the kernel's. Acquire: pairs with the releases of the other share.
        if self.slots[index as usize]
            .shares
            .fetch_sub(1, Ordering::AcqRel)
            == 1
        {
            self.returned
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(index);
            self.doorbell.ring();
        }
    }
}

/// The payload of a request.
pub struct Payload {
    shared: Arc<SharedReplies>,
    index: u32,
    len: usize,
}

impl AsRef<[u8]> for Payload {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the kernel does not own the entry while this share exists; the reply's owner may not write it when there is a
        // payload (`Reply::room`); `len` is within the entry (`FuseRing::take`).
        unsafe { std::slice::from_raw_parts(self.shared.payload(self.index), self.len) }
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        self.shared.return_share(self.index);
    }
}

/// The duty to answer one request. A drop without an answer answers EIO, because an unanswered request would block its program
/// for ever.
pub struct Reply {
    shared: Arc<SharedReplies>,
    index: u32,
    /// Bytes of the payload that may be written: 0 if there may be a [`Payload`].
    room: usize,
    answered: bool,
}

impl Reply {
    /// Returns the memory for the answer to a request without payload, for `filled`. Empty for other requests.
    pub fn room(&mut self) -> &mut [u8] {
        // SAFETY: with `room` > 0 this is the only share of the entry, which the kernel does not own until the share is returned.
        unsafe { std::slice::from_raw_parts_mut(self.shared.payload(self.index), self.room) }
    }

    /// Answers with an errno.
    pub fn error(self, errno: i32) {
        self.answer(Answer::Error(errno));
    }

    /// Answers with the first `len` bytes of `room`.
    pub fn filled(self, len: usize) {
        let len = len.min(self.room);
        self.answer(Answer::Filled(len));
    }

    /// Answers with a few bytes (cut at 16).
    pub fn short(self, bytes: &[u8]) {
        let mut short = [0; 16];
        let len = bytes.len().min(short.len());
        short[..len].copy_from_slice(&bytes[..len]);
        self.answer(Answer::Short(short, len));
    }

    /// Answers with bytes that the ring's thread copies. Answers EIO if they are longer than a payload.
    pub fn owned(self, bytes: Vec<u8>) {
        self.answer(Answer::Owned(bytes));
    }

    /// Answers with a copy of `bytes`. Copies at once if the payload may be written, and otherwise when the entry is
    /// returned.
    pub fn copied(mut self, bytes: &[u8]) {
        match self.room().get_mut(..bytes.len()) {
            Some(room) => {
                room.copy_from_slice(bytes);
                self.filled(bytes.len());
            }
            None if bytes.len() <= 16 => self.short(bytes),
            None => self.owned(bytes.to_vec()),
        }
    }

    fn answer(mut self, answer: Answer) {
        self.put(answer);
        self.answered = true;
    }

    fn put(&self, answer: Answer) {
        let slot = &self.shared.slots[self.index as usize];
        *slot.answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if !self.answered {
            self.put(Answer::Error(libc::EIO));
        }
        self.shared.return_share(self.index);
    }
}

/// A request from the kernel.
pub struct Received {
    /// `struct fuse_in_header`.
    pub header: [u8; IN_HEADER_BYTES],
    /// The operation's arguments, of `arguments_len` bytes.
    pub arguments: [u8; ARGUMENTS_BYTES],
    /// Length of the used part of `arguments`.
    pub arguments_len: usize,
    /// Further bytes of the request: data to write, names.
    pub payload: Option<Payload>,
    /// The duty to answer.
    pub reply: Reply,
}

/// The entries of some queues, and the ring through which their requests come. Belongs to the thread that waits first.
pub struct FuseRing {
    ring: IoUring<Entry128>,
    shared: Arc<SharedReplies>,
    /// The queue of each entry.
    queues: Vec<u16>,
    /// The commit id of the request in each entry.
    commit_ids: Vec<u64>,
    /// Header and payload of each entry, in the form that the kernel takes.
    iovecs: Vec<[libc::iovec; 2]>,
    /// Entries with a request that was not taken yet.
    arrived: VecDeque<u32>,
    /// Number of entries whose request was taken and whose answer was not sent yet.
    taken: usize,
    /// An empty list, swapped with the list of returned entries.
    spare: Vec<u32>,
    device: Option<OwnedFd>,
    doorbell_polled: bool,
    enabled: bool,
    ended: bool,
}

// SAFETY: the raw pointers inside are those of `iovecs`, into the mapping that `shared` keeps; they are valid in every thread.
// Before its first wait the ring belongs to no thread.
unsafe impl Send for FuseRing {}

impl FuseRing {
    /// Creates a ring with `depth` entries for each of `queues` (CPU numbers). Their payloads have `payload_bytes` (whole pages;
    /// at least the mount's maximum of one request). Memory is allocated at its first use. Fails with EPERM or ENOSYS where
    /// io_uring is forbidden or missing, with EINVAL before Linux 6.1 or without entries, and with ENOMEM or EMFILE.
    pub fn new(queues: &[u16], depth: usize, payload_bytes: usize) -> io::Result<FuseRing> {
        let entries = queues.len().saturating_mul(depth);
        if entries == 0 || entries > 16 << 10 || !payload_bytes.is_multiple_of(4096) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let mut builder = IoUring::builder();
        builder
            .dontfork()
            .setup_r_disabled()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag();
        // One command of each entry, and the poll of the doorbell.
        let ring = builder.build((entries as u32 + 1).next_power_of_two())?;
        let headers = (entries * HEADER_STRIDE_BYTES).next_multiple_of(4096);
        let shared = Arc::new(SharedReplies {
            memory: Memory::new(headers + entries * payload_bytes)?,
            payload_bytes,
            slots: (0..entries)
                .map(|_| ReplySlot {
                    shares: AtomicU32::new(0),
                    answer: Mutex::new(None),
                })
                .collect(),
            returned: Mutex::new(Vec::with_capacity(entries)),
            doorbell: Arc::new(Doorbell::new()?),
        });
        let iovec = |base: *mut u8, len| libc::iovec {
            iov_base: base.cast(),
            iov_len: len,
        };
        Ok(FuseRing {
            ring,
            queues: queues
                .iter()
                .flat_map(|queue| std::iter::repeat_n(*queue, depth))
                .collect(),
            commit_ids: vec![0; entries],
            iovecs: (0..entries as u32)
                .map(|index| {
                    let header = iovec(shared.header(index), HEADER_BYTES);
                    [header, iovec(shared.payload(index), payload_bytes)]
                })
                .collect(),
            arrived: VecDeque::with_capacity(entries),
            taken: 0,
            spare: Vec::with_capacity(entries),
            shared,
            device: None,
            doorbell_polled: false,
            enabled: false,
            ended: false,
        })
    }

    /// Registers the entries with the mount behind `device`, which must have negotiated FUSE_OVER_IO_URING. The kernel learns of
    /// them at the first wait. Panics at a second call, because each entry has one command.
    pub fn register(&mut self, device: OwnedFd) {
        assert!(self.device.is_none(), "entries are registered once");
        let fd = types::Fd(device.as_raw_fd());
        self.device = Some(device);
        for index in 0..self.queues.len() {
            let entry = opcode::UringCmd80::new(fd, REGISTER)
                .cmd(command(self.queues[index], 0))
                .addr(Some(self.iovecs[index].as_ptr() as u64))
                .build();
            let parts = self.iovecs[index].len() as u32;
            self.push(with_len(entry, parts).user_data(index as u64));
        }
    }

    /// Returns the doorbell that ends a wait of the ring's thread.
    pub fn doorbell(&self) -> Arc<Doorbell> {
        self.shared.doorbell.clone()
    }

    /// Returns whether the mount has ended, so that no more requests come.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Sends the finished answers, then waits for one of these events: a request has come (`take` returns it), another thread has
    /// answered a request, the doorbell was rung, `other` reports other work, or the mount has ended. Polls for `poll` before it
    /// sleeps; events that `other` checks must ring the doorbell to end the sleep. Fails with the kernel's answer to the
    /// registration (EINVAL: the payloads are too small; EOPNOTSUPP: not negotiated).
    pub fn wait(&mut self, poll: Duration, mut other: impl FnMut() -> bool) -> io::Result<()> {
        if !self.enabled {
            self.ring.submitter().register_enable_rings()?;
            self.enabled = true;
        }
        // Resets the doorbell before the answers are checked, because a later answer rings it again.
        self.shared.doorbell.disarm();
        self.commit();
        let mut begun = None;
        loop {
            self.enter(0)?;
            self.reap()?;
            let there = !self.arrived.is_empty() || self.ended;
            if other() || there || self.shared.doorbell.has_rung() {
                return Ok(());
            }
            let now = Instant::now();
            if now.duration_since(*begun.get_or_insert(now)) >= poll {
                break;
            }
        }
        self.poll_doorbell();
        let want = usize::from(self.shared.doorbell.arm());
        let entered = self.enter(want);
        // The next wait, or the caller of this one, handles the event that rang the doorbell.
        self.shared.doorbell.disarm();
        entered?;
        self.reap()
    }

    /// Sends the finished answers and collects the requests that have come, without waiting. Fails as `wait` does.
    pub fn send(&mut self) -> io::Result<()> {
        // The doorbell stays as it is: the next wait resets it, and then looks for answers again.
        self.commit();
        self.enter(0)?;
        self.reap()
    }

    /// Returns how many requests were taken whose answers were not sent yet, wherever they are.
    pub fn taken(&self) -> usize {
        self.taken
    }

    /// Returns whether `take` has a request.
    pub fn has_arrived(&self) -> bool {
        !self.arrived.is_empty()
    }

    /// Returns a request that has come.
    pub fn take(&mut self) -> Option<Received> {
        let index = self.arrived.pop_front()?;
        self.taken += 1;
        let header_at = self.shared.header(index);
        let mut header = [0; IN_HEADER_BYTES];
        let mut arguments = [0; ARGUMENTS_BYTES];
        // SAFETY: the entry's command has ended, so the kernel does not touch it; only this thread uses its header, which has
        // HEADER_BYTES.
        let (commit_id, payload_bytes) = unsafe {
            ptr::copy_nonoverlapping(header_at, header.as_mut_ptr(), header.len());
            let from = header_at.wrapping_add(ARGUMENTS_AT);
            ptr::copy_nonoverlapping(from, arguments.as_mut_ptr(), arguments.len());
            (
                header_at.wrapping_add(COMMIT_ID_AT).cast::<u64>().read(),
                header_at
                    .wrapping_add(PAYLOAD_BYTES_AT)
                    .cast::<u32>()
                    .read() as usize,
            )
        };
        self.commit_ids[index as usize] = commit_id;
        let whole = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let payload_bytes = payload_bytes.min(self.shared.payload_bytes);
        let arguments_len = whole
            .saturating_sub(IN_HEADER_BYTES + payload_bytes)
            .min(ARGUMENTS_BYTES);
        let has_payload = payload_bytes > 0;
        let slot = &self.shared.slots[index as usize];
        // Relaxed: this thread passes the shares on, which orders the store.
        slot.shares
            .store(1 + u32::from(has_payload), Ordering::Relaxed);
        Some(Received {
            header,
            arguments,
            arguments_len,
            payload: has_payload.then(|| Payload {
                shared: self.shared.clone(),
                index,
                len: payload_bytes,
            }),
            reply: Reply {
                shared: self.shared.clone(),
                index,
                room: if has_payload {
                    0
                } else {
                    self.shared.payload_bytes
                },
                answered: false,
            },
        })
    }

    /// Pushes the commands of all returned entries.
    fn commit(&mut self) {
        let mut returned = std::mem::take(&mut self.spare);
        {
            let mut list = self.shared.returned.lock();
            let list = list.as_mut().unwrap_or_else(|e| e.get_mut());
            std::mem::swap(&mut returned, list);
        }
        for index in returned.drain(..) {
            self.taken -= 1;
            let answer = self.shared.slots[index as usize]
                .answer
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take();
            self.fill(index, answer.unwrap_or(Answer::Error(libc::EIO)));
            let Some(device) = &self.device else { continue };
            let fd = types::Fd(device.as_raw_fd());
            let queue = self.queues[index as usize];
            let entry = opcode::UringCmd80::new(fd, COMMIT_AND_FETCH)
                .cmd(command(queue, self.commit_ids[index as usize]))
                .build();
            self.push(entry.user_data(u64::from(index)));
        }
        self.spare = returned;
    }

    /// Writes an answer into its entry, whose shares were all returned.
    fn fill(&self, index: u32, answer: Answer) {
        let room = self.shared.payload_bytes;
        let payload = self.shared.payload(index);
        let put = |bytes: &[u8]| {
            // SAFETY: neither the kernel nor a share uses the entry, and `bytes` fits (checked by the callers).
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), payload, bytes.len()) };
            (0, bytes.len())
        };
        let (errno, len) = match &answer {
            Answer::Error(errno) => (*errno, 0),
            Answer::Filled(len) => (0, *len),
            Answer::Short(bytes, len) => put(&bytes[..*len]),
            Answer::Owned(bytes) if bytes.len() <= room => put(bytes),
            Answer::Owned(_) => (libc::EIO, 0),
        };
        let header = self.shared.header(index);
        // Writes `struct fuse_out_header` over the request's header: length and error. The unique id is at the same place in
        // both.
        let whole = (16 + len) as u32;
        // SAFETY: as above; the offsets are within HEADER_BYTES and aligned, since headers are.
        unsafe {
            header.cast::<u32>().write(whole);
            header.wrapping_add(4).cast::<i32>().write(-errno);
            header
                .wrapping_add(PAYLOAD_BYTES_AT)
                .cast::<u32>()
                .write(len as u32);
        }
    }

    fn poll_doorbell(&mut self) {
        if !self.doorbell_polled {
            let fd = types::Fd(self.shared.doorbell.as_fd().as_raw_fd());
            let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).build();
            self.doorbell_polled = true;
            self.push(Entry128::from(entry).user_data(DOORBELL_TAG));
        }
    }

    fn push(&mut self, entry: Entry128) {
        // SAFETY: an entry with a queued command is the kernel's until the command ends: its shares were returned, and the memory
        // stays until the ring is gone. `iovecs`, which a registration points to, never change. A poll uses no memory.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        // The ring has room for one command of each entry and the doorbell's poll.
        debug_assert!(pushed.is_ok());
    }

    /// Calls io_uring_enter(2) once, even with nothing to start: requests arrive inside of it.
    fn enter(&mut self, want: usize) -> io::Result<()> {
        let to_submit = self.ring.submission().len() as u32;
        // SAFETY: only numbers are passed; the pushed entries are sound by `push`.
        let entered = unsafe {
            self.ring
                .submitter()
                .enter::<libc::sigset_t>(to_submit, want as u32, GETEVENTS, None)
        };
        passing(entered)
    }

    fn reap(&mut self) -> io::Result<()> {
        let mut failed = None;
        for completion in self.ring.completion() {
            if completion.user_data() == DOORBELL_TAG {
                self.doorbell_polled = false;
                self.shared.doorbell.drain();
                continue;
            }
            match completion.result().saturating_neg() {
                ..=0 => self.arrived.push_back(completion.user_data() as u32),
                errno if ENDS.contains(&errno) => self.ended = true,
                errno => failed = Some(errno),
            }
        }
        failed.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
    }
}

/// Returns a `struct fuse_uring_cmd_req`.
fn command(queue: u16, commit_id: u64) -> [u8; 80] {
    let mut command = [0; 80];
    command[8..16].copy_from_slice(&commit_id.to_ne_bytes());
    command[16..18].copy_from_slice(&queue.to_ne_bytes());
    command
}

/// Sets `io_uring_sqe.len`, which the builder of commands does not set.
fn with_len(mut entry: Entry128, len: u32) -> Entry128 {
    const LEN_AT: usize = 24;
    const { assert!(size_of::<Entry128>() == 128) };
    // SAFETY: the entry is the kernel's `struct io_uring_sqe` of 128 bytes, in which a u32 `len` is at byte 24.
    unsafe {
        ptr::from_mut(&mut entry)
            .cast::<u8>()
            .add(LEN_AT)
            .cast::<u32>()
            .write(len);
    }
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAYLOAD_BYTES: usize = 8192;

    fn ring() -> FuseRing {
        FuseRing::new(&[3], 2, PAYLOAD_BYTES).unwrap()
    }

    /// Acts as the kernel when a request comes.
    fn arrive(ring: &mut FuseRing, index: u32, payload: &[u8]) {
        let len = (IN_HEADER_BYTES + 4 + payload.len()) as u32;
        let header = ring.shared.header(index);
        // SAFETY: no share of the entry exists; the writes stay within it.
        unsafe {
            header.cast::<u32>().write(len);
            header.add(ARGUMENTS_AT).cast::<u32>().write(0x1234_5678);
            header.add(COMMIT_ID_AT).cast::<u64>().write(77);
            let bytes = payload.len();
            header
                .add(PAYLOAD_BYTES_AT)
                .cast::<u32>()
                .write(bytes as u32);
            ptr::copy_nonoverlapping(payload.as_ptr(), ring.shared.payload(index), bytes);
        }
        ring.arrived.push_back(index);
    }

    /// Acts as the kernel after a commit. Returns the error and the payload of an entry.
    fn answer(ring: &mut FuseRing, index: u32) -> (i32, Vec<u8>) {
        ring.commit();
        let header = ring.shared.header(index);
        // SAFETY: as above.
        unsafe {
            let len = header.add(PAYLOAD_BYTES_AT).cast::<u32>().read() as usize;
            assert_eq!(header.cast::<u32>().read() as usize, 16 + len);
            let payload = std::slice::from_raw_parts(ring.shared.payload(index), len);
            (header.add(4).cast::<i32>().read(), payload.to_vec())
        }
    }

    #[test]
    fn a_request_counts_as_taken_until_its_answer_is_sent() {
        let mut ring = ring();
        arrive(&mut ring, 0, b"");
        arrive(&mut ring, 1, b"bytes to write");
        assert!(ring.has_arrived());
        let (read, write) = (ring.take().unwrap(), ring.take().unwrap());
        assert!(!ring.has_arrived());
        read.reply.short(b"");
        write.reply.short(b"14");
        assert_eq!(ring.taken(), 2);
        ring.commit();
        assert_eq!(ring.taken(), 1, "the payload was not returned");
        drop(write.payload);
        ring.commit();
        assert_eq!(ring.taken(), 0);
    }

    #[test]
    fn an_entry_returns_to_the_kernel_after_all_its_shares() {
        let mut ring = ring();
        arrive(&mut ring, 1, b"bytes to write");
        let received = ring.take().unwrap();
        assert!(ring.take().is_none());
        assert_eq!(received.arguments_len, 4);
        assert_eq!(received.arguments[..4], 0x1234_5678_u32.to_ne_bytes());
        assert_eq!(ring.commit_ids[1], 77);
        let (payload, mut reply) = (received.payload.unwrap(), received.reply);
        assert!(reply.room().is_empty(), "another thread may read it");
        reply.short(b"14");
        assert!(ring.shared.returned.lock().unwrap().is_empty());
        assert!(!ring.shared.doorbell.has_rung());
        std::thread::scope(|scope| {
            scope.spawn(move || assert_eq!(payload.as_ref(), b"bytes to write"));
        });
        assert!(ring.shared.doorbell.has_rung());
        assert_eq!(answer(&mut ring, 1), (0, b"14".to_vec()));
    }

    #[test]
    fn a_read_is_answered_from_the_payload_and_not_beyond_it() {
        let mut ring = ring();
        for (asked, given) in [(5, 5), (PAYLOAD_BYTES + 1, PAYLOAD_BYTES)] {
            arrive(&mut ring, 0, b"");
            let mut reply = ring.take().unwrap().reply;
            assert_eq!(reply.room().len(), PAYLOAD_BYTES);
            reply.room().fill(9);
            reply.filled(asked);
            assert_eq!(answer(&mut ring, 0), (0, vec![9; given]));
        }
    }

    #[test]
    fn every_request_is_answered() {
        let mut ring = ring();
        arrive(&mut ring, 0, b"x");
        drop(ring.take());
        assert_eq!(answer(&mut ring, 0), (-libc::EIO, vec![]));
        arrive(&mut ring, 0, b"");
        ring.take().unwrap().reply.error(libc::ENOENT);
        assert_eq!(answer(&mut ring, 0), (-libc::ENOENT, vec![]));
        arrive(&mut ring, 0, b"");
        ring.take().unwrap().reply.owned(vec![1; PAYLOAD_BYTES + 1]);
        assert_eq!(answer(&mut ring, 0), (-libc::EIO, vec![]));
    }

    #[test]
    fn an_answer_outlives_its_ring() {
        let mut ring = ring();
        arrive(&mut ring, 0, b"");
        let mut reply = ring.take().unwrap().reply;
        drop(ring);
        reply.room().fill(1);
        reply.filled(PAYLOAD_BYTES);
    }
}
