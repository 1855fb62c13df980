//! The end of a file's inline writes, when the last descriptor that writes it is closed.

use loom::thread;

use super::*;
use crate::intent;
use crate::owners::Owners;
use crate::sync::fence;
use crate::writer::Writer;

const OWNER: u16 = 7;

/// The state that a file's writers and the daemon share.
struct Volume {
    slice: Arc<Slice>,
    writers: Owners,
    intent: AtomicU64,
}

impl Volume {
    fn new() -> Arc<Volume> {
        Arc::new(Volume {
            slice: Slice::with_page(Flags::BACKED),
            writers: Owners::new(),
            intent: AtomicU64::new(0),
        })
    }

    /// Writes page 1 inline as a client does for the first time. It does not report the page. Returns whether the page was
    /// written.
    fn write(&self) -> bool {
        self.writers.add(OWNER);
        Writer::client(OWNER, &self.intent, 0).about_to_latch(0);
        let may_write = || {
            // Stands for the hardware's full barrier in `try_latch`: on x86-64 the locked instruction that takes the latch, on
            // aarch64 the fence after it.
            fence(Ordering::SeqCst);
            self.slice.slot.load(Ordering::Acquire) == 0
        };
        self.slice.write_surely(OWNER, &[(0, 2)], may_write).is_ok()
    }

    /// Ends inline writes. Returns whether the daemon knows that page 1 is dirty.
    fn end_writes(&self) -> bool {
        self.slice.slot.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let named = self.writers.owners().any(|owner| owner == OWNER);
        if !named || intent::read(&self.intent).is_none() {
            return false;
        }
        loop {
            self.slice.entry().unmark(Flags::default());
            let seen = self.slice.entry().state();
            if !seen.has(Flags::LATCH) {
                return seen.has(Flags::DIRTY);
            }
            thread::yield_now();
        }
    }
}

#[test]
fn a_first_write_while_the_file_is_closed_is_refused_or_known() {
    explore(["(false, false)", "(true, true)"], |notes| {
        let volume = Volume::new();
        let writer = thread::spawn({
            let volume = volume.clone();
            move || volume.write()
        });
        let known = volume.end_writes();
        notes.add((writer.join().unwrap(), known));
    });
}

#[test]
fn a_writer_that_finds_its_bit_set_by_another_client_is_no_less_known() {
    explore(["(false, false)", "(true, true)"], |notes| {
        let volume = Volume::new();
        let other = thread::spawn({
            let volume = volume.clone();
            move || volume.writers.add(OWNER + crate::owners::BITS as u16)
        });
        let writer = thread::spawn({
            let volume = volume.clone();
            move || volume.write()
        });
        let known = volume.end_writes();
        other.join().unwrap();
        notes.add((writer.join().unwrap(), known));
    });
}
