//! Writers that stop forever, or for long, while they hold a latch.

use loom::thread;

use super::*;
use crate::access::before_fill;
use crate::intent;
use crate::writer::Writer;

/// Runs a writer that dies after it has copied `copied` words.
fn die_with(copied: usize) {
    explore(["None", "Some(new)", "Some(old)"], move |notes| {
        let slice = Slice::with_page(Flags::BACKED);
        let writer = thread::spawn({
            let slice = slice.clone();
            move || {
                let latched = slice.entry().try_latch(slice.entry().state(), 7).unwrap();
                for at in 0..copied {
                    slice.put_word(latched.frame(), at, 2);
                }
            }
        });
        let reader = thread::spawn({
            let slice = slice.clone();
            move || [slice.read(0, key(1)), slice.read(0, key(1))]
        });
        // The daemon learns of the death afterwards.
        writer.join().unwrap();
        let seen = slice.entry().state();
        assert!(seen.has(Flags::LATCH) && seen.owner() == 7);
        assert!(slice.entry().break_latch(seen, seen.frame()));
        assert!(slice.entry().state().has(Flags::DIRTY.with(Flags::BACKED)));
        // The dead writer's bytes are the page from now on, for all readers.
        let left = std::array::from_fn(|at| if at < copied { 2 } else { 1 });
        let reads = reader.join().unwrap();
        for read in reads {
            assert!(read.is_none_or(|words| words == [1; WORDS] || words == left));
            notes.add(read.map(|words| {
                if words == left {
                    Word("new")
                } else {
                    Word("old")
                }
            }));
        }
        if copied == 0 {
            notes.add(Some(Word("old")));
        }
        assert_eq!(slice.read(0, key(1)), Some(left));
        assert_eq!(slice.write(8, &[(0, 3), (1, 3)]), Ok(Some(false)));
        assert_eq!(slice.read(0, key(1)), Some([3, 3]));
    });
}

#[test]
fn a_writer_that_dies_before_its_copy_leaves_the_old_page() {
    die_with(0);
}

#[test]
fn a_writer_that_dies_amid_its_copy_leaves_the_copied_bytes() {
    die_with(1);
}

#[test]
fn a_writer_that_dies_after_its_copy_leaves_the_copied_bytes() {
    die_with(2);
}

#[test]
fn the_late_copy_of_a_broken_writer_is_in_no_page() {
    let outcomes = ["(false, Ok(Some(true)))", "(true, Err(Broken))"];
    explore(outcomes, |notes| {
        let slice = Slice::with_page(Flags::BACKED);
        let writer = thread::spawn({
            let slice = slice.clone();
            move || slice.write(7, &[(0, 2), (1, 2)])
        });
        let reader = thread::spawn({
            let slice = slice.clone();
            move || [slice.read_in(0, key(1)), slice.read_in(0, key(1))]
        });
        // Takes the latch away as the slice does: copies the page's present bytes to another frame.
        let seen = slice.entry().state();
        let mut copied = None;
        if seen.has(Flags::LATCH) {
            let words = slice.get(seen.frame());
            before_fill();
            slice.put(1, words);
            copied = slice.entry().break_latch(seen, 1).then_some(words);
        }
        let after = slice.entry().state();
        let done = writer.join().unwrap();
        notes.add((copied.is_some(), done));
        for (state, words) in reader.join().unwrap().into_iter().flatten() {
            match state.frame() {
                0 => assert!(words == [1, 1] || (words == [2, 2] && copied.is_none())),
                _ => assert_eq!(Some(words), copied),
            }
        }
        if copied.is_some() {
            assert_eq!(
                slice.entry().state(),
                after,
                "a broken writer changes nothing"
            );
            assert_eq!(slice.get(0), [2, 2], "its copy went on");
        }
        assert_eq!(slice.read(0, key(1)), Some(copied.unwrap_or([2, 2])));
    });
}

#[test]
fn a_latch_is_broken_or_given_back_while_write_back_ends() {
    let outcomes = ["(false, Ok(true))", "(true, Err(Broken))"];
    explore(outcomes, |notes| {
        let slice = Slice::with_page(Flags::BACKED);
        slice.entry().mark(Flags::WRITE_BACK);
        let writer = thread::spawn({
            let slice = slice.clone();
            move || slice.write_surely(7, &[(0, 2)], || true)
        });
        let completion = thread::spawn({
            let slice = slice.clone();
            move || slice.entry().unmark(Flags::WRITE_BACK)
        });
        let seen = slice.entry().state();
        let broken = seen.has(Flags::LATCH) && slice.entry().break_latch(seen, 1);
        completion.join().unwrap();
        notes.add((broken, writer.join().unwrap()));
        let last = slice.entry().state();
        assert!(last.has(Flags::DIRTY) && !last.any(Flags::LATCH.with(Flags::WRITE_BACK)));
        assert_eq!((last.owner(), last.frame()), (0, broken.into()));
    });
}

/// Progress of a client's thread when it dies.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
enum Step {
    Noted,
    Latched,
    Unlatched,
    Reported,
}

/// Runs a thread that writes page 1 and dies after a step, beside another client that writes the page too. Outcomes: whether the
/// dead thread's page was absorbed, and what the other's write returned.
fn die_after<const N: usize>(step: Step, outcomes: [&str; N]) {
    explore(outcomes, move |notes| {
        let slice = Slice::with_page(Flags::BACKED);
        let intent = Arc::new(AtomicU64::new(0));
        // The pages that the slice knows to be dirty. A report adds one.
        let reported = Arc::new(AtomicU64::new(0));
        let dying = thread::spawn({
            let (slice, intent, reported) = (slice.clone(), intent.clone(), reported.clone());
            move || {
                let Some(seen) = slice.entry().find(key(1)) else {
                    return;
                };
                Writer::client(7, &intent, 0).about_to_latch(0);
                if step < Step::Latched || seen.has(Flags::LATCH) {
                    return;
                }
                let Some(latched) = slice.entry().try_latch(seen, 7) else {
                    return;
                };
                slice.put_word(latched.frame(), 0, 2);
                if step < Step::Unlatched {
                    return;
                }
                let before = slice.entry().unlatch(latched, Flags::DIRTY).unwrap();
                if step == Step::Reported && !before.has(Flags::DIRTY) {
                    reported.fetch_add(1, Ordering::SeqCst);
                }
            }
        });
        let other = thread::spawn({
            let (slice, reported) = (slice.clone(), reported.clone());
            move || {
                let written = slice.write(8, &[(1, 3)]).unwrap();
                if written == Some(true) {
                    reported.fetch_add(1, Ordering::SeqCst);
                }
                written
            }
        });
        dying.join().unwrap();
        // The daemon learns of the death afterwards, while the other client continues.
        let mut absorbed = false;
        if let Some((slice_number, index)) = intent::read(&intent) {
            assert_eq!((slice_number, index), (0, 0));
            for _ in 0..2 {
                let seen = slice.entry().state();
                if !seen.has(Flags::LATCH) || seen.owner() != 7 {
                    break;
                }
                slice.entry().break_latch(seen, seen.frame());
            }
            let was_reported = reported.load(Ordering::SeqCst) > 0;
            absorbed = slice.entry().state().has(Flags::DIRTY) && !was_reported;
        }
        let written = other.join().unwrap();
        let last = slice.entry().state();
        assert!(!last.has(Flags::LATCH));
        let reported = absorbed || reported.load(Ordering::SeqCst) > 0;
        assert!(reported || !last.has(Flags::DIRTY), "a dirty page is lost");
        notes.add((absorbed, written));
    });
}

#[test]
fn a_thread_that_dies_before_its_latch_leaves_nothing() {
    // The other's page may be absorbed before its report, and is then counted twice.
    die_after(Step::Noted, ["(false, Some(true))", "(true, Some(true))"]);
}

/// Outcomes of a thread that dies between its latch and its report.
const FOUND: [&str; 4] = [
    "(false, Some(true))",
    "(true, None)",
    "(true, Some(false))",
    "(true, Some(true))",
];

#[test]
fn a_thread_that_dies_with_a_latch_leaves_a_page_that_is_found() {
    die_after(Step::Latched, FOUND);
}

#[test]
fn a_thread_that_dies_before_its_report_leaves_a_page_that_is_found() {
    die_after(Step::Unlatched, FOUND);
}

#[test]
fn a_thread_that_dies_after_its_report_leaves_a_page_that_is_known() {
    let outcomes = [
        "(false, None)",
        "(false, Some(false))",
        "(false, Some(true))",
        "(true, Some(true))",
    ];
    die_after(Step::Reported, outcomes);
}
