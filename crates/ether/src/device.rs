//! A device of another host, as a `Device`.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use jericho_format::wire::{FRAMES_PER_KEY, TRANSFER_BYTES_MAX};
use jericho_remote::{
    Action, Attached, Ended, Initiator, InitiatorConfig, Key, Operation, Scheduler, Security,
    UNREACHABLE,
};
use jericho_storage::{
    Asynchronous, BLOCK_BYTES, Cause, Completion, Device, Direction, DiscardEffect, Finish,
    IoError, NetworkStat, Segment, Transfer, is_in_range,
};
use jericho_sys::errno;
use jericho_sys::sockets::listener_at;
use jericho_sys::timer::Timer;
use jericho_topology::Topology;
use siphasher::sip::SipHasher24;
use siphasher::sip128::SipHasher24 as SipHasher128;

use crate::inside::{self, Core, Data, End, Inside};
use crate::links::{LinkError, Links, entropy};
use crate::lock::unpoisoned;
use crate::outbox::{Mode, Outboxes};
use crate::receiving::Receiving;
use crate::reserve::reserve;
use crate::socket::{LinkChoice, Opening, Side};
use crate::url::Remote;

/// Pages of the pool: 64 MiB of writes that are not flushed.
const POOL_PAGES: u32 = 16_384;
/// Largest number of bytes of a READ or WRITE.
const TRANSFER_BYTES: u64 = TRANSFER_BYTES_MAX as u64;
/// Largest number of bytes of a WRITE_ZEROES or DISCARD.
const RANGE_BYTES_MAX: u64 = (1 << 32) - BLOCK_BYTES;
/// How long the end of a session is waited for.
const DETACH_TIME: Duration = Duration::from_secs(1);

/// How to attach a remote device.
#[derive(Clone, Debug)]
pub struct AttachConfig {
    /// The device.
    pub remote: Remote,
    /// Names of network interfaces.
    pub interfaces: Vec<String>,
    /// Ethertype of the frames.
    pub ethertype: u16,
    /// Which sockets carry frames.
    pub link: LinkChoice,
    /// Take the export from another client.
    pub take_over: bool,
    /// Send changes again that a restarted target may have lost.
    pub replay: bool,
    /// How long to look for the target.
    pub patience: Duration,
    /// How long requests wait for a target that does not answer. `None`: for ever.
    pub dead_after: Option<Duration>,
    /// Refuse changes, also of a device that the target offers for writing.
    pub read_only: bool,
    /// The key that the target knows. `None`: use a device that is served without keys.
    pub key: Option<Key>,
    /// How requests are distributed over channels.
    pub scheduler: Scheduler,
    /// Channels on each interface, at least 1.
    pub channels: u16,
    /// Who sends frames.
    pub mode: Mode,
    /// Small requests wait for each other, if that increases the throughput.
    pub batches: bool,
    /// The machine's NUMA nodes.
    pub topology: Arc<Topology>,
}

/// Why a remote device could not be attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// A network interface cannot be used.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// Another process of this host uses the device.
    #[error("{0} is in use by another process of this host: end that process first")]
    Busy(Remote),
    /// No target has answered, or its export was busy all the time.
    #[error(
        "no host offers {remote} on {interfaces}; check that `jericho serve` runs there, that the interfaces are connected, and that no other client uses the device"
    )]
    Missing {
        /// The device.
        remote: Remote,
        /// The interfaces.
        interfaces: String,
    },
    /// The target refuses.
    #[error("{remote}: {why}")]
    Refused {
        /// The device.
        remote: Remote,
        /// Why.
        why: Ended,
    },
    /// Another error.
    #[error("cannot {action} for {remote}: {source}")]
    Io {
        /// The device.
        remote: Remote,
        /// For example "start a thread".
        action: &'static str,
        /// The kernel's reason.
        source: io::Error,
    },
}

/// A device of another host. Dropping it ends the session.
pub struct RemoteDevice {
    name: Arc<str>,
    home_node: Option<u32>,
    attached: Attached,
    inside: Arc<Inside>,
    outboxes: Arc<Outboxes>,
    /// Errno of the first flush or durable write that failed; 0: none has.
    durability_errno: AtomicI32,
    /// Ends the receivers when it is closed.
    stop: Option<UnixStream>,
    receivers: Vec<JoinHandle<()>>,
}

impl RemoteDevice {
    /// Attaches a remote device. Returns when its target has accepted.
    pub fn attach(config: &AttachConfig) -> Result<Arc<RemoteDevice>, AttachError> {
        let failed = |action| {
            let remote = config.remote.clone();
            move |source| AttachError::Io {
                remote,
                action,
                source,
            }
        };
        let claim = claim(config)?;
        let (topology, channels) = (&config.topology, config.channels.max(1));
        let opening = Opening {
            ethertype: config.ethertype,
            choice: config.link,
            side: Side::Initiator,
        };
        let links = Links::open(&config.interfaces, opening, topology, channels)?;
        let home_node = links.nodes().iter().flatten().next().copied();
        let protocol = InitiatorConfig {
            host: config.remote.host.clone(),
            export: config.remote.name.clone(),
            client: client_of(&links),
            ethertype: config.ethertype,
            take_over: config.take_over,
            replay: config.replay,
            pool_pages: POOL_PAGES,
            dead_after: config.dead_after,
            key: config.key.clone(),
            scheduler: config.scheduler,
            batches: config.batches,
            frames_per_key: FRAMES_PER_KEY,
        };
        let random = entropy().map_err(failed("get random numbers"))?;
        let initiator = Initiator::new(protocol, &links.links(), random, links.clock().now());
        let invalid = || io::Error::from_raw_os_error(errno::EINVAL);
        let initiator = initiator
            .ok_or_else(invalid)
            .map_err(failed("use the name"))?;
        let timer = Timer::new().map_err(failed("make a timer"))?;
        let (stop, stopped) = UnixStream::pair().map_err(failed("make a socket"))?;
        let receiving = Receiving::new(&links, &timer, claim, &stopped);
        let receiving = receiving.map_err(failed("watch sockets"))?;
        let name: Arc<str> = config.remote.to_string().into();
        let topology = Arc::clone(topology);
        let outboxes = Arc::new(links.outboxes(config.mode));
        let nodes = links.nodes().to_vec();
        let inside = Inside::new(
            Arc::clone(&name),
            initiator,
            (links, Arc::clone(&outboxes)),
            POOL_PAGES,
            timer,
            Arc::clone(&topology),
        );
        let inside = inside.map_err(failed("get memory"))?;
        let mut device = RemoteDevice {
            name,
            home_node,
            attached: Attached {
                size_bytes: 0,
                is_read_only: false,
                security: Security::None,
            },
            inside,
            durability_errno: AtomicI32::new(0),
            outboxes,
            stop: Some(stop),
            receivers: Vec::new(),
        };
        let started = device.outboxes.start(&topology, &nodes);
        started.map_err(failed("start a thread"))?;
        for one in receiving {
            let thread = one.start(Arc::clone(&device.inside), Arc::clone(&topology));
            device
                .receivers
                .push(thread.map_err(failed("start a thread"))?);
        }
        device.attached = device.await_session(config)?;
        device.attached.is_read_only |= config.read_only;
        Ok(Arc::new(device))
    }

    /// Returns why the session has ended, if it has.
    pub(crate) fn ended(&self) -> Option<Ended> {
        self.inside.lock().ended
    }

    /// Returns how many changes were sent again to a target that may have lost them.
    pub fn replayed(&self) -> u64 {
        self.inside.lock().replayed
    }

    fn await_session(&self, config: &AttachConfig) -> Result<Attached, AttachError> {
        self.inside.poll();
        let remote = || config.remote.clone();
        let ready = |core: &Core| match (core.ended, core.attached) {
            (Some(why), _) => Some(Err(why)),
            (None, attached) => attached.map(Ok),
        };
        match self.inside.wait_for(config.patience, ready) {
            Some(Ok(attached)) => Ok(attached),
            Some(Err(why)) => Err(AttachError::Refused {
                remote: remote(),
                why,
            }),
            None => Err(AttachError::Missing {
                remote: remote(),
                interfaces: config.interfaces.join(", "),
            }),
        }
    }

    /// Runs an operation on a range, in parts of at most `most` bytes that are in progress together. `data_of` gives the data of a part, by its
    /// place in the range. `ended` takes the start of a part, and the bytes that were read.
    fn run<'d>(
        &self,
        operation: &'static str,
        action: Action,
        (offset_bytes, length_bytes): (u64, u64),
        most: u64,
        data_of: impl Fn(Range<u64>) -> Data<'d>,
        mut ended: impl FnMut(u64, Vec<u8>),
    ) -> Result<(), IoError> {
        self.check_range(operation, offset_bytes, length_bytes)?;
        let mut tags = Vec::new();
        let mut at = 0;
        while at < length_bytes {
            let length = (length_bytes - at).min(most);
            let request = Operation {
                action,
                offset_bytes: offset_bytes + at,
                length_bytes: length as u32,
            };
            tags.push((
                at,
                length,
                self.inside.submit(request, data_of(at..at + length)),
            ));
            at += length;
        }
        let mut result = Ok(());
        for (at, length, tag) in tags {
            match self.inside.wait(tag) {
                Ok(data) => ended(at, data),
                Err(errno) if result.is_ok() => {
                    result = Err(self.error(operation, offset_bytes + at, length, errno));
                }
                Err(_) => {}
            }
        }
        result
    }

    /// Fails if a flush or durable write has failed before: the contract of `Device`.
    fn check_durable(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        match self.durability_errno.load(Ordering::Acquire) {
            0 => Ok(()),
            errno => Err(self.error("flush", offset_bytes, length_bytes, errno)),
        }
    }

    fn note_durability(&self, result: Result<(), IoError>) -> Result<(), IoError> {
        // No write is lost while the host is away: the initiator keeps the writes that were not flushed, and sends them again.
        if let Err(error) = &result
            && !error.is_unreachable()
        {
            // Keeps the first one.
            let (none, errno) = (0, error.errno());
            let _ = self.durability_errno.compare_exchange(
                none,
                errno,
                Ordering::AcqRel,
                Ordering::Relaxed,
            );
        }
        result
    }

    fn check_range(
        &self,
        operation: &'static str,
        offset_bytes: u64,
        length_bytes: u64,
    ) -> Result<(), IoError> {
        let errno = match is_in_range(offset_bytes, length_bytes, self.attached.size_bytes) {
            true if operation == "read" || !self.attached.is_read_only => return Ok(()),
            true => errno::EROFS,
            false => errno::EINVAL,
        };
        Err(self.error(operation, offset_bytes, length_bytes, errno))
    }

    fn write(
        &self,
        operation: &'static str,
        offset_bytes: u64,
        buf: &[u8],
        is_durable: bool,
    ) -> Result<(), IoError> {
        let range = (offset_bytes, buf.len() as u64);
        let part = |part: Range<u64>| Data::Write(&buf[part.start as usize..part.end as usize]);
        let action = Action::Write { is_durable };
        self.run(operation, action, range, TRANSFER_BYTES, part, |_, _| {})
    }

    fn error(
        &self,
        operation: &'static str,
        offset_bytes: u64,
        length_bytes: u64,
        errno: i32,
    ) -> IoError {
        IoError {
            operation,
            device: Arc::clone(&self.name),
            offset_bytes,
            length_bytes,
            cause: cause_of(errno),
        }
    }
}

/// Returns the cause for the error of a request.
fn cause_of(error: i32) -> Cause {
    match error {
        UNREACHABLE => Cause::Unreachable,
        errno => Cause::Errno(errno),
    }
}

impl Drop for RemoteDevice {
    fn drop(&mut self) {
        self.inside.detach();
        self.inside.wait_for(DETACH_TIME, |core| core.ended);
        drop(self.stop.take());
        for receiver in self.receivers.drain(..) {
            // A panic in a thread has ended the process.
            let _ = receiver.join();
        }
        self.outboxes.stop();
    }
}

impl Device for RemoteDevice {
    fn name(&self) -> Arc<str> {
        Arc::clone(&self.name)
    }

    fn size_bytes(&self) -> u64 {
        self.attached.size_bytes
    }

    fn home_node(&self) -> Option<u32> {
        self.home_node
    }

    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> Result<(), IoError> {
        let range = (offset_bytes, buf.len() as u64);
        let data_of = |part: Range<u64>| Data::Read((part.end - part.start) as usize);
        self.run(
            "read",
            Action::Read,
            range,
            TRANSFER_BYTES,
            data_of,
            |at, data| {
                let at = at as usize;
                buf[at..at + data.len()].copy_from_slice(&data);
            },
        )
    }

    fn write_at(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        self.write("write", offset_bytes, buf, false)
    }

    fn flush(&self) -> Result<(), IoError> {
        let size_bytes = self.attached.size_bytes;
        self.check_durable(0, size_bytes)?;
        let tag = self.inside.submit(Operation::flush(), Data::None);
        let ended = self.inside.wait(tag).map(drop);
        self.note_durability(ended.map_err(|errno| self.error("flush", 0, size_bytes, errno)))
    }

    fn write_durable(&self, offset_bytes: u64, buf: &[u8]) -> Result<(), IoError> {
        self.check_durable(offset_bytes, buf.len() as u64)?;
        // The errno does not say whether the write or the flush failed. So the caller must assume that nothing was written.
        let written = self.write("write", offset_bytes, buf, true);
        self.note_durability(written)
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        let range = (offset_bytes, length_bytes);
        let none = |_: Range<u64>| Data::None;
        self.run(
            "discard",
            Action::Discard,
            range,
            RANGE_BYTES_MAX,
            none,
            |_, _| {},
        )
    }

    fn discard_effect(&self) -> DiscardEffect {
        DiscardEffect::FreesSpace
    }

    fn provision(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        // The protocol cannot ask for space. The caller may write zeros instead.
        Err(self.error("provision", offset_bytes, length_bytes, errno::EOPNOTSUPP))
    }

    fn write_zeros(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), IoError> {
        let range = (offset_bytes, length_bytes);
        let none = |_: Range<u64>| Data::None;
        let action = Action::WriteZeroes { is_durable: true };
        self.run("write", action, range, RANGE_BYTES_MAX, none, |_, _| {})
    }

    fn may_fall_silent(&self) -> bool {
        true
    }

    fn is_silent(&self) -> bool {
        self.inside.is_silent()
    }

    fn has_abandoned(&self) -> bool {
        self.inside.has_abandoned()
    }

    fn is_read_only(&self) -> bool {
        self.attached.is_read_only
    }

    fn queue_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn asynchronous(&self) -> Option<&dyn Asynchronous> {
        Some(self)
    }

    fn describe(&self) -> String {
        // A target that was restarted may protect frames in another way.
        let attached = self.inside.lock().attached;
        let security = attached.unwrap_or(self.attached).security;
        format!(
            "{} (remote, {} bytes, {})",
            self.name, self.attached.size_bytes, security,
        )
    }

    fn network(&self) -> Option<NetworkStat> {
        Some(self.inside.network())
    }
}

impl Asynchronous for RemoteDevice {
    fn begin(&self, transfer: Transfer, end: Arc<dyn Finish>) {
        self.begin_all(vec![transfer], end);
    }

    fn begin_all(&self, transfers: Vec<Transfer>, end: Arc<dyn Finish>) {
        let begun = transfers
            .into_iter()
            .filter_map(|transfer| self.parts_of(transfer, &end));
        self.inside.begin(begun.collect());
    }
}

impl RemoteDevice {
    /// Returns the memory and the operations of a transfer. Ends one that is beyond the device.
    fn parts_of(
        &self,
        transfer: Transfer,
        end: &Arc<dyn Finish>,
    ) -> Option<(Arc<[Segment]>, inside::Parts)> {
        let (name, action) = match transfer.direction {
            Direction::Read => ("read", Action::Read),
            Direction::Write => ("write", Action::Write { is_durable: false }),
        };
        let length = transfer.segments.iter().map(|s| s.len as u64).sum();
        let tag = transfer.tag;
        if let Err(error) = self.check_range(name, transfer.offset_bytes, length) {
            let result = Err(error);
            end.finish(Completion { tag, result });
            return None;
        }
        let starts = (0..length).step_by(TRANSFER_BYTES as usize);
        let parts = Arc::new(Mutex::new(Parts {
            left: length.div_ceil(TRANSFER_BYTES) as usize,
            result: Ok(()),
        }));
        let begun = starts.map(|at| {
            let operation = Operation {
                action,
                offset_bytes: transfer.offset_bytes + at,
                length_bytes: (length - at).min(TRANSFER_BYTES) as u32,
            };
            let (parts, end) = (Arc::clone(&parts), Arc::clone(end));
            let (device, bytes) = (Arc::clone(&self.name), u64::from(operation.length_bytes));
            let ended = move |result: Result<(), i32>| {
                let result = result.map_err(|errno| IoError {
                    operation: name,
                    device,
                    offset_bytes: operation.offset_bytes,
                    length_bytes: bytes,
                    cause: cause_of(errno),
                });
                if let Some(result) = unpoisoned(&parts).end(result) {
                    end.finish(Completion { tag, result });
                }
            };
            (operation, at as usize, Box::new(ended) as End)
        });
        Some((transfer.segments.into(), begun.collect()))
    }
}

/// The parts of a transfer that are in progress, and its result so far.
struct Parts {
    left: usize,
    result: Result<(), IoError>,
}

impl Parts {
    /// Notes the end of a part. Returns the result of the transfer at the end of the last one: the first error.
    fn end(&mut self, result: Result<(), IoError>) -> Option<Result<(), IoError>> {
        self.left -= 1;
        if self.result.is_ok() {
            self.result = result;
        }
        (self.left == 0).then(|| std::mem::replace(&mut self.result, Ok(())))
    }
}

/// Holds the name of a remote device against other processes of this network namespace: a second session of this client would end the first one.
fn claim(config: &AttachConfig) -> Result<UnixListener, AttachError> {
    let remote = &config.remote;
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::AddrInUse => AttachError::Busy(remote.clone()),
        _ => AttachError::Io {
            remote: remote.clone(),
            action: "reserve the name",
            source,
        },
    };
    let listener = reserve(&reserved(remote, config.ethertype)).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

/// Returns the process of this network namespace that has a remote device attached, if it can be seen.
pub(crate) fn holder(remote: &Remote, ethertype: u16) -> Option<u32> {
    listener_at(reserved(remote, ethertype).as_bytes())
}

/// Returns the name to reserve for a remote device: a hash, because such a name has no room for more.
fn reserved(remote: &Remote, ethertype: u16) -> String {
    let name = format!("{ethertype:04x} {remote}");
    let hash = SipHasher24::new().hash(name.as_bytes());
    format!("jericho/remote/{hash:016x}")
}

/// Returns what identifies this host as a client: the same after a restart, and another one in each network namespace. Without a
/// machine-id(5) it is the address of the first interface.
fn client_of(links: &Links) -> [u8; 16] {
    let namespace = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let mut name = namespace.into_os_string().into_encoded_bytes();
    match std::fs::read("/etc/machine-id") {
        Ok(machine) if !machine.is_empty() => name.extend_from_slice(&machine),
        _ => {
            let first = links.links().first().map(|link| link.mac);
            name.extend_from_slice(&first.unwrap_or_default());
        }
    }
    SipHasher128::new().hash(&name).as_bytes()
}
