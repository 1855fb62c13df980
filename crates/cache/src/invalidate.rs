//! Drops pages of an object, dirty or not, once no I/O, Get or latch holds them.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use jericho_shm::{Flags, Key, WAYS};

use crate::context::SliceContext;
use crate::effects::Effects;
use crate::latches;
use crate::object::Error;
use crate::requests::{Done, Invalidation};
use crate::state::SliceState;

/// Pages checked in one critical section, short enough for other threads to take the lock in between.
const CHUNK: u64 = 2048;

/// The first visit of an invalidation to the pages of its range, or to the whole table, whichever is smaller.
pub(crate) struct Visit {
    object: u64,
    pages: Range<u64>,
    by_table: bool,
    /// Pages or entries that are still to be visited.
    left: Range<u64>,
    busy: Vec<u64>,
}

impl Visit {
    pub fn new(context: &SliceContext, object: u64, pages: Range<u64>) -> Visit {
        let entries = u64::from(context.memory.geometry().entries());
        let by_table = pages.end.saturating_sub(pages.start) > entries;
        Visit {
            object,
            left: if by_table { 0..entries } else { pages.clone() },
            pages,
            by_table,
            busy: vec![],
        }
    }

    pub fn is_complete(&self) -> bool {
        self.left.is_empty()
    }

    /// Drops those of the next pages that are not busy.
    pub fn step(&mut self, state: &mut SliceState, context: &SliceContext) {
        let stop = self.left.end.min(self.left.start + CHUNK);
        for at in self.left.start..stop {
            let page = if self.by_table {
                let key = context.memory.entry(at as u32).key();
                key.filter(|k| k.object() == self.object && self.pages.contains(&k.page()))
                    .map(|k| k.page())
            } else {
                Some(at)
            };
            if let Some(page) = page.filter(|page| !drop_page(state, context, self.object, *page)) {
                self.busy.push(page);
            }
        }
        self.left.start = stop;
    }

    /// Lets the invalidation wait for the busy pages. `waiting::retry` must follow; it ends an invalidation without busy pages.
    pub fn wait(self, state: &mut SliceState, context: &SliceContext, done: Done) {
        let (object, busy) = (self.object, self.busy);
        // The index may still name dropped pages that a table scan did not meet.
        for page in state.dirty.pages(object, self.pages) {
            if !busy.contains(&page) && context.memory.lookup(Key::new(object, page)).is_none() {
                state.dirty.remove(object, page);
            }
        }
        state
            .invalidations
            .push(Invalidation { object, busy, done });
    }
}

/// Retries busy pages. Called when I/O ended or a grant was dropped.
pub(crate) fn retry(state: &mut SliceState, context: &SliceContext, effects: &mut Effects) {
    for mut invalidation in std::mem::take(&mut state.invalidations) {
        invalidation
            .busy
            .retain(|page| !drop_page(state, context, invalidation.object, *page));
        if invalidation.busy.is_empty() {
            effects.done.push((invalidation.done, Ok(())));
        } else if context.closing.load(Relaxed) {
            effects.done.push((invalidation.done, Err(Error::Closed)));
        } else {
            state.invalidations.push(invalidation);
            // The end of a latch wakes no thread, so the evictor retries after a while.
            effects.wake_evictor = true;
        }
    }
}

/// Drops a page. Returns whether it is gone.
fn drop_page(state: &mut SliceState, context: &SliceContext, object: u64, page: u64) -> bool {
    let key = Key::new(object, page);
    let Some(found) = context.memory.lookup(key) else {
        return true;
    };
    // Uses the slice's own record of FILL and WRITE_BACK. A client can set these flags in the table for ever.
    if found.state.has(Flags::LATCH) || state.is_held(found.index) {
        latches::want(state, context, found.index, found.state);
        return false;
    }
    if !state.remove(context, found.index, found.state) {
        return false;
    }
    if found.state.has(Flags::DIRTY) {
        context.cleaned(1);
        state.dirty.remove(object, page);
    }
    true
}

/// Returns the pages of an object that are in the cache, as (page, entry).
pub(crate) fn resident(context: &SliceContext, object: u64, pages: &Range<u64>) -> Vec<(u64, u32)> {
    let lines = context.memory.geometry().lines;
    let mut out = vec![];
    if pages.end.saturating_sub(pages.start) <= u64::from(lines) {
        for page in pages.clone() {
            out.extend(
                context
                    .memory
                    .lookup(Key::new(object, page))
                    .map(|f| (page, f.index)),
            );
        }
    } else {
        for index in 0..lines * WAYS {
            if let Some(key) = context.memory.entry(index).key()
                && key.object() == object
                && pages.contains(&key.page())
            {
                out.push((key.page(), index));
            }
        }
        out.sort_unstable();
    }
    out
}
