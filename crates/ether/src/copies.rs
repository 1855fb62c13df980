//! Copies of payloads that threads make without the lock of the protocol.
//!
//! A copy may be late: its thread is preempted, and meanwhile the request is repeated, or its pages belong to another one. So a thread that copies to the same bytes later waits for
//! the earlier copies.

use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes that a thread copies while it has the lock. It releases the lock to copy more.
pub(crate) const COPIED_LOCKED: usize = 16 << 10;

/// Bytes in some memory: its number, and their range.
pub(crate) type Bytes = (u64, Range<usize>);

/// The copies in progress, by the order in which they began. Behind the lock of the protocol.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    batches: BTreeMap<u64, Vec<Bytes>>,
    begun: u64,
}

impl Copies {
    /// Notes copies that a thread is about to make together, without the lock: returns their number. Returns `None` if the thread makes them with the lock, because
    /// they are few, and no copy to the same bytes is in progress.
    pub fn begin(&mut self, copies: Vec<Bytes>) -> Option<u64> {
        let bytes: usize = copies.iter().map(|(_, range)| range.len()).sum();
        let number = self.begun + 1;
        if bytes <= COPIED_LOCKED && !self.overlap_before(number, &copies) {
            return None;
        }
        self.begun = number;
        self.batches.insert(number, copies);
        Some(number)
    }

    /// Returns whether copies to the same bytes that began earlier are in progress.
    pub fn must_wait(&self, number: u64) -> bool {
        let copies = self.batches.get(&number);
        copies.is_some_and(|copies| self.overlap_before(number, copies))
    }

    /// Notes that copies have ended.
    pub fn end(&mut self, number: u64) {
        self.batches.remove(&number);
    }

    fn overlap_before(&self, number: u64, copies: &[Bytes]) -> bool {
        let earlier = || self.batches.range(..number).flat_map(|(_, batch)| batch);
        let overlaps = |(memory, bytes): &Bytes| {
            earlier().any(|(other, range)| {
                other == memory && range.start < bytes.end && bytes.start < range.end
            })
        };
        copies.iter().any(overlaps)
    }
}

/// Waits until the earlier copies to the bytes of the copies with a number have ended. Their threads need the lock of the protocol to note that. `core` has
/// this lock, and `lock` acquires it.
pub(crate) fn await_turn<G>(
    mut core: G,
    number: u64,
    copies: impl Fn(&G) -> &Copies,
    lock: impl Fn() -> G,
) -> G {
    while copies(&core).must_wait(number) {
        drop(core);
        std::thread::yield_now();
        core = lock();
    }
    core
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use jericho_sys::memory::Mapping;

    use super::*;
    use crate::lock::TimedLock;

    const MANY: usize = COPIED_LOCKED + 1;

    /// Memory into which threads copy, as those that receive frames do.
    struct Bed {
        copies: TimedLock<Copies>,
        memory: Mapping,
        /// Threads that were late, or have looked whether they may copy.
        looks: AtomicUsize,
        copied: AtomicUsize,
    }

    impl Bed {
        fn new() -> Bed {
            Bed {
                copies: TimedLock::default(),
                memory: Mapping::create("copies", 4 * MANY, false).unwrap(),
                looks: AtomicUsize::new(0),
                copied: AtomicUsize::new(0),
            }
        }

        /// Copies a byte to a range, in two parts with something between them. `begun` is called when the order of this copy is certain. Returns what the range has before others know that the copy has ended.
        fn copy(
            &self,
            range: Range<usize>,
            byte: u8,
            begun: impl FnOnce(),
            between: impl FnOnce(),
        ) -> Vec<u8> {
            let mut copies = self.copies.lock();
            let number = copies.begin(vec![(1, range.clone())]).unwrap();
            begun();
            let again = || {
                self.looks.fetch_add(1, Ordering::Relaxed);
                self.copies.lock()
            };
            copies = await_turn(copies, number, |copies| copies, again);
            drop(copies);
            let middle = range.start + range.len() / 2;
            self.memory
                .copy_in(range.start, &vec![byte; middle - range.start]);
            between();
            self.memory.copy_in(middle, &vec![byte; range.end - middle]);
            let mut has = vec![0; range.len()];
            self.memory.copy_out(range.start, &mut has);
            self.copied.fetch_add(1, Ordering::Relaxed);
            self.copies.lock().end(number);
            has
        }
    }

    /// The first request is repeated, or has given its pages up, while its thread is preempted in the middle of the copy.
    #[test]
    fn a_copy_that_is_late_changes_no_bytes_of_the_next_request() {
        let bed = Bed::new();
        std::thread::scope(|scope| {
            let (begun, has_begun) = std::sync::mpsc::channel();
            let first = scope.spawn({
                let bed = &bed;
                move || {
                    // It goes on when the other thread waits for it, or does not.
                    let late = || {
                        while bed.looks.load(Ordering::Relaxed) < 3
                            && bed.copied.load(Ordering::Relaxed) == 0
                        {
                            std::thread::yield_now();
                        }
                    };
                    bed.copy(0..2 * MANY, 1, || begun.send(()).unwrap(), late)
                }
            });
            has_begun.recv().unwrap();
            bed.copy(MANY..3 * MANY, 2, || (), || ());
            first.join().unwrap();
        });
        let mut bytes = vec![0; 4 * MANY];
        bed.memory.copy_out(0, &mut bytes);
        assert!(bytes[..MANY].iter().all(|byte| *byte == 1));
        assert!(bytes[MANY..3 * MANY].iter().all(|byte| *byte == 2));
    }

    #[test]
    fn threads_that_copy_to_pages_that_change_hands_never_mix_their_bytes() {
        let bed = Bed::new();
        std::thread::scope(|scope| {
            for thread in 0..2_u64 {
                let bed = &bed;
                scope.spawn(move || {
                    let mut random = jericho_sim::Random::new(thread);
                    for round in 0..500_u64 {
                        let begin = random.below(2 * MANY as u64) as usize;
                        let byte = (2 * round + thread) as u8;
                        let has =
                            bed.copy(begin..begin + MANY, byte, || (), std::thread::yield_now);
                        assert!(has.iter().all(|other| *other == byte), "round {round}");
                    }
                });
            }
        });
    }

    #[test]
    fn a_later_copy_to_the_same_bytes_waits_for_the_earlier_one() {
        let mut copies = Copies::default();
        let first = copies.begin(vec![(1, 0..10), (2, 20..20 + MANY)]).unwrap();
        assert!(!copies.must_wait(first));
        let second = copies.begin(vec![(2, 29..40)]).unwrap();
        assert!(copies.must_wait(second) && !copies.must_wait(first));
        // Beside the bytes, and in other memory.
        assert_eq!(
            copies.begin(vec![(2, 0..20), (2, 20 + MANY..30 + MANY)]),
            None
        );
        assert_eq!(copies.begin(vec![(1, 20..30)]), None);
        copies.end(first);
        assert!(!copies.must_wait(second));
        assert!(copies.begin(vec![(2, 0..30)]).is_some());
    }

    #[test]
    fn a_few_bytes_are_copied_with_the_lock_and_many_without() {
        let mut copies = Copies::default();
        assert_eq!(copies.begin(vec![(1, 0..COPIED_LOCKED)]), None);
        assert!(copies.begin(vec![(1, 0..MANY)]).is_some());
    }
}
