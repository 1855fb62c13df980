//! The evictor thread: takes the steps of syncs, write-back and eviction, and does their I/O.
//!
//! The evictor sleeps until another thread needs frames, pages became dirty, a sync was requested, or a write-back ended.
//! Neighbouring blocks go out in one transfer, even if they belong to different objects.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use foldhash::{HashMap, HashMapExt, HashSet, HashSetExt};
use jericho_storage::{Completion, Direction, Queue, Transfer};

use crate::copies::{Copies, Copy};
use crate::effects::Effects;
use crate::eviction;
use crate::object::Error;
use crate::replacement::{AgedSweep, Replacement, VICTIMS_AT_ONCE};
use crate::requests::{Done, SyncJob};
use crate::scheduler::{perform, retry_waiting};
use crate::shared::{DIRTY_VISIT, SliceShared};
use crate::state::SliceState;
use crate::sync::{SyncStep, Syncs};
use crate::transfers::{self, Attempt, Chosen, MergedParts, Part, PlacedPart, WriteBack};
use crate::{repair, waiting, write_back};

/// Maximum number of background write-backs in flight. Syncs are not limited.
const BACKGROUND_TRANSFERS_MAX: usize = 16;

/// The observer learns of the end of an outage when nothing has failed for this long. A single page that finds space does not
/// count as an end.
const CALM: Duration = Duration::from_secs(5);

/// A transfer that is recorded and not submitted.
struct Uncopied {
    transfer: Transfer,
    frames: Vec<u32>,
}

pub(crate) struct Evictor {
    shared: Arc<SliceShared>,
    queue: Box<dyn Queue>,
    syncs: Syncs,
    /// Copies of pages with checksums that are in flight, by the tags of their transfers.
    copied: HashMap<u64, Copy>,
    copies: Copies,
    /// Transfers that wait for a copy.
    uncopied: VecDeque<Uncopied>,
    /// Chooses the pages to evict.
    replacement: AgedSweep,
    /// Time of the last failed write-back. `None` while no outage is reported.
    outage_reported: Option<Instant>,
}

impl Evictor {
    pub fn new(shared: Arc<SliceShared>, queue: Box<dyn Queue>) -> Evictor {
        Evictor {
            shared,
            queue,
            syncs: Syncs::new(),
            copied: HashMap::new(),
            copies: Copies::default(),
            uncopied: VecDeque::new(),
            replacement: AgedSweep::default(),
            outage_reported: None,
        }
    }

    /// Runs until the slice closes and nothing is in flight.
    pub fn run(mut self) {
        let mut completions = vec![];
        let mut timeout = None;
        loop {
            timeout = self.shared.before_sleep(timeout);
            self.queue.wait(&mut completions, timeout);
            for completion in completions.drain(..) {
                self.write_ended(completion);
            }
            while let Some(job) = self.shared.jobs.pop() {
                self.start(job);
            }
            for sync in self.syncs.take_latched() {
                self.sync_step(sync, None);
            }
            self.submit_copies();
            timeout = self.work();
            if self.syncs.has_latched() {
                timeout = Some(Duration::from_millis(1));
            }
            if !self.uncopied.is_empty() && self.queue.in_flight() == 0 {
                // There was no memory for a copy.
                timeout = Some(Duration::from_millis(100));
            }
            if self.shared.context.closing.load(SeqCst)
                && self.queue.in_flight() == 0
                && self.uncopied.is_empty()
                && !self.shared.has_small_syncs()
                && self.shared.jobs.is_empty()
            {
                return;
            }
        }
    }

    fn start(&mut self, job: SyncJob) {
        match job {
            SyncJob::Pages {
                object,
                pages,
                done,
            } => self.sync(object, pages, None, Some(done)),
            SyncJob::All { done } => {
                let shared = self.shared.clone();
                shared.drain_clients();
                let (group, ids) =
                    self.syncs
                        .begin_group(&mut shared.lock(), &shared.context, done);
                for id in ids {
                    self.sync(id, 0..u64::MAX, Some(group), None);
                }
                if let SyncStep::Ended(done, result) = self.syncs.group_step(group, None) {
                    done(result);
                }
            }
            SyncJob::TransferEnded { syncs, error } => {
                for sync in syncs {
                    self.sync_step(sync, error.clone());
                }
            }
        }
    }

    fn sync(&mut self, object: u64, pages: Range<u64>, group: Option<u64>, done: Option<Done>) {
        let shared = self.shared.clone();
        if group.is_none() {
            shared.drain_clients();
        }
        let id = self.syncs.begin(
            &mut shared.lock(),
            &shared.context,
            (object, &pages),
            group,
            done,
        );
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
            let range = from..pages.end;
            let choice = {
                let mut state = shared.lock();
                // In the hold that chooses: a page of a small sync is no candidate, and the sync must wait for it.
                self.syncs
                    .join_small_syncs(&mut state, sync, object, &range);
                let context = &shared.context;
                write_back::choose(&mut state, context, object, range, Some(sync), attempt)
            };
            self.syncs.defer(sync, choice.skipped);
            self.write(choice.chosen.into_iter().collect());
            let Some(next) = choice.next else { break };
            from = next;
        }
    }

    fn sync_step(&mut self, id: u64, error: Option<Error>) {
        let shared = self.shared.clone();
        let mut step = self.syncs.step(id, error);
        while let SyncStep::SecondRound { object, pages } = step {
            self.syncs.join(&mut shared.lock(), id, object, &pages);
            self.write_all(object, pages, id);
            if self.syncs.waits_for_latch(&shared.context, id) {
                return;
            }
            step = self.syncs.step(id, None);
        }
        if let SyncStep::Ended(done, result) = step {
            done(result);
        }
    }

    /// Places chosen pages and starts their transfers. Called without the lock, because the object may take its time.
    fn write(&mut self, chosen: Vec<Chosen>) {
        let mut placed = self.place(chosen);
        placed.sort_by_key(|p| (p.device, p.offset_bytes));
        let mut placed = placed.into_iter().peekable();
        while let Some(parts) = MergedParts::next(&mut placed) {
            self.submit(parts);
        }
        self.shared.lock().chosen.clear();
    }

    /// Asks the objects where chosen pages go.
    fn place(&mut self, chosen: Vec<Chosen>) -> Vec<PlacedPart> {
        let mut placed = vec![];
        for c in chosen {
            for pages in c.pages.chunk_by(|a, b| a.0 + 1 == b.0) {
                let mut runs = vec![];
                let first = pages[0].0;
                if let Err(error) = c.object.allocate(first, pages.len() as u32, &mut runs) {
                    self.failed(&Part::new(&c, pages), &error);
                    if let Some(sync) = c.sync {
                        self.syncs.fail(sync, error);
                    }
                    continue;
                }
                transfers::place(&c, pages, runs, &mut placed);
            }
        }
        placed
    }

    fn submit(&mut self, merged: MergedParts) {
        let shared = self.shared.clone();
        for sync in &merged.syncs {
            self.syncs.transfer_started(*sync);
        }
        let counts = &shared.context.counts;
        counts.written_back_bytes.fetch_add(merged.bytes(), Relaxed);
        counts.write_backs.fetch_add(1, Relaxed);
        let is_copied = merged.parts.iter().any(|part| part.object.has_checksums());
        let tag = {
            let mut state = shared.lock();
            let tag = state.new_id();
            let write = WriteBack {
                parts: Arc::new(merged.parts),
                syncs: merged.syncs,
                attempt: merged.attempt,
                callers: None,
            };
            state.writing.insert(tag, write);
            tag
        };
        let mut transfer = Transfer {
            tag,
            device: merged.device,
            direction: Direction::Write,
            offset_bytes: merged.offset_bytes,
            segments: vec![],
        };
        let frames = merged.frames;
        if is_copied {
            self.uncopied.push_back(Uncopied { transfer, frames });
            return self.submit_copies();
        }
        transfer.segments = transfers::segments(&shared.context.memory, frames.into_iter());
        self.queue.submit(transfer);
    }

    /// Submits transfers that wait for a copy, as many as get one. If some still wait, transfers with copies are in flight.
    fn submit_copies(&mut self) {
        while let Some(next) = self.uncopied.front() {
            let taken = self.copies.take(&self.shared.context.memory, &next.frames);
            let Ok(Some(copy)) = taken.inspect_err(|error| {
                tracing::error!(%error, "no memory for a copy of pages that are written back");
            }) else {
                break;
            };
            if let Some(Uncopied { mut transfer, .. }) = self.uncopied.pop_front() {
                transfer.segments = copy.segments();
                self.copied.insert(transfer.tag, copy);
                self.queue.submit(transfer);
            }
        }
    }

    fn write_ended(&mut self, completion: Completion) {
        let shared = self.shared.clone();
        let parts = match shared.lock().writing.get(&completion.tag) {
            Some(write) => write.parts.clone(),
            None => return,
        };
        let copy = self.copied.remove(&completion.tag);
        let mut sums = copy.as_ref().map_or(&[][..], |copy| &copy.sums);
        let error = completion.result.err().map(Error::from);
        for part in parts.iter() {
            let own = sums.split_off(..part.entries.len().min(sums.len()));
            match &error {
                None => {
                    // The object must know before the pages can be evicted. A later fetch must go to their new place.
                    match part.object.has_checksums() {
                        true => part
                            .object
                            .written_summed(part.first, own.unwrap_or_default()),
                        false => part.object.written(part.first, part.entries.len() as u32),
                    }
                    write_back::clean(&shared.context, part);
                }
                Some(error) => self.failed(part, error),
            }
        }
        if let Some(copy) = copy {
            self.copies.give_back(copy);
        }
        let write = write_back::ended(&mut shared.lock(), completion.tag, error.is_none());
        if error.is_none() {
            parts.iter().for_each(|part| part.object.write_back_ended());
        }
        for sync in write.into_iter().flat_map(|w| w.syncs) {
            self.sync_step(sync, error.clone());
        }
        retry_waiting(&shared);
    }

    /// Handles a failed write-back: reports the error to the object and makes the pages dirty again.
    fn failed(&mut self, part: &Part, error: &Error) {
        let shared = self.shared.clone();
        let context = &shared.context;
        write_back::note_failure(context, part, error);
        let now = Instant::now();
        let mut effects = Effects::default();
        write_back::failed(&mut shared.lock(), context, part, error, now, &mut effects);
        if self.outage_reported.replace(now).is_none() {
            shared.notify_outage(Some(error));
        }
        perform(&shared, effects);
    }

    /// Advances an outage, and reports its end.
    fn handle_outage(&mut self) {
        let shared = self.shared.clone();
        let mut effects = Effects::default();
        let now = Instant::now();
        let mut state = shared.lock();
        let Some((failed_at, error)) = state
            .outage
            .as_ref()
            .map(|o| (o.failed_at, o.error.clone()))
        else {
            drop(state);
            if self
                .outage_reported
                .is_some_and(|failed| now.saturating_duration_since(failed) >= CALM)
            {
                self.outage_reported = None;
                shared.notify_outage(None);
            }
            return;
        };
        let chosen = write_back::choose_trial(&mut state, &shared.context, now, &mut effects);
        drop(state);
        perform(&shared, effects);
        // The write-back of a small sync has failed.
        if self
            .outage_reported
            .is_none_or(|reported| reported < failed_at)
            && self.outage_reported.replace(failed_at).is_none()
        {
            shared.notify_outage(Some(&error));
        }
        self.write(chosen.into_iter().collect());
    }

    /// Does background write-back and eviction. Returns how long the evictor may sleep.
    fn work(&mut self) -> Option<Duration> {
        let needs_frames = self.resume_waiting();
        if needs_frames {
            self.shared.wish_for_frames();
        }
        self.handle_outage();
        let starved = needs_frames && !self.evict();
        self.repair_if_needed(starved);
        let skipped = self.write_back(starved);
        let (context, state) = (&self.shared.context, self.shared.lock());
        if !state.invalidations.is_empty() {
            return Some(Duration::from_millis(1));
        }
        // Frames are missing, or dirty pages could not be chosen, because pages are pinned, latched or in flight. The end of a pin
        // or of the evictor's own transfer wakes the evictor. The end of a latch or of a small sync does not.
        if (starved || skipped) && self.queue.in_flight() == 0 && self.uncopied.is_empty() {
            return Some(Duration::from_millis(1));
        }
        if state.damage.is_suspected() || state.outage.is_some() {
            return Some(Duration::from_millis(250));
        }
        let is_active =
            context.dirty() > 0 || !context.reports.is_empty() || self.outage_reported.is_some();
        is_active.then_some(DIRTY_VISIT)
    }

    /// Absorbs reports, and retries the waiting requests that no other thread would retry. Returns whether frames are needed.
    fn resume_waiting(&self) -> bool {
        let (shared, context) = (&self.shared, &self.shared.context);
        let retry = |state: &mut SliceState| {
            let mut effects = Effects::default();
            waiting::retry(state, context, &mut effects);
            effects.wake_evictor = false; // the evictor's timeout retries
            effects
        };
        let mut state = shared.lock();
        state.drain_reports(context);
        if write_back::correct_dirty_count(&state, context) && !state.throttled.is_empty() {
            // No transfer is in flight, so no completion would resume the throttled writers.
            let effects = retry(&mut state);
            drop(state);
            perform(shared, effects);
            state = shared.lock();
        }
        let needs_frames =
            state.frames.free() < context.limits.free_low || !state.stalled.is_empty();
        if !state.invalidations.is_empty() {
            let effects = retry(&mut state);
            drop(state);
            perform(shared, effects);
        }
        needs_frames
    }

    /// Repairs the table if frames were missing for a while, or after an impossible state. Does nothing while write-backs are in
    /// flight.
    fn repair_if_needed(&self, starved: bool) {
        let (shared, context) = (&self.shared, &self.shared.context);
        let due = repair::is_due(&mut shared.lock(), starved);
        if !due || context.closing.load(Relaxed) {
            return;
        }
        shared.drain_clients();
        let (evicted, frames) = {
            let mut state = shared.lock();
            state.drain_reports(context);
            repair::run(&mut state, context, starved)
        };
        if evicted + frames > 0 {
            tracing::warn!(
                slice = context.id,
                evicted,
                frames,
                "repaired the table of the cache, which a program had corrupted"
            );
        }
    }

    /// Starts background write-backs. Returns whether due pages could not be chosen, because they are latched or in flight.
    fn write_back(&mut self, starved: bool) -> bool {
        let shared = self.shared.clone();
        // Objects whose remaining pages cannot be chosen now.
        let mut busy = HashSet::new();
        while self.queue.in_flight() + self.uncopied.len() < BACKGROUND_TRANSFERS_MAX {
            let context = &shared.context;
            let chosen = write_back::choose_batch(&mut shared.lock(), context, starved, &mut busy);
            if chosen.is_empty() {
                break;
            }
            self.write(chosen);
        }
        !busy.is_empty()
    }

    /// Frees frames up to the high watermark. Returns false if it could not reach even the low one, or Gets still wait for frames.
    fn evict(&mut self) -> bool {
        let shared = self.shared.clone();
        let (context, limits) = (&shared.context, &shared.context.limits);
        if let Some(collector) = shared.collector.get() {
            collector();
        }
        let (free, present) = {
            let state = shared.lock();
            (state.frames.free(), state.frames.present())
        };
        let wanted = limits.free_high.saturating_sub(free);
        self.replacement
            .begin(&context.memory, wanted, present - free);
        let mut victims = Vec::with_capacity(VICTIMS_AT_ONCE);
        loop {
            // Chooses without the lock, because threads that read from the device take it often.
            let more = self.replacement.choose(&context.memory, &mut victims);
            let mut effects = Effects::default();
            let mut state = shared.lock();
            let free = eviction::evict(&mut state, context, &mut victims, &mut effects);
            waiting::retry_if_released(&mut state, context, &mut effects);
            let free = free.min(state.frames.free());
            drop(state);
            effects.wake_evictor = false;
            perform(&shared, effects);
            if free >= limits.free_high {
                return true;
            }
            if !more {
                return free >= limits.free_low && shared.lock().stalled.is_empty();
            }
        }
    }
}
