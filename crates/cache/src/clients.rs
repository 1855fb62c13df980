//! What clients in other processes need of a slice, and what protects it from them.
//!
//! A client may die, or be stopped, while it holds a page's latch, and it may know of dirty pages that the
//! slice does not. Nothing here or in the rest of the slice waits for one without bound.

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

/// A latch that was held for this long is taken away: a copy of 4 KiB takes less than a microsecond, and the
/// longest that a running program is kept from its CPU is far below it.
const LATCH_MAX: Duration = Duration::from_secs(1);
/// An owner of so many latches that were held for too long says so of pages that it does not write.
const LATCHES_OF_A_LIAR: usize = 256;
/// Entries looked at with the lock held once.
const CHUNK: usize = 2048;
/// Attempts to open the latch of a dead client.
const OPEN_TRIES: u32 = 16;

/// Latches that clients hold for long.
#[derive(Default)]
pub(crate) struct Latches {
    /// By entry: the state seen, and since when.
    seen: HashMap<u32, (Word, Instant)>,
    /// Frames into which a client whose latch was taken away may still copy.
    quarantine: Vec<(u16, u32)>,
    /// Frames that their pages have left on their way to the device, by entry: the device reads from them still.
    left: HashMap<u32, u32>,
    /// Dirty pages that no client will report: their latch was taken away, or their client died.
    unreported: Vec<Key>,
}

impl State {
    /// Somebody wants a page that is latched. Takes the latch away if a client has held it for too long: true
    /// then. The page goes on in another frame, since the client may still write into the old one.
    pub fn want_latched(&mut self, shared: &Shared, index: u32, word: Word) -> bool {
        // The daemon's own are no exception: a client can latch a page in its name, and a thread of the daemon whose latch is
        // gone writes the page anew.
        if !word.has(Flags::LATCH) {
            return false;
        }
        let now = Instant::now();
        // Those of pages that nobody wanted again.
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
        let Some(copied) = self.go_on_elsewhere(shared, index, word) else {
            return false;
        };
        self.add_unreported(shared.memory.entry(index).key());
        // Who is no client has no copy that may still go on. Nor does the daemon: that was a lie, or the page is
        // written anew by a thread that has not run for a second, which may spoil the frame's next page: the frame waits.
        let known = shared.on_broken.get().is_some_and(|b| b(word.owner()));
        if !copied {
            return true;
        }
        if known || word.owner() == OWNER_DAEMON {
            self.latches.quarantine.push((word.owner(), word.frame()));
        } else {
            self.give_kept_frame(word.frame());
        }
        true
    }

    /// Takes a latch away and moves the page to another frame; the caller has checked that one is free. Returns `None` when
    /// the latch has changed hands. Otherwise returns whether the old frame number was valid.
    fn go_on_elsewhere(&mut self, shared: &Shared, index: u32, word: Word) -> Option<bool> {
        let frame = self.frames.take();
        let mut bytes = [0; PAGE_BYTES as usize];
        // An invalid frame number means that a client corrupted the entry; the page then reads as zeros.
        let copied = shared.memory.copy_out(word.frame(), 0, &mut bytes);
        let filled = shared.memory.copy_in(frame, 0, &bytes);
        if filled.is_err() || !shared.memory.entry(index).break_latch(word, frame) {
            self.frames.give(frame);
            return None;
        }
        self.latches.seen.remove(&index);
        // Not the next one, if this happens again meanwhile: the device knows the first.
        if copied.is_ok() && self.on_the_way.contains(&index) {
            self.latches.left.entry(index).or_insert(word.frame());
        }
        Some(copied.is_ok())
    }

    /// Takes a page's latch away from a client that asks for it. Returns false when the client has to ask again.
    fn give_up_latch(&mut self, shared: &Shared, index: u32, word: Word) -> bool {
        // While a write-back is in flight, the device reads from the frame that the page would leave.
        if self.frames.free() == 0 || self.on_the_way.contains(&index) {
            return false;
        }
        match self.go_on_elsewhere(shared, index, word) {
            Some(true) => self.latches.quarantine.push((word.owner(), word.frame())),
            Some(false) => {}
            None => return false,
        }
        true
    }

    /// Without a frame to go on in, for an owner that holds more latches than programs have threads that run: it does not
    /// copy into all of these frames.
    fn break_in_place(&mut self, shared: &Shared, index: u32, word: Word, now: Instant) -> bool {
        let held = self.latches.seen.values();
        let held = held
            .filter(|(seen, since)| seen.owner() == word.owner() && now - *since >= LATCH_MAX)
            .count();
        if held < LATCHES_OF_A_LIAR || !shared.memory.entry(index).break_latch(word, word.frame()) {
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

    /// Takes a frame back that its page has left, unless the device still reads from it.
    fn give_kept_frame(&mut self, frame: u32) {
        if !self.latches.left.values().any(|left| *left == frame) {
            self.give_frame(frame);
        }
    }

    /// The page of an entry is not on its way to the device any more.
    pub fn transfer_ended(&mut self, index: u32) {
        self.on_the_way.remove(&index);
        let Some(frame) = self.latches.left.remove(&index) else {
            return;
        };
        if !self.quarantined().any(|kept| kept == frame) {
            self.give_kept_frame(frame);
        }
    }

    /// Frames of which nobody knows whether a client still copies into them.
    pub fn quarantined(&self) -> impl Iterator<Item = u32> {
        self.latches.quarantine.iter().map(|(_, frame)| *frame)
    }

    /// Ends the quarantine after a latch that was the daemon's, or said so.
    pub fn end_own_quarantine(&mut self) {
        self.latches
            .quarantine
            .retain(|(owner, _)| *owner != OWNER_DAEMON);
    }
}

impl Slice {
    /// `announcer` takes in what clients have announced (with `dirtied_by_client`); it is called before each
    /// question about dirty pages, without a lock of the slice. Set once.
    pub fn set_announcer(&self, announcer: Box<dyn Fn() + Send + Sync>) {
        let _ = self.shared.announcer.set(announcer);
    }

    /// Sets the callback that collects what clients have used (with `SliceMemory::touch`), a bounded number of clients in each call. The
    /// evictor calls it before it chooses victims, without a lock of the slice. Set once.
    pub fn set_collector(&self, collector: Box<dyn Fn() + Send + Sync>) {
        let _ = self.shared.collector.set(collector);
    }

    /// Sets the callback that learns of owners whose latch was taken away, and returns whether there is such a client. It must
    /// arrange a call of `adopt_unreported` soon. It runs with the slice's lock held, so it must not call the slice. Set once.
    pub fn set_on_broken(&self, broken: Box<dyn Fn(u16) -> bool + Send + Sync>) {
        let _ = self.shared.on_broken.set(broken);
    }

    /// A client says that it has made pages dirty. Those that are not, are not counted.
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
        state.drain_announced(shared);
        for index in entries.iter().filter(there) {
            unknown.extend(state.unknown_dirty(shared, *index));
        }
        drop(state);
        self.adopt(unknown, resolve);
        let mut state = shared.lock();
        let quarantine = std::mem::take(&mut state.latches.quarantine);
        for (holder, frame) in quarantine {
            if holder == owner {
                state.give_kept_frame(frame);
            } else {
                state.latches.quarantine.push((holder, frame));
            }
        }
        drop(state);
        shared.evict_waker.wake();
        opened
    }

    /// Absorbs unreported dirty pages of an object that living clients no longer may write. The clients can see that they may not.
    /// `entries`: those that their threads were about to latch last. Waits for the latches among them, at most until a latch is taken away.
    /// Returns how many pages it absorbed.
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
        if !self.drain(object.id(), named.clone(), Flags::NONE) {
            tracing::warn!(
                object = object.id(),
                "stopped waiting for an inline write that does not end"
            );
        }
        self.take_unknown(object, &named)
    }

    /// Absorbs those of the named pages, given as (page, entry), that are dirty and that the index does not have. Returns how many
    /// there were.
    fn take_unknown(&self, object: &Arc<dyn Object>, pages: &[(u64, u32)]) -> usize {
        let shared = &self.shared;
        let is_dirty = |index: &u32| shared.memory.entry(*index).state().has(Flags::DIRTY);
        let dirty = pages.iter().map(|(_, index)| *index).filter(is_dirty);
        let dirty: Vec<u32> = dirty.collect();
        if dirty.is_empty() {
            return 0;
        }
        shared.hear_clients();
        let mut unknown = vec![];
        for some in dirty.chunks(CHUNK) {
            let mut state = shared.lock();
            state.drain_announced(shared);
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
        state.give_kept_frame(frame);
        drop(state);
        shared.evict_waker.wake();
    }

    /// Stops inline writes of an object. When this returns, no client changes its pages inline, and the slice knows every page that clients
    /// have changed, also unreported ones. `may_write_inline` of the object must return false already. Waits for writers, at most until a
    /// latch is taken away. Returns false if a writer outlasts that.
    pub fn withdraw(&self, object: &Arc<dyn Object>) -> bool {
        // Pages inserted after this point learn from the object that they must not be written inline. Pages inserted
        // before it are found below.
        drop(self.shared.lock());
        let found = crate::invalidate::resident(&self.shared, object.id(), &(0..u64::MAX));
        let drained = self.drain(object.id(), found.clone(), Flags::BACKED);
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
        self.drain(object, found, Flags::NONE)
    }

    /// Clears flags in the states of an object's pages and waits until no page is latched or being filled. The change of the
    /// state, even with no flags, orders the caller before the next thread that latches the page.
    fn drain(&self, object: u64, found: Vec<(u64, u32)>, clear: Flags) -> bool {
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

    /// Returns the number of entries that were checked because a client died: those that its threads latched last.
    pub fn searched(&self) -> u64 {
        self.counters().dead_client_entries
    }

    /// Frames that are kept from use because a client may still write into them.
    pub fn quarantined(&self) -> usize {
        self.shared.lock().latches.quarantine.len()
    }
}

impl Shared {
    /// Takes in what clients have announced. Not with the lock held.
    pub fn hear_clients(&self) {
        if let Some(announcer) = self.announcer.get() {
            announcer();
        }
    }

    /// When the index knows of no dirty page, nothing is on its way and nobody is writing, the count of dirty
    /// pages is none: what clients announced twice or not at all is put right.
    /// True when it was not.
    pub fn put_count_right(&self, state: &State) -> bool {
        let count = self.dirty_pages.load(Relaxed);
        let nothing = state.dirty.is_empty()
            && state.writing.is_empty()
            && state.chosen.is_empty()
            && state.pins.is_empty()
            && self.announced.is_empty();
        if count == 0 || !nothing {
            return false;
        }
        // Fails when somebody counts at this moment.
        let _ = self
            .dirty_pages
            .compare_exchange(count, 0, Relaxed, Relaxed);
        self.memory.set_throttled(false);
        true
    }
}
