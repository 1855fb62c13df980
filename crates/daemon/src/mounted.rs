//! A mounted volume: all parts together. The operations are in files of their own.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Instant;

use jericho_cache::{Reader, Slice};
use jericho_format::threads::ThreadPolicy;
use jericho_fs::types::{Ino, SliceId};
use jericho_fs::{File, Fs};
use jericho_shm::{Answer, Call, Refusal};
use jericho_sys::doorbell::Doorbell;
use jericho_topology::{NodeId, Topology};
use parking_lot::Mutex;

use crate::fast::{Asker, ClientStat, Fast, LoanWaits, Moment, Served};
use crate::handle::Handle;
use crate::locality::LocalityCounters;
use crate::mapped::Mapped;
use crate::migration::{self, Migrator};
use crate::space::SpaceWaits;
use crate::spill::Spiller;
use crate::tasks;
use crate::volume::OpenVolume;

/// A mounted volume.
pub struct Mounted {
    pub(crate) locality: LocalityCounters,
    pub(crate) migrator: Migrator,
    pub(crate) fast: Arc<Fast>,
    pub(crate) mapped: Mapped,
    pub(crate) loan_waits: LoanWaits,
    pub(crate) space_waits: Arc<SpaceWaits>,
    pub(crate) spiller: Arc<Spiller>,
    /// The threads `fast-waits` and `mapped-pages`.
    pub(crate) threads: Mutex<Vec<JoinHandle<()>>>,
    /// The last field: see `OpenVolume`.
    pub(crate) volume: Arc<OpenVolume>,
}

impl Mounted {
    pub(crate) fn new(
        volume: Arc<OpenVolume>,
        fast: Arc<Fast>,
        spiller: Arc<Spiller>,
    ) -> Arc<Mounted> {
        let counts = fast.counts();
        Arc::new(Mounted {
            locality: LocalityCounters::new(volume.homes.iter().copied(), &volume.topology),
            migrator: Migrator::with_costs(
                &volume.topology,
                &volume.move_costs,
                counts.clone(),
                fast.masks(),
                volume.with_parent,
            ),
            mapped: Mapped::new(counts.clone()),
            loan_waits: LoanWaits::default(),
            space_waits: SpaceWaits::new(volume.clone()),
            threads: Mutex::default(),
            spiller,
            fast,
            volume,
        })
    }

    /// Returns the filesystem.
    pub fn fs(&self) -> &Arc<Fs> {
        &self.volume.fs
    }

    /// Returns whether the volume has a device on another host, for which a request may wait long.
    #[inline]
    pub fn may_fall_silent(&self) -> bool {
        self.volume.devices.may_fall_silent()
    }

    /// Returns whether a host of the volume is known not to answer at present. May take some tenths of a second to find out.
    pub fn has_silent_device(&self) -> bool {
        self.volume.devices.has_silent_device()
    }

    /// Returns whether the volume is mounted read-only.
    pub fn read_only(&self) -> bool {
        self.volume.read_only
    }

    /// Returns the policy for migrating threads, for files and directories without their own.
    pub fn threads(&self) -> ThreadPolicy {
        self.volume.threads
    }

    /// Returns the nodes in use.
    pub fn topology(&self) -> &Topology {
        &self.volume.topology
    }

    /// Returns the home node of a slice.
    pub fn node_of_slice(&self, slice: SliceId) -> NodeId {
        self.volume.node_of_slice(slice)
    }

    /// Returns readers for the calling thread, which runs on `cpu`: one for each of these slices whose home node has this CPU. With a
    /// reader, the thread itself reads the pages that it misses in that slice. In all other slices, and in those whose devices do
    /// not support readers, the slice's pipeline reads the missing pages. See `Slice::reader`.
    pub fn readers(&self, cpu: u32, doorbell: &Doorbell, slices: Range<SliceId>) -> Vec<Reader> {
        let at_home = |slice: &&Arc<Slice>| {
            let home = self.node_of_slice(slice.id());
            let mut nodes = self.volume.topology.nodes.iter();
            nodes.any(|node| node.id == home && node.cpus.contains(&cpu))
        };
        let mut readers = vec![];
        let all = self.volume.slices.iter().take(slices.end.into());
        for slice in all.skip(slices.start.into()).filter(at_home) {
            match slice.reader(doorbell) {
                Ok(reader) => readers.push(reader),
                Err(error) => {
                    tracing::debug!(slice = slice.id(), %error, "cannot create a reader for the slice")
                }
            }
        }
        readers
    }

    /// Counts a request of the kernel that wants an answer.
    #[inline]
    pub fn note_request(&self) {
        self.fast.counts().requests.add(1);
    }

    /// Counts a request that a thread of the FUSE ring passes to a helper.
    pub fn note_helped(&self) {
        (self.fast.counts().ring_helped).fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of slices.
    pub fn slice_count(&self) -> u16 {
        self.volume.slices.len() as u16
    }

    pub(crate) fn slice(&self, slice: SliceId) -> &Arc<Slice> {
        self.volume.slice(slice)
    }

    /// Returns the file behind a handle.
    pub fn file<'a>(&self, handle: &'a Handle) -> &'a Arc<File> {
        &handle.file
    }

    /// Records that a thread requested bytes of a file. May migrate the thread. `tid`: the thread's id in the kernel's request, 0 if
    /// it is unknown.
    #[inline]
    pub fn requested(&self, handle: &Handle, tid: u32, bytes: usize) {
        let policy = self.policy_of(handle);
        let node = self.node_of_slice(handle.file.layout().home()).0;
        self.migrator.requested(tid, node, bytes as u64, policy);
    }

    /// Sets how many requests may wait for space at once. Further requests fail with ENOSPC if there is no space after a commit.
    pub fn limit_space_waits(&self, count_max: usize) {
        self.space_waits.limit(count_max);
    }

    /// Records that a program has opened the handle and may use it through the kernel.
    pub fn opened(&self, handle: &Handle) {
        self.fast.uses_kernel(handle);
    }

    /// Answers an ioctl on an open file. May call `reply` later, from another thread.
    pub fn call<R>(&self, handle: &Arc<Handle>, call: Call, asker: Asker, reply: R)
    where
        R: FnOnce(Answer) + Send + 'static,
    {
        if let Call::Companions {
            node,
            always,
            owner,
            instance,
        } = call
        {
            if !self.volume.with_parent {
                return reply(Answer::refused(Refusal::Companions));
            }
            let (asks, now) = ((owner, node), Instant::now());
            if !self.migrator.may_ask(asks, now) {
                return reply(Answer::refused(Refusal::Busy));
            }
            let policy = migration::policy_for_companions(self.policy_of(handle), always);
            if let Some(policy) = policy
                && (self.fast).has_client_thread((owner, instance), asker.thread)
                && self.migrator.accepts(asks, now)
            {
                self.migrator
                    .bring_companions(asker.thread, tasks::now_ticks(), node, policy);
            }
        }
        self.fast.call(handle, call, asker, reply);
    }

    /// Returns the policy for threads that use a file.
    fn policy_of(&self, handle: &Handle) -> ThreadPolicy {
        handle.file.threads().policy().unwrap_or(self.threads())
    }

    /// Returns whether the calling thread may leave wishes. Costs one load for other threads.
    #[inline]
    pub fn may_wish(&self, asker: Asker) -> bool {
        self.fast.may_wish(asker)
    }

    /// Grants the handle a slot if the calling thread has left a wish for its file. Call it before the reply. Never waits: if the
    /// grant would have to wait, the thread asks by an ioctl later.
    #[inline]
    pub fn answer_wish(&self, handle: &Arc<Handle>, asker: Asker, served: Served) {
        self.fast.answer_wish(handle, asker, served);
    }

    /// Absorbs the inline changes of clients to a file: dirty pages, size, times. Costs one load when no file is written inline.
    pub fn absorb(&self, ino: Ino) {
        self.fast.absorb(ino);
    }

    /// Returns the present moment, for `attributes_may_be_kept`. Call it before attributes are read.
    pub fn moment(&self) -> Moment {
        self.fast.moment()
    }

    /// Returns whether the kernel may keep a file's attributes that were read after `read`. It may not if clients changed them inline
    /// at that time, or change them now.
    pub fn attributes_may_be_kept(&self, ino: Ino, read: Moment) -> bool {
        self.fast.attributes_may_be_kept(ino, read)
    }

    /// Returns the counters of the programs on the fast path.
    pub fn client_counters(&self) -> Vec<ClientStat> {
        self.fast.client_stats()
    }

    /// Returns the local and remote pages that clients, including ended ones, have accessed inline in a slice.
    pub fn client_pages(&self, slice: u16) -> (u64, u64) {
        self.fast.client_pages(slice)
    }
}
