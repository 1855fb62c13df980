//! Batches, and the controls of the threads that make them durable: the committer (`committer`), and callers that may block
//! (`leader`). The text below calls both the committer. Each shard has its own batch and committer.
//!
//! Operations on names and attributes change memory and append to the current batch while they hold the `gate` shared. The
//! committer takes it exclusively for a moment to seal the batch (`seal`). So each of these operations is in one batch as a whole. An
//! operation in several shards holds all their gates, and *links* their batches: these are sealed and committed together (`group`).
//!
//! Writes, truncations, preallocations, access times and the ends of write-backs do not take the gate: they only mark the inode
//! dirty. The committer records each dirty inode as a whole, one after the other. So the data of two files may be of two
//! instants.
//!
//! Two kinds of files are not in the batch as they are in memory. The size of a file that has grown ends at its first page beyond
//! the committed size that is not on the device, or at `synced_size` if that is more (`durable_size`). A file that is being
//! truncated keeps its committed size and extents, and its fsyncs wait for a later batch. After the sealing, with the gate open again,
//! the committer
//!
//! 1. flushes the devices that took data, so that the data that the batch describes is on them
//! 2. commits the batch to the store, in most cases with one durable write to its journal
//! 3. drops what the store now holds itself (overlay entries, attribute values), releases the blocks that the batch
//!    freed, and answers the waiting callers. Only from then on the blocks may be allocated again or discarded (`discard.rs`)
//!
//! If the metadata region has no space for a batch, the committer keeps it and appends the next one to it; the callers get ENOSPC. Any
//! other failure, including that of a flush, ends all changes until the next mount. So does a panic in an operation that holds
//! the gate: it leaves half an operation in memory and in the batch, which must not become durable.
//!
//! The failure of a device whose host does not answer only *suspends* the changes: the committer keeps the sealed batch and seals
//! no other one, until `Fs::resume` takes the shard into use again.

pub(crate) mod checkpointer;
pub(crate) mod checkpoints;
pub(crate) mod committer;
mod group;
pub(crate) mod leader;
mod put_back;
mod resume;
mod seal;

pub(crate) use put_back::PutShardsBack;
pub(crate) use resume::{Linked, ResumeShards};

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use jericho_metadata::errno::ESHUTDOWN;
use jericho_metadata::shard::ShardSet;
use jericho_metadata::store::{Change, weight_of};
use jericho_volume::Blocks;
use parking_lot::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard};

use crate::error::{Error, Result};
use crate::inode::Inode;
use crate::types::{Done, Ino, Kind, TARGET_MAX};

/// Divided by `Store::limits_divisor`, this is the number of changes at which the committer seals a batch, but at most `FULL_AT_MAX`.
const BATCH_CHANGES: usize = 32_768;
/// The journal segment of a batch with this many changes has less than 1 MiB.
const FULL_AT_MAX: usize = 4096;
/// This many removed inodes may wait for their batches at least.
const REMOVALS_MAX_MIN: usize = 64;

/// What must be durable for a caller that waits for a commit. Each includes those before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Needs {
    /// All operations on names and attributes, which one batch has.
    Names,
    /// All changes of files. Those with very many take several batches.
    Files,
    /// All removals of files, too.
    All,
}

/// A caller that waits for a commit or a flush.
pub struct Waiter {
    /// The file or directory that the waiter syncs, if it is one. During a truncation of the file the waiter waits for a later batch.
    pub inode: Option<Arc<Inode>>,
    /// Whether metadata must be committed. Otherwise a flush of the devices is enough.
    pub commit: bool,
    /// The shards with data that must be durable, besides those of the batch's group.
    pub data: ShardSet,
    pub needs: Needs,
    /// The first batch that was sealed for the waiter, if it was not enough.
    pub since: Option<u64>,
    pub done: Done,
}

impl Waiter {
    /// Waits for a commit of all changes so far.
    pub fn for_all(done: Done) -> Waiter {
        Waiter {
            inode: None,
            commit: true,
            data: ShardSet::default(),
            needs: Needs::All,
            since: None,
            done,
        }
    }
}

/// The changes since the last batch was sealed.
#[derive(Default)]
struct Batch {
    changes: Vec<Change>,
    /// Inodes whose attributes (and extents, of files) the batch gets as they are at the sealing.
    dirty: Vec<Arc<Inode>>,
    /// Inodes with attribute values in memory.
    xattrs: Vec<Arc<Inode>>,
    /// Inodes that nothing refers to.
    dead: Vec<Arc<Inode>>,
    /// Inodes of which the last batch had a part only, or nothing. Those that had their turn last are at the end.
    left: Vec<Left>,
    /// Inodes whose changes no batch can have while a host is away. They add nothing to the weight.
    parked: BTreeMap<Ino, Parked>,
    /// The shards whose batches must become durable together with this one.
    links: ShardSet,
}

/// An inode with changes of blocks in a suspended shard, or one to be removed with such blocks.
struct Parked {
    inode: Arc<Inode>,
    /// It is being removed.
    is_dead: bool,
    /// The shards that the changes need.
    data: ShardSet,
}

/// An inode whose changes, or whose removal, several batches take.
struct Left {
    inode: Arc<Inode>,
    /// It is being removed.
    is_dead: bool,
    /// The first batch that had only a part.
    since: u64,
    /// The shards that the inode's later changes need.
    data: ShardSet,
}

/// A sealed batch that is not durable.
#[derive(Default)]
struct Cut {
    seq: u64,
    changes: Vec<Change>,
    xattrs: Vec<Arc<Inode>>,
    dead: Vec<Ino>,
    /// Files with a data side in memory. Memory may drop it when the batch is durable and the file is closed.
    files: Vec<Arc<Inode>>,
    freed: Vec<Blocks>,
    /// See `Batch::links`.
    links: ShardSet,
    /// The shards with data that the batch describes, besides its own.
    data: ShardSet,
}

#[derive(Default)]
struct Control {
    waiters: Vec<Waiter>,
    /// Callers that wait for a truncation to end.
    postponed: Vec<Waiter>,
    deadline: Option<Instant>,
    urgent: bool,
    stop: bool,
    /// Whether a thread leads: it commits, or flushes for waiters.
    is_led: bool,
    /// Whether the committer has work and waits until no thread leads.
    committer_waits: bool,
    /// `Some` while the committer sleeps: until this instant, if there is one.
    asleep: Option<Option<Instant>>,
    /// How often the committer has gone to sleep.
    #[cfg(test)]
    sleeps: u64,
}

impl Control {
    /// Has the committer commit after the interval. Does not wake it if it will wake in time.
    fn set_deadline(&mut self, commits: &Commits) {
        let at = *(self.deadline).get_or_insert_with(|| Instant::now() + commits.interval);
        let sleeps_longer = |until: Option<Instant>| until.is_none_or(|until| until > at);
        if self.asleep.is_some_and(sleeps_longer) {
            commits.work.notify_one();
        }
    }

    /// Returns whether a commit is due even if no caller waits for one.
    fn is_due(&self) -> bool {
        self.urgent || self.deadline.is_some_and(|at| at <= Instant::now())
    }
}

/// The current batch of a shard, and its committer's controls.
pub struct Commits {
    /// An operation on names or attributes holds it shared, and the committer exclusively to seal. Taken before all locks but
    /// `File::exclusive` and `Commits::cut`.
    gate: RwLock<()>,
    batch: Mutex<Batch>,
    /// The number of changes in the batch. A long change counts as several (`Change::weight`).
    weight: AtomicUsize,
    /// A batch of this many changes is committed at once.
    full_at: usize,
    /// The pages of a file's extents that a batch takes, if not 0 (`shorten_steps`).
    step_pages: AtomicU64,
    /// With this many changes in the batch, and files in `left`, operations on names and attributes wait for room. Other changes do not wait.
    max: usize,
    /// The number of inodes in the batch's `left`: of removed ones, and of others.
    removals: AtomicUsize,
    waiting: AtomicUsize,
    /// With this many of them, operations that remove names wait: the extents of each are in memory.
    removals_max: usize,
    seq: AtomicU64,
    durable: AtomicU64,
    armed: AtomicBool,
    interval: Duration,
    control: Mutex<Control>,
    /// The sealed batch that is not durable. The thread that commits it holds the lock: the thread that leads here, or one that leads in
    /// another shard and commits linked batches. Cuts are locked in the order of their shards, and before all gates.
    cut: Mutex<Cut>,
    /// The committer sleeps here.
    work: Condvar,
    /// Before it ends, the committer waits here for the last thread that leads.
    ended: Condvar,
    /// Operations that wait for a smaller batch sleep here.
    room: Condvar,
    is_failed: AtomicBool,
    failed: Mutex<Option<Error>>,
    /// Where the last commit found no room.
    missing: Mutex<Option<Missing>>,
}

/// The failure that has ended the changes of a shard, locked.
type Failure<'a> = MutexGuard<'a, Option<Error>>;

/// Where there is no room for changes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Missing {
    /// In the metadata region.
    OnVolume,
    /// On the host, where a file of the volume has its blocks.
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
    /// Makes an empty batch, to be committed every `interval_ms`. The committer seals it at `BATCH_CHANGES / divisor` changes, at most
    /// `FULL_AT_MAX`. Operations on names and attributes wait at four times the first number, at most twice the second one.
    pub fn new(interval_ms: u64, divisor: usize) -> Commits {
        let full_at = BATCH_CHANGES / divisor;
        let max = (4 * full_at).min(2 * FULL_AT_MAX);
        let full_at = full_at.min(FULL_AT_MAX);
        Commits {
            full_at,
            step_pages: AtomicU64::new(0),
            max,
            removals: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            removals_max: (full_at / 4).max(REMOVALS_MAX_MIN),
            gate: RwLock::new(()),
            batch: Mutex::default(),
            weight: AtomicUsize::new(0),
            seq: AtomicU64::new(1),
            durable: AtomicU64::new(0),
            armed: AtomicBool::new(false),
            interval: Duration::from_millis(interval_ms),
            control: Mutex::default(),
            cut: Mutex::default(),
            work: Condvar::new(),
            ended: Condvar::new(),
            room: Condvar::new(),
            is_failed: AtomicBool::new(false),
            failed: Mutex::new(None),
            missing: Mutex::new(None),
        }
    }

    /// Returns the number of changes of a batch that is committed at once.
    pub fn full_at(&self) -> usize {
        self.full_at
    }

    /// Has a batch take one step of a file's extents, of at most this many pages.
    pub fn shorten_steps(&self, pages: u64) {
        self.step_pages.store(pages, Ordering::Relaxed);
    }

    /// Returns the pages that `shorten_steps` has set.
    pub fn step_pages(&self) -> Option<u64> {
        Some(self.step_pages.load(Ordering::Relaxed)).filter(|pages| *pages > 0)
    }

    /// Returns the number of changes in the current batch. Long ones count more.
    #[cfg(test)]
    pub fn changes(&self) -> usize {
        self.weight.load(Ordering::Relaxed)
    }

    /// Returns the number of the current batch, which is constant while the gate is held.
    pub fn seq(&self) -> u64 {
        self.seq.load(Ordering::Acquire)
    }

    /// Returns the number of the last durable batch.
    pub fn durable(&self) -> u64 {
        self.durable.load(Ordering::Acquire)
    }

    /// Fails with the failure that ended all changes, if there was one.
    pub fn failure(&self) -> Result<()> {
        if !self.is_failed.load(Ordering::Acquire) {
            return Ok(());
        }
        Err(self.failed.lock().clone().unwrap_or(ESHUTDOWN))
    }

    /// Starts an operation on names or attributes: its changes until the guard is dropped go into one batch.
    pub fn enter(&self) -> Gate<'_> {
        Gate {
            commits: self,
            _shared: self.gate.read(),
        }
    }

    /// Returns the failure that has suspended all changes until a host answers again, if there is one.
    pub fn suspension(&self) -> Option<Error> {
        let failure = self.failure().err()?;
        failure.is_unreachable().then_some(failure)
    }

    /// Returns whether all changes have ended until the next mount.
    pub fn has_ended(&self) -> bool {
        self.failure()
            .is_err_and(|failure| !failure.is_unreachable())
    }

    /// Ends all changes if the calling thread unwinds from a panic, because its operation is half done.
    pub fn fail_if_panicking(&self) {
        let error = Error::HalfDone;
        if std::thread::panicking() && self.end_changes(&error) {
            tracing::error!(
                "{error}; a slice accepts no more changes until the volume is mounted again (jericho stat shows which)"
            );
        }
    }

    /// Ends all changes of the shard after an error, or suspends them if the host of a device does not answer. Returns false, without effect,
    /// if they had ended already, or were suspended and still are.
    pub fn end_changes(&self, error: &Error) -> bool {
        let mut failed = self.failed.lock();
        if !error.note_in(&mut failed) {
            return false;
        }
        // Under the lock, so that the two agree, also if `put_back` runs meanwhile.
        self.is_failed.store(true, Ordering::Release);
        drop(failed);
        let _control = self.control.lock();
        self.room.notify_all();
        true
    }

    /// Does the same as `end_changes`, without an answer.
    pub fn fail(&self, error: Error) {
        self.end_changes(&error);
    }

    /// Locks the failure that has ended the changes, so that no other one arrives. Returns `None` if it is not over.
    fn lock_failure(&self, is_over: impl FnOnce(&Error) -> bool) -> Option<Failure<'_>> {
        let failed = self.failed.lock();
        failed.as_ref().is_none_or(is_over).then_some(failed)
    }

    /// Takes changes again: the device has come back, and the store is recovered. The gate is closed and the cut locked.
    fn put_back(&self, mut failure: Failure<'_>) {
        *failure = None;
        self.is_failed.store(false, Ordering::Release);
    }

    /// Has operations that remove names in the shard wait, as if very many removed files waited there, until the next batch is sealed.
    #[cfg(test)]
    pub fn pretend_removals(&self) {
        self.removals.store(self.removals_max, Ordering::Relaxed);
    }

    /// Holds all locks of the batch until the returned value is dropped.
    #[cfg(test)]
    pub fn hold_all(&self) -> impl Sized {
        let locks = (self.cut.lock(), self.gate.write());
        (
            locks,
            self.control.lock(),
            self.batch.lock(),
            self.failed.lock(),
        )
    }

    /// Has the current batch become durable together with the batches of these shards. The gate is held, or the cut is locked.
    pub fn link(&self, shards: ShardSet) {
        self.batch.lock().links.extend(shards);
    }

    /// Appends a change. The gate is held.
    pub fn push(&self, change: Change) {
        let weight = change.weight();
        self.batch.lock().changes.push(change);
        self.grown(weight);
    }

    /// Adds an inode to those that the batch records when it is sealed.
    pub fn push_dirty(&self, inode: &Arc<Inode>) {
        let mut batch = self.batch.lock();
        // Under the lock, so that every marked inode is in the batch: a sync that finds the mark commits the inode.
        if inode.dirty.swap(true, Ordering::AcqRel) {
            return;
        }
        batch.dirty.push(inode.clone());
        drop(batch);
        self.grown(match inode.kind {
            Kind::Symlink => weight_of(TARGET_MAX),
            _ => 1,
        });
    }

    /// Adds an inode whose attribute values were changed.
    pub fn push_xattrs(&self, inode: Arc<Inode>) {
        self.batch.lock().xattrs.push(inode);
    }

    /// Adds an inode to remove, of which nothing is cached.
    pub fn push_dead(&self, inode: Arc<Inode>) {
        let names_bytes = |inode: &Inode| -> usize {
            let meta = inode.meta.read();
            let names = meta.xattrs.iter().flat_map(|xattrs| xattrs.keys());
            names.map(|name| name.len()).sum()
        };
        let weight = weight_of(names_bytes(&inode));
        self.batch.lock().dead.push(inode);
        self.grown(weight);
    }

    /// Adds inodes of which the batch that is being sealed has a part only, or nothing. Has the committer seal the next one at once, or,
    /// without `hurry`, after the interval.
    fn push_left(&self, left: Vec<Left>, hurry: bool) {
        let mut batch = self.batch.lock();
        for left in &left {
            let count = match left.is_dead {
                true => &self.removals,
                false => {
                    // No thread adds it to `dirty` then.
                    left.inode.dirty.store(true, Ordering::Release);
                    &self.waiting
                }
            };
            count.fetch_add(1, Ordering::Relaxed);
        }
        batch.left.extend(left);
        drop(batch);
        match hurry {
            true => self.hurry(),
            false => self.try_later(),
        }
    }

    /// Keeps an inode until no shard that it needs is suspended. A batch tries earlier if a caller waits for the inode, or its attributes change.
    fn park(&self, parked: Parked) {
        let mut batch = self.batch.lock();
        if !parked.is_dead {
            // So a sync finds that it is not durable.
            parked.inode.dirty.store(true, Ordering::Release);
        }
        match batch.parked.entry(parked.inode.ino) {
            Entry::Occupied(mut entry) => {
                let entry = entry.get_mut();
                entry.is_dead |= parked.is_dead;
                entry.data.extend(parked.data);
            }
            Entry::Vacant(entry) => drop(entry.insert(parked)),
        }
    }

    /// Has a batch try the parked inodes, if there are any: a shard takes changes again.
    fn try_parked(&self) {
        let is_empty = self.batch.lock().parked.is_empty();
        if !is_empty {
            self.try_later();
        }
    }

    /// Adds a weight to that of the batch. Has a full batch committed.
    pub fn grown(&self, added: usize) {
        let before = self.weight.fetch_add(added, Ordering::Relaxed);
        if before < self.full_at && before + added >= self.full_at {
            self.hurry();
        } else if !self.armed.swap(true, Ordering::AcqRel) {
            self.control.lock().set_deadline(self);
        }
    }

    /// Has the committer start now.
    pub fn hurry(&self) {
        let mut control = self.control.lock();
        control.urgent = true;
        self.work.notify_one();
    }

    /// Returns the number of callers that no thread serves yet.
    pub fn waiters(&self) -> usize {
        self.control.lock().waiters.len()
    }

    /// Returns whether `wait_for_room` would not wait.
    pub fn has_room(&self) -> bool {
        self.weight.load(Ordering::Relaxed) + self.waiting.load(Ordering::Relaxed) < self.max
    }

    /// Waits while the batch is too large. The caller holds no lock but `File::exclusive`.
    pub fn wait_for_room(&self) {
        self.wait_until(|| self.has_room());
    }

    /// Returns whether `wait_for_removals` would not wait.
    pub fn has_room_for_removals(&self) -> bool {
        self.removals.load(Ordering::Relaxed) < self.removals_max
    }

    /// Returns whether removed inodes wait for their batches. First waits for the batch that a thread commits: it may have the last of them.
    pub fn has_removals(&self) -> bool {
        let _cut = self.cut.lock();
        self.removals.load(Ordering::Relaxed) > 0
    }

    /// Waits while very many removed inodes wait for their batches. The caller holds no lock but `File::exclusive`.
    pub fn wait_for_removals(&self) {
        self.wait_until(|| self.has_room_for_removals());
    }

    fn wait_until(&self, has_room: impl Fn() -> bool) {
        if has_room() {
            return;
        }
        let mut control = self.control.lock();
        while !has_room() && !control.stop && !self.is_failed.load(Ordering::Acquire) {
            control.urgent = true;
            self.work.notify_one();
            self.room.wait(&mut control);
        }
    }

    /// Has the committer call the waiter's `done` when all changes so far are durable, or after a flush if it needs no commit.
    pub fn enqueue(&self, waiter: Waiter) {
        let mut control = self.control.lock();
        if control.stop {
            drop(control);
            return (waiter.done)(Err(ESHUTDOWN));
        }
        control.waiters.push(waiter);
        self.work.notify_one();
    }

    /// Records that a truncation ended, so that the committer serves the callers that wait for its file.
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

    /// Forgets the deadline: a batch is about to be sealed.
    fn disarm(&self, control: &mut Control) {
        control.urgent = false;
        control.deadline = None;
        self.armed.store(false, Ordering::Release);
    }

    /// Logs why changes cannot be stored, or that they can be stored again: one line for each change of state.
    /// Returns whether it has logged a line.
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
        self.control.lock().set_deadline(self);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jericho_metadata::errno::ENOSPC;

    #[test]
    fn each_change_of_room_for_changes_is_logged_once() {
        let commits = Commits::new(1000, 1);
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
