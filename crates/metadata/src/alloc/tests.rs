use super::*;
use crate::store::{Change, Store};
use proptest::prelude::*;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

fn allocator(slices: &[u64]) -> (StoreRef, Arc<Allocator>) {
    let store = StoreRef::from(Store::in_memory(64).unwrap());
    let allocator = open(&store, slices);
    (store, allocator)
}

fn open(store: &StoreRef, slices: &[u64]) -> Arc<Allocator> {
    let spaces = slices.iter().map(|blocks| SpaceOptions {
        blocks: *blocks,
        ..Default::default()
    });
    Allocator::new(vec![store.clone()], spaces.collect(), 16).unwrap()
}

fn take(a: &Allocator, slice: SliceId, near: Option<u64>, count: u32) -> Vec<Blocks> {
    a.reserve(count.into()).unwrap();
    let mut out = Vec::new();
    a.allocate(slice, near, count, &mut out).unwrap();
    assert_eq!(out.iter().map(|b| b.count).sum::<u32>(), count);
    out
}

#[test]
fn an_allocation_continues_after_the_end_of_the_file() {
    let (_store, a) = allocator(&[1000]);
    assert_eq!(
        take(&a, 0, None, 10),
        [Blocks {
            slice: 0,
            first: 0,
            count: 10
        }]
    );
    assert_eq!(
        take(&a, 0, Some(9), 100),
        [Blocks {
            slice: 0,
            first: 10,
            count: 100
        }]
    );
}

#[test]
fn blocks_that_do_not_fit_in_a_slice_go_to_the_one_with_most_free_blocks() {
    let (_store, a) = allocator(&[100, 70, 80]);
    let out = take(&a, 0, None, 150);
    assert_eq!(
        out[0],
        Blocks {
            slice: 0,
            first: 0,
            count: 100
        }
    );
    assert!(out[1..].iter().all(|b| b.slice == 2), "{out:?}");
}

#[test]
fn a_reservation_is_kept_and_missing_space_cannot_be_reserved() {
    let (_store, a) = allocator(&[100]);
    a.reserve(60).unwrap();
    assert!(matches!(a.reserve(41), Err(Error::Errno(28))));
    let got = take(&a, 0, None, 40);
    assert!(matches!(a.reserve(1), Err(Error::Errno(28))));
    a.release_uncommitted(got[0]);
    a.unreserve(60);
    assert_eq!((a.reserved(), a.available(), a.free_of(0)), (0, 100, 100));
}

#[test]
fn blocks_that_are_given_back_lose_their_images() {
    // The metadata region could get the blocks, and a settlement would then write into the store.
    let (store, a) = allocator(&[100]);
    let put = |blocks: Blocks| {
        a.logged(blocks)
            .put((blocks.slice, blocks.first), vec![1; 4096].into(), (7, 0))
    };
    let has = |blocks: Blocks| !a.logged(blocks).images(blocks).is_empty();
    let used = take(&a, 0, None, 10)[0];
    store.commit(&[Change::Use(used)]).unwrap();
    let unused = take(&a, 0, None, 10)[0];
    [used, unused].into_iter().for_each(put);
    a.release_uncommitted(unused);
    assert_eq!((has(used), has(unused)), (true, false));
    store.commit(&[Change::Free(used)]).unwrap();
    a.release_committed(used);
    assert!(!has(used));
}

#[test]
fn blocks_used_durably_are_not_allocated_after_opening_again() {
    let (store, a) = allocator(&[200]);
    let used = take(&a, 0, None, 70);
    store.commit(&[Change::Use(used[0])]).unwrap();
    drop(a);
    let a = open(&store, &[200]);
    assert_eq!((a.free_of(0), a.available()), (130, 130));
    let rest = take(&a, 0, None, 130);
    assert!(rest.iter().all(|b| b.first >= 70), "{rest:?}");
    store.commit(&[Change::Free(used[0])]).unwrap();
    a.release_committed(used[0]);
    assert_eq!(take(&a, 0, None, 70), used);
}

#[test]
fn blocks_freed_durably_are_not_allocated_before_they_are_released() {
    let (store, a) = allocator(&[64]);
    let used = take(&a, 0, None, 64);
    store.commit(&[Change::Use(used[0])]).unwrap();
    drop(a);
    let a = open(&store, &[64]);
    store.commit(&[Change::Free(used[0])]).unwrap();
    assert!(a.reserve(1).is_err());
    a.release_committed(used[0]);
    assert_eq!(take(&a, 0, None, 64), used);
}

#[test]
fn threads_never_get_the_same_block() {
    let (_store, a) = allocator(&[640, 640]);
    let got: Vec<Blocks> = std::thread::scope(|scope| {
        let work = |slice: SliceId| {
            let a = &a;
            move || {
                let mut mine: Vec<Blocks> = Vec::new();
                for round in 0..400u32 {
                    if a.reserve(7).is_ok() {
                        a.allocate(slice % 2, None, 7, &mut mine).unwrap();
                    }
                    if round % 3 == 0 && !mine.is_empty() {
                        a.release_uncommitted(mine.swap_remove(0));
                    }
                }
                mine
            }
        };
        let threads: Vec<_> = (0..4).map(|t| scope.spawn(work(t))).collect();
        threads
            .into_iter()
            .flat_map(|t| t.join().unwrap())
            .collect()
    });
    let mut all: Vec<(u16, u64)> = got
        .iter()
        .flat_map(|b| (b.first..b.first + u64::from(b.count)).map(|at| (b.slice, at)))
        .collect();
    let count = all.len();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), count);
    assert_eq!(a.available(), 1280 - count as u64);
    assert_eq!(a.reserved(), 0);
}

fn request(slice: SliceId, freed: bool, most: usize) -> LoanRequest {
    LoanRequest {
        slice,
        container: 0,
        within: 0..64,
        freed,
        run_least: 1,
        most,
    }
}

#[test]
fn lent_blocks_are_not_allocated_and_a_recall_returns_them() {
    let (_store, a) = allocator(&[64]);
    let loan = a.lend(&request(0, false, 100)).unwrap().unwrap();
    assert_eq!((loan.blocks.first, loan.blocks.count), (0, 16));
    assert!(loan.goes_on && loan.end == 16);
    // Lent blocks are not allocated and cannot be reserved, so every reservation can be used.
    assert_eq!((a.available(), a.free_of(0), a.reserved()), (48, 64, 0));
    assert!(a.reserve(49).is_err());
    let got = take(&a, 0, None, 48);
    assert!(got.iter().all(|b| b.first >= 16), "{got:?}");
    assert!(a.reserve(1).is_err());
    std::thread::scope(|scope| {
        let (waits, is_waiting) = std::sync::mpsc::channel();
        let full = scope.spawn({
            let a = &a;
            move || {
                waits.send(()).unwrap();
                let _all = a.recall();
                take(a, 0, None, 16)
            }
        });
        is_waiting.recv().unwrap();
        drop(loan);
        let got = full.join().unwrap();
        assert!(got.iter().all(|b| b.first < 16), "{got:?}");
    });
    assert_eq!((a.available(), a.free_of(0), a.reserved()), (0, 0, 0));
}

#[test]
fn nothing_is_lent_while_a_recall_exists() {
    let (_store, a) = allocator(&[64]);
    let recall = a.recall();
    std::thread::scope(|scope| {
        let lender = scope.spawn(|| a.lend(&request(0, false, 8)).unwrap().is_some());
        // The lender waits, so all blocks can be reserved however long the recall exists.
        for _ in 0..1000 {
            a.reserve(64).unwrap();
            a.unreserve(64);
            std::thread::yield_now();
        }
        drop(recall);
        assert!(lender.join().unwrap());
    });
    assert_eq!(a.available(), 64);
}

#[test]
fn recalls_in_turn_that_overlap_let_a_discard_have_its_turn() {
    let (_store, a) = allocator(&[64]);
    let first = a.recall_in_turn();
    std::thread::scope(|scope| {
        let (order, next) = std::sync::mpsc::channel();
        let (a, lent) = (&a, order.clone());
        scope.spawn(move || {
            let loan = a.lend(&request(0, false, 8)).unwrap();
            lent.send("loan").unwrap();
            drop(loan);
        });
        while a.lenders_waiting() == 0 {
            std::thread::yield_now();
        }
        let second = scope.spawn(move || {
            let _all = a.recall_in_turn();
            order.send("recall").unwrap();
        });
        while a.recalls_yielding() == 0 {
            assert!(
                !second.is_finished(),
                "the second recall did not let the lender go first"
            );
            std::thread::yield_now();
        }
        drop(first);
        assert_eq!(next.iter().collect::<Vec<_>>(), ["loan", "recall"]);
    });
}

#[test]
fn repeated_recalls_let_a_discard_have_its_turn() {
    let (_store, a) = allocator(&[64]);
    for round in 0..100 {
        let recall = a.recall();
        let lent = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let loan = a.lend(&request(0, false, 8)).unwrap();
                lent.store(loan.is_some(), std::sync::atomic::Ordering::SeqCst);
            });
            while a.lenders_waiting() == 0 {
                std::thread::yield_now();
            }
            drop(recall);
            let _all = a.recall_in_turn();
            let lent = lent.load(std::sync::atomic::Ordering::SeqCst);
            assert!(lent, "round {round}");
            assert_eq!(
                a.available(),
                64,
                "the recall did not wait for the end of the loan"
            );
        });
    }
}

#[test]
fn no_lender_waits_at_the_end_of_the_mount() {
    let (_store, a) = allocator(&[64]);
    let recall = a.recall();
    std::thread::scope(|scope| {
        let lender = scope.spawn(|| a.lend(&request(0, false, 8)).unwrap().is_some());
        a.lend_at_once();
        assert!(!lender.join().unwrap());
    });
    drop(recall);
    assert!(a.lend(&request(0, false, 8)).unwrap().is_some());
}

#[test]
fn freed_blocks_are_found_once_and_only_after_their_removal_is_durable() {
    let (store, a) = allocator(&[640]);
    a.remember_freed();
    let used = take(&a, 0, None, 40);
    store.commit(&[Change::Use(used[0])]).unwrap();
    store.commit(&[Change::Free(used[0])]).unwrap();
    assert!(!a.has_freed());
    assert!(a.lend(&request(0, true, 64)).unwrap().is_none());
    a.release_committed(used[0]);
    assert_eq!(a.next_freed(), Some((0, 0)));
    assert_eq!(a.next_freed(), None);
    let loan = a.lend(&request(0, true, 64)).unwrap().unwrap();
    assert_eq!(loan.blocks, used[0]);
    drop(loan);
    assert!(a.lend(&request(0, true, 64)).unwrap().is_none());
    assert!(!a.has_freed());
    assert_eq!(a.available(), 640);
}

#[derive(Clone, Debug)]
enum Step {
    Lend(SliceId, usize),
    Return(usize),
    Reserve(u64),
    Unreserve(u64),
    Allocate {
        slice: SliceId,
        near: Option<u64>,
        count: u32,
    },
    ReleaseUncommitted(usize),
    Commit,
    Remove(usize),
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (1u64..200).prop_map(Step::Reserve),
        1 => (1u64..100).prop_map(Step::Unreserve),
        5 => (0u16..3, proptest::option::of(0u64..400), 1u32..150)
            .prop_map(|(slice, near, count)| Step::Allocate { slice, near, count }),
        2 => any::<usize>().prop_map(Step::ReleaseUncommitted),
        2 => Just(Step::Commit),
        3 => any::<usize>().prop_map(Step::Remove),
        1 => Just(Step::Reopen),
        3 => (0u16..3, 1usize..64).prop_map(|(slice, most)| Step::Lend(slice, most)),
        2 => any::<usize>().prop_map(Step::Return),
    ];
    proptest::collection::vec(step, 1..80)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]
    /// Compares the allocator with a model that knows only the owned blocks and the number of reserved ones.
    #[test]
    fn every_block_has_one_owner_and_every_reservation_is_kept(steps in steps()) {
        const SLICES: [u64; 3] = [300, 64, 129];
        let total: u64 = SLICES.iter().sum();
        let (store, first) = allocator(&SLICES);
        // One allocator for each time that the volume is opened.
        let lives: Vec<OnceLock<Arc<Allocator>>> = vec![OnceLock::new(); steps.len() + 1];
        let mut a = lives[0].get_or_init(|| first);
        let mut life = 0;
        let mut loans: Vec<Loan<'_>> = vec![];
        let (mut fresh, mut durable): (Vec<Blocks>, Vec<Blocks>) = (vec![], vec![]);
        let mut reserved = 0;
        for step in steps {
            let owned: u64 = fresh.iter().chain(&durable).map(|b| u64::from(b.count)).sum();
            match step {
                Step::Reserve(n) => {
                    let lent: u64 = loans.iter().map(|l| u64::from(l.blocks.count)).sum();
                    let fits = reserved + owned + lent + n <= total;
                    prop_assert_eq!(a.reserve(n).is_ok(), fits);
                    if fits { reserved += n; }
                }
                Step::Unreserve(n) => {
                    let n = n.min(reserved);
                    a.unreserve(n);
                    reserved -= n;
                }
                Step::Allocate { slice, near, count } => {
                    let count = u64::from(count).min(reserved) as u32;
                    if count == 0 { continue; }
                    let mut out = vec![];
                    a.allocate(slice, near, count, &mut out).unwrap();
                    reserved -= u64::from(count);
                    prop_assert_eq!(out.iter().map(|b| b.count).sum::<u32>(), count);
                    for b in &out {
                        prop_assert!(b.first + u64::from(b.count) <= SLICES[usize::from(b.slice)]);
                        let lent = loans.iter().map(|loan| &loan.blocks);
                        for other in fresh.iter().chain(&durable).chain(lent) {
                            let apart = b.slice != other.slice
                                || b.first >= other.first + u64::from(other.count)
                                || other.first >= b.first + u64::from(b.count);
                            prop_assert!(apart, "{:?} was allocated again as {:?}", other, b);
                        }
                    }
                    fresh.extend(out);
                }
                Step::ReleaseUncommitted(i) if !fresh.is_empty() => {
                    let i = i % fresh.len();
                    a.release_uncommitted(fresh.swap_remove(i));
                }
                Step::Commit => {
                    let batch: Vec<_> = fresh.iter().map(|b| Change::Use(*b)).collect();
                    store.commit(&batch).unwrap();
                    durable.append(&mut fresh);
                }
                Step::Remove(i) if !durable.is_empty() => {
                    let i = i % durable.len();
                    let blocks = durable.swap_remove(i);
                    store.commit(&[Change::Free(blocks)]).unwrap();
                    a.release_committed(blocks);
                }
                Step::Reopen => {
                    // A crash loses reservations and uncommitted allocations.
                    fresh.clear();
                    reserved = 0;
                    loans.clear();
                    life += 1;
                    a = lives[life].get_or_init(|| open(&store, &SLICES));
                }
                Step::Lend(slice, most) => {
                    let loan = a.lend(&request(slice, false, most)).unwrap();
                    let owners = || fresh.iter().chain(&durable).chain(loans.iter().map(|l| &l.blocks));
                    if let Some(loan) = &loan {
                        let (first, end) = (loan.blocks.first, loan.blocks.first + u64::from(loan.blocks.count));
                        let apart = |other: &Blocks| {
                            other.slice != slice || other.first >= end || first >= other.first + u64::from(other.count)
                        };
                        prop_assert!(owners().all(apart));
                    }
                    loans.extend(loan);
                }
                Step::Return(i) if !loans.is_empty() => {
                    let i = i % loans.len();
                    drop(loans.swap_remove(i));
                }
                _ => {}
            }
            let owned: u64 = fresh.iter().chain(&durable).map(|b| u64::from(b.count)).sum();
            prop_assert_eq!(a.reserved(), reserved);
            let lent: u64 = loans.iter().map(|l| u64::from(l.blocks.count)).sum();
            prop_assert_eq!(a.available(), total - owned - reserved - lent);
            let free: u64 = (0..3).map(|s| a.free_of(s)).sum();
            prop_assert_eq!(free, total - owned);
        }
    }
}

fn lengths(slices: &[u64]) -> Vec<SpaceOptions> {
    let space = |blocks: &u64| SpaceOptions {
        blocks: *blocks,
        ..Default::default()
    };
    slices.iter().map(space).collect()
}

/// Returns the numbers of the blocks of slice 0, sorted.
fn numbers(ranges: &[Blocks]) -> Vec<u64> {
    let numbers = ranges
        .iter()
        .flat_map(|b| b.first..b.first + u64::from(b.count));
    let mut numbers: Vec<u64> = numbers.collect();
    numbers.sort_unstable();
    numbers
}

#[test]
fn a_full_slice_that_grows_gives_exactly_its_new_blocks() {
    // The last container is short, has its full length, or does not exist; the new one ends inside a container or with it.
    for old in [0, 36, 64, 100, 128] {
        for new in [old + 1, 128, 129, 300, 64 * 40] {
            if new <= old {
                continue;
            }
            let (_store, a) = allocator(&[old]);
            take(&a, 0, None, old as u32);
            assert!(matches!(a.reserve(1), Err(Error::Errno(28))));
            assert_eq!(a.grow(lengths(&[new])), new - old);
            assert_eq!((a.capacity_of(0), a.free_of(0)), (new, new - old));
            assert_eq!(a.available(), new - old);
            let got = take(&a, 0, None, (new - old) as u32);
            assert_eq!(numbers(&got), (old..new).collect::<Vec<_>>());
            assert!(matches!(a.reserve(1), Err(Error::Errno(28))));
            // The same size again changes nothing.
            assert_eq!(a.grow(lengths(&[new])), 0);
            assert!(matches!(a.reserve(1), Err(Error::Errno(28))));
        }
    }
}

#[test]
fn a_container_that_was_never_used_can_grow_and_is_then_loaded_with_its_new_length() {
    let (store, a) = allocator(&[150, 90]);
    let used = take(&a, 0, None, 10);
    store.commit(&[Change::Use(used[0])]).unwrap();
    assert_eq!(a.grow(lengths(&[1000, 90])), 850);
    assert_eq!((a.capacity_of(0), a.capacity_of(1)), (1000, 90));
    let mut got = take(&a, 0, Some(9), 990);
    got.extend(used);
    assert_eq!(numbers(&got), (0..1000).collect::<Vec<_>>());
    // The store's bitmaps agree with the new capacity.
    let again = open(&store, &[1000, 90]);
    assert_eq!((again.free_of(0), again.available()), (990, 1080));
    take(&again, 0, None, 990);
}

#[test]
fn while_a_slice_grows_each_block_is_given_to_one_caller() {
    const BLOCKS: u64 = 64 * 300 + 17;
    let (_store, a) = allocator(&[100]);
    let taken: Vec<AtomicU32> = (0..BLOCKS).map(|_| AtomicU32::new(0)).collect();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut held = 0;
                while held < BLOCKS / 4 {
                    if a.reserve(7).is_err() {
                        std::thread::yield_now();
                        continue;
                    }
                    let mut out = Vec::new();
                    a.allocate(0, None, 7, &mut out).unwrap();
                    for number in numbers(&out) {
                        let before = taken[number as usize].fetch_add(1, Ordering::Relaxed);
                        assert_eq!(before, 0, "block {number} was given twice");
                    }
                    if held % 3 == 0 {
                        for number in numbers(&out) {
                            taken[number as usize].store(0, Ordering::Relaxed);
                        }
                        out.drain(..)
                            .for_each(|blocks| a.release_uncommitted(blocks));
                        held += 1;
                    }
                    held += out.iter().map(|b| u64::from(b.count)).sum::<u64>();
                }
            });
        }
        let mut blocks = 100;
        while blocks < BLOCKS {
            blocks = (blocks + 111).min(BLOCKS);
            a.grow(lengths(&[blocks]));
        }
    });
    let used = taken
        .iter()
        .map(|t| u64::from(t.load(Ordering::Relaxed)))
        .sum::<u64>();
    assert_eq!(
        (a.free_of(0), a.available()),
        (BLOCKS - used, BLOCKS - used)
    );
    take(&a, 0, None, (BLOCKS - used) as u32);
}

#[test]
fn the_count_of_free_blocks_is_right_while_a_full_slice_grows() {
    const BLOCKS: u64 = 64 * 300;
    let (_store, a) = allocator(&[100, BLOCKS]);
    take(&a, 0, None, 100);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Space of the other slice is reserved, so these allocations need not wait for the end of a growth.
        let allocate = || {
            while !is_over.load(Ordering::Relaxed) {
                a.reserve(64).unwrap();
                let mut out = Vec::new();
                a.allocate(0, None, 64, &mut out).unwrap();
                out.retain(|blocks| blocks.slice == 1);
                out.into_iter()
                    .for_each(|blocks| a.release_uncommitted(blocks));
            }
        };
        scope.spawn(allocate);
        scope.spawn(allocate);
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let free = a.free_of(0);
                assert!(free <= a.capacity_of(0), "{free} blocks are free");
            }
        });
        for blocks in (100..BLOCKS).step_by(64) {
            a.grow(lengths(&[blocks, BLOCKS]));
            while a.free_of(0) > 0 {
                std::thread::yield_now();
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
}
