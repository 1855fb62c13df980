//! Requests through `/dev/fuse`: the handshake, and the workers that read and serve requests.

use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use jericho_sys::limits::Memory;
use rustix::io::Errno;
use zerocopy::IntoBytes;

use crate::crew::{Body, Crew, Place, THREADS_MAX};
use crate::protocol::InHeader;
use crate::protocol::init::{Agreed, Outcome, Wanted, negotiate};
use crate::protocol::request::{Operation, Transfer, parse_message};
use crate::reply::{Channel, OwnChannel, Reply, message};
use crate::server::{REQUEST_BYTES_MAX, Server, report_panic};
use crate::workers::WorkerNodes;

const PAGE_BYTES: usize = 4096;
/// Bytes before the data of a write.
const BEFORE_DATA_BYTES: usize = size_of::<InHeader>() + size_of::<Transfer>();

/// Memory for one request. The data of a write begins at a page, so that the kernel copies whole pages.
struct Buffer(Vec<u8>);

impl Buffer {
    /// Allocates the buffer. The kernel provides memory only for the pages that are used.
    fn new() -> Buffer {
        Buffer(vec![0; REQUEST_BYTES_MAX as usize + 2 * PAGE_BYTES])
    }

    fn room(&mut self) -> &mut [u8] {
        let begin = self.0.as_ptr().addr();
        let data = (begin + BEFORE_DATA_BYTES).next_multiple_of(PAGE_BYTES);
        &mut self.0[data - BEFORE_DATA_BYTES - begin..]
    }
}

/// Reads one request. Returns `None` when the mount has ended.
fn receive<'a>(channel: &OwnedFd, buffer: &'a mut Buffer) -> io::Result<Option<&'a [u8]>> {
    let room = buffer.room();
    loop {
        match rustix::io::read(channel, &mut *room) {
            Ok(len) => return Ok(Some(&room[..len])),
            // ENOENT: the request was interrupted before it was read.
            Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => {}
            Err(Errno::NODEV | Errno::NOTCONN | Errno::CONNABORTED) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Performs the handshake with a kernel that has just mounted. Fails when the kernel is too old or has ended the
/// mount.
pub(crate) fn handshake(channel: &OwnedFd, wanted: &Wanted) -> io::Result<Agreed> {
    let mut buffer = Buffer::new();
    loop {
        let Some(bytes) = receive(channel, &mut buffer)? else {
            return Err(Errno::NOTCONN.into());
        };
        let (header, operation) = parse_message(bytes, &Agreed::default());
        let (Some(header), Ok(Operation::Init(init))) = (header, operation) else {
            return Err(io::Error::other(
                "the kernel does not begin with a handshake",
            ));
        };
        match negotiate(&init, wanted) {
            Outcome::Agreed(out, agreed) => {
                message(channel, 0, header.unique, out.as_bytes())?;
                tracing::debug!(?init, ?out, "agreed with the kernel");
                return Ok(agreed);
            }
            Outcome::Again(out) => message(channel, 0, header.unique, out.as_bytes())?,
            Outcome::TooOld(major, minor) => {
                message(channel, -libc::EPROTO, header.unique, &[])?;
                return Err(io::Error::other(format!(
                    "the kernel speaks version {major}.{minor} of the FUSE protocol: the mount requires 7.28 or later (Linux 4.20)"
                )));
            }
        }
    }
}

/// The threads that serve a mount through the device. They end with the mount. While requests hang, there are more (`crew`).
pub(crate) struct Workers(Arc<Crew>);

impl Workers {
    /// Starts `count` threads, and further ones up to `most` while requests hang. With `own_channels`, each thread gets a channel of its own, so that a reply wakes and locks no
    /// other thread. That requires the right to open the device. Fails with EMFILE, EACCES, or when no thread can be started.
    /// Threads that have started end with the mount.
    pub(crate) fn start<S: Server>(
        name: &'static str,
        channel: &Channel,
        (count, most): (usize, usize),
        own_channels: bool,
        filesystem: &S,
        nodes: &Arc<WorkerNodes>,
    ) -> io::Result<Workers> {
        let (shared, filesystem) = (channel.clone(), filesystem.clone());
        let prepare = move |number: usize| -> io::Result<Body> {
            let channel = match own_channels && number > 0 {
                true => match jericho_sys::fuse_device::clone(&shared) {
                    Ok(own) => Arc::new(own),
                    // A further worker is needed now, and serves as well through the shared channel.
                    Err(_) if number >= count => shared.clone(),
                    Err(error) => return Err(error),
                },
                false => shared.clone(),
            };
            let filesystem = filesystem.clone();
            Ok(Box::new(move |place| {
                // Allocated by the thread itself, so that no other thread's memory is beside it.
                serve(&Arc::new(channel), &filesystem, place)
            }))
        };
        Crew::start(name, count, most, nodes, Box::new(prepare)).map(Workers)
    }

    /// Waits until all threads have ended. Returns the first error of any of them.
    pub(crate) fn wait(self) -> io::Result<()> {
        self.0.wait()
    }
}

/// Returns the most workers, if `count` are regular. Each keeps the largest write that it has served in memory, so all together may take an eighth of
/// the memory.
pub(crate) fn workers_max(count: usize) -> usize {
    let memory = Memory::read().map_or(u64::MAX, |memory| memory.usable_bytes());
    let fit = memory / 8 / u64::from(REQUEST_BYTES_MAX);
    usize::try_from(fit)
        .unwrap_or(THREADS_MAX)
        .clamp((4 * count).min(THREADS_MAX), THREADS_MAX)
}

/// Serves requests until the mount ends, or until there are too many workers.
fn serve<S: Server>(channel: &OwnChannel, filesystem: &S, place: &Place) -> io::Result<()> {
    let mut buffer = Buffer::new();
    while let Some(bytes) = receive(channel, &mut buffer)? {
        place.serve(|| serve_one(channel, filesystem, bytes));
        if place.is_surplus() {
            break;
        }
    }
    Ok(())
}

fn serve_one<S: Server>(channel: &OwnChannel, filesystem: &S, bytes: &[u8]) {
    let (header, operation) = parse_message(bytes, filesystem.agreed());
    let Some(header) = header else {
        tracing::error!(
            bytes = bytes.len(),
            "a message of the kernel is shorter than a header"
        );
        return;
    };
    let reply = header
        .wants_reply()
        .then(|| Reply::device(channel, header.unique));
    if reply.is_some() {
        filesystem.note_request();
    }
    // A panic drops the request's reply, which answers EIO.
    let request = AssertUnwindSafe(|| filesystem.serve(&header, operation, reply));
    if catch_unwind(request).is_err() {
        report_panic(&header);
    }
}

#[cfg(test)]
mod lines;
