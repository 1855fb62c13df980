//! Writers that have pages reserved behind the end of a file.

use loom::thread;

use super::*;
use crate::ahead::Ahead;

/// The hints, and the daemon's part: how many pages are reserved, how often it was asked, and how many it reserved twice.
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

    /// Writes a page behind the end, as a client that finds none there and has some reserved. Returns false when it went through
    /// the kernel.
    fn append(&self, owner: u16, page: u64) -> bool {
        for _ in 0..2 {
            if self.has(page) {
                return true;
            }
            let held = self.ahead.begin_asking(owner);
            if !self.has(page) {
                self.asked.fetch_add(1, Ordering::Relaxed);
                // The answer is the only order between the daemon and the client that asks.
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
fn of_writers_that_claim_the_same_pages_one_asks_for_them() {
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
    // Two ask when one takes the lock over from the other, which in the model it does after a look.
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
fn who_waits_for_an_answer_finds_the_pages_of_it() {
    explore(["1"], |notes| {
        let file = File::new();
        let held = file.ahead.begin_asking(2);
        file.asked.fetch_add(1, Ordering::Relaxed);
        let waiter = thread::spawn({
            let file = file.clone();
            // As `begin_asking`, of a waiter whose patience does not end.
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
        assert!(waiter.join().unwrap(), "it would ask for the same pages");
        notes.add(file.asked.load(Ordering::Relaxed));
    });
}

#[test]
fn who_lost_the_lock_while_it_asked_does_not_open_it_for_others() {
    explore(["false", "true"], |notes| {
        let file = File::new();
        let held = file.ahead.begin_asking(2);
        let next = thread::spawn({
            let file = file.clone();
            // Does not wait for the first one any longer, or finds that it has ended.
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
