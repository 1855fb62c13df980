//! The part of a slice that serves clients in other processes, and its protection against them.
//!
//! A client may die or be stopped while it holds a page's latch. It may have made pages dirty that the slice does not know of. No
//! thread of the slice waits for a client without bound.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use jericho_shm::{Flags, Key};

use crate::invalidate::resident;
use crate::latches::{self, LATCH_MAX};
use crate::object::Object;
use crate::slice::Slice;

/// Entries checked in one critical section.
const CHUNK: usize = 2048;

impl Slice {
    /// Sets the callback that takes in what clients have reported (it calls `dirtied_by_client`). The slice calls it before each
    /// query of the dirty pages, without a lock of the slice. Set once.
    pub fn set_report_drain(&self, report_drain: Box<dyn Fn() + Send + Sync>) {
        let _ = self.shared.report_drain.set(report_drain);
    }

    /// Sets the callback that collects the clients' reference marks. For each mark it calls `SliceMemory::touch`. It visits a bounded
    /// number of clients in each call. The evictor calls it before it chooses victims, without a lock of the slice. Set once.
    pub fn set_collector(&self, collector: Box<dyn Fn() + Send + Sync>) {
        let _ = self.shared.collector.set(collector);
    }

    /// Sets the callback that learns of owners whose latch was taken away. The callback returns whether the owner is a client. It
    /// must arrange a call of `adopt_unreported` soon. It runs with the slice's lock held, so it must not call the slice. Set once.
    pub fn set_on_broken(&self, broken: Box<dyn Fn(u16) -> bool + Send + Sync>) {
        let _ = self.shared.context.on_broken.set(broken);
    }

    /// Takes a client's report that it made pages dirty. Ignores pages that are not dirty.
    pub fn dirtied_by_client(&self, object: &Arc<dyn Object>, first: u64, count: u32) {
        let memory = &self.shared.context.memory;
        let is_dirty = |page: &u64| {
            let found = memory.lookup(Key::new(object.id(), *page));
            found.is_some_and(|found| found.state.has(Flags::DIRTY))
        };
        let mut page = first;
        let end = first + u64::from(count);
        while page < end {
            let run = (page..end).take_while(is_dirty).count() as u64;
            if run > 0 {
                self.dirtied(object, page, run as u32);
            }
            page += run + 1;
        }
    }

    /// Absorbs the dirty pages whose latch was taken away, and those that a repair found. `resolve` returns the object with an id.
    /// Returns how many pages it absorbed.
    pub fn adopt_unreported(&self, resolve: &dyn Fn(u64) -> Option<Arc<dyn Object>>) -> usize {
        let unreported = std::mem::take(&mut self.shared.lock().latches.unreported);
        self.adopt(unreported, resolve)
    }

    /// Absorbs dirty pages that no client has reported.
    fn adopt(
        &self,
        mut unknown: Vec<Key>,
        resolve: &dyn Fn(u64) -> Option<Arc<dyn Object>>,
    ) -> usize {
        unknown.sort_unstable_by_key(|key| (key.object(), key.page()));
        let mut adopted = 0;
        for pages in unknown.chunk_by(|a, b| a.object() == b.object()) {
            let Some(object) = resolve(pages[0].object()) else {
                continue;
            };
            for key in pages {
                self.dirtied_by_client(&object, key.page(), 1);
                adopted += 1;
            }
        }
        adopted
    }

    /// Cleans up after a dead client. `entries` are those that its threads latched last, or were about to latch. Opens the
    /// client's latches on them without changing the pages' bytes, absorbs their unreported dirty pages, and frees its quarantined
    /// frames. `resolve` returns the object with an id. Returns how many latches it opened.
    pub fn owner_gone(
        &self,
        owner: u16,
        entries: &[u32],
        resolve: &dyn Fn(u64) -> Option<Arc<dyn Object>>,
    ) -> usize {
        let (shared, context) = (&self.shared, &self.shared.context);
        let mut opened = 0;
        context
            .counts
            .dead_client_entries
            .fetch_add(entries.len() as u64, Relaxed);
        let there = |index: &&u32| **index < context.memory.geometry().entries();
        for index in entries.iter().filter(there) {
            let _state = shared.lock();
            opened += usize::from(latches::open(context, *index, owner));
        }
        // The client may have died after it made a page dirty and before it reported the page.
        let mut unknown = vec![];
        let mut state = shared.lock();
        state.drain_reports(context);
        for index in entries.iter().filter(there) {
            unknown.extend(latches::unknown_dirty(&state, context, *index));
        }
        drop(state);
        self.adopt(unknown, resolve);
        latches::free_quarantine(&mut shared.lock(), owner);
        shared.wake_evictor();
        opened
    }

    /// Absorbs unreported dirty pages of an object after living clients have lost the right to write it inline. The caller has
    /// already made that visible to the clients. `entries` are those that their threads were about to latch last. Waits for
    /// latches on these entries, at most until a latch is taken away. Returns how many pages it absorbed.
    pub fn take_unreported(&self, object: &Arc<dyn Object>, entries: &[u32]) -> usize {
        let context = &self.shared.context;
        let page_of = |index: &u32| {
            let there = *index < context.memory.geometry().entries();
            let key = there.then(|| context.memory.entry(*index).key())??;
            (key.object() == object.id()).then_some((key.page(), *index))
        };
        let named: Vec<(u64, u32)> = entries.iter().filter_map(page_of).collect();
        if named.is_empty() {
            return 0;
        }
        if !self.await_writers(object.id(), named.clone(), Flags::NONE) {
            tracing::warn!(
                object = object.id(),
                "stopped waiting for an inline write that does not end"
            );
        }
        self.take_unknown(object, &named)
    }

    /// Absorbs those of the given pages (page, entry) that are dirty but not in the index. Returns how many it absorbed.
    fn take_unknown(&self, object: &Arc<dyn Object>, pages: &[(u64, u32)]) -> usize {
        let (shared, context) = (&self.shared, &self.shared.context);
        let is_dirty = |index: &u32| context.memory.entry(*index).state().has(Flags::DIRTY);
        let dirty = pages.iter().map(|(_, index)| *index).filter(is_dirty);
        let dirty: Vec<u32> = dirty.collect();
        if dirty.is_empty() {
            return 0;
        }
        shared.drain_clients();
        let mut unknown = vec![];
        for some in dirty.chunks(CHUNK) {
            let mut state = shared.lock();
            state.drain_reports(context);
            for index in some {
                unknown.extend(latches::unknown_dirty(&state, context, *index));
            }
        }
        unknown.retain(|key| key.object() == object.id());
        self.adopt(unknown, &|_| Some(object.clone()))
    }

    /// Takes latches away from a client whose signal handler has interrupted one of its writes and needs these pages. Each page
    /// that the client has latched moves to another frame, and its writer repeats the write. Returns how many latches it could
    /// not take yet, because no frame is free or the page is being written back.
    pub fn give_up_latches(&self, object: &Arc<dyn Object>, pages: Range<u64>, owner: u16) -> u32 {
        let (shared, context) = (&self.shared, &self.shared.context);
        let mut left = 0;
        for page in pages {
            let Some(found) = context.memory.lookup(Key::new(object.id(), page)) else {
                continue;
            };
            let word = found.state;
            if !word.has(Flags::LATCH) || word.owner() != owner {
                continue;
            }
            if latches::give_up(&mut shared.lock(), context, found.index, word) {
                self.dirtied_by_client(object, page, 1);
            } else {
                left += 1;
            }
        }
        if left > 0 {
            shared.wake_evictor();
        }
        left
    }

    /// Frees a quarantined frame after a thread of the client has ended its copy into it. The frame's page moved away earlier.
    pub fn copy_ended(&self, owner: u16, frame: u32) {
        let shared = &self.shared;
        if latches::copy_ended(&mut shared.lock(), owner, frame) {
            shared.wake_evictor();
        }
    }

    /// Stops inline writes of an object. When this returns, no client changes its pages inline, and the slice knows every page
    /// that clients have changed, also unreported ones. `may_write_inline` of the object must return false already. Waits for
    /// writers, at most until a latch is taken away. Returns false if a writer outlasts that.
    pub fn revoke_writes(&self, object: &Arc<dyn Object>) -> bool {
        // Waits for an insertion that holds the lock. A page that is inserted later gets no BACKED, because the object already
        // refuses. The pages inserted earlier are found below.
        drop(self.shared.lock());
        let found = resident(&self.shared.context, object.id(), &(0..u64::MAX));
        let drained = self.await_writers(object.id(), found.clone(), Flags::BACKED);
        self.take_unknown(object, &found);
        drained
    }

    /// Waits for clients that are writing pages of a range. A client that latches such a page afterwards sees what the caller
    /// changed in the slot before the call. Returns false if a writer outlasts the wait.
    pub fn drain_writers(&self, object: u64, pages: Range<u64>) -> bool {
        let found = {
            // A page that is not found here is inserted later, under the same lock.
            let _state = self.shared.lock();
            resident(&self.shared.context, object, &pages)
        };
        self.await_writers(object, found, Flags::NONE)
    }

    /// Clears flags in the states of an object's pages and waits until no page is latched or being filled. A thread that latches
    /// such a page later sees what the caller wrote before this call: the atomic change of the state orders them, even if `clear`
    /// has no flag. Returns false if a page stays latched for too long.
    fn await_writers(&self, object: u64, found: Vec<(u64, u32)>, clear: Flags) -> bool {
        let (shared, context) = (&self.shared, &self.shared.context);
        let mut busy: Vec<u32> = found.into_iter().map(|(_, index)| index).collect();
        let begun = Instant::now();
        loop {
            busy.retain(|index| {
                let entry = context.memory.entry(*index);
                if entry.key().is_none_or(|key| key.object() != object) {
                    return false;
                }
                // A fill that began before the object refused inline writes may still publish its page with BACKED. So
                // checks the entry again.
                entry.revoke(clear).is_some_and(|word| {
                    word.has(Flags::FILL)
                        || !latches::want(&mut shared.lock(), context, *index, word)
                })
            });
            if busy.is_empty() {
                return true;
            }
            if begun.elapsed() > 2 * LATCH_MAX {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Returns the number of frames that are not used because a client may still write into them.
    pub fn quarantined(&self) -> usize {
        self.shared.lock().latches.quarantine.len()
    }
}
