//! Requests through `/dev/fuse`: the handshake, the workers that read and serve requests, and the reader that reads for them while all wait.

use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use jericho_sys::limits::Memory;
use jericho_sys::service as threads;
use rustix::io::Errno;
use zerocopy::IntoBytes;

use crate::backlog::{Backlog, Next, Parked};
use crate::crew::{Body, Crew, Place, Relief, THREADS_MAX};
use crate::protocol::init::{Agreed, Outcome, Wanted, negotiate};
use crate::protocol::request::{Malformed, Operation, Transfer, parse_message};
use crate::protocol::{InHeader, op};
use crate::reply::{Channel, OwnChannel, Reply, message};
use crate::server::{REQUEST_BYTES_MAX, Server, report_panic};
use crate::workers::WorkerNodes;

const PAGE_BYTES: usize = 4096;
/// Bytes before the data of a write.
const BEFORE_DATA_BYTES: usize = size_of::<InHeader>() + size_of::<Transfer>();

/// Most bytes of parked messages. A thread that waits in the kernel takes a hundred times the memory of a parked operation on a name.
const BACKLOG_BYTES_MAX: usize = 64 << 20;
/// Estimated memory of a parked message beside its bytes: its reply, which is held.
const MESSAGE_BYTES: usize = 512;
/// Time between two attempts of the reader to make room.
const READER_PAUSE: Duration = Duration::from_millis(100);

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

/// The threads that serve a mount through the device. They end with the mount. While requests hang, there are more (`crew`). A reader takes over
/// the reading if all of them wait for a silent host (`backlog`).
pub(crate) struct Workers {
    crew: Arc<Crew>,
    backlog: Arc<Backlog<Message>>,
    reader: Option<JoinHandle<()>>,
}

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
        let backlog = Arc::new(Backlog::new(count, backlog_bytes_max()));
        // It is started now, because the limit of threads may be reached when it is needed.
        let reader = filesystem
            .serves_reports()
            .then(|| start_reader(channel, own_channels, filesystem, &backlog))
            .transpose()?;
        let (shared, parked) = (channel.clone(), backlog.clone());
        let for_workers = filesystem.clone();
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
            let (filesystem, backlog) = (for_workers.clone(), parked.clone());
            Ok(Box::new(move |place| {
                // Allocated by the thread itself, so that no other thread's memory is beside it.
                serve(&Arc::new(channel), &filesystem, &backlog, place)
            }))
        };
        let relief = Reading {
            backlog: backlog.clone(),
            filesystem: filesystem.clone(),
        };
        let (prepare, relief) = (Box::new(prepare), Some(Box::new(relief) as Box<dyn Relief>));
        let crew = Crew::start(name, count, most, nodes, prepare, relief)
            .inspect_err(|_| backlog.end())?;
        Ok(Workers {
            crew,
            backlog,
            reader,
        })
    }

    /// Waits until all threads have ended. Returns the first error of any of them.
    pub(crate) fn wait(self) -> io::Result<()> {
        let result = self.crew.wait();
        self.backlog.end();
        // A panic ends the process.
        let _ = self.reader.map(JoinHandle::join);
        result
    }
}

/// A message of the kernel that the reader has read.
struct Message {
    bytes: Vec<u8>,
    /// Set if the kernel waits for an answer.
    reply: Option<Reply>,
}

impl Parked for Message {
    fn bytes(&self) -> usize {
        self.bytes.len() + MESSAGE_BYTES
    }

    fn has_ended(&self) -> bool {
        self.reply.as_ref().is_some_and(Reply::has_ended)
    }
}

/// Lets the reader read while all workers wait for a silent host.
struct Reading<S> {
    backlog: Arc<Backlog<Message>>,
    filesystem: S,
}

impl<S: Server> Relief for Reading<S> {
    fn is_wanted(&self) -> bool {
        self.filesystem.needs_reports()
    }

    fn arm(&self) -> bool {
        self.backlog.arm()
    }

    fn confirm(&self) {
        tracing::debug!("all workers wait for a silent host: one thread reads requests for them");
        self.backlog.confirm();
    }

    fn cancel(&self) {
        self.backlog.cancel();
    }
}

/// Returns how many bytes the parked messages may take: those of very many operations on names, or of as many writes as fit.
fn backlog_bytes_max() -> usize {
    let memory = Memory::read().map_or(u64::MAX, |memory| memory.usable_bytes());
    let fit = usize::try_from(memory / 64).unwrap_or(usize::MAX);
    fit.min(BACKLOG_BYTES_MAX)
}

fn start_reader<S: Server>(
    channel: &Channel,
    own_channel: bool,
    filesystem: &S,
    backlog: &Arc<Backlog<Message>>,
) -> io::Result<JoinHandle<()>> {
    let own = own_channel.then(|| jericho_sys::fuse_device::clone(channel));
    let channel = match own.transpose()? {
        Some(own) => Arc::new(own),
        None => channel.clone(),
    };
    let (filesystem, backlog) = (filesystem.clone(), backlog.clone());
    threads::spawn("mount-reader", move || {
        read_for_workers(&Arc::new(channel), &filesystem, &backlog);
    })
}

/// Reads messages while the workers do not, until the mount ends.
fn read_for_workers<S: Server>(channel: &OwnChannel, filesystem: &S, backlog: &Backlog<Message>) {
    let mut buffer = Buffer::new();
    while backlog.rest(READER_PAUSE, || filesystem.look_for_dying()) {
        match receive(channel, &mut buffer) {
            Ok(Some(bytes)) => sort(channel, filesystem, backlog, bytes),
            Ok(None) => backlog.end(),
            Err(error) => {
                tracing::error!(%error, "cannot read requests for the workers; tries again");
                std::thread::sleep(READER_PAUSE);
            }
        }
    }
}

/// Serves a report of a signal, and parks any other message: it may have to wait.
fn sort<S: Server>(channel: &OwnChannel, filesystem: &S, backlog: &Backlog<Message>, bytes: &[u8]) {
    let (header, operation) = parse_message(bytes, filesystem.agreed());
    let Some(header) = header else {
        return report_short(bytes);
    };
    if header.opcode == op::INTERRUPT {
        return serve_parsed(filesystem, &header, operation, None);
    }
    let reply = reply_to(channel, filesystem, &header);
    backlog.park(Message {
        reply: reply.map(|reply| filesystem.park(&header, &operation, reply)),
        bytes: bytes.to_vec(),
    });
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
fn serve<S: Server>(
    channel: &OwnChannel,
    filesystem: &S,
    backlog: &Backlog<Message>,
    place: &Place,
) -> io::Result<()> {
    let mut buffer = Buffer::new();
    loop {
        match backlog.next() {
            Next::Read => {
                let Some(bytes) = receive(channel, &mut buffer)? else {
                    return Ok(());
                };
                place.serve(|| serve_one(channel, filesystem, bytes));
            }
            Next::Serve(message) => place.serve(|| serve_parked(filesystem, message)),
            Next::End => return Ok(()),
        }
        if place.is_surplus() {
            return Ok(());
        }
    }
}

fn serve_one<S: Server>(channel: &OwnChannel, filesystem: &S, bytes: &[u8]) {
    let (header, operation) = parse_message(bytes, filesystem.agreed());
    let Some(header) = header else {
        return report_short(bytes);
    };
    let reply = reply_to(channel, filesystem, &header);
    serve_parsed(filesystem, &header, operation, reply);
}

/// Serves a message that the reader has parked.
fn serve_parked<S: Server>(filesystem: &S, message: Message) {
    let (header, operation) = parse_message(&message.bytes, filesystem.agreed());
    if let Some(header) = header {
        serve_parsed(filesystem, &header, operation, message.reply);
    }
}

fn report_short(bytes: &[u8]) {
    tracing::error!(
        bytes = bytes.len(),
        "a message of the kernel is shorter than a header"
    );
}

/// Returns the reply to a message, if the kernel waits for one.
#[inline]
fn reply_to<S: Server>(channel: &OwnChannel, filesystem: &S, header: &InHeader) -> Option<Reply> {
    let reply = header
        .wants_reply()
        .then(|| Reply::device(channel, header.unique));
    if reply.is_some() {
        filesystem.note_request();
    }
    reply
}

#[inline]
fn serve_parsed<S: Server>(
    filesystem: &S,
    header: &InHeader,
    operation: Result<Operation<'_>, Malformed>,
    reply: Option<Reply>,
) {
    // A panic drops the request's reply, which answers EIO.
    let request = AssertUnwindSafe(|| filesystem.serve(header, operation, reply));
    if catch_unwind(request).is_err() {
        report_panic(header);
    }
}

#[cfg(test)]
mod lines;
