//! Runs kinds of replacement over traces, in a model of a slice: its table, epochs and watermarks, without bytes and threads.
//!
//! The model's pages are never dirty or latched: each resident page can be evicted.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ops::Range;

use foldhash::{HashMap, HashMapExt};
use jericho_cache::replacement::{Replacement, Residents, VICTIMS_AT_ONCE};
use jericho_shm::Key;

use super::trace::{Access, AccessKind};

/// The table of the model.
pub struct ModelTable {
    pages: Vec<Option<Access>>,
    last_use: Vec<Cell<u8>>,
    epoch: u8,
}

impl Residents for ModelTable {
    type Seen = ();

    fn entries(&self) -> u32 {
        self.pages.len() as u32
    }

    fn epoch(&self) -> u8 {
        self.epoch
    }

    fn idle(&self, entry: u32) -> Option<()> {
        self.pages[entry as usize].map(|_| ())
    }

    fn last_use(&self, entry: u32) -> u8 {
        self.last_use[entry as usize].get()
    }

    fn set_last_use(&self, entry: u32, epoch: u8) {
        self.last_use[entry as usize].set(epoch);
    }
}

/// What a run has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelCounts {
    /// Reads and partial writes of pages.
    pub accesses: u64,
    /// Those that did not find the page. A page that is overwritten whole is not read, so it is not counted.
    pub misses: u64,
    /// Pages read from the device: misses, and pages read ahead.
    pub reads: u64,
}

/// A slice with a kind of replacement.
pub struct ModelSlice {
    kind: Box<dyn Replacement<ModelTable>>,
    table: ModelTable,
    entries: HashMap<u64, u32>,
    free_entries: Vec<u32>,
    frames: u32,
    filled_in_epoch: u32,
    random: u64,
    read_ahead: Option<ReadAhead>,
    counts: ModelCounts,
}

/// Reads the pages behind a miss that continues a sequence, if the file has them.
pub struct ReadAhead {
    /// Number of pages.
    window: u64,
    /// The last page of each file.
    ends: HashMap<u64, u64>,
    /// The page that was accessed last in each file.
    last: HashMap<u64, u64>,
}

impl ReadAhead {
    /// Creates the read-ahead for a trace. A file ends at its last page in the trace.
    pub fn new(window: u64, trace: &[Access]) -> ReadAhead {
        let mut ends = HashMap::new();
        for access in trace {
            let end = ends.entry(access.file()).or_insert(0);
            *end = access.page_in_file().max(*end);
        }
        let last = HashMap::new();
        ReadAhead { window, ends, last }
    }

    /// Takes note of an access. Returns the pages to read ahead if the page is missed.
    fn pages(&mut self, access: Access) -> Range<u64> {
        let (file, page) = (access.file(), access.page_in_file());
        let is_next = self
            .last
            .insert(file, page)
            .is_some_and(|last| last + 1 == page);
        let end = self.ends.get(&file).copied().unwrap_or(page) + 1;
        match is_next && access.kind == AccessKind::Read {
            true => page + 1..end.min(page + 1 + self.window),
            false => 0..0,
        }
    }
}

/// Returns the number of entries that a slice with this number of frames has.
pub fn entries_for(frames: u32) -> u32 {
    (frames * 3 / 2).next_multiple_of(4)
}

impl ModelSlice {
    /// Creates an empty slice.
    pub fn new(frames: u32, kind: Box<dyn Replacement<ModelTable>>) -> ModelSlice {
        let entries = entries_for(frames);
        ModelSlice {
            kind,
            table: ModelTable {
                pages: vec![None; entries as usize],
                last_use: vec![Cell::new(0); entries as usize],
                epoch: 0,
            },
            entries: HashMap::new(),
            free_entries: (0..entries).collect(),
            frames,
            filled_in_epoch: 0,
            random: 0x9e37_79b9_7f4a_7c15,
            read_ahead: None,
            counts: ModelCounts::default(),
        }
    }

    /// Reads ahead from now on.
    pub fn set_read_ahead(&mut self, read_ahead: ReadAhead) {
        self.read_ahead = Some(read_ahead);
    }

    /// Returns the counts so far.
    pub fn counts(&self) -> ModelCounts {
        self.counts
    }

    /// Returns whether a page is in the cache.
    pub fn has(&self, access: Access) -> bool {
        self.entries.contains_key(&access.page)
    }

    /// Does an access.
    pub fn access(&mut self, access: Access) {
        if access.kind == AccessKind::Drop {
            if let Some(entry) = self.entries.get(&access.page) {
                self.remove(*entry, false);
            }
            return;
        }
        let is_counted = access.kind != AccessKind::Overwrite;
        self.counts.accesses += u64::from(is_counted);
        let ahead = self.read_ahead.as_mut().map(|r| r.pages(access));
        if let Some(entry) = self.entries.get(&access.page) {
            return self.table.set_last_use(*entry, self.table.epoch);
        }
        self.counts.misses += u64::from(is_counted);
        self.counts.reads += u64::from(is_counted);
        self.fill(access);
        for page in ahead.unwrap_or_default() {
            let next = Access::new(AccessKind::Read, access.file(), page);
            if !self.has(next) {
                self.counts.reads += 1;
                self.fill(next);
            }
        }
    }

    /// Puts a page that is not there into the cache.
    fn fill(&mut self, access: Access) {
        if self.free() < (self.frames / 64).max(1) {
            self.evict();
        }
        // In a slice the hash of a page determines its entry. The model takes a random free entry instead.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let at = self.random as usize % self.free_entries.len();
        let entry = self.free_entries.swap_remove(at);
        self.table.pages[entry as usize] = Some(access);
        self.table.set_last_use(entry, self.table.epoch);
        self.entries.insert(access.page, entry);
        self.kind.filled(&self.table, entry, key(access));
        self.filled_in_epoch += 1;
        if self.filled_in_epoch >= (self.frames / 16).max(1) {
            self.filled_in_epoch = 0;
            self.table.epoch = self.table.epoch.wrapping_add(1);
        }
    }

    fn free(&self) -> u32 {
        self.frames - self.entries.len() as u32
    }

    fn evict(&mut self) {
        let high = (self.frames / 32).max(2);
        let (free, resident) = (self.free(), self.entries.len() as u32);
        self.kind.begin(&self.table, high - free, resident);
        let mut victims = Vec::with_capacity(VICTIMS_AT_ONCE);
        loop {
            let more = self.kind.choose(&self.table, &mut victims);
            for (entry, ()) in victims.drain(..) {
                self.remove(entry, true);
            }
            if self.free() >= high {
                return;
            }
            assert!(more, "a round has visited all entries and freed too few");
        }
    }

    fn remove(&mut self, entry: u32, evicted: bool) {
        // In a tiny table, a sweep names a victim twice.
        let Some(access) = self.table.pages[entry as usize].take() else {
            return;
        };
        self.entries.remove(&access.page);
        self.free_entries.push(entry);
        self.kind.removed(entry, key(access), evicted);
    }
}

fn key(access: Access) -> Key {
    Key::new(access.file() + 1, access.page_in_file())
}

/// Returns the number of different pages of a trace.
pub fn footprint(trace: &[Access]) -> usize {
    let mut pages: Vec<u64> = trace.iter().map(|access| access.page).collect();
    pages.sort_unstable();
    pages.dedup();
    pages.len()
}

/// Runs a trace through a slice that reads `ahead` pages ahead.
pub fn run(
    trace: &[Access],
    frames: u32,
    ahead: u64,
    kind: Box<dyn Replacement<ModelTable>>,
) -> ModelCounts {
    let mut model = ModelSlice::new(frames, kind);
    if ahead > 0 {
        model.set_read_ahead(ReadAhead::new(ahead, trace));
    }
    for access in trace {
        model.access(*access);
    }
    model.counts()
}

/// Returns the counts of the best choice, which knows the future (Belady's): it evicts the page that is missed last. A page that
/// is overwritten or dropped before it is read is never missed.
pub fn optimum(trace: &[Access], frames: u32) -> ModelCounts {
    const NEVER: usize = usize::MAX;
    let mut next_use = vec![NEVER; trace.len()];
    let mut ahead: HashMap<u64, usize> = HashMap::new();
    for (at, access) in trace.iter().enumerate().rev() {
        next_use[at] = ahead.get(&access.page).copied().unwrap_or(NEVER);
        match access.kind {
            AccessKind::Read | AccessKind::Modify => ahead.insert(access.page, at),
            AccessKind::Overwrite | AccessKind::Drop => ahead.insert(access.page, NEVER),
        };
    }
    let (mut counts, mut resident) = (ModelCounts::default(), HashMap::new());
    let mut by_next_use = BTreeSet::new();
    for (access, next) in trace.iter().zip(next_use) {
        let known = resident.remove(&access.page);
        if let Some(next) = known {
            by_next_use.remove(&(next, access.page));
        }
        if access.kind == AccessKind::Drop {
            continue;
        }
        let is_counted = access.kind != AccessKind::Overwrite;
        counts.accesses += u64::from(is_counted);
        let is_missed = is_counted && known.is_none();
        counts.misses += u64::from(is_missed);
        counts.reads += u64::from(is_missed);
        if resident.len() == frames as usize
            && let Some((_, page)) = by_next_use.pop_last()
        {
            resident.remove(&page);
        }
        resident.insert(access.page, next);
        by_next_use.insert((next, access.page));
    }
    counts
}
