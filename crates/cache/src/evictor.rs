//! The evictor thread: write-back, and eviction between two watermarks.
//!
//! It sleeps until somebody needs frames, pages became dirty, a sync was asked for, or write-backs ended.
//! Dirty pages are written when they are older than `Limits::dirty_age`, when they are more than the
//! background limit, or when a sync asks; neighbours go out in one transfer, also across objects where
//! their blocks are neighbours. Replacement is LRU by coarse timestamps: ages are sampled, and a
//! sweep drops clean pages at least as old as the threshold that the sample gives.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use foldhash::{HashMap, HashMapExt, HashSet, HashSetExt};
use jericho_format::PAGE_BYTES;
use jericho_shm::{Flags, Key};
use jericho_storage::{Completion, Direction, Queue, Transfer};

use crate::Done;
use crate::get::segments;
use crate::object::{Error, Object, Place};
use crate::outage::{self, Attempt};
use crate::state::{After, Shared, State, run};

/// Pages of one transfer at most: 1 MiB.
const TRANSFER_PAGES_MAX: usize = 256;
/// Pages taken from the index in one go, so that the lock is not held for long.
const BATCH_PAGES: usize = 1024;
/// Background write-backs in flight; syncs are not held back.
const BACKGROUND_TRANSFERS_MAX: usize = 16;
/// Entries looked at for one sample of ages, and in one turn of the sweep.
const SAMPLE: u32 = 512;
/// Pages taken out while the lock is held once.
const EVICTED_AT_ONCE: usize = 32;

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

/// A write transfer on its way.
pub(crate) struct WriteBack {
    /// Shared, so that its end can be told to the objects without the lock.
    parts: Arc<Vec<Part>>,
    syncs: Vec<u64>,
    /// Of the page that was tried most often.
    attempt: Attempt,
}

/// Neighbouring pages of one object in a transfer.
struct Part {
    object: Arc<dyn Object>,
    first: u64,
    entries: Vec<u32>,
}

impl WriteBack {
    /// The first page of the object from `from` on that is in this transfer.
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

/// A sync in progress: waits for transfers, then writes once more what was being written when it began and had
/// become dirty again.
struct Sync {
    object: u64,
    remaining: usize,
    deferred: Vec<u64>,
    error: Option<Error>,
    /// Key in `Evictor::groups`, when it is part of a SyncAll.
    group: Option<u64>,
    done: Option<Done>,
}

struct Group {
    remaining: usize,
    error: Option<Error>,
    done: Done,
}

/// Pages chosen for write-back, marked WRITE_BACK, with their frames.
struct Chosen {
    object: Arc<dyn Object>,
    /// (page, entry, frame) in order.
    pages: Vec<(u64, u32, u32)>,
    sync: Option<u64>,
    attempt: Attempt,
}

pub(crate) struct Evictor {
    shared: Arc<Shared>,
    queue: Box<dyn Queue>,
    syncs: HashMap<u64, Sync>,
    groups: HashMap<u64, Group>,
    /// Syncs that wait for a latch.
    latched: Vec<u64>,
    hand: u32,
    /// Where the next sample is taken.
    sample: u32,
    /// Time of the last failed write-back, from the report of an outage to the report of its end.
    told: Option<Instant>,
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
            hand: 0,
            sample: 0,
            told: None,
        }
    }

    /// Runs until the slice closes and nothing is on its way.
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
                self.shared.hear_clients();
                let (ids, group) = {
                    let mut state = self.shared.lock();
                    state.drain_announced(&self.shared);
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
            shared.hear_clients();
        }
        let mut state = shared.lock();
        state.drain_announced(&shared);
        let id = state.new_id();
        let mut sync = Sync {
            object,
            remaining: 1,
            deferred: vec![],
            error: None,
            group,
            done,
        };
        // In flight: wait for it; what of it is dirty again follows in the second round.
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
        // Second round: pages that were in flight or latched when we looked.
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
            // Those that are on their way yet again were taken after the sync began: it has joined the transfer
            // that carries them. Only a latched page needs another look; its writer tells nobody.
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

    /// Places chosen pages and starts their transfers. Without the lock: the object may have to think.
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
                    "an object placed fewer pages than were asked for"
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
                    // Told before the pages may be evicted: whoever fetches them again must be sent to where they
                    // now are.
                    part.object.written(part.first, part.entries.len() as u32);
                    for index in part.entries.iter() {
                        shared.memory.entry(*index).unmark(Flags::WRITE_BACK);
                    }
                    shared.cleaned(part.entries.len() as u64);
                }
                Some(error) => self.failed(part, error),
            }
        }
        // Only now: until the object knows, or the pages are in the index again, `first_dirty` must find
        // them here.
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

    /// Pages could not be written: they are dirty again, and their object knows why.
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
                shared.cleaned(1); // counted twice: as in flight and as dirty again
            }
        }
        state
            .dirty
            .fail(&part.object, part.first, part.entries.len() as u64, now);
        state.write_back_failed(&shared, error, now);
        state.end_vain_waits(&shared, now, &mut after);
        drop(state);
        if self.told.replace(now).is_none() {
            outage::tell(&shared, Some(error));
        }
        run(&shared, after);
    }

    /// Resumes writers that wait in vain, writes one failed piece as a trial, and ends an outage that is over.
    fn mind_outage(&mut self) {
        let shared = self.shared.clone();
        let mut after = After::default();
        let now = Instant::now();
        let mut state = shared.lock();
        if state.outage.is_none() {
            drop(state);
            if self.told.is_some_and(|failed| now - failed >= outage::CALM) {
                self.told = None;
                outage::tell(&shared, None);
            }
            return;
        }
        state.end_vain_waits(&shared, now, &mut after);
        let mut chosen = None;
        if state.is_probe_due(now) {
            // Failed pages that were dropped meanwhile need no trial.
            while let (None, Some((id, pages))) = (&chosen, state.dirty.probe(TRANSFER_PAGES_MAX)) {
                chosen = choose(&mut state, &shared, id, pages, None, Attempt::Trial).0;
            }
        }
        // A trial in flight tells at its end whether the outage goes on.
        if chosen.is_none() && state.writing.values().all(|w| w.attempt == Attempt::First) {
            state.end_outage(&shared, now);
        }
        drop(state);
        run(&shared, after);
        self.write(chosen.into_iter().collect());
    }

    /// Background write-back and eviction. Returns how long to sleep if nothing happens.
    fn work(&mut self) -> Option<Duration> {
        let shared = self.shared.clone();
        let short = {
            let mut state = shared.lock();
            state.drain_announced(&shared);
            if shared.put_count_right(&state) && !state.throttled.is_empty() {
                // Nothing is on its way whose end would let them go on.
                let mut after = After::default();
                state.retry_waiting(&shared, &mut after);
                after.wake_evictor = false;
                drop(state);
                run(&shared, after);
                state = shared.lock();
            }
            let short = state.frames.free() < shared.limits.free_low || !state.stalled.is_empty();
            if !state.invalidations.is_empty() {
                let mut after = After::default();
                state.retry_waiting(&shared, &mut after);
                after.wake_evictor = false; // the timeout below looks again
                drop(state);
                run(&shared, after);
            }
            short
        };
        self.mind_outage();
        let starved = short && !self.evict();
        shared.repair_if_needed(starved);
        let skipped = self.write_back(starved);
        let state = shared.lock();
        if !state.invalidations.is_empty() {
            return Some(Duration::from_millis(1));
        }
        // Frames are needed and none could be had, or dirty pages could not be taken: they are pinned, latched
        // or on their way. What ends that wakes us, except for a latch.
        if (starved || skipped) && state.writing.is_empty() {
            return Some(Duration::from_millis(1));
        }
        if state.damage.is_suspected() || state.outage.is_some() {
            return Some(Duration::from_millis(250));
        }
        let some = shared.dirty() > 0 || !shared.announced.is_empty() || self.told.is_some();
        some.then_some(Duration::from_millis(500))
    }

    /// Starts background write-backs: of old pages, and of any while there are too many or frames are wanted.
    /// True when pages had to be left out because somebody is writing to them.
    fn write_back(&mut self, starved: bool) -> bool {
        let shared = self.shared.clone();
        // Objects of which only pages were left that can't be taken now.
        let mut busy = HashSet::new();
        while self.queue.in_flight() < BACKGROUND_TRANSFERS_MAX {
            let mut chosen = vec![];
            let mut pages = 0;
            {
                let mut state = shared.lock();
                let now = Instant::now();
                let many = shared.dirty() >= u64::from(shared.limits.dirty_background);
                while pages < BATCH_PAGES {
                    let (id, attempt) = match state.dirty.retried(&busy) {
                        Some(id) => (id, Attempt::Again),
                        None => match state.dirty.oldest(&busy) {
                            Some((id, since))
                                if starved || many || now - since >= shared.limits.dirty_age =>
                            {
                                (id, Attempt::First)
                            }
                            _ => break,
                        },
                    };
                    let (c, skipped, next) =
                        choose(&mut state, &shared, id, 0..u64::MAX, None, attempt);
                    if next.is_some() || !skipped.is_empty() {
                        // The rest waits for its turn behind the others, or for what it is busy with.
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

    /// Frees frames up to the high watermark. False if it could not reach even the low one.
    fn evict(&mut self) -> bool {
        let shared = self.shared.clone();
        let entries = shared.memory.geometry().entries();
        if let Some(collector) = shared.collector.get() {
            collector();
        }
        let mut age_min = {
            let state = shared.lock();
            let need = shared.limits.free_high.saturating_sub(state.frames.free());
            let resident = (shared.limits.frames - state.frames.free()).max(1);
            drop(state);
            // Old enough is what a sweep of a quarter of the table would find enough of.
            self.sampled_age((u64::from(need) * 4 * 256 / u64::from(resident)).min(256) as u32)
        };
        let mut looked = 0;
        let mut old = Vec::with_capacity(EVICTED_AT_ONCE);
        loop {
            let epoch = shared.epoch();
            // Looked for without the lock, which who reads from the device takes again and again.
            for _ in 0..SAMPLE {
                let index = self.hand;
                self.hand = if self.hand + 1 == entries {
                    0
                } else {
                    self.hand + 1
                };
                looked += 1;
                let word = shared.memory.entry(index).state();
                if !Shared::is_idle(word) {
                    continue;
                }
                let age = shared.memory.age(index, epoch);
                if age >= age_min {
                    old.push((index, word));
                    if old.len() == EVICTED_AT_ONCE {
                        break;
                    }
                } else if age > 200 {
                    shared.memory.set_age(index, epoch, 200); // before it wraps and looks young
                }
            }
            let mut after = After::default();
            let mut state = shared.lock();
            for (index, word) in old.drain(..) {
                // Not if anything of it has changed since.
                if !state.is_held(index) && state.remove(&shared, index, word) {
                    shared.counts.evictions.fetch_add(1, Relaxed);
                }
            }
            let free = state.frames.free();
            if !state.stalled.is_empty() {
                crate::get::retry_stalled(&mut state, &shared, &mut after);
            }
            let free_now = state.frames.free().min(free);
            drop(state);
            after.wake_evictor = false;
            run(&shared, after);
            if free_now >= shared.limits.free_high {
                return true;
            }
            if looked >= entries {
                if age_min == 0 {
                    return free_now >= shared.limits.free_low && shared.lock().stalled.is_empty();
                }
                (age_min, looked) = (0, 0);
            }
        }
    }

    /// The age that `of_256` of every 256 clean pages have at least, by a sample.
    fn sampled_age(&mut self, of_256: u32) -> u8 {
        let shared = &self.shared;
        let (entries, epoch) = (shared.memory.geometry().entries(), shared.epoch());
        let mut ages = Vec::with_capacity(SAMPLE as usize);
        // A stride that is odd and large visits distant lines; entries are many times the sample.
        for _ in 0..SAMPLE {
            self.sample = ((u64::from(self.sample) + 10_007) % u64::from(entries)) as u32;
            if Shared::is_idle(shared.memory.entry(self.sample).state()) {
                ages.push(shared.memory.age(self.sample, epoch));
            }
        }
        ages.sort_unstable_by(|a, b| b.cmp(a));
        let at = (ages.len() * of_256 as usize / 256).min(ages.len().saturating_sub(1));
        ages.get(at).copied().unwrap_or(0)
    }
}

/// Marks dirty pages of an object in a range for write-back. Returns them, those that could not be taken now
/// (latched, or still on their way from last time), and where to go on if there are more.
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
                // Clean or on its way; who makes it dirty again announces it again.
                state.dirty.remove(id, page);
                continue 'page;
            }
            if found.state.any(Flags::LATCH.with(Flags::WRITE_BACK)) {
                if !found.state.has(Flags::LATCH) && !state.on_the_way.contains(&found.index) {
                    // A client says so. Skipped this time, since it may say so again at once.
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
