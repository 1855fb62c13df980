//! Drops pages of an object, dirty or not, once no I/O, Get or latch holds them.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use jericho_shm::{Flags, Key, WAYS};

use crate::Done;
use crate::object::Error;
use crate::state::{After, Shared, State, run};

/// Pages checked in one critical section, short enough for other threads to take the lock in between.
const CHUNK: u64 = 2048;

/// An invalidation that waits for pages that are busy.
pub(crate) struct Invalidation {
    object: u64,
    busy: Vec<u64>,
    done: Done,
}

pub(crate) fn invalidate(shared: &Arc<Shared>, object: u64, pages: Range<u64>, done: Done) {
    let mut busy = vec![];
    // Visits the pages of the range or the whole table, whichever is smaller.
    let entries = u64::from(shared.memory.geometry().entries());
    let by_table = pages.end.saturating_sub(pages.start) > entries;
    let (mut at, end) = if by_table {
        (0, entries)
    } else {
        (pages.start, pages.end)
    };
    shared.drain_clients();
    shared.lock().drain_reports(shared);
    while at < end {
        let mut state = shared.lock();
        let stop = end.min(at + CHUNK);
        while at < stop {
            let page = if by_table {
                let key = shared.memory.entry(at as u32).key();
                key.filter(|k| k.object() == object && pages.contains(&k.page()))
                    .map(|k| k.page())
            } else {
                Some(at)
            };
            if let Some(page) = page.filter(|page| !drop_page(&mut state, shared, object, *page)) {
                busy.push(page);
            }
            at += 1;
        }
    }
    let mut after = After::default();
    let mut state = shared.lock();
    // The index may still name dropped pages that a table scan did not meet.
    for page in state.dirty.pages(object, pages) {
        if !busy.contains(&page) && shared.memory.lookup(Key::new(object, page)).is_none() {
            state.dirty.remove(object, page);
        }
    }
    state
        .invalidations
        .push(Invalidation { object, busy, done });
    state.retry_waiting(shared, &mut after);
    drop(state);
    run(shared, after);
}

/// Retries busy pages. Called when I/O ended or a grant was dropped.
pub(crate) fn retry(state: &mut State, shared: &Arc<Shared>, after: &mut After) {
    for mut invalidation in std::mem::take(&mut state.invalidations) {
        invalidation
            .busy
            .retain(|page| !drop_page(state, shared, invalidation.object, *page));
        if invalidation.busy.is_empty() {
            after.done.push((invalidation.done, Ok(())));
        } else if shared.closing.load(Relaxed) {
            after.done.push((invalidation.done, Err(Error::Closed)));
        } else {
            state.invalidations.push(invalidation);
            // The end of a latch wakes no thread, so the evictor retries after a while.
            after.wake_evictor = true;
        }
    }
}

/// Drops a page. Returns whether it is gone.
fn drop_page(state: &mut State, shared: &Arc<Shared>, object: u64, page: u64) -> bool {
    let key = Key::new(object, page);
    let Some(found) = shared.memory.lookup(key) else {
        return true;
    };
    // Uses the slice's own record of FILL and WRITE_BACK. A client can set these flags in the table for ever.
    if found.state.has(Flags::LATCH) || state.is_held(found.index) {
        state.want_latched(shared, found.index, found.state);
        return false;
    }
    if !state.remove(shared, found.index, found.state) {
        return false;
    }
    if found.state.has(Flags::DIRTY) {
        shared.cleaned(1);
        state.dirty.remove(object, page);
    }
    true
}

/// Returns the pages of an object that are in the cache, as (page, entry).
pub(crate) fn resident(shared: &Shared, object: u64, pages: &Range<u64>) -> Vec<(u64, u32)> {
    let lines = shared.memory.geometry().lines;
    let mut out = vec![];
    if pages.end.saturating_sub(pages.start) <= u64::from(lines) {
        for page in pages.clone() {
            out.extend(
                shared
                    .memory
                    .lookup(Key::new(object, page))
                    .map(|f| (page, f.index)),
            );
        }
    } else {
        for index in 0..lines * WAYS {
            if let Some(key) = shared.memory.entry(index).key()
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
