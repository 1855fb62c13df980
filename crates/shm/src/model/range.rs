//! The range lock of a slot: writers over several pages, and readers that must see no half of a write.

use loom::thread;

use super::*;
use crate::lent::{Lent, Loan, LoanWord, SlotLock};
use crate::lock::{Lock, Wait};
use crate::slots::{Kept, Segments, Slot};
use crate::sync::{AtomicU32, futex};

const DAEMON: u16 = 1;

/// Sleeps until it is woken, and never gives up while the lock changes hands.
struct Sleeper;

impl Wait for Sleeper {
    fn is_over(&mut self, _seen: u32) -> bool {
        false
    }

    fn wait(&mut self, word: &AtomicU32, seen: u32) {
        futex::sleep(word, seen);
    }
}

#[test]
fn waiters_of_a_lock_that_changes_hands_all_get_it_and_none_sleeps_for_ever() {
    explore(["[true, true]"], |notes| {
        let (lock, inside) = (Arc::new(Lock::new()), Alone::new());
        let held = lock.try_lock(DAEMON).unwrap();
        let waiters = [2, 3].map(|owner| {
            let (lock, inside) = (lock.clone(), inside.clone());
            thread::spawn(move || {
                let held = lock.try_lock(owner);
                let held = held.or_else(|| lock.lock_slowly(owner, &mut Sleeper));
                let Some(held) = held else { return false };
                inside.enter();
                lock.unlock(held)
            })
        });
        inside.enter();
        assert!(lock.unlock(held));
        notes.add(join(waiters));
        assert!(lock.try_lock(4).is_some(), "free in the end");
    });
}

#[test]
fn a_writer_that_lost_a_word_writes_nothing_over_its_next_holder() {
    explore(["false", "true"], |notes| {
        let (slot, slice) = (Arc::new(Slot::new(2)), Slice::with_page(Flags::BACKED));
        let held = slot.lock_range(Segments::of(0, 1), 7).unwrap();
        let loser = thread::spawn({
            let (slot, slice) = (slot.clone(), slice.clone());
            move || {
                let done = slice.write_surely(7, &[(0, 7)], || slot.holds(&held, 0));
                slot.unlock_range(&held);
                done.is_ok()
            }
        });
        let mine = slot.word(0).take_over(DAEMON);
        slice.write_surely(DAEMON, &[(0, 9)], || true).unwrap();
        assert!(slot.word(0).unlock(mine), "the loser did not open it");
        notes.add(loser.join().unwrap());
        assert_eq!(slice.read(0, key(1)).unwrap()[0], 9);
    });
}

#[test]
fn a_reader_of_several_pages_sees_none_of_a_write_or_all_of_it() {
    explore(["None", "Some(1)", "Some(2)"], |notes| {
        // Two words, written one after the other, stand for two pages.
        let (slot, slice) = (Arc::new(Slot::new(2)), Slice::with_page(Flags::BACKED));
        let writer = thread::spawn({
            let (slot, slice) = (slot.clone(), slice.clone());
            move || {
                let held = slot.lock_range(Segments::of(0, 1), 7).unwrap();
                slice.write_surely(7, &[(0, 2)], || true).unwrap();
                slice.write_surely(7, &[(1, 2)], || true).unwrap();
                slot.unlock_range(&held);
            }
        });
        let read = || {
            let counts = slot.range_counts(Segments::of(0, 1))?;
            let first = slice.read(0, key(1))?[0];
            let second = slice.read(0, key(1))?[1];
            slot.has_range_counts(&counts).then_some((first, second))
        };
        let read = read();
        if let Some((first, second)) = read {
            assert_eq!(first, second, "half of a write");
        }
        notes.add(read.map(|(first, _)| first));
        writer.join().unwrap();
    });
}

#[test]
fn a_fallocate_zeroes_all_of_a_write_over_several_pages_or_none_of_it() {
    // Whether the fallocate got the word, and how many pages the writer has written.
    let outcomes = [
        "(false, 0)",
        "(false, 1)",
        "(false, 2)",
        "(true, 0)",
        "(true, 1)",
        "(true, 2)",
    ];
    explore(outcomes, |notes| {
        // Two words, written one after the other, stand for two pages.
        let (slot, slice) = (Arc::new(Slot::new(2)), Slice::with_page(Flags::BACKED));
        // Calls `change` with the word of both pages, unless the other thread keeps it.
        let alone = |slot: &Slot, owner, change: &mut dyn FnMut()| {
            let no = |_, _| false;
            let taken = slot.take_range(Segments::of(0, 1), owner, no, |_| Kept::GiveUp);
            let is_alone = taken.is_all();
            if is_alone {
                change();
            }
            slot.give_range_back(&taken, no);
            is_alone
        };
        let writer = thread::spawn({
            let (slot, slice) = (slot.clone(), slice.clone());
            move || {
                let (seen, removals) = (slot.size(), slot.removals());
                let still = || slot.size().same_truncation_count(seen);
                let mut done = 0;
                alone(&slot, 7, &mut || {
                    while done < 2 && slice.write_surely(7, &[(done, 2)], still).is_ok() {
                        done += 1;
                    }
                });
                (done, removals)
            }
        });
        slot.raise_truncation_count();
        slot.note_removal();
        let zeroed = alone(&slot, DAEMON, &mut || {
            slice.write_surely(DAEMON, &[(0, 0)], || true).unwrap();
            slice.write_surely(DAEMON, &[(1, 0)], || true).unwrap();
        });
        let (done, removals) = writer.join().unwrap();
        let [first, second] = slice.read(0, key(1)).unwrap();
        // A writer that has written one page makes the whole write again after the fallocate, if it finds another count.
        let is_repeated = done == 1 && slot.removals() != removals;
        assert!(is_repeated || first == second, "half of a write");
        notes.add((zeroed, done));
    });
}

#[test]
fn a_word_is_taken_from_the_owner_that_asks_and_never_from_the_daemon() {
    explore(["false", "true"], |notes| {
        let (lock, inside) = (Arc::new(Lock::new()), Alone::new());
        let held = lock.try_lock(7).unwrap();
        // Two threads of the daemon take it at the same time: one gets it, and the other leaves it alone.
        let other = thread::spawn({
            let (lock, inside) = (lock.clone(), inside.clone());
            move || {
                let held = lock.take_from(7, DAEMON);
                let Some(held) = held else { return };
                inside.enter();
                assert!(lock.unlock(held), "the word was taken from the daemon");
            }
        });
        let mine = lock.take_from(7, DAEMON);
        notes.add(mine.is_some());
        if let Some(mine) = mine {
            inside.enter();
            assert!(lock.unlock(mine), "the word was taken from the daemon");
        }
        other.join().unwrap();
        assert!(!lock.unlock(held) && lock.try_lock(7).is_some());
    });
}

/// A slot, and a thread's loan of it.
struct Lending {
    slot: Slot,
    word: LoanWord,
    loan: Loan,
}

impl Lending {
    fn new() -> Arc<Lending> {
        Arc::new(Lending {
            slot: Slot::new(2),
            word: LoanWord::new(),
            loan: Loan::new(),
        })
    }

    fn lent(&self) -> Lent<'_> {
        Lent {
            word: &self.word,
            loan: &self.loan,
        }
    }

    /// Borrows the first word if that is possible at once, calls `write`, and gives the word back. Returns whether it was
    /// borrowed.
    fn write_as_daemon(&self, write: impl FnOnce()) -> Option<bool> {
        let lends = |word, held| self.lent().has_lent(0, SlotLock::Word(word), held);
        let taken = (self.slot).take_range(Segments::of(0, 1), DAEMON, lends, |_| Kept::GiveUp);
        for (word, held) in taken.borrowed() {
            self.lent().note_borrowed(0, word, held);
        }
        let borrowed = taken.is_all().then(|| taken.has_borrowed());
        if borrowed.is_some() {
            write();
        }
        self.slot.give_range_back(&taken, lends);
        borrowed
    }
}

#[test]
fn a_lent_word_is_free_in_the_end_and_either_side_opens_it() {
    explore(["None", "Some(false)", "Some(true)"], |notes| {
        let (lending, inside) = (Lending::new(), Alone::new());
        let held = lending.slot.lock_range(Segments::of(0, 1), 7).unwrap();
        inside.enter();
        lending.lent().lend(0, &held, None, 0);
        let lender = thread::spawn({
            let lending = lending.clone();
            move || lending.lent().take_back(&lending.slot)
        });
        notes.add(lending.write_as_daemon(|| inside.enter()));
        lender.join().unwrap();
        assert!(
            lending.slot.range_counts(Segments::of(0, 1)).is_some(),
            "free"
        );
    });
}

#[test]
fn a_reader_sees_no_half_of_a_write_that_the_daemon_ends() {
    explore(["None", "Some(1)", "Some(2)"], |notes| {
        let (lending, slice) = (Lending::new(), Slice::with_page(Flags::BACKED));
        let lender = thread::spawn({
            let (lending, slice) = (lending.clone(), slice.clone());
            move || {
                let held = lending.slot.lock_range(Segments::of(0, 1), 7).unwrap();
                slice.write_surely(7, &[(0, 2)], || true).unwrap();
                lending.lent().lend(0, &held, None, 0);
                // The request for the rest, as another thread of the daemon serves it.
                let write = || assert!(slice.write_surely(DAEMON, &[(1, 2)], || true).is_ok());
                let served = lending.write_as_daemon(write);
                assert_eq!(served, Some(true));
                assert!(lending.lent().was_borrowed_at_most(&lending.slot, 0, 1));
                lending.lent().take_back(&lending.slot);
            }
        });
        let read = || {
            let counts = lending.slot.range_counts(Segments::of(0, 1))?;
            let first = slice.read(0, key(1))?[0];
            let second = slice.read(0, key(1))?[1];
            lending
                .slot
                .has_range_counts(&counts)
                .then_some((first, second))
        };
        let read = read();
        if let Some((first, second)) = read {
            assert_eq!(first, second, "half of a write");
        }
        notes.add(read.map(|(first, _)| first));
        lender.join().unwrap();
    });
}
