//! Requests through the kernel's ring (FUSE over io_uring), where the administrator has switched it on.
//!
//! The kernel has a queue for each CPU, and a thread bound to that CPU serves it. Program and thread take turns on one
//! CPU, where the device would wake a thread that sleeps on another CPU. The thread itself serves reads, and writes
//! that hit. It is the only thread of its CPU's queue, so it must never block: requests that may have to wait go to the
//! `helpers`. It reads misses in slices of its own node itself (`jericho_cache::Reader`). What the ring does not carry
//! (forgets, interrupts, the first handshake) comes through the device.

use std::io;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use jericho_daemon::Reader;
use jericho_sys::affinity;
use jericho_sys::fuse_ring::{FuseRing, Received};
use jericho_sys::service as threads;
use jericho_topology::Topology;

use crate::bytes::asker;
use crate::filesystem::{Jericho, REQUEST_BYTES_MAX, report_panic};
use crate::helpers::Helpers;
use crate::protocol::answer::SizeOut;
use crate::protocol::request::{Operation, parse};
use crate::protocol::{InHeader, op};
use crate::reply::{Channel, Reply};
use crate::workers::Placement;

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
pub(crate) struct Rings {
    rings: Vec<(u32, FuseRing)>,
    /// Entries of each queue.
    depth: usize,
}

impl Rings {
    /// Errors: io_uring is forbidden or too old, memory, descriptors.
    pub(crate) fn new(topology: &Topology) -> io::Result<Rings> {
        let queues = jericho_topology::possible_cpus().map_err(io::Error::other)?;
        let mut cpus: Vec<u32> = topology.nodes.iter().flat_map(|n| n.cpus.clone()).collect();
        cpus.sort_unstable();
        cpus.dedup();
        let depth = (ENTRIES / queues).clamp(DEPTH_MIN, DEPTH_MAX);
        let rings = deal(queues, &cpus)
            .into_iter()
            .map(|(cpu, queues)| {
                let ring = FuseRing::new(&queues, depth, REQUEST_BYTES_MAX as usize)?;
                Ok((cpu, ring))
            })
            .collect::<io::Result<_>>()?;
        Ok(Rings { rings, depth })
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

/// State that the threads share. Dropped in this order, because helpers hold the filesystem too.
struct Service {
    helpers: Helpers,
    filesystem: Jericho,
}

/// The threads of the ring.
pub(crate) struct Serving {
    threads: Vec<JoinHandle<()>>,
}

impl Serving {
    /// Serves the mount behind `device`, which has agreed to the ring. Errors: EMFILE, ENOMEM, no thread.
    pub(crate) fn start(
        rings: Rings,
        device: &Channel,
        filesystem: Jericho,
        helpers: usize,
        placement: &Arc<Placement>,
    ) -> io::Result<Serving> {
        let service = Arc::new(Service {
            helpers: Helpers::new(helpers, placement)?,
            filesystem,
        });
        let mut threads = Vec::new();
        // An unanswered request keeps its entry. Half of each queue remains for the requests that free space.
        service
            .filesystem
            .mounted
            .limit_space_waits(rings.depth / 2);
        for (cpu, mut ring) in rings.rings {
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

impl Service {
    fn serve(&self, cpu: u32, mut ring: FuseRing) {
        if let Err(error) = affinity::set(None, &[cpu]) {
            // Served from anywhere then: slower, not wrong.
            tracing::warn!(%error, cpu, "cannot bind a thread of the ring to its CPU");
        }
        // Dropped before the ring: what is under way is ended.
        let mut readers = self.filesystem.mounted.readers(cpu, &ring.doorbell());
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
                    readers.iter().all(Reader::is_idle) && !self.filesystem.mounted.fs().is_behind()
                };
                let header = InHeader::read(&received.header);
                let request = AssertUnwindSafe(|| self.request(&header, received, may_wait));
                if catch_unwind(request).is_err() {
                    report_panic(&header);
                }
            }
            for reader in &mut readers {
                reader.run();
            }
        }
    }

    #[inline]
    fn request(&self, header: &InHeader, received: Received, may_wait: impl Fn() -> bool) {
        match header.opcode {
            op::READ => self.read(header, received),
            op::WRITE => self.write(header, received),
            _ if self.comes_back(header.opcode, &received) && may_wait() => {
                serve(&self.filesystem, header, received);
            }
            _ => {
                let (filesystem, header) = (self.filesystem.clone(), *header);
                self.helpers
                    .run(Box::new(move || serve(&filesystem, &header, received)));
            }
        }
    }

    /// Reads, or passes the read to a helper when it may have to wait for inline writers.
    #[inline]
    fn read(&self, header: &InHeader, received: Received) {
        let arguments = &received.arguments[..received.arguments_len];
        let reply = Reply::Ring(received.reply);
        let args = match parse(header, arguments, &[], &self.filesystem.agreed) {
            Ok(Operation::Read(args)) => args,
            other => return self.filesystem.serve(header, other, Some(reply)),
        };
        let asker = asker(header);
        if let Some(room) = self.filesystem.try_read(asker, &args, reply.room()) {
            let filesystem = self.filesystem.clone();
            self.helpers
                .run(Box::new(move || filesystem.read_into(asker, &args, room)));
        }
    }

    /// Writes as much as possible without waiting; a helper writes the rest.
    fn write(&self, header: &InHeader, received: Received) {
        let arguments = &received.arguments[..received.arguments_len];
        let data = received.payload.as_ref().map_or(&[][..], AsRef::as_ref);
        let (mut args, data) = match parse(header, arguments, data, &self.filesystem.agreed) {
            Ok(Operation::Write { args, data }) => (args, data),
            other => {
                return self
                    .filesystem
                    .serve(header, other, Some(Reply::Ring(received.reply)));
            }
        };
        let asker = asker(header);
        let done = self.filesystem.try_write(asker, &args, data);
        let reply = Reply::Ring(received.reply);
        if done == data.len() {
            return reply.with(&SizeOut::new(done as u32));
        }
        // Not from the beginning again: what another writer has put there meanwhile came later.
        args.offset += done as u64;
        let (filesystem, payload) = (self.filesystem.clone(), received.payload);
        self.helpers.run(Box::new(move || {
            let data = payload.as_ref().map_or(&[][..], AsRef::as_ref);
            filesystem.write_bytes(asker, &args, &data[done..], move |rest| match rest {
                Ok(len) => reply.with(&SizeOut::new(done as u32 + len)),
                // An error after the first bytes is a short write.
                Err(_) if done > 0 => reply.with(&SizeOut::new(done as u32)),
                Err(e) => reply.error(e),
            });
        }));
    }

    /// Returns whether a request is one that programs make for each file that they use. Such a request may read names and
    /// attributes from the device, but it never waits for another request.
    fn comes_back(&self, opcode: u32, received: &Received) -> bool {
        match opcode {
            op::LOOKUP | op::GETATTR | op::STATX | op::CREATE | op::TMPFILE => true,
            // Truncates nothing: that is a request of its own.
            op::OPEN => true,
            op::OPENDIR | op::RELEASEDIR | op::FLUSH => true,
            // The file's last inline writer may have stopped in the middle of a write that extends the file.
            op::RELEASE => {
                let [a, b, c, d, e, f, g, h, ..] = received.arguments;
                let handle = u64::from_ne_bytes([a, b, c, d, e, f, g, h]);
                !self.filesystem.may_write_inline(handle)
            }
            _ => false,
        }
    }
}

/// Serves a request in the calling thread.
fn serve(filesystem: &Jericho, header: &InHeader, received: Received) {
    let arguments = &received.arguments[..received.arguments_len];
    let rest = received.payload.as_ref().map_or(&[][..], AsRef::as_ref);
    let operation = parse(header, arguments, rest, &filesystem.agreed);
    filesystem.serve(header, operation, Some(Reply::Ring(received.reply)));
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
