//! Readers against threads that change or replace the pages that they read.

use loom::thread;

use super::*;
use crate::access::before_fill;

/// One page, then the page that replaces it. A reader sees neither, one, or each at its time.
const OLD_THEN_NEW: [&str; 4] = [
    "(None, None)",
    "(None, Some([2, 2]))",
    "(Some([1, 1]), None)",
    "(Some([1, 1]), Some([2, 2]))",
];

#[test]
fn a_reused_entry_gives_each_reader_its_page() {
    explore(OLD_THEN_NEW, |notes| {
        let slice = Slice::with_page(Flags::BACKED);
        let evictor = thread::spawn({
            let slice = slice.clone();
            move || {
                assert!(slice.evict(0));
                slice.fill(0, key(2), 0, [2, 2], Flags::BACKED);
            }
        });
        let old = slice.read(0, key(1));
        let new = slice.read(0, key(2));
        notes.add((old, new));
        evictor.join().unwrap();
        assert_eq!(slice.read(0, key(1)), None);
        assert_eq!(slice.read(0, key(2)), Some([2, 2]));
    });
}

#[test]
fn a_reused_frame_gives_each_reader_its_page() {
    explore(OLD_THEN_NEW, |notes| {
        let slice = Slice::with_page(Flags::BACKED);
        let evictor = thread::spawn({
            let slice = slice.clone();
            move || {
                assert!(slice.evict(0));
                slice.fill(1, key(2), 0, [2, 2], Flags::BACKED);
            }
        });
        let old = slice.read(0, key(1));
        let new = slice.read(1, key(2));
        notes.add((old, new));
        evictor.join().unwrap();
    });
}

#[test]
fn a_frame_that_another_thread_fills_gives_each_reader_its_page() {
    explore(OLD_THEN_NEW, |notes| {
        let slice = Slice::with_page(Flags::BACKED);
        let evictor = thread::spawn({
            let slice = slice.clone();
            move || {
                assert!(slice.evict(0));
                slice.entries[1].insert(key(2), 0);
                let filler = thread::spawn({
                    let slice = slice.clone();
                    move || {
                        before_fill();
                        slice.put(0, [2, 2]);
                        slice.entries[1].publish(Flags::BACKED);
                    }
                });
                filler.join().unwrap();
            }
        });
        let old = slice.read(0, key(1));
        let new = slice.read(1, key(2));
        notes.add((old, new));
        evictor.join().unwrap();
    });
}

#[test]
fn a_page_that_comes_back_does_not_pass_for_its_earlier_state() {
    // Two pages alternate in one entry and frame, so that key, frame and flags return to their old values.
    explore(["None", "Some([1, 1])", "Some([3, 3])"], |notes| {
        let slice = Slice::with_page(Flags::BACKED);
        let evictor = thread::spawn({
            let slice = slice.clone();
            move || {
                assert!(slice.evict(0));
                slice.fill(0, key(2), 0, [2, 2], Flags::BACKED);
                assert!(slice.evict(0));
                slice.fill(0, key(1), 0, [3, 3], Flags::BACKED);
            }
        });
        notes.add(slice.read(0, key(1)));
        evictor.join().unwrap();
    });
}

#[test]
fn a_reader_sees_a_write_whole_or_not_at_all_and_keeps_seeing_it() {
    explore(["None", "Some([1, 1])", "Some([2, 2])"], |notes| {
        let slice = Slice::with_page(Flags::BACKED);
        let writer = thread::spawn({
            let slice = slice.clone();
            move || assert_eq!(slice.write(7, &[(0, 2), (1, 2)]), Ok(Some(true)))
        });
        let first = slice.read(0, key(1));
        let second = slice.read(0, key(1));
        notes.add(first);
        notes.add(second);
        assert!(!(first == Some([2, 2]) && second == Some([1, 1])));
        writer.join().unwrap();
        assert_eq!(slice.read(0, key(1)), Some([2, 2]));
    });
}

#[test]
fn two_writers_never_mix_before_a_reader() {
    let outcomes = ["None", "Some([1, 1])", "Some([2, 2])", "Some([3, 3])"];
    explore(outcomes, |notes| {
        let slice = Slice::with_page(Flags::BACKED);
        let writers = [2u64, 3].map(|value| {
            let slice = slice.clone();
            thread::spawn(move || slice.write(value as u16, &[(0, value), (1, value)]))
        });
        notes.add(slice.read(0, key(1)));
        let done = writers.map(|writer| writer.join().unwrap().unwrap().is_some());
        assert!(done.contains(&true), "one gets in");
        let last = slice.read(0, key(1)).unwrap();
        let allowed = [(2, done[0]), (3, done[1])];
        assert!(
            allowed
                .iter()
                .any(|(value, done)| *done && last == [*value; WORDS])
        );
    });
}

#[test]
fn a_reader_sees_writes_of_parts_in_one_order() {
    // A reader that sees the second writer's words must also see those of the first.
    let outcomes = [
        "None",
        "Some([1, 1])",
        "Some([1, 3])",
        "Some([2, 1])",
        "Some([2, 3])",
    ];
    explore(outcomes, |notes| {
        let slice = Slice::with_page(Flags::BACKED);
        let writers = [(0, 2), (1, 3)].map(|part| {
            let slice = slice.clone();
            thread::spawn(move || slice.write(part.1 as u16, &[part]))
        });
        notes.add(slice.read(0, key(1)));
        let done = writers.map(|writer| writer.join().unwrap().unwrap().is_some());
        let last = slice.read(0, key(1)).unwrap();
        assert_eq!(
            last,
            [if done[0] { 2 } else { 1 }, if done[1] { 3 } else { 1 }]
        );
    });
}
