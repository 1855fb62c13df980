//! The steps of a slice, without a device and without a thread.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use foldhash::{HashSet, HashSetExt};
use jericho_shm::{Flags, Geometry, Key, SliceMemory};
use jericho_storage::Wake;

use crate::context::{Limits, SliceContext};
use crate::effects::Effects;
use crate::eviction;
use crate::object::{Error, Object, PageRun};
use crate::replacement::{AgedSweep, Replacement};
use crate::requests::{Fill, GetRequest, Intent, PAGES_PER_GET_MAX, PendingGet, PinnedPages};
use crate::shared::{DIRTY_VISIT, SliceShared};
use crate::state::SliceState;
use crate::sync::{SyncStep, Syncs};
use crate::transfers::{Attempt, Chosen, Part, WriteBack};
use crate::{get, small_sync, waiting, write_back};

const FRAMES: u32 = 1024;

/// An object that is never asked where its pages are.
struct Unplaced;

impl Object for Unplaced {
    fn id(&self) -> u64 {
        7
    }
    fn slice_of(&self, _page: u64) -> u16 {
        0
    }
    fn resolve(&self, _: u64, _: u32, _: &mut Vec<PageRun>) -> Result<(), Error> {
        panic!("a step asked for places");
    }
    fn allocate(&self, _: u64, _: u32, _: &mut Vec<PageRun>) -> Result<(), Error> {
        panic!("a step asked for places");
    }
    fn written(&self, _: u64, _: u32) {}
    fn write_failed(&self, _: u64, _: u32, _: &Error) {}
}

type Ends = Arc<Mutex<Vec<(u64, Result<PinnedPages, Error>)>>>;

struct Machine {
    state: SliceState,
    context: SliceContext,
    effects: Effects,
    object: Arc<dyn Object>,
    /// The first pages of the Gets that have ended, and their results.
    ends: Ends,
}

impl Machine {
    fn new() -> Machine {
        let memory = SliceMemory::create("test", Geometry::for_frames(FRAMES), None).unwrap();
        let limits = Limits::new(FRAMES, Duration::from_secs(5));
        Machine {
            state: SliceState::new(Geometry::for_frames(FRAMES)),
            context: SliceContext::new(0, memory, limits),
            effects: Effects::default(),
            object: Arc::new(Unplaced),
            ends: Ends::default(),
        }
    }

    /// Begins a Get.
    fn get(&mut self, first: u64, count: u32, intent: Intent) {
        let request = GetRequest {
            object: self.object.clone(),
            first,
            count,
            intent,
        };
        let ends = self.ends.clone();
        let done = Box::new(move |result| ends.lock().unwrap().push((first, result)));
        let pending = PendingGet::new(request, Some(done));
        get::enter_waiting(&mut self.state, &self.context, pending, &mut self.effects);
    }

    /// Runs the callbacks of the Gets that have ended. Returns the first pages and the results.
    fn ended(&mut self) -> Vec<(u64, Result<PinnedPages, Error>)> {
        for (done, result) in std::mem::take(&mut self.effects.granted) {
            done(result);
        }
        std::mem::take(&mut self.ends.lock().unwrap())
    }

    /// Returns the only fill to start.
    fn fill(&mut self) -> Fill {
        let mut fills = std::mem::take(&mut self.effects.fills);
        assert_eq!(fills.len(), 1);
        fills.remove(0)
    }

    /// Ends a fill: all its pages are holes.
    fn fill_with_holes(&mut self, fill: &Fill) {
        let holes = fill.pages.iter().map(|page| page.1).collect();
        get::fill_started(
            &mut self.state,
            &self.context,
            fill,
            holes,
            &mut [],
            &mut self.effects,
        );
    }

    fn put(&mut self, pages: &PinnedPages, dirtied: &[u64]) {
        get::put(
            &mut self.state,
            &self.context,
            &pages.object,
            dirtied,
            &pages.entries,
            &mut self.effects,
        );
    }

    /// Puts pages with new contents into the cache.
    fn write(&mut self, first: u64, count: u32) {
        self.get(first, count, Intent::Overwrite);
        let (_, pages) = self.ended().pop().expect("a Get that does not wait");
        let pages = pages.unwrap();
        for index in &pages.entries {
            self.context.memory.entry(*index).publish(Flags::DIRTY);
        }
        let dirtied: Vec<u64> = (first..first + u64::from(count)).collect();
        self.put(&pages, &dirtied);
    }

    /// Chooses dirty pages for write-back.
    fn choose(&mut self, sync: Option<u64>) -> write_back::Choice {
        let (state, context) = (&mut self.state, &self.context);
        write_back::choose(state, context, 7, 0..u64::MAX, sync, Attempt::First)
    }

    /// Records a transfer of chosen pages, which are neighbours. Returns its tag.
    fn start(&mut self, chosen: &Chosen) -> u64 {
        let tag = self.state.new_id();
        let write = WriteBack {
            parts: Arc::new(vec![Part::new(chosen, &chosen.pages)]),
            syncs: Vec::from_iter(chosen.sync),
            attempt: chosen.attempt,
            callers: None,
        };
        self.state.writing.insert(tag, write);
        self.state.chosen.clear();
        tag
    }

    /// Ends a transfer without an error. Returns the syncs that wait for it.
    fn end(&mut self, tag: u64) -> Vec<u64> {
        let parts = self.state.writing[&tag].parts.clone();
        for part in parts.iter() {
            write_back::clean(&self.context, part);
        }
        let write = write_back::ended(&mut self.state, tag, true);
        write.expect("a transfer in flight").syncs
    }

    fn entry_of(&self, page: u64) -> Option<u32> {
        let found = self.context.memory.lookup(Key::new(7, page));
        found.map(|found| found.index)
    }
}

fn error() -> Error {
    Error::Object {
        errno: 5,
        message: "no place".into(),
    }
}

#[test]
fn a_get_waits_for_frames_until_pages_are_put_back() {
    let mut slice = Machine::new();
    let count = PAGES_PER_GET_MAX;
    for first in (0..FRAMES).step_by(count as usize) {
        slice.get(u64::from(first), count, Intent::Overwrite);
    }
    let holders = slice.ended();
    assert_eq!(holders.len() as u32, FRAMES / count);
    assert_eq!(slice.state.frames.free(), 0);
    slice.get(1 << 20, 1, Intent::Read);
    assert!(slice.ended().is_empty() && slice.effects.fills.is_empty());
    assert!(slice.effects.wake_evictor);
    // The holder of the first pages gives up without writing them, so their frames are free.
    slice.put(holders[0].1.as_ref().unwrap(), &[]);
    waiting::retry(&mut slice.state, &slice.context, &mut slice.effects);
    let fill = slice.fill();
    assert_eq!(fill.pages[0].0, 1 << 20);
    slice.fill_with_holes(&fill);
    assert_eq!(slice.ended().len(), 1);
}

#[test]
fn a_get_that_met_a_failed_fill_fills_the_page_itself() {
    let mut slice = Machine::new();
    slice.get(0, 4, Intent::Read);
    let failing = slice.fill();
    slice.get(2, 4, Intent::Read);
    let own = slice.fill();
    let pages = |fill: &Fill| fill.pages.iter().map(|page| page.0).collect::<Vec<_>>();
    assert_eq!(
        (pages(&failing), pages(&own)),
        (vec![0, 1, 2, 3], vec![4, 5])
    );
    get::fill_failed(
        &mut slice.state,
        &slice.context,
        &failing,
        error(),
        &mut slice.effects,
    );
    assert!(
        slice.effects.released,
        "the failed Get has released its pins"
    );
    waiting::retry_if_released(&mut slice.state, &slice.context, &mut slice.effects);
    assert!(!slice.effects.released);
    let ended = slice.ended();
    assert!(matches!(&ended[..], [(0, Err(_))]));
    slice.fill_with_holes(&own);
    assert!(slice.ended().is_empty());
    let rest = slice.fill();
    assert_eq!(pages(&rest), [2, 3]);
    slice.fill_with_holes(&rest);
    let ended = slice.ended();
    let [(2, Ok(pages))] = &ended[..] else {
        panic!("{} Gets have ended", ended.len());
    };
    slice.put(pages, &[]);
    assert!(slice.state.pins.is_empty() && slice.state.pending.is_empty());
}

#[test]
fn a_get_that_waits_for_frames_pins_no_page() {
    let mut slice = Machine::new();
    for first in [2, 3] {
        slice.get(first, 1, Intent::Read);
    }
    let [second, third] = &std::mem::take(&mut slice.effects.fills)[..] else {
        panic!("two fills");
    };
    slice.get(2, 4, Intent::Read);
    let own = slice.fill();
    slice.fill_with_holes(&own);
    // Other Gets take all other frames, and one waits.
    let mut free = slice.state.frames.free();
    while free > 0 {
        let count = free.min(PAGES_PER_GET_MAX);
        slice.get(1000 + u64::from(free), count, Intent::Overwrite);
        free -= count;
    }
    slice.get(900, 1, Intent::Overwrite);
    slice.ended();
    // The Get of page 900 takes the frame of the fill that fails first. When the other fill fails too, one frame is free, and the
    // Get of pages 2 to 5 needs two.
    for fill in [second, third] {
        let (state, context) = (&mut slice.state, &slice.context);
        get::fill_failed(state, context, fill, error(), &mut slice.effects);
        waiting::retry(state, context, &mut slice.effects);
    }
    assert_eq!(slice.state.stalled.len(), 1);
    for page in [4, 5] {
        let entry = slice.entry_of(page).expect("a cached page");
        assert!(!slice.state.pins.contains_key(&entry), "page {page}");
    }
}

#[test]
fn a_sync_writes_again_what_became_dirty_during_a_transfer() {
    let mut slice = Machine::new();
    slice.write(0, 1);
    let chosen = slice.choose(None).chosen.expect("a dirty page");
    let first = slice.start(&chosen);
    // A writer changes the page while the device reads it.
    let index = slice.entry_of(0).unwrap();
    slice.context.memory.entry(index).mark(Flags::DIRTY);
    let object = slice.object.clone();
    slice.state.dirty.add(&object, 0, 1, Instant::now());

    let mut syncs = Syncs::new();
    let (state, context) = (&mut slice.state, &slice.context);
    let id = syncs.begin(state, context, (7, &(0..8)), None, Some(Box::new(|_| ())));
    let choice = slice.choose(Some(id));
    assert!(choice.chosen.is_none(), "the page is in flight");
    syncs.defer(id, choice.skipped);
    assert!(matches!(syncs.step(id, None), SyncStep::Waits));
    assert_eq!(slice.end(first), [id]);
    let step = syncs.step(id, None);
    let SyncStep::SecondRound { object, pages } = step else {
        panic!("the sync ended before the page was written again");
    };
    assert_eq!((object, pages.clone()), (7, 0..1));
    syncs.join(&mut slice.state, id, object, &pages);
    let chosen = slice.choose(Some(id)).chosen.expect("the page again");
    let second = slice.start(&chosen);
    syncs.transfer_started(id);
    assert!(!syncs.waits_for_latch(&slice.context, id));
    assert!(matches!(syncs.step(id, None), SyncStep::Waits));
    assert_eq!(slice.end(second), [id]);
    assert!(matches!(syncs.step(id, None), SyncStep::Ended(_, Ok(()))));
}

/// Begins a small sync of all pages.
fn begin_small(slice: &mut Machine) -> Option<small_sync::Begun> {
    small_sync::begin(&mut slice.state, &slice.context, 7, &(0..u64::MAX))
}

/// Ends the transfer of a small sync that has written its pages in place.
fn end_small(slice: &mut Machine, started: &small_sync::Started) -> WriteBack {
    let results = [Ok(small_sync::Kept::InPlace(vec![]))];
    let (state, context, effects) = (&mut slice.state, &slice.context, &mut slice.effects);
    small_sync::end(state, context, started, &results, effects).unwrap()
}

/// Makes a page dirty that is in flight.
fn change(slice: &mut Machine, page: u64) {
    let index = slice.entry_of(page).unwrap();
    slice.context.memory.entry(index).mark(Flags::DIRTY);
    let object = slice.object.clone();
    slice.state.dirty.add(&object, page, 1, Instant::now());
}

#[test]
fn a_small_sync_is_a_transfer_that_others_see_and_join() {
    let mut slice = Machine::new();
    slice.write(0, 2);
    let first = begin_small(&mut slice).expect("two pages are few");
    assert!(first.joined.is_none() && !first.has_skipped);
    let started = first.started.expect("dirty pages");
    assert!(slice.state.chosen.is_empty());
    let (state, context) = (&mut slice.state, &slice.context);
    assert_eq!(write_back::first_dirty(state, context, 7, 1), Some(1));
    // The evictor's sync waits for it and chooses none of its pages, also when one is dirty again.
    change(&mut slice, 0);
    let mut syncs = Syncs::new();
    let (state, context) = (&mut slice.state, &slice.context);
    let id = syncs.begin(state, context, (7, &(0..8)), None, Some(Box::new(|_| ())));
    assert!(slice.choose(Some(id)).chosen.is_none());
    assert!(matches!(syncs.step(id, None), SyncStep::Waits));
    // Another small sync waits for it, too, and must look at the page again.
    let second = begin_small(&mut slice).expect("one page is few");
    assert!(second.started.is_none() && second.joined.is_some() && second.has_skipped);
    let ended = end_small(&mut slice, &started);
    assert_eq!((ended.syncs, ended.callers.unwrap().len()), (vec![id], 1));
    assert!(slice.state.on_the_way.is_empty() && slice.state.writing.is_empty());
    let (state, context) = (&mut slice.state, &slice.context);
    assert_eq!(write_back::first_dirty(state, context, 7, 0), Some(0));
    let third = begin_small(&mut slice).expect("one page is few");
    assert!(third.started.is_some() && third.joined.is_none() && !third.has_skipped);
}

#[test]
fn a_small_sync_leaves_a_transfer_of_the_evictor_alone_until_it_has_left_the_records() {
    let mut slice = Machine::new();
    slice.write(0, 1);
    let chosen = slice.choose(None).chosen.expect("a dirty page");
    // Chosen, and not yet in flight.
    assert!(begin_small(&mut slice).is_none());
    let tag = slice.start(&chosen);
    assert!(begin_small(&mut slice).is_none());
    // The evictor has cleared the flag without the lock, and a writer has changed the page since. If a small sync marked the page
    // now, the end of the evictor's transfer would take it out of the records of pages in flight.
    for part in slice.state.writing[&tag].parts.clone().iter() {
        write_back::clean(&slice.context, part);
    }
    change(&mut slice, 0);
    assert!(begin_small(&mut slice).is_none());
    write_back::ended(&mut slice.state, tag, true);
    assert!(begin_small(&mut slice).unwrap().started.is_some());
    let index = slice.entry_of(0).unwrap();
    assert!(slice.state.on_the_way.contains(&index));
}

/// A waker that counts.
#[derive(Default)]
struct Wakes(AtomicU64);

impl Wake for Wakes {
    fn wake(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn the_first_dirty_page_wakes_the_evictor_only_if_it_sleeps_without_a_limit() {
    let memory = SliceMemory::create("test", Geometry::for_frames(FRAMES), None).unwrap();
    let context = SliceContext::new(0, memory, Limits::new(FRAMES, Duration::from_secs(5)));
    let (wakes, second) = (Arc::new(Wakes::default()), Duration::from_secs(1));
    let shared = SliceShared::new(context, Arc::new(Wakes::default()), wakes.clone());
    let woken = || wakes.0.swap(0, Ordering::SeqCst);
    assert_eq!(shared.before_sleep(None), None);
    shared.dirtied(1);
    assert_eq!(woken(), 1);
    // A page became dirty before the evictor went to sleep, perhaps unseen.
    assert_eq!(shared.before_sleep(None), Some(DIRTY_VISIT));
    shared.context.cleaned(1);
    shared.dirtied(1);
    assert_eq!(woken(), 0, "the evictor has a timer");
    shared.context.cleaned(1);
    assert_eq!(shared.before_sleep(Some(second)), Some(second));
    shared.dirtied(1);
    assert_eq!(woken(), 0, "the evictor has a timer");
    // Too many dirty pages wake it in any case.
    shared.dirtied(u64::from(FRAMES / 10));
    assert_eq!(woken(), 1);
}

#[test]
fn a_group_of_syncs_ends_with_the_first_error_and_with_its_last_member() {
    let mut slice = Machine::new();
    slice.write(0, 1);
    let mut syncs = Syncs::new();
    let (state, context) = (&mut slice.state, &slice.context);
    let (group, ids) = syncs.begin_group(state, context, Box::new(|_| ()));
    assert_eq!(ids, [7]);
    let id = syncs.begin(state, context, (7, &(0..u64::MAX)), Some(group), None);
    syncs.fail(id, error());
    assert!(matches!(syncs.step(id, None), SyncStep::Waits));
    let step = syncs.group_step(group, None);
    assert!(matches!(step, SyncStep::Ended(_, Err(_))));
}

#[test]
fn background_write_back_takes_old_pages_and_any_pages_for_frames() {
    let mut slice = Machine::new();
    slice.write(0, 3);
    let batch = |slice: &mut Machine, starved| {
        let (state, context) = (&mut slice.state, &slice.context);
        write_back::choose_batch(state, context, starved, &mut HashSet::new())
    };
    assert!(batch(&mut slice, false).is_empty(), "the pages are young");
    assert_eq!(batch(&mut slice, true)[0].pages.len(), 3);
    assert!(
        batch(&mut slice, true).is_empty(),
        "the pages are being written"
    );
    slice.write(8, 2);
    slice.context.limits.dirty_age = Duration::ZERO;
    assert_eq!(batch(&mut slice, false)[0].pages.len(), 2);
}

#[test]
fn eviction_leaves_pages_that_are_dirty_pinned_or_changed_since_the_choice() {
    let mut slice = Machine::new();
    slice.write(0, 4);
    let chosen = slice.choose(None).chosen.expect("dirty pages");
    let tag = slice.start(&chosen);
    slice.end(tag);
    slice.write(4, 1);
    let mut victims = vec![];
    let mut sweep = AgedSweep::default();
    let residents = &slice.context.memory;
    sweep.begin(residents, FRAMES, FRAMES);
    while sweep.choose(residents, &mut victims) {}
    assert_eq!(victims.len(), 4, "page 4 is dirty");
    // Meanwhile a Get pins page 0, and a writer changes page 1.
    slice.state.pin(slice.entry_of(0).unwrap());
    let changed = slice.context.memory.entry(slice.entry_of(1).unwrap());
    changed.mark(Flags::DIRTY);
    let free = eviction::evict(
        &mut slice.state,
        &slice.context,
        &mut victims,
        &mut slice.effects,
    );
    assert_eq!(free, FRAMES - 3);
    let cached: Vec<u64> = (0..5).filter(|p| slice.entry_of(*p).is_some()).collect();
    assert_eq!(cached, [0, 1, 4]);
}

#[test]
fn a_sync_waits_for_a_small_sync_that_began_before_its_pages_were_chosen() {
    let mut slice = Machine::new();
    slice.write(0, 2);
    let mut syncs = Syncs::new();
    let (state, context) = (&mut slice.state, &slice.context);
    let id = syncs.begin(state, context, (7, &(0..8)), None, Some(Box::new(|_| ())));
    let small = begin_small(&mut slice).expect("two pages are few");
    let started = small.started.expect("dirty pages");
    syncs.join_small_syncs(&mut slice.state, id, 7, &(0..8));
    assert!(slice.choose(Some(id)).chosen.is_none());
    assert!(matches!(syncs.step(id, None), SyncStep::Waits));
    let ended = end_small(&mut slice, &started);
    assert_eq!(ended.syncs, [id]);
    assert!(matches!(syncs.step(id, None), SyncStep::Ended(_, Ok(()))));
}
