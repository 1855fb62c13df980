//! Requests through the kernel's ring (FUSE over io_uring), where the administrator has switched it on.
//!
//! The kernel has a queue for each CPU, and a thread bound to that CPU serves it: program and thread change places on one
//! CPU, where the device would wake a thread that sleeps on another one. Reads, and writes that hit, are served right there.
//! A thread of the ring is the only one of its CPU, so it must always come back: a write that may have to wait goes to the
//! `helpers`, everything else to `fuser` (`forward`). What it misses in slices of its own node it reads itself
//! (`jericho_cache::Reader`). What the ring does not carry (forgets, interrupts, the first
//! handshake) comes by the device as before.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use fuser::WriteFlags;
use jericho_daemon::{ReadBuffer, Reader};
use jericho_fs::types::{Attr, Caller};
use jericho_sys::affinity;
use jericho_sys::fuse_ring::{FuseRing, Payload, Received, Reply};
use jericho_sys::service as threads;
use jericho_topology::Topology;
use zerocopy::IntoBytes;

use crate::bytes::Write;
use crate::filesystem::{FILE_FLAGS, Jericho, REQUEST_BYTES_MAX, TTL};
use crate::forward::{Forward, Unsent};
use crate::helpers::Helpers;
use crate::protocol::{
    self, AttributesOut, Create, EntryOut, InHeader, OP_CREATE, OP_GETATTR, OP_LOOKUP, OP_OPEN,
    OP_READ, OP_RELEASE, OP_TMPFILE, OP_WRITE, OpenOut, Transfer, WriteOut,
};

/// Whether the kernel's ring may be used; a file of the module's.
const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

/// What to do when there is none.
pub(crate) const NOT_OFFERED: &str = "this kernel does not offer FUSE over io_uring: it takes Linux 6.14 or later and, as \
     root, `echo Y > /sys/module/fuse/parameters/enable_uring`; or mount with --transport device";

/// Requests that may be with us at once, of all queues together if that leaves enough for each. An entry has memory for the
/// largest request, 1 MiB, which is taken when it is first used.
const ENTRIES: usize = 512;
const DEPTH_MIN: usize = 16;
const DEPTH_MAX: usize = 32;

/// How long a thread looks for the next request before it sleeps: about as long as it takes to wake an idle CPU.
const LOOK: Duration = Duration::from_micros(40);

/// And while it reads from a device: about as long as a fast one takes under load.
const LOOK_FOR_DEVICE: Duration = Duration::from_micros(200);

/// Whether the kernel offers its ring.
pub(crate) fn is_offered() -> bool {
    std::fs::read_to_string(SWITCH).is_ok_and(|switch| switch.trim() == "Y")
}

/// A ring for each CPU that serves. Made before the kernel is asked: once it has agreed there is no way back.
pub(crate) struct Rings(Vec<(u32, FuseRing)>);

impl Rings {
    /// Errors: io_uring is forbidden or too old, memory, descriptors.
    pub(crate) fn new(topology: &Topology) -> io::Result<Rings> {
        let queues = jericho_topology::possible_cpus().map_err(io::Error::other)?;
        let mut cpus: Vec<u32> = topology.nodes.iter().flat_map(|n| n.cpus.clone()).collect();
        cpus.sort_unstable();
        cpus.dedup();
        let depth = (ENTRIES / queues).clamp(DEPTH_MIN, DEPTH_MAX);
        deal(queues, &cpus)
            .into_iter()
            .map(|(cpu, queues)| {
                let ring = FuseRing::new(&queues, depth, REQUEST_BYTES_MAX as usize)?;
                Ok((cpu, ring))
            })
            .collect::<io::Result<_>>()
            .map(Rings)
    }
}

/// The queues of each of `cpus`: its own, and its share of those whose CPUs we may not use or that are not there. All have
/// to be served before the kernel sends anything.
fn deal(queues: usize, cpus: &[u32]) -> Vec<(u32, Vec<u16>)> {
    let mut dealt: Vec<(u32, Vec<u16>)> = cpus.iter().map(|cpu| (*cpu, Vec::new())).collect();
    for queue in 0..queues.min(usize::from(u16::MAX)) {
        let own = cpus.binary_search(&(queue as u32)).ok();
        if let Some(at) = own.or_else(|| queue.checked_rem(cpus.len())) {
            dealt[at].1.push(queue as u16);
        }
    }
    dealt.retain(|(_, queues)| !queues.is_empty());
    dealt
}

/// What the threads share. In this order they end: helpers have `names`.
struct Service {
    helpers: Helpers,
    names: Arc<Names>,
}

/// What answers requests, and what passes on those that it does not.
struct Names {
    filesystem: Jericho,
    forward: Forward,
}

/// The threads of the ring.
pub(crate) struct Serving {
    threads: Vec<JoinHandle<()>>,
}

impl Serving {
    /// Serves the mount behind `device`, which has agreed to the ring. Errors: EMFILE, ENOMEM, no thread.
    pub(crate) fn start(
        rings: Rings,
        device: &OwnedFd,
        filesystem: Jericho,
        config: fuser::Config,
    ) -> io::Result<Serving> {
        let workers = config.n_threads.unwrap_or(1);
        let names = Names {
            forward: Forward::new(filesystem.clone(), config)?,
            filesystem,
        };
        let service = Arc::new(Service {
            helpers: Helpers::new(workers)?,
            names: Arc::new(names),
        });
        let mut threads = Vec::new();
        for (cpu, mut ring) in rings.0 {
            ring.register(device.as_fd().try_clone_to_owned()?);
            let service = service.clone();
            let thread = std::thread::Builder::new()
                .name(format!("mount-ring-{cpu}"))
                .spawn(move || threads::run(|| service.serve(cpu, ring)))?;
            threads.push(thread);
        }
        Ok(Serving { threads })
    }

    /// Waits until the threads have ended, as they do when the mount ends.
    pub(crate) fn wait(self) {
        for thread in self.threads {
            // Panics of requests are caught.
            let _ = thread.join();
        }
    }
}

/// The payload of an entry, for a read.
struct Room(Reply);

impl ReadBuffer for Room {
    fn first(&mut self, len: usize) -> &mut [u8] {
        &mut self.0.room()[..len]
    }
}

impl Service {
    fn serve(&self, cpu: u32, mut ring: FuseRing) {
        if let Err(error) = affinity::set(None, &[cpu]) {
            // Served from anywhere then: slower, not wrong.
            tracing::warn!(%error, cpu, "cannot bind a thread of the ring to its CPU");
        }
        // Dropped before the ring: what is under way is ended.
        let mut readers = self.names.filesystem.mounted.readers(cpu, &ring.doorbell());
        while !ring.has_ended() {
            // The device first, then the kernel's answers.
            for reader in &mut readers {
                reader.poll();
            }
            let look = match readers.iter().all(Reader::is_idle) {
                true => LOOK,
                false => LOOK_FOR_DEVICE,
            };
            let poll = || readers.iter_mut().fold(false, |some, r| r.poll() | some);
            if let Err(error) = ring.wait(look, poll) {
                tracing::error!(%error, cpu, "the ring of a CPU ends; its requests come by the device");
                return;
            }
            while let Some(received) = ring.take() {
                // See `jericho_cache::Reader`: what others wait for must not wait for their locks.
                let may_wait = || {
                    readers.iter().all(Reader::is_idle)
                        && !self.names.filesystem.mounted.fs().is_behind()
                };
                let request = AssertUnwindSafe(|| self.request(received, may_wait));
                if catch_unwind(request).is_err() {
                    tracing::error!("a request panicked; it was answered with an I/O error");
                }
            }
            for reader in &mut readers {
                reader.run();
            }
        }
    }

    #[inline]
    fn request(&self, received: Received, may_wait: impl Fn() -> bool) {
        let header = InHeader::read(&received.header);
        let arguments = &received.arguments[..received.arguments_len];
        match (header.opcode, protocol::first::<Transfer>(arguments)) {
            (OP_READ, Some(transfer)) => self.read(&header, &transfer, received.reply),
            (OP_WRITE, Some(transfer)) => self.write(&header, &transfer, received),
            _ if !Names::are_ours(header.opcode) || may_wait() => {
                if let Some(unsent) = self.names.request(&header, received) {
                    let names = self.names.clone();
                    self.helpers
                        .run(Box::new(move || names.forward.send_waiting(unsent)));
                }
            }
            _ => {
                let names = self.names.clone();
                self.helpers.run(Box::new(move || {
                    if let Some(unsent) = names.request(&header, received) {
                        names.forward.send_waiting(unsent);
                    }
                }));
            }
        }
    }

    fn read(&self, header: &InHeader, transfer: &Transfer, mut reply: Reply) {
        let size = transfer.size.min(reply.room().len() as u32);
        let answer = |read: Result<usize, fuser::Errno>, room: Room| match read {
            Ok(len) => room.0.filled(len),
            Err(error) => room.0.error(error.code()),
        };
        let (fh, offset) = (transfer.fh, transfer.offset);
        self.names
            .filesystem
            .read_bytes(header.pid, fh, offset, size, Room(reply), answer);
    }

    fn write(&self, header: &InHeader, transfer: &Transfer, received: Received) {
        let Received { payload, reply, .. } = received;
        let mut write = Write {
            pid: header.pid,
            fh: transfer.fh,
            offset: transfer.offset,
            write_flags: WriteFlags::from_bits_retain(transfer.flags),
            open_flags: transfer.open_flags as i32,
        };
        let Some(payload) = payload.filter(|p| p.as_ref().len() == transfer.size as usize) else {
            return reply.error(libc::EIO);
        };
        let done = self.names.filesystem.try_write(&write, payload.as_ref());
        if done == payload.as_ref().len() {
            return reply.short(written(done).as_bytes());
        }
        // Not from the beginning again: what another writer has put there meanwhile came later.
        write.offset += done as u64;
        let filesystem = self.names.filesystem.clone();
        self.helpers.run(Box::new(move || {
            filesystem.write_bytes(&write, &payload.as_ref()[done..], move |rest| match rest {
                Ok(len) => reply.short(written(done + len as usize).as_bytes()),
                // An error after the first bytes is a short write.
                Err(_) if done > 0 => reply.short(written(done).as_bytes()),
                Err(error) => reply.error(error.code()),
            });
        }));
    }
}

impl Names {
    fn are_ours(opcode: u32) -> bool {
        matches!(
            opcode,
            OP_LOOKUP | OP_GETATTR | OP_OPEN | OP_CREATE | OP_TMPFILE | OP_RELEASE
        )
    }

    /// Answers a request, or passes it on to `fuser`. What there is no room for comes back.
    fn request(&self, header: &InHeader, received: Received) -> Option<Unsent> {
        let arguments = &received.arguments[..received.arguments_len];
        match self.answer(header, arguments, received.payload.as_ref()) {
            Some(Ok(out)) => received.reply.owned(out),
            Some(Err(error)) => received.reply.error(error.code()),
            None => return self.forward.try_request(received),
        }
        None
    }

    /// The requests that programs make for each file that they use. They may have to read from the device, as far as names
    /// and attributes are not cached, but wait for nobody who waits for a request. `None`: another one.
    fn answer(
        &self,
        header: &InHeader,
        arguments: &[u8],
        payload: Option<&Payload>,
    ) -> Option<Result<Vec<u8>, fuser::Errno>> {
        let (filesystem, ino) = (&self.filesystem, header.nodeid);
        let name = || protocol::name(payload?.as_ref());
        let out = match header.opcode {
            OP_LOOKUP => {
                let entry = |found: Option<Attr>| {
                    let ttl = found.as_ref().map_or(TTL, |a| filesystem.ttl(a.ino));
                    EntryOut::new(found.as_ref(), ttl).as_bytes().to_vec()
                };
                filesystem.look_up(ino, name()?).map(entry)
            }
            OP_GETATTR => filesystem.attributes(ino).map(|a| {
                AttributesOut::new(&a, filesystem.ttl(ino))
                    .as_bytes()
                    .to_vec()
            }),
            OP_OPEN => {
                let flags = protocol::first::<u32>(arguments)? as i32;
                if flags & libc::O_TRUNC != 0 {
                    return None;
                }
                filesystem.open_inode(ino, flags).map(opened)
            }
            OP_CREATE | OP_TMPFILE => {
                let create = protocol::first::<Create>(arguments)?;
                let caller = Caller {
                    uid: header.uid,
                    gid: header.gid,
                    umask: create.umask,
                };
                let perm = (create.mode & 0o7777) as u16;
                let flags = create.flags as i32;
                let made = match header.opcode {
                    OP_CREATE => filesystem.create_and_open(ino, name()?, perm, flags, caller),
                    _ => filesystem.open_unnamed(ino, perm, flags, caller),
                };
                made.map(|(attr, fh)| {
                    let mut out = EntryOut::new(Some(&attr), TTL).as_bytes().to_vec();
                    out.extend(opened(fh));
                    out
                })
            }
            OP_RELEASE => {
                let closed = filesystem.close(protocol::first::<u64>(arguments)?);
                closed.map(|()| vec![])
            }
            _ => return None,
        };
        Some(out)
    }
}

/// `len` is at most that of a request.
fn written(len: usize) -> WriteOut {
    WriteOut {
        size: len as u32,
        padding: 0,
    }
}

fn opened(fh: u64) -> Vec<u8> {
    let out = OpenOut {
        fh,
        open_flags: FILE_FLAGS.bits(),
        backing_id: 0,
    };
    out.as_bytes().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_queue_is_served_and_a_cpu_serves_its_own() {
        let dealt = deal(8, &[1, 4, 5]);
        for (cpu, queues) in &dealt {
            assert!(queues.contains(&(*cpu as u16)), "{dealt:?}");
        }
        let mut all: Vec<u16> = dealt
            .iter()
            .flat_map(|(_, queues)| queues.clone())
            .collect();
        all.sort_unstable();
        assert_eq!(all, (0..8).collect::<Vec<u16>>());
    }

    #[test]
    fn a_cpu_beyond_the_queues_serves_what_is_dealt_to_it_or_nothing() {
        assert_eq!(deal(2, &[7]), [(7, vec![0, 1])]);
        assert_eq!(deal(1, &[0, 7]), [(0, vec![0])]);
    }
}
