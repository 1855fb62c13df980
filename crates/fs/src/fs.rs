//! The filesystem of an open volume: the operations that the mount and the data path call.
//!
//! Memory holds the current state, and the store follows it. docs/internals/fs.md describes the order of writes that makes a
//! crash safe, and the order of locks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU64, Ordering};
use std::thread::JoinHandle;

use jericho_cache::Slice;
use jericho_metadata::numbers::Numbers;
use jericho_metadata::store::CheckpointNeed;
use jericho_metadata::stores;
use jericho_volume::Volume;
use parking_lot::Mutex;

use crate::commit::{checkpointer, committer};
use crate::core::{Core, NAME_MAX, TURN_NAME, wait};
use crate::data::leaving::Leaving;
use crate::data::operations::NewestOperations;
use crate::data::settle;
use crate::data::write_errors::{SeenErrors, WriteErrors};
use crate::discard::{Discards, discarder};
use crate::error::{Error, Result};
use crate::flushes::DataFlushes;
use crate::hosts::Hosts;
use crate::objects::AllObjects;
use crate::orphans;
use crate::scrub::{Scrub, ScrubStatus, scrubber};
use crate::shards::Shards;
use crate::table::Table;
use crate::types::*;

/// Number of inodes that statfs reports as possible. Their number is limited only by the space for metadata. A larger number would
/// make statfs fail in 32-bit programs.
const FILES_SHOWN: u64 = u32::MAX as u64;

/// The filesystem. Dropping it without `close` acts like a crash: changes that are not durable are lost.
pub struct Fs {
    pub(crate) core: Arc<Core>,
    /// One for each shard, also of the checkpointers.
    committers: Mutex<Vec<JoinHandle<()>>>,
    checkpointers: Mutex<Vec<JoinHandle<()>>>,
    discarder: Mutex<Option<JoinHandle<()>>>,
    /// Held by a thread that takes more space into use. True: the filesystem is being closed, and takes none.
    pub(crate) extending: Mutex<bool>,
    /// Held while slices of missing devices come back. Taken before `extending`.
    pub(crate) returning: Mutex<()>,
    scrubber: Mutex<Option<JoinHandle<()>>>,
    orphans: Mutex<Vec<JoinHandle<()>>>,
    /// Ends the thread that removes orphans. Those that it has not reached stay orphans until the next mount.
    pub(crate) leaves_orphans: Arc<AtomicBool>,
}

impl Fs {
    /// Opens the filesystem: reads the state that it needs, removes the files that were open without a name at the end of the
    /// last mount (large ones in the background), and starts the threads. `slices` are the caches by slice. Without caches, files can be named but
    /// not read or written.
    pub fn open(
        volume: Arc<Volume>,
        slices: Vec<Arc<Slice>>,
        mut options: FsOptions,
    ) -> Result<Arc<Fs>> {
        options.read_only |= volume.read_only();
        // Runs before the store is opened, because opening the store may write.
        if !options.read_only {
            volume.mark_dirty()?;
        }
        let (stores, allocator) = stores::open(&volume, options.store_cache_bytes)?;
        let shards = Shards::new(stores, options.commit_interval_ms)?;
        let root = &shards.of_ino(ROOT).store;
        if root.inode(ROOT)?.is_none() {
            return Err(Error::Damaged("there is no root directory".into()));
        }
        let count = volume.slices().len() as SliceId;
        let core = Arc::new(Core {
            table: Table::new(options.inode_cache, shards.map()),
            numbers: Numbers::load(count, |slice| {
                &shards.get(shards.map().of_slice(slice)).store
            })?,
            objects: AllObjects::new(),
            hosts: Hosts::new(),
            generation: generation()?,
            rename: Mutex::new(()),
            turn: AtomicU64::new(root.value(TURN_NAME)?.unwrap_or(0)),
            leaving: Leaving::default(),
            flushes: DataFlushes::new(volume.devices()),
            operations: NewestOperations::new(),
            closed: AtomicBool::new(false),
            errors: WriteErrors::default(),
            errors_reported: SeenErrors::default(),
            access_times: AtomicU8::new(AccessTimes::default() as u8),
            discards: Discards::new(&volume, options.read_only),
            absences: Arc::default(),
            scrub: Scrub::default(),
            volume,
            shards,
            allocator,
            slices: slices.into_iter().collect(),
            known: AtomicU16::new(count),
            places: AtomicU16::new(count),
            options,
        });
        let fs = Arc::new(Fs {
            core,
            committers: Mutex::default(),
            checkpointers: Mutex::default(),
            discarder: Mutex::default(),
            extending: Mutex::default(),
            returning: Mutex::default(),
            scrubber: Mutex::default(),
            orphans: Mutex::default(),
            leaves_orphans: Arc::default(),
        });
        let absences = fs.core.absences.clone();
        (fs.core.allocator).set_on_unreachable(Box::new(move || absences.note()));
        // If one thread cannot be started, the drop of `fs` ends the others.
        fs.core.close_failed_slices();
        fs.start_threads()?;
        fs.remove_orphans()?;
        for shard in fs.core.shards.map().all().iter() {
            if !fs.core.allocator.logged_of(shard).is_empty() && !fs.core.options.read_only {
                let checkpoints = &fs.core.shards.get(shard).checkpoints;
                checkpoints.note(CheckpointNeed::AtLast);
            }
        }
        Ok(fs)
    }

    fn start_threads(&self) -> Result<()> {
        let core = &self.core;
        let start = |name: &str, run: Box<dyn FnOnce(&Core) + Send>| {
            let core = core.clone();
            jericho_sys::service::spawn(name, move || run(&core)).map_err(no_thread)
        };
        self.start_discarder()?;
        if core.has_checksums() && !core.options.read_only {
            let pass = scrubber::prepare(core);
            let scrub = move |core: &Core| scrubber::run(core, pass);
            let scrubber = start("scrubber", Box::new(scrub))?;
            *self.scrubber.lock() = Some(scrubber);
        }
        for shard in core.shards.map().all().iter() {
            let commits = move |core: &Core| committer::run(core, shard);
            let committer = start("committer", Box::new(commits))?;
            self.committers.lock().push(committer);
            let checkpoints = move |core: &Core| checkpointer::run(core, shard);
            let checkpointer = start("checkpointer", Box::new(checkpoints))?;
            self.checkpointers.lock().push(checkpointer);
        }
        Ok(())
    }

    /// Starts the thread that discards freed blocks, if a device supports that and the thread does not run.
    pub(crate) fn start_discarder(&self) -> Result<()> {
        let mut discarder = self.discarder.lock();
        if discarder.is_some() || !self.core.discards.is_on() {
            return Ok(());
        }
        self.core.allocator.remember_freed();
        let core = self.core.clone();
        let run = move || discarder::run(&core);
        *discarder = Some(jericho_sys::service::spawn("discarder", run).map_err(no_thread)?);
        Ok(())
    }

    /// Waits for the ends of these threads of a shard when the filesystem is closed.
    pub(crate) fn keep_threads(&self, [committer, checkpointer]: [JoinHandle<()>; 2]) {
        self.committers.lock().push(committer);
        self.checkpointers.lock().push(checkpointer);
    }

    /// Returns whether changes have to wait for the committer, because memory holds as many uncommitted changes as it may.
    pub fn is_behind(&self) -> bool {
        !self.core.shards.have_room()
    }

    /// Removes the files without a name of the last mount, the large ones in the background.
    fn remove_orphans(&self) -> Result<()> {
        if self.core.options.read_only {
            return Ok(());
        }
        let later = orphans::remove_small(&self.core)?;
        if later.is_empty() {
            return Ok(());
        }
        self.spawn_orphans(move |core, must_end| orphans::remove_all(core, &later, must_end))
    }

    /// Removes the files without a name of slices that have come back, in the background. The caller holds `extending`, and the filesystem is not being
    /// closed.
    pub(crate) fn remove_returned(&self, found: Vec<Ino>) -> Result<()> {
        if found.is_empty() {
            return Ok(());
        }
        self.spawn_orphans(move |core, must_end| orphans::remove_returned(core, found, must_end))
    }

    /// Starts a thread that removes files without a name. `close` ends it.
    fn spawn_orphans(
        &self,
        remove: impl FnOnce(&Arc<Core>, &AtomicBool) + Send + 'static,
    ) -> Result<()> {
        let (core, must_end) = (self.core.clone(), self.leaves_orphans.clone());
        let run = move || remove(&core, &must_end);
        let thread = jericho_sys::service::spawn("orphans", run).map_err(no_thread)?;
        self.orphans.lock().push(thread);
        Ok(())
    }

    fn stop_orphans(&self) {
        self.leaves_orphans.store(true, Ordering::Release);
        join(&self.orphans);
    }

    /// Writes everything back, commits, marks the volume clean and stops the threads. Later calls fail with ESHUTDOWN.
    pub fn close(&self) -> Result<()> {
        self.core.alive()?;
        // From here on the parts are as many as now.
        *self.extending.lock() = true;
        self.core.absences.close();
        // Its place is in the last batch.
        self.stop_scrubber();
        self.stop_orphans();
        let result = self.sync_all().and_then(|()| {
            let mut shards = self.core.shards.map().all().iter();
            shards.try_for_each(|shard| settle::settle(&self.core, shard))
        });
        self.core.closed.store(true, Ordering::Release);
        self.core.allocator.lend_at_once();
        if result.is_ok() {
            self.core.discards.finish();
            join(&self.discarder);
        }
        self.stop();
        // Makes the last writes to the volume. Only afterwards may the volume be marked clean.
        // Closes every store even if one fails.
        let stores = self.core.shards.iter().map(|shard| shard.store.close());
        let closed: Vec<Result<()>> = stores.collect();
        let closed: Result<()> = closed.into_iter().collect();
        result.and(closed)?;
        if !self.core.options.read_only {
            self.core.volume.mark_clean()?;
        }
        Ok(())
    }

    /// Sets the number of bytes a second that are read in the background and compared with their checksums. 0, as at first, reads
    /// nothing. Has no effect on a volume without checksums, or one that is mounted for reading.
    pub fn set_scrub_rate(&self, bytes_per_s: u64) {
        self.core.scrub.set_rate(bytes_per_s);
    }

    /// Begins to read all data in the background now, if that is not in progress.
    pub fn begin_scrub(&self) {
        self.core.scrub.begin();
    }

    /// Returns what is known of the reads of all data in the background, or `None` if this mount makes none.
    pub fn scrub_status(&self) -> Option<ScrubStatus> {
        let is_running = self.scrubber.lock().is_some();
        is_running.then(|| self.core.scrub.status())
    }

    fn stop_scrubber(&self) {
        self.core.scrub.stop();
        join(&self.scrubber);
    }

    fn stop(&self) {
        self.core.absences.close();
        self.stop_scrubber();
        self.stop_orphans();
        self.core.allocator.lend_at_once();
        self.core.discards.stop_now();
        join(&self.discarder);
        for shard in self.core.shards.iter() {
            shard.commits.stop();
        }
        join(&self.committers);
        for shard in self.core.shards.iter() {
            shard.checkpoints.stop();
        }
        join(&self.checkpointers);
        self.core.table.clear();
        self.core.hosts.clear();
    }

    /// Writes everything back and commits, as sync(2) does.
    pub fn sync_all(&self) -> Result<()> {
        if self.core.options.read_only {
            return self.core.alive();
        }
        self.core.alive()?;
        let files = self.core.table.files_to_sync();
        // Tries every slice even if one fails, so that as much as possible is written.
        let slices = self.core.slices.iter();
        let written: Vec<Result<()>> = slices
            .map(|slice| wait(|done| slice.sync_all(done)))
            .collect();
        for (file, reach) in files {
            if matches!(written.get(usize::from(file.home())), None | Some(Ok(()))) {
                file.note_synced(&reach, u64::MAX);
            }
        }
        let committed = self.core.commit_now();
        written.into_iter().collect::<Result<()>>().and(committed)
    }

    /// Fails if the write-back of any file has failed since the last call. Called after `sync_all`, which may have written the
    /// pages meanwhile.
    pub fn report_errors(&self) -> Result<()> {
        self.core.errors.report(&self.core.errors_reported)
    }

    /// Commits all operations that have ended. Does not write back the data of files.
    pub fn commit(&self) -> Result<()> {
        self.core.may_change_at_all()?;
        self.core.commit_now()
    }

    /// Writes what is only in the journals to the metadata stores, as the checkpointers do.
    pub fn checkpoint(&self) -> Result<()> {
        self.core.may_change()?;
        let mut shards = self.core.shards.map().all().iter();
        shards.try_for_each(|shard| settle::checkpoint(&self.core, shard))
    }

    /// Returns whether a failed sync may succeed later: it lacks space, or a host is away. Returns false after an error that ended changes until the
    /// next mount.
    pub fn may_recover(&self) -> bool {
        let mut shards = self.core.shards.iter();
        self.core.may_change_at_all().is_ok() && !shards.any(|shard| shard.commits.has_ended())
    }

    /// Returns the number of slices that may be the home of files.
    pub fn place_count(&self) -> SliceId {
        self.core.place_count()
    }

    /// Returns the number of the volume's devices.
    pub fn device_count(&self) -> usize {
        self.core.volume.devices().len()
    }

    /// Returns the counts that statfs(2) reports.
    pub fn statfs(&self) -> Result<StatFs> {
        self.core.alive()?;
        let spaces = (0..self.core.slice_count()).map(|slice| self.space_of(slice));
        let (blocks, free) = spaces.fold((0, 0), |(blocks, free), (capacity, own)| {
            (blocks + capacity, free + own)
        });
        let used = self.core.shards.inodes();
        let files = FILES_SHOWN.max(used);
        Ok(StatFs {
            blocks,
            free: free.saturating_sub(self.core.allocator.reserved()),
            files,
            files_free: files - used,
            name_max: NAME_MAX as u32,
        })
    }

    /// Returns the inode with an object number (`File::object_id`), also if its file is not in memory but may have pages in a
    /// cache. Takes no lock under which a cache is called.
    pub fn ino_of_object(&self, object: u64) -> Option<Ino> {
        self.core.objects.ino_of(object)
    }

    /// Returns the bytes of the longest batch of this mount, and of the shortest journal.
    pub fn longest_batch_bytes(&self) -> (usize, usize) {
        let stores = || self.core.shards.iter().map(|shard| &shard.store);
        let longest = stores().map(|store| store.longest_batch_bytes()).max();
        let journal = stores().map(|store| store.journal_bytes()).min();
        (longest.unwrap_or(0), journal.unwrap_or(0))
    }

    /// Returns how many syncs and commits wait for the thread that commits to take them.
    pub fn waiting_syncs(&self) -> usize {
        let all = self.core.shards.iter();
        all.map(|shard| shard.commits.waiters()).sum()
    }

    /// Has the batches of a slice's shard go to redb past the journal, as those that are too long for it. For tests.
    pub fn pass_journal(&self, slice: SliceId) {
        let shard = self.core.shards.map().of_slice(slice);
        self.core.shards.get(shard).store.pass_journal(true);
    }

    /// Has batches take one step of a file's extents at a time, of at most this many pages, so that tests find faults with few pages that
    /// otherwise need very many extents.
    pub fn shorten_steps(&self, pages: u64) {
        let all = self.core.shards.iter();
        all.for_each(|shard| shard.commits.shorten_steps(pages));
    }

    /// Returns the number of inodes in memory.
    pub fn cached_inodes(&self) -> usize {
        self.core.table.len()
    }
}

fn no_thread(error: std::io::Error) -> Error {
    Error::Errno(error.raw_os_error().unwrap_or(11))
}

/// Returns a random number.
fn generation() -> Result<u32> {
    let random = jericho_sys::process::random_u64();
    random
        .map(|random| random as u32)
        .map_err(|error| Error::Errno(error.raw_os_error().unwrap_or(38)))
}

/// Waits for the end of threads. Does not wait for the calling thread itself: a callback of a committer may drop the last handle.
fn join<T: IntoIterator<Item = JoinHandle<()>> + Default>(threads: &Mutex<T>) {
    // Taken out first, so that the lock is not held during the wait.
    let threads = std::mem::take(&mut *threads.lock());
    for thread in threads {
        if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
            tracing::error!("a thread of the filesystem panicked");
        }
    }
}

impl Drop for Fs {
    fn drop(&mut self) {
        self.core.closed.store(true, Ordering::Release);
        self.stop();
    }
}

#[cfg(test)]
mod tests;
