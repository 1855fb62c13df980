//! XDP sockets: selected frames of one network interface, past the kernel's network stack (AF_XDP).
//!
//! An [`XdpSocket`] has a socket for each receive queue of the interface, with memory of its own, and a program on the interface that redirects the
//! frames of a [`Selection`] to them. It sends through the socket of the first queue. All other frames of the interface pass on to the kernel,
//! so other sockets get them as before.

use std::io::{self, IoSlice};
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::packet::{self, Frames, PacketError};
use crate::xdp_features;
use crate::xdp_program::Redirect;
pub use crate::xdp_program::{Numbers, Selection};
use crate::xdp_rings::{CHUNK_BYTES, Chunks, HEADROOM_BYTES, Kind, Ring, set_option};

/// Chunks for frames that arrive: the number that all queues share equally, and the bounds for one queue.
const RECEIVE_CHUNKS: usize = 4096;
const RECEIVE_CHUNKS_OF_QUEUE: std::ops::RangeInclusive<usize> = 512..=2048;
/// Queues that get a socket. Frames of further ones pass on to the kernel.
const QUEUES_MAX: u32 = 16;
/// Chunks for frames that are sent, a power of two.
const SEND_CHUNKS: usize = 1024;
/// Entries of the completion ring of a socket that sends nothing. The kernel wants the ring.
const UNUSED_ENTRIES: u32 = 64;
/// What the kernel may queue of the frames that a socket sends. As much as all chunks, with what the kernel adds.
const SEND_BYTES: i32 = 16 << 20;
/// System calls for one burst: the kernel sends 32 chunks with each by default.
const CALLS_MAX: u32 = 64;
/// Of these, calls after which the kernel has sent nothing.
const FAILURES_MAX: u32 = 4;
/// How long the kernel may take to release a queue.
const RELEASED_WITHIN: Duration = Duration::from_millis(500);
/// Option of SOL_XDP (linux/if_xdp.h, since 6.17): chunks that the kernel sends with one call.
const MAX_TX_SKB_BUDGET: i32 = 9;
/// An Ethernet header, and a VLAN tag.
const ETHERNET_BYTES: usize = 18;

/// Why an interface has no XDP socket.
#[derive(Debug, thiserror::Error)]
pub enum XdpError {
    /// The interface cannot be used at all.
    #[error(transparent)]
    Interface(PacketError),
    /// The process lacks a capability.
    #[error(
        "no permission for XDP on {0}: it needs the capabilities CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF; run as root, or choose --link packet"
    )]
    Denied(String),
    /// The kernel lacks XDP sockets, or frames of several chunks.
    #[error(
        "this kernel has no XDP sockets that suffice for {interface}: {source}; it must be Linux 6.6 or newer with CONFIG_XDP_SOCKETS and CONFIG_BPF_SYSCALL; choose --link packet"
    )]
    Kernel {
        /// The interface.
        interface: String,
        /// The kernel's reason.
        source: io::Error,
    },
    /// Too little memory may be locked.
    #[error(
        "XDP on {interface} needs {mebibytes} MiB of locked memory, and the limit is lower: raise it (`ulimit -l`, LimitMEMLOCK= of systemd), run with CAP_IPC_LOCK, or choose --link packet"
    )]
    Memory {
        /// The interface.
        interface: String,
        /// Memory of its sockets.
        mebibytes: usize,
    },
    /// Other interfaces get their frames through it.
    #[error(
        "XDP on the network interface {interface} would take frames of {other}, which is on top of it; choose --link packet"
    )]
    Stacked {
        /// The interface.
        interface: String,
        /// The one on top.
        other: String,
    },
    /// The interface bundles others.
    #[error(
        "the network interface {0} is a bond, and an XDP socket on it receives nothing; choose --link packet, or name the interfaces that it bundles"
    )]
    Bond(String),
    /// Another XDP program or XDP socket uses the interface.
    #[error(
        "another XDP program or XDP socket uses the network interface {0} (`ip link show {0}`, `bpftool net`); stop it, or choose --link packet"
    )]
    Busy(String),
    /// The driver refuses the program.
    #[error(
        "the driver of the network interface {interface} refuses an XDP program at an MTU of {mtu} bytes: {source}; lower the MTU (`ip link set {interface} mtu 1500`), or choose --link packet"
    )]
    Driver {
        /// The interface.
        interface: String,
        /// Its MTU.
        mtu: usize,
        /// The kernel's reason.
        source: io::Error,
    },
    /// Another error.
    #[error("cannot {action} for XDP on the network interface {interface}: {source}")]
    Io {
        /// For example "make a ring".
        action: &'static str,
        /// The interface.
        interface: String,
        /// The kernel's reason.
        source: io::Error,
    },
}

impl XdpError {
    fn of(interface: &str, action: &'static str) -> impl Fn(io::Error) -> XdpError {
        let interface = interface.to_owned();
        move |source| {
            let interface = interface.clone();
            match source.raw_os_error() {
                Some(libc::EPERM | libc::EACCES) => XdpError::Denied(interface),
                Some(libc::EAFNOSUPPORT | libc::ENOSYS | libc::ENOPROTOOPT) => {
                    XdpError::Kernel { interface, source }
                }
                Some(libc::EBUSY) => XdpError::Busy(interface),
                _ => XdpError::Io {
                    action,
                    interface,
                    source,
                },
            }
        }
    }
}

/// Sends frames, and receives the selected ones, on one interface.
#[derive(Debug)]
pub struct XdpSocket {
    /// Dropped first: no frame goes to a socket that is being closed.
    redirect: Redirect,
    send: Mutex<Sending>,
    queues: Vec<Queue>,
    frames: usize,
    frame_bytes_max: usize,
    is_zero_copy: bool,
    /// The queue from which the next call receives first: a busy one must not keep the others waiting.
    next_queue: AtomicUsize,
}

/// The socket of a queue of the interface.
#[derive(Debug)]
struct Queue {
    fd: OwnedFd,
    chunks: Chunks,
    receive: Mutex<Receiving>,
}

#[derive(Debug)]
struct Receiving {
    arrived: Ring<libc::xdp_desc>,
    fill: Ring<u64>,
}

#[derive(Debug)]
struct Sending {
    ring: Ring<libc::xdp_desc>,
    sent: Ring<u64>,
    /// Chunks that neither a frame nor the kernel uses.
    free: Vec<u64>,
}

impl XdpSocket {
    /// Opens a socket on an interface with a MAC address and an MTU. The kernel allocates its memory on a node if there is free memory.
    pub fn open(
        interface: &str,
        (mac, mtu): ([u8; 6], usize),
        selection: &Selection,
        node: Option<u32>,
    ) -> Result<XdpSocket, XdpError> {
        let failed = |action| XdpError::of(interface, action);
        let index = packet::index_of(interface).map_err(XdpError::Interface)?;
        check_alone(interface)?;
        let count = packet::receive_queues(interface).map_err(failed("count the queues"))?;
        let count = count.clamp(1, QUEUES_MAX);
        let (least, most) = RECEIVE_CHUNKS_OF_QUEUE.into_inner();
        let share = (RECEIVE_CHUNKS / count as usize).clamp(least, most);
        let chunks = 1 << share.ilog2();
        let of_queue = Opening {
            interface,
            index,
            chunks,
            total_chunks: chunks * count as usize + SEND_CHUNKS,
            node,
        };
        let loaded = Redirect::load(selection, mac, count);
        let mut redirect = loaded.map_err(|source| match source.raw_os_error() {
            // The kernel knows no map of such sockets.
            Some(libc::EINVAL) => XdpError::Kernel {
                interface: interface.to_owned(),
                source,
            },
            _ => failed("load a program")(source),
        })?;
        // Before the sockets: a program of another process is noticed at once. Without sockets, all frames pass.
        redirect.attach(index).map_err(|source| {
            let interface = interface.to_owned();
            match source.raw_os_error() {
                Some(libc::EINVAL | libc::ERANGE | libc::EOPNOTSUPP | libc::E2BIG) => {
                    XdpError::Driver {
                        interface,
                        mtu,
                        source,
                    }
                }
                // A program of another kind, or of an interface that bundles this one.
                Some(libc::EEXIST) => XdpError::Busy(interface),
                _ => failed("attach a program")(source),
            }
        })?;
        let (first, send) = of_queue.open_first()?;
        let mut queues = vec![first];
        for queue in 1..count {
            queues.push(of_queue.open_further(queue)?);
        }
        for (number, queue) in (0..).zip(&queues) {
            let set = redirect.set_socket(number, queue.fd.as_fd());
            set.map_err(failed("redirect frames"))?;
        }
        let frame_bytes_max = mtu + ETHERNET_BYTES;
        Ok(XdpSocket {
            is_zero_copy: queues.iter().all(|queue| is_zero_copy(queue.fd.as_fd())),
            frames: chunks / frame_bytes_max.div_ceil(CHUNK_BYTES - HEADROOM_BYTES),
            frame_bytes_max,
            redirect,
            send: Mutex::new(send),
            queues,
            next_queue: AtomicUsize::new(0),
        })
    }

    /// Returns whether the driver of an interface can read and write the memory of a socket itself, for frames of the interface's MTU. Does not touch the interface.
    pub fn may_be_zero_copy(interface: &str, mtu: usize) -> bool {
        let index = packet::index_of(interface).ok();
        let features = index.and_then(|index| xdp_features::of(index).ok());
        // The sockets ask for frames of several chunks. The kernel copies then if the driver takes one chunk only.
        let chunks = (mtu + ETHERNET_BYTES).div_ceil(CHUNK_BYTES - HEADROOM_BYTES);
        features.is_some_and(|features| {
            features.is_zero_copy && features.zero_copy_chunks as usize >= chunks.max(2)
        }) && check_alone(interface).is_ok()
    }

    /// Waits until the kernel has given back the chunks of all frames that were sent, for at most a time. Returns whether it has.
    pub fn await_sent(&self, time: Duration) -> bool {
        let start = Instant::now();
        let socket = &self.queues[0];
        loop {
            let mut send = lock(&self.send);
            // Frames that the kernel has left stay in the ring.
            let _ = send.kick(socket.fd.as_fd());
            send.reclaim();
            if send.free.len() == SEND_CHUNKS {
                return true;
            }
            drop(send);
            if start.elapsed() >= time {
                return false;
            }
            std::thread::yield_now();
        }
    }

    /// Returns how many frames of the largest size a queue holds until they are received.
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// Returns whether the driver reads and writes the memory of the sockets itself.
    pub fn is_zero_copy(&self) -> bool {
        self.is_zero_copy
    }

    /// Adds a number to those whose frames the socket receives, with [`Numbers::Listed`].
    pub fn list(&self, number: [u8; 4]) -> io::Result<()> {
        self.redirect.list(number)
    }

    /// Returns the sockets of the queues, which are readable when a frame has arrived.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.queues.iter().map(|queue| queue.fd.as_fd())
    }

    /// Sends frames, each in two pieces, from any thread. Returns the number of frames that were taken. Fails, if none was taken, with EAGAIN when all chunks are in
    /// use, with EMSGSIZE when the first frame is longer than the MTU allows, and with the kernel's error.
    pub fn send_many(&self, frames: &[[IoSlice<'_>; 2]]) -> io::Result<usize> {
        let socket = &self.queues[0];
        let mut send = lock(&self.send);
        send.reclaim();
        let mut taken = 0;
        let mut entries = 0;
        for pieces in frames {
            let bytes: usize = pieces.iter().map(|piece| piece.len()).sum();
            if bytes > self.frame_bytes_max && taken == 0 {
                return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
            }
            let needed = bytes.div_ceil(CHUNK_BYTES);
            let has_room = send.free.len() >= needed && send.ring.room() >= entries + needed as u32;
            if !has_room || bytes > self.frame_bytes_max {
                break;
            }
            entries += send.write(&socket.chunks, entries, pieces, bytes);
            taken += 1;
        }
        send.ring.add(entries);
        // Also for frames that the kernel has left of an earlier call.
        match (send.kick(socket.fd.as_fd()), taken) {
            (Err(error), 0) => Err(error),
            (Ok(()), 0) => Err(io::ErrorKind::WouldBlock.into()),
            (_, taken) => Ok(taken),
        }
    }

    /// Receives frames into `frames`, whose former ones are lost. Leaves out those that are too long for a place. Returns whether more may have arrived. One
    /// thread receives at a time; others wait.
    pub fn receive_many(&self, frames: &mut Frames) -> bool {
        frames.clear();
        let mut has_more = false;
        let first = self.next_queue.fetch_add(1, Ordering::Relaxed) % self.queues.len();
        let (later, earlier) = self.queues.split_at(first);
        for queue in earlier.iter().chain(later) {
            has_more |= queue.receive(frames);
        }
        has_more
    }
}

/// What the sockets of all queues of an interface have in common.
struct Opening<'o> {
    interface: &'o str,
    index: i32,
    /// Chunks of a queue.
    chunks: usize,
    /// Chunks of all queues, for the message about too little memory.
    total_chunks: usize,
    node: Option<u32>,
}

impl Opening<'_> {
    /// Opens the socket of the first queue, which also sends.
    fn open_first(&self) -> Result<(Queue, Sending), XdpError> {
        let failed = XdpError::of(self.interface, "make a ring");
        let fd = self.socket()?;
        let chunks = self.register(&fd, self.chunks + SEND_CHUNKS)?;
        let entries = SEND_CHUNKS as u32;
        let send = Sending {
            sent: Ring::new(fd.as_fd(), Kind::Completion, entries).map_err(&failed)?,
            ring: Ring::new(fd.as_fd(), Kind::Send, entries).map_err(&failed)?,
            free: (self.chunks..self.chunks + SEND_CHUNKS)
                .map(|chunk| (chunk * CHUNK_BYTES) as u64)
                .collect(),
        };
        // A kernel before 6.17 sends 32 chunks with each call.
        let _ = set_option(fd.as_fd(), MAX_TX_SKB_BUDGET, &entries);
        set_send_buffer(fd.as_fd()).map_err(&failed)?;
        Ok((self.bound(fd, chunks, 0)?, send))
    }

    /// Opens the socket of another queue.
    fn open_further(&self, queue: u32) -> Result<Queue, XdpError> {
        let failed = XdpError::of(self.interface, "make a ring");
        let fd = self.socket()?;
        let chunks = self.register(&fd, self.chunks)?;
        let _unused: Ring<u64> =
            Ring::new(fd.as_fd(), Kind::Completion, UNUSED_ENTRIES).map_err(failed)?;
        self.bound(fd, chunks, queue)
    }

    fn socket(&self) -> Result<OwnedFd, XdpError> {
        // SAFETY: the call takes numbers only.
        let fd = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            let failed = XdpError::of(self.interface, "open a socket");
            return Err(failed(io::Error::last_os_error()));
        }
        // SAFETY: `fd` is a descriptor that nothing else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn register(&self, fd: &OwnedFd, count: usize) -> Result<Chunks, XdpError> {
        Chunks::register(fd.as_fd(), count, self.node).map_err(|source| {
            match source.raw_os_error() {
                Some(libc::ENOBUFS) => XdpError::Memory {
                    interface: self.interface.to_owned(),
                    mebibytes: (self.total_chunks * CHUNK_BYTES).div_ceil(1 << 20),
                },
                _ => XdpError::of(self.interface, "register memory")(source),
            }
        })
    }

    /// Gives all chunks for frames that arrive to the kernel, and binds the socket to a queue.
    fn bound(&self, fd: OwnedFd, chunks: Chunks, queue: u32) -> Result<Queue, XdpError> {
        let failed = XdpError::of(self.interface, "make a ring");
        let entries = self.chunks as u32;
        let mut fill = Ring::new(fd.as_fd(), Kind::Fill, entries).map_err(&failed)?;
        for chunk in 0..entries {
            fill.write(chunk, u64::from(chunk) * CHUNK_BYTES as u64);
        }
        fill.add(entries);
        let arrived = Ring::new(fd.as_fd(), Kind::Receive, entries).map_err(&failed)?;
        // The kernel lets the driver use the memory if it can, and else copies.
        let address = libc::sockaddr_xdp {
            sxdp_family: libc::AF_XDP as u16,
            sxdp_flags: libc::XDP_USE_NEED_WAKEUP | libc::XDP_USE_SG,
            sxdp_ifindex: self.index as u32,
            sxdp_queue_id: queue,
            sxdp_shared_umem_fd: 0,
        };
        let length = size_of::<libc::sockaddr_xdp>() as libc::socklen_t;
        let start = Instant::now();
        loop {
            // SAFETY: the pointer and the length are those of `address`.
            let result = unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length) };
            if result == 0 {
                break;
            }
            let source = io::Error::last_os_error();
            // The kernel releases the queue some time after the end of the socket that has had it.
            if source.raw_os_error() == Some(libc::EBUSY) && start.elapsed() < RELEASED_WITHIN {
                std::thread::sleep(RELEASED_WITHIN / 50);
                continue;
            }
            let interface = self.interface.to_owned();
            return Err(match source.raw_os_error() {
                // The flag for frames of several chunks is unknown.
                Some(libc::EINVAL) => XdpError::Kernel { interface, source },
                _ => XdpError::of(&interface, "bind a socket")(source),
            });
        }
        let receive = Mutex::new(Receiving { arrived, fill });
        Ok(Queue {
            fd,
            chunks,
            receive,
        })
    }
}

impl Queue {
    /// Receives whole frames, as long as there are places. Returns whether more have arrived.
    fn receive(&self, frames: &mut Frames) -> bool {
        let mut receive = lock(&self.receive);
        let Receiving { arrived, fill } = &mut *receive;
        let ready = arrived.ready();
        let mut taken = 0;
        let mut has_more = false;
        while taken < ready {
            let rest = (taken..ready).map(|number| arrived.read(number));
            let is_last = |entry: &libc::xdp_desc| entry.options & libc::XDP_PKT_CONTD == 0;
            // The kernel adds the entries of a frame together. A frame without its end would wait for it.
            let Some(last) = rest.into_iter().position(|entry| is_last(&entry)) else {
                break;
            };
            let Some(place) = frames.place() else {
                has_more = true;
                break;
            };
            let mut length = 0;
            for number in 0..=last as u32 {
                let entry = arrived.read(taken + number);
                let end = length + entry.len as usize;
                if let Some(room) = place.get_mut(length..end) {
                    self.chunks.copy_out(entry.addr, room);
                }
                length = end;
                // There is room: the ring has an entry for each chunk of the socket. An address is that of the frame in its chunk.
                fill.write(taken + number, entry.addr & !(CHUNK_BYTES as u64 - 1));
            }
            frames.add(length);
            taken += last as u32 + 1;
        }
        arrived.take(taken);
        fill.add(taken);
        if fill.needs_call() {
            // The driver ran out of chunks and waits.
            let fd = self.fd.as_raw_fd();
            // SAFETY: without a buffer the call only wakes the driver.
            unsafe { libc::recv(fd, ptr::null_mut(), 0, libc::MSG_DONTWAIT) };
        }
        has_more
    }
}

impl Sending {
    /// Takes the chunks back whose frames were sent.
    fn reclaim(&mut self) {
        let ready = self.sent.ready();
        let chunks = (0..ready).map(|number| self.sent.read(number) & !(CHUNK_BYTES as u64 - 1));
        self.free.extend(chunks);
        self.sent.take(ready);
    }

    /// Writes a frame into free chunks and the ring, behind `after` other entries. Returns the number of its entries. The caller has checked that there is room.
    fn write(
        &mut self,
        chunks: &Chunks,
        after: u32,
        pieces: &[IoSlice<'_>; 2],
        bytes: usize,
    ) -> u32 {
        let mut left = bytes;
        let mut pieces = pieces.iter().map(|piece| &piece[..]);
        let mut piece: &[u8] = &[];
        let mut entries = 0;
        while left > 0 {
            let Some(chunk) = self.free.pop() else {
                break;
            };
            let length = left.min(CHUNK_BYTES);
            let mut at = 0;
            while at < length {
                if piece.is_empty() {
                    piece = pieces.next().unwrap_or_default();
                    continue;
                }
                let (now, later) = piece.split_at(piece.len().min(length - at));
                chunks.copy_in(chunk + at as u64, now);
                at += now.len();
                piece = later;
            }
            left -= length;
            let entry = libc::xdp_desc {
                addr: chunk,
                len: length as u32,
                options: if left > 0 { libc::XDP_PKT_CONTD } else { 0 },
            };
            self.ring.write(after + entries, entry);
            entries += 1;
        }
        entries
    }

    /// Has the kernel send what is in the ring. Frames that it leaves are sent with later ones.
    fn kick(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        let mut failures = 0;
        for _ in 0..CALLS_MAX {
            let before = self.ring.pending();
            if before == 0 || !self.ring.needs_call() {
                return Ok(());
            }
            // SAFETY: the call has no buffer and no address.
            let result = unsafe {
                libc::sendto(
                    socket.as_raw_fd(),
                    ptr::null(),
                    0,
                    libc::MSG_DONTWAIT,
                    ptr::null(),
                    0,
                )
            };
            if result >= 0 {
                // The kernel has emptied the ring, or the driver does so now.
                return Ok(());
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                // EAGAIN: the kernel sends some chunks with each call. EBUSY, ENOBUFS: the interface's queue is full.
                Some(libc::EAGAIN | libc::EBUSY | libc::ENOBUFS | libc::EINTR) => {}
                _ => return Err(error),
            }
            if self.ring.pending() == before {
                failures += 1;
                if failures == FAILURES_MAX {
                    break;
                }
                std::thread::yield_now();
            }
        }
        Ok(())
    }
}

/// Fails if an XDP program on the interface would take frames of others: VLANs and the like have the same MAC address, and the interface has removed the tag already.
fn check_alone(interface: &str) -> Result<(), XdpError> {
    let directory = format!("/sys/class/net/{interface}");
    let entries = std::fs::read_dir(&directory).into_iter().flatten();
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    for name in names {
        if let Some(other) = name.strip_prefix("upper_") {
            return Err(XdpError::Stacked {
                interface: interface.to_owned(),
                other: other.to_owned(),
            });
        }
    }
    match std::path::Path::new(&directory).join("bonding").exists() {
        true => Err(XdpError::Bond(interface.to_owned())),
        false => Ok(()),
    }
}

fn is_zero_copy(socket: BorrowedFd<'_>) -> bool {
    let mut options = MaybeUninit::<libc::xdp_options>::zeroed();
    let mut length = size_of::<libc::xdp_options>() as libc::socklen_t;
    // SAFETY: the pointers are those of `options` and of its length.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_XDP,
            libc::XDP_OPTIONS,
            options.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    // SAFETY: all bytes were zero, or are the kernel's, and all are valid.
    let options = unsafe { options.assume_init() };
    result == 0 && options.flags & libc::XDP_OPTIONS_ZEROCOPY != 0
}

fn set_send_buffer(socket: BorrowedFd<'_>) -> io::Result<()> {
    // The kernel doubles the value.
    let value = SEND_BYTES / 2;
    let length = size_of::<i32>() as libc::socklen_t;
    // SAFETY: the pointer and the length are those of `value`.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_SNDBUFFORCE,
            (&raw const value).cast(),
            length,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Ignores poisoning: a panic can lose chunks, and cannot make two owners of one.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
