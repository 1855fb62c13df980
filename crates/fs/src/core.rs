//! State that the parts of the filesystem share: the volume, the caches, the inodes in memory and the batches.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU64, Ordering};
use std::sync::mpsc::{channel, sync_channel};

use jericho_cache::Slice;
use jericho_format::sums::Group;
use jericho_format::{FILE_BYTES_MAX, PAGE_BYTES};
use jericho_metadata::alloc::{Allocator, Blocks};
use jericho_metadata::errno::*;
use jericho_metadata::numbers::Numbers;
use jericho_metadata::shard::{ShardId, ShardSet};
use jericho_metadata::store::{Change, InodeRecord, Store};
use jericho_storage::Appended;
use jericho_volume::Volume;
use parking_lot::Mutex;

use crate::absences::Absences;
use crate::commit::{Commits, Needs, Waiter};
use crate::data::extents::Map;
use crate::data::file::CacheResult;
use crate::data::leaving::Leaving;
use crate::data::operations::NewestOperations;
use crate::data::share::Share;
use crate::data::write_errors::{SeenErrors, WriteErrors};
use crate::discard::Discards;
use crate::error::{self, Error, Result};
use crate::flushes::DataFlushes;
use crate::hosts::Hosts;
use crate::inode::{File, FileHost, Inode, Meta};
use crate::objects::AllObjects;
use crate::scrub::Scrub;
use crate::shards::{Shard, Shards};
use crate::table::Table;
use crate::types::{Done, FsOptions};
use crate::types::{Ino, Kind, SliceId};

/// Hashes below this are the cookies of "." and "..".
pub const FIRST_HASH: u64 = 3;
/// Longest name in bytes.
pub const NAME_MAX: usize = 255;
/// Name of the stored value of `Core::turn`.
pub const TURN_NAME: &str = "placement_turn";
/// A name at which `Core::put_entry` panics: the batch has the entry then, and the operation has not ended.
#[cfg(test)]
pub const CURSED: &[u8] = b"cursed";

/// State shared by the filesystem's handle, its files and its committer.
pub struct Core {
    pub volume: Arc<Volume>,
    pub shards: Shards,
    pub allocator: Arc<Allocator>,
    /// The caches by slice. Empty if the filesystem has none.
    pub slices: Appended<Arc<Slice>>,
    /// Number of slices that have a shard.
    pub known: AtomicU16,
    /// Number of slices that may be the home of new files: those that have all parts.
    pub places: AtomicU16,
    pub options: FsOptions,
    pub table: Table,
    pub numbers: Numbers,
    pub objects: AllObjects,
    pub hosts: Hosts,
    /// Generation of the inodes that this mount creates: random. An inode whose creation a crash has undone may have had the number
    /// of a later one, and a program may have a file handle of it.
    pub generation: u32,
    /// Held by a thread that changes a directory's parent.
    pub rename: Mutex<()>,
    /// Number of directories created in the root so far. Determines the placement of the next one.
    pub turn: AtomicU64,
    pub leaving: Leaving,
    pub flushes: DataFlushes,
    /// By which the sync of a directory knows whether it must commit.
    pub operations: NewestOperations,
    pub closed: AtomicBool,
    /// The write-back errors of all files, and those that syncs of the volume have reported.
    pub errors: WriteErrors,
    pub errors_reported: SeenErrors,
    pub discards: Discards,
    pub absences: Arc<Absences>,
    pub scrub: Scrub,
    /// The current `AccessTimes`.
    pub access_times: AtomicU8,
}

impl Core {
    /// Returns the number of slices that the filesystem uses.
    pub fn slice_count(&self) -> SliceId {
        self.known.load(Ordering::Acquire)
    }

    /// Returns the number of slices that may be the home of new files. An added slice is among them when all parts have it.
    pub fn place_count(&self) -> SliceId {
        self.places.load(Ordering::Acquire)
    }

    /// Returns whether the data of files has checksums.
    pub fn has_checksums(&self) -> bool {
        self.volume.has_checksums()
    }

    /// Fails with ESHUTDOWN after the filesystem was closed.
    pub fn alive(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            Err(ESHUTDOWN)
        } else {
            Ok(())
        }
    }

    /// Fails if no part of the volume may be changed.
    pub fn may_change_at_all(&self) -> Result<()> {
        self.alive()?;
        match self.options.read_only {
            true => Err(EROFS),
            false => Ok(()),
        }
    }

    /// Fails if some part of the volume may not be changed.
    pub fn may_change(&self) -> Result<()> {
        self.may_change_at_all()?;
        self.shards.failure()
    }

    /// Fails if an inode may not be changed.
    pub fn may_change_inode(&self, ino: Ino) -> Result<()> {
        self.may_change_at_all()?;
        self.commits_of(ino).failure()
    }

    /// Fails if the changes of a slice have ended.
    pub fn slice_failure(&self, slice: SliceId) -> Result<()> {
        let shard = self.shards.map().of_slice(slice);
        self.shards.get(shard).commits.failure()
    }

    /// Returns whether a device of a slice is known to answer nothing at present.
    pub fn is_silent(&self, slice: SliceId) -> bool {
        let slices = self.volume.slices();
        let slice = slices.get(usize::from(slice));
        slice.is_some_and(|slice| self.volume.is_silent(slice))
    }

    /// Returns the batches of an inode's shard.
    pub fn commits_of(&self, ino: Ino) -> &Commits {
        &self.shards.of_ino(ino).commits
    }

    /// Returns the store of an inode's shard.
    pub fn store_of(&self, ino: Ino) -> &Store {
        &self.shards.of_ino(ino).store
    }

    /// Returns the hash of a name, which is also the cookie of its entry.
    pub fn hash(&self, name: &[u8]) -> u64 {
        self.volume.hash_name(name).max(FIRST_HASH)
    }

    /// Returns an inode. Fails with ESTALE if it does not exist.
    pub fn inode(&self, ino: Ino) -> Result<Arc<Inode>> {
        self.alive()?;
        self.table.get_or_load(ino, || {
            let rec = self.store_of(ino).inode(ino)?.ok_or(ESTALE)?;
            self.refuse_impossible(ino, &rec)?;
            // Operations count the kernel's reference after they have loaded the inode. So `is_known` is true here only if the
            // kernel knew the inode before.
            Ok(Inode::loaded(ino, rec, self.table.is_known(ino)))
        })
    }

    /// Fails for a record that a correct writer cannot produce.
    fn refuse_impossible(&self, ino: Ino, rec: &InodeRecord) -> Result<()> {
        let no_slice = |slice: Option<SliceId>| {
            slice.filter(|slice| usize::from(*slice) >= self.volume.slices().len())
        };
        let wrong = if rec.kind == Kind::File && rec.size > FILE_BYTES_MAX {
            format!("has a size of {} bytes", rec.size)
        } else if let Some(slice) = no_slice(rec.slice).or(no_slice(rec.placement)) {
            format!("is of slice {slice}, which does not exist")
        } else {
            return Ok(());
        };
        let error = Error::Damaged(format!("inode {ino} {wrong}"));
        self.store_of(ino).note_damage(&error);
        Err(error)
    }

    /// Returns the inode of a directory. Fails with ENOTDIR for other inodes.
    pub fn directory(&self, ino: Ino) -> Result<Arc<Inode>> {
        let inode = self.inode(ino)?;
        if inode.kind == Kind::Directory {
            Ok(inode)
        } else {
            Err(ENOTDIR)
        }
    }

    /// Finds the entry of a name. The caller holds the directory's lock.
    pub fn find(
        &self,
        dir: &Inode,
        meta: &Meta,
        hash: u64,
        name: &[u8],
    ) -> Result<Option<(Ino, Kind)>> {
        match meta.overlay.get(hash, name) {
            Some(entry) => Ok(entry),
            // No batch has included the directory yet, so the store has no entry of it.
            None if !meta.stored => Ok(None),
            None => self.store_of(dir.ino).entry(dir.ino, hash, name),
        }
    }

    /// Changes an entry in memory and in the batch. The caller holds the directory's lock and the gate.
    pub fn put_entry(
        &self,
        dir: &Inode,
        meta: &mut Meta,
        hash: u64,
        name: &[u8],
        to: Option<(Ino, Kind)>,
    ) {
        let commits = self.commits_of(dir.ino);
        meta.overlay.put(hash, name.into(), to, commits.seq());
        let entry = name.into();
        commits.push(match to {
            Some((ino, kind)) => Change::PutEntry {
                dir: dir.ino,
                hash,
                name: entry,
                ino,
                kind,
            },
            None => Change::DelEntry {
                dir: dir.ino,
                hash,
                name: entry,
            },
        });
        #[cfg(test)]
        assert!(name != CURSED, "a planned panic");
    }

    /// Includes the inode's attributes in the next batch. The caller may hold any lock except the batch's own.
    pub fn mark_dirty(&self, inode: &Arc<Inode>) {
        let is_new =
            !inode.touched.load(Ordering::Relaxed) && !inode.touched.swap(true, Ordering::AcqRel);
        if !inode.dirty.load(Ordering::Acquire) {
            self.commits_of(inode.ino).push_dirty(inode);
        } else if is_new {
            // It waits with a part of its extents, and the next batch has its attributes now.
            self.commits_of(inode.ino).grown(1);
        }
    }

    /// Records that data was written to blocks. Their devices are flushed before the next batch.
    pub fn took_data(&self, blocks: Blocks) {
        for run in self.volume.runs(blocks) {
            self.flushes.note_write(run.device);
        }
    }

    /// Returns the devices of the slices of these shards.
    pub fn devices_of(&self, set: ShardSet) -> Vec<u16> {
        let map = self.shards.map();
        if map.count() == 1 {
            return (0..self.volume.devices().len() as u16).collect();
        }
        let slices = self.volume.slices();
        let of_slice = |shard: ShardId| slices[shard.index()].regions();
        let mut devices: Vec<u16> = set.iter().flat_map(of_slice).map(|r| r.device).collect();
        devices.sort_unstable();
        devices.dedup();
        devices
    }

    /// Flushes devices, so that every write to them that ended before the call is durable. If a device fails its flush, ends the changes of
    /// the shards on it.
    pub fn flush(&self, devices: Vec<u16>) -> Result<()> {
        self.flushes.flush(devices).map_err(|error| {
            let error = Error::from(error);
            self.end_changes(ShardSet::default(), &error);
            error
        })
    }

    /// Has nothing allocated in slices that take no changes since the mount.
    pub fn close_failed_slices(&self) {
        for (shard, commits) in self.shards.map().all().iter().zip(self.shards.iter()) {
            if commits.commits.failure().is_err() {
                self.allocator
                    .close(self.shards.slices_of(shard, self.slice_count()));
            }
        }
    }

    /// Ends the changes of these shards after an error. A failed flush also ends those of all shards whose slices have space on its device:
    /// what the device dropped is not known, and it fails all later flushes.
    pub fn end_changes(&self, mut set: ShardSet, error: &Error) {
        if let Error::Io(failed) = error
            && failed.operation == "flush"
        {
            let is_failed = |device: &u16| {
                let device = self.volume.devices().get(usize::from(*device));
                device.is_some_and(|device| device.name() == failed.device)
            };
            let on_it = |shard: &ShardId| {
                let devices = self.devices_of(ShardSet::one(*shard));
                devices.iter().any(is_failed)
            };
            set.extend(self.shards.map().all().iter().filter(on_it).collect());
        }
        let until = match error.is_unreachable() {
            true => "until its host answers",
            false => "until the volume is mounted again",
        };
        for (shard, commits) in set.iter().map(|id| (id, &self.shards.get(id).commits)) {
            if !commits.end_changes(error) {
                continue;
            }
            if self.shards.map().count() == 1 {
                // Nothing is committed any more, and the data may still go where it has space.
                tracing::error!("{error}; no more changes are accepted {until}");
                continue;
            }
            for slice in self.shards.slices_of(shard, self.slice_count()) {
                tracing::error!("{error}; slice {slice} takes no more changes {until}");
            }
            self.allocator
                .close(self.shards.slices_of(shard, self.slice_count()));
        }
        if error.is_unreachable() {
            self.absences.note();
        }
    }

    /// Returns how many changes of a file's extents one batch takes as a whole, because the file replaces another one.
    pub fn share_of_replacement(&self, ino: Ino) -> Share {
        let shard = self.shards.of_ino(ino);
        Share::of_replacement(shard.commits.full_at(), shard.store.container_blocks())
    }

    /// Returns the shards that a sync of a file needs: the one of its inode, and those in which it has data.
    pub fn shards_of(&self, file: &File) -> ShardSet {
        let mut set = ShardSet::one(self.shards.map().of_ino(file.ino()));
        if self.shards.map().count() > 1 {
            set.extend(file.map.read().shards());
        }
        set
    }

    /// Returns the data side of a regular file. Fails with EISDIR or EINVAL for other kinds. The caller holds the inode's lock.
    pub fn file_of(self: &Arc<Self>, inode: &Arc<Inode>, meta: &Meta) -> Result<Arc<File>> {
        match inode.kind {
            Kind::File => {}
            Kind::Directory => return Err(EISDIR),
            _ => return Err(EINVAL),
        }
        let mut slot = inode.file.lock();
        if let Some(file) = &*slot {
            return Ok(file.clone());
        }
        let rows = if meta.stored {
            self.store_of(inode.ino).extents(inode.ino)?
        } else {
            Vec::new()
        };
        let capacity = |slice| {
            let slice = self.volume.slices().get(usize::from(slice));
            slice.map_or(0, |slice| slice.blocks)
        };
        let map = Map::load(
            rows,
            meta.rec.size.div_ceil(PAGE_BYTES),
            (self.shards.map(), self.has_checksums()),
            capacity,
        )
        .map_err(|wrong| {
            let error = Error::Damaged(format!("{wrong} (inode {})", inode.ino));
            self.store_of(inode.ino).note_damage(&error);
            error
        })?;
        let shard = self.shards.map().of_ino(inode.ino);
        let object = self.objects.of(inode.ino, shard, &self.slices)?;
        let host = self.hosts.of(shard, || self.clone() as Arc<dyn FileHost>);
        let file = File::new(host, inode.clone(), object, meta, map);
        if file.map.read().has_changes() && !self.options.read_only {
            self.mark_dirty(inode);
        }
        *slot = Some(file.clone());
        Ok(file)
    }

    /// Returns the data side as `file_of` does. Takes the inode's lock.
    pub fn file(self: &Arc<Self>, inode: &Arc<Inode>) -> Result<Arc<File>> {
        let meta = inode.meta.read();
        self.file_of(inode, &meta)
    }

    /// Removes an inode that has no name, no open descriptor and no reference. Does not wait: the cache drops its pages, and
    /// then the committer removes it.
    pub fn reap(self: &Arc<Self>, inode: &Arc<Inode>) {
        if !inode.unlinked.load(Ordering::Acquire) || self.options.read_only {
            return;
        }
        let mut meta = inode.meta.write();
        if meta.rec.nlink > 0
            || meta.dead
            || inode.opens.load(Ordering::Acquire) > 0
            || self.table.is_known(inode.ino)
        {
            return;
        }
        let file = match self.load_for_removal(inode, &mut meta) {
            Ok(file) => file,
            Err(error) => {
                return self.stays_orphan(inode.ino, &error);
            }
        };
        meta.dead = true;
        drop(meta);
        // With a narrow range the cache checks only these pages and not all pages it holds.
        let pages = file.as_ref().map_or(0, |file| file.end_page());
        let cached = file.as_ref().and_then(|file| Some((file, file.cache()?)));
        match cached {
            Some((file, cache)) if pages > 0 => {
                // The file's reference to the filesystem: removals in other slices do not write to its count.
                let (host, dead) = (file.host.clone(), inode.clone());
                let bury = move |result| host.bury(&dead, result);
                cache.invalidate(file.object_id(), 0..pages, Box::new(bury))
            }
            _ => self.end_removal(inode, Ok(())),
        }
    }

    /// Has the next batch remove an inode, after the cache has dropped its pages or has failed to.
    fn end_removal(&self, dead: &Arc<Inode>, result: CacheResult) {
        match result {
            Ok(()) => {
                let commits = self.commits_of(dead.ino);
                commits.push_dead(dead.clone());
                if self.leaving.waiters() > 0 {
                    commits.hurry();
                }
            }
            Err(error) => self.stays_orphan(dead.ino, &error),
        }
    }

    /// Logs that a file without a name stays an orphan until the next mount, which removes it. No write waits for its space.
    pub fn stays_orphan(&self, ino: Ino, error: &dyn std::fmt::Display) {
        tracing::warn!(
            "file {ino} has no name and cannot be removed before the next mount: {error}"
        );
        self.leaving.remove(&[ino]);
    }

    /// Loads the extended attributes of an inode and, for a regular file, its extents: the batch that removes the inode must
    /// name them. Returns the data side of a regular file.
    fn load_for_removal(
        self: &Arc<Self>,
        inode: &Arc<Inode>,
        meta: &mut Meta,
    ) -> Result<Option<Arc<File>>> {
        self.load_xattrs(inode.ino, meta)?;
        if inode.kind == Kind::File {
            self.file_of(inode, meta).map(Some)
        } else {
            Ok(None)
        }
    }

    /// Waits until all changes made so far are durable. The committers commit, because the caller may hold locks that the
    /// callbacks of others need. Tries every shard even if one fails. A shard whose device is missing has no changes.
    pub fn commit_now(&self) -> Result<()> {
        let present = |shard: &&Shard| !shard.store.is_absent();
        let shards = self.shards.iter().filter(present);
        self.commit_shards(&mut shards.map(|shard| &shard.commits))
    }

    /// Waits until all changes of a shard made so far are durable, as `commit_now` does, but not until the space of removed files is
    /// free: that may take many batches, and the caller holds up others.
    pub fn commit_shard_now(&self, shard: ShardId) -> Result<()> {
        let commits = &self.shards.get(shard).commits;
        self.commit_shards_as(&mut std::iter::once(commits), &|done| Waiter {
            needs: Needs::Files,
            ..Waiter::for_all(done)
        })
    }

    /// Waits until all operations on names and attributes of an inode's shard made so far are durable.
    pub fn commit_names(&self, ino: Ino) -> Result<()> {
        self.commit_shards_as(&mut std::iter::once(self.commits_of(ino)), &|done| Waiter {
            needs: Needs::Names,
            ..Waiter::for_all(done)
        })
    }

    /// Waits until all changes of the shards that take changes are durable.
    pub fn commit_working(&self) -> Result<()> {
        let shards = self.shards.iter().map(|shard| &shard.commits);
        self.commit_shards(&mut shards.filter(|commits| commits.failure().is_ok()))
    }

    /// Waits until all changes of a file are durable whose data has been written back.
    pub fn commit_file(&self, inode: &Arc<Inode>) -> Result<()> {
        let (sender, receiver) = channel();
        self.commits_of(inode.ino).enqueue(Waiter {
            inode: Some(inode.clone()),
            ..Waiter::for_all(Box::new(move |result| {
                // The receiver waits below, so it exists.
                let _ = sender.send(result);
            }))
        });
        receiver.recv().unwrap_or(Err(ESHUTDOWN))
    }

    /// Waits until all changes of these shards made so far are durable, as `commit_now` does.
    pub fn commit_shards(&self, shards: &mut dyn Iterator<Item = &Commits>) -> Result<()> {
        self.commit_shards_as(shards, &Waiter::for_all)
    }

    fn commit_shards_as(
        &self,
        shards: &mut dyn Iterator<Item = &Commits>,
        waiter: &dyn Fn(Done) -> Waiter,
    ) -> Result<()> {
        let (sender, receiver) = channel();
        for commits in shards {
            let sender = sender.clone();
            let done: Done = Box::new(move |result| {
                // The receiver waits below, so it exists.
                let _ = sender.send(result);
            });
            commits.enqueue(waiter(done));
        }
        drop(sender);
        // Waits for all, so that no commit is in progress afterwards.
        let results: Vec<Result<()>> = receiver.iter().collect();
        results.into_iter().collect()
    }
}

impl FileHost for Core {
    fn volume(&self) -> &Volume {
        &self.volume
    }

    fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    fn cache(&self, slice: SliceId) -> Option<&Arc<Slice>> {
        self.slices.get(usize::from(slice))
    }

    fn flushes(&self) -> &DataFlushes {
        &self.flushes
    }

    fn mark_dirty(&self, inode: &Arc<Inode>) {
        Core::mark_dirty(self, inode);
    }

    fn bury(&self, dead: &Arc<Inode>, result: CacheResult) {
        self.end_removal(dead, result);
    }

    fn write_failed(&self, error: &Error) {
        self.errors.note(error);
    }

    fn durable(&self, ino: Ino) -> u64 {
        self.commits_of(ino).durable()
    }

    fn commit(&self, ino: Ino) -> Result<()> {
        self.commit_shard_now(self.shards.map().of_ino(ino))
    }

    fn stored_sums(&self, ino: Ino, group: u64) -> Result<Group> {
        self.store_of(ino).sums(ino, group)
    }

    fn in_one_batch(&self, ino: Ino, change: &mut dyn FnMut() -> bool) -> bool {
        let shard = self.shards.of_ino(ino);
        if self.options.read_only || !shard.store.takes_images() {
            return false;
        }
        let _gate = shard.commits.enter();
        shard.commits.failure().is_ok() && change()
    }
}

/// Largest number of pages of a file.
pub const PAGES: u64 = jericho_format::PAGE_MAX + 1;

/// Runs an operation of a cache and waits for its end.
pub fn wait(start: impl FnOnce(jericho_cache::Done)) -> Result<()> {
    let (sender, receiver) = sync_channel(1);
    start(Box::new(move |result| {
        // The receiver waits below, so it exists.
        let _ = sender.send(result);
    }));
    receiver
        .recv()
        .unwrap_or(Err(jericho_cache::Error::Closed))
        .map_err(error::of_cache)
}

/// Checks a name to be created or looked up.
pub fn check_name(name: &[u8]) -> Result<()> {
    if name.len() > NAME_MAX {
        return Err(ENAMETOOLONG);
    }
    if name.is_empty() || name.contains(&b'/') || name.contains(&0) {
        return Err(EINVAL);
    }
    Ok(())
}
