//! Requests of the ring that are not reads and writes, handed to `fuser` as if the kernel had sent them by the device.
//!
//! `fuser` reads requests from a descriptor and writes replies to it. Here that is one end of a pair of sockets that keep
//! the bounds of messages. A request's number is changed for the place where its [`Reply`] waits; the kernel never sees it.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use jericho_sys::fuse_ring::{ARGUMENTS_BYTES, IN_HEADER_BYTES, Payload, Received, Reply};
use jericho_sys::service;
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, SocketFlags, SocketType,
};

use crate::filesystem::Jericho;
use crate::protocol::{InHeader, OP_DESTROY, OP_INIT, OP_READDIR, OP_READDIRPLUS, OutHeader};

/// A listing is cut to this: a socket refuses a message that is longer than its buffer (212,992 bytes by default), and the
/// kernel asks for the rest.
const LISTING_BYTES_MAX: u32 = 128 << 10;
/// Longer than any reply.
const MESSAGE_BYTES_MAX: usize = 256 << 10;
/// The number of requests that are our own.
const NOBODY: u64 = u64::MAX;

/// Replies that are waited for, by the number that their request was given.
#[derive(Default)]
struct Waiting {
    replies: Vec<Option<Reply>>,
    free: Vec<usize>,
}

struct Shared {
    socket: OwnedFd,
    waiting: Mutex<Waiting>,
}

/// The way to `fuser` and back.
pub(crate) struct Forward {
    shared: Arc<Shared>,
    workers: usize,
    session: Option<JoinHandle<io::Result<()>>>,
    replies: Option<JoinHandle<()>>,
}

impl Forward {
    /// Begins a second session of `fuser` on `filesystem`. Errors: EMFILE, ENOMEM, no thread.
    pub(crate) fn new(filesystem: Jericho, config: fuser::Config) -> io::Result<Forward> {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        let workers = config.n_threads.unwrap_or(1);
        let shared = Arc::new(Shared {
            socket: ours,
            waiting: Mutex::default(),
        });
        // A session begins with INIT: what the real one agreed upon holds; this answer goes nowhere.
        let capabilities = u32::MAX.to_ne_bytes();
        let mut init = vec![];
        for word in [7u32, 40, 0] {
            init.extend(word.to_ne_bytes());
        }
        init.extend(capabilities);
        init.extend(capabilities);
        init.resize(64, 0);
        let header = InHeader::of_daemon(OP_INIT, NOBODY, init.len());
        shared.send(&header, &[&init], SendFlags::NOSIGNAL)?;
        let session = fuser::Session::from_fd(filesystem, theirs, config.acl, config)?;
        let listener = shared.clone();
        let replies = std::thread::Builder::new()
            .name("mount-replies".into())
            .spawn(move || service::run(|| listener.listen()))?;
        let session = std::thread::Builder::new()
            .name("mount-forward".into())
            .spawn(move || service::run(|| session.run()))?;
        Ok(Forward {
            shared,
            workers,
            session: Some(session),
            replies: Some(replies),
        })
    }

    /// Sends a request on, if there is room. Else it comes back, for `send_waiting`.
    pub(crate) fn try_request(&self, received: Received) -> Option<Unsent> {
        let Received {
            header,
            mut arguments,
            arguments_len,
            payload,
            reply,
        } = received;
        let mut header = InHeader::read(&header);
        if matches!(header.opcode, OP_READDIR | OP_READDIRPLUS) {
            cut_listing(&mut arguments);
        }
        header.unique = self.shared.keep(reply);
        let unsent = Unsent {
            header,
            arguments,
            arguments_len,
            payload,
        };
        let sent = unsent.send(&self.shared, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        match sent {
            Ok(()) => None,
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Some(unsent),
            Err(error) => {
                self.shared.fail(header.unique, &error);
                None
            }
        }
    }

    /// Sends it as soon as there is room.
    pub(crate) fn send_waiting(&self, unsent: Unsent) {
        if let Err(error) = unsent.send(&self.shared, SendFlags::NOSIGNAL) {
            self.shared.fail(unsent.header.unique, &error);
        }
    }
}

/// A request whose reply waits already.
pub(crate) struct Unsent {
    header: InHeader,
    arguments: [u8; ARGUMENTS_BYTES],
    arguments_len: usize,
    payload: Option<Payload>,
}

impl Unsent {
    fn send(&self, shared: &Shared, flags: SendFlags) -> io::Result<()> {
        let payload = self.payload.as_ref().map_or(&[][..], AsRef::as_ref);
        let parts = [&self.arguments[..self.arguments_len], payload];
        shared.send(&self.header, &parts, flags)
    }
}

impl Drop for Forward {
    /// Ends the session: it has answered all that the kernel still waits for, or the kernel waits no more.
    fn drop(&mut self) {
        for _ in 0..self.workers {
            let destroy = InHeader::of_daemon(OP_DESTROY, NOBODY, 0);
            if let Err(error) = self.shared.send(&destroy, &[], SendFlags::NOSIGNAL) {
                tracing::warn!(%error, "the session of the ring does not end");
                return;
            }
        }
        if let Some(session) = self.session.take()
            && let Ok(Err(error)) = session.join()
        {
            tracing::warn!(%error, "the session of the ring ended with an error");
        }
        if let Some(replies) = self.replies.take() {
            // It ends with the session's end of the sockets.
            let _ = replies.join();
        }
    }
}

/// Limits `fuse_read_in.size`.
fn cut_listing(arguments: &mut [u8; ARGUMENTS_BYTES]) {
    const SIZE_AT: usize = 16;
    if let Some((size, _)) = arguments[SIZE_AT..].split_first_chunk_mut::<4>() {
        let asked = u32::from_ne_bytes(*size);
        *size = asked.min(LISTING_BYTES_MAX).to_ne_bytes();
    }
}

impl Shared {
    fn keep(&self, reply: Reply) -> u64 {
        let mut waiting = self.waiting.lock();
        match waiting.free.pop() {
            Some(at) => {
                waiting.replies[at] = Some(reply);
                at as u64
            }
            None => {
                waiting.replies.push(Some(reply));
                waiting.replies.len() as u64 - 1
            }
        }
    }

    fn take(&self, number: u64) -> Option<Reply> {
        let at = usize::try_from(number).ok()?;
        let mut waiting = self.waiting.lock();
        let reply = waiting.replies.get_mut(at)?.take()?;
        waiting.free.push(at);
        Some(reply)
    }

    fn fail(&self, number: u64, error: &io::Error) {
        tracing::error!(%error, "a request could not be passed on");
        if let Some(reply) = self.take(number) {
            reply.error(libc::EIO);
        }
    }

    fn send(&self, header: &InHeader, parts: &[&[u8]], flags: SendFlags) -> io::Result<()> {
        let mut header = *header;
        let rest: usize = parts.iter().map(|part| part.len()).sum();
        header.len = (IN_HEADER_BYTES + rest) as u32;
        let header = header.bytes();
        let mut message = vec![IoSlice::new(&header)];
        message.extend(parts.iter().map(|part| IoSlice::new(part)));
        let mut nothing = SendAncillaryBuffer::default();
        loop {
            match rustix::net::sendmsg(&self.socket, &message, &mut nothing, flags) {
                Err(Errno::INTR) => {}
                sent => return sent.map(drop).map_err(io::Error::from),
            }
        }
    }

    /// Passes replies on until the session has ended.
    fn listen(&self) {
        let mut message = vec![0; MESSAGE_BYTES_MAX];
        loop {
            let len = match rustix::net::recv(&self.socket, &mut message[..], RecvFlags::empty()) {
                Ok((0, _)) | Err(Errno::CONNRESET) => return,
                Ok((_, len)) => len,
                Err(Errno::INTR) => continue,
                Err(error) => {
                    tracing::error!(%error, "replies of the ring's session cannot be read");
                    return;
                }
            };
            let Some((header, body)) = OutHeader::split(&message[..len.min(MESSAGE_BYTES_MAX)])
            else {
                continue;
            };
            // Numbers of nobody: the answers to our own requests.
            let Some(reply) = self.take(header.unique) else {
                continue;
            };
            match header.error {
                0 => reply.owned(body.to_vec()),
                error => reply.error(error.saturating_neg()),
            }
        }
    }
}
