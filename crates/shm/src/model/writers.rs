//! Writers against each other, write-back, eviction, and the revocation of their right.

use loom::thread;

use super::*;
use crate::access::before_fill;

#[test]
fn one_writer_at_a_time_has_the_page_and_one_reports_it() {
    explore(["1", "2"], |notes| {
        let slice = Slice::with_page(Flags::BACKED);
        let inside = Alone::new();
        let writers = [2, 3].map(|owner| {
            let (slice, inside) = (slice.clone(), inside.clone());
            thread::spawn(move || {
                slice.write_if(owner, &[(0, owner.into())], || {
                    inside.enter();
                    true
                })
            })
        });
        let done = writers.map(|writer| writer.join().unwrap().unwrap());
        notes.add(done.iter().flatten().count());
        assert_eq!(done.iter().filter(|done| **done == Some(true)).count(), 1);
        assert!(slice.entry().state().has(Flags::DIRTY));
    });
}

#[test]
fn write_back_never_loses_the_last_write() {
    let outcomes = ["(1, false)", "(1, true)", "(2, false)", "(2, true)"];
    explore(outcomes, |notes| {
        // The page is dirty and reported already.
        let slice = Slice::with_page(Flags::BACKED.with(Flags::DIRTY));
        let writers = [(0, 2), (1, 3)].map(|part| {
            let slice = slice.clone();
            thread::spawn(move || slice.write_surely(part.1 as u16, &[part], || true))
        });
        // Writes back twice, because the page may become dirty again.
        let (mut device, mut taken) = ([1; WORDS], 0);
        for _ in 0..2 {
            let seen = slice.entry().state();
            if seen.has(Flags::DIRTY)
                && !seen.any(Flags::LATCH.with(Flags::WRITE_BACK))
                && slice
                    .entry()
                    .try_mark(seen, Flags::WRITE_BACK, Flags::DIRTY)
            {
                taken += 1;
                device = slice.get(seen.frame());
                slice.entry().unmark(Flags::WRITE_BACK);
            }
        }
        let reported = writers.map(|writer| writer.join().unwrap().unwrap());
        let last = slice.entry().state();
        assert!(!last.any(Flags::LATCH.with(Flags::WRITE_BACK)));
        assert_eq!(slice.read(0, key(1)), Some([2, 3]));
        let dirty = last.has(Flags::DIRTY);
        assert!(dirty || device == [2, 3], "device has {device:?}");
        // A writer reported the page each time that it became dirty, and only then.
        let times = 1 + reported.into_iter().filter(|was_clean| *was_clean).count();
        assert_eq!(times, taken + usize::from(dirty));
        if taken > 0 {
            notes.add((taken, dirty));
        }
    });
}

#[test]
fn a_failed_write_back_leaves_the_page_dirty() {
    explore(["false", "true"], |notes| {
        let slice = Slice::with_page(Flags::BACKED.with(Flags::DIRTY));
        let writer = thread::spawn({
            let slice = slice.clone();
            move || slice.write_surely(2, &[(0, 2)], || true).unwrap()
        });
        let seen = slice.entry().state();
        if !seen.has(Flags::LATCH)
            && slice
                .entry()
                .try_mark(seen, Flags::WRITE_BACK, Flags::DIRTY)
        {
            let again = slice.entry().mark(Flags::DIRTY).has(Flags::DIRTY);
            slice.entry().unmark(Flags::WRITE_BACK);
            notes.add(again);
        }
        writer.join().unwrap();
        assert!(slice.entry().state().has(Flags::DIRTY));
    });
}

#[test]
fn a_page_is_evicted_or_written_and_never_both() {
    explore(
        [
            "(false, Ok(Some(true)))",
            "(true, Err(Absent))",
            "(true, Ok(None))",
        ],
        |notes| {
            let slice = Slice::with_page(Flags::BACKED);
            let writer = thread::spawn({
                let slice = slice.clone();
                move || slice.write(2, &[(0, 2), (1, 2)])
            });
            let evicted = slice.evict(0);
            if evicted {
                // The frame belongs to another page now.
                slice.fill(1, key(2), 0, [3, 3], Flags::BACKED);
            }
            notes.add((evicted, writer.join().unwrap()));
            assert_eq!(slice.get(0), if evicted { [3, 3] } else { [2, 2] });
        },
    );
}

/// Revokes the right to write a page, as the slice does. Returns the page's words at the end. `patient`: waits for a writer;
/// otherwise takes the latch away, as from a writer that holds it for too long.
fn revoke(slice: &Slice, patient: bool) -> Words {
    loop {
        let Some(seen) = slice.entry().revoke(Flags::BACKED) else {
            return slice.get(slice.entry().state().frame());
        };
        if patient {
            thread::yield_now();
            continue;
        }
        before_fill();
        slice.put(1, slice.get(0));
        if slice.entry().break_latch(seen, 1) {
            return slice.get(1);
        }
    }
}

#[test]
fn no_client_writes_after_the_right_was_revoked() {
    let outcomes = ["Err(Unbacked)", "Ok(None)", "Ok(Some(true))"];
    explore(outcomes, |notes| {
        let slice = Slice::with_page(Flags::BACKED);
        let writer = thread::spawn({
            let slice = slice.clone();
            move || slice.write(2, &[(0, 2), (1, 2)])
        });
        let then = revoke(&slice, true);
        let done = writer.join().unwrap();
        notes.add(done);
        assert_eq!(slice.read(0, key(1)), Some(then));
        assert_eq!(then == [2, 2], done.is_ok_and(|done| done.is_some()));
    });
}

#[test]
fn no_client_writes_after_the_right_was_revoked_from_under_a_latch() {
    let outcomes = [
        "Err(Broken)",
        "Err(Unbacked)",
        "Ok(None)",
        "Ok(Some(false))",
        "Ok(Some(true))",
    ];
    explore(outcomes, |notes| {
        let slice = Slice::with_page(Flags::BACKED);
        let writers = [2, 3].map(|owner| {
            let slice = slice.clone();
            thread::spawn(move || slice.write(owner, &[(0, owner.into())]))
        });
        let then = revoke(&slice, false);
        for done in join(writers) {
            notes.add(done);
        }
        assert_eq!(slice.read(0, key(1)), Some(then));
    });
}

#[test]
fn no_client_writes_a_page_that_was_being_filled_after_the_right_was_revoked() {
    let outcomes = [
        "(false, Err(Absent))",
        "(false, Err(Unbacked))",
        "(true, Err(Absent))",
        "(true, Err(Unbacked))",
        "(true, Ok(None))",
        "(true, Ok(Some(true)))",
    ];
    explore(outcomes, |notes| {
        let slice = Arc::new(Slice::empty());
        let fill = thread::spawn({
            let slice = slice.clone();
            move || {
                slice.lock.fetch_add(1, Ordering::AcqRel);
                slice.entry().insert(key(1), 0);
                slice.lock.fetch_add(1, Ordering::AcqRel);
                let backed = slice.inline.load(Ordering::SeqCst) != 0;
                slice.put(0, [1; WORDS]);
                slice
                    .entry()
                    .publish(if backed { Flags::BACKED } else { Flags(0) });
            }
        });
        let writer = thread::spawn({
            let slice = slice.clone();
            move || slice.write(2, &[(0, 2), (1, 2)])
        });
        slice.inline.store(0, Ordering::SeqCst);
        // A page that is inserted after this learns that it must not be written inline.
        while slice.lock.fetch_add(0, Ordering::AcqRel) == 1 {
            thread::yield_now();
        }
        let found = slice.entry().key().is_some();
        let then = if found {
            revoke(&slice, true)
        } else {
            [1; WORDS]
        };
        fill.join().unwrap();
        let done = writer.join().unwrap();
        notes.add((found, done));
        assert_eq!(slice.read(0, key(1)), Some(then));
        assert_eq!(then == [2, 2], done.is_ok_and(|done| done.is_some()));
    });
}

#[test]
fn no_client_writes_after_the_slot_refuses_even_if_the_page_is_backed_again() {
    let outcomes = [
        "Err(Changed)",
        "Err(Unbacked)",
        "Ok(None)",
        "Ok(Some(true))",
    ];
    explore(outcomes, |notes| {
        let slice = Slice::with_page(Flags::BACKED);
        let writer = thread::spawn({
            let slice = slice.clone();
            move || {
                let still = || slice.slot.load(Ordering::Acquire) == 0;
                slice.write_if(2, &[(0, 2), (1, 2)], still)
            }
        });
        let other = thread::spawn({
            let slice = slice.clone();
            move || {
                slice.entry().mark(Flags::BACKED);
            }
        });
        slice.slot.store(1, Ordering::SeqCst);
        let then = revoke(&slice, true);
        let done = writer.join().unwrap();
        other.join().unwrap();
        notes.add(done);
        assert_eq!(slice.read(0, key(1)), Some(then));
        assert_eq!(then == [2, 2], done.is_ok_and(|done| done.is_some()));
    });
}
