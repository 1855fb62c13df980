//! A mounted volume.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use jericho_cache::{Reader, Slice};
use jericho_format::PAGE_BYTES;
use jericho_format::threads::ThreadPolicy;
use jericho_fs::Result;
use jericho_fs::fs::{File, Fs};
use jericho_fs::types::{Attr, Caller, Ino, SetAttr, SliceId, Trimmed};
use jericho_sys::doorbell::Doorbell;
use jericho_topology::{NodeId, Topology};
use jericho_volume::{Volume, VolumeLock};

use crate::fast::Fast;
use crate::handle::Handle;
use crate::locality::Counters;
use crate::mapped::Mapped;
use crate::migration::Migrator;
use crate::space::SpaceWaits;

/// A mounted volume.
pub struct Mounted {
    pub(crate) path: PathBuf,
    read_only: bool,
    threads: ThreadPolicy,
    topology: Topology,
    pub(crate) volume: Arc<Volume>,
    homes: Vec<NodeId>,
    pub(crate) locality: Counters,
    pub(crate) migrator: Migrator,
    pub(crate) slices: Vec<Arc<Slice>>,
    frames_per_slice: u32,
    fs: Arc<Fs>,
    pub(crate) fast: Fast,
    pub(crate) mapped: Mapped,
    pub(crate) space_waits: SpaceWaits,
    /// Keeps the volume locked until the last reference is dropped.
    _lock: Option<VolumeLock>,
}

impl Mounted {
    #[allow(clippy::too_many_arguments)] // called once, by `open`
    pub(crate) fn assemble(
        path: PathBuf,
        read_only: bool,
        threads: ThreadPolicy,
        topology: Topology,
        volume: Arc<Volume>,
        homes: Vec<NodeId>,
        slices: Vec<Arc<Slice>>,
        fs: Arc<Fs>,
        fast: Fast,
        lock: Option<VolumeLock>,
    ) -> Arc<Mounted> {
        let counts = fast.counts.clone();
        let frames_per_slice = slices.first().map_or(0, |s| s.memory().geometry().frames);
        Arc::new(Mounted {
            path,
            read_only,
            threads,
            volume,
            locality: Counters::new(&homes, &topology),
            migrator: Migrator::new(&topology, counts.clone()),
            homes,
            slices,
            topology,
            frames_per_slice,
            fs,
            fast,
            mapped: Mapped::new(counts),
            space_waits: SpaceWaits::default(),
            _lock: lock,
        })
    }

    /// Returns the filesystem.
    pub fn fs(&self) -> &Arc<Fs> {
        &self.fs
    }

    /// Returns whether the volume is mounted read-only.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the policy for migrating threads, for files and directories without their own.
    pub fn threads(&self) -> ThreadPolicy {
        self.threads
    }

    /// Returns the nodes in use.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Returns the home node of a slice.
    pub fn node_of_slice(&self, slice: SliceId) -> NodeId {
        self.homes
            .get(usize::from(slice))
            .copied()
            .unwrap_or(NodeId(0))
    }

    /// Returns readers for the calling thread, which runs on `cpu`: one for each slice whose home node has this CPU. The thread
    /// itself reads the pages that it misses in these slices. The slice reads the pages of other slices, and of slices whose
    /// devices do not support readers. See `Slice::reader`.
    pub fn readers(&self, cpu: u32, doorbell: &Doorbell) -> Vec<Reader> {
        let at_home = |slice: &&Arc<Slice>| {
            let home = self.node_of_slice(slice.id());
            let mut nodes = self.topology.nodes.iter();
            nodes.any(|node| node.id == home && node.cpus.contains(&cpu))
        };
        let mut readers = vec![];
        for slice in self.slices.iter().filter(at_home) {
            match slice.reader(doorbell) {
                Ok(reader) => readers.push(reader),
                Err(error) => {
                    tracing::debug!(slice = slice.id(), %error, "cannot create a reader for the slice")
                }
            }
        }
        readers
    }

    /// Returns the number of slices.
    pub fn slice_count(&self) -> u16 {
        self.slices.len() as u16
    }

    pub(crate) fn slice(&self, slice: SliceId) -> &Arc<Slice> {
        &self.slices[usize::from(slice)]
    }

    pub(crate) fn frames_per_slice(&self) -> u32 {
        self.frames_per_slice
    }

    /// Opens a file for the data path. `writable`: the program may write through the handle. The kernel truncates by `setattr`.
    pub fn open_file(&self, ino: Ino, writable: bool) -> Result<Arc<Handle>> {
        Ok(Handle::new(self.fs.open_file(ino)?, writable))
    }

    /// Records that a program has opened the handle and may use it through the kernel.
    pub fn opened(&self, handle: &Handle) {
        self.fast.uses_kernel(handle);
    }

    /// Changes attributes; see `Fs::setattr`.
    pub fn setattr(&self, ino: Ino, set: SetAttr, caller: Caller) -> Result<Attr> {
        self.absorb(ino);
        let gives_privileges = set.perm.is_some_and(|perm| perm & 0o6000 != 0);
        let size = set.size;
        let set = || self.fs.setattr(ino, set, caller);
        let change = || match size {
            Some(bytes) => {
                let attr = self.resize(ino, size, set)?;
                self.mapped.truncated(ino, bytes);
                Ok(attr)
            }
            None => set(),
        };
        match gives_privileges {
            true => self.give_privileges(ino, change),
            false => change(),
        }
    }

    /// Renames; see `Fs::rename`. If the file replaces another, first absorbs what clients have written to it inline.
    pub fn rename(&self, from: (Ino, &[u8]), to: (Ino, &[u8]), flags: u32) -> Result<()> {
        self.fs
            .rename_absorbing(from, to, flags, |ino| self.absorb(ino))
    }

    /// Reserves space or makes holes; see `Fs::fallocate`. Calls `reply` once: at once, or from another thread after a wait for
    /// space that is being freed.
    pub fn fallocate<R>(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        mode: i32,
        offset: u64,
        len: u64,
        reply: R,
    ) where
        R: FnOnce(Result<()>) + Send + 'static,
    {
        let own = handle.clone();
        let attempt = move |mounted: &Arc<Self>| mounted.try_fallocate(&own, mode, offset, len);
        let takes_space = mode & libc::FALLOC_FL_PUNCH_HOLE == 0;
        let range = (offset, if takes_space { len } else { 0 });
        self.answer_with_space(handle, range, attempt, reply);
    }

    /// Returns the attributes of an inode; see `Fs::getattr`.
    pub fn getattr(&self, ino: Ino) -> Result<Attr> {
        self.absorb(ino);
        self.fs.getattr(ino)
    }

    /// Looks up a name; see `Fs::lookup`.
    pub fn lookup(&self, dir: Ino, name: &[u8]) -> Result<Attr> {
        let attr = self.fs.lookup(dir, name)?;
        if self.attributes_may_be_kept(attr.ino) {
            return Ok(attr);
        }
        // The kernel sends no forget for a lookup that has failed.
        self.getattr(attr.ino)
            .inspect_err(|_| self.fs.forget(attr.ino, 1))
    }

    /// Makes the file's data durable; see `Fs::fsync`.
    pub fn fsync(&self, handle: &Handle, datasync: bool, done: jericho_fs::fs::Done) {
        self.absorb(handle.file.ino());
        // Includes reports of writes that were still in progress when the last writable descriptor was closed.
        self.fast.drain_reports();
        self.fs.fsync(&handle.file, datasync, done);
    }

    /// Makes all data written to the volume so far durable, including inline writes.
    pub fn sync(&self) -> Result<()> {
        for slot_file in self.fast.written_files() {
            self.absorb_file(&slot_file);
        }
        self.fast.drain_reports();
        self.fs.sync_all()
    }

    /// Discards free space; see `Fs::trim`, but in bytes. Returns the number of bytes that the devices discarded, and the offset
    /// at which to continue. A trim that starts at 0 also discards blocks freed before it.
    pub fn trim(
        &self,
        range: Range<u64>,
        run_least: u64,
        until: Option<Instant>,
    ) -> Result<(u64, Option<u64>)> {
        if range.start == 0 {
            self.fs.commit()?;
        }
        let blocks = range.start.div_ceil(PAGE_BYTES)..range.end / PAGE_BYTES;
        let run_least = run_least.div_ceil(PAGE_BYTES);
        let Trimmed { blocks, next } = self.fs.trim(blocks, run_least, until)?;
        Ok((blocks * PAGE_BYTES, next.map(|block| block * PAGE_BYTES)))
    }

    /// Ends all inline access permanently, and absorbs what clients have changed.
    pub fn end_clients(&self) {
        self.close_clients();
    }

    /// Returns the paths of the files with data that is not on a device yet. Files without a name are one entry that gives their
    /// number.
    pub fn unwritten(&self) -> Vec<String> {
        let objects = self.slices.iter().flat_map(|slice| slice.dirty_objects());
        let files: std::collections::HashSet<Ino> = objects.collect();
        let (count, mut names) = (files.len(), self.fs.paths_of(files));
        names.sort_unstable();
        if names.len() < count {
            names.push(format!("{} files without a name", count - names.len()));
        }
        names
    }

    /// Closes a handle.
    pub fn close_file(&self, handle: &Arc<Handle>) {
        self.fast.release(self, handle);
        if handle.writable {
            self.fs.writer_closes(&handle.file);
        }
        self.fs.close_file(&handle.file);
        self.mapped.closed(&handle.file);
    }

    /// Returns the file behind a handle.
    pub fn file<'a>(&self, handle: &'a Handle) -> &'a Arc<File> {
        &handle.file
    }

    /// Writes everything back, commits, marks the volume clean, and stops all threads. Fails when data could not be written. The
    /// volume stays locked until the last reference is dropped.
    pub fn close(&self) -> Result<()> {
        self.space_waits.close(&self.fs);
        self.close_clients();
        self.migrator.close();
        let result = self.fs.close();
        for slice in &self.slices {
            slice.close();
        }
        result
    }
}
