//! Writers that ask the daemon to reserve pages beyond the end of a file.

use loom::thread;

use super::*;
use crate::ahead::Ahead;

/// The hints, and the daemon's counts: pages reserved, and requests.
struct File {
    ahead: Ahead,
    reserved: AtomicU64,
    asked: AtomicU64,
}

impl File {
    fn new() -> Arc<File> {
        Arc::new(File {
            ahead: Ahead::new(),
            reserved: AtomicU64::new(0),
            asked: AtomicU64::new(0),
        })
    }

    /// Writes a page beyond the end, as a client does that finds no page there and asks the daemon to reserve some. Returns false
    /// when the write went through the kernel.
    fn append(&self, owner: u16, page: u64) -> bool {
        for _ in 0..2 {
            if self.has(page) {
                return true;
            }
            let held = self.ahead.begin_asking(owner);
            if !self.has(page) {
                self.asked.fetch_add(1, Ordering::Relaxed);
                // Relaxed: the daemon's answer orders this store for the client that asks, and for no other client.
                self.reserved.store(page + 2, Ordering::Relaxed);
                self.ahead.tell(page + 2, 2);
            }
            self.ahead.end_asking(held);
        }
        self.has(page)
    }

    fn has(&self, page: u64) -> bool {
        self.reserved.load(Ordering::Relaxed) > page
    }
}

#[test]
fn one_of_the_writers_that_claim_the_same_pages_asks_for_them() {
    explore(["[false, true]", "[true, false]"], |notes| {
        let file = File::new();
        file.ahead.tell(4, 4);
        let writers = [8, 12].map(|to| {
            let file = file.clone();
            thread::spawn(move || file.ahead.claim(4, to))
        });
        let claimed = join(writers);
        let to = file.ahead.to();
        assert_eq!(to, if claimed[0] { 8 } else { 12 });
        notes.add(claimed);
    });
}

#[test]
fn writers_that_find_no_page_get_one_and_ask_one_after_the_other() {
    // Two writers ask when one takes the lock over from the other, which it does after one poll in the model.
    explore(["1", "2"], |notes| {
        let file = File::new();
        let writers = [2, 3].map(|owner| {
            let file = file.clone();
            thread::spawn(move || file.append(owner, 0))
        });
        assert_eq!(join(writers), [true, true]);
        assert!(file.ahead.lock().try_lock(4).is_some(), "free in the end");
        notes.add(file.asked.load(Ordering::Relaxed));
    });
}

#[test]
fn a_writer_that_waits_for_an_answer_finds_its_pages() {
    explore(["1"], |notes| {
        let file = File::new();
        let held = file.ahead.begin_asking(2);
        file.asked.fetch_add(1, Ordering::Relaxed);
        let waiter = thread::spawn({
            let file = file.clone();
            // Does as `begin_asking`, with a patience that does not end.
            move || {
                let held = loop {
                    match file.ahead.lock().try_lock(3) {
                        Some(held) => break held,
                        None => thread::yield_now(),
                    }
                };
                let has = file.has(0);
                file.ahead.end_asking(held);
                has
            }
        });
        file.reserved.store(2, Ordering::Relaxed);
        file.ahead.end_asking(held);
        assert!(
            waiter.join().unwrap(),
            "the waiter would ask for the same pages"
        );
        notes.add(file.asked.load(Ordering::Relaxed));
    });
}

#[test]
fn a_writer_that_lost_the_lock_while_it_asked_does_not_open_it() {
    explore(["false", "true"], |notes| {
        let file = File::new();
        let held = file.ahead.begin_asking(2);
        let next = thread::spawn({
            let file = file.clone();
            // Waits no longer for the first writer, or finds that it has ended.
            move || {
                let held = file.ahead.begin_asking(3);
                assert!(file.ahead.lock().unlock(held), "the first one opened it");
            }
        });
        notes.add(file.ahead.lock().unlock(held));
        next.join().unwrap();
        assert!(file.ahead.lock().try_lock(4).is_some(), "free in the end");
    });
}
