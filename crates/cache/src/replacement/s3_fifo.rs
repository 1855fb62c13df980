//! S3-FIFO, a kind that resists scans: pages that are used once leave soon and do not displace pages that are used again.
//!
//! ```text
//!     page ──▶ small queue ── used again ──▶ main queue ◀─┐ used again
//!                  │ not used                    │ ───────┘
//!                  ▼                             ▼ not used
//!               evicted, its key                evicted
//!               goes to the ghost
//!               queue
//! ```
//!
//! A page whose key is in the ghost queue enters the main queue at once. The ghost queue remembers nine tenths as many keys as the
//! slice has frames.
//!
//! The target length of the small queue adapts. A page that comes back soon after it left the small queue would still be there
//! if the small queue were longer, so the target grows. A page that comes back soon after it left the main queue asks for a
//! longer main queue, so the target shrinks. A second, short ghost queue remembers the keys that left the main queue.
//!
//! A page in the small queue counts as used again when the epoch of its last use is at least two later than the epoch in which it
//! entered. So uses shortly after the entry do not count: a program that reads a page in small pieces uses it once. A page that
//! was read ahead also counts as used once, if the read-ahead window is at most a sixteenth of the slice. A page in the main queue
//! counts as used again when the epoch of its last use has changed since the page was put there.
//!
//! The queues are lists that are linked by entry numbers: a page that was dropped is unlinked at once. The lists take ten bytes
//! for each entry of the table, which is 15 for each frame. The ghost queues take 5 for each frame.

use jericho_shm::Key;

use super::ghost::{Ghost, TICKS};
use super::kind::{Replacement, Residents, VICTIMS_AT_ONCE, VISITED_AT_ONCE};

/// A page comes back *soon* when it was in the ghost queue for less than this.
const SOON_TICKS: u32 = TICKS / 8;
/// Pages by which the small queue's target grows and shrinks.
const GROWTH: u32 = 2;
const SHRINKAGE: u32 = 4;

/// Epochs from a page's entry into the small queue to a use that counts.
const LATER: u8 = 2;

/// No entry.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, PartialEq, Eq)]
enum QueueOfEntry {
    Unlinked,
    Small,
    Main,
}

#[derive(Clone, Copy)]
struct EntryLinks {
    /// The entry that entered the queue after this one.
    newer: u32,
    /// The entry that entered the queue before this one.
    older: u32,
}

/// The ends and the length of a queue.
struct EntryList {
    newest: u32,
    oldest: u32,
    len: u32,
}

/// The state of S3-FIFO.
pub struct S3Fifo {
    /// Links of each entry.
    links: Vec<EntryLinks>,
    /// Queue of each entry.
    queues: Vec<QueueOfEntry>,
    /// Epoch of the last use of each entry's page when it entered its queue.
    entered: Vec<u8>,
    small: EntryList,
    main: EntryList,
    /// Keys of pages that left the small queue.
    ghost: Ghost,
    /// Keys of pages that left the main queue. A key is kept only while a return of its page counts as soon (`SOON_TICKS`).
    main_ghost: Ghost,
    /// Length that the small queue is to have: between a hundredth and nine tenths of the frames.
    small_target: u32,
    frames: u32,
    /// Entries of each queue that the round may still visit.
    small_left: u32,
    main_left: u32,
}

impl S3Fifo {
    /// Creates the state for a table of `entries` entries and a slice of `frames` frames.
    pub fn new(entries: u32, frames: u32) -> S3Fifo {
        let list = || EntryList {
            newest: NONE,
            oldest: NONE,
            len: 0,
        };
        let unlinked = EntryLinks {
            newer: NONE,
            older: NONE,
        };
        let remembered = frames - frames / 10;
        S3Fifo {
            links: vec![unlinked; entries as usize],
            queues: vec![QueueOfEntry::Unlinked; entries as usize],
            entered: vec![0; entries as usize],
            small: list(),
            main: list(),
            ghost: Ghost::new(remembered),
            main_ghost: Ghost::new(remembered / TICKS * SOON_TICKS),
            small_target: frames / 2,
            frames,
            small_left: 0,
            main_left: 0,
        }
    }

    fn list(&mut self, queue: QueueOfEntry) -> Option<&mut EntryList> {
        match queue {
            QueueOfEntry::Unlinked => None,
            QueueOfEntry::Small => Some(&mut self.small),
            QueueOfEntry::Main => Some(&mut self.main),
        }
    }

    /// Takes an entry out of its queue.
    fn unlink(&mut self, entry: u32) {
        let EntryLinks { newer, older } = self.links[entry as usize];
        let queue = std::mem::replace(&mut self.queues[entry as usize], QueueOfEntry::Unlinked);
        let Some(list) = self.list(queue) else {
            return;
        };
        list.len -= 1;
        if list.newest == entry {
            list.newest = older;
        }
        if list.oldest == entry {
            list.oldest = newer;
        }
        if newer != NONE {
            self.links[newer as usize].older = older;
        }
        if older != NONE {
            self.links[older as usize].newer = newer;
        }
    }

    /// Puts an entry that is in no queue at the new end of one.
    fn link(&mut self, entry: u32, queue: QueueOfEntry) {
        self.queues[entry as usize] = queue;
        let Some(list) = self.list(queue) else {
            return;
        };
        let older = std::mem::replace(&mut list.newest, entry);
        list.len += 1;
        if list.oldest == NONE {
            list.oldest = entry;
        }
        self.links[entry as usize] = EntryLinks { newer: NONE, older };
        if older != NONE {
            self.links[older as usize].newer = entry;
        }
    }

    /// Returns the oldest entry of the queue that the round visits next, or `None` at the end of the round.
    fn next(&mut self) -> Option<(u32, QueueOfEntry)> {
        let is_small = self.small_left > 0 && self.small.len > 0;
        let is_main = self.main_left > 0 && self.main.len > 0;
        if is_small && (self.small.len > self.small_target || !is_main) {
            self.small_left -= 1;
            Some((self.small.oldest, QueueOfEntry::Small))
        } else if is_main {
            self.main_left -= 1;
            Some((self.main.oldest, QueueOfEntry::Main))
        } else {
            None
        }
    }
}

impl<R: Residents> Replacement<R> for S3Fifo {
    fn filled(&mut self, residents: &R, entry: u32, key: Key) {
        self.unlink(entry);
        self.entered[entry as usize] = residents.last_use(entry);
        let absence = self.ghost.take(key);
        if absence.is_some_and(|ticks| ticks < SOON_TICKS) {
            let longest = self.frames - self.frames / 10;
            self.small_target = (self.small_target + GROWTH).min(longest);
        }
        if self.main_ghost.take(key).is_some() {
            let shorter = self.small_target.saturating_sub(SHRINKAGE);
            self.small_target = shorter.max(self.frames / 100);
        }
        let queue = match absence {
            Some(_) => QueueOfEntry::Main,
            None => QueueOfEntry::Small,
        };
        self.link(entry, queue);
    }

    fn removed(&mut self, entry: u32, key: Key, evicted: bool) {
        match self.queues[entry as usize] {
            QueueOfEntry::Small if evicted => self.ghost.add(key),
            QueueOfEntry::Main if evicted => self.main_ghost.add(key),
            _ => {}
        }
        self.unlink(entry);
    }

    fn begin(&mut self, _: &R, _: u32, _: u32) {
        // A round may visit a page of the main queue twice: the first visit records its last use in `entered`, the second names it.
        self.small_left = self.small.len;
        self.main_left = 2 * (self.small.len + self.main.len);
    }

    fn choose(&mut self, residents: &R, victims: &mut Vec<(u32, R::Seen)>) -> bool {
        for _ in 0..VISITED_AT_ONCE {
            let Some((entry, queue)) = self.next() else {
                return false;
            };
            let last_use = residents.last_use(entry);
            let later = last_use.wrapping_sub(self.entered[entry as usize]);
            let is_used = later
                >= if queue == QueueOfEntry::Small {
                    LATER
                } else {
                    1
                };
            let idle = residents.idle(entry);
            self.unlink(entry);
            if idle.is_some() && is_used {
                self.entered[entry as usize] = last_use;
                self.link(entry, QueueOfEntry::Main);
                continue;
            }
            // A page that cannot leave now waits for another pass of its queue. A victim does, too, unless it is removed.
            self.link(entry, queue);
            if let Some(seen) = idle {
                victims.push((entry, seen));
                if victims.len() == VICTIMS_AT_ONCE {
                    break;
                }
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use jericho_shm::Key;

    use super::{QueueOfEntry, S3Fifo};
    use crate::replacement::{Replacement, Residents};

    const ENTRIES: u32 = 1536;
    const FRAMES: u32 = 1024;

    /// A table in which entry n holds page n of one object.
    struct TestTable {
        idle: Vec<Cell<bool>>,
        last_use: Vec<Cell<u8>>,
        epoch: Cell<u8>,
    }

    impl Residents for TestTable {
        type Seen = ();
        fn entries(&self) -> u32 {
            ENTRIES
        }
        fn epoch(&self) -> u8 {
            self.epoch.get()
        }
        fn idle(&self, entry: u32) -> Option<()> {
            self.idle[entry as usize].get().then_some(())
        }
        fn last_use(&self, entry: u32) -> u8 {
            self.last_use[entry as usize].get()
        }
        fn set_last_use(&self, entry: u32, epoch: u8) {
            self.last_use[entry as usize].set(epoch);
        }
    }

    fn key(entry: u32) -> Key {
        Key::new(1, u64::from(entry))
    }

    /// Returns a table and a queue of the pages 0..filled.
    fn filled(filled: u32) -> (TestTable, S3Fifo) {
        let table = TestTable {
            idle: vec![Cell::new(true); ENTRIES as usize],
            last_use: vec![Cell::new(0); ENTRIES as usize],
            epoch: Cell::new(0),
        };
        let mut kind = S3Fifo::new(ENTRIES, FRAMES);
        for entry in 0..filled {
            kind.filled(&table, entry, key(entry));
        }
        (table, kind)
    }

    /// Runs a round and returns its victims. The slice removes all of them.
    fn round(kind: &mut S3Fifo, table: &TestTable, wanted: usize) -> Vec<u32> {
        let (mut chosen, mut victims) = (vec![], vec![]);
        kind.begin(table, wanted as u32, kind.small.len + kind.main.len);
        loop {
            let more = kind.choose(table, &mut victims);
            for (entry, ()) in victims.drain(..) {
                Replacement::<TestTable>::removed(kind, entry, key(entry), true);
                chosen.push(entry);
            }
            if chosen.len() >= wanted || !more {
                return chosen;
            }
        }
    }

    #[test]
    fn pages_leave_in_the_order_of_their_entry_except_those_used_much_later() {
        let (table, mut kind) = filled(FRAMES);
        table.set_last_use(3, 1); // soon after its entry
        table.set_last_use(5, 2);
        assert_eq!(round(&mut kind, &table, 32)[..6], [0, 1, 2, 3, 4, 6]);
        assert!(kind.queues[5] == QueueOfEntry::Main);
    }

    #[test]
    fn a_page_that_comes_back_enters_the_main_queue() {
        let (table, mut kind) = filled(FRAMES);
        let gone = round(&mut kind, &table, 32);
        let target = kind.small_target;
        kind.filled(&table, gone[0], key(gone[0]));
        assert!(kind.queues[gone[0] as usize] == QueueOfEntry::Main);
        assert!(kind.small_target > target, "the page came back soon");
        let dropped = gone[1];
        kind.filled(&table, dropped, key(1_000_000));
        Replacement::<TestTable>::removed(&mut kind, dropped, key(1_000_000), false);
        kind.filled(&table, dropped, key(1_000_000));
        assert!(kind.queues[dropped as usize] == QueueOfEntry::Small);
    }

    #[test]
    fn a_page_that_comes_back_soon_after_it_left_the_main_queue_makes_that_queue_longer() {
        let (table, mut kind) = filled(100);
        (0..100).for_each(|entry| table.set_last_use(entry, 2));
        let gone = round(&mut kind, &table, 32);
        assert_eq!(
            gone[0], 0,
            "used once, but not since it entered the main queue"
        );
        let target = kind.small_target;
        kind.filled(&table, 0, key(0));
        assert!(kind.small_target < target);
        assert!(kind.queues[0] == QueueOfEntry::Small);
    }

    #[test]
    fn pages_that_cannot_leave_are_passed_and_a_round_ends() {
        let (table, mut kind) = filled(FRAMES);
        table.idle[..1000].iter().for_each(|idle| idle.set(false));
        let left: Vec<u32> = (1000..FRAMES).collect();
        assert_eq!(round(&mut kind, &table, 100), left);
        assert_eq!(round(&mut kind, &table, 1), []);
        table.idle.iter().for_each(|idle| idle.set(true));
        assert_eq!(round(&mut kind, &table, 1000).len(), 1000);
        assert_eq!((kind.small.len, kind.main.len), (0, 0));
    }

    #[test]
    fn an_entry_may_be_filled_and_removed_in_any_order() {
        let (table, mut kind) = filled(0);
        let mut random = 1u64;
        for _ in 0..100_000 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let entry = (random >> 33) as u32 % 50;
            match random >> 61 {
                0..3 => kind.filled(&table, entry, key(entry)),
                3..5 => Replacement::<TestTable>::removed(&mut kind, entry, key(entry), false),
                5 => table.set_last_use(entry, (random >> 40) as u8),
                6 => table.idle[entry as usize].set(!table.idle[entry as usize].get()),
                _ => drop(round(&mut kind, &table, 3)),
            }
            let count = |queue| kind.queues.iter().filter(|q| **q == queue).count() as u32;
            if random >> 50 & 63 == 0 {
                assert_eq!(kind.small.len, count(QueueOfEntry::Small));
                assert_eq!(kind.main.len, count(QueueOfEntry::Main));
            }
        }
    }

    #[test]
    fn a_frame_costs_at_most_21_bytes() {
        let entry = size_of::<super::EntryLinks>() + size_of::<QueueOfEntry>() + size_of::<u8>();
        let (_, kind) = filled(0);
        let ghosts = kind.ghost.bytes() + kind.main_ghost.bytes();
        let all = entry * ENTRIES as usize + ghosts;
        assert!(all <= 21 * FRAMES as usize, "{all} bytes");
    }
}
