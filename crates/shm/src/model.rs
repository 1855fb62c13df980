//! The protocol under the model checker: every order in which the threads of a case can run, and every value that their loads may
//! then see. `docs/internals/model-checking.md` lists what the models cover.
//!
//! The words are the real ones with their real operations. A frame has a few words, copied one by one in the weakest order,
//! because a copy may tear.

mod ahead;
mod close;
mod death;
mod range;
mod readers;
mod ring;
mod size;
mod spill;
mod writers;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use crate::access::{Miss, try_read, try_write};
use crate::entry::{Entry, Flags, Key, PageState};
use crate::sync::{AtomicU64, Ordering};

/// Words of a frame.
const WORDS: usize = 2;
type Words = [u64; WORDS];

/// The key of a page.
fn key(page: u64) -> Key {
    Key::new(1, page)
}

/// Most switches away from a runnable thread in one order (or LOOM_MAX_PREEMPTIONS). The checker runs all orders with at most
/// this many. Faults that need more are rare, and the time grows tenfold with each.
const SWITCHES: usize = 3;

/// Runs all orders of a case. `case` notes the outcome of each. Fails unless the outcomes are exactly those of `expected`: a
/// missing one would mean that the case tests less than it should.
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

/// Returns the results of the threads.
fn join<T, const N: usize>(threads: [loom::thread::JoinHandle<T>; N]) -> [T; N] {
    threads.map(|thread| thread.join().unwrap())
}

/// The outcomes of all orders.
#[derive(Clone, Default)]
struct Notes(Arc<Mutex<BTreeSet<String>>>);

impl Notes {
    fn add(&self, what: impl std::fmt::Debug) {
        // A lock of the standard library: it is outside the model and orders nothing there.
        self.0.lock().unwrap().insert(format!("{what:?}"));
    }
}

/// An outcome that is noted without quotes.
struct Word(&'static str);

impl std::fmt::Debug for Word {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

/// A section that only one thread may be in: the checker fails when two threads enter it without synchronization between them.
struct Alone(loom::cell::UnsafeCell<()>);

// SAFETY: the model checks that no two threads access it at a time, and runs one thread at a time.
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

/// A slice with a few entries and frames.
struct Slice {
    entries: [Entry; 2],
    frames: [[AtomicU64; WORDS]; 2],
    /// The slice's lock, under which it inserts pages: odd while held.
    lock: AtomicU64,
    /// Whether the object may be written inline; 0: no.
    inline: AtomicU64,
    /// The object's slot, as clients see it; 0: they may write.
    slot: AtomicU64,
}

impl Slice {
    /// Returns a slice without pages.
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

    /// Returns a slice with page 1 in entry 0 and frame 0, with `flags` set and all words 1.
    fn with_page(flags: Flags) -> Arc<Slice> {
        let slice = Slice::empty();
        slice.fill(0, key(1), 0, [1; WORDS], flags);
        Arc::new(slice)
    }

    /// Returns the entry that holds page 1 in most cases.
    fn entry(&self) -> &Entry {
        &self.entries[0]
    }

    /// Brings a page in, as the slice does. The thread that inserts the page also transfers its bytes.
    fn fill(&self, entry: usize, key: Key, frame: u32, words: Words, flags: Flags) {
        let entry = &self.entries[entry];
        entry.insert(key, frame);
        self.put(frame, words);
        entry.publish(flags);
    }

    /// Evicts a clean page, as the evictor does.
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

    /// Makes one attempt to read. Returns the words, and the state in which they were read.
    fn read_in(&self, entry: usize, key: Key) -> Option<(PageState, Words)> {
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

    /// Makes one attempt to read.
    fn read(&self, entry: usize, key: Key) -> Option<Words> {
        self.read_in(entry, key).map(|(_, words)| words)
    }

    /// Makes one attempt to write words of page 1.
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

    /// Repeats a write until it succeeds or fails for good.
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
