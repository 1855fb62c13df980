//! Takes the slices of an added device into use, while the filesystem is mounted.
//!
//! `Fs::add` has written them to the superblock durably. `Fs::take` first does what may fail: no other thread can reach what it makes. Then it
//! gives the new slices to all parts. The order makes sure that a thread that learns of a slice from one part finds the slice in all parts that it needs:
//! docs/internals/fs.md, *Addition of a device*.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use jericho_cache::Slice;
use jericho_metadata::alloc::{AppendedShard, AppendedSlice};
use jericho_metadata::numbers::Counter;
use jericho_metadata::shard::{ShardId, ShardMap};
use jericho_metadata::stores;
use jericho_volume::Added;

use crate::commit::{checkpointer, committer};
use crate::core::Core;
use crate::error::Error;
use crate::fs::Fs;
use crate::shards::Shard;
use crate::types::SliceId;

/// Why added slices are not in use. The volume has them, and the next mount uses them.
#[derive(Debug)]
pub enum TakeError {
    /// The slices before them are not in use either.
    Earlier,
    /// The filesystem is being closed.
    Closing,
    /// Their caches could not be made.
    Caches(CacheError),
    /// Their stores could not be opened.
    Store(Error),
    /// A thread could not be started.
    Thread(io::Error),
}

/// Why caches could not be made.
pub type CacheError = Box<dyn std::error::Error + Send + Sync>;

impl fmt::Display for TakeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TakeError::Earlier => write!(
                f,
                "a device that was added before it waits for the next mount, too"
            ),
            TakeError::Closing => write!(f, "the volume is being unmounted"),
            TakeError::Caches(error) => write!(f, "{error}"),
            TakeError::Store(error) => {
                write!(f, "cannot open the metadata of the new slices: {error}")
            }
            TakeError::Thread(error) => write!(
                f,
                "cannot start a thread: {error}; is the limit of processes reached?"
            ),
        }
    }
}

impl std::error::Error for TakeError {}

impl From<Error> for TakeError {
    fn from(error: Error) -> TakeError {
        TakeError::Store(error)
    }
}

impl From<io::Error> for TakeError {
    fn from(error: io::Error) -> TakeError {
        TakeError::Thread(error)
    }
}

/// The parts of a new slice, which no other thread can reach.
struct NewSlice {
    shard: Shard,
    of_allocator: AppendedShard,
    space: AppendedSlice,
    numbers: Counter,
    threads: Threads,
}

/// The committer and the checkpointer of a shard. They begin when the shard can be reached, and end at once if the senders are dropped.
struct Threads {
    begin: [Sender<()>; 2],
    handles: [JoinHandle<()>; 2],
}

impl Threads {
    fn start(core: &Arc<Core>, shard: ShardId) -> io::Result<Threads> {
        let start = |name, run: fn(&Core, ShardId)| {
            let (begin, begins) = channel();
            let core = core.clone();
            let body = move || {
                if begins.recv().is_ok() {
                    run(&core, shard);
                }
            };
            Ok::<_, io::Error>((begin, jericho_sys::service::spawn(name, body)?))
        };
        let committer = start("committer", committer::run)?;
        let checkpointer = start("checkpointer", checkpointer::run)?;
        Ok(Threads {
            begin: [committer.0, checkpointer.0],
            handles: [committer.1, checkpointer.1],
        })
    }

    fn begin(&self) {
        for begin in &self.begin {
            // The thread waits for this.
            let _ = begin.send(());
        }
    }
}

impl Fs {
    /// Takes the slices of an added device into use. `make_caches` makes their caches, in order, or none if the filesystem has no caches.
    /// Calls `show` when no later step can fail, and before any file is in the slices.
    ///
    /// On an error the mount goes on without the slices.
    pub fn take(
        &self,
        added: &Added,
        make_caches: impl FnOnce() -> Result<Vec<Arc<Slice>>, CacheError>,
        show: impl FnOnce(&[Arc<Slice>]),
    ) -> Result<(), TakeError> {
        let core = &self.core;
        let closing = self.extending.lock();
        if *closing {
            return Err(TakeError::Closing);
        }
        let first = core.slice_count();
        if added.first_slice != usize::from(first) || !core.volume.take(added) {
            return Err(TakeError::Earlier);
        }
        core.flushes.append(&added.device);
        core.discards.append(&*added.device);
        let caches = make_caches().map_err(TakeError::Caches)?;
        let mut slices = vec![];
        for slice in added.slices() {
            match self.prepare(slice as SliceId) {
                Ok(made) => slices.push(made),
                Err(error) => {
                    abandon(slices);
                    return Err(error);
                }
            }
        }
        self.publish(slices, &caches, show);
        Ok(())
    }

    /// Makes the parts of a new slice.
    fn prepare(&self, slice: SliceId) -> Result<NewSlice, TakeError> {
        let (core, volume) = (&self.core, &self.core.volume);
        let count = usize::from(slice) + 1;
        let memory = core.options.store_cache_bytes / count;
        let store = stores::open_added(volume, memory, slice.into())?;
        let made = (|| {
            let options = stores::space_options(volume, &volume.slices()[usize::from(slice)]);
            Ok(NewSlice {
                of_allocator: AppendedShard::new(store.clone(), core.has_checksums())?,
                space: core.allocator.prepare(slice, &store, options)?,
                numbers: Counter::load(&store, slice)?,
                shard: Shard::new(store.clone(), core.options.commit_interval_ms)?,
                threads: Threads::start(core, ShardMap::new(count).of_slice(slice))?,
            })
        })();
        if made.is_err() {
            close(&store);
        }
        made
    }

    /// Gives the new slices to all parts. Cannot fail.
    fn publish(
        &self,
        slices: Vec<NewSlice>,
        caches: &[Arc<Slice>],
        show: impl FnOnce(&[Arc<Slice>]),
    ) {
        let core = &self.core;
        let count = core.slice_count() + slices.len() as SliceId;
        core.slices.append(caches.iter().cloned());
        show(caches);
        let mut spaces = vec![];
        for slice in slices {
            // What a thread needs that has found the shard.
            core.table.append();
            core.numbers.append(slice.numbers);
            core.allocator.append_shard(slice.of_allocator);
            core.shards.append(slice.shard);
            slice.threads.begin();
            self.keep_threads(slice.threads.handles);
            spaces.push(slice.space);
        }
        core.known.store(count, Ordering::Release);
        // From here on, files of the other slices may get blocks in the new ones.
        for space in spaces {
            core.allocator.append_slice(space);
        }
        // A device of the new slices may have failed meanwhile.
        core.close_failed_slices();
        core.places.store(count, Ordering::Release);
        if let Err(error) = self.start_discarder() {
            tracing::warn!(%error, "freed blocks are not discarded until the next mount");
        }
        core.leaving.freed(0);
    }
}

/// Closes the stores of slices that are not taken into use.
fn abandon(slices: Vec<NewSlice>) {
    for slice in slices {
        close(&slice.shard.store);
    }
}

fn close(store: &jericho_metadata::store::Store) {
    if let Err(error) = store.close() {
        tracing::warn!(%error, "the metadata store of an added slice was not closed cleanly");
    }
}
