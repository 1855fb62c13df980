//! The size word and the locks of a slot, as the client library and the daemon use them.

use loom::thread;

use super::*;
use crate::lock::Lock;
use crate::slots::Slot;
use crate::sync::fence;

const DAEMON: u16 = 1;

fn slot(bytes: u64) -> Arc<Slot> {
    Arc::new(Slot::new(bytes))
}

#[test]
fn an_extension_that_began_before_a_truncation_fails_after_it() {
    // Truncates to the same size, so that only the count tells.
    explore(
        ["(false, false)", "(true, false)", "(true, true)"],
        |notes| {
            let slot = slot(1);
            let daemon = thread::spawn({
                let slot = slot.clone();
                move || slot.set_size(1, true)
            });
            let seen = slot.size();
            let extended = slot.extend(seen, 2);
            daemon.join().unwrap();
            let last = slot.size();
            // The extension may stand only if it began after the truncation.
            assert_eq!(
                last.bytes() == 2,
                extended && last.same_truncation_count(seen)
            );
            notes.add((extended, last.bytes() == 2));
        },
    );
}

#[test]
fn a_reader_never_takes_a_truncations_zeros_for_data() {
    let outcomes = ["None", "Some((0, []))", "Some((2, [1, 1]))"];
    explore(outcomes, |notes| {
        let (slot, slice) = (slot(2), Slice::with_page(Flags::BACKED));
        let daemon = thread::spawn({
            let (slot, slice) = (slot.clone(), slice.clone());
            move || {
                slot.set_size(0, true);
                slice
                    .write_surely(DAEMON, &[(0, 0), (1, 0)], || true)
                    .unwrap();
                slot.set_size(0, true);
            }
        });
        let seen = slot.size();
        let words = slice.read(0, key(1));
        fence(Ordering::Acquire);
        let read = words
            .filter(|_| slot.size().same_truncation_count(seen))
            .map(|words| (seen.bytes(), words[..seen.bytes() as usize].to_vec()));
        notes.add(read);
        daemon.join().unwrap();
    });
}

#[test]
fn a_reader_never_takes_the_page_after_a_truncation_for_the_one_before() {
    let outcomes = [
        "None",
        "Some((0, []))",
        "Some((2, [1, 1]))",
        "Some((2, [3, 3]))",
    ];
    explore(outcomes, |notes| {
        let (slot, slice) = (slot(2), Slice::with_page(Flags::BACKED));
        let daemon = thread::spawn({
            let (slot, slice) = (slot.clone(), slice.clone());
            move || {
                slot.set_size(0, true);
                assert!(slice.evict(0));
                slot.set_size(0, true);
                // The file grows again.
                slice.fill(0, key(1), 0, [0, 0], Flags::BACKED);
                slice
                    .write_surely(DAEMON, &[(0, 3), (1, 3)], || true)
                    .unwrap();
                slot.grow(|| 2);
            }
        });
        let seen = slot.size();
        let words = slice.read(0, key(1));
        fence(Ordering::Acquire);
        let read = words
            .filter(|_| slot.size().same_truncation_count(seen))
            .map(|words| (seen.bytes(), words[..seen.bytes() as usize].to_vec()));
        notes.add(read);
        daemon.join().unwrap();
    });
}

#[test]
fn a_write_beyond_a_truncation_leaves_nothing_there() {
    explore(["Err(Changed)", "Ok(true)"], |notes| {
        let (slot, slice) = (slot(2), Slice::with_page(Flags::BACKED));
        let writer = thread::spawn({
            let (slot, slice) = (slot.clone(), slice.clone());
            move || {
                let seen = slot.size();
                if seen.bytes() < 2 {
                    return Err(Miss::Changed);
                }
                slice.write_surely(7, &[(1, 2)], || slot.size().same_truncation_count(seen))
            }
        });
        slot.set_size(1, true);
        slice.write_surely(DAEMON, &[(1, 0)], || true).unwrap();
        slot.set_size(1, true);
        notes.add(writer.join().unwrap());
        assert_eq!(slice.read(0, key(1)), Some([1, 0]));
    });
}

/// Appends a word as a client does. Returns true when it succeeded.
fn append(slot: &Slot, slice: &Slice, owner: u16, value: u64) -> bool {
    let Some(held) = slot.extend_lock().lock(owner) else {
        return false;
    };
    let seen = slot.size();
    let at = seen.bytes();
    let done = slot.extend_lock().is_held(held)
        && slice
            .write_surely(owner, &[(at as usize, value)], || slot.size() == seen)
            .is_ok()
        && slot.extend(seen, at + 1);
    slot.extend_lock().unlock(held);
    done
}

/// Appends a word as the daemon does, which must succeed even when a client keeps the lock.
fn append_anyway(slot: &Slot, slice: &Slice, value: u64) {
    let (held, _) = slot.seize(DAEMON, |_| false);
    let at = slot.size().bytes();
    slice
        .write_surely(DAEMON, &[(at as usize, value)], || true)
        .unwrap();
    slot.grow(|| at + 1);
    assert!(slot.extend_lock().unlock(held));
}

#[test]
fn appenders_lose_nothing() {
    explore(
        ["[false, true]", "[true, false]", "[true, true]"],
        |notes| {
            let (slot, slice) = (slot(0), Slice::with_page(Flags::BACKED));
            slice.put(0, [0, 0]);
            let appenders = [2, 3].map(|owner| {
                let (slot, slice) = (slot.clone(), slice.clone());
                thread::spawn(move || append(&slot, &slice, owner, owner.into()))
            });
            let done = join(appenders);
            notes.add(done);
            let mut words = slice.read(0, key(1)).unwrap()[..slot.size().bytes() as usize].to_vec();
            words.sort_unstable();
            let expected: Vec<u64> = [2, 3]
                .into_iter()
                .zip(done)
                .filter_map(|(w, d)| d.then_some(w))
                .collect();
            assert_eq!(words, expected);
        },
    );
}

#[test]
fn the_daemon_takes_a_lock_away_and_nothing_that_was_acknowledged_is_lost() {
    explore(["false", "true"], |notes| {
        let (slot, slice) = (slot(0), Slice::with_page(Flags::BACKED));
        slice.put(0, [0, 0]);
        let client = thread::spawn({
            let (slot, slice) = (slot.clone(), slice.clone());
            move || append(&slot, &slice, 7, 7)
        });
        append_anyway(&slot, &slice, 9);
        let done = client.join().unwrap();
        notes.add(done);
        let words = slice.read(0, key(1)).unwrap();
        let mut words = words[..slot.size().bytes() as usize].to_vec();
        words.sort_unstable();
        assert_eq!(words, if done { vec![7, 9] } else { vec![9] });
    });
}

#[test]
fn an_owner_that_lost_a_lock_does_not_open_it() {
    explore(["None", "Some(false)", "Some(true)"], |notes| {
        let lock = Arc::new(Lock::new());
        let loser = thread::spawn({
            let lock = lock.clone();
            move || lock.lock(2).map(|held| lock.unlock(held))
        });
        let daemon = lock.take_over(DAEMON);
        assert!(lock.is_held(daemon), "nobody else took it or opened it");
        assert!(lock.unlock(daemon));
        // Another thread of the same program.
        let held = lock.try_lock(2);
        notes.add(loser.join().unwrap());
        assert!(held.is_none_or(|held| lock.is_held(held) && lock.unlock(held)));
        assert!(lock.try_lock(4).is_some(), "free in the end");
    });
}

#[test]
fn a_lock_has_one_holder_and_orders_the_holders_accesses() {
    explore(["1", "2"], |notes| {
        let (lock, inside) = (Arc::new(Lock::new()), Alone::new());
        let users = [2, 3].map(|owner| {
            let (lock, inside) = (lock.clone(), inside.clone());
            thread::spawn(move || {
                let held = lock.lock(owner)?;
                inside.enter();
                assert!(lock.unlock(held));
                Some(())
            })
        });
        let got = join(users);
        notes.add(got.iter().flatten().count());
        assert!(lock.try_lock(4).is_some(), "free in the end");
    });
}

#[test]
fn the_lock_of_a_dead_owner_is_opened_with_its_stores_visible() {
    explore(
        ["(false, true)", "(true, false)", "(true, true)"],
        |notes| {
            let (lock, inside) = (Arc::new(Lock::new()), Alone::new());
            let dying = thread::spawn({
                let (lock, inside) = (lock.clone(), inside.clone());
                // The thread ends while it holds the lock, if it got it.
                move || lock.lock(2).map(|_| inside.enter()).is_some()
            });
            let other = thread::spawn({
                let (lock, inside) = (lock.clone(), inside.clone());
                move || {
                    let Some(held) = lock.lock(3) else {
                        return false;
                    };
                    inside.enter();
                    assert!(lock.unlock(held), "not the dead one's");
                    true
                }
            });
            let died = dying.join().unwrap();
            lock.open_dead(2);
            notes.add((died, other.join().unwrap()));
            assert!(lock.try_lock(4).is_some());
            inside.enter();
        },
    );
}

/// Withholds writes as the daemon does before it reads a page for the kernel, which keeps the bytes.
#[test]
fn a_page_that_was_read_for_the_kernel_is_not_written_inline_afterwards() {
    let outcomes = ["None", "Some(Err(Changed))", "Some(Ok(true))"];
    explore(outcomes, |notes| {
        let (slot, slice) = (slot(2), Slice::with_page(Flags::BACKED));
        let withheld = Arc::new(AtomicU64::new(0));
        let writer = thread::spawn({
            let (slot, slice, withheld) = (slot.clone(), slice.clone(), withheld.clone());
            move || {
                let seen = slot.size();
                if withheld.load(Ordering::Acquire) != 0 {
                    return None;
                }
                Some(slice.write_surely(7, &[(0, 2), (1, 2)], || {
                    slot.size().same_truncation_count(seen)
                }))
            }
        });
        withheld.store(1, Ordering::SeqCst);
        slot.raise_truncation_count();
        let kept = loop {
            slice.entry().unmark(Flags::default());
            let seen = slice.entry().state();
            if !seen.has(Flags::LATCH) {
                break slice.get(seen.frame());
            }
            thread::yield_now();
        };
        let done = writer.join().unwrap();
        assert_eq!(slice.read(0, key(1)), Some(kept));
        assert_eq!(kept == [2, 2], done.is_some_and(|d| d.is_ok()));
        notes.add(done);
    });
}
