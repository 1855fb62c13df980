//! Keeps writers over several pages out of a range while a thread of the daemon reads it.

use std::sync::Arc;
use std::time::Instant;

use jericho_cache::OWNER_DAEMON;
use jericho_shm::{HELD_MAX, Holding, Kept, RangeTaken, Segments, SlotLock, WORDS};

use super::Fast;
use super::slot_file::SlotFile;

/// Keeps writers over several pages out of a range while it is read; given back on drop, in any thread.
pub(crate) struct ReadGuard {
    fast: Arc<Fast>,
    file: Arc<SlotFile>,
    range: Box<RangeTaken>,
}

/// The result of `ReadGuard::take`.
pub(crate) enum LockedOut {
    /// Writers are locked out.
    Locked(ReadGuard),
    /// A client lends a word. A read has to wait for the request that ends the client's write; a thread that serves requests must
    /// not wait.
    Lent,
    /// A write of the daemon keeps a word, and waits for a device.
    GaveUp,
}

impl ReadGuard {
    /// Locks writers out of a range.
    pub fn take(fast: &Arc<Fast>, file: &Arc<SlotFile>, segments: Segments) -> LockedOut {
        let taken = fast.lock_out(file, segments);
        let (is_all, is_lent) = (taken.is_all(), taken.has_borrowed());
        let guard = ReadGuard {
            fast: fast.clone(),
            file: file.clone(),
            range: Box::new(taken),
        };
        // Only `Locked` keeps the guard. In the other cases, the drop of the guard gives back the words that were taken.
        if is_lent {
            LockedOut::Lent
        } else if is_all {
            LockedOut::Locked(guard)
        } else {
            LockedOut::GaveUp
        }
    }
}

impl Drop for ReadGuard {
    fn drop(&mut self) {
        self.fast.unlock_range(&self.file, &self.range);
    }
}

/// Takes the words of a range over several polls, without blocking. Holds no word while a client lends another one: the kernel
/// may serve a request that waits for the word before the lender's request.
pub(super) struct Gathering {
    fast: Arc<Fast>,
    file: Arc<SlotFile>,
    segments: Segments,
    taken: Box<RangeTaken>,
    /// How each word was held at the last poll, and since when.
    seen: [Option<(Holding, Instant)>; WORDS],
}

/// The result of one poll.
pub(super) enum Gathered {
    /// All words are held.
    All(ReadGuard),
    /// Other threads hold some words.
    Some,
    /// A write of the daemon keeps a word, and waits for a device.
    GaveUp,
}

impl Gathering {
    pub fn new(fast: &Arc<Fast>, file: Arc<SlotFile>, segments: Segments) -> Gathering {
        Gathering {
            fast: fast.clone(),
            file,
            segments,
            taken: Box::new(RangeTaken::none()),
            seen: [None; WORDS],
        }
    }

    /// Returns whether the words are those of a file's slot.
    pub fn is_of(&self, file: &Arc<SlotFile>) -> bool {
        Arc::ptr_eq(&self.file, file)
    }

    /// Takes more words. Takes a word away from a client that has kept it too long and does not lend it.
    pub fn poll(&mut self) -> Gathered {
        let (fast, file) = (self.fast.clone(), self.file.clone());
        let slot = fast.slot(&file);
        let (now, mut is_lent) = (Instant::now(), false);
        for word in self.taken.missing(self.segments).words() {
            let held = slot.holding(word);
            is_lent |= fast.lends(&file, SlotLock::Word(word), held);
            if self.seen[word].is_none_or(|(seen, _)| seen != held) {
                self.seen[word] = Some((held, now));
            }
        }
        if is_lent {
            self.give_back();
            return Gathered::Some;
        }
        let seen = &self.seen;
        let kept = |word: usize, held: Holding| match seen[word] {
            Some((seen, since)) if seen == held && now - since >= HELD_MAX => {
                match file.range.has(word) {
                    true => Kept::GiveUp,
                    false => Kept::TakeAway,
                }
            }
            _ => Kept::WaitOn,
        };
        let note = |word| file.range.note(word);
        match slot.try_range(&mut self.taken, self.segments, OWNER_DAEMON, kept, note) {
            Ok(()) => Gathered::All(ReadGuard {
                fast,
                file,
                range: self.take(),
            }),
            Err(Kept::GiveUp) => Gathered::GaveUp,
            Err(_) => Gathered::Some,
        }
    }

    fn take(&mut self) -> Box<RangeTaken> {
        std::mem::replace(&mut self.taken, Box::new(RangeTaken::none()))
    }

    fn give_back(&mut self) {
        let taken = self.take();
        self.fast.unlock_range(&self.file, &taken);
    }
}

impl Drop for Gathering {
    fn drop(&mut self) {
        self.give_back();
    }
}

#[cfg(test)]
mod lending;
