//! The metadata region of a store: the bytes that redb works on, spread over chunks of the devices.
//!
//! redb sees one file that it may make longer at any time. The first write to position N of the region (one chunk long) maps the position
//! to a chunk; before that it reads as zeros. Chunks come from a stock of spare ones that the superblock names
//! already, so that mapping one needs neither the allocator nor the store.
//!
//! redb divides its file into *parts* (it calls them regions) and adds one at a time. The file gets no longer than the chunks, mapped
//! and spare, so every page that redb may use has its place. Otherwise redb could choose a page for which there is no chunk, while
//! it has enough free pages elsewhere. By default redb's parts have 4 GiB, and it doubles a file that is
//! smaller: then half of the chunks could be without use. So a new file gets smaller parts (`header`).
//!
//! The region keeps what redb writes in memory until redb asks for a flush. Then it writes the superblock, if chunks were mapped or the
//! length changed, and only then the bytes, in order and in long writes. So no byte of the store is ever on a chunk that the superblock
//! does not name.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use jericho_format::PAGE_BYTES;
use jericho_format::superblock::{CHUNK_SPARE, CHUNKS_MAX, ChunkEntry, Superblock};
use jericho_storage::{Device, IoError};
use jericho_volume::superblocks::Superblocks;
use parking_lot::{Mutex, RwLock};
use redb::StorageBackend;

use crate::error::Error;

const BLOCK: usize = PAGE_BYTES as usize;
/// Chunks of a part.
pub const PART_CHUNKS: u64 = 8;
/// Longest write to a device.
const WRITE_BYTES_MAX: usize = 1 << 20;
/// Most pending blocks. With more, the region writes them to the devices before redb asks for a flush.
const PENDING_BLOCKS_MAX: usize = 8192;

/// Pages of redb's file before the first part.
const HEADER_PAGES: u64 = 1;

/// Where a chunk is.
#[derive(Clone, Copy, Debug)]
struct Place {
    device: u16,
    first_block: u64,
    /// Index in the superblock's chunk table.
    entry: usize,
}

struct State {
    len_bytes: u64,
    /// Whether redb has not written its header yet.
    is_new: bool,
    /// Pages of a part, as in redb's header.
    part_pages: Option<u64>,
    /// Whether the superblock has this length and mapping.
    recorded: bool,
    map: HashMap<u32, Place>,
    spares: Vec<Place>,
    /// Chunks that were mapped since the superblock was written. They hold other bytes until they are zeroed.
    fresh: Vec<Place>,
    /// Positions mapped since `begin_transaction`.
    of_transaction: Vec<u32>,
    /// Blocks that were written but not yet sent to the devices.
    pending: BTreeMap<u64, Box<[u8; BLOCK]>>,
}

/// The metadata region of a store of an open volume.
pub struct Region {
    devices: Vec<Arc<dyn Device>>,
    superblocks: Arc<Superblocks>,
    /// Index of the store: which chunks are its own.
    store: usize,
    /// The device of the store's journal. Its superblock must have each change that concerns the store.
    first_device: u16,
    chunk_blocks: u64,
    state: RwLock<State>,
    /// Held by a thread that changes bytes, so that no two threads write a block at once.
    writing: Mutex<()>,
    full: AtomicBool,
    error: Mutex<Option<Error>>,
    has_panicked: AtomicBool,
    /// Why the region reads and writes nothing any more.
    closed: OnceLock<IoError>,
}

/// Held while redb calls the region; records a panic in the region's code.
struct Called<'a>(&'a Region);

impl Drop for Called<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.has_panicked.store(true, Ordering::Release);
        }
    }
}

impl Region {
    /// Holds all locks of the region until the returned value is dropped.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn hold_all(&self) -> impl Sized {
        (self.writing.lock(), self.state.write(), self.error.lock())
    }

    /// Returns whether code of the region or of a device has panicked in a call of redb.
    pub(super) fn has_panicked(&self) -> bool {
        self.has_panicked.load(Ordering::Acquire)
    }

    /// Returns the region of a store that the superblock describes. `devices` are those of the volume. `store` is the index of the store.
    pub fn new(
        devices: Vec<Arc<dyn Device>>,
        superblocks: Arc<Superblocks>,
        store: usize,
    ) -> Arc<Region> {
        let (state, chunk_blocks, first_device) = superblocks.with(|s| {
            let slice = &s.slices[store];
            let mut state = State {
                len_bytes: u64::from(slice.store_blocks.get()) * PAGE_BYTES,
                is_new: slice.store_blocks.get() == 0,
                part_pages: None,
                recorded: true,
                map: HashMap::new(),
                spares: Vec::new(),
                fresh: Vec::new(),
                of_transaction: Vec::new(),
                pending: BTreeMap::new(),
            };
            let own = |(_, chunk): &(usize, &ChunkEntry)| s.store_of(chunk) == store;
            for (entry, chunk) in s.chunks.iter().enumerate().filter(own) {
                let place = Place {
                    device: chunk.device.get(),
                    first_block: chunk.first_block.get(),
                    entry,
                };
                match chunk.position.get() {
                    CHUNK_SPARE => state.spares.push(place),
                    position => drop(state.map.insert(position, place)),
                }
            }
            // Spares are taken from the end, so this takes the first chunk of the table first.
            state.spares.reverse();
            let first_device = s.first_device_of(slice).unwrap_or(0);
            (state, u64::from(s.head.chunk_blocks.get()), first_device)
        });
        Arc::new(Region {
            devices,
            superblocks,
            store,
            first_device,
            chunk_blocks,
            state: RwLock::new(state),
            writing: Mutex::new(()),
            full: AtomicBool::new(false),
            error: Mutex::new(None),
            has_panicked: AtomicBool::new(false),
            closed: OnceLock::new(),
        })
    }

    /// Has all reads and writes fail with this error from now on. When the call returns, no write is in progress.
    pub(super) fn close(&self, error: IoError) {
        let _writing = self.writing.lock();
        let _ = self.closed.set(error);
        self.state.write().pending.clear();
    }

    /// Fails after `close`.
    fn check_open(&self) -> Result<(), IoError> {
        self.closed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Returns the bytes of a chunk.
    pub fn chunk_bytes(&self) -> u64 {
        self.chunk_blocks * PAGE_BYTES
    }

    /// Returns the number of blocks of a chunk.
    pub fn chunk_blocks(&self) -> u64 {
        self.chunk_blocks
    }

    /// Returns the number of chunks of the region, mapped or spare.
    pub fn chunks(&self) -> usize {
        let state = self.state.read();
        state.map.len() + state.spares.len()
    }

    /// Returns the length that redb has given the region.
    pub fn len_bytes(&self) -> u64 {
        self.state.read().len_bytes
    }

    /// Returns the number of pages that redb may use at present.
    pub fn pages(&self) -> u64 {
        let state = self.state.read();
        match self.has_own_parts(&state) {
            true => (state.len_bytes / PAGE_BYTES).saturating_sub(HEADER_PAGES),
            false => state.map.len() as u64 * self.chunk_blocks,
        }
    }

    /// Returns the number of pages that redb can add.
    pub fn spare_pages(&self) -> u64 {
        let state = self.state.read();
        if !self.has_own_parts(&state) {
            return state.spares.len() as u64 * self.chunk_blocks;
        }
        let chunks = (state.map.len() + state.spares.len()) as u64;
        let pages = (chunks * self.chunk_blocks).saturating_sub(HEADER_PAGES);
        let part = self.part_pages();
        (pages / part * part + HEADER_PAGES).saturating_sub(state.len_bytes / PAGE_BYTES)
    }

    /// Returns the pages of a part of a new file. redb's header and the first part are as long as `PART_CHUNKS` chunks.
    fn part_pages(&self) -> u64 {
        PART_CHUNKS * self.chunk_blocks - HEADER_PAGES
    }

    /// Returns whether redb's parts have `part_pages` pages. In a file of an earlier version they have more.
    fn has_own_parts(&self, state: &State) -> bool {
        state.part_pages == Some(self.part_pages())
    }

    /// Fails with ENOSPC if there are too few chunks for a file of this length. The caller holds the state.
    fn check_len(&self, state: &State, len: u64) -> io::Result<()> {
        let chunks = (state.map.len() + state.spares.len()) as u64;
        if !self.has_own_parts(state)
            || len <= state.len_bytes
            || len <= chunks * self.chunk_bytes()
        {
            return Ok(());
        }
        self.full.store(true, Ordering::Release);
        Err(io::Error::from_raw_os_error(28))
    }

    /// Returns the number of chunks that can still be entered in the superblock's table.
    pub fn free_entries(&self) -> usize {
        self.superblocks.with(|s| CHUNKS_MAX - s.chunks.len())
    }

    /// Adds spare chunks, durably. The entries' position is `CHUNK_SPARE`. Returns how many of them the superblock's table has room for,
    /// because other stores and an addition of a device may have taken entries since `free_entries`.
    pub fn add_spares(&self, mut entries: &[ChunkEntry]) -> Result<usize, IoError> {
        let _writing = self.writing.lock();
        self.check_open()?;
        let mut first = 0;
        self.superblocks.update(&[self.first_device], |s| {
            first = s.chunks.len();
            entries = &entries[..entries.len().min(CHUNKS_MAX - first)];
            s.chunks.extend_from_slice(entries);
        })?;
        let mut state = self.state.write();
        for (at, chunk) in entries.iter().enumerate() {
            state.spares.insert(
                0,
                Place {
                    device: chunk.device.get(),
                    first_block: chunk.first_block.get(),
                    entry: first + at,
                },
            );
        }
        Ok(entries.len())
    }

    /// Allocates a chunk's space on the host of its device, where that is possible.
    pub fn provision(&self, chunk: &ChunkEntry) -> Result<(), IoError> {
        let offset_bytes = chunk.first_block.get() * PAGE_BYTES;
        let device = self.device(chunk.device.get());
        match device.provision(offset_bytes, self.chunk_bytes()) {
            Err(error) if error.is_unsupported() => Ok(()),
            other => other,
        }
    }

    /// Calls `provision` for all chunks, because the volume's file may be a sparse copy.
    pub fn provision_all(&self) -> Result<(), IoError> {
        let own = |s: &Superblock| {
            let chunks = s.chunks.iter();
            let own = chunks.filter(|chunk| s.store_of(chunk) == self.store);
            own.cloned().collect::<Vec<_>>()
        };
        let chunks = self.superblocks.with(own);
        chunks.iter().try_for_each(|chunk| self.provision(chunk))
    }

    /// Notes that a transaction begins. Forgets earlier writes that found no chunk: redb tries some writes early and ignores their failure.
    pub fn begin_transaction(&self) {
        self.full.store(false, Ordering::Release);
        self.state.write().of_transaction.clear();
    }

    /// Returns whether a write found no chunk since `begin_transaction`. If so, undoes what the transaction did to the region.
    pub fn take_full(&self) -> bool {
        let full = self.full.swap(false, Ordering::AcqRel);
        if full {
            // redb has dropped the transaction, so the region drops its bytes and chunks. The chunks may be at positions that the next
            // transaction does not use.
            let _writing = self.writing.lock();
            let mut state = self.state.write();
            state.pending.clear();
            state.fresh.clear();
            for position in std::mem::take(&mut state.of_transaction) {
                let place = state.map.remove(&position);
                state.spares.extend(place);
                state.recorded = false;
            }
        }
        full
    }

    /// Returns the first error of a device since the region was opened; not that of a host that did not answer, if there is another one.
    pub fn last_error(&self) -> Option<Error> {
        self.error.lock().clone()
    }

    fn failed(&self, error: IoError) -> io::Error {
        let text = error.to_string();
        Error::Io(error).note_in(&mut self.error.lock());
        io::Error::other(text)
    }

    /// Returns the device of a block of the region, and the number of the block on the device, or `None` if the block is not mapped.
    fn place(&self, state: &State, block: u64) -> Option<(u16, u64)> {
        let position = u32::try_from(block / self.chunk_blocks).ok()?;
        let place = state.map.get(&position)?;
        Some((place.device, place.first_block + block % self.chunk_blocks))
    }

    fn device(&self, index: u16) -> &dyn Device {
        // The superblock was validated against the device table.
        &*self.devices[usize::from(index)]
    }

    /// Reads whole blocks: the bytes on the devices, and pending blocks over them.
    fn read_blocks(&self, state: &State, first: u64, out: &mut [u8]) -> Result<(), IoError> {
        self.check_open()?;
        let blocks = (out.len() / BLOCK) as u64;
        let mut done = 0;
        while done < blocks {
            let at = first + done;
            let run = (self.chunk_blocks - at % self.chunk_blocks).min(blocks - done);
            let part = &mut out[done as usize * BLOCK..(done + run) as usize * BLOCK];
            let all_pending = state.pending.range(at..at + run).count() as u64 == run;
            match self.place(state, at) {
                Some((device, block)) if !all_pending => {
                    self.device(device).read_at(block * PAGE_BYTES, part)?;
                }
                _ => part.fill(0),
            }
            done += run;
        }
        for (block, bytes) in state.pending.range(first..first + blocks) {
            let at = (block - first) as usize * BLOCK;
            out[at..at + BLOCK].copy_from_slice(&bytes[..]);
        }
        Ok(())
    }

    /// Maps the position of a block to a spare chunk before the first write there. Fails if there is no spare.
    fn map_block(&self, state: &mut State, block: u64) -> io::Result<()> {
        let position = u32::try_from(block / self.chunk_blocks)
            .ok()
            .filter(|position| *position != CHUNK_SPARE)
            .ok_or_else(|| io::Error::other("the metadata region cannot be that long"))?;
        if state.map.contains_key(&position) {
            return Ok(());
        }
        let Some(place) = state.spares.pop() else {
            self.full.store(true, Ordering::Release);
            return Err(io::Error::from_raw_os_error(28));
        };
        state.map.insert(position, place);
        state.fresh.push(place);
        state.of_transaction.push(position);
        state.recorded = false;
        Ok(())
    }

    /// Writes the pending blocks to the devices. The caller holds `writing`.
    fn drain(&self) -> Result<(), IoError> {
        self.check_open()?;
        self.record()?;
        // Readers go on meanwhile. They find the bytes in `pending` until the devices have them.
        let state = self.state.read();
        let mut run: Vec<u8> = Vec::new();
        let mut run_at = (0, 0);
        for (block, bytes) in &state.pending {
            let Some((device, at)) = self.place(&state, *block) else {
                continue; // never: a pending block was mapped when it was written
            };
            let run_end = (run_at.0, run_at.1 + (run.len() / BLOCK) as u64);
            if !run.is_empty() && ((device, at) != run_end || run.len() >= WRITE_BYTES_MAX) {
                self.device(run_at.0)
                    .write_at(run_at.1 * PAGE_BYTES, &run)?;
                run.clear();
            }
            if run.is_empty() {
                run_at = (device, at);
            }
            run.extend_from_slice(&bytes[..]);
        }
        if !run.is_empty() {
            self.device(run_at.0)
                .write_at(run_at.1 * PAGE_BYTES, &run)?;
        }
        drop(state);
        self.state.write().pending.clear();
        Ok(())
    }

    /// Makes length and mapping durable, if they changed. Zeroes fresh chunks before, because they may hold bytes of a file. The caller
    /// holds `writing`.
    fn record(&self) -> Result<(), IoError> {
        self.check_open()?;
        let (fresh, len_bytes, map) = {
            let state = self.state.read();
            if state.recorded {
                return Ok(());
            }
            (state.fresh.clone(), state.len_bytes, state.map.clone())
        };
        if !fresh.is_empty() {
            let zeros = vec![0; WRITE_BYTES_MAX.min(self.chunk_bytes() as usize)];
            for place in &fresh {
                let mut done = 0;
                while done < self.chunk_bytes() {
                    let run = (zeros.len() as u64).min(self.chunk_bytes() - done);
                    let offset = place.first_block * PAGE_BYTES + done;
                    self.device(place.device)
                        .write_at(offset, &zeros[..run as usize])?;
                    done += run;
                }
            }
        }
        let store_blocks = (len_bytes / PAGE_BYTES) as u32;
        self.superblocks.update(&[self.first_device], |s| {
            s.slices[self.store].store_blocks.set(store_blocks);
            for at in 0..s.chunks.len() {
                if s.store_of(&s.chunks[at]) == self.store {
                    s.chunks[at].position.set(CHUNK_SPARE);
                }
            }
            for (position, place) in &map {
                s.chunks[place.entry].position.set(*position);
            }
        })?;
        let mut state = self.state.write();
        state.recorded = true;
        state.fresh.clear();
        Ok(())
    }

    fn flush_devices(&self) -> Result<(), IoError> {
        // Flushes every device with a chunk of the store: there are few, and the flush of a clean device is cheap.
        let used: Vec<bool> = {
            let state = self.state.read();
            let mut used = vec![false; self.devices.len()];
            for place in state.map.values() {
                used[usize::from(place.device)] = true;
            }
            used
        };
        for (device, _) in self.devices.iter().zip(used).filter(|(_, used)| *used) {
            device.flush()?;
        }
        Ok(())
    }
}

/// The header of redb's file, as `docs/design.md` of redb describes it for format 3.
mod header {
    /// The header's first bytes. redb writes them last.
    const MAGIC: [u8; 9] = *b"redb\x1a\x0a\xa9\x0d\x0a";
    /// Bytes of the header with the number of pages of a part (little-endian). No checksum covers them.
    const PARTS: std::ops::Range<usize> = 20..24;

    /// Returns the pages of a part, or `None` if the bytes are no whole header.
    pub fn parts(bytes: &[u8]) -> Option<u32> {
        let is_header = bytes.starts_with(&MAGIC);
        let field = bytes.get(PARTS)?;
        is_header.then(|| u32::from_le_bytes([field[0], field[1], field[2], field[3]]))
    }

    /// Returns a header with another size of the parts, or `None` if the bytes are no header.
    pub fn with_parts(bytes: &[u8], pages: u32) -> Option<Vec<u8>> {
        let mut header = bytes.to_vec();
        header.get_mut(PARTS)?.copy_from_slice(&pages.to_le_bytes());
        Some(header)
    }
}

/// `Region` as redb's storage.
pub(super) struct Backend(pub(super) Arc<Region>);

impl fmt::Debug for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "metadata region of {} bytes",
            self.0.state.read().len_bytes
        )
    }
}

fn beyond_end() -> io::Error {
    io::Error::new(
        io::ErrorKind::UnexpectedEof,
        "beyond the end of the metadata region",
    )
}

impl StorageBackend for Backend {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.state.read().len_bytes)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let region = &*self.0;
        let _called = Called(region);
        let state = region.state.read();
        let end = offset
            .checked_add(out.len() as u64)
            .ok_or_else(beyond_end)?;
        if end > state.len_bytes {
            return Err(beyond_end());
        }
        let (first, last) = (offset / PAGE_BYTES, end.div_ceil(PAGE_BYTES));
        let result = if offset.is_multiple_of(PAGE_BYTES) && end.is_multiple_of(PAGE_BYTES) {
            region.read_blocks(&state, first, out)
        } else {
            let mut whole = vec![0; (last - first) as usize * BLOCK];
            region.read_blocks(&state, first, &mut whole).map(|()| {
                let skip = (offset - first * PAGE_BYTES) as usize;
                out.copy_from_slice(&whole[skip..skip + out.len()]);
            })
        };
        drop(state);
        result.map_err(|e| region.failed(e))?;
        if offset == 0
            && let Some(pages) = header::parts(out)
        {
            let mut state = region.state.write();
            // redb has read a whole header, so it knows the size of the parts.
            state.is_new = false;
            state.part_pages = Some(pages.into());
        }
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let region = &*self.0;
        let _called = Called(region);
        let is_possible = len.is_multiple_of(PAGE_BYTES) && len / PAGE_BYTES <= u32::MAX.into();
        if !is_possible {
            let text = format!("the metadata store cannot have {len} bytes");
            return Err(io::Error::other(text));
        }
        let _writing = region.writing.lock();
        {
            let mut guard = region.state.write();
            let state = &mut *guard;
            region.check_len(state, len)?;
            if len < state.len_bytes {
                let end_block = len.div_ceil(PAGE_BYTES);
                drop(state.pending.split_off(&end_block));
                let end_position = len.div_ceil(region.chunk_bytes());
                let beyond: Vec<u32> = state
                    .map
                    .keys()
                    .copied()
                    .filter(|p| u64::from(*p) >= end_position)
                    .collect();
                for position in beyond {
                    state.spares.extend(state.map.remove(&position));
                }
                // The rest of the last chunk must read as zeros if the region grows again.
                let last_block = end_position * region.chunk_blocks;
                for block in end_block..last_block {
                    if region.place(state, block).is_some() {
                        state.pending.insert(block, Box::new([0; BLOCK]));
                    }
                }
            }
            state.len_bytes = len;
            state.recorded = false;
        }
        region.record().map_err(|e| region.failed(e))
    }

    fn sync_data(&self) -> io::Result<()> {
        let region = &*self.0;
        let _called = Called(region);
        let _writing = region.writing.lock();
        region
            .drain()
            .and_then(|()| region.flush_devices())
            .map_err(|e| region.failed(e))
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let region = &*self.0;
        let _called = Called(region);
        let _writing = region.writing.lock();
        let mut guard = region.state.write();
        let state = &mut *guard;
        let end = offset
            .checked_add(data.len() as u64)
            .ok_or_else(beyond_end)?;
        if end > state.len_bytes {
            return Err(beyond_end());
        }
        let own_header = (offset == 0 && state.is_new)
            .then(|| header::with_parts(data, region.part_pages() as u32))
            .flatten();
        let data = own_header.as_deref().unwrap_or(data);
        let mut at = offset;
        while at < end {
            let block = at / PAGE_BYTES;
            region.map_block(state, block)?;
            let skip = (at % PAGE_BYTES) as usize;
            let count = (BLOCK - skip).min((end - at) as usize);
            let from = &data[(at - offset) as usize..][..count];
            if count < BLOCK && !state.pending.contains_key(&block) {
                let mut old = Box::new([0; BLOCK]);
                region
                    .read_blocks(state, block, &mut old[..])
                    .map_err(|e| region.failed(e))?;
                state.pending.insert(block, old);
            }
            let bytes = state
                .pending
                .entry(block)
                .or_insert_with(|| Box::new([0; BLOCK]));
            bytes[skip..skip + count].copy_from_slice(from);
            at += count as u64;
        }
        let too_many = state.pending.len() > PENDING_BLOCKS_MAX;
        drop(guard);
        if too_many {
            region.drain().map_err(|e| region.failed(e))?;
        }
        Ok(())
    }
}
