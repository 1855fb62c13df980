//! The daemon's end of the fast path: the files that clients read and write inline, and the clients themselves.
//!
//! - `files`: the files that have a slot. `slots`: how they get one, their writers, and absorbing changes of size and times
//!   (`absorb`)
//! - `admission`: the socket. `clients`: the areas, the deaths of clients. `rings`: the pages that clients report
//! - `calls`: the ioctls on a file's descriptor. `wishes`: the grants that need no ioctl
//! - `range`: the words of the range lock, as threads of the daemon take them. `waits`: reads that wait for a client's loan to
//!   end
//! - `trusted`, `tokens`: the users whose processes are served, and the processes that may write
//! - `keeping`: the process that ends inline access when the daemon dies
//!
//! The bytes and the protocol: `docs/formats/shm.md`.
//!
//! Rule: code that answers the kernel about a file, or changes the file, first absorbs the clients' changes to it. Code that
//! changes its size updates the slot. Nothing here waits for a client without a bound.

mod admission;
mod calls;
mod changing;
mod clients;
mod extend;
mod files;
mod keeping;
mod kernel_pages;
mod range;
mod rings;
mod slots;
mod tokens;
mod trusted;
mod waits;
mod wishes;
mod write_guard;

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::ops::Range;
use std::os::unix::net::UnixStream;
#[cfg(test)]
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock, Weak};

use jericho_cache::Slice;
use jericho_format::threads::ThreadPolicy;
use jericho_fs::types::Ino;
use jericho_shm::{Control, Slots};
use jericho_sys::affinity::CpuMask;
use jericho_sys::service;
use jericho_topology::{NodeId, Topology};
use parking_lot::Mutex;

use crate::counters::MountCounts;
use crate::mapped;
use crate::mounted::Mounted;
pub use calls::Asker;
pub use clients::ClientStat;
use clients::Clients;
use files::Files;
pub use keeping::KeeperCommand;
use keeping::Keeping;
pub(crate) use range::{LockedOut, ReadGuard};
use rings::{Rings, Unreported};
pub(crate) use slots::{Grants, SlotFile};
use tokens::Tokens;
pub use trusted::{Trusted, TrustedError};
pub(crate) use waits::Waited;
use waits::Waiting;
pub use wishes::Served;
use wishes::Wishers;
pub(crate) use write_guard::WriteGuard;

/// Most files that can be open inline at once. The segments use memory only for slots that were used.
const SLOTS: u32 = 65_536;

/// The kernel's caches, as the front end can change them.
pub trait KernelCache: Send + Sync {
    /// Makes the kernel ask again for the attributes of an inode. Does not wait.
    fn drop_attributes(&self, ino: Ino);
    /// Makes the kernel drop its pages and attributes of an inode. May wait for requests that the kernel makes meanwhile.
    fn drop_pages(&self, ino: Ino);
    /// Does the same as `drop_pages` for the pages of a byte range.
    fn drop_some_pages(&self, ino: Ino, bytes: Range<u64>);
}

/// A kernel that caches nothing.
impl KernelCache for () {
    fn drop_attributes(&self, _: Ino) {}
    fn drop_pages(&self, _: Ino) {}
    fn drop_some_pages(&self, _: Ino, _: Range<u64>) {}
}

type Job = Box<dyn FnOnce() + Send>;

/// The daemon's end of the fast path; see the module.
pub(crate) struct Fast {
    control: Control,
    slots: Slots,
    /// The users whose processes are served.
    trusted: Trusted,
    /// No client may write.
    read_only: bool,
    tokens: Tokens,
    slices: Vec<Arc<Slice>>,
    files: Files,
    /// Number of mapped handles of each file, with or without a slot. Changed with the file's part of `files` locked for writing.
    mappings: Mutex<HashMap<Ino, u32>>,
    free: Arc<Mutex<slots::FreeSlots>>,
    changing: changing::Changing,
    /// Number of files in `files`, and how many of them are written inline. Read before any lock is taken.
    in_use: AtomicUsize,
    written: AtomicUsize,
    /// Lock order: after a slice's lock, because a slice revokes a client while it holds its lock; never before a slice's lock.
    clients: Mutex<Clients>,
    /// Number of times that the evictor or a close has looked into a client's area.
    #[cfg(test)]
    visited: AtomicU64,
    rings: Rings,
    /// Counters of the mount.
    pub(crate) counts: Arc<MountCounts>,
    wishers: Wishers,
    /// Slices have dirty pages that no client reports.
    unreported: Unreported,
    kernel: OnceLock<Arc<dyn KernelCache>>,
    closing: AtomicBool,
    /// Queue of jobs that may wait. They run in a thread of their own.
    jobs: Mutex<Option<Sender<Job>>>,
    /// Queue of reads that wait for other requests. A thread that serves no requests polls them.
    waits: Mutex<Option<Sender<Box<Waiting>>>>,
    threads: Mutex<Vec<std::thread::JoinHandle<()>>>,
    mounted: OnceLock<Weak<Mounted>>,
    keeping: Keeping,
    /// Closing one end makes the other readable.
    stop: (UnixStream, UnixStream),
}

impl Fast {
    pub fn new(
        name: &str,
        trusted: Trusted,
        read_only: bool,
        keeper: Option<KeeperCommand>,
        slices: &[Arc<Slice>],
        homes: &[NodeId],
        topology: &Topology,
    ) -> io::Result<Fast> {
        let geometry: Vec<(u32, u16)> = slices
            .iter()
            .zip(homes)
            .map(|(slice, home)| {
                let frames = slice.memory().geometry().frames;
                (frames, topology.thread_node(*home).0)
            })
            .collect();
        // Also covers CPUs that the daemon may not run on, because programs may run there.
        let node_of = |cpu| topology.node_of_cpu(cpu).map_or(u16::MAX, |node| node.0);
        let cpu_nodes: Vec<u16> = (0..=CpuMask::CPU_MAX).map(node_of).collect();
        // The number may be guessable, because the kernel vouches for the socket's peer. It must differ for each daemon.
        let instance = std::hash::RandomState::new().build_hasher().finish();
        Ok(Fast {
            control: Control::create(name, &geometry, SLOTS, &cpu_nodes, instance)?,
            slots: Slots::create(name, SLOTS)?,
            trusted,
            read_only,
            tokens: Tokens::default(),
            slices: slices.to_vec(),
            files: Files::default(),
            mappings: Mutex::default(),
            free: Arc::default(),
            changing: changing::Changing::default(),
            in_use: 0.into(),
            written: 0.into(),
            clients: Mutex::new(Clients::default()),
            #[cfg(test)]
            visited: 0.into(),
            rings: Rings::default(),
            wishers: Wishers::default(),
            counts: Arc::default(),
            unreported: Unreported::default(),
            kernel: OnceLock::new(),
            closing: AtomicBool::new(true),
            jobs: Mutex::new(None),
            waits: Mutex::new(None),
            threads: Mutex::new(vec![]),
            mounted: OnceLock::new(),
            keeping: Keeping::new(keeper),
            stop: UnixStream::pair()?,
        })
    }

    /// Sets the volume's thread policy for clients.
    pub fn set_thread_policy(&self, policy: ThreadPolicy) {
        self.control.set_policy(policy);
    }

    fn mounted(&self) -> Option<Arc<Mounted>> {
        self.mounted.get()?.upgrade()
    }

    /// Runs `job` in the thread for jobs that may wait. Drops the job when the volume closes.
    fn later(&self, job: impl FnOnce() + Send + 'static) {
        if let Some(jobs) = &*self.jobs.lock() {
            // The thread ends only when the sender is dropped.
            let _ = jobs.send(Box::new(job));
        }
    }
}

impl Mounted {
    /// Opens the fast path: from now on programs may ask for inline access. `kernel`: drops what the kernel has cached of a file
    /// that clients change.
    pub fn serve_clients(self: &Arc<Self>, kernel: Arc<dyn KernelCache>) -> io::Result<()> {
        let fast = &self.fast;
        let _ = fast.mounted.set(Arc::downgrade(self));
        let weak = Arc::downgrade(self);
        self.migrator.leave_out(Box::new(move |pid| {
            weak.upgrade().is_some_and(|m| m.fast.is_client(pid))
        }));
        if fast.kernel.set(kernel.clone()).is_err() {
            return Ok(());
        }
        for slice in &fast.slices {
            let weak = Arc::downgrade(self);
            slice.set_report_drain(Box::new(move || {
                if let Some(mounted) = weak.upgrade() {
                    mounted.fast.drain_rings();
                }
            }));
            let weak = Arc::downgrade(self);
            slice.set_collector(Box::new(move || {
                if let Some(mounted) = weak.upgrade() {
                    mounted.fast.take_touched();
                }
            }));
            let weak = Arc::downgrade(self);
            slice.set_on_broken(Box::new(move |owner| {
                let Some(mounted) = weak.upgrade() else {
                    return false;
                };
                let known = mounted.fast.revoke_client(owner);
                // The revoked client does not report the page.
                mounted.fast.unreported.note();
                mounted.fast.slots.ring();
                known
            }));
        }
        let mut threads = fast.threads.lock();
        let (sender, jobs) = channel::<Job>();
        *fast.jobs.lock() = Some(sender);
        let body = move || jobs.iter().for_each(|job| job());
        threads.push(service::spawn("fast-jobs", body)?);
        let (sender, reads) = channel();
        *fast.waits.lock() = Some(sender);
        threads.push(service::spawn("fast-waits", move || waits::serve(&reads))?);
        let listener = jericho_sys::handshake::Listener::bind(&jericho_shm::socket_name(
            fast.control.instance(),
        ))?;
        let mut admission = admission::Admission::new(fast, listener)?;
        let mounted = Arc::downgrade(self);
        let body = move || admission.serve(&mounted);
        threads.push(service::spawn("fast-clients", body)?);
        if fast.keeping.is_configured() {
            let mounted = Arc::downgrade(self);
            let body = move || keeping::serve(&mounted);
            threads.push(service::spawn("fast-keeper", body)?);
        }
        let mounted = Arc::downgrade(self);
        let body = move || mapped::serve(&mounted, &*kernel);
        threads.push(service::spawn("mapped-pages", body)?);
        let mounted = Arc::downgrade(self);
        let body = move || rings::serve(&mounted);
        threads.push(service::spawn("fast-rings", body)?);
        drop(threads);
        fast.closing.store(false, Ordering::SeqCst);
        Ok(())
    }

    /// Ends the fast path: revokes all clients, which then use the kernel, and absorbs their changes.
    pub(crate) fn close_clients(&self) {
        let fast = &self.fast;
        fast.closing.store(true, Ordering::SeqCst);
        let _ = fast.stop.0.shutdown(std::net::Shutdown::Both);
        fast.slots.ring();
        *fast.jobs.lock() = None;
        *fast.waits.lock() = None;
        self.mapped.close();
        for thread in std::mem::take(&mut *fast.threads.lock()) {
            let own = thread.thread().id() == std::thread::current().id();
            if !own && thread.join().is_err() {
                tracing::error!("a thread of the fast path has panicked");
            }
        }
        fast.revoke_all_clients();
        // Drains every ring. The words of the slots segment name the clients with reports, but clients can write those words.
        fast.drain_all_rings();
        for slot_file in fast.written_files() {
            self.absorb_file(&slot_file);
        }
        fast.drain_reports();
    }
}
