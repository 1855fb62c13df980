//! Compares `docs/formats/volume.md` with the structs.

mod page;

use jericho_format::label::Label;
use jericho_format::record::{EntryValue, ExtentValue, InodeValue};
use jericho_format::superblock::{
    CHUNKS_AT, CHUNKS_MAX, COPY_FIRST_BLOCK, ChunkEntry, DEVICES_AT, DEVICES_MAX, DeviceEntry,
    HEAD_BLOCKS, OwnerRecord, REGIONS_AT, REGIONS_MAX, RegionEntry, SLICES_AT, SLICES_MAX,
    SliceEntry, SuperblockHead,
};
use page::{documented, table};

const PAGE: &str = include_str!("../../../docs/formats/volume.md");

#[test]
fn the_page_has_every_field_at_its_offset() {
    assert_eq!(
        documented(PAGE, "Label"),
        fields!(Label: magic version crc volume_uuid device_uuid device_index devices reserved0
            device_blocks reserved)
    );
    assert_eq!(
        documented(PAGE, "SuperblockHead"),
        fields!(SuperblockHead: magic version crc sequence volume_uuid hash_seed flags
            container_blocks chunk_blocks devices slices regions reserved0 chunks reserved1
            created_s owner reserved2 records incompatible read_only compatible reserved)
    );
    assert_eq!(
        documented(PAGE, "OwnerRecord"),
        fields!(OwnerRecord: boot_id machine started pid host_bytes reserved0 host)
    );
    assert_eq!(
        documented(PAGE, "DeviceEntry"),
        fields!(DeviceEntry: uuid blocks node path_bytes reserved path)
    );
    assert_eq!(
        documented(PAGE, "SliceEntry"),
        fields!(SliceEntry: blocks node first_region regions journal_first_block journal_blocks
            store_blocks)
    );
    assert_eq!(
        documented(PAGE, "RegionEntry"),
        fields!(RegionEntry: first_block blocks device reserved)
    );
    assert_eq!(
        documented(PAGE, "ChunkEntry"),
        fields!(ChunkEntry: first_block position device slice slice_first)
    );
    assert_eq!(
        documented(PAGE, "InodeValue"),
        fields!(InodeValue: version kind perm nlink uid gid rdev generation size atime_s mtime_s
            ctime_s btime_s atime_ns mtime_ns ctime_ns btime_ns parent slice placement target_bytes
            threads reserved0 blocks flags layout stripe_log2 columns column_filter born project
            reserved)
    );
    assert_eq!(
        documented(PAGE, "EntryValue"),
        fields!(EntryValue: ino kind reserved)
    );
    assert_eq!(
        documented(PAGE, "ExtentValue"),
        fields!(ExtentValue: first count slice flags born)
    );
}

#[test]
fn the_page_has_the_parts_of_the_superblock_at_their_offsets() {
    let parts: Vec<[usize; 3]> = table(PAGE, "Superblock")
        .iter()
        .map(|row| [1, 2, 3].map(|cell: usize| row[cell].parse().unwrap()))
        .collect();
    assert_eq!(
        parts,
        [
            [0, size_of::<SuperblockHead>(), 1],
            [DEVICES_AT, size_of::<DeviceEntry>(), DEVICES_MAX],
            [SLICES_AT, size_of::<SliceEntry>(), SLICES_MAX],
            [REGIONS_AT, size_of::<RegionEntry>(), REGIONS_MAX],
            [CHUNKS_AT, size_of::<ChunkEntry>(), CHUNKS_MAX],
        ]
    );
    let places: Vec<String> = table(PAGE, "What is where")
        .into_iter()
        .map(|mut r| r.remove(1))
        .collect();
    let copy = |n: usize, end: u64| format!("{} to {}", COPY_FIRST_BLOCK[n], end - 1);
    let expected = [
        "0".to_owned(),
        copy(0, COPY_FIRST_BLOCK[1]),
        copy(1, HEAD_BLOCKS),
        format!("from {HEAD_BLOCKS}"),
        "the rest".to_owned(),
    ];
    assert_eq!(places, expected);
}
