//! Batches, and the thread that makes them durable.
//!
//! Operations change memory and append to the current batch while they hold the `gate` shared. The
//! committer takes it exclusively for a moment to cut the batch: so every operation is in one batch
//! as a whole, and what a batch holds is exactly the state of memory at one instant. Then, with the gate
//! open again:
//!
//! 1. flush the devices that took data, so that what the batch describes is on them
//! 2. one transaction of the store
//! 3. drop what the store now holds itself (overlay entries, attribute values), release the blocks and
//!    inode numbers that the batch freed, answer the waiting callers. From here on, and not before, the
//!    blocks may be allocated again or discarded (`discard.rs`)
//!
//! A batch for which the metadata region has no space is kept, and the next one is appended to it. Any
//! other failure, including that of a flush, ends all changes until the next mount. So does a panic in an operation that holds
//! the gate: it leaves half an operation in memory and in the batch, which must not become durable.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use jericho_format::PAGE_BYTES;
use parking_lot::{Condvar, Mutex, RwLock, RwLockReadGuard};

use crate::alloc::Blocks;
use crate::core::Core;
use crate::data::file::File;
use crate::errno::{ENOSPC, ESHUTDOWN};
use crate::error::{Error, Result};
use crate::fs::Done;
use crate::inode::Inode;
use crate::store::Change;
use crate::types::{Ino, Kind};

/// A batch of this many changes is committed at once.
const BATCH_CHANGES: usize = 32_768;
/// At this many, those who make more wait.
const BATCH_CHANGES_MAX: usize = 4 * BATCH_CHANGES;
/// Overlay entries dropped under one hold of a directory's lock.
const SETTLE_ENTRIES: usize = 128;

/// Who waits for the committer.
pub struct Waiter {
    /// A file that must not be in the middle of a truncation.
    pub inode: Option<Arc<Inode>>,
    /// Metadata must be committed; else a flush of the devices is enough.
    pub commit: bool,
    pub done: Done,
}

/// What operations have done since the last cut.
#[derive(Default)]
struct Batch {
    changes: Vec<Change>,
    /// Inodes whose attributes (files: and extents) are written as they are at the cut.
    dirty: Vec<Arc<Inode>>,
    /// Inodes with attribute values in memory.
    xattrs: Vec<Arc<Inode>>,
    /// Inodes that nothing refers to.
    dead: Vec<Arc<Inode>>,
}

/// What was cut and is not durable.
#[derive(Default)]
struct Cut {
    seq: u64,
    changes: Vec<Change>,
    xattrs: Vec<Arc<Inode>>,
    dead: Vec<Ino>,
    /// Files whose data side was looked at: may be given up when closed.
    files: Vec<Arc<Inode>>,
    freed: Vec<Blocks>,
}

#[derive(Default)]
struct Control {
    waiters: Vec<Waiter>,
    /// Wait for a truncation to end.
    postponed: Vec<Waiter>,
    deadline: Option<Instant>,
    urgent: bool,
    stop: bool,
}

/// The current batch and the committer's controls.
pub struct Commits {
    /// Shared: an operation; exclusive: the cut. Taken before every other lock.
    gate: RwLock<()>,
    batch: Mutex<Batch>,
    weight: AtomicUsize,
    seq: AtomicU64,
    durable: AtomicU64,
    armed: AtomicBool,
    interval: Duration,
    control: Mutex<Control>,
    /// The committer sleeps here.
    work: Condvar,
    /// Who waits for a smaller batch.
    room: Condvar,
    is_failed: AtomicBool,
    failed: Mutex<Option<Error>>,
    /// Where the last commit found no room.
    missing: Mutex<Option<Missing>>,
}

/// Where there is no room for changes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Missing {
    /// In the metadata region.
    OnVolume,
    /// Below it, where a device of the volume has its blocks.
    OnHost,
}

/// The gate, which an operation holds shared.
pub struct Gate<'a> {
    commits: &'a Commits,
    _shared: RwLockReadGuard<'a, ()>,
}

impl Drop for Gate<'_> {
    /// Ends all changes if the operation panics. The gate is still held. The committer takes the gate to seal the batch,
    /// so it finds the failure before it commits.
    fn drop(&mut self) {
        self.commits.fail_if_panicking();
    }
}

impl Commits {
    pub fn new(interval_ms: u64) -> Commits {
        Commits {
            gate: RwLock::new(()),
            batch: Mutex::default(),
            weight: AtomicUsize::new(0),
            seq: AtomicU64::new(1),
            durable: AtomicU64::new(0),
            armed: AtomicBool::new(false),
            interval: Duration::from_millis(interval_ms),
            control: Mutex::default(),
            work: Condvar::new(),
            room: Condvar::new(),
            is_failed: AtomicBool::new(false),
            failed: Mutex::new(None),
            missing: Mutex::new(None),
        }
    }

    /// The current batch, constant while the gate is held.
    pub fn seq(&self) -> u64 {
        self.seq.load(Ordering::Acquire)
    }

    /// The last durable batch.
    pub fn durable(&self) -> u64 {
        self.durable.load(Ordering::Acquire)
    }

    /// The failure after which nothing may be changed.
    pub fn failure(&self) -> Result<()> {
        if !self.is_failed.load(Ordering::Acquire) {
            return Ok(());
        }
        Err(self.failed.lock().clone().unwrap_or(ESHUTDOWN))
    }

    /// Starts an operation: everything done until the guard is dropped goes into one batch.
    pub fn enter(&self) -> Gate<'_> {
        Gate {
            commits: self,
            _shared: self.gate.read(),
        }
    }

    /// Ends all changes when the calling thread unwinds from a panic, because its operation is half done.
    pub fn fail_if_panicking(&self) {
        if std::thread::panicking() && self.failure().is_ok() {
            let error = Error::HalfDone;
            tracing::error!(
                "{error}; no more changes are accepted until the volume is mounted again"
            );
            self.fail(error);
        }
    }

    fn fail(&self, error: Error) {
        *self.failed.lock() = Some(error);
        self.is_failed.store(true, Ordering::Release);
        let _control = self.control.lock();
        self.room.notify_all();
    }

    /// Appends a change. The gate is held.
    pub fn push(&self, change: Change) {
        self.batch.lock().changes.push(change);
        self.grown();
    }

    /// An inode for the next cut.
    pub fn push_dirty(&self, inode: Arc<Inode>) {
        self.batch.lock().dirty.push(inode);
        self.grown();
    }

    /// An inode whose attribute values were changed.
    pub fn push_xattrs(&self, inode: Arc<Inode>) {
        self.batch.lock().xattrs.push(inode);
    }

    /// An inode to remove: nothing of it is cached.
    pub fn push_dead(&self, inode: Arc<Inode>) {
        self.batch.lock().dead.push(inode);
        self.grown();
    }

    fn grown(&self) {
        let weight = self.weight.fetch_add(1, Ordering::Relaxed) + 1;
        if weight == BATCH_CHANGES {
            self.hurry();
        } else if !self.armed.swap(true, Ordering::AcqRel) {
            let mut control = self.control.lock();
            control
                .deadline
                .get_or_insert_with(|| Instant::now() + self.interval);
            self.work.notify_one();
        }
    }

    /// Has the committer start now.
    pub fn hurry(&self) {
        let mut control = self.control.lock();
        control.urgent = true;
        self.work.notify_one();
    }

    /// Whether changes would not have to wait for the device.
    pub fn has_room(&self) -> bool {
        self.weight.load(Ordering::Relaxed) < BATCH_CHANGES_MAX
    }

    /// Waits while the batch is too large. The caller holds no lock.
    pub fn wait_for_room(&self) {
        if self.has_room() {
            return;
        }
        let mut control = self.control.lock();
        while self.weight.load(Ordering::Relaxed) >= BATCH_CHANGES_MAX
            && !control.stop
            && !self.is_failed.load(Ordering::Acquire)
        {
            control.urgent = true;
            self.work.notify_one();
            self.room.wait(&mut control);
        }
    }

    /// Has the committer call `done` when all done so far is durable.
    pub fn enqueue(&self, waiter: Waiter) {
        let mut control = self.control.lock();
        if control.stop {
            drop(control);
            return (waiter.done)(Err(ESHUTDOWN));
        }
        control.waiters.push(waiter);
        self.work.notify_one();
    }

    /// A truncation ended: those who wait for its file can be served.
    pub fn released(&self) {
        let mut control = self.control.lock();
        if !control.postponed.is_empty() {
            let mut postponed = std::mem::take(&mut control.postponed);
            control.waiters.append(&mut postponed);
            self.work.notify_one();
        }
    }

    /// Ends the committer, without a commit.
    pub fn stop(&self) {
        let mut control = self.control.lock();
        control.stop = true;
        self.work.notify_one();
        self.room.notify_all();
    }

    /// Sleeps until there is work: who waits, and whether to commit. `None`: the end.
    fn next(&self) -> Option<(Vec<Waiter>, bool)> {
        let mut control = self.control.lock();
        loop {
            if control.stop {
                return None;
            }
            let due = control.urgent || control.deadline.is_some_and(|at| at <= Instant::now());
            if due || !control.waiters.is_empty() {
                let waiters = std::mem::take(&mut control.waiters);
                let commit = due || waiters.iter().any(|w| w.commit);
                if commit {
                    control.urgent = false;
                    control.deadline = None;
                    self.armed.store(false, Ordering::Release);
                }
                return Some((waiters, commit));
            }
            match control.deadline {
                Some(at) => drop(self.work.wait_until(&mut control, at)),
                None => self.work.wait(&mut control),
            }
        }
    }

    /// Logs why changes cannot be stored, and that they can be again: one line for each change of state.
    /// Returns whether it logged one.
    fn note_room(&self, error: Option<&Error>) -> bool {
        let missing = error.map(|error| match error.is_full_volume() {
            true => Missing::OnVolume,
            false => Missing::OnHost,
        });
        let before = std::mem::replace(&mut *self.missing.lock(), missing);
        if before == missing {
            return false;
        }
        match (missing, error) {
            (Some(Missing::OnHost), Some(error)) => tracing::error!(
                "the host of the volume has no room for changes: {error}; make room there; changes wait in memory"
            ),
            (Some(_), _) => {
                tracing::error!("the metadata region is full: remove files; changes wait in memory")
            }
            (None, _) => tracing::info!("there is room for changes again"),
        }
        true
    }

    fn try_later(&self) {
        self.armed.store(true, Ordering::Release);
        let mut control = self.control.lock();
        control
            .deadline
            .get_or_insert_with(|| Instant::now() + self.interval);
    }
}

/// The committer's thread.
pub fn run(core: &Core) {
    let mut cut = Cut::default();
    while let Some((mut waiters, commit)) = core.commits.next() {
        if commit {
            take_batch(core, &mut cut, &mut waiters);
        }
        let result = make_durable(core, &mut cut, commit);
        for waiter in waiters {
            (waiter.done)(result.clone());
        }
    }
    let mut control = core.commits.control.lock();
    let mut left = std::mem::take(&mut control.waiters);
    left.append(&mut control.postponed);
    drop(control);
    for waiter in left {
        (waiter.done)(Err(ESHUTDOWN));
    }
}

/// Cuts the batch and appends it to what an earlier attempt left.
fn take_batch(core: &Core, cut: &mut Cut, waiters: &mut Vec<Waiter>) {
    let commits = &core.commits;
    let gate = commits.gate.write();
    let mut batch = std::mem::take(&mut *commits.batch.lock());
    commits.weight.store(0, Ordering::Relaxed);
    cut.seq = commits.seq.load(Ordering::Acquire);
    commits.seq.store(cut.seq + 1, Ordering::Release);
    cut.changes.append(&mut batch.changes);
    cut.xattrs.append(&mut batch.xattrs);
    if !batch.dead.is_empty() {
        let generation = core
            .generation
            .fetch_add(1, Ordering::Relaxed)
            .wrapping_add(1);
        cut.changes
            .push(Change::PutValue("generation", u64::from(generation)));
    }
    for inode in batch.dead {
        bury(core, cut, &inode);
    }
    let mut held = Vec::new();
    for inode in batch.dirty {
        // Before its state is read: a change from here on puts it into the next batch.
        inode.dirty.store(false, Ordering::Release);
        if !snapshot(cut, &inode) {
            held.push(inode);
        }
    }
    drop(gate);
    for inode in &held {
        core.mark_dirty(inode);
    }
    postpone(commits, &held, waiters);
    commits.room.notify_all();
}

/// Takes out the waiters for whom this batch is not enough, because a truncation held their files' extents back.
fn postpone(commits: &Commits, held: &[Arc<Inode>], waiters: &mut Vec<Waiter>) {
    // Dropped after the lock is released.
    let files: Vec<_> = waiters
        .iter()
        .map(|waiter| waiter.inode.as_ref()?.file.lock().clone())
        .collect();
    let mut control = commits.control.lock();
    for (waiter, file) in std::mem::take(waiters).into_iter().zip(&files) {
        let is = |inode: &Arc<Inode>| held.iter().any(|held| Arc::ptr_eq(held, inode));
        if file.as_ref().is_some_and(|file| file.is_in_truncation()) {
            // Under the lock: when the truncation ends, it finds the waiter there (`released`).
            control.postponed.push(waiter);
        } else if waiter.inode.as_ref().is_some_and(is) {
            // The truncation ended after the batch was cut. The next batch has the file.
            control.waiters.push(waiter);
        } else {
            waiters.push(waiter);
        }
    }
}

/// Writes an inode's state into the cut. False: a truncation is in progress, its size and extents are
/// left as they were.
fn snapshot(cut: &mut Cut, inode: &Arc<Inode>) -> bool {
    let mut meta = inode.meta.write();
    if meta.buried {
        return true;
    }
    let mut size = meta.rec.size;
    let mut whole = true;
    let file = if inode.kind == Kind::File {
        inode.file.lock().clone()
    } else {
        None
    };
    if let Some(file) = &file {
        if meta.dead {
            size = meta.committed_size;
        } else if file.is_in_truncation() {
            size = meta.committed_size;
            whole = false;
        } else {
            // The store still has what a truncation since the last batch removed, but it is no longer backed.
            let synced = file.synced_size.load(Ordering::Acquire);
            size = durable_size(file, meta.committed_size.min(synced), size);
            file.synced_size.fetch_max(size, Ordering::AcqRel);
            // After the size: a page that is clean by then has its extent in the map.
            let mut map = file.map.write();
            if map.has_changes() {
                map.differences(inode.ino, &mut cut.changes, &mut cut.freed);
            }
        }
    }
    let mut rec = meta.rec.clone();
    rec.size = size;
    cut.changes.push(Change::PutInode(inode.ino, rec));
    if file.is_some() {
        cut.files.push(inode.clone());
    }
    meta.committed_size = size;
    meta.stored = true;
    inode.included_in.store(cut.seq, Ordering::Release);
    whole
}

/// How much of a file's size is backed by data on the device: all of it, or up to the first page whose
/// newest bytes are only in memory.
fn durable_size(file: &File, committed: u64, size: u64) -> u64 {
    if size <= committed {
        file.size_pending.store(false, Ordering::Release);
        return size;
    }
    // Before asking: a page written from here on finds it set and brings the inode back.
    file.size_pending.store(true, Ordering::Release);
    // The cache keeps a page dirty until the map records its new place. A page that has blocks and is not dirty was
    // never written: it was reserved ahead and is now a gap, so it reads as zeros.
    let Some(page) = file.first_dirty(committed / PAGE_BYTES) else {
        file.size_pending.store(false, Ordering::Release);
        return size;
    };
    let limit = (page * PAGE_BYTES)
        .max(committed)
        .max(file.synced_size.load(Ordering::Acquire));
    if limit >= size {
        file.size_pending.store(false, Ordering::Release);
    }
    limit.min(size)
}

/// Removes an inode in the cut.
fn bury(core: &Core, cut: &mut Cut, inode: &Arc<Inode>) {
    let mut meta = inode.meta.write();
    let ino = inode.ino;
    let file = inode.file.lock().clone();
    if let Some(file) = file {
        let mut map = file.map.write();
        map.remove_all(ino, &core.allocator, &mut cut.changes, &mut cut.freed);
    }
    for name in meta.xattrs.take().unwrap_or_default().into_keys() {
        cut.changes.push(Change::DelXattr(ino, name));
    }
    if meta.stored {
        cut.changes.push(Change::DelInode(ino));
    }
    cut.changes.push(Change::DelOrphan(ino));
    cut.dead.push(ino);
    meta.buried = true;
    inode.included_in.store(cut.seq, Ordering::Release);
}

fn make_durable(core: &Core, cut: &mut Cut, commit: bool) -> Result<()> {
    core.commits.failure()?;
    if let Err(error) = flush(core) {
        // What the device dropped is not known, so nothing may be built on it.
        tracing::error!("{error}; no more changes are accepted until the volume is mounted again");
        core.commits.fail(error.clone());
        return Err(error);
    }
    if !commit {
        return Ok(());
    }
    match core.store.commit(&cut.changes) {
        Ok(()) => {
            core.commits.note_room(None);
            settle(core, std::mem::take(cut));
            Ok(())
        }
        Err(error) if error.errno() == ENOSPC.errno() => {
            core.commits.note_room(Some(&error));
            core.commits.try_later();
            Err(error)
        }
        Err(error) => {
            tracing::error!(
                "{error}; no more changes are accepted until the volume is mounted again"
            );
            core.commits.fail(error.clone());
            Err(error)
        }
    }
}

/// Makes what was written to the devices durable.
fn flush(core: &Core) -> Result<()> {
    for (device, took) in core.volume.devices().iter().zip(&core.took_data) {
        if took.swap(false, Ordering::AcqRel)
            && let Err(error) = device.flush()
        {
            took.store(true, Ordering::Release);
            return Err(error.into());
        }
    }
    Ok(())
}

/// A cut is durable: memory gives up what the store has now.
fn settle(core: &Core, cut: Cut) {
    core.commits.durable.store(cut.seq, Ordering::Release);
    core.table.set_durable(cut.seq);
    let mut changes = cut.changes.into_iter().peekable();
    while let Some(change) = changes.next() {
        let Some((dir, hash, name)) = entry_of(change) else {
            continue;
        };
        let Some(inode) = core.table.get(dir) else {
            continue;
        };
        let mut meta = inode.meta.write();
        meta.overlay.settle(hash, name, cut.seq);
        for _ in 1..SETTLE_ENTRIES {
            let Some(change) = changes.next_if(|c| directory_of(c) == Some(dir)) else {
                break;
            };
            if let Some((_, hash, name)) = entry_of(change) {
                meta.overlay.settle(hash, name, cut.seq);
            }
        }
    }
    for inode in cut.xattrs {
        let mut meta = inode.meta.write();
        for xattr in meta.xattrs.iter_mut().flatten().map(|(_, xattr)| xattr) {
            if xattr.seq <= cut.seq {
                xattr.value = None;
            }
        }
    }
    let has_freed = !cut.freed.is_empty();
    for blocks in cut.freed {
        core.allocator.release_committed(blocks);
    }
    if has_freed {
        core.leaving.freed();
    }
    if core.allocator.has_freed() {
        core.discards.wake();
    }
    for inode in cut.files {
        inode.give_up_file(cut.seq);
    }
    for ino in &cut.dead {
        core.table.remove(*ino);
    }
    core.leaving.remove(&cut.dead);
    let mut numbers = core.numbers.lock();
    for ino in cut.dead {
        numbers.give_back(ino);
    }
    drop(numbers);
    core.table.trim();
}

fn directory_of(change: &Change) -> Option<Ino> {
    match change {
        Change::PutEntry { dir, .. } | Change::DelEntry { dir, .. } => Some(*dir),
        _ => None,
    }
}

fn entry_of(change: Change) -> Option<(Ino, u64, Box<[u8]>)> {
    match change {
        Change::PutEntry {
            dir, hash, name, ..
        }
        | Change::DelEntry { dir, hash, name } => Some((dir, hash, name)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_change_of_room_for_changes_is_logged_once() {
        let commits = Commits::new(1000);
        let volume = ENOSPC;
        let host = Error::Io(jericho_storage::IoError {
            operation: "write",
            device: "device".into(),
            offset_bytes: 0,
            length_bytes: 4096,
            cause: jericho_storage::Cause::Errno(ENOSPC.errno()),
        });
        let steps = [
            (None, false),
            (Some(&host), true),
            (Some(&host), false),
            (Some(&volume), true),
            (Some(&volume), false),
            (None, true),
            (None, false),
        ];
        for (error, logged) in steps {
            assert_eq!(commits.note_room(error), logged, "{error:?}");
        }
    }
}
