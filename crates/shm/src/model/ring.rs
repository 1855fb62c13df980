//! The report ring, the report words, and the doorbell.

use loom::sync::Mutex;
use loom::thread;

use super::*;
use crate::reports::{Draining, Reports};
use crate::ring::{Ring, RingReader};
use crate::sync::AtomicU32;

/// The client's owner number, and its number of threads.
const OWNER: u16 = 5;
const THREADS: u64 = 2;

/// A client with a ring of `N` keys, the words of all clients, the dirty pages, and those that the daemon knows to be dirty.
struct Volume<const N: usize> {
    given_out: AtomicU64,
    done: AtomicU64,
    taken: AtomicU64,
    words: [AtomicU64; N],
    reported: [AtomicU64; 1],
    armed: AtomicU32,
    doorbell: AtomicU32,
    dirty: [AtomicU32; 4],
    reader: Mutex<RingReader>,
    draining: Draining<1>,
    known: [AtomicU32; 4],
}

impl<const N: usize> Volume<N> {
    fn new(given_out: u64) -> Arc<Volume<N>> {
        Arc::new(Volume {
            given_out: AtomicU64::new(given_out),
            done: AtomicU64::new(given_out),
            taken: AtomicU64::new(given_out),
            words: std::array::from_fn(|_| AtomicU64::new(0)),
            reported: [AtomicU64::new(0)],
            armed: AtomicU32::new(0),
            doorbell: AtomicU32::new(0),
            dirty: std::array::from_fn(|_| AtomicU32::new(0)),
            reader: Mutex::new(RingReader::from(given_out)),
            draining: Draining::default(),
            known: std::array::from_fn(|_| AtomicU32::new(0)),
        })
    }

    fn ring(&self) -> Ring<'_, N> {
        Ring {
            threads: THREADS,
            given_out: &self.given_out,
            done: &self.done,
            taken: &self.taken,
            words: &self.words,
        }
    }

    fn reports(&self) -> Reports<'_, 1> {
        Reports {
            words: &self.reported,
            armed: &self.armed,
        }
    }

    /// Makes a page dirty and reports it, as a client does between the release of the latch and the end of the write. Returns
    /// false and writes nothing when the ring has no room.
    fn write(&self, page: u64) -> bool {
        let room = self.ring().has_room();
        if room {
            self.dirty[page as usize].store(1, Ordering::Release);
            if self.ring().report(key(page), OWNER, self.reports()) {
                self.doorbell.fetch_add(1, Ordering::SeqCst);
            }
        }
        room
    }

    /// Drains the ring as the daemon does. Returns whether it held a report.
    fn drain(&self) -> bool {
        let mut any = false;
        for owner in self.reports().owners(&self.draining) {
            assert_eq!(owner, OWNER);
            let mut reader = self.reader.lock().unwrap();
            self.reports().begin(&self.draining, owner);
            reader.drain_ring(&self.ring(), |key| {
                // The thread that takes a key also checks the key's page.
                let page = key.page() as usize;
                assert_eq!(self.dirty[page].load(Ordering::Acquire), 1);
                self.known[page].store(1, Ordering::Relaxed);
                any = true;
            });
            self.reports().end(&self.draining, owner);
        }
        any
    }

    fn knows(&self, page: u64) -> bool {
        self.known[page as usize].load(Ordering::Relaxed) == 1
    }
}

#[test]
fn no_key_is_lost_between_writers_and_the_daemon() {
    explore(["0", "1", "2"], |notes| {
        let volume = Volume::<8>::new(1);
        // With this report, the daemon also reads the ring while the other threads are between their steps.
        assert!(volume.write(2));
        let writers = [0, 1].map(|page| {
            let volume = volume.clone();
            thread::spawn(move || assert!(volume.write(page)))
        });
        volume.drain();
        notes.add([0, 1].iter().filter(|page| volume.knows(**page)).count());
        join(writers);
        volume.drain();
        assert!((0..3).all(|page| volume.knows(page)));
    });
}

#[test]
fn a_thread_that_asks_knows_all_earlier_reports() {
    explore(["false", "true"], |notes| {
        let volume = Volume::<8>::new(1);
        let threads = [0, 1].map(|page| {
            let volume = volume.clone();
            thread::spawn(move || {
                assert!(volume.write(page));
                // Another thread of the daemon may be draining while the same program makes a request.
                let drained = volume.drain();
                assert!(volume.knows(page));
                drained
            })
        });
        for drained in join(threads) {
            notes.add(drained);
        }
    });
}

#[test]
fn a_ring_never_gets_more_keys_than_it_has_room_for() {
    // The outcomes count the pages that go through the kernel.
    explore(["1", "2"], |notes| {
        let volume = Volume::<3>::new(0);
        let writers = [[0, 1], [2, 3]].map(|pages| {
            let volume = volume.clone();
            thread::spawn(move || pages.map(|page| volume.write(page)))
        });
        let wrote = join(writers);
        volume.drain();
        let wrote = wrote.as_flattened();
        for (page, wrote) in wrote.iter().enumerate() {
            assert_eq!(volume.knows(page as u64), *wrote, "page {page}");
        }
        notes.add(wrote.iter().filter(|wrote| !**wrote).count());
    });
}

#[test]
fn a_writer_delayed_for_a_whole_ring_is_not_forgotten() {
    explore(["0", "1", "2"], |notes| {
        let volume = Volume::<2>::new(0);
        let held = thread::spawn({
            let volume = volume.clone();
            move || volume.write(0)
        });
        let others = thread::spawn({
            let volume = volume.clone();
            move || {
                let first = volume.write(1);
                // This drain makes room, unless a thread holds it up.
                volume.drain();
                [first, volume.write(2)]
            }
        });
        let held = held.join().unwrap();
        let others = others.join().unwrap();
        volume.drain();
        let wrote = [held, others[0], others[1]];
        for (page, wrote) in wrote.into_iter().enumerate() {
            assert_eq!(volume.knows(page as u64), wrote, "page {page}");
        }
        notes.add(wrote.into_iter().filter(|wrote| !wrote).count());
    });
}

#[test]
fn the_daemon_never_sleeps_over_a_key() {
    explore(["asleep", "rung"], |notes| {
        // The writers get positions 1 and 2, at which they ring only if the doorbell is armed.
        let volume = Volume::<16>::new(1);
        let writers = [0, 1].map(|page| {
            let volume = volume.clone();
            thread::spawn(move || assert!(volume.write(page)))
        });
        let seen = loop {
            let seen = volume.doorbell.load(Ordering::SeqCst);
            let mut busy = volume.drain();
            if !busy {
                volume.reports().arm_doorbell(true);
                busy = volume.drain();
            }
            if !busy {
                break seen;
            }
        };
        join(writers);
        // The kernel compares the word with `seen` when the daemon goes to sleep. A thread that changes the word later wakes the
        // daemon. So the daemon sleeps on exactly if the word is unchanged in the end.
        let rung = volume.doorbell.load(Ordering::SeqCst) != seen;
        let known = volume.knows(0) && volume.knows(1);
        assert!(rung || known, "the daemon sleeps and a key is unread");
        notes.add(Word(if rung { "rung" } else { "asleep" }));
    });
}
