//! Get and Put: the stages of a request for pages (the Jericho paper, section II.D.2).
//!
//! ```text
//!              all there or free frames             fills and clashes over
//!   new ─────────────────────────────▶ (filling) ─────────────────────────▶ execute: Grant
//!    │ ▲                                  ▲
//!    │ └── clashed: another fills a page ─┘   (enters again when that fill has ended)
//!    └──── stalled: too few free frames       (enters again, in order, when the evictor has freed some)
//! ```
//!
//! *new* (`enter`) runs inline in the caller's thread. Fills end in the pipeline thread, or in the thread of a `Reader`.
//!
//! Gets cannot deadlock. A Get takes all frames that it misses at once, or none. An overwriting Get takes none while it clashes.
//! A Get therefore waits only for I/O, which ends, or for a writer that holds a grant and does not wait.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use jericho_format::PAGE_BYTES;
use jericho_shm::{Flags, Key, Miss, SliceMemory};
use jericho_storage::{Completion, Direction, Segment, Transfer};

use crate::latched::Latched;
use crate::object::{Error, Object, Place, Run};
use crate::reader;
use crate::state::{After, Report, Shared, State, run};
use crate::{Intent, PAGES_PER_GET_MAX};

pub(crate) type GetDone = Box<dyn FnOnce(Result<Grant, Error>) + Send>;

/// The pages and the intent of a Get.
#[derive(Clone)]
struct Request {
    object: Arc<dyn Object>,
    first: u64,
    count: u32,
    intent: Intent,
}

/// A Get that waits.
pub(crate) struct Pending {
    request: Request,
    done: Option<GetDone>,
    /// Entries pinned for this Get so far.
    held: Vec<u32>,
    /// Number of fills, clashes and unfinished `start_fill` calls that this Get waits for.
    remaining: u32,
    error: Option<Error>,
    /// Another Get fills some of the pages, so check all pages again at the end.
    reenter: bool,
    /// The Get has already waited in the queue for frames, so it does not queue again.
    has_queued: bool,
}

/// Pages that a Get has inserted and that must be filled.
pub(crate) struct Fill {
    get: u64,
    object: Arc<dyn Object>,
    /// (page, entry, frame), in page order.
    pages: Vec<(u64, u32, u32)>,
    read_ahead: bool,
}

/// A read transfer in flight.
pub(crate) struct Reading {
    get: u64,
    entries: Vec<u32>,
    /// The pages may be written inline.
    backed: bool,
}

/// Stands for the entry of a page that is not in the table.
const ABSENT: u32 = u32::MAX;

enum Entered {
    /// All pages are in the table, for Overwrite perhaps still unfilled. Holds their entries.
    Ready(Vec<u32>),
    /// The Get waits under its id, perhaps with a fill to start; or it has ended, and its result is in `After`.
    Waits,
    /// The Get would have to wait, but must not.
    WouldWait,
}

/// Runs the *new* stage. `pending` is the Get that may wait; it also receives errors. `None` for a Get that must not wait.
fn enter(
    state: &mut State,
    shared: &Arc<Shared>,
    request: &Request,
    pending: Option<Box<Pending>>,
    after: &mut After,
) -> Result<Entered, Error> {
    let (object, first, count, intent) = (
        &request.object,
        request.first,
        request.count,
        request.intent,
    );
    debug_assert!(count > 0 && count <= PAGES_PER_GET_MAX);
    let refused = if shared.closing.load(Relaxed) {
        Some(Error::Closed)
    } else {
        (object.slice_of(first) != shared.id).then_some(Error::Moved)
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
                    } else if state.evict_unfilled(shared, found) {
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
                    .is_some_and(|p| !p.has_queued && p.held.is_empty())));
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
            // Read-ahead does not wait for frames.
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
        // Pages pinned by an earlier round stay pinned, because this round has pinned them too.
        let Some(p) = pending else {
            return Ok(Entered::Ready(entries));
        };
        p.held.iter().for_each(|index| state.unpin(*index));
        if let Some(done) = p.done {
            let grant = Grant::new(shared, p.request.object, first, entries);
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
    p.reenter = !clashes.is_empty();
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

/// Enters a Get that may wait, for the first time or again.
fn enter_waiting(state: &mut State, shared: &Arc<Shared>, pending: Pending, after: &mut After) {
    let request = pending.request.clone();
    // `enter` passes errors to the Get's callback.
    let _ = enter(state, shared, &request, Some(Box::new(pending)), after);
}

fn fail(state: &mut State, shared: &Arc<Shared>, p: Pending, error: Error, after: &mut After) {
    p.held.iter().for_each(|index| state.unpin(*index));
    if let Some(done) = p.done {
        after.granted.push((done, Err(error)));
    }
    state.retry_waiting(shared, after);
}

/// Records that one thing that a Get waited for has ended.
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
    } else if p.reenter {
        enter_waiting(state, shared, p, after);
    } else if let Some(done) = p.done.take() {
        let entries = std::mem::take(&mut p.held);
        after.granted.push((
            done,
            Ok(Grant::new(
                shared,
                p.request.object,
                p.request.first,
                entries,
            )),
        ));
    } else {
        p.held.iter().for_each(|index| state.unpin(*index));
    }
}

/// Lets stalled Gets enter again, in order, as long as there are frames.
pub(crate) fn retry_stalled(state: &mut State, shared: &Arc<Shared>, after: &mut After) {
    while let Some(get) = state.stalled.front().copied() {
        let need = state.pending.get(&get).map_or(0, |p| p.request.count);
        if need > state.frames.free() && !shared.closing.load(Relaxed) {
            after.wake_evictor = true;
            return;
        }
        state.stalled.pop_front();
        if let Some(mut p) = state.pending.remove(&get) {
            p.has_queued = true;
            enter_waiting(state, shared, p, after);
        }
    }
}

/// Asks the object where pages are, zeroes holes, and queues the reads. Called without the lock.
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

/// Splits runs into zeroed frames and read transfers.
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
        "an object placed fewer pages than requested"
    );
}

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

/// Removes an entry whose fill failed or was given up. Holders of its pins keep them, because a pin names the entry by its index.
fn drop_fill(state: &mut State, shared: &Arc<Shared>, index: u32, after: &mut After) {
    let entry = shared.memory.entry(index);
    let word = entry.state();
    if word.has(Flags::FILL) && state.take_out(shared, index, word) {
        let frame = state.filling.remove(&index);
        state.free_frame(frame.unwrap_or(word.frame()));
    }
    state.fill_ended(shared, index, after);
}

/// Ends a read transfer. Runs in the thread that submitted the transfer: the pipeline, or a thread with a reader. The callbacks
/// of its Gets run there too.
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

/// Gets pages without waiting. Returns `None` if it would have to wait.
pub(crate) fn try_get(
    shared: &Arc<Shared>,
    object: &Arc<dyn Object>,
    first: u64,
    count: u32,
    intent: Intent,
) -> Result<Option<Grant>, Error> {
    let mut after = After::default();
    let request = Request {
        object: object.clone(),
        first,
        count,
        intent,
    };
    let entered = enter(&mut shared.lock(), shared, &request, None, &mut after);
    run(shared, after);
    match entered? {
        Entered::Ready(entries) => Ok(Some(Grant::new(shared, request.object, first, entries))),
        Entered::WouldWait | Entered::Waits => Ok(None),
    }
}

/// Gets pages. `done` runs when they are in the cache; it is `None` for read-ahead.
pub(crate) fn get(
    shared: &Arc<Shared>,
    object: &Arc<dyn Object>,
    first: u64,
    count: u32,
    intent: Intent,
    done: Option<GetDone>,
) {
    let mut after = After::default();
    let request = Request {
        object: object.clone(),
        first,
        count,
        intent,
    };
    let pending = Pending {
        request,
        done,
        held: vec![],
        remaining: 0,
        error: None,
        reenter: false,
        has_queued: false,
    };
    enter_waiting(&mut shared.lock(), shared, pending, &mut after);
    run(shared, after);
}

/// Pinned pages: they stay in the cache until the grant is dropped (the Put).
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

    /// Returns the first page.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// Returns the number of pages.
    pub fn count(&self) -> u32 {
        self.entries.len() as u32
    }

    fn entry(&self, page: u64) -> u32 {
        self.entries[(page - self.first) as usize]
    }

    /// Returns whether a page of the grant has contents. A page got with `Intent::Overwrite` has none if it was not in the cache
    /// and has not been written yet.
    pub fn is_filled(&self, page: u64) -> bool {
        !self
            .shared
            .memory
            .entry(self.entry(page))
            .state()
            .has(Flags::FILL)
    }

    /// Reads bytes of a page of the grant, as of one instant. Panics outside of the grant. Must not be called for a page without
    /// contents. Fails when a writer latches the page for longer than a reader spins. The caller then drops the grant, and gets
    /// the page again with `Slice::when_unlatched`.
    pub fn read(&self, page: u64, offset: usize, out: &mut [u8]) -> Result<(), Latched> {
        let memory = &self.shared.memory;
        let key = Key::new(self.object.id(), page);
        match memory.read(key, offset, out, self.shared.epoch()) {
            Ok(()) => Ok(()),
            Err(Miss::Busy) => Err(Latched::new(memory, key)),
            Err(_) => {
                // A client has corrupted the table. Zeros reveal no other file's bytes; only the client's volume is affected.
                out.fill(0);
                Ok(())
            }
        }
    }

    /// Writes bytes of a page of the grant. The caller has reserved space for the page. A page without contents is written whole.
    /// Fails as `read` does, and then leaves the page unchanged.
    pub fn write(&mut self, page: u64, offset: usize, data: &[u8]) -> Result<(), Latched> {
        let memory = &self.shared.memory;
        let index = self.entry(page);
        let entry = memory.entry(index);
        let word = entry.state();
        // If any of these does not hold, a client has corrupted the entry: its flags or its frame number.
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

    /// Returns BACKED for a page that is published now, if clients may write the object inline. The page was inserted before this
    /// check. `Slice::revoke_writes` therefore either runs before the check or finds the page in its fill.
    fn backed(&self) -> Flags {
        match self.object.may_write_inline() {
            true => Flags::BACKED,
            false => Flags::NONE,
        }
    }

    /// Allows inline writes to a page that has space reserved, if clients may write its object inline.
    fn back(&self, index: u32) {
        let entry = self.shared.memory.entry(index);
        if entry.state().has(Flags::BACKED) {
            return;
        }
        // Checks under the lock: `Slice::revoke_writes` takes it after the object has refused, and then visits the pages.
        let _state = self.shared.lock();
        if self.object.may_write_inline() {
            entry.mark(Flags::BACKED);
        }
    }

    /// Publishes pages without contents as zeros. Lets clients write all pages of the grant inline, if they may write the object
    /// inline. The caller has reserved space for the pages.
    pub fn offer(&mut self) {
        let memory = &self.shared.memory;
        for index in &self.entries {
            let entry = memory.entry(*index);
            let word = entry.state();
            if word.has(Flags::FILL) {
                // Fails if the frame number is invalid: a client has corrupted the entry.
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
                // The writer gave up before it wrote the page.
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

/// Reports to the slice that pages were made dirty inline.
pub(crate) fn report(shared: &Shared, object: &Arc<dyn Object>, first: u64, count: u32) {
    shared.reports.push(Report {
        object: object.clone(),
        first,
        count,
    });
    shared.dirtied(u64::from(count));
}
