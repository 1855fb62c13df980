//! Syncs: a sync waits until the pages that are dirty when it begins are on the device.
//!
//! A sync joins the transfers in flight that overlap its range, and the caller writes all other dirty pages of the range for it.
//! Some pages were in flight and dirty again, or latched: these are `deferred`. When all transfers have ended, the sync has a
//! second round for the deferred pages.

use std::ops::Range;

use foldhash::{HashMap, HashMapExt};
use jericho_shm::{Flags, Key};

use crate::context::SliceContext;
use crate::object::Error;
use crate::requests::Done;
use crate::state::SliceState;

/// A sync in progress. It waits for transfers, then writes pages that were in flight when it began and are dirty again.
struct Sync {
    object: u64,
    remaining: usize,
    deferred: Vec<u64>,
    error: Option<Error>,
    /// Key in `Syncs::groups`, if the sync is part of one.
    group: Option<u64>,
    done: Option<Done>,
}

/// Syncs of all objects with dirty pages.
struct SyncGroup {
    remaining: usize,
    error: Option<Error>,
    done: Done,
}

/// What follows when one thing that a sync waited for has ended.
pub(crate) enum SyncStep {
    /// The sync waits for more, or there is nothing left to do for it.
    Waits,
    /// The deferred pages, which lie in this range of the object, must be written. See `Syncs::join`.
    SecondRound { object: u64, pages: Range<u64> },
    /// The sync, or the group that it was the last of, has ended.
    Ended(Done, Result<(), Error>),
}

/// The syncs in progress. Only the evictor uses them.
pub(crate) struct Syncs {
    running: HashMap<u64, Sync>,
    groups: HashMap<u64, SyncGroup>,
    /// Syncs that wait for a latched page.
    latched: Vec<u64>,
}

impl Syncs {
    pub fn new() -> Syncs {
        Syncs {
            running: HashMap::new(),
            groups: HashMap::new(),
            latched: vec![],
        }
    }

    /// Begins a sync, which waits for the transfers in flight that overlap its range and for one `step`. Returns its id.
    pub fn begin(
        &mut self,
        state: &mut SliceState,
        context: &SliceContext,
        (object, pages): (u64, &Range<u64>),
        group: Option<u64>,
        done: Option<Done>,
    ) -> u64 {
        state.drain_reports(context);
        let id = state.new_id();
        let sync = Sync {
            object,
            remaining: 1,
            deferred: vec![],
            error: None,
            group,
            done,
        };
        self.running.insert(id, sync);
        // Pages of these transfers that are dirty again are written in the second round.
        self.join(state, id, object, pages);
        id
    }

    /// Lets a sync wait for the transfers in flight that overlap a range.
    pub fn join(&mut self, state: &mut SliceState, id: u64, object: u64, pages: &Range<u64>) {
        let Some(sync) = self.running.get_mut(&id) else {
            return;
        };
        let writing = state.writing.values_mut();
        for write in writing.filter(|w| w.overlaps(object, pages)) {
            write.syncs.push(id);
            sync.remaining += 1;
        }
    }

    /// Lets a sync wait for the small syncs that write pages of a range. They may have begun after the sync joined the transfers in
    /// flight. To join one twice is harmless: the sync then takes two steps at its end.
    pub fn join_small_syncs(
        &mut self,
        state: &mut SliceState,
        id: u64,
        object: u64,
        pages: &Range<u64>,
    ) {
        let Some(sync) = self.running.get_mut(&id) else {
            return;
        };
        let writing = state.writing.values_mut();
        for write in writing.filter(|w| w.callers.is_some() && w.overlaps(object, pages)) {
            write.syncs.push(id);
            sync.remaining += 1;
        }
    }

    /// Begins a group of syncs of all objects with dirty pages. Returns the group and the objects. The caller begins the syncs,
    /// then calls `group_step`.
    pub fn begin_group(
        &mut self,
        state: &mut SliceState,
        context: &SliceContext,
        done: Done,
    ) -> (u64, Vec<u64>) {
        state.drain_reports(context);
        let mut ids = state.dirty.ids();
        ids.extend(
            state
                .writing
                .values()
                .flat_map(|w| w.parts.iter().map(|p| p.object.id())),
        );
        ids.sort_unstable();
        ids.dedup();
        let id = state.new_id();
        let group = SyncGroup {
            remaining: ids.len() + 1,
            error: None,
            done,
        };
        self.groups.insert(id, group);
        (id, ids)
    }

    /// Keeps pages for the second round of a sync.
    pub fn defer(&mut self, id: u64, pages: Vec<u64>) {
        if let Some(sync) = self.running.get_mut(&id) {
            sync.deferred.extend(pages);
        }
    }

    /// Records the error of pages that a sync could not write.
    pub fn fail(&mut self, id: u64, error: Error) {
        if let Some(sync) = self.running.get_mut(&id) {
            sync.error = sync.error.take().or(Some(error));
        }
    }

    /// Lets a sync wait for one more transfer.
    pub fn transfer_started(&mut self, id: u64) {
        if let Some(sync) = self.running.get_mut(&id) {
            sync.remaining += 1;
        }
    }

    /// Records that one thing that a sync waited for has ended.
    pub fn step(&mut self, id: u64, error: Option<Error>) -> SyncStep {
        let Some(sync) = self.running.get_mut(&id) else {
            return SyncStep::Waits;
        };
        sync.remaining -= 1;
        sync.error = sync.error.take().or(error);
        if sync.remaining > 0 {
            return SyncStep::Waits;
        }
        // Second round: pages that were in flight or latched in the first round.
        if sync.error.is_none() && !sync.deferred.is_empty() {
            let deferred = std::mem::take(&mut sync.deferred);
            sync.remaining = 1;
            return SyncStep::SecondRound {
                object: sync.object,
                pages: deferred[0]..deferred[deferred.len() - 1] + 1,
            };
        }
        let Some(sync) = self.running.remove(&id) else {
            return SyncStep::Waits;
        };
        match (sync.group, sync.done) {
            (Some(group), _) => self.group_step(group, sync.error),
            (None, Some(done)) => SyncStep::Ended(done, sync.error.map_or(Ok(()), Err)),
            (None, None) => SyncStep::Waits,
        }
    }

    /// Records that one sync of a group has ended, or that all of them have begun.
    pub fn group_step(&mut self, id: u64, error: Option<Error>) -> SyncStep {
        let Some(group) = self.groups.get_mut(&id) else {
            return SyncStep::Waits;
        };
        group.remaining -= 1;
        group.error = group.error.take().or(error);
        if group.remaining > 0 {
            return SyncStep::Waits;
        }
        match self.groups.remove(&id) {
            Some(group) => SyncStep::Ended(group.done, group.error.map_or(Ok(()), Err)),
            None => SyncStep::Waits,
        }
    }

    /// Returns whether a sync must wait for a latched page after its second round. `take_latched` returns such a sync.
    pub fn waits_for_latch(&mut self, context: &SliceContext, id: u64) -> bool {
        let Some(sync) = self.running.get_mut(&id) else {
            return false;
        };
        // Pages that are in flight again were chosen for write-back after the sync began, and the sync has joined their
        // transfer. A page that is dirty and not in flight was latched when the round chose its pages, and needs another round. Its
        // writer wakes no thread.
        let object = sync.object;
        sync.deferred.retain(|page| {
            let found = context.memory.lookup(Key::new(object, *page));
            found.is_some_and(|f| f.state.has(Flags::DIRTY) && !f.state.has(Flags::WRITE_BACK))
        });
        if sync.deferred.is_empty() {
            return false;
        }
        self.latched.push(id);
        true
    }

    /// Returns whether a sync waits for a latched page.
    pub fn has_latched(&self) -> bool {
        !self.latched.is_empty()
    }

    /// Takes the syncs that wait for a latched page. Each of them needs a `step`.
    pub fn take_latched(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.latched)
    }
}
