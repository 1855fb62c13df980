//! Get and Put: the stages of a request for pages (the Jericho paper, section II.D.2).
//!
//! ```text
//!             all there or free frames             fills and clashes over
//!   new ─────────────────────────────▶ (filling) ─────────────────────────▶ execute: Grant
//!    │ ▲                                  ▲
//!    │ └── clashed: another fills a page ─┘   (looked at anew when that fill has ended)
//!    └──── stalled: too few free frames       (looked at anew, in order, when the evictor has freed some)
//! ```
//!
//! *new* (`enter`) runs inline in the caller's thread; fills end in the pipeline thread. No circle of
//! waiting: a Get takes all frames it misses at once or none; one that is to overwrite takes none while
//! it clashes, so what others wait for is always I/O, which ends, or a granted writer, who does not wait.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use jericho_format::PAGE_BYTES;
use jericho_shm::{Flags, Key, Miss, SliceMemory};
use jericho_storage::{Completion, Direction, Segment, Transfer};

use crate::latched::Latched;
use crate::object::{Error, Object, Place, Run};
use crate::reader;
use crate::state::{After, Announcement, Shared, State, run};
use crate::{Intent, PAGES_PER_GET_MAX};

pub(crate) type GetDone = Box<dyn FnOnce(Result<Grant, Error>) + Send>;

/// What a Get asks for.
#[derive(Clone)]
struct Wanted {
    object: Arc<dyn Object>,
    first: u64,
    count: u32,
    intent: Intent,
}

/// A Get that waits.
pub(crate) struct Pending {
    wanted: Wanted,
    done: Option<GetDone>,
    /// Entries pinned for it so far.
    held: Vec<u32>,
    /// Fills, clashes and the turn of `start_fill` that it waits for.
    remaining: u32,
    error: Option<Error>,
    /// What it waits for was another's: look at all pages anew.
    again: bool,
    /// It has waited in the queue for frames and need not go behind the others again.
    turn: bool,
}

/// Pages that a Get has inserted and that are to be filled.
pub(crate) struct Fill {
    get: u64,
    object: Arc<dyn Object>,
    /// (page, entry, frame), in page order.
    pages: Vec<(u64, u32, u32)>,
    read_ahead: bool,
}

/// A read transfer on its way.
pub(crate) struct Reading {
    get: u64,
    entries: Vec<u32>,
    /// The pages may be written inline.
    backed: bool,
}

/// In place of the entry of a page that is not in the table.
const ABSENT: u32 = u32::MAX;

enum Entered {
    /// All pages are there (or taken, for Overwrite): their entries.
    Ready(Vec<u32>),
    /// Waits under this id; perhaps with a fill to start.
    Waits,
    /// Would wait, and was told not to.
    WouldWait,
}

/// The *new* stage. `pending`: what waits, if it may; it then also gets what goes wrong.
fn enter(
    state: &mut State,
    shared: &Arc<Shared>,
    wanted: &Wanted,
    pending: Option<Box<Pending>>,
    after: &mut After,
) -> Result<Entered, Error> {
    let (object, first, count, intent) =
        (&wanted.object, wanted.first, wanted.count, wanted.intent);
    debug_assert!(count > 0 && count <= PAGES_PER_GET_MAX);
    let refused = if shared.closing.load(Relaxed) {
        Some(Error::Closed)
    } else {
        (object.slice() != shared.id).then_some(Error::Moved)
    };
    if let Some(error) = refused {
        let Some(p) = pending else { return Err(error) };
        fail(state, shared, *p, error, after);
        return Ok(Entered::Waits);
    }
    let id = object.id();
    let (mut entries, mut missing, mut clashes) =
        (Vec::with_capacity(count as usize), vec![], vec![]);
    for page in first..first + u64::from(count) {
        match shared.memory.lookup(Key::new(id, page)) {
            None => {
                missing.push(entries.len());
                entries.push(ABSENT);
            }
            Some(found) => {
                if !found.state.has(Flags::VALID) {
                    if state.filling.contains_key(&found.index) {
                        clashes.push(found.index);
                    } else if state.expel_unfilled(shared, found) {
                        missing.push(entries.len());
                        entries.push(ABSENT);
                        continue;
                    }
                }
                entries.push(found.index);
            }
        }
    }
    let short_of_frames = !missing.is_empty()
        && (missing.len() as u32 > state.frames.free()
            || (!state.stalled.is_empty()
                && pending
                    .as_ref()
                    .is_some_and(|p| !p.turn && p.held.is_empty())));
    let fills = !missing.is_empty() && intent != Intent::Overwrite;
    if pending.is_none() && (short_of_frames || fills || !clashes.is_empty()) {
        return Ok(Entered::WouldWait);
    }
    let overwrite_clash = intent == Intent::Overwrite && !clashes.is_empty();
    if short_of_frames && !overwrite_clash {
        after.wake_evictor = true;
        let Some(p) = pending else {
            return Ok(Entered::WouldWait);
        };
        if p.done.is_none() {
            // Read-ahead is not worth waiting for.
            p.held.iter().for_each(|index| state.unpin(*index));
            return Ok(Entered::Waits);
        }
        shared.counts.stalled.fetch_add(1, Relaxed);
        let get = state.new_id();
        state.pending.insert(get, *p);
        state.stalled.push_back(get);
        return Ok(Entered::Waits);
    }
    let mut pages = Vec::with_capacity(missing.len());
    if !overwrite_clash {
        for index in entries.iter().filter(|index| **index != ABSENT) {
            state.pin(*index);
        }
        for at in missing {
            let page = first + at as u64;
            let (index, frame) = state.insert(shared, Key::new(id, page));
            entries[at] = index;
            pages.push((page, index, frame));
        }
        if state.frames.free() < shared.limits.free_low {
            after.wake_evictor = true;
        }
    }
    if !fills && clashes.is_empty() {
        // What an earlier look held stays pinned by the pins of this one.
        let Some(p) = pending else {
            return Ok(Entered::Ready(entries));
        };
        p.held.iter().for_each(|index| state.unpin(*index));
        if let Some(done) = p.done {
            let grant = Grant::new(shared, p.wanted.object, first, entries);
            after.granted.push((done, Ok(grant)));
        } else {
            entries.iter().for_each(|index| state.unpin(*index));
        }
        return Ok(Entered::Waits);
    }
    let Some(mut p) = pending else {
        return Ok(Entered::WouldWait);
    };
    p.held.iter().for_each(|index| state.unpin(*index));
    p.held = if overwrite_clash { vec![] } else { entries };
    p.again = !clashes.is_empty();
    p.remaining = clashes.len() as u32 + u32::from(fills);
    let get = state.new_id();
    if !clashes.is_empty() {
        shared.counts.clashed.fetch_add(1, Relaxed);
        for index in clashes {
            state.clashed.entry(index).or_default().push(get);
        }
    }
    if fills {
        let (object, read_ahead) = (object.clone(), p.done.is_none());
        after.fills.push(Fill {
            get,
            object,
            pages,
            read_ahead,
        });
    }
    state.pending.insert(get, *p);
    Ok(Entered::Waits)
}

/// Enters or re-enters a Get that may wait.
fn enter_waiting(state: &mut State, shared: &Arc<Shared>, pending: Pending, after: &mut After) {
    let wanted = pending.wanted.clone();
    // Errors go to who waits.
    let _ = enter(state, shared, &wanted, Some(Box::new(pending)), after);
}

fn fail(state: &mut State, shared: &Arc<Shared>, p: Pending, error: Error, after: &mut After) {
    p.held.iter().for_each(|index| state.unpin(*index));
    if let Some(done) = p.done {
        after.granted.push((done, Err(error)));
    }
    state.retry_waiting(shared, after);
}

/// One thing that a Get waited for is over.
pub(crate) fn step(
    state: &mut State,
    shared: &Arc<Shared>,
    get: u64,
    error: Option<Error>,
    after: &mut After,
) {
    let Some(p) = state.pending.get_mut(&get) else {
        return;
    };
    p.remaining -= 1;
    p.error = p.error.take().or(error);
    if p.remaining > 0 {
        return;
    }
    let Some(mut p) = state.pending.remove(&get) else {
        return;
    };
    if let Some(error) = p.error.take() {
        fail(state, shared, p, error, after);
    } else if p.again {
        enter_waiting(state, shared, p, after);
    } else if let Some(done) = p.done.take() {
        let entries = std::mem::take(&mut p.held);
        after.granted.push((
            done,
            Ok(Grant::new(shared, p.wanted.object, p.wanted.first, entries)),
        ));
    } else {
        p.held.iter().for_each(|index| state.unpin(*index));
    }
}

/// Looks at stalled Gets anew, in order, as long as there are frames.
pub(crate) fn retry_stalled(state: &mut State, shared: &Arc<Shared>, after: &mut After) {
    while let Some(get) = state.stalled.front().copied() {
        let need = state.pending.get(&get).map_or(0, |p| p.wanted.count);
        if need > state.frames.free() && !shared.closing.load(Relaxed) {
            after.wake_evictor = true;
            return;
        }
        state.stalled.pop_front();
        if let Some(mut p) = state.pending.remove(&get) {
            p.turn = true;
            enter_waiting(state, shared, p, after);
        }
    }
}

/// Asks the object where pages are, zeroes holes, and hands reads to the pipeline. Without the lock.
pub(crate) fn start_fill(shared: &Arc<Shared>, fill: Fill, after: &mut After) {
    let mut holes: Vec<u32> = vec![];
    let mut transfers: Vec<(Transfer, Vec<u32>)> = vec![];
    let mut error = None;
    for pages in fill.pages.chunk_by(|a, b| a.0 + 1 == b.0) {
        let (first, count) = (pages[0].0, pages.len());
        let mut runs = vec![];
        match fill.object.resolve(first, count as u32, &mut runs) {
            Ok(()) => plan(shared, pages, &runs, &mut holes, &mut transfers),
            Err(e) => {
                error = Some(e);
                break;
            }
        }
    }
    if let Some(error) = error {
        let mut state = shared.lock();
        for (_, index, _) in &fill.pages {
            drop_fill(&mut state, shared, *index, after);
        }
        step(&mut state, shared, fill.get, Some(error), after);
        state.retry_waiting(shared, after);
        return;
    }
    let bytes: u64 = transfers
        .iter()
        .map(|t| t.1.len() as u64 * PAGE_BYTES)
        .sum();
    shared.counts.read_bytes.fetch_add(bytes, Relaxed);
    if fill.read_ahead {
        shared.counts.read_ahead_bytes.fetch_add(bytes, Relaxed);
    }
    let mut state = shared.lock();
    if let Some(p) = state.pending.get_mut(&fill.get) {
        p.remaining += transfers.len() as u32;
    }
    for index in holes {
        shared.memory.entry(index).publish(Flags::NONE);
        state.fill_ended(shared, index, after);
    }
    let mut started = false;
    let backed = fill.object.may_write_inline();
    for (mut transfer, entries) in transfers {
        transfer.tag = state.new_id();
        state.reading.insert(
            transfer.tag,
            Reading {
                get: fill.get,
                entries,
                backed,
            },
        );
        let for_pipeline = match fill.read_ahead || fill.pages.len() > reader::PAGES_MAX {
            true => Some(transfer),
            false => reader::keep(shared, transfer),
        };
        if let Some(transfer) = for_pipeline {
            shared.reads.push(transfer);
            started = true;
        }
    }
    step(&mut state, shared, fill.get, None, after);
    drop(state);
    if started {
        shared.read_waker.wake();
    }
}

/// Turns runs into zeroed frames and read transfers.
fn plan(
    shared: &Shared,
    pages: &[(u64, u32, u32)],
    runs: &[Run],
    holes: &mut Vec<u32>,
    transfers: &mut Vec<(Transfer, Vec<u32>)>,
) {
    let mut at = 0;
    for run in runs {
        let part = &pages[at..(at + run.pages as usize).min(pages.len())];
        at += part.len();
        match run.place {
            Place::Hole => {
                for (_, index, frame) in part {
                    shared.memory.zero(*frame);
                    holes.push(*index);
                }
            }
            Place::Device {
                device,
                offset_bytes,
            } => {
                let transfer = Transfer {
                    tag: 0,
                    device,
                    direction: Direction::Read,
                    offset_bytes,
                    segments: segments(&shared.memory, part.iter().map(|p| p.2)),
                };
                transfers.push((transfer, part.iter().map(|p| p.1).collect()));
            }
        }
    }
    assert_eq!(
        at,
        pages.len(),
        "an object placed fewer pages than were asked for"
    );
}

/// Segments of frames, neighbours merged.
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

/// Takes an entry out whose fill failed or was given up. Its pins stay with who holds them: an entry that
/// is not in the table any more can't be found, and pins are by index, so they are taken back first.
fn drop_fill(state: &mut State, shared: &Arc<Shared>, index: u32, after: &mut After) {
    let entry = shared.memory.entry(index);
    let word = entry.state();
    if word.has(Flags::FILL) && shared.memory.remove(index, word) {
        let frame = state.filling.remove(&index);
        state.give_frame(frame.unwrap_or(word.frame()));
    }
    state.fill_ended(shared, index, after);
}

/// A read transfer has ended. In the thread that made it, where the callbacks of its Gets run: the pipeline, or one with a
/// reader.
pub(crate) fn read_ended(shared: &Arc<Shared>, completion: Completion) {
    let mut after = After::default();
    let mut state = shared.lock();
    let Some(reading) = state.reading.remove(&completion.tag) else {
        return;
    };
    let error = completion.result.err().map(Error::from);
    let flags = match reading.backed {
        true => Flags::BACKED,
        false => Flags::NONE,
    };
    for index in reading.entries {
        if error.is_none() {
            shared.memory.entry(index).publish(flags);
            state.fill_ended(shared, index, &mut after);
        } else {
            drop_fill(&mut state, shared, index, &mut after);
        }
    }
    let failed = error.is_some();
    step(&mut state, shared, reading.get, error, &mut after);
    if failed || !state.invalidations.is_empty() {
        state.retry_waiting(shared, &mut after);
    }
    drop(state);
    run(shared, after);
}

/// Tries without waiting. `None`: it would have to.
pub(crate) fn try_get(
    shared: &Arc<Shared>,
    object: &Arc<dyn Object>,
    first: u64,
    count: u32,
    intent: Intent,
) -> Result<Option<Grant>, Error> {
    let mut after = After::default();
    let wanted = Wanted {
        object: object.clone(),
        first,
        count,
        intent,
    };
    let entered = enter(&mut shared.lock(), shared, &wanted, None, &mut after);
    run(shared, after);
    match entered? {
        Entered::Ready(entries) => Ok(Some(Grant::new(shared, wanted.object, first, entries))),
        Entered::WouldWait | Entered::Waits => Ok(None),
    }
}

/// Gets pages; `done` (none for read-ahead) runs when they are there.
pub(crate) fn get(
    shared: &Arc<Shared>,
    object: &Arc<dyn Object>,
    first: u64,
    count: u32,
    intent: Intent,
    done: Option<GetDone>,
) {
    let mut after = After::default();
    let wanted = Wanted {
        object: object.clone(),
        first,
        count,
        intent,
    };
    let pending = Pending {
        wanted,
        done,
        held: vec![],
        remaining: 0,
        error: None,
        again: false,
        turn: false,
    };
    enter_waiting(&mut shared.lock(), shared, pending, &mut after);
    run(shared, after);
}

/// Pages that stay in the cache until the grant is dropped (the Put).
pub struct Grant {
    shared: Arc<Shared>,
    object: Arc<dyn Object>,
    first: u64,
    entries: Vec<u32>,
    /// Pages that this grant made dirty.
    dirtied: Vec<u64>,
}

impl Grant {
    fn new(shared: &Arc<Shared>, object: Arc<dyn Object>, first: u64, entries: Vec<u32>) -> Grant {
        Grant {
            shared: shared.clone(),
            object,
            first,
            entries,
            dirtied: vec![],
        }
    }

    /// First page.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// Number of pages.
    pub fn count(&self) -> u32 {
        self.entries.len() as u32
    }

    fn entry(&self, page: u64) -> u32 {
        self.entries[(page - self.first) as usize]
    }

    /// Whether a page of the grant has contents: false for one got with `Intent::Overwrite` that was not in
    /// the cache and has not been written yet.
    pub fn is_filled(&self, page: u64) -> bool {
        !self
            .shared
            .memory
            .entry(self.entry(page))
            .state()
            .has(Flags::FILL)
    }

    /// Reads bytes of a page of the grant, all of one instant. Panics outside of the grant. Not for pages
    /// got with `Intent::Overwrite` and not yet written. Fails when a writer holds the page for longer than a reader
    /// spins: then drop the grant, and get the page again with `Slice::when_unlatched`.
    pub fn read(&self, page: u64, offset: usize, out: &mut [u8]) -> Result<(), Latched> {
        let memory = &self.shared.memory;
        let key = Key::new(self.object.id(), page);
        match memory.read(key, offset, out, self.shared.epoch()) {
            Ok(()) => Ok(()),
            Err(Miss::Busy) => Err(Latched::new(memory, key)),
            Err(_) => {
                // A client has spoilt the table. Its volume, its loss; but nobody else's bytes.
                out.fill(0);
                Ok(())
            }
        }
    }

    /// Writes bytes of a page of the grant; space must have been reserved for it. A page got with
    /// `Intent::Overwrite` is written whole. Fails as `read` does, and then leaves the page unchanged.
    pub fn write(&mut self, page: u64, offset: usize, data: &[u8]) -> Result<(), Latched> {
        let memory = &self.shared.memory;
        let index = self.entry(page);
        let entry = memory.entry(index);
        let word = entry.state();
        // Otherwise a client has spoilt the entry of a page that has its bytes, or the frame's number.
        let is_new = data.len() as u64 == PAGE_BYTES;
        if word.has(Flags::FILL) && is_new && memory.copy_in(word.frame(), 0, data).is_ok() {
            entry.publish(Flags::DIRTY.with(self.backed()));
            self.dirtied.push(page);
            self.shared.dirtied(1);
            return Ok(());
        }
        let key = Key::new(self.object.id(), page);
        match memory.write_own(key, offset, data, crate::OWNER_DAEMON, self.shared.epoch()) {
            Ok(was_clean) => {
                if was_clean {
                    self.dirtied.push(page);
                    self.shared.dirtied(1);
                }
                self.back(index);
                Ok(())
            }
            Err(Miss::Busy | Miss::Broken | Miss::Changed | Miss::NoRoom) => {
                Err(Latched::new(memory, key))
            }
            // The table is corrupt; as in `read`, only this volume is affected.
            Err(Miss::Absent | Miss::Unbacked) => Ok(()),
        }
    }

    /// Returns BACKED for a page that is published now, if the object may be written inline. The page was inserted
    /// before this check. `Slice::withdraw` therefore either runs before the check or finds the page in its fill.
    fn backed(&self) -> Flags {
        match self.object.may_write_inline() {
            true => Flags::BACKED,
            false => Flags::NONE,
        }
    }

    /// Allows inline writes to a page that has space reserved, if its object may be written inline.
    fn back(&self, index: u32) {
        let entry = self.shared.memory.entry(index);
        if entry.state().has(Flags::BACKED) {
            return;
        }
        // Checks under the lock: `Slice::withdraw` takes it after the object has refused, and then visits the pages.
        let _state = self.shared.lock();
        if self.object.may_write_inline() {
            entry.mark(Flags::BACKED);
        }
    }

    /// Puts pages that were got with `Intent::Overwrite` and not written into the cache as zeros, and lets
    /// all pages of the grant be written inline if the object may be; space was promised for them.
    pub fn offer(&mut self) {
        let memory = &self.shared.memory;
        for index in &self.entries {
            let entry = memory.entry(*index);
            let word = entry.state();
            if word.has(Flags::FILL) {
                // No such frame: a client has spoilt the entry.
                let _ = memory.copy_in(word.frame(), 0, &[0; PAGE_BYTES as usize]);
                entry.publish(self.backed());
            } else {
                self.back(*index);
            }
        }
    }

    /// Marks a page dirty without changing it. Fails as `write` does.
    pub fn redirty(&mut self, page: u64) -> Result<(), Latched> {
        self.write(page, 0, &[])
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        let mut after = After::default();
        let shared = self.shared.clone();
        let mut state = shared.lock();
        for pages in self.dirtied.chunk_by(|a, b| a + 1 == *b) {
            let count = pages.len() as u64;
            let now = std::time::Instant::now();
            state.dirty.add(&self.object, pages[0], count, now);
        }
        for index in &self.entries {
            state.unpin(*index);
            let word = shared.memory.entry(*index).state();
            if word.has(Flags::FILL) {
                // Never written: the writer gave up.
                drop_fill(&mut state, &shared, *index, &mut after);
            } else {
                state.fill_ended(&shared, *index, &mut after);
            }
        }
        if !state.stalled.is_empty() || !state.invalidations.is_empty() {
            state.retry_waiting(&shared, &mut after);
        }
        drop(state);
        run(&shared, after);
    }
}

/// Tells the slice that pages were made dirty inline.
pub(crate) fn announce(shared: &Shared, object: &Arc<dyn Object>, first: u64, count: u32) {
    shared.announced.push(Announcement {
        object: object.clone(),
        first,
        count,
    });
    shared.dirtied(u64::from(count));
}
