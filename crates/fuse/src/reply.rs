//! The obligation to answer one request, from the device or from the ring.
//!
//! Any thread may answer a [`Reply`], at any later time. A reply that is dropped, for example by a panic, answers
//! EIO: a request without an answer would hang its program for ever.

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use jericho_daemon::{Interruption, ReadBuffer};
use jericho_fs::Error;
use jericho_sys::fuse_ring;
use rustix::io::Errno;
use zerocopy::{Immutable, IntoBytes};

use crate::convert::errno;
use crate::interrupts::{self, Answer, Ending, HeldReply};
use crate::protocol::OutHeader;
use crate::protocol::answer::SizeOut;
use crate::scratch::Scratch;

/// A channel to the kernel: `/dev/fuse`, opened or cloned.
pub(crate) type Channel = Arc<OwnedFd>;

/// A thread's own reference to a channel. Each reply counts a reference, and so writes to memory. Threads that share a channel would otherwise
/// write to one cache line at every request.
pub(crate) type OwnChannel = Arc<Channel>;

/// The obligation to answer a request that came through the device.
pub(crate) struct DeviceReply {
    channel: OwnChannel,
    unique: u64,
    answered: bool,
}

impl DeviceReply {
    pub(crate) fn new(channel: &OwnChannel, unique: u64) -> DeviceReply {
        DeviceReply {
            channel: channel.clone(),
            unique,
            answered: false,
        }
    }

    fn send(&mut self, errno: i32, body: &[u8]) {
        self.answered = true;
        let sent = message(&self.channel, -errno, self.unique, body);
        match sent {
            Ok(()) => {}
            // The kernel has abandoned the request.
            Err(Errno::NOENT) => {}
            // The mount has ended.
            Err(Errno::NODEV | Errno::NOTCONN | Errno::CONNABORTED | Errno::PERM) => {}
            Err(error) => {
                tracing::error!(%error, bytes = body.len(), "the kernel refuses a reply; the request gets EIO instead");
                let _ = message(&self.channel, -libc::EIO, self.unique, &[]);
            }
        }
    }
}

impl Drop for DeviceReply {
    fn drop(&mut self) {
        if !self.answered {
            self.send(libc::EIO, &[]);
        }
    }
}

/// Writes one message to the kernel: a reply or a notification.
pub(crate) fn message(
    channel: &OwnedFd,
    error: i32,
    unique: u64,
    body: &[u8],
) -> Result<(), Errno> {
    let header = OutHeader {
        len: (size_of::<OutHeader>() + body.len()) as u32,
        error,
        unique,
    };
    let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(body)];
    // The kernel accepts a message as a whole or not at all.
    rustix::io::retry_on_intr(|| rustix::io::writev(channel, &parts)).map(drop)
}

/// The obligation to answer one request; see the module.
pub(crate) enum Reply {
    Own(OwnReply),
    /// A signal may end the request.
    Held(HeldReply<OwnReply>),
}

/// The obligation to answer one request, where its transport put it.
pub(crate) enum OwnReply {
    Device(DeviceReply),
    Ring(fuse_ring::Reply),
}

/// Holds the replies of requests that signals may end.
pub(crate) type Interrupts = interrupts::OwnInterrupts<OwnReply>;
/// What holds one reply.
pub(crate) type Ticket = interrupts::Ticket<OwnReply>;

impl OwnReply {
    fn error(self, errno: i32) {
        match self {
            OwnReply::Device(mut reply) => reply.send(errno, &[]),
            OwnReply::Ring(reply) => reply.error(errno),
        }
    }

    fn bytes(self, bytes: &[u8]) {
        match self {
            OwnReply::Device(mut reply) => reply.send(0, bytes),
            OwnReply::Ring(reply) => reply.copied(bytes),
        }
    }
}

impl Answer for OwnReply {
    fn interrupted(self) {
        self.error(libc::EINTR);
    }

    fn wrote(self, bytes: u32) {
        self.bytes(SizeOut::new(bytes).as_bytes());
    }
}

impl Reply {
    /// Returns the reply to a request that came through the device.
    pub(crate) fn device(channel: &OwnChannel, unique: u64) -> Reply {
        Reply::Own(OwnReply::Device(DeviceReply::new(channel, unique)))
    }

    /// Returns the reply to a request that came through the ring.
    pub(crate) fn ring(reply: fuse_ring::Reply) -> Reply {
        Reply::Own(OwnReply::Ring(reply))
    }

    /// Returns the reply, or `None` if a signal has ended the request.
    fn take(self) -> Option<OwnReply> {
        match self {
            Reply::Own(reply) => Some(reply),
            Reply::Held(held) => held.take(),
        }
    }

    /// Holds the reply, unless it is held already.
    pub(crate) fn hold(self, ticket: Ticket, ending: Ending) -> Reply {
        match self {
            Reply::Own(reply) => Reply::Held(ticket.hold(reply, ending)),
            held @ Reply::Held(_) => held,
        }
    }

    /// Holds the reply of a request that no thread serves yet.
    pub(crate) fn park(self, ticket: Ticket, ending: Ending) -> Reply {
        match self {
            Reply::Own(reply) => Reply::Held(ticket.park(reply, ending)),
            held @ Reply::Held(_) => held,
        }
    }

    /// Returns whether a signal has ended the request.
    pub(crate) fn has_ended(&self) -> bool {
        match self {
            Reply::Own(_) => false,
            Reply::Held(held) => held.has_ended(),
        }
    }

    /// Notes that a thread begins to serve the request. Returns the reply, or `None` if a signal has ended the request while it was parked. A signal may
    /// also end it later if `may_be_ended` says so.
    #[inline]
    pub(crate) fn begin(self, may_be_ended: impl FnOnce() -> bool) -> Option<Reply> {
        match self {
            Reply::Own(_) => Some(self),
            Reply::Held(held) if may_be_ended() => held.begin().then_some(Reply::Held(held)),
            Reply::Held(held) => held.take().map(Reply::Own),
        }
    }

    /// Returns the interruption of a request whose reply is held.
    pub(crate) fn interruption(&self) -> Option<Arc<Interruption>> {
        match self {
            Reply::Own(_) => None,
            Reply::Held(held) => Some(held.interruption()),
        }
    }

    /// Answers with an errno.
    pub(crate) fn error(self, errno: i32) {
        // The kernel accepts no other number as an errno, and would refuse the whole reply.
        let errno = match errno {
            1..512 => errno,
            _ => libc::EIO,
        };
        if let Some(reply) = self.take() {
            reply.error(errno);
        }
    }

    /// Answers with bytes.
    pub(crate) fn bytes(self, bytes: &[u8]) {
        self.deliver(bytes);
    }

    /// Answers with bytes. Returns whether this was the answer: a signal may have ended the request. The kernel then does not know what the answer
    /// would have given it, such as a handle.
    pub(crate) fn deliver(self, bytes: &[u8]) -> bool {
        let reply = self.take();
        let is_there = reply.is_some();
        if let Some(reply) = reply {
            reply.bytes(bytes);
        }
        is_there
    }

    /// Answers with a structure of the protocol.
    pub(crate) fn with(self, out: &(impl IntoBytes + Immutable)) {
        self.bytes(out.as_bytes());
    }

    /// Answers a request for an attribute's value, or for its length if `size` is 0.
    pub(crate) fn value(self, value: &[u8], size: u32) {
        match size as usize {
            0 => self.with(&SizeOut::new(value.len() as u32)),
            size if value.len() > size => self.error(libc::ERANGE),
            _ => self.bytes(value),
        }
    }

    /// Answers with success and no data.
    pub(crate) fn ok(self) {
        self.bytes(&[]);
    }

    /// Answers with the result of `operation`.
    pub(crate) fn done(self, operation: &'static str, result: Result<(), Error>) {
        match result {
            Ok(()) => self.ok(),
            Err(e) => self.error(errno(operation, &e)),
        }
    }

    /// Turns the reply into the buffer for the bytes of a read. `ticket`: holds the reply when the read has to wait.
    pub(crate) fn room(self, ticket: Option<Ticket>) -> Room {
        let scratch = match self {
            Reply::Own(OwnReply::Ring(_)) => None,
            _ => Some(Scratch::take()),
        };
        Room {
            reply: Some(self),
            scratch,
            ticket: ticket.map(|ticket| (ticket, Ending::Answer)),
        }
    }
}

/// The buffer for the bytes of a read.
pub(crate) struct Room {
    /// Always `Some`, until the answer.
    reply: Option<Reply>,
    /// `None`: the bytes go into the entry of the ring, which returns to the kernel with them.
    scratch: Option<Scratch>,
    /// Holds the reply when the read has to wait. `None`: no signal ends the read, or the reply is held.
    ticket: Option<(Ticket, Ending)>,
}

impl Room {
    /// Says that the bytes are for the kernel's page cache. Such a read may wait before it reads, so its reply is held at once.
    pub(crate) fn is_for_page_cache(&mut self) {
        if let Some((_, ending)) = &mut self.ticket {
            *ending = Ending::IfDying;
            self.will_wait(0);
        }
    }

    /// Returns how many of `len` bytes fit.
    pub(crate) fn at_most(&mut self, len: usize) -> usize {
        match (&self.scratch, &mut self.reply) {
            (None, Some(Reply::Own(OwnReply::Ring(reply)))) => len.min(reply.room().len()),
            _ => len,
        }
    }

    /// Answers with the first `len` bytes.
    pub(crate) fn filled(mut self, len: usize) {
        match (self.scratch, self.reply.take()) {
            (None, Some(Reply::Own(OwnReply::Ring(reply)))) => reply.filled(len),
            (Some(mut scratch), Some(reply)) => reply.bytes(scratch.first(len)),
            _ => {}
        }
    }

    /// Answers with an errno.
    pub(crate) fn error(self, errno: i32) {
        if let Some(reply) = self.reply {
            reply.error(errno);
        }
    }
}

impl ReadBuffer for Room {
    fn first(&mut self, len: usize) -> &mut [u8] {
        if let (None, Some(Reply::Own(OwnReply::Ring(reply)))) = (&self.scratch, &mut self.reply) {
            return &mut reply.room()[..len];
        }
        self.scratch.get_or_insert_with(Scratch::take).first(len)
    }

    /// Holds the reply. The entry of the ring then belongs to the table of held replies, which may return it to the kernel at any time. So the
    /// read goes on in other memory.
    fn will_wait(&mut self, done: usize) {
        let Some((ticket, ending)) = self.ticket.take() else {
            return;
        };
        let Some(mut reply) = self.reply.take() else {
            return;
        };
        if let (None, Reply::Own(OwnReply::Ring(reply))) = (&self.scratch, &mut reply) {
            let mut scratch = Scratch::take();
            scratch.first(done).copy_from_slice(&reply.room()[..done]);
            self.scratch = Some(scratch);
        }
        self.reply = Some(reply.hold(ticket, ending));
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};

    use super::*;

    /// Returns a pair of sockets that preserve message boundaries, as the device does.
    fn kernel() -> (OwnedFd, OwnChannel) {
        let flags = SocketFlags::CLOEXEC;
        let kind = SocketType::SEQPACKET;
        let pair = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None);
        let (kernel, daemon) = pair.unwrap();
        (kernel, Arc::new(Arc::new(daemon)))
    }

    /// Returns the error, the request id and the body of a reply; `None` if nothing was sent.
    fn received(kernel: &OwnedFd) -> Option<(i32, u64, Vec<u8>)> {
        let mut bytes = [0; 256];
        let (len, _) = rustix::net::recv(kernel, &mut bytes[..], RecvFlags::DONTWAIT).ok()?;
        let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!(word(0) as usize, len);
        let unique = u64::from(word(8)) | u64::from(word(12)) << 32;
        Some((word(4) as i32, unique, bytes[16..len].to_vec()))
    }

    #[test]
    fn a_dropped_reply_answers_with_an_error_and_each_reply_answers_once() {
        let (kernel, channel) = kernel();
        let reply = |unique| Reply::device(&channel, unique);
        drop(reply(1 << 40));
        assert_eq!(received(&kernel), Some((-libc::EIO, 1 << 40, vec![])));
        drop(reply(2).room(None));
        assert_eq!(received(&kernel), Some((-libc::EIO, 2, vec![])));
        reply(3).bytes(b"whole");
        assert_eq!(received(&kernel), Some((0, 3, b"whole".to_vec())));
        let mut room = reply(4).room(None);
        room.first(4).copy_from_slice(b"read");
        room.filled(2);
        assert_eq!(received(&kernel), Some((0, 4, b"re".to_vec())));
        assert_eq!(received(&kernel), None);
    }

    #[test]
    fn a_number_that_is_no_errno_is_answered_as_an_io_error() {
        let (kernel, channel) = kernel();
        for (given, sent) in [
            (libc::ENOENT, libc::ENOENT),
            (0, libc::EIO),
            (-5, libc::EIO),
        ] {
            Reply::device(&channel, 1).error(given);
            assert_eq!(received(&kernel).unwrap().0, -sent);
        }
        Reply::device(&channel, 1).error(512);
        assert_eq!(received(&kernel).unwrap().0, -libc::EIO);
    }
}
