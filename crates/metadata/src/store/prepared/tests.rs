use crate::errno::EIO;
use crate::store::Change;
use crate::testing::{file_batch, formatted, open_first, opened};

fn value(number: u64) -> [Change; 1] {
    [Change::PutValue("x", number)]
}

#[test]
fn a_batch_that_is_dropped_before_it_is_appended_has_no_effect() {
    let device = formatted(32, 1);
    let (store, allocator) = open_first(&opened(&device), 1 << 20);
    let files = file_batch(2, 100, &allocator);
    let dropped = store.prepare(&files).unwrap();
    let position = dropped.as_requirement(0).unwrap().unwrap();
    drop(dropped);
    assert_eq!(store.inode_count().unwrap(), 1);
    let kept = store.prepare(&value(7)).unwrap();
    assert_eq!(kept.as_requirement(0).unwrap(), Some(position));
    drop(kept);
    store.commit(&files).unwrap();
    let (found, _allocator) = open_first(&opened(&device.after_power_cut()), 1 << 20);
    assert_eq!(found.inode_count().unwrap(), 101);
    assert_eq!(found.value("x").unwrap(), None);
}

#[test]
fn an_appended_batch_is_durable_and_readers_see_it_when_it_is_published() {
    let device = formatted(32, 1);
    let (store, _allocator) = open_first(&opened(&device), 1 << 20);
    store.commit(&value(1)).unwrap();
    let mut prepared = store.prepare(&value(2)).unwrap();
    let begin = prepared.as_requirement(0).unwrap().unwrap();
    prepared.append(&[]).unwrap();
    assert_eq!(store.value("x").unwrap(), Some(1));
    let cut = device.after_power_cut();
    prepared.publish();
    assert_eq!(store.value("x").unwrap(), Some(2));
    let next = store
        .prepare(&value(3))
        .unwrap()
        .as_requirement(0)
        .unwrap()
        .unwrap();
    assert_eq!(
        (next.incarnation, next.seq),
        (begin.incarnation, begin.seq + 1)
    );
    let (found, _allocator) = open_first(&opened(&cut), 1 << 20);
    assert_eq!(found.value("x").unwrap(), Some(2));
}

#[test]
fn a_batch_that_is_durable_and_never_published_ends_all_changes() {
    let device = formatted(32, 1);
    let (store, _allocator) = open_first(&opened(&device), 1 << 20);
    let mut prepared = store.prepare(&value(2)).unwrap();
    prepared.append(&[]).unwrap();
    drop(prepared);
    assert!(store.commit(&value(3)).is_err());
    let (found, _allocator) = open_first(&opened(&device.after_power_cut()), 1 << 20);
    assert_eq!(found.value("x").unwrap(), Some(2));
}

#[test]
fn a_batch_that_is_dropped_with_its_group_ends_all_changes_with_the_error_only_if_it_was_appended()
{
    let device = formatted(32, 1);
    let (store, _allocator) = open_first(&opened(&device), 1 << 20);
    store.prepare(&value(1)).unwrap().abandon(&EIO);
    store.commit(&value(2)).unwrap();
    let mut prepared = store.prepare(&value(3)).unwrap();
    prepared.append(&[]).unwrap();
    prepared.abandon(&EIO);
    let error = store.commit(&value(4)).unwrap_err();
    assert_eq!(error.to_string(), EIO.to_string());
}

#[test]
fn batches_of_several_stores_can_be_prepared_together() {
    let devices = [formatted(32, 1), formatted(32, 1)];
    let stores = devices
        .each_ref()
        .map(|device| open_first(&opened(device), 1 << 20));
    let changes = value(5);
    let mut prepared = stores
        .each_ref()
        .map(|(store, _)| store.prepare(&changes).unwrap());
    for batch in &mut prepared {
        batch.append(&[]).unwrap();
    }
    for (store, _) in &stores {
        assert_eq!(store.value("x").unwrap(), None);
    }
    prepared.into_iter().for_each(|batch| batch.publish());
    for (store, _) in &stores {
        assert_eq!(store.value("x").unwrap(), Some(5));
    }
}

#[test]
fn a_journal_that_is_full_is_emptied_by_the_commit_that_finds_it_full() {
    let device = formatted(32, 1);
    let volume = opened(&device);
    let (store, _allocator) = open_first(&volume, 16 << 20);
    let ring_bytes = volume
        .superblocks()
        .with(|s| u64::from(s.slices[0].journal_blocks.get()) * 4096);
    let value: Box<[u8]> = vec![7; 60_000].into();
    let mut written = 0;
    while written < 3 * ring_bytes {
        let batch = [Change::PutXattr(1, b"user.x"[..].into(), value.clone())];
        let mut prepared = store.prepare(&batch).unwrap();
        assert!(!prepared.is_for_redb(), "the batch is not in the journal");
        prepared.append(&[]).unwrap();
        prepared.publish();
        written += value.len() as u64;
    }
}
