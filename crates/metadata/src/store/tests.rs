use std::sync::Arc;

use jericho_format::superblock::{CHUNKS_MAX, Superblock};
use jericho_storage::Device;
use jericho_volume::Blocks;

use super::*;
use crate::types::ROOT;

fn inode(kind: Kind) -> InodeRecord {
    InodeRecord {
        kind,
        perm: 0o755,
        nlink: 1,
        uid: 1000,
        gid: 1000,
        rdev: 0,
        generation: 7,
        size: 0,
        atime_ns: 1,
        mtime_ns: -2,
        ctime_ns: 3_000_000_001,
        btime_ns: 4,
        slice: Some(3),
        placement: None,
        threads: Default::default(),
        parent: ROOT,
        blocks: 3,
        target: (kind == Kind::Symlink).then(|| b"over/there"[..].into()),
    }
}

fn entry(dir: Ino, hash: u64, name: &str, ino: Ino) -> Change {
    Change::PutEntry {
        dir,
        hash,
        name: name.as_bytes().into(),
        ino,
        kind: Kind::File,
    }
}

fn blocks(first: u64, count: u32) -> Blocks {
    Blocks {
        slice: 0,
        first,
        count,
    }
}

#[test]
fn a_store_takes_no_more_chunks_than_the_superblock_has_room_for() {
    let device = crate::testing::formatted(64, 1);
    let volume = crate::testing::opened(&device);
    let views = |devices: &[Arc<dyn Device>]| (devices.to_vec(), ());
    let (region, ()) = crate::stores::regions(&volume, views).remove(0);
    let chunk = volume.superblocks().with(|s| s.chunks[0]);
    let before = region.chunks();
    // Another store has taken all entries but three since this one counted the free ones.
    let fill = |s: &mut Superblock| s.chunks.resize(CHUNKS_MAX - 3, chunk);
    volume.superblocks().update(&[], fill).unwrap();
    assert_eq!(region.add_spares(&[chunk; 8]).unwrap(), 3);
    assert_eq!(region.add_spares(&[chunk; 8]).unwrap(), 0);
    assert_eq!(region.chunks(), before + 3);
    assert_eq!(region.free_entries(), 0);
}

#[test]
fn what_was_committed_is_read_back() {
    let store = Store::in_memory(64).unwrap();
    let link = inode(Kind::Symlink);
    let extent = Extent {
        page: 9,
        blocks: blocks(100, 3),
        unwritten: true,
        summed: false,
    };
    store
        .commit(&[
            Change::PutInode(2, link.clone()),
            entry(1, 40, "b", 2),
            Change::PutExtent(2, extent),
            Change::PutXattr(2, b"user.a"[..].into(), b"x"[..].into()),
            Change::PutOrphan(2),
            Change::PutValue("cursor", 5),
        ])
        .unwrap();
    assert_eq!(store.inode(2).unwrap(), Some(link));
    assert_eq!(store.inode(3).unwrap(), None);
    assert_eq!(store.entry(1, 40, b"b").unwrap(), Some((2, Kind::File)));
    assert_eq!(store.extents(2).unwrap(), [extent]);
    assert_eq!(
        store.xattr(2, b"user.a").unwrap().as_deref(),
        Some(&b"x"[..])
    );
    assert_eq!(store.xattr_names(2).unwrap(), [b"user.a"[..].into()]);
    assert_eq!(store.orphans().unwrap(), [2]);
    assert_eq!(store.value("cursor").unwrap(), Some(5));
    assert_eq!(store.inode_count().unwrap(), 1);
}

#[test]
fn a_listing_never_ends_between_names_of_one_hash() {
    let store = Store::in_memory(64).unwrap();
    let batch: Vec<_> = ["a", "b", "c", "d"]
        .iter()
        .zip([5, 6, 6, 7])
        .map(|(n, h)| entry(1, h, n, 2))
        .collect();
    store.commit(&batch).unwrap();
    let names = |from, limit| {
        let entries = store.entries(1, from, limit).unwrap();
        entries
            .iter()
            .map(|e| String::from_utf8_lossy(&e.name).into_owned())
            .collect::<String>()
    };
    assert_eq!(names(0, 2), "abc");
    assert_eq!(names(0, 1), "a");
    assert_eq!(names(6, 1), "bc");
    assert_eq!(names(7, 9), "d");
}

#[test]
fn the_later_change_of_a_key_wins() {
    let store = Store::in_memory(64).unwrap();
    store
        .commit(&[
            entry(1, 1, "a", 2),
            Change::DelEntry {
                dir: 1,
                hash: 1,
                name: b"a"[..].into(),
            },
            Change::DelEntry {
                dir: 1,
                hash: 1,
                name: b"b"[..].into(),
            },
            entry(1, 1, "b", 3),
        ])
        .unwrap();
    assert_eq!(store.entry(1, 1, b"a").unwrap(), None);
    assert_eq!(store.entry(1, 1, b"b").unwrap(), Some((3, Kind::File)));
}

#[test]
fn bitmaps_follow_use_and_free_over_containers() {
    let store = Store::in_memory(64).unwrap();
    store.commit(&[Change::Use(blocks(60, 70))]).unwrap();
    assert_eq!(
        store.used_counts().unwrap(),
        [((0, 0), 4), ((0, 1), 64), ((0, 2), 2)]
    );
    store
        .commit(&[Change::Free(blocks(60, 5)), Change::Use(blocks(60, 1))])
        .unwrap();
    assert_eq!(
        store.used_counts().unwrap(),
        [((0, 0), 1), ((0, 1), 63), ((0, 2), 2)]
    );
    assert_eq!(store.bitmap(0, 0).unwrap().as_deref(), Some(&[1 << 60][..]));
    assert_eq!(store.bitmap(0, 3).unwrap(), None);
}

#[test]
fn a_batch_that_uses_a_block_twice_leaves_nothing_behind() {
    let store = Store::in_memory(64).unwrap();
    store.commit(&[Change::Use(blocks(0, 8))]).unwrap();
    let error = store
        .commit(&[entry(1, 1, "a", 2), Change::Use(blocks(7, 2))])
        .unwrap_err();
    assert!(
        matches!(&error, Error::Damaged(what) if what.contains("block 7")),
        "{error}"
    );
    assert_eq!(store.entry(1, 1, b"a").unwrap(), None);
    store.commit(&[Change::Free(blocks(0, 8))]).unwrap();
    assert_eq!(store.used_counts().unwrap(), []);
}

#[test]
fn the_page_on_the_format_lists_the_tables() {
    use redb::TableHandle;
    const PAGE: &str = include_str!("../../../../docs/formats/volume.md");
    let listed: Vec<&str> = PAGE
        .lines()
        .skip_while(|line| !line.starts_with("| table | key"))
        .skip(2)
        .map_while(|line| line.strip_prefix("| `")?.split('`').next())
        .collect();
    let tables: Vec<&str> = tables::ALL.iter().map(|table| table.name()).collect();
    assert_eq!(listed, tables);
}

#[test]
fn a_batch_that_names_blocks_of_no_slice_is_damage() {
    let store = Store::in_memory(64).unwrap();
    let use_blocks = |slice: u16, first: u64, count: u32| {
        let mut item = vec![3];
        item.extend_from_slice(&slice.to_le_bytes());
        item.extend_from_slice(&first.to_le_bytes());
        item.extend_from_slice(&count.to_le_bytes());
        item
    };
    for item in [
        use_blocks(0, 0, u32::MAX),
        use_blocks(1, 0, 1),
        use_blocks(0, u64::MAX, 2),
    ] {
        let replayed = store.replay_bytes(&item, &[1000]);
        assert!(
            matches!(replayed, Err(crate::Error::Damaged(_))),
            "{replayed:?}"
        );
    }
    store
        .replay_bytes(&use_blocks(0, 0, 1000), &[1000])
        .unwrap();
}
