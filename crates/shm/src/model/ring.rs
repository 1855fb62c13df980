//! The ring of announcements and the bell.

use loom::thread;

use super::*;
use crate::ring::{Ring, RingReader};
use crate::sync::AtomicU32;

/// A ring of `N` keys with the bell of the slots segment and pages that are dirty.
struct Client<const N: usize> {
    wanted: AtomicU32,
    overflow: AtomicU32,
    given_out: AtomicU64,
    done: AtomicU64,
    words: [AtomicU64; N],
    bell: AtomicU32,
    dirty: [AtomicU32; 4],
}

impl<const N: usize> Client<N> {
    fn new(given_out: u64) -> Arc<Client<N>> {
        Arc::new(Client {
            wanted: AtomicU32::new(0),
            overflow: AtomicU32::new(0),
            given_out: AtomicU64::new(given_out),
            done: AtomicU64::new(given_out),
            words: std::array::from_fn(|_| AtomicU64::new(0)),
            bell: AtomicU32::new(0),
            dirty: std::array::from_fn(|_| AtomicU32::new(0)),
        })
    }

    fn ring(&self) -> Ring<'_, N> {
        Ring {
            wanted: &self.wanted,
            overflow: &self.overflow,
            given_out: &self.given_out,
            done: &self.done,
            words: &self.words,
        }
    }

    /// A writer has given a latch back, and says so before it acknowledges.
    fn write(&self, page: u64) {
        self.dirty[page as usize].store(1, Ordering::Release);
        if self.ring().announce(key(page)) {
            self.bell.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// What the daemon knows.
struct Daemon {
    reader: RingReader,
    known: BTreeSet<u64>,
    scans: usize,
}

impl Daemon {
    fn of(given_out: u64) -> Daemon {
        Daemon {
            reader: RingReader::from(given_out),
            known: BTreeSet::new(),
            scans: 0,
        }
    }

    /// As the daemon takes announcements in. True: there were some.
    fn drain<const N: usize>(&mut self, client: &Client<N>) -> bool {
        let (known, mut heard) = (&mut self.known, false);
        let complete = self.reader.drain_ring(&client.ring(), |key| {
            // Whoever takes a key in looks at its page.
            assert_eq!(client.dirty[key.page() as usize].load(Ordering::Acquire), 1);
            known.insert(key.page());
            heard = true;
        });
        if !complete {
            self.scans += 1;
            let dirty = |page: &u64| client.dirty[*page as usize].load(Ordering::Acquire) == 1;
            known.extend((0..4).filter(dirty));
        }
        heard || !complete
    }
}

#[test]
fn no_key_is_lost_between_writers_and_the_daemon() {
    explore(["0"], |notes| {
        let client = Client::<8>::new(1);
        let writers = [0, 1].map(|page| {
            let client = client.clone();
            thread::spawn(move || client.write(page))
        });
        let mut daemon = Daemon::of(1);
        daemon.drain(&client);
        daemon.drain(&client);
        join(writers);
        daemon.drain(&client);
        assert_eq!(daemon.known, BTreeSet::from([0, 1]));
        notes.add(daemon.scans);
    });
}

#[test]
fn a_key_that_found_no_room_makes_the_daemon_look_through_the_tables() {
    explore(["0", "1", "2"], |notes| {
        let client = Client::<2>::new(0);
        let writers = [[0, 1], [2, 3]].map(|pages| {
            let client = client.clone();
            thread::spawn(move || pages.map(|page| client.write(page)))
        });
        let mut daemon = Daemon::of(0);
        daemon.drain(&client);
        join(writers);
        daemon.drain(&client);
        assert_eq!(daemon.known, BTreeSet::from([0, 1, 2, 3]));
        notes.add(daemon.scans);
    });
}

#[test]
fn two_keys_that_found_no_room_are_two_reasons_to_look() {
    explore(["0", "1", "2"], |notes| {
        let client = Client::<2>::new(2);
        // Keys lie in it that the daemon has not come to take.
        for page in [2, 3] {
            client.dirty[page].store(1, Ordering::Relaxed);
            client.words[page - 2].store(key(page as u64).0, Ordering::Relaxed);
        }
        let writers = [0, 1].map(|page| {
            let client = client.clone();
            thread::spawn(move || client.write(page))
        });
        let mut daemon = Daemon::of(2);
        daemon.drain(&client);
        join(writers);
        daemon.drain(&client);
        assert!(daemon.known.contains(&0) && daemon.known.contains(&1));
        notes.add(daemon.scans);
    });
}

#[test]
fn a_writer_held_up_for_a_turn_of_the_ring_is_not_forgotten() {
    explore(["0", "1"], |notes| {
        let client = Client::<2>::new(0);
        let held = thread::spawn({
            let client = client.clone();
            move || client.write(0)
        });
        let others = thread::spawn({
            let client = client.clone();
            move || [1, 2].map(|page| client.write(page))
        });
        let mut daemon = Daemon::of(0);
        daemon.drain(&client);
        daemon.drain(&client);
        held.join().unwrap();
        others.join().unwrap();
        daemon.drain(&client);
        assert_eq!(daemon.known, BTreeSet::from([0, 1, 2]));
        notes.add(daemon.scans);
    });
}

#[test]
fn the_daemon_never_sleeps_over_a_key() {
    explore(["asleep", "rung"], |notes| {
        // No position at which a writer rings unasked.
        let client = Client::<16>::new(1);
        let writers = [0, 1].map(|page| {
            let client = client.clone();
            thread::spawn(move || client.write(page))
        });
        let mut daemon = Daemon::of(1);
        let seen = loop {
            let seen = client.bell.load(Ordering::SeqCst);
            let mut busy = daemon.drain(&client);
            if !busy {
                client.ring().want_bell(true);
                busy = daemon.drain(&client);
            }
            if !busy {
                break seen;
            }
        };
        join(writers);
        // The kernel compares the word with `seen` when the daemon goes to sleep and whoever changes it later wakes
        // it: so it sleeps on exactly if the word is the same in the end.
        let rung = client.bell.load(Ordering::SeqCst) != seen;
        assert!(
            rung || daemon.known == BTreeSet::from([0, 1]),
            "asleep with {:?}",
            daemon.known
        );
        notes.add(Word(if rung { "rung" } else { "asleep" }));
    });
}
