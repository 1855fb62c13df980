//! Transfers between frames and devices: how pages and their places become transfers, and the records of writes in flight.

use std::iter::Peekable;
use std::ops::Range;
use std::sync::Arc;
use std::vec::IntoIter;

use jericho_format::PAGE_BYTES;
use jericho_shm::SliceMemory;
use jericho_storage::{Direction, Segment, Transfer};
use parking_lot::{Condvar, Mutex};

use crate::checks::Check;
use crate::counters::Counts;
use crate::object::{Error, Object, PagePlace, PageRun};

/// Maximum number of pages of one write transfer: 1 MiB.
pub(crate) const TRANSFER_PAGES_MAX: usize = 256;

/// Returns the segments of frames, with neighbours merged.
pub(crate) fn segments(memory: &SliceMemory, frames: impl Iterator<Item = u32>) -> Vec<Segment> {
    let page = PAGE_BYTES as usize;
    let mut out: Vec<Segment> = vec![];
    for frame in frames {
        let offset = frame as usize * page;
        match out.last_mut() {
            Some(last) if last.offset + last.len == offset => last.len += page,
            _ => out.push(Segment {
                mapping: memory.frames().clone(),
                offset,
                len: page,
            }),
        }
    }
    out
}

/// How the pages of a fill get their contents.
#[derive(Default)]
pub(crate) struct FillPlan {
    /// Entries whose frames have their contents already: zeros, or bytes from memory.
    pub filled: Vec<u32>,
    /// Reads, without tags.
    pub reads: Vec<PlannedRead>,
}

/// A read of neighbouring pages.
pub(crate) struct PlannedRead {
    pub transfer: Transfer,
    /// The entries that it fills.
    pub entries: Vec<u32>,
    pub check: Option<Arc<Check>>,
}

impl FillPlan {
    /// Fills the frames of pages that no device has, and plans reads of the others. `pages` are (page, entry, frame), `runs` their
    /// places, and `check` their checksums, if their object keeps some. Fails if bytes from memory do not have their checksum.
    pub fn add(
        &mut self,
        memory: &SliceMemory,
        counts: &Counts,
        pages: &[(u64, u32, u32)],
        runs: &[PageRun],
        check: Option<&Check>,
    ) -> Result<(), Error> {
        let mut at = 0;
        for run in runs {
            let start = at;
            let part = &pages[at..(at + run.pages as usize).min(pages.len())];
            at += part.len();
            match &run.place {
                PagePlace::Hole => {
                    for (_, index, frame) in part {
                        memory.zero(*frame);
                        self.filled.push(*index);
                    }
                }
                PagePlace::Memory(bytes) => {
                    if let Some(check) = check {
                        check.compare(counts, start, bytes)?;
                    }
                    for (_, index, frame) in part {
                        let copied = memory.copy_in(*frame, 0, bytes);
                        assert!(copied.is_ok(), "a frame of the slice's own records");
                        self.filled.push(*index);
                    }
                }
                PagePlace::Device {
                    device,
                    offset_bytes,
                } => {
                    let (device, offset_bytes) = (*device, *offset_bytes);
                    let transfer = Transfer {
                        tag: 0,
                        device,
                        direction: Direction::Read,
                        offset_bytes,
                        segments: segments(memory, part.iter().map(|p| p.2)),
                    };
                    self.reads.push(PlannedRead {
                        transfer,
                        entries: part.iter().map(|p| p.1).collect(),
                        check: check.map(|check| {
                            let frames = part.iter().map(|p| p.2).collect();
                            Arc::new(check.part(start, frames))
                        }),
                    });
                }
            }
        }
        assert_eq!(
            at,
            pages.len(),
            "an object placed fewer pages than requested"
        );
        Ok(())
    }

    /// Returns the number of bytes that the reads transfer.
    pub fn bytes(&self) -> u64 {
        let pages = self.reads.iter().map(|read| read.entries.len() as u64);
        pages.sum::<u64>() * PAGE_BYTES
    }
}

/// How often the pages of a write-back were tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Attempt {
    First,
    /// They have failed before.
    Again,
    /// They have failed before. If they succeed now, the other failed pages are retried.
    Trial,
}

/// Pages chosen for write-back and marked WRITE_BACK, with their frames.
pub(crate) struct Chosen {
    pub object: Arc<dyn Object>,
    /// (page, entry, frame), in page order.
    pub pages: Vec<(u64, u32, u32)>,
    /// Those of the pages whose write-back failed the last time, in order.
    pub retried: Vec<u64>,
    pub sync: Option<u64>,
    pub attempt: Attempt,
}

/// Neighbouring pages of one object in a transfer.
pub(crate) struct Part {
    pub object: Arc<dyn Object>,
    pub first: u64,
    pub entries: Vec<u32>,
    /// The write-back of each of the pages failed the last time, too. The object knows of that failure.
    pub is_retry: bool,
}

impl Part {
    /// Returns the part of neighbouring pages of `chosen`.
    pub fn new(chosen: &Chosen, pages: &[(u64, u32, u32)]) -> Part {
        let has_failed = |(page, ..): &(u64, u32, u32)| chosen.retried.binary_search(page).is_ok();
        Part {
            object: chosen.object.clone(),
            first: pages[0].0,
            entries: pages.iter().map(|p| p.1).collect(),
            is_retry: pages.iter().all(has_failed),
        }
    }
}

/// A write transfer in flight, of the evictor or of a small sync.
pub(crate) struct WriteBack {
    /// Shared, so that the end of the transfer can be reported to the objects without the lock.
    pub parts: Arc<Vec<Part>>,
    pub syncs: Vec<u64>,
    /// The highest attempt among its pages.
    pub attempt: Attempt,
    /// The callers that wait for it in their own threads. Only a small sync has them; `None` for a transfer of the evictor.
    pub callers: Option<Vec<Arc<Joined>>>,
}

/// The transfers of other small syncs for which a caller waits.
pub(crate) struct Joined {
    state: Mutex<(usize, Result<(), Error>)>,
    ended: Condvar,
}

impl Joined {
    pub fn new(transfers: usize) -> Joined {
        Joined {
            state: Mutex::new((transfers, Ok(()))),
            ended: Condvar::new(),
        }
    }

    /// Records that one of the transfers has ended.
    pub fn step(&self, error: Option<&Error>) {
        let mut state = self.state.lock();
        state.0 -= 1;
        if let (Some(error), Ok(())) = (error, &state.1) {
            state.1 = Err(error.clone());
        }
        if state.0 == 0 {
            self.ended.notify_one();
        }
    }

    /// Waits until all of them have ended. Returns the first error.
    pub fn wait(&self) -> Result<(), Error> {
        let mut state = self.state.lock();
        self.ended.wait_while(&mut state, |state| state.0 > 0);
        state.1.clone()
    }
}

impl WriteBack {
    /// Returns the first page >= `from` of the object that is in this transfer.
    pub fn first_of(&self, object: u64, from: u64) -> Option<u64> {
        let parts = self.parts.iter().filter(|p| p.object.id() == object);
        parts
            .filter(|p| p.first + p.entries.len() as u64 > from)
            .map(|p| p.first.max(from))
            .min()
    }

    pub fn overlaps(&self, object: u64, pages: &Range<u64>) -> bool {
        self.first_of(object, pages.start)
            .is_some_and(|page| page < pages.end)
    }
}

/// A part that has its place on a device.
pub(crate) struct PlacedPart {
    pub device: u16,
    pub offset_bytes: u64,
    part: Part,
    frames: Vec<u32>,
    sync: Option<u64>,
    attempt: Attempt,
}

/// Cuts neighbouring chosen pages at the borders of their places, and appends the parts. `runs` are the places.
pub(crate) fn place(
    chosen: &Chosen,
    pages: &[(u64, u32, u32)],
    runs: Vec<PageRun>,
    out: &mut Vec<PlacedPart>,
) {
    let mut at = 0;
    for run in runs {
        let end = (at + run.pages as usize).min(pages.len());
        let PagePlace::Device {
            device,
            mut offset_bytes,
        } = run.place
        else {
            panic!("an object allocated a hole");
        };
        for part in pages[at..end].chunks(TRANSFER_PAGES_MAX) {
            out.push(PlacedPart {
                device,
                offset_bytes,
                frames: part.iter().map(|p| p.2).collect(),
                sync: chosen.sync,
                attempt: chosen.attempt,
                part: Part::new(chosen, part),
            });
            offset_bytes += part.len() as u64 * PAGE_BYTES;
        }
        at = end;
    }
    assert_eq!(
        at,
        pages.len(),
        "an object placed fewer pages than requested"
    );
}

/// Parts that are neighbours on a device: one transfer.
pub(crate) struct MergedParts {
    pub device: u16,
    pub offset_bytes: u64,
    pub frames: Vec<u32>,
    pub parts: Vec<Part>,
    pub syncs: Vec<u64>,
    pub attempt: Attempt,
}

impl MergedParts {
    /// Takes the next parts that make one transfer. The parts are in the order of their places.
    pub fn next(placed: &mut Peekable<IntoIter<PlacedPart>>) -> Option<MergedParts> {
        let first = placed.next()?;
        let mut merged = MergedParts {
            device: first.device,
            offset_bytes: first.offset_bytes,
            frames: first.frames,
            parts: vec![first.part],
            syncs: Vec::from_iter(first.sync),
            attempt: first.attempt,
        };
        while let Some(next) = placed.next_if(|p| merged.continues_with(p)) {
            merged.frames.extend(next.frames);
            merged.attempt = merged.attempt.max(next.attempt);
            merged.parts.push(next.part);
            merged.syncs.extend(next.sync);
        }
        merged.syncs.dedup();
        Some(merged)
    }

    fn continues_with(&self, next: &PlacedPart) -> bool {
        next.device == self.device
            && next.offset_bytes == self.offset_bytes + self.bytes()
            && self.frames.len() + next.frames.len() <= TRANSFER_PAGES_MAX
    }

    pub fn bytes(&self) -> u64 {
        self.frames.len() as u64 * PAGE_BYTES
    }
}
