//! Requests through the FUSE ring (FUSE over io_uring), where the administrator has enabled it.
//!
//! The kernel has a queue for each CPU, and a thread serves it that usually is bound to that CPU (`ring_binding`). Program and thread alternate
//! on one CPU, whereas the device would wake a thread that sleeps on another CPU. The thread serves reads itself, and writes that hit. It is
//! the only thread of its CPU's queue, so it must never block: the `helpers` serve requests that may have to wait. It reads
//! misses in slices of its own node itself (`jericho_cache::Reader`). The device transports what the ring does not: forgets,
//! interrupts and the handshake.

use std::io;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use jericho_daemon::{Reader, with_interruption};
use jericho_sys::fuse_ring::{FuseRing, Received};
use jericho_sys::service as threads;
use jericho_topology::Topology;

use crate::bytes::asker;
use crate::crew::THREADS_MAX;
use crate::filesystem::Jericho;
use crate::helpers::Helpers;
use crate::interrupts::Ending;
use crate::protocol::answer::SizeOut;
use crate::protocol::request::{Operation, Transfer, parse};
use crate::protocol::{InHeader, op};
use crate::reply::{Channel, Reply};
use crate::ring_binding::{Binding, Helped};
use crate::ring_polling::Polling;
use crate::ring_requests::is_served_here;
use crate::ring_syncs::OwnSyncs;
use crate::server::{REQUEST_BYTES_MAX, Server, report_panic};
use crate::workers::WorkerNodes;

/// The kernel module's switch for the FUSE ring.
const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

/// The error when the kernel offers no ring, and how to mend it.
pub(crate) const NOT_OFFERED: &str = "this kernel does not offer FUSE over io_uring: it requires Linux 6.14 or later and, as \
     root, `echo Y > /sys/module/fuse/parameters/enable_uring`; or mount with --transport device";

/// Target for the entries of all queues together. Each queue has at least `DEPTH_MIN` and at most `DEPTH_MAX` of them. An entry has
/// 1 MiB for the largest request. The memory is allocated at its first use.
const ENTRIES: usize = 512;
const DEPTH_MIN: usize = 16;
const DEPTH_MAX: usize = 32;

/// Returns whether the kernel offers the FUSE ring.
pub(crate) fn is_offered() -> bool {
    std::fs::read_to_string(SWITCH).is_ok_and(|switch| switch.trim() == "Y")
}

/// One io_uring for each CPU that serves. Created before the handshake: the kernel cannot leave the ring once it has agreed to
/// it.
pub(crate) struct Rings {
    rings: Vec<(u32, FuseRing)>,
    /// Entries of each queue.
    depth: usize,
    /// Entries of all queues.
    entries: usize,
}

impl Rings {
    /// Creates the rings. Fails when io_uring is forbidden or too old, or when memory or descriptors run out.
    pub(crate) fn new(topology: &Topology) -> io::Result<Rings> {
        let queues = jericho_topology::possible_cpus().map_err(io::Error::other)?;
        let mut cpus: Vec<u32> = topology.nodes.iter().flat_map(|n| n.cpus.clone()).collect();
        cpus.sort_unstable();
        cpus.dedup();
        let depth = (ENTRIES / queues).clamp(DEPTH_MIN, DEPTH_MAX);
        let rings = assign_queues(queues, &cpus)
            .into_iter()
            .map(|(cpu, queues)| {
                let ring = FuseRing::new(&queues, depth, REQUEST_BYTES_MAX as usize)?;
                Ok((cpu, ring))
            })
            .collect::<io::Result<_>>()?;
        let entries = queues * depth;
        Ok(Rings {
            rings,
            depth,
            entries,
        })
    }
}

/// Returns the queues that each of `cpus` serves: its own, and its share of the queues of other CPUs, which are absent or which
/// this process may not use. The kernel sends no request before all queues are served.
fn assign_queues(queues: usize, cpus: &[u32]) -> Vec<(u32, Vec<u16>)> {
    let mut assigned: Vec<(u32, Vec<u16>)> = cpus.iter().map(|cpu| (*cpu, Vec::new())).collect();
    for queue in 0..queues.min(usize::from(u16::MAX)) {
        let own = cpus.binary_search(&(queue as u32)).ok();
        if let Some(at) = own.or_else(|| queue.checked_rem(cpus.len())) {
            assigned[at].1.push(queue as u16);
        }
    }
    assigned.retain(|(_, queues)| !queues.is_empty());
    assigned
}

/// What a thread serves with. The fields are dropped in this order: the last `helpers` first runs its queued jobs, which hold the
/// filesystem too.
struct Service {
    helpers: Arc<Helpers>,
    filesystem: Jericho,
    helped: Helped,
}

/// The threads of the ring.
pub(crate) struct Serving {
    threads: Vec<JoinHandle<()>>,
}

impl Serving {
    /// Serves the mount behind `device`, which has agreed to the ring. Fails with EMFILE or ENOMEM, or when no thread can be
    /// started.
    pub(crate) fn start(
        rings: Rings,
        device: &Channel,
        filesystem: Jericho,
        helpers: usize,
        nodes: &Arc<WorkerNodes>,
    ) -> io::Result<Serving> {
        // A signal can end a request that waits for a silent host only when a helper has begun it. So there may be one for each entry.
        let most = rings.entries.max(THREADS_MAX);
        let helpers = Arc::new(Helpers::new(helpers, most, nodes)?);
        let mut threads = Vec::new();
        // An unanswered request keeps its entry. Half of each queue remains for the requests that free space.
        filesystem.mounted.limit_space_waits(rings.depth / 2);
        for (cpu, mut ring) in rings.rings {
            ring.register(device.as_fd().try_clone_to_owned()?);
            let service = Service {
                helpers: helpers.clone(),
                filesystem: filesystem.clone(),
                helped: Helped::default(),
            };
            let thread = std::thread::Builder::new()
                .name(format!("mount-ring-{cpu}"))
                .spawn(move || threads::run(|| service.serve(cpu, ring)))?;
            threads.push(thread);
        }
        Ok(Serving { threads })
    }

    /// Waits until the threads have ended, which they do when the mount ends.
    pub(crate) fn wait(self) {
        for thread in self.threads {
            // The threads catch panics of requests.
            let _ = thread.join();
        }
    }
}

impl Service {
    fn serve(&self, cpu: u32, mut ring: FuseRing) {
        let nodes = &self.filesystem.mounted.topology().nodes;
        let node = nodes.iter().find(|node| node.cpus.contains(&cpu));
        let cpus = node.map_or(&[][..], |node| &node.cpus);
        let mut binding = Binding::new(cpu, cpus, self.helped.clone());
        // Declared after the ring, so dropped before it. Dropping the readers ends their transfers.
        let (mut readers, mut slices) = (Vec::new(), 0);
        let (mut own_syncs, mut syncs) = (OwnSyncs::default(), Vec::new());
        let mut polling = Polling::new();
        while !ring.has_ended() {
            let mounted = &self.filesystem.mounted;
            // At the begin, and when the volume has got further slices.
            let count = mounted.slice_count();
            if count > slices {
                readers.extend(mounted.readers(cpu, &ring.doorbell(), slices..count));
                slices = count;
                own_syncs.has_devices(mounted.fs().device_count());
            }
            // Polls the devices before it answers the kernel.
            for reader in &mut readers {
                reader.poll();
            }
            let time = polling.time(!readers.iter().all(Reader::is_idle));
            let poll = || readers.iter_mut().fold(false, |some, r| r.poll() | some);
            if let Err(error) = ring.wait(time, poll) {
                return report_failure(cpu, &error);
            }
            // Other threads may wait for a read that this thread has in flight. Until the read ends, this thread must not wait for
            // locks that they may hold; see `jericho_cache::Reader`. Nor may it make a change that has to wait for the committer.
            let may_wait =
                || readers.iter().all(Reader::is_idle) && !self.filesystem.mounted.fs().is_behind();
            while let Some(received) = ring.take() {
                self.filesystem.mounted.note_request();
                let header = InHeader::read(&received.header);
                let is_sync = is_sync(header.opcode);
                polling.has_come(is_sync);
                binding.has_come(polling.syncs());
                if is_sync {
                    syncs.push((header, received));
                    continue;
                }
                let request = || self.request(&header, received, may_wait);
                catching(&header, request);
            }
            if !syncs.is_empty() {
                let taken = std::mem::take(&mut syncs);
                if let Err(error) = self.sync(&mut ring, &mut own_syncs, taken, may_wait) {
                    return report_failure(cpu, &error);
                }
            }
            for reader in &mut readers {
                reader.run();
            }
        }
    }

    /// Serves requests to sync: here, if that keeps no other request waiting (`ring_syncs`), else in helpers.
    fn sync(
        &self,
        ring: &mut FuseRing,
        own: &mut OwnSyncs,
        mut syncs: Vec<(InHeader, Received)>,
        may_wait: impl Fn() -> bool,
    ) -> io::Result<()> {
        let may_fall_silent = self.filesystem.mounted.may_fall_silent();
        if syncs.len() == 1 && !may_fall_silent && own.next() && may_wait() {
            // Answers to others are not held back for the length of the sync.
            if ring.taken() > 1 {
                ring.send()?;
            }
            if ring.taken() == 1
                && !ring.has_arrived()
                && let Some((header, received)) = syncs.pop()
            {
                let begun = Instant::now();
                catching(&header, || serve(&self.filesystem, &header, received));
                let took = begun.elapsed();
                ring.send()?;
                own.ended(took, ring.has_arrived());
            }
        }
        for (header, received) in syncs {
            self.help(header, received);
        }
        Ok(())
    }

    /// Has a helper serve a request.
    fn help(&self, header: InHeader, received: Received) {
        let filesystem = self.filesystem.clone();
        self.run_in_helper(move || serve(&filesystem, &header, received));
    }

    fn run_in_helper(&self, job: impl FnOnce() + Send + 'static) {
        self.filesystem.mounted.note_helped();
        let helped = self.helped.clone();
        self.helpers.run(Box::new(move || {
            job();
            helped.charge();
        }));
    }

    #[inline]
    fn request(&self, header: &InHeader, received: Received, may_wait: impl Fn() -> bool) {
        match header.opcode {
            op::READ => self.read(header, received),
            op::WRITE => self.write(header, received),
            _ if is_served_here(&self.filesystem, header, &received) && may_wait() => {
                serve(&self.filesystem, header, received);
            }
            _ => self.help(*header, received),
        }
    }

    /// Reads, or passes the read to a helper when it may have to wait for inline writers.
    #[inline]
    fn read(&self, header: &InHeader, received: Received) {
        let arguments = &received.arguments[..received.arguments_len];
        let reply = Reply::ring(received.reply);
        let args = match parse(header, arguments, &[], &self.filesystem.agreed) {
            Ok(Operation::Read(args)) => args,
            other => return self.filesystem.serve(header, other, Some(reply)),
        };
        let asker = asker(header);
        let may_be_ended = self.filesystem.mounted.may_fall_silent();
        let room = reply.room(may_be_ended.then(|| self.filesystem.ticket(header)));
        if let Some(room) = self.filesystem.try_read(asker, &args, room) {
            let filesystem = self.filesystem.clone();
            self.run_in_helper(move || filesystem.read_into(asker, &args, room));
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
                    .serve(header, other, Some(Reply::ring(received.reply)));
            }
        };
        let asker = asker(header);
        let done = self.filesystem.try_write(asker, &args, data);
        let reply = Reply::ring(received.reply);
        if done == data.len() {
            return reply.with(&SizeOut::new(done as u32));
        }
        // Does not repeat the first part: another writer may have overwritten it since.
        args.offset += done as u64;
        let is_of_mapping = args.flags & Transfer::WRITE_CACHE != 0;
        let may_be_ended = self.filesystem.mounted.may_fall_silent() && !is_of_mapping;
        let ticket = may_be_ended.then(|| self.filesystem.ticket(header));
        let (filesystem, payload) = (self.filesystem.clone(), received.payload);
        self.run_in_helper(move || {
            let data = payload.as_ref().map_or(&[][..], AsRef::as_ref);
            let rest = &data[done..];
            let Some(ticket) = ticket else {
                return filesystem.write_rest(asker, &args, rest, done, reply);
            };
            // The entry must return to the kernel with the answer, also while the write goes on.
            let rest = rest.to_vec();
            drop(payload);
            let reply = reply.hold(ticket, Ending::RestOfWrite(done));
            let interruption = reply.interruption();
            let write = || filesystem.write_rest(asker, &args, &rest, done, reply);
            with_interruption(interruption, write);
        });
    }
}

/// Returns whether a request makes data or names durable.
fn is_sync(opcode: u32) -> bool {
    matches!(opcode, op::FSYNC | op::FSYNCDIR)
}

/// Serves a request. A panic costs only the request.
#[inline]
fn catching(header: &InHeader, request: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(request)).is_err() {
        report_panic(header);
    }
}

fn report_failure(cpu: u32, error: &io::Error) {
    tracing::error!(%error, cpu, "the ring of a CPU has failed; its requests come through the device");
}

/// Serves a request in the calling thread.
fn serve(filesystem: &Jericho, header: &InHeader, received: Received) {
    let arguments = &received.arguments[..received.arguments_len];
    let mut payload = received.payload;
    // A signal may end the request while this thread waits. The entry must then return to the kernel with the answer.
    let may_be_ended = filesystem.mounted.may_fall_silent();
    let copied = (payload.take_if(|_| may_be_ended)).map(|payload| payload.as_ref().to_vec());
    let rest = match (&copied, &payload) {
        (Some(copied), _) => copied,
        (None, Some(payload)) => payload.as_ref(),
        (None, None) => &[][..],
    };
    let operation = parse(header, arguments, rest, &filesystem.agreed);
    filesystem.serve(header, operation, Some(Reply::ring(received.reply)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_queue_is_served_and_a_cpu_serves_its_own() {
        let assigned = assign_queues(8, &[1, 4, 5]);
        for (cpu, queues) in &assigned {
            assert!(queues.contains(&(*cpu as u16)), "{assigned:?}");
        }
        let mut all: Vec<u16> = assigned
            .iter()
            .flat_map(|(_, queues)| queues.clone())
            .collect();
        all.sort_unstable();
        assert_eq!(all, (0..8).collect::<Vec<u16>>());
    }

    #[test]
    fn a_cpu_beyond_the_queues_serves_the_queues_that_are_assigned_to_it_or_none() {
        assert_eq!(assign_queues(2, &[7]), [(7, vec![0, 1])]);
        assert_eq!(assign_queues(1, &[0, 7]), [(0, vec![0])]);
    }
}
