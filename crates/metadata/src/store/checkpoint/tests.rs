use std::sync::atomic::Ordering;

use jericho_volume::Blocks;

use crate::store::{Change, StoreRef};
use crate::testing::{file_batch, formatted, open_first, opened};

/// Files that are there after `commit_three`.
const FILES: u64 = 6;

/// Commits three batches whose rows depend on each other: blocks are used, freed and used again, and rows put, removed and put again.
fn commit_three(store: &StoreRef, allocator: &crate::alloc::Allocator) {
    let first = file_batch(2, FILES, allocator);
    let blocks: Vec<Blocks> = first
        .iter()
        .filter_map(|change| match change {
            Change::Use(blocks) => Some(*blocks),
            _ => None,
        })
        .collect();
    let half = &blocks[..blocks.len() / 2];
    store.commit(&first).unwrap();
    let mut second: Vec<Change> = half.iter().map(|blocks| Change::Free(*blocks)).collect();
    second.extend((2..5).map(Change::DelInode));
    store.commit(&second).unwrap();
    let mut third = vec![Change::Use(half[0]), Change::PutValue("x", 3)];
    third.extend(first.iter().filter_map(|change| match change {
        Change::PutInode(ino, inode) => Some(Change::PutInode(*ino, inode.clone())),
        _ => None,
    }));
    store.commit(&third).unwrap();
}

/// Inodes, a value, and the blocks in use by container.
type State = (u64, Option<u64>, Vec<((u16, u32), u32)>);

/// Returns what a reader sees.
fn state(store: &StoreRef) -> State {
    (
        store.inode_count().unwrap(),
        store.value("x").unwrap(),
        store.used_counts().unwrap(),
    )
}

#[test]
fn a_crash_between_any_two_pieces_of_a_checkpoint_loses_nothing() {
    let device = formatted(24, 1);
    let mut crashes = 0;
    for budget in 0.. {
        let cut = device.after_power_cut();
        let volume = opened(&cut);
        volume.mark_dirty().unwrap();
        let (store, allocator) = open_first(&volume, 16 << 20);
        commit_three(&store, &allocator);
        let before = state(&store);
        // Each row is a piece.
        store.room.set_piece_rows(1);
        cut.budget.store(budget, Ordering::Relaxed);
        let is_done = store.checkpoint().is_ok();
        let after = cut.after_power_cut();
        cut.budget.store(u64::MAX, Ordering::Relaxed);
        drop((store, allocator));
        let (store, _allocator) = open_first(&opened(&after), 16 << 20);
        assert_eq!(state(&store), before, "after {budget} writes");
        // The recovery has made a checkpoint.
        assert_eq!(before.0, FILES + 1);
        drop(store);
        let (store, _allocator) = open_first(&opened(&after.after_power_cut()), 16 << 20);
        assert_eq!(
            state(&store),
            before,
            "after {budget} writes and a second crash"
        );
        if is_done {
            break;
        }
        crashes += 1;
    }
    assert!(crashes > 60, "only {crashes} crashes");
}

#[test]
fn a_reader_sees_the_same_state_during_all_pieces_of_a_checkpoint() {
    let device = formatted(24, 1);
    let (store, allocator) = open_first(&opened(&device), 16 << 20);
    commit_three(&store, &allocator);
    store.room.set_piece_rows(1);
    let before = state(&store);
    let reads = std::thread::scope(|scope| {
        let checkpoint = scope.spawn(|| store.checkpoint().unwrap());
        let mut reads = 0;
        while !checkpoint.is_finished() {
            assert_eq!(state(&store), before);
            reads += 1;
        }
        reads
    });
    assert_eq!(state(&store), before);
    assert!(reads > 0);
    assert!(store.view.load().is_in_redb());
}

#[test]
fn a_region_that_is_full_of_long_attributes_has_room_for_every_checkpoint_of_removals() {
    let device = formatted(32, 1);
    let (store, allocator) = open_first(&opened(&device), 16 << 20);
    // Data takes all space, so that the region cannot grow.
    let all = allocator.available();
    allocator.reserve(all).unwrap();
    let mut held = Vec::new();
    allocator.allocate(0, None, all as u32, &mut held).unwrap();
    // A short attribute beside each long one: its removal copies the long one.
    let lengths = [65_536, 40, 20_000, 3000];
    let name = |index: usize| format!("user.{index}").into_bytes().into_boxed_slice();
    let mut made = 2;
    loop {
        let bytes: usize = lengths.iter().sum();
        let check = || store.check_room(lengths.len() as u64, bytes + 256);
        if check().is_err() && (!store.make_room(|| Ok(())).unwrap() || check().is_err()) {
            break;
        }
        let values = lengths.iter().enumerate();
        let put = |(index, length): (usize, &usize)| {
            Change::PutXattr(made, name(index), vec![7; *length].into())
        };
        store.commit(&values.map(put).collect::<Vec<_>>()).unwrap();
        made += 1;
    }
    store.checkpoint().unwrap();
    let chunks = store.region().unwrap().chunks();
    assert!(made > 12, "{made} files");
    // From the end, from the middle, and all others.
    for index in [1, 3, 0, 2] {
        for ino in (2..made).rev() {
            store.commit(&[Change::DelXattr(ino, name(index))]).unwrap();
            if ino % 3 == 0 {
                store.checkpoint().unwrap();
            }
        }
    }
    store.checkpoint().unwrap();
    assert_eq!(store.region().unwrap().chunks(), chunks);
    store.close().unwrap();
}
