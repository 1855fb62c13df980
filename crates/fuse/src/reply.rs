//! The obligation to answer one request, from the device or from the ring.
//!
//! Any thread may answer a [`Reply`], at any later time. A reply that is dropped, for example by a panic, answers
//! EIO: a request without an answer would hang its program for ever.

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use jericho_daemon::ReadBuffer;
use jericho_fs::Error;
use jericho_sys::fuse_ring;
use rustix::io::Errno;
use zerocopy::{Immutable, IntoBytes};

use crate::convert::errno;
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
    Device(DeviceReply),
    Ring(fuse_ring::Reply),
}

impl Reply {
    /// Answers with an errno.
    pub(crate) fn error(self, errno: i32) {
        // The kernel accepts no other number as an errno, and would refuse the whole reply.
        let errno = match errno {
            1..512 => errno,
            _ => libc::EIO,
        };
        match self {
            Reply::Device(mut reply) => reply.send(errno, &[]),
            Reply::Ring(reply) => reply.error(errno),
        }
    }

    /// Answers with bytes.
    pub(crate) fn bytes(self, bytes: &[u8]) {
        match self {
            Reply::Device(mut reply) => reply.send(0, bytes),
            Reply::Ring(reply) => reply.copied(bytes),
        }
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

    /// Turns the reply into the buffer for the bytes of a read.
    pub(crate) fn room(self) -> Room {
        match self {
            Reply::Device(reply) => Room::Device(reply, Scratch::take()),
            Reply::Ring(reply) => Room::Ring(reply),
        }
    }
}

/// The buffer for the bytes of a read. With the ring, the buffer is in the entry, which returns to the kernel with the bytes.
pub(crate) enum Room {
    Device(DeviceReply, Scratch),
    Ring(fuse_ring::Reply),
}

impl Room {
    /// Returns how many of `len` bytes fit.
    pub(crate) fn at_most(&mut self, len: usize) -> usize {
        match self {
            Room::Device(..) => len,
            Room::Ring(reply) => len.min(reply.room().len()),
        }
    }

    /// Answers with the first `len` bytes.
    pub(crate) fn filled(self, len: usize) {
        match self {
            Room::Device(mut reply, mut buffer) => reply.send(0, buffer.first(len)),
            Room::Ring(reply) => reply.filled(len),
        }
    }

    /// Answers with an errno.
    pub(crate) fn error(self, errno: i32) {
        match self {
            Room::Device(reply, _) => Reply::Device(reply).error(errno),
            Room::Ring(reply) => Reply::Ring(reply).error(errno),
        }
    }
}

impl ReadBuffer for Room {
    fn first(&mut self, len: usize) -> &mut [u8] {
        match self {
            Room::Device(_, buffer) => buffer.first(len),
            Room::Ring(reply) => &mut reply.room()[..len],
        }
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
        let reply = |unique| Reply::Device(DeviceReply::new(&channel, unique));
        drop(reply(1 << 40));
        assert_eq!(received(&kernel), Some((-libc::EIO, 1 << 40, vec![])));
        drop(reply(2).room());
        assert_eq!(received(&kernel), Some((-libc::EIO, 2, vec![])));
        reply(3).bytes(b"whole");
        assert_eq!(received(&kernel), Some((0, 3, b"whole".to_vec())));
        let mut room = reply(4).room();
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
            Reply::Device(DeviceReply::new(&channel, 1)).error(given);
            assert_eq!(received(&kernel).unwrap().0, -sent);
        }
        Reply::Device(DeviceReply::new(&channel, 1)).error(512);
        assert_eq!(received(&kernel).unwrap().0, -libc::EIO);
    }
}
