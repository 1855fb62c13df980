//! The evictor thread: write-back, and eviction between two watermarks.
//!
//! The evictor sleeps until another thread needs frames, pages became dirty, a sync was requested, or a write-back ended. It
//! writes a dirty page when the page is older than `Limits::dirty_age`, when more pages are dirty than the background limit, or
//! for a sync. Neighbouring blocks go out in one transfer, even if they belong to different objects.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use foldhash::{HashMap, HashMapExt, HashSet, HashSetExt};
use jericho_format::PAGE_BYTES;
use jericho_shm::{Flags, Key};
use jericho_storage::{Completion, Direction, Queue, Transfer};

use crate::Done;
use crate::eviction::{self, AgedSweep, EVICTED_AT_ONCE, Residents};
use crate::get::segments;
use crate::object::{Error, Object, Place};
use crate::outage::{self, Attempt};
use crate::state::{After, Shared, State, run};

/// Maximum number of pages of one transfer: 1 MiB.
const TRANSFER_PAGES_MAX: usize = 256;
/// Pages taken from the index in one critical section, so that the lock is not held for long.
const BATCH_PAGES: usize = 1024;
/// Maximum number of background write-backs in flight. Syncs are not limited.
const BACKGROUND_TRANSFERS_MAX: usize = 16;

pub(crate) enum Job {
    Sync {
        object: u64,
        pages: Range<u64>,
        done: Done,
    },
    SyncAll {
        done: Done,
    },
}

/// A write transfer in flight.
pub(crate) struct WriteBack {
    /// Shared, so that the end of the transfer can be reported to the objects without the lock.
    parts: Arc<Vec<Part>>,
    syncs: Vec<u64>,
    /// The highest attempt among its pages.
    attempt: Attempt,
}

/// Neighbouring pages of one object in a transfer.
struct Part {
    object: Arc<dyn Object>,
    first: u64,
    entries: Vec<u32>,
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

    fn overlaps(&self, object: u64, pages: &Range<u64>) -> bool {
        self.first_of(object, pages.start)
            .is_some_and(|page| page < pages.end)
    }
}

/// A sync in progress. It waits for transfers, then writes pages that were in flight when it began and are dirty again.
struct Sync {
    object: u64,
    remaining: usize,
    deferred: Vec<u64>,
    error: Option<Error>,
    /// Key in `Evictor::groups`, if the sync is part of a SyncAll.
    group: Option<u64>,
    done: Option<Done>,
}

struct Group {
    remaining: usize,
    error: Option<Error>,
    done: Done,
}

/// Pages chosen for write-back and marked WRITE_BACK, with their frames.
struct Chosen {
    object: Arc<dyn Object>,
    /// (page, entry, frame), in page order.
    pages: Vec<(u64, u32, u32)>,
    sync: Option<u64>,
    attempt: Attempt,
}

pub(crate) struct Evictor {
    shared: Arc<Shared>,
    queue: Box<dyn Queue>,
    syncs: HashMap<u64, Sync>,
    groups: HashMap<u64, Group>,
    /// Syncs that wait for a latched page.
    latched: Vec<u64>,
    /// Chooses the pages to evict.
    replacement: AgedSweep,
    /// Time of the last failed write-back, from the report of an outage to the report of its end.
    outage_reported: Option<Instant>,
}

impl Evictor {
    pub fn new(shared: Arc<Shared>, queue: Box<dyn Queue>) -> Evictor {
        let (syncs, groups, latched) = (HashMap::new(), HashMap::new(), vec![]);
        Evictor {
            shared,
            queue,
            syncs,
            groups,
            latched,
            replacement: AgedSweep::default(),
            outage_reported: None,
        }
    }

    /// Runs until the slice closes and nothing is in flight.
    pub fn run(mut self) {
        let mut completions = vec![];
        let mut timeout = None;
        loop {
            self.queue.wait(&mut completions, timeout);
            for completion in completions.drain(..) {
                self.write_ended(completion);
            }
            while let Some(job) = self.shared.jobs.pop() {
                self.start(job);
            }
            for sync in std::mem::take(&mut self.latched) {
                self.sync_step(sync, None);
            }
            timeout = self.work();
            if !self.latched.is_empty() {
                timeout = Some(Duration::from_millis(1));
            }
            if self.shared.closing.load(Relaxed)
                && self.queue.in_flight() == 0
                && self.shared.jobs.is_empty()
            {
                return;
            }
        }
    }

    fn start(&mut self, job: Job) {
        match job {
            Job::Sync {
                object,
                pages,
                done,
            } => self.sync(object, pages, None, Some(done)),
            Job::SyncAll { done } => {
                self.shared.drain_clients();
                let (ids, group) = {
                    let mut state = self.shared.lock();
                    state.drain_reports(&self.shared);
                    let mut ids = state.dirty.ids();
                    ids.extend(
                        state
                            .writing
                            .values()
                            .flat_map(|w| w.parts.iter().map(|p| p.object.id())),
                    );
                    ids.sort_unstable();
                    ids.dedup();
                    (ids, state.new_id())
                };
                self.groups.insert(
                    group,
                    Group {
                        remaining: ids.len() + 1,
                        error: None,
                        done,
                    },
                );
                for id in ids {
                    self.sync(id, 0..u64::MAX, Some(group), None);
                }
                self.group_step(group, None);
            }
        }
    }

    fn sync(&mut self, object: u64, pages: Range<u64>, group: Option<u64>, done: Option<Done>) {
        let shared = self.shared.clone();
        if group.is_none() {
            shared.drain_clients();
        }
        let mut state = shared.lock();
        state.drain_reports(&shared);
        let id = state.new_id();
        let mut sync = Sync {
            object,
            remaining: 1,
            deferred: vec![],
            error: None,
            group,
            done,
        };
        // Waits for transfers in flight. Pages of them that are dirty again are written in the second round.
        for write in state
            .writing
            .values_mut()
            .filter(|w| w.overlaps(object, &pages))
        {
            write.syncs.push(id);
            sync.remaining += 1;
        }
        self.syncs.insert(id, sync);
        drop(state);
        self.write_all(object, pages, id);
        self.sync_step(id, None);
    }

    /// Starts the write-back of all pages in the range that are dirty now, for a sync.
    fn write_all(&mut self, object: u64, pages: Range<u64>, sync: u64) {
        let shared = self.shared.clone();
        let attempt = match shared.lock().dirty.retry(object) {
            true => Attempt::Trial,
            false => Attempt::First,
        };
        let mut from = pages.start;
        while from < pages.end {
            let (chosen, skipped, next) = {
                let mut state = shared.lock();
                let range = from..pages.end;
                choose(&mut state, &shared, object, range, Some(sync), attempt)
            };
            if let Some(s) = self.syncs.get_mut(&sync) {
                s.deferred.extend(skipped);
            }
            self.write(chosen.into_iter().collect());
            let Some(next) = next else { break };
            from = next;
        }
    }

    fn sync_step(&mut self, id: u64, error: Option<Error>) {
        let Some(sync) = self.syncs.get_mut(&id) else {
            return;
        };
        sync.remaining -= 1;
        sync.error = sync.error.take().or(error);
        if sync.remaining > 0 {
            return;
        }
        // Second round: pages that were in flight or latched in the first round.
        if sync.error.is_none() && !sync.deferred.is_empty() {
            let deferred = std::mem::take(&mut sync.deferred);
            let (object, first, last) = (sync.object, deferred[0], deferred[deferred.len() - 1]);
            let pages = first..last + 1;
            sync.remaining = 1;
            let shared = self.shared.clone();
            {
                let mut state = shared.lock();
                for write in state
                    .writing
                    .values_mut()
                    .filter(|w| w.overlaps(object, &pages))
                {
                    write.syncs.push(id);
                    sync.remaining += 1;
                }
            }
            self.write_all(object, pages, id);
            // Pages that are in flight again were taken after the sync began, and the sync has joined their transfer. Only a
            // latched page needs another round, because its writer wakes no thread.
            if let Some(sync) = self.syncs.get_mut(&id) {
                sync.deferred.retain(|page| {
                    let found = shared.memory.lookup(Key::new(object, *page));
                    found.is_some_and(|f| {
                        f.state.has(Flags::LATCH.with(Flags::DIRTY))
                            && !f.state.has(Flags::WRITE_BACK)
                    })
                });
                if !sync.deferred.is_empty() {
                    self.latched.push(id);
                    return;
                }
            }
            return self.sync_step(id, None);
        }
        let Some(sync) = self.syncs.remove(&id) else {
            return;
        };
        if let Some(group) = sync.group {
            self.group_step(group, sync.error);
        } else if let Some(done) = sync.done {
            done(sync.error.map_or(Ok(()), Err));
        }
    }

    fn group_step(&mut self, id: u64, error: Option<Error>) {
        let Some(group) = self.groups.get_mut(&id) else {
            return;
        };
        group.remaining -= 1;
        group.error = group.error.take().or(error);
        if group.remaining == 0
            && let Some(group) = self.groups.remove(&id)
        {
            (group.done)(group.error.map_or(Ok(()), Err));
        }
    }

    /// Places chosen pages and starts their transfers. Called without the lock, because the object may take its time.
    fn write(&mut self, chosen: Vec<Chosen>) {
        struct Piece {
            device: u16,
            offset_bytes: u64,
            part: Part,
            frames: Vec<u32>,
            sync: Option<u64>,
            attempt: Attempt,
        }
        let mut pieces: Vec<Piece> = vec![];
        for c in chosen {
            for pages in c.pages.chunk_by(|a, b| a.0 + 1 == b.0) {
                let (first, count) = (pages[0].0, pages.len());
                let mut runs = vec![];
                if let Err(error) = c.object.allocate(first, count as u32, &mut runs) {
                    let entries = pages.iter().map(|p| p.1).collect();
                    self.failed(
                        &Part {
                            object: c.object.clone(),
                            first,
                            entries,
                        },
                        &error,
                    );
                    if let Some(sync) = c.sync.and_then(|id| self.syncs.get_mut(&id)) {
                        sync.error = sync.error.take().or(Some(error));
                    }
                    continue;
                }
                let mut at = 0;
                for run in runs {
                    let end = (at + run.pages as usize).min(pages.len());
                    let Place::Device {
                        device,
                        mut offset_bytes,
                    } = run.place
                    else {
                        panic!("an object allocated a hole");
                    };
                    for part in pages[at..end].chunks(TRANSFER_PAGES_MAX) {
                        pieces.push(Piece {
                            device,
                            offset_bytes,
                            frames: part.iter().map(|p| p.2).collect(),
                            sync: c.sync,
                            attempt: c.attempt,
                            part: Part {
                                object: c.object.clone(),
                                first: part[0].0,
                                entries: part.iter().map(|p| p.1).collect(),
                            },
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
        }
        pieces.sort_by_key(|p| (p.device, p.offset_bytes));
        let shared = self.shared.clone();
        let mut pieces = pieces.into_iter().peekable();
        while let Some(piece) = pieces.next() {
            let (device, offset_bytes) = (piece.device, piece.offset_bytes);
            let (mut frames, mut attempt) = (piece.frames, piece.attempt);
            let mut parts = vec![piece.part];
            let mut syncs = Vec::from_iter(piece.sync);
            while let Some(next) = pieces.next_if(|p| {
                p.device == device
                    && p.offset_bytes == offset_bytes + frames.len() as u64 * PAGE_BYTES
                    && frames.len() + p.frames.len() <= TRANSFER_PAGES_MAX
            }) {
                frames.extend(next.frames);
                attempt = attempt.max(next.attempt);
                parts.push(next.part);
                syncs.extend(next.sync);
            }
            syncs.dedup();
            for sync in &syncs {
                if let Some(sync) = self.syncs.get_mut(sync) {
                    sync.remaining += 1;
                }
            }
            let bytes = frames.len() as u64 * PAGE_BYTES;
            shared.counts.written_back_bytes.fetch_add(bytes, Relaxed);
            shared.counts.write_backs.fetch_add(1, Relaxed);
            let segments = segments(&shared.memory, frames.into_iter());
            let tag = {
                let mut state = shared.lock();
                let tag = state.new_id();
                let parts = Arc::new(parts);
                let write = WriteBack {
                    parts,
                    syncs,
                    attempt,
                };
                state.writing.insert(tag, write);
                tag
            };
            let direction = Direction::Write;
            self.queue.submit(Transfer {
                tag,
                device,
                direction,
                offset_bytes,
                segments,
            });
        }
        shared.lock().chosen.clear();
    }

    fn write_ended(&mut self, completion: Completion) {
        let shared = self.shared.clone();
        let parts = match shared.lock().writing.get(&completion.tag) {
            Some(write) => write.parts.clone(),
            None => return,
        };
        let error = completion.result.err().map(Error::from);
        for part in parts.iter() {
            match &error {
                None => {
                    // The object must know before the pages can be evicted. A later fetch must go to their new place.
                    part.object.written(part.first, part.entries.len() as u32);
                    for index in part.entries.iter() {
                        shared.memory.entry(*index).unmark(Flags::WRITE_BACK);
                    }
                    shared.cleaned(part.entries.len() as u64);
                }
                Some(error) => self.failed(part, error),
            }
        }
        // Removed only now: `first_dirty` must find the pages here until the object knows of the write, or the index has the
        // pages again.
        let write = {
            let mut state = shared.lock();
            for part in parts.iter() {
                for index in &part.entries {
                    state.transfer_ended(*index);
                }
            }
            let write = state.writing.remove(&completion.tag);
            if error.is_none() {
                let attempt = write.as_ref().map_or(Attempt::First, |w| w.attempt);
                state.write_back_succeeded(attempt, Instant::now());
            }
            write
        };
        for sync in write.into_iter().flat_map(|w| w.syncs) {
            self.sync_step(sync, error.clone());
        }
        let mut after = After::default();
        shared.lock().retry_waiting(&shared, &mut after);
        run(&shared, after);
    }

    /// Handles a failed write-back: reports the error to the object and makes the pages dirty again.
    fn failed(&mut self, part: &Part, error: &Error) {
        let shared = self.shared.clone();
        shared.counts.write_errors.fetch_add(1, Relaxed);
        tracing::debug!(slice = shared.id, object = part.object.id(), first_page = part.first,
            pages = part.entries.len(), %error, "write-back failed");
        part.object
            .write_failed(part.first, part.entries.len() as u32, error);
        let now = Instant::now();
        let mut after = After::default();
        let mut state = shared.lock();
        for index in &part.entries {
            state.transfer_ended(*index);
            let before = shared.memory.entry(*index).mark(Flags::DIRTY);
            shared.memory.entry(*index).unmark(Flags::WRITE_BACK);
            if before.has(Flags::DIRTY) {
                shared.cleaned(1); // counted as in flight and as dirty again
            }
        }
        state
            .dirty
            .fail(&part.object, part.first, part.entries.len() as u64, now);
        state.write_back_failed(&shared, error, now);
        state.fail_throttled(&shared, now, &mut after);
        drop(state);
        if self.outage_reported.replace(now).is_none() {
            outage::notify(&shared, Some(error));
        }
        run(&shared, after);
    }

    /// Resumes throttled writers that would wait in vain, writes one failed piece as a trial, and ends an outage that is over.
    fn handle_outage(&mut self) {
        let shared = self.shared.clone();
        let mut after = After::default();
        let now = Instant::now();
        let mut state = shared.lock();
        if state.outage.is_none() {
            drop(state);
            if self
                .outage_reported
                .is_some_and(|failed| now - failed >= outage::CALM)
            {
                self.outage_reported = None;
                outage::notify(&shared, None);
            }
            return;
        }
        state.fail_throttled(&shared, now, &mut after);
        let mut chosen = None;
        if state.is_probe_due(now) {
            // Failed pages that are no longer dirty need no trial.
            while let (None, Some((id, pages))) = (&chosen, state.dirty.probe(TRANSFER_PAGES_MAX)) {
                chosen = choose(&mut state, &shared, id, pages, None, Attempt::Trial).0;
            }
        }
        // A trial in flight decides at its end whether the outage goes on.
        if chosen.is_none() && state.writing.values().all(|w| w.attempt == Attempt::First) {
            state.end_outage(&shared, now);
        }
        drop(state);
        run(&shared, after);
        self.write(chosen.into_iter().collect());
    }

    /// Does background write-back and eviction. Returns how long the evictor may sleep.
    fn work(&mut self) -> Option<Duration> {
        let shared = self.shared.clone();
        let needs_frames = {
            let mut state = shared.lock();
            state.drain_reports(&shared);
            if shared.correct_dirty_count(&state) && !state.throttled.is_empty() {
                // No transfer is in flight whose end would resume the throttled writers.
                let mut after = After::default();
                state.retry_waiting(&shared, &mut after);
                after.wake_evictor = false;
                drop(state);
                run(&shared, after);
                state = shared.lock();
            }
            let needs_frames =
                state.frames.free() < shared.limits.free_low || !state.stalled.is_empty();
            if !state.invalidations.is_empty() {
                let mut after = After::default();
                state.retry_waiting(&shared, &mut after);
                after.wake_evictor = false; // the timeout below retries
                drop(state);
                run(&shared, after);
            }
            needs_frames
        };
        self.handle_outage();
        let starved = needs_frames && !self.evict();
        shared.repair_if_needed(starved);
        let skipped = self.write_back(starved);
        let state = shared.lock();
        if !state.invalidations.is_empty() {
            return Some(Duration::from_millis(1));
        }
        // Frames are missing, or dirty pages could not be chosen, because pages are pinned, latched or in flight. The end of each
        // of these wakes the evictor, except for a latch.
        if (starved || skipped) && state.writing.is_empty() {
            return Some(Duration::from_millis(1));
        }
        if state.damage.is_suspected() || state.outage.is_some() {
            return Some(Duration::from_millis(250));
        }
        let is_active =
            shared.dirty() > 0 || !shared.reports.is_empty() || self.outage_reported.is_some();
        is_active.then_some(Duration::from_millis(500))
    }

    /// Starts background write-backs: of old pages, and of any pages while too many are dirty or frames are missing. Returns
    /// whether pages were skipped because a thread writes to them.
    fn write_back(&mut self, starved: bool) -> bool {
        let shared = self.shared.clone();
        // Objects whose remaining pages cannot be chosen now.
        let mut busy = HashSet::new();
        while self.queue.in_flight() < BACKGROUND_TRANSFERS_MAX {
            let mut chosen = vec![];
            let mut pages = 0;
            {
                let mut state = shared.lock();
                let now = Instant::now();
                let too_many = shared.dirty() >= u64::from(shared.limits.dirty_background);
                while pages < BATCH_PAGES {
                    let (id, attempt) = match state.dirty.retried(&busy) {
                        Some(id) => (id, Attempt::Again),
                        None => match state.dirty.oldest(&busy) {
                            Some((id, since))
                                if starved
                                    || too_many
                                    || now - since >= shared.limits.dirty_age =>
                            {
                                (id, Attempt::First)
                            }
                            _ => break,
                        },
                    };
                    let (c, skipped, next) =
                        choose(&mut state, &shared, id, 0..u64::MAX, None, attempt);
                    if next.is_some() || !skipped.is_empty() {
                        // The object's other pages wait behind the other objects, or for their writers.
                        state.dirty.requeue(id, now);
                        if c.is_none() {
                            busy.insert(id);
                        }
                    }
                    let Some(c) = c else { continue };
                    pages += c.pages.len();
                    chosen.push(c);
                }
            }
            if chosen.is_empty() {
                break;
            }
            self.write(chosen);
        }
        !busy.is_empty()
    }

    /// Frees frames up to the high watermark. Returns false if it could not reach even the low one.
    fn evict(&mut self) -> bool {
        let shared = self.shared.clone();
        if let Some(collector) = shared.collector.get() {
            collector();
        }
        let free = shared.lock().frames.free();
        let wanted = shared.limits.free_high.saturating_sub(free);
        let residents = Residents::new(&shared.memory);
        self.replacement
            .begin(&residents, wanted, shared.limits.frames - free);
        let mut victims = Vec::with_capacity(EVICTED_AT_ONCE);
        loop {
            // Chooses without the lock, because threads that read from the device take it often.
            let more = self.replacement.choose(&residents, &mut victims);
            let mut after = After::default();
            let free = eviction::evict(&mut shared.lock(), &shared, &mut victims, &mut after);
            after.wake_evictor = false;
            run(&shared, after);
            if free >= shared.limits.free_high {
                return true;
            }
            if !more {
                return free >= shared.limits.free_low && shared.lock().stalled.is_empty();
            }
        }
    }
}

/// Marks dirty pages of an object in a range for write-back. Returns three things: these pages; the pages that could not be taken
/// now (latched, or still in flight from the last write-back); the page where to continue if there are more.
fn choose(
    state: &mut State,
    shared: &Arc<Shared>,
    id: u64,
    range: Range<u64>,
    sync: Option<u64>,
    attempt: Attempt,
) -> (Option<Chosen>, Vec<u64>, Option<u64>) {
    let Some(object) = state.dirty.object(id).cloned() else {
        return (None, vec![], None);
    };
    let candidates = state.dirty.waiting(id, range, BATCH_PAGES);
    let next = (candidates.len() == BATCH_PAGES).then(|| candidates[BATCH_PAGES - 1] + 1);
    let (mut pages, mut skipped) = (vec![], vec![]);
    'page: for page in candidates {
        loop {
            let Some(found) = shared.memory.lookup(Key::new(id, page)) else {
                state.dirty.remove(id, page);
                continue 'page;
            };
            if !found.state.has(Flags::DIRTY) || found.state.frame() >= shared.limits.frames {
                // The page is clean or in flight. A writer that makes it dirty again reports it again.
                state.dirty.remove(id, page);
                continue 'page;
            }
            if found.state.any(Flags::LATCH.with(Flags::WRITE_BACK)) {
                if !found.state.has(Flags::LATCH) && !state.on_the_way.contains(&found.index) {
                    // The slice does not write the page back, so a client set the flag. Skips the page this time, since the
                    // client may set it again at once.
                    shared.memory.entry(found.index).unmark(Flags::WRITE_BACK);
                }
                if state.want_latched(shared, found.index, found.state) {
                    continue;
                }
                skipped.push(page);
                continue 'page;
            }
            let entry = shared.memory.entry(found.index);
            if entry.try_mark(found.state, Flags::WRITE_BACK, Flags::DIRTY) {
                state.dirty.remove(id, page);
                state.on_the_way.insert(found.index);
                pages.push((page, found.index, found.state.frame()));
                state.chosen.push((id, page));
                continue 'page;
            }
        }
    }
    let chosen = (!pages.is_empty()).then_some(Chosen {
        object,
        pages,
        sync,
        attempt,
    });
    (chosen, skipped, next)
}
