//! The metadata store: tables of rows, changed by batches.
//!
//! A commit writes a batch to the journal and puts its rows into memory (`memtable`). A checkpoint (`checkpoint`) later writes the
//! rows in memory to redb, in the store's metadata region. After a crash, all of a batch is there or none
//! of it. Reads see committed batches only. Newer changes are in the overlay of the namespace.

pub mod batch;
mod checkpoint;
pub mod codec;
mod commit;
mod left;
mod log;
mod memtable;
mod payload;
mod prepared;
mod records;
pub mod recovery;
mod refusals;
pub mod region;
mod retire;
mod room;
mod scan;
pub mod tables;
mod view;

use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use jericho_format::sums::Group;
use jericho_format::{PAGE_BYTES, record};
use jericho_journal::{History, JournalArea, Position};
use jericho_storage::{Appended, IoError};
use parking_lot::Mutex;
use redb::{Database, StorageBackend};

pub use self::commit::CheckpointNeed;
use self::left::BatchPlace;
pub use self::left::Retired;
use self::log::Log;
pub use self::payload::Requirement;
pub use self::prepared::Prepared;
pub use self::records::{Block, Change, Entry, Extent, Image, InodeRecord, weight_of};
use self::region::Region;
pub use self::retire::Busy;
use self::room::Room;
use self::tables::{ReadError, Table};
use self::view::{Snapshot, View};
use crate::error::{Error, Result};
use crate::types::{Ino, Kind, SliceId};

/// How a store is opened.
#[derive(Clone, Copy, Debug)]
pub struct StoreOptions {
    /// Memory of the store, in bytes: half of it for cached pages of redb, the rest for rows and for what a checkpoint writes.
    pub cache_bytes: usize,
    /// Blocks of a container (a multiple of 64), as in the volume's superblock.
    pub container_blocks: u32,
}

impl Default for StoreOptions {
    fn default() -> Self {
        StoreOptions {
            cache_bytes: 64 << 20,
            container_blocks: 16384,
        }
    }
}

/// redb's side of the store. A thread that writes to redb holds it.
struct Writer {
    /// `None` while redb is being opened again, and after the store was closed.
    db: Option<Database>,
}

impl Drop for Writer {
    fn drop(&mut self) {
        if let Err(error) = close_database(self.db.take()) {
            tracing::error!("closing the metadata store: {error}");
        }
    }
}

/// What the allocator does for the store.
pub trait Supply: Send + Sync {
    /// Prepares for a batch. An error fails the batch before anything is written.
    fn before_commit(&self, changes: &[Change]) -> Result<()>;

    /// Returns whether `free` free pages of the metadata region are enough for `pages` pages and a stock.
    fn has_enough(&self, region: &Region, pages: u64, free: u64) -> bool;

    /// Makes spare chunks of the metadata region for `pages` pages and a stock, as far as there is space.
    fn refill(&self, region: &Region, pages: u64) -> Result<()>;

    /// Notes that a read has failed because the host of a device does not answer. redb fails all reads from then on.
    fn read_unreachable(&self) {}
}

/// Which batches a store had when it was opened.
struct Past {
    /// `None`: the journal could not be read.
    journal: Option<History>,
    /// The linked batches that were never in the journal.
    linked: u64,
    /// Where redb and the journal ended.
    ends: Ends,
}

/// The position of redb's checkpoint, and the end of the journal, if it could be read.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Ends {
    redb: Position,
    journal: Option<Position>,
}

/// The store of an open volume. Thread-safe.
pub struct Store {
    /// Taken before `log`.
    writer: Mutex<Writer>,
    /// Taken by commits, from `prepare` to `publish`.
    log: Mutex<Log>,
    /// The bytes of the journal; 0 if there is none.
    journal_bytes: AtomicUsize,
    /// The bytes of the longest batch of this mount.
    longest_batch_bytes: AtomicUsize,
    /// Held during a transaction of redb. If the transaction finds no room, redb fails all reads until it is opened again.
    in_transaction: Mutex<()>,
    /// Only a holder of `log` adds rows.
    view: ArcSwap<View>,
    /// The error that ended all changes.
    failed: Mutex<Option<Error>>,
    /// The place of a batch that was written to the journal, perhaps in part, and that readers do not see.
    unpublished: Mutex<Option<BatchPlace>>,
    /// The rows of a batch that goes to redb past the journal, and that readers do not see.
    unpublished_rows: Mutex<Option<Arc<[tables::Row]>>>,
    /// See `pass_journal`.
    passes_journal: AtomicBool,
    /// Why another store takes the place of this one.
    retired: OnceLock<IoError>,
    /// What this store knew when it was retired.
    left: Mutex<Retired>,
    /// Why the store cannot be read: its device is missing.
    absent: Option<Error>,
    /// Which batches the store had when it was opened, for the last batch of a store that comes back later.
    past: OnceLock<Past>,
    /// Whether the last batch of the journal counted, if it required others.
    kept_last: OnceLock<bool>,
    /// The first damage that a reader has found.
    damage: OnceLock<Error>,
    /// `None`: the store is in memory.
    region: Option<Arc<Region>>,
    supply: Mutex<Option<Arc<dyn Supply>>>,
    room: Room,
    options: StoreOptions,
    writable: bool,
}

impl Store {
    /// Creates a store in memory, for tests of code that uses a store. `container_blocks` is a multiple of 64.
    pub fn in_memory(container_blocks: u32) -> Result<Store> {
        let options = StoreOptions {
            container_blocks,
            ..StoreOptions::default()
        };
        Store::over(redb::backends::InMemoryBackend::new(), None, options, true)
    }

    /// Returns a store that fails all reads and batches with this error, because its device is missing. It has the limits of the store
    /// with these options and this journal, which may come back.
    pub fn absent(error: Error, options: StoreOptions, journal: JournalArea) -> Result<Store> {
        let mut store = Store::in_memory(options.container_blocks)?;
        store.options = options;
        store.has_journal(journal);
        store.writable = false;
        store.failed = Mutex::new(Some(error.clone()));
        store.absent = Some(error);
        Ok(store)
    }

    /// Returns whether the device of the store is missing.
    pub fn is_absent(&self) -> bool {
        self.absent.is_some()
    }

    /// Opens the store of a volume, and repairs redb's file if the last writer died. Without `writable` the store refuses batches
    /// (EROFS), but redb still writes its repair: then pass a region over an overlay.
    pub fn open(region: Arc<Region>, options: StoreOptions, writable: bool) -> Result<Store> {
        Store::over(
            region::Backend(region.clone()),
            Some(region),
            options,
            writable,
        )
    }

    fn over(
        backend: impl StorageBackend,
        region: Option<Arc<Region>>,
        options: StoreOptions,
        writable: bool,
    ) -> Result<Store> {
        assert!(options.container_blocks > 0 && options.container_blocks.is_multiple_of(64));
        let explain = |e| explain(region.as_deref(), e);
        let (db, snapshot) = guarded(|| {
            let db = redb::Builder::new()
                .set_cache_size(options.cache_bytes / 2)
                .create_with_backend(backend)
                .map_err(|e| explain(e.to_string()))?;
            if writable {
                batch::create_tables(&db).map_err(explain)?;
            }
            let snapshot = Snapshot::take(&db)?;
            Ok((db, snapshot))
        })?;
        Ok(Store {
            writer: Mutex::new(Writer { db: Some(db) }),
            log: Mutex::default(),
            journal_bytes: AtomicUsize::new(0),
            longest_batch_bytes: AtomicUsize::new(0),
            in_transaction: Mutex::default(),
            view: ArcSwap::from_pointee(View::of(snapshot)),
            failed: Mutex::new(None),
            unpublished: Mutex::new(None),
            retired: OnceLock::new(),
            left: Mutex::default(),
            absent: None,
            past: OnceLock::new(),
            kept_last: OnceLock::new(),
            unpublished_rows: Mutex::new(None),
            passes_journal: AtomicBool::new(false),
            damage: OnceLock::new(),
            room: Room::of(region.as_deref()),
            region,
            supply: Mutex::new(None),
            options,
            writable,
        })
    }

    /// Returns the number of blocks of a container, the unit of the durable bitmaps.
    pub fn container_blocks(&self) -> u32 {
        self.options.container_blocks
    }

    /// Returns the metadata region under the store, or `None` for a store in memory.
    pub fn region(&self) -> Option<&Arc<Region>> {
        self.region.as_ref()
    }

    /// Sets the supply of the store. The allocator sets itself.
    pub fn set_supply(&self, supply: Arc<dyn Supply>) {
        *self.supply.lock() = Some(supply);
    }

    fn supply(&self) -> Option<Arc<dyn Supply>> {
        self.supply.lock().clone()
    }

    /// Notes the size of the journal.
    fn has_journal(&self, area: JournalArea) {
        let bytes = (area.blocks * PAGE_BYTES) as usize;
        self.journal_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Returns the bytes of the journal; 0 if there is none.
    pub fn journal_bytes(&self) -> usize {
        self.journal_bytes.load(Ordering::Relaxed)
    }

    /// Returns the bytes of the longest batch of this mount. A store without a journal counts none.
    pub fn longest_batch_bytes(&self) -> usize {
        self.longest_batch_bytes.load(Ordering::Relaxed)
    }

    /// Fails after an error that ended all changes.
    pub fn check(&self) -> Result<()> {
        self.failed.lock().clone().map_or(Ok(()), Err)
    }

    /// Ends all changes. Returns the error that ended them: the first one, but not that of a host that does not answer, if there is another one.
    pub fn fail(&self, error: Error) -> Error {
        let error = self.blame(error);
        tracing::error!("metadata store: {error}; no more changes are accepted");
        let mut failed = self.failed.lock();
        error.note_in(&mut failed);
        failed.clone().unwrap_or(error)
    }

    /// Remembers damage, so that `close` does not present the store as sound.
    pub fn note_damage(&self, error: &Error) {
        if matches!(error, Error::Damaged(_)) && self.damage.set(error.clone()).is_ok() {
            tracing::error!("{error}");
        }
    }

    /// Makes a checkpoint and closes the store. redb then writes what it needs for a quick opening. Without this call redb would
    /// write when the last reference to the store is dropped, perhaps after another program has opened the volume. The store refuses
    /// later batches. Fails with the first error of a device since the store was opened, or with the first damage that was found. After
    /// damage the journal keeps its batches, because a checkpoint must not build on damaged pages.
    pub fn close(&self) -> Result<()> {
        if let Some(error) = self.retired.get() {
            return Err(error.clone().into());
        }
        let damage = self.damage.get().filter(|_| self.writable);
        let written = damage.map_or_else(|| self.checkpoint(), |error| Err(error.clone()));
        let mut writer = self.writer.lock();
        let log = std::mem::take(&mut *self.log.lock());
        let written = written.and_then(|()| match log {
            // redb has everything, so the next mount need not read the journal.
            Log::Journal(journal)
                if self.view.load().is_in_redb() && journal.tail() == journal.end() =>
            {
                Ok(journal.close()?)
            }
            _ => Ok(()),
        });
        let closed = || Error::Store("the store is closed".into());
        self.failed.lock().get_or_insert_with(closed);
        let closed = written.and(close_database(writer.db.take()));
        let region = self.region.as_ref();
        match region.and_then(|region| region.last_error()) {
            Some(error) => Err(error),
            None => closed,
        }
    }

    /// Returns whether redb finds its own pages in order. Undoes the damage that redb can undo, and fails if there is other
    /// damage. Opens and closes the region.
    pub fn verify(region: &Arc<Region>) -> Result<bool> {
        let explain = |text: String| explain(Some(region), text);
        guarded(|| {
            let mut db = redb::Builder::new()
                .set_cache_size(64 << 20)
                .create_with_backend(region::Backend(region.clone()))
                .map_err(|e| explain(e.to_string()))?;
            db.check_integrity().map_err(|e| explain(e.to_string()))
        })
    }

    /// Holds all locks of the store until the returned value is dropped.
    #[cfg(any(test, feature = "testing"))]
    pub fn hold_all(&self) -> impl Sized {
        let locks = (
            self.writer.lock(),
            self.log.lock(),
            self.in_transaction.lock(),
            self.failed.lock(),
            self.supply.lock(),
        );
        (locks, self.region.as_ref().map(|region| region.hold_all()))
    }

    fn reopen(&self, writer: &mut Writer) -> Result<()> {
        let Some(region) = &self.region else {
            return Err(Error::Store(
                "a store in memory cannot be opened again".into(),
            ));
        };
        close_database(writer.db.take())?;
        guarded_over(Some(region), || {
            let db = redb::Builder::new()
                .set_cache_size(self.options.cache_bytes / 2)
                .create_with_backend(region::Backend(region.clone()))
                .map_err(|e| explain(Some(region), e.to_string()))?;
            let snapshot = Arc::new(Snapshot::take(&db)?);
            writer.db = Some(db);
            self.view.rcu(|view| View {
                redb: snapshot.clone(),
                ..View::clone(view)
            });
            Ok(())
        })
    }

    /// Runs a read. Repeats a failed read if redb was opened again meanwhile, after a transaction that found no room.
    fn read<T>(&self, read: impl Fn(&View) -> std::result::Result<T, ReadError>) -> Result<T> {
        if let Some(error) = &self.absent {
            return Err(error.clone());
        }
        loop {
            let view = self.view.load_full();
            let found = guarded(|| Ok(read(&view)));
            // Another store may have changed the bytes meanwhile.
            self.check_in_use()?;
            let found = found.map_err(|error| self.blame(error));
            let found = found.inspect_err(|error| self.note_damage(error))?;
            let error = match found {
                Ok(value) => return Ok(value),
                Err(ReadError::Damaged(what)) => {
                    let error = Error::Damaged(what);
                    self.note_damage(&error);
                    return Err(error);
                }
                Err(ReadError::Redb(error)) => error,
            };
            drop(self.in_transaction.lock());
            if Arc::ptr_eq(&view.redb, &self.view.load().redb) {
                let error = explain(self.region.as_deref(), error.to_string());
                self.note_unreachable(&error);
                return Err(error);
            }
        }
    }

    /// Returns an inode.
    pub fn inode(&self, ino: Ino) -> Result<Option<InodeRecord>> {
        let key = record::ino_key(ino);
        self.read(|view| {
            view.get(Table::Inodes, &key, |value| {
                codec::inode_from_bytes(ino, value)
            })
        })
    }

    /// Returns the inode and kind of an entry of a directory.
    pub fn entry(&self, dir: Ino, hash: u64, name: &[u8]) -> Result<Option<(Ino, Kind)>> {
        let key = record::entry_key(dir, hash, name);
        self.read(|view| {
            view.get(Table::Entries, &key, |value| {
                codec::entry_from_bytes(dir, value)
            })
        })
    }

    /// Returns entries of a directory in order of (hash, name), from hash `from` on. Returns at most `limit`, but never ends between two
    /// entries of one hash.
    pub fn entries(&self, dir: Ino, from: u64, limit: usize) -> Result<Vec<Entry>> {
        let first = record::pair_key(dir, from);
        let end = record::ino_key(dir + 1);
        self.read(|view| {
            let mut entries: Vec<Entry> = Vec::new();
            view.each(Table::Entries, &first, Some(&end), |key, value| {
                let entry = codec::entry_of_row(key, value)?;
                if entries.len() >= limit && entries.last().is_none_or(|e| e.hash != entry.hash) {
                    return Ok(false);
                }
                entries.push(entry);
                Ok(true)
            })?;
            Ok(entries)
        })
    }

    /// Returns all extents of a file, in order.
    pub fn extents(&self, ino: Ino) -> Result<Vec<Extent>> {
        self.of_inode(Table::Extents, ino, |key, value| {
            Ok(codec::extent_of_row(key, value)?.1)
        })
    }

    /// Returns at most `max` extents of a file that begin at page `from` or later and end after page `page`, in order.
    pub fn extents_after(
        &self,
        ino: Ino,
        (from, page): (u64, u64),
        max: usize,
    ) -> Result<Vec<Extent>> {
        let (first, end) = (record::extent_key(ino, from), record::ino_key(ino + 1));
        self.read(|view| {
            let mut found = Vec::new();
            view.each(Table::Extents, &first, Some(&end), |key, value| {
                let (_, extent) = codec::extent_of_row(key, value)?;
                if extent.page.saturating_add(u64::from(extent.blocks.count)) > page {
                    found.push(extent);
                }
                Ok(found.len() < max)
            })?;
            Ok(found)
        })
    }

    /// Returns the value of an extended attribute.
    pub fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Option<Box<[u8]>>> {
        let key = record::xattr_key(ino, name);
        self.read(|view| view.get(Table::Xattrs, &key, |value| Ok(value.into())))
    }

    /// Returns the names of all extended attributes of an inode.
    pub fn xattr_names(&self, ino: Ino) -> Result<Vec<Box<[u8]>>> {
        self.of_inode(Table::Xattrs, ino, |key, _| {
            Ok(key.get(8..).unwrap_or_default().into())
        })
    }

    /// Returns what `read` makes of the rows of an inode, in order.
    fn of_inode<T>(
        &self,
        table: Table,
        ino: Ino,
        read: impl Fn(&[u8], &[u8]) -> std::result::Result<T, ReadError>,
    ) -> Result<Vec<T>> {
        let (first, end) = (record::ino_key(ino), record::ino_key(ino + 1));
        self.read(|view| {
            let mut found = Vec::new();
            view.each(table, &first, Some(&end), |key, value| {
                found.push(read(key, value)?);
                Ok(true)
            })?;
            Ok(found)
        })
    }

    /// Returns the inodes that were open without a name at the last commit.
    pub fn orphans(&self) -> Result<Vec<Ino>> {
        self.read(|view| {
            let mut orphans = Vec::new();
            view.each(Table::Orphans, &[], None, |key, _| {
                orphans.push(codec::number_of_key(key)?);
                Ok(true)
            })?;
            Ok(orphans)
        })
    }

    /// Returns the images of blocks, in order.
    pub fn images(&self) -> Result<Vec<(Block, Image)>> {
        self.read(|view| {
            let mut images = Vec::new();
            view.each(Table::Logged, &[], None, |key, value| {
                images.push(codec::image_of_row(key, value)?);
                Ok(true)
            })?;
            Ok(images)
        })
    }

    /// Returns the checksums of a group of pages of a file that the store has.
    pub fn sums(&self, ino: Ino, group: u64) -> Result<Group> {
        let key = record::sums_key(ino, group);
        let group = self.read(|view| view.get(Table::Sums, &key, codec::sums_of_value))?;
        Ok(group.unwrap_or_default())
    }

    /// Returns the first inode at or after `from` that has extents.
    pub fn next_file(&self, from: Ino) -> Result<Option<Ino>> {
        let key = record::ino_key(from);
        self.read(|view| {
            let mut found = None;
            view.each(Table::Extents, &key, None, |key, _| {
                found = Some(codec::number_of_key(key)?);
                Ok(false)
            })?;
            Ok(found)
        })
    }

    /// Returns a named value.
    pub fn value(&self, name: &str) -> Result<Option<u64>> {
        self.read(|view| {
            view.get(Table::Values, name.as_bytes(), |value| {
                codec::number_of_value(name, value)
            })
        })
    }

    /// Counts the inodes. Reads all of them.
    pub fn inode_count(&self) -> Result<u64> {
        let mut count = 0;
        self.scan(Table::Inodes, |_, _| {
            count += 1;
            true
        })?;
        Ok(count)
    }

    /// Returns the durable bitmap of a container, 64 blocks a word, or `None` if no block of the container is used.
    pub fn bitmap(&self, slice: SliceId, container: u32) -> Result<Option<Box<[u64]>>> {
        let words = self.options.container_blocks as usize / 64;
        let key = tables::container_key(slice, container);
        self.read(|view| {
            view.get(Table::Bitmaps, &key, |value| {
                codec::bitmap_from_bytes(value, words)
            })
        })
    }

    /// Returns the number of blocks in use for each container that has some, by (slice, container).
    pub fn used_counts(&self) -> Result<Vec<((SliceId, u32), u32)>> {
        self.read(|view| {
            let mut counts = Vec::new();
            view.each(Table::Used, &[], None, |key, value| {
                let container = codec::container_of_key(key)?;
                counts.push((container, codec::count_of_value(value)?));
                Ok(true)
            })?;
            Ok(counts)
        })
    }

    /// Returns the raw rows of a table, for fuzzers.
    pub fn raw_rows(&self, table: tables::Table) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let mut rows = vec![];
        self.scan(table, |key, value| {
            rows.push((key.to_vec(), value.to_vec()));
            true
        })?;
        Ok(rows)
    }

    /// Writes raw rows, and removes those without a value, for fuzzers.
    pub fn put_raw_rows(&self, rows: Vec<(tables::Table, Vec<u8>, Option<Vec<u8>>)>) -> Result<()> {
        let rows = rows.into_iter();
        let row = |(table, key, value)| tables::Row { table, key, value };
        self.commit_rows(rows.map(row).collect())
    }

    /// Passes every row of a table to `each`, in order of keys, until it says `false`.
    pub fn scan(
        &self,
        table: tables::Table,
        mut each: impl FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<()> {
        let view = self.view.load_full();
        let scanned = guarded(|| {
            let read = view.each(table, &[], None, |key, value| Ok(each(key, value)));
            read.map_err(|error| match error {
                ReadError::Redb(error) => explain(self.region.as_deref(), error.to_string()),
                ReadError::Damaged(what) => Error::Damaged(what),
            })
        });
        self.check_in_use()?;
        let scanned = scanned.map_err(|error| self.blame(error));
        scanned.inspect_err(|error| {
            self.note_damage(error);
            self.note_unreachable(error);
        })
    }
}

/// Runs code that reads pages of redb. redb panics when pages contradict each other, because it does not verify each page's
/// checksum. Such a panic is damage of the volume, not a bug of this program.
fn guarded<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    guarded_over(None, body)
}

/// Does the same over a region. A panic in the region itself is a bug of this program and is passed on.
fn guarded_over<T>(region: Option<&Region>, body: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        if region.is_some_and(Region::has_panicked) {
            resume_unwind(panic);
        }
        Err(Error::Damaged(
            "the pages of the metadata store contradict each other".into(),
        ))
    })
}

/// Closes a database. Closing writes, so damaged pages can show here too.
fn close_database(db: Option<Database>) -> Result<()> {
    guarded(|| {
        drop(db);
        Ok(())
    })
}

/// Returns the cause of an error of redb: the first error of a device, if a device has failed.
fn explain(region: Option<&Region>, text: String) -> Error {
    match region.and_then(Region::last_error) {
        Some(error) => error,
        None => Error::Store(text),
    }
}

/// Shared handle of a store, and of those that take its place later.
#[derive(Clone)]
pub struct StoreRef(Arc<Appended<Store>>);

impl From<Store> for StoreRef {
    fn from(store: Store) -> StoreRef {
        StoreRef(Arc::new([store].into_iter().collect()))
    }
}

impl StoreRef {
    /// Has all that have this reference use another store from now on. The present one is missing or retired. It stays in memory, because other
    /// threads may use it.
    pub(crate) fn put_back(&self, store: Store) {
        let may_go = self.is_absent() || self.retired.get().is_some();
        assert!(may_go, "only a missing or retired store is replaced");
        self.0.append([store]);
    }
}

impl Deref for StoreRef {
    type Target = Store;

    #[inline]
    fn deref(&self) -> &Store {
        self.0.last().expect("a store")
    }
}

#[cfg(test)]
mod tests;
