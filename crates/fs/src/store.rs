//! The metadata store: redb tables in the volume's metadata region, changed by batches.
//!
//! A batch is one redb transaction: after a crash all of it is there or none of it. Reads see the
//! last committed batch only; what is newer is the namespace's business (its overlay).

pub(crate) mod batch;
pub(crate) mod codec;
mod records;
pub mod region;
pub mod tables;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use arc_swap::ArcSwap;
use jericho_format::record;
use parking_lot::Mutex;
use redb::{Database, ReadableDatabase, ReadableTableMetadata, StorageBackend, TableError};

pub use self::records::{Change, Entry, Extent, InodeRecord};
use self::region::Region;
use self::tables::{BITMAPS, BytesTable, ENTRIES, EXTENTS, INODES, ORPHANS, USED, VALUES, XATTRS};
use crate::error::{Error, Result};
use crate::types::{Ino, Kind, SliceId};

/// How a store is opened.
#[derive(Clone, Copy, Debug)]
pub struct StoreOptions {
    /// Memory for cached pages of the store, in bytes.
    pub cache_bytes: usize,
    /// Blocks of a container (a multiple of 64), of the volume's superblock.
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

/// One consistent state of the tables for readers; replaced after every commit.
struct Snapshot {
    inodes: BytesTable,
    entries: BytesTable,
    extents: BytesTable,
    xattrs: BytesTable,
    bitmaps: BytesTable,
    used: BytesTable,
    orphans: BytesTable,
    values: BytesTable,
}

impl Snapshot {
    fn take(db: &Database) -> Result<Snapshot> {
        let txn = db.begin_read().map_err(|e| Error::Store(e.to_string()))?;
        let open = |definition| {
            txn.open_table(definition)
                .map_err(|e: TableError| Error::Store(e.to_string()))
        };
        Ok(Snapshot {
            inodes: open(INODES)?,
            entries: open(ENTRIES)?,
            extents: open(EXTENTS)?,
            xattrs: open(XATTRS)?,
            bitmaps: open(BITMAPS)?,
            used: open(USED)?,
            orphans: open(ORPHANS)?,
            values: open(VALUES)?,
        })
    }
}

/// What the writer owns.
struct Writer {
    /// `None` only while it is being opened again.
    db: Option<Database>,
    /// The error that ended this store's life.
    failed: Option<Error>,
}

impl Drop for Writer {
    fn drop(&mut self) {
        if let Err(error) = close_database(self.db.take()) {
            tracing::error!("closing the metadata store: {error}");
        }
    }
}

/// What is done before a batch is committed.
pub trait BeforeCommit: Send + Sync {
    /// Prepares for `changes`, which may add `bytes` bytes to the metadata region: makes chunks
    /// ready as far as there is space. An error fails the batch before anything is written.
    fn before_commit(&self, region: Option<&Region>, changes: &[Change], bytes: u64) -> Result<()>;
}

/// The store of an open volume. Thread-safe.
pub struct Store {
    writer: Mutex<Writer>,
    snapshot: ArcSwap<Snapshot>,
    /// `None`: the store is in memory.
    region: Option<Arc<Region>>,
    before_commit: Mutex<Option<Box<dyn BeforeCommit>>>,
    room: batch::Room,
    options: StoreOptions,
    writable: bool,
}

impl Store {
    /// A store in memory, for tests of what uses a store. `container_blocks` is a multiple of 64.
    pub fn in_memory(container_blocks: u32) -> Result<Store> {
        let options = StoreOptions {
            container_blocks,
            ..StoreOptions::default()
        };
        Store::over(redb::backends::InMemoryBackend::new(), None, options, true)
    }

    /// Opens the store of a volume, repairing it when the last writer died. With `writable` false
    /// batches are refused (EROFS); the repair is still written, so give a region over an overlay.
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
                .set_cache_size(options.cache_bytes)
                .create_with_backend(backend)
                .map_err(|e| explain(e.to_string()))?;
            if writable {
                batch::create_tables(&db).map_err(explain)?;
            }
            let snapshot = Snapshot::take(&db)?;
            Ok((db, snapshot))
        })?;
        Ok(Store {
            writer: Mutex::new(Writer {
                db: Some(db),
                failed: None,
            }),
            snapshot: ArcSwap::from_pointee(snapshot),
            region,
            before_commit: Mutex::new(None),
            room: batch::Room::default(),
            options,
            writable,
        })
    }

    /// Blocks of a container: the unit of the durable bitmaps.
    pub fn container_blocks(&self) -> u32 {
        self.options.container_blocks
    }

    /// The metadata region under the store, if it is not in memory.
    pub fn region(&self) -> Option<&Arc<Region>> {
        self.region.as_ref()
    }

    /// Sets what is done before a batch; the allocator sets itself.
    pub(crate) fn set_before_commit(&self, before_commit: Box<dyn BeforeCommit>) {
        *self.before_commit.lock() = Some(before_commit);
    }

    /// Applies a batch and makes it durable. On error nothing of the batch is there. After
    /// `Errno(ENOSPC)` (the metadata region cannot grow) and `Damaged` (the batch contradicts the
    /// bitmaps) the store goes on; any other error is sticky: further batches get it again.
    pub fn commit(&self, changes: &[Change]) -> Result<()> {
        if changes.is_empty() {
            return Ok(());
        }
        self.commit_operations(changes, batch::prepare(changes))
    }

    /// Closes the store: what redb keeps for a quick opening is written now and not when the last
    /// reference goes, which may be after somebody else has opened the volume. Further batches are refused.
    /// Reports an error that a device met in the store's life.
    pub fn close(&self) -> Result<()> {
        let mut writer = self.writer.lock();
        let closed = || Error::Store("the store is closed".into());
        writer.failed.get_or_insert_with(closed);
        let closed = close_database(writer.db.take());
        let region = self.region.as_ref();
        match region.and_then(|region| region.last_error()) {
            Some(error) => Err(error),
            None => closed,
        }
    }

    /// Changes rows as such, for repairs; durable like `commit`.
    pub(crate) fn commit_rows(&self, rows: Vec<batch::Row>) -> Result<()> {
        self.commit_operations(&[], batch::Operations::new(rows, Vec::new()))
    }

    /// Whether redb finds its own pages in order. Damage that it can undo is undone; damage that it
    /// cannot is an error. Opens and closes the region.
    pub(crate) fn verify(region: &Arc<Region>) -> Result<bool> {
        let explain = |text: String| explain(Some(region), text);
        guarded(|| {
            let mut db = redb::Builder::new()
                .set_cache_size(64 << 20)
                .create_with_backend(region::Backend(region.clone()))
                .map_err(|e| explain(e.to_string()))?;
            db.check_integrity().map_err(|e| explain(e.to_string()))
        })
    }

    fn commit_operations(&self, changes: &[Change], operations: batch::Operations) -> Result<()> {
        if !self.writable {
            return Err(Error::Errno(30)); // EROFS
        }
        let mut writer = self.writer.lock();
        if let Some(error) = &writer.failed {
            return Err(error.clone());
        }
        let mapped_bytes = self.region.as_ref().map_or(0, |r| r.mapped_bytes());
        let mut room_bytes = batch::estimate_bytes(&operations, mapped_bytes);
        let mut chunks = None;
        loop {
            self.make_ready(changes, room_bytes)?;
            // Tried once more with twice the room, as long as there is more room to be had.
            let now = self.region.as_ref().map(|r| r.chunks());
            if chunks.is_some() && chunks == now {
                self.room.none_left();
                return Err(Error::Errno(28));
            }
            chunks = now;
            let Some(db) = writer.db.as_ref() else {
                return Err(Error::Store("the store is closed".into()));
            };
            if let Some(region) = &self.region {
                region.clear_full();
            }
            let apply = || Ok(batch::apply(db, &operations, self.options.container_blocks));
            let result = guarded_over(self.region.as_deref(), apply).inspect_err(|error| {
                tracing::error!("metadata store: {error}; no more changes are accepted");
                writer.failed = Some(error.clone());
            });
            match result? {
                Ok(()) => break,
                Err(batch::Failure::Damaged(what)) => return Err(Error::Damaged(what)),
                Err(batch::Failure::Store(text)) => {
                    let full = self.region.as_ref().is_some_and(|r| r.take_full());
                    if !full {
                        let error = explain(self.region.as_deref(), text);
                        tracing::error!("metadata store: {error}; no more changes are accepted");
                        writer.failed = Some(error.clone());
                        return Err(error);
                    }
                    // redb latches the failed write; what it had committed is on the device, so
                    // opening it again goes back to there.
                    if let Err(error) = self.reopen(&mut writer) {
                        writer.failed = Some(error.clone());
                        return Err(error);
                    }
                    room_bytes = room_bytes.saturating_mul(2);
                }
            }
        }
        let db = writer
            .db
            .as_ref()
            .ok_or_else(|| Error::Store("the store is closed".into()))?;
        match guarded_over(self.region.as_deref(), || Snapshot::take(db)) {
            Ok(snapshot) => self.snapshot.store(Arc::new(snapshot)),
            // The batch is durable but cannot be seen: nothing that is built on it may go on.
            Err(error) => {
                writer.failed = Some(error.clone());
                return Err(error);
            }
        }
        self.room.account(changes);
        Ok(())
    }

    /// Before something is created: ENOSPC when the metadata region has no room for it. Batches that
    /// remove things still get through then, as a reserve is kept for them.
    pub fn check_room(&self) -> Result<()> {
        let Some(region) = &self.region else {
            return Ok(());
        };
        if region.has_reserve() {
            return self.room.check(region);
        }
        // A large batch may have taken the spare chunks a moment ago: once it is done there may well be
        // space for new ones.
        let _writer = self.writer.lock();
        if !region.has_reserve() {
            let refilled = self.make_ready(&[], 0);
            refilled.or_else(|error| {
                if error.errno() == 28 {
                    Ok(())
                } else {
                    Err(error)
                }
            })?;
        }
        self.room.check(region)
    }

    fn make_ready(&self, changes: &[Change], bytes: u64) -> Result<()> {
        match &*self.before_commit.lock() {
            Some(before) => before.before_commit(self.region.as_deref(), changes, bytes),
            None => Ok(()),
        }
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
                .set_cache_size(self.options.cache_bytes)
                .create_with_backend(region::Backend(region.clone()))
                .map_err(|e| explain(Some(region), e.to_string()))?;
            self.snapshot.store(Arc::new(Snapshot::take(&db)?));
            writer.db = Some(db);
            Ok(())
        })
    }

    /// Runs a read. One that fails is tried again when the snapshot was replaced meanwhile (the
    /// store was opened again after it ran out of space).
    fn read<T>(
        &self,
        read: impl Fn(&Snapshot) -> std::result::Result<T, tables::ReadError>,
    ) -> Result<T> {
        let mut snapshot = self.snapshot.load_full();
        loop {
            let error = match guarded(|| Ok(read(&snapshot)))? {
                Ok(value) => return Ok(value),
                Err(tables::ReadError::Damaged(what)) => return Err(Error::Damaged(what)),
                Err(tables::ReadError::Redb(error)) => error,
            };
            let newer = self.snapshot.load_full();
            if Arc::ptr_eq(&snapshot, &newer) {
                return Err(explain(self.region.as_deref(), error.to_string()));
            }
            snapshot = newer;
        }
    }

    /// An inode.
    pub fn inode(&self, ino: Ino) -> Result<Option<InodeRecord>> {
        self.read(|s| match s.inodes.get(&record::ino_key(ino)[..])? {
            Some(value) => Ok(Some(codec::inode_from_bytes(ino, value.value())?)),
            None => Ok(None),
        })
    }

    /// A directory's entry.
    pub fn entry(&self, dir: Ino, hash: u64, name: &[u8]) -> Result<Option<(Ino, Kind)>> {
        let key = record::entry_key(dir, hash, name);
        self.read(|s| match s.entries.get(&key[..])? {
            Some(value) => Ok(Some(codec::entry_from_bytes(dir, value.value())?)),
            None => Ok(None),
        })
    }

    /// Entries of a directory in order of (hash, name) with hash >= `from`, at most `limit`, but never
    /// ending between two entries of one hash.
    pub fn entries(&self, dir: Ino, from: u64, limit: usize) -> Result<Vec<Entry>> {
        self.read(|s| {
            let first = record::pair_key(dir, from);
            let end = record::ino_key(dir + 1);
            let mut entries: Vec<Entry> = Vec::new();
            for item in s.entries.range::<&[u8]>(&first[..]..&end[..])? {
                let (key, value) = item?;
                let entry = codec::entry_of_row(key.value(), value.value())?;
                if entries.len() >= limit && entries.last().is_none_or(|e| e.hash != entry.hash) {
                    break;
                }
                entries.push(entry);
            }
            Ok(entries)
        })
    }

    /// All extents of a file, in order.
    pub fn extents(&self, ino: Ino) -> Result<Vec<Extent>> {
        self.read(|s| {
            let (first, end) = (record::ino_key(ino), record::ino_key(ino + 1));
            let mut extents = Vec::new();
            for item in s.extents.range::<&[u8]>(&first[..]..&end[..])? {
                let (key, value) = item?;
                extents.push(codec::extent_of_row(key.value(), value.value())?.1);
            }
            Ok(extents)
        })
    }

    /// An extended attribute.
    pub fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Option<Box<[u8]>>> {
        let key = record::xattr_key(ino, name);
        self.read(|s| Ok(s.xattrs.get(&key[..])?.map(|v| v.value().into())))
    }

    /// Names of extended attributes.
    pub fn xattr_names(&self, ino: Ino) -> Result<Vec<Box<[u8]>>> {
        self.read(|s| {
            let (first, end) = (record::ino_key(ino), record::ino_key(ino + 1));
            let mut names = Vec::new();
            for item in s.xattrs.range::<&[u8]>(&first[..]..&end[..])? {
                let (key, _) = item?;
                names.push(key.value().get(8..).unwrap_or_default().into());
            }
            Ok(names)
        })
    }

    /// Inodes that were open without a name when the volume was last written.
    pub fn orphans(&self) -> Result<Vec<Ino>> {
        self.read(|s| {
            let mut inodes = Vec::new();
            for item in s.orphans.range::<&[u8]>(..)? {
                inodes.push(codec::number_of_key(item?.0.value())?);
            }
            Ok(inodes)
        })
    }

    /// A named value.
    pub fn value(&self, name: &str) -> Result<Option<u64>> {
        self.read(|s| match s.values.get(name.as_bytes())? {
            Some(value) => Ok(Some(codec::number_of_value(name, value.value())?)),
            None => Ok(None),
        })
    }

    /// Inode numbers in use, in order from `from`, at most `limit` (to rebuild the number allocator).
    pub fn inode_numbers(&self, from: Ino, limit: usize) -> Result<Vec<Ino>> {
        self.read(|s| {
            let mut inodes = Vec::new();
            for item in s
                .inodes
                .range::<&[u8]>(&record::ino_key(from)[..]..)?
                .take(limit)
            {
                inodes.push(codec::number_of_key(item?.0.value())?);
            }
            Ok(inodes)
        })
    }

    /// Number of inodes.
    pub fn inode_count(&self) -> Result<u64> {
        self.read(|s| Ok(s.inodes.len()?))
    }

    /// The durable bitmap of a container, 64 blocks a word; `None` when no block of it is used.
    pub fn bitmap(&self, slice: SliceId, container: u32) -> Result<Option<Box<[u64]>>> {
        let words = self.options.container_blocks as usize / 64;
        self.read(|s| {
            match s
                .bitmaps
                .get(&tables::container_key(slice, container)[..])?
            {
                Some(value) => Ok(Some(codec::bitmap_from_bytes(value.value(), words)?)),
                None => Ok(None),
            }
        })
    }

    /// Blocks in use in each container of which some are, by (slice, container).
    pub fn used_counts(&self) -> Result<Vec<((SliceId, u32), u32)>> {
        self.read(|s| {
            let mut counts = Vec::new();
            for item in s.used.range::<&[u8]>(..)? {
                let (key, value) = item?;
                let container = codec::container_of_key(key.value())?;
                counts.push((container, codec::count_of_value(value.value())?));
            }
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
        let row = |(table, key, value)| batch::Row { table, key, value };
        self.commit_rows(rows.map(row).collect())
    }

    /// Passes every row of a table to `each`, in order of keys, until it says `false`.
    pub(crate) fn scan(
        &self,
        table: tables::Table,
        mut each: impl FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<()> {
        let snapshot = self.snapshot.load_full();
        let table = match table {
            tables::Table::Inodes => &snapshot.inodes,
            tables::Table::Entries => &snapshot.entries,
            tables::Table::Extents => &snapshot.extents,
            tables::Table::Xattrs => &snapshot.xattrs,
            tables::Table::Bitmaps => &snapshot.bitmaps,
            tables::Table::Used => &snapshot.used,
            tables::Table::Orphans => &snapshot.orphans,
            tables::Table::Values => &snapshot.values,
        };
        let explain = |e: redb::StorageError| explain(self.region.as_deref(), e.to_string());
        guarded(|| {
            for item in table.range::<&[u8]>(..).map_err(explain)? {
                let (key, value) = item.map_err(explain)?;
                if !each(key.value(), value.value()) {
                    break;
                }
            }
            Ok(())
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
            "the pages of the metadata store contradict each other; run jericho check".into(),
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

/// The cause of an error of redb: the device's own words where it was a device.
fn explain(region: Option<&Region>, text: String) -> Error {
    match region.and_then(Region::last_error) {
        Some(error) => error,
        None => Error::Store(text),
    }
}

/// Shared handle.
pub type StoreRef = Arc<Store>;

#[cfg(test)]
mod tests;
