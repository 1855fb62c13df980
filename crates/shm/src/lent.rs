//! The locks that a client's thread lends while it ends an inline write through the kernel.
//!
//! Some pages of that write are changed already, so no thread may read the range yet. But the lending thread writes nothing
//! inline until the kernel's call has ended. So each write of the daemon may borrow the locks and give them back: for the
//! thread's own request, and for other requests that the kernel serves before it.

use crate::lock::{HELD_MAX, Holding};
use crate::slots::{RangeHeld, Slot, WORDS};
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

const SLOT: u32 = (1 << 17) - 1;
const LOAN_ONE: u32 = 1 << 17;

/// The loan of a thread, in its block: slot + 1 in the low 17 bits (0: no loan), and a count of its loans above. Lies apart from
/// `Loan`, because the daemon reads this word of every thread and the rest only of lenders.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct LoanWord(AtomicU32);

/// The beginning of the loan, and the words of the lent locks while the thread holds them; 0: not lent.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Loan {
    /// Time when the loan began, in nanoseconds of the realtime clock.
    since: AtomicU64,
    extend: AtomicU32,
    words: [AtomicU32; WORDS],
    /// Times that each word was borrowed during this loan.
    borrowed: [AtomicU32; WORDS],
}

/// A lock of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotLock {
    /// The extend lock.
    Extend,
    /// A word of the range lock.
    Word(usize),
}

/// A thread's words for its loan.
#[derive(Clone, Copy, Debug)]
pub struct Lent<'a> {
    pub(crate) word: &'a LoanWord,
    pub(crate) loan: &'a Loan,
}

impl LoanWord {
    #[cfg(all(test, loom))]
    pub(crate) fn new() -> LoanWord {
        LoanWord(AtomicU32::new(0))
    }

    /// Returns whether the thread lends locks of a slot.
    #[inline]
    pub(crate) fn is_of(&self, slot: u32) -> bool {
        self.0.load(Ordering::Acquire) & SLOT == slot + 1
    }
}

impl Loan {
    #[cfg(all(test, loom))]
    pub(crate) fn new() -> Loan {
        Loan {
            since: AtomicU64::new(0),
            extend: AtomicU32::new(0),
            words: std::array::from_fn(|_| AtomicU32::new(0)),
            borrowed: std::array::from_fn(|_| AtomicU32::new(0)),
        }
    }

    fn of(&self, lock: SlotLock) -> &AtomicU32 {
        match lock {
            SlotLock::Extend => &self.extend,
            SlotLock::Word(word) => &self.words[word],
        }
    }
}

impl Lent<'_> {
    /// Lends locks of a slot that the thread holds. The thread writes nothing under them until `take_back` releases them.
    /// `now_ns` is of the realtime clock.
    pub fn lend(&self, slot: u32, range: &RangeHeld, extend: Option<Holding>, now_ns: u64) {
        let count = self.word.0.load(Ordering::Relaxed) & !SLOT;
        let extend = extend.map_or(0, |held| held.0);
        self.loan.since.store(now_ns, Ordering::Relaxed);
        self.loan.extend.store(extend, Ordering::Relaxed);
        for (noted, held) in self.loan.words.iter().zip(range.words) {
            noted.store(held, Ordering::Relaxed);
        }
        for borrowed in &self.loan.borrowed {
            borrowed.store(0, Ordering::Relaxed);
        }
        let loan = count.wrapping_add(LOAN_ONE) | (slot + 1);
        self.word.0.store(loan, Ordering::Release);
    }

    /// Ends the loan and releases the locks. If the daemon has borrowed a lock at this moment, the daemon releases that lock
    /// later.
    pub fn take_back(&self, slot: &Slot) {
        let count = self.word.0.load(Ordering::Relaxed) & !SLOT;
        self.word.0.store(count, Ordering::Relaxed);
        // Pairs with the fence in `Lock::give_back`.
        fence(Ordering::SeqCst);
        let mut range = RangeHeld::none();
        for (word, noted) in self.loan.words.iter().enumerate() {
            match noted.load(Ordering::Relaxed) {
                0 => {}
                held => range.add(word, Holding(held)),
            }
        }
        slot.unlock_range(&range);
        match self.loan.extend.load(Ordering::Relaxed) {
            0 => {}
            held => {
                slot.extend_lock().unlock(Holding(held));
            }
        }
    }

    /// Counts that a word was borrowed to change the file. The daemon calls this before it gives the word back. Counts nothing if
    /// the thread does not lend the word, or does not hold it as `held`.
    pub fn note_borrowed(&self, slot: u32, word: usize, held: Holding) {
        if self.has_lent(slot, SlotLock::Word(word), held) {
            self.loan.borrowed[word].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns whether a word is still held as at the beginning of the loan, and was borrowed at most `times` times. Only for the
    /// lender.
    pub fn was_borrowed_at_most(&self, slot: &Slot, word: usize, times: u32) -> bool {
        let held = Holding(self.loan.words[word].load(Ordering::Relaxed));
        slot.is_word_held(word, held) && self.loan.borrowed[word].load(Ordering::Relaxed) <= times
    }

    /// Returns when the loan of a lock of a slot began, if the thread lends it and holds it as `held`.
    fn lent_since(&self, slot: u32, lock: SlotLock, held: Holding) -> Option<u64> {
        let loan = self.word.0.load(Ordering::Acquire);
        if loan & SLOT != slot + 1 {
            return None;
        }
        let noted = self.loan.of(lock).load(Ordering::Relaxed);
        let since = self.loan.since.load(Ordering::Relaxed);
        // Another loan may have begun meanwhile, to which these words would belong.
        fence(Ordering::Acquire);
        (noted == held.0 && self.word.0.load(Ordering::Relaxed) == loan).then_some(since)
    }

    /// Returns whether the thread lends a lock of a slot and holds that lock as `held`.
    pub fn has_lent(&self, slot: u32, lock: SlotLock, held: Holding) -> bool {
        self.lent_since(slot, lock, held).is_some()
    }

    /// Returns whether the thread lends the lock, and has done so for less than `HELD_MAX`. A thread that lends for longer has
    /// stopped, and the daemon treats it as any holder that keeps a lock too long. Also returns false for a loan that begins more
    /// than `HELD_MAX` in the future.
    pub fn lends(&self, slot: u32, lock: SlotLock, held: Holding, now_ns: u64) -> bool {
        let since = self.lent_since(slot, lock, held);
        since.is_some_and(|since| u128::from(now_ns.abs_diff(since)) < HELD_MAX.as_nanos())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::area::Area;
    use crate::slots::{Kept, Segments, Slots};

    const CLIENT: u16 = 7;
    const DAEMON: u16 = 1;

    #[test]
    fn the_daemon_borrows_lent_locks_and_returns_them() {
        let (slots, area) = (
            Slots::create("test", 2).unwrap(),
            Area::create("test", 7).unwrap(),
        );
        let (slot, segments) = (slots.slot(1).unwrap(), Segments::of(0, 3 << 16));
        let (block, _) = area.take_block(4711, |_| false);
        let lent = area.lent(block);
        let held = slot.lock_range(segments, CLIENT).unwrap();
        let extend = slot.extend_lock().lock(CLIENT).unwrap();
        let word = |word| SlotLock::Word(word);
        let lends = |index, lock, held| area.lends(index, lock, held, 1000);
        assert!(!lends(1, SlotLock::Extend, extend), "not yet");
        lent.lend(1, &held, Some(extend), 900);
        assert!(lends(1, SlotLock::Extend, extend));
        let late = 900 + HELD_MAX.as_nanos() as u64;
        assert!(
            !area.lends(1, SlotLock::Extend, extend, late),
            "the lender has stopped"
        );
        assert!(area.has_lent(1, SlotLock::Extend, extend));
        assert!(!lends(0, SlotLock::Extend, extend), "another slot");
        assert!(!lends(1, word(3), Holding(held.words[2])));
        assert!(!lends(1, word(2), Holding(held.words[2] + 1)));
        // Borrows parts, twice, as for a write that the kernel splits.
        for part in [Segments::of(0, 1 << 17), Segments::of(2 << 16, 1 << 17)] {
            let of = |n, held| lends(1, word(n), held);
            let taken = slot.take_range(part, DAEMON, of, |_| Kept::GiveUp);
            assert!(taken.is_all());
            assert!(slot.has_range_of(part, DAEMON) && !slot.has_range_of(part, CLIENT));
            assert!(slot.range_counts(segments).is_none());
            for (word, held) in taken.borrowed() {
                area.note_borrowed(1, word, held);
                assert!(!lent.was_borrowed_at_most(slot, word, 9), "not here");
            }
            slot.give_range_back(&taken, of);
            assert!(
                slot.range_counts(segments).is_none(),
                "the write is not over"
            );
        }
        assert!((0..3u64).all(|n| slot.holds(&held, n << 16)));
        let times = |word, times| lent.was_borrowed_at_most(slot, word, times);
        assert!(times(0, 1) && !times(0, 0) && times(1, 1) && times(2, 1) && !times(2, 0));
        let (mine, seized) = slot.seize(DAEMON, |held| lends(1, SlotLock::Extend, held));
        assert_eq!(seized, crate::slots::Seized::Lent(extend));
        assert!(!slot.is_extended_by(CLIENT));
        // The lender ends its loan while the daemon has the lock.
        lent.take_back(slot);
        assert!(slot.range_counts(segments).is_some() && slot.is_extended_by(DAEMON));
        slot.return_extend(mine, extend, |held| lends(1, SlotLock::Extend, held));
        assert!(slot.extend_lock().try_lock(8).is_some(), "nobody opened it");
    }

    #[test]
    fn an_earlier_loan_does_not_pass_for_the_next() {
        let (slots, area) = (
            Slots::create("test", 1).unwrap(),
            Area::create("test", 7).unwrap(),
        );
        let (slot, segments) = (slots.slot(0).unwrap(), Segments::of(0, 1 << 17));
        let lent = area.lent(area.take_block(4711, |_| false).0);
        let first = slot.lock_range(segments, CLIENT).unwrap();
        lent.lend(0, &first, None, 0);
        lent.take_back(slot);
        assert!(!area.has_lent(0, SlotLock::Word(0), Holding(first.words[0])));
        let second = slot.lock_range(segments, CLIENT).unwrap();
        assert!(
            !area.has_lent(0, SlotLock::Word(0), Holding(second.words[0])),
            "in use"
        );
        lent.lend(0, &second, None, 0);
        assert!(!area.has_lent(0, SlotLock::Word(0), Holding(first.words[0])));
        area.note_borrowed(0, 0, Holding(first.words[0]));
        assert!(lent.was_borrowed_at_most(slot, 0, 0), "not of this loan");
        assert!(area.has_lent(0, SlotLock::Word(0), Holding(second.words[0])));
        lent.take_back(slot);
    }
}
