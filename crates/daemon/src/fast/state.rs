//! The state of the fast path, and how a file's slot is found.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};

use jericho_cache::Slice;
use jericho_format::threads::ThreadPolicy;
use jericho_fs::types::Ino;
use jericho_shm::{Control, Geometry, Slot, SlotInfo, Slots};
use jericho_sys::affinity::CpuMask;
use jericho_sys::files;
use jericho_topology::NodeId;
use parking_lot::Mutex;

use super::changing::{ChangeGuard, Changing};
use super::client_table::{ClientStat, ClientTable};
use super::files::Files;
use super::keeper_process::{KeeperCommand, KeeperProcess};
use super::rings::{Rings, Unreported};
use super::slot_file::{FreeSlots, SlotFile};
use super::tokens::Tokens;
use super::trusted::Trusted;
use super::wishers::Wishers;
use crate::counters::MountCounts;
use crate::kernel_cache::KernelCache;
use crate::move_costs::MoveCosts;
use crate::narrow_masks::MaskNotes;
use crate::volume::OpenVolume;

/// Name of the segments' memfds.
const NAME: &str = "volume";
/// Most files that can be open inline at once. The segments use memory only for slots that were used.
const SLOTS: u32 = 65_536;

pub(super) type Job = Box<dyn FnOnce() + Send>;

/// A moment before attributes are read; see `Fast::attributes_may_be_kept`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment(u64);

/// The daemon's end of the fast path: its tables, and the segments that clients map.
pub(crate) struct Fast {
    pub(super) control: Control,
    pub(super) slots: Slots,
    /// Notes of the masks that the daemon has narrowed, for the keeper.
    pub(super) masks: Arc<MaskNotes>,
    /// The users whose processes are served.
    pub(super) trusted: Trusted,
    pub(super) tokens: Tokens,
    pub(super) files: Files,
    /// Number of mapped handles of each file, with or without a slot. Changed with the file's part of `files` locked for writing.
    pub(super) mappings: Mutex<HashMap<Ino, u32>>,
    pub(super) free_slots: Arc<Mutex<FreeSlots>>,
    pub(super) changing: Arc<Changing>,
    /// Number of files in `files`, and how many of them are written inline. Read before any lock is taken.
    pub(super) in_use: AtomicUsize,
    pub(super) written: AtomicUsize,
    /// Files that have lost their last inline writer, and still have the space that was reserved for it.
    pub(super) settling: Arc<Changing>,
    /// How often this space was freed.
    pub(super) settled: AtomicU64,
    /// Lock order: after a slice's lock, never before one. A slice revokes a client while the slice's lock is held.
    pub(super) clients: Mutex<ClientTable>,
    /// Number of times that the evictor or a close has looked into a client's area.
    #[cfg(test)]
    pub(super) visited: AtomicU64,
    pub(super) rings: Rings,
    /// Counters of the mount.
    pub(super) counts: Arc<MountCounts>,
    pub(super) wishers: Wishers,
    /// Requests to absorb dirty pages that no client reports.
    pub(super) unreported: Unreported,
    pub(super) kernel: OnceLock<Arc<dyn KernelCache>>,
    pub(super) closing: AtomicBool,
    /// Queue of jobs that may wait. They run in a thread of their own.
    pub(super) jobs: Mutex<Option<Sender<Job>>>,
    pub(super) threads: Mutex<Vec<std::thread::JoinHandle<()>>>,
    pub(super) keeper: KeeperProcess,
    /// Closing one end makes the other readable.
    pub(super) stop: (UnixStream, UnixStream),
    /// The last field: see `OpenVolume`.
    pub(super) volume: Arc<OpenVolume>,
}

impl Fast {
    /// Creates the segments of a volume. No client is admitted until the fast path is opened; see `open`.
    pub fn new(
        volume: Arc<OpenVolume>,
        trusted: Trusted,
        keeper: Option<KeeperCommand>,
    ) -> io::Result<Fast> {
        let (slices, topology) = (&volume.slices, &volume.topology);
        let geometry: Vec<(Geometry, u16)> = slices
            .iter()
            .zip(volume.homes.iter())
            .map(|(slice, home)| {
                let geometry = slice.memory().geometry();
                (geometry, topology.thread_node(*home).0)
            })
            .collect();
        // Also covers CPUs that the daemon may not run on, because programs may run there.
        let node_of = |cpu| topology.node_of_cpu(cpu).map_or(u16::MAX, |node| node.0);
        let cpu_nodes: Vec<u16> = (0..=CpuMask::CPU_MAX).map(node_of).collect();
        // The number may be guessable, because the kernel vouches for the socket's peer. It must differ for each daemon.
        let instance = std::hash::RandomState::new().build_hasher().finish();
        Ok(Fast {
            control: Control::create(NAME, &geometry, SLOTS, &cpu_nodes, instance)?,
            slots: Slots::create(NAME, SLOTS)?,
            masks: Arc::new(MaskNotes::new()?),
            trusted,
            tokens: Tokens::default(),
            files: Files::default(),
            mappings: Mutex::default(),
            free_slots: Arc::default(),
            changing: Arc::default(),
            in_use: 0.into(),
            written: 0.into(),
            settling: Arc::default(),
            settled: 0.into(),
            clients: Mutex::new(ClientTable::default()),
            #[cfg(test)]
            visited: 0.into(),
            rings: Rings::default(),
            wishers: Wishers::default(),
            counts: Arc::default(),
            unreported: Unreported::default(),
            kernel: OnceLock::new(),
            closing: AtomicBool::new(true),
            jobs: Mutex::new(None),
            threads: Mutex::new(vec![]),
            keeper: KeeperProcess::new(keeper),
            stop: UnixStream::pair()?,
            volume,
        })
    }

    /// Shows a further slice with this home to the keeper and to the clients that attach from now on, and has it call the functions of
    /// `serve_slices`. The volume gets the slice afterwards.
    pub fn show_slice(self: &Arc<Self>, slice: &Slice, home: NodeId) {
        self.serve_slice(slice);
        self.keep_slice(slice);
        let node = self.volume.topology.thread_node(home).0;
        (self.control).append(slice.memory().geometry(), node);
    }

    /// Sends the keeper the segments of a slice. Does no harm if the keeper has them.
    pub fn keep_slice(&self, slice: &Slice) {
        self.keeper.add_slice(slice);
    }

    /// Sets the volume's thread policy for clients.
    pub fn set_thread_policy(&self, policy: ThreadPolicy) {
        self.control.set_policy(policy);
    }

    /// Sets the costs of moves for clients. Call it before the first client attaches.
    pub fn set_move_costs(&self, costs: &MoveCosts) {
        for (from, row) in costs.table.iter().enumerate() {
            for to in 0..row.len() {
                self.control.set_move_cost(from, to, costs.of(from, to));
            }
        }
        self.control.set_move_ns(costs.move_ns);
    }

    /// Returns the file's slot, if it has one.
    pub fn slot_file(&self, ino: Ino) -> Option<Arc<SlotFile>> {
        if self.in_use.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.files.get(ino)
    }

    /// Returns the file's slot, if the file is written inline.
    pub fn written_file(&self, ino: Ino) -> Option<Arc<SlotFile>> {
        if self.written.load(Ordering::Acquire) == 0 {
            return None;
        }
        let files = self.files.part(ino).read();
        files.get(&ino).filter(|file| file.is_written()).cloned()
    }

    /// Returns the slots of the files that are written inline.
    pub fn written_files(&self) -> Vec<Arc<SlotFile>> {
        if self.written.load(Ordering::Acquire) == 0 {
            return vec![];
        }
        self.files.all(SlotFile::is_written)
    }

    /// Begins a change of a file. Also returns the file's slot, if it has one. A file without a slot gets none until the guard is
    /// dropped.
    pub(super) fn begin_change(&self, ino: Ino) -> (ChangeGuard, Option<Arc<SlotFile>>) {
        let files = self.files.part(ino).read();
        (self.changing.begin(ino), files.get(&ino).cloned())
    }

    /// Returns the slot of a file in the slots segment.
    pub fn slot(&self, file: &SlotFile) -> &Slot {
        self.slots
            .slot(file.slot)
            .expect("slots are given out within the segment")
    }

    /// Returns the slot of a file in the control segment.
    pub fn info(&self, file: &SlotFile) -> &SlotInfo {
        self.control
            .slot(file.slot)
            .expect("slots are given out within the segment")
    }

    /// Runs `job` in the thread for jobs that may wait. Drops the job when the volume closes.
    pub(super) fn later(&self, job: impl FnOnce() + Send + 'static) {
        if let Some(jobs) = &*self.jobs.lock() {
            // The thread ends only when the sender is dropped.
            let _ = jobs.send(Box::new(job));
        }
    }

    /// Returns the counters of the mount.
    pub fn counts(&self) -> &Arc<MountCounts> {
        &self.counts
    }

    /// Returns the present moment. Call it before attributes are read.
    pub fn moment(&self) -> Moment {
        Moment(self.settled.load(Ordering::Acquire))
    }

    /// Returns whether the kernel may keep a file's attributes that were read after `read`. It may not if clients changed them inline
    /// at that time, or change them now, or if the space of a file will shrink after its last inline writer has closed it.
    pub fn attributes_may_be_kept(&self, ino: Ino, read: Moment) -> bool {
        // In this order: a file settles before it ceases to count as written, and is counted before it ceases to settle.
        self.written_file(ino).is_none() && !self.settling.contains(ino) && self.moment() == read
    }

    /// Notes that the space is free that was reserved for a file's last inline writer.
    pub(super) fn has_settled(&self, settling: ChangeGuard) {
        self.settled.fetch_add(1, Ordering::AcqRel);
        drop(settling);
    }

    /// Returns the counters of the clients.
    pub fn client_stats(&self) -> Vec<ClientStat> {
        self.clients.lock().stats(self.volume.slices.len())
    }

    /// Returns the number of clients' threads that work on other nodes than their data because those have too few CPUs.
    pub fn clients_away(&self) -> u64 {
        let now_s = files::coarse_realtime_ns() / 1_000_000_000;
        let clients = self.clients.lock();
        let away = clients
            .by_owner
            .values()
            .map(|client| client.area.count_away(now_s) as u64);
        away.sum()
    }

    /// Returns the notes of the masks that the daemon has narrowed.
    pub fn masks(&self) -> Arc<MaskNotes> {
        self.masks.clone()
    }

    /// Returns the local and remote pages that clients, including ended ones, have accessed inline in a slice.
    pub fn client_pages(&self, slice: u16) -> (u64, u64) {
        self.clients.lock().pages(slice)
    }
}
