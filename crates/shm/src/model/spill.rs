//! Frames that are given back: pages move to other frames or are dropped, and the frames lose their memory.

use loom::thread;

use super::*;
use crate::access::before_fill;

/// Moves page 1 from frame 0 to frame 1, as the slice does, and takes the memory of frame 0 away. Returns false if a writer has the page.
fn move_away(slice: &Slice) -> bool {
    let seen = slice.entry().state();
    if seen.has(Flags::LATCH) {
        return false;
    }
    let Some(latched) = slice.entry().try_latch(seen, 1) else {
        return false;
    };
    let words = slice.get(seen.frame());
    before_fill();
    slice.put(1, words);
    if !slice.entry().move_latched(latched, 1) {
        return false;
    }
    take_memory(slice);
    true
}

/// Frame 0 reads as zeros from now on. The kernel orders this behind what its caller did before.
fn take_memory(slice: &Slice) {
    before_fill();
    slice.put(0, [0; WORDS]);
}

#[test]
fn a_page_that_moves_is_read_whole_and_loses_no_write() {
    let outcomes = [
        "(false, Ok(Some(false)))",
        "(true, Ok(None))",
        "(true, Ok(Some(false)))",
    ];
    explore(outcomes, |notes| {
        let slice = Slice::with_page(Flags::BACKED.with(Flags::DIRTY));
        let writer = thread::spawn({
            let slice = slice.clone();
            move || slice.write(2, &[(0, 2), (1, 2)])
        });
        let reader = thread::spawn({
            let slice = slice.clone();
            move || slice.read(0, key(1))
        });
        let moved = move_away(&slice);
        let written = writer.join().unwrap();
        let then = if written == Ok(Some(false)) {
            [2, 2]
        } else {
            [1, 1]
        };
        let read = reader.join().unwrap();
        assert!(
            read.is_none_or(|words| words == [1, 1] || words == then),
            "{read:?}"
        );
        let last = slice.entry().state();
        assert!(last.has(Flags::DIRTY.with(Flags::BACKED)) && !last.has(Flags::LATCH));
        assert_eq!(last.frame(), moved.into());
        assert_eq!(slice.read(0, key(1)), Some(then));
        if moved || written != Ok(None) {
            notes.add((moved, written));
        }
    });
}

#[test]
fn a_page_that_moves_keeps_no_right_that_was_revoked() {
    explore(["false", "true"], |notes| {
        let slice = Slice::with_page(Flags::BACKED);
        let revoker = thread::spawn({
            let slice = slice.clone();
            move || slice.entry().revoke(Flags::BACKED).is_none()
        });
        let moved = move_away(&slice);
        // If the page was latched, the daemon looks again.
        let at_once = revoker.join().unwrap();
        notes.add(at_once);
        let last = slice.entry().state();
        assert!(!last.any(Flags::BACKED.with(Flags::LATCH).with(Flags::DIRTY)));
        assert!(moved || at_once);
        assert_eq!(
            (last.frame(), slice.read(0, key(1))),
            (moved.into(), Some([1, 1]))
        );
    });
}

#[test]
fn a_reader_takes_no_zeros_of_a_frame_without_memory_for_a_page() {
    explore(
        [
            "(false, Some([1, 1]))",
            "(true, None)",
            "(true, Some([1, 1]))",
        ],
        |notes| {
            let slice = Slice::with_page(Flags::BACKED);
            let reader = thread::spawn({
                let slice = slice.clone();
                move || slice.read(0, key(1))
            });
            let other = thread::spawn({
                let slice = slice.clone();
                move || slice.write(2, &[(0, 1)])
            });
            let evicted = slice.evict(0);
            if evicted {
                take_memory(&slice);
            }
            let read = reader.join().unwrap();
            let written = other.join().unwrap();
            if evicted {
                // No writer has the frame: its latch would have kept the page.
                assert!(!matches!(written, Ok(Some(_))));
                assert_eq!(slice.get(0), [0, 0]);
            }
            if evicted || read.is_some() {
                notes.add((evicted, read));
            }
        },
    );
}
