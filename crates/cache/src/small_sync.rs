//! Small syncs: the calling thread writes a few dirty pages itself, without the evictor. Or it hands them to their object, which puts
//! them into its next commit (`Object::log`).
//!
//! ```text
//!   under the lock          ── begin: if nothing prevents it, pages marked WRITE_BACK; the transfer is in `SliceState::writing`
//!   without the lock        ── places, copy of the pages; `Object::log`, or writes and `Object::written` or `Object::write_failed`
//!   under the lock, at once ── end: marks removed or pages dirty again; the transfer is no longer in `writing`
//! ```
//!
//! `begin` marks the pages and records their transfer in one hold of the lock, and `end` undoes both in one hold. So the evictor
//! and other callers see a page of a small sync in `writing` as long as it is marked. docs/internals/cache.md lists the
//! interleavings.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Instant;

use jericho_format::PAGE_BYTES;
use jericho_format::sums::checksum;
use jericho_storage::{AlignedBuffer, Devices};

use crate::context::SliceContext;
use crate::effects::Effects;
use crate::object::{Error, Object, PagePlace};
use crate::requests::SyncJob;
use crate::scheduler::perform;
use crate::shared::SliceShared;
use crate::state::SliceState;
use crate::transfers::{Attempt, Chosen, Joined, Part, WriteBack};
use crate::{waiting, write_back};

/// Maximum number of pages that a caller writes itself. The evictor writes more pages faster, because it starts all transfers at
/// once.
const PAGES_MAX: usize = 16;
/// Maximum number of runs of neighbouring pages that a caller writes, one after the other.
const RUNS_MAX: usize = 4;
/// Maximum number of rounds, if pages are dirty again while other callers write them. The evictor then does the sync.
const ROUNDS_MAX: usize = 3;

const PAGE: usize = PAGE_BYTES as usize;
const EIO: i32 = 5;

thread_local! {
    /// The copy of the pages, kept for the thread's next sync.
    static COPY: Cell<Option<AlignedBuffer>> = const { Cell::new(None) };
}

/// How a small sync writes.
#[derive(Clone, Copy, Debug, Default)]
pub struct SmallSync {
    /// The caller commits in any case.
    pub commits: bool,
    /// Writes pages durably if that takes one write, so that no flush need follow.
    pub durably: bool,
}

/// What a small sync has to do.
pub(crate) struct Begun {
    /// Its own transfer, already recorded.
    pub started: Option<Started>,
    /// The transfers of other small syncs for which it has to wait.
    pub joined: Option<Arc<Joined>>,
    /// Some dirty pages of the range are not in its own transfer, and will not be clean when `joined` has ended: a page is latched, or in
    /// flight and dirty again.
    pub has_skipped: bool,
}

/// Where the pages of a part are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    /// On the device. Has the checksums of the pages, if the object keeps some.
    InPlace(Vec<u32>),
    /// On the device, durably. The object keeps no checksums.
    Durable,
    /// With the object, which has them in its next commit.
    Logged,
}

type Written = Result<Kept, Error>;

/// Pages that a caller has marked for its own transfer.
pub(crate) struct Started {
    tag: u64,
    /// Runs of neighbouring pages, as they are in `SliceState::writing`.
    parts: Arc<Vec<Part>>,
    /// The frames of all parts' pages, in order.
    frames: Vec<u32>,
}

/// Writes the dirty pages of a range in the calling thread, and waits for other callers that write some of them. Returns `None` if
/// the evictor has to do that: there are too many, the evictor writes some already, a page is latched, or pages cannot be written
/// back at the moment.
pub(crate) fn sync(
    shared: &Arc<SliceShared>,
    devices: &Devices,
    object: &Arc<dyn Object>,
    pages: &Range<u64>,
    how: SmallSync,
) -> Option<Result<(), Error>> {
    shared.drain_clients();
    for _ in 0..ROUNDS_MAX {
        let begun = begin(&mut shared.lock(), &shared.context, object.id(), pages)?;
        let mut result = begun.started.map_or(Ok(()), |started| {
            write_and_end(shared, devices, &started, how)
        });
        if let Some(joined) = &begun.joined {
            result = joined.wait().and(result);
        }
        if result.is_err() || !begun.has_skipped {
            return Some(result);
        }
        // A latched page: another round would meet the latch again.
        begun.joined.as_ref()?;
    }
    None
}

/// Writes marked pages and ends their transfer. Returns the first error.
fn write_and_end(
    shared: &Arc<SliceShared>,
    devices: &Devices,
    started: &Started,
    how: SmallSync,
) -> Result<(), Error> {
    let transfer = SyncTransfer { shared, started };
    let results = write(&shared.context, devices, started, how);
    transfer.end(&results);
    results.into_iter().try_for_each(|result| result.map(drop))
}

/// Marks the dirty pages of a range for write-back and records their transfer, if they are few and nothing prevents it.
/// Joins the transfers of other small syncs. Otherwise changes nothing and returns `None`. Clients' reports must have been
/// drained.
pub(crate) fn begin(
    state: &mut SliceState,
    context: &SliceContext,
    object: u64,
    pages: &Range<u64>,
) -> Option<Begun> {
    state.drain_reports(context);
    // A failed page needs a trial, which belongs to the evictor. The end of an outage does too.
    if context.closing.load(SeqCst) || state.outage.is_some() || state.dirty.has_failed() {
        return None;
    }
    let in_flight = || state.writing.values().filter(|w| w.overlaps(object, pages));
    let is_chosen = state
        .chosen_first(object, pages.start)
        .is_some_and(|page| page < pages.end);
    let dirty = (state.dirty).waiting(object, pages.clone(), PAGES_MAX + 1);
    let runs = dirty.chunk_by(|a, b| a + 1 == *b).count();
    if in_flight().any(|w| w.callers.is_none())
        || is_chosen
        || dirty.len() > PAGES_MAX
        || runs > RUNS_MAX
    {
        return None;
    }
    let others = in_flight().count();
    let joined = (others > 0).then(|| Arc::new(Joined::new(others)));
    if let Some(joined) = &joined {
        let writing = state.writing.values_mut();
        for write in writing.filter(|w| w.overlaps(object, pages)) {
            write
                .callers
                .iter_mut()
                .for_each(|callers| callers.push(joined.clone()));
        }
    }
    let chosen_before = state.chosen.len();
    let choice = write_back::choose(state, context, object, pages.clone(), None, Attempt::First);
    // The pages go into `writing` before the lock is released, so `chosen` need not name them.
    state.chosen.truncate(chosen_before);
    Some(Begun {
        started: choice.chosen.map(|chosen| record(state, context, &chosen)),
        joined,
        has_skipped: !choice.skipped.is_empty(),
    })
}

/// Records the transfer of marked pages.
fn record(state: &mut SliceState, context: &SliceContext, chosen: &Chosen) -> Started {
    let runs = chosen.pages.chunk_by(|a, b| a.0 + 1 == b.0);
    let parts: Arc<Vec<Part>> = Arc::new(runs.map(|run| Part::new(chosen, run)).collect());
    let tag = state.new_id();
    context.small_syncs.fetch_add(1, SeqCst);
    let write = WriteBack {
        parts: parts.clone(),
        syncs: vec![],
        attempt: chosen.attempt,
        callers: Some(vec![]),
    };
    state.writing.insert(tag, write);
    Started {
        tag,
        parts,
        frames: chosen.pages.iter().map(|page| page.2).collect(),
    }
}

/// Writes the pages of each part to the place that its object gives, unless the object keeps them. Returns a result for each part.
fn write(
    context: &SliceContext,
    devices: &Devices,
    started: &Started,
    how: SmallSync,
) -> Vec<Written> {
    context.counts.small_syncs.fetch_add(1, Relaxed);
    let copy = COPY.take();
    let mut copy = copy.unwrap_or_else(|| AlignedBuffer::new(PAGES_MAX * PAGE));
    let mut frames = &started.frames[..];
    let mut results = vec![];
    let how = SmallSync {
        durably: how.durably && started.parts.len() == 1,
        ..how
    };
    for part in started.parts.iter() {
        let (own, rest) = frames.split_at(part.entries.len());
        results.push(write_part(context, devices, part, own, how, &mut copy));
        frames = rest;
    }
    COPY.set(Some(copy));
    results
}

fn write_part(
    context: &SliceContext,
    devices: &Devices,
    part: &Part,
    frames: &[u32],
    how: SmallSync,
    copy: &mut AlignedBuffer,
) -> Written {
    // A program may change a page during the copy. The page is dirty again then. The copy itself does not change, so
    // `Device::needs_stable_writes` needs no other one.
    for (frame, bytes) in frames.iter().zip(copy.as_mut_slice().chunks_mut(PAGE)) {
        let copied = context.memory.copy_out(*frame, 0, bytes);
        assert!(copied.is_ok(), "a frame that `choose` has checked");
    }
    let mut bytes = &copy.as_slice()[..frames.len() * PAGE];
    if part.object.log(part.first, bytes, how.commits) {
        return Ok(Kept::Logged);
    }
    let sums = match part.object.has_checksums() {
        true => bytes.chunks_exact(PAGE).map(checksum).collect(),
        false => vec![],
    };
    let mut runs = vec![];
    part.object
        .allocate(part.first, frames.len() as u32, &mut runs)?;
    let mut is_durable = how.durably && runs.len() == 1 && sums.is_empty();
    for run in runs {
        let PagePlace::Device {
            device,
            offset_bytes,
        } = run.place
        else {
            panic!("an object allocated a hole");
        };
        let (own, rest) = bytes.split_at((run.pages as usize * PAGE).min(bytes.len()));
        let device = devices.get(usize::from(device));
        let device = device.expect("a device of the volume");
        if is_durable {
            match device.write_durable(offset_bytes, own) {
                Ok(()) => {}
                // The bytes are there. The caller flushes next, which fails as well, and then ends the changes of the device's slices.
                Err(error) if error.operation == "flush" => is_durable = false,
                Err(error) => return Err(error.into()),
            }
        } else {
            device.write_at(offset_bytes, own)?;
        }
        let counts = &context.counts;
        counts
            .written_back_bytes
            .fetch_add(own.len() as u64, Relaxed);
        counts.write_backs.fetch_add(1, Relaxed);
        bytes = rest;
    }
    assert!(
        bytes.is_empty(),
        "an object placed fewer pages than requested"
    );
    Ok(match is_durable {
        true => Kept::Durable,
        false => Kept::InPlace(sums),
    })
}

/// Ends a transfer, with a result for each part: its pages are clean, or dirty again. The objects already know. Returns its
/// record, with the syncs and callers that wait for it.
pub(crate) fn end(
    state: &mut SliceState,
    context: &SliceContext,
    started: &Started,
    results: &[Written],
    effects: &mut Effects,
) -> Option<WriteBack> {
    let now = Instant::now();
    for (part, result) in started.parts.iter().zip(results) {
        match result {
            Ok(_) => write_back::clean(context, part),
            Err(error) => write_back::failed(state, context, part, error, now, effects),
        }
    }
    let succeeded = results.iter().all(Result::is_ok);
    write_back::ended(state, started.tag, succeeded)
}

/// A transfer of the calling thread. If the thread unwinds from a panic, the transfer fails, so that no page stays marked.
struct SyncTransfer<'a> {
    shared: &'a Arc<SliceShared>,
    started: &'a Started,
}

impl SyncTransfer<'_> {
    /// Ends the transfer: tells the objects, then the slice, then those that wait for it.
    fn end(&self, results: &[Written]) {
        let (shared, context) = (self.shared, &self.shared.context);
        for (part, result) in self.parts(results) {
            let count = part.entries.len() as u32;
            match result {
                // The object must know before the pages can be evicted. A later fetch must go to their new place.
                Ok(Kept::InPlace(sums)) if part.object.has_checksums() => {
                    part.object.written_summed(part.first, sums);
                }
                Ok(Kept::InPlace(_)) => part.object.written(part.first, count),
                Ok(Kept::Durable) => part.object.written_durably(part.first, count),
                Ok(Kept::Logged) => {}
                Err(error) => write_back::note_failure(context, part, error),
            }
        }
        let error = results.iter().find_map(|result| result.as_ref().err());
        let mut effects = Effects::default();
        let mut state = shared.lock();
        let ended = end(&mut state, context, self.started, results, &mut effects);
        waiting::retry(&mut state, context, &mut effects);
        drop(state);
        for (part, _) in self.parts(results).filter(|(_, result)| result.is_ok()) {
            part.object.write_back_ended();
        }
        let (syncs, callers) = ended.map_or_else(Default::default, |w| (w.syncs, w.callers));
        // The evictor reports the outage.
        effects.wake_evictor |= error.is_some();
        if !syncs.is_empty() {
            // Only the evictor knows these syncs.
            let error = error.cloned();
            shared.jobs.push(SyncJob::TransferEnded { syncs, error });
            effects.wake_evictor = true;
        }
        for caller in callers.into_iter().flatten() {
            caller.step(error);
        }
        perform(shared, effects);
    }

    /// Returns the parts with their results.
    fn parts<'a>(
        &'a self,
        results: &'a [Written],
    ) -> impl Iterator<Item = (&'a Part, &'a Written)> {
        self.started.parts.iter().zip(results)
    }

    fn is_recorded(&self) -> bool {
        self.shared.lock().writing.contains_key(&self.started.tag)
    }
}

impl Drop for SyncTransfer<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() && self.is_recorded() {
            let failed: Written = Err(Error::Object {
                errno: EIO,
                message: "the thread that wrote the page panicked".into(),
            });
            self.end(&vec![failed; self.started.parts.len()]);
        }
        let context = &self.shared.context;
        context.small_syncs.fetch_sub(1, SeqCst);
        // An evictor that ends waits for the last small sync.
        if context.closing.load(SeqCst) {
            self.shared.wake_evictor();
        }
    }
}
