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
/// Attempts to open a latch of a client that has died.
const OPEN_TRIES: u32 = 16;

/// Latches that clients hold for long.
#[derive(Default)]
pub(crate) struct Latches {
    /// By entry: the state seen, and since when.
    seen: HashMap<u32, (Word, Instant)>,
    /// Frames into which a client whose latch was taken away may still copy.
    quarantine: Vec<(u16, u32)>,
    /// Pages that are dirty because a latch was taken away, or that no client reported: of which nobody tells the index.
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
        self.latches
            .unreported
            .extend(shared.memory.entry(index).key());
        // Who is no client has no copy that may still go on. Nor does the daemon: that was a lie, or the page is
        // written anew by a thread that has not run for a second, which may spoil the frame's next page: the frame waits.
        let known = shared.on_broken.get().is_some_and(|b| b(word.owner()));
        if !copied {
            return true;
        }
        if known || word.owner() == OWNER_DAEMON {
            self.latches.quarantine.push((word.owner(), word.frame()));
        } else {
            self.give_frame(word.frame());
        }
        true
    }

    /// Takes a latch away: the page goes on in another frame, of which there is one. `None` when the latch is another by now,
    /// else whether the page had a frame before.
    fn go_on_elsewhere(&mut self, shared: &Shared, index: u32, word: Word) -> Option<bool> {
        let frame = self.frames.take();
        let mut bytes = [0; PAGE_BYTES as usize];
        // Zeros when there is no such frame: a client has spoilt the entry.
        let copied = shared.memory.copy_out(word.frame(), 0, &mut bytes);
        let filled = shared.memory.copy_in(frame, 0, &bytes);
        if filled.is_err() || !shared.memory.entry(index).break_latch(word, frame) {
            self.frames.give(frame);
            return None;
        }
        self.latches.seen.remove(&index);
        Some(copied.is_ok())
    }

    /// Takes a page's latch away from a client that asks for it; false when that has to be tried again.
    fn give_up_latch(&mut self, shared: &Shared, index: u32, word: Word) -> bool {
        // The device reads from the frame that the page leaves, which is given back before its client ends.
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
        self.latches
            .unreported
            .extend(shared.memory.entry(index).key());
        if let Some(broken) = shared.on_broken.get() {
            broken(word.owner());
        }
        true
    }

    /// Has a dirty page taken in that no client reported; see `Slice::adopt_unreported`.
    pub fn add_unreported(&mut self, key: Key) {
        self.latches.unreported.push(key);
    }

    /// The page of an entry, if it is dirty and the index does not have it. Reports must have been drained.
    fn unknown_dirty(&self, shared: &Shared, index: u32) -> Option<Key> {
        let entry = shared.memory.entry(index);
        let key = entry.key()?;
        let unknown =
            entry.state().has(Flags::DIRTY) && !self.dirty.contains(key.object(), key.page());
        unknown.then_some(key)
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

    /// `collector` marks what clients have used since it ran last (with `SliceMemory::touch`); the evictor calls it before it chooses
    /// pages, without a lock of the slice. Set once.
    pub fn set_collector(&self, collector: Box<dyn Fn() + Send + Sync>) {
        let _ = self.shared.collector.set(collector);
    }

    /// `broken` hears of owners whose latch was taken away, and tells whether there is such a client. It has `adopt_unreported`
    /// called soon. Called with the slice's lock held: it must not call the slice. Set once.
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

    /// Takes in the dirty pages whose latch was taken away, and those that a repair found. `resolve` knows the object of a number.
    /// Gives how many there were.
    pub fn adopt_unreported(&self, resolve: &dyn Fn(u64) -> Option<Arc<dyn Object>>) -> usize {
        let unreported = std::mem::take(&mut self.shared.lock().latches.unreported);
        self.adopt(unreported, resolve)
    }

    /// Takes in dirty pages that nobody has reported.
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

    /// A client is dead that was about to latch these entries last: opens its latches on them, as they are, takes in their pages
    /// if they are dirty and nobody reported that, and takes back what was kept out of its reach. `resolve` knows the object of
    /// a number. Gives how many latches it opened.
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
            .searched
            .fetch_add(entries.len() as u64, Relaxed);
        let there = |index: &&u32| **index < shared.memory.geometry().entries();
        for index in entries.iter().filter(there) {
            let _state = shared.lock();
            let entry = shared.memory.entry(*index);
            // Write-back may end meanwhile, and nothing else changes a latched entry, unless a client writes nonsense.
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
        // It may have died after a page was dirty and before it said so.
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
                state.give_frame(frame);
            } else {
                state.latches.quarantine.push((holder, frame));
            }
        }
        drop(state);
        shared.evict_waker.wake();
        opened
    }

    /// Clients that live may not write an object any more and know it: takes in what they have written to its pages and not reported yet.
    /// `entries`: those that their threads were about to latch last. Waits for the latches among them, at most for one to be taken away. Gives
    /// how many pages it took in.
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
            tracing::warn!(object = object.id(), "an inline writer does not finish");
        }
        self.take_unknown(object, &named)
    }

    /// Takes in those pages of an object that are dirty and that the index does not have, of the named ones: (page, entry). Gives how
    /// many those were.
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

    /// A client's signal handler has interrupted one of its writes and wants these pages: those that the client has latched go on
    /// in other frames, and their writers write anew. Gives how many could not yet, for want of a frame or while they are written
    /// back.
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

    /// A client's writer has ended its copy into a frame that its page has left.
    pub fn copy_ended(&self, owner: u16, frame: u32) {
        let shared = &self.shared;
        let mut state = shared.lock();
        let quarantine = &mut state.latches.quarantine;
        let Some(at) = quarantine.iter().position(|kept| *kept == (owner, frame)) else {
            return;
        };
        quarantine.swap_remove(at);
        state.give_frame(frame);
        drop(state);
        shared.evict_waker.wake();
    }

    /// Keeps inline writers from an object's pages: none changes one after the return, and the slice knows all that they have changed, also what
    /// they have not reported yet. Its `may_write_inline` must say no already. Waits for writers, at most for a latch
    /// to be taken away; false if one could not be.
    pub fn withdraw(&self, object: &Arc<dyn Object>) -> bool {
        // Pages that are inserted after this learn from the object that they must not be written inline; those that were
        // inserted before are met below.
        drop(self.shared.lock());
        let found = crate::invalidate::resident(&self.shared, object.id(), &(0..u64::MAX));
        let drained = self.drain(object.id(), found.clone(), Flags::BACKED);
        self.take_unknown(object, &found);
        drained
    }

    /// Waits for clients that are writing pages of a range. A client that latches one of them after the return sees in the slot
    /// what the caller has changed there before. False if one could not be waited for.
    pub fn drain_writers(&self, object: u64, pages: std::ops::Range<u64>) -> bool {
        let found = {
            // A page that is not found here comes into the cache later, under the same lock.
            let _state = self.shared.lock();
            crate::invalidate::resident(&self.shared, object, &pages)
        };
        self.drain(object, found, Flags::NONE)
    }

    /// Clears flags in the states of an object's pages and waits until none is latched or being filled. The change, also one of
    /// no flags, orders the caller before the next thread that latches the page.
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
                // A fill that began before the object said no may publish its page with BACKED: it is met again.
                entry.withdraw(clear).is_some_and(|word| {
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

    /// Entries that were looked at because a client died or lost reports.
    pub fn searched(&self) -> u64 {
        self.shared.counts.searched.load(Relaxed)
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
