//! The contents of a simulated device: the bytes that reads see, the durable bytes, and the volatile write cache between them.
//!
//! Invariant: `seen` is `durable` with all changes of `cached` applied in order, except for blocks that a failed flush has lost.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use jericho_badlink::Random;
use jericho_storage::BLOCK_BYTES;

/// A power cut tears writes at multiples of this size.
const SECTOR_BYTES: usize = 512;

const BLOCK: usize = BLOCK_BYTES as usize;

/// Contents of a discarded block. Not zero, so that a test detects code that relies on zeros.
const DISCARDED: u8 = 0xD5;

#[derive(Clone, Debug)]
enum Block {
    Data(Arc<[u8; BLOCK]>),
    Discarded,
}

/// Blocks by number. A missing block was never written and reads as zeros.
type Blocks = BTreeMap<u64, Block>;

#[derive(Clone, Debug)]
enum Change {
    /// Whole blocks from block `first` on.
    Write {
        first: u64,
        data: Vec<u8>,
    },
    Discard {
        first: u64,
        count: u64,
    },
}

impl Change {
    fn blocks(&self) -> Range<u64> {
        match self {
            Change::Write { first, data } => *first..*first + (data.len() / BLOCK) as u64,
            Change::Discard { first, count } => *first..*first + *count,
        }
    }

    /// Returns the part of the change within some of its blocks, or `None` for no blocks.
    fn part(&self, blocks: Range<u64>) -> Option<Change> {
        if blocks.is_empty() {
            return None;
        }
        let count = blocks.end - blocks.start;
        Some(match self {
            Change::Write { first, data } => {
                let from = (blocks.start - first) as usize * BLOCK;
                Change::Write {
                    first: blocks.start,
                    data: data[from..from + count as usize * BLOCK].to_vec(),
                }
            }
            Change::Discard { .. } => Change::Discard {
                first: blocks.start,
                count,
            },
        })
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Image {
    seen: Blocks,
    durable: Blocks,
    cached: Vec<Change>,
    /// Number of blocks of `seen` that hold data.
    used_blocks: u64,
}

impl Image {
    pub(crate) fn read(&self, offset_bytes: u64, buf: &mut [u8]) {
        for (number, chunk) in (offset_bytes / BLOCK_BYTES..).zip(buf.chunks_mut(BLOCK)) {
            match self.seen.get(&number) {
                Some(Block::Data(data)) => chunk.copy_from_slice(&data[..chunk.len()]),
                Some(Block::Discarded) => chunk.fill(DISCARDED),
                None => chunk.fill(0),
            }
        }
    }

    /// Writes whole blocks into the cache, as many as there is space for. Returns the bytes written.
    pub(crate) fn write(&mut self, offset_bytes: u64, data: &[u8], room: Option<u64>) -> usize {
        let first = offset_bytes / BLOCK_BYTES;
        let mut done = 0;
        for (number, chunk) in (first..).zip(data.chunks_exact(BLOCK)) {
            if !matches!(self.seen.get(&number), Some(Block::Data(_))) {
                if room.is_some_and(|room| self.used_blocks >= room) {
                    break;
                }
                self.used_blocks += 1;
            }
            put(&mut self.seen, number, chunk);
            done += chunk.len();
        }
        if done > 0 {
            self.cached.push(Change::Write {
                first,
                data: data[..done].to_vec(),
            });
        }
        done
    }

    pub(crate) fn discard(&mut self, offset_bytes: u64, length_bytes: u64) {
        let (first, count) = (offset_bytes / BLOCK_BYTES, length_bytes / BLOCK_BYTES);
        let before = data_blocks(&self.seen, first, count);
        discard(&mut self.seen, first, count);
        self.used_blocks -= before;
        self.cached.push(Change::Discard { first, count });
    }

    pub(crate) fn flush(&mut self) {
        for change in self.cached.drain(..) {
            let latest = self.seen.range(change.blocks());
            self.durable
                .extend(latest.map(|(number, block)| (*number, block.clone())));
        }
    }

    /// Empties the cache without making it durable: each change is durable, lost or torn, and reads see all of them.
    pub(crate) fn lose_cached(&mut self, seed: u64) {
        self.durable = self.after_power_cut(seed).seen;
        self.cached.clear();
    }

    /// Makes a range durable as reads see it. Changes of other blocks stay volatile.
    pub(crate) fn harden(&mut self, offset_bytes: u64, length_bytes: u64) {
        let first = offset_bytes / BLOCK_BYTES;
        let hard = first..first + length_bytes / BLOCK_BYTES;
        let latest = self.seen.range(hard.clone());
        self.durable
            .extend(latest.map(|(number, block)| (*number, block.clone())));
        for change in std::mem::take(&mut self.cached) {
            let blocks = change.blocks();
            if blocks.end <= hard.start || hard.end <= blocks.start {
                self.cached.push(change);
                continue;
            }
            let (before, after) = (blocks.start..hard.start, hard.end..blocks.end);
            self.cached.extend(change.part(before));
            self.cached.extend(change.part(after));
        }
    }

    /// Returns the number of changes that a power cut may undo.
    pub(crate) fn cached_changes(&self) -> usize {
        self.cached.len()
    }

    /// Returns the image after a power cut: everything durable, and for each later change all, none, or some of its sectors. Each
    /// change is decided independently, by the seed, its place and the number of earlier changes at that place. So the order in
    /// which writes to different places arrived does not change the result.
    pub(crate) fn after_power_cut(&self, seed: u64) -> Image {
        let mut survived = self.durable.clone();
        let mut occurrences: HashMap<u64, u64> = HashMap::new();
        for change in &self.cached {
            let first = match change {
                Change::Write { first, .. } | Change::Discard { first, .. } => *first,
            };
            let occurrence = occurrences.entry(first).or_default();
            let mut random = Random::of(seed, &[first, *occurrence]);
            *occurrence += 1;
            match (random.below(3), change) {
                (0, _) => {}
                (1, Change::Write { first, data }) => {
                    for (number, chunk) in (*first..).zip(data.chunks_exact(BLOCK)) {
                        put(&mut survived, number, chunk);
                    }
                }
                (_, Change::Write { first, data }) => {
                    for (number, chunk) in (*first..).zip(data.chunks_exact(BLOCK)) {
                        tear(&mut survived, number, chunk, &mut random);
                    }
                }
                (1, Change::Discard { first, count }) => discard(&mut survived, *first, *count),
                (_, Change::Discard { first, count }) => {
                    for number in *first..*first + *count {
                        if random.coin() {
                            discard(&mut survived, number, 1);
                        }
                    }
                }
            }
        }
        Image::of(survived)
    }

    /// Returns the image without the changes that are not durable.
    pub(crate) fn durable(&self) -> Image {
        Image::of(self.durable.clone())
    }

    fn of(blocks: Blocks) -> Image {
        let used_blocks = data_blocks(&blocks, 0, u64::MAX);
        Image {
            seen: blocks.clone(),
            durable: blocks,
            cached: Vec::new(),
            used_blocks,
        }
    }

    /// Returns a digest of the bytes that reads see, to compare images.
    pub(crate) fn digest(&self) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        for (number, block) in &self.seen {
            match block {
                Block::Data(data) if data.iter().all(|byte| *byte == 0) => {}
                Block::Data(data) => (number, &data[..]).hash(&mut hasher),
                Block::Discarded => (number, DISCARDED).hash(&mut hasher),
            }
        }
        hasher.finish()
    }
}

fn put(blocks: &mut Blocks, number: u64, data: &[u8]) {
    let mut block = [0; BLOCK];
    block.copy_from_slice(data);
    blocks.insert(number, Block::Data(Arc::new(block)));
}

/// Writes some sectors of `data` and keeps the others.
fn tear(blocks: &mut Blocks, number: u64, data: &[u8], random: &mut Random) {
    let mut block = match blocks.get(&number) {
        Some(Block::Data(old)) => **old,
        Some(Block::Discarded) => [DISCARDED; BLOCK],
        None => [0; BLOCK],
    };
    for (new, old) in data
        .chunks(SECTOR_BYTES)
        .zip(block.chunks_mut(SECTOR_BYTES))
    {
        if random.coin() {
            old.copy_from_slice(new);
        }
    }
    blocks.insert(number, Block::Data(Arc::new(block)));
}

fn discard(blocks: &mut Blocks, first: u64, count: u64) {
    blocks.extend((first..first + count).map(|number| (number, Block::Discarded)));
}

fn data_blocks(blocks: &Blocks, first: u64, count: u64) -> u64 {
    let range = blocks.range(first..first.saturating_add(count));
    range
        .filter(|(_, block)| matches!(block, Block::Data(_)))
        .count() as u64
}
