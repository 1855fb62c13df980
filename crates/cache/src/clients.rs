//! The part of a slice that serves clients in other processes, and its protection against them.
//!
//! A client may die or be stopped while it holds a page's latch. It may have made pages dirty that the slice does not know of. No
//! thread of the slice waits for a client without bound.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use foldhash::HashMap;
use jericho_format::PAGE_BYTES;
use jericho_shm::{Flags, Key, State as Word};

use crate::object::Object;
use crate::state::{Shared, State};
use crate::{OWNER_DAEMON, Slice};

/// A latch that was held for this long is taken away. A copy of 4 KiB takes less than a microsecond, and a running program is
/// kept from its CPU for far less than this.
const LATCH_MAX: Duration = Duration::from_secs(1);
/// An owner that holds this many latches for too long has latched pages that it does not write.
const LATCHES_OF_A_MALICIOUS_OWNER: usize = 256;
/// Entries checked in one critical section.
const CHUNK: usize = 2048;
/// Attempts to open the latch of a dead client.
const OPEN_TRIES: u32 = 16;

/// Latches that clients hold for a long time.
#[derive(Default)]
pub(crate) struct Latches {
    /// The latched state that was seen, and since when, by entry.
    seen: HashMap<u32, (Word, Instant)>,
    /// Frames into which a client whose latch was taken away may still copy, each with the client's owner id.
    quarantine: Vec<(u16, u32)>,
    /// Frames that a page left while the device reads from them, by the entry of the page.
    in_transfer: HashMap<u32, u32>,
    /// Dirty pages that no client will report: their latch was taken away, or their client died.
    unreported: Vec<Key>,
}

impl State {
    /// Takes the latch of a wanted page away if its owner has held it for too long. Returns whether it did. The page moves to
    /// another frame, since the owner may still write into the old one.
    pub fn want_latched(&mut self, shared: &Shared, index: u32, word: Word) -> bool {
        // Includes latches of the daemon. A client can latch a page in the daemon's name, and a thread of the daemon that has
        // lost its latch repeats the write.
        if !word.has(Flags::LATCH) {
            return false;
        }
        let now = Instant::now();
        // Forgets latches of pages that no thread has wanted again.
        if self.latches.seen.len() > 1024 {
            self.latches
                .seen
                .retain(|_, (_, since)| now - *since < 2 * LATCH_MAX);
        }
        let seen = self.latches.seen.entry(index).or_insert((word, now));
        if !seen.0.is_same_holding(word) {
            *seen = (word, now);
        }
        if now - seen.1 < LATCH_MAX {
            return false;
        }
        if self.frames.free() == 0 {
            return self.break_in_place(shared, index, word, now);
        }
        let Some(copied) = self.move_latched(shared, index, word) else {
            return false;
        };
        self.add_unreported(shared.memory.entry(index).key());
        // An unknown owner cannot be copying. A latch in the daemon's name is either forged, or belongs to a daemon thread that
        // has not run for a second. That thread repeats its write, but its old copy could corrupt the frame's next page, so the
        // frame goes into quarantine.
        let known = shared.on_broken.get().is_some_and(|b| b(word.owner()));
        if !copied {
            return true;
        }
        if known || word.owner() == OWNER_DAEMON {
            self.latches.quarantine.push((word.owner(), word.frame()));
        } else {
            self.free_left_frame(word.frame());
        }
        true
    }

    /// Takes a latch away and moves the page to another frame; the caller has checked that one is free. Returns `None` when
    /// the latch has changed hands. Otherwise returns whether the old frame number was valid.
    fn move_latched(&mut self, shared: &Shared, index: u32, word: Word) -> Option<bool> {
        let frame = self.frames.take();
        let mut bytes = [0; PAGE_BYTES as usize];
        // An invalid frame number means that a client corrupted the entry; the page then reads as zeros.
        let copied = shared.memory.copy_out(word.frame(), 0, &mut bytes);
        let filled = shared.memory.copy_in(frame, 0, &bytes);
        if filled.is_err() || !shared.memory.entry(index).break_latch(word, frame) {
            self.frames.release(frame);
            return None;
        }
        self.latches.seen.remove(&index);
        // Keeps the first frame if this happens again during the transfer: the device reads from the first one.
        if copied.is_ok() && self.on_the_way.contains(&index) {
            self.latches
                .in_transfer
                .entry(index)
                .or_insert(word.frame());
        }
        Some(copied.is_ok())
    }

    /// Takes a page's latch away from a client that asks for it. Returns false when the client has to ask again.
    fn give_up_latch(&mut self, shared: &Shared, index: u32, word: Word) -> bool {
        // While a write-back is in flight, the device reads from the frame that the page would leave.
        if self.frames.free() == 0 || self.on_the_way.contains(&index) {
            return false;
        }
        match self.move_latched(shared, index, word) {
            Some(true) => self.latches.quarantine.push((word.owner(), word.frame())),
            Some(false) => {}
            None => return false,
        }
        true
    }

    /// Takes a latch away without a free frame: the page keeps its frame. Does so only for an owner that holds more latches than
    /// programs have running threads, so it cannot be copying into all of these frames.
    fn break_in_place(&mut self, shared: &Shared, index: u32, word: Word, now: Instant) -> bool {
        let held = self.latches.seen.values();
        let held = held
            .filter(|(seen, since)| seen.owner() == word.owner() && now - *since >= LATCH_MAX)
            .count();
        if held < LATCHES_OF_A_MALICIOUS_OWNER
            || !shared.memory.entry(index).break_latch(word, word.frame())
        {
            return false;
        }
        self.add_unreported(shared.memory.entry(index).key());
        if let Some(broken) = shared.on_broken.get() {
            broken(word.owner());
        }
        true
    }

    /// Queues the page of an entry, if it has one: the page is dirty, and no client reports it. See `Slice::adopt_unreported`.
    pub fn add_unreported(&mut self, key: Option<Key>) {
        self.latches.unreported.extend(key);
    }

    /// Returns the page of an entry if it is dirty and the dirty index does not have it. Reports must have been
    /// drained.
    fn unknown_dirty(&self, shared: &Shared, index: u32) -> Option<Key> {
        let entry = shared.memory.entry(index);
        let key = entry.key()?;
        let unknown =
            entry.state().has(Flags::DIRTY) && !self.dirty.contains(key.object(), key.page());
        unknown.then_some(key)
    }

    /// Takes back a frame that its page has left, unless the device still reads from it.
    fn free_left_frame(&mut self, frame: u32) {
        if !self.latches.in_transfer.values().any(|left| *left == frame) {
            self.free_frame(frame);
        }
    }

    /// Records that the page of an entry is no longer in a write transfer.
    pub fn transfer_ended(&mut self, index: u32) {
        self.on_the_way.remove(&index);
        let Some(frame) = self.latches.in_transfer.remove(&index) else {
            return;
        };
        if !self.quarantined().any(|kept| kept == frame) {
            self.free_left_frame(frame);
        }
    }

    /// Returns the frames that clients may still copy into.
    pub fn quarantined(&self) -> impl Iterator<Item = u32> {
        self.latches.quarantine.iter().map(|(_, frame)| *frame)
    }

    /// Ends the quarantine of frames whose latch was, or claimed to be, the daemon's.
    pub fn end_own_quarantine(&mut self) {
        self.latches
            .quarantine
            .retain(|(owner, _)| *owner != OWNER_DAEMON);
    }
}

impl Slice {
    /// Sets the callback that takes in what clients have reported (it calls `dirtied_by_client`). The slice calls it before each
    /// query of the dirty pages, without a lock of the slice. Set once.
    pub fn set_report_drain(&self, report_drain: Box<dyn Fn() + Send + Sync>) {
        let _ = self.shared.report_drain.set(report_drain);
    }

    /// Sets the callback that collects which pages clients have used (with `SliceMemory::touch`). It visits a bounded number of
    /// clients in each call. The evictor calls it before it chooses victims, without a lock of the slice. Set once.
    pub fn set_collector(&self, collector: Box<dyn Fn() + Send + Sync>) {
        let _ = self.shared.collector.set(collector);
    }

    /// Sets the callback that learns of owners whose latch was taken away, and returns whether the owner is a client. It must
    /// arrange a call of `adopt_unreported` soon. It runs with the slice's lock held, so it must not call the slice. Set once.
    pub fn set_on_broken(&self, broken: Box<dyn Fn(u16) -> bool + Send + Sync>) {
        let _ = self.shared.on_broken.set(broken);
    }

    /// Takes a client's report that it made pages dirty. Ignores pages that are not dirty.
    pub fn dirtied_by_client(&self, object: &Arc<dyn Object>, first: u64, count: u32) {
        let memory = &self.shared.memory;
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
    /// Returns how many pages there were.
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
    /// client's latches on them without changing the pages, absorbs their unreported dirty pages, and frees its quarantined
    /// frames. `resolve` returns the object with an id. Returns how many latches it opened.
    pub fn owner_gone(
        &self,
        owner: u16,
        entries: &[u32],
        resolve: &dyn Fn(u64) -> Option<Arc<dyn Object>>,
    ) -> usize {
        let shared = &self.shared;
        let mut opened = 0;
        shared
            .counts
            .dead_client_entries
            .fetch_add(entries.len() as u64, Relaxed);
        let there = |index: &&u32| **index < shared.memory.geometry().entries();
        for index in entries.iter().filter(there) {
            let _state = shared.lock();
            let entry = shared.memory.entry(*index);
            // Retries because the end of a write-back may change the word. Nothing else changes a latched entry unless
            // a client is malicious.
            for _ in 0..OPEN_TRIES {
                let word = entry.state();
                if !word.has(Flags::LATCH) || word.owner() != owner {
                    break;
                }
                if entry.break_latch(word, word.frame()) {
                    opened += 1;
                    break;
                }
            }
        }
        // The client may have died after it made a page dirty and before it reported the page.
        let mut unknown = vec![];
        let mut state = shared.lock();
        state.drain_reports(shared);
        for index in entries.iter().filter(there) {
            unknown.extend(state.unknown_dirty(shared, *index));
        }
        drop(state);
        self.adopt(unknown, resolve);
        let mut state = shared.lock();
        let quarantine = std::mem::take(&mut state.latches.quarantine);
        for (holder, frame) in quarantine {
            if holder == owner {
                state.free_left_frame(frame);
            } else {
                state.latches.quarantine.push((holder, frame));
            }
        }
        drop(state);
        shared.evict_waker.wake();
        opened
    }

    /// Absorbs unreported dirty pages of an object that living clients no longer may write. The clients can see that they may
    /// not. `entries` are those that their threads were about to latch last. Waits for latches on these entries, at most until a
    /// latch is taken away. Returns how many pages it absorbed.
    pub fn take_unreported(&self, object: &Arc<dyn Object>, entries: &[u32]) -> usize {
        let shared = &self.shared;
        let page_of = |index: &u32| {
            let there = *index < shared.memory.geometry().entries();
            let key = there.then(|| shared.memory.entry(*index).key())??;
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

    /// Absorbs those of the given pages (page, entry) that are dirty but not in the index. Returns how many there were.
    fn take_unknown(&self, object: &Arc<dyn Object>, pages: &[(u64, u32)]) -> usize {
        let shared = &self.shared;
        let is_dirty = |index: &u32| shared.memory.entry(*index).state().has(Flags::DIRTY);
        let dirty = pages.iter().map(|(_, index)| *index).filter(is_dirty);
        let dirty: Vec<u32> = dirty.collect();
        if dirty.is_empty() {
            return 0;
        }
        shared.drain_clients();
        let mut unknown = vec![];
        for some in dirty.chunks(CHUNK) {
            let mut state = shared.lock();
            state.drain_reports(shared);
            for index in some {
                unknown.extend(state.unknown_dirty(shared, *index));
            }
        }
        unknown.retain(|key| key.object() == object.id());
        self.adopt(unknown, &|_| Some(object.clone()))
    }

    /// Takes latches away from a client whose signal handler has interrupted one of its writes and needs these pages. Each page
    /// that the client has latched moves to another frame, and its writer repeats the write. Returns how many latches it could
    /// not take yet, because no frame is free or the page is being written back.
    pub fn give_up_latches(&self, object: &Arc<dyn Object>, pages: Range<u64>, owner: u16) -> u32 {
        let (shared, mut left) = (&self.shared, 0);
        for page in pages {
            let Some(found) = shared.memory.lookup(Key::new(object.id(), page)) else {
                continue;
            };
            let word = found.state;
            if !word.has(Flags::LATCH) || word.owner() != owner {
                continue;
            }
            if shared.lock().give_up_latch(shared, found.index, word) {
                self.dirtied_by_client(object, page, 1);
            } else {
                left += 1;
            }
        }
        if left > 0 {
            shared.evict_waker.wake();
        }
        left
    }

    /// Frees a frame that its page has left, because the client's writer has ended its copy into the frame.
    pub fn copy_ended(&self, owner: u16, frame: u32) {
        let shared = &self.shared;
        let mut state = shared.lock();
        let quarantine = &mut state.latches.quarantine;
        let Some(at) = quarantine.iter().position(|kept| *kept == (owner, frame)) else {
            return;
        };
        quarantine.swap_remove(at);
        state.free_left_frame(frame);
        drop(state);
        shared.evict_waker.wake();
    }

    /// Stops inline writes of an object. When this returns, no client changes its pages inline, and the slice knows every page
    /// that clients have changed, also unreported ones. `may_write_inline` of the object must return false already. Waits for
    /// writers, at most until a latch is taken away. Returns false if a writer outlasts that.
    pub fn revoke_writes(&self, object: &Arc<dyn Object>) -> bool {
        // Pages inserted after this point learn from the object that they must not be written inline. Pages inserted
        // before it are found below.
        drop(self.shared.lock());
        let found = crate::invalidate::resident(&self.shared, object.id(), &(0..u64::MAX));
        let drained = self.await_writers(object.id(), found.clone(), Flags::BACKED);
        self.take_unknown(object, &found);
        drained
    }

    /// Waits for clients that are writing pages of a range. A client that latches such a page afterwards sees what the caller
    /// changed in the slot before the call. Returns false if a writer outlasts the wait.
    pub fn drain_writers(&self, object: u64, pages: std::ops::Range<u64>) -> bool {
        let found = {
            // A page that is not found here is inserted later, under the same lock.
            let _state = self.shared.lock();
            crate::invalidate::resident(&self.shared, object, &pages)
        };
        self.await_writers(object, found, Flags::NONE)
    }

    /// Clears flags in the states of an object's pages and waits until no page is latched or being filled. The change of the
    /// state, even with no flags, orders the caller before the next thread that latches the page.
    fn await_writers(&self, object: u64, found: Vec<(u64, u32)>, clear: Flags) -> bool {
        let shared = &self.shared;
        let mut busy: Vec<u32> = found.into_iter().map(|(_, index)| index).collect();
        let begun = Instant::now();
        loop {
            busy.retain(|index| {
                let entry = shared.memory.entry(*index);
                if entry.key().is_none_or(|key| key.object() != object) {
                    return false;
                }
                // A fill that began before the object refused may still publish its page with BACKED, so check the
                // entry again.
                entry.revoke(clear).is_some_and(|word| {
                    word.has(Flags::FILL) || !shared.lock().want_latched(shared, *index, word)
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

impl Shared {
    /// Takes in what clients have reported. Must not be called with the lock held.
    pub fn drain_clients(&self) {
        if let Some(report_drain) = self.report_drain.get() {
            report_drain();
        }
    }

    /// Resets the count of dirty pages to 0 when the index is empty, nothing is in flight and no thread is writing. The count is
    /// wrong after a client reported pages twice or not at all. Returns whether it was not 0.
    pub fn correct_dirty_count(&self, state: &State) -> bool {
        let count = self.dirty_pages.load(Relaxed);
        let nothing = state.dirty.is_empty()
            && state.writing.is_empty()
            && state.chosen.is_empty()
            && state.pins.is_empty()
            && self.reports.is_empty();
        if count == 0 || !nothing {
            return false;
        }
        // Fails if another thread changes the count at this moment.
        let _ = self
            .dirty_pages
            .compare_exchange(count, 0, Relaxed, Relaxed);
        self.memory.set_throttled(false);
        true
    }
}
