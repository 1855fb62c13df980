//! The protocol under the model checker: every order in which the threads of a case can run, and every value
//! that their loads may then see. `docs/internals/model-checking.md` says what is covered.
//!
//! The words are the real ones with their real operations. A frame's bytes are a few words, copied one by one in
//! the weakest order, as a copy may tear.

mod ahead;
mod close;
mod death;
mod range;
mod readers;
mod ring;
mod size;
mod writers;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use crate::access::{try_read, try_write};
use crate::entry::{Entry, Flags, Key, State};
use crate::memory::Miss;
use crate::sync::{AtomicU64, Ordering};

/// Words of a frame.
const WORDS: usize = 2;
type Words = [u64; WORDS];

/// The key of a page.
fn key(page: u64) -> Key {
    Key::new(1, page)
}

/// Switches away from a thread that could go on, in one order. All orders with at most three are gone through (or
/// with LOOM_MAX_PREEMPTIONS); faults that need more are rare, and the time grows tenfold with each.
const SWITCHES: usize = 3;

/// Goes through the orders of a case. `case` notes what came out; all of `expected` must have, so that no case is
/// empty, and nothing else.
fn explore<const N: usize>(expected: [&str; N], case: impl Fn(&Notes) + Send + Sync + 'static) {
    let notes = Notes::default();
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(SWITCHES));
    let theirs = notes.clone();
    builder.check(move || case(&theirs));
    let seen = notes.0.lock().unwrap();
    let expected: BTreeSet<String> = expected.iter().map(|e| (*e).to_owned()).collect();
    assert_eq!(*seen, expected, "outcomes");
}

/// What threads came to.
fn join<T, const N: usize>(threads: [loom::thread::JoinHandle<T>; N]) -> [T; N] {
    threads.map(|thread| thread.join().unwrap())
}

/// Outcomes over all orders.
#[derive(Clone, Default)]
struct Notes(Arc<Mutex<BTreeSet<String>>>);

impl Notes {
    fn add(&self, what: impl std::fmt::Debug) {
        // Not a word of the model: it is outside of all orders.
        self.0.lock().unwrap().insert(format!("{what:?}"));
    }
}

/// Noted without quotes.
struct Word(&'static str);

impl std::fmt::Debug for Word {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

/// What only one thread at a time may do: the checker refuses two accesses that nothing orders.
struct Alone(loom::cell::UnsafeCell<()>);

// SAFETY: that no two threads access it at a time is what is checked; they run one at a time anyway.
unsafe impl Send for Alone {}
// SAFETY: as above.
unsafe impl Sync for Alone {}

impl Alone {
    fn new() -> Arc<Alone> {
        Arc::new(Alone(loom::cell::UnsafeCell::new(())))
    }

    fn enter(&self) {
        self.0.with_mut(|_| ());
    }
}

/// Some entries and frames.
struct Slice {
    entries: [Entry; 2],
    frames: [[AtomicU64; WORDS]; 2],
    /// The slice's lock, under which pages are inserted: odd while it is held.
    lock: AtomicU64,
    /// Whether the object may be written inline; 0: no.
    inline: AtomicU64,
    /// The object's slot as clients see it; 0: they may write.
    slot: AtomicU64,
}

impl Slice {
    /// Creates a slice without pages.
    fn empty() -> Slice {
        let words = || std::array::from_fn(|_| AtomicU64::new(0));
        Slice {
            entries: [Entry::new(), Entry::new()],
            frames: [words(), words()],
            lock: AtomicU64::new(0),
            inline: AtomicU64::new(1),
            slot: AtomicU64::new(0),
        }
    }

    /// Creates a slice with page 1 in entry 0 and frame 0, with `flags` set and all words 1.
    fn with_page(flags: Flags) -> Arc<Slice> {
        let slice = Slice::empty();
        slice.fill(0, key(1), 0, [1; WORDS], flags);
        Arc::new(slice)
    }

    /// The page's entry in most cases.
    fn entry(&self) -> &Entry {
        &self.entries[0]
    }

    /// As the slice brings a page in, with the thread that inserts it doing the transfer too.
    fn fill(&self, entry: usize, key: Key, frame: u32, words: Words, flags: Flags) {
        let entry = &self.entries[entry];
        entry.insert(key, frame);
        self.put(frame, words);
        entry.publish(flags);
    }

    /// As the evictor takes a clean page out.
    fn evict(&self, entry: usize) -> bool {
        let seen = self.entries[entry].state();
        seen.has(Flags::VALID)
            && !seen.any(Flags::DIRTY.with(Flags::LATCH).with(Flags::WRITE_BACK))
            && self.entries[entry].try_clear(seen)
    }

    fn put(&self, frame: u32, words: Words) {
        for (at, word) in words.into_iter().enumerate() {
            self.put_word(frame, at, word);
        }
    }

    fn put_word(&self, frame: u32, at: usize, word: u64) {
        self.frames[frame as usize][at].store(word, Ordering::Relaxed);
    }

    fn get(&self, frame: u32) -> Words {
        std::array::from_fn(|at| self.frames[frame as usize][at].load(Ordering::Relaxed))
    }

    /// One attempt to read: the words, with the state that they were read in.
    fn read_in(&self, entry: usize, key: Key) -> Option<(State, Words)> {
        let entry = &self.entries[entry];
        let seen = entry.find(key)?;
        let mut words = [0; WORDS];
        let copy = |frame| {
            words = self.get(frame);
            Ok(())
        };
        try_read(entry, seen, copy).ok()??;
        Some((seen, words))
    }

    /// One attempt to read.
    fn read(&self, entry: usize, key: Key) -> Option<Words> {
        self.read_in(entry, key).map(|(_, words)| words)
    }

    /// One attempt to write words of page 1.
    fn write(&self, owner: u16, words: &[(usize, u64)]) -> Result<Option<bool>, Miss> {
        self.write_if(owner, words, || true)
    }

    fn write_if(
        &self,
        owner: u16,
        words: &[(usize, u64)],
        still: impl Fn() -> bool,
    ) -> Result<Option<bool>, Miss> {
        let seen = self.entry().find(key(1)).ok_or(Miss::Absent)?;
        try_write(
            self.entry(),
            seen,
            owner,
            || true,
            |frame| {
                if !still() {
                    return Err(Miss::Changed);
                }
                for (at, word) in words {
                    self.put_word(frame, *at, *word);
                }
                Ok(())
            },
        )
    }

    /// Writes, however often that takes.
    fn write_surely(
        &self,
        owner: u16,
        words: &[(usize, u64)],
        still: impl Fn() -> bool,
    ) -> Result<bool, Miss> {
        loop {
            if let Some(was_clean) = self.write_if(owner, words, &still)? {
                return Ok(was_clean);
            }
            loom::thread::yield_now();
        }
    }
}
